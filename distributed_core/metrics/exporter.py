"""Turns the scheduler's figures into the text that Prometheus scrapes.

Owns the choice of prefixes that get series of their own. Reads a ``MetricsSource`` and changes
nothing in it. A scrape costs O(workers + prefixes), never O(tasks), and reads at most
``MAX_PREFIXES_READ`` prefixes. No scrape resets anything: any number of scrapers may come.

``prometheus_client`` takes long to import, so it is imported by ``warm`` or by the first scrape.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from heapq import nlargest
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from distributed_core.metrics.counters import OTHER, MetricsSource
from distributed_core.metrics.table import METRICS, TASK_STATES, Kind, Metric

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

__all__ = ["CONTENT_TYPE", "MAX_PREFIXES_READ", "Exporter"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

MAX_PREFIXES_READ: Final = 4_000
"""Prefixes that one scrape looks at, the newest; only more than that go uncounted in ``other``."""

_PREFIX_STATES: Final = (*TASK_STATES, "forgotten")

_ODD_NUMBERS: Final = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}

Rows = list[tuple[tuple[str, ...], float]]
"""Label values and value of each series."""

_Figures = tuple[float, ...]
"""Of one prefix: deaths, compute and transfer seconds, then entries of each state."""


class Exporter:
    """Renders ``/metrics``.

    :param source: where the figures are.
    :param version: of the program.
    :param adaptive_target: gives the number of workers wanted.
    :param namespace: what the names that Dask's scheduler has too begin with.
    :param max_prefix_labels: prefixes with series of their own.
    """

    def __init__(
        self,
        source: MetricsSource,
        *,
        version: str,
        adaptive_target: Callable[[], int],
        namespace: str = "dask",
        max_prefix_labels: int = 50,
    ) -> None:
        self._source = source
        self._version = version
        self._adaptive_target = adaptive_target
        self._namespace = namespace
        self._prefixes = _PrefixTable(max_prefix_labels)
        self._registry: CollectorRegistry | None = None

    async def warm(self) -> None:
        """Import what a scrape needs in a thread, so that the loop need not wait for it."""
        if self._registry is None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, __import__, "prometheus_client")

    def render(self) -> bytes:
        """The text of one scrape, as ``CONTENT_TYPE``.

        All families of the table, in its order, then those of the process and of Python.
        """
        import prometheus_client

        if self._registry is None:
            self._registry = prometheus_client.CollectorRegistry(auto_describe=False)
            prometheus_client.PlatformCollector(registry=self._registry)
            prometheus_client.GCCollector(registry=self._registry)
            prometheus_client.ProcessCollector(registry=self._registry)
        values = self._values()
        lines: list[str] = []
        for metric in METRICS:
            _write_family(lines, metric, metric.full_name(self._namespace), values[metric.name])
        if not Path("/proc/self/stat").exists():
            # prometheus_client has process figures for Linux alone.
            lines.append("# HELP process_cpu_seconds_total User and system CPU time.")
            lines.append("# TYPE process_cpu_seconds_total counter")
            lines.append(f"process_cpu_seconds_total {time.process_time()!r}")
        lines.append("")
        return "\n".join(lines).encode() + prometheus_client.generate_latest(self._registry)

    def _values(self) -> dict[str, Any]:
        """By name of the table: rows, a histogram, or count and sum by operation."""
        values: dict[str, Any] = {}
        values.update(self._dask_values())
        values.update(self._prefixes.values(self._source.machine.state))
        values.update(self._engine_values())
        values.update(self._server_values())
        return values

    def _dask_values(self) -> dict[str, Any]:
        source = self._source
        state = source.machine.state
        counters = source.counters
        counts = state.task_counts
        lag = source.loop_lag
        n_workers = len(state.workers)
        semaphores = counters.semaphores
        return {
            # Clients without a connection stand for queues, variables and the like.
            "scheduler_clients": _one(
                sum(client.peer is not None for client in state.clients.values())
            ),
            "scheduler_client_connections_added": _one(counters.clients_added),
            "scheduler_client_connections_removed": _one(counters.clients_removed),
            "scheduler_desired_workers": _one(self._adaptive_target()),
            "scheduler_workers": [
                (("idle",), state.n_idle),
                (("partially_saturated",), state.n_running - state.n_idle - state.n_saturated),
                (("saturated",), state.n_saturated),
                (("paused",), state.n_paused),
                (("retiring",), n_workers - state.n_paused - state.n_running),
            ],
            "scheduler_workers_added": _one(counters.workers_added),
            "scheduler_workers_removed": _one(counters.workers_removed),
            "scheduler_gil_contention_seconds": [],
            "scheduler_gc_collection_seconds": _one(source.gc_monitor.pauses.total),
            "scheduler_last_time": _one(time.monotonic()),
            "scheduler_tasks_forgotten": _one(state.n_forgotten),
            "scheduler_tasks": [((name,), counts[name]) for name in TASK_STATES],
            "scheduler_task_groups": _one(len(state.groups)),
            "scheduler_tick_duration_maximum_seconds": _one(lag.interval_seconds + lag.maximum()),
            "scheduler_tick_count": _one(lag.count),
            "semaphore_max_leases": _by_name(semaphores, "max_leases"),
            "semaphore_active_leases": _by_name(semaphores, "active_leases"),
            "semaphore_pending_leases": _by_name(semaphores, "pending_leases"),
            "semaphore_acquire": _by_name(semaphores, "acquired"),
            "semaphore_release": _by_name(semaphores, "released"),
            "semaphore_average_pending_lease_time_s": _by_name(
                semaphores, "average_pending_seconds"
            ),
            "stealing_request_count": [
                ((level,), count) for level, (count, _) in counters.stealing.items()
            ],
            "stealing_request_cost": [
                ((level,), cost) for level, (_, cost) in counters.stealing.items()
            ],
        }

    def _engine_values(self) -> dict[str, Any]:
        machine = self._source.machine
        state = machine.state
        python = ".".join(map(str, sys.version_info[:3]))
        return {
            "build_info": [((self._version, python), 1.0)],
            "notes": _keyed(machine.counters),
            "transition_errors": _one(self._source.counters.transition_errors),
            "engine_events": _one(machine.n_events),
            "engine_transitions": _one(machine.n_transitions),
            "tasks_assigned": _one(machine.n_assigned),
            "open_workers": _one(len(state.open_workers)),
            "unmet_demands": _one(len(state.unrunnable)),
            "task_prefixes": _one(len(state.prefixes)),
            "occupancy_seconds": _one(state.total_occupancy),
            "threads": _one(state.total_nthreads),
            "journal_records": _one(machine.journal.n_written),
        }

    def _server_values(self) -> dict[str, Any]:
        source = self._source
        counters = source.counters
        comm = source.comm_stats
        pool = source.materializer_stats()
        http = counters.http
        return {
            "event_loop_lag_seconds": source.loop_lag.histogram,
            "event_loop_lag_maximum_seconds": _one(source.loop_lag.maximum()),
            "handler_seconds": counters.handler_seconds,
            "handler_errors": _keyed(counters.handler_errors),
            "messages_received": _keyed(counters.messages_in),
            "messages_sent": _keyed(counters.messages_out),
            "messages_rejected": _keyed(counters.rejected),
            "surplus_fields": _keyed(counters.surplus_fields),
            "bytes_received": _one(comm.bytes_received),
            "bytes_sent": _one(comm.bytes_sent),
            "connections": _keyed(source.connection_counts()),
            "connections_opened": _one(comm.connections_opened),
            "connections_refused": _one(comm.connections_refused),
            "connection_failures": [
                (("handshake",), comm.handshake_failures),
                (("timeout",), comm.handshake_timeouts),
                (("frame",), comm.frame_errors),
                (("connect",), comm.connect_failures),
            ],
            "outbox_bytes": _keyed(source.outbox_bytes()),
            "materializer_submissions": _one(pool.submissions),
            "materializer_tasks": _one(pool.tasks),
            "materializer_failures": _keyed(pool.failures),
            "materializer_restarts": _one(pool.restarts),
            "materializer_cpu_seconds": _one(pool.cpu_seconds),
            "materializer_queue": _one(pool.queue_length),
            "materializer_processes": _one(pool.processes),
            "gc_pause_seconds": source.gc_monitor.pauses,
            "gc_pause_maximum_seconds": _one(source.gc_monitor.maximum.value()),
            "unknown_config_keys": _one(counters.unknown_config_keys),
            "plain_listener": _one(counters.plain_listener),
            "http_responses": _keyed(http.responses),
            "http_handler_errors": _one(http.handler_errors),
            "http_connections_refused": _one(http.connections_refused),
            "http_connection_failures": [
                (("protocol",), http.protocol_errors),
                (("timeout",), http.timeouts),
            ],
        }


def _write_family(lines: list[str], metric: Metric, name: str, value: Any) -> None:
    """Append a family in text form; prometheus_client's own writer takes ten times as long."""
    help_text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
    lines.append(f"# HELP {name} {help_text}")
    lines.append(f"# TYPE {name} {metric.kind.value}")
    if metric.kind is Kind.HISTOGRAM:
        for bound, count in value.cumulative():
            le = "+Inf" if math.isinf(bound) else repr(bound)
            lines.append(f'{name}_bucket{{le="{le}"}} {_number(count)}')
        lines.append(f"{name}_sum {_number(value.total)}")
        lines.append(f"{name}_count {_number(value.count)}")
    elif metric.kind is Kind.SUMMARY:
        for op, (count, total) in value.items():
            labels = f'{metric.labels[0]}="{_escape(op)}"'
            lines.append(f"{name}_count{{{labels}}} {_number(count)}")
            lines.append(f"{name}_sum{{{labels}}} {_number(total)}")
    elif not metric.labels:
        lines.extend(f"{name} {_number(number)}" for _, number in value)
    else:
        names = metric.labels
        for texts, number in _bounded(metric, value):
            labels = ",".join(
                f'{label}="{_escape(text)}"' for label, text in zip(names, texts, strict=True)
            )
            lines.append(f"{name}{{{labels}}} {_number(number)}")


