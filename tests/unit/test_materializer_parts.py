"""Pieces of the materializer on their own: pickles, groups, messages, the parent's channel."""

from __future__ import annotations

import asyncio
import functools
import operator
import re
import socket
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from dask._task_spec import Alias, DataNode, List, Task, TaskRef, execute_graph
from dask.utils import key_split
from distributed.protocol import pickle as wire_pickle
from distributed.utils import key_split_group
from hypothesis import given
from hypothesis import strategies as st

from distributed_core.materializer.channel import Channel, ChannelClosed
from distributed_core.materializer.child_graph import _Groups
from distributed_core.materializer.child_pickle import NodePickler
from distributed_core.materializer.parts import (
    PREFIX_BYTES,
    GraphEnd,
    GraphSlice,
    MalformedMessage,
    Opaque,
    Submission,
    decode_message,
    decode_part,
    decode_prefix,
    encode_message,
    encode_part,
    encode_submission,
)
from tests.unit.test_materializer_support import load_run_spec

LARGE = np.arange(50_000)


def by_name(*args: Any) -> int:
    return len(args)


def by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, as if it came from a client's main module."""
    function.__module__ = "__main__"
    return function


def show(args: Any) -> str:
    return re.sub(r" at 0x\w+", "", repr(args))


class Adder:
    def __init__(self, n: int) -> None:
        self.n = n

    def add(self, x: int) -> int:
        return self.n + x


@pytest.mark.parametrize(
    "function",
    [
        operator.neg,
        by_name,
        by_value(lambda *args, **kwargs: (args, kwargs)),
        functools.partial(operator.add, 1),
        functools.partial(by_value(lambda a, b: a + b), 1),
        Adder(5).add,
        Adder,
        "abc".index,
        np.add,
        by_value(lambda x, large=LARGE: large[x]),
    ],
)
@pytest.mark.parametrize(
    "argument", [1, "x", (1, 2), np.arange(3), TaskRef("y"), by_value(lambda: 1)]
)
def test_pickles_load_to_what_stock_pickles_load_to(function: Any, argument: Any) -> None:
    pickler = NodePickler()
    for i in range(4):
        node = Task(f"k-{i}", function, i, argument, List(TaskRef("z"), 3), _data_producer=i == 2)
        got = load_run_spec(pickler(node))
        buffers: list[Any] = []
        data = wire_pickle.dumps(node, buffer_callback=buffers.append)
        stock = wire_pickle.loads(data, buffers=buffers)
        assert type(got) is Task
        assert got.key == stock.key == node.key
        assert got.dependencies == stock.dependencies == node.dependencies
        assert got.data_producer == stock.data_producer
        assert type(got.func) is type(stock.func)
        assert show(got.args) == show(stock.args)
        assert got.kwargs == stock.kwargs


@pytest.mark.parametrize(
    "node",
    [
        DataNode("d", np.arange(10)),
        Alias("a", "b"),
        List(TaskRef("x"), 1),
        Task.fuse(Task("a", int), Task("b", abs, TaskRef("a")), key="b"),
    ],
)
def test_nodes_of_other_kinds(node: Any) -> None:
    pickler = NodePickler()
    for _ in range(3):
        got = load_run_spec(pickler(node))
        assert type(got) is type(node)
        assert got.dependencies == node.dependencies
        assert repr(got) == repr(node)


def test_sharing_between_function_and_arguments_is_kept() -> None:
    shared: list[int] = []

    def same(other: list[int]) -> bool:
        return other is shared

    pickler = NodePickler()
    for _ in range(3):
        assert load_run_spec(pickler(Task("k", same, shared)))() is True


def test_two_functions_by_value_share_globals() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(
        "x = 0\ndef put(get):\n    global x\n    x = 5\n    return get()\ndef get(): return x",
        namespace,
    )
    pickler = NodePickler()
    for _ in range(3):
        assert load_run_spec(pickler(Task("k", namespace["put"], namespace["get"])))() == 5


def test_object_that_cannot_be_pickled() -> None:
    pickler = NodePickler()
    good = Task("k", operator.neg, 1)
    for _ in range(3):
        with pytest.raises(TypeError):
            pickler(Task("k", operator.neg, socket.socket()))
        assert load_run_spec(pickler(good))() == -1


def test_fused_graph_runs() -> None:
    pickler = NodePickler()
    fused = [
        Task.fuse(
            Task(("a", i), by_value(lambda x: x + 1), i), Task(("b", i), abs, TaskRef(("a", i)))
        )
        for i in range(5)
    ]
    nodes = [load_run_spec(pickler(node)) for node in fused]
    assert sorted(execute_graph(nodes).values()) == [1, 2, 3, 4, 5]


words = st.text(alphabet="abcdefg0123-_('<> ", max_size=40)
hexes = st.text(alphabet="abcdef0123456789", min_size=32, max_size=32)
names = st.one_of(
    words,
    hexes,
    st.builds("{}-{}".format, words, hexes),
    st.builds("{}-{}".format, st.sampled_from(["inc", "from-array", "_x", "f"]), words),
)
keys = st.one_of(names, st.integers(), st.tuples(names, st.integers()), st.tuples(st.integers()))


