"""Repair at a start: finds queues that differ from their state at the last stop, and rebuilds them from the log.

After a clean stop every queue is compared with the note of queue ends (`queue_ends`), which costs one read of its last
file. Without a valid note, the files of a queue are compared with each other:

=====================================================  ===============================================================
sign of a broken queue                                 reason
=====================================================  ===============================================================
the note has the queue, and the queue has no files     they are missing (unless its topic was deleted: then neither
                                                       ``topics.json`` nor the directory has it)
first file, end or last file differ from the note      files are missing, cut off or were changed
files are not contiguous                               a file in between is missing
the first or last entry of an older file, or,          the entries are torn, or another queue's
without a note, the very last entry, does not
belong to a record of the queue with its number
=====================================================  ===============================================================

Starting at its first file, the entries of a broken queue are compared with their records. Correct entries stay, all
entries after the first wrong one are dropped. One scan of the log enters the missing entries of all broken queues. If
the log no longer has the messages, the queue continues with its next number, because a number is never assigned twice.

After a crash the newest entries are always rebuilt (`recovery`). A queue is rebuilt from the whole log in two cases: if
the first of the newest entries is not contiguous with the older entries, and if the queue ends before the number that
was noted while the broker ran. In the second case, its directory or one of its files is lost (`mend_after_crash`).

Not handled here: a wrong entry in the middle of an older file (`reader` skips it, `verify` finds it). One more case is
not handled after a crash: a queue lost files that were created after its number was noted, and it has no record in the
part of the log that recovery scans (`verify` finds such queues).
Source: store.md §4, §12.2.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Set
from pathlib import Path
from typing import Any

from msgspec import Struct

from rmqkit.errors import RecordCorrupt
from rmqkit.protocol.names import SCHEDULE_TOPIC, is_light, split_lite_queue
from rmqkit.protocol.record import Record, decode_record
from rmqkit.store.dispatcher import Dispatcher, request_of
from rmqkit.store.light import light_numbers
from rmqkit.store.log.commit_log import CommitLog
from rmqkit.store.log.scan import Damage, has_numpy
from rmqkit.store.log.view import LogView
from rmqkit.store.queues.base import BLANK_SIZE, ConsumeQueueBase
from rmqkit.store.queues.batch_queue import BatchQueue
from rmqkit.store.queues.consume_queue import ConsumeQueue
from rmqkit.store.queues.queue_ends import QueueEnds, QueueNote
from rmqkit.store.queues.queue_ext import is_address
from rmqkit.store.queues.table import ConsumeQueues
from rmqkit.store.table_journal import stored_table
from rmqkit.system import disk

__all__ = ["configured_topics", "mend_after_crash", "mend_queues", "tell_odd_queues"]

_log = logging.getLogger(__name__)
_LOG_LINES_MAX = 20


class _Broken(Struct):
    """A queue with broken files.

    Attributes:
        note: the note of the last stop, if it is valid.
        kept: one past the last entry that stays; None if no entry stays.
        end_index: one past the last entry before the repair.
    """

    queue: ConsumeQueueBase
    reason: str
    note: QueueNote | None
    kept: int | None = None
    end_index: int = 0


def mend_queues(
    root: Path,
    log: CommitLog,
    queues: ConsumeQueues,
    ends: QueueEnds,
    dispatcher: Dispatcher,
    delays_ms: tuple[int, ...],
) -> bool:
    """Find broken queues, rebuild them and log the repairs. Return True if a broken queue was found. The caller must
    recover the queues first.

    Args:
        dispatcher: enters records in the queues only, not in the index.
    Raises:
        OSError: a file cannot be read or written.
    """
    entries = _Entries(log, delays_ms)
    broken = [*_found(queues, ends, entries), *_missing(root, queues, ends)]
    if not broken:
        return False
    for one in broken:
        _take_back(one, entries)
    start = min(log.min_offset if one.kept is None else one.queue.max_physical_offset for one in broken)
    _walk(log, max(start, log.min_offset), queues, dispatcher, delays_ms, broken)
    _log_rebuilt(root, broken)
    return True


def mend_after_crash(
    root: Path,
    log: CommitLog,
    queues: ConsumeQueues,
    ends: QueueEnds,
    dispatcher: Dispatcher,
    delays_ms: tuple[int, ...],
    *,
    gap_max: int = 0,
) -> None:
    """Rebuild queues that lack messages from before the part of the log that recovery dispatched again. Log the
    repairs. The log must have been scanned and have its final end.

    Args:
        dispatcher: enters records in the queues only, not in the index.
        gap_max: maximum number of consecutive messages that a queue may lack, see `BulkDispatcher`.

    Raises:
        OSError: a file cannot be read or written.
    """
    lacking = dict.fromkeys(sorted(queues.behind, key=lambda one: (one.topic, one.queue_id)))
    for (topic, queue_id), number in ends.numbers().items():
        queue = queues.get(topic, queue_id)
        if topic not in queues.deleted_ends and (queue is None or queue.max_offset < number):
            queue = queue or queues.obtain(topic, queue_id)
            lacking[queue] = None
            if not queue.queue.files:
                queue.next_offset = max(number, queue.next_offset)
    topics = configured_topics(root) if lacking else None
    broken = [
        _Broken(queue, "messages of the log were not in it", None)
        for queue in lacking
        if topics is None or queue.topic in topics or is_light(queue.topic)
    ]
    if broken:
        counts = {one.queue: max(0, one.queue.max_offset - one.queue.min_offset) for one in broken}
        for one in broken:
            _empty(one.queue)
        _walk(log, log.min_offset, queues, dispatcher, delays_ms, broken, gap_max)
        _log_reentered(root, broken, counts)


def _found(queues: ConsumeQueues, ends: QueueEnds, entries: _Entries) -> list[_Broken]:
    """Return the queues with broken files."""
    broken: list[_Broken] = []
    for queue in queues:
        if queue.queue.files:
            note = ends.of(queue.topic, queue.queue_id)
            reason = entries.fault(queue) if ends.is_taken(queue) else entries.fault_unnoted(queue)
            if note is not None and not ends.is_taken(queue):
                reason = reason or "its files are not as the last stop left them"
            if reason:
                broken.append(_Broken(queue, reason, note))
            queue.close()
    return broken


def _missing(root: Path, queues: ConsumeQueues, ends: QueueEnds) -> list[_Broken]:
    """Return the queues with missing files."""
    broken: list[_Broken] = []
    topics: dict[str, object] | None = None
    is_read = False
    for topic, queue_id in ends.queues():
        note, queue = ends.of(topic, queue_id), queues.get(topic, queue_id)
        if note is None or note.start < 0 or (queue is not None and queue.queue.files):
            continue
        if not is_read:
            topics, is_read = configured_topics(root), True
        is_known = topics is None or topic in topics or is_light(topic)
        # Otherwise a broker that does not know the note has deleted the topic.
        if is_known or any(disk.exists(root / tree / topic) for tree in ("consumequeue", "batchconsumequeue")):
            broken.append(_Broken(queues.obtain(topic, queue_id), "its files are missing", note))
    return broken


def tell_odd_queues(root: Path, queues: ConsumeQueues, known: Set[tuple[str, int]], *, log_start: int) -> None:
    """Warn of queues that a recovery created and that should not exist: the topic or queue is not in ``topics.json``,
    or the log is complete and lacks the messages before the queue's first number.
    No checksum covers topic and queue id of a record: damage there moves its message to a queue that no consumer reads.

    Args:
        known: topic and queue id of the queues that had files before.
        log_start: physical offset of the first byte of the log.
    """
    made = [
        queue
        for place, queue in queues.table.items()
        if place not in known and queue.first_index < queue.end_index and not is_light(queue.topic)
    ]
    topics = configured_topics(root) if made else None
    odd = [(queue, reason) for queue in made if (reason := _oddity(queue, topics, log_start))]
    for queue, reason in odd[:_LOG_LINES_MAX]:
        said = (
            "record at %d of the log: it belongs to queue %s-%d, but %s: it may be damaged, and %d messages may be "
            "missing there"
        )
        count = queue.max_offset - queue.min_offset
        first = queue.entry(max(queue.first_index, queue.min_offset if isinstance(queue, ConsumeQueue) else 0))[0]
        _log.warning(said, first, queue.topic, queue.queue_id, reason, count)
    if len(odd) > _LOG_LINES_MAX:
        _log.warning("store %s: %d queues should not exist", root, len(odd))


def _oddity(queue: ConsumeQueueBase, topics: dict[str, object] | None, log_start: int) -> str:
    """Return the reason why a queue created by a recovery should not exist, or an empty text."""
    if topics is not None and queue.topic not in topics:
        return "topics.json does not know the topic"
    topic = None if topics is None else topics[queue.topic]
    given = [topic.get(name) for name in ("readQueueNums", "writeQueueNums")] if isinstance(topic, dict) else []
    count = max((one for one in given if isinstance(one, int)), default=None)
    if count is not None and queue.queue_id >= count:
        return f"topics.json knows {count} queues"
    if queue.min_offset > 0 and log_start <= 0:
        return f"the log has no message before number {queue.min_offset} of it"
    return ""


def configured_topics(root: Path) -> dict[str, object] | None:
    """Return the topics of ``topics.json`` and its journal with their configuration, or None if the file cannot be
    read."""
    table = (stored_table(root / "config" / "topics.json") or {}).get("topicConfigTable")
    return table if isinstance(table, dict) else None


def _take_back(one: _Broken, entries: _Entries) -> None:
    """Drop the entries of a broken queue from the first wrong entry on."""
    queue, note = one.queue, one.note
    one.end_index = queue.end_index
    number = queue.max_offset
    one.kept = entries.right_ones(queue, None if note is None else note.start)
    assert one.kept is None or one.kept <= one.end_index, "only existing entries stay"
    if one.kept is None:
        _empty(queue)
    elif one.kept < queue.end_index:
        queue.recover_at(one.kept * queue.entry_bytes)
    # The next number survives its entries: consumers have stored offsets, and would skip messages that reuse the
    # numbers.
    queue.next_offset = max(number if note is None else note.number, queue.next_offset)


def _empty(queue: ConsumeQueueBase) -> None:
    """Delete the files of a queue."""
    for files in queue.file_queues:
        files.destroy()
    queue.resume()
    queue.min_offset = 0
    queue.recovered_record = (-1, 0)
    queue.max_physical_offset = -1


def _walk(
    log: CommitLog,
    start: int,
    queues: ConsumeQueues,
    dispatcher: Dispatcher,
    delays_ms: tuple[int, ...],
    broken: list[_Broken],
    gap_max: int = 0,
) -> None:
    """Enter the records of the broken queues from a physical offset of the log on."""
    for one in broken:
        deleted_end = queues.deleted_ends.get(one.queue.topic, -1)
        one.queue.max_physical_offset = max(deleted_end, one.queue.max_physical_offset)
    wanted = {(one.queue.topic, one.queue.queue_id) for one in broken}
    _enter_wanted(log, start, queues, dispatcher, delays_ms, wanted, gap_max)


def _enter_wanted(
    log: CommitLog,
    start: int,
    queues: ConsumeQueues,
    dispatcher: Dispatcher,
    delays_ms: tuple[int, ...],
    wanted: Container[tuple[str, int]],
    gap_max: int = 0,
) -> None:
    """Enter the records of some queues from a physical offset of the log on."""
    view = LogView([(file.path, file.start) for file in log.queue.files if file.end > start])
    if has_numpy():
        from rmqkit.store.bulk import BulkDispatcher, DispatchColumns

        bulk = BulkDispatcher(queues, None, dispatcher, delays_ms, has_light=True, only=wanted)
        bulk.gap_max = gap_max
        for _, run in view.runs():
            if not isinstance(run, Damage):
                bulk.enter(DispatchColumns(run))
    else:
        for _, record in view.walk():
            if not isinstance(record, Damage):
                arrival = request_of(record, delays_ms)
                if (arrival.topic, arrival.queue_id) in wanted:
                    queue = queues.get(arrival.topic, arrival.queue_id)
                    if gap_max and isinstance(queue, ConsumeQueue):
                        queue.fill_gap(arrival.queue_offset, arrival.physical_offset, gap_max)
                    dispatcher.enter_own(arrival)
                dispatcher.enter_light([arrival], wanted)


class _LiteNames:
    """A container of the topic and queue id of every lite topic's light queue."""

    def __contains__(self, place: object) -> bool:
        return isinstance(place, tuple) and split_lite_queue(place[0]) is not None


