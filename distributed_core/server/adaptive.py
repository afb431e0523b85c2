"""How many workers the work calls for, and which ones could go.

Owns the two figures that adaptive deployments ask for, over the wire and over HTTP. Reads the
engine's books and changes nothing. Costs O(workers + prefixes), and for the data of workers that
may go at most ``_MAX_KEYS_READ`` keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from operator import attrgetter
from typing import Any, Final

__all__ = ["ATTRIBUTES", "DEFAULT_TARGET_DURATION", "adaptive_target", "workers_to_close"]

DEFAULT_TARGET_DURATION: Final = 5.0
"""Seconds that all the work at hand should take."""

ATTRIBUTES: Final = ("address", "name", "host", "server_id")
"""What ``workers_to_close`` can call a worker."""

_DEFAULT_MEMORY_RATIO: Final = 2.0
_FULL: Final = 0.6  # Of the memory of all workers; beyond it more workers are wanted.
_MAX_PREFIXES_READ: Final = 4_000
_MAX_KEYS_READ: Final = 20_000


def adaptive_target(machine: Any, target_duration: float = DEFAULT_TARGET_DURATION) -> int:
    """The number of workers that the work at hand calls for.

    :param machine: the ``SchedulerMachine``.
    :param target_duration: seconds that the work should take.
    :raises ValueError: a duration that is not positive.
    """
    if not target_duration > 0:
        raise ValueError(f"target_duration must be positive, got {target_duration!r}")
    state = machine.state
    workers = state.workers
    counts = state.task_counts
    n_without_worker = counts["queued"] + counts["no-worker"]
    limit = used = network_bytes = 0
    for worker in workers.values():
        limit += worker.memory_limit
        used += worker.nbytes
        network_bytes += worker.network_bytes

    seconds = state.total_occupancy + network_bytes / machine.settings.bandwidth
    if n_without_worker:
        seconds += _seconds_without_worker(machine, n_without_worker)
    # A few long tasks must not ask for more threads than there are tasks.
    threads = min(math.ceil(seconds / target_duration), n_without_worker + counts["processing"])
    if workers:
        wanted = math.ceil(threads * len(workers) / max(1, state.total_nthreads))
    else:
        wanted = max(1, threads) if n_without_worker else threads
    if used > _FULL * limit > 0:
        wanted = max(wanted, 2 * len(workers))
    if wanted >= len(workers):
        return int(wanted)
    return len(workers) - _n_dispensable(workers, limit, used)


def _seconds_without_worker(machine: Any, n_tasks: int) -> float:
    """Expected run time of all queued and no-worker tasks."""
    settings = machine.settings
    seconds = 0.0
    n_read = 0
    # The newest prefixes are the likeliest to have such tasks.
    for prefix in islice(reversed(machine.state.prefixes.values()), _MAX_PREFIXES_READ):
        if prefix.n_tasks == 0:
            continue
        counts = prefix.state_counts
        n = counts["queued"] + counts["no-worker"]
        if n == 0:
            continue
        duration = prefix.duration
        if duration < 0:
            duration = settings.default_durations.get(prefix.name, settings.unknown_duration)
        seconds += n * duration
        n_read += n
        if n_read == n_tasks:
            return float(seconds)
    if n_read == 0:
        return n_tasks * float(settings.unknown_duration)
    return float(seconds * n_tasks / n_read)


def _n_dispensable(workers: Mapping[str, Any], memory: int, stored: int) -> int:
    """How many workers ``workers_to_close`` would name, without looking at their data."""
    idle = []
    for worker in workers.values():
        if worker.n_long_running:
            memory -= worker.memory_limit
            stored -= worker.nbytes
        elif worker.n_processing == 0 and not worker.actors:
            idle.append(worker)
    if not stored:
        return len(idle)
    idle.sort(key=attrgetter("nbytes"))
    for n, worker in enumerate(idle):
        memory -= worker.memory_limit
        if memory < _DEFAULT_MEMORY_RATIO * stored:
            return n
    return len(idle)


def workers_to_close(
    machine: Any,
    n: int | None = None,
    target: int | None = None,
    minimum: int | None = None,
    memory_ratio: float | None = None,
    attribute: str = "address",
) -> list[Any]:
    """Workers that can go at little cost, the cheapest first.

    Without ``n`` and ``target``: idle workers, as long as the others keep ``memory_ratio`` times
    (2 if None) the memory that the stored data takes. With them: the ``n`` cheapest, idle or not.
    Workers with long-running tasks are never among them. Workers that are retiring already come
    first, so that a request made twice closes no more. Then come idle ones before busy ones,
    then those without an actor, then those without data that no other worker has, then
    those with little of it.

    :param machine: the ``SchedulerMachine``.
    :param n: how many; a negative one is 0.
    :param target: how many workers should stay, instead of ``n``.
    :param minimum: how many workers must stay in any case.
    :param attribute: what to return of each, one of ``ATTRIBUTES``.
    :raises ValueError: an unknown attribute.
    """
    if attribute not in ATTRIBUTES:
        raise ValueError(f"attribute must be one of {', '.join(ATTRIBUTES)}, got {attribute!r}")
    workers = machine.state.workers
    if n is None and target is not None:
        n = len(workers) - target
    is_automatic = n is None
    if n is not None:
        n = max(0, n)
        keep = len(workers) - n
        if n == 0 and memory_ratio is None:
            return []
    else:
        keep = len(workers)
        if memory_ratio is None:
            memory_ratio = _DEFAULT_MEMORY_RATIO

    able = [worker for worker in workers.values() if worker.n_long_running == 0]
    stored = sum(worker.nbytes for worker in able)
    memory = sum(worker.memory_limit for worker in able)
    if is_automatic:
        able = [worker for worker in able if worker.n_processing == 0 and not worker.actors]

    closing: list[Any] = []
    n_left = len(workers)
    for worker in _cheapest_first(able):
        memory -= worker.memory_limit
        if minimum is not None and n_left - 1 < minimum:
            break
        is_enough = n_left - 1 < keep
        has_room = memory_ratio is not None and memory >= memory_ratio * stored
        if is_enough and not has_room:
            break
        closing.append(worker)
        n_left -= 1
    return [getattr(worker, attribute) for worker in closing]


def _cheapest_first(workers: list[Any]) -> list[Any]:
    """Order workers by what their end costs; equals by age, the youngest first."""
    costs = _data_costs([worker for worker in workers if worker.n_replicas])
    groups: list[list[Any]] = [[] for _ in range(16)]
    for worker in reversed(workers):
        has_unique = worker in costs and costs[worker][0] > 0
        groups[2 * _rank(worker) + has_unique].append(worker)
    if costs:
        for group in groups:
            group.sort(key=lambda worker: costs.get(worker, (0, 0)))
    return [worker for group in groups for worker in group]


def _rank(worker: Any) -> int:
    """Retiring, idle, without an actor: 0; each that does not hold adds to it."""
    is_staying = worker.status != "closing_gracefully"
    is_busy = worker.n_processing > 0
    return 4 * int(is_staying) + 2 * int(is_busy) + int(bool(worker.actors))


def _data_costs(holders: list[Any]) -> dict[Any, tuple[int, int]]:
    """Bytes that nobody else would have, and all bytes, of workers that hold data.

    Of two workers with the same data only one passes for dispensable. Data of workers beyond
    ``_MAX_KEYS_READ`` keys is taken for unique.
    """
    costs: dict[Any, tuple[int, int]] = {}
    n_taken: dict[int, int] = {}
    n_read = 0
    holders.sort(key=lambda worker: (_rank(worker), worker.nbytes))
    for worker in holders:
        unique = max(1, worker.nbytes)
        if worker.n_replicas <= _MAX_KEYS_READ - n_read:
            n_read += worker.n_replicas
            held = worker.has_what
            unique = sum(
                max(1, task.nbytes)
                for task in held
                if task.n_replicas - n_taken.get(task.uid, 0) <= 1
            )
            if not unique:
                for task in held:
                    n_taken[task.uid] = n_taken.get(task.uid, 0) + 1
        costs[worker] = (unique, worker.nbytes)
    return costs
