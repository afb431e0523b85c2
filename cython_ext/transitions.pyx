"""The scheduler machine: events in, effects out.

Owns every decision about the state of a task. ``handle`` is the only way in, the sink the
only way out; there is no clock, no socket, no randomness here.

How it works. An event handler changes *facts*: a replica was added, a client wants a key,
an attempt was withdrawn. It touches the tasks whose facts it changed. ``drain`` then
settles each touched task: ``next_code`` derives from the task's facts alone which state
it should be in, the declared edge to that state does its work, and ``enter`` - the only
place that writes a state - tells the neighbours, whose facts have changed by that. Since
a target state is never stored, two parties cannot ask for different ones. Tasks whose
inputs are all there wait in a heap until nothing else is to settle, and are then placed in
order of priority.

Facts of a task: wants, replicas, its error, flags, and counts over its neighbours
(``n_waiting``, ``n_erred``, ``n_waiters``, ``n_future``).
"""

cimport cython
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Realloc
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint8_t

from cython_ext.entities cimport (
    Annotations,
    Edge,
    F_ACTOR,
    F_DATA_PRODUCER,
    F_ENLISTED,
    F_LONG_RUNNING,
    F_LOST,
    F_PURE_DATA,
    F_TRY_AGAIN,
    F_WITHDRAWN,
    Prefix,
    Replica,
    Restrictions,
    Want,
)
from cython_ext.events cimport (
    E_CLIENT_CONNECTED,
    E_CLIENT_GONE,
    E_DATA_PLACED,
    E_DATA_RELEASED,
    E_GRAPH_BEGUN,
    E_GRAPH_ENDED,
    E_GRAPH_FAILED,
    E_GRAPH_SLICE_READY,
    E_KEY_REPORT_ASKED,
    E_KEYS_ADDED,
    E_KEYS_CANCELLED,
    E_KEYS_RELEASED,
    E_KEYS_RETRIED,
    E_KEYS_WANTED,
    E_LONG_RUNNING,
    E_MESSAGE_REJECTED,
    E_REPLICA_MISSING,
    E_REPLICAS_ASKED,
    E_REPLICAS_DROPPED,
    E_RESCHEDULE_ASKED,
    E_RESOURCES_SET,
    E_RESTARTED,
    E_RESTRICTIONS_SET,
    E_RETIREMENT_ABORTED,
    E_RETIREMENT_BEGUN,
    E_STEAL_ANSWERED,
    E_TASK_ERRED,
    E_TASK_FINISHED,
    E_TIME_PASSED,
    E_WHO_HAS_ASKED,
    E_WORKER_LOST,
    E_WORKER_REGISTERED,
    E_WORKER_STATUS_CHANGED,
)
from cython_ext.graph cimport dependency_at, find_replica, find_want, holder_addresses
from cython_ext.heaps cimport runs_before
from cython_ext.placement cimport choose_worker, is_rootish, missing_bytes, weigh_inputs
from cython_ext.states cimport (
    ERRED,
    FORGOTTEN,
    MEMORY,
    N_TASK_STATES,
    NO_WORKER,
    PROCESSING,
    QUEUED,
    RELEASED,
    TASK_STATE_NAMES,
    W_CLOSED,
    W_CLOSING_GRACEFULLY,
    W_INIT,
    W_PAUSED,
    W_RUNNING,
    WAITING,
    worker_code,
)


# The pseudo-client that stock clients name when nobody will ever ask for the result.
FIRE_AND_FORGET = "fire-and-forget"

# Times that holders of a key are asked for before the holders themselves are asked.
cdef int MAX_ASKED = 3
cdef Py_ssize_t MAX_DOUBTS = 10_000


# More than any task is tried, and within the field that counts them.
cdef int MAX_RETRIES = 32767


class InvalidTransition(Exception):
    """The facts of a task ask for an edge that is not declared: a programming error."""


class InvariantBroken(Exception):
    """The books do not hold: a programming error. ``broken`` says what, in words."""

    def __init__(self, broken, stimulus_id, story):
        super().__init__(
            f"after {stimulus_id!r}: " + "; ".join(broken) + f"; story: {story}"
        )
        self.broken = broken


ctypedef int (*EdgeHandler)(SchedulerMachine, Task) except -1

cdef EdgeHandler HANDLERS[N_TASK_STATES][N_TASK_STATES]
cdef bint DECLARED[N_TASK_STATES][N_TASK_STATES]

# (from, to, handler, reason) of each legal edge, in reading order. Documentation,
# explain() and tests read it.
EDGES = []


cdef int declare(int start, int finish, str name, EdgeHandler handler, str reason) except -1:
    HANDLERS[start][finish] = handler
    DECLARED[start][finish] = True
    EDGES.append((TASK_STATE_NAMES[start], TASK_STATE_NAMES[finish], name, reason))
    return 0


declare(RELEASED, WAITING, "on_wanted", SchedulerMachine.on_wanted,
        "a client, a dependent or an open submission needs it")
declare(RELEASED, MEMORY, "on_data", SchedulerMachine.on_data,
        "its data was placed on a worker, or an earlier run's result arrived")
declare(RELEASED, ERRED, "on_failed", SchedulerMachine.on_failed,
        "an input failed, or its definition could not be opened")
declare(RELEASED, FORGOTTEN, "on_forgotten", SchedulerMachine.on_forgotten,
        "nobody needs it and nothing depends on it")
declare(WAITING, RELEASED, "on_unwanted", SchedulerMachine.on_unwanted,
        "nobody needs it any more")
declare(WAITING, NO_WORKER, "on_runnable", SchedulerMachine.on_runnable,
        "inputs in memory, but no worker meets its restrictions")
declare(WAITING, QUEUED, "on_runnable", SchedulerMachine.on_runnable,
        "inputs in memory, but no worker has an open slot for a root task")
declare(WAITING, PROCESSING, "on_runnable", SchedulerMachine.on_runnable,
        "inputs in memory, a worker was chosen")
declare(WAITING, MEMORY, "on_data", SchedulerMachine.on_data,
        "an earlier run's result arrived, or its data was placed")
declare(WAITING, ERRED, "on_failed", SchedulerMachine.on_failed,
        "an input failed, or no worker can hold its inputs")
declare(NO_WORKER, RELEASED, "on_unwanted", SchedulerMachine.on_unwanted,
        "nobody needs it any more")
declare(NO_WORKER, WAITING, "on_input_lost", SchedulerMachine.on_input_lost,
        "the last copy of an input is gone, or a worker that may fit has turned up")
declare(NO_WORKER, MEMORY, "on_data", SchedulerMachine.on_data,
        "an earlier run's result arrived, or its data was placed")
declare(NO_WORKER, ERRED, "on_failed", SchedulerMachine.on_failed,
        "no fitting worker came in time, or an input failed")
declare(QUEUED, RELEASED, "on_unwanted", SchedulerMachine.on_unwanted,
        "nobody needs it any more")
declare(QUEUED, WAITING, "on_input_lost", SchedulerMachine.on_input_lost,
        "the last copy of an input is gone")
declare(QUEUED, PROCESSING, "on_runnable", SchedulerMachine.on_runnable,
        "a slot opened")
declare(QUEUED, MEMORY, "on_data", SchedulerMachine.on_data,
        "an earlier run's result arrived, or its data was placed")
declare(QUEUED, ERRED, "on_failed", SchedulerMachine.on_failed,
        "no worker came in time, or an input failed")
declare(PROCESSING, RELEASED, "on_withdrawn", SchedulerMachine.on_withdrawn,
        "worker lost, rescheduled, retried, an input lost, or unwanted")
declare(PROCESSING, MEMORY, "on_finished", SchedulerMachine.on_finished,
        "a worker reported success")
declare(PROCESSING, ERRED, "on_task_failed", SchedulerMachine.on_task_failed,
        "the task failed without retries left, or killed too many workers")
declare(MEMORY, RELEASED, "on_data_dropped", SchedulerMachine.on_data_dropped,
        "nobody needs it any more, or the last copy is gone")
declare(MEMORY, ERRED, "on_data_failed", SchedulerMachine.on_data_failed,
        "an actor's worker was lost, or no worker can read the result")
declare(ERRED, RELEASED, "on_error_cleared", SchedulerMachine.on_error_cleared,
        "retried, or nobody needs it any more")


cdef inline bint is_needed(Task task) noexcept:
    return task.n_wants > 0 or task.n_waiters > 0 or task.n_future > 0


cdef inline bint is_active(int code) noexcept:
    return WAITING <= code <= PROCESSING


