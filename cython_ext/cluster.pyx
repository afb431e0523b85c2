"""The scheduler's books: every record, every relation, every total.

Owns all data of the scheduler machine and keeps each derived figure (counts by state,
occupancy, open slots, idle workers, stored bytes, replicated tasks) in the function that
changes what it is derived from. Decides nothing and sends nothing: ``transitions`` and
``placement`` do. Occupancy is counted in whole nanoseconds, so that sums are exact.

Cost of each method is O(1) or O(log workers) unless its docstring says otherwise.
"""

cimport cython
from libc.math cimport ceil, isinf

from cython_ext.entities cimport (
    F_LONG_RUNNING,
    Replica,
    Want,
)
from cython_ext.graph cimport (
    clear_dependencies,
    dependency_at,
    find_replica,
    find_want,
    link_processing,
    link_replica,
    link_want,
    set_dependencies,
    unlink_processing,
    unlink_replica,
    unlink_want,
)
from cython_ext.heaps cimport BY_LOAD, BY_OPEN_SLOTS
from cython_ext.states cimport (
    ERRED,
    FORGOTTEN,
    MEMORY,
    RELEASED,
    W_CLOSED,
    W_CLOSING_GRACEFULLY,
    W_PAUSED,
    W_RUNNING,
)

# Unique names would make these tables grow without end.
cdef Py_ssize_t MAX_INTERNED_TYPES = 10_000


@cython.final
cdef class EngineSettings:
    """Numbers that the engine goes by. Given by keyword; times in seconds.

    Raises TypeError for an unknown name and ValueError for an impossible value.
    """

    def __init__(
        self,
        *,
        int allowed_failures=3,
        double worker_saturation=1.1,
        double bandwidth=100e6,
        int64_t default_data_size=1024,
        double unknown_task_duration=0.5,
        default_task_durations=None,
        int rootish_taskgroup=5,
        int rootish_taskgroup_dependencies=5,
        int placement_candidates=16,
        no_workers_timeout=None,
        int64_t journal_length=16384,
        int64_t prefix_limit=1000,
        str validate="off",
        int64_t first_run_id=0,
    ):
        if worker_saturation <= 0:
            raise ValueError(f"worker_saturation must be positive, got {worker_saturation}")
        if bandwidth <= 0:
            raise ValueError(f"bandwidth must be positive, got {bandwidth}")
        if unknown_task_duration <= 0:
            raise ValueError(
                f"unknown_task_duration must be positive, got {unknown_task_duration}"
            )
        if placement_candidates < 1:
            raise ValueError(f"placement_candidates must be positive, got {placement_candidates}")
        if validate not in ("event", "turn", "off"):
            raise ValueError(f"validate must be event, turn or off, got {validate!r}")
        self.allowed_failures = allowed_failures
        self.worker_saturation = worker_saturation
        self.bandwidth = bandwidth
        self.default_data_size = default_data_size
        self.unknown_duration = unknown_task_duration
        self.default_durations = dict(default_task_durations or {})
        self.rootish_groups = rootish_taskgroup
        self.rootish_dependencies = rootish_taskgroup_dependencies
        self.placement_candidates = placement_candidates
        self.no_workers_timeout = -1.0 if no_workers_timeout is None else no_workers_timeout
        self.journal_length = journal_length
        self.prefix_limit = prefix_limit
        self.validate = validate
        self.first_run_id = first_run_id


