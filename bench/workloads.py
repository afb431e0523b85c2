"""The workloads of the bench, each run by an unmodified client in a process of its own.

Owns what is submitted and the proof that all of it completed. It must not look at values: zero
workers return a constant for everything. `bench.run` starts it as
``python -m bench.workloads ADDRESS NAME …`` and leads it with lines on standard input: it says
`ready` once it is connected, warmed up and holds the graph to submit; `go` runs the workload,
`done` reports, the futures stay held until the input ends.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import select
import sys
import time
from collections.abc import Callable
from typing import Any

import dask
from dask._task_spec import List, Task, TaskRef
from distributed import Client, Future, wait

__all__ = ["WORKLOADS", "main"]

# Keys of one run must not meet those of the warm-up, which used the same functions.
WARM_UP_TASKS = 200


def increment(value: int) -> int:
    """The task of most workloads; never really run by zero workers."""
    return value + 1


def add_all(values: list[int]) -> int:
    """The task with many inputs."""
    return sum(values)


def partition(index: int) -> Any:
    """One partition of the dataframe to be shuffled."""
    import pandas  # type: ignore[import-untyped]

    return pandas.DataFrame({"a": [index], "b": [index]})


class Prepared:
    """A workload ready to go: `submit()` sends it and returns the futures to wait for."""

    def __init__(self, tasks: int, submit: Callable[[], list[Future]]) -> None:
        self.tasks = tasks
        self.submit = submit


def prepare_map(client: Client, tasks: int, tag: str) -> Prepared:
    """`tasks` independent tasks, every result wanted."""
    return Prepared(tasks, lambda: client.map(increment, range(tasks), key=f"map{tag}"))


def _low_level(client: Client, graph: dict[Any, Task], wanted: list[Any]) -> Prepared:
    return Prepared(len(graph), lambda: client.get(graph, wanted, sync=False))


def prepare_merge(client: Client, tasks: int, tag: str) -> Prepared:
    """`tasks` independent tasks and one that needs all of them; only that one is wanted."""
    inputs = [(f"in{tag}", index) for index in range(tasks)]
    graph: dict[Any, Task] = {key: Task(key, increment, key[1]) for key in inputs}
    last = f"merge{tag}"
    graph[last] = Task(last, add_all, List(*map(TaskRef, inputs)))
    return _low_level(client, graph, [last])


def prepare_tree(client: Client, tasks: int, tag: str) -> Prepared:
    """A binary reduction of about `tasks` tasks in all."""
    graph: dict[Any, Task] = {}
    level: list[Any] = [(f"leaf{tag}", index) for index in range(max(2, (tasks + 1) // 2))]
    for key in level:
        graph[key] = Task(key, increment, key[1])
    depth = 0
    while len(level) > 1:
        depth += 1
        upper = []
        for index in range(0, len(level), 2):
            key = (f"node{depth}{tag}", index // 2)
            pair = [TaskRef(name) for name in level[index : index + 2]]
            graph[key] = Task(key, add_all, List(*pair))
            upper.append(key)
        level = upper
    return _low_level(client, graph, level)


def prepare_chains(client: Client, tasks: int, tag: str) -> Prepared:
    """Chains of 100 tasks (shorter if there are few), as many as make `tasks`; the ends are wanted.

    The number of chains decides how much can run at once, their length how much data moves.
    """
    length = max(2, min(100, math.isqrt(tasks)))
    count = max(1, tasks // length)
    graph: dict[Any, Task] = {}
    ends = []
    for chain in range(count):
        previous: Any = None
        for step in range(length):
            key = (f"chain{tag}", chain, step)
            source = chain if previous is None else TaskRef(previous)
            graph[key] = Task(key, increment, source)
            previous = key
        ends.append(previous)
    return _low_level(client, graph, ends)


def _collection(client: Client, collection: Any) -> Prepared:
    # The scheduler optimizes again; here it is only done to count.
    from dask.base import collections_to_expr

    tasks = len(collections_to_expr([collection]).optimize().__dask_graph__())
    return Prepared(tasks, lambda: _futures(client.persist(collection)))


def _futures(collection: Any) -> list[Future]:
    from distributed.client import futures_of

    return list(futures_of(collection))


def prepare_array(client: Client, tasks: int, tag: str) -> Prepared:
    """``(x + x.T).sum()`` over a square dask.array with about `tasks` tasks."""
    import dask.array as da

    # Per block: the addition, a partial sum, and a third for its part of the sum tree.
    side = max(2, round(math.sqrt(tasks * 3 / 7)))
    x = da.ones((side * 10, side * 10), chunks=10, name=f"x{tag}")
    return _collection(client, (x + x.T).sum())


def prepare_shuffle(client: Client, tasks: int, tag: str) -> Prepared:
    """A dataframe shuffled by the `tasks` method: all-to-all splits in stages."""
    import dask.dataframe as dd

    count = 4
    # Two stages of `count` groups with about sqrt(count) splits each above 32 partitions.
    while (2 * math.sqrt(count) + 8 if count >= 32 else count + 3) * count < tasks:
        count += 1
    frame = dd.from_map(partition, range(count), meta=partition(0), label=f"part{tag}")
    return _collection(client, frame.shuffle("a", npartitions=count, shuffle_method="tasks"))


WORKLOADS: dict[str, Callable[[Client, int, str], Prepared]] = {
    "map": prepare_map,
    "merge": prepare_merge,
    "tree": prepare_tree,
    "chains": prepare_chains,
    "array": prepare_array,
    "shuffle": prepare_shuffle,
}


def finish(prepared: Prepared, timeout_seconds: float) -> dict[str, Any]:
    """Submit, wait, prove completion; return wall seconds, counts and the held futures."""
    start = time.monotonic()
    futures = prepared.submit()
    wait(futures, timeout=timeout_seconds)
    end = time.monotonic()
    bad = {future.status for future in futures} - {"finished"}
    if bad or not futures:
        raise RuntimeError(f"{len(futures)} futures, not all finished: {sorted(bad)}")
    return {
        "wall_seconds": end - start,
        "start": start,
        "end": end,
        "tasks": prepared.tasks,
        "futures": futures,
    }


def warm_up(client: Client, name: str, timeout_seconds: float) -> None:
    """Run a small map with its gather and a small one of the same kind, and forget both."""
    futures = client.map(increment, range(WARM_UP_TASKS), key="warm")
    client.gather(futures)
    del futures
    if name in WORKLOADS:
        finish(WORKLOADS[name](client, WARM_UP_TASKS, "-warm"), timeout_seconds)
    client.submit(increment, -1, key="warm-last").result(timeout=timeout_seconds)
    gc.collect()


def say(event: str, **fields: Any) -> None:
    """Print one line of JSON, at once."""
    print(json.dumps({"event": event, **fields}), flush=True)


def await_line(expected: str) -> None:
    """Wait for a command; SystemExit if the input ended or it is another one."""
    line = sys.stdin.readline().strip()
    if line != expected:
        raise SystemExit(f"expected {expected!r} on standard input, got {line!r}")


def run_workload(client: Client, name: str, tasks: int, timeout_seconds: float) -> None:
    """Lead one graph workload from `ready` to the release of its futures."""
    prepared = WORKLOADS[name](client, tasks, "")
    gc.collect()
    say("ready", tasks=prepared.tasks)
    await_line("go")
    outcome = finish(prepared, timeout_seconds)
    futures = outcome.pop("futures")
    say("done", futures=len(futures), **outcome)
    sys.stdin.read()
    del futures


def one_submit(client: Client, index: int, timeout_seconds: float) -> tuple[float, float]:
    """Return start and duration of one ``submit().result()``, in seconds."""
    start = time.monotonic()
    client.submit(increment, index, pure=False).result(timeout=timeout_seconds)
    return start, time.monotonic() - start


def run_submits(client: Client, tasks: int, timeout_seconds: float) -> None:
    """Single submits on an idle cluster, 50 ms between two calls."""
    say("ready", tasks=tasks)
    await_line("go")
    began = time.monotonic()
    samples = []
    for index in range(tasks):
        samples.append(one_submit(client, index, timeout_seconds))
        time.sleep(0.05)
    end = time.monotonic()
    say(
        "done",
        tasks=tasks,
        futures=tasks,
        samples=samples,
        wall_seconds=end - began,
        start=began,
        end=end,
    )
    sys.stdin.read()


def run_probe(client: Client, timeout_seconds: float) -> None:
    """Submit without a pause from `go` to the next line; the bench cuts out the time it wants."""
    say("ready", tasks=0)
    await_line("go")
    say("going")
    samples: list[tuple[float, float]] = []
    while not select.select([sys.stdin], [], [], 0)[0]:
        samples.append(one_submit(client, len(samples), timeout_seconds))
    await_line("stop")
    say("done", tasks=len(samples), samples=samples)
    sys.stdin.read()


def main(arguments: list[str] | None = None) -> int:
    """Connect, warm up and run one workload; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.workloads", description=__doc__)
    parser.add_argument("address")
    parser.add_argument("name", choices=[*WORKLOADS, "submits", "probe"])
    parser.add_argument("--tasks", type=int, default=50_000)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each step")
    args = parser.parse_args(arguments)
    # Materializing happens with the scheduler's settings; this keeps the client's count equal.
    dask.config.set({"dataframe.shuffle.method": "tasks"})
    with Client(args.address, timeout=30) as client:
        warm_up(client, args.name, args.timeout)
        if args.name == "submits":
            run_submits(client, args.tasks, args.timeout)
        elif args.name == "probe":
            run_probe(client, args.timeout)
        else:
            run_workload(client, args.name, args.tasks, args.timeout)
    return 0


if __name__ == "__main__":
    # Under `-m` this module is __main__, and functions of __main__ are pickled by value. Users'
    # functions mostly live in modules, so run the importable copy of this one.
    from bench.workloads import main as imported_main

    sys.exit(imported_main())
