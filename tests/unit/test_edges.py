"""The table of declared edges, as a table."""

from __future__ import annotations

from collections import Counter

from cython_ext.states import TASK_STATES, WORKER_STATUSES
from cython_ext.transitions import EDGES, SchedulerMachine


def test_each_edge_is_declared_once_with_a_handler_and_a_reason() -> None:
    assert max(Counter((start, finish) for start, finish, _, _ in EDGES).values()) == 1
    for start, finish, handler, reason in EDGES:
        assert start in TASK_STATES
        assert finish in TASK_STATES
        assert start != finish
        assert handler.startswith("on_")
        assert reason
        assert reason[0].islower()
        assert not reason.endswith(".")


def test_each_state_can_be_reached_and_left() -> None:
    assert {finish for _, finish, _, _ in EDGES} == set(TASK_STATES)
    assert {start for start, _, _, _ in EDGES} == set(TASK_STATES) - {"forgotten"}


def test_every_task_can_be_forgotten_and_run_from_any_state() -> None:
    following: dict[str, set[str]] = {}
    for start, finish, _, _ in EDGES:
        following.setdefault(start, set()).add(finish)
    for state in following:
        seen = {state}
        stack = [state]
        while stack:
            for finish in following.get(stack.pop(), ()):
                if finish not in seen:
                    seen.add(finish)
                    stack.append(finish)
        assert {"forgotten", "processing"} <= seen


def test_names_are_those_of_the_wire() -> None:
    assert TASK_STATES == (
        "released",
        "waiting",
        "no-worker",
        "queued",
        "processing",
        "memory",
        "erred",
        "forgotten",
    )
    assert "closing_gracefully" in WORKER_STATUSES


def test_a_machine_cannot_be_made_without_its_parts() -> None:
    for arguments in ((None, None), ()):
        try:
            SchedulerMachine(*arguments)  # type: ignore[arg-type, call-arg]
        except TypeError:
            continue
        raise AssertionError(arguments)
