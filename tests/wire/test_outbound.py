"""Effects as bytes, read by the stock decoder: exact field sets (PROTOCOL-visible), numbering,
merging, splitting.
"""

from __future__ import annotations

import gc
import pickle
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgpack
import pytest
from dask.typing import no_default
from distributed.protocol import Serialize, Serialized, ToPickle, dumps, loads
from distributed.utils import ensure_memoryview
from hypothesis import given
from hypothesis import strategies as st

from cython_ext.cluster import EngineSettings
from cython_ext.events import (
    ClientConnected,
    DataPlaced,
    GraphBegun,
    GraphEnded,
    GraphSliceReady,
    KeyReportAsked,
    KeysAdded,
    KeysCancelled,
    KeysReleased,
    KeysRetried,
    ReplicasAsked,
    Restarted,
    RetirementBegun,
    TaskErred,
    TaskFinished,
    WhoHasAsked,
    WorkerLost,
    WorkerRegistered,
)
from cython_ext.outbound import Outbox, WireSink
from cython_ext.transitions import SchedulerMachine

INT_TYPE = pickle.dumps(int)


@dataclass
class Closed:
    """A payload that stays closed, as the generic codec hands it over."""

    PLACEHOLDER: ClassVar[str] = "__Serialized__"

    header: bytes
    frames: Sequence[Any]


class ClosedPickle(Closed):
    PLACEHOLDER = "__Pickled__"


@dataclass
class Member:
    PLACEHOLDER: ClassVar[str] = "__Enum__"

    module: str
    type_name: str
    name: str


def closed(value: Any) -> Closed:
    """``value`` serialized by the stock package."""
    _, header, *frames = dumps({"x": Serialize(value)})
    return Closed(header, [bytes(ensure_memoryview(frame)) for frame in frames])


def pickled(value: Any) -> list[Any]:
    """Sub-header and buffers of ``value`` pickled by the stock package."""
    return dumps({"x": ToPickle(value)})[1:]


def cut(chunks: Iterable[Any]) -> list[list[bytes]]:
    """The wire messages in ``chunks``, as lists of frames; checks the layout."""
    data = b"".join(bytes(chunk) for chunk in chunks)
    messages = []
    at = 0
    while at < len(data):
        block, n = struct.unpack_from("<QQ", data, at)
        lengths = struct.unpack_from(f"<{n}Q", data, at + 16)
        end_of_block = at + 8 + block
        at += 16 + 8 * n
        ends = {at}
        frames = []
        for length in lengths:
            frames.append(data[at : at + length])
            at += length
            ends.add(at)
        assert end_of_block in ends
        messages.append(frames)
    assert at == len(data)
    return messages


def read(box: Outbox, deserialize: bool = True) -> list[Any]:
    """All maps that wait in ``box``, as a stock peer reads them; empties it."""
    return [item for frames in cut(box.take()) for item in loads(frames, deserialize=deserialize)]


