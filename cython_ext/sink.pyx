"""Effects: what the scheduler machine orders the shell to do.

``Sink`` is the interface; the machine calls it in the order in which peers must see the
messages. A sink keeps what it is told as plain values or bytes (never a reference to a
record to be read later: the record changes before the turn ends). The wire layer's sink
encodes at once; ``RecordingSink`` keeps tuples for tests, replay and simulation.
"""

from cython_ext.entities cimport Replica, Task, Worker

from cython_ext.graph cimport dependency_at, holder_addresses


cdef class Sink:
    """Interface. Each method raises NotImplementedError until it is overridden."""

    cdef int compute_task(self, Worker worker, Task task, str stimulus_id) except -1:
        """Order ``worker`` to compute ``task`` as run ``task.run_id``."""
        raise NotImplementedError("compute_task")

    cdef int free_key(self, Worker worker, object key, str stimulus_id) except -1:
        """Order ``worker`` to drop ``key``: its data, or the order to compute it."""
        raise NotImplementedError("free_key")

    cdef int remove_replica(self, Worker worker, object key, str stimulus_id) except -1:
        """Order ``worker`` to drop its copy of ``key``."""
        raise NotImplementedError("remove_replica")

    cdef int acquire_replicas(
        self, Worker worker, dict who_has, dict nbytes, str stimulus_id
    ) except -1:
        """Order ``worker`` to fetch copies; ``who_has`` maps key to holders' addresses."""
        raise NotImplementedError("acquire_replicas")

    cdef int steal_request(self, Worker worker, object key, str stimulus_id) except -1:
        """Ask ``worker`` to give up ``key``; the answer repeats ``stimulus_id``."""
        raise NotImplementedError("steal_request")

    cdef int refresh_who_has(self, Worker worker, dict who_has, str stimulus_id) except -1:
        """Tell ``worker`` the holders of keys it asked about (lists may be empty)."""
        raise NotImplementedError("refresh_who_has")

    cdef int worker_status(self, Worker worker, str status, str stimulus_id) except -1:
        """Order ``worker`` into ``status``."""
        raise NotImplementedError("worker_status")

    cdef int worker_removed(self, Worker worker, str address, str stimulus_id) except -1:
        """Tell ``worker`` that the worker at ``address`` is gone."""
        raise NotImplementedError("worker_removed")

    cdef int close_worker(self, Worker worker, str reason) except -1:
        """Order ``worker`` to stop."""
        raise NotImplementedError("close_worker")

    cdef int key_in_memory(self, Client client, Task task) except -1:
        """Tell ``client`` that ``task`` is in memory."""
        raise NotImplementedError("key_in_memory")

    cdef int task_erred(self, Client client, object key, TaskError error) except -1:
        """Tell ``client`` that ``key`` failed."""
        raise NotImplementedError("task_erred")

    cdef int lost_data(self, Client client, object key) except -1:
        """Tell ``client`` that the last copy of ``key`` is gone; it is pending again."""
        raise NotImplementedError("lost_data")

    cdef int task_retried(self, Client client, object key) except -1:
        """Tell ``client`` that the failed ``key`` is pending again."""
        raise NotImplementedError("task_retried")

    cdef int cancelled_keys(
        self, Client client, list keys, str reason, str message
    ) except -1:
        """Tell ``client`` that it will not get ``keys``."""
        raise NotImplementedError("cancelled_keys")

    cdef int restarted(self, Client client) except -1:
        """Tell ``client`` that all keys were dropped."""
        raise NotImplementedError("restarted")


cdef class RecordingSink(Sink):
    """Keeps each effect as a tuple ``(name, address or client id, ...)`` in ``effects``."""

    def __init__(self):
        self.effects = []

    def take(self):
        """The effects recorded since the last call, in order."""
        taken = self.effects
        self.effects = []
        return taken

    cdef int compute_task(self, Worker worker, Task task, str stimulus_id) except -1:
        who_has = {}
        nbytes = {}
        for i in range(task.n_dependencies):
            dependency = dependency_at(task, i)
            who_has[dependency.key] = holder_addresses(dependency)
            nbytes[dependency.key] = dependency.nbytes
        self.effects.append(
            (
                "compute-task",
                worker.address,
                task.key,
                task.run_id,
                (-task.user_priority, task.generation, task.order),
                who_has,
                nbytes,
                stimulus_id,
            )
        )
        return 0

    cdef int free_key(self, Worker worker, object key, str stimulus_id) except -1:
        self.effects.append(("free-keys", worker.address, key, stimulus_id))
        return 0

    cdef int remove_replica(self, Worker worker, object key, str stimulus_id) except -1:
        self.effects.append(("remove-replicas", worker.address, key, stimulus_id))
        return 0

    cdef int acquire_replicas(
        self, Worker worker, dict who_has, dict nbytes, str stimulus_id
    ) except -1:
        self.effects.append(("acquire-replicas", worker.address, who_has, nbytes, stimulus_id))
        return 0

    cdef int steal_request(self, Worker worker, object key, str stimulus_id) except -1:
        self.effects.append(("steal-request", worker.address, key, stimulus_id))
        return 0

    cdef int refresh_who_has(self, Worker worker, dict who_has, str stimulus_id) except -1:
        self.effects.append(("refresh-who-has", worker.address, who_has, stimulus_id))
        return 0

    cdef int worker_status(self, Worker worker, str status, str stimulus_id) except -1:
        self.effects.append(("worker-status-change", worker.address, status, stimulus_id))
        return 0

    cdef int worker_removed(self, Worker worker, str address, str stimulus_id) except -1:
        self.effects.append(("remove-worker", worker.address, address, stimulus_id))
        return 0

    cdef int close_worker(self, Worker worker, str reason) except -1:
        self.effects.append(("close", worker.address, reason))
        return 0

    cdef int key_in_memory(self, Client client, Task task) except -1:
        self.effects.append(("key-in-memory", client.id, task.key))
        return 0

    cdef int task_erred(self, Client client, object key, TaskError error) except -1:
        self.effects.append(("task-erred", client.id, key, error.exception))
        return 0

    cdef int lost_data(self, Client client, object key) except -1:
        self.effects.append(("lost-data", client.id, key))
        return 0

    cdef int task_retried(self, Client client, object key) except -1:
        self.effects.append(("task-retried", client.id, key))
        return 0

    cdef int cancelled_keys(
        self, Client client, list keys, str reason, str message
    ) except -1:
        self.effects.append(("cancelled-keys", client.id, list(keys), reason, message))
        return 0

    cdef int restarted(self, Client client) except -1:
        self.effects.append(("restart", client.id))
        return 0
