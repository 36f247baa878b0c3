"""The program itself, step by step beside the model: after each step both say the same."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import apsw
import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.internal.conjecture import engine
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from receiver import facts, operate, rehearsal, retention
from receiver.destinations import Later, Never, Result, Sent, Unknown
from receiver.named import Absent
from receiver.operate import By, Declined
from receiver.process import Outcome, Processor
from receiver.worker import Events, Messages, Released, Worker
from store import inbox, integrity, operations, outbox, writer
from store.database import Job, Snapshot, Store, Tx
from tests.conftest import NOW_MS, Clock
from tests.proof import model
from tests.proof.model import DESTINATIONS, Content, EventKey, Key, Model, Rules
from tests.proof.power import scratch
from tests.proof.story import Fact, events_of
from tests.proof.under_test import (
    TABLES,
    FarSide,
    Server,
    body_for,
    differences,
    digest_of,
    of_file,
    of_model,
    processor_of,
)


class Killed(BaseException):
    """The process is gone from here on."""


class Hung(NamedTuple):
    """An attempt whose worker is asleep, and what it will still do when it wakes up."""

    run: Callable[[Tx], Any]
    keep: Callable[[Tx, str], Any] | None
    #: The same in the model.
    settle: Callable[[], None]
    #: The message's destination, or the event.
    about: str | EventKey


BY = By("operator", "a step")
ACCOUNTS, IDS, SUBJECTS = ("", "acct_1"), tuple("123456789"), ("a", "b", "c")
CUSTOMERS, WORKSPACES = ("cus_1", "cus_2"), ("w-1", "w-2")
KINDS = ("pay", "pay", "pay", "link", "refund", "void", "state", "seen", "note", "other")
TEXTS = {
    "link": ("", *WORKSPACES),
    "refund": SUBJECTS,
    "state": ("open", "closed"),
}


@st.composite
def contents(draw: st.DrawFn) -> Content:
    kind = draw(st.sampled_from(KINDS))
    return Content(
        kind,
        draw(st.sampled_from(SUBJECTS)),
        draw(st.sampled_from((*CUSTOMERS, ""))) if kind in ("pay", "link") else "",
        draw(st.sampled_from(TEXTS[kind])) if kind in TEXTS else "",
        draw(st.sampled_from((40, 70, 1, 2))) if kind not in ("pay", "link", "void") else 0,
        draw(st.sampled_from((0, 0, 0, 1))),
    )


keys = st.tuples(st.sampled_from(ACCOUNTS), st.sampled_from(IDS))
sources = st.sampled_from(("stripe", "queue"))
fates = st.sampled_from(("works", "works", "dies", "hangs", "hangs"))
results = st.sampled_from(("sent", "later", "never", "unknown"))
RESULTS: dict[str, Result] = {
    "sent": Sent(""),
    "later": Later("not now"),
    "never": Never("refused"),
    "unknown": Unknown("lost"),
}
SECOND_MS = 1_000
MOVES = (SECOND_MS, 45 * SECOND_MS, 400 * SECOND_MS, model.DAY_MS, 40 * model.DAY_MS)


# What was begun and has no outcome, though nobody has a lease for it.
_ABANDONED = """
    select a.event, a.message from receiver_attempts a
    left join receiver_events e on e.id = a.event
    left join receiver_outbox m on m.id = a.message
    where a.outcome is null and e.lease_owner is null and m.lease_owner is null
