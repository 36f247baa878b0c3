"""A folder with a config, a real server on it, and a sender: what the demo plays on."""

import contextlib
import fcntl
import http.client
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from receiver import config
from receiver.signing import sign
from receiver.systemd import FIRST_DESCRIPTOR
from store.database import Snapshot, snapshot

#: The configured source, and its path.
SOURCE = "stripe"
PATH = f"/webhooks/{SOURCE}"

#: Seconds for one answer, a health check, a start, a clean stop, a death, and a change to show in
#: the file.
ANSWER_S = 5.0
READY_S = 1.0
START_S = 60.0
STOP_S = 5.0
DEATH_S = 1.0
SEEN_S = 5.0
#: Seconds between two looks.
LOOK_S = 0.01
#: Connections that wait while no server runs.
BACKLOG = 128
#: Characters of the log that an error shows.
LOG_CHARS_MAX = 300

#: Descriptors from here on are in nobody's way while the sockets move to where systemd puts them.
_ASIDE = 16

# What a service manager told this process is not for its child.
_NOT_INHERITED = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "JOURNAL_STREAM")


class PlaygroundError(Exception):
    """The server can't be started or watched; the message says why."""


class Answer(NamedTuple):
    """What came back for a delivery; status 0: nothing did, and the word says how."""

    status: int
    word: str

    def __str__(self) -> str:
        return f"{self.status} {self.word}" if self.status else self.word


class Playground:
    """A sender, and a server that runs on the folder's receiver.toml.

    The listening sockets stay open here, as with systemd: while no server runs, connections
    wait. `secret` signs what is sent.
    """

    def __init__(self, folder: Path, secret: bytes, clock: Callable[[], int]) -> None:
        self.folder = folder
        self.answers: list[Answer] = []
        self.public, self.admin = _listen(), _listen()
        self._secret = secret
        self._clock = clock
        self._server: _Process | None = None

    @property
    def url(self) -> str:
        host, port = self.public.getsockname()
        return f"http://{host}:{port}"

    def load(self) -> None:
        """Read the folder's config, and find the file. Raises ConfigError."""
        settings = config.load(self.folder / "receiver.toml")
        self._preset = settings.sources[SOURCE].contract.preset
        self._database = settings.database

    def close(self) -> None:
        """Stop the server, and listen no more."""
        self.stop()
        self.public.close()
        self.admin.close()

    def start(self) -> None:
        """Start the server and wait until it is ready. Raises PlaygroundError."""
        assert self._server is None, "one server at a time"
        with (self.folder / "server.log").open("ab") as log:
            self._server = _Process(self._command(), (self.public, self.admin), log.fileno())
        if not wait_until(self._is_ready, START_S):
            raise PlaygroundError(f"the server did not start: {self._last_line()}")

    def stop(self) -> None:
        """Let the server finish, or kill it if it does not."""
        server = self._server
        if server is None:
            return
        server.signal(signal.SIGTERM)
        if not server.ends(STOP_S):
            server.kill()
        self._server = None

    def kill(self) -> None:
        """End the server as `kill -9` does."""
        server = self._server
        assert server is not None, "there was a server"
        server.kill()
        self._server = None

    def restart(self) -> None:
        """Start a new server once the last one has died, as systemd would."""
        self.wait_for_death(DEATH_S)
        self.start()

    def wait_for_death(self, seconds: float) -> None:
        """Until the server has ended by itself; one that does not is stopped."""
        assert self._server is not None, "there was a server"
        self._server.ends(seconds)
        self.stop()

    def send(self, body: bytes, *, tampered: bytes | None = None) -> Answer:
        """Sign a body and post it on a connection of its own; `tampered` is sent in its place."""
        with contextlib.closing(_connection(self.public, ANSWER_S)) as connection:
            return self._post(connection, body, body if tampered is None else tampered)

    def send_at_once(self, body: bytes, times: int) -> list[Answer]:
        """Post a body on that many connections at the same moment."""
        together = threading.Barrier(times, timeout=ANSWER_S)

        def one(_: int) -> Answer:
            with contextlib.closing(_connection(self.public, ANSWER_S)) as connection:
                connection.connect()
                together.wait()
                return self._post(connection, body, body)

        with ThreadPoolExecutor(times) as senders:
            return list(senders.map(one, range(times)))

    @contextlib.contextmanager
    def file(self) -> Iterator[Snapshot]:
        """The file as another process sees it now."""
        with snapshot(self._database) as seen:
            yield seen

    def _command(self) -> list[str]:
        # A packed program is its own interpreter. -P: a cli.py in the current folder is not ours.
        program = [sys.executable, *([] if _is_frozen() else ["-P", "-m", "cli"])]
        return [*program, "serve", "--config", str(self.folder / "receiver.toml")]

    def _is_ready(self) -> bool:
        assert self._server is not None, "it was just started"
        if self._server.ends(0):
            raise PlaygroundError(f"the server ended while starting: {self._last_line()}")
        with contextlib.closing(_connection(self.admin, READY_S)) as connection:
            try:
                connection.request("GET", "/readyz")
                return connection.getresponse().status == 200
            except (OSError, http.client.HTTPException):
                return False

    def _last_line(self) -> str:
        lines = (self.folder / "server.log").read_text(errors="replace").splitlines()
        return lines[-1][:LOG_CHARS_MAX] if lines else "it said nothing"

    def _post(self, connection: http.client.HTTPConnection, signed: bytes, body: bytes) -> Answer:
        headers = dict(sign(self._preset, self._secret, signed, now_ms=self._clock()))
        try:
            connection.request("POST", PATH, body, headers)
            response = connection.getresponse()
            answer = Answer(response.status, response.read().decode().strip())
        except TimeoutError:
            answer = Answer(0, f"nothing in {ANSWER_S:.0f} s")
        except (ConnectionError, http.client.HTTPException):
            answer = Answer(0, "no answer")
        self.answers.append(answer)
        return answer


