"""The HTTP side of the scheduler: probes, metrics, JSON and the deployers' API."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, wait

from tests.cluster import tasks
from tests.cluster.harness import Cluster, SchedulerProcess, wait_until

METRICS = [
    "dask_scheduler_clients",
    "dask_scheduler_client_connections_added_total",
    "dask_scheduler_client_connections_removed_total",
    "dask_scheduler_desired_workers",
    "dask_scheduler_workers",
    "dask_scheduler_workers_added_total",
    "dask_scheduler_workers_removed_total",
    "dask_scheduler_gc_collection_seconds_total",
    "dask_scheduler_last_time_total",
    "dask_scheduler_tasks",
    "dask_scheduler_tasks_suspicious_total",
    "dask_scheduler_tasks_forgotten_total",
    "dask_scheduler_task_groups",
    "dask_scheduler_tasks_compute_seconds_total",
    "dask_scheduler_tasks_transfer_seconds_total",
    "dask_scheduler_tasks_output_bytes",
    "dask_scheduler_prefix_state_totals_total",
    "dask_scheduler_tick_duration_maximum_seconds",
    "dask_scheduler_tick_count_total",
]

STATES = {"released", "waiting", "queued", "no-worker", "processing", "memory", "erred"}


def get(url: str, timeout: float = 10.0) -> tuple[int, str, str]:
    """Status, content type and text."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as reply:
            return reply.status, reply.headers.get("Content-Type", ""), reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers.get("Content-Type", ""), error.read().decode()


def get_json(url: str) -> Any:
    status, _, text = get(url)
    assert status == 200, text
    return json.loads(text)


def post_json(url: str, body: Any) -> tuple[int, str]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        url, data=data, headers={"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")


def scrape(base: str) -> dict[str, dict[str, float]]:
    """Metric name to label text to value; every line must have the right form."""
    status, kind, text = get(f"{base}/metrics")
    assert status == 200
    assert kind.startswith(("text/plain", "application/openmetrics-text"))
    samples: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            match = SAMPLE.match(line)
            assert match, f"not a sample: {line!r}"
            name, labels, value = match.groups()
            samples.setdefault(name, {})[labels or ""] = float(value)
    return samples


_API_ENV = {
    # Stock has these routes only on demand; ours has them always.
    "DASK_DISTRIBUTED__SCHEDULER__HTTP__ROUTES": json.dumps(
        [
            "distributed.http.scheduler.prometheus",
            "distributed.http.scheduler.api",
            "distributed.http.scheduler.json",
            "distributed.http.health",
        ]
    )
}


@pytest.fixture(scope="module")
def api() -> Iterator[Cluster]:
    with Cluster([{"nthreads": 1}] * 2, env=_API_ENV) as cluster:
        yield cluster


@pytest.fixture
def busy(api: Cluster) -> Iterator[tuple[Client, str]]:
    """A client with eight tasks, one of them erred, and the HTTP base."""
    with api.client() as client:
        good = client.map(tasks.inc, range(5), pure=False)
        bad = client.submit(tasks.fail, 1, pure=False)
        alice, bob = api.addresses.values()
        x = client.submit(tasks.payload, 1000, workers=[alice], pure=False)
        y = client.submit(len, x, workers=[bob], pure=False)
        wait([*good, bad, y], timeout=20)
        yield client, api.scheduler.http
    wait_until(lambda: get_json(f"{api.scheduler.http}/json/counts.json")["tasks"] == 0)


def test_metrics_have_the_stock_names(busy: tuple[Client, str]) -> None:
    _, base = busy
    samples = scrape(base)
    missing = [name for name in METRICS if name not in samples]
    assert not missing
    # These have samples only once something was stolen.
    _, _, text = get(f"{base}/metrics")
    for name in ("dask_stealing_request_count", "dask_stealing_request_cost"):
        assert f"# TYPE {name}" in text
    assert {label.partition("=")[0] for label in samples["dask_scheduler_workers"]} == {"state"}
    states = {label.partition("=")[2].strip('"') for label in samples["dask_scheduler_tasks"]}
    assert states == STATES
    by_prefix = samples["dask_scheduler_tasks_compute_seconds_total"]
    assert 'task_prefix_name="inc"' in by_prefix
    totals = samples["dask_scheduler_prefix_state_totals_total"]
    assert any('task_prefix_name="inc"' in label and 'state="memory"' in label for label in totals)


