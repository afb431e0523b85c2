"""Cuts the byte stream of a connection into messages, and builds messages for it.

A message is ``N0, count, length × count, frames``, all integers unsigned 64-bit little-endian.
``N0`` says how many of the bytes that follow it belong to the first block; it only helps a
reader that allocates, but it has to end where a frame ends, and a stream where it does not is out
of step.

Owns the limits on what a peer may announce: they are checked before anything is allocated, and
an allocation never runs ahead of the bytes that arrived by more than their own number. Never
looks inside a frame, save ``check_body``, which walks a msgpack body without making objects.
Called by ``distributed_core.comm`` and ``distributed_core.protocol.codec``.
"""

from cpython.buffer cimport (
    PyBUF_SIMPLE,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.bytes cimport (
    PyBytes_AS_STRING,
    PyBytes_CheckExact,
    PyBytes_FromStringAndSize,
    PyBytes_GET_SIZE,
)
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_XDECREF
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

cdef extern from "Python.h":
    PyObject* _new_bytes "PyBytes_FromStringAndSize"(char* text, Py_ssize_t size) except NULL
    char* _bytes_data "PyBytes_AS_STRING"(PyObject* value)
    Py_ssize_t _bytes_size "PyBytes_GET_SIZE"(PyObject* value)
    int _PyBytes_Resize(PyObject** value, Py_ssize_t size) except -1

__all__ = ["MAX_DEPTH", "SMALL_FRAME_BYTES", "FrameCutter", "FrameError", "build", "check_body"]

# Below this a copy is cheaper than one more entry in the kernel's vector.
cdef Py_ssize_t _SMALL = 64 * 1024
# Joined small frames are cut into pieces of this size, so that a message of a million frames
# does not need one huge buffer beside them.
cdef Py_ssize_t _PIECE = 1024 * 1024
cdef enum:
    _DEPTH = 1000
    _STAGE_HEAD = 0
    _STAGE_LENGTHS = 1
    _STAGE_FRAMES = 2

SMALL_FRAME_BYTES = _SMALL
MAX_DEPTH = _DEPTH


class FrameError(ValueError):
    """The byte stream breaks the frame layout or a limit; the connection cannot go on."""


cdef inline uint64_t _read_u64(const unsigned char* data) noexcept:
    """Little-endian, whatever the machine."""
    return (
        <uint64_t>data[0]
        | (<uint64_t>data[1] << 8)
        | (<uint64_t>data[2] << 16)
        | (<uint64_t>data[3] << 24)
        | (<uint64_t>data[4] << 32)
        | (<uint64_t>data[5] << 40)
        | (<uint64_t>data[6] << 48)
        | (<uint64_t>data[7] << 56)
    )


cdef inline void _write_u64(unsigned char* data, uint64_t value) noexcept:
    cdef int index
    for index in range(8):
        data[index] = <unsigned char>(value & 0xFF)
        value >>= 8


cdef str _foreign_protocol(uint64_t value):
    """What the first eight bytes look like when a peer speaks something else altogether."""
    cdef unsigned char start[8]
    _write_u64(start, value)
    cdef bytes text = PyBytes_FromStringAndSize(<char*>start, 8)
    if start[0] == 0x16 and start[1] == 0x03:
        return " (these bytes look like the start of a TLS connection)"
    if text.startswith((b"GET ", b"HEAD ", b"POST ", b"PUT ", b"OPTIONS ", b"PRI * ")):
        return " (these bytes look like an HTTP request)"
    if text.startswith(b"SSH-"):
        return " (these bytes look like SSH)"
    return ""


cdef class FrameCutter:
    """Cuts complete messages out of the bytes of one connection.

    Every frame of a message comes out as a ``bytes`` object of its own, so that a large one can be
    freed, or forwarded, without the others.

    :param max_frames: most frames in one message.
    :param max_frame_bytes: largest frame, in bytes.
    :param max_message_bytes: largest sum of all frames of one message, in bytes.
    """

    def __init__(self, max_frames: int, max_frame_bytes: int, max_message_bytes: int) -> None:
        self.set_limits(max_frames, max_frame_bytes, max_message_bytes)

    def __cinit__(self, *args, **kwargs):
        self.error = None
        self._rest = b""
        self._stage = _STAGE_HEAD
        self._head_have = 0
        self._lengths = NULL
        self._lengths_room = 0
        self._frames = None
        self._partial = NULL
        self._partial_have = 0
        self._frames_bytes = 0

    def __dealloc__(self):
        Py_XDECREF(self._partial)
        PyMem_Free(self._lengths)

    def set_limits(self, max_frames: int, max_frame_bytes: int, max_message_bytes: int) -> None:
        """Change the limits; they hold from the next length that is checked.

        :raises ValueError: a limit is not positive.
        """
        if min(max_frames, max_frame_bytes, max_message_bytes) < 1:
            raise ValueError(
                "limits must be positive: "
                f"{max_frames=}, {max_frame_bytes=}, {max_message_bytes=}"
            )
        # Keeps every sum below within 64 bits.
        self.max_frames = min(max_frames, 1 << 40)
        self.max_frame_bytes = min(max_frame_bytes, 1 << 50)
        self.max_message_bytes = min(max_message_bytes, 1 << 50)

    @property
    def pending_bytes(self) -> int:
        """Bytes of a message that is not complete yet (zero: the stream stands between two)."""
        return (
            len(self._rest)
            + self._head_have
            + (self._lengths_have if self._stage != _STAGE_HEAD else 0)
            + self._frames_bytes
            + self._partial_have
        )

    cpdef list feed(self, data, Py_ssize_t max_messages=0):
        """Take the next bytes of the stream; return the messages that they complete.

        :param data: the bytes, any number of them, zero included.
        :param max_messages: stop after so many messages and keep the rest for the next call;
            zero means all.
        :returns: messages, each a list of frames, each ``bytes``.
        :raises FrameError: the layout is broken or a limit exceeded. If messages were complete
            before the fault they are returned first, ``error`` is set, and the next call raises.
        """
        if self.error is not None:
            raise FrameError(self.error)
        cdef bytes chunk = data if PyBytes_CheckExact(data) else bytes(data)
        if self._rest:
            chunk = self._rest + chunk
            self._rest = b""
        cdef const unsigned char* start = <const unsigned char*>PyBytes_AS_STRING(chunk)
        cdef Py_ssize_t size = PyBytes_GET_SIZE(chunk)
        cdef Py_ssize_t position = 0
        cdef Py_ssize_t used
        cdef list out = []
        try:
            while position < size:
                if max_messages and len(out) >= max_messages:
                    self._rest = chunk[position:]
                    break
                used = 0
                if self._stage == _STAGE_HEAD and self._head_have == 0:
                    used = self._cut_whole(start + position, size - position, out)
                if used == 0:
                    used = self._take(start + position, size - position, out)
                position += used
        except FrameError as exc:
            self.error = str(exc)
            self._drop()
            if not out:
                raise
        except MemoryError:
            self.error = "no memory for a frame that arrived"
            self._drop()
            raise
        return out

    cdef int _check_block(self, uint64_t block_bytes) except -1:
        cdef uint64_t most = <uint64_t>self.max_message_bytes + 8 * (1 + <uint64_t>self.max_frames)
        if block_bytes > most:
            raise FrameError(
                f"first block announced with {block_bytes} bytes, more than the {most} that the "
                f"limits allow{_foreign_protocol(block_bytes)}"
            )
        if block_bytes < 16:
            raise FrameError(
                f"first block announced with {block_bytes} bytes, too short for a message"
            )
        return 0

    cdef int _check_count(self, uint64_t block_bytes, uint64_t frame_count) except -1:
        if frame_count == 0:
            raise FrameError("message without frames")
        if frame_count > <uint64_t>self.max_frames:
            raise FrameError(
                f"message announced with {frame_count} frames, more than the limit of "
                f"{self.max_frames}"
            )
        if block_bytes < 8 * (1 + frame_count):
            raise FrameError(
                f"first block of {block_bytes} bytes is too short for {frame_count} frame lengths"
            )
        return 0

    cdef Py_ssize_t _check_lengths(
        self, const unsigned char* lengths, Py_ssize_t count, uint64_t block_bytes
    ) except -1:
        """Check each length, their sum and the first block; return the sum."""
        cdef uint64_t inside = block_bytes - 8 * (1 + <uint64_t>count)
        cdef uint64_t total = 0
        cdef uint64_t length
        cdef bint aligned = inside == 0
        cdef Py_ssize_t index
        for index in range(count):
            length = _read_u64(lengths + 8 * index)
            if length > <uint64_t>self.max_frame_bytes:
                raise FrameError(
                    f"frame {index} announced with {length} bytes, more than the limit of "
                    f"{self.max_frame_bytes}"
                )
            total += length
            if total > <uint64_t>self.max_message_bytes:
                raise FrameError(
                    f"message exceeds the limit of {self.max_message_bytes} bytes at frame "
                    f"{index} of {count}"
                )
            if total == inside:
                aligned = True
        if not aligned:
            raise FrameError(
                f"first block of {block_bytes} bytes does not end where a frame ends"
            )
        return <Py_ssize_t>total

    cdef Py_ssize_t _cut_whole(
        self, const unsigned char* data, Py_ssize_t size, list out
    ) except -1:
        """Cut one message that is completely there; return its size, or zero if it is not."""
        if size < 16:
            return 0
        cdef uint64_t block_bytes = _read_u64(data)
        cdef uint64_t announced = _read_u64(data + 8)
        self._check_block(block_bytes)
        self._check_count(block_bytes, announced)
        cdef Py_ssize_t count = <Py_ssize_t>announced
        cdef Py_ssize_t prelude = 16 + 8 * count
        if size < prelude:
            return 0
        cdef Py_ssize_t total = self._check_lengths(data + 16, count, block_bytes)
        if size < prelude + total:
            return 0
        cdef list frames = []
        cdef const unsigned char* at = data + prelude
        cdef Py_ssize_t index, length
        for index in range(count):
            length = <Py_ssize_t>_read_u64(data + 16 + 8 * index)
            frames.append(PyBytes_FromStringAndSize(<char*>at, length))
            at += length
        out.append(frames)
        return prelude + total

    cdef Py_ssize_t _take(self, const unsigned char* data, Py_ssize_t size, list out) except -1:
        """Take bytes of a message that arrives in parts, at most up to its end."""
        cdef Py_ssize_t used = 0
        if self._stage == _STAGE_HEAD:
            used += self._take_head(data, size)
        if self._stage == _STAGE_LENGTHS:
            used += self._take_lengths(data + used, size - used)
        if self._stage == _STAGE_FRAMES:
            used += self._take_frames(data + used, size - used)
            if len(self._frames) == self._frame_count:
                out.append(self._frames)
                self._drop()
        return used

    cdef Py_ssize_t _take_head(self, const unsigned char* data, Py_ssize_t size) except -1:
        cdef Py_ssize_t used = min(size, 16 - self._head_have)
        memcpy(self._head + self._head_have, data, used)
        self._head_have += used
        if self._head_have >= 8:
            self._block_bytes = _read_u64(self._head)
            self._check_block(self._block_bytes)
        if self._head_have == 16:
            self._check_count(self._block_bytes, _read_u64(self._head + 8))
            self._frame_count = <Py_ssize_t>_read_u64(self._head + 8)
            self._lengths_have = 0
            self._stage = _STAGE_LENGTHS
        return used

    cdef Py_ssize_t _take_lengths(self, const unsigned char* data, Py_ssize_t size) except -1:
        cdef Py_ssize_t want = 8 * self._frame_count
        cdef Py_ssize_t used = min(size, want - self._lengths_have)
        cdef Py_ssize_t need = self._lengths_have + used
        cdef Py_ssize_t room
        cdef unsigned char* grown
        if need > self._lengths_room:
            room = min(want, max(need, 2 * self._lengths_room))
            grown = <unsigned char*>PyMem_Realloc(self._lengths, room)
            if grown == NULL:
                raise MemoryError(f"no memory for {room} bytes of frame lengths")
            self._lengths = grown
            self._lengths_room = room
        if used:
            memcpy(self._lengths + self._lengths_have, data, used)
        self._lengths_have = need
        if need == want:
            self._check_lengths(self._lengths, self._frame_count, self._block_bytes)
            self._frames = []
            self._frames_bytes = 0
            self._stage = _STAGE_FRAMES
        return used

    cdef Py_ssize_t _take_frames(self, const unsigned char* data, Py_ssize_t size) except -1:
        cdef Py_ssize_t used = 0
        cdef Py_ssize_t length, part
        while len(self._frames) < self._frame_count:
            length = <Py_ssize_t>_read_u64(self._lengths + 8 * len(self._frames))
            if self._partial == NULL:
                if size - used >= length:
                    self._frames.append(
                        PyBytes_FromStringAndSize(<char*>data + used, length)
                    )
                    self._frames_bytes += length
                    used += length
                    continue
                if size == used:
                    break
            part = min(size - used, length - self._partial_have)
            if part == 0:
                break
            self._grow_partial(self._partial_have + part, length)
            memcpy(_bytes_data(self._partial) + self._partial_have, data + used, part)
            self._partial_have += part
            used += part
            if self._partial_have < length:
                break
            self._frames.append(<object>self._partial)
            Py_XDECREF(self._partial)
            self._partial = NULL
            self._partial_have = 0
            self._frames_bytes += length
        return used

    cdef int _grow_partial(self, Py_ssize_t need, Py_ssize_t length) except -1:
        """Make room for ``need`` of ``length`` bytes: doubling, so the copying stays linear."""
        if self._partial == NULL:
            self._partial = _new_bytes(NULL, min(length, max(need, _SMALL)))
            return 0
        cdef Py_ssize_t room = _bytes_size(self._partial)
        if need > room:
            _PyBytes_Resize(&self._partial, min(length, max(need, 2 * room)))
        return 0

    cdef void _drop(self) noexcept:
        """Forget the current message and stand before the next."""
        Py_XDECREF(self._partial)
        self._partial = NULL
        self._partial_have = 0
        self._frames = None
        self._frames_bytes = 0
        self._head_have = 0
        self._lengths_have = 0
        self._stage = _STAGE_HEAD
        # Most messages have few frames: keep their room, give a large one back.
        if self._lengths_room > 4096:
            PyMem_Free(self._lengths)
            self._lengths = NULL
            self._lengths_room = 0


cpdef list build(frames):
    """Lay out one message: what goes to the transport, in order.

    Small frames are copied together behind the prelude; frames of ``SMALL_FRAME_BYTES`` and more
    are passed by reference and must not change until they are sent. The first block holds the
    leading small frames, so that a reader gives every large frame its own buffer.

    :param frames: at least one bytes-like object; frame 0 is the body.
    :raises ValueError: no frames.
    :raises TypeError: a frame is not bytes-like.
    """
    cdef Py_ssize_t count = len(frames)
    if count == 0:
        raise ValueError("a message needs at least one frame")
    cdef uint64_t* lengths = <uint64_t*>PyMem_Malloc(count * sizeof(uint64_t))
    if lengths == NULL:
        raise MemoryError(f"no memory for {count} frame lengths")
    try:
        return _build(frames, count, lengths)
    finally:
        PyMem_Free(lengths)


cdef list _build(frames, Py_ssize_t count, uint64_t* lengths):
    cdef list flat = []
    cdef Py_ssize_t index, length
    cdef Py_ssize_t leading = 0
    cdef Py_ssize_t run = 0
    cdef bint in_block = True
    for index in range(count):
        frame = frames[index]
        if not PyBytes_CheckExact(frame):
            view = memoryview(frame)
            frame = view if view.format == "B" and view.ndim == 1 else view.cast("B")
            length = frame.nbytes
        else:
            length = PyBytes_GET_SIZE(frame)
        flat.append(frame)
        lengths[index] = <uint64_t>length
        if length >= _SMALL:
            in_block = False
        if in_block:
            leading += length
    cdef list out = []
    cdef Py_ssize_t begin = 0
    cdef Py_ssize_t end
    cdef Py_ssize_t prelude = 16 + 8 * count
    cdef bytes piece
    cdef unsigned char* at
    while begin < count or prelude:
        if not prelude and <Py_ssize_t>lengths[begin] >= _SMALL:
            out.append(flat[begin])
            begin += 1
            continue
        run = prelude
        end = begin
        while end < count and <Py_ssize_t>lengths[end] < _SMALL and run < _PIECE:
            run += <Py_ssize_t>lengths[end]
            end += 1
        piece = PyBytes_FromStringAndSize(NULL, run)
        at = <unsigned char*>PyBytes_AS_STRING(piece)
        if prelude:
            _write_u64(at, <uint64_t>(prelude - 8 + leading))
            _write_u64(at + 8, <uint64_t>count)
            for index in range(count):
                _write_u64(at + 16 + 8 * index, lengths[index])
            at += prelude
            prelude = 0
        for index in range(begin, end):
            at = _copy(at, flat[index], <Py_ssize_t>lengths[index])
        if run:
            out.append(piece)
        begin = end
    return out


cdef unsigned char* _copy(unsigned char* at, frame, Py_ssize_t length) except NULL:
    cdef Py_buffer view
    if PyBytes_CheckExact(frame):
        memcpy(at, PyBytes_AS_STRING(frame), length)
        return at + length
    PyObject_GetBuffer(frame, &view, PyBUF_SIMPLE)
    if length:
        memcpy(at, view.buf, length)
    PyBuffer_Release(&view)
    return at + length


cdef inline uint64_t _big_endian(const unsigned char* data, int width) noexcept:
    cdef uint64_t value = 0
    cdef int index
    for index in range(width):
        value = (value << 8) | data[index]
    return value


cpdef int check_body(body, int max_depth=_DEPTH) except -1:
    """Check that ``body`` is exactly one well-formed msgpack value, without building it.

    A container header may announce four thousand million elements in five bytes, and a decoder
    allocates for them at once; after this check every announced element is really there.

    :param max_depth: deepest nesting of containers, at most ``MAX_DEPTH``.
    :returns: zero.
    :raises ValueError: truncated, trailing bytes, nested too deep, or a type (extension, reserved)
        that is no part of the protocol.
    """
    cdef Py_buffer view
    PyObject_GetBuffer(body, &view, PyBUF_SIMPLE)
    try:
        _check(<const unsigned char*>view.buf, view.len, min(max_depth, <int>_DEPTH))
    finally:
        PyBuffer_Release(&view)
    return 0


cdef int _check(const unsigned char* data, Py_ssize_t size, int max_depth) except -1:
    cdef uint64_t remaining[_DEPTH + 1]
    cdef int depth = 0
    cdef Py_ssize_t position = 0
    cdef uint64_t skip, elements, left
    cdef int width
    cdef bint container
    cdef unsigned char code
    remaining[0] = 1
    while True:
        while remaining[depth] == 0:
            if depth == 0:
                if position != size:
                    raise ValueError(f"{size - position} bytes follow the message body")
                return 0
            depth -= 1
        remaining[depth] -= 1
        if position >= size:
            raise ValueError(f"message body ends too early, at byte {position}")
        code = data[position]
        position += 1
        left = <uint64_t>(size - position)
        container = False
        skip = 0
        elements = 0
        width = 0
        if code <= 0x7F or code >= 0xE0 or code == 0xC0 or code == 0xC2 or code == 0xC3:
            continue
        if code <= 0x8F:
            container = True
            elements = 2 * <uint64_t>(code & 0x0F)
        elif code <= 0x9F:
            container = True
            elements = code & 0x0F
        elif code <= 0xBF:
            skip = code & 0x1F
        elif code == 0xCC or code == 0xD0:
            skip = 1
        elif code == 0xCD or code == 0xD1:
            skip = 2
        elif code == 0xCE or code == 0xD2 or code == 0xCA:
            skip = 4
        elif code == 0xCF or code == 0xD3 or code == 0xCB:
            skip = 8
        elif code == 0xC4 or code == 0xD9:
            width = 1
        elif code == 0xC5 or code == 0xDA:
            width = 2
        elif code == 0xC6 or code == 0xDB:
            width = 4
        elif code == 0xDC or code == 0xDE:
            width = 2
            container = True
        elif code == 0xDD or code == 0xDF:
            width = 4
            container = True
        else:
            raise ValueError(
                f"msgpack type 0x{code:02x} at byte {position - 1} is no part of the protocol"
            )
        if width:
            if <uint64_t>width > left:
                raise ValueError(f"message body ends too early, at byte {size}")
            skip = _big_endian(data + position, width)
            position += width
            left -= width
            if container:
                elements = 2 * skip if code >= 0xDE else skip
                skip = 0
        if skip > left:
            raise ValueError(
                f"message body ends too early: {skip} bytes announced at byte {position}, "
                f"{left} there"
            )
        position += <Py_ssize_t>skip
        if container:
            if elements > left:
                raise ValueError(
                    f"message body ends too early: {elements} elements announced at byte "
                    f"{position}, {left} bytes there"
                )
            if depth + 1 > max_depth:
                raise ValueError(f"message body is nested more than {max_depth} deep")
            depth += 1
            remaining[depth] = elements
