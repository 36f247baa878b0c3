"""Runs a command as an operator would, on the config and the file of a World."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

import cli
from receiver.commands import shared
from tests import canary
from tests.conftest import World


class Ran(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def objects(self) -> list[dict[str, Any]]:
        """What a listing printed with --json."""
        return [json.loads(line) for line in self.out.splitlines()]


class Command:
    """`receiver`, with the clock and the config of a World."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shared, "now_ms", world.clock)
        self.config = str(world.folder / "receiver.toml")

    @classmethod
    def on(cls, folder: Path) -> "Command":
        """The same on any folder's config, with the clock as it is."""
        command = cls.__new__(cls)
        command.config = str(folder / "receiver.toml")
        return command

    def __call__(self, *arguments: str | int, typed: str | None = None) -> Ran:
        """Run it with these arguments and `typed` on its standard input."""
        words = [*map(str, arguments), "--config", self.config]
        result = CliRunner().invoke(cli.main, words, input=typed, prog_name="receiver")
        assert isinstance(result.exception, SystemExit | None), result.exc_info
        assert "Traceback" not in result.output
        assert canary.found_in(result.output, secrets_only=True) == []
        assert canary.found_in(result.stderr) == []
        return Ran(result.exit_code, result.stdout, result.stderr)

    def objects(self, *arguments: str | int) -> list[dict[str, Any]]:
        """The objects of a listing that must succeed."""
        ran = self(*arguments, "--json")
        assert ran.code == 0, ran.err
        return ran.objects
