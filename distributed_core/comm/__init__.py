"""The transport: connections, listeners, requests and replies.

Owns framing, the handshake, back-pressure, TLS and the order of messages. Never touches the
scheduler's state. Called by the server.
"""

from distributed_core.comm.connection import Connection, Receiver
from distributed_core.comm.dispatch import NO_REPLY, Dispatcher, DispatchHooks, Handler
from distributed_core.comm.errors import (
    CommClosedError,
    CommError,
    ConnectTimeout,
    RemoteError,
    RpcError,
)
from distributed_core.comm.listener import Listener
from distributed_core.comm.pool import ConnectionPool
from distributed_core.comm.settings import CommSettings, CommStats, Limits
from distributed_core.comm.tls import TlsError, TlsSettings, client_context, server_context

__all__ = [
    "NO_REPLY",
    "CommClosedError",
    "CommError",
    "CommSettings",
    "CommStats",
    "ConnectTimeout",
    "Connection",
    "ConnectionPool",
    "DispatchHooks",
    "Dispatcher",
    "Handler",
    "Limits",
    "Listener",
    "Receiver",
    "RemoteError",
    "RpcError",
    "TlsError",
    "TlsSettings",
    "client_context",
    "server_context",
]
