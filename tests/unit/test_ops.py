"""The table of operations: each row, with a field missing, wrong and too many."""

from __future__ import annotations

from typing import Any

import pytest

from distributed_core.protocol.codec import Pickled, Serialized
from distributed_core.protocol.ops import (
    RESERVED,
    ROWS,
    TABLE,
    Channel,
    Kind,
    Reason,
    Rejection,
    Row,
    check,
    check_message,
    is_key,
)

SAMPLES: list[Any] = [
    None, True, 1, 1.5, "running", "x", b"x", {}, (), ("a", "b"), ("start",), {"a": 1},
    Serialized(b"", ()), Pickled(b"", ()), "start", "raise",
]  # fmt: skip


def sample(row: Row) -> dict[str, Any]:
    """A message that fits: for each field some value that its type takes."""
    return {
        name: next(value for value in reversed(SAMPLES) if column.type.accepts(value))
        for name, column in row.fields.items()
    }


def row_id(row: Row) -> str:
    return f"{row.channel.name}-{row.name}"


SERVED = [row for row in TABLE if row.served]


@pytest.mark.parametrize("row", SERVED, ids=row_id)
def test_row_takes_what_fits(row: Row) -> None:
    message = sample(row)
    assert check(row, message, strict=True) is None
    assert check(row, {**message, "op": row.name}, strict=True) is None
    required = {name: v for name, v in message.items() if row.fields[name].required}
    assert check(row, required, strict=True) is None
    completed = row.complete(dict(required))
    assert set(completed) == set(row.fields)
    assert row.surplus(message) == []


@pytest.mark.parametrize("row", SERVED, ids=row_id)
def test_row_refuses_a_missing_field(row: Row) -> None:
    for name, column in row.fields.items():
        message = sample(row)
        del message[name]
        rejection = check(row, message, strict=True)
        if column.required:
            assert rejection is not None
            assert rejection.reason is Reason.MISSING_FIELD
            assert repr(name) in rejection.text
        else:
            assert rejection is None


@pytest.mark.parametrize("row", SERVED, ids=row_id)
def test_row_refuses_a_wrong_type(row: Row) -> None:
    for name, column in row.fields.items():
        wrong = object()
        if column.type.accepts(wrong):
            assert column.type.name == "any value"
            continue
        rejection = check(row, {**sample(row), name: wrong}, strict=False)
        assert rejection is not None
        assert rejection.reason is Reason.WRONG_TYPE
        assert row.name in rejection.text
        assert column.type.name in rejection.text


@pytest.mark.behaviour("B1.4")
@pytest.mark.parametrize("row", SERVED, ids=row_id)
def test_surplus_is_refused_on_streams_and_named_elsewhere(row: Row) -> None:
    message = {**sample(row), "surplus": 1}
    rejection = check(row, message, strict=True)
    assert rejection is not None
    assert rejection.reason is Reason.SURPLUS_FIELD
    assert "'surplus'" in rejection.text
    assert check(row, message, strict=False) is None
    assert row.surplus(message) == ["surplus"]


@pytest.mark.parametrize("row", TABLE, ids=row_id)
def test_row_is_well_formed(row: Row) -> None:
    assert ROWS[row.channel][row.name] is row
    assert row.senders <= {"client", "worker", "nanny", "tool", "scheduler"}
    assert not RESERVED & set(row.fields)
    for column in row.fields.values():
        if not column.required and row.channel in (
            Channel.SCHEDULER_RPC,
            Channel.CLIENT_STREAM,
        ):
            default = column.default
            assert default is None or column.type.accepts(default)
            assert not isinstance(default, (list, dict, set))
    if row.announced:
        assert len(row.announced) > 20


def test_worker_stream_rows_do_not_let_a_worker_speak_for_another() -> None:
    assert not any("worker" in row.fields for row in ROWS[Channel.WORKER_STREAM].values())


def test_client_may_name_another_client() -> None:
    for row in ROWS[Channel.CLIENT_STREAM].values():
        assert not row.fields["client"].required


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ([], Reason.MALFORMED),
        (None, Reason.MALFORMED),
        ({}, Reason.MALFORMED),
        ({"op": 5}, Reason.MALFORMED),
        ({"op": ("x",)}, Reason.MALFORMED),
        ({"op": "nonsense"}, Reason.UNKNOWN_OP),
        ({"op": "gather", "keys": ["x"]}, Reason.UNKNOWN_OP),
        ({"op": "queue_release", "name": "q"}, Reason.ANNOUNCED),
        ({"op": "client-releases-keys"}, Reason.MISSING_FIELD),
        ({"op": "client-releases-keys", "keys": [b"x"]}, Reason.WRONG_TYPE),
        ({"op": "client-releases-keys", "keys": ["x"], "more": 1}, Reason.SURPLUS_FIELD),
    ],
)
def test_stream_messages(message: Any, reason: Reason) -> None:
    result = check_message(Channel.CLIENT_STREAM, message)
    assert isinstance(result, Rejection)
    assert result.reason is reason
    assert result.text


def test_stream_message_that_fits_yields_its_row() -> None:
    message = {"op": "client-releases-keys", "keys": (("x", 1), "y"), "client": "c"}
    assert (
        check_message(Channel.CLIENT_STREAM, message)
        is (ROWS[Channel.CLIENT_STREAM]["client-releases-keys"])
    )


def test_rejection_texts_stay_short() -> None:
    huge = {"op": "x" * 100_000, "k" * 100_000: 1}
    result = check_message(Channel.CLIENT_STREAM, huge)
    assert isinstance(result, Rejection)
    assert len(result.text) < 1000
    row = ROWS[Channel.CLIENT_STREAM]["heartbeat-client"]
    surplus = check(row, {"k" * 100_000: 1}, strict=True)
    assert surplus is not None
    assert len(surplus.text) < 1000


@pytest.mark.parametrize("key", ["x", 1, 1.5, ("x", 1, ("y", 0.5)), ()])
def test_keys(key: Any) -> None:
    assert is_key(key)


@pytest.mark.parametrize("key", [b"x", None, True, ["x"], {"x"}, ("x", b"y"), ("x", None)])
def test_no_keys(key: Any) -> None:
    assert not is_key(key)


def test_deep_keys_are_refused() -> None:
    key: Any = "x"
    for _ in range(900):
        key = (key,)
    assert not is_key(key)


def test_channels_tell_their_kind() -> None:
    assert Channel.WORKER_RPC.kind is Kind.RPC
    assert Channel.TO_WORKER.kind is Kind.STREAM
    assert ROWS[Channel.TO_WORKER]["close"].kind is Kind.STREAM


def test_a_name_stands_once_per_channel() -> None:
    assert len({(row.channel, row.name) for row in TABLE}) == len(TABLE)


def test_announced_texts_name_what_helps() -> None:
    rows = ROWS[Channel.SCHEDULER_RPC]
    assert "security.allow-code-on-scheduler" in rows["run_function"].announced
    assert "security.allow-code-on-scheduler" in rows["feed"].announced
    assert "dataframe.shuffle.method" in rows["shuffle_get_or_create"].announced
    assert "Queue" in rows["queue_put"].announced
