"""The frame cutter and builder."""

from __future__ import annotations

import struct

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cython_ext.frames import (
    SMALL_FRAME_BYTES,
    FrameCutter,
    FrameError,
    build,
    check_body,
)
from tests.wire.support import raw

FRAMES = st.lists(
    st.one_of(st.binary(max_size=40), st.integers(0, 3).map(lambda n: b"L" * (n * 40_000))),
    min_size=1,
    max_size=6,
)


def cutter() -> FrameCutter:
    return FrameCutter(1000, 1 << 20, 1 << 22)


def flat(pieces: list[bytes | memoryview]) -> bytes:
    return b"".join(pieces)


def test_shortest_message_of_the_wire() -> None:
    assert flat(build([b"\xa2OK"])) == bytes.fromhex(
        "13000000000000000100000000000000" + "0300000000000000" + "a24f4b"
    )


@given(st.lists(FRAMES, min_size=1, max_size=4), st.data())
@settings(max_examples=150, deadline=None)
def test_any_cut_of_the_stream_gives_the_same_messages(
    messages: list[list[bytes]], data: st.DataObject
) -> None:
    stream = b"".join(flat(build(frames)) for frames in messages)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12).map(sorted))
    cut = cutter()
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += cut.feed(stream[start:end])
    assert found == messages
    assert cut.pending_bytes == 0


def test_split_at_every_byte() -> None:
    messages = [[b"body", b"", b"sub"], [b""], [b"x" * 30, b""]]
    stream = b"".join(raw(*frames) for frames in messages)
    for first in range(len(stream) + 1):
        for second in (first, min(first + 1, len(stream)), min(first + 9, len(stream))):
            cut = cutter()
            found = cut.feed(stream[:first]) + cut.feed(stream[first:second])
            found += cut.feed(stream[second:])
            assert found == messages


def test_byte_by_byte() -> None:
    frames = [b"a" * 70_000, b"", b"b"]
    cut = cutter()
    found = []
    for byte in flat(build(frames)):
        found += cut.feed(bytes((byte,)))
    assert found == [frames]


@pytest.mark.parametrize("block_frames", [0, 1, 2, 3, 4])
def test_frames_may_lie_outside_the_first_block(block_frames: int) -> None:
    frames = [b"body", b"one", b"", b"three"]
    cut = cutter()
    assert cut.feed(raw(*frames, block_frames=block_frames) * 2) == [frames, frames]


def test_large_frames_are_passed_by_reference_and_small_ones_joined() -> None:
    big = b"x" * SMALL_FRAME_BYTES
    pieces = build([b"a", b"b", big, b"c", b"d", big, b""])
    assert [len(piece) for piece in pieces] == [16 + 8 * 7 + 2, len(big), 2, len(big)]
    assert pieces[1] is big
    block, count = struct.unpack_from("<QQ", pieces[0])
    assert (block, count) == (8 * 8 + 2, 7)


def test_many_small_frames_are_sent_in_pieces() -> None:
    frames = [b"y" * 50_000] * 100
    pieces = build(frames)
    assert len(pieces) > 1
    assert max(map(len, pieces)) < 2 << 20
    assert FrameCutter(1000, 1 << 20, 1 << 24).feed(flat(pieces)) == [frames]


def test_build_takes_any_buffer() -> None:
    array = memoryview(struct.pack("<3d", 1, 2, 3)).cast("d")
    frames = [bytearray(b"ab"), memoryview(b"cd"), array]
    assert cutter().feed(flat(build(frames))) == [[b"ab", b"cd", bytes(array)]]


