"""Opens one submitted graph, orders it, and turns it into slices of plain data.

Runs in the materializer process only: this is where user bytes become objects. Owns nothing
beyond one submission. Called by `child`, once per submission.
"""

from __future__ import annotations

import heapq
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import dask.order
import distributed.client
import msgpack
from dask._expr import LLGExpr
from dask._task_spec import (
    DataNode,
    GraphNode,
    Task,
    TaskRef,
    convert_legacy_graph,
    parse_input,
)
from dask.utils import key_split
from distributed.protocol import pickle as wire_pickle
from distributed.protocol.compression import decompress
from distributed.protocol.serialize import (
    merge_and_deserialize,
    msgpack_decode_default,
    pickle_loads,
)
from distributed.utils import key_split_group

from distributed_core.materializer.child_annotations import AnnotationTable
from distributed_core.materializer.child_pickle import NodePickler
from distributed_core.materializer.parts import (
    Buffer,
    GraphBegin,
    GraphSlice,
    Key,
    RunSpec,
    SliceFlag,
)

__all__ = ["GraphRequest", "MaterializeError", "keys_in", "load_pickled", "materialize"]

_P2P_MESSAGE = (
    "This graph shuffles or rechunks with the peer-to-peer method, which this scheduler does not "
    'support yet. Use the task-based method: dask.config.set({"dataframe.shuffle.method": '
    '"tasks", "array.rechunk.method": "tasks"}) before building the collection.'
)
_UNPICKLE_MESSAGE = (
    "The task graph could not be deserialized in the scheduler's environment ({what}: {error}). "
    "This usually means that the scheduler and the client do not have the same packages "
    "installed. See https://docs.dask.org/en/stable/deployment-considerations.html"
    "#consistent-software-environments"
)
# Expressions that are a graph of their own, without operands that are expressions. Their name is
# a hash over all arguments, which the general way would compute only to throw it away.
_LEAF_EXPRESSIONS = (LLGExpr, distributed.client._MapExpr)


_PLAIN = frozenset((bool, bytes, complex, float, int, str, type(None)))


class MaterializeError(Exception):
    """A submission cannot go on; `error` is what the client gets."""

    def __init__(self, kind: str, error: BaseException) -> None:
        super().__init__(kind, error)
        self.kind = kind
        self.error = error


@dataclass(slots=True)
class GraphRequest:
    """A submission as the child sees it: sub-headers and frames unopened, plain values decoded.

    `annotations`, `code` and `span_metadata` are (header, frames) pairs or `{"plain": value}`.
    """

    expr: tuple[Buffer, Sequence[Buffer]] | None
    annotations: Any
    code: Any
    span_metadata: Any
    keys: Collection[Key]
    internal_priority: Mapping[Key, float] | None
    slice_tasks: int
    slice_bytes: int


def load_pickled(header: Buffer, frames: Sequence[Buffer]) -> Any:
    """Object behind a `__Pickled__` placeholder."""
    fields = msgpack.unpackb(header)
    return wire_pickle.loads(fields["pickled-obj"], buffers=_decompressed(fields, frames))


def _load_serialized(header: Buffer, frames: Sequence[Buffer]) -> Any:
    fields = msgpack.unpackb(
        header, object_hook=msgpack_decode_default, use_list=False, strict_map_key=False
    )
    payload = _decompressed(fields, frames)
    if fields.get("serializer") == "pickle" and "split-offsets" not in fields:
        return pickle_loads(fields, payload)
    return merge_and_deserialize(fields, payload)


def _decompressed(fields: Mapping[str, Any], frames: Sequence[Buffer]) -> Sequence[Buffer]:
    if any(fields.get("compression") or ()):
        plain: Sequence[Buffer] = decompress(fields, list(frames))
        return plain
    return frames


def _load_value(value: Any) -> Any:
    return load_pickled(*value) if isinstance(value, tuple) else value["plain"]


def _unpickle_error(what: str, error: BaseException) -> MaterializeError:
    text = f"{type(error).__name__}: {error}"
    wrapped = RuntimeError(_UNPICKLE_MESSAGE.format(what=what, error=text))
    wrapped.__cause__ = error
    return MaterializeError("unpickle", wrapped)


