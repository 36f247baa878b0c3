"""What a sender asks before it sends, to see that the endpoint is ours; and what it is told."""

import hmac
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, cast

import msgspec

from receiver.described import Described
from receiver.extract import Locator, Reading, form_values, parse_locator

if TYPE_CHECKING:
    from receiver.verify import Delivery, Secret

#: Characters of a value that is sent back, or kept as a secret.
ECHO_CHARS_MAX = 512
#: Bytes of a body that is looked into before it is verified.
UNVERIFIED_BYTES_MAX = 16_384
#: Handshakes of one sender.
RULES_MAX = 16

METHODS = ("POST", "GET", "HEAD")
KEYS = ("when", "after_verify", "status", "content_type", "headers", "body", "capture_secret")

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# Headers of an answer that are not a rule's to choose.
_OURS = ("content-length", "content-type", "x-content-type-options", "x-request-id")
# What looks like a placeholder; other braces are the text's own, as in {"type":1}.
_PLACEHOLDER = re.compile(r"\{([a-z_]+:[^{}]*)\}")
# Printable ASCII: neither a header nor a body can be broken out of.
_ECHOED = re.compile(rb"[ -~]+")


class Place(msgspec.Struct, frozen=True):
    """Where a request has a value: `method`, `query:NAME`, or a locator of the delivery."""

    text: str
    # Of `query:NAME`.
    query: bytes | None = None
    at: Locator | None = None


class Condition(msgspec.Struct, frozen=True):
    """What must stand at a place: a value, anything (`*`), nothing, or a named secret."""

    place: Place
    kind: Literal["is", "there", "absent", "secret"]
    # Of `is` the value, of `secret` the secret's name.
    value: bytes = b""


class Piece(msgspec.Struct, frozen=True):
    """A piece of a template: literal text, or the value at a place, perhaps its HMAC."""

    text: bytes = b""
    place: Place | None = None
    hmac: bool = False


class Rule(msgspec.Struct, frozen=True):
    """One handshake of a sender."""

    method: str
    when: tuple[Condition, ...]
    after_verify: bool
    status: int
    content_type: str | None
    headers: tuple[tuple[str, tuple[Piece, ...]], ...]
    body: tuple[Piece, ...]
    capture_secret: Place | None


class Handshake(msgspec.Struct, frozen=True):
    """The answer to a handshake; `captured` is a secret to be kept before it is given."""

    status: int
    content_type: str | None
    headers: tuple[tuple[str, str], ...]
    body: bytes
    captured: bytes | None = None

    @property
    def all_headers(self) -> tuple[tuple[str, str], ...]:
        """What a browser must not take for a page of ours is marked as what it is."""
        given = () if self.content_type is None else (("Content-Type", self.content_type),)
        return (*given, ("X-Content-Type-Options", "nosniff"), *self.headers)

    def __repr__(self) -> str:
        return f"Handshake({self.status})"


class Unanswerable(Exception):
    """A handshake asks for something that is not sent back; the message says what."""


class Request(msgspec.Struct, frozen=True):
    """A delivery that may be a handshake, and the secrets of its source."""

    delivery: "Delivery"
    reading: Reading
    secrets: tuple["Secret", ...]

    def values(self, place: Place) -> list[bytes]:
        """All that stands there, each not empty."""
        if place.at is not None:
            return self.reading.raw(place.at)
        if place.query is None:
            return [self.delivery.method.encode(errors="replace")]
        query = self.delivery.url.partition("?")[2].partition("#")[0]
        return [v for v in form_values(query.encode(errors="replace"), place.query) if v]

    def single(self, place: Place) -> bytes:
        """The one value there, fit to be sent back. Raises Unanswerable."""
        values = self.values(place)
        if len(values) != 1:
            raise Unanswerable(f"{place.text} is {'there twice' if values else 'missing'}")
        value = values[0]
        if len(value) > ECHO_CHARS_MAX:
            raise Unanswerable(
                f"{place.text} has {len(value)} characters, at most {ECHO_CHARS_MAX} are sent back"
            )
        if not _ECHOED.fullmatch(value):
            raise Unanswerable(f"{place.text} is not printable ASCII")
        return value


