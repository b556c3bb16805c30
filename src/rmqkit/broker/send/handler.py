"""SEND_MESSAGE, SEND_MESSAGE_V2, SEND_BATCH_MESSAGE (``SendMessageProcessor``).

The checks come in the reference's order with its codes and remarks. The stored properties are the producer's with
CLUSTER, MSG_REGION and TRACE_ON added (a batch's members are stored as they came). A message with a delay level goes to
the delay topic, one for a time to the timer topic, a retried one that was tried too often to its group's dead letters.
The answer waits until the message is on the disk under SYNC_FLUSH, and at the slaves under SYNC_MASTER.
Source: behaviour.md §3.1 to §3.6; remoting.md §4.3.1.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass

from rmqkit.broker.messages import with_changes
from rmqkit.broker.delay.timer import schedule_timed
from rmqkit.broker.durability import CODES, NOT_ENOUGH_REPLICAS, Outcome, Refusal, put_refusal
from rmqkit.broker.handlers import Handlers, answers, by_global_number, when_published
from rmqkit.broker.send.checks import NO_BODY, SendChecks, SendContext, decode_v1, decode_v2, stamps_of, tries_max
from rmqkit.broker.send.fast_path import NO_WAIT, SendRun
from rmqkit.broker.send.priority import settle_priority
from rmqkit.broker.transaction.half import is_half, to_half
from rmqkit.errors import PeerRefused
from rmqkit.protocol import names
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.codes import FAQ, RequestCode, ResponseCode
from rmqkit.protocol.command import Command, header_fields, reply
from rmqkit.protocol.handles import RecallHandle, encode_recall_handle
from rmqkit.protocol.ids import UniqueKeys, offset_id, offset_ids
from rmqkit.protocol.properties import decode_properties, encode_properties, find_property, in_stored_order
from rmqkit.protocol.record import MULTI_TAGS, TRANSACTION_COMMIT, TRANSACTION_MASK
from rmqkit.protocol.schemas.send import SendMessageRequest, SendMessageResponse
from rmqkit.protocol.schemas.topics import TopicConfig
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import OVERLOADED, Router
from rmqkit.remoting.tasks import Slice
from rmqkit.store.delay_levels import delay_level
from rmqkit.store.long_batch import LongBatch, is_long
from rmqkit.store.message_store import PutMessage, PutResult, PutStatus

__all__ = ["SendHandlers"]

_TRANSACTION = b"TRAN_MSG\x01"
_KEYS = property_names.KEYS.encode()
_UNIQ_KEY = property_names.UNIQ_KEY.encode()
_PUT_ASIDE = (names.SCHEDULE_TOPIC, names.TIMER_TOPIC)
_TIMED = b"TIMER_OUT_MS\x01"
_PRIORITY = b"_SYS_MSG_PRIORITY_\x01"
_LONG_BATCHES_MAX = 32
"""Long batches that may be under way, the one that is stored and those behind it; further ones are refused as busy."""
_NO_KEYS = "Required message key is missing"


class SendHandlers(Handlers[SendContext]):
    """Stores what producers send."""

    def __init__(self, context: SendContext) -> None:
        super().__init__(context)
        self._is_orderly = context.queue_locks.is_any_held
        self._unique_keys = UniqueKeys(self._context.identity.store_host[:-4], os.getpid(), random.getrandbits(32))
        self._store_settings = context.store_settings
        self._checks = SendChecks(context)
        self._stamp_bytes, self._answer_fields = stamps_of(self._context.settings)
        self._long_batch = asyncio.Lock()
        self._long_batches = 0
        self._run = SendRun(context, self._checks, self._stamp_bytes, self._answer_fields)

    @answers(RequestCode.SEND_MESSAGE)
    @by_global_number
    def send(self, connection: Connection, command: Command) -> Command | Awaitable[Command | None] | None:
        """SEND_MESSAGE: long header names."""
        return self._send(connection, command, decode_v1(command))

    @answers(RequestCode.SEND_MESSAGE_V2)
    @answers(RequestCode.SEND_BATCH_MESSAGE)
    @by_global_number
    def send_v2(self, connection: Connection, command: Command) -> Command | Awaitable[Command | None] | None:
        """SEND_MESSAGE_V2 and SEND_BATCH_MESSAGE: short header names; one of them says whether the body is a batch."""
        return self._send(connection, command, decode_v2(command))

    def register(self, dispatch: Router) -> None:
        """Answer sends from a port, plain ones of one read all at once."""
        super().register(dispatch)
        dispatch.fast_path = self._run.rest

    # -- inside

    def _send(
        self, connection: Connection, command: Command, header: SendMessageRequest
    ) -> Command | Awaitable[Command | None] | None:
        """The answer to a send. With a topic made for it the answer waits until the name servers know that."""
        topic_count = len(self._context.topics)
        answer = self._stored(connection, command, header)
        if answer is None or len(self._context.topics) == topic_count:
            return answer
        return (
            when_published(self._context.topics_published, answer)
            if isinstance(answer, Command)
            else self._when_stored_and_told(answer)
        )

    async def _when_stored_and_told(self, answer: Awaitable[Command | None]) -> Command | None:
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
        properties = (header.properties or "").encode("utf-8", "replace")
        if properties and not properties.endswith(b"\x02"):
            properties += b"\x02"
        queue_id = header.queue_id
        message = PutMessage(
            topic=header.topic,
            queue_id=queue_id if queue_id >= 0 else random.randrange(topic.write_queue_nums or 1),
            body=command.payload,
            properties=properties,
            flag=header.flag,
            sys_flag=header.sys_flag | (MULTI_TAGS if topic.topic_filter_type == "MULTI_TAG" else 0),
            born_timestamp=header.born_timestamp,
            born_host=connection.peer_host,
            store_host=self._context.identity.store_host,
            reconsume_times=header.reconsume_times or 0,
        )
        if header.batch:
            return self._store_batch(connection, command, message)
        return self._store_one(connection, command, message, header, topic)

    def _settle_unusual(self, message: PutMessage) -> Refusal | None:
        """Put delayed and timed messages aside, drop what the broker reserves; why one is refused, if it is."""
        properties = decode_properties(message.properties)
        if properties.pop(property_names.POP_CHECK_POINT, None) is not None:
            message.properties = encode_properties(properties)
        if is_half(message):  # its delay begins when it is committed
            if self._context.settings.reject_transactions:
                remark = f"the broker[{self._context.identity.ip}] sending transaction message is forbidden"
                return ResponseCode.NO_PERMISSION, remark
            return None
        if message.sys_flag & TRANSACTION_MASK not in (0, TRANSACTION_COMMIT):
            return None
        level = delay_level(properties.get(property_names.DELAY))
        if level <= 0:
            return schedule_timed(self._context.timer, message, properties)
        self._context.schedule.schedule(message, level)
        return None

    def _divert_exhausted(self, command: Command, header: SendMessageRequest, message: PutMessage) -> Refusal | None:
        """A retried message that was tried often enough goes to its group's dead-letter topic instead.
        So does any one of a group that consumes in order: that group retries in place."""
        group_name = names.group_of_retry_topic(header.topic)
        group = self._context.groups.get(group_name)
        if group is None:
            return ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group not exist, {group_name} {FAQ}"
        is_exhausted = message.reconsume_times > tries_max(command, header.max_reconsume_times, group)
        if is_exhausted or self._is_orderly(group_name):
            message.topic = names.dlq_topic(group_name)
            message.queue_id = 0
            message.properties = with_changes(message.properties, {property_names.DELAY: "-1"})
            self._context.topics.ensure(message.topic, 1)
        return None

    def _store_one(
        self,
        connection: Connection,
        command: Command,
        message: PutMessage,
        header: SendMessageRequest,
        topic: TopicConfig,
    ) -> Command | None:
        queue_id, refusal = self._context.topics.static.everywhere(message.topic, message.queue_id), None
        if header.topic.startswith(names.RETRY_PREFIX):
            refusal = self._divert_exhausted(command, header, message)
        if _PRIORITY in message.properties and settle_priority(message, topic):
            queue_id = self._context.topics.static.everywhere(header.topic, message.queue_id)
        if refusal is not None:
            return self._refuse(command, *refusal)
        prepared = self._prepare(message, topic)
        if isinstance(prepared, tuple):
            return self._refuse(command, *prepared)
        waits = self._context.durability is not None and NO_WAIT not in message.properties
        if waits and self._lacks_replicas:
            return self._refuse(command, *NOT_ENOUGH_REPLICAS)
        put = self._context.store.put(message)
        self._context.statistics.sent_one(message, put, self._context.clock.monotonic_ms() - connection.active_ms)
        if self._context.counts is not None:
            self._context.counts.put(message, put)
        answer = {  # SendMessageResponse, spelled out: one call in place of a dozen
            "msgId": offset_id(message.store_host, put.physical_offset),
            "queueId": str(queue_id),
            "queueOffset": str(put.queue_offset),
            "transactionId": prepared,
            **self._answer_fields,
        }
        if _TIMED in message.properties:
            self._add_recall_handle(answer, message)
        return self._answer(connection, command, put, answer, waits=waits)

    def _add_recall_handle(self, answer: dict[str, str], message: PutMessage) -> None:
        """Give what RECALL_MESSAGE calls a timed message back with, if its names hold no blank."""
        topic = (find_property(message.properties, b"REAL_TOPIC") or b"").decode("utf-8", "replace")
        time = find_property(message.properties, b"TIMER_OUT_MS") or b""
        if topic and not topic.startswith(names.RETRY_PREFIX):
            with suppress(ValueError):
                handle = RecallHandle(topic, self._context.settings.broker_name, int(time), answer["transactionId"])
                answer["recallHandle"] = encode_recall_handle(handle)

    def _prepare(self, message: PutMessage, topic: TopicConfig) -> str | Refusal:
        """Make any message what is to be stored: its unique key, or why it is refused."""
        refusal: Refusal | None = None
        if topic.attributes and not _has_needed_key(topic, message.properties):
            refusal = ResponseCode.MESSAGE_ILLEGAL, _NO_KEYS
        if refusal is None and _is_unusual(message.properties):
            refusal = self._settle_unusual(message)
        if refusal is not None:
            return refusal
        unique_key = _unique_key_of(message.properties)
        if unique_key is None:
            unique_key = self._unique_keys.next(self._context.clock.now_ms())
            message.properties += encode_properties({property_names.UNIQ_KEY: unique_key})
        message.properties = in_stored_order(message.properties + self._stamp_bytes)
        if _TRANSACTION in message.properties and is_half(message):
            to_half(message)
        return unique_key

    def _store_batch(
        self, connection: Connection, command: Command, message: PutMessage
    ) -> Command | Awaitable[Command | None] | None:
        refusal = self._batch_refusal(message)
        if refusal is not None:
            return self._refuse(command, *refusal)
        waits = self._context.durability is not None and NO_WAIT not in message.properties
        if waits and self._lacks_replicas:
            return self._refuse(command, *NOT_ENOUGH_REPLICAS)
        unique_key = _unique_key_of(message.properties)
        message.properties += self._stamp_bytes  # stored with an inner batch only
        if is_long(message.body) and len(message.body) <= self._store_settings.message_bytes_max:
            if self._long_batches >= _LONG_BATCHES_MAX:
                return self._refuse(command, ResponseCode.SYSTEM_BUSY, OVERLOADED)
            self._long_batches += 1
            connection.hold()
            return self._store_long_batch(connection, command, message, unique_key, waits=waits)
        put = self._context.store.put_batch(message)
        ms = self._context.clock.monotonic_ms() - connection.active_ms
        self._context.statistics.sent_one(message, put, ms, len(put.physical_offsets))
        if self._context.counts is not None:
            self._context.counts.put_batch(message, put)
        ids = offset_ids(message.store_host, put.physical_offsets)
        return self._answer_batch(connection, command, message, put, unique_key, ids, waits=waits)

    async def _store_long_batch(
        self, connection: Connection, command: Command, message: PutMessage, unique_key: str | None, *, waits: bool
    ) -> Command | None:
        """`_store_batch` for one of many messages: in slices, but for the put. One at a time, as each takes a hundred
        bytes a message; its connection waits, so that later sends stay behind it."""
        since_ms, ids = connection.active_ms, ""
        try:
            async with self._long_batch:
                now, batch = Slice(), LongBatch(message)
                for _ in self._context.store.prepare(batch):
                    await now.pause_if_over()
                await now.pause()
                put = self._context.store.put_long_batch(batch)
                await now.pause()
                while self._context.store.dispatch():
                    await now.pause_if_over()
                count = len(put.physical_offsets)
                if put.status is PutStatus.OK and not count:
                    count, context = batch.count, []
                    for offsets in batch.physical_offsets():
                        context.append(offset_ids(message.store_host, offsets))
                        await now.pause_if_over()
                    ids = ",".join(context)
                else:
                    ids = offset_ids(message.store_host, put.physical_offsets)
        finally:
            self._long_batches -= 1
            connection.go_on()
        self._context.statistics.sent_one(message, put, self._context.clock.monotonic_ms() - since_ms, count)
        if self._context.counts is not None:
            self._context.counts.put(message, put, batch.count)
        return self._answer_batch(connection, command, message, put, unique_key, ids, waits=waits)

    def _answer_batch(
        self,
        connection: Connection,
        command: Command,
        message: PutMessage,
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
        )
        answer_fields = header_fields(answer) | self._answer_fields
        return self._answer(connection, command, put, answer_fields, waits=waits)

    def _batch_refusal(self, message: PutMessage) -> Refusal | None:
        """What no batch may be: retried, delayed, timed, or part of a transaction."""
        topic_characters = len(message.topic)
        if topic_characters > names.TOPIC_CHARACTERS_MAX:
            return ResponseCode.MESSAGE_ILLEGAL, f"message topic length too long {topic_characters}"
        if message.topic.startswith(names.RETRY_PREFIX):
            return ResponseCode.MESSAGE_ILLEGAL, f"batch request does not support retry group {message.topic}"
        properties = message.properties
        refusal = self._settle_unusual(message) if _is_unusual(properties) else None
        if refusal is None and (message.sys_flag & TRANSACTION_MASK or message.topic in _PUT_ASIDE):
            return put_refusal(PutResult(PutStatus.MESSAGE_ILLEGAL), self._store_settings.message_bytes_max)
        return refusal

    def _answer(
        self, connection: Connection, command: Command, put: PutResult, fields: dict[str, str], *, waits: bool
    ) -> Command | None:
        if put.status is not PutStatus.OK:
            return self._refuse(command, *put_refusal(put, self._store_settings.message_bytes_max))
        if self._context.durability is None:
            return reply(command, fields=fields)
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
        """Send the answer that waited for disk or slaves."""
        if command.is_one_way:
            return
        if outcome is Outcome.FAILED:
            connection.send(self._refuse(command, ResponseCode.SYSTEM_ERROR, reason))
            return
        connection.send(reply(command, CODES[outcome], fields=fields))


@dataclass(slots=True)
class _Late:
    """One answer that waits for disk or slaves, as `Durability` releases it."""

    handlers: SendHandlers
    connection: Connection
    command: Command
    fields: dict[str, str]

    def __call__(self, outcome: Outcome, reason: str) -> None:
        self.handlers.answer_late(self.connection, self.command, self.fields, outcome, reason)


def _unique_key_of(properties: bytes) -> str | None:
    found = find_property(properties, _UNIQ_KEY)
    return None if found is None else found.decode("utf-8", "replace")


def _has_needed_key(topic: TopicConfig, properties: bytes) -> bool:
    """Whether a message can be told apart by its key where older ones of the same key are compacted away."""
    if (topic.attributes or {}).get("cleanup.policy") != "COMPACTION":
        return True
    return bool((find_property(properties, _KEYS) or b"").strip())


def _is_unusual(properties: bytes) -> bool:
    """Whether a property string needs decoding before it is stored.
    That is so for kinds of messages that are refused and names the broker reserves for itself. Spelled out, because it
    runs for every message: a loop over the names costs five times as much."""
    return (
        b"DELAY\x01" in properties
        or _TRANSACTION in properties
        or b"TIMER_DE" in properties
        or b"POP_CK\x01" in properties
    )
