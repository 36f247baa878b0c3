"""A source that was silent for long is reconciled by the worker when it starts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from receiver import silence
from receiver.config import ConfigError
from receiver.work import OneWriter
from receiver.worker import Worker
from store import reconciles
from store.database import Store
from store.reconciles import Reconcile
from tests.conftest import World
from tests.sender_api import error
from tests.sender_lists import SenderLists, sender_lists
from tests.service import until
from tests.test_fetching import configured
from tests.test_reconcile import CONFIG, EVENTS, deliver, paid

HOUR_MS = 3_600_000


@pytest.fixture
def far() -> Iterator[SenderLists]:
    with sender_lists() as lists:
        lists.add(EVENTS)
        yield lists


def text(far: SenderLists, more: str = "reconcile_after_silence_s = 7200") -> str:
    return CONFIG.replace('"URL"', f'"{far.url}", {more}')


def start(world: World) -> tuple[Worker, Store]:
    store = Store.open(Path(world.store.path), world.clock)
    writer = OneWriter(store)
    worker = Worker(lambda: world.processor, writer.write, world.clock)
    worker.start()
    return worker, store


def catch_up(world: World) -> bool:
    source = world.processor.settings.sources["stripe"]
    return silence.catch_up(
        source, world.processor, OneWriter(world.store).write, world.clock, lambda seconds: True
    )


def last(world: World) -> Reconcile | None:
    return world.store.write(lambda tx: reconciles.last(tx, "stripe"))


def test_after_a_long_silence_what_was_missed_is_found_at_the_start(
    world: World, far: SenderLists
) -> None:
    configured(world, text(far))
    world.link()
    deliver(world, paid(1))
    far.add(EVENTS, paid(1), paid(2, minutes_ago=-30))
    world.clock.now_ms += 2 * HOUR_MS

    worker, store = start(world)
    until(lambda: last(world) is not None)
    worker.stop()
    store.close()

    assert world.balance() == 200
    assert world.query("select actor, reason from receiver_audit") == [
        ("worker", "nothing came for 2 h")
    ]


@pytest.mark.parametrize("hours", [1, 2])
def test_a_short_silence_or_one_that_was_reconciled_is_none(
    world: World, far: SenderLists, hours: int
) -> None:
    configured(world, text(far))
    deliver(world, paid(1))
    world.clock.now_ms += hours * HOUR_MS
    if hours > 1:
        run = world.store.write(lambda tx: reconciles.begin(tx, "stripe"))
        world.store.write(lambda tx: reconciles.end(tx, run, 0))

    assert catch_up(world)
    assert far.paths == []


def test_a_silence_that_can_not_be_compared_now_is_compared_later(
    world: World, far: SenderLists
) -> None:
    configured(world, text(far))
    world.link()
    deliver(world, paid(1))
    far.add(EVENTS, paid(2, minutes_ago=-30))
    world.clock.now_ms += 2 * HOUR_MS
    far.instead = lambda path: error(401)
    assert not catch_up(world)
    far.instead = lambda path: None

    assert catch_up(world)

    assert world.balance() == 200


def test_the_silence_in_the_config_is_at_least_an_hour(world: World, far: SenderLists) -> None:
    with pytest.raises(ConfigError, match=r"reconcile_after_silence_s: must be at least 3600"):
        configured(world, text(far, "reconcile_after_silence_s = 60"))


def test_silence_that_no_worker_watches_is_warned_of(world: World, far: SenderLists) -> None:
    configured(world, text(far) + '[worker]\nrun = "off"\n')

    warnings = world.processor.settings.warnings
    assert any("reconcile_after_silence_s: does nothing while" in one for one in warnings)
