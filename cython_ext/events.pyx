"""Events: what happened, as the scheduler machine is told it.

Owns the classes of facts that ``SchedulerMachine.handle`` takes. An event holds plain
values and opaque payloads; the wire layer makes them, the engine reads them. Fields are
given by keyword; a missing or surplus one raises TypeError.
"""

cimport cython


cdef class Event:
    """Base of all events: ``now`` in seconds, ``stimulus_id`` of the cause."""

    FIELDS = ()

    def __init__(self, double now, str stimulus_id, **fields):
        self.now = now
        self.stimulus_id = stimulus_id
        expected = type(self).FIELDS
        if len(fields) != len(expected):
            missing = [name for name in expected if name not in fields]
            surplus = [name for name in fields if name not in expected]
            raise TypeError(
                f"{type(self).__name__}: missing fields {missing}, surplus fields {surplus}"
            )
        for name, value in fields.items():
            if name not in expected:
                raise TypeError(f"{type(self).__name__} has no field {name!r}")
            setattr(self, name, value)

    def __repr__(self):
        fields = ", ".join(f"{name}={getattr(self, name)!r:.80}" for name in type(self).FIELDS)
        return f"{type(self).__name__}({self.stimulus_id!r}, {fields})"


@cython.final
cdef class TaskFinished(Event):
    FIELDS = (
        "worker",
        "key",
        "run_id",
        "nbytes",
        "typename",
        "type",
        "compute_start",
        "compute_stop",
        "compute_seconds",
        "transfer_seconds",
        "metadata",
        "thread",
        "startstops",
        "has_compute",
    )

    def __cinit__(self):
        self.kind = E_TASK_FINISHED


@cython.final
cdef class TaskErred(Event):
    FIELDS = (
        "worker",
        "key",
        "run_id",
        "exception",
        "traceback",
        "exception_text",
        "traceback_text",
    )

    def __cinit__(self):
        self.kind = E_TASK_ERRED


@cython.final
cdef class KeysAdded(Event):
    FIELDS = ("worker", "keys")

    def __cinit__(self):
        self.kind = E_KEYS_ADDED


@cython.final
cdef class DataReleased(Event):
    FIELDS = ("worker", "key")

    def __cinit__(self):
        self.kind = E_DATA_RELEASED


@cython.final
cdef class LongRunning(Event):
    FIELDS = ("worker", "key", "run_id", "compute_duration")

    def __cinit__(self):
        self.kind = E_LONG_RUNNING


@cython.final
cdef class RescheduleAsked(Event):
    FIELDS = ("worker", "key")

    def __cinit__(self):
        self.kind = E_RESCHEDULE_ASKED


@cython.final
cdef class StealAnswered(Event):
    FIELDS = ("worker", "key", "state")

    def __cinit__(self):
        self.kind = E_STEAL_ANSWERED


@cython.final
cdef class WhoHasAsked(Event):
    FIELDS = ("worker", "keys")

    def __cinit__(self):
        self.kind = E_WHO_HAS_ASKED


@cython.final
cdef class WorkerRegistered(Event):
    FIELDS = (
        "address",
        "name",
        "host",
        "server_id",
        "nthreads",
        "memory_limit",
        "resources",
        "status",
        "info",
        "peer",
    )

    def __cinit__(self):
        self.kind = E_WORKER_REGISTERED


@cython.final
cdef class WorkerStatusChanged(Event):
    FIELDS = ("worker", "status")

    def __cinit__(self):
        self.kind = E_WORKER_STATUS_CHANGED


@cython.final
cdef class WorkerLost(Event):
    FIELDS = ("worker", "expected", "reason")

    def __cinit__(self):
        self.kind = E_WORKER_LOST


@cython.final
cdef class ClientConnected(Event):
    FIELDS = ("client_id", "info", "peer")

    def __cinit__(self):
        self.kind = E_CLIENT_CONNECTED


@cython.final
cdef class ClientGone(Event):
    FIELDS = ("client",)

    def __cinit__(self):
        self.kind = E_CLIENT_GONE


@cython.final
cdef class KeysWanted(Event):
    FIELDS = ("client_id", "keys")

    def __cinit__(self):
        self.kind = E_KEYS_WANTED


@cython.final
cdef class KeysReleased(Event):
    FIELDS = ("client_id", "keys")

    def __cinit__(self):
        self.kind = E_KEYS_RELEASED


