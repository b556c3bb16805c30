"""Retention: the deletion of old commit-log files, and of the queue and index files that point into them
(``CleanCommitLogService``, ``CleanConsumeQueueService``).

A round, every cleanResourceInterval, measures the disks, decides and deletes. The first is a minute after the start, or
at once when a disk is so full that messages are refused or files are deleted regardless of their age.

==============================================  ====================================================================
disk use, in percent rounded up                 then
==============================================  ====================================================================
> diskSpaceWarningLevelRatio (35…90)            *disk full*: puts are refused until it is at or below the next one
> diskSpaceCleanForciblyRatio (30…85)           files are deleted regardless of age (if cleanFileForciblyEnable)
> diskMaxUsedSpaceRatio (10…95)                 expired files are deleted now
not above                                       expired files are deleted in the hours of deleteWhen, or on request
==============================================  ====================================================================

For the log the least used of its directories counts, and new files avoid directories that are too full. A file is
expired if nothing was written to it for fileReservedTime hours. The oldest files are deleted first, at most
deleteFileBatchMax in a round, up to the first file that is not expired, and never the newest file. Then queue,
extension and index files that only point below the new start of the log are deleted, and min offsets rise. It does not
matter if a consumer has read the messages.

Invariants: only records that were dispatched are deleted; files that a crash in a round leaves are deleted by the next
round that deletes. A file with readers is deleted like any other, and its mapping stays valid (`mapped_file`).
Cost: a few reads per queue, and only when the log's start moved. The owner only removes names. A thread
(``store-delete``) closes the last descriptors and mappings of large files and so frees their blocks, as the kernel
takes long for that. Owner thread only.

Not handled here: unused topics, the timer log. Source: store.md §4.4, §4.5, §7.4, §15.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
from collections.abc import Callable
from datetime import datetime
from itertools import takewhile
from pathlib import Path

from msgspec import Struct

from rmqkit.clock import Clock
from rmqkit.errors import SettingsError
from rmqkit.store.files import sync_directory
from rmqkit.store.index.index import MessageIndex
from rmqkit.store.log.commit_log import CommitLog
from rmqkit.store.log.mapped_file import MappedFile
from rmqkit.store.queues.table import ConsumeQueues
from rmqkit.store.settings import StoreSettings

__all__ = ["Cause", "Decision", "DiskUse", "Retention", "RetentionRound", "decide", "parse_hours", "used_percent"]

_log = logging.getLogger(__name__)
_HOUR_MS = 3_600_000
_ROUNDS_ON_REQUEST = 20


class Cause(enum.Enum):
    """Why a round deletes."""

    NONE = "nothing to do"
    DISK = "disk use"
    HOUR = "deleteWhen"
    REQUEST = "on request"


class DiskUse(Struct, frozen=True):
    """Percent used of the disks of the log (its least used directory), the consume queues and the index."""

    log: int
    queues: int
    index: int

    def __str__(self) -> str:
        return f"CL: {self.log / 100:.2f} CQ: {self.queues / 100:.2f} INDEX: {self.index / 100:.2f}"


class Decision(Struct, frozen=True):
    """The actions of a retention round.
    ``is_forced``: whether files are deleted regardless of their age.
    ``is_log_disk_full``, ``is_queue_disk_full``: whether puts are refused."""

    cause: Cause = Cause.NONE
    is_forced: bool = False
    is_log_disk_full: bool = False
    is_queue_disk_full: bool = False

    @property
    def is_disk_full(self) -> bool:
        """Return True if puts are refused."""
        return self.is_log_disk_full or self.is_queue_disk_full


_NOTHING = Decision()


class RetentionRound(Struct, frozen=True):
    """The decision of a round, and the numbers of files it deleted; extension files count as queue files."""

    decision: Decision
    use: DiskUse
    log_files: int = 0
    queue_files: int = 0
    index_files: int = 0


def decide(
    settings: StoreSettings, use: DiskUse, *, is_hour: bool, is_requested: bool, before: Decision = _NOTHING
) -> Decision:
    """Return the decision for a disk use; pure. ``before`` is the last decision, for a disk that was full."""
    full, force, expire = _percents(settings)
    worst = max(use.log, use.queues)
    if worst > min(expire, force, full):
        cause = Cause.DISK
    else:
        cause = Cause.HOUR if is_hour else Cause.REQUEST if is_requested else Cause.NONE
    return Decision(
        cause,
        is_forced=settings.clean_forcibly and worst > min(force, full),
        is_log_disk_full=use.log > (min(force, full) if before.is_log_disk_full else full),
        is_queue_disk_full=use.queues > (min(force, full) if before.is_queue_disk_full else full),
    )


def _percents(settings: StoreSettings) -> tuple[int, int, int]:
    """The disk use that means full, forced and expired, each within its bounds."""
    return (
        max(35, min(settings.disk_warning_percent, 90)),
        max(30, min(settings.disk_clean_forcibly_percent, 85)),
        max(10, min(settings.disk_used_percent_max, 95)),
    )


def parse_hours(text: str) -> frozenset[int]:
    """The hours of ``deleteWhen``, separated by ``;``. Raises SettingsError: one is no hour of the day."""
    words = [word.strip() for word in text.split(";") if word.strip()]
    for word in words:
        if not (word.isascii() and word.isdigit() and int(word) < 24):
            raise SettingsError(f"deleteWhen={text}: {word!r} must be an hour from 00 to 23, several separated by ;")
    return frozenset(map(int, words))


def used_percent(path: Path) -> int:
    """Return how much of what unprivileged users may use of a disk is used, in percent rounded up, as ``df`` shows it.
    A directory that does not exist yet counts as the one it will be made in.
    Raises OSError: the disk cannot be asked."""
    while not path.exists() and path != path.parent:
        path = path.parent
    disk = os.statvfs(path)
    used = disk.f_blocks - disk.f_bfree
    usable = used + disk.f_bavail
    return -(-100 * used // usable) if usable else 0


class Retention:
    """Deletes what a store need not keep.
    ``disk_used_percent``: says how full the disk of a directory is.
    ``note_start``: notes where the log is about to begin (`LogStart.note`).
    ``decision``: that of the last round.
    ``use``: the disk use it was made for.
    Raises SettingsError: ``deleteWhen`` names no hours."""

    def __init__(
        self,
        root: Path,
        log: CommitLog,
        queues: ConsumeQueues,
        index: MessageIndex | None,
        settings: StoreSettings,
        clock: Clock,
        disk_used_percent: Callable[[Path], int] = used_percent,
        *,
        note_start: Callable[[int], bool] = lambda start: True,
    ) -> None:
        self.decision = _NOTHING
        self.use = DiskUse(0, 0, 0)
        self._root = root
        self._commit_log = log
        self._queues = queues
        self._index = index
        self._settings = settings
        self._clock = clock
        self._disk_used_percent = disk_used_percent
        self._note_start = note_start
        self._hours = parse_hours(settings.delete_when)
        self._requested_rounds = 0
        self._followed_offset = 0
        self._held: list[tuple[int, memoryview]] = []
        self._releasing: threading.Thread | None = None

    @property
    def refusal(self) -> str:
        """Why no message is taken, empty when the disk has room."""
        if not self.decision.is_disk_full:
            return ""
        full, force, _ = _percents(self._settings)
        return (
            f"disk full, {self.use}: refused above diskSpaceWarningLevelRatio {full / 100:.2f}, "
            f"accepted again at {min(force, full) / 100:.2f}: free space on the disk"
        )

    def lacks_space(self) -> bool:
        """Return True if a round would refuse messages, or delete files regardless of their age.
        Raises OSError: the use of a disk cannot be measured."""
        decision = decide(self._settings, self._used()[1], is_hour=False, is_requested=False)
        return decision.is_forced or decision.is_disk_full

    def request(self) -> None:
        """Let the next rounds delete expired files at any hour (``deleteExpiredCommitLog``)."""
        self._requested_rounds = _ROUNDS_ON_REQUEST

    def run(self, dispatched_offset: int) -> RetentionRound:
        """One round: measure, decide, delete.
        ``dispatched_offset``: end of the records that may be deleted: dispatched and, with an archive, archived ones.
        Raises OSError: a disk cannot be asked, or a file not be deleted; the next round goes on."""
        now_ms = self._clock.now_ms()
        self._measure()
        is_hour = datetime.fromtimestamp(now_ms / 1000).hour in self._hours  # local time, as people set it
        before = self.decision
        self.decision = decide(
            self._settings, self.use, is_hour=is_hour, is_requested=self._requested_rounds > 0, before=before
        )
        self._log_change(before)
        if self.decision.cause is Cause.NONE:
            return RetentionRound(self.decision, self.use)
        self._requested_rounds = max(0, self._requested_rounds - 1)
        # The log before what points into it: the other way round a kill leaves records that no queue knows.
        try:
            log_files = self._drop_log_files(now_ms, dispatched_offset)
        finally:  # a log file that cannot be deleted does not keep the queues from following those that were
            try:
                queue_files, index_files = self._drop_behind_log()
            finally:
                self._release()
        return RetentionRound(self.decision, self.use, log_files, queue_files, index_files)

    def _measure(self) -> None:
        used, self.use = self._used()
        force = _percents(self._settings)[1]
        self._commit_log.queue.avoided = frozenset(path for path, percent in used.items() if percent > force)

    def _used(self) -> tuple[dict[Path, int], DiskUse]:
        """Return how full the disk of each of the log's directories is, and what counts of it."""
        used = {path: self._disk_used_percent(path) for path in self._commit_log.queue.directories}
        queues, index = (self._disk_used_percent(self._root / name) for name in ("consumequeue", "index"))
        return used, DiskUse(min(used.values()), queues, index)

    def _log_change(self, before: Decision) -> None:
        if self.decision.is_disk_full and not before.is_disk_full:
            _log.error("store %s: %s", self._root, self.refusal)
        elif before.is_disk_full and not self.decision.is_disk_full:
            _log.warning("store %s: the disk has room again, %s: messages are accepted", self._root, self.use)

    def _drop_log_files(self, now_ms: int, dispatched_offset: int) -> int:
        queue, settings = self._commit_log.queue, self._settings
        # A round deletes a few files only: each costs the disk time that puts wait for.
        end_max = min(dispatched_offset, queue.min_offset + settings.delete_file_batch_max * queue.file_bytes)
        written_ms_max = now_ms - settings.file_reserved_hours * _HOUR_MS

        def is_expired(file: MappedFile) -> bool:
            if file.end > end_max:
                return False
            return self.decision.is_forced or _modified_ms(file.path) <= written_ms_max

        # Never the newest file, and none behind one that stays: the log has no holes.
        expired = list(takewhile(is_expired, queue.files[:-1]))
        if not expired:
            return 0
        assert expired[-1].end <= dispatched_offset, "what no queue knows yet is not deleted"
        # First: a start must not miss them, whenever this one is killed.
        is_noted = self._note_start(queue.files[len(expired)].start)
        directories = {file.path.parent for file in queue.files}

        def is_held(file: MappedFile) -> bool:
            if file not in expired:
                return False
            self._hold(file)
            return True

        count = queue.drop_front(is_held)
        if not is_noted:
            self._note_start(queue.min_offset)  # a full disk has room now
        if count:
            for directory in directories:  # first: records that came back would have no queue and no extension
                sync_directory(directory)
            why = self.decision.cause.value
            _log.info("store %s: %d log files deleted (%s), log from %d", self._root, count, why, queue.min_offset)
        return count

    def _drop_behind_log(self) -> tuple[int, int]:
        """Let queues and index begin where the log begins; returns the numbers of their files deleted."""
        min_offset = self._commit_log.min_offset
        if min_offset <= self._followed_offset:
            return 0, 0
        # Blocks of a file are freed by whoever holds it last: a GiB takes the disk a second, which the owner has not.
        for file in [] if self._index is None else self._index.files[:-1]:
            self._hold(file.file)
        queue_files = self._queues.drop_expired(min_offset)
        index_files = 0 if self._index is None else self._index.drop_expired(min_offset)
        self._followed_offset = min_offset
        return queue_files, index_files

    # ---- files that are deleted

    def _hold(self, file: MappedFile) -> None:
        """Keep a file's bytes for the thread when its name goes; a file that is gone already needs no thread."""
        try:
            view = file.view
            self._held.append((os.dup(file.fd), view))
        except (OSError, ValueError) as error:  # ValueError: somebody has shortened it
            _log.debug("%s is deleted by the owner: %s", file.path, error)

    def _release(self) -> None:
        if self._held and not (self._releasing and self._releasing.is_alive()):
            held, self._held = self._held, []
            self._releasing = threading.Thread(target=_close_all, args=(held,), name="store-delete")
            self._releasing.start()

    def close(self) -> None:
        """Wait until the blocks of deleted files are free."""
        self._release()
        if self._releasing is not None:
            self._releasing.join()
            self._releasing = None
        _close_all(self._held)


def _close_all(held: list[tuple[int, memoryview]]) -> None:
    """Close descriptors and mappings, which become fewer as their tuples do."""
    while held:
        os.close(held.pop()[0])


def _modified_ms(path: Path) -> int:
    """Return when a file was last written to; 0 for one that somebody has deleted."""
    try:
        return path.stat().st_mtime_ns // 1_000_000
    except FileNotFoundError:
        return 0
