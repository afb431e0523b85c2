"""The checks themselves: they are made, in each mode, and they find what is broken."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cython_ext import invariants
from cython_ext.cluster import EngineSettings
from cython_ext.invariants import check, check_task
from cython_ext.transitions import InvariantBroken
from tests.machine.builders import Rig, chain

MakeRig = Callable[..., Rig]


def break_something(rig: Rig) -> None:
    """Move a worker off the books behind the machine's back."""
    del rig.state.workers_by_name["a"]


def repair(rig: Rig) -> None:
    rig.state.workers_by_name["a"] = rig.at("a")


def test_every_invariant_says_what_breaks_without_it() -> None:
    for invariant in (*invariants.TASK_INVARIANTS, *invariants.MACHINE_INVARIANTS):
        assert (invariant.__doc__ or "").startswith("Else "), invariant


def test_broken_books_end_the_event_under_validation(make_rig: MakeRig) -> None:
    rig = make_rig("a", validate="event")
    break_something(rig)
    with pytest.raises(InvariantBroken, match="not found by its name 'a'") as caught:
        rig.graph({"x": []})
    assert caught.value.broken[0] == "tcp://a:1 is not found by its name 'a'"
    assert "('x', 'released', 'waiting'" in str(caught.value) or "story" in str(caught.value)
    repair(rig)
    rig.machine.recover()
    rig.skip()


def test_broken_books_are_found_at_the_end_of_a_turn(make_rig: MakeRig) -> None:
    rig = make_rig("a", validate="turn")
    break_something(rig)
    rig.graph({"x": []})
    with pytest.raises(InvariantBroken):
        rig.machine.check_turn()
    repair(rig)
    rig.machine.check_turn()
    rig.expect("a compute x")


def test_nothing_is_checked_without_validation(make_rig: MakeRig) -> None:
    rig = make_rig("a", validate="off")
    break_something(rig)
    rig.graph({"x": []})
    rig.expect("a compute x")
    repair(rig)


def test_checks_can_be_made_at_any_time(make_rig: MakeRig) -> None:
    rig = make_rig("a", validate="off")
    rig.graph(chain("x", "y"))
    rig.skip()
    assert check(rig.machine) == []
    assert check_task(rig.machine, rig.task("x")) == []
    break_something(rig)
    assert check(rig.machine)
    repair(rig)


def test_a_task_off_the_books_is_found(make_rig: MakeRig) -> None:
    rig = make_rig("a", validate="off")
    rig.graph(chain("x", "y"))
    rig.skip()
    task = rig.state.tasks.pop("x")
    assert check_task(rig.machine, task) == ["'x' is filed under another key"]
    found = check(rig.machine)
    assert "'y' depends on 'x', which is not on the books" in found
    assert any(line.startswith("tasks by state:") for line in found)
    rig.state.tasks["x"] = task
    # Where it stood does not matter.
    assert check(rig.machine) == []


@pytest.mark.parametrize("table", ["replicated", "idle_prefixes", "unrunnable", "hosts"])
def test_what_is_wrongly_in_a_table_is_found(make_rig: MakeRig, table: str) -> None:
    rig = make_rig("a", validate="off")
    rig.graph({"x": []}, annotations={"x": {"workers": ["z"]}})
    task = rig.task("x")
    books = getattr(rig.state, table)
    key = {
        "replicated": task,
        "idle_prefixes": "x",
        "unrunnable": task.annotations.restrictions,
        "hosts": "host-a",
    }[table]
    if key in books:
        value = books.pop(key)
        assert check(rig.machine)
        books[key] = value
    else:
        books[key] = task.prefix
        assert check(rig.machine)
        del books[key]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"worker_saturation": 0}, "worker_saturation must be positive, got 0"),
        ({"bandwidth": -1}, "bandwidth must be positive, got -1"),
        ({"unknown_task_duration": 0}, "unknown_task_duration must be positive, got 0"),
        ({"placement_candidates": 0}, "placement_candidates must be positive, got 0"),
        ({"validate": "maybe"}, "validate must be event, turn or off, got 'maybe'"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        EngineSettings(**fields)  # type: ignore[arg-type]


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(TypeError, match="saturation"):
        EngineSettings(saturation=1.0)  # type: ignore[call-arg]
