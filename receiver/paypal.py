"""PayPal's scheme: RSA over a few headers, the webhook's id and a checksum of the body."""

import base64
import re
import zlib

from receiver.coded import (
    Certificate,
    CertificateMissing,
    Coded,
    Request,
    Test,
    Unproved,
    single,
)
from receiver.extract import Locator

ID = "Paypal-Transmission-Id"
TIME = "Paypal-Transmission-Time"
SIGNATURE = "Paypal-Transmission-Sig"
CERTIFICATE = "Paypal-Cert-Url"
ALGORITHM = "Paypal-Auth-Algo"
#: The names that its secrets may have: the webhook's id, and the certificate itself, in PEM.
WEBHOOK = "webhook_id"
PINNED = "cert_pem"

# developer.paypal.com, "Integrate webhooks", and paypal/PayPal-Java-SDK (SSLUtil): each host with
# the name in the certificates it shows. Nothing else is ever asked, whatever a header says.
NAMES = {
    "api.paypal.com": "messageverificationcerts.paypal.com",
    "api.sandbox.paypal.com": "messageverificationcerts.sandbox.paypal.com",
}
PATH = "/v1/notifications/certs/"
_URL = rb"https://(?:%b)%b[A-Za-z0-9][A-Za-z0-9_-]{0,99}" % (
    b"|".join(re.escape(host.encode()) for host in NAMES),
    PATH.encode(),
)
# No bar in them: it separates what is signed.
_TRANSMISSION = rb"[A-Za-z0-9-]{1,64}"
_MOMENT = rb"[0-9TZ:.+-]{1,40}"


def judge(request: Request) -> Test:
    """The test of a webhook id, which is no secret: the certificate proves who signed."""
    reading = request.reading
    if single(reading, ALGORITHM) != b"SHA256withRSA":
        raise Unproved(f"header:{ALGORITHM} is not SHA256withRSA")
    transmission, moment = single(reading, ID), single(reading, TIME)
    for name, value, shape in ((ID, transmission, _TRANSMISSION), (TIME, moment, _MOMENT)):
        if re.fullmatch(shape, value) is None:
            raise Unproved(f"header:{name} has another form than PayPal's")
    signature = _signature(single(reading, SIGNATURE))
    certificate = _certificate(request)

    def is_for(key: bytes) -> bool:
        return certificate.verify(signature, content(transmission, moment, key, reading.body))

    return is_for


def content(transmission: bytes, moment: bytes, webhook: bytes, body: bytes) -> bytes:
    """What PayPal signs."""
    return b"|".join((transmission, moment, webhook, b"%d" % zlib.crc32(body)))


def vouches_for(locator: Locator) -> bool:
    """The body as far as a checksum proves it, and the two headers that are signed with it."""
    if locator.kind == "header":
        return locator.name in (ID.lower().encode(), TIME.lower().encode())
    return locator.kind != "path"


SCHEME = Coded(
    f"RSA over the transmission and a checksum of the body, base64 in header:{SIGNATURE}",
    judge,
    vouches_for,
)


def _certificate(request: Request) -> Certificate:
    raw = single(request.reading, CERTIFICATE)
    if re.fullmatch(_URL, raw) is None:
        raise Unproved(f"header:{CERTIFICATE} is no address of PayPal's certificates")
    url = raw.decode()
    found = request.certificate or request.certificates.get(url)
    if found is None:
        raise CertificateMissing(url)
    if isinstance(found, str):
        raise Unproved(f"{url}: {found}")
    if not found.not_before_ms <= request.received_ms <= found.not_after_ms:
        raise Unproved(f"{url}: the certificate is not valid at this time")
    return found


def _signature(text: bytes) -> bytes:
    try:
        raw = base64.b64decode(text, validate=True)
    except ValueError:
        raw = b""
    if not raw or base64.b64encode(raw) != text:
        raise Unproved(f"header:{SIGNATURE} is not base64")
    return raw
