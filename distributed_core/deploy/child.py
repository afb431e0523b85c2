"""One child process of a cluster: started through its keeper, logged to a file, ended for sure.

Owns the process and its log; knows nothing of schedulers and workers. Called by ``local_cluster``.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from distributed_core.deploy import launch

__all__ = ["Child"]

_KILL_SECONDS = 5.0


class Child:
    """A process that ends with this one, however that ends.

    :param name: what messages call it.
    :param command: program and arguments.
    :param env: the whole environment of the child.
    :param log: file for its output; None leaves it on our standard error.
    :param remove: directory that is removed should this process die without ending the child.
    :param grace: seconds it has to end after it was asked, before it is killed.
    :raises OSError: the process cannot be started.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path | None,
        remove: Path,
        grace: float,
    ) -> None:
        self.name = name
        self.log = log
        self._grace = grace
        keeper = [sys.executable, "-I", "-S", launch.__file__]
        keeper += ["--grace", str(grace), "--remove", str(remove), *command]
        with contextlib.ExitStack() as stack:
            output = None if log is None else stack.enter_context(log.open("ab"))
            self._keeper = subprocess.Popen(
                keeper,
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=2 if output is None else output,
                stderr=output,
                # Ctrl-C is for the owner, who then ends its children in order.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the keeper, whose only child is the process itself."""
        return self._keeper.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._keeper.poll() is None

    @property
    def exit_status(self) -> int | None:
        """Exit status, above 128 if a signal ended it, or None while it runs."""
        return self._keeper.poll()

    def ask_to_end(self) -> None:
        """Ask it to end, without waiting."""
        if self.is_alive:
            self._keeper.send_signal(signal.SIGTERM)

    def wait(self, timeout: float) -> bool:
        """Wait for its end, at most ``timeout`` seconds. Returns whether it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._keeper.wait(timeout)
        return not self.is_alive

    def end(self, timeout: float | None = None) -> None:
        """End it and wait until it is gone: in its own way, then by force.

        ``timeout``: seconds for its own way, if less than its grace.
        """
        self.ask_to_end()
        try:
            self.wait(self._grace + 1 if timeout is None else timeout)
        finally:
            self.kill()

    def kill(self) -> None:
        """End it at once, and wait until it is gone."""
        try:
            if self.is_alive:
                self._keeper.send_signal(signal.SIGUSR1)
                if not self.wait(_KILL_SECONDS):
                    self._keeper.kill()
            self._keeper.wait()
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Close our end of the lifeline; a keeper that still runs ends the child by that."""
        if self._keeper.stdin is not None:
            self._keeper.stdin.close()

    def tail(self, lines: int = 20) -> str:
        """The last lines of its log."""
        if self.log is None:
            return "(its output went to standard error)"
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:]) or "(its log is empty)"
