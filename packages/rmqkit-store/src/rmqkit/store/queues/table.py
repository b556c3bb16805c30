"""All queues of a store, by topic and queue id (``ConsumeQueueStore``).

The queues of a topic are consume queues, or batch queues if the topic has this type (``queue.type=BatchCQ``). Each kind
has its own directory tree. The table also contains the *queue offset table*: each queue's ``next_offset`` is the number
of its next message. It is in memory only, and a start rebuilds it from the ends of the queues.

A queue opens files when it is used, so many queues do not need many descriptors. When more than ``open_max`` queues
have open files, the queues that opened files first close the files that are already on the disk. The next flush cycle
then flushes every queue, however few entries it has. A file that is not on the disk stays open, because the system
reports the error of a write-back only to a process that has the file open. At twice ``open_max``, the owner waits for
the disk itself: it flushes one queue for each queue that it opens.

Recovery makes everything durable at its end, and may have written to every queue. It waits for the files of `_SYNCING`
queues at a time. When twice ``open_max`` queues have open files, it waits for half of these queues. It waits for each
directory once. Most of a wait is for the journal of the file system, so many concurrent waits take little longer than
one.

**Deleted topics**: ``config/deletedTopics.json`` has the newest record of each deleted topic,
``{topic: [physicalOffset, size, storeTimestamp]}``. The file is on the disk before the topic's queues are deleted.
Recovery dispatches the log again: without the file, a topic that was created again would begin with messages of the old
topic, as in Apache's brokers, which do not know the file. An entry is valid while the log contains exactly this record.
If the record has expired, all earlier records have expired, too. A log that was cut and continued differently has new
messages there. A power cut that loses the record makes the entry invalid, too.

Use this module only in the owner thread of the store, except ``dirty`` and `sync`. Source: store.md §1, §4, §6, §11,
§12; behaviour.md §9.6.
"""

from __future__ import annotations

import itertools
import logging
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rmqkit.errors import RecordCorrupt, StoreMismatch
from rmqkit.protocol.record import decode_record
from rmqkit.store.files import JsonFile
from rmqkit.store.log.commit_log import CommitLog
from rmqkit.store.log.file_queue import split, sync_names_of
from rmqkit.store.log.mapped_file import BytesLost, MappedFile
from rmqkit.store.queues.base import NO_RECORD, ConsumeQueueBase
from rmqkit.store.queues.batch_queue import BATCH_ENTRY, BatchQueue
from rmqkit.store.queues.consume_queue import ENTRY_BYTES, HELD_BYTES_MAX, ConsumeQueue
from rmqkit.store.queues.queue_ext import QueueExt
from rmqkit.store.settings import StoreSettings
from rmqkit.system import disk, threads

__all__ = [
    "ConsumeQueues",
    "DeletedTopics",
    "deleted_topics_path",
    "queue_counts",
    "topic_fault",
    "whole",
]

_log = logging.getLogger(__name__)
_OPEN_LIMIT_MAX = 1 << 20
_LOOKED_AT = 16
_SYNCING = 16
_NAME_LEVELS = 4


def topic_fault(topic: str, queue_id: int) -> str:
    """Return the reason why a topic and queue id cannot be directories, or an empty text."""
    if topic in ("", ".", "..") or "/" in topic or "\0" in topic:
        return f"topic {topic!r} cannot be the name of a directory"
    return "" if queue_id >= 0 else f"queue id {queue_id} is negative"


def queue_counts(root: Path) -> dict[str, tuple[int, bool]]:
    """Return one past the greatest queue id for each topic with queues in a store, and whether its queues are batch
    queues."""
    counts: dict[str, tuple[int, bool]] = {}
    for tree, is_batch in ((root / "consumequeue", False), (root / "batchconsumequeue", True)):
        for topic in _names(tree):
            ids = [int(name) for name in _names(tree / topic) if name.isdecimal()]
            if ids:
                counts[topic] = max(ids) + 1, is_batch
    return counts


