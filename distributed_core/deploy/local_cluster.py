"""A scheduler and stock workers on this machine, as children of this process.

Owns what is started, in which order, and that nothing of it stays. Speaks with the scheduler only
as any peer does. Called by users, as ``distributed_core.LocalCluster``.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Coroutine, Generator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import dask
import yaml
from dask.system import CPU_COUNT
from dask.utils import parse_timedelta
from distributed import Client
from distributed.client import WorkerStartTimeoutError
from distributed.core import Status, rpc
from distributed.deploy.utils import nprocesses_nthreads

from distributed_core.deploy.child import Child

__all__ = ["LocalCluster", "StartError"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.02
_WORKER_POLL_SECONDS = 0.1
_SCHEDULER_GRACE = 5.0
_WORKER_GRACE = 5.0
_numbers = itertools.count()
_clusters: weakref.WeakSet[LocalCluster] = weakref.WeakSet()


class StartError(RuntimeError):
    """A child process ended or did not answer while the cluster started; says why, with its log."""


class LocalCluster:
    """The daemon and workers on this machine.

    Everything that is started ends with ``close``, with the ``with`` block, with the interpreter,
    and with this process, kill -9 included. A client made by ``get_client`` keeps the cluster
    alive.

    :param n_workers: worker processes; None: as many as suit the machine.
    :param threads_per_worker: threads of each; None: as many as suit the machine.
    :param memory_limit: of each worker, like ``"2GiB"``; ``"auto"``: its share of the machine; 0 or
        None: none.
    :param host: address that the scheduler and the workers listen on.
    :param scheduler_port: 0: any free port.
    :param dashboard_address: ``[host]:port`` of the scheduler's HTTP server; None: no HTTP.
    :param nanny: start each worker under a nanny, which restarts it when it dies or runs out of
        memory. Two processes for each worker.
    :param name: of the cluster; workers are named after it.
    :param silence_logs: the lowest level of records that the children write to their logs, which
        ``logs`` returns; True is the same as ``"info"``. False: the children write to the standard
        error of this process instead.
    :param config: settings of the scheduler as in its YAML files (docs/configuration.md), like
        ``{"scheduler": {"worker-ttl": "1 minute"}}``.
    :param worker: kind of worker: ``"dask"``, the stock one.
    :param worker_options: further options of ``dask worker``: ``{"resources": "GPU=2"}`` is
        ``--resources GPU=2``; a list repeats the option, True and False are ``--name`` and
        ``--no-name``.
    :param env: variables that the children have beyond those of this process.
    :param timeout: seconds until the scheduler and all workers must be there.
    :param asynchronous: start nothing yet, but with ``await`` or ``async with``; methods that wait
        then return awaitables.
    :raises StartError: a child ended at once, or not all was there in time.
    :raises ValueError: an argument cannot be used.
    """

    def __init__(
        self,
        n_workers: int | None = None,
        threads_per_worker: int | None = None,
        *,
        memory_limit: str | int | None = "auto",
        host: str = "127.0.0.1",
        scheduler_port: int = 0,
        dashboard_address: str | None = "127.0.0.1:0",
        nanny: bool = True,
        name: str | None = None,
        silence_logs: bool | int | str = "warning",
        config: Mapping[str, Any] | None = None,
        worker: str = "dask",
        worker_options: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | str = 60,
        asynchronous: bool = False,
    ) -> None:
        if worker != "dask":
            raise ValueError(f"worker must be 'dask', got {worker!r}")
        self.name = name or f"local-{uuid.uuid4().hex[:8]}"
        self.asynchronous = asynchronous
        self.threads_per_worker, self._n_wanted = _sizes(n_workers, threads_per_worker)
        self._memory_limit = "0" if memory_limit in (0, None) else str(memory_limit)
        self._host = host
        self._scheduler_port = scheduler_port
        self._dashboard_address = dashboard_address
        self._nanny = nanny
        self._level = _level_name(silence_logs)
        self._config = dict(config or {})
        self._worker_options = _option_words(worker_options or {})
        self._env = dict(env or {})
        self._timeout = float(parse_timedelta(timeout))
        self._state = Status.created
        self._lock = threading.RLock()
        self._family = _Family()
        self._names = itertools.count()
        self._identity: dict[str, Any] = {}
        # Whoever drops the last reference without closing leaves no process behind.
        finalizer = weakref.finalize(self, _Family.end_aside, self._family)
        # At exit ``_close_all`` does better, and the keepers do what it cannot.
        finalizer.atexit = False
        _clusters.add(self)
        if not asynchronous:
            self._start()

    # What it is.

    @property
    def scheduler_address(self) -> str:
        """Address for clients and workers, like ``tcp://127.0.0.1:8786``; empty until it runs."""
        return str(self._identity.get("address", ""))

    @property
    def dashboard_link(self) -> str:
        """Address of the status page; empty without HTTP."""
        base = self.http_address
        return f"{base}/status" if base else ""

    @property
    def http_address(self) -> str:
        """Address of the scheduler's HTTP server, with ``/metrics``; empty without HTTP."""
        port = self._identity.get("services", {}).get("dashboard")
        if not port or self._dashboard_address is None:
            return ""
        host = self._dashboard_address.rpartition(":")[0] or self._host
        host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
        return f"http://{host}:{port}"

    @property
    def status(self) -> Status:
        """``Status`` of distributed: created, starting, running, failed, closing or closed."""
        scheduler = self._family.scheduler
        if self._state is Status.running and (scheduler is None or not scheduler.is_alive):
            return Status.failed
        return self._state

    @property
    def n_workers(self) -> int:
        """Worker processes that run, registered or not."""
        return sum(child.is_alive for child in list(self._family.workers.values()))

    def __repr__(self) -> str:
        return (
            f"LocalCluster({self.name!r}, {self.scheduler_address!r}, {self.status.name}, "
            f"workers={self.n_workers}, threads={self.n_workers * self.threads_per_worker})"
        )

    def logs(self) -> dict[str, str]:
        """What the children wrote, by name: ``scheduler`` and the names of the workers.

        Workers that were stopped are among them. Empty with ``silence_logs=False``, and once the
        cluster is closed.
        """
        directory = self._family.directory
        if directory is None:
            return {}
        return {
            path.stem: path.read_text(encoding="utf-8", errors="replace")
            for path in sorted(directory.glob("*.log"))
        }

    # What it does.

    def get_client(self, **options: Any) -> Client:
        """A stock client of this cluster; ``options`` are those of ``distributed.Client``.

        With ``asynchronous=True`` the client is to be awaited. It keeps the cluster alive.
        """
        options.setdefault("asynchronous", self.asynchronous)
        if options["asynchronous"] == self.asynchronous:
            return Client(self, **options)
        # It would call our methods in the manner of the other mode.
        client = Client(self.scheduler_address, **options)
        client.local_cluster = self
        return client

    def wait_for_workers(self, n_workers: int, timeout: float | str | None = None) -> Any:
        """Wait until at least ``n_workers`` take tasks; ``timeout`` in seconds, None: no limit.

        :raises WorkerStartTimeoutError: not within ``timeout``.
        :raises StartError: fewer worker processes than that are alive.
        """
        seconds = None if timeout is None else float(parse_timedelta(timeout))
        return self._run(lambda: self._wait_for_workers(n_workers, seconds))

    def scale(self, n: int) -> Any:
        """Have ``n`` worker processes.

        New ones are started and not waited for. Those that are too many hand over their data and
        end; that is waited for.

        :raises ValueError: ``n`` is negative.
        """
        if n < 0:
            raise ValueError(f"the number of workers must be 0 or more, got {n}")
        return self._run(lambda: self._scale(n))

    def close(self, timeout: float | str | None = None) -> Any:
        """End all processes and remove their files; ``timeout``: seconds for an orderly end.

        Safe to call at any time and again. Where an event loop runs, for example in a notebook, it
        goes on in a thread at once, and the result may be awaited.
        """
        seconds = None if timeout is None else float(parse_timedelta(timeout))
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            if self.asynchronous:
                return asyncio.to_thread(self._close, seconds)
            self._close(seconds)
            return None
        if self._state is not Status.closed:
            # Clients look at it from now on.
            self._state = Status.closing
        return loop.run_in_executor(None, self._close, seconds)

    def __enter__(self) -> Self:
        if self.asynchronous:
            raise TypeError("an asynchronous LocalCluster needs `async with`")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close(None)

    def __await__(self) -> Generator[Any, Any, Self]:
        return self._started().__await__()

    async def __aenter__(self) -> Self:
        return await self._started()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self._close, None)

    # How it is done. All of this blocks and runs in any thread.

    def _run(self, work: Callable[[], T]) -> Any:
        return asyncio.to_thread(work) if self.asynchronous else work()

    async def _started(self) -> Self:
        if self._state is Status.created:
            starting = asyncio.ensure_future(asyncio.to_thread(self._start))
            try:
                await asyncio.shield(starting)
            except asyncio.CancelledError:
                self._family.is_unwanted = True
                await asyncio.wait([starting])
                raise
        return self

    def _start(self) -> None:
        with self._lock:
            if self._state is not Status.created:
                return
            self._state = Status.starting
            try:
                self._start_all()
            except BaseException:
                self._state = Status.failed
                self._family.is_unwanted = True
                self._family.end()
                raise
            self._state = Status.running

    def _start_all(self) -> None:
        deadline = time.monotonic() + self._timeout
        family = self._family
        directory = family.directory = Path(tempfile.mkdtemp(prefix="distributed-core-"))
        scheduler_file = directory / "scheduler.json"
        command = [sys.executable, "-m", "distributed_core.cli.main", "scheduler"]
        command += ["--host", self._host, "--port", str(self._scheduler_port)]
        command += ["--scheduler-file", str(scheduler_file)]
        if self._dashboard_address is None:
            self._config["http"] = {**self._config.get("http", {}), "enabled": False}
        else:
            command += ["--dashboard-address", self._dashboard_address]
        if self._level is not None:
            command += ["--log-level", self._level]
        if self._config:
            path = directory / "config.yaml"
            path.write_text(yaml.safe_dump(self._config), encoding="utf-8")
            command += ["--config", str(path)]
        scheduler = family.scheduler = self._child("scheduler", command, _SCHEDULER_GRACE)
        while not scheduler_file.exists():
            self._check(scheduler, deadline)
            time.sleep(_POLL_SECONDS)
        self._identity = json.loads(scheduler_file.read_text(encoding="utf-8"))
        for _ in range(self._n_wanted):
            self._add_worker()
        if self._n_wanted:
            _await(self._poll_workers(self._n_wanted, deadline, self._check))

    def _check(self, child: Child, deadline: float) -> None:
        """Raise StartError if ``child`` has ended, time is over, or the start was given up."""
        if self._family.is_unwanted:
            raise StartError("the start was given up")
        if not child.is_alive:
            raise StartError(
                f"{child.name} ended with status {child.exit_status} while the cluster started; "
                f"the end of its log:\n{child.tail()}"
            )
        if time.monotonic() > deadline:
            raise StartError(
                f"{child.name} was not ready within {self._timeout:g} s; "
                f"the end of its log:\n{child.tail()}"
            )

    def _child(self, name: str, command: list[str], grace: float) -> Child:
        directory = self._family.directory
        assert directory is not None
        env = {**os.environ, **self._env}
        # As Dask's own spawners do: what was set with dask.config.set counts for the children.
        env["DASK_INTERNAL_INHERIT_CONFIG"] = dask.config.serialize(dask.config.global_config)
        if self._level is not None:
            env["DASK_LOGGING__DISTRIBUTED"] = self._level
        log = None if self._level is None else directory / f"{name}.log"
        return Child(name, command, env, log, directory, grace)

    def _add_worker(self) -> None:
        directory = self._family.directory
        assert directory is not None
        name = f"{self.name}-{next(self._names)}"
        command = [sys.executable, "-m", "distributed.cli.dask_worker", self.scheduler_address]
        command += ["--name", name, "--host", self._host, "--no-dashboard"]
        command += ["--nthreads", str(self.threads_per_worker)]
        command += ["--memory-limit", self._memory_limit]
        command += ["--local-directory", str(directory)]
        command += ["--nanny" if self._nanny else "--no-nanny", *self._worker_options]
        self._family.workers[name] = self._child(name, command, _WORKER_GRACE)

    async def _poll_workers(
        self, n_workers: int, deadline: float, check: Callable[[Child, float], None]
    ) -> None:
        """Return once ``n_workers`` take tasks; ``check`` raises for a child that keeps us."""
        async with rpc(self.scheduler_address) as scheduler:
            while True:
                identity = await scheduler.identity(n_workers=-1)
                workers = list(self._family.workers.items())
                # The scheduler may not have noticed yet.
                dead = {name for name, child in workers if not child.is_alive}
                ready = {
                    str(worker["name"])
                    for worker in identity["workers"].values()
                    if worker["status"] == "running"
                } - dead
                if len(ready) >= n_workers:
                    return
                for name, child in workers:
                    if name not in ready:
                        check(child, deadline)
                await asyncio.sleep(_WORKER_POLL_SECONDS)

    def _wait_for_workers(self, n_workers: int, timeout: float | None) -> None:
        deadline = float("inf") if timeout is None else time.monotonic() + timeout

        def check(child: Child, deadline: float) -> None:
            n_alive = self.n_workers
            if self.status is not Status.running:
                raise StartError(f"the cluster is {self.status.name}")
            if n_alive < n_workers and not child.is_alive:
                raise StartError(
                    f"{child.name} ended with status {child.exit_status}, which leaves {n_alive} "
                    f"of {n_workers} workers; the end of its log:\n{child.tail()}"
                )

        _await(self._poll_workers_until(n_workers, deadline, timeout, check))

    async def _poll_workers_until(
        self,
        n_workers: int,
        deadline: float,
        timeout: float | None,
        check: Callable[[Child, float], None],
    ) -> None:
        limit = None if timeout is None else max(0.0, deadline - time.monotonic())
        try:
            async with asyncio.timeout(limit):
                await self._poll_workers(n_workers, deadline, check)
        except TimeoutError:
            raise WorkerStartTimeoutError(self.n_workers, n_workers, timeout) from None

    def _scale(self, n: int) -> None:
        with self._lock:
            if self.status is not Status.running:
                raise RuntimeError(f"cannot scale a cluster that is {self.status.name}")
            workers = self._family.workers
            for name, child in list(workers.items()):
                if not child.is_alive:
                    child.kill()
                    del workers[name]
            surplus = list(workers)[n:]
            if surplus:
                _await(self._retire(surplus))
                for name in surplus:
                    workers[name].ask_to_end()
                for name in surplus:
                    workers.pop(name).end()
            while len(workers) < n:
                self._add_worker()

    async def _retire(self, names: list[str]) -> None:
        """Have workers hand over their data; one that has not registered has none."""
        async with rpc(self.scheduler_address) as scheduler:
            identity = await scheduler.identity(n_workers=-1)
            addresses = [
                address
                for address, worker in identity["workers"].items()
                if str(worker["name"]) in names
            ]
            if addresses:
                await scheduler.retire_workers(
                    workers=addresses, close_workers=True, remove=True, stimulus_id="scale"
                )

    def _close(self, timeout: float | None) -> None:
        if self._family.owner != os.getpid():
            # A fork of the process that made it has nothing to say.
            return
        self._family.is_unwanted = True
        with self._lock:
            if self._state is Status.closed:
                return
            self._state = Status.closing
            try:
                self._family.end(timeout)
            finally:
                self._state = Status.closed


