"""What running consumers tell and are told: resets 220 and 222, status 221 and 223, 307, 309.

Keys that are queues need the dialect: write with `fastjson.dumps`, read with `fastjson.decode_as`.
Source: remoting.md §6.4.11, §6.4.12.
"""

from __future__ import annotations

from msgspec import Struct, field

from rmqkit.protocol.bodies.clients import MessageQueue, SubscriptionData
from rmqkit.protocol.numbers import Int32, Int64


class ResetOffsetBody(Struct, rename="camel"):
    """Body of RESET_CONSUMER_CLIENT_OFFSET and answer to INVOKE_BROKER_TO_RESET_OFFSET: queue → new offset."""

    offset_table: dict[MessageQueue, Int64] = field(default_factory=dict)


class QueueOffset(Struct, rename="camel", kw_only=True, gc=False):
    """One entry of `ResetOffsetList`."""

    topic: str
    broker_name: str
    queue_id: Int32
    offset: Int64


class ResetOffsetList(Struct, rename="camel"):
    """`ResetOffsetBody` for clients that say they are written in C++ (``ResetOffsetBodyForC``)."""

    offset_table: list[QueueOffset] = field(default_factory=list)

    @classmethod
    def of(cls, body: ResetOffsetBody) -> ResetOffsetList:
        """The same offsets as a list."""
        return cls(
            [
                QueueOffset(topic=queue.topic, broker_name=queue.broker_name, queue_id=queue.queue_id, offset=offset)
                for queue, offset in body.offset_table.items()
            ]
        )


class ConsumerStatus(Struct, rename="camel"):
    """Committed offsets (``GetConsumerStatusBody``): of one client from 221, of client ids from 223."""

    message_queue_table: dict[MessageQueue, Int64] = field(default_factory=dict)
    consumer_table: dict[str, dict[MessageQueue, Int64]] = field(default_factory=dict)


class ProcessQueueInfo(Struct, rename="camel", kw_only=True, gc=False):
    """What a client holds of one queue; times in ms, ``droped`` is the reference's spelling."""

    commit_offset: Int64 = 0
    cached_msg_min_offset: Int64 = 0
    cached_msg_max_offset: Int64 = 0
    cached_msg_count: Int32 = 0
    cached_msg_size_in_mib: Int32 = field(default=0, name="cachedMsgSizeInMiB")
    transaction_msg_min_offset: Int64 = 0
    transaction_msg_max_offset: Int64 = 0
    transaction_msg_count: Int32 = 0
    locked: bool = False
    try_unlock_times: Int64 = 0
    last_lock_timestamp: Int64 = 0
    droped: bool = False
    last_pull_timestamp: Int64 = 0
    last_consume_timestamp: Int64 = 0


class PopProcessQueueInfo(Struct, rename="camel", kw_only=True, gc=False):
    """What a client holds of one queue it pops from."""

    wait_ack_count: Int32 = 0
    droped: bool = False
    last_pop_timestamp: Int64 = 0


class ConsumeStatus(Struct, kw_only=True, gc=False):
    """A topic's rates on one client: ``rt`` mean ms per call, ``tps`` messages per second."""

    pull_rt: float = field(default=0.0, name="pullRT")
    pull_tps: float = field(default=0.0, name="pullTPS")
    consume_rt: float = field(default=0.0, name="consumeRT")
    consume_ok_tps: float = field(default=0.0, name="consumeOKTPS")
    consume_failed_tps: float = field(default=0.0, name="consumeFailedTPS")
    consume_failed_msgs: Int64 = field(default=0, name="consumeFailedMsgs")


class ConsumerRunningInfo(Struct, rename="camel", kw_only=True):
    """Answer to GET_CONSUMER_RUNNING_INFO; names of ``properties`` are in remoting.md §6.4.12."""

    properties: dict[str, str] = field(default_factory=dict)
    subscription_set: list[SubscriptionData] = field(default_factory=list)
    mq_table: dict[MessageQueue, ProcessQueueInfo] = field(default_factory=dict)
    mq_pop_table: dict[MessageQueue, PopProcessQueueInfo] = field(default_factory=dict)
    status_table: dict[str, ConsumeStatus] = field(default_factory=dict)
    user_consumer_info: dict[str, str] = field(default_factory=dict)
    jstack: str | None = None


class ConsumeMessageDirectlyResult(Struct, rename="camel", kw_only=True, gc=False):
    """Answer to CONSUME_MESSAGE_DIRECTLY; ``consume_result`` is one of the ``CR_`` names of remoting.md §6.3."""

    order: bool = False
    auto_commit: bool = True
    consume_result: str | None = None
    remark: str | None = None
    spent_time_mills: Int64 = 0
