"""The order in which a broker stops what it had started, however far its start came.

Whatever starts registers at once how it is stopped, under the stage it belongs to. A stop goes through the stages in
this order, and within a stage from what started last to what started first:

===============  ======================================================================================================
stage            what is stopped
===============  ======================================================================================================
`ROUNDS`         periodic work; a round under way ends first
`SERVICES`       what delivers by itself: delay levels, timer, POP; at a slave what follows its master
`REGISTRATION`   the name servers hear that the broker leaves
`CLIENTS`        clients are given time to go, held requests are answered, connections to other servers close
`PORTS`          ports and their connections close: nothing is acknowledged after this
`REPLICATION`    the HA port closes: slaves were offered everything that was acknowledged
`TABLES`         topics, groups, offsets and filters are written
`OP_MESSAGES`    what became of half messages is put into the log
`STORE`          the store closes; the log is not written any more
`DELIVERED`      how far delay levels and timer delivered is noted, as the copies before it are on the disk now
===============  ======================================================================================================

Source: behaviour.md §2.2.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import AsyncExitStack
from enum import IntEnum, auto

from rmqkit.remoting.tasks import repeat

# A function or a coroutine function.
Work = Callable[[], object]


class Stage(IntEnum):
    """When something is stopped; lower ones come first."""

    ROUNDS = auto()
    SERVICES = auto()
    REGISTRATION = auto()
    CLIENTS = auto()
    PORTS = auto()
    REPLICATION = auto()
    TABLES = auto()
    OP_MESSAGES = auto()
    STORE = auto()
    DELIVERED = auto()


class Lifecycle:
    """What has been started, and how it is stopped; loop only."""

    def __init__(self) -> None:
        self._stacks = {stage: AsyncExitStack() for stage in Stage}
        self._failures: list[Exception] = []

    def on_stop(self, stage: Stage, stop: Work) -> None:
        """Have something called when a stage stops."""
        # At once behind the start of what it stops: a start that fails further on is undone by the same list.
        self._stacks[stage].push_async_callback(self._stop, stop)

    def every(self, seconds: float, work: Work, name: str, first_seconds: float | None = None) -> None:
        """Do some work regularly, first after ``first_seconds``; a stop lets a round under way end."""
        stopping = asyncio.Event()
        working = repeat(work, name=name, seconds=seconds, end=stopping, first_seconds=first_seconds)
        task = asyncio.create_task(working, name=name)

        async def stop() -> None:
            # Not cancelled: a round that writes a table ends, or its temporary file would stay.
            stopping.set()
            await task

        self.on_stop(Stage.ROUNDS, stop)

    async def stop(self) -> None:
        """Stop everything in order. A step that fails does not keep the others from being done; then the first of the
        failures is raised."""
        for stage in Stage:
            await self._stacks[stage].aclose()
        if self._failures:
            failures, self._failures = self._failures, []
            raise failures[0]

    async def _stop(self, stop: Work) -> None:
        try:
            done = stop()
            if inspect.isawaitable(done):
                await done
        except Exception as error:  # noqa: BLE001 - every step has its turn; the first failure is raised at the end
            self._failures.append(error)