@given(st.lists(keys, max_size=20))
def test_groups_are_those_of_the_stock_splitters(some: list[Any]) -> None:
    groups = _Groups()
    prefix_of: dict[str, str] = {}
    for key in some:
        number = groups.index(key)
        name = groups.new_groups[number]
        prefix = groups.new_prefixes[groups.new_group_prefix[number]]
        try:
            assert name == str(key_split_group(key))
        except IndexError:
            assert name == "Other"
        # The first key of a group decides, as it does where the group is made.
        assert prefix == prefix_of.setdefault(name, key_split(key))


def test_message_round_trip() -> None:
    raw = [b"x" * 300_000, b""]
    head = msgpack.packb([{"a": 1}, [len(r) for r in raw]])
    data = b"".join(map(bytes, encode_message(head, raw)))
    payload, head_bytes = decode_prefix(data[:PREFIX_BYTES])
    assert payload == len(data) - PREFIX_BYTES
    body, segments = decode_message(data[PREFIX_BYTES:], head_bytes)
    assert body == {"a": 1}
    assert list(map(bytes, segments)) == raw


@pytest.mark.parametrize("prefix", [b"\xff" * 16, b"\x01" + b"\0" * 15, b"\0" * 16])
def test_bad_prefix(prefix: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_prefix(prefix)


@given(st.binary(max_size=60))
def test_bad_message(data: bytes) -> None:
    try:
        body, raw = decode_message(data, len(data))
        decode_part(body, raw)
    except MalformedMessage:
        pass


def test_part_of_wrong_length_is_refused() -> None:
    part = GraphSlice(
        0,
        ["k"],
        bytes(4),
        b"",
        bytes(8),
        b"\0",
        bytes(4),
        [],
        [],
        b"",
        bytes(4),
        [],
        bytes(4),
        [b""],
    )
    body = encode_part(part, [])
    assert decode_part(body, ()) == part
    part.order = b""
    with pytest.raises(MalformedMessage, match="order"):
        decode_part(encode_part(part, []), ())
    with pytest.raises(MalformedMessage, match="unknown part"):
        decode_part([9], ())


def test_submission_that_is_not_plain() -> None:
    with pytest.raises(TypeError, match="object"):
        encode_submission(Submission(b"", [], ["k"], annotations=object()))
    assert encode_submission(Submission(b"", [], {"k"}, annotations=Opaque(b"")))


async def _channel() -> tuple[Channel, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()
    _, channel = await loop.create_unix_connection(Channel, sock=ours)
    return channel, theirs


def _message(value: Any, raw: bytes = b"") -> bytes:
    segments = [raw] if raw else []
    head = msgpack.packb([value, [len(r) for r in segments]])
    return b"".join(map(bytes, encode_message(head, segments)))


@pytest.mark.parametrize("piece", [1, 7, 16, 100_000])
def test_channel_cuts_messages_whatever_the_pieces(piece: int) -> None:
    async def run() -> None:
        channel, theirs = await _channel()
        loop = asyncio.get_running_loop()
        sizes = [0, 5, 70_000 if piece > 16 else 50, 3]
        data = b"".join(_message(i, b"r" * size) for i, size in enumerate(sizes))

        async def send() -> None:
            for start in range(0, len(data), piece):
                await loop.sock_sendall(theirs, data[start : start + piece])

        sending = asyncio.create_task(send())
        for i, size in enumerate(sizes):
            body, raw = await channel.receive()
            assert body == i
            assert sum(map(len, raw)) == size
        await sending
        theirs.close()
        with pytest.raises(ChannelClosed):
            await channel.receive()
        with pytest.raises(ChannelClosed):
            await channel.send([b"x"])

    asyncio.run(run())


@pytest.mark.parametrize(
    "data", [b"\xff" * 16, b"\x01" + b"\0" * 7 + b"\x01" + b"\0" * 7 + b"\xc1"]
)
def test_channel_closes_on_nonsense(data: bytes) -> None:
    async def run() -> None:
        channel, theirs = await _channel()
        with theirs:
            await asyncio.get_running_loop().sock_sendall(theirs, data)
            with pytest.raises(ChannelClosed):
                await channel.receive()
            await channel.closed

    asyncio.run(run())


def test_channel_stops_reading_when_nobody_takes() -> None:
    async def run() -> None:
        channel, theirs = await _channel()
        loop = asyncio.get_running_loop()
        data = _message("m", b"x" * 1_000_000)
        sending = asyncio.create_task(loop.sock_sendall(theirs, data * 20))
        async with asyncio.timeout(30):
            while len(channel._messages) < 2:  # noqa: ASYNC110 nothing signals this
                await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not sending.done()
        assert len(channel._messages) == 2
        for _ in range(20):
            assert (await channel.receive())[0] == "m"
        await sending
        theirs.close()
        channel.abort("done")
        await channel.closed

    asyncio.run(run())


def test_end_round_trip() -> None:
    assert decode_part(encode_part(GraphEnd(1.0, 2.0), []), ()) == GraphEnd(1.0, 2.0)
