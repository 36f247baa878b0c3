"""Runs the service: binds, serves, reloads, drains, and answers health checks apart."""

import asyncio
import contextlib
import errno
import functools
import gc
import os
import resource
import signal
import socket
import ssl
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgspec
import uvloop
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from receiver import app, config, duties, logs, reloading, systemd
from receiver.app import App
from receiver.captures import Captures
from receiver.certificate_book import Book
from receiver.config import Address, Settings
from receiver.console import counted
from receiver.counters import Counters
from receiver.http import CONNECTIONS_MAX, Connection, Gate, Handshake, Limits
from receiver.logs import log, trail_of
from receiver.metrics import Metrics
from receiver.process import Processor
from receiver.worker import Lane, Worker, Write, watching
from store import certificates, health
from store.database import Job, Snapshot, Store, Tx
from store.errors import Unavailable
from store.writer import Writer

T = TypeVar("T")

#: Seconds that a thread may hold the interpreter while another waits for it, as the one that
#: committed does: Python's own 5 ms would be as much as the commit.
SWITCH_S = 0.0005
#: Seconds that open connections get to finish when the server stops.
DRAIN_S = 2.0
#: How often it is looked whether there are descriptors left, in seconds.
DESCRIPTORS_LOOK_S = 5.0
#: Seconds that the last answers get once everything is written.
ANSWER_S = 1.0
#: Seconds after which a commit that was tried for a readiness check counts as failed, and that
#: its result is good for.
READY_WAIT_S = 6.0
READY_FRESH_S = 1.0
#: Connections of the admin listener.
ADMIN_CONNECTIONS_MAX = 64
#: A request body that the admin listener would read, in bytes.
ADMIN_BYTES_MAX = 65_536
#: Descriptors kept for the file, the admin listener and the rest, and the most that are asked for.
DESCRIPTORS_SPARE = 128
DESCRIPTORS_MAX = 65_536
#: Who may connect to a unix socket: the owner and the group, which a proxy joins.
SOCKET_MODE = 0o660

#: What to do where an address can't be listened on.
_CAUSES = {
    errno.EADDRINUSE: "; stop what listens there, or name another address",
    errno.EADDRNOTAVAIL: "; name an address of this machine",
    errno.EACCES: "; a port below 1024 and a socket in another's folder are not this user's",
}


class StartError(Exception):
    """The service can't start here; the message says why and what to do."""


class Listening(msgspec.Struct, frozen=True):
    """Where a server listens, as URLs or unix:/path, and under which settings."""

    settings: Settings
    public: tuple[str, ...]
    admin: tuple[str, ...]


