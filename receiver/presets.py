"""The senders, as data in senders/NAME.toml: how each one signs, and where its ids are."""

import base64
import binascii
import contextlib
import functools
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, cast

import msgspec

from receiver import adyen, api, batch, handshakes, paypal, replies, twilio
from receiver.api import SenderApi
from receiver.batch import Batch
from receiver.coded import Certificate, Coded, Verifier
from receiver.described import Described
from receiver.extract import Locator, parse_locator, parse_mask
from receiver.handshakes import Rule
from receiver.replies import Reply
from receiver.select import nearest_or_all

Table = Mapping[str, object]

# Each file is what a founder may write under `scheme` in the config, in the same words.
#
# How it signs, once, or several times under `schemes` (tried in order):
#   sig             where the signature is: header:NAME, json:/path, form:field, form:field#/path
#   item_sep        splits one header value into items; repeated headers are all read
#   kv_sep          splits an item into key and value; then only items keyed `sig_key` are
#                   signatures, and one keyed `ts_key` is the timestamp
#   algo            sha256, sha1, sha512 (HMAC), ed25519, ecdsa-p256-sha256, token, basic, none;
#                   or twilio, adyen, paypal: code, which knows all the rest but `secret`
#   enc             hex (lower case, unless hex_any_case = true) or base64 (strict)
#   signed          what the signature covers: text with {body} {ts} {id} {url} {method} {payload}
#                   {json:/path} {header:NAME}
#   secret          how the key comes from the secret's text: utf8, hex, base64, base64:PREFIX
#   id, ts          where the values of {id} and {ts} are; ts_unit is s, ms or iso
#   tolerance_s     how old a delivery may be: 300 where a time is signed and nothing is said,
#                   false for any age; future_s how far ahead (default: the same)
#   only_if_absent  this scheme counts only where that header is missing
#
# What it says, each a place or a list of places (extract.parse_locator), of which the first that
# is not empty counts:
#   event_id, event_type, account, event_time
#   livemode        a place in the body; or { at = PLACE, live = VALUE, test = VALUE }
#   key             ["id", "type"] where one id is sent for several types
#   payload         the form field that holds the JSON where the sender posts a form
#   volatile        fields that differ between deliveries of one event
#
# How it talks:
#   handshakes      tables with `when` ({ place = value }, where a place is method, query:NAME or
#                   one of the above, and a value a text, a number, "*" for anything,
#                   { absent = true } or { secret = "NAME" }), `after_verify`, `status`,
#                   `content_type`, `headers`, `body` (texts with {query:NAME} {json:/path}
#                   {header:NAME} {hmac_hex:PLACE}), and `capture_secret`, the place of a secret
#                   that is kept while the operator has armed the source
#   batch           where the elements are, as in json:/events/*; each is an event of its own,
#                   and what it says is looked for in the element alone
#   batch_account   where the account of an element is that does not say it, json:/entry/*/id
#   batch_signed    "whole" (default), or "each" where every element has a signature of its own
#   statuses        what is answered in place of the usual, by the outcome's word, `accepted`
#                   (each that is 200 otherwise), `rejected` or `forbidden`: a status, or
#                   { status, body } where the body is not that word
#
# What people are told:
#   title, docs     the sender's name, and where it describes its webhooks
#   secret_shape    { matches = REGEX, words = ... }: what a secret of this sender looks like
#   deadline_s      how long it waits for an answer
#   retry, recover  when it sends again by itself, and how to get what never came
#   notes           what else the operator should know
# And under `api`, what receiver/api.py says of the sender's API.

# Of a secret in a URL's path: characters that stand there as they are, and how many at least.
PATH_SECRET_CHARS_MIN = 16
_PATH_SECRET = re.compile(rb"[A-Za-z0-9_-]{%d,}" % PATH_SECRET_CHARS_MIN)

HMACS = ("sha256", "sha1", "sha512")
PUBLIC_KEYS = ("ed25519", "ecdsa-p256-sha256")
# The secret itself is sent, so nothing of the delivery is signed.
BEARERS = ("token", "basic", "none")
# What needs code, and takes no more of the fields than `secret`.
CODED: Mapping[str, Coded] = MappingProxyType(
    {"twilio": twilio.SCHEME, "adyen": adyen.SCHEME, "paypal": paypal.SCHEME}
)

