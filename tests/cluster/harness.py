"""Processes for the cluster tests: the scheduler under test and stock workers.

Owns starting, waiting for, logging and ending of child processes. Every wait has a deadline, and
every child is ended by its pid, its own children included, whatever the test did. The scheduler
is ours, or with DC_TEST_SCHEDULER=stock the one of `distributed`, as an oracle for the tests.
"""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import psutil
from distributed import Client

from tests.cluster.wire import request

__all__ = [
    "ROOT",
    "STOCK",
    "ChildProcess",
    "Cluster",
    "SchedulerProcess",
    "WorkerProcess",
    "free_port",
    "live_processes",
    "scheduler_command",
    "wait_until",
]

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
STOCK = os.environ.get("DC_TEST_SCHEDULER", "ours") == "stock"

_START_TIMEOUT = 40.0
_numbers = itertools.count()
_live: dict[int, ChildProcess] = {}
_scratch = Path(tempfile.mkdtemp(prefix="dc-cluster-"))


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_until(
    condition: Callable[[], T], timeout: float = 30.0, what: str = "", interval: float = 0.01
) -> T:
    """Poll `condition` until it is true and return its value; AssertionError at the deadline."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what or condition}")
        time.sleep(interval)


def live_processes() -> list[ChildProcess]:
    """Children started and not yet ended, oldest first."""
    return list(_live.values())


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without configuration that the developer's shell may carry, plus `extra`."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DASK_", "DISTRIBUTED_CORE_"))
    }
    paths = [str(ROOT), *env.get("PYTHONPATH", "").split(os.pathsep)]
    env["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    env["OMP_NUM_THREADS"] = env["OPENBLAS_NUM_THREADS"] = "1"
    env["PYTHONUNBUFFERED"] = "1"
    env.update(extra or {})
    return env


class ChildProcess:
    """A child with a log file. `stop` is safe to call at any time and any number of times."""

    def __init__(
        self, label: str, command: Iterable[str], env: Mapping[str, str] | None = None
    ) -> None:
        self.label = f"{label}-{next(_numbers)}"
        self.command = list(command)
        self.directory = _scratch / self.label
        self.directory.mkdir(parents=True)
        self.log = self.directory / "log"
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                self.command,
                env=child_environment(env),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.pid = self.popen.pid
        _live[self.pid] = self

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.output().splitlines()[-lines:])

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.popen.kill()
        self.popen.wait(10)

    def wait(self, timeout: float = 15.0) -> int:
        """Exit status; AssertionError with the log if it does not end."""
        try:
            return self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.label} did not end within {timeout} s:\n{self.tail()}"
            ) from None

    def stop(self, timeout: float = 5.0) -> None:
        """SIGTERM, then SIGKILL after `timeout`; children that outlive it are killed too."""
        if self.pid not in _live:
            return
        family = self._descendants()
        if self.alive:
            self.popen.send_signal(signal.SIGTERM)
            try:
                self.popen.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        del _live[self.pid]

    def _descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def scheduler_command() -> list[str]:
    """The command line of the scheduler under test, without options."""
    if STOCK:
        return [sys.executable, "-m", "distributed.cli.dask_scheduler"]
    return [sys.executable, "-m", "distributed_core.cli.main", "scheduler"]


class SchedulerProcess(ChildProcess):
    """The scheduler under test, listening on loopback."""

    def __init__(
        self,
        *options: str,
        env: Mapping[str, str] | None = None,
        scheme: str = "tcp",
        port: int | None = None,
        wait: bool = True,
    ) -> None:
        self.port = port or free_port()
        self.http_port = free_port()
        self.address = f"{scheme}://127.0.0.1:{self.port}"
        self.http = f"http://127.0.0.1:{self.http_port}"
        super().__init__(
            "scheduler",
            [
                *scheduler_command(),
                *("--host", "127.0.0.1"),
                *(() if scheme == "tcp" else ("--protocol", scheme)),
                *("--port", str(self.port)),
                *("--dashboard-address", f"127.0.0.1:{self.http_port}"),
                *options,
            ],
            env,
        )
        if wait:
            try:
                self.wait_listening()
            except BaseException:
                self.stop()
                raise

    def wait_listening(self, interval: float = 0.01) -> None:
        """Return once both ports accept connections."""
        deadline = time.monotonic() + _START_TIMEOUT
        for port in (self.port, self.http_port):
            while True:
                if not self.alive:
                    raise AssertionError(f"the scheduler ended at once:\n{self.tail()}")
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise AssertionError(f"not listening:\n{self.tail()}") from None
                    time.sleep(interval)

    def call(self, op: str, limit: float = 10.0, **fields: Any) -> Any:
        """One request over plain TCP on a connection of its own."""
        return request(self.address, op, limit, **fields)

    def workers(self) -> dict[str, dict[str, Any]]:
        """Identity of the registered workers by address."""
        workers: dict[str, dict[str, Any]] = self.call("identity", n_workers=-1)["workers"]
        return workers

    def running(self) -> set[str]:
        """Addresses of workers that take tasks."""
        return {a for a, w in self.workers().items() if w["status"] == "running"}


class WorkerProcess(ChildProcess):
    """A stock worker. Starting returns at once: wait for several together with `Cluster`."""

    def __init__(
        self,
        scheduler: str,
        *options: str,
        name: str | None = None,
        nthreads: int = 2,
        nanny: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name or f"w{next(_numbers)}"
        super().__init__(
            f"worker-{self.name}",
            [
                *(sys.executable, "-m", "distributed.cli.dask_worker", scheduler),
                *("--host", "127.0.0.1"),
                *("--nthreads", str(nthreads)),
                *("--name", self.name),
                *("--memory-limit", "2GiB"),
                *("--local-directory", str(_scratch)),
                "--nanny" if nanny else "--no-nanny",
                "--no-dashboard",
                *options,
            ],
            env,
        )


class Cluster:
    """A scheduler and stock workers, as a context manager.

    `workers` is a count, or one dict of `WorkerProcess` arguments for each.
    """

    def __init__(
        self,
        workers: int | list[dict[str, Any]] = 2,
        *options: str,
        env: Mapping[str, str] | None = None,
        worker_env: Mapping[str, str] | None = None,
    ) -> None:
        specs = [{} for _ in range(workers)] if isinstance(workers, int) else workers
        self.worker_env = worker_env
        self.workers: list[WorkerProcess] = []
        self.exit = ExitStack()
        with ExitStack() as guard:
            # Workers retry until the scheduler listens, so all processes load at the same time.
            self.scheduler = guard.enter_context(SchedulerProcess(*options, env=env, wait=False))
            self.address = self.scheduler.address
            guard.callback(self._stop_workers)
            self.add_workers(*specs, wait=False)
            self.scheduler.wait_listening()
            self.wait_for(len(specs))
            self.exit = guard.pop_all()

    def add_workers(self, *specs: dict[str, Any], wait: bool = True) -> list[WorkerProcess]:
        """Start one worker for each dict of options, together."""
        new = []
        for spec in specs:
            keywords = {"env": self.worker_env, **spec}
            options = keywords.pop("options", ())
            worker = WorkerProcess(self.address, *options, **keywords)
            self.workers.append(worker)
            new.append(worker)
        if wait:
            self.wait_for(sum(w.alive for w in self.workers))
        return new

    def restore(self, count: int, spec: dict[str, Any]) -> None:
        """Bring the cluster back to `count` workers after a test that lost or added some."""
        for surplus in [w for w in self.workers if w.alive][count:]:
            surplus.stop()

        def listed() -> bool:
            for dead in [w for w in self.workers if not w.alive]:
                dead.stop()
                self.workers.remove(dead)
            names = {w["name"] for w in self.scheduler.workers().values()}
            return names == {w.name for w in self.workers}

        wait_until(listed, what="the scheduler lists the workers that live")
        self.add_workers(*[spec] * (count - len(self.workers)))

    def wait_for(self, count: int) -> None:
        """Return once `count` workers are running."""

        def arrived() -> bool:
            dead = [w for w in self.workers if not w.alive]
            if dead and len(self.workers) - len(dead) < count:
                raise AssertionError(f"{dead[0].label} ended at once:\n{dead[0].tail()}")
            return len(self.scheduler.running()) >= count

        wait_until(arrived, _START_TIMEOUT, f"{count} workers are running", interval=0.03)

    @property
    def addresses(self) -> dict[str, str]:
        """Worker address by name."""
        return {w["name"]: a for a, w in self.scheduler.workers().items()}

    def process_of(self, address: str) -> WorkerProcess:
        """The worker process behind an address."""
        name = self.scheduler.workers()[address]["name"]
        return next(w for w in self.workers if w.name == name)

    def client(self, **options: Any) -> Client:
        """A stock client, synchronous; the caller closes it."""
        return Client(self.address, timeout=20, **options)

    def healthy(self, count: int) -> bool:
        """True if nothing died and exactly `count` workers take tasks."""
        if not self.scheduler.alive or sum(w.alive for w in self.workers) != count:
            return False
        return len(self.scheduler.running()) == count

    def _stop_workers(self) -> None:
        for worker in self.workers:
            if worker.alive:
                worker.popen.send_signal(signal.SIGTERM)
        for worker in self.workers:
            worker.stop()

    def close(self) -> None:
        self.exit.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@atexit.register
def _end_everything() -> None:
    for process in live_processes():
        process.stop(timeout=2.0)
    shutil.rmtree(_scratch, ignore_errors=True)
