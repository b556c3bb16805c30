"""Conversion of protobuf messages to properties of stored records, and back (``GrpcConverter``,
``SendMessageActivity``).

Source: grpc.md §6, §8.1, §17.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rmqkit.errors import BodyError, HeaderError
from rmqkit.protocol import names
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.compression import decompress
from rmqkit.protocol.ids import (
    NORMAL_TOPIC,
    RETRY_TOPIC_V1,
    RETRY_TOPIC_V2,
    OrderKey,
    PopHandle,
    PopQueue,
    decode_lite_counts,
    decode_order_counts,
    decode_pop_handle,
    decode_start_offsets,
    encode_pop_handle,
    offset_id,
)
from rmqkit.protocol.names import RETRY_PREFIX, pop_retry_topic
from rmqkit.protocol.properties import decode_properties, java_hash
from rmqkit.protocol.record import COMPRESSED, COMPRESSION_MASK, Record, host_text
from rmqkit.protocol.schemas.lite import PopLiteMessageResponse
from rmqkit.protocol.schemas.pop import PopMessageResponse
from rmqkit.proxy.schema.checks import HIDDEN_IN_LITE, RESERVED_AND_HIDDEN, duration_ms, timestamp_ms
from rmqkit.proxy.schema.messages import message_class
from rmqkit.proxy.schema.status import Code, Refused

__all__ = [
    "Handle",
    "Popped",
    "handles_of",
    "jump_hash",
    "lite_handles_of",
    "lite_offset",
    "message_of",
    "properties_of",
    "read_handle",
    "type_of",
    "zlib_of",
]

TRACE_CONTEXT = "TRACE_CONTEXT"
_BORN_HOST = "__BORNHOST"
_BORN_TIMESTAMP = "BORN_TIMESTAMP"
_IDENTITY, _GZIP = 1, 2
_MD5 = 2
DELIVERED_BYTES_MAX = 16 << 20
"""Maximum size of a body after decompression. A larger body is delivered compressed, as it is stored."""
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_HEAD_BYTES = 10
_GZIP_END = struct.Struct("<II")
_ZLIB_HEAD = b"\x78\x9c"
_TYPES = {"NORMAL": 1, "FIFO": 2, "DELAY": 3, "TRANSACTION": 4, "LITE": 5, "PRIORITY": 6}
TRANSACTION_TYPE = 4
_DELAYS = (property_names.DELAY, property_names.TIMER_DELIVER_MS, "TIMER_DELAY_MS", "TIMER_DELAY_SEC")

_Message = message_class("Message")


def properties_of(message: Any, born_host: str) -> dict[str, str]:
    """Return the properties of the stored record of a checked message, in the reference's order."""
    system, topic = message.system_properties, message.topic.name
    properties = {property_names.UNIQ_KEY: system.message_id}
    if system.message_type == TRANSACTION_TYPE:
        properties[property_names.TRANSACTION_PREPARED] = "true"
        if system.HasField("orphaned_transaction_recovery_duration"):
            seconds = duration_ms(system.orphaned_transaction_recovery_duration, Code.BAD_REQUEST) // 1000
            properties[property_names.CHECK_IMMUNITY_SECONDS] = str(seconds)
    if system.HasField("delivery_timestamp"):
        deliver_ms = timestamp_ms(system.delivery_timestamp, Code.ILLEGAL_DELIVERY_TIME)
        properties[property_names.TIMER_DELIVER_MS] = str(deliver_ms)
    properties[property_names.PRODUCER_GROUP] = topic
    properties[property_names.RECONSUME_TIME] = str(max(0, system.delivery_attempt))
    if system.tag:
        properties[property_names.TAGS] = system.tag
    if system.HasField("message_group") and system.message_group:
        properties[property_names.SHARDING_KEY] = system.message_group
    if system.HasField("priority"):
        properties[property_names.PRIORITY] = str(system.priority)
    if system.lite_topic:
        properties[property_names.LITE_TOPIC] = system.lite_topic
    if system.trace_context:
        properties[TRACE_CONTEXT] = system.trace_context
    properties[_BORN_HOST] = system.born_host.strip() or born_host
    properties[_BORN_TIMESTAMP] = str(timestamp_ms(system.born_timestamp, Code.BAD_REQUEST))
    if keys := " ".join(filter(None, system.keys)):
        properties[property_names.KEYS] = keys
    # Every reader of the property string drops an entry without a value.
    properties.update({name: value for name, value in message.user_properties.items() if name and value})
    return properties


