"""Posts signed Stripe events, so many or until it is told to stop; prints what became of each."""

import argparse
import hashlib
import hmac
import http.client
import json
import signal
import threading
import time
from typing import Any


class Load:
    """Clients that each send one event after the other, on connections that are kept."""

    def __init__(self, port: int, secret: bytes, name: str, events: int, pause_s: float) -> None:
        self._port = port
        self._secret = secret
        self._name = name
        self._events = events
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.answered: list[str] = []
        self.statuses: dict[str, int] = {}
        self.refused = 0
        self.unanswered = 0
        self.longest_s = 0.0

    def run(self, clients: int) -> None:
        """Until SIGTERM or SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        threads = [threading.Thread(target=self._client, args=(one,)) for one in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self, number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        count = 0
        while not self._stop.wait(self._pause_s) and count != self._events:
            count += 1
            event = f"evt_{self._name}_{number}_{count}"
            started = time.monotonic()
            status = self._post(connection, event)
            with self._lock:
                self.longest_s = max(self.longest_s, time.monotonic() - started)
                self.statuses[status] = self.statuses.get(status, 0) + 1
                if status == "200":
                    self.answered.append(event)

    def _post(self, connection: http.client.HTTPConnection, event: str) -> str:
        body = json.dumps(event_of(event)).encode()
        at = int(time.time())
        signed = hmac.new(self._secret, b"%d.%s" % (at, body), hashlib.sha256).hexdigest()
        try:
            connection.request(
                "POST", "/webhooks/stripe", body, {"Stripe-Signature": f"t={at},v1={signed}"}
            )
            answer = connection.getresponse()
            answer.read()
        except ConnectionRefusedError:
            connection.close()
            self.refused += 1
            return "refused"
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            self.unanswered += 1
            return type(error).__name__
        return str(answer.status)


def event_of(event: str) -> dict[str, Any]:
    """A paid invoice of a customer whom the test has linked."""
    invoice = {
        "id": f"in_{event}",
        "object": "invoice",
        "customer": "cus_load",
        "status": "paid",
        "currency": "usd",
        "amount_paid": 500,
    }
    return {
        "id": event,
        "object": "event",
        "type": "invoice.paid",
        "livemode": False,
        "data": {"object": invoice},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--secret", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--events", type=int, default=-1, help="of each client; then it ends")
    parser.add_argument("--pause-s", type=float, default=0.0, help="of each client, between two")
    given = parser.parse_args()
    load = Load(given.port, given.secret.encode(), given.name, given.events, given.pause_s)
    load.run(given.clients)
    result = {
        "statuses": load.statuses,
        "refused": load.refused,
        "unanswered": load.unanswered,
        "longest_s": round(load.longest_s, 3),
        "answered": load.answered,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
