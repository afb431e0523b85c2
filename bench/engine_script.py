"""What the engine alone costs: scripted events into a scheduler machine, no wire, no workers.

    python -m bench.engine_script [--tasks N] [--workers 10,1000,10000] [--memory N]

For each workload and number of workers: process CPU per task and per event, of the machine with a
sink that keeps nothing but the orders. The time in which the script makes its events is measured
apart and taken off. A flat row says that nothing on a task's path grows with the workers.
``--memory`` instead holds that many tasks in memory and prints what each costs.
"""

from __future__ import annotations

import argparse
import gc
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

from cython_ext import events as ev
from cython_ext.cluster import EngineSettings
from cython_ext.entities import Worker
from cython_ext.sink import RecordingSink
from cython_ext.transitions import SchedulerMachine

__all__ = ["main"]

Rows = list[tuple[str, list[int]]]


def map_rows(n: int) -> Rows:
    """``n`` root tasks."""
    return [(f"inc-{i:032x}", []) for i in range(n)]


def tree_rows(n: int) -> Rows:
    """``n`` tasks in all: leaves, and sums of two of the level below."""
    rows: Rows = [(f"leaf-{i:032x}", []) for i in range(n // 2)]
    level = list(range(len(rows)))
    while len(level) > 1:
        above = []
        for i in range(0, len(level) - 1, 2):
            above.append(len(rows))
            rows.append((f"sum-{len(rows):032x}", [level[i], level[i + 1]]))
        level = above + level[len(level) & ~1 :]
    return rows


def chain_rows(n: int) -> Rows:
    """Chains of ten tasks."""
    return [(f"step{i % 10}-{i:032x}", [i - 1] if i % 10 else []) for i in range(n)]


WORKLOADS: dict[str, Callable[[int], Rows]] = {
    "map": map_rows,
    "tree": tree_rows,
    "chains": chain_rows,
}


class Script:
    """One machine with ``n_workers`` workers of one thread, and one client."""

    def __init__(self, n_workers: int, **settings: Any) -> None:
        self.sink = RecordingSink()
        self.machine = SchedulerMachine(EngineSettings(**settings), self.sink)
        self.machine.handle(ev.ClientConnected(0.0, "start", client_id="c", info=None, peer=self))
        for i in range(n_workers):
            self.machine.handle(
                ev.WorkerRegistered(
                    0.0,
                    "start",
                    address=f"tcp://127.0.0.1:{i}",
                    name=i,
                    host="127.0.0.1",
                    server_id=str(i),
                    nthreads=1,
                    memory_limit=0,
                    resources={},
                    status="running",
                    info=None,
                    peer=None,
                )
            )
        self.workers = self.machine.state.workers
        self.n_events = 0
        self.engine_seconds = 0.0

    def handle(self, events: list[ev.Event]) -> None:
        """Feed events, and count what they cost."""
        handle = self.machine.handle
        start = time.process_time()
        for event in events:
            handle(event)
        self.engine_seconds += time.process_time() - start
        self.n_events += len(events)

    def submit(self, rows: Rows, wanted: Callable[[int], bool], slice_tasks: int = 2000) -> None:
        """Bring in a graph, slice by slice."""
        n = len(rows)
        last = [0] * n
        for i, (_, needs) in enumerate(rows):
            for need in needs:
                last[need] = i
        self.handle(
            [
                ev.GraphBegun(
                    1.0,
                    "graph",
                    client_id="c",
                    submission=1,
                    n_tasks=n,
                    externals=[],
                    wanted_externals=[],
                    submitting_task=None,
                    fifo_timeout=0.0,
                    user_priority=0.0,
                    actors=None,
                    wanted=[],
                )
            ]
        )
        groups: dict[str, int] = {}
        for start in range(0, n, slice_tasks):
            self.handle(
                [self._slice(rows, last, start, min(n, start + slice_tasks), wanted, groups)]
            )
        self.handle([ev.GraphEnded(1.0, "graph", submission=1)])

    def _slice(
        self,
        rows: Rows,
        last: list[int],
        start: int,
        stop: int,
        wanted: Callable[[int], bool],
        groups: dict[str, int],
    ) -> ev.Event:
        part = rows[start:stop]
        known = len(groups)
        index = [groups.setdefault(key.partition("-")[0], len(groups)) for key, _ in part]
        new = list(groups)[known:]
        n = len(part)
        return ev.GraphSliceReady(
            1.0,
            "graph",
            submission=1,
            start=start,
            keys=[key for key, _ in part],
            dependency_counts=struct.pack(f"<{n}i", *(len(needs) for _, needs in part)),
            dependencies=b"".join(struct.pack(f"<{len(needs)}i", *needs) for _, needs in part),
            order=struct.pack(f"<{n}d", *range(start, stop)),
            flags=bytes(1 if wanted(i) else 0 for i in range(start, stop)),
            # Every task of these graphs is the input of at most one other.
            future_dependents=struct.pack(f"<{n}i", *(last[i] >= stop for i in range(start, stop))),
            new_prefixes=new,
            new_groups=new,
            new_group_prefix=struct.pack(f"<{len(new)}i", *range(known, known + len(new))),
            group_index=struct.pack(f"<{n}i", *index),
            new_annotations=[],
            annotation_index=struct.pack(f"<{n}i", *[-1] * n),
            # As large as the pickle of a small call, and one for each task.
            run_specs=[b"%0110d" % i for i in range(start, stop)],
        )

    def answer(self) -> Iterator[list[ev.Event]]:
        """Finish what is ordered until nothing is; yields each batch before it is handled."""
        while True:
            batch: list[ev.Event] = [
                self._finished(self.workers[effect[1]], effect[2], effect[3])
                for effect in self.sink.take()
                if effect[0] == "compute-task"
            ]
            if not batch:
                return
            yield batch
            self.handle(batch)

    def _finished(self, worker: Worker, key: Any, run_id: int) -> ev.Event:
        return ev.TaskFinished(
            2.0,
            "finished",
            worker=worker,
            key=key,
            run_id=run_id,
            nbytes=28,
            typename="int",
            type=b"int",
            compute_start=1.0,
            compute_stop=1.001,
            compute_seconds=0.001,
            transfer_seconds=0.0,
            metadata=None,
            thread=1,
            startstops=None,
            has_compute=True,
        )


def measure(workload: str, n_tasks: int, n_workers: int) -> tuple[float, float]:
    """CPU microseconds per task and per event, from submission to release."""
    script = Script(n_workers)
    rows = WORKLOADS[workload](n_tasks)
    needed = {need for _, needs in rows for need in needs}
    script.submit(rows, lambda i: i not in needed)
    for _ in script.answer():
        pass
    keys = [key for i, (key, _) in enumerate(rows) if i not in needed]
    script.handle([ev.KeysReleased(3.0, "release", client_id="c", keys=keys)])
    if script.machine.state.tasks:
        raise RuntimeError(f"{len(script.machine.state.tasks)} tasks are left")
    micros = script.engine_seconds * 1e6
    return micros / len(rows), micros / script.n_events


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def measure_memory(n_tasks: int) -> float:
    """Bytes per task in memory that a client wants, with its key and its run_spec."""
    script = Script(24)
    gc.collect()
    empty = resident_bytes()
    rows = map_rows(n_tasks)
    script.submit(rows, lambda _: True)
    for _ in script.answer():
        pass
    script.sink.take()
    held = script.machine.state.task_counts["memory"]
    if held != n_tasks:
        raise RuntimeError(f"{held} of {n_tasks} tasks are in memory")
    # The keys live on in the machine; the rest of the rows is the script's own.
    del rows
    gc.collect()
    return (resident_bytes() - empty) / n_tasks


def main(arguments: list[str] | None = None) -> None:
    """Run and print a table."""
    parser = argparse.ArgumentParser(description="cost of the engine alone")
    parser.add_argument("--tasks", type=int, default=50_000)
    parser.add_argument("--workers", default="10,1000,10000")
    parser.add_argument("--memory", type=int, default=0, metavar="TASKS")
    options = parser.parse_args(arguments)
    gc.freeze()
    gc.set_threshold(50_000, 50, 1000)
    if options.memory:
        held = measure_memory(options.memory)
        print(f"{options.memory} tasks in memory: {held:.0f} bytes each")
        return
    print(f"{'workload':10} {'workers':>8} {'us/task':>9} {'us/event':>9}")
    for workload in WORKLOADS:
        for n_workers in map(int, options.workers.split(",")):
            per_task, per_event = measure(workload, options.tasks, n_workers)
            print(f"{workload:10} {n_workers:8} {per_task:9.2f} {per_event:9.2f}")


if __name__ == "__main__":
    main()
