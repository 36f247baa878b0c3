"""Writes for people and for programs, and reads times: tables, colours, JSON lines."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple

import click

# Every command imports this, `--version` too: what few of them need stands in its function.

#: Columns between two cells, and before the further lines of a row.
GAP = 2
INDENT = 4
#: The fewest columns for prose, and those that it shall have beside whole times.
PROSE_MIN = 20
PROSE_WIDE = 60
#: Characters of one cell that are looked at, before it is cut to the terminal.
CELL_CHARS_MAX = 2_000

_AGE = r"(?a)(\d{1,6}) ?(s|min|m|h|d|w)"
_AGE_UNITS_MS = {
    "s": 1_000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
    "w": 604_800_000,
}
_UNIX = r"(?a)\d{1,11}(\.\d{1,9})?"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_AGES = ((86_400, 2, "days"), (3_600, 1, "h"), (60, 1, "min"))
_STATES = {
    "done": "green",
    "sent": "green",
    "pending": "cyan",
    "parked": "yellow",
    "quarantined": "red",
    "conflict": "yellow",
    "dead": "red",
    "review": "red",
}


class Painted(NamedTuple):
    """A text with a colour, where colours are shown."""

    text: str
    colour: str


class When(NamedTuple):
    """A point in time: whole, or its age alone where a terminal is narrow."""

    text: str
    age: str


Cell = str | int | Painted | When | None


def state(word: str) -> Painted | str:
    """A state or an answer's word in its colour."""
    return Painted(word, _STATES[word]) if word in _STATES else word


def say(text: str, colour: str | None = None) -> None:
    """One line for people on stdout; whatever could steer the terminal is escaped."""
    _write(_paint(escape(text), colour), sys_error=False)


def warn(text: str, colour: str | None = "yellow") -> None:
    """One line on stderr, so that it is not part of a listing."""
    _write(_paint(escape(text), colour), sys_error=True)


def hint(text: str) -> None:
    """What to try next."""
    say(f"next: {text}", "cyan")


def print_json(value: Mapping[str, object]) -> None:
    """One JSON object on one line; anything but ASCII is escaped, so that nothing can hide."""
    import json

    click.echo(json.dumps(value, separators=(",", ":")))


def print_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    prose: Literal["cut", "wrap"] | None = None,
) -> None:
    """Rows under their headings.

    On a terminal what does not fit goes to a further line of its row, and nothing is cut, so
    that whatever names a thing can be copied; `prose` says that the last column may be.
    """
    texts = [[_text(cell) for cell in row] for row in rows]
    if sys.stdout is None or not sys.stdout.isatty():
        _print_rows(headings, rows, texts, [[*range(len(headings))]], None)
        return
    import shutil

    room = shutil.get_terminal_size().columns
    if len(lay_out(_widths(headings, texts), room, PROSE_WIDE if prose else None)) > 1:
        texts = [[_text(cell, narrow=True) for cell in row] for row in rows]
    lines = lay_out(_widths(headings, texts), room, PROSE_MIN if prose else None)
    _print_rows(headings, rows, texts, lines, room if prose else None, wrap=prose == "wrap")


def print_fields(fields: Sequence[tuple[str, Cell]]) -> None:
    """Names and values, one below the other; None is left out."""
    shown = [(name, value) for name, value in fields if value is not None]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        colour = value.colour if isinstance(value, Painted) else None
        label = _paint(f"{name:<{width}}", "bold")
        _write(f"{label}  {_paint(_text(value), colour)}", sys_error=False)


def more(shown: int, limit: int) -> None:
    """Say so when a listing may have ended at its limit."""
    if shown >= limit:
        first = "first is" if limit == 1 else f"first {limit} are"
        warn(f"the {first} shown; see more with --limit", None)


def moment(at_ms: int | None, now_ms: int) -> str:
    """Local time with its age, as in `2026-11-30 14:03:11, 4 min ago`; `-` for None."""
    if at_ms is None:
        return "-"
    when = _datetime(at_ms)
    if when is None:
        return f"{at_ms} ms"
    return f"{when.astimezone():%Y-%m-%d %H:%M:%S}, {age(now_ms - at_ms)}"


def when(at_ms: int | None, now_ms: int) -> Cell:
    """The same for a table, which may have room for the age alone."""
    return None if at_ms is None else When(moment(at_ms, now_ms), age(now_ms - at_ms))


def age(passed_ms: int) -> str:
    """`4 min ago`, or `in 4 min` for what is still to come."""
    seconds = abs(passed_ms) // 1000
    text = f"{seconds} s"
    for unit, least, name in _AGES:
        if seconds >= unit * least:
            text = f"{seconds // unit} {name}"
            break
    return f"{text} ago" if passed_ms >= 0 else f"in {text}"


def rfc3339(at_ms: int | None) -> str | None:
    """UTC with milliseconds, as in `2026-11-30T13:03:11.250Z`."""
    when = None if at_ms is None else _datetime(at_ms)
    return None if when is None else f"{when:%Y-%m-%dT%H:%M:%S}.{when.microsecond // 1000:03}Z"


