"""Histograms, sliding maxima, and the watches on the loop and on the cycle collector."""

from __future__ import annotations

import asyncio
import gc
import logging
import time

import pytest

from distributed_core.metrics.monitors import GcMonitor, Histogram, LagMonitor, WindowedMax


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_histogram_counts_a_bound_in_its_own_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 3.0):
        histogram.observe(value)
    assert histogram.cumulative() == [(1.0, 2), (2.0, 3), (float("inf"), 4)]
    assert (histogram.count, histogram.total) == (4, 6.0)


def test_windowed_max_forgets_after_the_window_and_not_before() -> None:
    clock = Clock()
    window = WindowedMax(60.0, clock)
    assert window.value() == 0.0
    window.observe(5.0)
    clock.now += 30
    window.observe(2.0)
    window.observe(1.0)
    assert window.value() == window.value() == 5.0
    clock.now += 24
    assert window.value() == 5.0
    clock.now += 10
    assert window.value() == 2.0
    clock.now += 60
    assert window.value() == 0.0


def test_windowed_max_holds_few_values() -> None:
    clock = Clock()
    window = WindowedMax(60.0, clock)
    for i in range(10_000):
        clock.now += 0.01
        window.observe(1.0 / (i + 1))
    assert len(window._maxima) <= 13


def test_lag_monitor_measures_a_held_loop() -> None:
    async def main() -> LagMonitor:
        monitor = LagMonitor(interval_seconds=0.002)
        monitor.start()
        with pytest.raises(RuntimeError):
            monitor.start()
        time.sleep(0.05)  # noqa: ASYNC251 - holds the loop on purpose
        async with asyncio.timeout(5):
            while monitor.count < 3:  # noqa: ASYNC110 - it counts timers, and sets no event
                await asyncio.sleep(0.002)
        monitor.stop()
        return monitor

    monitor = asyncio.run(main())
    assert monitor.count >= 3
    assert 0.04 < monitor.maximum() < 5
    assert monitor.problem() is None


def test_the_lag_under_way_counts() -> None:
    async def main() -> float:
        monitor = LagMonitor(interval_seconds=0.002)
        monitor.start()
        time.sleep(0.03)  # noqa: ASYNC251 - holds the loop on purpose
        found = monitor.maximum()
        monitor.stop()
        return found

    assert asyncio.run(main()) > 0.02


def test_wedged_is_held_again_and_again_or_without_timers() -> None:
    monitor = LagMonitor(wedged_seconds=10.0)
    monitor.observe(60.0)
    monitor.observe(60.0)
    assert monitor.problem() is None
    monitor.observe(12.0)
    problem = monitor.problem()
    assert problem is not None and "12" in problem
    monitor.observe(0.1)
    assert monitor.problem() is None


def test_wedged_is_a_loop_that_runs_no_timer() -> None:
    clock = Clock()

    async def main() -> tuple[str | None, str | None]:
        monitor = LagMonitor(wedged_seconds=10.0, clock=clock)
        monitor.start()
        before = monitor.problem()
        clock.now += 31
        after = monitor.problem()
        monitor.stop()
        return before, after

    before, after = asyncio.run(main())
    assert before is None
    assert after is not None and "no timer" in after


def test_a_long_lag_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    monitor = LagMonitor(warning_seconds=3.0)
    with caplog.at_level(logging.WARNING):
        monitor.observe(2.9)
        assert not caplog.records
        monitor.observe(3.5)
    assert "3.5 s" in caplog.text


def test_gc_monitor_counts_collections() -> None:
    monitor = GcMonitor()
    monitor.start()
    try:
        with pytest.raises(RuntimeError):
            monitor.start()
        gc.collect()
    finally:
        monitor.stop()
        monitor.stop()
    counted = monitor.pauses.count
    assert counted >= 1
    assert monitor.collections[2] >= 1
    assert monitor.maximum.value() > 0
    gc.collect()
    assert monitor.pauses.count == counted