class Cluster:
    """A scheduler machine with one client, whose effects go to outboxes."""

    def __init__(self, n_workers: int = 1, **settings: Any) -> None:
        self.sink = WireSink(**settings)
        self.machine = SchedulerMachine(
            EngineSettings(worker_saturation=float("inf")),
            self.sink,
            lambda kind, fields: (f"{kind}: {fields['key']}", kind),
        )
        self.client_box = self.sink.outbox("client")
        self.handle(ClientConnected, client_id="c", info=None, peer=self.client_box)
        self.workers: list[Any] = []
        self.boxes: list[Outbox] = []
        for i in range(n_workers):
            self.add_worker(f"tcp://127.0.0.1:{1000 + i}")
        self.n_submissions = 0

    def add_worker(self, address: str, **changes: Any) -> Any:
        box = self.sink.outbox(address)
        fields: dict[str, Any] = {
            "address": address,
            "name": address,
            "host": "127.0.0.1",
            "server_id": "Worker-" + address,
            "nthreads": 1,
            "memory_limit": 0,
            "resources": {},
            "status": "running",
            "info": None,
            "peer": box,
        }
        worker = self.handle(WorkerRegistered, **{**fields, **changes})
        self.workers.append(worker)
        self.boxes.append(box)
        return worker

    def handle(self, kind: Any, stimulus_id: str = "stimulus-1", **fields: Any) -> Any:
        return self.machine.handle(kind(now=1.0, stimulus_id=stimulus_id, **fields))

    def submit(
        self,
        tasks: dict[Any, list[Any]],
        *,
        externals: Sequence[Any] = (),
        run_spec: Any = None,
        annotations: dict[str, Any] | None = None,
        user_priority: float = 0.0,
        actors: Any = False,
        order: float | None = None,
        stimulus_id: str = "update-graph-1",
    ) -> None:
        """Submit ``tasks``: key to dependencies, in topological order; all are wanted."""
        keys = list(tasks)
        known = {key: i for i, key in enumerate(keys)}
        known |= {key: -(i + 1) for i, key in enumerate(externals)}
        n = len(keys)
        self.n_submissions += 1
        self.handle(
            GraphBegun,
            stimulus_id,
            client_id="c",
            submission=self.n_submissions,
            n_tasks=n,
            externals=list(externals),
            wanted_externals=[],
            submitting_task=None,
            fifo_timeout=0.0,
            user_priority=user_priority,
            actors=actors,
            wanted=keys,
        )
        flat = [known[dependency] for dependencies in tasks.values() for dependency in dependencies]
        self.handle(
            GraphSliceReady,
            stimulus_id,
            submission=self.n_submissions,
            start=0,
            keys=keys,
            dependency_counts=struct.pack(f"{n}i", *map(len, tasks.values())),
            dependencies=struct.pack(f"{len(flat)}i", *flat),
            order=struct.pack(f"{n}d", *(range(n) if order is None else [order] * n)),
            flags=b"\x01" * n,
            future_dependents=bytes(4 * n),
            new_prefixes=["p"],
            new_groups=["g"],
            new_group_prefix=bytes(4),
            group_index=bytes(4 * n),
            new_annotations=[] if annotations is None else [annotations],
            annotation_index=struct.pack(f"{n}i", *[0 if annotations else -1] * n),
            run_specs=[pickled(("run", key))[0] if run_spec is None else run_spec for key in keys],
        )
        self.handle(GraphEnded, stimulus_id, submission=self.n_submissions)

    def finish(self, key: Any, i: int = 0, nbytes: int = 28, **changes: Any) -> None:
        fields = {
            "worker": self.workers[i],
            "key": key,
            "run_id": self.machine.state.tasks[key].run_id,
            "nbytes": nbytes,
            "typename": "int",
            "type": INT_TYPE,
            "compute_start": 0.0,
            "compute_stop": 0.0,
            "compute_seconds": 0.0,
            "transfer_seconds": 0.0,
            "metadata": None,
            "thread": None,
            "startstops": None,
            "has_compute": False,
        }
        self.handle(TaskFinished, "task-finished-1", **{**fields, **changes})

    def scatter(self, key: Any, holders: Sequence[int], nbytes: int = 8) -> None:
        self.handle(
            DataPlaced,
            client_id="c",
            who_has={key: [self.workers[i].address for i in holders]},
            nbytes={key: nbytes},
        )

    def to_worker(self, i: int = 0, deserialize: bool = True) -> list[Any]:
        return read(self.boxes[i], deserialize)

    def to_client(self) -> list[Any]:
        return read(self.client_box)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


# The outbox by itself


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(min_value=-(2**63), max_value=2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=5) | st.integers(-9, 9), inner, max_size=5)
    ),
    max_leaves=30,
)


