"""Runs the long form of the proof: `python -m tests.proof [--only PART] [--seed N] ...`."""

import argparse
import logging
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.proof import power
from tests.proof.disk import KINDS
from tests.proof.mutants import MUTANTS
from tests.service import services
from tests.test_crash import killed_under_load

#: How much of each part, where nothing else is asked for.
KILLS = 500

#: How often progress is shown, in seconds.
SHOW_S = 5.0


class Part(NamedTuple):
    """One line of the summary; `faults` in words, each with what makes it come again."""

    name: str
    done: str
    faults: Sequence[str]
    seconds: float = 0.0


class Progress:
    """A line on stderr that is overwritten, now and then."""

    def __init__(self, name: str, of: int) -> None:
        self._name, self._of = name, of
        self._shown = time.monotonic()

    def __call__(self, done: int) -> None:
        if time.monotonic() - self._shown > SHOW_S:
            self._shown = time.monotonic()
            print(f"{self._name}: {done} of {self._of}", file=sys.stderr, flush=True)


def _cuts(asked: argparse.Namespace) -> list[Part]:
    wanted = power.expected_end()
    parts = []
    for name, synchronous in (("power cuts", "full"), ("beside an app on normal", "normal")):
        recording = power.recorded(synchronous)
        calls = range(1, len(recording.calls) + 1)
        made = power.cut(
            recording,
            wanted,
            seed=asked.seed,
            at=calls[:: asked.every],
            kinds=KINDS if asked.every_kind else None,
            advance=Progress(name, len(calls)),
        )
        done = f"{made.cuts} cuts at {made.calls} calls, {made.disks} different disks"
        parts.append(Part(name, done, [str(fault) for fault in made.faults]))
    return parts


def _mutants(asked: argparse.Namespace) -> list[Part]:
    wanted = power.expected_end()
    missed = []
    for name, mutate in MUTANTS.items():
        with pytest.MonkeyPatch.context() as patch:
            mutate(patch)
            broken = power.recorded()
        at = power.some_cuts(broken, asked.seed, len(broken.calls) // 5)
        if not power.cut(broken, wanted, seed=asked.seed, at=at, faults_max=1).faults:
            missed.append(f"{name} is not found")
    return [Part("faults put in", f"{len(MUTANTS) - len(missed)} of {len(MUTANTS)} found", missed)]


def _kills(asked: argparse.Namespace) -> list[Part]:
    faults = []
    done = f"{asked.kills} kills"
    show = Progress("kills", asked.kills)
    with tempfile.TemporaryDirectory() as folder, services(Path(folder)) as start:
        try:
            sender = killed_under_load(start, asked.seed, asked.kills, show)
            done += f", {len(sender.acknowledged)} events answered"
        except AssertionError as error:
            faults.append(f"seed {asked.seed}: {error}")
    return [Part("kill -9 under load", done, faults)]


PARTS: dict[str, Callable[[argparse.Namespace], list[Part]]] = {
    "cuts": _cuts,
    "mutants": _mutants,
    "kills": _kills,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make proof", description=__doc__)
    parser.add_argument("--only", action="append", choices=list(PARTS), help="these parts alone")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--every", type=int, default=1, help="cut after each Nth call only")
    parser.add_argument("--every-kind", action="store_true", help="each cut in all four ways")
    parser.add_argument("--kills", type=int, default=KILLS, help=f"[{KILLS}]")
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)
    print(f"seed {asked.seed}")
    results = []
    for name in asked.only or PARTS:
        started = time.monotonic()
        made = PARTS[name](asked)
        seconds = time.monotonic() - started
        results += [part._replace(seconds=seconds / len(made)) for part in made]
    return _tell(results)


def _tell(results: Sequence[Part]) -> int:
    for part in results:
        verdict = f"{len(part.faults)} FAULTS" if part.faults else "nothing lost, nothing doubled"
        print(f"{part.name:<24} {part.done:<56} {verdict}  {part.seconds:.0f} s")
        for fault in part.faults:
            print(f"    {fault}")
    return 1 if any(part.faults for part in results) else 0


if __name__ == "__main__":
    sys.exit(main())
