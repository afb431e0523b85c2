"""What must hold between two events: every derived figure, recounted from what it stands for.

Owns no data and changes none. Each invariant is a function that appends, in words, what does
not hold; its docstring says what breaks then. ``TASK_INVARIANTS`` look at one task and its
neighbors, ``MACHINE_INVARIANTS`` at everything. Called by the machine in validate mode, by
the shell after an error, and by tests.
"""

from cpython.object cimport PyObject
from libc.stdint cimport int64_t

from cython_ext.cluster cimport ClusterState
from cython_ext.entities cimport (
    Client,
    Edge,
    F_ACTOR,
    F_ENLISTED,
    F_LONG_RUNNING,
    F_LOST,
    F_TRY_AGAIN,
    F_WITHDRAWN,
    Group,
    Prefix,
    PrefixLoad,
    Replica,
    Restrictions,
    Task,
    Want,
    Worker,
)
from cython_ext.graph cimport dependency_at
from cython_ext.heaps cimport TaskHeap, WorkerHeap, runs_before
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
    W_CLOSING_GRACEFULLY,
    W_PAUSED,
    W_RUNNING,
    WAITING,
)
from cython_ext.transitions cimport SchedulerMachine, Submission


__all__ = ["MACHINE_INVARIANTS", "TASK_INVARIANTS", "check", "check_task"]


cdef bint is_active(int code) noexcept:
    return WAITING <= code <= PROCESSING


# One task


def state_has_its_facts(SchedulerMachine machine, Task task, list broken):
    """Else a task is in a state that nothing will ever move it out of."""
    cdef int code = task.code
    name = TASK_STATE_NAMES[code] if code < N_TASK_STATES else code
    if code >= FORGOTTEN:
        broken.append(f"{task.key!r} is {name} and still on the books")
    if (code == MEMORY) != (task.n_replicas > 0):
        broken.append(f"{task.key!r} is {name} with {task.n_replicas} replicas")
    if (code == PROCESSING) != (task.worker is not None):
        broken.append(f"{task.key!r} is {name} on {task.worker}")
    if (code == ERRED) != (task.error is not None) and code != RELEASED:
        broken.append(f"{task.key!r} is {name} with error {task.error}")
    if is_active(code) and task.run_spec is None:
        broken.append(f"{task.key!r} is {name} without a definition")
    if task.run_spec is None and task.n_dependencies:
        broken.append(f"{task.key!r} has dependencies without a definition")
    if task.flags & F_LONG_RUNNING and code != PROCESSING:
        broken.append(f"{task.key!r} is {name} and long-running")
    if (task.load is not None) != (code == PROCESSING and not task.flags & F_LONG_RUNNING):
        broken.append(f"{task.key!r} is {name} and has load {task.load}")
    if code != PROCESSING and task.transfer_bytes:
        broken.append(f"{task.key!r} is {name} and transfers {task.transfer_bytes} bytes")
    if task.flags & F_WITHDRAWN:
        broken.append(f"{task.key!r} is {name} and still to be withdrawn")
    if task.flags & F_TRY_AGAIN and not (code == ERRED and task.n_erred > 0):
        broken.append(f"{task.key!r} is {name} and still to be tried again")
    if task.flags & F_LOST and (code == MEMORY or task.n_wants):
        broken.append(f"{task.key!r} is lost, but {name} and wanted by {task.n_wants}")
    if task.retries < 0 or task.suspicious < 0:
        broken.append(f"{task.key!r}: retries {task.retries}, suspicious {task.suspicious}")
    if code == PROCESSING and not task.first_run_id <= task.run_id < machine.state.next_run_id:
        broken.append(f"{task.key!r} runs as {task.run_id}, which was not issued for it")


def task_is_at_rest(SchedulerMachine machine, Task task, list broken):
    """Else a task waits for an event that has happened already."""
    if task.flags & F_ENLISTED:
        broken.append(f"{task.key!r} is on the worklist between events")
    expected = machine.expected_state(task)
    if expected != task.state:
        broken.append(f"{task.key!r} is {task.state}, its facts ask for {expected}")
    if task.code == WAITING and task.n_waiting == 0:
        broken.append(f"{task.key!r} waits for nothing")


