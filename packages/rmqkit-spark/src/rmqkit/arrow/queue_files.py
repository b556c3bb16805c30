"""Queue and index files as arrays, and reads of the records that their entries point at, without a walk over the log.

A store has two trees of queues. ``consumequeue`` has an entry of 20 bytes for each message. ``batchconsumequeue``
(topics with ``queue.type=BatchCQ``) has an entry of 46 bytes for each inner batch, with the queue offset of the first
message in the batch.

The store may belong to a running broker. Only the written part of a file is read, and an entry is either complete or
missing. A read by queues touches only the requested records: 3 % of the records for a topic with 3 % of the messages.
The queues contain the messages that consumers can get. The following messages are only in the log: messages that are
not dispatched (yet), messages of a deleted topic, and half messages that were rolled back. Source: store.md §4, §6, §7.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec import Struct
from numpy.typing import NDArray

from rmqkit.arrow.fs import (
    Segment,
    StoreFile,
    above,
    data_end,
    exists,
    join,
    list_files,
    map_file,
    map_records,
    resolve,
)
from rmqkit.arrow.reader import ReadPlan, read_parts
from rmqkit.arrow.splits import Split, records_end
from rmqkit.errors import StoreError
from rmqkit.store.index.file import ENTRY, HEADER, SLOT, key_hash
from rmqkit.store.log import scan
from rmqkit.store.queues.batch_queue import BATCH_ENTRY
from rmqkit.store.queues.consume_queue import BLANK_ENTRY, ENTRY_BYTES
from rmqkit.store.queues.queue_ext import ADDRESS_BASE, ADDRESS_MAX, UNIT

_QUEUE_FILE = re.compile(r"\d{20}")
_INDEX_FILE = re.compile(r"\d{17}")
_QUEUE_ENTRY = np.dtype([("offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
_BATCH_ENTRY = np.dtype(
    [
        ("offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8"), ("store_timestamp", ">i8"), ("base", ">i8"),
        ("count", ">i2"), ("compacted", ">i4"), ("reserved", ">i4"),
    ]
)  # fmt: skip
_INDEX_ENTRY = np.dtype([("hash", ">i4"), ("offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])
_EXT_UNIT = np.dtype([("size", ">i2"), ("tags_code", ">i8"), ("stored", ">i8"), ("bitmap_bytes", ">i2")])
_BLANK = np.frombuffer(BLANK_ENTRY, _QUEUE_ENTRY)[0]
_TREES = (("consumequeue", False), ("batchconsumequeue", True))
assert (_QUEUE_ENTRY.itemsize, _INDEX_ENTRY.itemsize) == (ENTRY_BYTES, ENTRY.size)
assert _BATCH_ENTRY.itemsize == BATCH_ENTRY.size

Entries = NDArray[Any]


class QueueFile(Struct, frozen=True):
    """One file of a queue. ``first`` is the number of its first entry. In a file of ``consumequeue``, this number is
    also the queue offset of the entry."""

    path: str
    topic: str
    queue_id: int
    first: int
    size: int
    is_batch: bool = False


class IndexPart(Struct, frozen=True):
    """One index file. ``slot_count`` is the ``maxHashSlotNum`` of its broker."""

    path: str
    slot_count: int


def find_queue_files(root: str, topics: Sequence[str] = ()) -> list[QueueFile]:
    """List the queue files of some topics, sorted by topic, queue and offset. An empty sequence means all topics.
    Raises StoreError: the store has no directory of queues."""
    folders = [(join(resolve(root), tree), is_batch) for tree, is_batch in _TREES]
    there = [(folder, is_batch) for folder, is_batch in folders if exists(folder)]
    if not there:
        raise StoreError(f"{folders[0][0]} does not exist: give the store directory, or have the queues rebuilt")
    found: list[QueueFile] = []
    for folder, is_batch in there:
        entry_bytes = BATCH_ENTRY.size if is_batch else ENTRY_BYTES
        for below in [[topic] for topic in topics] or [[]]:
            for file in list_files(folder, *below):
                match file.names:
                    case (topic, queue_id, name) if queue_id.isdecimal() and _QUEUE_FILE.fullmatch(name):
                        first = int(name) // entry_bytes
                        found.append(QueueFile(file.path, topic, int(queue_id), first, file.size, is_batch))
    return sorted(found, key=lambda file: (file.topic, file.queue_id, file.first))


def queue_entries(file: QueueFile, *, with_codes: bool = True) -> tuple[NDArray[np.int64], Entries]:
    """Return the queue offsets and the entries that are written in a file. The queue offset of an inner batch is the
    offset of its first message. Blanks are omitted, because they represent no message. With ``with_codes``, tag codes
    in extension units are read. The code of a deleted unit stays its address."""
    kind = _BATCH_ENTRY if file.is_batch else _QUEUE_ENTRY
    written = data_end(file.path, file.size)
    if not written:
        return np.empty(0, "i8"), np.empty(0, kind)
    entries = np.frombuffer(map_file(file.path), kind, written // kind.itemsize)
    unwritten = np.flatnonzero(entries["size"] <= 0)
    entries = entries[: unwritten[0]] if len(unwritten) else entries
    if file.is_batch:
        return entries["base"].astype("i8"), entries
    kept = np.flatnonzero(entries != _BLANK)
    # Indexing with an array copies the entries. A copy is needed: the mapped file is read-only, and codes are written
    # below.
    entries = entries[kept]
    addresses = np.flatnonzero(entries["tags_code"] <= ADDRESS_MAX) if with_codes else ()
    if len(addresses):
        entries["tags_code"][addresses] = _codes_at(file, entries["tags_code"][addresses].astype("i8"))
    return file.first + kept, entries


def message_counts(file: QueueFile, entries: Entries) -> NDArray[np.int64]:
    """Return the number of messages in each entry of a file."""
    return entries["count"].astype("i8") if file.is_batch else np.ones(len(entries), "i8")


def queue_start(files: Iterable[QueueFile]) -> int | None:
    """Return the first queue offset of a queue, or None if the queue has no message. ``files`` must be all files of the
    queue, in order."""
    firsts = (numbers[0] for _, numbers, _ in _numbers_of(files) if len(numbers))
    return None if (first := next(firsts, None)) is None else int(first)


def queue_end(files: Sequence[QueueFile]) -> int | None:
    """Return the queue offset after the last message of a queue, or None if the queue has no message. ``files`` must be
    all files of the queue. They are read from the newest file on until a file has a message."""
    for file, numbers, entries in _numbers_of(reversed(files)):
        if len(numbers):
            return int(numbers[-1] + message_counts(file, entries[-1:])[0])
    return None


def _numbers_of(files: Iterable[QueueFile]) -> Iterator[tuple[QueueFile, NDArray[np.int64], Entries]]:
    return ((file, *queue_entries(file, with_codes=False)) for file in files)


def _codes_at(file: QueueFile, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the tag codes in the extension units at some addresses."""
    folder = join(above(file.path, 4), "consumequeue_ext", file.topic, str(file.queue_id))
    codes, positions = addresses.copy(), addresses ^ np.int64(-ADDRESS_BASE)  # flipping the top bit subtracts the base
    for extension in list_files(folder):
        if not _QUEUE_FILE.fullmatch(extension.names[-1]) or extension.size < UNIT.size:
            continue
        buffer = map_file(extension.path)
        at = positions - int(extension.names[-1])
        inside = np.flatnonzero((at >= 0) & (at <= len(buffer) - UNIT.size))
        windows = np.lib.stride_tricks.as_strided(
            np.frombuffer(buffer, "u1"), (len(buffer) - UNIT.size + 1, UNIT.size), (1, 1), writeable=False
        )
        codes[inside] = np.ascontiguousarray(windows[at[inside]]).view(_EXT_UNIT)["tags_code"][:, 0]
    return codes


