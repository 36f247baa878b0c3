"""Group commit on the event loop: shared fsyncs, separate fates."""

import asyncio
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from store import writer as writer_module
from store.database import Job, Snapshot, Store, Tx
from store.errors import Unavailable
from store.writer import Writer

T = TypeVar("T")

# Holds the write lock until a line comes in.
HOLDER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("begin immediate")
db.execute(sys.argv[2])
print("held", flush=True)
sys.stdin.readline()
db.execute("commit")
"""


def nothing_due(snapshot: Snapshot, now_ms: int) -> Sequence[Job[Any]]:
    return ()


def with_writer(
    store: Store,
    use: Callable[[Writer], Awaitable[T]],
    *,
    fatal: list[str] | None = None,
    **of: Any,
) -> T:
    async def used() -> T:
        settings: dict[str, Any] = {"pending_max": 1024, "due": nothing_due} | of
        told = [] if fatal is None else fatal
        writer = Writer(store, on_fatal=told.append, **settings)
        try:
            return await use(writer)
        finally:
            await writer.close()

    return asyncio.run(used())


def note(tx: Tx, text: str) -> str:
    tx.db.execute("create table if not exists notes (text text not null) strict")
    tx.db.execute("insert into notes values (?)", (text,))
    return text


def noting(text: str) -> Callable[[Tx], str]:
    return lambda tx: note(tx, text)


def notes(store: Store) -> list[str]:
    return store.write(lambda tx: [text for (text,) in tx.db.execute("select text from notes")])


def test_what_arrives_together_shares_one_commit(store: Store) -> None:
    seen: list[int] = []

    def count() -> bool:
        seen.append(1)
        return False

    store.db.set_commit_hook(count)

    async def use(writer: Writer) -> list[str]:
        return await asyncio.gather(*[writer.submit(noting(f"n{n}")) for n in range(50)])

    results = with_writer(store, use)

    assert results == [f"n{n}" for n in range(50)]
    assert len(seen) == 1


def test_each_job_gets_its_own_result_or_error(store: Store) -> None:
    def bad(tx: Tx) -> str:
        note(tx, "undone")
        raise ValueError("mine alone")

    async def use(writer: Writer) -> list[object]:
        jobs = [writer.submit(noting("a")), writer.submit(bad), writer.submit(noting("b"))]
        return list(await asyncio.gather(*jobs, return_exceptions=True))

    first, error, last = with_writer(store, use)

    assert (first, last) == ("a", "b")
    assert isinstance(error, ValueError)
    assert notes(store) == ["a", "b"]


def test_nobody_is_answered_before_the_commit_is_durable(store: Store) -> None:
    """A second connection sees the row the moment the future is resolved."""

    async def use(writer: Writer) -> int:
        await writer.submit(noting("a"))
        return int(await run(sys.executable, "-c", COUNT, store.path))

    assert with_writer(store, use) == 1


COUNT = """
import sqlite3, sys
print(sqlite3.connect(sys.argv[1]).execute("select count(*) from notes").fetchone()[0])
"""


def test_more_than_pending_max_is_refused_and_the_rest_is_written(store: Store) -> None:
    async def use(writer: Writer) -> list[object]:
        jobs = [writer.submit(noting(f"n{n}")) for n in range(5)]
        return list(await asyncio.gather(*jobs, return_exceptions=True))

    results = with_writer(store, use, pending_max=3)

    assert results[:3] == ["n0", "n1", "n2"]
    assert all(isinstance(result, Unavailable) for result in results[3:])
    assert notes(store) == ["n0", "n1", "n2"]


def test_the_loop_goes_on_while_another_process_holds_the_lock(store: Store) -> None:
    async def use(writer: Writer) -> tuple[int, str]:
        holder = await hold(store)
        job = writer.submit(noting("a"))
        turns = 0
        while turns < 200:
            await asyncio.sleep(0)
            turns += 1
        assert not job.done()
        await let_go(holder)
        return turns, await job

    assert with_writer(store, use) == (200, "a")


def test_a_lock_held_too_long_is_refused_not_waited_for(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "WAIT_S_MAX", 0.2)

    async def use(writer: Writer) -> None:
        holder = await hold(store)
        with pytest.raises(Unavailable, match="lock"):
            await writer.submit(noting("a"))
        await let_go(holder)
        assert await writer.submit(noting("b")) == "b"

    with_writer(store, use)
    assert notes(store) == ["b"]


def test_after_a_refusal_for_the_lock_nothing_takes_it_while_nothing_waits(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "WAIT_S_MAX", 0.05)

    async def use(writer: Writer) -> None:
        holder = await hold(store)
        with pytest.raises(Unavailable, match="lock"):
            await writer.submit(noting("a"))
        await let_go(holder)
        await let_go(await hold(store))
        assert writer.trouble() is None
        assert not store.db.in_transaction

    with_writer(store, use)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110  the writer has no event to wait for
            await asyncio.sleep(0.001)


async def run(*command: str) -> bytes:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output


async def hold(store: Store, sql: str = "select 1") -> asyncio.subprocess.Process:
    holder = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        HOLDER,
        store.path,
        sql,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"held\n"
    return holder


async def let_go(holder: asyncio.subprocess.Process) -> None:
    await holder.communicate(b"\n")


def test_a_disk_that_hangs_costs_a_refusal_and_not_the_loop(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "WAIT_S_MAX", 0.05)
    monkeypatch.setattr(writer_module, "COMMIT_S_MAX", 0.05)
    monkeypatch.setattr(writer_module, "DUE_EVERY_S", 0.02)
    answers = threading.Event()

    async def use(writer: Writer) -> str:
        store.db.set_commit_hook(lambda: not answers.wait(60))
        under_way = writer.submit(noting("a"), hurried=True)
        behind = writer.submit(noting("b"), hurried=True)
        await asyncio.sleep(0)
        later = writer.submit(noting("c"))
        for job in (under_way, behind, later):
            with pytest.raises(Unavailable, match="the disk takes too long"):
                await job
        answers.set()
        monkeypatch.setattr(writer_module, "WAIT_S_MAX", 60.0)
        return await writer.submit(noting("d"))

    try:
        assert with_writer(store, use) == "d"
    finally:
        answers.set()
    # What was under way may be durable all the same; what waited behind it is not.
    store.db.set_commit_hook(None)
    assert notes(store) == ["a", "b", "d"]


def test_a_job_that_took_long_itself_is_not_refused_for_the_disk(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "WAIT_S_MAX", 0.02)
    monkeypatch.setattr(writer_module, "DUE_EVERY_S", 0.01)
    over = threading.Event()

    def slow(tx: Tx) -> str:
        over.wait(0.1)
        return noting("a")(tx)

    async def use(writer: Writer) -> str:
        # The commit takes a moment too, in which overdue jobs are looked for.
        store.db.set_commit_hook(lambda: over.wait(0.1))
        return await writer.submit(slow, hurried=True)

    assert with_writer(store, use) == "a"


def test_who_is_not_hurried_learns_how_a_commit_that_took_long_has_ended(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is told that its lease was not written leaves the work to nobody."""
    monkeypatch.setattr(writer_module, "WAIT_S_MAX", 0.05)
    monkeypatch.setattr(writer_module, "COMMIT_S_MAX", 0.05)
    monkeypatch.setattr(writer_module, "DUE_EVERY_S", 0.02)
    answers = threading.Event()

    async def use(writer: Writer) -> str:
        store.db.set_commit_hook(lambda: not answers.wait(60))
        hurried = writer.submit(noting("a"), hurried=True)
        patient = writer.submit(noting("b"))
        with pytest.raises(Unavailable, match="the disk takes too long"):
            await hurried
        answers.set()
        return await patient

    try:
        assert with_writer(store, use) == "b"
    finally:
        answers.set()


