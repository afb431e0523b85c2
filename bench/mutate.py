"""The mutation run: a million broken messages, none of which may crash anything or grow memory.

Owns the valid messages that are broken, the ways of breaking them and the verdict. Two parts:
the decoders (frame cutter, both stream decoders, the codec and the table of operations) in a child
process, so that a native crash is a result and not the end of the run; and a live scheduler, which
gets broken messages over sockets while an innocent peer's requests must go on being answered.
Blocks of inputs are seeded one by one, so any failure is replayed with ``--first BLOCK``.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import faulthandler
import gc
import json
import os
import pickle
import random
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgpack

from bench.processes import BenchError, Child, peak_rss_bytes, rss_bytes
from bench.run import Scheduler, our_command
from bench.zero_workers import HANDSHAKE, frame_message, split_address

__all__ = ["SEEDS", "main", "mutate", "mutate_frames"]

BLOCK = 1_000
# A run must not keep more than this beyond its first tenth; allocators need some room.
GROWTH_LIMIT_BYTES = 16 << 20
# What opens arrays, maps, strings and extensions of every width, and the edges of ints.
EDGE_BYTES = bytes.fromhex("00017f80818f909fa0bfc0c1c4c5c6c7c9cacbcccfd0d3d4d9dadbdcdddedfe0ff")
EDGE_LENGTHS = (0, 1, 7, 1 << 16, (1 << 31) - 1, 1 << 32, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)

KEYS: tuple[Any, ...] = ("inc-2e0f917099bac57274f8cc1384f6fdb0", ("x", 0, 1), 7, 2.5, "ключ")


def pack(message: Any) -> bytes:
    """Return `message` as a msgpack body."""
    data = msgpack.packb(message, use_bin_type=True)
    assert isinstance(data, bytes)
    return data


PICKLED_HEADER = pack({"pickled-obj": pickle.dumps(1), "compression": [], "num-sub-frames": 0})
SERIALIZED_HEADER = pack({"serializer": "pickle", "writeable": [], "num-sub-frames": 1})


def worker_stream() -> list[list[bytes]]:
    """Return valid messages of a worker's stream, as frames."""
    finished = [
        {
            "op": "task-finished",
            "key": key,
            "run_id": index,
            "nbytes": 28,
            "type": pickle.dumps(int),
            "typename": "int",
            "metadata": {"a": [1, {"b": None}]} if index else {},
            "thread": 140064737625792,
            "startstops": [{"action": "compute", "start": 10.0, "stop": 10.5}],
            "status": "OK",
            "stimulus_id": "task-finished-1796071980.8974037",
        }
        for index, key in enumerate(KEYS)
    ]
    small = [
        {"op": "add-keys", "keys": list(KEYS), "stimulus_id": "s"},
        {"op": "release-worker-data", "key": KEYS[1], "stimulus_id": "s"},
        {"op": "long-running", "key": "a", "run_id": 1, "compute_duration": 0.5, "stimulus_id": ""},
        {"op": "reschedule", "key": "a", "stimulus_id": "s"},
        {"op": "steal-response", "key": "a", "state": "ready", "stimulus_id": "steal-1"},
        {"op": "request-refresh-who-has", "keys": ["a", 2], "stimulus_id": "s"},
        {"op": "worker-status-change", "status": "running", "stimulus_id": "s"},
        {"op": "log-event", "topic": "t", "msg": {"action": "x"}},
        {"op": "keep-alive"},
    ]
    erred = {
        "op": "task-erred",
        "key": "a",
        "run_id": 1,
        "exception": {"__Serialized__": 1},
        "traceback": {"__Serialized__": 3},
        "exception_text": "ValueError()",
        "traceback_text": "",
        "thread": None,
        "startstops": [],
        "status": "error",
        "stimulus_id": "s",
    }
    payload = [SERIALIZED_HEADER, b"payload", SERIALIZED_HEADER, b""]
    return [
        [pack(finished[:1])],
        [pack(finished)],
        [pack(small)],
        [pack([finished[1], *small, finished[2]])],
        [pack([erred, *small[:2]]), *payload],
    ]