def type_of(properties: Mapping[str, str]) -> str:
    """Return the type of a message, derived from its properties as in the reference."""
    if property_names.TRANSACTION_PREPARED in properties:
        return "TRANSACTION"
    if any(name in properties for name in _DELAYS):
        return "DELAY"
    if property_names.SHARDING_KEY in properties:
        return "FIFO"
    if property_names.PRIORITY in properties:
        return "PRIORITY"
    return "LITE" if property_names.LITE_TOPIC in properties else "NORMAL"


def jump_hash(group: str, count: int) -> int:
    """Return the index, below ``count``, of the queue of a message group or a lite topic (Guava's ``consistentHash`` of
    Java's ``hashCode``)."""
    assert count > 0, "the topic has a queue"
    # The mask extends the sign to 64 bits, like Java's conversion of an int to a long.
    state, candidate = java_hash(group) & 0xFFFFFFFFFFFFFFFF, 0
    while True:
        state = (2862933555777941757 * state + 1) & 0xFFFFFFFFFFFFFFFF
        # Use doubles, like the reference: exact numbers would sometimes choose another queue, and split a group.
        following = int((candidate + 1) / (((state >> 33) + 1) / (1 << 31)))
        if following >= count:
            return candidate
        candidate = following


@dataclass(frozen=True, slots=True)
class Handle:
    """A receipt handle: POP's handle and the record's log offset, -1 if the handle has none.

    ``lite_topic``: the lite topic of the message, or an empty text. The queue offset is the message's number there.
    """

    pop: PopHandle
    physical_offset: int
    lite_topic: str = ""

    @property
    def expires_ms(self) -> int:
        """Time at which the message is redelivered, in ms since the epoch."""
        return self.pop.pop_time + self.pop.invisible_time

    @property
    def offset(self) -> int:
        """The message's offset in its queue."""
        assert self.pop.queue_offset is not None, "the handle has a queue offset"
        return self.pop.queue_offset

    @property
    def text(self) -> str:
        """The text of the handle, as sent to clients."""
        return f"{self.extra_info} {_LITE_MARK}{self.lite_topic}" if self.lite_topic else self.extra_info

    @property
    def extra_info(self) -> str:
        """The text of the handle, as sent to brokers, which get the lite topic in a field of its own."""
        return f"{encode_pop_handle(self.pop)} {self.physical_offset}"

    def topic_of(self, topic: str, group: str) -> str:
        """Return the topic from which the message was popped: ``topic``, or the group's retry topic of ``topic``."""
        separator = {RETRY_TOPIC_V1: "_", RETRY_TOPIC_V2: "+"}.get(self.pop.retry)
        return topic if separator is None else pop_retry_topic(group, topic, separator)


HANDLE_CHARACTERS_MAX = 512
_LITE_MARK = "$"
"""The first character of a handle's lite topic. No number begins with it, so older handles cannot be confused."""
_LITE_WORDS = 10


def read_handle(text: str) -> Handle:
    """Parse a client's handle. Clients may send any text, so the caller must check that the named message exists."""
    try:
        if len(text) > HANDLE_CHARACTERS_MAX:
            raise HeaderError(f"a receipt handle of {len(text)} characters")
        pop = decode_pop_handle(text)
        words, lite_topic = text.split(" "), ""
        if len(words) == _LITE_WORDS and words[-1].startswith(_LITE_MARK):
            lite_topic = words.pop()[1:]
            if (fault := names.lite_topic_fault(lite_topic)) is not None:
                raise HeaderError(f"receipt handle with lite topic {lite_topic!r}: {fault}")
        # Ten words: local proxies of 5.4.0 add a 0 before the physical offset.
        physical_offset = int(words[-1]) if len(words) in (9, 10) else -1
        if pop.queue_offset is None or len(words) > 10:
            raise HeaderError(f"receipt handle of {len(words)} words: it must have 8 to 10")
        if pop.queue_id < 0 or pop.queue_offset < 0 or pop.check_point_offset < 0:
            raise HeaderError("receipt handle with a negative queue or offset")
        if not -1 <= physical_offset < 1 << 63:
            raise HeaderError("receipt handle with a place beyond the log")
    except (HeaderError, ValueError) as error:
        raise Refused(Code.INVALID_RECEIPT_HANDLE, str(error)) from None
    return Handle(pop, physical_offset, lite_topic)


