"""Requests that steer workers: broadcast, proxy, retire, restart, terminate.

Owns the exchanges with workers and nannies that these need; each has a deadline and answers for
each worker by itself. Called by the dispatcher and by HTTP.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgpack

from cython_ext.entities import Task, Worker
from cython_ext.events import (
    ReplicasAsked,
    Restarted,
    RetirementAborted,
    RetirementBegun,
)
from distributed_core.comm.connection import Connection
from distributed_core.comm.dispatch import Handler
from distributed_core.comm.errors import CommError, RemoteError, RpcError
from distributed_core.protocol.codec import Pickled
from distributed_core.protocol.exceptions import builtin_error, from_exception
from distributed_core.server.adaptive import workers_to_close
from distributed_core.server.options import seconds

if TYPE_CHECKING:
    from distributed_core.server.app import SchedulerServer

__all__ = ["AdminOps"]

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
# Pause between two looks at a worker's keys, in times of what one look takes.
_POLL_SHARE = 20
# A retiring worker whose data nobody fetches for so long is asked for again, elsewhere.
_REASK_SECONDS = 5.0
_RETIRE_STALL_SECONDS = 30.0
_RETIRE_BATCH = 2000


class AdminOps:
    """Handlers of requests that steer workers."""

    def __init__(self, server: SchedulerServer) -> None:
        self._server = server
        self._pump = server.pump

    def handlers(self) -> dict[str, Handler]:
        """Operation to handler."""
        return {
            "broadcast": self.broadcast,
            "proxy": self.proxy,
            "call_stack": self.call_stack,
            "profile": self.profile,
            "worker_logs": self.worker_logs,
            "retire_workers": self.retire_workers,
            "restart": self.restart,
            "restart_workers": self.restart_workers,
            "terminate": self.terminate,
        }

    # Passing on.

    async def broadcast(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """Send a request to many workers or nannies; replies by worker address."""
        workers = self._pump.workers_named(fields["workers"])
        if fields["hosts"] is not None:
            hosts = set(fields["hosts"])
            chosen = dict.fromkeys(workers) if fields["workers"] is not None else {}
            chosen.update(
                (worker, None) for worker in self._pump.workers_named(None) if worker.host in hosts
            )
            workers = list(chosen)
        if fields["nanny"]:
            targets = {w.address: w.info.nanny for w in workers if w.info.nanny is not None}
        else:
            targets = {worker.address: worker.address for worker in workers}
        try:
            return await self._ask_all(targets, fields["msg"], fields["on_error"])
        except _Relay as relay:
            return relay.reply

    async def _ask_all(
        self, targets: Mapping[str, str], message: Mapping[str, Any], on_error: str
    ) -> dict[str, Any]:
        # A worker may be asked things that take long; whoever asks sets the limit.
        answers = await asyncio.gather(
            *(self._server.pool.call(address, message) for address in targets.values()),
            return_exceptions=True,
        )
        found: dict[str, Any] = {}
        for worker, answer in zip(targets, answers, strict=True):
            if not isinstance(answer, BaseException):
                found[worker] = answer
            elif not isinstance(answer, (CommError, RemoteError, TimeoutError)):
                raise answer
            elif on_error == "raise":
                if isinstance(answer, RemoteError):
                    raise _Relay(answer.reply)
                raise RpcError(from_exception(answer))
            elif on_error == "return":
                found[worker] = _as_pickled(from_exception(answer).data)
            elif on_error == "return_pickle":
                found[worker] = from_exception(answer).data
        return found

    async def proxy(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """Pass one request on to one worker."""
        found = self._pump.workers_named([fields["worker"]])
        if not found:
            raise RpcError(builtin_error("ValueError", f"unknown worker {fields['worker']!r}"))
        try:
            return await self._server.pool.call(found[0].address, fields["msg"])
        except RemoteError as exc:
            return exc.reply

    async def call_stack(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """Call stacks of executing tasks, by worker."""
        keys = fields["keys"]
        targets: dict[Worker, list[Any] | None] = {}
        if keys is None:
            targets = dict.fromkeys(self._pump.workers_named(None))
        else:
            stack = [task for key in keys if (task := self._pump.task(key)) is not None]
            seen: set[Task] = set()
            while stack:
                task = stack.pop()
                if task in seen:
                    continue
                seen.add(task)
                if task.state == "waiting":
                    stack.extend(task.dependencies)
                elif task.state == "processing" and task.worker is not None:
                    some = targets.setdefault(task.worker, [])
                    assert some is not None
                    some.append(task.key)
        answers = await asyncio.gather(
            *(
                self._server.pool.call(worker.address, {"op": "call_stack", "keys": some})
                for worker, some in targets.items()
            )
        )
        return {
            worker.address: answer
            for worker, answer in zip(targets, answers, strict=True)
            if answer
        }

    async def profile(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """Profiles of workers, merged or one by one; the scheduler has none of its own."""
        if fields["scheduler"]:
            return {
                "count": 0,
                "children": {},
                "identifier": "root",
                "description": {"filename": "", "name": "", "line_number": 0, "line": ""},
            }
        workers = self._pump.workers_named(fields["workers"])
        message = {
            "op": "profile",
            "start": fields["start"],
            "stop": fields["stop"],
            "key": fields["key"],
            "server": fields["server"],
        }
        found = await self._ask_all(
            {worker.address: worker.address for worker in workers}, message, "ignore"
        )
        trees = {address: tree for address, tree in found.items() if isinstance(tree, dict)}
        if not fields["merge_workers"]:
            return trees
        return _merge_profiles(list(trees.values()))

    async def worker_logs(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """Logs of workers or nannies, by worker."""
        workers = self._pump.workers_named(fields["workers"])
        if fields["nanny"]:
            targets = {w.address: w.info.nanny for w in workers if w.info.nanny is not None}
        else:
            targets = {worker.address: worker.address for worker in workers}
        return await self._ask_all(targets, {"op": "get_logs", "n": fields["n"]}, "ignore")

    # Retiring.

    async def retire_workers(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """Move data off workers and let them go; identities of those that could be retired."""
        if fields["names"] is not None:
            workers = self._pump.workers_named(fields["names"])
        elif fields["workers"] is not None:
            workers = self._pump.workers_named(fields["workers"])
        else:
            if fields["key"] is not None:
                raise RpcError(
                    builtin_error(
                        "NotImplementedError",
                        "retire_workers: a key function would run code in the scheduler; "
                        "security.allow-code-on-scheduler is off",
                    )
                )
            chosen = workers_to_close(
                self._pump.machine,
                n=fields["n"],
                target=fields["target"],
                minimum=fields["minimum"],
                memory_ratio=fields["memory_ratio"],
                attribute="address",
            )
            workers = self._pump.workers_named(chosen)
        return await self.retire(workers, fields["close_workers"], fields["remove"])

    async def retire(
        self, workers: Iterable[Worker], close_workers: bool = True, remove: bool = True
    ) -> dict[str, Any]:
        """Retire ``workers``; ``{address: identity}`` of those that could be."""
        chosen = list(workers)
        before = {worker: worker.status for worker in chosen}
        for worker in chosen:
            self._pump.tell(RetirementBegun, "retire-workers", worker=worker)
        results = await asyncio.gather(
            *(self._retire_one(worker, before[worker], close_workers, remove) for worker in chosen)
        )
        retired = {
            worker.address: identity
            for worker, identity in zip(chosen, results, strict=True)
            if identity is not None
        }
        self._server.topics.log("retire-workers", {"action": "retired", "workers": list(retired)})
        return retired

    async def _retire_one(
        self, worker: Worker, before: str, close_worker: bool, remove: bool
    ) -> dict[str, Any] | None:
        """Drain a worker and let it go; its identity, or None if it stays."""
        problem = await self._drain(worker)
        # From here on without a pause: until it is gone, copies elsewhere could be lost.
        if problem is not None:
            logger.warning(
                "worker %s cannot be retired: %s",
                worker.address,
                problem,
                extra={"worker": worker.address},
            )
            if worker.status == "closing_gracefully":
                status = "paused" if before == "paused" else "running"
                self._pump.tell(
                    RetirementAborted, "retire-workers-aborted", worker=worker, status=status
                )
            self._server.topics.log(
                "retire-workers",
                {"action": "retire-aborted", "worker": worker.address, "reason": problem},
            )
            return None
        identity = self._server.worker_identity(worker)
        if worker.status == "closed":
            return identity
        peer = worker.info.peer
        peer.closing_expected = True
        if close_worker or remove:
            self._server.close_worker(worker, "scheduler-remove-worker")
            # Before the connection is closed.
            self._pump.flush()
        if remove:
            peer.end("retired", expected=True)
        return identity

    async def _drain(self, worker: Worker) -> str | None:
        """Wait until ``worker`` holds nothing that only it has; or why that cannot be."""
        asked: dict[Any, Worker] = {}
        moved_at = asked_at = time.monotonic()
        left = -1
        while True:
            if worker.status == "closed":
                return None
            if worker.status != "closing_gracefully":
                return f"its status became {worker.status}"
            now = time.monotonic()
            unique = {task.key: task for task in worker.has_what if _is_leaving(task)}
            if any(task.actor for task in unique.values()):
                return "it holds an actor, which cannot be moved"
            if not unique:
                return None
            if len(unique) != left:
                left = len(unique)
                moved_at = asked_at = now
            elif now - moved_at > _RETIRE_STALL_SECONDS:
                return f"{left} keys could not be copied elsewhere, e.g. {next(iter(unique))!r}"
            if now - asked_at > _REASK_SECONDS:
                asked_at = now
                asked.clear()
            # What is under way is not asked for twice: each time would make one copy more.
            asked = {
                key: recipient
                for key, recipient in asked.items()
                if key in unique and recipient.status == "running"
            }
            more = [
                task
                for key, task in unique.items()
                # Of several holders that leave, the first sees to the copy.
                if key not in asked and task.who_has[0] is worker
            ]
            more = more[: _RETIRE_BATCH - len(asked)]
            if more:
                recipients = self._ask_for_copies(more)
                if not recipients:
                    return f"no running worker could take its {left} unique keys"
                asked.update(recipients)
            # A worker with many keys is looked at less often.
            spent = time.monotonic() - now
            del unique, more
            await asyncio.sleep(max(_POLL_SECONDS, _POLL_SHARE * spent))

    def _ask_for_copies(self, tasks: list[Task]) -> dict[Any, Worker]:
        """Have running workers fetch ``tasks``; who fetches which key, empty if nobody can."""
        stored = [
            (worker.nbytes, number, worker)
            for number, worker in enumerate(self._pump.workers_named(None))
            if worker.status == "running"
        ]
        if not stored:
            return {}
        heapq.heapify(stored)
        orders: dict[Worker, list[Any]] = {}
        for task in tasks:
            nbytes, number, recipient = stored[0]
            heapq.heapreplace(stored, (nbytes + max(1, task.nbytes), number, recipient))
            orders.setdefault(recipient, []).append(task.key)
        for recipient, keys in orders.items():
            self._pump.tell(ReplicasAsked, "retire-workers", worker=recipient, keys=keys)
        return {key: recipient for recipient, keys in orders.items() for key in keys}

    # Restarting.

    async def restart(self, connection: Connection, fields: dict[str, Any]) -> None:
        """Drop every key, restart every worker, wait until they are back."""
        timeout = seconds(fields["timeout"])
        self._pump.tell(Restarted, "restart", fields["stimulus_id"])
        self._server.topics.log("all", {"action": "restart"})
        workers = self._pump.workers_named(None)
        results = await self._restart(workers, timeout, fields["wait_for_workers"])
        bad = {address: how for address, how in results.items() if how == "timed out"}
        if bad:
            raise RpcError(
                builtin_error(
                    "TimeoutError",
                    f"{len(bad)} of {len(results)} workers did not come back within {timeout} s: "
                    f"{', '.join(sorted(bad)[:10])}",
                )
            )
        without_nanny = [address for address, how in results.items() if how == "removed"]
        if without_nanny and fields["wait_for_workers"]:
            raise RpcError(
                builtin_error(
                    "TimeoutError",
                    "these workers have no nanny to start them again and were removed: "
                    f"{', '.join(sorted(without_nanny)[:10])}",
                )
            )

    async def restart_workers(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """Restart some workers; ``{worker: "OK" | "removed" | "timed out"}``."""
        names = fields["workers"]
        timeout = seconds(fields["timeout"])
        workers = self._pump.workers_named(names)
        results = await self._restart(workers, timeout, fields["wait_for_workers"])
        if fields["on_error"] == "raise":
            bad = sorted(address for address, how in results.items() if how == "timed out")
            if bad:
                raise RpcError(
                    builtin_error(
                        "TimeoutError",
                        f"{len(bad)} of {len(results)} workers did not restart within {timeout} s:"
                        f" {', '.join(bad[:10])}",
                    )
                )
        return results

    async def _restart(
        self, workers: list[Worker], timeout: float | None, wait_for_workers: bool
    ) -> dict[str, str]:
        results: dict[str, str] = {}
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        nannied = [worker for worker in workers if worker.info.nanny is not None]
        names = {worker.name: worker.server_id for worker in nannied}
        for worker in workers:
            worker.info.peer.closing_expected = True
            if worker.info.nanny is None:
                self._server.close_worker(worker, "scheduler-restart")
                self._pump.flush()
                worker.info.peer.end("restarted", expected=True)
                results[worker.address] = "removed"
        killed = await asyncio.gather(*(self._kill(worker, deadline) for worker in nannied))
        for worker, ok in zip(nannied, killed, strict=True):
            results[worker.address] = "OK" if ok else "timed out"
        if wait_for_workers:
            waiting = {
                worker.name: worker.address for worker in nannied if results[worker.address] == "OK"
            }

            def missing() -> list[Any]:
                present = self._pump.state.workers_by_name
                return [
                    name
                    for name in waiting
                    if name not in present
                    or present[name].server_id == names[name]
                    or present[name].status == "init"
                ]

            try:
                async with asyncio.timeout_at(deadline):
                    while missing():
                        await self._server.wait_for_worker_change()
            except TimeoutError:
                for name in missing():
                    results[waiting[name]] = "timed out"
        return results

    async def _kill(self, worker: Worker, deadline: float | None) -> bool:
        """Have its nanny kill a worker; the nanny starts another by itself."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._server.pool.call(
                    worker.info.nanny,
                    {"op": "kill", "reason": "scheduler-restart"},
                )
        except (CommError, RemoteError, TimeoutError) as exc:
            logger.warning("nanny of %s could not restart it: %r", worker.address, exc)
            return False
        finally:
            if worker.status != "closed":
                worker.info.peer.end("restarted", expected=True)
        return True

    async def terminate(self, connection: Connection, fields: dict[str, Any]) -> None:
        """Stop the scheduler and its workers."""
        self._server.stop(f"terminate: {fields['reason']}")


def _is_leaving(task: Task) -> bool:
    """Whether no worker holds ``task`` but those that are being retired."""
    return task.n_replicas == 1 or all(
        holder.status == "closing_gracefully" for holder in task.who_has
    )


class _Relay(Exception):
    """Carries a worker's error reply to whoever asked."""

    def __init__(self, reply: Mapping[str, Any]) -> None:
        super().__init__(reply.get("exception_text"))
        self.reply = reply


def _as_pickled(data: bytes) -> Pickled:
    header: bytes = msgpack.packb({"pickled-obj": data, "compression": [], "num-sub-frames": 0})
    return Pickled(header, ())


def _merge_profiles(trees: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum of profile trees with the same root."""
    if not trees:
        return {
            "count": 0,
            "children": {},
            "identifier": "root",
            "description": {"filename": "", "name": "", "line_number": 0, "line": ""},
        }
    children: dict[Any, list[dict[str, Any]]] = {}
    for tree in trees:
        for name, child in tree["children"].items():
            children.setdefault(name, []).append(child)
    return {
        "count": sum(tree["count"] for tree in trees),
        "children": {name: _merge_profiles(some) for name, some in children.items()},
        "identifier": trees[0]["identifier"],
        "description": trees[0]["description"],
    }
