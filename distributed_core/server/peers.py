"""The life of a peer's stream: a client or a worker, from registration to the end.

Owns what happens to each message of a stream and to its connection's end. A message that does not
fit is counted, logged and told to the engine (R1), and the stream goes on. Sessions are tied to
their connection, not to a name: what an old connection still says or does cannot touch its
successor. Called by the registration handlers, then by the connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import msgpack

from cython_ext.entities import Client, Worker
from cython_ext.events import (
    Event,
    KeyReportAsked,
    KeysCancelled,
    KeysReleased,
    KeysWanted,
    MessageRejected,
    TaskErred,
    WorkerStatusChanged,
)
from cython_ext.inbound import ClientStreamDecoder, MsgpackError, WorkerStreamDecoder
from cython_ext.msgpack import split_map
from distributed_core.comm.connection import Connection, Receiver
from distributed_core.comm.errors import RpcError
from distributed_core.materializer.parts import Packed
from distributed_core.protocol.codec import DecodeError, decode
from distributed_core.protocol.ops import ROWS, Channel, Reason, Rejection, check_message, is_key
from distributed_core.server.data_ops import placed_data

if TYPE_CHECKING:
    from distributed_core.server.app import SchedulerServer

__all__ = ["ClientPeer", "WorkerPeer", "worker_decoder"]

logger = logging.getLogger(__name__)

# Keys that are released in one turn of the loop, about a millisecond.
_SLICE_KEYS = 1000


def _keys_named(message: Any) -> list[Any]:
    """The keys that a message which does not fit may be about."""
    if not isinstance(message, dict):
        return []
    found = [message["key"]] if "key" in message else []
    keys = message.get("keys")
    if isinstance(keys, (list, tuple, set)):
        found.extend(keys)
    return [key for key in found if is_key(key)]


def _open_element(
    channel: Channel, element: bytes | memoryview, frames: Sequence[Any]
) -> tuple[Any, Any]:
    """A stream message, and its row or the reason why it is rejected."""
    try:
        message = decode([element, *frames[1:]])
    except DecodeError as exc:
        return None, Rejection("", Reason.MALFORMED, str(exc))
    return message, check_message(channel, message)


def _cut_long_lists(
    element: bytes | memoryview,
) -> tuple[bytes | memoryview, dict[str, Packed]]:
    """Cut the fields with an item per key out of a large ``update-graph``, unopened.

    A million keys would hold the loop for a second; only the materializer reads them. Any
    other message comes back as it is.
    """
    if not isinstance(element, memoryview):
        return element, {}
    spans = split_map(element)
    if "op" not in spans or element[slice(*spans["op"])] != _UPDATE_GRAPH:
        return element, {}
    parts: list[bytes | memoryview] = [msgpack.Packer().pack_map_header(len(spans))]
    cut: dict[str, Packed] = {}
    for name, span in spans.items():
        value = element[slice(*span)]
        if name in _LONG_FIELDS and value != _NIL:
            cut[name] = Packed(value)
            value = _EMPTY[name]
        parts += (msgpack.packb(name), value)
    return b"".join(parts), cut


_LONG_FIELDS = ("keys", "internal_priority")
_NIL = b"\xc0"
_EMPTY = {"keys": memoryview(b"\x90"), "internal_priority": memoryview(_NIL)}
_UPDATE_GRAPH = msgpack.packb("update-graph")


class WorkerPeer(Receiver):
    """The stream of one worker."""

    __slots__ = ("_connection", "_server", "closing_expected", "worker")

    def __init__(self, server: SchedulerServer, connection: Connection, worker: Worker) -> None:
        self._server = server
        self._connection = connection
        self.worker = worker
        self.closing_expected = False

    @property
    def connection(self) -> Connection:
        """Its connection."""
        return self._connection

    def frames_received(self, frames: list[bytes]) -> None:
        server = self._server
        try:
            server.worker_decoder.decode(frames, self.worker, time.time())
        except MsgpackError as exc:
            server.reject(self._connection, "worker", Rejection("", Reason.MALFORMED, str(exc)))

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.worker_lost(
            self.worker, self.closing_expected, f"connection lost: {exc}" if exc else "left"
        )

    def end(self, reason: str, expected: bool) -> None:
        """Cut the connection; the engine is told at once."""
        self._server.worker_lost(self.worker, expected or self.closing_expected, reason)
        self._connection.close()


def worker_decoder(
    server: SchedulerServer, handle: Callable[[Event], object]
) -> WorkerStreamDecoder:
    """The decoder of all workers' streams; rare messages go to the methods below."""
    handlers: dict[str, Callable[[Worker, dict[str, Any], float], None]] = {}

    def status_change(worker: Worker, message: dict[str, Any], now: float) -> None:
        status = message["status"]
        if status in ("closing", "closed", "failed", "stopping", "stopped"):
            # It says goodbye: what follows is no crash, and nobody is to blame.
            worker.info.peer.closing_expected = True
            status = "closing"
        server.pump.handle(
            WorkerStatusChanged(now, message["stimulus_id"], worker=worker, status=status)
        )

    def task_erred(worker: Worker, message: dict[str, Any], now: float) -> None:
        server.pump.handle(
            TaskErred(
                now,
                message["stimulus_id"],
                worker=worker,
                key=message["key"],
                run_id=message["run_id"],
                exception=message["exception"],
                traceback=message["traceback"],
                exception_text=message["exception_text"],
                traceback_text=message["traceback_text"],
            )
        )
        server.task_stream.erred(worker, message)

    def log_event(worker: Worker, message: dict[str, Any], now: float) -> None:
        server.topics.log(message["topic"], message["msg"])

    def keep_alive(worker: Worker, message: dict[str, Any], now: float) -> None:
        worker.info.last_seen = now

    def close_stream(worker: Worker, message: dict[str, Any], now: float) -> None:
        worker.info.peer.end("closed its stream", expected=True)

    handlers["worker-status-change"] = status_change
    handlers["task-erred"] = task_erred
    handlers["log-event"] = log_event
    handlers["keep-alive"] = keep_alive
    handlers["close-stream"] = close_stream

    def cold(
        element: bytes | memoryview, frames: Sequence[Any], worker: Worker, now: float
    ) -> None:
        message, found = _open_element(Channel.WORKER_STREAM, element, frames)
        if isinstance(found, Rejection):
            rejected(
                worker, found.op, _keys_named(message), found.text, now, "", reason=found.reason
            )
            return
        server.counters.received("worker", found.name)
        found.complete(message)
        handlers[found.name](worker, message, now)

    def rejected(
        worker: Worker,
        op: str,
        keys: list[Any],
        text: str,
        now: float,
        stimulus_id: str,
        reason: Reason = Reason.WRONG_TYPE,
    ) -> None:
        peer = worker.info.peer
        server.reject(peer.connection, "worker", Rejection(op, reason, text))
        server.pump.handle(
            MessageRejected(
                now,
                stimulus_id or server.pump.stimulus("rejected"),
                worker=worker,
                client_id=None,
                keys=keys,
                reason=f"a message of worker {worker.address} was rejected: {text}",
            )
        )

    missing = set(ROWS[Channel.WORKER_STREAM]) - set(handlers) - set(server.HOT_WORKER_OPS)
    assert not missing, missing
    return WorkerStreamDecoder(handle, cold, rejected)


