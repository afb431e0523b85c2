"""Addressable heaps of tasks by priority and of workers by load.

A heap borrows its items: whoever pushes keeps them alive until they are removed. Ties are
settled by order of creation, so that equal histories give equal choices.
"""

cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Realloc


cdef bint runs_before(Task a, Task b) except -1:
    """Priority: larger user priority, then earlier generation, then graph order."""
    if a.user_priority != b.user_priority:
        return a.user_priority > b.user_priority
    if a.generation != b.generation:
        return a.generation < b.generation
    if a.order != b.order:
        return a.order < b.order
    return a.uid < b.uid


cdef double load_seconds(Worker worker, double seconds_per_byte) except? -1:
    """Expected seconds of work and transfer that wait on each thread of ``worker``."""
    return (worker.occupancy_ns * 1e-9 + worker.network_bytes * seconds_per_byte) / worker.nthreads


@cython.final
cdef class TaskHeap:
    """Tasks, highest priority on top. A task is in at most one task heap."""

    def __dealloc__(self):
        PyMem_Free(self.items)

    def __len__(self):
        return self.n

    @property
    def tasks(self):
        """list[Task]: all of them, in heap order."""
        return [<Task>self.items[i] for i in range(self.n)]

    cdef bint contains(self, Task task) except -1:
        return (
            0 <= task.heap_pos < self.n and self.items[task.heap_pos] == <PyObject*>task
        )

    cdef Task top(self):
        return <Task>self.items[0]

    cdef int push(self, Task task) except -1:
        cdef PyObject** grown
        assert task.heap_pos < 0
        if self.n == self.capacity:
            self.capacity = 64 if self.capacity == 0 else self.capacity * 2
            grown = <PyObject**>PyMem_Realloc(self.items, self.capacity * sizeof(PyObject*))
            if grown == NULL:
                raise MemoryError("no memory for a heap of tasks")
            self.items = grown
        self.items[self.n] = <PyObject*>task
        task.heap_pos = <int>self.n
        self.n += 1
        self._sift_up(self.n - 1)
        return 0

    cdef int remove(self, Task task) except -1:
        cdef Py_ssize_t i = task.heap_pos
        cdef PyObject* moved
        assert self.contains(task)
        task.heap_pos = -1
        self.n -= 1
        if i == self.n:
            return 0
        moved = self.items[self.n]
        self.items[i] = moved
        (<Task>moved).heap_pos = <int>i
        self._sift_up(i)
        self._sift_down((<Task>moved).heap_pos)
        return 0

    cdef int _sift_up(self, Py_ssize_t i) except -1:
        cdef PyObject* item = self.items[i]
        cdef Py_ssize_t parent
        while i > 0:
            parent = (i - 1) >> 1
            if not runs_before(<Task>item, <Task>self.items[parent]):
                break
            self.items[i] = self.items[parent]
            (<Task>self.items[i]).heap_pos = <int>i
            i = parent
        self.items[i] = item
        (<Task>item).heap_pos = <int>i
        return 0

    cdef int _sift_down(self, Py_ssize_t i) except -1:
        cdef PyObject* item = self.items[i]
        cdef Py_ssize_t child
        while True:
            child = 2 * i + 1
            if child >= self.n:
                break
            if child + 1 < self.n and runs_before(
                <Task>self.items[child + 1], <Task>self.items[child]
            ):
                child += 1
            if not runs_before(<Task>self.items[child], <Task>item):
                break
            self.items[i] = self.items[child]
            (<Task>self.items[i]).heap_pos = <int>i
            i = child
        self.items[i] = item
        (<Task>item).heap_pos = <int>i
        return 0


@cython.final
cdef class WorkerHeap:
    """Workers, the best candidate on top."""

    def __cinit__(self, int order, double seconds_per_byte):
        self.order = <WorkerOrder>order
        self.seconds_per_byte = seconds_per_byte

    def __dealloc__(self):
        PyMem_Free(self.items)

    def __len__(self):
        return self.n

    @property
    def workers(self):
        """list[Worker]: all of them, in heap order."""
        return [<Worker>self.items[i] for i in range(self.n)]

    cdef bint contains(self, Worker worker) except -1:
        cdef int i = worker.pos_open if self.order == BY_OPEN_SLOTS else worker.pos_load
        return i >= 0

    cdef Worker top(self):
        return <Worker>self.items[0]

    cdef bint _before(self, PyObject* a, PyObject* b) except -1:
        cdef Worker x = <Worker>a
        cdef Worker y = <Worker>b
        cdef double left, right
        if self.order == BY_OPEN_SLOTS:
            left = <double>(x.n_processing - x.n_long_running) / x.nthreads
            right = <double>(y.n_processing - y.n_long_running) / y.nthreads
        else:
            left = load_seconds(x, self.seconds_per_byte)
            right = load_seconds(y, self.seconds_per_byte)
        if left != right:
            return left < right
        if x.nbytes != y.nbytes:
            return x.nbytes < y.nbytes
        return x.seq < y.seq

    cdef int _place(self, PyObject* item, Py_ssize_t i) except -1:
        self.items[i] = item
        if self.order == BY_OPEN_SLOTS:
            (<Worker>item).pos_open = <int>i
        else:
            (<Worker>item).pos_load = <int>i
        return 0

    cdef int push(self, Worker worker) except -1:
        cdef PyObject** grown
        assert not self.contains(worker)
        if self.n == self.capacity:
            self.capacity = 16 if self.capacity == 0 else self.capacity * 2
            grown = <PyObject**>PyMem_Realloc(self.items, self.capacity * sizeof(PyObject*))
            if grown == NULL:
                raise MemoryError("no memory for a heap of workers")
            self.items = grown
        self._place(<PyObject*>worker, self.n)
        self.n += 1
        self._sift_up(self.n - 1)
        return 0

    cdef int remove(self, Worker worker) except -1:
        cdef Py_ssize_t i
        cdef PyObject* moved
        assert self.contains(worker)
        if self.order == BY_OPEN_SLOTS:
            i = worker.pos_open
            worker.pos_open = -1
        else:
            i = worker.pos_load
            worker.pos_load = -1
        self.n -= 1
        if i == self.n:
            return 0
        moved = self.items[self.n]
        self._place(moved, i)
        self.rerank(<Worker>moved)
        return 0

    cdef int rerank(self, Worker worker) except -1:
        """Restore the order after a field that ``worker`` is ranked by has changed."""
        cdef Py_ssize_t i = worker.pos_open if self.order == BY_OPEN_SLOTS else worker.pos_load
        self._sift_up(i)
        i = worker.pos_open if self.order == BY_OPEN_SLOTS else worker.pos_load
        self._sift_down(i)
        return 0

    cdef int _sift_up(self, Py_ssize_t i) except -1:
        cdef PyObject* item = self.items[i]
        cdef Py_ssize_t parent
        while i > 0:
            parent = (i - 1) >> 1
            if not self._before(item, self.items[parent]):
                break
            self._place(self.items[parent], i)
            i = parent
        return self._place(item, i)

    cdef int _sift_down(self, Py_ssize_t i) except -1:
        cdef PyObject* item = self.items[i]
        cdef Py_ssize_t child
        while True:
            child = 2 * i + 1
            if child >= self.n:
                break
            if child + 1 < self.n and self._before(self.items[child + 1], self.items[child]):
                child += 1
            if not self._before(self.items[child], item):
                break
            self._place(self.items[child], i)
            i = child
        return self._place(item, i)
