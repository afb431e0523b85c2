"""Messages of the Dask wire as plain Python values, for everything off the hot path.

Owns the placeholders (``__Set__``, ``__Enum__``, ``__Serialized__``, ``__Pickled__``) and their
renumbering. Never opens a payload: what a peer serialized or pickled stays an opaque pair of
sub-header and payload frames, and is sent on byte for byte. Called by ``comm`` for RPC messages
and by the server for stream messages that the compiled codec does not take.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import msgpack

from cython_ext.frames import check_body

__all__ = [
    "NO_DEFAULT",
    "DecodeError",
    "EncodeError",
    "ForeignEnum",
    "Frame",
    "Pickled",
    "Serialized",
    "decode",
    "encode",
    "serialized_bytes",
]

Frame = bytes | bytearray | memoryview


class DecodeError(ValueError):
    """A message cannot be decoded; the text names what is wrong with it."""


class EncodeError(ValueError):
    """A value has no form on the wire; the text names its type or the reason."""


@dataclass(frozen=True, slots=True)
class Serialized:
    """A value that a peer serialized: opened by the final reader alone.

    ``header`` is the msgpack sub-header exactly as it came; ``frames`` are its payload frames.
    """

    PLACEHOLDER: ClassVar[str] = "__Serialized__"

    header: bytes
    frames: tuple[Frame, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, header included."""
        return _payload_nbytes(self.header, self.frames)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.frames)} frames, {self.nbytes} bytes)"