def waiting_leads_somewhere(SchedulerMachine machine, Task task, list broken):
    """Else a task waits for an input that nobody computes: it hangs."""
    cdef Task other
    cdef int i
    if task.code != WAITING:
        return
    for i in range(task.n_dependencies):
        other = dependency_at(task, i)
        if other.code == MEMORY or is_active(other.code):
            continue
        if other.code == RELEASED and other.run_spec is None:
            continue
        broken.append(f"{task.key!r} waits for {other.key!r}, which is {other.state}")


def neighbor_counts(SchedulerMachine machine, Task task, list broken):
    """Else a task starts before its inputs, never starts, or its inputs leak."""
    cdef Task other
    cdef Edge* edge
    cdef int i
    cdef int waiting = 0
    cdef int erred = 0
    cdef int waiters = 0
    for i in range(task.n_dependencies):
        other = dependency_at(task, i)
        waiting += other.code != MEMORY
        erred += other.code == ERRED
    edge = task.dependents_head
    while edge != NULL:
        waiters += is_active((<Task>edge.child).code)
        edge = edge.next
    if (waiting, erred, waiters) != (task.n_waiting, task.n_erred, task.n_waiters):
        broken.append(
            f"{task.key!r}: n_waiting, n_erred, n_waiters are "
            f"{(task.n_waiting, task.n_erred, task.n_waiters)}, "
            f"recounted {(waiting, erred, waiters)}"
        )


def dependencies_mirrored(SchedulerMachine machine, Task task, list broken):
    """Else the end of a task is not heard by those who wait for it (or memory is corrupted)."""
    cdef ClusterState state = machine.state
    cdef Task other
    cdef Edge* edge
    cdef Edge* last = NULL
    cdef int i
    cdef int n = 0
    for i in range(task.n_dependencies):
        edge = &task.edges[i]
        other = <Task>edge.parent
        if edge.child != <PyObject*>task:
            broken.append(f"{task.key!r}: dependency {i} belongs to another task")
        if state.tasks.get(other.key) is not other:
            broken.append(f"{task.key!r} depends on {other.key!r}, which is not on the books")
        if edge.prev == NULL and other.dependents_head != edge:
            broken.append(f"{task.key!r} is not among the dependents of {other.key!r}")
        elif edge.prev != NULL and edge.prev.next != edge:
            broken.append(f"{task.key!r} is not linked as a dependent of {other.key!r}")
    edge = task.dependents_head
    while edge != NULL:
        if edge.parent != <PyObject*>task or edge.prev != last:
            broken.append(f"{task.key!r}: its dependents are linked wrongly")
            return
        last = edge
        n += 1
        edge = edge.next
    if last != task.dependents_tail or n != task.n_dependents:
        broken.append(f"{task.key!r}: n_dependents is {task.n_dependents}, recounted {n}")


def replicas_mirrored(SchedulerMachine machine, Task task, list broken):
    """Else data is believed where it is not, or stays on a worker for ever."""
    cdef Replica* replica = task.replicas_head
    cdef Replica* last = NULL
    cdef Worker worker
    cdef int n = 0
    cdef list seen = []
    while replica != NULL:
        worker = <Worker>replica.worker
        if replica.task != <PyObject*>task or replica.task_prev != last:
            broken.append(f"{task.key!r}: its replicas are linked wrongly")
            return
        if machine.state.workers.get(worker.address) is not worker:
            broken.append(f"{task.key!r} is held by {worker.address}, which is gone")
        if worker in seen:
            broken.append(f"{task.key!r} is held twice by {worker.address}")
        if task.flags & F_ACTOR and task.key not in worker.actors:
            broken.append(f"actor {task.key!r} is not among the actors of {worker.address}")
        seen.append(worker)
        last = replica
        n += 1
        replica = replica.task_next
    if last != task.replicas_tail or n != task.n_replicas:
        broken.append(f"{task.key!r}: n_replicas is {task.n_replicas}, recounted {n}")
    if (n >= 2) != (task in machine.state.replicated):
        broken.append(f"{task.key!r} has {n} replicas and is wrongly (not) in replicated")


