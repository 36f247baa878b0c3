"""What is measured, part by part; each compares within itself, in rounds that take turns."""

import contextlib
import os
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from store.database import Store
from tests.bench import contestants, events, load
from tests.bench.contestants import Running
from tests.bench.load import Shot
from tests.bench.report import Figures
from tests.bulk import NOW_MS, Filling, Size

#: Distinct requests made for one load; it may not need more.
REQUESTS = 40_000
#: Deliveries of the lone sender, and syncs timed beside them.
LONE = 300
#: Microseconds that each sync of the slow disk takes longer.
SLOW_SYNC_US = 5_000
#: Seconds and arrivals a second of an open loop.
OPEN_S, OPEN_RATE = 8, 200
#: Events of the large file.
MANY = 5_000_000
#: Seconds that another process holds the write lock.
LOCK_S = 2.0

Start = Callable[[Path], contextlib.AbstractContextManager[Running]]


@dataclass
class Bench:
    """One run: where it works, how often, and what it found."""

    folder: Path
    keep: Path
    figures: Figures
    rounds: int
    seconds: float
    connections: tuple[int, ...]
    _made: dict[str, Path] = field(default_factory=dict)
    _folders: int = 0

    def requests(self, kind: str) -> Path:
        """The requests of a kind, signed once a run."""
        if kind not in self._made:
            make = {
                "new": events.new,
                "same": events.same,
                "garbage": events.garbage,
                "mixed": events.mixed,
            }[kind]
            path = self.folder / f"{kind}.requests"
            self._made[kind] = events.write_requests(path, make(REQUESTS))
        return self._made[kind]

    def fresh(self) -> Path:
        self._folders += 1
        path = self.folder / f"run{self._folders}"
        path.mkdir()
        return path

    def shoot(self, start: Start, kind: str, connections: int) -> Shot:
        """A contestant on an empty file under one load; ours is then held against its file."""
        folder = self.fresh()
        with start(folder) as target:
            shot = load.wrk(target, self.requests(kind), connections, self.seconds)
        if target.name == "ours":
            self.check(folder, kind, shot, connections)
        elif shot.broken or (shot.not_2xx and kind in ("new", "same")):
            print(f"{target.name}: {shot.not_2xx} not 2xx, {shot.broken} broken", file=sys.stderr)
        return shot

    def check(self, folder: Path, kind: str, shot: Shot, connections: int) -> None:
        """Every acknowledged event is in the file, once, with its grant."""
        expected = {
            "new": shot.requests,
            "same": shot.requests,
            "garbage": 0,
            "mixed": shot.requests - shot.not_2xx,
        }[kind]
        if shot.broken or (kind in ("new", "same") and shot.not_2xx):
            self.figures.losses.append(f"{kind}: {shot}")
        database = sqlite3.connect(f"file:{folder / 'receiver.db'}?mode=ro", uri=True)
        with contextlib.closing(database) as file:
            stored, again, done = file.execute(
                "select count(*), coalesce(sum(duplicates), 0), coalesce(sum(state = 'done'), 0) "
                "from receiver_events"
            ).fetchone()
            grants, amount = file.execute(
                "select count(*), coalesce(sum(amount), 0) from receiver_ledger"
            ).fetchone()
        # What was under way when the load ended may be stored without an answer.
        if not expected <= stored + again <= expected + connections:
            self.figures.losses.append(f"{kind}: {expected} acknowledged, {stored} + {again} there")
        if not stored == done == grants or amount != 100 * grants:
            self.figures.losses.append(f"{kind}: {stored} events, {grants} grants, {amount}")


def ours(folder: Path) -> contextlib.AbstractContextManager[Running]:
    return contestants.ours(folder)


def naive(folder: Path) -> contextlib.AbstractContextManager[Running]:
    return contestants.tutorial(folder, "naive")


def careful(folder: Path) -> contextlib.AbstractContextManager[Running]:
    return contestants.tutorial(folder, "careful")


def ours_slow(folder: Path) -> contextlib.AbstractContextManager[Running]:
    return contestants.ours(folder, slow_sync_us=SLOW_SYNC_US)


def careful_slow(folder: Path) -> contextlib.AbstractContextManager[Running]:
    return contestants.tutorial(folder, "careful", slow_sync_us=SLOW_SYNC_US)


def ratios(over: list[float], under: list[float]) -> list[float]:
    return [a / b for a, b in zip(over, under, strict=True)]