@dataclass(frozen=True, slots=True)
class Pickled:
    """A pickle with out-of-band buffers: opened by the final reader alone, never here."""

    PLACEHOLDER: ClassVar[str] = "__Pickled__"

    header: bytes
    frames: tuple[Frame, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, header included."""
        return _payload_nbytes(self.header, self.frames)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.frames)} frames, {self.nbytes} bytes)"


@dataclass(frozen=True, slots=True)
class ForeignEnum:
    """A member of an enum that only peers know: three names, and sent on as such."""

    PLACEHOLDER: ClassVar[str] = "__Enum__"

    module: str
    type_name: str
    name: str


NO_DEFAULT: Final = ForeignEnum("dask.typing", "_NoDefault", "no_default")
"""The value by which a client says that ``get_metadata`` has no default; compare with ``is``."""

_KNOWN_ENUMS: Final = {("dask.typing", "_NoDefault", "no_default"): NO_DEFAULT}


def _payload_nbytes(header: bytes, frames: tuple[Frame, ...]) -> int:
    return len(header) + sum(
        frame.nbytes if isinstance(frame, memoryview) else len(frame) for frame in frames
    )


def decode(frames: Sequence[Frame]) -> Any:
    """Decode one message.

    Arrays become tuples, maps become dicts with any hashable key, set placeholders become sets.

    :param frames: body, then sub-frames, as ``FrameCutter`` returns them.
    :raises DecodeError: anything that is not a well-formed message.
    """
    if not frames:
        raise DecodeError("message without frames")
    body = frames[0]
    try:
        check_body(body)
        # Placeholders are rare in small messages, and a hook costs a call for every map.
        if len(frames) == 1 and b"__" not in bytes(body):
            return _unpack(body, None)
        return _unpack(body, _Placeholders(frames))
    except DecodeError:
        raise
    except TypeError as exc:
        # msgpack's report of a map, or a set, in the place of a key.
        raise DecodeError(f"map key that cannot be a key: {exc}") from exc
    except ValueError as exc:
        raise DecodeError(str(exc) or type(exc).__name__) from exc


def _unpack(data: Frame, hook: Any) -> Any:
    return msgpack.unpackb(data, object_hook=hook, use_list=False, raw=False, strict_map_key=False)


class _Placeholders:
    """Replaces the placeholder maps of one message while it is unpacked."""

    __slots__ = ("_counts", "_frames", "_free", "_seen")

    def __init__(self, frames: Sequence[Frame]) -> None:
        self._frames = frames
        self._seen: dict[tuple[type, int], Serialized | Pickled] = {}
        self._free = len(frames) - 1
        # Values of one type have equal headers: a gather of a thousand keys parses a few.
        self._counts: dict[bytes, int] = {}

    def __call__(self, found: dict[Any, Any]) -> Any:
        if "__Serialized__" in found:
            return self._payload(Serialized, "__Serialized__", found["__Serialized__"])
        if "__Pickled__" in found:
            return self._payload(Pickled, "__Pickled__", found["__Pickled__"])
        if "__Enum__" in found:
            return _enum_member(found)
        if "__Set__" in found:
            return _set_of(found)
        return found

    def _payload(
        self, kind: type[Serialized] | type[Pickled], name: str, index: object
    ) -> Serialized | Pickled:
        if type(index) is not int:
            raise DecodeError(f"{name} must hold a frame index, got {reprlib.repr(index)}")
        if not 1 <= index < len(self._frames):
            raise DecodeError(
                f"{name} points at frame {index} of a message with {len(self._frames)} frames"
            )
        seen = self._seen.get((kind, index))
        if seen is not None:
            return seen
        header = bytes(self._frames[index])
        count = self._counts.get(header, -1)
        if count < 0:
            count = self._counts[header] = _sub_frame_count(name, index, header)
        first = index + 1
        if count > len(self._frames) - first:
            raise DecodeError(
                f"sub-header at frame {index} claims {count} payload frames, "
                f"{len(self._frames) - first} follow"
            )
        # Overlapping payloads would let a short message claim memory that grows with its square.
        self._free -= 1 + count
        if self._free < 0:
            raise DecodeError(f"payload at frame {index} overlaps the payload of another value")
        payload = kind(header, tuple(self._frames[first : first + count]))
        self._seen[kind, index] = payload
        return payload


def _sub_frame_count(name: str, index: int, header: bytes) -> int:
    try:
        check_body(header)
        fields = _unpack(header, None)
    except (ValueError, TypeError) as exc:
        raise DecodeError(f"{name}: sub-header at frame {index} is not msgpack: {exc}") from exc
    if not isinstance(fields, dict):
        raise DecodeError(f"{name}: sub-header at frame {index} is not a map")
    count = fields.get("num-sub-frames")
    if type(count) is not int or count < 0:
        raise DecodeError(
            f"{name}: sub-header at frame {index} has num-sub-frames {reprlib.repr(count)}"
        )
    return count


def _enum_member(found: dict[Any, Any]) -> ForeignEnum:
    names = (found.get("__module__"), found.get("__name__"), found.get("name"))
    module, type_name, name = names
    if not (isinstance(module, str) and isinstance(type_name, str) and isinstance(name, str)):
        raise DecodeError(
            f"__Enum__ needs __module__, __name__ and name, got {reprlib.repr(names)}"
        )
    known = _KNOWN_ENUMS.get((module, type_name, name))
    return ForeignEnum(module, type_name, name) if known is None else known


def _set_of(found: dict[Any, Any]) -> set[Any]:
    members = found.get("as-list")
    if not isinstance(members, tuple):
        raise DecodeError("__Set__ needs the array as-list")
    try:
        return set(members)
    except TypeError as exc:
        raise DecodeError(f"__Set__ with a member that cannot be one: {exc}") from exc


def encode(message: object) -> list[Frame]:
    """Encode one message: its body and the sub-frames of the opaque values in it.

    :raises EncodeError: a value that has no form on the wire.
    """
    frames: list[Frame] = [b""]

    def default(value: object) -> object:
        if isinstance(value, Serialized):
            return _append_payload(frames, "__Serialized__", value)
        if isinstance(value, Pickled):
            return _append_payload(frames, "__Pickled__", value)
        if isinstance(value, (set, frozenset)):
            return {"__Set__": True, "as-list": list(value)}
        if isinstance(value, ForeignEnum):
            return {
                "__Enum__": True,
                "name": value.name,
                "__module__": value.module,
                "__name__": value.type_name,
            }
        raise EncodeError(f"{type(value).__name__} has no form on the wire: {reprlib.repr(value)}")

    try:
        frames[0] = msgpack.packb(message, default=default, use_bin_type=True)
    except EncodeError:
        raise
    except (OverflowError, ValueError, TypeError) as exc:
        raise EncodeError(f"message cannot be encoded: {exc}") from exc
    return frames


def _append_payload(frames: list[Frame], name: str, value: Serialized | Pickled) -> dict[str, int]:
    index = len(frames)
    frames.append(value.header)
    frames.extend(value.frames)
    return {name: index}


def serialized_bytes(data: bytes) -> Serialized:
    """Wrap ``data`` as a peer does with a ``bytes`` object that it serialized.

    The final reader gets the ``bytes`` object back.
    """
    return Serialized(_BYTES_HEADER, (data,))


_BYTES_HEADER: Final[bytes] = msgpack.packb(
    {
        "serializer": "dask",
        "type": "builtins.bytes",
        # The pickle of the class ``bytes``, written out: GLOBAL, STOP.
        "type-serialized": b"\x80\x04\x8c\x08builtins\x8c\x05bytes\x93.",
        "sub-header": {},
        "compression": [None],
        "split-num-sub-frames": [1],
        "split-offsets": [0],
        "num-sub-frames": 1,
    }
)
