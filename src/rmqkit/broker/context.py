"""The state of an open broker, joined by `rmqkit.broker.server`; handlers never touch the broker itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rmqkit.broker.access.users import AccessTable
from rmqkit.broker.delay.levels import Schedule
from rmqkit.broker.delay.timer import Timer
from rmqkit.broker.durability import Durability
from rmqkit.broker.handlers import OwnAddress
from rmqkit.broker.pop.service import PopService
from rmqkit.broker.pull.long_polling import LongPolling
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.statistics import Statistics
from rmqkit.broker.tables.clients import ClientTable, QueueLocks
from rmqkit.broker.tables.filters import FilterTable
from rmqkit.broker.tables.groups import GroupTable
from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.broker.transaction.half import OpMessages
from rmqkit.clock import Clock
from rmqkit.protocol.command import Command
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
        counts: what counts for metrics; None while nobody is told them.
        may_serve: whether messages may be read from the log: not from a slave's that is not its master's.
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
    statistics: Statistics
    ops: OpMessages
    topics_published: Callable[[], Awaitable[None]]
    ask_namesakes: Callable[[Callable[[], Command]], Awaitable[list[Command]]]
    counts: Counts | None = None
    pop: PopService | None = None
    may_serve: Callable[[], bool] = lambda: True
    timer: Timer | None = None

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
            for table in (self.filters, self.offsets, self.groups, self.topics, self.pop):
                if table is not None:
                    stack.callback(table.persist)
