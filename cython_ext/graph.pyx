"""Relations: dependencies, replicas, wants and processing lists.

Each relation is linked and unlinked by one pair of functions, which keep both sides and
their counts. Knows nothing of states. Called by ``cython_ext.cluster`` alone, but for
the read-only helpers.
"""

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject


cdef int set_dependencies(Task child, list parents) except -1:
    """Make ``child`` depend on ``parents`` (distinct tasks, none of them itself)."""
    cdef Py_ssize_t n = len(parents)
    cdef Py_ssize_t i
    cdef Edge* edge
    cdef Task parent
    assert child.edges == NULL
    if n == 0:
        return 0
    child.edges = <Edge*>PyMem_Malloc(n * sizeof(Edge))
    if child.edges == NULL:
        raise MemoryError(f"no memory for {n} dependencies of {child.key!r}")
    for i in range(n):
        parent = <Task>parents[i]
        edge = &child.edges[i]
        edge.child = <PyObject*>child
        edge.parent = <PyObject*>parent
        edge.next = NULL
        edge.prev = parent.dependents_tail
        if edge.prev == NULL:
            parent.dependents_head = edge
        else:
            edge.prev.next = edge
        parent.dependents_tail = edge
        parent.n_dependents += 1
    child.n_dependencies = <int>n
    return 0


cdef int clear_dependencies(Task child) except -1:
    """Take ``child`` off the dependents of each task it depends on."""
    cdef Py_ssize_t i
    cdef Edge* edge
    cdef Task parent
    for i in range(child.n_dependencies):
        edge = &child.edges[i]
        parent = <Task>edge.parent
        if edge.prev == NULL:
            parent.dependents_head = edge.next
        else:
            edge.prev.next = edge.next
        if edge.next == NULL:
            parent.dependents_tail = edge.prev
        else:
            edge.next.prev = edge.prev
        parent.n_dependents -= 1
    PyMem_Free(child.edges)
    child.edges = NULL
    child.n_dependencies = 0
    return 0


cdef Task dependency_at(Task task, Py_ssize_t i):
    """The ``i``-th dependency."""
    return <Task>task.edges[i].parent


cdef Replica* find_replica(Task task, Worker worker) except? NULL:
    """The replica of ``task`` on ``worker``, or NULL. Walks the shorter side."""
    cdef Replica* replica
    if task.n_replicas <= worker.n_replicas:
        replica = task.replicas_head
        while replica != NULL:
            if replica.worker == <PyObject*>worker:
                return replica
            replica = replica.task_next
    else:
        replica = worker.replicas_head
        while replica != NULL:
            if replica.task == <PyObject*>task:
                return replica
            replica = replica.worker_next
    return NULL


cdef int link_replica(Task task, Worker worker) except -1:
    """Note that ``worker`` holds ``task``. The caller knows that it did not before."""
    cdef Replica* replica = <Replica*>PyMem_Malloc(sizeof(Replica))
    if replica == NULL:
        raise MemoryError(f"no memory for a replica of {task.key!r}")
    replica.task = <PyObject*>task
    replica.worker = <PyObject*>worker
    replica.task_next = NULL
    replica.task_prev = task.replicas_tail
    if replica.task_prev == NULL:
        task.replicas_head = replica
    else:
        replica.task_prev.task_next = replica
    task.replicas_tail = replica
    task.n_replicas += 1
    replica.worker_next = NULL
    replica.worker_prev = worker.replicas_tail
    if replica.worker_prev == NULL:
        worker.replicas_head = replica
    else:
        replica.worker_prev.worker_next = replica
    worker.replicas_tail = replica
    worker.n_replicas += 1
    return 0


cdef int unlink_replica(Replica* replica) except -1:
    """Undo ``link_replica``; the record is freed."""
    cdef Task task = <Task>replica.task
    cdef Worker worker = <Worker>replica.worker
    if replica.task_prev == NULL:
        task.replicas_head = replica.task_next
    else:
        replica.task_prev.task_next = replica.task_next
    if replica.task_next == NULL:
        task.replicas_tail = replica.task_prev
    else:
        replica.task_next.task_prev = replica.task_prev
    task.n_replicas -= 1
    if replica.worker_prev == NULL:
        worker.replicas_head = replica.worker_next
    else:
        replica.worker_prev.worker_next = replica.worker_next
    if replica.worker_next == NULL:
        worker.replicas_tail = replica.worker_prev
    else:
        replica.worker_next.worker_prev = replica.worker_prev
    worker.n_replicas -= 1
    PyMem_Free(replica)
    return 0


cdef list holder_addresses(Task task):
    """Addresses of the workers that hold ``task``, oldest copy first."""
    cdef Replica* replica = task.replicas_head
    cdef list found = []
    while replica != NULL:
        found.append((<Worker>replica.worker).address)
        replica = replica.task_next
    return found


cdef Want* find_want(Task task, Client client) except? NULL:
    """The want of ``task`` by ``client``, or NULL."""
    cdef Want* want = task.wants_head
    while want != NULL:
        if want.client == <PyObject*>client:
            return want
        want = want.task_next
    return NULL


cdef int link_want(Task task, Client client) except -1:
    """Note that ``client`` wants ``task``. The caller knows that it did not before."""
    cdef Want* want = <Want*>PyMem_Malloc(sizeof(Want))
    if want == NULL:
        raise MemoryError(f"no memory for a want of {task.key!r}")
    want.task = <PyObject*>task
    want.client = <PyObject*>client
    want.task_prev = NULL
    want.task_next = task.wants_head
    if want.task_next != NULL:
        want.task_next.task_prev = want
    task.wants_head = want
    task.n_wants += 1
    want.client_next = NULL
    want.client_prev = client.wants_tail
    if want.client_prev == NULL:
        client.wants_head = want
    else:
        want.client_prev.client_next = want
    client.wants_tail = want
    client.n_wants += 1
    return 0


cdef int unlink_want(Want* want) except -1:
    """Undo ``link_want``; the record is freed."""
    cdef Task task = <Task>want.task
    cdef Client client = <Client>want.client
    if want.task_prev == NULL:
        task.wants_head = want.task_next
    else:
        want.task_prev.task_next = want.task_next
    if want.task_next != NULL:
        want.task_next.task_prev = want.task_prev
    task.n_wants -= 1
    if want.client_prev == NULL:
        client.wants_head = want.client_next
    else:
        want.client_prev.client_next = want.client_next
    if want.client_next == NULL:
        client.wants_tail = want.client_prev
    else:
        want.client_next.client_prev = want.client_prev
    client.n_wants -= 1
    PyMem_Free(want)
    return 0


cdef int link_processing(Task task, Worker worker) except -1:
    """Append ``task`` to the processing list of ``worker``."""
    task.link_next = NULL
    task.link_prev = worker.processing_tail
    if task.link_prev == NULL:
        worker.processing_head = <PyObject*>task
    else:
        (<Task>task.link_prev).link_next = <PyObject*>task
    worker.processing_tail = <PyObject*>task
    worker.n_processing += 1
    return 0


cdef int unlink_processing(Task task, Worker worker) except -1:
    """Undo ``link_processing``."""
    if task.link_prev == NULL:
        worker.processing_head = task.link_next
    else:
        (<Task>task.link_prev).link_next = task.link_next
    if task.link_next == NULL:
        worker.processing_tail = task.link_prev
    else:
        (<Task>task.link_next).link_prev = task.link_prev
    task.link_prev = NULL
    task.link_next = NULL
    worker.n_processing -= 1
    return 0
