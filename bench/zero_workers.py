"""A load generator: one process that poses as many Dask workers and computes nothing.

Owns the worker side of the wire for the bench: registration, the stream, heartbeats and the small
RPC server that every posed worker needs for `gather`. Every `compute-task` is answered at once with
`task-finished` and every fetch of a dependency is merely claimed, so what is left to measure is the
scheduler. It must never become the bottleneck: messages are cut by length, only their first frame
is decoded (by the C library), replies are prebuilt bytes with key, run id and times patched in, and
all replies to one read leave in one message.

`bench.run` starts it as ``python -m bench.zero_workers ADDRESS --control``; it can also be started
by hand against any scheduler.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import gc
import json
import os
import pickle
import resource
import signal
import struct
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any, cast

import msgpack
import uvloop

from bench.processes import process_cpu_seconds

__all__ = ["Generator", "Options", "main"]

# What a message of this generator's peers may announce before we call it broken.
MAX_MESSAGE_BYTES = 1 << 32
MAX_FRAMES = 10_000_000
# Parallel connection attempts while the posed workers join; below common listen backlogs.
JOIN_CONCURRENCY = 32

_U64 = struct.Struct("<Q")
_PRELUDE = struct.Struct("<QQ")
_F64 = struct.Struct(">d")

_packer = msgpack.Packer(use_bin_type=True, autoreset=True)
pack: Callable[[Any], bytes] = _packer.pack


def frame_message(*frames: bytes) -> bytes:
    """Return one wire message made of `frames`, all of them in the first block."""
    count = len(frames)
    lengths = struct.pack(f"<{count}Q", *map(len, frames))
    first_block = 8 * (1 + count) + sum(map(len, frames))
    return b"".join((_PRELUDE.pack(first_block, count), lengths, *frames))


def array_header(count: int) -> bytes:
    """Return the msgpack header of an array with `count` elements."""
    if count < 16:
        return bytes((0x90 | count,))
    if count < 1 << 16:
        return b"\xdc" + struct.pack(">H", count)
    return b"\xdd" + struct.pack(">I", count)


def unpack(body: Any) -> Any:
    """Decode one msgpack body the way a Dask peer does: arrays are tuples, any map key."""
    return msgpack.unpackb(body, use_list=False, strict_map_key=False, raw=False)


HANDSHAKE = frame_message(
    pack(
        {
            "compression": None,
            "python": list(sys.version_info[:3]),
            "pickle-protocol": 5,
        }
    )
)
# Every result is the number one: a stock client unpickles it like any other value.
_VALUE_HEADER = pack(
    {
        "serializer": "pickle",
        "writeable": [],
        "compression": [None],
        "num-sub-frames": 1,
        "split-num-sub-frames": [1],
        "split-offsets": [0],
    }
)
_VALUE = pickle.dumps(1, protocol=4)
_VALUE_TYPE = pickle.dumps(int, protocol=4)


class Options:
    """What the posed workers look like and how they answer.

    `duration_seconds` is the run time that every answer claims, `delay_seconds` the time that a
    task really occupies one of the worker's threads (zero: answered within the same read).
    `claims_fetches` says whether dependencies that a worker did not hold are reported with
    `add-keys`, as a real worker does after it fetched them.
    """

    def __init__(
        self,
        *,
        workers: int = 24,
        nthreads: int = 1,
        nbytes: int = 28,
        duration_seconds: float = 1e-4,
        delay_seconds: float = 0.0,
        claims_fetches: bool = True,
        memory_limit_bytes: int = 4 << 30,
    ) -> None:
        self.workers = workers
        self.nthreads = nthreads
        self.nbytes = nbytes
        self.duration_seconds = duration_seconds
        self.delay_seconds = delay_seconds
        self.claims_fetches = claims_fetches
        self.memory_limit_bytes = memory_limit_bytes


class Templates:
    """Prebuilt pieces of the replies; only key, run id, times and stimulus are filled in."""

    def __init__(self, options: Options) -> None:
        self.duration = options.duration_seconds
        # A map of eleven fields; the order is ours, the set is the protocol's.
        self.finished_head = (
            b"\x8b" + pack("op") + pack("task-finished") + pack("status") + pack("OK") + pack("key")
        )
        self.finished_run_id = pack("run_id")
        self._tail_start = (
            pack("nbytes")
            + pack(options.nbytes)
            + pack("type")
            + pack(_VALUE_TYPE)
            + pack("typename")
            + pack("int")
            + pack("metadata")
            + pack({})
            + pack("thread")
            + pack(1)
            + pack("startstops")
            + b"\x91\x83"
            + pack("action")
            + pack("compute")
            + pack("start")
            + b"\xcb"
        )
        self._tail_stop = pack("stop") + b"\xcb"
        self._stimulus = pack("stimulus_id")
        self.release_head = b"\x83" + pack("op") + pack("release-worker-data") + pack("key")
        self.release_stimulus = pack("stimulus_id")

    def finished_tail(self, now: float) -> bytes:
        """Return everything after the run id, for tasks that ended at `now`."""
        return b"".join(
            (
                self._tail_start,
                _F64.pack(now - self.duration),
                self._tail_stop,
                _F64.pack(now),
                self._stimulus,
                pack(f"task-finished-{now}"),
            )
        )


class Framed(asyncio.Protocol):
    """Cuts the byte stream of one connection into messages; only first frames are kept."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._pending = b""
        self._pending_parts: list[bytes] = []
        self._pending_size = 0
        self._needed = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not registered as subclasses of asyncio.Transport.
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(HANDSHAKE)

    def data_received(self, data: bytes) -> None:
        if self._pending:
            # A large message arrives in many reads: join once, when all of it is here.
            self._pending_parts.append(data)
            self._pending_size += len(data)
            if self._pending_size < self._needed:
                return
            data = b"".join(self._pending_parts)
            self._pending = b""
        bodies = []
        offset = 0
        size = len(data)
        view = memoryview(data)
        needed = 0
        while size - offset >= 16:
            _, count = _PRELUDE.unpack_from(data, offset)
            if count > MAX_FRAMES:
                raise ValueError(f"message announces {count} frames")
            prelude_end = offset + 16 + 8 * count
            if prelude_end > size:
                needed = 16 + 8 * count
                break
            if count == 1:
                (first,) = _U64.unpack_from(data, offset + 16)
                end = prelude_end + first
            else:
                lengths = struct.unpack_from(f"<{count}Q", data, offset + 16)
                first = lengths[0] if count else 0
                end = prelude_end + sum(lengths)
            if end - offset > MAX_MESSAGE_BYTES:
                raise ValueError(f"message announces {end - offset} bytes")
            if end > size:
                needed = end - offset
                break
            if first:
                bodies.append(unpack(view[prelude_end : prelude_end + first]))
            offset = end
        if offset < size:
            self._pending = data[offset:]
            self._pending_parts = [self._pending]
            self._pending_size = size - offset
            self._needed = needed or 16
        if bodies:
            self.messages_received(bodies)

    def messages_received(self, bodies: list[Any]) -> None:
        """Handle the messages of one read."""
        raise NotImplementedError


