from libc.stdint cimport int64_t

from cython_ext.cluster cimport ClusterState
from cython_ext.entities cimport Task, Worker

cdef bint is_rootish(ClusterState state, Task task) except -1
cdef Worker choose_worker(ClusterState state, Task task)
cdef int weigh_inputs(ClusterState state, Task task, Worker worker) except -1
cdef int64_t missing_bytes(ClusterState state, Task task, Worker worker) except -1
