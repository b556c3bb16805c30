"""CONSUMER_SEND_MSG_BACK: a consumer could not handle a message and will consume it again (``consumerSendMsgBack``).

A copy goes to ``%RETRY%<group>`` after delay level ``3 + reconsumeTimes`` (or the requested level). After the group's
last try, or for level -1, the copy goes directly to ``%DLQ%<group>``. The consumer then treats the message as consumed.
So the answer waits until the copy is on the disk (SYNC_FLUSH) and at the slaves (SYNC_MASTER), although the copy itself
has WAIT=false. After a refusal the consumer stores a second copy, so slow slaves do not cause a refusal.
Source: behaviour.md §3.7; store.md §20; remoting.md §4.3.5, §10.5.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable

from rmqkit.broker.durability import CODES, Outcome
from rmqkit.broker.handlers import Handlers, answers
from rmqkit.broker.messages import changed, message_from, not_in_lite_topics
from rmqkit.broker.send.checks import SendContext, tries_max
from rmqkit.broker.transaction.half import record_at
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.codes import FAQ, RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_fields, decode_header_leniently, reply
from rmqkit.protocol.ids import offset_id
from rmqkit.protocol.names import dlq_topic, retry_topic
from rmqkit.protocol.record import TRANSACTION_COMMIT, TRANSACTION_MASK, Record
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.send import ConsumerSendBackRequest
from rmqkit.protocol.schemas.topics import Permission
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import OVERLOADED
from rmqkit.store.message_store import InnerMessage, PutStatus

__all__ = ["SendBackHandlers"]

_FIRST_LEVEL = 3


class SendBackHandlers(Handlers[SendContext]):
    """The handler of messages that consumers send back."""

    @answers(RequestCode.CONSUMER_SEND_MSG_BACK)
    def send_back(self, connection: Connection, command: Command) -> Command | Awaitable[Command]:
        """Store a copy of a message, which will be consumed again."""
        header = decode_header_leniently(command, ConsumerSendBackRequest)
        if self._context.durability is not None and self._context.durability.is_full:
            return reply(command, ResponseCode.SYSTEM_BUSY, OVERLOADED)
        group = self._context.groups.get(header.group)
        if group is None:
            remark = f"subscription group not exist, {header.group} {FAQ}"
            return reply(command, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark)
        if not self._context.settings.broker_permission & Permission.WRITE:
            remark = f"the broker[{self._context.identity.ip}] sending message is forbidden"
            return reply(command, ResponseCode.NO_PERMISSION, remark)
        # Like the reference, return SUCCESS without a copy: after a refusal the consumer would store a copy.
        if group.retry_queue_nums <= 0:
            return reply(command)
        retry = self._context.topics.ensure(
            retry_topic(header.group), group.retry_queue_nums, unit=bool(header.unit_mode)
        )
        if not retry.perm & Permission.WRITE:
            remark = f"the topic[{retry.topic_name}] sending message is forbidden"
            return reply(command, ResponseCode.NO_PERMISSION, remark)
        # The client may send any offset: store nothing if no valid record begins there.
        record = record_at(self._context.store, header.offset)
        if record is None:
            return reply(command, ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {header.offset}")
        return self._put(command, self._copy(command, header, group, record), record.topic, header.group)

    def _copy(
        self, command: Command, header: ConsumerSendBackRequest, group: SubscriptionGroupConfig, record: Record
    ) -> InnerMessage:
        """Return the copy of a message for the delay topic or for the dead letters."""
        level = header.delay_level
        is_given_up = level < 0 or record.reconsume_times >= tries_max(command, header.max_reconsume_times, group)
        if is_given_up:
            level = 0
            topic = self._context.topics.ensure(dlq_topic(header.group), 1).topic_name
            queue_id = 0
        else:
            level = level or _FIRST_LEVEL + record.reconsume_times
            topic, queue_id = retry_topic(header.group), random.randrange(group.retry_queue_nums)
        assert level >= 0, "the level of a copy is not negative"
        kept = message_from(
            record,
            topic=topic,
            queue_id=queue_id,
            reconsume_times=record.reconsume_times + 1,
            store_host=self._context.identity.store_host,
        )
        # Keep the id of the first delivery in all retries: applications recognize a message by it.
        first_id = offset_id(record.store_host, record.physical_offset)
        message = changed(
            kept,
            {
                # Keep the topic of the first delivery: Apache's consumers restore it for the listener.
                property_names.RETRY_TOPIC: kept.parsed.get(property_names.RETRY_TOPIC, record.topic),
                property_names.ORIGIN_MESSAGE_ID: kept.parsed.get(property_names.ORIGIN_MESSAGE_ID, "").strip()
                or first_id,
                property_names.DELAY: str(level),
                property_names.WAIT: "false",
                **not_in_lite_topics(kept.parsed),
            },
        )
        if level > 0 and message.sys_flag & TRANSACTION_MASK in (0, TRANSACTION_COMMIT):
            message = self._context.schedule.schedule(message, level)
        return message

    def _put(self, command: Command, message: InnerMessage, topic: str, group: str) -> Command | Awaitable[Command]:
        put = self._context.store.put(message)
        if put.status is not PutStatus.OK:
            return reply(command, ResponseCode.SYSTEM_ERROR, put.status.value)
        owner = decode_fields(command).get("Owner", "null")
        self._context.recorder.sent_back(message, put, topic=topic, group=group, owner=owner)
        # Wait regardless of WAIT: the consumer moves its offset past the message as soon as it has the answer.
        if self._context.durability is None or self._context.durability.has(put.end_offset):
            return reply(command)
        return _answer_when_durable(command, self._context.durability.wait(put.end_offset))


async def _answer_when_durable(command: Command, waiting: asyncio.Future[tuple[Outcome, str]]) -> Command:
    outcome, reason = await waiting
    if outcome in (Outcome.DURABLE, Outcome.REPLICA_TIMED_OUT):
        return reply(command)
    return reply(command, ResponseCode.SYSTEM_ERROR, reason or CODES[outcome].name)
