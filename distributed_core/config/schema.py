"""Every setting with its type: frozen sections, built once at start-up and handed to constructors.

Owns the names and kinds of our settings; their defaults and explanations are in
``config/defaults.yaml``, and a test keeps the two alike. Never reads a file, the environment or a
clock. Called by ``loader``, which fills it, and by every part that takes settings.

A field annotated with a kind is a setting, spelled with dashes in YAML (``worker_ttl`` is
``worker-ttl``). A field without one is derived from settings by the loader.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, NamedTuple, TypeVar, get_args

from distributed_core.config.kinds import (
    Boolean,
    Bytes,
    Choice,
    DashboardAddress,
    Duration,
    FilePath,
    Integer,
    IntegerList,
    Kind,
    LogFormat,
    MappingOf,
    Number,
    Optional,
    PathPrefix,
    Pem,
    Ports,
    Rate,
    Text,
    TextList,
)

__all__ = [
    "SECTIONS",
    "SETTINGS",
    "ClientSettings",
    "CommSettings",
    "Config",
    "ConfigError",
    "Endpoint",
    "EngineSettings",
    "GcSettings",
    "HttpSettings",
    "HttpTlsSettings",
    "LoggingSettings",
    "MaterializerSettings",
    "MetricsSettings",
    "Origin",
    "RebalanceSettings",
    "SchedulerSettings",
    "SecuritySettings",
    "TlsSettings",
    "build_section",
]

Seconds = Annotated[float, Duration()]
Interval = Annotated[float, Duration(above_zero=True)]
OptionalSeconds = Annotated[float | None, Optional(Duration(), off_at_zero=True)]
ByteCount = Annotated[int, Bytes()]
ByteLimit = Annotated[int, Bytes(minimum=1024)]
Switch = Annotated[bool, Boolean()]
Count = Annotated[int, Integer(0)]
Positive = Annotated[int, Integer(1)]
Fraction = Annotated[float, Number()]
OptionalText = Annotated[str | None, Optional(Text())]
OptionalPath = Annotated[str | None, Optional(FilePath())]
OptionalPem = Annotated[str | None, Optional(Pem())]
OptionalWords = Annotated[tuple[str, ...] | None, Optional(TextList("a word or a list of words"))]
Level = Annotated[str, Choice("debug", "info", "warning", "error", "critical")]


class ConfigError(Exception):
    """The configuration cannot be used; the text has one line for each problem."""


class Origin(NamedTuple):
    """Where a value came from."""

    kind: str
    """``default``, ``file``, ``environment``, ``flag``, or ``dask`` for what Dask's own sources
    said."""
    source: str
    """A path, the name of a variable, or a flag."""
    line: int | None = None
    """Line in a file, from 1."""

    @property
    def text(self) -> str:
        """For people: ``path:line``, the variable's name, the flag; ``default`` for a default."""
        if self.kind == "default":
            return "default"
        return self.source if self.line is None else f"{self.source}:{self.line}"


class Endpoint(NamedTuple):
    """Where to listen. An empty host is every interface, IPv4 and IPv6; port 0 is any free one."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class RebalanceSettings:
    """``scheduler.rebalance``: how the ``rebalance`` call chooses what to move."""

    measure: Annotated[str, Choice("process", "optimistic", "managed", "managed_total")]
    sender_min: Fraction
    recipient_max: Fraction
    sender_recipient_gap: Fraction


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """``scheduler``: addresses, timeouts and the choices a scheduler makes."""

    host: OptionalText
    port: Annotated[tuple[int, ...] | None, Optional(Ports())]
    interface: OptionalWords
    protocol: OptionalWords
    contact_address: OptionalText
    scheduler_file: OptionalPath
    pid_file: OptionalPath
    idle_timeout: OptionalSeconds
    no_workers_timeout: OptionalSeconds
    worker_ttl: OptionalSeconds
    worker_heartbeat_interval: Interval
    allowed_failures: Count
    worker_saturation: Annotated[float, Number(ratio=True)]
    bandwidth: Annotated[int, Rate()]
    default_data_size: ByteCount
    unknown_task_duration: Seconds
    default_task_durations: Annotated[Mapping[str, float], MappingOf(Duration(), "task prefix")]
    rootish_taskgroup: Count
    rootish_taskgroup_dependencies: Count
    work_stealing: Switch
    work_stealing_interval: Interval
    placement_candidates: Positive
    events_cleanup_delay: Seconds
    events_max_length: Positive
    restart_timeout: Interval
    shutdown_timeout: Interval
    adaptive_target_duration: Interval
    recent_to_old_time: Seconds
    rebalance: RebalanceSettings
    listen: tuple[Endpoint, ...]
    """Derived: where the wire listens, in the order given; never empty."""
    open_plain: bool
    """Derived: an unencrypted address that other machines can reach was asked for."""


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """``comm.tls``: certificates and limits of encrypted connections."""

    ca_file: OptionalPem
    scheduler_cert: OptionalPem
    scheduler_key: OptionalPem
    ciphers: OptionalText
    min_version: Annotated[str, Choice("1.2", "1.3")]
    max_version: Annotated[str | None, Optional(Choice("1.2", "1.3"))]


@dataclass(frozen=True, slots=True)
class CommSettings:
    """``comm``: connections and the limits that hold before a byte of a message is trusted."""

    default_scheme: Annotated[str, Choice("tcp", "tls")]
    require_encryption: Annotated[bool | None, Optional(Boolean())]
    batch_interval: Seconds
    handshake_timeout: Interval
    connect_timeout: Interval
    tcp_timeout: Interval
    socket_backlog: Positive
    max_connections: Positive
    max_handshake_bytes: ByteLimit
    max_frames: Positive
    max_frame_bytes: ByteLimit
    max_message_bytes: ByteLimit
    outbox_limit_bytes: ByteLimit
    tls: TlsSettings
    encryption_required: bool
    """Derived: ``require_encryption``, or true if it is null and a TLS flag was given."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """``engine``: the state machine's checks and the bounds of its memory."""

    validate: Annotated[str, Choice("off", "turn", "event")]
    journal_length: Positive
    prefix_limit: Positive


