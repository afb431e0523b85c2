# Relations between records, each kept on both sides by one pair of functions.

from cython_ext.entities cimport Client, Edge, Replica, Task, Want, Worker

cdef int set_dependencies(Task child, list parents) except -1
cdef int clear_dependencies(Task child) except -1
cdef Task dependency_at(Task task, Py_ssize_t i)
cdef Replica* find_replica(Task task, Worker worker) except? NULL
cdef int link_replica(Task task, Worker worker) except -1
cdef int unlink_replica(Replica* replica) except -1
cdef list holder_addresses(Task task)
cdef Want* find_want(Task task, Client client) except? NULL
cdef int link_want(Task task, Client client) except -1
cdef int unlink_want(Want* want) except -1
cdef int link_processing(Task task, Worker worker) except -1
cdef int unlink_processing(Task task, Worker worker) except -1
