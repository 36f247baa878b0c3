"""How long programs take to start and to be ready, and the memory they have then: NAME=PROGRAM...

Each is started in turn, round after round, so that whatever else the machine does hits all alike.
"""

import argparse
import os
import re
import shlex
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

PATIENCE_S = 30.0


class Start(NamedTuple):
    """Milliseconds of `--version`, and of `serve` until READY=1, by the clock and of processors.

    The memory is that of all its processes then.
    """

    version_ms: float
    ready_ms: float
    processor_ms: float
    memory_kib: int


def start(program: list[str], folder: Path) -> Start:
    began = time.perf_counter()
    subprocess.run([*program, "--version"], check=True, stdout=subprocess.DEVNULL)
    version_ms = (time.perf_counter() - began) * 1000
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        path = folder / "notify"
        manager.bind(str(path))
        manager.settimeout(PATIENCE_S)
        began = time.perf_counter()
        server = subprocess.Popen(
            [*program, "serve", "--config", str(folder / "receiver.toml")],
            env=os.environ | {"NOTIFY_SOCKET": str(path)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            while b"READY=1" not in manager.recv(4096):
                pass
            ready_ms = (time.perf_counter() - began) * 1000
            return Start(version_ms, ready_ms, *used(server.pid))
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(PATIENCE_S)
            path.unlink()


def used(session: int) -> tuple[float, int]:
    """Milliseconds of processors, and KiB: their own memory and their part of what is shared."""
    ticks = total_kib = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if os.getsid(int(stat.parent.name)) == session:
                # utime, stime, cutime, cstime. proc(5)
                ticks += sum(map(int, stat.read_text().rpartition(")")[2].split()[11:15]))
                told = (stat.parent / "smaps_rollup").read_text()
                total_kib += int(re.search(r"^Pss:\s+(\d+)", told, re.MULTILINE)[1])  # type: ignore[index]
        except OSError:
            continue
    return ticks * 1000 / os.sysconf("SC_CLK_TCK"), total_kib


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("programs", nargs="+", metavar="NAME=PROGRAM")
    given = parser.parse_args()
    programs = {
        name: shlex.split(words) for name, words in (one.split("=", 1) for one in given.programs)
    }
    found: dict[str, list[Start]] = {name: [] for name in programs}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "set-up"
        first = next(iter(programs.values()))
        subprocess.run([*first, "init", str(folder)], check=True, stdout=subprocess.DEVNULL)
        config = folder / "receiver.toml"
        config.write_text(re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:0", config.read_text()))
        for round in range(given.rounds + 1):
            for name, program in programs.items():
                told = start(program, folder)
                # The first brings the program into the page cache.
                if round:
                    found[name].append(told)
    for name, starts in found.items():
        columns = zip(*starts, strict=True)
        version, ready, processor, memory = (statistics.median(column) for column in columns)
        print(
            f"{name:<8} --version {version:.0f} ms; ready after {ready:.0f} ms, "
            f"{processor:.0f} ms of them by a processor; {memory / 1024:.0f} MiB"
        )


if __name__ == "__main__":
    main()
