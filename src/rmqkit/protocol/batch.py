"""The batch body of SEND_BATCH_MESSAGE (320) and of inner-batch records: entries back to back.

==========  ====  =====================================
field       size  value
==========  ====  =====================================
totalSize      4  22 + body + properties
magic          4  0
bodyCRC        4  0 (the broker computes its own)
flag           4  application flag
bodyLength     4  then the body, never compressed
propsLength    2  then the property string
==========  ====  =====================================

Source: remoting.md §7.2, store.md §3.7.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from msgspec import Struct

from rmqkit.errors import BodyError

__all__ = ["BatchEntry", "decode_batch", "encode_batch"]

_HEAD = struct.Struct(">iiiii")
_PROPERTIES_LENGTH = struct.Struct(">h")
_ENTRY_BYTES_MIN = _HEAD.size + _PROPERTIES_LENGTH.size


class BatchEntry(Struct, gc=False):
    """One message of a batch; the rest of its fields come from the request or the enclosing record."""

    body: bytes
    properties: bytes
    flag: int = 0


def encode_batch(entries: Iterable[BatchEntry]) -> bytes:
    """The batch body of some messages; the caller has checked that no property string is over 32 767 bytes."""
    parts: list[bytes] = []
    for entry in entries:
        size = _ENTRY_BYTES_MIN + len(entry.body) + len(entry.properties)
        parts.append(_HEAD.pack(size, 0, 0, entry.flag, len(entry.body)))
        parts.append(entry.body)
        parts.append(_PROPERTIES_LENGTH.pack(len(entry.properties)))
        parts.append(entry.properties)
    return b"".join(parts)


def decode_batch(body: bytes | memoryview) -> list[BatchEntry]:
    """The messages of a batch body.

    Raises:
        BodyError: an entry does not fit into the body or its parts do not add up.
    """
    return list(_entries(memoryview(body)))


def _entries(body: memoryview) -> Iterator[BatchEntry]:
    position = 0
    while position < len(body):
        if len(body) - position < _ENTRY_BYTES_MIN:
            raise BodyError(f"batch entry at byte {position} is cut off: {len(body) - position} bytes left")
        size, _, _, flag, body_bytes = _HEAD.unpack_from(body, position)
        end = position + size
        body_at = position + _HEAD.size
        properties_at = body_at + body_bytes + 2
        if body_bytes < 0 or end > len(body) or properties_at > end:
            raise BodyError(f"batch entry at byte {position}: size {size} with a body of {body_bytes} bytes cannot be")
        properties_bytes = _PROPERTIES_LENGTH.unpack_from(body, properties_at - 2)[0]
        if properties_bytes < 0 or properties_at + properties_bytes != end:
            raise BodyError(f"batch entry at byte {position}: its parts do not add up to its size {size}")
        yield BatchEntry(bytes(body[body_at : properties_at - 2]), bytes(body[properties_at:end]), flag)
        position = end