def materialize(request: GraphRequest) -> Iterator[GraphBegin | GraphSlice]:
    """Parts of the answer except the last one.

    Takes the contents out of `request`, so that memory goes down while slices go out. Raises
    MaterializeError, MemoryError, or what materialization itself raised.
    """
    graph, by_type, common = _open(request)
    span = _span(request)
    wanted = set(request.keys)
    _check_nodes(graph)

    dependencies = {key: node.dependencies for key, node in graph.items()}
    dependents = Counter(chain.from_iterable(dependencies.values()))
    if not (graph.keys() - dependents.keys()) <= wanted:
        _cull(graph, dependencies, wanted)
        dependents = Counter(chain.from_iterable(dependencies.values()))
    _check_keys(graph)
    externals = [key for key in dependents if key not in graph]

    rank = _rank(graph, request.internal_priority)
    layout = _Layout(graph, dependencies, externals, rank)
    yield GraphBegin(
        n_tasks=len(graph),
        externals=externals,
        wanted_externals=[key for key in dict.fromkeys(request.keys) if key not in graph],
        span=span,
    )
    del dependencies, externals
    if graph:
        annotations = AnnotationTable(by_type, common)
        yield from _slices(
            graph,
            layout,
            wanted=wanted,
            rank=rank,
            dependents=dependents,
            annotations=annotations,
            request=request,
        )


def _open(
    request: GraphRequest,
) -> tuple[dict[Key, Any], Mapping[str, Mapping[Key, Any]], Mapping[str, Any] | None]:
    assert request.expr is not None
    header, frames = request.expr
    request.expr = None
    try:
        expr = _load_serialized(header, frames)
    except MemoryError:
        raise
    except BaseException as error:
        raise _unpickle_error("graph", error) from error
    del frames
    try:
        common = _load_value(request.annotations)
    except MemoryError:
        raise
    except BaseException as error:
        raise _unpickle_error("annotations", error) from error
    if common is not None and not isinstance(common, Mapping):
        raise MaterializeError(
            "annotations", TypeError(f"annotations must be a map, not {type(common).__name__}")
        )
    by_type: Mapping[str, Mapping[Key, Any]] = {}
    if type(expr) is distributed.client._MapExpr and not expr.kwargs:
        return _map_graph(expr), by_type, common
    if isinstance(expr, dict):
        # Clients send a bare dict instead of an expression when they only want errors explained.
        raw = expr
    elif type(expr) in _LEAF_EXPRESSIONS and not expr.dependencies():
        raw = expr._layer()
    else:
        raw = expr.__dask_graph__()
        by_type = expr.__dask_annotations__()
    del expr
    graph: dict[Key, Any] = convert_legacy_graph(raw)
    return graph, by_type, common


def _map_graph(expr: Any) -> dict[Key, Any]:
    """The layer of a `map`, where most arguments need no look inside."""
    function = expr.func
    return {
        key: Task(key, function, *(args if set(map(type, args)) <= _PLAIN else parse_input(args)))
        for key, args in zip(expr.keys, zip(*expr.iterables, strict=False), strict=False)
    }


def _span(request: GraphRequest) -> dict[str, Any]:
    """Informative values: what cannot be opened or is not plain becomes a remark, not a failure."""
    problems = []
    metadata: Any = None
    try:
        metadata = _load_value(request.span_metadata)
        msgpack.packb(metadata)
    except Exception as error:  # noqa: BLE001 user bytes; the remark carries the error
        metadata = None
        problems.append(f"span_metadata: {type(error).__name__}: {error}")
    code: list[tuple[str, int, int, str]] = []
    try:
        for text, line, relative, filename in _load_value(request.code) or ():
            code.append((str(text), int(line), int(relative), str(filename)))
    except Exception as error:  # noqa: BLE001 as above
        code = []
        problems.append(f"code: {type(error).__name__}: {error}")
    return {"metadata": metadata, "code": code, "problems": problems}


def _check_nodes(graph: Mapping[Key, Any]) -> None:
    # The module is loaded if and only if such a node can exist.
    shuffle = sys.modules.get("distributed.shuffle._core")
    if shuffle is None:
        return
    for node_type in set(map(type, graph.values())):
        if issubclass(node_type, shuffle.P2PBarrierTask):
            raise MaterializeError("unsupported", NotImplementedError(_P2P_MESSAGE))


_KEY_TYPES = frozenset((str, tuple))


def _check_keys(graph: Mapping[Any, Any]) -> None:
    if set(map(type, graph)) <= _KEY_TYPES:
        return
    for key in graph:
        if isinstance(key, str | tuple | int | float) or hasattr(key, "item"):
            continue
        raise MaterializeError(
            "unsupported",
            TypeError(
                f"task key {key!r} is of type {type(key).__name__}; "
                "keys are str, int, float or tuples of those"
            ),
        )