def asked(rules: Sequence[Rule], request: Request, *, verified: bool) -> Rule | None:
    """The first rule of that stage that the request meets; never raises.

    Before it is verified, a request with a large body is no handshake: what anybody can send
    must cost little.
    """
    if not verified and len(request.reading.body) > UNVERIFIED_BYTES_MAX:
        return None
    stage = (rule for rule in rules if rule.after_verify == verified)
    method = request.delivery.method
    for rule in stage:
        if rule.method == method and all(_holds(one, request) for one in rule.when):
            return rule
    return None


def answer(rule: Rule, request: Request, secret: "Secret | None", *, armed: bool) -> Handshake:
    """What the sender is told; raises Unanswerable.

    `secret` is the one that the request is signed with, and makes what `hmac_hex` asks for.
    A secret that is known already is not captured again.
    """
    captured = None
    if rule.capture_secret is not None:
        captured = request.single(rule.capture_secret)
        if any([hmac.compare_digest(captured, known.value) for known in request.secrets]):
            captured = None
        elif not armed:
            raise Unanswerable("it offers a secret, and the source is not armed")
    in_json = rule.content_type == "application/json"
    return Handshake(
        status=rule.status,
        content_type=rule.content_type,
        headers=tuple(
            (name, _render(pieces, request, secret, False).decode())
            for name, pieces in rule.headers
        ),
        body=_render(rule.body, request, secret, in_json),
        captured=captured,
    )


def _holds(condition: Condition, request: Request) -> bool:
    at = condition.place.at
    if condition.kind == "absent" and at is not None:
        return not request.reading.has(at)
    values = request.values(condition.place)
    if condition.kind == "absent":
        return not values
    if condition.kind == "there":
        return bool(values)
    if condition.kind == "is":
        return values == [condition.value]
    name = condition.value.decode()
    # Every one is compared, each in constant time.
    found = [
        hmac.compare_digest(values[0] if len(values) == 1 else b"", secret.value)
        for secret in request.secrets
        if secret.name == name and secret.value
    ]
    return any(found)


def _render(
    pieces: Sequence[Piece], request: Request, secret: "Secret | None", in_json: bool
) -> bytes:
    return b"".join([_rendered(piece, request, secret, in_json) for piece in pieces])


def _rendered(piece: Piece, request: Request, secret: "Secret | None", in_json: bool) -> bytes:
    if piece.place is None:
        return piece.text
    value = request.single(piece.place)
    if piece.hmac:
        if secret is None:
            raise Unanswerable("it asks for a signature, and the source has no secret")
        return hmac.digest(secret.value, value, "sha256").hex().encode()
    return msgspec.json.encode(value.decode())[1:-1] if in_json else value


# From the table of a sender.


def parse(sender: Described) -> tuple[Rule, ...]:
    """The sender's `handshakes`."""
    tables = sender.table.get("handshakes", [])
    if not isinstance(tables, list) or len(tables) > RULES_MAX:
        sender.fail("handshakes", f"must be a list of tables, at most {RULES_MAX}")
        return ()
    readers = [sender.inner(f"handshakes[{i}]", table) for i, table in enumerate(tables)]
    rules = (_rule(reader) for reader in readers if not reader.failed)
    return tuple(rule for rule in rules if rule is not None)


def _rule(reader: Described) -> Rule | None:
    reader.unknown(KEYS)
    when = _when(reader)
    method = next((c.value.decode() for c in when if c.place.text == "method"), "POST")
    status = reader.table.get("status", 200)
    if not (type(status) is int and 200 <= status <= 299):
        reader.fail("status", "must be a status from 200 to 299")
    body = _template(reader, "body", reader.table.get("body", ""))
    capture = reader.table.get("capture_secret")
    rule = Rule(
        method=method,
        when=tuple(c for c in when if c.place.text != "method"),
        after_verify=reader.truth("after_verify"),
        status=cast(int, status),
        content_type=reader.text("content_type"),
        headers=_headers(reader),
        body=body,
        capture_secret=None if capture is None else _place(reader, "capture_secret", capture),
    )
    if not reader.failed:
        _check(reader, rule)
    return None if reader.failed else rule


