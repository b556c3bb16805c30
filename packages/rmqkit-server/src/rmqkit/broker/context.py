"""The state of an open broker, joined by `rmqkit.broker.assembly`, and the order in which it stops.

Handlers never touch the broker itself; each room names the parts of the `BrokerContext` that it may touch.

Each part registers its stop as soon as it has started, under the stage to which it belongs. So a start that fails
halfway stops everything that it has started. A stop goes through the stages in this order, and through the parts of a
stage in the reverse order of their start:

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
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import TYPE_CHECKING

from rmqkit.broker.access.users import AccessTable
from rmqkit.broker.archive import LogArchive
from rmqkit.broker.delay.levels import Schedule
from rmqkit.broker.delay.timer import Timer
from rmqkit.broker.durability import Durability
from rmqkit.broker.handlers import OwnAddress
from rmqkit.broker.older import OlderMessages
from rmqkit.broker.pop.service import PopService
from rmqkit.broker.pull.long_polling import LongPolling
from rmqkit.broker.recorder import Recorder
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.statistics import Statistics
from rmqkit.broker.tables.clients import ClientTable, QueueLocks
from rmqkit.broker.tables.filters import FilterTable
from rmqkit.broker.tables.groups import GroupTable
from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.broker.transaction.half import OpMessages
from rmqkit.broker.transaction.open import OpenTransactions
from rmqkit.clock import Clock
from rmqkit.protocol.command import Command
from rmqkit.remoting.tasks import repeat
from rmqkit.settings import Configuration
from rmqkit.store.message_store import MessageStore
from rmqkit.store.settings import StoreSettings

if TYPE_CHECKING:
    from rmqkit.broker.counts import Counts


@dataclass(slots=True, kw_only=True)
class BrokerContext:
    """The state of one broker; each room names what of it it may touch in a Protocol of its own.

    Attributes:
        configuration: all settings together, as operators see them.
        address: where clients reach it, as ``host:port``.
        durability: makes answers wait for the disk; None when the log is flushed behind the answers.
        counts: what counts for metrics; None without an exporter.
        may_serve: whether messages may be read from the log: not from a slave's that is not its master's.
        archive: where old files of the log are; None without one.
        ask_namesakes: asks every other broker of this name; the answers of those that succeed within a second.
        pop: what POP keeps; None at a slave, which does not pop.
        timer: keeps messages until their second; None with ``timerWheelEnable=false``.
        topics_published: waits until the name servers know of the topics that were changed, or do not answer.
    """

    settings: BrokerSettings
    store_settings: StoreSettings
    configuration: Configuration
    address: str
    identity: OwnAddress
    clock: Clock
    access: AccessTable
    store: MessageStore
    topics: TopicTable
    groups: GroupTable
    offsets: OffsetTable
    clients: ClientTable
    filters: FilterTable
    long_polling: LongPolling
    durability: Durability | None
    queue_locks: QueueLocks
    schedule: Schedule
    recorder: Recorder
    statistics: Statistics
    ops: OpMessages
    transactions: OpenTransactions
    topics_published: Callable[[], Awaitable[None]]
    ask_namesakes: Callable[[Callable[[], Command]], Awaitable[list[Command]]]
    counts: Counts | None = None
    pop: PopService | None = None
    may_serve: Callable[[], bool] = lambda: True
    timer: Timer | None = None
    archive: LogArchive | None = None

    @property
    def older(self) -> OlderMessages | None:
        """The messages that the log has deleted and that can be fetched."""
        return self.archive

    def min_offset(self, topic: str, queue_id: int) -> int:
        """The first message of a queue that can be pulled: of the log, or of its archive as far as that is known."""
        return (self.older or self.store).min_offset(topic, queue_id)

    def first_offset(self, topic: str, queue_id: int) -> int:
        """`min_offset`, for those who begin there. Raises PeerRefused: the archive is not known yet."""
        older = self.older
        return self.store.min_offset(topic, queue_id) if older is None else older.first_offset(topic, queue_id)

    def persist_delivered(self) -> None:
        """Note what was delivered, behind a store that was closed in order."""
        try:
            self.schedule.persist()
        finally:
            if self.timer is not None:
                self.timer.persist()

    def persist(self) -> None:
        """Write all tables; one that the disk refuses keeps no other from it. Raises StoreUnavailable."""
        with ExitStack() as stack:
            # Called from the last to the first: POP commits the offsets of its revive group, so the offsets are written
            # after it.
            for table in (self.filters, self.offsets, self.groups, self.topics, self.pop):
                if table is not None:
                    stack.callback(table.persist)


# A function or a coroutine function.
Work = Callable[[], object]


class Stage(IntEnum):
    """The stage in which a part of the broker is stopped; lower stages come first."""

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
    """The started parts of the broker, and how each is stopped; loop only."""

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
