"""What the scheduler machine says of itself: why a task waits, and all of its state.

Owns the words and the plain form; reads the books and changes nothing. The cost is that of an
operator's question, not of a task. Called by the server's handlers and its HTTP pages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from cython_ext.entities import Client, Group, Prefix, Restrictions, Task, Worker
from cython_ext.transitions import SchedulerMachine
from distributed_core.engine.story import story_tuples

__all__ = ["dump", "explain"]

# An answer is read by a person: the rest is counted.
_MAX_NAMED = 5
# A chain of inputs may be the whole graph.
_MAX_VISITED = 100_000

_ACTIVE = ("waiting", "no-worker", "queued", "processing")


def explain(machine: SchedulerMachine, key: Any) -> list[str]:
    """Sentences that say what ``key`` waits for, or what became of it.

    Times are those of the last event that the machine has seen.

    :raises KeyError: there is no such task; its story may tell more.
    """
    task = machine.state.tasks[key]
    lines = [f"{key!r} is {task.state}, since {_ago(machine, task)}."]
    lines.extend(_TELLERS[task.state](machine, task))
    lines.extend(_demand(task))
    if task.suspicious:
        lines.append(
            f"It was running on {_count(task.suspicious, 'worker')} that died; more than "
            f"{machine.settings.allowed_failures} make it err."
        )
    return lines


def _ago(machine: SchedulerMachine, task: Task) -> str:
    return f"{max(0.0, machine.now - task.since):.1f} s"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _named(things: Iterable[str]) -> str:
    listed = list(things)
    more = len(listed) - _MAX_NAMED
    return ", ".join(listed[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _demand(task: Task) -> list[str]:
    """Who needs it."""
    parts = []
    if task.n_wants:
        parts.append(f"wanted by {_named(client.id for client in task.who_wants)}")
    if task.n_waiters:
        active = [other for other in task.dependents if other.state in _ACTIVE]
        parts.append(f"an input of {_named(repr(other.key) for other in active)}")
    if task.n_future:
        parts.append("held for a graph that is still coming in")
    if not parts:
        return ["Nobody needs it."]
    return [f"It is {'; '.join(parts)}."]


# State by state


def _released(machine: SchedulerMachine, task: Task) -> list[str]:
    if task.run_spec is None:
        lines = ["No graph has said how to compute it, and no worker holds it."]
        if task.lost:
            lines.append("Its data was lost with the last worker that held it.")
        return lines
    if task.lost:
        return ["An input of it was lost and cannot be computed again."]
    return ["It is kept, without its result, since other tasks may need it computed again."]


def _waiting(machine: SchedulerMachine, task: Task) -> list[str]:
    missing = [need for need in task.dependencies if need.state != "memory"]
    lines = [
        f"It waits for {task.n_waiting} of {_count(task.n_dependencies, 'input')}: "
        + _named(f"{need.key!r} ({_brief(need)})" for need in missing)
        + "."
    ]
    bottom, is_complete = _bottom(missing)
    if bottom and {need.key for need in bottom} != {need.key for need in missing}:
        counts: dict[str, int] = {}
        for need in bottom:
            counts[need.state] = counts.get(need.state, 0) + 1
        lines.append(
            "At the bottom of what it waits for, there are "
            + ", ".join(f"{n} {state}" for state, n in counts.items())
            + ("" if is_complete else " (not all was looked at)")
            + ": "
            + _named(f"{need.key!r} ({_brief(need)})" for need in bottom)
            + "."
        )
    # One of each kind is told in full: it is what an operator can act on.
    told: set[str] = set()
    for need in bottom:
        if need.state in told or need.state == "processing":
            continue
        told.add(need.state)
        lines.extend(f"{need.key!r}: {line}" for line in _TELLERS[need.state](machine, need))
    return lines


def _bottom(needs: list[Task]) -> tuple[list[Task], bool]:
    """Where the chains of missing inputs end, and whether all were followed."""
    seen = {need.key for need in needs}
    stack = list(reversed(needs))
    bottom = []
    while stack:
        task = stack.pop()
        below = (
            [need for need in task.dependencies if need.state != "memory"]
            if task.state == "waiting"
            else []
        )
        if not below:
            bottom.append(task)
        for need in below:
            if need.key not in seen:
                if len(seen) >= _MAX_VISITED:
                    return bottom, False
                seen.add(need.key)
                stack.append(need)
    return bottom, True


def _brief(task: Task) -> str:
    if task.worker is not None:
        return f"processing on {task.worker.address}"
    if task.state == "released" and task.run_spec is None:
        return "not defined by any graph"
    return task.state


def _no_worker(machine: SchedulerMachine, task: Task) -> list[str]:
    restrictions = task.annotations.restrictions
    workers = list(machine.state.workers.values())
    if restrictions.empty or not workers:
        return [_who_runs(machine)]
    lines = [f"No running worker meets what it asks for: {_asked(restrictions)}."]
    unmet = [(_unmet(restrictions, worker), worker) for worker in workers]
    unmet.sort(key=lambda found: len(found[0]))
    lines.append(
        "The nearest: "
        + "; ".join(
            f"{worker.address} ({worker.name!r}) {' and '.join(reasons)}"
            for reasons, worker in unmet[:3]
        )
        + "."
    )
    timeout = machine.settings.no_workers_timeout
    if timeout >= 0:
        lines.append(f"It errs when none has come after {timeout:g} s.")
    return lines


def _asked(restrictions: Restrictions) -> str:
    parts = []
    places = [*map(str, restrictions.workers), *restrictions.hosts]
    if places:
        parts.append(f"one of the workers or hosts {_named(places)}")
    if restrictions.resources:
        parts.append(
            "resources "
            + _named(f"{name}={amount:g}" for name, amount in restrictions.resources.items())
        )
    return " with ".join(parts)


def _unmet(restrictions: Restrictions, worker: Worker) -> list[str]:
    """Why a task with these restrictions cannot go to ``worker``, in words."""
    reasons = []
    places = (*restrictions.workers, *restrictions.hosts)
    if places and not {worker.address, worker.name, worker.host}.intersection(places):
        reasons.append("is another worker")
    for name, amount in restrictions.resources.items():
        supplied = worker.resources.get(name, 0)
        if supplied < amount:
            reasons.append(f"has {name}={supplied:g} of {amount:g}")
    if worker.status != "running":
        reasons.append(f"is {worker.status}")
    return reasons


def _who_runs(machine: SchedulerMachine) -> str:
    state = machine.state
    others = []
    if state.n_paused:
        others.append(f"{state.n_paused} paused")
    if state.n_retiring:
        others.append(f"{state.n_retiring} retiring")
    what = f" ({', '.join(others)})" if others else ""
    return f"Of {_count(len(state.workers), 'worker')}{what}, {state.n_running} run."


def _queued(machine: SchedulerMachine, task: Task) -> list[str]:
    state = machine.state
    rank = (task.priority, task.uid)
    ahead = sum(1 for other in state.queued.tasks if (other.priority, other.uid) < rank)
    slots = sum(worker.max_active for worker in state.workers.values() if _runs(worker))
    lines = [
        f"It waits in line for a free slot, with {_count(ahead, 'task')} ahead of it; its group "
        f"{task.group.name!r} makes many like it, so that they are handed out one by one.",
        _who_runs(machine),
    ]
    if slots:
        lines.append(f"All {_count(slots, 'slot')} of the running workers are taken.")
    return lines


def _runs(worker: Worker) -> bool:
    return worker.status == "running"


def _processing(machine: SchedulerMachine, task: Task) -> list[str]:
    worker = task.worker
    assert worker is not None
    lines = [f"It was sent to {worker.address} ({worker.name!r}) as run {task.run_id}."]
    if task.long_running:
        lines.append("It has left the worker's thread pool (long-running).")
    elif task.key in worker.executing:
        lines.append(f"The worker has been executing it for {worker.executing[task.key]:.1f} s.")
    else:
        lines.append(
            f"The worker has not said that it executes it; it has {worker.n_processing} tasks "
            f"for {_count(worker.nthreads, 'thread')}."
        )
    if not _runs(worker):
        lines.append(f"The worker is {worker.status}.")
    if task.annotations.restrictions.resources:
        lines.append(f"Its resources are in use there: {worker.used_resources}.")
    if task.retries:
        lines.append(f"Should it fail, it is tried {_count(task.retries, 'more time')}.")
    return lines


def _memory(machine: SchedulerMachine, task: Task) -> list[str]:
    holders = _named(worker.address for worker in task.who_has)
    kind = "actor" if task.actor else f"{task.nbytes} bytes"
    return [f"Its result ({kind}) is on {holders}."]


def _erred(machine: SchedulerMachine, task: Task) -> list[str]:
    error = task.error
    assert error is not None
    if error.blame == task.key:
        where = f" on {_named(error.erred_on)}" if error.erred_on else ""
        return [f"It failed{where}: {error.exception_text}"]
    return [f"Its input {error.blame!r} failed: {error.exception_text}"]


_TELLERS = {
    "released": _released,
    "waiting": _waiting,
    "no-worker": _no_worker,
    "queued": _queued,
    "processing": _processing,
    "memory": _memory,
    "erred": _erred,
}


# All of it


def dump(machine: SchedulerMachine, exclude: Collection[str] = ()) -> dict[str, Any]:
    """The whole state as nested maps of plain values, fit for msgpack and YAML. O(tasks).

    :param exclude: names of fields to leave out, on every level.
    :returns: ``tasks``, ``workers``, ``clients``, ``task_groups``, ``task_prefixes``,
        ``transition_log``, ``counters``, ``submissions`` and totals. Tasks name one another by
        key; keys that are no strings are written as Python would show them.
    """
    state = machine.state
    left_out = frozenset(exclude)
    return _without(
        left_out,
        {
            "tasks": {_text(task.key): _task(left_out, task) for task in state.tasks.values()},
            "workers": {
                worker.address: _worker(left_out, worker) for worker in state.workers.values()
            },
            "clients": {client.id: _client(left_out, client) for client in state.clients.values()},
            "task_groups": {group.name: _group(left_out, group) for group in state.groups.values()},
            "task_prefixes": {
                prefix.name: _prefix(left_out, prefix) for prefix in state.prefixes.values()
            },
            "transition_log": []
            if "transition_log" in left_out
            else [[_text(record[0]), *record[1:]] for record in story_tuples(machine, None)],
            "counters": dict(machine.counters),
            "submissions": sorted(machine.submissions),
            "task_counts": state.task_counts,
            "total_nthreads": state.total_nthreads,
            "total_occupancy": state.total_occupancy,
            "n_running": state.n_running,
            "n_paused": state.n_paused,
            "n_idle": state.n_idle,
            "n_saturated": state.n_saturated,
            "n_events": machine.n_events,
            "n_transitions": machine.n_transitions,
        },
    )


def _without(left_out: frozenset[str], fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in left_out}


def _text(key: Any) -> str:
    return key if isinstance(key, str) else repr(key)


def _keys(tasks: Iterable[Task]) -> list[str]:
    return [_text(task.key) for task in tasks]


def _task(left_out: frozenset[str], task: Task) -> dict[str, Any]:
    error = task.error
    restrictions = task.annotations.restrictions
    return _without(
        left_out,
        {
            "key": _text(task.key),
            "state": task.state,
            "group": task.group.name,
            "prefix": task.prefix.name,
            "priority": list(task.priority),
            "dependencies": _keys(task.dependencies),
            "dependents": _keys(task.dependents),
            "waiting_on": _keys(need for need in task.dependencies if need.state != "memory"),
            "waiters": _keys(other for other in task.dependents if other.state in _ACTIVE),
            "who_has": [worker.address for worker in task.who_has],
            "who_wants": [client.id for client in task.who_wants],
            "processing_on": None if task.worker is None else task.worker.address,
            "nbytes": task.nbytes,
            "type": None if task.type_info is None else task.type_info.typename,
            "run_id": task.run_id,
            "retries": task.retries,
            "suspicious": task.suspicious,
            "actor": task.actor,
            "long_running": task.long_running,
            "lost": task.lost,
            "defined": task.run_spec is not None,
            "since": task.since,
            "worker_restrictions": [str(name) for name in restrictions.workers],
            "host_restrictions": list(restrictions.hosts),
            "resource_restrictions": dict(restrictions.resources),
            "loose_restrictions": restrictions.loose,
            "exception_text": None if error is None else error.exception_text,
            "traceback_text": None if error is None else error.traceback_text,
            "exception_blame": None if error is None else _text(error.blame),
            "erred_on": [] if error is None else list(error.erred_on),
        },
    )


def _worker(left_out: frozenset[str], worker: Worker) -> dict[str, Any]:
    return _without(
        left_out,
        {
            "address": worker.address,
            "name": worker.name if isinstance(worker.name, (int, str)) else str(worker.name),
            "host": worker.host,
            "server_id": worker.server_id,
            "status": worker.status,
            "nthreads": worker.nthreads,
            "memory_limit": worker.memory_limit,
            "resources": dict(worker.resources),
            "used_resources": dict(worker.used_resources),
            "processing": _keys(worker.processing),
            "executing": {_text(key): seconds for key, seconds in worker.executing.items()},
            "has_what": _keys(worker.has_what),
            "actors": [_text(key) for key in worker.actors],
            "nbytes": worker.nbytes,
            "occupancy": worker.occupancy,
            "network_bytes": worker.network_bytes,
        },
    )


def _client(left_out: frozenset[str], client: Client) -> dict[str, Any]:
    return _without(left_out, {"client_key": client.id, "wants_what": _keys(client.wants_what)})


def _group(left_out: frozenset[str], group: Group) -> dict[str, Any]:
    return _without(
        left_out,
        {
            "name": group.name,
            "prefix": group.prefix.name,
            "states": group.state_counts,
            "nbytes_total": group.nbytes_total,
        },
    )


def _prefix(left_out: frozenset[str], prefix: Prefix) -> dict[str, Any]:
    return _without(
        left_out,
        {
            "name": prefix.name,
            "states": prefix.state_counts,
            "entered": prefix.state_totals,
            "duration_average": prefix.duration,
            "max_exec_time": prefix.max_duration,
            "compute_seconds": prefix.compute_seconds,
            "transfer_seconds": prefix.transfer_seconds,
            "nbytes_total": prefix.nbytes_total,
            "suspicious": prefix.suspicious,
        },
    )
