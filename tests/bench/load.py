"""Load from tools that are not ours: wrk for closed loops, k6 for open ones, one lone client."""

import http.client
import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.bench.contestants import Running
from tests.bench.events import Delivery

HERE = Path(__file__).parent
#: Seconds that a load tool may take longer than it was told to.
GRACE_S = 60


class Shot(NamedTuple):
    """What one load did; latencies in milliseconds."""

    requests: int
    rate: float
    not_2xx: int
    broken: int
    p50: float
    p99: float
    worst: float


class Arrivals(NamedTuple):
    """An open loop: latencies in milliseconds, and what it could not send in time."""

    p50: float
    p99: float
    p999: float
    worst: float
    dropped: int
    failed: int


def wrk(target: Running, requests: Path, connections: int, seconds: float) -> Shot:
    """As many requests as answers allow, on so many connections."""
    words = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "--timeout", "30s"]
    url = f"http://127.0.0.1:{target.port}"
    script = ["-s", str(HERE / "replay.lua"), url, "--", str(requests)]
    done = subprocess.run(
        [*words, *script], capture_output=True, text=True, timeout=seconds + GRACE_S, check=True
    )
    figures = dict(re.findall(r"(\w+)=([\d.]+)", done.stdout.partition("figures ")[2]))
    count = int(figures["requests"])
    return Shot(
        requests=count,
        rate=count / float(figures["seconds"]),
        not_2xx=int(figures["not2xx"]),
        broken=int(figures["broken"]),
        p50=float(figures["p50"]),
        p99=float(figures["p99"]),
        worst=float(figures["max"]),
    )


def k6(target: Running, deliveries: Path, rate: int, seconds: int, summary: Path) -> Arrivals:
    """So many requests each second, whatever the answers take."""
    settings = {
        "DELIVERIES": deliveries,
        "RATE": rate,
        "SECONDS": seconds,
        "URL": f"http://127.0.0.1:{target.port}{target.path}",
    }
    words = ["k6", "run", "--quiet", "--no-usage-report", "--summary-export", str(summary)]
    given = [word for name, value in settings.items() for word in ("-e", f"{name}={value}")]
    subprocess.run(
        [*words, *given, str(HERE / "open_loop.js")],
        capture_output=True,
        timeout=seconds + GRACE_S,
        check=True,
    )
    metrics = json.loads(summary.read_text())["metrics"]
    took = metrics["http_req_duration"]
    return Arrivals(
        p50=took["med"],
        p99=took["p(99)"],
        p999=took["p(99.9)"],
        worst=took["max"],
        dropped=int(metrics.get("dropped_iterations", {}).get("count", 0)),
        failed=int(metrics["http_req_failed"]["passes"]),
    )


def lone(target: Running, deliveries: Sequence[Delivery]) -> list[float]:
    """Milliseconds of each delivery, one after the other on one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=GRACE_S)
    took = []
    for signature, body in deliveries:
        headers = {"Content-Type": "application/json", "Stripe-Signature": signature}
        began = time.perf_counter()
        connection.request("POST", target.path, body, headers)
        answer = connection.getresponse()
        answer.read()
        took.append((time.perf_counter() - began) * 1000)
        assert answer.status == 200, answer.status
    connection.close()
    return took


@contextmanager
def asked_meanwhile(port: int, path: str) -> Iterator[list[float]]:
    """Milliseconds that each look at a path took, about 200 a second, while the body runs."""
    took: list[float] = []
    over = threading.Event()

    def ask() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GRACE_S)
        while not over.wait(0.005):
            began = time.perf_counter()
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
            took.append((time.perf_counter() - began) * 1000)
            assert answer.status == 200, answer.status
        connection.close()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield took
    finally:
        over.set()
        thread.join()
