"""A real `receiver serve` on a real file, with senders that sign as the real ones do."""

import base64
import contextlib
import hmac
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from store.database import snapshot
from tests import canary
from tests.test_app import Headers, request
from tests.test_http import Reply, Wire

ROOT = Path(__file__).parents[1]
#: Seconds after which a test gives up; nothing waits for it to pass.
PATIENCE_S = 60.0
#: The same for a command, which may have thousands of events to apply.
COMMAND_S = 60.0
#: Seconds between two looks at a condition.
LOOK_S = 0.005
#: Connections that wait while no server runs.
BACKLOG = 512

SECRETS = {
    "STRIPE": "whsec_of_the_tests",
    "STRIPE_TWO": "whsec_of_the_connect_endpoint",
    "STRIPE_THREE": "whsec_of_the_thin_endpoint",
    "GITHUB": "of the hook",
    "SHOPIFY": "shpss_of_the_app",
    "STANDARD": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
}

# Links and grants of one Stripe account: what most of these tests need.
STRIPE_CONFIG = """
[sources.stripe]
scheme = "stripe"
secrets = ["env:STRIPE"]
livemode = false

[[rules]]
operation = "link-customer"
source = "stripe"
on = ["checkout.session.completed"]
link = { customer = "data.object.customer", workspace = "data.object.client_reference_id" }

[[rules]]
operation = "initial-credit-grant"
source = "stripe"
on = ["invoice.paid", "invoice.payment_succeeded"]
subject = "data.object.id"
customer = "data.object.customer"
grant = { unit = "credits", amount = 100 }
"""

#: Runs what follows so that it ends when we do, however that is: prctl(2), PR_SET_PDEATHSIG.
WITH_US = ("setpriv", "--pdeathsig", "KILL")

# The shell becomes the server, so its id is the one that the sockets are meant for; they come as
# its standard input and output and go where a service manager puts them. sd_listen_fds(3)
_HAND_OVER = 'export LISTEN_PID=$$; exec "$@" 3<&0 4<&1 </dev/null >&2'


