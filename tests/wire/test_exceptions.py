"""Pickles written by hand, read by the stock reader."""

from __future__ import annotations

import concurrent.futures
import pickle
from typing import Any

import pytest
from distributed.core import Status, clean_exception, error_message
from distributed.protocol import loads
from distributed.scheduler import (
    KilledWorker,
    NoValidWorkerError,
    NoWorkerError,
    WorkerState,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_core.protocol.codec import encode
from distributed_core.protocol.exceptions import (
    MAX_ERROR_LENGTH,
    PickledException,
    WorkerFacts,
    builtin_error,
    cancelled_error,
    error_reply,
    from_exception,
    killed_worker,
    no_valid_worker_error,
    no_worker_error,
    registration_refusal,
    write_pickle,
)

PLAIN = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(),
        st.binary(max_size=300),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
        st.sets(st.integers(), max_size=4),
        st.frozensets(st.text(max_size=3), max_size=4),
    ),
    max_leaves=10,
)


def arrived(error: PickledException) -> BaseException:
    """What a stock client makes of it."""
    reply = loads(encode(error_reply(error)))
    _, exc, traceback = clean_exception(**reply)
    assert traceback is None
    assert exc is not None
    return exc


@given(PLAIN)
@settings(max_examples=200, deadline=None)
def test_writer_round_trips(value: Any) -> None:
    result = pickle.loads(write_pickle(value))
    assert result == value
    assert type(result) is type(value)


def test_writer_handles_long_values() -> None:
    for value in ("x" * 100_000, b"y" * 100_000, 2**4000, -(2**4000), "\ud800"):
        assert pickle.loads(write_pickle(value)) == value


def test_writer_refuses_what_is_not_plain() -> None:
    with pytest.raises(TypeError, match="object has no plain pickle"):
        write_pickle([object()])
    nested: Any = []
    for _ in range(300):
        nested = [nested]
    with pytest.raises(ValueError, match="nested more than 200"):
        write_pickle(nested)


def test_killed_worker() -> None:
    worker = WorkerFacts("tcp://127.0.0.1:1234", "alice", "Worker-x", nthreads=2, pid=7)
    exc = arrived(killed_worker(("x", 1), worker, 3))
    assert isinstance(exc, KilledWorker)
    assert exc.task == ("x", 1)
    assert exc.allowed_failures == 3
    state = exc.last_worker
    assert isinstance(state, WorkerState)
    assert (state.address, state.name, state.host) == (worker.address, "alice", "127.0.0.1")
    assert state.status is Status.closed
    assert hash(state) == hash("Worker-x")
    assert "tcp://127.0.0.1:1234" in str(exc)
    assert "4 different workers" in str(exc)
    assert "alice" in repr(state)
    assert state.identity()["nthreads"] == 2
    assert pickle.loads(pickle.dumps(exc)).last_worker == state


def test_every_slot_of_a_worker_state_is_set() -> None:
    exc = arrived(killed_worker("x", WorkerFacts("tcp://[::1]:1", 0, "s"), 0))
    assert isinstance(exc, KilledWorker)
    missing = [name for name in WorkerState.__slots__ if not hasattr(exc.last_worker, name)]
    assert missing == []
    assert exc.last_worker.host == "::1"


def test_no_worker_errors() -> None:
    exc = arrived(no_valid_worker_error("x", {"h"}, {"tcp://a:1"}, {"GPU": 1.0}, 5))
    assert isinstance(exc, NoValidWorkerError)
    assert exc.worker_restrictions == {"tcp://a:1"}
    assert "GPU" in str(exc)
    exc = arrived(no_worker_error(("x", 0), 5))
    assert isinstance(exc, NoWorkerError)
    assert "5.00 s" in str(exc)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("KeyError", ("x",)),
        ("TimeoutError", ("late",)),
        ("MemoryError", ("task needs 3 GiB",)),
        ("ValueError", ()),
        ("FileNotFoundError", (2, "no such file")),
        ("RuntimeError", ("a", ("b", 1))),
    ],
)
def test_builtin_errors(name: str, args: tuple[Any, ...]) -> None:
    exc = arrived(builtin_error(name, *args))
    assert type(exc).__name__ == name
    assert exc.args == args


def test_cause_arrives() -> None:
    exc = arrived(builtin_error("RuntimeError", "outer", cause=builtin_error("KeyError", "k")))
    assert isinstance(exc.__cause__, KeyError)


def test_unknown_builtin_is_refused() -> None:
    for name in ("NoSuchError", "print", "KeyboardInterrupt"):
        with pytest.raises(ValueError, match=name):
            builtin_error(name)


def test_cancelled_error() -> None:
    assert isinstance(arrived(cancelled_error("x")), concurrent.futures.CancelledError)


class OurError(KeyError):
    """An exception that no peer can import."""


def raised(exc: BaseException) -> BaseException:
    try:
        raise exc
    except BaseException as caught:  # noqa: BLE001 - the test is about any exception
        return caught


@pytest.mark.parametrize(
    ("exc", "cls"),
    [
        (KeyError("x"), KeyError),
        (OurError("x"), KeyError),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), UnicodeDecodeError),
        (ExceptionGroup("several", [ValueError("a")]), Exception),
        (ValueError(object()), ValueError),
        (KeyboardInterrupt(), RuntimeError),
        (TimeoutError(), TimeoutError),
    ],
)
def test_nearest_class_arrives(exc: BaseException, cls: type[BaseException]) -> None:
    assert type(arrived(from_exception(raised(exc)))) is cls


def test_long_texts_are_cut() -> None:
    reply = error_reply(ValueError("x" * 100_000))
    assert len(reply["exception_text"]) <= MAX_ERROR_LENGTH
    assert len(reply["exception"]) < 2 * MAX_ERROR_LENGTH
    assert len(str(pickle.loads(reply["exception"]))) <= MAX_ERROR_LENGTH


def test_text_arrives_as_plain_exception() -> None:
    _, exc, _ = clean_exception(**error_reply("went wrong"))
    assert type(exc) is Exception
    assert exc.args == ("went wrong",)


def test_reply_has_the_fields_of_stock() -> None:
    stock = error_message(ValueError("x"))
    assert set(error_reply("x")) == set(stock)


def test_refusals() -> None:
    assert registration_refusal("register-worker", "no", 5.0) == {
        "status": "error",
        "message": "no",
        "time": 5.0,
    }
    assert registration_refusal("register-client", "no", 5.0) == [
        {"op": "stream-start", "error": "no"}
    ]
