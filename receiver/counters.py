"""Plain numbers that the server counts as it goes; read by whoever asks for metrics."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence


class Histogram:
    """How many values are at most each bound; the last count is of those beyond."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Counters:
    """Since the start of the process. Written on the event loop's thread, read on any.

    The keys are names from the config and words of ours, so that their number is bounded.
    """

    def __init__(self) -> None:
        #: By source and outcome, and by source ('' for paths that are none's) and reason.
        self.deliveries: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.refusals: defaultdict[tuple[str, str], int] = defaultdict(int)
        #: Of each commit.
        self.jobs = Histogram((1, 2, 4, 8, 16, 32, 64, 128))
        self.seconds = Histogram(
            (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
        )

    def committed(self, jobs: int, seconds: float) -> None:
        """So many jobs are durable, so long after the transaction began."""
        self.jobs.add(jobs)
        self.seconds.add(seconds)
