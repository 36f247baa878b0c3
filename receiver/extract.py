"""Read values out of a delivery: where a locator points, what the body says, what may be an id."""

import binascii
import json
import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Literal, cast

import msgspec

# An id, a type or an account: characters.
TEXT_CHARS_MAX = 500
# Fields of a form that are looked at.
FORM_FIELDS_MAX = 1000
# Signs in one of them that begin no encoded byte.
BARE_PERCENTS_MAX = 1000
# Bytes of a body that tell a form from JSON.
START_BYTES = 64
# What is wrong with a body that no rule can read.
NOT_JSON = "body is not JSON"

Headers = Sequence[tuple[bytes, bytes]]

_BARE_PERCENT = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_BOM = b"\xef\xbb\xbf"
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_HEADER_NAME = re.compile(r"[!#$%&'+.^_`|~0-9A-Za-z-]+\*?")
_MASK_STEP = r"([^.\[\]]+)((?:\[(?:\*|\d{1,6})\])*)"
_BRACES = re.compile(r"\{([^{}]*)\}")
_KINDS = {bool: "a boolean", float: "a fraction", dict: "an object", list: "a list"}


class Locator(msgspec.Struct, frozen=True):
    """Where a value is, as parse_locator reads it."""

    text: str
    kind: Literal["header", "json", "form", "key", "path", "body", "received", "joined"]
    # A header's name in lower case (`*` at its end: any ending), or a form field's.
    name: bytes = b""
    pointer: tuple[str, ...] | None = None
    # Of a key: the names that do not count.
    without: tuple[str, ...] = ()
    # Of a joined value: texts, and the places of what stands between them.
    parts: tuple["str | Locator", ...] = ()

    def same(self, other: "Locator | None") -> bool:
        """Whether both point at the same place, however the header's name is capitalised."""
        return other is not None and msgspec.structs.replace(other, text=self.text) == self

    @property
    def places(self) -> tuple["Locator", ...]:
        """Itself, or each place that a joined value is made of."""
        if self.kind != "joined":
            return (self,)
        return tuple(part for part in self.parts if isinstance(part, Locator))


# What may be written for a place, as a problem says it.
_FORMS = (
    "header:NAME, json:/path, form:field, form:field#/path, key:/path!name, path, body or received"
)


def parse_locator(text: str) -> Locator:
    """Read one place of a delivery; raise ValueError, with words, for what is none.

    `header:NAME`, `json:/pointer`, `form:field`, `form:field#/pointer`; `key:/pointer!a,b`, the
    name of the first field of the object there that is none of a and b; `path`, the last step of
    the URL's path; `body`, the digest of the whole body; `received`, when it came, in milliseconds;
    and several of them joined by text, as in `{json:/event}:{json:/data/id}`, which is there only
    where each of them is.
    """
    kind, _, rest = text.partition(":")
    if text in ("path", "body", "received"):
        return Locator(text, cast(Literal["path", "body", "received"], text))
    if kind == "header" and _HEADER_NAME.fullmatch(rest):
        return Locator(text, "header", rest.lower().encode())
    if kind == "json":
        return Locator(text, "json", pointer=_pointer(rest))
    if kind == "key":
        pointer, _, without = rest.partition("!")
        return Locator(text, "key", pointer=_pointer(pointer), without=tuple(without.split(",")))
    if kind == "form":
        field, hash_sign, pointer = rest.partition("#")
        if field:
            return Locator(text, "form", field.encode(), _pointer(pointer) if hash_sign else None)
    if "{" in text:
        return _joined(text)
    raise ValueError(f"{text!r} is not a locator; write {_FORMS}")


def _joined(text: str) -> Locator:
    parts: list[str | Locator] = []
    for i, piece in enumerate(_BRACES.split(text)):
        if i % 2:
            parts.append(parse_locator(piece))
        elif "{" in piece or "}" in piece:
            raise ValueError(f"{text!r} has a brace without its other half")
        elif piece:
            parts.append(piece)
    return Locator(text, "joined", parts=tuple(parts))


