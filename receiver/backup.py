"""Backups: where they go, how they are made and proved whole, and which are kept."""

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from receiver.config import Settings
from receiver.operate import Declined
from store import backups, copies
from store.backups import Facts
from store.database import Snapshot

#: What is made beside the database where the config names no folder.
FOLDER = "backups"

_STAMP = re.compile(r"\d{8}T\d{9}Z")


class Made(msgspec.Struct, frozen=True):
    """A backup that was made and found whole."""

    path: Path
    at_ms: int
    facts: Facts


def folder_of(settings: Settings) -> Path:
    """Where backups go that are not told where."""
    return settings.backup.path or settings.database.parent / FOLDER


def target_of(settings: Settings, named: Path | None, now_ms: int) -> Path:
    """Where a backup goes: a file that is not there yet, or a name with the time in a folder.

    Makes the folder (0700) if only that is missing. Raises Declined.
    """
    folder = named or folder_of(settings)
    if named is not None and not named.is_dir():
        target = named
    else:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise Declined(f"{folder}: can't be made: {error.strerror}; name another") from error
        target = folder / _name(settings, now_ms)
    if target.exists():
        raise Declined(f"{target}: is there already, and not overwritten; name another")
    return target


def make(seen: Snapshot, target: Path, now_ms: int, advance: Callable[[int], None]) -> Made:
    """Copy what the snapshot sees, and open the copy to prove that it is whole.

    Raises StoreError, with nothing left at `target`, where it can't be written or is damaged.
    """
    facts: list[Facts] = []

    def judge(part: Path) -> None:
        facts.append(backups.examine(part, named=target))

    copy = copies.make(seen.db, target, judge=judge, advance=advance)
    return Made(copy.path, now_ms, replace(facts[0], has_checksum=True))


def older(settings: Settings, made: Path, keep: int) -> list[Path]:
    """Backups of this database in the same folder beyond the newest `keep`; never `made`."""
    others = [path for path in made.parent.iterdir() if is_ours(settings, path) and path != made]
    others.sort(key=lambda path: path.name, reverse=True)
    return others[max(keep - 1, 0) :]


def newest(settings: Settings) -> Path | None:
    """The newest backup in the folder for them."""
    try:
        found = [path for path in folder_of(settings).iterdir() if is_ours(settings, path)]
    except OSError:
        return None
    return max(found, key=lambda path: path.name, default=None)


def is_ours(settings: Settings, path: Path) -> bool:
    """Whether a file is named as our backups of this database are."""
    stem, suffix = settings.database.stem, settings.database.suffix
    middle = path.name.removeprefix(f"{stem}-").removesuffix(suffix)
    return path.name == f"{stem}-{middle}{suffix}" and _STAMP.fullmatch(middle) is not None


def _name(settings: Settings, now_ms: int) -> str:
    at = datetime.fromtimestamp(now_ms // 1000, UTC)
    stamp = f"{at:%Y%m%dT%H%M%S}{now_ms % 1000:03}Z"
    return f"{settings.database.stem}-{stamp}{settings.database.suffix}"
