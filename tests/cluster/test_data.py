"""Data: scatter, large payloads, replicas, and who holds what."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import Client, wait

from tests.cluster import tasks
from tests.cluster.harness import Cluster, wait_until


@pytest.mark.parametrize("direct", [False, True])
def test_scatter_a_list_and_a_dict(client: Client, direct: bool) -> None:
    futures = client.scatter([1, "two", {"three": 3}], direct=direct)
    assert client.gather(futures) == [1, "two", {"three": 3}]
    named = client.scatter({"left": 1, "right": 2}, direct=direct)
    assert client.submit(tasks.add, named["left"], named["right"]).result(timeout=20) == 3
    assert named["left"].key == "left"


@pytest.mark.parametrize("direct", [False, True])
def test_scatter_broadcast(client: Client, cluster: Cluster, direct: bool) -> None:
    future = client.scatter({"a": 1}, broadcast=True, direct=direct)["a"]
    assert future.status == "finished"
    # Surplus copies may be dropped later, so each worker is asked whether it can use the value.
    for address in cluster.addresses.values():
        got = client.submit(tasks.inc, future, workers=[address], pure=False)
        assert got.result(timeout=20) == 2


def test_scatter_without_hash_gives_new_keys(client: Client) -> None:
    one, two = client.scatter(5, hash=False), client.scatter(5, hash=False)
    assert one.key != two.key
    assert client.scatter(6).key == client.scatter(6).key
    assert client.gather([one, two]) == [5, 5]


def test_scatter_to_a_worker(client: Client, cluster: Cluster) -> None:
    bob = cluster.addresses["bob"]
    futures = client.scatter(list(range(6)), workers=[bob], hash=False)
    assert {tuple(holders) for holders in client.who_has(futures).values()} == {(bob,)}


def test_scattered_data_is_freed(client: Client) -> None:
    future = client.scatter(b"some bytes", hash=False)
    key = future.key
    assert key in client.who_has()
    del future
    wait_until(lambda: key not in client.who_has())


def test_scatter_times_out_without_a_worker() -> None:
    with Cluster(0) as empty, empty.client() as client, pytest.raises(TimeoutError):
        client.scatter([1, 2], timeout=0.3)


@pytest.mark.parametrize("direct", [False, True])
def test_arrays_keep_type_and_flags(client: Client, direct: bool) -> None:
    data = np.arange(100_000, dtype="int32").reshape(100, 1000)[:, ::2]
    future = client.scatter(data, direct=direct, hash=False)
    back = client.gather(future, direct=direct)
    assert (back == data).all()
    assert (back.dtype, back.shape) == (data.dtype, data.shape)
    back_again = client.submit(np.sort, future, pure=False).result(timeout=20)
    assert back_again.shape == data.shape


def test_message_of_several_large_frames(client: Client) -> None:
    # More than the 64 MiB at which a payload is cut into pieces.
    data = np.arange(9_000_000, dtype="float64")
    future = client.scatter(data, hash=False, timeout=60)
    assert client.submit(np.sum, future).result(timeout=60) == data.sum()
    back = client.gather(future)
    assert back.nbytes == data.nbytes
    assert (back[::100_000] == data[::100_000]).all()
    assert back[-1] == data[-1]


def test_out_of_band_buffers_in_a_task(client: Client) -> None:
    data = np.random.default_rng(0).random(50_000)
    assert client.submit(np.sum, data, pure=False).result(timeout=20) == data.sum()
    several = client.submit(dict, a=data, b=[data * 2], c=b"z" * 1000, pure=False)
    back = several.result(timeout=20)
    assert (back["b"][0] == data * 2).all()
    assert back["c"] == b"z" * 1000


def test_empty_and_odd_values(client: Client) -> None:
    values = [b"", "", np.empty(0), np.array(5), (), {}, set(), None, 2**80, float("inf"), {1, 2}]
    futures = client.scatter(values, hash=False)
    for got, want in zip(client.gather(futures), values, strict=True):
        assert type(got) is type(want)
        assert np.array_equal(got, want) if isinstance(want, np.ndarray) else got == want


def test_replicate_and_who_has(client: Client, cluster: Cluster) -> None:
    future = client.submit(tasks.inc, 1, pure=False)
    wait(future, timeout=20)
    assert len(client.who_has([future])[future.key]) == 1
    client.replicate([future])
    for address in cluster.addresses.values():
        got = client.submit(tasks.inc, future, workers=[address], pure=False)
        assert got.result(timeout=20) == 3


def test_replicate_to_chosen_workers(client: Client, cluster: Cluster) -> None:
    alice, bob = cluster.addresses["alice"], cluster.addresses["bob"]
    future = client.submit(tasks.inc, 1, workers=[alice], pure=False)
    wait(future, timeout=20)
    client.replicate([future], n=1, workers=[bob])
    assert client.gather(future) == 2


def test_rebalance_keeps_the_data(client: Client, cluster: Cluster) -> None:
    alice = cluster.addresses["alice"]
    futures = client.map(
        tasks.payload, [200_000 + i for i in range(20)], workers=[alice], pure=False
    )
    wait(futures, timeout=20)
    client.rebalance(futures)
    assert [len(value) for value in client.gather(futures)] == [200_000 + i for i in range(20)]


def test_has_what_nbytes_and_ncores(client: Client, cluster: Cluster) -> None:
    bob = cluster.addresses["bob"]
    future = client.submit(tasks.payload, 1000, key=("nbytes-x", 1), workers=[bob])
    wait(future, timeout=20)
    assert ("nbytes-x", 1) in client.has_what()[bob]
    assert list(client.has_what(workers=[bob])) == [bob]
    exact = client.nbytes([("nbytes-x", 1)], summary=False)[("nbytes-x", 1)]
    assert 1000 <= exact <= 1100
    assert client.nbytes(summary=True)["nbytes-x"] == exact
    assert client.ncores() == client.nthreads() == dict.fromkeys(cluster.addresses.values(), 2)


def test_large_results_move_between_workers(client: Client, cluster: Cluster) -> None:
    alice, bob = cluster.addresses["alice"], cluster.addresses["bob"]
    x = client.submit(np.ones, 1_000_000, workers=[alice], pure=False)
    y = client.submit(np.ones, 1_000_000, workers=[bob], pure=False)
    z = client.submit(np.add, x, y, pure=False)
    assert client.submit(np.sum, z, pure=False).result(timeout=30) == 2_000_000
