"""Everything hostile at once, for a few seconds; `make proof` goes on for longer, and with more."""

from pathlib import Path

from tests.proof.storm import weather

SECONDS, SOURCES = 3.0, 300
#: So few that the test's own process may open them, under a limit of 1024.
IDLE = 200


def test_an_attack_mix_is_answered_rightly_and_an_honest_sender_served_meanwhile(
    tmp_path: Path, seed: int
) -> None:
    made = weather(tmp_path, seed, SECONDS, SOURCES, idle=IDLE)

    assert made.faults == []
    assert made.honest > 0
