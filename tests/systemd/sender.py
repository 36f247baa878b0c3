"""A sender's API with one event that was never delivered, and a place to ping: PORT LOG."""

import http.server
import json
import sys
import time

port, log = sys.argv[1:]
INVOICE = {
    "id": "in_never_came",
    "object": "invoice",
    "customer": "cus_load",
    "status": "paid",
    "currency": "usd",
    "amount_paid": 500,
}
EVENT = {
    "id": "evt_never_came",
    "object": "event",
    "type": "invoice.paid",
    "livemode": False,
    "created": int(time.time()) - 3600,
    "data": {"object": INVOICE},
}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = [EVENT] if self.path.startswith("/v1/events?") else []
        body = json.dumps({"object": "list", "data": found, "has_more": False}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        with open(log, "a") as file:
            print(self.path, file=file)

    def log_message(self, *_: object) -> None:
        pass


http.server.HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
