"""Fixtures of the cluster tests, and the children's logs when a test fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from distributed import Client

from tests.cluster import harness
from tests.cluster.harness import STOCK, Cluster, SchedulerProcess


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="the stock scheduler is known to behave differently here")
    for item in items:
        if "tests/cluster/" in item.path.as_posix():
            item.add_marker(pytest.mark.cluster)
            if STOCK and item.get_closest_marker("ours_only"):
                item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.failed:
        for process in harness.live_processes():
            state = "alive" if process.alive else f"ended with {process.popen.returncode}"
            report.sections.append((f"log of {process.label} ({state})", process.tail()))
    return report


class _Shared:
    """A cluster that many tests use, made anew if a test left it in pieces."""

    def __init__(self, workers: list[dict[str, Any]]) -> None:
        self.specs = workers
        self.cluster: Cluster | None = None

    def get(self) -> Cluster:
        if self.cluster is not None and not self.cluster.healthy(len(self.specs)):
            self.close()
        if self.cluster is None:
            self.cluster = Cluster([dict(spec) for spec in self.specs])
        return self.cluster

    def close(self) -> None:
        if self.cluster is not None:
            self.cluster.close()
            self.cluster = None


@pytest.fixture(scope="session")
def _pair() -> Iterator[_Shared]:
    shared = _Shared(
        [
            {"name": "alice", "nthreads": 2},
            {"name": "bob", "nthreads": 2, "options": ("--resources", "GPU=2,LANE=1")},
        ]
    )
    yield shared
    shared.close()


@pytest.fixture(scope="session")
def _solo() -> Iterator[_Shared]:
    shared = _Shared([{"name": "solo", "nthreads": 1}])
    yield shared
    shared.close()


@pytest.fixture
def cluster(_pair: _Shared) -> Iterator[Cluster]:
    """Shared: workers `alice` and `bob` of two threads; bob has resources GPU=2, LANE=1.

    A test may not leave a worker or the scheduler in another state, nor a task behind.
    """
    cluster = _pair.get()
    yield cluster
    assert cluster.healthy(2), "the test left the shared cluster in pieces"


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    """A fresh client of the shared cluster."""
    with cluster.client() as client:
        yield client


@pytest.fixture
def solo(_solo: _Shared) -> Iterator[Client]:
    """A fresh client of a shared cluster with a single worker of one thread."""
    cluster = _solo.get()
    with cluster.client() as client:
        yield client


@pytest.fixture(scope="module")
def _bare() -> Iterator[list[SchedulerProcess]]:
    holder: list[SchedulerProcess] = []
    yield holder
    for scheduler in holder:
        scheduler.stop()


@pytest.fixture
def bare(_bare: list[SchedulerProcess]) -> Iterator[SchedulerProcess]:
    """A scheduler without workers, shared by the tests of a module; puppets must be gone after."""
    if _bare and not (_bare[0].alive and not _bare[0].workers()):
        _bare.pop().stop()
    if not _bare:
        _bare.append(SchedulerProcess())
    scheduler = _bare[0]
    yield scheduler
    assert scheduler.alive, "the scheduler ended during the test"
