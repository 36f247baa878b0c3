"""Backups: where they go, how they are made and proved whole, and which are kept."""

import re
from collections.abc import Callable
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

#: What SQLite, and we, keep beside the database.
_RESERVED = ("-wal", "-shm", "-journal", "-lock")

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
            _make_folder(folder)
        except OSError as error:
            raise Declined(f"{folder}: can't be made: {error.strerror}; name another") from error
        target = folder / _name(settings, now_ms)
    if not target.parent.is_dir():
        raise Declined(f"{target.parent}: there is no such folder; make it first")
    if _is_beside(settings, target):
        raise Declined(f"{target}: is a name that SQLite has a use for; name another")
    refuse_taken(target)
    return target


def refuse_taken(target: Path) -> None:
    """Raises Declined where something is there already."""
    if target.exists():
        raise Declined(f"{target}: is there already, and not overwritten; name another")


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    folder.mkdir(mode=0o700, exist_ok=True)
    # Else the folder's name may be lost in a power cut, and all that is in it.
    copies.sync(folder.parent)


def make(seen: Snapshot, target: Path, now_ms: int, advance: Callable[[int], None]) -> Made:
    """Copy what the snapshot sees, and open the copy to prove that it is whole.

    Raises StoreError where it can't be written or is damaged.
    """
    facts: list[Facts] = []

    def judge(part: Path) -> None:
        facts.append(backups.examine(part, named=target))

    copy = copies.make(seen.db, target, judge=judge, advance=advance)
    return Made(copy.path, now_ms, msgspec.structs.replace(facts[0], has_checksum=True))


def sweep(settings: Settings, folder: Path) -> None:
    """Remove what backups of this name left that were killed. Only in our `copies.turn`."""
    for part in folder.glob(".*.part"):
        named = part.name.removeprefix(".").removesuffix(".part")
        if is_ours(settings, folder / named.removesuffix(copies.CHECKSUM_SUFFIX)):
            part.unlink(missing_ok=True)
    for beside in folder.glob(f"*{copies.CHECKSUM_SUFFIX}"):
        copy = beside.with_name(beside.name.removesuffix(copies.CHECKSUM_SUFFIX))
        if is_ours(settings, copy) and not copy.exists():
            beside.unlink(missing_ok=True)


def older(settings: Settings, made: Made, keep: int) -> list[Path]:
    """Backups of this database in the same folder beyond the newest `keep`; never `made`.

    Another one's may have the same names there, as when each is a receiver.db.
    """
    others = [
        path
        for path in made.path.parent.iterdir()
        if is_ours(settings, path)
        and path != made.path
        and backups.made_ms(path) == made.facts.made_ms
    ]
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


def _is_beside(settings: Settings, target: Path) -> bool:
    reserved = [f"{settings.database.name}{suffix}" for suffix in _RESERVED]
    return target.name in reserved and target.parent.resolve() == settings.database.parent.resolve()


def _name(settings: Settings, now_ms: int) -> str:
    at = datetime.fromtimestamp(now_ms // 1000, UTC)
    stamp = f"{at:%Y%m%dT%H%M%S}{now_ms % 1000:03}Z"
    return f"{settings.database.stem}-{stamp}{settings.database.suffix}"
