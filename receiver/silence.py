"""After a long silence: has a source's worker find by itself what was missed meanwhile."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from receiver.config import Source
from receiver.logs import log
from receiver.operate import By
from receiver.pages import Stopped, Wait
from receiver.process import Processor
from receiver.reconcile import Asked, Difference, Means, Run, owner_here
from store import inbox, reconciles
from store.database import Tx

if TYPE_CHECKING:
    from receiver.worker import Write

#: When it is tried once more what could not be compared, in seconds.
AGAIN_S = 600.0


def catch_up(
    source: Source,
    processor: Processor,
    write: "Write",
    clock: Callable[[], int],
    wait: Callable[[float], bool],
) -> bool:
    """Reconcile a source that has been silent for longer than its config takes as usual.

    False: it could not be compared now. `wait` returns False where the worker is stopping.
    """
    assert source.api is not None, "the caller has looked"
    silent_ms = write(partial(silent_for_ms, source=source))
    if silent_ms is None or silent_ms < (source.api.silence_s or 0) * 1000:
        return True
    hours = silent_ms // 3_600_000
    log.warning("silent, so it is reconciled", source=source.name, hours=hours)

    def pause(seconds: float, why: str) -> None:
        if not wait(seconds):
            raise Stopped("the worker is stopping")

    means = Means(
        processor=processor,
        write=write,
        clock=clock,
        wait=pause,
        owner=owner_here(),
        by=By("worker", f"nothing came for {hours} h"),
        # Whoever writes applies what is due after each commit.
        drain=lambda: None,
    )
    accounts = (source.contract.account or "",)
    asked = Asked(accounts, apply=True, resources=False)
    try:
        result = Run(source, asked, means, _Logged(source.name, pause)).run()
    except Stopped as error:
        log.warning("not reconciled", source=source.name, why=str(error))
        return False
    found = result.counts
    log.info("reconciled", source=source.name, missing=found.missing, gap=result.gap)
    return True


def silent_for_ms(tx: Tx, source: Source) -> int | None:
    """Since the newest event, or since all of them were compared; None where none ever came."""
    newest = inbox.listed(tx, endpoint=source.name, limit=1)
    if not newest:
        return None
    compared = reconciles.last(tx, source.name)
    return tx.now_ms - max(newest[0].received_ms, 0 if compared is None else compared.started_ms)


class _Logged:
    """Tells the log; each page is a moment to stop."""

    def __init__(self, source: str, pause: Wait) -> None:
        self._source = source
        self._pause = pause

    def difference(self, one: Difference) -> None:
        log.info("reconcile", source=self._source, id=one.id, type=one.type, was=one.what)

    def progress(self, part: float) -> None:
        self._pause(0, "")

    def note(self, words: str) -> None:
        log.warning("reconcile", source=self._source, note=words)
