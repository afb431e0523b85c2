# States as dense C codes: free to compare, and indexes of the transition table.

cdef enum:
    RELEASED = 0
    WAITING = 1
    NO_WORKER = 2
    QUEUED = 3
    PROCESSING = 4
    MEMORY = 5
    ERRED = 6
    FORGOTTEN = 7

cdef enum:
    W_INIT = 0
    W_RUNNING = 1
    W_PAUSED = 2
    W_CLOSING_GRACEFULLY = 3
    W_CLOSING = 4
    W_CLOSED = 5

cdef enum:
    N_TASK_STATES = 8
    N_WORKER_STATES = 6

cdef tuple TASK_STATE_NAMES
cdef tuple WORKER_STATUS_NAMES
cdef int worker_code(str name) except -2