def client_stream() -> list[list[bytes]]:
    """Return valid messages of a client's stream, as frames."""
    graph = {
        "op": "update-graph",
        "expr_ser": {"__Serialized__": 1},
        "keys": {"__Set__": True, "as-list": list(KEYS)},
        "internal_priority": {KEYS[0]: 0, KEYS[1]: 1},
        "submitting_task": None,
        "fifo_timeout": "100 ms",
        "actors": False,
        "code": {"__Pickled__": 3},
        "annotations": {"__Pickled__": 4},
        "span_metadata": {"__Pickled__": 5},
    }
    payload = [SERIALIZED_HEADER, b"expression", PICKLED_HEADER, PICKLED_HEADER, PICKLED_HEADER]
    small = [
        {"op": "client-releases-keys", "keys": list(KEYS), "client": "Client-1"},
        {"op": "client-releases-keys", "keys": ["a"]},
        {"op": "heartbeat-client"},
        {"op": "subscribe-topic", "topic": "print", "client": "Client-1"},
        {"op": "client-desires-keys", "keys": ["a"], "client": "fire-and-forget"},
        {"op": "cancel-keys", "keys": ["a"], "force": False, "reason": None, "msg": None},
    ]
    return [[pack([graph, small[1]]), *payload], [pack(small)], [pack(small[:1])]]


def requests() -> list[list[bytes]]:
    """Return valid requests, as frames; none of them changes a scheduler for good."""
    base = {"reply": True}
    metrics = {
        "bandwidth": {"total": 1, "workers": {}, "types": {}},
        "digests_total_since_heartbeat": {("a", "b"): 1.0},
        "memory": 1,
        "spilled_bytes": {"memory": 0, "disk": 0},
    }
    heartbeat = {
        "op": "heartbeat_worker",
        "address": "tcp://127.0.0.1:9",
        "now": 1.0,
        "metrics": metrics,
        "executing": {("x", 1): 0.5},
        "extensions": {"spans": {}},
    }
    plain: list[dict[str, Any]] = [
        {"op": "identity", "n_workers": -1},
        {"op": "gather", "keys": list(KEYS)},
        {"op": "who_has", "keys": list(KEYS)},
        {"op": "has_what", "workers": ["tcp://127.0.0.1:9"]},
        {"op": "ncores", "workers": None},
        {"op": "nbytes", "keys": ["a"], "summary": False},
        {"op": "get_task_status", "keys": ["a"]},
        {"op": "echo", "data": {"a": [1, 2, {"b": "c"}]}},
        heartbeat,
    ]
    scatter = {
        "op": "scatter",
        "data": {"a": {"__Serialized__": 1}},
        "workers": None,
        "client": "Client-nobody",
        "broadcast": False,
        "timeout": 0.01,
    }
    return [
        *([pack({**message, **base})] for message in plain),
        [pack({**scatter, **base}), SERIALIZED_HEADER, b"payload"],
        [pack({"compression": None, "python": [3, 11, 0], "pickle-protocol": 5})],
    ]


SEEDS = {"worker": worker_stream(), "client": client_stream(), "rpc": requests()}


