"""The property string of a message: ``name 0x01 value 0x02`` repeated, UTF-8.

Names and values cannot contain 0x01 or 0x02, because there is no escaping. Writers of 5.x end the last entry with 0x02
and writers of 4.9 do not, so readers accept both forms. Readers drop pieces without 0x01, without a name or without a
value. If a name occurs several times, the last value is used. A property string has at most 32 767 bytes.
Source: remoting.md §7.3 and §8.1, store.md §3.4.

Names and tags are hashed with Java's ``String.hashCode``: ``h = 31 * h + unit`` over UTF-16 code units in wrapping
32-bit arithmetic. The tag codes in consume queues and the key hashes in index files depend on this hash.
Source: store.md "Conventions", remoting.md §6.4.4.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter

PROPERTIES_BYTES_MAX = 32767
_NAME_END = "\x01"
_ENTRY_END = "\x02"
_ENTRY_END_BYTES = b"\x02"
_MAP_BUCKETS = 128
_KEYS = re.compile(rb"(?:^|\x02)(UNIQ_KEY|KEYS|TAGS)\x01([^\x02]+)")
"""A pattern that finds UNIQ_KEY, KEYS and TAGS in one pass. A test checks that `find_property` finds the same
values."""

Keys = tuple[bytes, bytes, bytes]
"""The values of UNIQ_KEY, KEYS and TAGS, each empty if missing: the texts for the index and for the tag code."""
NO_KEYS: Keys = b"", b"", b""

KEYS = "KEYS"
TAGS = "TAGS"
WAIT = "WAIT"
DELAY = "DELAY"
RETRY_TOPIC = "RETRY_TOPIC"
DLQ_ORIGIN_TOPIC = "DLQ_ORIGIN_TOPIC"
REAL_TOPIC = "REAL_TOPIC"
REAL_QUEUE_ID = "REAL_QID"
TRANSACTION_PREPARED = "TRAN_MSG"
TRANSACTION_ID = "__transactionId__"
TRANSACTION_CHECK_TIMES = "TRANSACTION_CHECK_TIMES"
TRANSACTION_PREPARED_QUEUE_OFFSET = "TRAN_PREPARED_QUEUE_OFFSET"
CHECK_IMMUNITY_SECONDS = "CHECK_IMMUNITY_TIME_IN_SECONDS"
PRODUCER_GROUP = "PGROUP"
UNIQ_KEY = "UNIQ_KEY"
ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
RECONSUME_TIME = "RECONSUME_TIME"
MAX_RECONSUME_TIMES = "MAX_RECONSUME_TIMES"
CONSUME_START_TIME = "CONSUME_START_TIME"
MIN_OFFSET = "MIN_OFFSET"
MAX_OFFSET = "MAX_OFFSET"
MSG_REGION = "MSG_REGION"
TRACE_ON = "TRACE_ON"
CLUSTER = "CLUSTER"
SHARDING_KEY = "__SHARDINGKEY"
CORRELATION_ID = "CORRELATION_ID"
REPLY_TO_CLIENT = "REPLY_TO_CLIENT"
TIME_TO_LIVE = "TTL"
MESSAGE_TYPE = "MSG_TYPE"
PUSH_REPLY_TIME = "PUSH_REPLY_TIME"
ARRIVE_TIME = "ARRIVE_TIME"
POP_CHECK_POINT = "POP_CK"
FIRST_POP_TIME = "1ST_POP_TIME"
INNER_NUM = "INNER_NUM"
INNER_BASE = "INNER_BASE"
INNER_MULTI_DISPATCH = "INNER_MULTI_DISPATCH"
INNER_MULTI_QUEUE_OFFSET = "INNER_MULTI_QUEUE_OFFSET"
LITE_TOPIC = "__LITE_TOPIC"
LITE_EPOCH = "__LITE_EPOCH"
"""The life of a lite topic to which a message belongs. rmqkit stores it from the second life on."""
TIMER_DELAY_SECONDS = "TIMER_DELAY_SEC"
TIMER_DELAY_MS = "TIMER_DELAY_MS"
TIMER_DELIVER_MS = "TIMER_DELIVER_MS"
TIMER_OUT_MS = "TIMER_OUT_MS"
TIMER_DELETE_KEY = "TIMER_DEL_UNIQKEY"
PRIORITY = "_SYS_MSG_PRIORITY_"
TRACE_CONTEXT = "TRACE_CONTEXT"
REDIRECT = "REDIRECT"
PROPERTY_CRC = "__CRC32#"
DEAD_LETTER_REASON = "rmqkit_reason"
"""The reason, in one line, why rmqkit moved a message to the dead letters.