"""


class Machine(RuleBasedStateMachine):
    """Each rule is one thing that can happen, to the program and to the model."""

    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.closing = contextlib.ExitStack()
        self.path = self.closing.enter_context(scratch()) / "receiver.db"
        self.clock = Clock()
        self.model = Model(NOW_MS)
        self.desk = Store.create(self.path, self.clock)
        self.desk.write(lambda tx: tx.db.execute(TABLES) and None)
        self.server: Server | None = None
        self.hung: list[Hung] = []
        self.fault = ""
        self.writes, self.fate = 0, "works"
        self.worker = Worker(lambda: self.processor, self._write, self.clock)
        self.worker.senders.close()
        self.far_side = FarSide()
        self.worker.senders = self.far_side  # type: ignore[assignment]
        self.groups = {to: Messages(self.worker, to) for to in DESTINATIONS}
        self._start()

    @property
    def processor(self) -> Processor:
        return processor_of(self.model.rules)

    def teardown(self) -> None:
        if self.server is not None:
            self.server.kill()
        self.desk.close()
        self.closing.close()

    @initialize(linked=st.booleans())
    def begin(self, linked: bool) -> None:
        for account in ACCOUNTS * linked:
            self.links_add(account, CUSTOMERS[0], WORKSPACES[0], repoint=False, dies=False)

    # Deliveries

    @rule(
        batch=st.lists(st.tuples(sources, keys, contents()), min_size=1, max_size=3),
        noise=st.integers(0, 3),
    )
    def events_arrive(self, batch: list[tuple[str, EventKey, Content]], noise: int) -> None:
        self._deliver(batch, noise)

    @precondition(lambda self: self.model.events)
    @rule(data=st.data(), source=sources, noise=st.integers(0, 3))
    def events_arrive_again(self, data: st.DataObject, source: str, noise: int) -> None:
        chosen = data.draw(st.lists(self._known(), min_size=1, max_size=2))
        self._deliver([(source, key, self.model.events[key].content) for key in chosen], noise)

    @precondition(lambda self: self.model.events)
    @rule(data=st.data(), source=sources, content=contents())
    def another_content_arrives(self, data: st.DataObject, source: str, content: Content) -> None:
        key = data.draw(self._known())
        if data.draw(st.booleans()):
            content = self.model.events[key].content._replace(extra=content.extra)
        self._deliver([(source, key, content)], 0)

    def _deliver(self, batch: list[tuple[str, EventKey, Content]], noise: int) -> None:
        batch = [one for one in batch if one[0] == "stripe" or self.model.rules.there]
        if not batch:
            return
        if self.server is None:
            self._start()
        assert self.server is not None
        jobs = [self._job(*one, noise) for one in batch]
        answers = self.server.deliver(jobs)
        words, failures = [], self.model.failures
        first: list[EventKey] = []
        for one in batch:
            words.append(self.model.deliver(*one))
            first = first or self.model.released()
        # One that ends the whole transaction makes each run alone; what is due is found between.
        alone = self.fault == "rollback" and self.model.failures > failures
        self._drained(first if alone else self.model.released())
        told = [one.word + "!" * one.retry for one in answers]
        assert told == words, f"answered {told}, not {words}"

    def _job(self, source: str, key: EventKey, content: Content, noise: int) -> Job[Outcome]:
        processor = self.processor
        events = events_of(
            processor, Fact(source, key[1], body_for(key, content, noise)), self.clock
        )
        return Job(
            functools.partial(processor.receive, events=events, request_id="r"),
            functools.partial(processor.keep, events=events, request_id="r"),
        )

    def _drained(self, batch: list[EventKey]) -> None:
        while batch:
            for key in batch:
                self.model.apply_due(key)
            batch = self.model.released()

    @precondition(lambda self: self.server is not None and self.model.released())
    @rule()
    def a_second_passes_for_the_server(self) -> None:
        assert self.server is not None
        self.server.look()
        self._drained(self.model.released())

    # The process ends, and begins

    @rule(source=sources, key=keys, content=contents(), committed=st.booleans())
    def the_server_is_killed_in_a_delivery(
        self, source: str, key: EventKey, content: Content, committed: bool
    ) -> None:
        if source == "queue" and not self.model.rules.there:
            return
        if self.server is None:
            self._start()
        assert self.server is not None
        job, store = self._job(source, key, content, 0), self.server.store
        if committed:
            store.write_all([job])
            self.model.deliver(source, key, content)
        else:
            store.run(store.begin_waiting(), [job])
        self.server.kill()
        self.server = None

    @precondition(lambda self: self.server is not None)
    @rule(then=st.booleans())
    def the_server_is_stopped(self, then: bool) -> None:
        assert self.server is not None
        self.server.stop()
        self.server = None
        if then:
            self._start()

    @rule()
    def everything_is_opened_again(self) -> None:
        self.desk.close()
        self.desk = Store.open(self.path, self.clock)

    def _start(self) -> None:
        self.server = Server(self.path, self.clock, lambda: self.processor)
        self._drained(self.model.released())

    @rule(name=st.sampled_from(Rules._fields))
    def the_config_changes(self, name: str) -> None:
        rules, was = self.model.rules, getattr(self.model.rules, name)
        values: dict[str, Any] = {name: 350 - was if name == "amount" else not was}
        rules = rules._replace(**values)
        if not rules.works:
            # The config refuses it: nobody would apply what is queued.
            rules = rules._replace(queued=False)
        self.model.rules = rules
        self.desk.write(self.processor.start)

    @rule(fault=st.sampled_from(("", "", "abort", "rollback")))
    def the_app_breaks_or_is_mended(self, fault: str) -> None:
        self.fault, self.model.broken = fault, bool(fault)

        def change(tx: Tx) -> None:
            tx.db.execute("delete from app_faults")
            if fault:
                tx.db.execute("insert into app_faults values (?)", (fault,))

        self.desk.write(change)

    @rule(by=st.sampled_from((*MOVES, *MOVES, *(-one for one in MOVES))))
    def the_clock_moves(self, by: int) -> None:
        self.clock.now_ms += by
        self.model.now += by

    # A worker, in a process of its own

    def _write(self, run: Callable[[Tx], Any], keep: Any = None) -> Any:
        self.writes += 1
        if self.writes == 2 and self.fate != "works":
            self.left = (run, keep)
            raise Killed
        job = Job(run, keep)
        self.desk.write_all([job])
        if job.error is not None:
            raise job.error
        return job.result

    def _step(self, group: Events | Messages, fate: str) -> None:
        self.writes, self.fate = 0, fate
        with contextlib.suppress(Killed):
            group.step("w")

    @precondition(lambda self: self.model.rules.works and self._queue())
    @rule(fate=fates, waits=st.booleans())
    def a_worker_tries_an_event(self, fate: str, waits: bool) -> None:
        self._wait_for(self._queue() if waits else [])
        self._step(Events(self.worker), fate)
        key = self.model.lease_event()
        if key is None:
            return
        attempt, rules = self.model.events[key].attempts, self.model.rules
        settle = functools.partial(self.model.settle_event, key, attempt, rules)
        self._end(fate, settle, key)

    @precondition(lambda self: self.model.rules.works and self._owed())
    @rule(to=st.sampled_from(DESTINATIONS), result=results, fate=fates, waits=st.booleans())
    def a_worker_tries_a_message(
        self, to: str, result: model.Results, fate: str, waits: bool
    ) -> None:
        self._wait_for(self._owed(to) if waits else [])
        self.far_side.result = RESULTS[result]
        self._step(self.groups[to], fate)
        key = self.model.lease_message(to)
        if key is None:
            return
        attempt, may_repeat = self.model.books.owed[key].attempts, self.model.may_repeat(to)
        settle = functools.partial(
            self.model.settle_message, key, attempt, result, may_repeat=may_repeat
        )
        self._end(fate, settle, to)

    def _queue(self) -> list[int]:
        events = self.model.events.values()
        return [one.due for one in events if one.due is not None and one.by_worker]

    def _owed(self, *to: str) -> list[int]:
        owed = self.model.books.owed.items()
        return [one.due for key, one in owed if one.due is not None and key[1] in (to or key)]

    def _wait_for(self, due: list[int]) -> None:
        if due:
            self.the_clock_moves(max(0, min(due) - self.model.now))

    def _end(self, fate: str, settle: Callable[[], None], about: str | EventKey) -> None:
        if fate == "works":
            settle()
        elif fate == "hangs":
            self.hung.append(Hung(*self.left, settle, about))

    @precondition(lambda self: self.hung)
    @rule(data=st.data(), late=st.booleans(), result=results)
    def a_worker_wakes_up(self, data: st.DataObject, late: bool, result: model.Results) -> None:
        hung = self.hung.pop(data.draw(st.integers(0, len(self.hung) - 1)))
        if late:
            self._meanwhile(hung.about, result)
        self.writes, self.fate = 0, "works"
        self._write(hung.run, hung.keep)
        hung.settle()

    def _meanwhile(self, about: str | EventKey, result: model.Results) -> None:
        """The lease runs out, and somebody else comes for the same."""
        self.the_clock_moves(MOVES[2])
        if isinstance(about, tuple):
            known = self.model.events[about]
            self._deliver([(known.source, about, known.content)], 0)
        elif self.model.rules.works and self._owed():
            self.a_worker_tries_a_message(about, result, "works", waits=False)

    @precondition(lambda self: self.model.rules.works and self.model.released())
    @rule()
    def a_worker_applies_what_was_released(self) -> None:
        self.writes, self.fate = 0, "works"
        Released(self.worker).step("w")
        for key in self.model.released()[:1]:
            self.model.apply_due(key)

    # Acts by hand, each by the function that its command calls

    def _act(self, do: Callable[[Tx], object], allowed: bool, *, drains: bool = False) -> None:
        try:
            self.desk.write(do)
            done = True
        except (Declined, Absent):
            done = False
        assert done == allowed, f"it was {'' if done else 'not '}done"
        if done and drains:
            operate.drain(self.desk, self.processor)
            self._drained(self.model.released())

    def _known(self) -> st.SearchStrategy[EventKey]:
        return st.sampled_from(list(self.model.events))

    def _row(self, key: EventKey) -> int:
        found = inbox.by_key(Snapshot(self.desk.db), "stripe", *key)
        assert found is not None, f"{key} was received"
        return found.id

    @rule(
        account=st.sampled_from(ACCOUNTS),
        customer=st.sampled_from(CUSTOMERS),
        workspace=st.sampled_from(WORKSPACES),
        repoint=st.booleans(),
        dies=st.booleans(),
    )
    def links_add(
        self, account: str, customer: str, workspace: str, repoint: bool, dies: bool
    ) -> None:
        allowed = self.model.link(account, customer, workspace, repoint=repoint)
        link = functools.partial(
            operate.link,
            source="stripe",
            account=account,
            customer=customer,
            workspace=workspace,
            repoint=repoint,
            by=BY,
        )
        self._act(link, allowed, drains=not dies)

    @rule(account=st.sampled_from(ACCOUNTS), customer=st.sampled_from(CUSTOMERS))
    def links_remove(self, account: str, customer: str) -> None:
        allowed = self.model.unlink(account, customer)
        self._act(lambda tx: operate.unlink(tx, "stripe", account, customer, BY), allowed)

    @precondition(lambda self: self.model.events)
    @rule(data=st.data(), dry=st.booleans())
    def replay(self, data: st.DataObject, dry: bool) -> None:
        chosen = data.draw(st.lists(self._known(), min_size=1, max_size=3, unique=True))
        rows = [self._row(key) for key in chosen]
        if dry:
            list(rehearsal.rehearse(self.desk, self.processor, rows))
            return
        ran = [one for some in operate.replay(self.desk, self.processor, rows, BY) for one in some]
        words = [self.model.replay(key) or "not run" for key in chosen]
        assert [one.word for one in ran] == words, f"became {ran}, not {words}"
        operate.drain(self.desk, self.processor)
        self._drained(self.model.released())

    @precondition(lambda self: self.model.events)
    @rule(data=st.data())
    def events_resolve(self, data: st.DataObject) -> None:
        key = data.draw(self._known())
        row, allowed = self._row(key), self.model.resolve(key)
        self._act(lambda tx: operate.resolve(tx, row, BY), allowed)

    @precondition(lambda self: self.model.events)
    @rule(data=st.data(), workspace=st.sampled_from(WORKSPACES), dies=st.booleans())
    def parked_attribute(self, data: st.DataObject, workspace: str, dies: bool) -> None:
        key = data.draw(self._known())
        row, allowed = self._row(key), self.model.attribute(key, workspace)
        self._act(lambda tx: operate.attribute(tx, row, workspace, BY), allowed, drains=not dies)

    @precondition(lambda self: self.model.books.conflicts)
    @rule(data=st.data())
    def conflicts_resolve(self, data: st.DataObject) -> None:
        which = data.draw(st.sampled_from(list(self.model.books.conflicts)))
        digest = digest_of(*which)
        number = self.desk.db.execute(
            """
            select c.id from receiver_conflicts c join receiver_events e on e.id = c.event
            where account = ? and event_id = ? and content_sha256 = ?
            """,
            (*which[0], digest),
        ).get
        allowed = self.model.resolve_conflict(which)
        self._act(lambda tx: operate.resolve_conflict(tx, number, BY), allowed)

    @rule(
        account=st.sampled_from(ACCOUNTS),
        subject=st.sampled_from(SUBJECTS),
        workspace=st.sampled_from(WORKSPACES),
        amount=st.sampled_from((100, 250)),
        by_app=st.booleans(),
    )
    def ledger_grant(
        self, account: str, subject: str, workspace: str, amount: int, by_app: bool
    ) -> None:
        key = Key("stripe", account, subject, "grant")
        if by_app:
            allowed = self.model.app_grant(key, workspace, amount)
            self._app(key, workspace, amount, allowed)
            return
        allowed = self.model.grant(key, workspace, amount)
        self._act(
            lambda tx: operate.grant(tx, operations.Key(*key), workspace, "credits", amount, BY),
            allowed,
            drains=True,
        )

    @rule(
        name=st.sampled_from(SUBJECTS),
        workspace=st.sampled_from(WORKSPACES),
        amount=st.sampled_from((30, -60, -200)),
        overdraw=st.booleans(),
    )
    def ledger_adjust(self, name: str, workspace: str, amount: int, overdraw: bool) -> None:
        allowed = self.model.adjust(name, workspace, amount, overdraw=overdraw)
        self._act(
            lambda tx: operate.adjust(
                tx, name, workspace, "credits", amount, BY, overdraw=overdraw
            ),
            allowed,
        )

    @precondition(lambda self: self.model.books.ledger)
    @rule(data=st.data(), amount=st.sampled_from((None, 20)))
    def ledger_revert(self, data: st.DataObject, amount: int | None) -> None:
        target = data.draw(st.sampled_from(list(self.model.books.ledger)))
        allowed = self.model.revert(target, amount)
        self._act(
            lambda tx: operate.revert(tx, operations.Key(*target), amount, BY),
            allowed,
            drains=True,
        )

    @rule(
        name=st.sampled_from(SUBJECTS),
        workspace=st.sampled_from(WORKSPACES),
        amount=st.sampled_from((10, 90)),
    )
    def the_app_spends(self, name: str, workspace: str, amount: int) -> None:
        allowed = self.model.spend(name, workspace, amount)
        self._app(Key("app", "", name, "spend"), workspace, -amount, allowed)

    def _app(self, key: Key, workspace: str, amount: int, allowed: bool) -> None:
        with contextlib.closing(apsw.Connection(str(self.path))) as app:
            try:
                app.execute(
                    """
                    insert or replace into receiver_ledger (
                      source, account, subject, operation, workspace, unit, amount, created_ms)
                    values (?, ?, ?, ?, ?, 'credits', ?, ?)
                    """,
                    (*key, workspace, amount, self.clock()),
                )
                done = True
            except apsw.ConstraintError:
                done = False
        assert done == allowed, f"it was {'' if done else 'not '}done"

    @precondition(lambda self: self.model.books.owed)
    @rule(data=st.data(), act=st.sampled_from(("retry", "sent", "again", "cancel")))
    def outbox(self, data: st.DataObject, act: Any) -> None:
        key, to = data.draw(st.sampled_from(list(self.model.books.owed)))
        named = outbox.operation_key(operations.Key(*key), to, "")
        message = outbox.by_operation_key(Snapshot(self.desk.db), named)
        assert message is not None, "it is owed"
        number, allowed = message.id, self.model.mail((key, to), act)
        acts: dict[str, Callable[[Tx], object]] = {
            "retry": lambda tx: operate.retry_message(tx, self.processor.settings, number, BY),
            "sent": lambda tx: operate.resolve_message(tx, number, sent=True, by=BY),
            "again": lambda tx: operate.resolve_message(tx, number, sent=False, by=BY),
            "cancel": lambda tx: operate.cancel_message(tx, number, BY),
        }
        self._act(acts[act], allowed)

    @rule()
    def prune(self) -> None:
        settings, now_ms = self.processor.settings, self.clock()
        look = retention.looking(self.desk)
        for _, batch in retention.due(settings, look, 1, 1_000, now_ms):
            if batch:
                retention.prune(self.desk, settings, batch)
        self.model.prune()

    @precondition(lambda self: self.model.events)
    @rule(data=st.data())
    def redact(self, data: st.DataObject) -> None:
        key = data.draw(self._known())
        row, allowed = self._row(key), self.model.redact(key)
        content = retention.content_of(self.desk, self.processor.settings, row)
        self._act(lambda tx: retention.redact(tx, row, content, BY), allowed)

    # Each name is one more chance: acts by hand are many, and rare.
    events_arrive_2 = events_arrive_3 = events_arrive_4 = events_arrive
    events_arrive_again_2 = events_arrive_again_3 = events_arrive_again
    a_worker_tries_an_event_2 = a_worker_tries_an_event_3 = a_worker_tries_an_event
    a_worker_tries_a_message_2 = a_worker_tries_a_message_3 = a_worker_tries_a_message
    a_worker_wakes_up_2 = a_worker_wakes_up_3 = a_worker_wakes_up
    the_app_breaks_2 = the_app_breaks_or_is_mended

    # What must hold after each of them

    @invariant()
    def both_say_the_same(self) -> None:
        Machine.steps += 1
        seen = Snapshot(self.desk.db)
        assert of_file(seen) == of_model(self.model), differences(
            of_file(seen), of_model(self.model)
        )
        faults = integrity.book_faults(seen)
        assert faults == [], faults
        abandoned = list(seen.db.execute(_ABANDONED))
        assert abandoned == [], f"seem to be tried, and are not: {abandoned}"

    @invariant()
    def what_is_unfinished_is_seen(self) -> None:
        now = facts.look(
            Snapshot(self.desk.db), self.processor.settings, self.clock(), facts.Disk(1, 1, 1, 1)
        )
        events = Counter(one.state for one in self.model.events.values())
        states = ("pending", "parked", "quarantined", "dead")
        assert all(now.events[one] == events[one] for one in states), f"status says {now.events}"
        owed = Counter(one.state for one in self.model.books.owed.values())
        owing = {one: now.owed(one) for one in ("pending", "review", "dead")}
        assert all(owing[one] == owed[one] for one in owing), f"status says {owing}"
        told = {(one.name, one.subject) for one in facts.needs(now, self.processor.settings)}
        wanted = {
            ("dead", "events"): events["dead"],
            ("dead", "messages"): owed["dead"],
            ("quarantined", ""): events["quarantined"],
            ("review", ""): owed["review"],
            ("conflicts", ""): any(not done for _, done in self.model.books.conflicts.values()),
        }
        assert {one for one, count in wanted.items() if count} == told & wanted.keys(), told


class Ran(NamedTuple):
    """Steps that were made, and what was wrong at last."""

    steps: int
    fault: str | None


def compare(
    seed_: int,
    steps: int,
    *,
    shrink: bool = True,
    advance: Callable[[int], None] = lambda done: None,
) -> Ran:
    """Make at least so many steps, in runs of STEPS; stops at the first difference."""
    Machine.steps, round_ = 0, 0
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "MAX_SHRINKING_SECONDS", SHRINK_S)
        for module in (operate, retention):
            patch.setattr(module, "GAP_S", 0.0)
        patch.setattr(writer, "GAP_S", 0.0)
        patch.setattr(writer, "DUE_EVERY_S", 1e6)
        while Machine.steps < steps:
            trials = settings(
                max_examples=min(RUNS, (steps - Machine.steps) // STEPS + 1),
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                phases=phases,
                suppress_health_check=list(HealthCheck),
            )
            try:
                run_state_machine_as_test(seed(seed_ + round_)(Machine), settings=trials)
            except Exception as error:
                notes = "\n".join(getattr(error, "__notes__", ()))
                return Ran(Machine.steps, f"seed {seed_}: {type(error).__name__}: {error}\n{notes}")
            round_ += 1
            advance(Machine.steps)
    return Ran(Machine.steps, None)


#: Steps of one run, on a file of its own, and runs between two looks at the count.
STEPS, RUNS = 60, 20

#: For how long a run that found something is made shorter, in seconds.
SHRINK_S = 30
