"""``make demo``: a real job on the daemon and two stock workers, checked and accounted for.

Starts everything on loopback, runs an array reduction, a table's shuffle and group-by and plain
futures with the stock client, compares each result with NumPy's, pandas' or Python's own, prints
what that cost the scheduler, and stops everything. Exit status 0 if all was right, else 1. Called
as ``python -m distributed_core.demo``; not a part of the daemon.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Self, TextIO

import dask
from distributed import Client
from prometheus_client.parser import text_string_to_metric_families

from distributed_core.deploy.local_cluster import LocalCluster, StartError

__all__ = ["CheckFailed", "Progress", "Reading", "main"]

_RESULT_SECONDS = 120
_MAPPED = 4000
_SCRAPE_SECONDS = 0.25
_BAR_WIDTH = 28
_LABEL_WIDTH = 38


class CheckFailed(Exception):
    """A result is not what it must be; says which, in words."""


class Reading(NamedTuple):
    """What the scheduler says of itself on ``/metrics``."""

    cpu_seconds: float
    assigned: int
    """Tasks sent to workers since it started."""
    processing: int
    """Tasks that are with a worker."""
    to_do: int
    """Tasks that still need a worker."""
    transitions: int
    materializer_cpu_seconds: float
    lag_seconds: float
    """The longest time in the last minute for which it answered nobody."""

    @classmethod
    def take(cls, http_address: str) -> Reading:
        """Read ``/metrics``.

        :raises OSError: nobody answers.
        """
        with urllib.request.urlopen(f"{http_address}/metrics", timeout=10) as response:
            return cls.parse(response.read().decode())

    @classmethod
    def parse(cls, text: str) -> Reading:
        """Make a reading of the text of a scrape."""
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name + sample.labels.get("state", "")] = sample.value
        states = {
            state: int(values.get(f"dask_scheduler_tasks{state}", 0))
            for state in ("waiting", "no-worker", "queued", "processing")
        }
        return cls(
            values["process_cpu_seconds_total"],
            int(values["distributed_core_tasks_assigned_total"]),
            states.pop("processing"),
            sum(states.values()),
            int(values["distributed_core_engine_transitions_total"]),
            values["distributed_core_materializer_cpu_seconds_total"],
            values["distributed_core_event_loop_lag_maximum_seconds"],
        )


class Progress:
    """Shows how far a part of the job is while it runs: a bar, or without a terminal a line.

    :param label: what runs.
    :param read: reads the scheduler; called in a thread of ours until the block ends.
    :param out: where to write.
    """

    def __init__(self, label: str, read: Callable[[], Reading], out: TextIO) -> None:
        self._label = label
        self._read = read
        self._out = out
        self._is_terminal = out.isatty()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
        self.before = self.after = read()
        self._started = time.monotonic()
        self.seconds = 0.0

    def __enter__(self) -> Self:
        if self._is_terminal:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.seconds = time.monotonic() - self._started
        self._stop.set()
        if self._is_terminal:
            self._thread.join()
            self._out.write("\r\x1b[K")
        if kind is None:
            self.after = self._read()
            self._write_end("ok")
        else:
            self._write_end("FAILED")

    @property
    def tasks(self) -> int:
        """Tasks that were sent to workers meanwhile."""
        return self.after.assigned - self.before.assigned

    @property
    def cpu_seconds(self) -> float:
        """Processor time of the scheduler's process meanwhile."""
        return self.after.cpu_seconds - self.before.cpu_seconds

    def bar(self, reading: Reading) -> str:
        """The line that shows ``reading``."""
        done = reading.assigned - self.before.assigned - reading.processing
        total = max(done, 0) + reading.processing + reading.to_do
        filled = _BAR_WIDTH * max(done, 0) // total if total else 0
        seconds = time.monotonic() - self._started
        return (
            f"  {self._label:<{_LABEL_WIDTH}} [{'#' * filled:-<{_BAR_WIDTH}}] "
            f"{max(done, 0)}/{total} {seconds:4.1f} s"
        )

    def _watch(self) -> None:
        while not self._stop.wait(_SCRAPE_SECONDS):
            try:
                line = self.bar(self._read())
            except OSError as exc:
                # What runs will fail for the same reason, and say so.
                line = f"  {self._label}: no answer from the scheduler ({exc})"
            self._out.write(f"\r{line}\x1b[K")
            self._out.flush()

    def _write_end(self, verdict: str) -> None:
        numbers = f"{self.tasks:>6} tasks {self.seconds:5.1f} s" if verdict == "ok" else ""
        self._out.write(f"  {self._label:<{_LABEL_WIDTH}} {numbers}  {verdict}\n")
        self._out.flush()


def check(is_right: bool, what: str) -> None:
    """Raise CheckFailed with ``what`` unless it holds."""
    if not is_right:
        raise CheckFailed(what)


# The job.


def reduce_array(client: Client) -> None:
    """Sum over an array and its transpose, rechunked on the way, against NumPy."""
    import dask.array as da
    import numpy as np

    size = 2000
    numbers = da.arange(size * size, chunks=size * 100).reshape(size, size) % 97
    stripes = numbers.rechunk((size, 100), method="tasks")
    total = (stripes.rechunk((250, 250), method="tasks") + numbers.T).sum(axis=0)
    result = client.compute(total).result(timeout=_RESULT_SECONDS)

    expected = np.arange(size * size).reshape(size, size) % 97
    expected = (expected + expected.T).sum(axis=0)
    check(bool(np.array_equal(result, expected)), "the array's sum differs from NumPy's")


