"""The byte level of the compiled codec, against the msgpack package."""

from __future__ import annotations

import math
import random
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cython_ext.msgpack import MsgpackError, pack_key_bytes, skip, unpack_key

scalars = (
    st.text() | st.integers(min_value=-(2**63), max_value=2**64 - 1) | st.floats(allow_nan=False)
)
keys = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4).map(tuple), max_leaves=12)
plain = st.recursive(
    st.none() | st.booleans() | scalars | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5)
    ),
    max_leaves=30,
)

EDGES = [
    0, 1, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1,
    -1, -32, -33, -128, -129, -32768, -32769, -(2**31), -(2**31) - 1, -(2**63),
]  # fmt: skip


@given(keys)
def test_keys_pack_as_the_msgpack_package_packs_them(key: Any) -> None:
    assert pack_key_bytes(key) == msgpack.packb(key)


@given(keys)
def test_keys_come_back_with_their_type(key: Any) -> None:
    back = unpack_key(msgpack.packb(key))
    assert back == key
    assert repr(back) == repr(key)


@pytest.mark.parametrize("key", EDGES)
def test_integers_take_their_smallest_form(key: int) -> None:
    assert pack_key_bytes(key) == msgpack.packb(key)
    assert unpack_key(msgpack.packb(key)) == key


@pytest.mark.parametrize("n", [0, 31, 32, 255, 256, 65535, 65536, 70000])
def test_strings_of_every_length_form(n: int) -> None:
    for text in ("x" * n, "ä" * (n // 2), "€" * (n // 3)):
        assert pack_key_bytes(text) == msgpack.packb(text)
        assert unpack_key(msgpack.packb(text)) == text


@pytest.mark.parametrize("n", [0, 15, 16, 65535, 65536])
def test_tuples_of_every_length_form(n: int) -> None:
    key = tuple(range(n))
    assert pack_key_bytes(key) == msgpack.packb(key)
    assert unpack_key(msgpack.packb(key)) == key


def test_floats_of_both_widths_are_read() -> None:
    assert unpack_key(b"\xca" + bytes.fromhex("3fc00000")) == 1.5
    assert unpack_key(msgpack.packb(math.inf)) == math.inf


@pytest.mark.parametrize("value", [None, True, False, b"x", {"a": 1}, msgpack.ExtType(3, b"x")])
def test_what_is_no_key_is_refused(value: Any) -> None:
    for data in (msgpack.packb(value), msgpack.packb(["x", value])):
        with pytest.raises(MsgpackError, match="expected a task key, got"):
            unpack_key(data)


@pytest.mark.parametrize("value", [None, True, False, b"x", frozenset(), ["x"], ("x", None)])
def test_what_is_no_key_is_not_packed(value: Any) -> None:
    with pytest.raises(TypeError, match="not a task key"):
        pack_key_bytes(value)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
def test_integers_outside_of_64_bits_are_not_packed(value: int) -> None:
    with pytest.raises(OverflowError):
        pack_key_bytes(value)


def test_deep_keys_are_refused_both_ways() -> None:
    key: Any = "x"
    for _ in range(64):
        key = (key,)
    assert unpack_key(pack_key_bytes(key)) == key
    with pytest.raises(TypeError, match="deeper than 64"):
        pack_key_bytes((key,))
    with pytest.raises(MsgpackError, match="deeper than 64"):
        unpack_key(msgpack.packb((key,)))


def test_text_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(MsgpackError, match="UTF-8"):
        unpack_key(b"\xa2\xff\xfe")


def test_bytes_behind_a_key_are_refused() -> None:
    with pytest.raises(MsgpackError, match="2 bytes follow"):
        unpack_key(b"\xa1xyz")


@given(plain)
def test_skip_passes_any_value_and_no_truncated_one(value: Any) -> None:
    data = msgpack.packb(value)
    assert skip(data) == len(data)
    assert skip(b"\xc0" + data + b"\xc0", 1) == 1 + len(data)
    for end in {0, len(data) // 2, len(data) - 1}:
        with pytest.raises(MsgpackError, match="middle of a value"):
            skip(data[:end])


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"\xc4", 255),
        (b"\xc5", 65535),
        (b"\xc6", 2**32 - 1),
        (b"\xc7", 255),
        (b"\xc8", 65535),
        (b"\xc9", 2**32 - 1),
        (b"\xd9", 255),
        (b"\xda", 65535),
        (b"\xdb", 2**32 - 1),
        (b"\xdc", 65535),
        (b"\xdd", 2**32 - 1),
        (b"\xde", 65535),
        (b"\xdf", 2**32 - 1),
    ],
)
def test_absurd_lengths_are_refused_before_anything_is_made(head: bytes, body: int) -> None:
    width = (body.bit_length() + 7) // 8
    data = head + body.to_bytes(width, "big") + b"\x00" * 20
    with pytest.raises(MsgpackError, match="middle of a value"):
        skip(data)
    with pytest.raises(MsgpackError):
        unpack_key(data)


@pytest.mark.parametrize("code", [-1, 0, 5, 127])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 8, 16, 17, 255, 256, 65536])
def test_skip_passes_extension_values(code: int, n: int) -> None:
    data = msgpack.packb(msgpack.ExtType(code, b"x" * n)) if code >= 0 else b"\xd6\xff0000"
    assert skip(data) == len(data)


def test_the_byte_that_starts_nothing_is_refused() -> None:
    with pytest.raises(MsgpackError, match="0xc1"):
        skip(b"\xc1")


def test_skip_needs_no_stack_for_depth() -> None:
    depth = 1_000_000
    assert skip(b"\x91" * depth + b"\xc0") == depth + 1


def test_skip_agrees_with_the_msgpack_package_on_random_bytes() -> None:
    rng = random.Random(20260801)
    for _ in range(20_000):
        data = rng.randbytes(rng.randrange(1, 24))
        unpacker = msgpack.Unpacker(max_buffer_size=64, ext_hook=lambda code, raw: raw)
        unpacker.feed(data)
        try:
            unpacker.skip()
        except (msgpack.OutOfData, msgpack.FormatError, ValueError):
            with pytest.raises(MsgpackError):
                skip(data)
        else:
            assert skip(data) == unpacker.tell()


def test_skip_names_an_offset_outside() -> None:
    with pytest.raises(ValueError, match="offset 3 is outside"):
        skip(b"\xc0", 3)
