# Data and nothing but data: the records of the scheduler's cluster state.
#
# Relations are intrusive doubly linked C structs, so that each add and remove is O(1),
# iteration follows insertion order, and no record is seen by the cycle collector.
# Pointers to records are borrowed: ``ClusterState`` keeps each record alive for as long
# as a relation names it.

from cpython.object cimport PyObject
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint64_t

cdef enum TaskFlag:
    F_ACTOR = 1             # the result is an actor: never replicated, stolen or recomputed
    F_DATA_PRODUCER = 2     # the graph says: makes data out of nothing
    F_LONG_RUNNING = 4      # seceded: processing, but no slot and no occupancy
    F_WITHDRAWN = 8         # the attempt in force must be taken back
    F_LOST = 16             # the definition and the data are gone; cannot be computed
    F_TRY_AGAIN = 32        # no-worker: a worker that may fit has turned up
    F_ENLISTED = 64         # is in the worklist
    F_PURE_DATA = 128       # the definition is a literal, no function


ctypedef struct Edge:
    # ``child`` needs the result of ``parent``. The array belongs to the child.
    PyObject* child
    PyObject* parent
    Edge* prev              # among the dependents of parent
    Edge* next


ctypedef struct Replica:
    PyObject* task
    PyObject* worker
    Replica* task_prev      # among the holders of task
    Replica* task_next
    Replica* worker_prev    # among the keys of worker
    Replica* worker_next


ctypedef struct Want:
    PyObject* task
    PyObject* client
    Want* task_prev
    Want* task_next
    Want* client_prev
    Want* client_next


cdef class Prefix:
    cdef readonly str name
    cdef readonly int64_t n_tasks
    cdef int64_t counts[8]              # tasks by state
    cdef int64_t totals[8]              # times a state was entered
    cdef readonly double duration       # seconds, moving average; < 0: never measured
    cdef int64_t priced_ns              # what a processing task of it counts as occupancy
    cdef readonly double max_duration   # seconds
    cdef readonly int64_t n_measured
    cdef readonly double compute_seconds
    cdef readonly double transfer_seconds
    cdef readonly int64_t nbytes_total  # bytes of results now in memory
    cdef readonly int64_t suspicious    # deaths blamed on it
    cdef readonly int64_t n_groups
    cdef object loads                   # dict[PrefixLoad, None], loads with count > 0
    cdef readonly double last_used      # time of the last task made


cdef class Group:
    cdef readonly str name
    cdef readonly Prefix prefix
    cdef readonly int64_t n_tasks
    cdef int64_t counts[8]
    cdef list dependencies              # groups, at most MAX_GROUP_DEPENDENCIES + 1
    cdef readonly int64_t nbytes_total


cdef class PrefixLoad:
    # How many processing tasks of one prefix one worker holds.
    cdef PyObject* worker
    cdef readonly Prefix prefix
    cdef readonly int64_t count


cdef class TypeInfo:
    cdef readonly str typename
    cdef readonly bytes pickled         # the class, as the worker sent it


cdef class Restrictions:
    # Interned: tasks with equal demands share one record.
    cdef readonly tuple identity        # (workers, hosts, resources, loose): the intern key
    cdef readonly tuple workers         # addresses or names, sorted
    cdef readonly tuple hosts
    cdef readonly dict resources        # name -> amount (float)
    cdef readonly bint loose
    cdef readonly bint empty            # no demand at all
    cdef list fitting                   # cached: workers that meet it and run
    cdef int64_t fitting_epoch
    cdef int64_t cursor
    cdef PyObject* head                 # no-worker tasks with this demand
    cdef PyObject* tail
    cdef readonly int64_t n_tasks
    cdef readonly int64_t n_unrunnable


cdef class Annotations:
    cdef readonly double user_priority
    cdef readonly int retries
    cdef readonly Restrictions restrictions
    cdef readonly object wire           # bytes, or (bytes, ...) with sub-frames: as sent on


