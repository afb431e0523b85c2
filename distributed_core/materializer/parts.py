"""What the two halves of the materializer say to each other, and how it looks on their socket.

Owns the request (`Submission`), the parts of the answer (`GraphBegin`, `GraphSlice`, `GraphEnd`,
`GraphFailed`) and the encoding of both. Holds plain data only: it must never import dask,
distributed or cloudpickle and never unpickle anything, since the scheduler process imports it.
Called by `pool` (scheduler process) and by `child` (materializer process).

A message on the socket is a 16-byte prefix (two little-endian unsigned 64-bit integers: length of
all that follows the prefix, length of the head), the head, and raw segments. The head is the
msgpack pair `[body, lengths of the raw segments]`. Raw segments keep large buffers out of msgpack,
so that neither side copies them once more.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgpack

__all__ = [
    "PREFIX_BYTES",
    "RAW_THRESHOLD_BYTES",
    "Buffer",
    "GraphBegin",
    "GraphEnd",
    "GraphFailed",
    "GraphSlice",
    "Key",
    "MalformedMessage",
    "Opaque",
    "Packed",
    "Part",
    "RunSpec",
    "SliceFlag",
    "Submission",
    "decode_message",
    "decode_part",
    "decode_prefix",
    "encode_call",
    "encode_message",
    "encode_part",
    "encode_submission",
    "is_final",
]

Buffer: TypeAlias = bytes | bytearray | memoryview
Key: TypeAlias = str | int | float | tuple[Any, ...]
RunSpec: TypeAlias = bytes | tuple[Buffer, ...]
"""Sub-frames of a `__Pickled__` placeholder: the sub-header, as bytes when it is small and the
only one, otherwise the sub-header and its out-of-band buffers, in order."""

PREFIX_BYTES = 16
RAW_THRESHOLD_BYTES = 256 * 1024
"""A frame from this size on travels as a raw segment; below it one more copy is cheaper."""

_MAX_PAYLOAD_BYTES = 1 << 36  # A nonsense prefix must not become a nonsense allocation.
_MAX_HEAD_BYTES = 1 << 32  # Slices keep heads near 1 MiB; only one huge key list comes near.

_prefix = struct.Struct("<QQ")


class MalformedMessage(ValueError):
    """The other half sent bytes that are not a message of ours."""


class SliceFlag:
    """Bits of `GraphSlice.flags`."""

    WANTED = 1
    DATA_PRODUCER = 2
    DATA_NODE = 8


@dataclass(slots=True)
class Opaque:
    """A pickled or serialized value that was never opened: sub-header and payload frames.

    `header` is the msgpack sub-header exactly as received.
    """

    header: Buffer
    frames: Sequence[Buffer] = ()


@dataclass(slots=True)
class Packed:
    """A plain value that is still msgpack-encoded, as cut out of the message's body."""

    data: Buffer


@dataclass(slots=True)
class Submission:
    """One `update-graph` message, unopened.

    `keys` and `internal_priority` may be given decoded or as `Packed` (then this process need
    not decode them at all). `slice_tasks` (count) and `slice_bytes` bound one `GraphSlice`; a
    slice exceeds `slice_bytes` by at most one task.
    """

    expr_header: Buffer
    expr_frames: Sequence[Buffer]
    keys: Collection[Key] | Packed
    annotations: Any = None
    code: Any = None
    span_metadata: Any = None
    internal_priority: Mapping[Key, float] | Packed | None = None
    slice_tasks: int = 1000
    slice_bytes: int = 1024 * 1024


@dataclass(slots=True)
class GraphBegin:
    """First part: what the graph needs from outside.

    `externals`: every dependency that is not a task of this graph. `wanted_externals`: the wanted
    keys that are not tasks of this graph. `span`: `{"metadata": plain value, "code": tuple of
    (code, lineno_frame, lineno_relative, filename), "problems": tuple of str}`; problems tell
    what of the informative values could not be opened.
    """

    n_tasks: int
    externals: Sequence[Key]
    wanted_externals: Sequence[Key]
    span: Mapping[str, Any]


