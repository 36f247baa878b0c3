"""No log, metric, response or error holds a secret or a payload, whatever goes wrong.

The same is looked for in every log of a run of the tests when it ends, in every answer that they
read, and in what every command prints.
"""

import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import canary
from tests.conftest import SECRETS, stripe_body
from tests.far_side import Far, answering, serving
from tests.processes import Place, placing
from tests.service import until

HANDLERS = """
import logging
from receiver import Park, Quarantine

def owe(event, tx):
    order = event.body["data"]["object"]
    match order["do"]:
        case "fail":
            raise ValueError(str(event.body))
        case "log":
            error = ValueError(order)
            logging.getLogger("founder").warning("order %s", order["id"], exc_info=error)
        case "send":
            tx.send("echo", data=event.body)
        case "sql":
            tx.sql("insert into nowhere values (?)", (str(event.body),))
"""
#: The other side says what it was sent.
ECHO = answering(
    b"HTTP/1.1 400 No\r\nContent-Length: 42\r\n\r\n" + canary.PAYLOAD.encode().ljust(42)
)
#: Not those that show what a handler or the other side said of a failure, in their own words.
COMMANDS = (
    *(("status",), ("parked", "list"), ("conflicts", "list"), ("alerts", "list")),
    *(("rejections", "list"), ("check",), ("audit", "list"), ("status", "--json")),
    *(("sources", "list"), ("sources", "show", "stripe"), ("links", "list"), ("ledger", "list")),
)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with serving(ECHO) as far, placing(tmp_path) as make:
        yield make(_destination(far), run="inside", handlers=HANDLERS)


def _destination(far: Far) -> str:
    return f'\n[destinations.echo]\nkind = "http"\nurl = "http://127.0.0.1:{far.port}/"\n'


def test_nothing_that_goes_wrong_tells_a_secret_or_a_payload(place: Place) -> None:
    running = place.serve()
    for do in ("fail", "log", "send", "sql", "nothing"):
        body = stripe_body(f"evt_{do}", "owe", id=do, do=do)
        place.post(running, "stripe", body)
        place.post(running, "stripe", body)
        place.post(running, "stripe", body + b" ")
        place.post(running, "queue", body)
    place.post(running, "stripe", f"{canary.PAYLOAD} is no JSON".encode())
    host, _, port = place.address(running).partition(":")
    for path, headers in (
        ("/webhooks/stripe", {"Stripe-Signature": f"t=1,v1={SECRETS['STRIPE']}"}),
        ("/webhooks/github", {"X-Hub-Signature-256": SECRETS["GITHUB"]}),
        ("/webhooks/stripe", {"Content-Encoding": "zstd"}),
        ("/elsewhere", {}),
    ):
        client = http.client.HTTPConnection(host, int(port), timeout=20)
        client.request("POST", path, stripe_body("evt_x", "owe"), headers)
        assert canary.found_in(client.getresponse().read().decode()) == []
        client.close()
    place.wait_for(1, "select count(*) from receiver_outbox where state = 'dead'")
    until(lambda: "reason=bad-signature" in running.log)
    admin = http.client.HTTPConnection(place.address(running, "admin"), timeout=20)
    admin.request("GET", "/metrics")
    metrics = admin.getresponse().read().decode()
    admin.close()

    for words in COMMANDS:
        ran = place.command(*words)
        assert canary.found_in(ran.stdout + ran.stderr) == [], (words, ran.stdout)
    assert running.stop() == 0

    assert "receiver_deliveries_total" in metrics
    assert canary.found_in(metrics) == []
    assert "outcome=" in running.log
    assert canary.found_in(running.log) == []
