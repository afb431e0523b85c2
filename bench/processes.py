"""Child processes of the bench: start, talk in JSON lines, read their CPU and memory, end them.

Owns every process the bench starts and ends them by process id, descendants included. It must
never signal a process it did not start. `bench.run` and `bench.zero_workers` call it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import psutil

__all__ = [
    "BenchError",
    "Child",
    "descendants_cpu_seconds",
    "free_port",
    "peak_rss_bytes",
    "process_cpu_seconds",
    "reset_peak_rss",
    "rss_bytes",
]


class BenchError(RuntimeError):
    """A part of the measurement failed; the message says which and shows its last output."""


def process_cpu_seconds(pid: int) -> float:
    """Return user plus system time of all threads of `pid`, ended ones included.

    On Linux this reads the process's CPU clock, which counts nanoseconds; the ticks of
    ``/proc/PID/stat`` are too coarse for short runs. Raises psutil.NoSuchProcess.
    """
    if sys.platform == "linux":
        # The kernel's encoding of "CPU clock of that process", as clock_getcpuclockid() gives it.
        with contextlib.suppress(OSError):
            return time.clock_gettime((~pid << 3) | 2)
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def descendants_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all descendants of `pid`, of the ended and awaited ones too."""
    root = psutil.Process(pid)
    total = _ended_children_seconds(root)
    for child in root.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process_cpu_seconds(child.pid) + _ended_children_seconds(child)
    return total


def _ended_children_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0))


def rss_bytes(pid: int) -> int:
    """Return the resident memory of `pid`."""
    return int(psutil.Process(pid).memory_info().rss)


def reset_peak_rss(pid: int) -> None:
    """Make the peak of `pid` start again from what it holds now, where the system can do that."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/clear_refs", "w") as file:
        file.write("5")


def peak_rss_bytes(pid: int) -> int | None:
    """Return the highest resident memory of `pid` since the last reset; None where unknown."""
    try:
        with open(f"/proc/{pid}/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Child:
    """A process of ours, with its output in a file or, if `is_talking`, in JSON lines.

    A talking child gets commands as lines on its standard input and ends when that closes, so
    nothing survives the bench even if the bench is killed.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str] | None = None,
        is_talking: bool = False,
    ) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile(prefix="bench-", mode="w+b")  # noqa: SIM115
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if is_talking else subprocess.DEVNULL,
                stdout=subprocess.PIPE if is_talking else self._log,
                stderr=self._log,
                env={**os.environ, **(environment or {})},
            )
        except OSError as error:
            self._log.close()
            raise BenchError(f"cannot start {name} ({command[0]}): {error}") from error
        self.pid = self._process.pid
        self._reader: threading.Thread | None = None
        if is_talking:
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                self._lines.put(json.loads(line))
            except ValueError:
                self._lines.put({"event": "error", "message": f"not JSON: {line[:200]!r}"})
        self._lines.put({"event": "eof"})

    def tell(self, command: str) -> None:
        """Send one command line; BenchError if the child is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command.encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self.failure(f"does not listen ({error})") from error

    def expect(self, event: str, timeout_seconds: float) -> dict[str, Any]:
        """Return the child's next message; BenchError if it is not `event` or late."""
        message = self.poll(timeout_seconds)
        if message is None:
            raise self.failure(f"sent no {event!r} within {timeout_seconds:g} s")
        if message.get("event") != event:
            raise self.failure(f"sent {message!r} instead of {event!r}")
        return message

    def poll(self, timeout_seconds: float) -> dict[str, Any] | None:
        """Return the child's next message, or None if none comes within the time."""
        try:
            return self._lines.get(timeout=timeout_seconds)
        except queue.Empty:
            return None

    def is_alive(self) -> bool:
        """Say whether the process still runs."""
        return self._process.poll() is None

    def failure(self, what: str) -> BenchError:
        """Return an error about this child with the end of its log."""
        status = self._process.poll()
        ended = "" if status is None else f", exit status {status}"
        return BenchError(f"{self.name} {what}{ended}\n{self.log_tail()}")

    def log_tail(self, size_bytes: int = 3000) -> str:
        """Return the end of what the child wrote to its log."""
        # pread leaves the shared file offset alone, at which the child goes on to write.
        descriptor = self._log.fileno()
        end = os.fstat(descriptor).st_size
        start = max(0, end - size_bytes)
        return os.pread(descriptor, size_bytes, start).decode(errors="replace")

    def end(self, timeout_seconds: float = 10.0) -> None:
        """End the process and all its descendants: politely, then by force."""
        descendants: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            descendants = psutil.Process(self.pid).children(recursive=True)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        if self._process.stdin is None and self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _, left = psutil.wait_procs(descendants, timeout=2.0)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=2.0)
        if self._reader is not None:
            self._reader.join(2.0)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()