def test_what_was_refused_is_not_run_again_when_its_commit_is_undone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "WAIT_S_MAX", 0.05)
    monkeypatch.setattr(writer_module, "COMMIT_S_MAX", 0.05)
    monkeypatch.setattr(writer_module, "DUE_EVERY_S", 0.02)
    answers = threading.Event()
    undone: list[int] = []

    def refuse() -> bool:
        # To SQLite that is a constraint, like those that are looked at last.
        answers.wait(60)
        undone.append(1)
        return True

    async def use(writer: Writer) -> None:
        store.db.set_commit_hook(refuse)
        with pytest.raises(Unavailable, match="the disk takes too long"):
            await writer.submit(noting("a"), hurried=True)
        answers.set()
        await until(lambda: not writer.waiting)

    try:
        with_writer(store, use)
    finally:
        answers.set()
    assert len(undone) == 1


def test_a_replaced_wal_means_nothing_more_is_acknowledged(store: Store, tmp_path: Path) -> None:
    fatal: list[str] = []

    async def use(writer: Writer) -> None:
        await writer.submit(noting("before"))
        os.rename(store.path + "-wal", tmp_path / "stolen")
        with pytest.raises(Unavailable):
            await writer.submit(noting("after"))
        with pytest.raises(Unavailable):
            await writer.submit(noting("later"))

    with_writer(store, use, fatal=fatal)

    assert len(fatal) == 1
    assert "was deleted or replaced" in fatal[0]


