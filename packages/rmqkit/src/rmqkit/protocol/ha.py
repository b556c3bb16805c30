"""The protocol of the HA connection: a master sends raw log bytes, a slave sends positions (``HAConnection``).

======================  =====================================================================================
master → slave, frame   i64 physical offset of the data, i32 size, then ``size`` bytes of the commit log
slave → master, report  i64 physical offset up to which the slave has the log
======================  =====================================================================================

Numbers are big-endian, and there is no hand-shake. A frame of size 0 is a heartbeat; its offset is the start of the
next data. The data of a frame never crosses the end of a log file. A full frame may end in the middle of a record: only
the log knows the starts of records. If one read contains several reports, `Reports` returns the newest. A frame has at
most 4 MiB, the buffer size of Apache's slave. An impossible offset or size raises `FrameError`, and the caller must
close the connection. `rmqkit.store.replica` checks the content of the data before it appends the data.
Source: store.md §21.2.
"""

from __future__ import annotations

import struct

from rmqkit.errors import FrameError

_HEAD = struct.Struct(">qi")
_REPORT = struct.Struct(">q")
HEAD_BYTES = _HEAD.size
LINK_BUFFER_BYTES = 4 << 20
DATA_BYTES_MAX = LINK_BUFFER_BYTES - HEAD_BYTES
# Limit the offset, so that offset + size of a frame also fits in 64 bits.
_OFFSET_MAX = (1 << 63) - 1 - LINK_BUFFER_BYTES
assert (_HEAD.size, _REPORT.size) == (12, 8), "slaves of other brokers read these bytes"

encode_report = _REPORT.pack
"""The bytes of a report."""

frame_head = _HEAD.pack
"""The twelve bytes before the data of a frame: physical offset and size."""

Frame = tuple[int, memoryview]
"""The physical offset and the data of a frame. A frame without data is a heartbeat."""


def split_frames(received: memoryview) -> tuple[list[Frame], int]:
    """Return the complete frames at the start of received bytes, and their total size. The data is not copied.
    Raises FrameError: a frame has an impossible offset or size. The frames before it are lost with the connection."""
    frames: list[Frame] = []
    at, available = 0, len(received)
    while available - at >= HEAD_BYTES:
        offset, size = _HEAD.unpack_from(received, at)
        if not (0 <= offset <= _OFFSET_MAX and 0 <= size <= DATA_BYTES_MAX):
            raise FrameError(f"an HA frame of {size} bytes for offset {offset}: at most {DATA_BYTES_MAX} are allowed")
        end = at + HEAD_BYTES + size
        if end > available:
            break
        frames.append((offset, received[at + HEAD_BYTES : end]))
        at = end
    return frames, at


class Reports:
    """A reader of one slave's reports from chunks of any size. It holds at most seven bytes."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = b""

    def feed(self, chunk: bytes) -> int | None:
        """Return the newest complete report, or None if there is no new report.
        Raises FrameError: the report is not a valid offset."""
        held = self._held + chunk
        end = len(held) - len(held) % _REPORT.size
        self._held = held[end:]
        if not end:
            return None
        offset: int = _REPORT.unpack_from(held, end - _REPORT.size)[0]
        if not 0 <= offset <= _OFFSET_MAX:
            raise FrameError(f"an HA report of offset {offset}")
        return offset
