"""Real processes, killed at each named point of what they do; then the next start, alone."""

import contextlib
import http.client
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import apsw

from store import copies, integrity, schema
from store.database import snapshot
from tests.processes import Now, Peer, Place, Running, destination, peering, placing
from tests.proof.story import LATER, Fact, checkout, feedback, invoice, later_version

#: The clock of whoever comes after the kill is ahead by more than any lease lasts, in seconds.
AHEAD_S = 400
#: And of a prune by more than a body is kept.
PRUNE_S = 100 * 86_400

RULES = """
[[rules]]
operation = "link-customer"
source = "stripe"
on = ["checkout.session.completed"]
link = { customer = "data.object.customer", workspace = "data.object.workspace" }

[[rules]]
operation = "grant-credits"
source = "stripe"
on = ["invoice.paid"]
subject = "data.object.id"
customer = "data.object.customer"
grant = { unit = "credits", amount = 100 }
send = [{ to = "repeated" }, { to = "reviewed" }]

[[rules]]
operation = "keep-feedback"
source = "queue"
on = ["feedback.created"]
subject = "data.object.id"
record = { kind = "feedback", data = { text = "{data.object.text}" } }
"""

# Made twice, it would show.
COUNT = """
[[rules]]
operation = "count-invoice"
source = "stripe"
on = ["invoice.paid"]
subject = "data.object.id"
customer = "data.object.customer"
sql = ["update app_workspaces set invoices = invoices + 1 where id = {_workspace}"]
"""

APP_TABLES = """
create table if not exists app_workspaces (id text primary key, invoices integer not null);
insert into app_workspaces values ('acme', 0), ('bistro', 0) on conflict do nothing
"""

#: Without those of the folder that every test begins with.
NO_APP_TABLES = "drop table workspaces; drop table plan_history; drop table poison"


FEEDBACK = feedback(1)
#: What is in the file before anybody is killed; the last one is parked.
EARLIER = (checkout("cus_1", "acme"), invoice(1, "cus_1"), invoice(2, "cus_2"))
NEW = invoice(3, "cus_1")
LINK = checkout("cus_2", "bistro")
FACTS = (*EARLIER, NEW, LINK, FEEDBACK)
GRANTED = {("in_1", "acme", 100), ("in_2", "bistro", 100), ("in_3", "acme", 100)}
COUNTED = [("acme", 2), ("bistro", 1)]


class Point(NamedTuple):
    """Where a process is killed: after each of these calls in turn, around the last of them."""

    act: str
    when: str
    steps: tuple[str, ...]
    times: int = 1


COMMIT = "store.database:Store.commit"
RECEIVE = "receiver.process:Processor.receive"
SETTLE = "receiver.dispatch:settle"
RESPOND = "receiver.app:respond"
WROTE_WAL, SYNCED_WAL = "tests.proof.dying:wrote_wal", "tests.proof.dying:synced_wal"
WROTE_FILE, SYNCED_FILE = "tests.proof.dying:wrote_file", "tests.proof.dying:synced_file"
MIGRATE = "store.schema:migrate"