class _Process:
    """A program with the listening sockets that it is to take, as systemd would start it.

    By posix_spawn: subprocess can't put a descriptor where systemd does, and the shell that could
    is not in every tree that the one file runs in.
    """

    def __init__(self, command: list[str], sockets: Sequence[socket.socket], output: int) -> None:
        aside = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _ASIDE) for one in sockets]
        try:
            self._pid = os.posix_spawn(
                command[0],
                command,
                _environment(len(sockets)),
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, output, 1),
                    (os.POSIX_SPAWN_DUP2, output, 2),
                    *(
                        (os.POSIX_SPAWN_DUP2, one, FIRST_DESCRIPTOR + index)
                        for index, one in enumerate(aside)
                    ),
                ],
                # Ctrl-C reaches the demo alone, which then stops the server.
                setsid=True,
            )
        finally:
            for one in aside:
                os.close(one)
        self._ended = False

    def ends(self, seconds: float) -> bool:
        """Whether it has ended, at the latest after so many seconds."""
        return wait_until(self._is_over, seconds)

    def signal(self, number: int) -> None:
        """Send it a signal; it may have ended."""
        if not self._is_over():
            os.kill(self._pid, number)

    def kill(self) -> None:
        """End it at once, with whatever it started: they are a session of their own."""
        if not self._is_over():
            os.killpg(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._ended = True

    def _is_over(self) -> bool:
        if not self._ended:
            self._ended = os.waitpid(self._pid, os.WNOHANG)[0] != 0
        return self._ended


def wait_until(holds: Callable[[], bool], seconds: float = SEEN_S) -> bool:
    """Whether it holds, at the latest after so many seconds."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
    return True


def _listen() -> socket.socket:
    # Port 0: the kernel finds one that is free.
    return socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)


def _connection(listener: socket.socket, timeout_s: float) -> http.client.HTTPConnection:
    host, port = listener.getsockname()
    return http.client.HTTPConnection(host, port, timeout=timeout_s)


def _environment(sockets: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    # What it starts as is not known yet; a server takes what is meant for its parent, too.
    kept |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(sockets)}
    kept |= {"LISTEN_FDNAMES": "public:admin"}
    if _is_frozen():
        # Its loader finds all unpacked, and leaves the path of the libraries to whoever starts it.
        return kept | {"LD_LIBRARY_PATH": getattr(sys, "_MEIPASS", "")}
    # From a checkout the server's code is found from wherever the demo was started.
    code = str(Path(__file__).resolve().parents[1])
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, (code, kept.get("PYTHONPATH"))))}


def _is_frozen() -> bool:
    return bool(getattr(sys, "frozen", False))