@given(st.dictionaries(st.text(), plain, max_size=4))
def test_plain_messages_are_packed_as_the_msgpack_package_packs_them(
    message: dict[str, Any],
) -> None:
    box = Outbox()
    box.append_message(message)
    [[body]] = cut(box.take())
    assert body == b"\x91" + msgpack.packb(message)


def test_one_wire_message_of_many() -> None:
    box = Outbox()
    messages = [{"op": "x", "i": i} for i in range(20)]
    for message in messages:
        box.append_message(message)
    assert len(box) == box.n_messages == 20
    [frames] = cut(box.take())
    assert loads(frames) == tuple(messages)
    assert not box
    assert box.take() == []
    assert box.buffered_bytes == 0


def test_the_layout_of_a_small_message() -> None:
    box = Outbox()
    box.append_message({"op": "close"})
    body = msgpack.packb([{"op": "close"}])
    assert box.take() == [struct.pack("<QQQ", 16 + len(body), 1, len(body)) + body]


def test_values_with_a_form_of_their_own() -> None:
    class Text(str):
        __slots__ = ()

    box = Outbox()
    box.append_message(
        {
            "set": {1},
            "frozen": frozenset({2}),
            "views": [bytearray(b"a"), memoryview(b"b"), b"c"],
            "tuple": (1, (2,)),
            "keys": {("x", 1): Text("y")},
            "enum": Member("dask.typing", "_NoDefault", "no_default"),
        }
    )
    [message] = read(box)
    assert message.pop("enum") is no_default
    assert message == {
        "set": {1},
        "frozen": {2},
        "views": (b"a", b"b", b"c"),
        "tuple": (1, (2,)),
        "keys": {("x", 1): "y"},
    }


def test_closed_payloads_are_renumbered() -> None:
    box = Outbox()
    large = b"x" * 100_000
    box.append_message({"op": "a", "v": closed([1, 2])})
    box.append_message({"op": "b", "v": [closed(large), ClosedPickle(*split(pickled({"k": 3})))]})
    box.append_message({"op": "c", "v": {"deep": [closed(("y", 4))]}})
    assert read(box) == [
        {"op": "a", "v": [1, 2]},
        {"op": "b", "v": (large, {"k": 3})},
        {"op": "c", "v": {"deep": (("y", 4),)}},
    ]


def split(frames: list[Any]) -> tuple[bytes, list[Any]]:
    return frames[0], frames[1:]


def test_large_frames_go_by_reference_in_their_place() -> None:
    box = Outbox()
    sizes = [10, 65_536, 0, 65_535, 200_000, 70_000, 3]
    frames = [bytes([65 + i]) * size for i, size in enumerate(sizes)]
    header = msgpack.packb({"num-sub-frames": len(frames)})
    box.append_message({"v": Closed(header, frames)})
    assert box.buffered_bytes > sum(sizes)
    chunks = box.take()
    for i in (1, 4, 5):
        assert any(chunk is frames[i] for chunk in chunks)
    [message] = cut(chunks)
    assert message[1:] == [header, *frames]


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("size", [0, 5, 100_000])
def test_frames_of_every_buffer_kind(wrap: Any, size: int) -> None:
    box = Outbox()
    box.append_message({"v": Closed(wrap(b"h" * size), [wrap(b"f" * size)])})
    [message] = cut(box.take())
    assert message[1:] == [b"h" * size, b"f" * size]


def test_frames_are_measured_in_bytes() -> None:
    box = Outbox()
    wide = memoryview(bytes(100_000)).cast("d")
    box.append_message({"v": Closed(b"h", [wide, wide[:4]])})
    [message] = cut(box.take())
    assert [len(frame) for frame in message[1:]] == [1, 100_000, 32]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (object(), TypeError),
        (1j, TypeError),
        (2**64, OverflowError),
        ("\ud800", UnicodeEncodeError),
        (Closed(b"h", [7]), TypeError),
        (Closed(b"h", [b"x" * 100_000, None]), TypeError),
    ],
)
def test_a_message_that_cannot_be_packed_leaves_nothing(value: Any, error: type) -> None:
    box = Outbox()
    box.append_message({"op": "before", "v": closed("b")})
    with pytest.raises(error):
        box.append_message({"op": "bad", "v": [closed("x" * 10), closed("y" * 70_000), value]})
    assert len(box) == 1
    box.append_message({"op": "after", "v": closed("a" * 70_000)})
    assert read(box) == [{"op": "before", "v": "b"}, {"op": "after", "v": "a" * 70_000}]


