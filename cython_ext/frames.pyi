"""Types of ``cython_ext.frames``."""

from collections.abc import Sequence
from typing import Final

__all__ = ["MAX_DEPTH", "SMALL_FRAME_BYTES", "FrameCutter", "FrameError", "build", "check_body"]

SMALL_FRAME_BYTES: Final[int]
MAX_DEPTH: Final[int]

class FrameError(ValueError): ...

class FrameCutter:
    max_frames: Final[int]
    max_frame_bytes: Final[int]
    max_message_bytes: Final[int]
    @property
    def error(self) -> str | None: ...
    @property
    def pending_bytes(self) -> int: ...
    def __init__(self, max_frames: int, max_frame_bytes: int, max_message_bytes: int) -> None: ...
    def set_limits(self, max_frames: int, max_frame_bytes: int, max_message_bytes: int) -> None: ...
    def feed(
        self, data: bytes | bytearray | memoryview, max_messages: int = 0
    ) -> list[list[bytes]]: ...

def build(
    frames: Sequence[bytes | bytearray | memoryview],
) -> list[bytes | memoryview]: ...
def check_body(body: bytes | bytearray | memoryview, max_depth: int = 1000) -> int: ...