def _cull(
    graph: dict[Key, Any], dependencies: dict[Key, frozenset[Key]], wanted: Iterable[Key]
) -> None:
    """Drop what `wanted` does not need, in place."""
    needed = {key for key in wanted if key in graph}
    stack = list(needed)
    while stack:
        for key in dependencies[stack.pop()]:
            if key in graph and key not in needed:
                needed.add(key)
                stack.append(key)
    for key in graph.keys() - needed:
        del graph[key], dependencies[key]


def _rank(
    graph: Mapping[Key, Any], internal_priority: Mapping[Key, float] | None
) -> Mapping[Key, float]:
    if not internal_priority:
        if len(graph) == 1:
            return dict.fromkeys(graph, 0)
        ranks: dict[Key, float] = dask.order.order(graph)
        return ranks
    if graph.keys() <= internal_priority.keys():
        return internal_priority
    # The client ranks only the keys that it hands out; what those need comes first.
    first = min(internal_priority.values())
    return {key: internal_priority.get(key, first) for key in graph}


class _Layout:
    """Emission order and, in that order, the dependencies of all tasks as numbers."""

    __slots__ = ("counts", "dependencies", "keys")

    def __init__(
        self,
        graph: Mapping[Key, Any],
        dependencies: Mapping[Key, frozenset[Key]],
        externals: Sequence[Key],
        rank: Mapping[Key, float],
    ) -> None:
        self.keys: list[Key] = sorted(graph, key=rank.__getitem__)
        if not self._number(dependencies, externals):
            self.keys = _topological(dependencies, rank)
            self._number(dependencies, externals)

    def _number(self, dependencies: Mapping[Key, frozenset[Key]], externals: Sequence[Key]) -> bool:
        """Whether the order is topological."""
        rows = [dependencies[key] for key in self.keys]
        self.counts = array("i", map(len, rows))
        position = {key: i for i, key in enumerate(self.keys)}
        for i, key in enumerate(externals):
            position[key] = -1 - i
        self.dependencies = array("i", map(position.__getitem__, chain.from_iterable(rows)))
        numbers = self.dependencies
        start = 0
        for i, count in enumerate(self.counts):
            if count:
                if max(numbers[start : start + count]) >= i:
                    return False
                start += count
        return True


def _topological(
    dependencies: Mapping[Key, frozenset[Key]], rank: Mapping[Key, float]
) -> list[Key]:
    """Keys by rank as far as dependencies allow. Raises RuntimeError for a cycle."""
    missing = {}
    dependents: dict[Key, list[Key]] = {}
    ready: list[tuple[float, int, Key]] = []
    serial = {key: i for i, key in enumerate(dependencies)}
    for key, needs in dependencies.items():
        inner = [need for need in needs if need in dependencies]
        missing[key] = len(inner)
        for need in inner:
            dependents.setdefault(need, []).append(key)
        if not inner:
            ready.append((rank[key], serial[key], key))
    heapq.heapify(ready)
    ordered = []
    while ready:
        key = heapq.heappop(ready)[2]
        ordered.append(key)
        for dependent in dependents.get(key, ()):
            missing[dependent] -= 1
            if not missing[dependent]:
                heapq.heappush(ready, (rank[dependent], serial[dependent], dependent))
    if len(ordered) < len(dependencies):
        stuck = next(key for key, count in missing.items() if count)
        raise RuntimeError(f"the graph has a cycle; task {stuck!r} cannot start")
    return ordered


class _Groups:
    """Numbers of task groups and prefixes, found by the part of a key that repeats."""

    __slots__ = ("_groups", "_heads", "_prefixes", "new_group_prefix", "new_groups", "new_prefixes")

    def __init__(self) -> None:
        self._heads: dict[Any, int] = {}
        self._groups: dict[str, int] = {}
        self._prefixes: dict[str, int] = {}
        self.clear()

    def clear(self) -> None:
        self.new_prefixes: list[str] = []
        self.new_groups: list[str] = []
        self.new_group_prefix = array("i")

    def index(self, key: Key) -> int:
        head: Any = None
        if type(key) is tuple:
            if key:
                head = (key[0],)
        elif type(key) is str:
            head, dash, tail = key.rpartition("-")
            # Both splitters stop at the first word that is not all letters, so such a last word
            # can be any other such word, unless the key has a form of its own.
            if not dash or tail.isalpha() or key[0] in "(<":
                head = None
        if head is None:
            return self._number(key)
        number = self._heads.get(head)
        if number is None:
            number = self._heads[head] = self._number(key)
        return number

    def _number(self, key: Key) -> int:
        group = _named(key_split_group, key)
        number = self._groups.get(group)
        if number is None:
            prefix = _named(key_split, key)
            prefix_number = self._prefixes.get(prefix)
            if prefix_number is None:
                prefix_number = self._prefixes[prefix] = len(self._prefixes)
                self.new_prefixes.append(prefix)
            number = self._groups[group] = len(self._groups)
            self.new_groups.append(group)
            self.new_group_prefix.append(prefix_number)
        return number


