"""Runs a program of this machine with a message on its standard input."""

import contextlib
import errno
import os
import selectors
import signal
import subprocess
from collections.abc import Mapping
from typing import IO

import msgspec

from receiver.destinations import (
    WHY_CHARS_MAX,
    Command,
    Later,
    Never,
    Owed,
    Result,
    Sent,
    Unknown,
    one_line,
)
from receiver.reach import Deadline

#: Bytes of what a program says that are kept: the last ones.
OUTPUT_BYTES_MAX = 4_096

#: Seconds between SIGTERM and SIGKILL once the time limit is reached.
GRACE_S = 2.0

#: Seconds between two looks whether a program has ended whose children hold its output open.
LOOK_S = 0.05

#: What a program gets of our environment, which else holds secrets. It also gets
#: RECEIVER_OPERATION_KEY, RECEIVER_CORRELATION_ID and RECEIVER_ATTEMPT.
PASSED_ON = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER")
PATH = "/usr/local/bin:/usr/bin:/bin"


def send(to: Command, owed: Owed, environment: Mapping[str, str] = os.environ) -> Result:
    """One attempt. A program that had to be killed may have done its work."""
    argv: list[str] = owed.body["argv"]
    try:
        running = _Running(argv, msgspec.json.encode(owed.body["input"]), _given(owed, environment))
    except OSError as error:
        return _not_started(error, argv[0])
    with running:
        if not running.ended_by(Deadline(to.timeout_s)):
            running.kill()
            how = f"{argv[0]} was stopped after {to.timeout_s:g} s, in the middle of its work"
            return Unknown(_told(how, running.said()))
        code, said = running.code(), running.said()
    if code == 0:
        return Sent(_told(f"{argv[0]} ended with 0", said))
    how = f"ended with {code}" if code > 0 else f"was killed by {_signal_name(-code)}"
    return Later(_told(f"{argv[0]} {how}", said))


class _Running:
    """A program in a session of its own, so that a signal reaches its children too.

    What it leaves running in the background when it ends well goes on. Raises OSError.
    """

    def __init__(self, argv: list[str], message: bytes, environment: Mapping[str, str]) -> None:
        self._unwritten = memoryview(message)
        self._output = b""
        self._process = subprocess.Popen(  # noqa: S603  no shell; argv[0] is the operator's
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            # No descriptor of the database, of a client or of another program.
            close_fds=True,
        )
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        self._stdin: IO[bytes] = self._process.stdin
        self._stdout: IO[bytes] = self._process.stdout
        self._selector = selectors.DefaultSelector()
        for pipe, event in (
            (self._stdin, selectors.EVENT_WRITE),
            (self._stdout, selectors.EVENT_READ),
        ):
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, event)

    def __enter__(self) -> "_Running":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self.kill()
        self._selector.close()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                pipe.close()

    def ended_by(self, deadline: Deadline) -> bool:
        """Feed it and hear it until it has ended; False when the time is over before."""
        try:
            while not self._has_ended():
                self._move(min(LOOK_S, deadline.left_s()))
        except TimeoutError:
            return False
        # What it said last. Its children may go on talking: one look, and no more.
        self._move(0)
        return True

    def kill(self) -> None:
        """End it and its children. It is not waited for before: so the group is still its own."""
        self._signal(signal.SIGTERM)
        self.ended_by(Deadline(GRACE_S))
        self._signal(signal.SIGKILL)
        # One that became another user can't be killed, and must not hold us.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)

    def code(self) -> int:
        """Its exit code, once it has ended; below zero: the signal that killed it."""
        return self._process.wait()

    def said(self) -> str:
        """The end of what it wrote."""
        return self._output.decode(errors="replace")

    def _has_ended(self) -> bool:
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, how) is not None

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _move(self, for_s: float) -> None:
        """Let bytes in and out, or wait so long for any."""
        for key, _ in self._selector.select(for_s):
            if key.fileobj is self._stdin:
                self._feed()
            else:
                self._hear()

    def _feed(self) -> None:
        written = 0
        try:
            written = os.write(self._stdin.fileno(), self._unwritten)
        except BrokenPipeError:
            # It reads no more; whether that is an error, its exit code says.
            self._unwritten = self._unwritten[:0]
        self._unwritten = self._unwritten[written:]
        if not self._unwritten:
            self._selector.unregister(self._stdin)
            self._stdin.close()

    def _hear(self) -> None:
        heard = os.read(self._stdout.fileno(), _CHUNK_BYTES)
        if not heard:
            self._selector.unregister(self._stdout)
        self._output = (self._output + heard)[-OUTPUT_BYTES_MAX:]


def _given(owed: Owed, environment: Mapping[str, str]) -> dict[str, str]:
    passed_on = {name: environment[name] for name in PASSED_ON if name in environment}
    return {
        "PATH": PATH,
        **passed_on,
        "RECEIVER_OPERATION_KEY": owed.operation_key,
        "RECEIVER_CORRELATION_ID": owed.correlation_id,
        "RECEIVER_ATTEMPT": str(owed.attempt),
    }


def _not_started(error: OSError, program: str) -> Result:
    """What is missing is the operator's to set right, and then goes on by itself."""
    if error.errno == errno.E2BIG:
        return Never(one_line(f"{program} was not started: its arguments are too long"))
    hint = _HINTS.get(error.errno or 0, error.strerror or "the system refused")
    return Later(one_line(f"{program} was not started: {hint}"), unreachable=True)


def _told(how: str, said: str) -> str:
    """How it went, and the end of what it said, on one line."""
    line = one_line(said, OUTPUT_BYTES_MAX)
    if not line:
        return one_line(how)
    start = f"{one_line(how, WHY_CHARS_MAX // 2)}; it said: "
    room = WHY_CHARS_MAX - len(start)
    return start + (line if len(line) <= room else "..." + line[3 - room :])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_CHUNK_BYTES = 65_536
_HINTS = {
    errno.ENOENT: "there is no such program (is the path right, and that in its #! line?)",
    errno.EACCES: "it may not be run (is it executable for this user?)",
    errno.ENOEXEC: "it is no program of this machine (does a script begin with #!?)",
}
