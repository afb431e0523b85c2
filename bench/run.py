"""The bench: ours and the best stock configuration, alternately, in one run, as ratios.

Owns the order of events, what is measured between which two moments, and the table. It must not
import the scheduler under test: both sides are processes, started by a command line, and met only
through the wire and their process accounting. Called by ``python -m bench``.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import socket
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from bench.processes import (
    BenchError,
    Child,
    descendants_cpu_seconds,
    free_port,
    peak_rss_bytes,
    process_cpu_seconds,
    reset_peak_rss,
    rss_bytes,
)

__all__ = ["GRAPHS", "LATENCIES", "main"]

# Graph workloads of bench.workloads; the bench does not import that module, which imports dask.
GRAPHS = ("map", "merge", "tree", "chains", "array", "shuffle")
LATENCIES = ("submits", "latency")

SIDES = ("ours", "stock")
MAP_TASKS = 50_000
GRAPH_TASKS = 20_000
SUBMIT_SAMPLES = 100
LATENCY_WORKERS = 24
LATENCY_THREADS = 8
START_SECONDS = 60.0
# How long the probe runs alone before the map comes, so that it is in full swing.
PROBE_LEAD_SECONDS = 0.5


def stock_command() -> list[str]:
    """Return the command line of the best stock configuration, with ``{port}`` and ``{http}``."""
    return [
        sys.executable,
        "-m",
        "distributed.cli.dask_scheduler",
        "--host",
        "127.0.0.1",
        "--port",
        "{port}",
        "--dashboard-address",
        "127.0.0.1:{http}",
        "--no-dashboard",
    ]


def our_command() -> list[str]:
    """Return the command line of our scheduler, from the environment that runs the bench."""
    return [
        sys.executable,
        "-m",
        "distributed_core.cli.main",
        "scheduler",
        "--host",
        "127.0.0.1",
        "--port",
        "{port}",
        "--dashboard-address",
        "127.0.0.1:{http}",
        "--no-dashboard",
    ]


STOCK_ENVIRONMENT = {"DASK_DISTRIBUTED__ADMIN__EVENT_LOOP": "uvloop"}


class Scheduler:
    """A fresh scheduler process of one side, listening on loopback."""

    def __init__(self, side: str, command: list[str]) -> None:
        self.port = free_port()
        self.address = f"tcp://127.0.0.1:{self.port}"
        filled = [part.format(port=self.port, http=free_port()) for part in command]
        environment = STOCK_ENVIRONMENT if side == "stock" else {}
        self.child = Child(f"the scheduler ({side})", filled, environment)
        self.pid = self.child.pid

    def await_listening(self) -> None:
        """Return once the port accepts connections; BenchError if it does not in time."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if not self.child.is_alive():
                raise self.child.failure("ended while starting")
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1.0):
                    return
            except OSError:
                time.sleep(0.05)
        raise self.child.failure(f"does not listen after {START_SECONDS:g} s")


class Cpu:
    """CPU clocks of all processes of one run, read together at the ends of the window."""

    def __init__(self, scheduler: int, generator: int, clients: list[int]) -> None:
        self._scheduler = scheduler
        self._generator = generator
        self._clients = clients
        self._start = self._read()

    def _read(self) -> tuple[float, float, float, float, float]:
        return (
            process_cpu_seconds(self._scheduler),
            descendants_cpu_seconds(self._scheduler),
            process_cpu_seconds(self._generator),
            sum(map(process_cpu_seconds, self._clients)),
            time.monotonic(),
        )

    def since_start(self) -> dict[str, float]:
        """Return what was used since this object was made, in seconds, and shares of one core."""
        scheduler, helper, generator, clients, elapsed = (
            now - before for now, before in zip(self._read(), self._start, strict=True)
        )
        return {
            "scheduler_cpu_seconds": scheduler,
            "helper_cpu_seconds": helper,
            "generator_cpu_seconds": generator,
            "client_cpu_seconds": clients,
            "window_seconds": elapsed,
            "scheduler_share": scheduler / elapsed,
            "generator_share": generator / elapsed,
            "client_share": clients / elapsed,
        }


