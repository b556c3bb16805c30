"""The changes of a message between its request and the log (``MessageExtBrokerInner``).

Sends and stored records become an `InnerMessage`. The properties of an `InnerMessage` are decoded once, and only if a
step needs them. Each step below accepts an `InnerMessage` and returns another `InnerMessage`. No code changes a message
in place. The store encodes the properties of the last message in the order in which a broker stores them.

=================  ==========================  =================================================================
step               goes to                     properties
=================  ==========================  =================================================================
`to_dead_letters`  ``%DLQ%<group>``, queue 0   DELAY is -1
`to_priority`      the queue of its priority   PRIORITY is removed if it has no effect
`to_delay_level`   the delay topic, level - 1  REAL_TOPIC, REAL_QID. A delivery time is removed. A level above the
                                               last level is replaced by the last level
`to_timer`         the timer topic, queue 0    TIMER_OUT_MS, REAL_TOPIC, REAL_QID
`to_half`          the half topic, queue 0     __transactionId__, REAL_TOPIC, REAL_QID
`committed`        the real topic and queue    REAL_TOPIC and REAL_QID are removed
=================  ==========================  =================================================================

A copy of a stored message has the same body, flag, born data and all properties that are not mentioned in the table. It
gets new offsets, a new store time and a new CRC when it is put.
Source: behaviour.md §3.3, §3.4, §3.7, §9.1, §9.2; store.md §18.1, §18.2, §19.2, §19.3, §20; priorities as seen from a
5.4.0 broker.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rmqkit.protocol import names
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.properties import PROPERTY_CRC, decode_properties, encode_in_stored_order
from rmqkit.protocol.record import TRANSACTION_COMMIT, TRANSACTION_MASK, Record
from rmqkit.store.message_store import InnerMessage

__all__ = [
    "TIMER_NAMES",
    "changed",
    "committed",
    "is_half",
    "message_from",
    "not_in_lite_topics",
    "number",
    "real_place",
    "to_dead_letters",
    "to_delay_level",
    "to_half",
    "to_priority",
    "to_timer",
    "with_changes",
]

TIMER_NAMES = (property_names.TIMER_DELAY_SECONDS, property_names.TIMER_DELAY_MS, property_names.TIMER_DELIVER_MS)
"""The properties with a delivery time, in order of precedence. A delay level takes precedence over all of them."""

_PROPERTY_CRC = PROPERTY_CRC.encode()
_INT_MAX = (1 << 31) - 1
_INTEGER = re.compile(r"\+?[0-9]{1,10}", re.ASCII)
_NO_PRIORITY = frozenset((property_names.DELAY, property_names.SHARDING_KEY, *TIMER_NAMES))


def changed(
    message: InnerMessage,
    changes: Mapping[str, str | None],
    *,
    topic: str | None = None,
    queue_id: int | None = None,
    sys_flag: int | None = None,
) -> InnerMessage:
    """Return a copy of a message with changed properties. ``changes``: values to set, or None to remove a property.
    ``topic``, ``queue_id``, ``sys_flag``: new values, or None for no change."""
    return InnerMessage(
        message.topic if topic is None else topic,
        message.queue_id if queue_id is None else queue_id,
        message.body,
        None,
        message.flag,
        message.sys_flag if sys_flag is None else sys_flag,
        message.born_timestamp,
        message.born_host,
        message.store_host,
        message.reconsume_times,
        message.prepared_transaction_offset,
        None,
        _merged(message.parsed, changes),
        message.was_accepted,
    )


def message_from(
    record: Record,
    *,
    topic: str,
    queue_id: int,
    changes: Mapping[str, str | None] | None = None,
    sys_flag: int | None = None,
    reconsume_times: int | None = None,
    store_host: bytes | None = None,
    prepared_transaction_offset: int = 0,
) -> InnerMessage:
    """Return the copy of a stored message to put.
    ``changes``: values to set, or None to remove a property. Without changes the stored property string is used.
    ``sys_flag``, ``reconsume_times``, ``store_host``: new values, or None for the values of the record."""
    properties = record.properties
    values = None
    # Drop the checksum: it also covers the record's offsets, so readers would treat the copy as damaged.
    if changes or _PROPERTY_CRC in properties:
        values = _merged(decode_properties(properties), {PROPERTY_CRC: None, **(changes or {})})
    return InnerMessage(
        topic=topic,
        queue_id=queue_id,
        body=record.body,
        string=None if values is not None else properties,
        values=values,
        flag=record.flag,
        sys_flag=record.sys_flag if sys_flag is None else sys_flag,
        born_timestamp=record.born_timestamp,
        born_host=record.born_host,
        store_host=record.store_host if store_host is None else store_host,
        reconsume_times=record.reconsume_times if reconsume_times is None else reconsume_times,
        prepared_transaction_offset=prepared_transaction_offset,
        was_accepted=True,
    )


def with_changes(properties: bytes, changes: Mapping[str, str | None]) -> bytes:
    """Return a changed property string. ``changes``: values to set, or None to remove a property."""
    return encode_in_stored_order(_merged(decode_properties(properties), changes))


def _merged(properties: dict[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    merged = {**properties, **changes}
    return {name: value for name, value in merged.items() if value is not None}


# ---- the steps


def to_dead_letters(message: InnerMessage, group: str) -> InnerMessage:
    """Return the dead letter of a group for a retried message."""
    # Set DELAY to -1 like the reference: with the old level the dead letter would go to the delay topic first.
    changes = {property_names.DELAY: "-1", **not_in_lite_topics(message.parsed)}
    return changed(message, changes, topic=names.dlq_topic(group), queue_id=0)


def not_in_lite_topics(properties: Mapping[str, str]) -> dict[str, str | None]:
    """Return the changes for a copy of a message of a lite topic. With the names of its light queues, the copy would be
    in the lite topic again."""
    if property_names.LITE_TOPIC not in properties:
        return {}
    return {property_names.INNER_MULTI_DISPATCH: None, property_names.INNER_MULTI_QUEUE_OFFSET: None}


def to_priority(message: InnerMessage, queue_count: int) -> InnerMessage:
    """Return a message with the queue that its priority selects: the queue with this number, or the last queue of the
    topic. If the message is transactional, delayed or timed, or has a sharding key, the priority is removed and the
    queue does not change. A negative priority, or a priority that is not a 32-bit number, stays and has no effect. The
    type of the topic is relevant only when messages are popped."""
    properties = message.parsed
    text = properties.get(property_names.PRIORITY, "")
    priority = int(text) if _INTEGER.fullmatch(text) else -1
    if not 0 <= priority <= _INT_MAX:
        return message
    is_prepared = properties.get(property_names.TRANSACTION_PREPARED, "").lower() == "true"
    if is_prepared or not _NO_PRIORITY.isdisjoint(properties):
        return changed(message, {property_names.PRIORITY: None})
    return changed(message, {}, queue_id=max(0, min(priority, queue_count - 1)))


def to_delay_level(message: InnerMessage, level: int, level_max: int) -> InnerMessage:
    """Return a message in the form in which it is stored until it is due. A level above the last level is replaced by
    the last level."""
    changes: dict[str, str | None] = dict.fromkeys(TIMER_NAMES)
    if level > level_max:
        level = level_max
        changes[property_names.DELAY] = str(level)
    changes |= _real_place_of(message)
    assert 0 < level <= level_max, "the level is in the table"
    return changed(message, changes, topic=names.SCHEDULE_TOPIC, queue_id=level - 1)


def to_timer(message: InnerMessage, out_ms: int) -> InnerMessage:
    """Return a message in the form in which it is stored until its time. ``out_ms``: the begin of its slot. The message
    is due at the end of the slot."""
    changes = {property_names.TIMER_OUT_MS: str(out_ms), **_real_place_of(message)}
    return changed(message, changes, topic=names.TIMER_TOPIC, queue_id=0)


def is_half(message: InnerMessage) -> bool:
    """Return True if a message is sent as a half message. A retried message with a delay is no half message any
    more."""
    properties = message.parsed
    if properties.get(property_names.TRANSACTION_PREPARED, "").lower() != "true":
        return False
    delay = properties.get(property_names.DELAY) if message.reconsume_times > 0 else None
    return delay is None or number(delay) <= 0


def to_half(message: InnerMessage) -> InnerMessage:
    """Return the half message for a transactional message. Source: store.md §19.2."""
    unique_key = message.parsed.get(property_names.UNIQ_KEY)
    changes = {property_names.TRANSACTION_ID: unique_key, **_real_place_of(message)}
    # Clear the transaction bits, so that the half message gets a queue entry: markers of old brokers have no entry.
    sys_flag = message.sys_flag & ~TRANSACTION_MASK
    return changed(message, changes, topic=names.HALF_TOPIC, queue_id=0, sys_flag=sys_flag)


def committed(half: Record) -> InnerMessage | None:
    """Return the message that the commit of a half message puts; None if its real topic is missing. Source: §19.3."""
    kept = message_from(
        half,
        topic="",
        queue_id=0,
        sys_flag=half.sys_flag & ~TRANSACTION_MASK | TRANSACTION_COMMIT,
        prepared_transaction_offset=half.physical_offset,
    )
    place = real_place(kept.parsed)
    if place is None:
        return None
    assert kept.sys_flag & TRANSACTION_MASK == TRANSACTION_COMMIT, "the message is marked as committed"
    # Remove both properties, like 5.4.0. Brokers from 4.9 to 5.3 leave them in committed messages.
    changes = {property_names.REAL_TOPIC: None, property_names.REAL_QUEUE_ID: None}
    return changed(kept, changes, topic=place[0], queue_id=place[1])


def _real_place_of(message: InnerMessage) -> dict[str, str]:
    return {property_names.REAL_TOPIC: message.topic, property_names.REAL_QUEUE_ID: str(message.queue_id)}


def real_place(properties: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the real topic and queue id of a half message; None if they are missing."""
    topic, queue_id = properties.get(property_names.REAL_TOPIC), number(properties.get(property_names.REAL_QUEUE_ID))
    return None if topic is None or not 0 <= queue_id < 1 << 31 else (topic, queue_id)


def number(text: str | None) -> int:
    """Return a property as a number, or -1 if it is not a number."""
    # Accept up to 18 digits: Java's long can hold every number of 18 digits, but not every longer number.
    return int(text) if text is not None and text.isdecimal() and len(text) < 19 else -1
