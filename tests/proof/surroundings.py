"""Faults of the machine under a real server: what is said, what is answered, what is left."""

import contextlib
import http.client
import os
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import apsw

from receiver.server import READY_WAIT_S
from store.errors import StoreError
from tests.conftest import stripe_body
from tests.processes import Now, Peer, Place, destination, peering, placing
from tests.service import (
    PATIENCE_S,
    STRIPE_CONFIG,
    Service,
    by_stripe,
    checkout,
    cpu_s,
    invoice,
    services,
    stripe_request,
    until,
    word,
)

CONFIG = 'database = "disk/receiver.db"\n' + STRIPE_CONFIG

#: How long the sender waits for an answer, in seconds: a server that ended leaves it waiting.
ANSWER_S = 5.0

#: Deliveries until a fault must have been met.
UNTIL_MET = 2_000

#: How long a disk is stuck, in seconds; and a small one's size.
STUCK_S = 30.0
DISK_BYTES = 16 * 1024 * 1024

#: Descriptors that are left, connections that come then, and bytes of memory.
FEW_DESCRIPTORS, CROWD = 2, 200
FEW_BYTES = 4 * 1024 * 1024

YEAR_S = 366 * 86_400


class Scene:
    """A server on a folder of its own, and one sender, who sends again what was not answered."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.service.database = service.folder / "disk/receiver.db"
        self.disk = service.folder / "disk"
        self.disk.mkdir()
        self.answered: list[int] = []
        self.starts = 0
        self._sent = 0

    def begin(self) -> None:
        self.service.start()
        self.service.deliver(checkout("evt_link"))
        self.take(3)

    def take(self, count: int, patience_s: float = PATIENCE_S) -> None:
        """So many invoices more are answered 200, each sent until it is.

        A server that has ended is started again, as a service manager does.
        """
        for _ in range(count):
            self._sent += 1
            number = self._sent
            until(lambda number=number: self._is_taken(number), patience_s)  # type: ignore[misc]

    def _is_taken(self, number: int) -> bool:
        if self.service.has_ended():
            self.starts += 1
            self.service.start(wait=False)
        if self.ask(number) != 200:
            return False
        self.answered.append(number)
        return True

    def ask(self, number: int) -> int:
        """The status of the answer about one invoice; 0: none came."""
        body = invoice(f"evt_{number}", f"in_{number}", note="a" * 3_000)
        host, port = self.service.public.getsockname()
        connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
        with contextlib.closing(connection):
            try:
                connection.request("POST", "/webhooks/stripe", body, dict(by_stripe(body)))
                return connection.getresponse().status
            except (OSError, http.client.HTTPException):
                return 0

    def refuses(self) -> bool:
        """Whether a new invoice is answered 503; while it starts, there may be no answer."""
        self._sent += 1
        status = self.ask(self._sent)
        assert status in (0, 503), f"{status}, which a restore loses"
        return status == 503

    def until_refused(self) -> int:
        """The first status that is not 200; all before it count as answered."""
        for _ in range(UNTIL_MET):
            self._sent += 1
            status = self.ask(self._sent)
            if status != 200:
                return status
            self.answered.append(self._sent)
        raise AssertionError("nothing was refused")

    def wait_for_line(self, pattern: str) -> None:
        """A line of the log that says it."""
        until(lambda: re.search(pattern, self.service.log) is not None)

    def assert_refusing(self) -> None:
        """It lives, and says that it can't write."""
        assert self.service.health("/healthz") == 200
        until(lambda: self.service.health("/readyz") == 503)

    def assert_kept(self) -> None:
        """Each invoice that was answered is granted once, and the file is whole."""
        subjects = {f"in_{number}" for number in self.answered}
        found = [one for (one,) in self.service.rows("select subject from receiver_ledger")]
        assert len(found) == len(set(found)), "an invoice is granted twice"
        assert subjects <= set(found), f"lost: {sorted(subjects - set(found))}"
        self.service.assert_books_balance()


Fault = Callable[[Scene], None]


def _refused_until(
    scene: Scene, cause: Callable[[], None], gone: Callable[[], None], said: str
) -> None:
    """503 while the cause lasts, with a line that says it, then on without help."""
    scene.begin()
    cause()
    assert scene.until_refused() == 503
    scene.wait_for_line(said)
    scene.assert_refusing()
    gone()
    scene.take(3)
    until(lambda: scene.service.health("/readyz") == 200)
    assert scene.starts == 0
    scene.assert_kept()


# A disk of its own


def _disk_full(scene: Scene) -> None:
    filler = scene.disk / "filler"

    def fill() -> None:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass

    with _mounted(scene.disk, "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none"):
        _refused_until(scene, fill, filler.unlink, "nothing can be acknowledged now: .*full")
        scene.service.stop()


