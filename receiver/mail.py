"""Judges the addresses and subjects of mails."""

import re

import msgspec

from receiver.select import Unjudgeable

#: Characters of an address (RFC 5321, 4.5.3.1), of its display name and of a subject.
LOCAL_CHARS_MAX = 64
ADDRESS_CHARS_MAX = 254
DISPLAY_CHARS_MAX = 200
SUBJECT_CHARS_MAX = 500


class Mailbox(msgspec.Struct, frozen=True):
    """Who mail is from or to; `spec` is the address itself."""

    display: str
    spec: str


def address(text: str, where: str) -> Mailbox:
    """One mailbox, as `ann@example.com` or `Ann <ann@example.com>`; raises Unjudgeable.

    One, so that a value taken from an event can't add recipients.
    """
    found = re.fullmatch(_MAILBOX, one_line_text(text, where).strip())
    if found is None:
        raise Unjudgeable(where, "is no mail address")
    spec = (found["bracketed"] or found["bare"]).strip()
    local, at, domain = spec.rpartition("@")
    if not at or not re.fullmatch(_LOCAL, local, re.ASCII) or len(local) > LOCAL_CHARS_MAX:
        raise Unjudgeable(where, "is no mail address (write one, as in ann@example.com)")
    spec = f"{local}@{_ascii(domain, where)}"
    if len(spec) > ADDRESS_CHARS_MAX:
        raise Unjudgeable(where, f"is an address of more than {ADDRESS_CHARS_MAX} characters")
    display = (found["name"] or "").strip().strip('"')
    if len(display) > DISPLAY_CHARS_MAX:
        raise Unjudgeable(where, f"has a name of more than {DISPLAY_CHARS_MAX} characters")
    return Mailbox(display, spec)


def subject(text: str, where: str) -> None:
    """Raises Unjudgeable for what can't be a subject."""
    if len(one_line_text(text, where)) > SUBJECT_CHARS_MAX:
        raise Unjudgeable(where, f"is longer than {SUBJECT_CHARS_MAX} characters")


def one_line_text(text: str, where: str) -> str:
    """The text itself; raises Unjudgeable if it could end a header line and begin another."""
    if _CONTROL.search(text):
        raise Unjudgeable(where, "holds a line break or another control character")
    return text


def _ascii(domain: str, where: str) -> str:
    try:
        name = domain.encode("idna").decode()
    except UnicodeError as error:
        raise Unjudgeable(where, "has a domain that is no name") from error
    if not re.fullmatch(_DOMAIN, name, re.ASCII):
        raise Unjudgeable(where, "has a domain that is no name")
    return name


# With what Python's own splitlines() takes for the end of a line, and halves of surrogate pairs.
_CONTROL = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029\\ud800-\\udfff]")
_MAILBOX = r"(?P<name>[^<>]*)<(?P<bracketed>[^<>]+)>|(?P<bare>[^<>]*)"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LOCAL = rf"{_ATOM}(?:\.{_ATOM})*"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_DOMAIN = rf"{_LABEL}(?:\.{_LABEL})*"
