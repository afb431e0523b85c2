"""A server made of plain data, with a real scheduler machine, for tests of HTTP and metrics."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from cython_ext.cluster import EngineSettings
from cython_ext.events import (
    ClientConnected,
    GraphBegun,
    GraphEnded,
    GraphSliceReady,
    KeysReleased,
    LongRunning,
    TaskFinished,
    WorkerRegistered,
    WorkerStatusChanged,
)
from cython_ext.sink import RecordingSink
from cython_ext.transitions import SchedulerMachine
from distributed_core.comm.settings import CommStats
from distributed_core.materializer.pool import PoolStats
from distributed_core.metrics.counters import ServerCounters
from distributed_core.metrics.monitors import GcMonitor, LagMonitor

GIB = 2**30


def packed(code: str, values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}{code}", *values)


class FakeSource:
    """Implements ``HttpSource``; tests set the attributes."""

    def __init__(self, **settings: Any) -> None:
        self.sink = RecordingSink()
        self.machine = SchedulerMachine(EngineSettings(**settings), self.sink)
        self.counters = ServerCounters()
        self.comm_stats = CommStats()
        self.loop_lag = LagMonitor()
        self.gc_monitor = GcMonitor()
        self.pool = PoolStats()
        self.is_ready = True
        self.trouble: list[str] = []
        self.idle_since: float | None = None
        self.retired: list[list[str]] = []
        self.connections: dict[str, int] = {}
        self._n_submissions = 0

    def connection_counts(self) -> Mapping[str, int]:
        return self.connections

    def outbox_bytes(self) -> Mapping[str, int]:
        return {}

    def materializer_stats(self) -> PoolStats:
        return self.pool

    def problems(self) -> Sequence[str]:
        return self.trouble

    def identity(self, n_workers: int = -1) -> Mapping[str, Any]:
        return {"type": "Scheduler", "asked": n_workers, "limit": float("inf"), "raw": b"x"}

    def check_idle(self) -> float | None:
        return self.idle_since

    async def retire_workers(self, addresses: list[str]) -> Mapping[str, Any]:
        self.retired.append(addresses)
        workers = self.machine.state.workers
        return {
            address: {"name": workers[address].name} for address in addresses if address in workers
        }

    def explain(self, key: Any) -> Sequence[str]:
        task = self.machine.state.tasks[key]
        return [f"{key!r} is {task.state}"]

    # Driving the machine.

    def add_worker(
        self, n: int, nthreads: int = 1, memory_limit: int = GIB, name: Any = None
    ) -> Any:
        address = f"tcp://127.0.0.1:{n}"
        self.machine.handle(
            WorkerRegistered(
                0.0,
                "register",
                address=address,
                name=f"w{n}" if name is None else name,
                host="127.0.0.1",
                server_id=f"id-{n}",
                nthreads=nthreads,
                memory_limit=memory_limit,
                resources={},
                status="running",
                info=None,
                peer=None,
            )
        )
        return self.machine.state.workers[address]

    def set_status(self, worker: Any, status: str) -> None:
        self.machine.handle(WorkerStatusChanged(0.0, "status", worker=worker, status=status))

    def add_client(self, client_id: str = "c1", peer: Any = "peer") -> None:
        self.machine.handle(
            ClientConnected(0.0, "client", client_id=client_id, info=None, peer=peer)
        )

    def submit(
        self,
        keys: list[Any],
        prefix: str = "inc",
        wanted: list[Any] | None = None,
        inputs: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Submit ``keys`` in one graph; ``inputs`` gives the earlier keys each needs, by index."""
        self._n_submissions += 1
        number = self._n_submissions
        parents = [list((inputs or {}).get(i, ())) for i in range(len(keys))]
        n = len(keys)
        self.machine.handle(
            GraphBegun(
                1.0,
                "graph",
                client_id="c1",
                submission=number,
                n_tasks=n,
                externals=[],
                wanted_externals=[],
                submitting_task=None,
                fifo_timeout=0.1,
                user_priority=0.0,
                actors=None,
                wanted=keys if wanted is None else wanted,
            )
        )
        is_wanted = set(keys if wanted is None else wanted)
        self.machine.handle(
            GraphSliceReady(
                1.0,
                "graph",
                submission=number,
                start=0,
                keys=keys,
                dependency_counts=packed("i", [len(row) for row in parents]),
                dependencies=packed("i", [i for row in parents for i in row]),
                order=packed("d", range(n)),
                flags=bytes(int(key in is_wanted) for key in keys),
                future_dependents=packed("i", [0] * n),
                new_prefixes=[prefix],
                new_groups=[f"{prefix}-{number}"],
                new_group_prefix=packed("i", [0]),
                group_index=packed("i", [0] * n),
                new_annotations=[],
                annotation_index=packed("i", [-1] * n),
                run_specs=[b"x"] * n,
            )
        )
        self.machine.handle(GraphEnded(1.0, "graph", submission=number))

    def finish(self, key: Any, seconds: float = 0.1, nbytes: int = 100) -> None:
        task = self.machine.state.tasks[key]
        self.machine.handle(
            TaskFinished(
                2.0,
                "finish",
                worker=task.worker,
                key=key,
                run_id=task.run_id,
                nbytes=nbytes,
                typename="int",
                type=b"t",
                compute_start=1.0,
                compute_stop=1.0 + seconds,
                compute_seconds=seconds,
                transfer_seconds=0.0,
                metadata=None,
                thread=1,
                startstops=None,
                has_compute=True,
            )
        )

    def finish_all(self, seconds: float = 0.1, nbytes: int = 100) -> None:
        while True:
            processing = [
                task for worker in self.machine.state.workers.values() for task in worker.processing
            ]
            if not processing:
                return
            for task in processing:
                self.finish(task.key, seconds, nbytes)

    def release(self, keys: list[Any]) -> None:
        self.machine.handle(KeysReleased(3.0, "release", client_id="c1", keys=keys))

    def secede(self, key: Any) -> None:
        task = self.machine.state.tasks[key]
        self.machine.handle(
            LongRunning(
                2.0,
                "secede",
                worker=task.worker,
                key=key,
                run_id=task.run_id,
                compute_duration=-1.0,
            )
        )
