"""Types of ``cython_ext.states``."""

from typing import Final

__all__ = ["TASK_STATES", "WORKER_STATUSES"]

TASK_STATES: Final[tuple[str, ...]]
WORKER_STATUSES: Final[tuple[str, ...]]