def _named(split: Callable[[Key], Any], key: Key) -> str:
    try:
        return str(split(key))
    except IndexError:  # An empty key, or nothing but brackets.
        return "Other"


def _slices(
    graph: dict[Key, GraphNode],
    layout: _Layout,
    *,
    wanted: Collection[Key],
    rank: Mapping[Key, float],
    dependents: Mapping[Key, int],
    annotations: AnnotationTable,
    request: GraphRequest,
) -> Iterator[GraphSlice]:
    keys = layout.keys
    pickle_node = NodePickler()
    groups = _Groups()
    total = len(keys)
    start = edge = 0
    while start < total:
        stop = min(start + request.slice_tasks, total)
        flags = bytearray()
        group_index = array("i")
        annotation_index = array("i")
        run_specs: list[RunSpec] = []
        size = 0
        for i in range(start, stop):
            key = keys[i]
            node = graph.pop(key)
            flag = SliceFlag.WANTED if key in wanted else 0
            if node.data_producer:
                flag |= SliceFlag.DATA_PRODUCER
                if isinstance(node, DataNode):
                    flag |= SliceFlag.DATA_NODE
            flags.append(flag)
            group_index.append(groups.index(key))
            if not annotations.is_empty:
                annotation_index.append(_annotate(annotations, key))
            run_spec = pickle_node(node)
            run_specs.append(run_spec)
            size += len(run_spec) if isinstance(run_spec, bytes) else sum(map(len, run_spec))
            if size >= request.slice_bytes:
                stop = i + 1
                break
        if annotations.is_empty:
            annotation_index = array("i", (-1,)) * (stop - start)
        counts = layout.counts[start:stop]
        next_edge = edge + sum(counts)
        numbers = layout.dependencies[edge:next_edge]
        slice_keys = keys[start:stop]
        if stop == total:
            future = bytes(4 * (stop - start))
        else:
            future = _future_dependents(slice_keys, numbers, start, dependents)
        yield GraphSlice(
            start=start,
            keys=slice_keys,
            dependency_counts=counts.tobytes(),
            dependencies=numbers.tobytes(),
            order=array("d", map(rank.__getitem__, slice_keys)).tobytes(),
            flags=bytes(flags),
            future_dependents=future,
            new_prefixes=groups.new_prefixes,
            new_groups=groups.new_groups,
            new_group_prefix=groups.new_group_prefix.tobytes(),
            group_index=group_index.tobytes(),
            new_annotations=annotations.take_new_rows(),
            annotation_index=annotation_index.tobytes(),
            run_specs=run_specs,
        )
        groups.clear()
        start, edge = stop, next_edge


def _future_dependents(
    keys: Sequence[Key], numbers: Iterable[int], start: int, dependents: Mapping[Key, int]
) -> bytes:
    counts = array("i", [dependents.get(key, 0) for key in keys])
    for number in numbers:
        if number >= start:
            counts[number - start] -= 1
    return counts.tobytes()


def _annotate(annotations: AnnotationTable, key: Key) -> int:
    try:
        return annotations.index(key)
    except Exception as error:
        raise MaterializeError("annotations", error) from error


def keys_in(value: Any) -> list[Key]:
    """Keys in `value`: a Future, a key, or a nest of containers of those.

    A tuple is a key unless there is a Future in it. Raises TypeError for anything else.
    """
    if isinstance(value, TaskRef):
        return [value.key]
    if isinstance(value, Mapping):
        return keys_in([*value.keys(), *value.values()])
    if isinstance(value, list | set | frozenset):
        return [key for item in value for key in keys_in(item)]
    if isinstance(value, tuple):
        if _has_future(value):
            return [key for item in value for key in keys_in(item)]
        return [value]
    if isinstance(value, str | int | float):
        return [value]
    raise TypeError(f"neither a Future nor a key: {type(value).__name__}")


def _has_future(value: Any) -> bool:
    if isinstance(value, tuple | list | set | frozenset):
        return any(map(_has_future, value))
    return isinstance(value, TaskRef)
