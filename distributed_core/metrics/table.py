"""The one table of metrics: name, kind, unit, labels, meaning, what to do, and how many series.

The exporter emits exactly these families, always all of them; ``docs/metrics.md`` is made from it.
Holds data only. A new metric is a row here and its value in ``exporter``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

__all__ = ["METRICS", "TASK_STATES", "WORKER_STATES", "Family", "Kind", "Metric"]

TASK_STATES: Final = ("released", "waiting", "no-worker", "queued", "processing", "memory", "erred")
WORKER_STATES: Final = ("idle", "partially_saturated", "saturated", "paused", "retiring")

_OPS: Final = 200  # More than there are operations.
_PEERS: Final = 6


class Kind(StrEnum):
    """Kinds of Prometheus metrics."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"


class Family(StrEnum):
    """Who names a metric, and so what its name begins with."""

    DASK = "dask"
    """Dask's scheduler; begins with the setting ``metrics.namespace``."""
    OURS = "distributed_core"


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of series.

    :param name: without what it begins with, and without ``_total`` of counters.
    :param budget: the most series it can have; further label values are summed up as ``other``.
        0: one for each prefix shown, times the values of the other label.
    :param when_high: what a rise means and what to do.
    """

    family: Family
    name: str
    kind: Kind
    help: str
    when_high: str
    unit: str = ""
    labels: tuple[str, ...] = ()
    budget: int = 1

    def full_name(self, namespace: str) -> str:
        """The name as scraped; samples of histograms and summaries add to it."""
        start = namespace if self.family is Family.DASK else self.family.value
        suffix = "_total" if self.kind is Kind.COUNTER else ""
        return f"{start}_{self.name}{suffix}"


def _dask(
    name: str,
    kind: Kind,
    help_text: str,
    when_high: str,
    unit: str = "",
    labels: tuple[str, ...] = (),
    budget: int = 1,
) -> Metric:
    return Metric(Family.DASK, name, kind, help_text, when_high, unit, labels, budget)


def _ours(
    name: str,
    kind: Kind,
    help_text: str,
    when_high: str,
    unit: str = "",
    labels: tuple[str, ...] = (),
    budget: int = 1,
) -> Metric:
    return Metric(Family.OURS, name, kind, help_text, when_high, unit, labels, budget)


_G, _C, _H, _S = Kind.GAUGE, Kind.COUNTER, Kind.HISTOGRAM, Kind.SUMMARY
_PREFIX: Final = ("task_prefix_name",)
_INFORMATION: Final = "For orientation."

METRICS: Final[tuple[Metric, ...]] = (
    # Dask's scheduler: names, types and labels are its own, since dashboards query them.
    _dask(
        "scheduler_clients",
        _G,
        "Clients connected.",
        "Many clients that hold futures keep data in memory; look for programs that never end.",
    ),
    _dask("scheduler_client_connections_added", _C, "Clients that connected.", _INFORMATION),
    _dask(
        "scheduler_client_connections_removed",
        _C,
        "Clients that left or were lost.",
        "Fast growth with few clients: a client reconnects again and again; read its log.",
    ),
    _dask(
        "scheduler_desired_workers",
        _G,
        "Workers that the work at hand calls for, at five seconds for all of it.",
        "Well above the number of workers for long: add workers.",
        "workers",
    ),
    _dask(
        "scheduler_workers",
        _G,
        "Workers by how busy they are.",
        "paused: workers are short of memory. saturated for long: add workers. idle with "
        "queued tasks: look at restrictions of the tasks.",
        "workers",
        ("state",),
        len(WORKER_STATES),
    ),
    _dask("scheduler_workers_added", _C, "Workers that registered.", _INFORMATION),
    _dask(
        "scheduler_workers_removed",
        _C,
        "Workers that left or were lost.",
        "Fast growth: workers die. Read their logs, and the scheduler's for the reasons.",
    ),
    _dask(
        "scheduler_gil_contention_seconds",
        _C,
        "Never has a sample: all work of the scheduler is done in one thread.",
        "Does not apply.",
        "seconds",
    ),
    _dask(
        "scheduler_gc_collection_seconds",
        _C,
        "Time spent in Python's cycle collector.",
        "More than a few percent of the time: see distributed_core_gc_pause_seconds.",
        "seconds",
    ),
    _dask("scheduler_last_time", _C, "Monotonic clock at the last measurement.", _INFORMATION, "s"),
    _dask(
        "scheduler_tasks_suspicious",
        _C,
        "Deaths of workers that were blamed on tasks of a prefix.",
        "Its tasks kill workers: most often memory. Look at their inputs and at worker logs.",
        "deaths",
        _PREFIX,
        0,
    ),
    _dask("scheduler_tasks_forgotten", _C, "Tasks forgotten.", _INFORMATION, "tasks"),
    _dask(
        "scheduler_tasks",
        _G,
        "Tasks by state.",
        "no-worker: no worker meets a restriction, see /explain. queued: more work than workers. "
        "erred: ask /explain for one of them. memory: futures that nobody drops.",
        "tasks",
        ("state",),
        len(TASK_STATES),
    ),
    _dask(
        "scheduler_task_groups",
        _G,
        "Task groups known.",
        "Each costs a little memory: key names without a common part make one group each.",
    ),
    _dask(
        "scheduler_tasks_compute_seconds",
        _C,
        "Time that workers spent computing tasks of a prefix.",
        "The prefixes to make faster first.",
        "seconds",
        _PREFIX,
        0,
    ),
    _dask(
        "scheduler_tasks_transfer_seconds",
        _C,
        "Time that workers spent fetching inputs for tasks of a prefix.",
        "Close to the compute time: larger chunks, or fewer workers with more threads.",
        "seconds",
        _PREFIX,
        0,
    ),
    _dask(
        "scheduler_tasks_output_bytes",
        _G,
        "Size of the results in memory, each counted once.",
        "Near the memory of all workers: drop futures, or add workers.",
        "bytes",
        _PREFIX,
        0,
    ),
    _dask(
        "scheduler_prefix_state_totals",
        _C,
        "How often tasks of a prefix entered a state.",
        "released many times the number of tasks: results are lost and computed again.",
        "tasks",
        ("task_prefix_name", "state"),
        0,
    ),
    _dask(
        "scheduler_tick_duration_maximum_seconds",
        _G,
        "Longest time between two ticks of the event loop in the last minute; no scrape resets it.",
        "As distributed_core_event_loop_lag_seconds.",
        "seconds",
    ),
    _dask("scheduler_tick_count", _C, "Ticks of the event loop.", _INFORMATION),
    _dask("semaphore_max_leases", _G, "Leases allowed.", _INFORMATION, "", ("name",), 100),
    _dask(
        "semaphore_active_leases",
        _G,
        "Leases held.",
        "Always at the maximum: the semaphore is what the work waits for.",
        "",
        ("name",),
        100,
    ),
    _dask(
        "semaphore_pending_leases",
        _G,
        "Leases waited for.",
        "Raise the number of leases, or shorten what is done under one.",
        "",
        ("name",),
        100,
    ),
    _dask("semaphore_acquire", _C, "Leases granted.", _INFORMATION, "", ("name",), 100),
    _dask("semaphore_release", _C, "Leases given back.", _INFORMATION, "", ("name",), 100),
    _dask(
        "semaphore_average_pending_lease_time_s",
        _G,
        "Moving average of the time until a lease was granted.",
        "As semaphore_pending_leases.",
        "seconds",
        ("name",),
        100,
    ),
    _dask(
        "stealing_request_count",
        _C,
        "Requests to move a task to another worker, by how costly the move is.",
        "Fast growth with little gain: tasks are too small to be moved.",
        "",
        ("cost_multiplier",),
        32,
    ),
    _dask(
        "stealing_request_cost",
        _C,
        "Cost of the requests to move tasks.",
        "As stealing_request_count.",
        "seconds",
        ("cost_multiplier",),
        32,
    ),
    # Ours.
    _ours(
        "build_info",
        _G,
        "Always 1; the labels say what runs.",
        _INFORMATION,
        "",
        ("version", "python"),
    ),
    _ours(
        "event_loop_lag_seconds",
        _H,
        "How late the event loop ran a timer: for so long it answered nobody.",
        "Above 0.1 s often: compare handler_seconds and gc_pause_seconds, then look for other "
        "processes on the machine's cores.",
        "seconds",
    ),
    _ours(
        "event_loop_lag_maximum_seconds",
        _G,
        "Largest lag of the last minute; no scrape resets it.",
        "Above 1 s: as event_loop_lag_seconds. Heartbeats wait meanwhile.",
        "seconds",
    ),
    _ours(
        "handler_seconds",
        _S,
        "Time for which calls of an operation held the event loop.",
        "The operations that load the scheduler; very many small calls are a loop in a client.",
        "seconds",
        ("op",),
        _OPS,
    ),
    _ours(
        "handler_errors",
        _C,
        "Calls that ended in an error of the scheduler's own.",
        "Never zero for long without reason: each is logged with a traceback; report it.",
        "calls",
        ("op",),
        _OPS,
    ),
    _ours(
        "messages_received",
        _C,
        "Messages that fit, by kind of peer and operation.",
        "Which peers load the scheduler, and with what.",
        "messages",
        ("peer", "op"),
        _OPS * _PEERS,
    ),
    _ours(
        "messages_sent",
        _C,
        "Messages sent, by kind of peer and operation.",
        _INFORMATION,
        "messages",
        ("peer", "op"),
        _OPS * _PEERS,
    ),
    _ours(
        "messages_rejected",
        _C,
        "Messages that did not fit, by kind of peer, operation and reason.",
        "announced: a feature of a later release is used. Others: a peer of another version, or "
        "one that is no Dask peer at all. The log names it.",
        "messages",
        ("peer", "op", "reason"),
        _OPS,
    ),
    _ours(
        "surplus_fields",
        _C,
        "Requests with fields that nobody knows; the fields were ignored.",
        "Peers of another version; the log names the fields.",
        "messages",
        ("op",),
        _OPS,
    ),
    _ours("bytes_received", _C, "Bytes read from peers.", _INFORMATION, "bytes"),
    _ours(
        "bytes_sent",
        _C,
        "Bytes written to peers.",
        "Near the network's limit: large graphs or scattered data go through the scheduler.",
        "bytes",
    ),
    _ours(
        "connections",
        _G,
        "Open connections by kind of peer.",
        "Near the limit of open files (process_max_fds): raise it.",
        "connections",
        ("peer",),
        _PEERS,
    ),
    _ours("connections_opened", _C, "Connections accepted or made.", _INFORMATION, "connections"),
    _ours(
        "connections_refused",
        _C,
        "Connections refused, because there are too many.",
        "Raise comm.max-connections, or find out who connects.",
        "connections",
    ),
    _ours(
        "connection_failures",
        _C,
        "Connections that failed, by what went wrong.",
        "handshake, frame: something that is no Dask peer, or a broken one. timeout, connect: "
        "the network, or a stuck peer.",
        "connections",
        ("kind",),
        4,
    ),
    _ours(
        "outbox_bytes",
        _G,
        "Bytes written that peers have not taken yet, by kind of peer.",
        "A peer reads too slowly: often a client whose event loop is blocked.",
        "bytes",
        ("peer",),
        _PEERS,
    ),
    _ours(
        "notes",
        _C,
        "What happened without a change of state, such as stale answers, by kind.",
        "stale kinds grow when workers are lost or tasks are canceled; without that, look at the "
        "story of a task at /story.",
        "events",
        ("kind",),
        50,
    ),
    _ours(
        "transition_errors",
        _C,
        "Events that the engine could not apply.",
        "Must stay 0: each is a bug and is logged with its story; report it.",
        "events",
    ),
    _ours("engine_events", _C, "Events that the engine handled.", _INFORMATION, "events"),
    _ours("engine_transitions", _C, "Changes of a task's state.", _INFORMATION, "transitions"),
    _ours(
        "tasks_assigned",
        _C,
        "Tasks sent to a worker. Process CPU over this is the cost of a task.",
        _INFORMATION,
        "tasks",
    ),
    _ours(
        "open_workers",
        _G,
        "Running workers with room for a queued task.",
        "With queued tasks at hand it must be 0; report it otherwise.",
        "workers",
    ),
    _ours(
        "unmet_demands",
        _G,
        "Distinct demands (restrictions, resources) of tasks that no running worker meets.",
        "Above 0 for long: start workers that meet them; /explain of such a task says which.",
        "demands",
    ),
    _ours(
        "task_prefixes",
        _G,
        "Task prefixes known.",
        "Beyond metrics.max-prefix-labels they are summed up as other. Many: key names without a "
        "common part.",
        "prefixes",
    ),
    _ours(
        "occupancy_seconds",
        _G,
        "Seconds of work that all processing tasks stand for.",
        "Over the number of threads it is the time until the work is done.",
        "seconds",
    ),
    _ours("threads", _G, "Threads of all workers.", _INFORMATION, "threads"),
    _ours(
        "journal_records",
        _C,
        "Records written to the journal that stories are made from.",
        "Over engine.journal-length in a short time: stories reach back only so far.",
        "records",
    ),
    _ours(
        "materializer_submissions", _C, "Graphs handed to the materializer.", _INFORMATION, "graphs"
    ),
    _ours(
        "materializer_tasks", _C, "Tasks that came out of the materializer.", _INFORMATION, "tasks"
    ),
    _ours(
        "materializer_failures",
        _C,
        "Graphs that could not be opened, by kind.",
        "The client has the reason as its error. crashed, memory, timeout: see the log, and the "
        "limits in the section materializer of the configuration.",
        "graphs",
        ("kind",),
        20,
    ),
    _ours(
        "materializer_restarts",
        _C,
        "Materializer processes started anew.",
        "It dies again and again: a graph that kills it, or an environment that cannot start it.",
        "restarts",
    ),
    _ours(
        "materializer_cpu_seconds",
        _C,
        "Processor time of materializer processes.",
        "One busy core for long: graphs are large; raise materializer.processes.",
        "seconds",
    ),
    _ours(
        "materializer_queue",
        _G,
        "Graphs that wait for a materializer process.",
        "Above 0 for long: raise materializer.processes.",
        "graphs",
    ),
    _ours(
        "materializer_processes",
        _G,
        "Materializer processes alive.",
        "0 for more than a second: no graph can be opened; see the log.",
        "processes",
    ),
    _ours(
        "gc_pause_seconds",
        _H,
        "Pauses of Python's cycle collector; nobody is answered meanwhile.",
        "Above 0.1 s: raise gc.thresholds.",
        "seconds",
    ),
    _ours(
        "gc_pause_maximum_seconds",
        _G,
        "Longest pause of the last minute; no scrape resets it.",
        "As gc_pause_seconds.",
        "seconds",
    ),
    _ours(
        "unknown_config_keys",
        _G,
        "Keys of distributed.* in Dask's configuration that nobody knows.",
        "Above 0: a key is misspelled; distributed-core check-config names it.",
        "keys",
    ),
    _ours(
        "plain_listener",
        _G,
        "1 if an unencrypted listener is open to other machines.",
        "1: whoever reaches the port can run code on the workers. Use TLS or a closed network.",
    ),
    _ours(
        "http_responses",
        _C,
        "HTTP responses by route and status.",
        "5xx: see http_handler_errors. 403: a foreign page or machine asked for a change.",
        "responses",
        ("route", "status"),
        200,
    ),
    _ours(
        "http_handler_errors",
        _C,
        "HTTP requests that ended in an error of the scheduler's own.",
        "Each is logged with a traceback; report it.",
        "requests",
    ),
    _ours(
        "http_connections_refused",
        _C,
        "HTTP connections refused, because there are too many.",
        "Find out who connects; a proxy may pool connections.",
        "connections",
    ),
    _ours(
        "http_connection_failures",
        _C,
        "HTTP connections that were cut, by reason.",
        "protocol: not HTTP, or not valid. timeout: a peer too slow to send or to read.",
        "connections",
        ("kind",),
        2,
    ),
)
"""All metrics, in the order of the scrape."""
