"""Programs that deliver webhooks by themselves, and payloads that others collected."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sdks.node import Node
from tests.service import SECRETS, STRIPE_CONFIG, Service, services, until

GITHUB_CONFIG = """
[sources.github]
scheme = "github"
secrets = ["env:GITHUB"]

[[rules]]
operation = "note"
source = "github"
on = ["*"]
record = { kind = "delivery", data = { body = "{_event.id}" } }
"""


class LocalStripe:
    """localstripe, a Stripe on this machine that delivers its own signed webhooks."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.base = f"http://127.0.0.1:{port}"
        with (folder / "localstripe.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "localstripe", "--port", str(port), "--from-scratch"],
                cwd=folder,
                env=os.environ | {"HOME": str(folder), "TMPDIR": str(folder)},
                stdout=log,
                stderr=log,
            )

    def is_up(self) -> bool:
        try:
            self.call("GET", "/v1/customers")
        except OSError:
            return False
        return True

    def call(self, method: str, path: str, **given: str) -> Any:
        data = urllib.parse.urlencode(given).encode() if given else None
        request = urllib.request.Request(self.base + path, data, method=method)
        request.add_header("Authorization", "Bearer sk_test_12345")
        with urllib.request.urlopen(request, timeout=20) as answer:
            text = answer.read()
        return json.loads(text) if text.strip().startswith(b"{") else text

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)


@pytest.fixture
def local_stripe(tmp_path: Path) -> Iterator[LocalStripe]:
    running = LocalStripe(tmp_path)
    try:
        until(running.is_up)
        yield running
    finally:
        running.close()


def test_localstripe_delivers_and_each_invoice_is_granted_once(
    tmp_path: Path, local_stripe: LocalStripe
) -> None:
    with services(tmp_path) as start:
        service = start(STRIPE_CONFIG)
        host, port = service.public.getsockname()
        url = f"http://{host}:{port}/webhooks/stripe"
        local_stripe.call("POST", "/_config/webhooks/one", url=url, secret=SECRETS["STRIPE"])

        plan = {"id": "basic", "amount": "2000", "currency": "usd", "interval": "month"}
        local_stripe.call("POST", "/v1/plans", **plan, **{"product[name]": "Basic"})

        invoices = [paid_invoice(service, local_stripe) for _ in range(3)]

        def granted() -> list[str]:
            rows = service.rows("select subject from receiver_ledger order by created_ms")
            return [subject for (subject,) in rows]

        until(lambda: len(granted()) == len(invoices))
        # Once more, as a sender does that saw no answer.
        local_stripe.call("POST", "/_config/webhooks/two", url=url, secret=SECRETS["STRIPE"])
        invoices.append(paid_invoice(service, local_stripe))
        until(lambda: service.value("select sum(duplicates) from receiver_events") >= 2)

        until(lambda: len(granted()) == len(invoices))
        assert sorted(granted()) == sorted(invoices)
        kinds = "select distinct type from receiver_events"
        assert {"customer.created", "invoice.payment_succeeded"} <= {
            kind for (kind,) in service.rows(kinds)
        }
        assert service.value("select count(*) from receiver_conflicts") == 0
        service.assert_books_balance()


def paid_invoice(service: Service, stripe: LocalStripe) -> str:
    """A new customer, linked here, who subscribes and pays; the id of the invoice."""
    customer = stripe.call("POST", "/v1/customers", email="a@example.com")["id"]
    linked = service.command("links", "add", "stripe", customer, f"w-{customer}")
    assert linked.returncode == 0, linked.stderr
    card = {
        "source[object]": "card",
        "source[number]": "4242424242424242",
        "source[exp_month]": "12",
        "source[exp_year]": str(time.gmtime().tm_year + 2),
        "source[cvc]": "123",
    }
    stripe.call("POST", f"/v1/customers/{customer}/sources", **card)
    subscription = {"customer": customer, "items[0][plan]": "basic"}
    invoice = stripe.call("POST", "/v1/subscriptions", **subscription)["latest_invoice"]
    assert stripe.call("GET", f"/v1/invoices/{invoice}")["status"] == "paid"
    return str(invoice)


def test_every_payload_example_of_github_is_taken_as_json_and_as_a_form(
    tmp_path: Path, node: Node
) -> None:
    secret = SECRETS["GITHUB"]
    examples = [
        (event["name"], json.dumps(payload))
        for event in node("octokitExamples")
        for payload in event["examples"]
    ]
    assert len(examples) > 300

    with services(tmp_path) as start:
        service = start(GITHUB_CONFIG)
        for number, (event, text) in enumerate(examples):
            as_form = urllib.parse.urlencode({"payload": text})
            for kind, body in (("json", text), ("x-www-form-urlencoded", as_form)):
                signature = node("octokitSign", secret=secret, body=body)
                answer = service.post(
                    "github",
                    body.encode(),
                    [
                        ("Content-Type", f"application/{kind}"),
                        ("X-GitHub-Event", event),
                        ("X-GitHub-Delivery", f"{kind}-{number}"),
                        ("X-Hub-Signature-256", signature),
                    ],
                )
                # A ping is a handshake: it is answered and leaves no event.
                word = b"ignored" if event == "ping" else b"done"
                assert (answer.status, answer.body.strip()) == (200, word), (event, kind)
        states = dict(service.rows("select state, count(*) from receiver_events group by 1"))

    pings = [event for event, _ in examples if event == "ping"]
    assert pings
    assert states == {"done": 2 * (len(examples) - len(pings))}
