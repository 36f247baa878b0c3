"""Speaks to systemd: says how the service is, and takes the sockets it was given."""

import asyncio
import contextlib
import os
import socket
from collections.abc import MutableMapping

#: The first descriptor that systemd passes. sd_listen_fds(3)
FIRST_DESCRIPTOR = 3
DESCRIPTORS_MAX = 16
#: A status line, in characters.
STATUS_CHARS_MAX = 300

Environment = MutableMapping[str, str]


class Notifier:
    """Sends states to the service manager; does nothing where there is none.

    The main process is never named (MAINPID): in a one-file executable it is our parent.
    sd_notify(3)
    """

    def __init__(self, environment: Environment) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def ready(self, status: str) -> None:
        self._send("READY=1", f"STATUS={_line(status)}")

    def reloading(self, monotonic_ns: int) -> None:
        """The configuration is being read again; `ready` ends it."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={monotonic_ns // 1000}")

    def stopping(self) -> None:
        self._send("STOPPING=1", "STATUS=stopping")

    def watchdog(self) -> None:
        self._send("WATCHDOG=1")

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        # A manager that is gone or busy must not stop deliveries.
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel,
        ):
            channel.setblocking(False)
            channel.sendto("\n".join(lines).encode(), self._address)


def start_watchdog(
    loop: asyncio.AbstractEventLoop, notifier: Notifier, environment: Environment, pid: int
) -> None:
    """Report twice in each watchdog period, from the event loop: a stuck loop stops it.

    Nothing is reported if the period is meant for another process than `pid` or its parent
    (a one-file executable's parent is the process that systemd started).
    """
    period_us = environment.get("WATCHDOG_USEC", "")
    if not period_us.isdecimal() or not int(period_us):
        return
    if not _is_ours(environment.get("WATCHDOG_PID", str(pid)), pid, os.getppid()):
        return
    half_s = int(period_us) / 2_000_000

    def report() -> None:
        notifier.watchdog()
        loop.call_later(half_s, report)

    report()


def take_sockets(environment: Environment, pid: int, parent: int) -> dict[str, list[socket.socket]]:
    """The sockets that systemd passed, by name; unnamed ones are called ''.

    Those of LISTEN_PID `pid` are taken, and of `parent`, which is what it names in a one-file
    executable. The variables are removed, so that no child takes them for its own. Raises
    ValueError for a descriptor on which nobody can listen.
    """
    for_pid = environment.pop("LISTEN_PID", "")
    count = environment.pop("LISTEN_FDS", "")
    names = environment.pop("LISTEN_FDNAMES", "").split(":")
    if not count.isdecimal() or not _is_ours(for_pid, pid, parent):
        return {}
    found: dict[str, list[socket.socket]] = {}
    for index in range(min(int(count), DESCRIPTORS_MAX)):
        passed = _take(FIRST_DESCRIPTOR + index)
        name = names[index] if index < len(names) else ""
        found.setdefault(name, []).append(passed)
    return found


def _take(descriptor: int) -> socket.socket:
    try:
        # The descriptor knows its own family; nothing here assumes one.
        passed = socket.socket(fileno=descriptor)
        listens = passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ValueError(f"descriptor {descriptor} is no socket: {error.strerror}") from error
    passed.set_inheritable(False)
    if not listens:
        raise ValueError(
            f"descriptor {descriptor} is no listening stream socket (ListenStream= with Accept=no)"
        )
    return passed


def _is_ours(for_pid: str, pid: int, parent: int) -> bool:
    return for_pid in (str(pid), str(parent))


def _line(text: str) -> str:
    return " ".join(text.split())[:STATUS_CHARS_MAX]