cdef class TaskError:
    cdef readonly object exception      # opaque payload, bytes or str
    cdef readonly object traceback      # opaque payload, bytes, str or None
    cdef readonly str exception_text
    cdef readonly str traceback_text
    cdef readonly object blame          # key whose own failure it is
    cdef readonly list erred_on         # worker addresses


cdef class Task:
    cdef readonly object key
    cdef readonly object run_spec       # None, bytes, or list of frames: opaque
    cdef readonly Group group
    cdef readonly Annotations annotations
    cdef readonly TypeInfo type_info
    cdef readonly TaskError error
    cdef readonly object metadata
    cdef readonly Worker worker         # processing on
    cdef PrefixLoad load
    cdef readonly double user_priority
    cdef readonly double generation
    cdef readonly double order
    cdef readonly double since          # time of the last transition, seconds
    cdef readonly int64_t uid
    cdef readonly int64_t run_id        # of the attempt in force, or of the last one
    cdef readonly int64_t first_run_id  # runs of this definition have ids from here on
    cdef readonly int64_t nbytes        # -1: unknown
    cdef int64_t transfer_bytes         # counted in its worker's network_bytes
    cdef Edge* edges
    cdef Edge* dependents_head
    cdef Edge* dependents_tail
    cdef Replica* replicas_head
    cdef Replica* replicas_tail
    cdef Want* wants_head
    cdef PyObject* link_prev            # processing list of a worker, or no-worker list
    cdef PyObject* link_next
    cdef readonly int32_t n_dependencies
    cdef readonly int32_t n_dependents
    cdef readonly int32_t n_waiting     # dependencies that are not in memory
    cdef readonly int32_t n_erred       # dependencies that are erred
    cdef readonly int32_t n_waiters     # dependents that are waiting .. processing
    cdef readonly int32_t n_future      # dependents that a submission has yet to bring
    cdef readonly int32_t n_replicas
    cdef readonly int32_t n_wants
    cdef int32_t heap_pos
    cdef readonly int16_t retries
    cdef readonly int16_t suspicious
    cdef uint16_t flags
    cdef uint8_t code                   # TaskCode


cdef class Worker:
    cdef readonly str address
    cdef readonly object name
    cdef readonly str host
    cdef readonly str server_id
    cdef readonly int nthreads
    cdef readonly int64_t memory_limit  # bytes; 0: none
    cdef readonly dict resources        # supplied
    cdef readonly dict used_resources
    cdef readonly int slot              # dense index, reused
    cdef readonly int64_t seq           # order of registration, never reused
    cdef readonly int64_t first_run_id  # runs since it registered have ids from here on
    cdef uint8_t code                   # WorkerCode
    cdef readonly int64_t n_processing
    cdef readonly int64_t n_long_running
    cdef readonly int64_t n_replicas
    cdef readonly int64_t nbytes        # of the keys it holds
    cdef readonly int64_t occupancy_ns  # compute part
    cdef readonly int64_t network_bytes # transfers that its processing tasks wait for
    cdef readonly int max_active        # slots for queued tasks
    cdef readonly dict loads            # Prefix -> PrefixLoad
    cdef readonly dict actors           # key -> None
    cdef PyObject* processing_head
    cdef PyObject* processing_tail
    cdef Replica* replicas_head
    cdef Replica* replicas_tail
    cdef int pos_open
    cdef int pos_load
    cdef bint counted_idle
    cdef bint counted_saturated
    cdef int64_t scratch_bytes          # placement: bytes of the task's inputs held here
    cdef int64_t scratch_epoch
    cdef public dict executing          # key -> seconds, by the last heartbeat
    cdef public object info             # the shell's: identity fields, metrics, last seen
    cdef public object peer             # the sink's: its outbox


cdef class Client:
    cdef readonly str id
    cdef readonly int64_t seq
    cdef Want* wants_head
    cdef Want* wants_tail
    cdef readonly int64_t n_wants
    cdef public object info
    cdef public object peer             # the sink's: its outbox, None for pseudo-clients
