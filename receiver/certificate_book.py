"""Fetches the certificates that deliveries name, on a thread of its own, within bounds."""

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from receiver import certificates
from receiver.coded import Certificate
from receiver.paypal import NAMES

#: URLs that wait to be fetched, and fetches a minute, in all and for one who asks: anyone can name
#: one that is not there, and must not take the turn of the one that is.
WANTED_MAX = 16
FETCHES_A_MINUTE_MAX = 12
FETCHES_FOR_ONE_MAX = 3
#: Certificates that are known; the file keeps as many.
KNOWN_MAX = 16
#: Failures remembered, and milliseconds until a URL is tried again: one that was not reached, and
#: one that has no good certificate.
FAILURES_MAX = 64
UNREACHABLE_MS = 15_000
UNTRUSTED_MS = 600_000

log = logging.getLogger("receiver")


class Wish(NamedTuple):
    """A URL of the sender's, and where it is asked for: another base only in tests."""

    url: str
    base_url: str | None


class Failure(NamedTuple):
    until_ms: int
    # Why it can't be the sender's; None for what was only not reached.
    words: str | None

    def holds(self, at_ms: int) -> bool:
        """Until its end; one that is further off was noted before the clock was set back."""
        return 0 <= self.until_ms - at_ms <= UNTRUSTED_MS


class Book:
    """The certificates that are known, by URL.

    `get` and `want` never wait. `keep` is given each new one (URL, PEM, time) on the book's own
    thread.
    """

    def __init__(
        self,
        clock: Callable[[], int],
        keep: Callable[[str, str, int], None] = lambda url, pem, at_ms: None,
        fetch: Callable[[str], bytes] = certificates.fetch,
    ) -> None:
        self._clock = clock
        self._keep = keep
        self._fetch = fetch
        self._known: dict[str, Certificate] = {}
        self._failed: dict[str, Failure] = {}
        self._wanted: queue.Queue[Wish | None] = queue.Queue(WANTED_MAX)
        self._waiting: set[str] = set()
        # When one was asked for, and by whom.
        self._recent: deque[tuple[int, str]] = deque(maxlen=FETCHES_A_MINUTE_MAX)
        self._thread: threading.Thread | None = None

    def get(self, url: str, /) -> Certificate | str | None:
        """The certificate, in words why there is none, or None where it is to be fetched."""
        at_ms = self._clock()
        known = self._known.get(url)
        if known is not None and at_ms <= known.not_after_ms:
            return known
        failure = self._failed.get(url)
        return failure.words if failure is not None and failure.holds(at_ms) else None

    def load(self, stored: Mapping[str, bytes]) -> None:
        """Take what was kept before."""
        for url, pem in stored.items():
            with contextlib.suppress(certificates.Untrusted, ImportError):
                self._known[url] = certificates.load(pem)

    def want(self, url: str, base_url: str | None = None, asker: str = "") -> None:
        """Have it fetched, unless it is being, failed a moment ago, or too many are asked for.

        `asker` is the address that named it.
        """
        at_ms = self._clock()
        failure = self._failed.get(url)
        if url in self._waiting or self.get(url) is not None:
            return
        if failure is not None and failure.holds(at_ms):
            return
        askers = [one for asked_ms, one in self._recent if 0 <= at_ms - asked_ms < 60_000]
        if len(askers) == FETCHES_A_MINUTE_MAX or askers.count(asker) == FETCHES_FOR_ONE_MAX:
            return
        with contextlib.suppress(queue.Full):
            self._wanted.put_nowait(Wish(url, base_url))
            self._waiting.add(url)
            self._recent.append((at_ms, asker))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="certificates", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Fetch nothing more; what is under way ends by its own time limit."""
        with contextlib.suppress(queue.Full):
            self._wanted.put_nowait(None)

    def _run(self) -> None:
        while (wish := self._wanted.get()) is not None:
            try:
                self._obtain(wish)
            except Exception as error:
                # What nobody foresaw must not end the thread; nothing was promised.
                log.error("certificate %s: unexpected error=%s", wish.url, type(error).__name__)
                self._failed[wish.url] = Failure(self._clock() + UNREACHABLE_MS, None)
            self._waiting.discard(wish.url)

    def _obtain(self, wish: Wish) -> None:
        at_ms = self._clock()
        try:
            pem = self._proved(wish, at_ms)
        except certificates.Unreachable as error:
            self._fail(wish.url, Failure(at_ms + UNREACHABLE_MS, None), str(error))
        except certificates.Untrusted as error:
            self._fail(wish.url, Failure(at_ms + UNTRUSTED_MS, str(error)), str(error))
        else:
            self._known[wish.url] = certificates.load(pem.encode())
            while len(self._known) > KNOWN_MAX:
                del self._known[next(iter(self._known))]
            log.info("certificate %s: fetched and proved", wish.url)
            self._keep(wish.url, pem, at_ms)

    def _proved(self, wish: Wish, at_ms: int) -> str:
        parts = urlsplit(wish.url)
        place = wish.url if wish.base_url is None else wish.base_url + parts.path
        pem = self._fetch(place)
        roots = certificates.system_roots()
        return certificates.prove(pem, NAMES[parts.netloc], at_ms, roots, self._fetch)

    def _fail(self, url: str, failure: Failure, words: str) -> None:
        log.warning("certificate %s: %s", url, words)
        self._failed[url] = failure
        while len(self._failed) > FAILURES_MAX:
            del self._failed[next(iter(self._failed))]
