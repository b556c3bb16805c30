"""Work on the event loop: tasks with an owner, periodic work, and long work that is cut into slices.

A `Tasks` starts, names, cancels and awaits its tasks; `keep_doing` and `repeat` run periodic work.

No request may block the loop for long. Work that grows with the size of a request checks `Slice.is_over` between two
steps, and gives up control if it is True. A slice is measured in CPU time of the loop's thread, so it is not shorter on
a busy machine. Loop only.
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
        """Run a coroutine until it ends or `close` cancels it. Log its error."""
        task = self.own(work, name)
        task.add_done_callback(_log_error)
        return task

    def own(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run a coroutine until it ends or `close` cancels it. The caller awaits the task and gets its error."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)  # the loop holds only weak references to tasks
        task.add_done_callback(self._tasks.discard)
        return task

    def __len__(self) -> int:
        return len(self._tasks)

    async def finish(self) -> None:
        """Wait until all running tasks have ended; they continue if the wait is cancelled."""
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
    """Return True if the running task itself was cancelled, and not only something that the task awaits."""
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
    """Repeat an action for ever: it returns the ms to the next run, and ``wake`` ends this pause early.

    Wake-ups that arrive while the action runs lead to one more run. Runs after wake-ups begin at least ``gap_ms``
    apart. An error is logged and followed by a pause; the same error is logged again only after the action has worked.
    """
    loop = asyncio.get_running_loop()
    last_error = ""
    while True:
        wake.clear()  # before the action: a wake-up while it runs is for the next run
        not_before = loop.time() + gap_ms / 1000.0
        try:
            pause_ms = await action()
            last_error = ""
        except (RmqError, OSError) as error:
            if last_error != str(error):
                _log.warning("%s: %s", name, error)
            last_error = str(error)
            pause_ms = pause_after_error_ms
        except Exception as error:  # noqa: BLE001 - the outer edge of a task: logged, then repeated
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
    """Call a function or coroutine function regularly, first after ``first_seconds``; ``end`` stops it after the
    running call. An error is logged, and the next call follows as usual; the same error is logged again only after a
    call that worked. Expected errors, such as a full disk, take one line; others have a traceback.
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
# CPU time of one slice of periodic work, during which requests wait in each tick.
ROUND_SLICE_SECONDS = 0.003


class Slice:
    """A time slice of some work, measured in CPU seconds."""

    __slots__ = ("_seconds", "_until")

    def __init__(self, seconds: float = SLICE_SECONDS) -> None:
        self._seconds = seconds
        self._until = time.thread_time() + seconds

    @property
    def is_over(self) -> bool:
        """Return True if the slice has used up its time."""
        return time.thread_time() > self._until

    async def pause(self) -> None:
        """Let other callbacks of the loop run, then begin a new slice."""
        await asyncio.sleep(0)
        self._until = time.thread_time() + self._seconds

    async def pause_if_over(self) -> None:
        """Call `pause` if the slice has used up its time."""
        if self.is_over:
            await self.pause()


class Turns:
    """A queue of work without tasks: each piece is an iterator, and its steps are executed in slices, one piece after
    the other. ``on_error``: called with the error of a failed step; this ends its piece."""

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_error = on_error
        self._pieces: deque[Iterator[object]] = deque()
        self._is_working = False

    def __len__(self) -> int:
        """Return the number of unfinished pieces."""
        return len(self._pieces)

    def add(self, piece: Iterator[object]) -> None:
        """Add a piece of work. If no other piece waits, execute a first slice of this one at once."""
        self._pieces.append(piece)
        if len(self._pieces) == 1 and not self._is_working:
            self._work()

    def finish(self) -> None:
        """Execute all remaining steps now, for the shutdown."""
        while self._pieces:
            self._step()

    def _work(self) -> None:
        assert not self._is_working, "a piece that adds another one does not execute it"
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
        except Exception as error:  # noqa: BLE001 - the outer edge of a piece: reported, the others continue
            self._pieces.popleft()
            self._on_error(error)