def enter_lite(
    log: CommitLog, start: int, queues: ConsumeQueues, dispatcher: Dispatcher, delays_ms: tuple[int, ...]
) -> None:
    """Enter the records of lite topics from a physical offset of the log on. Raises OSError: a write failed."""
    _enter_wanted(log, start, queues, dispatcher, delays_ms, _LiteNames())


def _log_rebuilt(root: Path, broken: list[_Broken]) -> None:
    """Log the repairs, for each queue and in total."""
    made_all = lost_all = 0
    for i, one in enumerate(broken):
        queue = one.queue
        queue.recover_at(queue.queue.max_offset)
        queue.close()
        if one.note is None:  # the end of torn entries is not reliable
            queue.next_offset = 0
        kept = one.kept
        if kept is None:
            kept = queue.min_offset if isinstance(queue, ConsumeQueue) else queue.first_index
        made, lost = max(0, queue.end_index - kept), max(0, queue.next_offset - queue.max_offset)
        made_all, lost_all = made_all + made, lost_all + lost
        if i < _LOG_LINES_MAX:
            lack = f"; the log does not have the last {lost}: lost, the next message is {queue.next_offset}"
            place, said = (queue.topic, queue.queue_id), lack if lost else ""
            _log.warning("%s-%d: %s: %d entries rebuilt from the log%s", *place, one.reason, made, said)
    said = "store %s: %d queues were damaged: %d entries rebuilt from the log, %d messages lost"
    _log.warning(said, root, len(broken), made_all, lost_all)


