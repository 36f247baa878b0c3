"""Collects figures and writes them as a table: median and spread, beside what is aimed at."""

import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

#: What stands from here on in a file of results is written by hand, and stays.
STORY = "## What was done"


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of several rounds; `aim` is in words, such as "at least 0.33"."""

    part: str
    what: str
    values: tuple[float, ...]
    unit: str
    aim: str = ""
    met: bool | None = None


@dataclass
class Figures:
    """All lines, and what was acknowledged but is not in the file as it should be."""

    lines: list[Line] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)

    def add(
        self,
        part: str,
        what: str,
        values: Sequence[float],
        unit: str,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        middle = statistics.median(values)
        aim, met = "", None
        if at_least is not None:
            aim, met = f"at least {at_least:g}", middle >= at_least
        if at_most is not None:
            aim, met = f"at most {at_most:g}", middle <= at_most
        self.lines.append(Line(part, what, tuple(values), unit, aim, met))


def write(figures: Figures) -> str:
    """The table, as Markdown."""
    head = (
        f"{machine()}, {datetime.now(UTC):%Y-%m-%d}. Median, and in brackets the lowest and the\n"
        "highest of the rounds. What is compared ran in turns, in one run.\n"
    )
    rows = ["| part | figure | value | aim | |", "|---|---|---|---|---|"]
    for line in figures.lines:
        verdict = {None: "", True: "met", False: "**missed**"}[line.met]
        rows.append(f"| {line.part} | {line.what} | {spread(line)} | {line.aim} | {verdict} |")
    return head + "\n" + "\n".join(rows) + "\n"


def write_results(path: Path, table: str) -> None:
    """Put a new table into the file, above what was written about it by hand."""
    before = path.read_text() if path.exists() else ""
    story = before[before.index(STORY) :] if STORY in before else ""
    path.write_text(f"# What `make bench` measured\n\n{table}\n{story}")


def spread(line: Line) -> str:
    middle = shown(statistics.median(line.values))
    unit = f" {line.unit}" if line.unit else ""
    if len(line.values) == 1:
        return middle + unit
    return f"{middle}{unit} ({shown(min(line.values))} to {shown(max(line.values))})"


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def machine() -> str:
    text = Path("/proc/cpuinfo").read_text()
    names = [line.partition(": ")[2] for line in text.splitlines() if line.startswith("model name")]
    model = names[0] if names else platform.machine()
    return f"{len(names)} x {model}, Python {platform.python_version()}"
