"""Types of ``cython_ext.sink``."""

from typing import Any

__all__ = ["RecordingSink", "Sink"]

class Sink: ...

class RecordingSink(Sink):
    effects: list[tuple[Any, ...]]
    def take(self) -> list[tuple[Any, ...]]: ...
