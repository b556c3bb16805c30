"""SEND_MESSAGE, SEND_MESSAGE_V2, SEND_BATCH_MESSAGE (``SendMessageProcessor``).

The checks come in the reference's order with its codes and remarks; a topic that is missing is created here. The stored
properties are the producer's with CLUSTER, MSG_REGION and TRACE_ON added (a batch's members are stored as they came). A
message with a delay level goes to the delay topic, one for a time to the timer topic, a retried one that was tried too
often to its group's dead letters. The answer waits until the message is on the disk under SYNC_FLUSH, and at the slaves
under SYNC_MASTER.

The plain sends that one read of a connection brought are stored with one write to the log (`SendRun`). The boundaries
are the same for a send that goes alone (`SendHandlers`), which is tested to do the same:

==============================  =======================================  ==========================================
from                            by                                       to
==============================  =======================================  ==========================================
frames                          `SendsReader.read` · `SendHandlers.send` `Sends`, and frames that are no plain sends ·
                                                                         `InnerMessage`
`Sends` · `InnerMessage`        ``put_sends`` · ``put`` of the store     record bytes, queue entry, index keys
`Sends` · `PutResult`           `Sends.answers` · `reply`                the frame of the answer
==============================  =======================================  ==========================================

Source: behaviour.md §3.1 to §3.6; remoting.md §4.3.1.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Protocol

from rmqkit.broker.delay.levels import Schedule
from rmqkit.broker.delay.timer import Timer, schedule_timed
from rmqkit.broker.durability import (
    CODES,
    NOT_ENOUGH_REPLICAS,
    REJECTED,
    Durability,
    Outcome,
    Refusal,
    put_refusal,
)
from rmqkit.broker.handlers import Handlers, OwnAddress, answers, by_global_number, when_published
from rmqkit.broker.messages import (
    TIMER_NAMES,
    changed,
    is_half,
    to_dead_letters,
    to_half,
    to_priority,
)
from rmqkit.broker.recorder import Recorder
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.tables.clients import ClientTable, QueueLocks
from rmqkit.broker.tables.groups import GroupTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.clock import Clock
from rmqkit.errors import HeaderError, PeerRefused
from rmqkit.protocol import names
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.codes import FAQ, RequestCode, ResponseCode
from rmqkit.protocol.command import (
    Command,
    Frame,
    decode_header,
    decode_header_leniently,
    frames_of,
    header_fields,
    reply,
)
from rmqkit.protocol.core import Sends, core_fault
from rmqkit.protocol.ids import RecallHandle, UniqueKeys, encode_recall_handle, offset_id, offset_ids
from rmqkit.protocol.names import TIMER_TOPIC
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.record import MULTI_TAGS, TRANSACTION_COMMIT, TRANSACTION_MASK
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.send import SendMessageRequest, SendMessageResponse, SendMessageV2Request
from rmqkit.protocol.schemas.topics import Permission, TopicConfig
from rmqkit.protocol.sends import sends_reader
from rmqkit.protocol.templates import answer_pieces
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import OVERLOADED, Router
from rmqkit.remoting.tasks import Slice
from rmqkit.store.long_batch import LongBatch, is_long
from rmqkit.store.message_store import InnerMessage, MessageStore, PutResult, PutStatus
from rmqkit.store.settings import StoreSettings, delay_level

__all__ = ["RefusalHandlers", "SendContext", "SendHandlers"]

_log = logging.getLogger(__name__)

# ---- what every send has to pass

_ASKS_FOR_TRIES_SINCE = 121  # 3.4.9

_MAY_MISS_LONG = {"producerGroup": "", "defaultTopic": "", "defaultTopicQueueNums": "4"}
_MAY_MISS_SHORT = {"a": "", "c": "", "d": "4"}

_HARMLESS = frozenset(("message.type",))
"""Attributes of topics that ask nothing of a plain send: its kind is for those who show it."""

NO_BODY = "the message has no body"


class SendContext(Protocol):
    """What sends may touch."""

    clients: ClientTable
    clock: Clock
    durability: Durability | None
    groups: GroupTable
    identity: OwnAddress
    queue_locks: QueueLocks
    schedule: Schedule
    recorder: Recorder
    settings: BrokerSettings
    store: MessageStore
    store_settings: StoreSettings
    timer: Timer | None
    topics: TopicTable

    @property
    def topics_published(self) -> Callable[[], Awaitable[None]]: ...


def tries_max(command: Command, asked: int | None, group: SubscriptionGroupConfig) -> int:
    """How often a message may be consumed: what the client asks for if it is not too old, else the group's limit."""
    return group.retry_max_times if asked is None or command.version < _ASKS_FOR_TRIES_SINCE else asked


