"""Retention: the deletion of old commit-log files, and of the queue and index files that point into them
(``CleanCommitLogService``, ``CleanConsumeQueueService``).

A retention cycle, every cleanResourceInterval, measures the disks, decides and deletes. The first cycle runs a minute
after the start. It runs immediately if a disk is so full that messages are refused or files are deleted regardless of
their age.

==============================================  ====================================================================
disk use, in percent rounded up                 action
==============================================  ====================================================================
> diskSpaceWarningLevelRatio (35…90)            *disk full*: puts are refused until the use is at most the next level
> diskSpaceCleanForciblyRatio (30…85)           files are deleted regardless of age (if cleanFileForciblyEnable)
> diskMaxUsedSpaceRatio (10…95)                 expired files are deleted now
not above any level                             expired files are deleted in the hours of deleteWhen, or on request
==============================================  ====================================================================

For the log, the least used of its directories is decisive, and new files avoid directories that are too full. A file
expires fileReservedTime hours after its last write. A cycle deletes the oldest files first, at most deleteFileBatchMax
files. It stops at the first file that is not expired, and never deletes the newest file. Then queue, extension and
index files are deleted if all their entries are before the new start of the log, and min offsets rise. Unread messages
are deleted, too.

Invariants: only dispatched records are deleted. If a crash interrupts a cycle, the next cycle that deletes also deletes
the remaining files. A file with readers is deleted like any other file, and its mapping stays valid (`mapped_file`).
Cost: a few reads per queue, and only if the start of the log moved. The owner only removes names. A thread
(``store-delete``) closes the last descriptors and mappings of large files, which frees their blocks: the kernel takes
long for this. Use this module only in the owner thread of the store.

Not handled here: unused topics, the timer log. Source: store.md §4.4, §4.5, §7.4, §15.
"""

from __future__ import annotations

import enum
import logging
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
from rmqkit.system import disk, threads

__all__ = ["Cause", "Decision", "DiskUse", "Retention", "RetentionRound", "decide", "parse_hours", "used_percent"]

_log = logging.getLogger(__name__)
_HOUR_MS = 3_600_000
_ROUNDS_ON_REQUEST = 20


class Cause(enum.Enum):
    """The reason for deleting files in a cycle."""

    NONE = "nothing to do"
    DISK = "disk use"
    HOUR = "deleteWhen"
    REQUEST = "on request"


class DiskUse(Struct, frozen=True):
    """The use of the disks of the log (its least used directory), the consume queues and the index, in percent."""

    log: int
    queues: int
    index: int

    def __str__(self) -> str:
        return f"CL: {self.log / 100:.2f} CQ: {self.queues / 100:.2f} INDEX: {self.index / 100:.2f}"


