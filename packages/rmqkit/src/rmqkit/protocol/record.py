"""The stored record: a message in the form of the CommitLog and of pull, query and view bodies.

All integers are big-endian and signed::

    at  size  field                        at  size  field (IPv4 hosts)
     0     4  totalSize                    48     8  bornHost: IP + port (20 with sysFlag bit 4)
     4     4  magic                        56     8  storeTimestamp
     8     4  bodyCRC                      64     8  storeHost: IP + port (20 with sysFlag bit 5)
    12     4  queueId                      72     4  reconsumeTimes
    16     4  flag                         76     8  preparedTransactionOffset
    20     8  queueOffset                  84     4  bodyLength, then the body
    28     8  physicalOffset                      1  topicLength (2 with magic v2), then the topic
    36     4  sysFlag                             2  propertiesLength, then the property string
    40     8  bornTimestamp

bodyCRC is the CRC-32 of the stored body with the top bit cleared. Records follow each other without padding. A *blank*
marks the end of a file: ``i32 remaining bytes, i32 BLANK_MAGIC``. This format is fixed on disk and on the wire.

This module is the only codec of the format: the store, the client and the bulk readers use its tables.
Not handled here: the choice of offsets and new files (store), decompression and inner batches (`message`).
Source: store.md §3, §12.1; remoting.md §7.1.

A batch is the body of SEND_BATCH_MESSAGE (320) and of inner-batch records. It is a sequence of entries::

    totalSize 4      22 + body + properties
    magic 4          0
    bodyCRC 4        0 (the broker computes the CRC)
    flag 4           application flag
    bodyLength 4     then the body, never compressed
    propsLength 2    then the property string

Source: remoting.md §7.2, store.md §3.7.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import Struct

from rmqkit.errors import BodyError, RecordCorrupt

# The numbers are signed, because all readers, here and in Java, read the four bytes as an i32.
MAGIC_V1 = 0xDAA320A7 - (1 << 32)
MAGIC_V2 = 0xDAA320AB - (1 << 32)
BLANK_MAGIC = 0xCBD43194 - (1 << 32)
BLANK_BYTES = 8
_V1_TOPIC_BYTES_MAX = 127

# sysFlag bits (store.md §3.3)
COMPRESSED = 0x1
MULTI_TAGS = 0x2
TRANSACTION_MASK = 0xC
TRANSACTION_PREPARED = 0x4
TRANSACTION_COMMIT = 0x8
TRANSACTION_ROLLBACK = 0xC
BORN_HOST_V6 = 0x10
STORE_HOST_V6 = 0x20
NEED_UNWRAP = 0x40
INNER_BATCH = 0x80
COMPRESSION_MASK = 0x700
_HOST_MASK = BORN_HOST_V6 | STORE_HOST_V6

HEAD_FIELDS: tuple[tuple[str, str], ...] = (
    ("size", "i"),
    ("magic", "i"),
    ("body_crc", "i"),
    ("queue_id", "i"),
    ("flag", "i"),
    ("queue_offset", "q"),
    ("physical_offset", "q"),
    ("sys_flag", "i"),
    ("born_timestamp", "q"),
    ("born_host", "host"),
    ("store_timestamp", "q"),
    ("store_host", "host"),
    ("reconsume_times", "i"),
    ("prepared_transaction_offset", "q"),
    ("body_bytes", "i"),
)
"""The fields before the body, in order: name and `struct` letter. A host has 8 bytes, or 20 if its v6 bit is set."""

_BODY_CRC_AT = 8
_SYS_FLAG_AT = 36
_HEAD_BYTES_MIN = 88
_PROPERTIES_LENGTH = struct.Struct(">h")
_TOPIC_LENGTH_V2 = struct.Struct(">h")
_TOPIC_LENGTHS_V1 = tuple(bytes((length,)) for length in range(_V1_TOPIC_BYTES_MAX + 1))
_I32 = struct.Struct(">i")
_BLANK = struct.Struct(">ii")


class Layout(Struct, frozen=True, gc=False):
    """The positions of the fields before the body, for one combination of host sizes.

    Attributes:
        head: struct of all `HEAD_FIELDS`.
        positions: field name → byte position in the record.
        head_bytes: size of the head, and position of the body.
    """

    head: struct.Struct
    positions: dict[str, int]
    head_bytes: int


@functools.cache
def layout_of(host_bits: int) -> Layout:
    """Return the layout for the two host bits of sysFlag (``sysFlag & 0x30``)."""
    letters = ">"
    positions: dict[str, int] = {}
    for name, letter in HEAD_FIELDS:
        positions[name] = struct.calcsize(letters)
        if letter == "host":
            is_v6 = host_bits & (BORN_HOST_V6 if name == "born_host" else STORE_HOST_V6)
            letter = "20s" if is_v6 else "8s"
        letters += letter
    head = struct.Struct(letters)
    return Layout(head=head, positions=positions, head_bytes=head.size)


_LAYOUTS = {bits: layout_of(bits) for bits in (0, BORN_HOST_V6, STORE_HOST_V6, _HOST_MASK)}
_HEAD_V4 = _LAYOUTS[0].head
assert layout_of(0).head_bytes == _HEAD_BYTES_MIN
assert layout_of(0).positions["sys_flag"] == _SYS_FLAG_AT
assert layout_of(0).positions["body_crc"] == _BODY_CRC_AT


class Record(Struct, gc=False):
    """A decoded record.

    Attributes:
        size: bytes of the whole record.
        magic: `MAGIC_V1` or `MAGIC_V2`.
        body_crc: CRC-32 & 0x7FFFFFFF of ``body`` as stored.
        queue_offset: position in the queue, in messages.
        physical_offset: position in the log, in bytes.
        born_timestamp: the sender's clock, ms since the epoch.
        born_host: sender as IP and port, 8 or 20 packed bytes (`host_text`).
        store_timestamp: the broker's clock at the append, ms since the epoch.
        store_host: broker as IP and port, 8 or 20 packed bytes.
        prepared_transaction_offset: physical offset of the half message of a committed message, otherwise 0.
        body: stored bytes, possibly compressed (`COMPRESSED`) or a batch (`INNER_BATCH`).
        properties: the property string (`properties.decode_properties`).
    """

    size: int
    magic: int
    body_crc: int
    queue_id: int
    flag: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    born_timestamp: int
    born_host: bytes
    store_timestamp: int
    store_host: bytes
    reconsume_times: int
    prepared_transaction_offset: int
    body: bytes
    topic: str
    properties: bytes

    @property
    def has_sound_body(self) -> bool:
        """Return True if the body matches the CRC of the record."""
        return zlib.crc32(self.body) & 0x7FFFFFFF == self.body_crc


def body_crc(body: bytes | memoryview) -> int:
    """Return the CRC-32 of a stored body with the top bit cleared."""
    # Java has no unsigned int: it clears the sign bit of the 32-bit number.
    return zlib.crc32(body) & 0x7FFFFFFF


def encode_record(
    *,
    topic: bytes,
    queue_id: int,
    flag: int,
    queue_offset: int,
    physical_offset: int,
    sys_flag: int,
    born_timestamp: int,
    born_host: bytes,
    store_timestamp: int,
    store_host: bytes,
    reconsume_times: int,
    prepared_transaction_offset: int,
    body: bytes | memoryview,
    properties: bytes,
    crc: int | None = None,
) -> bytes:
    """Return the bytes of a record. This function computes the sizes, magic, CRC and the host bits of sysFlag.
    Magic v2 is used if the topic has more than 127 bytes. ``crc``: the `body_crc`, if it is already known.
    The caller must check the limits of store.md §3.6 (properties ≤ 32 767 bytes, topic ≤ 255 bytes)."""
    host_bits = (BORN_HOST_V6 if len(born_host) == 20 else 0) | (STORE_HOST_V6 if len(store_host) == 20 else 0)
    head = _HEAD_V4 if not host_bits else _LAYOUTS[host_bits].head
    topic = topic_field(topic)
    body_bytes = len(body)
    size = head.size + body_bytes + len(topic) + 2 + len(properties)
    packed = head.pack(
        size,
        MAGIC_V1 if len(topic) <= _V1_TOPIC_BYTES_MAX + 1 else MAGIC_V2,
        zlib.crc32(body) & 0x7FFFFFFF if crc is None else crc,
        queue_id,
        flag,
        queue_offset,
        physical_offset,
        # Replace the client's host bits: they must match the lengths of this record's hosts. Otherwise readers would
        # expect body and topic in the wrong place.
        (sys_flag & ~_HOST_MASK) | host_bits,
        born_timestamp,
        born_host,
        store_timestamp,
        store_host,
        reconsume_times,
        prepared_transaction_offset,
        body_bytes,
    )
    return b"".join((packed, body, topic, _PROPERTIES_LENGTH.pack(len(properties)), properties))


RecordRow = tuple[bytes, int, int, int, int, int, int, bytes | memoryview, bytes | memoryview]
"""The fields that differ among the records of `encode_records`: topic (`topic_field`), queueId, flag, queueOffset,
sysFlag (its host bits are replaced), bornTimestamp, reconsumeTimes, body, and two bytes of length with the property
string."""


def topic_field(topic: bytes) -> bytes:
    """Return the length of a topic, followed by the topic. The length takes one byte up to 127 (magic v1), otherwise
    two bytes."""
    topic_bytes = len(topic)
    is_v1 = topic_bytes <= _V1_TOPIC_BYTES_MAX
    return (_TOPIC_LENGTHS_V1[topic_bytes] if is_v1 else _TOPIC_LENGTH_V2.pack(topic_bytes)) + topic


def encode_records(
    rows: Iterable[RecordRow], *, physical_offset: int, born_host: bytes, store_timestamp: int, store_host: bytes
) -> tuple[bytes, list[int]]:
    """Return concatenated records and the size of each. The bytes are the same as from `encode_record`, in one loop.
    preparedTransactionOffset is 0. ``physical_offset``: offset of the first record."""
    host_bits = (BORN_HOST_V6 if len(born_host) == 20 else 0) | (STORE_HOST_V6 if len(store_host) == 20 else 0)
    head = _LAYOUTS[host_bits].head
    pack, crc32, other_bits = head.pack, zlib.crc32, ~_HOST_MASK
    parts: list[bytes | memoryview] = []
    sizes: list[int] = []
    topic_before, magic, fixed_bytes = b"", MAGIC_V1, head.size
    for topic, queue_id, flag, queue_offset, sys_flag, born_timestamp, reconsume_times, body, properties in rows:
        # Comparing by identity is cheap. Rows of one topic usually share the object; an equal copy only costs this
        # branch.
        if topic is not topic_before:
            topic_before, fixed_bytes = topic, head.size + len(topic)
            magic = MAGIC_V1 if len(topic) <= _V1_TOPIC_BYTES_MAX + 1 else MAGIC_V2
        body_bytes = len(body)
        size = fixed_bytes + body_bytes + len(properties)
        parts += (
            pack(
                size,
                magic,
                crc32(body) & 0x7FFFFFFF,
                queue_id,
                flag,
                queue_offset,
                physical_offset,
                sys_flag & other_bits | host_bits,
                born_timestamp,
                born_host,
                store_timestamp,
                store_host,
                reconsume_times,
                0,
                body_bytes,
            ),
            body,
            topic,
            properties,
        )
        sizes.append(size)
        physical_offset += size
    return b"".join(parts), sizes


def decode_record(buffer: bytes | memoryview, position: int = 0, *, verify_crc: bool = False) -> Record:
    """Return the record at a position of a buffer, with copies of body and properties.
    Raises RecordCorrupt: fewer bytes than announced, unknown magic, parts that do not match the size, a topic that is
    not UTF-8, or (with ``verify_crc``) a body that does not match its CRC. Source: store.md §12.1."""
    available = len(buffer) - position
    if available < _HEAD_BYTES_MIN:
        raise RecordCorrupt(position, f"only {available} bytes left")
    size = _I32.unpack_from(buffer, position)[0]
    magic = _I32.unpack_from(buffer, position + 4)[0]
    if magic not in (MAGIC_V1, MAGIC_V2):
        raise RecordCorrupt(position, f"magic is {magic & 0xFFFFFFFF:08x}")
    if not _HEAD_BYTES_MIN <= size <= available:
        raise RecordCorrupt(position, f"announced size is {size} and {available} bytes are left")
    layout = _LAYOUTS[_I32.unpack_from(buffer, position + _SYS_FLAG_AT)[0] & _HOST_MASK]
    end = position + size
    body_at = position + layout.head_bytes
    # Check before the unpack: with IPv6 hosts in a damaged sysFlag, the head may be longer than the record and even
    # than the buffer. The unpack would raise struct.error, which callers do not expect.
    if body_at > end:
        raise RecordCorrupt(position, f"announced size {size} is smaller than its head", size=size)
    head = layout.head.unpack_from(buffer, position)
    topic_at, topic_end, properties_at = _tail_bounds(buffer, position, size, body_at, head[14], magic)
    body = bytes(buffer[body_at : body_at + head[14]])
    if verify_crc and zlib.crc32(body) & 0x7FFFFFFF != head[2]:
        raise RecordCorrupt(position, f"body CRC is not the stored {head[2]:08x}", size=size)
    try:
        topic = str(buffer[topic_at:topic_end], "utf-8")
    except UnicodeDecodeError:
        raise RecordCorrupt(position, "the topic is not UTF-8", size=size) from None
    fields: tuple[Any, ...] = (*head[:14], body, topic, bytes(buffer[properties_at:end]))
    return Record(*fields)


def _tail_bounds(
    buffer: bytes | memoryview, position: int, size: int, body_at: int, body_bytes: int, magic: int
) -> tuple[int, int, int]:
    """Return start and end of the topic, and start of the properties.
    Raises RecordCorrupt: the parts do not fill the announced size exactly."""
    end = position + size
    length_bytes = 1 if magic == MAGIC_V1 else 2
    topic_at = body_at + body_bytes + length_bytes
    if body_bytes < 0 or topic_at + 2 > end:
        raise RecordCorrupt(position, f"body length {body_bytes} does not fit into size {size}", size=size)
    topic_bytes = buffer[topic_at - 1] if length_bytes == 1 else _TOPIC_LENGTH_V2.unpack_from(buffer, topic_at - 2)[0]
    properties_at = topic_at + topic_bytes + 2
    # Java reads the one byte as a signed number. Above 127 it is a negative length, which no writer produces.
    if topic_bytes < 0 or (length_bytes == 1 and topic_bytes > _V1_TOPIC_BYTES_MAX) or properties_at > end:
        raise RecordCorrupt(position, f"topic length {topic_bytes} does not fit into size {size}", size=size)
    properties_bytes = _PROPERTIES_LENGTH.unpack_from(buffer, properties_at - 2)[0]
    if properties_at + properties_bytes != end or properties_bytes < 0:
        raise RecordCorrupt(position, f"its parts do not add up to the announced size {size}", size=size)
    return topic_at, properties_at - 2, properties_at


def record_properties(record: memoryview) -> bytes:
    """Return the property string of a whole record without decoding the rest, or empty bytes if the record is
    damaged."""
    try:
        # The last of the four bytes contains both host bits.
        at = _LAYOUTS[record[_SYS_FLAG_AT + 3] & _HOST_MASK].head_bytes
        at += _I32.unpack_from(record, at - 4)[0]
        if _I32.unpack_from(record, 4)[0] == MAGIC_V1:
            at += 1 + record[at]
        else:
            at += 2 + _TOPIC_LENGTH_V2.unpack_from(record, at)[0]
        return bytes(record[at + 2 : at + 2 + _PROPERTIES_LENGTH.unpack_from(record, at)[0]])
    except (struct.error, IndexError):
        return b""


def record_topic(record: memoryview) -> bytes:
    """Return the topic of a whole record without decoding the rest, or empty bytes if its parts do not match its
    size."""
    try:
        body_at = _LAYOUTS[record[_SYS_FLAG_AT + 3] & _HOST_MASK].head_bytes
        magic = _I32.unpack_from(record, 4)[0]
        if magic not in (MAGIC_V1, MAGIC_V2):
            return b""
        body_bytes = _I32.unpack_from(record, body_at - 4)[0]
        topic_at, topic_end, _ = _tail_bounds(record, 0, len(record), body_at, body_bytes, magic)
        return bytes(record[topic_at:topic_end])
    except (struct.error, IndexError, RecordCorrupt):
        return b""


def has_sound_body(record: memoryview) -> bool:
    """Return True if the body of a record matches its CRC. The record must be whole, and its parts must match its
    size."""
    at = _LAYOUTS[record[_SYS_FLAG_AT + 3] & _HOST_MASK].head_bytes
    body = record[at : at + _I32.unpack_from(record, at - 4)[0]]
    return bool(body_crc(body) == _I32.unpack_from(record, _BODY_CRC_AT)[0])


def iter_records(buffer: bytes | memoryview) -> Iterator[Record]:
    """Yield the records of a pull, query or view body. Stop at a blank, an unknown magic or an incomplete record."""
    position = 0
    while position < len(buffer):
        try:
            record = decode_record(buffer, position)
        except RecordCorrupt:
            return
        yield record
        position += record.size


def is_blank(buffer: bytes | memoryview, position: int = 0) -> bool:
    """Return True if there is a blank, an end-of-file record, at a position."""
    return len(buffer) - position >= BLANK_BYTES and _I32.unpack_from(buffer, position + 4)[0] == BLANK_MAGIC


def closes_file(buffer: bytes | memoryview, position: int = 0) -> bool:
    """Return True if there is a blank at a position and it covers the rest of the file. ``buffer``: the file or its
    beginning. A blank with a smaller number is a record with a damaged magic, after which records may follow."""
    return is_blank(buffer, position) and _I32.unpack_from(buffer, position)[0] >= len(buffer) - position


def pack_blank(remaining_bytes: int) -> bytes:
    """Return the blank for the end of a file. ``remaining_bytes`` includes the 8 bytes of the blank."""
    return _BLANK.pack(remaining_bytes, BLANK_MAGIC)


def pack_host(ip: str, port: int) -> bytes:
    """Return IP and port as the 8 or 20 bytes of a record. Raises ValueError: ``ip`` is not a literal address."""
    try:
        return ipaddress.ip_address(ip.partition("%")[0]).packed + _I32.pack(port)
    except ValueError:
        raise ValueError(f"{ip!r} is not a literal IPv4 or IPv6 address") from None


def unpack_host(host: bytes) -> tuple[str, int]:
    """Return IP text and port of packed host bytes (8 or 20)."""
    return str(ipaddress.ip_address(host[:-4])), _I32.unpack_from(host, len(host) - 4)[0]


@functools.lru_cache(maxsize=1024)
def host_text(host: bytes) -> str:
    """Return ``ip:port`` of packed host bytes, with an IPv6 address in brackets."""
    ip, port = unpack_host(host)
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


_HEAD = struct.Struct(">iiiii")
_HEAD_BYTES = _HEAD.size
BATCH_ENTRY_BYTES_MIN = _HEAD_BYTES + _PROPERTIES_LENGTH.size
_flag_and_sizes = struct.Struct(">i8xii").unpack_from
_length = _PROPERTIES_LENGTH.unpack_from

BatchBounds = tuple[int, int, int, int]
"""A message in a batch body: its flag, start of the body, start of the properties, end.

