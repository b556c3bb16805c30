"""Frames: how commands are cut out of a connection's byte stream.

======  ============  =====================================================================
offset  size          field
======  ============  =====================================================================
0       4             totalLength: bytes after this field = 4 + headerLength + bodyLength
4       1             serializeType: 0 JSON header, 1 ROCKETMQ (binary) header
5       3             headerLength, unsigned
8       headerLength  header
...     rest          body
======  ============  =====================================================================

The splitter keeps incomplete input and never waits. It holds at most one frame (16 MiB by default) plus what one read
delivered; a larger announced frame is refused before its bytes arrive, and so is, by a server, a header of
`REQUEST_HEADER_BYTES_MAX`: headers are read before anybody is known. Source: remoting.md §1.1.
"""

from __future__ import annotations

import struct

from msgspec import Struct

from rmqkit.errors import FrameError

FRAME_BYTES_MAX = 16 << 20
"""Largest frame, its length field included (``com.rocketmq.remoting.frameMaxLength``)."""

REQUEST_HEADER_BYTES_MAX = 256 << 10
"""A request's header has to be smaller. The longest that clients send carries 32 KiB of properties, of which JSON makes
192 KiB when every byte of them is escaped. Answers may be longer: that to a batch names every message."""

JSON = 0
ROCKETMQ = 1

_START = struct.Struct(">iI")
_HEADER_BYTES_MAX = 0xFFFFFF
_UNKNOWN_TYPES = 0xFE000000
_PIECES_MAX = 1024


class Frame(Struct, gc=False):
    """One frame: header and body still as bytes."""

    serialize_type: int
    header: bytes
    body: bytes


class FrameSplitter:
    """Cuts a byte stream into frames, one call per read; a frame over ``frame_bytes_max`` is refused.
    ``header_bytes_max``: a power of two that headers have to stay below; None: any header that fits into its frame.
    ``buffered_bytes``: how much of an incomplete frame is held."""

    __slots__ = ("_frame_bytes_max", "_held", "_refused_bits", "_wanted_bytes", "buffered_bytes")

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX, *, header_bytes_max: int | None = None) -> None:
        self._held: list[bytes | bytearray] = []
        self.buffered_bytes = 0
        self._wanted_bytes = 0
        self._frame_bytes_max = frame_bytes_max
        # Type and header length share a word: one look at its bits finds unknown types and headers that are too long.
        self._refused_bits = _UNKNOWN_TYPES
        if header_bytes_max is not None:
            assert header_bytes_max.bit_count() == 1, "a power of two"
            self._refused_bits |= _HEADER_BYTES_MAX & -header_bytes_max

    def feed(self, chunk: bytes) -> list[Frame]:
        """Take what one read delivered and return the frames it completes, in order.
        Raises FrameError: lengths that cannot be, an unknown serialize type or a frame over the limit. Frames before
        the broken one in the same chunk are lost with the connection, as the reference does."""
        if self._held:
            if len(self._held) <= _PIECES_MAX:
                self._held.append(chunk)
            else:
                self._add_small(chunk)
            self.buffered_bytes += len(chunk)
            if self.buffered_bytes < self._wanted_bytes:
                return []  # joined only once, when the frame is whole: a large one must not be copied per read
            chunk = b"".join(self._held)
        frames: list[Frame] = []
        position, available, wanted = 0, len(chunk), 8
        while available - position >= 8:
            length, word = _START.unpack_from(chunk, position)
            header_bytes = word & _HEADER_BYTES_MAX
            if length + 4 > self._frame_bytes_max or header_bytes > length - 4 or word & self._refused_bits:
                raise self._refusal(length, word)
            end = position + 4 + length
            if end > available:
                wanted = end - position
                break
            body_at = position + 8 + header_bytes
            frames.append(Frame(word >> 24, chunk[position + 8 : body_at], chunk[body_at:end]))
            position = end
        self._held = [chunk[position:]] if position < available else []
        self.buffered_bytes = available - position
        self._wanted_bytes = wanted
        return frames

    def _add_small(self, chunk: bytes) -> None:
        """Keep one of very many reads: as an object of its own a byte would take forty."""
        last = self._held[-1]
        if isinstance(last, bytearray):
            last += chunk
        else:
            self._held.append(bytearray(chunk))

    def _refusal(self, length: int, word: int) -> FrameError:
        header_bytes = word & _HEADER_BYTES_MAX
        if length + 4 > self._frame_bytes_max:
            return FrameError(f"frame of {length + 4} bytes is over the limit of {self._frame_bytes_max}")
        if word >> 24 > ROCKETMQ:
            return FrameError(f"serialize type {word >> 24} is not known: it must be 0 (JSON) or 1 (ROCKETMQ)")
        if header_bytes > length - 4:
            return FrameError(f"header of {header_bytes} bytes does not fit into a frame of {length} bytes")
        return FrameError(f"header of {header_bytes} bytes: requests must have less than {REQUEST_HEADER_BYTES_MAX}")


def frame_start(serialize_type: int, header_bytes: int, body_bytes: int) -> bytes:
    """The eight bytes before a header.
    Raises FrameError: the header is over 16 MiB or the frame over 2 GiB, which the length fields cannot carry."""
    length = 4 + header_bytes + body_bytes
    if header_bytes > _HEADER_BYTES_MAX or length > 0x7FFFFFFF:
        raise FrameError(f"a header of {header_bytes} and a body of {body_bytes} bytes do not fit into one frame")
    return _START.pack(length, serialize_type << 24 | header_bytes)
