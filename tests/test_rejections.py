"""What was refused, and which secrets were used, in the file: counted, bounded, newest first."""

import pytest
from msgspec.structs import replace

from store import forgotten, rejections, secrets
from store.database import Snapshot, Store, Tx
from store.rejections import Request
from store.secrets import SecretUse
from tests.conftest import NOW_MS

MINUTE_MS = rejections.MINUTE_MS

GARBAGE = Request(
    source="stripe",
    reason="bad-signature",
    request_id="r-1",
    received_ms=NOW_MS,
    method="POST",
    address="192.0.2.7",
    header_names='["host"]',
    body_bytes=2,
    detail="no signature matches",
)
STALE = replace(
    GARBAGE, reason="expired", skew_s=400, url="https://h.test/", headers="[]", body=b"{}"
)


def seen(store: Store) -> Snapshot:
    return Snapshot(store.db)


def count(store: Store, source: str, reason: str, at_ms: int, times: int = 1) -> None:
    store.write(lambda tx: rejections.add(tx, source, reason, times, at_ms, at_ms, "r-1", "no"))


def keep(store: Store, *requests: Request) -> None:
    def run(tx: Tx) -> None:
        for request in requests:
            rejections.keep(tx, request)
        rejections.prune_kept(tx)

    store.write(run)


def kept(store: Store) -> int:
    found = store.db.execute("select count(*) from receiver_rejected").get
    assert isinstance(found, int)
    return found


def test_refusals_of_one_minute_are_one_row_with_their_number(store: Store) -> None:
    for at_ms in (NOW_MS, NOW_MS + 59_999, NOW_MS + MINUTE_MS):
        count(store, "stripe", "bad-signature", at_ms, 1000)

    lines = rejections.listed(seen(store))

    assert [(one.count, one.first_ms, one.last_ms) for one in lines] == [
        (1000, NOW_MS + MINUTE_MS, NOW_MS + MINUTE_MS),
        (2000, NOW_MS, NOW_MS + 59_999),
    ]
    (total,) = rejections.of_source(seen(store), "stripe")
    assert (total.count, total.last_ms) == (3000, NOW_MS + MINUTE_MS)


def test_counts_of_a_source_are_bounded_and_the_oldest_go(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejections, "COUNTS_MAX", 3)

    for minute in range(6):
        count(store, "", "unknown", NOW_MS + minute * MINUTE_MS)
    count(store, "stripe", "bad-signature", NOW_MS)

    lines = rejections.listed(seen(store), source="")
    assert [one.last_ms for one in lines] == [NOW_MS + n * MINUTE_MS for n in (5, 4, 3)]
    assert len(rejections.listed(seen(store), source="stripe")) == 1


def test_kept_requests_of_a_source_and_reason_are_bounded_and_the_oldest_go(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejections, "KEPT_MAX", 2)

    keep(store, *(replace(GARBAGE, request_id=f"r-{number}") for number in range(5)))
    keep(store, replace(GARBAGE, source="github"))

    assert kept(store) == 3
    assert rejections.by_request(seen(store), "r-2") is None
    assert rejections.by_request(seen(store), "r-4") is not None


@pytest.mark.parametrize("limit", ["KEPT_MAX", "KEPT_IN_ALL_MAX"])
def test_a_stale_request_sent_again_and_again_pushes_out_no_other(
    store: Store, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(rejections, limit, 4)
    one, other, third = (replace(STALE, content_sha256=bytes([n]) * 32) for n in range(3))
    keep(store, replace(one, request_id="one"), replace(other, request_id="other"))

    keep(store, *(replace(one, request_id=f"again-{number}") for number in range(9)))
    keep(store, replace(third, request_id="third"))

    listed = [line.request_id for line in rejections.listed(seen(store))]
    assert listed == ["third", "again-8", "other", "one"]


def test_what_came_again_stays_where_the_first_has_lost_its_body(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejections, "KEPT_MAX", 2)
    same = replace(STALE, content_sha256=bytes(32))
    keep(store, same)
    store.write(lambda tx: forgotten.forget_one_rejected(tx, 1))

    keep(store, same, same)

    assert [line.number for line in rejections.listed(seen(store))] == [3, 2]


@pytest.mark.parametrize(("limit", "value"), [("KEPT_IN_ALL_MAX", 3), ("KEPT_BYTES_MAX", 20)])
def test_garbage_never_pushes_out_what_is_genuine(
    store: Store, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(rejections, limit, value)
    keep(store, STALE)

    body = replace(GARBAGE, url="https://h.test/", headers="[]", body=b"123456")
    keep(store, *(replace(body, source=f"s{number}") for number in range(10)))

    assert kept(store) == 4
    assert rejections.wrong_clock(seen(store), NOW_MS) == 1


def test_genuine_deliveries_are_bounded_by_the_bytes_of_their_bodies(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejections, "KEPT_BYTES_MAX", 5)

    keep(store, *(replace(STALE, request_id=f"r-{number}") for number in range(4)))

    assert [one.request_id for one in rejections.listed(seen(store))] == ["r-3", "r-2"]


def test_each_genuine_delivery_is_listed_by_itself_beside_the_counts(store: Store) -> None:
    keep(store, GARBAGE, STALE, replace(STALE, received_ms=NOW_MS + 5, request_id="r-2"))
    count(store, "stripe", "bad-signature", NOW_MS, 7)
    count(store, "stripe", "expired", NOW_MS, 2)

    lines = rejections.listed(seen(store))

    assert [(one.reason, one.count, one.number) for one in lines] == [
        ("expired", 1, 3),
        ("expired", 1, 2),
        ("bad-signature", 7, 1),
    ]
    assert len(rejections.listed(seen(store), reason="expired", since_ms=NOW_MS + 1)) == 1
    assert rejections.listed(seen(store), source="github") == []


def test_an_accepted_one_gives_up_its_body_and_counts_as_accepted(store: Store) -> None:
    keep(store, STALE)

    store.write(lambda tx: rejections.accepted(tx, 1, 9))

    found = rejections.by_number(seen(store), 1)
    assert found is not None
    assert (found.event, found.request.body) == (9, None)
    with pytest.raises(AssertionError, match="once"):
        store.write(lambda tx: rejections.accepted(tx, 1, 9))


def test_deliveries_with_a_wrong_clock_are_counted_since_a_time(store: Store) -> None:
    keep(store, GARBAGE, *(replace(STALE, received_ms=NOW_MS + n) for n in range(4)))

    assert rejections.wrong_clock(seen(store), NOW_MS + 1) == 3
    assert rejections.skews(seen(store), NOW_MS + 3) == [("stripe", 400)]


def test_a_secret_is_known_by_its_reference_with_its_last_use(store: Store) -> None:
    store.write(lambda tx: secrets.used(tx, "stripe", "env:NEW", NOW_MS, 2))
    store.write(lambda tx: secrets.used(tx, "stripe", "env:NEW", NOW_MS + 5, 1))
    # A clock that was set back makes no use older than it was.
    store.write(lambda tx: secrets.used(tx, "stripe", "env:NEW", NOW_MS - 5, 1))
    store.write(lambda tx: secrets.used(tx, "stripe", "env:OLD", NOW_MS, 1))

    assert secrets.last_used(seen(store)) == [
        SecretUse("stripe", "env:NEW", NOW_MS + 5, 4),
        SecretUse("stripe", "env:OLD", NOW_MS, 1),
    ]
