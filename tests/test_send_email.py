"""A mail ends in what the server says at each step, and its headers can't be tampered with."""

import asyncio
import email
import logging
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from email.message import EmailMessage
from email.policy import default
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, Session

from receiver import send_email
from receiver.destinations import Email, Later, Never, Owed, Result, Senders, Sent, Unknown
from receiver.select import Template, Unjudgeable
from receiver.send_email import compose
from tests.conftest import NOW_MS
from tests.far_side import (
    KEY,
    Far,
    Pair,
    Script,
    drip,
    flood,
    hang,
    owed,
    part,
    reset,
    said,
    self_signed,
    serving,
    silent_port,
    unused_port,
)

# The server of the tests warns about logins without TLS, which is what some tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:Requiring AUTH:UserWarning")

SHORT_S = 0.3
LONG_S = 30.0
PASSWORD = "hunter2@%"
LOGIN = "me:hunter2%40%25@"


class Post:
    """What a server says at a step, in place of taking it, and what it took."""

    def __init__(self, **says: str) -> None:
        self.says = says
        self.taken: list[Envelope] = []
        self.logins: list[tuple[bytes, bytes]] = []
        self.tls: list[bool] = []

    def authenticate(self, *arguments: Any) -> AuthResult:
        login = arguments[-1]
        self.logins.append((login.login, login.password))
        good = (login.login, login.password) == (b"me", PASSWORD.encode())
        return AuthResult(success=good, handled=False)

    async def handle_MAIL(
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        envelope.mail_from = address
        return self.says.get("mail", "250 OK")

    async def handle_RCPT(
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        envelope.rcpt_tos.append(address)
        return self.says.get("rcpt", "250 OK")

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:
        said = self.says.get("data", "250 2.0.0 Ok: queued as 4F2")
        if said == "hang":
            await asyncio.Event().wait()
        if said == "reset":
            assert isinstance(server.transport, asyncio.Transport)
            server.transport.abort()
        self.taken.append(envelope)
        self.tls.append(session.ssl is not None)
        return said


@contextmanager
def mailing(post: Post, **options: Any) -> Iterator[int]:
    """A server on the loopback; its port."""
    if options.pop("login", False):
        options |= {"authenticator": post.authenticate, "auth_required": True}
        options.setdefault("auth_require_tls", False)
    port = unused_port()
    controller = Controller(post, hostname="127.0.0.1", port=port, **options)
    controller.start()
    try:
        yield port
    finally:
        controller.stop()


def mail(port: int, **changes: Any) -> Email:
    values: dict[str, Any] = {
        "name": "confirmation",
        "smtp": f"smtp://127.0.0.1:{port}",
        "from_": "Billing <billing@example.com>",
        "to": Template.compile("unused"),
        "subject": Template.compile("unused"),
        "text": Template.compile("unused"),
        "timeout_s": LONG_S,
    }
    return Email(**values | changes)


def message(**changes: str) -> Owed:
    body = {"to": "ann@example.com", "subject": "Invoice 1", "text": "Thank you."}
    return owed(body | changes)


def send(destination: Email, /, **changes: str) -> Result:
    return Senders().send(destination, message(**changes), NOW_MS)


def after(post: Post, timeout_s: float = LONG_S) -> Result:
    with mailing(post) as port:
        return send(mail(port, timeout_s=timeout_s))


def content(post: Post) -> EmailMessage:
    (envelope,) = post.taken
    assert isinstance(envelope.content, bytes)
    assert envelope.content.isascii()
    read = email.message_from_bytes(envelope.content, policy=default)
    assert isinstance(read, EmailMessage)
    return read


# What is mailed


def test_a_mail_is_sent_with_its_headers() -> None:
    post = Post()

    with mailing(post) as port:
        result = send(mail(port))

    assert result == Sent(f"127.0.0.1:{port} said 250 2.0.0 Ok: queued as 4F2")
    assert post.taken[0].mail_from == "billing@example.com"
    assert post.taken[0].rcpt_tos == ["ann@example.com"]
    read = content(post)
    assert read["From"] == "Billing <billing@example.com>"
    assert read["To"] == "ann@example.com"
    assert read["Subject"] == "Invoice 1"
    assert read["Message-ID"] == f"<{KEY}@example.com>"
    assert read["Date"] == "Fri, 15 Jan 2027 08:00:00 +0000"
    assert read["Auto-Submitted"] == "auto-generated"
    assert read.get_content() == "Thank you.\r\n"


def test_every_attempt_mails_the_same_bytes() -> None:
    post = Post()

    with mailing(post) as port:
        for attempt in (1, 2):
            again = Owed(KEY, "event-7", attempt, NOW_MS, message(text="grüße " * 500).body)
            Senders().send(mail(port), again, NOW_MS + attempt * 86_400_000)

    first, second = post.taken
    assert first.content == second.content


def test_text_of_any_language_arrives_as_it_was() -> None:
    post = Post()
    subject = "Grüße, 请查收 ✓ " + "sehr lang " * 20 + "Ende"
    text = "Grüße\n.\n..\n.end\nFrom me\n\ttab\r\nlast\x00\x07 请查收 " + "x" * 2_000

    with mailing(post) as port:
        send(
            mail(port, from_='"Müller, Söhne" <info@müller.example>'),
            to="Ann Ü <ann+tag@example.com>",
            subject=subject,
            text=text,
        )

    read = content(post)
    assert read["Subject"] == subject
    assert read["From"].addresses[0].display_name == "Müller, Söhne"
    assert read["From"].addresses[0].addr_spec == "info@xn--mller-kva.example"
    assert read["To"].addresses[0].display_name == "Ann Ü"
    assert post.taken[0].rcpt_tos == ["ann+tag@example.com"]
    assert read.get_content().replace("\r\n", "\n") == text.replace("\r\n", "\n") + "\n"
    assert isinstance(post.taken[0].content, bytes)
    assert max(map(len, post.taken[0].content.split(b"\r\n"))) <= 998


@pytest.mark.parametrize(
    "of",
    [
        {"subject": "=?utf-8?q?=0d=0aX-Evil:_1?="},
        {"subject": "a =?utf-8?b?DQpYLUV2aWw6IDE=?= b"},
        {"to": "=?utf-8?q?=0d=0aX-Evil:_1?= <ann@example.com>"},
    ],
)
def test_an_encoded_word_can_not_begin_a_header(of: dict[str, str]) -> None:
    def written(**given: str) -> list[str]:
        given = {"to": "ann@example.com", "subject": "Invoice 1"} | given
        mail = compose(sender="us@example.com", text="t", name=KEY, created_ms=NOW_MS, **given)
        head = mail.as_bytes().partition(b"\r\n\r\n")[0].decode()
        return [line.partition(":")[0] for line in head.split("\r\n") if line[:1] != " "]

    try:
        names = written(**of)
    except Unjudgeable as refused:
        assert "holds a line break" in str(refused)  # noqa: PT017  not every Python writes it
    else:
        assert names == written()


def test_an_encoded_word_without_a_line_break_is_a_subject_like_any_other() -> None:
    message = compose(
        sender="us@example.com",
        to="ann@example.com",
        subject="=?utf-8?q?gr=C3=BC=C3=9Fe?=",
        text="t",
        name=KEY,
        created_ms=NOW_MS,
    )

    assert message["Subject"] == "grüße"


def test_a_control_character_in_a_plain_text_is_encoded() -> None:
    post = Post()

    with mailing(post) as port:
        send(mail(port), text="a\x00b")

    assert content(post).get_content() == "a\x00b\r\n"
    assert b"\x00" not in (post.taken[0].original_content or b"")


def test_a_line_of_one_dot_does_not_end_the_mail() -> None:
    post = Post()

    with mailing(post) as port:
        send(mail(port), text="one\n.\nMAIL FROM:<evil@example.com>\n.")

    assert len(post.taken) == 1
    assert content(post).get_content() == "one\r\n.\r\nMAIL FROM:<evil@example.com>\r\n.\r\n"


def test_a_message_id_stays_whole_for_a_long_domain() -> None:
    post = Post()
    domain = ".".join(["a" * 60] * 3) + ".example"

    with mailing(post) as port:
        send(mail(port, from_=f"a@{domain}"))

    assert content(post)["Message-ID"].strip() == f"<{KEY}@{domain}>"
    assert b"Message-ID: <op_" in (post.taken[0].content or b"").replace(b"\r\n ", b" ")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"to": "ann@example.com\r\nBcc: evil@example.com"},
        {"to": "ann@example.com, evil@example.com"},
        {"to": "Ann"},
        {"subject": "a\nBcc: evil@example.com"},
    ],
)
def test_what_render_would_refuse_is_refused_again_at_the_send(changes: dict[str, str]) -> None:
    post = Post()

    with mailing(post) as port:
        result = send(mail(port), **changes)

    assert isinstance(result, Never)
    assert said(result)
    assert post.taken == []