class Request(Framed):
    """A connection on which we ask and the scheduler answers, one request at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._greeted = False
        self._waiting: collections.deque[asyncio.Future[Any]] = collections.deque()
        self.is_lost = False

    def ask(self, message: dict[str, Any]) -> asyncio.Future[Any]:
        """Send `message`; the returned future yields the reply."""
        assert self.transport is not None
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self.transport.write(frame_message(pack(message)))
        return future

    def messages_received(self, bodies: list[Any]) -> None:
        for body in bodies:
            if not self._greeted:
                self._greeted = True
            elif self._waiting:
                future = self._waiting.popleft()
                if not future.done():
                    future.set_result(body)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        for future in self._waiting:
            if not future.done():
                future.set_exception(ConnectionError(f"scheduler closed the connection: {exc}"))


class Service(Framed):
    """The server side of one posed worker: what the scheduler, clients and peers may ask."""

    def __init__(self, worker: ZeroWorker) -> None:
        super().__init__()
        self._worker = worker
        self._greeted = False

    def messages_received(self, bodies: list[Any]) -> None:
        for body in bodies:
            if not self._greeted:
                self._greeted = True
            elif isinstance(body, dict):
                self._answer(body)
            # A bare "OK" acknowledges a get_data reply and needs no answer.

    def _answer(self, message: dict[str, Any]) -> None:
        assert self.transport is not None
        op = message.get("op")
        worker = self._worker
        reply: Any = None
        if op == "get_data":
            keys = [key for key in _plain_list(message["keys"]) if key in worker.held]
            frames: list[bytes] = []
            data: dict[Any, Any] = {}
            for key in keys:
                data[key] = {"__Serialized__": len(frames) + 1}
                frames.append(_VALUE_HEADER)
                frames.append(_VALUE)
            self.transport.write(frame_message(pack({"status": "OK", "data": data}), *frames))
            return
        if op == "update_data":
            worker.held.update(message["data"])
            reply = {
                "status": "OK",
                "nbytes": dict.fromkeys(message["data"], worker.generator.options.nbytes),
            }
        elif op == "gather":
            worker.held.update(message["who_has"])
            reply = {"status": "OK"}
        elif op == "free_keys":
            worker.held.difference_update(_plain_list(message["keys"]))
        elif op == "ping":
            reply = b"pong"
        elif op == "identity":
            reply = {
                "type": "Worker",
                "id": worker.name,
                "scheduler": worker.generator.address,
                "nthreads": worker.generator.options.nthreads,
                "memory_limit": worker.generator.options.memory_limit_bytes,
            }
        elif op in ("plugin-add", "plugin-remove"):
            reply = {"status": "OK"}
        if message.get("reply", True):
            self.transport.write(frame_message(pack(reply)))
        if op == "close" or message.get("close"):
            self.transport.close()


class ZeroWorker(Framed):
    """One posed worker: its stream to the scheduler and the set of keys it claims to hold."""

    def __init__(self, generator: Generator, index: int) -> None:
        super().__init__()
        self.generator = generator
        self.name = f"zero-{index}"
        self.address = ""
        self.held: set[Any] = set()
        self.joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_lost = False
        self.heartbeat_seconds = 1.0
        self._greeted = False
        # Only used with an artificial delay: started tasks, and those that wait for a thread.
        self._executing: dict[Any, int] = {}
        self._ready: collections.deque[tuple[Any, int]] = collections.deque()

    def register(self) -> None:
        """Send the registration; `joined` is done once the scheduler accepted it."""
        assert self.transport is not None
        generator = self.generator
        options = generator.options
        self.transport.write(
            frame_message(
                pack(
                    {
                        "op": "register-worker",
                        "reply": False,
                        "address": self.address,
                        "status": "init",
                        "server_id": f"Worker-{uuid.uuid4()}",
                        "nthreads": options.nthreads,
                        "name": self.name,
                        "now": time.time(),
                        "resources": {},
                        "memory_limit": options.memory_limit_bytes,
                        "metrics": metrics(),
                        "services": {},
                        "local_directory": "",
                        "versions": generator.versions,
                        "nanny": None,
                        "extra": {},
                        "pid": os.getpid(),
                        "stimulus_id": f"worker-connect-{time.time()}",
                    }
                )
            )
        )

    def messages_received(self, bodies: list[Any]) -> None:
        if not self.joined.done():
            bodies = self._join(bodies)
        parts: list[bytes] = []
        for body in bodies:
            self._handle_batch(body if isinstance(body, tuple) else (body,), parts)
        if parts:
            self._send(parts)

    def _join(self, bodies: list[Any]) -> list[Any]:
        """Consume handshake and registration reply; return what follows them."""
        if not self._greeted:
            self._greeted = True
            self.register()
            bodies = bodies[1:]
        if not bodies:
            return bodies
        reply = bodies[0]
        if reply.get("status") != "OK":
            self.joined.set_exception(ConnectionError(f"registration refused: {reply!r}"))
            return []
        self.heartbeat_seconds = reply["heartbeat-interval"]
        self._send([status_change("running")])
        self.joined.set_result(None)
        return bodies[1:]

    def _send(self, parts: list[bytes]) -> None:
        """Send `parts`, one packed operation each, as one message."""
        assert self.transport is not None
        body_size = sum(map(len, parts))
        header = array_header(len(parts))
        length = len(header) + body_size
        parts.insert(0, struct.pack("<QQQ", 16 + length, 1, length) + header)
        self.transport.write(b"".join(parts))
        self.generator.messages_sent += 1

    def _handle_batch(self, batch: tuple[dict[str, Any], ...], parts: list[bytes]) -> None:
        generator = self.generator
        generator.batches += 1
        templates = generator.templates
        held = self.held
        delayed = generator.options.delay_seconds > 0
        tail = b""
        finished = 0
        for message in batch:
            op = message["op"]
            if op == "compute-task":
                key = message["key"]
                who_has = message["who_has"]
                if who_has:
                    self._claim(who_has, parts)
                if delayed:
                    self._enqueue(key, message["run_id"])
                    continue
                held.add(key)
                if not tail:
                    tail = templates.finished_tail(time.time())
                parts.append(
                    b"".join(
                        (
                            templates.finished_head,
                            pack(key),
                            templates.finished_run_id,
                            pack(message["run_id"]),
                            tail,
                        )
                    )
                )
                finished += 1
            elif op in ("free-keys", "remove-replicas"):
                stimulus = templates.release_stimulus + pack(message["stimulus_id"])
                for key in _plain_list(message["keys"]):
                    if key in held:
                        held.discard(key)
                        parts.append(templates.release_head + pack(key) + stimulus)
                    elif delayed and op == "free-keys":
                        self._drop(key)
            elif op == "steal-request":
                parts.append(self._steal_response(message))
            elif op == "acquire-replicas":
                self._claim(message["who_has"], parts)
            elif op == "worker-status-change":
                parts.append(status_change(message["status"]))
            elif op in ("close", "close-stream"):
                parts.append(pack({"op": "close-stream"}))
                assert self.transport is not None
                generator.loop.call_soon(self.transport.close)
            # refresh-who-has, remove-worker and the like change nothing for who fetches nothing.
        generator.finished += finished

    def _claim(self, who_has: dict[Any, tuple[str, ...]], parts: list[bytes]) -> None:
        """Report dependencies not held yet as fetched, one message per peer they come from."""
        held = self.held
        if not self.generator.options.claims_fetches:
            return
        by_peer: dict[str, list[Any]] = {}
        for key, holders in who_has.items():
            if key not in held:
                by_peer.setdefault(holders[0], []).append(key)
        if not by_peer:
            return
        stimulus = f"gather-dep-success-{time.time()}"
        for keys in by_peer.values():
            held.update(keys)
            parts.append(pack({"op": "add-keys", "keys": keys, "stimulus_id": stimulus}))
        self.generator.fetches += len(by_peer)

    def _steal_response(self, message: dict[str, Any]) -> bytes:
        key = message["key"]
        state = None
        if key in self.held:
            state = "memory"
        elif key in self._executing:
            state = "executing"
        elif any(key == ready for ready, _ in self._ready):
            state = "ready"
            self._drop(key)
        return pack(
            {
                "op": "steal-response",
                "key": key,
                "state": state,
                "stimulus_id": message["stimulus_id"],
            }
        )

    def _enqueue(self, key: Any, run_id: int) -> None:
        if key in self._executing:
            self._executing[key] = run_id
            return
        self._ready.append((key, run_id))
        self._start_ready()

    def _start_ready(self) -> None:
        generator = self.generator
        while self._ready and len(self._executing) < generator.options.nthreads:
            key, run_id = self._ready.popleft()
            self._executing[key] = run_id
            generator.loop.call_later(generator.options.delay_seconds, self._finish, key)

    def _finish(self, key: Any) -> None:
        run_id = self._executing.pop(key)
        self._start_ready()
        if self.is_lost:
            return
        if run_id >= 0:
            self.held.add(key)
            templates = self.generator.templates
            tail = templates.finished_tail(time.time())
            self._send(
                [
                    templates.finished_head
                    + pack(key)
                    + templates.finished_run_id
                    + pack(run_id)
                    + tail
                ]
            )
            self.generator.finished += 1

    def _drop(self, key: Any) -> None:
        """Forget a task that has not finished; a started one ends without a report."""
        if key in self._executing:
            self._executing[key] = -1
            return
        self._ready = collections.deque(pair for pair in self._ready if pair[0] != key)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        if not self.joined.done():
            self.joined.set_exception(ConnectionError(f"lost while joining: {exc}"))
        self.generator.worker_lost()


class Generator:
    """All posed workers of this process and their counters."""

    def __init__(self, address: str, options: Options) -> None:
        self.address = address
        self.options = options
        self.templates = Templates(options)
        self.versions: dict[str, Any] = {}
        self.loop = asyncio.get_running_loop()
        self.workers: list[ZeroWorker] = []
        self.all_lost = asyncio.Event()
        self.finished = 0
        self.fetches = 0
        self.batches = 0
        self.messages_sent = 0
        self.heartbeats = 0
        self._servers: list[asyncio.AbstractServer] = []
        self._heartbeat_tasks: list[asyncio.Task[None]] = []
        self._lost = 0
        self._wall_start = time.perf_counter()

    async def start(self) -> None:
        """Open a listening socket per worker, register all; ConnectionError if one is refused."""
        # The scheduler compares versions; an empty map would warn every client.
        from distributed.versions import get_versions

        self.versions = get_versions()
        gate = asyncio.Semaphore(JOIN_CONCURRENCY)
        self.workers = [ZeroWorker(self, index) for index in range(self.options.workers)]

        async def join(worker: ZeroWorker) -> None:
            async with gate:
                server = await self.loop.create_server(
                    lambda: Service(worker), "127.0.0.1", 0, backlog=16
                )
                self._servers.append(server)
                port = server.sockets[0].getsockname()[1]
                worker.address = f"tcp://127.0.0.1:{port}"
                host, scheduler_port = split_address(self.address)
                await self.loop.create_connection(lambda: worker, host, scheduler_port)
                await worker.joined

        await asyncio.gather(*map(join, self.workers))
        self._heartbeat_tasks = [
            self.loop.create_task(self._heartbeats(worker)) for worker in self.workers
        ]

    async def _heartbeats(self, worker: ZeroWorker) -> None:
        """Send heartbeats at the interval the scheduler names, on a connection of their own."""
        host, port = split_address(self.address)
        link: Request | None = None
        # Spread the first ones, as workers that started one after another would be.
        await asyncio.sleep(worker.heartbeat_seconds * (1 + hash(worker.address) % 97 / 97))
        while not worker.is_lost:
            try:
                if link is None or link.is_lost:
                    _, link = await self.loop.create_connection(Request, host, port)
                reply = await link.ask(
                    {
                        "op": "heartbeat_worker",
                        "reply": True,
                        "address": worker.address,
                        "now": time.time(),
                        "metrics": metrics(),
                        "executing": {},
                        "extensions": {"spans": {}},
                    }
                )
            except OSError:
                # The scheduler is going away; the stream tells so as well.
                return
            self.heartbeats += 1
            if not isinstance(reply, dict) or reply.get("status") != "OK":
                raise RuntimeError(f"heartbeat of {worker.address} was refused: {reply!r}")
            worker.heartbeat_seconds = reply["heartbeat-interval"]
            await asyncio.sleep(worker.heartbeat_seconds)

    def worker_lost(self) -> None:
        """Count a closed stream; `all_lost` is set with the last one."""
        self._lost += 1
        if self._lost >= len(self.workers):
            self.all_lost.set()

    async def stop(self) -> None:
        """Leave the scheduler and close every socket."""
        for task in self._heartbeat_tasks:
            task.cancel()
        await asyncio.gather(*self._heartbeat_tasks, return_exceptions=True)
        for worker in self.workers:
            if worker.transport is not None and not worker.is_lost:
                worker.transport.close()
        for server in self._servers:
            server.close()

    def report(self) -> dict[str, Any]:
        """Return the counters and this process's CPU seconds and share since its start."""
        wall = time.perf_counter() - self._wall_start
        cpu = process_cpu_seconds(os.getpid())
        failures = [
            repr(task.exception())
            for task in self._heartbeat_tasks
            if task.done() and not task.cancelled() and task.exception() is not None
        ]
        return {
            "workers": len(self.workers),
            "lost": self._lost,
            "finished": self.finished,
            "fetches": self.fetches,
            "batches": self.batches,
            "messages_sent": self.messages_sent,
            "heartbeats": self.heartbeats,
            "failures": failures[:3],
            "cpu_seconds": cpu,
            "cpu_share": cpu / wall if wall else 0.0,
        }