class Stage:
    """Scheduler, posed workers and clients of one run; leaving it ends all of them."""

    def __init__(self, side: str, command: list[str], timeout_seconds: float) -> None:
        self._side = side
        self._command = command
        self._timeout = timeout_seconds
        self._children: list[Child] = []
        self.join_cpu_seconds = 0.0

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        for child in reversed(self._children):
            child.end()

    def start(self, workers: int, nthreads: int, delay_milliseconds: float) -> None:
        """Start the scheduler, then the posed workers; return when all have joined."""
        self.scheduler = Scheduler(self._side, self._command)
        self._children.append(self.scheduler.child)
        self.scheduler.await_listening()
        before = process_cpu_seconds(self.scheduler.pid)
        self.generator = self._talk(
            "the load generator",
            [
                "bench.zero_workers",
                self.scheduler.address,
                "--control",
                "--workers",
                str(workers),
                "--nthreads",
                str(nthreads),
                "--delay",
                str(delay_milliseconds),
            ],
        )
        self.generator.expect("ready", self._timeout)
        self.join_cpu_seconds = process_cpu_seconds(self.scheduler.pid) - before

    def client(self, name: str, tasks: int) -> Child:
        """Start a client process for workload `name`; return it connected and warmed up."""
        child = self._talk(
            f"the client ({name} on {self._side})",
            [
                "bench.workloads",
                self.scheduler.address,
                name,
                "--tasks",
                str(tasks),
                "--timeout",
                str(self._timeout),
            ],
        )
        child.expect("ready", self._timeout)
        return child

    def _talk(self, name: str, arguments: list[str]) -> Child:
        child = Child(name, [sys.executable, "-m", *arguments], is_talking=True)
        self._children.append(child)
        return child

    def expect_done(self, child: Child) -> dict[str, Any]:
        """Wait for a client's `done`, or fail early with the log of a scheduler that ended."""
        deadline = time.monotonic() + self._timeout
        while True:
            left = deadline - time.monotonic()
            message = child.poll(min(1.0, max(0.0, left)))
            if message is not None:
                if message.get("event") != "done":
                    raise child.failure(f"sent {message!r} instead of 'done'")
                return message
            if not self.scheduler.child.is_alive():
                raise self.scheduler.child.failure("ended during the run")
            if left <= 0:
                raise BenchError(
                    f"{child.failure(f'is not done after {self._timeout:g} s')}\n"
                    f"{self.scheduler.child.failure('log:')}"
                )

    def generator_stats(self) -> dict[str, Any]:
        """Return the load generator's counters; BenchError if it lost workers or was refused."""
        self.generator.tell("stats")
        stats = self.generator.expect("stats", 30.0)
        if stats["lost"] or stats["failures"]:
            raise BenchError(
                f"{stats['lost']} posed workers were lost, failures: {stats['failures']}\n"
                f"{self.scheduler.child.log_tail()}"
            )
        return stats


def percentiles(samples: Iterable[float]) -> dict[str, float]:
    """Return p50, p99 and maximum of `samples` (seconds) in milliseconds."""
    ordered = sorted(samples)
    if not ordered:
        raise BenchError("no latency sample was taken")

    def rank(share: float) -> float:
        return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {"p50_ms": rank(0.50), "p99_ms": rank(0.99), "max_ms": 1e3 * ordered[-1]}


def measure_graph(stage: Stage, name: str, tasks: int) -> dict[str, Any]:
    """Run one graph workload, or the single submits, on a started stage."""
    client = stage.client(name, tasks)
    pid = stage.scheduler.pid
    finished_before = stage.generator_stats()["finished"]
    reset_peak_rss(pid)
    rss_before = rss_bytes(pid)
    cpu = Cpu(pid, stage.generator.pid, [client.pid])
    client.tell("go")
    done = stage.expect_done(client)
    used = cpu.since_start()
    rss_after = rss_bytes(pid)
    peak = peak_rss_bytes(pid)
    stats = stage.generator_stats()
    result = {
        **used,
        "tasks": done["tasks"],
        "wall_seconds": done["wall_seconds"],
        "generator_finished": stats["finished"] - finished_before,
        "generator_fetches": stats["fetches"],
        "rss_growth_bytes": rss_after - rss_before,
        "peak_growth_bytes": None if peak is None else peak - rss_before,
    }
    if result["generator_finished"] < done["tasks"]:
        # Aliases and data in a graph may never reach a worker; a map or tree has none.
        result["note"] = f"{result['generator_finished']} of {done['tasks']} tasks ran"
    if "samples" in done:
        result.update(percentiles(duration for _, duration in done["samples"]))
    return result


