"""Mails a message through an SMTP server, and judges what the server says at each step."""

import contextlib
import ipaddress
import re
import smtplib
import socket
import ssl
from datetime import UTC, datetime
from email import policy
from email.headerregistry import Address
from email.message import EmailMessage
from urllib.parse import unquote, urlsplit

import msgspec

from receiver import mail, reach
from receiver.destinations import Email, Later, Never, Owed, Result, Sent, Unknown, one_line
from receiver.reach import Deadline
from receiver.select import Unjudgeable

#: Ports where a URL names none: submission, and submission over TLS (RFC 8314).
SUBMISSION_PORT = 587
TLS_PORT = 465

#: This machine itself, where nobody listens in between.
LOCAL = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))

#: Bytes of all that the server says in one session.
REPLIES_BYTES_MAX = 65_536

#: Characters of a reply that are kept.
REPLY_CHARS_MAX = 200

#: Seconds to part politely once the outcome is known.
QUIT_S_MAX = 1.0


def send(to: Email, owed: Owed) -> Result:
    """One attempt. Until the server has begun to take the text, nothing has happened."""
    try:
        server = _server(to.smtp)
        message = compose(
            sender=to.from_,
            **owed.body,
            name=owed.operation_key,
            created_ms=owed.created_ms,
        )
    except Unjudgeable as error:
        return Never(one_line(str(error)))
    except ValueError as error:
        return Later(one_line(f"smtp can't be used: {error}"), unreachable=True)
    return _within(Deadline(to.timeout_s), server, message)


class Mail(EmailMessage):
    """Seven-bit safe, whatever its language, so that every server takes it."""

    def __init__(self) -> None:
        super().__init__(policy.SMTP.clone(cte_type="7bit"))