_PLACEHOLDERS = ("body", "ts", "id", "url", "method", "payload")
_SCHEME_KEYS = (
    *("sig", "item_sep", "kv_sep", "sig_key", "ts_key", "algo", "enc", "hex_any_case", "signed"),
    *("secret", "id", "ts", "ts_unit", "tolerance_s", "future_s", "only_if_absent"),
)
_SENDER_KEYS = (
    *("event_id", "event_type", "account", "event_time", "livemode", "key", "payload", "volatile"),
    *("title", "docs", "secret_shape", "deadline_s", "retry", "recover", "notes"),
    *("handshakes", "batch", "batch_account", "batch_signed", "statuses", "api"),
)

# Not by importlib.resources, which takes longer to import than a sender to read.
_FOLDER = Path(__file__).with_name("senders")

#: How old a delivery may be by default, in seconds, where its time is signed.
TOLERANCE_S = 300.0

_PLACES = ("event_id", "event_type", "account", "event_time")

T = TypeVar("T")


class PresetError(ValueError):
    """A scheme table that can't be used; `problems` has one "key: what is wrong" for each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class SecretError(ValueError):
    """A secret from which no key can be made; never says anything of the secret itself."""


class CryptographyMissing(SecretError):
    """The optional package `cryptography` is needed for a public key, and is not installed."""


class Part(msgspec.Struct, frozen=True):
    """A piece of what is signed: literal `text`, a placeholder of _PLACEHOLDERS, or `at`."""

    kind: str
    text: bytes = b""
    at: Locator | None = None


class Derivation(msgspec.Struct, frozen=True):
    """How a key comes from the text of a secret."""

    kind: Literal["utf8", "hex", "base64"]
    prefix: bytes = b""
    # Without it, the key would count for a scheme that it was not made for.
    prefix_required: bool = False


class Scheme(msgspec.Struct, frozen=True):
    """One way to sign, parsed; the fields are those of the table."""

    algo: str
    sig: Locator | None = None
    item_sep: bytes | None = None
    kv_sep: bytes | None = None
    sig_key: bytes | None = None
    ts_key: bytes | None = None
    enc: str = "hex"
    hex_any_case: bool = False
    signed: tuple[Part, ...] = ()
    secret: tuple[Derivation, ...] = (Derivation("utf8"),)
    id: Locator | None = None
    ts: Locator | None = None
    ts_unit: str = "s"
    tolerance_s: float | None = None
    future_s: float | None = None
    only_if_absent: Locator | None = None

    def vouches_for(self, locator: Locator) -> bool:
        """Whether a good delivery proves what stands there.

        The body is proved where it is signed, or where the sender shows the secret itself; a
        header only where it is part of what is signed.
        """
        return all(map(self._vouches_for, locator.places))

    def _vouches_for(self, locator: Locator) -> bool:
        # Whoever sends a delivery once more decides when it is received.
        if locator.kind == "received":
            return False
        if self.algo in BEARERS:
            return locator.kind != "header"
        if self.algo in CODED:
            return CODED[self.algo].vouches_for(locator)
        if locator.kind not in ("header", "path") and self.has("body", "payload"):
            return True
        return (
            (locator.same(self.id) and self.has("id"))
            or (locator.same(self.ts) and self.has("ts"))
            or any(locator.same(part.at) for part in self.signed)
        )

    @property
    def signs_url(self) -> bool:
        return CODED[self.algo].signs_url if self.algo in CODED else self.has("url")

    def has(self, *placeholders: str) -> bool:
        return any(part.kind in placeholders for part in self.signed)


class Mode(msgspec.Struct, frozen=True):
    """Where an event says whether it is live, and what it says there."""

    at: Locator
    live: str | bool = True
    test: str | bool = False


class Shape(msgspec.Struct, frozen=True):
    """What a secret of a sender looks like, as a whole."""

    matches: str
    words: str


class Preset(msgspec.Struct, frozen=True):
    """One sender, parsed."""

    name: str
    schemes: tuple[Scheme, ...]
    event_id: tuple[Locator, ...] = ()
    event_type: tuple[Locator, ...] = ()
    account: tuple[Locator, ...] = ()
    event_time: tuple[Locator, ...] = ()
    livemode: Mode | None = None
    keyed_by_type: bool = False
    payload: bytes | None = None
    volatile: tuple[str, ...] = ()
    # The sender posts plain forms too: a locator asks for a form's field.
    forms: bool = False
    title: str = ""
    docs: str | None = None
    secret_shape: Shape | None = None
    deadline_s: float | None = None
    retry: str | None = None
    recover: str | None = None
    notes: tuple[str, ...] = ()
    handshakes: tuple[Rule, ...] = ()
    batch: Batch | None = None
    # By the outcome's word; None where all are the usual ones.
    statuses: tuple[tuple[str, Reply], ...] | None = None
    #: None: that of our own data, which `api_of` reads where it is asked for.
    api: SenderApi | None = SenderApi()
    # The sender hands its secret over in a handshake.
    captures: bool = False

    @property
    def signs_url(self) -> bool:
        """Whether a signature says anything of the URL."""
        return self.in_path or any(scheme.signs_url for scheme in self.schemes)

    @property
    def in_path(self) -> bool:
        """Whether the secret is a part of the URL, as the sender can show it nowhere else."""
        return any(scheme.sig is not None and scheme.sig.kind == "path" for scheme in self.schemes)

    @property
    def signs_time(self) -> bool:
        """Whether the time is signed, so that the age of a delivery can be judged."""
        return any(map(_has_ts, self.schemes))

    def ids(self, scheme: Scheme) -> tuple[Locator, ...]:
        """Where the id of a delivery is that a scheme proves: the one it signs, if it does."""
        signed = tuple(at for at in self.event_id if at.same(scheme.id))
        return signed or self.event_id

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods of its handshakes."""
        return tuple(dict.fromkeys(rule.method for rule in self.handshakes))

    @property
    def named_secrets(self) -> tuple[str, ...]:
        """The secrets by name that its handshakes ask for."""
        asked = (c for rule in self.handshakes for c in rule.when if c.kind == "secret")
        return tuple(dict.fromkeys(condition.value.decode() for condition in asked))

    @property
    def by_certificate(self) -> bool:
        """Whether the sender signs with a certificate that is fetched from it."""
        return any(scheme.algo == "paypal" for scheme in self.schemes)


