"""An authority of our own: roots, issuers and certificates, made for one test."""

import contextlib
import http.server
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import AuthorityInformationAccessOID, ExtendedKeyUsageOID, NameOID

DAY = timedelta(days=1)


@dataclass(frozen=True)
class Issued:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: rsa.RSAPrivateKey

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(Encoding.DER)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def sign(self, content: bytes) -> bytes:
        return self.key.sign(content, padding.PKCS1v15(), hashes.SHA256())


def root(at: datetime) -> Issued:
    """One that trusts itself."""
    return _issue("Test Root", at, None, authority=True)


def intermediate(issuer: Issued, at: datetime) -> Issued:
    return _issue("Test Issuer", at, issuer, authority=True)


def leaf(
    issuer: Issued,
    name: str,
    at: datetime,
    *,
    days: int = 30,
    issuer_url: str | None = None,
    bits: int = 2048,
) -> Issued:
    """A server's certificate; `issuer_url` is where it says that its issuer's is."""
    return _issue(name, at, issuer, days=days, issuer_url=issuer_url, bits=bits)


@dataclass(frozen=True)
class Sender:
    """An HTTPS server that answers what it is told to, by path, and else 404."""

    base: str
    answers: dict[str, tuple[int, bytes]]
    root: Issued


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Sender]:
    """The server, and the certificate of its root in root.pem."""
    now = datetime.now(UTC)
    ours = root(now)
    host = leaf(ours, "localhost", now)
    (folder / "root.pem").write_bytes(ours.pem)
    (folder / "host.pem").write_bytes(host.pem + host.key_pem)
    answers: dict[str, tuple[int, bytes]] = {}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(answers)) as server:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(folder / "host.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Sender(f"https://localhost:{server.server_address[1]}", answers, ours)
        server.shutdown()
        thread.join()


def _handler(answers: dict[str, tuple[int, bytes]]) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path, (404, b""))
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def _issue(
    name: str,
    at: datetime,
    issuer: Issued | None,
    *,
    authority: bool = False,
    days: int = 30,
    issuer_url: str | None = None,
    bits: int = 2048,
) -> Issued:
    key = rsa.generate_private_key(65537, bits)
    signer = key if issuer is None else issuer.key
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer_name = subject if issuer is None else issuer.certificate.subject
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    authority_identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer_name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(at - DAY)
        .not_valid_after(at + days * DAY)
        .add_extension(x509.BasicConstraints(authority, None), critical=True)
        .add_extension(_usage(authority), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(authority_identifier, critical=False)
    )
    if not authority:
        names = x509.SubjectAlternativeName([x509.DNSName(name)])
        purpose = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(names, critical=False)
        builder = builder.add_extension(purpose, critical=False)
    if issuer_url is not None:
        place = x509.UniformResourceIdentifier(issuer_url)
        access = x509.AccessDescription(AuthorityInformationAccessOID.CA_ISSUERS, place)
        builder = builder.add_extension(x509.AuthorityInformationAccess([access]), critical=False)
    return Issued(builder.sign(signer, hashes.SHA256()), key)


def _usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
