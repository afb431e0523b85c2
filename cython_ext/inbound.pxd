# Stream messages as events, straight from the bytes.

from libc.stdint cimport int64_t, uint8_t, uint32_t

from cython_ext.events cimport Event
from cython_ext.msgpack cimport Reader

cdef enum:
    N_FIELDS = 16
    N_HOT_OPS = 8


ctypedef struct Scan:
    # Where the fields of one message are.
    const uint8_t* values[N_FIELDS]
    const uint8_t* surplus      # name of the first field that no message has, or NULL
    const uint8_t* end          # of the message
    uint32_t seen               # bit per field
    uint32_t twice
    int field                   # being read, for error texts


cdef class Interner:
    # Equal bytes, or equal strings, become one object.
    cdef bint text
    cdef list slots
    cdef dict known
    cdef object intern(self, const uint8_t* p, Py_ssize_t n)


cdef class StreamDecoder:
    cdef readonly object handle
    cdef readonly object cold
    cdef readonly object rejected
    cdef public bint keep_startstops
    cdef readonly int64_t n_cold
    cdef readonly int64_t n_rejected
    cdef int64_t n_hot[N_HOT_OPS]
    cdef Interner types
    cdef Interner typenames

    cdef int _run(self, object frames, object sender, double now, str stimulus_id) except -1
    cdef int _message(
        self,
        Scan* scan,
        const uint8_t* start,
        const uint8_t* body,
        object frames,
        object sender,
        double now,
        str stimulus_id,
    ) except -1
    cdef int _reject(
        self, Scan* scan, object sender, str op, str reason, double now, str stimulus_id
    ) except -1
    cdef int _hot_op(self, const uint8_t* name, Py_ssize_t n) noexcept
    cdef Event _event(self, int op, Scan* scan, object sender, double now, str stimulus_id)


cdef class WorkerStreamDecoder(StreamDecoder):
    cdef Event _task_finished(self, Scan* scan, object sender)


cdef class ClientStreamDecoder(StreamDecoder):
    pass