def _read_only(scene: Scene) -> None:
    """What ext4 does after an error: only a new mount ends it, for which the server is stopped."""
    with _ext4(scene.disk) as image:
        scene.begin()
        _run("mount", "-o", "remount,abort", str(scene.disk))
        assert scene.until_refused() == 503
        scene.wait_for_line("nothing can be acknowledged now: .*Read-only file system")
        scene.assert_refusing()
        scene.service.stop()
        _run("umount", str(scene.disk))
        _run("e2fsck", "-p", str(image), codes=(0, 1))
        _run("mount", "-o", "loop", str(image), str(scene.disk))
        scene.service.start()
        scene.take(3)
        scene.assert_kept()
        scene.service.stop()


def _stuck(scene: Scene) -> None:
    with _ext4(scene.disk):
        scene.begin()
        _run("fsfreeze", "--freeze", str(scene.disk))
        frozen_s = time.monotonic()
        try:
            with scene.service.wire() as wire:
                body = invoice("evt_stuck", "in_stuck")
                wire.send(stripe_request(body))
                until(lambda: scene.service.health("/readyz") == 503, READY_WAIT_S * 3)
                assert scene.service.health("/healthz") == 200
                # Its commit may be durable all the same: the sender is to ask again.
                wire.socket.settimeout(PATIENCE_S)
                assert wire.answer().status == 503
                time.sleep(max(0.0, STUCK_S - (time.monotonic() - frozen_s)))
                _run("fsfreeze", "--unfreeze", str(scene.disk))
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", scene.disk], capture_output=True)
        scene.take(3)
        assert scene.starts == 0
        with scene.service.wire() as wire:
            assert word(wire.ask(stripe_request(body))) in ("done", "duplicate")
        scene.assert_kept()
        scene.service.stop()


# What the kernel gives a process


def _no_descriptors(scene: Scene) -> None:
    scene.begin()
    pid = scene.service.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    few = (used + FEW_DESCRIPTORS, before[1])
    resource.prlimit(pid, resource.RLIMIT_NOFILE, few)
    with contextlib.ExitStack() as crowd:
        for _ in range(CROWD):
            client = crowd.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(scene.service.public.getsockname())
        # Nobody is answered wrongly; whoever gets in is served.
        scene.ask(1)
        assert not scene.service.has_ended()
        spent = cpu_s(pid)
        time.sleep(1)
        assert cpu_s(pid) - spent < 0.7, "it spins"
        scene.wait_for_line("ERROR out of file descriptors: .*raise LimitNOFILE")
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    scene.take(3)
    assert scene.starts == 0
    scene.assert_kept()


def _no_memory(scene: Scene) -> None:
    scene.begin()
    pid = scene.service.pid
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (used + FEW_BYTES, before[1]))
    bodies = [invoice(f"evt_big_{n}", f"in_big_{n}", note="[" * 900_000) for n in range(16)]
    asked = [stripe_request(body) for body in bodies]
    with contextlib.ExitStack() as wires:
        opened = [wires.enter_context(scene.service.wire()) for _ in bodies]
        # All are held at once: none is whole before each is nearly there.
        for part in (slice(None, -1), slice(-1, None)):
            for wire, request in zip(opened, asked, strict=True):
                with contextlib.suppress(OSError):
                    wire.send(request[part])
        # The line is that of whoever wanted more: the delivery, its connection, or SQLite.
        told = re.compile("error=MemoryError|out of memory")
        until(lambda: scene.service.has_ended() or told.search(scene.service.log) is not None)
    if not scene.service.has_ended():
        resource.prlimit(pid, resource.RLIMIT_AS, before)
    scene.take(3)
    scene.assert_kept()


# The files


def _ends(scene: Scene, harm: Callable[[], None]) -> None:
    """It acknowledges nothing more and ends, with a line that says why."""
    scene.begin()
    harm()
    assert scene.until_refused() == 0
    assert scene.service.ended() == 1
    scene.wait_for_line(
        "CRITICAL stopped: .*was deleted or replaced while it was open.*start again"
    )


def _deleted(scene: Scene) -> None:
    backup = scene.service.folder / "backup.db"
    scene.begin()
    assert scene.service.command("backup", str(backup)).returncode == 0
    scene.service.database.unlink()
    assert scene.until_refused() == 0
    assert scene.service.ended() == 1
    scene.wait_for_line("CRITICAL stopped: .*was deleted or replaced .*`receiver restore` a backup")
    scene.service.start(wait=False)
    assert scene.service.ended() == 1
    scene.wait_for_line("receiver.db: is gone, .*`receiver restore`")
    restored = scene.service.command("restore", str(backup), "--yes")
    assert restored.returncode == 0, restored.stderr
    scene.service.start()
    scene.take(3)
    scene.assert_kept()