def _escape(text: str) -> str:
    # Lone surrogates, which a key may have, cannot be encoded.
    text = text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _number(value: float) -> str:
    number = float(value)
    return repr(number) if math.isfinite(number) else _ODD_NUMBERS[repr(number)]


class _PrefixTable:
    """Which prefixes are shown, and the sums of all others.

    A prefix keeps its place while it has tasks; one without tasks yields it to one that has.
    ``other`` adds up what the hidden ones gained from scrape to scrape, so that it never falls
    when prefixes come, go, or change places.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._shown: dict[str, None] = {}
        self._last: dict[str, _Figures] = {}
        self._other: list[float] = [0.0] * (3 + len(_PREFIX_STATES))
        self._has_other = False

    def values(self, state: Any) -> dict[str, Rows]:
        """Rows of the metrics that are labeled by prefix."""
        prefixes = state.prefixes
        read = dict(islice(reversed(prefixes.items()), MAX_PREFIXES_READ))
        # Those shown must be read though they may be old.
        for name in self._shown:
            if name in prefixes and name not in read:
                read[name] = prefixes[name]
        self._choose(read)
        figures = {name: _figures(prefix) for name, prefix in read.items()}
        hidden_bytes = 0
        for name, prefix in read.items():
            if name not in self._shown:
                self._has_other = True
                hidden_bytes += prefix.nbytes_total
                # A prefix that fell was dropped and made anew: all of it is gain.
                before = self._last.get(name)
                for i, now in enumerate(figures[name]):
                    gain = now if before is None or now < before[i] else now - before[i]
                    self._other[i] += gain
        self._last = figures
        rows = [(name, figures[name], prefixes[name].nbytes_total) for name in self._shown]
        if self._has_other:
            rows.append((OTHER, tuple(self._other), hidden_bytes))
        return {
            "scheduler_tasks_suspicious": [((name,), row[0]) for name, row, _ in rows],
            "scheduler_tasks_compute_seconds": [((name,), row[1]) for name, row, _ in rows],
            "scheduler_tasks_transfer_seconds": [((name,), row[2]) for name, row, _ in rows],
            "scheduler_tasks_output_bytes": [((name,), nbytes) for name, _, nbytes in rows],
            "scheduler_prefix_state_totals": [
                ((name, state_name), row[3 + i])
                for name, row, _ in rows
                for i, state_name in enumerate(_PREFIX_STATES)
            ],
        }

    def _choose(self, read: Mapping[str, Any]) -> None:
        # A prefix that is called "other" must not share the series of all others.
        shown = {name: None for name in self._shown if name in read}
        candidates = [name for name in read if name not in shown and name != OTHER]
        n_free = self._limit - len(shown)
        if len(candidates) > n_free:
            ranked = nlargest(
                self._limit, candidates, key=lambda name: (read[name].n_tasks, read[name].last_used)
            )
            active = [name for name in ranked if read[name].n_tasks > 0]
            idle = sorted(
                (name for name in shown if read[name].n_tasks == 0),
                key=lambda name: read[name].last_used,
            )
            for name in idle[: max(0, len(active) - n_free)]:
                del shown[name]
            candidates = ranked[: self._limit - len(shown)]
        shown.update(dict.fromkeys(candidates))
        self._shown = shown


def _figures(prefix: Any) -> _Figures:
    totals = prefix.state_totals
    return (
        prefix.suspicious,
        prefix.compute_seconds,
        prefix.transfer_seconds,
        *(totals[name] for name in _PREFIX_STATES),
    )


def _one(value: float) -> Rows:
    return [((), value)]


def _keyed(values: Mapping[Any, float]) -> Rows:
    return [
        (tuple(map(str, key)) if isinstance(key, tuple) else (str(key),), value)
        for key, value in values.items()
    ]


def _by_name(semaphores: Mapping[str, Any], field: str) -> Rows:
    return [((name,), getattr(figures, field)) for name, figures in semaphores.items()]


def _bounded(metric: Metric, rows: Rows) -> Iterable[tuple[tuple[str, ...], float]]:
    """Keep to the label budget: the first series stay, all others are summed up."""
    if metric.budget == 0 or len(rows) <= metric.budget:
        return rows
    kept = rows[: metric.budget - 1]
    rest = sum(value for _, value in rows[metric.budget - 1 :])
    return [*kept, ((OTHER,) * len(metric.labels), rest)]