def mutate(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Return `data` broken in one to three ways; `other` is what a splice takes bytes from."""
    changed = bytearray(data)
    for _ in range(1 if rng.random() < 0.7 else 3):
        size = len(changed)
        way = rng.randrange(9)
        at = rng.randrange(size) if size else 0
        length = 1 + rng.randrange(16)
        if way == 0 and size:
            changed[at] ^= 1 << rng.randrange(8)
        elif way == 1 and size:
            changed[at] = rng.choice(EDGE_BYTES)
        elif way == 2:
            del changed[at:]
        elif way == 3:
            del changed[at : at + length]
        elif way == 4:
            changed[at:at] = rng.randbytes(length)
        elif way == 5:
            changed[at:at] = changed[at : at + 4 * length]
        elif way == 6:
            start = rng.randrange(len(other) + 1)
            changed[at : at + length] = other[start : start + length]
        elif way == 7:
            # A header that announces far more elements or bytes than follow.
            kind = rng.choice(b"\xc6\xdb\xdd\xdf")
            changed[at : at + 5] = struct.pack(">BI", kind, rng.choice((1 << 20, (1 << 32) - 1)))
        elif way == 8:
            # Deep nesting; what is behind it is out of step anyway.
            changed[at:at] = rng.choice((b"\x91", b"\x81")) * rng.choice((3, 70, 2_000))
    return bytes(changed)


def mutate_frames(frames: Sequence[bytes], rng: random.Random, pool: list[list[bytes]]) -> bytes:
    """Return the bytes of one broken message: mostly within a frame, else across the framing."""
    other = rng.choice(pool)[0]
    way = rng.random()
    if way < 0.75:
        broken = list(frames)
        index = 0 if rng.random() < 0.8 else rng.randrange(len(broken))
        broken[index] = mutate(broken[index], other, rng)
        return frame_message(*broken)
    if way < 0.85:
        message = bytearray(frame_message(*frames))
        # One of the numbers of the prelude: block size, count, or a frame's length.
        slot = rng.randrange(2 + len(frames))
        message[8 * slot : 8 * slot + 8] = struct.pack("<Q", rng.choice(EDGE_LENGTHS))
        return bytes(message)
    if way < 0.95:
        return mutate(frame_message(*frames), other, rng)
    shuffled = list(frames)
    rng.shuffle(shuffled)
    del shuffled[rng.randrange(len(shuffled)) :]
    return frame_message(*shuffled)


class DecoderRun:
    """Everything in the scheduler's process that reads a peer's bytes, without the process."""

    def __init__(self) -> None:
        from cython_ext.inbound import ClientStreamDecoder, WorkerStreamDecoder
        from distributed_core.comm.settings import CommSettings
        from distributed_core.protocol.ops import Channel

        self.counts: collections.Counter[str] = collections.Counter()
        self.limits = CommSettings().limits
        self._channel: Any = None
        self._channels = {
            "worker": Channel.WORKER_STREAM,
            "client": Channel.CLIENT_STREAM,
            "rpc": Channel.SCHEDULER_RPC,
        }
        self._worker = WorkerStreamDecoder(self._event, self._cold, self._rejected)
        self._client = ClientStreamDecoder(self._event, self._cold, self._rejected)

    def _event(self, event: Any) -> None:
        self.counts["events"] += 1

    def _rejected(self, *_: Any) -> None:
        self.counts["elements rejected"] += 1

    def _cold(self, element: Any, frames: Sequence[Any], _sender: Any, _now: float) -> None:
        self._check([element, *frames[1:]])

    def _check(self, frames: Sequence[Any]) -> None:
        from distributed_core.protocol.codec import DecodeError, decode, encode
        from distributed_core.protocol.ops import Rejection, check_message

        try:
            message = decode(frames)
        except DecodeError:
            self.counts["undecodable"] += 1
            return
        found = check_message(self._channel, message)
        if isinstance(found, Rejection):
            self.counts["rejected by the table"] += 1
            return
        # What was accepted may be forwarded, so it must have a form on the wire again.
        encode(message)
        self.counts["accepted by the table"] += 1

    def feed(self, kind: str, data: bytes, split: int) -> None:
        """Cut and decode what a peer of `kind` sent in two reads."""
        from cython_ext.frames import FrameCutter, FrameError
        from cython_ext.msgpack import MsgpackError

        self._channel = self._channels[kind]
        limits = self.limits
        cutter = FrameCutter(limits.max_frames, limits.max_frame_bytes, limits.max_message_bytes)
        for piece in (data[:split], data[split:]):
            try:
                messages = cutter.feed(piece)
            except FrameError:
                self.counts["refused by the cutter"] += 1
                return
            for frames in messages:
                try:
                    if kind == "worker":
                        self._worker.decode(frames, None, 1.0)
                    elif kind == "client":
                        self._client.decode(frames, "Client-1", 1.0, "s")
                    else:
                        self._check(frames)
                except MsgpackError:
                    self.counts["stream messages refused"] += 1
        if cutter.pending_bytes:
            self.counts["incomplete"] += 1


def inputs(seed: int, block: int) -> Any:
    """Yield the inputs of one block: kind, bytes, and where the read is split."""
    rng = random.Random(seed * 1_000_003 + block)
    pool = [frames for kind in SEEDS.values() for frames in kind]
    kinds = list(SEEDS)
    for _ in range(BLOCK):
        kind = rng.choice(kinds)
        data = mutate_frames(rng.choice(SEEDS[kind]), rng, pool)
        yield kind, data, rng.randrange(len(data) + 1) if rng.random() < 0.2 else len(data)


def say(event: str, **fields: Any) -> None:
    """Print one line of JSON, at once."""
    print(json.dumps({"event": event, **fields}), flush=True)


def run_decoders(seed: int, first: int, blocks: int) -> int:
    """Feed `blocks` blocks to the decoders of this process; report in JSON lines."""
    faulthandler.enable()
    run = DecoderRun()
    settled: tuple[int, int] | None = None
    for number in range(blocks):
        if number == blocks // 10:
            gc.collect()
            settled = (rss_bytes(os.getpid()), peak_rss_bytes(os.getpid()) or 0)
        block = first + number
        for index, (kind, data, split) in enumerate(inputs(seed, block)):
            try:
                run.feed(kind, data, split)
            except Exception as error:  # noqa: BLE001 - any exception is the finding reported here
                say(
                    "failure",
                    block=block,
                    index=index,
                    kind=kind,
                    error=f"{type(error).__name__}: {error}",
                    data=data.hex()[:4000],
                )
                return 1
        if number % 50 == 49:
            say("progress", block=block)
    gc.collect()
    assert settled is not None
    say(
        "done",
        counts=dict(run.counts),
        growth_bytes=rss_bytes(os.getpid()) - settled[0],
        peak_growth_bytes=(peak_rss_bytes(os.getpid()) or 0) - settled[1],
    )
    return 0


def supervise_decoders(seed: int, first: int, blocks: int, limit_seconds: float) -> dict[str, Any]:
    """Run the decoders in a child; BenchError with what is needed to replay a failure."""
    child = Child(
        "the decoder process",
        [
            *(sys.executable, "-m", "bench.mutate", "--inside", "--seed", str(seed)),
            *("--first", str(first), "--count", str(blocks * BLOCK)),
        ],
        is_talking=True,
    )
    deadline = time.monotonic() + limit_seconds
    last = first
    try:
        while True:
            message = child.poll(max(0.0, deadline - time.monotonic()))
            if message is None:
                raise child.failure(f"is not done after {limit_seconds:g} s, last block {last}")
            if message["event"] == "done":
                return message
            if message["event"] != "progress":
                raise child.failure(f"failed after block {last}: {json.dumps(message)}")
            last = message["block"]
    finally:
        child.end()


async def _ask(address: tuple[str, int], body: bytes, timeout_seconds: float) -> Any:
    """Return the reply to one request on a connection of its own."""

    async def talk() -> Any:
        reader, writer = await asyncio.open_connection(*address)
        try:
            writer.write(HANDSHAKE + frame_message(body))
            for _ in range(2):
                _, count = struct.unpack("<QQ", await reader.readexactly(16))
                lengths = struct.unpack(f"<{count}Q", await reader.readexactly(8 * count))
                frames = [await reader.readexactly(length) for length in lengths]
            return msgpack.unpackb(frames[0], use_list=False, strict_map_key=False)
        finally:
            writer.close()

    return await asyncio.wait_for(talk(), timeout_seconds)


async def _throw(address: tuple[str, int], opening: bytes, data: list[bytes]) -> int:
    """Send `data` on one connection until it is refused; return how many were sent."""
    try:
        reader, writer = await asyncio.open_connection(*address)
    except OSError:
        return 0
    sent = 0

    async def drain_replies() -> None:
        while await reader.read(1 << 16):
            pass

    replies = asyncio.ensure_future(drain_replies())
    try:
        writer.write(opening)
        for message in data:
            if replies.done():
                break
            writer.write(message)
            await writer.drain()
            sent += 1
            # Lets the refusal, if that is the answer, arrive before the next one is thrown.
            await asyncio.sleep(0)
        if not replies.done():
            with contextlib.suppress(OSError):
                writer.write_eof()
            await asyncio.wait({replies}, timeout=0.2)
    except OSError:
        # The scheduler cut this peer off, as it should.
        pass
    finally:
        replies.cancel()
        await asyncio.gather(replies, return_exceptions=True)
        writer.close()
    return sent


def registration(name: str) -> dict[str, bytes]:
    """Return what turns a connection into a stream of the worker or client called `name`."""
    worker = {
        "op": "register-worker",
        "reply": False,
        "address": f"tcp://127.0.0.1:{10_000 + int(name) % 50_000}",
        "status": "init",
        "server_id": f"Worker-{name}",
        "nthreads": 1,
        "name": name,
        "now": time.time(),
        "resources": {},
        "memory_limit": None,
        "metrics": {
            "bandwidth": {"total": 1, "workers": {}, "types": {}},
            "digests_total_since_heartbeat": {},
            "memory": 1,
            "spilled_bytes": {"memory": 0, "disk": 0},
        },
        "services": {},
        "local_directory": "",
        "versions": {},
        "nanny": None,
        "extra": {},
        "stimulus_id": "s",
    }
    client = {"op": "register-client", "client": f"Client-{name}", "versions": {}, "reply": False}
    return {
        "worker": HANDSHAKE + frame_message(pack(worker)),
        "client": HANDSHAKE + frame_message(pack(client)),
        "rpc": HANDSHAKE,
    }


async def _run_live(scheduler: Scheduler, seed: int, count: int) -> dict[str, Any]:
    address = split_address(scheduler.address)
    rng = random.Random(seed)
    pool = [frames for kind in SEEDS.values() for frames in kind]
    identity = pack({"op": "identity", "n_workers": 0, "reply": True})
    await _ask(address, identity, 10.0)
    settled: int | None = None
    halfway: int | None = None
    slowest = 0.0
    sent = 0
    peers = 0
    while sent < count:
        if settled is None and sent >= count // 10:
            settled = rss_bytes(scheduler.pid)
        if halfway is None and sent >= count * 55 // 100:
            halfway = rss_bytes(scheduler.pid)
        throws = []
        for _ in range(16):
            peers += 1
            kind = rng.choice(list(SEEDS))
            data = [mutate_frames(rng.choice(SEEDS[kind]), rng, pool) for _ in range(8)]
            throws.append(_throw(address, registration(str(peers))[kind], data))
        sent += sum(await asyncio.gather(*throws))
        if not scheduler.child.is_alive():
            raise scheduler.child.failure(f"ended after {sent} broken messages")
        start = time.monotonic()
        reply = await _ask(address, identity, 10.0)
        slowest = max(slowest, time.monotonic() - start)
        if not isinstance(reply, dict) or reply.get("type") != "Scheduler":
            raise scheduler.child.failure(f"answered an innocent peer with {reply!r}")
    assert settled is not None
    assert halfway is not None
    # Two equal halves: books that fill up to their bound grow in the first, a leak in both.
    return {
        "sent": sent,
        "peers": peers,
        "slowest_innocent_seconds": slowest,
        "growth_bytes": rss_bytes(scheduler.pid) - settled,
        "second_half_bytes": rss_bytes(scheduler.pid) - halfway,
    }


def run_live(seed: int, count: int) -> dict[str, Any]:
    """Throw `count` broken messages at a fresh scheduler; BenchError if anyone else suffers."""
    scheduler = Scheduler("ours", our_command())
    try:
        scheduler.await_listening()
        return asyncio.run(_run_live(scheduler, seed, count))
    finally:
        scheduler.child.end()


def verdict(name: str, outcome: dict[str, Any], fields: Sequence[str]) -> bool:
    """Print what became of one part; return whether its memory stayed within the limit."""
    grown = max(outcome[field] for field in fields)
    print(f"{name}: {json.dumps(outcome)}")
    if grown > GROWTH_LIMIT_BYTES:
        print(f"{name}: memory grew by {grown} bytes, more than {GROWTH_LIMIT_BYTES}")
    return bool(grown <= GROWTH_LIMIT_BYTES)


def main(arguments: list[str] | None = None) -> int:
    """Run both parts; return 0 if nothing crashed, raised or grew."""
    parser = argparse.ArgumentParser(prog="python -m bench.mutate", description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000, help="inputs of the decoders")
    parser.add_argument("--live", type=int, default=20_000, help="messages to a live scheduler")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="first block, to replay a failure")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for the decoders")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    blocks = max(1, args.count // BLOCK)
    if args.inside:
        return run_decoders(args.seed, args.first, blocks)
    is_good = True
    try:
        if args.count:
            outcome = supervise_decoders(args.seed, args.first, blocks, args.timeout)
            name = f"decoders, {blocks * BLOCK} inputs"
            is_good &= verdict(name, outcome, ("growth_bytes", "peak_growth_bytes"))
        if args.live:
            outcome = run_live(args.seed, args.live)
            is_good &= verdict("live scheduler", outcome, ("growth_bytes",))
    except BenchError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
