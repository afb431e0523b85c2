"""Requests about data: gather, scatter, who has what, copies.

Owns the exchanges with workers that these need. Payloads pass through unopened. Called by the
dispatcher.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from cython_ext.entities import Task, Worker
from cython_ext.events import (
    DataPlaced,
    KeysAdded,
    KeysRetried,
    ReplicaMissing,
    ReplicasDropped,
    RestrictionsSet,
)
from distributed_core.comm.connection import Connection
from distributed_core.comm.dispatch import Handler
from distributed_core.comm.errors import CommError, RemoteError, RpcError
from distributed_core.protocol.exceptions import builtin_error
from distributed_core.server.options import seconds
from distributed_core.server.pump import Pump

if TYPE_CHECKING:
    from distributed_core.server.app import SchedulerServer

__all__ = ["DataOps", "placed_data"]

logger = logging.getLogger(__name__)

# Between two attempts at a worker that says it is busy.
_BUSY_SECONDS = 0.05
_MAX_BUSY_SECONDS = 1.0
_GATHER_TIMEOUT_SECONDS = 60.0


class DataOps:
    """Handlers of requests about data."""

    def __init__(self, server: SchedulerServer) -> None:
        self._server = server
        self._pump = server.pump
        self._random = random.Random(0)
        self._next_recipient = 0
        self._asking: set[Any] = set()

    def handlers(self) -> dict[str, Handler]:
        """Operation to handler."""
        return {
            "gather": self.gather,
            "scatter": self.scatter,
            "who_has": self.who_has,
            "has_what": self.has_what,
            "nbytes": self.nbytes,
            "update_data": self.update_data,
            "add_keys": self.add_keys,
            "replicate": self.replicate,
            "rebalance": self.rebalance,
            "retry": self.retry,
            "set_restrictions": self.set_restrictions,
        }

    # Reading.

    def who_has(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """``{key: [address]}``; an unknown key has an empty list."""
        keys = fields["keys"]
        tasks = self._pump.state.tasks
        if keys is None:
            return {
                key: [worker.address for worker in task.who_has]
                for key, task in tasks.items()
                if task.state == "memory"
            }
        return {
            key: [worker.address for worker in tasks[key].who_has] if key in tasks else []
            for key in keys
        }

    def has_what(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """``{address: [key]}``."""
        return {
            worker.address: [task.key for task in worker.has_what]
            for worker in self._pump.workers_named(fields["workers"])
        }

    def nbytes(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """``{key: bytes}``, or sums by task prefix."""
        keys = fields["keys"]
        tasks = self._pump.state.tasks
        chosen: Iterable[Task] = (
            tasks.values() if keys is None else (tasks[key] for key in keys if key in tasks)
        )
        found: dict[Any, int] = {}
        for task in chosen:
            if task.nbytes < 0:
                continue
            name = task.prefix.name if fields["summary"] else task.key
            found[name] = found.get(name, 0) + task.nbytes
        return found

    # Gather.

    async def gather(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """Fetch values from workers for a client."""
        data, missing = await self.fetch(fields["keys"])
        if missing:
            logger.warning("gather: %d keys are nowhere, e.g. %r", len(missing), missing[0])
            return {"status": "error", "keys": missing}
        return {"status": "OK", "data": data}

    async def fetch(self, keys: Collection[Any]) -> tuple[dict[Any, Any], list[Any]]:
        """Values of ``keys`` by key, and the keys that no worker could give."""
        data: dict[Any, Any] = {}
        failed: dict[Any, set[str]] = {}
        wanted = list(dict.fromkeys(keys))
        delay = _BUSY_SECONDS
        while wanted:
            by_worker: dict[Worker, list[Any]] = {}
            missing = []
            for key in wanted:
                holder = self._choose_holder(key, failed.get(key, ()))
                if holder is None:
                    missing.append(key)
                else:
                    by_worker.setdefault(holder, []).append(key)
            if missing:
                # The rest would be thrown away by the client.
                return data, missing
            answers = await asyncio.gather(
                *(self._fetch_from(worker, some) for worker, some in by_worker.items())
            )
            wanted = []
            was_busy = False
            for (worker, some), answer in zip(by_worker.items(), answers, strict=True):
                if answer == "busy":
                    was_busy = True
                    wanted.extend(some)
                    continue
                for key in some:
                    if key in answer:
                        data[key] = answer[key]
                    else:
                        failed.setdefault(key, set()).add(worker.address)
                        wanted.append(key)
            if was_busy:
                await asyncio.sleep(delay * (0.5 + self._random.random()))
                delay = min(delay * 2, _MAX_BUSY_SECONDS)
        return data, []

    async def ask_holders(self, key: Any) -> None:
        """Ask each holder of ``key`` for it; those that deny it hold it no longer (B4.6)."""
        task = self._pump.task(key)
        if task is None or key in self._asking:
            return
        self._asking.add(key)
        try:
            for worker in task.who_has:
                if worker.status != "closed":
                    await self._fetch_from(worker, [key])
        finally:
            self._asking.discard(key)

    def _choose_holder(self, key: Any, failed: Collection[str]) -> Worker | None:
        task = self._pump.task(key)
        if task is None:
            return None
        holders = [worker for worker in task.who_has if worker.address not in failed]
        return self._random.choice(holders) if holders else None

    async def _fetch_from(self, worker: Worker, keys: list[Any]) -> Any:
        """``{key: value}`` of what it gave, or ``"busy"``."""
        try:
            reply = await self._server.pool.get_data(
                worker.address, keys, timeout_seconds=_GATHER_TIMEOUT_SECONDS
            )
        except (CommError, RemoteError, TimeoutError) as exc:
            logger.warning(
                "gather from %s failed: %r", worker.address, exc, extra={"worker": worker.address}
            )
            return {}
        if isinstance(reply, dict) and reply.get("status") == "busy":
            return "busy"
        data = reply.get("data") if isinstance(reply, dict) else None
        if not isinstance(data, dict):
            logger.warning("%s answered get_data with %.100r", worker.address, reply)
            return {}
        lacking = [key for key in keys if key not in data]
        if lacking:
            # It is alive and says that it does not hold them (B4.6).
            self._pump.tell(ReplicaMissing, "gather-missing", worker=worker, keys=lacking)
        return data

    # Scatter.

    async def scatter(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """Put a client's values on workers; the keys, in order."""
        data: dict[Any, Any] = fields["data"]
        timeout = seconds(fields["timeout"])
        workers = await self._recipients(fields["workers"], timeout)
        shares: list[dict[Any, Any]] = [{} for _ in workers]
        for key, value in data.items():
            shares[self._next_recipient % len(workers)][key] = value
            self._next_recipient += 1
        sizes = await asyncio.gather(
            *(
                self._place(worker, share)
                for worker, share in zip(workers, shares, strict=True)
                if share
            )
        )
        nbytes = {key: size for part in sizes for key, size in part.items()}
        who_has = {
            key: [worker.address]
            for worker, share in zip(workers, shares, strict=True)
            for key in share
        }
        self._pump.tell(
            DataPlaced,
            "scatter",
            client_id=fields["client"],
            who_has=who_has,
            nbytes={key: nbytes[key] for key in data},
        )
        broadcast = fields["broadcast"]
        if broadcast:
            copies = len(workers) if broadcast is True else int(broadcast)
            await self._copy(list(data), copies, workers, 2)
        return list(data)

    async def _recipients(self, names: Any, timeout: float | None) -> list[Worker]:
        """Running workers among ``names``, waited for if there is none."""

        def find() -> list[Worker]:
            return [
                worker for worker in self._pump.workers_named(names) if worker.status == "running"
            ]

        found = find()
        if found:
            return found
        try:
            async with asyncio.timeout(timeout):
                while not found:
                    await self._server.wait_for_worker_change()
                    found = find()
        except TimeoutError:
            raise RpcError(
                builtin_error("TimeoutError", f"no running worker within {timeout} s")
            ) from None
        return found

    async def _place(self, worker: Worker, share: dict[Any, Any]) -> dict[Any, int]:
        reply = await self._server.pool.call(worker.address, {"op": "update_data", "data": share})
        sizes = reply.get("nbytes") if isinstance(reply, dict) else None
        if not isinstance(sizes, dict) or any(key not in sizes for key in share):
            raise RpcError(f"{worker.address} answered update_data with {reply!r:.200}")
        return {key: int(size) for key, size in sizes.items()}

    def update_data(self, connection: Connection, fields: dict[str, Any]) -> None:
        """A client put data on workers itself."""
        self._pump.handle(placed_data(self._pump, fields, fields["client"]))

    def add_keys(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """A worker holds copies; the old form of the stream message."""
        worker = self._pump.state.workers.get(fields["worker"])
        if worker is None:
            return "not found"
        self._pump.tell(
            KeysAdded, "add-keys", fields["stimulus_id"], worker=worker, keys=list(fields["keys"])
        )
        return "OK"

    # Copies.

    async def replicate(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """Have ``n`` copies of each key among ``workers``, no more and no fewer."""
        keys = fields["keys"]
        workers = [
            worker
            for worker in self._pump.workers_named(fields["workers"])
            if worker.status == "running"
        ]
        n = fields["n"]
        if not workers:
            raise RpcError(builtin_error("ValueError", "replicate: no such running worker"))
        n = len(workers) if n is None else min(n, len(workers))
        if n < 1:
            raise RpcError(builtin_error("ValueError", "replicate: n must be at least 1"))
        missing = [
            key for key in keys if (task := self._pump.task(key)) is None or not task.n_replicas
        ]
        if missing:
            return {"status": "partial-fail", "keys": missing}
        if fields["delete"]:
            await self._drop_surplus(keys, n, workers)
        failed = await self._copy(keys, n, workers, fields["branching_factor"])
        return {"status": "partial-fail", "keys": failed} if failed else None

    async def _drop_surplus(
        self, keys: Collection[Any], n: int, workers: Collection[Worker]
    ) -> None:
        chosen = set(workers)
        surplus: dict[Worker, list[Any]] = {}
        for key in keys:
            task = self._pump.task(key)
            if task is None:
                continue
            holders = [worker for worker in task.who_has if worker in chosen]
            holders.sort(key=lambda worker: worker.nbytes, reverse=True)
            for worker in holders[: max(0, len(holders) - n)]:
                surplus.setdefault(worker, []).append(key)
        for worker, some in surplus.items():
            self._drop_copies(worker, some)

    def _drop_copies(self, worker: Worker, keys: list[Any]) -> None:
        self._pump.tell(ReplicasDropped, "replicas-dropped", worker=worker, keys=keys, send=True)

    async def _copy(
        self, keys: Collection[Any], n: int, workers: Collection[Worker], branching: int
    ) -> list[Any]:
        """Bring each key to ``n`` copies among ``workers``, in rounds; the keys that failed.

        In a round each holder serves at most ``branching`` others, so the number of copies
        grows with a power and no holder is swamped.
        """
        chosen = list(dict.fromkeys(workers))
        attempts = 0
        while True:
            orders: dict[Worker, dict[Any, list[str]]] = {}
            open_keys = []
            for key in keys:
                task = self._pump.task(key)
                if task is None or not task.n_replicas:
                    open_keys.append(key)
                    continue
                holders = task.who_has
                holding = set(holders)
                present = sum(worker in holding for worker in chosen)
                lacking = n - present
                if lacking <= 0:
                    continue
                open_keys.append(key)
                candidates = [
                    worker
                    for worker in chosen
                    if worker not in holding and worker.status == "running"
                ]
                candidates.sort(key=lambda worker: worker.nbytes)
                for worker in candidates[: min(lacking, len(holders) * max(1, branching))]:
                    orders.setdefault(worker, {})[key] = [holder.address for holder in holders]
            if not orders:
                return open_keys
            results = await asyncio.gather(
                *(self._order_copies(worker, who_has) for worker, who_has in orders.items())
            )
            if not any(results):
                attempts += 1
                if attempts == 3:
                    return open_keys

    async def _order_copies(self, worker: Worker, who_has: Mapping[Any, list[str]]) -> int:
        """Have ``worker`` fetch; how many copies it has now that it had not before."""
        failed: Collection[Any]
        try:
            reply = await self._server.pool.call(
                worker.address, {"op": "gather", "who_has": dict(who_has)}
            )
        except (CommError, RemoteError, TimeoutError) as exc:
            logger.warning("%s could not fetch copies: %r", worker.address, exc)
            return 0
        failed = reply.get("keys", ()) if reply.get("status") == "partial-fail" else ()
        got = [key for key in who_has if key not in set(failed)]
        if got and worker.status != "closed":
            self._pump.tell(KeysAdded, "gather-copies", worker=worker, keys=got)
        return len(got)

    async def rebalance(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """Move keys from the workers that store most to those that store least."""
        workers = [
            worker
            for worker in self._pump.workers_named(fields["workers"])
            if worker.status == "running"
        ]
        keys = fields["keys"]
        if keys is not None:
            missing = [
                key for key in keys if (task := self._pump.task(key)) is None or not task.n_replicas
            ]
            if missing:
                return {"status": "partial-fail", "keys": missing}
        moves = _plan_moves(workers, None if keys is None else set(keys))
        failed: list[Any] = []
        orders: dict[Worker, dict[Any, list[str]]] = {}
        for key, sender, recipient in moves:
            orders.setdefault(recipient, {})[key] = [sender.address]
        await asyncio.gather(
            *(self._order_copies(worker, who_has) for worker, who_has in orders.items())
        )
        dropped: dict[Worker, list[Any]] = {}
        for key, sender, recipient in moves:
            task = self._pump.task(key)
            if task is None:
                continue
            if recipient in task.who_has:
                dropped.setdefault(sender, []).append(key)
            else:
                failed.append(key)
        for worker, some in dropped.items():
            self._drop_copies(worker, some)
        return {"status": "partial-fail", "keys": failed} if failed else {"status": "OK"}

    # Tasks.

    def retry(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """Run failed keys again; the keys that were touched."""
        return self._pump.tell(
            KeysRetried, "client-retry", client_id=fields["client"] or "", keys=list(fields["keys"])
        )

    def set_restrictions(self, connection: Connection, fields: dict[str, Any]) -> None:
        """Change where tasks may run."""
        unknown = self._pump.tell(
            RestrictionsSet,
            "set-restrictions",
            workers={
                key: [names] if isinstance(names, (str, int, float)) else names
                for key, names in fields["worker"].items()
            },
        )
        if unknown:
            raise RpcError(builtin_error("KeyError", unknown[0]))


def placed_data(pump: Pump, fields: Mapping[str, Any], client_id: str | None) -> DataPlaced:
    """The event of an ``update-data`` message.

    :raises RpcError: a key without a size; nothing is taken then.
    """
    nbytes = {key: int(size) for key, size in fields["nbytes"].items()}
    for key in fields["who_has"]:
        if key not in nbytes:
            raise RpcError(builtin_error("ValueError", f"update_data: no size of {key!r}"))
    return DataPlaced(
        time.time(),
        pump.stimulus("update-data"),
        client_id=client_id,
        who_has={key: list(workers) for key, workers in fields["who_has"].items()},
        nbytes=nbytes,
    )


def _plan_moves(workers: list[Worker], keys: set[Any] | None) -> list[tuple[Any, Worker, Worker]]:
    """``(key, sender, recipient)`` that bring stored bytes near to their mean."""
    if len(workers) < 2:
        return []
    stored = {worker: worker.nbytes for worker in workers}
    mean = sum(stored.values()) / len(workers)
    recipients = sorted(workers, key=lambda worker: worker.nbytes)
    moves: list[tuple[Any, Worker, Worker]] = []
    for sender in sorted(workers, key=lambda worker: worker.nbytes, reverse=True):
        for task in sender.has_what:
            if stored[sender] <= mean:
                break
            if task.n_replicas != 1 or task.actor or (keys is not None and task.key not in keys):
                continue
            size = max(0, task.nbytes)
            if size == 0 or stored[sender] - size < mean / 2:
                continue
            recipient = min(recipients, key=lambda worker: stored[worker])
            if stored[recipient] + size > stored[sender] - size / 2 or recipient is sender:
                continue
            stored[sender] -= size
            stored[recipient] += size
            moves.append((task.key, sender, recipient))
    return moves
