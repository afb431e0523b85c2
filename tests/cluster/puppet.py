"""Hand-made peers: a worker and a client that do only what the test tells them.

They speak the real protocol through `tests.cluster.wire`, so a test can force any order of
messages, repeat one, leave one out or send one that no stock peer would send.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

from distributed.versions import get_versions

from tests.cluster.wire import HANDSHAKE, Link, LinkClosed, Opaque, encode, pickled

__all__ = ["PuppetClient", "PuppetWorker", "Refused", "close_puppets", "metrics"]

_numbers = itertools.count()
VERSIONS = get_versions()


class Refused(Exception):
    """The scheduler did not accept the registration."""


def metrics(**changes: Any) -> dict[str, Any]:
    """What a worker reports about itself, as far as a scheduler may rely on it."""
    return {
        "bandwidth": {"total": 100_000_000, "workers": {}, "types": {}},
        "cpu": 0.0,
        "digests_total_since_heartbeat": {},
        "event_loop_interval": 0.02,
        "managed_bytes": 0,
        "memory": 50_000_000,
        "num_fds": 10,
        "spilled_bytes": {"memory": 0, "disk": 0},
        "task_counts": {},
        "time": time.time(),
        **changes,
    }


class _Inbox:
    """Messages of a stream: all of them, and those the test has not taken yet."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self.unread: list[dict[str, Any]] = []
        self.changed = asyncio.Condition()

    async def put(self, message: dict[str, Any]) -> None:
        async with self.changed:
            self.all.append(message)
            self.unread.append(message)
            self.changed.notify_all()

    async def take(self, matches: Callable[[dict[str, Any]], bool], limit: float) -> Any:
        async with asyncio.timeout(limit), self.changed:
            while True:
                for index, message in enumerate(self.unread):
                    if matches(message):
                        return self.unread.pop(index)
                await self.changed.wait()


def _has_key(message: dict[str, Any], key: Any) -> bool:
    return key is None or message.get("key") == key or key in message.get("keys", ())


