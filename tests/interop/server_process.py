"""A server process: waits for its ready line, and stops it by its pid.

Output goes to a file, and the message of a failed start quotes it. No server outlives the tests, however they end: a
watch process reads the pids of running servers from a pipe, and kills these when the other end of the pipe is closed.
"""

import atexit
import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

POLL_SECONDS = 0.01
LOG_TAIL_LINES = 20
_starting = threading.Lock()
WATCHMAN = """
import contextlib, os, signal, sys
running = set()
for line in sys.stdin:
    (running.add if line[0] == "+" else running.discard)(int(line[1:]))
for pid in running:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
"""


class ServerProcess:
    """One running server. Leaving the `with` block kills the process if it still runs."""

    def __init__(self, command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.log = log
        self.started_at = time.monotonic()
        self.ready_seconds = float("nan")
        with log.open("wb") as output:
            self._popen = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=None if env is None else dict(env),
                start_new_session=True,  # this process passes an interrupt of the terminal on
            )
        os.write(_watchman(), b"+%d\n" % self.pid)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def wait_ready(self, pattern: str, timeout_seconds: float) -> re.Match[str]:
        """Wait until a line of the output matches.

        Raises RuntimeError: the process exits first. Raises TimeoutError: it takes longer.
        """
        found: list[re.Match[str]] = []

        def is_ready() -> bool:
            match = re.search(pattern, self.log.read_text(errors="replace"), re.MULTILINE)
            if match is None and self._popen.poll() is not None:
                raise RuntimeError(f"ended with {self._popen.returncode} before {pattern!r}; {self.log_tail()}")
            if match is not None:
                found.append(match)
            return match is not None

        try:
            wait_until(is_ready, timeout_seconds, f"{pattern!r} in {self.log}")
        except TimeoutError as late:
            raise TimeoutError(f"{late}; {self.log_tail()}") from None
        self.ready_seconds = time.monotonic() - self.started_at
        return found[0]

    def stop(self, how: signal.Signals, timeout_seconds: float) -> int:
        """Signal the process and return its exit code; negative is the signal that ended it.

        Raises TimeoutError: the process did not exit in time and was killed.
        """
        if self._popen.poll() is None:
            self._popen.send_signal(how)
        try:
            self._popen.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(
                f"process {self.pid} still ran {timeout_seconds:g} s after {how.name}; {self.log_tail()}"
            ) from None
        return self.kill()

    def kill(self) -> int:
        """Kill the process if it runs. Return its exit code."""
        self._popen.kill()
        exit_code = self._popen.wait()
        os.write(_watchman(), b"-%d\n" % self.pid)
        return exit_code

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return f"the last lines of {self.log}:\n" + "\n".join(lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def _watchman() -> int:
    """Return the writing end of the watch process's pipe, for lines with a sign and a process id."""
    with _starting:  # threads start servers too
        return _start_watchman()


@functools.cache
def _start_watchman() -> int:
    popen = subprocess.Popen([sys.executable, "-ISc", WATCHMAN], stdin=subprocess.PIPE, start_new_session=True)
    assert popen.stdin is not None, "stdin is a pipe"
    atexit.register(popen.wait)
    atexit.register(popen.stdin.close)
    return popen.stdin.fileno()


def wait_until(
    condition: Callable[[], bool], timeout_seconds: float, what: str, *, poll_seconds: float = POLL_SECONDS
) -> None:
    """Poll `condition` until it holds. Raises TimeoutError naming `what`."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {timeout_seconds:g} s")
        time.sleep(poll_seconds)
