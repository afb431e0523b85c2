"""Futures of the stock client: submit, map, gather, errors, retries, cancel, wait and the like."""

from __future__ import annotations

import operator
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, as_completed, fire_and_forget, wait
from distributed.client import FutureCancelledError

from tests.cluster import tasks
from tests.cluster.harness import Cluster, wait_until
from tests.cluster.tasks import OwnError


def statuses(client: Client, *keys: Any) -> dict[Any, str | None]:
    """State of keys on the scheduler."""
    result: dict[Any, str | None] = client.sync(client.scheduler.get_task_status, keys=list(keys))
    return result


# --------------------------------------------------------------------------- submit, map, gather


def test_submit_and_result(client: Client) -> None:
    future = client.submit(tasks.inc, 1)
    assert future.result(timeout=20) == 2
    assert future.status == "finished"
    assert future.done()
    assert future.type is int


def test_lambdas_closures_and_main_functions_travel(client: Client) -> None:
    offset = 10
    assert client.submit(lambda x: x + offset, 1).result(timeout=20) == 11
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec("CONSTANT = 5\ndef from_main(x):\n    return x * CONSTANT", scope)
    assert client.submit(scope["from_main"], 3).result(timeout=20) == 15


def test_keyword_arguments_and_chosen_key(client: Client) -> None:
    future = client.submit(tasks.slow_inc, x=1, delay=0, key="chosen-key")
    assert future.key == "chosen-key"
    assert future.result(timeout=20) == 2


@pytest.mark.parametrize("key", [("x", 0, 1), ("a", ("b", 2)), "plain", "with space-ü-1"])
def test_key_types(client: Client, key: Any) -> None:
    future = client.submit(tasks.inc, 1, key=key)
    child = client.submit(tasks.inc, future)
    assert child.result(timeout=20) == 3
    assert list(client.who_has([future])) == [key]


def test_map_over_several_iterables(client: Client) -> None:
    futures = client.map(tasks.add, range(20), range(100, 120))
    assert client.gather(futures) == [100 + 2 * i for i in range(20)]


def test_map_in_batches_with_keywords(client: Client) -> None:
    futures = client.map(tasks.slow_inc, range(9), delay=0, batch_size=4)
    assert client.gather(futures) == list(range(1, 10))


@pytest.mark.parametrize("direct", [False, True])
def test_gather_nested_structures(client: Client, direct: bool) -> None:
    a, b = client.submit(tasks.inc, 1), client.submit(tasks.inc, 2)
    nested = {"list": [a, (b, 5)], "single": a}
    assert client.gather(nested, direct=direct) == {"list": [2, (3, 5)], "single": 2}


@pytest.mark.parametrize("direct", [False, True])
def test_gather_error_handling(client: Client, direct: bool) -> None:
    futures = [client.submit(tasks.inc, 1), client.submit(tasks.fail, 1)]
    with pytest.raises(OwnError):
        client.gather(futures, direct=direct)
    assert client.gather(futures, errors="skip", direct=direct) == [2]


def test_dependencies_between_workers(client: Client, cluster: Cluster) -> None:
    alice, bob = cluster.addresses["alice"], cluster.addresses["bob"]
    x = client.submit(tasks.inc, 1, workers=[alice])
    y = client.submit(tasks.inc, 2, workers=[bob])
    z = client.submit(tasks.add, x, y, workers=[bob])
    assert z.result(timeout=20) == 5
    assert set(client.who_has([x])[x.key]) == {alice, bob}


def test_futures_inside_arguments(client: Client) -> None:
    a, b = client.submit(tasks.inc, 1), client.submit(tasks.inc, 2)
    assert client.submit(tasks.total, [a, b, 10]).result(timeout=20) == 15
    mapping = client.submit(dict, {"a": a, "nested": {"b": [b]}})
    assert mapping.result(timeout=20) == {"a": 2, "nested": {"b": [3]}}


def test_generators_and_iteration_of_results(client: Client) -> None:
    future = client.submit(range, 5)
    assert list(future.result(timeout=20)) == [0, 1, 2, 3, 4]


def test_pure_calls_share_a_key_and_impure_ones_do_not(client: Client) -> None:
    assert client.submit(tasks.inc, 5).key == client.submit(tasks.inc, 5).key
    one, two = (client.submit(tasks.inc, 5, pure=False) for _ in range(2))
    assert one.key != two.key
    assert client.gather([one, two]) == [6, 6]


