"""The power is cut at storage calls of a whole day: nothing that was answered is lost or doubled.

Some of the cuts; `make proof` makes all of them.
"""

import pytest

from tests.proof.disk import Recording
from tests.proof.mutants import MUTANTS
from tests.proof.power import after_spending, cut, expected_end, recorded, some_cuts
from tests.proof.story import BackedUp, End

#: Cuts beside those right after an answer.
OTHERS = 15


@pytest.fixture(scope="module")
def wanted() -> End:
    return expected_end()


@pytest.fixture(scope="module")
def recording() -> Recording:
    return recorded()


def test_no_power_cut_loses_or_doubles_what_was_answered(
    recording: Recording, wanted: End, seed: int
) -> None:
    made = cut(recording, wanted, seed=seed, at=some_cuts(recording, seed, OTHERS))

    assert [str(fault) for fault in made.faults] == []
    assert made.disks > OTHERS


@pytest.mark.parametrize("name", MUTANTS)
def test_the_power_cuts_find_what_breaks_the_promise(
    name: str, wanted: End, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        MUTANTS[name](patch)
        broken = recorded()
    at = some_cuts(broken, seed, 100)
    if "copies" in name:
        at = [one for one in at if one >= _backed_up(broken)]

    made = cut(
        broken,
        wanted,
        seed=seed,
        at=at,
        kinds=("nothing", "reordered"),
        faults_max=1,
    )

    assert made.faults != []


def _backed_up(recording: Recording) -> int:
    return next(at for at, what in recording.told if isinstance(what, BackedUp))


@pytest.mark.parametrize("synchronous", ["normal", "full"])
def test_an_app_that_commits_beside_us_costs_none_of_our_answers(
    synchronous: str, wanted: End, seed: int
) -> None:
    beside = recorded(synchronous)

    made = cut(beside, wanted, seed=seed, at=after_spending(beside), kinds=("reordered",))

    assert [str(fault) for fault in made.faults] == []


@pytest.mark.parametrize("name", MUTANTS)
def test_beside_an_app_the_power_cuts_find_what_breaks_the_promise(
    name: str, wanted: End, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        MUTANTS[name](patch)
        broken = recorded("normal")

    made = cut(broken, wanted, seed=seed, at=after_spending(broken), faults_max=1)

    assert made.faults != []


def test_an_app_with_synchronous_off_is_found_to_cost_answers(wanted: End, seed: int) -> None:
    beside = recorded("off")

    made = cut(beside, wanted, seed=seed, at=after_spending(beside), faults_max=1)

    assert made.faults != []