def test_endless_nesting_is_an_error() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ValueError, match="nested deeper than 500"):
        Outbox().append_message({"v": value})
    deep: Any = 1
    for _ in range(450):
        deep = [deep]
    box = Outbox()
    box.append_message({"v": deep})
    assert len(cut(box.take())) == 1


@pytest.mark.parametrize(
    ("limits", "payload"),
    [
        ({"max_body_bytes": 60}, None),
        ({"max_frames": 7}, b"x" * 10),
        ({"max_payload_bytes": 300}, b"x" * 40),
        ({"max_payload_bytes": 300_000}, b"x" * 70_000),
    ],
    ids=["body", "frames", "small-payload", "large-payload"],
)
def test_full_messages_are_split_in_order(limits: dict[str, int], payload: bytes | None) -> None:
    box = Outbox(**limits)
    header = msgpack.packb({"num-sub-frames": 1})
    for i in range(100):
        value = None if payload is None else Closed(header, [payload])
        box.append_message({"i": i, "v": value})
    assert len(box) == 100
    buffered = box.buffered_bytes
    chunks = box.take()
    assert buffered <= sum(map(len, chunks)) <= buffered + 2000
    messages = cut(chunks)
    assert 10 <= len(messages) <= 60
    items = [item for frames in messages for item in msgpack.unpackb(frames[0])]
    assert [item["i"] for item in items] == list(range(100))
    for frames in messages:
        for item in msgpack.unpackb(frames[0]):
            if payload is not None:
                index = item["v"]["__Serialized__"]
                assert frames[index : index + 2] == [header, payload]


@pytest.mark.parametrize("name", ["max_body_bytes", "max_payload_bytes", "max_frames"])
def test_limits_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Outbox(**{name: 0})


def test_clear_drops_everything() -> None:
    box = Outbox(max_body_bytes=100)
    for _ in range(10):
        box.append_message({"op": "x" * 30, "v": closed("y" * 70_000)})
    box.clear()
    assert (len(box), box.buffered_bytes, box.take()) == (0, 0, [])
    box.append_message({"op": "z"})
    assert read(box) == [{"op": "z"}]


def test_an_outbox_gives_its_memory_back() -> None:
    def run(n: int) -> None:
        for _ in range(n):
            box = Outbox()
            box.append_message({"op": "x", "v": closed([1]), "raw": b"x" * 5000})
            box.take()
            box.append_message({"op": "x", "v": Closed(b"h", [b"x" * 70_000])})

    run(10)
    gc.collect()
    before = sys.getallocatedblocks()
    run(200)
    gc.collect()
    assert sys.getallocatedblocks() - before < 100


# Dirty outboxes and counts


def test_outboxes_report_once_in_order() -> None:
    sink = WireSink()
    first, second, unused = (sink.outbox(name) for name in "abc")
    assert first.attached == "a"
    second.append_message({"op": "x"})
    first.append_message({"op": "x"})
    second.append_message({"op": "y"})
    assert sink.dirty == [second, first]
    assert sink.take_dirty() == [second, first]
    assert sink.take_dirty() == []
    # What is left in the outbox is reported again with the next message.
    first.append_message({"op": "z"})
    assert sink.take_dirty() == [first]
    second.append_message({"op": "x"})
    second.take()
    assert sink.take_dirty() == []
    assert not unused
    assert sink.counts == {"x": 3, "y": 1, "z": 1}


