"""A program's own pulling, called for each queue it holds (``MQPullConsumerScheduleService``).

The group shares the queues as always; of each queue that is held here a task of the program is called over and over,
one call at a time. It pulls, consumes and commits; what it returns is the pause before the next call. Loop only.
Source: behaviour.md §8.1.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import cast

from msgspec import Struct

from rmqkit.client.consumer.process_queue import ProcessQueue
from rmqkit.protocol.bodies.clients import MessageQueue

__all__ = ["PullTask", "Schedule", "ScheduledPull", "scheduled_call"]

PullTask = Callable[[MessageQueue], "Awaitable[float | None] | float | None"]
"""Pulls from a queue: a coroutine function on the loop, a plain one in a thread; ms to the next call, None as usual."""

scheduled_call: contextvars.ContextVar[ProcessQueue | None] = contextvars.ContextVar("scheduled_call", default=None)
"""For which queue a task of the program is called here."""

_FINISH_SECONDS = 30.0

_log = logging.getLogger(__name__)


class Schedule(Struct):
    """What a topic's queues are to be called with, and the usual pause between two calls."""

    task: PullTask
    pause_ms: float


class ScheduledPull:
    """The calls for one queue."""

    def __init__(self, schedule: Schedule, process_queue: ProcessQueue, error_pause_ms: float) -> None:
        self._schedule = schedule
        self._process_queue = process_queue
        self._error_pause_ms = error_pause_ms

    async def run(self, pause_ms: float) -> None:
        """Call until the queue is dropped. When this is cancelled, the call under way has 30 s to finish."""
        queue = self._process_queue.queue
        while True:
            await asyncio.sleep(pause_ms / 1000.0)
            await self._process_queue.wait_until_resumed()
            if self._process_queue.is_dropped:
                return
            call = asyncio.create_task(self._call(queue), name=f"scheduled pull of {queue}")
            try:
                pause_ms = await asyncio.shield(call)
            except asyncio.CancelledError:
                await asyncio.wait([call], timeout=_FINISH_SECONDS)
                call.cancel()
                raise

    async def _call(self, queue: MessageQueue) -> float:
        scheduled_call.set(self._process_queue)
        task = self._schedule.task
        try:
            if inspect.iscoroutinefunction(task):
                pause_ms = await cast("Awaitable[float | None]", task(queue))
            else:
                pause_ms = cast("float | None", await asyncio.to_thread(task, queue))
        except Exception as error:  # noqa: BLE001 - the outer edge of a program's task: it is called again
            _log.warning("scheduled pull of %s failed", queue, exc_info=error)
            return self._error_pause_ms
        return self._schedule.pause_ms if pause_ms is None else pause_ms
