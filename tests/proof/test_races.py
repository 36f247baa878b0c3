"""Everybody at one file at the same time, for a few seconds; `make proof` goes on for longer."""

from tests.proof.races import race


def test_all_at_once_lose_nothing_and_lock_nobody_out(seed: int) -> None:
    assert race(seed).faults == []
