"""Ports of loopback for servers that a test starts on chosen ports: no two processes of tests get the same.

A port that is bound, closed and then told to a server may meanwhile go to the server of another process. So the ports
below those that the kernel gives to connections are cut into blocks, and a process that asks for its first port takes
the first block whose lowest port it can bind. It keeps that socket, which does not listen, until it ends: the kernel
gives the block back then, also when the process was killed. In its block a process goes round, so that a port comes
again only after all others; one that is in use, by a server that was left over, say, is passed over.

A port at which nobody must listen is `silent_port`, which keeps it bound.
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
"""Connections get ports from 32,768 on (Linux) or above. 16384, a usual size, is none of these: what documents print is
read with the ports of a test turned back."""


class _Block:
    """The ports of this process, which come in turn."""

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
        """The next port that is free with those at ``steps`` from it, all in the block.
        Raises OSError: there is none."""
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
"""By process, as a forked one needs another block."""


def free_port(*beside: int) -> int:
    """A port nobody listens at. ``beside``: steps from it to ports that have to be free, too, and come to nobody else.
    Raises OSError: this process has no such ports."""
    steps = {0, *beside}
    with _lock:
        pid = os.getpid()
        if pid not in _own:
            _own[pid] = _Block()
        return _own[pid].port(-min(steps), max(steps), steps)


def free_ports() -> tuple[int, int, int]:
    """Ports for name server, broker and HA; the broker also listens two below its own (the "fast" port), ours one above
    unless told another HA port."""
    return free_port(), free_port(-2, 1), free_port()


@contextmanager
def silent_port() -> Iterator[int]:
    """A port where connections are refused, as a socket is bound to it that does not listen."""
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
