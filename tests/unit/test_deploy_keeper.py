"""The keeper of a child process: whatever happens to the owner, nothing of the child stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from distributed_core.deploy import launch
from distributed_core.deploy.child import Child

# Ignores the polite request, and has a child of its own.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("ready", flush=True)
time.sleep(60)
"""
POLITE = "import time; print('ready', flush=True); time.sleep(60)"


def wait_until(condition: Callable[[], object], what: str, timeout: float = 15) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.01)


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def family(pid: int) -> list[psutil.Process]:
    keeper = psutil.Process(pid)
    return [keeper, *keeper.children(recursive=True)]


@pytest.fixture
def make_child(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def make(script: str, grace: float = 5.0) -> Child:
        log = tmp_path / f"{len(children)}.log"
        command = [sys.executable, "-c", script]
        child = Child("it", command, dict(os.environ), log, tmp_path / "away", grace)
        children.append(child)
        return child

    yield make
    for child in children:
        child.kill()


def started(child: Child, n_processes: int = 2) -> list[psutil.Process]:
    """The keeper and all below it, once the command says that it is ready."""
    wait_until(lambda: "ready" in child.tail(), "the command is ready")
    wait_until(lambda: len(family(child.pid)) == n_processes, "its own child is there")
    return family(child.pid)


def test_ends_when_asked(make_child: Callable[..., Child]) -> None:
    child = make_child(POLITE)
    processes = started(child)
    child.end()
    assert all(is_gone(process) for process in processes)
    assert child.exit_status == 128 + signal.SIGTERM
    child.end()


def test_what_does_not_listen_is_killed_with_all_it_started(
    make_child: Callable[..., Child],
) -> None:
    child = make_child(STUBBORN, grace=0.2)
    processes = started(child, 3)
    child.end()
    assert all(is_gone(process) for process in processes)


def test_kill_does_not_wait_for_the_grace(make_child: Callable[..., Child]) -> None:
    child = make_child(STUBBORN, grace=600)
    processes = started(child, 3)
    child.ask_to_end()
    child.kill()
    assert all(is_gone(process) for process in processes)


def test_what_a_command_leaves_behind_ends_with_it(make_child: Callable[..., Child]) -> None:
    child = make_child(
        "import subprocess, sys\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid)\n"
        "sys.stdout.flush(); sys.exit(3)"
    )
    assert child.wait(15)
    assert child.exit_status == 3
    pid = int(child.tail())
    wait_until(lambda: not psutil.pid_exists(pid) or is_gone(psutil.Process(pid)), "it is gone")


def test_status_and_log_of_a_command_that_cannot_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = Child("it", ["/no/such/program"], dict(os.environ), log, tmp_path / "away", 1.0)
    assert child.wait(15)
    child.kill()
    assert child.exit_status == 127
    assert "cannot start /no/such/program" in child.tail()


OWNER = """
import os, sys, time
from pathlib import Path
from distributed_core.deploy.child import Child
directory = Path(sys.argv[1])
child = Child("it", [sys.executable, "-c", sys.argv[2]], dict(os.environ), directory / "log",
              directory, 0.5)
if sys.argv[3] == "fork" and os.fork() == 0:
    # Holds the write end of the lifeline, and says who it is.
    os.write(1, b"fork %d\\n" % os.getpid())
    time.sleep(60)
os.write(1, b"keeper %d\\n" % child.pid)
time.sleep(60)
"""


def owner(directory: Path, script: str, mode: str) -> subprocess.Popen[str]:
    directory.mkdir()
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, str(directory), script, mode],
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("script", [POLITE, STUBBORN], ids=["polite", "stubborn"])
@pytest.mark.parametrize("mode", ["alone", "fork"])
def test_kill_9_of_the_owner_ends_everything(tmp_path: Path, script: str, mode: str) -> None:
    directory = tmp_path / "owned"
    process = owner(directory, script, mode)
    pids: dict[str, int] = {}
    try:
        assert process.stdout is not None
        while len(pids) < (2 if mode == "fork" else 1):
            name, pid = process.stdout.readline().split()
            pids[name] = int(pid)
        keeper = pids["keeper"]
        log = directory / "log"
        wait_until(lambda: "ready" in log.read_text(), "the command is ready")
        size = 3 if script is STUBBORN else 2
        wait_until(lambda: len(family(keeper)) == size, "its own child is there")
        processes = family(keeper)
        process.kill()
        wait_until(lambda: all(is_gone(p) for p in processes), "all are gone")
        wait_until(lambda: not directory.exists(), "the directory is gone")
    finally:
        process.kill()
        # The fork holds our end of the output open as well.
        if "fork" in pids:
            os.kill(pids["fork"], signal.SIGKILL)
        process.communicate()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs PR_SET_PDEATHSIG")
def test_kill_9_of_the_keeper_ends_the_command(make_child: Callable[..., Child]) -> None:
    child = make_child(POLITE)
    processes = started(child)
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: all(is_gone(process) for process in processes), "the command is gone")


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        launch.main([])
    assert caught.value.code == 2
    assert "a command is needed" in capsys.readouterr().err