This property and the next three are specific to rmqkit. RocketMQ's clients treat them as properties of an application.
"""
DEAD_LETTER_TRACEBACK = "rmqkit_traceback"
DEAD_LETTER_HANDLER = "rmqkit_handler"
DEAD_LETTER_TRIES = "rmqkit_tries"
OF_DEAD_LETTERS = (DEAD_LETTER_REASON, DEAD_LETTER_TRACEBACK, DEAD_LETTER_HANDLER, DEAD_LETTER_TRIES)
BORN_HOST = "__BORNHOST"
"""The original sender of a message, if it is not the peer of the connection."""

# fmt: off
RESERVED_NAMES = frozenset((
    "TRACE_ON", "MSG_REGION", "KEYS", "TAGS", "WAIT", "DELAY", "RETRY_TOPIC", "REAL_TOPIC", "REAL_QID", "TRAN_MSG",
    "PGROUP", "MIN_OFFSET", "MAX_OFFSET", "BUYER_ID", "ORIGIN_MESSAGE_ID", "TRANSFER_FLAG", "CORRECTION_FLAG",
    "MQ2_FLAG", "RECONSUME_TIME", "UNIQ_KEY", "EXTEND_UNIQ_INFO", "MAX_RECONSUME_TIMES", "CONSUME_START_TIME",
    "POP_CK", "POP_CK_OFFSET", "1ST_POP_TIME", "TRAN_PREPARED_QUEUE_OFFSET", "DUP_INFO",
    "CHECK_IMMUNITY_TIME_IN_SECONDS", "TRANSACTION_CHECK_TIMES", "INSTANCE_ID", "CORRELATION_ID", "REPLY_TO_CLIENT",
    "TTL", "ARRIVE_TIME", "PUSH_REPLY_TIME", "CLUSTER", "MSG_TYPE", "INNER_NUM", "INNER_BASE",
    "INNER_MULTI_DISPATCH", "INNER_MULTI_QUEUE_OFFSET", "TIMER_DELAY_LEVEL", "TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS",
    "TIMER_ROLL_TIMES", "TIMER_OUT_MS", "TIMER_DEL_UNIQKEY", "TIMER_DELAY_SEC", "TIMER_DELIVER_MS",
    "TIMER_DELAY_MS", "__SHARDINGKEY", "__CRC32#", "REDIRECT", "PROPERTY_FORWARD_QUEUE_ID", "DLQ_ORIGIN_TOPIC",
    "DLQ_ORIGIN_MESSAGE_ID", "TRACE_CONTEXT", "__BORNHOST", "BORN_TIMESTAMP", "__transactionId__",
    "__LITE_TOPIC", "__LITE_EPOCH",
))
# fmt: on
"""The names of RocketMQ's own properties. A copy of a message does not have them. Source: remoting.md §8.1."""

TIMED = (
    *(TIMER_DELAY_SECONDS, TIMER_DELAY_MS, TIMER_DELIVER_MS, TIMER_OUT_MS),
    *("TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS", "TIMER_ROLL_TIMES"),
)
"""The names of properties that request a delivery time, and of the marks of timers."""

SETTABLE_NAMES = frozenset((CHECK_IMMUNITY_SECONDS, TRACE_CONTEXT, REDIRECT, SHARDING_KEY))
"""Reserved names that applications can set, as with Java's ``putUserProperty``."""