POINTS: Mapping[str, Point] = MappingProxyType(
    {
        "delivery: stored": Point("deliver", "after", ("receiver.process:_insert",)),
        "delivery: claimed": Point("deliver", "after", ("store.operations:claim",)),
        "delivery: granted": Point("deliver", "after", ("store.ledger:enter",)),
        "delivery: messages owed": Point("deliver", "after", ("store.outbox:insert",)),
        "delivery: before the commit": Point("deliver", "before", (RECEIVE, COMMIT)),
        "delivery: in the commit, written": Point("deliver", "after", (RECEIVE, WROTE_WAL)),
        "delivery: in the commit, synced": Point("deliver", "after", (RECEIVE, SYNCED_WAL)),
        "delivery: after the commit": Point("deliver", "after", (RECEIVE, COMMIT)),
        "delivery: before the answer": Point("deliver", "before", (RESPOND,)),
        "delivery: after the answer": Point("deliver", "after", (RESPOND,)),
        "queued: leased, not committed": Point("queue", "after", ("store.inbox:lease",)),
        "queued: leased": Point("queue", "before", ("receiver.worker:Events._prepare",)),
        "queued: applied, not committed": Point(
            "queue", "after", ("receiver.process:Processor.work",)
        ),
        "queued: applied": Point("queue", "after", ("receiver.process:Processor.work", COMMIT)),
        "send: leased, not committed": Point("deliver", "after", ("store.outbox:lease",)),
        "send: leased": Point("deliver", "before", ("receiver.dispatch:owed",)),
        "send: connected": Point("deliver", "after", ("receiver.reach:connect",)),
        "send: request has left": Point("deliver", "after", ("receiver.exchange:Route.begin",)),
        "send: answer was read": Point("deliver", "before", (SETTLE,)),
        "send: settled, not committed": Point("deliver", "after", (SETTLE,)),
        "send: settled": Point("deliver", "after", (SETTLE, COMMIT)),
        "release: linked, not committed": Point("release", "after", ("store.links:add",)),
        "release: linked": Point("release", "after", ("store.links:add", COMMIT)),
        "release: being applied": Point(
            "release", "before", ("receiver.process:Processor._apply_due",)
        ),
        "release: applied, not committed": Point(
            "release", "after", ("receiver.process:Processor._apply_due",)
        ),
        "release: applied": Point(
            "release", "after", ("receiver.process:Processor._apply_due", COMMIT)
        ),
        "link by hand: not committed": Point("link", "after", ("store.links:add",)),
        "link by hand: committed": Point("link", "after", ("store.links:add", COMMIT)),
        "link by hand: released, not committed": Point(
            "link", "after", ("receiver.process:Processor._apply_due",)
        ),
        "checkpoint: first page": Point("checkpoint", "after", (WROTE_FILE,)),
        "checkpoint: some pages": Point("checkpoint", "after", (WROTE_FILE,), 5),
        "checkpoint: synced": Point("checkpoint", "after", (SYNCED_FILE,)),
        "first start: the file is made": Point("create", "after", ("store.database:_make_file",)),
        "first start: in WAL mode": Point("create", "after", ("store.database:_prepare",)),
        "first start: in the first step": Point("create", "after", (WROTE_WAL,)),
        "first start: has its tables": Point("create", "after", (MIGRATE,)),
        "first start: first commit": Point("create", "before", (COMMIT,)),
        "upgrade: copying": Point("upgrade", "after", ("store.copies:create",)),
        "upgrade: copied": Point("upgrade", "after", ("store.copies:_copy",)),
        "upgrade: checksum written": Point("upgrade", "after", ("store.copies:_write_checksum",)),
        "upgrade: copy has its name": Point("upgrade", "after", ("store.copies:make",)),
        "upgrade: in the step": Point("upgrade", "after", ("store.copies:make", WROTE_WAL)),
        "upgrade: stepped": Point("upgrade", "after", (MIGRATE,)),
        "backup: the copy is begun": Point("backup", "after", ("store.copies:create",)),
        "backup: copied": Point("backup", "after", ("store.copies:_copy",)),
        "backup: found whole": Point("backup", "after", ("store.backups:examine",)),
        "backup: checksum written": Point("backup", "after", ("store.copies:_write_checksum",)),
        "backup: copy has its name": Point("backup", "after", ("store.copies:make",)),
        "backup: noted, not committed": Point("backup", "after", ("store.backups:add",)),
        "prune: not committed": Point("prune", "after", ("store.forgotten:forget",)),
        "prune: a batch is gone": Point("prune", "after", ("receiver.retention:prune",)),
        "prune: noted, not committed": Point("prune", "after", ("receiver.retention:note_prune",)),
        "restore: alone with the file": Point("restore", "before", ("receiver.restore:_bring",)),
        "restore: brought": Point("restore", "after", ("receiver.restore:_bring",)),
        "restore: the old file has two names": Point("restore", "after", ("os:link",)),
        "restore: names synced": Point("restore", "before", ("os:link", "os:replace")),
        "restore: replaced": Point("restore", "after", ("os:link", "os:replace")),
        "restore: done, not noted": Point("restore", "after", ("receiver.restore:carry_out",)),
        "restore: noted, not committed": Point("restore", "after", ("receiver.restore:note",)),
    }
)


