"""Op messages, which contain the queue offsets of half messages that were committed or rolled back.

Topic ``RMQ_SYS_TRANS_OP_HALF_TOPIC``, tag ``d``, body ``17,18,21,``. In 4.9 the body is one number.
Source: store.md §19.2.
"""

from __future__ import annotations

from rmqkit.protocol import properties
from rmqkit.protocol.properties import find_property
from rmqkit.protocol.record import Record

__all__ = ["op_offsets"]

_TAG = b"d"
_TAGS = properties.TAGS.encode()
_DIGITS_MAX = 18
"""The maximum number of digits. Every number with 18 digits fits in Java's long."""


def op_offsets(op: Record) -> list[int]:
    """Return the queue offsets of half messages in an op message. Pieces that are not numbers are ignored."""
    if find_property(op.properties, _TAGS) != _TAG:
        return []
    # In 5.x the last piece, after the last comma, is empty.
    pieces = op.body.decode("ascii", "replace").split(",")
    return [int(piece) for piece in pieces if piece.isdecimal() and len(piece) <= _DIGITS_MAX]
