"""Runs the long form of the proof: `python -m tests.proof [--only PART] [--seed N] ...`."""

import argparse
import importlib.util
import logging
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from tests.proof import fuzz, power, restoring, storm
from tests.proof.broken import fail_at
from tests.proof.disk import KINDS
from tests.proof.machine import compare
from tests.proof.mutants import MODEL_MUTANTS, MUTANTS
from tests.proof.points import POINTS, kill_at
from tests.proof.races import race
from tests.proof.report import Part, record, tell
from tests.proof.surroundings import BY_HAND, FAULTS, FAULTS_OF_ROOT, meet
from tests.proof.targets import TARGETS
from tests.service import services
from tests.test_crash import killed_under_load

T = TypeVar("T")

#: How much of each part, where nothing else is asked for.
KILLS, STEPS, RACES_S, EXECUTIONS = 500, 20_000, 300, 10_000_000
SOURCES = 100_000

#: About as many calls as a day makes that can fail.
STORAGE_CALLS = 3_000

#: What is seldom come to may need another walk.
MUTANT_SEEDS = 3

#: How often progress is shown, in seconds.
SHOW_S = 5.0


class Progress:
    """A line on stderr, now and then."""

    def __init__(self, name: str, of: int) -> None:
        self._name, self._of = name, of
        self._shown = time.monotonic()

    def __call__(self, done: int) -> None:
        if time.monotonic() - self._shown > SHOW_S:
            self._shown = time.monotonic()
            print(f"{self._name}: {done} of {self._of}", file=sys.stderr, flush=True)


def _some(asked: argparse.Namespace, of: Sequence[T]) -> Sequence[T]:
    """Each Nth, which of them by the seed."""
    return of[asked.seed % asked.every :: asked.every]


def _cuts(asked: argparse.Namespace) -> Iterator[Part]:
    wanted = power.expected_end()
    kinds = KINDS if asked.every_kind else None
    for name, synchronous in (("power cuts", "full"), ("beside an app on normal", "normal")):
        recording = power.recorded(synchronous)
        calls = range(1, len(recording.calls) + 1)
        whole = synchronous == "full"
        at = _some(asked, calls) if whole else power.after_spending(recording)
        made = power.cut(
            recording,
            wanted,
            seed=asked.seed,
            at=at,
            kinds=kinds,
            advance=Progress(name, len(calls)),
        )
        yield _of_cuts(name, made)
    recording = restoring.recorded()
    made = power.cut(
        recording,
        restoring.expected_end(),
        seed=asked.seed,
        at=_some(asked, range(1, len(recording.calls) + 1)),
        kinds=kinds,
        judge=restoring.judged,
        advance=Progress("a restore", len(recording.calls)),
    )
    yield _of_cuts("a restore", made)


def _of_cuts(name: str, made: power.Cuts) -> Part:
    done = f"{made.cuts} cuts at {made.calls} calls, {made.disks} different disks"
    return Part(name, done, [str(fault) for fault in made.faults])


def _faults(asked: argparse.Namespace) -> Iterator[Part]:
    wanted = power.expected_end()
    first = asked.seed % asked.every
    show = Progress("storage fails", STORAGE_CALLS)
    failed = fail_at(wanted, every=asked.every, first=first, advance=show)
    done = f"{failed.runs} runs, failing at {failed.calls} calls, full and broken"
    yield Part("storage fails", done, failed.faults)


