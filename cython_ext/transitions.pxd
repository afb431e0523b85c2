from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t

from cython_ext.cluster cimport ClusterState, EngineSettings
from cython_ext.entities cimport Annotations, Client, Group, Task, TaskError, TypeInfo, Worker
from cython_ext.events cimport (
    ClientConnected,
    ClientGone,
    DataPlaced,
    DataReleased,
    Event,
    GraphBegun,
    GraphEnded,
    GraphFailed,
    GraphSliceReady,
    KeyReportAsked,
    KeysAdded,
    KeysCancelled,
    KeysReleased,
    KeysRetried,
    KeysWanted,
    LongRunning,
    MessageRejected,
    ReplicaMissing,
    ReplicasAsked,
    ReplicasDropped,
    RescheduleAsked,
    ResourcesSet,
    Restarted,
    RestrictionsSet,
    RetirementAborted,
    RetirementBegun,
    StealAnswered,
    TaskErred,
    TaskFinished,
    TimePassed,
    WhoHasAsked,
    WorkerLost,
    WorkerRegistered,
    WorkerStatusChanged,
)
from cython_ext.journal cimport Journal
from cython_ext.sink cimport Sink

cdef class Submission:
    cdef readonly int64_t id
    cdef readonly Client client
    cdef readonly int64_t n_tasks
    cdef readonly double generation
    cdef readonly double user_priority
    cdef readonly object actors
    cdef list tasks                 # by index in the graph
    cdef list externals             # tasks that the graph refers to
    cdef list prefixes              # names
    cdef list groups                # (group name, prefix name)
    cdef list annotations
    cdef int32_t* remaining         # by index: dependents yet to come


cdef class SchedulerMachine:
    cdef readonly ClusterState state
    cdef readonly EngineSettings settings
    cdef readonly Journal journal
    cdef readonly dict counters         # name -> int
    cdef readonly dict submissions      # id -> Submission
    cdef dict doubts                    # key -> times its holders were asked for
    cdef readonly dict suspects         # key -> None: ask its holders; the shell empties it
    cdef readonly int64_t n_events
    cdef readonly int64_t n_transitions
    cdef readonly int64_t n_assigned
    cdef Sink sink
    cdef object make_exception
    cdef readonly double now            # of the last event, seconds
    cdef str stimulus_id
    cdef Client forgetful               # fire-and-forget, once it was named
    cdef object where                   # address or client id that the event came from
    cdef double generation
    cdef double last_graph_time
    cdef double no_workers_since        # < 0: some worker runs
    cdef bint checks_events
    cdef PyObject** pending             # ring of enlisted tasks, FIFO
    cdef Py_ssize_t pending_head
    cdef Py_ssize_t pending_n
    cdef Py_ssize_t pending_capacity

    cpdef handle(self, Event event)
    cdef int _dispatch(self, Event event) except -1
    cdef int touch(self, Task task) except -1
    cdef int drain(self) except -1
    cdef int line_up(self, Task task) except -1
    cdef int next_code(self, Task task) except -1
    cdef int settle(self, Task task) except -1
    cdef int enter(self, Task task, int new) except -1
    cdef int note(self, str name, object key) except -1
    cdef int place(self, Task task) except -1
    cdef bint inputs_exceed(self, Task task, Worker worker) except -1
    cdef int assign(self, Task task, Worker worker) except -1
    cdef int lose(self, Task task, str reason) except -1
    cdef int fail(self, Task task, TaskError error) except -1
    cdef bint is_gone(self, Worker worker, object key) except -1
    cdef int copy_gone(self, Task task, Worker worker) except -1
    cdef int leave_lines(self, Task task) except -1
    cdef int report(self, Task task, Client client) except -1
    cdef int report_all(self, Task task) except -1
    cdef int add_want(self, Task task, Client client) except -1
    cdef int drop_want(self, Task task, Client client) except -1
    cdef int drop_all_replicas(self, Task task) except -1
    cdef int accept_data(
        self, Task task, Worker worker, TaskFinished event, bint current
    ) except -1
    cdef int try_unrunnable(self, Worker worker) except -1
    cdef int workers_changed(self) except -1
    cdef int close_submission(self, Submission submission) except -1
    cdef int add_row(
        self, Submission submission, object key, Py_ssize_t index, double order, int flags,
        Group group, Annotations annotations, object run_spec, list parents
    ) except -1

    cdef int on_wanted(self, Task task) except -1
    cdef int on_runnable(self, Task task) except -1
    cdef int on_data(self, Task task) except -1
    cdef int on_unwanted(self, Task task) except -1
    cdef int on_input_lost(self, Task task) except -1
    cdef int on_failed(self, Task task) except -1
    cdef int on_finished(self, Task task) except -1
    cdef int on_withdrawn(self, Task task) except -1
    cdef int on_task_failed(self, Task task) except -1
    cdef int on_data_dropped(self, Task task) except -1
    cdef int on_data_failed(self, Task task) except -1
    cdef int on_error_cleared(self, Task task) except -1
    cdef int on_forgotten(self, Task task) except -1

    cdef int _task_finished(self, TaskFinished event) except -1
    cdef int _task_erred(self, TaskErred event) except -1
    cdef int _keys_added(self, KeysAdded event) except -1
    cdef int _data_released(self, DataReleased event) except -1
    cdef int _long_running(self, LongRunning event) except -1
    cdef int _reschedule_asked(self, RescheduleAsked event) except -1
    cdef int _steal_answered(self, StealAnswered event) except -1
    cdef int _who_has_asked(self, WhoHasAsked event) except -1
    cdef int _worker_registered(self, WorkerRegistered event) except -1
    cdef int _worker_status_changed(self, WorkerStatusChanged event) except -1
    cdef int _worker_lost(self, WorkerLost event) except -1
    cdef int _client_connected(self, ClientConnected event) except -1
    cdef int _client_gone(self, ClientGone event) except -1
    cdef int _keys_wanted(self, KeysWanted event) except -1
    cdef int _keys_released(self, KeysReleased event) except -1
    cdef int _keys_cancelled(self, KeysCancelled event) except -1
    cdef int _key_report_asked(self, KeyReportAsked event) except -1
    cdef int _keys_retried(self, KeysRetried event) except -1
    cdef int _graph_begun(self, GraphBegun event) except -1
    cdef int _graph_slice_ready(self, GraphSliceReady event) except -1
    cdef int _graph_ended(self, GraphEnded event) except -1
    cdef int _graph_failed(self, GraphFailed event) except -1
    cdef int _data_placed(self, DataPlaced event) except -1
    cdef int _replica_missing(self, ReplicaMissing event) except -1
    cdef int _replicas_dropped(self, ReplicasDropped event) except -1
    cdef int _replicas_asked(self, ReplicasAsked event) except -1
    cdef int _retirement_begun(self, RetirementBegun event) except -1
    cdef int _retirement_aborted(self, RetirementAborted event) except -1
    cdef int _restrictions_set(self, RestrictionsSet event) except -1
    cdef int _resources_set(self, ResourcesSet event) except -1
    cdef int _message_rejected(self, MessageRejected event) except -1
    cdef int _restarted(self, Restarted event) except -1
    cdef int _time_passed(self, TimePassed event) except -1