class Scene:
    """A folder, the other side, and what each process of ours runs first."""

    def __init__(self, place: Place, peer: Peer, point: Point) -> None:
        self.place, self.peer, self.point = place, peer, point
        self.later = point.act == "upgrade"
        #: Ids of the events that their senders were told are safe.
        self.answered = {fact.event_id for fact in EARLIER}
        self._armed = place.folder / "armed"

    def first(self, *, ahead_s: int = 0, killed: bool = False) -> str:
        """What a process runs first."""
        lines = ["from pathlib import Path", "from tests.proof import dying"]
        lines.append(f"dying.move_clock({ahead_s})")
        if self.point.act == "checkpoint":
            lines.append("from store import database; database.CHECKPOINT_PAGES = 1")
        if self.later:
            lines.append("from store import schema")
            lines.append(f"schema.STEPS = (*schema.STEPS, {LATER!r})")
        if killed:
            _, when, steps, times = self.point
            lines.append(f"dying.die(Path({str(self._armed)!r}), {steps!r}, {when!r}, {times})")
        return "\n".join(lines)

    def arm(self) -> None:
        self._armed.touch()

    def post(self, server: Running, fact: Fact) -> str:
        """The word of the answer, or nothing if there is none."""
        try:
            status, word = self.place.post(server, fact.source, fact.body)
        except (OSError, http.client.HTTPException):
            return ""
        assert status == 200, (status, word)
        self.answered.add(fact.event_id)
        return word

    def command(self, *arguments: str, ahead_s: int = 0) -> None:
        """A command that succeeds."""
        running = self.place.begin(*arguments, before=self.first(ahead_s=ahead_s))
        assert running.process.wait(COMMAND_S) == 0, running.log

    def killed_command(self, *arguments: str, ahead_s: int = 0) -> None:
        self.arm()
        before = self.first(ahead_s=ahead_s, killed=True)
        running = self.place.begin(*arguments, before=before)
        _assert_killed(running)

    def newest_backup(self) -> str:
        return str(max((self.place.folder / "backups").glob("*.db")))


#: Seconds that a command may take.
COMMAND_S = 60.0


def _assert_killed(running: Running) -> None:
    code = running.process.wait(COMMAND_S)
    assert code == -9, f"the point was not reached; it ended with {code}: {running.log}"


# What each act does, up to the kill; and again, by somebody who knows of nothing, after it.


def _deliver(scene: Scene, fact: Fact = NEW) -> None:
    server = scene.place.serve(before=scene.first(killed=True))
    scene.arm()
    scene.post(server, fact)
    _assert_killed(server)


def _begin(scene: Scene) -> None:
    scene.arm()
    _assert_killed(scene.place.serve(before=scene.first(killed=True), ready=False))


def _create(scene: Scene) -> None:
    for path in scene.place.folder.glob("receiver.db*"):
        path.unlink()
    scene.answered.clear()
    _begin(scene)
    with contextlib.closing(apsw.Connection(str(scene.place.database))) as app:
        app.set_busy_timeout(5_000)
        app.execute(APP_TABLES)


def _restore(scene: Scene) -> None:
    scene.command("backup")
    server = scene.place.serve(before=scene.first())
    assert scene.post(server, NEW) == "done"
    assert server.stop() == 0
    # It came after the backup, so a restore gives it up.
    scene.answered.remove(NEW.event_id)
    scene.killed_command("restore", scene.newest_backup(), "--yes", "--reason", "a test")


