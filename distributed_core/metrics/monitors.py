"""Watches on the process: how long the event loop was held, and how long the cycle collector ran.

Owns the histograms and the sliding maxima behind them. Costs O(1) per observation and per reading;
a reading resets nothing, so any number of scrapers may read. The server starts and stops them.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

__all__ = ["GcMonitor", "Histogram", "LagMonitor", "WindowedMax"]

logger = logging.getLogger(__name__)

LAG_BUCKETS: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
"""Upper bounds in seconds."""

PAUSE_BUCKETS: Final = (0.0001, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds in seconds."""

Clock = Callable[[], float]


class Histogram:
    """Counts of observations by upper bound, with their sum."""

    __slots__ = ("_counts", "bounds", "count", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.count = 0
        self.total = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        """Take in one value; a bound belongs to its own bucket."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.count += 1
        self.total += value

    def cumulative(self) -> list[tuple[float, int]]:
        """Pairs of upper bound and how many values were at most that, the last for infinity."""
        found = []
        below = 0
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            below += count
            found.append((bound, below))
        return found


class WindowedMax:
    """The largest value of the last ``window_seconds``, give or take one twelfth."""

    __slots__ = ("_clock", "_maxima", "_slot_seconds", "_slots")

    def __init__(self, window_seconds: float = 60.0, clock: Clock = time.monotonic) -> None:
        self._slots = 12
        self._slot_seconds = window_seconds / self._slots
        self._clock = clock
        # Pairs of slot number and its maximum, oldest first.
        self._maxima: deque[tuple[int, float]] = deque()

    def observe(self, value: float) -> None:
        """Take in one value."""
        slot = int(self._clock() / self._slot_seconds)
        maxima = self._maxima
        # What is older and no larger can never again be the maximum.
        while maxima and maxima[-1][1] <= value:
            maxima.pop()
        if not maxima or maxima[-1][0] != slot:
            maxima.append((slot, value))
        self._expire(slot)

    def value(self) -> float:
        """The maximum; 0 if nothing was observed in the window."""
        self._expire(int(self._clock() / self._slot_seconds))
        return self._maxima[0][1] if self._maxima else 0.0

    def _expire(self, slot: int) -> None:
        maxima = self._maxima
        while maxima and maxima[0][0] <= slot - self._slots:
            maxima.popleft()


class LagMonitor:
    """How late the event loop runs a timer: the time for which something held it.

    :param interval_seconds: between two measurements.
    :param warning_seconds: a lag from here on is logged.
    :param wedged_seconds: a lag that counts as wedged if it lasts, see ``problem``.
    """

    def __init__(
        self,
        interval_seconds: float = 0.02,
        warning_seconds: float = 3.0,
        wedged_seconds: float = 10.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self.interval_seconds = interval_seconds
        self.histogram = Histogram(LAG_BUCKETS)
        self._warning_seconds = warning_seconds
        self._wedged_seconds = wedged_seconds
        self._clock = clock
        self._window = WindowedMax(clock=clock)
        self._recent: deque[float] = deque((0.0, 0.0, 0.0), maxlen=3)
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due = 0.0

    def start(self) -> None:
        """Measure from now on, on the running loop."""
        if self._loop is not None:
            raise RuntimeError("the lag monitor is started already")
        self._loop = asyncio.get_running_loop()
        self._schedule()

    def stop(self) -> None:
        """Measure no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._loop = None

    def observe(self, seconds: float) -> None:
        """Take in one lag."""
        self.histogram.observe(seconds)
        self._window.observe(seconds)
        self._recent.append(seconds)
        if seconds >= self._warning_seconds:
            logger.warning(
                "The event loop was held for %.1f s; nobody was answered meanwhile",
                seconds,
                extra={"fault": "event-loop-lag"},
            )

    @property
    def count(self) -> int:
        """Measurements so far."""
        return self.histogram.count

    def maximum(self) -> float:
        """The largest lag of the last minute in seconds, the one under way included."""
        return max(self._window.value(), self._overdue())

    def problem(self) -> str | None:
        """Why the loop counts as wedged, or None.

        One long turn is a fault, not the end: wedged is a loop that was held for
        ``wedged_seconds`` three times in a row, or that answers but runs no timer.
        """
        limit = self._wedged_seconds
        if self._overdue() > 3 * limit:
            return f"the event loop has run no timer for {self._overdue():.0f} s"
        if min(self._recent) >= limit:
            held = " s, ".join(f"{seconds:.0f}" for seconds in self._recent)
            return f"the event loop was held three times in a row: {held} s"
        return None

    def _overdue(self) -> float:
        return 0.0 if self._loop is None else max(0.0, self._clock() - self._due)

    def _schedule(self) -> None:
        assert self._loop is not None
        self._due = self._clock() + self.interval_seconds
        self._timer = self._loop.call_later(self.interval_seconds, self._fire)

    def _fire(self) -> None:
        self.observe(self._overdue())
        self._schedule()


class GcMonitor:
    """Pauses of Python's cycle collector."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.pauses = Histogram(PAUSE_BUCKETS)
        self.maximum = WindowedMax()
        self.collections = [0, 0, 0]
        """Collections by generation."""
        self._clock = clock
        self._started: float | None = None

    def start(self) -> None:
        """Measure from now on."""
        if self._on_collection in gc.callbacks:
            raise RuntimeError("the collector's monitor is started already")
        gc.callbacks.append(self._on_collection)

    def stop(self) -> None:
        """Measure no more."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self._started = self._clock()
        elif self._started is not None:
            seconds = self._clock() - self._started
            self._started = None
            self.pauses.observe(seconds)
            self.maximum.observe(seconds)
            self.collections[info["generation"]] += 1
