"""The writer of a segment (`rmqkit.store.archive.segment` describes the format).

The records of a log file are copied in the order of their queues, cut into groups, and encoded as rows. Memory is
bounded by the numbers of all records, and the records of one group.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import numpy as np

from rmqkit.protocol.compression import Compression, compress
from rmqkit.store.archive.contents import KEY, Contents, Group, contents_of
from rmqkit.store.archive.row_groups import RowGroups
from rmqkit.store.archive.rows import rows_of
from rmqkit.store.archive.segment import BLOCK, GROUP, MAGIC, PARQUET, PLACE, TRAILER, Directory, Queue, Section
from rmqkit.store.log.scan import Buffer

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["GROUP_BYTES", "write_segment"]

GROUP_BYTES = 1536 << 10
"""Maximum size of the records in a group. A group ends at the end of a queue if it has two thirds of this size, so a
log of a GiB has about 1,000 groups at most."""

ROWS_MAX = 8192
_LEVEL = 3
PLACES = np.dtype([("offset", ">u8"), ("block", ">u4"), ("at", ">u4")])
"""`PLACE` as a type of numpy."""


def write_segment(
    log: Buffer, start: int, out: BinaryIO, *, with_tags: bool, log_id: str = "", broker_name: str = ""
) -> Directory:
    """Write the segment of a full log file.

    Args:
        log: the content of the file.
        start: physical offset of its first byte, which is its name.
        with_tags: whether TAGS is a key, too (``indexTags``).
        log_id: the identity of the log.
        broker_name: the column ``brokerName`` of all rows.

    Raises:
        OSError: the segment cannot be written.
    """
    contents = contents_of(log, start, with_tags=with_tags)
    with RowGroups() as row_groups:
        writing = _Writing(log, out, contents, row_groups, broker_name)
        return _written(writing, contents, start, start + len(log), log_id)


def _written(writing: _Writing, contents: Contents, start: int, end: int, log_id: str) -> Directory:
    queues: list[Queue] = []
    # Row groups first: readers of Parquet expect nothing between them.
    for group in sorted(contents.groups, key=lambda group: (not group.queue[0], group.queue)):
        block = writing.block_count
        writing.add(group)
        queues.append(Queue(*group.queue, group.first, group.end, block, writing.block_count))
    writing.end_group()
    directory = Directory(
        start=start,
        end=end,
        records_end=start + contents.records_end,
        identity=contents.identity,
        first_time=contents.first_time,
        last_time=contents.last_time,
        record_count=contents.record_count,
        other_bytes=contents.other_bytes,
        queues=queues,
        groups=writing.section(b"".join(GROUP.pack(*row) for row in writing.groups)),
        blocks=writing.section(b"".join(BLOCK.pack(*row) for row in writing.blocks)),
        places=writing.table(PLACE, writing.places(start)),
        keys=writing.table(KEY, contents.keys),
        log=log_id,
    )
    found = writing.section(msgspec.msgpack.encode(directory))
    writing.finish(found)
    return directory


class _Writing:
    """A segment that is being written. ``groups`` and ``blocks`` are the rows of these sections."""

    def __init__(self, log: Buffer, out: BinaryIO, contents: Contents, row_groups: RowGroups, broker_name: str) -> None:
        self._log = log
        self._out = out
        self._contents = contents
        self._row_groups = row_groups
        self._broker_name = broker_name
        self._positions, self._sizes = _column(contents.positions), _column(contents.sizes)
        self._position = out.write(PARQUET)
        self._block_of = np.zeros(len(self._positions), "u4")
        self._at = np.zeros(len(self._positions), "u4")
        self._pieces: list[bytes] = []
        self._group_bytes = 0
        self._is_other = False
        self.groups: list[tuple[int, int, int, int]] = []
        self.blocks: list[tuple[int, int, int, int, int]] = []

    @property
    def block_count(self) -> int:
        """Number of blocks so far."""
        return len(self.blocks)

    def add(self, group: Group) -> None:
        """Add the records of one queue, or other parts of the log."""
        is_other = not group.queue[0]
        if is_other or self._is_other:
            self.end_group()
        self._is_other = is_other
        parts = _column(group.parts)
        ends = np.cumsum(self._sizes[parts])
        done = low = 0
        while low < len(parts):
            high = int(np.searchsorted(ends, done + GROUP_BYTES - self._group_bytes, "right"))
            if high <= low and self._group_bytes:
                self.end_group()
                continue
            high = max(high, low + 1)
            self._add_block(parts[low:high], ends[low:high] - done)
            done, low = int(ends[high - 1]), high
        if self._group_bytes * 3 >= GROUP_BYTES * 2:
            self.end_group()

    def _add_block(self, parts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Add records to the current group. ``ends``: the end of each record in the block."""
        first, positions, sizes = int(parts[0]), self._positions[parts], self._sizes[parts]
        self._block_of[parts], self._at[parts] = len(self.blocks), ends - sizes
        log = self._log
        self._pieces += [
            bytes(log[at:end]) for at, end in zip(positions.tolist(), (positions + sizes).tolist(), strict=True)
        ]
        number, time = int(self._contents.numbers[first]), int(self._contents.times[first])
        self.blocks.append((len(self.groups), self._group_bytes, int(ends[-1]), number, time))
        self._group_bytes += int(ends[-1])

    def end_group(self) -> None:
        """Write the current group, if it has records."""
        if not self._pieces:
            return
        content = b"".join(self._pieces)
        self._pieces, self._group_bytes = [], 0
        if self._is_other:
            place = self.section(content)
            self.groups.append((place.position, place.stored_bytes, 0, place.crc))
            return
        rows, footer = self._row_groups.encoded(rows_of(content, self._broker_name), self._position)
        self._out.write(rows)
        self._out.write(footer)
        stored_bytes = len(rows) + len(footer)
        self.groups.append((self._position, stored_bytes, len(footer), zlib.crc32(footer, zlib.crc32(rows))))
        self._position += stored_bytes

    def places(self, start: int) -> bytes:
        """Return the rows of `PLACE` of all parts."""
        rows = np.empty(len(self._positions), PLACES)
        rows["offset"], rows["block"], rows["at"] = start + self._positions, self._block_of, self._at
        return rows.tobytes()

    def section(self, content: bytes) -> Section:
        """Compress and write bytes."""
        # The CRC-32 covers the stored bytes and is checked before they are decompressed. Changed bytes never reach the
        # decoder.
        stored = compress(content, Compression.ZSTD, _LEVEL)
        self._out.write(stored)
        found = Section(self._position, len(stored), zlib.crc32(stored))
        self._position += len(stored)
        return found

    def table(self, layout: struct.Struct, rows: bytes) -> list[tuple[int, Section]]:
        """Write sorted rows in parts. Return each part with the first value of its rows."""
        size = ROWS_MAX * layout.size
        parts = [rows[at : at + size] for at in range(0, len(rows), size)]
        return [(layout.unpack_from(part)[0], self.section(part)) for part in parts]

    def finish(self, directory: Section) -> None:
        """Write the trailer and the footer of the whole file."""
        footer = self._row_groups.footer()
        place = directory.position, directory.stored_bytes, directory.crc
        self._out.write(TRAILER.pack(*place, zlib.crc32(footer), MAGIC))
        self._out.write(footer)


def _column(numbers: Any) -> NDArray[np.int64]:
    return np.frombuffer(numbers, "i8") if isinstance(numbers, array) else numbers
