"""Types of ``cython_ext.invariants``."""

from collections.abc import Callable

from cython_ext.entities import Task
from cython_ext.transitions import SchedulerMachine

__all__ = ["MACHINE_INVARIANTS", "TASK_INVARIANTS", "check", "check_task"]

TASK_INVARIANTS: tuple[Callable[[SchedulerMachine, Task, list[str]], None], ...]
MACHINE_INVARIANTS: tuple[Callable[[SchedulerMachine, list[str]], None], ...]

def check(machine: SchedulerMachine) -> list[str]: ...
def check_task(machine: SchedulerMachine, task: Task) -> list[str]: ...
