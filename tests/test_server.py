"""The real server process: starting, reloading, stopping, and health while it is stuck."""

import asyncio
import contextlib
import datetime
import http.client
import os
import queue
import re
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from receiver.config import load
from receiver.http import Limits
from receiver.server import open_sockets
from receiver.signing import sign
from receiver.verify import Contract
from store.database import snapshot
from tests.service import STRIPE_CONFIG, held_lock, services, until
from tests.test_http import Loop, Rig, Wire
from tests.test_systemd import Manager

ROOT = Path(__file__).parents[1]
PATIENCE_S = 20.0
SECRETS = {"GITHUB": "of the hook"}
PUSH = b'{"ref": "main"}'

CONFIG = """
handlers = "handlers.py"

[server]
listen = "127.0.0.1:0"
admin = "127.0.0.1:0"

[sources.github]
scheme = "github"
secrets = ["env:GITHUB"]

[[rules]]
operation = "greet"
source = "github"
on = ["push"]
record = { kind = "push", data = "{ref}" }

[[rules]]
operation = "wait"
source = "github"
on = ["star"]
call = "wait"
"""
SECOND = """
[sources.second]
scheme = "github"
secrets = ["env:GITHUB"]
"""
# Holds the server's thread until the test lets go.
HANDLERS = """
import os, time

def wait(event, tx):
    open("waiting", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.005)
"""
SERVE = """
import os, sys
from pathlib import Path
for index, passed in enumerate(map(int, sys.argv[2:])):
    os.dup2(passed, 3 + index)
    os.environ["LISTEN_PID"] = str(os.getpid())
# Shorter waits for the tests that have to see one end.
import receiver.server, store.writer
store.writer.WAIT_S_MAX = float(os.environ.get("WAIT_S", store.writer.WAIT_S_MAX))
receiver.server.READY_WAIT_S = float(os.environ.get("WAIT_S", receiver.server.READY_WAIT_S))
receiver.server.READY_FRESH_S = float(os.environ.get("WAIT_S", receiver.server.READY_FRESH_S))
from receiver.server import StartError, serve
def ready(where):
    print(*where.public, *where.admin, flush=True)
try:
    sys.exit(serve(Path(sys.argv[1]), ready=ready))
except StartError as error:
    sys.exit(f"error: {error}")
"""


