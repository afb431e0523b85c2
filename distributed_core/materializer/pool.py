"""Supervises the materializer processes and streams graphs through them.

Owns the processes: start, restart with back-off, deadline, memory limit, end. Lives in the
scheduler process, on its event loop, and must never import dask, distributed or cloudpickle, never
unpickle anything, and never block. Called by the server for each `update-graph` message; keeping
the submissions of one client in order is the caller's business.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed_core.materializer.channel import Channel, ChannelClosed
from distributed_core.materializer.parts import (
    GraphFailed,
    Key,
    MalformedMessage,
    Opaque,
    Part,
    Submission,
    decode_part,
    encode_call,
    encode_submission,
    is_final,
)

__all__ = ["CallFailed", "MaterializerPool", "PoolStats"]

_MEMORY_EXIT_CODE = 86  # As in `child`, which this process must not import.
_START_SECONDS = 60.0
_EXIT_SECONDS = 1.0  # From a closed socket to a dead process; then it is killed.
_MEMORY_CHECK_SECONDS = 0.05
_MAX_START_FAILURES = 3  # In a row, before waiting submissions are told instead of kept waiting.
_MAX_BACKOFF_SECONDS = 30.0
_CRASH_BACKOFF_SECONDS = 0.05
_START_BACKOFF_SECONDS = 0.5
_EXTRA_AFTER_SECONDS = 1.0  # A small request that waited so long gets one more process.
_MAX_EXTRA = 4
_DRAIN_SECONDS = 5.0  # For the rest of a graph that nobody waits for; then it is killed.
# A request from this size on counts as large: some thousand keys, or data in the graph.
_LARGE_BYTES = 256 * 1024
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class CallFailed(Exception):
    """A small request did not come through. `kind` as in `GraphFailed`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True)
class PoolStats:
    """Counters since the pool was made, and gauges of this moment.

    `failures` counts submissions and calls by kind of failure. `cpu_seconds` is the processor time
    of all processes, dead ones included. `queue_length` is how many requests wait for a process.
    """

    submissions: int = 0
    calls: int = 0
    tasks: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    cpu_seconds: float = 0.0
    queue_length: int = 0
    processes: int = 0
    busy: int = 0


class _Process:
    """One materializer process that said hello, or is about to."""

    __slots__ = ("cause", "channel", "ended", "has_large", "is_busy", "is_extra", "popen")

    def __init__(self, popen: subprocess.Popen[bytes], channel: Channel) -> None:
        self.popen = popen
        self.channel = channel
        self.is_busy = False
        self.has_large = False
        self.is_extra = False  # Made for those who waited long; ends when nobody waits.
        self.cause: tuple[str, str] | None = None  # Why we killed it.
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def kill(self, kind: str, message: str) -> None:
        """End the process; whoever uses it learns (kind, message)."""
        self.cause = self.cause or (kind, message)
        with suppress(ProcessLookupError):
            os.kill(self.popen.pid, signal.SIGKILL)
        self.channel.abort(message)


