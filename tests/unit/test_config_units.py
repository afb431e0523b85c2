"""Units of settings, against Dask's own reading of the same spellings."""

import math

import pytest
from dask.utils import parse_bytes as dask_bytes
from dask.utils import parse_timedelta as dask_duration
from hypothesis import given
from hypothesis import strategies as st

from distributed_core.config.units import (
    format_bytes,
    format_duration,
    parse_bytes,
    parse_duration,
    parse_rate,
)

BYTES = [
    (0, 0),
    (123, 123),
    ("100", 100),
    ("100 MB", 10**8),
    ("100M", 10**8),
    ("5kB", 5000),
    ("5.4 kB", 5400),
    ("1kiB", 1024),
    ("1 KiB", 1024),
    ("64MiB", 64 * 2**20),
    ("2Gi", 2 * 2**30),
    ("1e6", 10**6),
    ("1e6 kB", 10**9),
    ("MB", 10**6),
    ("3 tb", 3 * 10**12),
    ("1PiB", 2**50),
    (".5 kB", 500),
    ("10B", 10),
]
DURATIONS = [
    (3, 3.0),
    (0.5, 0.5),
    ("3s", 3.0),
    ("3.5 seconds", 3.5),
    ("300ms", 0.3),
    ("500 ms", 0.5),
    ("1us", 1e-6),
    ("20 microseconds", 20e-6),
    ("5 minutes", 300.0),
    ("5m", 300.0),
    ("1h", 3600.0),
    ("1 hour", 3600.0),
    ("2d", 172800.0),
    ("1 week", 604800.0),
    ("1e-3 s", 1e-3),
    ("7", 7.0),
    ("s", 1.0),
]


@pytest.mark.parametrize(("raw", "expected"), BYTES)
def test_bytes(raw, expected):
    assert parse_bytes(raw) == expected


@pytest.mark.parametrize(("raw", "expected"), DURATIONS)
def test_durations(raw, expected):
    assert math.isclose(parse_duration(raw), expected)


@pytest.mark.parametrize(("raw", "expected"), [*BYTES, *DURATIONS])
def test_dask_reads_the_same(raw, expected):
    if (raw, expected) in BYTES:
        assert dask_bytes(raw) == parse_bytes(raw)
    if (raw, expected) in DURATIONS:
        assert math.isclose(dask_duration(raw), parse_duration(raw))


@pytest.mark.parametrize(
    ("raw", "expected"), [("5 min", 300.0), ("2 hrs", 7200.0), ("1.5 sec", 1.5), ("5 µs", 5e-6)]
)
def test_durations_that_only_we_read(raw, expected):
    assert math.isclose(parse_duration(raw), expected)


def test_a_bare_number_counts_the_given_unit():
    assert parse_duration(250, default_unit="ms") == 0.25
    assert parse_duration("3s", default_unit="ms") == 3.0


@pytest.mark.parametrize(
    ("raw", "expected"),
    [("100 MB/s", 10**8), ("100MB", 10**8), (10**8, 10**8), ("1 GiB / sec", 2**30)],
)
def test_rates(raw, expected):
    assert parse_rate(raw) == expected


@pytest.mark.parametrize(
    "raw", ["5 foos", "", "banana", "-5 MB", -1, None, True, [1], "1e400", "x1", "1e308 PB"]
)
def test_not_a_size(raw):
    with pytest.raises(ValueError, match=r"size|unit|negative|large"):
        parse_bytes(raw)


@pytest.mark.parametrize(
    "raw", ["5 foos", "", "-5s", -1, None, True, [1], "nan", "inf", "1h30m", "1e308 w"]
)
def test_not_a_duration(raw):
    with pytest.raises(ValueError, match=r"duration|unit|large"):
        parse_duration(raw)


def test_a_message_names_the_value_and_the_units():
    with pytest.raises(ValueError, match=r"unknown unit 'foos' in '5 foos'; use us, ms, s, m, h"):
        parse_duration("5 foos")
    with pytest.raises(ValueError, match=r"unknown unit 'foos' in '5 foos'; use B, kB, MB"):
        parse_bytes("5 foos")


def test_a_rate_of_zero_is_refused():
    with pytest.raises(ValueError, match="above zero"):
        parse_rate("0 MB/s")


@given(st.integers(0, 2**60))
def test_sizes_are_shown_exactly(size):
    assert parse_bytes(format_bytes(size)) == size


@given(st.floats(0, 1e9, allow_nan=False))
def test_durations_are_shown_exactly(seconds):
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"), [(300, "5m"), (3600, "1h"), (0.5, "500ms"), (1e-6, "1us"), (0, "0s")]
)
def test_durations_are_shown_in_a_unit_that_fits(seconds, text):
    assert format_duration(seconds) == text