class Service:
    """One folder with its config, and the server on it.

    The listening sockets stay open here: while no server runs, connections wait.
    """

    def __init__(self, folder: Path, config: str, handlers: str) -> None:
        self.folder = folder
        self.database = folder / "receiver.db"
        self.public = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self.admin = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self._server: subprocess.Popen[bytes] | None = None
        (folder / "receiver.toml").write_text(config)
        (folder / "handlers.py").write_text(handlers)

    def start(self, *, wait: bool = True) -> None:
        """Start the server; `wait` until it can commit."""
        with (self.folder / "server.log").open("ab") as log:
            self._server = subprocess.Popen(
                [*WITH_US, "/bin/sh", "-c", _HAND_OVER, "sh", *self._command("serve")],
                stdin=self.public.fileno(),
                stdout=self.admin.fileno(),
                stderr=log,
                cwd=self.folder,
                env=environment(SECRETS) | {"LISTEN_FDS": "2", "LISTEN_FDNAMES": "public:admin"},
            )
        if wait:
            until(lambda: self.health("/readyz") == 200)

    def kill(self) -> None:
        """As `kill -9` does."""
        assert self._server is not None, "a server runs"
        self._server.kill()
        self._server.wait()

    def stop(self) -> int:
        """Let it finish; its exit code."""
        assert self._server is not None, "a server runs"
        self._server.terminate()
        return self._server.wait(PATIENCE_S)

    def reload(self) -> None:
        """As `systemctl reload` does."""
        assert self._server is not None, "a server runs"
        self._server.send_signal(signal.SIGHUP)

    def ended(self) -> int:
        """The exit code of a server that ends by itself."""
        assert self._server is not None, "a server runs"
        return self._server.wait(PATIENCE_S)

    def has_ended(self) -> bool:
        """Whether no server runs."""
        return self._server is None or self._server.poll() is not None

    @property
    def pid(self) -> int:
        assert self._server is not None, "a server runs"
        return self._server.pid

    def close(self) -> None:
        if self._server is not None and self._server.poll() is None:
            self.kill()
        self.public.close()
        self.admin.close()

    def wire(self) -> Wire:
        """A new connection."""
        wire = Wire(self.public.getsockname())
        wire.socket.settimeout(PATIENCE_S)
        return wire

    def post(self, source: str, body: bytes, headers: Headers) -> Reply:
        """One delivery on a connection of its own."""
        with self.wire() as wire:
            return wire.ask(delivery(source, body, headers))

    def deliver(self, body: bytes) -> str:
        """Send a signed event of Stripe's that must be taken; the answer's word."""
        answer = self.post("stripe", body, by_stripe(body))
        assert answer.status == 200, answer
        return word(answer)

    def health(self, path: str) -> int:
        """The status of a health check; 0 while there is nobody to answer it."""
        with contextlib.closing(self.admin_connection()) as connection:
            try:
                connection.request("GET", path)
                return connection.getresponse().status
            except (OSError, http.client.HTTPException):
                return 0

    def admin_connection(self) -> http.client.HTTPConnection:
        host, port = self.admin.getsockname()
        return http.client.HTTPConnection(host, port, timeout=PATIENCE_S)

    def rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """What another process reads in the file now."""
        with snapshot(self.database) as seen:
            return list(seen.db.execute(statement, values))

    def value(self, statement: str, *values: object) -> Any:
        """The one value that a query gives."""
        ((found,),) = self.rows(statement, *values)
        return found

    @property
    def log(self) -> str:
        return (self.folder / "server.log").read_text(errors="replace")

    def command(
        self, *arguments: str, timeout_s: float = COMMAND_S
    ) -> "subprocess.CompletedProcess[str]":
        """Run `receiver` as the operator does, in a process of its own, beside the server."""
        return subprocess.run(
            self._command(*arguments),
            cwd=self.folder,
            env=environment(SECRETS),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def resident_bytes(self) -> int:
        """Memory that the server has in use."""
        return self._memory_bytes("VmRSS")

    def peak_bytes(self) -> int:
        """The most that it ever had in use."""
        return self._memory_bytes("VmHWM")

    def _memory_bytes(self, name: str) -> int:
        assert self._server is not None, "a server runs"
        text = Path(f"/proc/{self._server.pid}/status").read_text()
        return int(re.findall(rf"{name}:\s+(\d+) kB", text)[0]) * 1024

    def assert_books_balance(self) -> None:
        """Every balance is the sum of its entries, and the file is whole."""
        sums = "select workspace, unit, sum(amount) from receiver_ledger group by 1, 2 order by 1"
        kept = "select workspace, unit, balance from receiver_balances order by 1"
        assert self.rows(kept) == self.rows(sums)
        assert self.rows("pragma integrity_check") == [("ok",)]

    def _command(self, *arguments: str) -> list[str]:
        config = str(self.folder / "receiver.toml")
        return [sys.executable, "-P", "-m", "cli", *arguments, "--config", config]


def environment(secrets: Mapping[str, str]) -> dict[str, str]:
    """Of a process of ours that nobody else started."""
    ours = {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    # A test run under a service manager is not what that manager started.
    foreign = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "JOURNAL_STREAM")
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    return kept | dict(secrets) | ours


Start = Callable[..., Service]


@contextlib.contextmanager
def services(folder: Path) -> Iterator[Start]:
    """Starts servers in this folder, one after the other; none is left at the end."""
    made: list[Service] = []

    def start(config: str = STRIPE_CONFIG, handlers: str = "", *, serve: bool = True) -> Service:
        made.append(Service(folder, config, handlers))
        if serve:
            made[-1].start()
        return made[-1]

    try:
        yield start
    finally:
        for each in made:
            each.close()


def until(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(LOOK_S)


def cpu_s(pid: int) -> float:
    """CPU time that a process has used so far, proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def word(answer: Reply) -> str:
    return answer.body.decode().strip()


def delivery(source: str, body: bytes, headers: Headers) -> bytes:
    """A request, whole."""
    return request("POST", f"/webhooks/{source}", body, headers)


class Crowd:
    """As many open connections, whose requests all become complete at the same moment."""

    def __init__(self, service: Service, size: int) -> None:
        self._wires = [service.wire() for _ in range(size)]
        for wire in self._wires:
            # Otherwise the last byte waits until the server's machine has confirmed the others.
            wire.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, requests: Sequence[bytes]) -> list[Reply]:
        wires = self._wires[: len(requests)]
        for wire, each in zip(wires, requests, strict=True):
            wire.send(each[:-1])
        for wire, each in zip(wires, requests, strict=True):
            wire.send(each[-1:])
        return [wire.answer() for wire in wires]

    def __enter__(self) -> "Crowd":
        return self

    def __exit__(self, *_: object) -> None:
        for wire in self._wires:
            wire.socket.close()


@contextlib.contextmanager
def held_lock(database: Path) -> Iterator[None]:
    """Another process's write transaction."""
    program = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], timeout=5, isolation_level=None)
