# Scanning and packing primitives of msgpack, over plain C buffers.
#
# Small functions are inline, so that each user compiles its own copy. A reader never looks
# at or past ``end``; every failure is MsgpackError.

from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport (
    INT64_MAX,
    int8_t,
    int16_t,
    int32_t,
    int64_t,
    uint8_t,
    uint16_t,
    uint32_t,
    uint64_t,
)
from libc.string cimport memcpy

cdef extern from "Python.h":
    PyObject* _decode_utf8 "PyUnicode_DecodeUTF8"(const char* s, Py_ssize_t n, const char* errors)
    object PyBytes_FromStringAndSize(const char* s, Py_ssize_t n)

cdef enum:
    MAX_KEY_DEPTH = 64          # tuples within tuples in a key

cdef enum Kind:
    K_NIL
    K_BOOL                      # h.n
    K_INT                       # h.i
    K_UINT                      # h.n, above INT64_MAX
    K_FLOAT                     # h.f
    K_ARRAY                     # h.n elements follow
    K_MAP                       # h.n pairs follow
    K_STR                       # h.n bytes follow, and are there; the same for the next two
    K_BIN
    K_EXT


ctypedef struct Reader:
    const uint8_t* p
    const uint8_t* end


ctypedef struct Header:
    int kind
    uint64_t n
    int64_t i
    double f


cdef int fail_truncated() except -1
cdef int fail_invalid(uint8_t byte) except -1
cdef int fail_utf8() except -1
cdef int fail_kind(str expected, int kind) except -1
cdef object read_key(Reader* r, int depth=*)
cdef list read_key_list(Reader* r)


cdef inline uint16_t load16(const uint8_t* p) noexcept:
    return <uint16_t>((<uint16_t>p[0] << 8) | p[1])


cdef inline uint32_t load32(const uint8_t* p) noexcept:
    return (
        (<uint32_t>p[0] << 24) | (<uint32_t>p[1] << 16) | (<uint32_t>p[2] << 8) | <uint32_t>p[3]
    )


cdef inline uint64_t load64(const uint8_t* p) noexcept:
    return (<uint64_t>load32(p) << 32) | load32(p + 4)


cdef inline int set_uint(Header* h, uint64_t value) noexcept:
    h.n = value
    if value > <uint64_t>INT64_MAX:
        h.kind = K_UINT
    else:
        h.kind = K_INT
        h.i = <int64_t>value
    return 0


cdef inline int read_long_header(Reader* r, Header* h) except -1:
    # All first bytes but the "fix" ones.
    cdef const uint8_t* p = r.p
    cdef Py_ssize_t left = r.end - p
    cdef uint8_t byte = p[0]
    cdef Py_ssize_t width
    cdef uint32_t bits32
    cdef uint64_t bits64
    cdef float single = 0
    p += 1
    left -= 1
    if byte == 0xc0:
        h.kind = K_NIL
        r.p = p
        return 0
    if byte == 0xc1:
        return fail_invalid(byte)
    if byte <= 0xc3:
        h.kind = K_BOOL
        h.n = byte & 1
        r.p = p
        return 0
    # How many bytes of length or value stand behind the first byte.
    if byte <= 0xc9:
        width = 1 << ((byte - 0xc4) % 3)
    elif byte <= 0xcb:
        width = 4 << (byte - 0xca)
    elif byte <= 0xd3:
        width = 1 << (byte & 3)
    elif byte <= 0xd8:
        width = 0
    elif byte <= 0xdb:
        width = 1 << (byte - 0xd9)
    else:
        width = 2 << (byte & 1)
    if left < width:
        return fail_truncated()
    if width == 1:
        bits64 = p[0]
    elif width == 2:
        bits64 = load16(p)
    elif width == 4:
        bits64 = load32(p)
    elif width == 8:
        bits64 = load64(p)
    else:
        bits64 = 0
    p += width
    left -= width
    h.n = bits64
    if byte >= 0xdc:
        if byte <= 0xdd:
            h.kind = K_ARRAY
        else:
            h.kind = K_MAP
            bits64 *= 2
    elif byte >= 0xd9:
        h.kind = K_STR
    elif byte >= 0xd4:
        h.kind = K_EXT
        h.n = bits64 = 1 + (<uint64_t>1 << (byte - 0xd4))
    elif byte >= 0xd0:
        h.kind = K_INT
        if width == 1:
            h.i = <int8_t>bits64
        elif width == 2:
            h.i = <int16_t>bits64
        elif width == 4:
            h.i = <int32_t>bits64
        else:
            h.i = <int64_t>bits64
        bits64 = 0
    elif byte >= 0xcc:
        set_uint(h, bits64)
        bits64 = 0
    elif byte == 0xcb:
        h.kind = K_FLOAT
        memcpy(&h.f, &bits64, 8)
        bits64 = 0
    elif byte == 0xca:
        h.kind = K_FLOAT
        bits32 = <uint32_t>bits64
        memcpy(&single, &bits32, 4)
        h.f = single
        bits64 = 0
    elif byte >= 0xc7:
        h.kind = K_EXT
        bits64 += 1
        h.n = bits64
    else:
        h.kind = K_BIN
    # Each element takes a byte at least, so that this bounds every later loop and allocation.
    if bits64 > <uint64_t>left:
        return fail_truncated()
    r.p = p
    return 0