def wants_mirrored(SchedulerMachine machine, Task task, list broken):
    """Else a client is not told of its result, or a key outlives all who want it."""
    cdef Want* want = task.wants_head
    cdef Want* last = NULL
    cdef Client client
    cdef int n = 0
    cdef list seen = []
    while want != NULL:
        client = <Client>want.client
        if want.task != <PyObject*>task or want.task_prev != last:
            broken.append(f"{task.key!r}: its wants are linked wrongly")
            return
        if machine.state.clients.get(client.id) is not client:
            broken.append(f"{task.key!r} is wanted by {client.id!r}, which is gone")
        if client in seen:
            broken.append(f"{task.key!r} is wanted twice by {client.id!r}")
        seen.append(client)
        last = want
        n += 1
        want = want.task_next
    if n != task.n_wants:
        broken.append(f"{task.key!r}: n_wants is {task.n_wants}, recounted {n}")


def lines_match_state(SchedulerMachine machine, Task task, list broken):
    """Else a task that can run is in no line, and never runs."""
    cdef TaskHeap queued = machine.state.queued
    if (task.code == QUEUED) != (task.heap_pos >= 0):
        broken.append(f"{task.key!r} is {task.state} at place {task.heap_pos} of a heap")
    elif task.code == QUEUED and not queued.contains(task):
        broken.append(f"{task.key!r} is queued and not in the queue")
    if task.code != PROCESSING and task.code != NO_WORKER:
        if task.link_prev != NULL or task.link_next != NULL:
            broken.append(f"{task.key!r} is {task.state} and in a list")


def task_is_filed(SchedulerMachine machine, Task task, list broken):
    """Else statistics and root-task detection count what is not there."""
    cdef ClusterState state = machine.state
    cdef Restrictions restrictions = task.annotations.restrictions
    if state.tasks.get(task.key) is not task:
        broken.append(f"{task.key!r} is filed under another key")
    if state.groups.get(task.group.name) is not task.group:
        broken.append(f"{task.key!r}: its group {task.group.name!r} is not on the books")
    if state.prefixes.get(task.group.prefix.name) is not task.group.prefix:
        broken.append(f"{task.key!r}: its prefix is not on the books")
    if restrictions.identity not in state.restrictions:
        broken.append(f"{task.key!r}: its restrictions are not on the books")


# The machine


def nothing_is_pending(SchedulerMachine machine, list broken):
    """Else an event ended half done, and what is left waits for an unrelated event."""
    if machine.pending_n:
        broken.append(f"{machine.pending_n} tasks are on the worklist between events")
    if machine.state.runnable.n:
        broken.append(f"{machine.state.runnable.n} tasks are to be placed between events")
    if machine.state.queued.n and machine.state.open_workers.n:
        broken.append(
            f"{machine.state.queued.n} tasks are queued and "
            f"{machine.state.open_workers.n} workers have an open slot"
        )