def test_same_key_again_gets_the_result_that_is_there(client: Client, tmp_path: Path) -> None:
    count = str(tmp_path / "count")
    first = client.submit(tasks.note, count, "x", key="again-1")
    assert first.result(timeout=20) == "x"
    second = client.submit(tasks.note, count, "x", key="again-1")
    assert second.result(timeout=20) == "x"
    assert Path(count).read_text() == "x\n"


def test_same_key_after_release_is_computed_again(client: Client, tmp_path: Path) -> None:
    count = str(tmp_path / "count")
    for run in range(1, 4):
        future = client.submit(tasks.note, count, "x", key="released-1")
        assert future.result(timeout=20) == "x"
        future.release()
        wait_until(lambda: statuses(client, "released-1")["released-1"] is None)
        assert Path(count).read_text() == "x\n" * run


def test_two_clients_share_a_key(client: Client, cluster: Cluster, tmp_path: Path) -> None:
    count = str(tmp_path / "count")
    with cluster.client(set_as_default=False) as other:
        mine = client.submit(tasks.note, count, "x", key="shared-1")
        theirs = other.submit(tasks.note, count, "x", key="shared-1")
        assert mine.result(timeout=20) == theirs.result(timeout=20) == "x"
        assert Path(count).read_text() == "x\n"
        mine.release()
        wait_until(lambda: len(other.futures) == 1)
        assert other.submit(tasks.add, theirs, "y").result(timeout=20) == "xy"
        del mine
    wait_until(lambda: statuses(client, "shared-1")["shared-1"] is None)


def test_release_frees_the_data(client: Client) -> None:
    future = client.submit(tasks.inc, 123)
    key = future.key
    wait(future, timeout=20)
    assert client.who_has()[key]
    del future
    wait_until(lambda: key not in client.who_has())
    wait_until(lambda: not any(key in keys for keys in client.has_what().values()))


def test_many_small_tasks(client: Client) -> None:
    futures = client.map(tasks.inc, range(800))
    assert sum(client.gather(futures)) == sum(range(1, 801))


def test_deep_chain(client: Client) -> None:
    future = client.submit(tasks.inc, 0)
    for _ in range(150):
        future = client.submit(tasks.inc, future)
    assert future.result(timeout=30) == 151


def test_raw_graph_with_get(client: Client) -> None:
    graph = {"x": 1, "y": (tasks.inc, "x"), ("z", 0): (tasks.add, "y", 10)}
    assert client.get(graph, [("z", 0), "y"]) == (12, 2) or client.get(graph, "y") == 2


def test_done_callbacks_run(client: Client) -> None:
    called = threading.Event()
    future = client.submit(tasks.inc, 1, pure=False)
    future.add_done_callback(lambda _: called.set())
    assert called.wait(20)


# ----------------------------------------------------------------------------------------- errors


def test_error_arrives_as_its_class_with_its_traceback(client: Client) -> None:
    future = client.submit(tasks.fail, 42)
    with pytest.raises(OwnError) as caught:
        future.result(timeout=20)
    assert (caught.value.message, caught.value.code) == ("it went wrong", 42)
    shown = "".join(traceback.format_tb(caught.value.__traceback__))
    assert "innermost_failure" in shown
    assert future.status == "error"
    assert isinstance(future.exception(timeout=20), OwnError)
    names = [f.name for f in traceback.extract_tb(future.traceback(timeout=20))]
    assert names[-1] == "innermost_failure"


def test_error_reaches_dependents_as_the_cause(client: Client) -> None:
    bad = client.submit(tasks.fail, 1)
    child = client.submit(tasks.inc, bad)
    grandchild = client.submit(tasks.inc, child)
    with pytest.raises(OwnError):
        grandchild.result(timeout=20)
    assert child.status == bad.status == "error"
    late = client.submit(tasks.add, bad, 1)
    with pytest.raises(OwnError):
        late.result(timeout=20)


@pytest.mark.parametrize("kind", [KeyError, MemoryError, TimeoutError, ZeroDivisionError])
def test_builtin_error_classes_arrive(client: Client, kind: type[Exception]) -> None:
    def raiser() -> None:
        raise kind("builtin")

    with pytest.raises(kind):
        client.submit(raiser, pure=False).result(timeout=20)


def test_error_that_cannot_be_pickled_still_arrives(client: Client) -> None:
    def raiser() -> None:
        class Odd(Exception):
            def __init__(self) -> None:
                super().__init__("odd one")
                self.lock = threading.Lock()

        raise Odd

    with pytest.raises(Exception, match=r"(?i)odd|pickle"):
        client.submit(raiser, pure=False).result(timeout=20)