def encode_properties(properties: Mapping[str, str] | Iterable[tuple[str, str]]) -> bytes:
    """Return the property string of a mapping, in its order, with 0x02 after every entry.
    Raises ValueError: a name or value contains 0x01 or 0x02, which the format cannot represent."""
    pairs = list(properties.items() if isinstance(properties, Mapping) else properties)
    # A lone surrogate becomes "?", as in Java's getBytes. It must not make a send fail.
    encoded = "".join([f"{name}\x01{value}\x02" for name, value in pairs]).encode("utf-8", "replace")
    if encoded.count(b"\x01") != len(pairs) or encoded.count(b"\x02") != len(pairs):
        raise ValueError("a property name or value contains the separator 0x01 or 0x02: remove it")
    return encoded


def decode_properties(encoded: bytes | memoryview) -> dict[str, str]:
    """Return the properties in a property string. Bytes that are not UTF-8 become U+FFFD; no error is raised."""
    properties: dict[str, str] = {}
    for piece in str(encoded, "utf-8", "replace").split(_ENTRY_END):
        name, found, value = piece.partition(_NAME_END)
        if found and name and value:
            properties[name] = value
    return properties


def own_properties(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the properties of the application, without RocketMQ's properties such as delays, retries, transactions and
    marks of the broker."""
    return {name: value for name, value in properties.items() if name not in RESERVED_NAMES}


def copied_properties(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the properties for a copy of a message: the properties of the application, without the properties of dead
    letters."""
    return {name: value for name, value in own_properties(properties).items() if name not in OF_DEAD_LETTERS}


def find_property(encoded: bytes, name: bytes) -> bytes | None:
    """Return one value of a property string without decoding the rest, or None if the value is missing or empty.
    The result is equal to ``decode_properties(encoded).get(name)`` for UTF-8 input."""
    wanted = name + b"\x01"
    # Search from the right, because the last duplicate is used. Include 0x02 in the search, so that KEYS is not found
    # in MYKEYS.
    at = encoded.rfind(b"\x02" + wanted)
    start = at + 1 + len(wanted) if at >= 0 else (len(wanted) if encoded.startswith(wanted) else -1)
    if start < 0:
        return None
    end = encoded.find(b"\x02", start)
    value = encoded[start:] if end < 0 else encoded[start:end]
    if value:
        return value
    earlier = decode_properties(encoded).get(name.decode())  # an empty last duplicate does not replace a value
    return None if earlier is None else earlier.encode()


def find_keys(encoded: bytes) -> Keys:
    """Return UNIQ_KEY, KEYS and TAGS of a property string, in one pass."""
    get = dict(_KEYS.findall(encoded)).get
    return get(b"UNIQ_KEY", b""), get(b"KEYS", b""), get(b"TAGS", b"")


def encode_in_stored_order(properties: Mapping[str, str]) -> bytes:
    """Return the property string of a mapping in the form of a 5.x broker. The result is `in_stored_order` of
    `encode_properties`, without splitting the string again. Values may contain 0x01, which readers accept.
    Raises ValueError: a name or value contains 0x02, which the format cannot represent."""
    ordered = _stored_names(tuple(properties))
    encoded = "".join([f"{name}\x01{properties[name]}\x02" for name in ordered]).encode("utf-8", "replace")
    if encoded.count(_ENTRY_END_BYTES) != len(ordered):
        raise ValueError("a property name or value contains the separator 0x02: remove it")
    return _sort_entries(encoded) if b"\x01\x02" in encoded else encoded  # this drops entries without a value


@functools.lru_cache(maxsize=4096)
def _stored_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return names of properties in the order in which they are stored."""
    return tuple(decode_properties(_sort_entries(encode_properties(dict.fromkeys(names, "v")))))


def in_stored_order(encoded: bytes) -> bytes:
    """Return a property string in the form of a 5.x broker, which decodes a client's string into a ``HashMap`` and
    encodes the map in its order.
    The map begins with 128 buckets and doubles when three quarters are used. The last of several duplicates is used, at
    the place of the first duplicate. Entries without a name or a value are dropped. Buckets with more than eight
    entries are not imitated. The order is cached by names, which halves the time, because producers send the same names
    in every message.
    """
    pieces = encoded.split(_ENTRY_END_BYTES)
    rest = pieces.pop()
    try:
        arrange = _arrangement(tuple([piece[: piece.index(b"\x01")] for piece in pieces]))
    except ValueError:
        arrange = None
    if arrange is None or rest or b"\x01\x02" in encoded:
        return _sort_entries(encoded)
    return _ENTRY_END_BYTES.join(arrange(pieces)) + _ENTRY_END_BYTES


@functools.lru_cache(maxsize=4096)
def _arrangement(names: tuple[bytes, ...]) -> Callable[[list[bytes]], tuple[bytes, ...]] | None:
    """Return a function that sorts entries with these names into the stored order, or None if `_sort_entries` is
    needed."""
    # An `itemgetter` with one index returns an item instead of a tuple.
    if len(names) < 2 or len(set(names)) < len(names) or not all(names):
        return None
    # Add a value, because `_sort_entries` drops entries without a value.
    entries = {name + b"\x01v": at for at, name in enumerate(names)}
    ordered = _sort_entries(_ENTRY_END_BYTES.join(entries)).split(_ENTRY_END_BYTES)
    return itemgetter(*[entries[entry] for entry in ordered[:-1]])


def _sort_entries(encoded: bytes) -> bytes:
    entries: dict[bytes, bytes] = {}
    for entry in encoded.split(_ENTRY_END_BYTES):
        name, _, value = entry.partition(b"\x01")
        if value and name:
            entries[name] = entry
    if len(entries) * 4 <= _MAP_BUCKETS * 3:
        # `sorted` preserves the order of names in the same bucket, as Java's map does.
        names = sorted(entries, key=_first_bucket)
    else:
        last_bucket = (1 << ((len(entries) * 4 - 1) // 3).bit_length()) - 1
        names = sorted(entries, key=lambda name: _spread_hash(name) & last_bucket)
    return _ENTRY_END_BYTES.join([*map(entries.__getitem__, names), b""])


@functools.lru_cache(maxsize=4096)
def _first_bucket(name: bytes) -> int:
    return _spread_hash(name) % _MAP_BUCKETS


def _spread_hash(name: bytes) -> int:
    """Return the hash from which Java's ``HashMap`` computes the bucket of a key."""
    hashed = java_hash(name.decode("utf-8", "replace")) & 0xFFFFFFFF
    return hashed ^ hashed >> 16


def java_hash(text: str) -> int:
    """Return Java's ``text.hashCode()``, a signed 32-bit number. The text may contain lone surrogates."""
    h = 0
    if text.isascii():
        for unit in text.encode():
            h = (31 * h + unit) & 0xFFFFFFFF
    else:
        encoded = text.encode("utf-16-be", "surrogatepass")
        for i in range(0, len(encoded), 2):
            h = (31 * h + (encoded[i] << 8 | encoded[i + 1])) & 0xFFFFFFFF
    return h - 0x1_0000_0000 if h & 0x8000_0000 else h


def lite_queue_id(lite_topic: str, count: int) -> int:
    """Return the index of the queue of the parent topic for messages of a lite topic, among ``count`` queues: a jump
    consistent hash, as RocketMQ's proxies choose it. Source: lite.md §4."""
    assert count > 0, "a topic has queues"
    mask = (1 << 64) - 1
    state, chosen, following = java_hash(lite_topic) & mask, 0, 0
    while following < count:
        chosen = following
        state = (state * 2862933555777941757 + 1) & mask
        following = int((chosen + 1) / (((state >> 33) + 1) / (1 << 31)))
    return chosen


def lite_number(properties: Mapping[str, str]) -> int:
    """Return the number of a stored message in its lite topic, or -1 if it is in none. Source: lite.md §4."""
    own = f"${properties.get(LITE_TOPIC)}"
    names = properties.get(INNER_MULTI_DISPATCH, "").split(",")
    numbers = properties.get(INNER_MULTI_QUEUE_OFFSET, "").split(",")
    return next((int(one) for name, one in zip(names, numbers, strict=False) if name.endswith(own)), -1)


@functools.lru_cache(maxsize=4096)
def tags_code(tags: str) -> int:
    """Return the consume-queue code of a TAGS property, 0 for an empty text. Source: store.md §4.2."""
    return java_hash(tags)


@functools.lru_cache(maxsize=4096)
def encoded_tags_code(tags: bytes) -> int:
    """Return the `tags_code` of a TAGS property that is stored as UTF-8 bytes."""
    return java_hash(tags.decode("utf-8", "replace"))