def counts_by_state(SchedulerMachine machine, list broken):
    """Else metrics, progress bars and root-task detection are wrong."""
    cdef ClusterState state = machine.state
    cdef Task task
    cdef Group group
    cdef Prefix prefix
    cdef int i
    cdef dict groups = {}
    cdef dict prefixes = {}
    cdef list total = [0] * N_TASK_STATES
    cdef int64_t nbytes
    for task in state.tasks.values():
        nbytes = max(0, task.nbytes) if task.code == MEMORY else 0
        total[task.code] += 1
        for book, key in ((groups, task.group), (prefixes, task.group.prefix)):
            counts = book.get(key)
            if counts is None:
                counts = book[key] = [[0] * N_TASK_STATES, 0]
            counts[0][task.code] += 1
            counts[1] += nbytes
    counted = [state.state_counts[i] for i in range(N_TASK_STATES)]
    if counted != total:
        broken.append(f"tasks by state: {counted}, recounted {total}")
    for group in state.groups.values():
        recount, size = groups.pop(group, ([0] * N_TASK_STATES, 0))
        counted = [group.counts[i] for i in range(N_TASK_STATES)]
        if counted != recount or group.n_tasks != sum(recount):
            broken.append(f"{group}: {counted}, recounted {recount}")
        if group.nbytes_total != size:
            broken.append(f"{group}: {group.nbytes_total} bytes, recounted {size}")
        if group.n_tasks == 0:
            broken.append(f"{group} is empty and still there")
    for prefix in state.prefixes.values():
        recount, size = prefixes.pop(prefix, ([0] * N_TASK_STATES, 0))
        counted = [prefix.counts[i] for i in range(N_TASK_STATES)]
        if counted != recount or prefix.n_tasks != sum(recount):
            broken.append(f"{prefix}: {counted}, recounted {recount}")
        if prefix.nbytes_total != size:
            broken.append(f"{prefix}: {prefix.nbytes_total} bytes, recounted {size}")
        n_groups = sum(1 for group in state.groups.values() if group.prefix is prefix)
        if prefix.n_groups != n_groups:
            broken.append(f"{prefix}: {prefix.n_groups} groups, recounted {n_groups}")
        if (prefix.n_tasks == 0) != (prefix.name in state.idle_prefixes):
            broken.append(f"{prefix} is wrongly (not) among the idle prefixes")
    if groups or prefixes:
        broken.append(f"not on the books: {list(groups)} {list(prefixes)}")
    for name, prefix in state.idle_prefixes.items():
        if state.prefixes.get(name) is not prefix:
            broken.append(f"idle {prefix} is not on the books")


def future_dependents(SchedulerMachine machine, list broken):
    """Else a task is forgotten before its dependents arrive, or is pinned for ever."""
    cdef Submission submission
    cdef Task task
    cdef Py_ssize_t i
    cdef dict expected = {}
    for submission in machine.submissions.values():
        for task in submission.externals:
            expected[task] = expected.get(task, 0) + 1
        for i in range(len(submission.tasks)):
            if submission.remaining[i] < 0:
                broken.append(f"submission {submission.id}: surplus dependents of task {i}")
            if submission.remaining[i]:
                task = submission.tasks[i]
                expected[task] = expected.get(task, 0) + submission.remaining[i]
        if machine.state.clients.get(submission.client.id) is not submission.client:
            broken.append(f"submission {submission.id} is open and its client is gone")
    for task in machine.state.tasks.values():
        if task.n_future != expected.pop(task, 0):
            broken.append(f"{task.key!r}: n_future is {task.n_future}, recounted otherwise")
    if expected:
        broken.append(f"pinned by a submission and not on the books: {list(expected)}")


