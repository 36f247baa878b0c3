"""Finds what is wrong with a set-up before it matters: config, secrets, handlers, database."""

import os
from pathlib import Path
from typing import Literal

import msgspec

from receiver import caller
from receiver.config import ConfigError, Settings, load
from receiver.process import Processor
from store import integrity, ledger, names
from store.database import Snapshot, snapshot
from store.errors import StoreError


class Finding(msgspec.Struct, frozen=True):
    """One thing looked at; `level` says what it means."""

    level: Literal["fine", "warning", "problem", "config"]
    text: str


def examine(path: Path) -> list[Finding]:
    """Look at everything, as the file's owner where that is asked of root."""
    try:
        settings = load(path)
    except ConfigError as error:
        found = _problems(error)
        # What can be looked at without secrets is still worth knowing.
        try:
            settings = load(path, secrets=False)
        except ConfigError:
            return found
    else:
        found = [_fine_config(settings), *_warnings(settings)]
    caller.become_owner(settings.database)
    return [*found, *_handlers(settings, found), *_database(settings)]


def _problems(error: ConfigError) -> list[Finding]:
    return [Finding("config", problem) for problem in error.problems]


def _warnings(settings: Settings) -> list[Finding]:
    return [Finding("warning", warning) for warning in settings.warnings]


def _fine_config(settings: Settings) -> Finding:
    secrets = sum(len(source.contract.secrets) for source in settings.sources.values())
    return Finding(
        "fine",
        f"config: {settings.path}: sources: {', '.join(settings.sources) or 'none'}; "
        f"secrets found: {secrets}; rules: {len(settings.rules)}",
    )


def _handlers(settings: Settings, found: list[Finding]) -> list[Finding]:
    if settings.handlers is None:
        return []
    try:
        processor = Processor.load(settings)
    except ConfigError as error:
        told = {one.text for one in found}
        return [one for one in _problems(error) if one.text not in told]
    functions = ", ".join(processor.handlers.functions) or "none"
    return [Finding("fine", f"handlers: {settings.handlers}: functions {functions}")]


def _database(settings: Settings) -> list[Finding]:
    path = settings.database
    if not path.exists():
        return [_missing(path)]
    try:
        with snapshot(path) as seen:
            return [*_file(seen, path), *_lost_names(seen, settings)]
    except StoreError as error:
        return [Finding("problem", f"database: {error}")]


def _missing(path: Path) -> Finding:
    if path.parent.is_dir() and os.access(path.parent, os.W_OK | os.X_OK):
        return Finding("fine", f"database: {path} is not there yet; `receiver serve` makes it")
    return Finding(
        "problem",
        f"database: {path} can't be made, as {path.parent} is no folder that this user may "
        "write to; create it, or correct `database`",
    )


def _file(seen: Snapshot, path: Path) -> list[Finding]:
    broken = integrity.quick_check(seen)
    if broken:
        return [Finding("problem", f"database: {path} is damaged: {words}") for words in broken]
    version = integrity.schema_version(seen)
    wrong = [
        Finding(
            "problem",
            f"database: balance of {workspace} is {balance} {unit}, its entries add up to {total}",
        )
        for workspace, unit, balance, total in ledger.disagreements(seen)
    ]
    return wrong or [Finding("fine", f"database: {path}: whole, schema version {version}")]


def _lost_names(seen: Snapshot, settings: Settings) -> list[Finding]:
    used = {"identity": settings.identities, "operation": settings.operations}
    return [
        Finding(
            "warning",
            f"{kind} {name}: the database knows it, the config no longer has it; if it was "
            "renamed, name it as before, or what it did is done again",
        )
        for kind, present in used.items()
        for name in names.lost(seen, kind, present)
    ]
