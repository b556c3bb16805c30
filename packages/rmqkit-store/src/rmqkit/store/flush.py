"""The flush threads, which make appended data durable (``GroupCommitService``, ``FlushRealTimeService``).

=============  =====================================  ===================================================
thread         when                                   action
=============  =====================================  ===================================================
store-flush    SYNC_FLUSH: after a `request`;         fdatasync of the log, ``durable_offset`` moves, one
               every flushIntervalCommitLog, if       ``on_durable`` call
               data (ASYNC_FLUSH: enough pages)
               is dirty
store-queues   every flushIntervalConsumeQueue        held entries are written; fdatasync of dirty queues and
                                                      full index files; in a thorough cycle the checkpoint
                                                      takes over the queues' time; checkpoint saved
=============  =====================================  ===================================================

The transient store pool exists under ASYNC_FLUSH only. With the pool, ``store-flush`` does the work of both threads,
and ``store-commit`` moves the content of the pool to the page cache every commitIntervalCommitLog. There are always two
threads.

One flush cycle covers every message that was appended before it began.

After a failed fdatasync, a later success proves nothing: the kernel may mark the dirty pages as clean, or drop them.
Therefore a failure is handled as follows:

==========================  ============================================================================================
failed                      consequence
==========================  ============================================================================================
the log                     ``failure`` is set: waiting answers fail, and the store accepts no messages. The next cycle,
                            at most a second later, checks that the page cache still holds every record, writes the
                            bytes again, and syncs them. If that succeeds, messages are accepted again
queues, index, checkpoint   ``behind`` is set; messages are accepted. The checkpoint does not move, and the next
                            cycle writes the bytes again
`BytesLost`                 the page cache lost bytes. ``failure`` stays, the threads stop, and the next start recovers
==========================  ============================================================================================

``abort`` remains after a stop if ``failure`` or ``behind`` is set. An unexpected exception in a thread is a failure,
too.
Source: store.md §13.
"""

from __future__ import annotations

import errno
import logging
import shlex
from collections.abc import Callable

from rmqkit.clock import Clock
from rmqkit.store.index.index import MessageIndex
from rmqkit.store.log.checkpoint import Checkpoint
from rmqkit.store.log.commit_log import CommitLog
from rmqkit.store.log.mapped_file import BytesLost
from rmqkit.store.log.recovery import whole_end
from rmqkit.store.queues.table import ConsumeQueues
from rmqkit.store.settings import FlushDiskType, StoreSettings
from rmqkit.system import threads

__all__ = ["Flusher"]

_log = logging.getLogger(__name__)
_PAGE_BYTES = 4096
_RETRY_MS = 1000


