"""Graphs: slices, pins, what is known already, what is lost, what fails, who leaves meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cython_ext import events as ev
from tests.machine.builders import Rig, chain, fan_in

MakeRig = Callable[..., Rig]


# Slices


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_graph_in_slices_computes_the_same(make_rig: MakeRig, size: int) -> None:
    rig = make_rig("a")
    rig.graph(fan_in("sum", "vwxy"), slices=[size] * 5, wanted=["sum"])
    rig.skip()
    for key in "vwxy":
        rig.finish(key)
    rig.expect("a compute sum")
    rig.finish("sum")
    rig.release("sum")
    rig.expect(
        "c memory sum",
        *(f"a free-keys {key}" for key in "vwxy"),
        "a free-keys sum",
    )
    rig.nothing_left()


def test_a_slice_starts_before_the_next_has_come(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    graph = rig.begin(fan_in("sum", "xy"), slices=[1, 1], wanted=["sum"])
    rig.expect()
    graph.slice()
    rig.expect("a compute x")
    rig.finish("x")
    # Nobody wants it yet but for the part of the graph that is to come.
    rig.expect()
    assert rig.task("x").n_future == 1
    graph.slice()
    rig.expect("a compute y")
    rig.finish("y")
    rig.expect()
    graph.slice()
    rig.expect("a compute sum")
    assert (rig.task("x").n_future, rig.task("y").n_future) == (0, 0)
    graph.end()
    rig.finish("sum")
    rig.expect("c memory sum", "a free-keys x", "a free-keys y")


def test_inputs_from_outside_are_held_until_the_graph_is_complete(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": []})
    rig.finish("x")
    rig.skip()
    graph = rig.begin({"y": ["x"]}, wanted=["y"])
    rig.release("x")
    rig.expect()
    graph.slice()
    rig.expect("a compute y")
    graph.end()
    rig.finish("y")
    rig.expect("c memory y", "a free-keys x")


def test_an_input_from_outside_without_its_data_is_computed_again(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph(chain("x", "y"), wanted=["y"])
    rig.finish("x")
    rig.finish("y")
    rig.skip()
    assert rig.states("x") == "released"
    rig.graph({"z": ["x"]}, wanted=["z"])
    rig.expect("a compute x")
    rig.finish("x")
    rig.expect("a compute z")


def test_a_worker_lost_between_slices(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    graph = rig.begin(fan_in("sum", "xy"), slices=[2], wanted=["sum"])
    graph.slice()
    rig.finish("x")
    rig.expect("a compute x", "b compute y")
    rig.lose("a")
    rig.expect("b compute x", "b removed a")
    graph.slice()
    graph.end()
    rig.finish("x")
    rig.finish("y")
    rig.expect("b compute sum")


def test_a_client_that_leaves_between_slices_leaves_nothing(make_rig: MakeRig) -> None:
    rig = make_rig("a", clients="c k")
    rig.graph({"ext": []}, client="k")
    rig.skip()
    graph = rig.begin({"x": ["ext"], "y": ["x"], "z": ["y"]}, slices=[1, 1])
    graph.slice()
    graph.slice()
    rig.expect()
    rig.leave("c")
    assert not rig.machine.submissions
    assert list(rig.state.tasks) == ["ext"]
    # The materializer has not heard of it yet.
    assert graph.slice()
    graph.end()
    rig.expect()
    assert rig.machine.counters == {"graph-part-late": 2}
    rig.leave("k")
    rig.expect("a free-keys ext")
    rig.nothing_left()


def test_a_restart_between_slices_gives_the_graph_up(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    graph = rig.begin(chain("x", "y"), slices=[1])
    graph.slice()
    rig.expect("a compute x")
    rig.send(ev.Restarted)
    rig.expect("c restart", "a free-keys x")
    rig.nothing_left()
    graph.slice()
    graph.end()
    rig.nothing_left()


def test_keys_released_between_slices_stay_as_long_as_the_rest_needs_them(
    make_rig: MakeRig,
) -> None:
    rig = make_rig("a")
    graph = rig.begin(chain("x", "y"), slices=[1])
    graph.slice()
    rig.release("x")
    rig.expect("a compute x")
    graph.slice()
    graph.end()
    rig.finish("x")
    rig.expect("a compute y")


def test_a_cancelled_key_between_slices_stays_for_the_rest(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    graph = rig.begin(chain("x", "y"), slices=[1])
    graph.slice()
    rig.cancel("x")
    rig.expect("a compute x", "c cancelled x: cancelled")
    graph.slice()
    graph.end()
    rig.expect()
    assert rig.states("x", "y") == "processing waiting"


def test_an_error_reaches_what_comes_in_a_later_slice(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    graph = rig.begin(chain("x", "y", "z"), slices=[1, 1], wanted=["z"])
    graph.slice()
    rig.err("x")
    graph.slice()
    rig.expect("a compute x")
    assert rig.states("x", "y") == "erred erred"
    graph.slice()
    graph.end()
    rig.expect("c erred z: boom")
    rig.release("z")
    rig.expect("a free-keys x")
    rig.nothing_left()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ({"start": 1}, "slice of 1 tasks at 1, 0 of 1 are there"),
        ({"order": b""}, "order has 0 bytes, not 8"),
        ({"run_specs": []}, "0 run_specs of 1"),
        ({"dependency_counts": b"\x01\0\0\0"}, "dependencies are cut short"),
        (
            {"dependency_counts": b"\x01\0\0\0", "dependencies": b"\0\0\0\0"},
            "'x' comes before its input",
        ),
    ],
)
def test_a_slice_that_cannot_be_is_refused(
    make_rig: MakeRig, damage: dict[str, object], text: str
) -> None:
    rig = make_rig("a")
    rig.begin({"x": []})
    fields: dict[str, object] = {
        "submission": 1,
        "start": 0,
        "keys": ["x"],
        "dependency_counts": b"\0\0\0\0",
        "dependencies": b"",
        "order": b"\0" * 8,
        "flags": b"\1",
        "future_dependents": b"\0\0\0\0",
        "new_prefixes": ["x"],
        "new_groups": ["x"],
        "new_group_prefix": b"\0\0\0\0",
        "group_index": b"\0\0\0\0",
        "new_annotations": [],
        "annotation_index": b"\xff\xff\xff\xff",
        "run_specs": [b"x"],
    }
    with pytest.raises(ValueError, match=text):
        rig.send(ev.GraphSliceReady, **{**fields, **damage})
    # All can be given up all the same.
    rig.leave("c")
    rig.nothing_left()


def test_a_graph_that_ends_too_early_stays_open_until_it_fails(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    graph = rig.begin({"x": []})
    with pytest.raises(ValueError, match="ended with 0 tasks of 1"):
        graph.end()
    graph.fail("too short")
    rig.expect("c erred x: too short")


def test_a_submission_number_is_used_once(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    graph = rig.begin({"x": []})
    with pytest.raises(ValueError, match="submission 1 is open already"):
        graph.begin()


# What is known already


def test_a_resubmitted_key_is_reported_and_not_computed_again(make_rig: MakeRig) -> None:
    rig = make_rig("a", clients="c k")
    rig.graph({"x": [], "y": []})
    rig.finish("x")
    rig.err("y")
    rig.skip()
    rig.graph({"x": [], "y": []}, client="k")
    rig.expect("k memory x", "k erred y: boom")
    rig.release("x", "y")
    rig.expect()
    rig.release("x", "y", client="k")
    rig.expect("a free-keys x", "a free-keys y")
    rig.nothing_left()


def test_a_known_definition_is_kept(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"p": [], "q": [], "x": ["p"]})
    rig.graph({"x": ["q"]})
    rig.skip()
    assert [task.key for task in rig.task("x").dependencies] == ["p"]
    assert rig.machine.counters == {"definition-kept": 1}
    rig.finish("p")
    rig.expect("c memory p", "a compute x")


def test_keys_may_be_wanted_before_their_graph_comes(make_rig: MakeRig) -> None:
    rig = make_rig("a", clients="c k")
    rig.want("x", client="k")
    rig.expect()
    assert rig.states("x") == "released"
    rig.graph({"x": []})
    rig.expect("a compute x")
    rig.finish("x")
    rig.expect("c memory x", "k memory x")


def test_a_key_that_only_was_asked_for_joins_the_group_of_its_graph(make_rig: MakeRig) -> None:
    rig = make_rig("a", prefix_limit=0)
    rig.want(("inc-0123456789abcdef", 0))
    assert list(rig.state.groups) == ["inc-0123456789abcdef"]
    rig.graph({"inc-0123456789abcdef": [], ("inc-0123456789abcdef", 0): []})
    assert set(rig.state.prefixes) == {"inc"}
    rig.skip()


def test_a_graph_may_want_keys_of_others(make_rig: MakeRig) -> None:
    rig = make_rig("a", clients="c k")
    rig.graph({"x": []}, client="k")
    rig.finish("x")
    rig.skip()
    rig.graph({"y": ["x"]}, wanted=["y", "x", "unknown"])
    rig.expect("c memory x", "c cancelled unknown: lost dependencies", "a compute y")
    rig.release("x", client="k")
    rig.finish("y")
    rig.expect("c memory y")


def test_a_graph_that_depends_on_unknown_keys_is_refused(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": [], "y": ["x", "unknown"]})
    rig.expect("c cancelled x y: lost dependencies")
    rig.nothing_left()


def test_a_graph_of_a_client_that_is_gone_is_refused(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": []}, client="nobody")
    rig.expect()
    assert rig.machine.counters == {"graph-without-client": 1}
    rig.nothing_left()


def test_a_cycle_through_a_placeholder_errs(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.want("x")
    rig.graph({"y": ["x"]})
    rig.graph({"x": ["y"]})
    rig.expect("c erred x: cycle: key='x'", "c erred y: cycle: key='x'")
    rig.release("x", "y")
    rig.nothing_left()


# Failures


def test_a_graph_that_cannot_be_opened_errs_its_keys(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    graph = rig.begin({"x": [], "y": []})
    graph.fail("no module named q")
    rig.expect("c erred x: no module named q", "c erred y: no module named q")
    assert rig.states("x", "y") == "erred erred"
    # There is nothing to compute.
    assert rig.retry("x") == ["x"]
    rig.expect()
    rig.release("x", "y")
    rig.nothing_left()


def test_a_graph_may_fail_before_it_began(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    for client in ("c", "nobody"):
        rig.send(
            ev.GraphFailed,
            submission=9,
            client_id=client,
            keys=["x"],
            exception="bad",
            traceback=None,
            exception_text="bad",
            traceback_text="",
        )
    rig.expect("c erred x: bad")


def test_a_graph_that_fails_after_a_slice_errs_only_what_is_missing(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    graph = rig.begin(chain("x", "y"), slices=[1])
    graph.slice()
    graph.fail("crashed")
    rig.expect("a compute x", "c erred y: crashed")
    rig.finish("x")
    rig.expect("c memory x")


def test_a_graph_that_fails_does_not_hurt_the_same_key_of_another(make_rig: MakeRig) -> None:
    rig = make_rig("a", clients="c k")
    rig.graph({"x": [], "m": []})
    rig.finish("m")
    rig.skip()
    graph = rig.begin({"x": [], "m": []}, client="k")
    graph.fail()
    rig.expect("k memory m")
    rig.finish("x")
    rig.expect("k memory x", "c memory x")


def test_a_second_attempt_after_a_failed_graph_works(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.begin({"x": []}).fail("first")
    rig.begin({"x": []}).fail("second")
    rig.expect("c erred x: first", "c erred x: second")
    rig.graph({"x": []})
    rig.expect("c retried x", "a compute x")
    rig.finish("x")
    rig.expect("c memory x")


# Annotations


def test_annotations_do_not_change_a_known_task(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": []}, annotations={"x": {"retries": 1}})
    rig.graph({"x": []}, annotations={"x": {"retries": 9, "workers": ["z"]}})
    rig.expect("a compute x")
    assert rig.task("x").retries == 1
    assert rig.task("x").annotations.restrictions.empty


def test_equal_annotations_share_one_record_of_restrictions(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph(
        {"x": [], "y": []},
        annotations={"x": {"workers": ["q", "p"]}, "y": {"workers": ["p", "q", "p"]}},
    )
    first, second = (rig.task(key).annotations.restrictions for key in "xy")
    assert first is second
    assert first.workers == ("p", "q")


def test_restrictions_that_come_and_go_within_a_submission(make_rig: MakeRig) -> None:
    rig = make_rig()
    graph = rig.begin(
        {"x": [], "y": []}, slices=[1], annotations={key: {"workers": ["p"]} for key in "xy"}
    )
    graph.slice()
    rig.release("x")
    rig.graph({"z": []}, annotations={"z": {"workers": ["p"]}})
    graph.slice()
    graph.end()
    assert rig.task("y").annotations.restrictions is rig.task("z").annotations.restrictions
