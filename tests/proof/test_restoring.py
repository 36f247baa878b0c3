"""The power is cut in the middle of a restore; `make proof` cuts it at more calls."""

import pytest

from tests.proof import restoring
from tests.proof.mutants import MUTANTS
from tests.proof.power import cut
from tests.proof.story import End


@pytest.fixture(scope="module")
def wanted() -> End:
    return restoring.expected_end()


def test_a_power_cut_in_a_restore_leaves_one_of_the_two_files_whole(wanted: End, seed: int) -> None:
    recording = restoring.recorded()

    made = cut(recording, wanted, seed=seed, at=restoring.during(recording), judge=restoring.judged)

    assert [str(fault) for fault in made.faults] == []
    assert made.disks > 10


def test_a_restore_that_does_not_sync_is_found(
    wanted: End, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        MUTANTS["copies that are not synced"](patch)
        broken = restoring.recorded()

    made = cut(
        broken,
        wanted,
        seed=seed,
        at=restoring.during(broken),
        judge=restoring.judged,
        faults_max=1,
    )

    assert made.faults != []
