"""Answers that busy endpoints give all day, as bytes of protobuf: equal to what the schema's messages encode to, at a
tenth of the cost. Source: definition.proto, service.proto; protobuf's encoding.
"""

from __future__ import annotations

from rmqkit.proxy.status import OK

__all__ = ["acked_answer", "sent_answer"]

_SHORT_MAX = 0x7F


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > _SHORT_MAX:
        encoded.append(number & _SHORT_MAX | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


_SHORT = [bytes((size,)) for size in range(_SHORT_MAX + 1)]


def _sized(content: bytes) -> bytes:
    size = len(content)
    return (_SHORT[size] if size <= _SHORT_MAX else _varint(size)) + content


_OK = _sized(OK.SerializeToString())
_OK_FIRST, _OK_LAST = b"\x0a" + _OK, b"\x1a" + _OK


def sent_answer(message_id: str, queue_offset: int) -> bytes:
    """A `SendMessageResponse` to one message that was stored."""
    told = _sized(message_id.encode())
    entry = _OK_FIRST + b"\x12" + told + b"\x1a" + told
    if queue_offset:
        entry += b"\x20" + _varint(queue_offset)
    return _OK_FIRST + b"\x12" + _sized(entry)


def acked_answer(message_id: str, receipt_handle: str) -> bytes:
    """An `AckMessageResponse` to one message that was acknowledged."""
    entry = b"\x12" + _sized(receipt_handle.encode()) + _OK_LAST
    if message_id:
        entry = b"\x0a" + _sized(message_id.encode()) + entry
    return _OK_FIRST + b"\x12" + _sized(entry)
