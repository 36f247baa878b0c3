"""What `make bench` writes down."""

from pathlib import Path

from tests.bench.report import STORY, Figures, write, write_results


def measured(rate: float) -> str:
    figures = Figures()
    figures.add("32 connections", "ours / bare", [rate], "", at_least=0.33)
    return write(figures)


def test_new_figures_replace_the_old_ones_and_leave_what_was_written_by_hand(
    tmp_path: Path,
) -> None:
    results = tmp_path / "RESULTS.md"
    write_results(results, measured(0.2))
    results.write_text(f"{results.read_text()}\n{STORY}\n\nOf rows.\n")

    write_results(results, measured(0.4))

    text = results.read_text()
    assert "| 0.4 | at least 0.33 | met |" in text
    assert "| 0.2 |" not in text
    assert text.endswith(f"\n{STORY}\n\nOf rows.\n")
    assert text.count(STORY) == 1


def test_an_aim_that_is_missed_is_said() -> None:
    assert "| 0.2 | at least 0.33 | **missed** |" in measured(0.2)