@dataclass(frozen=True, slots=True)
class MaterializerSettings:
    """``materializer``: the processes that open submitted graphs."""

    processes: Positive
    timeout: Interval
    memory_limit: Annotated[int | None, Optional(Bytes(), off_at_zero=True)]
    slice_tasks: Positive
    slice_bytes: ByteLimit


@dataclass(frozen=True, slots=True)
class HttpTlsSettings:
    """``http.tls``: HTTPS for the dashboard address."""

    ca_file: OptionalPem
    cert: OptionalPem
    key: OptionalPem


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """``http``: metrics, health and pages on the dashboard address."""

    enabled: Switch
    address: Annotated[tuple[tuple[str, int], ...], DashboardAddress()]
    prefix: Annotated[str, PathPrefix()]
    dashboard: Switch
    api_enabled: Switch
    allow_anonymous_api: Switch
    free_port_if_taken: Switch
    tls: HttpTlsSettings
    listen: tuple[Endpoint, ...]
    """Derived: where HTTP listens; empty if it is not enabled."""


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """``metrics``: names and bounds of what ``/metrics`` shows."""

    namespace: Annotated[str, Text(r"[a-zA-Z_][a-zA-Z0-9_]*", "a metric name prefix")]
    max_prefix_labels: Count
    loop_lag_interval: Interval
    loop_lag_warning: Interval


@dataclass(frozen=True, slots=True)
class LoggingSettings:
    """``logging``: what is written to standard error and kept for ``get_logs``."""

    format: Annotated[str, Choice("text", "json")]
    text_format: Annotated[str, LogFormat()]
    level: Level
    levels: Annotated[Mapping[str, str], MappingOf(Level.__metadata__[0], "logger")]
    rate_limit_interval: Seconds
    ring_length: Positive


@dataclass(frozen=True, slots=True)
class SecuritySettings:
    """``security``: what peers may ask of the scheduler."""

    allow_code_on_scheduler: Switch
    blocked_handlers: Annotated[tuple[str, ...], TextList("a list of operations")]


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """``client``: what connected clients are told."""

    heartbeat_interval: Interval


@dataclass(frozen=True, slots=True)
class GcSettings:
    """``gc``: Python's cycle collector in the scheduler's process."""

    thresholds: Annotated[tuple[int, int, int], IntegerList(3)]
    freeze_on_start: Switch
    idle_collect_interval: OptionalSeconds


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration, and where it came from."""

    scheduler: SchedulerSettings
    comm: CommSettings
    engine: EngineSettings
    materializer: MaterializerSettings
    http: HttpSettings
    metrics: MetricsSettings
    logging: LoggingSettings
    security: SecuritySettings
    client: ClientSettings
    gc: GcSettings
    origins: Mapping[str, Origin]
    """By setting; an entry of a mapping has one of its own (``logging.levels.NAME``)."""
    notes: tuple[str, ...]
    """What an operator should read at level info."""
    warnings: tuple[str, ...]
    """What an operator should read at level warning."""
    unknown_dask_keys: tuple[str, ...]
    """The ``distributed.*`` keys in Dask's sources that neither Dask nor we know."""


_Section = TypeVar("_Section")


def _walk(section: type[Any], prefix: str) -> Iterator[tuple[str, Kind | type[Any]]]:
    for name, hint in section.__annotations__.items():
        path = prefix + name.replace("_", "-")
        kind = get_args(hint)[1] if hasattr(hint, "__metadata__") else None
        if isinstance(kind, Kind):
            yield path, kind
        elif is_dataclass(hint) and isinstance(hint, type):
            yield path, hint
            yield from _walk(hint, path + ".")


_ROWS = dict(_walk(Config, ""))

SETTINGS: Mapping[str, Kind] = {k: v for k, v in _ROWS.items() if isinstance(v, Kind)}
"""The kind of every setting, by its dotted name in YAML spelling, in declaration order."""

SECTIONS: Mapping[str, type[Any]] = {k: v for k, v in _ROWS.items() if not isinstance(v, Kind)}
"""The class of every section, by its dotted name."""


def build_section(
    section: type[_Section], path: str, values: Mapping[str, object], derived: Mapping[str, object]
) -> _Section:
    """Return ``section`` filled from dotted ``values``; derived fields come from ``derived``.

    Raises KeyError for a field that neither of them has.
    """
    arguments: dict[str, Any] = {}
    for field in fields(section):  # type: ignore[arg-type]
        key = f"{path}.{field.name.replace('_', '-')}"
        if key in SECTIONS:
            arguments[field.name] = build_section(SECTIONS[key], key, values, derived)
        else:
            arguments[field.name] = values[key] if key in SETTINGS else derived[key]
    return section(**arguments)
