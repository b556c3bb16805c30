"""SEND_MESSAGE, SEND_MESSAGE_V2, SEND_BATCH_MESSAGE (``SendMessageProcessor``).

The checks come in the reference's order with its codes and remarks. The stored properties are the producer's with
CLUSTER, MSG_REGION and TRACE_ON added (a batch's members are stored as they came). Under SYNC_FLUSH the answer waits
for the flush round that covers the message. Kinds of messages this broker cannot keep its word for — delayed, timed,
transactional — are refused, never stored as something else.
Source: behaviour.md §3; remoting.md §4.3.1.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from rmqkit.broker.durability import Durability, Outcome
from rmqkit.broker.groups import GroupTable
from rmqkit.broker.own_address import OwnAddress
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.topics import TopicTable
from rmqkit.clock import Clock
from rmqkit.errors import BodyError
from rmqkit.protocol import names
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.bodies.topics import Permission, TopicConfig
from rmqkit.protocol.codes import FAQ, RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, reply
from rmqkit.protocol.headers.send import SendMessageRequest, SendMessageResponse, SendMessageV2Request
from rmqkit.protocol.ids import UniqueKeys, offset_id
from rmqkit.protocol.properties import decode_properties, encode_properties, find_property
from rmqkit.protocol.record import MULTI_TAGS
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.dispatch import OVERLOADED, Dispatch
from rmqkit.store.message_store import MessageStore, PutMessage, PutResult, PutStatus

__all__ = ["SendHandlers"]

_Refusal = tuple[int, str]

_NO_WAIT = b"WAIT\x01false\x02"
_UNIQ_KEY = property_names.UNIQ_KEY.encode()
_TIMER_NAMES = (property_names.TIMER_DELAY_SECONDS, property_names.TIMER_DELAY_MS, property_names.TIMER_DELIVER_MS)

_ILLEGAL = (
    "the message is illegal, maybe msg body or properties length not matched. "
    "msg body length limit {body_bytes_max}B, msg properties length limit 32KB."
)
_UNAVAILABLE = (
    "service not available now. It may be caused by one of the following reasons: the broker's disk is full, "
    "messages are put to the slave, message store has been shut down, etc. {reason}"
)
_PUT_REFUSALS: dict[PutStatus, tuple[ResponseCode, str]] = {
    PutStatus.MESSAGE_ILLEGAL: (ResponseCode.MESSAGE_ILLEGAL, _ILLEGAL),
    PutStatus.PROPERTIES_SIZE_EXCEEDED: (ResponseCode.MESSAGE_ILLEGAL, _ILLEGAL),
    PutStatus.SERVICE_NOT_AVAILABLE: (ResponseCode.SERVICE_NOT_AVAILABLE, _UNAVAILABLE),
    PutStatus.CREATE_MAPPED_FILE_FAILED: (
        ResponseCode.SYSTEM_ERROR,
        "create mapped file failed, server is busy or broken.",
    ),
    PutStatus.OS_PAGE_CACHE_BUSY: (
        ResponseCode.SYSTEM_BUSY,
        "[PC_SYNCHRONIZED]broker busy, start flow control for a while",
    ),
}


class SendHandlers:
    """Stores what producers send.

    Args:
        durability: makes answers wait for the disk; None when the log is flushed behind the answers.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        identity: OwnAddress,
        *,
        store: MessageStore,
        topics: TopicTable,
        groups: GroupTable,
        unique_keys: UniqueKeys,
        clock: Clock,
        durability: Durability | None,
        body_bytes_max: int,
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._store = store
        self._topics = topics
        self._groups = groups
        self._unique_keys = unique_keys
        self._clock = clock
        self._durability = durability
        self._body_bytes_max = body_bytes_max
        self._stamps = {
            property_names.MSG_REGION: settings.region_id,
            property_names.TRACE_ON: "true" if settings.trace_on else "false",
            property_names.CLUSTER: settings.cluster_name,
        }
        self._stamp_bytes = encode_properties(self._stamps)
        told = (property_names.MSG_REGION, property_names.TRACE_ON)
        self._answer_fields = {name: self._stamps[name] for name in told}

    def register(self, dispatch: Dispatch) -> None:
        """Answer the send codes."""
        dispatch.register(RequestCode.SEND_MESSAGE, self.send)
        dispatch.register(RequestCode.SEND_MESSAGE_V2, self.send_v2)
        dispatch.register(RequestCode.SEND_BATCH_MESSAGE, self.send_batch)

    def send(self, connection: Connection, command: Command) -> Command | None:
        """SEND_MESSAGE: long header names."""
        return self._send(connection, command, decode_header(command, SendMessageRequest))

    def send_v2(self, connection: Connection, command: Command) -> Command | None:
        """SEND_MESSAGE_V2: short header names."""
        return self._send(connection, command, decode_header(command, SendMessageV2Request))

    def send_batch(self, connection: Connection, command: Command) -> Command | None:
        """SEND_BATCH_MESSAGE: the body is a batch."""
        header = decode_header(command, SendMessageV2Request)
        topic_bytes = len(header.topic.encode())
        if topic_bytes > names.TOPIC_CHARACTERS_MAX:
            return self._refuse(command, ResponseCode.MESSAGE_ILLEGAL, f"message topic length too long {topic_bytes}")
        if header.topic.startswith(names.RETRY_PREFIX):
            remark = f"batch request does not support retry group {header.topic}"
            return self._refuse(command, ResponseCode.MESSAGE_ILLEGAL, remark)
        return self._send(connection, command, header, is_batch=True)

    # -- inside

    def _send(
        self, connection: Connection, command: Command, header: SendMessageRequest, *, is_batch: bool = False
    ) -> Command | None:
        if self._durability is not None and self._durability.is_full:
            return self._refuse(command, ResponseCode.SYSTEM_BUSY, OVERLOADED)
        topic = self._topics.get(header.topic)
        refusal = self._topic_refusal(header, topic)
        if refusal is None and topic is None:
            topic = self._topics.create_for_send(
                header.topic,
                template=header.default_topic,
                queue_count=header.default_topic_queue_nums,
                unit=bool(header.unit_mode),
            )
        if refusal is not None:
            return self._refuse(command, *refusal)
        if topic is None:
            remark = f"topic[{header.topic}] not exist, apply first please!{FAQ}"
            return self._refuse(command, ResponseCode.TOPIC_NOT_EXIST, remark)
        queue_count = max(topic.read_queue_nums, topic.write_queue_nums)
        if header.queue_id >= queue_count:
            remark = f"request queueId[{header.queue_id}] is illegal, {_describe(topic)} Producer: {connection.peer}"
            return self._refuse(command, ResponseCode.INVALID_PARAMETER, remark)
        properties = (header.properties or "").encode("utf-8", "replace")
        if properties and not properties.endswith(b"\x02"):
            properties += b"\x02"
        if _is_unusual(properties):
            properties, refusal = self._settle_unusual(properties)
            if refusal is not None:
                return self._refuse(command, *refusal)
        message = PutMessage(
            topic=header.topic,
            queue_id=header.queue_id if header.queue_id >= 0 else random.randrange(topic.write_queue_nums or 1),
            body=command.payload,
            properties=properties,
            flag=header.flag,
            sys_flag=header.sys_flag | (MULTI_TAGS if topic.topic_filter_type == "MULTI_TAG" else 0),
            born_timestamp=header.born_timestamp,
            born_host=connection.peer_host,
            store_host=self._identity.store_host,
            reconsume_times=header.reconsume_times or 0,
        )
        if header.topic.startswith(names.RETRY_PREFIX):
            refusal = self._divert_exhausted(header, message)
            if refusal is not None:
                return self._refuse(command, *refusal)
        return (
            self._store_batch(connection, command, message)
            if is_batch
            else self._store_one(connection, command, message)
        )

    def _topic_refusal(self, header: SendMessageRequest, topic: TopicConfig | None) -> _Refusal | None:
        """The checks that come before the topic is looked up, in the reference's order."""
        if topic is not None and topic.order and not self._settings.broker_permission & Permission.WRITE:
            return ResponseCode.NO_PERMISSION, f"the broker[{self._identity.ip}] sending message is forbidden"
        fault = names.topic_fault(header.topic) if topic is None else None
        if fault is not None:
            return ResponseCode.INVALID_PARAMETER, fault
        if header.topic in names.FORBIDDEN_TO_SEND:
            return ResponseCode.NO_PERMISSION, f"Sending message to topic[{header.topic}] is forbidden."
        return None

    def _settle_unusual(self, encoded: bytes) -> tuple[bytes, _Refusal | None]:
        """Refuse kinds of messages that cannot be kept yet; drop names that the broker stamps or reserves."""
        properties = decode_properties(encoded)
        if properties.get(property_names.TRANSACTION_PREPARED) == "true":
            remark = f"the broker[{self._identity.ip}] sending transaction message is forbidden"
            return encoded, (ResponseCode.NO_PERMISSION, remark)
        if any(name in properties for name in _TIMER_NAMES):
            remark = "accurate timer message is not enabled, timerWheelEnable is false"
            return encoded, (ResponseCode.SYSTEM_ERROR, remark)
        if _number(properties.get(property_names.DELAY)) > 0:
            remark = "delay levels are not supported by this broker: send the message without property DELAY"
            return encoded, (ResponseCode.SYSTEM_ERROR, remark)
        for name in (property_names.POP_CHECK_POINT, *self._stamps):
            properties.pop(name, None)
        return encode_properties(properties), None

    def _divert_exhausted(self, header: SendMessageRequest, message: PutMessage) -> _Refusal | None:
        """A retried message that was tried often enough goes to its group's dead-letter topic instead."""
        group_name = header.topic.removeprefix(names.RETRY_PREFIX)
        group = self._groups.get(group_name)
        if group is None:
            return ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group not exist, {group_name} {FAQ}"
        tries_max = group.retry_max_times if header.max_reconsume_times is None else header.max_reconsume_times
        if message.reconsume_times > tries_max:
            message.topic = names.dlq_topic(group_name)
            message.queue_id = 0
            self._topics.ensure(message.topic, 1)
        return None

    def _store_one(self, connection: Connection, command: Command, message: PutMessage) -> Command | None:
        if not message.body:
            return self._refuse(command, ResponseCode.MESSAGE_ILLEGAL, self._illegal_remark())
        unique_key = _unique_key_of(message.properties)
        if unique_key is None:
            unique_key = self._unique_keys.next(self._clock.now_ms())
            message.properties += encode_properties({property_names.UNIQ_KEY: unique_key})
        waits = _NO_WAIT not in message.properties
        message.properties += self._stamp_bytes
        put = self._store.put(message)
        header = SendMessageResponse(
            msg_id=offset_id(message.store_host, put.physical_offset),
            queue_id=message.queue_id,
            queue_offset=put.queue_offset,
            transaction_id=unique_key,
        )
        return self._answer(connection, command, put, header, waits=waits)

    def _store_batch(self, connection: Connection, command: Command, message: PutMessage) -> Command | None:
        waits = _NO_WAIT not in message.properties
        unique_key = _unique_key_of(message.properties)
        try:
            put = self._store.put_batch(message)
        except BodyError as error:
            return self._refuse(command, ResponseCode.MESSAGE_ILLEGAL, str(error))
        header = SendMessageResponse(
            msg_id=",".join(offset_id(message.store_host, offset) for offset in put.physical_offsets),
            queue_id=message.queue_id,
            queue_offset=put.queue_offset,
            transaction_id=unique_key,
        )
        return self._answer(connection, command, put, header, waits=waits)

    def _answer(
        self, connection: Connection, command: Command, put: PutResult, header: SendMessageResponse, *, waits: bool
    ) -> Command | None:
        if put.status is not PutStatus.OK:
            code, remark = _PUT_REFUSALS[put.status]
            remark = remark.format(body_bytes_max=self._body_bytes_max, reason=put.reason).rstrip()
            return self._refuse(command, code, remark)
        if self._durability is None or not waits or self._store.durable_offset >= put.end_offset:
            if self._durability is not None:
                self._store.request_flush()
            return reply(command, header=header, fields=self._answer_fields)
        self._durability.hold(put.end_offset, _Late(self, connection, command, header))
        self._store.request_flush()
        return None

    def _refuse(self, command: Command, code: int, remark: str) -> Command:
        return reply(command, code, remark, fields=self._answer_fields)

    def _illegal_remark(self) -> str:
        return _ILLEGAL.format(body_bytes_max=self._body_bytes_max)

    def answer_late(
        self, connection: Connection, command: Command, header: SendMessageResponse, outcome: Outcome, reason: str
    ) -> None:
        """Send the answer that waited for the disk."""
        if command.is_one_way:
            return
        if outcome is Outcome.FAILED:
            connection.send(self._refuse(command, ResponseCode.SYSTEM_ERROR, reason))
            return
        code = ResponseCode.SUCCESS if outcome is Outcome.DURABLE else ResponseCode.FLUSH_DISK_TIMEOUT
        connection.send(reply(command, code, header=header, fields=self._answer_fields))


