"""Types of ``cython_ext.inbound``."""

from collections.abc import Callable, Sequence
from typing import Any

from cython_ext.entities import Worker
from cython_ext.events import Event
from cython_ext.msgpack import MsgpackError

__all__ = ["ClientStreamDecoder", "MsgpackError", "StreamDecoder", "WorkerStreamDecoder"]

class StreamDecoder:
    keep_startstops: bool
    @property
    def handle(self) -> Callable[[Event], Any]: ...
    @property
    def cold(self) -> Callable[..., Any]: ...
    @property
    def rejected(self) -> Callable[..., Any]: ...
    @property
    def n_cold(self) -> int: ...
    @property
    def n_rejected(self) -> int: ...
    @property
    def counts(self) -> dict[str, int]: ...
    def __init__(
        self,
        handle: Callable[[Event], Any],
        cold: Callable[[bytes | memoryview, Sequence[Any], Any, float], Any],
        rejected: Callable[[Any, str, list[Any], str, float, str], Any],
    ) -> None: ...

class WorkerStreamDecoder(StreamDecoder):
    def decode(
        self,
        frames: Sequence[bytes | bytearray | memoryview],
        worker: Worker | None,
        now: float,
    ) -> None: ...

class ClientStreamDecoder(StreamDecoder):
    def decode(
        self,
        frames: Sequence[bytes | bytearray | memoryview],
        client_id: str,
        now: float,
        stimulus_id: str,
    ) -> None: ...