def _plain_list(keys: Any) -> Any:
    """Return the elements of a key list, which peers may also send as a set placeholder."""
    return keys["as-list"] if isinstance(keys, dict) else keys


def status_change(status: str) -> bytes:
    """Return a packed `worker-status-change`."""
    return pack(
        {
            "op": "worker-status-change",
            "status": status,
            "stimulus_id": f"worker-status-change-{time.time()}",
        }
    )


def metrics() -> dict[str, Any]:
    """Return worker metrics of ordinary shape, so that their handling costs what it costs."""
    return {
        "task_counts": {},
        "bandwidth": {"total": 100_000_000, "workers": {}, "types": {}},
        "digests_total_since_heartbeat": {"tick-duration": 0.5, "latency": 0.002},
        "managed_bytes": 0,
        "spilled_bytes": {"memory": 0, "disk": 0},
        "transfer": {
            "incoming_bytes": 0,
            "incoming_count": 0,
            "incoming_count_total": 0,
            "outgoing_bytes": 0,
            "outgoing_count": 0,
            "outgoing_count_total": 0,
        },
        "event_loop_interval": 0.02,
        "cpu": 1.0,
        "memory": 100_000_000,
        "time": time.time(),
        "host_net_io": {"read_bps": 0.0, "write_bps": 0.0},
        "host_disk_io": {"read_bps": 0.0, "write_bps": 0.0},
        "num_fds": 10,
    }