def _pointer(text: str) -> tuple[str, ...]:
    """The steps of a JSON pointer (RFC 6901); the empty pointer is the whole document."""
    if text and not text.startswith("/"):
        raise ValueError(f"{text!r} is not a JSON pointer; it starts with /")
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in text.split("/")[1:])


class Document(msgspec.Struct, frozen=True):
    """A decoded body; `problem` says why there is none."""

    value: object
    problem: str | None = None
    content_type: Literal["json", "form"] = "json"


def decode(body: bytes, payload: bytes | None = None, forms: bool = False) -> Document:
    """Decode a body from its bytes alone: the content type is a header that nobody signed.

    `payload` names the form field that may hold the JSON instead; `forms` says that the sender
    also posts plain forms, whose document is an object of texts. Never raises.
    """
    if payload is not None and body.startswith(payload + b"="):
        value, problem = _json(form_values(body, payload)[0])
        return Document(value, problem, "form")
    value, problem = _json(body)
    if problem is not None and forms and b"=" in body:
        return _form_document(body)
    return Document(value, problem)


def without_bom(body: bytes) -> bytes:
    """The body without the byte order mark that some senders write before it."""
    return body[3:] if body.startswith(_BOM) else body


def _json(raw: bytes) -> tuple[object, str | None]:
    if not raw:
        return None, f"{NOT_JSON}: it is empty"
    try:
        return msgspec.json.decode(without_bom(raw)), None
    except msgspec.DecodeError as error:
        return None, f"{NOT_JSON}: {error}"
    except RecursionError:
        return None, f"{NOT_JSON}: it is nested too deeply"


def _form_document(body: bytes) -> Document:
    try:
        fields = {unquoted(n).decode(): unquoted(v).decode() for n, v in _pairs(body)}
        return Document(fields, None, "form")
    except UnicodeDecodeError:
        return Document(None, "body is not a form: it is not UTF-8", "form")


def form_values(body: bytes, name: bytes) -> list[bytes]:
    """Every value of one form field, decoded; never raises."""
    return _named(_pairs(body), name)


def _pairs(body: bytes) -> list[tuple[bytes, bytes]]:
    """The fields of a form as they are written."""
    pairs = (pair.partition(b"=") for pair in body.split(b"&", FORM_FIELDS_MAX)[:FORM_FIELDS_MAX])
    return [(name, value) for name, _, value in pairs]


