"""Clients: what they want, release, cancel and retry; how they leave; restarts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cython_ext import events as ev
from tests.machine.builders import Rig, chain, fan_in

MakeRig = Callable[..., Rig]


def test_a_client_is_connected_once(make_rig: MakeRig) -> None:
    rig = make_rig()
    with pytest.raises(ValueError, match="'c' is connected already"):
        rig.client("c")
    rig.leave("c")
    assert rig.client("c").id == "c"


def test_every_client_is_told(make_rig: MakeRig) -> None:
    rig = make_rig("a", clients="c k")
    rig.graph({"x": [], "y": []})
    rig.want("x", "y", client="k")
    rig.skip()
    rig.finish("x")
    rig.expect("k memory x", "c memory x")
    rig.err("y")
    rig.expect("k erred y: boom", "c erred y: boom")


def test_wanting_what_is_done_is_answered_at_once(make_rig: MakeRig) -> None:
    rig = make_rig("a", clients="c k")
    rig.graph({"x": [], "y": []})
    rig.finish("x")
    rig.err("y")
    rig.skip()
    rig.want("x", "y", client="k")
    rig.expect("k memory x", "k erred y: boom")
    # Again: it asks because it does not know.
    rig.want("x", client="k")
    rig.expect("k memory x")
    assert rig.task("x").n_wants == 2


def test_a_result_stays_while_one_client_wants_it(make_rig: MakeRig) -> None:
    rig = make_rig("a", clients="c k")
    rig.graph({"x": []})
    rig.want("x", client="k")
    rig.finish("x")
    rig.skip()
    rig.release("x")
    rig.release("x")
    rig.release("unknown")
    rig.release("x", client="nobody")
    rig.expect()
    rig.leave("k")
    rig.expect("a free-keys x")
    rig.nothing_left()


def test_a_client_that_leaves_takes_its_work_along(make_rig: MakeRig) -> None:
    rig = make_rig("a", clients="c k")
    rig.graph(chain("x", "y", "z"))
    rig.graph({"q": ["x"]}, client="k")
    rig.skip()
    rig.leave("c")
    rig.expect()
    assert rig.states("x", "y", "z", "q") == "processing - - waiting"
    assert list(rig.state.clients) == ["k"]
    rig.leave("k")
    rig.expect("a free-keys x")
    rig.nothing_left()


def test_fire_and_forget_lets_go_once_the_task_has_ended(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": [], "y": [], "z": []})
    rig.finish("z")
    rig.skip()
    rig.want("x", "y", "z", client="fire-and-forget")
    rig.expect("fire-and-forget memory z")
    rig.leave("c")
    rig.expect("a free-keys z")
    rig.finish("x")
    rig.expect("fire-and-forget memory x", "a free-keys x")
    rig.err("y")
    rig.expect("fire-and-forget erred y: boom", "a free-keys y")
    rig.nothing_left()


def test_a_pseudo_client_lives_as_long_as_it_wants_something(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": [], "y": []})
    rig.want("x", "y", client="queue-q")
    rig.leave("c")
    rig.skip()
    rig.release("x", client="queue-q")
    rig.expect("a free-keys x")
    assert "queue-q" in rig.state.clients
    rig.release("y", client="queue-q")
    rig.expect("a free-keys y")
    assert not rig.state.clients


# Cancel


def test_cancel_ends_the_run_and_tells_the_client(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": []})
    rig.cancel("x", "unknown")
    rig.expect("a compute x", "c cancelled x: cancelled", "a free-keys x")
    rig.nothing_left()


def test_cancel_takes_dependents_along_and_spares_inputs(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"w": [], "x": ["w"], "y": ["x"], "z": ["y"], "v": ["w"]}, wanted=["v", "x", "z"])
    rig.skip()
    rig.cancel("x")
    rig.expect("c cancelled x: cancelled", "c cancelled z: cancelled")
    assert rig.states("w", "v", "x", "y", "z") == "processing waiting - - -"


def test_cancel_spares_what_others_want(make_rig: MakeRig) -> None:
    rig = make_rig("a", clients="c k")
    rig.graph(chain("x", "y"))
    rig.want("x", client="k")
    rig.skip()
    rig.cancel("x")
    rig.expect()
    assert rig.states("x", "y") == "processing waiting"
    rig.cancel("x", force=True)
    rig.expect(
        "k cancelled x: cancelled",
        "c cancelled x: cancelled",
        "c cancelled y: cancelled",
        "a free-keys x",
    )
    rig.nothing_left()


def test_cancel_keeps_an_input_of_what_others_want(make_rig: MakeRig) -> None:
    rig = make_rig("a", clients="c k")
    rig.graph(chain("x", "y"), client="c", wanted=["x"])
    rig.graph({"y": ["x"]}, client="k")
    rig.skip()
    rig.cancel("x")
    rig.expect("c cancelled x: cancelled")
    assert rig.states("x", "y") == "processing waiting"
    rig.finish("x")
    rig.expect("a compute y")


def test_cancel_by_a_client_that_is_gone_does_nothing(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": []})
    rig.skip()
    rig.cancel("x", client="nobody", force=True)
    rig.expect()
    assert rig.states("x") == "processing"


@pytest.mark.parametrize("state", ["memory", "erred", "no-worker", "queued", "waiting"])
def test_cancel_in_any_state_leaves_nothing(make_rig: MakeRig, state: str) -> None:
    rig = make_rig("" if state == "queued" else "a")
    rig.graph(
        {"x": []} if state != "waiting" else chain("in", "x"),
        annotations={"x": {"workers": ["z"]}} if state == "no-worker" else {},
        wanted=["x"],
    )
    if state == "memory":
        rig.finish("x")
    elif state == "erred":
        rig.err("x")
    assert rig.states("x") == state
    rig.skip()
    rig.cancel("x")
    assert rig.take()[0] == "c cancelled x: cancelled"
    rig.nothing_left()


# Reports


def test_a_report_says_where_a_key_has_got_to(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": [], "y": [], "z": []})
    rig.finish("x")
    rig.err("y")
    rig.skip()
    for key in ("x", "y", "z", "unknown"):
        rig.send(ev.KeyReportAsked, client_id="c", key=key)
    rig.send(ev.KeyReportAsked, client_id="nobody", key="x")
    rig.expect("c memory x", "c erred y: boom", "c cancelled unknown: unknown key")


# Restart


def test_a_restart_drops_every_key_of_every_client(make_rig: MakeRig) -> None:
    rig = make_rig("a", clients="c k")
    rig.graph(fan_in("sum", ["x", "y"]))
    rig.finish("x")
    rig.graph({"bad": []}, client="k")
    rig.err("bad")
    rig.want("x", client="queue-q")
    rig.skip()
    rig.send(ev.Restarted)
    rig.expect("c restart", "k restart", "a free-keys bad", "a free-keys x", "a free-keys y")
    rig.nothing_left()
    assert list(rig.state.clients) == ["c", "k"]
    # Late words of before the restart.
    rig.finish("x", "a", 0)
    rig.expect("a free-keys x")
    rig.graph({"x": []})
    rig.expect("a compute x")


def test_nothing_is_left_behind(make_rig: MakeRig) -> None:
    rig = make_rig("a", prefix_limit=3)
    for round_number in range(8):
        name = "abcdefgh"[round_number] * 3
        rig.graph(
            {f"{name}-{i}": [] for i in range(6)} | {f"sum{name}": [f"{name}-1", f"{name}-2"]},
            annotations={f"{name}-1": {"workers": ["a"], "resources": {}, "retries": round_number}},
        )
        while rig.at("a").processing:
            key = rig.at("a").processing[0].key
            if key.endswith("-3"):
                rig.err(key)
            else:
                rig.finish(key, type=name.encode(), typename=name)
        rig.release(*list(rig.state.tasks))
        rig.skip()
        rig.nothing_left()
    assert len(rig.state.prefixes) == 3