class Process:
    """One `serve` in a process of its own."""

    def __init__(
        self, folder: Path, environment: dict[str, str], passed: tuple[int, ...] = ()
    ) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self._news: queue.Queue[str] = queue.Queue()
        command = [sys.executable, "-c", SERVE, str(folder / "receiver.toml"), *map(str, passed)]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | SECRETS | self._python() | environment,
            pass_fds=passed,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _python(self) -> dict[str, str]:
        # Compiled once for all the servers of a run, also where nothing may be written beside
        # the code: that is half of a start.
        compiled = str(self.folder.parent / "compiled")
        return {
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": compiled,
        }

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._news.put(line.rstrip("\n"))

    def line(self, pattern: str) -> re.Match[str]:
        """The first line in the log that matches, waited for."""
        for line in self.lines:
            if found := re.search(pattern, line):
                return found
        deadline = time.monotonic() + PATIENCE_S
        while True:
            left = deadline - time.monotonic()
            try:
                self.lines.append(self._news.get(timeout=max(left, 0.001)))
            except queue.Empty:
                raise AssertionError(f"no {pattern!r} in {self.lines}") from None
            if found := re.search(pattern, self.lines[-1]):
                return found

    @property
    def port(self) -> int:
        return int(self.line(r" listening https?://127\.0\.0\.1:(\d+)$")[1])

    @property
    def admin(self) -> int:
        return int(self.line(r" admin http://127\.0\.0\.1:(\d+)$")[1])

    def wire(self) -> Wire:
        return Wire(("127.0.0.1", self.port))

    def kill(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.kill(number)
        return self.ended()

    def ended(self) -> int:
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        while not self._news.empty():
            self.lines.append(self._news.get())
        return code

    def health(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.admin, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(PATIENCE_S)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    processes: list[Process] = []

    def starting(config: str = CONFIG, passed: tuple[int, ...] = (), **environment: str) -> Process:
        configure(tmp_path, config)
        processes.append(Process(tmp_path, environment, passed))
        return processes[-1]

    yield starting
    for each in processes:
        each.close()


def configure(folder: Path, config: str) -> None:
    (folder / "handlers.py").write_text(HANDLERS)
    (folder / "receiver.toml").write_text(config)


def delivery(folder: Path, delivery_id: str, type: str = "push", source: str = "github") -> bytes:
    """A signed request, whole."""
    return signed(contract_of(folder, source), delivery_id, type)


def contract_of(folder: Path, source: str = "github") -> Contract:
    return load(folder / "receiver.toml", environment=SECRETS).sources[source].contract


def signed(contract: Contract, delivery_id: str, type: str = "push") -> bytes:
    headers = sign(contract.preset, b"of the hook", PUSH, now_ms=0, event_id=delivery_id, type=type)
    lines = [
        f"POST /webhooks/{contract.source} HTTP/1.1",
        "Host: h",
        f"Content-Length: {len(PUSH)}",
    ]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + PUSH


def stored(folder: Path) -> list[str]:
    with snapshot(folder / "receiver.db") as seen:
        return [str(each) for (each,) in seen.db.execute("select event_id from receiver_events")]


# Starting


def test_a_server_says_where_it_listens_and_stops_cleanly(start: Start, tmp_path: Path) -> None:
    server = start()
    assert server.process.stdout is not None

    told = server.process.stdout.readline().split()
    assert told == [f"http://127.0.0.1:{server.port}", f"http://127.0.0.1:{server.admin}"]
    assert server.line(rf" source github http://127.0.0.1:{server.port}/webhooks/github$")
    with server.wire() as wire:
        assert wire.ask(delivery(tmp_path, "d-1")).body == b"done\n"
        assert wire.ask(delivery(tmp_path, "d-1")).body == b"duplicate\n"

    assert server.stop() == 0
    assert stored(tmp_path) == ["d-1"]
    assert server.lines[-1].endswith(" INFO stopped")
    assert any(
        re.search(r" INFO delivery source=github id=d-1 type=push .* outcome=done ", x)
        for x in server.lines
    )


def test_the_manager_hears_of_start_reload_and_stop(start: Start, tmp_path: Path) -> None:
    manager = Manager(str(tmp_path / "notify"))
    with contextlib.closing(manager.socket):
        server = start(**manager.environment, WATCHDOG_USEC="60000000")

        assert manager.heard() == ["READY=1", "STATUS=receiving for 1 source"]
        assert manager.heard() == ["WATCHDOG=1"]
        server.kill(signal.SIGHUP)
        assert manager.heard()[0] == "RELOADING=1"
        assert manager.heard()[0] == "READY=1"
        server.kill(signal.SIGTERM)
        assert manager.heard()[0] == "STOPPING=1"
        assert server.ended() == 0


def test_as_many_descriptors_as_allowed_are_taken(start: Start) -> None:
    server = start()
    assert server.port

    limits = Path(f"/proc/{server.process.pid}/limits").read_text()
    soft, hard = map(int, re.findall(r"Max open files +(\d+) +(\d+)", limits)[0])
    assert soft == min(hard, 65_536)


def test_a_second_server_on_the_file_is_warned_of_and_serves(start: Start, tmp_path: Path) -> None:
    first = start()
    first.line(r" listening ")
    second = start()

    assert second.line(r" WARNING another server runs on this file: stop one of them ")
    with first.wire() as one, second.wire() as other:
        assert one.ask(delivery(tmp_path, "d-1")).body == b"done\n"
        assert other.ask(delivery(tmp_path, "d-1")).body == b"duplicate\n"
    assert (first.stop(), second.stop()) == (0, 0)
    assert not any("another server" in line for line in first.lines)


def test_a_taken_port_is_told_in_one_line(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start(CONFIG.replace('listen = "127.0.0.1:0"', f'listen = "127.0.0.1:{port}"'))

        assert server.ended() == 1
    assert len(server.lines) == 1
    assert f"error: server.listen: can't listen on 127.0.0.1:{port}" in server.lines[0]
    assert server.lines[0].endswith("in use; stop what listens there, or name another address")


def test_a_locked_file_at_the_start_is_told_in_one_line(start: Start, tmp_path: Path) -> None:
    first = start()
    assert first.port
    assert first.stop() == 0
    with held_lock(tmp_path / "receiver.db"):
        server = start(WAIT_S="0.1")

        assert server.ended() == 1
    assert "error: " in server.lines[-1]
    assert "Traceback" not in "".join(server.lines)


# Sockets


def unix_config(path: Path) -> str:
    return CONFIG.replace('listen = "127.0.0.1:0"', f'listen = "unix:{path}"')


def test_a_server_that_drains_takes_its_successors_socket_not_along(tmp_path: Path) -> None:
    configure(tmp_path, unix_config(tmp_path / "http.sock"))
    settings = load(tmp_path / "receiver.toml", environment=SECRETS)
    draining = open_sockets(settings)
    draining.public[0].close()

    successor = open_sockets(settings)
    successor.public[0].listen()
    draining.close()

    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(tmp_path / "http.sock"))
    successor.close()
    assert not (tmp_path / "http.sock").exists()


def test_a_unix_socket_is_for_owner_and_group_and_goes_with_the_server(
    start: Start, tmp_path: Path
) -> None:
    path = tmp_path / "http.sock"
    server = start(unix_config(path))
    assert server.line(rf" listening unix:{path}$")

    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    with Wire(str(path)) as wire:
        assert wire.ask(delivery(tmp_path, "d-1")).status == 200
    assert server.stop() == 0
    assert not path.exists()


def test_a_socket_left_by_a_killed_server_is_replaced_a_living_one_is_not(
    start: Start, tmp_path: Path
) -> None:
    path = tmp_path / "http.sock"
    killed = start(unix_config(path))
    assert killed.line(" listening unix:")
    killed.stop(signal.SIGKILL)
    assert path.exists()

    living = start(unix_config(path))
    assert living.line(" listening unix:")
    second = start(unix_config(path))

    assert second.ended() == 1
    assert "another process listens there" in second.lines[-1]
    with Wire(str(path)) as wire:
        assert wire.ask(delivery(tmp_path, "d-1")).status == 200


def test_a_file_in_the_way_of_a_socket_is_not_removed(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    path.write_text("precious")

    assert start(unix_config(path)).ended() == 1
    assert path.read_text() == "precious"


def test_sockets_passed_by_the_manager_win_over_the_config(start: Start, tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as public,
        socket.create_server(("127.0.0.1", 0)) as admin,
    ):
        passed = (os.dup2(admin.fileno(), 60), os.dup2(public.fileno(), 61))
        server = start(passed=passed, LISTEN_FDS="2", LISTEN_FDNAMES="admin:http")

        assert server.port == public.getsockname()[1]
        assert server.admin == admin.getsockname()[1]
        assert server.health("/healthz") == (200, b"ok\n")
        for each in passed:
            os.close(each)
        assert server.stop() == 0


def test_a_passed_descriptor_on_which_nobody_can_listen_is_named(
    start: Start, tmp_path: Path
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as good,
        socket.socket(type=socket.SOCK_DGRAM) as datagrams,
        open(tmp_path / "file", "w") as file,
    ):
        for bad, words in ((datagrams, "no listening stream socket"), (file, "no socket: ")):
            passed = (os.dup2(good.fileno(), 60), os.dup2(bad.fileno(), 61))
            server = start(passed=passed, LISTEN_FDS="2")
            for each in passed:
                os.close(each)

            assert server.ended() == 1
            assert f"error: LISTEN_FDS: descriptor 4 is {words}" in server.lines[-1]


def test_tls_is_served_and_a_renewed_certificate_is_taken_on_reload(
    start: Start, tmp_path: Path
) -> None:
    write_certificate(tmp_path, 1)
    server = start(
        CONFIG.replace("[server]", '[server]\ntls = { certificate = "cert.pem", key = "key.pem" }')
    )
    assert certificate_of(server.port) == 1

    write_certificate(tmp_path, 2)
    server.kill(signal.SIGHUP)
    server.line(" reload .*: done")

    assert certificate_of(server.port) == 2


def test_a_certificate_whose_key_is_unusable_leaves_the_old_one_in_force(
    start: Start, tmp_path: Path
) -> None:
    key = tmp_path / "key.pem"
    write_certificate(tmp_path, 1)
    server = start(
        CONFIG.replace("[server]", '[server]\ntls = { certificate = "cert.pem", key = "key.pem" }')
    )
    assert certificate_of(server.port) == 1
    old = key.read_bytes()

    for serial, text, words in (
        (2, old, "key.pem: key values mismatch"),
        (3, b"no key", "key.pem: no certificate and its key in PEM"),
        (4, None, "key.pem is encrypted; write it without a passphrase"),
    ):
        write_certificate(tmp_path, serial, b"secret" if text is None else None)
        if text is not None:
            key.write_bytes(text)
        server.kill(signal.SIGHUP)

        assert server.line(words)
        assert certificate_of(server.port) == 1


@pytest.fixture
def tls_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    write_certificate(tmp_path, 1)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    loop = Loop()
    rigs: list[Rig] = []

    def make(**of: Any) -> Rig:
        rigs.append(Rig(loop, Limits(sweep_s=0.01, **of), context))
        return rigs[-1]

    yield make
    for each in rigs:
        each.close()
    loop.stop()


def test_handshakes_that_stall_count_as_connections_and_make_room(
    tls_rig: Callable[..., Rig],
) -> None:
    made = tls_rig(connections_max=3)
    with contextlib.ExitStack() as kept:
        stalled = [kept.enter_context(made.wire()) for _ in range(10)]

        assert [each.rest() for each in stalled[:7]] == [b""] * 7
        made.loop.until(lambda: len(made.gate.open) == 3)
        assert tls_status(made) == b"200"
        made.loop.until(lambda: len(made.gate.open) <= 3)


def test_a_handshake_that_stalls_or_fails_is_closed(tls_rig: Callable[..., Rig]) -> None:
    made = tls_rig(head_s=0.2)
    with made.wire() as silent, made.wire() as plain:
        plain.send(b"GET / HTTP/1.1\r\n\r\n")

        assert b"HTTP" not in plain.rest()
        assert silent.rest() == b""
    made.loop.until(lambda: not made.gate.open)


def test_a_gate_stops_in_the_middle_of_a_handshake(tls_rig: Callable[..., Rig]) -> None:
    made = tls_rig()
    with made.wire() as silent:
        made.loop.until(lambda: len(made.gate.open) == 1)

        made.loop.call(made.gate.drain)
        made.loop.call(made.gate.close_waiting)

        assert silent.rest() == b""
        made.loop.run(asyncio.wait_for(made.gate.emptied.wait(), PATIENCE_S))


def tls_status(made: Rig) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with made.wire() as wire, context.wrap_socket(wire.socket) as agreed:
        agreed.sendall(b"POST /x HTTP/1.1\r\ncontent-length: 2\r\n\r\nok")
        return agreed.recv(12)[-3:]


def write_certificate(folder: Path, serial: int, passphrase: bytes | None = None) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    day = datetime.timedelta(days=1)
    today = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), serial, today - day, today + day)
    ).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase is not None:
        encryption = serialization.BestAvailableEncryption(passphrase)
    (folder / "cert.pem").write_bytes(certificate.public_bytes(pem))
    (folder / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, encryption)
    )