def test_metrics_move(busy: tuple[Client, str]) -> None:
    client, base = busy
    samples = scrape(base)
    assert sum(samples["dask_scheduler_workers"].values()) == 2
    assert samples["dask_scheduler_clients"][""] == 1
    tasks_by_state = samples["dask_scheduler_tasks"]
    assert tasks_by_state['state="memory"'] == 7
    assert tasks_by_state['state="erred"'] == 1
    assert samples["dask_scheduler_workers_added_total"][""] >= 2
    forgotten = samples["dask_scheduler_tasks_forgotten_total"][""]
    future = client.submit(tasks.inc, 1, pure=False)
    wait(future, timeout=20)
    future.release()
    wait_until(lambda: scrape(base)["dask_scheduler_tasks_forgotten_total"][""] > forgotten)


def test_metrics_for_two_scrapers_at_once(busy: tuple[Client, str]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    _, base = busy
    with ThreadPoolExecutor(2) as pool:
        for samples in pool.map(scrape, [base] * 10):
            assert set(METRICS) <= set(samples)


@pytest.mark.ours_only
def test_metrics_of_our_own(busy: tuple[Client, str]) -> None:
    _, base = busy
    samples = scrape(base)
    own = [name for name in samples if name.startswith("distributed_core_")]
    assert own or [name for name in samples if "loop" in name or "stale" in name]
    assert any("process_cpu_seconds_total" in name for name in samples)


@pytest.mark.ours_only
def test_metrics_stay_bounded_with_many_prefixes(client: Client, cluster: Cluster) -> None:
    base = cluster.scheduler.http
    futures = client.map(tasks.inc, range(600), key=[f"p{i}q{i}r" for i in range(600)])
    wait(futures, timeout=60)
    series = sum(len(labels) for labels in scrape(base).values())
    assert series < 5000


def test_health(cluster: Cluster) -> None:
    status, kind, text = get(f"{cluster.scheduler.http}/health")
    assert (status, text.strip()) == (200, "ok")
    assert kind.startswith("text/plain")


@pytest.mark.ours_only
def test_ready(cluster: Cluster) -> None:
    status, _, _ = get(f"{cluster.scheduler.http}/ready")
    assert status == 200


def test_status_page_answers(cluster: Cluster) -> None:
    base = cluster.scheduler.http
    for path in ("/status", "/"):
        status, kind, text = get(base + path)
        assert status == 200
        assert "html" in kind or kind.startswith("text/plain")
        assert text


def test_unknown_path(cluster: Cluster) -> None:
    assert get(f"{cluster.scheduler.http}/no/such/page")[0] == 404


def test_counts(busy: tuple[Client, str]) -> None:
    _, base = busy
    counts = get_json(f"{base}/json/counts.json")
    assert set(counts) >= {
        *("bytes", "clients", "cores", "erred", "hosts", "idle", "memory", "processing"),
        *("released", "saturated", "tasks", "unrunnable", "waiting", "waiting_data", "workers"),
        "desired_workers",
    }
    assert counts["workers"] == 2
    assert counts["cores"] == 2
    assert counts["hosts"] == 1
    assert counts["tasks"] == 8
    assert counts["memory"] in (7, 8)  # stock counts the copy that was fetched
    assert counts["erred"] == 1
    assert counts["processing"] == 0
    assert counts["bytes"] > 1000


def test_identity(api: Cluster) -> None:
    identity = get_json(f"{api.scheduler.http}/json/identity.json")
    assert identity["type"] == "Scheduler"
    assert identity["address"] == api.address
    assert set(identity) >= {"id", "services", "started", "workers"}
    assert set(identity["workers"]) <= set(api.addresses.values())


@pytest.mark.ours_only
def test_identity_is_complete(cluster: Cluster) -> None:
    # Also after work, when workers report metrics that JSON has no direct form for.
    with cluster.client() as client:
        assert client.submit(tasks.inc, 1).result(timeout=20) == 2
    identity = get_json(f"{cluster.scheduler.http}/json/identity.json")
    assert set(identity["workers"]) == set(cluster.addresses.values())
    assert identity["n_workers"] == 2
    assert identity["total_threads"] == 4


@pytest.mark.ours_only
def test_story_and_explain(client: Client, cluster: Cluster) -> None:
    future = client.submit(tasks.inc, 1, key="http-story-1")
    wait(future, timeout=20)
    base = cluster.scheduler.http
    for path in ("story", "explain"):
        status, _, text = get(f"{base}/{path}?key=http-story-1")
        assert status == 200
        assert "http-story-1" in text
        assert "memory" in text
        assert get(f"{base}/{path}")[0] == 400
    status, _, text = get(f"{base}/explain?key=never-heard-of")
    assert status in (200, 404)
    assert "never-heard-of" in text


@pytest.mark.ours_only
def test_requests_that_are_not_http(cluster: Cluster) -> None:
    import socket

    base = cluster.scheduler.http
    port = cluster.scheduler.http_port
    for data in (b"\x00" * 50, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"x" * 200_000):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
            try:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    pass
            except ConnectionError:
                continue
    assert get(f"{base}/health")[0] == 200
    assert post_json(f"{base}/health", {})[0] in (404, 405)


# ------------------------------------------------------------------------ the deployers' interface


def test_api_get_workers(api: Cluster) -> None:
    workers = get_json(f"{api.scheduler.http}/api/v1/get_workers")
    assert workers["num_workers"] == 2
    assert {w["address"] for w in workers["workers"]} == set(api.addresses.values())
    assert {w["name"] for w in workers["workers"]} == set(api.addresses)


def test_api_adaptive_target_and_check_idle(api: Cluster, tmp_path: Path) -> None:
    base = api.scheduler.http
    assert isinstance(get_json(f"{base}/api/v1/adaptive_target")["workers"], int)
    started, release = tmp_path / "started", tmp_path / "release"
    with api.client() as client:
        future = client.submit(tasks.gate, str(started), str(release), 1)
        wait_until(started.exists)
        assert get_json(f"{base}/api/v1/check_idle")["idle_since"] is None
        release.touch()
        assert future.result(timeout=20) == 1
    idle = wait_until(lambda: get_json(f"{base}/api/v1/check_idle")["idle_since"])
    assert abs(idle - time.time()) < 60


def test_api_retire_workers(api: Cluster) -> None:
    base = api.scheduler.http
    status, _ = post_json(f"{base}/api/v1/retire_workers", b"no json")
    assert status >= 400
    leaving = api.workers[0]
    address = api.addresses[leaving.name]
    status, text = post_json(f"{base}/api/v1/retire_workers", {"workers": [address]})
    assert status == 200
    assert json.loads(text)[address]["name"] == leaving.name
    wait_until(lambda: len(api.scheduler.workers()) == 1)
    status, text = post_json(f"{base}/api/v1/retire_workers", {"n": 1})
    assert status == 200
    assert len(json.loads(text)) == 1
    wait_until(lambda: not api.scheduler.workers())


def test_no_dashboard_means_no_http_port_is_announced() -> None:
    with SchedulerProcess("--no-dashboard", wait=False) as scheduler:
        wait_until(lambda: "Scheduler at" in scheduler.output() or _answers(scheduler), 30)
        identity = scheduler.call("identity", n_workers=0)
        assert identity["type"] == "Scheduler"


def _answers(scheduler: SchedulerProcess) -> bool:
    try:
        return bool(scheduler.call("identity", n_workers=0))
    except OSError:
        return False
