from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t

ctypedef struct Record:
    double now
    PyObject* key
    PyObject* stimulus_id
    PyObject* where         # worker address or client id, or None
    PyObject* note          # what happened without a transition, or None
    uint8_t start
    uint8_t finish


cdef class Journal:
    cdef Record* records
    cdef readonly int64_t capacity
    cdef readonly int64_t n_written
    cdef int record(
        self, double now, object key, int start, int finish, str stimulus_id,
        object where, object note
    ) except -1
