"""Orders of messages that broke schedulers before, forced with hand-made workers.

Each test is one instance of a kind: stale or late news of a run, a holder that goes away, a
definition that changes under the same key, cancellation that reaches through a graph.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import dask
import psutil
import pytest
from distributed import Client

from tests.cluster import tasks
from tests.cluster.harness import SchedulerProcess
from tests.cluster.puppet import PuppetWorker, close_puppets
from tests.cluster.tasks import OwnError


async def until(condition: Callable[[], Any], limit: float = 10.0, what: str = "") -> Any:
    """Poll on the loop; a condition may be a coroutine function."""
    deadline = time.monotonic() + limit
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {limit} s: {what or condition}"
        await asyncio.sleep(0.005)


async def result(future: Any, limit: float = 10.0) -> Any:
    """The future's value; a hang is a failed assertion that names the key."""
    try:
        async with asyncio.timeout(limit):
            return await future
    except TimeoutError:
        raise AssertionError(f"{future.key} hangs in status {future.status}") from None


@asynccontextmanager
async def stock_client(scheduler: SchedulerProcess) -> AsyncIterator[Client]:
    client = await Client(scheduler.address, asynchronous=True, set_as_default=False, timeout=20)
    try:
        yield client
    finally:
        await client.close()


async def status_of(client: Client, key: Any) -> str | None:
    reply = await client.scheduler.get_task_status(keys=[key])
    value: str | None = reply[key]
    return value


def run(scenario: Callable[[], Any], timeout: float = 60.0) -> None:
    """Run an asynchronous scenario with a limit on its time."""

    async def limited() -> None:
        async with asyncio.timeout(timeout):
            await scenario()

    asyncio.run(limited())


# ----------------------------------------------------------------- stale and late news of a run