@functools.cache
def names() -> tuple[str, ...]:
    """The senders there are, in alphabetical order; no file is read for it."""
    found = (file.name for file in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml")))


def table(name: str) -> Table:
    """The table of that name as it is written; PresetError lists the names when there is none."""
    if name not in names():
        raise PresetError([f"no preset is called {name!r}{nearest_or_all(name, names())}"])
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text("utf-8"))


@functools.cache
def get(name: str) -> Preset:
    """The preset of that name; PresetError as `table`."""
    whole = {key: value for key, value in table(name).items() if key != "api"}
    return msgspec.structs.replace(parse(whole, name), api=None)


def api_of(preset: Preset) -> SenderApi:
    """The sender's API."""
    return _own_api(preset.name) if preset.api is None else preset.api


@functools.cache
def _own_api(name: str) -> SenderApi:
    return parse(table(name), name).api or SenderApi()


def parse(table: Table, name: str = "custom") -> Preset:
    """Check and compile one table of the form above; PresetError lists every problem."""
    sender = Described(table)
    schemes = _schemes(sender)
    if not _kept_apart(schemes):
        sender.fail(
            "schemes",
            "a public key is no secret: where one of them takes one, each needs a "
            '`secret = "base64:PREFIX"` with a prefix of its own',
        )
    places: dict[str, Any] = {key: sender.locators(key) for key in _PLACES}
    livemode = _mode(sender)
    key = sender.texts("key")
    if key not in ((), ("id",), ("id", "type")):
        sender.fail("key", 'must be ["id"] or ["id", "type"]')
    payload = sender.text("payload")
    for path in (volatile := sender.texts("volatile")):
        sender.attempt("volatile", parse_mask, path)
    told = _told(sender, name)
    talk = _talk(sender, schemes, places["event_id"])
    described = api.parse(sender.inner("api", table.get("api", {})))
    if sender.problems:
        raise PresetError(sender.problems)
    sources = [at for key in _PLACES for one in places[key] for at in one.places]
    return Preset(
        name=name,
        schemes=_with_prefixes(schemes),
        livemode=livemode,
        keyed_by_type=key == ("id", "type"),
        payload=payload.encode() if payload is not None else None,
        volatile=volatile,
        forms=any(at.kind == "form" and at.pointer is None for at in sources),
        api=described,
        **places,
        **told,
        **talk,
    )


