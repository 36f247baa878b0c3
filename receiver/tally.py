"""Counts in memory what is worth no transaction each, and writes it about once a second."""

import asyncio
import json
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from receiver.config import Source
from receiver.counters import Counters
from receiver.logs import FIELD_CHARS_MAX, log
from receiver.verify import EXPIRED, Delivery, Rejected
from store import rejections, secrets, tallies
from store.database import Tx
from store.rejections import Request
from store.tallies import What
from store.writer import Writer

#: Seconds that something is counted in memory before it is written.
FLUSH_S = 1.0
#: Genuine but stale deliveries kept in memory until then.
EXPIRED_MAX = 20
#: Other refused requests kept until then: of one source and reason, and in all.
KEPT_MAX = 3
KEPT_IN_ALL_MAX = 30
#: Characters of a kept request's header names, and bytes of its body where the config asks for it.
NAMES_CHARS_MAX = 2_000
BODY_BYTES_MAX = 65_536
#: This many stale deliveries of one source in so many milliseconds mean that a clock is wrong; for
#: as long it is not said again.
CLOCK_ALARM_COUNT = 3
CLOCK_ALARM_MS = 600_000

Pairs = Sequence[tuple[bytes, bytes]]


class Seen(msgspec.Struct, frozen=True):
    """What is known of a request that is refused."""

    method: str
    headers: Pairs
    # Asked only if the request is kept.
    address: Callable[[], object]


class Count(msgspec.Struct):
    """How often a source refused for one reason; the last one's request id and detail."""

    # The first ones, so that a flood costs no more than the counting once there are enough.
    kept: list[Request]
    first_ms: int
    last_ms: int
    count: int = 0
    logged: int = 0
    request_id: str = ""
    detail: str = ""


class Use(msgspec.Struct):
    """How often a secret proved a delivery, and when last."""

    last_ms: int
    count: int


Refused = dict[tuple[str, str], Count]
Used = dict[tuple[str, str], Use]
#: Deliveries by source and outcome.
Delivered = dict[tuple[str, str], int]