def test_result_that_cannot_be_pickled_errs_on_gather(client: Client) -> None:
    future = client.submit(threading.Lock)
    wait(future, timeout=20)
    with pytest.raises(TypeError):
        future.result(timeout=20)


def test_function_that_is_missing_on_both_sides_errs(client: Client) -> None:
    class Breaks:
        def __reduce__(self) -> Any:
            return (operator.attrgetter("no_such_thing"), (operator,))

    # The arguments go with the graph: whoever opens them fails, and only this future errs.
    future = client.submit(tasks.add, 1, Breaks(), pure=False)
    with pytest.raises(Exception):  # noqa: B017  class differs by who opens it
        future.result(timeout=20)
    assert client.submit(tasks.inc, 1).result(timeout=20) == 2


def test_retries(client: Client, tmp_path: Path) -> None:
    count = str(tmp_path / "count")
    assert client.submit(tasks.fail_times, count, 2, "done", retries=2).result(timeout=20) == "done"
    assert len(Path(count).read_text().splitlines()) == 3


def test_retries_used_up(client: Client, tmp_path: Path) -> None:
    count = str(tmp_path / "count")
    future = client.submit(tasks.fail_times, count, 5, "done", retries=1)
    with pytest.raises(OwnError):
        future.result(timeout=20)
    assert len(Path(count).read_text().splitlines()) == 2


def test_retry_on_demand(client: Client, tmp_path: Path) -> None:
    count = str(tmp_path / "count")
    future = client.submit(tasks.fail_times, count, 1, 5)
    child = client.submit(tasks.inc, future)
    with pytest.raises(OwnError):
        child.result(timeout=20)
    client.retry([child])
    assert child.result(timeout=20) == 6
    assert future.result(timeout=20) == 5


def test_future_retry_of_one_future(client: Client, tmp_path: Path) -> None:
    count = str(tmp_path / "count")
    future = client.submit(tasks.fail_times, count, 1, 5)
    wait_until(lambda: future.status == "error")
    future.retry()
    assert future.result(timeout=20) == 5


# ----------------------------------------------------------------------------------------- cancel


def test_cancel_of_a_running_task_with_dependents(client: Client, tmp_path: Path) -> None:
    started, release = tmp_path / "started", tmp_path / "release"
    running = client.submit(tasks.gate, str(started), str(release), 1)
    child = client.submit(tasks.inc, running)
    grandchild = client.submit(tasks.inc, child)
    wait_until(started.exists)
    client.cancel([running])
    for future in (running, child, grandchild):
        wait_until(lambda future=future: future.status == "cancelled")
        with pytest.raises(FutureCancelledError):
            future.result(timeout=20)
    release.touch()
    again = client.submit(tasks.inc, 1, pure=False)
    assert again.result(timeout=20) == 2


def test_cancel_before_running(client: Client, tmp_path: Path) -> None:
    started, release, ran = (tmp_path / n for n in ("started", "release", "ran"))
    blockers = [
        client.submit(tasks.gate, str(started), str(release), i, pure=False) for i in range(4)
    ]
    wait_until(lambda: started.exists() and len(started.read_text().splitlines()) == 4)
    victim = client.submit(tasks.note, str(ran), "x", pure=False)
    victim.cancel(reason="changed-mind", msg="no longer needed")
    with pytest.raises(FutureCancelledError, match="no longer needed"):
        victim.result(timeout=20)
    # The client marks its own future at once; wait for the scheduler, too.
    wait_until(lambda: statuses(client, victim.key)[victim.key] is None)
    # The order to drop it travels to the worker on a connection of its own.
    wait_until(lambda: not any(client.run(tasks.knows, victim.key).values()))
    release.touch()
    assert client.gather(blockers) == [0, 1, 2, 3]
    assert client.submit(tasks.inc, 3, pure=False).result(timeout=20) == 4
    assert not ran.exists()


def test_cancel_of_a_finished_future(client: Client) -> None:
    future = client.submit(tasks.inc, 77)
    key = future.key
    wait(future, timeout=20)
    future.cancel()
    wait_until(lambda: future.status == "cancelled")
    wait_until(lambda: key not in client.who_has())


def test_cancel_without_force_respects_the_other_client(client: Client, cluster: Cluster) -> None:
    with cluster.client(set_as_default=False) as other:
        theirs = other.submit(tasks.inc, 5, key="both-1")
        mine = client.submit(tasks.inc, 5, key="both-1")
        wait([mine], timeout=20)
        client.cancel([mine])
        wait_until(lambda: mine.status == "cancelled")
        mine.release()
        wait_until(lambda: "both-1" not in client.futures)
        assert theirs.result(timeout=20) == 6
        forced = client.submit(tasks.inc, 5, key="both-1")
        wait([forced], timeout=20)
        client.cancel([forced], force=True)
        wait_until(lambda: theirs.status == "cancelled")


