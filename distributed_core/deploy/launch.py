"""The keeper of one child process: when its owner is gone, so is the child.

``python launch.py [--grace SECONDS] [--remove DIRECTORY] COMMAND…`` starts COMMAND in a process
group of its own and stays as its parent until it has ended. Whatever happens to the owner, kill -9
included, ends the command and everything it started:

* Standard input is a pipe whose other end the owner holds; its end is the owner's end.
* A fork of the owner may hold that end too, so the keeper also looks whether its parent changed.
* On Linux the kernel kills the command if the keeper itself is killed. The owner cannot ask for
  that directly: the kernel means the *thread* that made the child, and threads come and go.

SIGTERM asks the command to end in time, SIGUSR1 kills it at once. Imports the standard library
only and is run by path, so that it costs a child next to no start-up time. Never touches the
command's output. Called by ``distributed_core.deploy.child``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

__all__ = ["main"]

_POLL_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1


def _tie_to_parent() -> Callable[[], None] | None:
    """What the command runs between fork and exec, so that it dies with this process."""
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    prctl = ctypes.CDLL(None, use_errno=True).prctl
    keeper = os.getpid()

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != keeper:
            os._exit(128 + signal.SIGKILL)

    return tie


class _Keeper:
    """The command, and why it is to end."""

    def __init__(self, command: Sequence[str], grace: float) -> None:
        self._owner = os.getppid()
        self._grace = grace
        self._deadline: float | None = None
        self._asked_to_end = False
        self._asked_to_kill = False
        self.owner_gone = False
        # Every signal wakes the select below.
        self._wake, write = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_tie_to_parent(),  # noqa: PLW1509 - there is one thread here
        )

    def _on_signal(self, number: int, _: object) -> None:
        # Equal signals merge into one, so "at once" is not told by asking twice.
        if number == signal.SIGUSR1:
            self._asked_to_kill = True
        else:
            self._asked_to_end = True

    def wait(self) -> int:
        """Wait until the command has ended; its exit status as ``Popen.returncode``."""
        try:
            while self._child.poll() is None:
                self._step()
        finally:
            # What the command started and left behind, or the command itself after an error.
            self._kill()
        return self._child.wait()

    def _step(self) -> None:
        if self._asked_to_end:
            self._ask()
        if self._asked_to_kill or (
            self._deadline is not None and time.monotonic() >= self._deadline
        ):
            self._kill()
        watched = [self._wake] if self.owner_gone else [self._wake, 0]
        ready = select.select(watched, [], [], _POLL_SECONDS)[0]
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
        at_end = 0 in ready and not os.read(0, 4096)
        if not self.owner_gone and (at_end or os.getppid() != self._owner):
            self.owner_gone = True
            self._ask()

    def _ask(self) -> None:
        """Ask the command to end in time."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace
            self._child.terminate()

    def _kill(self) -> None:
        """End the command and what it started, unless that has left the group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its status: negative if a signal ended the command."""
    parser = argparse.ArgumentParser(description="Run a command that ends with its owner.")
    parser.add_argument("--grace", type=float, default=3.0, metavar="SECONDS")
    parser.add_argument("--remove", metavar="DIRECTORY")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args(argv)
    if not arguments.command:
        parser.error("a command is needed")
    try:
        keeper = _Keeper(arguments.command, arguments.grace)
    except OSError as exc:
        sys.stderr.write(f"cannot start {arguments.command[0]}: {exc}\n")
        return 127
    status = keeper.wait()
    if keeper.owner_gone and arguments.remove:
        # Several keepers may do so; the last to end leaves nothing.
        shutil.rmtree(arguments.remove, ignore_errors=True)
    return status


if __name__ == "__main__":
    code = main()
    sys.exit(code if code >= 0 else 128 - code)
