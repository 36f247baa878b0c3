"""A real server and some faults of its machine; `make proof` has all, as root."""

import pytest

from tests.proof.surroundings import meet

#: What needs no root, and no other test has.
SOME = (
    "out of descriptors",
    "file deleted",
    "-wal missing at the start",
    "-shm missing at the start",
    "page of a table corrupted",
    "page of the header corrupted",
    "clock a year ahead",
    "clock a year back at a restart",
)


@pytest.mark.parametrize("name", SOME)
def test_what_was_answered_outlives_a_fault_of_the_machine(name: str) -> None:
    assert meet(name) == []
