"""Types of ``cython_ext.heaps``."""

from typing import final

from cython_ext.entities import Task, Worker

__all__ = ["TaskHeap", "WorkerHeap"]

@final
class TaskHeap:
    @property
    def tasks(self) -> list[Task]: ...
    def __len__(self) -> int: ...

@final
class WorkerHeap:
    @property
    def workers(self) -> list[Worker]: ...
    def __init__(self, order: int, seconds_per_byte: float) -> None: ...
    def __len__(self) -> int: ...
