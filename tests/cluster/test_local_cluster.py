"""LocalCluster: the daemon and stock workers as children that never outlive their owner."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest
from distributed import Client, get_worker
from distributed.client import WorkerStartTimeoutError
from distributed.core import Status

from distributed_core import LocalCluster
from distributed_core.deploy.local_cluster import StartError
from tests.cluster.harness import ROOT, child_environment, wait_until


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


# Processes of this one's that were there when the test began, such as clusters of other modules.
_before: set[psutil.Process] = set()


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """Descendants of ``pid``, or those of this process that the test has made."""
    found = psutil.Process(pid).children(recursive=True)
    return [process for process in found if process not in _before]


def child_running(module: str) -> psutil.Process:
    return next(p for p in descendants() if p.cmdline()[1:3] == ["-m", module])


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test ends without the processes and files that it did not begin with."""
    for name in list(os.environ):
        if name.startswith(("DASK_", "DISTRIBUTED_CORE_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    _before.clear()
    _before.update(psutil.Process().children(recursive=True))
    yield
    wait_until(lambda: all(is_gone(process) for process in descendants()), 15, "no process is left")
    wait_until(lambda: not list(tmp_path.iterdir()), 15, "no file is left")


def local(**options: Any) -> LocalCluster:
    return LocalCluster(**{"n_workers": 1, "threads_per_worker": 1, "nanny": False, **options})


def test_work_and_what_it_says_of_itself() -> None:
    with local(n_workers=2, name="here") as cluster, cluster.get_client() as client:
        assert client.submit(sum, [1, 2]).result(timeout=20) == 3
        assert cluster.status is Status.running
        assert "'here'" in repr(cluster)
        assert "running, workers=2, threads=2" in repr(cluster)
        names = {worker["name"] for worker in client.scheduler_info()["workers"].values()}
        assert names == {"here-0", "here-1"}
        assert cluster.scheduler_address.startswith("tcp://127.0.0.1:")
        assert cluster.dashboard_link == client.dashboard_link
        with urllib.request.urlopen(cluster.http_address + "/health", timeout=10) as response:
            assert response.status == 200
        assert set(cluster.logs()) == {"scheduler", "here-0", "here-1"}
    assert cluster.status is Status.closed
    assert cluster.logs() == {}
    cluster.close()


def test_the_one_line_way_in() -> None:
    client = LocalCluster(n_workers=1, threads_per_worker=1).get_client()
    processes = descendants()
    gc.collect()
    assert client.submit(sum, [1, 2]).result(timeout=20) == 3
    client.shutdown()
    assert client.status == "closed"
    assert all(is_gone(process) for process in processes)


def test_a_dropped_cluster_ends() -> None:
    cluster = local(n_workers=0)
    processes = descendants()
    assert processes
    del cluster
    gc.collect()
    wait_until(lambda: all(is_gone(process) for process in processes), 15, "the cluster ended")


def test_an_exception_ends_everything() -> None:
    with pytest.raises(ZeroDivisionError), local() as cluster:
        processes = descendants()
        assert len(processes) >= 4
        _ = 1 / 0
    assert cluster.status is Status.closed
    assert all(is_gone(process) for process in processes)


def test_scale_keeps_data() -> None:
    with local() as cluster, cluster.get_client() as client:
        cluster.scale(3)
        cluster.wait_for_workers(3, timeout=30)
        futures = client.map(lambda i: (i, get_worker().name), range(30))
        assert len({name for _, name in client.gather(futures)}) > 1
        cluster.scale(1)
        assert cluster.n_workers == 1
        assert len(client.scheduler_info(n_workers=-1)["workers"]) == 1
        # Computing again would give another worker's name.
        assert len({name for _, name in client.gather(futures)}) > 1
        with pytest.raises(ValueError, match="must be 0 or more, got -1"):
            cluster.scale(-1)


def test_waiting_for_workers_that_cannot_come() -> None:
    with local() as cluster:
        with pytest.raises(WorkerStartTimeoutError, match="2"):
            cluster.wait_for_workers(2, timeout="100 ms")
        child_running("distributed.cli.dask_worker").kill()
        wait_until(lambda: cluster.n_workers == 0, 15, "the worker ended")
        with pytest.raises(StartError, match="ended with status 137, which leaves 0 of 1"):
            cluster.wait_for_workers(1)


def test_a_scheduler_that_dies() -> None:
    with local() as cluster:
        child_running("distributed_core.cli.main").kill()
        wait_until(lambda: cluster.status is Status.failed, 15, "the cluster has failed")
        with pytest.raises(RuntimeError, match="cannot scale a cluster that is failed"):
            cluster.scale(2)


def test_asynchronous() -> None:
    async def main() -> None:
        async with LocalCluster(
            n_workers=1, threads_per_worker=1, nanny=False, asynchronous=True
        ) as cluster:
            async with cluster.get_client() as client:
                assert await client.submit(sum, [1, 2]) == 3
                await cluster.scale(2)
                await client.wait_for_workers(2, timeout=30)
            await cluster.close()
            assert cluster.status is Status.closed

    asyncio.run(main())


def test_asynchronous_cluster_needs_async_with() -> None:
    cluster = LocalCluster(n_workers=1, asynchronous=True)
    assert cluster.status is Status.created
    assert cluster.scheduler_address == ""
    with pytest.raises(TypeError, match="needs `async with`"), cluster:
        pass


def test_client_of_the_other_mode() -> None:
    async def main(cluster: LocalCluster) -> None:
        async with cluster.get_client(asynchronous=True) as client:
            await client.wait_for_workers(1, timeout=30)
            assert await client.submit(sum, [1, 2]) == 3

    with local() as cluster:
        asyncio.run(main(cluster))


def test_a_cancelled_start_leaves_nothing() -> None:
    async def main() -> None:
        cluster = LocalCluster(n_workers=2, asynchronous=True)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await cluster
        assert cluster.status is Status.failed

    asyncio.run(main())


def test_settings_and_options_arrive() -> None:
    with (
        dask.config.set({"some-root.some-key": 42}),
        local(
            config={"scheduler": {"worker-ttl": "77s"}, "logging": {"levels": {"nobody": "debug"}}},
            worker_options={"resources": "GPU=2"},
            env={"SOME_VARIABLE": "value"},
            dashboard_address=None,
            silence_logs="info",
        ) as cluster,
        cluster.get_client() as client,
    ):

        def look() -> tuple[Any, Any]:
            return dask.config.get("some-root.some-key", None), os.environ.get("SOME_VARIABLE")

        future = client.submit(look, resources={"GPU": 2})
        assert future.result(timeout=20) == (42, "value")
        assert cluster.http_address == ""
        assert cluster.dashboard_link == ""
        assert "scheduler at tcp://127.0.0.1:" in cluster.logs()["scheduler"]


def test_what_is_wrong_with_the_settings_is_said() -> None:
    with pytest.raises(StartError, match=r"scheduler ended with status 1 (?s:.*)worker-ttl"):
        local(config={"scheduler": {"worker-ttk": "77s"}})


def test_what_is_wrong_with_a_worker_is_said() -> None:
    with pytest.raises(
        StartError, match=r"bad-0 ended with status [0-9]+ (?s:.*)ValueError: dictionary update"
    ):
        local(name="bad", worker_options={"resources": "banana"})


def test_a_start_that_takes_too_long() -> None:
    with pytest.raises(StartError, match=r"was not ready within 0.1 s"):
        local(timeout="100 ms")


def test_a_client_may_outlive_the_cluster() -> None:
    with local() as cluster:
        client = Client(cluster)
        assert client.submit(sum, [1, 2]).result(timeout=20) == 3
    wait_until(lambda: client.status == "closed", 15, "the client noticed")
    with pytest.raises(RuntimeError, match="already closed"):
        Client(cluster)


# The end of the owner.

SCRIPT = """
import sys, time
from distributed_core import LocalCluster

if __name__ == "__main__":
    if {early}:
        print("starting", flush=True)
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, nanny={nanny})
    client = cluster.get_client()
    assert client.submit(sum, [1, 2]).result(timeout=20) == 3
    if not {early}:
        print("started", flush=True)
    {rest}
"""


@contextmanager
def owner(
    directory: Path, rest: str = "time.sleep(60)", nanny: bool = False, early: bool = False
) -> Iterator[subprocess.Popen[str]]:
    script = directory / "owner.py"
    script.write_text(SCRIPT.format(rest=rest, nanny=nanny, early=early))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env=child_environment({"TMPDIR": str(directory)}),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() in ("starting\n", "started\n")
        yield process
    finally:
        process.kill()
        process.communicate()
        script.unlink()


@pytest.mark.parametrize("nanny", [False, True])
def test_kill_9_of_the_owner(tmp_path: Path, nanny: bool) -> None:
    with owner(tmp_path, nanny=nanny) as process:
        processes = descendants(process.pid)
        # Keepers, scheduler, materializer, workers.
        assert len(processes) >= (9 if nanny else 7)
        process.kill()
        wait_until(lambda: all(is_gone(p) for p in processes), 20, "all children are gone")


def test_the_interpreter_ends(tmp_path: Path) -> None:
    with owner(tmp_path, "sys.stdin.readline()") as process:
        processes = descendants(process.pid)
        _, errors = process.communicate("\n", timeout=30)
        assert process.returncode == 0
        assert errors == ""
        assert all(is_gone(p) for p in processes)


@pytest.mark.parametrize("early", [False, True], ids=["running", "starting"])
def test_ctrl_c(tmp_path: Path, early: bool) -> None:
    with owner(tmp_path, early=early) as process:
        wait_until(lambda: len(descendants(process.pid)) >= 4, 15, "children are there")
        processes = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert "KeyboardInterrupt" in errors
        assert all(is_gone(p) for p in processes)


def test_a_fork_that_exits_leaves_the_cluster_alone(tmp_path: Path) -> None:
    fork = (
        "import os\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        cluster.close()\n"
        "        sys.exit(0)\n"
        "    os.waitpid(pid, 0)\n"
        "    print(client.submit(sum, [3, 4]).result(timeout=20))\n"
    )
    with owner(tmp_path, fork) as process:
        output, errors = process.communicate(timeout=30)
        assert output.strip() == "7", errors