@dataclass(slots=True)
class GraphSlice:
    """A run of tasks in topological order.

    Packed arrays are in native byte order. `dependencies`: int32, the dependencies of all tasks
    of the slice one after the other; a value >= 0 is the position of a task in this graph, in
    emission order; a value < 0 is `-(i + 1)` for `externals[i]`. `flags`: see `SliceFlag`.
    `future_dependents`: how many dependents of the task are in later slices. New prefixes, groups
    and annotations are appended to tables that live as long as the submission; the indexes point
    into those. `annotation_index` is -1 for a task without annotations.

    A row of `new_annotations` is a map with the fields `user_priority` (float), `retries` (int),
    `workers` (sequence of addresses, host names or worker names), `allow_other_workers` (bool),
    `resources` (map of float), `span` (map with `name` and `ids`), each nil if not given, and
    `wire`: what `compute-task.annotations` must be. `wire` as bytes is the msgpack encoding of
    the map, to be put in place. `wire` as a tuple of frames means that not all values were plain:
    the whole map is one pickle, the frames are the sub-header and buffers of a `__Pickled__`
    placeholder, and the placeholder takes the place of the map.
    """

    start: int
    keys: Sequence[Key]
    dependency_counts: bytes
    dependencies: bytes
    order: bytes
    flags: bytes
    future_dependents: bytes
    new_prefixes: Sequence[str]
    new_groups: Sequence[str]
    new_group_prefix: bytes
    group_index: bytes
    new_annotations: Sequence[Mapping[str, Any]]
    annotation_index: bytes
    run_specs: Sequence[RunSpec]


@dataclass(slots=True)
class GraphEnd:
    """Last part of a graph that came through. Times are those of the materializer process."""

    cpu_seconds: float
    wall_seconds: float


@dataclass(slots=True)
class GraphFailed:
    """Last part of a graph that did not come through; slices may have gone before it.

    `kind`: unpickle, materialize, annotations, unsupported, memory, timeout or crashed.
    `exception` and `traceback` are pickles made for the client and are empty when the
    materializer process could not make them (it died or was killed).
    """

    kind: str
    message: str
    exception: bytes = b""
    traceback: bytes = b""
    traceback_text: str = ""


Part: TypeAlias = GraphBegin | GraphSlice | GraphEnd | GraphFailed

_BEGIN, _SLICE, _END, _FAILED = range(4)


def is_final(part: Part) -> bool:
    """Whether `part` is the last one of its submission."""
    return isinstance(part, GraphEnd | GraphFailed)


def encode_message(head: bytes, raw: Sequence[Buffer]) -> list[Buffer]:
    """Frames of one message: `head` is the packed `[body, raw lengths]`."""
    size = len(head) + sum(map(len, raw))
    first = _prefix.pack(size, len(head)) + head
    return [first, *raw]


def decode_prefix(data: Buffer) -> tuple[int, int]:
    """Lengths (payload, head) in bytes from the first 16 bytes of a message.

    Raises MalformedMessage for lengths that no message of ours has.
    """
    payload, head = _prefix.unpack_from(data)
    if payload > _MAX_PAYLOAD_BYTES or head > min(payload, _MAX_HEAD_BYTES) or head == 0:
        raise MalformedMessage(f"bad message prefix: payload {payload} bytes, head {head} bytes")
    return payload, head


