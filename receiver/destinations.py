"""Where messages go: what a destination is, what is owed to it, and how a send can end."""

import importlib
import re
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from receiver import mail
from receiver.select import MISSING, Scope, Template, Unjudgeable

if TYPE_CHECKING:
    from receiver.send_http import HttpSender

#: A rendered message as JSON, one argument of a program, and one header, in bytes.
BODY_BYTES_MAX = 262_144
ARGUMENT_BYTES_MAX = 100_000
HEADER_BYTES_MAX = 4_096

#: What a result says, in characters.
WHY_CHARS_MAX = 500

#: Headers that are ours, in lower case: the framing, and what names and signs the message.
RESERVED_HEADERS = frozenset(
    {
        *("connection", "content-length", "expect", "host", "te", "trailer", "transfer-encoding"),
        *("upgrade", "idempotency-key", "x-correlation-id"),
        *("webhook-id", "webhook-timestamp", "webhook-signature"),
    }
)
#: What a header's name may be (RFC 9110, 5.6.2).
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)


class Policy(msgspec.Struct, frozen=True):
    """What becomes of a send that did not end well."""

    ambiguous: Literal["retry", "review"] = "retry"
    #: How long the other side honours the operation key.
    idempotent_for_s: int | None = None
    #: None: the worker's own limit.
    attempts_max: int | None = None


class Http(msgspec.Struct, frozen=True):
    """A URL that takes the message as JSON.

    `secret` is the decoded key of Standard Webhooks. Proxies that the environment names are not
    used: what is signed for one host goes to that host.
    """

    name: str
    url: str
    method: Literal["POST", "PUT"] = "POST"
    #: None: the event and its operation.
    json: Template | None = None
    headers: dict[str, Template] = {}
    secret: bytes | None = None
    #: For the whole send, connecting and the last byte of the answer included.
    timeout_s: float = 10
    policy: Policy = Policy()

    def __repr__(self) -> str:
        return f"Http({self.name!r})"


class Email(msgspec.Struct, frozen=True):
    """A mailbox, through an SMTP server.

    `smtp` is smtp://user:password@host:587, which upgrades to TLS and must unless it is this
    machine, or smtps://user:password@host:465.
    """

    name: str
    smtp: str
    from_: str
    to: Template
    subject: Template
    text: Template
    timeout_s: float = 10
    policy: Policy = Policy()

    def __repr__(self) -> str:
        return f"Email({self.name!r})"


class Command(msgspec.Struct, frozen=True):
    """A program of this machine, without a shell; the message is JSON on its standard input."""

    name: str
    argv: tuple[Template, ...]
    timeout_s: float = 60
    policy: Policy = Policy()

    def __repr__(self) -> str:
        return f"Command({self.name!r})"


Destination = Http | Email | Command

#: What `render` makes for each kind.
PARTS: Mapping[type, frozenset[str]] = MappingProxyType(
    {
        Http: frozenset({"json", "headers"}),
        Email: frozenset({"to", "subject", "text"}),
        Command: frozenset({"argv", "input"}),
    }
)


class Owed(msgspec.Struct, frozen=True):
    """One attempt at one message. `body` is what `render` made."""

    #: The same in every attempt, and safe in headers and mail addresses.
    operation_key: str
    correlation_id: str
    attempt: int
    created_ms: int
    body: dict[str, Any]


class Sent(msgspec.Struct, frozen=True):
    """The other side took it."""

    detail: str


class Later(msgspec.Struct, frozen=True):
    """It did not happen, and may if it is tried again.

    `unreachable`: it is not about this message; no other would get through now either.
    """

    why: str
    retry_after_s: float | None = None
    unreachable: bool = False


class Never(msgspec.Struct, frozen=True):
    """The other side refused it for good."""

    why: str


class Unknown(msgspec.Struct, frozen=True):
    """It was on its way when contact was lost: it may have happened."""

    why: str


Result = Sent | Later | Never | Unknown


def one_line(text: str, chars_max: int = WHY_CHARS_MAX) -> str:
    """Text from anywhere, fit for a log line: printable, on one line, and bounded."""
    # Cut first: it may be long. The join leaves nothing that breaks a line.
    printable = "".join(c if c.isprintable() else " " for c in text[: chars_max * 4])
    line = " ".join(printable.split())
    return line if len(line) <= chars_max else line[: chars_max - 3] + "..."


