"""The state of an open broker, which `rmqkit.broker.assembly` makes, and the order in which the broker stops.

Handlers never use the broker itself. Each room has a Protocol with the parts of the `BrokerContext` that it uses.

Each part registers its stop in a stage as soon as the part has started. So a start that fails halfway stops all parts
that it has started. A stop runs the stages in this order, and the parts of a stage in the reverse order of their start:

===============  ======================================================================================================
stage            action
===============  ======================================================================================================
`ROUNDS`         periodic work stops after its current run
`SERVICES`       delay levels, timer and POP stop at a master; replication stops at a slave
`REGISTRATION`   the broker unregisters from the name servers
`CLIENTS`        clients get time to leave, held requests are answered, connections to other servers close
`PORTS`          ports and their connections close: nothing is acknowledged after this
`REPLICATION`    the HA port closes: all acknowledged data was offered to slaves
`TABLES`         topics, groups, offsets and filters are written
`OP_MESSAGES`    collected op messages are stored
`STORE`          the store closes. The log is not written after this
`DELIVERED`      the progress of delay levels and timer is written: all delivered copies are on the disk now
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
from rmqkit.broker.lite.service import LiteService
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
    """The state of one broker. Each room has a Protocol with the parts that it uses.

    Attributes:
        configuration: all settings together, for operators.
        address: the address for clients, as ``host:port``.
        durability: the queue of answers that wait for disk and slaves; None if no answer has to wait.
        counts: the counters for metrics; None without an exporter.
        may_serve: returns True if messages can be read from the log; False at a slave if its log may have diverged.
        archive: the archive of old log files, or None.
        ask_namesakes: sends a request to every other broker of this name. Returns the successful answers that arrive
            within a second.
        lite: the lite topics. A slave does not serve them.
        pop: the state of POP; None at a slave, which does not pop.
        timer: stores messages until they are due; None with ``timerWheelEnable=false``.
        topics_published: waits until the name servers know the changed topics, or until a timeout.
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
    lite: LiteService | None = None

    @property
    def older(self) -> OlderMessages | None:
        """The storage that still has the messages that were deleted from the log, or None."""
        return self.archive

    def min_offset(self, topic: str, queue_id: int) -> int:
        """Return the offset of the first message of a queue that can be pulled, from the log or the known archive."""
        return (self.older or self.store).min_offset(topic, queue_id)

    def first_offset(self, topic: str, queue_id: int) -> int:
        """Return `min_offset` for a group that begins at the first message. Raises PeerRefused: the archive is not
        known yet."""
        older = self.older
        return self.store.min_offset(topic, queue_id) if older is None else older.first_offset(topic, queue_id)

    def persist_delivered(self) -> None:
        """Write the progress of delay levels and timer. The store is already closed."""
        try:
            self.schedule.persist()
        finally:
            if self.timer is not None:
                self.timer.persist()

    def persist(self) -> None:
        """Write all tables, even if the disk refuses some tables. Raises StoreUnavailable: the disk refused."""
        with ExitStack() as stack:
            # The stack calls the last callback first: POP commits the offsets of its revive group, and the offset table
            # is written after it.
            for table in (self.filters, self.offsets, self.groups, self.topics, self.pop):
                if table is not None:
                    stack.callback(table.persist)
            if self.lite is not None:
                stack.callback(self.lite.save)


# A function or a coroutine function without arguments.
Work = Callable[[], object]


class Stage(IntEnum):
    """The stage in which a part of the broker is stopped. Lower stages are first."""

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
    """The functions that stop the started parts of the broker. Use it only on the event loop."""

    def __init__(self) -> None:
        self._stacks = {stage: AsyncExitStack() for stage in Stage}
        self._failures: list[Exception] = []

    def on_stop(self, stage: Stage, stop: Work) -> None:
        """Register a function that is called when a stage stops. The caller registers it right after the start of the
        part. Then the part is also stopped if the start of a later part fails."""
        self._stacks[stage].push_async_callback(self._stop, stop)

    def every(self, seconds: float, work: Work, name: str, first_seconds: float | None = None) -> None:
        """Call ``work`` periodically, the first time after ``first_seconds``. A stop waits for a running call."""
        stopping = asyncio.Event()
        working = repeat(work, name=name, seconds=seconds, end=stopping, first_seconds=first_seconds)
        task = asyncio.create_task(working, name=name)

        async def stop() -> None:
            # Do not cancel the task: a call that writes a table would leave its temporary file.
            stopping.set()
            await task

        self.on_stop(Stage.ROUNDS, stop)

    async def stop(self) -> None:
        """Stop all parts in order. If steps fail, run the remaining steps and raise the first failure at the end."""
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
        except Exception as error:  # noqa: BLE001 - every step runs; the first failure is raised at the end
            self._failures.append(error)
