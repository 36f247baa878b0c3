"""Reads one stored HTTP request from a file, to be judged offline."""

import base64
import binascii
from collections.abc import Mapping

import msgspec

from receiver.verify import Delivery

#: Bytes of the file with the request, and header lines in it.
REQUEST_BYTES_MAX = 64 * 1024 * 1024
HEADERS_MAX = 1_000

KEYS = ("method", "url", "headers", "body", "body_base64")


class Malformed(Exception):
    """The file is not a request; the message says what is wrong and what to write."""


def parse(text: bytes, *, url: str, received_ms: int) -> Delivery:
    """The delivery that a JSON object describes. Raises Malformed.

    Its keys are `method` (default POST), `url` (default: `url`), `headers` (a value may be a
    list), and `body` or `body_base64`.
    """
    request = _object(text)
    for key in request:
        if key not in KEYS:
            raise Malformed(f"{key!r} is not known; a request has {', '.join(KEYS)}")
    return Delivery(
        method=_text(request, "method", "POST"),
        url=_text(request, "url", url),
        headers=_headers(request.get("headers", {})),
        body=_body(request),
        received_ms=received_ms,
    )


def _object(text: bytes) -> dict[str, object]:
    try:
        found = msgspec.json.decode(text.removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Malformed(f"is not JSON: {error}; write an object with {', '.join(KEYS)}") from error
    if not isinstance(found, dict):
        raise Malformed(f"is not an object; write one with {', '.join(KEYS)}")
    return found


def _text(request: Mapping[str, object], key: str, otherwise: str) -> str:
    value = request.get(key, otherwise)
    if not isinstance(value, str) or not value:
        raise Malformed(f"{key} is not a text; write it in quotes")
    return value


def _headers(value: object) -> tuple[tuple[bytes, bytes], ...]:
    if not isinstance(value, dict):
        raise Malformed('headers is not an object; write {"Name": "value"}')
    pairs = []
    for name, values in value.items():
        for each in values if isinstance(values, list) else [values]:
            if not isinstance(each, str):
                raise Malformed(f"headers.{name} is not a text, or a list of texts")
            pairs.append((_octets(name.lower()), _octets(each)))
    if len(pairs) > HEADERS_MAX:
        raise Malformed(f"headers has more than {HEADERS_MAX} lines")
    return tuple(pairs)


def _octets(text: str) -> bytes:
    # A header's bytes are Latin-1 where they can be, as HTTP libraries show them.
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


def _body(request: Mapping[str, object]) -> bytes:
    if "body" in request and "body_base64" in request:
        raise Malformed("has both body and body_base64; keep one")
    if "body_base64" in request:
        text = request["body_base64"]
        try:
            return base64.b64decode(text, validate=True)  # type: ignore[arg-type]  # checked below
        except (TypeError, ValueError, binascii.Error) as error:
            raise Malformed(f"body_base64 is not base64: {error}") from error
    body = request.get("body", "")
    if not isinstance(body, str):
        raise Malformed("body is not a text; write the exact text that was sent, or body_base64")
    return body.encode("utf-8", "surrogatepass")
