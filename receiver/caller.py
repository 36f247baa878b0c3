"""Who runs a command, and as whom it opens the file."""

import os
import pwd
from pathlib import Path


def actor() -> str:
    """The operating system's user, for the audit log; after sudo, who called it too.

    Must be asked before `become_owner`.
    """
    user = _name(os.getuid())
    caller = os.environ.get("SUDO_USER")
    return f"{caller} as {user}" if caller and caller != user else user


def become_owner(database: Path) -> None:
    """Let root go on as the owner of the file, for the rest of the process.

    Otherwise a -wal or -shm that root makes could lock out the service. Does nothing for
    others, or while there is no file. What only root may read must have been read before.
    """
    if os.geteuid() != 0:
        return
    try:
        status = database.stat()
    except OSError:
        return
    if status.st_uid == 0:
        return
    _become(status.st_uid, status.st_gid)


def _become(user: int, group: int) -> None:
    try:
        os.initgroups(pwd.getpwuid(user).pw_name, group)
    except KeyError:
        os.setgroups([])
    os.setgid(group)
    os.setuid(user)


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"uid {user}"
