"""All kinds of attack at once on a real server, by raw sockets, and an honest sender beside it."""

import contextlib
import functools
import gzip
import itertools
import json
import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, Envelope, Session

from receiver.http import PIPELINE_MAX
from store import rejections
from tests.far_side import Far, serving, unused_port
from tests.far_side import request as read_request
from tests.proof.inputs import ATTACKS, BODIES, MAIL
from tests.sender_api import sender_api
from tests.service import (
    Service,
    by_stripe,
    checkout,
    delivery,
    invoice,
    services,
    stripe_request,
    until,
    word,
)
from tests.test_app import request
from tests.test_hostile import KINDS, strange_header_bytes, tampered, wrong_signature
from tests.test_http import is_readable

#: What the server may use at most, and how long an honest delivery may take on a busy machine.
PEAK_BYTES_MAX, ANSWER_S_MAX = 128 * 1024 * 1024, 5.0
ATTACKERS = 6
#: Connections that wait between requests, and those that stop within one: its start, how many.
IDLE = 1_500
STALLED = (
    (b"POST /webhooks/github HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n" + bytes(900_000), 50),
    (b"POST /webhooks/github HTTP/1.1\r\nX-Slow: ", 100),
    (b"POST /webhooks/github HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab", 100),
    (b"", 100),
)
CHUNKED = b"POST /webhooks/stripe HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
#: What goes on without an end, how it goes on, and what the last answer to it may be.
#: Of many requests at once the last answer may be lost, as the connection is closed.
FLOODS = (
    (b"POST /webhooks/stripe HTTP/1.1\r\n", b"X-%d: y\r\n" * 900, (431,)),
    (b"POST /webhooks/stripe HTTP/1.1\r\nX-A: ", b"a" * 8_000, (431,)),
    (b"GET /", b"a" * 8_000, (414,)),
    (CHUNKED, b"1\r\na\r\n" * 800, (413,)),
    (CHUNKED + b"1;", b"a" * 8_000, (431,)),
    (CHUNKED + b"0\r\nX-A: ", b"a" * 8_000, (431,)),
    (b"", b"\r\n" * 4_000, (431,)),
    (b"GET /x HTTP/1.1\r\n\r\n" * 60, b"GET /x HTTP/1.1\r\n\r\n", (400, 404)),
)
#: How often it goes on at most.
PIECES = 500
#: Seconds between two looks at what goes on.
STEP_S = 0.1
#: Seconds between two honest deliveries.
HONEST_S = 0.02
PATIENCE_S = 30.0
MIB = 1024 * 1024

CONFIG = """
[sources.stripe]
scheme = "stripe"
secrets = ["env:STRIPE"]
livemode = false
api = { key = "file:api.key", base_url = "API" }
[sources.github]
scheme = "github"
secrets = ["env:GITHUB"]
[sources.zipped]
scheme = "github"
secrets = ["env:GITHUB"]
gzip = true
[sources.fenced]
scheme = "github"
secrets = ["env:GITHUB"]
allow_ips = ["192.0.2.0/24"]
[sources.shopify]
scheme = "shopify"
secrets = ["env:SHOPIFY"]
[sources.standard]
scheme = "standard-webhooks"
secrets = ["env:STANDARD"]
[sources.gitea]
scheme = "gitea"
secrets = ["env:GITHUB"]
[sources.mailgun]
scheme = "mailgun"
secrets = ["env:GITHUB"]
[sources.twilio]
scheme = "twilio"
secrets = ["env:GITHUB"]
[destinations.api]
kind = "http"
url = "http://127.0.0.1:HTTP/"
headers = { "X-Text" = "{data.object.text}" }
json = { whole = "{data.object}", flat = "{data.object.items[].a[].b | [?x > `1`]}" }
[destinations.mail]
kind = "email"
smtp = "smtp://127.0.0.1:SMTP"
from = "us@example.com"
to = "{data.object.mail}"
subject = "{data.object.text}"
text = "{data.object}"
[[rules]]
operation = "link-customer"
source = "stripe"
on = ["checkout.session.completed"]
link = { customer = "data.object.customer", workspace = "data.object.client_reference_id" }
[[rules]]
operation = "initial-credit-grant"
source = "stripe"
on = ["invoice.paid"]
subject = "data.object.id"
customer = "data.object.customer"
grant = { unit = "credits", amount = 100 }
[[rules]]
operation = "tell"
source = "stripe"
on = ["attack"]
subject = "data.object.id"
record = { kind = "attack", data = { n = "{length(data.object.items || `[]`)}" } }
send = [{ to = "api" }, { to = "mail" }]
[[rules]]
operation = "subscription-state"
source = "stripe"
on = ["customer.subscription.updated"]
project.kind = "subscription"
project.id = "data.object.id"
project.state = "status"
project.fields = { plan = "{plan}" }
project.terminal = ["canceled"]
"""

