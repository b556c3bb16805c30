"""The files that point into a commit log, as arrays: consume queues and the index.

Files are read as far as they are written, so the store may be a live broker's: an entry is there as a whole or not at
all. Source: store.md §4, §7.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rmqkit.errors import StoreError
from rmqkit.spark.fs import StoreFile, above, data_end, exists, join, list_files, map_file, resolve
from rmqkit.store.index.file import ENTRY, HEADER, SLOT
from rmqkit.store.queues.consume_queue import BLANK_ENTRY, ENTRY_BYTES
from rmqkit.store.queues.queue_ext import ADDRESS_BASE, ADDRESS_MAX, UNIT

__all__ = ["IndexPart", "QueueFile", "find_index_files", "find_queue_files", "index_entries", "queue_entries"]

_QUEUE_FILE = re.compile(r"\d{20}")
_INDEX_FILE = re.compile(r"\d{17}")
_QUEUE_ENTRY = np.dtype([("offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
_INDEX_ENTRY = np.dtype([("hash", ">i4"), ("offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])
_EXT_UNIT = np.dtype([("size", ">i2"), ("tags_code", ">i8"), ("stored", ">i8"), ("bitmap_bytes", ">i2")])
_BLANK = np.frombuffer(BLANK_ENTRY, _QUEUE_ENTRY)[0]
assert (_QUEUE_ENTRY.itemsize, _INDEX_ENTRY.itemsize) == (ENTRY_BYTES, ENTRY.size)

Entries = NDArray[Any]


class QueueFile(Struct, frozen=True):
    """One file of a consume queue; ``first`` is the queue offset of its first entry."""

    path: str
    topic: str
    queue_id: int
    first: int
    size: int


class IndexPart(Struct, frozen=True):
    """One index file, ``slot_count`` as its broker was configured (``maxHashSlotNum``)."""

    path: str
    slot_count: int


def find_queue_files(root: str, topics: Sequence[str] = ()) -> list[QueueFile]:
    """The consume queue files of a store, of all topics when none are named, by topic, queue and offset.
    Raises StoreError: the store has no ``consumequeue`` directory."""
    folder = join(resolve(root), "consumequeue")
    if not exists(folder):
        raise StoreError(f"{folder} does not exist: give the store directory, or have the queues rebuilt")
    found: list[QueueFile] = []
    for below in [[topic] for topic in topics] or [[]]:
        for file in list_files(folder, *below):
            match file.names:
                case (topic, queue_id, name) if queue_id.isdecimal() and _QUEUE_FILE.fullmatch(name):
                    found.append(QueueFile(file.path, topic, int(queue_id), int(name) // ENTRY_BYTES, file.size))
    return sorted(found, key=lambda file: (file.topic, file.queue_id, file.first))


def queue_entries(file: QueueFile) -> tuple[NDArray[np.int64], Entries]:
    """Queue offsets and entries of what is written in a file; blanks, which stand for no message, are left out, and
    tag codes that lie in extension units are fetched from there (a unit that is gone leaves its address)."""
    written = data_end(file.path, file.size)
    if not written:
        return np.empty(0, "i8"), np.empty(0, _QUEUE_ENTRY)
    entries = np.frombuffer(map_file(file.path), _QUEUE_ENTRY, written // ENTRY_BYTES)
    unwritten = np.flatnonzero(entries["size"] <= 0)
    entries = entries[: unwritten[0]] if len(unwritten) else entries
    kept = np.flatnonzero(entries != _BLANK)
    entries = entries[kept]
    addresses = np.flatnonzero(entries["tags_code"] <= ADDRESS_MAX)
    if len(addresses):
        entries["tags_code"][addresses] = _codes_at(file, entries["tags_code"][addresses].astype("i8"))
    return file.first + kept, entries


def _codes_at(file: QueueFile, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
    """The tag codes in the extension units at some addresses."""
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
    """The index files of a store, oldest first; none when it has no index."""
    files = list_files(join(resolve(root), "index"))
    return [IndexPart(file.path, slot_count) for file in files if _INDEX_FILE.fullmatch(file.names[0])]


def index_entries(part: IndexPart) -> tuple[int, Entries]:
    """The clock (ms) from which the entries of a file count seconds, and the entries, numbered from 1.
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