def stamps_of(settings: BrokerSettings) -> tuple[dict[str, str], dict[str, str]]:
    """The properties that every message gets, and those of them that the answer tells."""
    told = {
        property_names.MSG_REGION: settings.region_id,
        property_names.TRACE_ON: "true" if settings.trace_on else "false",
    }
    return {**told, property_names.CLUSTER: settings.cluster_name}, told


def decode_v1(command: Command, **missing: str) -> SendMessageRequest:
    """The header of a send in its long form; what it may lack besides is ``missing``.
    Raises HeaderError: another field is missing, or a number is none."""
    may_miss = {**_MAY_MISS_LONG, **missing} if missing else _MAY_MISS_LONG
    return decode_header_leniently(command, SendMessageRequest, missing=may_miss)


def decode_v2(command: Command, **missing: str) -> SendMessageV2Request:
    """The header of a send in its short form, like `decode_v1`."""
    # The strict way first: it is one call, and takes what clients write; Java's broker takes more than that.
    try:
        return decode_header(command, SendMessageV2Request)
    except HeaderError:
        may_miss = {**_MAY_MISS_SHORT, **missing}
        return decode_header_leniently(command, SendMessageV2Request, missing=may_miss, drops_unreadable=False)


class SendChecks:
    """Lets sends in."""

    def __init__(self, context: SendContext) -> None:
        self._settings = context.settings
        self._identity = context.identity
        self._topics = context.topics
        self._clock = context.clock

    def topic_of(self, connection: Connection, header: SendMessageRequest) -> TopicConfig | Refusal:
        """The topic that a message goes to, or why it does not."""
        settings, name = self._settings, header.topic
        if settings.accept_sends_from_ms and self._clock.now_ms() < settings.accept_sends_from_ms:
            remark = f"broker unable to service, until {_human_time(settings.accept_sends_from_ms)}"
            return ResponseCode.SYSTEM_ERROR, remark
        topic = self._topics.get(name)
        if topic is None and (fault := names.topic_fault(name)) is not None:
            return ResponseCode.INVALID_PARAMETER, fault
        if topic is not None and topic.order and not settings.broker_permission & Permission.WRITE:
            return ResponseCode.NO_PERMISSION, f"the broker[{self._identity.ip}] sending message is forbidden"
        if name in names.FORBIDDEN_TO_SEND:
            return ResponseCode.NO_PERMISSION, f"Sending message to topic[{name}] is forbidden."
        if topic is None:
            template, queues = header.default_topic, header.default_topic_queue_nums
            unit = bool(header.unit_mode)
            topic = self._topics.create_for_send(name, template=template, queue_count=queues, unit=unit)
        if topic is None:
            return ResponseCode.TOPIC_NOT_EXIST, f"topic[{name}] not exist, apply first please!{FAQ}"
        if header.queue_id >= topic.read_queue_nums and header.queue_id >= topic.write_queue_nums:
            remark = f"request queueId[{header.queue_id}] is illegal, {_describe(topic)} Producer: {connection.peer}"
            return ResponseCode.INVALID_PARAMETER, remark
        return topic

    def plain_queue_count(self, name: str) -> int:
        """How many queues of a topic plain sends can go to; 0 when its messages have to be looked at one by one: some
        check of `topic_of` refuses them, or the topic asks for more than storing."""
        topic, settings = self._topics.get(name), self._settings
        # One that has to be made is made by the handler, whose answer waits until the name servers know it.
        if topic is None or topic.topic_filter_type == "MULTI_TAG":
            return 0
        if topic.attributes and not topic.attributes.keys() <= _HARMLESS:
            return 0
        # Of a static topic the queues are numbered over several brokers; what is in the delay topics asks for no time.
        if name in names.FORBIDDEN_TO_SEND or name in _SCHEDULED or name in self._topics.static.local:
            return 0
        if settings.accept_sends_from_ms and self._clock.now_ms() < settings.accept_sends_from_ms:
            return 0
        if topic.order and not settings.broker_permission & Permission.WRITE:
            return 0
        return max(topic.read_queue_nums, topic.write_queue_nums)


