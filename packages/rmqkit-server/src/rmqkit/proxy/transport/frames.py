"""Frames of HTTP/2: their types, flags and bytes, and the errors that end a stream or a connection.

======  =====  ===============================================
offset  bytes  content
======  =====  ===============================================
0       3      length of the payload, big-endian
3       1      type: `DATA` to `CONTINUATION`
4       1      flags
5       4      number of the stream; the highest bit is reserved
9              payload
======  =====  ===============================================

The payload of a type is read by `http2`. Source: RFC 9113 §4.1, §6, §7.
"""

from __future__ import annotations

import enum
import struct
from functools import lru_cache

from rmqkit.errors import RmqError

__all__ = ["ErrorCode", "Http2Error", "StreamError", "frame", "frame_start", "unpadded"]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_BYTES_MAX = 16_384  # for received frames; the peer's settings have the limit for sent frames
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, HAS_PRIORITY = 0x4, 0x8, 0x20

# The head of a frame: the high 16 and the low 8 bits of the length, type, flags, number of the stream.
HEAD = struct.Struct(">HBBBI")


class ErrorCode(enum.IntEnum):
    """The reasons for the end of a stream or a connection (RFC 9113 §7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Http2Error(RmqError):
    """A peer broke HTTP/2 or exceeded a bound. The connection closes."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(f"{code.name}: {text}")
        self.code = code


class StreamError(Exception):
    """A peer broke HTTP/2 on one stream. The stream is reset; the connection stays open."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return the bytes of a frame."""
    size = len(payload)
    return HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


@lru_cache(maxsize=1024)
def frame_start(size: int, kind: int, flags: int) -> bytes:
    """Return the first five bytes of a frame: length, type and flags."""
    return bytes((size >> 16, size >> 8 & 0xFF, size & 0xFF, kind, flags))


def unpadded(payload: bytes) -> bytes:
    """Return the content of a padded frame. Raises Http2Error: the padding is longer than the frame."""
    if not payload or payload[0] >= len(payload):
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a frame is padded with more than it has")
    return payload[1 : len(payload) - payload[0]]
