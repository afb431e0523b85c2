"""The scheduler daemon: builds everything in order, runs it, takes it down in reverse.

Owns the parts, the totals that belong to no part, and the process: signals, files, exit status.
Called by the command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import resource
import signal
import time
import uuid
from functools import cached_property
from typing import Any, ClassVar

import msgpack

from cython_ext.cluster import EngineSettings
from cython_ext.entities import Client, Worker
from cython_ext.events import (
    ClientGone,
    Event,
    KeysReleased,
    TaskFinished,
    TimePassed,
    WorkerLost,
    WorkerStatusChanged,
)
from distributed_core.comm.connection import Connection, Receiver
from distributed_core.comm.dispatch import Dispatcher, DispatchHooks
from distributed_core.comm.errors import CommError
from distributed_core.comm.listener import Listener
from distributed_core.comm.pool import ConnectionPool
from distributed_core.comm.settings import CommSettings, CommStats, Limits
from distributed_core.comm.tls import TlsSettings, client_context, server_context
from distributed_core.config import logs
from distributed_core.config.schema import Config
from distributed_core.materializer.pool import MaterializerPool
from distributed_core.metrics.counters import ServerCounters
from distributed_core.metrics.monitors import GcMonitor, LagMonitor
from distributed_core.protocol.codec import encode
from distributed_core.protocol.ops import Rejection
from distributed_core.protocol.versions import VersionBook
from distributed_core.server.admin_ops import AdminOps
from distributed_core.server.cluster_ops import ClusterOps
from distributed_core.server.data_ops import DataOps
from distributed_core.server.http import HttpServer
from distributed_core.server.insight_ops import InsightOps, TaskStream
from distributed_core.server.peers import ClientPeer, worker_decoder
from distributed_core.server.pump import Pump
from distributed_core.server.registration import Registration
from distributed_core.server.submissions import Submissions
from distributed_core.server.topics import Topics
from distributed_core.server.web import start_http

__all__ = ["SchedulerServer", "StartError", "run"]

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.5
_STATUS_FLUSH_SECONDS = 0.005
# Keys let go in one turn of the loop when a client leaves, about a millisecond.
_FORGET_KEYS = 1000
EXIT_BROKEN = 70
"""Exit status when the books cannot be trusted any more."""


class StartError(Exception):
    """The scheduler cannot start; the text says why."""


class _Hooks(DispatchHooks):
    def __init__(self, server: SchedulerServer) -> None:
        self._server = server

    def on_message(self, connection: Connection, op: str) -> None:
        self._server.counters.received(connection.kind, op)

    def on_handled(self, op: str, seconds: float, is_async: bool) -> None:
        # An asynchronous handler mostly waits; only what holds the loop counts.
        if not is_async:
            self._server.counters.handled(op, seconds)

    def on_rejected(self, connection: Connection, rejection: Rejection) -> None:
        self._server.reject(connection, connection.kind, rejection)

    def on_surplus(self, connection: Connection, op: str, names: list[Any]) -> None:
        self._server.counters.surplus(op)

    def on_error(self, connection: Connection, op: str, exc: Exception) -> None:
        self._server.programming_error(op, exc)

    def on_job_error(self, name: str, exc: Exception) -> None:
        self._server.programming_error(name, exc)


class _Watcher(Receiver):
    """A connection that is told of workers that come and go."""

    __slots__ = ("_connection", "_server")

    def __init__(self, server: SchedulerServer, connection: Connection) -> None:
        self._server = server
        self._connection = connection

    def frames_received(self, frames: list[bytes]) -> None:
        # A watcher has nothing to say; whatever it sends is its goodbye.
        self._connection.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.watchers.pop(self._connection, None)


class SchedulerServer:
    """All parts of a running scheduler.

    Make it inside a running event loop, then ``start``. ``finished`` is done when it has been
    told to stop; ``close`` takes it down.
    """

    HOT_WORKER_OPS: ClassVar[tuple[str, ...]] = (
        "task-finished",
        "add-keys",
        "release-worker-data",
        "long-running",
        "reschedule",
        "steal-response",
        "request-refresh-who-has",
    )
    """Operations that the compiled decoder turns into events by itself."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.id = f"Scheduler-{uuid.uuid4()}"
        self.started = time.time()
        self.loop = asyncio.get_running_loop()
        self.finished: asyncio.Future[str] = self.loop.create_future()
        self.exit_status = 0
        self.default_scheme = config.comm.default_scheme
        self.log_ring = logs.setup(config.logging)

        self.counters = ServerCounters(
            unknown_config_keys=len(config.unknown_dask_keys),
            plain_listener=config.scheduler.open_plain,
        )
        self.loop_lag = LagMonitor(
            config.metrics.loop_lag_interval, config.metrics.loop_lag_warning
        )
        self.gc_monitor = GcMonitor()

        self.pump = Pump(
            _engine_settings(config),
            config.comm.outbox_limit_bytes,
            config.comm.batch_interval,
            self._broken,
        )
        self.comm_settings = _comm_settings(config)
        self.comm_stats = CommStats()
        tls = _tls_settings(config)
        self._server_tls = None if tls is None else server_context(tls)
        self.pool = ConnectionPool(
            self.comm_settings, self.comm_stats, None if tls is None else client_context(tls)
        )
        self.materializer = MaterializerPool(
            config.materializer.processes,
            config.materializer.timeout,
            config.materializer.memory_limit,
        )
        self.submissions = Submissions(self.pump, self.materializer, config.materializer)
        self.topics = Topics(
            config.scheduler.events_max_length,
            config.scheduler.events_cleanup_delay,
            self._send_to_client,
        )
        self.task_stream = TaskStream()
        self.clients: dict[str, ClientPeer] = {}
        self.leaving: dict[str, Client] = {}
        self.worker_decoder = worker_decoder(self, self.pump.handle)
        self.watchers: dict[Connection, list[Any]] = {}
        self.registration = Registration(self)
        self.data = DataOps(self)
        self.admin = AdminOps(self)
        self.cluster = ClusterOps(self)
        handlers = {
            **self.registration.handlers(),
            **self.data.handlers(),
            **self.cluster.handlers(),
            **self.admin.handlers(),
            **InsightOps(self).handlers(),
        }
        for op in config.security.blocked_handlers:
            handlers.pop(op, None)
        self.dispatcher = Dispatcher(handlers, _Hooks(self))
        self.listeners: list[Listener] = []
        self.http: HttpServer | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._worker_change: asyncio.Event = asyncio.Event()
        self._idle_since: float | None = self.started
        self._last_assigned = -1
        self._collected_at = self.loop.time()
        self._watch_due = False
        self._files: dict[str, str] = {}
        self.total_memory = 0
        self._problem = ""

    @cached_property
    def versions(self) -> VersionBook:
        """Versions of peers; made late, since our own take long to look up."""
        return VersionBook()

    # Life.

    async def start(self) -> None:
        """Listen and begin to serve.

        :raises CommError: an address cannot be listened on.
        :raises StartError: a file cannot be written.
        """
        for endpoint in self.config.scheduler.listen:
            listener = Listener(
                self.comm_settings,
                self.comm_stats,
                self.dispatcher.accept,
                self._server_tls if endpoint.scheme == "tls" else None,
            )
            await listener.start(endpoint.host or None, endpoint.port)
            self.listeners.append(listener)
        await self.materializer.start()
        await self._start_http()
        self._write_files()
        self.gc_monitor.start()
        self.loop.call_soon(self._finish_start)
        logger.info("scheduler at %s", self.address, extra={"address": self.address})

    def _finish_start(self) -> None:
        """What can wait until we listen, but should not wait for the first peer."""
        assert self.versions
        _set_up_collector(self.config)
        self.loop_lag.start()
        self._tick()

    async def _start_http(self) -> None:
        if self.config.http.listen:
            self.http = await start_http(self)

    async def close(self) -> None:
        """Tell the peers, close every connection, end the materializer, remove our files."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self.loop_lag.stop()
        self.gc_monitor.stop()
        for listener in self.listeners:
            listener.stop()
        for worker in list(self.pump.state.workers.values()):
            self.close_worker(worker, "scheduler-close")
            self.pump.send(worker.peer, {"op": "close-stream"})
        self.pump.flush()
        await self.dispatcher.close()
        await self.materializer.close()
        await self.pool.close()
        for listener in self.listeners:
            await listener.close()
        if self.http is not None:
            await self.http.close()
        self.remove_files()

    def stop(self, reason: str, status: int = 0) -> None:
        """Ask for the end; ``run`` then closes."""
        if not self.finished.done():
            self.exit_status = status
            self.finished.set_result(reason)

    def problems(self) -> list[str]:
        """Why the process should be restarted, in words; empty if all is well."""
        found = [self._problem, self.materializer.problem]
        return [text for text in found if text]

    def _broken(self, text: str) -> None:
        self._problem = text
        logger.critical("stopping: %s", text)
        self.stop(text, EXIT_BROKEN)

    # Addresses and files.

    @property
    def address(self) -> str:
        """The address that peers are told."""
        contact = self.config.scheduler.contact_address
        if contact:
            return contact
        for listener in self.listeners:
            return _reachable(str(listener.addresses[0]))
        return ""

    def _write_files(self) -> None:
        settings = self.config.scheduler
        if settings.pid_file:
            self._write_file(settings.pid_file, f"{os.getpid()}\n")
        if settings.scheduler_file:
            text = json.dumps(self.identity(-1), indent=2, default=str)
            self._write_file(settings.scheduler_file, text)

    def _write_file(self, path: str, text: str) -> None:
        try:
            _write_atomically(path, text)
        except OSError as exc:
            raise StartError(f"cannot write {path}: {exc.strerror or exc}") from exc
        self._files[path] = text

    def remove_files(self) -> None:
        """Remove the files that we wrote, unless another scheduler has written them since."""
        while self._files:
            path, text = self._files.popitem()
            try:
                with open(path, encoding="utf-8") as file:
                    is_ours = file.read() == text
                if is_ours:
                    os.remove(path)
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as exc:
                logger.warning("%s is left behind: %s", path, exc)

    @property
    def services(self) -> dict[str, int]:
        """Name to port of what else listens."""
        return {} if self.http is None else {"dashboard": self.http.port}

    def identity(self, n_workers: int) -> dict[str, Any]:
        """What peers and tools are told of this scheduler; at most ``n_workers`` (-1: all)."""
        state = self.pump.state
        workers: dict[str, Any] = {}
        if n_workers != 0:
            for address, worker in state.workers.items():
                if 0 <= n_workers <= len(workers):
                    break
                if worker.info is not None:
                    workers[address] = self.worker_identity(worker)
        return {
            "type": "Scheduler",
            "id": self.id,
            "address": self.address,
            "services": self.services,
            "started": self.started,
            "n_workers": len(state.workers),
            "total_threads": state.total_nthreads,
            "total_memory": self.total_memory,
            "workers": workers,
        }

    def worker_identity(self, worker: Worker) -> dict[str, Any]:
        """What peers and tools are told of a worker."""
        info = worker.info
        return {
            "type": "Worker",
            "id": worker.name,
            "host": worker.host,
            "resources": worker.resources,
            "local_directory": info.local_directory,
            "name": worker.name,
            "nthreads": worker.nthreads,
            "memory_limit": worker.memory_limit,
            "last_seen": info.last_seen,
            "services": info.services,
            "metrics": info.metrics,
            "status": worker.status,
            "nanny": info.nanny,
            **info.extra,
        }

    # Intervals that peers are told, in seconds.

    def worker_heartbeat_interval(self) -> float:
        """Rarer with more workers, so that heartbeats stay near 200 a second."""
        n = len(self.pump.state.workers)
        base = self.config.scheduler.worker_heartbeat_interval
        if n <= 10:
            return base
        if n < 50:
            return 2 * base
        if n < 200:
            return 4 * base
        return n / 200 + 2 * base

    def client_heartbeat_interval(self) -> float:
        """Rarer with more clients."""
        n = len(self.clients)
        base = self.config.client.heartbeat_interval
        return base * max(1.0, n / 10)

    # Peers.

    def _send_to_client(self, client_id: str, message: dict[str, Any]) -> None:
        peer = self.clients.get(client_id)
        if peer is not None:
            self.pump.send(peer.outbox, message)

    def client_gone(self, peer: ClientPeer, why: str) -> None:
        """A client's session ended."""
        client = peer.client
        if self.clients.get(peer.client_id) is peer:
            del self.clients[peer.client_id]
        self.topics.forget(peer.client_id)
        self.counters.clients_removed += 1
        logger.info("client %s %s", client.id, why, extra={"client": client.id})
        self.topics.log(["all", client.id], {"action": "remove-client", "client": client.id})
        self.leaving[client.id] = client
        self._forget_some(client)

    def _forget_some(self, client: Client) -> None:
        """Let go what a client that left wanted, in turns of its own if that is much."""
        if self.leaving.get(client.id) is not client:
            return
        if client.n_wants <= _FORGET_KEYS:
            self.forget_client(client.id)
            return
        self.pump.tell(
            KeysReleased,
            "client-gone",
            client_id=client.id,
            keys=client.first_wants(_FORGET_KEYS),
        )
        self.loop.call_soon(self._forget_some, client)

    def forget_client(self, client_id: str) -> None:
        """Let go at once what is left of a client that left, if any is."""
        client = self.leaving.pop(client_id, None)
        if client is not None:
            self.pump.tell(ClientGone, "client-gone", client=client)

    def worker_lost(self, worker: Worker, expected: bool, reason: str) -> None:
        """A worker is gone; the second time this is said changes nothing."""
        if worker.status == "closed":
            return
        address = worker.address
        n_processing = worker.n_processing
        self.pump.tell(WorkerLost, "worker-lost", worker=worker, expected=expected, reason=reason)
        self.versions.remove_worker(address)
        self.pool.close_address(address)
        self.counters.workers_removed += 1
        self.total_memory -= worker.memory_limit
        logger.log(
            logging.INFO if expected else logging.WARNING,
            "worker %s (%s) is gone: %s",
            worker.name,
            address,
            reason,
            extra={"worker": address},
        )
        self.topics.log(
            ["all", address],
            {
                "action": "remove-worker",
                "worker": address,
                "processing-tasks": n_processing,
                "expected": expected,
                "reason": reason,
            },
        )
        self.tell_status_watchers(["remove", address])
        self._workers_changed()

    def set_worker_status(self, worker: Worker, status: str) -> None:
        """Apply a status that a worker reported."""
        self.pump.tell(WorkerStatusChanged, "worker-status-change", worker=worker, status=status)

    def close_worker(self, worker: Worker, reason: str) -> None:
        """Order a worker to stop, its nanny included."""
        if worker.status != "closed":
            worker.info.peer.closing_expected = True
            self.pump.send(worker.peer, {"op": "close", "reason": reason})

    def _workers_changed(self) -> None:
        self._worker_change.set()
        self._worker_change = asyncio.Event()

    async def wait_for_worker_change(self) -> None:
        """Wait until a worker came, went or changed its status; at most half a second."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TICK_SECONDS):
                await self._worker_change.wait()

    def watch_workers(self, connection: Connection) -> None:
        """Tell ``connection`` of workers that come and go."""
        connection.kind = "watcher"
        self.watchers[connection] = []
        connection.start_stream(_Watcher(self, connection))

    def tell_status_watchers(self, message: list[Any]) -> None:
        """Tell those who watch the workers; batched."""
        self._workers_changed()
        if not self.watchers:
            return
        for pending in self.watchers.values():
            pending.append(message)
        if not self._watch_due:
            self._watch_due = True
            self.loop.call_later(_STATUS_FLUSH_SECONDS, self._flush_watchers)

    def _flush_watchers(self) -> None:
        self._watch_due = False
        for connection, pending in self.watchers.items():
            if pending:
                connection.write(encode(pending))
                pending.clear()

    # Counting.

    def reject(self, connection: Connection, peer: str, rejection: Rejection) -> None:
        """A message does not fit: count it and say so in the log."""
        self.counters.reject(peer, rejection.op, rejection.reason)
        logger.warning(
            "message of %s %s rejected: %s",
            peer,
            connection.peer_address,
            rejection.text,
            extra={"peer": connection.peer_address, "fault": f"rejected {rejection.reason}"},
        )

    def programming_error(self, op: str, exc: BaseException) -> None:
        """A handler raised what it did not mean to."""
        self.counters.handler_failed(op)
        logger.critical("error in the handler of %s", op, exc_info=exc)

    def keep_task_stream(self) -> None:
        """From now on keep the runs that end, for ``get_task_stream``."""
        if not self.task_stream.is_kept:
            self.task_stream.is_kept = True
            self.worker_decoder = worker_decoder(self, self._record_and_handle)
            self.worker_decoder.keep_startstops = True

    def _record_and_handle(self, event: Event) -> None:
        self.pump.handle(event)
        if isinstance(event, TaskFinished):
            self.task_stream.add(
                {
                    "key": event.key,
                    "worker": event.worker.address,
                    "status": "OK",
                    "nbytes": event.nbytes,
                    "type": event.type,
                    "typename": event.typename,
                    "metadata": event.metadata or {},
                    "thread": event.thread,
                    "startstops": msgpack.unpackb(event.startstops or b"\x90"),
                    "stimulus_id": event.stimulus_id,
                }
            )

    # Time.

    def _tick(self) -> None:
        self._timers[:] = [self.loop.call_later(_TICK_SECONDS, self._tick)]
        self.pump.tell(TimePassed, "tick")
        self._expire_workers()
        suspects = self.pump.machine.suspects
        while suspects:
            self.dispatcher.run("ask_holders", self.data.ask_holders(suspects.popitem()[0]))
        idle_timeout = self.config.scheduler.idle_timeout
        idle_since = self.check_idle()
        if idle_since is not None:
            self._collect_garbage()
        if (
            idle_timeout is not None
            and idle_since is not None
            and time.time() - idle_since > idle_timeout
        ):
            logger.info("idle for %.0f s: stopping", time.time() - idle_since)
            self.stop("scheduler-idle-timeout")

    def _collect_garbage(self) -> None:
        """Collect while nothing else is to do, so that it need not be done under load."""
        interval = self.config.gc.idle_collect_interval
        now = self.loop.time()
        if interval is not None and now - self._collected_at >= interval:
            self._collected_at = now
            # What has lived longer is mostly here to stay.
            gc.collect(1)

    def check_idle(self) -> float | None:
        """Since when nothing was to do (seconds since the epoch), or None."""
        counts = self.pump.state.task_counts
        busy = (
            counts["processing"]
            or counts["queued"]
            or counts["waiting"]
            or counts["no-worker"]
            or self.pump.machine.n_assigned != self._last_assigned
        )
        self._last_assigned = self.pump.machine.n_assigned
        if busy:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.time()
        return self._idle_since

    def _expire_workers(self) -> None:
        ttl = self.config.scheduler.worker_ttl
        if ttl is None:
            return
        limit = time.time() - max(ttl, 10 * self.worker_heartbeat_interval())
        for worker in list(self.pump.state.workers.values()):
            if worker.info is not None and worker.info.last_seen < limit:
                logger.error(
                    "worker %s sent no heartbeat for %.0f s",
                    worker.address,
                    time.time() - worker.info.last_seen,
                    extra={"worker": worker.address},
                )
                worker.info.peer.end("sent no heartbeat in time", expected=False)


# Configuration to the parts' own settings.


def _engine_settings(config: Config) -> EngineSettings:
    scheduler = config.scheduler
    return EngineSettings(
        allowed_failures=scheduler.allowed_failures,
        worker_saturation=scheduler.worker_saturation,
        bandwidth=float(scheduler.bandwidth),
        default_data_size=scheduler.default_data_size,
        unknown_task_duration=scheduler.unknown_task_duration,
        default_task_durations=dict(scheduler.default_task_durations),
        rootish_taskgroup=scheduler.rootish_taskgroup,
        rootish_taskgroup_dependencies=scheduler.rootish_taskgroup_dependencies,
        placement_candidates=scheduler.placement_candidates,
        no_workers_timeout=scheduler.no_workers_timeout,
        journal_length=config.engine.journal_length,
        prefix_limit=config.engine.prefix_limit,
        validate=config.engine.validate,
        # Never repeats across restarts: seconds since the epoch above 2**30 runs a second.
        first_run_id=int(time.time()) << 30,
    )


def _comm_settings(config: Config) -> CommSettings:
    comm = config.comm
    return CommSettings(
        handshake_limits=Limits(16, comm.max_handshake_bytes, comm.max_handshake_bytes),
        limits=Limits(comm.max_frames, comm.max_frame_bytes, comm.max_message_bytes),
        handshake_timeout_seconds=comm.handshake_timeout,
        connect_timeout_seconds=comm.connect_timeout,
        tcp_timeout_seconds=comm.tcp_timeout,
        backlog=comm.socket_backlog,
        max_connections=comm.max_connections,
        require_encryption=comm.encryption_required,
    )


def _tls_settings(config: Config) -> TlsSettings | None:
    tls = config.comm.tls
    if tls.ca_file is None or tls.scheduler_cert is None:
        return None
    return TlsSettings(
        ca=tls.ca_file,
        cert=tls.scheduler_cert,
        key=tls.scheduler_key,
        ciphers=tls.ciphers,
        min_version=tls.min_version,
        max_version=tls.max_version,
    )


def _reachable(address: str) -> str:
    """An address that listens everywhere is told as one that can be connected to."""
    for everywhere, local in (("//0.0.0.0:", "//127.0.0.1:"), ("//[::]:", "//[::1]:")):
        if everywhere in address:
            return address.replace(everywhere, local)
    return address


def _write_atomically(path: str, text: str) -> None:
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)


# The process.


def _raise_file_limit() -> None:
    """As many connections as the system allows, up to half of the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard // 2 if hard != resource.RLIM_INFINITY else 65_536
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError) as exc:
            logger.info("the limit of open files stays at %d: %s", soft, exc)


def _set_up_collector(config: Config) -> None:
    gc.set_threshold(*config.gc.thresholds)
    if config.gc.freeze_on_start:
        # What start-up made lives as long as the process: no collection need visit it.
        gc.freeze()


async def _serve(config: Config) -> int:
    server = SchedulerServer(config)
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if server.finished.done():
            logger.warning("signal %d again: stopping at once", number)
            os._exit(128 + number)
        logger.info("signal %d: stopping", number)
        server.stop(f"signal-{number}")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await server.start()
    except (CommError, StartError) as exc:
        logger.error("%s", exc)
        await server.close()
        return 1
    reason = await server.finished
    logger.info("scheduler closes: %s", reason)
    try:
        async with asyncio.timeout(config.scheduler.shutdown_timeout):
            await server.close()
    except TimeoutError:
        logger.error("closing took longer than %s s", config.scheduler.shutdown_timeout)
        server.remove_files()
        return server.exit_status or 1
    return server.exit_status


def run(config: Config) -> int:
    """Run a scheduler until it is told to stop; the exit status of the process."""
    import uvloop

    _raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config))
