# The one door in: facts, in the past tense. Slotted, not frozen; cheap to make.

from libc.stdint cimport int64_t

from cython_ext.entities cimport Client, Worker

cdef enum EventKind:
    E_TASK_FINISHED
    E_TASK_ERRED
    E_KEYS_ADDED
    E_DATA_RELEASED
    E_LONG_RUNNING
    E_RESCHEDULE_ASKED
    E_STEAL_ANSWERED
    E_WHO_HAS_ASKED
    E_WORKER_REGISTERED
    E_WORKER_STATUS_CHANGED
    E_WORKER_LOST
    E_CLIENT_CONNECTED
    E_CLIENT_GONE
    E_KEYS_WANTED
    E_KEYS_RELEASED
    E_KEYS_CANCELLED
    E_KEY_REPORT_ASKED
    E_KEYS_RETRIED
    E_GRAPH_BEGUN
    E_GRAPH_SLICE_READY
    E_GRAPH_ENDED
    E_GRAPH_FAILED
    E_DATA_PLACED
    E_REPLICA_MISSING
    E_REPLICAS_DROPPED
    E_REPLICAS_ASKED
    E_RETIREMENT_BEGUN
    E_RETIREMENT_ABORTED
    E_RESTRICTIONS_SET
    E_RESOURCES_SET
    E_MESSAGE_REJECTED
    E_RESTARTED
    E_TIME_PASSED
    N_EVENT_KINDS


cdef class Event:
    cdef readonly int kind
    cdef public double now              # seconds, wall clock of the shell
    cdef public str stimulus_id
    cdef public object result           # what the handler answers, for RPCs; else None


cdef class TaskFinished(Event):
    cdef public Worker worker           # None when the sender is not registered
    cdef public object key
    cdef public int64_t run_id
    cdef public int64_t nbytes
    cdef public str typename
    cdef public bytes type              # pickled class, opaque
    cdef public double compute_start    # seconds; 0 when no compute took place
    cdef public double compute_stop
    cdef public double compute_seconds  # sum over the run
    cdef public double transfer_seconds
    cdef public object metadata         # dict or None
    cdef public object thread
    cdef public object startstops       # raw msgpack of the list, or None
    cdef public bint has_compute


cdef class TaskErred(Event):
    cdef public Worker worker
    cdef public object key
    cdef public int64_t run_id
    cdef public object exception        # opaque payload
    cdef public object traceback
    cdef public str exception_text
    cdef public str traceback_text


cdef class KeysAdded(Event):
    cdef public Worker worker
    cdef public list keys


cdef class DataReleased(Event):
    cdef public Worker worker
    cdef public object key


cdef class LongRunning(Event):
    cdef public Worker worker
    cdef public object key
    cdef public int64_t run_id
    cdef public double compute_duration  # seconds; < 0: not told


cdef class RescheduleAsked(Event):
    cdef public Worker worker           # None: asked by an operator, or by stealing
    cdef public object key


cdef class StealAnswered(Event):
    cdef public Worker worker
    cdef public object key
    cdef public object state            # state name or None


cdef class WhoHasAsked(Event):
    cdef public Worker worker
    cdef public list keys


cdef class WorkerRegistered(Event):
    cdef public str address
    cdef public object name
    cdef public str host
    cdef public str server_id
    cdef public int nthreads
    cdef public int64_t memory_limit
    cdef public dict resources
    cdef public str status
    cdef public object info
    cdef public object peer


cdef class WorkerStatusChanged(Event):
    cdef public Worker worker
    cdef public str status


cdef class WorkerLost(Event):
    cdef public Worker worker
    cdef public bint expected           # a planned stop: nobody is blamed
    cdef public str reason


cdef class ClientConnected(Event):
    cdef public str client_id
    cdef public object info
    cdef public object peer


cdef class ClientGone(Event):
    cdef public Client client


cdef class KeysWanted(Event):
    cdef public str client_id           # pseudo-clients are made on demand
    cdef public list keys


cdef class KeysReleased(Event):
    cdef public str client_id
    cdef public list keys


cdef class KeysCancelled(Event):
    cdef public str client_id
    cdef public list keys
    cdef public bint force
    cdef public str reason
    cdef public str message


cdef class KeyReportAsked(Event):
    cdef public str client_id
    cdef public object key


cdef class KeysRetried(Event):
    cdef public str client_id
    cdef public list keys


cdef class GraphBegun(Event):
    cdef public str client_id
    cdef public int64_t submission
    cdef public int64_t n_tasks
    cdef public list externals
    cdef public list wanted_externals
    cdef public object submitting_task  # key or None
    cdef public double fifo_timeout     # seconds
    cdef public double user_priority
    cdef public object actors           # True, False, or a set of keys
    cdef public list wanted             # all keys that the client holds


cdef class GraphSliceReady(Event):
    cdef public int64_t submission
    cdef public int64_t start
    cdef public list keys
    cdef public bytes dependency_counts  # int32[n]
    # int32[sum]: >= 0 index in the graph, < 0: -(i + 1) of an external
    cdef public bytes dependencies
    cdef public bytes order              # float64[n]
    cdef public bytes flags              # uint8[n]
    cdef public bytes future_dependents  # int32[n]
    cdef public list new_prefixes
    cdef public list new_groups
    cdef public bytes new_group_prefix   # int32
    cdef public bytes group_index        # int32[n]
    cdef public list new_annotations
    cdef public bytes annotation_index   # int32[n]
    cdef public list run_specs


cdef class GraphEnded(Event):
    cdef public int64_t submission


cdef class GraphFailed(Event):
    cdef public int64_t submission
    cdef public str client_id
    cdef public list keys
    cdef public object exception
    cdef public object traceback
    cdef public str exception_text
    cdef public str traceback_text


cdef class DataPlaced(Event):
    # Data that was put on workers without a computation (scatter, update-data).
    cdef public str client_id
    cdef public dict who_has             # key -> list of addresses
    cdef public dict nbytes              # key -> int


cdef class ReplicaMissing(Event):
    cdef public Worker worker
    cdef public list keys


cdef class ReplicasDropped(Event):
    # The shell had copies removed (by RPC, or to be sent on the stream).
    cdef public Worker worker
    cdef public list keys
    cdef public bint send


cdef class ReplicasAsked(Event):
    cdef public Worker worker            # who shall fetch
    cdef public list keys


cdef class RetirementBegun(Event):
    cdef public Worker worker


cdef class RetirementAborted(Event):
    cdef public Worker worker
    cdef public str status               # to go back to


cdef class RestrictionsSet(Event):
    cdef public dict workers             # key -> list of workers or None


cdef class ResourcesSet(Event):
    cdef public Worker worker
    cdef public dict resources


cdef class MessageRejected(Event):
    # R1: a message that did not fit may be the one that somebody waits for.
    cdef public Worker worker            # sender, or None
    cdef public str client_id            # sender, or None
    cdef public list keys                # those that it names
    cdef public str reason


cdef class Restarted(Event):
    pass


cdef class TimePassed(Event):
    pass
