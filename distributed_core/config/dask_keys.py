"""Which keys of a Dask configuration mean something to us: one table.

Owns the names that Dask's scheduler knows and their translation. Never reads a file. Called by
``loader``; ``reference`` prints the table.

A row says: the key, our setting, and how a value becomes ours. Keys that Dask knows and we have
no use for are listed too, so that a misspelled key can be told from one that is not for us.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from distributed_core.config.units import parse_duration

__all__ = ["IGNORED", "IGNORED_TREES", "MAPPED", "REFUSED", "RENAMED", "Mapped", "Skip"]


class Skip(Exception):
    """A value that says nothing to us, like a list without the one entry that we look for."""


class Mapped(NamedTuple):
    """Our setting for a key of Dask's, and the translation of its value (None: as it is)."""

    setting: str
    convert: Callable[[object], object] | None = None


def _milliseconds(raw: object) -> object:
    """A bare number counts milliseconds for these keys."""
    return f"{parse_duration(raw, default_unit='ms')!r}s"


def _validate(raw: object) -> object:
    """Dask has a switch where we have a choice."""
    if isinstance(raw, bool):
        return "event" if raw else "off"
    raise ValueError(f"expected true or false, got {raw!r}")


def _api_route(raw: object) -> object:
    """Dask's API is on as soon as its module is in the list of routes; ours is by default."""
    if not isinstance(raw, list | tuple):
        raise ValueError(f"expected a list of modules, got {raw!r}")
    if "distributed.http.scheduler.api" not in raw:
        raise Skip
    return True


def _bounded(raw: object) -> object:
    """Dask reads null as no limit; we keep our own limit then."""
    if raw is None:
        raise Skip
    return raw


def _words(raw: object) -> object:
    return [] if raw is None else raw


MAPPED: Mapping[str, Mapped] = {
    "distributed.scheduler.allowed-failures": Mapped("scheduler.allowed-failures"),
    "distributed.scheduler.bandwidth": Mapped("scheduler.bandwidth"),
    "distributed.scheduler.blocked-handlers": Mapped("security.blocked-handlers", _words),
    "distributed.scheduler.contact-address": Mapped("scheduler.contact-address"),
    "distributed.scheduler.dashboard.tls.ca-file": Mapped("http.tls.ca-file"),
    "distributed.scheduler.dashboard.tls.cert": Mapped("http.tls.cert"),
    "distributed.scheduler.dashboard.tls.key": Mapped("http.tls.key"),
    "distributed.scheduler.default-data-size": Mapped("scheduler.default-data-size"),
    "distributed.scheduler.default-task-durations": Mapped("scheduler.default-task-durations"),
    "distributed.scheduler.events-cleanup-delay": Mapped("scheduler.events-cleanup-delay"),
    "distributed.scheduler.http.routes": Mapped("http.api-enabled", _api_route),
    "distributed.scheduler.idle-timeout": Mapped("scheduler.idle-timeout"),
    "distributed.scheduler.no-workers-timeout": Mapped("scheduler.no-workers-timeout"),
    "distributed.scheduler.rootish-taskgroup": Mapped("scheduler.rootish-taskgroup"),
    "distributed.scheduler.rootish-taskgroup-dependencies": Mapped(
        "scheduler.rootish-taskgroup-dependencies"
    ),
    "distributed.scheduler.unknown-task-duration": Mapped("scheduler.unknown-task-duration"),
    "distributed.scheduler.validate": Mapped("engine.validate", _validate),
    "distributed.scheduler.work-stealing": Mapped("scheduler.work-stealing"),
    "distributed.scheduler.work-stealing-interval": Mapped(
        "scheduler.work-stealing-interval", _milliseconds
    ),
    "distributed.scheduler.worker-saturation": Mapped("scheduler.worker-saturation"),
    "distributed.scheduler.worker-ttl": Mapped("scheduler.worker-ttl"),
    "distributed.worker.memory.recent-to-old-time": Mapped("scheduler.recent-to-old-time"),
    "distributed.worker.memory.rebalance.measure": Mapped("scheduler.rebalance.measure"),
    "distributed.worker.memory.rebalance.sender-min": Mapped("scheduler.rebalance.sender-min"),
    "distributed.worker.memory.rebalance.recipient-max": Mapped(
        "scheduler.rebalance.recipient-max"
    ),
    "distributed.worker.memory.rebalance.sender-recipient-gap": Mapped(
        "scheduler.rebalance.sender-recipient-gap"
    ),
    "distributed.adaptive.target-duration": Mapped("scheduler.adaptive-target-duration"),
    "distributed.comm.default-scheme": Mapped("comm.default-scheme"),
    "distributed.comm.require-encryption": Mapped("comm.require-encryption"),
    "distributed.comm.socket-backlog": Mapped("comm.socket-backlog"),
    "distributed.comm.timeouts.connect": Mapped("comm.connect-timeout"),
    "distributed.comm.timeouts.tcp": Mapped("comm.tcp-timeout"),
    "distributed.comm.tls.ca-file": Mapped("comm.tls.ca-file"),
    "distributed.comm.tls.ciphers": Mapped("comm.tls.ciphers"),
    "distributed.comm.tls.max-version": Mapped("comm.tls.max-version"),
    "distributed.comm.tls.min-version": Mapped("comm.tls.min-version", _bounded),
    "distributed.comm.tls.scheduler.cert": Mapped("comm.tls.scheduler-cert"),
    "distributed.comm.tls.scheduler.key": Mapped("comm.tls.scheduler-key"),
    "distributed.dashboard.prometheus.namespace": Mapped("metrics.namespace"),
    "distributed.admin.log-format": Mapped("logging.text-format"),
    "distributed.admin.log-length": Mapped("logging.ring-length", _bounded),
    "distributed.admin.low-level-log-length": Mapped("scheduler.events-max-length", _bounded),
    "distributed.admin.tick.interval": Mapped("metrics.loop-lag-interval", _milliseconds),
    "distributed.admin.tick.limit": Mapped("metrics.loop-lag-warning", _milliseconds),
}
"""Keys that we follow."""

