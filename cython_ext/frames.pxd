"""Cutting and building the frames of a message; see ``frames.pyx``."""

from cpython.object cimport PyObject
from libc.stdint cimport uint64_t


cdef class FrameCutter:
    cdef readonly Py_ssize_t max_frames
    cdef readonly Py_ssize_t max_frame_bytes
    cdef readonly Py_ssize_t max_message_bytes
    cdef readonly str error
    cdef bytes _rest
    cdef int _stage
    cdef unsigned char _head[16]
    cdef Py_ssize_t _head_have
    cdef uint64_t _block_bytes
    cdef Py_ssize_t _frame_count
    cdef unsigned char* _lengths
    cdef Py_ssize_t _lengths_have
    cdef Py_ssize_t _lengths_room
    cdef list _frames
    cdef PyObject* _partial
    cdef Py_ssize_t _partial_have
    cdef Py_ssize_t _frames_bytes

    cpdef list feed(self, data, Py_ssize_t max_messages=*)
    cdef int _check_block(self, uint64_t block_bytes) except -1
    cdef int _check_count(self, uint64_t block_bytes, uint64_t frame_count) except -1
    cdef Py_ssize_t _check_lengths(
        self, const unsigned char* lengths, Py_ssize_t count, uint64_t block_bytes
    ) except -1
    cdef Py_ssize_t _cut_whole(
        self, const unsigned char* data, Py_ssize_t size, list out
    ) except -1
    cdef Py_ssize_t _take(self, const unsigned char* data, Py_ssize_t size, list out) except -1
    cdef Py_ssize_t _take_head(self, const unsigned char* data, Py_ssize_t size) except -1
    cdef Py_ssize_t _take_lengths(self, const unsigned char* data, Py_ssize_t size) except -1
    cdef Py_ssize_t _take_frames(self, const unsigned char* data, Py_ssize_t size) except -1
    cdef int _grow_partial(self, Py_ssize_t need, Py_ssize_t length) except -1
    cdef void _drop(self) noexcept


cpdef list build(frames)
cpdef int check_body(body, int max_depth=*) except -1
