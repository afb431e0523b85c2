"""Actors: state on a worker, calls through the scheduler and directly between workers."""

from __future__ import annotations

import pytest
from distributed import Client, wait

from tests.cluster import tasks
from tests.cluster.harness import Cluster, wait_until
from tests.cluster.tasks import Counter, OwnError


def call_actor(counter: Counter, by: int) -> int:
    return counter.increment(by).result()


def test_calls_and_attributes(client: Client) -> None:
    counter = client.submit(Counter, 10, actor=True).result(timeout=20)
    assert counter.increment().result() == 11
    assert counter.increment(by=5).result() == 16
    assert counter.n == 16


def test_no_call_is_lost(client: Client) -> None:
    counter = client.submit(Counter, actor=True, pure=False).result(timeout=20)
    calls = [counter.increment() for _ in range(50)]
    assert sorted(call.result() for call in calls) == list(range(1, 51))


def test_errors_of_calls(client: Client) -> None:
    counter = client.submit(Counter, actor=True).result(timeout=20)
    with pytest.raises(OwnError):
        counter.fail().result()
    assert counter.increment().result() == 1


def test_actor_as_an_argument_of_tasks(client: Client) -> None:
    future = client.submit(Counter, actor=True)
    counter = future.result(timeout=20)
    calls = client.map(call_actor, [future] * 8, range(8), pure=False)
    wait(calls, timeout=30)
    assert counter.n == sum(range(8))


def test_actor_on_a_chosen_worker(client: Client, cluster: Cluster) -> None:
    bob = cluster.addresses["bob"]
    counter = client.submit(Counter, actor=True, workers=[bob]).result(timeout=20)
    assert counter.where().result() == bob


def test_several_actors_by_map(client: Client) -> None:
    futures = client.map(Counter, range(4), actor=True)
    counters = client.gather(futures)
    assert [counter.increment().result() for counter in counters] == [1, 2, 3, 4]


def test_released_actor_goes_away(client: Client) -> None:
    future = client.submit(Counter, actor=True, pure=False)
    key = future.key
    wait(future, timeout=20)
    assert len(client.who_has([future])[key]) == 1
    future.release()
    wait_until(lambda: key not in client.who_has())
    assert client.submit(tasks.inc, 1).result(timeout=20) == 2
