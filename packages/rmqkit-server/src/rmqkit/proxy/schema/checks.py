"""Checks of names, messages and times before a call reaches a broker (``GrpcValidator``).

Every function raises `Refused` with the reference's code and text. Source: grpc.md §4, §5.4, §6.4.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from rmqkit.protocol import names
from rmqkit.protocol import properties as property_names
from rmqkit.proxy.schema.status import Code, Refused

__all__ = [
    "BODY_BYTES_MAX",
    "INVISIBLE_MS_MAX",
    "REFUSED",
    "check_group",
    "check_lite_topic",
    "check_messages",
    "check_sent",
    "check_topic",
    "duration_ms",
    "sql_or_tags",
    "timestamp_ms",
]

BODY_BYTES_MAX = 4 << 20
INVISIBLE_MS_MAX = 12 * 3_600_000
_USER_PROPERTIES_MAX = 128
_USER_PROPERTIES_BYTES_MAX = 16_384
_GROUP_BYTES_MAX = 64
_RECOVERY_SECONDS_MAX = 3600
_DELAY_MS_MAX = 86_400_000
_INT64_MAX = (1 << 63) - 1

_LEGAL = re.compile(r"[%|a-zA-Z0-9_-]+", re.ASCII).fullmatch
_LEGAL_TEXT = "^[%|a-zA-Z0-9_-]+$"
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]").search

# These names differ from the names reserved for remoting clients: 5.x SDKs send these values in fields of the schema.
# fmt: off
_RESERVED = frozenset((
    "TRACE_ON", "MSG_REGION", "KEYS", "TAGS", "WAIT", "DELAY", "RETRY_TOPIC", "REAL_TOPIC", "REAL_QID", "TRAN_MSG",
    "PGROUP", "MIN_OFFSET", "MAX_OFFSET", "BUYER_ID", "ORIGIN_MESSAGE_ID", "TRANSFER_FLAG", "CORRECTION_FLAG",
    "MQ2_FLAG", "RECONSUME_TIME", "UNIQ_KEY", "MAX_RECONSUME_TIMES", "CONSUME_START_TIME", "POP_CK", "POP_CK_OFFSET",
    "1ST_POP_TIME", "TRAN_PREPARED_QUEUE_OFFSET", "DUP_INFO", "EXTEND_UNIQ_INFO", "INSTANCE_ID", "CORRELATION_ID",
    "REPLY_TO_CLIENT", "TTL", "ARRIVE_TIME", "PUSH_REPLY_TIME", "CLUSTER", "MSG_TYPE", "INNER_MULTI_QUEUE_OFFSET",
    "TIMER_DELAY_MS", "TIMER_DELAY_SEC", "TIMER_DELIVER_MS", "TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS",
    "TIMER_ROLL_TIMES", "TIMER_OUT_MS", "TIMER_DEL_UNIQKEY", "TIMER_DELAY_LEVEL", "__BORNHOST", "BORN_TIMESTAMP",
    "ORIGIN_GROUP", "DLQ_ORIGIN_TOPIC", "DLQ_ORIGIN_MESSAGE_ID", "__CRC32#", "_SYS_MSG_PRIORITY_",
))
# fmt: on
RESERVED_AND_HIDDEN = _RESERVED
"""Property names that applications cannot set, and that are hidden in received messages."""

# The reference accepts the added names. They change how a broker handles a record, so they are refused here.
REFUSED = _RESERVED | {
    property_names.INNER_MULTI_DISPATCH,
    property_names.INNER_NUM,
    property_names.INNER_BASE,
    property_names.LITE_TOPIC,
    property_names.LITE_EPOCH,
}
"""Names that user properties of sent messages must not have."""

HIDDEN_IN_LITE = RESERVED_AND_HIDDEN | {
    property_names.INNER_MULTI_DISPATCH,
    property_names.LITE_TOPIC,
    property_names.LITE_EPOCH,
}
"""Property names that are hidden in received messages of lite topics. The reference shows the first two."""


@lru_cache(maxsize=4096)
def check_topic(topic: str) -> str:
    """Return the topic if clients can use it."""
    if not topic.strip():
        raise Refused(Code.ILLEGAL_TOPIC, "The specified topic is blank")
    if len(topic) > names.TOPIC_CHARACTERS_MAX:
        limit = names.TOPIC_CHARACTERS_MAX
        raise Refused(Code.ILLEGAL_TOPIC, f"The specified topic is longer than topic max length {limit}.")
    if not _LEGAL(topic):
        text = f"The specified topic[{topic}] contains illegal characters, allowing only {_LEGAL_TEXT}"
        raise Refused(Code.ILLEGAL_TOPIC, text)
    if names.is_system_topic(topic):
        raise Refused(Code.ILLEGAL_TOPIC, "cannot access system topic")
    return topic


@lru_cache(maxsize=4096)
def check_group(group: str) -> str:
    """Return the consumer group if clients can use it."""
    if not group.strip():
        raise Refused(Code.ILLEGAL_CONSUMER_GROUP, "the specified group is blank")
    if len(group) > names.GROUP_CHARACTERS_MAX:
        text = f"the specified group[{group}] is longer than group max length: {names.GROUP_CHARACTERS_MAX}."
        raise Refused(Code.ILLEGAL_CONSUMER_GROUP, text)
    if not _LEGAL(group):
        text = f"the specified group[{group}] contains illegal characters, allowing only {_LEGAL_TEXT}"
        raise Refused(Code.ILLEGAL_CONSUMER_GROUP, text)
    if group.startswith(names.SYSTEM_GROUP_PREFIX):
        raise Refused(Code.ILLEGAL_CONSUMER_GROUP, "cannot use system consumer group")
    return group


def check_lite_topic(lite_topic: str) -> str:
    """Return the name of a lite topic if it is valid."""
    fault = names.lite_topic_fault(lite_topic)
    if fault is not None:
        raise Refused(Code.ILLEGAL_LITE_TOPIC, fault)
    return lite_topic


def timestamp_ms(timestamp: Any, code: Code) -> int:
    """Convert a ``Timestamp`` to ms. Refuses times that do not fit into 64 bits of ms, and invalid nanos."""
    return _ms(timestamp.seconds, timestamp.nanos, code)


def duration_ms(duration: Any, code: Code) -> int:
    """Convert a ``Duration`` to ms."""
    return _ms(duration.seconds, duration.nanos, code)


def _ms(seconds: int, nanos: int, code: Code) -> int:
    is_nanos = -1_000_000_000 < nanos < 1_000_000_000 and (nanos == 0 or (nanos < 0) == (seconds < 0) or not seconds)
    if abs(seconds) > _INT64_MAX // 1000 - 1 or not is_nanos:
        raise Refused(code, f"a time of {seconds} s and {nanos} ns is out of range")
    return seconds * 1000 + nanos // 1_000_000


def check_messages(messages: Sequence[Any], now_ms: int) -> str:
    """Check messages to send, and return their topic. `check_sent` checks later if the topic accepts their types."""
    if not messages:
        raise Refused(Code.MESSAGE_CORRUPTED, "no message to send")
    first = messages[0].topic
    topic = check_topic(first.name)
    if any(message.topic != first for message in messages):
        raise Refused(Code.MESSAGE_CORRUPTED, "topic in message is not same")
    for message in messages:
        _check_message(message, now_ms)
    return topic


def _check_message(message: Any, now_ms: int) -> None:
    system = message.system_properties
    if not message.body:
        raise Refused(Code.MESSAGE_BODY_EMPTY, "message body cannot be empty")
    if len(message.body) > BODY_BYTES_MAX:
        raise Refused(Code.MESSAGE_BODY_TOO_LARGE, f"message body cannot exceed the max {BODY_BYTES_MAX}")
    _check_properties(message.user_properties)
    _check_words(message)
    _check_id(system)
    _check_times(message, now_ms)
    if system.HasField("priority") and system.priority < 0:
        raise Refused(Code.BAD_REQUEST, f"the priority of message is {system.priority}: it must not be negative")
    if system.lite_topic:
        check_lite_topic(system.lite_topic)
    if system.message_group:
        _check_text(system.message_group, "message group", Code.ILLEGAL_MESSAGE_GROUP)
        if _utf8_bytes((system.message_group,)) >= _GROUP_BYTES_MAX:
            raise Refused(Code.ILLEGAL_MESSAGE_GROUP, f"message group exceed the max size {_GROUP_BYTES_MAX}")


def _check_words(message: Any) -> None:
    system = message.system_properties
    if system.tag:
        _check_text(system.tag, "tag", Code.ILLEGAL_MESSAGE_TAG)
        if "|" in system.tag:
            raise Refused(Code.ILLEGAL_MESSAGE_TAG, "tag cannot contain '|'")
    for key in filter(None, system.keys):  # ignores empty keys
        _check_text(key, "key", Code.ILLEGAL_MESSAGE_KEY)
    texts = (*message.user_properties, *message.user_properties.values(), system.tag, *system.keys)
    if _utf8_bytes(texts) > _USER_PROPERTIES_BYTES_MAX:
        text = f"the total size of user property is too large, max is {_USER_PROPERTIES_BYTES_MAX}"
        raise Refused(Code.MESSAGE_PROPERTIES_TOO_LARGE, text)


def _check_id(system: Any) -> None:
    if not system.message_id.strip():
        raise Refused(Code.ILLEGAL_MESSAGE_ID, "message id cannot be empty")
    # The reference stores these texts unchanged: separators of the property string in them would add properties.
    if _CONTROL(system.message_id):
        raise Refused(Code.ILLEGAL_MESSAGE_ID, "message id cannot contain control character")
    for name, value in (("born host", system.born_host), ("trace context", system.trace_context)):
        if _CONTROL(value):
            raise Refused(Code.BAD_REQUEST, f"{name} cannot contain control character")


def _check_properties(properties: Any) -> None:
    if len(properties) > _USER_PROPERTIES_MAX:
        text = f"too many user properties, max is {_USER_PROPERTIES_MAX}"
        raise Refused(Code.MESSAGE_PROPERTIES_TOO_LARGE, text)
    for name, value in properties.items():
        if name in REFUSED:
            raise Refused(Code.ILLEGAL_MESSAGE_PROPERTY_KEY, f"property is used by system: {name}")
        for what, text in (("key", name), ("value", value)):
            if _CONTROL(text):
                said = f"the {what} of property cannot contain control character"
                raise Refused(Code.ILLEGAL_MESSAGE_PROPERTY_KEY, said)


def _check_times(message: Any, now_ms: int) -> None:
    system = message.system_properties
    if system.message_type == _TRANSACTION and system.HasField("orphaned_transaction_recovery_duration"):
        recovery_ms = duration_ms(system.orphaned_transaction_recovery_duration, Code.BAD_REQUEST)
        if recovery_ms < 0:
            raise Refused(Code.BAD_REQUEST, f"the transaction recovery time of message is {recovery_ms} ms")
        if recovery_ms > _RECOVERY_SECONDS_MAX * 1000:
            text = f"the max transaction recovery time of message is too large, max is {_RECOVERY_SECONDS_MAX}"
            raise Refused(Code.BAD_REQUEST, text)
    if system.HasField("delivery_timestamp"):
        deliver_ms = timestamp_ms(system.delivery_timestamp, Code.ILLEGAL_DELIVERY_TIME)
        if deliver_ms - now_ms > _DELAY_MS_MAX:
            text = f"the max delay time of message is too large, max is {_DELAY_MS_MAX}"
            raise Refused(Code.ILLEGAL_DELIVERY_TIME, text)
        if deliver_ms < 0:
            raise Refused(Code.ILLEGAL_DELIVERY_TIME, f"the delivery time of message is {deliver_ms}: before 1970")
    if system.HasField("born_timestamp"):
        timestamp_ms(system.born_timestamp, Code.BAD_REQUEST)


def _check_text(text: str, what: str, code: Code) -> None:
    if not text.strip():
        raise Refused(code, f"{what} cannot be the char sequence of whitespace")
    if _CONTROL(text):
        raise Refused(code, f"{what} cannot contain control character")


def _utf8_bytes(texts: Iterable[str]) -> int:
    return sum(len(text) if text.isascii() else len(text.encode()) for text in texts)


# The message types in route answers by a topic's ``message.type``; topics of other types accept no message.
ACCEPTED = {
    "NORMAL": ("NORMAL",),
    "FIFO": ("FIFO",),
    "DELAY": ("DELAY",),
    "TRANSACTION": ("TRANSACTION",),
    "PRIORITY": ("PRIORITY",),
    "LITE": ("LITE",),
    "MIXED": ("NORMAL", "FIFO", "DELAY", "TRANSACTION"),
}


def check_sent(topic_type: str, message_type: str, topic: str) -> None:
    """Refuse a message whose type is not the topic's type; retry and dead-letter topics accept all types."""
    if topic_type in ("MIXED", message_type) or topic.startswith((names.RETRY_PREFIX, names.DLQ_PREFIX)):
        return
    text = f"TopicMessageType validate failed, the expected type is {topic_type}, but actual type is {message_type}"
    raise Refused(Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE, text)


_SQL, _TRANSACTION = 2, 4


def sql_or_tags(expression: Any) -> tuple[str, str]:
    """Return type (``TAG``, ``SQL92``) and text of a ``FilterExpression``; blank tags mean all messages."""
    text = expression.expression
    if expression.type == _SQL:
        if not text.strip():
            raise Refused(Code.ILLEGAL_FILTER_EXPRESSION, "expression format is not correct")
        return "SQL92", text
    if not text.strip():
        return "TAG", "*"
    if not any(part.strip() for part in text.split("||")):
        raise Refused(Code.ILLEGAL_FILTER_EXPRESSION, "expression format is not correct")
    return "TAG", text