REFUSED: Mapping[str, str] = {
    "distributed.scheduler.preload": (
        "modules cannot be loaded into the scheduler yet: preloads arrive in a later release. "
        "Remove them, or override with DASK_DISTRIBUTED__SCHEDULER__PRELOAD='[]'"
    ),
}
"""Keys that must be empty, with the reason: to ignore them would start another scheduler than the
one asked for."""

IGNORED: frozenset[str] = frozenset(
    f"distributed.{section}.{name}"
    for section, names in {
        "scheduler": (
            "preload-argv reuse-broadcast-comm allowed-imports pickle "
            "dashboard.status.task-stream-length dashboard.tasks.task-stream-length "
            "locks.lease-validation-interval locks.lease-timeout active-memory-manager.start "
            "active-memory-manager.interval active-memory-manager.measure "
            "active-memory-manager.policies"
        ),
        "worker": (
            "blocked-handlers multiprocessing-method use-file-locking "
            "transfer.message-bytes-limit connections.outgoing connections.incoming preload "
            "preload-argv daemon validate lifetime.duration lifetime.stagger lifetime.restart "
            "profile.enabled profile.interval profile.cycle profile.low-level memory.transfer "
            "memory.target memory.spill memory.pause memory.terminate memory.max-spill "
            "memory.spill-compression memory.monitor-interval http.routes"
        ),
        "nanny": "preload preload-argv",
        "client": (
            "direct-to-workers heartbeat scheduler-info-interval security-loader preload "
            "preload-argv"
        ),
        "deploy": "lost-worker-timeout cluster-repr-interval",
        "adaptive": "interval minimum maximum wait-count",
        "comm": (
            "retry.count retry.delay.min retry.delay.max compression shard offload zstd.level "
            "zstd.threads tls.worker.key tls.worker.cert tls.client.key tls.client.cert "
            "websockets.shard"
        ),
        "diagnostics": (
            "nvml cudf computations.max-history computations.nframes computations.ignore-modules "
            "computations.ignore-files erred-tasks.max-history"
        ),
        "p2p": (
            "comm.buffer comm.concurrency comm.message-bytes-limit comm.retry.count "
            "comm.retry.delay.min comm.retry.delay.max storage.buffer storage.disk threads"
        ),
        "dashboard": "link export-tool graph-max-items",
        "admin": (
            "large-graph-warning-threshold tick.cycle max-error-length pdb-on-err event-loop "
            "system-monitor.interval system-monitor.log-length system-monitor.disk "
            "system-monitor.host-cpu system-monitor.gil.enabled system-monitor.gil.interval"
        ),
    }.items()
    for name in names.split()
) | {"distributed.version"}
"""Keys that Dask knows and that change nothing here."""

IGNORED_TREES: frozenset[str] = frozenset(
    {
        "distributed.logging",
        "distributed.logging-file-config",
        "distributed.scheduler.dashboard.bokeh-application",
        "distributed.worker.resources",
        "distributed.nanny.environ",
        "distributed.nanny.pre-spawn-environ",
        "distributed.comm.ucx",
        "distributed.ucx",
        "distributed.rmm",
    }
)
"""Keys whose inner names are free, and that change nothing here."""

RENAMED: Mapping[str, str] = {
    "allowed-failures": "distributed.scheduler.allowed-failures",
    "bandwidth": "distributed.scheduler.bandwidth",
    "connect-timeout": "distributed.comm.timeouts.connect",
    "default-data-size": "distributed.scheduler.default-data-size",
    "default-scheme": "distributed.comm.default-scheme",
    "log-format": "distributed.admin.log-format",
    "log-length": "distributed.admin.log-length",
    "recent-messages-log-length": "distributed.admin.low-level-log-length",
    "socket-backlog": "distributed.comm.socket-backlog",
    "tcp-timeout": "distributed.comm.timeouts.tcp",
    "tick-maximum-delay": "distributed.admin.tick.limit",
    "tick-time": "distributed.admin.tick.interval",
    "transition-log-length": "distributed.admin.low-level-log-length",
    "work-stealing": "distributed.scheduler.work-stealing",
    "worker-ttl": "distributed.scheduler.worker-ttl",
    "distributed.comm.recent-messages-log-length": "distributed.admin.low-level-log-length",
    "distributed.p2p.disk": "distributed.p2p.storage.disk",
    "distributed.scheduler.events-log-length": "distributed.admin.low-level-log-length",
    "distributed.scheduler.transition-log-length": "distributed.admin.low-level-log-length",
}
"""Old names that Dask still reads, and today's."""
