"""What an open broker is made of, as far as its handlers may touch it: never the broker itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rmqkit.broker.clients import ClientTable
from rmqkit.broker.durability import Durability
from rmqkit.broker.filters import FilterTable
from rmqkit.broker.groups import GroupTable
from rmqkit.broker.long_polling import LongPolling
from rmqkit.broker.offsets import OffsetTable
from rmqkit.broker.own_address import OwnAddress
from rmqkit.broker.queue_locks import QueueLocks
from rmqkit.broker.schedule import Schedule
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.statistics import Statistics
from rmqkit.broker.topics import TopicTable
from rmqkit.broker.transaction import OpMessages
from rmqkit.clock import Clock
from rmqkit.protocol.command import Command
from rmqkit.store.message_store import MessageStore
from rmqkit.store.settings import StoreSettings

__all__ = ["Parts"]


@dataclass(slots=True, kw_only=True)
class Parts:
    """The parts of one broker.

    Attributes:
        address: where clients reach it, as ``host:port``.
        durability: makes answers wait for the disk; None when the log is flushed behind the answers.
        ask_namesakes: asks every other broker of this name; the answers of those that succeed within a second.
        told: waits until the name servers know of the topics that were changed, or do not answer.
    """

    settings: BrokerSettings
    store_settings: StoreSettings
    address: str
    identity: OwnAddress
    clock: Clock
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
    told: Callable[[], Awaitable[None]]
    ask_namesakes: Callable[[Callable[[], Command]], Awaitable[list[Command]]]

    def persist(self) -> None:
        """Write every table."""
        for table in (self.topics, self.groups, self.offsets, self.filters):
            table.persist()
