"""Data: scattered, copied, dropped, lost; actors."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cython_ext import events as ev
from tests.machine.builders import Rig, address_of, chain

MakeRig = Callable[..., Rig]


def test_scattered_data_is_there_and_freed_when_released(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.scatter("x", "a", "b", nbytes=100)
    rig.expect("c memory x")
    assert (rig.at("a").nbytes, rig.at("b").nbytes) == (100, 100)
    assert rig.task("x").who_wants[0].id == "c"
    rig.graph({"y": ["x"]})
    rig.expect("a compute y")
    rig.release("x")
    rig.expect()
    rig.finish("y")
    rig.expect("c memory y", "a free-keys x", "b free-keys x")


def test_scattering_again_adds_copies_and_answers(make_rig: MakeRig) -> None:
    rig = make_rig("a b", clients="c k")
    rig.scatter("x", "a")
    rig.scatter("x", "b", nbytes=16)
    rig.expect("c memory x")
    assert (rig.at("a").nbytes, rig.at("b").nbytes) == (16, 16)
    rig.scatter("x", "a", client="k", nbytes=16)
    rig.expect("k memory x")
    rig.scatter("x", "a", client=None, nbytes=16)
    rig.expect()
    assert rig.task("x").n_wants == 2


def test_data_placed_for_nobody_is_freed(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.scatter("x", "a", client=None)
    rig.expect("a free-keys x")
    rig.nothing_left()


def test_data_placed_on_unknown_workers_only_is_lost(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.scatter("x", "z")
    rig.expect("c cancelled x: lost data")
    assert rig.machine.counters == {"placed-on-unknown-worker": 1}
    rig.nothing_left()


def test_data_placed_for_a_failed_task_clears_the_error(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph(chain("x", "y"))
    rig.err("x")
    rig.skip()
    rig.scatter("x", "a")
    rig.expect("a free-keys x", "c retried x", "c memory x", "c retried y", "a compute y")


def test_data_placed_for_a_task_whose_input_failed(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph(chain("x", "y", "z"))
    rig.err("x")
    rig.skip()
    rig.scatter("y", "a")
    rig.expect("c retried y", "c memory y", "c retried z", "a compute z")
    assert rig.states("x", "y", "z") == "erred memory processing"
    rig.dropped("a", "y")
    rig.expect("c lost y", "c erred y: boom", "a free-keys z", "c erred z: boom")


def test_a_graph_may_define_what_was_scattered_before(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.scatter("x", "a")
    rig.graph({"x": []}, actors=True)
    rig.expect("c memory x", "c memory x")
    assert not rig.task("x").actor
    rig.lose("a")
    rig.expect("c lost x", "b compute x", "b removed a")


# Loss


def test_lost_scattered_data_cancels_all_that_needs_it(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.scatter("x", "a")
    rig.graph({"in": [], "y": ["x", "in"], "z": ["y"]}, annotations={"in": {"workers": ["b"]}})
    rig.skip()
    rig.lose("a")
    rig.expect(
        "c cancelled x: lost data",
        "c cancelled y: lost data",
        "c cancelled z: lost data",
        "b removed a",
    )
    assert rig.states("x", "y", "z", "in") == "- - - processing"


def test_lost_scattered_data_leaves_results_that_are_there(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.scatter("x", "a")
    rig.graph({"y": ["x"]}, annotations={"y": {"workers": ["b"]}})
    rig.finish("y")
    rig.skip()
    rig.lose("a")
    rig.expect("c cancelled x: lost data", "b removed a")
    assert rig.states("x", "y") == "released memory"
    assert rig.task("x").lost
    # Now the result goes, too, and cannot be computed again.
    rig.dropped("b", "y")
    rig.expect("c lost y", "c cancelled y: lost dependencies")
    rig.nothing_left()


def test_scattered_data_lost_together_with_a_result_of_it(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.scatter("x", "a")
    rig.graph({"y": ["x"], "z": ["y"]}, annotations={"z": {"workers": ["b"]}})
    rig.finish("y")
    rig.skip()
    rig.lose("a")
    lines = rig.take()
    assert {f"c cancelled {key}" for key in "xyz"} == {
        line.partition(":")[0] for line in lines if "cancelled" in line
    }
    rig.nothing_left()


def test_a_graph_on_lost_data_is_refused(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.scatter("x", "a")
    rig.graph({"y": ["x"]}, annotations={"y": {"workers": ["b"]}})
    rig.finish("y")
    rig.lose("a")
    rig.skip()
    rig.graph({"z": ["x"]})
    rig.expect("c cancelled z: lost dependencies")
    # Also if it wants the lost key itself, or is resubmitted on top of it.
    rig.graph({"w": []}, wanted=["w", "x"])
    rig.expect("c cancelled x: lost dependencies", "b compute w")
    rig.scatter("x", "b")
    rig.graph({"z": ["x"]})
    rig.expect("c memory x", "b compute z")


def test_data_lost_between_slices_cancels_what_comes_later(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.scatter("x", "a")
    graph = rig.begin({"y": ["x"], "z": ["y"], "w": []}, slices=[1, 1])
    graph.slice()
    rig.skip()
    rig.lose("a")
    rig.expect("c cancelled x: lost data", "c cancelled y: lost data", "b removed a")
    graph.slice()
    rig.expect("c cancelled z: lost dependencies")
    graph.slice()
    graph.end()
    rig.expect("b compute w")
    assert rig.states("x", "y", "z", "w") == "- - - processing"


def test_the_last_copy_dropped_by_its_worker_is_computed_again(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": []})
    rig.finish("x")
    rig.skip()
    rig.dropped("a", "x")
    rig.expect("c lost x", "a compute x")
    # An echo of an order, or a repeated message.
    rig.dropped("a", "x")
    rig.dropped("a", "unknown")
    rig.expect()
    assert rig.machine.counters == {"dropped-by-worker": 1}


@pytest.mark.behaviour("B4.6")
def test_missing_data_is_computed_again(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": [], "y": []})
    rig.finish("x")
    rig.finish("y")
    rig.added("b", "x")
    rig.skip()
    rig.send(ev.ReplicaMissing, worker=rig.at("b"), keys=["x", "y", "unknown"])
    rig.expect("b remove-replicas x", "b remove-replicas y", "c lost y", "b compute y")
    rig.send(ev.ReplicaMissing, worker=rig.at("b"), keys=["x"])
    rig.expect()
    assert rig.states("x") == "memory"
    assert rig.machine.counters == {"copy-missing": 2}


# Copies


@pytest.mark.behaviour("B4.1")
def test_a_worker_is_told_to_fetch_and_copies_are_counted(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": [], "y": []})
    rig.finish("x", nbytes=5)
    rig.skip()
    asked = rig.send(ev.ReplicasAsked, worker=rig.at("b"), keys=["x", "y", "unknown"])
    assert asked == ["x"]
    assert rig.sink.take() == [
        ("acquire-replicas", "tcp://b:1", {"x": ["tcp://a:1"]}, {"x": 5}, "ReplicasAsked-8")
    ]
    rig.added("b", "x")
    assert list(rig.state.replicated) == [rig.task("x")]
    assert rig.send(ev.ReplicasAsked, worker=rig.at("b"), keys=["x"]) == []
    rig.expect()


@pytest.mark.behaviour("B4.3")
@pytest.mark.parametrize("send", [True, False])
def test_the_last_copy_of_a_needed_key_is_never_dropped(make_rig: MakeRig, send: bool) -> None:
    rig = make_rig("a b")
    rig.graph({"x": []})
    rig.finish("x")
    rig.added("b", "x")
    rig.skip()
    drop = {"keys": ["x", "unknown"], "send": send}
    assert rig.send(ev.ReplicasDropped, worker=rig.at("a"), **drop) == ["x"]
    rig.expect(*["a remove-replicas x"] if send else [])
    assert rig.send(ev.ReplicasDropped, worker=rig.at("a"), **drop) == []
    assert rig.send(ev.ReplicasDropped, worker=rig.at("b"), **drop) == []
    rig.expect()
    assert rig.states("x") == "memory"


@pytest.mark.behaviour("B4.3")
def test_a_copy_that_a_run_reads_is_not_dropped(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": []})
    rig.finish("x")
    rig.added("b", "x")
    rig.graph({"y": ["x"]})
    user = rig.on("y")
    assert user is not None
    other = "b" if user == "a" else "a"
    rig.skip()
    order = {"keys": ["x"], "send": True}
    assert rig.send(ev.ReplicasDropped, worker=rig.at(user), **order) == []
    rig.expect()
    rig.finish("y")
    rig.skip()
    assert rig.send(ev.ReplicasDropped, worker=rig.at(user), **order) == ["x"]
    rig.expect(f"{user} remove-replicas x")
    assert rig.send(ev.ReplicasDropped, worker=rig.at(other), **order) == []


def test_who_has_is_answered_without_the_asker(make_rig: MakeRig) -> None:
    rig = make_rig("a b d")
    rig.scatter("x", "a", "b")
    rig.graph({"y": []})
    rig.skip()
    rig.send(ev.WhoHasAsked, worker=rig.at("b"), keys=["x", "y", "unknown"])
    assert rig.sink.take() == [
        ("free-keys", "tcp://b:1", "unknown", "WhoHasAsked-9"),
        ("refresh-who-has", "tcp://b:1", {"x": [address_of("a")], "y": []}, "WhoHasAsked-9"),
    ]
    rig.send(ev.WhoHasAsked, worker=rig.at("b"), keys=["unknown"])
    rig.expect("b free-keys unknown")


# Actors


@pytest.mark.behaviour("B4.6")
def test_a_holder_that_is_asked_for_thrice_becomes_suspect(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.scatter("x", "a")
    rig.expect("c memory x")
    for _ in range(2):
        rig.send(ev.WhoHasAsked, worker=rig.at("b"), keys=["x"])
        assert not rig.machine.suspects
    rig.send(ev.WhoHasAsked, worker=rig.at("b"), keys=["x"])
    assert rig.machine.suspects == {"x": None}
    assert [effect[0] for effect in rig.sink.take()] == ["refresh-who-has"] * 3
    # The shell asked the holder, and it denied.
    rig.send(ev.ReplicaMissing, worker=rig.at("a"), keys=["x"])
    rig.expect("a remove-replicas x", "c cancelled x: lost data")


def test_a_pseudo_client_ends_with_its_last_key(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.scatter("x", "a", client="queue-q")
    assert "queue-q" in rig.machine.state.clients
    rig.send(ev.ReplicaMissing, worker=rig.at("a"), keys=["x"])
    rig.sink.take()
    assert "queue-q" not in rig.machine.state.clients


def test_actors_are_spread_and_freed(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": [], "y": []}, actors=True)
    rig.finish("x")
    rig.finish("y")
    rig.expect("a compute x", "b compute y", "c memory x", "c memory y")
    rig.graph({"z": [], "w": []}, actors={"z"})
    rig.expect("a compute z", "b compute w")
    assert rig.task("z").actor
    assert not rig.task("w").actor
    assert list(rig.at("a").actors) == ["x"]
    rig.release("x")
    rig.expect("a free-keys x")
    assert not rig.at("a").actors


def test_an_actor_is_not_copied(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": []}, actors=True)
    rig.finish("x")
    rig.skip()
    assert rig.send(ev.ReplicasAsked, worker=rig.at("b"), keys=["x"]) == []
    rig.added("b", "x")
    rig.scatter("x", "b")
    rig.expect()
    assert rig.machine.counters == {"placed-for-actor": 1}
    assert rig.task("x").n_replicas == 1


@pytest.mark.parametrize("event", ["lost", "dropped", "missing"])
def test_an_actor_without_its_worker_errs_with_its_dependents(
    make_rig: MakeRig, event: str
) -> None:
    rig = make_rig("a b")
    rig.graph({"x": [], "y": ["x"]}, actors={"x"}, annotations={"y": {"workers": ["b"]}})
    rig.finish("x")
    rig.skip()
    if event == "lost":
        rig.lose("a")
    elif event == "dropped":
        rig.dropped("a", "x")
    else:
        rig.send(ev.ReplicaMissing, worker=rig.at("a"), keys=["x"])
    lines = [line for line in rig.take() if "removed" not in line and "replicas" not in line]
    assert lines == [
        "c erred x: actor-lost: key='x', worker='tcp://a:1'",
        "b free-keys y",
        "c erred y: actor-lost: key='x', worker='tcp://a:1'",
    ]
    assert rig.states("x", "y") == "erred erred"
    rig.retry("x")
    assert rig.states("x", "y") == "processing waiting"
    rig.skip()


def test_an_actor_in_computation_moves_like_any_task(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": []}, actors=True)
    rig.lose("a")
    rig.expect("a compute x", "b compute x", "b removed a")