class Senders:
    """Sends to destinations, on any thread, and keeps their connections open for a moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._http: HttpSender | None = None
        self._closed = False

    def send(self, destination: Destination, owed: Owed, now_ms: int) -> Result:
        """One attempt, within `timeout_s`; never raises for what the other side does.

        A name that does not resolve may take the resolver's time on top, a program that ignores
        SIGTERM the grace it gets.
        """
        if owed.body.keys() != PARTS[type(destination)]:
            return Never(
                f"it was written when {destination.name} was another kind of destination: make it "
                "that again and `receiver outbox retry`, or cancel it"
            )
        # Each way is imported where a message goes it, not by every start: see `import_way`.
        match destination:
            case Http():
                return self._to_urls().send(destination, owed, now_ms)
            case Email():
                from receiver import send_email

                return send_email.send(destination, owed)
            case Command():
                from receiver import send_command

                return send_command.send(destination, owed)

    def close(self) -> None:
        """Close idle connections. What is under way ends within its own time limit."""
        with self._lock:
            self._closed = True
            if self._http is not None:
                self._http.close()

    def _to_urls(self) -> "HttpSender":
        from receiver.send_http import HttpSender

        with self._lock:
            if self._http is None:
                self._http = HttpSender()
                if self._closed:
                    self._http.close()
            return self._http


def import_way(destination: Destination) -> None:
    """Import what sends there, before there is a message that would have to wait for it."""
    ways = {Http: "send_http", Email: "send_email", Command: "send_command"}
    importlib.import_module(f"receiver.{ways[type(destination)]}")


def render(destination: Destination, scope: Scope, about: dict[str, object]) -> dict[str, object]:
    """What is owed to a destination for an event, as `Owed.body` has it.

    `about` names the operation and the message. Raises Unjudgeable for what can't be sent.
    """
    where = f"destinations.{destination.name}"
    match destination:
        case Http():
            body = _http(destination, where, scope, about)
        case Email():
            body = _email(destination, where, scope)
        case Command():
            body = _command(destination, where, scope, about)
    try:
        size = len(msgspec.json.encode(body))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise Unjudgeable(where, "holds a text or a number that JSON can't carry") from error
    if size > BODY_BYTES_MAX:
        raise Unjudgeable(where, f"is a message of more than {BODY_BYTES_MAX} bytes")
    return body


def _http(http: Http, where: str, scope: Scope, about: dict[str, object]) -> dict[str, object]:
    json = _whole(scope, about) if http.json is None else http.json.render(scope)
    headers = {
        name: _header(name, template, f"{where}.headers.{name}", scope)
        for name, template in http.headers.items()
    }
    return {"json": json, "headers": headers}


def _whole(scope: Scope, about: dict[str, object]) -> dict[str, object]:
    whole: dict[str, object] = {"event": scope.document, "operation": about}
    message = scope.own.get("_message")
    said = message.get("data") if isinstance(message, dict) else None
    # What a handler gave along would be lost otherwise.
    return whole if said is None else whole | {"data": said}


def _header(name: str, template: Template, where: str, scope: Scope) -> str:
    if not HEADER_NAME.fullmatch(name) or name.lower() in RESERVED_HEADERS:
        raise Unjudgeable(where, "is no header that can be chosen")
    text = mail.one_line_text(_text(template, scope, where), where)
    if len(text.encode()) > HEADER_BYTES_MAX:
        raise Unjudgeable(where, f"is longer than {HEADER_BYTES_MAX} bytes")
    return text


def _email(email: Email, where: str, scope: Scope) -> dict[str, object]:
    to = _text(email.to, scope, f"{where}.to")
    subject = _text(email.subject, scope, f"{where}.subject")
    text = _text(email.text, scope, f"{where}.text")
    mail.address(email.from_, f"{where}.from")
    mail.address(to, f"{where}.to")
    mail.subject(subject, f"{where}.subject")
    return {"to": to, "subject": subject, "text": text}


def _command(
    command: Command, where: str, scope: Scope, about: dict[str, object]
) -> dict[str, object]:
    argv = [
        _argument(_text(template, scope, f"{where}.argv[{i}]"), f"{where}.argv[{i}]")
        for i, template in enumerate(command.argv)
    ]
    return {"argv": argv, "input": _whole(scope, about)}


def _argument(text: str, where: str) -> str:
    if "\0" in text:
        raise Unjudgeable(where, "holds a NUL, which no argument can")
    if len(text.encode(errors="replace")) > ARGUMENT_BYTES_MAX:
        raise Unjudgeable(where, f"is longer than {ARGUMENT_BYTES_MAX} bytes")
    return text


def _text(template: Template, scope: Scope, where: str) -> str:
    value = template.render(scope)
    if value is None:
        # Only one placeholder, which is all of the text, may be null.
        what = "".join(f"{{{path.text}}} " for path in template.paths)
        raise Unjudgeable(where, f"{what}{MISSING}")
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise Unjudgeable(where, "can't be written as text") from error
