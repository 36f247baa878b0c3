"""Reads a sender's lists page by page, and waits as it asks."""

from collections.abc import Callable

from receiver.client import PAGE_BYTES_MAX, Client, Elsewhere, Found, Missing, Refused, Reply
from receiver.destinations import Later
from receiver.listing import Listing, Page, Unreadable

#: Tries at one request, and the pauses between them, doubling, in seconds.
ATTEMPTS_MAX = 6
PAUSE_FIRST_S, PAUSE_S_MAX = 1.0, 60.0

#: How often a list is read anew because its place was lost.
LOST_MAX = 3

#: Waits so many seconds, and is told why.
Wait = Callable[[float, str], None]


class Stopped(Exception):
    """The sender can't be asked further; what was found and done until then stays."""


class CursorLost(Exception):
    """The sender does not know any more where the next page begins."""


class Pages:
    """One list at a sender, for one account."""

    def __init__(
        self,
        client: Client,
        listing: Listing,
        path: str,
        account: str,
        *,
        clock: Callable[[], int],
        wait: Wait,
    ) -> None:
        self.listing = listing
        self.path = path
        self.account = account
        self._client = client
        self._clock = clock
        self._wait = wait
        self._lost = 0
        self._asked: set[str] = set()

    def read(
        self,
        cursor: str | None,
        *,
        since_ms: int | None = None,
        until_ms: int | None = None,
        types: tuple[str, ...] = (),
    ) -> Page:
        """One page, the newest first. Raises Stopped or CursorLost. Never inside a transaction."""
        target = self.listing.target(
            self.path, cursor, since_ms=since_ms, until_ms=until_ms, types=types
        )
        reply = self.ask("GET", target)
        if not isinstance(reply, Found):
            self._lost += 1
            if cursor is not None and not isinstance(reply, Later) and self._lost <= LOST_MAX:
                self._asked.clear()
                raise CursorLost(reply.why)
            raise Stopped(self._why(reply))
        try:
            page = self.listing.page(reply.document, reply.headers)
            for item in page.items:
                self._check_mode(item)
        except Unreadable as error:
            raise Stopped(f"{self.path}: {error} (is api.base_url right?)") from error
        if page.next is not None:
            # Sooner or later it would be: a list that leads back to itself has no end.
            if page.next in self._asked or page.next == cursor:
                raise Stopped(f"{self.path}: the next page is one that was read before")
            self._asked.add(page.next)
        return page

    def again(self, item: object) -> str | None:
        """Ask for an item to be delivered again; why it can't be, or None. Raises Stopped."""
        try:
            reply = self.ask("POST", self.listing.again_path(self.path, item))
        except Unreadable as error:
            return str(error)
        if isinstance(reply, Later):
            raise Stopped(reply.why)
        return None if isinstance(reply, Found) else reply.why

    def one(self, path: str, resource_id: str) -> Reply:
        """One thing by itself."""
        return patiently(
            lambda: self._client.resource(
                path, resource_id, account=self.account, now_ms=self._clock()
            ),
            self._wait,
        )

    def ask(self, method: str, target: str) -> Reply:
        def once() -> Reply:
            return self._client.ask(
                method,
                target,
                account=self.account,
                now_ms=self._clock(),
                bytes_max=PAGE_BYTES_MAX,
            )

        return patiently(once, self._wait)

    def _check_mode(self, item: object) -> None:
        mode, wanted = self._client.mode_of(item), self._client.livemode
        if mode is not None and wanted is not None and mode is not wanted:
            raise Stopped(self._client.other_mode(mode).why)

    def _why(self, reply: Missing | Later | object) -> str:
        why = str(getattr(reply, "why", reply))
        if isinstance(reply, Missing):
            return f"{why}: there is no list at {self.path}, or the key may not see it"
        return why


def patiently(ask: Callable[[], Reply], wait: Wait) -> Reply:
    """Ask until there is an answer that stands, or waiting is asked for that is too long."""
    pause_s = PAUSE_FIRST_S
    for attempt in range(ATTEMPTS_MAX):
        reply = ask()
        if not isinstance(reply, Later) or isinstance(reply, Refused | Elsewhere):
            return reply
        asked_s = max(pause_s, reply.retry_after_s or 0.0)
        if asked_s > PAUSE_S_MAX or attempt == ATTEMPTS_MAX - 1:
            return reply
        wait(asked_s, reply.why)
        pause_s = min(pause_s * 2, PAUSE_S_MAX)
    raise AssertionError("the last attempt returns")