def serve(
    config_path: Path,
    *,
    clock_ns: Callable[[], int] = time.time_ns,
    ready: Callable[[Listening], None] | None = None,
) -> int:
    """Serve until a signal ends it; the exit code, 0 for a clean stop.

    `ready` is called with the real addresses once requests are accepted. Raises ConfigError,
    StoreError or StartError if it can't begin. When the file is replaced underneath, the process
    ends at once with exit code 1.
    """
    processor = Processor.load(config.load(config_path))
    settings = processor.settings
    # What is made by now stays, so it is never looked at for garbage. Not collected before: that
    # would be a tenth of the start, for what a megabyte holds.
    gc.freeze()
    sys.setswitchinterval(SWITCH_S)

    def clock() -> int:
        return clock_ns() // 1_000_000

    lines = logs.configure(sys.stderr, os.environ)
    connections_max = min(CONNECTIONS_MAX, raise_descriptor_limit())
    limits = Limits(connections_max=connections_max, backlog=connections_max)
    with (
        contextlib.closing(lines),
        contextlib.closing(open_sockets(settings)) as sockets,
        contextlib.closing(Store.create(settings.database, clock)) as store,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        if not store.serve():
            log.warning(
                "another server runs on this file: stop one of them", file=str(settings.database)
            )
        if settings.worker.run == "inside":
            store.work("inside")
        logs.flush_regularly(runner.get_loop())
        watch_descriptors(runner.get_loop())
        runner.run(_serve(processor, store, clock, limits, sockets, ready))
    return 0


async def _serve(
    processor: Processor,
    store: Store,
    clock: Callable[[], int],
    limits: Limits,
    sockets: "Sockets",
    ready: Callable[[Listening], None] | None,
) -> None:
    server = Server(processor, store, clock, limits, systemd.Notifier(os.environ))
    await server.run(sockets, ready)


class Server:
    """One running service."""

    def __init__(
        self,
        processor: Processor,
        store: Store,
        clock: Callable[[], int],
        limits: Limits,
        notifier: systemd.Notifier,
    ) -> None:
        self._processor = processor
        #: What is only read at the start is compared with it.
        self._started = processor.settings
        self._clock = clock
        self._notifier = notifier
        self._limits = limits
        self._gate = Gate(self._limits_of(processor.settings))
        self._tls = tls_context(processor.settings)
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(report_loop_error)
        self._worker: Worker | None = None
        self._captures = Captures()
        self._watching: Lane | None = None
        self._counters = Counters()
        self._writer = Writer(
            store,
            pending_max=processor.settings.server.pending_max,
            # Asked of the processor that is in force then.
            due=self._due_jobs,
            on_fatal=leave,
            on_commit=self._counters.committed,
        )
        write = from_threads(self._loop, self._writer)
        self._certificates = Book(clock, functools.partial(keep_certificate, write))
        self._app = App(
            processor, self._writer, clock, self._captures, self._certificates, self._counters
        )
        match processor.settings.worker.run:
            case "inside":
                self._worker = Worker(lambda: self._processor, write, clock)
            case "off":
                self._watching = watching(lambda: self._settings, write, clock, sends=False)

    @property
    def _settings(self) -> Settings:
        return self._processor.settings

    def _due_jobs(self, snapshot: Snapshot, at_ms: int) -> Sequence[Job[Any]]:
        if self._worker is not None:
            self._worker.look(snapshot, at_ms)
        self._captures.look(snapshot, self._settings)
        return self._processor.due_jobs(snapshot, at_ms)

    async def run(self, sockets: "Sockets", ready: Callable[[Listening], None] | None) -> None:
        """Serve until SIGTERM or SIGINT; everything accepted is answered and written."""
        readiness = Readiness(self._loop, self._writer)
        metrics = Metrics(
            self._counters,
            lambda: self._settings,
            self._clock,
            waiting=lambda: self._writer.waiting,
            is_ready=readiness.check,
        )
        admin = AdminThread(sockets.admin, app.Admin(readiness.check, metrics.scrape))
        admin.start()
        try:
            await self._begin()
            listeners = await listen(self._gate, self._app, sockets.public, self._certified)
            readiness.committed = True
            self._watch_signals()
            listening = self._announce(sockets)
            self._notifier.ready(self._status())
            systemd.start_watchdog(self._loop, self._notifier, os.environ, os.getpid())
            if ready is not None:
                ready(listening)
            # Last: what its threads import at first would hold up the first answers.
            self._start_worker()
            await self._stop.wait()
            self._notifier.stopping()
            readiness.stopping = True
            await self._drain(listeners)
        finally:
            admin.stop()
        log.info("stopped")

    async def _begin(self) -> None:
        try:
            await self._writer.submit(self._first_job)
            self._certificates.load(await self._writer.submit(certificates.known))
        except Unavailable as error:
            raise StartError(f"{self._settings.database}: {error}") from error

    def _start_worker(self) -> None:
        if self._worker is not None:
            self._worker.start()
        if self._watching is not None:
            self._watching.start()

    def _first_job(self, tx: Tx) -> None:
        self._processor.start(tx)
        # Before the first delivery: it may be signed with a secret that was captured.
        self._captures.look(tx, self._settings)

    async def _drain(self, listeners: Sequence["asyncio.AbstractServer | TlsListener"]) -> None:
        """Take nothing new, answer what is under way, write it all."""
        close_all(listeners)
        self._gate.drain()
        self._certificates.close()
        worker = asyncio.ensure_future(self._stop_worker())
        # Idle connections may have a request on its way: it is answered, then they close.
        await self._wait_until_empty(DRAIN_S)
        self._gate.close_waiting()
        await worker
        await self._app.close()
        await self._writer.close()
        await self._wait_until_empty(ANSWER_S)
        self._gate.stop()

    async def _stop_worker(self) -> None:
        # On a thread: what it finishes is written by this loop.
        if self._worker is not None:
            await asyncio.to_thread(self._worker.stop)
        if self._watching is not None:
            self._watching.stop()
            await asyncio.to_thread(self._watching.thread.join, DRAIN_S)

    async def _wait_until_empty(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._gate.emptied.wait(), seconds)

    def _watch_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_stop)
        self._loop.add_signal_handler(signal.SIGHUP, self._reload)

    def _on_stop(self) -> None:
        if self._stop.is_set():
            # A second signal ends the wait for peers, nothing else.
            self._gate.close_waiting()
        self._stop.set()

    def _reload(self) -> None:
        """Take the config file as it is now; a broken one changes nothing."""
        if self._stop.is_set():
            # It would start threads of a worker that has been stopped.
            return
        self._notifier.reloading(time.monotonic_ns())
        path = self._settings.path
        status = f"the old config is in force: {path} has problems"
        try:
            self._take(path)
            status = self._status()
        except config.ConfigError as error:
            for problem in error.problems:
                log.error("reload %s: %s", path, problem)
            log.error("reload %s: the old config stays in force", path)
        finally:
            # Without it systemd ends a service that reloads.
            self._notifier.ready(status)

    def _take(self, path: Path) -> None:
        old = self._settings
        found = config.load_again(old)
        new = reloading.in_force(old, found)
        processor = Processor.load(new)
        tls = None if self._tls is None else tls_context(new)
        changed = reloading.restart_of_server_needed(self._started, found)
        for name in (*changed, *reloading.restart_needed(old, found)):
            log.warning("reload %s: %s changed; restart to use it", path, name)
        for name in reloading.gone(old, new):
            log.warning("reload %s: %s is gone", path, name)
        self._processor = self._app.processor = processor
        self._tls = tls or self._tls
        self._gate.set_limits(self._limits_of(new))
        self._writer.submit(processor.start).add_done_callback(_report_failure)
        if self._worker is not None:
            self._worker.start()
        # The functions of the old handlers.py and its globals hold each other, and so little is
        # left for the collector otherwise that it would hardly ever look.
        gc.collect()
        self._log_warnings()
        log.info("reload %s: done, %s", path, counted(len(new.sources), "source"))

    def _certified(self) -> ssl.SSLContext | None:
        return self._tls

    def _limits_of(self, settings: Settings) -> Limits:
        return msgspec.structs.replace(self._limits, body_bytes_max=settings.server.body_bytes_max)

    def _status(self) -> str:
        return f"receiving for {counted(len(self._settings.sources), 'source')}"

    def _announce(self, sockets: "Sockets") -> Listening:
        scheme = "http" if self._tls is None else "https"
        listening = Listening(
            self._settings,
            tuple(url_of(each, scheme) for each in sockets.public),
            tuple(url_of(each, "http") for each in sockets.admin),
        )
        for url in listening.public:
            log.info("listening %s", url)
        for url in listening.admin:
            log.info("admin %s", url)
        for source in self._settings.sources.values():
            base = source.public_url or listening.public[0]
            log.info("source %s %s%s", source.name, base, source.url_path())
        log.info("worker %s", duties.worker_of(self._settings))
        for duty in duties.listed(self._settings):
            log.info("%s", duty)
        self._log_warnings()
        return listening

    def _log_warnings(self) -> None:
        for warning in self._settings.warnings:
            log.warning("%s: %s", self._settings.path, warning)


