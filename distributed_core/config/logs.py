"""Logging of the daemon: one handler that limits, redacts, writes and remembers.

Owns the root logger's only handler. Log calls of ours give facts as ``extra={...}``; they appear
as fields in JSON and as ``name=value`` after a text line. Never writes a secret it can recognize,
and never more than one line for a record without a traceback. Called by the command line at
start-up; the server reads the ring for the ``get_logs`` call.

The same fault is written once per interval, and its next line says how many were left out. Two
records from warning upwards are the same fault if ``extra["fault"]`` is equal; without one, if
logger, message and arguments are. Whatever a peer can cause at will should name its fault, since
its arguments differ from peer to peer.
"""

import json
import logging
import math
import re
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import TextIO

from distributed_core.config.schema import LoggingSettings

__all__ = [
    "FaultLimiter",
    "JsonFormatter",
    "LogHandler",
    "LogRing",
    "TextFormatter",
    "redact",
    "setup",
]

_MAX_FAULTS = 1024
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "fault"}
_HIDDEN = "[redacted]"
_PEM = re.compile(r"-----BEGIN [^-]+-----.*?(?:-----END [^-]+-----|\Z)", re.DOTALL)
_NAMED_SECRET = re.compile(
    r"(?i)(?<![a-z0-9])((?:password|passwd|secret|token|api[_-]?key|credentials?|authorization)"
    r"[\"']?\s*[=:]\s*)(?:(?:bearer|basic)\s+)?(\"[^\"]*\"|'[^']*'|[^\s,;&}]+)"
)
_URL_SECRET = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")
_SECRET_FIELD = re.compile(
    r"(?i)password|passwd|secret|token|api[_-]?key|credential|authorization|private"
)
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\\t",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


def setup(settings: LoggingSettings, stream: TextIO | None = None) -> "LogRing":
    """Send all logging of this process through one handler; return its ring.

    Replaces the root logger's handlers. A second call applies new settings and keeps what the ring
    holds. ``stream`` is standard error if None.
    """
    root = logging.getLogger()
    ring = LogRing(settings.ring_length)
    for handler in list(root.handlers):
        if isinstance(handler, LogHandler):
            ring.take_over(handler.ring)
        root.removeHandler(handler)
    formatter = (
        JsonFormatter() if settings.format == "json" else TextFormatter(settings.text_format)
    )
    limiter = FaultLimiter(settings.rate_limit_interval)
    target = sys.stderr if stream is None else stream
    root.addHandler(LogHandler(target, formatter, ring, limiter))
    root.setLevel(settings.level.upper())
    for name, level in settings.levels.items():
        logging.getLogger(name).setLevel(level.upper())
    logging.captureWarnings(True)
    return ring


def redact(text: str) -> str:
    """Return ``text`` without PEM blocks, passwords in URLs and values of secret-sounding names."""
    if "-----BEGIN" in text:
        text = _PEM.sub(_HIDDEN, text)
    if "://" in text:
        text = _URL_SECRET.sub(rf"\1{_HIDDEN}@", text)
    return _NAMED_SECRET.sub(rf"\1{_HIDDEN}", text)


class LogRing:
    """The last records, as (created, level, text); created is in seconds since the epoch."""

    def __init__(self, length: int) -> None:
        self._records: deque[tuple[float, str, str]] = deque(maxlen=length)

    def append(self, created: float, level: str, text: str) -> None:
        """Add the newest record; the oldest is dropped if the ring is full."""
        self._records.append((created, level, text))

    def take_over(self, other: "LogRing") -> None:
        """Start with what another ring holds."""
        self._records.extend(other._records)

    def entries(
        self, n: int | None = None, start: float = 0.0, timestamps: bool = False
    ) -> list[tuple[str, str] | tuple[float, str, str]]:
        """Return (level, text), newest first: at most ``n`` (None or 0: all), none older than
        ``start`` (seconds since the epoch). With ``timestamps``, (created, level, text)."""
        found: list[tuple[str, str] | tuple[float, str, str]] = []
        for created, level, text in reversed(self._records):
            if (n and len(found) >= n) or created < start:
                break
            found.append((created, level, text) if timestamps else (level, text))
        return found

    def __len__(self) -> int:
        return len(self._records)


