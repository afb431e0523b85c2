"""The generic codec against the stock one, and against bytes that nobody should send."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import numpy as np
import pytest
from dask.typing import no_default
from distributed.core import Status
from distributed.protocol import Serialize, dumps, loads
from distributed.protocol import Serialized as StockSerialized
from distributed.protocol.serialize import ToPickle
from hypothesis import given, settings
from hypothesis import strategies as st

from cython_ext.frames import FrameCutter, FrameError, build
from distributed_core.protocol.codec import (
    NO_DEFAULT,
    DecodeError,
    EncodeError,
    ForeignEnum,
    Pickled,
    Serialized,
    decode,
    encode,
    serialized_bytes,
)

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=10),
    st.binary(max_size=10),
)
KEYS = st.recursive(
    st.one_of(st.text(max_size=5), st.integers(-5, 5)),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.sets(KEYS, max_size=4),
    ),
    max_leaves=12,
)


def stock_frames(message: Any, **options: Any) -> list[bytes]:
    return [bytes(frame) for frame in dumps(message, **options)]


@given(VALUES)
@settings(max_examples=200, deadline=None)
def test_plain_values_round_trip_both_ways(value: Any) -> None:
    assert decode(encode(value)) == value
    assert loads(encode(value)) == value
    assert decode(stock_frames(value)) == value


def rich_message() -> dict[Any, Any]:
    return {
        "op": "x",
        ("k", 0): Serialize(np.arange(100_000)),
        "keys": {"a", ("b", 1)},
        "list": [Serialize([1, np.ones(3)]), ToPickle({"f": len}), Serialize(b"")],
        "default": no_default,
        "nested": {"deep": [{"payload": ToPickle(np.zeros(10))}]},
    }


def test_opaque_payloads_are_forwarded_byte_for_byte() -> None:
    sent = stock_frames(rich_message(), frame_split_size=100_000)
    message = decode(sent)
    assert isinstance(message["k", 0], Serialized)
    assert isinstance(message["list"][1], Pickled)
    assert message["default"] is NO_DEFAULT
    assert message["keys"] == {"a", ("b", 1)}
    # Another order of the values gives other indexes; header and payload stay what they were.
    turned = {"first": message["list"][0], "second": [message["k", 0]], "p": message["nested"]}
    forwarded = encode(turned)
    payload = message["k", 0]
    at = forwarded.index(payload.header)
    assert tuple(forwarded[at + 1 : at + 1 + len(payload.frames)]) == payload.frames
    assert payload.header in sent
    result = loads(forwarded)
    assert (result["second"][0] == np.arange(100_000)).all()
    assert (result["p"]["deep"][0]["payload"] == np.zeros(10)).all()
    blind = loads(forwarded, deserialize=False)
    assert isinstance(blind["second"][0], StockSerialized)


def test_compressed_and_split_payloads_pass_through() -> None:
    data = np.zeros(300_000, dtype="u1")
    sent = stock_frames(
        {"d": Serialize(data)}, context={"compression": "zlib"}, frame_split_size=50_000
    )
    forwarded = encode({"again": decode(sent)["d"]})
    assert (loads(forwarded)["again"] == data).all()


def test_whole_message_survives_decode_and_encode() -> None:
    result = loads(encode(decode(stock_frames(rich_message()))))
    assert result["default"] is no_default
    assert result["list"][1] == {"f": len}
    assert result["list"][2] == b""


def test_serialized_bytes_arrive_as_bytes() -> None:
    assert loads(encode({"e": serialized_bytes(b"abc")})) == {"e": b"abc"}


def test_foreign_enums_stay_closed() -> None:
    member = decode(stock_frames([Status.running]))[0]
    assert member == ForeignEnum("distributed.core", "Status", "running")
    assert loads(encode([member])) == (Status.running,)
    evil = {"__Enum__": True, "name": "system", "__module__": "os", "__name__": "x"}
    assert decode([msgpack.packb(evil)]) == ForeignEnum("os", "x", "system")


def placeholder(name: str, index: Any, *frames: bytes) -> list[bytes]:
    return [msgpack.packb({"v": {name: index}}), *frames]


def header(count: Any = 0, **more: Any) -> bytes:
    return bytes(msgpack.packb({"num-sub-frames": count, **more}))


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([], "without frames"),
        ([b""], "ends too early"),
        ([b"\xc1"], "no part of the protocol"),
        ([b"\xa1\xff"], "utf-8"),
        ([msgpack.packb({"a": 1})[:-1]], "ends too early"),
        ([b"\x81\x80\x01"], "cannot be a key"),
        ([b"\x81\x91\x80\x01"], "cannot be a key"),
        ([b"\x91" * 1200 + b"\xc0"], "nested"),
        (placeholder("__Serialized__", True), "must hold a frame index"),
        (placeholder("__Serialized__", "1"), "must hold a frame index"),
        (placeholder("__Serialized__", 0, header()), "points at frame 0"),
        (placeholder("__Serialized__", -1, header()), "points at frame -1"),
        (placeholder("__Serialized__", 2, header()), "points at frame 2"),
        (placeholder("__Serialized__", 2**60, header()), "points at frame"),
        (placeholder("__Pickled__", 1), "points at frame 1"),
        (placeholder("__Serialized__", 1, header(1)), "claims 1 payload frames, 0 follow"),
        (placeholder("__Serialized__", 1, header(2**62), b""), "claims"),
        (placeholder("__Serialized__", 1, header(-1)), "num-sub-frames -1"),
        (placeholder("__Serialized__", 1, header(True)), "num-sub-frames True"),
        (placeholder("__Serialized__", 1, header(None)), "num-sub-frames None"),
        (placeholder("__Serialized__", 1, b"\x80"), "num-sub-frames None"),
        (placeholder("__Serialized__", 1, b"\x90"), "is not a map"),
        (placeholder("__Serialized__", 1, b"\xc1"), "is not msgpack"),
        (placeholder("__Serialized__", 1, b""), "is not msgpack"),
        ([msgpack.packb({"__Set__": True})], "as-list"),
        ([msgpack.packb({"__Set__": True, "as-list": [{}]})], "cannot be one"),
        ([msgpack.packb({"__Set__": True, "as-list": "ab"})], "as-list"),
        ([msgpack.packb({"__Enum__": True, "name": "x"})], "__Enum__ needs"),
        ([msgpack.packb({"__Serialized__": True, "data": [1]})], "must hold a frame index"),
    ],
)
def test_bad_messages_are_named(frames: list[bytes], text: str) -> None:
    with pytest.raises(DecodeError, match=text):
        decode(frames)


def test_overlapping_payloads_are_refused() -> None:
    count = 50
    body = msgpack.packb([{"__Serialized__": i} for i in range(1, count)])
    subs = [header(count - i) for i in range(1, count + 1)]
    with pytest.raises(DecodeError, match="overlaps"):
        decode([body, *subs])


def test_one_payload_may_be_named_twice() -> None:
    body = msgpack.packb([{"__Pickled__": 1}, {"__Pickled__": 1}])
    first, second = decode([body, header(1), b"x"])
    assert first is second


@pytest.mark.parametrize(
    ("value", "text"),
    [(object(), "object has no form"), (2**64, "int has no form"), ("\ud800", "surrogates")],
)
def test_unencodable_values_are_named(value: Any, text: str) -> None:
    with pytest.raises(EncodeError, match=text):
        encode({"v": value})


def mutated(data: bytes, chance: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        kind = chance.randrange(4)
        at = chance.randrange(len(out)) if out else 0
        if kind == 0 and out:
            out[at] = chance.randrange(256)
        elif kind == 1 and out:
            out[at] ^= 1 << chance.randrange(8)
        elif kind == 2:
            del out[at : at + chance.randint(1, 8)]
        else:
            out[at:at] = chance.randbytes(chance.randint(1, 8))
    return bytes(out)


def test_mutated_streams_raise_only_what_is_declared() -> None:
    chance = random.Random(4711)
    originals = [
        b"".join(build(frames))
        for frames in (
            encode({"op": "identity", "n_workers": 0}),
            stock_frames(rich_message() | {("k", 0): Serialize(np.arange(10))}),
            encode([{"op": "client-releases-keys", "keys": [("x", 1), "y"], "client": "c"}] * 3),
        )
    ]
    outcomes = {"fine": 0, "frames": 0, "body": 0}
    for _ in range(20_000):
        cut = FrameCutter(100, 1 << 20, 1 << 20)
        try:
            messages = cut.feed(mutated(chance.choice(originals), chance))
        except FrameError:
            outcomes["frames"] += 1
            continue
        for frames in messages:
            try:
                encode(decode(frames))
            except DecodeError:
                outcomes["body"] += 1
            else:
                outcomes["fine"] += 1
    assert min(outcomes.values()) > 100, outcomes


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_random_frames_raise_only_decode_errors(frames: list[bytes]) -> None:
    try:
        decode(frames)
    except DecodeError as exc:
        assert str(exc)