def from_threads(loop: asyncio.AbstractEventLoop, writer: Writer) -> Write:
    """The writer's jobs, for threads that wait for their results."""

    async def submitted(run: Callable[[Tx], T], keep: Callable[[Tx, str], T] | None) -> T:
        return await writer.submit(run, keep)

    def write(run: Callable[[Tx], T], keep: Callable[[Tx, str], T] | None = None) -> T:
        return asyncio.run_coroutine_threadsafe(submitted(run, keep), loop).result()

    return write


def keep_certificate(write: Write, url: str, pem: str, at_ms: int) -> None:
    """Store one; what can't be written now is fetched again after the next start."""
    # RuntimeError: the loop has ended.
    with contextlib.suppress(Unavailable, RuntimeError):
        write(lambda tx: certificates.keep(tx, url, pem, at_ms))


async def listen(
    gate: Gate,
    application: Callable[..., Any],
    sockets: Sequence[socket.socket],
    tls: Callable[[], ssl.SSLContext | None],
) -> list["asyncio.AbstractServer | TlsListener"]:
    """Accept connections on bound sockets, within the gate's limits.

    `tls` is asked for the context of each new connection; None at first means plain HTTP.
    """
    loop = asyncio.get_running_loop()
    settings = Config(
        application,
        http=HttpToolsProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
    )
    settings.load()
    connect = functools.partial(Connection, gate, settings, ServerState(), {}, loop)
    gate.start(loop)
    servers: list[asyncio.AbstractServer | TlsListener] = []
    for bound in sockets:
        if tls() is not None:
            servers.append(TlsListener(gate, connect, bound, tls))
            continue
        create = loop.create_server
        if bound.family == socket.AF_UNIX:
            create = loop.create_unix_server  # type: ignore[assignment]  # the same but for `path`
        servers.append(await create(connect, sock=bound, backlog=gate.limits.backlog))
    return servers