# Messages to workers


def test_compute_task_has_exactly_the_fields_of_the_stock_one(cluster: Cluster) -> None:
    cluster.submit({"a": []})
    assert cluster.to_worker() == [
        {
            "op": "compute-task",
            "key": "a",
            "run_id": 0,
            "priority": (0, 1, 0),
            "who_has": {},
            "nbytes": {},
            "run_spec": ("run", "a"),
            "resource_restrictions": None,
            "actor": False,
            "annotations": {},
            "span_id": None,
            "stimulus_id": "update-graph-1",
        }
    ]
    assert cluster.sink.counts == {"compute-task": 1}


@pytest.mark.parametrize(
    "key", ["schlüssel-€", "x" * 70_000, ("x", 0), ("x", ("y", 2.5), -7), 7, -1, 2.5, 2**40]
)
def test_keys_of_every_kind(cluster: Cluster, key: Any) -> None:
    cluster.submit({key: [], ("d", key): [key]})
    cluster.finish(key, nbytes=1000)
    first, second = cluster.to_worker()
    assert (first["key"], type(first["key"])) == (key, type(key))
    assert first["run_spec"] == ("run", key)
    assert second["who_has"] == {key: ("tcp://127.0.0.1:1000",)}
    assert second["nbytes"] == {key: 1000}
    assert cluster.to_client() == [{"op": "key-in-memory", "key": key, "type": INT_TYPE}]


def test_priorities_are_integers_when_they_are_whole(cluster: Cluster) -> None:
    cluster.submit({"a": []}, user_priority=10.0, order=2.5)
    [[body, *_]] = cut(cluster.boxes[0].take())
    [message] = msgpack.unpackb(body)
    assert message["priority"] == [-10, 1, 2.5]
    assert [type(number) for number in message["priority"]] == [int, int, float]


def test_inputs_of_a_task() -> None:
    cluster = Cluster(n_workers=2)
    cluster.scatter("x", [0], nbytes=50)
    cluster.scatter(("y", 1), [1, 0], nbytes=10)
    cluster.submit({"a": ["x", ("y", 1)]}, externals=["x", ("y", 1)])
    [message] = cluster.to_worker() + cluster.to_worker(1)
    one, two = (worker.address for worker in cluster.workers)
    assert message["who_has"] == {"x": (one,), ("y", 1): (two, one)}
    assert message["nbytes"] == {"x": 50, ("y", 1): 10}


def test_holders_of_a_popular_input_are_capped() -> None:
    cluster = Cluster(n_workers=50, max_holders=8)
    cluster.scatter("x", range(50))
    addresses = [worker.address for worker in cluster.workers]
    cluster.submit({f"t-{i}": ["x"] for i in range(50)}, externals=["x"])
    n_messages = 0
    for i in range(50):
        for message in cluster.to_worker(i):
            n_messages += 1
            [holders] = message["who_has"].values()
            assert len(holders) == len(set(holders)) == 8
            assert set(holders) <= set(addresses)
            assert addresses[i] in holders
    assert n_messages == 50


def test_run_spec_with_buffers(cluster: Cluster) -> None:
    class Big:
        def __reduce_ex__(self, protocol: int) -> Any:
            return bytearray, (pickle.PickleBuffer(b"z" * 100_000),)

    frames = pickled(Big())
    assert len(frames) == 2
    cluster.submit({"a": []}, run_spec=tuple(frames))
    cluster.submit({"b": []})
    first, second = cluster.to_worker()
    assert first["run_spec"] == b"z" * 100_000
    assert second["run_spec"] == ("run", "b")


def test_annotations_and_resources(cluster: Cluster) -> None:
    cluster.add_worker("tcp://127.0.0.1:2000", resources={"GPU": 2.0, "mem": 1.5})
    wire = {"resources": {"GPU": 1}, "x": [1, "two"]}
    cluster.submit(
        {"a": []},
        annotations={"resources": {"GPU": 1.0, "mem": 0.5}, "wire": msgpack.packb(wire)},
    )
    [message] = cluster.to_worker(1)
    assert message["resource_restrictions"] == {"GPU": 1, "mem": 0.5}
    assert message["annotations"] == {"resources": {"GPU": 1}, "x": (1, "two")}