class _Family:
    """The children and the directory of a cluster, apart from it so that they can outlive it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.scheduler: Child | None = None
        self.workers: dict[str, Child] = {}
        self.directory: Path | None = None
        self.is_unwanted = False

    def end(self, timeout: float | None = None) -> None:
        """End all, workers first, and remove the directory. An interruption ends them at once."""
        if self.owner != os.getpid():
            return
        workers = list(self.workers.values())
        children = workers if self.scheduler is None else [*workers, self.scheduler]
        deadline = time.monotonic() + (_WORKER_GRACE + 1 if timeout is None else timeout)
        try:
            for child in workers:
                child.ask_to_end()
            for child in workers:
                child.end(max(0.0, deadline - time.monotonic()))
            if self.scheduler is not None:
                self.scheduler.end(timeout)
        finally:
            for child in children:
                child.let_go()
            if self.directory is not None:
                shutil.rmtree(self.directory, ignore_errors=True)
                self.directory = None

    def end_aside(self) -> None:
        """``end`` without holding up the thread that happened to collect the garbage."""
        self.is_unwanted = True
        threading.Thread(target=self.end, name="distributed-core-end", daemon=True).start()


def _await(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` in an event loop of its own, also where one runs already."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(asyncio.run(work))
        except BaseException as exc:  # noqa: BLE001 - raised below, in the caller's thread
            errors.append(exc)

    thread = threading.Thread(target=run, name="distributed-core-rpc", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _sizes(n_workers: int | None, threads_per_worker: int | None) -> tuple[int, int]:
    """Threads of a worker, and workers: what is not given suits the machine."""
    for name, value, least in (
        ("n_workers", n_workers, 0),
        ("threads_per_worker", threads_per_worker, 1),
    ):
        if value is not None and value < least:
            raise ValueError(f"{name} must be {least} or more, got {value}")
    if n_workers is None and threads_per_worker is None:
        n_workers, threads_per_worker = nprocesses_nthreads()
    if n_workers is None:
        assert threads_per_worker is not None
        n_workers = max(1, CPU_COUNT // threads_per_worker)
    if threads_per_worker is None:
        threads_per_worker = max(1, CPU_COUNT // max(1, n_workers))
    return threads_per_worker, n_workers


def _level_name(level: bool | int | str) -> str | None:
    """Name of a level of logging; None: do not silence at all."""
    if level is False:
        return None
    if level is True:
        return "info"
    name = logging.getLevelName(level).lower() if isinstance(level, int) else level.lower()
    if name not in ("debug", "info", "warning", "error", "critical"):
        raise ValueError(
            f"silence_logs must be True, False or a level like 'warning', got {level!r}"
        )
    return name


def _option_words(options: Mapping[str, Any]) -> list[str]:
    """Command-line words of ``dask worker`` for a mapping of options."""
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if value is True:
            words.append(f"--{flag}")
        elif value is False:
            words.append(f"--no-{flag}")
        else:
            for item in value if isinstance(value, list | tuple) else [value]:
                words += [f"--{flag}", str(item)]
    return words


def _close_all() -> None:
    for cluster in list(_clusters):
        cluster._close(None)


atexit.register(_close_all)