cdef bint is_read_on(Task task, Worker worker) except -1:
    """Whether a task that uses ``task`` is processing on ``worker``."""
    cdef Edge* edge
    cdef Task other
    if task.n_waiters == 0:
        return False
    edge = task.dependents_head
    while edge != NULL:
        other = <Task>edge.child
        if other.code == PROCESSING and other.worker is worker:
            return True
        edge = edge.next
    return False


cdef bint has_own_error(Task task) except -1:
    return task.error is not None and task.error.blame == task.key


def default_exception(kind, fields):
    """Stand-in for the wire layer's: the error as text. Returns (payload, text)."""
    text = f"{kind}: " + ", ".join(f"{name}={value!r}" for name, value in fields.items())
    return text, text


def group_name(key):
    """Names ``(group, prefix)`` of a key that came without a graph.

    The prefix is the key's words up to the first that is a number or a hash, as dask
    names its keys.
    """
    group = key
    while isinstance(group, tuple) and group:
        group = group[0]
    group = str(group)
    words = group.split("-")
    kept = words[:1]
    for word in words[1:]:
        if word.isdigit() or (len(word) >= 8 and all(c in "0123456789abcdef" for c in word)):
            break
        kept.append(word)
    if len(kept) == 1 and len(group) == 32 and all(c in "0123456789abcdef" for c in group):
        return "data", "data"
    prefix = "-".join(kept)
    return (group if isinstance(key, tuple) else prefix), prefix


@cython.final
cdef class Submission:
    """A graph that is coming in, slice by slice."""

    def __dealloc__(self):
        PyMem_Free(self.remaining)


