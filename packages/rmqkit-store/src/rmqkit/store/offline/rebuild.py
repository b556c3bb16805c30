"""The rebuild of queues and index files from the commit log, without a broker.

The log is scanned once. Every sound record is dispatched into new files under ``rebuilt``, by the code of a broker
(`bulk`). When the new files are complete and on the disk, the old directories are moved aside, the new directories take
their places, and the old directories are deleted. After an interruption, run the rebuild again: nothing in the log
changes.

The result equals the files of a broker (store.md §11), byte for byte if no file has expired. The log does not determine
the names of index files. The log also lacks the filter bitmaps of extension units, so the bitmaps are omitted: the
broker filters these messages by their properties. If a record is lost, a blank entry preserves the numbers of later
records.
Source: store.md §4.3, §11.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from rmqkit.protocol.record import INNER_BATCH
from rmqkit.store.bulk import BulkDispatcher, DispatchColumns
from rmqkit.store.dispatcher import Dispatcher, queue_tags_code
from rmqkit.store.files import StoreLock, remove_note, sync_directory
from rmqkit.store.index.index import INDEX_NOTE, MessageIndex
from rmqkit.store.log.scan import RECORD_BYTES_MIN, Records
from rmqkit.store.offline.check import open_log
from rmqkit.store.offline.file_check import is_json
from rmqkit.store.offline.findings import Progress, Report, common_length, entries_of
from rmqkit.store.offline.queue_check import index_bytes, light_queues
from rmqkit.store.queues.batch_queue import BATCH_ENTRY
from rmqkit.store.queues.consume_queue import ENTRY_BYTES
from rmqkit.store.queues.table import ConsumeQueues
from rmqkit.store.settings import StoreSettings, parse_delay_levels
from rmqkit.store.table_journal import stored_table

__all__ = [
    "FOLDER",
    "QUEUE_TREES",
    "Rebuilt",
    "batch_topics_of",
    "held",
    "inner_batch_topics",
    "light_entries",
    "rebuild",
    "sizes_of",
    "swap",
]

QUEUE_TREES = ("consumequeue", "batchconsumequeue", "consumequeue_ext")
FOLDER = "rebuilt"


class Rebuilt(msgspec.Struct):
    """The result of a rebuild: the number of ``records`` read from the log, and the numbers of queues and index files
    written.
    """

    records: int
    queues: int
    index_files: int


def rebuild(
    root: Path,
    settings: StoreSettings | None = None,
    *,
    queues: bool,
    index: bool,
    progress: Progress = lambda done, total: None,
) -> Rebuilt:
    """Rebuild the consume queues, the index, or both.

    Args:
        settings: the settings of the store. Without settings, the sizes are taken from the existing files.

    Raises:
        StoreLocked: a broker holds the store.
        StoreError: there is no store, or its index sizes are unknown.
        OSError: a file cannot be written; the old files are still in place.
    """
    log = open_log(root, settings, Report())
    sizes = sizes_of(root, settings)
    if index:
        index_bytes(root, sizes, is_set=settings is not None)
    folder = root / FOLDER
    batch_topics = batch_topics_of(root)
    with held(root, folder):
        new_queues = ConsumeQueues(folder, sizes, batch_topics.__contains__)
        new_index: MessageIndex | None = None
        if index:
            counts = sizes.hash_slot_count, sizes.index_entry_count
            new_index = MessageIndex(folder / "index", *counts, tags_as_keys=sizes.index_tags)
        delays_ms = parse_delay_levels(sizes.message_delay_level)
        bulk = BulkDispatcher(new_queues, new_index, Dispatcher(new_queues), delays_ms, has_light=True)
        enter: Callable[[DispatchColumns], object] = bulk.enter if queues else bulk.enter_keys
        records = record_bytes = 0
        for _, part in log.runs():
            if isinstance(part, Records):
                arrivals = DispatchColumns(part)
                batch_topics |= inner_batch_topics(arrivals)
                lost_bytes = int(part.offsets[0]) - log.min_offset - record_bytes
                bulk.gap_max = lost_bytes // RECORD_BYTES_MIN
                enter(arrivals)
                record_bytes += int(part.sizes.sum()) - arrivals.lost_bytes()
                records += len(part)
            progress(log.end - log.min_offset, log.file_bytes)
        rebuilt = Rebuilt(records, 0, 0)
        if queues:
            rebuilt.queues = len(new_queues)
            new_queues.sync_all()  # before the swap: a power cut leaves the old queues or complete new queues
            new_queues.close()
            swap(root, folder, QUEUE_TREES)
        if new_index is not None:
            new_index.enter()
            rebuilt.index_files = len(new_index.files)
            for file in new_index.files:
                file.file.sync()
            new_index.close()
            swap(root, folder, ("index",))
    return rebuilt


@contextmanager
def held(root: Path, folder: Path) -> Iterator[None]:
    """Hold the lock of the store, and an empty directory for new files. The directory is deleted at the end."""
    lock = StoreLock(root)
    lock.acquire()
    try:
        # A killed rebuild leaves incomplete files here, or the old files that it had moved aside.
        shutil.rmtree(folder, ignore_errors=True)
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def swap(root: Path, folder: Path, names: tuple[str, ...]) -> None:
    """Replace the old directories with the new directories."""
    folder.mkdir(exist_ok=True)
    if "index" in names:
        remove_note(root / INDEX_NOTE)  # first: the note lists the old files
    # Rename instead of copying: the old tree stays complete in the folder until the new tree has its name.
    for name in names:
        if (root / name).exists():
            (root / name).rename(folder / f"old-{name}")
        if (folder / name).exists():
            (folder / name).rename(root / name)
    sync_directory(root)


def sizes_of(root: Path, settings: StoreSettings | None) -> StoreSettings:
    """Return the settings, or default settings with the sizes of the existing files."""
    if settings is not None:
        return settings
    sizes = StoreSettings()
    lengths = [common_length([root / tree]) for tree in QUEUE_TREES]
    if lengths[0] and not lengths[0] % ENTRY_BYTES:
        sizes.consume_queue_file_bytes = lengths[0]
    if lengths[1] and not lengths[1] % BATCH_ENTRY.size:
        sizes.batch_consume_queue_file_bytes = lengths[1]
    if lengths[2]:
        sizes.consume_queue_ext_file_bytes, sizes.enable_consume_queue_ext = lengths[2], True
    return sizes


def batch_topics_of(root: Path) -> set[str]:
    """Return the topics with batch queues, according to their directories, and ``topics.json`` with its journal."""
    topics = {path.name for path in entries_of(root / "batchconsumequeue")}
    path = root / "config" / "topics.json"
    if path.is_file() and is_json(path) is None:
        table = (stored_table(path) or {}).get("topicConfigTable", {})
        topics |= {name for name, one in table.items() if (one.get("attributes") or {}).get("queue.type") == "BatchCQ"}
    return topics


def light_entries(arrivals: DispatchColumns) -> Iterator[tuple[str, tuple[int, int, int, int, int]]]:
    """Yield the light topics of each record, together with the arguments of `ConsumeQueue.append`."""
    for row in arrivals.in_light_queues().tolist():
        record = arrivals.records.record(row)
        tags_code = queue_tags_code("", record.properties, record.store_timestamp, ())
        for topic, queue_offset in light_queues(record).items():
            yield topic, (queue_offset, record.physical_offset, record.size, tags_code, record.store_timestamp)


def inner_batch_topics(arrivals: DispatchColumns) -> set[str]:
    """Return the topics of inner batches. Only batch queues can have inner batches."""
    numbers = np.unique(arrivals.topic[arrivals.sys_flags & INNER_BATCH != 0])
    return {topic for number in numbers.tolist() if (topic := arrivals.topics[number]) is not None}