class Tally:
    """What was refused and which secrets were used, between two writes.

    Bounded by sources, reasons and secrets, whatever is sent: garbage costs no row and no line
    each.
    """

    def __init__(self, writer: Writer, counters: Counters) -> None:
        self._writer = writer
        self._counters = counters
        #: What of the counted deliveries is written, or on its way.
        self._delivered: Delivered = {}
        self._refused: Refused = {}
        self._used: Used = {}
        self._expired: list[Request] = []
        self._clock_alarms: dict[str, deque[int]] = {}
        self._clock_told: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._written: asyncio.Future[None] | None = None

    def deliver(self, source: str, word: str, reference: str, at_ms: int) -> None:
        """A delivery that the secret proved was answered so; '' is no secret."""
        self._counters.deliveries[source, word] += 1
        if not reference:
            self._schedule()
            return
        known = self._used.get((source, reference))
        if known is None:
            self._used[source, reference] = Use(at_ms, 1)
            self._schedule()
        else:
            known.count += 1
            known.last_ms = at_ms

    def refuse(
        self, source: str, reason: str, request_id: str, detail: str, at_ms: int, seen: Seen
    ) -> None:
        """Count a request that was refused before it was judged."""
        count = self._count(source, reason, request_id, detail, at_ms)
        if self._has_room(count):
            count.kept.append(_request(source, reason, request_id, detail, at_ms, seen))

    def reject(
        self,
        source: Source,
        rejected: Rejected,
        delivery: Delivery,
        request_id: str,
        seen: Seen,
    ) -> None:
        """Count a delivery that is not genuine, or keep one that is but is not of now."""
        name, reason, at_ms = source.name, rejected.reason, delivery.received_ms
        count = self._count(name, reason, request_id, rejected.detail, at_ms)
        if reason != EXPIRED:
            if self._has_room(count):
                request = _request(name, reason, request_id, rejected.detail, at_ms, seen)
                count.kept.append(_with_size(request, delivery, source.keep_rejected))
            return
        skew_s = rejected.skew_s or 0
        self._watch_clock(name, at_ms, skew_s)
        if self._has_room_for(rejected.content_sha256):
            request = _request(name, reason, request_id, rejected.detail, at_ms, seen)
            self._expired.append(
                msgspec.structs.replace(
                    with_body(request, delivery),
                    skew_s=skew_s,
                    content_sha256=rejected.content_sha256,
                )
            )

    def flush(self) -> "asyncio.Future[None]":
        """Write and log what was counted; what can't be written now is written later."""
        self._timer = None
        refused, self._refused = self._refused, {}
        used, self._used = self._used, {}
        expired, self._expired = self._expired, []
        for (source, reason), count in refused.items():
            _log_count(source, reason, count)
        known, self._delivered = self._delivered, dict(self._counters.deliveries)
        new = {key: count - known.get(key, 0) for key, count in self._delivered.items()}
        written = self._writer.submit(lambda tx: _write(tx, refused, used, expired, new))
        written.add_done_callback(lambda future: self._restore(future, refused, used, expired, new))
        self._written = written
        return written

    async def close(self) -> None:
        """Write what is left, as well as it goes. The writer must be open."""
        if self._timer is not None:
            self._timer.cancel()
            self.flush()
        if self._written is not None:
            await asyncio.wait([self._written])
        if self._timer is not None:
            self._timer.cancel()

    def _count(self, source: str, reason: str, request_id: str, detail: str, at_ms: int) -> Count:
        count = self._refused.get((source, reason))
        if count is None:
            count = self._refused[source, reason] = Count([], at_ms, at_ms)
        count.count += 1
        self._counters.refusals[source, reason] += 1
        count.last_ms, count.request_id = at_ms, request_id
        count.detail = detail[:FIELD_CHARS_MAX]
        self._schedule()
        return count

    def _has_room(self, count: Count) -> bool:
        if len(count.kept) >= KEPT_MAX:
            return False
        return sum(len(each.kept) for each in self._refused.values()) < KEPT_IN_ALL_MAX

    def _has_room_for(self, content_sha256: bytes | None) -> bool:
        """Whether one more stale delivery is kept; what came again makes room for what did not."""
        if len(self._expired) < EXPIRED_MAX:
            return True
        contents = [one.content_sha256 for one in self._expired]
        again = (n for n, one in enumerate(contents) if one in contents[:n])
        number = None if content_sha256 in contents else next(again, None)
        if number is None:
            return False
        del self._expired[number]
        return True

    def _schedule(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def _restore(
        self,
        written: "asyncio.Future[None]",
        refused: Refused,
        used: Used,
        expired: list[Request],
        delivered: Delivered,
    ) -> None:
        if written.cancelled() or written.exception() is None:
            return
        for key, count in refused.items():
            newer = self._refused.get(key)
            if newer is not None:
                newer.count += count.count
                newer.logged += count.logged
                newer.first_ms = count.first_ms
                newer.kept = (count.kept + newer.kept)[:KEPT_MAX]
            else:
                self._refused[key] = count
        for key, use in used.items():
            known = self._used.setdefault(key, Use(use.last_ms, 0))
            known.count += use.count
        for which, times in delivered.items():
            self._delivered[which] -= times
        later, self._expired = self._expired, expired
        for request in later:
            if self._has_room_for(request.content_sha256):
                self._expired.append(request)
        self._schedule()

    def _watch_clock(self, source: str, at_ms: int, skew_s: int) -> None:
        seen = self._clock_alarms.setdefault(source, deque(maxlen=CLOCK_ALARM_COUNT))
        seen.append(at_ms)
        if len(seen) < CLOCK_ALARM_COUNT or at_ms - seen[0] > CLOCK_ALARM_MS:
            return
        told_ms = self._clock_told.get(source)
        if told_ms is not None and 0 <= at_ms - told_ms <= CLOCK_ALARM_MS:
            return
        self._clock_told[source] = at_ms
        seen.clear()
        log.error(
            "clock",
            source=source,
            skew_s=skew_s,
            note="genuine deliveries are stale or from the future; set this machine's clock "
            "(timedatectl), then `receiver rejections accept`",
        )


def with_body(request: Request, delivery: Delivery) -> Request:
    """The same with all that it takes to judge it again."""
    return msgspec.structs.replace(
        request,
        body_bytes=len(delivery.body),
        url=delivery.url,
        headers=headers_json(delivery.headers),
        body=delivery.body,
    )


def _with_size(request: Request, delivery: Delivery, keep: bool) -> Request:
    # One that is cut could not be judged.
    if keep and len(delivery.body) <= BODY_BYTES_MAX:
        return with_body(request, delivery)
    return msgspec.structs.replace(request, body_bytes=len(delivery.body))


def headers_json(headers: Pairs) -> str:
    """Pairs of text in order, one character a byte; without what logs a person in."""
    pairs = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in headers
        if name not in (b"cookie", b"proxy-authorization")
    ]
    return json.dumps(pairs)


def _request(
    source: str, reason: str, request_id: str, detail: str, at_ms: int, seen: Seen
) -> Request:
    names, chars = [], 0
    for name, _ in seen.headers:
        chars += len(name)
        if chars > NAMES_CHARS_MAX:
            names.append("...")
            break
        names.append(name.decode("latin-1"))
    return Request(
        source=source,
        reason=reason,
        request_id=request_id,
        received_ms=at_ms,
        method=seen.method[:FIELD_CHARS_MAX],
        address=str(seen.address())[:FIELD_CHARS_MAX],
        header_names=json.dumps(names),
        body_bytes=None,
        detail=detail[:FIELD_CHARS_MAX],
    )


def _log_count(source: str, reason: str, count: Count) -> None:
    fresh = count.count - count.logged
    if fresh <= 0:
        return
    count.logged = count.count
    log.warning(
        "refused",
        source=source,
        reason=reason,
        count=fresh,
        request=count.request_id,
        detail=count.detail,
    )


def _write(
    tx: Tx, refused: Refused, used: Used, expired: Sequence[Request], delivered: Delivered
) -> None:
    counts = {What("delivery", *key): count for key, count in delivered.items() if count}
    tallies.add(tx, counts, tx.now_ms)
    tallies.prune(tx)
    for (source, reference), use in used.items():
        secrets.used(tx, source, reference, use.last_ms, use.count)
    for (source, reason), count in refused.items():
        rejections.add(
            tx,
            source,
            reason,
            count.count,
            count.first_ms,
            count.last_ms,
            count.request_id,
            count.detail,
        )
    kept = [request for count in refused.values() for request in count.kept]
    for request in (*kept, *expired):
        rejections.keep(tx, request)
    if kept or expired:
        rejections.prune_kept(tx)
