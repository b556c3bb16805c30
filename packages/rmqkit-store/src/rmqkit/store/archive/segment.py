"""A sealed segment: one full file of the CommitLog, its records sorted by queue, in one compressed file.

The records of a queue are stored together in the segment, even if records of other queues are between them in the log.
A consumer therefore needs only a few large requests to read a queue. The segment also contains the bytes that are not a
record, so that `rebuild` restores the log file exactly. ::

    "RMQARCH1" | block | block | … | sections | directory | footer

A *block* is a Zstandard frame of whole records of one queue, in the order of their numbers: `BLOCK_BYTES` uncompressed,
or one longer record. Separate blocks contain the records that belong to no queue (prepared and rolled back records of
old transactions, records of a topic that was deleted and created again), and the bytes that are not a record. Each
section is a Zstandard frame::

    blocks    rows of `BLOCK`: position, stored bytes, bytes, CRC-32 of stored bytes, first number, first store time
    places    rows of `PLACE`, by physical offset: offset, block, position in it; in parts of `ROWS_MAX` rows
    keys      rows of `KEY`, by hash: hash of a key as in index files, physical offset; in parts of `ROWS_MAX` rows

The directory (MessagePack, `Directory`) lists the sections and the queues with their first and last numbers. The footer
is the directory's position, its length, its CRC-32 and "RMQARCH1". A file without a footer is incomplete. All numbers
are big-endian.

Not handled here: the places of segments (`rmqkit.store.archive.places`), the list of segments
(`rmqkit.store.archive.archive`), and light queues. Of a batch topic, a segment contains only the queue offsets of the
records, not the entries of the queue.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import msgspec
from msgspec import Struct

from rmqkit.errors import BodyError, StoreError
from rmqkit.protocol.compression import Compression, compress, decompress
from rmqkit.protocol.record import BLANK_BYTES, COMPRESSED, pack_blank
from rmqkit.store.archive.contents import KEY, Contents, contents_of
from rmqkit.store.log.scan import Buffer

if TYPE_CHECKING:
    from rmqkit.store.archive.contents import Numbers

__all__ = ["Block", "Directory", "PlaceOf", "Queue", "Section", "SegmentFile", "parts_of", "rebuild", "write_segment"]

MAGIC = b"RMQARCH1"
BLOCK_BYTES = 256 << 10
"""Uncompressed size of a block. A request returns hundreds of messages, and a pull decompresses little more than it
returns."""

ROWS_MAX = 8192
_LEVEL = 3
_SECTION_BYTES_MAX = 256 << 20
BLOCK = struct.Struct(">QIIIqq")
PLACE = struct.Struct(">QII")
FOOTER = struct.Struct(">QII8s")
_ZSTD = COMPRESSED | Compression.ZSTD

ReadAt = Callable[[int, int], bytes]
"""A function that returns the bytes of a segment file: ``(position, size)``. Raises OSError."""


class Section(Struct, frozen=True, array_like=True):
    """A compressed part of a segment file: its position, its length and the CRC-32 of its stored bytes."""

    position: int
    stored_bytes: int
    crc: int


class Queue(Struct, frozen=True, array_like=True):
    """The messages of a queue: numbers from ``first`` up to but not including ``end``, in blocks from ``block`` up to
    but not including ``block_end``. ``topic`` is empty for parts that belong to no queue."""

    topic: str
    queue_id: int
    first: int
    end: int
    block: int
    block_end: int


class Directory(Struct, frozen=True, array_like=True):
    """The contents of a segment.

    Attributes:
        start: physical offset of the start of the log file.
        end: physical offset of its end.
        records_end: physical offset of the end of its records; a blank fills the rest.
        identity: a digest of the first record. Another log with the same offsets has another digest.
        first_time, last_time: earliest and latest storeTimestamp, in ms.
        record_count: number of records.
        other_bytes: number of bytes that are not a record.
        queues: the queues, sorted by topic and queue id.
        places, keys: the parts of each table, with the first physical offset or the first hash of each part.
        log: the identity of the log (`rmqkit.store.archive.identity`); empty in segments of old releases without
            identities.
    """

    start: int
    end: int
    records_end: int
    identity: str
    first_time: int
    last_time: int
    record_count: int
    other_bytes: int
    queues: list[Queue]
    blocks: Section
    places: list[tuple[int, Section]]
    keys: list[tuple[int, Section]]
    log: str = ""


class Block(NamedTuple):
    """A row of the section ``blocks``."""

    position: int
    stored_bytes: int
    bytes: int
    crc: int
    first: int
    first_time: int


class PlaceOf(NamedTuple):
    """The place of a record: the number of its block, and its position in the block."""

    block: int
    at: int


# ---------------------------------------------------------------- writing


def write_segment(log: Buffer, start: int, out: BinaryIO, *, with_tags: bool, log_id: str = "") -> Directory:
    """Write the segment of a full log file.

    Args:
        log: the content of the file.
        start: physical offset of its first byte, which is its name.
        with_tags: whether TAGS is a key, too (``indexTags``).
        log_id: the identity of the log.

    Raises:
        OSError: the segment cannot be written.
    """
    contents = contents_of(log, start, with_tags=with_tags)
    writing = _Writing(out, contents)
    queues: list[Queue] = []
    with memoryview(log) as view:
        for group in contents.groups:
            block = len(writing.blocks)
            writing.add(view, group.parts)
            queues.append(Queue(*group.queue, group.first, group.end, block, len(writing.blocks)))
    blocks = writing.section(b"".join(BLOCK.pack(*row) for row in writing.blocks))
    directory = Directory(
        start=start,
        end=start + len(log),
        records_end=start + contents.records_end,
        identity=contents.identity,
        first_time=contents.first_time,
        last_time=contents.last_time,
        record_count=contents.record_count,
        other_bytes=contents.other_bytes,
        queues=queues,
        blocks=blocks,
        places=writing.table(PLACE, writing.places(start)),
        keys=writing.table(KEY, contents.keys),
        log=log_id,
    )
    found = writing.section(msgspec.msgpack.encode(directory))
    out.write(FOOTER.pack(found.position, found.stored_bytes, found.crc, MAGIC))
    return directory


def _taken(column: Numbers, parts: Numbers) -> list[int]:
    """Return the values of some parts in a column."""
    return [column[part] for part in parts] if isinstance(column, array) else column[parts].tolist()


class _Writing:
    """A segment that is being written."""

    def __init__(self, out: BinaryIO, contents: Contents) -> None:
        self._out = out
        self._contents = contents
        self._position = out.write(MAGIC)
        self._block_of = array("I", bytes(4 * len(contents.positions)))
        self._at = array("I", bytes(4 * len(contents.positions)))
        self.blocks: list[Block] = []

    def add(self, log: memoryview, parts: Numbers) -> None:
        """Write the blocks of one queue."""
        pieces: list[memoryview] = []
        size, first = 0, int(parts[0])
        positions, sizes = _taken(self._contents.positions, parts), _taken(self._contents.sizes, parts)
        for part, position, part_bytes in zip(parts, positions, sizes, strict=True):
            if pieces and size + part_bytes > BLOCK_BYTES:
                self._end(pieces, first)
                pieces, size, first = [], 0, int(part)
            self._block_of[part], self._at[part] = len(self.blocks), size
            pieces.append(log[position : position + part_bytes])
            size += part_bytes
        self._end(pieces, first)

    def _end(self, pieces: list[memoryview], first: int) -> None:
        content = b"".join(pieces)
        # Release the slices before the write. A mapping with slices cannot be closed, and its BufferError would hide a
        # write error.
        for piece in pieces:
            piece.release()
        place = self.section(content)
        number, time = int(self._contents.numbers[first]), int(self._contents.times[first])
        self.blocks.append(Block(place.position, place.stored_bytes, len(content), place.crc, number, time))

    def places(self, start: int) -> bytes:
        """Return the rows of `PLACE` of all parts."""
        offsets = [start + position for position in self._contents.positions.tolist()]
        return b"".join(map(PLACE.pack, offsets, self._block_of, self._at))

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


# ---------------------------------------------------------------- reading


class SegmentFile:
    """A reader of one segment; it caches only the directory.

    Attributes:
        directory: the contents of the segment.
        digest: the CRC-32 of the stored directory. The directory contains the CRC-32 of each section.

    Args:
        name: the name of the segment in errors.
        read_at: returns bytes of the file.
        size: the length of the file.

    Raises:
        StoreError: the file is not a segment, is incomplete, or was changed.
        OSError: it cannot be read.
    """

    def __init__(self, name: str, read_at: ReadAt, size: int) -> None:
        self.name = name
        self._read_at = read_at
        if size < len(MAGIC) + FOOTER.size:
            raise StoreError(f"{name} is not an archived segment: it has {size} bytes only")
        # Shorter if the object was cut after its length was listed.
        footer = read_at(size - FOOTER.size, FOOTER.size).ljust(FOOTER.size, b"\0")
        position, stored_bytes, crc, magic = FOOTER.unpack(footer)
        if magic != MAGIC or position + stored_bytes + FOOTER.size != size:
            raise StoreError(f"{name} is not an archived segment, or was not written to its end: it has no footer")
        self.digest = crc
        content = self.section(Section(position, stored_bytes, crc))
        try:
            self.directory = msgspec.msgpack.decode(content, type=Directory)
        except msgspec.DecodeError as error:
            raise StoreError(f"{name} has a directory that cannot be read: {error}") from None

    def section(self, place: Section, bytes_max: int = _SECTION_BYTES_MAX) -> bytes:
        """Return the content of a section. Raises StoreError: the section was changed. Raises OSError: the section
        cannot be read.
        """
        return self._content(self._read_at(place.position, place.stored_bytes), place.crc, place.position, bytes_max)

    def _content(self, stored: bytes, crc: int, position: int, bytes_max: int) -> bytes:
        if zlib.crc32(stored) != crc:
            raise StoreError(f"{self.name} was changed or cut: its bytes at {position} have another CRC-32")
        try:
            return decompress(stored, _ZSTD, bytes_max=bytes_max)
        except BodyError as error:
            raise StoreError(f"{self.name} is damaged at {position}: {error}") from None

    def blocks(self) -> list[Block]:
        """Return all blocks, in the order of the queues. Raises the errors of `section`."""
        return [Block(*row) for row in BLOCK.iter_unpack(self.section(self.directory.blocks))]

    def contents(self, blocks: list[Block]) -> list[bytes]:
        """Return the content of consecutive blocks with one read. Stop at the first damaged block.
        Raises the errors of `section`, if the first block is damaged."""
        begin = blocks[0].position
        # Use one read: an object store charges more for a request than for the bytes.
        stored = self._read_at(begin, sum(block.stored_bytes for block in blocks))
        found: list[bytes] = []
        for block in blocks:
            at = block.position - begin
            content = stored[at : at + block.stored_bytes]
            if found and zlib.crc32(content) != block.crc:
                break
            found.append(self._content(content, block.crc, block.position, block.bytes))
        return found

    def place_of(self, physical_offset: int) -> PlaceOf | None:
        """Return the place of the record at a physical offset, or None if no record begins there. Raises as
        `section`."""
        part = _part(self.directory.places, physical_offset)
        if part is None:
            return None
        rows = self.section(part)
        at = _first_row(rows, PLACE, physical_offset)
        if at == len(rows):
            return None
        found, block, position = PLACE.unpack_from(rows, at)
        return PlaceOf(block, position) if found == physical_offset else None

    def offsets_of(self, key_hash: int) -> Iterator[int]:
        """Yield the physical offsets of records that have a key with this hash, in log order. Raises the errors of
        `section`."""
        parts = self.directory.keys
        # Rows with this hash may begin at the end of an earlier part.
        at = max(0, bisect_right(parts, key_hash - 1, key=lambda part: part[0]) - 1)
        for first, part in parts[at:]:
            if first > key_hash:
                return
            rows = self.section(part)
            for position in range(_first_row(rows, KEY, key_hash), len(rows), KEY.size):
                value, physical_offset = KEY.unpack_from(rows, position)
                if value != key_hash:
                    return
                yield physical_offset


def _part(parts: list[tuple[int, Section]], value: int) -> Section | None:
    """Return the only part that may include a value."""
    at = bisect_right(parts, value, key=lambda part: part[0]) - 1
    return parts[at][1] if at >= 0 else None


def _first_row(rows: bytes, layout: struct.Struct, value: int) -> int:
    """Return the byte position of the first row with a first number greater than or equal to a value."""
    low, high = 0, len(rows) // layout.size
    while low < high:
        middle = (low + high) // 2
        if layout.unpack_from(rows, middle * layout.size)[0] < value:
            low = middle + 1
        else:
            high = middle
    return low * layout.size


def parts_of(segment: SegmentFile) -> Iterator[tuple[int, bytes]]:
    """Yield all records and other bytes of a segment with their physical offsets, block by block.

    Raises the errors of `section`.
    """
    of_blocks: dict[int, list[tuple[int, int]]] = {}
    for _, part in segment.directory.places:
        for physical_offset, block, at in PLACE.iter_unpack(segment.section(part)):
            of_blocks.setdefault(block, []).append((at, physical_offset))
    blocks = segment.blocks()
    for number in sorted(of_blocks):
        content = segment.contents([blocks[number]])[0]
        places = sorted(of_blocks[number])
        ends = [at for at, _ in places[1:]]
        for (at, physical_offset), end in zip(places, [*ends, len(content)], strict=True):
            yield physical_offset, content[at:end]


def rebuild(segment: SegmentFile) -> bytearray:
    """Return the log file from which a segment was made. The bytes after the head of the blank are zeros.
    Raises StoreError: the segment was changed. Raises OSError: the segment cannot be read."""
    directory = segment.directory
    log = bytearray(directory.end - directory.start)
    end_of_records = directory.records_end - directory.start
    for physical_offset, part in parts_of(segment):
        position = physical_offset - directory.start
        if position + len(part) > end_of_records:
            raise StoreError(f"{segment.name} has a record at {physical_offset} that reaches over the log's end")
        log[position : position + len(part)] = part
    left = len(log) - end_of_records
    if left >= BLANK_BYTES:
        log[end_of_records : end_of_records + BLANK_BYTES] = pack_blank(left)[:BLANK_BYTES]
    return log