def _log_reentered(root: Path, broken: list[_Broken], counts: dict[ConsumeQueueBase, int]) -> None:
    """Log the repairs. Omit queues that only lack messages older than the log, such as the queues of a slave."""
    made_all = lost_all = lines = 0
    for one in broken:
        queue = one.queue
        made = max(0, queue.max_offset - queue.min_offset - counts[queue])
        lost = 0 if queue.queue.files else queue.next_offset
        made_all, lost_all = made_all + made, lost_all + lost
        if made or lost:
            lines += 1
            if lines <= _LOG_LINES_MAX:
                lack = f"; the log has none of its messages, the next one is {lost}" if lost else ""
                place = queue.topic, queue.queue_id
                _log.warning("%s-%d: %s: %d messages entered from the log%s", *place, one.reason, made, lack)
    if lines:
        said = "store %s: %d queues were damaged: %d messages entered from the log, %d messages lost"
        _log.warning(said, root, lines, made_all, lost_all)


class _Entries:
    """A comparison of queue entries with the records of the log."""

    def __init__(self, log: CommitLog, delays_ms: tuple[int, ...]) -> None:
        self._commit_log = log
        self._delays_ms = delays_ms

    def fault(self, queue: ConsumeQueueBase) -> str:
        """Return the fault in the older files of a queue, or an empty text. The last file must be known to be
        unchanged."""
        for first, last in queue.file_bounds()[:-1]:
            for index in first, last:
                if not self.is_right(queue, index, queue.entry(index), is_new=False):
                    return f"entry {index} is not that of its message"
        return ""

    def fault_unnoted(self, queue: ConsumeQueueBase) -> str:
        """Return the fault of a queue that is not in the note, or an empty text if there is no fault."""
        files = queue.queue.files
        if files[-1].start - files[0].start != (len(files) - 1) * queue.queue.file_bytes:
            return "a file is missing"
        last = queue.end_index - 1
        if last >= queue.first_index:
            entry = queue.entry(last)
            if entry[0] >= self._commit_log.queue.max_offset:
                return ""  # after the end of the log: recovery will cut the queue there
            if not self.is_right(queue, last, entry, is_new=False):
                return f"entry {last} is not that of its message"
            if isinstance(queue, ConsumeQueue) and is_address(entry[2]) and queue.ext and queue.unit(entry[2]) is None:
                return "its extension ends too early"
        return self.fault(queue)

    def is_right(self, queue: ConsumeQueueBase, index: int, entry: tuple[Any, ...], *, is_new: bool) -> bool:
        """Return True if an entry matches its record. Return True if the record was deleted and cannot be compared.
        ``is_new``: whether delivery times must match the present delay levels."""
        physical_offset, size = entry[:2]
        if size == BLANK_SIZE or 0 <= physical_offset < self._commit_log.min_offset:
            return True
        try:
            record = decode_record(self._commit_log.slice(physical_offset, size) or b"")
        except RecordCorrupt:
            return False
        if record.physical_offset != physical_offset or record.size != size:
            return False
        number = _number_in(record, queue)
        if queue.topic == SCHEDULE_TOPIC and not is_new:
            return number == index
        arrival = request_of(record, self._delays_ms)
        if isinstance(queue, BatchQueue):
            return tuple(entry[2:6]) == (arrival.tags_code, record.store_timestamp, number, arrival.batch_count)
        if is_address(entry[2]):
            unit = queue.unit(entry[2])
            return number == index and unit is not None and unit.tags_code == arrival.tags_code
        return number == index and entry[2] == arrival.tags_code

    def right_ones(self, queue: ConsumeQueueBase, start: int | None) -> int | None:
        """Return one past the last entry that can stay, or None if no entry can stay.
        ``start``: logical byte at which the first file must begin, if known."""
        files = queue.queue.files
        if not files or (start is not None and files[0].start > start):
            return None
        if isinstance(queue, ConsumeQueue) and queue.ext is not None:
            return None  # entries would get the addresses of other units
        right, at = None, files[0].start
        for file in files:
            if file.start != at:
                break
            at = file.end
            for index in range(file.start // queue.entry_bytes, (file.start + file.wrote) // queue.entry_bytes):
                entry = queue.entry(index)
                if not queue.are_valid([entry]) or not self.is_right(queue, index, entry, is_new=True):
                    return right
                right = right if entry[1] == BLANK_SIZE else index + 1
        return right


def _number_in(record: Record, queue: ConsumeQueueBase) -> int | None:
    """Return the queue offset of a record in ``queue``, or None if ``queue`` does not contain the record. A record is
    in one queue of its topic, and may also be in light queues."""
    if (record.topic, record.queue_id) == (queue.topic, queue.queue_id):
        return record.queue_offset
    return light_numbers(record.topic, record.properties).get(queue.topic) if is_light(queue.topic) else None
