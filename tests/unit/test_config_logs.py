"""Logs: forms, limits, what is kept and what is never shown."""

import io
import json
import logging
import sys

import pytest

from distributed_core.config import logs
from distributed_core.config.schema import LoggingSettings

PEM = "-----BEGIN PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----"
TEXT = "%(name)s - %(levelname)s - %(message)s"


@pytest.fixture
def root():
    """The root logger, as it was afterwards."""
    logger = logging.getLogger()
    handlers, level = list(logger.handlers), logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logging.captureWarnings(False)
    logging.getLogger("dc.quiet").setLevel(logging.NOTSET)


@pytest.fixture
def start(root):
    def start(**changes):
        settings = {
            "format": "text",
            "text_format": TEXT,
            "level": "info",
            "levels": {},
            "rate_limit_interval": 10.0,
            "ring_length": 5,
            **changes,
        }
        stream = io.StringIO()
        return logs.setup(LoggingSettings(**settings), stream), stream

    return start


def record(message="m", *args, level=logging.WARNING, created=0.0, **extra):
    made = logging.makeLogRecord(
        {"name": "dc", "levelno": level, "levelname": logging.getLevelName(level)}
    )
    made.msg, made.args, made.created = message, args, created
    for name, value in extra.items():
        setattr(made, name, value)
    return made


def test_text(start):
    _, stream = start()
    logging.getLogger("dc").info(
        "worker %s left", "w1", extra={"stimulus": "s-1", "tasks": 3, "why": "a b", "none": None}
    )
    assert stream.getvalue() == (
        'dc - INFO - worker w1 left stimulus=s-1 tasks=3 why="a b" none=null\n'
    )


def test_json(start):
    _, stream = start(format="json")
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("dc").error(
            "line one\nline two",
            exc_info=True,
            extra={"peer": ("a", 1), "ratio": float("nan"), "level": 5, "raw": b"\xff"},
        )
    [line] = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert entry["level"] == "error"
    assert entry["field_level"] == 5
    assert entry["logger"] == "dc"
    assert entry["message"] == "line one\\nline two"
    assert entry["peer"] == ["a", 1]
    assert entry["ratio"] == "nan"
    assert entry["raw"] == "b'\\xff'"
    assert entry["traceback"].endswith("ValueError: no")
    assert entry["time"].endswith("Z")


def test_json_time_is_utc():
    text = logs.JsonFormatter().format(record(created=1.25))
    assert json.loads(text)["time"] == "1970-01-01T00:00:01.250000Z"


def test_levels(start):
    _, stream = start(level="warning", levels={"dc.quiet": "error"})
    logging.getLogger("dc").info("no")
    logging.getLogger("dc").warning("yes")
    logging.getLogger("dc.quiet").warning("no")
    assert stream.getvalue() == "dc - WARNING - yes\n"


def test_a_peer_cannot_forge_lines(start):
    _, stream = start()
    logging.getLogger("dc").info(
        "from %s", "x\ndc - ERROR - \x1b[31mfake\x9b", extra={"op": "\r\n"}
    )
    assert stream.getvalue() == ("dc - INFO - from x\\ndc - ERROR - \\x1b[31mfake\\x9b op=\\r\\n\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"key {PEM} end", "key [redacted] end"),
        ("-----BEGIN PRIVATE KEY-----\ncut off hunter2", "[redacted]"),
        ("password=hunter2 next", "password=[redacted] next"),
        ("db_password: 'hunter 2', x", "db_password: [redacted], x"),
        ('{"token": "hunter2"}', '{"token": [redacted]}'),
        ("Authorization: Bearer hunter2", "Authorization: [redacted]"),
        ("http://me:hunter2@host/x", "http://me:[redacted]@host/x"),
        ("tokenize-12ab: 3 tasks", "tokenize-12ab: 3 tasks"),
        ("tcp://10.0.0.1:8786", "tcp://10.0.0.1:8786"),
    ],
)
def test_secrets_are_not_shown(text, shown):
    assert logs.redact(text) == shown