def test_annotations_that_are_not_plain_are_one_pickle(cluster: Cluster) -> None:
    odd = {"when": complex(1, 2)}
    cluster.submit({"a": [], "b": []}, annotations={"wire": tuple(pickled(odd))})
    for message in cluster.to_worker():
        assert message["annotations"] == odd
        assert message["run_spec"] == ("run", message["key"])


def test_actors(cluster: Cluster) -> None:
    cluster.submit({"a": []}, actors=True)
    [message] = cluster.to_worker()
    assert message["actor"] is True


def test_free_keys_of_one_cause_are_merged(cluster: Cluster) -> None:
    keys = [f"k-{i}" for i in range(300)]
    cluster.submit({key: [] for key in keys})
    for key in keys:
        cluster.finish(key)
    cluster.to_worker()
    cluster.handle(KeysReleased, "cause-1", client_id="c", keys=keys[:298])
    cluster.handle(KeysReleased, "cause-2", client_id="c", keys=keys[298:299])
    cluster.submit({"new": []})
    cluster.handle(KeysReleased, "cause-2", client_id="c", keys=keys[299:])
    messages = cluster.to_worker()
    assert messages[0] == {"op": "free-keys", "keys": tuple(keys[:298]), "stimulus_id": "cause-1"}
    assert messages[1] == {"op": "free-keys", "keys": ("k-298",), "stimulus_id": "cause-2"}
    assert messages[2]["op"] == "compute-task"
    assert messages[3] == {"op": "free-keys", "keys": ("k-299",), "stimulus_id": "cause-2"}
    assert cluster.sink.counts["free-keys"] == 3


def test_merging_ends_with_the_wire_message() -> None:
    cluster = Cluster(max_body_bytes=400)
    keys = [f"k-{i:020}" for i in range(60)]
    cluster.submit({key: [] for key in keys})
    for key in keys:
        cluster.finish(key)
    cluster.to_worker()
    cluster.handle(KeysReleased, "cause-1", client_id="c", keys=keys[:30])
    assert len(cluster.boxes[0]) >= 2
    first = cluster.to_worker()
    cluster.handle(KeysReleased, "cause-1", client_id="c", keys=keys[30:])
    messages = first + cluster.to_worker()
    assert {message["op"] for message in messages} == {"free-keys"}
    assert [key for message in messages for key in message["keys"]] == keys


def test_unwanted_copies_are_dropped(cluster: Cluster) -> None:
    cluster.handle(KeysAdded, worker=cluster.workers[0], keys=["x", ("y", 1)])
    assert cluster.to_worker() == [
        {"op": "remove-replicas", "keys": ("x", ("y", 1)), "stimulus_id": "stimulus-1"}
    ]


def test_copies_are_ordered_and_holders_told() -> None:
    cluster = Cluster(n_workers=2)
    cluster.scatter("x", [0], nbytes=77)
    one, two = cluster.workers
    cluster.handle(ReplicasAsked, worker=two, keys=["x"])
    cluster.handle(WhoHasAsked, worker=two, keys=["x"])
    assert cluster.to_worker(1) == [
        {
            "op": "acquire-replicas",
            "who_has": {"x": (one.address,)},
            "nbytes": {"x": 77},
            "stimulus_id": "stimulus-1",
        },
        {
            "op": "refresh-who-has",
            "who_has": {"x": (one.address,)},
            "stimulus_id": "stimulus-1",
        },
    ]


