"""What a client may ask the scheduler, and what it may tell it besides tasks."""

from __future__ import annotations

import gzip
import threading
import time
from pathlib import Path

import msgpack
import pytest
from distributed import Client, get_task_metadata, get_task_stream, wait

from tests.cluster import tasks
from tests.cluster.harness import Cluster, wait_until
from tests.cluster.test_futures import statuses


def test_scheduler_info(client: Client, cluster: Cluster) -> None:
    info = client.scheduler_info(n_workers=-1)
    assert info["type"] == "Scheduler"
    assert info["address"] == cluster.address
    assert info["n_workers"] == 2
    assert info["total_threads"] == 4
    assert info["total_memory"] == 2 * 2 * 2**30
    assert abs(info["started"] - time.time()) < 3600
    by_name = {worker["name"]: worker for worker in info["workers"].values()}
    assert set(by_name) == {"alice", "bob"}
    bob = by_name["bob"]
    assert bob["type"] == "Worker"
    assert bob["status"] == "running"
    assert bob["nthreads"] == 2
    assert bob["resources"] == {"GPU": 2, "LANE": 1}
    assert bob["memory_limit"] == 2 * 2**30
    assert abs(bob["last_seen"] - time.time()) < 30
    assert {"host", "local_directory", "services", "metrics", "nanny", "id"} <= set(bob)
    assert (
        "alice"
        in client.scheduler_info(n_workers=-1)["workers"][cluster.addresses["alice"]].values()
    )


def test_identity_lists_as_many_workers_as_asked_for(client: Client, cluster: Cluster) -> None:
    assert cluster.scheduler.call("identity", n_workers=0)["workers"] == {}
    assert len(cluster.scheduler.call("identity", n_workers=1)["workers"]) == 1
    assert len(cluster.scheduler.call("identity", n_workers=-1)["workers"]) == 2


def test_representations(client: Client) -> None:
    wait_until(lambda: "processes=2 threads=4" in repr(client))
    assert "Scheduler" in client._repr_html_()


def test_versions(client: Client) -> None:
    versions = client.get_versions(check=True)
    assert set(versions) == {"scheduler", "client", "workers"}
    assert versions["scheduler"]["packages"]["distributed"] == "2026.8.0"
    assert len(versions["workers"]) == 2


def test_run_on_all_and_on_some(client: Client, cluster: Cluster) -> None:
    assert client.run(tasks.inc, 1) == dict.fromkeys(cluster.addresses.values(), 2)
    bob = cluster.addresses["bob"]
    assert client.run(tasks.inc, 1, workers=[bob]) == {bob: 2}

    async def coroutine(x: int) -> int:
        return x * 2

    assert set(client.run(coroutine, 4).values()) == {8}


def test_run_with_the_worker_as_argument(client: Client, cluster: Cluster) -> None:
    names = client.run(lambda dask_worker: dask_worker.name)
    assert names == {address: name for name, address in cluster.addresses.items()}


def test_run_errors(client: Client, cluster: Cluster) -> None:
    with pytest.raises(tasks.OwnError):
        client.run(tasks.fail, 1)
    failures = client.run(tasks.fail, 1, on_error="return")
    assert {type(error) for error in failures.values()} == {tasks.OwnError}
    assert client.run(tasks.fail, 1, on_error="ignore") == {}


def test_processing_and_task_status(client: Client, cluster: Cluster, tmp_path: Path) -> None:
    started, release = tmp_path / "started", tmp_path / "release"
    bob = cluster.addresses["bob"]
    running = client.submit(tasks.gate, str(started), str(release), key="gate-p", workers=[bob])
    waiting = client.submit(tasks.inc, running, key="waits-p")
    wait_until(started.exists)
    assert statuses(client, "gate-p", "waits-p", "unknown-p") == {
        "gate-p": "processing",
        "waits-p": "waiting",
        "unknown-p": None,
    }
    processing = client.processing()
    assert list(processing[bob]) == ["gate-p"]
    assert list(processing[cluster.addresses["alice"]]) == []
    assert list(client.processing(workers=[bob])) == [bob]
    release.touch()
    wait([running, waiting], return_when="FIRST_COMPLETED", timeout=20)


def test_call_stack(client: Client, tmp_path: Path) -> None:
    started, release = tmp_path / "started", tmp_path / "release"
    future = client.submit(tasks.gate, str(started), str(release), 1)
    wait_until(started.exists)
    stacks = client.call_stack([future])
    text = str(stacks)
    assert "gate" in text
    assert future.key in next(iter(stacks.values()))
    assert client.call_stack()
    release.touch()
    assert future.result(timeout=20) == 1


def test_who_has_of_several(client: Client, cluster: Cluster) -> None:
    futures = client.map(tasks.inc, range(5), pure=False)
    wait(futures, timeout=20)
    who_has = client.who_has(futures)
    assert set(who_has) == {future.key for future in futures}
    assert all(set(holders) <= set(cluster.addresses.values()) for holders in who_has.values())
    assert {future.key for future in futures} <= set(client.who_has())


def test_story_of_a_key(client: Client) -> None:
    future = client.submit(tasks.inc, 1, key="story-1")
    wait(future, timeout=20)
    story = client.sync(client.scheduler.get_story, keys_or_stimuli=["story-1"])
    steps = [(entry[1], entry[2]) for entry in story if entry[0] == "story-1"]
    assert steps[0][0] == "released"
    assert steps[-1] == ("processing", "memory")


