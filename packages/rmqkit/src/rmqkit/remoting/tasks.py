"""Work on the event loop: tasks with an owner, periodic work, and long work in slices.

`Tasks` starts, names, cancels and awaits its tasks. `keep_doing` and `repeat` run periodic work.

A request must not block the loop for long. Work that grows with the size of a request checks `Slice.is_over` between
its steps, and returns control to the loop when the slice is over. A slice is measured in CPU time of the loop's thread,
so that a slice contains the same amount of work on a busy machine. Use this module only on the event loop.
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
    """A set of running tasks with one owner. Use it only on the event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a coroutine until it returns or `close` cancels it. Log its error."""
        task = self.own(work, name)
        task.add_done_callback(_log_error)
        return task

    def own(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run a coroutine until it returns or `close` cancels it. The caller must await the task and handle its
        error."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)  # the loop holds only weak references to tasks
        task.add_done_callback(self._tasks.discard)
        return task

    def __len__(self) -> int:
        return len(self._tasks)

    async def finish(self) -> None:
        """Wait until all running tasks are done. If the wait is cancelled, the tasks continue."""
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
    """Return True if the current task itself was cancelled, and not only an object that it awaits."""
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
    """Repeat an action for ever. The action returns the pause until its next run in ms; ``wake`` ends the pause early.

    If ``wake`` is set while the action runs, the action runs again. Runs after wake-ups begin at least ``gap_ms``
    apart. An error is logged and followed by a pause. The same error is logged again only after a successful run.
    """
    loop = asyncio.get_running_loop()
    last_error = ""
    while True:
        wake.clear()  # before the action, so that a wake-up during the action causes another run
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
    """Call a function or coroutine function regularly, first after ``first_seconds``, until ``end`` is set.

    An error is logged, and the next call follows as usual. The same error is logged again only after a successful call.
    An expected error, such as a full disk, is logged in one line; other errors have a traceback.
    """
    pause_seconds = seconds if first_seconds is None else first_seconds
    last_error = ""
    while not end.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_seconds):
                await end.wait()
            return
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


# The CPU time of a slice of a request.
SLICE_SECONDS = 0.01
# The CPU time of a slice of periodic work. It is shorter, because requests wait for a slice in each tick.
ROUND_SLICE_SECONDS = 0.003


class Slice:
    """A time slice of work, in CPU seconds of the current thread."""

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
    """A queue of pieces of work, without tasks. Each piece is an iterator. The loop executes the steps of one piece
    after the other, in slices. ``on_error``: called with the error of a failed step, which ends its piece."""

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_error = on_error
        self._pieces: deque[Iterator[object]] = deque()
        self._is_working = False

    def __len__(self) -> int:
        """Return the number of unfinished pieces."""
        return len(self._pieces)

    def add(self, piece: Iterator[object]) -> None:
        """Add a piece of work. If no other piece waits, execute its first slice immediately."""
        self._pieces.append(piece)
        if len(self._pieces) == 1 and not self._is_working:
            self._work()

    def finish(self) -> None:
        """Execute all remaining steps now. Servers call this method at their shutdown."""
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