def _restore_again(scene: Scene) -> None:
    # Its server has run on whatever was there, and was stopped for it.
    scene.command("restore", scene.newest_backup(), "--yes", "--reason", "a test")


_LINK = ("links", "add", "stripe", "cus_2", "bistro", "--reason", "a test")

ACTS: Mapping[str, Callable[[Scene], None]] = MappingProxyType(
    {
        "deliver": _deliver,
        "queue": lambda scene: _deliver(scene, FEEDBACK),
        "release": lambda scene: _deliver(scene, LINK),
        "checkpoint": _deliver,
        "create": _create,
        "upgrade": _begin,
        "link": lambda scene: scene.killed_command(*_LINK),
        "backup": lambda scene: scene.killed_command("backup"),
        "prune": lambda scene: scene.killed_command("prune", ahead_s=PRUNE_S),
        "restore": _restore,
    }
)
AGAIN: Mapping[str, Callable[[Scene], None]] = MappingProxyType(
    {
        "link": lambda scene: scene.command(*_LINK),
        "backup": lambda scene: scene.command("backup"),
        "prune": lambda scene: scene.command("prune", ahead_s=PRUNE_S),
        "restore": _restore_again,
    }
)


def kill_at(name: str) -> list[str]:
    """Kill a process at this point; what is wrong afterwards, in words."""
    with tempfile.TemporaryDirectory(prefix="receiver-proof-") as folder:
        try:
            with _scene(Path(folder), POINTS[name]) as scene:
                ACTS[scene.point.act](scene)
                return [f"{name}: {fault}" for fault in _faults_after(scene)]
        except (AssertionError, subprocess.TimeoutExpired) as error:
            return [f"{name}: {error}"]


@contextlib.contextmanager
def _scene(folder: Path, point: Point) -> Iterator[Scene]:
    with peering() as peer, placing(folder) as places, contextlib.ExitStack() as versions:
        # What is shared with an app is never restored over.
        shared = point.act != "restore"
        config = (
            RULES
            + COUNT * shared
            + destination("repeated", peer.url("/repeated"))
            + destination("reviewed", peer.url("/reviewed"), 'ambiguous = "review"')
        )
        place = places(config, run="inside", threads=1)
        place.store.write(lambda tx: tx.db.execute(APP_TABLES if shared else NO_APP_TABLES))
        for fact in EARLIER:
            place.deliver(fact.source, fact.body)
        # From here on the file is that of the processes alone.
        place.store.close()
        if point.act == "upgrade":
            versions.enter_context(later_version())
        yield Scene(place, peer, point)


class _Ahead(Now):
    def __call__(self) -> int:
        return super().__call__() + AHEAD_S * 1000


def _faults_after(scene: Scene) -> list[str]:
    """Nobody helps: a start, and everybody who heard nothing asks again."""
    place, act = scene.place, scene.point.act
    # Before anybody settles what was under way.
    begun = _being_sent(place)
    if act == "restore":
        # Whichever of the two files it is, it is served.
        server = place.serve(before=scene.first(ahead_s=AHEAD_S))
        assert server.stop() == 0
    if act in AGAIN:
        AGAIN[act](scene)
    place.clock = _Ahead()
    server = place.serve(before=scene.first(ahead_s=AHEAD_S))
    # Before anything is sent again, which would hide it.
    there = {one for (one,) in place.query("select event_id from receiver_events")}
    faults = [f"{one} was answered, and is lost" for one in sorted(scene.answered - there)]
    for fact in FACTS:
        word = scene.post(server, fact)
        assert word in ("done", "duplicate", "pending", "parked"), f"{word}: {server.log}"
    place.wait_for(0, "select count(*) from receiver_events where state != 'done'")
    place.wait_for(0, "select count(*) from receiver_outbox where state = 'pending'")
    faults += [*_wrong_books(place, act), *_wrong_sends(scene, begun), *_leftovers(scene)]
    faults += [*_unwritten(scene), *_invisible(scene)]
    assert server.stop() == 0
    return faults


