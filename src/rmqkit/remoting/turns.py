"""Long work on the event loop in slices, so that what came meanwhile has its turn.

No request may hold the loop for long, whoever sends it. Work that grows with what a peer sent asks `Slice.is_over`
between two steps, and lets the loop turn when it is. What counts is the CPU time of the loop's thread, not the clock:
on a busy machine a slice is not shorter. Loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator

SLICE_SECONDS = 0.01
"""CPU time of one slice."""


class Slice:
    """One stretch of work."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until = time.thread_time() + SLICE_SECONDS

    @property
    def is_over(self) -> bool:
        """Whether it is time to let the loop turn."""
        return time.thread_time() > self._until

    async def pause(self) -> None:
        """Let the loop turn; then a new slice begins."""
        await asyncio.sleep(0)
        self._until = time.thread_time() + SLICE_SECONDS

    async def pause_if_over(self) -> None:
        """Let the loop turn if it is time."""
        if self.is_over:
            await self.pause()


class Turns:
    """Work without a task: each piece is an iterator whose steps are done, a slice at a time, in the order in which
    they came. ``on_error``: told of a step that failed; its piece is over."""

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_error = on_error
        self._pieces: deque[Iterator[object]] = deque()
        self._is_working = False

    def __len__(self) -> int:
        """The pieces that are not done."""
        return len(self._pieces)

    def add(self, piece: Iterator[object]) -> None:
        """Do a piece: as much as a slice allows at once, if nothing waits before it."""
        self._pieces.append(piece)
        if len(self._pieces) == 1 and not self._is_working:
            self._work()

    def finish(self) -> None:
        """Do all of it now; for the end."""
        while self._pieces:
            self._step()

    def _work(self) -> None:
        self._is_working = True
        now = Slice()
        while self._pieces and not now.is_over:
            self._step()
        self._is_working = False
        if self._pieces:
            self._loop.call_soon(self._work)

    def _step(self) -> None:
        try:
            next(self._pieces[0])
        except StopIteration:
            self._pieces.popleft()
        except Exception as error:  # noqa: BLE001 - the outer edge of a piece: told, and the others go on
            self._pieces.popleft()
            self._on_error(error)