class Flusher:
    """The flush threads, the commit thread, and their progress.

    Args:
        dispatched_timestamp: returns the storeTimestamp of the newest record in the queues.
        dispatched_offset: returns the physical offset up to which the log is in the queues.
        on_durable: called from the flush thread after each cycle that flushed the log, was requested or follows a
            failure.
        on_committed: called from the commit thread when more of the log became readable.
        on_flushed: called after each flush of the log with its duration in ms, from the thread that flushed.
        note_queues: called when all queues are on the disk, before the checkpoint is updated.

    Attributes:
        durable_offset: physical offset up to which the log is known to be on the disk.
        failure: the error that stopped flushes of the log, or None.
        behind: the error that prevented a flush of queues, index or checkpoint in the last flush cycle, or None.
        commit_failure: the error of the last commit, or None; the next commit retries.
    """

    def __init__(
        self,
        log: CommitLog,
        queues: ConsumeQueues,
        index: MessageIndex | None,
        checkpoint: Checkpoint,
        settings: StoreSettings,
        clock: Clock,
        *,
        dispatched_timestamp: Callable[[], int],
        dispatched_offset: Callable[[], int],
        on_durable: Callable[[int, OSError | None], None] | None,
        on_committed: Callable[[], object] | None = None,
        on_flushed: Callable[[float], None] | None = None,
        note_queues: Callable[[], None] | None = None,
    ) -> None:
        self.durable_offset = 0
        self.failure: OSError | None = None
        self.behind: OSError | None = None
        self._is_final = False
        self._failed_at_ms = 0.0
        self.commit_failure: OSError | None = None
        self._store_log = log
        self._queues = queues
        self._index = index
        self._checkpoint = checkpoint
        self._settings = settings
        self._clock = clock
        self._dispatched_timestamp = dispatched_timestamp
        self._dispatched_offset = dispatched_offset
        self._on_durable = on_durable
        self._on_committed = on_committed
        self._on_flushed = on_flushed
        self._note_queues = note_queues
        self._is_sync = settings.flush_disk_type is FlushDiskType.SYNC_FLUSH
        self._queues_thorough_at = clock.monotonic_ms()
        self._is_requested = False
        self._requests: threads.Queue[bool] = threads.Queue()
        self._stop = threads.Event()
        self._failing = threads.Lock()
        self._flushing = threads.Lock()
        self._committing = threads.Lock()
        self._threads: list[threads.Thread] = []

    def start(self, durable_offset: int) -> None:
        """Start the threads. The log is on the disk up to ``durable_offset``."""
        self.durable_offset = durable_offset
        second = (
            ("store-queues", self._flush_queues) if self._store_log.pool is None else ("store-commit", self._commit)
        )
        for name, run in (("store-flush", self._flush_log), second):
            thread = threads.Thread(self._run, (run,), name=name)
            thread.start()
            self._threads.append(thread)

    def _run(self, rounds: Callable[[], None]) -> None:
        try:
            rounds()
        except Exception as error:  # noqa: BLE001 - the outer edge of a thread: without the thread nothing is flushed
            _log.exception("thread %s ends", threads.current_name())
            self._fail("the store", OSError(errno.EIO, repr(error)), is_final=True)
            self._report_durable()

    def request(self) -> None:
        """Request a flush cycle that covers everything appended before this call."""
        if not self._is_requested:
            self._is_requested = True
            self._requests.put(True)

    def request_again(self) -> None:
        """Request another flush cycle if the last failure was at least a second ago."""
        if self._clock.monotonic_ms() - self._failed_at_ms >= _RETRY_MS:
            self.request()

    def stop(self) -> None:
        """Stop the threads and flush everything."""
        self._stop.set()
        self._requests.put(False)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self.commit()
        self.flush_log()
        self._report_durable()

    # ---- the pool

    def _commit(self) -> None:
        thorough_at = self._clock.monotonic_ms()
        while not self._stop.wait(self._settings.commit_interval_ms / 1000):
            now = self._clock.monotonic_ms()
            is_thorough = now - thorough_at >= self._settings.commit_thorough_interval_ms
            if is_thorough:
                thorough_at = now
            self.commit(0 if is_thorough else self._settings.commit_least_pages * _PAGE_BYTES)

    def commit(self, least_bytes: int = 0) -> None:
        """Make the pool readable if it holds at least ``least_bytes``. Set ``commit_failure`` on an error.
        Any thread can call this."""
        try:
            with self._committing:
                is_moved = self._store_log.commit(least_bytes)
        except OSError as error:
            if self.commit_failure is None:
                _log.error("cannot write the log, so no messages are accepted until it can be written: %s", error)
            self.commit_failure = error
            return
        self.commit_failure = None
        if is_moved and self._on_committed is not None:
            self._on_committed()

    # ---- the log

    def _flush_log(self) -> None:
        thorough_at = queues_at = self._clock.monotonic_ms()
        while self._wait_for_round():
            now = self._clock.monotonic_ms()
            is_thorough = now - thorough_at >= self._settings.flush_thorough_interval_ms
            if is_thorough:
                thorough_at = now
            # Reset it before the end of the log is read: a put after that finds no request and requests another cycle.
            is_asked, self._is_requested = self._is_requested, False
            is_any = is_asked or is_thorough or self._is_sync
            least_bytes = 1 if is_any else max(1, self._settings.flush_least_pages * _PAGE_BYTES)
            had_failed = self.failure is not None
            if had_failed or self._store_log.committed_offset - self.durable_offset >= least_bytes:
                self.flush_log()
                is_asked = True
            if is_asked or had_failed:
                self._report_durable()
            if self._store_log.pool is not None and now - queues_at >= self._settings.queue_flush_interval_ms:
                queues_at = now
                self._queues_round(now)
            if self._is_final:
                return

    def _wait_for_round(self) -> bool:
        """Wait for a request or the end of the interval. Return False when the flusher stops."""
        interval_ms = self._settings.flush_interval_ms
        if self.failure is not None:  # without new messages nobody requests a cycle
            interval_ms = min(_RETRY_MS, interval_ms)
        try:
            self._requests.get(timeout=interval_ms / 1000)
        except threads.Empty:
            pass
        return not self._stop.is_set()

    def _report_durable(self) -> None:
        if self._on_durable is not None:
            self._on_durable(self.durable_offset, self.failure)

    def flush_log(self) -> None:
        """Make everything appended so far durable. Set ``failure`` on an error."""
        if self._is_final:
            return
        with self._flushing:
            timestamp = self._store_log.committed_timestamp  # read it first: the log sets its end first
            end = self._store_log.committed_offset
            began_ms = self._clock.monotonic_ms()
            try:
                if self._store_log.queue.refused():
                    self._check_log(end)
                self._store_log.queue.sync()
            except OSError as error:
                self._fail("commit log", error, is_final=isinstance(error, BytesLost))
                return
            if self.failure is not None:
                _log.warning("the commit log was flushed again up to %d: messages are accepted", end)
                self.failure = None
            # `cut_log` lowers durable_offset under the same lock, so here it can only grow.
            assert end >= self.durable_offset, "the durable offset never moves backwards"
            self.durable_offset = end
            if self._on_flushed is not None:
                self._on_flushed(self._clock.monotonic_ms() - began_ms)
        self._checkpoint.reach(physic=timestamp)

    def _check_log(self, end: int) -> None:
        """Check that the page cache still holds the log after the last successful flush.
        Raises BytesLost: the page cache lacks appended data.
        Raises OSError: a slave's log ends inside a record, which cannot be checked; its next connection cuts the record
        off."""
        found = whole_end(self._store_log, self._settings, self.durable_offset, end)
        path = self._store_log.queue.refused()[0].path
        if found is None:
            raise BytesLost(path)
        if found < end:
            raise OSError(errno.EIO, "the last record is incomplete", str(path))

    def cut_log(self, end: int) -> None:
        """Cut a replica's log at a physical offset. The lock excludes a concurrent flush, which would report later
        bytes as durable.
        Raises OSError: the log cannot be cut."""
        with self._flushing:
            assert end <= self._store_log.max_offset, "a log is cut at or before its end"
            self._checkpoint.before_cut(end)
            self._store_log.cut(end)
            self.durable_offset = min(end, self.durable_offset)

    # ---- the queues

    def _flush_queues(self) -> None:
        while not self._stop.wait(self._settings.queue_flush_interval_ms / 1000):
            self._queues_round(self._clock.monotonic_ms())
            if self._is_final:
                return

    def _queues_round(self, now: float) -> None:
        is_thorough = now - self._queues_thorough_at >= self._settings.queue_flush_thorough_interval_ms
        if is_thorough:
            self._queues_thorough_at = now
        self.flush_queues(0 if is_thorough else self._settings.queue_flush_least_pages * _PAGE_BYTES)

    def flush_queues(self, least_bytes: int = 0) -> None:
        """Flush each queue that has at least ``least_bytes`` to flush. With 0, flush all queues and update the
        checkpoint.
        """
        if self._is_final:
            return
        # Read these first: all entries up to this time and offset then exist, held or written.
        timestamp, offset = self._dispatched_timestamp(), min(self._dispatched_offset(), self.durable_offset)
        if not self._queues.write_held():
            return  # the checkpoint must not pass the held entries; the next cycle retries
        try:
            self._queues.sync(least_bytes)
            if self._index is not None:
                self._checkpoint.reach(index=self._index.sync_full(self.durable_offset))
            # The log must be durable first. Otherwise a queue on the disk may have messages that a crash removes from
            # the log. The index must be complete, because a recovery enters keys only from the checkpoint on.
            if least_bytes == 0 and self.failure is None and not (self._index is not None and self._index.is_behind):
                # Save the note first: recovery trusts the checkpoint and does not read the messages of these queues
                # again.
                if self._note_queues is not None:
                    self._note_queues()
                self._checkpoint.reach(logics=timestamp)
                self._checkpoint.logics_physical_offset = offset
            self._checkpoint.save()
        except OSError as error:
            self._postpone(error)
            return
        if self.behind is not None:
            _log.warning("consume queues, index and checkpoint are on the disk again")
            self.behind = None

    def _postpone(self, error: OSError) -> None:
        """Record an error that affects only derived files. The next cycle retries the flush."""
        if isinstance(error, BytesLost):
            self._fail("consume queues", error, is_final=True)
        if self.behind is None:
            said = "cannot flush %s, so a start after a crash takes longer; trying again: %s"
            _log.error(said, error.filename or "consume queues, index or checkpoint", error)
        self.behind = error

    def step_back(self, now_ms: int, before_ms: int = 0) -> None:
        """Lower the checkpoint's timestamps before the owner stores a record with an earlier storeTimestamp than the
        previous record. ``before_ms``: storeTimestamp of the previous record, if that record is not in the log yet.
        Raises OSError: the checkpoint cannot be saved."""
        self._checkpoint.step_back(max(before_ms, self._store_log.last_store_timestamp), now_ms)

    def flush_index(self) -> None:
        """Make the newest index file durable. The owner calls this at a clean stop only."""
        if self._index is None or self._is_final:
            return
        try:
            if not self._index.retry() or self._index.is_behind:
                raise self._index.failure or OSError(
                    errno.EIO, "messages wait for the index", str(self._index.directory)
                )
            self._index.sync(self.durable_offset)
        except OSError as error:
            self.behind = error
            root = shlex.quote(str(self._index.directory.parent))
            said = "index %s does not have the keys of all messages (%s); run: rmq store rebuild %s --index"
            _log.error(said, self._index.directory, error, root)

    def _fail(self, what: str, error: OSError, *, is_final: bool = False) -> None:
        with self._failing:
            was_reported, self._is_final = self.failure is not None and not is_final, self._is_final or is_final
            self.failure, self._failed_at_ms = error, self._clock.monotonic_ms()
        if was_reported:
            return
        remedy = "restart the broker, which recovers" if is_final else "the flush is retried until it succeeds"
        said = "flush of %s failed, errno %s %s: no message is accepted; %s"
        _log.critical(said, what, error.errno, error.strerror, remedy)