def _human_time(timestamp_ms: int) -> str:
    """Local time as the reference prints it."""
    whole_seconds = datetime.fromtimestamp(timestamp_ms // 1000)
    return f"{whole_seconds:%Y-%m-%d %H:%M:%S},{timestamp_ms % 1000:03d}"


def _describe(topic: TopicConfig) -> str:
    """A topic as the reference prints it in remarks."""
    perm = "".join(
        letter if topic.perm & bit else "-"
        for letter, bit in (("R", Permission.READ), ("W", Permission.WRITE), ("X", Permission.INHERIT))
    )
    attributes = ", ".join(f"{name}={value}" for name, value in (topic.attributes or {}).items())
    return (
        f"TopicConfig [topicName={topic.topic_name}, readQueueNums={topic.read_queue_nums}, "
        f"writeQueueNums={topic.write_queue_nums}, perm={perm}, topicFilterType={topic.topic_filter_type}, "
        f"topicSysFlag={topic.topic_sys_flag}, order={str(topic.order).lower()}, attributes={{{attributes}}}]"
    )


# ---- one by one

_SCHEDULED = (names.SCHEDULE_TOPIC, names.TIMER_TOPIC)
_UNUSUAL = frozenset(
    (
        property_names.DELAY,
        property_names.TRANSACTION_PREPARED,
        property_names.POP_CHECK_POINT,
        property_names.TIMER_DELETE_KEY,
        *TIMER_NAMES,
    )
)
"""Properties that ask for more than storing, or that are the broker's own."""
_LONG_BATCHES_MAX = 32
"""Long batches that may be under way, the one that is stored and those behind it; further ones are refused as busy."""
_NO_KEYS = "Required message key is missing"
_UNAVAILABLE = PutResult(PutStatus.SERVICE_NOT_AVAILABLE, reason="this broker is a slave")


class SendHandlers(Handlers[SendContext]):
    """Stores what producers send."""

    def __init__(self, context: SendContext) -> None:
        super().__init__(context)
        self._is_orderly = context.queue_locks.is_any_held
        self._unique_keys = UniqueKeys(self._context.identity.store_host[:-4], os.getpid(), random.getrandbits(32))
        self._store_settings = context.store_settings
        self._checks = SendChecks(context)
        self._stamps, self._answer_fields = stamps_of(self._context.settings)
        self._long_batch = asyncio.Lock()
        self._long_batches = 0
        self._run = SendRun(context, self._checks, self._stamps, self._answer_fields)

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
        dispatch.fast_path, dispatch.sends = self._run.rest, self._run.reader

    # -- inside

    def _send(
        self, connection: Connection, command: Command, header: SendMessageRequest
    ) -> Command | Awaitable[Command | None] | None:
        """The answer to a send. With a topic made for it the answer waits until the name servers know that."""
        # By their number: the handler does not wait, so the topics that are new behind it are those of this send.
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
            return self._store_batch(connection, command, message)
        return self._store_one(connection, command, message, header, topic)

    def _store_one(
        self,
        connection: Connection,
        command: Command,
        sent: InnerMessage,
        header: SendMessageRequest,
        topic: TopicConfig,
    ) -> Command | None:
        """Store a message as what it asks to be, and answer with the queue that its sender sees."""
        queue_id, message = sent.queue_id, sent
        if header.topic.startswith(names.RETRY_PREFIX):
            group = names.group_of_retry_topic(header.topic)
            if (config := self._context.groups.get(group)) is None:
                remark = f"subscription group not exist, {group} {FAQ}"
                return self._refuse(command, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark)
            # A group that consumes in order retries in place: whatever it sends here is a dead letter.
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
        if is_half(kept):  # behind the stamps: the half message has them, and its commit copies them
            kept = to_half(kept)
        waits = self._waits(kept)
        # Before the put: its producer tries another broker, and what was refused here would be consumed twice.
        if waits and self._lacks_replicas:
            return self._refuse(command, *NOT_ENOUGH_REPLICAS)
        put = self._context.store.put(kept)
        self._context.recorder.stored(kept, put, self._context.clock.monotonic_ms() - connection.active_ms)
        answer = {  # SendMessageResponse, spelled out: one call in place of a dozen
            "msgId": offset_id(kept.store_host, put.physical_offset),
            "queueId": str(self._context.topics.static.everywhere(header.topic, queue_id)),
            "queueOffset": str(put.queue_offset),
            "transactionId": unique_key,
            **self._answer_fields,
        }
        if property_names.TIMER_OUT_MS in kept.parsed:
            self._add_recall_handle(answer, kept)
        return self._answer(connection, command, put, answer, waits=waits)

    def _scheduled(self, message: InnerMessage) -> InnerMessage | Refusal:
        """A message without the brokers' own properties, delayed or timed if it asks for that; or why it is refused."""
        properties = message.parsed
        if property_names.POP_CHECK_POINT in properties:
            message = changed(message, {property_names.POP_CHECK_POINT: None})
        if is_half(message):  # its delay begins when it is committed
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
        """Whether the answer waits for disk and slaves."""
        return self._context.durability is not None and message.parsed.get(property_names.WAIT) != "false"

    def _add_recall_handle(self, answer: dict[str, str], message: InnerMessage) -> None:
        """Give what RECALL_MESSAGE calls a timed message back with, if its names hold no blank."""
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
        message = changed(sent, self._stamps)  # its properties are stored with an inner batch only
        if is_long(message.body) and len(message.body) <= self._store_settings.message_bytes_max:
            # Each holds its body, and a hundred bytes a message once its turn comes.
            if self._long_batches >= _LONG_BATCHES_MAX:
                return self._refuse(command, ResponseCode.SYSTEM_BUSY, OVERLOADED)
            self._long_batches += 1
            connection.hold()  # sends behind it on this connection must not overtake it
            return self._store_long_batch(connection, command, message, unique_key, waits=waits)
        put = self._context.store.put_batch(message)
        ms = self._context.clock.monotonic_ms() - connection.active_ms
        self._context.recorder.stored_batch(message, put, ms)
        ids = offset_ids(message.store_host, put.physical_offsets)
        return self._answer_batch(connection, command, message, put, unique_key, ids, waits=waits)

    async def _store_long_batch(
        self, connection: Connection, command: Command, message: InnerMessage, unique_key: str | None, *, waits: bool
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
            assert self._long_batches > 0, "this batch was counted"
            self._long_batches -= 1
            # Also where the put failed: a connection that stays held is never read again.
            connection.go_on()
        ms = self._context.clock.monotonic_ms() - since_ms
        self._context.recorder.stored_long_batch(message, put, ms, count, batch.count)
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
        )
        answer_fields = header_fields(answer) | self._answer_fields
        return self._answer(connection, command, put, answer_fields, waits=waits)

    def _batch_refusal(self, message: InnerMessage) -> Refusal | None:
        """What no batch may be: retried, delayed, timed, or part of a transaction."""
        topic_characters = len(message.topic)
        if topic_characters > names.TOPIC_CHARACTERS_MAX:
            return ResponseCode.MESSAGE_ILLEGAL, f"message topic length too long {topic_characters}"
        if message.topic.startswith(names.RETRY_PREFIX):
            return ResponseCode.MESSAGE_ILLEGAL, f"batch request does not support retry group {message.topic}"
        kept = message if _UNUSUAL.isdisjoint(message.parsed) else self._scheduled(message)
        if isinstance(kept, tuple):
            return kept
        if kept.sys_flag & TRANSACTION_MASK or kept.topic in _SCHEDULED:
            return put_refusal(PutResult(PutStatus.MESSAGE_ILLEGAL), self._store_settings.message_bytes_max)
        return None

    def _answer(
        self, connection: Connection, command: Command, put: PutResult, fields: dict[str, str], *, waits: bool
    ) -> Command | None:
        if put.status is not PutStatus.OK:
            return self._refuse(command, *put_refusal(put, self._store_settings.message_bytes_max))
        assert 0 <= put.physical_offset < put.end_offset, "what is stored has a place in the log"
        if self._context.durability is None:
            return reply(command, fields=fields)
        # With WAIT=false it is answered now, and flushed soon all the same.
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


def _has_needed_key(topic: TopicConfig, message: InnerMessage) -> bool:
    """Whether a message can be told apart by its key where older ones of the same key are compacted away."""
    if (topic.attributes or {}).get("cleanup.policy") != "COMPACTION":
        return True
    return bool(message.parsed.get(property_names.KEYS, "").strip())


# ---- many at once

_NOT_PLAIN = (
    property_names.INNER_NUM,
    property_names.DELAY,
    property_names.TRANSACTION_PREPARED,
    property_names.POP_CHECK_POINT,
    property_names.INNER_MULTI_DISPATCH,
    property_names.PRIORITY,
)
_NOT_TIMED = (
    property_names.TIMER_DELETE_KEY,
    property_names.TIMER_OUT_MS,
    property_names.REAL_TOPIC,
    property_names.REAL_QUEUE_ID,
)
_UNITS_MS = dict(zip(TIMER_NAMES, (1000, 1, 0), strict=True))


class SendRun:
    """Stores plain sends of one read (`rmqkit.protocol.sends`), or of a batch, together: where nothing can be refused,
    to topics that are there and want nothing special, in queues that have messages. One for a time goes to the timer
    topic. A run of which one message is another case, or that the store does not take together, is handled one by one,
    and so is such a batch. Answers are given when the one write is done, or together when the last message is as safe
    as it has to be (`durability`).
    ``stamps``: the properties that every message gets.
    ``told``: the fields that every answer has."""

    def __init__(self, context: SendContext, checks: SendChecks, stamps: dict[str, str], told: dict[str, str]) -> None:
        self._store = context.store
        self._checks = checks
        self._store_host = context.identity.store_host
        self._timer = context.timer
        not_plain = (*_NOT_PLAIN, *(TIMER_NAMES if context.timer is None else _NOT_TIMED))
        self.reader = sends_reader(os.environ, stamps, not_plain, {} if context.timer is None else _UNITS_MS)
        _log.info("plain sends are read by %s", (core_fault(os.environ) and "plain Python") or "the compiled core")
        self._broker_name = context.settings.broker_name
        self._told = told
        self._durability = context.durability
        self._recorder = context.recorder
        self._monotonic_ms = context.clock.monotonic_ms
        self._pieces = {code: answer_pieces(self._store_host, told, code) for code in CODES.values()}
        self._stored = self._pieces[ResponseCode.SUCCESS]

    def rest(self, connection: Connection, units: Sequence[Frame | Sends]) -> Iterable[Frame]:
        """Store and answer plain sends; the other requests in their order, each when those before it are stored."""
        if len(units) == 1 and not isinstance(first := units[0], Frame):
            return () if self._store_all(connection, first) else self._each(connection, first)
        return self._rest(connection, units)

    def _rest(self, connection: Connection, units: Sequence[Frame | Sends]) -> Iterator[Frame]:
        for unit in units:
            if isinstance(unit, Frame):
                yield unit
            elif not self._store_all(connection, unit):
                yield from self._each(connection, unit)

    def _each(self, connection: Connection, sends: Sends) -> Iterator[Frame]:
        """Store what can be stored alone; the others in their order."""
        if sends.is_batch or len(sends) == 1:
            yield from frames_of(sends)
            return
        at = sends.start
        while at < sends.end:
            one = self.reader.read(sends.chunk, at, 1)
            assert one is not None, "it was read before"
            at = one.end
            if not self._store_all(connection, one):  # type: ignore[arg-type]
                yield from frames_of(one)

    def _refuse_all(self, connection: Connection, opaques: Iterable[int], reason: str) -> None:
        for opaque in opaques:
            request = Command(RequestCode.SEND_MESSAGE_V2, opaque)
            connection.send(reply(request, ResponseCode.SYSTEM_ERROR, reason, fields=self._told))

    def _store_all(self, connection: Connection, sends: Sends) -> bool:
        """Store some messages with one write and answer them; False when they have to be handled one by one."""
        durability = self._durability
        # Refusals are left to the handler: their codes and remarks are the reference's, in its order of checks. One
        # that asks not to wait for the disk would have to, answered with its run.
        if durability is not None and (durability.is_full or durability.lacks_replicas or sends.waits_not):
            return False
        for topic, queue_id, _, _ in sends.queues:
            if queue_id >= self._checks.plain_queue_count(topic):
                return False
        try:
            # This changes what is stored, not the chunk: one by one they are read from that again, with the times they
            # ask for.
            if (asked := sends.asked) and not self._keep(sends, asked):
                return False
            end_offset = self._store.put_sends(sends, connection.peer_host, self._store_host)
        except Exception:  # noqa: BLE001 - the outer edge of these requests: none is answered, each is tried alone
            _log.exception("cannot store %d sends of %s together", len(sends), connection.peer)
            return False
        if end_offset is None:
            return False
        ms = self._monotonic_ms() - connection.active_ms
        if durability is None or durability.has(end_offset):
            connection.send_frame(sends.answers(*self._stored))
            self._recorder.sends(sends, ms)
            return True
        answer = partial(self._answer_late, connection, sends)
        release = self._recorder.waiting_sends(sends, ms, connection.active_ms, answer)
        durability.hold(end_offset, release, answers=len(sends.opaques))
        return True

    def _keep(self, sends: Sends, asked: list[tuple[int, int]]) -> bool:
        """Give those that ask for a time to the timer; False when it does not simply keep all of them."""
        timer = self._timer
        assert timer is not None, "without a timer nobody's time is read"
        outs = [out for time, unit_ms in asked if (out := timer.kept_until(time, unit_ms)) is not None]
        if len(outs) < len(asked):
            return False
        sends.keep(outs, TIMER_TOPIC, self._broker_name)
        return True

    def _answer_late(self, connection: Connection, sends: Sends, outcome: Outcome, reason: str) -> None:
        """Answer plain sends that waited for disk or slaves."""
        if outcome is not Outcome.FAILED:
            connection.send_frame(sends.answers(*self._pieces[CODES[outcome]]))
            return
        self._refuse_all(connection, sends.opaques, reason)


# ---- at a slave


class RefusalContext(Protocol):
    """What refusals may touch."""

    identity: OwnAddress
    settings: BrokerSettings


class RefusalHandlers(Handlers[RefusalContext]):
    """What a slave answers to messages, in place of `SendHandlers` and `SendBackHandlers`: it takes none, and makes no
    topics for them. Source: behaviour.md §2.4, §10.2, §10.5; store.md §21.5.

    =========================  =====================================  ================================================
    request                    any slave                              one with ``enableSlaveActingMaster``
    =========================  =====================================  ================================================
    a message, a batch         SYSTEM_BUSY ``[REJECTREQUEST]…``       SERVICE_NOT_AVAILABLE, as from a store that is
                                                                      full: producers try another broker
    a message to be retried    SYSTEM_BUSY ``[REJECTREQUEST]…``       SYSTEM_ERROR: consumers send it to a retry topic
    =========================  =====================================  ================================================
    """

    @answers(RequestCode.SEND_MESSAGE)
    @answers(RequestCode.SEND_MESSAGE_V2)
    @answers(RequestCode.SEND_BATCH_MESSAGE)
    def send(self, connection: Connection, command: Command) -> Command:
        if not self._context.settings.acts_as_master:
            return reply(command, ResponseCode.SYSTEM_BUSY, REJECTED)
        return reply(command, *put_refusal(_UNAVAILABLE, 0), fields=stamps_of(self._context.settings)[1])

    @answers(RequestCode.CONSUMER_SEND_MSG_BACK)
    def send_back(self, connection: Connection, command: Command) -> Command:
        if not self._context.settings.acts_as_master:
            return reply(command, ResponseCode.SYSTEM_BUSY, REJECTED)
        return reply(command, ResponseCode.SYSTEM_ERROR, f"no master available along with {self._context.identity.ip}")
