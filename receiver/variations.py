"""What a delivery or a secret may have been before something changed it; guesses, never proofs."""

import base64
import binascii
import functools
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator
from hashlib import sha256
from urllib.parse import quote, quote_plus, unquote, unquote_to_bytes, urlsplit

import msgspec

from receiver.extract import Headers, form_values

#: A larger body is not varied, in bytes; nor is more than that unpacked.
BODY_BYTES_MAX = 4 * 1024 * 1024
#: Members and hops of a header that are looked at.
HOSTS_MAX = 8

_BOM = b"\xef\xbb\xbf"
_WHITE = b" \t\r\n"

Guess = tuple[str, bytes]


def bodies(body: bytes, payload: bytes | None = None) -> Iterator[Guess]:
    """What the sender may have signed, each with words that end "it matches ...".

    `payload` is the form field that may hold the JSON.
    """
    if len(body) > BODY_BYTES_MAX:
        return
    tried = {sha256(body).digest()}
    for words, guess in itertools.chain(
        _edges(body),
        _line_ends(body),
        _packed(body),
        _forms(body, payload),
        _charsets(body),
        _rewritten(body),
        [("an empty body", b"")],
    ):
        digest = sha256(guess).digest()
        if digest not in tried:
            tried.add(digest)
            yield words, guess


def _edges(body: bytes) -> Iterator[Guess]:
    for name, end in (("newline", b"\n"), ("CRLF", b"\r\n")):
        yield f"with a {name} at its end (it was trimmed on the way)", body + end
        yield f"without the {name} at its end (it was added on the way)", body.removesuffix(end)
    yield "without the white space around it (it was added on the way)", body.strip(_WHITE)
    yield "with a byte order mark before it (it was removed on the way)", _BOM + body
    yield "without the byte order mark (it was added on the way)", body.removeprefix(_BOM)


def _line_ends(body: bytes) -> Iterator[Guess]:
    unix = body.replace(b"\r\n", b"\n")
    yield "with LF for its CRLF (the line ends were changed on the way)", unix
    windows = unix.replace(b"\n", b"\r\n")
    yield "with CRLF for its LF (the line ends were changed on the way)", windows


def _packed(body: bytes) -> Iterator[Guess]:
    unpacked = _gunzipped(body)
    if unpacked is not None:
        yield "gunzipped (the sender signed it before it was compressed)", unpacked
    for level in (6, 9, 1):
        packing = zlib.compressobj(level, wbits=31)
        packed = packing.compress(body) + packing.flush()
        for system in (b"\x03", b"\xff", b"\x00"):
            # The tenth byte names the system that packed it.
            words = "gzipped (it was unpacked on the way)"
            yield words, packed[:9] + system + packed[10:]
    for decode in (_base64, _json_text):
        yield from decode(body)


def _gunzipped(body: bytes) -> bytes | None:
    unpacking = zlib.decompressobj(wbits=31)
    try:
        unpacked = unpacking.decompress(body, BODY_BYTES_MAX)
    except zlib.error:
        return None
    return unpacked if unpacking.eof else None


def _base64(body: bytes) -> Iterator[Guess]:
    try:
        yield (
            "decoded from base64 (it was encoded on the way)",
            base64.b64decode(body, validate=True),
        )
    except binascii.Error:
        return


def _json_text(body: bytes) -> Iterator[Guess]:
    value = _decoded(body)
    if isinstance(value, str):
        words = "taken out of a JSON string (it was wrapped on the way)"
        yield words, value.encode(errors="surrogatepass")


def _forms(body: bytes, payload: bytes | None) -> Iterator[Guess]:
    decoded = "form-decoded (the sender signed it before it was encoded)"
    field = payload or b"payload"
    yield decoded, unquote_to_bytes(body.replace(b"+", b" "))
    for value in form_values(body, field)[:1]:
        yield decoded, value
    for encode in (quote_plus, quote):
        text = encode(body, safe="")
        yield "form-encoded (it was decoded on the way)", field + b"=" + text.encode()


def _charsets(body: bytes) -> Iterator[Guess]:
    for read, write in (("utf-8", "latin-1"), ("latin-1", "utf-8")):
        try:
            guess = body.decode(read).encode(write)
        except UnicodeError:
            continue
        yield f"in {write} for {read} (its characters were encoded anew on the way)", guess


def _rewritten(body: bytes) -> Iterator[Guess]:
    """The same JSON as other programs write it."""
    value = _decoded(body)
    if not isinstance(value, dict | list):
        return
    for sort, ascii_ in itertools.product((False, True), (False, True)):
        text = json.dumps(value, separators=(",", ":"), sort_keys=sort, ensure_ascii=ascii_)
        compact = text.encode(errors="surrogatepass")
        ordered = ", its keys sorted" if sort else ""
        escapes = ", characters escaped" if ascii_ and b"\\u" in compact else ""
        for style, laid_out in _styles(compact):
            for escaped, escape in _ESCAPES:
                words = f"as {style} JSON{ordered}{escapes}{escaped}"
                words += " (it was parsed and written again on the way)"
                guess = escape(laid_out)
                yield words, guess
                yield words, guess + b"\n"


