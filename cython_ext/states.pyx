"""State codes of tasks and workers, and their wire names.

Owns the mapping between the dense C codes that the engine compares and the strings that
peers, plugins and stories see. Nothing else converts between the two. Used by every
engine module; imports none of them.
"""

TASK_STATES = (
    "released",
    "waiting",
    "no-worker",
    "queued",
    "processing",
    "memory",
    "erred",
    "forgotten",
)
WORKER_STATUSES = ("init", "running", "paused", "closing_gracefully", "closing", "closed")

TASK_STATE_NAMES = TASK_STATES
WORKER_STATUS_NAMES = WORKER_STATUSES

cdef dict WORKER_CODES = {name: code for code, name in enumerate(WORKER_STATUSES)}


cdef int worker_code(str name) except -2:
    """The code of a worker status name, or -1 for a name that is no status."""
    found = WORKER_CODES.get(name)
    return -1 if found is None else found
