"""The note of queue ends: the state of every queue at a clean stop. The next start compares the queues with it.

``queueends``, a note (`rmqkit.store.files`):

==========  ======================================================================================================
field       value
==========  ======================================================================================================
log_start   physical offset of the first byte of the log
log_end     physical offset one past the last byte of the log
queues      by topic and queue id, a list (`QueueNote`): start of the first file and end of the entries in
            bytes, the number of the next message, the CRC-32 of the entries of the last file; then end and CRC-32
            of the extension
goes_on     by topic and queue id, the number of the next message of queues with entries that end before it,
            because the log no longer has their messages
numbers     by topic and queue id, the number of the next message at the last start. For a queue created later, the
            number at the time when this queue or another new queue was noted
==========  ======================================================================================================

The note is valid while nothing is appended to the log: a broker that does not know the note makes it stale with its
first message. A start compares the note and replaces it with a note that has only ``goes_on`` and ``numbers``, for the
start after a kill. This second note reveals a queue with a lost directory. If ``abort`` is missing, it also reveals
that the store was not closed. Queues that are created later are noted before the checkpoint covers them, because
recovery then no longer reads their messages. A note that cannot be read is ignored.
Cost: one read of the last file of each queue at a start, and of each changed queue at a stop. In each minute in which
queues were created: one flush of the log and one write of the note.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec import Struct, field

from rmqkit.errors import RecordCorrupt
from rmqkit.protocol.record import decode_record, is_blank
from rmqkit.store.files import read_note, write_note
from rmqkit.store.log.commit_log import CommitLog
from rmqkit.store.log.file_queue import FileQueue
from rmqkit.store.log.mapped_file import MappedFile
from rmqkit.store.queues.base import ConsumeQueueBase
from rmqkit.store.queues.consume_queue import ConsumeQueue
from rmqkit.store.queues.table import ConsumeQueues
from rmqkit.system import disk

__all__ = ["QueueEnds", "QueueNote"]

_log = logging.getLogger(__name__)
_NAME = "queueends"


class QueueNote(Struct, array_like=True, frozen=True, gc=False):
    """The state of a queue at a clean stop."""

    start: int
    end: int
    number: int
    crc: int
    ext_end: int = 0
    ext_crc: int = 0


class _Note(Struct):
    log_start: int = 0
    log_end: int = -1
    queues: dict[str, dict[int, QueueNote]] = field(default_factory=dict)
    goes_on: dict[str, dict[int, int]] = field(default_factory=dict)
    numbers: dict[str, dict[int, int]] = field(default_factory=dict)


class QueueEnds:
    """The note of a store. Use it only in the owner thread of the store, except `note_new`.

    Args:
        is_replica: whether the store belongs to a slave. A slave's master assigns the numbers, so numbers past the last
            entry are not noted.

    Attributes:
        is_current: whether the note describes the present content of the log. `load` sets it.
    """

    def __init__(self, root: Path, log: CommitLog, *, is_replica: bool = False) -> None:
        self.is_current = False
        self._is_replica = is_replica
        self._path = root / _NAME
        self._commit_log = log
        self._note = _Note()
        self._measured: dict[ConsumeQueueBase, tuple[int, QueueNote]] = {}

    def read(self) -> bool:
        """Read the note. Return True if a broker replaced the note at its start and did not save it: the broker was
        killed, even if ``abort`` is missing. Entries that its queues held in memory are then only in the log."""
        found = read_note(self._path, _Note, "the ends of the queues are not compared with it")
        self._note = found or _Note()
        return found is not None and found.log_end < 0

    def load(self, *, clean: bool) -> None:
        """Compare the note with the loaded log. ``clean``: whether the store was closed cleanly."""
        self.is_current = clean and self._note.log_end >= 0 and not self._is_appended()

    def _is_appended(self) -> bool:
        """Return True if a record was appended after the noted end, or if the whole log is newer."""
        queue, end = self._commit_log.queue, self._note.log_end
        if queue.min_offset > end:
            return True
        file = queue.find(end)
        if file is not None and is_blank(file.view, end - file.start):
            end = file.end
            file = queue.find(end)
        return file is not None and _begins_record(file, end - file.start)

    # ---- comparing

    def of(self, topic: str, queue_id: int) -> QueueNote | None:
        """Return the noted state of a queue, or None if the queue is not in the note or the note is not current."""
        return self._note.queues.get(topic, {}).get(queue_id) if self.is_current else None

    def queues(self) -> list[tuple[str, int]]:
        """Return the queues in the note, or an empty list if the note is not current."""
        queues = self._note.queues if self.is_current else {}
        return [(topic, queue_id) for topic, by_id in queues.items() for queue_id in by_id]

    def take(self, queue: ConsumeQueueBase) -> bool:
        """Set a queue to its noted end. Return False, with nothing done, if its files differ from the note."""
        note = self.of(queue.topic, queue.queue_id)
        if note is None or note.start < 0 or not queue.queue.files:
            return False
        ext = queue.ext if isinstance(queue, ConsumeQueue) else None
        if not self._begins_as(queue, note.start) or not _ends_as(queue.queue, note.end, note.crc):
            return False
        if ext is not None and not _ends_as(ext.queue, note.ext_end, note.ext_crc):
            return False
        queue.recover_at(note.end)
        if ext is not None:
            ext.queue.truncate(note.ext_end)
        self._measured[queue] = queue.max_physical_offset, note
        return True

    def is_taken(self, queue: ConsumeQueueBase) -> bool:
        """Return True if `take` found that a queue matches the note."""
        return queue in self._measured

    def _begins_as(self, queue: ConsumeQueueBase, start: int) -> bool:
        """Return True if the first file of a queue is the noted file, or a later file because files have expired since
        (Apache's broker ran)."""
        begins = queue.queue.files[0].start
        return begins == start or (begins > start and queue.entry(queue.first_index)[0] <= self._commit_log.min_offset)

    def set_numbers(self, queues: ConsumeQueues) -> None:
        """Make each queue assign its next numbers from the number in ``goes_on`` on."""
        if self._is_replica:
            return
        for topic, by_id in self._note.goes_on.items():
            for queue_id, number in by_id.items():
                if topic not in queues.deleted_ends:
                    queue = queues.obtain(topic, queue_id)
                    queue.next_offset = max(number, queue.next_offset)

    def numbers(self) -> dict[tuple[str, int], int]:
        """Return the next number of each queue, as noted while the broker ran. It is empty for a slave."""
        table = {} if self._is_replica else self._note.numbers
        return {(topic, queue_id): number for topic, by_id in table.items() for queue_id, number in by_id.items()}

    # ---- writing

    def renew(self, queues: ConsumeQueues) -> None:
        """Before messages arrive, replace the note with the note that the next start uses if this broker is killed.
        Raises OSError: the note cannot be written."""
        note = _Note(goes_on=self._numbers_ahead(queues))
        for queue in () if self._is_replica else queues:
            if queue.next_offset:
                note.numbers.setdefault(queue.topic, {})[queue.queue_id] = queue.next_offset
        write_note(self._path, note)
        self._note = note

    def note_new(self, queues: ConsumeQueues, flush_log: Callable[[], bool]) -> None:
        """Write the queues that were created since the start into the note, when their entries are on the disk. The
        flush thread calls this. If a write fails, only the note is lost.

        Args:
            flush_log: makes the log durable, and returns False on failure. After a power cut, a noted number greater
                than the numbers in the log would make recovery read the whole log.
        """
        known = self._note.numbers
        if self._is_replica or all(one.queue_id in known.get(one.topic, ()) for one in queues if one.max_offset > 0):
            return
        note = _Note(goes_on=self._note.goes_on)
        for queue in queues:
            if queue.max_offset > 0:
                note.numbers.setdefault(queue.topic, {})[queue.queue_id] = queue.max_offset
        if not flush_log():
            return
        try:
            write_note(self._path, note)
        except OSError as error:
            _log.warning("cannot write %s; queues created since the start are not in it: %s", self._path, error)
            return
        self._note = note

    def save(self, queues: ConsumeQueues) -> None:
        """Write the state of the queues into the note. Call this after everything is on the disk, while no message can
        arrive. If a write fails, only the note is lost."""
        log = self._commit_log
        note = _Note(max(0, log.min_offset), log.max_offset, goes_on=self._numbers_ahead(queues))
        try:
            for queue in sorted(queues, key=lambda one: (one.topic, one.queue_id)):
                note.queues.setdefault(queue.topic, {})[queue.queue_id] = self._measure(queue)
                queue.close()
            write_note(self._path, note)
        except OSError as error:
            _log.warning("cannot write %s; the next start cannot compare queue ends: %s", self._path, error)
            with suppress(OSError):  # after the note of the start, the next start would recover
                disk.remove(self._path, missing_ok=True)

    def _measure(self, queue: ConsumeQueueBase) -> QueueNote:
        known = self._measured.get(queue)
        end = queue.queue.max_offset
        if known is not None and known[0] == queue.max_physical_offset and known[1].end == end:
            crc, ext_end, ext_crc = known[1].crc, known[1].ext_end, known[1].ext_crc
        else:
            crc = _last_crc(queue.queue)
            ext = queue.ext if isinstance(queue, ConsumeQueue) else None
            ext_end, ext_crc = (0, 0) if ext is None else (ext.queue.max_offset, _last_crc(ext.queue))
        number = queue.max_offset if self._is_replica else max(queue.max_offset, queue.next_offset)
        return QueueNote(queue.queue.min_offset, end, number, crc, ext_end, ext_crc)

    def _numbers_ahead(self, queues: ConsumeQueues) -> dict[str, dict[int, int]]:
        ahead: dict[str, dict[int, int]] = {}
        for queue in () if self._is_replica else queues:
            if queue.next_offset > queue.max_offset:
                ahead.setdefault(queue.topic, {})[queue.queue_id] = queue.next_offset
        return ahead


def _begins_record(file: MappedFile, position: int) -> bool:
    try:
        return decode_record(file.view, position).physical_offset == file.start + position
    except RecordCorrupt:
        return False


def _last_crc(queue: FileQueue) -> int:
    return zlib.crc32(queue.files[-1].read(0, queue.files[-1].wrote)) if queue.files else 0


def _ends_as(queue: FileQueue, end: int, crc: int) -> bool:
    """Return True if the files are contiguous up to an end, and the last file has its noted content."""
    files = queue.files
    if not files:
        return end == 0
    last = files[-1]
    if last.start - files[0].start != (len(files) - 1) * queue.file_bytes or not last.start <= end <= last.end:
        return False
    return zlib.crc32(last.read(0, end - last.start)) == crc