def _mutants(asked: argparse.Namespace) -> Iterator[Part]:
    wanted = power.expected_end()
    missed = []
    for name, mutate in MUTANTS.items():
        for beside, synchronous in (("", "full"), (", beside an app on normal", "normal")):
            with pytest.MonkeyPatch.context() as patch:
                mutate(patch)
                broken = power.recorded(synchronous)
            at = power.some_cuts(broken, asked.seed, len(broken.calls) // 5)
            if beside:
                at = power.after_spending(broken)
            if not power.cut(broken, wanted, seed=asked.seed, at=at, faults_max=1).faults:
                missed.append(f"{name}{beside} is not found")
    tried = 2 * len(MUTANTS)
    yield Part("mutants, by cuts", f"{tried - len(missed)} of {tried} found", missed)


def _points(asked: argparse.Namespace) -> Iterator[Part]:
    faults = []
    show = Progress("named points", len(POINTS))
    names = _some(asked, list(POINTS))
    for number, name in enumerate(names):
        faults += kill_at(name)
        show(number)
    yield Part("kill -9 at named points", f"{len(names)} of {len(POINTS)} points", faults)


def _machine(asked: argparse.Namespace) -> Iterator[Part]:
    names = [*FAULTS, *FAULTS_OF_ROOT]
    show = Progress("the machine", len(names))
    faults = []
    for number, name in enumerate(names):
        faults += meet(name)
        show(number)
    done = f"{len(names)} met, of which a person must end: {', '.join(BY_HAND)}"
    yield Part("faults of the machine", done, faults)


def _kills(asked: argparse.Namespace) -> Iterator[Part]:
    faults = []
    done = f"{asked.kills} kills"
    show = Progress("kills", asked.kills)
    with tempfile.TemporaryDirectory() as folder, services(Path(folder)) as start:
        try:
            sender = killed_under_load(start, asked.seed, asked.kills, show)
            done += f", {len(sender.acknowledged)} events answered"
        except AssertionError as error:
            faults.append(f"seed {asked.seed}: {error}")
    yield Part("kill -9 under load", done, faults)


def _model(asked: argparse.Namespace) -> Iterator[Part]:
    show = Progress("steps beside the model", asked.steps)
    ran = compare(asked.seed, asked.steps, advance=show)
    done = f"{ran.steps} steps, the same after each"
    yield Part("beside the model", done, [] if ran.fault is None else [ran.fault])
    missed = []
    for name, mutate in MODEL_MUTANTS.items():
        with pytest.MonkeyPatch.context() as patch:
            mutate(patch)
            seeds = range(asked.seed, asked.seed + MUTANT_SEEDS)
            if all(compare(seed, STEPS, shrink=False).fault is None for seed in seeds):
                missed.append(f"{name} is not found")
    found = len(MODEL_MUTANTS) - len(missed)
    yield Part("mutants, by the model", f"{found} of {len(MODEL_MUTANTS)} found", missed)


def _races(asked: argparse.Namespace) -> Iterator[Part]:
    raced = race(asked.seed, asked.seconds, Progress("seconds of races", asked.seconds))
    yield Part("races", raced.done, raced.faults)


def _fuzz(asked: argparse.Namespace) -> Iterator[Part]:
    if importlib.util.find_spec("atheris") is None:
        yield Part("fuzz", "left out, as only the extra `fuzz` has atheris: see make fuzz", ())
        return
    for name, target in TARGETS.items():
        if asked.target and name not in asked.target:
            continue
        wanted = max(1, asked.executions * target.share // 1_000_000)
        started = time.monotonic()
        made = fuzz.run(name, wanted, asked.seed % 2**31, asked.minutes * 60, asked.kept)
        each_s = made.executions / max(time.monotonic() - started, 0.1)
        done = f"{made.executions:,} executions, {each_s:,.0f}/s, {made.covered} edges"
        yield Part(f"fuzz {name}", done, [made.fault] if made.fault else ())


def _storm(asked: argparse.Namespace) -> Iterator[Part]:
    show = Progress("seconds of attacks", asked.seconds)
    with tempfile.TemporaryDirectory() as folder:
        made = storm.weather(Path(folder), asked.seed, asked.seconds, asked.sources, show)
    peak_mib, worst_ms = made.peak_bytes / storm.MIB, made.worst_s * 1000
    done = f"{made.answers:,} answers, peak {peak_mib:.0f} MiB"
    yield Part("attack mix", done, made.faults)
    done = f"{made.honest:,} deliveries meanwhile, the slowest {worst_ms:,.0f} ms"
    yield Part("the honest sender", done, ())


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Part]]] = {
    "cuts": _cuts,
    "faults": _faults,
    "mutants": _mutants,
    "points": _points,
    "machine": _machine,
    "kills": _kills,
    "model": _model,
    "races": _races,
    "storm": _storm,
    "fuzz": _fuzz,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make proof", description=__doc__)
    parser.add_argument("--only", action="append", choices=list(PARTS), help="these parts alone")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--every", type=int, default=1, help="each Nth call or point only")
    parser.add_argument("--every-kind", action="store_true", help="each cut in all four ways")
    parser.add_argument("--kills", type=int, default=KILLS, help=f"[{KILLS}]")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"beside the model [{STEPS}]")
    parser.add_argument(
        "--seconds", type=int, default=RACES_S, help=f"of races, and of attacks [{RACES_S}]"
    )
    parser.add_argument("--executions", type=int, default=EXECUTIONS, help=f"[{EXECUTIONS:,}]")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="fuzz it alone")
    parser.add_argument("--sources", type=int, default=SOURCES, help=f"unknown [{SOURCES:,}]")
    parser.add_argument("--minutes", type=int, default=0, help="at most, of fuzzing each target")
    parser.add_argument("--kept", type=Path, default=Path("build/fuzz"), help="folder of findings")
    parser.add_argument("--results", type=Path, help="a file that keeps the last of each part")
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)
    # As after an interrupt, what was started is ended and what was written is removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    print(f"seed {asked.seed}", flush=True)
    faults = 0
    for name in asked.only or PARTS:
        started = time.monotonic()
        for part in PARTS[name](asked):
            tell(part, time.monotonic() - started)
            if asked.results is not None:
                record(asked.results, part, time.monotonic() - started, asked.seed)
            started = time.monotonic()
            faults += len(part.faults)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