cdef inline int read_header(Reader* r, Header* h) except -1:
    # Read the head of one value. The contents of a str, bin or ext are known to be there.
    cdef const uint8_t* p = r.p
    cdef uint8_t byte
    cdef uint64_t size
    h.kind = K_NIL
    h.n = 0
    h.i = 0
    h.f = 0
    if p >= r.end:
        return fail_truncated()
    byte = p[0]
    if byte < 0x80:
        h.kind = K_INT
        h.i = byte
        r.p = p + 1
        return 0
    if byte >= 0xe0:
        h.kind = K_INT
        h.i = <int8_t>byte
        r.p = p + 1
        return 0
    if byte >= 0xc0:
        return read_long_header(r, h)
    if byte >= 0xa0:
        h.kind = K_STR
        h.n = size = byte & 0x1f
    elif byte >= 0x90:
        h.kind = K_ARRAY
        h.n = size = byte & 0x0f
    else:
        h.kind = K_MAP
        h.n = byte & 0x0f
        size = 2 * h.n
    p += 1
    if size > <uint64_t>(r.end - p):
        return fail_truncated()
    r.p = p
    return 0


cdef inline int skip_value(Reader* r) except -1:
    # Pass one value of whatever depth, without recursion. Half of the cost of decoding is
    # here, hence the branches of its own.
    cdef const uint8_t* p = r.p
    cdef const uint8_t* end = r.end
    cdef uint64_t todo = 1
    cdef uint64_t n
    cdef uint8_t byte
    cdef Header h
    while todo > 0:
        if todo > <uint64_t>(end - p):
            return fail_truncated()
        todo -= 1
        byte = p[0]
        p += 1
        if byte < 0x80 or byte >= 0xe0:
            continue
        if byte < 0x90:
            todo += 2 * <uint64_t>(byte & 0x0f)
            continue
        if byte < 0xa0:
            todo += byte & 0x0f
            continue
        if byte < 0xc0:
            n = byte & 0x1f
        elif byte == 0xcb or byte == 0xcf:
            n = 8
        elif (byte == 0xd9 or byte == 0xc4) and p < end:
            n = p[0]
            p += 1
        else:
            r.p = p - 1
            h.kind = K_NIL
            h.n = 0
            read_long_header(r, &h)
            p = r.p
            if h.kind == K_ARRAY:
                todo += h.n
                continue
            if h.kind == K_MAP:
                todo += 2 * h.n
                continue
            n = h.n if h.kind >= K_STR else 0
        if n > <uint64_t>(end - p):
            return fail_truncated()
        p += n
    r.p = p
    return 0


cdef inline str make_str(const uint8_t* p, Py_ssize_t n):
    # A new str from UTF-8.
    cdef PyObject* made = _decode_utf8(<const char*>p, n, "strict")
    cdef object text
    if made == NULL:
        fail_utf8()
    text = <object>made
    Py_DECREF(text)
    return <str>text


cdef inline str read_str(Reader* r):
    cdef Header h
    cdef const uint8_t* p
    read_header(r, &h)
    if h.kind != K_STR:
        fail_kind("a string", h.kind)
    p = r.p
    r.p += h.n
    return make_str(p, <Py_ssize_t>h.n)


cdef inline int64_t read_int(Reader* r) except? -1:
    cdef Header h
    read_header(r, &h)
    if h.kind != K_INT:
        return fail_kind("an integer of 64 bits", h.kind)
    return h.i


cdef inline double read_number(Reader* r) except? -1:
    cdef Header h
    read_header(r, &h)
    if h.kind == K_FLOAT:
        return h.f
    if h.kind == K_INT:
        return <double>h.i
    if h.kind == K_UINT:
        return <double>h.n
    return fail_kind("a number", h.kind)


ctypedef struct Buffer:
    uint8_t* data
    Py_ssize_t size
    Py_ssize_t capacity


cdef int grow(Buffer* b, Py_ssize_t n) except -1
cdef void release(Buffer* b) noexcept
cdef int pack_int_object(Buffer* b, object value) except -1
cdef int pack_other_key(Buffer* b, object key, int depth) except -1


cdef inline int reserve(Buffer* b, Py_ssize_t n) except -1:
    # Room for ``n`` more bytes.
    if b.capacity - b.size < n:
        return grow(b, n)
    return 0


