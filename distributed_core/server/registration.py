"""How peers join: clients, workers and nannies register, workers send heartbeats.

Owns the checks before a peer becomes visible. A registration is whole or refused with a reason;
nothing of a refused one stays behind. Called by the dispatcher.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cython_ext.entities import Worker
from cython_ext.events import ClientConnected, WorkerRegistered
from distributed_core.comm.connection import Connection, Receiver
from distributed_core.comm.dispatch import NO_REPLY, Handler
from distributed_core.protocol.addresses import AddressError, canonical_literal, resolve_address
from distributed_core.protocol.codec import encode
from distributed_core.protocol.exceptions import registration_refusal
from distributed_core.server.peers import ClientPeer, WorkerPeer

if TYPE_CHECKING:
    from distributed_core.server.app import SchedulerServer

__all__ = ["Registration", "WorkerInfo"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class WorkerInfo:
    """What a worker said of itself; kept for identities and operators."""

    peer: WorkerPeer
    pid: int
    services: dict[str, int]
    local_directory: str
    versions: dict[str, Any]
    nanny: str | None
    extra: dict[str, Any]
    metrics: dict[str, Any]
    last_seen: float
    joined: float
    host_info: dict[str, Any] = field(default_factory=dict)


class _NannyStarting(Receiver):
    """A nanny's connection while its worker starts; one message ends it."""

    __slots__ = ("_connection", "_pending")

    def __init__(self, connection: Connection, pending: set[Connection]) -> None:
        self._connection = connection
        self._pending = pending
        pending.add(connection)

    def frames_received(self, frames: list[bytes]) -> None:
        self._connection.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pending.discard(self._connection)


