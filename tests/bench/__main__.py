"""Runs the benchmark: `python -m tests.bench [--quick] [--rounds N] [--only PART]`."""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.bench import parts
from tests.bench.report import Figures, write, write_results

#: Rounds of everything that is compared, and seconds of each load.
ROUNDS, SECONDS = 5, 2.0
QUICK_ROUNDS, QUICK_SECONDS = 1, 2.0

PARTS: dict[str, Callable[[parts.Bench], None]] = {
    "throughput": parts.throughput,
    "kinds": parts.kinds,
    "peers": parts.peers,
    "commits": parts.commits,
    "lone": parts.lone,
    "open-loop": parts.open_loop,
    "slow-disk": parts.slow_disk,
    "neighbours": parts.neighbours,
    "processes": parts.processes,
    "scale": parts.scale,
}
QUICK = ("throughput", "peers", "lone", "processes")
TOOLS = ("wrk", "k6", "webhook", "cc")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a minute's worth of it")
    parser.add_argument("--rounds", type=int, help=f"of each comparison [{ROUNDS}]")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="these parts alone")
    parser.add_argument("--keep", type=Path, default=Path(".bench"), help="for the large file")
    parser.add_argument("--results", type=Path, help="write the table there, too")
    asked = parser.parse_args()
    # k6 is a package of this environment.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        print(f"missing: {', '.join(missing)} (Debian: apt-get install wrk webhook gcc)")
        return 2
    names = asked.only or (QUICK if asked.quick else list(PARTS))
    figures = Figures()
    asked.keep.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="run-", dir=asked.keep) as folder:
        bench = parts.Bench(
            folder=Path(folder).absolute(),
            keep=asked.keep.absolute(),
            figures=figures,
            rounds=asked.rounds or (QUICK_ROUNDS if asked.quick else ROUNDS),
            seconds=QUICK_SECONDS if asked.quick else SECONDS,
            connections=(32,) if asked.quick else (1, 8, 32, 128),
        )
        for name in names:
            print(f"{name} ...", file=sys.stderr, flush=True)
            PARTS[name](bench)
    table = write(figures)
    print(table)
    if asked.results is not None and not asked.quick:
        write_results(asked.results, table)
    for loss in figures.losses:
        print(f"WRONG: {loss}", file=sys.stderr)
    return 1 if figures.losses else 0


if __name__ == "__main__":
    sys.exit(main())