def certificate_of(port: int) -> int:
    """The serial number of the certificate that a request is answered under."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request("POST", "/webhooks/github", b"{}")
        assert connection.getresponse().status == 401
        assert isinstance(connection.sock, ssl.SSLSocket)
        der = connection.sock.getpeercert(binary_form=True)
        assert der is not None
    return x509.load_der_x509_certificate(der).serial_number


# Reloading


def test_a_reload_takes_new_sources_without_closing_a_connection(
    start: Start, tmp_path: Path
) -> None:
    server = start()
    new = CONFIG.replace("sources.github", "sources.hub").replace('"github"\non', '"hub"\non')
    with server.wire() as wire:
        assert wire.ask(delivery(tmp_path, "d-1")).status == 200

        configure(tmp_path, new)
        server.kill(signal.SIGHUP)
        server.line(" reload .*: done, 1 source$")

        assert wire.ask(delivery(tmp_path, "d-2", source="hub")).status == 200
        assert wire.ask(b"POST /webhooks/github HTTP/1.1\r\n\r\n").status == 404


def test_a_broken_config_leaves_the_old_one_in_force_and_names_every_problem(
    start: Start, tmp_path: Path
) -> None:
    server = start()
    assert server.port
    request = delivery(tmp_path, "d-1")

    configure(tmp_path, CONFIG.replace("scheme", "schema").replace("[server]", "[server]\nx = 1"))
    server.kill(signal.SIGHUP)

    server.line("the old config stays in force")
    problems = [line for line in server.lines if " ERROR reload " in line]
    assert any("server.x" in line for line in problems)
    assert any("sources.github" in line for line in problems)
    with server.wire() as wire:
        assert wire.ask(request).status == 200


def test_a_config_that_lost_all_its_sources_is_not_taken(start: Start, tmp_path: Path) -> None:
    server = start()
    assert server.port
    request = delivery(tmp_path, "d-1")

    configure(tmp_path, "")
    server.kill(signal.SIGHUP)

    server.line("sources: there is none any more")
    server.line("the old config stays in force")
    with server.wire() as wire:
        assert wire.ask(request).status == 200


def test_a_reload_lets_go_of_the_handlers_before_the_last(tmp_path: Path) -> None:
    bulk = 20_000_000
    handlers = f"BULK = b'x' * {bulk}\n\ndef note(event, tx):\n    return None\n"
    with services(tmp_path) as start_service:
        service = start_service('handlers = "handlers.py"\n' + STRIPE_CONFIG, handlers)

        def reload(number: int) -> int:
            service.reload()
            until(lambda: service.log.count(": done, 1 source") == number)
            return service.resident_bytes()

        first = reload(1)
        last = max(map(reload, range(2, 6)))

    # Four more of them would be twice that.
    assert last - first < 3 * bulk


def test_what_a_reload_takes_away_is_named(start: Start, tmp_path: Path) -> None:
    team = '[destinations.team]\nkind = "http"\nurl = "http://127.0.0.1:1/"\n'
    server = start(CONFIG + SECOND + team)
    assert server.port

    configure(tmp_path, CONFIG[: CONFIG.rindex("[[rules]]")])
    server.kill(signal.SIGHUP)

    server.line(" reload .*: done, 1 source")
    assert [line.rpartition(": ")[2] for line in server.lines if " is gone" in line] == [
        "source second is gone",
        "rule wait is gone",
        "destination team is gone",
    ]


def test_a_reload_ends_for_the_manager_whatever_handlers_do(start: Start, tmp_path: Path) -> None:
    manager = Manager(str(tmp_path / "notify"))
    with contextlib.closing(manager.socket):
        server = start(**manager.environment)
        assert manager.heard()[0] == "READY=1"

        (tmp_path / "handlers.py").write_text("raise BaseException('out')")
        server.kill(signal.SIGHUP)

        assert manager.heard()[0] == "RELOADING=1"
        assert manager.heard()[0] == "READY=1"


def test_what_needs_a_restart_is_said(start: Start, tmp_path: Path) -> None:
    server = start()
    assert server.port

    configure(tmp_path, 'database = "other.db"\n' + CONFIG.replace("1:0", "1:1", 1))
    server.kill(signal.SIGHUP)

    server.line(" reload .*: done")
    assert restarts_named(server) == ["server.listen", "database"]
    assert not (tmp_path / "other.db").exists()


def restarts_named(server: Process) -> list[str]:
    """The settings that a reload said a restart is needed for."""
    found = (re.search(r": (\S+) changed; restart to use it$", line) for line in server.lines)
    return [one[1] for one in found if one]


def test_a_worker_that_a_reload_moves_stays_as_it_is_until_a_restart(
    start: Start, tmp_path: Path
) -> None:
    broken = '[[rules]]\noperation = "break"\nsource = "github"\non = ["fork"]\ncall = "fail"\n'
    # A message that nobody would send is warned of.
    destination = '[destinations.team]\nkind = "http"\nurl = "http://127.0.0.1:1/"\n'
    server = start(CONFIG)
    assert server.port

    off = '[worker]\nrun = "off"\nthreads = 3\n'
    configure(tmp_path, CONFIG + broken + destination + off)
    (tmp_path / "handlers.py").write_text(
        HANDLERS + "\ndef fail(event, tx):\n    raise ValueError\n"
    )
    server.kill(signal.SIGHUP)
    server.line(" reload .*: done")

    assert restarts_named(server) == ["worker.run", "worker.threads"]
    assert not any("messages wait" in line for line in server.lines)
    with server.wire() as wire:
        # Without a worker it would be 503.
        assert wire.ask(delivery(tmp_path, "d-1", "fork")).status == 200
    # And told again, until it is done.
    server.lines.clear()
    server.kill(signal.SIGHUP)
    server.line(" reload .*: done")
    assert restarts_named(server) == ["worker.run", "worker.threads"]


# Health


def test_health_answers_while_a_handler_holds_the_server_and_readiness_says_no(
    start: Start, tmp_path: Path
) -> None:
    server = start(WAIT_S="0.2")
    assert server.health("/readyz") == (200, b"ready\n")
    with server.wire() as wire:
        wire.send(delivery(tmp_path, "d-1", "star"))
        until((tmp_path / "waiting").exists)

        assert server.health("/healthz") == (200, b"ok\n")
        until(lambda: server.health("/readyz") == (503, b"unavailable\n"))
        (tmp_path / "go").touch()

        assert wire.answer().status == 200
    until(lambda: server.health("/readyz") == (200, b"ready\n"))


def test_health_answers_while_another_process_holds_the_lock(start: Start, tmp_path: Path) -> None:
    server = start(WAIT_S="0.2")
    assert server.port

    with held_lock(tmp_path / "receiver.db"):
        until(lambda: server.health("/readyz") == (503, b"unavailable\n"))
        assert server.health("/healthz") == (200, b"ok\n")

    until(lambda: server.health("/readyz") == (200, b"ready\n"))


def test_the_public_listener_answers_no_health_checks(start: Start) -> None:
    with start().wire() as wire:
        assert wire.ask(b"GET /healthz HTTP/1.1\r\n\r\n").status == 404
        assert wire.ask(b"GET /readyz HTTP/1.1\r\n\r\n").status == 404


# Stopping


def test_a_stopping_server_answers_what_is_under_way_and_what_still_comes(
    start: Start, tmp_path: Path
) -> None:
    server = start()
    with server.wire() as idle, server.wire() as busy:
        assert idle.ask(b"GET / HTTP/1.1\r\n\r\n").status == 404
        with held_lock(tmp_path / "receiver.db"):
            busy.send(delivery(tmp_path, "d-1"))
            assert idle.ask(b"GET / HTTP/1.1\r\n\r\n").status == 404
            server.kill(signal.SIGTERM)
            until(lambda: refuses(server.port))
            idle.send(delivery(tmp_path, "d-2"))

        answers = [each.answer() for each in (busy, idle)]

        assert [each.status for each in answers] == [200, 200]
        assert {each.headers["connection"] for each in answers} == {"close"}
    assert server.ended() == 0
    assert sorted(stored(tmp_path)) == ["d-1", "d-2"]


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:
        # In the very moment of closing.
        return False
    return False


def test_a_second_signal_ends_the_wait_for_idle_connections(start: Start) -> None:
    server = start()
    with server.wire() as idle:
        assert idle.ask(b"GET / HTTP/1.1\r\n\r\n").status == 404
        server.kill(signal.SIGTERM)
        until(lambda: refuses(server.port))
        started = time.monotonic()

        assert server.stop(signal.SIGINT) == 0

        assert time.monotonic() - started < 1.5


def test_a_stopping_server_takes_no_other_config(start: Start) -> None:
    server = start()
    with server.wire() as idle:
        assert idle.ask(b"GET / HTTP/1.1\r\n\r\n").status == 404
        server.kill(signal.SIGTERM)
        until(lambda: refuses(server.port))

        server.kill(signal.SIGHUP)

        assert server.ended() == 0
    assert not [line for line in server.lines if "reload" in line]


def test_restarts_behind_a_passed_socket_refuse_and_lose_nothing(
    start: Start, tmp_path: Path
) -> None:
    configure(tmp_path, CONFIG)
    contract = contract_of(tmp_path)
    requests = [signed(contract, f"d-{number}") for number in range(400)]
    with socket.create_server(("127.0.0.1", 0), backlog=512) as public:
        passed = (os.dup2(public.fileno(), 62),)

        def serving() -> Process:
            server = start(passed=passed, LISTEN_FDS="1", LISTEN_FDNAMES="http")
            assert server.port == public.getsockname()[1]
            return server

        server = serving()
        with ThreadPoolExecutor(4) as pool:
            clients = [
                pool.submit(send_all, public.getsockname(), requests[part::4]) for part in range(4)
            ]
            for _ in range(3):
                before = len(stored(tmp_path))
                until(lambda before=before: len(stored(tmp_path)) > before)  # type: ignore[misc]
                assert server.stop() == 0
                server = serving()
            answers = [answer for client in clients for answer in client.result(PATIENCE_S * 3)]
        os.close(passed[0])

    assert answers == [200] * len(requests)
    assert len(stored(tmp_path)) == len(requests)


def send_all(address: Any, requests: list[bytes]) -> list[int]:
    """As a well-behaved sender: on one connection, and a new one when told to close."""
    answers = []
    wire = Wire(address)
    wire.socket.settimeout(PATIENCE_S)
    for each in requests:
        answer = wire.ask(each)
        answers.append(answer.status)
        if answer.headers.get("connection") == "close":
            wire.socket.close()
            wire = Wire(address)
            wire.socket.settimeout(PATIENCE_S)
        time.sleep(0.005)
    wire.socket.close()
    return answers


def test_what_was_answered_survives_a_kill(start: Start, tmp_path: Path) -> None:
    server = start()
    with server.wire() as wire:
        for number in range(20):
            assert wire.ask(delivery(tmp_path, f"d-{number}")).status == 200

    server.stop(signal.SIGKILL)

    assert len(stored(tmp_path)) == 20


def test_a_wal_replaced_underneath_ends_the_server_at_once(start: Start, tmp_path: Path) -> None:
    server = start()
    with server.wire() as wire:
        assert wire.ask(delivery(tmp_path, "d-1")).status == 200
        (tmp_path / "receiver.db-wal").unlink()
        wire.send(delivery(tmp_path, "d-2"))

        assert b"HTTP/1.1 2" not in wire.rest()

    assert server.ended() == 1
    assert re.search(r" CRITICAL stopped: .*replaced.*start again", server.lines[-1])


# Garbage


def test_memory_stays_flat_under_ten_thousand_garbage_requests(start: Start) -> None:
    server = start()
    garbage = [
        b"POST /webhooks/github HTTP/1.1\r\ncontent-length: 2\r\n\r\nno",
        b"POST /webhooks/%d HTTP/1.1\r\n\r\n",
        b"POST /%d HTTP/1.1\r\n\r\n",
        b"POST /webhooks/github HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
        b"3\r\n%03d\r\n0\r\n\r\n",
        b"GET /webhooks/github HTTP/1.1\r\n\r\n",
    ]

    def throw(count: int) -> None:
        with server.wire() as wire:
            for number in range(0, count, len(garbage)):
                wire.send(b"".join(garbage) % ((number % 1000,) * 3))
                for _ in garbage:
                    assert wire.answer().status in {401, 404, 405}

    throw(2_000)
    before = resident_kib(server)
    throw(10_000)

    assert resident_kib(server) - before < 4_096
    assert server.health("/healthz")[0] == 200
    refused = [line for line in server.lines if " refused " in line]
    assert len(refused) < 100


def resident_kib(server: Process) -> int:
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+)", text)[0])


def test_large_unsigned_bodies_cost_bounded_memory(start: Start) -> None:
    server = start()
    with server.wire() as wire:
        assert wire.ask(b"POST /webhooks/github HTTP/1.1\r\n\r\n").status == 401
    before = resident_kib(server)
    wires = [server.wire() for _ in range(150)]

    for each in wires:
        head = b"POST /webhooks/github HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
        with contextlib.suppress(OSError):
            each.send(head + b"%x\r\n" % 1_000_000 + b"x" * 999_999)

    assert resident_kib(server) - before < 150 * 1024
    with server.wire() as wire:
        assert wire.ask(b"GET / HTTP/1.1\r\n\r\n").status == 404
    for each in wires:
        each.socket.close()