class Registration:
    """Handlers of registration and heartbeat."""

    def __init__(self, server: SchedulerServer) -> None:
        self._server = server
        self.nannies_starting: set[Connection] = set()

    def handlers(self) -> dict[str, Handler]:
        """Operation to handler."""
        return {
            "register-client": self.register_client,
            "register-worker": self.register_worker,
            "heartbeat_worker": self.heartbeat_worker,
            "register_nanny": self.register_nanny,
            "unregister": self.unregister,
        }

    # Clients.

    def register_client(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """Turn the connection into the stream of a client."""
        server = self._server
        client_id = fields["client"]
        error, warning = server.versions.judge_client(fields["versions"])
        if error is not None:
            logger.warning("client %s refused: %s", client_id, error, extra={"client": client_id})
            connection.write(encode([{"op": "stream-start", "error": error}]))
            connection.close()
            return NO_REPLY
        old = server.clients.get(client_id)
        if old is not None:
            old.supersede()
        server.forget_client(client_id)
        peer = ClientPeer(server, connection, client_id)
        client = server.pump.tell(
            ClientConnected,
            "client-connect",
            client_id=client_id,
            info={"last_seen": time.time(), "address": connection.peer_address},
            peer=peer.outbox,
        )
        peer.client = client
        server.clients[client_id] = peer
        connection.kind = "client"
        # The first message must be a list of exactly one map.
        start: dict[str, Any] = {"op": "stream-start"}
        if warning:
            start["warning"] = warning
        connection.write(encode([start]))
        connection.start_stream(peer)
        server.counters.clients_added += 1
        logger.info("client %s connected", client_id, extra={"client": client_id})
        server.topics.log(["all", client_id], {"action": "add-client", "client": client_id})
        return NO_REPLY

    # Workers.

    def register_worker(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """Turn the connection into the stream of a worker, or refuse it whole."""
        address = canonical_literal_or_none(fields["address"], self._server.default_scheme)
        if address is not None:
            return self._register_worker(connection, fields, address)
        return self._resolve_and_register(connection, fields)

    async def _resolve_and_register(self, connection: Connection, fields: dict[str, Any]) -> Any:
        try:
            address = await resolve_address(fields["address"], self._server.default_scheme)
        except AddressError as exc:
            return self._refuse(connection, fields, f"address: {exc}")
        if connection.is_closed:
            return NO_REPLY
        return self._register_worker(connection, fields, address)

    def _refuse(self, connection: Connection, fields: dict[str, Any], reason: str) -> Any:
        logger.warning(
            "worker %s at %s refused: %s",
            fields["name"],
            fields["address"],
            reason,
            extra={"worker": fields["address"]},
        )
        connection.write(encode(registration_refusal("register-worker", reason, time.time())))
        connection.close()
        return NO_REPLY

    def _problem(self, fields: dict[str, Any]) -> str | None:
        """Why a registration whose types fit cannot be accepted."""
        if fields["nthreads"] < 1:
            return f"nthreads must be positive, got {fields['nthreads']}"
        memory_limit = fields["memory_limit"]
        if memory_limit is not None and memory_limit < 0:
            return f"memory_limit must not be negative, got {memory_limit}"
        for name, amount in fields["resources"].items():
            if not amount >= 0:
                return f"resources: {name} must not be negative, got {amount}"
        if not isinstance(fields["metrics"].get("memory"), (int, float)):
            return "metrics: the number of bytes in 'memory' is missing"
        if fields["status"] not in ("init", "running", "paused"):
            return f"status: a worker cannot register as {fields['status']!r}"
        return None

    def _register_worker(self, connection: Connection, fields: dict[str, Any], address: str) -> Any:
        server = self._server
        pump = server.pump
        problem = self._problem(fields)
        if problem is not None:
            return self._refuse(connection, fields, problem)
        error, warning = server.versions.judge_worker(fields["versions"])
        if error is not None:
            return self._refuse(connection, fields, error)
        old = pump.state.workers.get(address)
        if old is not None:
            if old.name != fields["name"]:
                return self._refuse(connection, fields, f"address taken, {address}")
            # Two processes cannot listen on one address: the old one is gone, whatever its
            # connection seems to be.
            old.info.peer.end("superseded by a new worker at its address", expected=False)
        namesake = pump.state.workers_by_name.get(fields["name"])
        if namesake is not None:
            return self._refuse(connection, fields, f"name taken, {fields['name']}")
        now = time.time()
        worker = pump.tell(
            WorkerRegistered,
            "worker-connect",
            fields["stimulus_id"],
            address=address,
            name=fields["name"],
            host=host_of(address),
            server_id=fields["server_id"],
            nthreads=fields["nthreads"],
            memory_limit=fields["memory_limit"] or 0,
            resources={name: float(amount) for name, amount in fields["resources"].items()},
            status="init",
            info=None,
            peer=None,
        )
        if worker is None or isinstance(worker, str):
            return self._refuse(connection, fields, worker or "internal error")
        peer = WorkerPeer(server, connection, worker)
        worker.info = WorkerInfo(
            peer=peer,
            pid=fields["pid"],
            services=fields["services"],
            local_directory=fields["local_directory"],
            versions=fields["versions"],
            nanny=fields["nanny"],
            extra=fields["extra"],
            metrics=fields["metrics"],
            last_seen=now,
            joined=now,
        )
        server.versions.add_worker(address, fields["versions"])
        reply: dict[str, Any] = {
            "status": "OK",
            "time": now,
            "heartbeat-interval": server.worker_heartbeat_interval(),
            "worker-plugins": {},
        }
        if warning:
            reply["warning"] = warning
        connection.write(encode(reply))
        worker.peer = pump.outbox(connection)
        connection.kind = "worker"
        connection.start_stream(peer)
        server.counters.workers_added += 1
        server.total_memory += worker.memory_limit
        logger.info(
            "worker %s joined: %s, %d threads",
            fields["name"],
            address,
            worker.nthreads,
            extra={"worker": address},
        )
        server.topics.log(["all", address], {"action": "add-worker", "worker": address})
        server.tell_status_watchers(["add", {"workers": {address: server.worker_identity(worker)}}])
        if fields["status"] != "init":
            server.set_worker_status(worker, fields["status"])
        return NO_REPLY

    def _worker_at(self, text: str) -> Worker | None:
        """The worker at an address, however it is written."""
        server = self._server
        address = canonical_literal_or_none(text, server.default_scheme)
        return server.pump.state.workers.get(address or text)

    def heartbeat_worker(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """Note that a worker lives, and how it fares."""
        server = self._server
        worker = self._worker_at(fields["address"])
        if worker is None:
            return {"status": "missing"}
        now = time.time()
        info = worker.info
        info.last_seen = now
        metrics = fields["metrics"]
        # Deltas since the last heartbeat; nothing here adds them up, and keeping them would
        # grow each identity.
        metrics.pop("digests_total_since_heartbeat", None)
        info.metrics = metrics
        info.host_info = fields["host_info"] or {}
        worker.executing = fields["executing"] or {}
        return {
            "status": "OK",
            "time": now,
            "heartbeat-interval": server.worker_heartbeat_interval(),
        }

    # Nannies.

    def register_nanny(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """Give a nanny its plugins; the connection ends when its worker has started."""
        connection.write(encode({"status": "OK", "nanny-plugins": {}}))
        connection.kind = "nanny"
        connection.set_receiver(_NannyStarting(connection, self.nannies_starting))
        return NO_REPLY

    def unregister(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """A nanny says that its worker died."""
        worker = self._worker_at(fields["address"])
        if worker is None:
            return "already-removed"
        worker.info.peer.end("unregistered by its nanny", expected=fields["expected"])
        return "OK"


def canonical_literal_or_none(address: str, default_scheme: str) -> str | None:
    """The canonical form of an address with a literal host; None if it needs a look-up.

    A text that is no address gives None too: the look-up then says what is wrong.
    """
    try:
        return canonical_literal(address, default_scheme)
    except AddressError:
        return None


def host_of(address: str) -> str:
    """The host part of a canonical address, without brackets."""
    return address.rpartition("://")[2].rpartition(":")[0].strip("[]")
