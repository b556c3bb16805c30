"""Work on the event loop: tasks with an owner, rounds that repeat, and long work cut into slices.

A task is started, named, cancelled and awaited by its `Tasks`; `keep_doing` and `repeat` run the periodic ones.

No request may hold the loop for long, whoever sends it. Work that grows with what a peer sent asks `Slice.is_over`
between two steps, and lets the loop turn when it is. What counts is the CPU time of the loop's thread, not the clock:
on a busy machine a slice is not shorter. Loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from rmqkit.errors import RmqError

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Tasks:
    """A set of running tasks with one owner; loop only."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a coroutine until it ends or `close`; log its error."""
        task = self.own(work, name)
        task.add_done_callback(_log_error)
        return task

    def own(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run a coroutine until it ends or `close`. The caller awaits the task, so its error is the caller's."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)  # the loop itself keeps tasks by weak references only
        task.add_done_callback(self._tasks.discard)
        return task

    def __len__(self) -> int:
        return len(self._tasks)

    async def finish(self) -> None:
        """Wait until all that run have ended by themselves; they go on when the waiting is cancelled."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _log_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("task %s ended with an error", task.get_name(), exc_info=error)


def is_cancelled() -> bool:
    """Return True if the running task itself is to end, and not something that it waited for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def keep_doing(
    action: Callable[[], Awaitable[float]],
    *,
    wake: asyncio.Event,
    name: str,
    gap_ms: float = 100.0,
    pause_after_error_ms: float = 1000.0,
) -> None:
    """Do something for ever: it says how many ms to pause before the next time, and ``wake`` ends the pause early.

    Wake-ups that arrive while the action runs lead to one more run; however many there are, runs that they cause begin
    ``gap_ms`` apart. An error is followed by a pause, and logged; the same one again only when it worked in between.
    """
    loop = asyncio.get_running_loop()
    last_error = ""
    while True:
        wake.clear()  # before the action: what happens while it runs is for the next run
        not_before = loop.time() + gap_ms / 1000.0
        try:
            pause_ms = await action()
            last_error = ""
        except (RmqError, OSError) as error:
            if last_error != str(error):
                _log.warning("%s: %s", name, error)
            last_error = str(error)
            pause_ms = pause_after_error_ms
        except Exception as error:  # noqa: BLE001 - the outer edge of a task: logged, and done again
            _log.error("%s failed", name, exc_info=error)
            pause_ms = pause_after_error_ms
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_ms / 1000.0):
                await wake.wait()
                # A flood of wake-ups must not become a flood of requests.
                await asyncio.sleep(max(0.0, not_before - loop.time()))


async def repeat(
    work: Callable[[], object], *, name: str, seconds: float, end: asyncio.Event, first_seconds: float | None = None
) -> None:
    """Call a function or coroutine function regularly, first after ``first_seconds``; ``end`` lets a round under way
    end. A round that fails is logged, and tried again next time; the same error again only when it worked in between.
    What the world refuses, such as a full disk, is one line; what may be a defect has its traceback.
    """
    pause_seconds = seconds if first_seconds is None else first_seconds
    last_error = ""
    while not end.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(end.wait(), pause_seconds)
            return  # it was set: no time-out
        pause_seconds = seconds
        try:
            done = work()
            if inspect.isawaitable(done):
                await done
            last_error = ""
        except Exception as error:  # noqa: BLE001 - the outer edge of a periodic task: logged once, tried again next time
            is_expected = isinstance(error, (RmqError, OSError))
            if last_error != repr(error):
                _log.error("%s: a round failed: %s", name, error, exc_info=None if is_expected else error)
            last_error = repr(error)


# CPU time of one slice of a request.
SLICE_SECONDS = 0.01
# CPU time of one slice of a periodic round, for which requests wait in each turn of the loop until the round is over.
ROUND_SLICE_SECONDS = 0.003


class Slice:
    """One stretch of work, of so many seconds of CPU time."""

    __slots__ = ("_seconds", "_until")

    def __init__(self, seconds: float = SLICE_SECONDS) -> None:
        self._seconds = seconds
        self._until = time.thread_time() + seconds

    @property
    def is_over(self) -> bool:
        """Return True if it is time to let the loop turn."""
        return time.thread_time() > self._until

    async def pause(self) -> None:
        """Let the loop turn; then a new slice begins."""
        await asyncio.sleep(0)
        self._until = time.thread_time() + self._seconds

    async def pause_if_over(self) -> None:
        """Let the loop turn if it is time."""
        if self.is_over:
            await self.pause()


class Turns:
    """Work without a task: each piece is an iterator whose steps are done, a slice at a time, in the order in which
    they came. ``on_error``: called with the error of a step that failed; its piece is over."""

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
        assert not self._is_working, "a piece that adds another one must not do it inside itself"
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
        except Exception as error:  # noqa: BLE001 - the outer edge of a piece: reported, and the others go on
            self._pieces.popleft()
            self._on_error(error)