def shuffle_table(client: Client) -> None:
    """Group a table by a key after a shuffle, against pandas."""
    import dask.dataframe as dd
    import numpy as np
    import pandas as pd  # type: ignore[import-untyped]

    rows = 200_000
    generator = np.random.default_rng(7)
    table = pd.DataFrame(
        {
            "key": generator.integers(0, 5_000, rows),
            "value": generator.integers(0, 1_000, rows),
        }
    )
    parts = dd.from_pandas(table, npartitions=16)
    shuffled = parts.shuffle("key", shuffle_method="tasks")
    # After the shuffle each key is in one partition, so partial results are final.
    grouped = shuffled.map_partitions(
        lambda part: part.groupby("key").agg({"value": ["sum", "max"]}),
        meta=table.head().groupby("key").agg({"value": ["sum", "max"]}),
    )
    result = client.compute(grouped).result(timeout=_RESULT_SECONDS).sort_index()

    expected = table.groupby("key").agg({"value": ["sum", "max"]})
    check(bool(result.equals(expected)), "the table's groups differ from those of pandas")


def increment(number: int) -> int:
    """The smallest task there is."""
    return number + 1


def fail_once(marker: str, value: int) -> int:
    """Fail the first time, wherever that was."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return value
    raise ConnectionError("the first attempt fails")


def fail_always(reason: str) -> None:
    """Fail."""
    raise LookupError(reason)


def map_futures(client: Client) -> None:
    """Many small tasks, and their sum, against Python."""
    futures = client.map(increment, range(_MAPPED))
    total = client.submit(sum, futures)
    expected = list(range(1, _MAPPED + 1))
    check(total.result(timeout=_RESULT_SECONDS) == sum(expected), "the futures' sum is wrong")
    check(client.gather(futures) == expected, "gathered futures are wrong")


def fail_and_retry(client: Client) -> None:
    """One task fails and is retried, one fails for good: its exception arrives as raised."""
    with tempfile.TemporaryDirectory() as directory:
        retried = client.submit(fail_once, os.path.join(directory, "tried"), 42, retries=2)
        check(retried.result(timeout=_RESULT_SECONDS) == 42, "the retried task is wrong")
        check(bool(os.listdir(directory)), "the retried task never failed")
    failed = client.submit(fail_always, "for good", retries=1)
    error = failed.exception(timeout=_RESULT_SECONDS)
    check(
        isinstance(error, LookupError) and error.args == ("for good",),
        f"the failed task should have raised LookupError('for good'), not {error!r}",
    )


_PARTS: Sequence[tuple[str, Callable[[Client], None]]] = (
    ("array: rechunk, transpose, sum", reduce_array),
    ("dataframe: shuffle, groupby", shuffle_table),
    (f"futures: map {_MAPPED}, sum, gather", map_futures),
    ("futures: one retried, one fails", fail_and_retry),
)


# The account.


def report(parts: Sequence[tuple[str, Progress]], out: TextIO) -> None:
    """Print what the scheduler did."""
    out.write("\nWhat the scheduler did\n")
    out.write(f"  {'':<{_LABEL_WIDTH}} {'tasks':>7} {'CPU, its process':>17} {'per task':>9}\n")
    rows = [(label, part.tasks, part.cpu_seconds) for label, part in parts]
    rows.append(("all", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    for label, tasks, cpu in rows:
        per_task = f"{1e6 * cpu / tasks:.0f} µs" if tasks else "-"
        out.write(f"  {label:<{_LABEL_WIDTH}} {tasks:>7} {1e3 * cpu:>14.0f} ms {per_task:>9}\n")
    before, after = parts[0][1].before, parts[-1][1].after
    opened = after.materializer_cpu_seconds - before.materializer_cpu_seconds
    out.write(
        f"  {after.transitions - before.transitions} transitions; "
        f"{1e3 * opened:.0f} ms of CPU in the helper process that opens graphs; "
        f"at most {1e3 * after.lag_seconds:.0f} ms without an answer\n"
        "  (heartbeats, the client's start and the reading of /metrics are included)\n"
    )


def run(out: TextIO) -> None:
    """Run it all.

    :raises CheckFailed: a result is wrong.
    :raises StartError: the cluster cannot be started.
    """
    out.write("Starting the daemon and two stock workers on loopback\n")
    out.flush()
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with (
        dask.config.set({"dataframe.shuffle.method": "tasks", "array.rechunk.method": "tasks"}),
        LocalCluster(
            n_workers=2, threads_per_worker=2, nanny=False, name="demo", env=threads
        ) as cluster,
        cluster.get_client() as client,
    ):
        out.write(f"  scheduler {cluster.scheduler_address}, {cluster.dashboard_link}\n\n")
        parts: list[tuple[str, Progress]] = []
        try:
            for label, part in _PARTS:
                with Progress(label, lambda: Reading.take(cluster.http_address), out) as progress:
                    part(client)
                parts.append((label, progress))
        except Exception:
            for name, log in cluster.logs().items():
                if log:
                    sys.stderr.write(f"\nThe log of {name}:\n{log}")
            raise
        report(parts, out)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m distributed_core.demo", description=__doc__)
    parser.parse_args(argv)
    started = time.monotonic()
    try:
        run(sys.stdout)
    except (CheckFailed, StartError, TimeoutError) as exc:
        sys.stdout.flush()
        sys.stderr.write(f"\nThe demo failed: {str(exc) or type(exc).__name__}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted; everything was stopped.\n")
        return 130
    sys.stdout.write(
        f"\nAll results are right; everything was stopped. {time.monotonic() - started:.0f} s\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
