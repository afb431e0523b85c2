# The one door out: what the scheduler machine orders the world to do.

from cython_ext.entities cimport Client, Task, TaskError, Worker

cdef class Sink:
    cdef int compute_task(self, Worker worker, Task task, str stimulus_id) except -1
    cdef int free_key(self, Worker worker, object key, str stimulus_id) except -1
    cdef int remove_replica(self, Worker worker, object key, str stimulus_id) except -1
    cdef int acquire_replicas(
        self, Worker worker, dict who_has, dict nbytes, str stimulus_id
    ) except -1
    cdef int steal_request(self, Worker worker, object key, str stimulus_id) except -1
    cdef int refresh_who_has(self, Worker worker, dict who_has, str stimulus_id) except -1
    cdef int worker_status(self, Worker worker, str status, str stimulus_id) except -1
    cdef int worker_removed(self, Worker worker, str address, str stimulus_id) except -1
    cdef int close_worker(self, Worker worker, str reason) except -1
    cdef int key_in_memory(self, Client client, Task task) except -1
    cdef int task_erred(self, Client client, object key, TaskError error) except -1
    cdef int lost_data(self, Client client, object key) except -1
    cdef int task_retried(self, Client client, object key) except -1
    cdef int cancelled_keys(
        self, Client client, list keys, str reason, str message
    ) except -1
    cdef int restarted(self, Client client) except -1


cdef class RecordingSink(Sink):
    cdef public list effects
