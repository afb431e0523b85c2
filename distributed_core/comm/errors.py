"""What can go wrong between two peers; all of it operating errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed_core.protocol.exceptions import PickledException

__all__ = ["CommClosedError", "CommError", "ConnectTimeout", "RemoteError", "RpcError"]


class CommError(ConnectionError):
    """A connection cannot be used, or could not be made."""


class CommClosedError(CommError):
    """The connection is closed, or was lost before the answer came."""


class ConnectTimeout(CommError, TimeoutError):
    """No connection within the time given."""


class RemoteError(Exception):
    """The peer's handler raised; ``reply`` is its error reply, payloads unopened."""

    def __init__(self, address: str, op: str, reply: Mapping[str, Any]) -> None:
        text = reply.get("exception_text")
        super().__init__(f"{op} on {address} failed: {text or 'no text'}")
        self.address = address
        self.op = op
        self.reply = reply


class RpcError(Exception):
    """Raised by a handler to answer with an error that the caller knows by its class.

    :param error: from ``protocol.exceptions``, or a text, which arrives as ``Exception``.
    :param status: ``"uncaught-error"`` raises in the caller; ``"error"`` is data that it looks at.
    """

    def __init__(self, error: PickledException | str, status: str = "uncaught-error") -> None:
        super().__init__(error if isinstance(error, str) else error.text)
        self.error = error
        self.status = status