cdef inline int put(Buffer* b, const void* p, Py_ssize_t n) except -1:
    if n > 0:
        reserve(b, n)
        memcpy(b.data + b.size, p, n)
        b.size += n
    return 0


cdef inline int put_bytes(Buffer* b, bytes raw) except -1:
    return put(b, <const char*>raw, len(raw))


cdef inline int put_byte(Buffer* b, uint8_t byte) except -1:
    reserve(b, 1)
    b.data[b.size] = byte
    b.size += 1
    return 0


cdef inline void store16(uint8_t* p, uint64_t value) noexcept:
    p[0] = <uint8_t>(value >> 8)
    p[1] = <uint8_t>value


cdef inline void store32(uint8_t* p, uint64_t value) noexcept:
    store16(p, value >> 16)
    store16(p + 2, value)


cdef inline void store64(uint8_t* p, uint64_t value) noexcept:
    store32(p, value >> 32)
    store32(p + 4, value)


cdef inline int put_sized(Buffer* b, uint8_t byte, int width, uint64_t value) except -1:
    # First byte and a big-endian number of ``width`` bytes.
    cdef uint8_t* p
    reserve(b, 9)
    p = b.data + b.size
    p[0] = byte
    if width == 1:
        p[1] = <uint8_t>value
    elif width == 2:
        store16(p + 1, value)
    elif width == 4:
        store32(p + 1, value)
    else:
        store64(p + 1, value)
    b.size += 1 + width
    return 0


cdef inline int pack_nil(Buffer* b) except -1:
    return put_byte(b, 0xc0)


cdef inline int pack_bool(Buffer* b, bint value) except -1:
    return put_byte(b, 0xc3 if value else 0xc2)


cdef inline int pack_uint(Buffer* b, uint64_t value) except -1:
    if value < 0x80:
        return put_byte(b, <uint8_t>value)
    if value < 0x100:
        return put_sized(b, 0xcc, 1, value)
    if value < 0x10000:
        return put_sized(b, 0xcd, 2, value)
    if value < 0x100000000:
        return put_sized(b, 0xce, 4, value)
    return put_sized(b, 0xcf, 8, value)


cdef inline int pack_int(Buffer* b, int64_t value) except -1:
    if value >= 0:
        return pack_uint(b, <uint64_t>value)
    if value >= -32:
        return put_byte(b, <uint8_t>value)
    if value >= -0x80:
        return put_sized(b, 0xd0, 1, <uint64_t>value)
    if value >= -0x8000:
        return put_sized(b, 0xd1, 2, <uint64_t>value)
    if value >= -<int64_t>0x80000000:
        return put_sized(b, 0xd2, 4, <uint64_t>value)
    return put_sized(b, 0xd3, 8, <uint64_t>value)


cdef inline int pack_float(Buffer* b, double value) except -1:
    cdef uint64_t bits = 0
    memcpy(&bits, &value, 8)
    return put_sized(b, 0xcb, 8, bits)


cdef inline int pack_number(Buffer* b, double value) except -1:
    # As an integer when it is one.
    if -9007199254740992.0 <= value <= 9007199254740992.0 and value == <double><int64_t>value:
        return pack_int(b, <int64_t>value)
    return pack_float(b, value)


cdef inline int pack_array_header(Buffer* b, uint64_t n) except -1:
    if n < 16:
        return put_byte(b, <uint8_t>(0x90 | n))
    if n < 0x10000:
        return put_sized(b, 0xdc, 2, n)
    return put_sized(b, 0xdd, 4, n)


cdef inline int pack_map_header(Buffer* b, uint64_t n) except -1:
    if n < 16:
        return put_byte(b, <uint8_t>(0x80 | n))
    if n < 0x10000:
        return put_sized(b, 0xde, 2, n)
    return put_sized(b, 0xdf, 4, n)


cdef inline int pack_bin(Buffer* b, const void* p, Py_ssize_t n) except -1:
    if n < 0x100:
        put_sized(b, 0xc4, 1, <uint64_t>n)
    elif n < 0x10000:
        put_sized(b, 0xc5, 2, <uint64_t>n)
    else:
        put_sized(b, 0xc6, 4, <uint64_t>n)
    return put(b, p, n)


cdef inline int pack_str(Buffer* b, str text) except -1:
    cdef Py_ssize_t n = 0
    cdef const char* p = PyUnicode_AsUTF8AndSize(text, &n)
    if n < 32:
        put_byte(b, <uint8_t>(0xa0 | n))
    elif n < 0x100:
        put_sized(b, 0xd9, 1, <uint64_t>n)
    elif n < 0x10000:
        put_sized(b, 0xda, 2, <uint64_t>n)
    else:
        put_sized(b, 0xdb, 4, <uint64_t>n)
    return put(b, p, n)


cdef inline int pack_key(Buffer* b, object key) except -1:
    if type(key) is str:
        return pack_str(b, <str>key)
    return pack_other_key(b, key, 0)