def _named(pairs: Sequence[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    # A byte is written as three at most: what is longer is not looked at, whoever sent it.
    length_max = 3 * len(name)
    return [
        unquoted(value)
        for field, value in pairs
        if len(field) <= length_max and unquoted(field) == name
    ]


def unquoted(raw: bytes) -> bytes:
    """A name or a value of a form, decoded as urllib.parse does it, at the speed of C.

    One with more than BARE_PERCENTS_MAX of `%` that begin no byte was not encoded so, and is
    left as it is.
    """
    raw = raw.replace(b"+", b" ")
    if b"%" not in raw:
        return raw
    whole, bare = _BARE_PERCENT.subn(b"%25", raw, BARE_PERCENTS_MAX + 1)
    if bare > BARE_PERCENTS_MAX:
        return raw
    # Quoted-printable is the same with another sign, once that sign itself is written so.
    return binascii.a2b_qp(whole.replace(b"=", b"%3D").replace(b"%", b"="))


class Reading:
    """One delivery being read; its body is decoded when something asks, and once."""

    __slots__ = ("_document", "_form", "body", "forms", "headers", "payload", "received_ms", "url")

    def __init__(
        self,
        headers: Headers,
        body: bytes,
        payload: bytes | None = None,
        forms: bool = False,
        url: str = "",
        received_ms: int | None = None,
    ) -> None:
        self.url = url
        self.received_ms = received_ms
        self.headers = headers
        self.body = body
        self.payload = payload
        self.forms = forms
        self._document: Document | None = None
        self._form: list[tuple[bytes, bytes]] | None = None

    @property
    def document(self) -> Document:
        if self._document is None:
            self._document = decode(self.body, self.payload, self.forms)
        return self._document

    def value(self, locator: Locator) -> object:
        """The first value that stands there and is not empty; None when there is none.

        Bytes from a header or a form, else a JSON value.
        """
        if locator.kind == "key":
            node = look_up(self.document.value, locator.pointer or ())
            names = node if isinstance(node, dict) else ()
            return next((name for name in names if name not in locator.without), None)
        if locator.pointer is not None:
            return look_up(self._root(locator), locator.pointer)
        return next(iter(self.raw(locator)), None)

    def raw(self, locator: Locator) -> list[bytes]:
        """All that stands there, as bytes that a signature covers; [] when there is nothing."""
        if locator.kind == "header":
            return self.header(locator.name)
        if locator.kind == "form" and locator.pointer is None:
            return [value for value in self._fields(locator.name) if value]
        raw = self._alone(locator)
        return [raw] if raw else []

    def _alone(self, locator: Locator) -> bytes:
        """What stands at a place that can have one value only; b'' when there is none."""
        match locator.kind:
            case "body":
                return body_id(sha256(self.body).digest()).encode()
            case "received":
                return b"" if self.received_ms is None else b"%d" % self.received_ms
            case "path":
                path = self.url.partition("?")[0].rstrip("/")
                return path.rpartition("/")[2].encode(errors="replace")
            case "joined":
                return self._joined(locator).encode()
        return _raw(self.value(locator))

    def _joined(self, locator: Locator) -> str:
        texts = []
        for part in locator.parts:
            text = part if isinstance(part, str) else id_text(self.value(part))[0]
            if not text:
                return ""
            texts.append(text)
        return "".join(texts)

    def header(self, name: bytes) -> list[bytes]:
        """Every non-empty value of a header, in order."""
        if name.endswith(b"*"):
            return [v for n, v in self.headers if v and n.startswith(name[:-1])]
        return [v for n, v in self.headers if n == name and v]

    def has(self, locator: Locator) -> bool:
        """Whether something stands there; a header with an empty value does, too."""
        if locator.kind != "header":
            return bool(self.raw(locator))
        if locator.name.endswith(b"*"):
            return any(name.startswith(locator.name[:-1]) for name, _ in self.headers)
        return any(name == locator.name for name, _ in self.headers)

    def _root(self, locator: Locator) -> object:
        if locator.kind == "json" or locator.name == self.payload:
            return (self._document or self.document).value
        values = self._fields(locator.name)
        return _json(values[0])[0] if values else None

    def _fields(self, name: bytes) -> list[bytes]:
        # A text within a JSON body, which may be anybody's, must not pass for a field.
        if self._form is None:
            start = self.body[:START_BYTES].lstrip()
            self._form = [] if start[:1] in (b"{", b"[") else _pairs(self.body)
        return _named(self._form, name)


def _raw(value: object) -> bytes:
    """Texts and whole numbers as they are written; b'' for all else."""
    if isinstance(value, str):
        return value.encode()
    return b"%d" % value if type(value) is int else b""


def body_id(digest: bytes) -> str:
    """The id that an event has by its body alone."""
    return f"sha256:{digest.hex()}"


def look_up(node: object, pointer: Sequence[str]) -> object:
    """The value a pointer leads to; None when there is none."""
    for step in pointer:
        if isinstance(node, dict):
            node = node.get(step)
        elif isinstance(node, list) and step.isascii() and step.isdecimal() and len(step) < 7:
            node = node[int(step)] if int(step) < len(node) else None
        else:
            return None
    return node


class Found(msgspec.Struct, frozen=True):
    """The first non-empty value among locators; `problem` says why it can't be used."""

    text: str = ""
    locator: Locator | None = None
    problem: str | None = None


_NOT_FOUND = Found()


def find(reading: Reading, locators: Sequence[Locator], what: str) -> Found:
    """Look for an id, a type or an account; `what` is its name in problems."""
    for locator in locators:
        value = reading.value(locator)
        if value is not None and value != "":
            text, problem = id_text(value)
            if problem is not None:
                problem = f"{what} at {locator.text} {problem}"
            return Found(text, locator, problem)
    return _NOT_FOUND


def id_text(value: object) -> tuple[str, str | None]:
    """A text or whole number as the text of an id, or ('', what is wrong with it)."""
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            return "", "is not UTF-8 text"
    elif type(value) is int:
        value = str(value)
    if not isinstance(value, str):
        return "", f"is {_KINDS.get(type(value), 'null')}, not a text or a whole number"
    problem = _text_problem(value)
    return ("", problem) if problem else (value, None)


def _text_problem(text: str) -> str | None:
    if len(text) > TEXT_CHARS_MAX:
        return f"has {len(text)} characters, at most {TEXT_CHARS_MAX} are allowed"
    if text.isascii() and text.isprintable():
        return None
    return "has a control character" if _CONTROL.search(text) else None


def parse_mask(path: str) -> tuple[str | int, ...]:
    """The steps of a dotted path to a volatile field, such as `data.attempt` or `items[*].n`.

    A step is a name, an index, or -1 for every element of a list. Raise ValueError, with words,
    for what is no such path.
    """
    steps: list[str | int] = []
    for part in path.split("."):
        match = re.fullmatch(_MASK_STEP, part)
        if match is None:
            raise ValueError(f"{path!r} is not a dotted path such as data.attempt or items[*].n")
        steps.append(match[1])
        steps += [-1 if i == "*" else int(i) for i in re.findall(r"\[(\*|\d+)\]", match[2])]
    return tuple(steps)


def canonical(body: bytes, content_type: str, volatile: Sequence[str]) -> bytes | None:
    """The SHA-256 (32 bytes) of the body's canonical JSON without its volatile fields.

    Keys are sorted, of duplicate keys the last counts, numbers are compared as parsed. A form
    (content type 'form') is an object of its fields, those that hold a JSON object decoded, and
    each of these is masked too. None when the body can't be read so; never raises.
    """
    document = whole(body, content_type)
    if document.problem is not None:
        return None
    for mask in map(_mask, volatile):
        _drop(document.value, mask)
        if content_type == "form" and isinstance(document.value, dict):
            for value in document.value.values():
                _drop(value, mask)
    try:
        text = json.dumps(document.value, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        return None
    return sha256(text.encode()).digest()


def whole(body: bytes, content_type: str) -> Document:
    """The body with all that is in it; of a form the fields, those with JSON decoded."""
    return decode(body) if content_type != "form" else _form_of_json(body)


def _form_of_json(body: bytes) -> Document:
    document = _form_document(body)
    if not isinstance(document.value, dict):
        return document
    fields = {}
    for name, text in document.value.items():
        value, _ = _json(text.encode())
        fields[name] = value if isinstance(value, dict | list) else text
    return Document(fields)


def _mask(path: str) -> tuple[str | int, ...]:
    try:
        return parse_mask(path)
    except ValueError:
        return ()


def _drop(node: object, steps: tuple[str | int, ...]) -> None:
    """Remove what the steps lead to; -1 stands for every element of a list."""
    if not steps:
        return
    step, rest = steps[0], steps[1:]
    if isinstance(step, int):
        _drop_elements(node, step, rest)
    elif isinstance(node, dict) and step in node:
        if rest:
            _drop(node[step], rest)
        else:
            del node[step]


def _drop_elements(node: object, index: int, rest: tuple[str | int, ...]) -> None:
    if not isinstance(node, list):
        return
    chosen = range(len(node)) if index < 0 else range(index, min(index + 1, len(node)))
    for place in chosen:
        if rest:
            _drop(node[place], rest)
        else:
            # Null, not gone: the elements after it keep their places.
            node[place] = None