def _talk(
    sender: Described, schemes: Sequence[Scheme], event_id: Sequence[Locator]
) -> dict[str, Any]:
    """How it talks: handshakes, batches and the answers that it wants."""
    rules = handshakes.parse(sender)
    split = batch.parse(
        sender,
        event_id=[place for at in event_id for place in at.places],
        body_proved=all(scheme.algo in BEARERS or scheme.has("body") for scheme in schemes),
    )
    return {
        "handshakes": rules,
        "captures": any(rule.capture_secret is not None for rule in rules),
        "batch": split,
        "statuses": replies.parse(sender),
    }


def _mode(sender: Described) -> Mode | None:
    value = sender.table.get("livemode")
    if not isinstance(value, Mapping):
        at = sender.locator("livemode")
        mode = None if at is None else Mode(at)
    else:
        reader = sender.inner("livemode", value)
        reader.unknown(("at", "live", "test"))
        at = reader.locator("at")
        if at is None and "at" not in reader.table:
            reader.fail("at", "is missing; write json:/path")
        mode = None if at is None else Mode(at, reader.value("live"), reader.value("test"))
    if mode is not None and mode.at.kind not in ("json", "form"):
        sender.fail("livemode", "must be in the signed body; write json:/path")
    return mode


def _told(sender: Described, name: str) -> dict[str, Any]:
    """What people are told; nothing of it is used to judge a delivery."""
    return {
        "title": sender.text("title") or name,
        "docs": sender.text("docs"),
        "secret_shape": _shape(sender),
        "deadline_s": sender.seconds("deadline_s"),
        "retry": sender.text("retry"),
        "recover": sender.text("recover"),
        "notes": sender.texts("notes"),
    }


def _shape(sender: Described) -> Shape | None:
    if "secret_shape" not in sender.table:
        return None
    reader = sender.inner("secret_shape", sender.table["secret_shape"])
    reader.unknown(("matches", "words"))
    matches, words = reader.text("matches"), reader.text("words")
    if matches is None or words is None:
        sender.fail("secret_shape", 'must be { matches = "REGEX", words = "begins with ..." }')
        return None
    try:
        re.compile(matches)
    except re.error as error:
        reader.fail("matches", f"is not a regular expression: {error}")
    return Shape(matches, words)


def _schemes(sender: Described) -> list[Scheme]:
    if "schemes" not in sender.table:
        sender.unknown((*_SCHEME_KEYS, "schemes", *_SENDER_KEYS))
        return [_scheme(sender)]
    sender.unknown(("schemes", *_SENDER_KEYS))
    tables = sender.table["schemes"]
    if not isinstance(tables, list) or not tables:
        sender.fail("schemes", "must be a list of tables, at least one")
        return []
    readers = [Described(t, f"schemes[{i}]", sender.problems) for i, t in enumerate(tables)]
    for reader in readers:
        reader.unknown(_SCHEME_KEYS)
    return [_scheme(reader) for reader in readers]


