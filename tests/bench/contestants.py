"""Starts what is measured, each as a process of its own on a fresh folder, and ends it."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.events import CUSTOMER, PATH, SECRET, WORKSPACE

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
#: Seconds for a server to start, and to stop.
PATIENCE_S = 60.0
#: Seconds between two looks whether it has started.
LOOK_S = 0.002
# Everyone's code is compiled before it is measured, as an installation leaves it, also where
# nothing may be written beside it.
COMPILED = {
    "PYTHONDONTWRITEBYTECODE": "",
    "PYTHONPYCACHEPREFIX": str(ROOT / ".bench" / "compiled"),
}

CONFIG = """
database = "{database}"

[server]
listen = "127.0.0.1:{port}"
admin = "127.0.0.1:{admin}"

[sources.stripe]
scheme = "stripe"
secrets = ["env:STRIPE"]
livemode = false
tolerance_s = 86400                      # the requests are signed before the run

[[rules]]
operation = "link-customer"
source = "stripe"
on = ["checkout.session.completed"]
link = {{ customer = "data.object.customer", workspace = "data.object.client_reference_id" }}

[[rules]]
operation = "initial-credit-grant"
source = "stripe"
on = ["invoice.paid", "invoice.payment_succeeded"]
when = {{ "data.object.amount_paid" = {{ gt = 0 }} }}
expect = {{ "data.object.status" = "paid", "data.object.currency" = ["usd", "eur"] }}
subject = "data.object.id"
customer = "data.object.customer"
grant = {{ unit = "credits", amount = 100 }}
"""

# adnanh/webhook: the same HMAC over the same text, then a program that does nothing.
HOOKS = [
    {
        "id": "stripe",
        "execute-command": "/bin/true",
        "response-message": "ok",
        "trigger-rule": {
            "match": {
                "type": "payload-hmac-sha256",
                "secret": SECRET,
                "parameter": {"source": "header", "name": "X-Signature"},
            }
        },
    }
]


@dataclass
class Running:
    """A contestant that takes requests; `admin` is the port that answers whether it is well."""

    name: str
    folder: Path
    port: int
    process: "subprocess.Popen[bytes]"
    start_ms: float
    admin: int | None = None
    path: str = PATH
    #: How many events its file has, where it keeps any.
    stored: Callable[[], int] | None = field(default=None, repr=False)

    @property
    def database(self) -> Path:
        return self.folder / "receiver.db"

    def cpu_s(self) -> float:
        """Seconds of processor time that it has used, user and system."""
        values = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")

    def resident_mib(self) -> float:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in text.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) / 1024


@contextlib.contextmanager
def ours(
    folder: Path, *, database: Path = Path("receiver.db"), slow_sync_us: int = 0
) -> Iterator[Running]:
    """Receiver itself, with one customer linked; full durability, log on."""
    port, admin = free_port(), free_port()
    text = CONFIG.format(port=port, admin=admin, database=database)
    (folder / "receiver.toml").write_text(text)
    words = [sys.executable, "-m", "cli"]
    with _started("ours", folder, port, [*words, "serve"], "/readyz", admin, slow_sync_us) as made:
        if not (folder / "linked").exists():
            link = ["links", "add", "stripe", CUSTOMER, WORKSPACE, "--reason", "benchmark"]
            subprocess.run(
                [*words, *link],
                cwd=folder,
                env=environment(),
                stdout=subprocess.DEVNULL,
                check=True,
            )
            (folder / "linked").touch()
        made.admin = admin
        yield made


@contextlib.contextmanager
def bare(folder: Path) -> Iterator[Running]:
    port = free_port()
    words = [sys.executable, "-m", "tests.bench.bare", str(port)]
    with _started("bare", folder, port, words, "/") as made:
        yield made


@contextlib.contextmanager
def tutorial(folder: Path, kind: str, *, slow_sync_us: int = 0) -> Iterator[Running]:
    """`kind` is naive or careful."""
    port = free_port()
    file = str(folder / "tutorial.db")
    words = [sys.executable, "-m", "tests.bench.tutorial", kind, file, str(port)]
    with _started(kind, folder, port, words, "/events", None, slow_sync_us) as made:
        made.stored = lambda: int(get(port, "/events")[1])
        yield made


@contextlib.contextmanager
def webhook(folder: Path) -> Iterator[Running]:
    port = free_port()
    (folder / "hooks.json").write_text(json.dumps(HOOKS))
    words = ["webhook", "-hooks", "hooks.json", "-ip", "127.0.0.1", "-port", str(port)]
    with _started("webhook", folder, port, [*words, "-urlprefix", "webhooks"], "/") as made:
        yield made


@contextlib.contextmanager
def _started(
    name: str,
    folder: Path,
    port: int,
    words: Sequence[str],
    ready: str,
    admin: int | None = None,
    slow_sync_us: int = 0,
) -> Iterator[Running]:
    began = time.perf_counter()
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment(slow_sync_us, folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        while not answers(admin or port, ready, strict=admin is not None):
            if process.poll() is not None or time.perf_counter() - began > PATIENCE_S:
                raise RuntimeError(f"{name} did not start: see {folder / name}.log")
            time.sleep(LOOK_S)
        yield Running(name, folder, port, process, (time.perf_counter() - began) * 1000)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def environment(slow_sync_us: int = 0, folder: Path | None = None) -> dict[str, str]:
    made = os.environ | {"STRIPE": SECRET, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"} | COMPILED
    made.pop("RECEIVER_CONFIG", None)
    if slow_sync_us and folder is not None:
        made |= {"LD_PRELOAD": str(slow_sync(folder.parent)), "SLOW_SYNC_US": str(slow_sync_us)}
    return made


def slow_sync(folder: Path) -> Path:
    """The library that makes each sync slower, compiled once."""
    library = folder / "slow_sync.so"
    if not library.exists():
        words = [
            "cc",
            "-shared",
            "-fPIC",
            "-O2",
            "-o",
            str(library),
            str(HERE / "slow_sync.c"),
            "-ldl",
        ]
        subprocess.run(words, check=True)
    return library


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def answers(port: int, path: str, *, strict: bool) -> bool:
    """Whether it takes requests; `strict`: and says 200."""
    try:
        return get(port, path)[0] == 200 or not strict
    except (OSError, http.client.HTTPException):
        return False