class FaultLimiter:
    """Lets the same fault through once per interval (seconds; 0: always) and counts the rest.

    Time is that of the records. Remembers a bounded number of faults, the longest known is dropped.
    """

    def __init__(self, interval: float, max_faults: int = _MAX_FAULTS) -> None:
        self._interval = interval
        self._max_faults = max_faults
        self._faults: dict[object, tuple[float, int]] = {}
        self.suppressed_total = 0

    def admit(self, record: logging.LogRecord) -> int | None:
        """Return how many of its kind were left out before it, or None if it is left out too."""
        if record.levelno < logging.WARNING or self._interval <= 0:
            return 0
        fault = self._fault(record)
        last, left_out = self._faults.pop(fault, (-math.inf, 0))
        # A clock that is set back must not silence a fault until it has caught up.
        if 0 <= record.created - last < self._interval:
            self._faults[fault] = (last, left_out + 1)
            self.suppressed_total += 1
            return None
        if len(self._faults) >= self._max_faults:
            del self._faults[next(iter(self._faults))]
        self._faults[fault] = (record.created, 0)
        return left_out

    @staticmethod
    def _fault(record: logging.LogRecord) -> object:
        named = getattr(record, "fault", None)
        if named is not None:
            return record.name, str(named)
        return record.name, record.levelno, str(record.msg), str(record.args)


class TextFormatter(logging.Formatter):
    """One line in a percent-style format, then fields as ``name=value``, then the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        record.message = _message(record)
        if self.usesTime():
            record.asctime = self.formatTime(record, self.datefmt)
        line = self.formatMessage(record)
        for name, value in _fields(record).items():
            shown = value if isinstance(value, str) else json.dumps(value)
            quoted = json.dumps(shown) if re.search(r"[\s\"=]", shown) or not shown else shown
            line += f" {name}={quoted}"
        trace = _traceback(record)
        return f"{line}\n{trace}" if trace else line


class JsonFormatter(logging.Formatter):
    """One JSON object: ``time`` (UTC, ISO 8601), ``level``, ``logger``, ``message``, the fields,
    and ``traceback`` if there is one. A field never replaces one of these."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{stamp}.{int(record.created % 1 * 1e6):06d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
        }
        for name, value in _fields(record).items():
            entry[f"field_{name}" if name in entry or name == "traceback" else name] = value
        trace = _traceback(record)
        if trace:
            entry["traceback"] = trace
        return json.dumps(entry)


class LogHandler(logging.Handler):
    """Writes a record to a stream and keeps its text in a ring."""

    def __init__(
        self, stream: TextIO, formatter: logging.Formatter, ring: LogRing, limiter: FaultLimiter
    ) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.ring = ring
        self.limiter = limiter
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        """Format and write ``record``, unless its fault was written less than an interval ago."""
        try:
            left_out = self.limiter.admit(record)
            if left_out is None:
                return
            if left_out:
                record.suppressed = left_out
            text = self.format(record)
            self.ring.append(record.created, record.levelname, text)
            self._stream.write(text + "\n")
            self._stream.flush()
        except (OSError, ValueError, TypeError, KeyError):
            # The stream is gone, or the call is wrong: logging's own way of saying so.
            self.handleError(record)


def _message(record: logging.LogRecord) -> str:
    """Return the message on one line, with nothing secret: peers may have written parts of it."""
    return redact(record.getMessage()).translate(_CONTROL)


def _traceback(record: logging.LogRecord) -> str:
    if record.exc_info and not record.exc_text:
        record.exc_text = logging.Formatter().formatException(record.exc_info)
    parts = [part for part in (record.exc_text, record.stack_info) if part]
    return redact("\n".join(parts))


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {
        name: _HIDDEN if _SECRET_FIELD.search(name) else _value(value)
        for name, value in vars(record).items()
        if name not in _STANDARD
    }


def _value(value: object, depth: int = 0) -> object:
    """Return ``value`` as something that JSON has."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth < 4:
        if isinstance(value, Mapping):
            return {
                str(name): _HIDDEN if _SECRET_FIELD.search(str(name)) else _value(item, depth + 1)
                for name, item in value.items()
            }
        if isinstance(value, list | tuple | set | frozenset):
            return [_value(item, depth + 1) for item in value]
    return redact(str(value)).translate(_CONTROL)
