"""What is told of alerts, as a message to an ordinary destination."""

from collections.abc import Mapping, Sequence

import msgspec

from receiver.destinations import Command, Destination, Email, Http, render
from receiver.select import Scope
from store import outbox
from store.operations import Key
from store.outbox import ALERTS

#: The operation of every such message.
OPERATION = "alert"
#: Alerts that one message tells; the others are counted.
TOLD_MAX = 20


class Told(msgspec.Struct, frozen=True):
    """One alert as it is told; `since` is RFC 3339."""

    name: str
    subject: str
    words: str
    since: str
    command: str


class Letter(msgspec.Struct, frozen=True):
    """One message about alerts: those that are new, or that are told again, and how many more."""

    alerts: tuple[Told, ...]
    others: int = 0
    again: bool = False

    @property
    def text(self) -> str:
        """The whole for a person to read."""
        open_ = "still open" if self.again else "open"
        lines = [f"Receiver: {len(self.alerts)} alert{'s' * (len(self.alerts) != 1)} {open_}"]
        for one in self.alerts[:TOLD_MAX]:
            about = f" ({one.subject})" if one.subject else ""
            lines.append(f"- {one.name}{about}: {one.words}; run `{one.command}`")
        left = len(self.alerts[TOLD_MAX:]) + self.others
        if left:
            lines.append(f"and {left} more: run `receiver status`")
        return "\n".join(lines)


#: What the config is checked with.
SAMPLE = Letter((Told("dead", "", "1 event is dead", "2026-01-01T00:00:00.000Z", "receiver"),))


def body_of(destination: Destination, letter: Letter) -> dict[str, object]:
    """The message to a destination, as `Owed.body` has it.

    Templates find the letter as `_alert`. Raises Unjudgeable where they ask for an event's body.
    """
    whole: dict[str, object] = {
        "text": letter.text,
        "count": len(letter.alerts),
        "names": ", ".join(dict.fromkeys(one.name for one in letter.alerts)),
        "alerts": [msgspec.structs.asdict(one) for one in letter.alerts[:TOLD_MAX]],
    }
    about: Mapping[str, object] = {"source": ALERTS, "account": "", "type": OPERATION}
    body = render(destination, Scope({}, {"_event": dict(about), "_alert": whole}), {})
    match destination:
        case Http(json=None):
            # `text` is what chat services show.
            return body | {"json": whole}
        case Command():
            return body | {"input": whole}
        case Http() | Email():
            return body


def key_of(alerts: Sequence[tuple[str, str]], at_ms: int) -> Key:
    """What the message is owed once for: the first alert that it tells, and when."""
    name, subject = alerts[0]
    return Key(ALERTS, "", ":".join(filter(None, (name, subject, str(at_ms)))), OPERATION)


def operation_key(key: Key, destination: str) -> str:
    """The message's name for the other side."""
    return outbox.operation_key(key, destination, "")