def test_a_replaced_wal_is_seen_where_the_database_is_named_by_a_link(
    store: Store, tmp_path: Path
) -> None:
    """SQLite keeps the -wal beside the file: beside the link there is none to look at."""
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "linked.db"
    link.symlink_to(store.path)
    fatal: list[str] = []

    async def use(writer: Writer) -> None:
        await writer.submit(noting("before"))
        os.rename(store.path + "-wal", tmp_path / "stolen")
        with pytest.raises(Unavailable):
            await writer.submit(noting("after"))

    with contextlib.closing(Store.open(link, store.clock)) as linked:
        with_writer(linked, use, fatal=fatal)

    assert len(fatal) == 1


def test_a_replaced_database_means_nothing_more_is_acknowledged(
    store: Store, tmp_path: Path
) -> None:
    fatal: list[str] = []

    async def use(writer: Writer) -> None:
        os.rename(store.path, tmp_path / "moved")
        with pytest.raises(Unavailable):
            await writer.submit(noting("after"))

    with_writer(store, use, fatal=fatal)

    assert len(fatal) == 1


def test_a_replaced_shm_means_nothing_more_is_acknowledged(store: Store) -> None:
    """With another -shm, others would not see our commits, nor we theirs."""
    fatal: list[str] = []

    async def use(writer: Writer) -> None:
        await writer.submit(noting("before"))
        os.unlink(store.path + "-shm")
        with pytest.raises(Unavailable):
            await writer.submit(noting("after"))

    with_writer(store, use, fatal=fatal)

    assert len(fatal) == 1


def test_a_due_job_in_front_does_not_switch_off_the_refusal_of_those_behind(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "WAIT_S_MAX", 0.2)
    monkeypatch.setattr(writer_module, "DUE_EVERY_S", 0.01)

    async def use(writer: Writer) -> None:
        holder = await hold(store)
        await until(lambda: len(writer._queue) == 1)
        with pytest.raises(Unavailable, match="lock"):
            await writer.submit(noting("a"))
        await asyncio.wait_for(writer.close(), 1)
        await let_go(holder)

    with_writer(store, use, due=lambda snapshot, now_ms: [Job(noting("due"))])


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
def test_no_error_of_a_job_leaves_the_transaction_open(
    store: Store, error: type[BaseException]
) -> None:
    def bad(tx: Tx) -> str:
        note(tx, "undone")
        raise error

    jobs = [Job(noting("a")), Job(bad), Job(noting("b"))]
    store.write_all(jobs)

    assert isinstance(jobs[1].error, error)
    assert notes(store) == ["a", "b"]


