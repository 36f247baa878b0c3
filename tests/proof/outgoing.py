"""What is fuzzed of an event's way on: what selects from it, what is changed, sent and read."""

import contextlib
import functools
import json
import socket
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from email import message_from_bytes, policy
from pathlib import Path
from typing import Any

import msgspec
import pytest

from receiver import config, presets, reach, send_email
from receiver.client import Client, Found, Missing
from receiver.destinations import Email, Http, Owed, Policy, Result, Sent, render
from receiver.listing import Listing, Unreadable
from receiver.process import Processor
from receiver.replies import ACCEPTED
from receiver.select import Condition, Scope, Statement, Template, Unjudgeable, key_text
from receiver.select import Path as Selector
from receiver.send_http import HttpSender
from receiver.signing import sign
from receiver.verify import Delivery, verify
from store import links
from store.database import Store, Tx
from tests.proof.inputs import (
    ANSWERS,
    DOCUMENTS,
    EXPRESSIONS,
    MESSAGES,
    NOW_MS,
    OBJECT,
    RULES,
    URL,
    Made,
)

# Paths, conditions, templates and statements.


def selection() -> Made:
    """Expressions and documents, which any event may be: kind, expression, end of line, JSON."""

    def run(text: bytes) -> None:
        expression, _, document = text[1:].partition(b"\n")
        try:
            scope = Scope(msgspec.json.decode(document), {"_event": {"id": "evt_1"}})
            with warnings.catch_warnings(action="ignore"):
                evaluate = _evaluation(sum(text[:1]) % 6, expression.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return
        with contextlib.suppress(Unjudgeable):
            evaluate(scope)

    seeds = [
        bytes([kind]) + expression.encode() + b"\n" + document
        for kind in range(6)
        for expression in EXPRESSIONS
        for document in DOCUMENTS
    ]
    return run, seeds


def _evaluation(kind: int, text: str) -> Callable[[Scope], object]:
    match kind:
        case 0:
            path = Selector.compile(text)
            return lambda scope: key_text(path.value(scope), "it")
        case 1:
            return Condition.compile({text: {"gt": 1}}).unmet
        case 2:
            return Condition.compile({"a": {"matches": text}, "@": {"exists": True}}).unmet
        case 3:
            return Template.compile({"a": text, "b": [text]}).render
        case 4:
            return Statement.compile(f"select {text}").bind
    return Condition.compile({"a": {"in": [text, 1]}, "b": {"ne": text}}).holds


# What is sent.


def messages() -> Made:
    """Documents that messages are made of: none adds a header, a recipient or a line."""
    values = Template.compile
    whole = {"all": "{@}", "id": "{id}"}
    mail = _mail("{mail}", "{id}", "{text}")
    given = {"X-Id": values("{id} {n}")}
    places = (Http("api", "http://h/", json=values(whole), headers=given), Http("b", "http://h/"))

    def run(text: bytes) -> None:
        try:
            document = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            return
        for place in (*places, mail):
            with contextlib.suppress(Unjudgeable):
                body = render(place, Scope(document, {}), {"operation_key": "op_1"})
                body = msgspec.json.decode(msgspec.json.encode(body))
                _check_mail(body) if place is mail else _check_headers(body)

    return run, list(MESSAGES)


def _mail(*to_subject_text: str) -> Email:
    to, subject, text = map(Template.compile, to_subject_text)
    return Email("mail", "smtp://u:p@h", "us@example.com", to, subject, text)


def _check_headers(body: dict[str, Any]) -> None:
    for value in body["headers"].values():
        assert not any(byte < 32 or byte == 127 for byte in value.encode())


def _check_mail(body: dict[str, Any]) -> None:
    mail = send_email.compose(sender="us@example.com", **body, name="op_1", created_ms=NOW_MS)
    raw = mail.as_bytes()
    assert raw.isascii()
    assert b"\r" not in raw.replace(b"\r\n", b"")
    names = [name for name, _ in message_from_bytes(raw, policy=policy.SMTP).raw_items()]
    assert sorted(names) == sorted(HEADERS), names
    assert len(mail["To"].addresses) == 1


HEADERS = (
    *("From", "To", "Subject", "Date", "Message-ID", "Auto-Submitted", "MIME-Version"),
    *("Content-Type", "Content-Transfer-Encoding"),
)


# What comes back of what is sent, and what a sender's API answers.


class _FarSide:
    """Answers every connection with the same bytes."""

    def __init__(self) -> None:
        self.answer = b""
        self._open: list[socket.socket] = []

    def connect(self, host: str, port: int, deadline: reach.Deadline) -> reach.Socket:
        ours, theirs = socket.socketpair()
        theirs.sendall(self.answer)
        theirs.shutdown(socket.SHUT_WR)
        self._open.append(theirs)
        made = reach.Socket(fileno=ours.detach())
        made.deadline, made.peer = deadline, "127.0.0.1"
        return made

    def close(self) -> None:
        for one in self._open:
            one.close()
        self._open.clear()


def answers(stack: ExitStack) -> Made:
    """Bytes that another side answers: each is a result, in one short line."""
    far = _FarSide()
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(reach, "connect", far.connect)
    # To read what the system trusts takes longer than all else.
    patch.setattr(reach, "trusting", functools.cache(reach.trusting))
    asks = (_posting(), _mailing(), _asking("/v1/x/in_1"), _asking("/v1/events"))

    def run(text: bytes) -> None:
        far.answer = text[1:]
        try:
            said = asks[sum(text[:1]) % len(asks)]()
        finally:
            far.close()
        assert len(said) < 700
        assert "\n" not in said

    kinds = (0, 1, 2, 0, 1, 2, 0, 1, 3)
    return run, [bytes([kind]) + one for kind, one in zip(kinds, ANSWERS, strict=True)]


def _posting() -> Callable[[], str]:
    sender, body = HttpSender(), {"json": {"a": 1}, "headers": {}}
    # No connection is used twice.
    to = Http("api", "http://h/", policy=Policy(ambiguous="review"))
    return lambda: _said(sender.send(to, Owed("op_1", "c_1", 1, NOW_MS, body), NOW_MS))


def _mailing() -> Callable[[], str]:
    body = {"to": "a@b.example", "subject": "s", "text": "t\n.\n"}
    to = _mail("a", "a", "a")
    return lambda: _said(send_email.send(to, Owed("op_1", "c_1", 1, NOW_MS, body)))


def _asking(path: str) -> Callable[[], str]:
    sender = presets.api_of(presets.get("stripe"))
    client = Client(config.Api(b"sk_test_1", "http://h", sender), livemode=False)
    assert sender.events is not None

    def ask() -> str:
        reply = client.ask("GET", path, now_ms=NOW_MS)
        client.close()
        if isinstance(reply, Found):
            with contextlib.suppress(Unreadable):
                _read_page(sender.events, reply)
            return ""
        return _said(reply)

    return ask


def _read_page(listing: Listing | None, reply: Found) -> None:
    assert listing is not None
    for item in listing.page(reply.document, reply.headers).items:
        assert listing.time_ms(item) >= 0
        assert listing.item_id(item)
        listing.item_type(item)


def _said(result: Result | Missing) -> str:
    return result.detail if isinstance(result, Sent) else result.why


# One transaction.


def transaction(folder: Path, stack: ExitStack) -> Made:
    """Bodies that their sender signed, under rules of every kind: none fails, nor is it lost."""
    (folder / "receiver.toml").write_text(RULES)
    settings = config.load(folder / "receiver.toml", environment={"STRIPE": "whsec_x"})
    processor = Processor.load(settings)
    store = Store.create(folder / "receiver.db", lambda: NOW_MS)
    stack.callback(store.close)
    store.write(processor.start)
    store.write(lambda tx: links.add(tx, "stripe", "", "cus_1", "acme"))
    store.write(lambda tx: tx.db.execute("create table app (a any, b any)"))
    contract = settings.sources["stripe"].contract

    def run(text: bytes) -> None:
        pairs = sign(contract.preset, b"whsec_x", text, now_ms=NOW_MS)
        headers = tuple((name.lower().encode(), value.encode()) for name, value in pairs)
        judged = verify(contract, Delivery("POST", URL, headers, text, NOW_MS))
        assert isinstance(judged, tuple)

        def receive_twice(tx: Tx) -> set[str]:
            return {processor.receive(tx, judged, f"r-{number}").word for number in range(2)}

        assert store.rehearse(receive_twice) <= {*ACCEPTED} - {"pending", "conflict", "dead"}

    bodies = [
        {"id": "evt_1", "type": kind, "livemode": False, "data": {"object": OBJECT}}
        for kind in "abcdef"
    ]
    return run, [json.dumps(body).encode() for body in bodies]
