"""The log: one line for each thing that happened, bounded, and without a payload or a secret.

`log.info("what", key=value)` makes a line. Warnings and errors also go to the logger `receiver`
of the standard library, where the founder may hook in; what others log there is a line too.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import select
import stat
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, FilteringBoundLogger

#: Characters of a line in the log, of one value in it, lines that are written together, and
#: seconds that they may wait.
LINE_CHARS_MAX = 4_000
FIELD_CHARS_MAX = 200
LINES_HELD_MAX = 256
FLUSH_S = 0.2
#: Lines kept while nobody reads them, and bytes that what is said to have room takes without a
#: wait (PIPE_BUF, pipe(7)).
LINES_UNREAD_MAX = 1_000
CHUNK_BYTES = 4_096
#: Calls named of the way to an error, the innermost last.
TRAIL_CALLS_MAX = 4
#: Lines about unexpected errors in one minute; the rest is only counted.
ERRORS_A_MINUTE_MAX = 10

#: The standard library's logger for warnings and errors; a record's `receiver` has the fields.
LOGGER = logging.getLogger("receiver")

#: sd-daemon(3)
_PRIORITIES = MappingProxyType(
    {"debug": "<7>", "info": "<6>", "warning": "<4>", "error": "<3>", "critical": "<2>"}
)
_LEVELS = MappingProxyType(logging.getLevelNamesMapping())

# Printable ASCII but space, quote, equals and backslash.
_plain = re.compile(r"[!#-<>-\[\]-~]+").fullmatch
_encode = msgspec.json.Encoder(enc_hook=str).encode


class Lines:
    """Where lines go: JSON with its priority for the journal, elsewhere words for a terminal.

    Lines about deliveries are written together when `flush` is called, at the latest with the
    next warning: a write for each would cost as much as the delivery.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock_ns = clock_ns
        self._stream: TextIO | None = None
        self._held: list[str] = []
        self._room: select.poll | None = None
        self._writing = threading.Lock()
        self._unread: list[str] = []
        self._lost = 0
        self._second = 0
        self._second_text = ""
        self.journal = False

    def open(self, stream: TextIO, *, journal: bool) -> None:
        """Write to `stream` from now on; until then no line goes anywhere."""
        self.flush()
        self._stream, self.journal, self._room = stream, journal, _room_of(stream)

    def close(self) -> None:
        self.flush()
        self._stream = None

    def info(self, line: str) -> None:
        """Keep a line for the next `flush`."""
        if self._stream is None:
            return
        self._held.append(line)
        if len(self._held) >= LINES_HELD_MAX:
            self.flush()

    debug = info

    def error(self, line: str) -> None:
        """Write a line now, after those before it."""
        self.info(line)
        self.flush()

    warning = critical = error

    def flush(self) -> None:
        """Write what is held, as far as it goes without a wait."""
        with self._writing:
            # One assignment, so that a line of another thread is in one list or the other.
            lines, self._held = self._unread + self._held, []
            left: list[str] = []
            # A log that can't be written must not stop deliveries, nor one that nobody reads: a
            # terminal that is held, a pipe whose reader hangs.
            with contextlib.suppress(OSError, ValueError):
                left = self._write(lines) if lines else []
            self._unread = left[:LINES_UNREAD_MAX]
            self._lost += len(left) - len(self._unread)

    def _write(self, lines: list[str]) -> list[str]:
        """Write lines; returns those that there is no room for."""
        if self._room is None:
            self._put("".join(lines))
            return []
        for number, chunk in _chunks(lines):
            if not self._room.poll(0):
                return lines[number:]
            self._put(chunk)
        if self._lost:
            said = {"event": "lines of this log are lost, as nobody read it", "count": self._lost}
            self._put(self.line("warning", said))
            self._lost = 0
        return []

    def _put(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()

    def line(self, name: str, fields: EventDict) -> str:
        """One line, for the way that is open."""
        at = self.now()
        if self.journal:
            return _json_line(name, at, fields)
        return f"{at} {name.upper()} {words_of(fields)[:LINE_CHARS_MAX]}\n"

    def now(self) -> str:
        """The time for a line, in UTC: one that is said, never one that decides anything."""
        seconds, rest_ns = divmod(self._clock_ns(), 1_000_000_000)
        if seconds != self._second:
            self._second_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
            self._second = seconds
        return f"{self._second_text}.{rest_ns // 1_000_000:03}Z"


def _room_of(stream: TextIO) -> "select.poll | None":
    """What tells whether there is room in a stream; None for a file, which always has."""
    try:
        if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            return None
    except (OSError, ValueError):
        return None
    room = select.poll()
    room.register(stream.fileno(), select.POLLOUT)
    return room


def _chunks(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Whole lines put together, each time with the number of the first."""
    first, size = 0, 0
    for number, line in enumerate(lines):
        if size and size + len(line) > CHUNK_BYTES:
            yield first, "".join(lines[first:number])
            first, size = number, 0
        size += len(line)
    yield first, "".join(lines[first:])


class Delivered(msgspec.Struct, omit_defaults=True):
    """The line about one delivery; there is one for each, so it goes the short way."""

    at: str
    source: str
    account: str
    id: str
    type: str
    correlation: str
    keys: tuple[str, ...]
    outcome: str
    request: str
    ms: float
    events: int = 1


def delivered(one: Delivered) -> None:
    """What `log.info("delivery", ...)` would do, at a fifth of the cost."""
    if len(one.id) > FIELD_CHARS_MAX or len(one.type) > FIELD_CHARS_MAX:
        one.id, one.type = _shortened(one.id), _shortened(one.type)
    if not lines.journal:
        account = f" account={field(one.account)}" if one.account else ""
        keys = f" keys={field(one.keys)}" if one.keys else ""
        events = f" events={one.events}" if one.events > 1 else ""
        lines.info(
            f"{one.at} INFO delivery source={one.source}{account} id={field(one.id)} "
            f"type={field(one.type)} correlation={one.correlation}{keys} outcome={one.outcome} "
            f"request={one.request} ms={one.ms}{events}\n"
        )
        return
    text = _encode(one).decode()
    if not (text.isascii() and text.isprintable()):
        text = _ascii(msgspec.json.decode(text))
    lines.info(f'<6>{{"level":"info","event":"delivery",{text[1:]}\n')


class FromLogging(logging.Handler):
    """Makes a line of what is logged by the standard library, without an exception's text."""

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "receiver"):
            return  # came from here
        name = record.levelname.lower()
        name = name if name in _PRIORITIES else "info"
        fields: EventDict = {"event": record.getMessage(), "logger": record.name}
        if record.name == LOGGER.name:
            del fields["logger"]
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            fields["error"], fields["at"] = type(error).__name__, trail_of(error)
        getattr(lines, name)(lines.line(name, _cut(None, name, fields)))


def _cut(_: object, name: str, fields: EventDict) -> EventDict:
    for key, value in fields.items():
        # What happened may be a sentence; its values are names and numbers.
        limit = LINE_CHARS_MAX if key == "event" else FIELD_CHARS_MAX
        if type(value) is str and len(value) > limit:
            fields[key] = _shortened(value, limit)
    return fields


def _shortened(text: str, limit: int = FIELD_CHARS_MAX) -> str:
    return text if len(text) <= limit else text[:limit] + "..."


def _tell_logging(_: object, name: str, fields: EventDict) -> EventDict:
    if name not in ("info", "debug"):
        # Whatever is hooked in there, and however it fails, stops nothing here.
        with contextlib.suppress(Exception):
            values = {key: field(value) for key, value in fields.items() if key != "event"}
            # The same text for the same thing, so that a tracker can count it.
            text = " ".join([_template(fields["event"]), *(f"{key}=%({key})s" for key in values)])
            arguments = (values,) if values else ()
            LOGGER.log(_LEVELS[name.upper()], text, *arguments, extra={"receiver": dict(fields)})
    return fields


def _template(text: str) -> str:
    return escaped(text).replace("%", "%%")


def _line(_: object, name: str, fields: EventDict) -> str:
    return lines.line(name, fields)


#: The process's lines, and what makes them.
lines = Lines()
log: FilteringBoundLogger = structlog.wrap_logger(
    lines,
    processors=[_cut, _tell_logging, _line],
    wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    context_class=dict,
).bind()


def configure(stream: TextIO, environment: Mapping[str, str]) -> Lines:
    """Send our lines, and what others log by the standard library, to `stream`."""
    lines.open(stream, journal=is_journal(stream, environment))
    root = logging.getLogger()
    root.handlers[:] = [FromLogging()]
    LOGGER.setLevel(logging.INFO)
    # uvicorn has nothing to say.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL + 1)
    return lines


def is_journal(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether the stream is the journal, systemd.exec(5): the variable outlives a redirection."""
    device, _, inode = environment.get("JOURNAL_STREAM", "").partition(":")
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return (device, inode) == (str(status.st_dev), str(status.st_ino))


def flush_regularly(loop: asyncio.AbstractEventLoop) -> None:
    """Write what was logged, now and every so often."""
    lines.flush()
    loop.call_later(FLUSH_S, flush_regularly, loop)


def words_of(fields: Mapping[str, Any]) -> str:
    """Fields as words: what happened, then `key=value` for each that says something."""
    words = [escaped(str(fields["event"]))]
    for key, value in fields.items():
        if key != "event" and value not in ("", ()):
            words.append(f"{key}={field(value)}")
    return " ".join(words)


def field(value: object) -> str:
    """A value for a line of words: cut, and quoted with escapes if it is not one plain word."""
    if type(value) is not str:
        value = ",".join(value) if isinstance(value, tuple) else str(value)
    text = _shortened(value)
    return text if _plain(text) else json.dumps(text)


def escaped(text: str) -> str:
    """The text with whatever does not print as an escape."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def trail_of(error: BaseException) -> str:
    """Where an error was raised, innermost last; never its text."""
    calls = traceback.extract_tb(error.__traceback__)[-TRAIL_CALLS_MAX:]
    return ",".join(f"{Path(each.filename).name}:{each.lineno}" for each in calls) or "nowhere"


class Errors:
    """Reports what should not happen, a bounded number of lines a minute."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._minute = 0
        self._reported = 0

    def report(self, error: Exception, **fields: str) -> None:
        """One line that says where; the error's own text may hold a payload and is left out."""
        minute = self._clock() // 60_000
        if minute != self._minute:
            self._minute, self._reported = minute, 0
        self._reported += 1
        if self._reported <= ERRORS_A_MINUTE_MAX:
            log.error(
                "unexpected",
                **fields,
                error=type(error).__name__,
                at=trail_of(error),
                note="answered 503; please report it",
            )


def _json_line(name: str, at: str, fields: EventDict) -> str:
    whole = {"at": at, "level": name, **fields}
    text = _encode(whole).decode()
    if not (text.isascii() and text.isprintable()):
        # A terminal obeys more control characters than JSON escapes.
        text = _ascii(msgspec.json.decode(text))
    if len(text) > LINE_CHARS_MAX:
        event = str(fields["event"])[:FIELD_CHARS_MAX]
        text = _ascii({"at": at, "level": name, "event": event, "cut": True})
    return f"{_PRIORITIES[name]}{text}\n"


def _ascii(value: object) -> str:
    return json.dumps(value, separators=(",", ":")).replace("\x7f", "\\u007f")
