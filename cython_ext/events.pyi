"""Types of ``cython_ext.events``."""

from typing import Any, ClassVar, final

from cython_ext.entities import Client, Worker

__all__ = [
    "EVENT_CLASSES",
    "ClientConnected",
    "ClientGone",
    "DataPlaced",
    "DataReleased",
    "Event",
    "GraphBegun",
    "GraphEnded",
    "GraphFailed",
    "GraphSliceReady",
    "KeyReportAsked",
    "KeysAdded",
    "KeysCancelled",
    "KeysReleased",
    "KeysRetried",
    "KeysWanted",
    "LongRunning",
    "MessageRejected",
    "ReplicaMissing",
    "ReplicasAsked",
    "ReplicasDropped",
    "RescheduleAsked",
    "ResourcesSet",
    "Restarted",
    "RestrictionsSet",
    "RetirementAborted",
    "RetirementBegun",
    "StealAnswered",
    "TaskErred",
    "TaskFinished",
    "TimePassed",
    "WhoHasAsked",
    "WorkerLost",
    "WorkerRegistered",
    "WorkerStatusChanged",
]

class Event:
    @property
    def kind(self) -> int: ...
    now: float
    stimulus_id: str
    result: Any
    FIELDS: ClassVar[tuple[str, ...]]
    def __init__(self, now: float, stimulus_id: str) -> None: ...

@final
class TaskFinished(Event):
    worker: Worker
    key: Any
    run_id: int
    nbytes: int
    typename: str
    type: bytes
    compute_start: float
    compute_stop: float
    compute_seconds: float
    transfer_seconds: float
    metadata: Any
    thread: Any
    startstops: Any
    has_compute: bool
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        worker: Worker,
        key: Any,
        run_id: int,
        nbytes: int,
        typename: str,
        type: bytes,
        compute_start: float,
        compute_stop: float,
        compute_seconds: float,
        transfer_seconds: float,
        metadata: Any,
        thread: Any,
        startstops: Any,
        has_compute: bool,
    ) -> None: ...

@final
class TaskErred(Event):
    worker: Worker
    key: Any
    run_id: int
    exception: Any
    traceback: Any
    exception_text: str
    traceback_text: str
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        worker: Worker,
        key: Any,
        run_id: int,
        exception: Any,
        traceback: Any,
        exception_text: str,
        traceback_text: str,
    ) -> None: ...

@final
class KeysAdded(Event):
    worker: Worker
    keys: list[Any]
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        worker: Worker,
        keys: list[Any],
    ) -> None: ...

@final
class DataReleased(Event):
    worker: Worker
    key: Any
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        worker: Worker,
        key: Any,
    ) -> None: ...

@final
class LongRunning(Event):
    worker: Worker
    key: Any
    run_id: int
    compute_duration: float
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        worker: Worker,
        key: Any,
        run_id: int,
        compute_duration: float,
    ) -> None: ...

@final
class RescheduleAsked(Event):
    worker: Worker | None
    key: Any
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        worker: Worker | None,
        key: Any,
    ) -> None: ...

@final
class StealAnswered(Event):
    worker: Worker
    key: Any
    state: str | None
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        worker: Worker,
        key: Any,
        state: str | None,
    ) -> None: ...

@final
class WhoHasAsked(Event):
    worker: Worker
    keys: list[Any]
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        worker: Worker,
        keys: list[Any],
    ) -> None: ...

@final
class WorkerRegistered(Event):
    address: str
    name: Any
    host: str
    server_id: str
    nthreads: int
    memory_limit: int
    resources: dict[Any, Any]
    status: str
    info: Any
    peer: Any
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        address: str,
        name: Any,
        host: str,
        server_id: str,
        nthreads: int,
        memory_limit: int,
        resources: dict[Any, Any],
        status: str,
        info: Any,
        peer: Any,
    ) -> None: ...

@final
class WorkerStatusChanged(Event):
    worker: Worker
    status: str
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        worker: Worker,
        status: str,
    ) -> None: ...

@final
class WorkerLost(Event):
    worker: Worker
    expected: bool
    reason: str
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        worker: Worker,
        expected: bool,
        reason: str,
    ) -> None: ...

@final
class ClientConnected(Event):
    client_id: str
    info: Any
    peer: Any
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        client_id: str,
        info: Any,
        peer: Any,
    ) -> None: ...

@final
class ClientGone(Event):
    client: Client
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        client: Client,
    ) -> None: ...

