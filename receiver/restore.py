"""Puts a backup in the place of the database, after it was told what would be lost."""

import contextlib
import json
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

import msgspec

from receiver.operate import By, Declined
from store import audit, backups, copies, integrity
from store.backups import Backup, Facts, Lost
from store.database import Tx, exists, snapshot
from store.errors import NewerFile, StoreError
from store.replace import alone, replace


class Plan(msgspec.Struct, frozen=True):
    """What a restore would do; without `lost`, what is there now can't be read, or is not there.

    `problem` says why it can't be read; `digest` is the SHA-256 of the backup.
    """

    database: Path
    backup: Path
    facts: Facts
    digest: str
    lost: Lost | None = None
    problem: str | None = None


def plan(database: Path, backup: Path) -> Plan:
    """Look at both files. Raises StoreError or Declined where it must not be done."""
    digest = copies.checksum(backup) if backup.is_file() else ""
    facts = backups.examine(backup)
    if not exists(database):
        return Plan(database, backup, facts, digest)
    if database.samefile(backup):
        raise Declined(f"{backup}: is the database itself; name a backup")
    try:
        with snapshot(database, ours=False, older=True) as seen, backups.opened(backup) as copy:
            _refuse_shared(database, integrity.foreign_tables(seen))
            if integrity.schema_version(seen) == 0:
                return Plan(database, backup, facts, digest)
            return Plan(database, backup, facts, digest, backups.lost(seen, copy))
    except NewerFile as error:
        raise Declined(
            f"{database}: a newer version of Receiver wrote it, so what would be lost is not "
            f"known; to give it up, stop what uses it and move it away first "
            f"(mv {database} {database}.newer)"
        ) from error
    except StoreError as error:
        return Plan(database, backup, facts, digest, problem=str(error))


def carry_out(plan: Plan, source: BinaryIO, now_ms: int) -> Path | None:
    """Do it; returns where what was there is kept, None if nothing was.

    `source` is the backup, open for reading. Raises StoreError, with nothing changed, while
    anybody has the database open.
    """
    database = Path(os.path.realpath(plan.database))
    at = datetime.fromtimestamp(now_ms // 1000, UTC)
    aside = database.with_name(f"{database.name}.before-restore-{at:%Y%m%dT%H%M%SZ}")
    if aside.exists():
        raise Declined(f"{aside}: is there already; try again in a second")
    part = database.with_name(f".{database.name}.restoring")
    # From the first byte on: two restores at once would write to the same part.
    with alone(database):
        try:
            _bring(source, part, _mode_of(database))
            # The backup may have changed since the plan, and may be where only root can look.
            if copies.checksum(part) != plan.digest:
                raise StoreError(f"{plan.backup}: has changed meanwhile; run it again")
            backups.examine(part)
            return aside if replace(database, part, aside) else None
        except OSError as error:
            raise StoreError(f"{part}: can't be written: {error.strerror}") from error
        finally:
            # What can't be removed now either is written over by the next one.
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)


def note(tx: Tx, plan: Plan, aside: Path | None, by: By) -> None:
    """Write into the restored file that it was."""
    lost = None if plan.lost is None else msgspec.structs.asdict(plan.lost)
    detail = {"backup": str(plan.backup), "kept": str(aside) if aside else None, "lost": lost}
    audit.add(tx, by.actor, "restore", "database", by.reason, json.dumps(detail))
    # The copy was made before its file could know of it, and is the last one now.
    copied = Backup(plan.facts.copied_ms, str(plan.backup), plan.facts.bytes, tx.now_ms)
    backups.add(tx, copied)


def _bring(source: BinaryIO, part: Path, mode: int) -> None:
    copies.create(part)
    with part.open("wb") as file:
        source.seek(0)
        shutil.copyfileobj(source, file, copies.CHUNK_BYTES)
        os.fchmod(file.fileno(), mode)
    copies.sync(part)


def _mode_of(database: Path) -> int:
    # A file that is shared by a group stays so.
    return database.stat().st_mode & 0o666 if database.exists() else 0o600


def _refuse_shared(database: Path, tables: list[str]) -> None:
    if tables:
        more = f" and {len(tables) - 1} more" if len(tables) > 1 else ""
        raise Declined(
            f"{database}: holds tables that are not Receiver's ({tables[0]}{more}), which would "
            "be set back too; if you want that, stop the app and Receiver, move the file away, "
            "and restore then"
        )