def _kept_apart(schemes: Sequence[Scheme]) -> bool:
    """Whether no secret of a scheme that anyone may know could be the key of another scheme."""
    known = [scheme for scheme in schemes if scheme.algo in (*PUBLIC_KEYS, "paypal")]
    private = [scheme for scheme in schemes if scheme not in known and scheme.algo != "none"]
    return not any(
        one.prefix.startswith(other.prefix) or other.prefix.startswith(one.prefix)
        for public, secret in itertools.product(known, private)
        for one, other in itertools.product(public.secret, secret.secret)
    )


def _with_prefixes(schemes: Sequence[Scheme]) -> tuple[Scheme, ...]:
    """Require the prefixes of secrets where one of them marks a public key.

    Otherwise a public key, which anyone may know, could count as the key of an HMAC.
    """
    if not any(scheme.algo in PUBLIC_KEYS for scheme in schemes):
        return tuple(schemes)
    return tuple(
        msgspec.structs.replace(
            scheme,
            secret=tuple(
                msgspec.structs.replace(way, prefix_required=bool(way.prefix))
                for way in scheme.secret
            ),
        )
        for scheme in schemes
    )


def _scheme(reader: Described) -> Scheme:
    algo = reader.choice("algo", (*HMACS, *PUBLIC_KEYS, *BEARERS, *CODED))
    if algo is None and "algo" not in reader.table:
        reader.fail("algo", "is missing; for example sha256")
    template = reader.text("signed")
    tolerance_s = _tolerance_s(reader)
    future_s = reader.seconds("future_s")
    scheme = Scheme(
        algo=algo or "none",
        sig=reader.locator("sig"),
        item_sep=reader.octets("item_sep"),
        kv_sep=reader.octets("kv_sep"),
        sig_key=reader.octets("sig_key"),
        ts_key=reader.octets("ts_key"),
        enc=reader.choice("enc", ("hex", "base64")) or "hex",
        hex_any_case=reader.truth("hex_any_case"),
        signed=(reader.attempt("signed", _parts, template) or ()) if template is not None else (),
        secret=_derivations(reader),
        id=reader.locator("id"),
        ts=reader.locator("ts"),
        ts_unit=reader.choice("ts_unit", ("s", "ms", "iso")) or "s",
        tolerance_s=tolerance_s,
        future_s=tolerance_s if future_s is None else future_s,
        only_if_absent=reader.locator("only_if_absent"),
    )
    if not reader.failed:
        _check_scheme(reader, scheme)
    return scheme


def _tolerance_s(reader: Described) -> float | None:
    """How old a delivery may be; None where no time is signed, or false was written."""
    given = reader.table.get("tolerance_s")
    if given is False:
        return None
    if given is None:
        timed = "ts" in reader.table or "ts_key" in reader.table
        return TOLERANCE_S if timed else None
    return reader.seconds("tolerance_s")


def _derivations(reader: Described) -> tuple[Derivation, ...]:
    ways = []
    for text in reader.texts("secret") or ("utf8",):
        kind, _, prefix = text.partition(":")
        if kind not in ("utf8", "hex", "base64") or (prefix and kind != "base64"):
            reader.fail("secret", f"{text!r} must be utf8, hex, base64 or base64:PREFIX")
        else:
            known = cast(Literal["utf8", "hex", "base64"], kind)
            ways.append(Derivation(known, prefix.encode()))
    return tuple(ways)


def _parts(template: str) -> tuple[Part, ...]:
    parts = []
    for i, piece in enumerate(re.split(r"\{([^{}]*)\}", template)):
        if i % 2:
            parts.append(_placeholder(piece))
        elif "{" in piece or "}" in piece:
            raise ValueError("has a brace without its other half")
        elif piece:
            parts.append(Part("text", text=piece.encode()))
    return tuple(parts)


def _placeholder(text: str) -> Part:
    if text in _PLACEHOLDERS:
        return Part(text)
    if ":" in text:
        return Part("at", at=parse_locator(text))
    raise ValueError(f"{{{text}}} is not known; write one of {', '.join(_PLACEHOLDERS)}")


