"""The store of one broker: puts, reads and their files (``DefaultMessageStore``).

`MessageStore` combines the parts of a store: `put` appends and dispatches in one call, `reader` reads, and `flush`
makes the log durable. `open` checks, locks and recovers the directory. If `open` raises, the directory is unchanged.
`close` leaves the files as after a clean stop. Under SYNC_FLUSH a record is dispatched, and so becomes readable, when
it is on the disk; see `MessageStore.dispatch`.

A slave's store (``is_replica``) accepts no messages. It appends the bytes of its master's log and dispatches them
afterwards; see `rmqkit.store.replica`.

Use this module only in the owner thread of the store (the thread that called `open`), except ``on_durable``, which the
flush thread calls. Not handled here: topics, delay levels and transactions of a message (the broker rewrites it before
the put), and the connection between master and slave. Source: store.md §8, §10, §12.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import LogDiverged, RecordCorrupt, StoreError, StoreMismatch, StoreUnavailable
from rmqkit.protocol.names import is_light, split_lite_queue
from rmqkit.protocol.record import Record, decode_record, has_sound_body, is_blank, record_properties, record_topic
from rmqkit.store.dispatcher import Dispatcher, DispatchRequest, StoredSends, request_of
from rmqkit.store.files import StoreLock, check_room, make_directory, sync_directory, write_durably
from rmqkit.store.flush import Flusher
from rmqkit.store.index.file import keys_of
from rmqkit.store.index.index import KeyQuery, MessageIndex
from rmqkit.store.inner_message import InnerMessage, PutResult, PutStatus
from rmqkit.store.light import light_numbers
from rmqkit.store.lite.entries import LITE_ENTRY
from rmqkit.store.lite.lite_queues import LiteQueue, LiteQueues
from rmqkit.store.log.checkpoint import Checkpoint
from rmqkit.store.log.commit_log import CommitLog, LogStart
from rmqkit.store.log.mapped_file import BytesLost
from rmqkit.store.log.recovery import LogEnd, find_log_end
from rmqkit.store.log.remains import check_heads, is_filler, keep_remains, tell_lost_end
from rmqkit.store.log.scan import RECORD_BYTES_MIN, Records
from rmqkit.store.put import Appender
from rmqkit.store.queue_recovery import enter_lite, mend_after_crash, mend_queues, tell_odd_queues
from rmqkit.store.queues.base import ConsumeQueueBase
from rmqkit.store.queues.consume_queue import ConsumeQueue
from rmqkit.store.queues.queue_ends import QueueEnds
from rmqkit.store.queues.table import ConsumeQueues, DeletedTopics, whole
from rmqkit.store.reader import EntryTest, GetResult, GetStatus, Reader, may_return
from rmqkit.store.replica import IS_REPLICA, Replica, log_part
from rmqkit.store.retention import Retention, RetentionRound, used_percent
from rmqkit.store.settings import StoreSettings, parse_delay_levels
from rmqkit.system import disk, process

if TYPE_CHECKING:
    from rmqkit.store.bulk import DispatchColumns

__all__ = [
    "DispatchRequest",
    "GetResult",
    "GetStatus",
    "InnerMessage",
    "KeyQuery",
    "MessageStore",
    "OlderQueues",
    "PutResult",
    "PutStatus",
    "RetentionRound",
    "StoredSends",
]

_COMPARED_MAX = 4096
"""Maximum number of records that a query compares with its key. Many keys with the same hash must not block the
loop.
"""

_CATCH_UP_STEPS = 8
"""Number of steps in which the index catches up before a query: together less than 40 ms."""
_REQUESTED_BYTES = 1 << 20
_DELETED = (GetStatus.OFFSET_TOO_SMALL, GetStatus.MESSAGE_WAS_REMOVING)

_log = logging.getLogger(__name__)


class OlderQueues(Protocol):
    """The part of each queue that the log has deleted, but that can be fetched from another place."""

    def min_offset(self, topic: str, queue_id: int) -> int:
        """Return the offset of the first message of a queue, in the other place or in the log."""

    def has(self, topic: str, queue_id: int, queue_offset: int) -> bool:
        """Return True if a deleted message, or a later message of its queue, can be fetched. Return True if this is
        unknown.
        """


class MessageStore:
    """The store directory of one broker.

    Args:
        root: ``storePathRootDir``.
        is_batch_topic: returns True if a topic's queues are BatchConsumeQueues.
        on_arrival: called with messages that became readable, once per put or batch.
        bitmap_of: returns the filter bitmap of a record, or empty bytes, for the extension of its queue entry. It is
            called only with ``enableConsumeQueueExt``, including for records that recovery dispatches again in `open`.
            It must not raise.
        disk_used_percent: returns the use of the disk of a directory, in percent.
        on_durable: called from the flush thread after each cycle that flushed the log, was requested or follows a
            failure. Its arguments are the offset up to which the log is on the disk, and the error that stopped
            flushing or None. Under SYNC_FLUSH the owner then calls `dispatch`. On a slave the offset may be greater
            than the end of a log that was cut meanwhile: use `durable_offset` instead.
        on_committed: called from the commit thread when more of the log became readable; the owner then calls
            `dispatch`. It is called only with the transient store pool.
        on_flushed: called from the flush thread with the duration of each flush of the log, in ms.
        is_replica: whether the store belongs to a slave: it refuses puts, and `replica` appends to it.

    Attributes:
        log: the commit log. Only `Replica` and `put` append to it; every part can read it.
        queues: the consume queues by topic and queue id.
        lite: the light queues of lite topics.
        reader: reads the queues.
        retention: deletes old files; `retention_round` runs it.
        flusher: makes log and queues durable. A test can run its flush cycles by hand.
        kept_from: returns the physical offset from which on the log must be retained, regardless of age and disk use.
        older: the messages that the log has deleted and that can be fetched; None without an archive.
        put, put_run, put_sends, put_batch, prepare, put_long_batch, batch: the methods of `Appender`.
    """

    # Long: it creates the parts of a store in the order in which they need each other.
    def __init__(
        self,
        root: Path,
        settings: StoreSettings,
        *,
        clock: Clock = SYSTEM_CLOCK,
        is_batch_topic: Callable[[str], bool] = lambda topic: False,
        on_arrival: Callable[[Sequence[DispatchRequest]], None] | None = None,
        on_durable: Callable[[int, OSError | None], None] | None = None,
        on_committed: Callable[[], object] | None = None,
        on_flushed: Callable[[float], None] | None = None,
        bitmap_of: Callable[[DispatchRequest], bytes] | None = None,
        disk_used_percent: Callable[[Path], int] = used_percent,
        is_replica: bool = False,
    ) -> None:
        self.root = root
        self._settings = settings
        self._delays_ms = parse_delay_levels(settings.message_delay_level)
        self._lock = StoreLock(root)
        self.log = CommitLog(root, settings, is_replica=is_replica)
        self.queues = ConsumeQueues(root, settings, is_batch_topic)
        self._deleted = DeletedTopics(root, self.log)
        self.queues.deleted_ends = self._deleted.ends
        lite_file_bytes = whole(settings.lite_queue_file_bytes, LITE_ENTRY.size)
        self.lite = LiteQueues(root, self.log, lite_file_bytes, self.queues.dirty, self._deleted.ends)
        self._start = LogStart(root, self.log, is_replica=is_replica)
        self._ends = QueueEnds(root, self.log, is_replica=is_replica)
        self._index = _index_of(root, settings)
        self._checkpoint = Checkpoint(root / "checkpoint")
        self._dispatcher = Dispatcher(
            self.queues,
            on_arrival,
            self._index,
            bitmap_of if settings.enable_consume_queue_ext else None,
            has_light=settings.enable_light_queues and settings.enable_multi_dispatch,
            lite=self.lite,
            read_log=self._requests,
        )
        self.reader = Reader(self.log, settings)
        self.flusher = Flusher(
            self.log,
            self.queues,
            self._index,
            self._checkpoint,
            settings,
            clock,
            dispatched_timestamp=lambda: self._dispatcher.dispatched_timestamp,
            dispatched_offset=lambda: self._dispatcher.position,
            on_durable=on_durable,
            on_committed=on_committed,
            on_flushed=on_flushed,
            note_queues=lambda: self._ends.note_new(self.queues, self._flush_log),
        )
        self._appender = appender = Appender(
            self.log, self.queues, self._dispatcher, self.flusher, settings, clock, self.lite
        )
        self.put, self.put_run, self.put_batch = appender.put, appender.put_run, appender.put_batch
        self.put_sends = appender.put_sends
        self.prepare, self.put_long_batch, self.batch = appender.prepare, appender.put_long_batch, appender.batch
        self.retention = Retention(
            root,
            self.log,
            self.queues,
            self._index,
            settings,
            clock,
            disk_used_percent,
            note_start=self._start.note,
        )
        self._lite_folders: list[str] = []
        self._gap_max = 0  # maximum number of messages missing in a queue, according to the fillers of the log
        self._odd_count = 0  # additional missing messages: records that seem to be in a wrong queue
        self.kept_from: Callable[[], int] = lambda: self._dispatcher.position
        self.older: OlderQueues | None = None
        self._replica: Replica | None = None
        if is_replica:
            self._replica = Replica(
                self.log, self._dispatcher, self.flusher, settings, self._dispatch_run, self._start.note
            )
            self._appender.refusal = IS_REPLICA

    # ---- facts

    @property
    def durable_offset(self) -> int:
        """Physical offset up to which the log is on the disk."""
        return self.flusher.durable_offset

    @property
    def max_physical_offset(self) -> int:
        """Physical offset one past the last byte of the log."""
        return self.log.max_offset

    @property
    def min_physical_offset(self) -> int:
        """Physical offset of the oldest byte of the log, -1 while there is no file."""
        return self.log.min_offset

    @property
    def dispatched_offset(self) -> int:
        """Physical offset up to which messages are readable."""
        return self._dispatcher.position

    @property
    def failure(self) -> OSError | None:
        """The error that made the store refuse messages, if any."""
        return self.flusher.failure or self.flusher.commit_failure or self._dispatcher.failure

    @property
    def is_writable(self) -> bool:
        return self._appender.is_open and self.failure is None and not self._appender.refusal

    # ---- opening and closing

    def open(self) -> None:
        """Lock, load and recover the directory, and start flushing.
        Raises StoreLocked: another broker uses the directory.
        Raises StoreMismatch: the file sizes do not match the settings, or a file is not a store file.
        Raises StoreError: the directory cannot be read or created. All these errors leave the directory unchanged.
        Raises StoreDamaged: recovery would cut off valid records. Nothing in the log was changed."""
        assert not self._appender.is_open, "a store that is opened is closed"
        try:
            # Check before creating anything: a wrong storePathRootDir must not leave a lock file or a directory there.
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
        """Check everything that `open` relies on, without changing it."""
        if disk.exists(self.root) and not disk.is_directory(self.root):
            raise StoreMismatch(f"{self.root} is a file: give a directory as storePathRootDir")
        for directory in sorted({self.root, *self.log.queue.directories}):
            check_room(directory)
        self.log.queue.check()
        self.queues.check(clean=not disk.exists(self._abort_path))
        self.lite.check(clean=not disk.exists(self._abort_path))
        if self._index is not None:
            self._index.check()

    def _load_and_recover(self) -> None:
        # The note reveals a kill even if `abort` is missing. (Apache's broker does not update the note. After a clean
        # stop of Apache's broker the recovery takes longer than needed and finds nothing.)
        is_clean = not self._ends.read() and not disk.exists(self._abort_path)
        self.log.queue.load()
        self._deleted.load()
        self.queues.load()
        self.lite.load()
        self._checkpoint.load()
        if self._index is not None:
            log_start = max(0, self.log.min_offset)
            timestamp = self._checkpoint.index_timestamp
            self._index.load(
                clean=is_clean, durable_timestamp=timestamp, log_start=log_start, stored_at=self._stored_at
            )
        if not is_clean:
            _log.warning("store %s was not closed cleanly: recovering", self.root)
        # Write `abort` after the recovery, so that a refused or killed start leaves a clean store clean. Write it
        # before any other file, because a kill from now on must be detected.
        end = self._recover(is_clean)
        write_durably(self._abort_path, str(process.number()).encode())
        self._start.renew()
        self._ends.renew(self.queues)
        self.log.resume()
        # Check records of an earlier process before they are returned. Records of this process are in the page cache.
        self._dispatcher.position = self.reader.doubted_end = self.log.max_offset
        if self._replica is not None:
            self._replica.resume(end.last_record if end.record_count else None)
        self.queues.hold_entries()
        self.lite.entries.hold_entries()
        if self._index is not None:
            self._index.may_fall_behind = True
        self.flusher.start(self.log.max_offset)

    def _stored_at(self, physical_offset: int) -> int | None:
        """Return the storeTimestamp of the record at an offset, or None if no record begins there."""
        file = self.log.queue.find(physical_offset)
        try:
            record = None if file is None else decode_record(file.view, physical_offset - file.start)
        except RecordCorrupt:
            return None
        return record.store_timestamp if record is not None and record.physical_offset == physical_offset else None

    def _flush_log(self) -> bool:
        """Flush the log. Return True if the flush succeeded."""
        self.flusher.flush_log()
        return self.flusher.failure is None

    @property
    def _abort_path(self) -> Path:
        return self.root / "abort"

    # Long: each step of a recovery needs the step before it.
    def _recover(self, is_clean: bool) -> LogEnd:
        """Find the end of the log and make the queues agree with it. Source: store.md §12."""
        log, queues = self.log, self.queues
        if is_clean:
            log.queue.mark_synced()
            queues.mark_synced()
        else:
            self._checkpoint.before_cut(0)  # the recovery truncates queues and writes them again
        self._start.compare()
        check_heads(self.root, log.queue.files, is_replica=self._replica is not None)
        self._ends.load(clean=is_clean)
        newest = queues.recover(clean=is_clean, take=self._ends.take)
        self.lite.recover(clean=is_clean)
        if not log.queue.files:
            # The entries refer to a log that is gone. If they stayed, pulls would return the records of new messages.
            self._checkpoint.before_cut(0)
            queues.destroy_all()
            self.lite.destroy_all()
            queues.sync_all()
            return LogEnd(0)
        indexed_end = sum(newest)
        if is_clean:
            enter = self._dispatcher.without_index()
            if mend_queues(self.root, log, queues, self._ends, enter, self._delays_ms):
                newest = max((queue.recovered_record for queue in queues), default=newest)
        self._ends.set_numbers(queues)
        known = set(queues.table)
        end = find_log_end(
            log,
            self._settings,
            self._dispatch_again,
            self._enter_run,
            on_replay=self._truncate_for_replay,
            clean=is_clean,
            newest=newest,
            indexed_end=indexed_end,
            checkpoint=self._checkpoint,
        )
        if end.remains is None:
            tell_lost_end(self.root, end.offset, indexed_end, is_clean=is_clean)
        else:
            keep_remains(
                self.root,
                end.remains,
                is_clean=is_clean,
                is_replica=self._replica is not None,
                last_timestamp=end.last_store_timestamp,
                flushed_timestamp=self._checkpoint.physic_timestamp,
                indexed_end=indexed_end,
            )
        self._checkpoint.before_cut(end.offset)
        # Cut derived files first and the log last: after a kill in between, the next start finds the same end.
        self._deleted.cut(end.offset)
        queues.truncate_physical(end.offset)
        self.lite.truncate_physical(end.offset)
        log.queue.truncate(end.offset)
        if not is_clean:
            enter, gap_max = self._dispatcher.without_index(), self._gap_max + self._odd_count
            mend_after_crash(self.root, log, queues, self._ends, enter, self._delays_ms, gap_max=gap_max)
            tell_odd_queues(self.root, queues, known, log_start=log.min_offset)
        log.last_store_timestamp = end.last_store_timestamp
        self._checkpoint.confirm_physical_offset = end.last_record
        # The clock was set back. Without this step, later records would count as flushed too early.
        if end.newest_store_timestamp > end.last_store_timestamp:
            self._checkpoint.step_back(end.newest_store_timestamp, end.last_store_timestamp)
        if not is_clean:
            log.queue.write_again(end.certain)
        log.queue.sync()  # after a clean stop this syncs only the cut: reappearing bytes would look like records
        self._complete_lite()
        self.lite.finish_recovery(self._deleted.ends)
        self.lite.entries.sync()
        self.lite.note_end()
        queues.sync_all()  # first: a synced queue can be read and closed again without a wait
        queues.finish_recovery(log.min_offset)
        self._checkpoint.logics_physical_offset = end.offset
        self._checkpoint.save()
        _log.info("store %s: log from %d to %d, %d queues", self.root, log.min_offset, end.offset, len(queues))
        return end

    def _truncate_for_replay(self, start: int) -> None:
        self.queues.truncate_for_replay(start, self.log.min_offset, self._is_record)
        self.lite.truncate_for_replay(start)

    def _complete_lite(self) -> None:
        """Enter the messages of lite topics whose entries are missing, or that only the folders of Apache's broker
        know, and stop using these folders. A clean stop removes them."""
        folders = [topic for topic, _ in self.queues.table if split_lite_queue(topic)]
        if folders:
            _log.info("store %s: taking over %d light queues of lite topics", self.root, len(folders))
        if self.lite.lacks_entries:
            _log.warning("store %s: queue entries of lite topics are missing: entering them from the log", self.root)
            self.lite.destroy_entries()
        elif not folders:
            return
        start = max(0, self.log.min_offset, self.lite.entries.max_physical_offset)
        enter_lite(self.log, start, self.queues, self._dispatcher.without_index(), self._delays_ms)
        queues = [self.queues.table.pop((topic, 0)) for topic in folders]
        self.lite.take_over({queue.topic: max(queue.max_offset, queue.next_offset) for queue in queues})
        self._lite_folders = folders

    def _is_record(self, queue: ConsumeQueueBase, index: int, entry: tuple[Any, ...]) -> bool:
        """Return True if the log holds the record of a queue entry, or held the record before retention deleted it."""
        physical_offset, size = entry[:2]
        if physical_offset < self.min_physical_offset:
            return True
        try:
            record = decode_record(self.log.slice(physical_offset, size) or b"")
        except RecordCorrupt:
            return False
        if record.physical_offset != physical_offset:
            return False
        is_own = (record.topic, record.queue_id) == (queue.topic, queue.queue_id)
        return is_own or (is_light(queue.topic) and queue.topic in light_numbers(record.topic, record.properties))

    def _dispatch_again(self, record: Record) -> None:
        """Dispatch one record during a recovery."""
        queue = self.queues.get(record.topic, record.queue_id)
        if is_filler(record):
            self._gap_max += record.prepared_transaction_offset // RECORD_BYTES_MIN
        elif queue is None:
            # A new queue begins with a number after 0: damage in a topic or queue id put this record here. The record
            # is missing from its real queue.
            self._odd_count += record.queue_offset > 0
        elif (gap_max := self._gap_max + self._gaps_of_odd) and isinstance(queue, ConsumeQueue):
            queue.fill_gap(record.queue_offset, record.physical_offset, gap_max)
        self._dispatcher.apply(request_of(record, self._delays_ms))

    @property
    def _gaps_of_odd(self) -> int:
        """Maximum number of missing messages that odd records explain. It is 0 while the end of the log is replayed: a
        queue may then lack earlier messages of the log, and `mend_after_crash` scans the whole log for them.
        """
        return 0 if self.queues.is_replaying else self._odd_count

    def _dispatch_run(self, run: Records) -> list[DispatchRequest]:
        """Enter a run of records on a slave. Return the newest record of each queue and tag code."""
        arrivals, newest_light = self._enter_run(run)
        return arrivals.newest(self._delays_ms) + newest_light

    def _enter_run(self, run: Records) -> tuple[DispatchColumns, list[DispatchRequest]]:
        """Enter a run of records. Return its columns, and the newest record of each light queue."""
        from rmqkit.store.bulk import BulkDispatcher, DispatchColumns

        queues_only = self._dispatcher.without_index()
        has_light = self._dispatcher.has_light
        bulk = BulkDispatcher(self.queues, self._index, queues_only, self._delays_ms, has_light=has_light)
        arrivals = DispatchColumns(run)
        self._odd_count += sum(
            self.queues.get(topic, queue_id) is None and bool(arrivals.queue_offsets[rows[0]] > 0)
            for topic, queue_id, rows in arrivals.groups()
        )
        bulk.gap_max = self._gap_max + self._gaps_of_odd
        newest_light = bulk.enter(arrivals)
        self._gap_max = bulk.gap_max - self._gaps_of_odd
        self._dispatcher.dispatched_timestamp = int(arrivals.store_timestamps[-1])
        return arrivals, newest_light

    def close(self) -> None:
        """Flush everything and leave the directory as after a clean stop. Do nothing if the store is closed.
        After a failed flush ``abort`` remains, so that the next start recovers. Source: store.md §10."""
        if not self._appender.is_open:
            return
        self._appender.is_open = False
        is_whole = self._ends_whole()
        self.flusher.stop()
        with suppress(LogDiverged):  # the invalid bytes are cut off, and the master sends them again
            while self._dispatch():
                pass
        # `stop` has flushed the log. Without this order, a power cut could leave entries without their records.
        self.flusher.flush_queues()
        while self._dispatcher.catch_up(is_paced=False):
            pass
        self.flusher.flush_index()
        is_flushed = self.failure is None and self.flusher.behind is None
        is_complete = is_whole and is_flushed and not self._dispatcher.pending and self.queues.write_held()
        if is_complete:
            self._ends.save(self.queues)
        self._close_files(is_complete=is_complete)
        if is_complete:
            self.queues.remove_folders(self._lite_folders)
            try:
                disk.remove(self._abort_path, missing_ok=True)
                sync_directory(self.root)
            except OSError as error:
                _log.error("%s cannot be removed, so the next start recovers: %s", self._abort_path, error)
        self._lock.release()

    def _ends_whole(self) -> bool:
        """Return True if the log ends with a complete record. On a slave, cut off an incomplete record first."""
        try:
            if self._replica is not None:
                self._replica.cut_torn_tail()
        except OSError as error:
            _log.error("store %s: cannot cut off an incomplete last record: %s", self.root, error)
            return False
        return True

    def _close_files(self, *, is_complete: bool = False) -> None:
        try:
            self.lite.close(is_complete=is_complete)
        except OSError as error:
            _log.error("store %s: the journal of lite topics is not written, the log replaces it: %s", self.root, error)
        self.retention.close()
        self.log.close()
        self.queues.close()
        if self._index is not None:
            self._index.close()

    # ---- putting: `put` and the other put methods are methods of `Appender`

    @property
    def properties_bytes_max(self) -> int:
        """Maximum length of a property string that a put accepts."""
        return self._appender.properties_bytes_max

    def request_flush(self) -> None:
        """Request a flush cycle that covers everything put so far. The call costs little if a request is already
        pending."""
        self.flusher.request()

    def flush_log(self) -> bool:
        """Make everything put so far durable. Return False if the disk refuses. Any thread can call this. Messages in
        the transient store pool are not readable yet, and are not flushed."""
        end = self.log.committed_offset
        if self.durable_offset < end:
            self.flusher.flush_log()
        return self.durable_offset >= end

    def dispatch(self) -> bool:
        """Make messages readable: the durable messages under SYNC_FLUSH, otherwise the committed messages.
        The owner calls it after ``on_durable`` (SYNC_FLUSH) or ``on_committed``. Reads call it, too. It has no effect
        on a closed store, because callbacks may arrive late.

        A slave's owner also calls it after an append, when its connection has nothing more to read or a MiB is pending
        (`dispatch_behind_bytes`): dispatching a large run takes a tenth of the time of dispatching its records one by
        one. A call takes a few milliseconds at most. It returns True if more can be dispatched immediately; the owner
        then calls it again.

        Raises:
            LogDiverged: a slave's log held bytes that are not a record, and was cut there. The error is raised once,
                see `Replica.divergence`.
        """
        return self._appender.is_open and (self._dispatch() or self._dispatcher.catch_up())

    def _catch_up(self) -> None:
        """Let the index catch up for some milliseconds, even if no message arrived since a write of its files
        failed.
        """
        self._dispatcher.catch_up(is_paced=False)
        for _ in range(_CATCH_UP_STEPS):
            if not self._dispatcher.catch_up():
                break

    def _dispatch_for_read(self) -> None:
        """Dispatch like `dispatch`, but without parts of long batches: many reads of one loop tick would dispatch all
        parts.
        """
        if not self._dispatcher.has_part_next:
            self.dispatch()

    def _requests(self, start: int, end: int, count_max: int) -> tuple[list[DispatchRequest], int]:
        """Return up to ``count_max`` dispatched records from a physical offset on, and the physical end of the last
        record."""
        at, found = max(start, self.log.min_offset), list[DispatchRequest]()
        end = min(end, at + _REQUESTED_BYTES)
        while at < end and len(found) < count_max and (file := self.log.queue.find(at)) is not None:
            try:
                if is_blank(file.view, at - file.start):
                    at = file.end
                    continue
                found.append(request_of(decode_record(file.view, at - file.start), self._delays_ms))
            except RecordCorrupt as error:
                _log.error("record at %d cannot be read, the rest of its file gets no keys: %s", at, error.reason)
                at = file.end
                continue
            at += found[-1].size
        return found, max(at, start)

    def _dispatch(self) -> bool:
        if self._replica is not None:
            return self._replica.dispatch()
        return self._appender.dispatch()

    # ---- replication

    @property
    def dispatch_behind_bytes(self) -> int:
        """Number of bytes at the end of the log that are not dispatched."""
        return max(0, self.log.max_offset - self._dispatcher.position)

    def log_part(self, physical_offset: int, size_max: int) -> memoryview:
        """Return up to ``size_max`` dispatched bytes of the log from an offset on, for a slave. The bytes are in one
        file. They are empty if nothing is dispatched after the offset. The memory is not copied and stays valid.

        Raises:
            StoreError: the offset was deleted, or is greater than the end of the log.
        """
        return log_part(self.log, self._dispatcher.position, physical_offset, size_max)

    def file_start(self, physical_offset: int) -> int:
        """Return the start of the log file that contains, or will contain, an offset. A slave with an empty log
        receives the bytes from ``file_start(dispatched_offset)`` on."""
        return physical_offset - physical_offset % self._settings.commit_log_file_bytes

    @property
    def file_starts(self) -> list[int]:
        """Physical offsets at which the log's files begin, oldest first. Each file that is not empty begins with a
        record.
        """
        return [file.start for file in self.log.queue.files]

    @property
    def replica(self) -> Replica:
        """The `Replica` that appends to a slave's store."""
        assert self._replica is not None, "only a slave's store has a replica"
        return self._replica

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
        joins: bool = False,
    ) -> GetResult:
        """Read messages from an offset on. The status is NOT_IN_LOG if the log has deleted the message and `older` has
        it, or may have it. Source: store.md §16.1.

        Args:
            codes: tag codes (i32) to accept, None for all.
            accept: an additional filter for the stored record.
            accept_entry: an additional filter for the queue entry, applied before the record is accessed.
            joins: whether records can be joined into fewer pieces.
        """
        queue = self._readable(topic, queue_id)
        if queue is None:
            return GetResult(GetStatus.NO_MESSAGE_IN_QUEUE, 0, 0, 0)
        if self.flusher.failure is not None:  # the system may have dropped bytes of this process, too
            self.reader.doubted_end = self.log.max_offset
        found = self.reader.get(queue, queue_offset, count_max, codes, accept, accept_entry, joins=joins)
        if self.older is not None:
            found.min_offset = self.older.min_offset(topic, queue_id)
            if found.status in _DELETED and self.older.has(topic, queue_id, queue_offset):
                found.status = GetStatus.NOT_IN_LOG
        return found

    def is_older(self, topic: str, queue_id: int, queue_offset: int) -> bool:
        """Return True if the log has deleted a message, and `older` has it or may have it."""
        older = self.older
        return (
            older is not None
            and queue_offset < self.min_offset(topic, queue_id)
            and older.has(topic, queue_id, queue_offset)
        )

    def _readable(self, topic: str, queue_id: int) -> ConsumeQueueBase | LiteQueue | None:
        # Dispatch the puts of an open batch() first: a read returns every earlier put, even while a batch is open.
        if self._dispatcher.pending:
            self._dispatch_for_read()
        found = self.queues.table.get((topic, queue_id))
        return self.lite.queue(topic, queue_id) if found is None and is_light(topic) else found

    def max_offset(self, topic: str, queue_id: int) -> int:
        """Return one past the offset of the last readable message, or 0 for an unknown queue."""
        queue = self._readable(topic, queue_id)
        return 0 if queue is None else queue.max_offset

    def max_offsets(self, topic: str, queue_ids: Iterable[int]) -> list[int]:
        """Return the `max_offset` of several queues of a topic."""
        if self._dispatcher.pending:
            self._dispatch_for_read()
        table = self.queues.table
        return [
            self.max_offset(topic, one) if (q := table.get((topic, one))) is None else q.max_offset for one in queue_ids
        ]

    def min_offset(self, topic: str, queue_id: int) -> int:
        """Return the offset of the first readable message, or 0 for an unknown queue."""
        queue = self._readable(topic, queue_id)
        return 0 if queue is None else queue.min_offset

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Return `min_offset` and `max_offset`."""
        queue = self._readable(topic, queue_id)
        return (0, 0) if queue is None else (queue.min_offset, queue.max_offset)

    def earliest_store_time(self, topic: str, queue_id: int) -> int:
        """Return the storeTimestamp of the first readable message, or -1 if there is no message."""
        return self.store_time_at(topic, queue_id, self.min_offset(topic, queue_id))

    def store_time_at(self, topic: str, queue_id: int, queue_offset: int) -> int:
        """Return the storeTimestamp of a message, or -1 if there is no message at the offset."""
        queue = self._readable(topic, queue_id)
        return -1 if queue is None else self.reader.store_time_at(queue, queue_offset)

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int, *, upper: bool = False) -> int:
        """Return the offset of the first message stored at or after a time. With ``upper``, return the offset of the
        last message stored at or before the time. Return 0 for an unknown queue."""
        queue = self._readable(topic, queue_id)
        return 0 if queue is None else self.reader.offset_by_time(queue, timestamp_ms, upper=upper)

    def is_in_memory(self, topic: str, queue_id: int, queue_offset: int) -> bool:
        """Return True if a message exists and is so near the end of the log that it counts as cached."""
        queue = self._readable(topic, queue_id)
        return queue is not None and self.reader.is_in_memory(queue, queue_offset)

    @property
    def checks_bodies(self) -> bool:
        """Return True if records are compared with their CRC before they are stored again (``checkCRCOnRecover``).
        A copy gets a new CRC, which would hide a change of the body on the disk."""
        return self._settings.check_crc_on_recover

    def entries(
        self, topic: str, queue_id: int, queue_offset: int, *, count_max: int
    ) -> list[tuple[int, int, int, int | None]]:
        """Return entries of a queue from an offset on, within one of its files.
        Each entry has the next queue offset, physicalOffset, size and tag code. The code is None if its extension unit
        is missing. Return an empty list for an offset outside of the queue, and for an entry that a failed flush may
        have damaged: it may be sound again after a restart."""
        queue = self._readable(topic, queue_id)
        if queue is None or not queue.min_offset <= queue_offset < queue.max_offset:
            return []
        scanned = list(islice(queue.scan(queue_offset, count_max * queue.entry_bytes) or (), count_max))
        if any(entry[1] <= 0 for entry in scanned) and may_return(queue):
            scanned = list(takewhile(lambda entry: entry[1] > 0, scanned))
        return [(following, at, size, queue.tags_code(code)) for at, size, code, following, _ in scanned]

    def query(self, topic: str, key: str, count_max: int, begin_ms: int, end_ms: int) -> KeyQuery:
        """Return the records that have a key (``UNIQ_KEY``, a word of ``KEYS``, ``T#`` + tags) and were stored between
        two times.
        The index has only hashes of 31 bits, and keys of other topics may have the same hash. So the topic (or the name
        of a light queue) and the key are compared with each record. Source: store.md §7.5."""
        self.dispatch()
        if self._index is None:
            return KeyQuery([])
        left = _COMPARED_MAX

        def accept(physical_offset: int) -> bool:
            nonlocal left
            left -= 1
            record = self.log.record_at(physical_offset) if left >= 0 else None
            if record is None or not _has_key(record, topic, key):
                return False
            return physical_offset >= self.reader.doubted_end or self._is_unchanged(record, physical_offset, key)

        count_max = min(count_max, self._settings.query_count_max)
        self._catch_up()
        found = self._index.query(topic, key, count_max, begin_ms, end_ms, accept)
        if self._index.is_behind and not found.physical_offsets:
            # The message may be stored: "not found" would be a wrong answer.
            raise StoreUnavailable(f"the index is behind the log, so key {key} is not known: {self._index.failure}")
        return found

    def _is_unchanged(self, record: memoryview, physical_offset: int, key: str) -> bool:
        """Return True if a record that was written before the start has its original body. Log an error if it was
        changed.
        """
        is_unchanged = not self.checks_bodies or has_sound_body(record)
        if not is_unchanged:
            _log.error("the message at %d is left out of a query for %s: its body was changed", physical_offset, key)
        return is_unchanged

    @property
    def topics(self) -> set[str]:
        return {topic for topic, _ in self.queues.table}

    def queue_ends(self) -> dict[tuple[str, int], int]:
        """Return the end of every queue by topic and queue id: one past the offset of its last message."""
        return {place: queue.max_offset for place, queue in self.queues.table.items()}

    def delete_topic(self, *topics: str) -> None:
        """Delete the queues of topics. Their records stay in the log until the log files expire, see `DeletedTopics`.
        Raises StoreUnavailable: a write or a flush failed, or queues lost entries; nothing is deleted."""
        self.dispatch()
        try:
            places = {topic: self.queues.newest_record(topic) for topic in topics}
        except BytesLost as error:
            raise StoreUnavailable(f"cannot delete queues: {error}: restart the broker, which recovers") from error
        times = {topic: self.log.store_timestamp(*place) for topic, place in places.items()}
        newest = {topic: (*places[topic], time) for topic, time in times.items() if time >= 0}
        for _, waiting in self._dispatcher.pending:
            for one in waiting:
                if one.topic in topics:
                    newest[one.topic] = one.physical_offset, one.size, one.store_timestamp
        # The note names the newest records. If a crash removed one of them, the note would not be valid, and the older
        # records would be in the queues again.
        self._flush_to(max((at + size for at, size, _ in newest.values()), default=0))
        # Write the note first: without it, the next recovery restores the queues with the old messages.
        self._deleted.add(newest)
        for topic in topics:
            self.queues.delete_topic(topic)
            self.lite.delete_parent(topic)

    def _flush_to(self, end: int) -> None:
        """Make the log durable up to a physical offset. Raises StoreUnavailable: the disk refused."""
        if end > self.durable_offset:
            self.flusher.commit()
            self.flusher.flush_log()
        if end > self.durable_offset:
            refused = self.flusher.commit_failure or self.flusher.failure
            raise StoreUnavailable(
                f"cannot flush the log of {self.root} up to {end}: {refused}: free or repair the disk"
            )

    # ---- retention

    def retention_round(self) -> RetentionRound:
        """Measure disk use and age, and delete expired files. Puts are refused while a disk is full.
        Raises OSError: a disk cannot be measured, or a file cannot be deleted; the next call continues."""
        assert self._appender.is_open, "the store is open"
        self.dispatch()
        self._catch_up()
        try:
            done = self.retention.run(min(self._dispatcher.position, self.kept_from()))
            self.lite.drop_expired(self.log.min_offset)
            self.lite.save()
            return done
        finally:
            self._appender.refusal = self.retention.refusal if self._replica is None else IS_REPLICA


def _index_of(root: Path, settings: StoreSettings) -> MessageIndex | None:
    if not settings.message_index_enable:
        return None
    return MessageIndex(
        root / "index", settings.hash_slot_count, settings.index_entry_count, tags_as_keys=settings.index_tags
    )


def _has_key(record: memoryview, topic: str, key: str) -> bool:
    """Return True if a record has a key, and belongs to the topic or to the light queue with that name."""
    named, properties = record_topic(record).decode("utf-8", "replace"), record_properties(record)
    return (named == topic or topic in light_numbers(named, properties)) and key in keys_of(properties)
