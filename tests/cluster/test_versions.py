"""Peers of other releases: refused or warned at the door, in words."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from distributed import Client

from tests.cluster import tasks
from tests.cluster.harness import SchedulerProcess
from tests.cluster.puppet import VERSIONS, PuppetClient, PuppetWorker, Refused
from tests.cluster.test_races import result, run, stock_client


def changed(**packages: Any) -> dict[str, Any]:
    """The versions of this process, with some packages at other versions."""
    versions = copy.deepcopy(VERSIONS)
    versions["packages"].update(packages)
    return versions


def test_same_versions_pass_without_a_word(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        peer = PuppetClient(bare.address)
        start = await peer.register()
        assert start["op"] == "stream-start"
        assert not start.get("error")
        assert not start.get("warning")
        peer.cut()
        worker = PuppetWorker(bare.address)
        reply = await worker.register()
        assert reply["status"] == "OK"
        assert not reply.get("warning")
        assert not reply.get("error")
        assert {"time", "heartbeat-interval", "worker-plugins"} <= set(reply)
        await worker.close()

    run(scenario)


def test_stock_client_sees_no_warning(
    bare: SchedulerProcess, recwarn: pytest.WarningsRecorder
) -> None:
    with Client(bare.address, set_as_default=False, timeout=20) as client:
        client.get_versions(check=True)
    assert [w for w in recwarn if "ersion" in str(w.message)] == []


@pytest.mark.ours_only
@pytest.mark.parametrize("other", ["2024.1.0", "2027.1.0", "2025.7.1", "not a version"])
def test_client_of_another_release_is_refused(bare: SchedulerProcess, other: str) -> None:
    async def scenario() -> None:
        peer = PuppetClient(bare.address)
        start = await peer.register(versions=changed(distributed=other, dask=other))
        assert other in start["error"]
        assert "2026.8" in start["error"]

    run(scenario)


@pytest.mark.ours_only
@pytest.mark.parametrize("other", ["2024.1.0", "2027.1.0", "2025.7.1", "not a version"])
def test_worker_of_another_release_is_refused(bare: SchedulerProcess, other: str) -> None:
    async def scenario() -> None:
        worker = PuppetWorker(bare.address)
        with pytest.raises(Refused, match=other):
            await worker.register(versions=changed(distributed=other, dask=other))
        await worker.close()
        assert bare.workers() == {}

    run(scenario)


def test_difference_in_other_packages_is_a_warning(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        worker = PuppetWorker(bare.address, versions=changed(numpy="1.0.0"))
        async with worker:
            peer = PuppetClient(bare.address)
            start = await peer.register()
            assert not start.get("error")
            assert "numpy" in start["warning"]
            assert "1.0.0" in start["warning"]
            peer.cut()

    run(scenario)


@pytest.mark.ours_only
def test_refusal_on_a_stock_client_is_an_import_error(
    bare: SchedulerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distributed import versions

    real = versions.get_versions
    monkeypatch.setattr(
        "distributed.client.version_module.get_versions",
        lambda *a, **k: {**real(*a, **k), "packages": changed(distributed="2024.1.0")["packages"]},
    )

    async def scenario() -> None:
        with pytest.raises(ImportError, match=r"2024\.1\.0"):
            await Client(bare.address, asynchronous=True, set_as_default=False, timeout=10)

    asyncio.run(scenario())


def test_others_go_on_after_a_refusal(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        worker = PuppetWorker(bare.address)
        worker.serve(value=2)
        async with worker, stock_client(bare) as client:
            peer = PuppetClient(bare.address)
            await peer.register(versions=changed(distributed="2024.1.0"))
            peer.cut()
            assert await result(client.submit(tasks.inc, 1, key="after-refusal-1")) == 2

    run(scenario)
