"""Posting reaches a server over TCP, TLS and a unix socket, and says why it does not."""

import contextlib
import datetime
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from receiver.config import load
from receiver.sending import ANSWER_BYTES_MAX, Answer, NotSent, Target, post, target_of

ANSWER = b"HTTP/1.1 200 OK\r\nX-Request-Id: r-1\r\nContent-Length: 5\r\n\r\ndone\n"


@contextmanager
def answering(listener: socket.socket, answer: bytes = ANSWER) -> Iterator[list[bytes]]:
    """Take one request, answer it, and give what was received."""
    received: list[bytes] = []

    def serve() -> None:
        # A client that does not trust us goes away in the middle.
        with contextlib.suppress(OSError), listener.accept()[0] as connection:
            text = b""
            while not text.endswith(b"the body"):
                text += connection.recv(4096)
            received.append(text)
            connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    with listener:
        try:
            yield received
        finally:
            thread.join(timeout=30)


def send(target: Target) -> Answer:
    return post(target, [("X-Signature", "s")], b"the body")


def test_a_post_over_tcp_is_answered() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/webhooks/x"

    with answering(listener) as received:
        answer = send(Target(url))

    assert answer == Answer(200, "done", "r-1")
    assert received[0].startswith(b"POST /webhooks/x HTTP/1.1\r\n")
    assert b"\r\nX-Signature: s\r\n" in received[0]


def test_a_post_over_a_unix_socket_is_answered(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen()

    with answering(listener):
        answer = send(Target("http://localhost/webhooks/x", tmp_path / "s"))

    assert answer.word == "done"


def test_our_own_certificate_is_trusted_by_itself_and_no_other_is(tmp_path: Path) -> None:
    for name in ("ours", "other"):
        certify(tmp_path, name)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ours.pem", tmp_path / "ours.key")

    def asked(certificate: str) -> Answer:
        listener = socket.create_server(("127.0.0.1", 0))
        url = f"https://127.0.0.1:{listener.getsockname()[1]}/webhooks/x"
        wrapped = context.wrap_socket(listener, server_side=True)
        with answering(wrapped):
            return send(Target(url, None, tmp_path / f"{certificate}.pem"))

    assert asked("ours").word == "done"
    with pytest.raises(NotSent, match="certificate"):
        asked("other")


def certify(folder: Path, name: str) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "hooks.example.com")])
    start = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=20_000))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    folder.joinpath(f"{name}.pem").write_bytes(certificate.public_bytes(pem))
    folder.joinpath(f"{name}.key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def test_a_long_answer_is_cut() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    long = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100_000

    with answering(listener, long):
        answer = send(Target(url))

    assert len(answer.word) == ANSWER_BYTES_MAX


def test_what_is_no_http_is_no_answer() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"

    with answering(listener, b"nonsense\r\n\r\n"), pytest.raises(NotSent, match="did not answer"):
        send(Target(url))


@pytest.mark.parametrize("place", ["unix", "tcp"])
def test_where_nobody_listens_the_command_is_told(tmp_path: Path, place: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/"
    target = Target(url, tmp_path / "none") if place == "unix" else Target(url)

    with pytest.raises(NotSent, match=r"nothing listens at .*`receiver serve`"):
        send(target)


@pytest.mark.parametrize("url", ["nonsense", "ftp://a/b", "http://[", "http://a:x/", "http://"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is no http URL"):
        send(Target(url))


@pytest.fixture
def target(tmp_path: Path) -> Callable[[str], Target]:
    def of(server: str) -> Target:
        path = tmp_path / "receiver.toml"
        path.write_text(f"[server]\n{server}\n")
        return target_of(load(path, secrets=False), "x")

    return of


@pytest.mark.parametrize(
    ("server", "url"),
    [
        ('listen = "127.0.0.1:7000"', "http://127.0.0.1:7000/webhooks/x"),
        ('listen = "[::1]:7000"', "http://[::1]:7000/webhooks/x"),
        (
            'listen = "0.0.0.0:7000"\nproxy_terminates_tls = true',
            "http://127.0.0.1:7000/webhooks/x",
        ),
        ('listen = "[::]:7000"\nproxy_terminates_tls = true', "http://[::1]:7000/webhooks/x"),
        ('tls = { certificate = "c", key = "k" }', "https://127.0.0.1:8080/webhooks/x"),
    ],
)
def test_the_address_is_that_of_the_config(
    target: Callable[[str], Target], server: str, url: str
) -> None:
    assert target(server).url == url


def test_a_unix_socket_of_the_config_is_used(
    target: Callable[[str], Target], tmp_path: Path
) -> None:
    assert target('listen = "unix:s"').unix == tmp_path / "s"


def test_a_port_that_may_be_any_needs_a_url(target: Callable[[str], Target]) -> None:
    with pytest.raises(NotSent, match="--url"):
        target('listen = "127.0.0.1:0"')