def test_retirement_and_loss_of_a_worker() -> None:
    cluster = Cluster(n_workers=2)
    one = cluster.workers[0]
    cluster.handle(RetirementBegun, worker=one)
    cluster.handle(WorkerLost, worker=one, expected=True, reason="retired")
    assert cluster.to_worker(0) == [
        {
            "op": "worker-status-change",
            "status": "closing_gracefully",
            "stimulus_id": "stimulus-1",
        }
    ]
    assert cluster.to_worker(1) == [
        {"op": "remove-worker", "worker": one.address, "stimulus_id": "stimulus-1"}
    ]


def test_a_peer_without_an_outbox_gets_nothing(cluster: Cluster) -> None:
    cluster.workers[0].peer = None
    cluster.machine.state.clients["c"].peer = None
    cluster.submit({"a": []})
    cluster.finish("a")
    assert cluster.sink.counts == {}


def test_a_peer_that_is_no_outbox_is_an_error(cluster: Cluster) -> None:
    cluster.workers[0].peer = object()
    with pytest.raises(TypeError, match="Outbox"):
        cluster.submit({"a": []})


# Messages to clients


def test_key_in_memory(cluster: Cluster) -> None:
    cluster.submit({"a": []})
    cluster.finish("a")
    cluster.scatter("x", [0])
    cluster.handle(KeyReportAsked, client_id="c", key="x")
    cluster.handle(KeyReportAsked, client_id="c", key="unknown")
    messages = cluster.to_client()
    assert messages[0] == {"op": "key-in-memory", "key": "a", "type": INT_TYPE}
    assert messages[-2] == {"op": "key-in-memory", "key": "x"}
    assert messages[-1] == {"op": "cancelled-keys", "keys": ("unknown",), "reason": "unknown key"}


@pytest.mark.parametrize("exception", [closed(ValueError("x")), b"raw", "text"])
@pytest.mark.parametrize("traceback", [closed([1]), b"raw", "text", None])
def test_task_erred_and_retried(cluster: Cluster, exception: Any, traceback: Any) -> None:
    cluster.submit({"a": []})
    cluster.handle(
        TaskErred,
        worker=cluster.workers[0],
        key="a",
        run_id=0,
        exception=exception,
        traceback=traceback,
        exception_text="x",
        traceback_text="",
    )
    cluster.handle(KeysRetried, client_id="c", keys=["a"])
    erred, retried = (
        item
        for frames in cut(cluster.client_box.take())
        for item in loads(frames, deserialize=False)
    )
    assert set(erred) == {"op", "key", "exception", "traceback"}
    assert (erred["op"], erred["key"]) == ("task-erred", "a")
    for given_, got in ((exception, erred["exception"]), (traceback, erred["traceback"])):
        if isinstance(given_, Closed):
            assert isinstance(got, Serialized)
            assert [bytes(frame) for frame in got.frames] == given_.frames
        else:
            assert got == given_
    assert retried == {"op": "task-retried", "key": "a"}


def test_lost_data_and_cancellation() -> None:
    cluster = Cluster(n_workers=2)
    cluster.submit({"a": []})
    holder = 0 if cluster.boxes[0] else 1
    cluster.finish("a", holder)
    cluster.to_client()
    cluster.handle(WorkerLost, worker=cluster.workers[holder], expected=False, reason="gone")
    assert cluster.to_client() == [{"op": "lost-data", "key": "a"}]
    cluster.handle(
        KeysCancelled, client_id="c", keys=["a"], force=False, reason="why", message="more"
    )
    assert cluster.to_client() == [
        {"op": "cancelled-keys", "keys": ("a",), "reason": "why", "msg": "more"}
    ]
    cluster.submit({"b": []})
    cluster.handle(KeysCancelled, client_id="c", keys=["b"], force=False, reason=None, message=None)
    assert cluster.to_client() == [{"op": "cancelled-keys", "keys": ("b",)}]


def test_restart(cluster: Cluster) -> None:
    cluster.handle(Restarted)
    assert cluster.to_client() == [{"op": "restart"}]
