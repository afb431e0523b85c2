"""Records of the scheduler's cluster state: data and nothing but data.

Owns the layout of Task, Worker, Client and what they share. Changes nothing by itself:
relations are kept by ``cython_ext.graph`` (dependencies, replicas, wants, processing),
states by ``cython_ext.transitions``. Properties give plain Python values, newly made,
for tests, plugins and operators; the engine never uses them.

A Task holds no reference that could be part of a cycle, and is hidden from the cycle
collector, so that a collection costs nothing per task.
"""

cimport cython
from cpython.mem cimport PyMem_Free

from cython_ext.states cimport TASK_STATE_NAMES, WORKER_STATUS_NAMES


cdef class Prefix:
    """Tasks whose keys share a name without its hash: the unit of duration statistics."""

    def __cinit__(self, str name not None):
        self.name = name
        self.duration = -1.0
        self.max_duration = 0.0
        self.loads = {}

    @property
    def state_counts(self):
        """dict[str, int]: tasks by state now."""
        return {TASK_STATE_NAMES[i]: self.counts[i] for i in range(7)}

    @property
    def state_totals(self):
        """dict[str, int]: how often each state was entered."""
        return {TASK_STATE_NAMES[i]: self.totals[i] for i in range(8)}

    def __repr__(self):
        return f"<Prefix {self.name!r} tasks: {self.n_tasks}>"


cdef class Group:
    """Tasks of one collection layer: the unit of root-task detection."""

    def __cinit__(self, str name not None, Prefix prefix not None):
        self.name = name
        self.prefix = prefix
        self.dependencies = []

    @property
    def state_counts(self):
        """dict[str, int]: tasks by state now."""
        return {TASK_STATE_NAMES[i]: self.counts[i] for i in range(7)}

    def __repr__(self):
        return f"<Group {self.name!r} tasks: {self.n_tasks}>"


@cython.final
cdef class PrefixLoad:
    """How many processing tasks of ``prefix`` one worker holds."""


@cython.final
cdef class TypeInfo:
    """Type of results: its name, and the class as a pickle that stays closed."""

    def __cinit__(self, str typename, bytes pickled):
        self.typename = typename
        self.pickled = pickled


@cython.final
cdef class Restrictions:
    """Where tasks may run; interned, so that tasks with equal demands share one."""

    def __cinit__(self, tuple workers, tuple hosts, dict resources, bint loose):
        self.workers = workers
        self.hosts = hosts
        self.resources = resources
        self.loose = loose
        self.empty = not workers and not hosts and not resources
        self.identity = (workers, hosts, tuple(sorted(resources.items())), loose)
        self.fitting = None
        self.fitting_epoch = -1

    def __repr__(self):
        return f"<Restrictions {self.identity}>"


@cython.final
cdef class Annotations:
    """Annotations that tasks share. ``wire`` is what their worker is sent, closed."""

    def __cinit__(self, double user_priority, int retries, Restrictions restrictions, wire):
        self.user_priority = user_priority
        self.retries = retries
        self.restrictions = restrictions
        self.wire = wire


@cython.final
cdef class TaskError:
    """Why a task failed. Payloads are opaque and are sent on untouched."""

    def __cinit__(
        self, exception, traceback, str exception_text, str traceback_text, blame, list erred_on
    ):
        self.exception = exception
        self.traceback = traceback
        self.exception_text = exception_text
        self.traceback_text = traceback_text
        self.blame = blame
        self.erred_on = erred_on


