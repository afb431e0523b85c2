# Effects as bytes on the way to peers.

from libc.stdint cimport int64_t, uint32_t

from cython_ext.entities cimport Client, Task, TaskError, Worker
from cython_ext.msgpack cimport Buffer
from cython_ext.sink cimport Sink

cdef enum:
    N_OPS = 16


cdef class Outbox:
    # Messages for one peer. The open message grows in ``body`` (maps) and ``small`` (bytes of
    # sub-frames); what lies beyond the committed sizes belongs to a map that is not complete.
    cdef public object attached
    cdef Buffer body
    cdef Buffer small
    cdef Buffer lengths             # int64 per sub-frame
    cdef list large                 # sub-frames by reference: index, frame, index, frame, ...
    cdef Py_ssize_t body_size       # committed
    cdef Py_ssize_t small_size
    cdef Py_ssize_t lengths_size
    cdef Py_ssize_t large_size
    cdef int64_t large_bytes
    cdef int64_t pending_large_bytes
    cdef Py_ssize_t n_maps
    cdef list sealed                # chunks of complete wire messages
    cdef int64_t sealed_bytes
    cdef int64_t n_sealed_maps
    cdef int merge_op               # op of the last map if keys can still be added to it
    cdef uint32_t merge_count
    cdef Py_ssize_t merge_at        # offset of the head of its key list
    cdef str merge_stimulus_id
    cdef list dirty                 # the sink's
    cdef dict counts                # the sink's
    cdef bint is_marked
    cdef readonly Py_ssize_t max_body_bytes
    cdef readonly Py_ssize_t max_payload_bytes
    cdef readonly Py_ssize_t max_frames

    cdef int begin(self) except -1
    cdef int commit(self) except -1
    cdef int mark(self) except -1
    cdef int seal(self) except -1
    cdef int drop_open(self) except -1
    cdef int forget_sealed(self) except -1
    cdef int add_frame(self, object frame) except -1
    cdef int pack_opaque(self, str placeholder, object header, object frames) except -1
    cdef int pack_value(self, object value, int depth) except -1
    cdef int pack_other(self, object value, int depth) except -1
    cdef int add_key(self, int op, bytes head, object key, str stimulus_id) except -1


cdef class WireSink(Sink):
    cdef readonly list dirty
    cdef dict other_counts
    cdef int64_t n_sent[N_OPS]
    cdef readonly Py_ssize_t max_holders
    cdef readonly Py_ssize_t max_body_bytes
    cdef readonly Py_ssize_t max_payload_bytes
    cdef readonly Py_ssize_t max_frames

    cdef int pack_inputs(self, Buffer* b, Worker worker, Task task) except -1