@dataclass(slots=True)
class _Late:
    """One answer that waits for the disk, as `Durability` releases it."""

    handlers: SendHandlers
    connection: Connection
    command: Command
    header: SendMessageResponse

    def __call__(self, outcome: Outcome, reason: str) -> None:
        self.handlers.answer_late(self.connection, self.command, self.header, outcome, reason)


def _unique_key_of(properties: bytes) -> str | None:
    """The unique key in a property string."""
    found = find_property(properties, _UNIQ_KEY)
    return None if found is None else found.decode("utf-8", "replace")


def _is_unusual(properties: bytes) -> bool:
    """Whether a property string needs decoding before it is stored.

    That is so for kinds of messages that are refused, names the broker itself stamps, and empty values. Spelled out,
    because it runs for every message: a loop over the names costs five times as much.
    """
    return (
        b"DELAY\x01" in properties
        or b"TRAN_MSG\x01" in properties
        or b"TIMER_DE" in properties
        or b"POP_CK\x01" in properties
        or b"CLUSTER\x01" in properties
        or b"MSG_REGION\x01" in properties
        or b"TRACE_ON\x01" in properties
        or b"\x01\x02" in properties
    )


def _number(text: str | None) -> int:
    """A property as a number, 0 when it is none."""
    return int(text) if text is not None and text.lstrip("-").isdecimal() and len(text) < 10 else 0


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
