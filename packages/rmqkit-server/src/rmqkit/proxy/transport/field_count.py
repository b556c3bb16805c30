"""The number of fields in an encoded protobuf message, checked before decoding.

A field of two bytes becomes an object: 16 MiB of such fields block the event loop for 0.6 s, and take some hundred MiB
of memory. `is_within` walks over the encoded fields without making objects, and stops after `FIELDS_MAX`. A message
whose fields contain no further messages counts as one field: the decoder is fast enough for it.

The check takes about a microsecond per field. Messages of up to `SMALL_BYTES` are not checked.
Source: protobuf's encoding.
"""

from __future__ import annotations

from functools import cache
from typing import Any

__all__ = ["FIELDS_MAX", "SMALL_BYTES", "is_within"]

FIELDS_MAX = 12_000
SMALL_BYTES = 16 << 10
_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5


def is_within(descriptor: Any, content: bytes) -> bool:
    """Return True if an encoded message has at most `FIELDS_MAX` fields. The decoder reports errors of a damaged
    message."""
    if len(content) <= SMALL_BYTES:
        return True
    left = FIELDS_MAX
    parts = [(descriptor, 0, len(content))]
    while parts:
        kind, at, end = parts.pop()
        below = _messages_in(kind)
        while at < end:
            if (left := left - 1) < 0:
                return False
            tag, at = _varint(content, at, end)
            wire_type = tag & 7
            if wire_type == _SIZED:
                size, at = _varint(content, at, end)
                if (inner := below.get(tag >> 3)) is not None:
                    parts.append((inner, at, min(at + size, end)))
                at += size
            elif wire_type == _VARINT:
                _, at = _varint(content, at, end)
            elif wire_type == _FIXED64:
                at += 8
            elif wire_type == _FIXED32:
                at += 4
            else:
                break
    return True


def _varint(content: bytes, at: int, end: int) -> tuple[int, int]:
    """Return a number and the position after it; 0 and ``end`` if the number is incomplete."""
    number = shift = 0
    while at < end and shift < 70:
        byte = content[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
    return 0, end


@cache
def _messages_in(descriptor: Any) -> dict[int, Any]:
    """Return the message types of the fields that contain further messages, by field number."""
    found = {}
    for field in descriptor.fields:
        inner = field.message_type
        if inner is not None and any(one.message_type is not None for one in inner.fields):
            found[field.number] = inner
    return found
