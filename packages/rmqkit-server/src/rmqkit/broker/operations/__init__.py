"""Requests of tools to a broker (``AdminBrokerProcessor``, ``ClientManageProcessor``)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from rmqkit.broker.delay.levels import Schedule
from rmqkit.broker.delay.timer import Timer
from rmqkit.broker.durability import Durability
from rmqkit.broker.lite.service import LiteService
from rmqkit.broker.older import OlderMessages
from rmqkit.broker.pop.service import PopService
from rmqkit.broker.pull.long_polling import LongPolling
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.statistics import Statistics
from rmqkit.broker.tables.clients import ClientTable, QueueLocks
from rmqkit.broker.tables.groups import GroupTable
from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.clock import Clock
from rmqkit.protocol.command import Command
from rmqkit.settings import Configuration
from rmqkit.store.message_store import MessageStore
from rmqkit.store.settings import StoreSettings


class OperationsContext(Protocol):
    """The parts of the broker that requests of tools use."""

    address: str

    @property
    def ask_namesakes(self) -> Callable[[Callable[[], Command]], Awaitable[list[Command]]]: ...

    clients: ClientTable
    clock: Clock
    configuration: Configuration

    def first_offset(self, topic: str, queue_id: int) -> int: ...
    def min_offset(self, topic: str, queue_id: int) -> int: ...

    @property
    def older(self) -> OlderMessages | None: ...

    durability: Durability | None
    groups: GroupTable
    lite: LiteService | None
    long_polling: LongPolling
    offsets: OffsetTable
    pop: PopService | None
    queue_locks: QueueLocks
    schedule: Schedule
    settings: BrokerSettings
    statistics: Statistics
    store: MessageStore
    store_settings: StoreSettings
    timer: Timer | None
    topics: TopicTable

    @property
    def topics_published(self) -> Callable[[], Awaitable[None]]: ...