def decode_message(payload: Buffer, head_bytes: int) -> tuple[Any, list[memoryview]]:
    """Body and raw segments of one message.

    The segments are views of `payload`. Raises MalformedMessage.
    """
    view = memoryview(payload)
    try:
        body, lengths = msgpack.unpackb(view[:head_bytes], use_list=False, strict_map_key=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise MalformedMessage(f"head is not a message: {error}") from error
    raw = []
    position = head_bytes
    for length in lengths:
        raw.append(view[position : position + length])
        position += length
    if position != len(view):
        raise MalformedMessage(f"raw segments end at {position}, the message at {len(view)}")
    return body, raw


class _Segments:
    """Collects the frames that leave msgpack and hands out what stands for them in the body."""

    __slots__ = ("raw",)

    def __init__(self) -> None:
        self.raw: list[Buffer] = []

    def place(self, frame: Buffer) -> Buffer | int:
        if len(frame) < RAW_THRESHOLD_BYTES:
            return frame
        self.raw.append(frame)
        return len(self.raw) - 1

    def opaque(self, value: Opaque) -> dict[str, Any]:
        return {
            "header": self.place(value.header),
            "frames": [self.place(frame) for frame in value.frames],
        }

    def value(self, value: Any) -> dict[str, Any]:
        return self.opaque(value) if isinstance(value, Opaque) else {"plain": value}


def _encode_set(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return list(value)
    raise TypeError(f"not plain data: {type(value).__name__}")


def _packed(value: Any) -> Buffer:
    if isinstance(value, Packed):
        return value.data
    data: bytes = msgpack.packb(value, default=_encode_set)
    return data


def encode_submission(submission: Submission) -> list[Buffer]:
    """Frames of the request for `submission`. Raises TypeError for a value that is not plain."""
    segments = _Segments()
    body = {
        "op": "graph",
        "expr": segments.opaque(Opaque(submission.expr_header, submission.expr_frames)),
        "annotations": segments.value(submission.annotations),
        "code": segments.value(submission.code),
        "span_metadata": segments.value(submission.span_metadata),
        "keys": segments.place(_packed(submission.keys)),
        "internal_priority": segments.place(_packed(submission.internal_priority)),
        "slice_tasks": submission.slice_tasks,
        "slice_bytes": submission.slice_bytes,
    }
    return _encode_request(body, segments)


def encode_call(kind: str, payload: Opaque) -> list[Buffer]:
    """Frames of a small request that is answered by one value."""
    segments = _Segments()
    return _encode_request({"op": kind, "payload": segments.opaque(payload)}, segments)


def _encode_request(body: dict[str, Any], segments: _Segments) -> list[Buffer]:
    lengths = [len(frame) for frame in segments.raw]
    head = msgpack.packb([body, lengths], default=_encode_set)
    return encode_message(head, segments.raw)


def encode_part(part: Part, raw: list[Buffer]) -> list[Any]:
    """Body of `part`; large frames are appended to `raw` and replaced by their index there."""
    if isinstance(part, GraphSlice):
        run_specs: list[Any] = list(part.run_specs)
        placed = []
        for i, run_spec in enumerate(part.run_specs):
            if isinstance(run_spec, bytes) and len(run_spec) < RAW_THRESHOLD_BYTES:
                continue
            frames: list[Any] = []
            for frame in (run_spec,) if isinstance(run_spec, bytes) else run_spec:
                if len(frame) < RAW_THRESHOLD_BYTES:
                    frames.append(frame)
                else:
                    frames.append(len(raw))
                    raw.append(frame)
            run_specs[i] = frames
            placed.append(i)
        return [
            _SLICE,
            placed,
            part.start,
            part.keys,
            part.dependency_counts,
            part.dependencies,
            part.order,
            part.flags,
            part.future_dependents,
            part.new_prefixes,
            part.new_groups,
            part.new_group_prefix,
            part.group_index,
            part.new_annotations,
            part.annotation_index,
            run_specs,
        ]
    if isinstance(part, GraphBegin):
        return [_BEGIN, part.n_tasks, part.externals, part.wanted_externals, part.span]
    if isinstance(part, GraphEnd):
        return [_END, part.cpu_seconds, part.wall_seconds]
    return [
        _FAILED,
        part.kind,
        part.message,
        part.exception,
        part.traceback,
        part.traceback_text,
    ]


def decode_part(body: Sequence[Any], raw: Sequence[memoryview]) -> Part:
    """Inverse of `encode_part`. Raises MalformedMessage."""
    try:
        tag, *fields = body
        if tag == _SLICE:
            placed, *rest = fields
            part = GraphSlice(*rest)
            if placed:
                run_specs = list(part.run_specs)
                for i in placed:
                    run_specs[i] = tuple(_frames(run_specs[i], raw))
                part.run_specs = run_specs
            _check_lengths(part)
            return part
        if tag == _BEGIN:
            return GraphBegin(*fields)
        if tag == _END:
            return GraphEnd(*fields)
        if tag == _FAILED:
            return GraphFailed(*fields)
    except (TypeError, ValueError, IndexError) as error:
        raise MalformedMessage(f"malformed part: {error}") from error
    raise MalformedMessage(f"unknown part {tag!r}")


def _frames(frames: Sequence[Any], raw: Sequence[memoryview]) -> Iterator[Buffer]:
    for frame in frames:
        yield raw[frame] if isinstance(frame, int) else frame


def _check_lengths(part: GraphSlice) -> None:
    n = len(part.keys)
    for name, expected in (
        ("dependency_counts", 4 * n),
        ("order", 8 * n),
        ("flags", n),
        ("future_dependents", 4 * n),
        ("group_index", 4 * n),
        ("annotation_index", 4 * n),
        ("run_specs", n),
        ("new_group_prefix", 4 * len(part.new_groups)),
    ):
        if len(getattr(part, name)) != expected:
            raise MalformedMessage(
                f"{name} of a slice of {n} tasks has length {len(getattr(part, name))}"
            )
