"""Where the file is, without judging the rest of the config, which takes ten times as long."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from receiver import references
from receiver.references import Unresolved

CONFIG_BYTES_MAX = 1_048_576


def named(config: Path, environment: Mapping[str, str] = os.environ) -> Path | None:
    """The file that a config names; None where it takes `config.load` to say what is wrong."""
    config = config.absolute()
    try:
        text = references.read_bytes(config, CONFIG_BYTES_MAX).decode("utf-8-sig")
        found = tomllib.loads(text).get("database")
    except (Unresolved, ValueError, RecursionError):
        return None
    if found is not None and (not isinstance(found, str) or not found):
        return None
    return of(None if found is None else config.parent / found, config.parent, environment)


def of(database: Path | None, folder: Path, environment: Mapping[str, str]) -> Path:
    """The file itself; `database` is what the config in `folder` says, if it says something."""
    if database is None:
        # systemd names several, with colons between, where a unit has several.
        state = environment.get("STATE_DIRECTORY", "").partition(":")[0]
        database = (Path(state) if state else folder) / "receiver.db"
    # The -wal is beside the file, and the disk is the file's, not those of a link to it.
    return Path(os.path.realpath(database)) if database.is_symlink() else database
