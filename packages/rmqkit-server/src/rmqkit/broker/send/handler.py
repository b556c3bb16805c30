"""SEND_MESSAGE, SEND_MESSAGE_V2, SEND_BATCH_MESSAGE (``SendMessageProcessor``).

The broker adds CLUSTER, MSG_REGION and TRACE_ON to the producer's properties, except to the messages of a batch. A
message with a delay level goes to the delay topic, a message with a delivery time to the timer topic, and a message
with too many retries to the dead letters of its group. With SYNC_FLUSH the answer waits until the message is on the
disk, and with SYNC_MASTER until it is at the slaves.

The plain sends of one read of a connection are stored with one write to the log (`FastPath`). A single send
(`SendHandlers`) passes the same steps. A test compares both:

==============================  =======================================  ==========================================
from                            by                                       to
==============================  =======================================  ==========================================
frames                          `SendsReader.read` · `SendHandlers.send` `Sends`, and frames that are not plain sends ·
                                                                         `InnerMessage`
`Sends` · `InnerMessage`        ``put_sends`` · ``put`` of the store     record bytes, queue entry, index keys
`Sends` · `PutResult`           `Sends.answers` · `reply`                the frame of the answer
==============================  =======================================  ==========================================

Source: behaviour.md §3.1 to §3.6; remoting.md §4.3.1.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from rmqkit.broker.delay.timer import schedule_timed
from rmqkit.broker.durability import CODES, NOT_ENOUGH_REPLICAS, Outcome, Refusal, put_refusal
from rmqkit.broker.handlers import Handlers, answers, by_global_number, when_published
from rmqkit.broker.messages import TIMER_NAMES, changed, is_half, to_dead_letters, to_half, to_priority
from rmqkit.broker.send.checks import (
    NO_BODY,
    SCHEDULED,
    SendChecks,
    SendContext,
    decode_v1,
    decode_v2,
    stamps_of,
    tries_max,
)
from rmqkit.broker.send.fast_path import FastPath
from rmqkit.broker.send.lite import in_lite_topic, lite_members, lite_refusal
from rmqkit.broker.send.long_batch import LongBatches, StoredBatch
from rmqkit.errors import PeerRefused
from rmqkit.protocol import names
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.codes import FAQ, RequestCode, ResponseCode
from rmqkit.protocol.command import Command, header_fields, reply
from rmqkit.protocol.ids import RecallHandle, UniqueKeys, encode_recall_handle, offset_id, offset_ids
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.record import MULTI_TAGS, TRANSACTION_COMMIT, TRANSACTION_MASK
from rmqkit.protocol.schemas.send import SendMessageRequest, SendMessageResponse
from rmqkit.protocol.schemas.topics import TopicConfig
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import OVERLOADED, Router
from rmqkit.store.long_batch import is_long
from rmqkit.store.message_store import InnerMessage, PutResult, PutStatus
from rmqkit.store.settings import delay_level
from rmqkit.system import process

__all__ = ["SendHandlers"]

_UNUSUAL = frozenset(
    (
        property_names.DELAY,
        property_names.TRANSACTION_PREPARED,
        property_names.POP_CHECK_POINT,
        property_names.TIMER_DELETE_KEY,
        *TIMER_NAMES,
    )
)
"""Properties that need special handling, or that only the broker can set."""
_NO_KEYS = "Required message key is missing"


class SendHandlers(Handlers[SendContext]):
    """The handlers of sends."""

    def __init__(self, context: SendContext) -> None:
        super().__init__(context)
        self._is_orderly = context.queue_locks.is_any_held
        self._has_light = context.store_settings.enable_light_queues and context.store_settings.enable_multi_dispatch
        self._unique_keys = UniqueKeys(self._context.identity.store_host[:-4], process.number(), random.getrandbits(32))
        self._store_settings = context.store_settings
        self._checks = SendChecks(context)
        self._stamps, self._answer_fields = stamps_of(self._context.settings)
        self._long_batches = LongBatches(context.store)
        self._fast_path = FastPath(context, self._stamps, self._answer_fields)

    @answers(RequestCode.SEND_MESSAGE)
    @by_global_number
    def send(self, connection: Connection, command: Command) -> Command | Awaitable[Command | None] | None:
        """SEND_MESSAGE: long header names."""
        return self._send(connection, command, decode_v1(command))

    @answers(RequestCode.SEND_MESSAGE_V2)
    @answers(RequestCode.SEND_BATCH_MESSAGE)
    @by_global_number
    def send_v2(self, connection: Connection, command: Command) -> Command | Awaitable[Command | None] | None:
        """SEND_MESSAGE_V2 and SEND_BATCH_MESSAGE: short header names. A header field marks a batch."""
        return self._send(connection, command, decode_v2(command))

    def register(self, dispatch: Router) -> None:
        """Register the handlers. Plain sends of one read are handled together."""
        super().register(dispatch)
        dispatch.fast_path, dispatch.sends = self._fast_path.handle, self._fast_path.reader

    # -- inside

    def _send(
        self, connection: Connection, command: Command, header: SendMessageRequest
    ) -> Command | Awaitable[Command | None] | None:
        """Return the answer to a send. If the send created a topic, the answer waits until the name servers know it."""
        # Compare the number of topics: the handler does not await, so a new topic belongs to this send.
        topic_count = len(self._context.topics)
        answer = self._stored(connection, command, header)
        if answer is None or len(self._context.topics) == topic_count:
            return answer
        return (
            when_published(self._context.topics_published, answer)
            if isinstance(answer, Command)
            else self._when_stored_and_published(answer)
        )

    async def _when_stored_and_published(self, answer: Awaitable[Command | None]) -> Command | None:
        stored = await answer
        return None if stored is None else await when_published(self._context.topics_published, stored)

    def _stored(
        self, connection: Connection, command: Command, header: SendMessageRequest
    ) -> Command | Awaitable[Command | None] | None:
        if self._context.durability is not None and self._context.durability.is_full:
            return self._refuse(command, ResponseCode.SYSTEM_BUSY, OVERLOADED)
        if not command.body:
            raise PeerRefused(ResponseCode.SYSTEM_ERROR, NO_BODY, self._context.identity.ip)
        topic = self._checks.topic_of(connection, header)
        if isinstance(topic, tuple):
            return self._refuse(command, *topic)
        queue_id = header.queue_id
        message = InnerMessage(
            topic=header.topic,
            queue_id=queue_id if queue_id >= 0 else random.randrange(topic.write_queue_nums or 1),
            body=command.payload,
            string=None,
            values=decode_properties((header.properties or "").encode("utf-8", "replace")),
            flag=header.flag,
            sys_flag=header.sys_flag | (MULTI_TAGS if topic.topic_filter_type == "MULTI_TAG" else 0),
            born_timestamp=header.born_timestamp,
            born_host=connection.peer_host,
            store_host=self._context.identity.store_host,
            reconsume_times=header.reconsume_times or 0,
        )
        if header.batch:
            members = lite_members(message, topic, has_light=self._has_light)
            if isinstance(members, tuple):
                return self._refuse(command, *members)
            if members is not None:
                return self._store_members(connection, command, message, members)
            return self._store_batch(connection, command, message)
        if property_names.LITE_TOPIC in message.parsed:
            if (refusal := lite_refusal(topic, message.parsed)) is not None:
                return self._refuse(command, *refusal)
            message = in_lite_topic(message, topic, has_light=self._has_light)
        return self._store_one(connection, command, message, header, topic)

    def _store_one(
        self,
        connection: Connection,
        command: Command,
        sent: InnerMessage,
        header: SendMessageRequest,
        topic: TopicConfig,
    ) -> Command | None:
        """Store a message in the topic that its properties require. The answer has the queue that the sender knows."""
        queue_id, message = sent.queue_id, sent
        if header.topic.startswith(names.RETRY_PREFIX):
            group = names.group_of_retry_topic(header.topic)
            if (config := self._context.groups.get(group)) is None:
                remark = f"subscription group not exist, {group} {FAQ}"
                return self._refuse(command, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark)
            # A group that consumes in order retries a message itself, so every message that it sends is a dead letter.
            if sent.reconsume_times > tries_max(command, header.max_reconsume_times, config) or self._is_orderly(group):
                message = to_dead_letters(sent, group)
                self._context.topics.ensure(message.topic, 1)
        properties = message.parsed
        if property_names.PRIORITY in properties:
            is_dead, message = message is not sent, to_priority(message, topic.write_queue_nums)
            queue_id = queue_id if is_dead else message.queue_id
            properties = message.parsed
        if not _has_needed_key(topic, message):
            return self._refuse(command, ResponseCode.MESSAGE_ILLEGAL, _NO_KEYS)
        kept = message if _UNUSUAL.isdisjoint(properties) else self._scheduled(message)
        if isinstance(kept, tuple):
            return self._refuse(command, *kept)
        unique_key = kept.parsed.get(property_names.UNIQ_KEY) or self._unique_keys.next(self._context.clock.now_ms())
        kept = changed(kept, {property_names.UNIQ_KEY: unique_key, **self._stamps})
        if is_half(kept):  # after the stamps: the half message needs them, because its commit copies them
            kept = to_half(kept)
        waits = self._waits(kept)
        # Check before the put: after a refusal the producer tries another broker, and a message that is stored here,
        # too, would be consumed twice.
        if waits and self._lacks_replicas:
            return self._refuse(command, *NOT_ENOUGH_REPLICAS)
        put = self._context.store.put(kept)
        self._context.recorder.stored(kept, put, self._context.clock.monotonic_ms() - connection.active_ms)
        answer = {  # the fields of SendMessageResponse, as a dict: one call instead of a dozen
            "msgId": offset_id(kept.store_host, put.physical_offset),
            "queueId": str(self._context.topics.static.everywhere(header.topic, queue_id)),
            "queueOffset": str(put.queue_offset),
            "transactionId": unique_key,
            **self._answer_fields,
        }
        if property_names.TIMER_OUT_MS in kept.parsed:
            self._add_recall_handle(answer, kept)
        if put.lite_epoch:
            answer |= {"liteOffset": str(put.light_offset), "liteEpoch": str(put.lite_epoch)}
        return self._answer(connection, command, put, answer, waits=waits)

    def _scheduled(self, message: InnerMessage) -> InnerMessage | Refusal:
        """Return a message without properties that only brokers set, delayed or timed if required. Return a refusal if
        it is not allowed."""
        properties = message.parsed
        if property_names.POP_CHECK_POINT in properties:
            message = changed(message, {property_names.POP_CHECK_POINT: None})
        if is_half(message):  # the delay of a half message begins when it is committed
            if self._context.settings.reject_transactions:
                remark = f"the broker[{self._context.identity.ip}] sending transaction message is forbidden"
                return ResponseCode.NO_PERMISSION, remark
            return message
        if message.sys_flag & TRANSACTION_MASK not in (0, TRANSACTION_COMMIT):
            return message
        level = delay_level(properties.get(property_names.DELAY))
        if level <= 0:
            return schedule_timed(self._context.timer, message)
        return self._context.schedule.schedule(message, level)

    def _waits(self, message: InnerMessage) -> bool:
        """Return True if the answer waits for disk and slaves."""
        return self._context.durability is not None and message.parsed.get(property_names.WAIT) != "false"

    def _add_recall_handle(self, answer: dict[str, str], message: InnerMessage) -> None:
        """Add the handle for RECALL_MESSAGE to the answer for a timed message, unless a name contains a blank."""
        topic = message.parsed.get(property_names.REAL_TOPIC, "")
        if topic and not topic.startswith(names.RETRY_PREFIX):
            with suppress(ValueError):
                out_ms = int(message.parsed[property_names.TIMER_OUT_MS])
                handle = RecallHandle(topic, self._context.settings.broker_name, out_ms, answer["transactionId"])
                answer["recallHandle"] = encode_recall_handle(handle)

    def _store_batch(
        self, connection: Connection, command: Command, sent: InnerMessage
    ) -> Command | Awaitable[Command | None] | None:
        refusal = self._batch_refusal(sent)
        if refusal is not None:
            return self._refuse(command, *refusal)
        waits = self._waits(sent)
        if waits and self._lacks_replicas:
            return self._refuse(command, *NOT_ENOUGH_REPLICAS)
        unique_key = sent.parsed.get(property_names.UNIQ_KEY)
        message = changed(sent, self._stamps)  # these properties are stored only with an inner batch
        if is_long(message.body) and len(message.body) <= self._store_settings.message_bytes_max:
            if self._long_batches.is_full:
                return self._refuse(command, ResponseCode.SYSTEM_BUSY, OVERLOADED)
            # Call this here, not in a task: it must pause the connection before later sends of the same read.
            storing = self._long_batches.put(connection, message)
            return self._answer_long_batch(connection, command, message, unique_key, storing, waits=waits)
        put = self._context.store.put_batch(message)
        ms = self._context.clock.monotonic_ms() - connection.active_ms
        self._context.recorder.stored_batch(message, put, ms)
        ids = offset_ids(message.store_host, put.physical_offsets)
        return self._answer_batch(connection, command, message, put, unique_key, ids, waits=waits)

    def _store_members(
        self, connection: Connection, command: Command, sent: InnerMessage, members: list[InnerMessage]
    ) -> Command | None:
        """Store the messages of a batch in a lite topic one by one, with one dispatch. The fast path did not accept the
        batch, for example because a message has unusual properties."""
        refusal = self._batch_refusal(sent)
        waits = self._waits(sent)
        if refusal is None and waits and self._lacks_replicas:
            refusal = NOT_ENOUGH_REPLICAS
        if refusal is not None:
            return self._refuse(command, *refusal)
        puts: list[PutResult] = []
        with self._context.store.batch():
            for member in members:
                put = self._context.store.put(changed(member, self._stamps))
                if put.status is not PutStatus.OK:
                    return self._refuse(command, *put_refusal(put, self._store_settings.message_bytes_max))
                puts.append(put)
        first, last = puts[0], puts[-1]
        offsets = [put.physical_offset for put in puts]
        stored = msgspec.structs.replace(first, end_offset=last.end_offset, physical_offsets=offsets)
        ms = self._context.clock.monotonic_ms() - connection.active_ms
        self._context.recorder.stored_batch(sent, stored, ms)
        unique_key, ids = sent.parsed.get(property_names.UNIQ_KEY), offset_ids(sent.store_host, offsets)
        return self._answer_batch(connection, command, sent, stored, unique_key, ids, waits=waits)

    async def _answer_long_batch(
        self,
        connection: Connection,
        command: Command,
        message: InnerMessage,
        unique_key: str | None,
        storing: Awaitable[StoredBatch],
        *,
        waits: bool,
    ) -> Command | None:
        since_ms = connection.active_ms
        put, ids, records, messages = await storing
        ms = self._context.clock.monotonic_ms() - since_ms
        self._context.recorder.stored_long_batch(message, put, ms, records, messages)
        return self._answer_batch(connection, command, message, put, unique_key, ids, waits=waits)

    def _answer_batch(
        self,
        connection: Connection,
        command: Command,
        message: InnerMessage,
        put: PutResult,
        unique_key: str | None,
        ids: str,
        *,
        waits: bool,
    ) -> Command | None:
        answer = SendMessageResponse(
            msg_id=ids,
            queue_id=self._context.topics.static.everywhere(message.topic, message.queue_id),
            queue_offset=put.queue_offset,
            transaction_id=unique_key,
            batch_uniq_id=unique_key if self._context.topics.is_batch_topic(message.topic) else None,
            lite_offset=put.light_offset if put.lite_epoch else None,
            lite_epoch=put.lite_epoch or None,
        )
        answer_fields = header_fields(answer) | self._answer_fields
        return self._answer(connection, command, put, answer_fields, waits=waits)

    def _batch_refusal(self, message: InnerMessage) -> Refusal | None:
        """Return the reason to refuse a batch, or None. A batch is refused if its topic name is too long, or if it is
        retried, delayed, timed, or transactional."""
        topic_characters = len(message.topic)
        if topic_characters > names.TOPIC_CHARACTERS_MAX:
            return ResponseCode.MESSAGE_ILLEGAL, f"message topic length too long {topic_characters}"
        if message.topic.startswith(names.RETRY_PREFIX):
            return ResponseCode.MESSAGE_ILLEGAL, f"batch request does not support retry group {message.topic}"
        kept = message if _UNUSUAL.isdisjoint(message.parsed) else self._scheduled(message)
        if isinstance(kept, tuple):
            return kept
        if kept.sys_flag & TRANSACTION_MASK or kept.topic in SCHEDULED:
            return put_refusal(PutResult(PutStatus.MESSAGE_ILLEGAL), self._store_settings.message_bytes_max)
        return None

    def _answer(
        self, connection: Connection, command: Command, put: PutResult, fields: dict[str, str], *, waits: bool
    ) -> Command | None:
        if put.status is not PutStatus.OK:
            return self._refuse(command, *put_refusal(put, self._store_settings.message_bytes_max))
        assert 0 <= put.physical_offset < put.end_offset, "a stored message has a range in the log"
        if self._context.durability is None:
            return reply(command, fields=fields)
        # With WAIT=false answer now. `wake` requests the flush nevertheless.
        if not waits or self._context.durability.has(put.end_offset):
            self._context.durability.wake()
            return reply(command, fields=fields)
        self._context.durability.hold(put.end_offset, _Late(self, connection, command, fields))
        return None

    @property
    def _lacks_replicas(self) -> bool:
        return self._context.durability is not None and self._context.durability.lacks_replicas

    def _refuse(self, command: Command, code: int, remark: str) -> Command:
        return reply(command, code, remark, fields=self._answer_fields)

    def answer_late(
        self, connection: Connection, command: Command, fields: dict[str, str], outcome: Outcome, reason: str
    ) -> None:
        """Send an answer that waited for disk or slaves."""
        if command.is_one_way:
            return
        if outcome is Outcome.FAILED:
            connection.send(self._refuse(command, ResponseCode.SYSTEM_ERROR, reason))
            return
        connection.send(reply(command, CODES[outcome], fields=fields))


@dataclass(slots=True)
class _Late:
    """An answer that waits for disk or slaves. `Durability` calls it."""

    handlers: SendHandlers
    connection: Connection
    command: Command
    fields: dict[str, str]

    def __call__(self, outcome: Outcome, reason: str) -> None:
        self.handlers.answer_late(self.connection, self.command, self.fields, outcome, reason)


def _has_needed_key(topic: TopicConfig, message: InnerMessage) -> bool:
    """Return True if a message has a key, or if its topic does not compact messages by key."""
    if (topic.attributes or {}).get("cleanup.policy") != "COMPACTION":
        return True
    return bool(message.parsed.get(property_names.KEYS, "").strip())
