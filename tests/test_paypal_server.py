"""PayPal against a real server, its certificates from an HTTPS server and authority of our own."""

import base64
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from receiver import paypal
from tests import authority
from tests.authority import Sender
from tests.service import Service, services, until, word
from tests.test_http import Reply

NAME = "messageverificationcerts.paypal.com"
PLACE = "/v1/notifications/certs/CERT-1"
BODY = b'{"id":"WH-1","event_type":"PAYMENT.CAPTURE.COMPLETED","resource":{"id":"P1"}}'
# What env:GITHUB is in the tests' servers.
WEBHOOK = b"of the hook"
CONFIG = """
[sources.paypal]
scheme = "paypal"
secrets = ["env:GITHUB"]
api = {{ base_url = "{base}" }}

[[rules]]
operation = "payment"
source = "paypal"
on = ["PAYMENT.CAPTURE.COMPLETED"]
subject = "resource.id"
record = {{ kind = "payment", data = {{ id = "{{resource.id}}" }} }}
"""


@pytest.fixture
def sender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sender]:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "root.pem"))
    with authority.serving(tmp_path) as serving:
        yield serving


@pytest.fixture
def service(tmp_path: Path, sender: Sender) -> Iterator[Service]:
    with services(tmp_path) as start:
        yield start(CONFIG.format(base=sender.base))


def deliver(service: Service, signer: authority.Issued, body: bytes = BODY) -> Reply:
    content = paypal.content(b"id-1", b"2026-11-30T00:00:00Z", WEBHOOK, BODY)
    headers = [
        (paypal.ID, "id-1"),
        (paypal.TIME, "2026-11-30T00:00:00Z"),
        (paypal.SIGNATURE, base64.b64encode(signer.sign(content)).decode()),
        (paypal.CERTIFICATE, f"https://api.paypal.com{PLACE}"),
        (paypal.ALGORITHM, "SHA256withRSA"),
    ]
    return service.post("paypal", body, headers)


def by(root: authority.Issued) -> authority.Issued:
    return authority.leaf(root, NAME, datetime.now(UTC))


def test_a_delivery_is_taken_once_the_certificate_is_fetched_and_proved(
    service: Service, sender: Sender
) -> None:
    signer = by(sender.root)
    sender.answers[PLACE] = (200, signer.pem)

    first = deliver(service, signer)
    assert (first.status, word(first)) == (503, "unavailable")
    assert first.headers["retry-after"]
    until(lambda: deliver(service, signer).status == 200)
    assert word(deliver(service, signer)) == "duplicate"
    assert service.value("select count(*) from receiver_records") == 1
    assert deliver(service, signer, BODY + b" ").status == 401
    assert deliver(service, by(sender.root)).status == 401

    # What is kept needs no fetch after a restart.
    until(lambda: service.value("select count(*) from receiver_certificates") == 1)
    service.kill()
    sender.answers.clear()
    service.start()
    assert word(deliver(service, signer)) == "duplicate"


@pytest.mark.parametrize("status", [404, 200])
def test_a_certificate_that_no_chain_proves_refuses_what_it_signed(
    service: Service, sender: Sender, status: int
) -> None:
    forger = by(authority.root(datetime.now(UTC)))
    sender.answers[PLACE] = (status, forger.pem)

    assert deliver(service, forger).status == 503
    until(lambda: deliver(service, forger).status == 401)

    assert service.value("select count(*) from receiver_certificates") == 0
    assert service.value("select count(*) from receiver_events") == 0
    reasons = "select reason from receiver_rejections where source = 'paypal' order by 1"
    until(lambda: ("bad-signature",) in service.rows(reasons))


def test_a_sender_that_is_down_costs_no_delivery_and_no_thread(
    service: Service, sender: Sender
) -> None:
    signer = by(sender.root)
    sender.answers[PLACE] = (500, b"")

    for _ in range(20):
        assert deliver(service, signer).status == 503
    until(lambda: "answered 500" in service.log)

    assert service.log.count("answered 500") == 1
    assert service.stop() == 0
