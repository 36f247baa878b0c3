"""Real processes killed at some of the named points; `make proof` does so at each of them."""

import pytest

from tests.proof.points import POINTS, Point, kill_at

#: One of each kind that no other test has.
SOME = (
    "delivery: in the commit, written",
    "send: settled, not committed",
    "release: linked",
    "checkpoint: first page",
    "first start: in WAL mode",
    "upgrade: copied",
    "backup: checksum written",
    "prune: not committed",
    "restore: replaced",
)


@pytest.mark.parametrize("name", SOME)
def test_after_a_kill_at_a_named_point_a_start_alone_brings_the_expected_end(name: str) -> None:
    assert kill_at(name) == []


def test_a_point_that_is_not_reached_is_told() -> None:
    never = Point("backup", "after", ("receiver.restore:note",))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.proof.points.POINTS", {**POINTS, "never": never})

        (fault,) = kill_at("never")

    assert "the point was not reached" in fault