@final
class KeysWanted(Event):
    client_id: str
    keys: list[Any]
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        client_id: str,
        keys: list[Any],
    ) -> None: ...

@final
class KeysReleased(Event):
    client_id: str
    keys: list[Any]
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        client_id: str,
        keys: list[Any],
    ) -> None: ...

@final
class KeysCancelled(Event):
    client_id: str
    keys: list[Any]
    force: bool
    reason: str
    message: str
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        client_id: str,
        keys: list[Any],
        force: bool,
        reason: str,
        message: str,
    ) -> None: ...

@final
class KeyReportAsked(Event):
    client_id: str
    key: Any
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        client_id: str,
        key: Any,
    ) -> None: ...

@final
class KeysRetried(Event):
    client_id: str
    keys: list[Any]
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        client_id: str,
        keys: list[Any],
    ) -> None: ...

@final
class GraphBegun(Event):
    client_id: str
    submission: int
    n_tasks: int
    externals: list[Any]
    wanted_externals: list[Any]
    submitting_task: Any
    fifo_timeout: float
    user_priority: float
    actors: Any
    wanted: list[Any]
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        client_id: str,
        submission: int,
        n_tasks: int,
        externals: list[Any],
        wanted_externals: list[Any],
        submitting_task: Any,
        fifo_timeout: float,
        user_priority: float,
        actors: Any,
        wanted: list[Any],
    ) -> None: ...

@final
class GraphSliceReady(Event):
    submission: int
    start: int
    keys: list[Any]
    dependency_counts: bytes
    dependencies: bytes
    order: bytes
    flags: bytes
    future_dependents: bytes
    new_prefixes: list[Any]
    new_groups: list[Any]
    new_group_prefix: bytes
    group_index: bytes
    new_annotations: list[Any]
    annotation_index: bytes
    run_specs: list[Any]
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        submission: int,
        start: int,
        keys: list[Any],
        dependency_counts: bytes,
        dependencies: bytes,
        order: bytes,
        flags: bytes,
        future_dependents: bytes,
        new_prefixes: list[Any],
        new_groups: list[Any],
        new_group_prefix: bytes,
        group_index: bytes,
        new_annotations: list[Any],
        annotation_index: bytes,
        run_specs: list[Any],
    ) -> None: ...

@final
class GraphEnded(Event):
    submission: int
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        submission: int,
    ) -> None: ...

@final
class GraphFailed(Event):
    submission: int
    client_id: str
    keys: list[Any]
    exception: Any
    traceback: Any
    exception_text: str
    traceback_text: str
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        submission: int,
        client_id: str,
        keys: list[Any],
        exception: Any,
        traceback: Any,
        exception_text: str,
        traceback_text: str,
    ) -> None: ...

@final
class DataPlaced(Event):
    client_id: str | None
    who_has: dict[Any, Any]
    nbytes: dict[Any, Any]
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        client_id: str | None,
        who_has: dict[Any, Any],
        nbytes: dict[Any, Any],
    ) -> None: ...

@final
class ReplicaMissing(Event):
    worker: Worker
    keys: list[Any]
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        worker: Worker,
        keys: list[Any],
    ) -> None: ...

@final
class ReplicasDropped(Event):
    worker: Worker
    keys: list[Any]
    send: bool
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        worker: Worker,
        keys: list[Any],
        send: bool,
    ) -> None: ...

@final
class ReplicasAsked(Event):
    worker: Worker
    keys: list[Any]
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        worker: Worker,
        keys: list[Any],
    ) -> None: ...

@final
class RetirementBegun(Event):
    worker: Worker
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        worker: Worker,
    ) -> None: ...

@final
class RetirementAborted(Event):
    worker: Worker
    status: str
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        worker: Worker,
        status: str,
    ) -> None: ...

@final
class RestrictionsSet(Event):
    workers: dict[Any, Any]
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        workers: dict[Any, Any],
    ) -> None: ...

@final
class ResourcesSet(Event):
    worker: Worker
    resources: dict[Any, Any]
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        worker: Worker,
        resources: dict[Any, Any],
    ) -> None: ...

@final
class MessageRejected(Event):
    worker: Worker | None
    client_id: str | None
    keys: list[Any]
    reason: str
    def __init__(
        self,
        now: float,
        stimulus_id: str,
        *,
        worker: Worker | None,
        client_id: str | None,
        keys: list[Any],
        reason: str,
    ) -> None: ...

@final
class Restarted(Event): ...

@final
class TimePassed(Event): ...

EVENT_CLASSES: tuple[type[Event], ...]