def throughput(bench: Bench) -> None:
    """New events on the full path beside the bare route."""
    aims = {32: 0.33, 128: 0.38}
    for count in bench.connections:
        limit, found = [], []
        for _ in range(bench.rounds):
            limit.append(bench.shoot(contestants.bare, "new", count).rate)
            found.append(bench.shoot(ours, "new", count).rate)
        part = f"{count} connections"
        bench.figures.add(part, "bare route", limit, "requests/s")
        bench.figures.add(part, "ours, new events", found, "requests/s")
        bench.figures.add(part, "ours / bare", ratios(found, limit), "", at_least=aims.get(count))


def kinds(bench: Bench) -> None:
    """Redeliveries, refusals and a mix, beside the bare route, at 32 connections."""
    aims = {"same": 0.40, "garbage": 0.55, "mixed": None}
    names = {"same": "duplicates only", "garbage": "rejected only", "mixed": "mix 70/20/10"}
    found: dict[str, list[float]] = {kind: [] for kind in aims}
    limit = []
    for _ in range(bench.rounds):
        limit.append(bench.shoot(contestants.bare, "new", 32).rate)
        for kind in aims:
            found[kind].append(bench.shoot(ours, kind, 32).rate)
    for kind, aim in aims.items():
        bench.figures.add(names[kind], "ours", found[kind], "requests/s")
        bench.figures.add(names[kind], "ours / bare", ratios(found[kind], limit), "", at_least=aim)


def peers(bench: Bench) -> None:
    """The tutorial in both forms and adnanh/webhook, at 32 connections."""
    starts: dict[str, tuple[Start, float]] = {
        "naive tutorial": (naive, 20),
        "careful tutorial": (careful, 20),
        "adnanh/webhook": (contestants.webhook, 1.3),
    }
    mine: list[float] = []
    found: dict[str, list[float]] = {name: [] for name in starts}
    for _ in range(bench.rounds):
        mine.append(bench.shoot(ours, "new", 32).rate)
        for name, (start, _) in starts.items():
            found[name].append(bench.shoot(start, "new", 32).rate)
    for name, (_, aim) in starts.items():
        bench.figures.add(name, "it", found[name], "requests/s")
        bench.figures.add(name, "ours / it", ratios(mine, found[name]), "", at_least=aim)


def commits(bench: Bench) -> None:
    """The rows alone: three inserts an event, committed in batches of 32, nothing else."""
    rates = []
    for _ in range(bench.rounds):
        rates.append(commit_loop(bench.fresh() / "loop.db", bench.seconds))
    bench.figures.add("commit loop", "events in batches of 32", rates, "events/s")


def commit_loop(path: Path, seconds: float) -> float:
    import apsw

    file = apsw.Connection(str(path))
    file.execute("pragma synchronous = full")
    file.execute("pragma journal_mode = wal")
    file.execute(
        "create table event (id integer primary key, key text unique, body blob);"
        "create table claim (key text primary key, event integer) without rowid;"
        "create table entry (key text primary key, amount integer) without rowid;"
    )
    began, number = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        file.execute("begin immediate")
        for _ in range(32):
            number += 1
            key, body = f"evt_{number:024d}", events.invoice(number)
            file.execute("insert into event (key, body) values (?, ?)", (key, body))
            file.execute("insert into claim values (?, ?)", (key, number))
            file.execute("insert into entry values (?, ?)", (key, 100))
        file.execute("commit")
    took = time.perf_counter() - began
    file.close()
    return number / took


def sync_ms(folder: Path) -> float:
    """The median of one fdatasync after a small append, in milliseconds."""
    took = []
    descriptor = os.open(folder / "sync", os.O_CREAT | os.O_WRONLY, 0o600)
    for _ in range(200):
        os.write(descriptor, b"x" * 4096)
        began = time.perf_counter()
        os.fdatasync(descriptor)
        took.append((time.perf_counter() - began) * 1000)
    os.close(descriptor)
    return statistics.median(took)


def lone(bench: Bench) -> None:
    """One sender that waits for each answer: it should wait for no one else."""
    limit, found, syncs, over = [], [], [], []
    for _ in range(bench.rounds):
        deliveries = list(events.new(LONE))
        with contestants.bare(bench.fresh()) as target:
            limit.append(statistics.median(load.lone(target, deliveries)))
        with contestants.ours(bench.fresh()) as target:
            found.append(statistics.median(load.lone(target, deliveries)))
        syncs.append(sync_ms(bench.folder))
        over.append((found[-1] - limit[-1]) / syncs[-1])
    bench.figures.add("a lone delivery", "bare route, median", limit, "ms")
    bench.figures.add("a lone delivery", "ours, median", found, "ms")
    bench.figures.add("a lone delivery", "one fdatasync, median", syncs, "ms")
    bench.figures.add("a lone delivery", "(ours - bare) / fdatasync", over, "", at_most=1.5)