@cython.final
cdef class SchedulerMachine:
    """The scheduler's state machine.

    ``settings``: EngineSettings. ``sink``: where effects go. ``make_exception(kind, fields)``
    makes ``(payload, text)`` of an error of the engine's own, for clients; it must be pure.
    """

    def __init__(self, EngineSettings settings not None, Sink sink not None, make_exception=None):
        self.settings = settings
        self.sink = sink
        self.make_exception = make_exception or default_exception
        self.state = ClusterState(settings)
        self.journal = Journal(settings.journal_length)
        self.counters = {}
        self.submissions = {}
        self.doubts = {}
        self.suspects = {}
        self.stimulus_id = ""
        self.where = None
        self.no_workers_since = 0.0
        self.last_graph_time = -1e300
        self.checks_events = settings.validate == "event"

    def __dealloc__(self):
        cdef Py_ssize_t i
        if self.pending != NULL:
            for i in range(self.pending_n):
                Py_DECREF(
                    <object>self.pending[(self.pending_head + i) % self.pending_capacity]
                )
            PyMem_Free(self.pending)

    cpdef handle(self, Event event):
        """Apply ``event`` and all that follows from it. Returns ``event.result``.

        Any exception is a programming error; see ``recover``.
        """
        self.now = event.now
        self.stimulus_id = event.stimulus_id
        self.where = None
        self.n_events += 1
        self._dispatch(event)
        self.drain()
        if self.checks_events:
            self.check_turn()
        return event.result

    def check_turn(self):
        """Recount everything and raise InvariantBroken if it does not hold. O(tasks)."""
        # Imported here: the checks are built on this module.
        from cython_ext.invariants import check

        broken = check(self)
        if broken:
            raise InvariantBroken(
                broken, self.stimulus_id, self.journal.story({self.stimulus_id})
            )

    def expected_state(self, Task task not None):
        """str: the state that the facts of ``task`` ask for; at rest, the one it is in."""
        return TASK_STATE_NAMES[self.next_code(task)]

    def recover(self):
        """After an exception out of ``handle``: settle what it left half done."""
        self.drain()

    # The drain

    cdef int touch(self, Task task) except -1:
        """Have ``task`` settled before the event ends."""
        cdef PyObject** grown
        cdef Py_ssize_t i
        cdef Py_ssize_t wrapped
        if task.flags & F_ENLISTED:
            return 0
        if self.pending_n == self.pending_capacity:
            i = 256 if self.pending_capacity == 0 else self.pending_capacity * 2
            grown = <PyObject**>PyMem_Realloc(self.pending, i * sizeof(PyObject*))
            if grown == NULL:
                raise MemoryError("no memory for the worklist")
            self.pending = grown
            # Unwrap: the part before the head moves behind the old end.
            wrapped = self.pending_head
            for j in range(wrapped):
                grown[self.pending_capacity + j] = grown[j]
            self.pending_capacity = i
        self.pending[(self.pending_head + self.pending_n) % self.pending_capacity] = (
            <PyObject*>task
        )
        self.pending_n += 1
        task.flags |= F_ENLISTED
        Py_INCREF(task)
        return 0

    cdef int drain(self) except -1:
        """Settle until nothing is left to do."""
        cdef ClusterState state = self.state
        cdef Task task
        cdef int reached
        while True:
            if self.pending_n > 0:
                task = <Task>self.pending[self.pending_head]
                self.pending_head = (self.pending_head + 1) % self.pending_capacity
                self.pending_n -= 1
                Py_DECREF(task)
                task.flags &= ~F_ENLISTED
                if task.code != FORGOTTEN:
                    self.settle(task)
            elif state.runnable.n > 0:
                task = state.runnable.top()
                state.runnable.remove(task)
                reached = self.place(task)
                if reached != task.code:
                    self.enter(task, reached)
            elif state.queued.n > 0 and state.open_workers.n > 0:
                task = state.queued.top()
                if self.inputs_exceed(task, state.open_workers.top()):
                    continue
                state.queued.remove(task)
                weigh_inputs(state, task, state.open_workers.top())
                self.enter(task, self.assign(task, state.open_workers.top()))
            else:
                return 0

    cdef int settle(self, Task task) except -1:
        """Move ``task`` along declared edges to where its facts say it belongs."""
        cdef int target
        cdef EdgeHandler handler
        while True:
            target = self.next_code(task)
            if target == task.code:
                if target == WAITING:
                    self.line_up(task)
                return 0
            handler = HANDLERS[task.code][target]
            if handler == NULL:
                raise InvalidTransition(
                    f"{task.key!r}: {TASK_STATE_NAMES[task.code]} -> {TASK_STATE_NAMES[target]} "
                    f"({self.stimulus_id})"
                )
            handler(self, task)
            self.enter(task, target)
            if self.forgetful is not None and (target == MEMORY or target == ERRED):
                self.drop_want(task, self.forgetful)
            if target == FORGOTTEN:
                self.state.drop_task(task)
                return 0

    cdef int line_up(self, Task task) except -1:
        """Have ``task`` among those to be placed if, and only if, its inputs are all there."""
        if task.n_waiting == 0:
            if task.heap_pos < 0:
                self.state.runnable.push(task)
        elif task.heap_pos >= 0:
            self.state.runnable.remove(task)
        return 0

    cdef int next_code(self, Task task) except -1:
        """The state in which the facts of ``task`` put it."""
        cdef int code = task.code
        cdef bint needed = is_needed(task)
        if code == WAITING:
            if task.n_replicas > 0:
                return MEMORY
            if not needed:
                return RELEASED
            if task.error is not None or task.n_erred > 0:
                return ERRED
            return WAITING
        if code == PROCESSING:
            if task.n_replicas > 0:
                return MEMORY
            if task.error is not None:
                return ERRED if needed else RELEASED
            if task.flags & F_WITHDRAWN or not needed or task.n_waiting > 0:
                return RELEASED
            return PROCESSING
        if code == MEMORY:
            if task.error is not None:
                return ERRED
            if task.n_replicas == 0 or not needed:
                return RELEASED
            return MEMORY
        if code == RELEASED:
            if task.n_replicas > 0:
                return MEMORY
            if not needed:
                return FORGOTTEN if task.n_dependents == 0 else RELEASED
            if task.error is not None or task.n_erred > 0:
                return ERRED
            if task.run_spec is None:
                return RELEASED
            return WAITING
        if code == QUEUED or code == NO_WORKER:
            if task.n_replicas > 0:
                return MEMORY
            if not needed:
                return RELEASED
            if task.error is not None or task.n_erred > 0:
                return ERRED
            if task.n_waiting > 0 or task.flags & F_TRY_AGAIN:
                return WAITING
            return code
        if code == ERRED:
            if task.n_replicas > 0:
                return RELEASED
            if not needed and task.n_dependents == 0:
                return RELEASED
            if task.n_erred == 0 and (task.flags & F_TRY_AGAIN or not has_own_error(task)):
                return RELEASED
            return ERRED
        return code

    cdef int enter(self, Task task, int new) except -1:
        """Write the state, book it, and tell the neighbours."""
        cdef int old = task.code
        cdef bint was_active = is_active(old)
        cdef bint now_active = is_active(new)
        cdef Edge* edge
        cdef Task other
        cdef int i
        if not DECLARED[old][new]:
            raise InvalidTransition(
                f"{task.key!r}: {TASK_STATE_NAMES[old]} -> {TASK_STATE_NAMES[new]} "
                f"({self.stimulus_id})"
            )
        task.code = <uint8_t>new
        task.since = self.now
        self.n_transitions += 1
        self.state.count_state(task, old, new)
        self.journal.record(
            self.now, task.key, old, new, self.stimulus_id,
            task.worker.address if task.worker is not None else self.where, None,
        )
        if new == MEMORY:
            edge = task.dependents_head
            while edge != NULL:
                other = <Task>edge.child
                other.n_waiting -= 1
                if other.n_waiting == 0 and other.code == WAITING:
                    self.touch(other)
                edge = edge.next
        elif old == MEMORY:
            edge = task.dependents_head
            while edge != NULL:
                other = <Task>edge.child
                other.n_waiting += 1
                if is_active(other.code):
                    self.touch(other)
                edge = edge.next
        if new == ERRED:
            edge = task.dependents_head
            while edge != NULL:
                other = <Task>edge.child
                other.n_erred += 1
                self.touch(other)
                edge = edge.next
        elif old == ERRED:
            edge = task.dependents_head
            while edge != NULL:
                other = <Task>edge.child
                other.n_erred -= 1
                self.touch(other)
                edge = edge.next
        if now_active and not was_active:
            for i in range(task.n_dependencies):
                other = dependency_at(task, i)
                other.n_waiters += 1
                if other.code == RELEASED:
                    self.touch(other)
        elif was_active and not now_active:
            for i in range(task.n_dependencies):
                other = dependency_at(task, i)
                other.n_waiters -= 1
                if other.n_waiters == 0:
                    self.touch(other)
        if new == FORGOTTEN:
            for i in range(task.n_dependencies):
                self.touch(dependency_at(task, i))
        return 0

    cdef int note(self, str name, object key) except -1:
        """Record that something happened that changed no state."""
        cdef Task task = self.state.tasks.get(key)
        cdef int code = FORGOTTEN if task is None else task.code
        self.counters[name] = self.counters.get(name, 0) + 1
        self.journal.record(self.now, key, code, code, self.stimulus_id, self.where, name)
        return 0

    # Placing

    cdef int place(self, Task task) except -1:
        """Find a place for ``task``, whose inputs are all in memory. Returns its new state."""
        cdef ClusterState state = self.state
        cdef Worker worker
        if state.settings.worker_saturation < 1e300 and is_rootish(state, task):
            if state.open_workers.n > 0 and (
                state.queued.n == 0 or runs_before(task, state.queued.top())
            ):
                worker = state.open_workers.top()
                weigh_inputs(state, task, worker)
            else:
                state.queued.push(task)
                return QUEUED
        else:
            worker = choose_worker(state, task)
            if worker is None:
                state.add_unrunnable(task)
                return NO_WORKER
        return task.code if self.inputs_exceed(task, worker) else self.assign(task, worker)

    cdef bint inputs_exceed(self, Task task, Worker worker) except -1:
        """Whether ``worker`` could never hold the inputs of ``task``, which then fails."""
        cdef int64_t total = 0
        cdef int i
        if worker.memory_limit == 0:
            return False
        for i in range(task.n_dependencies):
            total += self.state.nbytes_of(dependency_at(task, i))
        if total <= worker.memory_limit:
            return False
        self.fail_by_engine(
            task,
            "memory",
            {
                "key": task.key,
                "nbytes": total,
                "worker": worker.address,
                "memory_limit": worker.memory_limit,
            },
        )
        return True

    def fail_by_engine(self, Task task, str kind, dict fields):
        payload, text = self.make_exception(kind, fields)
        self.fail(task, TaskError(payload, None, text, "", task.key, []))

    cdef int assign(self, Task task, Worker worker) except -1:
        """Start a run of ``task`` on ``worker``, which placement has looked at.

        Returns PROCESSING.
        """
        cdef int64_t transfer = 0
        if task.n_dependencies > 0:
            transfer = missing_bytes(self.state, task, worker)
        task.run_id = self.state.take_run_id()
        # Should an input have been lost, it is back.
        task.flags &= ~F_LOST
        self.n_assigned += 1
        self.state.add_processing(task, worker, transfer)
        self.sink.compute_task(worker, task, self.stimulus_id)
        return PROCESSING

    # Edges

    cdef int on_wanted(self, Task task) except -1:
        cdef Task other
        cdef int i
        for i in range(task.n_dependencies):
            other = dependency_at(task, i)
            if other.flags & F_LOST and other.code != MEMORY:
                # It was in memory itself when its input was lost.
                return self.lose(task, "lost dependencies")
        return 0

    cdef int on_runnable(self, Task task) except -1:
        # Placing takes these edges itself: the heaps decide when.
        raise InvalidTransition(f"{task.key!r}: placed outside of the drain")

    cdef int on_data(self, Task task) except -1:
        self.leave_lines(task)
        task.error = None
        task.flags &= ~F_LOST
        self.report_all_in_memory(task)
        return 0

    cdef int on_unwanted(self, Task task) except -1:
        self.leave_lines(task)
        return 0

    cdef int on_input_lost(self, Task task) except -1:
        self.leave_lines(task)
        return 0

    cdef int on_failed(self, Task task) except -1:
        cdef Task cause
        cdef int i
        self.leave_lines(task)
        if task.error is None:
            for i in range(task.n_dependencies):
                cause = dependency_at(task, i)
                if cause.code == ERRED:
                    task.error = cause.error
                    break
        self.report_all(task)
        return 0

    cdef int on_finished(self, Task task) except -1:
        cdef Worker worker = task.worker
        self.state.remove_processing(task)
        task.flags &= ~F_WITHDRAWN
        if find_replica(task, worker) == NULL:
            # The result came from elsewhere first: this run is not needed.
            self.sink.free_key(worker, task.key, self.stimulus_id)
            self.note("run-superseded", task.key)
        elif task.flags & F_ACTOR:
            worker.actors[task.key] = None
        task.suspicious = 0
        self.report_all_in_memory(task)
        return 0

    cdef int on_withdrawn(self, Task task) except -1:
        cdef Worker worker = task.worker
        self.state.remove_processing(task)
        task.flags &= ~F_WITHDRAWN
        # A failure that nobody needed to hear of is no reason to fail the next run.
        task.error = None
        if worker.code != W_CLOSED:
            self.sink.free_key(worker, task.key, self.stimulus_id)
        return 0

    cdef int on_task_failed(self, Task task) except -1:
        cdef Worker worker = task.worker
        self.state.remove_processing(task)
        task.flags &= ~F_WITHDRAWN
        if worker.code != W_CLOSED and worker.address not in task.error.erred_on:
            # The failure is not this worker's own report: it may still be at it.
            self.sink.free_key(worker, task.key, self.stimulus_id)
        self.report_all(task)
        return 0

    cdef int on_data_dropped(self, Task task) except -1:
        cdef Want* want
        if task.n_replicas > 0:
            self.drop_all_replicas(task)
        elif task.run_spec is None:
            self.lose(task, "lost data")
        else:
            want = task.wants_head
            while want != NULL:
                self.sink.lost_data(<Client>want.client, task.key)
                want = want.task_next
        return 0

    cdef int on_data_failed(self, Task task) except -1:
        self.drop_all_replicas(task)
        self.report_all(task)
        return 0

    cdef int on_error_cleared(self, Task task) except -1:
        cdef Want* want
        if has_own_error(task):
            for address in task.error.erred_on:
                worker = self.state.workers.get(address)
                if worker is not None:
                    self.sink.free_key(worker, task.key, self.stimulus_id)
        task.error = None
        task.flags &= ~F_TRY_AGAIN
        want = task.wants_head
        while want != NULL:
            self.sink.task_retried(<Client>want.client, task.key)
            want = want.task_next
        return 0

    cdef int on_forgotten(self, Task task) except -1:
        return 0

    # What edges and handlers share

    cdef bint is_gone(self, Worker worker, object key) except -1:
        """Whether the sender of a message is no longer (or not yet) registered. Recorded."""
        if worker is not None:
            self.where = worker.address
            if worker.code != W_CLOSED:
                return False
        self.note("sender-gone", self.where if key is None else key)
        return True

    cdef int copy_gone(self, Task task, Worker worker) except -1:
        """``worker`` lost its copy of ``task``. Returns 1 if it is news, else 0."""
        if not self.state.remove_replica(task, worker):
            return 0
        if task.flags & F_ACTOR:
            worker.actors.pop(task.key, None)
            if task.n_replicas == 0:
                self.fail_by_engine(
                    task, "actor-lost", {"key": task.key, "worker": worker.address}
                )
        self.touch(task)
        return 1

    cdef int leave_lines(self, Task task) except -1:
        """Take ``task`` out of the heap or list that its state keeps it in."""
        if task.code == NO_WORKER:
            self.state.remove_unrunnable(task)
        elif task.code == QUEUED:
            self.state.queued.remove(task)
        elif task.code == WAITING and task.heap_pos >= 0:
            self.state.runnable.remove(task)
        task.flags &= ~F_TRY_AGAIN
        return 0

    cdef int drop_all_replicas(self, Task task) except -1:
        """Order every holder to free ``task``. O(replicas)."""
        cdef Worker worker
        while task.replicas_head != NULL:
            worker = <Worker>task.replicas_head.worker
            self.state.remove_replica(task, worker)
            if task.flags & F_ACTOR:
                worker.actors.pop(task.key, None)
            self.sink.free_key(worker, task.key, self.stimulus_id)
        return 0

    def report_all_in_memory(self, Task task):
        cdef Want* want = task.wants_head
        while want != NULL:
            self.sink.key_in_memory(<Client>want.client, task)
            want = want.task_next

    cdef int report_all(self, Task task) except -1:
        """Tell every client that wants ``task`` of its error."""
        cdef Want* want = task.wants_head
        while want != NULL:
            self.sink.task_erred(<Client>want.client, task.key, task.error)
            want = want.task_next
        return 0

    cdef int report(self, Task task, Client client) except -1:
        """Tell ``client`` where ``task`` has got to, if that is an end."""
        if task.code == MEMORY:
            self.sink.key_in_memory(client, task)
        elif task.code == ERRED:
            self.sink.task_erred(client, task.key, task.error)
        return 0

    cdef int add_want(self, Task task, Client client) except -1:
        """Returns 1 if ``client`` did not want ``task`` before, else 0."""
        # Whoever asks anew is answered anew: it may be lost once more.
        task.flags &= ~F_LOST
        if not self.state.add_want(task, client):
            return 0
        self.touch(task)
        return 1

    cdef int drop_want(self, Task task, Client client) except -1:
        if self.state.remove_want(task, client):
            self.touch(task)
            if client.peer is None and client.n_wants == 0:
                # A pseudo-client lives as long as it wants something.
                self.state.drop_client(client)
        return 0

    cdef int fail(self, Task task, TaskError error) except -1:
        task.error = error
        self.touch(task)
        return 0

    cdef int lose(self, Task task, str reason) except -1:
        """``task`` has neither data nor definition: cancel it and all that needs it."""
        cdef list stack = [task]
        cdef Task lost
        cdef Edge* edge
        cdef Client client
        while stack:
            lost = stack.pop()
            if lost.flags & F_LOST:
                continue
            lost.flags |= F_LOST
            while lost.wants_head != NULL:
                client = <Client>lost.wants_head.client
                self.sink.cancelled_keys(client, [lost.key], reason, None)
                self.drop_want(lost, client)
            self.touch(lost)
            edge = lost.dependents_head
            while edge != NULL:
                if (<Task>edge.child).code != MEMORY:
                    stack.append(<Task>edge.child)
                edge = edge.next
        return 0

    cdef int try_unrunnable(self, Worker worker) except -1:
        """Have no-worker tasks that ``worker`` may fit placed again."""
        cdef Restrictions restrictions
        cdef PyObject* link
        cdef Task task
        for restrictions in list(self.state.unrunnable):
            if restrictions.loose or restrictions.empty or self.state.fits(restrictions, worker):
                link = restrictions.head
                while link != NULL:
                    task = <Task>link
                    link = task.link_next
                    task.flags |= F_TRY_AGAIN
                    self.touch(task)
        return 0

    cdef int workers_changed(self) except -1:
        if self.state.n_running > 0:
            self.no_workers_since = -1.0
        elif self.no_workers_since < 0:
            self.no_workers_since = self.now
        return 0

    # Events

    cdef int _dispatch(self, Event event) except -1:
        cdef int kind = event.kind
        if kind == E_TASK_FINISHED:
            return self._task_finished(<TaskFinished>event)
        if kind == E_KEYS_RELEASED:
            return self._keys_released(<KeysReleased>event)
        if kind == E_DATA_RELEASED:
            return self._data_released(<DataReleased>event)
        if kind == E_KEYS_ADDED:
            return self._keys_added(<KeysAdded>event)
        if kind == E_TASK_ERRED:
            return self._task_erred(<TaskErred>event)
        if kind == E_GRAPH_BEGUN:
            return self._graph_begun(<GraphBegun>event)
        if kind == E_GRAPH_SLICE_READY:
            return self._graph_slice_ready(<GraphSliceReady>event)
        if kind == E_GRAPH_ENDED:
            return self._graph_ended(<GraphEnded>event)
        if kind == E_GRAPH_FAILED:
            return self._graph_failed(<GraphFailed>event)
        if kind == E_LONG_RUNNING:
            return self._long_running(<LongRunning>event)
        if kind == E_RESCHEDULE_ASKED:
            return self._reschedule_asked(<RescheduleAsked>event)
        if kind == E_STEAL_ANSWERED:
            return self._steal_answered(<StealAnswered>event)
        if kind == E_WHO_HAS_ASKED:
            return self._who_has_asked(<WhoHasAsked>event)
        if kind == E_WORKER_REGISTERED:
            return self._worker_registered(<WorkerRegistered>event)
        if kind == E_WORKER_STATUS_CHANGED:
            return self._worker_status_changed(<WorkerStatusChanged>event)
        if kind == E_WORKER_LOST:
            return self._worker_lost(<WorkerLost>event)
        if kind == E_CLIENT_CONNECTED:
            return self._client_connected(<ClientConnected>event)
        if kind == E_CLIENT_GONE:
            return self._client_gone(<ClientGone>event)
        if kind == E_KEYS_WANTED:
            return self._keys_wanted(<KeysWanted>event)
        if kind == E_KEYS_CANCELLED:
            return self._keys_cancelled(<KeysCancelled>event)
        if kind == E_KEY_REPORT_ASKED:
            return self._key_report_asked(<KeyReportAsked>event)
        if kind == E_KEYS_RETRIED:
            return self._keys_retried(<KeysRetried>event)
        if kind == E_DATA_PLACED:
            return self._data_placed(<DataPlaced>event)
        if kind == E_REPLICA_MISSING:
            return self._replica_missing(<ReplicaMissing>event)
        if kind == E_REPLICAS_DROPPED:
            return self._replicas_dropped(<ReplicasDropped>event)
        if kind == E_REPLICAS_ASKED:
            return self._replicas_asked(<ReplicasAsked>event)
        if kind == E_RETIREMENT_BEGUN:
            return self._retirement_begun(<RetirementBegun>event)
        if kind == E_RETIREMENT_ABORTED:
            return self._retirement_aborted(<RetirementAborted>event)
        if kind == E_RESTRICTIONS_SET:
            return self._restrictions_set(<RestrictionsSet>event)
        if kind == E_RESOURCES_SET:
            return self._resources_set(<ResourcesSet>event)
        if kind == E_MESSAGE_REJECTED:
            return self._message_rejected(<MessageRejected>event)
        if kind == E_RESTARTED:
            return self._restarted(<Restarted>event)
        if kind == E_TIME_PASSED:
            return self._time_passed(<TimePassed>event)
        raise TypeError(f"no handler for {event!r}")

    # Events: tasks on workers

    cdef int _task_finished(self, TaskFinished event) except -1:
        cdef Worker worker = event.worker
        cdef Task task = self.state.tasks.get(event.key)
        if self.is_gone(worker, event.key):
            return 0
        if task is None:
            self.sink.free_key(worker, event.key, self.stimulus_id)
            return self.note("finished-unknown", event.key)
        if task.code == PROCESSING and task.worker is worker and event.run_id == task.run_id:
            return self.accept_data(task, worker, event, True)
        if find_replica(task, worker) != NULL:
            return self.note("finished-again", event.key)
        if event.run_id >= worker.first_run_id:
            # Whatever took that run back told this worker to free it, on this stream: its
            # data is on the way out. Another order to free would hit a later run.
            return self.note("finished-stale", event.key)
        # B3.3: a run from before the worker came back, which nobody told it to free. Its
        # result is as good as any if it was made by the same definition.
        if (
            event.run_id >= task.first_run_id
            and not task.flags & F_ACTOR
            and task.code != ERRED
            and (task.code != RELEASED or is_needed(task))
        ):
            self.note("finished-as-data", event.key)
            return self.accept_data(task, worker, event, False)
        self.note("finished-stale", event.key)
        if task.code == PROCESSING and task.worker is worker:
            # To free it there would take the run in force with it: start that one anew.
            task.flags |= F_WITHDRAWN
            return self.touch(task)
        return self.sink.free_key(worker, event.key, self.stimulus_id)

    cdef int accept_data(
        self, Task task, Worker worker, TaskFinished event, bint current
    ) except -1:
        cdef Prefix prefix = task.group.prefix
        cdef TypeInfo type_info = task.type_info
        if type_info is None or type_info.pickled is not event.type:
            task.type_info = self.state.intern_type(event.typename, event.type)
        if event.metadata:
            task.metadata = event.metadata
        self.state.set_nbytes(task, event.nbytes)
        self.state.add_replica(task, worker)
        if current:
            if event.has_compute:
                self.state.observe_duration(prefix, event.compute_seconds)
            if event.transfer_seconds > 0:
                prefix.transfer_seconds += event.transfer_seconds
        return self.touch(task)

    cdef int _task_erred(self, TaskErred event) except -1:
        cdef Worker worker = event.worker
        cdef Task task = self.state.tasks.get(event.key)
        cdef Task dependent
        cdef Edge* edge
        cdef list affected
        cdef TaskError error
        if self.is_gone(worker, event.key):
            return 0
        if task is None:
            self.sink.free_key(worker, event.key, self.stimulus_id)
            return self.note("erred-unknown", event.key)
        error = TaskError(
            event.exception,
            event.traceback,
            event.exception_text,
            event.traceback_text,
            task.key,
            [worker.address],
        )
        if task.code == PROCESSING and task.worker is worker and event.run_id == task.run_id:
            if task.retries > 0:
                task.retries -= 1
                task.flags |= F_WITHDRAWN
                self.note("retried", event.key)
                return self.touch(task)
            return self.fail(task, error)
        if task.code != MEMORY:
            if (
                task.code == PROCESSING
                and task.worker is worker
                and event.run_id < worker.first_run_id
            ):
                # Nobody told it to free that run, so it may take the one in force for done.
                task.flags |= F_WITHDRAWN
                self.touch(task)
            return self.note("erred-stale", event.key)
        # B2.8: the worker could not read a result that others hold.
        affected = []
        edge = task.dependents_head
        while edge != NULL:
            dependent = <Task>edge.child
            if dependent.code == PROCESSING and dependent.worker is worker:
                affected.append(dependent)
            edge = edge.next
        if not affected:
            return self.note("erred-stale", event.key)
        self.note("unreadable-input", event.key)
        if task.retries > 0:
            task.retries -= 1
            self.copy_gone(task, worker)
            self.sink.free_key(worker, task.key, self.stimulus_id)
            for dependent in affected:
                dependent.flags |= F_WITHDRAWN
                self.touch(dependent)
            return 0
        return self.fail(task, error)

    cdef int _keys_added(self, KeysAdded event) except -1:
        cdef Worker worker = event.worker
        cdef Task task
        if self.is_gone(worker, None):
            return 0
        for key in event.keys:
            task = self.state.tasks.get(key)
            if task is not None and (
                task.code == MEMORY
                or (task.code == PROCESSING and task.worker is worker)
            ):
                # While it was ordered here, a copy arrived from elsewhere: B2.6.
                if not task.flags & F_ACTOR and self.state.add_replica(task, worker):
                    self.touch(task)
            else:
                self.sink.remove_replica(worker, key, self.stimulus_id)
                self.note("copy-unwanted", key)
        return 0

    cdef int _data_released(self, DataReleased event) except -1:
        cdef Task task = self.state.tasks.get(event.key)
        if self.is_gone(event.worker, event.key):
            return 0
        # Nearly always the echo of an order of ours.
        if task is not None and self.copy_gone(task, event.worker):
            self.note("dropped-by-worker", event.key)
        return 0

    cdef int _long_running(self, LongRunning event) except -1:
        cdef Task task = self.state.tasks.get(event.key)
        if self.is_gone(event.worker, event.key):
            return 0
        if (
            task is None
            or task.code != PROCESSING
            or task.worker is not event.worker
            or event.run_id != task.run_id
        ):
            return self.note("long-running-stale", event.key)
        self.note("seceded", event.key)
        self.state.make_long_running(task)
        if event.compute_duration >= 0:
            self.state.observe_duration(task.group.prefix, event.compute_duration)
        return 0

    cdef int _reschedule_asked(self, RescheduleAsked event) except -1:
        cdef Task task = self.state.tasks.get(event.key)
        if event.worker is not None and self.is_gone(event.worker, event.key):
            return 0
        if (
            task is None
            or task.code != PROCESSING
            or (event.worker is not None and task.worker is not event.worker)
        ):
            return self.note("reschedule-stale", event.key)
        task.flags |= F_WITHDRAWN
        event.result = True
        return self.touch(task)

    cdef int _steal_answered(self, StealAnswered event) except -1:
        if self.is_gone(event.worker, event.key):
            return 0
        # No request is open: nothing but a late answer can arrive.
        return self.note("steal-answer-stale", event.key)

    def doubt(self, key):
        """Somebody asks for holders of ``key`` again, though there are some.

        They may be busy, or may no longer have it. After ``MAX_ASKED`` times the key is put
        into ``suspects``; the shell then asks the holders and reports ReplicaMissing (B4.6).
        """
        asked = self.doubts.get(key, 0) + 1
        if asked < MAX_ASKED:
            if len(self.doubts) >= MAX_DOUBTS:
                self.doubts.clear()
            self.doubts[key] = asked
            return
        self.doubts.pop(key, None)
        if len(self.suspects) < MAX_DOUBTS:
            self.suspects[key] = None

    cdef int _who_has_asked(self, WhoHasAsked event) except -1:
        cdef Task task
        cdef dict who_has = {}
        if self.is_gone(event.worker, None):
            return 0
        for key in event.keys:
            task = self.state.tasks.get(key)
            if task is None:
                self.sink.free_key(event.worker, key, self.stimulus_id)
            else:
                who_has[key] = [
                    address
                    for address in holder_addresses(task)
                    if address != event.worker.address
                ]
                if who_has[key]:
                    self.doubt(key)
        if who_has:
            self.sink.refresh_who_has(event.worker, who_has, self.stimulus_id)
        return 0

    # Events: workers

    cdef int _worker_registered(self, WorkerRegistered event) except -1:
        """Result: the Worker, or a str that says why it is refused."""
        cdef int code = worker_code(event.status)
        cdef Worker worker
        self.where = event.address
        if event.address in self.state.workers:
            event.result = f"address taken, {event.address}"
            return 0
        if event.name in self.state.workers_by_name:
            event.result = f"name taken, {event.name}"
            return 0
        if event.nthreads < 1:
            event.result = f"nthreads must be positive, got {event.nthreads}"
            return 0
        if code not in (W_INIT, W_RUNNING, W_PAUSED):
            event.result = f"a worker cannot register with status {event.status!r}"
            return 0
        worker = self.state.add_worker(
            event.address,
            event.name,
            event.host,
            event.server_id,
            event.nthreads,
            event.memory_limit,
            event.resources,
            W_INIT,
        )
        worker.info = event.info
        worker.peer = event.peer
        event.result = worker
        if code != W_INIT:
            self.state.set_worker_code(worker, code)
            self.workers_changed()
            if code == W_RUNNING:
                self.try_unrunnable(worker)
        return 0

    cdef int _worker_status_changed(self, WorkerStatusChanged event) except -1:
        cdef Worker worker = event.worker
        cdef int code = worker_code(event.status)
        if self.is_gone(worker, None):
            return 0
        if code < 0 or code == W_INIT or code == W_CLOSED:
            event.result = f"no such status: {event.status!r}"
            return self.note("status-unknown", event.status)
        if not self.state.set_worker_code(worker, code):
            return 0
        self.workers_changed()
        if code == W_RUNNING:
            self.try_unrunnable(worker)
        return 0

    cdef int _worker_lost(self, WorkerLost event) except -1:
        """O(what it held and ran)."""
        cdef Worker worker = event.worker
        cdef Worker other
        cdef PyObject* link
        cdef Task task
        self.where = worker.address
        if worker.code == W_CLOSED:
            return 0
        if not event.expected:
            self.blame(worker)
        self.state.set_worker_code(worker, W_CLOSED)
        self.workers_changed()
        link = worker.processing_head
        while link != NULL:
            task = <Task>link
            link = task.link_next
            task.flags |= F_WITHDRAWN
            self.touch(task)
        while worker.replicas_head != NULL:
            self.copy_gone(<Task>worker.replicas_head.task, worker)
        self.drain()
        self.state.drop_worker(worker)
        worker.peer = None
        for other in self.state.workers.values():
            self.sink.worker_removed(other, worker.address, self.stimulus_id)
        return 0

    def blame(self, Worker worker not None):
        """Hold the tasks that ``worker`` was executing responsible for its death.

        A stock worker tells what it executes only by heartbeat. Where that names none of
        its tasks, those are blamed that it can have been executing: the first by
        priority, one a thread, of those whose inputs were there, else of all.
        """
        cdef Task task
        processing = worker.processing
        suspects = [
            task
            for task in processing
            if task.key in worker.executing or task.flags & F_LONG_RUNNING
        ]
        if not suspects:
            ready = [task for task in processing if task.transfer_bytes == 0] or processing
            ready.sort(key=_priority)
            suspects = ready[: worker.nthreads]
        for task in suspects:
            task.suspicious += 1
            task.group.prefix.suspicious += 1
            self.note("suspected", task.key)
            if task.suspicious > self.settings.allowed_failures:
                self.fail_by_engine(
                    task,
                    "killed-worker",
                    {
                        "key": task.key,
                        "allowed_failures": self.settings.allowed_failures,
                        "worker": worker.address,
                        "name": worker.name,
                        "nthreads": worker.nthreads,
                        "memory_limit": worker.memory_limit,
                        "server_id": worker.server_id,
                    },
                )

    # Events: clients

    cdef int _client_connected(self, ClientConnected event) except -1:
        """Result: the Client. A live session of the same id must have ended before."""
        cdef Client client = self.state.client(event.client_id)
        self.where = event.client_id
        if client.peer is not None:
            raise ValueError(f"client {event.client_id!r} is connected already")
        client.info = event.info
        client.peer = event.peer
        event.result = client
        return 0

    cdef int _client_gone(self, ClientGone event) except -1:
        """O(what it wanted)."""
        cdef Client client = event.client
        cdef Submission submission
        self.where = client.id
        client.peer = None
        for submission in list(self.submissions.values()):
            if submission.client is client:
                self.close_submission(submission)
        while client.wants_head != NULL:
            self.drop_want(<Task>client.wants_head.task, client)
        self.drain()
        return self.state.drop_client(client)

    cdef int _keys_wanted(self, KeysWanted event) except -1:
        cdef Client client = self.state.client(event.client_id)
        cdef Task task
        self.where = client.id
        if event.client_id == FIRE_AND_FORGET:
            self.forgetful = client
        for key in event.keys:
            task = self.state.tasks.get(key)
            if task is None:
                task = self.task_without_graph(key)
            self.add_want(task, client)
            self.report(task, client)
        if client is self.forgetful:
            for key in event.keys:
                task = self.state.tasks[key]
                if task.code == MEMORY or task.code == ERRED:
                    self.drop_want(task, client)
        return 0

    def task_without_graph(self, key):
        group, prefix = group_name(key)
        return self.state.new_task(
            key, self.state.group(group, self.state.prefix(prefix, self.now)), self.now
        )

    cdef int _keys_released(self, KeysReleased event) except -1:
        cdef Client client = self.state.clients.get(event.client_id)
        cdef Task task
        self.where = event.client_id
        if client is None:
            return 0
        for key in event.keys:
            task = self.state.tasks.get(key)
            if task is not None:
                self.drop_want(task, client)
        return 0

    cdef int _keys_cancelled(self, KeysCancelled event) except -1:
        """O(keys and all that depends on them)."""
        cdef Client client = self.state.clients.get(event.client_id)
        cdef Client wanter
        cdef Task task
        cdef Edge* edge
        cdef dict seen = {}
        cdef list stack
        self.where = event.client_id
        if client is None:
            return 0
        stack = [self.state.tasks[key] for key in event.keys if key in self.state.tasks]
        while stack:
            task = stack.pop()
            if task in seen:
                continue
            if not event.force and task.n_wants > (find_want(task, client) != NULL):
                continue
            seen[task] = None
            edge = task.dependents_head
            while edge != NULL:
                stack.append(<Task>edge.child)
                edge = edge.next
        for task in seen:
            for wanter in task.who_wants:
                self.sink.cancelled_keys(wanter, [task.key], event.reason, event.message)
                self.drop_want(task, wanter)
            self.note("cancelled", task.key)
        return 0

    cdef int _key_report_asked(self, KeyReportAsked event) except -1:
        cdef Client client = self.state.clients.get(event.client_id)
        cdef Task task = self.state.tasks.get(event.key)
        self.where = event.client_id
        if client is None:
            return 0
        if task is None:
            return self.sink.cancelled_keys(client, [event.key], "unknown key", None)
        return self.report(task, client)

    cdef int _keys_retried(self, KeysRetried event) except -1:
        """Result: list of the keys that run again."""
        cdef Task task
        cdef dict seen = {}
        cdef list stack = []
        cdef int i
        self.where = event.client_id
        for key in event.keys:
            task = self.state.tasks.get(key)
            if task is not None and task.code == ERRED:
                stack.append(task)
        while stack:
            task = stack.pop()
            if task in seen:
                continue
            seen[task] = None
            for i in range(task.n_dependencies):
                if dependency_at(task, i).code == ERRED:
                    stack.append(dependency_at(task, i))
        for task in seen:
            if has_own_error(task) and task.run_spec is not None:
                task.flags |= F_TRY_AGAIN
                task.suspicious = 0
                task.retries = <short>task.annotations.retries
                self.touch(task)
        event.result = [task.key for task in seen]
        return 0

    # Events: graphs

    cdef int _graph_begun(self, GraphBegun event) except -1:
        """Result: None, or the list of dependencies that nobody knows: refused."""
        cdef Client client = self.state.clients.get(event.client_id)
        cdef Submission submission
        cdef Task task
        cdef Task parent
        cdef list missing = []
        self.where = event.client_id
        if event.submission in self.submissions:
            raise ValueError(f"submission {event.submission} is open already")
        if client is None:
            event.result = list(event.externals)
            return self.note("graph-without-client", event.client_id)
        for key in event.externals:
            task = self.state.tasks.get(key)
            if task is None or (task.flags & F_LOST and task.n_replicas == 0):
                missing.append(key)
        if missing:
            event.result = missing
            self.sink.cancelled_keys(client, list(event.wanted), "lost dependencies", None)
            return self.note("graph-lost-dependencies", missing[0])
        submission = Submission.__new__(Submission)
        submission.id = event.submission
        submission.client = client
        submission.n_tasks = event.n_tasks
        submission.user_priority = event.user_priority
        submission.actors = event.actors
        submission.tasks = []
        submission.prefixes = []
        submission.groups = []
        submission.annotations = []
        submission.externals = [self.state.tasks[key] for key in event.externals]
        submission.remaining = <int32_t*>PyMem_Calloc(max(1, event.n_tasks), sizeof(int32_t))
        if submission.remaining == NULL:
            raise MemoryError(f"no memory for a graph of {event.n_tasks} tasks")
        parent = self.state.tasks.get(event.submitting_task)
        if parent is not None:
            # A nested submission goes ahead of what its parent's peers submit later.
            submission.generation = parent.generation - 0.01
        else:
            if self.last_graph_time + event.fifo_timeout < self.now:
                self.generation += 1
                self.last_graph_time = self.now
            submission.generation = self.generation
        for task in submission.externals:
            task.n_future += 1
            self.touch(task)
        for key in event.wanted_externals:
            task = self.state.tasks.get(key)
            if task is None or (task.flags & F_LOST and task.n_replicas == 0):
                self.sink.cancelled_keys(client, [key], "lost dependencies", None)
                continue
            self.add_want(task, client)
            self.report(task, client)
        self.submissions[submission.id] = submission
        return 0

    cdef int _graph_slice_ready(self, GraphSliceReady event) except -1:
        cdef Submission submission = self.submissions.get(event.submission)
        cdef Py_ssize_t n = len(event.keys)
        cdef Py_ssize_t i, j
        cdef Py_ssize_t at = 0
        cdef const int32_t* counts
        cdef const int32_t* dependencies
        cdef const int32_t* future
        cdef const int32_t* group_index
        cdef const int32_t* annotation_index
        cdef const int32_t* group_prefix
        cdef const double* order
        cdef const uint8_t* flags
        cdef int32_t index
        cdef int64_t start = event.start
        cdef list parents
        cdef list arrived = []
        cdef Task parent
        cdef Task task
        cdef list group
        cdef Group found
        if submission is None:
            # Its client is gone, or all was restarted.
            return self.note("graph-part-late", event.submission)
        self.where = submission.client.id
        if start != len(submission.tasks) or start + n > submission.n_tasks:
            raise ValueError(
                f"submission {submission.id}: slice of {n} tasks at {start}, "
                f"{len(submission.tasks)} of {submission.n_tasks} are there"
            )
        for name, field, size in (
            ("dependency_counts", event.dependency_counts, 4 * n),
            ("order", event.order, 8 * n),
            ("flags", event.flags, n),
            ("future_dependents", event.future_dependents, 4 * n),
            ("group_index", event.group_index, 4 * n),
            ("annotation_index", event.annotation_index, 4 * n),
            ("new_group_prefix", event.new_group_prefix, 4 * len(event.new_groups)),
        ):
            if len(field) != size:
                raise ValueError(
                    f"submission {submission.id}: {name} has {len(field)} bytes, not {size}"
                )
        if len(event.run_specs) != n:
            raise ValueError(f"submission {submission.id}: {len(event.run_specs)} run_specs of {n}")
        counts = <const int32_t*><const char*>event.dependency_counts
        dependencies = <const int32_t*><const char*>event.dependencies
        future = <const int32_t*><const char*>event.future_dependents
        group_index = <const int32_t*><const char*>event.group_index
        annotation_index = <const int32_t*><const char*>event.annotation_index
        group_prefix = <const int32_t*><const char*>event.new_group_prefix
        order = <const double*><const char*>event.order
        flags = <const uint8_t*><const char*>event.flags
        submission.prefixes.extend(event.new_prefixes)
        for i in range(len(event.new_groups)):
            submission.groups.append(
                [event.new_groups[i], submission.prefixes[group_prefix[i]], None]
            )
        for annotations in event.new_annotations:
            submission.annotations.append(self.make_annotations(submission, annotations))
        for i in range(n):
            parents = []
            if (at + counts[i]) * 4 > len(event.dependencies):
                raise ValueError(f"submission {submission.id}: dependencies are cut short")
            for j in range(counts[i]):
                index = dependencies[at + j]
                if index < 0:
                    parent = submission.externals[-(index + 1)]
                elif index >= start + i:
                    raise ValueError(
                        f"submission {submission.id}: {event.keys[i]!r} comes before its input"
                    )
                else:
                    parent = submission.tasks[index]
                    if index < start:
                        arrived.append(index)
                parents.append(parent)
            at += counts[i]
            group = submission.groups[group_index[i]]
            found = group[2]
            task = self.state.tasks.get(event.keys[i])
            if (found is None or found.n_tasks == 0) and (task is None or task.run_spec is None):
                # Made only when it gets a member: an empty group would never be swept.
                found = self.state.group(group[0], self.state.prefix(group[1], self.now))
                group[2] = found
            self.add_row(
                submission,
                event.keys[i],
                start + i,
                order[i],
                flags[i],
                found,
                None if annotation_index[i] < 0 else submission.annotations[annotation_index[i]],
                event.run_specs[i],
                parents,
            )
            task = submission.tasks[start + i]
            if future[i]:
                submission.remaining[start + i] = future[i]
                task.n_future += future[i]
        # Only when the new tasks have taken their places do they hold what they depend on:
        # a pin that went before would let an input go that is needed in the next moment.
        self.drain()
        for number in arrived:
            submission.remaining[<int64_t>number] -= 1
            task = submission.tasks[number]
            task.n_future -= 1
            self.touch(task)
        return 0

    cdef int add_row(
        self, Submission submission, object key, Py_ssize_t index, double order, int flags,
        Group group, Annotations annotations, object run_spec, list parents
    ) except -1:
        """Insert one task of a graph. O(dependencies)."""
        cdef ClusterState state = self.state
        cdef Task task = state.tasks.get(key)
        cdef Task parent
        cdef Annotations notes
        cdef bint defined = True
        if task is None:
            task = state.new_task(key, group, self.now)
        elif task.run_spec is not None:
            defined = False
            task.flags &= ~F_LOST
            self.compare_definition(task, parents)
        elif _reaches(parents, task):
            defined = False
            state.sweep_group(group)
            self.fail_by_engine(task, "cycle", {"key": key})
        else:
            if task.code == ERRED:
                # An earlier graph for it failed to open; this one did not.
                task.flags |= F_TRY_AGAIN
                self.settle(task)
            state.regroup(task, group)
        submission.tasks.append(task)
        if defined:
            notes = state.no_annotations if annotations is None else annotations
            state.define_task(task, run_spec, notes, parents)
            task.flags &= ~F_LOST
            task.user_priority = (
                notes.user_priority if notes.user_priority != 0 else submission.user_priority
            )
            task.generation = submission.generation
            task.order = order
            if flags & 2:
                task.flags |= F_DATA_PRODUCER
            if flags & 8:
                task.flags |= F_PURE_DATA
            if task.n_replicas > 0:
                # Data was placed under this key before: it is no actor.
                pass
            elif submission.actors is True:
                if flags & 1:
                    task.flags |= F_ACTOR
            elif submission.actors and key in submission.actors:
                task.flags |= F_ACTOR
        if flags & 1:
            self.add_want(task, submission.client)
            self.report(task, submission.client)
        if defined and task.n_replicas == 0:
            for parent in parents:
                if parent.flags & F_LOST and parent.code != MEMORY:
                    self.lose(task, "lost dependencies")
                    break
        return self.touch(task)

    def compare_definition(self, Task task, list parents):
        cdef Task parent
        cdef int i
        if len(parents) == task.n_dependencies:
            known = {dependency_at(task, i).key for i in range(task.n_dependencies)}
            if all(parent.key in known for parent in parents):
                return
        if task.n_dependencies or parents:
            self.note("definition-kept", task.key)

    def make_annotations(self, Submission submission, dict fields):
        workers = fields.get("workers")
        return Annotations(
            submission.user_priority
            if fields.get("user_priority") is None
            else fields["user_priority"],
            max(0, min(fields.get("retries") or 0, MAX_RETRIES)),
            self.state.intern_restrictions(
                tuple(sorted(set(workers), key=str)) if workers else (),
                (),
                dict(fields.get("resources") or {}),
                bool(fields.get("allow_other_workers")),
            ),
            fields.get("wire"),
        )

    cdef int _graph_ended(self, GraphEnded event) except -1:
        cdef Submission submission = self.submissions.get(event.submission)
        if submission is None:
            return self.note("graph-part-late", event.submission)
        self.where = submission.client.id
        if len(submission.tasks) != submission.n_tasks:
            raise ValueError(
                f"submission {submission.id} ended with {len(submission.tasks)} tasks of "
                f"{submission.n_tasks}"
            )
        return self.close_submission(submission)

    cdef int close_submission(self, Submission submission) except -1:
        """Give up what a submission pins: it is complete, or will never be. O(its tasks)."""
        cdef Task task
        cdef Py_ssize_t i
        del self.submissions[submission.id]
        for i in range(len(submission.tasks)):
            if submission.remaining[i]:
                task = submission.tasks[i]
                task.n_future -= submission.remaining[i]
                self.touch(task)
        for task in submission.externals:
            task.n_future -= 1
            self.touch(task)
        return 0

    cdef int _graph_failed(self, GraphFailed event) except -1:
        cdef Client client = self.state.clients.get(event.client_id)
        cdef Submission submission = self.submissions.get(event.submission)
        cdef Task task
        self.where = event.client_id
        if submission is not None:
            self.close_submission(submission)
        if client is None:
            return 0
        for key in event.keys:
            task = self.state.tasks.get(key)
            if task is None:
                task = self.task_without_graph(key)
            self.add_want(task, client)
            error = TaskError(
                event.exception,
                event.traceback,
                event.exception_text,
                event.traceback_text,
                key,
                [],
            )
            if task.run_spec is not None or task.code == MEMORY:
                # Its definition came with another graph, or with a slice before the failure.
                self.report(task, client)
            elif task.code == ERRED:
                task.error = error
                self.report(task, client)
            else:
                self.fail(task, error)
        return self.note("graph-failed", event.client_id)

    # Events: data

    cdef int _data_placed(self, DataPlaced event) except -1:
        cdef Client client = None
        cdef Worker worker
        cdef Task task
        cdef bint reported
        self.where = event.client_id
        if event.client_id is not None:
            client = self.state.client(event.client_id)
        for key, addresses in event.who_has.items():
            task = self.state.tasks.get(key)
            if task is None:
                task = self.task_without_graph(key)
            reported = task.code == MEMORY
            if key in event.nbytes:
                self.state.set_nbytes(task, event.nbytes[key])
            for address in addresses:
                worker = self.state.workers.get(address)
                if worker is None:
                    self.note("placed-on-unknown-worker", key)
                elif task.flags & F_ACTOR:
                    self.note("placed-for-actor", key)
                else:
                    self.state.add_replica(task, worker)
            if client is not None and self.add_want(task, client) and reported:
                self.report(task, client)
            if task.n_replicas == 0 and task.run_spec is None:
                self.lose(task, "lost data")
            self.touch(task)
        return 0

    cdef int _replica_missing(self, ReplicaMissing event) except -1:
        cdef Task task
        if self.is_gone(event.worker, None):
            return 0
        for key in event.keys:
            task = self.state.tasks.get(key)
            if task is not None and self.copy_gone(task, event.worker):
                self.note("copy-missing", key)
                if not is_read_on(task, event.worker):
                    self.sink.remove_replica(event.worker, key, self.stimulus_id)
        return 0

    cdef int _replicas_dropped(self, ReplicasDropped event) except -1:
        """Result: the keys dropped.

        The last copy of a needed key stays (B4.3), and so does one that a run on the worker
        reads: the run would fail, and a worker that is told to drop it gives up altogether.
        """
        cdef Task task
        event.result = []
        if self.is_gone(event.worker, None):
            return 0
        for key in event.keys:
            task = self.state.tasks.get(key)
            if task is None or (task.n_replicas < 2 and is_needed(task)):
                continue
            if event.send and is_read_on(task, event.worker):
                continue
            if self.state.remove_replica(task, event.worker):
                if event.send:
                    self.sink.remove_replica(event.worker, key, self.stimulus_id)
                event.result.append(key)
                self.touch(task)
        return 0

    cdef int _replicas_asked(self, ReplicasAsked event) except -1:
        """Result: the keys that ``worker`` was told to fetch."""
        cdef Task task
        cdef dict who_has = {}
        cdef dict nbytes = {}
        event.result = []
        if self.is_gone(event.worker, None):
            return 0
        for key in event.keys:
            task = self.state.tasks.get(key)
            if (
                task is not None
                and task.code == MEMORY
                and not task.flags & F_ACTOR
                and find_replica(task, event.worker) == NULL
            ):
                who_has[key] = holder_addresses(task)
                nbytes[key] = self.state.nbytes_of(task)
        event.result = list(who_has)
        if who_has:
            self.sink.acquire_replicas(event.worker, who_has, nbytes, self.stimulus_id)
        return 0

    cdef int _retirement_begun(self, RetirementBegun event) except -1:
        cdef Worker worker = event.worker
        self.where = worker.address
        if worker.code != W_RUNNING and worker.code != W_PAUSED:
            event.result = f"{worker.address} is {worker.status}"
            return 0
        self.state.set_worker_code(worker, W_CLOSING_GRACEFULLY)
        self.workers_changed()
        return self.sink.worker_status(worker, "closing_gracefully", self.stimulus_id)

    cdef int _retirement_aborted(self, RetirementAborted event) except -1:
        cdef Worker worker = event.worker
        cdef int code = worker_code(event.status)
        if self.is_gone(worker, None) or worker.code != W_CLOSING_GRACEFULLY:
            return 0
        if code != W_RUNNING and code != W_PAUSED:
            raise ValueError(f"a worker cannot go back to {event.status!r}")
        self.state.set_worker_code(worker, code)
        self.workers_changed()
        self.sink.worker_status(worker, event.status, self.stimulus_id)
        if code == W_RUNNING:
            self.try_unrunnable(worker)
        return 0

    # Events: operators and time

    cdef int _restrictions_set(self, RestrictionsSet event) except -1:
        """Result: the keys that nobody knows."""
        cdef Task task
        cdef Restrictions old
        event.result = []
        for key, workers in event.workers.items():
            task = self.state.tasks.get(key)
            if task is None:
                event.result.append(key)
                continue
            if task.code == NO_WORKER or task.code == QUEUED:
                task.flags |= F_TRY_AGAIN
                self.settle(task)
            old = task.annotations.restrictions
            self.state.set_restrictions(
                task,
                self.state.intern_restrictions(
                    tuple(sorted(set(workers), key=str)) if workers else (),
                    (),
                    old.resources,
                    old.loose,
                ),
            )
            self.touch(task)
        return 0

    cdef int _resources_set(self, ResourcesSet event) except -1:
        if self.is_gone(event.worker, None):
            return 0
        self.state.set_worker_resources(event.worker, event.resources)
        if event.worker.code == W_RUNNING:
            self.try_unrunnable(event.worker)
        return 0

    cdef int _message_rejected(self, MessageRejected event) except -1:
        """R1: whoever waits for the message must not wait for ever."""
        cdef Worker worker = event.worker
        cdef Task task
        cdef Client client
        self.where = event.client_id
        if worker is not None and self.is_gone(worker, None):
            return 0
        for key in event.keys:
            task = self.state.tasks.get(key)
            self.note("message-rejected", key)
            if worker is not None:
                if task is not None and task.code == PROCESSING and task.worker is worker:
                    task.suspicious += 1
                    if task.suspicious > self.settings.allowed_failures:
                        self.fail_by_engine(
                            task, "rejected", {"key": key, "reason": event.reason}
                        )
                    else:
                        task.flags |= F_WITHDRAWN
                        self.touch(task)
                elif task is None or find_replica(task, worker) == NULL:
                    self.sink.free_key(worker, key, self.stimulus_id)
            else:
                client = self.state.clients.get(event.client_id)
                if client is None:
                    continue
                payload, text = self.make_exception(
                    "rejected", {"key": key, "reason": event.reason}
                )
                self.sink.task_erred(client, key, TaskError(payload, None, text, "", key, []))
        return 0

    cdef int _restarted(self, Restarted event) except -1:
        """Drop every key of every client. O(tasks)."""
        cdef Client client
        cdef Submission submission
        for submission in list(self.submissions.values()):
            self.close_submission(submission)
        for client in list(self.state.clients.values()):
            while client.wants_head != NULL:
                self.drop_want(<Task>client.wants_head.task, client)
            if client.peer is None:
                self.state.drop_client(client)
            else:
                self.sink.restarted(client)
        return 0

    cdef int _time_passed(self, TimePassed event) except -1:
        """Fail tasks that no worker could take for longer than the setting allows."""
        cdef Restrictions restrictions
        cdef PyObject* link
        cdef Task task
        cdef double timeout = self.settings.no_workers_timeout
        if timeout < 0:
            return 0
        for restrictions in list(self.state.unrunnable):
            link = restrictions.head
            while link != NULL:
                task = <Task>link
                link = task.link_next
                if self.now - task.since < timeout:
                    break
                if restrictions.empty or not self.state.workers:
                    self.fail_by_engine(
                        task, "no-worker", {"key": task.key, "timeout": timeout}
                    )
                else:
                    self.fail_by_engine(
                        task,
                        "no-valid-worker",
                        {
                            "key": task.key,
                            "workers": restrictions.workers,
                            "hosts": restrictions.hosts,
                            "resources": restrictions.resources,
                            "timeout": timeout,
                        },
                    )
        if self.no_workers_since >= 0 and self.now - self.no_workers_since >= timeout:
            for task in self.state.queued.tasks:
                if self.now - task.since >= timeout:
                    self.fail_by_engine(
                        task, "no-worker", {"key": task.key, "timeout": timeout}
                    )
        return 0


def _priority(Task task):
    return task.priority, task.uid


def _reaches(list parents, Task goal):
    """Whether ``goal`` is among ``parents`` or what they depend on. O(ancestors)."""
    cdef Task task
    cdef int i
    if goal.n_dependents == 0:
        return goal in parents
    seen = set()
    stack = list(parents)
    while stack:
        task = stack.pop()
        if task is goal:
            return True
        if task.uid in seen:
            continue
        seen.add(task.uid)
        for i in range(task.n_dependencies):
            stack.append(dependency_at(task, i))
    return False
