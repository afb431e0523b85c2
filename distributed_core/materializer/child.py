"""The materializer process: opens user bytes, so that the scheduler process never does.

Run as `python -m distributed_core.materializer.child --fd FD --parent PID`, started by `pool`.
Owns the child's end of the socket, its error reports and its garbage collection. Serves one
request at a time, keeps nothing between requests, knows nothing of the cluster, has no client,
and ends when the parent does.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import msgpack

from distributed_core.materializer.parts import (
    PREFIX_BYTES,
    Buffer,
    GraphBegin,
    GraphEnd,
    GraphFailed,
    GraphSlice,
    Part,
    decode_message,
    decode_prefix,
    encode_message,
    encode_part,
)

__all__ = ["MEMORY_EXIT_CODE", "main"]

MEMORY_EXIT_CODE = 86
"""How the process ends itself over its memory limit where the parent cannot measure it."""

_PR_SET_PDEATHSIG = 1
_WATCH_SECONDS = 0.2
_SMALL_GRAPH_TASKS = 1000
_SMALL_GRAPHS_PER_COLLECTION = 256
_MAX_ERROR_BYTES = 256 * 1024
_MAX_TEXT = 10_000


def main(argv: list[str] | None = None) -> int:
    """Serve requests until the parent goes away. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="distributed-core materializer")
    parser.add_argument("--fd", type=int, required=True, help="inherited end of a socket pair")
    parser.add_argument("--parent", type=int, required=True, help="process id of the scheduler")
    parser.add_argument("--memory-limit", type=int, default=0, help="bytes, 0 for none")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle.
    _die_with(options.parent, options.memory_limit)
    with socket.socket(fileno=options.fd) as sock:
        server = _Server(sock)
        with contextlib.suppress(_ParentGone):
            server.hello()
            server.serve()
    return 0


def _die_with(parent: int, memory_limit: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent, memory_limit), daemon=True).start()
    if os.getppid() != parent:
        os._exit(0)


def _watch(parent: int, memory_limit: int) -> None:
    while os.getppid() == parent:
        if memory_limit and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > memory_limit:
            os._exit(MEMORY_EXIT_CODE)
        time.sleep(_WATCH_SECONDS)
    os._exit(0)


class _Server:
    """Request loop of the child."""

    def __init__(self, sock: socket.socket) -> None:
        # Imported here: a child that cannot import them says so and ends.
        self._graph = importlib.import_module("distributed_core.materializer.child_graph")
        self._sock = sock
        self._small_graphs = 0
        self._packer = msgpack.Packer(default=_plain_number)
        # What is loaded now stays; collecting is done between requests, never inside one.
        gc.collect()
        gc.freeze()
        gc.disable()

    def hello(self) -> None:
        """Tell the parent that requests may come."""
        self._send({"pid": os.getpid()}, [])

    def serve(self) -> None:
        """Answer requests until the parent closes the socket."""
        while (message := self._receive()) is not None:
            body, raw = message
            del message
            if body["op"] == "graph":
                n_tasks = self._answer_graph(body, raw)
            else:
                n_tasks = 0
                self._answer_call(body, raw)
            del body, raw
            self._collect(n_tasks)

    def _collect(self, n_tasks: int) -> None:
        if n_tasks <= _SMALL_GRAPH_TASKS:
            self._small_graphs += 1
            if self._small_graphs < _SMALL_GRAPHS_PER_COLLECTION:
                return
        self._small_graphs = 0
        gc.collect()
        if n_tasks > _SMALL_GRAPH_TASKS and sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)

    def _answer_graph(self, body: dict[str, Any], raw: list[memoryview]) -> int:
        wall = time.perf_counter()
        cpu = time.process_time()
        n_tasks = 0
        # Parts of a small graph go out in one write; of a large one, slice by slice.
        held: list[Any] = []
        held_raw: list[Buffer] = []
        final: Part
        try:
            for part in self._materialize(body, raw):
                held.append(encode_part(part, held_raw))
                if isinstance(part, GraphBegin):
                    n_tasks = part.n_tasks
                elif isinstance(part, GraphSlice) and part.start + len(part.keys) < n_tasks:
                    self._send(held, held_raw)
                    held, held_raw = [], []
            final = GraphEnd(time.process_time() - cpu, time.perf_counter() - wall)
            packed = self._pack([*held, encode_part(final, held_raw)], held_raw)
        except _ParentGone:
            raise
        except BaseException as error:  # noqa: BLE001 user code; the error is the answer
            held_raw = []
            packed = self._pack([encode_part(self._failed(error), held_raw)], held_raw)
        self._write(packed)
        return n_tasks

    def _materialize(self, body: dict[str, Any], raw: list[memoryview]) -> Iterator[Part]:
        graph = self._graph
        request = graph.GraphRequest(
            expr=_frames(body.pop("expr"), raw),
            annotations=_value(body["annotations"], raw),
            code=_value(body["code"], raw),
            span_metadata=_value(body["span_metadata"], raw),
            keys=_keys(_unpack(_frame(body["keys"], raw))),
            internal_priority=_unpack(_frame(body["internal_priority"], raw)),
            slice_tasks=max(1, body["slice_tasks"]),
            slice_bytes=body["slice_bytes"],
        )
        raw.clear()
        parts: Iterator[Part] = graph.materialize(request)
        return parts

    def _failed(self, error: BaseException) -> GraphFailed:
        if isinstance(error, self._graph.MaterializeError):
            return _report(error.kind, error.error)
        if isinstance(error, MemoryError):
            return _report("memory", error)
        return _report("materialize", error)

    def _answer_call(self, body: dict[str, Any], raw: list[memoryview]) -> None:
        answer: dict[str, Any]
        try:
            if body["op"] != "keys_from_pickled":
                raise ValueError(f"unknown call {body['op']!r}")
            header, frames = _frames(body["payload"], raw)
            keys = self._graph.keys_in(self._graph.load_pickled(header, frames))
            answer = {"value": keys, "cpu_seconds": time.process_time()}
            packed = self._pack(answer, [])
        except BaseException as error:  # noqa: BLE001 user code; the error is the answer
            answer = {"failed": encode_part(_report("unpickle", error), [])}
            packed = self._pack(answer, [])
        self._write(packed)

    def _pack(self, body: Any, raw: list[Buffer]) -> list[Buffer]:
        try:
            head = self._packer.pack([body, [len(frame) for frame in raw]])
        except (OverflowError, ValueError) as error:
            self._packer.reset()
            raise ValueError(f"a task key of the graph cannot be sent: {error}") from error
        except BaseException:
            self._packer.reset()
            raise
        return encode_message(head, raw)

    def _send(self, body: Any, raw: list[Buffer]) -> None:
        self._write(self._pack(body, raw))

    def _write(self, frames: list[Buffer]) -> None:
        try:
            for frame in frames:
                self._sock.sendall(frame)
        except OSError as error:
            raise _ParentGone from error

    def _receive(self) -> tuple[Any, list[memoryview]] | None:
        prefix = self._read(PREFIX_BYTES)
        if prefix is None:
            return None
        payload_bytes, head_bytes = decode_prefix(prefix)
        payload = self._read(payload_bytes)
        return None if payload is None else decode_message(payload, head_bytes)

    def _read(self, size: int) -> bytearray | None:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._sock.recv_into(view)
            if not count:
                return None
            view = view[count:]
        return data