def measure_latency(stage: Stage, tasks: int) -> dict[str, Any]:
    """Submit singly from one client process while another runs a map of `tasks`."""
    probe = stage.client("probe", 0)
    mapper = stage.client("map", tasks)
    cpu = Cpu(stage.scheduler.pid, stage.generator.pid, [mapper.pid, probe.pid])
    probe.tell("go")
    probe.expect("going", 30.0)
    time.sleep(PROBE_LEAD_SECONDS)
    mapper.tell("go")
    done = stage.expect_done(mapper)
    probe.tell("stop")
    samples = stage.expect_done(probe)["samples"]
    used = cpu.since_start()
    stage.generator_stats()
    # Every submit that was under way at any time of the map counts, one that outlives it too.
    during = [
        duration
        for start, duration in samples
        if start < done["end"] and start + duration > done["start"]
    ]
    return {
        **used,
        "tasks": done["tasks"],
        "wall_seconds": done["wall_seconds"],
        "samples": len(during),
        **percentiles(during),
    }


def measure(
    side: str, command: list[str], name: str, workers: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Do one run of one workload against a fresh scheduler of `side`."""
    tasks = tasks_of(name, args)
    nthreads = LATENCY_THREADS if name == "latency" else args.nthreads
    with Stage(side, command, args.timeout) as stage:
        stage.start(workers, nthreads, args.delay)
        if name == "latency":
            result = measure_latency(stage, tasks)
        else:
            result = measure_graph(stage, name, tasks)
        result["join_cpu_seconds"] = stage.join_cpu_seconds
    result.update(side=side, workload=name, workers=workers, nthreads=nthreads)
    return result


def tasks_of(name: str, args: argparse.Namespace) -> int:
    """Return how many tasks workload `name` shall have."""
    if name == "submits":
        return 20 if args.quick else SUBMIT_SAMPLES
    if args.tasks is not None:
        return int(args.tasks)
    if args.quick:
        return 5_000
    return MAP_TASKS if name in ("map", "latency") else GRAPH_TASKS


def median(runs: list[dict[str, Any]], field: str) -> float | None:
    """Return the median of `field` over `runs`; None if there is no run or no such value."""
    values = [run[field] for run in runs if run.get(field) is not None]
    return statistics.median(values) if values else None


def per_task(runs: list[dict[str, Any]], field: str, unit: float) -> float | None:
    """Return the median over `runs` of `field` per task, in `unit`."""
    values = [run[field] / run["tasks"] / unit for run in runs if run.get(field) is not None]
    return statistics.median(values) if values else None


def ratio(ours: float | None, stock: float | None) -> float | None:
    """Return how many times less ours is; None without both."""
    if ours is None or stock is None or ours <= 0:
        return None
    return stock / ours


def number(value: float | None, digits: int = 1, suffix: str = "") -> str:
    """Return `value` for a table cell, a dash for None."""
    return "–" if value is None else f"{value:,.{digits}f}{suffix}"


def print_table(title: str, head: list[str], rows: list[list[str]]) -> None:
    """Print a Markdown table whose columns line up in a terminal."""
    if not rows:
        return
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    print(f"\n{title}\n")
    for index, row in enumerate([head, *rows]):
        cells = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("| " + " | ".join(cells) + " |")
        if index == 0:
            rules = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
            print("| " + " | ".join(rules) + " |")
    sys.stdout.flush()


def groups(results: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, list[dict[str, Any]]]]:
    """Sort `results` by (workload, workers), then by side."""
    sorted_results: dict[tuple[str, int], dict[str, list[dict[str, Any]]]] = {}
    for result in results:
        cell = sorted_results.setdefault(
            (result["workload"], result["workers"]), {side: [] for side in SIDES}
        )
        cell[result["side"]].append(result)
    return sorted_results


def report(results: list[dict[str, Any]]) -> None:
    """Print the tables: CPU per task, memory, latency."""
    cpu_rows = []
    memory_rows = []
    latency_rows = []
    for (name, workers), sides in groups(results).items():
        ours, stock = sides["ours"], sides["stock"]
        label = f"{name} / {workers}"
        if name in LATENCIES:
            for side in SIDES:
                runs = sides[side]
                if runs:
                    latency_rows.append(
                        [
                            label,
                            side,
                            number(median(runs, "p50_ms"), 2),
                            number(median(runs, "p99_ms"), 1),
                            number(max(run["max_ms"] for run in runs), 1),
                            number(sum(run.get("samples", run["tasks"]) for run in runs), 0),
                        ]
                    )
            continue
        cpu_rows.append(cpu_row(label, ours, stock))
        memory_rows.append(memory_row(label, ours, stock))
    print_table(
        "CPU per task (µs, medians; ratio: stock / ours, in brackets over single pairs)",
        [
            "workload / workers",
            "tasks",
            "ours",
            "stock",
            "ratio",
            "helper ours",
            "all ours: ratio",
            "tasks/s ours",
            "tasks/s stock",
            "generator %",
            "client %",
        ],
        cpu_rows,
    )
    print_table(
        "Scheduler memory (RSS growth per task, bytes) and CPU of joining (s)",
        [
            "workload / workers",
            "after ours",
            "after stock",
            "ratio",
            "peak ours",
            "peak stock",
            "join ours",
            "join stock",
        ],
        memory_rows,
    )
    print_table(
        "submit().result() (ms; submits: idle, 50 ms between calls; latency: during a map)",
        ["workload / workers", "side", "p50", "p99", "max", "samples"],
        latency_rows,
    )


def cpu_row(label: str, ours: list[dict[str, Any]], stock: list[dict[str, Any]]) -> list[str]:
    """Return the row of the CPU table."""
    our_cpu = per_task(ours, "scheduler_cpu_seconds", 1e-6)
    stock_cpu = per_task(stock, "scheduler_cpu_seconds", 1e-6)
    helper = per_task(ours, "helper_cpu_seconds", 1e-6)
    stock_helper = per_task(stock, "helper_cpu_seconds", 1e-6)
    everything = None if our_cpu is None or helper is None else our_cpu + helper
    stock_everything = None if stock_cpu is None else stock_cpu + (stock_helper or 0.0)
    pairs = [
        pair
        for a, b in zip(ours, stock, strict=False)
        if (
            pair := ratio(
                a["scheduler_cpu_seconds"] / a["tasks"], b["scheduler_cpu_seconds"] / b["tasks"]
            )
        )
    ]
    text = number(ratio(our_cpu, stock_cpu), 1, "×")
    if len(pairs) > 1:
        text += f" ({min(pairs):.1f}–{max(pairs):.1f})"
    both = ours + stock
    return [
        label,
        number(median(both, "tasks"), 0),
        number(our_cpu),
        number(stock_cpu),
        text,
        number(helper),
        number(ratio(everything, stock_everything), 1, "×"),
        number(rate(ours), 0),
        number(rate(stock), 0),
        shares(ours, stock, "generator_share"),
        shares(ours, stock, "client_share"),
    ]


def rate(runs: list[dict[str, Any]]) -> float | None:
    """Return the median tasks per second of wall time."""
    return statistics.median(run["tasks"] / run["wall_seconds"] for run in runs) if runs else None


def shares(ours: list[dict[str, Any]], stock: list[dict[str, Any]], field: str) -> str:
    """Return a share of one core, in percent, for both sides: ours / stock."""
    return " / ".join(
        number(None if (value := median(runs, field)) is None else 100 * value, 0)
        for runs in (ours, stock)
    )


def memory_row(label: str, ours: list[dict[str, Any]], stock: list[dict[str, Any]]) -> list[str]:
    """Return the row of the memory table."""
    our_bytes = per_task(ours, "rss_growth_bytes", 1)
    stock_bytes = per_task(stock, "rss_growth_bytes", 1)
    is_held = label.startswith("map ")
    return [
        label,
        number(our_bytes, 0),
        number(stock_bytes, 0),
        # Only a map's results are all held; elsewhere the growth is what an allocator kept.
        number(ratio(our_bytes, stock_bytes) if is_held else None, 1, "×"),
        number(per_task(ours, "peak_growth_bytes", 1), 0),
        number(per_task(stock, "peak_growth_bytes", 1), 0),
        number(median(ours, "join_cpu_seconds"), 2),
        number(median(stock, "join_cpu_seconds"), 2),
    ]


def environment() -> dict[str, Any]:
    """Return what a reader needs to know about where the numbers come from."""
    packages = ("distributed", "dask", "msgpack", "uvloop", "tornado")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Compare our scheduler with the best stock configuration, in one run.",
    )
    parser.add_argument(
        "--workloads",
        default=",".join((*GRAPHS, *LATENCIES)),
        help="comma-separated: map merge tree chains array shuffle, submits (single submits on "
        "an idle cluster), latency (single submits during a map); default: all",
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[24], help="posed workers")
    parser.add_argument("--nthreads", type=int, default=1, help="threads of a posed worker")
    parser.add_argument(
        "--delay", type=float, default=0.0, help="real run time of a task, milliseconds"
    )
    parser.add_argument(
        "--tasks", type=int, help="tasks of each workload (default: map 50000, graphs 20000)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side")
    parser.add_argument("--quick", action="store_true", help="5000 tasks, one run of each side")
    parser.add_argument("--only", choices=SIDES, help="run one side only")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each step")
    parser.add_argument(
        "--scheduler-command",
        metavar="COMMAND",
        help="our side's command line, with {port} and {http} in it",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single run here")
    args = parser.parse_args(arguments)
    args.workloads = [name for name in args.workloads.split(",") if name]
    unknown = set(args.workloads) - {*GRAPHS, *LATENCIES}
    if unknown:
        parser.error(f"unknown workload: {', '.join(sorted(unknown))}")
    if args.repeats < 1 or (args.tasks is not None and args.tasks < 1):
        parser.error("--repeats and --tasks must be at least 1")
    if not all(1 <= count <= 1000 for count in args.workers):
        parser.error(f"--workers must be from 1 to 1000, not {args.workers}")
    if args.quick:
        args.repeats = 1
    return args


def worker_counts(name: str, args: argparse.Namespace) -> list[int]:
    """Return the cluster sizes for workload `name`; latency has a size of its own."""
    return [LATENCY_WORKERS] if name == "latency" else list(args.workers)


def _end_cleanly(number: int, _frame: FrameType | None) -> None:
    # Turned into an exception so that every stage on the stack ends its children. Once only:
    # `timeout` signals twice, and the second would cut the clean-up short.
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; return 0 if every run completed, 1 otherwise."""
    args = parse(arguments)
    signal.signal(signal.SIGTERM, _end_cleanly)
    commands = {"ours": our_command(), "stock": stock_command()}
    if args.scheduler_command:
        commands["ours"] = shlex.split(args.scheduler_command)
    sides = [args.only] if args.only else list(SIDES)
    about = environment()
    print(json.dumps(about), flush=True)
    results: list[dict[str, Any]] = []
    failures = 0
    try:
        for name in args.workloads:
            for workers in worker_counts(name, args):
                for repeat in range(args.repeats):
                    for side in sides:
                        label = f"{name} / {workers} workers, {side}, run {repeat + 1}"
                        try:
                            result = measure(side, commands[side], name, workers, args)
                        except BenchError as error:
                            failures += 1
                            print(f"FAILED {label}: {error}", file=sys.stderr, flush=True)
                            continue
                        result["repeat"] = repeat
                        results.append(result)
                        print(f"{label}: {summary(result)}", file=sys.stderr, flush=True)
    finally:
        report(results)
        if args.json is not None:
            args.json.write_text(json.dumps({"environment": about, "runs": results}, indent=1))
    if failures:
        print(f"{failures} runs failed, see above", file=sys.stderr)
    return 1 if failures else 0


def summary(result: dict[str, Any]) -> str:
    """Return one line about one run, for the impatient."""
    micros = 1e6 / result["tasks"]
    text = (
        f"{result['scheduler_cpu_seconds'] * micros:.1f} µs/task, "
        f"helper {result['helper_cpu_seconds'] * micros:.1f}, wall {result['wall_seconds']:.2f} s, "
        f"generator {100 * result['generator_share']:.0f} %"
    )
    if "p99_ms" in result:
        text += (
            f", p50 {result['p50_ms']:.2f} p99 {result['p99_ms']:.1f} max {result['max_ms']:.1f} ms"
        )
    if "rss_growth_bytes" in result:
        text += f", {result['rss_growth_bytes'] / result['tasks']:.0f} B/task"
    if "note" in result:
        text += f" ({result['note']})"
    return text
