"""The shipped example for a sender that nobody knows yet: data alone, and each thing once."""

import hmac
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from receiver import starter
from receiver.config import load
from tests.far_side import answering, serving
from tests.service import Service, Start, services, until
from tests.test_app import Headers

SECRET = "a secret of the tests"
TAKEN = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
FACTS = ("event names", "ids", "signature", "retry rules", "scoping")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with services(tmp_path) as starting:
        yield starting


def example(folder: Path) -> str:
    starter.write(folder, live=False, secret=SECRET, example="feedback")
    return (folder / starter.CONFIG_NAME).read_text()


def with_messages(text: str) -> str:
    """The optional parts, as the comments say: the # taken away at send and the destination."""
    text = re.sub(r"^# (send = .*)$", r"\1", text, flags=re.MULTILINE)
    head, team = text.split("# [destinations.team]")
    return head + "[destinations.team]" + team.replace("\n# ", "\n")


def told(event_id: str, feedback_id: str, rating: int, type: str = "feedback.created") -> bytes:
    feedback = {"id": feedback_id, "text": "Too slow", "rating": rating}
    return json.dumps({"id": event_id, "type": type, "feedback": feedback}).encode()


def signed(body: bytes) -> Headers:
    at = str(int(time.time()))
    mac = hmac.new(SECRET.encode(), f"{at}.".encode() + body, "sha256").hexdigest()
    return [("X-Feedback-Signature", f"t={at},v1={mac}")]


def deliver(service: Service, body: bytes) -> str:
    answer = service.post("feedback", body, signed(body))
    return f"{answer.status} {answer.body.decode().strip()}"


def test_the_example_names_the_facts_to_confirm_and_marks_every_stand_in(tmp_path: Path) -> None:
    text = example(tmp_path)

    assert all(f"#   {fact}" in text for fact in FACTS)
    scheme = text.partition("\n[sources.feedback.scheme]\n")[2].partition("# The record")[0]
    values = [line for line in scheme.splitlines() if " = " in line]
    assert len(values) == 13
    assert all("# CONFIRM" in line for line in values)
    settings = load(tmp_path / "receiver.toml", environment={})
    assert settings.sources["feedback"].contract.secrets[0].value == SECRET.encode()
    assert oct((tmp_path / ".env").stat().st_mode)[-3:] == "600"


def test_a_feedback_is_recorded_told_and_escalated_once_however_often_it_comes(
    start: Start, tmp_path: Path
) -> None:
    text = with_messages(example(tmp_path))
    with serving(answering(TAKEN)) as team, (tmp_path / ".env").open("a") as env:
        env.write(f"TEAM_URL=http://127.0.0.1:{team.port}/hook\n")
        env.flush()
        service = start(text)
        low, high = told("evt_1", "f_1", 1), told("evt_2", "f_2", 5)

        answers = [deliver(service, body) for body in (low, high, low, high)]
        # Another event about the same feedback, and one that was changed on the way.
        again = deliver(service, told("evt_3", "f_1", 1))
        updated = deliver(service, told("evt_4", "f_1", 2, "feedback.updated"))
        later = deliver(service, told("evt_5", "f_3", 1, "feedback.updated"))
        forged = service.post("feedback", low + b" ", signed(low)).status
        until(lambda: service.value("select count(*) from receiver_outbox where state='sent'") == 4)

    assert answers == ["200 done", "200 done", "200 duplicate", "200 duplicate"]
    assert (again, updated, later, forged) == ("200 done", "200 done", "200 done", 401)
    recorded = service.rows("select subject, operation, kind from receiver_records order by 1, 2")
    assert recorded == [
        ("f_1", "escalate-feedback", "feedback-escalation"),
        ("f_1", "record-feedback", "feedback"),
        ("f_2", "record-feedback", "feedback"),
        ("f_3", "escalate-feedback", "feedback-escalation"),
    ]
    assert len(team.requests) == 4
    assert all(b"Too slow" in request for request in team.requests)


def test_a_redelivery_after_a_kill_finds_everything_done(start: Start, tmp_path: Path) -> None:
    service = start(example(tmp_path))
    body = told("evt_1", "f_1", 1)
    assert deliver(service, body) == "200 done"

    service.kill()
    service.start()

    assert deliver(service, body) == "200 duplicate"
    assert service.value("select count(*) from receiver_records") == 2


def test_a_refused_feedback_says_what_would_match(start: Start, tmp_path: Path) -> None:
    service = start(example(tmp_path))
    body = told("evt_1", "f_1", 1)

    answer = service.post("feedback", body + b"\n", signed(body))

    assert answer.status == 401
    request_id = answer.headers["x-request-id"]
    until(lambda: service.value("select count(*) from receiver_rejected") == 1)
    shown = service.command("rejections", "explain", request_id)
    assert "without the newline at its end" in shown.stdout, shown.stderr
