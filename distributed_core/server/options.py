"""Values in requests that may be spelled in several ways."""

from __future__ import annotations

from typing import Any

from distributed_core.comm.errors import RpcError
from distributed_core.config.units import parse_duration
from distributed_core.protocol.exceptions import builtin_error

__all__ = ["seconds"]


def seconds(value: Any) -> float | None:
    """A time span such as ``30``, ``"30s"`` or nil (no limit), in seconds.

    :raises RpcError: not a time span; the caller gets a ``ValueError``.
    """
    if value is None:
        return None
    try:
        return parse_duration(value)
    except ValueError as exc:
        raise RpcError(builtin_error("ValueError", str(exc))) from exc
