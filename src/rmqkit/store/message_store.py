"""The store of one broker: puts, reads and their files (``DefaultMessageStore``).

Here the parts are joined: `put` appends and dispatches in one call, `reader` reads, `flush` makes durable. `open`
checks, locks and recovers, and changes nothing when it raises; `close` leaves what a clean stop leaves. Under
SYNC_FLUSH a record is dispatched, and so readable, when it is on the disk; see `MessageStore.dispatch`.

Owner thread only (the thread that called `open`), except ``on_durable``, which the flush thread calls.
Not handled here: topics, delay levels and transactions of a message (the broker rewrites it before it puts it),
replication. Source: store.md §8, §10, §12.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import RecordCorrupt, StoreError, StoreMismatch
from rmqkit.protocol.record import Record, decode_record
from rmqkit.store.checkpoint import Checkpoint
from rmqkit.store.commit_log import CommitLog
from rmqkit.store.consume_queues import ConsumeQueues
from rmqkit.store.delay_levels import parse_delay_levels
from rmqkit.store.dispatcher import Arrival, Dispatcher, arrival_of
from rmqkit.store.flush import Flusher
from rmqkit.store.json_files import make_directory, sync_directory, write_durably
from rmqkit.store.logic_queue import LogicQueue
from rmqkit.store.message_index import KeyQuery, MessageIndex
from rmqkit.store.put import Appender
from rmqkit.store.put_message import PutMessage, PutResult, PutStatus
from rmqkit.store.reader import EntryTest, GetResult, GetStatus, Reader
from rmqkit.store.recovery import find_log_end
from rmqkit.store.retention import Retention, RetentionRound, used_percent
from rmqkit.store.settings import StoreSettings
from rmqkit.store.store_lock import StoreLock

if TYPE_CHECKING:
    from rmqkit.store.arrivals import Arrivals

__all__ = [
    "Arrival",
    "GetResult",
    "GetStatus",
    "KeyQuery",
    "MessageStore",
    "PutMessage",
    "PutResult",
    "PutStatus",
    "RetentionRound",
]

_log = logging.getLogger(__name__)


class MessageStore:
    """A store directory, open for one broker.

    Args:
        root: ``storePathRootDir``.
        is_batch_topic: whether a topic's queues are BatchConsumeQueues.
        on_arrival: told, once per put or batch, of messages that became readable.
        bitmap_of: makes the filter bitmap of a record, empty for none, for the extension of its queue entry; asked only
            with ``enableConsumeQueueExt``, also for what recovery dispatches again in `open`; must not raise.
        disk_used_percent: says how full the disk of a directory is, in percent.
        on_durable: told after every flush round how far the log is on the disk, or the error that ended flushing;
            called from the flush thread. Under SYNC_FLUSH the owner then calls `dispatch`.
        on_committed: told, from the commit thread, that more of the log became readable and the owner should call
            `dispatch`; only with the transient store pool.
    """

    def __init__(
        self,
        root: Path,
        settings: StoreSettings,
        *,
        clock: Clock = SYSTEM_CLOCK,
        is_batch_topic: Callable[[str], bool] = lambda topic: False,
        on_arrival: Callable[[list[Arrival]], None] | None = None,
        on_durable: Callable[[int, OSError | None], None] | None = None,
        on_committed: Callable[[], object] | None = None,
        bitmap_of: Callable[[Arrival], bytes] | None = None,
        disk_used_percent: Callable[[Path], int] = used_percent,
    ) -> None:
        self.root = root
        self._settings = settings
        self._delays_ms = parse_delay_levels(settings.message_delay_level)
        self._lock = StoreLock(root)
        self._commit_log = CommitLog(root, settings)
        self._queues = ConsumeQueues(root, settings, is_batch_topic)
        self._index = _index_of(root, settings)
        self._checkpoint = Checkpoint(root / "checkpoint")
        self._dispatcher = Dispatcher(
            self._queues, on_arrival, self._index, bitmap_of if settings.enable_consume_queue_ext else None
        )
        self._reader = Reader(self._commit_log, settings)
        self._flusher = Flusher(
            self._commit_log,
            self._queues,
            self._index,
            self._checkpoint,
            settings,
            clock,
            dispatched_timestamp=lambda: self._dispatcher.dispatched_timestamp,
            on_durable=on_durable,
            on_committed=on_committed,
        )
        self._appender = Appender(self._commit_log, self._queues, self._dispatcher, self._flusher, settings, clock)
        self._retention = Retention(
            root, self._commit_log, self._queues, self._index, settings, clock, disk_used_percent
        )

    # ---- facts

    @property
    def durable_offset(self) -> int:
        """Physical offset up to which the log is on the disk."""
        return self._flusher.durable_offset

    @property
    def max_physical_offset(self) -> int:
        """Physical offset one past the last byte of the log."""
        return self._commit_log.max_offset

    @property
    def min_physical_offset(self) -> int:
        """Physical offset of the oldest byte of the log, -1 while there is no file."""
        return self._commit_log.min_offset

    @property
    def dispatched_offset(self) -> int:
        """Physical offset up to which messages are readable."""
        return self._dispatcher.position

    @property
    def failure(self) -> OSError | None:
        """The error that made the store refuse messages, if any."""
        return self._flusher.failure or self._flusher.commit_failure or self._dispatcher.failure

    @property
    def is_writable(self) -> bool:
        """Whether puts are taken at present."""
        return self._appender.is_open and self.failure is None and not self.is_disk_full

    @property
    def is_disk_full(self) -> bool:
        """Whether puts are refused because the last retention round found a disk too full."""
        return self._retention.decision.is_disk_full

    # ---- opening and closing

    def open(self) -> None:
        """Lock, load and recover the directory, and start flushing.

        Raises:
            StoreLocked: another broker uses it.
            StoreMismatch: its files do not have the sizes of the settings, or one is no store file.
            StoreError: it cannot be read or made. In every case nothing was changed.
        """
        assert not self._appender.is_open, "a store is opened once"
        try:
            self._lock.check()
            self._check()
            make_directory(self.root)
            self._lock.acquire()
        except OSError as error:
            raise StoreError(f"cannot open store {self.root}: errno {error.errno} {error.strerror}") from error
        try:
            self._load_and_recover()
        except BaseException as error:
            self._close_files()
            self._lock.release()
            if isinstance(error, OSError):
                raise StoreError(f"cannot recover store {self.root}: errno {error.errno} {error.strerror}") from error
            raise
        self._appender.is_open = True

    def _check(self) -> None:
        """Look at everything that `open` relies on, without changing it."""
        if self.root.exists() and not self.root.is_dir():
            raise StoreMismatch(f"{self.root} is a file: give a directory as storePathRootDir")
        self._commit_log.queue.check()
        self._queues.check(clean=not self._abort_path.exists())
        if self._index is not None:
            self._index.check()

    def _load_and_recover(self) -> None:
        is_clean = not self._abort_path.exists()
        self._commit_log.queue.load()
        self._queues.load()
        self._checkpoint.load()
        if self._index is not None:
            self._index.load(clean=is_clean, durable_timestamp=self._checkpoint.index_timestamp)
        if not is_clean:
            _log.warning("store %s was not closed in order: recovering", self.root)
        self._recover(is_clean)
        write_durably(self._abort_path, str(os.getpid()).encode())
        self._commit_log.resume()
        self._dispatcher.position = self._commit_log.max_offset
        self._flusher.start(self._commit_log.max_offset)

    @property
    def _abort_path(self) -> Path:
        return self.root / "abort"

    def _recover(self, is_clean: bool) -> None:
        """Bring log and queues into agreement. Source: store.md §12."""
        log, queues = self._commit_log, self._queues
        if is_clean:
            log.queue.mark_synced()
            queues.mark_synced()
        newest = queues.recover(clean=is_clean)
        if not log.queue.files:
            queues.destroy_all()
            return
        end = find_log_end(
            log,
            self._settings,
            self._dispatch_record,
            self._dispatch_run,
            on_replay=lambda offset: queues.truncate_for_replay(offset, log.min_offset, self._is_record),
            clean=is_clean,
            newest=newest,
            checkpoint=self._checkpoint,
        )
        queues.truncate_physical(end.offset)
        log.queue.truncate(end.offset)
        log.last_store_timestamp = end.last_store_timestamp
        self._checkpoint.confirm_physical_offset = end.last_record
        if end.newest_store_timestamp > end.last_store_timestamp:
            self._checkpoint.step_back(end.newest_store_timestamp, end.last_store_timestamp)
        queues.finish_recovery(log.min_offset)
        log.queue.sync()  # after a clean stop only what was cut: bytes that come back would look like records
        queues.sync_all()
        _log.info("store %s: log from %d to %d, %d queues", self.root, log.min_offset, end.offset, len(queues))

    def _is_record(self, queue: LogicQueue, index: int, entry: tuple[Any, ...]) -> bool:
        """Whether the log holds the record of a queue entry, or held it."""
        physical_offset, size = entry[:2]
        if physical_offset < self.min_physical_offset:
            return True
        try:
            record = decode_record(self._commit_log.slice(physical_offset, size) or b"")
        except RecordCorrupt:
            return False
        return (record.topic, record.queue_id, record.physical_offset) == (
            queue.topic,
            queue.queue_id,
            physical_offset,
        )

    def _dispatch_record(self, record: Record) -> None:
        self._dispatcher.apply(arrival_of(record, self._delays_ms))

    def _dispatch_run(self, arrivals: Arrivals) -> None:
        from rmqkit.store.catch_up import CatchUp

        queues_only = self._dispatcher.without_index()
        CatchUp(self._queues, self._index, queues_only, self._delays_ms).enter(arrivals)
        self._dispatcher.dispatched_timestamp = int(arrivals.store_timestamps[-1])

    def close(self) -> None:
        """Flush everything and leave the directory as after a clean stop; without effect on a closed store.

        After a failed flush ``abort`` stays, so that the next start recovers. Source: store.md §10.
        """
        if not self._appender.is_open:
            return
        self._appender.is_open = False
        self._flusher.stop()
        self._appender.dispatch()
        self._flusher.flush_queues()
        self._flusher.flush_index()
        is_complete = self.failure is None and not self._dispatcher.pending
        self._close_files()
        if is_complete:
            self._abort_path.unlink(missing_ok=True)
            sync_directory(self.root)
        self._lock.release()

    def _close_files(self) -> None:
        self._retention.close()
        self._commit_log.close()
        self._queues.close()
        if self._index is not None:
            self._index.close()

    # ---- putting

    def put(self, message: PutMessage) -> PutResult:
        """Append one message; readable when this returns (SYNC_FLUSH: when durable; with the pool: when committed)."""
        return self._appender.put(message)

    def put_run(self, messages: list[PutMessage]) -> list[Arrival] | None:
        """Append plain messages of one sender with one write; None, with nothing done, when each has to be put."""
        return self._appender.put_run(messages)

    def put_batch(self, message: PutMessage) -> PutResult:
        """Append a wire batch body, all or nothing: its members, or one inner batch for a batch topic."""
        return self._appender.put_batch(message)

    def together(self) -> AbstractContextManager[None]:
        """What is put inside becomes readable at its end, at less cost; a read inside makes it readable before."""
        return self._appender.together()

    def request_flush(self) -> None:
        """Ask for a flush round that covers everything put so far; cheap when one is asked for already."""
        self._flusher.request()

    def dispatch(self) -> None:
        """Make readable what may be: under SYNC_FLUSH what is on the disk, else what was committed.

        The owner calls it when ``on_durable`` (SYNC_FLUSH) or ``on_committed`` came; reads call it too. Without effect
        on a closed store: such a call may come late.
        """
        if self._appender.is_open:
            self._appender.dispatch()

    # ---- reading

    def get(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        *,
        count_max: int,
        codes: frozenset[int] | None = None,
        accept: Callable[[memoryview], bool] | None = None,
        accept_entry: EntryTest | None = None,
    ) -> GetResult:
        """Read messages from an offset on. Source: store.md §16.1.

        Args:
            codes: tag codes (i32) wanted, None for everything.
            accept: a further test of the stored record.
            accept_entry: a further test of the queue entry, made before the record is touched.
        """
        queue = self._readable(topic, queue_id)
        if queue is None:
            return GetResult(GetStatus.NO_MESSAGE_IN_QUEUE, 0, 0, 0)
        return self._reader.get(queue, queue_offset, count_max, codes, accept, accept_entry)

    def _readable(self, topic: str, queue_id: int) -> LogicQueue | None:
        if self._dispatcher.pending:
            self.dispatch()
        return self._queues.get(topic, queue_id)

    def max_offset(self, topic: str, queue_id: int) -> int:
        """One past the last readable message, 0 for an unknown queue."""
        queue = self._readable(topic, queue_id)
        return 0 if queue is None else queue.max_offset

    def min_offset(self, topic: str, queue_id: int) -> int:
        """The first readable message, 0 for an unknown queue."""
        queue = self._readable(topic, queue_id)
        return 0 if queue is None else queue.min_offset

    def earliest_store_time(self, topic: str, queue_id: int) -> int:
        """storeTimestamp of the first readable message, -1 when there is none."""
        return self.store_time_at(topic, queue_id, self.min_offset(topic, queue_id))

    def store_time_at(self, topic: str, queue_id: int, queue_offset: int) -> int:
        """storeTimestamp of a message, -1 when there is none."""
        queue = self._readable(topic, queue_id)
        return -1 if queue is None else self._reader.store_time_at(queue, queue_offset)

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int, *, upper: bool = False) -> int:
        """The first message stored at or after a time; with ``upper`` the last one at or before it; 0 if unknown."""
        queue = self._readable(topic, queue_id)
        return 0 if queue is None else self._reader.offset_by_time(queue, timestamp_ms, upper=upper)

    def is_in_memory(self, topic: str, queue_id: int, queue_offset: int) -> bool:
        """Whether a message exists and lies so near the log end that it counts as cached."""
        queue = self._readable(topic, queue_id)
        return queue is not None and self._reader.is_in_memory(queue, queue_offset)

    def record_at(self, physical_offset: int) -> memoryview | None:
        """The stored record that begins at a physical offset, or None."""
        return self._commit_log.record_at(physical_offset)

    def entries(
        self, topic: str, queue_id: int, queue_offset: int, *, count_max: int
    ) -> list[tuple[int, int, int, int | None]]:
        """Entries of a queue from an offset on, within one of its files.

        Returns:
            queue offset after it, physicalOffset, size and tag code of each; the code is None when its extension unit
            is missing. Nothing for an offset that the queue does not have.
        """
        queue = self._readable(topic, queue_id)
        if queue is None or not queue.min_offset <= queue_offset < queue.max_offset:
            return []
        scanned = islice(queue.scan(queue_offset, count_max * queue.entry_bytes) or (), count_max)
        return [(following, at, size, queue.tags_code(code)) for at, size, code, following, _ in scanned]

    def copy_record(self, physical_offset: int, size: int) -> bytes | None:
        """A copy of a record that leaves no page of the log mapped, or None where the log holds no such bytes."""
        return self._commit_log.copy(physical_offset, size)

    def query(self, topic: str, key: str, count_max: int, begin_ms: int, end_ms: int) -> KeyQuery:
        """Records that may have a key (``UNIQ_KEY``, a word of ``KEYS``, ``T#`` + tags), stored between two times.

        The index compares hashes: whoever shows the records compares their keys. Source: store.md §7.5.
        """
        self.dispatch()
        if self._index is None:
            return KeyQuery([])
        return self._index.query(topic, key, min(count_max, self._settings.query_count_max), begin_ms, end_ms)

    @property
    def topics(self) -> set[str]:
        """The topics that have queues."""
        return {topic for topic, _ in self._queues.table}

    def queue_ends(self) -> dict[tuple[str, int], int]:
        """One past the last message of every queue, by topic and queue id."""
        return {place: queue.max_offset for place, queue in self._queues.table.items()}

    def delete_topic(self, topic: str) -> None:
        """Delete the queues of a topic; its records stay in the log until their file expires."""
        self.dispatch()
        self._queues.delete_topic(topic)

    # ---- retention

    def retention_round(self) -> RetentionRound:
        """Look at disk use and age once and delete what need not be kept; puts are refused while a disk is full.

        Raises:
            OSError: a disk cannot be asked, or a file not be deleted; the next round goes on.
        """
        assert self._appender.is_open, "an open store has files to keep"
        self.dispatch()
        try:
            return self._retention.run(self._dispatcher.position)
        finally:
            self._appender.refusal = self._retention.refusal

    def request_retention(self) -> None:
        """Let the next 20 rounds delete expired files at any hour."""
        self._retention.request()


def _index_of(root: Path, settings: StoreSettings) -> MessageIndex | None:
    if not settings.message_index_enable:
        return None
    return MessageIndex(
        root / "index", settings.hash_slot_count, settings.index_entry_count, tags_as_keys=settings.index_tags
    )
