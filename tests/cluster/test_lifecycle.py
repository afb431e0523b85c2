"""Workers, clients and schedulers that come, go and die, with real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from distributed import Client, KilledWorker, wait

from tests.cluster import tasks
from tests.cluster.harness import Cluster, SchedulerProcess, wait_until
from tests.cluster.puppet import PuppetWorker
from tests.cluster.test_futures import statuses
from tests.cluster.test_races import until


@pytest.fixture(scope="module")
def _breakable() -> Iterator[Cluster]:
    with Cluster([{"nthreads": 1}] * 3) as cluster:
        yield cluster


@pytest.fixture
def fragile(_breakable: Cluster) -> Cluster:
    """Three workers of one thread, which the test may kill: the next one gets new ones."""
    _breakable.restore(3, {"nthreads": 1})
    return _breakable


def test_kill_9_in_mid_graph_gives_the_right_result(fragile: Cluster) -> None:
    with fragile.client() as client:
        layers = client.map(tasks.slow_inc, range(40), delay=0.02, pure=False)
        for _ in range(3):
            layers = client.map(tasks.slow_inc, layers, delay=0.02, pure=False)
        total = client.submit(tasks.total, layers)
        wait(layers[0], timeout=30)
        fragile.workers[0].kill()
        assert total.result(timeout=60) == sum(range(40)) + 4 * 40
        wait_until(lambda: len(fragile.scheduler.workers()) == 2)
        # Results that only the dead worker had are computed again on demand.
        assert client.gather(layers) == [i + 4 for i in range(40)]


def test_kill_9_of_the_holder_of_finished_results(fragile: Cluster, tmp_path: Path) -> None:
    count = str(tmp_path / "count")
    with fragile.client() as client:
        holder = fragile.workers[0]
        address = fragile.addresses[holder.name]
        future = client.submit(
            tasks.note, count, "x", workers=[address], allow_other_workers=True, pure=False
        )
        wait(future, timeout=20)
        holder.kill()
        assert client.submit(tasks.add, future, "y").result(timeout=30) == "xy"
        assert Path(count).read_text() == "x\nx\n"


def test_scattered_data_of_a_dead_worker_is_lost(fragile: Cluster) -> None:
    with fragile.client() as client:
        holder = fragile.workers[0]
        address = fragile.addresses[holder.name]
        data = client.scatter([1, 2], workers=[address], hash=False)
        child = client.submit(tasks.inc, data[0], key="child-of-lost")
        assert child.result(timeout=20) == 2
        holder.kill()
        wait_until(lambda: data[0].status in ("cancelled", "lost", "error"))


def test_actor_of_a_dead_worker_errs(fragile: Cluster) -> None:
    with fragile.client() as client:
        holder = fragile.workers[0]
        future = client.submit(tasks.Counter, actor=True, workers=[fragile.addresses[holder.name]])
        counter = future.result(timeout=20)
        assert counter.increment().result() == 1
        holder.kill()
        wait_until(lambda: future.status == "error")
        with pytest.raises(Exception, match=r"(?i)actor"):
            future.result(timeout=20)


def test_retire_keeps_the_data_and_closes_the_worker(fragile: Cluster) -> None:
    with fragile.client() as client:
        leaving, *_ = fragile.workers
        address = fragile.addresses[leaving.name]
        futures = client.map(tasks.inc, range(10), workers=[address], pure=False)
        scattered = client.scatter({"only-there": 5}, workers=[address])["only-there"]
        wait(futures, timeout=20)
        retired = client.retire_workers([address], close_workers=True)
        assert list(retired) == [address]
        assert retired[address]["name"] == leaving.name
        assert leaving.wait(20) == 0
        assert client.gather([*futures, scattered]) == [*range(1, 11), 5]
        wait_until(lambda: address not in fragile.scheduler.workers())
        assert client.submit(tasks.inc, 1, pure=False).result(timeout=20) == 2


@pytest.mark.ours_only
def test_retiring_all_holders_keeps_the_data_in_one_copy(fragile: Cluster) -> None:
    with fragile.client() as client:
        leaving = [fragile.addresses[worker.name] for worker in fragile.workers[:2]]
        data = {f"kept-{number}": b"x" * 100_000 for number in range(200)}
        futures = client.scatter(data, workers=leaving, broadcast=True)
        assert all(set(who) == set(leaving) for who in client.who_has(futures.values()).values())
        retired = client.retire_workers(leaving, close_workers=True)
        assert set(retired) == set(leaving)
        assert client.gather(futures) == data
        wait_until(lambda: len(fragile.scheduler.workers()) == len(fragile.workers) - 2)
        assert all(len(who) == 1 for who in client.who_has(futures.values()).values())


@pytest.mark.ours_only
def test_retirement_makes_no_more_copies_than_needed(fragile: Cluster) -> None:
    with fragile.client() as client:
        address = fragile.addresses[fragile.workers[0].name]
        futures = client.map(
            bytes, [200_000] * 300, workers=[address], pure=False, key="only-there"
        )
        wait(futures, timeout=30)
        client.retire_workers([address], close_workers=True)
        held = client.who_has(futures)
        assert sorted(map(len, held.values())) == [1] * 300


def test_retire_by_name_and_by_number(fragile: Cluster) -> None:
    with fragile.client() as client:
        first = fragile.workers[0].name
        reply = client.sync(client.scheduler.retire_workers, names=[first], close_workers=True)
        assert [worker["name"] for worker in reply.values()] == [first]
        reply = client.sync(client.scheduler.retire_workers, n=1, close_workers=True)
        assert len(reply) == 1
        wait_until(lambda: sum(worker.alive for worker in fragile.workers) == 1)
        assert client.submit(tasks.inc, 1, pure=False).result(timeout=20) == 2


def test_sigterm_of_a_worker_lets_it_leave_in_order(fragile: Cluster) -> None:
    with fragile.client() as client:
        leaving = fragile.workers[0]
        address = fragile.addresses[leaving.name]
        futures = client.map(
            tasks.inc, range(6), workers=[address], allow_other_workers=True, pure=False
        )
        wait(futures, timeout=20)
        leaving.popen.terminate()
        leaving.wait(20)
        wait_until(lambda: len(fragile.scheduler.workers()) == 2)
        assert client.gather(futures) == list(range(1, 7))


def test_new_worker_takes_part(fragile: Cluster) -> None:
    with fragile.client() as client:
        new = fragile.add_workers({"nthreads": 3})[0]
        address = fragile.addresses[new.name]
        assert client.nthreads()[address] == 3
        assert client.submit(tasks.where, workers=[address]).result(timeout=20) == address


def test_task_that_kills_its_process_errs_as_killed_worker() -> None:
    env = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1"}
    with Cluster([{"nanny": True, "nthreads": 1}], env=env) as cluster, cluster.client() as client:
        future = client.submit(tasks.die, key="killer-1")
        with pytest.raises(KilledWorker) as caught:
            future.result(timeout=60)
        assert "killer-1" in str(caught.value)
        assert caught.value.task == "killer-1"
        # The nanny brings the worker back, and the cluster goes on.
        assert client.submit(tasks.inc, 1).result(timeout=40) == 2


@pytest.mark.ours_only
def test_only_the_task_that_ran_is_blamed_for_a_death() -> None:
    env = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1"}
    with Cluster([{"nthreads": 1}] * 3, env=env) as cluster, cluster.client() as client:
        # Innocent neighbors wait behind the killer on both workers that it takes down.
        survivor = cluster.addresses[cluster.workers[-1].name]
        victims = [a for a in cluster.addresses.values() if a != survivor]
        killer = client.submit(tasks.die, key="killer-2", workers=victims, priority=10)
        innocent = client.map(tasks.slow_inc, range(12), delay=0.01, pure=False)
        with pytest.raises(KilledWorker):
            killer.result(timeout=60)
        assert client.gather(innocent) == list(range(1, 13))


def test_restart_brings_back_workers_and_forgets_tasks() -> None:
    with Cluster([{"nanny": True, "nthreads": 1}] * 2) as cluster, cluster.client() as client:
        before = set(cluster.addresses.values())
        future = client.submit(tasks.inc, 1)
        assert future.result(timeout=20) == 2
        client.restart(timeout=60)
        wait_until(lambda: future.status == "cancelled")
        after = set(cluster.addresses.values())
        assert len(after) == 2
        assert not before & after
        assert client.submit(tasks.inc, 1).result(timeout=20) == 2

        one, other = sorted(after)
        assert client.restart_workers([one], timeout=60) == {one: "OK"}
        wait_until(lambda: len(cluster.scheduler.running()) == 2, timeout=30)
        assert other in cluster.scheduler.workers()
        assert one not in cluster.scheduler.workers()
        assert client.submit(tasks.inc, 5).result(timeout=20) == 6


def test_restart_without_nannies_times_out_with_an_error() -> None:
    with Cluster(1) as cluster, cluster.client() as client:
        with pytest.raises(TimeoutError):
            client.restart(timeout=1.5)
        cluster.workers[0].wait(20)


def test_client_shutdown_ends_scheduler_and_workers() -> None:
    with Cluster(1) as cluster:
        client = cluster.client()
        assert client.submit(tasks.inc, 1).result(timeout=20) == 2
        client.shutdown()
        assert cluster.scheduler.wait(20) == 0
        cluster.workers[0].wait(20)


def test_workers_end_when_the_scheduler_dies() -> None:
    with Cluster(1) as cluster:
        cluster.scheduler.kill()
        cluster.workers[0].wait(30)


def test_tasks_wait_for_the_first_worker() -> None:
    with Cluster(0) as cluster, cluster.client() as client:
        futures = client.map(tasks.inc, range(10))
        total = client.submit(tasks.total, futures)
        wait_until(lambda: statuses(client, total.key)[total.key] == "waiting")
        cluster.add_workers({})
        assert total.result(timeout=20) == 55


def test_worker_with_a_name_that_is_taken_is_refused(fragile: Cluster) -> None:
    name = fragile.workers[0].name
    double = fragile.add_workers({"name": name}, wait=False)[0]
    assert double.wait(30) != 0
    assert name in double.output()
    assert len(fragile.scheduler.running()) == 3


def test_idle_timeout_ends_the_scheduler() -> None:
    with SchedulerProcess("--idle-timeout", "1s") as scheduler:
        assert scheduler.wait(20) == 0


def test_client_reconnects_to_a_scheduler_started_anew() -> None:
    async def scenario() -> None:
        first = SchedulerProcess()
        client = await Client(first.address, asynchronous=True, timeout=20, set_as_default=False)
        try:
            async with PuppetWorker(first.address) as worker:
                worker.serve(value=7)
                old = client.submit(tasks.inc, 6, key="before-1")
                assert await old == 7
                first.kill()
                await until(lambda: old.status == "cancelled")
            with first, SchedulerProcess(port=first.port) as second:
                async with PuppetWorker(second.address) as worker:
                    worker.serve(value=8)
                    await until(lambda: client.status == "running", 25)
                    assert await client.submit(tasks.inc, 7, key="after-1") == 8
        finally:
            await client.close()
            first.stop()

    asyncio.run(scenario())


def test_client_whose_connection_is_cut_reconnects(
    bare: SchedulerProcess,
) -> None:
    async def scenario() -> None:
        async with PuppetWorker(bare.address) as worker, Relay(bare.address) as relay:
            worker.serve(value=7)
            client = await Client(
                relay.address, asynchronous=True, timeout=20, set_as_default=False
            )
            try:
                old = client.submit(tasks.inc, 6, key="cut-1")
                assert await old == 7
                relay.cut()
                await until(lambda: old.status == "cancelled")
                await until(lambda: client.status == "running", 25)
                again = client.submit(tasks.inc, 6, key="cut-2")
                assert await again == 7
                # What the lost connection held is not held for ever.
                await until(lambda: "cut-1" not in worker.data)
            finally:
                await client.close()

    asyncio.run(scenario())


class Relay:
    """A TCP relay in front of the scheduler whose live connections can be cut."""

    def __init__(self, target: str) -> None:
        host, port = target.rpartition("//")[2].split(":")
        self.target = (host, int(port))
        self.writers: list[asyncio.StreamWriter] = []
        self.pumps: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Relay:
        self.server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.server.close()
        self.cut()
        await asyncio.gather(*self.pumps, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self.target)
        self.writers += [writer, far_writer]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self.pumps.add(task)
            task.add_done_callback(self.pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            return
        finally:
            sink.close()

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()


def test_harness_leaves_no_process_behind() -> None:
    with Cluster([{"nanny": True, "nthreads": 1}]) as cluster:
        pids = [cluster.scheduler.pid, *(w.pid for w in cluster.workers)]
        children = [p.pid for w in cluster.workers for p in w._descendants()]
        assert children
    for pid in pids + children:
        # One whose parent went first may stay a zombie where process 1 does not reap.
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"
