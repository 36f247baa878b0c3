"""The certificates that a sender signs with: fetched once, proved by their chain, then known."""

import contextlib
import re
import ssl
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from receiver import reach
from receiver.coded import Certificate

# Optional, and slow to import: each function that needs it imports it.
if TYPE_CHECKING:
    from cryptography.x509 import Certificate as X509

#: Seconds for one fetch, and bytes of its answer, headers included.
FETCH_S_MAX = 10.0
FETCH_BYTES_MAX = 65_536
#: Bits of an RSA key, the fewest that are trusted.
KEY_BITS_MIN = 2_048

# Where roots are when OpenSSL's own paths lead to a folder of hashed names, which can't be listed.
_BUNDLES = (
    *("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt"),
    *("/etc/ssl/cert.pem", "/etc/ssl/ca-bundle.pem"),
)
# The authority of PayPal's certificates, which come without the one between them and a root.
_ISSUER = r"http://cacerts\.digicert\.com/[A-Za-z0-9_-]{1,100}\.crt"


class Unreachable(Exception):
    """It could not be fetched now; the message says why."""


class Untrusted(ValueError):
    """What is there can't be the sender's certificate; the message says why."""


def load(pem: bytes) -> Certificate:
    """The first certificate of a PEM text, whoever issued it. Raises Untrusted."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
    from cryptography.hazmat.primitives.hashes import SHA256

    leaf = _parsed(pem)[0]
    key = leaf.public_key()
    if not isinstance(key, RSAPublicKey) or key.key_size < KEY_BITS_MIN:
        raise Untrusted(f"the certificate has no RSA key of at least {KEY_BITS_MIN} bits")

    def verify(signature: bytes, content: bytes) -> bool:
        try:
            key.verify(signature, content, PKCS1v15(), SHA256())
        except InvalidSignature:
            return False
        return True

    return Certificate(
        not_before_ms=_ms(leaf.not_valid_before_utc),
        not_after_ms=_ms(leaf.not_valid_after_utc),
        verify=verify,
    )


def prove(
    pem: bytes,
    name: str,
    now_ms: int,
    roots: Sequence["X509"],
    fetch: Callable[[str], bytes],
) -> str:
    """The sender's own certificate of a PEM text, once it is proved to be that of `name`.

    Its issuer is fetched if it is not there with it, from the authority's host alone; a chain of
    signatures up to a root proves it, so nothing depends on that way being safe. Raises Untrusted,
    or Unreachable.
    """
    leaf, *others = _parsed(pem)
    load(pem)
    problem = _problem(leaf, others, name, now_ms, roots)
    if problem is not None and not others:
        issuer = _issuer(leaf)
        if issuer is not None:
            problem = _problem(leaf, [_issued(fetch(issuer))], name, now_ms, roots)
    if problem is not None:
        raise Untrusted(f"no chain to a trusted root for {name}: {problem}")
    return ssl.DER_cert_to_PEM_cert(_der(leaf))


def system_roots() -> list["X509"]:
    """What the system trusts (or SSL_CERT_FILE), as far as it can be read."""
    found = ssl.create_default_context().get_ca_certs(binary_form=True)
    if not found:
        bundle = next((path for path in map(Path, _BUNDLES) if path.is_file()), None)
        text = "" if bundle is None else bundle.read_text("ascii", "replace")
        found = [ssl.PEM_cert_to_DER_cert(one) for one in re.findall(_PEM, text)]
    return list(_readable(found))


def fetch(url: str) -> bytes:
    """The body of a 200 at a URL; no redirect is followed. Raises Unreachable, or Untrusted."""
    # Slow to import, with all of the package email.
    import http.client

    parts = urlsplit(url)
    host, tls = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    connection = http.client.HTTPConnection(host, port)
    try:
        plain = reach.connect(host, port, reach.Deadline(FETCH_S_MAX))
        plain.bytes_left = FETCH_BYTES_MAX
        connection.sock = plain
        if tls:
            connection.sock = reach.encrypt(plain, reach.trusting(), host)
        connection.request("GET", parts.path)
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException, ValueError) as error:
        place = f"{host}:{port}"
        raise Unreachable(reach.words(error, place)) from error
    finally:
        connection.close()
    if answer.status in (404, 410):
        raise Untrusted(f"there is none, {host} says")
    if answer.status != 200:
        raise Unreachable(f"{host} answered {answer.status}")
    return body


def _problem(
    leaf: "X509", others: Sequence["X509"], name: str, now_ms: int, roots: Sequence["X509"]
) -> str | None:
    """Why no chain of these proves that the certificate is that of `name`; None: one does."""
    from cryptography.x509 import DNSName
    from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

    at = datetime.fromtimestamp(now_ms / 1000, UTC).replace(tzinfo=None)
    policy = PolicyBuilder().store(Store(list(roots))).time(at)
    try:
        policy.build_server_verifier(DNSName(name)).verify(leaf, list(others))
    except VerificationError as error:
        return str(error)
    return None


def _der(certificate: "X509") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.DER)


def _parsed(pem: bytes) -> list["X509"]:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise Untrusted("it is no certificate in PEM form") from error


def _issued(der: bytes) -> "X509":
    from cryptography import x509

    try:
        return x509.load_der_x509_certificate(der)
    except ValueError as error:
        raise Untrusted("the certificate of its issuer can't be read") from error


def _issuer(leaf: "X509") -> str | None:
    """Where the certificate says that its issuer's is, if that is at the authority's host."""
    from cryptography import x509

    try:
        access = leaf.extensions.get_extension_for_class(x509.AuthorityInformationAccess).value
    except (
        x509.ExtensionNotFound,
        x509.DuplicateExtension,
        x509.UnsupportedGeneralNameType,
        ValueError,
    ):
        return None
    places = (one.access_location.value for one in access)
    return next((at for at in places if isinstance(at, str) and re.fullmatch(_ISSUER, at)), None)


def _readable(certificates: Iterable[bytes]) -> Iterable["X509"]:
    from cryptography import x509

    # The library warns of roots with old mistakes in them; what it can't read proves nothing.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for der in certificates:
            with contextlib.suppress(ValueError):
                yield x509.load_der_x509_certificate(der)


def _ms(when: datetime) -> int:
    return int(when.timestamp() * 1000)


_PEM = r"(?s)-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----"
