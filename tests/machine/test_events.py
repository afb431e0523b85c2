"""Each kind of event does something that can be seen: a new kind without a row here fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cython_ext import events as ev
from tests.machine.builders import Rig

MakeRig = Callable[..., Rig]


def computing(make_rig: MakeRig) -> Rig:
    """``x`` is processing on a, b holds ``m``, ``bad`` has failed; client k wants nothing."""
    rig = make_rig("a b", clients="c k", no_workers_timeout=10)
    rig.graph({"x": [], "m": [], "bad": []}, annotations={"m": {"workers": ["b"]}})
    rig.finish("m")
    rig.err("bad")
    rig.skip()
    return rig


def run_id(rig: Rig) -> int:
    return rig.task("x").run_id


# What is sent, and the effects of exactly that.
ROWS: dict[type[ev.Event], tuple[Callable[[Rig], Any], list[str]]] = {
    ev.TaskFinished: (lambda rig: rig.finish("x"), ["c memory x"]),
    ev.TaskErred: (lambda rig: rig.err("x"), ["c erred x: boom"]),
    ev.KeysAdded: (lambda rig: rig.added("b", "x"), ["b remove-replicas x"]),
    ev.DataReleased: (lambda rig: rig.dropped("b", "m"), ["c lost m", "b compute m"]),
    ev.LongRunning: (lambda rig: rig.secede("x"), []),
    ev.RescheduleAsked: (lambda rig: rig.reschedule("x"), ["a free-keys x", "a compute x"]),
    ev.StealAnswered: (
        lambda rig: rig.send(ev.StealAnswered, worker=rig.at("a"), key="x", state="ready"),
        [],
    ),
    ev.WhoHasAsked: (
        lambda rig: rig.send(ev.WhoHasAsked, worker=rig.at("a"), keys=["m"]),
        ["a refresh m@b"],
    ),
    ev.WorkerRegistered: (lambda rig: rig.worker("e"), []),
    ev.WorkerStatusChanged: (lambda rig: rig.status("a", "paused"), []),
    ev.WorkerLost: (lambda rig: rig.lose("a"), ["b compute x", "b removed a"]),
    ev.ClientConnected: (lambda rig: rig.client("z"), []),
    ev.ClientGone: (
        lambda rig: rig.leave("c"),
        ["a free-keys x", "b free-keys m", "a free-keys bad"],
    ),
    ev.KeysWanted: (lambda rig: rig.want("m", client="k"), ["k memory m"]),
    ev.KeysReleased: (lambda rig: rig.release("x"), ["a free-keys x"]),
    ev.KeysCancelled: (lambda rig: rig.cancel("x"), ["c cancelled x: cancelled", "a free-keys x"]),
    ev.KeyReportAsked: (
        lambda rig: rig.send(ev.KeyReportAsked, client_id="c", key="m"),
        ["c memory m"],
    ),
    ev.KeysRetried: (
        lambda rig: rig.retry("bad"),
        ["a free-keys bad", "c retried bad", "b compute bad"],
    ),
    ev.GraphBegun: (
        lambda rig: rig.begin({"y": ["nothing"]}),
        ["c cancelled y: lost dependencies"],
    ),
    ev.GraphSliceReady: (
        lambda rig: rig.begin({"y": ["m"]}, wanted=["y"]).slice(),
        ["b compute y"],
    ),
    ev.GraphEnded: (lambda rig: rig.graph({"y": []}), ["b compute y"]),
    ev.GraphFailed: (lambda rig: rig.begin({"y": []}).fail("no"), ["c erred y: no"]),
    ev.DataPlaced: (lambda rig: rig.scatter("d", "a", client="k"), ["k memory d"]),
    ev.ReplicaMissing: (
        lambda rig: rig.send(ev.ReplicaMissing, worker=rig.at("b"), keys=["m"]),
        ["b remove-replicas m", "c lost m", "b compute m"],
    ),
    ev.ReplicasDropped: (
        lambda rig: rig.send(ev.ReplicasDropped, worker=rig.at("b"), keys=["m"], send=True),
        [],
    ),
    ev.ReplicasAsked: (
        lambda rig: rig.send(ev.ReplicasAsked, worker=rig.at("a"), keys=["m"]),
        ["a acquire m@b"],
    ),
    ev.RetirementBegun: (
        lambda rig: rig.send(ev.RetirementBegun, worker=rig.at("b")),
        ["b status closing_gracefully"],
    ),
    ev.RetirementAborted: (
        lambda rig: (
            rig.send(ev.RetirementBegun, worker=rig.at("b")),
            rig.send(ev.RetirementAborted, worker=rig.at("b"), status="running"),
        ),
        ["b status closing_gracefully", "b status running"],
    ),
    ev.RestrictionsSet: (
        lambda rig: (rig.send(ev.RestrictionsSet, workers={"x": ["a"]}), rig.reschedule("x")),
        ["a free-keys x", "a compute x"],
    ),
    ev.ResourcesSet: (
        lambda rig: (
            rig.graph({"y": []}, annotations={"y": {"resources": {"gpu": 1.0}}}),
            rig.send(ev.ResourcesSet, worker=rig.at("a"), resources={"gpu": 1.0}),
        ),
        ["a compute y"],
    ),
    ev.MessageRejected: (
        lambda rig: rig.send(
            ev.MessageRejected, worker=rig.at("a"), client_id=None, keys=["x"], reason="bad"
        ),
        ["a free-keys x", "a compute x"],
    ),
    ev.Restarted: (
        lambda rig: rig.send(ev.Restarted),
        ["c restart", "k restart", "a free-keys x", "b free-keys m", "a free-keys bad"],
    ),
    ev.TimePassed: (
        lambda rig: (
            rig.graph({"y": []}, annotations={"y": {"workers": ["z"]}}),
            rig.wait(10),
        ),
        [
            "c erred y: no-valid-worker: key='y', workers=('z',), hosts=(), resources={}, "
            "timeout=10.0"
        ],
    ),
}


@pytest.mark.parametrize("kind", ev.EVENT_CLASSES, ids=lambda kind: kind.__name__)
def test_each_kind_of_event_has_its_effects(kind: type[ev.Event], make_rig: MakeRig) -> None:
    action, lines = ROWS[kind]
    rig = computing(make_rig)
    action(rig)
    rig.expect(*lines)
    assert rig.sent[kind]


def test_events_take_exactly_their_fields() -> None:
    with pytest.raises(TypeError, match=r"KeysAdded: missing fields \['keys'\]"):
        ev.KeysAdded(0.0, "s", worker=None)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"surplus fields \['more'\]"):
        ev.TimePassed(0.0, "s", more=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="KeysAdded has no field 'kyes'"):
        ev.KeysAdded(0.0, "s", worker=None, kyes=[])  # type: ignore[call-arg]
    assert "DataReleased('s', worker=None, key='x')" in repr(
        ev.DataReleased(0.0, "s", worker=None, key="x")  # type: ignore[arg-type]
    )


def test_an_event_of_no_kind_is_refused(make_rig: MakeRig) -> None:
    with pytest.raises(TypeError):
        make_rig().machine.handle(object())  # type: ignore[arg-type]
