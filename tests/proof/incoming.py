"""What is fuzzed of a delivery: the wire, its head, its body, its signature, why it is refused."""

import asyncio
import contextlib
import functools
import gzip
import ipaddress
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives import serialization
from uvicorn.config import Config
from uvicorn.server import ServerState

from receiver import app, config, explain, http, presets
from receiver.batch import NotSplit, split
from receiver.coded import CertificateMissing
from receiver.extract import TEXT_CHARS_MAX, Reading, canonical, find, whole
from receiver.handshakes import Handshake
from receiver.presets import BEARERS, Preset
from receiver.signing import encode, seal, sign, signer, url_with_secret
from receiver.verify import (
    BAD_SIGNATURE,
    EXPIRED,
    Contract,
    Delivery,
    Event,
    Rejected,
    Secret,
    reread,
    verify,
)
from tests import vectors
from tests.keys import Keys, keys_of
from tests.proof.inputs import NOW_MS, REQUESTS, RULES, URL, Made
from tests.vectors import VECTORS

#: Of a body that the wire may bring.
BODY_BYTES_MAX = 2_000

# Deliveries as text: a line with method and URL, headers, an empty line, the body.


def written(method: str, url: str, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bytes:
    lines = [f"{method} {url}".encode(), *(name + b": " + value for name, value in headers)]
    return b"\n".join(lines) + b"\n\n" + body


def read(text: bytes, received_ms: int) -> Delivery:
    head, _, body = text.partition(b"\n\n")
    first, *lines = head.split(b"\n")
    method, _, url = first.decode("latin-1").partition(" ")
    pairs = (line.partition(b": ") for line in lines[:100])
    # As the parser hands them on: of a name no blanks, of a value neither ends of line nor NUL.
    headers = tuple((name.lower(), value.strip(b" \t")) for name, _, value in pairs)
    return Delivery(method, url, headers, body, received_ms)


# Verification, of what nobody signed.


def verification() -> Made:
    """Deliveries that nobody signed: none is taken but those whose facts a sender once signed."""
    contracts = _contracts()
    given = [vectors.delivery(vector) for vector in VECTORS]
    known: dict[str, set[tuple[str, str]]] = {}
    for contract, delivery in zip(contracts, given, strict=True):
        # Whether it is a handshake may hang on what is not signed.
        plain = msgspec.structs.replace(contract.preset, handshakes=())
        contract = msgspec.structs.replace(contract, preset=plain)
        with contextlib.suppress(Rejected, CertificateMissing):
            judged = verify(contract, delivery)
            assert isinstance(judged, tuple)
            known.setdefault(plain.name, set()).update(map(_signed, judged))

    def run(text: bytes) -> None:
        if len(text) < 2:
            return
        number = int.from_bytes(text[:2]) % len(VECTORS)
        contract = contracts[number]
        delivery = read(text[2:], given[number].received_ms)
        if delivery.method not in ("POST", *contract.preset.methods):
            return  # no other reaches it
        judged = judge(contract, delivery)
        if judged is None or isinstance(judged, Handshake) or _may_be_anybodys(contract.preset):
            return
        for event in judged:
            facts = _signed(event)
            assert facts in known.get(contract.preset.name, ()), (
                f"forged: {contract.preset.name} {facts}"
            )

    seeds = [
        number.to_bytes(2) + written(one.method, one.url, one.headers, one.body)
        for number, one in enumerate(given)
    ]
    return run, seeds


def _contracts() -> list[Contract]:
    """Each vector's."""
    return [
        Contract("x", "x", presets.get(one["provider"]), vectors.secrets(one)) for one in VECTORS
    ]


def _signed(event: Event) -> tuple[str, str]:
    return event.event_id if event.id_signed else "", event.account


def _may_be_anybodys(preset: Preset) -> bool:
    """Whether the signature proves no id: bearers, and Twilio's, which joins names and values."""
    return any(scheme.algo in (*BEARERS, "twilio") for scheme in preset.schemes)


def judge(contract: Contract, delivery: Delivery) -> tuple[Event, ...] | Handshake | None:
    """What verification says; None where it refuses, which it has to do in its own words."""
    refused: Rejected | None = None
    url = ""
    try:
        judged = verify(contract, delivery)
    except Rejected as rejected:
        refused = rejected
    except CertificateMissing as missing:
        url = missing.url
    if refused is not None:
        assert refused.reason in (BAD_SIGNATURE, EXPIRED)
        for secret in contract.signing:
            assert len(secret.value) < 8 or secret.value.decode() not in refused.detail
        return None
    if url:
        assert url.startswith("https://api."), "nobody else is asked"
        return None
    if isinstance(judged, Handshake):
        check_greeting(judged)
    else:
        for event in judged:
            check_event(contract, event)
    return judged


def check_greeting(given: Handshake) -> None:
    answer = app.sized(given.status, given.body, given.all_headers)
    assert 200 <= answer.status < 300
    for name, value in answer.headers:
        assert (name + value).isascii()
        assert not {*b"\r\n"} & {*name, *value}
    assert len(answer.body) < 8 * 512
    assert answer.body.isascii()


def check_event(contract: Contract, event: Event) -> None:
    for text in (event.event_id, event.account, event.type, event.claimed_account or ""):
        assert len(text) <= max(TEXT_CHARS_MAX, 71), "it is stored in keys"
        assert not any(ord(c) < 32 for c in text)
        text.encode()
    assert event.event_id
    assert (event.defect is None) or event.defect
    canonical(event.body, event.content_type, contract.volatile)
    again = reread(
        contract,
        body=event.body,
        content_type=event.content_type,
        event_id=event.key_id,
        type=event.type,
        account=event.account,
        received_ms=event.received_ms,
        secret=event.secret,
        id_signed=event.id_signed,
        claimed_account=event.claimed_account,
    )
    assert (again.key_id, again.account) == (event.key_id, event.account)
    assert again.body_sha256 == event.body_sha256


# Verification, of what its sender signed.


def inside(stack: ExitStack) -> Made:
    """Bodies that their sender signed: sender, id, type and account in lines, then the body."""
    names = presets.names()
    keys = {name: keys_of(presets.get(name)) for name in names}
    # Most of the time would go into reading the same keys.
    stack.enter_context(pytest.MonkeyPatch.context()).setattr(
        serialization, "load_pem_private_key", functools.cache(serialization.load_pem_private_key)
    )
    contracts = {name: _contract(presets.get(name), keys[name]) for name in names}

    def run(text: bytes) -> None:
        if not text:
            return
        name = names[text[0] % len(names)]
        event_id, type_, account, body = (text[1:].split(b"\n", 3) + [b""] * 4)[:4]
        facts = [part.decode("latin-1") for part in (event_id, type_, account)]
        delivery = _delivery(contracts[name], keys[name], facts, body)
        if delivery is not None:
            judge(contracts[name], delivery)

    return run, [*_bodies_inside(names)]


def _contract(preset: Preset, keys: Keys) -> Contract:
    secrets = [Secret("env:S", keys.secret, name="webhook_id" if preset.by_certificate else None)]
    if keys.certificate is not None:
        secrets.append(Secret("env:C", keys.certificate, name="cert_pem"))
    return Contract("x", "x", preset, tuple(secrets))


def _delivery(contract: Contract, keys: Keys, names: Sequence[str], body: bytes) -> Delivery | None:
    """The body, signed; None for one that this sender could not send."""
    preset = contract.preset
    url = url_with_secret(preset, keys.secret, URL)
    try:
        by = signer(preset, keys.secret, keys.private)
        if (
            by.scheme.sig is not None and by.scheme.sig.kind != "header"
        ) or by.scheme.algo == "adyen":
            document = json.loads(body)
            seal(document, preset, by, now_ms=NOW_MS, token="t")
            body = encode(preset, document)
        event_id, type_, account = names
        pairs = sign(
            preset,
            keys.secret,
            body,
            now_ms=NOW_MS,
            event_id=event_id,
            type=type_,
            account=account,
            url=url,
            private_key=keys.private,
        )
    except (Rejected, ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return None
    headers = tuple(
        (name.lower().encode(), value.encode("latin-1", "replace")) for name, value in pairs
    )
    return Delivery("POST", url, headers, body, NOW_MS)


def _bodies_inside(names: Sequence[str]) -> Iterator[bytes]:
    for vector in VECTORS:
        if vector["provider"] in names:
            facts = vectors.facts(vector)
            three = [facts.get(part) or "a" for part in ("event_id", "event_type", "account")]
            head = bytes([names.index(vector["provider"])]) + "\n".join(three).encode()
            yield head + b"\n" + vectors.body(vector)


# Bodies.


def bodies() -> Made:
    """A sender's number and a body: what is read in it is short, and the same each time."""
    chosen = [presets.get(name) for name in presets.names()]

    def run(text: bytes) -> None:
        if not text:
            return
        preset, body = chosen[text[0] % len(chosen)], text[1:]
        reading = Reading((), body, preset.payload, preset.forms, URL, NOW_MS)
        for places in (preset.event_id, preset.event_type, preset.account):
            found = find(reading, places, "it")
            assert len(found.text) <= TEXT_CHARS_MAX
            assert not any(ord(c) < 32 or 0xD800 <= ord(c) < 0xE000 for c in found.text)
        for kind in ("json", "form"):
            document = whole(body, kind)
            assert (document.value is None) or document.problem is None
            digest = canonical(body, kind, preset.volatile)
            assert (digest is None) or len(digest) == 32
        if preset.batch is not None and reading.document.problem is None:
            with contextlib.suppress(NotSplit):
                for element in split(preset.batch, body):
                    assert element.body in body, "it is as it was sent"

    number = {preset.name: i for i, preset in enumerate(chosen)}
    return run, [bytes([number[one["provider"]]]) + vectors.body(one) for one in VECTORS]


# HTTP.


class _Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("192.0.2.1", 1), "sockname": ("192.0.2.2", 80)}.get(name, default)

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


class _Listener:
    """Connections of one listener, without sockets; the app takes every body."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        #: What the loop complained of.
        self.broken: list[Any] = []
        self.loop.set_exception_handler(lambda _, context: self.broken.append(context))
        self.config = Config(self._answer, interface="asgi3", log_config=None)
        self.config.load()
        self.limits = http.Limits(body_bytes_max=BODY_BYTES_MAX)

    def take(self, pieces: Sequence[bytes]) -> bytes:
        """What is written on a connection that these arrive on."""
        gate, transport = http.Gate(self.limits), _Transport()
        connection = http.Connection(gate, self.config, ServerState(), {}, self.loop)
        connection.connection_made(transport)
        for piece in pieces:
            if piece and not transport.closed:
                connection.data_received(piece)
                self._turn()
        connection.connection_lost(None)
        self._turn()
        assert gate.bytes_held == 0
        return transport.written

    def _turn(self) -> None:
        for _ in range(3):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        names = [name for name, _ in scope["headers"]]
        framing = names.count(b"content-length") + names.count(b"transfer-encoding")
        assert framing <= 1, "its length could be read in two ways"
        with contextlib.suppress(app.Refused, app.Disconnected):
            assert len(await app.read_body(receive, BODY_BYTES_MAX)) <= BODY_BYTES_MAX
        await app.respond(send, app.OK, "r-1")


def wire(stack: ExitStack) -> Made:
    """What comes over a connection, in two pieces: no answer is a 5xx, and nothing is left."""
    listener = _Listener()
    stack.callback(listener.loop.close)

    def run(text: bytes) -> None:
        cut = 1 + 8 * sum(text[:1])
        written = listener.take((text[1:cut], text[cut:]))
        assert not listener.broken, listener.broken
        assert not asyncio.all_tasks(listener.loop)
        assert not written or written.startswith(b"HTTP/1.1 ")
        assert b"HTTP/1.1 5" not in written

    return run, [bytes([cut]) + one for cut in (0, 4, 255) for one in REQUESTS]


# The head of a request.


def heads(folder: Path) -> Made:
    """Heads of requests: what they say of address, length and encoding is bounded."""
    trusted = [ipaddress.ip_network("192.0.2.0/24"), ipaddress.ip_network("2001:db8::/32"), "unix"]
    (folder / "receiver.toml").write_text(RULES)
    source = config.load(folder / "receiver.toml", environment={"STRIPE": "s"}).sources["stripe"]

    def run(text: bytes) -> None:
        delivery = read(text, NOW_MS)
        if not all(
            value.isdigit() for name, value in delivery.headers if name == b"content-length"
        ):
            return  # the parser lets no other through
        address = app.client_address(("192.0.2.1", 1), delivery.headers, trusted)
        assert len(str(address)) <= 300
        app.masked(delivery.url)
        with contextlib.suppress(app.Refused):
            compressed, host = app.check_headers(delivery.headers, source, 20_000)
            raw_path = delivery.url.encode("latin-1")
            app.sender_url(
                {"scheme": "http", "raw_path": raw_path, "query_string": b"a"}, source, host
            )
            if compressed:
                assert len(app.inflate(delivery.body, 20_000)) <= 20_000

    headers = [
        [(b"x-forwarded-for", b"203.0.113.9, [2001:db8::1]:80, 192.0.2.7:1")],
        [(b"x-forwarded-for", b"unknown, ::ffff:1.2.3.4"), (b"content-length", b"00019")],
        [(b"content-encoding", b"gzip"), (b"host", b"h\xff")],
    ]
    body = gzip.compress(b"{}" * 50) + gzip.compress(b"")
    return run, [written("POST", "/webhooks/x/secretsecretsecret", one, body) for one in headers]


# Why it was refused.


def explanations() -> Made:
    """Deliveries of which the operator asks why they were refused."""
    contracts = _contracts()
    _, seeds = verification()

    def run(text: bytes) -> None:
        if len(text) < 2:
            return
        number = int.from_bytes(text[:2]) % len(VECTORS)
        delivery = read(text[2:], VECTORS[number]["now"] * 1000)
        if delivery.method not in ("POST", "GET", "HEAD"):
            return
        found = explain.explain(contracts[number], delivery, contracts[:2])
        assert all(one.words for one in found)

    return run, seeds
