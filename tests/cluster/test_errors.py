"""Errors that the scheduler itself makes, and those of features that are not there."""

from __future__ import annotations

import dask
import dask.array as da
import dask.dataframe as dd
import pandas as pd
import pytest
from distributed import Client, SchedulerPlugin
from distributed.client import FutureCancelledError
from distributed.scheduler import NoValidWorkerError, NoWorkerError

from tests.cluster import tasks
from tests.cluster.harness import SchedulerProcess
from tests.cluster.puppet import PuppetWorker
from tests.cluster.test_races import result, run, stock_client, until


def test_no_worker_and_no_valid_worker() -> None:
    async def scenario(scheduler: SchedulerProcess) -> None:
        async with stock_client(scheduler) as client:
            plain = client.submit(tasks.inc, 1, key="no-worker-1")
            child = client.submit(tasks.inc, plain, key="no-worker-child")
            with pytest.raises(NoWorkerError, match="no-worker-1"):
                await result(plain, 20)
            with pytest.raises(NoWorkerError):
                await result(child)
            worker = PuppetWorker(scheduler.address)
            worker.serve(value=2)
            async with worker:
                picky = client.submit(tasks.inc, 1, key="picky-1", workers=["tcp://127.0.0.1:9"])
                greedy = client.submit(tasks.inc, 1, key="greedy-1", resources={"GPU": 1})
                with pytest.raises(NoValidWorkerError, match="picky-1"):
                    await result(picky, 20)
                with pytest.raises(NoValidWorkerError):
                    await result(greedy, 20)
                assert await result(client.submit(tasks.inc, 1, key="fine-1")) == 2

    env = {"DASK_DISTRIBUTED__SCHEDULER__NO_WORKERS_TIMEOUT": "500ms"}
    with SchedulerProcess(env=env) as scheduler:
        run(lambda: scenario(scheduler))


def test_lost_dependency_in_a_submission_cancels_it(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        async with PuppetWorker(bare.address) as worker, stock_client(bare) as client:
            worker.serve(value=2)
            gone = client.submit(tasks.inc, 1, key="gone-1")
            await result(gone)
            async with stock_client(bare) as other:
                await other.cancel([other.submit(tasks.inc, 1, key="gone-1")], force=True)
                await until(lambda: gone.status == "cancelled")
            with pytest.raises(FutureCancelledError):
                await result(client.submit(tasks.inc, gone, key="on-gone-1"))
            assert await result(client.submit(tasks.inc, 1, key="still-fine-1")) == 2

    run(scenario)


@pytest.mark.ours_only
def test_p2p_shuffle_errs_and_names_the_setting(client: Client) -> None:
    frame = pd.DataFrame({"a": range(100), "b": range(100)})
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        shuffled = dd.from_pandas(frame, npartitions=4).shuffle("a")
        with pytest.raises(Exception, match=r"dataframe\.shuffle\.method"):
            shuffled.compute()
    assert client.submit(tasks.inc, 1).result(timeout=20) == 2


@pytest.mark.ours_only
def test_p2p_rechunk_errs_and_names_the_setting(client: Client) -> None:
    with dask.config.set({"array.rechunk.method": "p2p"}):
        array = da.ones((40, 40), chunks=(10, 40)).rechunk((40, 10))
        with pytest.raises(Exception, match=r"array\.rechunk\.method"):
            array.sum().compute()
    assert client.submit(tasks.inc, 1).result(timeout=20) == 2


@pytest.mark.ours_only
def test_run_on_scheduler_is_refused_and_names_the_setting(client: Client) -> None:
    with pytest.raises(Exception, match=r"security\.allow-code-on-scheduler"):
        client.run_on_scheduler(tasks.inc, 1)
    assert client.submit(tasks.inc, 1).result(timeout=20) == 2


class EmptyPlugin(SchedulerPlugin):
    name = "empty"


@pytest.mark.ours_only
def test_scheduler_plugin_is_refused_and_names_the_setting(client: Client) -> None:
    with pytest.raises(Exception, match=r"security\.allow-code-on-scheduler"):
        client.register_plugin(EmptyPlugin())
    assert client.submit(tasks.inc, 1).result(timeout=20) == 2


@pytest.mark.ours_only
def test_unknown_operation_gets_a_clear_error(bare: SchedulerProcess) -> None:
    # B1.4
    reply = bare.call("no_such_operation")
    assert reply["status"] in ("error", "uncaught-error")
    assert "no_such_operation" in reply["exception_text"]