def compose(*, sender: str, to: str, subject: str, text: str, name: str, created_ms: int) -> Mail:
    """The message, the same for the same arguments; `name` becomes its Message-ID.

    Raises Unjudgeable for an address or a subject that can't be one.
    """
    author = _address(sender, "from")
    message = Mail()
    message["From"] = author
    message["To"] = _address(to, "to")
    message["Subject"] = mail.one_line_text(subject, "subject")
    # Python 3.11's library reads encoded words (RFC 2047) in what it is given, and writes what they
    # hold as it stands: a line break too, and with it a header of somebody else's. Later ones
    # encode it again.
    for header in ("From", "To", "Subject"):
        written: str = message[header].fold(policy=message.policy)
        mail.one_line_text(written.removesuffix("\r\n").replace("\r\n ", " "), header.lower())
    message["Date"] = datetime.fromtimestamp(created_ms // 1000, UTC)
    message["Message-ID"] = f"<{name}@{author.domain}>"
    # Keeps out-of-office notes from answering (RFC 3834).
    message["Auto-Submitted"] = "auto-generated"
    # Mail has no other control characters than these in plain text.
    message.set_content(text, cte="quoted-printable" if _ODD.search(text) else None)
    return message


def _address(text: str, where: str) -> Address:
    found = mail.address(text, where)
    return Address(display_name=found.display, addr_spec=found.spec)


class _Server(msgspec.Struct, frozen=True):
    host: str
    port: int
    tls: bool
    user: str | None
    password: str

    @property
    def place(self) -> str:
        return f"{self.host}:{self.port}"


def _server(url: str) -> _Server:
    """Raises ValueError; its words never hold the URL, whose password it may be about."""
    parts = urlsplit(url)
    if parts.scheme not in ("smtp", "smtps") or not parts.hostname:
        raise ValueError("it is no smtp or smtps URL")
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(
            "its port is no number (write % and @ of a password as %25, %40)"
        ) from error
    tls = parts.scheme == "smtps"
    return _Server(
        host=parts.hostname,
        port=port or (TLS_PORT if tls else SUBMISSION_PORT),
        tls=tls,
        user=None if parts.username is None else unquote(parts.username),
        password=unquote(parts.password or ""),
    )


class _RefusedError(Exception):
    """The server's answer to one step is no."""

    def __init__(self, step: str, code: int, reply: bytes) -> None:
        super().__init__(step)
        self.step = step
        self.code = code
        self.reply = reply


class _UnusableError(smtplib.SMTPException):
    """The server lacks what the session needs; says so in words."""


def _within(deadline: Deadline, server: _Server, message: Mail) -> Result:
    try:
        session = _Session(server, deadline)
    except (OSError, smtplib.SMTPException, ValueError) as error:
        return Later(_unopened(error, server), unreachable=True)
    with contextlib.closing(session):
        try:
            session.secure()
            session.introduce()
        except (OSError, smtplib.SMTPException, ValueError) as error:
            return Later(_unopened(error, server), unreachable=True)
        try:
            session.address(message)
        except _RefusedError as refused:
            return _refused(refused, server.place)
        except (OSError, smtplib.SMTPException) as error:
            return Later(one_line(f"{server.place} {_gone(error)} before it took the text"))
        result = _handed_over(session, message, server.place)
        session.part()
        return result


class _Session(smtplib.SMTP):
    """One conversation with a server, which must end by a deadline. Opens it; raises OSError."""

    def __init__(self, server: _Server, deadline: Deadline) -> None:
        self._server = server
        self._deadline = deadline
        super().__init__(server.host, server.port, _own_name(), deadline.seconds)

    def _get_socket(self, host: str, port: int, timeout: float) -> socket.socket:
        plain = reach.connect(host, port, self._deadline)
        try:
            plain.bytes_left = REPLIES_BYTES_MAX
            self._is_local = _is_local(plain.peer)
            return reach.encrypt(plain, reach.trusting(), host) if self._server.tls else plain
        except OSError:
            plain.close()
            raise

    def secure(self) -> None:
        """Go on in TLS. Only this machine itself may do without, or show any certificate."""
        self.ehlo_or_helo_if_needed()
        if self._server.tls:
            return
        assert isinstance(self.sock, reach.Socket), "it is still the one that was opened"
        if not self.has_extn("starttls"):
            if self._is_local:
                return
            raise _UnusableError("offers no STARTTLS, without which nothing is mailed")
        context = reach.trusting()
        if self._is_local:
            # A local relay has a certificate of its own making.
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        bytes_left = self.sock.bytes_left
        reach.arm(self.sock)
        self.starttls(context=context)
        assert isinstance(self.sock, reach.TlsSocket), "the context makes these"
        self.sock.deadline, self.sock.bytes_left = self._deadline, bytes_left

    def introduce(self) -> None:
        """Log in, if the URL names a user."""
        if self._server.user is None:
            return
        self.ehlo_or_helo_if_needed()
        if not self.has_extn("auth"):
            raise _UnusableError("offers no login (take the user out of smtp, or try smtps)")
        self.login(self._server.user, self._server.password)

    def address(self, message: Mail) -> None:
        """Say from whom and to whom, and get leave to send. Raises _RefusedError."""
        self.ehlo_or_helo_if_needed()
        _expect(250, "the sender", self.mail(message["From"].addresses[0].addr_spec))
        _expect(250, "the recipient", self.rcpt(message["To"].addresses[0].addr_spec))
        _expect(354, "the message", self.docmd("DATA"))

    def hand_over(self, message: Mail) -> tuple[int, bytes]:
        """Send the text; the server's reply."""
        # A line that is one dot ends the text (RFC 5321, 4.5.2).
        text = _DOT.sub(b"..", message.as_bytes())
        self.send(text + (b"" if text.endswith(b"\r\n") else b"\r\n") + b".\r\n")
        return self.getreply()

    def part(self) -> None:
        """Say goodbye, without waiting long."""
        if isinstance(self.sock, reach.Socket | reach.TlsSocket):
            self.sock.deadline = Deadline(QUIT_S_MAX)
            with contextlib.suppress(OSError, smtplib.SMTPException):
                self.docmd("QUIT")


def _handed_over(session: _Session, message: Mail, place: str) -> Result:
    try:
        code, reply = session.hand_over(message)
    except (OSError, smtplib.SMTPException) as error:
        gone = f"{place} {_gone(error)} after the text was sent"
        return Unknown(one_line(f"{gone}: it may have been mailed"))
    said = one_line(f"{place} said {code} {_reply(reply)}")
    if 200 <= code < 300:
        return Sent(said)
    if 400 <= code < 500:
        return Later(said)
    if 500 <= code < 600:
        return Never(said)
    return Unknown(one_line(f"{place} said nothing of use after the text: it may have been mailed"))


def _expect(code: int, step: str, answer: tuple[int, bytes]) -> None:
    got, reply = answer
    # 251 and 252 take a recipient too (RFC 5321, 4.2.3).
    if got != code and not (code == 250 and got in (251, 252)):
        raise _RefusedError(step, got, reply)


def _refused(refused: _RefusedError, place: str) -> Result:
    why = one_line(f"{place} refused {refused.step}: {refused.code} {_reply(refused.reply)}")
    # A sender that is refused is the operator's to set right, and no fault of this message.
    if 500 <= refused.code < 600 and refused.step != "the sender":
        return Never(why)
    return Later(why)


def _unopened(error: Exception, server: _Server) -> str:
    """Why there is no session, without what was said about the login: it may repeat it."""
    place = server.place
    match error:
        case _UnusableError():
            why = f"{place} {error}"
        case smtplib.SMTPAuthenticationError():
            why = f"{place} refused the login with {error.smtp_code}: see user and password in smtp"
        case smtplib.SMTPResponseException():
            why = f"{place} turned us away: {error.smtp_code} {_reply(error.smtp_error)}"
        case smtplib.SMTPServerDisconnected():
            why = f"{place} {_gone(error)} before it took a message"
        case smtplib.SMTPException():
            why = f"{place} offers no way to log in that is known here"
        case UnicodeError():
            why = f"{place} can't be logged in to: user or password has letters beyond ASCII"
        case _:
            why = reach.words(error, place)
    return one_line(why)


def _gone(error: BaseException) -> str:
    # The library hides the cause, and says its own words.
    if isinstance(error, TimeoutError) or isinstance(error.__context__, TimeoutError):
        return "did not answer in time"
    if isinstance(error, smtplib.SMTPResponseException):
        return "said what can't be read"
    return "broke off"


def _reply(reply: bytes | str) -> str:
    text = reply.decode(errors="replace") if isinstance(reply, bytes) else reply
    return one_line(text, REPLY_CHARS_MAX)


def _is_local(address: str) -> bool:
    peer = ipaddress.ip_address(address.partition("%")[0])
    return any(peer in network for network in LOCAL)


def _own_name() -> str:
    """How we greet: the library would look it up, which may take the resolver's time."""
    name = socket.gethostname()
    return name if "." in name and name.isascii() else "[127.0.0.1]"


_DOT = re.compile(rb"^\.", re.MULTILINE)
_ODD = re.compile("[\\x00-\\x08\\x0b-\\x0c\\x0e-\\x1f\\x7f]")
