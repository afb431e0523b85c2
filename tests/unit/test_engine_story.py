"""Stories and dumps: the journal and the books as plain values."""

from __future__ import annotations

import msgpack
import pytest
import yaml
from distributed.cluster_dump import DumpArtefact

from cython_ext.journal import Journal
from distributed_core.engine.scheduler import dump
from distributed_core.engine.story import story, story_tuples
from tests.machine.builders import Rig, chain, fan_in


def test_a_story_tells_who_caused_what_and_where() -> None:
    rig = Rig("a")
    rig.graph({"x": [], "y": []})
    rig.now = 123.0
    rig.finish("x")
    *_, last = story(rig.machine, {"x"})
    assert last == {
        "key": "x",
        "start": "processing",
        "finish": "memory",
        "stimulus_id": last["stimulus_id"],
        "time": 123.0,
        "where": "tcp://a:1",
        "note": None,
        "reason": "a worker reported success",
    }
    assert last["stimulus_id"].startswith("TaskFinished-")


def test_a_story_may_be_of_a_stimulus_a_worker_or_a_client() -> None:
    rig = Rig("a")
    rig.graph({"x": [], "y": []})
    rig.finish("x")
    (stimulus,) = {record["stimulus_id"] for record in story(rig.machine, {"x"})[-1:]}
    assert {record["key"] for record in story(rig.machine, {stimulus})} == {"x"}
    assert {record["key"] for record in story(rig.machine, {"tcp://a:1"})} == {"x", "y"}
    assert {record["where"] for record in story(rig.machine, {"c"})} == {"c"}
    assert len(story(rig.machine, None)) == len(rig.machine.journal)


def test_what_changed_nothing_is_told_with_its_reason() -> None:
    rig = Rig("a")
    rig.finish("x", "a", 7)
    (record,) = story(rig.machine, {"x"})
    assert (record["note"], record["reason"]) == ("finished-unknown", None)
    assert story_tuples(rig.machine, {"x"}) == []


def test_stock_clients_get_their_tuples() -> None:
    rig = Rig("a")
    rig.graph({"x": []})
    assert [row[:4] for row in story_tuples(rig.machine, {"x"})] == [
        ("x", "released", "waiting", {}),
        ("x", "waiting", "processing", {}),
    ]
    assert all(
        isinstance(stimulus, str) and seconds == 100.0
        for *_, stimulus, seconds in story_tuples(rig.machine, None)
    )


def test_the_journal_forgets_the_oldest() -> None:
    rig = Rig("a", journal_length=4)
    for i in range(3):
        rig.graph({f"x{i}": []})
    assert len(rig.machine.journal) == 4
    assert rig.machine.journal.n_written == 6
    assert [record["key"] for record in story(rig.machine, None)] == ["x1", "x1", "x2", "x2"]
    with pytest.raises(ValueError, match="journal length must be positive, got 0"):
        Journal(0)


def everything(rig: Rig) -> None:
    """One of each: states, restrictions, actors, tuples as keys, errors, placeholders."""
    rig.graph(
        {**fan_in("sum", [("load", i) for i in range(6)]), "bad": [], "far": [], "act": []},
        annotations={"far": {"workers": ["q", 3], "resources": {"gpu": 1.0}}},
        actors={"act"},
    )
    rig.err("bad")
    rig.finish("act")
    rig.secede(("load", 0))
    rig.want("placeholder")
    rig.at("a").executing = {("load", 0): 1.0}
    rig.begin({"late": ["act"]})


def test_a_dump_is_plain_and_complete() -> None:
    rig = Rig("a b")
    everything(rig)
    state = dump(rig.machine)
    assert msgpack.unpackb(msgpack.packb(state), strict_map_key=True)
    assert yaml.safe_load(yaml.safe_dump(state))
    assert len(state["tasks"]) == 11
    assert state["tasks"]["('load', 0)"]["processing_on"] == "tcp://a:1"
    assert state["tasks"]["('load', 0)"]["long_running"] is True
    assert state["tasks"]["sum"]["waiting_on"][0] == "('load', 0)"
    assert state["tasks"]["far"]["worker_restrictions"] == ["3", "q"]
    assert state["tasks"]["bad"]["exception_text"] == "boom"
    assert state["tasks"]["placeholder"]["defined"] is False
    assert state["workers"]["tcp://a:1"]["executing"] == {"('load', 0)": 1.0}
    assert state["clients"]["c"]["wants_what"]
    assert state["submissions"] == [2]
    assert state["task_counts"] == rig.state.task_counts


def test_a_dump_leaves_out_what_it_is_told_to() -> None:
    rig = Rig("a b")
    everything(rig)
    state = dump(rig.machine, ["transition_log", "traceback_text", "clients"])
    assert "transition_log" not in state
    assert "clients" not in state
    assert "traceback_text" not in state["tasks"]["bad"]
    assert state["tasks"]["bad"]["exception_text"] == "boom"


def test_stock_tools_read_a_dump() -> None:
    rig = Rig("a")
    rig.graph(chain("x", "y"))
    artefact = DumpArtefact({"scheduler": dump(rig.machine), "workers": {}})
    assert [task["key"] for task in artefact.scheduler_tasks_in_state("waiting")] == ["y"]
    assert artefact.missing_workers() == ["tcp://a:1"]
    assert [row[2] for row in artefact.scheduler_story("x")["x"]] == ["waiting", "processing"]
