"""Certificates that senders sign with: proved by their chain, fetched within bounds, kept."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from receiver import certificate_book, certificates
from receiver.certificate_book import Book
from receiver.certificates import Unreachable, Untrusted, fetch, load, prove
from receiver.coded import Certificate
from tests import authority
from tests.authority import Sender
from tests.service import until

NOW = datetime(2026, 11, 30, tzinfo=UTC)
NOW_MS = int(NOW.timestamp() * 1000)
NAME = "messageverificationcerts.paypal.com"
URL = "https://api.paypal.com/v1/notifications/certs/CERT-1"
ISSUER_URL = "http://cacerts.digicert.com/TestIssuer.crt"

ROOT = authority.root(NOW)
ISSUER = authority.intermediate(ROOT, NOW)
LEAF = authority.leaf(ISSUER, NAME, NOW, issuer_url=ISSUER_URL)


def nothing(url: str) -> bytes:
    raise AssertionError(f"{url} was fetched")


def test_a_chain_to_a_trusted_root_proves_a_certificate() -> None:
    pem = prove(LEAF.pem + ISSUER.pem, NAME, NOW_MS, [ROOT.certificate], nothing)

    assert load(pem.encode()).verify(LEAF.sign(b"x"), b"x")
    assert not load(pem.encode()).verify(LEAF.sign(b"x"), b"y")


def test_an_issuer_that_is_not_there_is_fetched_from_the_authority() -> None:
    asked = []

    def fetch(url: str) -> bytes:
        asked.append(url)
        return ISSUER.der

    assert prove(LEAF.pem, NAME, NOW_MS, [ROOT.certificate], fetch)
    assert asked == [ISSUER_URL]


@pytest.mark.parametrize(
    "pem",
    [
        pytest.param(authority.root(NOW).pem, id="self-signed"),
        pytest.param(authority.leaf(authority.root(NOW), NAME, NOW).pem, id="another root"),
        pytest.param(authority.leaf(ROOT, "evil.example", NOW).pem, id="another name"),
        pytest.param(authority.leaf(ROOT, NAME, NOW, days=0).pem, id="expired"),
        pytest.param(
            authority.leaf(LEAF, NAME, NOW).pem + LEAF.pem + ISSUER.pem, id="no authority"
        ),
        pytest.param(authority.leaf(ROOT, NAME, NOW, bits=1024).pem, id="weak key"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", id="noise"),
    ],
)
def test_what_no_chain_proves_is_refused(pem: bytes) -> None:
    later_ms = NOW_MS + 1000

    with pytest.raises(Untrusted):
        prove(pem, NAME, later_ms, [ROOT.certificate], nothing)


@pytest.mark.parametrize(
    "place",
    [
        "http://evil.example/TestIssuer.crt",
        "http://cacerts.digicert.com.evil.example/TestIssuer.crt",
        "http://cacerts.digicert.com/a/b.crt",
        "http://cacerts.digicert.com:81/TestIssuer.crt",
        "file:///etc/passwd",
    ],
)
def test_an_issuer_is_fetched_from_nowhere_else(place: str) -> None:
    leaf = authority.leaf(ISSUER, NAME, NOW, issuer_url=place)

    with pytest.raises(Untrusted, match="no chain"):
        prove(leaf.pem, NAME, NOW_MS, [ROOT.certificate], nothing)


@pytest.mark.parametrize("answer", [b"", b"noise", LEAF.der, ROOT.der])
def test_a_fetched_issuer_that_proves_nothing_is_refused(answer: bytes) -> None:
    with pytest.raises(Untrusted):
        prove(LEAF.pem, NAME, NOW_MS, [ROOT.certificate], lambda url: answer)


def test_the_systems_roots_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(certificates.system_roots()) > 20

    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "roots.pem"))
    (tmp_path / "roots.pem").write_bytes(ROOT.pem)
    assert [one.subject for one in certificates.system_roots()] == [ROOT.certificate.subject]


# Fetching.


@pytest.fixture
def sender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sender]:
    """An HTTPS server of a sender's, whose authority is trusted."""
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "root.pem"))
    with authority.serving(tmp_path) as serving:
        yield serving


