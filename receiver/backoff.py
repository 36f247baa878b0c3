"""When a failed attempt is tried again, and when it was the last."""

from collections.abc import Callable

from receiver.config import Worker

#: Attempts that age alone never cuts short: the machine, or the clock, may have been off.
ATTEMPTS_BEFORE_AGE = 12


def delay_ms(worker: Worker, attempt: int, random: Callable[[], float]) -> int:
    """How long to wait after this attempt: exponential, capped, with full jitter.

    `random` gives numbers from 0 up to 1. Full jitter spreads what failed together.
    """
    # Doubling stops well before the numbers grow silly; the cap is reached long before.
    longest_s = min(worker.backoff_max_s, worker.backoff_first_s * 2 ** min(attempt - 1, 32))
    return int(random() * longest_s * 1000)


def is_spent(worker: Worker, attempt: int, attempts_max: int, age_ms: int) -> bool:
    """Whether this attempt was the last, by number or by the age of what it was made for."""
    too_old = age_ms > worker.age_max_s * 1000 and attempt >= ATTEMPTS_BEFORE_AGE
    return attempt >= attempts_max or too_old