The two bytes between body and properties are the length of the properties.
"""


class BatchEntry(Struct, gc=False):
    """A message of a batch. Its other fields are in the request or the enclosing record."""

    body: bytes
    properties: bytes
    flag: int = 0


def encode_batch(entries: Iterable[BatchEntry]) -> bytes:
    """Return the batch body of messages. The caller must check that no property string is over 32 767 bytes."""
    parts: list[bytes] = []
    for entry in entries:
        size = BATCH_ENTRY_BYTES_MIN + len(entry.body) + len(entry.properties)
        parts.append(_HEAD.pack(size, 0, 0, entry.flag, len(entry.body)))
        parts.append(entry.body)
        parts.append(_PROPERTIES_LENGTH.pack(len(entry.properties)))
        parts.append(entry.properties)
    return b"".join(parts)


def decode_batch(body: bytes | memoryview) -> list[BatchEntry]:
    """Return the messages of a batch body.
    Raises BodyError: an entry does not fit in the body, or its parts do not match its size."""
    return [
        BatchEntry(bytes(body[body_at : properties_at - 2]), bytes(body[properties_at:end]), flag)
        for flag, body_at, properties_at, end in batch_bounds(body)
    ]


def is_long_batch(body: bytes | memoryview, *, count_max: int, properties_bytes_max: int) -> bool:
    """Return True if a batch body exceeds the limit of messages or of property bytes. Reading stops at the limit.
    Return False for a body with impossible sizes: `batch_bounds` reports the fault."""
    total = len(body)
    if total <= min(count_max * BATCH_ENTRY_BYTES_MIN, properties_bytes_max):
        return False
    position = 0
    for _ in range(count_max):
        if total - position < BATCH_ENTRY_BYTES_MIN:
            return False
        size, _, body_bytes = _flag_and_sizes(body, position)
        if size < BATCH_ENTRY_BYTES_MIN or body_bytes < 0:
            return False
        position += size
        properties_bytes_max -= size - body_bytes - BATCH_ENTRY_BYTES_MIN
        if properties_bytes_max < 0:
            return True
    return position < total


def batch_bounds(body: bytes | memoryview, position: int = 0, count_max: int | None = None) -> list[BatchBounds]:
    """Return the bounds of the messages of a batch body, starting at a position, for at most ``count_max`` messages.
    Raises BodyError: see `decode_batch`."""
    bounds: list[BatchBounds] = []
    total = len(body)
    while position < total and len(bounds) != count_max:
        if total - position < BATCH_ENTRY_BYTES_MIN:
            raise BodyError(f"batch entry at byte {position} is cut off: {total - position} bytes left")
        size, flag, body_bytes = _flag_and_sizes(body, position)
        end = position + size
        body_at = position + _HEAD_BYTES
        properties_at = body_at + body_bytes + 2
        if body_bytes < 0 or end > total or properties_at > end:
            raise BodyError(
                f"batch entry at byte {position}: size {size} with a body of {body_bytes} bytes is impossible"
            )
        # A negative length never matches: it gives a position before the properties.
        if properties_at + _length(body, properties_at - 2)[0] != end:
            raise BodyError(f"batch entry at byte {position}: its parts do not add up to its size {size}")
        bounds.append((flag, body_at, properties_at, end))
        position = end
    return bounds


# ---------------------------------------------------------------- checksum of a whole record
# The checksum is the last property (``enabledAppendPropCRC``, 5.x), a trailer of 20 bytes: ``__CRC32#``, 0x01, ten
# decimal digits *least significant first*, 0x02. The digits are the CRC-32 (top bit cleared) of all bytes of the record
# before the trailer. Source: store.md §3.5.

CRC_NAME = b"__CRC32#\x01"
_DIGITS = 10
TRAILER_BYTES = len(CRC_NAME) + _DIGITS + 1
_SENT_BY_CLIENT = re.compile(rb"(^|(?<=\x02))__CRC32#\x01[^\x02]*(\x02|$)")
assert TRAILER_BYTES == 20


def with_room_for_crc(properties: bytes) -> bytes:
    """Return a property string with 20 zero bytes at its end for the checksum. A checksum that a client sent is
    removed."""
    cleaned = _SENT_BY_CLIENT.sub(b"", properties) if b"__CRC32#" in properties else properties
    if cleaned and not cleaned.endswith(b"\x02"):
        cleaned += b"\x02"
    return cleaned + bytes(TRAILER_BYTES)


def seal(record: bytes) -> bytes:
    """Return the record with the checksum in its last 20 bytes."""
    content = record[:-TRAILER_BYTES]
    return content + _trailer(content)


def has_sound_crc(record: bytes | memoryview) -> bool:
    """Return True if a record ends with the checksum of its preceding bytes."""
    return len(record) > TRAILER_BYTES and record[-TRAILER_BYTES:] == _trailer(record[:-TRAILER_BYTES])


def _trailer(content: bytes | memoryview) -> bytes:
    return CRC_NAME + f"{body_crc(content):010d}"[::-1].encode() + b"\x02"
