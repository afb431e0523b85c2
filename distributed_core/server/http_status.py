"""The status page: the state of the cluster on one page, plain HTML without scripts.

Owns its looks. Everything that a peer named is escaped. Costs O(workers + prefixes), with a bound
on what is shown. Called by the route ``/status``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from heapq import nlargest
from html import escape
from itertools import islice
from typing import Any, Final
from urllib.parse import quote

from distributed_core.metrics.counters import MetricsSource
from distributed_core.metrics.table import TASK_STATES

__all__ = ["StatusPage"]

_MAX_WORKERS: Final = 200
_MAX_PREFIXES: Final = 50
_MAX_PREFIXES_READ: Final = 4_000
_MAX_NOTES: Final = 30
_MAX_TEXT: Final = 120

_STYLE: Final = (
    "body{font:14px/1.4 system-ui,sans-serif;margin:1.5em;color:#222;background:#fff}"
    "h1{font-size:1.3em}h2{font-size:1.1em;margin:1.5em 0 .4em}"
    "table{border-collapse:collapse}th,td{padding:.15em .7em;text-align:right;"
    "border-bottom:1px solid #ddd}th{background:#f4f4f4}"
    "th:first-child,td:first-child{text-align:left}"
    ".bad{color:#b00020}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}"
    "th{background:#2a2a2a}th,td{border-color:#333}a{color:#8ab4f8}.bad{color:#ff8a80}}"
)


class StatusPage:
    """Renders ``/status``.

    :param prefix: what paths begin with, as ``/prefix`` or empty.
    """

    def __init__(self, source: MetricsSource, version: str, prefix: str) -> None:
        self._source = source
        self._version = version
        self._prefix = prefix
        self._started = time.monotonic()
        # Time and counts of an earlier rendering, to make rates of.
        self._before = (self._started, 0, 0)
        self._rates = (0.0, 0.0)

    def render(self) -> bytes:
        """The page."""
        machine = self._source.machine
        state = machine.state
        parts = [
            "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'>"
            "<meta http-equiv='refresh' content='5'><title>distributed-core</title>"
            f"<style>{_STYLE}</style></head><body>"
            f"<h1>distributed-core {escape(self._version)}</h1>",
            self._links(),
            "<h2>Now</h2>",
            self._summary(),
            "<h2>Tasks</h2>",
            _table(TASK_STATES, [[_count(state.task_counts[name]) for name in TASK_STATES]]),
            *self._prefixes(),
            *self._workers(),
            *self._notes(),
            "</body></html>",
        ]
        return "".join(parts).encode("utf-8", "backslashreplace")

    def _links(self) -> str:
        paths = ("/metrics", "/health", "/json/counts.json", "/json/identity.json")
        links = [f"<a href='{escape(quote(self._prefix + path))}'>{path}</a>" for path in paths]
        return f"<p>{' · '.join(links)}</p>"

    def _summary(self) -> str:
        source = self._source
        machine = source.machine
        state = machine.state
        assigned, transitions = self._throughput()
        used = limit = 0
        for worker in state.workers.values():
            used += worker.nbytes
            limit += worker.memory_limit
        clients = sum(client.peer is not None for client in state.clients.values())
        rows = [
            ("Workers", f"{len(state.workers)} ({_count(state.total_nthreads)} threads)"),
            (
                "Idle, saturated, paused",
                f"{state.n_idle}, {state.n_saturated}, {state.n_paused}",
            ),
            ("Clients", _count(clients)),
            ("Stored results", f"{_size(used)} of {_size(limit) if limit else 'no limit'}"),
            ("Work at hand", f"{state.total_occupancy:.1f} s of one thread"),
            ("Tasks sent to workers", f"{assigned:.0f} per second"),
            ("Changes of state", f"{transitions:.0f} per second"),
            ("Largest lag, last minute", f"{source.loop_lag.maximum() * 1000:.0f} ms"),
        ]
        cells = [[escape(name), escape(value)] for name, value in rows]
        if source.counters.transition_errors:
            cells.append(
                [
                    "<span class='bad'>Errors of the engine</span>",
                    _count(source.counters.transition_errors),
                ]
            )
        return _table((), cells)

    def _throughput(self) -> tuple[float, float]:
        """Tasks sent and changes of state per second, since the rendering before."""
        machine = self._source.machine
        now = time.monotonic()
        before, assigned, transitions = self._before
        if now - before >= 1.0:
            seconds = now - before
            self._rates = (
                (machine.n_assigned - assigned) / seconds,
                (machine.n_transitions - transitions) / seconds,
            )
            self._before = (now, machine.n_assigned, machine.n_transitions)
        return self._rates

    def _prefixes(self) -> Iterable[str]:
        prefixes = self._source.machine.state.prefixes
        if not prefixes:
            return
        newest = islice(reversed(prefixes.values()), _MAX_PREFIXES_READ)
        shown = nlargest(_MAX_PREFIXES, newest, key=lambda one: (one.n_tasks, one.last_used))
        yield _heading("Prefixes", len(shown), len(prefixes))
        rows = []
        for prefix in shown:
            counts = prefix.state_counts
            duration = f"{prefix.duration:.3g} s" if prefix.duration >= 0 else "?"
            rows.append(
                [
                    _text(prefix.name),
                    *(_count(counts[name]) for name in TASK_STATES),
                    duration,
                    _size(prefix.nbytes_total),
                ]
            )
        yield _table(("prefix", *TASK_STATES, "duration", "stored"), rows)

    def _workers(self) -> Iterable[str]:
        workers = self._source.machine.state.workers
        if not workers:
            yield "<h2>Workers</h2><p>None.</p>"
            return
        shown = list(islice(workers.values(), _MAX_WORKERS))
        yield _heading("Workers", len(shown), len(workers))
        rows = [
            [
                _text(worker.address),
                _text(worker.name),
                worker.status
                if worker.status == "running"
                else f"<span class='bad'>{escape(worker.status)}</span>",
                _count(worker.nthreads),
                _count(worker.n_processing),
                f"{worker.occupancy:.1f} s",
                _count(worker.n_replicas),
                f"{_size(worker.nbytes)}"
                + (f" of {_size(worker.memory_limit)}" if worker.memory_limit else ""),
            ]
            for worker in shown
        ]
        names = ("address", "name", "status", "threads", "processing", "work", "results", "stored")
        yield _table(names, rows)

    def _notes(self) -> Iterable[str]:
        notes: dict[str, int] = self._source.machine.counters
        if not notes:
            return
        shown = nlargest(_MAX_NOTES, notes.items(), key=lambda item: item[1])
        yield _heading("Notes", len(shown), len(notes))
        yield _table(("kind", "events"), [[_text(name), _count(n)] for name, n in shown])


def _heading(title: str, n_shown: int, n_all: int) -> str:
    some = f" ({n_shown} of {n_all})" if n_shown < n_all else ""
    return f"<h2>{escape(title)}{some}</h2>"


def _table(names: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table; cells are HTML already."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def _text(value: Any) -> str:
    text = str(value)
    return escape(text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…")


def _count(n: int) -> str:
    return f"{n:,}"


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
