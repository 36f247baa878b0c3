"""The schedule of retries: spread out, capped, and going on for days."""

import itertools
import random
import statistics

from receiver.backoff import delay_ms, is_spent
from receiver.config import Worker

WORKER = Worker()
DAY_MS = 86_400_000


def schedule(seed: int) -> list[int]:
    """The times of all attempts, in milliseconds after the first, if each fails at once."""
    numbers = random.Random(seed)
    now_ms, attempt, times = 0, 1, [0]
    while not is_spent(WORKER, attempt, WORKER.attempts_max, now_ms):
        now_ms += delay_ms(WORKER, attempt, numbers.random)
        attempt += 1
        times.append(now_ms)
    return times


def test_ten_thousand_schedules_stay_within_the_cap_and_last_for_days() -> None:
    schedules = [schedule(seed) for seed in range(10_000)]

    pauses = [b - a for times in schedules for a, b in itertools.pairwise(times)]
    assert min(pauses) >= 0
    assert max(pauses) <= WORKER.backoff_max_s * 1000
    assert max(len(times) for times in schedules) <= WORKER.attempts_max
    assert statistics.median(times[-1] for times in schedules) > 2 * DAY_MS


def test_what_failed_together_does_not_come_back_together() -> None:
    numbers = random.Random(7)
    for attempt in (1, 3, 6, 12, 40):
        longest = min(WORKER.backoff_max_s, WORKER.backoff_first_s * 2 ** (attempt - 1)) * 1000
        delays = [delay_ms(WORKER, attempt, numbers.random) for _ in range(10_000)]

        tenths = [0] * 10
        for delay in delays:
            tenths[min(9, delay * 10 // longest)] += 1

        assert max(tenths) < 10_000 * 2 / 3
        assert min(tenths) > 0


def test_it_is_age_that_ends_it_by_default() -> None:
    for seed in range(1_000):
        times = schedule(seed)

        assert len(times) < WORKER.attempts_max
        assert times[-1] > WORKER.age_max_s * 1000


def test_age_alone_kills_nothing_before_a_dozen_attempts() -> None:
    """The machine was off for a month, or the clock was set forward."""
    assert not is_spent(WORKER, 11, WORKER.attempts_max, 30 * DAY_MS)
    assert is_spent(WORKER, 12, WORKER.attempts_max, 30 * DAY_MS)
    assert is_spent(WORKER, 3, 3, 0)
