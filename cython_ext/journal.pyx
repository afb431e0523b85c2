"""A bounded ring of what happened: transitions, and notes where nothing changed.

The raw material of stories. Holds keys and ids, never records of the cluster state. Each
record is written in constant time; the oldest is overwritten.
"""

cimport cython
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from cpython.ref cimport Py_INCREF, Py_XDECREF

from cython_ext.states cimport TASK_STATE_NAMES


@cython.final
cdef class Journal:
    """Ring of ``capacity`` records; ``n_written`` counts all ever written."""

    def __cinit__(self, int64_t capacity):
        if capacity < 1:
            raise ValueError(f"journal length must be positive, got {capacity}")
        self.records = <Record*>PyMem_Calloc(capacity, sizeof(Record))
        if self.records == NULL:
            raise MemoryError(f"no memory for a journal of {capacity} records")
        self.capacity = capacity

    def __dealloc__(self):
        cdef int64_t i
        if self.records != NULL:
            for i in range(self.capacity):
                Py_XDECREF(self.records[i].key)
                Py_XDECREF(self.records[i].stimulus_id)
                Py_XDECREF(self.records[i].where)
                Py_XDECREF(self.records[i].note)
            PyMem_Free(self.records)

    def __len__(self):
        return min(self.n_written, self.capacity)

    cdef int record(
        self, double now, object key, int start, int finish, str stimulus_id,
        object where, object note
    ) except -1:
        cdef Record* slot = &self.records[self.n_written % self.capacity]
        cdef Record old = slot[0]
        Py_INCREF(key)
        Py_INCREF(stimulus_id)
        Py_INCREF(where)
        Py_INCREF(note)
        slot.now = now
        slot.key = <PyObject*>key
        slot.stimulus_id = <PyObject*>stimulus_id
        slot.where = <PyObject*>where
        slot.note = <PyObject*>note
        slot.start = <uint8_t>start
        slot.finish = <uint8_t>finish
        self.n_written += 1
        # Last, since dropping a reference may run arbitrary code.
        Py_XDECREF(old.key)
        Py_XDECREF(old.stimulus_id)
        Py_XDECREF(old.where)
        Py_XDECREF(old.note)
        return 0

    def story(self, names=None):
        """Records that concern ``names``, oldest first. O(journal length).

        ``names``: a set of keys, stimulus ids, worker addresses or client ids; None for
        all. Each record is ``(key, start, finish, stimulus_id, now, where, note)`` with
        states by name; ``start == finish`` when nothing changed and ``note`` says why.
        """
        cdef int64_t i
        cdef int64_t first = max(0, self.n_written - self.capacity)
        cdef Record* record
        found = []
        for i in range(first, self.n_written):
            record = &self.records[i % self.capacity]
            key = <object>record.key
            if (
                names is None
                or key in names
                or <object>record.stimulus_id in names
                or <object>record.where in names
            ):
                found.append(
                    (
                        key,
                        TASK_STATE_NAMES[record.start],
                        TASK_STATE_NAMES[record.finish],
                        <object>record.stimulus_id,
                        record.now,
                        <object>record.where,
                        <object>record.note,
                    )
                )
        return found
