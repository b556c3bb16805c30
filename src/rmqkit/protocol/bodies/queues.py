"""Locks on queues 41 and 42, offsets of groups 43 and 308 and of delay levels 45, consume queue entries 321.

Maps with integer keys are written bare by `fastjson.dumps`. Source: remoting.md §4.4, §6.4.5, §6.4.7, §6.4.13.
"""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType, field

from rmqkit.protocol.bodies.clients import MessageQueue, SubscriptionData
from rmqkit.protocol.bodies.topics import DataVersion
from rmqkit.protocol.numbers import Int32, Int64


class LockBody(Struct, kw_only=True):
    """Body of LOCK_BATCH_MQ and UNLOCK_BATCH_MQ."""

    client_id: str = field(name="clientId")
    consumer_group: str = field(name="consumerGroup")
    queues: list[MessageQueue] = field(default_factory=list, name="mqSet")
    only_this_broker: bool = field(default=False, name="onlyThisBroker")


class LockedQueues(Struct):
    """Answer to LOCK_BATCH_MQ: what the client holds now."""

    queues: list[MessageQueue] = field(default_factory=list, name="lockOKMQSet")


class ConsumerOffsets(Struct, rename="camel"):
    """Answer to GET_ALL_CONSUMER_OFFSET: ``topic@group`` → queue id → offset; 4.x sends the table alone."""

    data_version: DataVersion | UnsetType = UNSET
    group_topic_map: dict[str, list[str]] | UnsetType = UNSET
    offset_table: dict[str, dict[Int32, Int64]] = field(default_factory=dict)


class LightOffsets(ConsumerOffsets, rename="camel"):
    """``lmqConsumerOffset.json``: beside the others, ``topic@group`` → offset for groups ``%LMQ%…``."""

    lmq_offset_table: dict[str, Int64] = field(default_factory=dict)


class DelayOffsets(Struct, rename="camel"):
    """Answer to GET_ALL_DELAY_OFFSET: delay level → offset; 4.x sends the table alone."""

    data_version: DataVersion | UnsetType = UNSET
    offset_table: dict[Int32, Int64] = field(default_factory=dict)


class CorrectionOffsets(Struct, rename="camel"):
    """Answer to QUERY_CORRECTION_OFFSET: queue id → offset."""

    correction_offsets: dict[Int32, Int64] = field(default_factory=dict)


class ConsumeQueueEntry(Struct, rename="camel", kw_only=True):
    """One entry; ``eval`` is what the group's filter says to it, ``msg`` why not."""

    physic_offset: Int64
    physic_size: Int32
    tags_code: Int64
    eval: bool = False
    extend_data_json: str | None = None
    bit_map: str | None = None
    msg: str | None = None


class QueryConsumeQueueBody(Struct, rename="camel", kw_only=True):
    """Answer to QUERY_CONSUME_QUEUE."""

    subscription_data: SubscriptionData | None = None
    filter_data: str | None = None
    queue_data: list[ConsumeQueueEntry] = field(default_factory=list)
    max_queue_index: Int64 = 0
    min_queue_index: Int64 = 0
