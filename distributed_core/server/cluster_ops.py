"""Requests about the cluster as it is: identity, workers, scaling figures, metadata.

Reads the books and answers. Called by the dispatcher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cython_ext.events import ResourcesSet
from distributed_core.comm.connection import Connection
from distributed_core.comm.dispatch import NO_REPLY, Handler
from distributed_core.comm.errors import RpcError
from distributed_core.protocol.codec import NO_DEFAULT, encode
from distributed_core.protocol.exceptions import builtin_error
from distributed_core.protocol.versions import local_versions
from distributed_core.server.adaptive import adaptive_target, workers_to_close
from distributed_core.server.options import seconds

if TYPE_CHECKING:
    from distributed_core.server.app import SchedulerServer

__all__ = ["ClusterOps"]


class ClusterOps:
    """Handlers of requests about the cluster."""

    def __init__(self, server: SchedulerServer) -> None:
        self._server = server
        self._pump = server.pump
        self._metadata: dict[Any, Any] = {}

    def handlers(self) -> dict[str, Handler]:
        """Operation to handler."""
        return {
            "identity": self.identity,
            "ncores": self.ncores,
            "ncores_running": self.ncores_running,
            "processing": self.processing,
            "versions": self.versions,
            "workers_to_close": self.workers_to_close,
            "adaptive_target": self.adaptive_target,
            "check_idle": self.check_idle,
            "set_resources": self.set_resources,
            "get_metadata": self.get_metadata,
            "set_metadata": self.set_metadata,
            "subscribe_worker_status": self.subscribe_worker_status,
            "amm_handler": self.amm_handler,
        }

    def identity(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """What this scheduler is, with up to ``n_workers`` of its workers (-1: all)."""
        return self._server.identity(fields["n_workers"])

    def ncores(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """``{address: nthreads}``."""
        return {
            worker.address: worker.nthreads
            for worker in self._pump.workers_named(fields["workers"])
        }

    def ncores_running(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """``{address: nthreads}`` of running workers."""
        return {
            worker.address: worker.nthreads
            for worker in self._pump.workers_named(fields["workers"])
            if worker.status == "running"
        }

    def processing(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """``{address: [key]}``."""
        return {
            worker.address: [task.key for task in worker.processing]
            for worker in self._pump.workers_named(fields["workers"])
        }

    def versions(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """Versions of this host and of the packages beside us."""
        return local_versions(fields["packages"])

    def workers_to_close(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """The workers that can best be spared."""
        if fields["key"] is not None:
            raise RpcError(
                builtin_error(
                    "NotImplementedError",
                    "workers_to_close: a key function would run code in the scheduler; "
                    "security.allow-code-on-scheduler is off",
                )
            )
        return workers_to_close(
            self._pump.machine,
            n=fields["n"],
            target=fields["target"],
            minimum=fields["minimum"],
            memory_ratio=fields["memory_ratio"],
            attribute=fields["attribute"],
        )

    def adaptive_target(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """How many workers the present work asks for."""
        duration = seconds(fields["target_duration"])
        if duration is None:
            duration = self._server.config.scheduler.adaptive_target_duration
        return adaptive_target(self._pump.machine, duration)

    def check_idle(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """Time since when nothing is to do, or nil."""
        return self._server.check_idle()

    def set_resources(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """Change what a worker supplies."""
        found = self._pump.workers_named([fields["worker"]])
        if not found:
            raise RpcError(builtin_error("KeyError", fields["worker"]))
        self._pump.tell(
            ResourcesSet,
            "set-resources",
            worker=found[0],
            resources={
                **found[0].resources,
                **{name: float(amount) for name, amount in (fields["resources"] or {}).items()},
            },
        )
        return "OK"

    def get_metadata(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """The value at a path of keys, or the default; without one a ``KeyError``."""
        found: Any = self._metadata
        for name in _path(fields["keys"]):
            if not isinstance(found, dict) or name not in found:
                if fields["default"] is NO_DEFAULT:
                    raise RpcError(builtin_error("KeyError", list(fields["keys"])))
                return fields["default"]
            found = found[name]
        return found

    def set_metadata(self, connection: Connection, fields: dict[str, Any]) -> None:
        """Set the value at a path of keys."""
        if not fields["keys"]:
            raise RpcError(builtin_error("ValueError", "set_metadata needs at least one key"))
        *path, last = _path(fields["keys"])
        at = self._metadata
        for name in path:
            below = at.get(name)
            if not isinstance(below, dict):
                below = at[name] = {}
            at = below
        at[last] = fields["value"]

    def subscribe_worker_status(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """Identity, then batches of workers that come and go, on this connection."""
        identity = self._server.identity(-1)
        for worker in identity["workers"].values():
            worker.pop("metrics", None)
            worker.pop("last_seen", None)
        connection.write(encode(identity))
        self._server.watch_workers(connection)
        return NO_REPLY

    def amm_handler(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """The active memory manager's switch: there is none yet, so it never runs."""
        if fields["method"] == "running":
            return False
        if fields["method"] == "stop":
            return None
        raise RpcError(
            builtin_error(
                "NotImplementedError",
                "the active memory manager is not part of this release",
            )
        )


def _path(names: Any) -> list[Any]:
    """A path into the metadata.

    :raises RpcError: a name that cannot be one, such as a map.
    """
    for name in names:
        try:
            hash(name)
        except TypeError:
            raise RpcError(
                builtin_error("TypeError", f"metadata cannot be kept under {name!r:.200}")
            ) from None
    return list(names)
