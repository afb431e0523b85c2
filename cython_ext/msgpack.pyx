"""Scanning and packing primitives of msgpack: the byte level of the compiled codec.

Owns reading heads, skipping values, reading and packing task keys, and the growable
buffer that messages are packed into. Knows no message, never allocates what a peer's
length field asks for before the bytes are there, and never reads past the end. Called by
``cython_ext.inbound`` and ``cython_ext.outbound``.

Packs byte for byte what the msgpack package packs with its default settings.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_Clear, PyErr_ExceptionMatches
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from cpython.ref cimport Py_INCREF

__all__ = ["MsgpackError", "pack_key_bytes", "skip", "split_map", "unpack_key"]


class MsgpackError(ValueError):
    """Bytes of a peer are truncated, malformed, or not what stands in that place."""


cdef tuple KIND_NAMES = (
    "nil",
    "a boolean",
    "an integer",
    "an integer above 63 bits",
    "a float",
    "an array",
    "a map",
    "a string",
    "bytes",
    "an extension value",
)


cdef int fail_truncated() except -1:
    raise MsgpackError("msgpack data ends in the middle of a value")


cdef int fail_invalid(uint8_t byte) except -1:
    raise MsgpackError(f"no msgpack value starts with byte 0x{byte:02x}")


cdef int fail_utf8() except -1:
    # Called with the decoder's exception set.
    if PyErr_ExceptionMatches(UnicodeDecodeError):
        PyErr_Clear()
        raise MsgpackError("a string is not valid UTF-8")
    return -1


cdef int fail_kind(str expected, int kind) except -1:
    raise MsgpackError(f"expected {expected}, got {KIND_NAMES[kind]}")


cdef object read_key(Reader* r, int depth=0):
    """The task key at ``r``: str, int, float, or a tuple of keys."""
    cdef Header h
    cdef const uint8_t* p
    cdef tuple items
    cdef object item
    cdef Py_ssize_t i
    read_header(r, &h)
    if h.kind == K_STR:
        p = r.p
        r.p += h.n
        return make_str(p, <Py_ssize_t>h.n)
    if h.kind == K_INT:
        return h.i
    if h.kind == K_FLOAT:
        return h.f
    if h.kind == K_UINT:
        return h.n
    if h.kind != K_ARRAY:
        fail_kind("a task key", h.kind)
    if depth == MAX_KEY_DEPTH:
        raise MsgpackError(f"a task key is nested deeper than {MAX_KEY_DEPTH} tuples")
    if h.n == 0:
        return ()
    # The count is bounded by the bytes that are left, see read_header.
    items = PyTuple_New(<Py_ssize_t>h.n)
    for i in range(<Py_ssize_t>h.n):
        item = read_key(r, depth + 1)
        Py_INCREF(item)
        PyTuple_SET_ITEM(items, i, item)
    return items


cdef bint at_text(Reader* r, const char* text, uint64_t n) except -1:
    # Whether the string ``text`` stands here; if so, it is passed.
    cdef Reader ahead = r[0]
    cdef Header h
    cdef uint64_t i
    read_header(&ahead, &h)
    if h.kind != K_STR or h.n != n:
        return False
    for i in range(n):
        if ahead.p[i] != <uint8_t>text[i]:
            return False
    r.p = ahead.p + n
    return True


cdef list read_key_list(Reader* r):
    """The task keys at ``r``, an array or what stands for a set."""
    cdef Header h
    cdef Header flag
    cdef list keys = []
    cdef uint64_t i
    read_header(r, &h)
    if h.kind == K_MAP:
        if h.n != 2 or not at_text(r, "__Set__", 7):
            raise MsgpackError("expected a list of task keys, got a map")
        read_header(r, &flag)
        if flag.kind != K_BOOL or not at_text(r, "as-list", 7):
            raise MsgpackError("expected a list of task keys, got a malformed set")
        read_header(r, &h)
    if h.kind != K_ARRAY:
        fail_kind("a list of task keys", h.kind)
    for i in range(h.n):
        keys.append(read_key(r))
    return keys


cdef int grow(Buffer* b, Py_ssize_t n) except -1:
    """Make room for ``n`` more bytes; capacity at least doubles."""
    cdef Py_ssize_t capacity = b.capacity * 2
    cdef void* data
    if capacity < 512:
        capacity = 512
    if capacity < b.size + n:
        capacity = b.size + n
    data = PyMem_Realloc(b.data, capacity)
    if data == NULL:
        raise MemoryError(f"no memory for a buffer of {capacity} bytes")
    b.data = <uint8_t*>data
    b.capacity = capacity
    return 0


cdef void release(Buffer* b) noexcept:
    """Give the memory back; the buffer is empty and usable."""
    PyMem_Free(b.data)
    b.data = NULL
    b.size = 0
    b.capacity = 0


cdef int pack_int_object(Buffer* b, object value) except -1:
    """Pack an int. Raises OverflowError outside of -2**63 to 2**64 - 1."""
    if value >= 0:
        return pack_uint(b, <uint64_t>value)
    return pack_int(b, <int64_t>value)


cdef int pack_other_key(Buffer* b, object key, int depth) except -1:
    if isinstance(key, tuple):
        if depth == MAX_KEY_DEPTH:
            raise TypeError(f"task key nested deeper than {MAX_KEY_DEPTH} tuples")
        pack_array_header(b, len(<tuple>key))
        for item in <tuple>key:
            pack_other_key(b, item, depth + 1)
        return 0
    if isinstance(key, str):
        return pack_str(b, str(key))
    if isinstance(key, bool) or not isinstance(key, (int, float)):
        raise TypeError(f"not a task key: {key!r:.100}")
    if isinstance(key, int):
        return pack_int_object(b, key)
    return pack_float(b, key)


def pack_key_bytes(key):
    """bytes: the encoding of one task key.

    Raises TypeError for what is no key, OverflowError for an int outside of msgpack's range.
    """
    cdef Buffer b = Buffer(NULL, 0, 0)
    try:
        pack_key(&b, key)
        return PyBytes_FromStringAndSize(<const char*>b.data, b.size)
    finally:
        release(&b)


def unpack_key(bytes data not None):
    """The task key that ``data`` is the encoding of. Raises MsgpackError."""
    cdef Reader r
    cdef const char* start = data
    r.p = <const uint8_t*>start
    r.end = r.p + len(data)
    key = read_key(&r)
    if r.p != r.end:
        raise MsgpackError(f"{r.end - r.p} bytes follow the task key")
    return key


def skip(bytes data not None, Py_ssize_t offset=0):
    """int: the offset behind the value that starts at ``offset``. Raises MsgpackError."""
    cdef Reader r
    cdef const char* start = data
    if not 0 <= offset <= len(data):
        raise ValueError(f"offset {offset} is outside of the {len(data)} bytes given")
    r.p = <const uint8_t*>start + offset
    r.end = <const uint8_t*>start + len(data)
    skip_value(&r)
    return r.p - <const uint8_t*>start


def split_map(data not None):
    """dict[str, tuple[int, int]]: where each value of an encoded map with text keys lies.

    ``data``: bytes or a buffer that is one msgpack map. Values are skipped, not built.
    Raises MsgpackError for anything else.
    """
    cdef Reader r
    cdef Header h
    cdef uint64_t i
    cdef Py_buffer view
    cdef const uint8_t* start
    cdef Py_ssize_t begin
    found = {}
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        start = <const uint8_t*>view.buf
        r.p = start
        r.end = start + view.len
        read_header(&r, &h)
        if h.kind != K_MAP:
            fail_kind("a map", h.kind)
        for i in range(h.n):
            name = read_str(&r)
            begin = r.p - start
            skip_value(&r)
            found[name] = (begin, r.p - start)
        if r.p != r.end:
            raise MsgpackError(f"{r.end - r.p} bytes follow the map")
    finally:
        PyBuffer_Release(&view)
    return found
