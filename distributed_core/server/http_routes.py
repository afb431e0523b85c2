"""The paths of the dashboard address: metrics, health, facts as JSON, stories, and the status page.

Owns what each path answers and who may change something. Reads the engine's books; the one change
it can ask for is to retire workers, which the server carries out. No handler costs O(tasks), but
``/json/counts.json`` while there are few.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from distributed_core.metrics.counters import MetricsSource
from distributed_core.metrics.exporter import CONTENT_TYPE, Exporter
from distributed_core.protocol.ops import is_key
from distributed_core.server.adaptive import adaptive_target, workers_to_close
from distributed_core.server.http import (
    HttpError,
    Request,
    Response,
    Route,
    json_response,
    text_response,
)
from distributed_core.server.http_status import StatusPage

__all__ = ["HttpSource", "RouteSettings", "make_routes", "parse_keys"]

_MAX_KEY_CHARACTERS: Final = 10_000
_MAX_TASKS_COUNTED: Final = 20_000


class HttpSource(MetricsSource, Protocol):
    """What the handlers ask of the server, in addition to what the exporter reads."""

    @property
    def is_ready(self) -> bool:
        """Whether clients and workers are served."""

    def problems(self) -> Sequence[str]:
        """Why the scheduler should be restarted, in words; empty if all is well.

        For example: an invariant is broken, or the materializer cannot be started. The lag of the
        event loop is looked at besides.
        """

    def identity(self, n_workers: int = -1) -> Mapping[str, Any]:
        """As the operation ``identity`` answers."""

    def check_idle(self) -> float | None:
        """Since when there has been no work, in seconds since 1970; None if there is some."""

    def retire_workers(self, addresses: list[str]) -> Awaitable[Mapping[str, Any]]:
        """Retire and close workers; facts about those retired, by address.

        Unknown addresses are left out.
        """

    def explain(self, key: Any) -> Sequence[str]:
        """Sentences that say what a task waits for, or became of it.

        :raises KeyError: there is no such task.
        """


@dataclass(frozen=True, slots=True)
class RouteSettings:
    """Which paths there are, and for whom."""

    version: str
    prefix: str = ""
    namespace: str = "dask"
    max_prefix_labels: int = 50
    dashboard: bool = True
    """Whether ``/status`` shows anything."""
    api: bool = False
    """Whether ``/api/v1`` exists."""
    allow_anonymous_api: bool = False
    """Whether other machines may change something too."""


def make_routes(source: HttpSource, settings: RouteSettings) -> list[Route]:
    """All routes, for ``HttpServer``."""
    pages = _Pages(source, settings)
    routes = [
        Route("/", pages.root),
        Route("/status", pages.status),
        Route("/metrics", pages.metrics),
        Route("/health", pages.health),
        Route("/ready", pages.ready),
        Route("/json/counts.json", pages.counts),
        Route("/json/identity.json", pages.identity),
        Route("/story", pages.story),
        Route("/explain", pages.explain),
    ]
    if settings.api:
        routes += [
            Route("/api/v1", pages.api),
            Route("/api/v1/get_workers", pages.get_workers),
            Route("/api/v1/retire_workers", pages.retire_workers, ("POST",)),
            Route("/api/v1/check_idle", pages.check_idle),
            Route("/api/v1/adaptive_target", pages.adaptive_target),
        ]
    return routes


class _Pages:
    """The handlers."""

    def __init__(self, source: HttpSource, settings: RouteSettings) -> None:
        self._source = source
        self._settings = settings
        prefix = settings.prefix.strip("/")
        self._prefix = f"/{prefix}" if prefix else ""
        self._status_page = StatusPage(source, settings.version, self._prefix)
        self._exporter = Exporter(
            source,
            version=settings.version,
            adaptive_target=self._target,
            namespace=settings.namespace,
            max_prefix_labels=settings.max_prefix_labels,
        )

    def _target(self) -> int:
        return adaptive_target(self._source.machine)

    # For people.

    def root(self, request: Request) -> Response:
        location = f"{self._prefix}/status"
        return Response(302, f"see {location}\n".encode(), headers=(("Location", location),))

    def status(self, request: Request) -> Response:
        if not self._settings.dashboard:
            # Probes that ask for this page must find the scheduler alive.
            return text_response("the status page is turned off (setting http.dashboard)")
        return Response(200, self._status_page.render(), "text/html; charset=utf-8")

    def story(self, request: Request) -> Response:
        texts = _texts(request, "key")
        names = {name for text in texts for name in parse_keys(text)}
        records = self._source.machine.journal.story(names)
        if _wants_json(request):
            fields = ("key", "start", "finish", "stimulus_id", "time", "where", "note")
            return json_response(
                {
                    "keys": texts,
                    "records": [dict(zip(fields, record, strict=True)) for record in records],
                }
            )
        if not records:
            return text_response(f"nothing is recorded of {', '.join(texts)}")
        return text_response("\n".join(map(_story_line, records)))

    def explain(self, request: Request) -> Response:
        text = _texts(request, "key")[0]
        tasks = self._source.machine.state.tasks
        key = next((key for key in parse_keys(text) if key in tasks), text)
        try:
            lines = list(self._source.explain(key))
        except KeyError:
            text = f"there is no task {text!r}; it may have been forgotten, see /story"
            if _wants_json(request):
                return json_response({"error": text}, 404)
            return text_response(text, 404)
        if _wants_json(request):
            return json_response({"key": key, "lines": lines})
        return text_response("\n".join(lines))

    # For machines.

    async def metrics(self, request: Request) -> Response:
        await self._exporter.warm()
        return Response(200, self._exporter.render(), CONTENT_TYPE)

    def health(self, request: Request) -> Response:
        problems = list(self._source.problems())
        lag = self._source.loop_lag.problem()
        if lag is not None:
            problems.append(lag)
        if problems:
            return text_response("\n".join(problems), 503)
        # Exactly what Dask answers, without a line end.
        return Response(200, b"ok")

    def ready(self, request: Request) -> Response:
        if not self._source.is_ready:
            return text_response("the scheduler does not serve clients and workers now", 503)
        return Response(200, b"ok")

    def counts(self, request: Request) -> Response:
        state = self._source.machine.state
        tasks = state.task_counts
        workers = state.workers.values()
        waited_for = None
        if len(state.tasks) <= _MAX_TASKS_COUNTED:
            waited_for = sum(task.n_waiters > 0 for task in state.tasks.values())
        return json_response(
            {
                "bytes": sum(worker.nbytes for worker in workers),
                "clients": sum(client.peer is not None for client in state.clients.values()),
                "cores": state.total_nthreads,
                "erred": tasks["erred"],
                "hosts": len(state.hosts),
                "idle": state.n_idle,
                "memory": sum(worker.n_replicas for worker in workers),
                "processing": tasks["processing"],
                "released": tasks["released"],
                "saturated": state.n_saturated,
                "tasks": len(state.tasks),
                "unrunnable": tasks["no-worker"],
                "waiting": tasks["waiting"],
                "waiting_data": waited_for,
                "workers": len(state.workers),
                "desired_workers": self._target(),
            }
        )

    def identity(self, request: Request) -> Response:
        text = request.first("n_workers")
        if text is None:
            return json_response(self._source.identity())
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise HttpError(400, f"n_workers must be a number from 0, got {text[:100]!r}")
        return json_response(self._source.identity(int(text)))

    def api(self, request: Request) -> Response:
        return Response(200, b"API V1")

    def get_workers(self, request: Request) -> Response:
        workers = self._source.machine.state.workers
        return json_response(
            {
                "num_workers": len(workers),
                "workers": [
                    {"name": worker.name, "address": worker.address} for worker in workers.values()
                ],
            }
        )

    def check_idle(self, request: Request) -> Response:
        return json_response({"idle_since": self._source.check_idle()})

    def adaptive_target(self, request: Request) -> Response:
        return json_response({"workers": self._target()})

    async def retire_workers(self, request: Request) -> Response:
        if not (self._settings.allow_anonymous_api or request.is_local):
            text = "only this machine may do that, unless http.allow-anonymous-api is set"
            return json_response({"Error": text}, 403)
        try:
            addresses = self._workers_named(request.body)
        except HttpError as exc:
            return json_response({"Error": exc.text}, exc.status)
        return json_response(await self._source.retire_workers(addresses))

    def _workers_named(self, body: bytes) -> list[str]:
        """Addresses in the body of a request to retire workers; raises HttpError."""
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as exc:
            raise HttpError(400, f"the body is not JSON: {exc}") from exc
        if not isinstance(fields, dict) or not fields.keys() & {"n", "workers"}:
            raise HttpError(400, 'the body must be {"n": number} or {"workers": [address, ...]}')
        n = fields.get("n", 0)
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise HttpError(400, f"n must be a number from 0, got {json.dumps(n)[:100]}")
        if n:
            return workers_to_close(self._source.machine, n=n)
        workers = fields.get("workers", [])
        if not isinstance(workers, list) or not all(isinstance(name, str) for name in workers):
            raise HttpError(400, "workers must be a list of addresses")
        return workers


def parse_keys(text: str) -> list[Any]:
    """The keys that a text may mean, the text itself first.

    A text that looks like a tuple, ``('x-1', 0)`` or ``["x-1", 0]``, is also that tuple, and one
    that looks like a number also that number.
    """
    keys: list[Any] = [text]
    stripped = text.strip()
    if len(stripped) > _MAX_KEY_CHARACTERS:
        return keys
    is_tuple = stripped[:1] + stripped[-1:] in ("()", "[]")
    if not is_tuple and not stripped.lstrip("-").replace(".", "", 1).isdigit():
        return keys
    try:
        value = ast.literal_eval(stripped)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return keys
    key = _tupled(value)
    if is_key(key):
        keys.append(key)
    return keys


def _tupled(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_tupled(item) for item in value)
    return value


def _texts(request: Request, name: str) -> list[str]:
    texts = [text for text in request.query.get(name, ()) if text]
    if not texts:
        raise HttpError(400, f"name one: {request.path}?{name}=...")
    return texts


def _wants_json(request: Request) -> bool:
    chosen = request.first("format")
    if chosen is None:
        return "application/json" in request.headers.get("accept", "")
    if chosen not in ("json", "text"):
        raise HttpError(400, f"format must be json or text, got {chosen[:100]!r}")
    return chosen == "json"


def _story_line(record: tuple[Any, ...]) -> str:
    key, start, finish, stimulus_id, seconds, where, note = record
    moment = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
    what = f"{start} -> {finish}" if note is None else f"{note} ({start})"
    at = f" at {where}" if where is not None else ""
    return f"{moment}  {key!r}  {what}{at}  [{stimulus_id}]"
