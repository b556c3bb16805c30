"""Ports of loopback for servers that a test starts on chosen ports: no two processes of tests get the same.

If a test binds a port, closes it and passes it to a server, another process may take the port in between. So the ports
below the kernel's range for outgoing connections are divided into blocks. At its first request a process takes the
first block whose lowest port it can bind. It holds that socket, which does not listen, until it exits: the kernel then
frees the block, also after a kill. A process uses the ports of its block in a cycle, and skips ports that are in use.

`silent_port` holds a port on which no server listens.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["HOST", "free_port", "free_ports", "silent_port"]

HOST = "127.0.0.1"
LOWEST, END, BLOCK = 18_000, 32_000, 250
"""Linux gives connections ports from 32,768 on. The usual port 16384 is outside of the range: tests of documents
replace the test's ports in the output by the documented ones."""


class _Block:
    """The ports of this process, used in a cycle."""

    def __init__(self) -> None:
        self._kept = socket.socket()
        for lowest in range(LOWEST, END, BLOCK):
            try:
                self._kept.bind((HOST, lowest))
            except OSError:
                continue
            self.lowest, self._next = lowest, 1
            return
        self._kept.close()
        raise OSError(f"all {(END - LOWEST) // BLOCK} blocks of ports are taken: end other runs of tests")

    def port(self, below: int, above: int, steps: set[int]) -> int:
        """Return the next free port whose ports at a distance of ``steps`` are free too, all in the block.

        Raises OSError: there is no such port."""
        for _ in range(BLOCK):
            if self._next + below + above >= BLOCK:
                self._next = 1
            port = self.lowest + self._next + below
            if all(_is_free(port + step) for step in steps):
                self._next += below + 1 + above
                return port
            self._next += 1
        raise OSError(f"no port from {self.lowest} to {self.lowest + BLOCK - 1} is free with those at {sorted(steps)}")


_lock = threading.Lock()
_own: dict[int, _Block] = {}
"""By process, because a forked process needs its own block."""


def free_port(*beside: int) -> int:
    """Return a port on which no server listens.

    ``beside``: distances to ports that must be free too and are reserved with it.
    Raises OSError: this process has no such ports."""
    steps = {0, *beside}
    with _lock:
        pid = os.getpid()
        if pid not in _own:
            _own[pid] = _Block()
        return _own[pid].port(-min(steps), max(steps), steps)


def free_ports() -> tuple[int, int, int]:
    """Return ports for name server, broker and HA. The broker also listens two below its port (the "fast" port). Our
    broker uses the port above its own for HA, unless another HA port is set."""
    return free_port(), free_port(-2, 1), free_port()


@contextmanager
def silent_port() -> Iterator[int]:
    """Yield a port that refuses connections: a socket is bound to it and does not listen."""
    with socket.socket() as silent:
        silent.bind((HOST, 0))
        yield silent.getsockname()[1]


def _is_free(port: int) -> bool:
    with socket.socket() as looking:
        try:
            looking.bind((HOST, port))
        except OSError:
            return False
    return True
