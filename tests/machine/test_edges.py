"""Every declared edge is taken because of an event, with exact effects.

The scripts are looked up by the rows of ``EDGES``: a new row without a script fails, and so
does a script for an edge that is not declared.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cython_ext.transitions import EDGES
from tests.machine.builders import Rig, chain

Script = Callable[[Callable[..., Rig]], Rig]
SCRIPTS: dict[tuple[str, str], Script] = {}


def edge(start: str, finish: str) -> Callable[[Script], Script]:
    def register(script: Script) -> Script:
        assert (start, finish) not in SCRIPTS
        SCRIPTS[start, finish] = script
        return script

    return register


@pytest.mark.parametrize(("start", "finish"), [(row[0], row[1]) for row in EDGES])
def test_edge_is_taken_by_an_event(start: str, finish: str, make_rig: Callable[..., Rig]) -> None:
    rig = SCRIPTS[start, finish](make_rig)
    assert (start, finish) in rig.edges()


def test_no_script_is_for_an_edge_that_does_not_exist() -> None:
    assert set(SCRIPTS) == {(row[0], row[1]) for row in EDGES}


@edge("released", "waiting")
def wanted(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig("a")
    rig.graph(chain("x", "y"), wanted=["y"])
    rig.expect("a compute x")
    assert rig.states("x", "y") == "processing waiting"
    return rig


@edge("released", "memory")
def placed(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig("a")
    rig.scatter("x", "a")
    rig.expect("c memory x")
    assert rig.path("x") == ["released", "memory"]
    return rig


@edge("released", "erred")
def input_has_failed(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig("a")
    rig.graph({"x": []})
    rig.err("x")
    rig.expect("a compute x", "c erred x: boom")
    rig.graph({"y": ["x"]})
    rig.expect("c erred y: boom")
    assert rig.path("y") == ["released", "erred"]
    assert rig.task("y").error.blame == "x"
    return rig


@edge("released", "forgotten")
def not_needed_at_all(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig("a")
    rig.graph({"x": []})
    rig.expect("a compute x")
    rig.release("x")
    rig.expect("a free-keys x")
    assert rig.path("x") == ["released", "waiting", "processing", "released", "forgotten"]
    rig.nothing_left()
    return rig


@edge("waiting", "released")
def not_needed_while_waiting(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig("a")
    rig.graph(chain("x", "y"))
    rig.expect("a compute x")
    rig.release("y")
    rig.expect()
    assert rig.path("y") == ["released", "waiting", "released", "forgotten"]
    assert rig.states("x") == "processing"
    return rig


@edge("waiting", "no-worker")
def no_worker_fits(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig("a")
    rig.graph({"x": []}, annotations={"x": {"workers": ["b"]}})
    rig.expect()
    assert rig.states("x") == "no-worker"
    return rig


@edge("waiting", "queued")
def no_slot_is_open(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig()
    rig.graph({"x": []})
    rig.expect()
    assert rig.path("x") == ["released", "waiting", "queued"]
    return rig


@edge("waiting", "processing")
def worker_chosen(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig("a")
    rig.graph({"x": []})
    rig.expect("a compute x")
    return rig


@edge("waiting", "memory")
def placed_while_waiting(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig("a b")
    rig.graph(chain("x", "y"), wanted=["y"])
    rig.expect("a compute x")
    rig.scatter("y", "b")
    # Nobody needs x any more.
    rig.expect("c memory y", "a free-keys x")
    return rig


@edge("waiting", "erred")
def input_failed(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig("a")
    rig.graph(chain("x", "y", "z"))
    rig.err("x")
    rig.expect("a compute x", "c erred x: boom", "c erred y: boom", "c erred z: boom")
    assert {rig.task(key).error.blame for key in "xyz"} == {"x"}
    return rig


@edge("no-worker", "released")
def not_needed_without_worker(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig("a")
    rig.graph({"x": []}, annotations={"x": {"workers": ["b"]}})
    rig.release("x")
    rig.expect()
    assert rig.path("x") == ["released", "waiting", "no-worker", "released", "forgotten"]
    rig.nothing_left()
    return rig


@edge("no-worker", "waiting")
def fitting_worker_came(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig("a")
    rig.graph({"x": []}, annotations={"x": {"workers": ["b"]}})
    rig.worker("b")
    rig.expect("b compute x")
    assert rig.path("x") == ["released", "waiting", "no-worker", "waiting", "processing"]
    return rig


@edge("no-worker", "memory")
def placed_without_worker(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig("a")
    rig.graph({"x": []}, annotations={"x": {"workers": ["b"]}})
    rig.scatter("x", "a")
    rig.expect("c memory x")
    rig.worker("b")
    rig.expect()
    return rig


@edge("no-worker", "erred")
def no_worker_in_time(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig("a", no_workers_timeout=5)
    rig.graph({"x": []}, annotations={"x": {"workers": ["b"]}})
    rig.wait(4.9)
    rig.expect()
    rig.wait(0.1)
    rig.expect(
        "c erred x: no-valid-worker: key='x', workers=('b',), hosts=(), resources={}, timeout=5.0"
    )
    return rig


@edge("queued", "released")
def not_needed_in_line(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig()
    rig.graph({"x": []})
    rig.release("x")
    rig.expect()
    assert rig.path("x") == ["released", "waiting", "queued", "released", "forgotten"]
    return rig


def queued_with_input(make_rig: Callable[..., Rig]) -> Rig:
    """``inc-2`` is queued behind ``inc-0`` and ``inc-1``, and all need ``x``, which a holds."""
    rig = make_rig("a")
    rig.graph(
        {"x": [], **{f"inc-{i}": ["x"] for i in range(3)}}, wanted=["inc-0", "inc-1", "inc-2"]
    )
    rig.finish("x")
    rig.expect("a compute x", "a compute inc-0", "a compute inc-1")
    assert rig.states("inc-2") == "queued"
    return rig


@edge("queued", "waiting")
def input_lost_in_line(make_rig: Callable[..., Rig]) -> Rig:
    rig = queued_with_input(make_rig)
    rig.dropped("a", "x")
    rig.expect("a free-keys inc-0", "a free-keys inc-1", "a compute x")
    assert rig.states("x", "inc-0", "inc-1", "inc-2") == "processing waiting waiting waiting"
    return rig


@edge("queued", "processing")
def slot_opened(make_rig: Callable[..., Rig]) -> Rig:
    rig = queued_with_input(make_rig)
    rig.finish("inc-0")
    rig.expect("c memory inc-0", "a compute inc-2")
    return rig


@edge("queued", "memory")
def placed_in_line(make_rig: Callable[..., Rig]) -> Rig:
    rig = queued_with_input(make_rig)
    rig.scatter("inc-2", "a")
    rig.expect("c memory inc-2")
    rig.finish("inc-0")
    rig.expect("c memory inc-0")
    return rig


@edge("queued", "erred")
def no_worker_in_time_for_the_line(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig(no_workers_timeout=5)
    rig.graph({"x": []})
    rig.wait(5)
    rig.expect("c erred x: no-worker: key='x', timeout=5.0")
    return rig


@edge("processing", "released")
@pytest.mark.behaviour("B1.1")
def rescheduled(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig("a")
    rig.graph({"x": []})
    assert rig.reschedule("x", "a")
    rig.expect("a compute x", "a free-keys x", "a compute x")
    return rig


@edge("processing", "memory")
def finished(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig("a")
    rig.graph({"x": []})
    rig.finish("x")
    rig.expect("a compute x", "c memory x")
    return rig


@edge("processing", "erred")
def failed(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig("a")
    rig.graph({"x": []})
    rig.err("x")
    rig.expect("a compute x", "c erred x: boom")
    return rig


@edge("memory", "released")
def result_not_needed(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig("a")
    rig.graph({"x": []})
    rig.finish("x")
    rig.release("x")
    rig.expect("a compute x", "c memory x", "a free-keys x")
    rig.nothing_left()
    return rig


@edge("memory", "erred")
def actor_lost(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig("a b")
    rig.graph({"x": []}, actors=True)
    rig.finish("x")
    rig.expect("a compute x", "c memory x")
    rig.lose("a")
    rig.expect("c erred x: actor-lost: key='x', worker='tcp://a:1'", "b removed a")
    return rig


@edge("erred", "released")
def retried(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig("a")
    rig.graph({"x": []})
    rig.err("x")
    rig.expect("a compute x", "c erred x: boom")
    assert rig.retry("x") == ["x"]
    rig.expect("a free-keys x", "c retried x", "a compute x")
    return rig