class TlsListener:
    """Accepts connections that begin with a handshake, each counted from its first moment.

    The event loop's own server tells nobody of a connection before its handshake is done.
    """

    def __init__(
        self,
        gate: Gate,
        connect: Callable[[], Connection],
        bound: socket.socket,
        tls: Callable[[], ssl.SSLContext | None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._gate = gate
        self._connect = connect
        self._bound = bound
        self._tls = tls
        bound.setblocking(False)
        bound.listen(gate.limits.backlog)
        self._loop.add_reader(bound, self._accept)

    def close(self) -> None:
        self._loop.remove_reader(self._bound)
        self._bound.close()

    def _accept(self) -> None:
        try:
            peer, _ = self._bound.accept()
        except OSError:
            return  # gone already
        connection = self._connect()
        agreeing = self._loop.connect_accepted_socket(lambda: connection, peer, ssl=self._tls())
        task = self._loop.create_task(agreeing)
        task.add_done_callback(functools.partial(self._agreed, connection, peer))
        connection.accepted(Handshake(task))

    def _agreed(
        self, connection: Connection, peer: socket.socket, task: "asyncio.Task[Any]"
    ) -> None:
        if task.cancelled() or task.exception() is not None:
            self._gate.forget(connection)
            peer.close()


def close_all(listeners: Sequence["asyncio.AbstractServer | TlsListener"]) -> None:
    for listener in listeners:
        listener.close()


class AdminThread:
    """Health checks and metrics, on a thread and a loop of their own: nothing holds them up."""

    def __init__(self, sockets: Sequence[socket.socket], application: app.Admin) -> None:
        self._sockets = sockets
        self._application = application
        self._thread = threading.Thread(target=self._run, name="admin", daemon=True)
        self._serving = threading.Event()

    def start(self) -> None:
        self._thread.start()
        self._serving.wait()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(report_loop_error)
        self._stop = asyncio.Event()
        gate = Gate(
            Limits(
                connections_max=ADMIN_CONNECTIONS_MAX,
                backlog=ADMIN_CONNECTIONS_MAX,
                body_bytes_max=ADMIN_BYTES_MAX,
            )
        )
        listeners = await listen(gate, self._application, self._sockets, lambda: None)
        self._serving.set()
        await self._stop.wait()
        close_all(listeners)
        gate.stop()


class Readiness:
    """Whether the writer can commit: answered from memory, so that asking never waits.

    What is known gets old while nothing is written. Then a question answers with it, and has a
    commit tried for the next one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, writer: Writer) -> None:
        self.stopping = False
        self._loop = loop
        self._writer = writer
        #: How the last try ended.
        self.committed = False
        self._asked: Future[None] | None = None
        self._asked_at = 0.0

    def check(self) -> bool:
        """May be asked on any thread."""
        if self.stopping or self._writer.trouble() is not None:
            return False
        now = time.monotonic()
        if self._asked is None or self._asked.done():
            if now - self._asked_at >= READY_FRESH_S:
                self._asked_at = now
                self._asked = asyncio.run_coroutine_threadsafe(self._try(), self._loop)
        elif now - self._asked_at >= READY_WAIT_S:
            return False
        return self.committed

    async def _try(self) -> None:
        written = self._writer.submit(health.touch)
        await asyncio.wait([written])
        self.committed = written.exception() is None


class Bound(NamedTuple):
    """The path of a unix socket, and which file that is."""

    path: Path
    device: int
    inode: int
    made_ns: int

    @classmethod
    def at(cls, path: Path) -> "Bound | None":
        """What is there now. Its time too, as the number of a removed file is used again."""
        try:
            status = path.stat()
        except OSError:
            return None
        return cls(path, status.st_dev, status.st_ino, status.st_mtime_ns)


class Sockets(msgspec.Struct, frozen=True):
    """Bound sockets, and the paths of those that are ours to remove."""

    public: list[socket.socket]
    admin: list[socket.socket]
    paths: list[Bound]

    def close(self) -> None:
        for each in (*self.public, *self.admin):
            each.close()
        for bound in self.paths:
            # Not that of another server, which was started while this one had still to drain.
            if Bound.at(bound.path) == bound:
                bound.path.unlink(missing_ok=True)


def open_sockets(settings: Settings) -> Sockets:
    """Those that systemd passed (named `admin`, or anything else for the public one), or our own.

    Raises StartError.
    """
    try:
        passed = systemd.take_sockets(os.environ, os.getpid(), os.getppid())
    except ValueError as error:
        raise StartError(f"LISTEN_FDS: {error}") from error
    sockets = Sockets([], passed.pop("admin", []), [])
    for each in passed.values():
        sockets.public.extend(each)
    try:
        if not sockets.public:
            sockets.public.append(bind("server.listen", settings.server.listen, sockets.paths))
        if not sockets.admin:
            sockets.admin.append(bind("server.admin", settings.server.admin, sockets.paths))
    except StartError:
        sockets.close()
        raise
    return sockets


def bind(key: str, address: Address, paths: list[Bound]) -> socket.socket:
    """A socket for an address; the path of a unix socket is added to `paths`."""
    try:
        if address.unix is None:
            return _bind_tcp(address)
        bound = _bind_unix(address.unix)
    except OSError as error:
        raise StartError(
            f"{key}: can't listen on {address}: {error.strerror}{_CAUSES.get(error.errno or 0, '')}"
        ) from error
    there = Bound.at(address.unix)
    if there is not None:
        paths.append(there)
    return bound


def _bind_tcp(address: Address) -> socket.socket:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, name = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        # A restart need not wait for the connections of the last run to be forgotten.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(name)
    except OSError:
        bound.close()
        raise
    return bound


def _bind_unix(path: Path) -> socket.socket:
    _remove_stale(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # With the mode from the start: there is no moment in which others may connect.
    umask = os.umask(0o777 & ~SOCKET_MODE)
    try:
        bound.bind(str(path))
    except OSError:
        bound.close()
        raise
    finally:
        os.umask(umask)
    return bound


def _remove_stale(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise StartError(f"{path}: is in the way and not a socket; remove it")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                # Nobody listens: the last owner was killed.
                path.unlink()
                return
        raise StartError(f"{path}: another process listens there; stop it first")


def url_of(bound: socket.socket, scheme: str) -> str:
    name = bound.getsockname()
    if bound.family == socket.AF_UNIX:
        return f"unix:{os.fsdecode(name)}"
    return f"{scheme}://{Address(*name[:2])}"


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """The context for the public listener, or None without TLS. Raises ConfigError."""
    files = settings.server.tls
    if files is None:
        return None
    # Always a new one: a context that could not load a key has taken the certificate already.
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(files.certificate, files.key, lambda: _no_passphrase(files.key))
    except (OSError, ssl.SSLError) as error:
        words = error.strerror
        if isinstance(error, ssl.SSLError):
            reason = error.reason or ""
            words = reason.replace("_", " ").lower() or "no certificate and its key in PEM"
        raise config.ConfigError(
            [f"server.tls: {files.certificate} with {files.key}: {words}"]
        ) from error
    return context


def _no_passphrase(key: Path) -> NoReturn:
    # OpenSSL would ask on the terminal.
    problem = f"{key} is encrypted; write it without a passphrase (openssl pkey -in ... -out ...)"
    raise config.ConfigError([f"server.tls.key: {problem}"])


def raise_descriptor_limit() -> int:
    """Take as many descriptors as we may; how many of them connections can have.

    As many again may be accepted before the first of the old ones is closed for them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft == resource.RLIM_INFINITY:
        soft = DESCRIPTORS_MAX
    return max(soft - DESCRIPTORS_SPARE, soft // 2) // 2


def watch_descriptors(loop: asyncio.AbstractEventLoop) -> None:
    """Say it while there are none left: libuv closes what it accepts then, and tells nobody."""
    try:
        os.close(os.dup(2))
    except OSError as error:
        if error.errno == errno.EMFILE:
            log.error(
                "out of file descriptors: connections are closed unanswered; raise LimitNOFILE= "
                "of the service, or `ulimit -n`"
            )
    loop.call_later(DESCRIPTORS_LOOK_S, watch_descriptors, loop)


def leave(why: str) -> NoReturn:
    """End at once, without closing the file: that would write into the one that replaced it."""
    log.critical("stopped: %s", why)
    # A critical line was written at once.
    os._exit(1)


def report_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    # Its words may come from anywhere; where it was raised is enough to find it.
    at = {"at": trail_of(error)} if isinstance(error, BaseException) else {}
    log.error("unexpected", error=type(error).__name__, said=context.get("message"), **at)


def _report_failure(written: "asyncio.Future[None]") -> None:
    if not written.cancelled() and written.exception() is not None:
        log.error("reload: the names in the config could not be stored: %s", written.exception())