def _check_scheme(reader: Described, scheme: Scheme) -> None:
    """What no single field can tell."""
    given = reader.table
    if scheme.algo in CODED:
        for key in given:
            if key in _SCHEME_KEYS and key not in ("algo", "secret"):
                reader.fail(key, f"has no use with algo {scheme.algo}, which is code")
        return
    rules = [
        ("sig", scheme.algo != "none" and not scheme.sig, "is missing; where is the signature?"),
        ("sig", scheme.algo == "none" and scheme.sig is not None, "has no use with algo none"),
        ("kv_sep", bool(scheme.kv_sep and not scheme.sig_key), "needs sig_key"),
        ("sig_key", bool(scheme.sig_key and not scheme.kv_sep), "needs kv_sep"),
        ("ts_key", bool(scheme.ts_key and not scheme.kv_sep), "needs kv_sep and sig_key"),
        ("ts_key", bool(scheme.ts_key and scheme.ts), "says where the timestamp is, as ts does"),
        ("ts_unit", "ts_unit" in given and not _has_ts(scheme), "needs ts or ts_key"),
        ("tolerance_s", "tolerance_s" in given and not _has_ts(scheme), "needs ts or ts_key"),
        ("future_s", "future_s" in given and "tolerance_s" not in given, "needs tolerance_s"),
    ]
    in_path = scheme.sig is not None and scheme.sig.kind == "path"
    rules.append(("sig", in_path and scheme.algo != "token", "can be a path only with algo token"))
    rules += _bearer_rules(given) if scheme.algo in BEARERS else _signature_rules(given, scheme)
    for key, broken, what in rules:
        if broken:
            reader.fail(key, what)


def _has_ts(scheme: Scheme) -> bool:
    return bool(scheme.ts or scheme.ts_key)


def _bearer_rules(given: Table) -> list[tuple[str, bool, str]]:
    what = "has no use with this algo, which signs nothing"
    keys = ("signed", "enc", "hex_any_case", "id", "ts", "ts_key")
    return [(key, key in given, what) for key in keys]


def _signature_rules(given: Table, scheme: Scheme) -> list[tuple[str, bool, str]]:
    in_body = (part.at is not None and part.at.kind != "header" for part in scheme.signed)
    proves_body = scheme.has("body", "payload") or any(in_body)
    unsigned_ts = scheme.ts is not None and not scheme.vouches_for(scheme.ts)
    return [
        ("enc", "enc" not in given, "is missing; hex or base64"),
        ("signed", "signed" not in given, 'is missing; for example "{ts}.{body}"'),
        ("signed", "signed" in given and not proves_body, "covers nothing of the body"),
        ("signed", scheme.has("ts") and not _has_ts(scheme), "has {ts}, which needs ts or ts_key"),
        ("signed", scheme.has("id") and not scheme.id, "has {id}, which needs id"),
        ("id", scheme.id is not None and not scheme.has("id"), "is not used: {id} is not signed"),
        ("ts", unsigned_ts, "proves nothing: {ts} is not signed"),
        ("ts_key", bool(scheme.ts_key and not scheme.has("ts")), "proves nothing: no {ts} signed"),
    ]


class Key(msgspec.Struct, frozen=True):
    """What one scheme checks with: `value` for HMACs and bearers, else `verify`."""

    value: bytes = b""
    # (signature, content) -> whether it is good
    verify: Verifier | None = None

    def __repr__(self) -> str:
        return "Key(...)"


def keys(scheme: Scheme, secret: bytes) -> tuple[Key, ...]:
    """The keys that a secret gives for a scheme, at least one; SecretError says why there is none.

    CryptographyMissing when it is a public key and can't be used on this machine.
    """
    problems = []
    found = []
    for way in scheme.secret:
        try:
            found.append(_key(scheme.algo, _derive(way, secret)))
        except CryptographyMissing:
            raise
        except SecretError as error:
            problems.append(str(error))
    if not found:
        raise SecretError("; ".join(problems))
    return tuple(found)


def secret_warning(preset: Preset, secret: bytes) -> str | None:
    """What a secret that makes a key should look like and does not; nothing of it is said."""
    shape = preset.secret_shape
    if shape is None or re.fullmatch(shape.matches, secret.decode(errors="replace")):
        return None
    return f"does not look like a secret of {preset.title}, which {shape.words}"


