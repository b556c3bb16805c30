"""The checksum of a whole record, kept as its last property (``enabledAppendPropCRC``, 5.x).

The trailer is 20 bytes: ``__CRC32#``, 0x01, ten decimal digits *least significant first*, 0x02. The digits are the
CRC-32 (top bit cleared) of every byte of the record before the trailer. Source: store.md §3.5.
"""

from __future__ import annotations

import re

from rmqkit.protocol.record import body_crc

__all__ = ["CRC_NAME", "TRAILER_BYTES", "has_sound_crc", "seal", "with_room_for_crc"]

CRC_NAME = b"__CRC32#\x01"
_DIGITS = 10
TRAILER_BYTES = len(CRC_NAME) + _DIGITS + 1
_SENT_BY_CLIENT = re.compile(rb"(^|(?<=\x02))__CRC32#\x01[^\x02]*(\x02|$)")
assert TRAILER_BYTES == 20


def with_room_for_crc(properties: bytes) -> bytes:
    """A property string whose last 20 bytes are for the trailer; what a client sent under the name is dropped."""
    cleaned = _SENT_BY_CLIENT.sub(b"", properties) if b"__CRC32#" in properties else properties
    if cleaned and not cleaned.endswith(b"\x02"):
        cleaned += b"\x02"
    return cleaned + bytes(TRAILER_BYTES)


def seal(record: bytes) -> bytes:
    """The record with its last 20 bytes filled in."""
    content = record[:-TRAILER_BYTES]
    return content + _trailer(content)


def has_sound_crc(record: bytes | memoryview) -> bool:
    """Whether a record ends with the checksum of what precedes it."""
    return len(record) > TRAILER_BYTES and record[-TRAILER_BYTES:] == _trailer(record[:-TRAILER_BYTES])


def _trailer(content: bytes | memoryview) -> bytes:
    return CRC_NAME + f"{body_crc(content):010d}"[::-1].encode() + b"\x02"
