"""Queue and index files as arrays, and reads of the records that they point at instead of a walk over the log.

A store has its queues in two trees. Entries of ``consumequeue`` have 20 bytes, one for each message. Entries of
``batchconsumequeue`` (topics with ``queue.type=BatchCQ``) have 46 bytes, one for each inner batch, and say the queue
offset of its first message.

Files are read as far as they are written, so the store may be a live broker's: an entry is there as a whole or not at
all. A read by them costs what is asked for: of a topic with 3 % of the messages 3 % of the records are touched. The
queues know what consumers can get; a message that is not dispatched (yet), of a deleted topic, or a half message that
was rolled back is in the log alone. Source: store.md §4, §6, §7.
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
    """One file of a queue. ``first`` is the number of its first entry, which in a file of ``consumequeue`` is the
    entry's queue offset, too."""

    path: str
    topic: str
    queue_id: int
    first: int
    size: int
    is_batch: bool = False


class IndexPart(Struct, frozen=True):
    """One index file, ``slot_count`` as its broker was configured (``maxHashSlotNum``)."""

    path: str
    slot_count: int


def find_queue_files(root: str, topics: Sequence[str] = ()) -> list[QueueFile]:
    """List the queue files of a store, of all topics when none are named, by topic, queue and offset.
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
    """Read the entries that are written in a file, with their queue offsets: of an inner batch that of its first
    message. Blanks, which stand for no message, are left out, and tag codes in extension units are fetched from there
    (a unit that is gone leaves its address) unless ``with_codes`` says that nobody looks at them."""
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
    # Indexed by an array, which copies: codes are written into it below, and the mapped file is read-only.
    entries = entries[kept]
    addresses = np.flatnonzero(entries["tags_code"] <= ADDRESS_MAX) if with_codes else ()
    if len(addresses):
        entries["tags_code"][addresses] = _codes_at(file, entries["tags_code"][addresses].astype("i8"))
    return file.first + kept, entries


def message_counts(file: QueueFile, entries: Entries) -> NDArray[np.int64]:
    """Return how many messages each entry of a file stands for."""
    return entries["count"].astype("i8") if file.is_batch else np.ones(len(entries), "i8")


def queue_start(files: Iterable[QueueFile]) -> int | None:
    """The first queue offset of a queue whose files these are, in their order; None when it has no message."""
    firsts = (numbers[0] for _, numbers, _ in _numbers_of(files) if len(numbers))
    return None if (first := next(firsts, None)) is None else int(first)


def queue_end(files: Sequence[QueueFile]) -> int | None:
    """The queue offset behind the last message of a queue whose files these are; None when it has no message.
    No more files are read than it takes to find it, the newest first."""
    for file, numbers, entries in _numbers_of(reversed(files)):
        if len(numbers):
            return int(numbers[-1] + message_counts(file, entries[-1:])[0])
    return None


def _numbers_of(files: Iterable[QueueFile]) -> Iterator[tuple[QueueFile, NDArray[np.int64], Entries]]:
    return ((file, *queue_entries(file, with_codes=False)) for file in files)


def _codes_at(file: QueueFile, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
    """Read the tag codes in the extension units at some addresses."""
    folder = join(above(file.path, 4), "consumequeue_ext", file.topic, str(file.queue_id))
    codes, positions = addresses.copy(), addresses ^ np.int64(-ADDRESS_BASE)  # the top bit flipped: less the base
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
    """List the index files of a store, oldest first; none when it has no index."""
    files = list_files(join(resolve(root), "index"))
    return [IndexPart(file.path, slot_count) for file in files if _INDEX_FILE.fullmatch(file.names[0])]


def index_entries(part: IndexPart) -> tuple[int, Entries]:
    """Read the time (ms) from which the entries of a file count seconds, and the entries, numbered from 1.
    Raises StoreError: the file is too small for its slots, or says more entries than it has room for."""
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


# ---------------------------------------------------------------- the records


class IndexReads(Struct, frozen=True):
    """Physical offsets of messages in one file of the log, ascending."""

    segment: Segment
    offsets: tuple[int, ...]


class QueueSplit(Struct, frozen=True):
    """Messages of a stretch of a consume queue file: its entries from queue offset ``low`` up to ``high``."""

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
    """Plan reads of some queues, about ``split_bytes`` of records in each split, empty sets meaning all.
    ``low`` has by topic and queue id the queue offset to begin with. Entries that point before or behind the log are
    left out: retention or a crash took their records.
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
    """Plan reads of the messages that the index knows under some keys; hashes collide, so others may be among them.
    Raises StoreError: an index file does not fit ``slot_count``."""
    hashes = [key_hash(topic, key) for key in keys]
    found: set[int] = set()
    for part in find_index_files(root, slot_count):
        _, entries = index_entries(part)
        found |= set(entries["offset"][np.isin(entries["hash"], hashes)].tolist())
    log_end = records_end(segments)
    return _in_segments(sorted(offset for offset in found if offset < log_end), segments)


def read_records_at(reads: IndexReads, plan: ReadPlan) -> Iterator[pa.RecordBatch]:
    """Read the messages, in the order of the log. Raises StoreError: as `rmqkit.arrow.reader.read_split`."""
    segment = reads.segment
    for first in range(0, len(reads.offsets), plan.batch_rows):
        positions = [offset - segment.base_offset for offset in reads.offsets[first : first + plan.batch_rows]]
        split = Split(segment.path, segment.base_offset, positions[0], positions[-1])
        buffer = map_records(segment.path, positions)
        yield from read_parts(split, scan.pick(buffer, segment.base_offset, positions), plan)


def read_queue(split: QueueSplit, plan: ReadPlan) -> Iterator[pa.RecordBatch]:
    """Read the messages, in the order of the log. Raises StoreError: as `rmqkit.arrow.reader.read_split`."""
    offsets = np.sort(chosen_entries(split, with_codes=False)[1]["offset"].astype("i8")).tolist()
    for reads in _in_segments(offsets, split.segments):
        yield from read_records_at(reads, plan)


def chosen_entries(split: QueueSplit, *, with_codes: bool = True) -> tuple[NDArray[np.int64], NDArray[np.void]]:
    """Read the entries of a split, with their queue offsets, as `queue_entries`."""
    numbers, entries = queue_entries(split.file, with_codes=with_codes)
    # By queue offset, not by place: blanks are left out, so the two are not the same.
    within = slice(*np.searchsorted(numbers, [split.low, split.high]))
    return numbers[within], entries[within]


def _in_segments(offsets: Sequence[int], segments: Sequence[Segment]) -> list[IndexReads]:
    """Group ascending offsets by the file that they lie in; those in none are left out."""
    reads = []
    assert all(one.base_offset < other.base_offset for one, other in itertools.pairwise(segments)), "files are in order"
    for segment in segments:
        low = bisect.bisect_left(offsets, segment.base_offset)
        high = bisect.bisect_left(offsets, segment.base_offset + segment.size)
        if low < high:
            reads.append(IndexReads(segment, tuple(offsets[low:high])))
    return reads
