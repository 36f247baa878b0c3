"""Our processes as the operator starts them, and the other side that they send to."""

import contextlib
import http.client
import http.server
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from receiver.signing import sign
from store.database import Store, snapshot
from tests.conftest import SECRETS, Clock, World
from tests.service import PATIENCE_S, WITH_US, cpu_s, environment, until

CONFIG = """
handlers = "handlers.py"

[server]
listen = "127.0.0.1:0"
admin = "127.0.0.1:0"

[worker]
run = "RUN"
threads = THREADS

[sources.stripe]
scheme = "stripe"
secrets = ["env:STRIPE"]
livemode = false

[sources.github]
scheme = "github"
secrets = ["env:GITHUB"]

[sources.queue]
scheme = "stripe"
secrets = ["env:STRIPE"]
livemode = false
mode = "queued"

[[rules]]
operation = "owe"
source = "stripe"
on = ["owe"]
subject = "data.object.id"
call = "owe"
"""

HANDLERS = """
def owe(event, tx):
    order = event.body["data"]["object"]
    for number in range(order["messages"]):
        tx.send(order["to"], name=f"n{number}")
"""

_WORK = """
import logging, sys, time
from pathlib import Path
from receiver import work, worker
BEFORE
logging.basicConfig(level="INFO")
ahead_ms = int(sys.argv[2])
sys.exit(work.work(Path(sys.argv[1]), lambda: time.time_ns() // 1_000_000 + ahead_ms))
"""


class Now(Clock):
    """The machine's clock: the processes beside us have no other."""

    def __call__(self) -> int:
        return time.time_ns() // 1_000_000


class Seen(NamedTuple):
    """One request: its path, its Idempotency-Key, when it was read, and its body."""

    path: str
    key: str
    at_s: float
    body: bytes


class Peer(http.server.ThreadingHTTPServer):
    """The other side: remembers what came, and answers once its gate is open."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _PeerHandler)
        self.gate = threading.Event()
        self.gate.set()
        self.status = 200
        self.seen: list[Seen] = []
        self.answered: list[Seen] = []
        #: Called for each request that was read, before it is answered.
        self.on_seen: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self.gate.set()
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.server_close()

    def url(self, path: str = "/") -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"

    def count(self, path: str) -> int:
        """How many requests came for a path."""
        return sum(one.path == path for one in list(self.seen))

    def keys(self, path: str) -> list[str]:
        return [one.key for one in list(self.seen) if one.path == path]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is gone in the middle; any other error is one of the test."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _PeerHandler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        peer = self.server
        assert isinstance(peer, Peer)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        seen = Seen(self.path, self.headers["Idempotency-Key"], time.monotonic(), body)
        peer.seen.append(seen)
        peer.on_seen()
        peer.gate.wait()
        self.send_response(peer.status)
        self.send_header("Content-Length", "0")
        self.end_headers()
        peer.answered.append(seen)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def peering(*, started: bool = True) -> Iterator[Peer]:
    peer = Peer()
    if started:
        peer.start()
    try:
        yield peer
    finally:
        peer.close()


class Running:
    """One process of ours."""

    def __init__(self, folder: Path, name: str, command: list[str]) -> None:
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*WITH_US, *command],
                cwd=folder,
                env=environment(SECRETS),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))

    def cpu_s(self) -> float:
        return cpu_s(self.pid)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """As `kill -9` does."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Let it finish; its exit code."""
        self.process.terminate()
        return self.process.wait(PATIENCE_S)

    def wait_for(self, line: str, times: int = 1) -> None:
        """Until its log has this text so often."""
        until(lambda: self.log.count(line) >= times or self.process.poll() is not None)
        assert self.log.count(line) >= times, self.log