def test_metadata(client: Client) -> None:
    client.set_metadata("plain", 1)
    client.set_metadata(["deep", "er", "key"], {"a": (1, 2)})
    assert client.get_metadata("plain") == 1
    assert client.get_metadata(["deep", "er"]) == {"key": {"a": (1, 2)}}
    assert client.get_metadata(["deep", "missing"], default=None) is None
    with pytest.raises(KeyError):
        client.get_metadata(["deep", "missing"])


def test_log_event_and_get_events(client: Client) -> None:
    client.log_event("topic-a", {"n": 1})
    client.log_event(["topic-a", "topic-b"], "text")
    wait_until(lambda: len(client.get_events("topic-a")) == 2)
    stamps, messages = zip(*client.get_events("topic-a"), strict=True)
    assert messages == ({"n": 1}, "text")
    assert all(abs(stamp - time.time()) < 60 for stamp in stamps)
    assert [message for _, message in client.get_events("topic-b")] == ["text"]


@pytest.mark.ours_only
def test_events_of_all_topics(client: Client) -> None:
    client.log_event("topic-c", {"n": 1})
    wait_until(lambda: "topic-c" in client.get_events())


def test_subscribe_topic(client: Client, cluster: Cluster) -> None:
    got: list[object] = []
    client.subscribe_topic("topic-s", lambda event: got.append(event[1]))
    wait_until(lambda: client.log_event("topic-s", 0) or got, interval=0.05)
    client.submit(_log_from_worker, "topic-s", "from worker", pure=False).result(timeout=20)
    with cluster.client(set_as_default=False) as other:
        other.log_event("topic-s", "from the other")
        wait_until(lambda: "from the other" in got)
    wait_until(lambda: "from worker" in got)
    client.unsubscribe_topic("topic-s")


def _log_from_worker(topic: str, message: object) -> None:
    from distributed import get_worker

    get_worker().log_event(topic, message)


def test_print_in_a_task_reaches_the_client(client: Client, capsys: object) -> None:
    from distributed import print as dask_print

    seen = threading.Event()
    client.subscribe_topic("print", lambda event: seen.set())
    wait_until(
        lambda: client.submit(dask_print, "hello", pure=False).result(timeout=20) or seen.is_set(),
        interval=0.05,
    )
    client.unsubscribe_topic("print")


def test_logs(client: Client, cluster: Cluster) -> None:
    lines = client.get_scheduler_logs()
    assert lines
    assert all(len(line) == 2 for line in lines)
    by_worker = client.get_worker_logs()
    assert set(by_worker) == set(cluster.addresses.values())
    few = client.get_worker_logs(n=1, workers=[cluster.addresses["bob"]])
    assert [len(entries) for entries in few.values()] == [1]


def test_wait_for_workers(client: Client) -> None:
    client.wait_for_workers(2, timeout=10)
    with pytest.raises(TimeoutError):
        client.wait_for_workers(3, timeout=0.3)


def test_task_stream(client: Client) -> None:
    with get_task_stream(client) as stream:
        futures = client.map(tasks.inc, range(5), pure=False)
        wait(futures, timeout=20)
    records = {record["key"]: record for record in stream.data}
    assert {future.key for future in futures} <= set(records)
    record = records[futures[0].key]
    assert record["status"] == "OK"
    assert record["worker"] in client.nthreads()
    assert record["startstops"]


def test_profile(client: Client) -> None:
    client.submit(tasks.slow_inc, 1, delay=0.2, pure=False).result(timeout=20)
    profile = client.profile()
    assert {"count", "children", "identifier"} <= set(profile)


def test_dump_cluster_state(client: Client, tmp_path: Path) -> None:
    future = client.submit(tasks.inc, 1, key="dumped-1")
    bad = client.submit(tasks.fail, 1, key="dumped-bad")
    wait([future, bad], timeout=20)
    path = str(tmp_path / "dump")
    client.dump_cluster_state(path)
    with gzip.open(f"{path}.msgpack.gz") as file:
        dump = msgpack.unpack(file, strict_map_key=False)
    assert set(dump) >= {"scheduler", "workers", "versions"}
    assert dump["scheduler"]["tasks"]["dumped-1"]["state"] == "memory"
    assert dump["scheduler"]["tasks"]["dumped-bad"]["state"] == "erred"
    assert len(dump["scheduler"]["workers"]) == 2
    assert len(dump["workers"]) == 2


def test_adaptive_answers(client: Client, cluster: Cluster) -> None:
    scheduler = cluster.scheduler
    assert isinstance(scheduler.call("adaptive_target", target_duration="5s"), int)
    closable = scheduler.call("workers_to_close", n=1)
    assert len(closable) == 1
    assert set(closable) <= set(cluster.addresses.values())
    assert scheduler.call("ncores_running") == dict.fromkeys(cluster.addresses.values(), 2)


def test_check_idle(client: Client, cluster: Cluster, tmp_path: Path) -> None:
    started, release = tmp_path / "started", tmp_path / "release"
    future = client.submit(tasks.gate, str(started), str(release), 1)
    wait_until(started.exists)
    assert cluster.scheduler.call("check_idle") is None
    release.touch()
    assert future.result(timeout=20) == 1
    future.release()
    idle_since = wait_until(lambda: cluster.scheduler.call("check_idle"))
    assert abs(idle_since - time.time()) < 60


def test_worker_names_stand_for_addresses(client: Client, cluster: Cluster) -> None:
    bob = cluster.addresses["bob"]
    assert list(client.has_what(workers=["bob"])) == [bob]
    assert client.submit(tasks.where, workers=["bob"], pure=False).result(timeout=20) == bob


def test_task_metadata_block(client: Client) -> None:
    with get_task_metadata() as record:
        future = client.submit(tasks.inc, 1, key="metadata-1")
        wait(future, timeout=20)
    assert record.state["metadata-1"] == "memory"
