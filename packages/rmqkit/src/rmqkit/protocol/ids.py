"""Ids and handles: texts that identify messages (``MessageClientIDSetter``, ``ExtraInfoUtil``).

A broker creates *offset message ids*, a client creates *unique keys*.

======================  ====================================================================  =========
id                      layout                                                                text
======================  ====================================================================  =========
offset message id       store host IP 4 or 16, port i32, physical offset i64                  32 or 56
unique key (UNIQ_KEY)   client IP 4 or 16, process id u16, random i32, ms of month u32,       32 or 56
                        counter u16
======================  ====================================================================  =========

The text is upper-case hexadecimal. Its length distinguishes IPv4 from IPv6 addresses. Source: remoting.md §7.4.

A POP entry consists of words separated by blanks. ``;`` separates entries. ``<r>`` is the kind of topic: ``0`` is the
topic itself, ``1`` and ``2`` are the group's retry topic in its two spellings (``%RETRY%<group>_<topic>``,
``%RETRY%<group>+<topic>``).

===================  =====================================================================================
string               entry
===================  =====================================================================================
startOffsetInfo      ``<r> <queue> <start offset>``
msgOffsetInfo        ``<r> <queue> <offset>,<offset>…``
orderCountInfo       ``<r> <queue> <count>`` or ``<r> qo<queue>%<offset> <count>``
extraInfo, POP_CK    ``<check point offset> <pop time> <invisible time> <revive queue> <r> <broker> <queue>``,
                     then optionally `` <offset>`` and `` <place in the log>``
recallHandle         base64url, padded, of ``v1 <topic> <broker name> <deliver time in ms + 1> <UNIQ_KEY>``
===================  =====================================================================================

Proxies and some clients add a ninth word to a POP handle, the record's place in the log. The decoder ignores this word
and, like the reference, all further words. An empty string has no entries. Decoders of POP strings and recall handles
raise only HeaderError.
Source: remoting.md §4.6.1, §7.6.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime

from msgspec import Struct

from rmqkit.errors import HeaderError
from rmqkit.protocol.record import unpack_host

_OFFSET = struct.Struct(">q")
_UNIQUE_TAIL = struct.Struct(">IH")


def offset_id(store_host: bytes, physical_offset: int) -> str:
    """Return the offset message id of a record: the packed store host (8 or 20 bytes) and the place of the record in
    the log."""
    return (store_host + _OFFSET.pack(physical_offset)).hex().upper()


def offset_ids(store_host: bytes, physical_offsets: Iterable[int]) -> str:
    """Return the offset message ids of several records, joined by commas."""
    host = store_host.hex().upper()
    return ",".join([f"{host}{offset & 0xFFFFFFFFFFFFFFFF:016X}" for offset in physical_offsets])


def decode_offset_id(text: str) -> tuple[str, int, int]:
    """Return IP, port and physical offset of an offset message id.

    Raises ValueError: not 32 or 56 hexadecimal digits.
    """
    if len(text) not in (32, 56):
        raise ValueError(f"offset message id {text!r} has {len(text)} characters: it must have 32 or 56")
    try:
        packed = bytes.fromhex(text)
    except ValueError:
        raise ValueError(f"offset message id {text!r} is not hexadecimal") from None
    # `bytes.fromhex` ignores blanks, so 32 characters may yield fewer than 16 bytes.
    if len(packed) * 2 != len(text):
        raise ValueError(f"offset message id {text!r} is not hexadecimal")
    ip, port = unpack_host(packed[:-8])
    return ip, port, _OFFSET.unpack_from(packed, len(packed) - 8)[0]


class UniqueKeys:
    """The generator of unique keys for one process.
    ``ip``: the packed address, 4 or 16 bytes. ``seed``: a 32-bit number that differs between instances in one
    process."""

    __slots__ = ("_counter", "_month_end_ms", "_month_start_ms", "_prefix")

    def __init__(self, ip: bytes, process_id: int, seed: int) -> None:
        # Programs in containers may all be process 1 with the same address: then only the seed makes their keys differ.
        self._prefix = (ip + struct.pack(">HI", process_id & 0xFFFF, seed & 0xFFFFFFFF)).hex().upper()
        self._counter = seed & 0xFFFF
        self._month_start_ms = self._month_end_ms = 0

    def next(self, now_ms: int) -> str:
        """Return a new key for a message born at ``now_ms`` (ms since the epoch)."""
        if not self._month_start_ms <= now_ms < self._month_end_ms:
            self._enter_month(now_ms)
        self._counter = (self._counter + 1) & 0xFFFF
        # Keys of the same millisecond differ in the counter, which has 65,536 values.
        tail = _UNIQUE_TAIL.pack(now_ms - self._month_start_ms, self._counter)
        return self._prefix + tail.hex().upper()

    def _enter_month(self, now_ms: int) -> None:
        """Count the time part of keys from the first day of the month, 00:00 local time, so that it fits in 32 bits."""
        first = datetime.fromtimestamp(now_ms / 1000).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        following = first.replace(year=first.year + first.month // 12, month=first.month % 12 + 1)
        self._month_start_ms = int(first.timestamp() * 1000)
        self._month_end_ms = int(following.timestamp() * 1000)
        assert self._month_end_ms - self._month_start_ms < 1 << 32, "the time part of a key has 32 bits"


NORMAL_TOPIC = "0"
RETRY_TOPIC_V1 = "1"
RETRY_TOPIC_V2 = "2"

_INTEGER = re.compile(r"-?[0-9]{1,19}")
_HANDLE = re.compile(
    "{0} {0} {0} {0} ([012]) ([^ ]+) {0}(?: {0}(?: {0}(?: .*)?)?)?".format(f"({_INTEGER.pattern})")
).fullmatch
_ORDER_QUEUE = re.compile(r"qo(-?[0-9]{1,19})%(-?[0-9]{1,19})")
_INT64_MAX = (1 << 63) - 1
_ACK_BITS_MAX = 1 << 16


class PopQueue(Struct, frozen=True, order=True):
    """A queue of a topic or of its retry topic."""

    retry: str
    queue_id: int


class OrderKey(Struct, frozen=True, order=True):
    """The key of a delivery count: a queue, or one message of a queue."""

    retry: str
    queue_id: int
    queue_offset: int | None = None


class PopHandle(Struct, kw_only=True, frozen=True):
    """The handle of a popped message. Acks and changes of the invisible time send it. Times are in ms.
    ``check_point_offset`` is an offset in the revive queue, for ordered pops in the queue itself. ``queue_offset`` is
    the message's offset in its queue, or None in the handle of a whole pop."""

    check_point_offset: int
    pop_time: int
    invisible_time: int
    revive_queue_id: int
    retry: str
    broker_name: str
    queue_id: int
    queue_offset: int | None = None


