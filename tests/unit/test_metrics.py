"""The exporter: names, labels, values and cost of a scrape."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from distributed_core.metrics import reference
from distributed_core.metrics.counters import OTHER, SemaphoreFigures
from distributed_core.metrics.exporter import Exporter
from distributed_core.metrics.table import METRICS, Kind
from distributed_core.protocol.ops import Reason
from distributed_core.server.adaptive import adaptive_target
from tests.unit.fake_source import FakeSource

# As a stock scheduler of distributed 2026.8.0 shows them: family, type, labels.
STOCK = {
    ("dask_scheduler_clients", "gauge", ()),
    ("dask_scheduler_client_connections_added", "counter", ()),
    ("dask_scheduler_client_connections_removed", "counter", ()),
    ("dask_scheduler_desired_workers", "gauge", ()),
    ("dask_scheduler_workers", "gauge", ("state",)),
    ("dask_scheduler_workers_added", "counter", ()),
    ("dask_scheduler_workers_removed", "counter", ()),
    ("dask_scheduler_gc_collection_seconds", "counter", ()),
    ("dask_scheduler_last_time", "counter", ()),
    ("dask_scheduler_tasks_suspicious", "counter", ("task_prefix_name",)),
    ("dask_scheduler_tasks_forgotten", "counter", ()),
    ("dask_scheduler_tasks", "gauge", ("state",)),
    ("dask_scheduler_task_groups", "gauge", ()),
    ("dask_scheduler_tasks_compute_seconds", "counter", ("task_prefix_name",)),
    ("dask_scheduler_tasks_transfer_seconds", "counter", ("task_prefix_name",)),
    ("dask_scheduler_tasks_output_bytes", "gauge", ("task_prefix_name",)),
    ("dask_scheduler_prefix_state_totals", "counter", ("state", "task_prefix_name")),
    ("dask_scheduler_tick_duration_maximum_seconds", "gauge", ()),
    ("dask_scheduler_tick_count", "counter", ()),
    ("dask_semaphore_max_leases", "gauge", ("name",)),
    ("dask_semaphore_active_leases", "gauge", ("name",)),
    ("dask_semaphore_pending_leases", "gauge", ("name",)),
    ("dask_semaphore_acquire", "counter", ("name",)),
    ("dask_semaphore_release", "counter", ("name",)),
    ("dask_semaphore_average_pending_lease_time_s", "gauge", ("name",)),
    ("dask_stealing_request_count", "counter", ("cost_multiplier",)),
    ("dask_stealing_request_cost", "counter", ("cost_multiplier",)),
    ("python_gc_objects_collected", "counter", ("generation",)),
    ("python_gc_objects_uncollectable", "counter", ("generation",)),
    ("python_gc_collections", "counter", ("generation",)),
    ("python_info", "gauge", ("implementation", "major", "minor", "patchlevel", "version")),
}


class Scrape:
    """Families and samples of a rendered text."""

    def __init__(self, body: bytes) -> None:
        self.families = {f.name: f for f in text_string_to_metric_families(body.decode())}

    def value(self, name: str, **labels: str) -> float:
        found = [
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and sample.labels == labels
        ]
        assert len(found) == 1, (name, labels, found)
        return found[0]

    def labels(self, family: str, label: str) -> set[str]:
        return {sample.labels[label] for sample in self.families[family].samples}


def exporter(source: FakeSource, **settings: Any) -> Exporter:
    return Exporter(
        source,
        version="1.2.3",
        adaptive_target=lambda: adaptive_target(source.machine),
        **settings,
    )


def busy_source() -> FakeSource:
    """Something of everything, so that each family has a sample."""
    source = FakeSource()
    source.add_client()
    source.add_client("fire-and-forget", peer=None)
    source.add_worker(1)
    source.add_worker(2)
    source.submit([f"inc-{i}" for i in range(10)])
    source.finish_all()
    counters = source.counters
    counters.semaphores["lock"] = SemaphoreFigures(max_leases=1, acquired=3)
    counters.stealing["1.0"] = (4, 2.5)
    counters.handled("identity", 0.5)
    counters.handler_failed("identity")
    counters.received("client", "update-graph")
    counters.sent("worker", "compute-task", 10)
    counters.reject("worker", "task-finished", Reason.WRONG_TYPE)
    counters.surplus("identity")
    counters.http.responded("/metrics", 200)
    source.machine.counters["finished-stale"] = 2
    source.pool.failures["crashed"] = 1
    source.connections = {"client": 1}
    source.loop_lag.observe(0.02)
    return source


def test_every_stock_family_is_there_with_its_type_and_labels() -> None:
    scrape = Scrape(exporter(busy_source()).render())
    found = {
        (family.name, family.type, tuple(sorted(family.samples[0].labels)))
        for family in scrape.families.values()
        if family.samples
    }
    assert found >= STOCK


def test_families_are_exactly_those_of_the_table() -> None:
    families = Scrape(exporter(FakeSource()).render()).families
    names = {name for name in families if name.startswith(("dask_", "distributed_core_"))}
    assert names == {metric.full_name("dask").removesuffix("_total") for metric in METRICS}
    for metric in METRICS:
        family = families[metric.full_name("dask").removesuffix("_total")]
        assert family.type == metric.kind.value
        assert family.documentation == metric.help


def test_labels_are_those_of_the_table() -> None:
    families = Scrape(exporter(busy_source()).render()).families
    for metric in METRICS:
        for sample in families[metric.full_name("dask").removesuffix("_total")].samples:
            assert set(sample.labels) - {"le"} == set(metric.labels)


def test_the_table_is_consistent() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.help.endswith(".") and metric.when_high.endswith(".")
        assert metric.budget >= 1 or "task_prefix_name" in metric.labels
        assert metric.kind is not Kind.SUMMARY or len(metric.labels) == 1


def test_values_of_the_engine() -> None:
    source = busy_source()
    scrape = Scrape(exporter(source).render())
    assert scrape.value("dask_scheduler_clients") == 1
    assert scrape.value("dask_scheduler_tasks", state="memory") == 10
    assert scrape.value("dask_scheduler_tasks_output_bytes", task_prefix_name="inc") == 1000
    assert scrape.value(
        "dask_scheduler_tasks_compute_seconds_total", task_prefix_name="inc"
    ) == pytest.approx(1.0)
    assert (
        scrape.value(
            "dask_scheduler_prefix_state_totals_total", task_prefix_name="inc", state="memory"
        )
        == 10
    )
    assert scrape.value("distributed_core_tasks_assigned_total") == 10
    assert scrape.value("distributed_core_notes_total", kind="finished-stale") == 2
    source.release([f"inc-{i}" for i in range(10)])
    scrape = Scrape(exporter(source).render())
    assert scrape.value("dask_scheduler_tasks_forgotten_total") == 10
    assert scrape.value("dask_scheduler_tasks", state="memory") == 0


def test_workers_by_state_add_up() -> None:
    source = FakeSource()
    workers = [source.add_worker(n) for n in range(1, 5)]
    source.set_status(workers[0], "paused")
    source.set_status(workers[1], "closing_gracefully")
    scrape = Scrape(exporter(source).render())
    values = {
        sample.labels["state"]: sample.value
        for sample in scrape.families["dask_scheduler_workers"].samples
    }
    assert values == {
        "idle": 2,
        "partially_saturated": 0,
        "saturated": 0,
        "paused": 1,
        "retiring": 1,
    }


def test_the_namespace_replaces_the_first_part_of_stock_names_only() -> None:
    families = Scrape(exporter(FakeSource(), namespace="acme").render()).families
    assert "acme_scheduler_tasks" in families
    assert "distributed_core_engine_events" in families
    assert not any(name.startswith("dask_") for name in families)


def test_two_scrapers_see_the_same() -> None:
    source = busy_source()
    source.loop_lag.observe(1.5)
    one = exporter(source)
    changing = (
        "dask_scheduler_last_time",
        "process_",
        "python_gc",
    )

    def scrape() -> dict[str, list[Any]]:
        families = Scrape(one.render()).families
        return {
            name: family.samples
            for name, family in families.items()
            if not name.startswith(changing)
        }

    first = scrape()
    assert scrape() == first
    maximum = Scrape(one.render()).value("dask_scheduler_tick_duration_maximum_seconds")
    assert maximum == pytest.approx(1.52)


def test_ops_of_hostile_peers_make_no_labels() -> None:
    source = FakeSource()
    for i in range(1000):
        source.counters.reject(f"peer-{i}", f"op-{i}", f"reason-{i}")
        source.counters.received("client", f"op-{i}")
        source.counters.handled(f"op-{i}", 0.0)
        source.counters.surplus(f"op-{i}")
    assert len(source.counters.rejected) == 1
    scrape = Scrape(exporter(source).render())
    assert (
        scrape.value("distributed_core_messages_rejected_total", peer=OTHER, op=OTHER, reason=OTHER)
        == 1000
    )
    assert scrape.value("distributed_core_handler_seconds_count", op=OTHER) == 1000


def test_a_label_budget_is_kept() -> None:
    source = FakeSource()
    source.machine.counters.update({f"note-{i}": 1 for i in range(200)})
    scrape = Scrape(exporter(source).render())
    samples = scrape.families["distributed_core_notes"].samples
    assert len(samples) == 50
    assert sum(sample.value for sample in samples) == 200
    assert scrape.value("distributed_core_notes_total", kind=OTHER) == 151


def test_prefixes_beyond_the_limit_are_summed_up() -> None:
    source = FakeSource(worker_saturation=float("inf"))
    source.add_client()
    source.add_worker(1, nthreads=4)
    for i in range(10):
        source.submit([f"p{i}-{j}" for j in range(i + 1)], prefix=f"p{i}")
    source.finish_all(seconds=1.0, nbytes=1)
    scrape = Scrape(exporter(source, max_prefix_labels=3).render())
    name = "dask_scheduler_tasks_compute_seconds"
    assert scrape.labels(name, "task_prefix_name") == {"p7", "p8", "p9", OTHER}
    assert scrape.value(f"{name}_total", task_prefix_name=OTHER) == pytest.approx(28)
    assert scrape.value("dask_scheduler_tasks_output_bytes", task_prefix_name=OTHER) == 28
    assert scrape.value("distributed_core_task_prefixes") == 10


def test_the_sum_of_other_prefixes_never_falls() -> None:
    source = FakeSource(worker_saturation=float("inf"), prefix_limit=2)
    source.add_client()
    source.add_worker(1, nthreads=4)
    one = exporter(source, max_prefix_labels=1)
    name = "dask_scheduler_tasks_compute_seconds_total"
    before = 0.0
    for i in range(20):
        large = [f"q{i}-{j}" for j in range(3)]
        small = [f"r{i}-{j}" for j in range(2)]
        source.submit(large, prefix=f"q{i}")
        source.submit(small, prefix=f"r{i}")
        source.finish_all(seconds=1.0)
        value = Scrape(one.render()).value(name, task_prefix_name=OTHER)
        assert value == pytest.approx(before + 2)
        before = value
        source.release(large + small)


def test_a_prefix_with_tasks_takes_the_place_of_one_without() -> None:
    source = FakeSource(worker_saturation=float("inf"))
    source.add_client()
    source.add_worker(1)
    one = exporter(source, max_prefix_labels=1)
    source.submit(["a-1"], prefix="a")
    source.finish_all()
    name = "dask_scheduler_tasks_suspicious"
    assert Scrape(one.render()).labels(name, "task_prefix_name") == {"a"}
    source.submit(["b-1", "b-2"], prefix="b")
    assert Scrape(one.render()).labels(name, "task_prefix_name") == {"a", OTHER}
    source.release(["a-1"])
    assert Scrape(one.render()).labels(name, "task_prefix_name") == {"b", OTHER}


def test_a_prefix_that_is_called_other_does_not_break_the_scrape() -> None:
    source = FakeSource(worker_saturation=float("inf"))
    source.add_client()
    source.add_worker(1)
    source.submit([f"{OTHER}-1"], prefix=OTHER)
    scrape = Scrape(exporter(source).render())
    assert scrape.labels("dask_scheduler_tasks_suspicious", "task_prefix_name") == {OTHER}


def test_odd_label_values_survive() -> None:
    source = FakeSource(worker_saturation=float("inf"))
    source.add_client()
    source.add_worker(1)
    odd = 'a"b\\c\nd é \\n'
    source.submit([f"{odd}-1"], prefix=odd)
    scrape = Scrape(exporter(source).render())
    assert scrape.labels("dask_scheduler_tasks_suspicious", "task_prefix_name") == {odd}


def test_texts_and_numbers_that_utf_8_and_repr_cannot_express() -> None:
    source = FakeSource()
    source.counters.stealing["\ud800"] = (1, float("inf"))
    source.counters.stealing["b"] = (1, float("nan"))
    scrape = Scrape(exporter(source).render())
    assert scrape.value("dask_stealing_request_cost_total", cost_multiplier="?") == float("inf")
    assert scrape.labels("dask_stealing_request_cost", "cost_multiplier") == {"?", "b"}


def test_the_histogram_of_lag() -> None:
    source = FakeSource()
    for seconds in (0.0005, 0.02, 20.0):
        source.loop_lag.observe(seconds)
    scrape = Scrape(exporter(source).render())
    name = "distributed_core_event_loop_lag_seconds"
    assert scrape.value(f"{name}_bucket", le="0.001") == 1
    assert scrape.value(f"{name}_bucket", le="10.0") == 2
    assert scrape.value(f"{name}_bucket", le="+Inf") == 3
    assert scrape.value(f"{name}_count") == 3
    assert scrape.value(f"{name}_sum") == pytest.approx(20.0205)


def test_a_scrape_costs_nothing_per_task() -> None:
    source = FakeSource()
    source.add_client()
    one = exporter(source)
    one.render()
    for i in range(60):
        source.submit([f"p{i}-{j}" for j in range(100)], prefix=f"p{i}")

    def best() -> float:
        times = []
        for _ in range(5):
            started = time.process_time()
            one.render()
            times.append(time.process_time() - started)
        return min(times)

    small = best()
    for i in range(60):
        source.submit([f"p{i}-{j}" for j in range(100, 1600)], prefix=f"p{i}")
    assert len(source.machine.state.tasks) == 96_000
    assert best() < 2 * small + 0.005


def test_the_reference_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text() == reference.render()


def test_the_reference_names_every_metric(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "metrics.md"
    assert reference.main([str(path), "--check"]) == 1
    assert "out of date" in capsys.readouterr().out
    assert reference.main([str(path)]) == 0
    assert reference.main([str(path), "--check"]) == 0
    text = path.read_text()
    for metric in METRICS:
        assert f"### `{metric.full_name('dask')}`" in text
