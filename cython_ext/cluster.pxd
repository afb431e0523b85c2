# The books: every record, every relation, every total.

from cpython.object cimport PyObject
from libc.stdint cimport int64_t

from cython_ext.entities cimport (
    Annotations,
    Client,
    Group,
    Prefix,
    PrefixLoad,
    Restrictions,
    Task,
    TypeInfo,
    Worker,
)
from cython_ext.heaps cimport TaskHeap, WorkerHeap

cdef class EngineSettings:
    cdef readonly int allowed_failures
    cdef readonly double worker_saturation      # inf: no queuing on the scheduler
    cdef readonly double bandwidth              # bytes per second
    cdef readonly int64_t default_data_size     # bytes
    cdef readonly double unknown_duration       # seconds
    cdef readonly dict default_durations        # prefix name -> seconds
    cdef readonly int rootish_groups
    cdef readonly int rootish_dependencies
    cdef readonly int placement_candidates
    cdef readonly double no_workers_timeout     # seconds; < 0: none
    cdef readonly int64_t journal_length
    cdef readonly int64_t prefix_limit
    cdef readonly str validate                  # event, turn, off
    cdef readonly int64_t first_run_id


cdef class ClusterState:
    cdef readonly EngineSettings settings
    cdef readonly dict tasks                    # key -> Task
    cdef readonly dict workers                  # address -> Worker
    cdef readonly dict workers_by_name
    cdef readonly dict clients                  # id -> Client
    cdef readonly dict prefixes                 # name -> Prefix
    cdef readonly dict groups                   # name -> Group
    cdef readonly dict idle_prefixes            # name -> Prefix without tasks, oldest first
    cdef readonly dict hosts                    # host -> dict[Worker, None]
    cdef readonly dict replicated               # Task -> None, tasks with two or more copies
    cdef readonly dict unrunnable               # Restrictions -> None, with no-worker tasks
    cdef dict restrictions                      # identity -> Restrictions
    cdef dict types                             # typename, pickle -> TypeInfo
    cdef list slots                             # slot -> Worker or None
    cdef list free_slots
    cdef readonly TaskHeap queued
    cdef readonly TaskHeap runnable
    cdef readonly WorkerHeap open_workers
    cdef readonly WorkerHeap by_load
    cdef readonly Restrictions unrestricted
    cdef readonly Annotations no_annotations
    cdef int64_t state_counts[8]
    cdef readonly int64_t total_nthreads
    cdef readonly int64_t total_occupancy_ns
    cdef readonly int64_t n_running
    cdef readonly int64_t n_idle
    cdef readonly int64_t n_saturated
    cdef readonly int64_t n_paused
    cdef readonly int64_t n_retiring
    cdef readonly int64_t n_forgotten
    cdef readonly int64_t topology_epoch
    cdef readonly int64_t next_run_id
    cdef int64_t next_uid
    cdef int64_t next_seq
    cdef int64_t placement_epoch

    cdef Prefix prefix(self, str name, double now)
    cdef Group group(self, str name, Prefix prefix)
    cdef Restrictions intern_restrictions(
        self, tuple workers, tuple hosts, dict resources, bint loose
    )
    cdef TypeInfo intern_type(self, str typename, bytes pickled)
    cdef Task new_task(self, object key, Group group, double now)
    cdef int define_task(
        self, Task task, object run_spec, Annotations annotations, list parents
    ) except -1
    cdef int regroup(self, Task task, Group group) except -1
    cdef int set_restrictions(self, Task task, Restrictions restrictions) except -1
    cdef int drop_task(self, Task task) except -1
    cdef int sweep_group(self, Group group) except -1
    cdef int count_state(self, Task task, int old, int new) except -1
    cdef int64_t take_run_id(self) except -1

    cdef int add_replica(self, Task task, Worker worker) except -1
    cdef int remove_replica(self, Task task, Worker worker) except -1
    cdef int set_nbytes(self, Task task, int64_t nbytes) except -1
    cdef int64_t nbytes_of(self, Task task) except -1

    cdef int add_processing(self, Task task, Worker worker, int64_t transfer_bytes) except -1
    cdef int remove_processing(self, Task task) except -1
    cdef int make_long_running(self, Task task) except -1
    cdef int observe_duration(self, Prefix prefix, double seconds) except -1
    cdef int _price(self, Prefix prefix, int64_t priced_ns) except -1
    cdef int _release_load(self, Task task, Worker worker) except -1

    cdef int add_unrunnable(self, Task task) except -1
    cdef int remove_unrunnable(self, Task task) except -1

    cdef Worker add_worker(
        self,
        str address,
        object name,
        str host,
        str server_id,
        int nthreads,
        int64_t memory_limit,
        dict resources,
        int code,
    )
    cdef int set_worker_code(self, Worker worker, int code) except -1
    cdef int set_worker_resources(self, Worker worker, dict resources) except -1
    cdef int drop_worker(self, Worker worker) except -1
    cdef int refresh_worker(self, Worker worker) except -1
    cdef bint fits(self, Restrictions restrictions, Worker worker) except -1
    cdef list fitting_workers(self, Restrictions restrictions)

    cdef Client client(self, str client_id)
    cdef int drop_client(self, Client client) except -1
    cdef int add_want(self, Task task, Client client) except -1
    cdef int remove_want(self, Task task, Client client) except -1
