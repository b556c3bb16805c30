"""What replication may touch."""

from __future__ import annotations

from typing import Protocol

from rmqkit.broker.delay.levels import Schedule
from rmqkit.broker.delay.timer import Timer
from rmqkit.broker.pull.long_polling import LongPolling
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.tables.groups import GroupTable
from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.broker.transaction.half import TransactionContext
from rmqkit.clock import Clock
from rmqkit.store.message_store import MessageStore


class ReplicationContext(TransactionContext, Protocol):
    """What replication may touch."""

    address: str
    clock: Clock
    groups: GroupTable
    long_polling: LongPolling
    offsets: OffsetTable
    schedule: Schedule
    settings: BrokerSettings
    store: MessageStore
    timer: Timer | None
    topics: TopicTable