def _replaced(scene: Scene) -> None:
    def replace() -> None:
        copy = scene.disk / "copy"
        subprocess.run(["cp", scene.service.database, copy], check=True)
        copy.replace(scene.service.database)

    _ends(scene, replace)
    scene.take(3)
    scene.assert_kept()


def _shm_deleted(scene: Scene) -> None:
    _ends(scene, lambda: _beside(scene, "-shm").unlink())
    scene.take(3)
    scene.assert_kept()


def _wal_deleted(scene: Scene) -> None:
    """What was not moved into the file yet is lost, so it is not gone on with unnoticed."""
    _ends(scene, lambda: _beside(scene, "-wal").unlink())
    scene.take(1)
    scene.service.assert_books_balance()


def _shm_missing(scene: Scene) -> None:
    scene.begin()
    scene.service.kill()
    _beside(scene, "-shm").unlink()
    scene.service.start()
    scene.take(3)
    scene.assert_kept()


def _wal_missing(scene: Scene) -> None:
    """What was not moved into the file is lost; sent again, it is done once."""
    scene.begin()
    scene.service.stop()
    moved = [f"in_{number}" for number in scene.answered]
    scene.service.start()
    scene.take(3)
    scene.service.kill()
    _beside(scene, "-wal").unlink()
    scene.service.start()
    scene.wait_for_line("ERROR .*-wal is missing: .*`receiver reconcile SOURCE --apply`")
    assert scene.service.rows("select subject from receiver_ledger") == [(one,) for one in moved]
    assert {scene.ask(number) for number in scene.answered} == {200}
    scene.take(3)
    scene.assert_kept()


def _beside(scene: Scene, suffix: str) -> Path:
    return Path(f"{scene.service.database}{suffix}")


def _corrupted(pages: Callable[[apsw.Connection], list[int]]) -> Fault:
    """Refused with a line that names the damage; `receiver restore` of a backup ends it."""

    def harm(scene: Scene) -> None:
        service, backup = scene.service, scene.service.folder / "backup.db"
        scene.begin()
        scene.take(20)
        assert service.command("backup", str(backup)).returncode == 0
        service.stop()
        with contextlib.closing(apsw.Connection(str(service.database))) as db:
            size = db.execute("pragma page_size").get
            spoilt = pages(db)
        with service.database.open("r+b") as file:
            for page in spoilt:
                file.seek((page - 1) * size)
                file.write(b"\xa5" * size)
        service.start(wait=False)
        until(lambda: service.has_ended() or scene.refuses())
        scene.wait_for_line("malformed|not a database|is damaged")
        assert service.command("doctor").returncode == 1
        if not service.has_ended():
            service.kill()
        restored = service.command("restore", str(backup), "--yes")
        assert restored.returncode == 0, restored.stderr
        service.start()
        scene.take(3)
        scene.assert_kept()

    return harm


def _of_table(db: apsw.Connection) -> list[int]:
    return _roots(db, "name = 'receiver_events'")


def _of_index(db: apsw.Connection) -> list[int]:
    return _roots(db, "type = 'index' and tbl_name = 'receiver_events'")


def _roots(db: apsw.Connection, which: str) -> list[int]:
    query = f"select rootpage from sqlite_schema where {which} and rootpage > 0"
    return [page for (page,) in db.execute(query)]


def _of_header(db: apsw.Connection) -> list[int]:
    return [1]


# The clock


def _clock(jump_s: int, *, restart: bool) -> Fault:
    """Signatures with a time are refused while it is wrong, nothing else is, and nothing twice."""

    def jump(scene: Scene) -> None:
        with peering() as peer, placing(scene.disk) as places:
            config = RULES + destination("app", peer.url())
            place = places(config, run="inside", threads=1, handlers=HANDLERS)
            place.store.close()
            _live_through(place, peer, jump_s, restart)

    return jump


