"""Says how each part of the proof ended, and keeps the last of each in a file."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from tests.bench.report import machine

HEAD = ("| part | done | faults | seconds | seed | day |", "|---|---|---|---|---|---|")


class Part(NamedTuple):
    """One line of the summary; `faults` in words, each with what makes it come again."""

    name: str
    done: str
    faults: Sequence[str]


def tell(part: Part, seconds: float) -> None:
    verdict = f"{len(part.faults)} FAULTS" if part.faults else "no fault"
    print(f"{part.name:<24} {part.done:<56} {verdict:<10} {seconds:4.0f} s", flush=True)
    for fault in part.faults:
        print(f"    {fault}", flush=True)


def record(path: Path, part: Part, seconds: float, seed: int) -> None:
    """Put one row for the part into the file's table; what is written below it stays."""
    before = path.read_text() if path.exists() else ""
    table, _, below = before.partition("\n## ")
    old = [row for row in table.splitlines() if row.startswith("| ") and row not in HEAD]
    rows = {row.split(" | ")[0].removeprefix("| "): row for row in old}
    done = f"{part.name} | {part.done} | {len(part.faults) or 'none'}"
    rows[part.name] = f"| {done} | {seconds:,.0f} | {seed} | {datetime.now(UTC):%Y-%m-%d} |"
    lines = [f"# What `make proof` and `make fuzz` found\n\n{machine()}.\n", *HEAD, *rows.values()]
    path.write_text("\n".join(lines) + "\n" + (f"\n## {below}" if below else ""))
