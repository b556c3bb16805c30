"""A bound on calls under way (``serverAsyncSemaphoreValue``, ``clientAsyncSemaphoreValue``).

Taking a permit costs a comparison while there are some; beyond that callers wait in line. Loop only.
Source: remoting.md §2.
"""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["CLIENT_CALLS_MAX", "SERVER_CALLS_MAX", "Permits"]

CLIENT_CALLS_MAX = 65_535
SERVER_CALLS_MAX = 64


class Permits:
    """So many calls may be under way at a time."""

    __slots__ = ("_free", "_waiting")

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self, timeout_ms: float) -> bool:
        """Wait for a permit; False when none came in time."""
        if self._free > 0:
            self._free -= 1
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await turn
        except TimeoutError:
            return turn.done() and not turn.cancelled()
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back()
            raise
        return True

    def give_back(self) -> None:
        """End a call: the longest waiting caller has its turn."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
