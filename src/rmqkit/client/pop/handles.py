"""The handles of popped messages (POP_CK): from a pop's answer to what acks name. Pure.

A broker that rewrites messages of retry topics gives them their handles itself; of all others the answer tells in its
strings where each queue's messages start. Source: behaviour.md §4.7, remoting.md §4.6.1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from rmqkit.errors import ClientError
from rmqkit.protocol import properties as names
from rmqkit.protocol.bodies.clients import MessageQueue
from rmqkit.protocol.bodies.pop import BatchAck
from rmqkit.protocol.headers.pop import PopMessageResponse
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.names import RETRY_PREFIX, pop_retry_topic, with_namespace
from rmqkit.protocol.pop import (
    NORMAL_TOPIC,
    RETRY_TOPIC_V1,
    RETRY_TOPIC_V2,
    OrderKey,
    PopHandle,
    PopQueue,
    decode_order_counts,
    decode_pop_handle,
    decode_start_offsets,
    encode_acked,
    encode_pop_handle,
)

__all__ = ["Receipt", "batch_acks", "give_handles", "receipt_of"]

_SEPARATORS = {RETRY_TOPIC_V1: "_", RETRY_TOPIC_V2: "+"}


class Receipt(Struct, frozen=True):
    """A popped message as acks and changes name it, whatever becomes of the message: its own topic and its handle."""

    topic: str
    handle: PopHandle

    @property
    def queue_offset(self) -> int:
        """Of the message in the queue that it was popped from."""
        assert self.handle.queue_offset is not None, "`receipt_of` completes handles"
        return self.handle.queue_offset

    def real_topic(self, group: str, namespace: str) -> str:
        """The topic that it was popped from: its own, or where the group's come again; without a namespace before."""
        separator = _SEPARATORS.get(self.handle.retry)
        if separator is None:
            return self.topic
        return pop_retry_topic(group, with_namespace(namespace, self.topic), separator)


def receipt_of(message: ReceivedMessage) -> Receipt:
    """What acks name a message by. Raises ClientError: it was not popped. Raises HeaderError: its handle is damaged."""
    text = message.properties.get(names.POP_CHECK_POINT)
    if text is None:
        raise ClientError(f"message {message.msg_id} has no property {names.POP_CHECK_POINT}: it was not popped")
    handle = decode_pop_handle(text)
    if handle.queue_offset is None:
        handle = replace(handle, queue_offset=message.queue_offset)
    return Receipt(message.topic, handle)


def give_handles(messages: list[ReceivedMessage], header: PopMessageResponse, queue: MessageQueue) -> None:
    """Complete popped messages: their handles, unless the broker gave them, deliveries in order, and the topic that was
    asked for. Raises HeaderError: the answer's strings cannot be read."""
    starts = decode_start_offsets(header.start_offset_info or "")
    counts = decode_order_counts(header.order_count_info or "")
    for message in messages:
        retry, queue_id, offset = _retry_mark(message.topic), message.queue_id, message.queue_offset
        if names.POP_CHECK_POINT not in message.properties:
            handle = PopHandle(
                check_point_offset=starts.setdefault(PopQueue(retry, queue_id), offset),
                pop_time=header.pop_time,
                invisible_time=header.invisible_time,
                revive_queue_id=header.revive_qid,
                retry=retry,
                broker_name=queue.broker_name,
                queue_id=queue_id,
                queue_offset=offset,
            )
            message.properties[names.POP_CHECK_POINT] = encode_pop_handle(handle)
        else:
            receipt_of(message)  # the broker's own: an answer with others is refused as a whole
        count = counts.get(OrderKey(retry, queue_id, offset)) or counts.get(OrderKey(retry, queue_id)) or 0
        message.reconsume_times = count or message.reconsume_times
        message.properties.setdefault(names.FIRST_POP_TIME, str(header.pop_time))
        message.properties.pop(names.CONSUME_START_TIME, None)  # somebody else's
        message.topic = queue.topic


def batch_acks(group: str, receipts: Iterable[Receipt]) -> list[BatchAck]:
    """Acks of one broker, those of one pop and queue in one entry."""
    offsets: defaultdict[Receipt, list[int]] = defaultdict(list)
    for one in receipts:
        offsets[replace(one, handle=replace(one.handle, queue_offset=None))].append(one.queue_offset)
    return [
        BatchAck(
            group=group,
            topic=pop.topic,
            retry=pop.handle.retry,
            start_offset=pop.handle.check_point_offset,
            queue_id=pop.handle.queue_id,
            revive_queue_id=pop.handle.revive_queue_id,
            pop_time=pop.handle.pop_time,
            invisible_time=pop.handle.invisible_time,
            acked=encode_acked(pop.handle.check_point_offset, those),
        )
        for pop, those in offsets.items()
    ]


def _retry_mark(topic: str) -> str:
    if not topic.startswith(RETRY_PREFIX):
        return NORMAL_TOPIC
    return RETRY_TOPIC_V2 if "+" in topic else RETRY_TOPIC_V1
