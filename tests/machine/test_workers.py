"""Workers: how they come, pause, retire, die, and who is to blame; placing and queuing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cython_ext import events as ev
from tests.machine.builders import Rig, chain, fan_in

MakeRig = Callable[..., Rig]


# Registration


@pytest.mark.behaviour("B3.1")
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"address": "tcp://a:1"}, "address taken, tcp://a:1"),
        ({"alias": "a"}, "name taken, a"),
        ({"nthreads": 0}, "nthreads must be positive, got 0"),
        ({"status": "closing"}, "a worker cannot register with status 'closing'"),
        ({"status": "what"}, "a worker cannot register with status 'what'"),
    ],
)
def test_a_registration_is_whole_or_refused(
    make_rig: MakeRig, fields: dict[str, Any], reason: str
) -> None:
    rig = make_rig("a")
    assert rig.worker("b", **fields) == reason
    assert list(rig.state.workers) == ["tcp://a:1"]
    assert rig.state.total_nthreads == 1
    rig.expect()


def test_a_worker_in_status_init_gets_work_once_it_runs(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.graph({"x": []})
    rig.worker("a", status="init")
    rig.expect()
    assert rig.states("x") == "queued"
    rig.status("a", "running")
    rig.expect("a compute x")


def test_a_worker_may_register_paused(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.worker("a", status="paused")
    rig.graph({"x": []})
    rig.expect()
    assert rig.state.n_paused == 1
    rig.status("a", "running")
    rig.expect("a compute x")


def test_a_name_is_free_again_after_its_worker_has_gone(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.lose("a")
    rig.expect("b removed a")
    worker = rig.worker("z", alias="a")
    assert rig.state.workers_by_name["a"] is worker
    rig.expect()


# Status


def test_a_paused_worker_gets_nothing_new_and_keeps_what_it_has(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": []})
    rig.status("a", "paused")
    rig.graph({"y": []})
    rig.expect("a compute x", "b compute y")
    rig.finish("x")
    rig.expect("c memory x")
    rig.status("b", "paused")
    rig.graph({"z": ["x"], "w": []})
    rig.expect()
    assert rig.states("z", "w") == "no-worker no-worker"
    rig.status("a", "running")
    rig.expect("a compute z", "a compute w")


def test_the_same_status_again_is_no_news(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    assert rig.status("a", "running") is None
    rig.expect()


@pytest.mark.parametrize("status", ["what", "init", "closed"])
def test_an_impossible_status_is_recorded(make_rig: MakeRig, status: str) -> None:
    rig = make_rig("a")
    assert rig.status("a", status) == f"no such status: {status!r}"
    assert rig.at("a").status == "running"
    assert rig.machine.counters == {"status-unknown": 1}
    rig.expect()


@pytest.mark.parametrize("status", ["closing_gracefully", "closing"])
def test_a_worker_that_says_goodbye_gets_nothing_new(make_rig: MakeRig, status: str) -> None:
    rig = make_rig("a b")
    rig.graph({"x": []})
    rig.status("a", status)
    rig.graph({"y": []})
    rig.expect("a compute x", "b compute y")
    rig.finish("x")
    rig.expect("c memory x")


# Retirement


def test_retirement_stops_new_work_and_can_be_taken_back(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": []})
    rig.skip()
    assert rig.send(ev.RetirementBegun, worker=rig.at("a")) is None
    rig.expect("a status closing_gracefully")
    assert "closing_gracefully" in rig.send(ev.RetirementBegun, worker=rig.at("a"))
    rig.graph({"y": []})
    rig.expect()
    assert rig.state.n_retiring == 1
    assert rig.states("x", "y") == "processing no-worker"
    rig.send(ev.RetirementAborted, worker=rig.at("a"), status="running")
    rig.expect("a status running", "a compute y")
    rig.send(ev.RetirementAborted, worker=rig.at("a"), status="running")
    rig.expect()


def test_retirement_can_be_taken_back_to_paused_only_or_running(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.send(ev.RetirementBegun, worker=rig.at("a"))
    with pytest.raises(ValueError, match="cannot go back to 'closing'"):
        rig.send(ev.RetirementAborted, worker=rig.at("a"), status="closing")
    rig.send(ev.RetirementAborted, worker=rig.at("a"), status="paused")
    rig.expect("a status closing_gracefully", "a status paused")
    assert rig.state.n_paused == 1


def test_a_retired_worker_leaves_without_blame(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": []})
    rig.send(ev.RetirementBegun, worker=rig.at("a"))
    rig.skip()
    rig.lose("a", expected=True)
    rig.expect("b compute x", "b removed a")
    assert rig.task("x").suspicious == 0


# Loss and blame


@pytest.mark.behaviour("B0.6")
def test_tasks_of_a_lost_worker_run_elsewhere(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": [], "y": []})
    rig.expect("a compute x", "b compute y")
    rig.lose("a")
    rig.expect("b compute x", "b removed a")
    assert rig.path("x")[-4:] == ["processing", "released", "waiting", "processing"]


def test_results_on_a_lost_worker_are_computed_again(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph(chain("x", "y", "z"), wanted=["y", "z"])
    rig.finish("x")
    rig.finish("y")
    rig.skip()
    assert rig.states("x", "y", "z") == "released memory processing"
    rig.lose("a")
    rig.expect("c lost y", "b compute x", "b removed a")
    assert rig.states("x", "y", "z") == "processing waiting waiting"


def test_only_a_second_copy_is_lost(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": []})
    rig.finish("x")
    rig.added("b", "x")
    rig.skip()
    rig.lose("a")
    rig.expect("b removed a")
    assert rig.states("x") == "memory"
    assert not rig.state.replicated


def test_a_lost_input_takes_its_dependents_back_from_other_workers(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": [], "y": ["x"]}, annotations={"y": {"workers": ["b"]}}, wanted=["y"])
    rig.finish("x")
    rig.expect("a compute x", "b compute y")
    rig.lose("a")
    rig.expect("b free-keys y", "b compute x", "b removed a")
    assert rig.states("x", "y") == "processing waiting"


def test_a_task_that_kills_too_many_workers_errs(make_rig: MakeRig) -> None:
    rig = make_rig("a b d", allowed_failures=1)
    rig.graph({"x": [], "y": ["x"]})
    rig.lose("a")
    rig.expect("a compute x", "b compute x", "b removed a", "d removed a")
    rig.lose("b")
    lines = rig.take()
    assert lines[0].startswith("c erred x: killed-worker: key='x', allowed_failures=1")
    assert lines[1].startswith("c erred y: killed-worker: key='x'")
    assert lines[2:] == ["d removed b"]
    assert rig.state.prefixes["x"].suspicious == 2


def test_blame_falls_on_what_the_heartbeat_named(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": [], "y": [], "z": []})
    rig.at("a").executing = {"y": 1.0, "unknown": 2.0}
    rig.lose("a")
    rig.skip()
    assert [rig.task(key).suspicious for key in "xyz"] == [0, 1, 0]


def test_without_a_heartbeat_the_first_by_priority_are_blamed(make_rig: MakeRig) -> None:
    rig = make_rig({"a": 2})
    rig.graph({"w": [], "x": [], "y": [], "z": []}, annotations={"z": {"user_priority": 1.0}})
    rig.lose("a")
    rig.skip()
    assert [rig.task(key).suspicious for key in "wxyz"] == [1, 0, 0, 1]


def test_a_task_whose_inputs_were_not_there_is_not_blamed_before_others(
    make_rig: MakeRig,
) -> None:
    rig = make_rig("a b")
    rig.graph({"x": []}, annotations={"x": {"workers": ["a"]}})
    rig.finish("x", nbytes=10**6)
    rig.graph({"y": ["x"], "z": []}, annotations={key: {"workers": ["b"]} for key in "yz"})
    rig.skip()
    rig.lose("b")
    rig.skip()
    assert [rig.task(key).suspicious for key in "yz"] == [0, 1]


def test_somebody_is_blamed_even_if_no_input_was_there(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": []}, annotations={"x": {"workers": ["a"]}})
    rig.finish("x", nbytes=10**6)
    rig.graph({"y": ["x"]}, annotations={"y": {"workers": ["b"]}})
    rig.skip()
    rig.lose("b")
    rig.skip()
    assert rig.task("y").suspicious == 1


def test_a_seceded_task_is_blamed(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": [], "y": []})
    rig.secede("y")
    rig.lose("a")
    rig.skip()
    assert [rig.task(key).suspicious for key in "xy"] == [0, 1]


def test_success_clears_the_suspicion(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": []})
    rig.lose("a")
    assert rig.task("x").suspicious == 1
    rig.finish("x")
    rig.expect("a compute x", "b compute x", "b removed a", "c memory x")
    assert rig.task("x").suspicious == 0


def test_nobody_is_told_of_the_last_worker(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": []})
    rig.skip()
    rig.lose("a")
    rig.expect()
    # Without any worker, all that has no restrictions waits in line.
    assert rig.states("x") == "queued"
    rig.worker("b")
    rig.expect("b compute x")


# Queuing and placing


def test_root_tasks_wait_in_line_and_others_do_not(make_rig: MakeRig) -> None:
    rig = make_rig({"a": 2})
    rig.graph({f"load-{i}": [] for i in range(6)})
    # 1.1 x 2 threads, rounded up, as stock.
    rig.expect("a compute load-0", "a compute load-1", "a compute load-2")
    rig.graph({f"one-{i}": [] for i in range(3)} | {f"two-{i}": [] for i in range(3)})
    lines = rig.take()
    assert len(lines) == 6
    assert all(line.startswith("a compute ") for line in lines)
    assert rig.state.task_counts["queued"] == 3


@pytest.mark.parametrize(("saturation", "sent"), [(1.0, 2), (1.1, 3), (2.0, 4), (float("inf"), 6)])
def test_saturation_bounds_what_a_worker_is_sent(
    make_rig: MakeRig, saturation: float, sent: int
) -> None:
    rig = make_rig({"a": 2}, worker_saturation=saturation)
    rig.graph({f"load-{i}": [] for i in range(6)})
    assert len(rig.take()) == sent
    rig.at("a")
    while rig.at("a").processing:
        rig.finish(rig.at("a").processing[0].key)
    assert rig.state.task_counts["memory"] == 6
    rig.skip()


def test_root_tasks_are_spread_over_workers_by_open_slots(make_rig: MakeRig) -> None:
    rig = make_rig({"a": 1, "b": 2})
    rig.graph({f"load-{i}": [] for i in range(9)})
    rig.expect(
        "a compute load-0",
        "b compute load-1",
        "b compute load-2",
        "a compute load-3",
        "b compute load-4",
    )


def test_a_data_producer_is_a_root_task_in_a_small_group(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    keys = ["p", "q", "r"]
    rig.graph({key: [] for key in keys}, producers=keys)
    rig.expect("a compute p", "a compute q")
    assert rig.states("r") == "queued"


def test_the_line_is_by_priority(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({f"load-{i}": [] for i in range(5)})
    rig.graph({f"urgent-{i}": [] for i in range(3)}, priority=1.0)
    rig.expect("a compute load-0", "a compute load-1")
    order = []
    while rig.at("a").processing:
        rig.finish(rig.at("a").processing[0].key)
        order.extend(line for line in rig.take() if "compute" in line)
    assert order == [
        "a compute urgent-0",
        "a compute urgent-1",
        "a compute urgent-2",
        "a compute load-2",
        "a compute load-3",
        "a compute load-4",
    ]


def test_priority_is_user_then_generation_then_order(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.graph({"x": []})
    rig.graph({"y": []}, priority=-1.0)
    rig.now += 1
    rig.graph({"z": []}, annotations={"z": {"user_priority": 2.0}})
    assert [rig.task(key).priority for key in "xyz"] == [
        (-0.0, 1.0, 0.0),
        (1.0, 1.0, 0.0),
        (-2.0, 2.0, 0.0),
    ]
    rig.worker("a", nthreads=4)
    rig.expect("a compute z", "a compute x", "a compute y")


def test_submissions_within_the_fifo_timeout_share_a_generation(make_rig: MakeRig) -> None:
    rig = make_rig()
    for key, wait in (("u", 0.0), ("v", 0.5), ("w", 0.4), ("x", 0.2)):
        rig.now += wait
        rig.graph({key: []}, fifo_timeout=1.0)
    assert [rig.task(key).generation for key in "uvwx"] == [1, 1, 1, 2]


def test_a_nested_submission_goes_ahead_of_later_ones(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"parent": []})
    rig.now += 1
    rig.graph({"later": []})
    rig.graph({"child": []}, submitting_task="parent")
    rig.graph({"orphan": []}, submitting_task="unknown")
    rig.skip()
    parent, later, child = (rig.task(key).priority for key in ("parent", "later", "child"))
    assert child < parent < later
    assert child[1] == pytest.approx(parent[1] - 0.01)
    assert rig.task("orphan").generation == rig.task("later").generation


def test_a_task_goes_where_its_inputs_are(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": []}, annotations={"x": {"workers": ["b"]}})
    rig.finish("x", nbytes=10**6)
    rig.graph({"y": ["x"]})
    rig.expect("b compute x", "c memory x", "b compute y")


def test_a_task_leaves_its_inputs_for_a_worker_that_is_much_less_busy(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": []}, annotations={"x": {"workers": ["a"]}})
    rig.finish("x")
    rig.graph({"t": [], "u": []}, annotations={key: {"workers": ["a"]} for key in "tu"})
    rig.graph({"y": ["x"]})
    rig.expect("a compute x", "c memory x", "a compute t", "a compute u", "b compute y")
    assert rig.at("b").network_bytes == 8


def test_root_tasks_count_only_the_inputs_that_are_elsewhere(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": []}, annotations={"x": {"workers": ["a"]}})
    rig.finish("x", nbytes=1000)
    rig.graph({f"inc-{i}": ["x"] for i in range(6)})
    rig.skip()
    assert (rig.at("a").network_bytes, rig.at("b").network_bytes) == (0, 2000)
    rig.finish("inc-1")
    rig.skip()
    assert (rig.at("a").network_bytes, rig.at("b").network_bytes) == (0, 2000)


def test_inputs_larger_than_the_workers_memory_err_the_task(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.worker("a", memory_limit=100)
    rig.graph(fan_in("sum", ["x", "y"]))
    rig.finish("x", nbytes=60)
    rig.finish("y", nbytes=60)
    rig.expect(
        "a compute x",
        "a compute y",
        "c memory x",
        "c memory y",
        "c erred sum: memory: key='sum', nbytes=120, worker='tcp://a:1', memory_limit=100",
    )


# Restrictions


@pytest.mark.parametrize("place", ["tcp://b:1", "b", "host-b"])
def test_a_task_runs_where_it_is_restricted_to(make_rig: MakeRig, place: str) -> None:
    rig = make_rig("a b")
    rig.graph({f"load-{i}": [] for i in range(6)}, annotations={"load-3": {"workers": [place]}})
    assert rig.on("load-3") == "b"
    rig.skip()


def test_a_restriction_to_several_places_takes_the_best(make_rig: MakeRig) -> None:
    rig = make_rig("a b d")
    rig.graph(
        {"x": [], "y": [], "z": []},
        annotations={key: {"workers": ["d", "host-b"]} for key in "xyz"},
    )
    rig.expect("b compute x", "d compute y", "b compute z")


@pytest.mark.parametrize("present", [False, True])
def test_a_loose_restriction_yields_when_nobody_meets_it(make_rig: MakeRig, present: bool) -> None:
    rig = make_rig("a b" if present else "a")
    rig.graph({"x": []}, annotations={"x": {"workers": ["b"], "allow_other_workers": True}})
    rig.expect("b compute x" if present else "a compute x")


def test_a_loose_restriction_without_any_worker_waits_for_one(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.graph({"x": []}, annotations={"x": {"workers": ["b"], "allow_other_workers": True}})
    assert rig.states("x") == "no-worker"
    rig.worker("a")
    rig.expect("a compute x")


def test_resources_restrict_and_are_booked(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.worker("b", resources={"gpu": 2.0})
    rig.graph({"x": [], "y": []}, annotations={key: {"resources": {"gpu": 1.0}} for key in "xy"})
    rig.expect("b compute x", "b compute y")
    assert rig.at("b").used_resources == {"gpu": 2.0}
    rig.secede("x")
    rig.finish("x")
    rig.finish("y")
    rig.skip()
    assert rig.at("b").used_resources == {"gpu": 0.0}
    rig.graph({"z": []}, annotations={"z": {"resources": {"gpu": 3.0}}})
    rig.expect()
    assert rig.states("z") == "no-worker"
    rig.send(ev.ResourcesSet, worker=rig.at("a"), resources={"gpu": 3.0})
    rig.expect("a compute z")


def test_set_restrictions_moves_tasks_that_have_not_started(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": [], "y": []}, annotations={"x": {"workers": ["z"]}})
    rig.expect("a compute y")
    assert rig.send(ev.RestrictionsSet, workers={"x": ["a"], "y": ["z"], "unknown": None}) == [
        "unknown"
    ]
    rig.expect("a compute x")
    assert rig.states("y") == "processing"
    rig.reschedule("y", "a")
    rig.expect("a free-keys y")
    assert rig.states("y") == "no-worker"
    rig.send(ev.RestrictionsSet, workers={"y": None})
    rig.expect("a compute y")


def test_set_restrictions_takes_a_task_out_of_the_line(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.graph({"x": []})
    assert rig.states("x") == "queued"
    rig.send(ev.RestrictionsSet, workers={"x": ["b"]})
    rig.worker("a")
    rig.expect()
    assert rig.states("x") == "no-worker"


def test_set_restrictions_keeps_booked_resources(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.worker("a", resources={"gpu": 1.0})
    rig.graph({"x": []}, annotations={"x": {"resources": {"gpu": 1.0}}})
    rig.send(ev.RestrictionsSet, workers={"x": ["b"]})
    rig.expect("a compute x")
    assert rig.at("a").used_resources == {"gpu": 1.0}


def test_restrictions_leave_nothing_behind(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    for i in range(20):
        rig.graph({f"x-{i}": []}, annotations={f"x-{i}": {"workers": [f"w-{i}"]}})
        # Known already: what its annotations ask for is not even looked at.
        rig.graph({f"x-{i}": []}, annotations={f"x-{i}": {"workers": [f"v-{i}"]}})
        rig.release(f"x-{i}")
    rig.expect()
    rig.nothing_left()


# Time


def test_the_no_workers_timeout_tells_what_was_missing(make_rig: MakeRig) -> None:
    rig = make_rig(no_workers_timeout=10)
    rig.graph({"x": [], "y": []}, annotations={"y": {"resources": {"gpu": 1.0}}})
    rig.wait(10)
    rig.expect(
        "c erred y: no-worker: key='y', timeout=10.0",
        "c erred x: no-worker: key='x', timeout=10.0",
    )


def test_the_line_does_not_time_out_while_a_worker_runs(make_rig: MakeRig) -> None:
    rig = make_rig("a", no_workers_timeout=10)
    rig.graph({f"load-{i}": [] for i in range(3)})
    rig.skip()
    rig.wait(100)
    rig.expect()
    rig.status("a", "paused")
    rig.wait(5)
    rig.expect()
    rig.wait(5)
    rig.expect("c erred load-2: no-worker: key='load-2', timeout=10.0")


def test_without_a_timeout_tasks_wait(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.graph({"x": []})
    rig.wait(10**6)
    rig.expect()
    assert rig.states("x") == "queued"


# Durations


def test_durations_are_averaged_and_price_the_occupancy(make_rig: MakeRig) -> None:
    rig = make_rig({"a": 4}, default_task_durations={"known": 3.0})
    rig.graph({"x-0": [], "x-1": [], "known-0": []})
    rig.skip()
    assert rig.at("a").occupancy == pytest.approx(0.5 + 0.5 + 3.0)
    rig.finish("x-0", seconds=2.0)
    rig.skip()
    assert rig.at("a").occupancy == pytest.approx(2.0 + 3.0)
    assert rig.state.total_occupancy == pytest.approx(5.0)
    rig.finish("x-1", seconds=1.0, transfer=0.5)
    prefix = rig.state.prefixes["x"]
    assert prefix.duration == pytest.approx(1.5)
    assert prefix.max_duration == 2.0
    assert prefix.n_measured == 2
    assert prefix.transfer_seconds == 0.5
    rig.skip()


@pytest.mark.behaviour("B2.6")
def test_a_result_without_a_computation_measures_nothing(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": []})
    rig.finish("x", has_compute=False)
    rig.expect("a compute x", "c memory x")
    assert rig.state.prefixes["x"].n_measured == 0


def test_idle_and_saturated_workers_are_counted(make_rig: MakeRig) -> None:
    rig = make_rig("a b d")
    assert rig.state.n_idle == 3
    rig.graph(
        {f"x{i}": [] for i in range(6)},
        annotations={key: {"workers": ["a"]} for key in [f"x{i}" for i in range(6)]},
    )
    assert (rig.state.n_idle, rig.state.n_saturated) == (2, 1)
    rig.skip()
    while rig.at("a").processing:
        rig.finish(rig.at("a").processing[0].key)
    assert (rig.state.n_idle, rig.state.n_saturated) == (3, 0)
    rig.skip()
