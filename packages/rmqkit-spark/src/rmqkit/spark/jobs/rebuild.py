"""The rebuild of queues and index files from the log, on all cores. The result is equal to the result of
``rmq store rebuild`` (`rmqkit.store.offline.rebuild`), byte by byte.

======  ==============================  ================================================================================
stage   one task per                    work
======  ==============================  ================================================================================
1       split of the log                packs the entries of its records: 20-byte entries for consume queues, by queue
        (`spill_split`)                 and in runs of consecutive numbers; more columns for batch queues and with an
                                        extension; hash, offset and time of every key. They are *spilled* to files under
                                        ``rebuilt``
driver  –                               finds the end of the log, and assigns keys to index files by a running count
2       share of the queues             reads its part of all spills in the order of the log and writes the files of
        (`build_queues`)                its queues; a lost record becomes a blank entry
2       index file (`build_index`)      adds its keys, many at a time
driver  –                               replaces the old directories with the new directories
======  ==============================  ================================================================================

Only counts pass through Spark: Python workers exchange entries through the file system, which they share with the
driver. The driver holds the lock of the store. The log, ``checkpoint`` and ``abort`` are not changed. After a clean
shutdown a broker finds everything dispatched. After a crash its recovery starts at the checkpoint and finds existing
entries. Source: store.md §4–§7, §11.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from rmqkit.arrow.fs import RemotePath, join, list_files, resolve
from rmqkit.arrow.splits import Split
from rmqkit.errors import SettingsError, StoreError
from rmqkit.protocol.record import INNER_BATCH
from rmqkit.spark.jobs.log_ranges import (
    LogRange,
    SegmentCounts,
    disk_errors,
    in_log,
    log_splits,
    task_count,
    walked,
)
from rmqkit.spark.jobs.staged import settings_at, staged, upload
from rmqkit.spark.jobs.tasks import core_count, run_tasks
from rmqkit.spark.session import address
from rmqkit.store.bulk import QUEUE_ENTRY, DispatchColumns, append_entries, queue_entries
from rmqkit.store.index.file import IndexFile
from rmqkit.store.index.index import file_name
from rmqkit.store.log.scan import RECORD_BYTES_MIN, Damage
from rmqkit.store.log.view import LogView, Segment
from rmqkit.store.offline import rebuild as store_rebuild
from rmqkit.store.offline.check import open_log
from rmqkit.store.offline.findings import Report
from rmqkit.store.offline.queue_check import index_bytes
from rmqkit.store.queues.base import ConsumeQueueBase
from rmqkit.store.queues.batch_queue import BatchQueue
from rmqkit.store.queues.consume_queue import ENTRY, ConsumeQueue
from rmqkit.store.queues.table import ConsumeQueues, topic_fault
from rmqkit.store.settings import StoreSettings, parse_delay_levels

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["IndexTask", "QueueTask", "Rebuilt", "Spilled", "Spilling", "build", "rebuild", "spill_split"]

_TREES = (*store_rebuild.QUEUE_TREES, "index")
_SPLIT_BYTES = 128 << 20
_SHARES_PER_CORE = 3
_KEYS_AT_ONCE = 1 << 19
_ROW = np.dtype([("number", "i8"), ("entry", "V20"), ("stored_ms", "i8"), ("count", "i4")])
"""A queue entry with the fields for an extension or a batch queue. ``count`` is 0 outside of inner batches."""
_KEY = np.dtype([("hash", "i4"), ("physical_offset", "i8"), ("stored_ms", "i8")])


class Rebuilt(store_rebuild.Rebuilt):
    """The numbers of rebuilt files, and the counts of the log files."""

    segments: list[SegmentCounts] = field(default_factory=list)


class Spilling(Struct):
    """The input of every task. The spills are in ``folder/spills``. ``shares`` tasks build the queues."""

    folder: Path
    settings: StoreSettings
    queues: bool
    index: bool
    shares: int


class Spilled(Struct):
    """The spilled entries of one range. The parts of all shares are in ``path.queues``, between ``bounds``, and the
    keys are in ``path.keys``. ``batch_topics`` are the topics of inner batches in the range. Fillers replace
    ``lost_bytes`` bytes."""

    path: Path
    bounds: list[int]
    first_key: int
    keys: int
    batch_topics: set[str]
    lost_bytes: int = 0


class QueueTask(Struct):
    """The parts of one share in the order of the log: path, first byte, end, and the maximum number of entries that are
    missing before the part."""

    parts: list[tuple[Path, int, int, int]]
    batch_topics: set[str]


class IndexTask(Struct):
    """The keys of one file: path, first key and number of each part. ``after`` is the last time and offset of the
    preceding file."""

    name: str
    parts: list[tuple[Path, int, int]] = field(default_factory=list)
    after: tuple[int, int] | None = None


class _Entries(Struct, array_like=True):
    """The entries of one queue. They have consecutive numbers from ``first`` on. With ``has_rows``, each entry is a
    `_ROW`.
    """

    topic: str
    queue_id: int
    first: int
    data: bytes
    has_rows: bool = False
    is_light: bool = False


_decoder = msgspec.msgpack.Decoder(list[_Entries])


def rebuild(
    spark: SparkSession,
    path: str,
    settings: StoreSettings | None = None,
    *,
    queues: bool = True,
    index: bool = True,
    split_bytes: int = _SPLIT_BYTES,
    target: str = "",
    work_dir: str = "",
) -> Rebuilt:
    """Rebuild the consume queues, the index, or both.

    Args:
        settings: the settings of the store's broker. By default the sizes of the existing files are used.
        target: address or directory for the new files, if the store is at an address. A broker needs them next to the
            log.
        work_dir: folder for the temporary copy of a store at an address (`rmqkit.spark.jobs.staged`).

    Raises:
        SettingsError: a store at an address has no target, or a store on a disk has one.
        StoreLocked: a broker holds the lock of the store.
        StoreError: the store is missing, its index sizes are unknown, or a disk failed; the old files are unchanged.
    """
    path, target, settings = address(spark, path), address(spark, target), settings_at(path, settings)
    if isinstance(resolve(path), RemotePath) != bool(target):
        raise SettingsError(
            f"rebuild: {resolve(path)} is "
            + ("in its place, where its new files go: give no target" if target else "an address: give a target")
        )
    with staged(spark, path, work_dir, lambda tree: tree not in _TREES) as root:
        if target:
            for tree in _TREES:
                if list_files(join(resolve(target), tree)):
                    raise StoreError(f"{join(resolve(target), tree)} has files already: give another target")
        rebuilt = _rebuilt(spark, root, settings, queues, index, split_bytes)
        if target:
            upload(
                spark, root, [*(store_rebuild.QUEUE_TREES if queues else ()), *(("index",) if index else ())], target
            )
    for segment in rebuilt.segments:
        segment.segment = segment.segment.replace(str(root), resolve(path))
    return rebuilt


def _rebuilt(
    spark: SparkSession, root: Path, settings: StoreSettings | None, queues: bool, index: bool, split_bytes: int
) -> Rebuilt:
    log, sizes = open_log(root, settings, Report()), store_rebuild.sizes_of(root, settings)
    if index:
        index_bytes(root, sizes, is_set=settings is not None)
    folder = root / store_rebuild.FOLDER
    plan = Spilling(folder, sizes, queues, index, _SHARES_PER_CORE * core_count(spark))
    rebuilt = Rebuilt(0, 0, 0)
    with store_rebuild.held(root, folder):
        (folder / "spills").mkdir(parents=True)
        splits = log_splits(log, split_bytes)
        spilled = run_tasks(spark, partial(spill_split, plan), list(enumerate(splits)), task_count(splits))
        found = chain.from_iterable(spilled)
        todo = _assigned(log, plan, found, store_rebuild.batch_topics_of(root), rebuilt)
        made = run_tasks(spark, partial(build, plan), todo)
        rebuilt.queues, rebuilt.index_files = sum(made), sum(isinstance(task, IndexTask) for task in todo)
        # Swap only after all files are written and synced: until then an error cannot damage the old files.
        if queues:
            store_rebuild.swap(root, folder, store_rebuild.QUEUE_TREES)
        if index:
            store_rebuild.swap(root, folder, ("index",))
    return rebuilt


# ---------------------------------------------------------------- stage 1


def spill_split(plan: Spilling, numbered: tuple[int, Split]) -> list[tuple[LogRange, Spilled]]:
    """Write the entries and keys of a split to files named by its number. Return its log ranges.
    Raises StoreError: a file cannot be read or written."""
    number, split = numbered
    path = plan.folder / "spills" / f"{number:06d}"
    with (
        disk_errors(path),
        path.with_suffix(".queues").open("wb") as queues,
        path.with_suffix(".keys").open("wb") as keys,
    ):
        return list(walked(split, lambda start: _Spill(plan, path, queues, keys)))


class _Spill:
    """The entries for the records of one range. Queue entries are held in memory, about 50 bytes per record."""

    def __init__(self, plan: Spilling, path: Path, queues: BinaryIO, keys: BinaryIO) -> None:
        self._plan, self._queues, self._keys = plan, queues, keys
        self._delays_ms = parse_delay_levels(plan.settings.message_delay_level)
        self._topics: dict[str, int] = {}
        self._runs: list[tuple[NDArray[np.int64], NDArray[np.void]]] = []
        self._light: list[_Entries] = []
        self._spilled = Spilled(path, [], keys.tell() // _KEY.itemsize, 0, set())

    def add(self, segment: Segment, arrivals: DispatchColumns) -> None:
        self._spilled.lost_bytes += arrivals.lost_bytes()
        if self._plan.queues:
            self._add_entries(arrivals)
        if self._plan.index:
            rows, hashes = arrivals.keys(with_tags=self._plan.settings.index_tags)
            columns = np.empty(len(rows), _KEY)
            columns["hash"] = hashes
            columns["physical_offset"] = arrivals.offsets[rows]
            columns["stored_ms"] = arrivals.store_timestamps[rows]
            self._keys.write(columns.data)
            self._spilled.keys += len(rows)

    def _add_entries(self, arrivals: DispatchColumns) -> None:
        rows = arrivals.dispatched()
        numbers = [self._topics.setdefault(topic, len(self._topics)) for topic in arrivals.topics if topic is not None]
        columns = np.empty(len(rows), _ROW)
        columns["number"] = arrivals.queue_offsets[rows]
        columns["entry"] = queue_entries(arrivals, rows, arrivals.tags_codes(self._delays_ms)).view("V20")
        columns["stored_ms"] = arrivals.store_timestamps[rows]
        columns["count"] = np.where(arrivals.sys_flags[rows] & INNER_BATCH, arrivals.batch_counts[rows], 0)
        topic = np.array(numbers, "i8")[arrivals.topic[rows]]
        # Add instead of bitwise or: queue ids are signed, and `_grouped` must recover a negative id of an unusual
        # record from the key.
        self._runs.append(((topic << 32) + arrivals.records.field("queue_id")[rows], columns))
        self._spilled.batch_topics |= store_rebuild.inner_batch_topics(arrivals)
        for name, (number, *entry, stored_ms) in store_rebuild.light_entries(arrivals):
            row = np.array([(number, ENTRY.pack(*entry), stored_ms, 0)], _ROW)
            self._light.append(_Entries(name, 0, number, row.tobytes(), has_rows=True, is_light=True))

    def result(self) -> Spilled:
        """Write the entries, share by share. Return the place of the parts."""
        shares: list[list[_Entries]] = [[] for _ in range(self._plan.shares)]
        for entries in (*self._grouped(), *self._light):
            # Python's own hash of a text differs between workers, but all parts of a queue must be in the same share.
            shares[zlib.crc32(f"{entries.topic}/{entries.queue_id}".encode()) % len(shares)].append(entries)
        self._spilled.bounds = [self._queues.tell()]
        for share in shares:
            self._queues.write(msgspec.msgpack.encode(share))
            self._spilled.bounds.append(self._queues.tell())
        assert len(self._spilled.bounds) == len(shares) + 1, "each share has a part"
        return self._spilled

    def _grouped(self) -> Iterator[_Entries]:
        """Yield the entries of each queue, in runs of consecutive numbers."""
        if not self._runs:
            return
        names = list(self._topics)
        keys, rows = (np.concatenate(columns) for columns in zip(*self._runs, strict=True))
        # A stable sort preserves the order of the log, which decides between entries of a queue with the same number.
        order = np.argsort(keys, kind="stable")
        for group in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1) if len(order) else ():
            key = int(keys[group[0]])
            topic, queue_id = names[(key + (1 << 31)) >> 32], (key + (1 << 31)) % (1 << 32) - (1 << 31)
            if topic_fault(topic, queue_id):
                continue
            own = rows[group]
            has_rows = self._plan.settings.enable_consume_queue_ext or bool(own["count"].any())
            cuts = np.flatnonzero(np.diff(own["number"]) != 1) + 1
            # The numbers of inner batches increase by their members, so a queue with inner batches has no runs.
            for part in np.split(own, () if own["count"].any() else cuts):
                data = part.tobytes() if has_rows else part["entry"].tobytes()
                yield _Entries(topic, queue_id, int(part["number"][0]), data, has_rows)


# ---------------------------------------------------------------- between the stages


def _assigned(
    log: LogView,
    plan: Spilling,
    found: Iterable[tuple[LogRange, Spilled]],
    batch_topics: set[str],
    rebuilt: Rebuilt,
) -> list[QueueTask | IndexTask]:
    """Create the tasks of stage 2 from the ranges that are in the log."""
    counts: dict[Path, SegmentCounts] = {}
    queues = [QueueTask([], batch_topics) for _ in range(plan.shares if plan.queues else 0)]
    keys: list[tuple[Path, int, int]] = []
    record_bytes = 0
    for _, part in in_log(log, found, counts):
        if isinstance(part, Damage):
            continue
        log_range, spilled = part
        # Bytes before this range that are not in a record. They limit the number of missing entries in a queue.
        lost_bytes = log_range.start + log_range.low - log.min_offset - record_bytes
        assert lost_bytes >= 0, "ranges are in the order of the log and do not overlap"
        lost_bytes += spilled.lost_bytes
        record_bytes += log_range.high - log_range.low - spilled.lost_bytes
        rebuilt.records += log_range.records
        batch_topics |= spilled.batch_topics
        for share, low, high in zip(queues, spilled.bounds, spilled.bounds[1:], strict=False):
            share.parts.append((spilled.path.with_suffix(".queues"), low, high, lost_bytes // RECORD_BYTES_MIN))
        keys.append((spilled.path.with_suffix(".keys"), spilled.first_key, spilled.keys))
    rebuilt.segments = list(counts.values())
    return [*queues, *_index_tasks(keys, plan.settings.index_entry_count - 1)]


def _index_tasks(parts: Iterable[tuple[Path, int, int]], keys_max: int) -> Iterator[IndexTask]:
    """Distribute keys over index files. Each file gets ``keys_max`` keys. The last file gets the rest."""
    task, room = IndexTask(""), keys_max
    for path, first, count in parts:
        while count:
            if not room:
                yield task
                last = _read_keys(*task.parts[-1])[-1]
                task, room = (
                    IndexTask(task.name, after=(int(last["stored_ms"]), int(last["physical_offset"]))),
                    keys_max,
                )
            taken = min(count, room)
            assert 0 < taken <= keys_max, "a part of a file has keys"
            if not task.parts:
                task.name = file_name(int(_read_keys(path, first, 1)["stored_ms"][0]), task.name)
            task.parts.append((path, first, taken))
            first, count, room = first + taken, count - taken, room - taken
    if task.parts:
        yield task


def _read_keys(path: Path, first: int, count: int) -> NDArray[np.void]:
    return np.fromfile(path, _KEY, count, offset=first * _KEY.itemsize)


# ---------------------------------------------------------------- stage 2


def build(plan: Spilling, task: QueueTask | IndexTask) -> int:
    """Write the files of a task to the disk. Return the number of their queues.
    Raises StoreError: a file cannot be read or written."""
    with disk_errors(plan.folder):
        return build_queues(plan, task) if isinstance(task, QueueTask) else build_index(plan, task)


def build_queues(plan: Spilling, task: QueueTask) -> int:
    """Write the queues of a share. Return the number of queues."""
    queues = ConsumeQueues(plan.folder, plan.settings, task.batch_topics.__contains__)
    for path, low, high, gap_max in task.parts:
        with path.open("rb") as file:
            file.seek(low)
            for entries in _decoder.decode(file.read(high - low)):
                _append(queues.obtain(entries.topic, entries.queue_id), entries, gap_max)
    queues.sync_all()  # on the disk before the driver swaps directories
    queues.close()
    return len(queues)


def _append(queue: ConsumeQueueBase, entries: _Entries, gap_max: int) -> None:
    rows = np.frombuffer(entries.data, _ROW) if entries.has_rows else np.empty(0, _ROW)
    if isinstance(queue, BatchQueue):
        for number, entry, stored_ms, count in rows[rows["count"] > 0].tolist():
            physical_offset, size, tags_code = ENTRY.unpack(entry)
            queue.append_batch(number, count, physical_offset, size, tags_code, stored_ms)
        return
    assert isinstance(queue, ConsumeQueue), "the queue is a batch queue or a consume queue"
    packed = rows["entry"].tobytes() if entries.has_rows else entries.data
    stored = rows["stored_ms"].tolist()  # only an extension stores the time

    def enter_one(i: int) -> None:
        physical_offset, size, tags_code = ENTRY.unpack_from(packed, i * ENTRY.size)
        queue.append(entries.first + i, physical_offset, size, tags_code, stored[i] if stored else 0)

    gap_max = 0 if entries.is_light else gap_max
    append_entries(queue, entries.first, np.frombuffer(packed, QUEUE_ENTRY), gap_max, enter_one)


def build_index(plan: Spilling, task: IndexTask) -> int:
    """Write one index file, and return 0."""
    settings = plan.settings
    path = plan.folder / "index" / task.name
    file = IndexFile.create(path, settings.hash_slot_count, settings.index_entry_count)
    if task.after is not None:
        file.begin_after(*task.after)
    for spill, first, count in task.parts:
        for start in range(first, first + count, _KEYS_AT_ONCE):
            keys = _read_keys(spill, start, min(_KEYS_AT_ONCE, first + count - start))
            file.put_run(keys["hash"].astype("i8"), keys["physical_offset"], keys["stored_ms"])
    file.write()
    file.release()
    file.file.sync()
    file.file.close()
    return 0
