"""Requests that look inside: logs, events, stories, the task stream, dumps.

Reads the books and answers. Called by the dispatcher.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cython_ext.entities import Worker
from distributed_core.comm.connection import Connection
from distributed_core.comm.dispatch import Handler
from distributed_core.comm.errors import CommError, RemoteError, RpcError
from distributed_core.engine.scheduler import dump
from distributed_core.engine.story import story_tuples
from distributed_core.materializer.parts import Opaque
from distributed_core.materializer.pool import CallFailed
from distributed_core.protocol.codec import Pickled, Serialized
from distributed_core.protocol.exceptions import builtin_error
from distributed_core.protocol.ops import is_key
from distributed_core.protocol.versions import local_versions
from distributed_core.server.options import seconds

if TYPE_CHECKING:
    from distributed_core.server.app import SchedulerServer

__all__ = ["InsightOps", "TaskStream"]

_STREAM_LENGTH = 100_000


class TaskStream:
    """The last finished and failed runs, kept from the first request for them on."""

    def __init__(self) -> None:
        self.is_kept = False
        self.n_seen = 0
        self._records: deque[dict[str, Any]] = deque(maxlen=_STREAM_LENGTH)

    def add(self, record: dict[str, Any]) -> None:
        """Keep one run."""
        self._records.append(record)
        self.n_seen += 1

    def erred(self, worker: Worker, message: Mapping[str, Any]) -> None:
        """Keep one failed run, as its worker reported it."""
        if self.is_kept:
            self.add(
                {
                    "key": message["key"],
                    "worker": worker.address,
                    "status": "error",
                    "thread": message["thread"],
                    "startstops": message["startstops"],
                    "stimulus_id": message["stimulus_id"],
                    "exception": message["exception_text"],
                    "traceback": message["traceback_text"],
                }
            )

    def records(
        self, start: float | None, stop: float | None, count: int | None, start_index: int | None
    ) -> list[dict[str, Any]]:
        """Runs that began between ``start`` and ``stop`` (seconds), at most the last ``count``."""
        first = self.n_seen - len(self._records)
        found = []
        for index, record in enumerate(self._records, first):
            if start_index is not None and index < start_index:
                continue
            begun = min((span["start"] for span in record["startstops"]), default=None)
            if start is not None and (begun is None or begun < start):
                continue
            if stop is not None and (begun is None or begun > stop):
                continue
            found.append(record)
        return found if count is None else found[-count:]


class InsightOps:
    """Handlers of requests that look inside."""

    def __init__(self, server: SchedulerServer) -> None:
        self._server = server
        self._pump = server.pump
        self._recordings: dict[str, set[Any]] = {}

    def handlers(self) -> dict[str, Handler]:
        """Operation to handler."""
        return {
            "get_task_status": self.get_task_status,
            "get_task_prefix_states": self.get_task_prefix_states,
            "get_task_stream": self.get_task_stream,
            "get_task_stream_index": self.get_task_stream_index,
            "start_task_metadata": self.start_task_metadata,
            "stop_task_metadata": self.stop_task_metadata,
            "get_logs": self.get_logs,
            "logs": self.get_logs,
            "log_event": self.log_event,
            "events": self.events,
            "get_story": self.get_story,
            "get_cluster_state": self.get_cluster_state,
            "dump_state": self.dump_state,
            "get_runspec": self.get_runspec,
            "get_error_cause": self.get_error_cause,
        }

    def get_task_status(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """``{key: state or nil}``."""
        tasks = self._pump.state.tasks
        return {key: tasks[key].state if key in tasks else None for key in fields["keys"]}

    def get_task_prefix_states(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """Tasks of each prefix by state."""
        found = {}
        for name, prefix in self._pump.state.prefixes.items():
            counts = prefix.state_counts
            if any(counts.values()):
                found[name] = {
                    state: counts[state]
                    for state in ("memory", "erred", "released", "processing", "waiting")
                }
        return found

    def get_task_stream(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """Runs that finished or failed; kept from the first request on."""
        self._server.keep_task_stream()
        now = time.time()
        return self._server.task_stream.records(
            _moment(fields["start"], now),
            _moment(fields["stop"], now),
            fields["count"],
            fields["start_index"],
        )

    def get_task_stream_index(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """Cursor for ``get_task_stream``."""
        self._server.keep_task_stream()
        return self._server.task_stream.n_seen

    def start_task_metadata(self, connection: Connection, fields: dict[str, Any]) -> None:
        """Begin to record the metadata of tasks that end."""
        name = fields["name"]
        if name in self._recordings:
            raise RpcError(builtin_error("ValueError", f"recording {name!r} exists already"))
        self._recordings[name] = {
            key for key, task in self._pump.state.tasks.items() if task.state == "memory"
        }

    def stop_task_metadata(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """End a recording: ``{metadata: {key: …}, state: {key: state}}``."""
        known = self._recordings.pop(fields["name"], None)
        if known is None:
            raise RpcError(builtin_error("ValueError", f"no recording {fields['name']!r}"))
        metadata = {}
        state = {}
        for key, task in self._pump.state.tasks.items():
            if key not in known and task.state in ("memory", "erred"):
                metadata[key] = task.metadata or {}
                state[key] = task.state
        return {"metadata": metadata, "state": state}

    def get_logs(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """This scheduler's log, newest first."""
        return self._server.log_ring.entries(
            n=fields["n"], start=fields["start"], timestamps=fields["timestamps"]
        )

    def log_event(self, connection: Connection, fields: dict[str, Any]) -> None:
        """Log a user's event."""
        self._server.topics.log(fields["topic"], fields["msg"])

    def events(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """Events of one topic, or of all."""
        return self._server.topics.events(fields["topic"])

    async def get_story(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """What happened to keys or by stimuli."""
        names: set[Any] = set()
        for name in fields["keys_or_stimuli"]:
            if isinstance(name, (Pickled, Serialized)):
                names.update(await self._keys_in(name))
            elif is_key(name):
                names.add(name)
        return story_tuples(self._pump.machine, names)

    async def _keys_in(self, payload: Pickled | Serialized) -> list[Any]:
        """The keys of futures that fell into a pickle; opened elsewhere."""
        try:
            return await self._server.materializer.call(
                "keys_from_pickled", Opaque(payload.header, payload.frames)
            )
        except CallFailed as exc:
            raise RpcError(builtin_error("ValueError", str(exc))) from exc

    async def get_cluster_state(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """State of the scheduler and of each worker."""
        exclude = [str(name) for name in fields["exclude"]]
        workers: dict[str, Any] = {}
        for worker in self._pump.workers_named(None):
            try:
                workers[worker.address] = await self._server.pool.call(
                    worker.address, {"op": "dump_state", "exclude": exclude}, 10.0
                )
            except (CommError, RemoteError, TimeoutError) as exc:
                workers[worker.address] = f"cannot be dumped: {exc!r}"
        return {
            "scheduler": self.dump_state(connection, {"exclude": exclude}),
            "workers": workers,
            "versions": {
                "scheduler": local_versions(),
                "workers": {
                    worker.address: worker.info.versions
                    for worker in self._pump.workers_named(None)
                },
            },
        }

    def dump_state(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """State of the scheduler as plain nested maps."""
        found = dump(self._pump.machine, list(fields["exclude"]))
        found["events"] = self._server.topics.events(None)
        found["log"] = self._server.log_ring.entries()
        return {name: value for name, value in found.items() if name not in fields["exclude"]}

    def get_runspec(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """The definition of a task, unopened."""
        task = self._pump.task(fields["key"])
        if task is None or task.run_spec is None:
            raise RpcError(builtin_error("KeyError", fields["key"]))
        spec = task.run_spec
        if isinstance(spec, bytes):
            return Pickled(spec, ())
        header, *frames = spec
        return Pickled(bytes(header), tuple(frames))

    def get_error_cause(self, connection: Connection, fields: dict[str, Any]) -> Any:
        """The key whose own failure is behind that of ``keys``, or nil."""
        for key in fields["keys"]:
            task = self._pump.task(key)
            if task is not None and task.error is not None:
                return task.error.blame
        return None


def _moment(value: Any, now: float) -> float | None:
    """A timestamp, or a time span before now such as ``"5 minutes"``."""
    if value is None or isinstance(value, (int, float)):
        return value
    span = seconds(value)
    return None if span is None else now - span
