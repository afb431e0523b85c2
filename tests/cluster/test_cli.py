"""The command line of the daemon, as deployers use it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from distributed import Client

from tests.cluster import tasks
from tests.cluster.harness import (
    STOCK,
    ChildProcess,
    Cluster,
    SchedulerProcess,
    child_environment,
    scheduler_command,
    wait_until,
)


def run_cli(*arguments: str, timeout: float = 30.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*scheduler_command(), *arguments],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_scheduler_file_and_pid_file(tmp_path: Path) -> None:
    scheduler_file, pid_file = tmp_path / "scheduler.json", tmp_path / "scheduler.pid"
    options = ("--scheduler-file", str(scheduler_file), "--pid-file", str(pid_file))
    with Cluster(0, *options) as cluster:
        wait_until(scheduler_file.exists)
        content = json.loads(wait_until(scheduler_file.read_text))
        assert content["type"] == "Scheduler"
        assert content["address"] == cluster.address
        assert set(content) >= {"id", "services", "started", "workers"}
        assert int(pid_file.read_text()) == cluster.scheduler.pid
        cluster.add_workers({"options": ("--scheduler-file", str(scheduler_file))})
        with Client(scheduler_file=str(scheduler_file), timeout=20) as client:
            assert client.submit(tasks.inc, 1).result(timeout=20) == 2
        cluster.scheduler.popen.send_signal(signal.SIGTERM)
        cluster.scheduler.wait()
        assert not pid_file.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_in_order(number: signal.Signals) -> None:
    with Cluster(1) as cluster:
        family = psutil.Process(cluster.scheduler.pid).children(recursive=True)
        cluster.scheduler.popen.send_signal(number)
        assert cluster.scheduler.wait() == 0
        cluster.workers[0].wait(20)
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive, "helpers outlive the scheduler"


@pytest.mark.ours_only
def test_helpers_end_with_a_scheduler_that_was_killed() -> None:
    with SchedulerProcess() as scheduler:
        family = psutil.Process(scheduler.pid).children(recursive=True)
        scheduler.kill()
        _, alive = psutil.wait_procs(family, timeout=10)
        assert [p for p in alive if p.status() != "zombie"] == []


def test_version() -> None:
    done = run_cli("--version")
    assert done.returncode == 0
    assert re.search(r"\d+\.\d+", done.stdout + done.stderr)


def test_help_lists_the_options() -> None:
    done = run_cli("--help")
    assert done.returncode == 0
    for option in (
        *("--host", "--port", "--interface", "--protocol", "--tls-ca-file", "--tls-cert"),
        *("--tls-key", "--dashboard-address", "--pid-file", "--scheduler-file"),
        *("--idle-timeout", "--version", *(() if STOCK else ("--config",))),
    ):
        assert option in done.stdout, option


@pytest.mark.ours_only
def test_unknown_option_is_an_error() -> None:
    done = run_cli("--no-such-option", "5")
    assert done.returncode == 2
    assert "--no-such-option" in done.stderr


@pytest.mark.ours_only
@pytest.mark.parametrize(
    "arguments",
    [("--port", "many"), ("--port", "99999999"), ("--idle-timeout", "soon"), ("--protocol", "x")],
    ids=" ".join,
)
def test_bad_values_are_errors_that_name_them(arguments: tuple[str, str]) -> None:
    done = run_cli("--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0", *arguments)
    assert done.returncode != 0
    assert arguments[1] in done.stderr


def test_port_in_use_is_an_error() -> None:
    with SchedulerProcess() as first:
        done = run_cli(
            *("--host", "127.0.0.1", "--port", str(first.port)),
            *("--dashboard-address", "127.0.0.1:0"),
        )
        assert done.returncode != 0
        if not STOCK:
            assert str(first.port) in done.stderr
        assert first.call("identity", n_workers=0)["type"] == "Scheduler"


@pytest.mark.ours_only
def test_files_of_another_scheduler_are_left_alone(tmp_path: Path) -> None:
    scheduler_file, pid_file = tmp_path / "scheduler.json", tmp_path / "scheduler.pid"
    options = ("--scheduler-file", str(scheduler_file), "--pid-file", str(pid_file))
    with SchedulerProcess(*options) as first:
        wait_until(scheduler_file.exists)
        before = scheduler_file.read_text()
        with SchedulerProcess(*options, port=first.port, wait=False) as failing:
            assert failing.wait() != 0
        assert scheduler_file.read_text() == before
        assert int(pid_file.read_text()) == first.pid
        with SchedulerProcess(*options) as second:
            wait_until(lambda: scheduler_file.read_text() != before)
            first.stop()
            assert second.address in scheduler_file.read_text()
            assert int(pid_file.read_text()) == second.pid
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ours_only
def test_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "scheduler.json"
    with SchedulerProcess("--scheduler-file", str(path), wait=False) as process:
        assert process.wait() == 1
        assert str(path) in process.output()
        assert "Traceback" not in process.output()


@pytest.mark.ours_only
def test_listens_on_loopback_only_unless_told() -> None:
    options = ("--port", "0", "--dashboard-address", "127.0.0.1:0")
    with ChildProcess("scheduler", [*scheduler_command(), *options]) as scheduler:
        wait_until(lambda: "--host" in scheduler.output(), what="it says how to open it")
        addresses = wait_until(lambda: _listening(scheduler.pid))
        assert {a for a in addresses if not a.startswith(("127.", "::1"))} == set()


def _listening(pid: int) -> list[str]:
    connections = psutil.Process(pid).net_connections("tcp")
    return [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]


@pytest.mark.ours_only
def test_check_config() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "distributed_core.cli.main", "check-config"],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout


@pytest.mark.ours_only
def test_bad_setting_stops_the_start_and_names_it(tmp_path: Path) -> None:
    config = tmp_path / "bad.yaml"
    config.write_text("scheduler:\n  allowed-failures: 2\nno-such-section:\n  x: 1\n")
    done = run_cli("--config", str(config), "--host", "127.0.0.1", "--port", "0")
    assert done.returncode != 0
    assert "no-such-section" in done.stderr
    assert "bad.yaml:3" in done.stderr
