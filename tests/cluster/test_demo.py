"""The demo: right results end with status 0, wrong ones are said and end with 1."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest

from distributed_core import demo
from tests.cluster.harness import ROOT, child_environment

SCRAPE = """\
# TYPE dask_scheduler_tasks gauge
dask_scheduler_tasks{{state="waiting"}} 1.0
dask_scheduler_tasks{{state="no-worker"}} 0.0
dask_scheduler_tasks{{state="queued"}} {queued}
dask_scheduler_tasks{{state="processing"}} 4.0
dask_scheduler_tasks{{state="memory"}} 9.0
# TYPE distributed_core_tasks_assigned counter
distributed_core_tasks_assigned_total {assigned}
# TYPE distributed_core_engine_transitions counter
distributed_core_engine_transitions_total 100.0
# TYPE distributed_core_materializer_cpu_seconds counter
distributed_core_materializer_cpu_seconds_total 0.25
# TYPE distributed_core_event_loop_lag_maximum_seconds gauge
distributed_core_event_loop_lag_maximum_seconds 0.01
# TYPE process_cpu_seconds counter
process_cpu_seconds_total {cpu}
"""


def reading(assigned: int, queued: int = 0, cpu: float = 1.0) -> demo.Reading:
    return demo.Reading.parse(SCRAPE.format(assigned=assigned, queued=queued, cpu=cpu))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_demo_runs() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "distributed_core.demo"],
        cwd=ROOT,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    assert len(re.findall(r"^ .* tasks +[0-9.]+ s +ok$", result.stdout, re.M)) == 4
    assert re.search(r"^  all +[0-9]+ +[0-9]+ ms +[0-9]+ µs$", result.stdout, re.M)
    assert "\r" not in result.stdout
    assert "All results are right" in result.stdout


def test_a_wrong_result_ends_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(client: object) -> None:
        demo.check(True, "this is right")
        demo.check(False, "one and one is not three")

    monkeypatch.setattr(demo, "_PARTS", [("arithmetic", wrong)])
    assert demo.main([]) == 1
    output, errors = capsys.readouterr()
    assert re.search("arithmetic +FAILED", output)
    assert "The demo failed: one and one is not three" in errors


def test_progress_on_a_terminal() -> None:
    out = Terminal()
    readings = iter([reading(10), *[reading(30, queued=7, cpu=1.5)] * 1000])
    with demo.Progress("work", lambda: next(readings), out) as progress:
        # 20 went to workers since, of which 4 are not done; 1 waits and 7 are queued.
        assert re.search(r"work .*\[#{16}-{12}\] 16/28", progress.bar(next(readings)))
    assert progress.tasks == 20
    assert progress.cpu_seconds == 0.5
    assert re.search("work +20 tasks .* ok\n$", out.getvalue())


def test_progress_without_a_terminal_is_one_line() -> None:
    out = io.StringIO()
    with demo.Progress("work", lambda: reading(10), out):
        pass
    assert out.getvalue().count("\n") == 1
    assert "\r" not in out.getvalue()
