"""The scheduler's process opens no user bytes, imports nothing of Dask, and starts fast.

A start-up hook on its module path writes down each offence: the import of a banned package, and
any use of the unpickler, by audit events and by replaced functions. The materializer, which is
there to open user bytes in a process of its own, is left alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import dask
import dask.array as da
import psutil
import pytest

from tests.cluster import tasks
from tests.cluster.harness import (
    Cluster,
    SchedulerProcess,
    child_environment,
    wait_until,
)

pytestmark = pytest.mark.ours_only

HOOK = """
import os, sys, traceback

BANNED = {"dask", "distributed", "cloudpickle", "tornado", "numpy", "pandas", "toolz"}
REPORT = os.environ["DC_TEST_PURITY_REPORT"]


def report(what):
    stack = "".join(traceback.format_stack(limit=12))
    with open(REPORT, "a") as file:
        file.write(f"{what} in {sys.orig_argv}\\n{stack}\\n")


def audit(event, args):
    if event == "import" and args[0].partition(".")[0] in BANNED:
        report(f"import of {args[0]}")
    elif event == "pickle.find_class":
        report(f"unpickling of {args[0]}.{args[1]}")


def install():
    import pickle, _pickle

    def recording(name, real):
        def call(*args, **kwargs):
            report(f"call of pickle.{name}")
            return real(*args, **kwargs)

        return call

    class Unpickler(_pickle.Unpickler):
        def __init__(self, *args, **kwargs):
            report("use of pickle.Unpickler")
            super().__init__(*args, **kwargs)

    for name in ("load", "loads", "_load", "_loads"):
        setattr(pickle, name, recording(name, getattr(pickle, name)))
    _pickle.load, _pickle.loads = pickle.load, pickle.loads
    pickle.Unpickler = _pickle.Unpickler = Unpickler
    sys.addaudithook(audit)


if "distributed_core.materializer.child" not in sys.orig_argv:
    install()
    with open(os.environ["DC_TEST_PURITY_STARTED"], "a") as file:
        file.write(f"{os.getpid()}\\n")
"""


@pytest.fixture
def hooked(tmp_path: Path) -> dict[str, str]:
    """Environment that puts the hook into a Python process."""
    directory = tmp_path / "hook"
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(HOOK)
    plain = child_environment()["PYTHONPATH"]
    return {
        "PYTHONPATH": os.pathsep.join([str(directory), plain]),
        "DC_TEST_PURITY_REPORT": str(tmp_path / "report"),
        "DC_TEST_PURITY_STARTED": str(tmp_path / "started"),
    }


@pytest.mark.parametrize(
    "offence",
    [
        "import cloudpickle",
        "import pickle; pickle.loads(pickle.dumps(1))",
        "from pickle import loads, dumps; loads(dumps([1]))",
        "import pickle, io; pickle.Unpickler(io.BytesIO(pickle.dumps(1))).load()",
        "import _pickle, pickle; _pickle.loads(pickle.dumps(pickle.PickleError))",
    ],
)
def test_the_hook_sees_offences(hooked: dict[str, str], offence: str) -> None:
    subprocess.run(
        [sys.executable, "-c", offence], env=child_environment(hooked), check=True, timeout=30
    )
    assert Path(hooked["DC_TEST_PURITY_REPORT"]).read_text()


def test_scheduler_stays_pure_through_real_work(hooked: dict[str, str], tmp_path: Path) -> None:
    with Cluster(2, env=hooked) as cluster, cluster.client() as client:
        pid = str(cluster.scheduler.pid)
        assert pid in Path(hooked["DC_TEST_PURITY_STARTED"]).read_text().split()
        offset = 5
        assert client.submit(lambda x: x + offset, 1).result(timeout=30) == 6
        futures = client.map(tasks.inc, range(50))
        assert client.submit(tasks.total, futures).result(timeout=30) == sum(range(1, 51))
        with dask.config.set({"array.rechunk.method": "tasks"}):
            x = da.ones((100, 100), chunks=25).rechunk((100, 10))
            assert (x + x.T).sum().compute() == 20_000
        with pytest.raises(tasks.OwnError):
            client.submit(tasks.fail, 1).result(timeout=30)
        data = client.scatter({"a": b"1" * 100_000}, broadcast=True)
        assert client.submit(len, data["a"]).result(timeout=30) == 100_000
        assert set(client.run(tasks.inc, 1).values()) == {2}
        count = str(tmp_path / "count")
        retried = client.submit(tasks.fail_times, count, 1, "done", retries=2, priority=3)
        assert retried.result(timeout=30) == "done"
        counter = client.submit(tasks.Counter, actor=True).result(timeout=30)
        assert counter.increment().result() == 1
        client.set_metadata("x", {"a": 1})
        client.log_event("topic", {"n": 1})
        client.get_versions(check=True)
        client.dump_cluster_state(str(tmp_path / "dump"))
        for attempt in (
            lambda: client.run_on_scheduler(tasks.inc, 1),
            lambda: client.submit(tasks.inc, _OpensBadly()).result(timeout=30),
        ):
            with pytest.raises(Exception):  # noqa: B017  each has a test of its own
                attempt()
        cluster.workers[0].kill()
        assert client.submit(tasks.inc, 5, pure=False).result(timeout=30) == 6
        cluster.scheduler.popen.terminate()
        cluster.scheduler.wait()
    report = Path(hooked["DC_TEST_PURITY_REPORT"])
    assert not report.exists(), report.read_text()


def _explode() -> None:
    raise RuntimeError("opened")


class _OpensBadly:
    def __reduce__(self) -> tuple[object, tuple[()]]:
        return _explode, ()


def test_start_takes_less_than_half_a_second_of_cpu(tmp_path: Path) -> None:
    # As on any machine, bytecode is kept after the first start.
    env = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode")}
    best = float("inf")
    for _ in range(6):
        with SchedulerProcess(env=env, wait=False) as scheduler:
            scheduler.wait_listening(interval=0.002)
            times = psutil.Process(scheduler.pid).cpu_times()
            best = min(best, times.user + times.system)
        if best < 0.5:
            break
    assert best < 0.5


def test_accepts_work_right_after_it_listens() -> None:
    with SchedulerProcess() as scheduler:
        start = time.monotonic()
        wait_until(lambda: scheduler.call("identity", n_workers=0)["type"] == "Scheduler")
        assert time.monotonic() - start < 2