def test_fields_that_sound_secret_are_not_shown(start):
    ring, stream = start(format="json")
    logging.getLogger("dc").info(
        "%s", PEM, extra={"auth_token": "hunter2", "headers": {"Authorization": "hunter2"}}
    )
    try:
        raise ValueError("password=hunter2")
    except ValueError:
        logging.getLogger("dc").exception("failed")
    assert "hunter2" not in stream.getvalue()
    assert all("hunter2" not in text for _, text in ring.entries())


def test_the_same_fault_is_written_once_per_interval():
    limiter = logs.FaultLimiter(10.0)
    at = [0.0, 1.0, 9.9, 10.0, 11.0, 25.0]
    admitted = [limiter.admit(record("bad %s", "x", created=time)) for time in at]
    assert admitted == [0, None, None, 2, None, 1]
    assert limiter.suppressed_total == 3


def test_what_counts_as_the_same_fault():
    limiter = logs.FaultLimiter(10.0)
    assert limiter.admit(record("bad %s", "a")) == 0
    assert limiter.admit(record("bad %s", "b")) == 0
    assert limiter.admit(record("bad %s", "a", level=logging.ERROR)) == 0
    assert limiter.admit(record("frame of %s", "a", fault="bad-frame")) == 0
    assert limiter.admit(record("frame of %s", "b", fault="bad-frame")) is None
    for _ in range(3):
        assert limiter.admit(record("news", level=logging.INFO)) == 0


def test_a_clock_that_is_set_back_does_not_silence_a_fault():
    limiter = logs.FaultLimiter(10.0)
    assert limiter.admit(record(created=1000.0)) == 0
    assert limiter.admit(record(created=5.0)) == 0


def test_the_limit_can_be_turned_off():
    limiter = logs.FaultLimiter(0.0)
    assert [limiter.admit(record()) for _ in range(3)] == [0, 0, 0]


def test_the_limiter_remembers_a_bounded_number_of_faults():
    limiter = logs.FaultLimiter(10.0, max_faults=2)
    for name in ("a", "b", "c"):
        limiter.admit(record(fault=name))
    assert limiter.admit(record(fault="c")) is None
    assert limiter.admit(record(fault="a")) == 0


def test_the_count_of_what_was_left_out_is_a_field(start):
    _, stream = start(rate_limit_interval=10.0)
    handler = logging.getLogger().handlers[0]
    for time in (0.0, 1.0, 2.0, 20.0):
        handler.handle(record("bad", created=time))
    assert stream.getvalue() == "dc - WARNING - bad\ndc - WARNING - bad suppressed=2\n"


def test_the_ring_answers_like_dask(start):
    ring, _ = start(ring_length=3)
    handler = logging.getLogger().handlers[0]
    for number in range(5):
        handler.handle(record(str(number), level=logging.INFO, created=float(number)))
    newest = [("INFO", f"dc - INFO - {number}") for number in (4, 3, 2)]
    assert ring.entries() == newest
    assert ring.entries(n=0) == newest
    assert ring.entries(n=2) == newest[:2]
    assert ring.entries(start=3.0) == newest[:2]
    assert ring.entries(n=1, timestamps=True) == [(4.0, "INFO", "dc - INFO - 4")]
    assert len(ring) == 3


def test_a_second_setup_keeps_the_records_and_one_handler(start, root):
    start()
    logging.getLogger("dc").info("before")
    ring, stream = start(format="json")
    assert len(root.handlers) == 1
    assert ring.entries() == [("INFO", "dc - INFO - before")]
    logging.getLogger("dc").info("after")
    assert json.loads(stream.getvalue())["message"] == "after"


def test_a_stream_that_is_gone_does_not_end_the_program(start, monkeypatch):
    ring, stream = start()
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    stream.close()
    logging.getLogger("dc").info("still here")
    assert ring.entries() == [("INFO", "dc - INFO - still here")]
    assert "Logging error" in said.getvalue()