class _Lost(Exception):
    """A request cannot be answered: kind and message."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class MaterializerPool:
    """A few supervised processes that open submitted graphs.

    `timeout_seconds` bounds the time one request may keep a process busy, not counting the time
    the consumer takes for the parts. `memory_limit_bytes` bounds the resident size of one process,
    None for no limit. `env` replaces the environment of the processes.
    """

    def __init__(
        self,
        processes: int = 1,
        timeout_seconds: float = 300.0,
        memory_limit_bytes: int | None = None,
        python: str = sys.executable,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if processes < 1:
            raise ValueError(f"processes must be at least 1, not {processes}")
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds must be positive, not {timeout_seconds}")
        self._size = processes
        self._timeout_seconds = timeout_seconds
        self._memory_limit_bytes = memory_limit_bytes
        self._python = python
        self._env = None if env is None else dict(env)
        self._stats = PoolStats()
        self._ended_cpu_seconds = 0.0
        self._alive: set[_Process] = set()
        self._idle: deque[_Process] = deque()
        self._waiting: deque[asyncio.Future[_Process]] = deque()
        self._waiting_large: deque[asyncio.Future[_Process]] = deque()
        self._background: set[asyncio.Task[None]] = set()
        self._n_extra = 0
        self._start_failures = 0
        self._crashes = 0  # In a row, without one graph that came through.
        self._last_exit = ""
        self._is_open = False

    async def start(self) -> None:
        """Begin to start the processes; returns at once."""
        if self._is_open:
            raise RuntimeError("the materializer pool is started already")
        self._is_open = True
        for _ in range(self._size):
            self._spawn_task(self._supervise())
        if self._memory_limit_bytes is not None and _can_measure():
            self._spawn_task(self._watch_memory(self._memory_limit_bytes))

    async def close(self) -> None:
        """Kill the processes and wait until they are gone; open requests fail as crashed."""
        self._is_open = False
        self._fail_waiting("the materializer is shut down")
        for process in list(self._alive):
            process.kill("crashed", "the materializer is shut down")
        tasks = list(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def stats(self) -> PoolStats:
        """A snapshot; costs one small file per process."""
        stats = self._stats
        stats.cpu_seconds = self._ended_cpu_seconds + sum(
            _cpu_seconds(process.popen.pid) for process in self._alive
        )
        stats.queue_length = len(self._waiting) + len(self._waiting_large)
        stats.processes = len(self._alive)
        stats.busy = sum(process.is_busy for process in self._alive)
        return stats

    async def submit(self, submission: Submission) -> AsyncIterator[Part]:
        """Parts of the answer, in order; exactly one GraphEnd or GraphFailed, which is the last.

        A consumer that stops early costs the process the rest of the graph, for some seconds at
        most; a process that is not done by then is replaced.
        """
        self._stats.submissions += 1
        frames = encode_submission(submission)
        is_large = sum(map(len, frames)) > _LARGE_BYTES
        process: _Process | None = None
        budget = self._timeout_seconds
        loop = asyncio.get_running_loop()
        failed: GraphFailed | None = None
        try:
            process = await self._acquire(is_large)
            before = loop.time()
            await self._send(process, frames, budget)
            del frames
            while process is not None:
                body, raw = await self._receive(process, budget)
                budget -= loop.time() - before
                parts = [decode_part(item, raw) for item in body]
                if is_final(parts[-1]):
                    # All is here: a consumer that stops early leaves nothing to drain.
                    self._release(process)
                    process = None
                    self._count(parts[-1])
                for part in parts:
                    self._stats.tasks += len(getattr(part, "keys", ()))
                    yield part
                del parts, part
                del body, raw
                before = loop.time()
        except MalformedMessage as error:
            if process is not None:
                process.kill("crashed", str(error))
            failed = GraphFailed("crashed", f"the materializer sent a malformed answer: {error}")
        except _Lost as lost:
            failed = GraphFailed(lost.kind, lost.message)
        finally:
            if process is not None and failed is None:
                self._spawn_task(self._drain(process, min(budget, _DRAIN_SECONDS)))
        if failed is not None:
            self._count(failed)
            yield failed

    async def call(self, kind: str, payload: Opaque) -> list[Key]:
        """Small request; `keys_from_pickled`: the keys in a pickle of Futures or keys.

        Raises CallFailed.
        """
        self._stats.calls += 1
        process: _Process | None = None
        try:
            process = await self._acquire()
            await self._send(process, encode_call(kind, payload), self._timeout_seconds)
            body, _ = await self._receive(process, self._timeout_seconds)
            self._release(process)
            process = None
            if "failed" not in body:
                return list(body["value"])
            part = decode_part(body["failed"], ())
            assert isinstance(part, GraphFailed)
            raise _Lost(part.kind, part.message)
        except _Lost as lost:
            process = None
            self._stats.failures[lost.kind] += 1
            raise CallFailed(lost.kind, lost.message) from None
        finally:
            if process is not None:
                process.kill("crashed", "the caller gave up")

    def _count(self, part: Part) -> None:
        if isinstance(part, GraphFailed):
            self._stats.failures[part.kind] += 1
        else:
            self._crashes = 0

    async def _send(self, process: _Process, frames: Any, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await process.channel.send(frames)
        except TimeoutError:
            raise self._overdue(process) from None
        except ChannelClosed as error:
            raise await self._lost(process, error) from None

    async def _receive(self, process: _Process, seconds: float) -> tuple[Any, list[memoryview]]:
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                return await process.channel.receive()
        except TimeoutError:
            raise self._overdue(process) from None
        except ChannelClosed as error:
            raise await self._lost(process, error) from None

    def _overdue(self, process: _Process) -> _Lost:
        message = (
            f"opening the graph took longer than {self._timeout_seconds:g} s and was given up "
            "(setting: timeout of the materializer)"
        )
        process.kill("timeout", message)
        return _Lost("timeout", message)

    async def _lost(self, process: _Process, error: ChannelClosed) -> _Lost:
        """What became of `process`; waits for its end, which is near."""
        exit_text = await asyncio.shield(process.ended)
        if process.cause is not None:
            return _Lost(*process.cause)
        return _Lost(
            "crashed",
            f"the process that was opening the graph died ({exit_text}; {error}). Only this "
            "submission is affected. Code that runs while a graph is unpickled or built may have "
            "ended it",
        )

    async def _acquire(self, is_large: bool = False) -> _Process:
        """A process for one request.

        Of several processes one is kept for small requests: nobody's ``submit`` waits until
        somebody else's large graph is opened.
        """
        if not self._is_open:
            raise _Lost("crashed", "the materializer is not running")
        is_large = is_large and self._size > 1
        if not is_large or self._may_take_large():
            while self._idle:
                process = self._idle.popleft()
                if not process.channel.closed.done():
                    process.is_busy = True
                    process.has_large = is_large
                    return process
        if self._cannot_start():
            raise _Lost("crashed", self._cannot_start_text())
        waiter: asyncio.Future[_Process] = asyncio.get_running_loop().create_future()
        waiting = self._waiting_large if is_large else self._waiting
        waiting.append(waiter)
        loop = asyncio.get_running_loop()
        relief = None if is_large else loop.call_later(_EXTRA_AFTER_SECONDS, self._relieve, waiter)
        try:
            process = await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._release(waiter.result())
            elif waiter in waiting:
                waiting.remove(waiter)
            raise
        finally:
            if relief is not None:
                relief.cancel()
        return process

    def _relieve(self, waiter: asyncio.Future[_Process]) -> None:
        """Somebody's graphs occupy all processes, perhaps for ever: make one more."""
        if not waiter.done() and self._is_open and self._alive and self._n_extra < _MAX_EXTRA:
            self._n_extra += 1
            self._spawn_task(self._run_extra())

    async def _run_extra(self) -> None:
        try:
            process = await self._start_process()
            if process is None:
                return
            process.is_extra = True
            self._release(process)
            try:
                await asyncio.shield(process.channel.closed)
            finally:
                await self._bury(process)
        finally:
            self._n_extra -= 1

    def _may_take_large(self) -> bool:
        return sum(process.has_large for process in self._alive) < self._size - 1

    def _release(self, process: _Process) -> None:
        process.is_busy = False
        process.has_large = False
        if process.channel.closed.done():
            return
        for waiting, is_large in ((self._waiting_large, True), (self._waiting, False)):
            if is_large and (process.is_extra or not self._may_take_large()):
                continue
            while waiting:
                waiter = waiting.popleft()
                if not waiter.done():
                    process.is_busy = True
                    process.has_large = is_large
                    waiter.set_result(process)
                    return
        if process.is_extra:
            process.kill("crashed", "nobody waits for one more process")
        else:
            self._idle.append(process)

    @property
    def problem(self) -> str:
        """Why no graph can be opened now, in words; empty if all is well."""
        return self._cannot_start_text() if self._cannot_start() else ""

    def _cannot_start(self) -> bool:
        return self._start_failures >= _MAX_START_FAILURES and not self._alive

    def _cannot_start_text(self) -> str:
        return f"the materializer process cannot be started: {self._last_exit}"

    def _fail_waiting(self, message: str) -> None:
        for waiting in (self._waiting, self._waiting_large):
            while waiting:
                waiter = waiting.popleft()
                if not waiter.done():
                    waiter.set_exception(_Lost("crashed", message))

    def _spawn_task(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _drain(self, process: _Process, budget: float) -> None:
        """Read an answer that nobody wants to its end, so that the next one starts clean."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                before = loop.time()
                body, raw = await self._receive(process, budget)
                budget -= loop.time() - before
                if any(is_final(decode_part(item, raw)) for item in body):
                    break
        except MalformedMessage as error:
            process.kill("crashed", str(error))
        except _Lost:
            return  # The supervisor starts another one.
        self._release(process)

    async def _supervise(self) -> None:
        """Keep one process running."""
        while self._is_open:
            process = await self._start_process()
            if process is not None:
                self._release(process)
                try:
                    await asyncio.shield(process.channel.closed)
                finally:
                    await self._bury(process)
                self._crashes += 1
                delay = _CRASH_BACKOFF_SECONDS * 2 ** min(self._crashes - 1, 20)
            else:
                self._start_failures += 1
                if self._cannot_start():
                    self._fail_waiting(self._cannot_start_text())
                delay = _START_BACKOFF_SECONDS * 2 ** min(self._start_failures - 1, 20)
            self._stats.restarts += 1
            await asyncio.sleep(min(delay, _MAX_BACKOFF_SECONDS))

    async def _start_process(self) -> _Process | None:
        ours, theirs = socket.socketpair()
        try:
            popen = self._popen(theirs)
        except OSError as error:
            self._last_exit = f"{self._python}: {error}"
            ours.close()
            return None
        finally:
            theirs.close()
        ours.setblocking(False)
        channel = Channel()
        process = _Process(popen, channel)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_START_SECONDS):
                await loop.create_unix_connection(lambda: channel, sock=ours)
                await channel.receive()
        except (TimeoutError, ChannelClosed):
            await self._bury(process)
            self._last_exit = process.ended.result()
            return None
        except asyncio.CancelledError:
            process.kill("crashed", "the materializer is shut down")
            await self._bury(process)
            raise
        self._start_failures = 0
        self._alive.add(process)
        return process

    def _popen(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        # On the loop's own thread: the child's death signal is bound to the thread that made it.
        return subprocess.Popen(
            [
                self._python,
                "-m",
                "distributed_core.materializer.child",
                "--fd",
                str(theirs.fileno()),
                "--parent",
                str(os.getpid()),
                "--memory-limit",
                str(self._memory_limit_bytes or 0),
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=self._env,
        )

    async def _bury(self, process: _Process) -> None:
        """Wait for the end of a process whose socket is closed, killing it if need be."""
        loop = asyncio.get_running_loop()
        process.channel.abort("the process is gone")
        waited = loop.run_in_executor(None, _wait, process.popen)
        try:
            status, cpu_seconds = await asyncio.wait_for(asyncio.shield(waited), _EXIT_SECONDS)
        except (TimeoutError, asyncio.CancelledError) as error:
            with suppress(ProcessLookupError):
                os.kill(process.popen.pid, signal.SIGKILL)
            status, cpu_seconds = await waited
            if isinstance(error, asyncio.CancelledError):
                self._end(process, status, cpu_seconds)
                raise
        self._end(process, status, cpu_seconds)

    def _end(self, process: _Process, status: int, cpu_seconds: float) -> None:
        self._ended_cpu_seconds += cpu_seconds
        self._alive.discard(process)
        with suppress(ValueError):
            self._idle.remove(process)
        if status == _MEMORY_EXIT_CODE and process.cause is None:
            process.cause = ("memory", self._memory_text())
        process.ended.set_result(_exit_text(status))

    async def _watch_memory(self, limit: int) -> None:
        while True:
            await asyncio.sleep(_MEMORY_CHECK_SECONDS)
            for process in list(self._alive):
                if process.is_busy and _resident_bytes(process.popen.pid) > limit:
                    process.kill("memory", self._memory_text())

    def _memory_text(self) -> str:
        return (
            f"opening the graph needed more than {self._memory_limit_bytes} bytes of memory and "
            "was given up (setting: memory limit of the materializer)"
        )


def _wait(popen: subprocess.Popen[bytes]) -> tuple[int, float]:
    """Exit status and processor seconds, in a thread."""
    _, status, usage = os.wait4(popen.pid, 0)
    popen.returncode = os.waitstatus_to_exitcode(status)
    return popen.returncode, usage.ru_utime + usage.ru_stime


def _exit_text(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def _can_measure() -> bool:
    return Path("/proc/self/statm").exists()


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE_BYTES
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return 0  # Ended meanwhile.


def _cpu_seconds(pid: int) -> float:
    """Processor time of a live process; 0 where /proc does not exist, until it ends."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