def find_index_files(root: str, slot_count: int) -> list[IndexPart]:
    """List the index files of a store, oldest first. Return an empty list if the store has no index."""
    files = list_files(join(resolve(root), "index"))
    return [IndexPart(file.path, slot_count) for file in files if _INDEX_FILE.fullmatch(file.names[0])]


def index_entries(part: IndexPart) -> tuple[int, Entries]:
    """Return the begin time (ms) of a file and its entries, numbered from 1. The time in an entry is the number of
    seconds after the begin time.
    Raises StoreError: the file is too small for its slots, or for the number of entries in its header."""
    file = StoreFile(part.path)
    file.fetch(0, min(HEADER.size, file.size))
    entries_at = HEADER.size + part.slot_count * SLOT.size
    begin, _, _, _, _, next_number = HEADER.unpack_from(file.buffer) if file.size >= HEADER.size else (0,) * 6
    if (file.size - entries_at) // ENTRY.size < max(next_number, 1):
        raise StoreError(
            f"{part.path} of {file.size} bytes has no room for {part.slot_count} slots and {next_number} entries:"
            " give the broker's maxHashSlotNum as an option"
        )
    first, count = entries_at + ENTRY.size, max(next_number - 1, 0)
    file.fetch(first, first + count * ENTRY.size)
    return begin, np.frombuffer(file.buffer, _INDEX_ENTRY, count, first)


# ---------------------------------------------------------------- reading records


class IndexReads(Struct, frozen=True):
    """Ascending physical offsets of messages in one file of the log."""

    segment: Segment
    offsets: tuple[int, ...]


