"""Short scripts for the scheduler machine: events in, effects out as one line each.

A ``Rig`` is a machine with a recording sink, validated in full after every event. Its methods
send one event each; ``expect`` compares the effects so far, exactly and in order, and forgets
them. Workers and clients are called by their short names: worker ``a`` has the address
``tcp://a:1``.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cython_ext import events as ev
from cython_ext.cluster import EngineSettings
from cython_ext.entities import Client, Task, Worker
from cython_ext.sink import RecordingSink
from cython_ext.transitions import SchedulerMachine, group_name

__all__ = ["Graph", "Rig", "address_of", "chain", "describe", "fan_in"]

WANTED, DATA_PRODUCER, PURE_DATA = 1, 2, 8


def address_of(name: str) -> str:
    """The address of the worker that scripts call ``name``."""
    return f"tcp://{name}:1"


def _pack(code: str, values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}{code}", *values)


def chain(*keys: Any) -> dict[Any, list[Any]]:
    """A graph in which each key needs the one before it."""
    return {key: [keys[i - 1]] if i else [] for i, key in enumerate(keys)}


def fan_in(goal: Any, parts: Iterable[Any]) -> dict[Any, list[Any]]:
    """A graph in which ``goal`` needs all of ``parts``."""
    parts = list(parts)
    return {**{part: [] for part in parts}, goal: parts}


def describe(effect: tuple[Any, ...]) -> str:
    """One line for an effect: who is told what about which key."""
    kind, who, *rest = effect
    who = _short(who)
    if kind == "compute-task":
        return f"{who} compute {rest[0]}"
    if kind in ("free-keys", "remove-replicas", "steal-request"):
        return f"{who} {kind} {rest[0]}"
    if kind == "acquire-replicas":
        return f"{who} acquire {_holders(rest[0])}"
    if kind == "refresh-who-has":
        return f"{who} refresh {_holders(rest[0])}"
    if kind == "worker-status-change":
        return f"{who} status {rest[0]}"
    if kind == "remove-worker":
        return f"{who} removed {_short(rest[0])}"
    if kind == "key-in-memory":
        return f"{who} memory {rest[0]}"
    if kind == "task-erred":
        return f"{who} erred {rest[0]}: {rest[1]}"
    if kind == "lost-data":
        return f"{who} lost {rest[0]}"
    if kind == "task-retried":
        return f"{who} retried {rest[0]}"
    if kind == "cancelled-keys":
        return f"{who} cancelled {' '.join(map(str, rest[0]))}: {rest[1]}"
    if kind == "restart":
        return f"{who} restart"
    raise ValueError(f"unknown effect {effect!r}")


def _short(who: str) -> str:
    return who.removeprefix("tcp://").removesuffix(":1")


def _holders(who_has: Mapping[Any, Sequence[str]]) -> str:
    return " ".join(f"{key}@{','.join(map(_short, holders))}" for key, holders in who_has.items())


class Graph:
    """A submission that a script brings in slice by slice."""

    def __init__(
        self,
        rig: Rig,
        number: int,
        client: str,
        tasks: Mapping[Any, Sequence[Any]],
        slices: Sequence[int],
        **options: Any,
    ) -> None:
        self.rig = rig
        self.number = number
        self.client = client
        self.tasks = {key: list(needs) for key, needs in tasks.items()}
        self.keys = list(self.tasks)
        wanted = options.get("wanted")
        self.wanted = list(self.keys if wanted is None else wanted)
        self.producers = set(options.get("producers", ()))
        self.annotations: Mapping[Any, Mapping[str, Any]] = options.get("annotations") or {}
        self.bounds = self._bounds(slices)
        self.known_groups: dict[str, int] = {}
        self.known_prefixes: dict[str, int] = {}
        self.externals = list(
            dict.fromkeys(
                need for needs in self.tasks.values() for need in needs if need not in self.tasks
            )
        )

    def _bounds(self, slices: Sequence[int]) -> Iterator[tuple[int, int]]:
        start = 0
        for size in [*slices, len(self.keys)]:
            if start < len(self.keys):
                yield start, min(start + size, len(self.keys))
            start += size

    def begin(self, **options: Any) -> Any:
        """Open the submission. Returns what the machine answers: None, or what is missing."""
        rig = self.rig
        return rig.send(
            ev.GraphBegun,
            client_id=self.client,
            submission=self.number,
            n_tasks=len(self.keys),
            externals=self.externals,
            wanted_externals=[key for key in self.wanted if key not in self.tasks],
            submitting_task=options.get("submitting_task"),
            fifo_timeout=options.get("fifo_timeout", 0.0),
            user_priority=options.get("priority", 0.0),
            actors=options.get("actors"),
            wanted=self.wanted,
        )

    def slice(self) -> bool:
        """Bring in the next slice; False when there was none left."""
        bound = next(self.bounds, None)
        if bound is None:
            return False
        start, stop = bound
        keys = self.keys[start:stop]
        index = {key: i for i, key in enumerate(self.keys)}
        outside = {key: i for i, key in enumerate(self.externals)}
        counts: list[int] = []
        needs: list[int] = []
        for key in keys:
            counts.append(len(self.tasks[key]))
            needs.extend(
                index[need] if need in index else -(outside[need] + 1) for need in self.tasks[key]
            )
        later = Counter(need for key in self.keys[stop:] for need in self.tasks[key])
        new_prefixes: list[str] = []
        new_groups: list[str] = []
        group_prefix: list[int] = []
        group_index: list[int] = []
        for key in keys:
            group, prefix = group_name(key)
            if prefix not in self.known_prefixes:
                self.known_prefixes[prefix] = len(self.known_prefixes)
                new_prefixes.append(prefix)
            if group not in self.known_groups:
                self.known_groups[group] = len(self.known_groups)
                new_groups.append(group)
                group_prefix.append(self.known_prefixes[prefix])
            group_index.append(self.known_groups[group])
        notes = [self.annotations.get(key) for key in keys]
        self.rig.send(
            ev.GraphSliceReady,
            submission=self.number,
            start=start,
            keys=keys,
            dependency_counts=_pack("i", counts),
            dependencies=_pack("i", needs),
            order=_pack("d", range(start, stop)),
            flags=bytes(
                (WANTED if key in self.wanted else 0)
                | (DATA_PRODUCER if key in self.producers else 0)
                for key in keys
            ),
            future_dependents=_pack("i", [later[key] for key in keys]),
            new_prefixes=new_prefixes,
            new_groups=new_groups,
            new_group_prefix=_pack("i", group_prefix),
            group_index=_pack("i", group_index),
            new_annotations=[note for note in notes if note is not None],
            annotation_index=_pack("i", _indexes(notes, self._annotated(start))),
            run_specs=[repr(key).encode() for key in keys],
        )
        return True

    def _annotated(self, stop: int) -> int:
        return sum(1 for key in self.keys[:stop] if self.annotations.get(key) is not None)

    def end(self) -> None:
        """Close the submission."""
        self.rig.send(ev.GraphEnded, submission=self.number)

    def fail(self, text: str = "cannot be opened") -> None:
        """The rest of the graph will not come."""
        self.rig.send(
            ev.GraphFailed,
            submission=self.number,
            client_id=self.client,
            keys=self.wanted,
            exception=text,
            traceback=None,
            exception_text=text,
            traceback_text="",
        )


def _indexes(notes: Sequence[Any], start: int) -> list[int]:
    found = []
    for note in notes:
        found.append(-1 if note is None else start)
        start += note is not None
    return found


class Rig:
    """A scheduler machine under test; ``now`` is its clock, in seconds."""

    def __init__(
        self, workers: str | Mapping[str, int] = "", clients: str = "c", **settings: Any
    ) -> None:
        self.sink = RecordingSink()
        settings.setdefault("validate", "event")
        self.machine = SchedulerMachine(EngineSettings(**settings), self.sink)
        self.state = self.machine.state
        self.now = 100.0
        self.sent: Counter[type[ev.Event]] = Counter()
        self._number = 0
        self._submission = 0
        for name in clients.split():
            self.client(name)
        if isinstance(workers, str):
            workers = dict.fromkeys(workers.split(), 1)
        for name, nthreads in workers.items():
            self.worker(name, nthreads=nthreads)
        self.skip()

    # Effects

    def take(self) -> list[str]:
        """The effects since the last look, one line each."""
        return [describe(effect) for effect in self.sink.take()]

    def expect(self, *lines: str) -> None:
        """The effects since the last look are exactly these."""
        assert self.take() == list(lines)

    def skip(self) -> None:
        """What has happened so far is not what the script is about."""
        self.sink.take()

    # Events

    def send(self, event: type[ev.Event], stimulus_id: str | None = None, **fields: Any) -> Any:
        """Send one event; a generated stimulus id names its class."""
        self._number += 1
        self.sent[event] += 1
        return self.machine.handle(
            event(self.now, stimulus_id or f"{event.__name__}-{self._number}", **fields)
        )

    def worker(self, name: str, **fields: Any) -> Any:
        """Register a worker. Returns its record, or the reason why it was refused."""
        return self.send(
            ev.WorkerRegistered,
            address=fields.pop("address", address_of(name)),
            name=fields.pop("alias", name),
            host=fields.pop("host", f"host-{name}"),
            server_id=f"id-{name}-{self._number}",
            nthreads=fields.pop("nthreads", 1),
            memory_limit=fields.pop("memory_limit", 0),
            resources=fields.pop("resources", {}),
            status=fields.pop("status", "running"),
            info=None,
            peer=None,
        )

    def client(self, name: str) -> Client:
        """Connect a client."""
        return self.send(ev.ClientConnected, client_id=name, info=None, peer=object())

    def begin(
        self,
        tasks: Mapping[Any, Sequence[Any]],
        *,
        client: str = "c",
        slices: Sequence[int] = (),
        **options: Any,
    ) -> Graph:
        """Open a submission, without any of its tasks yet."""
        self._submission += 1
        graph = Graph(self, self._submission, client, tasks, slices, **options)
        graph.begin(**options)
        return graph

    def graph(self, tasks: Mapping[Any, Sequence[Any]], **options: Any) -> None:
        """Submit a whole graph ``{key: inputs}``; every key is wanted unless ``wanted`` says."""
        graph = self.begin(tasks, **options)
        if graph.number not in self.machine.submissions:
            return
        while graph.slice():
            pass
        graph.end()

    def finish(
        self, key: Any, worker: str | None = None, run_id: int | None = None, **fields: Any
    ) -> None:
        """``worker`` (default: the one it processes on) reports success."""
        task = self.state.tasks.get(key)
        on, run_id = self._run(task, worker, run_id)
        seconds = fields.pop("seconds", 0.1)
        self.send(
            ev.TaskFinished,
            worker=on,
            key=key,
            run_id=run_id,
            nbytes=fields.pop("nbytes", 8),
            typename=fields.pop("typename", "int"),
            type=fields.pop("type", b"int"),
            compute_start=self.now,
            compute_stop=self.now + seconds,
            compute_seconds=seconds,
            transfer_seconds=fields.pop("transfer", 0.0),
            metadata=fields.pop("metadata", None),
            thread=1,
            startstops=None,
            has_compute=fields.pop("has_compute", True),
            **fields,
        )

    def err(
        self,
        key: Any,
        worker: str | None = None,
        run_id: int | None = None,
        text: str = "boom",
    ) -> None:
        """``worker`` (default: the one it processes on) reports failure."""
        on, run_id = self._run(self.state.tasks.get(key), worker, run_id)
        self.send(
            ev.TaskErred,
            worker=on,
            key=key,
            run_id=run_id,
            exception=text,
            traceback="tb",
            exception_text=text,
            traceback_text="tb",
        )

    def _run(
        self, task: Task | None, worker: str | None, run_id: int | None
    ) -> tuple[Worker | None, int]:
        on = self.at(worker) if worker is not None else (task.worker if task else None)
        if run_id is None:
            run_id = task.run_id if task is not None else -1
        return on, run_id

    def secede(self, key: Any, seconds: float = -1.0) -> None:
        """The task leaves its worker's thread pool."""
        task = self.state.tasks[key]
        self.send(
            ev.LongRunning,
            worker=task.worker,
            key=key,
            run_id=task.run_id,
            compute_duration=seconds,
        )

    def reschedule(self, key: Any, worker: str | None = None) -> Any:
        """``worker`` asks to have the key run elsewhere; None: an operator does."""
        return self.send(ev.RescheduleAsked, worker=self.at(worker) if worker else None, key=key)

    def lose(self, worker: str | Worker, expected: bool = False) -> None:
        """The worker is gone."""
        on = self.at(worker) if isinstance(worker, str) else worker
        self.send(ev.WorkerLost, worker=on, expected=expected, reason="gone")

    def status(self, worker: str, status: str) -> Any:
        """The worker says that its status changed."""
        return self.send(ev.WorkerStatusChanged, worker=self.at(worker), status=status)

    def added(self, worker: str, *keys: Any) -> None:
        """The worker fetched copies."""
        self.send(ev.KeysAdded, worker=self.at(worker), keys=list(keys))

    def dropped(self, worker: str, key: Any) -> None:
        """The worker no longer has its copy."""
        self.send(ev.DataReleased, worker=self.at(worker), key=key)

    def scatter(self, key: Any, *workers: str, client: str | None = "c", nbytes: int = 8) -> None:
        """Data was put on workers."""
        self.send(
            ev.DataPlaced,
            client_id=client,
            who_has={key: [address_of(worker) for worker in workers]},
            nbytes={key: nbytes},
        )

    def want(self, *keys: Any, client: str = "c") -> None:
        """The client asks for keys."""
        self.send(ev.KeysWanted, client_id=client, keys=list(keys))

    def release(self, *keys: Any, client: str = "c") -> None:
        """The client lets keys go."""
        self.send(ev.KeysReleased, client_id=client, keys=list(keys))

    def cancel(self, *keys: Any, client: str = "c", force: bool = False) -> None:
        """The client cancels keys."""
        self.send(
            ev.KeysCancelled,
            client_id=client,
            keys=list(keys),
            force=force,
            reason="cancelled",
            message="by test",
        )

    def retry(self, *keys: Any, client: str = "c") -> Any:
        """The client has failed keys run again."""
        return self.send(ev.KeysRetried, client_id=client, keys=list(keys))

    def leave(self, client: str) -> None:
        """The client is gone."""
        self.send(ev.ClientGone, client=self.state.clients[client])

    def wait(self, seconds: float) -> None:
        """Time passes, and the machine is told."""
        self.now += seconds
        self.send(ev.TimePassed)

    # What the books say

    def at(self, worker: str) -> Worker:
        """The record of a worker."""
        return self.state.workers[address_of(worker)]

    def task(self, key: Any) -> Task:
        """The record of a task."""
        return self.state.tasks[key]

    def states(self, *keys: Any) -> str:
        """The states of the keys, in one string."""
        return " ".join(
            self.state.tasks[key].state if key in self.state.tasks else "-" for key in keys
        )

    def on(self, key: Any) -> str | None:
        """The short name of the worker that processes the key."""
        worker = self.state.tasks[key].worker
        return None if worker is None else _short(worker.address)

    def path(self, key: Any) -> list[str]:
        """The states that the key went through, oldest first."""
        found: list[str] = []
        for record in self.machine.journal.story({key}):
            if record[0] != key or record[1] == record[2]:
                continue
            if not found:
                found.append(record[1])
            found.append(record[2])
        return found

    def edges(self) -> set[tuple[str, str]]:
        """Every edge that was taken."""
        return {
            (record[1], record[2])
            for record in self.machine.journal.story()
            if record[1] != record[2]
        }

    def nothing_left(self) -> None:
        """No trace of any task is on the books."""
        state = self.state
        assert not state.tasks
        assert not state.groups
        assert not state.replicated
        assert not state.unrunnable
        assert not self.machine.submissions
        assert state.total_occupancy_ns == 0
        assert all(count == 0 for count in state.task_counts.values())
        for worker in state.workers.values():
            assert not worker.loads
            assert not worker.actors
            assert not worker.n_processing
            assert not worker.n_replicas
            assert worker.nbytes == 0
            assert worker.occupancy_ns == 0
            assert worker.network_bytes == 0
            assert not any(worker.used_resources.values())
        for client in state.clients.values():
            assert client.n_wants == 0
