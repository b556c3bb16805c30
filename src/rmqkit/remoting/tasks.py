"""Tasks: named, owned, cancelled and awaited by whoever started them. Source: style.md §11."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from rmqkit.errors import RmqError

_log = logging.getLogger(__name__)


class Tasks:
    """A set of running tasks with one owner; loop only."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a coroutine until it ends or `close`."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
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

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("task %s ended with an error", task.get_name(), exc_info=error)


def is_cancelled() -> bool:
    """Whether the running task itself is to end, and not something that it waited for."""
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
    told = ""
    while True:
        wake.clear()
        not_before = loop.time() + gap_ms / 1000.0
        try:
            pause_ms = await action()
            told = ""
        except (RmqError, OSError) as error:
            if told != str(error):
                _log.warning("%s: %s", name, error)
            told = str(error)
            pause_ms = pause_after_error_ms
        except Exception as error:  # noqa: BLE001 - the outer edge of a task: logged, and done again
            _log.error("%s failed", name, exc_info=error)
            pause_ms = pause_after_error_ms
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_ms / 1000.0):
                await wake.wait()
                await asyncio.sleep(max(0.0, not_before - loop.time()))


async def repeat(
    work: Callable[[], object], *, name: str, seconds: float, end: asyncio.Event, first_seconds: float | None = None
) -> None:
    """Call a function or coroutine function regularly, first after ``first_seconds``; ``end`` lets a round under way
    end. A round that fails is logged, and tried again next time; the same error again only when it worked in between.
    What the world refuses, such as a full disk, is one line; what may be a defect has its traceback.
    """
    pause_seconds = seconds if first_seconds is None else first_seconds
    told = ""
    while not end.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(end.wait(), pause_seconds)
            return
        pause_seconds = seconds
        try:
            done = work()
            if inspect.isawaitable(done):
                await done
            told = ""
        except Exception as error:  # noqa: BLE001 - the outer edge of a periodic task: told once, tried again next time
            is_expected = isinstance(error, (RmqError, OSError))
            if told != repr(error):
                _log.error("%s: a round failed: %s", name, error, exc_info=None if is_expected else error)
            told = repr(error)