def open_loop(bench: Bench) -> None:
    """Latencies while deliveries arrive at a fixed rate."""
    saturation = bench.shoot(ours, "new", 32).rate
    for rate in (OPEN_RATE, int(saturation / 2)):
        deliveries = events.write_json(bench.folder / "open.json", events.new(rate * OPEN_S + 1000))
        for name, start in (("bare", contestants.bare), ("ours", ours)):
            with start(bench.fresh()) as target:
                seen = load.k6(target, deliveries, rate, OPEN_S, bench.folder / "summary.json")
            if name == "ours" and seen.failed:
                bench.figures.losses.append(f"open loop at {rate}/s: {seen.failed} failed")
            values = {"p50": seen.p50, "p99": seen.p99, "p99.9": seen.p999, "max": seen.worst}
            for what, value in values.items():
                bench.figures.add(f"open loop, {rate}/s", f"{name}, {what}", [value], "ms")


def slow_disk(bench: Bench) -> None:
    """Each sync takes 5 ms longer: the library of slow_sync.c is preloaded."""
    ratio, worst, mine, theirs = [], [], [], []
    for _ in range(bench.rounds):
        shot = bench.shoot(ours_slow, "new", 64)
        mine.append(shot.rate)
        theirs.append(bench.shoot(careful_slow, "new", 64).rate)
        ratio.append(mine[-1] / theirs[-1])
        worst.append(shot.p99 / (SLOW_SYNC_US / 1000 + sync_ms(bench.folder)))
    part = "slow disk, 64 connections"
    bench.figures.add(part, "ours", mine, "requests/s")
    bench.figures.add(part, "one commit a request", theirs, "requests/s")
    bench.figures.add(part, "ours / one commit a request", ratio, "", at_least=20)
    bench.figures.add(part, "p99 of ours / one sync", worst, "", at_most=5)


def neighbours(bench: Bench) -> None:
    """Health checks, the command line's lock and the app's own writes at saturation."""
    health, locked, waits = [], [], []
    for _ in range(bench.rounds):
        with contestants.ours(bench.fresh()) as target:
            assert target.admin is not None, "it has an admin listener"
            with saturated(bench, target):
                with load.asked_meanwhile(target.admin, "/healthz") as took:
                    waits.append(app_writes(target.database, bench.seconds))
                health.append(p99(took))
                with load.asked_meanwhile(target.admin, "/healthz") as took:
                    hold_lock(target.database)
                locked.append(p99(took))
    part = "at saturation"
    bench.figures.add(part, "health check, p99", health, "ms", at_most=50)
    bench.figures.add(part, "the same, write lock held 2 s", locked, "ms", at_most=50)
    bench.figures.add(part, "an app's write, longest wait", waits, "s", at_most=1.5)


@contextlib.contextmanager
def saturated(bench: Bench, target: Running) -> Iterator[None]:
    """64 connections without a pause, for as long as the body may take."""
    requests, seconds = bench.requests("new"), bench.seconds + LOCK_S + 3
    thread = threading.Thread(target=load.wrk, args=(target, requests, 64, seconds))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def app_writes(database: Path, seconds: float) -> float:
    """The longest that one of an app's own transactions took, in seconds."""
    program = (
        "import sqlite3, sys, time\n"
        "file = sqlite3.connect(sys.argv[1], timeout=5, isolation_level=None)\n"
        "file.execute('create table if not exists app (at real)')\n"
        "end, worst = time.monotonic() + float(sys.argv[2]), 0.0\n"
        "while time.monotonic() < end:\n"
        "    began = time.monotonic()\n"
        "    file.execute('insert into app values (?)', (began,))\n"
        "    worst = max(worst, time.monotonic() - began)\n"
        "    time.sleep(0.01)\n"
        "print(worst)\n"
    )
    words = [sys.executable, "-c", program, str(database), str(seconds)]
    return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def hold_lock(database: Path) -> None:
    program = (
        "import sqlite3, sys, time\n"
        "file = sqlite3.connect(sys.argv[1], timeout=5, isolation_level=None)\n"
        "file.execute('begin immediate')\n"
        "time.sleep(float(sys.argv[2]))\n"
        "file.execute('rollback')\n"
    )
    words = [sys.executable, "-c", program, str(database), str(LOCK_S)]
    subprocess.run(words, check=True)


