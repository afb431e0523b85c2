"""Stream messages as events, against messages as stock peers make them (B1.4)."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from distributed.protocol import Serialize, dumps
from distributed.worker_state_machine import (
    AddKeysMsg,
    LongRunningMsg,
    ReleaseWorkerDataMsg,
    RequestRefreshWhoHasMsg,
    RescheduleMsg,
    SendMessageToScheduler,
    StealResponseMsg,
    TaskErredMsg,
    TaskFinishedMsg,
)
from hypothesis import given
from hypothesis import strategies as st

from cython_ext.events import (
    DataReleased,
    KeysAdded,
    KeysReleased,
    LongRunning,
    RescheduleAsked,
    StealAnswered,
    TaskFinished,
    WhoHasAsked,
)
from cython_ext.inbound import ClientStreamDecoder, MsgpackError, WorkerStreamDecoder

NOW = 1_700_000_000.25
INT_TYPE = pickle.dumps(int)

KEYS: list[Any] = [
    "inc-2e0f917099bac57274f8cc1384f6fdb0",
    "schlüssel-€",
    "x" * 70_000,
    "",
    ("x", 0, 1),
    ("x", ("y", 2.5), -7),
    0,
    -1,
    2**63,
    2.5,
    float("inf"),
]


class Tap:
    """A decoder whose callables keep what they are given, in one list."""

    def __init__(self, kind: Any = WorkerStreamDecoder) -> None:
        self.seen: list[Any] = []
        self.decoder = kind(
            self.seen.append,
            lambda *args: self.seen.append(("cold", *args)),
            lambda *args: self.seen.append(("rejected", *args)),
        )

    def feed(self, message: Any) -> list[Any]:
        """Decode what stock ``dumps`` makes of ``message``; return what came of it."""
        return self.feed_frames(dumps(message))

    def feed_frames(self, frames: list[Any]) -> list[Any]:
        start = len(self.seen)
        self.decoder.decode(frames, None, NOW)
        return self.seen[start:]


@pytest.fixture
def tap() -> Tap:
    return Tap()


def finished(**changes: Any) -> dict[str, Any]:
    message = TaskFinishedMsg(
        key="inc-2e0f917099bac57274f8cc1384f6fdb0",
        run_id=7,
        nbytes=28,
        type=INT_TYPE,
        typename="int",
        metadata={},
        thread=140064737625792,
        startstops=[{"action": "compute", "start": 10.0, "stop": 10.5}],
        stimulus_id="task-finished-1796071980.8974037",
    ).to_dict()
    return {**message, **changes}


HOT: list[SendMessageToScheduler] = [
    AddKeysMsg(keys=["a", ("b", 1)], stimulus_id="s-1"),
    ReleaseWorkerDataMsg(key="a", stimulus_id="s-1"),
    LongRunningMsg(key="a", run_id=3, compute_duration=0.5, stimulus_id="s-1"),
    RescheduleMsg(key="a", stimulus_id="s-1"),
    StealResponseMsg(key="a", state="ready", stimulus_id="s-1"),
    RequestRefreshWhoHasMsg(keys=["a", 2], stimulus_id="s-1"),
]
HOT_MESSAGES = [finished(), *(message.to_dict() for message in HOT)]


def test_task_finished_of_a_stock_worker(tap: Tap) -> None:
    [event] = tap.feed([finished()])
    assert isinstance(event, TaskFinished)
    assert event.key == "inc-2e0f917099bac57274f8cc1384f6fdb0"
    assert event.now == NOW
    assert event.stimulus_id == "task-finished-1796071980.8974037"
    assert event.worker is None
    assert (event.run_id, event.nbytes) == (7, 28)
    assert (event.type, event.typename) == (INT_TYPE, "int")
    assert event.metadata is None
    assert event.thread == 140064737625792
    assert event.startstops is None
    assert event.has_compute
    assert (event.compute_start, event.compute_stop) == (10.0, 10.5)
    assert event.compute_seconds == 0.5
    assert event.transfer_seconds == 0.0
    assert tap.decoder.counts == {"task-finished": 1}


def test_the_other_hot_messages_of_a_stock_worker(tap: Tap) -> None:
    events = tap.feed([message.to_dict() for message in HOT])
    added, released, long_running, reschedule, answer, asked = events
    assert isinstance(added, KeysAdded)
    assert added.keys == ["a", ("b", 1)]
    assert isinstance(released, DataReleased)
    assert released.key == "a"
    assert isinstance(long_running, LongRunning)
    assert (long_running.key, long_running.run_id) == ("a", 3)
    assert long_running.compute_duration == 0.5
    assert isinstance(reschedule, RescheduleAsked)
    assert reschedule.key == "a"
    assert isinstance(answer, StealAnswered)
    assert (answer.key, answer.state) == ("a", "ready")
    assert isinstance(asked, WhoHasAsked)
    assert asked.keys == ["a", 2]
    for event in events:
        assert (event.now, event.stimulus_id, event.worker) == (NOW, "s-1", None)


def test_fields_that_may_be_nil(tap: Tap) -> None:
    long_running = LongRunningMsg(key="a", run_id=3, compute_duration=None, stimulus_id="s")
    answer = StealResponseMsg(key="a", state=None, stimulus_id="s")
    events = tap.feed([long_running.to_dict(), answer.to_dict(), finished(thread=None)])
    assert events[0].compute_duration == -1.0
    assert events[1].state is None
    assert events[2].thread is None


@pytest.mark.parametrize("key", KEYS, ids=lambda key: repr(key)[:20])
def test_keys_of_every_kind(tap: Tap, key: Any) -> None:
    one, many = tap.feed(
        [finished(key=key), AddKeysMsg(keys=[key, "z"], stimulus_id="s").to_dict()]
    )
    assert one.key == key
    assert type(one.key) is type(key)
    assert many.keys == [key, "z"]


def test_keys_may_come_as_a_set(tap: Tap) -> None:
    [event] = tap.feed([{"op": "add-keys", "keys": {"a"}, "stimulus_id": "s"}])
    assert event.keys == ["a"]


@pytest.mark.parametrize("position", range(11))
def test_the_op_may_stand_anywhere(tap: Tap, position: int) -> None:
    fields = [item for item in finished().items() if item[0] != "op"]
    fields.insert(position, ("op", "task-finished"))
    [event] = tap.feed([dict(fields)])
    assert isinstance(event, TaskFinished)


def test_times_are_summed_by_action(tap: Tap) -> None:
    [event] = tap.feed(
        [
            finished(
                startstops=[
                    {"action": "transfer", "start": 1, "stop": 2.5, "source": "tcp://a:1"},
                    {"action": "disk-read", "start": 2.0, "stop": 9.0},
                    {"action": "compute", "start": 3.0, "stop": 4.0, "extra": {"deep": [1, {}]}},
                    {7: "x", "stop": 4.5, "action": "transfer", "start": 4.0},
                    {"action": "compute", "start": 5.0, "stop": 7.0},
                    {"action": "compute", "start": 8.0, "stop": 7.5},
                ]
            )
        ]
    )
    assert event.transfer_seconds == 2.0
    assert event.compute_seconds == 3.0
    assert (event.compute_start, event.compute_stop) == (3.0, 4.0)


def test_no_compute(tap: Tap) -> None:
    [event] = tap.feed([finished(startstops=[])])
    assert not event.has_compute
    assert (event.compute_start, event.compute_stop, event.compute_seconds) == (0.0, 0.0, 0.0)


def test_startstops_are_kept_on_request(tap: Tap) -> None:
    tap.decoder.keep_startstops = True
    message = finished()
    [event] = tap.feed([message])
    assert msgpack.unpackb(event.startstops) == message["startstops"]


@pytest.mark.parametrize(
    "metadata", [{"a": 1}, {"a": (1, {"b": None}), ("k", 1): 2.5}, {"s": {1, 2}}]
)
def test_plain_metadata_is_decoded(tap: Tap, metadata: dict[Any, Any]) -> None:
    [event] = tap.feed([finished(metadata=metadata)])
    assert event.metadata == metadata


def test_metadata_with_closed_values_stays_bytes(tap: Tap) -> None:
    message = [finished(metadata={"a": Serialize({"deep": 1})})]
    frames = dumps(message)
    [event] = tap.feed_frames(frames)
    assert msgpack.unpackb(event.metadata) == {"a": {"__Serialized__": 1}}


def test_equal_types_become_one_object(tap: Tap) -> None:
    events = tap.feed([finished(key=i) for i in range(3)])
    assert events[0].type is events[1].type is events[2].type
    assert events[0].typename is events[1].typename is events[2].typename


def test_many_types_are_told_apart_and_bounded(tap: Tap) -> None:
    types = [b"%d" % i * (1 + i % 7) for i in range(5000)] + [b"x" * 20_000, b"y" * 20_000]
    messages = [finished(type=raw, typename=raw.decode()) for raw in types]
    for _ in range(2):
        for event, raw in zip(tap.feed(messages), types, strict=True):
            assert event.type == raw
            assert event.typename == raw.decode()


def test_cold_messages_keep_their_bytes_and_place(tap: Tap) -> None:
    erred = TaskErredMsg(
        key="e",
        run_id=1,
        exception=Serialize(ValueError("x")),
        traceback=None,
        exception_text="",
        traceback_text="",
        thread=None,
        startstops=[],
        stimulus_id="s",
    ).to_dict()
    frames = dumps([finished(key="before"), erred, {"op": "keep-alive"}, finished(key="after")])
    before, cold, alive, after = tap.feed_frames(frames)
    assert (before.key, after.key) == ("before", "after")
    name, element, given, sender, now = cold
    assert (name, sender, now) == ("cold", None, NOW)
    assert given is frames
    assert msgpack.unpackb(element) == msgpack.unpackb(frames[0])[1]
    assert msgpack.unpackb(alive[1]) == {"op": "keep-alive"}
    assert tap.decoder.n_cold == 2


def test_large_cold_messages_are_not_copied(tap: Tap) -> None:
    message = {"op": "log-event", "msg": "x" * 100_000}
    frames = dumps([{"op": "keep-alive"}, message])
    [_, (_, element, *_)] = tap.feed_frames(frames)
    assert isinstance(element, memoryview)
    assert msgpack.unpackb(element) == message


def test_a_bare_map_is_a_message(tap: Tap) -> None:
    [event] = tap.feed(finished())
    assert isinstance(event, TaskFinished)


def test_ok_ends_the_batch(tap: Tap) -> None:
    assert [e.key for e in tap.feed([finished(key="a"), "OK", finished(key="b")])] == ["a"]
    assert tap.feed("OK") == []
    assert tap.feed([]) == []


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_frames_of_every_buffer_kind(tap: Tap, wrap: Callable[[bytes], Any]) -> None:
    [event] = tap.feed_frames([wrap(dumps([finished()])[0])])
    assert event.key == "inc-2e0f917099bac57274f8cc1384f6fdb0"


def the_others_go_on(tap: Tap, misfit: Any) -> tuple[str, list[Any], str, str]:
    """Decode ``misfit`` between two good messages; return what was rejected of it."""
    first, rejected, last = tap.feed([finished(key="first"), misfit, finished(key="last")])
    assert (first.key, last.key) == ("first", "last")
    name, sender, op, keys, reason, now, stimulus_id = rejected
    assert (name, sender, now) == ("rejected", None, NOW)
    return op, keys, reason, stimulus_id


HOT_FIELDS = [
    pytest.param(message, field, id=f"{message['op']}-{field}")
    for message in HOT_MESSAGES
    for field in message
    if field != "op"
]


@pytest.mark.parametrize(("message", "field"), HOT_FIELDS)
def test_a_missing_field_is_rejected(tap: Tap, message: dict[str, Any], field: str) -> None:
    misfit = {name: value for name, value in message.items() if name != field}
    op, keys, reason, stimulus_id = the_others_go_on(tap, misfit)
    assert op == message["op"]
    assert reason == f"missing field {field!r}"
    assert keys == ([misfit["key"]] if "key" in misfit else list(misfit.get("keys", [])))
    assert stimulus_id == misfit.get("stimulus_id", "")
    assert tap.decoder.n_rejected == 1


@pytest.mark.parametrize(("message", "field"), HOT_FIELDS)
@pytest.mark.parametrize(
    "value", [True, [[{}]], msgpack.ExtType(1, b"")], ids=["bool", "list", "ext"]
)
def test_a_field_of_a_wrong_type_is_rejected(
    tap: Tap, message: dict[str, Any], field: str, value: Any
) -> None:
    op, keys, reason, _ = the_others_go_on(tap, {**message, field: value})
    assert op == message["op"]
    assert reason.startswith(f"field {field!r}: ")
    assert ("key" in message and field != "key") == (keys == [message.get("key")])


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("nbytes", -1, "must not be negative"),
        ("nbytes", 1.0, "expected an integer of 64 bits, got a float"),
        ("nbytes", 2**63, "expected an integer of 64 bits, got an integer above 63 bits"),
        ("run_id", None, "expected an integer of 64 bits, got nil"),
        ("type", "text", "expected bytes, got a string"),
        ("typename", b"raw", "expected a string, got bytes"),
        ("status", "error", "expected 'OK'"),
        ("key", None, "expected a task key, got nil"),
        ("key", b"k", "expected a task key, got bytes"),
        ("startstops", [{"action": "compute", "start": 1.0}], "an entry needs action, start"),
        (
            "startstops",
            [{"action": "compute", "start": 1.0, "stop": float("nan")}],
            "start and stop must be finite",
        ),
        (
            "startstops",
            [{"action": 1, "start": 1.0, "stop": 2.0}],
            "expected a string as action, got an integer",
        ),
    ],
)
def test_values_that_do_not_fit(tap: Tap, field: str, value: Any, reason: str) -> None:
    _, _, told, _ = the_others_go_on(tap, finished(**{field: value}))
    assert told.startswith(f"field {field!r}: {reason}")


@pytest.mark.parametrize("message", HOT_MESSAGES, ids=lambda message: message["op"])
@pytest.mark.parametrize("surplus", ["extra", "client"])
def test_a_surplus_field_is_rejected(tap: Tap, message: dict[str, Any], surplus: str) -> None:
    op, keys, reason, stimulus_id = the_others_go_on(tap, {**message, surplus: 1})
    assert op == message["op"]
    assert reason == f"unexpected field {surplus!r}"
    assert keys == ([message["key"]] if "key" in message else message["keys"])
    assert stimulus_id == message["stimulus_id"]


def test_a_field_that_occurs_twice_is_rejected(tap: Tap) -> None:
    body = msgpack.packb(finished())
    body = b"\x8c" + body[1:] + msgpack.packb("run_id") + msgpack.packb(8)
    [(_, _, op, _, reason, _, _)] = tap.feed_frames([b"\x91" + body])
    assert (op, reason) == ("task-finished", "field 'run_id' occurs twice")


def test_a_field_whose_name_is_no_string_is_rejected(tap: Tap) -> None:
    _, _, reason, _ = the_others_go_on(tap, {**finished(), 7: 1})
    assert reason == "unexpected field 7"
    _, _, reason, _ = the_others_go_on(tap, {**finished(), b"raw": 1})
    assert reason == "unexpected field whose name is no string"


@pytest.mark.parametrize(
    ("misfit", "reason"),
    [
        ({"key": "a"}, "missing field 'op'"),
        ({"op": 7, "key": "a"}, "field 'op': expected a string"),
        (7, "a stream message must be a map"),
        ("other", "a stream message must be a map"),
        ([["a"]], "a stream message must be a map"),
    ],
)
def test_what_is_no_message_is_rejected(tap: Tap, misfit: Any, reason: str) -> None:
    op, keys, told, _ = the_others_go_on(tap, misfit)
    assert (op, told) == ("", reason)
    assert keys == (["a"] if isinstance(misfit, dict) else [])


def test_text_that_is_not_utf8_is_rejected(tap: Tap) -> None:
    body = dumps([finished(key="k" * 20)])[0].replace(b"k" * 20, b"\xff" * 20)
    [(_, _, _, keys, reason, _, stimulus_id)] = tap.feed_frames([body])
    assert keys == []
    assert reason == "field 'key': a string is not valid UTF-8"
    assert stimulus_id == "task-finished-1796071980.8974037"


def test_what_stands_before_the_damage_is_handled(tap: Tap) -> None:
    body = dumps([finished(key="a"), finished(key="b")])[0]
    with pytest.raises(MsgpackError, match="middle of a value"):
        tap.decoder.decode([body[:-3]], None, NOW)
    assert [event.key for event in tap.seen] == ["a"]


def test_bytes_behind_the_message_are_an_error(tap: Tap) -> None:
    with pytest.raises(MsgpackError, match="1 bytes follow"):
        tap.decoder.decode([dumps([finished(key="a")])[0] + b"\xc0"], None, NOW)
    assert [event.key for event in tap.seen] == ["a"]


@pytest.mark.parametrize("frames", [[], [b""], [b"\xc1"], [b"\xdd\xff\xff\xff\xff"]])
def test_what_is_no_msgpack_is_an_error(tap: Tap, frames: list[bytes]) -> None:
    with pytest.raises(MsgpackError):
        tap.decoder.decode(frames, None, NOW)


def test_exceptions_of_the_callables_pass_through() -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("from the callable")

    decoder = WorkerStreamDecoder(fail, fail, fail)
    for message in (finished(), {"op": "keep-alive"}, {}):
        with pytest.raises(RuntimeError, match="from the callable"):
            decoder.decode(dumps([message]), None, NOW)


def released(tap: Tap, message: Any) -> Any:
    tap.decoder.decode(dumps([message]), "Client-1", NOW, "given-1")
    return tap.seen.pop()


def test_client_releases_keys() -> None:
    tap = Tap(ClientStreamDecoder)
    event = released(
        tap, {"op": "client-releases-keys", "keys": ["a", ("b", 1)], "client": "Client-1"}
    )
    assert isinstance(event, KeysReleased)
    assert event.keys == ["a", ("b", 1)]
    assert event.client_id == "Client-1"
    assert (event.now, event.stimulus_id) == (NOW, "given-1")
    own = {"op": "client-releases-keys", "keys": {"a"}, "client": "fire-and-forget"}
    assert released(tap, own).client_id == "fire-and-forget"
    assert released(tap, {"op": "client-releases-keys", "keys": []}).client_id == "Client-1"
    assert tap.decoder.counts == {"client-releases-keys": 3}


def test_very_many_released_keys() -> None:
    tap = Tap(ClientStreamDecoder)
    keys = [f"inc-{i}" for i in range(50_000)]
    assert released(tap, {"op": "client-releases-keys", "keys": keys}).keys == keys


def test_other_messages_of_clients() -> None:
    tap = Tap(ClientStreamDecoder)
    name, element, _, client, now = released(tap, {"op": "heartbeat-client"})
    assert (name, client, now) == ("cold", "Client-1", NOW)
    assert msgpack.unpackb(element) == {"op": "heartbeat-client"}
    misfit = {"op": "client-releases-keys", "keys": ["a"], "client": 7}
    _, client, op, keys, reason, _, stimulus_id = released(tap, misfit)
    assert (client, op, keys, stimulus_id) == ("Client-1", misfit["op"], ["a"], "given-1")
    assert reason == "field 'client': expected a string, got an integer"
    *_, reason, _, _ = released(tap, {**misfit, "client": "c", "stimulus_id": "s"})
    assert reason == "unexpected field 'stimulus_id'"


def mutated(rng: random.Random, body: bytes) -> bytes:
    data = bytearray(body)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                del data[at : at + rng.randrange(1, 5)]
            case _:
                data[at:at] = rng.randbytes(rng.randrange(1, 5))
        if not data:
            break
    return bytes(data)


def test_mutated_messages_end_in_an_event_a_rejection_or_an_error() -> None:
    rng = random.Random(20260801)
    counts = {"handle": 0, "cold": 0, "rejected": 0, "error": 0}

    def count(name: str) -> Callable[..., None]:
        def add(*args: Any) -> None:
            counts[name] += 1

        return add

    decoder = WorkerStreamDecoder(count("handle"), count("cold"), count("rejected"))
    metadata = {"a": {"b": [1, 2.5]}}
    bodies = [msgpack.packb([message]) for message in (*HOT_MESSAGES, finished(metadata=metadata))]

    def run(n: int) -> None:
        for i in range(n):
            try:
                decoder.decode([mutated(rng, bodies[i % len(bodies)])], None, NOW)
            except MsgpackError:
                counts["error"] += 1

    run(5_000)
    gc.collect()
    before = sys.getallocatedblocks()
    run(20_000)
    gc.collect()
    # Of what the mutated messages hold, nothing stays but a bounded number of type names.
    assert sys.getallocatedblocks() - before < 5_000
    assert all(count > 100 for count in counts.values()), counts


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(min_value=-(2**63), max_value=2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(
    st.sampled_from(HOT_MESSAGES),
    st.dictionaries(st.sampled_from(sorted(finished())), values, max_size=3),
    st.sets(st.sampled_from(sorted(finished())), max_size=1),
)
def test_any_well_formed_message_gets_exactly_one_outcome(
    message: dict[str, Any], changes: dict[str, Any], dropped: set[str]
) -> None:
    changed = copy.deepcopy(message) | changes
    for name in dropped:
        changed.pop(name, None)
    tap = Tap()
    tap.decoder.decode([msgpack.packb([changed, {"op": "keep-alive"}])], None, NOW)
    assert len(tap.seen) == 2
    assert tap.seen[1][0] == "cold"
