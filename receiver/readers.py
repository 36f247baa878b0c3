"""The worker's threads that ask senders: for the state of a resource, and for what was missed."""

import functools
import time
from collections.abc import Iterator

from receiver import fetching
from receiver.client import Client, Reply
from receiver.config import Settings, Source
from receiver.destinations import Later, Never, one_line
from receiver.logs import log
from receiver.process import Processor, failure_of
from receiver.select import Unjudgeable
from receiver.worker import EVENT_LEASE_S, Group, Outward, Worker, log_unexpected, ms_since
from store import fetches
from store.database import Snapshot
from store.fetches import Fetch

assert fetching.LEASE_S <= EVENT_LEASE_S, "the worker takes no lease for longer"


def wanted(worker: Worker, settings: Settings) -> Iterator[Group]:
    """The groups of threads for the sources that have an API."""
    for source in settings.sources.values():
        if source.api is not None:
            yield Fetches(worker, source.name)
            if source.api.silence_s is not None:
                yield Missed(worker, source.name)


class Fetches(Outward):
    """Reads from one source's API the state of what its events have told of."""

    def __init__(self, worker: Worker, source: str) -> None:
        super().__init__(worker)
        self.name = f"from-{source}"
        self._source = source
        self._client: Client | None = None

    def due_ms(self, snapshot: Snapshot) -> int | None:
        source = self.worker.processor().settings.sources.get(self._source)
        if source is None or source.api is None or self.paused_s() > 0:
            return None
        return fetches.due_ms(snapshot, self._source)

    def step(self, owner: str) -> float | None:
        worker, processor = self.worker, self.worker.processor()
        source = processor.settings.sources.get(self._source)
        if source is None or source.api is None:
            # A reload took it away; what is owed waits for it to come back.
            return None
        paused_s = self.paused_s()
        if paused_s > 0:
            return paused_s
        leased = worker.write(
            functools.partial(
                fetching.lease,
                worker=processor.settings.worker,
                endpoint=self._source,
                owner=owner,
                ahead_ms=worker.ahead_ms(),
            )
        )
        if not isinstance(leased, Fetch):
            return worker.seconds_until(leased)
        started = time.perf_counter()
        reply = self._read(processor, leased)
        _log_fetch(leased, reply, started)
        self.note(reply)
        settle = functools.partial(
            fetching.settle, processor=worker.processor(), leased=leased, reply=reply
        )
        self.write_surely(settle, for_s=fetching.LEASE_S)
        return 0

    def _read(self, processor: Processor, leased: Fetch) -> Reply:
        try:
            plan = fetching.plan(processor.settings, self._source, leased.name)
            client = self._client_for(plan.source)
            return fetching.read(client, leased, plan.path, self.worker.clock())
        except (fetching.NotFetchable, Unjudgeable) as error:
            return Never(str(error))
        except Exception as error:
            # A fault of ours ends the attempt like any other: it is counted, and bounded.
            log_unexpected(error, resource=str(leased.name))
            why = f"reading it failed inside Receiver{failure_of(error)}"
            return Later(one_line(why))

    def _client_for(self, source: Source) -> Client:
        """The client for the API as it is configured now; a reload may have changed the key."""
        client = self._client
        if client is None or client.api != source.api:
            assert source.api is not None, "what has none is not fetched by it"
            if client is not None:
                client.close()
            client = self._client = Client(source.api, source.contract.livemode)
        return client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


class Missed(Group):
    """Looks once, at the start, what a source that was silent for long has missed."""

    def __init__(self, worker: Worker, source: str) -> None:
        super().__init__(worker)
        self.name = f"missed-{source}"
        self._source = source
        self._looked = False

    def start(self, owner: str, threads: int) -> None:
        super().start(owner, 1)

    def due_ms(self, snapshot: Snapshot) -> int | None:
        return None

    def step(self, owner: str) -> float | None:
        processor = self.worker.processor()
        source = processor.settings.sources.get(self._source)
        if self._looked or source is None or source.api is None or source.api.silence_s is None:
            return None
        from receiver import silence  # imported where it is asked for: it brings all of reconcile

        self._looked = silence.catch_up(
            source, processor, self.worker.write, self.worker.clock, self._wait
        )
        return None if self._looked else silence.AGAIN_S

    def _wait(self, seconds: float) -> bool:
        """False where the worker is stopping."""
        lane = self.lanes[0]
        if seconds and not lane.stopping:
            lane.wake.wait(seconds)
        return not lane.stopping


def _log_fetch(leased: Fetch, reply: Reply, started: float) -> None:
    log.info(
        "fetch",
        source=leased.endpoint,
        resource=str(leased.name),
        attempt=leased.attempts,
        outcome=fetching.outcome_of(reply),
        ms=ms_since(started),
    )
