"""The materializer with real child processes and the messages of a stock client."""

from __future__ import annotations

import asyncio
import dataclasses
import operator
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import msgpack
import numpy as np
import pandas as pd
import psutil
import pytest
import uvloop
from dask._expr import LLGExpr
from dask._task_spec import Alias, DataNode, Task, TaskRef
from distributed.client import Future
from distributed.core import clean_exception
from distributed.protocol import ToPickle
from distributed.protocol import core as wire

from distributed_core.materializer.parts import (
    GraphBegin,
    GraphEnd,
    GraphFailed,
    Opaque,
    Packed,
    Part,
    SliceFlag,
    Submission,
)
from distributed_core.materializer.pool import CallFailed, MaterializerPool, PoolStats
from tests.unit.test_materializer_support import (
    Graph,
    decode,
    from_expression,
    load_run_spec,
    make_submission,
    record,
    recorded,
)

ROOT = Path(__file__).parents[2]
SECONDS = 60.0


class PoolThread:
    """A pool on an event loop of its own, driven from the tests' thread."""

    def __init__(self, **options: Any) -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.pool: MaterializerPool = self.do(self._make(options))

    async def _make(self, options: dict[str, Any]) -> MaterializerPool:
        pool = MaterializerPool(**options)
        await pool.start()
        return pool

    def do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(SECONDS)

    def parts(self, submission: Submission) -> list[Part]:
        async def collect() -> list[Part]:
            return [part async for part in self.pool.submit(submission)]

        parts: list[Part] = self.do(collect())
        assert [isinstance(p, GraphEnd | GraphFailed) for p in parts] == [
            *[False] * (len(parts) - 1),
            True,
        ]
        return parts

    def graph(self, submission: Submission) -> Graph:
        return decode(self.parts(submission))

    def failure(self, submission: Submission) -> GraphFailed:
        end = self.parts(submission)[-1]
        assert isinstance(end, GraphFailed), end
        return end

    def stats(self) -> PoolStats:
        async def copy() -> PoolStats:
            return dataclasses.replace(self.pool.stats())

        stats: PoolStats = self.do(copy())
        return stats

    def close(self) -> None:
        self.do(self.pool.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(SECONDS)
        self.loop.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[PoolThread]:
    pool = PoolThread()
    yield pool
    pool.close()


@pytest.fixture
def own_pool() -> Iterator[Callable[..., PoolThread]]:
    """Makes pools with settings of their own."""
    pools = []

    def make(**options: Any) -> PoolThread:
        pools.append(PoolThread(**options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"timed out waiting for {what}")


def children() -> set[int]:
    return {
        process.pid
        for process in psutil.Process().children()
        if "distributed_core.materializer.child" in " ".join(process.cmdline())
    }


def collection(value: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda client: client.compute(value, sync=False, **options)


# ---- graphs of all kinds of clients' calls


def test_submit(pool: PoolThread) -> None:
    graph = pool.graph(recorded(lambda c: c.submit(operator.add, 1, 2, key="add-1")))
    assert graph.keys == ["add-1"]
    assert graph.compute() == {"add-1": 3}
    assert graph.flags == [SliceFlag.WANTED]
    assert graph.prefixes == ["add"]
    assert graph.groups == ["add"]
    assert graph.annotations == [None]
    assert graph.order == [0.0]
    assert graph.begin.externals == ()
    assert graph.begin.span["metadata"] == {"collections": ({"type": "Future"},)}
    assert graph.begin.span["problems"] == ()
    assert isinstance(graph.end, GraphEnd)
    assert graph.end.cpu_seconds < 1


def test_map_keeps_the_clients_priorities(pool: PoolThread) -> None:
    graph = pool.graph(recorded(lambda c: c.map(operator.neg, range(10), key="neg")))
    assert graph.order == list(range(10))
    assert sorted(graph.compute().values()) == list(range(-9, 1))
    assert [graph.compute()[key] for key in graph.keys] == [-i for i in range(10)]


def test_map_with_a_large_keyword(pool: PoolThread) -> None:
    big = np.arange(100_000)
    graph = pool.graph(recorded(lambda c: c.map(np.searchsorted, [big], v=big, key=["a"])))
    assert graph.keys == ["v", "a"]
    assert graph.flags[0] == SliceFlag.DATA_PRODUCER | SliceFlag.DATA_NODE
    assert graph.flags[1] == SliceFlag.WANTED
    assert np.array_equal(graph.compute()["a"], big)


def test_map_over_nested_arguments_and_futures(pool: PoolThread) -> None:
    def action(client: Any) -> Any:
        future = Future("outside", client)
        return client.map(lambda a, b: (a, b), [[future, 1]], [{"x": future}], key=["pair"])

    graph = pool.graph(recorded(action))
    assert graph.begin.externals == ("outside",)
    assert graph.dependencies == [["outside"]]
    assert graph.compute({"outside": 7})["pair"] == ([7, 1], {"x": 7})


def test_lambda_and_closure(pool: PoolThread) -> None:
    shared: list[int] = []

    def same(other: list[int]) -> bool:
        return other is shared

    graph = pool.graph(recorded(lambda c: c.map(same, [shared] * 5, pure=False)))
    assert list(graph.compute().values()) == [True] * 5


def test_future_as_argument_is_a_dependency(pool: PoolThread) -> None:
    def action(client: Any) -> Any:
        return client.submit(operator.add, Future(("x", 0), client), 1, key="y")

    graph = pool.graph(recorded(action))
    assert graph.begin.externals == (("x", 0),)
    assert graph.dependencies == [[("x", 0)]]
    assert graph.compute({("x", 0): 1})["y"] == 2


def test_delayed(pool: PoolThread) -> None:
    leaves = [dask.delayed(operator.neg)(i, dask_key_name=f"leaf-{i}") for i in range(5)]
    total = dask.delayed(sum)(leaves, dask_key_name="total")
    submission = recorded(collection(total))
    graph = pool.graph(submission)
    (key,) = submission.keys
    assert graph.compute()[key] == -10
    assert [flag & SliceFlag.WANTED for flag in graph.flags] == [int(k == key) for k in graph.keys]


def test_array(pool: PoolThread) -> None:
    x = da.from_array(np.arange(400.0).reshape(20, 20), chunks=(5, 5))
    submission = recorded(collection((x + x.T).sum()), slice_tasks=7)
    graph = pool.graph(submission)
    (key,) = submission.keys
    assert graph.compute()[key] == np.arange(400.0).sum() * 2
    assert len(graph.slices) > 1
    assert graph.order == sorted(graph.order)
    assert any(flag & SliceFlag.DATA_PRODUCER for flag in graph.flags)
    assert graph.begin.span["metadata"]["collections"][0]["type"] == "Array"


def test_persisted_array_is_external(pool: PoolThread) -> None:
    x = da.ones(10, chunks=5)

    def action(client: Any) -> Any:
        persisted = client.persist(x)
        client.messages.clear()
        return client.compute(persisted.sum(), sync=False)

    graph = pool.graph(recorded(action))
    names = {key[0] for key in graph.begin.externals}
    assert names == {x.name}
    outside = {key: np.ones(5) for key in graph.begin.externals}
    assert graph.compute(outside)[graph.keys[-1]] == 10.0


def test_dataframe_groupby_with_task_shuffle(pool: PoolThread) -> None:
    frame = pd.DataFrame({"k": [1, 2, 3, 4] * 10, "v": range(40)})
    with dask.config.set({"dataframe.shuffle.method": "tasks"}):
        result = dd.from_pandas(frame, npartitions=4).groupby("k").v.sum(split_out=2)
        submission = recorded(collection(result), slice_bytes=4000)
    graph = pool.graph(submission)
    (key,) = submission.keys
    got = graph.compute()[key].sort_index()
    assert got.tolist() == frame.groupby("k").v.sum().tolist()
    assert len(graph.slices) > 1


def test_bag(pool: PoolThread) -> None:
    submission = recorded(collection(db.from_sequence(range(10), npartitions=3).map(str).count()))
    graph = pool.graph(submission)
    (key,) = submission.keys
    assert graph.compute()[key] == 10


def test_raw_graph_is_culled_and_legacy_tasks_are_converted(pool: PoolThread) -> None:
    dsk = {
        "a": 1,
        "n": (operator.neg, "a"),
        "b": Task("b", operator.add, TaskRef("n"), TaskRef("out")),
        "c": (operator.neg, "a"),
    }
    graph = pool.graph(from_expression(LLGExpr(dsk), ["b", "gone"]))
    assert graph.keys == ["a", "n", "b"]
    assert graph.begin.externals == ("out",)
    assert graph.begin.wanted_externals == ("gone",)
    assert graph.compute({"out": 4})["b"] == 3


def test_self_alias_is_dropped(pool: PoolThread) -> None:
    graph = pool.graph(
        from_expression(LLGExpr({"a": Alias("a"), "b": Alias("b", "a")}), ["a", "b"])
    )
    assert graph.keys == ["b"]
    assert graph.begin.externals == ("a",)
    assert graph.begin.wanted_externals == ("a",)


def test_bare_empty_dict_is_an_empty_graph(pool: PoolThread) -> None:
    graph = pool.graph(from_expression({}, []))
    assert graph.keys == []
    assert graph.slices == []


@pytest.mark.parametrize("key", ["x", 5, 1.5, ("x", 1, ("y", 2.5)), "", "(odd", "<lambda>-1"])
def test_keys_of_all_kinds(pool: PoolThread, key: Any) -> None:
    graph = pool.graph(from_expression(LLGExpr({key: Task(key, int)}), [key]))
    assert graph.keys == [key]
    assert type(graph.keys[0]) is type(key)
    assert isinstance(graph.groups[0], str)


def test_numpy_numbers_in_keys_become_plain(pool: PoolThread) -> None:
    key = ("x", np.int64(3))
    dsk = {key: Task(key, int), "y": Task("y", abs, TaskRef(key))}
    graph = pool.graph(from_expression(LLGExpr(dsk), ["y"]))
    assert graph.keys == [("x", 3), "y"]
    assert type(graph.keys[0][1]) is int


@pytest.mark.parametrize("key", [b"x", None, ("x", pd.Timestamp(0)), 1 << 70])
def test_keys_that_cannot_travel(pool: PoolThread, key: Any) -> None:
    dsk = {key: Task(key, int), "y": Task("y", abs, TaskRef(key))}
    failure = pool.failure(from_expression(LLGExpr(dsk), ["y"]))
    assert failure.kind in {"unsupported", "materialize"}
    assert "key" in failure.message


def test_priorities_against_dependencies(pool: PoolThread) -> None:
    dsk = {
        k: Task(k, abs, *([TaskRef(n)] if n else [])) for k, n in zip("abc", "bc\0", strict=True)
    }
    dsk["c"] = Task("c", int)
    graph = pool.graph(
        from_expression(LLGExpr(dsk), ["a", "b", "c"], internal_priority={"a": 0, "b": 1, "c": 2})
    )
    assert graph.keys == ["c", "b", "a"]
    assert graph.order == [2, 1, 0]


def test_cycle(pool: PoolThread) -> None:
    dsk = {"a": Task("a", abs, TaskRef("b")), "b": Task("b", abs, TaskRef("a"))}
    assert pool.failure(from_expression(LLGExpr(dsk), ["a"])).kind == "materialize"
    failure = pool.failure(from_expression(LLGExpr(dsk), ["a"], internal_priority={"a": 0, "b": 1}))
    assert failure.kind == "materialize"
    assert "cycle" in failure.message


def test_packed_keys_and_priorities(pool: PoolThread) -> None:
    submission = recorded(lambda c: c.map(operator.neg, range(5)))
    keys = list(submission.keys)
    assert isinstance(submission.internal_priority, dict)
    plain = pool.graph(submission)
    submission.keys = Packed(msgpack.packb({"__Set__": True, "as-list": keys}))
    submission.internal_priority = Packed(msgpack.packb(submission.internal_priority))
    packed = pool.graph(submission)
    assert packed.keys == plain.keys
    assert packed.flags == plain.flags == [SliceFlag.WANTED] * 5


# ---- slices and payloads


def test_large_graph_in_slices(pool: PoolThread) -> None:
    submission = recorded(collection(da.ones((60, 60), chunks=(1, 1)).sum()), slice_tasks=500)
    graph = pool.graph(submission)
    assert len(graph.keys) > 3600
    assert all(len(part.keys) <= 500 for part in graph.slices)
    assert len(graph.slices) >= len(graph.keys) / 500
    (key,) = submission.keys
    assert graph.compute()[key] == 3600


def test_slice_bytes(pool: PoolThread) -> None:
    submission = recorded(lambda c: c.map(len, ["x" * 1000] * 10, pure=False), slice_bytes=3000)
    graph = pool.graph(submission)
    assert [len(part.keys) for part in graph.slices] == [3, 3, 3, 1]


@pytest.mark.parametrize("size", [10, 10_000, 10_000_000])
def test_buffers_travel_out_of_band(pool: PoolThread, size: int) -> None:
    array = np.arange(size, dtype="u1")
    graph = pool.graph(recorded(lambda c: c.submit(np.sum, array, key="s")))
    (run_spec,) = graph.run_specs
    assert len(run_spec) == 2
    assert len(run_spec[1]) == size
    assert graph.compute()["s"] == array.sum()


@pytest.mark.parametrize("size", [200, 70_000, 1_000_000])
def test_long_pickles(pool: PoolThread, size: int) -> None:
    graph = pool.graph(recorded(lambda c: c.map(len, ["x" * size] * 4, pure=False)))
    assert list(graph.compute().values()) == [size] * 4


def test_consumer_that_stops_early(pool: PoolThread) -> None:
    submission = recorded(collection(da.ones((40, 40), chunks=(1, 1)).sum()), slice_tasks=10)

    async def begin_only() -> Part:
        parts = pool.pool.submit(submission)
        first = await anext(parts)
        await parts.aclose()
        return first

    before = pool.stats().restarts
    assert isinstance(pool.do(begin_only()), GraphBegin)
    test_submit(pool)
    assert pool.stats().restarts == before


def test_slow_consumer_holds_the_child_back(pool: PoolThread) -> None:
    submission = recorded(lambda c: c.map(len, ["x" * 10_000] * 3000, pure=False), slice_tasks=50)

    async def slowly() -> list[Part]:
        parts: list[Part] = []
        async for part in pool.pool.submit(submission):
            parts.append(part)
            if len(parts) == 2:
                await asyncio.to_thread(blocked)
        return parts

    def blocked() -> None:
        (process,) = pool.pool._alive
        child = psutil.Process(process.popen.pid)
        wait_for(lambda: len(process.channel._messages) == 2, "the queue to fill")
        wait_for(lambda: child.status() == psutil.STATUS_SLEEPING, "the child to block")
        assert len(process.channel._messages) == 2

    assert len(decode(pool.do(slowly())).keys) == 3000


# ---- annotations


def test_client_annotations(pool: PoolThread) -> None:
    message = record(
        lambda c: c.submit(
            abs,
            1,
            priority=7,
            retries=2,
            workers=["tcp://h:1", "alias"],
            allow_other_workers=True,
            resources={"GPU": 2},
        )
    )
    (row,) = pool.graph(make_submission(message)).annotations
    assert row is not None
    wire_form = row.pop("wire")
    assert row == {
        "user_priority": 7.0,
        "retries": 2,
        "workers": ("tcp://h:1", "alias"),
        "allow_other_workers": True,
        "resources": {"GPU": 2.0},
        "span": None,
    }
    assert wire.loads([wire_form]) == {
        "priority": 7,
        "retries": 2,
        "workers": ("tcp://h:1", "alias"),
        "allow_other_workers": True,
        "resources": {"GPU": 2},
    }


def test_layer_annotations_beat_global_ones_and_are_shared(pool: PoolThread) -> None:
    with dask.annotate(retries=3):
        x = da.ones(10, chunks=1)
    y = x.map_blocks(operator.neg)
    with (
        dask.annotate(retries=1, priority=lambda key: 5),
        dask.config.set({"optimization.fuse.active": False}),
    ):
        submission = recorded(lambda c: c.compute(y, sync=False, optimize_graph=False))
    graph = pool.graph(submission)
    retries = {
        key[0]: row["retries"]
        for key, row in zip(graph.keys, graph.annotations, strict=True)
        if isinstance(key, tuple) and row
    }
    assert retries[x.name] == 3
    assert retries[y.name] == 1
    assert all(row["user_priority"] == 5 for row in graph.annotations if row)
    assert sum(len(part.new_annotations) for part in graph.slices) == 2


def test_callable_annotations_are_called_with_the_key(pool: PoolThread) -> None:
    with dask.annotate(priority=lambda key: key[1], note=lambda key: {"key": key}):
        submission = from_expression(
            LLGExpr({("k", i): Task(("k", i), int) for i in range(3)}),
            [("k", i) for i in range(3)],
        )
        submission.annotations = recorded(lambda c: c.submit(int)).annotations
    graph = pool.graph(submission)
    for key, row in zip(graph.keys, graph.annotations, strict=True):
        assert row is not None
        assert row["user_priority"] == key[1]
        assert wire.loads([row["wire"]])["note"] == {"key": key}


def test_annotations_that_are_not_plain_travel_as_one_pickle(pool: PoolThread) -> None:
    with dask.annotate(when=pd.Timestamp(5), retries=1):
        submission = recorded(lambda c: c.submit(int, key="i"))
    (row,) = pool.graph(submission).annotations
    assert row is not None
    assert isinstance(row["wire"], tuple)
    assert row["retries"] == 1
    assert load_run_spec(row["wire"]) == {"when": pd.Timestamp(5), "retries": 1}


def test_set_and_span_annotations(pool: PoolThread) -> None:
    span = {"name": ("a", "b"), "ids": ("1", "2")}
    submission = from_expression(LLGExpr({"k": Task("k", int)}), ["k"])
    submission.annotations = {"span": span}
    (row,) = pool.graph(submission).annotations
    assert row is not None
    assert row["span"] == {"name": ("a", "b"), "ids": ("1", "2")}
    assert wire.loads([row["wire"]]) == {"span": span}
    message = record(lambda c: c.submit(int, key="i"))
    message["annotations"] = ToPickle({"workers": {"w"}})
    (row,) = pool.graph(make_submission(message)).annotations
    assert row is not None
    assert row["workers"] == ("w",)
    assert wire.loads([row["wire"]]) == {"workers": {"w"}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("retries", "x"),
        ("resources", 3),
        ("resources", {"GPU": -1}),
        ("resources", {"GPU": float("inf")}),
        ("priority", "high"),
        ("priority", float("nan")),
        ("workers", [object]),
        ("span", {}),
    ],
)
def test_bad_annotations(pool: PoolThread, name: str, value: Any) -> None:
    message = record(lambda c: c.submit(int, key="i"))
    message["annotations"] = ToPickle({name: value})
    failure = pool.failure(make_submission(message))
    assert failure.kind == "annotations"
    assert name in failure.message
    assert isinstance(pickle.loads(failure.exception), TypeError)


def test_failing_annotation_callable(pool: PoolThread) -> None:
    def fail(key: Any) -> None:
        raise KeyError("mine")

    with dask.annotate(priority=fail):
        failure = pool.failure(recorded(lambda c: c.submit(int, key="i")))
    assert failure.kind == "annotations"
    assert isinstance(pickle.loads(failure.exception), KeyError)


# ---- failures


def craft(data: bytes, **fields: Any) -> Submission:
    """A submission whose expression is the pickle `data`."""
    header = {"serializer": "pickle", "writeable": [], "num-sub-frames": 1}
    return Submission(expr_header=msgpack.packb(header), expr_frames=[data], keys=["k"], **fields)


def pickled_call(module: str, name: str, *args: Any) -> bytes:
    """A pickle that calls module.name(*args) when it is loaded."""
    arguments = pickle.dumps(args, 0)[:-1].replace(b"p0\n", b"")
    return b"c" + f"{module}\n{name}\n".encode() + arguments + b"R."


def test_unimportable_module(pool: PoolThread) -> None:
    failure = pool.failure(craft(b"cno_such_module_here\nthing\n."))
    assert failure.kind == "unpickle"
    assert "no_such_module_here" in failure.message
    _, error, _ = clean_exception(failure.exception, failure.traceback)
    assert isinstance(error, RuntimeError)
    assert isinstance(error.__cause__, ModuleNotFoundError)
    assert "no_such_module_here" in failure.traceback_text


def test_garbage_instead_of_a_pickle(pool: PoolThread) -> None:
    assert pool.failure(craft(b"garbage")).kind == "unpickle"
    assert pool.failure(Submission(b"\xc1", [b""], ["k"])).kind == "unpickle"


def test_unpicklable_annotations(pool: PoolThread) -> None:
    submission = recorded(lambda c: c.submit(int, key="i"))
    data = msgpack.packb(
        {"pickled-obj": b"cno_such_module\nx\n.", "compression": [], "num-sub-frames": 0}
    )
    submission.annotations = Opaque(data)
    failure = pool.failure(submission)
    assert failure.kind == "unpickle"
    assert "annotations" in failure.message


def test_informative_values_that_cannot_be_opened_do_no_harm(pool: PoolThread) -> None:
    submission = recorded(lambda c: c.submit(int, key="i"))
    data = msgpack.packb(
        {"pickled-obj": b"cno_such_module\nx\n.", "compression": [], "num-sub-frames": 0}
    )
    submission.code = submission.span_metadata = Opaque(data)
    graph = pool.graph(submission)
    assert graph.keys == ["i"]
    assert len(graph.begin.span["problems"]) == 2


def test_exit_in_user_code_is_a_failure(pool: PoolThread) -> None:
    failure = pool.failure(craft(pickled_call("sys", "exit", 3)))
    assert failure.kind == "unpickle"
    assert "SystemExit" in failure.message


def test_object_that_is_no_graph(pool: PoolThread) -> None:
    failure = pool.failure(craft(pickle.dumps(5)))
    assert failure.kind == "materialize"
    assert isinstance(pickle.loads(failure.exception), AttributeError)


def test_exception_that_cannot_be_pickled(pool: PoolThread) -> None:
    def fail(key: Any) -> None:
        class Local(Exception):
            def __reduce__(self) -> Any:
                raise TypeError("no")

        raise Local("mine")

    with dask.annotate(priority=fail):
        failure = pool.failure(recorded(lambda c: c.submit(int, key="i")))
    error = pickle.loads(failure.exception)
    assert type(error) is RuntimeError
    assert "mine" in str(error)


def test_p2p_is_refused_with_the_way_out(pool: PoolThread) -> None:
    frame = dd.from_pandas(pd.DataFrame({"k": range(8)}), npartitions=4)
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        failure = pool.failure(recorded(collection(frame.shuffle("k"))))
    assert failure.kind == "unsupported"
    assert '"dataframe.shuffle.method": "tasks"' in failure.message
    assert '"array.rechunk.method": "tasks"' in failure.message
    assert isinstance(pickle.loads(failure.exception), NotImplementedError)


def test_p2p_rechunk_is_refused(pool: PoolThread) -> None:
    x = da.ones((8, 8), chunks=(1, 8)).rechunk((8, 1), method="p2p")
    assert pool.failure(recorded(collection(x))).kind == "unsupported"


def test_crash_fails_only_its_submission(own_pool: Callable[..., PoolThread]) -> None:
    pool = own_pool(processes=2)
    wait_for(lambda: pool.stats().processes == 2, "both processes")
    failure = pool.failure(craft(pickled_call("os", "_exit", 7)))
    assert failure.kind == "crashed"
    assert "exit code 7" in failure.message
    assert failure.exception == b""
    failure = pool.failure(craft(pickled_call("signal", "raise_signal", int(signal.SIGSEGV))))
    assert "SIGSEGV" in failure.message
    test_submit(pool)
    wait_for(lambda: pool.stats().processes == 2, "restarts")
    stats = pool.stats()
    assert stats.failures == {"crashed": 2}
    assert stats.restarts == 2
    assert stats.submissions == 3
    assert stats.tasks == 1
    assert stats.cpu_seconds > 0
    assert stats.busy == 0
    assert stats.queue_length == 0


def test_hang_is_killed_at_the_deadline(own_pool: Callable[..., PoolThread]) -> None:
    pool = own_pool(timeout_seconds=0.5)
    test_submit(pool)
    failure = pool.failure(craft(pickled_call("time", "sleep", 1000)))
    assert failure.kind == "timeout"
    assert "0.5 s" in failure.message
    test_submit(pool)


def test_hang_that_nobody_waits_for_is_killed_soon(
    own_pool: Callable[..., PoolThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributed_core.materializer.pool._DRAIN_SECONDS", 0.2)
    pool = own_pool()
    submission = craft(pickled_call("time", "sleep", 1000))

    async def give_up() -> None:
        parts = pool.pool.submit(submission)
        opening = asyncio.ensure_future(anext(parts))
        await asyncio.to_thread(wait_for, lambda: pool.stats().busy == 1, "the graph to be opened")
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await parts.aclose()

    pool.do(give_up())
    test_submit(pool)


def test_hung_graphs_do_not_keep_others_waiting(
    own_pool: Callable[..., PoolThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributed_core.materializer.pool._EXTRA_AFTER_SECONDS", 0.1)
    pool = own_pool(processes=2)
    submission = craft(pickled_call("time", "sleep", 1000))

    async def hang() -> list[Any]:
        hung = [pool.pool.submit(submission) for _ in range(2)]
        return [(parts, asyncio.ensure_future(anext(parts))) for parts in hung]

    hung = pool.do(hang())
    wait_for(lambda: pool.stats().busy == 2, "both graphs to be opened")
    test_submit(pool)
    # The process that was made for it ends with it.
    wait_for(lambda: pool.stats().processes == 2, "the extra process to end")

    async def end() -> None:
        for parts, opening in hung:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            await parts.aclose()

    pool.do(end())


def test_memory_limit(own_pool: Callable[..., PoolThread]) -> None:
    pool = own_pool(memory_limit_bytes=600 << 20)
    test_submit(pool)
    # Touches its memory in pieces: the limit is on resident memory.
    code = "x = []\nwhile True: x.append(b'x' * (1 << 20))"
    failure = pool.failure(craft(pickled_call("builtins", "exec", code)))
    assert failure.kind == "memory"
    assert str(600 << 20) in failure.message
    test_submit(pool)


def test_memory_error_of_user_code(pool: PoolThread) -> None:
    failure = pool.failure(craft(pickled_call("builtins", "bytearray", 1 << 62)))
    assert failure.kind == "memory"
    assert isinstance(pickle.loads(failure.exception), MemoryError)


def test_waiting_submission_survives_a_crash(own_pool: Callable[..., PoolThread]) -> None:
    pool = own_pool()

    async def collect(submission: Submission) -> list[Part]:
        return [part async for part in pool.pool.submit(submission)]

    async def both() -> list[list[Part]]:
        return await asyncio.gather(
            collect(craft(pickled_call("os", "_exit", 1))),
            collect(recorded(lambda c: c.submit(int, key="i"))),
        )

    crashed, fine = pool.do(both())
    assert isinstance(crashed[-1], GraphFailed)
    assert decode(fine).keys == ["i"]


def test_child_that_cannot_start(own_pool: Callable[..., PoolThread], tmp_path: Path) -> None:
    pool = own_pool(python="/no/such/python")
    failure = pool.failure(recorded(lambda c: c.submit(int, key="i")))
    assert failure.kind == "crashed"
    assert "/no/such/python" in failure.message


def test_output_of_user_code_does_no_harm(pool: PoolThread) -> None:
    pool.failure(craft(pickled_call("builtins", "print", "hello")))
    test_submit(pool)


def test_interrupt_is_not_the_childs(own_pool: Callable[..., PoolThread]) -> None:
    before = children()
    pool = own_pool()
    test_submit(pool)
    (pid,) = children() - before
    os.kill(pid, signal.SIGINT)
    test_submit(pool)
    assert pool.stats().restarts == 0


def test_idle_child_that_dies_is_replaced(own_pool: Callable[..., PoolThread]) -> None:
    before = children()
    pool = own_pool()
    test_submit(pool)
    (pid,) = children() - before
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: pool.stats().restarts == 1, "a restart")
    test_submit(pool)


def test_close_leaves_nothing_and_fails_open_requests() -> None:
    before = children()
    pool = PoolThread()
    test_submit(pool)

    async def open_request() -> list[Part]:
        submission = craft(pickled_call("time", "sleep", 1000))
        return [part async for part in pool.pool.submit(submission)]

    request = asyncio.run_coroutine_threadsafe(open_request(), pool.loop)
    wait_for(lambda: pool.stats().busy == 1, "the request to start")
    pool.do(pool.pool.close())
    (end,) = request.result(SECONDS)
    assert isinstance(end, GraphFailed)
    assert "shut down" in end.message
    assert children() == before
    pool.close()


@pytest.mark.parametrize("busy", [False, True])
def test_death_of_the_parent_leaves_no_child(busy: bool, tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import asyncio, pickle, sys, msgpack
        from distributed_core.materializer.parts import Submission
        from distributed_core.materializer.pool import MaterializerPool

        async def main():
            pool = MaterializerPool()
            await pool.start()
            while not pool._idle:
                await asyncio.sleep(0.01)
            print(pool._idle[0].popen.pid, flush=True)
            header = msgpack.packb({"serializer": "pickle", "writeable": [], "num-sub-frames": 1})
            data = b"ctime\\nsleep\\n(I1000\\ntR."
            if sys.argv[1] == "True":
                async for part in pool.submit(Submission(header, [data], [])):
                    pass
            await asyncio.sleep(1000)

        asyncio.run(main())
        """
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(busy)], stdout=subprocess.PIPE, cwd=ROOT
    )
    try:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        child.wait(SECONDS)
    finally:
        parent.kill()
        parent.wait(SECONDS)
        parent.stdout.close()


def test_parent_half_imports_no_dask() -> None:
    script = textwrap.dedent(
        """
        import asyncio, sys
        from distributed_core.materializer.pool import MaterializerPool

        async def main():
            pool = MaterializerPool()
            await pool.start()
            await pool.close()

        asyncio.run(main())
        roots = {name.partition(".")[0] for name in sys.modules}
        print(sorted(roots & {"dask", "distributed", "cloudpickle", "pickle", "tornado"}))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    assert done.stdout.strip() == "[]"


# ---- small requests


@pytest.mark.parametrize(
    ("value", "keys"),
    [
        ("key", ["key"]),
        (("x", 1), [("x", 1)]),
        (["a", ("b", 2)], ["a", ("b", 2)]),
    ],
)
def test_keys_from_pickled(pool: PoolThread, value: Any, keys: list[Any]) -> None:
    assert pool.do(pool.pool.call("keys_from_pickled", as_opaque(value))) == keys


def test_keys_from_pickled_futures(pool: PoolThread) -> None:
    future = Future(("x", 1))
    assert pool.do(pool.pool.call("keys_from_pickled", as_opaque(future))) == [("x", 1)]
    nested = as_opaque({"a": (future, "b")})
    assert pool.do(pool.pool.call("keys_from_pickled", nested)) == ["a", ("x", 1), "b"]


def test_keys_from_pickled_failure(pool: PoolThread) -> None:
    with pytest.raises(CallFailed, match="neither a Future nor a key"):
        pool.do(pool.pool.call("keys_from_pickled", as_opaque(object())))
    with pytest.raises(CallFailed, match="unknown call"):
        pool.do(pool.pool.call("no_such_call", as_opaque(1)))
    test_submit(pool)


def as_opaque(value: Any) -> Opaque:
    _, header, *frames = wire.dumps({"x": ToPickle(value)})
    return Opaque(bytes(header), [bytes(frame) for frame in frames])


def test_data_nodes_are_flagged(pool: PoolThread) -> None:
    dsk = {"d": DataNode("d", 5), "a": Alias("a", "d")}
    graph = pool.graph(from_expression(LLGExpr(dsk), ["a"]))
    assert graph.flags == [SliceFlag.DATA_PRODUCER | SliceFlag.DATA_NODE, SliceFlag.WANTED]
    assert graph.compute()["a"] == 5
