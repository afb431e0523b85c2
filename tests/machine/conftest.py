"""Fixtures of the machine tests: a rig whose effects must all have been looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cython_ext.invariants import check

pytest.register_assert_rewrite("tests.machine.builders")

from tests.machine.builders import Rig  # noqa: E402 - its asserts are rewritten first


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """Makes rigs; at the end of the test none may have effects that nobody expected."""
    rigs: list[Rig] = []

    def make(*args: Any, **kwargs: Any) -> Rig:
        rig = Rig(*args, **kwargs)
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        assert rig.take() == []
        assert check(rig.machine) == []
