"""Graphs on their way from a client through the materializer into the engine.

Owns the order of one client's messages around its submissions: what arrives while a graph is
being opened waits behind it. Never opens a byte of a graph. Called by the client's stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from cython_ext.events import GraphBegun, GraphEnded, GraphFailed, GraphSliceReady
from distributed_core.config.schema import MaterializerSettings
from distributed_core.config.units import parse_duration
from distributed_core.materializer.parts import (
    GraphBegin,
    GraphEnd,
    GraphSlice,
    Opaque,
    Packed,
    Submission,
)
from distributed_core.materializer.parts import GraphFailed as FailedPart
from distributed_core.materializer.pool import MaterializerPool
from distributed_core.protocol.codec import Pickled, Serialized, decode
from distributed_core.protocol.exceptions import builtin_error
from distributed_core.server.pump import Pump

__all__ = ["Submissions"]

logger = logging.getLogger(__name__)


class Submissions:
    """Runs graphs through the pool and feeds the parts to the engine."""

    def __init__(self, pump: Pump, pool: MaterializerPool, settings: MaterializerSettings) -> None:
        self._pump = pump
        self._pool = pool
        self._settings = settings
        self._next_id = 0

    async def run(self, client_id: str, message: Mapping[str, Any]) -> None:
        """Take one ``update-graph`` message to its end: inserted, refused or failed.

        Cancelled when the client goes: the engine gives up what was inserted by then.
        """
        pump = self._pump
        self._next_id += 1
        number = self._next_id
        stimulus_id = message["stimulus_id"] or pump.stimulus("update-graph")
        keys = message["keys"]
        wanted = keys if isinstance(keys, Packed) else list(keys)
        try:
            submission = self._submission(message, wanted)
            fifo_timeout = parse_duration(message["fifo_timeout"])
        except (ValueError, TypeError) as exc:
            self._fail(number, stimulus_id, client_id, wanted, FailedPart("unpickle", str(exc)))
            return
        n_tasks = 0
        parts = self._pool.submit(submission)
        try:
            async for part in parts:
                if isinstance(part, GraphSlice):
                    pump.handle(_slice_event(number, stimulus_id, part))
                    # Each slice is one turn: others get theirs in between.
                    if part.start + len(part.keys) < n_tasks:
                        await asyncio.sleep(0)
                elif isinstance(part, GraphBegin):
                    n_tasks = part.n_tasks
                    begun = GraphBegun(
                        time.time(),
                        stimulus_id,
                        client_id=client_id,
                        submission=number,
                        n_tasks=n_tasks,
                        externals=list(part.externals),
                        wanted_externals=list(part.wanted_externals),
                        submitting_task=message["submitting_task"],
                        fifo_timeout=fifo_timeout,
                        user_priority=_user_priority(message["user_priority"]),
                        actors=_actors(message["actors"]),
                        wanted=_opened(wanted) if part.externals else [],
                    )
                    missing = pump.handle(begun)
                    if missing:
                        logger.warning(
                            "graph of %s refused: it depends on keys that nobody knows: %s",
                            client_id,
                            missing[:10],
                            extra={"stimulus_id": stimulus_id, "fault": "lost dependencies"},
                        )
                        return
                    for problem in part.span.get("problems", ()):
                        logger.info("graph of %s: %s", client_id, problem)
                elif isinstance(part, GraphEnd):
                    pump.tell(GraphEnded, "", stimulus_id, submission=number)
                else:
                    self._fail(number, stimulus_id, client_id, wanted, part)
        finally:
            await parts.aclose()  # type: ignore[attr-defined]

    def _submission(self, message: Mapping[str, Any], wanted: list[Any] | Packed) -> Submission:
        expression = message["expr_ser"]
        return Submission(
            expr_header=expression.header,
            expr_frames=expression.frames,
            keys=wanted,
            annotations=_closed(message["annotations"]),
            code=_closed(message["code"]),
            span_metadata=_closed(message["span_metadata"]),
            internal_priority=message["internal_priority"],
            slice_tasks=self._settings.slice_tasks,
            slice_bytes=self._settings.slice_bytes,
        )

    def _fail(
        self,
        number: int,
        stimulus_id: str,
        client_id: str,
        wanted: list[Any] | Packed,
        part: FailedPart,
    ) -> None:
        logger.warning(
            "graph of %s failed (%s): %s",
            client_id,
            part.kind,
            part.message,
            extra={"stimulus_id": stimulus_id, "fault": f"graph {part.kind}"},
        )
        self._pump.tell(
            GraphFailed,
            "",
            stimulus_id,
            submission=number,
            client_id=client_id,
            keys=_opened(wanted),
            exception=part.exception or builtin_error("RuntimeError", part.message).data,
            traceback=part.traceback or None,
            exception_text=part.message,
            traceback_text=part.traceback_text,
        )


def _opened(wanted: list[Any] | Packed) -> list[Any]:
    """The keys; a long list stays packed until somebody needs it."""
    return list(decode([wanted.data])) if isinstance(wanted, Packed) else wanted


def _closed(value: Any) -> Any:
    """Opaque payloads in the materializer's own class."""
    if isinstance(value, (Pickled, Serialized)):
        return Opaque(value.header, value.frames)
    return value


def _user_priority(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _actors(value: Any) -> Any:
    if isinstance(value, (list, tuple, set, frozenset)):
        return set(value)
    return bool(value)


def _slice_event(number: int, stimulus_id: str, part: GraphSlice) -> GraphSliceReady:
    return GraphSliceReady(
        time.time(),
        stimulus_id,
        submission=number,
        start=part.start,
        keys=list(part.keys),
        dependency_counts=part.dependency_counts,
        dependencies=part.dependencies,
        order=part.order,
        flags=part.flags,
        future_dependents=part.future_dependents,
        new_prefixes=list(part.new_prefixes),
        new_groups=list(part.new_groups),
        new_group_prefix=part.new_group_prefix,
        group_index=part.group_index,
        new_annotations=list(part.new_annotations),
        annotation_index=part.annotation_index,
        run_specs=list(part.run_specs),
    )
