"""The one table of operations: what travels between which peers, with which fields.

Owns names, directions, fields and their types, and the compiled check of an incoming message.
Never touches state and never raises on what a peer sent: a message that does not fit yields a
``Rejection``. Called by ``comm.dispatch`` for RPCs, by the server for stream messages, and read by
tests and documentation.

``op``, ``reply``, ``close`` and ``serializers`` are reserved on every RPC and belong to no row.
The scheduler itself adds ``client`` to messages of a client's stream (a message may carry its own)
and ``worker`` to those of a worker's stream.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from distributed_core.protocol.codec import Pickled, Serialized

__all__ = [
    "RESERVED",
    "ROWS",
    "TABLE",
    "Channel",
    "Field",
    "Kind",
    "Reason",
    "Rejection",
    "Row",
    "Type",
    "Use",
    "check",
    "check_message",
    "is_key",
]

RESERVED: Final = frozenset({"op", "reply", "close", "serializers"})

_MAX_KEY_DEPTH: Final = 50


class Kind(StrEnum):
    """How an operation travels."""

    RPC = "rpc"
    STREAM = "stream"


class Channel(StrEnum):
    """Who tells whom, and how; each channel has its own set of names."""

    SCHEDULER_RPC = "any peer to scheduler, rpc"
    CLIENT_STREAM = "client to scheduler, stream"
    WORKER_STREAM = "worker to scheduler, stream"
    TO_CLIENT = "scheduler to client, stream"
    TO_WORKER = "scheduler to worker, stream"
    WORKER_RPC = "scheduler to worker, rpc"
    NANNY_RPC = "scheduler to nanny, rpc"

    @property
    def kind(self) -> Kind:
        """RPC or stream."""
        return Kind.RPC if self.value.endswith("rpc") else Kind.STREAM


class Use(StrEnum):
    """How much of ordinary use depends on an operation."""

    ESSENTIAL = "essential"
    COMMON = "common"
    RARE = "rare"


class Reason(StrEnum):
    """Why a message was rejected: a bounded set, fit for a metric's label."""

    MALFORMED = "malformed"
    UNKNOWN_OP = "unknown-op"
    MISSING_FIELD = "missing-field"
    WRONG_TYPE = "wrong-type"
    SURPLUS_FIELD = "surplus-field"
    ANNOUNCED = "announced"


