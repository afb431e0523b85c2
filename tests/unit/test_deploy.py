"""LocalCluster's arguments, and that the package costs nothing before it is used."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import distributed_core
from distributed_core.deploy import local_cluster


def test_importing_the_package_is_light() -> None:
    script = (
        "import sys, distributed_core, distributed_core.deploy\n"
        "print(sorted({'dask', 'distributed', 'tornado', 'yaml', 'importlib.metadata'}"
        " & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "[]"


def test_public_names() -> None:
    assert distributed_core.LocalCluster is local_cluster.LocalCluster
    assert set(distributed_core.__all__) <= set(dir(distributed_core))
    with pytest.raises(AttributeError, match="no attribute 'Scheduler'"):
        distributed_core.Scheduler  # noqa: B018


@pytest.mark.parametrize(
    ("workers", "threads", "expected"),
    [(3, 2, (2, 3)), (2, None, (4, 2)), (None, 3, (3, 2)), (0, None, (8, 0)), (20, None, (1, 20))],
)
def test_sizes(
    workers: int | None,
    threads: int | None,
    expected: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_cluster, "CPU_COUNT", 8)
    assert local_cluster._sizes(workers, threads) == expected


def test_sizes_of_nothing_suit_the_machine() -> None:
    threads, workers = local_cluster._sizes(None, None)
    assert threads >= 1
    assert workers >= 1


@pytest.mark.parametrize(
    ("level", "expected"),
    [(True, "info"), (False, None), (30, "warning"), ("ERROR", "error"), ("debug", "debug")],
)
def test_levels(level: Any, expected: str | None) -> None:
    assert local_cluster._level_name(level) == expected


def test_options() -> None:
    words = local_cluster._option_words(
        {"resources": "GPU=2", "preload": ["a", "b"], "reconnect": False, "jupyter": True}
    )
    assert words == [
        *("--resources", "GPU=2"),
        *("--preload", "a"),
        *("--preload", "b"),
        "--no-reconnect",
        "--jupyter",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_workers": -1}, "n_workers must be 0 or more, got -1"),
        ({"threads_per_worker": 0}, "threads_per_worker must be 1 or more, got 0"),
        ({"worker": "mine"}, "worker must be 'dask', got 'mine'"),
        ({"silence_logs": "loud"}, "silence_logs must be True, False or a level .* got 'loud'"),
        ({"silence_logs": 35}, "silence_logs must be True, False or a level .* got 35"),
    ],
)
def test_bad_arguments_start_nothing(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        local_cluster.LocalCluster(**arguments)
