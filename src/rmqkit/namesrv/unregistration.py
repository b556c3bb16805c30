"""The queue of brokers to forget (``BatchUnregistrationService``).

Good-byes, closed connections and silence all put departures here; one task takes all that wait at once, because
forgetting walks over every topic: a thousand brokers whose network broke cost one walk. The queue is bounded; what does
not fit is refused (a good-bye) or dropped (the others: the next scan finds them again). Source: behaviour.md §1.4.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rmqkit.namesrv.routes import Departure, MemberChange, RouteTable
from rmqkit.remoting.tasks import Tasks

__all__ = ["Unregistration"]

_log = logging.getLogger(__name__)


class Unregistration:
    """Takes departures in batches out of the route table; loop only.
    At most ``capacity`` wait; ``on_change`` is told of each group whose lowest id went away."""

    def __init__(self, routes: RouteTable, *, capacity: int, on_change: Callable[[MemberChange], None]) -> None:
        self._routes = routes
        self._on_change = on_change
        self._waiting: asyncio.Queue[Departure] = asyncio.Queue(capacity)
        self._tasks = Tasks()

    def submit(self, departure: Departure) -> bool:
        """Have a broker forgotten soon; False when the queue is full."""
        try:
            self._waiting.put_nowait(departure)
        except asyncio.QueueFull:
            _log.warning("%s at %s is not unregistered: the queue is full", departure.broker_name, departure.address)
            return False
        return True

    def start(self) -> None:
        self._tasks.start(self._run(), "unregistration")

    async def stop(self) -> None:
        """Take what still waits, and end."""
        await self._tasks.close()
        self._take(self._drained())

    async def _run(self) -> None:
        while True:
            first = await self._waiting.get()
            try:
                self._take([first, *self._drained()])
            except Exception:  # noqa: BLE001 - the task's outer edge: the next scan finds them again
                _log.exception("brokers are not unregistered")

    def _drained(self) -> list[Departure]:
        return [self._waiting.get_nowait() for _ in range(self._waiting.qsize())]

    def _take(self, batch: list[Departure]) -> None:
        for change in self._routes.unregister(batch):
            self._on_change(change)