def split_address(address: str) -> tuple[str, int]:
    """Split ``tcp://host:port``; ValueError names an address of any other form."""
    scheme, separator, rest = address.partition("://")
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not separator or not colon or not port.isdigit():
        raise ValueError(f"not a tcp address: {address!r}")
    return host.strip("[]"), int(port)


def raise_file_limit() -> None:
    """Allow as many open files as the hard limit does: three sockets per posed worker."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def say(message: dict[str, Any]) -> None:
    """Print one line of JSON, at once."""
    print(json.dumps(message), flush=True)


async def _control(generator: Generator) -> None:
    """Answer `stats` lines on standard input; return when it ends."""
    reader = asyncio.StreamReader()
    await generator.loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        if line.strip() != b"stats":
            raise ValueError(f"unknown command {line!r}")
        say({"event": "stats", **generator.report()})


async def _serve(generator: Generator) -> None:
    """Join all workers and return when the scheduler has closed the last stream."""
    await generator.start()
    # Steady state makes no cycles; a collection would only stop the answers.
    gc.collect()
    gc.disable()
    say({"event": "ready", **generator.report()})
    await generator.all_lost.wait()


async def _run(address: str, options: Options, is_controlled: bool) -> int:
    raise_file_limit()
    generator = Generator(address, options)
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        generator.loop.add_signal_handler(number, stopping.set)
    waits = [
        asyncio.ensure_future(_serve(generator)),
        asyncio.ensure_future(stopping.wait()),
    ]
    if is_controlled:
        waits.append(asyncio.ensure_future(_control(generator)))
    done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in waits:
        task.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    failures = [error for task in done if (error := task.exception()) is not None]
    say(
        {"event": "error", "message": repr(failures[0])}
        if failures
        else {"event": "end", **generator.report()}
    )
    await generator.stop()
    return 1 if failures else 0


def main(arguments: list[str] | None = None) -> int:
    """Run the generator until told to stop; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.zero_workers", description=__doc__)
    parser.add_argument("address", help="the scheduler, tcp://host:port")
    parser.add_argument("--workers", type=int, default=24, help="posed workers (1 to 1000)")
    parser.add_argument("--nthreads", type=int, default=1, help="threads each worker claims")
    parser.add_argument("--nbytes", type=int, default=28, help="claimed size of each result")
    parser.add_argument(
        "--duration", type=float, default=0.1, help="claimed run time of a task, milliseconds"
    )
    parser.add_argument(
        "--delay", type=float, default=0.0, help="real run time of a task, milliseconds"
    )
    parser.add_argument(
        "--silent-fetches", action="store_true", help="never report fetched dependencies"
    )
    parser.add_argument(
        "--control", action="store_true", help="answer `stats` on stdin, end with its end"
    )
    args = parser.parse_args(arguments)
    if not 1 <= args.workers <= 1000:
        parser.error(f"--workers must be from 1 to 1000, not {args.workers}")
    split_address(args.address)
    options = Options(
        workers=args.workers,
        nthreads=args.nthreads,
        nbytes=args.nbytes,
        duration_seconds=args.duration / 1e3,
        delay_seconds=args.delay / 1e3,
        claims_fetches=not args.silent_fetches,
    )
    return int(uvloop.run(_run(args.address, options, args.control)))


if __name__ == "__main__":
    sys.exit(main())
