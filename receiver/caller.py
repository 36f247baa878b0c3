"""Who runs a command, and as whom it opens the file."""

import importlib
import os
import pwd
import sys
from pathlib import Path


def actor() -> str:
    """The operating system's user, for the audit log; after sudo, who called it too.

    Must be asked before `become_owner`.
    """
    user = _name(os.getuid())
    caller = os.environ.get("SUDO_USER")
    return f"{caller} as {user}" if caller and caller != user else user


def become_owner(database: Path) -> str | None:
    """Let root go on as the owner of the file, for the rest of the process; returns who that is.

    Otherwise a -wal or -shm that root makes could lock out the service. Does nothing, and
    returns None, for others, or while there is no file. What only root may read must have been
    read before.
    """
    if os.geteuid() != 0:
        return None
    try:
        status = database.stat()
    except OSError:
        return None
    if status.st_uid == 0:
        return None
    _become(status.st_uid, status.st_gid)
    return _name(status.st_uid)


def _become(user: int, group: int) -> None:
    # The first look-up of a host's name imports it, and Python may be where only root can read.
    importlib.import_module("encodings.idna")
    _share_program()
    try:
        os.initgroups(pwd.getpwuid(user).pw_name, group)
    except KeyError:
        os.setgroups([])
    os.setgid(group)
    os.setuid(user)


def _share_program() -> None:
    """Let others read what a one-file executable has unpacked for root alone."""
    unpacked: str = getattr(sys, "_MEIPASS", "")
    if not unpacked or os.stat(unpacked).st_mode & 0o005 == 0o005:
        return
    for folder, _, names in os.walk(unpacked):
        os.chmod(folder, 0o755)  # noqa: S103  it is the program, no secret
        for name in names:
            os.chmod(os.path.join(folder, name), 0o755)  # noqa: S103


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"uid {user}"
