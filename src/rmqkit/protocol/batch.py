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
from collections.abc import Iterable

from msgspec import Struct

from rmqkit.errors import BodyError

_HEAD = struct.Struct(">iiiii")
_PROPERTIES_LENGTH = struct.Struct(">h")
_HEAD_BYTES = _HEAD.size
BATCH_ENTRY_BYTES_MIN = _HEAD_BYTES + _PROPERTIES_LENGTH.size
_flag_and_sizes = struct.Struct(">i8xii").unpack_from
_length = _PROPERTIES_LENGTH.unpack_from

BatchBounds = tuple[int, int, int, int]
"""Where one message of a batch body lies: its flag, start of the body, start of the properties, its end.

The two bytes before the properties are their length, and end the body.
"""


class BatchEntry(Struct, gc=False):
    """One message of a batch; the rest of its fields come from the request or the enclosing record."""

    body: bytes
    properties: bytes
    flag: int = 0


def encode_batch(entries: Iterable[BatchEntry]) -> bytes:
    """The batch body of some messages; the caller has checked that no property string is over 32 767 bytes."""
    parts: list[bytes] = []
    for entry in entries:
        size = BATCH_ENTRY_BYTES_MIN + len(entry.body) + len(entry.properties)
        parts.append(_HEAD.pack(size, 0, 0, entry.flag, len(entry.body)))
        parts.append(entry.body)
        parts.append(_PROPERTIES_LENGTH.pack(len(entry.properties)))
        parts.append(entry.properties)
    return b"".join(parts)


def decode_batch(body: bytes | memoryview) -> list[BatchEntry]:
    """The messages of a batch body.
    Raises BodyError: an entry does not fit into the body or its parts do not add up."""
    return [
        BatchEntry(bytes(body[body_at : properties_at - 2]), bytes(body[properties_at:end]), flag)
        for flag, body_at, properties_at, end in batch_bounds(body)
    ]


def is_long_batch(body: bytes | memoryview, *, count_max: int, properties_bytes_max: int) -> bool:
    """Whether a batch body has more messages or bytes of properties than that; looks at no more of it than it has to.
    A body whose sizes cannot be is not long: `batch_bounds` says what is wrong with it."""
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
    """Where the messages of a batch body lie; of the first ``count_max`` from a position on, if that is said.
    Raises BodyError: as `decode_batch`."""
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
            raise BodyError(f"batch entry at byte {position}: size {size} with a body of {body_bytes} bytes cannot be")
        # a length below zero leads to a place before the properties, never to the end behind them
        if properties_at + _length(body, properties_at - 2)[0] != end:
            raise BodyError(f"batch entry at byte {position}: its parts do not add up to its size {size}")
        bounds.append((flag, body_at, properties_at, end))
        position = end
    return bounds
