"""The tasks of a client: named, owned, cancelled and awaited by whoever started them. Source: style.md §11."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from rmqkit.errors import RmqError

__all__ = ["Tasks", "keep_doing"]

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

    async def close(self) -> None:
        """Cancel what still runs and wait for its end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("task %s ended with an error", task.get_name(), exc_info=error)


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
    ``gap_ms`` apart. An error is logged and followed by a pause.
    """
    loop = asyncio.get_running_loop()
    while True:
        wake.clear()
        not_before = loop.time() + gap_ms / 1000.0
        try:
            pause_ms = await action()
        except RmqError as error:
            _log.warning("%s: %s", name, error)
            pause_ms = pause_after_error_ms
        except Exception as error:  # noqa: BLE001 - the outer edge of a task: logged, and done again
            _log.error("%s failed", name, exc_info=error)
            pause_ms = pause_after_error_ms
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_ms / 1000.0):
                await wake.wait()
                await asyncio.sleep(max(0.0, not_before - loop.time()))