def _styles(compact: bytes) -> Iterator[Guess]:
    yield "compact", compact
    try:
        yield "spaced", msgspec.json.format(compact, indent=0)
        yield "pretty", msgspec.json.format(compact, indent=4)
        pretty = msgspec.json.format(compact, indent=2)
    except (msgspec.DecodeError, RecursionError):
        return
    yield "pretty", pretty
    # No text of JSON has a line end in it.
    yield "pretty", _INDENT.sub(lambda found: b"\t" * (len(found[0]) // 2), pretty)


def _escape_slashes(raw: bytes) -> bytes:
    return raw.replace(b"/", b"\\/")


def _escape_html(raw: bytes) -> bytes:
    for character in (b"<", b">", b"&"):
        raw = raw.replace(character, b"\\u%04x" % ord(character))
    return raw


_INDENT = re.compile(rb"^ +", re.MULTILINE)
_ESCAPES: tuple[tuple[str, Callable[[bytes], bytes]], ...] = (
    ("", bytes),
    (", slashes escaped", _escape_slashes),
    (", HTML characters escaped", _escape_html),
)


def _decoded(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def secrets(value: bytes) -> Iterator[Guess]:
    """Keys that may have been meant, each with words that end "it matches with it ..."."""
    tried = set()
    for words, text in _texts(value):
        for how, key in (("used as it is", text), *_decodings(text)):
            if key and key not in tried:
                tried.add(key)
                yield ", ".join(filter(None, (words, how))), key


def _texts(value: bytes) -> Iterator[Guess]:
    bare = value.strip(_WHITE)
    yield "", value
    yield "without the white space around it", bare
    yield "without the quotes around it", bare.strip(b"\"'")
    for prefix in (b"v1,", b"whsec_", b"v1,whsec_"):
        yield f"without its {prefix.decode()}", bare.removeprefix(prefix)
    yield "with whsec_ before it", b"whsec_" + bare
    yield "with a newline at its end", bare + b"\n"
    for prefix in (b"sha256=", b"Bearer ", b"Basic "):
        yield f"without its {prefix.decode().strip()}", bare.removeprefix(prefix)


def _decodings(text: bytes) -> Iterator[Guess]:
    bare = text.rstrip(b"=")
    padded = bare + b"=" * (-len(bare) % 4)
    for words, decode in (
        ("decoded from base64", functools.partial(base64.b64decode, validate=True)),
        ("decoded from base64", base64.urlsafe_b64decode),
        ("decoded from hexadecimal", binascii.unhexlify),
    ):
        try:
            yield words, decode(text if decode is binascii.unhexlify else padded)
        except ValueError:
            continue


def urls(url: str, headers: Headers) -> Iterator[str]:
    """URLs that the sender may have called, as a proxy in front would have changed them."""
    try:
        here = urlsplit(url)
        here.port  # noqa: B018  raises for one that is no number
    except ValueError:
        return
    paths = _paths(here.path, headers)
    queries = dict.fromkeys((f"?{here.query}" if here.query else "", ""))
    if "?" in url and not here.query:
        queries["?"] = None
    for scheme, host, path, query in itertools.product(
        dict.fromkeys((here.scheme, "https", "http")),
        _hosts(here.netloc, headers),
        paths,
        queries,
    ):
        guess = f"{scheme}://{host}{path}{query}"
        if guess != url:
            yield guess


def _hosts(own: str, headers: Headers) -> list[str]:
    named = [own, *_values(headers, b"x-forwarded-host", b"x-original-host", b"host")]
    ports = ["443", "80", *_values(headers, b"x-forwarded-port")]
    found: dict[str, None] = {}
    for host in named:
        bare = host if host.endswith("]") else host.rpartition(":")[0] or host
        found |= dict.fromkeys((host, bare, *(f"{bare}:{port}" for port in ports)))
    return list(found)


def _paths(own: str, headers: Headers) -> list[str]:
    prefixes = [prefix.rstrip("/") for prefix in _values(headers, b"x-forwarded-prefix")]
    originals = _values(
        headers, b"x-original-uri", b"x-original-url", b"x-forwarded-uri", b"x-rewrite-url"
    )
    named = [own, *(f"{prefix}{own}" for prefix in prefixes)]
    named += [path.partition("?")[0] for path in originals if path.startswith("/")]
    found: dict[str, None] = {}
    for path in named:
        bare = path.rstrip("/")
        found |= dict.fromkeys((path, bare, f"{bare}/", unquote(bare), quote(bare)))
    return list(found)


def _values(headers: Headers, *names: bytes) -> list[str]:
    found = [
        part.strip()
        for name, value in headers
        if name in names
        for part in value.decode("latin-1").split(",", HOSTS_MAX)
    ]
    return [value for value in found if value.isprintable() and " " not in value][:HOSTS_MAX]
