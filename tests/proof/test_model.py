"""The program does what the model says, over some hundred steps; `make proof` makes 20,000."""

import pytest

from tests.proof.machine import compare
from tests.proof.mutants import MODEL_MUTANTS

#: The same steps each time: other ones are for the long form.
SEED, STEPS = 1, 200

#: Those that are found soon, and steps until then at most.
SOON = ("an act by hand is not written down", "other content is a duplicate")
SOON_STEPS = 1_000


def test_the_program_does_what_the_model_says() -> None:
    ran = compare(SEED, STEPS)

    assert ran.fault is None, ran.fault
    assert ran.steps >= STEPS


@pytest.mark.parametrize("name", SOON)
def test_the_model_finds_what_breaks_the_promise(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    MODEL_MUTANTS[name](monkeypatch)

    assert compare(SEED, SOON_STEPS, shrink=False).fault is not None