@cython.final
cdef class KeysCancelled(Event):
    FIELDS = ("client_id", "keys", "force", "reason", "message")

    def __cinit__(self):
        self.kind = E_KEYS_CANCELLED


@cython.final
cdef class KeyReportAsked(Event):
    FIELDS = ("client_id", "key")

    def __cinit__(self):
        self.kind = E_KEY_REPORT_ASKED


@cython.final
cdef class KeysRetried(Event):
    FIELDS = ("client_id", "keys")

    def __cinit__(self):
        self.kind = E_KEYS_RETRIED


@cython.final
cdef class GraphBegun(Event):
    FIELDS = (
        "client_id",
        "submission",
        "n_tasks",
        "externals",
        "wanted_externals",
        "submitting_task",
        "fifo_timeout",
        "user_priority",
        "actors",
        "wanted",
    )

    def __cinit__(self):
        self.kind = E_GRAPH_BEGUN


@cython.final
cdef class GraphSliceReady(Event):
    FIELDS = (
        "submission",
        "start",
        "keys",
        "dependency_counts",
        "dependencies",
        "order",
        "flags",
        "future_dependents",
        "new_prefixes",
        "new_groups",
        "new_group_prefix",
        "group_index",
        "new_annotations",
        "annotation_index",
        "run_specs",
    )

    def __cinit__(self):
        self.kind = E_GRAPH_SLICE_READY


@cython.final
cdef class GraphEnded(Event):
    FIELDS = ("submission",)

    def __cinit__(self):
        self.kind = E_GRAPH_ENDED


@cython.final
cdef class GraphFailed(Event):
    FIELDS = (
        "submission",
        "client_id",
        "keys",
        "exception",
        "traceback",
        "exception_text",
        "traceback_text",
    )

    def __cinit__(self):
        self.kind = E_GRAPH_FAILED


@cython.final
cdef class DataPlaced(Event):
    FIELDS = ("client_id", "who_has", "nbytes")

    def __cinit__(self):
        self.kind = E_DATA_PLACED


@cython.final
cdef class ReplicaMissing(Event):
    FIELDS = ("worker", "keys")

    def __cinit__(self):
        self.kind = E_REPLICA_MISSING


@cython.final
cdef class ReplicasDropped(Event):
    FIELDS = ("worker", "keys", "send")

    def __cinit__(self):
        self.kind = E_REPLICAS_DROPPED


@cython.final
cdef class ReplicasAsked(Event):
    FIELDS = ("worker", "keys")

    def __cinit__(self):
        self.kind = E_REPLICAS_ASKED


@cython.final
cdef class RetirementBegun(Event):
    FIELDS = ("worker",)

    def __cinit__(self):
        self.kind = E_RETIREMENT_BEGUN


@cython.final
cdef class RetirementAborted(Event):
    FIELDS = ("worker", "status")

    def __cinit__(self):
        self.kind = E_RETIREMENT_ABORTED


@cython.final
cdef class RestrictionsSet(Event):
    FIELDS = ("workers",)

    def __cinit__(self):
        self.kind = E_RESTRICTIONS_SET


@cython.final
cdef class ResourcesSet(Event):
    FIELDS = ("worker", "resources")

    def __cinit__(self):
        self.kind = E_RESOURCES_SET


@cython.final
cdef class MessageRejected(Event):
    FIELDS = ("worker", "client_id", "keys", "reason")

    def __cinit__(self):
        self.kind = E_MESSAGE_REJECTED


@cython.final
cdef class Restarted(Event):
    FIELDS = ()

    def __cinit__(self):
        self.kind = E_RESTARTED


@cython.final
cdef class TimePassed(Event):
    FIELDS = ()

    def __cinit__(self):
        self.kind = E_TIME_PASSED


EVENT_CLASSES = (
    TaskFinished,
    TaskErred,
    KeysAdded,
    DataReleased,
    LongRunning,
    RescheduleAsked,
    StealAnswered,
    WhoHasAsked,
    WorkerRegistered,
    WorkerStatusChanged,
    WorkerLost,
    ClientConnected,
    ClientGone,
    KeysWanted,
    KeysReleased,
    KeysCancelled,
    KeyReportAsked,
    KeysRetried,
    GraphBegun,
    GraphSliceReady,
    GraphEnded,
    GraphFailed,
    DataPlaced,
    ReplicaMissing,
    ReplicasDropped,
    ReplicasAsked,
    RetirementBegun,
    RetirementAborted,
    RestrictionsSet,
    ResourcesSet,
    MessageRejected,
    Restarted,
    TimePassed,
)
