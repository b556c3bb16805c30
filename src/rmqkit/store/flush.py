"""The flush threads: what was appended becomes durable (``GroupCommitService``, ``FlushRealTimeService``).

=============  =====================================  ===================================================
thread         when                                   then
=============  =====================================  ===================================================
store-flush    SYNC_FLUSH: asked by `request`;        fdatasync of the log, ``durable_offset`` moves, one
               every flushIntervalCommitLog, when     ``on_durable`` call
               something (ASYNC_FLUSH: enough pages)
               is dirty
store-queues   every flushIntervalConsumeQueue        held entries are written; fdatasync of dirty queues and
                                                      full index files; in a thorough round the checkpoint
                                                      takes over the queues' time; checkpoint saved
=============  =====================================  ===================================================

With the transient store pool, which there is under ASYNC_FLUSH only, ``store-flush`` does the work of both, and
``store-commit`` moves what waits in the pool to the page cache every commitIntervalCommitLog: two threads in any case.

One round covers every message appended before it began, however many wait. A refused fdatasync is final: the kernel may
have dropped the dirty pages, so a later success would prove nothing. ``failure`` is set, the threads end, the store
takes no more messages, and ``abort`` stays for the next start; so it is when a thread ends otherwise.
Source: store.md §13.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
from collections.abc import Callable

from rmqkit.clock import Clock
from rmqkit.store.index.index import MessageIndex
from rmqkit.store.log.checkpoint import Checkpoint
from rmqkit.store.log.commit_log import CommitLog
from rmqkit.store.queues.table import ConsumeQueues
from rmqkit.store.settings import FlushDiskType, StoreSettings

__all__ = ["Flusher"]

_log = logging.getLogger(__name__)
_PAGE_BYTES = 4096


class Flusher:
    """Both threads and what they reached.

    Args:
        dispatched_timestamp: returns the storeTimestamp of the newest record in the queues.
        dispatched_offset: returns the physical offset up to which the queues have the log.
        on_durable: called from the flush thread at the end of every round.
        on_committed: called from the commit thread when more of the log became readable.
        on_flushed: told after each flush of the log how many ms it took; from the thread that made it.
        note_queues: called when all queues are on the disk, before the checkpoint says so.

    Attributes:
        durable_offset: physical offset up to which the log is known to be on the disk.
        failure: the error of the first fdatasync that was refused.
        commit_failure: why the last commit was refused, or None; the next one tries again.
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
        self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._failing = threading.Lock()
        self._flushing = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self, durable_offset: int) -> None:
        """Start the threads; the log is on the disk up to ``durable_offset``."""
        self.durable_offset = durable_offset
        second = (
            ("store-queues", self._flush_queues) if self._store_log.pool is None else ("store-commit", self._commit)
        )
        for name, run in (("store-flush", self._flush_log), second):
            thread = threading.Thread(target=self._run, args=(run,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _run(self, rounds: Callable[[], None]) -> None:
        try:
            rounds()
        except Exception as error:  # noqa: BLE001 - a thread's outer edge: without it nothing is flushed any more
            _log.exception("thread %s ends", threading.current_thread().name)
            self._fail("the store", OSError(errno.EIO, repr(error)))
            self._report_durable()

    def request(self) -> None:
        """Ask for a round that covers everything appended before this call."""
        if not self._is_requested:
            self._is_requested = True
            self._requests.put(True)

    def stop(self) -> None:
        """End the threads after a last round for everything."""
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
        """Make readable what waits in the pool, if it is so many bytes; sets ``commit_failure`` when refused."""
        try:
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
            # Before the log's end is read: a put that comes behind it finds no request and asks for another round.
            is_asked, self._is_requested = self._is_requested, False
            is_any = is_asked or is_thorough or self._is_sync
            least_bytes = 1 if is_any else max(1, self._settings.flush_least_pages * _PAGE_BYTES)
            if self._store_log.committed_offset - self.durable_offset >= least_bytes:
                self.flush_log()
                is_asked = True
            if is_asked or self.failure is not None:
                self._report_durable()
            if self._store_log.pool is not None and now - queues_at >= self._settings.queue_flush_interval_ms:
                queues_at = now
                self._queues_round(now)
            if self.failure is not None:
                return

    def _wait_for_round(self) -> bool:
        """Wait for a request or the interval; False at the end."""
        try:
            self._requests.get(timeout=self._settings.flush_interval_ms / 1000)
        except queue.Empty:
            pass
        return not self._stop.is_set()

    def _report_durable(self) -> None:
        if self._on_durable is not None:
            self._on_durable(self.durable_offset, self.failure)

    def flush_log(self) -> None:
        """Make everything appended so far durable; sets ``failure`` when the disk refuses."""
        if self.failure is not None:
            return
        with self._flushing:
            timestamp = self._store_log.committed_timestamp  # first: it is set after the end it belongs to
            end = self._store_log.committed_offset
            began_ms = self._clock.monotonic_ms()
            try:
                self._store_log.queue.sync()
            except OSError as error:
                self._fail("commit log", error)
                return
            # A replica's log is cut under the same lock, and durable_offset with it: here it can only grow.
            assert end >= self.durable_offset, "what was on the disk stays there"
            self.durable_offset = end
            if self._on_flushed is not None:
                self._on_flushed(self._clock.monotonic_ms() - began_ms)
        self._checkpoint.reach(physic=timestamp)

    def cut_log(self, end: int) -> None:
        """Forget a replica's log from a physical offset on, when no flush is under way that would take what comes there
        next for durable. Raises OSError: the disk refused."""
        with self._flushing:
            assert end <= self._store_log.max_offset, "a log is cut inside"
            self._checkpoint.before_cut(end)
            self._store_log.cut(end)
            self.durable_offset = min(end, self.durable_offset)

    # ---- the queues

    def _flush_queues(self) -> None:
        while not self._stop.wait(self._settings.queue_flush_interval_ms / 1000):
            self._queues_round(self._clock.monotonic_ms())
            if self.failure is not None:
                return

    def _queues_round(self, now: float) -> None:
        is_thorough = now - self._queues_thorough_at >= self._settings.queue_flush_thorough_interval_ms
        if is_thorough:
            self._queues_thorough_at = now
        self.flush_queues(0 if is_thorough else self._settings.queue_flush_least_pages * _PAGE_BYTES)

    def flush_queues(self, least_bytes: int = 0) -> None:
        """Make queues durable that have at least so many bytes to flush; with 0 all, and the checkpoint says so."""
        if self.failure is not None:
            return
        # First: entries of this time and before this offset are there already, held or written.
        timestamp, offset = self._dispatched_timestamp(), min(self._dispatched_offset(), self.durable_offset)
        if not self._queues.write_held():
            return  # the checkpoint must not pass them; they are tried again in the next round
        try:
            self._queues.sync(least_bytes)
            if self._index is not None:
                self._checkpoint.reach(index=self._index.sync_full(self.durable_offset))
            if least_bytes == 0:
                # The note first: recovery believes the checkpoint and does not read the messages of these queues again.
                if self._note_queues is not None:
                    self._note_queues()
                self._checkpoint.reach(logics=timestamp)
                self._checkpoint.logics_physical_offset = offset
            self._checkpoint.save()
        except OSError as error:
            self._fail("consume queues, index or checkpoint", error)

    def step_back(self, now_ms: int, before_ms: int = 0) -> None:
        """Told by the owner before a record has an earlier storeTimestamp than the one before it, ``before_ms`` where
        that is not in the log yet.
        Raises OSError: the disk refused to note that."""
        try:
            self._checkpoint.step_back(max(before_ms, self._store_log.last_store_timestamp), now_ms)
        except OSError as error:
            self._fail("checkpoint", error)
            raise

    def flush_index(self) -> None:
        """Make the newest index file durable, as only a clean stop does; called by the owner."""
        if self.failure is None and self._index is not None:
            try:
                self._index.enter()
                self._index.sync(self.durable_offset)
            except OSError as error:
                self._fail("index", error)

    def _fail(self, what: str, error: OSError) -> None:
        with self._failing:
            if self.failure is not None:
                return
            self.failure = error
        said = "flush of %s failed, errno %s %s: no message is accepted; repair the disk and restart the broker"
        _log.critical(said, what, error.errno, error.strerror)