def test_a_full_disk_refuses_and_the_next_delivery_after_it_is_written(store: Store) -> None:
    """max_page_count makes SQLite itself say that the disk is full."""

    async def use(writer: Writer) -> None:
        await writer.submit(noting("before"))
        pages = store.db.execute("pragma page_count").get
        store.db.execute(f"pragma max_page_count = {pages + 1}").fetchall()
        with pytest.raises(Unavailable, match="full"):
            await writer.submit(noting("x" * 100_000))
        # The connection is opened anew, so the limit is gone: the disk has room again.
        while True:
            try:
                assert await writer.submit(noting("after")) == "after"
                return
            except Unavailable:
                await asyncio.sleep(0.01)

    with_writer(store, use)
    assert notes(store) == ["before", "after"]


def test_a_statement_dropped_during_a_commit_does_not_lock_the_writer_out(store: Store) -> None:
    """apsw can't end it then, and the connection goes on reading what was there before."""
    dropped = threading.Event()
    committing = threading.Event()
    kept: list[object] = []

    def leave_open(tx: Tx) -> None:
        note(tx, "a")
        note(tx, "b")
        reading = tx.db.execute("select text from notes")
        next(reading)
        kept.append(reading)

    def wait() -> bool:
        committing.set()
        return not dropped.wait(60)

    async def use(writer: Writer) -> None:
        store.db.set_commit_hook(wait)
        leaving = writer.submit(leave_open)
        await until(committing.is_set)
        kept.clear()
        dropped.set()
        await leaving
        await let_go(await hold(store, "insert into notes values ('theirs')"))
        with pytest.raises(Unavailable, match="left open"):
            await writer.submit(noting("c"))
        assert await writer.submit(noting("d")) == "d"

    try:
        with_writer(store, use)
    finally:
        dropped.set()
    assert notes(store) == ["a", "b", "theirs", "d"]


def test_due_jobs_are_drained_in_turn_and_then_left_alone(store: Store) -> None:
    left = [f"due-{n}" for n in range(5)]
    asked: list[int] = []

    def due(snapshot: Snapshot, now_ms: int) -> Sequence[Job[Any]]:
        asked.append(len(left))
        return [Job(functools.partial(take, text=text)) for text in left[:2]]

    def take(tx: Tx, text: str) -> str:
        left.remove(text)
        return note(tx, text)

    async def use(writer: Writer) -> None:
        await until(lambda: not left)

    with_writer(store, use, due=due)

    assert notes(store) == [f"due-{n}" for n in range(5)]
    assert len(asked) <= 6


def test_a_due_job_that_fails_is_left_to_the_timer(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "DUE_EVERY_S", 3600.0)
    ran: list[int] = []

    def fails(tx: Tx) -> None:
        ran.append(1)
        raise ValueError("again and again")

    async def use(writer: Writer) -> None:
        await until(lambda: bool(ran))
        for n in range(20):
            await writer.submit(noting(f"n{n}"))

    with_writer(store, use, due=lambda snapshot, now_ms: [Job(fails)])

    # Once with others, and once alone.
    assert len(ran) <= 2


def test_due_jobs_are_drained_beside_one_that_always_fails(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "DUE_EVERY_S", 3600.0)
    left = [f"due-{n}" for n in range(5)]

    def fails(tx: Tx) -> None:
        raise ValueError("again and again")

    def take(tx: Tx, text: str) -> str:
        if text in left:
            left.remove(text)
        return note(tx, text)

    def due(snapshot: Snapshot, now_ms: int) -> Sequence[Job[Any]]:
        return [Job(functools.partial(take, text=text)) for text in left[:2]] + [Job(fails)]

    async def use(writer: Writer) -> None:
        await until(lambda: not left)

    with_writer(store, use, due=due)


