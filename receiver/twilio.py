"""Twilio's scheme: an HMAC over the URL and a form's parameters, or over a URL with a hash."""

import base64
import hmac
import re
from collections.abc import Iterator
from hashlib import sha256

from receiver.coded import Coded, Request, Test, Unproved, single
from receiver.extract import Locator, Reading, unquoted

#: Parameters of a form: all of them are signed, so none may be left out.
PARAMETERS_MAX = 1_000

SIGNATURE = "X-Twilio-Signature"
# Sent when a SharedKey signs in place of the account's Auth Token: key=ID,algorithm=NAME.
SETTINGS = "X-Twilio-Webhooks-Signature-Settings"
_ALGORITHMS = {b"HMAC_SHA1": "sha1", b"HMAC_SHA256": "sha256"}
_ORIGIN = re.compile(rb"(https?)://([^/?#]*)(.*)", re.DOTALL)
_PORT = re.compile(rb":\d+$")


def judge(request: Request) -> Test:
    """The test of an Auth Token or SharedKey: www.twilio.com/docs/usage/webhooks/webhooks-security.

    Whether Twilio puts a default port into the URL that it signs has changed over time, so its
    libraries (twilio-python 9.13.0, request_validator) try both, and so does this.
    """
    signature = single(request.reading, SIGNATURE)
    algorithm = _algorithm(request.reading)
    url = request.reading.url.encode(errors="replace")
    parameters = _parameters(url, request.reading.body)
    contents = [spelling + parameters for spelling in _spellings(url)]

    def is_by(key: bytes) -> bool:
        made = [_sign(key, content, algorithm) for content in contents]
        return any([hmac.compare_digest(one, signature) for one in made])

    return is_by


def sign(key: bytes, url: str, body: bytes) -> tuple[str, str]:
    """The header that an Auth Token makes for a delivery."""
    raw = url.encode()
    return SIGNATURE, _sign(key, raw + _parameters(raw, body), "sha1").decode()


def vouches_for(locator: Locator) -> bool:
    """What a body says is proved, not how it is written; of the headers only the signature.

    A parameter may be spelled in several ways and stand there twice, so the digest of a form's
    bytes could be chosen by whoever saw it. The signature is a digest that nobody can choose.
    """
    if locator.kind == "header":
        return locator.name == SIGNATURE.lower().encode()
    return locator.kind not in ("path", "body")


SCHEME = Coded(
    f"HMAC over the URL and the sorted parameters, base64 in header:{SIGNATURE}",
    judge,
    vouches_for,
    signs_url=True,
)


def _sign(key: bytes, content: bytes, algorithm: str) -> bytes:
    return base64.b64encode(hmac.digest(key, content, algorithm))


def _algorithm(reading: Reading) -> str:
    values = reading.header(SETTINGS.lower().encode())
    if not values:
        return "sha1"
    if len(values) > 1:
        raise Unproved(f"header:{SETTINGS} is there twice")
    named = b"HMAC_SHA1"
    for part in values[0].split(b","):
        name, _, value = part.partition(b"=")
        if name.strip() == b"algorithm" and value.strip():
            named = value.strip().upper()
            break
    if named not in _ALGORITHMS:
        raise Unproved(f"header:{SETTINGS} names an algorithm that is not known")
    return _ALGORITHMS[named]


def _parameters(url: bytes, body: bytes) -> bytes:
    """What is signed behind the URL; the hash of a body that is no form stands in the URL."""
    hashes = [value for name, value in _pairs(url.partition(b"?")[2]) if name == b"bodySHA256"]
    if hashes:
        if not hmac.compare_digest(sha256(body).hexdigest().encode(), hashes[0]):
            raise Unproved("bodySHA256 in the URL is not the hash of the body")
        return b""
    if body.count(b"&") >= PARAMETERS_MAX:
        raise Unproved(f"the form has more than {PARAMETERS_MAX} parameters")
    # The same value given twice is signed once. Bytes sort as the code points of UTF-8 do.
    return b"".join(name + value for name, value in sorted(set(_pairs(body))))


def _pairs(form: bytes) -> Iterator[tuple[bytes, bytes]]:
    for pair in form.split(b"&"):
        if pair:
            name, _, value = pair.partition(b"=")
            yield unquoted(name), unquoted(value)


def _spellings(url: bytes) -> list[bytes]:
    """The URL without a port, and with one."""
    found = _ORIGIN.fullmatch(url)
    if found is None:
        return [url]
    scheme, host, rest = found.groups()
    bare = _PORT.sub(b"", host)
    port = b":443" if scheme == b"https" else b":80"
    with_port = host if bare != host else host + port
    return [b"%s://%s%s" % (scheme, each, rest) for each in (bare, with_port)]