class QueueSplit(Struct, frozen=True):
    """A part of a consume queue file: the entries with queue offsets from ``low`` up to ``high``."""

    file: QueueFile
    low: int
    high: int
    segments: tuple[Segment, ...]


def queue_splits(
    root: str,
    segments: Sequence[Segment],
    split_bytes: int,
    *,
    topics: Sequence[str] = (),
    queue_ids: Collection[int] = (),
    low: dict[tuple[str, int], int] | None = None,
) -> list[QueueSplit]:
    """Plan reads of some queues, with about ``split_bytes`` of records in each split. Empty collections select all.
    ``low`` contains the first queue offset to read for each topic and queue id. Entries that point outside of the log
    are omitted, because retention or a crash removed their records.
    Raises StoreError: the store has no consume queues."""
    splits: list[QueueSplit] = []
    if not segments:
        return splits
    log_start, log_end = segments[0].base_offset, records_end(segments)
    for file in find_queue_files(root, topics):
        if queue_ids and file.queue_id not in queue_ids:
            continue
        numbers, entries = queue_entries(file, with_codes=False)
        offsets, ends = entries["offset"].astype("i8"), numbers + message_counts(file, entries)
        begin = (low or {}).get((file.topic, file.queue_id), 0)
        kept = (offsets >= log_start) & (offsets < log_end) & (ends > begin)
        numbers, entries, offsets = numbers[kept], entries[kept], offsets[kept]
        sums = np.cumsum(entries["size"].astype("i8"))
        bounds = np.flatnonzero(np.diff(sums // split_bytes)) + 1
        for part in np.split(np.arange(len(numbers)), bounds):
            if len(part):
                first, last = offsets[part[0]], offsets[part[-1]]
                around = tuple(
                    one for one in segments if one.base_offset <= last and one.base_offset + one.size > first
                )
                splits.append(QueueSplit(file, int(numbers[part[0]]), int(numbers[part[-1]]) + 1, around))
    return splits


def key_reads(
    root: str, segments: Sequence[Segment], slot_count: int, topic: str, keys: Collection[str]
) -> list[IndexReads]:
    """Plan reads of the messages that have one of some keys according to the index. Different keys may have the same
    hash, so the reads may include messages with other keys. Raises StoreError: an index file does not match
    ``slot_count``."""
    hashes = [key_hash(topic, key) for key in keys]
    found: set[int] = set()
    for part in find_index_files(root, slot_count):
        _, entries = index_entries(part)
        found |= set(entries["offset"][np.isin(entries["hash"], hashes)].tolist())
    log_end = records_end(segments)
    return _in_segments(sorted(offset for offset in found if offset < log_end), segments)


def read_records_at(reads: IndexReads, plan: ReadPlan) -> Iterator[pa.RecordBatch]:
    """Read the messages, in the order of the log. Raises StoreError: see `rmqkit.arrow.reader.read_split`."""
    segment = reads.segment
    for first in range(0, len(reads.offsets), plan.batch_rows):
        positions = [offset - segment.base_offset for offset in reads.offsets[first : first + plan.batch_rows]]
        split = Split(segment.path, segment.base_offset, positions[0], positions[-1])
        buffer = map_records(segment.path, positions)
        yield from read_parts(split, scan.pick(buffer, segment.base_offset, positions), plan)


def read_queue(split: QueueSplit, plan: ReadPlan) -> Iterator[pa.RecordBatch]:
    """Read the messages, in the order of the log. Raises StoreError: see `rmqkit.arrow.reader.read_split`."""
    offsets = np.sort(chosen_entries(split, with_codes=False)[1]["offset"].astype("i8")).tolist()
    for reads in _in_segments(offsets, split.segments):
        yield from read_records_at(reads, plan)


def chosen_entries(split: QueueSplit, *, with_codes: bool = True) -> tuple[NDArray[np.int64], NDArray[np.void]]:
    """Return the queue offsets and entries of a split, like `queue_entries`."""
    numbers, entries = queue_entries(split.file, with_codes=with_codes)
    # Search by queue offset, not by index: the two differ, because blanks are omitted.
    within = slice(*np.searchsorted(numbers, [split.low, split.high]))
    return numbers[within], entries[within]


def _in_segments(offsets: Sequence[int], segments: Sequence[Segment]) -> list[IndexReads]:
    """Group ascending offsets by the log file that contains them. Drop offsets outside of all files."""
    reads = []
    assert all(one.base_offset < other.base_offset for one, other in itertools.pairwise(segments)), "files are in order"
    for segment in segments:
        low = bisect.bisect_left(offsets, segment.base_offset)
        high = bisect.bisect_left(offsets, segment.base_offset + segment.size)
        if low < high:
            reads.append(IndexReads(segment, tuple(offsets[low:high])))
    return reads