def test_build_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="at least one frame"):
        build([])
    with pytest.raises(TypeError):
        build([b"a", "text"])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (struct.pack("<QQ", 8, 0), "too short"),
        (struct.pack("<QQ", 16, 0), "without frames"),
        (struct.pack("<QQ", 16, 2), "too short for 2 frame lengths"),
        (struct.pack("<QQ", 8 * 1002, 1001), "more than the limit of 1000"),
        (struct.pack("<Q", 1 << 63), "more than the"),
        (struct.pack("<Q", (1 << 64) - 1), "more than the"),
        (struct.pack("<QQQ", 16, 1, (1 << 20) + 1), "frame 0 announced"),
        (struct.pack("<QQQ", 16, 1, (1 << 64) - 1), "frame 0 announced"),
        (struct.pack("<7Q", 48, 5, *[1 << 20] * 5), "exceeds the limit of 4194304 bytes"),
        (struct.pack("<QQQ", 18, 1, 3), "does not end where a frame ends"),
        (struct.pack("<QQQ", 20, 1, 3), "does not end where a frame ends"),
        (b"GET / HTTP/1.1\r\n", "HTTP request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", "TLS"),
    ],
)
@pytest.mark.parametrize("step", [1, 1000])
def test_broken_layouts_and_limits(data: bytes, text: str, step: int) -> None:
    cut = cutter()
    with pytest.raises(FrameError, match=text):
        for start in range(0, len(data), step):
            cut.feed(data[start : start + step])
    assert cut.error is not None
    with pytest.raises(FrameError, match=text):
        cut.feed(b"")


def test_messages_before_a_fault_are_delivered() -> None:
    cut = cutter()
    assert cut.feed(raw(b"good") + struct.pack("<QQ", 16, 0)) == [[b"good"]]
    assert cut.error == "message without frames"
    with pytest.raises(FrameError):
        cut.feed(b"")


def test_an_announced_giant_is_not_allocated() -> None:
    cut = FrameCutter(10, 1 << 45, 1 << 46)
    assert cut.feed(struct.pack("<QQQ", 16, 1, 1 << 40) + b"x" * 100_000) == []
    assert cut.pending_bytes < 200_000
    many = FrameCutter(1 << 30, 1 << 45, 1 << 46)
    assert many.feed(struct.pack("<QQ", 8 * (1 + (1 << 29)), 1 << 29) + bytes(800)) == []
    assert many.pending_bytes < 1000


def test_limits_change_between_messages() -> None:
    cut = FrameCutter(1, 10, 10)
    first, second = raw(b"small"), raw(b"x" * 5000, b"y")
    assert cut.feed(first + second, 1) == [[b"small"]]
    cut.set_limits(2, 10_000, 10_000)
    assert cut.feed(b"") == [[b"x" * 5000, b"y"]]
    with pytest.raises(ValueError, match="positive"):
        cut.set_limits(0, 1, 1)


def test_body_check_takes_what_msgpack_makes() -> None:
    values = [
        None, True, False, 0, 127, 128, 2**16, 2**32, 2**64 - 1, -1, -33, -(2**7), -(2**63),
        1.5, "", "é" * 40, "x" * 300, "y" * 70_000, b"", b"z" * 300, b"q" * 70_000,
        [], [1] * 20, [1] * 70_000, {}, {i: [i] for i in range(20)}, {(1, 2): {"a": None}},
    ]  # fmt: skip
    for value in values:
        assert check_body(msgpack.packb(value)) == 0
        assert check_body(msgpack.packb([value, value])) == 0


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "ends too early"),
        (b"\x01\x01", "1 bytes follow"),
        (b"\xdd\xff\xff\xff\xff", "4294967295 elements"),
        (b"\xdf\xff\xff\xff\xff", "8589934590 elements"),
        (b"\xc6\xff\xff\xff\xffab", "4294967295 bytes"),
        (b"\xda\x01", "ends too early"),
        (b"\xc1", "no part of the protocol"),
        (b"\xd4\x01\x01", "no part of the protocol"),
        (b"\xc7\x01\x01\x01", "no part of the protocol"),
        (b"\x91" * 1001 + b"\xc0", "more than 1000 deep"),
    ],
)
def test_body_check_refuses(body: bytes, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_body(body)


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_body_check_agrees_with_msgpack(body: bytes) -> None:
    try:
        check_body(body)
    except ValueError:
        return
    # What passes the check is complete: only text encoding and odd keys are left to refuse.
    try:
        msgpack.unpackb(body, raw=True, strict_map_key=False, use_list=False)
    except TypeError as exc:
        assert "unhashable" in str(exc)
