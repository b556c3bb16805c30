"""Bounds on calls under way (``clientAsyncSemaphoreValue``) and on their bytes, and pauses between tries.

Taking a permit costs a comparison or two while there are some; beyond that callers wait in one line, so a large call is
not overtaken by small ones for ever. A call larger than all the bytes goes when no other is under way. Loop only.
The n-th pause of a `Backoff` lies between half of and all of ``first_ms * 2**n``, at most ``most_ms``, so that callers
who failed together do not come back together. Source: remoting.md §2; behaviour.md §7.6.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque

CLIENT_CALLS_MAX = 65_535


class Permits:
    """So many calls, and bytes in them, may be under way at a time; ``free`` and ``free_bytes`` are what is left."""

    __slots__ = ("_bytes_max", "_waiting", "free", "free_bytes")

    def __init__(self, count: int, bytes_max: int = 0) -> None:
        self.free = count
        self.free_bytes = self._bytes_max = bytes_max
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    def take_now(self, size: int = 0) -> bool:
        """Take a permit for a call of so many bytes, if there is one and nobody waits."""
        if size > self._bytes_max:
            size = self._bytes_max
        if self.free <= 0 or size > self.free_bytes or self._waiting:
            return False
        self.free -= 1
        self.free_bytes -= size
        return True

    async def take(self, timeout_ms: float | None, size: int = 0) -> bool:
        """Wait for a permit, None: however long; False when none came in time."""
        if self.take_now(size):
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, size))
        try:
            async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000):
                await turn
        except TimeoutError:
            if turn.done() and not turn.cancelled():
                return True
            self._go_on()  # those behind may want less
            return False
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(size)
            else:
                self._go_on()
            raise
        return True

    def give_back(self, size: int = 0) -> None:
        """End a call of so many bytes: those that wait longest have their turn."""
        if size > self._bytes_max:
            size = self._bytes_max
        self.free += 1
        self.free_bytes += size
        if self._waiting:
            self._go_on()

    def _go_on(self) -> None:
        while self._waiting:
            turn, size = self._waiting[0]
            if not turn.done():
                size = min(size, self._bytes_max)
                if self.free <= 0 or size > self.free_bytes:
                    return
                self.free -= 1
                self.free_bytes -= size
                turn.set_result(None)
            self._waiting.popleft()


class Backoff:
    """The pauses of one series of tries."""

    __slots__ = ("_most_ms", "_next_ms")

    def __init__(self, first_ms: float, most_ms: float) -> None:
        assert 0 < first_ms <= most_ms, f"a first pause of {first_ms} ms is not within {most_ms} ms"
        self._next_ms = first_ms
        self._most_ms = most_ms

    def next_ms(self) -> float:
        """How long to wait before the next try."""
        bound_ms = self._next_ms
        self._next_ms = min(2 * bound_ms, self._most_ms)
        return bound_ms * random.uniform(0.5, 1.0)