def test_same_key_after_cancel_runs(client: Client, cluster: Cluster, tmp_path: Path) -> None:
    started, release = tmp_path / "started", tmp_path / "release"
    first = client.submit(tasks.gate, str(started), str(release), 1, key="gate-again")
    wait_until(started.exists)
    first.cancel()
    wait_until(lambda: statuses(client, "gate-again")["gate-again"] is None)
    # From another client: in the first one the late news of the cancellation may hit the new run.
    with cluster.client(set_as_default=False) as other:
        second = other.submit(tasks.gate, str(started), str(release), 1, key="gate-again")
        release.touch()
        assert second.result(timeout=20) == 1


# -------------------------------------------------------------------- waiting, priorities, others


def test_as_completed_with_results_and_additions(client: Client) -> None:
    futures = client.map(tasks.slow_inc, range(5), delay=0.01, pure=False)
    stream = as_completed(futures, with_results=True)
    seen = []
    for _, result in stream:
        seen.append(result)
        if result == 1:
            stream.add(client.submit(tasks.inc, 99))
    assert sorted(seen) == [1, 2, 3, 4, 5, 100]


def test_as_completed_yields_in_order_of_completion(client: Client, tmp_path: Path) -> None:
    started, release = tmp_path / "started", tmp_path / "release"
    late = client.submit(tasks.gate, str(started), str(release), "late")
    early = client.submit(tasks.inc, 1, pure=False)
    stream = as_completed([late, early])
    assert next(stream) is early
    release.touch()
    assert next(stream) is late
    assert late.result() == "late"


def test_as_completed_raises_errors(client: Client) -> None:
    futures = [client.submit(tasks.fail, 5)]
    with pytest.raises(OwnError):
        list(as_completed(futures, with_results=True))


def test_wait_all_first_and_timeout(client: Client, tmp_path: Path) -> None:
    started, release = tmp_path / "started", tmp_path / "release"
    late = client.submit(tasks.gate, str(started), str(release), "late")
    early = client.submit(tasks.inc, 1, pure=False)
    done, not_done = wait([late, early], return_when="FIRST_COMPLETED", timeout=20)
    assert (done, not_done) == ({early}, {late})
    with pytest.raises(TimeoutError):
        wait([late], timeout=0.05)
    with pytest.raises(TimeoutError):
        late.result(timeout=0.05)
    release.touch()
    done, not_done = wait([late, early], timeout=20)
    assert not not_done


def test_fire_and_forget_runs_without_a_future(client: Client, tmp_path: Path) -> None:
    done = tmp_path / "done"
    future = client.submit(tasks.note, str(done), "ran", pure=False)
    key = future.key
    fire_and_forget(future)
    del future
    wait_until(done.exists)
    wait_until(lambda: statuses(client, key)[key] is None)


def test_fire_and_forget_outlives_its_client(
    client: Client, cluster: Cluster, tmp_path: Path
) -> None:
    started, release, done = (tmp_path / n for n in ("started", "release", "done"))
    with cluster.client(set_as_default=False) as leaving:
        first = leaving.submit(tasks.gate, str(started), str(release), str(done), pure=False)
        fire_and_forget(leaving.submit(tasks.note, first, "ran", pure=False))
        wait_until(started.exists)
    release.touch()
    wait_until(done.exists)


def test_tasks_of_a_client_that_leaves_are_dropped(client: Client, cluster: Cluster) -> None:
    with cluster.client(set_as_default=False) as leaving:
        future = leaving.submit(tasks.inc, 1, key="left-behind")
        wait([future], timeout=20)
        assert statuses(client, "left-behind") == {"left-behind": "memory"}
    wait_until(lambda: statuses(client, "left-behind") == {"left-behind": None})


def test_priorities_order_execution_on_one_thread(solo: Client, tmp_path: Path) -> None:
    started, release, order = tmp_path / "started", tmp_path / "release", tmp_path / "order"
    blocker = solo.submit(tasks.gate, str(started), str(release))
    wait_until(started.exists)
    # Each has a task group of its own, so that none waits in the scheduler's queue.
    futures = [
        solo.submit(tasks.note, str(order), str(n), priority=n, key=f"priority{i}-1")
        for i, n in enumerate((0, -5, 10, 3))
    ]
    keys = [future.key for future in futures]
    wait_until(lambda: set(statuses(solo, *keys).values()) == {"processing"})
    release.touch()
    wait([blocker, *futures], timeout=20)
    assert order.read_text().split() == ["10", "3", "0", "-5"]


