"""Finds what is wrong with a set-up before it matters: config, secrets, handlers, database."""

import os
from collections.abc import Container
from pathlib import Path
from typing import Literal

import msgspec

from receiver import caller, caveats, duties
from receiver.config import ConfigError, Settings, Sql, load
from receiver.process import Processor
from receiver.shown import mending
from store import captured, counts, founder, integrity, ledger, names
from store.database import Snapshot, exists, snapshot
from store.errors import StoreError


class Finding(msgspec.Struct, frozen=True):
    """One thing looked at; `level` says what it means."""

    level: Literal["fine", "warning", "problem", "config"]
    text: str


def examine(path: Path) -> list[Finding]:
    """Look at everything, as the file's owner where that is asked of root."""
    try:
        settings = load(path, secrets=False)
    except ConfigError as error:
        return _every_problem(path, error)
    found = _owner(settings)
    try:
        # As `receiver serve` will read them: by the owner of the file.
        settings = load(path)
        found += [
            _fine_config(settings),
            *_identities(settings),
            *_duties(settings),
            *_warnings(settings),
        ]
    except ConfigError as error:
        # What can be looked at without secrets is still worth knowing.
        found += _problems(error)
    return [*found, *_handlers(settings, found), *_database(settings)]


def _every_problem(path: Path, error: ConfigError) -> list[Finding]:
    try:
        load(path)
    except ConfigError as more:
        error = more
    return _problems(error)


def _owner(settings: Settings) -> list[Finding]:
    owner = caller.become_owner(settings.database)
    if owner is None:
        return []
    words = f"user: judged as {owner}, whom {settings.database} belongs to, as `serve` runs"
    return [Finding("fine", words)]


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


def _duties(settings: Settings) -> list[Finding]:
    lines = (f"worker: {duties.worker_of(settings)}", *duties.listed(settings))
    return [Finding("fine", line) for line in lines]


def _identities(settings: Settings) -> list[Finding]:
    """Of senders that send no id: what an event is known by."""
    told = {
        name: caveats.told_apart_by(source.contract.preset)
        for name, source in settings.sources.items()
    }
    return [Finding("fine", f"sources.{name}: {words}") for name, words in told.items() if words]


def _handlers(settings: Settings, found: list[Finding]) -> list[Finding]:
    if settings.handlers is None or any(one.text.startswith("handlers: ") for one in found):
        return []
    try:
        processor = Processor.load(settings)
    except ConfigError as error:
        return _problems(error)
    functions = ", ".join(processor.handlers.functions) or "none"
    return [Finding("fine", f"handlers: {settings.handlers}: functions {functions}")]


def _database(settings: Settings) -> list[Finding]:
    path = settings.database
    if not exists(path):
        return [_missing(path), *_unchecked(settings), *_uncaptured(settings, {})]
    try:
        # The app's own file has none of our tables before the first start.
        with snapshot(path, ours=False) as seen:
            if integrity.schema_version(seen) == 0:
                return [_without_tables(path), *_statements(seen, settings)]
            return [
                *_file(seen, path),
                *_lost_names(seen, settings),
                *_lost_destinations(seen, settings),
                *_statements(seen, settings),
                *_uncaptured(settings, captured.listed(seen)),
            ]
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


def _without_tables(path: Path) -> Finding:
    return Finding("fine", f"database: {path}: no Receiver tables yet; `receiver serve` makes them")


def _uncaptured(settings: Settings, kept: Container[str]) -> list[Finding]:
    """Sources whose sender has yet to hand over its secret."""
    return [
        Finding(
            "warning",
            f"sources.{name}.secrets: {source.scheme} hands its secret over when the webhook is "
            f"made, and none is there yet; `receiver sources arm {name}`, then make it",
        )
        for name, source in settings.sources.items()
        if source.contract.preset.captures and not source.contract.signing and name not in kept
    ]


def _unchecked(settings: Settings) -> list[Finding]:
    if not any(isinstance(rule.effect, Sql) for rule in settings.rules):
        return []
    return [
        Finding("fine", "rules: `sql` statements were not checked, as there are no tables to see")
    ]


def _statements(seen: Snapshot, settings: Settings) -> list[Finding]:
    """What would be refused of the rules' own SQL; nothing of it is run."""
    without = integrity.schema_version(seen) == 0
    return [
        Finding("problem", f"rules[{number}].sql[{position}]: {words}")
        for number, rule in enumerate(settings.rules)
        if isinstance(rule.effect, Sql)
        for position, statement in enumerate(rule.effect.statements)
        if (words := founder.problem(seen, statement.sql, len(statement.paths))) is not None
        # Our own tables come with the first start.
        and not (without and "no such table: receiver_" in words)
    ]


def _file(seen: Snapshot, path: Path) -> list[Finding]:
    broken = integrity.quick_check(seen)
    if broken:
        return [Finding("problem", f"database: {path} is damaged: {words}") for words in broken]
    version = integrity.schema_version(seen)
    wrong = [
        Finding(
            "problem",
            f"database: balance of {workspace} is {balance} {unit}, its entries add up to {total}; "
            f"{mending(total)}",
        )
        for workspace, unit, balance, total in ledger.disagreements(seen)
    ]
    return wrong or [Finding("fine", f"database: {path}: whole, schema version {version}")]


def _lost_destinations(seen: Snapshot, settings: Settings) -> list[Finding]:
    lost = {one.destination for one in counts.messages(seen)} - settings.destinations.keys()
    return [
        Finding(
            "warning",
            f"destination {name}: the config no longer has it, so what is owed to it waits: "
            f"`receiver outbox list --destination {name}`",
        )
        for name in sorted(lost)
    ]


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
