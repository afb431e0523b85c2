"""Sizes, durations and rates, as people write them in a configuration.

Owns the spellings: every one that ``dask.utils.parse_bytes`` and ``parse_timedelta`` take means
the same here, plus ``min``, ``sec`` and ``hr``. Never reads a setting and never does I/O. Called by
``kinds`` and by the HTTP side for query arguments.
"""

import math
import re

__all__ = [
    "format_bytes",
    "format_duration",
    "parse_bytes",
    "parse_duration",
    "parse_rate",
]

_QUANTITY = re.compile(
    r"([0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|)([a-zA-Zµ]*)"
)
_RATE_TAIL = re.compile(r"/\s*(?:s|sec|second)\s*$", re.IGNORECASE)

_BYTE_UNITS: dict[str, int] = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _BYTE_UNITS[_letter] = _BYTE_UNITS[_letter + "b"] = 1000**_power
    _BYTE_UNITS[_letter + "i"] = _BYTE_UNITS[_letter + "ib"] = 1024**_power

_TIME_UNITS: dict[str, float] = {}
for _names, _seconds in (
    (("ns", "nanosecond", "nanoseconds"), 1e-9),
    (("us", "µs", "microsecond", "microseconds"), 1e-6),
    (("ms", "millisecond", "milliseconds"), 1e-3),
    (("s", "sec", "secs", "second", "seconds"), 1.0),
    (("m", "min", "mins", "minute", "minutes"), 60.0),
    (("h", "hr", "hrs", "hour", "hours"), 3600.0),
    (("d", "day", "days"), 86400.0),
    (("w", "week", "weeks"), 604800.0),
):
    for _name in _names:
        _TIME_UNITS[_name] = _seconds

_BYTES_HINT = "use B, kB, MB, GB, TB, PB or KiB, MiB, GiB, TiB, PiB"
_TIME_HINT = "use us, ms, s, m, h, d or w, or their full names"


def parse_bytes(raw: object) -> int:
    """Return a size in bytes: ``65536``, ``"64KiB"``, ``"100 MB"``.

    Raises ValueError, with the text and the valid units, if ``raw`` is not a size.
    """
    if isinstance(raw, int) and not isinstance(raw, bool):
        if raw < 0:
            raise ValueError(f"a size cannot be negative, got {raw}")
        return raw
    number, unit = _split(raw, "a size", _BYTES_HINT)
    try:
        factor = _BYTE_UNITS[unit.lower()]
    except KeyError:
        raise ValueError(f"unknown unit {unit!r} in {raw!r}; {_BYTES_HINT}") from None
    if number.isdigit():
        return int(number) * factor
    return int(_finite(number, factor, raw))


def parse_duration(raw: object, default_unit: str = "s") -> float:
    """Return a duration in seconds: ``5``, ``"500ms"``, ``"5 minutes"``, ``"1h"``.

    A bare number counts ``default_unit``. Raises ValueError, with the text and the valid units, if
    ``raw`` is not a duration.
    """
    number, unit = _split(raw, "a duration", _TIME_HINT)
    try:
        factor = _TIME_UNITS[unit.lower() or default_unit]
    except KeyError:
        raise ValueError(f"unknown unit {unit!r} in {raw!r}; {_TIME_HINT}") from None
    return _finite(number, factor, raw)


def parse_rate(raw: object) -> int:
    """Return a rate in bytes per second: ``100000000``, ``"100 MB/s"``; ``/s`` may be left out.

    Raises ValueError, with the text and the valid units, if ``raw`` is not a rate above zero.
    """
    rate = parse_bytes(_RATE_TAIL.sub("", raw) if isinstance(raw, str) else raw)
    if rate == 0:
        raise ValueError(f"a rate must be above zero, got {raw!r}")
    return rate


def format_bytes(size: int) -> str:
    """Return ``size`` in the largest unit that shows it exactly; ``parse_bytes`` reads it back."""
    for base, suffix in ((1024, "iB"), (1000, "B")):
        for power in range(5, 0, -1):
            if size and size % base**power == 0:
                return f"{size // base**power}{'kMGTP'[power - 1]}{suffix}"
    return f"{size}B"


def format_duration(seconds: float) -> str:
    """Return ``seconds`` in the largest unit that shows them exactly."""
    for unit in ("d", "h", "m", "s", "ms", "us"):
        count = round(seconds / _TIME_UNITS[unit])
        if count and count * _TIME_UNITS[unit] == seconds:
            return f"{count}{unit}"
    return f"{seconds:g}s" if float(f"{seconds:g}") == seconds else f"{seconds!r}s"


def _split(raw: object, what: str, hint: str) -> tuple[str, str]:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise ValueError(f"expected {what}, got {raw!r}; {hint}")
    text = str(raw).replace(" ", "")
    match = _QUANTITY.fullmatch(text)
    if match is None or not text:
        raise ValueError(f"expected {what}, got {raw!r}; {hint}")
    number, unit = match.groups()
    # As Dask reads it: a unit alone counts one of it.
    return number or "1", unit


def _finite(number: str, factor: float, raw: object) -> float:
    value = float(number) * factor
    if not math.isfinite(value):
        raise ValueError(f"{raw!r} is too large")
    return value
