"""Messages for programs: messages to send (`Message`) and messages from stored records (`ReceivedMessage`).

A stored record becomes one message. A record with an inner batch becomes several messages: message ``i`` has the fields
of the record and ``queue_offset + i``. The body is decompressed if sysFlag marks a compression. The message id is
UNIQ_KEY, or the offset message id if UNIQ_KEY is missing.
Source: remoting.md §7.1.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict, TypeVar, cast

from msgspec import Struct, field

from rmqkit.errors import BodyError
from rmqkit.protocol import properties as names
from rmqkit.protocol.bodies import Body, decoder_of
from rmqkit.protocol.compression import decompress
from rmqkit.protocol.ids import offset_id
from rmqkit.protocol.names import lite_topic_fault
from rmqkit.protocol.properties import RESERVED_NAMES, SETTABLE_NAMES, decode_properties
from rmqkit.protocol.record import COMPRESSED, INNER_BATCH, NEED_UNWRAP, Record, decode_batch, host_text, iter_records
from rmqkit.times import Duration, Moment, duration_ms, moment_ms, moment_of

T = TypeVar("T")
_YEAR_2001_MS = 978_307_200_000
_REFUSED_NAMES = RESERVED_NAMES - SETTABLE_NAMES


class Message(Struct, kw_only=True):
    """A message to send.

    Attributes:
        topic: the topic to send to.
        body: the content, at least one byte. The broker has a limit (4 MiB by default). A msgspec Struct, a dataclass
            or a pydantic model is sent as JSON.
        tags: one tag; consumers can filter by it.
        keys: words for finding the message later.
        properties: names and values of your application, as text. Most names of RocketMQ are refused.
        flag: a number of your application; brokers do not use it.
        wait_store: False lets the broker answer before the message is flushed and replicated.
        sharding_key: the key by which ordered sends choose the queue.
        lite_topic: the lite topic below the topic, whose ``message.type`` is LITE: 1 to 64 letters, digits, ``-`` and
            ``_``. All messages of a lite topic are in order. You cannot combine it with a priority or a delay.
        priority: 0 or higher. The message goes to the queue with this number, or to the last queue. A consumer that
            pops a topic with ``message.type=PRIORITY`` receives the highest priority first. You cannot combine it
            with a sharding key, a delay or a transaction.
        delay_level: the delay level of the broker, 1 to 18 (``1s 5s 10s 30s 1m … 2h`` by default); 0 means no delay.
        delay: deliver the message this long after the broker has received it: seconds or a `timedelta`.
        deliver_at: deliver the message at this time, or immediately if the time is past: a `datetime` with a time zone,
            or seconds since the epoch. Use at most one of the three delays.
        msg_id: the unique key. By default, every send creates a new key. If you repeat a send that may have succeeded,
            use the same key.
    """

    topic: str
    body: Body
    tags: str | None = None
    keys: Sequence[str] = ()
    properties: dict[str, str] = field(default_factory=dict)
    flag: int = 0
    wait_store: bool = True
    sharding_key: str | None = None
    lite_topic: str | None = None
    priority: int | None = None
    delay_level: int = 0
    delay: Duration | None = None
    deliver_at: Moment | None = None
    msg_id: str | None = None

    @property
    def is_delayed(self) -> bool:
        """Return True if the message has a delay."""
        return bool(self.delay_level) or self.delay is not None or self.deliver_at is not None

    @property
    def goes_alone(self) -> bool:
        """Return True if the message cannot be in a batch, because brokers ignore delays and priorities in batches."""
        return self.is_delayed or self.priority is not None or names.PRIORITY in self.properties

    def wire_properties(self) -> dict[str, str]:
        """Return all properties to send, including RocketMQ's own.
        Raises ValueError: a property of the application has a reserved name, a value is not text, a key contains a
        blank, a delay is negative, there is more than one delay, the name of a lite topic is not allowed, or a priority
        or a lite topic cannot be combined."""
        taken = _REFUSED_NAMES.intersection(self.properties)
        if taken:
            raise ValueError(f"property name {min(taken)} belongs to RocketMQ: choose another")
        merged = dict(self.properties)
        _check_text(self.properties, self.keys, self.tags, self.sharding_key)
        if self.keys:
            # Type checkers accept a str as a Sequence[str]. Without this line, its letters would become the keys.
            keys = (self.keys,) if isinstance(self.keys, str) else self.keys
            if any(not key or " " in key for key in keys):
                raise ValueError(f"keys {list(keys)} must be words without blanks: a blank separates them")
            merged[names.KEYS] = " ".join(keys)
        if self.tags:
            merged[names.TAGS] = self.tags
        if self.sharding_key is not None:
            merged[names.SHARDING_KEY] = self.sharding_key
        if self.lite_topic is not None:
            merged[names.LITE_TOPIC] = self._lite_topic_text(self.lite_topic)
        if self.priority is not None:
            merged[names.PRIORITY] = self._priority_text(self.priority)
        if self.is_delayed:
            merged.update([self._delay()])
        merged[names.WAIT] = "true" if self.wait_store else "false"
        return merged

    def _lite_topic_text(self, lite_topic: str) -> str:
        fault = lite_topic_fault(lite_topic)
        if fault is not None:
            raise ValueError(f"lite_topic={lite_topic!r}: {fault}")
        if self.is_delayed or self.priority is not None:
            raise ValueError("a message of a lite topic has no delay and no priority: leave them out")
        return lite_topic

    def _priority_text(self, priority: int) -> str:
        if not 0 <= priority < 1 << 31:
            raise ValueError(f"priority={priority} must be from 0 to {(1 << 31) - 1}")
        if self.is_delayed or self.sharding_key is not None:
            raise ValueError("a message with a delay or a sharding key has no priority: leave one of them out")
        return str(priority)

    def _delay(self) -> tuple[str, str]:
        """Return the property with the delivery time of a delayed message."""
        match self.delay_level, self.delay, self.deliver_at:
            case int(level), None, None if level > 0:
                return names.DELAY, str(level)
            case 0, delay, None if delay is not None:
                return names.TIMER_DELAY_MS, str(round(duration_ms(delay, "delay")))
            case 0, None, at if at is not None:
                at_ms = moment_ms(at, "deliver_at")
                if at_ms < _YEAR_2001_MS:  # almost always a number in another unit
                    raise ValueError(f"deliver_at is {at!r}, before 2001: give a datetime, or seconds since the epoch")
                return names.TIMER_DELIVER_MS, str(at_ms)
        found = f"delay_level={self.delay_level}, delay={self.delay}, deliver_at={self.deliver_at}"
        raise ValueError(f"{found}: give one, not negative")


class MessageFields(TypedDict, total=False):
    """The fields of a `Message` except topic and body, as keyword arguments of send methods."""

    tags: str | None
    keys: Sequence[str]
    properties: dict[str, str]
    flag: int
    wait_store: bool
    sharding_key: str | None
    lite_topic: str | None
    priority: int | None
    delay_level: int
    delay: Duration | None
    deliver_at: Moment | None
    msg_id: str | None


def message_of(message: Message | str, body: Body | None, fields: MessageFields) -> Message:
    """Return the message to send from the arguments of a method: a `Message`, or a topic with a body and other fields.
    Raises TypeError: the arguments have neither form."""
    if isinstance(message, str):
        if body is None:
            raise TypeError(f"the message for topic {message!r} has no body: give it as the second argument")
        return Message(topic=message, body=body, **fields)
    if not isinstance(message, Message):
        raise TypeError(f"{message!r} is not a message: give a topic and a body, or a Message")
    if body is not None or fields:
        raise TypeError("a Message has its body and its fields already: give a topic and a body, or a Message")
    return message


def copied(message: ReceivedMessage) -> dict[str, Any]:
    """Return the `Message` fields for a copy of a stored message. The caller adds topic and unique key. All other
    properties of RocketMQ are omitted."""
    return {
        "body": message.body,
        "tags": message.tags,
        "keys": message.keys,
        "properties": names.copied_properties(message.properties),
        "flag": message.flag,
        "sharding_key": message.properties.get(names.SHARDING_KEY),
    }


class ReceivedMessage(Struct, kw_only=True):
    """A stored message, as consumers receive it.

    Attributes:
        topic: the topic of the message.
        broker_name: the name of the broker that stores it; None if the message was read from a store directory.
        queue_id: the number of its queue on this broker.
        queue_offset: the position in the queue, counted in messages.
        msg_id: the unique key from the sender, or the offset message id if the sender set no key.
        offset_msg_id: the id from the broker. It contains the address of the broker and the position in its log.
        body: the decompressed content.
        properties: all properties, including RocketMQ's own. `tags` and `keys` read them.
        flag: the number that the sender set.
        sys_flag: the flags of the record, with the compressed bit cleared.
        body_crc: the CRC32 of the body as stored.
        store_size: the size of the record in the log, in bytes.
        physical_offset: the position in the log of the broker, in bytes; the same for all messages of an inner batch.
        born_timestamp: the time of the send, by the clock of the sender, in ms since the epoch.
        born_host: the address of the sender, ``ip:port``.
        store_timestamp: the time when the broker stored it, in ms since the epoch.
        store_host: the address of the broker, ``ip:port``.
        reconsume_times: the number of redeliveries after a failure; 0 at the first delivery.
        prepared_transaction_offset: the position of the half message of a transaction message; otherwise 0.
    """

    topic: str
    broker_name: str | None
    queue_id: int
    queue_offset: int
    msg_id: str
    offset_msg_id: str
    body: bytes
    properties: dict[str, str]
    flag: int
    sys_flag: int
    body_crc: int
    store_size: int
    physical_offset: int
    born_timestamp: int
    born_host: str
    store_timestamp: int
    store_host: str
    reconsume_times: int
    prepared_transaction_offset: int

    @property
    def born_at(self) -> datetime:
        """The time of the send in UTC, by the clock of the sender. Raises ValueError: the time is out of range."""
        return moment_of(self.born_timestamp)

    @property
    def stored_at(self) -> datetime:
        """The time in UTC when the broker stored the message. Raises ValueError: the time is out of range."""
        return moment_of(self.store_timestamp)

    @property
    def delivery_attempt(self) -> int:
        """The number of this delivery, starting at 1: ``reconsume_times`` + 1."""
        return self.reconsume_times + 1

    @property
    def tags(self) -> str | None:
        """The tag of the message, or None if it has no tag."""
        return self.properties.get(names.TAGS)

    @property
    def lite_topic(self) -> str | None:
        """The lite topic of the message, or None."""
        return self.properties.get(names.LITE_TOPIC)

    @property
    def keys(self) -> list[str]:
        """The words for finding the message."""
        return [key for key in self.properties.get(names.KEYS, "").split(" ") if key]

    def body_as(self, kind: type[T]) -> T:
        """Read the body from JSON as a value of a type: a msgspec Struct, a dataclass, a pydantic model, or another
        type that msgspec or pydantic supports.
        Raises BodyMismatch: the body does not fit. Raises TypeError: the type cannot be read from JSON."""
        value: T = decoder_of(cast("Hashable", kind))(self.body)
        return value


def _check_text(properties: Mapping[Any, Any], keys: Sequence[Any], tags: object, sharding_key: object) -> None:
    """Check that all texts are str. A program without a type checker may pass a number, which consumers would receive
    as text.
    Raises ValueError: a value is not text."""
    for name, value in properties.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ValueError(f"property {name!r} is {value!r}: names and values must be text (str)")
    if not all(isinstance(key, str) for key in keys):
        raise ValueError(f"keys {list(keys)} must be text (str)")
    for what, text in (("tags", tags), ("sharding_key", sharding_key)):
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{what} is {text!r}: it must be text (str)")


def read_messages(body: bytes | memoryview, broker_name: str | None = None) -> list[ReceivedMessage]:
    """Return the messages in a pull, query or view body.
    Raises BodyError: a body cannot be decompressed, an inner batch is damaged, or bytes after the last record
    remain."""
    return [message for record in records_of(body) for message in messages_of_record(record, broker_name)]


def records_of(body: bytes | memoryview) -> Iterator[Record]:
    """Yield the records of a response. Raises BodyError: the bytes after the last record are not a record."""
    size = 0
    for record in iter_records(body):
        yield record
        size += record.size
    if size != len(body):
        raise BodyError(f"a response of {len(body)} bytes has no record at byte {size}")


def messages_of_record(record: Record, broker_name: str | None = None) -> Iterator[ReceivedMessage]:
    """Yield the message of a record, or each message of an inner batch. Raises BodyError: see `read_messages`."""
    # Decompress before the batch is split: the flag in sysFlag covers the whole body, and entries have no flag.
    body = decompress(record.body, record.sys_flag)
    # Require both bits, like Java's clients: without NEED_UNWRAP the program gets the body in one piece.
    if record.sys_flag & INNER_BATCH and record.sys_flag & NEED_UNWRAP:
        for i, entry in enumerate(decode_batch(body)):
            yield _message(record, broker_name, i, entry.body, entry.properties, entry.flag)
    else:
        yield _message(record, broker_name, 0, body, record.properties, record.flag)


def _message(
    record: Record, broker_name: str | None, index: int, body: bytes, property_string: bytes, flag: int
) -> ReceivedMessage:
    properties = decode_properties(property_string)
    offset_msg_id = offset_id(record.store_host, record.physical_offset)
    return ReceivedMessage(
        topic=record.topic,
        broker_name=broker_name,
        queue_id=record.queue_id,
        queue_offset=record.queue_offset + index,
        msg_id=properties.get(names.UNIQ_KEY) or offset_msg_id,
        offset_msg_id=offset_msg_id,
        body=body,
        properties=properties,
        flag=flag,
        sys_flag=record.sys_flag & ~COMPRESSED,
        body_crc=record.body_crc,
        store_size=record.size,
        physical_offset=record.physical_offset,
        born_timestamp=record.born_timestamp,
        born_host=host_text(record.born_host),
        store_timestamp=record.store_timestamp,
        store_host=host_text(record.store_host),
        reconsume_times=record.reconsume_times,
        prepared_transaction_offset=record.prepared_transaction_offset,
    )
