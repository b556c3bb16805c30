"""The encoder of messages. It checks messages, assigns unique keys, compresses bodies, and creates the content of
requests.

=================  ==============================================================================================
check              rule
=================  ==============================================================================================
topic              legal characters, at most 127 of them, not a topic to which only the broker writes
body               bytes, at least one, at most ``maxMessageSize`` (for a batch: all entries together); a value of a
                   type of the program becomes JSON (`rmqkit.protocol.bodies`)
delay level        at most ``delay_level_max``
properties         text, names not reserved, no separator characters, at most 32 767 bytes encoded
batch              one topic, one ``wait_store``, no retry topic, no delays, no priorities; never compressed
=================  ==============================================================================================

The functions have no side effects: the caller passes the unique key and the time. Source: behaviour.md §7.3, §7.6,
§7.8; remoting.md §7.2, §7.3, §7.5.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from rmqkit.client.observe.hooks import SendOutcome
from rmqkit.client.runtime.settings import ProducerSettings
from rmqkit.errors import MessageIllegal, NotARequest
from rmqkit.protocol import properties as names
from rmqkit.protocol.bodies import encode_body
from rmqkit.protocol.compression import Compression, compress
from rmqkit.protocol.message import Message, ReceivedMessage
from rmqkit.protocol.names import FORBIDDEN_TO_SEND, RETRY_PREFIX, retry_topic, topic_fault, with_namespace
from rmqkit.protocol.properties import PROPERTIES_BYTES_MAX, encode_properties
from rmqkit.protocol.record import COMPRESSED, BatchEntry, encode_batch

_ZLIB_LEVEL_MAX = 9
# Programs send to few topics. Checking every character for each message would cost more than all other steps.
_topic_fault = functools.lru_cache(maxsize=1024)(topic_fault)
_FIRST_RETRY_LEVEL = 3
_DEAD_LETTER_BYTES_MAX = PROPERTIES_BYTES_MAX - 512  # brokers add further properties
_REPLY = "reply"
_OF_ONE_DELIVERY = (
    names.MIN_OFFSET,
    names.MAX_OFFSET,
    names.CONSUME_START_TIME,
    names.TRANSACTION_PREPARED,
    names.POP_CHECK_POINT,
    names.FIRST_POP_TIME,
)


class EncodedMessage(Struct, gc=False):
    """A message or a batch in the form of send requests.
    ``msg_id`` is the unique key; for a batch, the keys of its messages, joined by commas. ``properties`` is the
    property string. ``reconsume_times``, ``retries_max`` and ``born_ms`` (0 means now) are for messages that are sent
    again. If there are hooks, ``on_end`` is called once with ``outcome`` at the end of the send."""

    topic: str
    body: bytes
    properties: str
    msg_id: str
    flag: int = 0
    sys_flag: int = 0
    is_batch: bool = False
    is_reply: bool = False
    reconsume_times: int = 0
    retries_max: int | None = None
    born_ms: int = 0
    on_end: Callable[[SendOutcome], None] | None = None
    outcome: SendOutcome | None = None


def encode_message(
    message: Message, unique_key: str, settings: ProducerSettings, own: Mapping[str, str] | None = None
) -> EncodedMessage:
    """Encode one message. ``own`` are properties of RocketMQ that request something from the broker.
    Raises MessageIllegal: the message breaks a rule above."""
    check_topic(message.topic)
    if message.delay_level > settings.delay_level_max:
        raise MessageIllegal(
            f"message for topic {message.topic} has delay_level {message.delay_level}: brokers have levels up to "
            f"{settings.delay_level_max}, give a delay for any time, or set delay_level_max to their highest level"
        )
    body = _checked_body(message, settings.limits.message_bytes_max)
    properties = _properties(message, unique_key, own)
    sys_flag = 0
    # Compress after the size check: brokers limit the stored body, and clients limit the body that handlers get.
    if len(body) >= settings.compression.body_bytes_min:
        body, sys_flag = _compressed(body, settings)
    return EncodedMessage(message.topic, body, properties.decode(), unique_key, message.flag, sys_flag)


def encode_messages(
    messages: Sequence[Message],
    unique_keys: Sequence[str],
    batch_key: str,
    settings: ProducerSettings,
    own: Mapping[str, str] | None = None,
) -> EncodedMessage:
    """Encode a batch. ``batch_key`` is the unique key of the request itself, ``own`` are properties of each message.
    Raises MessageIllegal: a message breaks a rule above, or the messages cannot be in one batch."""
    if not messages:
        raise MessageIllegal("a batch has no messages: give at least one")
    first = messages[0]
    for message in messages:
        if message.lite_topic != first.lite_topic:
            raise MessageIllegal(
                f"a batch has messages of one lite topic: found {message.lite_topic} besides {first.lite_topic}"
            )
        if message.topic != first.topic or message.wait_store != first.wait_store:
            raise MessageIllegal(
                f"a batch has one topic and one wait_store: found {message.topic}, {message.wait_store} "
                f"besides {first.topic}, {first.wait_store}"
            )
    entries = [batch_entry(message, key, settings, own) for message, key in zip(messages, unique_keys, strict=True)]
    return encode_entries(first, entries, unique_keys, batch_key, settings)


def batch_entry(
    message: Message, unique_key: str, settings: ProducerSettings, own: Mapping[str, str] | None = None
) -> BatchEntry:
    """Encode one message of a batch. Raises MessageIllegal: the same as for `encode_message`, or a batch cannot contain
    the message.
    """
    check_topic(message.topic)
    if message.topic.startswith(RETRY_PREFIX):
        raise MessageIllegal(f"a batch cannot be sent to retry topic {message.topic}: send its messages one by one")
    if message.goes_alone:
        what = "delayed messages" if message.is_delayed else "messages with a priority"
        raise MessageIllegal(f"a batch for topic {message.topic} cannot hold {what}: send them one by one")
    body = _checked_body(message, settings.limits.message_bytes_max)
    return BatchEntry(body, _properties(message, unique_key, own), message.flag)


def encode_entries(
    first: Message,
    entries: Sequence[BatchEntry],
    unique_keys: Sequence[str],
    batch_key: str,
    settings: ProducerSettings,
) -> EncodedMessage:
    """Encode a batch from its entries, with the topic of its first message.
    Raises MessageIllegal: the batch is too large."""
    assert len(entries) == len(unique_keys), "one key for each message"
    body = encode_batch(entries)
    if len(body) > settings.limits.message_bytes_max:
        over = len(body) - settings.limits.message_bytes_max
        raise MessageIllegal(
            f"batch of {len(entries)} messages for topic {first.topic} has {len(body)} bytes, {over} more than the "
            f"limit of {settings.limits.message_bytes_max}: split it"
        )
    # This is written even if it is true. The batch has two properties of its own, independent of its entries.
    wait = "true" if first.wait_store else "false"
    properties = encode_properties({names.UNIQ_KEY: batch_key, names.WAIT: wait}).decode()
    return EncodedMessage(first.topic, body, properties, ",".join(unique_keys), is_batch=True)


def encode_dead_letter(
    message: ReceivedMessage, group: str, reason: Mapping[str, str], namespace: str = ""
) -> EncodedMessage:
    """Encode a received message for its group's dead letters, with the properties of a reason. If there is not enough
    space for all properties, the last ones are omitted.
    A send-back request cannot contain a reason, so the message is sent to the retry topic in the same way as after its
    last attempt. The broker then moves it to the dead letters, and creates their topic on demand.
    Raises ValueError: there is no space for any of the properties."""
    own = {names.BORN_HOST: message.born_host} | message.properties
    for count in range(len(reason), 0, -1):
        reasoned = replace(message, properties=own | dict(islice(reason.items(), count)))
        prepared = encode_retry(reasoned, group, 0, namespace)
        if len(prepared.properties.encode("utf-8", "replace")) <= _DEAD_LETTER_BYTES_MAX:
            return prepared
    raise ValueError("its properties leave no space for a reason")


def encode_retry(
    message: ReceivedMessage, group: str, retries_max: int, namespace: str = "", *, delay_ms: int | None = None
) -> EncodedMessage:
    """Encode a received message for its group's retry topic. This is used if the broker could not send the message
    back, or if a handler requested a delay that is not a level."""
    properties = dict(message.properties)
    for name in _OF_ONE_DELIVERY:
        properties.pop(name, None)
    # Set these only if the broker did not set them: a message retains its first topic and its first id in all retries.
    properties.setdefault(names.RETRY_TOPIC, with_namespace(namespace, message.topic))
    properties.setdefault(names.ORIGIN_MESSAGE_ID, message.offset_msg_id)
    if delay_ms is None:
        properties[names.DELAY] = str(_FIRST_RETRY_LEVEL + message.reconsume_times)
    else:
        for name in (names.DELAY, *names.TIMED):  # brokers consider a message with a timer mark delivered
            properties.pop(name, None)
        properties[names.TIMER_DELAY_MS] = str(delay_ms)
    return EncodedMessage(
        # sysFlag stays 0, because received bodies are already decompressed.
        retry_topic(group),
        message.body,
        encode_properties(properties).decode(),
        message.msg_id,
        message.flag,
        reconsume_times=message.reconsume_times + 1,
        retries_max=retries_max,
        born_ms=message.born_timestamp,
    )


@contextlib.contextmanager
def reporting_failure(message: EncodedMessage) -> Iterator[None]:
    """Report to the hooks the errors that occur before a `Sender` has the message."""
    try:
        yield
    except BaseException as error:
        if message.on_end is not None:
            message.on_end(SendOutcome(error=error))
        raise


def check_topic(topic: str) -> None:
    """Check the topic of a message. Raises MessageIllegal: messages cannot be sent to the topic."""
    fault = _topic_fault(topic)
    if fault is not None:
        raise MessageIllegal(fault)
    if topic in FORBIDDEN_TO_SEND:
        raise MessageIllegal(f"Sending message to topic[{topic}] is forbidden: only the broker writes to it")


def _checked_body(message: Message, bytes_max: int) -> bytes:
    body: object = message.body
    if not isinstance(body, bytes):
        body = bytes(body) if isinstance(body, bytearray | memoryview) else _encoded(message)
    if not body:
        raise MessageIllegal(f"body of a message for topic {message.topic} is empty: it must have at least one byte")
    if len(body) > bytes_max:
        raise MessageIllegal(
            f"body of a message for topic {message.topic} has {len(body)} bytes, {len(body) - bytes_max} more than "
            f"the limit of {bytes_max} (maxMessageSize; --max-bytes on the command line): split it, or raise the limit "
            "here and at the brokers"
        )
    return body


def with_bytes(message: Message) -> Message:
    """Return a message with a bytes body: the message itself, or a copy with its body as JSON.
    Raises MessageIllegal: the body cannot be written as JSON."""
    if isinstance(message.body, bytes | bytearray | memoryview):
        return message
    return replace(message, body=_encoded(message))


def _encoded(message: Message) -> bytes:
    try:
        return encode_body(message.body)
    except ValueError as error:
        raise MessageIllegal(f"body of a message for topic {message.topic} is {error}") from error


def _properties(message: Message, unique_key: str, own: Mapping[str, str] | None = None) -> bytes:
    try:
        merged = message.wire_properties()
        if own is not None:
            merged.update(own)
        merged[names.UNIQ_KEY] = unique_key  # set last: a property of the program must not replace it
        encoded = encode_properties(merged)
    except ValueError as error:
        raise MessageIllegal(f"message for topic {message.topic}: {error}") from None
    if len(encoded) > PROPERTIES_BYTES_MAX:
        raise MessageIllegal(
            f"properties of a message for topic {message.topic} have {len(encoded)} bytes, "
            f"{len(encoded) - PROPERTIES_BYTES_MAX} more than the limit of {PROPERTIES_BYTES_MAX}: "
            "move some to the body"
        )
    return encoded


def _compressed(body: bytes, settings: ProducerSettings) -> tuple[bytes, int]:
    """Compress a body. Return it with its sysFlag. A body that would not become smaller is not compressed."""
    compression = Compression[settings.compression.type.name]
    level = settings.compression.level
    # There is one setting for all compressions, but ZSTD has levels above the 9 of ZLIB.
    smaller = compress(body, compression, min(level, _ZLIB_LEVEL_MAX) if compression is Compression.ZLIB else level)
    return (smaller, COMPRESSED | compression) if len(smaller) < len(body) else (body, 0)


def reply_address(request: ReceivedMessage) -> tuple[str, dict[str, str]]:
    """Return the topic of a reply, and the properties that route it to the requesting client.
    Raises NotARequest: the message is not a request."""
    for name in (names.CLUSTER, names.CORRELATION_ID, names.REPLY_TO_CLIENT):
        if not request.properties.get(name):
            raise NotARequest(request.msg_id, name)
    copied = (names.CORRELATION_ID, names.REPLY_TO_CLIENT, names.TIME_TO_LIVE)
    properties = {name: request.properties[name] for name in copied if name in request.properties}
    return f"{request.properties[names.CLUSTER]}_REPLY_TOPIC", properties | {names.MESSAGE_TYPE: _REPLY}
