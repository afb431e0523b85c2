"""Broken, foreign and hostile peers: whoever sends nonsense is answered or dropped, no one else.

While each of them talks, an honest client and an honest worker go on with their work.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgpack
import psutil
import pytest

from tests.cluster import tasks
from tests.cluster.harness import STOCK, SchedulerProcess
from tests.cluster.puppet import PuppetClient, PuppetWorker, Refused
from tests.cluster.test_races import result, run, stock_client, until
from tests.cluster.wire import HANDSHAKE, Link, LinkClosed, Opaque, encode, frame, pickled


def undisturbed(
    scheduler: SchedulerProcess, scenario: Callable[[PuppetWorker], Any], growth: int = 50_000_000
) -> None:
    """Run `scenario` beside an honest pair, which must work before, during and after it."""

    async def whole() -> None:
        process = psutil.Process(scheduler.pid)
        async with PuppetWorker(scheduler.address) as honest, stock_client(scheduler) as client:
            honest.serve(value=2)
            kept = client.submit(tasks.inc, 1, key="kept-1")
            assert await result(kept) == 2
            before = process.memory_info().rss
            stop = asyncio.Event()

            async def keep_working() -> int:
                count = 0
                while not stop.is_set():
                    future = client.submit(tasks.inc, 1, key=f"meanwhile-{count}")
                    assert await result(future) == 2
                    count += 1
                return count

            working = asyncio.create_task(keep_working())
            try:
                await scenario(honest)
            finally:
                stop.set()
            assert await working > 0
            assert await result(client.submit(tasks.inc, 1, key="after-1")) == 2
            assert kept.status == "finished", "the honest client lost its connection"
            assert not honest.lost.is_set(), "the honest worker lost its connection"
            assert process.memory_info().rss - before < growth

    run(whole)
    assert scheduler.alive


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls-hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 60,
    "ones": b"\xff" * 64,
    "zeros": b"\x00" * 64,
    "one-huge-frame": struct.pack("<QQQ", 16 + 2**40, 1, 2**40) + b"x" * 16,
    "huge-block": struct.pack("<Q", 2**40) + b"x" * 16,
    "huge-frame-count": struct.pack("<QQ", 16, 2**62) + b"\0" * 8,
    "block-shorter-than-its-prelude": struct.pack("<QQQ", 8, 3, 1) + b"\xc0" * 40,
    "block-not-on-a-frame-boundary": struct.pack("<QQQQ", 27, 2, 5, 5) + b"\xc0" * 10,
    "lengths-overflow": struct.pack("<QQQQ", 24, 2, 2**63, 2**63) + b"\0" * 64,
    "no-frames": struct.pack("<QQ", 8, 0),
    "empty-frame": struct.pack("<QQQ", 16, 1, 0),
    "truncated-msgpack": struct.pack("<QQQ", 20, 1, 4) + b"\x81\xa2op",
    "msgpack-ext-type": frame([msgpack.packb(msgpack.ExtType(5, b"abc"))]),
    "bad-utf8": frame([b"\x81\xa2op\xa2\xff\xfe"]),
    "deep-nesting": frame([b"\x91" * 100_000 + b"\xc0"]),
    "huge-array-header": frame([b"\xdd\xff\xff\xff\xff"]),
    "huge-map-header": frame([b"\xdf\xff\xff\xff\xff"]),
    "huge-string-header": frame([b"\xdb\xff\xff\xff\xff"]),
    "placeholder-out-of-range": encode({"op": "identity", "x": {"__Serialized__": 99}}),
    "placeholder-not-an-index": encode({"op": "identity", "x": {"__Serialized__": "one"}}),
    "placeholder-negative": encode({"op": "identity", "x": {"__Pickled__": -1}}),
    "placeholder-to-itself": encode({"op": "identity", "x": {"__Serialized__": 0}}),
    "sub-frames-out-of-range": encode(
        {"op": "identity", "x": Opaque({"serializer": "pickle", "num-sub-frames": 2**40})}
    ),
    "unimportable-enum": encode(
        {"op": {"__Enum__": True, "name": "x", "__module__": "os", "__name__": "system"}}
    ),
    "not-a-map": encode([1, 2, 3]),
    "nil": encode(None),
    "no-op": encode({"reply": True}),
    "op-not-text": encode({"op": 7, "reply": True}),
    "op-is-a-list": encode({"op": ["identity"], "reply": True}),
    "nothing": b"",
}


@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.parametrize("shake", [False, True], ids=["instead-of-handshake", "after-handshake"])
def test_garbage_on_the_port(bare: SchedulerProcess, name: str, shake: bool) -> None:
    if STOCK and name in ("unimportable-enum", "deep-nesting"):
        pytest.skip("stock opens it")

    async def scenario(honest: PuppetWorker) -> None:
        links = []
        for ending in ("keep-open", "half-close", "abort"):
            link = await Link.open(bare.address, HANDSHAKE if shake else None)
            links.append(link)
            await link.send_bytes(GARBAGE[name])
            if ending == "half-close":
                link.writer.write_eof()
            elif ending == "abort":
                link.abort()
        # The half-closed one ends; the one that is kept open may be answered, dropped or wait.
        await links[1].wait_closed()
        reply = await Link.open(bare.address)
        assert (await reply.call("identity", n_workers=0))["type"] == "Scheduler"
        for link in [*links, reply]:
            link.abort()

    undisturbed(bare, scenario)


def test_random_bytes(bare: SchedulerProcess) -> None:
    async def scenario(honest: PuppetWorker) -> None:
        rng = random.Random(1)
        for _ in range(60):
            link = await Link.open(bare.address, rng.choice([None, HANDSHAKE]))
            await link.send_bytes(rng.randbytes(rng.randrange(1, 400)))
            link.abort()

    undisturbed(bare, scenario)


def test_mutated_messages(bare: SchedulerProcess) -> None:
    async def scenario(honest: PuppetWorker) -> None:
        rng = random.Random(2)
        registration = honest.registration(address="tcp://127.0.0.1:1", name="mutant")
        seeds = [
            encode({"op": "gather", "keys": ["kept-1"], "reply": True}),
            encode({"op": "who_has", "keys": [("a", 1), "b"], "reply": True}),
            encode({"op": "scatter", "data": {"k": pickled(1)}, "client": "x", "timeout": 1}),
            encode(registration),
        ]
        if STOCK:
            seeds.pop()  # half of a mutated registration stays there
        for _ in range(150):
            data = bytearray(rng.choice(seeds))
            for _ in range(rng.randrange(1, 5)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            link = await Link.open(bare.address)
            await link.send_bytes(bytes(data))
            link.abort()
        await until(lambda: set(bare.workers()) == {honest.address}, what="no mutant stays")

    undisturbed(bare, scenario)


@pytest.mark.parametrize(
    "handshake",
    [
        {},
        {"compression": None},
        {"compression": None, "python": "x", "pickle-protocol": "five"},
        {"compression": 7, "python": [3], "pickle-protocol": -1},
        [1, 2],
        "hello",
        None,
    ],
    ids=str,
)
def test_wrong_handshakes(bare: SchedulerProcess, handshake: Any) -> None:
    async def scenario(honest: PuppetWorker) -> None:
        link = await Link.open(bare.address, None)
        await link.send(handshake)
        await link.send({"op": "identity", "reply": True, "n_workers": 0})
        link.abort()

    undisturbed(bare, scenario)


def test_first_request_in_the_packet_of_the_handshake(bare: SchedulerProcess) -> None:
    async def scenario(honest: PuppetWorker) -> None:
        link = await Link.open(bare.address, None)
        question = {"op": "identity", "reply": True, "n_workers": 0}
        await link.send_bytes(encode(HANDSHAKE) + encode(question))
        assert "pickle-protocol" in await link.receive(10)
        assert (await link.receive(10))["type"] == "Scheduler"
        # Byte by byte, with frames outside the first block.
        for byte in _frames_outside(encode(question)):
            await link.send_bytes(bytes([byte]))
        assert (await link.receive(10))["type"] == "Scheduler"
        link.abort()

    undisturbed(bare, scenario)


def _frames_outside(message: bytes) -> bytes:
    """The same message, its first block cut down to the prelude."""
    count = struct.unpack_from("<Q", message, 8)[0]
    return struct.pack("<Q", 8 * (1 + count)) + message[8:]


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("no_such_operation", {}),
    ("heartbeat_worker", {}),
    ("heartbeat_worker", {"address": "tcp://127.0.0.1:1", "metrics": 5}),
    ("gather", {"keys": 7}),
    ("gather", {}),
    ("gather", {"keys": ["kept-1"], "surplus": {"a": [1]}}),
    ("who_has", {"keys": [b"\x00", 1.5, None]}),
    ("who_has", {"keys": "text"}),
    ("has_what", {"workers": ["not an address"]}),
    ("ncores", {"workers": [5]}),
    ("processing", {"workers": {"a": 1}}),
    ("nbytes", {"keys": [["x"]], "summary": "yes"}),
    ("scatter", {"data": [1, 2], "client": "x"}),
    ("scatter", {"data": {}, "workers": ["tcp://127.0.0.1:5"], "client": "x", "timeout": 0.1}),
    ("retire_workers", {"workers": ["tcp://127.0.0.1:5"]}),
    ("retire_workers", {"workers": 5}),
    ("set_restrictions", {"worker": {"nokey": ["x"]}}),
    ("retry", {"keys": ["nokey"], "client": "nobody"}),
    ("replicate", {"keys": ["nokey"], "n": -4}),
    ("rebalance", {"keys": ["nokey"]}),
    ("broadcast", {"msg": "no map"}),
    ("broadcast", {"msg": {"op": "identity"}, "workers": ["tcp://127.0.0.1:5"]}),
    ("proxy", {"worker": "tcp://127.0.0.1:5", "msg": {"op": "identity"}}),
    ("get_metadata", {"keys": [["deep", {"a": 1}]]}),
    ("set_metadata", {"keys": [], "value": 1}),
    ("update_data", {"who_has": {"k": ["tcp://127.0.0.1:5"]}, "nbytes": {}, "client": "x"}),
    ("get_story", {"keys_or_stimuli": 5}),
    ("unregister", {"address": "tcp://127.0.0.1:5", "stimulus_id": "x"}),
    ("register_nanny", {"address": 7}),
    ("identity", {"n_workers": "many"}),
    ("events", {"topic": ["a", {"b": 1}]}),
    ("register-client", {"client": None, "versions": None, "reply": False}),
    ("register-client", {"reply": False}),
]


def test_requests_that_make_no_sense(bare: SchedulerProcess) -> None:
    # The stock scheduler answers none of these, or only after its time to connect.
    slow = {"register-client", "set_metadata", "retire_workers", "broadcast", "proxy"}

    async def scenario(honest: PuppetWorker) -> None:
        for op, fields in REQUESTS:
            if STOCK and op in slow:
                continue
            link = await Link.open(bare.address)
            try:
                await link.call(op, limit=8, **fields)
            except LinkClosed:
                pass
            except TimeoutError:
                raise AssertionError(f"{op} {fields} was never answered") from None
            finally:
                link.abort()

    undisturbed(bare, scenario)


@pytest.mark.ours_only
def test_missing_and_wrong_fields_get_errors_that_name_them(bare: SchedulerProcess) -> None:
    # B1.4
    async def scenario(honest: PuppetWorker) -> None:
        link = await Link.open(bare.address)
        for op, fields, names in (
            ("gather", {}, ("gather", "keys")),
            ("gather", {"keys": 7}, ("gather", "keys")),
            ("who_has", {"keys": 1.5}, ("who_has", "keys")),
            ("unregister", {"stimulus_id": "x"}, ("unregister", "address")),
        ):
            reply = await link.call(op, **fields)
            assert reply["status"] in ("error", "uncaught-error"), reply
            assert all(name in reply["exception_text"] for name in names), reply
        # The connection stays good, and a surplus field of a request is ignored.
        reply = await link.call("who_has", keys=["kept-1"], surplus=1)
        assert reply == {"kept-1": (honest.address,)}
        link.abort()

    undisturbed(bare, scenario)


BAD_REGISTRATIONS: list[dict[str, Any]] = [
    {"metrics": {}},
    {"metrics": None},
    {"metrics": [1]},
    {"nthreads": 0},
    {"nthreads": -3},
    {"nthreads": "many"},
    {"nthreads": 1.5},
    {"resources": {"GPU": "two"}},
    {"resources": {"GPU": -1}},
    {"resources": [1, 2]},
    {"memory_limit": "4GB"},
    {"memory_limit": -1},
    {"status": "no-such-status"},
    {"status": 5},
    {"versions": None},
    {"services": None},
    {"services": {"dashboard": "x"}},
    {"address": "not an address"},
    {"address": None},
    {"address": ["tcp://127.0.0.1:1"]},
    {"name": ["a", "list"]},
    {"name": None},
    {"extra": 5},
    {"nanny": 5},
    {"server_id": None},
    {"drop": ["address"]},
    {"drop": ["metrics"]},
    {"drop": ["nthreads"]},
    {"drop": ["name"]},
    {"drop": ["versions"]},
]


@pytest.mark.ours_only
def test_bad_registrations_are_refused_and_leave_no_ghost(bare: SchedulerProcess) -> None:
    # B3.1
    async def scenario(honest: PuppetWorker) -> None:
        links = []
        for number, changes in enumerate(BAD_REGISTRATIONS):
            own = {"address": f"tcp://127.0.0.1:{number + 2}", "name": f"bad-{number}"}
            link = await Link.open(bare.address)
            links.append(link)  # stays open, as with a process that hangs
            await link.send(honest.registration(**{**own, **changes}))
            try:
                reply = await link.receive(8)
            except LinkClosed:
                continue
            except TimeoutError:
                raise AssertionError(f"{changes} was never answered") from None
            if reply["status"] == "OK":
                link.abort()  # tolerated; it is gone again
            else:
                assert reply["status"] == "error"
                assert isinstance(reply["time"], float), "stock workers read the time first"
                culprit = changes["drop"][0] if "drop" in changes else next(iter(changes))
                assert culprit in reply["message"], reply
        await until(lambda: set(bare.workers()) == {honest.address}, what="no ghost is listed")
        for link in links:
            link.abort()

    undisturbed(bare, scenario)


@pytest.mark.ours_only
def test_refused_registration_gets_no_tasks(bare: SchedulerProcess) -> None:
    async def scenario() -> None:
        odd = PuppetWorker(bare.address, nthreads=4)
        with pytest.raises(Refused):
            await odd.register(memory_limit="4GB")
        await odd.close()
        good = PuppetWorker(bare.address)
        good.serve(value=2)
        async with good, stock_client(bare) as client:
            for i in range(20):
                assert await result(client.submit(tasks.inc, 1, key=f"distinct{i}-1")) == 2

    run(scenario)


@pytest.mark.ours_only
def test_duplicates_are_refused(bare: SchedulerProcess) -> None:
    async def scenario(honest: PuppetWorker) -> None:
        server_id = bare.workers()[honest.address]["id"]
        double = await PuppetWorker(bare.address, name=honest.name).listen()
        with pytest.raises(Refused, match=f"name.*{honest.label}"):
            await double.register()
        with pytest.raises(Refused, match=f"address.*{honest.address}"):
            await double.register(name="another", address=honest.address)
        await double.close()
        assert set(bare.workers()) == {honest.address}
        assert bare.workers()[honest.address]["id"] == server_id

    undisturbed(bare, scenario)


@pytest.mark.ours_only
def test_new_incarnation_at_the_same_address_supersedes_the_old(bare: SchedulerProcess) -> None:
    # B3.6: two processes cannot listen on one address, so the old one is gone.
    async def scenario() -> None:
        async with PuppetWorker(bare.address, name="same") as old, stock_client(bare) as client:
            future = client.submit(tasks.inc, 1, key="superseded-1")
            order = await old.expect("compute-task", "superseded-1")
            new = PuppetWorker(bare.address, name="same")
            new.address, new.server = old.address, old.server
            await new.start()
            try:
                again = await new.expect("compute-task", "superseded-1")
                assert again["run_id"] != order["run_id"]
                with suppress(ConnectionError):  # the old stream may be closed by now
                    await old.finish(order, value=99)
                await new.finish(again, value=2)
                new.data = old.data = {"superseded-1": 2}
                assert await result(future) == 2
                assert len(bare.workers()) == 1
            finally:
                await new.close()

    run(scenario)


WORKER_STREAM: list[dict[str, Any]] = [
    {"op": "no-such-op"},
    {"op": "task-finished"},
    {"op": "task-finished", "key": "never-heard-of", "run_id": 1},
    {"op": "task-finished", "key": ["unhashable", {"a": 1}], "run_id": "x", "stimulus_id": 5},
    {"op": "task-erred", "key": "never-heard-of"},
    {"op": "add-keys", "keys": 5, "stimulus_id": "s"},
    {"op": "release-worker-data", "stimulus_id": "s"},
    {"op": "reschedule", "key": "never-heard-of", "stimulus_id": "s", "surplus": 1},
    {"op": "reschedule", "key": "never-heard-of", "stimulus_id": None},
    {"op": "long-running", "key": "never-heard-of", "run_id": 1, "stimulus_id": "s"},
    {"op": "steal-response", "key": "k", "state": "no-such-state", "stimulus_id": "s"},
    {"op": "worker-status-change", "status": "no-such-status", "stimulus_id": "s"},
    {"op": "request-refresh-who-has", "keys": None, "stimulus_id": "s"},
    {"op": "log-event", "topic": 5, "msg": {}},
    {"op": 5},
    {"noop": 1},
]


@pytest.mark.ours_only
@pytest.mark.parametrize("message", WORKER_STREAM, ids=lambda m: str(m.get("op")))
def test_bad_message_on_a_worker_stream(bare: SchedulerProcess, message: dict[str, Any]) -> None:
    # B1.4: rejected and counted; the stream goes on.
    async def scenario(honest: PuppetWorker) -> None:
        async with PuppetWorker(bare.address) as sloppy:
            await sloppy.link.send([message, 5, None, [message]])
            await sloppy.settle()
            assert not sloppy.lost.is_set()
            assert len(bare.workers()) == 2

    undisturbed(bare, scenario)


@pytest.mark.ours_only
def test_rejected_outcome_of_a_run_is_not_waited_for(bare: SchedulerProcess) -> None:
    # B1.4: the message may be the one that somebody waits for, so its key is run again.
    async def scenario() -> None:
        async with PuppetWorker(bare.address) as sloppy, stock_client(bare) as client:
            future = client.submit(tasks.inc, 1, key="sloppy-1")
            order = await sloppy.expect("compute-task", "sloppy-1")
            await sloppy.finish(order, nbytes="many")
            again = await sloppy.expect("compute-task", "sloppy-1")
            assert again["run_id"] != order["run_id"]
            await sloppy.finish(again, value=2)
            assert await result(future) == 2

    run(scenario)


CLIENT_STREAM: list[dict[str, Any]] = [
    {"op": "no-such-op"},
    {"op": "update-graph"},
    {"op": "update-graph", "keys": {"k"}, "expr_ser": 5},
    {"op": "client-releases-keys"},
    {"op": "client-releases-keys", "keys": ["never-heard-of"], "client": "nobody"},
    {"op": "client-releases-keys", "keys": 5},
    {"op": "client-desires-keys", "keys": ["never-heard-of"]},
    {"op": "cancel-keys", "keys": ["never-heard-of"], "force": "x"},
    {"op": "cancel-keys", "keys": ["kept-1"], "force": False, "reason": None, "msg": None},
    {"op": "report-key", "key": "never-heard-of"},
    {"op": "subscribe-topic", "topic": None},
    {"op": "heartbeat-client", "surplus": 1},
    {"op": 5},
    {"noop": 1},
]


@pytest.mark.ours_only
@pytest.mark.parametrize("message", CLIENT_STREAM, ids=lambda m: str(m.get("op")))
def test_bad_message_on_a_client_stream(bare: SchedulerProcess, message: dict[str, Any]) -> None:
    # B1.4
    async def scenario(honest: PuppetWorker) -> None:
        async with PuppetClient(bare.address) as sloppy:
            await sloppy.link.send([message, 5, None, [message]])
            await sloppy.settle()
            assert not sloppy.lost.is_set()

    undisturbed(bare, scenario)


@pytest.mark.ours_only
def test_graph_that_cannot_be_opened_errs_its_keys_only(bare: SchedulerProcess) -> None:
    async def scenario(honest: PuppetWorker) -> None:
        good = {"code": _pickled_placeholder(()), "span_metadata": _pickled_placeholder({})}
        for number, expression in enumerate(
            (
                pickled("not an expression"),
                Opaque({"serializer": "pickle", "writeable": [], "num-sub-frames": 1}, [b"junk"]),
                Opaque({"serializer": "no-such-family", "num-sub-frames": 1}, [b"x"]),
                Opaque({"serializer": "pickle", "writeable": [], "num-sub-frames": 0}, []),
            )
        ):
            async with PuppetClient(bare.address) as sloppy:
                key = f"unopened-{number}"
                await sloppy.send(
                    "update-graph",
                    expr_ser=expression,
                    keys={key},
                    internal_priority=None,
                    submitting_task=None,
                    fifo_timeout="60s",
                    actors=None,
                    annotations=_pickled_placeholder({}),
                    **good,
                )
                erred = await sloppy.expect("task-erred", key, limit=15)
                assert erred["exception"] is not None

    undisturbed(bare, scenario)


def _pickled_placeholder(value: Any) -> Opaque:
    import pickle

    header = {"pickled-obj": pickle.dumps(value), "compression": [], "num-sub-frames": 0}
    return Opaque(header, [], "__Pickled__")


def test_many_silent_connections(bare: SchedulerProcess) -> None:
    async def scenario(honest: PuppetWorker) -> None:
        links = [await Link.open(bare.address, None) for _ in range(200)]
        for link in links:
            link.abort()

    undisturbed(bare, scenario)


def test_peer_that_never_reads(bare: SchedulerProcess) -> None:
    async def scenario(honest: PuppetWorker) -> None:
        link = await Link.open(bare.address)
        link.writer.transport.set_write_buffer_limits(high=2**30)
        for _ in range(300):
            link.writer.write(encode({"op": "identity", "reply": True, "n_workers": -1}))
        for _ in range(3):
            probe = await Link.open(bare.address)
            assert (await probe.call("identity", n_workers=0))["type"] == "Scheduler"
            probe.abort()
        link.abort()

    undisturbed(bare, scenario)