def test_a_body_is_fetched_over_a_connection_that_the_system_trusts(
    sender: Sender, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sender.answers["/c"] = (200, b"body")
    assert fetch(f"{sender.base}/c") == b"body"

    (tmp_path / "other.pem").write_bytes(ROOT.pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "other.pem"))
    with pytest.raises(Unreachable, match="certificate is refused"):
        fetch(f"{sender.base}/c")


def test_neither_a_redirect_nor_an_error_nor_a_flood_is_taken(sender: Sender) -> None:
    flood = b"x" * certificates.FETCH_BYTES_MAX
    sender.answers.update({"/moved": (302, b""), "/broken": (500, b""), "/flood": (200, flood)})
    sender.answers["/elsewhere"] = (200, b"followed")

    for path in ("/moved", "/broken", "/flood"):
        with pytest.raises(Unreachable):
            fetch(sender.base + path)
    with pytest.raises(Untrusted, match="there is none"):
        fetch(f"{sender.base}/missing")
    with pytest.raises(Unreachable):
        fetch("https://127.0.0.1:1/")


# The book.


class Clock:
    now_ms = NOW_MS

    def __call__(self) -> int:
        return self.now_ms


@pytest.fixture
def trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "root.pem"))
    (tmp_path / "root.pem").write_bytes(ROOT.pem)


def settled(book: Book) -> None:
    until(lambda: not book._waiting)


@pytest.mark.usefixtures("trusted")
def test_a_certificate_is_fetched_once_and_kept() -> None:
    asked: list[str] = []
    kept: list[tuple[str, str, int]] = []

    def answer(url: str) -> bytes:
        asked.append(url)
        return LEAF.pem + ISSUER.pem

    book = Book(Clock(), lambda *row: kept.append(row), answer)
    assert book.get(URL) is None
    for _ in range(5):
        book.want(URL, "https://localhost:1")
    settled(book)

    assert asked == ["https://localhost:1/v1/notifications/certs/CERT-1"]
    assert isinstance(book.get(URL), Certificate)
    assert kept == [(URL, LEAF.pem.decode(), NOW_MS)]
    book.close()

    again = Book(Clock())
    again.load({URL: kept[0][1].encode(), "https://x": b"spoilt"})
    assert isinstance(again.get(URL), Certificate)
    assert again.get("https://x") is None


@pytest.mark.usefixtures("trusted")
def test_what_is_no_good_certificate_refuses_deliveries_for_a_while_and_is_then_asked_again() -> (
    None
):
    clock = Clock()
    asked: list[str] = []

    def answer(url: str) -> bytes:
        asked.append(url)
        return authority.leaf(ROOT, "evil.example", NOW).pem

    book = Book(clock, fetch=answer)
    book.want(URL)
    settled(book)
    said = book.get(URL)
    assert isinstance(said, str)
    assert "no chain" in said
    book.want(URL)
    settled(book)
    assert len(asked) == 1

    clock.now_ms += certificate_book.UNTRUSTED_MS + 1
    assert book.get(URL) is None
    book.want(URL)
    until(lambda: len(asked) == 2)
    book.close()


def of_a_host_that_is_down(clock: Clock) -> tuple[Book, list[str]]:
    """A book, and what was asked for."""
    asked: list[str] = []

    def down(url: str) -> bytes:
        asked.append(url)
        raise Unreachable("down")

    return Book(clock, fetch=down), asked


def test_a_host_that_is_down_is_asked_again_soon_and_nothing_is_refused_meanwhile() -> None:
    clock = Clock()
    book, asked = of_a_host_that_is_down(clock)
    book.want(URL)
    settled(book)
    assert book.get(URL) is None
    book.want(URL)
    settled(book)
    assert len(asked) == 1
    clock.now_ms += certificate_book.UNREACHABLE_MS + 1
    book.want(URL)
    until(lambda: len(asked) == 2)
    book.close()