class _ParentGone(Exception):
    """Nobody reads the answer any more."""


def _frame(place: Any, raw: list[memoryview]) -> Buffer:
    frame: Buffer = raw[place] if isinstance(place, int) else place
    return frame


def _frames(opaque: dict[str, Any], raw: list[memoryview]) -> tuple[Buffer, list[Buffer]]:
    return _frame(opaque["header"], raw), [_frame(frame, raw) for frame in opaque["frames"]]


def _value(value: dict[str, Any], raw: list[memoryview]) -> Any:
    return value if "plain" in value else _frames(value, raw)


def _unpack(data: Buffer) -> Any:
    return msgpack.unpackb(data, use_list=False, strict_map_key=False)


def _keys(value: Any) -> Any:
    return value["as-list"] if isinstance(value, dict) else value


def _plain_number(value: Any) -> Any:
    """NumPy numbers in keys equal plain ones, which can travel."""
    item = getattr(value, "item", None)
    plain = item() if callable(item) and not getattr(value, "shape", ()) else value
    if isinstance(plain, bool | int | float | str):
        return plain
    raise TypeError(
        f"{value!r} of type {type(value).__name__} in a task key; "
        "keys are str, int, float or tuples of those"
    )


def _report(kind: str, error: BaseException) -> GraphFailed:
    """Failure with pickles that a client can load; text takes the place of what it cannot."""
    if not isinstance(error, Exception):
        error = RuntimeError(f"{type(error).__name__} while opening the graph: {error}")
    text = f"{type(error).__name__}: {error}"[:_MAX_TEXT]
    trace = "".join(traceback.format_exception(error))[-_MAX_TEXT:]
    importlib.import_module("tblib.pickling_support").install(error, *_causes(error))
    raised = next((e for e in (error, *_causes(error)) if e.__traceback__ is not None), None)
    return GraphFailed(
        kind,
        text,
        _loadable(error) or pickle.dumps(RuntimeError(text)),
        (raised and _loadable(raised.__traceback__)) or b"",
        trace,
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen = {id(error)}
    while (cause := error.__cause__ or error.__context__) is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        error = cause


def _loadable(value: object) -> bytes | None:
    dumps = importlib.import_module("distributed.protocol.pickle").dumps
    try:
        data: bytes = dumps(value)
        if len(data) > _MAX_ERROR_BYTES or type(pickle.loads(data)) is not type(value):
            return None
    except Exception:  # noqa: BLE001 the caller puts a text in its place
        return None
    return data


if __name__ == "__main__":
    sys.exit(main())