class Place(World):
    """A config and its file, for processes beside us; what is owed is written from here."""

    def __init__(self, folder: Path, config: str, handlers: str = HANDLERS) -> None:
        self.database = folder / "receiver.db"
        super().__init__(folder, Store.create(self.database, Now()), Now())
        self._running: list[Running] = []
        self.handle(handlers)
        self.configure(config)

    def handle(self, handlers: str) -> None:
        """Let handlers.py be this, from the next start on."""
        (self.folder / "handlers.py").write_text(handlers)

    def owe(self, to: str, subject: str = "s", messages: int = 1) -> None:
        """Let messages be owed to a destination."""
        subject = f"{to}-{subject}"
        word = self.stripe(f"evt-{subject}", "owe", id=subject, to=to, messages=messages)
        assert word == "done"

    def work(self, *, ahead_s: int = 0, before: str = "", ready: bool = True) -> Running:
        """A worker alone, with its clock ahead; `before` is what it runs first."""
        program = _WORK.replace("BEFORE", before)
        config = str(self.folder / "receiver.toml")
        command = [sys.executable, "-P", "-c", program, config, str(ahead_s * 1000)]
        running = self._run(f"work-{len(self._running)}", command)
        if ready:
            running.wait_for("working on")
        return running

    def serve(self, *, before: str = "", ready: bool = True) -> Running:
        """A server; `before` is what it runs first."""
        running = self.begin("serve", before=before)
        if ready:
            running.wait_for(" source stripe ")
        return running

    def begin(self, *arguments: str, before: str = "") -> Running:
        """A command of the operator's that goes on; `before` is what it runs first."""
        program = f"{before}\nimport cli\ncli.main()"
        config = str(self.folder / "receiver.toml")
        command = [sys.executable, "-P", "-c", program, *arguments, "--config", config]
        return self._run(arguments[0], command)

    def run(self, kind: str, *, before: str = "") -> Running:
        return self.serve(before=before) if kind == "inside" else self.work(before=before)

    def address(self, running: Running, what: str = "listening") -> str:
        """Where a server listens, as host:port."""
        line = next(line for line in running.log.splitlines() if f" {what} http" in line)
        return urlsplit(line.split()[-1]).netloc

    def post(
        self, running: Running, source: str, body: bytes, *, event_id: str = "", type: str = ""
    ) -> tuple[int, str]:
        """Send a signed delivery to a server; the status and the word of its answer."""
        contract = self.processor.settings.sources[source].contract
        headers = sign(
            contract.preset,
            contract.secrets[0].value,
            body,
            now_ms=self.clock(),
            event_id=event_id,
            type=type,
            account="",
        )
        host, _, port = self.address(running).partition(":")
        client = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
        with contextlib.closing(client):
            client.request("POST", f"/webhooks/{source}", body, dict(headers))
            answer = client.getresponse()
            return answer.status, answer.read().decode().strip()

    def status(self, running: Running, path: str) -> int:
        """The status of a health check."""
        host, _, port = self.address(running, "admin").partition(":")
        client = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
        with contextlib.closing(client):
            client.request("GET", path)
            return client.getresponse().status

    def command(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run `receiver` as the operator does, beside what runs."""
        config = str(self.folder / "receiver.toml")
        return subprocess.run(
            [sys.executable, "-P", "-m", "cli", *arguments, "--config", config],
            cwd=self.folder,
            env=environment(SECRETS),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def query(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        """What is in the file now, without asking for its lock."""
        with snapshot(self.database) as seen:
            return list(seen.db.execute(statement, parameters))

    def value(self, statement: str, *parameters: object) -> Any:
        """The one value that a query gives."""
        ((found,),) = self.query(statement, *parameters)
        return found

    def wait_for(self, wanted: object, statement: str, *parameters: object) -> None:
        """Until a query gives this value."""
        until(lambda: bool(self.value(statement, *parameters) == wanted))

    def close(self) -> None:
        for running in self._running:
            if running.process.poll() is None:
                running.kill()
        self.store.close()

    def _run(self, name: str, command: list[str]) -> Running:
        self._running.append(Running(self.folder, name, command))
        return self._running[-1]


Places = Callable[..., Place]


@contextlib.contextmanager
def placing(folder: Path) -> Iterator[Places]:
    """Makes a place in this folder; none of its processes is left at the end."""
    with contextlib.ExitStack() as made:

        def place(
            config: str, *, run: str = "separate", threads: int = 2, handlers: str = HANDLERS
        ) -> Place:
            text = CONFIG.replace("RUN", run).replace("THREADS", str(threads))
            if run == "off":
                text = text.replace('mode = "queued"', 'mode = "sync"')
            return made.enter_context(contextlib.closing(Place(folder, text + config, handlers)))

        yield place


def destination(name: str, url: str, more: str = "") -> str:
    return f'\n[destinations.{name}]\nkind = "http"\nurl = "{url}"\njson = {{}}\n{more}\n'


@contextlib.contextmanager
def crowded(peer: Peer) -> Iterator[None]:
    """A machine that takes no more connections: what connects waits, and no byte leaves."""
    peer.socket.listen(0)
    with contextlib.ExitStack() as waiting:
        for _ in range(2):
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(peer.socket.getsockname())
        yield
    peer.socket.listen(Peer.request_queue_size)