def tasks_of_workers(SchedulerMachine machine, list broken):
    """Else a worker is thought busy or free when it is not, and resources leak."""
    cdef ClusterState state = machine.state
    cdef Worker worker
    cdef Task task
    cdef PyObject* link
    cdef PyObject* last
    cdef Replica* replica
    cdef Replica* before
    cdef PrefixLoad load
    cdef int64_t occupancy, network, nbytes, n, n_long, total = 0
    cdef int64_t n_processing = 0
    cdef int64_t n_replicas = 0
    cdef dict runs = {}
    for worker in state.workers.values():
        occupancy = network = n = n_long = 0
        loads = {}
        resources = {}
        link = worker.processing_head
        last = NULL
        while link != NULL:
            task = <Task>link
            if task.link_prev != last or task.worker is not worker or task.code != PROCESSING:
                broken.append(f"{worker.address}: its processing list is wrong at {task.key!r}")
                break
            n += 1
            if task.run_id in runs:
                broken.append(f"run {task.run_id} is in force twice")
            runs[task.run_id] = task
            if task.flags & F_LONG_RUNNING:
                n_long += 1
            else:
                occupancy += task.group.prefix.priced_ns
                network += task.transfer_bytes
                if task.transfer_bytes < 0:
                    broken.append(f"{task.key!r} transfers {task.transfer_bytes} bytes")
                loads[task.group.prefix] = loads.get(task.group.prefix, 0) + 1
                if task.load is not worker.loads.get(task.group.prefix):
                    broken.append(f"{task.key!r} counts in a load that is not its worker's")
            for name, amount in task.annotations.restrictions.resources.items():
                resources[name] = resources.get(name, 0) + amount
            last = link
            link = task.link_next
        if (n, n_long) != (worker.n_processing, worker.n_long_running):
            broken.append(
                f"{worker.address}: processing {worker.n_processing}, long-running "
                f"{worker.n_long_running}, recounted {n}, {n_long}"
            )
        if (occupancy, network) != (worker.occupancy_ns, worker.network_bytes):
            broken.append(
                f"{worker.address}: occupancy {worker.occupancy_ns} ns, network "
                f"{worker.network_bytes} bytes, recounted {occupancy}, {network}"
            )
        counted = {load.prefix: load.count for load in worker.loads.values()}
        if counted != loads:
            broken.append(f"{worker.address}: loads {counted}, recounted {loads}")
        for load in worker.loads.values():
            if load.worker != <PyObject*>worker or load not in load.prefix.loads:
                broken.append(f"{worker.address}: load of {load.prefix} is not mirrored")
        used = worker.used_resources
        for name in set(used) | set(resources):
            if abs(used.get(name, 0) - resources.get(name, 0)) > 1e-9:
                broken.append(f"{worker.address}: uses {used}, recounted {resources}")
                break
        n_processing += n
        total += occupancy
        nbytes = n = 0
        actors = []
        replica = worker.replicas_head
        before = NULL
        while replica != NULL:
            task = <Task>replica.task
            if replica.worker != <PyObject*>worker or replica.worker_prev != before:
                broken.append(f"{worker.address}: its replicas are linked wrongly")
                break
            if state.tasks.get(task.key) is not task:
                broken.append(f"{worker.address} holds {task.key!r}, which is not on the books")
            n += 1
            nbytes += state.nbytes_of(task)
            if task.flags & F_ACTOR:
                actors.append(task.key)
            before = replica
            replica = replica.worker_next
        n_replicas += n
        if (n, nbytes) != (worker.n_replicas, worker.nbytes):
            broken.append(
                f"{worker.address}: {worker.n_replicas} replicas, {worker.nbytes} bytes, "
                f"recounted {n}, {nbytes}"
            )
        if set(actors) != set(worker.actors):
            broken.append(f"{worker.address}: actors {list(worker.actors)}, recounted {actors}")
    if total != state.total_occupancy_ns:
        broken.append(f"total occupancy {state.total_occupancy_ns} ns, recounted {total}")
    if n_processing != state.state_counts[PROCESSING]:
        broken.append(f"{n_processing} tasks process on workers of the books")
    if n_replicas != sum(task.n_replicas for task in state.tasks.values()):
        broken.append(f"workers hold {n_replicas} replicas, tasks have others")
    for prefix in state.prefixes.values():
        for load in (<Prefix>prefix).loads:
            if (<Worker>load.worker).loads.get(prefix) is not load:
                broken.append(f"{prefix}: a load belongs to no worker of the books")


def replicated_tasks(SchedulerMachine machine, list broken):
    """Else the memory manager drops a last copy or never finds a surplus one."""
    for task in machine.state.replicated:
        if machine.state.tasks.get(task.key) is not task or task.n_replicas < 2:
            broken.append(f"{task.key!r} is in replicated with {task.n_replicas} replicas")


def worker_totals(SchedulerMachine machine, list broken):
    """Else root-task detection, scaling and the no-workers timeout go by wrong numbers."""
    cdef ClusterState state = machine.state
    cdef Worker worker
    cdef dict expected = dict.fromkeys(
        ("total_nthreads", "n_running", "n_paused", "n_retiring", "n_idle", "n_saturated"), 0
    )
    for worker in state.workers.values():
        expected["total_nthreads"] += worker.nthreads
        expected["n_running"] += worker.code == W_RUNNING
        expected["n_paused"] += worker.code == W_PAUSED
        expected["n_retiring"] += worker.code == W_CLOSING_GRACEFULLY
        expected["n_idle"] += worker.counted_idle
        expected["n_saturated"] += worker.counted_saturated
    for name, recount in expected.items():
        if getattr(state, name) != recount:
            broken.append(f"{name} is {getattr(state, name)}, recounted {recount}")
    for worker in state.workers.values():
        active = worker.n_processing - worker.n_long_running
        if bool(worker.counted_idle) != (worker.code == W_RUNNING and active < worker.nthreads):
            broken.append(f"{worker.address} is wrongly (not) idle with {active} active tasks")
        # Saturation compares with an average that others change: a necessary condition.
        if worker.counted_saturated and active <= worker.nthreads:
            broken.append(f"{worker.address} is saturated with {active} active tasks")
    if (machine.no_workers_since < 0) != (state.n_running > 0):
        broken.append(f"no workers since {machine.no_workers_since}, {state.n_running} run")


