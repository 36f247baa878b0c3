"""Looks every so often whether something needs a person, and tells of it once."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from receiver import facts, letters
from receiver.config import Settings
from receiver.console import rfc3339
from receiver.facts import Need
from receiver.letters import Letter, Told
from receiver.logs import log
from receiver.select import Unjudgeable
from store import alerts, outbox
from store.alerts import Alert
from store.database import Snapshot, Tx, snapshot
from store.errors import StoreError
from store.outbox import UNWRITTEN

if TYPE_CHECKING:
    from receiver.worker import Write

#: How often to look, in seconds.
LOOK_S = 15.0
#: Between two messages, whatever happens, in milliseconds: what opens meanwhile is told together.
GATHER_MS = 60_000
#: An alert that opens again within this time is not told again.
FLAP_MS = 3_600_000
HOUR_MS = 3_600_000
#: Characters kept of what an alert says and is about.
WORDS_CHARS_MAX = 300
SUBJECT_CHARS_MAX = 200


class Watch:
    """Opens and closes alerts, and owes the messages that tell of them."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        write: "Write",
        clock: Callable[[], int],
        *,
        sends: bool,
    ) -> None:
        self._settings = settings
        self._write = write
        self._clock = clock
        #: Without a worker nothing would send it.
        self._sends = sends

    def step(self) -> float:
        """Look once; how long to wait then, in seconds. Raises Unavailable."""
        settings, now_ms = self._settings(), self._clock()
        try:
            with snapshot(settings.database) as seen:
                found = self._found(seen, settings, now_ms)
                changed = bool(_changes(alerts.opened(seen), found)) or bool(
                    self._untold(seen, settings, found, now_ms)
                )
        except StoreError as error:
            log.warning("alerts are not watched now: %s", str(error))
            return LOOK_S
        if changed:
            # Told in the log only once it is written down.
            for change in self._write(lambda tx: self._take(tx, settings, found)):
                _log(change)
        return LOOK_S

    def _found(self, seen: Snapshot, settings: Settings, now_ms: int) -> list[Need]:
        disk = facts.disk_of(settings.database)
        looked = facts.look(seen, settings, now_ms, disk)
        return [
            one._replace(subject=one.subject[:SUBJECT_CHARS_MAX], words=one.words[:WORDS_CHARS_MAX])
            for one in facts.needs(looked, settings)
        ]

    def _take(self, tx: Tx, settings: Settings, found: Sequence[Need]) -> list[Alert | Need]:
        """Write down what opened and what closed, and owe the message about it."""
        changes = _changes(alerts.opened(tx), found)
        for change in changes:
            if isinstance(change, Alert):
                alerts.close(tx, change.id)
            else:
                alerts.open(tx, change.name, change.subject, change.words)
        told = self._untold(tx, settings, found, tx.now_ms)
        if told:
            _owe(tx, settings, told, found)
        return changes

    def _untold(
        self, seen: Snapshot, settings: Settings, found: Sequence[Need], now_ms: int
    ) -> list[Alert]:
        """Open alerts to tell of now: new ones, or all of them when it is time to remind."""
        if settings.alerts.to is None or not self._sends:
            return []
        newest_ms = alerts.newest_sent_ms(seen, now_ms)
        if newest_ms is not None and now_ms - newest_ms < GATHER_MS:
            return []
        told = {(one.name, one.subject) for one in found if one.told}
        opened = [one for one in alerts.opened(seen) if (one.name, one.subject) in told]
        new = [one for one in opened if one.sent_ms is None and _may_tell(seen, one, now_ms)]
        remind_ms = settings.alerts.remind_h * HOUR_MS
        due = [
            one
            for one in opened
            if one.sent_ms is not None and not 0 <= now_ms - one.sent_ms < remind_ms
        ]
        return new or (opened if due else [])


def _changes(opened: Sequence[Alert], found: Sequence[Need]) -> list[Alert | Need]:
    """The open alerts whose cause is gone, and the needs that no open alert is about."""
    wanted = {(one.name, one.subject) for one in found}
    known = {(one.name, one.subject) for one in opened}
    gone = [one for one in opened if (one.name, one.subject) not in wanted]
    return [*gone, *(one for one in found if (one.name, one.subject) not in known)]


def _log(change: Alert | Need) -> None:
    about = {"name": change.name, "subject": change.subject}
    if isinstance(change, Alert):
        log.info("alert closed", **about)
    else:
        log.warning("alert", **about, words=change.words, command=change.command)


def _may_tell(seen: Snapshot, alert: Alert, now_ms: int) -> bool:
    """Whether it was not told a moment ago, before it closed and opened again."""
    last_ms = alerts.last_sent_ms(seen, alert.name, alert.subject, now_ms)
    return last_ms is None or now_ms - last_ms >= FLAP_MS


def _owe(tx: Tx, settings: Settings, told: Sequence[Alert], found: Sequence[Need]) -> None:
    """One message for all of them, through the outbox like any other."""
    assert settings.alerts.to is not None, "there is somebody to tell"
    destination = settings.destinations[settings.alerts.to]
    now = {(one.name, one.subject): one for one in found}
    letter = Letter(
        tuple(
            Told(
                name=one.name,
                subject=one.subject,
                words=now[one.name, one.subject].words,
                since=rfc3339(one.opened_ms) or "",
                command=now[one.name, one.subject].command,
            )
            for one in told
        ),
        again=told[0].sent_ms is not None,
    )
    text, error = UNWRITTEN, None
    try:
        text = msgspec.json.encode(letters.body_of(destination, letter)).decode()
    except Unjudgeable as unjudgeable:
        error = f"does not render: {unjudgeable}"
    opened_ms = tx.now_ms if letter.again else told[0].opened_ms
    key = letters.key_of([(one.name, one.subject) for one in told], opened_ms)
    outbox.insert(tx, key, destination.name, "", body=text, event=None, error=error)
    for one in told:
        alerts.sent(tx, one.id)