@pytest.mark.usefixtures("trusted")
def test_what_failed_before_the_clock_was_set_back_is_fetched_again() -> None:
    clock = Clock()
    answers = [b"", LEAF.pem + ISSUER.pem]
    book = Book(clock, fetch=lambda url: answers.pop(0))
    clock.now_ms = NOW_MS + 86_400_000
    book.want(URL)
    settled(book)
    assert isinstance(book.get(URL), str)

    clock.now_ms = NOW_MS
    assert book.get(URL) is None
    book.want(URL)
    settled(book)

    assert isinstance(book.get(URL), Certificate)
    book.close()


def test_fetches_before_the_clock_was_set_back_are_not_recent() -> None:
    clock = Clock()
    book, asked = of_a_host_that_is_down(clock)
    clock.now_ms = NOW_MS + 86_400_000
    for number in range(certificate_book.FETCHES_FOR_ONE_MAX):
        book.want(f"{URL}-{number}")
    clock.now_ms = NOW_MS
    book.want(URL)
    settled(book)

    assert asked[-1] == URL
    book.close()


def test_a_flood_of_addresses_is_fetched_at_a_bounded_rate_and_forgotten() -> None:
    clock = Clock()
    asked: list[str] = []

    def none(url: str) -> bytes:
        asked.append(url)
        raise Untrusted("there is none")

    book = Book(clock, fetch=none)
    for minute in range(20):
        clock.now_ms = NOW_MS + minute * 61_000
        for i in range(100):
            book.want(f"{URL}-{minute}-{i}", asker=f"192.0.2.{i % 50}")
        settled(book)

    assert len(asked) == 20 * certificate_book.FETCHES_A_MINUTE_MAX
    assert len(book._failed) == certificate_book.FAILURES_MAX
    book.close()


@pytest.mark.usefixtures("trusted")
def test_of_many_certificates_the_newest_are_known() -> None:
    clock = Clock()
    book = Book(clock, fetch=lambda url: LEAF.pem + ISSUER.pem)
    urls = [f"{URL}-{i}" for i in range(certificate_book.KNOWN_MAX + 2)]

    for url in urls:
        clock.now_ms += 60_000
        book.want(url)
        settled(book)

    assert [url for url in urls if book.get(url) is None] == urls[:2]
    book.close()


def test_a_flood_from_one_address_does_not_take_the_senders_turn() -> None:
    clock = Clock()
    asked: list[str] = []

    def none(url: str) -> bytes:
        asked.append(url)
        raise Untrusted("there is none")

    book = Book(clock, fetch=none)
    for i in range(100):
        book.want(f"{URL}-{i}", asker="192.0.2.66")
    book.want(URL, asker="192.0.2.1")
    settled(book)

    assert asked[-1] == URL
    assert len(asked) == certificate_book.FETCHES_FOR_ONE_MAX + 1
    book.close()


def test_an_error_that_nobody_foresaw_does_not_end_the_fetching(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    answers: list[Callable[[], bytes]] = [lambda: 1 / 0, lambda: b""]  # type: ignore[list-item,return-value]

    book = Book(clock, fetch=lambda url: answers.pop(0)())
    book.want(URL)
    settled(book)
    book.want(URL + "2")
    settled(book)

    assert answers == []
    assert isinstance(book.get(URL + "2"), str)
    book.close()


@pytest.mark.usefixtures("trusted")
def test_an_expired_certificate_is_fetched_anew() -> None:
    clock = Clock()
    book = Book(clock, fetch=lambda url: LEAF.pem + ISSUER.pem)
    book.want(URL)
    settled(book)

    clock.now_ms += 31 * 86_400_000

    assert book.get(URL) is None
    book.close()
