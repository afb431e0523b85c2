"""How many workers are wanted, and which could go."""

from __future__ import annotations

import pytest

from cython_ext.events import DataPlaced
from distributed_core.server.adaptive import adaptive_target, workers_to_close
from tests.unit.fake_source import GIB, FakeSource


def place(source: FakeSource, key: str, *numbers: int, nbytes: int = 100) -> None:
    addresses = [f"tcp://127.0.0.1:{n}" for n in numbers]
    source.machine.handle(
        DataPlaced(1.0, "scatter", client_id="c1", who_has={key: addresses}, nbytes={key: nbytes})
    )


def cluster(n: int, **settings: object) -> FakeSource:
    source = FakeSource(**settings)
    source.add_client()
    for i in range(1, n + 1):
        source.add_worker(i)
    return source


def numbers(addresses: list[str]) -> list[int]:
    return [int(address.rpartition(":")[2]) for address in addresses]


def test_no_work_needs_no_workers() -> None:
    assert adaptive_target(FakeSource().machine) == 0
    assert adaptive_target(cluster(3).machine) == 0


def test_work_without_workers_asks_for_one_at_least() -> None:
    source = cluster(0)
    source.submit(["a-1"])
    assert adaptive_target(source.machine) == 1


def test_the_target_grows_with_the_work_but_not_beyond_the_tasks() -> None:
    source = cluster(0, unknown_task_duration=10.0)
    source.submit([f"a-{i}" for i in range(6)])
    assert adaptive_target(source.machine, target_duration=5.0) == 6
    assert adaptive_target(source.machine, target_duration=20.0) == 3
    assert adaptive_target(source.machine, target_duration=0.001) == 6


def test_the_target_counts_queued_and_processing_tasks() -> None:
    source = cluster(1, unknown_task_duration=1.0)
    source.submit([f"a-{i}" for i in range(20)])
    counts = source.machine.state.task_counts
    assert counts["queued"] and counts["processing"]
    assert adaptive_target(source.machine, target_duration=5.0) == 4


def test_the_target_divides_by_the_threads_of_a_worker() -> None:
    source = FakeSource(unknown_task_duration=1.0)
    source.add_client()
    source.add_worker(1, nthreads=4)
    source.submit([f"a-{i}" for i in range(40)])
    assert adaptive_target(source.machine, target_duration=5.0) == 2


def test_full_memory_doubles_the_workers() -> None:
    source = cluster(2)
    place(source, "x", 1, nbytes=int(1.3 * GIB))
    assert adaptive_target(source.machine) == 4


def test_the_target_keeps_workers_for_stored_data() -> None:
    source = cluster(4)
    place(source, "x", 1, nbytes=int(0.9 * GIB))
    assert adaptive_target(source.machine) == 2


@pytest.mark.parametrize("duration", [0, -1, float("nan")])
def test_an_impossible_duration_is_refused(duration: float) -> None:
    with pytest.raises(ValueError, match="target_duration"):
        adaptive_target(FakeSource().machine, duration)


def test_an_unknown_attribute_is_refused() -> None:
    with pytest.raises(ValueError, match="attribute"):
        workers_to_close(cluster(1).machine, attribute="__class__")


def test_idle_workers_may_go_and_busy_ones_not() -> None:
    source = cluster(3)
    source.submit(["a-1"])
    (busy,) = [w for w in source.machine.state.workers.values() if w.n_processing]
    closing = workers_to_close(source.machine)
    assert len(closing) == 2 and busy.address not in closing


def test_n_target_and_minimum() -> None:
    machine = cluster(5).machine
    assert len(workers_to_close(machine, n=2)) == 2
    assert len(workers_to_close(machine, target=4)) == 1
    assert workers_to_close(machine, target=9) == []
    assert workers_to_close(machine, n=0) == []
    assert workers_to_close(machine, n=-3) == []
    assert len(workers_to_close(machine, n=99)) == 5
    assert len(workers_to_close(machine, n=5, minimum=3)) == 2
    assert len(workers_to_close(machine, minimum=4)) == 1


def test_names_instead_of_addresses() -> None:
    source = FakeSource()
    source.add_worker(1, name=7)
    assert workers_to_close(source.machine, n=1, attribute="name") == [7]


def test_n_takes_busy_workers_after_idle_ones() -> None:
    source = cluster(3)
    source.submit(["a-1"])
    (busy,) = [w for w in source.machine.state.workers.values() if w.n_processing]
    assert workers_to_close(source.machine, n=3)[-1] == busy.address


def test_workers_without_unique_data_go_first() -> None:
    source = cluster(4)
    place(source, "unique", 1, nbytes=10)
    place(source, "copied", 2, 3, nbytes=1000)
    # 4 is empty, 2 or 3 holds a copy only; the last two hold what nobody else would.
    order = numbers(workers_to_close(source.machine, n=4))
    assert order[0] == 4
    assert order[1] in (2, 3)
    assert order[2] == 1


def test_both_holders_of_the_same_data_are_not_both_dispensable() -> None:
    source = cluster(3)
    place(source, "copied", 1, 2, nbytes=1000)
    place(source, "small", 3, nbytes=10)
    assert numbers(workers_to_close(source.machine, n=2))[1] == 3


def test_long_running_tasks_keep_their_worker() -> None:
    source = cluster(2)
    source.submit(["a-1"])
    (busy,) = [w for w in source.machine.state.workers.values() if w.n_processing]
    source.secede("a-1")
    assert busy.address not in workers_to_close(source.machine, n=2)


def test_memory_for_the_stored_data_stays() -> None:
    source = cluster(4)
    place(source, "x", 1, nbytes=int(0.9 * GIB))
    assert len(workers_to_close(source.machine)) == 2
    assert len(workers_to_close(source.machine, memory_ratio=1)) == 3
    assert len(workers_to_close(source.machine, memory_ratio=4)) == 0


def test_a_request_made_twice_closes_no_more() -> None:
    source = cluster(4)
    first = workers_to_close(source.machine, target=2)
    for address in first:
        source.set_status(source.machine.state.workers[address], "closing_gracefully")
    assert set(workers_to_close(source.machine, target=2)) == set(first)