def parse_time(text: str, now_ms: int) -> int:
    """UTC milliseconds of RFC 3339, a date, Unix seconds, or an age such as `90s`, `2h`, `7d`.

    What names no offset is local, as listings show it. Raises ValueError in words.
    """
    aged = re.fullmatch(_AGE, text)
    if aged is not None:
        return now_ms - int(aged[1]) * _AGE_UNITS_MS[aged[2]]
    if re.fullmatch(_UNIX, text):
        return int(float(text) * 1000)
    try:
        when = datetime.fromisoformat(text)
        return (when.astimezone(UTC) - _EPOCH) // timedelta(milliseconds=1)
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"{text!r} is no time: write 2h, 3d, 2026-11-30, 2026-11-30T14:03:11Z or Unix seconds"
        ) from error


def counted(number: int, noun: str) -> str:
    """A number with its noun, as in `1 source` and `2 sources`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def size(count: int) -> str:
    """Bytes for a person, as in `12.3 MiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def escape(text: str) -> str:
    """The text with its control characters, and others that don't print, as `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _escaped(one) for one in text)


def plain(cell: Cell) -> str:
    """A cell's whole text, as it is."""
    return cell.text if isinstance(cell, Painted | When) else "" if cell is None else str(cell)


def lay_out(widths: Sequence[int], room: int, prose: int | None) -> list[list[int]]:
    """Which columns stand on each line of a row; the last may be cut to `prose`, if given."""
    lines: list[list[int]] = [[]]
    used = 0
    for column, width in enumerate(widths):
        needed = min(width, prose) if prose and column == len(widths) - 1 else width
        if lines[-1] and used + needed > room:
            lines.append([])
            used = INDENT
        lines[-1].append(column)
        used += width + GAP
    return lines


def _datetime(at_ms: int) -> datetime | None:
    try:
        return _EPOCH + timedelta(milliseconds=at_ms)
    except OverflowError:
        return None


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def _text(cell: Cell, *, narrow: bool = False) -> str:
    if cell is None:
        return "-"
    text = cell.age if narrow and isinstance(cell, When) else plain(cell)
    return escape(text[:CELL_CHARS_MAX])


def _widths(headings: Sequence[str], texts: Sequence[Sequence[str]]) -> list[int]:
    return [max(_width(row[i]) for row in (headings, *texts)) for i in range(len(headings))]


def _print_rows(
    headings: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    texts: Sequence[Sequence[str]],
    lines: Sequence[Sequence[int]],
    room: int | None,
    *,
    wrap: bool = False,
) -> None:
    widths = _widths(headings, texts)
    if room is not None:
        before = sum(widths[column] + GAP for column in lines[-1][:-1])
        left = room - before - (INDENT if len(lines) > 1 else 0)
        widths[-1] = min(widths[-1], max(left, PROSE_MIN))
    bold = [Painted("", "bold")] * len(headings)
    for cells, row in zip((bold, *rows), (headings, *texts), strict=True):
        for number, line in enumerate(lines):
            _print_line(cells, row, line, widths, INDENT if number else 0, wrap=wrap)


def _print_line(
    cells: Sequence[Cell],
    texts: Sequence[str],
    line: Sequence[int],
    widths: Sequence[int],
    indent: int,
    *,
    wrap: bool,
) -> None:
    """One line of a row; with `wrap`, prose that is too long goes on below where it began."""
    parts = []
    further: list[str] = []
    for column in line:
        text = texts[column]
        if column == len(widths) - 1 and _width(text) > widths[column]:
            if wrap:
                text, *further = _wrapped(text, widths[column])
            else:
                text = _cut(text, widths[column])
        cell = cells[column]
        padding = " " * (widths[column] - _width(text))
        parts.append(_paint(text, cell.colour if isinstance(cell, Painted) else None) + padding)
    shown = (" " * GAP).join(parts).rstrip()
    if shown:
        _write(" " * indent + shown, sys_error=False)
    start = indent + sum(widths[column] + GAP for column in line[:-1])
    for text in further:
        _write(" " * start + text, sys_error=False)


def _wrapped(text: str, width: int) -> list[str]:
    # Ids are never broken.
    import textwrap

    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _cut(text: str, width: int) -> str:
    if _width(text) <= width:
        return text
    kept = ""
    for character in text:
        if _width(kept + character) > width - 1:
            break
        kept += character
    return kept + "…"


def _width(text: str) -> int:
    """Columns on a terminal."""
    if text.isascii():
        return len(text)
    import unicodedata

    return sum(
        0 if unicodedata.combining(one) else 2 if unicodedata.east_asian_width(one) in "WF" else 1
        for one in text
    )


def _paint(text: str, colour: str | None) -> str:
    # https://no-color.org: any value but an empty one.
    if colour is None or os.environ.get("NO_COLOR"):
        return text
    if colour == "bold":
        return click.style(text, bold=True)
    return click.style(text, fg=colour)


def _write(text: str, *, sys_error: bool) -> None:
    # Colours are stripped where the stream is no terminal.
    click.echo(text, err=sys_error)
