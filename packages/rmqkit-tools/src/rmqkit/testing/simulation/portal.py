"""The portals of simulated processes: `rmqkit.client.runtime.process.portal` for programs that block.

A real portal is a thread with an event loop. A simulated process has one event loop, and its portal uses this loop:
threads of the process submit work and wait.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from rmqkit.testing.simulation.scheduler import Program, Scheduler
from rmqkit.testing.simulation.threads import Future, Lock

__all__ = ["Portal", "Portals"]

T = TypeVar("T")


class Portal:
    """The portal of one process."""

    is_from_parent = False

    def __init__(self, process: Program) -> None:
        self._process = process
        self._tasks: set[asyncio.Task[Any]] = set()

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Call a function on the loop and return its result.
        Raises RuntimeError: the caller runs on the loop, which would then wait for itself."""
        if self._process.world.actor is self._process.main:
            raise RuntimeError("a blocking client cannot be used on its own loop: use rmqkit's coroutines there")
        result: T = self.submit(work).result()
        return result

    def submit(self, work: Callable[[], Awaitable[T]]) -> Future:
        """Call a function on the loop and return the future of its result."""
        future = Future(self._process.world)
        self._process.loop.call_soon_threadsafe(self._begin, work, future)
        return future

    def close_at_exit(self, client: object) -> None:
        """Do nothing: the connections of a process close when it ends."""

    def _begin(self, work: Callable[[], Awaitable[T]], future: Future) -> None:
        task = self._process.loop.create_task(_awaited(work))
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._end, future))

    def _end(self, future: Future, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            future.set_result(task.result())
        else:
            future.set_exception(error)


class Portals:
    """The portals of a world, in place of the holder of a real process's portal."""

    def __init__(self, world: Scheduler) -> None:
        self._world = world
        self._by_number: dict[int, Portal] = {}
        self.lock = Lock(world)

    @property
    def portal(self) -> Portal:
        """The portal of the present process."""
        process = self._world.current_process
        assert process is not None, "a portal belongs to a simulated process"
        return self._by_number.setdefault(process.number, Portal(process))


def _awaited(work: Callable[[], Awaitable[T]]) -> Coroutine[Any, Any, T]:
    async def main() -> T:
        return await work()

    return main()