class ClientPeer(Receiver):
    """The stream of one client; messages behind an unopened graph wait for it."""

    __slots__ = (
        "_connection",
        "_decoder",
        "_handlers",
        "_has_ended",
        "_queue",
        "_server",
        "_task",
        "client",
        "client_id",
        "outbox",
    )

    def __init__(self, server: SchedulerServer, connection: Connection, client_id: str) -> None:
        self._server = server
        self._connection = connection
        self.client_id = client_id
        self.client: Client
        self._has_ended = False
        self.outbox = server.pump.outbox(connection)
        self._decoder = ClientStreamDecoder(self._event, self._cold, self._rejected)
        self._queue: deque[Callable[[], None]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._handlers: dict[str, Callable[[dict[str, Any]], None]] = {
            "update-graph": self._update_graph,
            "client-releases-keys": self._releases_keys,
            "subscribe-topic": self._subscribe_topic,
            "unsubscribe-topic": self._unsubscribe_topic,
            "close-client": self._close_client,
            "close-stream": self._close_stream,
            "client-desires-keys": self._desires_keys,
            "cancel-keys": self._cancel_keys,
            "report-key": self._report_key,
            "update-data": self._update_data,
            "log-event": self._log_event,
        }

    @property
    def connection(self) -> Connection:
        """Its connection."""
        return self._connection

    # From the connection.

    def frames_received(self, frames: list[bytes]) -> None:
        if self._has_ended:
            return
        try:
            self._decoder.decode(
                frames,
                self.client_id,
                time.time(),
                self._server.pump.stimulus("client-releases-keys"),
            )
        except MsgpackError as exc:
            self._server.reject(
                self._connection, "client", Rejection("", Reason.MALFORMED, str(exc))
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("connection lost" if exc else "left")

    def _end(self, why: str) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        self._queue.clear()
        if self._task is not None:
            self._task.cancel()
        self._server.client_gone(self, why)

    def supersede(self) -> None:
        """The same client id registers anew: end this session before the next begins."""
        self._end("superseded")
        self._connection.abort(ConnectionError("superseded by a new connection of this client"))

    # From the decoder.

    def _event(self, event: Event) -> None:
        if self._task is not None:
            self._queue.append(lambda: self._event(event))
        elif isinstance(event, KeysReleased) and len(event.keys) > _SLICE_KEYS:
            self._begin(self._release_in_slices(event))
        else:
            self._server.pump.handle(event)

    async def _release_in_slices(self, event: KeysReleased) -> None:
        """A long list in turns of its own, so that others get theirs in between."""
        keys = event.keys
        for start in range(0, len(keys), _SLICE_KEYS):
            self._server.pump.tell(
                KeysReleased,
                "client-releases-keys",
                event.stimulus_id,
                client_id=event.client_id,
                keys=keys[start : start + _SLICE_KEYS],
            )
            await asyncio.sleep(0)

    def _begin(self, job: Coroutine[Any, Any, None]) -> None:
        """Run ``job``; what this client says meanwhile waits for its end."""
        self._task = asyncio.ensure_future(job)
        self._task.add_done_callback(self._job_done)
        self._connection.hold()

    def _cold(
        self, element: bytes | memoryview, frames: Sequence[Any], client_id: str, now: float
    ) -> None:
        element, cut = _cut_long_lists(element)
        message, found = _open_element(Channel.CLIENT_STREAM, element, frames)
        if isinstance(found, Rejection):
            self._rejected(
                client_id,
                found.op,
                _keys_named(message),
                found.text,
                now,
                "",
                reason=found.reason,
            )
            return
        self._server.counters.received("client", found.name)
        message = found.complete(message)
        message.update(cut)
        if found.name == "heartbeat-client":
            # A sign of life does not wait behind a graph.
            self._heartbeat(now)
            return
        handler = self._handlers[found.name]
        if self._task is None:
            handler(message)
        else:
            self._queue.append(lambda: handler(message))

    def _rejected(
        self,
        client_id: str,
        op: str,
        keys: list[Any],
        text: str,
        now: float,
        stimulus_id: str,
        reason: Reason = Reason.WRONG_TYPE,
    ) -> None:
        self._server.reject(self._connection, "client", Rejection(op, reason, text))
        self._server.pump.handle(
            MessageRejected(
                now,
                stimulus_id or self._server.pump.stimulus("rejected"),
                worker=None,
                client_id=self.client_id,
                keys=keys,
                reason=f"the scheduler rejected a message of this client: {text}",
            )
        )

    # Operations.

    def _update_graph(self, message: dict[str, Any]) -> None:
        self._begin(self._server.submissions.run(self.client_id, message))

    def _job_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        self._task = None
        failure = task.exception()
        if failure is not None:
            self._server.programming_error("client stream", failure)
        while self._queue and self._task is None:
            self._queue.popleft()()
        if self._task is None and self._connection.is_held:
            self._connection.release()

    def _releases_keys(self, message: dict[str, Any]) -> None:
        self._server.pump.tell(
            KeysReleased,
            "client-releases-keys",
            message["stimulus_id"],
            client_id=message["client"] or self.client_id,
            keys=list(message["keys"]),
        )

    def _heartbeat(self, now: float) -> None:
        self.client.info["last_seen"] = now
        self._server.pump.send(
            self.outbox,
            {
                "op": "adjust-heartbeat-interval",
                "interval": self._server.client_heartbeat_interval(),
            },
        )

    def _subscribe_topic(self, message: dict[str, Any]) -> None:
        self._server.topics.subscribe(self.client_id, message["topic"])

    def _unsubscribe_topic(self, message: dict[str, Any]) -> None:
        self._server.topics.unsubscribe(self.client_id, message["topic"])

    def _close_client(self, message: dict[str, Any]) -> None:
        self._end("closed")

    def _close_stream(self, message: dict[str, Any]) -> None:
        self._end("closed")
        self._connection.close()

    def _desires_keys(self, message: dict[str, Any]) -> None:
        self._server.pump.tell(
            KeysWanted,
            "client-desires-keys",
            client_id=message["client"] or self.client_id,
            keys=list(message["keys"]),
        )

    def _cancel_keys(self, message: dict[str, Any]) -> None:
        self._server.pump.tell(
            KeysCancelled,
            "cancel-keys",
            client_id=message["client"] or self.client_id,
            keys=list(message["keys"]),
            force=message["force"],
            reason=message["reason"],
            message=message["msg"],
        )

    def _report_key(self, message: dict[str, Any]) -> None:
        self._server.pump.tell(
            KeyReportAsked,
            "report-key",
            client_id=message["client"] or self.client_id,
            key=message["key"],
        )

    def _update_data(self, message: dict[str, Any]) -> None:
        try:
            event = placed_data(self._server.pump, message, message["client"] or self.client_id)
        except RpcError as exc:
            self._server.reject(
                self._connection,
                "client",
                Rejection("update-data", Reason.MISSING_FIELD, str(exc)),
            )
            return
        self._server.pump.handle(event)

    def _log_event(self, message: dict[str, Any]) -> None:
        self._server.topics.log(message["topic"], message["msg"])