def test_stale_finish_of_a_task_that_is_queued_again(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        async with PuppetWorker(bare.address) as a, stock_client(bare) as c:
            futures = c.map(int, range(8), key=[f"queued-{i}" for i in range(8)])
            first = await a.expect("compute-task")
            victim = next(f for f in futures if f.key == first["key"])
            victim.release()
            await a.expect("free-keys", first["key"])
            again = c.submit(int, 5, key=first["key"])
            await until(lambda: status_of(c, first["key"]))
            await a.finish(first, value=99)
            await a.settle()
            assert not a.lost.is_set(), "thrown out for news of an old run"
            for order in a.received("compute-task"):
                if order["run_id"] != first["run_id"]:
                    await a.finish(order, value=5)
            a.serve(value=5)
            for future in [again, *(f for f in futures if f is not victim)]:
                await result(future)

    run(scenario)


def test_stale_finish_of_a_task_that_waits_again(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        async with PuppetWorker(bare.address, nthreads=4) as a, stock_client(bare) as c:
            dep = c.submit(int, 1, key="dep-w")
            child = c.submit(tasks.inc, dep, key="child-w")
            await a.finish(await a.expect("compute-task", "dep-w"))
            old = await a.expect("compute-task", "child-w")
            child.release()
            await a.expect("free-keys", "child-w")
            dep.release()
            await a.expect("free-keys", "dep-w")
            dep = c.submit(int, 1, key="dep-w")
            child = c.submit(tasks.inc, dep, key="child-w")
            dep_order = await a.expect("compute-task", "dep-w")
            await until(lambda: _is(c, "child-w", "waiting"))
            await a.finish(old, value=2)
            await a.settle()
            await a.finish(dep_order)
            # The late result may be taken as data or dropped: either way the child ends well.
            a.serve(value=2)
            for order in a.received("compute-task", "child-w"):
                if order["run_id"] != old["run_id"]:
                    await a.finish(order, value=2)
            assert await result(child) == 2
            assert not a.lost.is_set()

    run(scenario)


async def _is(client: Client, key: Any, state: str) -> bool:
    return await status_of(client, key) == state


@pytest.mark.parametrize(
    ("op", "moment"),
    [
        (op, moment)
        for op in ("task-finished", "task-erred", "long-running", "reschedule")
        for moment in ("forgotten", "memory", "elsewhere")
        # A late outcome from a former owner has tests of its own, below.
        if moment != "elsewhere" or op in ("long-running", "reschedule")
    ],
)
def test_stale_news_changes_nothing(bare: SchedulerProcess, op: str, moment: str) -> None:
    # B1.3, B2.10
    async def scenario() -> None:
        async with PuppetWorker(bare.address) as a, stock_client(bare) as c:
            future = c.submit(int, 7, key="stale-1")
            order = await a.expect("compute-task", "stale-1")
            b = PuppetWorker(bare.address)
            try:
                if moment == "forgotten":
                    future.release()
                    await a.expect("free-keys", "stale-1")
                elif moment == "memory":
                    await a.finish(order, value=7)
                    await result(future)
                else:
                    # The run moves to B because A hands it back, and A is full meanwhile.
                    blocker = c.submit(int, 0, key="blocker-1", workers=[a.address])
                    await a.expect("compute-task", "blocker-1")
                    await b.start()
                    await a.set_status("paused")
                    await a.send("reschedule", key="stale-1", stimulus_id="reschedule-1")
                    moved = await b.expect("compute-task", "stale-1")
                await _say(a, op, order)
                await a.settle()
                assert not a.lost.is_set()
                if moment == "elsewhere":
                    await b.settle()
                    assert not b.received("free-keys", "stale-1")
                    await b.finish(moved, value=7)
                    blocker.release()
                if moment != "forgotten":
                    assert await result(future) == 7
                elif op == "task-finished":
                    # Not wanted any more: the worker is told to drop what it has.
                    await a.expect("free-keys", "stale-1")
                b_orders = len(b.received("compute-task", "stale-1"))
                assert len(a.received("compute-task", "stale-1")) == 1
                assert b_orders == (1 if moment == "elsewhere" else 0)
                a.serve()
                b.serve()
                await a.set_status("running")
                await result(c.submit(int, 8, key="other-1"))
            finally:
                await b.close()

    run(scenario)


async def _say(worker: PuppetWorker, op: str, order: dict[str, Any]) -> None:
    if op == "task-finished":
        await worker.finish(order, value=7)
    elif op == "task-erred":
        await worker.fail(order, OwnError("stale", 1))
    elif op == "long-running":
        await worker.send(
            op,
            key=order["key"],
            run_id=order["run_id"],
            compute_duration=0.1,
            stimulus_id="long-running-1",
        )
    else:
        await worker.send(op, key=order["key"], stimulus_id="reschedule-2")


def test_late_result_of_a_run_that_was_taken_back_is_not_counted_on(
    bare: SchedulerProcess,
) -> None:
    # The worker was told to free that run, so its data is on the way out.
    async def scenario() -> None:
        async with PuppetWorker(bare.address) as a, stock_client(bare) as c:
            future = c.submit(int, 7, key="late-1")
            order = await a.expect("compute-task", "late-1")
            async with PuppetWorker(bare.address) as b:
                await a.set_status("paused")
                await a.send("reschedule", key="late-1", stimulus_id="reschedule-3")
                moved = await b.expect("compute-task", "late-1")
                await a.finish(order, value=99)
                await a.expect("free-keys", "late-1")
                await a.settle()
                await b.settle()
                assert not a.lost.is_set()
                assert not b.received("free-keys", "late-1")
                await b.finish(moved, value=7)
                assert await result(future) == 7
                assert (await c.who_has([future]))["late-1"] == (b.address,)

    run(scenario)


@pytest.mark.ours_only
def test_late_result_of_a_worker_that_came_back_is_data(bare: SchedulerProcess) -> None:
    # B3.3: nobody told it to free that run, and another worker has not ended the next one.
    async def scenario() -> None:
        async with PuppetWorker(bare.address) as a, stock_client(bare) as c:
            future = c.submit(int, 7, key="late-3")
            order = await a.expect("compute-task", "late-3")
            async with PuppetWorker(bare.address) as b:
                a.cut()
                moved = await b.expect("compute-task", "late-3")
                await a.start()
                await a.finish(order, value=7)
                assert await result(future) == 7
                assert (await c.who_has([future]))["late-3"] == (a.address,)
                # The other run is withdrawn; if it ends all the same, nobody is hurt.
                await b.finish(moved, value=7)
                await b.settle()
                assert not b.lost.is_set()
                child = c.submit(tasks.inc, future, key="late-child")
                a.serve(value=8)
                b.serve(value=8)
                for worker in (a, b):
                    for message in worker.received("compute-task", "late-child"):
                        await worker.finish(message, value=8)
                assert await result(child) == 8

    run(scenario)


@pytest.mark.ours_only
def test_late_error_of_the_former_owner_is_stale(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        async with PuppetWorker(bare.address) as a, stock_client(bare) as c:
            future = c.submit(int, 7, key="late-2")
            order = await a.expect("compute-task", "late-2")
            async with PuppetWorker(bare.address) as b:
                await a.set_status("paused")
                await a.send("reschedule", key="late-2", stimulus_id="reschedule-4")
                moved = await b.expect("compute-task", "late-2")
                await a.fail(order, OwnError("late", 1))
                await a.settle()
                assert future.status == "pending"
                await b.finish(moved, value=7)
                assert await result(future) == 7

    run(scenario)


def test_reschedule_goes_through_the_wire(bare: SchedulerProcess) -> None:
    # B1.1: released, waiting and processing again under the id of the message.
    async def scenario() -> None:
        async with PuppetWorker(bare.address) as a, stock_client(bare) as c:
            future = c.submit(int, 7, key="again-r")
            order = await a.expect("compute-task", "again-r")
            await a.send("reschedule", key="again-r", stimulus_id="my-reschedule-1")
            second = await a.expect("compute-task", "again-r")
            assert second["run_id"] != order["run_id"]
            story = await c.scheduler.get_story(keys_or_stimuli=["again-r"])
            steps = [tuple(entry[1:3]) for entry in story if entry[4] == "my-reschedule-1"]
            assert steps[0] == ("processing", "released")
            assert ("waiting", "processing") in steps
            await a.finish(second, value=7)
            assert await result(future) == 7
            assert not a.lost.is_set()

    run(scenario)


def test_reschedule_after_long_running(bare: SchedulerProcess) -> None:
    # B1.1
    async def scenario() -> None:
        async with PuppetWorker(bare.address) as a, stock_client(bare) as c:
            future = c.submit(int, 7, key="seceded-1")
            order = await a.expect("compute-task", "seceded-1")
            await _say(a, "long-running", order)
            await a.send("reschedule", key="seceded-1", stimulus_id="reschedule-5")
            await a.finish(await a.expect("compute-task", "seceded-1"), value=7)
            assert await result(future) == 7

    run(scenario)


def test_steal_response_that_nobody_asked_for(bare: SchedulerProcess) -> None:
    # B0.1: an answer without an open request has no effect.
    async def scenario() -> None:
        async with PuppetWorker(bare.address) as a, stock_client(bare) as c:
            future = c.submit(int, 7, key="not-stolen-1")
            order = await a.expect("compute-task", "not-stolen-1")
            for state in ("ready", None, "memory", "executing"):
                await a.send(
                    "steal-response", key="not-stolen-1", state=state, stimulus_id="steal-999"
                )
            await a.settle()
            assert len(a.received("compute-task", "not-stolen-1")) == 1
            await a.finish(order, value=7)
            assert await result(future) == 7

    run(scenario)


def test_long_running_frees_the_slot_of_a_queued_task(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        async with PuppetWorker(bare.address) as a, stock_client(bare) as c:
            futures = c.map(int, range(8), key=[f"slot-{i}" for i in range(8)])
            orders = []
            for _ in range(8):
                order = await a.expect("compute-task")
                orders.append(order)
                await _say(a, "long-running", order)
            for order in orders:
                await a.finish(order)
            for future in futures:
                await result(future)

    run(scenario)


def test_finish_of_a_cancelled_task_is_freed(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        async with PuppetWorker(bare.address) as a, stock_client(bare) as c:
            future = c.submit(int, 7, key="cancelled-1")
            order = await a.expect("compute-task", "cancelled-1")
            await future.cancel()
            await a.expect("free-keys", "cancelled-1")
            await a.finish(order)
            await a.expect("free-keys", "cancelled-1")
            assert await status_of(c, "cancelled-1") is None

    run(scenario)


# --------------------------------------------------------------------- holders that are not there


@pytest.mark.parametrize("farewell", ["cut", "close-stream"])
def test_lost_dependency_of_queued_tasks_is_computed_again(
    bare: SchedulerProcess, farewell: str
) -> None:
    async def scenario() -> None:
        a, d = PuppetWorker(bare.address), PuppetWorker(bare.address)
        async with a, d, stock_client(bare) as c:
            dep = c.submit(int, 7, key="dep-q", workers=[d.address], allow_other_workers=True)
            await d.finish(await d.expect("compute-task", "dep-q"), value=7)
            await result(dep)
            keys = [f"child-{i}" for i in range(20)]
            futures = c.map(lambda i, x: i, range(20), x=dep, key=keys)
            await a.expect("compute-task")
            await until(lambda: _any_queued(c, keys), what="some children are queued")
            if farewell == "cut":
                d.cut()
            else:
                await d.send("close-stream")
            again = await a.expect("compute-task", "dep-q")
            await a.finish(again, value=7)
            freed = {k for m in a.received("free-keys") for k in m["keys"]}
            a.serve()
            for order in a.received("compute-task"):
                if order["key"] not in freed | {"dep-q"} and order["key"] not in a.data:
                    await a.finish(order)
            for future in futures:
                await result(future)

    run(scenario)


async def _any_queued(client: Client, keys: list[str]) -> bool:
    states = await client.scheduler.get_task_status(keys=keys)
    return "queued" in states.values()


@pytest.mark.ours_only
def test_loose_restriction_to_a_worker_that_is_gone(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        a, b = PuppetWorker(bare.address), PuppetWorker(bare.address)
        await a.start()
        async with stock_client(bare) as c:
            left = c.submit(int, 1, key="loose-1", workers=[a.address], allow_other_workers=True)
            await a.expect("compute-task", "loose-1")
            await a.close()
            never = c.submit(
                int, 2, key="loose-2", workers=["tcp://127.0.0.1:9"], allow_other_workers=True
            )
            by_host = c.submit(
                int, 3, key="loose-3", workers=["no-such-host"], allow_other_workers=True
            )
            b.serve()
            await b.start()
            try:
                for future in (left, never, by_host):
                    await result(future)
            finally:
                await b.close()

    run(scenario)


def test_strict_restriction_waits_for_its_worker(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        a = PuppetWorker(bare.address, name="first")
        a.serve()
        async with a, stock_client(bare) as c:
            future = c.submit(int, 1, key="strict-1", workers=["second"])
            other = c.submit(int, 1, key="free-1")
            await result(other)
            assert await status_of(c, "strict-1") == "no-worker"
            b = PuppetWorker(bare.address, name="second")
            b.serve()
            async with b:
                # A name cannot be resolved before its worker is there; stock takes it for a host.
                if await status_of(c, "strict-1") == "no-worker":
                    await future.cancel()
                else:
                    await result(future)

    run(scenario)


def test_add_keys_of_an_unknown_key_is_answered_by_removal(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        async with PuppetWorker(bare.address) as a:
            await a.send("add-keys", keys=["nobody-wants-1"], stimulus_id="add-keys-1")
            await a.expect("remove-replicas", "nobody-wants-1")

    run(scenario)


@pytest.mark.ours_only
def test_add_keys_completes_a_task_that_is_processing_there(bare: SchedulerProcess) -> None:
    # B2.6
    async def scenario() -> None:
        async with PuppetWorker(bare.address) as a, stock_client(bare) as c:
            future = c.submit(int, 7, key="fetched-1")
            await a.expect("compute-task", "fetched-1")
            a.data["fetched-1"] = 7
            await a.send("add-keys", keys=["fetched-1"], stimulus_id="add-keys-2")
            assert await result(future) == 7

    run(scenario)


@pytest.mark.ours_only
def test_error_report_about_a_dependency_is_acted_on(bare: SchedulerProcess) -> None:
    # B2.8: the worker cannot open what it fetched; without retries left the key errs.
    async def scenario() -> None:
        a, b = PuppetWorker(bare.address), PuppetWorker(bare.address)
        async with a, b, stock_client(bare) as c:
            dep = c.submit(int, 7, key="bad-dep", workers=[a.address])
            await a.finish(await a.expect("compute-task", "bad-dep"), value=7)
            await result(dep)
            child = c.submit(tasks.inc, dep, key="bad-child", workers=[b.address])
            order = await b.expect("compute-task", "bad-child")
            assert order["who_has"] == {"bad-dep": (a.address,)}
            report = {"key": "bad-dep", "run_id": -1}
            await b.fail(report, OwnError("cannot open", 3))
            with pytest.raises(OwnError):
                await result(child)

    run(scenario)


@pytest.mark.ours_only
def test_holder_without_the_data_leads_to_a_new_run(bare: SchedulerProcess) -> None:
    # B4.6: the scheduler believes A holds the key, A does not, and the client asks for it.
    async def scenario() -> None:
        async with PuppetWorker(bare.address) as a, stock_client(bare) as c:
            future = c.submit(int, 7, key="vanished-1")
            await a.finish(await a.expect("compute-task", "vanished-1"), value=7)
            await until(lambda: future.status == "finished")
            del a.data["vanished-1"]
            a.serve(value=7)
            assert await result(future, 20) == 7
            assert len(a.received("compute-task", "vanished-1")) == 2

    run(scenario)


def test_refresh_who_has(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        a, b = PuppetWorker(bare.address), PuppetWorker(bare.address)
        async with a, b, stock_client(bare) as c:
            future = c.submit(int, 7, key="where-1", workers=[a.address])
            await a.finish(await a.expect("compute-task", "where-1"), value=7)
            await result(future)
            await b.send("request-refresh-who-has", keys=["where-1"], stimulus_id="find-missing-1")
            answer = await b.expect("refresh-who-has")
            assert answer["who_has"] == {"where-1": (a.address,)}

    run(scenario)


def test_remaining_workers_are_told_of_a_loss(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        async with PuppetWorker(bare.address) as a, PuppetWorker(bare.address) as b:
            b.cut()
            told = await a.expect("remove-worker")
            assert told["worker"] == b.address

    run(scenario)


def test_retirement_copies_first_and_closes_then(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        a, b = PuppetWorker(bare.address), PuppetWorker(bare.address)
        async with a, b, stock_client(bare) as c:
            b.serve()
            future = c.submit(int, 7, key="moved-1", workers=[a.address])
            await a.finish(await a.expect("compute-task", "moved-1"), value=7)
            await result(future)
            retirement = asyncio.ensure_future(
                c.scheduler.retire_workers(workers=[a.address], close_workers=True)
            )
            asked = await a.expect("worker-status-change")
            assert asked["status"] == "closing_gracefully"
            await a.set_status("closing_gracefully")
            a.serve()
            copied = await b.expect("acquire-replicas")
            assert copied["who_has"] == {"moved-1": (a.address,)}
            await a.expect("close")
            a.cut()
            reply = await asyncio.wait_for(retirement, 10)
            assert set(reply) == {a.address}
            assert (await c.who_has([future]))["moved-1"] == (b.address,)

    run(scenario)


# ---------------------------------------------------------------- graphs that change or are undone


@dask.delayed
def plus_one(x: int) -> int:
    return x + 1


@pytest.mark.ours_only
def test_cancel_reaches_through_tasks_that_nobody_holds(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        async with PuppetWorker(bare.address, nthreads=4) as a, stock_client(bare) as c:
            unrelated = c.submit(int, 5, key="unrelated-1")
            await a.finish(await a.expect("compute-task", "unrelated-1"), value=5)
            await result(unrelated)
            x = c.submit(int, 1, key="base-1")
            await a.expect("compute-task", "base-1")
            middle = plus_one(dask.delayed(x), dask_key_name="middle-1")
            middle = plus_one(middle, dask_key_name="middle-2")
            side = c.submit(tasks.inc, x, key="side-1")
            top = c.compute(plus_one(middle, dask_key_name="top-1"), optimize_graph=False)
            await until(lambda: _is(c, "top-1", "waiting"))
            await x.cancel()
            for future in (x, top, side):
                await until(lambda future=future: future.status == "cancelled")
            for key in ("base-1", "middle-1", "middle-2", "top-1", "side-1"):
                await until(lambda key=key: _is_gone(c, key), what=f"{key} is forgotten")
            assert unrelated.status == "finished"
            new = c.submit(int, 9, key="new-1")
            await a.finish(await a.expect("compute-task", "new-1"), value=9)
            assert await result(new) == 9

    run(scenario)


async def _is_gone(client: Client, key: str) -> bool:
    return await status_of(client, key) is None


def test_same_key_with_another_definition_meanwhile(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        async with PuppetWorker(bare.address, nthreads=2) as a, stock_client(bare) as c:
            keep = c.submit(int, 7, key="keep-1")
            await a.finish(await a.expect("compute-task", "keep-1"), value=7)
            await result(keep)
            add = dask.delayed(lambda *values: sum(values))
            for stage in ("waiting", "processing", "memory"):
                p, q, k = (f"{name}-{stage}" for name in "pqk")
                one = plus_one(0, dask_key_name=p)
                first = c.compute(add(one, dask_key_name=k), optimize_graph=False)
                order = await a.expect("compute-task", p)
                if stage != "waiting":
                    await a.finish(order, value=1)
                    order = await a.expect("compute-task", k)
                if stage == "memory":
                    await a.finish(order, value=1)
                    await result(first)
                two = plus_one(1, dask_key_name=q)
                second = c.compute(add(one, two, dask_key_name=k), optimize_graph=False)
                await until(lambda second=second: status_of(c, second.key))
                for old in list(a.inbox.unread):
                    if old["op"] == "compute-task":
                        await a.finish(old)
                if stage != "memory":
                    await a.finish(order)
                a.serve()
                for future in (first, second):
                    # Either definition may win, or an error may say so; a hang may not.
                    await until(lambda f=future: f.status != "pending")
                a.automatic = None
                assert not a.lost.is_set()
            assert keep.status == "finished"

    run(scenario)


def test_key_resubmitted_at_once_after_release(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        a = PuppetWorker(bare.address, nthreads=2)
        a.serve(value=3)
        async with a, stock_client(bare) as c:
            for _ in range(60):
                future = c.submit(int, 3, key="flapping-1")
                future.release()
            last = c.submit(int, 3, key="flapping-1")
            assert await result(last) == 3
            assert not a.lost.is_set()

    run(scenario)


def test_free_comes_before_the_next_order_of_the_same_key(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        async with PuppetWorker(bare.address) as a, stock_client(bare) as c:
            future = c.submit(int, 7, key="retried-1", retries=1)
            first = await a.expect("compute-task", "retried-1")
            await a.fail(first, OwnError("once", 1))
            second = await a.expect("compute-task", "retried-1")
            ops = [
                m["op"]
                for m in a.inbox.all
                if m.get("key") == "retried-1" or "retried-1" in m.get("keys", ())
            ]
            assert ops == ["compute-task", "free-keys", "compute-task"]
            assert second["run_id"] != first["run_id"]
            await a.finish(second, value=7)
            assert await result(future) == 7

    run(scenario)


def test_orders_carry_exactly_the_fields_that_workers_accept(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        a, b = PuppetWorker(bare.address), PuppetWorker(bare.address)
        async with a, b, stock_client(bare) as c:
            dep = c.submit(int, 7, key="fields-1", workers=[a.address])
            first = await a.expect("compute-task", "fields-1")
            await a.finish(first, nbytes=1234)
            child = c.submit(tasks.inc, dep, key=("fields", 2), workers=[b.address], priority=4)
            order = await b.expect("compute-task", ("fields", 2))
            names = {
                *("op", "key", "run_id", "priority", "who_has", "nbytes", "run_spec"),
                *("resource_restrictions", "actor", "annotations", "span_id", "stimulus_id"),
            }
            assert set(order) == set(first) == names
            assert order["who_has"] == {"fields-1": (a.address,)}
            assert order["nbytes"] == {"fields-1": 1234}
            assert order["priority"][0] == -4
            assert order["annotations"]["priority"] == 4
            assert order["actor"] is False
            assert order["run_spec"].value().key == ("fields", 2)
            await b.finish(order)
            await result(child)
            child.release()
            freed = await b.expect("free-keys", ("fields", 2))
            assert set(freed) == {"op", "keys", "stimulus_id"}

    run(scenario)


# --------------------------------------------------------------------------- slow growth, refusal


@pytest.mark.ours_only
def test_new_names_for_ever_leave_little_behind(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        scheduler = psutil.Process(bare.pid)
        a = PuppetWorker(bare.address, nthreads=8)
        a.serve()
        sizes = []
        async with a, stock_client(bare) as c:
            for turn in range(6):
                futures = c.map(int, range(1500), key=[f"name{turn}x{i}y" for i in range(1500)])
                for future in futures:
                    await result(future, 30)
                last = futures[-1].key
                del futures, future
                await until(lambda last=last: _is_gone(c, last), 30)
                a.inbox.all.clear()
                a.inbox.unread.clear()
                sizes.append(scheduler.memory_info().rss)
        growth = (sizes[-1] - sizes[2]) / (1500 * 3)
        assert growth < 700, f"{growth:.0f} bytes per finished task stay behind: {sizes}"

    run(scenario, 100)


def test_memory_error_for_inputs_larger_than_any_worker(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        a = PuppetWorker(bare.address, memory_limit=10_000_000)
        async with a, stock_client(bare) as c:
            dep = c.submit(int, 7, key="huge-1")
            await a.finish(await a.expect("compute-task", "huge-1"), nbytes=10**12)
            child = c.submit(tasks.inc, dep, key="huge-child")
            with pytest.raises(MemoryError):
                await result(child)
            assert not a.received("compute-task", "huge-child")

    run(scenario)


def test_paused_worker_gets_nothing_until_it_runs(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        async with PuppetWorker(bare.address) as a, stock_client(bare) as c:
            await a.set_status("paused")
            await a.settle()
            future = c.submit(int, 7, key="held-1")
            await until(lambda: status_of(c, "held-1"))
            await a.settle()
            assert not a.received("compute-task")
            await a.set_status("running")
            await a.finish(await a.expect("compute-task", "held-1"), value=7)
            assert await result(future) == 7

    run(scenario)


def test_no_order_before_the_worker_says_it_runs(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        a = PuppetWorker(bare.address)
        async with stock_client(bare) as c:
            await a.register()
            future = c.submit(int, 7, key="early-1")
            await until(lambda: status_of(c, "early-1"))
            await a.settle()
            assert not a.received("compute-task")
            await a.set_status("running")
            await a.finish(await a.expect("compute-task", "early-1"), value=7)
            assert await result(future) == 7
        await close_puppets(a)

    run(scenario)


def test_heartbeat_of_an_unknown_worker_is_missing(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        a = await PuppetWorker(bare.address).listen()
        assert (await a.heartbeat())["status"] == "missing"
        await a.start()
        reply = await a.heartbeat(executing={("x", 1): 0.5}, extensions={})
        assert reply["status"] == "OK"
        assert abs(reply["time"] - time.time()) < 5
        assert reply["heartbeat-interval"] == 0.5
        await a.close()

    run(scenario)


def test_retry_goes_to_another_holder_of_orders(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        async with PuppetWorker(bare.address) as a, stock_client(bare) as c:
            future = c.submit(int, 7, key="on-demand-1")
            await a.fail(await a.expect("compute-task", "on-demand-1"), OwnError("no", 1))
            with pytest.raises(OwnError):
                await result(future)
            await c.retry([future])
            await a.expect("free-keys", "on-demand-1")
            await a.finish(await a.expect("compute-task", "on-demand-1"), value=7)
            assert await result(future) == 7

    run(scenario)
