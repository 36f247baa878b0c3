"""A sender's API on this machine, which answers as Stripe documents, and fails when told."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.far_side import JOIN_S

KEY = "sk_test_of_the_tests"

Reply = tuple[int, dict[str, str], bytes]


class SenderApi(http.server.ThreadingHTTPServer):
    """What the sender has, by path; what was asked is in `asked`."""

    daemon_threads = True
    # Every thread of a worker may connect at once.
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []
        #: Instead of an object, while it is set; it is given the path.
        self.instead: Callable[[str], Reply | None] = lambda path: None
        #: Called with the path and what is about to be answered: it may wait.
        self.before_answer: Callable[[str, int], None] = lambda path, number: None
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    def put(self, path: str, **fields: Any) -> None:
        """The object that is there from now on."""
        self.objects[path] = {"id": path.rpartition("/")[2], "livemode": False} | fields

    def remove(self, path: str) -> None:
        del self.objects[path]

    def reply(self, path: str, headers: dict[str, str]) -> Reply:
        with self.lock:
            self.asked.append((path, headers))
            number = len(self.asked)
            # Read before it is held up: what a slow answer says is old when it arrives.
            found = self.instead(path) or self._found(path, headers)
        self.before_answer(path, number)
        return found

    def _found(self, path: str, headers: dict[str, str]) -> Reply:
        if headers.get("authorization") != f"Bearer {KEY}":
            return error(401, type="invalid_request_error", message="Invalid API Key provided")
        if path not in self.objects:
            name = path.rpartition("/")[2]
            code = "resource_missing"
            return error(404, code=code, message=f"No such thing: '{name}'", param="id")
        return (200, {}, json.dumps(self.objects[path]).encode())


def error(status: int, headers: dict[str, str] | None = None, **fields: str) -> Reply:
    """An error as Stripe words it."""
    return (status, headers or {}, json.dumps({"error": fields}).encode())


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body are written apart: the second would wait for the first to be acknowledged.
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.do_GET()

    def do_GET(self) -> None:
        api = self.server
        assert isinstance(api, SenderApi)
        sent = {name.lower(): value for name, value in self.headers.items()}
        sent["method"] = self.command
        status, headers, body = api.reply(self.path, sent)
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if "Content-Length" not in headers:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            # Whoever asked has gone.
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def sender_api(api: SenderApi | None = None) -> Iterator[SenderApi]:
    api = api or SenderApi()
    thread = threading.Thread(target=api.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield api
    finally:
        api.shutdown()
        thread.join(JOIN_S)
        api.server_close()