db.execute("begin immediate")
print("held", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(database)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield
        holder.terminate()


# The senders. Their signatures are made here from their documentation alone, so that a mistake in
# our signer can't hide the same one in our verifier.


def by_stripe(body: bytes, *, secret: str = "STRIPE", at_s: int | str | None = None) -> Headers:
    """docs.stripe.com/webhooks: `t` and the HMAC of `t.body`."""
    at = str(int(time.time()) if at_s is None else at_s)
    return [("Stripe-Signature", f"t={at},v1={stripe_mac(body, at, secret)}")]


def stripe_mac(body: bytes, at: str, secret: str = "STRIPE") -> str:
    return _mac(secret, at.encode() + b"." + body).hex()


def by_github(body: bytes, delivery_id: str, event: str = "push") -> Headers:
    """docs.github.com, "Validating webhook deliveries"."""
    return [
        ("X-GitHub-Delivery", delivery_id),
        ("X-GitHub-Event", event),
        ("X-Hub-Signature-256", f"sha256={_mac('GITHUB', body).hex()}"),
    ]


def by_shopify(
    body: bytes, event_id: str, *, topic: str = "orders/paid", webhook_id: str = "w-1"
) -> Headers:
    """shopify.dev, "Verify webhooks": a base64 HMAC, and headers that nobody signs."""
    return [
        ("X-Shopify-Topic", topic),
        ("X-Shopify-Event-Id", event_id),
        ("X-Shopify-Webhook-Id", webhook_id),
        ("X-Shopify-Shop-Domain", "one.myshopify.com"),
        ("X-Shopify-Hmac-Sha256", base64.b64encode(_mac("SHOPIFY", body)).decode()),
    ]


def by_standard_webhooks(body: bytes, message_id: str, items: str = "v1,GOOD") -> Headers:
    """The Standard Webhooks specification 1.0.0; GOOD in `items` becomes the signature."""
    at = str(int(time.time()))
    key = base64.b64decode(SECRETS["STANDARD"].removeprefix("whsec_"))
    content = f"{message_id}.{at}.".encode() + body
    mac = base64.b64encode(hmac.digest(key, content, "sha256")).decode()
    return [
        ("webhook-id", message_id),
        ("webhook-timestamp", at),
        ("webhook-signature", items.replace("GOOD", mac)),
    ]


def _mac(secret: str, content: bytes) -> bytes:
    return hmac.digest(SECRETS[secret].encode(), content, "sha256")


def event(event_id: str, type: str, *, envelope: object = (), **of: Any) -> bytes:
    """A Stripe event about an object with these fields."""
    whole = {
        "id": event_id,
        "object": "event",
        "type": type,
        "livemode": False,
        "pending_webhooks": 1,
        "note": canary.PAYLOAD,
        "data": {"object": of},
    }
    return json.dumps(whole | dict(envelope)).encode()  # type: ignore[call-overload]


def invoice(event_id: str, invoice_id: str, customer: str = "cus_1", **of: Any) -> bytes:
    """A paid invoice."""
    return event(event_id, "invoice.paid", id=invoice_id, customer=customer, **of)


def checkout(event_id: str, customer: str = "cus_1", workspace: str = "acme") -> bytes:
    """The event that links a customer to a workspace."""
    return event(
        event_id,
        "checkout.session.completed",
        customer=customer,
        client_reference_id=workspace,
    )


def stripe_request(body: bytes) -> bytes:
    """A signed delivery of Stripe's, whole."""
    return delivery("stripe", body, by_stripe(body))
