"""Settings of the whole test suite; imports nothing heavy, since unit tests pass through here."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cluster: real processes on loopback, with stock Dask peers")
    config.addinivalue_line(
        "markers", "ours_only: the stock scheduler is known to behave differently here"
    )