class Decision(Struct, frozen=True):
    """The actions of a retention cycle.
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
    """The decision of a cycle, and the numbers of deleted files. Extension files count as queue files."""

    decision: Decision
    use: DiskUse
    log_files: int = 0
    queue_files: int = 0
    index_files: int = 0


def decide(
    settings: StoreSettings, use: DiskUse, *, is_hour: bool, is_requested: bool, before: Decision = _NOTHING
) -> Decision:
    """Decide about a disk use, without side effects. ``before``: the previous decision, because a full disk counts as
    full until its use falls to a lower level.
    """
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
    """Return the disk uses above which a disk is full, files are deleted by force, and expired files are deleted. Each
    is limited to its bounds."""
    return (
        max(35, min(settings.disk_warning_percent, 90)),
        max(30, min(settings.disk_clean_forcibly_percent, 85)),
        max(10, min(settings.disk_used_percent_max, 95)),
    )


def parse_hours(text: str) -> frozenset[int]:
    """Return the hours of ``deleteWhen``, separated by ``;``.

    Raises SettingsError: a word is not an hour of the day.
    """
    words = [word.strip() for word in text.split(";") if word.strip()]
    for word in words:
        if not (word.isascii() and word.isdigit() and int(word) < 24):
            raise SettingsError(f"deleteWhen={text}: {word!r} must be an hour from 00 to 23, several separated by ;")
    return frozenset(map(int, words))


def used_percent(path: Path) -> int:
    """Return the use of a disk in percent of the space for unprivileged users, rounded up, like ``df``.
    For a directory that does not exist yet, measure its nearest existing parent.
    Raises OSError: the disk cannot be measured."""
    while not disk.exists(path) and path != path.parent:
        path = path.parent
    space = disk.space(path)
    used = space.f_blocks - space.f_bfree
    usable = used + space.f_bavail
    return -(-100 * used // usable) if usable else 0


class Retention:
    """The retention of one store.
    ``disk_used_percent``: returns the use of the disk of a directory.
    ``note_start``: stores the new start of the log (`LogStart.note`).
    ``decision``: the decision of the last cycle.
    ``use``: the disk use of that decision.
    Raises SettingsError: ``deleteWhen`` has an invalid hour."""

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
        self._releasing: threads.Thread | None = None

    @property
    def refusal(self) -> str:
        """The reason why no message is accepted; empty while the disks have space."""
        if not self.decision.is_disk_full:
            return ""
        full, force, _ = _percents(self._settings)
        return (
            f"disk full, {self.use}: refused above diskSpaceWarningLevelRatio {full / 100:.2f}, "
            f"accepted again at {min(force, full) / 100:.2f}: free space on the disk"
        )

    def lacks_space(self) -> bool:
        """Return True if a cycle would refuse messages, or delete files regardless of their age.
        Raises OSError: the use of a disk cannot be measured."""
        decision = decide(self._settings, self._used()[1], is_hour=False, is_requested=False)
        return decision.is_forced or decision.is_disk_full

    def request(self) -> None:
        """Allow the next cycles to delete expired files at any hour (``deleteExpiredCommitLog``)."""
        self._requested_rounds = _ROUNDS_ON_REQUEST

    def run(self, dispatched_offset: int) -> RetentionRound:
        """Run one cycle: measure, decide, delete.
        ``dispatched_offset``: end of the records that can be deleted. They are dispatched and, with an archive,
        archived.
        Raises OSError: a disk cannot be measured, or a file cannot be deleted; the next cycle continues."""
        now_ms = self._clock.now_ms()
        self._measure()
        is_hour = datetime.fromtimestamp(now_ms / 1000).hour in self._hours  # in local time, like the setting
        before = self.decision
        self.decision = decide(
            self._settings, self.use, is_hour=is_hour, is_requested=self._requested_rounds > 0, before=before
        )
        self._log_change(before)
        if self.decision.cause is Cause.NONE:
            return RetentionRound(self.decision, self.use)
        self._requested_rounds = max(0, self._requested_rounds - 1)
        # Delete log files first. In the other order a kill would leave records that are in no queue.
        try:
            log_files = self._drop_log_files(now_ms, dispatched_offset)
        finally:  # also after an error: the queues must begin where the log begins
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
        """Return the disk use of each directory of the log, and the disk uses on which the decision depends."""
        used = {path: self._disk_used_percent(path) for path in self._commit_log.queue.directories}
        queues, index = (self._disk_used_percent(self._root / name) for name in ("consumequeue", "index"))
        return used, DiskUse(min(used.values()), queues, index)

    def _log_change(self, before: Decision) -> None:
        if self.decision.is_disk_full and not before.is_disk_full:
            _log.error("store %s: %s", self._root, self.refusal)
        elif before.is_disk_full and not self.decision.is_disk_full:
            _log.warning("store %s: the disk has space again, %s: messages are accepted", self._root, self.use)

    def _drop_log_files(self, now_ms: int, dispatched_offset: int) -> int:
        queue, settings = self._commit_log.queue, self._settings
        # Limit the number of files per cycle: puts wait for the disk during each deletion.
        end_max = min(dispatched_offset, queue.min_offset + settings.delete_file_batch_max * queue.file_bytes)
        written_ms_max = now_ms - settings.file_reserved_hours * _HOUR_MS

        def is_expired(file: MappedFile) -> bool:
            if file.end > end_max:
                return False
            return self.decision.is_forced or _modified_ms(file.path) <= written_ms_max

        # Never delete the newest file, or a file after a remaining file: the log must have no gaps.
        expired = list(takewhile(is_expired, queue.files[:-1]))
        if not expired:
            return 0
        assert expired[-1].end <= dispatched_offset, "only dispatched records are deleted"
        # Note the new start first, so that the next start does not report the files as missing, even after a kill.
        is_noted = self._note_start(queue.files[len(expired)].start)
        directories = {file.path.parent for file in queue.files}

        def is_held(file: MappedFile) -> bool:
            if file not in expired:
                return False
            self._hold(file)
            return True

        count = queue.drop_front(is_held)
        if not is_noted:
            self._note_start(queue.min_offset)  # the disk was full and has space now
        if count:
            for directory in directories:  # first: reappearing records would have no queue and no extension
                sync_directory(directory)
            why = self.decision.cause.value
            _log.info("store %s: %d log files deleted (%s), log from %d", self._root, count, why, queue.min_offset)
        return count

    def _drop_behind_log(self) -> tuple[int, int]:
        """Make queues and index begin where the log begins. Return the numbers of deleted queue and index files."""
        min_offset = self._commit_log.min_offset
        if min_offset <= self._followed_offset:
            return 0, 0
        # The last close of a file frees its blocks. For a GiB this takes the disk a second, too long for the owner.
        for file in [] if self._index is None else self._index.files[:-1]:
            self._hold(file.file)
        queue_files = self._queues.drop_expired(min_offset)
        index_files = 0 if self._index is None else self._index.drop_expired(min_offset)
        self._followed_offset = min_offset
        return queue_files, index_files

    # ---- files that are deleted

    def _hold(self, file: MappedFile) -> None:
        """Hold a file open until the thread closes it. Skip a file that is already gone."""
        try:
            view = file.view
            self._held.append((disk.duplicate(file.fd), view))
        except (OSError, ValueError) as error:  # ValueError: the file is shorter than before
            _log.debug("%s is deleted by the owner: %s", file.path, error)

    def _release(self) -> None:
        if self._held and not (self._releasing and self._releasing.is_alive()):
            held, self._held = self._held, []
            self._releasing = threads.Thread(_close_all, (held,), name="store-delete")
            self._releasing.start()

    def close(self) -> None:
        """Wait until the blocks of deleted files are free."""
        self._release()
        if self._releasing is not None:
            self._releasing.join()
            self._releasing = None
        _close_all(self._held)


def _close_all(held: list[tuple[int, memoryview]]) -> None:
    """Close descriptors and mappings one by one, and remove each from the list."""
    while held:
        disk.close(held.pop()[0])


def _modified_ms(path: Path) -> int:
    """Return the time of the last write to a file in ms; 0 if the file was deleted."""
    try:
        return disk.modified_ms(path)
    except FileNotFoundError:
        return 0
