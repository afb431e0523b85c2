"""dask.array, dask.dataframe, bag and delayed against plain NumPy, pandas and Python."""

from __future__ import annotations

import dask
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client, wait

from tests.cluster import tasks


@pytest.fixture(autouse=True)
def tasks_method() -> object:
    with dask.config.set({"dataframe.shuffle.method": "tasks", "array.rechunk.method": "tasks"}):
        yield


def frame(rows: int = 400) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "id": np.arange(rows),
            "group": rng.integers(0, 7, rows),
            "value": rng.random(rows),
        }
    )


def test_array_reduction(client: Client) -> None:
    data = np.random.default_rng(1).random((300, 200))
    x = da.from_array(data, chunks=(100, 100))
    assert np.isclose(((x + 1) @ x.T).sum().compute(), ((data + 1) @ data.T).sum())


def test_array_rechunk_and_slicing(client: Client) -> None:
    data = np.arange(10_000).reshape(100, 100)
    x = da.from_array(data, chunks=(10, 100)).rechunk((100, 10))
    assert (x[::3, 5:].compute() == data[::3, 5:]).all()


def test_array_persist_then_use(client: Client) -> None:
    x = da.ones((200, 200), chunks=50).persist()
    wait(x, timeout=30)
    assert (x + x.T).mean().compute() == 2


def test_array_map_overlap_and_svd(client: Client) -> None:
    data = np.random.default_rng(2).random((60, 6))
    x = da.from_array(data, chunks=(20, 6))
    _, s, _ = da.linalg.svd(x)
    assert np.allclose(s.compute(), np.linalg.svd(data, compute_uv=False))
    smooth = da.from_array(data[:, 0], chunks=20).map_overlap(lambda b: b * 2, depth=1)
    assert np.allclose(smooth.compute(), data[:, 0] * 2)


def test_dataframe_groupby(client: Client) -> None:
    df = frame()
    ddf = dd.from_pandas(df, npartitions=5)
    got = ddf.groupby("group").value.agg(["sum", "count"]).compute().sort_index()
    pd.testing.assert_frame_equal(
        got, df.groupby("group").value.agg(["sum", "count"]), check_dtype=False
    )


def test_dataframe_shuffle_with_tasks(client: Client) -> None:
    df = frame()
    ddf = dd.from_pandas(df, npartitions=6).shuffle("group", npartitions=4)
    parts = dask.compute(*ddf.to_delayed())
    groups = [set(part.group) for part in parts]
    assert sum(len(g) for g in groups) == len(set(df.group))
    got = pd.concat(parts).sort_values("id").reset_index(drop=True)
    pd.testing.assert_frame_equal(got, df, check_dtype=False)


def test_dataframe_set_index_and_merge(client: Client) -> None:
    left, right = frame(), frame(200).assign(other=1.0)[["id", "other"]]
    merged = dd.from_pandas(left, npartitions=4).merge(
        dd.from_pandas(right, npartitions=3), on="id", how="inner"
    )
    got = merged.compute().sort_values("id").reset_index(drop=True)
    want = left.merge(right, on="id", how="inner")
    pd.testing.assert_frame_equal(got[want.columns], want, check_dtype=False)
    indexed = dd.from_pandas(left, npartitions=4).set_index("value").compute()
    assert indexed.index.is_monotonic_increasing
    assert len(indexed) == len(left)


def test_bag(client: Client) -> None:
    bag = db.from_sequence(range(100), npartitions=5)
    assert bag.map(tasks.inc).filter(lambda x: x % 2 == 0).sum().compute() == 2550
    counts = dict(bag.map(lambda x: x % 3).frequencies().compute())
    assert counts == {0: 34, 1: 33, 2: 33}


def test_delayed_graph(client: Client) -> None:
    inc, total = dask.delayed(tasks.inc), dask.delayed(tasks.total)
    value = total([inc(i) for i in range(30)])
    assert value.compute() == sum(range(1, 31))
    a, b = dask.compute(inc(1), total([inc(1), inc(2)]))
    assert (a, b) == (2, 5)


def test_delayed_on_a_future_and_a_persisted_value(client: Client) -> None:
    future = client.submit(tasks.inc, 10)
    inc = dask.delayed(tasks.inc)
    persisted = inc(inc(future)).persist()
    assert inc(persisted).compute() == 14


def test_error_in_a_collection(client: Client) -> None:
    x = da.ones((20,), chunks=5).map_blocks(tasks.fail, dtype=float, meta=np.ones(1))
    with pytest.raises(tasks.OwnError):
        x.sum().compute()


def test_compute_several_collections_asynchronously(client: Client) -> None:
    futures = client.compute([da.ones(10, chunks=5).sum(), db.range(10, npartitions=2).sum()])
    assert client.gather(futures) == [10, 45]


def test_client_persist_with_workers(client: Client) -> None:
    x = client.persist(da.ones(40, chunks=10), workers="alice")
    wait(x, timeout=30)
    alice = next(
        a for a, w in client.scheduler_info(n_workers=-1)["workers"].items() if w["name"] == "alice"
    )
    assert {tuple(v) for v in client.who_has(x).values()} == {(alice,)}


def test_optimized_graph_reads_back_right(client: Client) -> None:
    ddf = dd.from_pandas(frame(), npartitions=4)
    query = ddf[ddf.group > 2]["value"].sum()
    df = frame()
    assert np.isclose(query.compute(), df[df.group > 2]["value"].sum())
