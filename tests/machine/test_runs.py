"""Runs of tasks: results and failures, on time, late, stale, and from whom nobody expects them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cython_ext import events as ev
from tests.machine.builders import Rig, chain, fan_in

MakeRig = Callable[..., Rig]


def notes(rig: Rig) -> dict[str, int]:
    """What was recorded that changed no state."""
    return dict(rig.machine.counters)


# Results


def test_results_flow_through_a_graph_and_inputs_are_freed(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph(fan_in("sum", ["x", "y"]), wanted=["sum"])
    rig.expect("a compute x", "b compute y")
    rig.finish("x")
    rig.expect()
    rig.finish("y")
    rig.expect("a compute sum")
    rig.finish("sum")
    rig.expect("c memory sum", "a free-keys x", "b free-keys y")
    rig.release("sum")
    rig.expect("a free-keys sum")
    rig.nothing_left()


def test_a_run_carries_priority_holders_and_sizes(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph(chain("x", "y"), wanted=["y"], priority=3.0)
    rig.skip()
    rig.finish("x", nbytes=1000)
    (effect,) = rig.sink.take()
    assert effect == (
        "compute-task",
        "tcp://a:1",
        "y",
        1,
        (-3.0, 1.0, 1.0),
        {"x": ["tcp://a:1"]},
        {"x": 1000},
        "TaskFinished-6",
    )


def test_a_finished_task_of_nobody_is_freed_on_the_sender(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.finish("x", "a", 7)
    rig.expect("a free-keys x")
    assert notes(rig) == {"finished-unknown": 1}


@pytest.mark.behaviour("B2.10")
@pytest.mark.parametrize("state", ["queued", "no-worker", "erred", "waiting", "processing"])
def test_a_result_that_is_not_from_a_run_is_freed(make_rig: MakeRig, state: str) -> None:
    rig = make_rig("a b")
    rig.graph({"in": [], "x": ["in"]}, annotations={"x": {"workers": ["b"]}}, wanted=["x"])
    if state != "waiting":
        rig.finish("in")
    if state == "erred":
        rig.err("x")
    elif state in ("queued", "no-worker"):
        rig.status("a", "paused")
        rig.status("b", "paused")
        rig.reschedule("x")
        rig.graph({f"x-{i}": [] for i in range(9)})
    key = "x-0" if state == "queued" else "x"
    assert rig.states(key) == state
    rig.skip()
    rig.finish(key, "a", -1)
    rig.expect(f"a free-keys {key}")
    assert rig.states(key) == state
    assert notes(rig)["finished-stale"] == 1


@pytest.mark.behaviour("B2.10")
def test_a_result_that_is_not_from_a_run_starts_the_run_in_force_anew(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": []})
    rig.finish("x", "a", -1)
    rig.expect("a compute x", "a free-keys x", "a compute x")
    assert rig.path("x")[-3:] == ["released", "waiting", "processing"]
    rig.finish("x")
    rig.expect("c memory x")


@pytest.mark.behaviour("B2.10")
@pytest.mark.parametrize("back_to", ["a", "b"])
def test_a_result_of_a_run_that_was_taken_back_is_on_its_way_out(
    make_rig: MakeRig, back_to: str
) -> None:
    rig = make_rig("a b")
    rig.graph({"x": []})
    first = rig.task("x").run_id
    rig.send(ev.RestrictionsSet, workers={"x": [back_to]})
    rig.reschedule("x", "a")
    rig.expect("a compute x", "a free-keys x", f"{back_to} compute x")
    # It crossed the order to free it. Another such order could hit the new run.
    rig.finish("x", "a", first)
    rig.err("x", "a", first)
    rig.expect()
    assert (notes(rig)["finished-stale"], notes(rig)["erred-stale"]) == (1, 1)
    rig.finish("x")
    rig.expect("c memory x")


@pytest.mark.behaviour("B3.3")
def test_a_run_of_before_a_reconnect_is_accepted_as_data(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": []})
    first = rig.task("x").run_id
    rig.lose("a")
    rig.worker("a")
    rig.expect("a compute x", "b compute x", "b removed a")
    rig.finish("x", "a", first)
    # The run on b is not needed any more.
    rig.expect("b free-keys x", "c memory x")
    assert [worker.name for worker in rig.task("x").who_has] == ["a"]
    rig.finish("x", "b", first + 1)
    rig.expect()
    assert [worker.name for worker in rig.task("x").who_has] == ["a"]
    assert notes(rig)["finished-as-data"] == 1
    assert notes(rig)["run-superseded"] == 1


@pytest.mark.behaviour("B3.3")
def test_a_run_of_before_a_reconnect_completes_the_one_after_it(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": []})
    first = rig.task("x").run_id
    rig.lose("a")
    rig.worker("a")
    rig.expect("a compute x", "a compute x")
    rig.finish("x", "a", first)
    rig.expect("c memory x")
    rig.finish("x", "a", first + 1)
    rig.expect()
    assert notes(rig)["finished-again"] == 1


@pytest.mark.behaviour("B3.3")
@pytest.mark.parametrize("again", ["waiting", "queued", "no-worker"])
def test_a_late_result_completes_a_task_that_waits_to_run_again(
    make_rig: MakeRig, again: str
) -> None:
    rig = make_rig("a")
    rig.graph(
        chain("in", "x") if again == "waiting" else {"x": []},
        annotations={"x": {"workers": ["a"]}} if again == "no-worker" else {},
        wanted=["x"],
    )
    if again == "waiting":
        rig.finish("in")
    first = rig.task("x").run_id
    rig.lose("a")
    rig.worker("a", status="paused")
    assert rig.states("x") == again
    rig.skip()
    rig.finish("x", "a", first)
    rig.expect("c memory x")


@pytest.mark.behaviour("B3.3")
def test_a_late_result_of_another_definition_is_not_taken(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": []})
    first = rig.task("x").run_id
    rig.lose("a")
    rig.release("x")
    rig.worker("a")
    rig.graph({"x": []})
    rig.expect("a compute x", "a compute x")
    rig.finish("x", "a", first)
    # To free it would take the run in force with it, so that one is ordered again.
    rig.expect("a free-keys x", "a compute x")
    assert notes(rig)["finished-stale"] == 1
    rig.finish("x")
    rig.expect("c memory x")


@pytest.mark.behaviour("B3.3")
def test_actors_are_never_accepted_from_an_earlier_run(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": []}, actors={"x"})
    first = rig.task("x").run_id
    rig.lose("a")
    rig.worker("a")
    rig.skip()
    rig.finish("x", "a", first)
    rig.expect("a free-keys x")
    assert rig.on("x") == "b"


@pytest.mark.behaviour("B2.6")
def test_copies_that_arrive_where_the_task_is_processing_complete_it(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": []})
    rig.finish("x")
    rig.status("b", "running")
    rig.dropped("a", "x")
    rig.expect("a compute x", "c memory x", "c lost x", "a compute x")
    rig.added("a", "x")
    rig.expect("c memory x")


def test_copies_of_what_is_not_in_memory_are_dropped(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": []})
    rig.skip()
    rig.added("b", "x", "unknown")
    rig.expect("b remove-replicas x", "b remove-replicas unknown")
    assert notes(rig) == {"copy-unwanted": 2}


def test_a_second_copy_is_booked_and_freed_with_the_first(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": []})
    rig.finish("x")
    rig.skip()
    rig.added("b", "x")
    rig.added("b", "x")
    assert list(rig.state.replicated) == [rig.task("x")]
    assert (rig.at("a").nbytes, rig.at("b").nbytes) == (8, 8)
    rig.release("x")
    rig.expect("a free-keys x", "b free-keys x")
    rig.nothing_left()


# Failures


def test_retries_are_used_up_one_by_one(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": []}, annotations={"x": {"retries": 2}})
    rig.expect("a compute x")
    for left in (1, 0):
        rig.err("x")
        rig.expect("a free-keys x", "a compute x")
        assert rig.task("x").retries == left
    rig.err("x", text="third")
    rig.expect("c erred x: third")
    assert rig.task("x").error.erred_on == ["tcp://a:1"]


def test_a_failure_of_nobodys_task_is_freed(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.err("x", "a", 3)
    rig.expect("a free-keys x")
    assert notes(rig) == {"erred-unknown": 1}


def test_a_failure_of_a_task_that_runs_elsewhere_is_stale(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": []})
    rig.skip()
    rig.err("x", "b", 0)
    rig.expect()
    assert notes(rig) == {"erred-stale": 1}
    assert rig.states("x") == "processing"


@pytest.mark.parametrize("run", ["of before a reconnect", "none"])
def test_a_failure_that_nobody_took_back_starts_the_task_anew(make_rig: MakeRig, run: str) -> None:
    rig = make_rig("a")
    rig.graph({"x": []})
    first = rig.task("x").run_id
    rig.lose("a")
    rig.worker("a")
    rig.skip()
    rig.err("x", "a", -1 if run == "none" else first)
    rig.expect("a free-keys x", "a compute x")
    assert notes(rig)["erred-stale"] == 1


@pytest.mark.behaviour("B2.8")
def test_a_result_that_a_worker_cannot_read_uses_up_a_retry(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph(
        {"x": [], "y": ["x"]},
        annotations={"x": {"retries": 1, "workers": ["a"]}, "y": {"workers": ["b"]}},
        wanted=["y"],
    )
    rig.finish("x")
    rig.expect("a compute x", "b compute y")
    rig.err("x", "b", -1)
    rig.expect("b free-keys x", "b free-keys y", "b compute y")
    assert rig.states("x") == "memory"
    # None is left: it has failed for good, and what needs it, too.
    rig.err("x", "b", -1, text="unreadable")
    rig.expect("a free-keys x", "b free-keys y", "c erred y: unreadable")
    assert rig.states("x", "y") == "erred erred"
    assert notes(rig)["unreadable-input"] == 2


@pytest.mark.behaviour("B2.8")
def test_a_report_on_data_by_a_worker_that_does_not_need_it_is_stale(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": []})
    rig.finish("x")
    rig.skip()
    rig.err("x", "b", -1)
    rig.expect()
    assert rig.states("x") == "memory"
    assert notes(rig) == {"erred-stale": 1}


def test_an_error_reaches_all_that_depend_on_it_and_a_retry_undoes_it(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": [], "y": ["x"], "w": [], "z": ["y", "w"]})
    rig.expect("a compute x", "a compute w")
    rig.err("x")
    rig.expect("c erred x: boom", "c erred y: boom", "c erred z: boom")
    assert rig.retry("z") == ["z", "y", "x"]
    rig.expect("a free-keys x", "c retried x", "c retried y", "c retried z", "a compute x")
    rig.finish("w")
    rig.finish("x")
    rig.finish("y")
    rig.finish("z")
    rig.expect("c memory w", "c memory x", "a compute y", "c memory y", "a compute z", "c memory z")


def test_a_retry_waits_for_every_failed_input(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": [], "y": [], "z": ["x", "y"]})
    rig.skip()
    rig.err("x")
    rig.err("y")
    rig.expect("c erred x: boom", "c erred z: boom", "c erred y: boom")
    rig.retry("x")
    rig.expect("a free-keys x", "c retried x", "a compute x")
    assert rig.states("z") == "erred"
    rig.retry("z")
    rig.expect("a free-keys y", "c retried y", "c retried z", "a compute y")


def test_retrying_what_has_not_failed_does_nothing(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": []})
    rig.skip()
    assert rig.retry("x", "unknown") == []
    rig.expect()


def test_a_retry_gives_back_the_annotated_retries(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": []}, annotations={"x": {"retries": 1}})
    rig.err("x")
    rig.err("x")
    rig.skip()
    rig.retry("x")
    rig.skip()
    rig.err("x")
    rig.expect("a free-keys x", "a compute x")


# Reschedule, secede, steal


@pytest.mark.behaviour("B1.3")
@pytest.mark.parametrize("worker", ["a", "b"])
def test_a_reschedule_from_a_worker_without_the_task_is_stale(
    make_rig: MakeRig, worker: str
) -> None:
    rig = make_rig("a b")
    rig.graph({"x": []})
    if worker == "a":
        rig.finish("x")
    rig.skip()
    assert rig.reschedule("x", worker) is None
    assert rig.reschedule("unknown", worker) is None
    rig.expect()
    assert notes(rig) == {"reschedule-stale": 2}


@pytest.mark.behaviour("B1.1")
def test_a_reschedule_carries_its_own_stimulus_id_and_recomputes_nothing_else(
    make_rig: MakeRig,
) -> None:
    rig = make_rig("a")
    rig.graph({"x": [], "y": []})
    rig.skip()
    rig.send(ev.RescheduleAsked, "reschedule-77", worker=rig.at("a"), key="x")
    rig.expect("a free-keys x", "a compute x")
    story = rig.machine.journal.story({"reschedule-77"})
    assert [(record[0], record[1], record[2]) for record in story] == [
        ("x", "processing", "released"),
        ("x", "released", "waiting"),
        ("x", "waiting", "processing"),
    ]


@pytest.mark.behaviour("B1.1")
def test_a_seceded_task_can_reschedule(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": []})
    rig.secede("x")
    rig.status("a", "paused")
    rig.skip()
    assert rig.reschedule("x", "a")
    rig.expect("a free-keys x", "b compute x")
    assert rig.at("a").n_long_running == 0
    assert not rig.task("x").long_running


@pytest.mark.behaviour("B1.2")
def test_an_operator_reschedules_on_the_same_path(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": []})
    assert rig.reschedule("x")
    rig.expect("a compute x", "a free-keys x", "a compute x")


def test_seceding_opens_a_slot_and_counts_no_occupancy(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({f"load-{i}": [] for i in range(4)})
    rig.expect("a compute load-0", "a compute load-1")
    rig.secede("load-0", 0.25)
    rig.expect("a compute load-2")
    assert rig.at("a").n_long_running == 1
    assert rig.state.prefixes["load"].duration == 0.25
    assert rig.at("a").occupancy == pytest.approx(0.5)
    rig.secede("load-0")
    rig.expect()
    rig.finish("load-0")
    rig.expect("c memory load-0")
    assert rig.at("a").n_long_running == 0


def test_seceding_in_a_run_that_is_over_is_stale(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": []})
    first = rig.task("x").run_id
    rig.reschedule("x", "a")
    rig.skip()
    for worker, run_id in (("a", first), ("b", first + 1)):
        rig.send(
            ev.LongRunning, worker=rig.at(worker), key="x", run_id=run_id, compute_duration=-1.0
        )
    rig.expect()
    assert notes(rig)["long-running-stale"] == 2
    assert not rig.task("x").long_running


@pytest.mark.behaviour("B0.1")
@pytest.mark.parametrize("state", ["ready", "executing", "memory", None])
def test_an_answer_to_no_open_steal_request_is_stale(make_rig: MakeRig, state: str | None) -> None:
    rig = make_rig("a")
    rig.graph({"x": []})
    rig.skip()
    rig.send(ev.StealAnswered, worker=rig.at("a"), key="x", state=state)
    rig.expect()
    assert notes(rig) == {"steal-answer-stale": 1}
    assert rig.states("x") == "processing"


# Messages of workers that are gone, and messages that do not fit


@pytest.mark.behaviour("B3.6")
def test_no_message_of_a_worker_that_is_gone_changes_anything(make_rig: MakeRig) -> None:
    rig = make_rig("a b")
    rig.graph({"x": [], "y": []})
    rig.finish("y")
    run_id = rig.task("x").run_id
    old = rig.at("a")
    rig.lose("a")
    rig.worker("a")
    rig.skip()
    before = rig.machine.n_transitions
    rig.send(
        ev.TaskErred,
        worker=old,
        key="x",
        run_id=run_id,
        exception="e",
        traceback=None,
        exception_text="e",
        traceback_text="",
    )
    rig.send(ev.KeysAdded, worker=old, keys=["y"])
    rig.send(ev.DataReleased, worker=old, key="y")
    rig.send(ev.LongRunning, worker=old, key="x", run_id=run_id, compute_duration=1.0)
    rig.send(ev.RescheduleAsked, worker=old, key="x")
    rig.send(ev.StealAnswered, worker=old, key="x", state="ready")
    rig.send(ev.WhoHasAsked, worker=old, keys=["y"])
    rig.send(ev.WorkerStatusChanged, worker=old, status="running")
    rig.send(ev.ReplicaMissing, worker=old, keys=["y"])
    assert rig.send(ev.ReplicasDropped, worker=old, keys=["y"], send=True) == []
    assert rig.send(ev.ReplicasAsked, worker=old, keys=["y"]) == []
    assert "closed" in rig.send(ev.RetirementBegun, worker=old)
    rig.send(ev.RetirementAborted, worker=old, status="running")
    rig.send(ev.ResourcesSet, worker=old, resources={"gpu": 1.0})
    rig.send(ev.MessageRejected, worker=old, client_id=None, keys=["x"], reason="bad")
    rig.send(ev.WorkerLost, worker=old, expected=False, reason="again")
    rig.expect()
    assert rig.machine.n_transitions == before
    assert rig.on("x") == "b"
    assert notes(rig)["sender-gone"] == 14


@pytest.mark.behaviour("B3.6")
def test_a_result_of_a_worker_that_is_gone_is_not_taken_for_its_successors(
    make_rig: MakeRig,
) -> None:
    rig = make_rig("a")
    rig.graph({"x": []})
    run_id = rig.task("x").run_id
    old = rig.at("a")
    rig.lose("a")
    rig.worker("a")
    rig.expect("a compute x", "a compute x")
    for worker in (old, None):
        rig.send(
            ev.TaskFinished,
            worker=worker,
            key="x",
            run_id=run_id,
            nbytes=1,
            typename="int",
            type=b"int",
            compute_start=0.0,
            compute_stop=0.0,
            compute_seconds=0.0,
            transfer_seconds=0.0,
            metadata=None,
            thread=None,
            startstops=None,
            has_compute=False,
        )
    rig.expect()
    assert rig.states("x") == "processing"
    assert notes(rig)["sender-gone"] == 2


@pytest.mark.behaviour("B1.4")
def test_a_rejected_message_of_a_worker_reschedules_what_it_names(make_rig: MakeRig) -> None:
    rig = make_rig("a", allowed_failures=1)
    rig.graph({"x": []})
    rig.finish("x")
    rig.graph({"y": []})
    rig.skip()

    def reject() -> None:
        rig.send(
            ev.MessageRejected,
            worker=rig.at("a"),
            client_id=None,
            keys=["y", "x", "unknown"],
            reason="bad",
        )

    reject()
    rig.expect("a free-keys unknown", "a free-keys y", "a compute y")
    reject()
    rig.expect("a free-keys unknown", "a free-keys y", "c erred y: rejected: key='y', reason='bad'")
    assert rig.states("x") == "memory"


@pytest.mark.behaviour("B1.4")
def test_a_rejected_message_of_a_client_errs_the_keys_that_it_names(make_rig: MakeRig) -> None:
    rig = make_rig("a")
    rig.graph({"x": []})
    rig.skip()
    for client in ("c", "nobody"):
        rig.send(ev.MessageRejected, worker=None, client_id=client, keys=["q"], reason="bad")
    rig.expect("c erred q: rejected: key='q', reason='bad'")
    assert rig.states("x", "q") == "processing -"
