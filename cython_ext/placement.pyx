"""Choosing a worker for a task.

Reads the cluster state and answers; changes nothing but its own scratch fields and the
order of replica lists. Cost per task: O(dependencies) plus a bounded number of
candidates, whatever the number of workers.
"""

from cpython.object cimport PyObject

from cython_ext.entities cimport F_ACTOR, F_DATA_PRODUCER, Replica, Restrictions
from cython_ext.graph cimport dependency_at
from cython_ext.heaps cimport load_seconds
from cython_ext.states cimport W_RUNNING

cdef enum:
    MAX_CANDIDATES = 64

# A worker that must fetch all its inputs is chosen over their holders only for a gain
# above this: requests and replies take time beyond the bytes, and each copy costs memory.
cdef double FETCH_LATENCY_SECONDS = 0.01


cdef bint is_rootish(ClusterState state, Task task) except -1:
    """Whether ``task`` makes data that its siblings make too, so that it may wait in line.

    distributed's rule: no restrictions; and the graph says that it produces data, or its
    group is more than twice as large as the cluster and has few dependencies.
    """
    cdef int64_t total = 0
    if not task.annotations.restrictions.empty or task.flags & F_ACTOR:
        return False
    if task.flags & F_DATA_PRODUCER:
        return True
    if task.group.n_tasks <= 2 * state.total_nthreads:
        return False
    if len(task.group.dependencies) >= state.settings.rootish_groups:
        return False
    for group in task.group.dependencies:
        total += group.n_tasks
    return total < state.settings.rootish_dependencies


cdef int weigh_inputs(ClusterState state, Task task, Worker worker) except -1:
    """Look at ``worker`` alone, as ``choose_worker`` looks at its candidates."""
    cdef int limit = state.settings.placement_candidates
    cdef int i, seen
    cdef Task dependency
    cdef Replica* replica
    state.placement_epoch += 1
    worker.scratch_epoch = state.placement_epoch
    worker.scratch_bytes = 0
    for i in range(task.n_dependencies):
        dependency = dependency_at(task, i)
        replica = dependency.replicas_head
        seen = 0
        while replica != NULL and seen < limit:
            if replica.worker == <PyObject*>worker:
                worker.scratch_bytes += state.nbytes_of(dependency)
                break
            replica = replica.task_next
            seen += 1
    return 0


cdef int64_t missing_bytes(ClusterState state, Task task, Worker worker) except -1:
    """Bytes that ``worker`` must fetch before it can run ``task``. O(dependencies).

    Valid for a worker that ``choose_worker`` or ``weigh_inputs`` has just looked at for
    this task; exact up to copies of a widely held input that were not looked at.
    """
    cdef int64_t total = 0
    cdef int i
    for i in range(task.n_dependencies):
        total += state.nbytes_of(dependency_at(task, i))
    if worker.scratch_epoch == state.placement_epoch:
        total -= worker.scratch_bytes
    return total


cdef double _start_seconds(ClusterState state, Worker worker, int64_t total_bytes) except? -1:
    """Expected seconds until ``worker`` could begin a task with these inputs."""
    cdef int64_t missing = total_bytes
    if worker.scratch_epoch == state.placement_epoch:
        missing -= worker.scratch_bytes
    cdef double seconds = load_seconds(worker, state.by_load.seconds_per_byte)
    if missing > 0:
        seconds += missing * state.by_load.seconds_per_byte
        if worker.scratch_epoch != state.placement_epoch:
            seconds += FETCH_LATENCY_SECONDS
    return seconds


cdef int _rotate_holders(Task task, int n) except -1:
    """Move the first ``n`` holders of ``task`` to the end, so that each gets its turn."""
    cdef Replica* last = task.replicas_head
    cdef Replica* first
    for _ in range(n - 1):
        last = last.task_next
    first = last.task_next
    if first == NULL:
        return 0
    task.replicas_tail.task_next = task.replicas_head
    task.replicas_head.task_prev = task.replicas_tail
    task.replicas_head = first
    first.task_prev = NULL
    task.replicas_tail = last
    last.task_next = NULL
    return 0


cdef Worker choose_worker(ClusterState state, Task task):
    """The running worker on which ``task`` can probably start first, or None.

    Candidates are holders of inputs (of a widely held one a rotating sample) and the
    least loaded worker; with restrictions, fitting workers only, and a rotating sample of
    these when none holds an input. Ties go to fewer stored bytes, then to the worker that
    registered first. A loose demand that no worker meets is no demand.
    """
    cdef PyObject* candidates[MAX_CANDIDATES]
    cdef int n = 0
    cdef int i, seen
    cdef int limit = state.settings.placement_candidates
    cdef int64_t total_bytes = 0
    cdef int64_t nbytes
    cdef Restrictions restrictions = task.annotations.restrictions
    cdef bint restricted = not restrictions.empty
    cdef list fitting = None
    cdef Task dependency
    cdef Replica* replica
    cdef Worker worker
    cdef Worker best = None
    cdef double seconds
    cdef double best_seconds = 0

    if restricted:
        fitting = state.fitting_workers(restrictions)
        if not fitting:
            if not restrictions.loose:
                return None
            restricted = False
    if not restricted and state.by_load.n == 0:
        return None

    state.placement_epoch += 1
    for i in range(task.n_dependencies):
        dependency = dependency_at(task, i)
        nbytes = state.nbytes_of(dependency)
        total_bytes += nbytes
        if dependency.n_replicas > limit:
            _rotate_holders(dependency, limit)
        replica = dependency.replicas_head
        seen = 0
        while replica != NULL and seen < limit:
            worker = <Worker>replica.worker
            replica = replica.task_next
            seen += 1
            if worker.code != W_RUNNING:
                continue
            if worker.scratch_epoch != state.placement_epoch:
                if n == MAX_CANDIDATES or (restricted and not state.fits(restrictions, worker)):
                    continue
                worker.scratch_epoch = state.placement_epoch
                worker.scratch_bytes = 0
                candidates[n] = <PyObject*>worker
                n += 1
            worker.scratch_bytes += nbytes

    if not restricted:
        worker = state.by_load.top()
        if worker.scratch_epoch != state.placement_epoch and n < MAX_CANDIDATES:
            candidates[n] = <PyObject*>worker
            n += 1
    elif n == 0:
        for i in range(min(len(fitting), MAX_CANDIDATES)):
            worker = fitting[restrictions.cursor % len(fitting)]
            restrictions.cursor += 1
            candidates[n] = <PyObject*>worker
            n += 1

    for i in range(n):
        worker = <Worker>candidates[i]
        seconds = _start_seconds(state, worker, total_bytes)
        if task.flags & F_ACTOR:
            # Actors stay where they are put: spread them first of all.
            seconds += 1e9 * len(worker.actors)
        if (
            best is None
            or seconds < best_seconds
            or (
                seconds == best_seconds
                and (
                    worker.nbytes < best.nbytes
                    or (worker.nbytes == best.nbytes and worker.seq < best.seq)
                )
            )
        ):
            best = worker
            best_seconds = seconds
    return best
