"""Servers of tests as processes: started at other ports, and killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from tests.ports import free_port


class Processes:
    """Processes of one program, one after the other. Leaving kills the last one.

    Args:
        program: a Python file whose first argument is its port.
        arguments: further arguments.
    """

    def __init__(self, program: str, *arguments: object) -> None:
        self._command = [sys.executable, str(Path(__file__).parent / program)]
        self._arguments = [str(one) for one in arguments]
        self._process: subprocess.Popen | None = None

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.kill()

    async def start(self) -> int:
        """Start a process at another port. Return the port when it accepts connections."""
        port = free_port()
        self._spawn(port)
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                assert self._process.poll() is None, "the server runs"
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return port

    def _spawn(self, port: int) -> None:
        self._process = subprocess.Popen([*self._command, str(port), *self._arguments])

    def kill(self) -> None:
        """Kill the process, with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