def processes(bench: Bench) -> None:
    """Memory, and how soon it is there."""
    idle, busy, mine, empty, version, listing = [], [], [], [], [], []
    compile_all(bench)
    for _ in range(bench.rounds):
        with contestants.bare(bench.fresh()) as target:
            empty.append(target.start_ms)
        folder = bench.fresh()
        with contestants.ours(folder) as target:
            mine.append(target.start_ms)
            idle.append(target.resident_mib())
            load.wrk(target, bench.requests("new"), 128, bench.seconds)
            busy.append(target.resident_mib())
        version.append(command_ms(folder, "--version"))
        listing.append(command_ms(folder, "events", "list"))
    bench.figures.add("memory", "idle", idle, "MiB", at_most=64)
    bench.figures.add("memory", "after saturation", busy, "MiB", at_most=96)
    bench.figures.add("start to first 200", "bare route", empty, "ms")
    bench.figures.add("start to first 200", "ours", mine, "ms")
    bench.figures.add("start to first 200", "ours / bare", ratios(mine, empty), "", at_most=1.5)
    bench.figures.add("command line", "receiver --version", version, "ms")
    bench.figures.add("command line", "receiver events list", listing, "ms")


def compile_all(bench: Bench) -> None:
    """Run once what is measured by its start."""
    folder = bench.fresh()
    with contestants.bare(bench.fresh()), contestants.ours(folder):
        command_ms(folder, "--version")
        command_ms(folder, "events", "list")


def scale(bench: Bench) -> None:
    """The same load on a file with many events, and what people ask of such a file."""
    many = bench.keep / f"many-{MANY}.db"
    if not many.exists():
        fill(many, MANY)
    full, empty, starts, memory = [], [], [], []
    worst: dict[str, list[float]] = {"events list": [], "events show": [], "status": []}
    for _ in range(bench.rounds):
        empty.append(bench.shoot(ours, "new", 32))
        folder = bench.fresh()
        before = stored(many)
        requests = bench.folder / "more.requests"
        events.write_requests(requests, events.new(REQUESTS, first=before))
        with contestants.ours(folder, database=many) as target:
            starts.append(target.start_ms)
            full.append(load.wrk(target, requests, 32, bench.seconds))
            memory.append(target.resident_mib())
            for name, words in (
                ("events list", ("events", "list")),
                ("events show", ("events", "show", f"evt_{before:024d}")),
                ("status", ("status",)),
            ):
                worst[name].append(command_ms(folder, *words, problems=True))
        added = stored(many) - before
        if not full[-1].requests <= added <= full[-1].requests + 32:
            bench.figures.losses.append(f"scale: {full[-1].requests} acknowledged, {added} there")
    part = f"{MANY // 1_000_000} million events"
    rates, limit = [shot.rate for shot in full], [shot.rate for shot in empty]
    bench.figures.add(part, "ours", rates, "requests/s")
    bench.figures.add(part, "ours / ours on an empty file", ratios(rates, limit), "", at_least=0.65)
    bench.figures.add(part, "p99", [shot.p99 for shot in full], "ms")
    bench.figures.add(part, "start to first 200", starts, "ms")
    bench.figures.add(part, "memory after the load", memory, "MiB")
    for name, took in worst.items():
        bench.figures.add(part, f"receiver {name}, the whole command", took, "ms")
    bench.figures.add(part, "bytes an event", [many.stat().st_size / stored(many)], "B")


def fill(path: Path, count: int) -> None:
    """By the store's own statements; takes minutes, hence kept."""
    print(f"making {path}, once ...", file=sys.stderr, flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    with contextlib.closing(Store.create(part, lambda: NOW_MS)) as store:
        Filling(store, Size(count)).fill()
    part.rename(path)


def stored(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as file:
        (found,) = file.execute("select max(id) from receiver_events").fetchone()
    return int(found)


def command_ms(folder: Path, *words: str, problems: bool = False) -> float:
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "cli", *words],
        cwd=folder,
        env=contestants.environment(),
        stdout=subprocess.DEVNULL,
        # Exit code 1 says that something needs a person.
        check=not problems,
    )
    return (time.perf_counter() - began) * 1000


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]
