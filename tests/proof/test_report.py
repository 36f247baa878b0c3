"""What `make proof` keeps of its parts."""

from pathlib import Path

import pytest

from tests.proof.report import Part, record, tell


def test_a_part_that_ran_again_replaces_its_own_row_alone(tmp_path: Path) -> None:
    results = tmp_path / "RESULTS.md"
    record(results, Part("power cuts", "12 cuts", ()), 3.2, 7)
    record(results, Part("races", "9 events", ()), 60, 7)
    results.write_text(
        f"{results.read_text()}\n## What was mended\n\nMuch.\n\n## And more\n\nEnd.\n"
    )

    record(results, Part("power cuts", "40 cuts", ["one", "two"]), 4, 8)

    text = results.read_text()
    assert "| power cuts | 40 cuts | 2 | 4 | 8 |" in text
    assert "| races | 9 events | none | 60 | 7 |" in text
    assert "12 cuts" not in text
    assert text.endswith("|\n\n## What was mended\n\nMuch.\n\n## And more\n\nEnd.\n")
    assert text.count("| part |") == 1


def test_each_fault_is_told_below_its_part(capsys: pytest.CaptureFixture[str]) -> None:
    tell(Part("power cuts", "40 cuts", ["at call 3: in_1 is lost"]), 4)
    assert "1 FAULTS" in (told := capsys.readouterr().out)
    assert "    at call 3: in_1 is lost\n" in told
