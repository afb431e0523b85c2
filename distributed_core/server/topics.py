"""Event topics: what was logged, and who listens.

Owns the bounded log of each topic and its subscribers. Called by the stream and RPC handlers for
``log-event`` and its relatives, and by the server for its own events.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["Topics"]

# Names come from peers: without a bound, peers that come and go would fill the memory.
_MAX_TOPICS = 1000

Send = Callable[[str, dict[str, Any]], None]


class Topics:
    """All topics.

    :param max_length: events kept for each topic.
    :param cleanup_delay: seconds after which a topic that gets no more events is forgotten.
    :param send: ``(client id, stream message)``, how subscribers are told.
    """

    def __init__(self, max_length: int, cleanup_delay: float, send: Send) -> None:
        self._max_length = max_length
        self._cleanup_delay = cleanup_delay
        self._send = send
        self._events: dict[str, deque[tuple[float, Any]]] = {}
        self._subscribers: dict[str, dict[str, None]] = {}

    def log(self, topics: str | Iterable[str], message: Any) -> None:
        """Keep an event and tell those who listen."""
        now = time.time()
        for topic in [topics] if isinstance(topics, str) else topics:
            events = self._events.pop(topic, None)
            if events is None:
                events = deque(maxlen=self._max_length)
            # Put last: the order of topics is that of their latest events.
            self._events[topic] = events
            events.append((now, message))
            for client_id in self._subscribers.get(topic, ()):
                self._send(client_id, {"op": "event", "topic": topic, "event": (now, message)})
        self._sweep(now)

    def _sweep(self, now: float) -> None:
        while self._events:
            topic, events = next(iter(self._events.items()))
            is_young = now - events[-1][0] < self._cleanup_delay
            if is_young and len(self._events) <= _MAX_TOPICS:
                return
            del self._events[topic]

    def events(self, topic: str | None) -> Any:
        """Events of one topic, or of all by topic."""
        if topic is not None:
            return tuple(self._events.get(topic, ()))
        return {name: tuple(events) for name, events in self._events.items()}

    def subscribe(self, client_id: str, topic: str) -> None:
        """From now on ``client_id`` is told the events of ``topic``."""
        self._subscribers.setdefault(topic, {})[client_id] = None

    def unsubscribe(self, client_id: str, topic: str) -> None:
        """Undo ``subscribe``; unknown pairs are ignored."""
        subscribers = self._subscribers.get(topic)
        if subscribers is not None:
            subscribers.pop(client_id, None)
            if not subscribers:
                del self._subscribers[topic]

    def forget(self, client_id: str) -> None:
        """Drop all subscriptions of a client that is gone."""
        for topic in [name for name, who in self._subscribers.items() if client_id in who]:
            self.unsubscribe(client_id, topic)
