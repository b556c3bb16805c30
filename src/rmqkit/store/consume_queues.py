"""All queues of a store, by topic and queue id (``ConsumeQueueStore``).

A topic's queues are consume queues, or batch queues when the topic says so (``queue.type=BatchCQ``); its directory lies
in the tree of its kind. The table also holds the *queue offset table*: each queue's ``next_offset`` says which number
the next message gets. It is in memory only and rebuilt from the queues' ends at start.
Owner thread only, except ``dirty`` and `sync`. Source: store.md §1, §4, §6, §12.2, §12.4.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from rmqkit.errors import StoreMismatch
from rmqkit.store.batch_queue import BATCH_ENTRY, BatchQueue
from rmqkit.store.consume_queue import ENTRY_BYTES, ConsumeQueue
from rmqkit.store.logic_queue import LogicQueue
from rmqkit.store.queue_ext import QueueExt
from rmqkit.store.settings import StoreSettings

__all__ = ["ConsumeQueues", "topic_fault"]

_log = logging.getLogger(__name__)


def topic_fault(topic: str, queue_id: int) -> str:
    """Why a topic and queue id cannot be directories, or an empty text."""
    if topic in ("", ".", "..") or "/" in topic or "\0" in topic:
        return f"topic {topic!r} cannot be the name of a directory"
    return "" if queue_id >= 0 else f"queue id {queue_id} is negative"


class ConsumeQueues:
    """The queues under ``consumequeue`` and ``batchconsumequeue``.

    Args:
        is_batch_topic: whether a topic's queues are batch queues.

    Attributes:
        table: the queues by topic and queue id.
        dirty: queues with entries that are not on the disk; filled by the queues, emptied by `sync`.
    """

    def __init__(
        self, root: Path, settings: StoreSettings, is_batch_topic: Callable[[str], bool] = lambda topic: False
    ) -> None:
        self._folder = root / "consumequeue"
        self._batch_folder = root / "batchconsumequeue"
        self._ext_folder = root / "consumequeue_ext" if settings.enable_consume_queue_ext else None
        self._file_bytes = _whole(settings.consume_queue_file_bytes, ENTRY_BYTES)
        self._batch_file_bytes = _whole(settings.batch_consume_queue_file_bytes, BATCH_ENTRY.size)
        self._ext_file_bytes = settings.consume_queue_ext_file_bytes
        self._is_batch_topic = is_batch_topic
        self.table: dict[tuple[str, int], LogicQueue] = {}
        self.dirty: set[LogicQueue] = set()

    def __iter__(self) -> Iterator[LogicQueue]:
        return iter(list(self.table.values()))

    def __len__(self) -> int:
        return len(self.table)

    def get(self, topic: str, queue_id: int) -> LogicQueue | None:
        """The queue, if it exists."""
        return self.table.get((topic, queue_id))

    def obtain(self, topic: str, queue_id: int) -> LogicQueue:
        """The queue, made when it does not exist; its files come with its first entry."""
        queue = self.table.get((topic, queue_id))
        if queue is None:
            queue = self.table[topic, queue_id] = self._new(topic, queue_id)
        return queue

    def _new(self, topic: str, queue_id: int) -> LogicQueue:
        place = Path(topic, str(queue_id))
        if self._is_batch_topic(topic):
            return BatchQueue(topic, queue_id, self._batch_folder / place, self._batch_file_bytes, self.dirty)
        ext = None if self._ext_folder is None else QueueExt(self._ext_folder / place, self._ext_file_bytes)
        return ConsumeQueue(topic, queue_id, self._folder / place, self._file_bytes, self.dirty, ext)

    # ---- opening

    def check(self) -> None:
        """Look at every file without changing anything.

        Raises:
            StoreMismatch: a file has another length than the settings say, a directory is no queue, or a topic's
                queues lie in the tree of the other kind.
        """
        for topic, queue_id in self._on_disk():
            self._new(topic, queue_id).check()

    def load(self) -> None:
        """Take over the queues on the disk."""
        for topic, queue_id in self._on_disk():
            self.obtain(topic, queue_id).load()

    def _on_disk(self) -> Iterator[tuple[str, int]]:
        for folder, kind in ((self._folder, "SimpleCQ"), (self._batch_folder, "BatchCQ")):
            for topic_folder in folder.iterdir() if folder.is_dir() else ():
                for queue_folder in topic_folder.iterdir() if topic_folder.is_dir() else ():
                    if not queue_folder.name.isdecimal():
                        raise StoreMismatch(f"{queue_folder} is not a queue (its name is no number): move it elsewhere")
                    if self._is_batch_topic(topic_folder.name) is not (kind == "BatchCQ"):
                        raise StoreMismatch(f"{topic_folder} holds queues of type {kind}: set its queue.type to {kind}")
                    yield topic_folder.name, int(queue_folder.name)

    def recover(self) -> tuple[int, int]:
        """Find the end of every queue; returns offset and size of the newest record indexed, (-1, 0) without any."""
        newest = (-1, 0)
        for queue in self:
            queue.recover()
            queue.close()
            newest = max(newest, queue.recovered_record)
        return newest

    def finish_recovery(self, min_physical_offset: int) -> None:
        """Rebuild the queue offset table and the min offsets."""
        for queue in self:
            queue.next_offset = queue.max_offset
            queue.correct_min_offset(min_physical_offset)
            queue.close()

    def truncate_physical(self, end: int) -> None:
        """Drop the entries of every record at or behind a physical offset."""
        for queue in self:
            if queue.max_physical_offset > end:
                queue.truncate_physical(end)

    # ---- flushing and deleting

    def sync(self, least_bytes: int = 0) -> None:
        """Wait until the queues with at least so many bytes to flush are on the disk; called from a flush thread.

        Raises:
            OSError: the disk refused.
        """
        for queue in list(self.dirty):
            if queue.queue.unsynced_bytes >= least_bytes:
                queue.sync()

    def sync_all(self) -> None:
        """Wait until every queue is on the disk, also what an earlier process wrote."""
        for queue in self:
            queue.sync()
            queue.close()

    def mark_synced(self) -> None:
        """Take every queue for being on the disk."""
        for queue in self:
            queue.mark_synced()

    def drop_expired(self, min_physical_offset: int) -> int:
        """Delete files that only point below the start of the log and correct min offsets; returns how many files."""
        count = 0
        for queue in self:
            count += queue.follow(min_physical_offset)
            queue.close_idle()
        return count

    def delete_topic(self, topic: str) -> None:
        """Delete the queues of a topic and their files."""
        for key in [key for key in self.table if key[0] == topic]:
            self.table.pop(key).destroy()
        for folder in (self._folder, self._batch_folder, self._ext_folder):
            if folder is not None:
                try:
                    (folder / topic).rmdir()
                except OSError:
                    _log.debug("%s stays: it is missing or holds other files", folder / topic)

    def destroy_all(self) -> None:
        """Delete every queue, as nothing in the log can be meant any more."""
        for topic in {topic for topic, _ in self.table}:
            self.delete_topic(topic)

    def close(self) -> None:
        """Give back every descriptor."""
        for queue in self:
            queue.close()


def _whole(file_bytes: int, entry_bytes: int) -> int:
    """A file size rounded up to whole entries."""
    return -(-file_bytes // entry_bytes) * entry_bytes