def _names(directory: Path) -> list[str]:
    """Return the names in a directory, none if it is missing or a file."""
    return disk.names(directory) if disk.is_directory(directory) else []


def open_file_limit() -> int:
    """Raise the soft limit of open files as far as allowed. Return the number of files that the process can then
    open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_LIMIT_MAX if hard == resource.RLIM_INFINITY else min(hard, _OPEN_LIMIT_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            _log.warning("at most %d files can be open, although %d would be allowed: %s", soft, wanted, error)
            return soft
    return wanted


class ConsumeQueues:
    """The queues under ``consumequeue`` and ``batchconsumequeue``.

    Args:
        is_batch_topic: returns True if a topic's queues are batch queues.

    Attributes:
        table: the queues by topic and queue id.
        open_max: number of queues that can have open files before queues are closed. `load` sets it so that twice as
            many queues use half of the files that the process can open.
        dirty: queues with entries that are not on the disk. Queues add themselves; `sync` removes them.
        deleted_ends: by topic, the physical offset before which its records belong to a deleted topic with the same
            name.
        is_replaying: whether records are dispatched again from a later offset than the start of the log.
        behind: queues that lack messages from before the replayed part of the log.
    """

    def __init__(
        self, root: Path, settings: StoreSettings, is_batch_topic: Callable[[str], bool] = lambda topic: False
    ) -> None:
        self._folder = root / "consumequeue"
        self._batch_folder = root / "batchconsumequeue"
        self._ext_folder = root / "consumequeue_ext" if settings.enable_consume_queue_ext else None
        self._file_bytes = whole(settings.consume_queue_file_bytes, ENTRY_BYTES)
        self._batch_file_bytes = whole(settings.batch_consume_queue_file_bytes, BATCH_ENTRY.size)
        self._ext_file_bytes = settings.consume_queue_ext_file_bytes
        self._is_batch_topic = is_batch_topic
        self.table: dict[tuple[str, int], ConsumeQueueBase] = {}
        self.dirty: dict[ConsumeQueueBase, None] = {}
        self.deleted_ends: Mapping[str, int] = {}
        self.open_max = _LOOKED_AT
        self._open: dict[ConsumeQueueBase, None] = {}  # in the order of opening
        self.behind: set[ConsumeQueueBase] = set()
        self._on_open = self._make_room  # one bound method for all queues
        self._on_gap = self._note_gap
        self.is_replaying = False
        self._checked: list[ConsumeQueueBase] = []
        self._syncing = threads.Lock()  # held while a queue waits for the disk, by either thread
        self._is_recovering = False
        self._held_bytes_max = 0
        self._is_refusal_logged = False

    def __iter__(self) -> Iterator[ConsumeQueueBase]:
        return iter(list(self.table.values()))

    def __len__(self) -> int:
        return len(self.table)

    def get(self, topic: str, queue_id: int) -> ConsumeQueueBase | None:
        return self.table.get((topic, queue_id))

    def obtain(self, topic: str, queue_id: int) -> ConsumeQueueBase:
        """Return a queue. Create the queue if it does not exist. Its first entry creates its files."""
        queue = self.table.get((topic, queue_id))
        if queue is None:
            queue = self.table[topic, queue_id] = self._new(topic, queue_id)
            queue.max_physical_offset = self.deleted_ends.get(topic, -1)
        return queue

    def _new(self, topic: str, queue_id: int) -> ConsumeQueueBase:
        queue: ConsumeQueueBase
        if self._is_batch_topic(topic):
            folder = self._batch_folder / topic / str(queue_id)
            queue = BatchQueue(topic, queue_id, folder, self._batch_file_bytes, self.dirty)
        else:
            folder = self._folder / topic / str(queue_id)
            ext_folder = self._ext_folder and self._ext_folder / topic / str(queue_id)
            ext = QueueExt(ext_folder, self._ext_file_bytes) if ext_folder else None
            queue = ConsumeQueue(topic, queue_id, folder, self._file_bytes, self.dirty, ext)
            queue.held_bytes_max = self._held_bytes_max_of(topic)
        queue.on_open = self._on_open
        queue.on_gap = self._on_gap
        return queue

    # ---- opening

    def check(self, *, clean: bool = True) -> None:
        """Check every file without changing anything.
        ``clean``: whether the store was closed cleanly. If not, queue files may be empty.
        Raises StoreMismatch: the length of a file does not match the settings, a directory is not a queue, or a topic's
        queues are in the tree of the other kind."""
        self._checked = []
        for topic, queue_id in self._on_disk():
            queue = self._new(topic, queue_id)
            queue.check(clean=clean)
            self._checked.append(queue)

    def load(self) -> None:
        """Load the queues that `check` found, and compute how many queues may have open files."""
        files_per_queue = 2 if self._ext_folder is None else 4  # one file for appends and one for reads
        self.open_max = max(_LOOKED_AT, open_file_limit() // 4 // files_per_queue)
        self._is_recovering = True
        for queue in self._checked:
            queue.load()
            self.table[queue.topic, queue.queue_id] = queue
        self._checked = []

    def _on_disk(self) -> Iterator[tuple[str, int]]:
        for folder, kind in ((self._folder, "SimpleCQ"), (self._batch_folder, "BatchCQ")):
            for topic in _names(folder):
                topic_folder = folder / topic
                for name in _names(topic_folder):
                    if not name.isdecimal():
                        said = f"{topic_folder / name} is not a queue (its name is not a number): move it elsewhere"
                        raise StoreMismatch(said)
                    if self._is_batch_topic(topic) is not (kind == "BatchCQ"):
                        raise StoreMismatch(f"{topic_folder} holds queues of type {kind}: set its queue.type to {kind}")
                    yield topic, int(name)

    def recover(
        self, *, clean: bool = True, take: Callable[[ConsumeQueueBase], bool] = lambda queue: False
    ) -> tuple[int, int]:
        """Find the end of every queue. Return offset and size of the newest indexed record, or (-1, 0) without a
        record.
        ``clean``: whether the store was closed cleanly. If not, call `truncate_for_replay` next.
        ``take``: sets a queue to its end and returns True, or returns False."""
        newest = NO_RECORD
        for queue in self:
            if not take(queue):
                queue.recover(clean=clean)
            if queue.topic in self.deleted_ends:
                queue.forget_before(self.deleted_ends[queue.topic])
            queue.close()
            newest = max(newest, queue.recovered_record)
        return newest

    def finish_recovery(self, min_physical_offset: int) -> None:
        """Rebuild the queue offset table and the min offsets."""
        self.is_replaying = False
        self.behind.clear()
        for queue in self:
            queue.next_offset = max(queue.max_offset, queue.next_offset)  # it may be greater: see `queue_ends`
            queue.recovered_record = NO_RECORD
            queue.correct_min_offset(min_physical_offset)
            if queue.first_index == queue.end_index == 0:
                queue.queue.destroy()  # the replay had no records for it
            if not self._is_recovering:
                queue.close()

    def truncate_for_replay(
        self, start: int, min_physical_offset: int, is_record: Callable[[ConsumeQueueBase, int, tuple[Any, ...]], bool]
    ) -> None:
        """Drop every entry that a replay of the log from a physical offset on will create again."""
        self.is_replaying = start > min_physical_offset
        for queue in self:
            queue.truncate_for_replay(start, is_record)
            queue.max_physical_offset = max(queue.max_physical_offset, self.deleted_ends.get(queue.topic, -1))
            queue.correct_min_offset(min_physical_offset)  # a queue without messages may continue with any number
            if isinstance(queue, ConsumeQueue) and queue.ext is not None and queue.min_offset >= queue.max_offset:
                queue.ext.queue.destroy()  # the units of removed records may be lost: a hole would end the scan
            queue.close()

    def _note_gap(self, queue: ConsumeQueueBase) -> None:
        if self.is_replaying:
            self.behind.add(queue)

    def truncate_physical(self, end: int) -> None:
        """Drop the entries of all records at or after a physical offset."""
        for queue in self:
            if queue.max_physical_offset > end:
                queue.truncate_physical(end)

    # ---- flushing and deleting

    def hold_entries(self) -> None:
        """Allow the queues to hold new entries in memory, until a flush cycle calls `write_held`."""
        self._held_bytes_max = HELD_BYTES_MAX
        for queue in self:
            if isinstance(queue, ConsumeQueue):
                queue.held_bytes_max = self._held_bytes_max_of(queue.topic)

    def _held_bytes_max_of(self, topic: str) -> int:
        """Return the limit of held bytes for a topic: 0 for a topic that was created again.

        After a kill, Apache's broker does not know that the earlier topic was deleted, and would enter its messages
        into queues without later entries.
        """
        return 0 if topic in self.deleted_ends else self._held_bytes_max

    def write_held(self) -> bool:
        """Write the entries that are held in memory. Any thread can call this. Return False if some entries cannot be
        written. These entries stay in memory, and the store accepts messages until a queue may hold no more entries."""
        refused: OSError | None = None
        for queue in list(self.dirty):
            try:
                queue.write_held()
            except OSError as error:
                refused = error
        if refused is not None and not self._is_refusal_logged:
            _log.error("consume queues cannot be written, their newest entries stay in memory: %s", refused)
        self._is_refusal_logged = refused is not None
        return refused is None

    def sync(self, least_bytes: int = 0) -> None:
        """Wait until the queues with at least ``least_bytes`` to flush are on the disk; called from a flush thread.
        Raises OSError: the sync of a queue failed. The other queues are on the disk, and the next call retries."""
        if len(self._open) > self.open_max:
            least_bytes = 0
        refused: OSError | None = None
        for queue in list(self.dirty):
            if queue.queue.unsynced_bytes >= least_bytes:
                try:
                    self._sync(queue)
                except OSError as error:
                    refused = refused or error
        if refused is not None:
            raise refused

    def _sync(self, queue: ConsumeQueueBase) -> None:
        with self._syncing:
            queue.sync()

    def _make_room(self, opening: ConsumeQueueBase) -> None:
        """Before another queue is opened, close the queues that were opened first.
        Raises OSError: too many queues are open, and a queue that must be closed cannot be synced."""
        if self._is_recovering:  # no queue is synced, so no queue can be closed without a wait
            if len(self._open) >= 2 * self.open_max:
                self._sync_together(list(itertools.islice(self._open, self.open_max)))
            self._open[opening] = None
            return
        if len(self._open) >= self.open_max:
            for queue in list(itertools.islice(self._open, _LOOKED_AT)):
                del self._open[queue]
                if not queue.close_idle():
                    self._open[queue] = None
        if len(self._open) >= 2 * self.open_max:
            oldest = next(iter(self._open))
            oldest.write_held()
            self._sync(oldest)
            if oldest.close_idle():
                del self._open[oldest]
        self._open[opening] = None

    def sync_all(self) -> None:
        """Wait until every queue is on the disk, including writes of an earlier process. This is the last step of a
        recovery.
        Raises OSError: a sync failed."""
        self._sync_together(list(self))
        self._is_recovering = False

    def _sync_together(self, queues: list[ConsumeQueueBase]) -> None:
        """Sync and close queues, several at a time, while no flush thread runs yet."""

        def sync(part: list[ConsumeQueueBase]) -> None:
            for queue in part:
                queue.sync(unnamed=unnamed)
                queue.close()

        unnamed: set[MappedFile] = set()
        waiting = [queue for queue in queues if not queue.close_idle()]
        with threads.Pool(_SYNCING, "store-recovery") as pool:
            for _ in pool.map(sync, split(waiting)):
                pass
            sync_names_of(unnamed, _NAME_LEVELS, pool)
        for queue in queues:
            self._open.pop(queue, None)

    def mark_synced(self) -> None:
        """Mark every queue as durable."""
        for queue in self:
            queue.mark_synced()

    def drop_expired(self, min_physical_offset: int) -> int:
        """Delete files with entries that are all before the start of the log, and correct min offsets. Return the
        number of deleted files."""
        count = 0
        for queue in self:
            count += queue.follow(min_physical_offset)
            queue.close_idle()
        return count

    def newest_record(self, topic: str) -> tuple[int, int]:
        """Return physicalOffset and size of the newest record in the queues of a topic, or (-1, 0) without a record.
        Raises BytesLost: the page cache lost the newest entry of a queue."""
        newest = NO_RECORD
        for queue in [queue for key, queue in self.table.items() if key[0] == topic]:
            record = queue.newest_record()
            if record[0] >= 0 and record[1] == 0:
                raise BytesLost(queue.queue.files[-1].path)
            newest = max(newest, record)
        return newest

    def delete_topic(self, topic: str) -> None:
        """Delete the queues of a topic and their files."""
        for key in [key for key in self.table if key[0] == topic]:
            queue = self.table.pop(key)
            self._open.pop(queue, None)
            queue.destroy()
        for folder in (self._folder, self._batch_folder, self._ext_folder):
            if folder is not None:
                try:
                    disk.remove_directory(folder / topic)
                except OSError:
                    _log.debug("%s is not deleted: it is missing or holds other files", folder / topic)

    def remove_folders(self, topics: Iterable[str]) -> None:
        """Delete the folders of queues that are not in the table."""
        for topic in topics:
            disk.remove_tree(self._folder / topic)

    def destroy_all(self) -> None:
        """Delete every queue, because the log no longer has their records."""
        for topic in {topic for topic, _ in self.table}:
            self.delete_topic(topic)

    def close(self) -> None:
        """Close every descriptor. Entries that could not be written are dropped."""
        for queue in self:
            queue.forget_held()
            queue.close()
        self._open.clear()


def whole(file_bytes: int, entry_bytes: int) -> int:
    """Round a file size up to whole entries."""
    return -(-file_bytes // entry_bytes) * entry_bytes


_Newest = tuple[int, int, int]


def deleted_topics_path(root: Path) -> Path:
    return root / "config" / "deletedTopics.json"


class DeletedTopics:
    """The note of deleted topics.

    ``ends``: by topic, the physical offset before which its records belong to a deleted topic.
    """

    def __init__(self, root: Path, log: CommitLog) -> None:
        self.ends: dict[str, int] = {}
        self._file = JsonFile(deleted_topics_path(root))
        self._log = log
        self._newest: dict[str, _Newest] = {}

    def load(self) -> None:
        """Read the file, after the log was loaded.

        Raises StoreMismatch: neither the file nor its backup can be read.
        """
        stored = self._file.load(dict[str, _Newest]) or {}
        self._note_ends({topic: newest for topic, newest in stored.items() if self._is_there(*newest)})

    def add(self, newest: dict[str, _Newest]) -> None:
        """Store the newest records of topics that are about to be deleted. They are on the disk when `add` returns.
        Raises StoreUnavailable: the write failed; nothing is stored."""
        if newest:
            kept = {topic: one for topic, one in self._newest.items() if one[0] >= self._log.min_offset}
            self._file.save(kept | newest)
            self._note_ends(kept | newest)

    def cut(self, end: int) -> None:
        """Drop the noted records that end after the new end of the log: new messages will be stored there."""
        self._note_ends({topic: one for topic, one in self._newest.items() if sum(one[:2]) <= end})

    def _note_ends(self, newest: dict[str, _Newest]) -> None:
        self._newest = newest
        self.ends.clear()
        self.ends.update((topic, at + size) for topic, (at, size, _) in newest.items())

    def _is_there(self, physical_offset: int, size: int, store_timestamp: int) -> bool:
        try:
            record = decode_record(self._log.slice(physical_offset, size) or b"")
        except RecordCorrupt:
            return False
        return (record.physical_offset, record.size, record.store_timestamp) == (physical_offset, size, store_timestamp)