@dataclass(frozen=True, slots=True)
class Type:
    """A check of one value, and its name for messages and documentation."""

    name: str
    accepts: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a message."""

    type: Type
    required: bool = True
    default: Any = None


@dataclass(frozen=True, slots=True)
class Rejection:
    """A message that does not fit: what, and why in words for the peer and the log."""

    op: str
    reason: Reason
    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """One operation on one channel.

    ``announced`` is empty for what is served; otherwise it says in words which feature is
    missing, and the operation is answered with that text.
    """

    channel: Channel
    name: str
    use: Use
    senders: frozenset[str]
    fields: Mapping[str, Field]
    announced: str = ""
    _checks: tuple[tuple[str, Callable[[Any], bool], bool], ...] = field(
        init=False, repr=False, compare=False
    )
    _optional: tuple[tuple[str, Any], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks = tuple(
            (name, column.type.accepts, column.required) for name, column in self.fields.items()
        )
        optional = tuple(
            (name, column.default) for name, column in self.fields.items() if not column.required
        )
        object.__setattr__(self, "_checks", checks)
        object.__setattr__(self, "_optional", optional)

    @property
    def kind(self) -> Kind:
        """RPC or stream."""
        return self.channel.kind

    @property
    def served(self) -> bool:
        """Whether this release carries the operation out."""
        return not self.announced

    def surplus(self, message: Mapping[Any, Any]) -> list[Any]:
        """Names in ``message`` that the row does not know."""
        fields = self.fields
        return [name for name in message if name not in fields and name not in RESERVED]

    def complete(self, message: dict[str, Any]) -> dict[str, Any]:
        """Fill the defaults of absent fields into ``message`` and return it."""
        for name, default in self._optional:
            if name not in message:
                message[name] = default
        return message


def check(row: Row, message: Mapping[Any, Any], strict: bool) -> Rejection | None:
    """Check ``message`` against ``row``.

    A missing field and a wrong type are always rejected. A surplus field is rejected if
    ``strict`` (streams); otherwise ``Row.surplus`` names it for the counters.
    """
    matched = 0
    for name, accepts, required in row._checks:
        if name in message:
            matched += 1
            if not accepts(message[name]):
                return _wrong_type(row, name, message[name])
        elif required:
            return Rejection(
                row.name,
                Reason.MISSING_FIELD,
                f"{row.name}: field {name!r} ({row.fields[name].type.name}) is missing",
            )
    # ``op`` is counted in: stream messages are checked with it.
    if strict and len(message) > matched + ("op" in message):
        surplus = [name for name in message if name not in row.fields and name != "op"]
        if surplus:
            names = ", ".join(f"{reprlib.repr(name)}" for name in surplus[:5])
            return Rejection(
                row.name, Reason.SURPLUS_FIELD, f"{row.name}: unexpected field {names}"
            )
    return None


def check_message(channel: Channel, message: object) -> Row | Rejection:
    """Look up the row of a message and check it, strictly on streams.

    :param message: as decoded, ``op`` included.
    :returns: the row if the message fits and is served.
    """
    if not isinstance(message, dict):
        return Rejection(
            "", Reason.MALFORMED, f"a message must be a map, got {type(message).__name__}"
        )
    op = message.get("op")
    if not isinstance(op, str):
        return Rejection("", Reason.MALFORMED, f"a message needs a text op, got {reprlib.repr(op)}")
    row = ROWS[channel].get(op)
    if row is None:
        return Rejection(op, Reason.UNKNOWN_OP, f"unknown operation {reprlib.repr(op)}")
    if row.announced:
        return Rejection(op, Reason.ANNOUNCED, f"{op}: {row.announced}")
    rejection = check(row, message, strict=channel.kind is Kind.STREAM)
    return row if rejection is None else rejection


def _wrong_type(row: Row, name: str, value: object) -> Rejection:
    return Rejection(
        row.name,
        Reason.WRONG_TYPE,
        f"{row.name}: field {name!r} must be {row.fields[name].type.name}, "
        f"got {type(value).__name__} {reprlib.repr(value)}",
    )


def is_key(value: object, depth: int = 0) -> bool:
    """Whether ``value`` can be a task key: str, int, float, or a (nested) tuple of those."""
    cls = value.__class__
    if cls is str or cls is int or cls is float:
        return True
    if cls is tuple and depth < _MAX_KEY_DEPTH:
        return all(is_key(part, depth + 1) for part in value)  # type: ignore[attr-defined]
    return False


def _instance(name: str, *classes: type) -> Type:
    return Type(name, lambda value: isinstance(value, classes))


def _exactly(name: str, *classes: type) -> Type:
    return Type(name, lambda value: type(value) in classes)


def _nullable(base: Type) -> Type:
    accepts = base.accepts
    return Type(f"{base.name} or nil", lambda value: value is None or accepts(value))


def _either(*types: Type) -> Type:
    return Type(
        " or ".join(one.name for one in types),
        lambda value: any(one.accepts(value) for one in types),
    )


def _array_of(item: Type) -> Type:
    accepts = item.accepts
    return Type(
        f"array of {item.name}",
        lambda value: isinstance(value, (tuple, list, set)) and all(map(accepts, value)),
    )


def _map_of(key: Type, value: Type) -> Type:
    accepts_key = key.accepts
    accepts_value = value.accepts

    def accepts(found: object) -> bool:
        return isinstance(found, dict) and all(
            accepts_key(name) and accepts_value(item) for name, item in found.items()
        )

    return Type(f"map of {key.name} to {value.name}", accepts)


def _one_of(*names: str) -> Type:
    allowed = frozenset(names)
    return Type(
        f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in allowed
    )


ANY = Type("any value", lambda value: True)
STR = _exactly("text", str)
INT = _exactly("integer", int)
NUMBER = _exactly("number", int, float)
FLAG = _exactly("flag", bool)
COUNT = _exactly("flag or integer", bool, int)
BYTES = _instance("bytes", bytes)
MAP = _instance("map", dict)
ARRAY = _instance("array", tuple, list, set)
DURATION = _either(NUMBER, STR)
KEY = Type("key", is_key)
KEYS = _array_of(KEY)
STRS = _array_of(STR)
PAYLOAD = _instance("opaque payload", Serialized, Pickled)
# An exception may be opaque, a raw pickle, or a text.
ERROR = _instance("exception", Serialized, Pickled, bytes, str)
WORKER = _either(STR, NUMBER)
WORKERS = _either(_array_of(WORKER), WORKER)
TOPIC = _either(STR, STRS)
WHO_HAS = _map_of(KEY, STRS)
NBYTES = _map_of(KEY, NUMBER)
DATA = _map_of(KEY, ANY)
RESOURCES = _map_of(STR, NUMBER)
STATUS = _one_of(
    "undefined",
    "created",
    "init",
    "starting",
    "running",
    "paused",
    "stopping",
    "stopped",
    "closing",
    "closing_gracefully",
    "closed",
    "failed",
    "dont_reply",
)


def _need(base: Type) -> Field:
    return Field(base)


def _may(base: Type, default: Any = None) -> Field:
    return Field(base, required=False, default=default)


def _or_nil(base: Type) -> Field:
    """Absent and nil mean the same."""
    return Field(_nullable(base), required=False)


_LATER = "is not served by this release of distributed-core"
_SEMAPHORE: Final = f"Lock and Semaphore: the feature {_LATER}"
_MULTI_LOCK: Final = f"MultiLock: the feature {_LATER}"
_EVENT: Final = f"Event: the feature {_LATER}"
_QUEUE: Final = f"Queue: the feature {_LATER}"
_VARIABLE: Final = f"Variable: the feature {_LATER}"
_PUBLISH: Final = f"published datasets: the feature {_LATER}"
_SHUFFLE: Final = (
    f"p2p shuffle and rechunk: the feature {_LATER}; set dataframe.shuffle.method and "
    "array.rechunk.method to 'tasks' in the Dask configuration"
)
_WORKER_PLUGIN: Final = f"worker plugins and upload_file: the feature {_LATER}"
_NANNY_PLUGIN: Final = f"nanny plugins: the feature {_LATER}"
_REPORT: Final = f"performance_report: the feature {_LATER}"
_SAMPLER: Final = f"MemorySampler: the feature {_LATER}"
_DUMP: Final = f"dump_cluster_state to a remote URL: the feature {_LATER}; dump to a local file"
_BENCHMARK: Final = f"benchmark_hardware: the feature {_LATER}"
_CODE: Final = (
    "the scheduler runs no code of its clients; the setting security.allow-code-on-scheduler "
    "refuses it"
)

_CLIENT: Final = frozenset({"client"})
_WORKER: Final = frozenset({"worker"})
_NANNY: Final = frozenset({"nanny"})
_TOOL: Final = frozenset({"client", "tool"})
_BOTH: Final = frozenset({"client", "worker"})
_SCHEDULER: Final = frozenset({"scheduler"})
_E, _C, _R = Use.ESSENTIAL, Use.COMMON, Use.RARE

_FieldMap = Mapping[str, Field]


def _rpc(
    name: str, use: Use, senders: frozenset[str], announced: str = "", /, **fields: Field
) -> Row:
    return Row(Channel.SCHEDULER_RPC, name, use, senders, fields, announced)


def _from_client(name: str, use: Use, announced: str = "", /, **fields: Field) -> Row:
    # Whom the message is for, if not for the client of the stream itself.
    fields.setdefault("client", _may(STR))
    return Row(Channel.CLIENT_STREAM, name, use, _CLIENT, fields, announced)


def _from_worker(name: str, use: Use, /, **fields: Field) -> Row:
    return Row(Channel.WORKER_STREAM, name, use, _WORKER, fields)


def _to_client(name: str, use: Use, /, **fields: Field) -> Row:
    return Row(Channel.TO_CLIENT, name, use, _SCHEDULER, fields)


def _to_worker(name: str, use: Use, /, **fields: Field) -> Row:
    return Row(Channel.TO_WORKER, name, use, _SCHEDULER, fields)


def _worker_rpc(name: str, use: Use, /, **fields: Field) -> Row:
    return Row(Channel.WORKER_RPC, name, use, _SCHEDULER, fields)


def _nanny_rpc(name: str, use: Use, /, **fields: Field) -> Row:
    return Row(Channel.NANNY_RPC, name, use, _SCHEDULER, fields)


_SCHEDULER_RPC_ROWS: Final = (
    # What every server answers.
    _rpc("identity", _E, _BOTH | _TOOL, n_workers=_may(INT, -1)),
    _rpc("echo", _R, _BOTH | _TOOL, data=_may(ANY)),
    _rpc("connection_stream", _R, _TOOL, f"connection_stream: the feature {_LATER}"),
    _rpc("dump_state", _R, _TOOL, exclude=_may(ARRAY, ())),
    _rpc("versions", _C, _BOTH | _TOOL, packages=_or_nil(STRS)),
    # Registration and heartbeat.
    _rpc("register-client", _E, _CLIENT, client=_need(STR), versions=_need(MAP)),
    _rpc(
        "register-worker",
        _E,
        _WORKER,
        address=_need(STR),
        status=_need(STATUS),
        server_id=_need(STR),
        nthreads=_need(INT),
        name=_need(WORKER),
        now=_need(NUMBER),
        resources=_need(RESOURCES),
        memory_limit=_need(_nullable(INT)),
        metrics=_need(MAP),
        services=_need(MAP),
        local_directory=_need(STR),
        versions=_need(MAP),
        nanny=_need(_nullable(STR)),
        extra=_need(MAP),
        stimulus_id=_need(STR),
        pid=_may(INT, 0),
        resolve_address=_may(FLAG, True),
        host_info=_or_nil(MAP),
    ),
    _rpc(
        "heartbeat_worker",
        _E,
        _WORKER,
        address=_need(STR),
        metrics=_need(MAP),
        now=_or_nil(NUMBER),
        executing=_or_nil(_map_of(KEY, NUMBER)),
        extensions=_or_nil(MAP),
        resources=_or_nil(MAP),
        host_info=_or_nil(MAP),
        resolve_address=_may(FLAG, True),
    ),
    _rpc("register_nanny", _C, _NANNY, address=_need(STR)),
    _rpc(
        "unregister",
        _C,
        _NANNY | _WORKER,
        address=_need(STR),
        stimulus_id=_need(STR),
        expected=_may(FLAG, False),
    ),
    _rpc("subscribe_worker_status", _C, _TOOL),
    # Data.
    _rpc("gather", _E, _BOTH, keys=_need(KEYS)),
    _rpc("who_has", _C, _BOTH, keys=_or_nil(KEYS)),
    _rpc(
        "scatter",
        _C,
        _CLIENT,
        data=_need(DATA),
        workers=_or_nil(WORKERS),
        client=_need(STR),
        broadcast=_may(COUNT, False),
        timeout=_may(_nullable(DURATION), 2),
    ),
    _rpc("ncores", _C, _BOTH, workers=_or_nil(WORKERS)),
    _rpc("ncores_running", _C, _BOTH, workers=_or_nil(WORKERS)),
    _rpc(
        "update_data",
        _C,
        _BOTH,
        who_has=_need(WHO_HAS),
        nbytes=_need(NBYTES),
        client=_or_nil(STR),
    ),
    _rpc("add_keys", _R, _WORKER, worker=_need(STR), keys=_may(KEYS, ()), stimulus_id=_or_nil(STR)),
    _rpc("nbytes", _C, _CLIENT, keys=_or_nil(KEYS), summary=_may(FLAG, True)),
    _rpc("has_what", _C, _CLIENT, workers=_or_nil(WORKERS)),
    _rpc("processing", _C, _CLIENT, workers=_or_nil(WORKERS)),
    _rpc(
        "replicate",
        _C,
        _CLIENT,
        keys=_need(KEYS),
        n=_or_nil(INT),
        workers=_or_nil(WORKERS),
        branching_factor=_may(INT, 2),
        delete=_may(FLAG, True),
        stimulus_id=_or_nil(STR),
    ),
    _rpc(
        "rebalance",
        _C,
        _CLIENT,
        keys=_or_nil(KEYS),
        workers=_or_nil(WORKERS),
        stimulus_id=_or_nil(STR),
    ),
    # Control.
    _rpc("retry", _C, _CLIENT, keys=_need(KEYS), client=_or_nil(STR)),
    _rpc(
        "restart",
        _C,
        _CLIENT,
        client=_or_nil(STR),
        timeout=_may(_nullable(DURATION), 30),
        wait_for_workers=_may(FLAG, True),
        stimulus_id=_or_nil(STR),
    ),
    _rpc(
        "restart_workers",
        _C,
        _CLIENT,
        workers=_or_nil(WORKERS),
        client=_or_nil(STR),
        timeout=_may(_nullable(DURATION), 30),
        wait_for_workers=_may(FLAG, True),
        on_error=_may(_one_of("raise", "return"), "raise"),
        stimulus_id=_or_nil(STR),
    ),
    _rpc(
        "retire_workers",
        _C,
        _BOTH | _TOOL,
        workers=_or_nil(WORKERS),
        names=_or_nil(WORKERS),
        close_workers=_may(FLAG, False),
        remove=_may(FLAG, True),
        stimulus_id=_or_nil(STR),
        n=_or_nil(INT),
        target=_or_nil(INT),
        minimum=_or_nil(INT),
        memory_ratio=_or_nil(NUMBER),
        key=_or_nil(_either(BYTES, PAYLOAD)),
        attribute=_may(STR, "address"),
    ),
    _rpc(
        "workers_to_close",
        _C,
        _TOOL,
        n=_or_nil(INT),
        target=_or_nil(INT),
        minimum=_or_nil(INT),
        memory_ratio=_or_nil(NUMBER),
        key=_or_nil(_either(BYTES, PAYLOAD)),
        attribute=_may(STR, "address"),
    ),
    _rpc("adaptive_target", _C, _TOOL, target_duration=_or_nil(DURATION)),
    _rpc("check_idle", _R, _TOOL),
    _rpc("terminate", _C, _TOOL, timeout=_or_nil(DURATION), reason=_may(STR, "unknown")),
    _rpc("amm_handler", _C, _CLIENT, method=_need(_one_of("start", "stop", "run_once", "running"))),
    _rpc(
        "set_restrictions",
        _R,
        _CLIENT,
        worker=_need(_map_of(KEY, _nullable(WORKERS))),
    ),
    _rpc("set_resources", _R, _BOTH, worker=_need(WORKER), resources=_or_nil(RESOURCES)),
    # Relayed to workers and nannies.
    _rpc(
        "broadcast",
        _C,
        _CLIENT,
        msg=_need(MAP),
        workers=_or_nil(WORKERS),
        hosts=_or_nil(STRS),
        nanny=_may(FLAG, False),
        on_error=_may(_one_of("raise", "return", "return_pickle", "ignore"), "raise"),
    ),
    _rpc("proxy", _C, _BOTH, worker=_need(WORKER), msg=_need(MAP)),
    _rpc("call_stack", _C, _CLIENT, keys=_or_nil(KEYS)),
    _rpc(
        "profile",
        _C,
        _CLIENT,
        workers=_or_nil(WORKERS),
        scheduler=_may(FLAG, False),
        server=_may(FLAG, False),
        merge_workers=_may(FLAG, True),
        start=_or_nil(NUMBER),
        stop=_or_nil(NUMBER),
        key=_or_nil(KEY),
    ),
    _rpc(
        "worker_logs",
        _C,
        _CLIENT,
        n=_or_nil(INT),
        workers=_or_nil(WORKERS),
        nanny=_may(FLAG, False),
    ),
    # Metadata, logs, diagnostics.
    _rpc("get_metadata", _C, _BOTH, keys=_need(ARRAY), default=_may(ANY)),
    _rpc("set_metadata", _C, _BOTH, keys=_need(ARRAY), value=_may(ANY)),
    _rpc("get_task_status", _R, _CLIENT, keys=_need(KEYS)),
    _rpc(
        "get_task_stream",
        _C,
        _CLIENT,
        start=_or_nil(DURATION),
        stop=_or_nil(DURATION),
        count=_or_nil(INT),
        start_index=_or_nil(INT),
    ),
    _rpc("get_task_stream_index", _C, _CLIENT),
    _rpc("start_task_metadata", _R, _CLIENT, name=_need(STR)),
    _rpc("stop_task_metadata", _R, _CLIENT, name=_or_nil(STR)),
    _rpc("get_task_prefix_states", _R, _CLIENT),
    _rpc(
        "get_logs", _C, _CLIENT, start=_may(NUMBER, 0), n=_or_nil(INT), timestamps=_may(FLAG, False)
    ),
    _rpc("logs", _C, _CLIENT, start=_may(NUMBER, 0), n=_or_nil(INT), timestamps=_may(FLAG, False)),
    _rpc("log_event", _C, _BOTH | _NANNY, topic=_need(TOPIC), msg=_need(ANY)),
    _rpc("events", _C, _CLIENT, topic=_or_nil(STR)),
    _rpc("get_story", _R, _CLIENT, keys_or_stimuli=_need(ARRAY)),
    _rpc("get_cluster_state", _R, _CLIENT, exclude=_need(ARRAY)),
    _rpc("get_runspec", _R, _CLIENT, key=_need(KEY)),
    _rpc("get_error_cause", _R, _CLIENT, keys=_may(KEYS, ())),
    # Announced: answered with the name of what is missing.
    _rpc("dump_cluster_state_to_url", _R, _CLIENT, _DUMP),
    _rpc("benchmark_hardware", _R, _CLIENT, _BENCHMARK),
    _rpc("performance_report", _C, _CLIENT, _REPORT),
    _rpc("run_function", _C, _CLIENT, f"run_on_scheduler: {_CODE}"),
    _rpc("feed", _C, _CLIENT, f"progress bars and dashboards over feed: {_CODE}"),
    _rpc("register_scheduler_plugin", _C, _CLIENT, f"scheduler plugins: {_CODE}"),
    _rpc("unregister_scheduler_plugin", _C, _CLIENT, f"scheduler plugins: {_CODE}"),
    _rpc("register_worker_plugin", _C, _CLIENT, _WORKER_PLUGIN),
    _rpc("unregister_worker_plugin", _C, _CLIENT, _WORKER_PLUGIN),
    _rpc("register_nanny_plugin", _C, _CLIENT, _NANNY_PLUGIN),
    _rpc("unregister_nanny_plugin", _C, _CLIENT, _NANNY_PLUGIN),
    _rpc("memory_sampler_start", _R, _CLIENT, _SAMPLER),
    _rpc("memory_sampler_stop", _R, _CLIENT, _SAMPLER),
    *(
        _rpc(f"semaphore_{verb}", _C, _BOTH, _SEMAPHORE)
        for verb in ("register", "acquire", "release", "value", "refresh_leases", "close")
    ),
    *(_rpc(f"multi_lock_{verb}", _C, _BOTH, _MULTI_LOCK) for verb in ("acquire", "release")),
    *(_rpc(f"event_{verb}", _C, _BOTH, _EVENT) for verb in ("wait", "set", "clear", "is_set")),
    *(_rpc(f"queue_{verb}", _C, _BOTH, _QUEUE) for verb in ("create", "put", "get", "qsize")),
    *(_rpc(f"variable_{verb}", _C, _BOTH, _VARIABLE) for verb in ("set", "get")),
    *(_rpc(f"publish_{verb}", _C, _BOTH, _PUBLISH) for verb in ("put", "get", "list", "delete")),
    *(
        _rpc(f"shuffle_{verb}", _C, _WORKER, _SHUFFLE)
        for verb in ("get_or_create", "get", "restrict_task", "barrier")
    ),
)

_CLIENT_STREAM_ROWS: Final = (
    _from_client(
        "update-graph",
        _E,
        expr_ser=_need(PAYLOAD),
        keys=_need(KEYS),
        internal_priority=_or_nil(_map_of(KEY, NUMBER)),
        submitting_task=_or_nil(KEY),
        fifo_timeout=_may(DURATION, 0),
        actors=_or_nil(_either(FLAG, KEYS)),
        code=_may(ANY, ()),
        annotations=_may(ANY),
        span_metadata=_may(ANY),
        user_priority=_may(_either(NUMBER, MAP), 0),
        stimulus_id=_or_nil(STR),
    ),
    _from_client("client-releases-keys", _E, keys=_need(KEYS), stimulus_id=_or_nil(STR)),
    _from_client("heartbeat-client", _E),
    _from_client("subscribe-topic", _E, topic=_need(STR)),
    _from_client("unsubscribe-topic", _E, topic=_need(STR)),
    _from_client("close-client", _E, stimulus_id=_or_nil(STR)),
    _from_client("close-stream", _E),
    _from_client("client-desires-keys", _C, keys=_need(KEYS)),
    _from_client(
        "cancel-keys",
        _C,
        keys=_need(KEYS),
        force=_may(FLAG, False),
        reason=_or_nil(STR),
        msg=_or_nil(STR),
    ),
    _from_client("report-key", _C, key=_need(KEY)),
    _from_client("update-data", _R, who_has=_need(WHO_HAS), nbytes=_need(NBYTES)),
    _from_client("log-event", _R, topic=_need(TOPIC), msg=_need(ANY)),
    _from_client("queue-future-release", _C, _QUEUE),
    _from_client("queue_release", _R, _QUEUE),
    _from_client("variable-future-received-confirm", _C, _VARIABLE),
    _from_client("variable_delete", _R, _VARIABLE),
    _from_client("publish_flush_batched_send", _C, _PUBLISH),
)

_WORKER_STREAM_ROWS: Final = (
    _from_worker("worker-status-change", _E, status=_need(STATUS), stimulus_id=_need(STR)),
    _from_worker(
        "task-finished",
        _E,
        key=_need(KEY),
        run_id=_need(INT),
        nbytes=_need(_nullable(INT)),
        type=_need(_nullable(_either(BYTES, PAYLOAD))),
        typename=_need(STR),
        metadata=_need(_nullable(MAP)),
        thread=_or_nil(INT),
        startstops=_need(ARRAY),
        status=_need(STR),
        stimulus_id=_need(STR),
    ),
    _from_worker(
        "task-erred",
        _E,
        key=_need(KEY),
        run_id=_need(INT),
        exception=_need(ERROR),
        traceback=_need(_nullable(ERROR)),
        exception_text=_need(STR),
        traceback_text=_need(STR),
        thread=_or_nil(INT),
        startstops=_need(ARRAY),
        status=_need(STR),
        stimulus_id=_need(STR),
    ),
    _from_worker("release-worker-data", _E, key=_need(KEY), stimulus_id=_need(STR)),
    _from_worker("add-keys", _E, keys=_need(KEYS), stimulus_id=_need(STR)),
    _from_worker(
        "long-running",
        _C,
        key=_need(KEY),
        run_id=_need(INT),
        compute_duration=_need(_nullable(NUMBER)),
        stimulus_id=_need(STR),
    ),
    _from_worker("reschedule", _C, key=_need(KEY), stimulus_id=_need(STR)),
    _from_worker(
        "steal-response",
        _C,
        key=_need(KEY),
        state=_need(_nullable(STR)),
        stimulus_id=_need(STR),
    ),
    _from_worker("request-refresh-who-has", _C, keys=_need(KEYS), stimulus_id=_need(STR)),
    _from_worker("log-event", _C, topic=_need(TOPIC), msg=_need(ANY)),
    _from_worker("keep-alive", _E),
    _from_worker("close-stream", _E),
)

_TO_CLIENT_ROWS: Final = (
    _to_client("stream-start", _E, warning=_may(STR), error=_may(STR)),
    _to_client("key-in-memory", _E, key=_need(KEY), type=_may(ANY), workers=_may(STRS)),
    _to_client(
        "task-erred",
        _E,
        key=_need(KEY),
        exception=_need(ERROR),
        traceback=_need(_nullable(ERROR)),
    ),
    _to_client("lost-data", _C, key=_need(KEY)),
    _to_client("task-retried", _C, key=_need(KEY)),
    _to_client(
        "cancelled-keys",
        _E,
        keys=_need(KEYS),
        reason=_may(_nullable(STR)),
        msg=_may(_nullable(STR)),
    ),
    _to_client("restart", _C),
    _to_client("event", _C, topic=_need(STR), event=_need(ARRAY)),
    _to_client("adjust-heartbeat-interval", _E, interval=_need(NUMBER)),
    _to_client("stream-closed", _C),
    _to_client("close", _R),
    _to_client("error", _R, exception=_need(ERROR)),
)

_TO_WORKER_ROWS: Final = (
    _to_worker(
        "compute-task",
        _E,
        key=_need(KEY),
        run_id=_need(INT),
        priority=_need(_array_of(NUMBER)),
        who_has=_need(WHO_HAS),
        nbytes=_need(NBYTES),
        run_spec=_need(PAYLOAD),
        resource_restrictions=_need(_nullable(RESOURCES)),
        actor=_need(FLAG),
        annotations=_need(MAP),
        span_id=_need(_nullable(STR)),
        stimulus_id=_need(STR),
    ),
    _to_worker("free-keys", _E, keys=_need(KEYS), stimulus_id=_need(STR)),
    _to_worker("remove-replicas", _C, keys=_need(KEYS), stimulus_id=_need(STR)),
    _to_worker(
        "acquire-replicas",
        _C,
        who_has=_need(WHO_HAS),
        nbytes=_need(NBYTES),
        stimulus_id=_need(STR),
    ),
    _to_worker("steal-request", _C, key=_need(KEY), stimulus_id=_need(STR)),
    _to_worker("refresh-who-has", _C, who_has=_need(WHO_HAS), stimulus_id=_need(STR)),
    _to_worker("worker-status-change", _C, status=_need(STATUS), stimulus_id=_need(STR)),
    _to_worker("remove-worker", _C, worker=_need(STR), stimulus_id=_need(STR)),
    _to_worker(
        "close",
        _E,
        reason=_may(STR),
        timeout=_may(NUMBER),
        executor_wait=_may(FLAG),
        nanny=_may(FLAG),
    ),
    _to_worker("close-stream", _R),
    _to_worker("cancel-compute", _R, key=_need(KEY), stimulus_id=_need(STR)),
    _to_worker("shuffle-fail", _C, shuffle_id=_need(STR), run_id=_need(INT), message=_need(STR)),
)

_CODE_FIELDS: Final[_FieldMap] = {
    "function": _need(BYTES),
    "args": _may(ANY),
    "kwargs": _may(ANY),
    "wait": _may(FLAG, True),
}

_WORKER_RPC_ROWS: Final = (
    _worker_rpc("get_data", _E, keys=_need(KEYS), who=_may(_nullable(STR))),
    _worker_rpc("update_data", _C, data=_need(DATA), stimulus_id=_may(_nullable(STR))),
    _worker_rpc("gather", _C, who_has=_need(WHO_HAS)),
    _worker_rpc("free_keys", _C, keys=_need(KEYS), stimulus_id=_need(STR)),
    _worker_rpc("run", _C, **_CODE_FIELDS),
    _worker_rpc("run_coroutine", _C, **_CODE_FIELDS),
    _worker_rpc(
        "plugin-add", _C, plugin=_need(BYTES), name=_may(_nullable(STR)), catch_errors=_may(FLAG)
    ),
    _worker_rpc("plugin-remove", _C, name=_need(STR)),
    _worker_rpc(
        "actor_execute",
        _C,
        actor=_need(KEY),
        function=_need(STR),
        args=_need(ARRAY),
        kwargs=_may(_nullable(MAP)),
    ),
    _worker_rpc("actor_attribute", _C, actor=_need(KEY), attribute=_need(STR)),
    _worker_rpc("versions", _C, packages=_may(_nullable(STRS))),
    _worker_rpc(
        "profile",
        _C,
        start=_may(_nullable(NUMBER)),
        stop=_may(_nullable(NUMBER)),
        key=_may(_nullable(KEY)),
        server=_may(FLAG),
    ),
    _worker_rpc(
        "profile_metadata", _C, start=_may(_nullable(NUMBER)), stop=_may(_nullable(NUMBER))
    ),
    _worker_rpc("call_stack", _C, keys=_may(_nullable(KEYS))),
    _worker_rpc("get_logs", _C, start=_may(NUMBER), n=_may(_nullable(INT)), timestamps=_may(FLAG)),
    _worker_rpc("get_story", _R, keys_or_stimuli=_need(ARRAY)),
    _worker_rpc("dump_state", _R, exclude=_may(ARRAY)),
    _worker_rpc("identity", _R),
    _worker_rpc("ping", _R),
    _worker_rpc("echo", _R, data=_may(ANY)),
    _worker_rpc("get_monitor_info", _R, recent=_may(FLAG), start=_may(INT)),
    _worker_rpc("keys", _R),
    _worker_rpc(
        "upload_file",
        _R,
        filename=_need(STR),
        data=_need(_either(STR, BYTES)),
        load=_may(FLAG),
    ),
    _worker_rpc("benchmark_disk", _R),
    _worker_rpc("benchmark_memory", _R),
    _worker_rpc("benchmark_network", _R, address=_need(STR)),
    _worker_rpc("connection_stream", _R),
    _worker_rpc("shuffle_receive", _C, shuffle_id=_need(STR), run_id=_need(INT), data=_need(ANY)),
    _worker_rpc("shuffle_inputs_done", _C, shuffle_id=_need(STR), run_id=_need(INT)),
    _worker_rpc(
        "terminate",
        _R,
        timeout=_may(NUMBER),
        executor_wait=_may(FLAG),
        nanny=_may(FLAG),
        reason=_may(STR),
    ),
)

_NANNY_RPC_ROWS: Final = (
    _nanny_rpc("kill", _C, reason=_may(STR), timeout=_may(NUMBER)),
    _nanny_rpc("run", _C, **_CODE_FIELDS),
    _nanny_rpc("plugin_add", _C, plugin=_need(BYTES), name=_may(_nullable(STR))),
    _nanny_rpc("plugin_remove", _C, name=_need(STR)),
    _nanny_rpc("get_logs", _C, start=_may(NUMBER), n=_may(_nullable(INT)), timestamps=_may(FLAG)),
    _nanny_rpc("restart", _R, timeout=_may(NUMBER), reason=_may(STR)),
    _nanny_rpc("instantiate", _R),
    _nanny_rpc("terminate", _R, timeout=_may(NUMBER), reason=_may(STR)),
    _nanny_rpc("close_gracefully", _R, reason=_may(STR)),
    _nanny_rpc("identity", _R),
    _nanny_rpc("echo", _R, data=_may(ANY)),
    _nanny_rpc("dump_state", _R, exclude=_may(ARRAY)),
    _nanny_rpc("connection_stream", _R),
)

TABLE: Final[tuple[Row, ...]] = (
    *_SCHEDULER_RPC_ROWS,
    *_CLIENT_STREAM_ROWS,
    *_WORKER_STREAM_ROWS,
    *_TO_CLIENT_ROWS,
    *_TO_WORKER_ROWS,
    *_WORKER_RPC_ROWS,
    *_NANNY_RPC_ROWS,
)


def _index(table: tuple[Row, ...]) -> dict[Channel, dict[str, Row]]:
    rows: dict[Channel, dict[str, Row]] = {channel: {} for channel in Channel}
    for row in table:
        if row.name in rows[row.channel]:
            raise ValueError(f"two rows for {row.name!r} on {row.channel.value!r}")
        rows[row.channel][row.name] = row
    return rows


ROWS: Final[Mapping[Channel, Mapping[str, Row]]] = _index(TABLE)
