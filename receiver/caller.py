"""Who runs a command, and as whom it opens the file."""

import contextlib
import importlib
import os
import pkgutil
import pwd
import sys
from pathlib import Path

import click

import receiver
import store


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
    _share_program()
    if not _is_shared():
        _import_all()
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


def _is_shared() -> bool:
    """Whether everybody may read this program, Python, and the packages that it uses."""
    frozen = getattr(sys, "frozen", False)
    files = (sys.executable,) if frozen else (__file__, os.__file__, click.__file__)
    places = {place for file in map(Path, files) for place in (file, *file.parents)}
    try:
        return all(place.stat().st_mode & 0o004 for place in places)
    except OSError:
        return False


def _import_all() -> None:
    """What is imported only where it is needed can't be, once this user may not read it."""
    # The first look-up of a host's name imports it.
    importlib.import_module("encodings.idna")
    for package in (receiver, store):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            # Some packages are optional; what needs them says so.
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"uid {user}"
