"""Types of ``cython_ext.journal``."""

from collections.abc import Collection
from typing import Any, final

__all__ = ["Journal"]

# key, from, to, stimulus id, seconds, worker address or client id, note
Record = tuple[Any, str, str, str, float, str | None, str | None]

@final
class Journal:
    @property
    def capacity(self) -> int: ...
    @property
    def n_written(self) -> int: ...
    def __init__(self, capacity: int) -> None: ...
    def __len__(self) -> int: ...
    def story(self, names: Collection[Any] | None = None) -> list[Record]: ...