@cython.final
cdef class ClusterState:
    """All records and totals. Read freely; changed by the scheduler machine alone."""

    def __cinit__(self, EngineSettings settings not None):
        self.settings = settings
        self.tasks = {}
        self.workers = {}
        self.workers_by_name = {}
        self.clients = {}
        self.prefixes = {}
        self.groups = {}
        self.idle_prefixes = {}
        self.hosts = {}
        self.replicated = {}
        self.unrunnable = {}
        self.restrictions = {}
        self.types = {}
        self.slots = []
        self.free_slots = []
        self.queued = TaskHeap()
        self.runnable = TaskHeap()
        self.open_workers = WorkerHeap(BY_OPEN_SLOTS, 1 / settings.bandwidth)
        self.by_load = WorkerHeap(BY_LOAD, 1 / settings.bandwidth)
        self.unrestricted = Restrictions((), (), {}, False)
        self.restrictions[self.unrestricted.identity] = self.unrestricted
        self.no_annotations = Annotations(0.0, 0, self.unrestricted, None)
        self.next_run_id = settings.first_run_id

    @property
    def task_counts(self):
        """dict[str, int]: tasks by state."""
        return {name: self.state_counts[code] for code, name in _state_names()}

    @property
    def total_occupancy(self):
        """float: seconds of work that all processing tasks stand for."""
        return self.total_occupancy_ns * 1e-9

    # Names: prefixes, groups, restrictions, types

    cdef Prefix prefix(self, str name, double now):
        cdef Prefix found = self.prefixes.get(name)
        cdef double known
        if found is None:
            found = Prefix(name)
            known = self.settings.default_durations.get(name, self.settings.unknown_duration)
            found.priced_ns = <int64_t>(known * 1e9)
            self.prefixes[name] = found
        elif found.n_tasks == 0:
            self.idle_prefixes.pop(name, None)
        found.last_used = now
        return found

    cdef Group group(self, str name, Prefix prefix):
        cdef Group found = self.groups.get(name)
        if found is None:
            found = Group(name, prefix)
            self.groups[name] = found
            prefix.n_groups += 1
        return found

    cdef Restrictions intern_restrictions(
        self, tuple workers, tuple hosts, dict resources, bint loose
    ):
        cdef Restrictions made
        cdef Restrictions found
        if not workers and not hosts and not resources:
            return self.unrestricted
        # Kept from the first task that has it to the last: what no task takes up is not.
        made = Restrictions(workers, hosts, resources, loose)
        found = self.restrictions.get(made.identity)
        return made if found is None else found

    cdef TypeInfo intern_type(self, str typename, bytes pickled):
        cdef TypeInfo found = self.types.get(pickled)
        if found is None or found.typename != typename:
            found = TypeInfo(typename, pickled)
            if len(self.types) >= MAX_INTERNED_TYPES:
                self.types.clear()
            self.types[pickled] = found
        return found

    # Tasks

    cdef Task new_task(self, object key, Group group, double now):
        """Make the record of ``key``: released, without definition."""
        cdef Task task = Task.__new__(Task)
        task.key = key
        task.group = group
        task.annotations = self.no_annotations
        task.uid = self.next_uid
        self.next_uid += 1
        task.first_run_id = self.next_run_id
        self.tasks[key] = task
        group.n_tasks += 1
        group.counts[RELEASED] += 1
        group.prefix.n_tasks += 1
        group.prefix.counts[RELEASED] += 1
        group.prefix.totals[RELEASED] += 1
        self.state_counts[RELEASED] += 1
        self.unrestricted.n_tasks += 1
        return task

    cdef int define_task(
        self, Task task, object run_spec, Annotations annotations, list parents
    ) except -1:
        """Give ``task`` its definition. O(number of parents)."""
        cdef Task parent
        cdef Group group = task.group
        cdef Restrictions known
        cdef int i
        if annotations.restrictions.n_tasks == 0:
            # Since they were interned, others may have come and equal ones be on the books.
            known = self.restrictions.get(annotations.restrictions.identity)
            if known is not None and known is not annotations.restrictions:
                annotations = Annotations(
                    annotations.user_priority, annotations.retries, known, annotations.wire
                )
        task.run_spec = run_spec
        task.retries = <short>annotations.retries
        task.first_run_id = self.next_run_id
        self.set_restrictions(task, annotations.restrictions)
        task.annotations = annotations
        set_dependencies(task, parents)
        task.n_waiting = 0
        task.n_erred = 0
        for i in range(task.n_dependencies):
            parent = dependency_at(task, i)
            if parent.code != MEMORY:
                task.n_waiting += 1
            if parent.code == ERRED:
                task.n_erred += 1
            if (
                parent.group is not group
                and len(group.dependencies) <= self.settings.rootish_groups
                and parent.group not in group.dependencies
            ):
                group.dependencies.append(parent.group)
        return 0

    cdef int regroup(self, Task task, Group group) except -1:
        """Move ``task`` (made before its graph was known) to ``group``."""
        cdef Group old = task.group
        if old is group:
            return 0
        # Joined first: a prefix that both share must not pass for one without tasks.
        group.n_tasks += 1
        group.counts[task.code] += 1
        group.prefix.n_tasks += 1
        group.prefix.counts[task.code] += 1
        if task.nbytes > 0 and task.code == MEMORY:
            group.nbytes_total += task.nbytes
            group.prefix.nbytes_total += task.nbytes
        self._leave_group(task)
        task.group = group
        return 0

    def _leave_group(self, Task task):
        cdef Group group = task.group
        cdef Prefix prefix = group.prefix
        group.n_tasks -= 1
        group.counts[task.code] -= 1
        prefix.n_tasks -= 1
        prefix.counts[task.code] -= 1
        if task.nbytes > 0 and task.code == MEMORY:
            group.nbytes_total -= task.nbytes
            prefix.nbytes_total -= task.nbytes
        self.sweep_group(group)

    cdef int set_restrictions(self, Task task, Restrictions restrictions) except -1:
        cdef Annotations old = task.annotations
        cdef Restrictions before = old.restrictions
        if before is restrictions:
            return 0
        before.n_tasks -= 1
        if restrictions.n_tasks == 0:
            self.restrictions.setdefault(restrictions.identity, restrictions)
        restrictions.n_tasks += 1
        task.annotations = Annotations(
            old.user_priority, old.retries, restrictions, old.wire
        )
        self._forget_restrictions(before)
        return 0

    def _forget_restrictions(self, Restrictions restrictions):
        if (
            restrictions.n_tasks == 0
            and not restrictions.empty
            and self.restrictions.get(restrictions.identity) is restrictions
        ):
            del self.restrictions[restrictions.identity]

    cdef int drop_task(self, Task task) except -1:
        """Take a forgotten task out of all books. O(number of its dependencies)."""
        cdef Restrictions restrictions = task.annotations.restrictions
        assert task.code == FORGOTTEN
        assert task.n_dependents == 0
        assert task.n_replicas == 0
        assert task.n_wants == 0
        assert task.worker is None
        clear_dependencies(task)
        restrictions.n_tasks -= 1
        if not restrictions.empty:
            self._forget_restrictions(restrictions)
        # FORGOTTEN counts in no table of living tasks.
        task.group.counts[FORGOTTEN] -= 1
        task.group.prefix.counts[FORGOTTEN] -= 1
        task.group.n_tasks -= 1
        task.group.prefix.n_tasks -= 1
        self.sweep_group(task.group)
        self.state_counts[FORGOTTEN] -= 1
        self.n_forgotten += 1
        del self.tasks[task.key]
        return 0

    cdef int sweep_group(self, Group group) except -1:
        """Forget ``group`` if it is empty, and file its prefix as idle if that is, too."""
        cdef Prefix prefix = group.prefix
        if group.n_tasks == 0:
            del self.groups[group.name]
            group.dependencies.clear()
            prefix.n_groups -= 1
        if prefix.n_tasks == 0:
            self.idle_prefixes[prefix.name] = prefix
            if len(self.idle_prefixes) > self.settings.prefix_limit:
                oldest = next(iter(self.idle_prefixes))
                del self.idle_prefixes[oldest]
                del self.prefixes[oldest]
        return 0

    cdef int count_state(self, Task task, int old, int new) except -1:
        """Book the change of ``task`` from state ``old`` to ``new``."""
        cdef Group group = task.group
        cdef Prefix prefix = group.prefix
        self.state_counts[old] -= 1
        self.state_counts[new] += 1
        group.counts[old] -= 1
        group.counts[new] += 1
        prefix.counts[old] -= 1
        prefix.counts[new] += 1
        prefix.totals[new] += 1
        if task.nbytes > 0:
            if new == MEMORY:
                group.nbytes_total += task.nbytes
                prefix.nbytes_total += task.nbytes
            elif old == MEMORY:
                group.nbytes_total -= task.nbytes
                prefix.nbytes_total -= task.nbytes
        return 0

    cdef int64_t take_run_id(self) except -1:
        cdef int64_t taken = self.next_run_id
        self.next_run_id += 1
        return taken

    # Replicas: the only two functions that change who_has and has_what

    cdef int add_replica(self, Task task, Worker worker) except -1:
        """Note that ``worker`` holds ``task``. Returns 1 if it is news, else 0."""
        if find_replica(task, worker) != NULL:
            return 0
        link_replica(task, worker)
        worker.nbytes += self.nbytes_of(task)
        if task.n_replicas == 2:
            self.replicated[task] = None
        self.refresh_worker(worker)
        return 1

    cdef int remove_replica(self, Task task, Worker worker) except -1:
        """Note that ``worker`` no longer holds ``task``. Returns 1 if it is news, else 0."""
        cdef Replica* replica = find_replica(task, worker)
        if replica == NULL:
            return 0
        unlink_replica(replica)
        worker.nbytes -= self.nbytes_of(task)
        if task.n_replicas == 1:
            del self.replicated[task]
        self.refresh_worker(worker)
        return 1

    cdef int set_nbytes(self, Task task, int64_t nbytes) except -1:
        """Note the size of a result. O(number of its replicas)."""
        cdef int64_t before = self.nbytes_of(task)
        cdef int64_t counted = task.nbytes if task.nbytes > 0 else 0
        cdef Replica* replica
        cdef Worker worker
        assert nbytes >= 0
        if task.nbytes == nbytes:
            return 0
        replica = task.replicas_head
        task.nbytes = nbytes
        while replica != NULL:
            worker = <Worker>replica.worker
            worker.nbytes += self.nbytes_of(task) - before
            self.refresh_worker(worker)
            replica = replica.task_next
        if task.code == MEMORY:
            task.group.nbytes_total += nbytes - counted
            task.group.prefix.nbytes_total += nbytes - counted
        return 0

    cdef int64_t nbytes_of(self, Task task) except -1:
        return task.nbytes if task.nbytes >= 0 else self.settings.default_data_size

    # Processing and occupancy

    cdef int add_processing(self, Task task, Worker worker, int64_t transfer_bytes) except -1:
        """Assign ``task`` to ``worker``, which must fetch ``transfer_bytes`` first."""
        cdef Prefix prefix = task.group.prefix
        cdef PrefixLoad load = worker.loads.get(prefix)
        cdef dict resources
        if load is None:
            load = PrefixLoad.__new__(PrefixLoad)
            load.worker = <PyObject*>worker
            load.prefix = prefix
            worker.loads[prefix] = load
            (<dict>prefix.loads)[load] = None
        load.count += 1
        task.load = load
        task.worker = worker
        task.transfer_bytes = transfer_bytes
        link_processing(task, worker)
        worker.occupancy_ns += prefix.priced_ns
        worker.network_bytes += transfer_bytes
        self.total_occupancy_ns += prefix.priced_ns
        resources = task.annotations.restrictions.resources
        if resources:
            for name, amount in resources.items():
                worker.used_resources[name] = worker.used_resources.get(name, 0) + amount
        self.refresh_worker(worker)
        return 0

    cdef int _release_load(self, Task task, Worker worker) except -1:
        cdef PrefixLoad load = task.load
        load.count -= 1
        worker.occupancy_ns -= load.prefix.priced_ns
        self.total_occupancy_ns -= load.prefix.priced_ns
        if load.count == 0:
            del worker.loads[load.prefix]
            del (<dict>load.prefix.loads)[load]
        task.load = None
        worker.network_bytes -= task.transfer_bytes
        task.transfer_bytes = 0
        return 0

    cdef int remove_processing(self, Task task) except -1:
        """Undo ``add_processing``."""
        cdef Worker worker = task.worker
        cdef dict resources
        if task.flags & F_LONG_RUNNING:
            worker.n_long_running -= 1
            task.flags &= ~F_LONG_RUNNING
        else:
            self._release_load(task, worker)
        unlink_processing(task, worker)
        task.worker = None
        resources = task.annotations.restrictions.resources
        if resources:
            for name, amount in resources.items():
                worker.used_resources[name] = worker.used_resources.get(name, 0) - amount
        self.refresh_worker(worker)
        return 0

    cdef int make_long_running(self, Task task) except -1:
        """``task`` seceded: it keeps its worker, but neither a slot nor occupancy."""
        cdef Worker worker = task.worker
        if task.flags & F_LONG_RUNNING:
            return 0
        self._release_load(task, worker)
        task.flags |= F_LONG_RUNNING
        worker.n_long_running += 1
        self.refresh_worker(worker)
        return 1

    cdef int observe_duration(self, Prefix prefix, double seconds) except -1:
        """Take a measured run time into the moving average of ``prefix``."""
        cdef int64_t measured_ns
        prefix.n_measured += 1
        prefix.compute_seconds += seconds
        if seconds > prefix.max_duration:
            prefix.max_duration = seconds
        if prefix.duration < 0:
            prefix.duration = seconds
        else:
            prefix.duration = 0.5 * prefix.duration + 0.5 * seconds
        measured_ns = <int64_t>(prefix.duration * 1e9)
        # Within a quarter the old price will do: a re-pricing visits each worker that
        # runs the prefix, so it must be rare.
        if 4 * abs(measured_ns - prefix.priced_ns) > prefix.priced_ns:
            self._price(prefix, measured_ns)
        return 0

    cdef int _price(self, Prefix prefix, int64_t priced_ns) except -1:
        """Change what a task of ``prefix`` counts. O(workers that run it)."""
        cdef PrefixLoad load
        cdef Worker worker
        cdef int64_t change
        cdef int64_t difference = priced_ns - prefix.priced_ns
        prefix.priced_ns = priced_ns
        for load in list(prefix.loads):
            worker = <Worker>load.worker
            change = difference * load.count
            worker.occupancy_ns += change
            self.total_occupancy_ns += change
            self.refresh_worker(worker)
        return 0

    # Tasks that no worker fits

    cdef int add_unrunnable(self, Task task) except -1:
        cdef Restrictions restrictions = task.annotations.restrictions
        task.link_next = NULL
        task.link_prev = restrictions.tail
        if task.link_prev == NULL:
            restrictions.head = <PyObject*>task
        else:
            (<Task>task.link_prev).link_next = <PyObject*>task
        restrictions.tail = <PyObject*>task
        restrictions.n_unrunnable += 1
        if restrictions.n_unrunnable == 1:
            self.unrunnable[restrictions] = None
        return 0

    cdef int remove_unrunnable(self, Task task) except -1:
        cdef Restrictions restrictions = task.annotations.restrictions
        if task.link_prev == NULL:
            restrictions.head = task.link_next
        else:
            (<Task>task.link_prev).link_next = task.link_next
        if task.link_next == NULL:
            restrictions.tail = task.link_prev
        else:
            (<Task>task.link_next).link_prev = task.link_prev
        task.link_prev = NULL
        task.link_next = NULL
        restrictions.n_unrunnable -= 1
        if restrictions.n_unrunnable == 0:
            del self.unrunnable[restrictions]
        return 0

    # Workers

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
    ):
        cdef Worker worker = Worker.__new__(Worker)
        cdef double slots = ceil(self.settings.worker_saturation * nthreads)
        worker.address = address
        worker.name = name
        worker.host = host
        worker.server_id = server_id
        worker.nthreads = nthreads
        worker.memory_limit = memory_limit
        worker.resources = resources
        worker.code = code
        worker.seq = self.next_seq
        worker.first_run_id = self.next_run_id
        self.next_seq += 1
        worker.max_active = 0 if isinf(slots) else max(1, <int>slots)
        if self.free_slots:
            worker.slot = self.free_slots.pop()
            self.slots[worker.slot] = worker
        else:
            worker.slot = len(self.slots)
            self.slots.append(worker)
        self.workers[address] = worker
        self.workers_by_name[name] = worker
        self.hosts.setdefault(host, {})[worker] = None
        self.total_nthreads += nthreads
        self.topology_epoch += 1
        if code == W_RUNNING:
            self.n_running += 1
            self.by_load.push(worker)
        self.refresh_worker(worker)
        return worker

    cdef int set_worker_code(self, Worker worker, int code) except -1:
        """Change the status of ``worker``."""
        cdef int old = worker.code
        if old == code:
            return 0
        worker.code = code
        self.topology_epoch += 1
        if old == W_RUNNING:
            self.n_running -= 1
            self.by_load.remove(worker)
        elif old == W_PAUSED:
            self.n_paused -= 1
        elif old == W_CLOSING_GRACEFULLY:
            self.n_retiring -= 1
        if code == W_RUNNING:
            self.n_running += 1
            self.by_load.push(worker)
        elif code == W_PAUSED:
            self.n_paused += 1
        elif code == W_CLOSING_GRACEFULLY:
            self.n_retiring += 1
        elif code == W_CLOSED:
            # Here, not when it is dropped: its tasks are placed anew in between.
            self.total_nthreads -= worker.nthreads
        self.refresh_worker(worker)
        return 1

    cdef int set_worker_resources(self, Worker worker, dict resources) except -1:
        worker.resources = resources
        self.topology_epoch += 1
        return 0

    cdef int drop_worker(self, Worker worker) except -1:
        """Take a worker out of all books; its tasks and replicas are gone already."""
        cdef dict on_host
        assert worker.n_processing == 0
        assert worker.n_replicas == 0
        self.set_worker_code(worker, W_CLOSED)
        del self.workers[worker.address]
        if self.workers_by_name.get(worker.name) is worker:
            del self.workers_by_name[worker.name]
        on_host = self.hosts[worker.host]
        del on_host[worker]
        if not on_host:
            del self.hosts[worker.host]
        self.slots[worker.slot] = None
        self.free_slots.append(worker.slot)
        return 0

    cdef int refresh_worker(self, Worker worker) except -1:
        """Re-rank ``worker`` after any figure of it has changed."""
        cdef int64_t active = worker.n_processing - worker.n_long_running
        cdef bint running = worker.code == W_RUNNING
        cdef bint open_slot = running and active < worker.max_active
        cdef bint idle = running and active < worker.nthreads
        cdef bint saturated = False
        cdef double pending
        if worker.pos_open >= 0:
            if open_slot:
                self.open_workers.rerank(worker)
            else:
                self.open_workers.remove(worker)
        elif open_slot:
            self.open_workers.push(worker)
        if worker.pos_load >= 0:
            self.by_load.rerank(worker)
        if active > worker.nthreads and self.total_nthreads > 0:
            # distributed's measure: the work beyond the running tasks, per thread, is both
            # long in itself and about twice the cluster's average.
            pending = (
                worker.occupancy_ns * 1e-9 * (active - worker.nthreads)
                / (<double>active * worker.nthreads)
            )
            saturated = (
                pending > 0.4
                and pending > 1.9e-9 * self.total_occupancy_ns / self.total_nthreads
            )
        if idle != worker.counted_idle:
            self.n_idle += 1 if idle else -1
            worker.counted_idle = idle
        if saturated != worker.counted_saturated:
            self.n_saturated += 1 if saturated else -1
            worker.counted_saturated = saturated
        return 0

    cdef bint fits(self, Restrictions restrictions, Worker worker) except -1:
        """Whether ``worker`` meets the demand, whatever its status."""
        if (
            (restrictions.workers or restrictions.hosts)
            and worker.address not in restrictions.workers
            and worker.name not in restrictions.workers
            and worker.host not in restrictions.workers
            and worker.host not in restrictions.hosts
        ):
            return False
        for name, amount in restrictions.resources.items():
            if worker.resources.get(name, 0) < amount:
                return False
        return True

    cdef list fitting_workers(self, Restrictions restrictions):
        """Running workers that meet the demand, by order of registration.

        Cached until a worker joins, leaves or changes status. O(names) when the demand
        names workers, O(workers) when it names resources alone.
        """
        cdef Worker worker
        cdef dict found
        if restrictions.fitting_epoch == self.topology_epoch:
            return restrictions.fitting
        found = {}
        if restrictions.workers or restrictions.hosts:
            for name in restrictions.workers:
                worker = self.workers.get(name)
                if worker is None:
                    worker = self.workers_by_name.get(name)
                if worker is not None:
                    found[worker] = None
                elif name in self.hosts:
                    found.update(self.hosts[name])
            for name in restrictions.hosts:
                if name in self.hosts:
                    found.update(self.hosts[name])
        else:
            found = dict.fromkeys(self.workers.values())
        restrictions.fitting = [
            worker
            for worker in found
            if worker.code == W_RUNNING and self.fits(restrictions, worker)
        ]
        restrictions.fitting_epoch = self.topology_epoch
        return restrictions.fitting

    # Clients

    cdef Client client(self, str client_id):
        """The record of ``client_id``, made if there is none."""
        cdef Client found = self.clients.get(client_id)
        if found is None:
            found = Client(client_id)
            found.seq = self.next_seq
            self.next_seq += 1
            self.clients[client_id] = found
        return found

    cdef int drop_client(self, Client client) except -1:
        assert client.n_wants == 0
        if self.clients.get(client.id) is client:
            del self.clients[client.id]
        return 0

    cdef int add_want(self, Task task, Client client) except -1:
        """Returns 1 if ``client`` did not want ``task`` before, else 0. O(its wanters)."""
        if find_want(task, client) != NULL:
            return 0
        link_want(task, client)
        return 1

    cdef int remove_want(self, Task task, Client client) except -1:
        """Returns 1 if ``client`` wanted ``task``, else 0. O(its wanters)."""
        cdef Want* want = find_want(task, client)
        if want == NULL:
            return 0
        unlink_want(want)
        return 1


def _state_names():
    return enumerate(
        ("released", "waiting", "no-worker", "queued", "processing", "memory", "erred")
    )
