"""Stories: what the journal remembers of keys, workers, clients and stimulus ids.

Owns the two forms in which stories leave the engine: readable records for operators, and the
tuples that stock clients expect. Reads the journal, changes nothing. Called by the server's
handlers and its HTTP pages.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from cython_ext.transitions import EDGES, SchedulerMachine

__all__ = ["story", "story_tuples"]

_REASONS = {(start, finish): reason for start, finish, _, reason in EDGES}


def story(machine: SchedulerMachine, names: Collection[Any] | None) -> list[dict[str, Any]]:
    """Records that concern ``names``, oldest first, as plain maps.

    :param names: keys, stimulus ids, worker addresses or client ids; None for all.
    :returns: maps with ``key``, ``start``, ``finish``, ``stimulus_id``, ``time`` (seconds),
        ``where`` (worker address or client id), ``note``, and ``reason``: what the edge from
        ``start`` to ``finish`` means. Where both are equal, ``note`` says what happened.
    """
    return [
        {
            "key": key,
            "start": start,
            "finish": finish,
            "stimulus_id": stimulus_id,
            "time": seconds,
            "where": where,
            "note": note,
            "reason": _REASONS.get((start, finish)),
        }
        for key, start, finish, stimulus_id, seconds, where, note in machine.journal.story(names)
    ]


def story_tuples(
    machine: SchedulerMachine, names: Collection[Any] | None
) -> list[tuple[Any, str, str, dict[Any, str], str, float]]:
    """State changes that concern ``names``, oldest first, as stock clients expect them.

    :returns: tuples of key, start, finish, recommendations, stimulus id, time (seconds). The
        recommendations are always empty: here, states follow from facts.
    """
    return [
        (key, start, finish, {}, stimulus_id, seconds)
        for key, start, finish, stimulus_id, seconds, _, _ in machine.journal.story(names)
        if start != finish
    ]