def test_priorities_order_the_schedulers_queue(solo: Client, tmp_path: Path) -> None:
    started, release, order = tmp_path / "started", tmp_path / "release", tmp_path / "order"
    blocker = solo.submit(tasks.gate, str(started), str(release))
    wait_until(started.exists)
    low = solo.map(tasks.note, [str(order)] * 10, ["low"] * 10, priority=-1, pure=False)
    high = solo.map(tasks.note, [str(order)] * 10, ["high"] * 10, priority=1, pure=False)
    keys = [future.key for future in (*low, *high)]
    wait_until(lambda: list(statuses(solo, *keys).values()).count("queued") >= 18)
    release.touch()
    wait([blocker, *low, *high], timeout=20)
    # Those few that the worker had been given before may run in between.
    assert "low" not in order.read_text().split()[2:9]


def test_order_of_submission_breaks_ties(solo: Client, tmp_path: Path) -> None:
    started, release, order = tmp_path / "started", tmp_path / "release", tmp_path / "order"
    blocker = solo.submit(tasks.gate, str(started), str(release))
    wait_until(started.exists)
    futures = solo.map(tasks.note, [str(order)] * 12, [str(i) for i in range(12)], pure=False)
    release.touch()
    wait([blocker, *futures], timeout=20)
    assert order.read_text().split() == [str(i) for i in range(12)]


def test_worker_restriction(client: Client, cluster: Cluster) -> None:
    for name, address in cluster.addresses.items():
        by_address = client.map(tasks.where, range(4), workers=[address], pure=False)
        by_name = client.map(tasks.where, range(4), workers=name, pure=False)
        assert set(client.gather(by_address) + client.gather(by_name)) == {address}


def test_host_restriction(client: Client, cluster: Cluster) -> None:
    future = client.submit(tasks.where, workers="127.0.0.1", pure=False)
    assert future.result(timeout=20) in cluster.addresses.values()


def test_impossible_restriction_waits_and_can_be_cancelled(client: Client) -> None:
    future = client.submit(tasks.inc, 1, workers=["tcp://127.0.0.1:9"], key="nowhere-1")
    wait_until(lambda: statuses(client, "nowhere-1")["nowhere-1"] == "no-worker")
    future.cancel()
    wait_until(lambda: future.status == "cancelled")


def test_allow_other_workers(client: Client, cluster: Cluster) -> None:
    future = client.submit(
        tasks.where, workers=["tcp://127.0.0.1:9"], allow_other_workers=True, pure=False
    )
    assert future.result(timeout=20) in cluster.addresses.values()


def test_resources_choose_the_worker_and_limit_concurrency(
    client: Client, cluster: Cluster, tmp_path: Path
) -> None:
    started, release = tmp_path / "started", tmp_path / "release"
    lane = {"LANE": 1}
    first = client.submit(tasks.gate, str(started), str(release), resources=lane, pure=False)
    wait_until(started.exists)
    gpu = client.map(tasks.where, range(4), resources={"GPU": 1}, pure=False)
    assert set(client.gather(gpu)) == {cluster.addresses["bob"]}
    rest = client.map(tasks.where, range(4), resources=lane, pure=False)
    assert client.submit(tasks.inc, 1, workers="bob", pure=False).result(timeout=20) == 2
    assert not any(future.done() for future in rest)
    release.touch()
    assert set(client.gather(rest)) == {cluster.addresses["bob"]}
    wait([first], timeout=20)


def test_resource_that_nobody_has_waits(client: Client) -> None:
    future = client.submit(tasks.inc, 1, resources={"TPU": 1}, key="tpu-1")
    wait_until(lambda: statuses(client, "tpu-1")["tpu-1"] == "no-worker")
    future.cancel()


def test_annotations_through_a_context(client: Client, cluster: Cluster) -> None:
    import dask

    with dask.annotate(workers=cluster.addresses["alice"], retries=1):
        value = dask.delayed(tasks.where)(dask_key_name="annotated-1")
    assert client.compute(value).result(timeout=20) == cluster.addresses["alice"]


def test_result_latency_of_single_submits(client: Client) -> None:
    client.submit(tasks.inc, 0).result(timeout=20)
    start = time.monotonic()
    for i in range(20):
        assert client.submit(tasks.inc, i, pure=False).result(timeout=20) == i + 1
    assert time.monotonic() - start < 10
