"""A sealed segment: one full file of the CommitLog as a Parquet file, its records sorted by topic, queue and offset.

Every engine that reads Parquet reads a segment as a table of messages (`rmqkit.store.archive.rows` describes the
columns). A broker makes the stored records from the same rows, byte for byte. Parquet allows other bytes between the
row groups and the footer. A segment has tables there, so that a broker finds a record with few requests, and it has the
parts of the log there that are no message of a queue, so that `rebuild` restores the log file exactly. ::

    "PAR1" | group | group | … | others | sections | directory | trailer | footer of Parquet

A *group* is a row group of Parquet, and behind it the footer of a Parquet file that has only this row group, compressed
by Zstandard. A reader decodes a group without the footer of the whole file, which grows with the number of groups. A
group has at most 1.5 MiB of records, or one longer record. It is a part of one large queue, or has several small
queues. *Others* are Zstandard frames with the records that belong to no queue (prepared and rolled back records of old
transactions, records of a topic that was deleted and created again), and with the bytes that are not a record. A
*block* is the records of one queue in a group, or a frame of others. Each section is a Zstandard frame::

    groups    rows of `GROUP`: position, stored bytes, bytes of the footer in them (0 for others), CRC-32
    blocks    rows of `BLOCK`: group, position in its records, bytes, first number, first store time
    places    rows of `PLACE`, by physical offset: offset, block, position in it; in parts of 8,192 rows
    keys      rows of `KEY`, by hash: hash of a key as in index files, physical offset; in parts of 8,192 rows

The directory (MessagePack, `Directory`) lists the sections and the queues with their first and last numbers. The
trailer is the directory's position, its length, its CRC-32, the CRC-32 of the footer of Parquet, and "RMQARCH2". A file
without a trailer is incomplete. The numbers in sections and trailer are big-endian. A CRC-32 covers the stored bytes of
each group and section, and is checked before they are decoded. For other readers, each page has a checksum, too.

Not handled here: the places of segments (`rmqkit.store.archive.places`), the list of segments
(`rmqkit.store.archive.archive`), and light queues. Of a batch topic, a segment contains only the queue offsets of the
records, not the entries of the queue.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
from msgspec import Struct

from rmqkit.errors import BodyError, StoreError
from rmqkit.protocol.compression import Compression, decompress
from rmqkit.protocol.record import BLANK_BYTES, COMPRESSED, pack_blank
from rmqkit.store.archive.contents import KEY

__all__ = [
    "BLOCK",
    "GROUP",
    "MAGIC",
    "PARQUET",
    "PLACE",
    "TRAILER",
    "Block",
    "Directory",
    "PlaceOf",
    "Queue",
    "Section",
    "SegmentFile",
    "blocks_of",
    "parts_of",
    "rebuild",
]

MAGIC = b"RMQARCH2"
PARQUET = b"PAR1"
"""The first and the last bytes of a Parquet file."""

_SECTION_BYTES_MAX = 256 << 20
GROUP = struct.Struct(">QIII")
BLOCK = struct.Struct(">IIIqq")
PLACE = struct.Struct(">QII")
TRAILER = struct.Struct(">QIII8s")
_FOOTER_END = struct.Struct("<I4s")
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
        groups, blocks: the sections of these names.
        places, keys: the parts of each table, with the first physical offset or the first hash of each part.
        log: the identity of the log (`rmqkit.store.archive.identity`); empty if it was unknown.
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
    groups: Section
    blocks: Section
    places: list[tuple[int, Section]]
    keys: list[tuple[int, Section]]
    log: str = ""


class Block(NamedTuple):
    """The records of one queue in a group, or a frame of others: a row of the section ``blocks``, and its group.

    Attributes:
        position, stored_bytes, footer_bytes, crc: the row of the section ``groups``.
        at, bytes: position and size of the block in the records of the group.
        first: number of the first message; -1 for bytes that are not a record.
        first_time: storeTimestamp of the first message, in ms.
    """

    position: int
    stored_bytes: int
    footer_bytes: int
    crc: int
    at: int
    bytes: int
    first: int
    first_time: int


class PlaceOf(NamedTuple):
    """The place of a record: the number of its block, and its position in the block."""

    block: int
    at: int


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
        bytes_min = len(PARQUET) + TRAILER.size + _FOOTER_END.size
        if size < bytes_min:
            raise StoreError(f"{name} is not an archived segment: it has {size} bytes only")
        # Fewer bytes are returned if the object was cut after its length was listed.
        footer_end = read_at(size - _FOOTER_END.size, _FOOTER_END.size).ljust(_FOOTER_END.size, b"\0")
        footer_bytes, parquet_magic = _FOOTER_END.unpack(footer_end)
        trailer_at = size - _FOOTER_END.size - footer_bytes - TRAILER.size
        is_parquet = parquet_magic == PARQUET and trailer_at >= len(PARQUET)
        trailer = read_at(trailer_at, TRAILER.size) if is_parquet else b""
        position, stored_bytes, crc, footer_crc, magic = TRAILER.unpack(trailer.ljust(TRAILER.size, b"\0"))
        if magic != MAGIC or position + stored_bytes != trailer_at:
            raise StoreError(f"{name} is not an archived segment, or was not written to its end: it has no trailer")
        footer_at = trailer_at + TRAILER.size
        self._footer = Section(footer_at, size - footer_at, footer_crc)
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
        self._check(stored, crc, position)
        try:
            return decompress(stored, _ZSTD, bytes_max=bytes_max)
        except BodyError as error:
            raise StoreError(f"{self.name} is damaged at {position}: {error}") from None

    def _check(self, stored: bytes, crc: int, position: int) -> None:
        if zlib.crc32(stored) != crc:
            raise StoreError(f"{self.name} was changed or cut: its bytes at {position} have another CRC-32")

    def check_footer(self) -> None:
        """Check the footer of Parquet, which this class does not use. Raises StoreError: the footer was changed. Raises
        OSError: the footer cannot be read."""
        place = self._footer
        self._check(self._read_at(place.position, place.stored_bytes), place.crc, place.position)
        if self._read_at(0, len(PARQUET)) != PARQUET:
            raise StoreError(f"{self.name} was changed: it does not begin with {PARQUET.decode()}")

    def blocks(self) -> list[Block]:
        """Return all blocks, in the order of the queues. Raises the errors of `section`."""
        groups = list(GROUP.iter_unpack(self.section(self.directory.groups)))
        rows = BLOCK.iter_unpack(self.section(self.directory.blocks))
        return [Block(*groups[group], *row) for group, *row in rows]

    def contents(self, blocks: list[Block]) -> list[bytes]:
        """Return the content of consecutive blocks with one read. Stop at the first damaged block.
        Raises the errors of `section`, if the first block is damaged."""
        begin, last = blocks[0].position, blocks[-1]
        # Use one read: an object store charges more for a request than for the bytes.
        stored = self._read_at(begin, last.position + last.stored_bytes - begin)
        found: list[bytes] = []
        position, records = -1, b""
        for block in blocks:
            if block.position != position:
                at = block.position - begin
                try:
                    records = self._records(stored[at : at + block.stored_bytes], block)
                except StoreError:
                    if found:
                        break
                    raise
                position = block.position
            found.append(records if block.bytes == len(records) else records[block.at : block.at + block.bytes])
        return found

    def _records(self, stored: bytes, block: Block) -> bytes:
        """Return the records of a group. Raises StoreError: the group was changed."""
        if not block.footer_bytes:
            return self._content(stored, block.crc, block.position, _SECTION_BYTES_MAX)
        self._check(stored, block.crc, block.position)
        from rmqkit.store.archive.row_groups import records_in  # a store without archive needs no pyarrow

        rows, footer = stored[: -block.footer_bytes], stored[-block.footer_bytes :]
        return records_in(rows, footer, block.position)

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


def blocks_of(segment: SegmentFile) -> Iterator[tuple[list[int], list[int], bytes]]:
    """Yield the blocks of a segment: the physical offsets of their parts, the positions of the parts in the block, and
    the content. A part is a record, or other bytes.

    Raises the errors of `section`.
    """
    import numpy as np

    sections = [segment.section(part) for _, part in segment.directory.places]
    places = np.frombuffer(b"".join(sections), [("offset", ">u8"), ("block", ">u4"), ("at", ">u4")])
    places = places[np.lexsort((places["at"], places["block"]))]
    bounds = np.flatnonzero(np.diff(places["block"], prepend=-1, append=-1))
    blocks, known = segment.blocks(), places["block"][bounds[:-1]].tolist()
    if known and known[-1] >= len(blocks):
        raise StoreError(f"{segment.name} has places in block {known[-1]}, and has {len(blocks)} blocks")
    done = 0
    for _, of_group in itertools.groupby(known, key=lambda number: blocks[number].position):
        for content in segment.contents([blocks[number] for number in of_group]):
            rows = places[bounds[done] : bounds[done + 1]]
            yield rows["offset"].tolist(), rows["at"].tolist(), content
            done += 1


def parts_of(segment: SegmentFile) -> Iterator[tuple[int, bytes]]:
    """Yield all records and other bytes of a segment with their physical offsets, block by block.

    Raises the errors of `section`.
    """
    for offsets, positions, content in blocks_of(segment):
        for physical_offset, at, end in zip(offsets, positions, [*positions[1:], len(content)], strict=True):
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