def encode_start_offsets(offsets: Mapping[PopQueue, int]) -> str:
    """Return ``startOffsetInfo``."""
    return ";".join([f"{queue.retry} {queue.queue_id} {offset}" for queue, offset in offsets.items()])


def decode_start_offsets(text: str) -> dict[PopQueue, int]:
    """Return the start offset of the messages of each queue."""
    return {PopQueue(retry, _integer(queue, text)): _integer(offset, text) for retry, queue, offset in _entries(text)}


def encode_message_offsets(offsets: Mapping[PopQueue, Iterable[int]]) -> str:
    """Return ``msgOffsetInfo``."""
    return ";".join([f"{q.retry} {q.queue_id} {','.join(map(str, those))}" for q, those in offsets.items()])


def decode_message_offsets(text: str) -> dict[PopQueue, list[int]]:
    """Return the offset of every message, by queue."""
    return {
        PopQueue(retry, _integer(queue, text)): [_integer(offset, text) for offset in offsets.split(",")]
        for retry, queue, offsets in _entries(text)
    }


def encode_order_counts(counts: Mapping[OrderKey, int]) -> str:
    """Return ``orderCountInfo``."""
    return ";".join([f"{key.retry} {_order_queue(key)} {count}" for key, count in counts.items()])


def decode_order_counts(text: str) -> dict[OrderKey, int]:
    """Return delivery counts. A broker sends a count for each message, or only a count for each queue."""
    counts: dict[OrderKey, int] = {}
    for retry, queue, count in _entries(text):
        match = _ORDER_QUEUE.fullmatch(queue)
        if match is None:
            key = OrderKey(retry, _integer(queue, text))
        else:
            key = OrderKey(retry, _integer(match[1], text), _integer(match[2], text))
        counts[key] = _integer(count, text)
    return counts


def encode_lite_counts(counts: Iterable[tuple[int, int]]) -> str:
    """Return ``orderCountInfo`` of a lite pop. ``counts``: for each message, its number in its lite topic, and the
    number of its earlier deliveries."""
    return ";".join([f"{NORMAL_TOPIC} qo0%{number} {count}" if count else "0" for number, count in counts])


def decode_lite_counts(text: str) -> list[int]:
    """Return the number of earlier deliveries of each message of a lite pop. Raises HeaderError: a part is no count."""
    return [_integer(entry.rpartition(" ")[2], text) for entry in text.split(";")] if text else []


def encode_pop_handle(handle: PopHandle) -> str:
    """Return ``extraInfo``, the POP_CK property.
    Raises ValueError: the broker name contains a blank, which separates the parts."""
    if not handle.broker_name or " " in handle.broker_name:
        raise ValueError(f"broker name {handle.broker_name!r} must be a word without blanks")
    text = (
        f"{handle.check_point_offset} {handle.pop_time} {handle.invisible_time} {handle.revive_queue_id} "
        f"{handle.retry} {handle.broker_name} {handle.queue_id}"
    )
    return text if handle.queue_offset is None else f"{text} {handle.queue_offset}"