class _Peer:
    """The stream side that both puppets share."""

    label: str
    link: Link

    def __init__(self) -> None:
        self.inbox = _Inbox()
        self.lost = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def _listen_to(self, link: Link) -> None:
        self.link = link
        self.lost = asyncio.Event()
        self._tasks.append(asyncio.create_task(self._read(link, self.lost)))

    async def _read(self, link: Link, lost: asyncio.Event) -> None:
        try:
            while True:
                messages = await link.receive()
                for message in messages if isinstance(messages, tuple | list) else [messages]:
                    if isinstance(message, dict):
                        await self.inbox.put(message)
                        await self._on_message(message)
        except (LinkClosed, ConnectionError):
            lost.set()

    async def _on_message(self, message: dict[str, Any]) -> None:
        """Called for each message of the stream, after it is in the inbox."""

    async def send(self, op: str, **fields: Any) -> None:
        """One message on the stream."""
        await self.link.send([{"op": op, **fields}])

    async def expect(self, op: str, key: Any = None, limit: float = 10.0) -> dict[str, Any]:
        """The oldest message with this op (and key) that was not taken yet; it is taken."""
        try:
            message: dict[str, Any] = await self.inbox.take(
                lambda m: m.get("op") == op and _has_key(m, key), limit
            )
        except TimeoutError:
            unread = [(m.get("op"), m.get("key", m.get("keys"))) for m in self.inbox.unread]
            raise AssertionError(
                f"{self.label} never got {op} {key or ''}; unread: {unread[:40]}"
                f"{', and the link is gone' if self.lost.is_set() else ''}"
            ) from None
        return message

    def received(self, op: str, key: Any = None) -> list[dict[str, Any]]:
        """All messages so far with this op (and key), taken or not."""
        return [m for m in self.inbox.all if m.get("op") == op and _has_key(m, key)]

    def cut(self) -> None:
        """Lose the connection to the scheduler without a word."""
        self.link.abort()

    async def _end(self) -> None:
        if hasattr(self, "link"):
            self.link.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class PuppetWorker(_Peer):
    """A worker that does nothing by itself.

    As an async context manager it listens, registers and reports itself running. Fields of the
    registration may be changed by keyword; `None` as value sends nil, `drop` names fields to
    leave out.
    """

    def __init__(self, scheduler: str, name: Any = None, nthreads: int = 1, **fields: Any) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.name = name or f"puppet-{next(_numbers)}"
        self.label = str(self.name)
        self.nthreads = nthreads
        self.fields = fields
        self.data: dict[Any, Any] = {}
        self.asked_for: list[Any] = []
        self.automatic: Callable[[dict[str, Any]], Any] | None = None
        self.server: asyncio.Server | None = None
        self.address = ""

    async def listen(self) -> Self:
        """Open the port where others ask for data."""
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**26)
        self.address = f"tcp://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    def registration(self, drop: Iterable[str] = (), **changes: Any) -> dict[str, Any]:
        message = {
            "op": "register-worker",
            "reply": False,
            "address": self.address,
            "status": "init",
            "server_id": f"Worker-{self.name}-{next(_numbers)}",
            "nthreads": self.nthreads,
            "name": self.name,
            "now": time.time(),
            "resources": {},
            "memory_limit": 2**31,
            "metrics": metrics(),
            "services": {},
            "local_directory": "/nowhere",
            "versions": VERSIONS,
            "nanny": None,
            "pid": os.getpid(),
            "extra": {},
            "stimulus_id": f"worker-connect-{time.time()}",
            **self.fields,
            **changes,
        }
        return {name: value for name, value in message.items() if name not in set(drop)}

    async def register(self, limit: float = 10.0, **changes: Any) -> dict[str, Any]:
        """Register and become a stream. Raises `Refused` with the scheduler's answer."""
        if self.server is None:
            await self.listen()
        link = await Link.open(self.scheduler)
        await link.send(self.registration(**changes))
        try:
            reply: dict[str, Any] = await link.receive(limit)
        except (LinkClosed, TimeoutError) as error:
            link.abort()
            raise Refused(repr(error)) from error
        if not isinstance(reply, dict) or reply.get("status") != "OK":
            link.abort()
            raise Refused(str(reply))
        self._listen_to(link)
        return reply

    async def start(self, **changes: Any) -> Self:
        """Register and report status `running`."""
        await self.register(**changes)
        await self.set_status("running")
        return self

    async def set_status(self, status: str) -> None:
        await self.send("worker-status-change", status=status, stimulus_id=_stimulus("status"))

    async def heartbeat(self, **changes: Any) -> Any:
        """One heartbeat on a connection of its own; returns the reply."""
        link = await Link.open(self.scheduler)
        try:
            fields = {"address": self.address, "now": time.time(), "metrics": metrics()}
            return await link.call("heartbeat_worker", **{**fields, **changes})
        finally:
            link.abort()

    def outcome(self, order: dict[str, Any], op: str, **changes: Any) -> dict[str, Any]:
        """A message that answers a compute-task order."""
        now = time.time()
        return {
            "op": op,
            "key": order["key"],
            "run_id": order["run_id"],
            "thread": 1,
            "startstops": [{"action": "compute", "start": now - 0.001, "stop": now}],
            "stimulus_id": _stimulus(op),
            **changes,
        }

    async def finish(
        self, order: dict[str, Any], value: Any = 1, nbytes: int = 28, **changes: Any
    ) -> None:
        """Report success; the value can be fetched from here from now on."""
        self.data[order["key"]] = value
        message = {
            "status": "OK",
            "nbytes": nbytes,
            "type": pickle.dumps(type(value)),
            "typename": type(value).__name__,
            "metadata": {},
            **changes,
        }
        await self.link.send([self.outcome(order, "task-finished", **message)])

    async def fail(self, order: dict[str, Any], error: Exception, **changes: Any) -> None:
        """Report that the task raised `error`."""
        message = {
            "status": "error",
            "exception": pickled(pickle.dumps(error)),
            "traceback": None,
            "exception_text": repr(error),
            "traceback_text": "",
            **changes,
        }
        await self.link.send([self.outcome(order, "task-erred", **message)])

    async def settle(self, limit: float = 10.0) -> None:
        """Return when the scheduler has dealt with all that was sent on this stream before.

        It is asked about a key that nobody knows, and answers in order that it be freed.
        """
        key = f"barrier-{next(_numbers)}"
        await self.send(
            "request-refresh-who-has", keys=[key], stimulus_id=_stimulus("request-refresh")
        )
        await self.expect("free-keys", key, limit)

    def serve(self, value: Any = 1, except_keys: Iterable[Any] = ()) -> None:
        """From now on behave like a good worker, at once; also for orders that still wait."""
        left_out = set(except_keys)

        async def answer(message: dict[str, Any]) -> None:
            op = message["op"]
            if op == "compute-task" and message["key"] not in left_out:
                await self.finish(message, value)
            elif op == "steal-request":
                await self.send(
                    "steal-response",
                    key=message["key"],
                    state="executing",
                    stimulus_id=message["stimulus_id"],
                )
            elif op == "acquire-replicas":
                keys = list(message["who_has"])
                self.data.update(dict.fromkeys(keys, value))
                await self.send("add-keys", keys=keys, stimulus_id=message["stimulus_id"])
            elif op in ("free-keys", "remove-replicas"):
                for key in message["keys"]:
                    if key in self.data:
                        del self.data[key]
                        await self.send(
                            "release-worker-data", key=key, stimulus_id=message["stimulus_id"]
                        )
            elif op == "worker-status-change":
                await self.set_status(message["status"])

        self.automatic = answer

    async def _on_message(self, message: dict[str, Any]) -> None:
        if self.automatic is not None and "op" in message:
            await self.automatic(message)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.append(task)
        try:
            await link.send(HANDSHAKE)
            await link.receive()
            while True:
                message = await link.receive()
                if message == "OK":
                    continue
                reply = self._answer(message)
                if message.get("reply", True):
                    writer.write(encode(reply))
        except (LinkClosed, ConnectionError):
            link.abort()

    def _answer(self, message: dict[str, Any]) -> Any:
        op = message["op"]
        if op == "get_data":
            self.asked_for.extend(message["keys"])
            held = {key: pickled(self.data[key]) for key in message["keys"] if key in self.data}
            return {"status": "OK", "data": held}
        if op == "update_data":
            for key, item in message["data"].items():
                self.data[key] = item.value() if isinstance(item, Opaque) else item
            return {"status": "OK", "nbytes": dict.fromkeys(message["data"], 28)}
        if op == "gather":
            self.data.update(dict.fromkeys(message["who_has"], 1))
            return {"status": "OK"}
        if op == "versions":
            return VERSIONS
        return None

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Drop all connections."""
        if self.server is not None:
            self.server.close()
        await self._end()


class PuppetClient(_Peer):
    """A client that registers and then only sends what it is told to."""

    def __init__(self, scheduler: str, name: str | None = None) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.id = name or f"Client-puppet-{next(_numbers)}"
        self.label = self.id

    async def register(self, **changes: Any) -> dict[str, Any]:
        """Register; returns the first message of the stream."""
        link = await Link.open(self.scheduler)
        fields = {"client": self.id, "versions": VERSIONS, "reply": False, **changes}
        await link.send({"op": "register-client", **fields})
        first = await link.receive(10.0)
        assert len(first) == 1, f"the first payload has to be a list of one message: {first}"
        self._listen_to(link)
        start: dict[str, Any] = first[0]
        return start

    async def settle(self, limit: float = 10.0) -> None:
        """Return when the scheduler has dealt with all that was sent on this stream before."""
        await self.send("heartbeat-client")
        await self.expect("adjust-heartbeat-interval", limit=limit)

    async def __aenter__(self) -> Self:
        start = await self.register()
        if start.get("error"):
            raise Refused(start["error"])
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._end()


async def close_puppets(*puppets: PuppetWorker) -> None:
    """Close several at once."""
    await asyncio.gather(*(puppet.close() for puppet in puppets))


def _stimulus(cause: str) -> str:
    return f"{cause}-{next(_numbers)}-{time.time()}"
