"""What Prometheus scrapes: our counters, and what the file says, put together when it is asked."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from receiver import __version__
from receiver.config import Settings
from receiver.counters import Counters, Histogram
from store import tallies
from store.database import snapshot
from store.errors import StoreError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from receiver.facts import Facts

# The library, and all that `status` knows, are imported by the first scrape: they take 30 ms and a
# megabyte, and not everybody scrapes.

#: How long what the file says is used again, in seconds: scraping must not load it.
FRESH_S = 5.0
#: In place of a name that is not in the config.
OTHER = "other"

#: Label values, and the number that they are for.
Samples = Iterable[tuple[Sequence[str], float]]


class Looked(NamedTuple):
    """What the file says; attempts and sends by name and outcome."""

    facts: "Facts"
    attempts: dict[tuple[str, str], int]
    sends: dict[tuple[str, str], int]


class Metrics:
    """Gives the text of one scrape; a scrape while another is made gets the same."""

    def __init__(
        self,
        counters: Counters,
        settings: Callable[[], Settings],
        clock: Callable[[], int],
        *,
        waiting: Callable[[], int],
        is_ready: Callable[[], bool],
    ) -> None:
        self._counters = counters
        self._settings = settings
        self._clock = clock
        self._waiting = waiting
        self._is_ready = is_ready
        self._looked: Looked | None = None
        self._looked_at = float("-inf")
        self._scrape: asyncio.Task[bytes] | None = None

    async def scrape(self) -> bytes:
        """The text, made on another thread: what it takes holds up no health check."""
        if self._scrape is None:
            self._scrape = asyncio.create_task(asyncio.to_thread(self.text))
            self._scrape.add_done_callback(self._scraped)
        return await asyncio.shield(self._scrape)

    def text(self) -> bytes:
        """The same, made here. One thread at a time."""
        from prometheus_client import generate_latest

        return generate_latest(self)

    def collect(self) -> Iterator["Metric"]:
        """Every metric, with its labels bounded by the config and by words of ours."""
        settings = self._settings()
        yield from self._of_the_process(settings)
        looked = self._look(settings)
        if looked is not None:
            yield from _of_work(looked.facts)
            yield from _of_messages(looked, settings)
            yield from _of_care(looked.facts)

    def _scraped(self, task: "asyncio.Task[bytes]") -> None:
        self._scrape = None

    def _of_the_process(self, settings: Settings) -> Iterator["Metric"]:
        known, counters = settings.sources, self._counters
        yield _gauge("receiver_info", "The version that runs.", 1, version=__version__)
        yield _gauge("receiver_ready", "1 while deliveries can be taken.", int(self._is_ready()))
        yield _gauge("receiver_queue_depth", "Jobs that wait for the next commit.", self._waiting())
        yield _counter(
            "receiver_deliveries",
            "Genuine deliveries by what was answered.",
            ("source", "outcome"),
            _named(dict(counters.deliveries), known),
        )
        yield _counter(
            "receiver_rejections",
            "Requests that were refused.",
            ("source", "reason"),
            _named(dict(counters.refusals), known),
        )
        yield _histogram("receiver_commit_jobs", "Jobs in one commit.", counters.jobs)
        yield _histogram(
            "receiver_commit_seconds", "From a transaction's begin to its end.", counters.seconds
        )

    def _look(self, settings: Settings) -> Looked | None:
        if time.monotonic() - self._looked_at < FRESH_S:
            return self._looked
        from receiver import facts

        try:
            with snapshot(settings.database) as seen:
                disk = facts.disk_of(settings.database)
                self._looked = Looked(
                    facts.look(seen, settings, self._clock(), disk),
                    _times(tallies.totals(seen, "attempt")),
                    _times(tallies.totals(seen, "send")),
                )
        except StoreError:
            # Then the counters are worth having all the more.
            self._looked = None
        self._looked_at = time.monotonic()
        return self._looked


def _of_work(now: "Facts") -> Iterator["Metric"]:
    yield _gauges(
        "receiver_events",
        "Events by state; settled are done or ignored.",
        ("state",),
        [((state,), count) for state, count in now.events.items()],
    )
    oldest = [one for one in (now.oldest_event_ms, now.oldest_message_ms) if one is not None]
    yield _gauge(
        "receiver_oldest_unfinished_seconds",
        "Age of the oldest event or message that is pending.",
        _seconds_since(min(oldest, default=None), now.at_ms),
    )
    yield _gauge(
        "receiver_lag_seconds",
        "How long the work that is due longest has been due.",
        _seconds_since(now.due_ms, now.at_ms),
    )
    yield _gauge("receiver_parked_too_long", "Events over the limit.", now.parked_too_long)
    yield _gauge("receiver_conflicts", "Conflicts that nobody resolved.", now.conflicts)
    yield _gauge("receiver_same_body_events", "Events with an earlier one's body.", now.same_body)
    yield _gauges(
        "receiver_last_delivery_timestamp_seconds",
        "When a source was genuinely heard of last.",
        ("source",),
        [((name,), at_ms / 1000) for name, at_ms in now.last_delivered_ms.items()],
    )


def _of_messages(looked: Looked, settings: Settings) -> Iterator["Metric"]:
    known = settings.destinations
    owed: dict[tuple[str, str], int] = {}
    for one in looked.facts.messages:
        key = (one.destination, one.state)
        owed[key] = owed.get(key, 0) + one.messages
    yield _gauges(
        "receiver_messages",
        "Messages that are not sent, by state.",
        ("destination", "state"),
        _named(owed, known),
    )
    yield _gauges(
        "receiver_fetches",
        "Fetches of current state that are not made, by state.",
        ("state",),
        [((state,), looked.facts.fetches.get(state, 0)) for state in ("pending", "dead")],
    )
    yield _counter(
        "receiver_sends",
        "Attempts at messages by how they ended.",
        ("destination", "outcome"),
        _named(looked.sends, known),
    )
    yield _counter(
        "receiver_attempts",
        "Attempts at events, but for the first of a delivery, by how they ended.",
        ("outcome",),
        [((outcome,), count) for (_, outcome), count in looked.attempts.items()],
    )


def _of_care(now: "Facts") -> Iterator["Metric"]:
    disk = now.disk
    yield _gauge("receiver_database_bytes", "Size of the file.", disk.file_bytes)
    yield _gauge("receiver_wal_bytes", "Size of its -wal.", disk.wal_bytes)
    yield _gauge("receiver_disk_free_bytes", "What is left where the file is.", disk.free_bytes)
    yield _gauge("receiver_disk_bytes", "What there is where the file is.", disk.total_bytes)
    if now.backup is not None:
        yield _gauge(
            "receiver_last_backup_timestamp_seconds",
            "When the last backup that proved whole was made.",
            now.backup.at_ms / 1000,
        )
    yield _gauges(
        "receiver_last_reconcile_timestamp_seconds",
        "When the last complete comparison with the sender began.",
        ("source",),
        [((run.source,), run.started_ms / 1000) for run in now.reconciles],
    )
    yield _gauges(
        "receiver_reconcile_gap",
        "What the sender had and we did not.",
        ("source",),
        [((run.source,), run.gap or 0) for run in now.reconciles],
    )
    opened: dict[str, int] = {}
    for one in now.open_alerts:
        opened[one.name] = opened.get(one.name, 0) + 1
    yield _gauges(
        "receiver_alerts",
        "Alerts that are open.",
        ("name",),
        [((name,), count) for name, count in opened.items()],
    )


def _gauge(name: str, words: str, value: float, **labels: str) -> "Metric":
    return _gauges(name, words, tuple(labels), [(tuple(labels.values()), value)])


def _gauges(name: str, words: str, labels: Sequence[str], samples: Samples) -> "Metric":
    from prometheus_client.metrics_core import GaugeMetricFamily

    family = GaugeMetricFamily(name, words, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family


def _counter(name: str, words: str, labels: Sequence[str], samples: Samples) -> "Metric":
    from prometheus_client.metrics_core import CounterMetricFamily

    family = CounterMetricFamily(name, words, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family


def _histogram(name: str, words: str, counted: Histogram) -> "Metric":
    from prometheus_client.metrics_core import HistogramMetricFamily

    below, buckets = 0, []
    for bound, count in zip((*counted.bounds, float("inf")), counted.counts, strict=True):
        below += count
        buckets.append((f"{bound:g}" if bound != float("inf") else "+Inf", float(below)))
    family = HistogramMetricFamily(name, words)
    family.add_metric((), buckets, counted.sum)
    return family


def _named(counts: dict[tuple[str, str], int], known: Iterable[str]) -> Samples:
    """Counts by a name that is in the config; those of all others together."""
    found: dict[tuple[str, str], int] = {}
    names = frozenset(known)
    for (name, word), count in counts.items():
        key = (name if name in names else OTHER, word)
        found[key] = found.get(key, 0) + count
    return found.items()


def _times(totals: dict[tuple[str, str], tallies.Total]) -> dict[tuple[str, str], int]:
    return {key: total.times for key, total in totals.items()}


def _seconds_since(at_ms: int | None, now_ms: int) -> float:
    return 0 if at_ms is None else max(0, now_ms - at_ms) / 1000
