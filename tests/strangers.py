"""A client that speaks the protocol with `struct` and `json` alone, over a blocking socket, and the CPU time of
callbacks.

It uses none of our codecs, so its bytes are those of a foreign client.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

from tests.waiting import SECONDS

__all__ = ["Callbacks", "Stranger", "frame", "measured", "measured_turns"]


def frame(
    code: int, fields: dict[str, str] | None = None, body: bytes = b"", *, opaque: int = 1, header: bytes | None = None
) -> bytes:
    """Return a request with a JSON header, or with an encoded ``header``."""
    if header is None:
        said = {"code": code, "language": "JAVA", "version": 500, "opaque": opaque, "flag": 0}
        header = json.dumps({**said, "extFields": fields or {}}).encode()
    return struct.pack(">iI", 4 + len(header) + len(body), len(header)) + header + body


class Stranger:
    """A connection."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), SECONDS)
        self._read = b""

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive_little(self) -> None:
        """Set a small receive buffer for this side of the connection."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)

    def ask(self, data: bytes) -> dict[str, Any]:
        """Send a request and return the header of the next answer, with its body. Raises OSError: the peer closed the
        connection.
        """
        self.send(data)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Return the next answer, skipping requests of the peer."""
        while not (found := self._next())["flag"] & 1:
            pass
        return found

    def _next(self) -> dict[str, Any]:
        (length, word) = struct.unpack(">iI", self._take(8))
        content = self._take(length - 4)
        size = word & 0xFFFFFF
        answer: dict[str, Any] = json.loads(content[:size])
        return answer | {"body": content[size:]}

    @property
    def is_closed(self) -> bool:
        """Return True if the peer closed the connection after it answered everything that it had read."""
        try:
            self._take(1)
        except OSError:
            return True
        return False

    def close(self) -> None:
        self._socket.close()

    def _take(self, size: int) -> bytes:
        pieces = [self._read]
        missing = size - len(self._read)
        while missing > 0:
            piece = self._socket.recv(1 << 20)
            if not piece:
                raise ConnectionResetError("the connection was closed")
            pieces.append(piece)
            missing -= len(piece)
        read = b"".join(pieces)
        self._read = read[size:]
        return read[:size]


class Callbacks:
    """CPU seconds of the callbacks of running loops: the longest callback, and the sum."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.which = ""
        self.total = 0.0

    def reset(self) -> None:
        self.longest = 0.0
        self.which = ""


@contextlib.contextmanager
def measured() -> Iterator[Callbacks]:
    """Measure every callback of asyncio's loops in its own thread, by CPU time, not wall time."""
    callbacks = Callbacks()
    run = asyncio.Handle._run

    def measuring(handle: asyncio.Handle) -> None:
        begin = time.thread_time()
        run(handle)
        took = time.thread_time() - begin
        callbacks.total += took
        if took > callbacks.longest:
            callbacks.longest, callbacks.which = took, repr(handle)[:200]

    asyncio.Handle._run = measuring  # type: ignore[method-assign]
    try:
        with _frozen():
            yield callbacks
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]


@contextlib.contextmanager
def measured_turns() -> Iterator[Callbacks]:
    """Measure whole iterations of the running loop, of any implementation: all work between two calls of one
    callback.
    """
    callbacks, loop = Callbacks(), asyncio.get_running_loop()
    is_over, began = False, time.thread_time()

    def turned() -> None:
        nonlocal began
        now = time.thread_time()
        took, began = now - began, now
        callbacks.total += took
        if took > callbacks.longest:
            callbacks.longest, callbacks.which = took, "a turn"
        if not is_over:
            loop.call_soon(turned)

    with _frozen():
        turned()
        yield callbacks
        is_over = True


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """Exclude older objects from garbage collection: a full collection of them is not the servers' work."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
