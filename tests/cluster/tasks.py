"""Functions that the cluster tests send to workers by reference. Imports stay light."""

from __future__ import annotations

import operator
import os
import time
from pathlib import Path
from typing import Any


class OwnError(Exception):
    """An exception class of the user's own, with more state than a message."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message, code)
        self.message = message
        self.code = code


def inc(x: int) -> int:
    return x + 1


def add(x: Any, y: Any) -> Any:
    return operator.add(x, y)


def total(items: Any) -> Any:
    return sum(items)


def slow_inc(x: int, delay: float = 0.05) -> int:
    time.sleep(delay)
    return x + 1


def innermost_failure(code: int) -> None:
    raise OwnError("it went wrong", code)


def fail(code: int = 7, *ignored: Any) -> None:
    innermost_failure(code)


def fail_times(counter: str, times: int, value: Any) -> Any:
    """Raise on the first `times` calls; `counter` is a file that keeps count."""
    note(counter, "x")
    if len(Path(counter).read_text().splitlines()) <= times:
        raise OwnError("not yet", times)
    return value


def note(path: str, text: str) -> str:
    """Append a line to a file: one write, so lines of several processes do not mix."""
    with open(path, "a") as file:
        file.write(f"{text}\n")
    return text


def gate(started: str, release: str, value: Any = None, timeout: float = 30.0) -> Any:
    """Create the file `started`, then block until the file `release` exists."""
    note(started, str(os.getpid()))
    deadline = time.monotonic() + timeout
    while not os.path.exists(release):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{release} was never created")
        time.sleep(0.005)
    return value


def where(*ignored: Any) -> str:
    """Address of the worker that runs this."""
    from distributed import get_worker

    return get_worker().address


def die(*ignored: Any) -> None:
    os._exit(11)


def payload(nbytes: int) -> bytes:
    return b"x" * nbytes


class Counter:
    """An actor."""

    n = 0  # a proxy offers the attributes that the class has

    def __init__(self, start: int = 0) -> None:
        self.n = start

    def increment(self, by: int = 1) -> int:
        self.n += by
        return self.n

    def fail(self) -> None:
        raise OwnError("actor says no", 3)

    def where(self) -> str:
        return where()


def knows(key: Any, dask_worker: Any = None) -> bool:
    """Run on a worker: whether it knows ``key``."""
    return key in dask_worker.state.tasks
