"""Pickles graph nodes for the wire; what nodes have in common is pickled once.

Runs in the materializer process only. Owns the form of a `__Pickled__` sub-header as the child
writes it. Must keep nothing from one submission to the next: a `NodePickler` lives as long as
its submission. Called by `child_graph`.

Most tasks of a graph differ in key and arguments and share class and function. Pickle streams
allow to make use of that: a stream may first load the class and the function, which puts them (and
all they consist of) into the memo, and drop them from the stack; what follows refers to the memo.
Those first opcodes are the same bytes for all tasks with that function, and a pickler whose memo
is set accordingly writes the rest. Any stock unpickler reads the result.
"""

from __future__ import annotations

import copyreg
import io
import operator
import pickle
from types import SimpleNamespace
from typing import Any

import cloudpickle
import msgpack
from dask._task_spec import Task
from distributed.protocol import pickle as wire_pickle
from distributed.utils import ensure_memoryview

from distributed_core.materializer.parts import Buffer, RunSpec

__all__ = ["NodePickler", "pickled_frames"]

_PROTOCOL = 5
_HEAD = b"\x83\xabpickled-obj"
_TAIL = b"\xabcompression\x90\xaenum-sub-frames\x00"
_MAX_FUNCTION_BYTES = 32 * 1024  # Larger ones are frames of their own, or carry buffers.
_PROTO = b"\x80\x05"
_FRAME = 0x95
_FRAME_BYTES = 9
_NEW_OBJECT = b")\x81"  # EMPTY_TUPLE, NEWOBJ: an instance of the class on the stack.
_POP = b"0"
_BUILD_AND_STOP = b"b."
_PROTO_BYTES = len(_PROTO)

# The same state as `Task.__getstate__` gives, without a Python frame per attribute.
_task_state = operator.attrgetter(*Task.get_all_slots())


def _reduce_task(task: Task) -> Any:
    return copyreg.__newobj__, (Task,), _task_state(task)  # type: ignore[attr-defined]


def _sub_header(pickled: bytes) -> bytes:
    """Sub-header of a pickle without buffers; by hand, since there is one for every task."""
    size = len(pickled)
    if size < 0x100:
        return b"%b\xc4%c%b%b" % (_HEAD, size, pickled, _TAIL)
    if size < 0x10000:
        return b"%b\xc5%b%b%b" % (_HEAD, size.to_bytes(2, "big"), pickled, _TAIL)
    return b"%b\xc6%b%b%b" % (_HEAD, size.to_bytes(4, "big"), pickled, _TAIL)


def _frames(pickled: bytes, buffers: list[pickle.PickleBuffer]) -> RunSpec:
    if not buffers:
        return _sub_header(pickled)
    header: bytes = msgpack.packb(
        {
            "pickled-obj": pickled,
            "compression": [None] * len(buffers),
            "num-sub-frames": len(buffers),
        }
    )
    views: list[Buffer] = [ensure_memoryview(buffer) for buffer in buffers]
    return (header, *views)


def pickled_frames(value: object) -> RunSpec:
    """`value` as the frames of a `__Pickled__` placeholder."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = wire_pickle.dumps(value, buffer_callback=buffers.append)
    return _frames(pickled, buffers)


class _Template:
    """Opcodes that end with an empty `Task` on the stack, and the memo after them."""

    __slots__ = ("function", "memo", "opening")

    def __init__(self, function: Any, opening: bytes, pickler: pickle.Pickler) -> None:
        self.function = function  # Kept, so that its id stays its own.
        self.opening = opening
        self.memo = pickler.memo


class NodePickler:
    """Callable: graph node to `RunSpec`.

    The result loads to the same node as `distributed.protocol.pickle.dumps` gives, which stays
    the fallback for all that the plain pickler cannot find by name.
    """

    def __init__(self) -> None:
        self._buffers: list[pickle.PickleBuffer] = []
        self._chunks: list[bytes] = []
        self._dispatch = {**copyreg.dispatch_table, Task: _reduce_task}
        self._pickler = self._make_pickler(SimpleNamespace(write=self._chunks.append))
        # By id of the function: None after one sight, then its template or False for "has none".
        self._templates: dict[int, _Template | bool | None] = {}

    def __call__(self, node: Any) -> RunSpec:
        template: _Template | bool | None = None
        if type(node) is Task:
            identity = id(node.func)
            template = self._templates.get(identity)
            if template is None:
                # Only a function that comes again is worth a template.
                if identity in self._templates:
                    template = self._template(node.func) or False
                self._templates[identity] = template
        try:
            if isinstance(template, _Template) and template.function is node.func:
                self._pickler.memo = template.memo
                body = self._dump(_task_state(node))
                pickled = template.opening + body[_PROTO_BYTES:-1] + _BUILD_AND_STOP
            else:
                self._pickler.clear_memo()
                body = pickled = self._dump(node)
        except Exception:  # noqa: BLE001 the full pickler comes next and reports its own error
            self._chunks.clear()
            self._buffers.clear()
            return pickled_frames(node)
        if b"__main__" in body:
            self._buffers.clear()
            return pickled_frames(node)
        run_spec = _frames(pickled, self._buffers)
        self._buffers.clear()
        return run_spec

    def _make_pickler(self, file: Any) -> pickle.Pickler:
        add_buffer: Any = self._buffers.append
        pickler = pickle.Pickler(file, _PROTOCOL, buffer_callback=add_buffer)
        pickler.dispatch_table = self._dispatch
        return pickler

    def _dump(self, value: object) -> bytes:
        chunks = self._chunks
        self._pickler.dump(value)
        pickled = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        return pickled

    def _template(self, function: Any) -> _Template | None:
        """None for a function that only the full pickler handles well."""
        file = io.BytesIO()
        pickler = self._make_pickler(file)
        try:
            pickler.dump(function)
            by_name = b"__main__" not in file.getvalue()
        except Exception:  # noqa: BLE001 the answer we asked for: it has no importable name
            by_name = False
        try:
            if not by_name:
                file = io.BytesIO()
                pickler = cloudpickle.Pickler(file, _PROTOCOL, self._buffers.append)
                pickler.dump(function)
            if self._buffers or file.tell() > _MAX_FUNCTION_BYTES:
                return None
            opening = _PROTO + _operations(file.getvalue()) + _POP
            file = io.BytesIO()
            second = self._make_pickler(file)
            second.memo = pickler.memo
            second.dump(Task)
        except Exception:  # noqa: BLE001 then each node with it reports that
            return None
        finally:
            self._buffers.clear()
        return _Template(function, opening + _operations(file.getvalue()) + _NEW_OBJECT, second)


def _operations(pickled: bytes) -> bytes:
    """A pickle without protocol, frame and stop."""
    start = _PROTO_BYTES
    if pickled[start] == _FRAME:
        start += _FRAME_BYTES
    return pickled[start:-1]