def _live_through(place: Place, peer: Peer, jump_s: int, restart: bool) -> None:
    ahead = place.folder / "ahead"
    ahead.write_text("0")
    first = f"from tests.proof import dying; dying.follow_clock({str(ahead)!r})"
    # A message that fails at first, so that it is owed by one clock and sent by the other.
    peer.status = 503
    server = place.serve(before=first)
    early = stripe_body("evt_1", "paid", id="in_1")
    assert place.post(server, "stripe", early) == (200, "done")
    place.wait_for(True, "select attempts > 0 from receiver_outbox")
    ahead.write_text(str(jump_s))
    if restart:
        server.kill()
        server = place.serve(before=first)

    new = stripe_body("evt_2", "paid", id="in_2")
    assert place.post(server, "stripe", new)[0] == 401
    assert place.post(server, "github", HOOK, event_id="d-1", type="push")[0] == 200
    place.clock = _Moved(jump_s)
    assert place.post(server, "stripe", early) == (200, "duplicate")
    queued = stripe_body("evt_q", "note", id="n_1")
    assert place.post(server, "queue", queued) == (200, "pending")
    place.wait_for(1, "select count(*) from receiver_records")
    peer.status, refused = 200, len(peer.seen)
    ahead.write_text("0")

    place.clock = Now()
    assert place.post(server, "stripe", new) == (200, "done")
    again = place.post(server, "github", HOOK, event_id="d-1", type="push")
    assert again == (200, "duplicate")
    place.wait_for(0, "select count(*) from receiver_outbox where state != 'sent'")
    assert place.value("select count(*) from receiver_ledger") == 2
    assert server.stop() == 0
    assert max(Counter(one.key for one in peer.seen[refused:]).values()) == 1, "sent twice"


HOOK = b'{"id": 1}'

RULES = """
[[rules]]
operation = "grant"
source = "stripe"
on = ["paid"]
subject = "data.object.id"
call = "grant"
send = [{ to = "app" }]

[[rules]]
operation = "note"
source = "queue"
on = ["note"]
subject = "data.object.id"
record = { kind = "note", data = {} }
"""

HANDLERS = """
def owe(event, tx):
    pass


def grant(event, tx):
    tx.grant("credits", 100, workspace="acme")
"""


class _Moved(Now):
    def __init__(self, ahead_s: int) -> None:
        super().__init__()
        self._ahead_s = ahead_s

    def __call__(self) -> int:
        return super().__call__() + self._ahead_s * 1000


#: Those that need no root and no tool, and those that do.
FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        "out of descriptors": _no_descriptors,
        "out of memory": _no_memory,
        "file deleted": _deleted,
        "file replaced": _replaced,
        "-wal deleted": _wal_deleted,
        "-wal missing at the start": _wal_missing,
        "-shm deleted": _shm_deleted,
        "-shm missing at the start": _shm_missing,
        "page of a table corrupted": _corrupted(_of_table),
        "page of each index corrupted": _corrupted(_of_index),
        "page of the header corrupted": _corrupted(_of_header),
        "clock a year ahead": _clock(YEAR_S, restart=False),
        "clock a year back": _clock(-YEAR_S, restart=False),
        "clock a year ahead at a restart": _clock(YEAR_S, restart=True),
        "clock a year back at a restart": _clock(-YEAR_S, restart=True),
    }
)
FAULTS_OF_ROOT: Mapping[str, Fault] = MappingProxyType(
    {"disk full": _disk_full, "disk read-only": _read_only, "disk stuck": _stuck}
)
#: What a person must end, as the server says: by a backup, a mount or a reconciliation.
BY_HAND = (
    "file deleted",
    "-wal deleted",
    "-wal missing at the start",
    "page of a table corrupted",
    "page of each index corrupted",
    "page of the header corrupted",
    "disk read-only",
)
TOOLS = ("mount", "umount", "mkfs.ext4", "e2fsck", "fsfreeze", "losetup")


def meet(name: str) -> list[str]:
    """Let a server meet this fault; what was wrong then, in words."""
    fault = FAULTS.get(name) or FAULTS_OF_ROOT[name]
    missing = _missing() if name in FAULTS_OF_ROOT else []
    if missing:
        return [f"{name}: not tried: {', '.join(missing)}"]
    with (
        tempfile.TemporaryDirectory(prefix="receiver-proof-") as folder,
        services(Path(folder)) as start,
    ):
        try:
            fault(Scene(start(CONFIG, serve=False)))
        except (AssertionError, OSError, StoreError, subprocess.SubprocessError) as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            return [f"{name}: {type(error).__name__}: {error} ({at.name}, line {at.lineno})"]
    return []


def _missing() -> list[str]:
    missing = [f"{tool} is not installed" for tool in TOOLS if shutil.which(tool) is None]
    return missing + (["it needs root"] if os.geteuid() else [])


@contextlib.contextmanager
def _ext4(folder: Path) -> Iterator[Path]:
    image = folder.with_name("image")
    with image.open("wb") as file:
        file.truncate(2 * DISK_BYTES)
    _run("mkfs.ext4", "-q", "-F", str(image))
    with _mounted(folder, "-o", "loop", str(image)):
        yield image


@contextlib.contextmanager
def _mounted(folder: Path, *how: str) -> Iterator[None]:
    _run("mount", *how, str(folder))
    try:
        yield
    finally:
        # Whoever still has it open ends later.
        subprocess.run(["umount", "--lazy", folder], capture_output=True)


def _run(*command: str, codes: tuple[int, ...] = (0,)) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in codes, f"{' '.join(command)}: {done.stderr}"