def worker_tables(SchedulerMachine machine, list broken):
    """Else a worker is found under a name that is another's, or not found at all."""
    cdef ClusterState state = machine.state
    cdef Worker worker
    for address, worker in state.workers.items():
        if worker.address != address:
            broken.append(f"{worker.address} is filed under {address}")
        if state.workers_by_name.get(worker.name) is not worker:
            broken.append(f"{address} is not found by its name {worker.name!r}")
        if state.slots[worker.slot] is not worker:
            broken.append(f"{address} is not in its slot {worker.slot}")
        if worker not in state.hosts.get(worker.host, {}):
            broken.append(f"{address} is not found by its host {worker.host}")
    n = len(state.workers)
    if len(state.workers_by_name) != n or sum(map(len, state.hosts.values())) != n:
        broken.append("names or hosts of workers that are gone")
    if sorted(state.free_slots) != [i for i, held in enumerate(state.slots) if held is None]:
        broken.append(f"free slots {state.free_slots} of {state.slots}")
    if not all(state.hosts.values()):
        broken.append("a host without workers")


def heaps_are_ordered(SchedulerMachine machine, list broken):
    """Else the next task or worker chosen is not the best one, or is none at all."""
    cdef ClusterState state = machine.state
    cdef TaskHeap tasks
    cdef WorkerHeap workers
    cdef Worker worker
    cdef Py_ssize_t i
    for tasks in (state.queued, state.runnable):
        for i in range(tasks.n):
            if (<Task>tasks.items[i]).heap_pos != i:
                broken.append(f"{<Task>tasks.items[i]} does not know its place in its heap")
            if i and runs_before(<Task>tasks.items[i], <Task>tasks.items[(i - 1) >> 1]):
                broken.append(f"{<Task>tasks.items[i]} is below a task that runs later")
    if state.queued.n != state.state_counts[QUEUED]:
        broken.append(f"{state.queued.n} tasks in the queue, {state.state_counts[QUEUED]} queued")
    for workers, attribute in ((state.open_workers, "open"), (state.by_load, "load")):
        for i in range(workers.n):
            worker = <Worker>workers.items[i]
            if (worker.pos_open if attribute == "open" else worker.pos_load) != i:
                broken.append(f"{worker.address} does not know its place by {attribute}")
            if state.workers.get(worker.address) is not worker:
                broken.append(f"{worker.address} is ranked by {attribute} and gone")
            if i and workers._before(workers.items[i], workers.items[(i - 1) >> 1]):
                broken.append(f"{worker.address} is ranked wrongly by {attribute}")
    for worker in state.workers.values():
        runs = worker.code == W_RUNNING
        active = worker.n_processing - worker.n_long_running
        if (worker.pos_load >= 0) != runs:
            broken.append(f"{worker.address} is wrongly (not) ranked by load")
        if (worker.pos_open >= 0) != (runs and active < worker.max_active):
            broken.append(f"{worker.address} is wrongly (not) among the open workers")