@dataclass(slots=True)
class Popped:
    """One message of a pop's answer."""

    record: Record
    properties: dict[str, str]
    handle: Handle
    deliveries: int
    """Number of this delivery, from 1."""


def handles_of(records: Sequence[Record], header: PopMessageResponse, broker_name: str) -> list[Popped]:
    """Return the messages of a pop's answer with their handles. Raises HeaderError: the answer is not valid."""
    starts = decode_start_offsets(header.start_offset_info or "")
    counts = decode_order_counts(header.order_count_info or "")
    popped = []
    for record in records:
        properties = decode_properties(record.properties)
        own = properties.get(property_names.POP_CHECK_POINT)
        retry, queue_id, offset = _retry_mark(record.topic), record.queue_id, record.queue_offset
        if own is not None:
            handle = decode_pop_handle(own)  # message of a retry topic, whose records the broker rewrites
            if handle.queue_offset is None:
                raise HeaderError(f"POP handle {own!r} has no offset")
        else:
            handle = PopHandle(
                check_point_offset=starts.get(PopQueue(retry, queue_id), offset),
                pop_time=header.pop_time,
                invisible_time=header.invisible_time,
                revive_queue_id=header.revive_qid,
                retry=retry,
                broker_name=broker_name,
                queue_id=queue_id,
                queue_offset=offset,
            )
        counted = counts.get(OrderKey(retry, queue_id, offset)) or counts.get(OrderKey(retry, queue_id)) or 0
        deliveries = (counted or record.reconsume_times) + 1
        popped.append(Popped(record, properties, Handle(handle, record.physical_offset), deliveries))
    return popped


def lite_handles_of(
    records: Sequence[Record], header: PopLiteMessageResponse, parent: str, broker_name: str
) -> list[Popped]:
    """Return the messages of a lite pop's answer with their handles. Raises HeaderError: the answer is not valid."""
    counts = decode_lite_counts(header.order_count_info or "")
    popped = []
    for place, record in enumerate(records):
        properties = decode_properties(record.properties)
        lite_topic = properties.get(property_names.LITE_TOPIC, "")
        offset = lite_offset(parent, properties)
        if offset is None:
            raise HeaderError(f"message {record.physical_offset} of lite pop of topic {parent} is in no lite topic")
        handle = PopHandle(
            check_point_offset=offset,
            pop_time=header.pop_time,
            invisible_time=header.invisible_time,
            revive_queue_id=header.revive_qid,
            retry=NORMAL_TOPIC,
            broker_name=broker_name,
            queue_id=0,
            queue_offset=offset,
        )
        deliveries = counts[place] + 1 if place < len(counts) else 1
        popped.append(Popped(record, properties, Handle(handle, record.physical_offset, lite_topic), deliveries))
    return popped


def lite_offset(parent: str, properties: Mapping[str, str]) -> int | None:
    """Return the number of a message in its lite topic; None if it is in no lite topic."""
    light = names.lite_queue(parent, properties.get(property_names.LITE_TOPIC, ""))
    lights = properties.get(property_names.INNER_MULTI_DISPATCH, "").split(",")
    offsets = properties.get(property_names.INNER_MULTI_QUEUE_OFFSET, "").split(",")
    if light not in lights or len(lights) != len(offsets) or not (text := offsets[lights.index(light)]).isdecimal():
        return None
    return int(text)


def _retry_mark(topic: str) -> str:
    if not topic.startswith(RETRY_PREFIX):
        return NORMAL_TOPIC
    return RETRY_TOPIC_V2 if "+" in topic else RETRY_TOPIC_V1