SOURCES = re.findall(r"\[sources\.(\w+)\]", CONFIG)

#: Those of test_hostile that do not count on its limit of a body.
ASKED = tuple(kind for kind in KINDS if not re.search("large|broken_gzip", kind.__name__))

#: What a destination and the API answer: 20 MB of nothing in 20 KB, and a long body.
BOMB = gzip.compress(bytes(20 * MIB))
_FROM_FAR = (
    b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BOMB) + BOMB,
    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (4 * MIB) + bytes(4 * MIB),
    b"HTTP/1.1 500 X\r\nRetry-After: 99999999999\r\nContent-Length: 0\r\n\r\n",
)


class Weathered(NamedTuple):
    """What came of it; `faults` in words."""

    answers: int
    honest: int
    worst_s: float
    peak_bytes: int
    faults: list[str]


class Mailbox:
    """Takes all mail."""

    def __init__(self) -> None:
        self.taken: list[tuple[list[str], bytes]] = []

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:
        content = envelope.original_content or b""
        self.taken.append((list(envelope.rcpt_tos), content))
        return "250 taken"


def weather(
    folder: Path,
    seed: int,
    seconds: float,
    sources: int,
    advance: Callable[[int], None] = lambda done: None,
    *,
    idle: int = IDLE,
) -> Weathered:
    """Attack for so long, and until as many sources that do not exist were asked for."""
    with contextlib.ExitStack() as stack:
        far = stack.enter_context(serving(_answer_badly))
        api = stack.enter_context(sender_api())
        api.instead = lambda path: (200, {"Content-Encoding": "gzip"}, BOMB)
        mailbox, port = Mailbox(), unused_port()
        controller = Controller(mailbox, hostname="127.0.0.1", port=port)
        controller.start()
        stack.callback(controller.stop)
        (folder / "api.key").write_text("sk_test_of_the_tests")
        text = CONFIG.replace("API", api.url).replace(":HTTP", f":{far.port}")
        service = stack.enter_context(services(folder))(text.replace(":SMTP", f":{port}"))
        storm = Storm(service, seed, sources, idle)
        storm.blow(seconds, advance)
        with contextlib.suppress(AssertionError):
            until(lambda: bool(mailbox.taken and far.requests))
        peak_bytes = service.peak_bytes()
        faults = storm.faults + _left_behind(service, len(storm.took))
        faults += _badly_sent(far, mailbox)
        if peak_bytes > PEAK_BYTES_MAX:
            faults.append(f"the server used {peak_bytes / MIB:.0f} MiB")
        if max(storm.took) > ANSWER_S_MAX:
            faults.append(f"an honest delivery took {max(storm.took):.1f} s")
        answers = sum(storm.statuses.values())
        return Weathered(answers, len(storm.took), max(storm.took), peak_bytes, faults)


def _answer_badly(far: Far, connection: socket.socket) -> None:
    while text := read_request(connection):
        far.requests.append(text)
        connection.sendall(_FROM_FAR[len(far.requests) % len(_FROM_FAR)])


