# Addressable binary heaps: a record knows its place, so remove and re-rank are O(log n).

from cpython.object cimport PyObject

from cython_ext.entities cimport Task, Worker

cdef enum WorkerOrder:
    BY_OPEN_SLOTS = 0       # fewest active tasks per thread first
    BY_LOAD = 1             # least occupancy per thread first, then fewest stored bytes


cdef class TaskHeap:
    cdef PyObject** items
    cdef Py_ssize_t n
    cdef Py_ssize_t capacity
    cdef int push(self, Task task) except -1
    cdef int remove(self, Task task) except -1
    cdef Task top(self)
    cdef bint contains(self, Task task) except -1
    cdef int _sift_up(self, Py_ssize_t i) except -1
    cdef int _sift_down(self, Py_ssize_t i) except -1


cdef class WorkerHeap:
    cdef PyObject** items
    cdef Py_ssize_t n
    cdef Py_ssize_t capacity
    cdef WorkerOrder order
    cdef double seconds_per_byte
    cdef int push(self, Worker worker) except -1
    cdef int remove(self, Worker worker) except -1
    cdef int rerank(self, Worker worker) except -1
    cdef Worker top(self)
    cdef bint contains(self, Worker worker) except -1
    cdef bint _before(self, PyObject* a, PyObject* b) except -1
    cdef int _place(self, PyObject* item, Py_ssize_t i) except -1
    cdef int _sift_up(self, Py_ssize_t i) except -1
    cdef int _sift_down(self, Py_ssize_t i) except -1


cdef bint runs_before(Task a, Task b) except -1
cdef double load_seconds(Worker worker, double seconds_per_byte) except? -1
