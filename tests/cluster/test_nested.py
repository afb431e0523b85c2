"""Tasks that submit tasks: worker_client, get_client, secede and rejoin."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed import Client

from tests.cluster import tasks


def fibonacci(n: int) -> int:
    from distributed import worker_client

    if n < 2:
        return n
    with worker_client() as client:
        a, b = client.submit(fibonacci, n - 1), client.submit(fibonacci, n - 2)
        x, y = client.gather([a, b])
    return x + y


def with_get_client(n: int) -> int:
    from distributed import get_client, rejoin, secede

    client = get_client()
    futures = client.map(tasks.inc, range(n), pure=False)
    secede()
    values = client.gather(futures)
    rejoin()
    return sum(values)


def submit_and_scatter(n: int) -> int:
    from distributed import worker_client

    with worker_client() as client:
        data = client.scatter(list(range(n)), hash=False)
        return client.submit(tasks.total, data).result()


def secede_then_wait(i: int) -> int:
    from distributed import worker_client

    with worker_client() as client:
        return client.submit(tasks.inc, i, pure=False).result()


def submit_failing() -> int:
    from distributed import worker_client

    with worker_client() as client:
        return client.submit(tasks.fail, 9).result()


def test_recursive_worker_client(client: Client) -> None:
    assert client.submit(fibonacci, 6).result(timeout=60) == 8


def test_get_client_with_secede_and_rejoin(client: Client) -> None:
    assert client.submit(with_get_client, 10).result(timeout=30) == 55


def test_scatter_inside_a_task(client: Client) -> None:
    assert client.submit(submit_and_scatter, 5).result(timeout=30) == 10


def test_many_seceding_tasks_on_a_single_thread(solo: Client) -> None:
    # Root-ish tasks that wait for their children: each has to give up its slot in the queue.
    futures = solo.map(secede_then_wait, range(12), pure=False)
    assert solo.gather(futures) == list(range(1, 13))


def test_error_of_an_inner_task_arrives(client: Client) -> None:
    with pytest.raises(tasks.OwnError):
        client.submit(submit_failing, pure=False).result(timeout=30)


def test_seceded_task_does_not_block_others(solo: Client, tmp_path: Path) -> None:
    started, release = str(tmp_path / "started"), str(tmp_path / "release")

    def secede_and_wait_at_the_gate() -> str:
        from distributed import secede

        secede()
        return str(tasks.gate(started, release, "long"))

    long = solo.submit(secede_and_wait_at_the_gate, pure=False)
    assert solo.submit(tasks.inc, 1, pure=False).result(timeout=20) == 2
    assert not long.done()
    Path(release).touch()
    assert long.result(timeout=20) == "long"


def test_reschedule_raised_by_a_task(client: Client, tmp_path: Path) -> None:
    # B1.1
    count = str(tmp_path / "count")

    def reschedule_once() -> str:
        from distributed import Reschedule

        tasks.note(count, tasks.where())
        if len(Path(count).read_text().splitlines()) == 1:
            raise Reschedule
        return "second run"

    assert client.submit(reschedule_once, pure=False).result(timeout=20) == "second run"
    assert len(Path(count).read_text().splitlines()) == 2