class Storm:
    """Attackers on threads, each with chances of its own."""

    def __init__(self, service: Service, seed: int, sources: int, idle: int) -> None:
        self.service = service
        self.seed = seed
        self.sources = sources
        self.idle = idle
        self.statuses: Counter[int] = Counter()
        self.took: list[float] = []
        self.faults: list[str] = []
        self._held: dict[bytes, list[socket.socket]] = {start: [] for start, _ in STALLED}
        self._over = threading.Event()
        self._lock = threading.Lock()

    def blow(self, seconds: float, advance: Callable[[int], None]) -> None:
        runs = [self._honest, self._unknown_sources, self._stall]
        runs += [functools.partial(self._attack, number) for number in range(ATTACKERS)]
        threads = [threading.Thread(target=self._noted, args=(run,)) for run in runs]
        for thread in threads:
            thread.start()
        began = time.monotonic()
        while (passed := time.monotonic() - began) < seconds or threads[1].is_alive():
            time.sleep(STEP_S)
            advance(int(passed))
        self._over.set()
        for thread in threads:
            thread.join()

    def _noted(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:
            self._fault(f"{type(error).__name__}: {error}")

    def _fault(self, words: str) -> None:
        with self._lock:
            if len(self.faults) < 20:
                self.faults.append(f"seed {self.seed}: {words[:600]}")

    def _stall(self) -> None:
        """Connections that go no further; each is opened again when it is cut off."""
        with contextlib.ExitStack() as stack:
            for _ in range(self.idle):
                idle = stack.enter_context(self._connect())
                idle.sendall(b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n")
            while not self._over.wait(STEP_S):
                for start, count in STALLED:
                    # One at a time, lest it is a test of the machine's loopback.
                    if len(self._held[start]) < count:
                        self._held[start].append(stack.enter_context(self._connect()))
                        with contextlib.suppress(OSError):
                            self._held[start][-1].sendall(start)
                    for cut_off in [one for one in self._held[start] if is_readable(one)]:
                        cut_off.close()
                        self._held[start].remove(cut_off)

    def _connect(self) -> socket.socket:
        return socket.create_connection(self.service.public.getsockname(), PATIENCE_S)

    def _honest(self) -> None:
        with self.service.wire() as wire:
            assert word(wire.ask(stripe_request(checkout("evt_link")))) == "done"
            for number in itertools.count():
                if self._over.wait(HONEST_S):
                    return
                text = stripe_request(invoice(f"evt_h{number}", f"in_h{number}"))
                started = time.monotonic()
                answer = wire.ask(text)
                self.took.append(time.monotonic() - started)
                if (answer.status, word(answer)) != (200, "done"):
                    self._fault(f"an honest delivery was answered {answer}")

    def _unknown_sources(self) -> None:
        for first in range(0, self.sources, 10):
            paths = [f"/webhooks/none-{first + number}" for number in range(10)]
            with self.service.wire() as wire:
                wire.send(b"".join(request("POST", path, b"{}", []) for path in paths))
                # Closed before, the connection would end with the answer under way.
                statuses = [wire.answer().status for _ in paths]
            with self._lock:
                self.statuses.update(statuses)
            if {*statuses} != {404}:
                self._fault(f"{statuses} for sources that do not exist")

    def _attack(self, number: int) -> None:
        chance = random.Random(f"{self.seed} {number}")
        kinds = (self._smuggle, self._flood, self._inside, self._ask, self._large, self._mutate)
        while not self._over.is_set():
            chance.choice(kinds)(chance)

    def _say(self, made: socket.socket, text: bytes, why: str = "") -> list[int]:
        """Send all of it and nothing more; the statuses that come back."""
        with contextlib.suppress(OSError):
            made.sendall(text)
            made.shutdown(socket.SHUT_WR)
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while more := made.recv(65_536):
                said += more
        return self._count(said, why or repr(text[:300]))

    def _count(self, said: bytes, why: str) -> list[int]:
        statuses = [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3}) ", said)]
        with self._lock:
            self.statuses.update(statuses)
        for status in statuses:
            if status >= 500:
                self._fault(f"{status} for {why}")
        return statuses

    def _smuggle(self, chance: random.Random) -> None:
        """A request whose length may be read in two ways, with another one hidden behind it."""
        head, right = chance.choice(ATTACKS)
        hidden = b"GET /hidden HTTP/1.1\r\nHost: h\r\n\r\n"
        with contextlib.closing(self._connect()) as made:
            statuses = self._say(made, head + hidden)
        if len(statuses) > 1 or not {*statuses} <= {*right}:
            self._fault(f"{statuses} for {head!r}")

    def _flood(self, chance: random.Random) -> None:
        """What has no end: it is answered nevertheless, and the connection closed."""
        start, piece, right = chance.choice(FLOODS)
        with self.service.wire() as wire:
            wire.send(start)
            said = wire.drip(itertools.repeat(piece, PIECES))
        statuses = self._count(said, repr(start[:100]))
        if not 0 < len(statuses) <= PIPELINE_MAX + 2 or statuses[-1] not in right:
            self._fault(f"{statuses} for {start[:100]!r} without an end")

    def _inside(self, chance: random.Random) -> None:
        """What a sender signed, and nobody should send."""
        body = chance.choice(BODIES)(chance)
        assert len(body) <= MIB
        with contextlib.closing(self._connect()) as made:
            statuses = self._say(made, delivery("stripe", body, by_stripe(body)))
        if statuses != [200]:
            self._fault(f"{statuses} for a signed {body[:200]!r}")

    def _ask(self, chance: random.Random) -> None:
        """One of the requests that test_hostile knows the right answer to."""
        kind = chance.choice(ASKED)
        text, right = kind(chance)
        with contextlib.closing(self._connect()) as made:
            statuses = self._say(made, text)
        # Garbage may happen to hold several.
        if not statuses or statuses[0] not in right:
            self._fault(f"{statuses} for {kind.__name__}: {text[:200]!r}")

    def _large(self, chance: random.Random) -> None:
        """As much as a body may have, of what is dear to look into."""
        piece = chance.choice([b"%41", b"%", b"&", b"a=b&", b"[", b'{"a":', b'"\\ud800",', b"+"])
        source = chance.choice(["mailgun", "gitea", "twilio", "stripe", "standard", "shopify"])
        body = chance.choice([b"", b"payload=", b"signature="]) + piece * (MIB // len(piece) - 9)
        headers = [("X-Gitea-Signature", "00"), ("X-Twilio-Signature", "00")]
        with contextlib.closing(self._connect()) as made:
            statuses = self._say(made, delivery(source, body, headers))
        if statuses != [401 if len(body) <= MIB else 413]:
            self._fault(f"{statuses} for {len(body)} bytes of {piece!r} to {source}")

    def _mutate(self, chance: random.Random) -> None:
        """Good requests, changed at random, in one piece or in several."""
        makers = (wrong_signature, tampered, strange_header_bytes)
        text = bytearray(chance.choice(makers)(chance)[0])
        for _ in range(chance.randrange(1, 8)):
            at = chance.randrange(len(text))
            piece = chance.choice([b"\n", b"\r", b"\0", b" ", b"\xff", b":", b"\r\n\r\n", b""])
            text[at : at + chance.randrange(3)] = piece
        with contextlib.closing(self._connect()) as made:
            self._say(made, bytes(text))


def _left_behind(service: Service, honest: int) -> list[str]:
    """What is wrong with what was stored and logged."""
    wrong = []
    kept = service.value("select count(*) from receiver_rejected")
    if kept > 2 * rejections.KEPT_IN_ALL_MAX:
        wrong.append(f"{kept} requests are kept")
    counted = {one for (one,) in service.rows("select distinct source from receiver_rejections")}
    if strange := counted - {"", *SOURCES}:
        wrong.append(f"{len(strange)} sources are counted that do not exist")
    if service.health("/readyz") != 200 or service.stop() != 0:
        wrong.append("the server is not well")
    bad = [line for line in service.log.splitlines() if "Traceback" in line or " ERROR " in line]
    wrong += [f"logged: {line[:300]}" for line in bad[:3]]
    granted = service.value("select count(*) from receiver_ledger")
    if granted != honest:
        wrong.append(f"{honest} invoices were answered, and {granted} granted")
    return wrong


def _badly_sent(far: Far, mailbox: Mailbox) -> list[str]:
    wrong = []
    if not mailbox.taken or not far.requests:
        wrong.append(f"{len(mailbox.taken)} mails and {len(far.requests)} requests were sent")
    for recipients, content in mailbox.taken:
        head = content.partition(b"\r\n\r\n")[0]
        if recipients != [MAIL] or b"\nBcc" in head or b"\nX-Evil" in head:
            wrong.append(f"mailed to {recipients}: {head!r}")
    for text in far.requests:
        head, _, body = text.partition(b"\r\n\r\n")
        if b"\nX-Evil" in head or "whole" not in json.loads(body):
            wrong.append(f"posted: {head!r}")
    return wrong