def test_close_writes_what_was_accepted(store: Store) -> None:
    async def accepted() -> list[str]:
        writer = Writer(store, pending_max=1024, due=nothing_due, on_fatal=print)
        jobs = [writer.submit(noting(f"n{n}")) for n in range(300)]
        await writer.close()
        with pytest.raises(Unavailable, match="stopping"):
            await writer.submit(noting("late"))
        return list(await asyncio.gather(*jobs))

    assert len(asyncio.run(accepted())) == 300
    assert len(notes(store)) == 300


def test_close_leaves_what_is_due_to_the_next_start(store: Store) -> None:
    left = [f"due-{n}" for n in range(50)]

    def due(snapshot: Snapshot, now_ms: int) -> Sequence[Job[Any]]:
        return [Job(functools.partial(take, text=text)) for text in left[:2]]

    def take(tx: Tx, text: str) -> str:
        left.remove(text)
        return note(tx, text)

    async def use(writer: Writer) -> int:
        await until(lambda: writer._handed_over is not None)
        return len(left)

    # What is being committed was taken already; a quick disk may have had some before it.
    assert with_writer(store, use, due=due) == len(left) > 0


def test_close_sleeps_while_a_disk_hangs_under_what_was_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "WAIT_S_MAX", 0.05)
    monkeypatch.setattr(writer_module, "COMMIT_S_MAX", 0.05)
    monkeypatch.setattr(writer_module, "DUE_EVERY_S", 0.02)
    answers = threading.Event()
    turns: list[int] = []

    async def use(writer: Writer) -> None:
        store.db.set_commit_hook(lambda: not answers.wait(60))
        with pytest.raises(Unavailable, match="the disk takes too long"):
            await writer.submit(noting("a"), hurried=True)
        closing = asyncio.ensure_future(writer.close())
        wait = asyncio.wait

        async def counted(*of: Any) -> object:
            turns.append(1)
            return await wait(*of)

        monkeypatch.setattr(asyncio, "wait", counted)
        for _ in range(100):
            await asyncio.sleep(0)
        answers.set()
        await closing

    try:
        with_writer(store, use)
    finally:
        answers.set()
    assert len(turns) <= 2


def test_saturation_leaves_gaps_for_other_processes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process gets its turn while the writer always has more to do."""
    monkeypatch.setattr(writer_module, "WINDOW_S", 0.05)

    async def use(writer: Writer) -> int:
        turn = await asyncio.create_subprocess_exec(
            sys.executable, "-c", OTHER, store.path, stdout=asyncio.subprocess.PIPE
        )
        written = 0
        waiter = asyncio.ensure_future(turn.communicate())
        while not waiter.done():
            await asyncio.gather(*[writer.submit(noting(str(n))) for n in range(64)])
            written += 64
        output, _ = waiter.result()
        assert output == b"20\n"
        return written

    assert with_writer(store, use) > 0


OTHER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], timeout=5)
db.execute("create table if not exists mine (n integer)")
for n in range(20):
    db.execute("insert into mine values (?)", (n,))
    db.commit()
print(db.execute("select count(*) from mine").fetchone()[0])
"""


def test_the_disk_really_has_what_was_acknowledged(store: Store, tmp_path: Path) -> None:
    """A copy of the files, as a crash would leave them, has every acknowledged row."""

    async def use(writer: Writer) -> None:
        await asyncio.gather(*[writer.submit(noting(f"n{n}")) for n in range(10)])
        # By another process: inside this one the guard would refuse, and rightly.
        await run("cp", store.path, str(tmp_path / "copy.db"))
        await run("cp", store.path + "-wal", str(tmp_path / "copy.db-wal"))

    with_writer(store, use)
    copy = Store.open(tmp_path / "copy.db", store.clock)
    assert len(notes(copy)) == 10
    copy.close()