def unrunnable_tasks(SchedulerMachine machine, list broken):
    """Else a task that no worker fitted is not tried when one comes."""
    cdef ClusterState state = machine.state
    cdef Restrictions restrictions
    cdef PyObject* link
    cdef PyObject* last
    cdef Task task
    cdef Worker worker
    cdef int64_t n
    cdef int64_t total = 0
    for restrictions in state.unrunnable:
        n = 0
        last = NULL
        link = restrictions.head
        while link != NULL:
            task = <Task>link
            if (
                task.code != NO_WORKER
                or task.link_prev != last
                or task.annotations.restrictions is not restrictions
            ):
                broken.append(f"{task.key!r} is wrongly among those that no worker fits")
                break
            n += 1
            last = link
            link = task.link_next
        if last != restrictions.tail or n != restrictions.n_unrunnable or n == 0:
            broken.append(f"{restrictions}: {restrictions.n_unrunnable}, recounted {n}")
        total += n
        for worker in state.workers.values():
            if worker.code == W_RUNNING and (
                restrictions.loose or state.fits(restrictions, worker)
            ):
                broken.append(f"{n} tasks have no worker, but {worker.address} fits")
                break
    if total != state.state_counts[NO_WORKER]:
        broken.append(f"{total} tasks listed as without worker")


def restrictions_table(SchedulerMachine machine, list broken):
    """Else demands that nobody has pile up, or workers that fit are overlooked."""
    cdef ClusterState state = machine.state
    cdef Restrictions restrictions
    cdef Task task
    cdef Worker worker
    cdef dict counts = {state.unrestricted: 0}
    for task in state.tasks.values():
        restrictions = task.annotations.restrictions
        counts[restrictions] = counts.get(restrictions, 0) + 1
    for restrictions, n in counts.items():
        if restrictions.n_tasks != n:
            broken.append(f"{restrictions}: {restrictions.n_tasks} tasks, recounted {n}")
        if restrictions.fitting_epoch == state.topology_epoch:
            fitting = []
            for worker in state.workers.values():
                if worker.code == W_RUNNING and state.fits(restrictions, worker):
                    fitting.append(worker)
            if set(restrictions.fitting) != set(fitting):
                broken.append(f"{restrictions}: fitting workers are outdated")
    for identity, restrictions in state.restrictions.items():
        if restrictions not in counts or restrictions.identity != identity:
            broken.append(f"{restrictions} is kept for no task")


def clients_table(SchedulerMachine machine, list broken):
    """Else a client's end does not release what it wanted."""
    cdef ClusterState state = machine.state
    cdef Client client
    cdef Want* want
    cdef Want* last
    cdef int64_t n
    cdef int64_t total = 0
    for client_id, client in state.clients.items():
        if client.id != client_id:
            broken.append(f"{client.id!r} is filed under {client_id!r}")
        n = 0
        last = NULL
        want = client.wants_head
        while want != NULL:
            if want.client != <PyObject*>client or want.client_prev != last:
                broken.append(f"{client_id!r}: its wants are linked wrongly")
                break
            n += 1
            last = want
            want = want.client_next
        if n != client.n_wants or last != client.wants_tail:
            broken.append(f"{client_id!r}: wants {client.n_wants}, recounted {n}")
        total += n
    if total != sum(task.n_wants for task in state.tasks.values()):
        broken.append(f"clients want {total} keys, tasks are wanted otherwise")


TASK_INVARIANTS = (
    state_has_its_facts,
    task_is_at_rest,
    waiting_leads_somewhere,
    neighbor_counts,
    dependencies_mirrored,
    replicas_mirrored,
    wants_mirrored,
    lines_match_state,
    task_is_filed,
)
MACHINE_INVARIANTS = (
    nothing_is_pending,
    counts_by_state,
    future_dependents,
    tasks_of_workers,
    replicated_tasks,
    worker_totals,
    worker_tables,
    heaps_are_ordered,
    unrunnable_tasks,
    restrictions_table,
    clients_table,
)


cpdef list check(SchedulerMachine machine):
    """Everything that does not hold, in words; an empty list when all does. O(tasks).

    Between two events only: within one, the books are being changed.
    """
    cdef list broken = []
    cdef Task task
    for task in machine.state.tasks.values():
        for invariant in TASK_INVARIANTS:
            invariant(machine, task, broken)
    for invariant in MACHINE_INVARIANTS:
        invariant(machine, broken)
    return broken


cpdef list check_task(SchedulerMachine machine, Task task):
    """What does not hold around ``task``, in words. O(its neighbors, copies and wants)."""
    cdef list broken = []
    for invariant in TASK_INVARIANTS:
        invariant(machine, task, broken)
    return broken