def decode_pop_handle(text: str) -> PopHandle:
    """Return the handle in a POP_CK. Raises HeaderError: the text is not a POP handle."""
    match = _HANDLE(text)
    # `filter` drops only missing parts: the text "0" is true, because it is not empty.
    numbers = [] if match is None else list(map(int, filter(None, match.group(1, 2, 3, 4, 7, 8, 9))))
    if match is None or max(numbers) > _INT64_MAX or min(numbers) < -_INT64_MAX - 1:
        rules = "must have 7 words or more: the fifth is 0, 1 or 2, the sixth a broker's name, others 64-bit integers"
        raise HeaderError(f"POP handle {text[:80]!r} {rules}")
    start, pop_time, invisible_time, revive_queue, queue, *own = numbers
    return PopHandle(
        check_point_offset=start,
        pop_time=pop_time,
        invisible_time=invisible_time,
        revive_queue_id=revive_queue,
        retry=match[5],
        broker_name=match[6],
        queue_id=queue,
        queue_offset=own[0] if own else None,
    )


def encode_acked(start_offset: int, queue_offsets: Iterable[int]) -> bytes:
    """Return the bits of a batch ack: bit i, least significant first, is the offset ``start_offset`` + i.
    Raises ValueError: an offset is less than ``start_offset``, or exceeds it by 65 536 or more."""
    bits = 0
    for offset in queue_offsets:
        if not 0 <= offset - start_offset < _ACK_BITS_MAX:
            raise ValueError(f"offset {offset} cannot be acked together with a pop that starts at {start_offset}")
        bits |= 1 << (offset - start_offset)
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def decode_acked(start_offset: int, acked: bytes) -> list[int]:
    """Return the offsets of a batch ack, ascending. Raises HeaderError: more than 65 536 bits."""
    if len(acked) * 8 > _ACK_BITS_MAX:
        raise HeaderError(f"batch ack has {len(acked)} bytes of bits: at most {_ACK_BITS_MAX // 8} are allowed")
    return [start_offset + 8 * i + bit for i, byte in enumerate(acked) if byte for bit in range(8) if byte & (1 << bit)]


def _order_queue(key: OrderKey) -> str:
    return str(key.queue_id) if key.queue_offset is None else f"qo{key.queue_id}%{key.queue_offset}"


def _entries(text: str) -> Iterator[tuple[str, str, str]]:
    for entry in text.split(";") if text else ():
        words = entry.split(" ")
        if len(words) != 3:
            raise HeaderError(f"POP entry {entry[:80]!r} has {len(words)} words: it must have 3")
        yield _retry(words[0], text), words[1], words[2]


def _retry(word: str, text: str) -> str:
    if word not in (NORMAL_TOPIC, RETRY_TOPIC_V1, RETRY_TOPIC_V2):
        raise HeaderError(f"POP string {text[:80]!r}: {word[:20]!r} must be 0, 1 or 2")
    return word


def _integer(word: str, text: str) -> int:
    if not _INTEGER.fullmatch(word) or not -_INT64_MAX - 1 <= int(word) <= _INT64_MAX:
        raise HeaderError(f"POP string {text[:80]!r}: {word[:20]!r} is not a 64-bit integer")
    return int(word)


_RECALL_VERSION = "v1"
_DIGITS_MAX = 19


class RecallHandle(Struct, frozen=True):
    """The timed message that a recall handle identifies. ``deliver_timestamp`` is in ms since the epoch."""

    topic: str
    broker_name: str
    deliver_timestamp: int
    unique_key: str


def encode_recall_handle(handle: RecallHandle) -> str:
    """Return the text of a handle. Raises ValueError: a part is empty or contains a blank, the separator of parts."""
    parts = (_RECALL_VERSION, handle.topic, handle.broker_name, str(handle.deliver_timestamp + 1), handle.unique_key)
    text = " ".join(parts)
    if text.count(" ") != len(parts) - 1 or not all(parts):
        raise ValueError(f"recall handle parts {parts} must be words without blanks")
    return base64.urlsafe_b64encode(text.encode()).decode()


def decode_recall_handle(text: str) -> RecallHandle:
    """Return the recall handle of a text. As in Java, the padding may be missing.
    Raises HeaderError: the text is not a handle of a known version."""
    try:
        plain = base64.b64decode(text.encode() + b"=" * (-len(text) % 4), b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise HeaderError(f"recall handle {text[:80]!r} is not base64url of UTF-8 text") from None
    match plain.split(" "):
        case [version, topic, broker_name, time, unique_key] if version == _RECALL_VERSION and _is_time(time):
            return RecallHandle(topic, broker_name, int(time) - 1, unique_key)
        case _:
            raise HeaderError(f"recall handle {plain[:80]!r} is not 'v1 <topic> <broker> <time> <key>'")


def _is_time(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX
