"""The pump: events into the engine, effects out to peers.

Owns the scheduler machine, its sink, the clock that events are stamped with and the end of a
turn: all events of one turn of the loop are handled before anything is sent, then each peer gets
one write. An exception out of the engine is a programming error and is never swallowed: it is
counted, written to the log with the story of what it touched, and the books are checked; if they
do not hold any more, the process ends. Called by peers, handlers and timers of the server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from cython_ext.cluster import EngineSettings
from cython_ext.entities import Task, Worker
from cython_ext.events import Event, MessageRejected
from cython_ext.outbound import Outbox, WireSink
from cython_ext.transitions import SchedulerMachine
from distributed_core.server.failures import make_exception

__all__ = ["Pump"]

logger = logging.getLogger(__name__)

_MAX_LOGGED_RECORDS = 40

# Events between two flushes from which on the scheduler counts as busy.
_BUSY_EVENTS = 8


class Pump:
    """Feeds one scheduler machine.

    :param outbox_limit_bytes: what a peer may leave unread before its connection is cut.
    :param batch_interval: seconds between two rounds of writing under load; 0 for none.
    :param on_broken: called with a text when the books cannot be trusted any more.
    """

    def __init__(
        self,
        settings: EngineSettings,
        outbox_limit_bytes: int,
        batch_interval: float,
        on_broken: Callable[[str], None],
    ) -> None:
        self.sink = WireSink()
        self.machine = SchedulerMachine(settings, self.sink, make_exception)
        self.state = self.machine.state
        self.transition_errors = 0
        self.slow_peers_cut = 0
        self.last_flush = 0.0
        self._validate_turns = settings.validate == "turn"
        self._strict = settings.validate != "off"
        self._outbox_limit_bytes = outbox_limit_bytes
        self._batch_interval = batch_interval
        self._on_broken = on_broken
        self._is_due = False
        self._flushed_events = 0
        self._events_before = 0
        self._next_id = 0
        self._loop = asyncio.get_running_loop()

    # Into the engine.

    def stimulus(self, cause: str) -> str:
        """A stimulus id that no other event of this process has."""
        self._next_id += 1
        return f"{cause}-{self._next_id}"

    def handle(self, event: Event) -> Any:
        """Apply an event; its effects are sent at the end of the turn."""
        if not self._is_due:
            self._schedule_flush()
        try:
            return self.machine.handle(event)
        except Exception as exc:  # noqa: BLE001 - R1: counted, logged, repaired or fatal
            self._engine_failed(event, exc)
            return None

    def tell(
        self, event: Callable[..., Event], cause: str, stimulus_id: str | None = None, **fields: Any
    ) -> Any:
        """Make an event of a class, stamp it, and handle it."""
        return self.handle(event(time.time(), stimulus_id or self.stimulus(cause), **fields))

    def _engine_failed(self, event: Event, exc: Exception) -> None:
        self.transition_errors += 1
        names = _names_of(event)
        story = self.machine.journal.story(names)[-_MAX_LOGGED_RECORDS:]
        logger.critical(
            "engine error in %r (%s); story: %s",
            event,
            event.stimulus_id,
            story,
            exc_info=exc,
            extra={"stimulus_id": event.stimulus_id},
        )
        if self._strict:
            self._on_broken(f"engine error under validation: {exc!r} in {event!r}")
            return
        try:
            self.machine.recover()
            worker = getattr(event, "worker", None)
            if worker is not None and not isinstance(event, MessageRejected):
                # Whoever waits for what this message said must not wait for ever.
                self.machine.handle(
                    MessageRejected(
                        event.now,
                        event.stimulus_id,
                        worker=worker,
                        client_id=None,
                        keys=[key for key in names if key in self.state.tasks],
                        reason=f"internal error: {exc!r}",
                    )
                )
            broken = self.check_books()
        except Exception as again:
            logger.critical("the repair failed", exc_info=again)
            broken = [repr(again)]
        if broken:
            self._on_broken("the books do not hold: " + "; ".join(broken[:10]))

    def check_books(self) -> list[str]:
        """Recount everything. O(tasks); for after an error, and for operators.

        :returns: what does not hold, in words.
        """
        from cython_ext.invariants import check

        return list(check(self.machine))

    # Out to peers.

    def outbox(self, connection: Any) -> Outbox:
        """An outbox whose content goes to ``connection`` at the end of each turn."""
        return self.sink.outbox(connection)

    def send(self, outbox: Outbox | None, message: dict[str, Any]) -> None:
        """Queue a stream message behind all that was queued before."""
        if outbox is None:
            return
        outbox.append_message(message)
        if not self._is_due:
            self._schedule_flush()

    def _schedule_flush(self) -> None:
        """Have ``flush`` called: at the end of this turn, or under load a bit later.

        When the last flush followed many events, what comes within the interval after it is
        sent together: peers are woken up less often. A lone message never waits.
        """
        self._is_due = True
        wait = self.last_flush + self._batch_interval - self._loop.time()
        if wait <= 0 or self._flushed_events < _BUSY_EVENTS:
            self._loop.call_soon(self.flush)
        else:
            self._loop.call_later(wait, self.flush)

    def flush(self) -> None:
        """One write per peer."""
        self._is_due = False
        if self._validate_turns:
            self.machine.check_turn()
        self._flushed_events = self.machine.n_events - self._events_before
        self._events_before = self.machine.n_events
        for outbox in self.sink.take_dirty():
            connection = outbox.attached
            if connection is None or connection.is_closed:
                outbox.clear()
                continue
            connection.write_pieces(outbox.take())
            if connection.buffered_bytes > self._outbox_limit_bytes:
                self.slow_peers_cut += 1
                logger.error(
                    "%s does not read: %d bytes wait for it; cutting its connection",
                    connection.peer_address,
                    connection.buffered_bytes,
                    extra={"peer": connection.peer_address},
                )
                connection.abort(ConnectionError("the peer does not read what it is sent"))
        self.last_flush = self._loop.time()

    # What handlers ask of the books.

    def workers_named(self, names: Iterable[Any] | None) -> list[Worker]:
        """The workers by address or name; all for None; unknown ones are left out."""
        workers = self.state.workers
        if names is None:
            return list(workers.values())
        if isinstance(names, (str, int, float)):
            names = [names]
        found: dict[Worker, None] = {}
        for name in names:
            worker = workers.get(name) or self.state.workers_by_name.get(name)
            if worker is not None:
                found[worker] = None
        return list(found)

    def task(self, key: Any) -> Task | None:
        """The record of ``key``, if there is one."""
        found: Task | None = self.state.tasks.get(key)
        return found


def _names_of(event: Event) -> set[Any]:
    names: set[Any] = {event.stimulus_id}
    for field in ("key", "address", "client_id"):
        value = getattr(event, field, None)
        if value is not None:
            names.add(value)
    keys = getattr(event, "keys", None)
    if keys is not None and len(keys) <= 100:
        names.update(keys)
    return names
