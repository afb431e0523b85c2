"""The machine says in words why a task is where it is."""

from __future__ import annotations

from typing import Any

import pytest

from cython_ext import events as ev
from distributed_core.engine.scheduler import explain
from tests.machine.builders import Rig, chain, fan_in


def said(rig: Rig, key: Any) -> str:
    return "\n".join(explain(rig.machine, key))


def test_an_unknown_key_is_an_error() -> None:
    with pytest.raises(KeyError, match="nothing"):
        explain(Rig().machine, "nothing")


def test_a_waiting_task_names_its_missing_inputs() -> None:
    rig = Rig("a")
    rig.graph(fan_in("sum", ["x", "y", "z"]), wanted=["sum"])
    rig.finish("x")
    rig.now += 2.5
    rig.wait(0)
    text = said(rig, "sum")
    assert "'sum' is waiting, since 2.5 s." in text
    assert "It waits for 2 of 3 inputs: 'y' (processing on tcp://a:1), 'z'" in text
    assert "It is wanted by c." in text
    assert "It is an input of 'sum'." in said(rig, "y")


def test_a_chain_is_followed_to_its_bottom() -> None:
    rig = Rig("a")
    rig.graph(
        {**chain(*"vwxyz"), "t": ["z"]},
        wanted=["t"],
        annotations={"v": {"workers": ["q"], "resources": {"gpu": 2.0}}},
    )
    text = said(rig, "t")
    assert "It waits for 1 of 1 input: 'z' (waiting)." in text
    assert "At the bottom of what it waits for, there are 1 no-worker: 'v' (no-worker)." in text
    assert "'v': No running worker meets what it asks for: " in text


def test_many_inputs_are_counted() -> None:
    rig = Rig("a")
    rig.graph(fan_in("sum", [f"load-{i}" for i in range(20)]), wanted=["sum"])
    text = said(rig, "sum")
    assert "and 15 more" in text
    assert "Of 1 worker, 1 run." in text


def test_a_task_without_worker_names_the_nearest() -> None:
    rig = Rig("a")
    rig.worker("b", resources={"gpu": 1.0})
    rig.worker("d", resources={"gpu": 4.0}, status="paused")
    rig.graph(
        {"x": [], "y": []},
        annotations={"x": {"resources": {"gpu": 2.0}}, "y": {"workers": ["q", "tcp://r:1"]}},
    )
    text = said(rig, "x")
    assert "No running worker meets what it asks for: resources gpu=2." in text
    assert "tcp://b:1 ('b') has gpu=1 of 2" in text
    assert "tcp://d:1 ('d') is paused" in text
    text = said(rig, "y")
    assert "one of the workers or hosts q, tcp://r:1" in text
    assert "tcp://a:1 ('a') is another worker" in text


def test_a_task_without_worker_tells_of_the_timeout_and_of_who_is_there() -> None:
    rig = Rig("a", no_workers_timeout=30)
    rig.graph({"x": []}, annotations={"x": {"workers": ["q"]}})
    assert "It errs when none has come after 30 s." in said(rig, "x")
    rig.status("a", "paused")
    rig.graph({"y": []})
    assert "Of 1 worker (1 paused), 0 run." in said(rig, "y")


def test_a_queued_task_tells_its_place_in_line() -> None:
    rig = Rig("a b")
    rig.send(ev.RetirementBegun, worker=rig.at("b"))
    rig.graph({f"load-{i}": [] for i in range(9)})
    text = said(rig, "load-5")
    assert "It waits in line for a free slot, with 3 tasks ahead of it" in text
    assert "All 2 slots of the running workers are taken." in text
    assert "Of 2 workers (1 retiring), 1 run." in text


def test_a_queued_task_without_workers_says_so() -> None:
    rig = Rig()
    rig.graph({"x": []})
    assert "Of 0 workers, 0 run." in said(rig, "x")


def test_a_processing_task_tells_where_and_what_is_known_of_it() -> None:
    rig = Rig()
    rig.worker("a", resources={"gpu": 1.0})
    rig.graph({"x": []}, annotations={"x": {"retries": 2, "resources": {"gpu": 1.0}}})
    text = said(rig, "x")
    assert "It was sent to tcp://a:1 ('a') as run 0." in text
    assert "The worker has not said that it executes it; it has 1 tasks for 1 thread." in text
    assert "Should it fail, it is tried 2 more times." in text
    assert "Its resources are in use there: {'gpu': 1.0}." in text
    rig.at("a").executing = {"x": 3.25}
    rig.status("a", "paused")
    text = said(rig, "x")
    assert "The worker has been executing it for 3.2 s." in text
    assert "The worker is paused." in text
    rig.secede("x")
    assert "long-running" in said(rig, "x")


def test_a_suspicious_task_tells_of_deaths() -> None:
    rig = Rig("a b")
    rig.graph({"x": []})
    rig.lose("a")
    assert "It was running on 1 worker that died; more than 3 make it err." in said(rig, "x")


def test_results_and_errors_tell_whose_they_are() -> None:
    rig = Rig("a")
    rig.graph({"m": [], "x": [], "y": ["x"], "z": ["y"]})
    rig.graph({"act": []}, actors=True)
    rig.finish("m", nbytes=64)
    rig.finish("act")
    rig.err("x", text="ZeroDivisionError: no")
    assert "Its result (64 bytes) is on tcp://a:1." in said(rig, "m")
    assert "Its result (actor) is on tcp://a:1." in said(rig, "act")
    assert "It failed on tcp://a:1: ZeroDivisionError: no" in said(rig, "x")
    assert "Its input 'x' failed: ZeroDivisionError: no" in said(rig, "z")


def test_a_failure_of_the_engines_own_blames_no_worker() -> None:
    rig = Rig()
    rig.begin({"x": []}).fail("no module named q")
    assert "It failed: no module named q" in said(rig, "x")


def test_released_tasks_tell_why_they_are_kept() -> None:
    rig = Rig("a b")
    rig.graph(chain("x", "y"), wanted=["y"])
    rig.finish("x")
    rig.finish("y")
    text = said(rig, "x")
    assert "It is kept, without its result" in text
    assert "Nobody needs it." in text
    rig.want("placeholder")
    assert "No graph has said how to compute it" in said(rig, "placeholder")


def test_lost_tasks_say_so() -> None:
    rig = Rig("a b")
    rig.scatter("data", "a")
    rig.graph({"x": ["data"], "y": ["x"]}, annotations={"y": {"workers": ["b"]}})
    rig.finish("x")
    rig.finish("y")
    rig.release("x")
    rig.lose("a")
    assert "Its data was lost with the last worker that held it." in said(rig, "data")
    assert "An input of it was lost and cannot be computed again." in said(rig, "x")


def test_a_task_held_for_a_graph_says_so() -> None:
    rig = Rig("a")
    graph = rig.begin(chain("x", "y"), slices=[1], wanted=["y"])
    graph.slice()
    assert "held for a graph that is still coming in" in said(rig, "x")