def _check(reader: Described, rule: Rule) -> None:
    """What no single field can tell."""
    signs = any(piece.hmac for piece in rule.body)
    rules = [
        (
            "when",
            not rule.when and rule.method == "POST",
            "must say how such a request is told from a delivery",
        ),
        ("when", rule.method not in METHODS, f"method must be one of {', '.join(METHODS)}"),
        ("after_verify", rule.after_verify and rule.method != "POST", "only a POST is signed"),
        # It would sign whatever anybody asks it to.
        ("body", signs and not rule.after_verify, "has hmac_hex, which needs after_verify = true"),
        ("body", rule.status == 204 and bool(rule.body), "must be empty with status 204"),
        (
            "capture_secret",
            rule.capture_secret is not None and rule.after_verify,
            "is for a request that can't be verified yet; leave out after_verify",
        ),
    ]
    for key, broken, what in rules:
        if broken:
            reader.fail(key, what)


def _when(reader: Described) -> tuple[Condition, ...]:
    table = reader.table.get("when")
    if not isinstance(table, Mapping) or not table:
        reader.fail("when", 'must be a table, as in { "json:/type" = "url_verification" }')
        return ()
    found = [_condition(reader, text, wanted) for text, wanted in table.items()]
    return tuple(condition for condition in found if condition is not None)


def _condition(reader: Described, text: str, wanted: object) -> Condition | None:
    place = _place(reader, "when", text)
    if place is None:
        return None
    if text == "method" and wanted not in METHODS:
        reader.fail("when", f"method must be one of {', '.join(METHODS)}")
        return None
    if wanted == "*":
        return Condition(place, "there")
    if wanted == {"absent": True}:
        return Condition(place, "absent")
    if isinstance(wanted, Mapping) and [*wanted] == ["secret"] and _is_text(wanted["secret"]):
        return Condition(place, "secret", cast(str, wanted["secret"]).encode())
    if _is_text(wanted):
        return Condition(place, "is", cast(str, wanted).encode())
    if type(wanted) is int:
        return Condition(place, "is", b"%d" % wanted)
    reader.fail(
        "when",
        f'{text} must be a text, a whole number, "*" for anything, {{ absent = true }} '
        'or { secret = "NAME" }',
    )
    return None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _headers(reader: Described) -> tuple[tuple[str, tuple[Piece, ...]], ...]:
    table = reader.table.get("headers", {})
    if not isinstance(table, Mapping):
        reader.fail("headers", 'must be a table, as in { "X-Name" = "{header:X-Name}" }')
        return ()
    for name in table:
        if not _TOKEN.fullmatch(name) or name.lower() in _OURS:
            reader.fail("headers", f"{name!r} is not the name of a header that may be set here")
    return tuple((name, _template(reader, "headers", text)) for name, text in table.items())


def _template(reader: Described, key: str, text: object) -> tuple[Piece, ...]:
    if not isinstance(text, str) or not all(c.isascii() and c.isprintable() for c in text):
        reader.fail(key, "must be a text of printable ASCII")
        return ()
    pieces = []
    for i, part in enumerate(_PLACEHOLDER.split(text)):
        if i % 2:
            bare = part.removeprefix("hmac_hex:")
            place = _place(reader, key, bare)
            pieces.append(Piece(place=place, hmac=bare != part))
        elif part:
            pieces.append(Piece(part.encode()))
    return tuple(pieces)


def _place(reader: Described, key: str, text: object) -> Place | None:
    if text == "method":
        return Place("method")
    if isinstance(text, str) and text.startswith("query:") and len(text) > len("query:"):
        return Place(text, query=text.removeprefix("query:").encode())
    try:
        if isinstance(text, str):
            return Place(text, at=parse_locator(text))
    except ValueError:
        pass
    reader.fail(
        key, f"{text!r} is no place; write header:NAME, query:NAME, json:/path or form:field"
    )
    return None
