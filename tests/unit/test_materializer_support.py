"""What the tests of the materializer share: stock clients' real messages, and decoded answers."""

from __future__ import annotations

import threading
from array import array
from dataclasses import dataclass, field
from typing import Any

import msgpack
from dask._task_spec import execute_graph
from distributed.client import Client
from distributed.protocol import core as wire
from distributed.protocol import serialize, to_serialize

from distributed_core.materializer.parts import (
    GraphBegin,
    GraphEnd,
    GraphFailed,
    GraphSlice,
    Opaque,
    Part,
    Submission,
)


class RecordingClient(Client):
    """A stock client whose stream to the scheduler ends in a list."""

    def __init__(self) -> None:
        self.futures = {}
        self.generation = 0
        self.id = "recording"
        self.status = "running"
        self.messages: list[dict[str, Any]] = []
        self._refcount_lock = threading.RLock()
        self._state_handlers = {}
        self._set_as_default = False
        self._asynchronous = True

    def _send_to_scheduler(self, msg: dict[str, Any]) -> None:
        self.messages.append(msg)

    @property
    def loop(self) -> Any:
        return self

    def add_callback(self, *args: Any) -> None:
        pass

    def _inc_ref(self, key: Any) -> None:
        pass

    def _dec_ref(self, key: Any) -> None:
        pass

    def __repr__(self) -> str:
        return "<RecordingClient>"

    def __del__(self) -> None:
        pass


def record(action: Any) -> dict[str, Any]:
    """The update-graph message that `action(client)` sends."""
    client = RecordingClient()
    kept = action(client)
    assert len(client.messages) == 1
    del kept
    return client.messages[0]


def make_submission(message: dict[str, Any], **options: Any) -> Submission:
    """Send `message` through the real wire format and cut it up as the scheduler does."""
    frames = [bytes(frame) for frame in wire.dumps(message)]

    def hook(value: dict[Any, Any]) -> Any:
        for name in ("__Serialized__", "__Pickled__"):
            if name in value:
                header = frames[value[name]]
                count = msgpack.unpackb(header, strict_map_key=False)["num-sub-frames"]
                return Opaque(header, frames[value[name] + 1 : value[name] + 1 + count])
        if "__Set__" in value:
            return set(value["as-list"])
        return value

    body = msgpack.unpackb(frames[0], use_list=False, strict_map_key=False, object_hook=hook)
    return Submission(
        expr_header=body["expr_ser"].header,
        expr_frames=body["expr_ser"].frames,
        keys=body["keys"],
        annotations=body["annotations"],
        code=body["code"],
        span_metadata=body["span_metadata"],
        internal_priority=body["internal_priority"],
        **options,
    )


def recorded(action: Any, **options: Any) -> Submission:
    return make_submission(record(action), **options)


def from_expression(expr: Any, keys: Any, **fields: Any) -> Submission:
    """Submission of `expr` as it stands, with plain annotations."""
    header, frames = serialize(to_serialize(expr), on_error="raise")
    header["num-sub-frames"] = len(frames)
    return Submission(
        expr_header=msgpack.packb(header), expr_frames=list(frames), keys=keys, **fields
    )


@dataclass
class Graph:
    """A whole answer, decoded."""

    begin: GraphBegin
    slices: list[GraphSlice]
    end: GraphEnd | GraphFailed
    keys: list[Any] = field(default_factory=list)
    dependencies: list[list[Any]] = field(default_factory=list)
    order: list[float] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    annotations: list[dict[str, Any] | None] = field(default_factory=list)
    run_specs: list[Any] = field(default_factory=list)

    def row(self, key: Any) -> int:
        return self.keys.index(key)

    def nodes(self) -> dict[Any, Any]:
        return {k: load_run_spec(s) for k, s in zip(self.keys, self.run_specs, strict=True)}

    def compute(self, values: dict[Any, Any] | None = None) -> dict[Any, Any]:
        """Run the decoded graph in this process."""
        if not self.keys:
            return {}
        return dict(execute_graph(self.nodes(), cache=dict(values or {})))


def load_run_spec(run_spec: Any) -> Any:
    """What a stock worker gets for the placeholder."""
    header, *buffers = (run_spec,) if isinstance(run_spec, bytes) else run_spec
    fields = msgpack.unpackb(header)
    assert sorted(fields) == ["compression", "num-sub-frames", "pickled-obj"]
    assert fields["num-sub-frames"] == len(buffers) == len(fields["compression"])
    body = msgpack.packb({"run_spec": {"__Pickled__": 1}})
    return wire.loads([body, header, *buffers])["run_spec"]


def decode(parts: list[Part]) -> Graph:
    """Check the structure of an answer and decode it."""
    begin, *slices, end = parts
    assert isinstance(end, GraphEnd), end
    assert isinstance(begin, GraphBegin)
    assert all(isinstance(part, GraphSlice) for part in slices)
    graph = Graph(begin, slices, end)
    prefixes: list[str] = []
    groups: list[tuple[str, int]] = []
    rows: list[dict[str, Any]] = []
    later: list[int] = []
    numbers: list[list[int]] = []
    slice_of: list[int] = []
    for number, part in enumerate(slices):
        assert part.start == len(graph.keys)
        assert part.keys
        prefixes += part.new_prefixes
        groups += zip(part.new_groups, array("i", part.new_group_prefix), strict=True)
        rows += part.new_annotations
        counts = array("i", part.dependency_counts)
        flat = array("i", part.dependencies)
        assert sum(counts) == len(flat)
        position = 0
        for count in counts:
            numbers.append(list(flat[position : position + count]))
            position += count
        graph.keys += part.keys
        graph.order += array("d", part.order)
        graph.flags += part.flags
        graph.run_specs += part.run_specs
        for index in array("i", part.group_index):
            name, prefix = groups[index]
            graph.groups.append(name)
            graph.prefixes.append(prefixes[prefix])
        for index in array("i", part.annotation_index):
            graph.annotations.append(None if index < 0 else rows[index])
        later += array("i", part.future_dependents)
        slice_of += [number] * len(part.keys)
    assert len(graph.keys) == begin.n_tasks
    assert len(set(prefixes)) == len(prefixes)
    expected = [0] * len(graph.keys)
    for i, needs in enumerate(numbers):
        assert all(need < i for need in needs), "not in topological order"
        for need in needs:
            if need >= 0 and slice_of[need] < slice_of[i]:
                expected[need] += 1
        graph.dependencies.append(
            [graph.keys[n] if n >= 0 else begin.externals[-n - 1] for n in needs]
        )
    assert later == expected
    for key, needs in zip(graph.keys, graph.dependencies, strict=True):
        node = graph.nodes()[key] if len(graph.keys) < 50 else None
        if node is not None:
            assert node.key == key
            assert set(needs) == set(node.dependencies)
    return graph