def _wrong_books(place: Place, act: str) -> list[str]:
    granted = Counter(place.query("select subject, workspace, amount from receiver_ledger"))
    records = place.value("select count(*) from receiver_records")
    with snapshot(place.database) as seen:
        faults = integrity.full_check(seen) + integrity.book_faults(seen)
    if granted != Counter(GRANTED):
        faults.append(f"granted {sorted(granted.elements())}")
    if act != "restore":
        counted = place.query("select id, invoices from app_workspaces order by 1")
        faults += [] if counted == COUNTED else [f"counted {counted}"]
    if records != 1:
        faults.append(f"{records} records")
    return faults


def _being_sent(place: Place) -> set[str]:
    """Messages that a worker has leased: of no others may it be unknown whether they went out."""
    # Of a copy: whoever opens the file itself does a part of what the next start is to do.
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / place.database.name
        for suffix in ("", "-wal"):
            with contextlib.suppress(FileNotFoundError):
                shutil.copy(f"{place.database}{suffix}", f"{copy}{suffix}")
        with contextlib.closing(apsw.Connection(str(copy))) as db:
            if not db.table_exists(None, "receiver_outbox"):
                return set()
            leased = "select operation_key from receiver_outbox where lease_owner is not null"
            return {key for (key,) in db.execute(leased)}


def _wrong_sends(scene: Scene, begun: set[str]) -> list[str]:
    # What the backup still owed is sent once more after each restore, and the operator is told so.
    more = 2 if scene.point.act == "restore" else 0
    sent = Counter(one.key for one in list(scene.peer.seen))
    faults = []
    rows = scene.place.query("select destination, operation_key, state from receiver_outbox")
    if len(rows) != 2 * len(GRANTED):
        faults.append(f"{len(rows)} messages are owed")
    for destination_name, key, state in rows:
        repeated = destination_name == "repeated"
        most = (2 if repeated else 1) + more
        least = 1 if state == "sent" else 0
        if state != "sent" and (repeated or (state, key in begun) != ("review", True)):
            faults.append(f"a message to {destination_name} is {state}")
        if not least <= sent[key] <= most:
            faults.append(f"a message to {destination_name} is {state}, sent {sent[key]} times")
    return faults


def _leftovers(scene: Scene) -> list[str]:
    place = scene.place
    held = "select count(*) from receiver_{} where lease_owner is not null"
    leases = sum(place.value(held.format(table)) for table in ("events", "outbox"))
    faults = [f"{leases} leases are held"] if leases else []
    faults += [str(part) for part in place.folder.rglob(".*") if part.is_file()]
    whole = [*place.folder.glob("backups/*.db"), *place.folder.glob("*.before-version-?")]
    faults += [f"{copy.name}: {fault}" for copy in whole for fault in copies.damage(copy)]
    if scene.later and place.value("select max(version) from receiver_schema") != len(schema.STEPS):
        faults.append("it is not upgraded")
    if scene.later and not whole:
        faults.append("no copy from before the upgrade is there")
    return faults


def _unwritten(scene: Scene) -> list[str]:
    """An act by hand without its row in the audit log, or more than one."""
    acts = scene.place.query("select action from receiver_audit where action like 'links %'")
    wanted = [("links add",)] * (scene.point.act == "link")
    return [] if acts == wanted else [f"by hand: {acts}"]


def _invisible(scene: Scene) -> list[str]:
    """What is unfinished and not told of."""
    reviews = scene.place.value("select count(*) from receiver_outbox where state = 'review'")
    told = scene.place.begin("status", before=scene.first(ahead_s=AHEAD_S))
    code = told.process.wait(COMMAND_S)
    wanted = 1 if reviews else 0
    return [] if code == wanted else [f"{reviews} in review, and status ends with {code}"]
