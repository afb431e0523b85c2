"""The table of operations against what stock peers really say to each other."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import distributed.protocol
import pytest
from dask import delayed
from distributed import Client, Nanny, Scheduler, Worker, worker_client

from distributed_core.protocol.codec import decode, encode
from distributed_core.protocol.ops import RESERVED, ROWS, Channel, Kind, check
from tests.wire.support import run


def load(frames: list[Any]) -> Any:
    return decode([bytes(frame) for frame in frames])


def problems(message: Any) -> list[str]:
    """Why no channel takes ``message``; empty if one does."""
    op = message["op"]
    found = []
    for channel in Channel:
        row = ROWS[channel].get(op)
        if row is None:
            continue
        fields = dict(message)
        if channel.kind is Kind.RPC:
            for name in RESERVED - {"op"}:
                fields.pop(name, None)
        if row.announced:
            return []
        rejection = check(row, fields, strict=True)
        if rejection is None:
            return []
        found.append(rejection.text)
    return found or [f"unknown operation {op!r}"]


def fail() -> None:
    raise ValueError("on purpose")


def nested() -> int:
    with worker_client() as client:
        return int(client.submit(sum, [1, 2], key="nested-sum").result())


class Counting:
    value = 0

    def increment(self) -> int:
        self.value += 1
        return self.value


async def busy_cluster() -> None:
    """A tour through what a client can ask for."""
    options: dict[str, Any] = {"host": "127.0.0.1", "dashboard_address": ":0"}
    async with (
        Scheduler(port=0, dashboard=False, host="127.0.0.1") as scheduler,
        Worker(scheduler.address, name="a", nthreads=2, **options) as first,
        Worker(scheduler.address, name=1, nthreads=1, resources={"R": 1}, **options),
        Client(scheduler.address, asynchronous=True, set_as_default=True) as client,
    ):
        futures = client.map(lambda x: x + 1, range(5), priority=3)
        total = client.submit(sum, futures, workers=["a"], allow_other_workers=True)
        assert await total == 15
        assert await client.submit(nested) == 3
        with pytest.raises(ValueError, match="on purpose"):
            await client.submit(fail, retries=1)
        assert await client.compute(delayed(sum)([1, 2])) == 3
        assert await client.submit(lambda: 1, resources={"R": 1}) == 1
        scattered = await client.scatter({"d": [1, 2]}, broadcast=True)
        assert await client.gather(scattered["d"], direct=False) == [1, 2]
        direct = await client.scatter([7], direct=True)
        assert await client.gather(direct, direct=True) == [7]
        await client.replicate(futures[:2])
        await client.rebalance(futures)
        for call in (client.who_has, client.has_what, client.nthreads, client.processing):
            await call()
        await client.nbytes()
        await client.call_stack()
        await client.profile()
        await client.get_versions()
        await client.scheduler.identity()
        await client.run(lambda: 1)
        await client.set_metadata(["x"], 1)
        assert await client.get_metadata(["x"]) == 1
        await client.get_task_stream()
        await client.story(futures[0])
        await client.scheduler.events(topic="topic")
        await client.log_event("topic", {"a": 1})
        await client.get_scheduler_logs()
        await client.get_worker_logs()
        await client.amm.running()
        actor = await client.submit(Counting, actor=True)
        assert await actor.increment() == 1
        slow = client.submit(lambda: 1, workers="no-such-host", pure=False)
        await slow.cancel()
        # Held by the worker that retires, and by it alone.
        kept = client.submit(int, 5, workers=["a"], key="kept")
        assert await kept == 5
        await first.heartbeat()
        await client.retire_workers([first.address])


def test_every_message_of_a_stock_cluster_fits_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    loads = distributed.protocol.loads

    def spy(frames: list[Any], *args: Any, **kwargs: Any) -> Any:
        message = load(frames)
        # Our own encoding of it has to decode to the same again.
        assert load(encode(message)) == message
        for part in message if isinstance(message, tuple) else (message,):
            if isinstance(part, dict) and isinstance(part.get("op"), str):
                seen[part["op"]] += 1
                wrong.extend(problems(part))
        return loads(frames, *args, **kwargs)

    monkeypatch.setattr(distributed.protocol, "loads", spy)
    run(busy_cluster())
    assert wrong == []
    expected = {
        "register-client", "register-worker", "heartbeat_worker", "update-graph", "gather",
        "compute-task", "task-finished", "task-erred", "key-in-memory", "free-keys",
        "client-releases-keys", "scatter", "update_data", "get_data", "broadcast", "cancel-keys",
        "worker-status-change", "close-stream", "long-running",
        "release-worker-data", "subscribe-topic", "stream-start", "retire_workers", "run",
    }  # fmt: skip
    assert expected - set(seen) == set()


def names(handlers: dict[str, Any]) -> set[str]:
    return set(handlers)


def test_the_table_knows_every_handler_of_stock_servers() -> None:
    async def main() -> None:
        async with (
            Scheduler(port=0, dashboard=False, host="127.0.0.1") as scheduler,
            Worker(scheduler.address, host="127.0.0.1") as worker,
            Nanny(scheduler.address, host="127.0.0.1", nthreads=1) as nanny,
        ):
            assert names(scheduler.handlers) - set(ROWS[Channel.SCHEDULER_RPC]) == set()
            streams = set(ROWS[Channel.CLIENT_STREAM]) | set(ROWS[Channel.WORKER_STREAM])
            assert names(scheduler.stream_handlers) - streams == set()
            assert names(worker.handlers) - set(ROWS[Channel.WORKER_RPC]) == set()
            assert names(worker.stream_handlers) - set(ROWS[Channel.TO_WORKER]) == set()
            assert names(nanny.handlers) - set(ROWS[Channel.NANNY_RPC]) == set()
            client_handlers = inspect.getsource(Client)
            for op in ROWS[Channel.TO_CLIENT]:
                assert f'"{op}"' in client_handlers
            # Required and optional fields agree with the signatures, where there is one.
            for op, handler in scheduler.handlers.items():
                row = ROWS[Channel.SCHEDULER_RPC][op]
                if not row.served:
                    continue
                for name, parameter in inspect.signature(handler).parameters.items():
                    if name in ("comm", "serializers", "close") or parameter.kind in (
                        parameter.VAR_KEYWORD,
                        parameter.VAR_POSITIONAL,
                    ):
                        continue
                    assert name in row.fields, (op, name)

    run(main())