def takes_versioned(preset: Preset) -> bool:
    """Whether the sender writes v1, before its whsec_, which is a mistake anywhere else."""
    ways = (way for scheme in preset.schemes for way in scheme.secret)
    return any(way.prefix == b"v1,whsec_" for way in ways)


def secret_problem(preset: Preset, secret: bytes) -> str | None:
    """Why a secret fits none of the preset's schemes, in words without the secret; or None."""
    problems: list[str] = []
    if preset.in_path and not _PATH_SECRET.fullmatch(secret):
        return (
            f"must be at least {PATH_SECRET_CHARS_MIN} letters, digits, _ or -, as it stands in "
            "the URL (openssl rand -hex 16 makes one)"
        )
    for scheme in preset.schemes:
        try:
            if scheme.algo == "none" or keys(scheme, secret):
                return None
        except SecretError as error:
            problems += [str(error)] if str(error) not in problems else []
    return ", or ".join(problems)


def _derive(way: Derivation, secret: bytes) -> bytes:
    if way.kind == "utf8":
        key = secret
    else:
        text = _without_prefix(way, secret)
        key = _hex_key(text) if way.kind == "hex" else _base64_key(text)
    # An empty key would be one that everybody knows.
    if not key:
        raise SecretError("is empty")
    return key


def _without_prefix(way: Derivation, secret: bytes) -> bytes:
    text = secret.removeprefix(way.prefix)
    if way.prefix and way.prefix in text:
        first = "v1, stands before it" if text.startswith(b"v1,") else "something stands before it"
        raise SecretError(f"must start with {way.prefix.decode()}: {first}, remove that")
    if way.prefix_required and text == secret:
        raise SecretError(f"must start with {way.prefix.decode()}")
    return text


def _hex_key(text: bytes) -> bytes:
    try:
        return binascii.unhexlify(text)
    except ValueError as error:
        raise SecretError("must be hexadecimal") from error


def _base64_key(text: bytes) -> bytes:
    """Padding that is missing is added: senders show secrets without it."""
    bare = text.rstrip(b"=")
    try:
        return base64.b64decode(bare + b"=" * (-len(bare) % 4), validate=True)
    except ValueError as error:
        raise SecretError("must be base64") from error


def _key(algo: str, raw: bytes) -> Key:
    if algo not in PUBLIC_KEYS and algo != "paypal":
        return Key(raw)
    with _cryptography(algo):
        if algo == "paypal":
            import cryptography.x509  # noqa: F401  for the certificate, when one is there

            return Key(raw)
        return Key(verify=_ed25519(raw) if algo == "ed25519" else _ecdsa_p256(raw))


@contextlib.contextmanager
def _cryptography(what: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise CryptographyMissing(
            f"needs the package cryptography for {what}; install it (pip install cryptography)"
        ) from error


def certificate(pem: bytes) -> Certificate:
    """The first certificate of a PEM text; SecretError says why there is none."""
    from receiver import certificates

    with _cryptography("certificates"):
        try:
            return certificates.load(pem)
        except ValueError as error:
            raise SecretError(str(error)) from error


def _ed25519(raw: bytes) -> Verifier:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = Ed25519PublicKey.from_public_bytes(raw)
    except ValueError as error:
        raise SecretError("must be an Ed25519 public key of 32 bytes") from error

    def verify(signature: bytes, content: bytes) -> bool:
        try:
            key.verify(signature, content)
        except InvalidSignature:
            return False
        return True

    return verify


def _ecdsa_p256(raw: bytes) -> Verifier:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import (
        ECDSA,
        SECP256R1,
        EllipticCurvePublicKey,
    )
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import load_der_public_key

    try:
        key = load_der_public_key(raw)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SecretError("must be a public key in DER form") from error
    if not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP256R1):
        raise SecretError("must be a public key on the curve P-256")

    def verify(signature: bytes, content: bytes) -> bool:
        try:
            key.verify(signature, content, ECDSA(SHA256()))
        except InvalidSignature:
            return False
        return True

    return verify