# Sessions


def test_a_login_over_starttls_on_this_machine_takes_any_certificate(tmp_path: Path) -> None:
    post = Post()
    pair = self_signed(tmp_path, "relay.example")

    with mailing(post, tls_context=pair.tls, require_starttls=True, login=True) as port:
        result = send(mail(port, smtp=f"smtp://{LOGIN}127.0.0.1:{port}"))

    assert isinstance(result, Sent)
    assert post.tls == [True]
    assert post.logins == [(b"me", PASSWORD.encode())]


@pytest.fixture
def afar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loopback counts as another machine."""
    monkeypatch.setattr(send_email, "LOCAL", ())


@pytest.mark.usefixtures("afar")
def test_elsewhere_the_certificate_of_starttls_must_be_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    post = Post()
    pair = self_signed(tmp_path)
    with mailing(post, tls_context=pair.tls, login=True) as port:
        to = mail(port, smtp=f"smtp://{LOGIN}127.0.0.1:{port}")
        refused = send(to)
        monkeypatch.setenv("SSL_CERT_FILE", str(pair.certificate))
        taken = send(to)

    assert refused == Later(
        f"TLS with 127.0.0.1:{port} failed: its certificate is refused: self-signed certificate",
        unreachable=True,
    )
    assert isinstance(taken, Sent)
    assert post.logins == [(b"me", PASSWORD.encode())]


@pytest.mark.usefixtures("afar")
def test_elsewhere_nothing_is_mailed_without_starttls() -> None:
    post = Post()

    with mailing(post, login=True) as port:
        result = send(mail(port, smtp=f"smtp://{LOGIN}127.0.0.1:{port}"))

    assert result == Later(
        f"127.0.0.1:{port} offers no STARTTLS, without which nothing is mailed", unreachable=True
    )
    assert post.logins == []


@pytest.fixture
def trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    pair = self_signed(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(pair.certificate))
    return pair


def playing(*steps: bytes | Script) -> Script:
    """Says each reply after a line of the client, or after its text; a script speaks at once."""

    def play(far: Far, connection: socket.socket) -> None:
        with connection.makefile("rb") as lines:
            for before, step in pairwise((b"", *steps)):
                if isinstance(before, bytes) and before.startswith(b"354"):
                    far.requests.append(text_of(lines))
                elif before and isinstance(step, bytes):
                    far.requests.append(lines.readline())
                if isinstance(step, bytes):
                    connection.sendall(step)
                else:
                    step(far, connection)

    return play


def text_of(lines: Iterable[bytes]) -> bytes:
    """The text of a mail up to the dot that ends it."""
    text = b""
    for line in lines:
        text += line
        if line == b".\r\n":
            break
    return text


HELLO = (b"220 x\r\n", b"250-x\r\n250 AUTH PLAIN\r\n")
TO_DATA = (*HELLO, b"250 ok\r\n", b"250 ok\r\n", b"354 go\r\n")


def test_smtps_is_encrypted_from_the_first_byte(trusted: Pair) -> None:
    script = playing(*TO_DATA, b"250 kept\r\n")

    with serving(script, tls=trusted.tls) as far:
        result = send(mail(1, smtp=f"smtps://127.0.0.1:{far.port}"))

    assert result == Sent(f"127.0.0.1:{far.port} said 250 kept")


def test_smtps_demands_a_trusted_certificate(tmp_path: Path) -> None:
    pair = self_signed(tmp_path)

    with serving(playing(*TO_DATA), tls=pair.tls) as far:
        result = send(mail(1, smtp=f"smtps://127.0.0.1:{far.port}"))

    assert isinstance(result, Later)
    assert result.unreachable
    assert "its certificate is refused" in said(result)
    assert far.requests == []


def test_a_refused_login_is_the_operators_and_failed_for_now() -> None:
    post = Post()

    with mailing(post, login=True) as port:
        result = send(mail(port, smtp=f"smtp://me:wr0ng@127.0.0.1:{port}"))

    assert result == Later(
        f"127.0.0.1:{port} refused the login with 535: see user and password in smtp",
        unreachable=True,
    )
    assert post.taken == []


def test_a_server_without_login_is_failed_for_now() -> None:
    script = playing(b"220 x\r\n", b"250 x\r\n", hang)

    with serving(script) as far:
        result = send(mail(1, smtp=f"smtp://{LOGIN}127.0.0.1:{far.port}"))

    assert result == Later(
        f"127.0.0.1:{far.port} offers no login (take the user out of smtp, or try smtps)",
        unreachable=True,
    )


def test_a_login_of_an_unknown_kind_is_failed_for_now() -> None:
    with serving(playing(b"220 x\r\n", b"250-x\r\n250 AUTH XOAUTH2\r\n", hang)) as far:
        result = send(mail(1, smtp=f"smtp://{LOGIN}127.0.0.1:{far.port}"))

    assert result == Later(
        f"127.0.0.1:{far.port} offers no way to log in that is known here", unreachable=True
    )


def test_a_password_that_is_not_ascii_is_not_shown() -> None:
    with serving(playing(*HELLO, hang)) as far:
        result = send(mail(1, smtp=f"smtp://me:p%C3%A4ss@127.0.0.1:{far.port}"))

    assert result == Later(
        f"127.0.0.1:{far.port} can't be logged in to: user or password has letters beyond ASCII",
        unreachable=True,
    )


# What each step means


@pytest.mark.parametrize(
    ("says", "kind", "words"),
    [
        ({"mail": "451 busy"}, Later, "refused the sender: 451 busy"),
        ({"mail": "553 not yours"}, Later, "refused the sender: 553 not yours"),
        ({"rcpt": "450 greylisted"}, Later, "refused the recipient: 450 greylisted"),
        (
            {"rcpt": "550 5.1.1 no such user"},
            Never,
            "refused the recipient: 550 5.1.1 no such user",
        ),
        ({"rcpt": "251 forwarded"}, Sent, "said 250 2.0.0 Ok: queued as 4F2"),
        ({"data": "452 disk full"}, Later, "said 452 disk full"),
        ({"data": "554 spam"}, Never, "said 554 spam"),
        ({"data": "250"}, Sent, "said 250"),
    ],
)
def test_the_reply_to_a_step_decides(says: dict[str, str], kind: type, words: str) -> None:
    post = Post(**says)

    with mailing(post) as port:
        result = send(mail(port))

    assert type(result) is kind
    assert said(result) == f"127.0.0.1:{port} {words}"
    assert not getattr(result, "unreachable", False)


@pytest.mark.parametrize(
    ("steps", "kind", "words"),
    [
        ((b"421 busy\r\n",), Later, "turned us away: 421 busy"),
        ((b"554 go away\r\n",), Later, "turned us away: 554 go away"),
        ((b"220 x\r\n", b"502 what\r\n", b"550 no\r\n"), Later, "turned us away: 550 no"),
        ((*TO_DATA[:-1], b"451 later\r\n"), Later, "refused the message: 451 later"),
        ((*TO_DATA[:-1], b"554 no valid recipients\r\n"), Never, "refused the message: 554 no"),
        ((*TO_DATA[:-1], b"250 what\r\n"), Later, "refused the message: 250 what"),
        ((*TO_DATA, b"hm?\r\n"), Unknown, "said nothing of use after the text: it may have"),
        ((*TO_DATA, b"354 more\r\n"), Unknown, "said nothing of use after the text: it may have"),
        ((*TO_DATA, b"421 closing\r\n"), Later, "said 421 closing"),
        ((*TO_DATA, b"250-two\r\n250 lines\r\n"), Sent, "said 250 two lines"),
    ],
)
def test_an_odd_reply_is_judged_too(steps: tuple[bytes, ...], kind: type, words: str) -> None:
    with serving(playing(*steps)) as far:
        result = send(mail(far.port))

    assert type(result) is kind
    assert said(result).startswith(f"127.0.0.1:{far.port} {words}")


BREAKS: list[tuple[Script, float, str]] = [
    (part, LONG_S, "broke off"),
    (reset, LONG_S, "broke off"),
    (hang, SHORT_S, "did not answer in time"),
    (drip, SHORT_S, "did not answer in time"),
]


@pytest.mark.parametrize(("script", "timeout_s", "words"), BREAKS)
@pytest.mark.parametrize("done", range(len(TO_DATA)))
def test_what_breaks_off_before_the_text_is_failed_for_now(
    script: Script, timeout_s: float, words: str, done: int
) -> None:
    with serving(playing(*TO_DATA[:done], script)) as far:
        start = time.monotonic()
        result = send(mail(far.port, timeout_s=timeout_s))
        took_s = time.monotonic() - start

    assert isinstance(result, Later)
    assert result.unreachable == (done < len(HELLO))
    place = f"127.0.0.1:{far.port}"
    # A reset at once may come before the connection counts as made.
    if "can't be reached" in said(result):
        assert script is reset
        assert said(result) == f"{place} can't be reached: Connection reset by peer"
    else:
        assert said(result).startswith(f"{place} {words} before it took ")
    assert took_s < 10


@pytest.mark.parametrize(("script", "timeout_s", "words"), BREAKS)
def test_what_breaks_off_after_the_text_is_unknown(
    script: Script, timeout_s: float, words: str
) -> None:
    with serving(playing(*TO_DATA, script)) as far:
        result = send(mail(far.port, timeout_s=timeout_s))

    assert result == Unknown(
        f"127.0.0.1:{far.port} {words} after the text was sent: it may have been mailed"
    )
    assert far.requests[-1].endswith(b"\r\n.\r\n")


@pytest.mark.parametrize(("says", "timeout_s"), [("reset", LONG_S), ("hang", SHORT_S)])
def test_a_real_server_that_drops_the_text_is_unknown(says: str, timeout_s: float) -> None:
    assert isinstance(after(Post(data=says), timeout_s), Unknown)


def test_a_server_that_never_stops_talking_is_cut_off() -> None:
    def talk(far: Far, connection: socket.socket) -> None:
        while True:
            connection.sendall(b"250-more\r\n" * 1_000)

    with serving(playing(b"220 x\r\n", talk)) as far:
        result = send(mail(far.port))

    assert isinstance(result, Later)
    assert said(result) == f"127.0.0.1:{far.port} broke off before it took a message"


def test_a_line_without_end_is_cut_off() -> None:
    with serving(playing(flood)) as far:
        result = send(mail(far.port))

    assert isinstance(result, Later)
    assert said(result)


def test_a_server_that_does_not_part_does_not_undo_the_send() -> None:
    start = time.monotonic()
    with serving(playing(*TO_DATA, b"250 kept\r\n", hang)) as far:
        result = send(mail(far.port))
    took_s = time.monotonic() - start

    assert isinstance(result, Sent)
    assert took_s < 10


# No connection


def test_a_refused_connection_is_failed_for_now() -> None:
    port = unused_port()

    assert send(mail(port)) == Later(
        f"127.0.0.1:{port} refused the connection (is it running?)", unreachable=True
    )


def test_a_connection_that_is_not_taken_is_failed_for_now() -> None:
    with silent_port() as port:
        result = send(mail(port, timeout_s=SHORT_S))

    assert result == Later(
        f"127.0.0.1:{port} did not take a connection in time (is a firewall between?)",
        unreachable=True,
    )


@pytest.mark.parametrize("host", ["no name", "a..b"])
def test_a_name_that_does_not_resolve_is_failed_for_now(host: str) -> None:
    assert send(mail(1, smtp=f"smtp://{host}")) == Later(
        f"the name of {host}:587 can't be resolved (is it spelled right? does DNS work?)",
        unreachable=True,
    )


@pytest.mark.parametrize(
    "url", ["", "http://x/", "smtp://", "smtp://me:s3cret@x:p0rt", "smtp://[1", "smtp://a:b#@c"]
)
def test_a_url_that_is_none_is_failed_for_now_without_showing_it(url: str) -> None:
    result = send(mail(1, smtp=url))

    assert isinstance(result, Later)
    assert result.unreachable
    assert said(result).startswith("smtp can't be used: ")
    assert "s3cret" not in said(result)
    assert "p0rt" not in said(result)


def test_no_password_and_no_text_is_told_or_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="receiver")
    scripts = [playing(*TO_DATA[:i], b"535 no\r\n", hang) for i in range(len(TO_DATA))]
    told = ""
    for script in scripts:
        with serving(script) as far:
            to = mail(1, smtp=f"smtp://{LOGIN}127.0.0.1:{far.port}", timeout_s=SHORT_S)
            told += said(send(to, text="pa55age")) + repr(to)

    assert not any(word in told + caplog.text for word in ("hunter2", "pa55age"))