def message_of(
    record: Record,
    properties: Mapping[str, str],
    topic: str,
    *,
    handle: str | None = None,
    deliveries: int = 1,
    body_bytes_max: int = DELIVERED_BYTES_MAX,
    queue_offset: int | None = None,
) -> Any:
    """Convert a stored record to the message for a client. ``topic``: the topic in the client's request.
    ``queue_offset``: the message's number in its lite topic; None for its offset in the queue.

    A compressed body is decompressed. Exceptions are gzip bodies, which clients can decompress, and bodies that would
    have more than ``body_bytes_max`` bytes.
    """
    namespace, found, name = topic.partition("%")
    message = _Message()
    if found and namespace and not topic.startswith((names.RETRY_PREFIX, names.DLQ_PREFIX)):
        message.topic.resource_namespace, message.topic.name = namespace, name
    else:
        message.topic.name = topic
    lite_topic = properties.get(property_names.LITE_TOPIC)
    hidden = HIDDEN_IN_LITE if lite_topic else RESERVED_AND_HIDDEN
    message.user_properties.update({name: value for name, value in properties.items() if name not in hidden})
    body, encoding = _body(record, body_bytes_max)
    message.body = body
    system = message.system_properties
    if tag := properties.get(property_names.TAGS):
        system.tag = tag
    system.keys.extend([key for key in properties.get(property_names.KEYS, "").split(" ") if key])
    system.message_id = properties.get(property_names.UNIQ_KEY) or offset_id(record.store_host, record.physical_offset)
    system.body_digest.type = _MD5
    system.body_digest.checksum = hashlib.md5(body, usedforsecurity=False).hexdigest().upper()
    system.body_encoding = encoding
    system.message_type = _TYPES.get(type_of(properties), 1)
    _set_ms(system.born_timestamp, record.born_timestamp)
    system.born_host = properties.get(_BORN_HOST) or host_text(record.born_host)
    _set_ms(system.store_timestamp, record.store_timestamp)
    system.store_host = host_text(record.store_host)
    deliver = properties.get(property_names.TIMER_DELIVER_MS, "")
    if deliver.isdecimal() and len(deliver) < 16:
        _set_ms(system.delivery_timestamp, int(deliver))
    if handle is not None:
        system.receipt_handle = handle
    system.queue_id = record.queue_id
    system.queue_offset = record.queue_offset if queue_offset is None else queue_offset
    if lite_topic:
        system.lite_topic = lite_topic
    system.delivery_attempt = deliveries
    if group := properties.get(property_names.SHARDING_KEY):
        system.message_group = group
    if trace_context := properties.get(TRACE_CONTEXT):
        system.trace_context = trace_context
    priority = properties.get(property_names.PRIORITY, "")
    if priority.isdecimal() and len(priority) < 10:
        system.priority = int(priority)
    return message


def _body(record: Record, bytes_max: int) -> tuple[bytes, int]:
    """Return the delivered body and its encoding; a body that only remoting clients can read is decompressed."""
    if not record.sys_flag & COMPRESSED:
        return record.body, _IDENTITY
    if not record.sys_flag & COMPRESSION_MASK and record.body[:2] == _GZIP_MAGIC:
        return record.body, _GZIP
    try:
        return decompress(record.body, record.sys_flag, bytes_max=bytes_max), _IDENTITY
    except BodyError:
        return record.body, _GZIP  # as in the reference; the consumer detects the damage


def zlib_of(body: bytes) -> bytes | None:
    """Convert a gzip body to zlib for remoting clients: the same deflated bytes with another head and end.
    Return None if the body is not a gzip file with one member, or would be too long for clients. The conversion takes
    as long as a decompression."""
    # SDKs write a gzip head without name and comment, which has a fixed length.
    if len(body) < _GZIP_HEAD_BYTES + _GZIP_END.size or body[:3] != _GZIP_MAGIC + b"\x08" or body[3]:
        return None
    deflated = body[_GZIP_HEAD_BYTES : -_GZIP_END.size]
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        plain = stream.decompress(deflated, DELIVERED_BYTES_MAX)
    except zlib.error:
        return None
    crc, size = _GZIP_END.unpack(body[-_GZIP_END.size :])
    if not stream.eof or stream.unused_data or (zlib.crc32(plain), len(plain)) != (crc, size):
        return None
    return _ZLIB_HEAD + deflated + zlib.adler32(plain).to_bytes(4, "big")


def _set_ms(timestamp: Any, ms: int) -> None:
    timestamp.seconds, rest = divmod(ms, 1000)
    timestamp.nanos = rest * 1_000_000