@cython.final
@cython.no_gc
cdef class Task:
    """One key: its definition, its state and its relations."""

    def __cinit__(self):
        self.heap_pos = -1
        self.nbytes = -1
        self.run_id = -1

    def __dealloc__(self):
        # Relations are taken apart when a task is forgotten; what is left here belongs
        # to a cluster state that is dropped as a whole.
        cdef Replica* replica = self.replicas_head
        cdef Replica* next_replica
        cdef Want* want = self.wants_head
        cdef Want* next_want
        while replica != NULL:
            next_replica = replica.task_next
            PyMem_Free(replica)
            replica = next_replica
        while want != NULL:
            next_want = want.task_next
            PyMem_Free(want)
            want = next_want
        PyMem_Free(self.edges)

    @property
    def state(self):
        """str: the name of the state."""
        return TASK_STATE_NAMES[self.code]

    @property
    def prefix(self):
        """Prefix: the statistics that the task belongs to."""
        return self.group.prefix

    @property
    def priority(self):
        """tuple[float, float, float]: smaller runs first."""
        return (-self.user_priority, self.generation, self.order)

    @property
    def dependencies(self):
        """list[Task]: the tasks whose results this one needs."""
        return [<Task>self.edges[i].parent for i in range(self.n_dependencies)]

    @property
    def dependents(self):
        """list[Task]: the tasks that need this one's result."""
        cdef Edge* edge = self.dependents_head
        found = []
        while edge != NULL:
            found.append(<Task>edge.child)
            edge = edge.next
        return found

    @property
    def who_has(self):
        """list[Worker]: the workers that hold the result."""
        cdef Replica* replica = self.replicas_head
        found = []
        while replica != NULL:
            found.append(<Worker>replica.worker)
            replica = replica.task_next
        return found

    @property
    def who_wants(self):
        """list[Client]: the clients that hold a future of it."""
        cdef Want* want = self.wants_head
        found = []
        while want != NULL:
            found.append(<Client>want.client)
            want = want.task_next
        return found

    @property
    def actor(self):
        """bool: the result is an actor."""
        return bool(self.flags & F_ACTOR)

    @property
    def long_running(self):
        """bool: it seceded from its worker's thread pool."""
        return bool(self.flags & F_LONG_RUNNING)

    @property
    def lost(self):
        """bool: neither a definition nor data is left."""
        return bool(self.flags & F_LOST)

    def __repr__(self):
        return f"<Task {self.key!r} {self.state}>"


@cython.final
cdef class Worker:
    """A registered worker: its capacity, and what it is believed to hold and to run."""

    def __cinit__(self):
        self.pos_open = -1
        self.pos_load = -1
        self.loads = {}
        self.actors = {}
        self.used_resources = {}
        self.executing = {}

    def __dealloc__(self):
        # Replica records belong to their tasks.
        self.replicas_head = NULL

    @property
    def status(self):
        """str: the name of the status."""
        return WORKER_STATUS_NAMES[self.code]

    @property
    def processing(self):
        """list[Task]: the tasks assigned to it, oldest first."""
        cdef PyObject* link = self.processing_head
        found = []
        while link != NULL:
            found.append(<Task>link)
            link = (<Task>link).link_next
        return found

    @property
    def has_what(self):
        """list[Task]: the tasks whose results it holds."""
        cdef Replica* replica = self.replicas_head
        found = []
        while replica != NULL:
            found.append(<Task>replica.task)
            replica = replica.worker_next
        return found

    @property
    def occupancy(self):
        """float: seconds of work that the compute part of its processing tasks stands for."""
        return self.occupancy_ns * 1e-9

    def __repr__(self):
        return f"<Worker {self.address!r} {self.status} processing: {self.n_processing}>"


@cython.final
cdef class Client:
    """A client, or a pseudo-client that holds keys for a queue, variable or dataset."""

    def __cinit__(self, str id not None):
        self.id = id

    @property
    def wants_what(self):
        """list[Task]: the tasks that it holds futures of."""
        cdef Want* want = self.wants_head
        found = []
        while want != NULL:
            found.append(<Task>want.task)
            want = want.client_next
        return found

    def first_wants(self, int limit):
        """list: keys of at most ``limit`` tasks that it holds futures of, oldest first."""
        cdef Want* want = self.wants_head
        found = []
        while want != NULL and len(found) < limit:
            found.append((<Task>want.task).key)
            want = want.client_next
        return found

    def __repr__(self):
        return f"<Client {self.id!r} wants: {self.n_wants}>"
