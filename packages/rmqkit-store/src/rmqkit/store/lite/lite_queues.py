"""The light queues of all lite topics of a store, and their life (RIP-83 in RocketMQ 5.5).

A lite topic is a name below a parent topic, with one ordered queue: the light queue ``%LMQ%$parent$lite``. There may be
a million of them, so they have no files of their own:

=============  ======================================================================================
`entries`      the entries of all light queues, in the order of the log
`table`        the names, and a row of numbers for each, in memory
`journal`      names, lives and numbers on the disk
`LiteQueues`   joins them: puts, dispatch, reads, expiry, recovery
=============  ======================================================================================

Everything except lives and expired names is derived from the log: a record has the property ``__LITE_TOPIC``, its light
queue in ``INNER_MULTI_DISPATCH`` and its number there in ``INNER_MULTI_QUEUE_OFFSET``. A message of a second or later
life has the property ``__LITE_EPOCH``, so that a slave and a rebuild know the same lives. A record that names a light
queue of another parent is in no lite topic: Apache's dead letters do, and would be delivered again.

Apache's brokers store each of these queues as a folder with a file. Such folders are taken over when the store is
opened, and removed at the next clean stop. Use this module only in the owner thread of the store; flush threads call
``entries.sync``. Source: lite.md §5, §9.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from rmqkit.protocol.core import Sends
from rmqkit.protocol.names import lite_queue, split_lite_queue
from rmqkit.protocol.properties import LITE_EPOCH, LITE_TOPIC, find_property
from rmqkit.protocol.record import Record, decode_record
from rmqkit.store.dispatch_request import DispatchRequest
from rmqkit.store.files import make_directory, read_note, write_note
from rmqkit.store.lite.entries import LITE_ENTRY, LiteEntries, LiteEntry
from rmqkit.store.lite.journal import Kind, LiteJournal
from rmqkit.store.lite.run import LiteRun
from rmqkit.store.lite.table import LiteParent, LiteTable
from rmqkit.store.log.commit_log import CommitLog
from rmqkit.store.log.scan import has_numpy
from rmqkit.store.queues.base import ConsumeQueueBase
from rmqkit.store.queues.queue_ext import ExtUnit

__all__ = ["EPOCH_MARK", "LITE_MARK", "LiteQueue", "LiteQueues"]

_log = logging.getLogger(__name__)
LITE_MARK = f"{LITE_TOPIC}\x01".encode()
EPOCH_MARK = f"{LITE_EPOCH}\x01".encode()
_EPOCH_NAME = LITE_EPOCH.encode()
_pack = LITE_ENTRY.pack
_MINUTE_MS = 60_000
_COMPACTED_AT = 1024
_RECENT_COUNT = 8192
"""Number of recent entries whose number and jump are cached."""
_NO_RECENT = array("q", [-1, -1, -1]) * _RECENT_COUNT
_SCANNED_AT_ONCE = 32
"""Number of entries that a scan reads together: as many as a pull usually returns."""
_SAVED_MAX = 5000
"""Maximum number of rows that one `LiteQueues.save` writes, which takes some milliseconds."""


class LiteQueue:
    """The light queue of one lite topic, for one read. It has the interface of a `ConsumeQueue` for reads."""

    __slots__ = ("_low", "_number", "_queues", "slot", "topic")

    entry_bytes = LITE_ENTRY.size
    queue_id = 0

    def __init__(self, queues: LiteQueues, slot: int, topic: str) -> None:
        self._queues = queues
        self._low: int | None = None
        self._number = queues.table.nexts[slot]
        self.slot = slot
        self.topic = topic

    def __hash__(self) -> int:
        return hash(self.topic)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LiteQueue) and other.topic == self.topic

    @property
    def topic_utf8(self) -> bytes:
        return self.topic.encode()

    @property
    def max_offset(self) -> int:
        """One past the number of the last readable message."""
        return self._queues.table.ends[self.slot]

    @property
    def min_offset(self) -> int:
        """The number of the first message that the log still has."""
        if self._low is None:
            self._low = self._queues.min_offset(self.slot)
        return self._low

    @property
    def next_offset(self) -> int:
        """The number of the next put, when this object was made."""
        return self._number

    def put(self, *, is_stored: bool) -> None:
        """Note the end of a put with the number `next_offset`, or forget the lite topic if `LiteQueues.obtain` created
        it and the put failed."""
        table, slot = self._queues.table, self.slot
        if is_stored:
            table.nexts[slot] = max(self._number + 1, table.nexts[slot])
        elif not table.nexts[slot]:
            table.forget(slot, had_messages=False)

    @property
    def epoch(self) -> int:
        """The life of the lite topic."""
        return self._queues.table.epochs[self.slot]

    def entries(self, number: int, count_max: int) -> list[LiteEntry]:
        """Return up to ``count_max`` entries from a number on, oldest first."""
        table, entries = self._queues.table, self._queues.entries
        last = min(number + count_max, table.ends[self.slot]) - 1
        if last < number:
            return []  # without a read: a pull usually returns the newest messages, and looks for more
        found: list[LiteEntry] = []
        at = entries.first_where(table.tails[self.slot], lambda one: one.number >= last)
        while at is not None and at.number >= number:
            found.append(at)
            at = entries.at(at.previous)
        found.reverse()
        return found

    def scan(self, queue_offset: int, bytes_max: int) -> Iterator[tuple[int, int, int, int, int]] | None:
        """Iterate over entries as `ConsumeQueue.scan` does. Return None if there is none."""
        first = self.entries(queue_offset, _SCANNED_AT_ONCE)
        return self._rows(first, queue_offset + -(-bytes_max // self.entry_bytes)) if first else None

    def _rows(self, found: list[LiteEntry], end: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield the rows of entries, and of those after them up to a number. Entries are read back from the last one,
        so a pull must not read many more than it returns."""
        while found:
            for one in found:
                yield one.physical_offset, one.size, one.tags_code, one.number + 1, 1
            following = found[-1].number + 1
            found = self.entries(following, min(_SCANNED_AT_ONCE, end - following)) if following < end else []

    def place(self, queue_offset: int) -> tuple[int, int]:
        """Return physicalOffset and size of a message's record, or (-1, 0) without a record."""
        found = self.entries(queue_offset, 1)
        return (found[0].physical_offset, found[0].size) if found else (-1, 0)

    def next_file_offset(self, queue_offset: int) -> int:
        """Return the number after a message that cannot be found."""
        return max(queue_offset + 1, self.min_offset)

    def offset_by_time(self, timestamp_ms: int, *, upper: bool) -> int:
        """Return the number of the first message stored at or after a time. With ``upper``, return the number of the
        last message stored at or before the time."""
        entries, tail = self._queues.entries, self._queues.table.tails[self.slot]
        wanted = timestamp_ms + 1 if upper else timestamp_ms
        found = entries.first_where(tail, lambda one: one.store_timestamp >= wanted)
        number = self.max_offset if found is None else found.number
        return max(self.min_offset, number - 1 if upper else number)

    def unit(self, stored: int) -> ExtUnit | None:
        return None

    def tags_code(self, stored: int) -> int | None:
        return stored


class LiteQueues:
    """The light queues of all lite topics.

    Args:
        root: the store.
        file_bytes: size of a file of entries.
        dirty: the queues with unflushed entries, in the order of their first one.
        deleted_ends: by topic, the physical offset before which its records belong to a deleted topic.

    Attributes:
        on_arrival: called with parent and lite topic of the messages that became readable.
        on_removed: called with the slots of lite topics that expired or were deleted, before their rows are reused.
    """

    def __init__(
        self,
        root: Path,
        log: CommitLog,
        file_bytes: int,
        dirty: dict[ConsumeQueueBase, None],
        deleted_ends: Mapping[str, int],
    ) -> None:
        self._log = log
        self._deleted_ends = deleted_ends
        self._journal = LiteJournal(root / "lite" / "topics")
        self._is_indexed = True
        self._note_path, self._note = root / "lite" / "end", _Note()
        self._dead: deque[int] = deque()
        # The cells of `Sends.lite_entries`: reading recent entries from the file would cost most of a put.
        self._recent = _NO_RECENT[:]
        self._noted_slots = 0
        self.entries = LiteEntries(root / "lite" / "entries" / "0", file_bytes, dirty)
        self.table = LiteTable()
        self.on_arrival: Callable[[Iterable[tuple[str, str]]], None] | None = None
        self.on_removed: Callable[[Sequence[int]], None] | None = None

    # ---- finding

    def queue(self, topic: str, queue_id: int = 0) -> LiteQueue | None:
        """Return the queue of a light queue's name, or None if the name is no lite topic here."""
        place = split_lite_queue(topic) if queue_id == 0 else None
        slot = None if place is None else self.table.find(*place)
        return None if slot is None else LiteQueue(self, slot, topic)

    def of(self, slot: int) -> LiteQueue:
        """Return the queue of a slot."""
        return LiteQueue(self, slot, lite_queue(self.table.parent_of(slot).name, self.table.names[slot]))

    def obtain(self, topic: str) -> LiteQueue:
        """Return the queue for a put to a light queue's name. Create the lite topic, or begin its next life."""
        place = split_lite_queue(topic)
        assert place is not None, "the caller checked the name"
        table, (parent_name, name) = self.table, place
        parent = table.parent(parent_name)
        slot = parent.slots.get(name)
        if slot is None:
            slot = table.add(parent, name, epoch=parent.first_epoch, first=0, born=self._log.max_offset)
        elif not table.is_live(slot):
            table.revive(slot, epoch=table.epochs[slot] + 1, first=table.nexts[slot], born=self._log.max_offset)
        return LiteQueue(self, slot, topic)

    def assign(self, sends: Sends, parents: list[str], count_max: int) -> LiteRun | None:
        """Assign the numbers of messages that are put together. Create missing lite topics, up to ``count_max``, and
        begin the next life of expired ones. Return None, with nothing created, if there are too many. After the put,
        call `give_up` if the messages were not stored. ``parents``: `Sends.lite_parents` of the messages."""
        table, run = self.table, LiteRun(sends)
        slots = [(table.parents.get(name) or table.parent(name)).slots for name in parents]
        # The core cannot read columns without rows.
        if not table.names or not sends.enter_lite(slots, table.states, table.nexts, table.epochs):
            if not self._create(run, count_max):
                return None
            is_entered = sends.enter_lite(slots, table.states, table.nexts, table.epochs)
            assert is_entered, "all lite topics live"
        run.generation = table.generation
        return run

    def _create(self, run: LiteRun, count_max: int) -> bool:
        """Create the missing lite topics of a run, and begin the next life of expired ones. Return False, with nothing
        created, if there are too many."""
        table, born = self.table, self._log.max_offset
        for parent_name, name in run.lite_topics():
            parent = table.parent(parent_name)
            slot = parent.slots.get(name)
            if slot is None:
                if len(table) >= count_max:
                    self.give_up(run)
                    return False
                run.created.append(table.add(parent, name, epoch=parent.first_epoch, first=0, born=born))
            elif not table.is_live(slot):
                table.revive(slot, epoch=table.epochs[slot] + 1, first=table.nexts[slot], born=born)
        return True

    def give_up(self, run: LiteRun) -> None:
        """Forget the lite topics that a run created, because its messages were not stored."""
        for slot in run.created:
            self.table.forget(slot, had_messages=False)

    def min_offset(self, slot: int) -> int:
        """Return the number of the first message of a lite topic that the log still has."""
        table, low = self.table, self._log.min_offset
        first, tail = table.firsts[slot], table.tails[slot]
        if tail < 0 or not table.is_live(slot):
            return table.ends[slot]
        if low <= 0 and not self.entries.first_index:
            return first
        found = self.entries.first_where(tail, lambda one: one.physical_offset >= low)
        return table.ends[slot] if found is None else max(first, found.number)

    # ---- dispatch

    def enter(self, lights: Sequence[DispatchRequest]) -> list[DispatchRequest]:
        """Enter light copies of records, in the order of the log. Records that are entered already are skipped.
        Return the entered copies. Raises OSError: a write failed; nothing was entered, and the call can be repeated."""
        if not self._is_indexed:
            self.index()
        known_end = self.entries.max_physical_offset
        batch = _Batch(self.entries)
        entered: list[DispatchRequest] = []
        rows: dict[int, tuple[int, ...]] = {}
        for one in lights:
            place = split_lite_queue(one.topic)
            assert place is not None, "the caller passes lite topics"
            if one.physical_offset + one.size <= known_end:
                continue
            if one.physical_offset < self._deleted_ends.get(place[0], -1):
                continue
            slot = self._slot_for(one, *place, rows)
            if slot is None:
                continue
            batch.add(self.table, slot, one)
            entered.append(one)
        if entered:
            last = entered[-1]
            try:
                self.entries.append_all(b"".join(batch.packed), last.physical_offset + last.size)
            except OSError:
                for slot, row in rows.items():
                    self._restore_row(slot, row)
                raise
        return entered

    def enter_run(self, run: LiteRun, start: int, end: int) -> bool:
        """Enter the messages of a run in their light queues, with one write. Their records are between two physical
        offsets. Return False, with nothing entered, if they have to be entered with `enter`: some are entered already,
        or the lite topics have changed since the put. Raises OSError: a write failed; nothing was entered."""
        table, entries, sends = self.table, self.entries, run.sends
        if not self._is_indexed or run.generation != table.generation or entries.max_physical_offset > start:
            return False
        index = entries.max_offset
        try:
            entries.append_all(sends.lite_entries(index, table.tails, self._recent, entries.links), end)
        except OSError:
            self._recent[:] = _NO_RECENT  # other entries will get these indexes
            raise
        for slot in sends.entered_lite(index, table.tails, table.firsts, table.ends, table.seconds):
            parent = table.parent_of(slot)
            if parent.ttl_minutes is not None:
                self._plan(parent, slot)
        return True

    def _slot_for(
        self, one: DispatchRequest, parent_name: str, name: str, rows: dict[int, tuple[int, ...]]
    ) -> int | None:
        """Return the slot for a record, in the right life; None for a record of an earlier life. ``rows``: gets the row
        before its first change."""
        table = self.table
        parent = table.parent(parent_name)
        epoch = _epoch_of(one.properties)
        slot = parent.slots.get(name)
        if slot is not None and one.physical_offset < table.born[slot]:
            return None  # a replay reads messages of a life that is over
        if slot is None:
            epoch = max(epoch, parent.first_epoch)
            slot = table.add(parent, name, epoch=epoch, first=one.queue_offset, born=one.physical_offset)
        rows.setdefault(slot, self._row(slot))
        if epoch > table.epochs[slot]:
            table.revive(slot, epoch=epoch, first=one.queue_offset, born=one.physical_offset)
        elif one.queue_offset < table.ends[slot] or not table.is_live(slot):
            # Apache's brokers number the messages from 0 again after an expiry.
            epoch = table.epochs[slot] + 1
            table.revive(slot, epoch=epoch, first=one.queue_offset, born=one.physical_offset)
        if table.tails[slot] < 0:
            table.firsts[slot] = one.queue_offset
            table.seconds[slot] = max(0, one.store_timestamp // 1000)
            if parent.ttl_minutes is not None:
                self._plan(parent, slot)
        return slot

    def _row(self, slot: int) -> tuple[int, ...]:
        table = self.table
        return table.tails[slot], table.ends[slot], table.nexts[slot], table.seconds[slot]

    def _restore_row(self, slot: int, row: tuple[int, ...]) -> None:
        table = self.table
        table.tails[slot], table.ends[slot], table.nexts[slot], table.seconds[slot] = row

    # ---- expiry

    def set_lifetime(self, parent_name: str, minutes: int | None) -> None:
        """Set the lifetime of the lite topics of a parent after their newest messages. None: they do not expire."""
        parent = self.table.parent(parent_name) if minutes is not None else self.table.parents.get(parent_name)
        if parent is not None and parent.ttl_minutes != minutes:
            parent.ttl_minutes = minutes
            parent.due = {}
            for slot in parent.slots.values() if minutes is not None else ():
                if self.table.is_live(slot):
                    self._plan(parent, slot)

    def _plan(self, parent: LiteParent, slot: int) -> None:
        assert parent.ttl_minutes is not None, "the lite topics of the parent expire"
        minute = self.table.seconds[slot] // 60 + parent.ttl_minutes + 1
        parent.due.setdefault(minute, array("I")).append(slot)

    def expire(self, now_ms: int) -> Iterator[int]:
        """Remove lite topics whose newest message is older than their lifetime, and forget expired ones whose messages
        the log has deleted. Yield each slot: the caller may continue later. Consumers do not matter."""
        table = self.table
        for parent in list(table.parents.values()):
            for minute in sorted(one for one in parent.due if one * _MINUTE_MS <= now_ms):
                for slot in parent.due.pop(minute):
                    if not table.is_live(slot) or table.parent_of(slot) is not parent or parent.ttl_minutes is None:
                        continue
                    is_waiting = table.nexts[slot] > table.ends[slot]  # a message is stored, but not yet readable
                    if is_waiting or table.seconds[slot] * 1000 + parent.ttl_minutes * _MINUTE_MS >= now_ms:
                        self._plan(parent, slot)
                    else:
                        self.remove(slot)
                        yield slot
        first = self._log.min_offset
        while self._dead and table.born[self._dead[0]] <= first:
            slot = self._dead.popleft()
            if table.states[slot] and not table.is_live(slot):
                table.forget(slot)
                yield slot

    def remove(self, slot: int) -> None:
        """Remove the messages of a lite topic. Its next message begins its next life."""
        if self.on_removed is not None:
            self.on_removed((slot,))
        entry = self.entries.at(self.table.tails[slot])
        self.table.kill(slot, 0 if entry is None else entry.physical_offset + entry.size)
        self._dead.append(slot)

    def drop(self, slot: int) -> None:
        """Remove the messages of a lite topic like `remove`, and note it on the disk. Raises OSError: the write failed;
        the messages are removed, and the next `save` notes it."""
        self.remove(slot)
        try:
            self._journal.append([self.table.note(slot)], is_durable=True)
        finally:
            self.table.changed.add(slot)

    def delete_parent(self, parent_name: str) -> None:
        """Forget all lite topics of a parent."""
        parent = self.table.parents.get(parent_name)
        slots = [] if parent is None else list(parent.slots.values())
        if slots and self.on_removed is not None:
            self.on_removed(slots)
        for slot in slots:
            self.table.forget(slot)

    # ---- opening, flushing, closing

    def check(self, *, clean: bool = True) -> None:
        """Check the files without changing anything. Raises StoreMismatch: a file does not match the settings."""
        self.entries.check(clean=clean)

    def load(self) -> None:
        """Load the files. Raises OSError: a file cannot be read."""
        found = read_note(self._note_path, _Note, "lost entries of lite topics are not detected")
        self._note = found or _Note()
        self.entries.load()
        for note in self._journal.load():
            self.table.restore(note)
        self.table.restored()
        self._is_indexed = False

    def recover(self, *, clean: bool) -> None:
        """Find the end of the entries."""
        self.entries.recover(clean=clean)
        self.entries.close()
        self._is_indexed = False

    def truncate_for_replay(self, start: int) -> None:
        """Drop the entries that a replay of the log from a physical offset on will create again."""
        self.entries.truncate_for_replay(start, self._is_record)
        self.entries.close()
        self._is_indexed = False

    def _is_record(self, queue: ConsumeQueueBase, index: int, entry: tuple[Any, ...]) -> bool:
        return entry[0] < self._log.min_offset or self._record(entry[0], entry[1]) is not None

    def truncate_physical(self, end: int) -> None:
        """Drop the entries of all records at or after a physical offset."""
        if self.entries.max_physical_offset > end:
            self.entries.truncate_physical(end)
            self._is_indexed = False

    def index(self) -> None:
        """Find the newest entry of each lite topic, and add lite topics that are only in the entries."""
        self._is_indexed = True
        self._recent[:] = _NO_RECENT
        table = self.table
        tails = _newest_entries(self.entries)
        table.grow_to(len(tails))
        for slot, state in enumerate(table.states):
            if state:
                table.tails[slot], table.ends[slot] = -1, table.firsts[slot]
        for slot, index in enumerate(tails):
            entry = self.entries.at(index) if index >= 0 else None
            if entry is not None:
                self._take_tail(slot, index, entry)
        table.restored()

    def _take_tail(self, slot: int, index: int, entry: LiteEntry) -> None:
        """Set the row of a slot from its newest entry."""
        table = self.table
        if not table.states[slot]:
            record = self._record(entry.physical_offset, entry.size)
            place = None if record is None else _lite_name(record)
            if place is None or table.find(*place) is not None:
                return  # the slot was freed, or its record is gone
            oldest = self.entries.first_where(index, lambda one: True) or entry
            table.restore_live(slot, *place, epoch=entry.epoch, first=oldest.number, born=oldest.physical_offset)
        elif entry.physical_offset < table.born[slot]:
            return  # an entry of the slot's former name
        if entry.epoch > table.epochs[slot]:
            oldest = self.entries.first_where(index, lambda one: True) or entry
            table.revive(slot, epoch=entry.epoch, first=oldest.number, born=oldest.physical_offset)
        end = entry.number + 1
        table.tails[slot] = index
        table.nexts[slot] = max(end, table.nexts[slot])
        table.seconds[slot] = max(entry.store_timestamp // 1000, table.seconds[slot])
        table.ends[slot] = end if table.is_live(slot) else table.nexts[slot]
        if not table.is_live(slot):
            table.firsts[slot] = table.nexts[slot]

    def _record(self, physical_offset: int, size: int) -> Record | None:
        try:
            record = decode_record(self._log.slice(physical_offset, size) or b"")
        except ValueError:
            return None
        return record if record.physical_offset == physical_offset else None

    def finish_recovery(self, deleted: Mapping[str, int]) -> None:
        """Make the table agree with the entries."""
        if not self._is_indexed:
            self.index()
        for parent in deleted:
            known = self.table.parents.get(parent)
            if known is not None:
                stale = [s for s in known.slots.values() if self._is_before(s, deleted[parent])]
                for slot in stale:
                    self.table.forget(slot)
        self.table.finish()
        self._dead = deque(slot for slot, state in enumerate(self.table.states) if state == Kind.DEAD)
        self.entries.next_offset = self.entries.max_offset
        self.entries.correct_min_offset(0)

    def _is_before(self, slot: int, end: int) -> bool:
        entry = self.entries.at(self.table.tails[slot])
        return entry is None or entry.physical_offset < end

    @property
    def lacks_entries(self) -> bool:
        """Return True if entries are missing that were on the disk at the last start or stop."""
        return self.entries.end_index < self._note.end

    def note_end(self) -> None:
        """Note the end of the entries, which are on the disk. Raises OSError: the note cannot be written."""
        if self.entries.end_index != self._note.end:
            make_directory(self._note_path.parent)
            write_note(self._note_path, _Note(self.entries.end_index))
            self._note.end = self.entries.end_index

    def take_over(self, ends: Mapping[str, int]) -> None:
        """Make numbers continue after those in Apache's folders. ``ends``: the end of each folder's queue."""
        for topic, end in ends.items():
            place = split_lite_queue(topic)
            if place is not None and end:
                queue = self.queue(topic) or self.obtain(topic)
                if queue.max_offset < end:
                    table = self.table
                    table.nexts[queue.slot] = table.ends[queue.slot] = table.firsts[queue.slot] = end
                    table.changed.add(queue.slot)

    def save(self, *, is_durable: bool = False) -> bool:
        """Write changed rows into the journal, at most `_SAVED_MAX`. Return True if rows remain. ``is_durable``: the
        whole journal is on the disk when this returns. Raises OSError: the write failed."""
        notes = self.table.take_changes(_SAVED_MAX)
        try:
            self._journal.append(notes, is_durable=is_durable)
        except OSError:
            self.table.put_back(notes)
            raise
        return bool(self.table.changed)

    def _save_all(self) -> None:
        while self.save():
            pass
        self.save(is_durable=True)

    def drop_expired(self, min_physical_offset: int) -> int:
        """Delete files whose messages the log has deleted. Return their number. Raises OSError: a write failed."""
        limit = self._first_kept(min_physical_offset)
        if limit <= self.entries.first_index:
            return 0
        # The journal must have the rows first that are derived from these files. A call writes some thousands of them,
        # so that it takes some milliseconds; the files are deleted when all of them are written.
        table, first = self.table, self._noted_slots
        self._noted_slots = min(first + _SAVED_MAX, len(table.names))
        slots = range(first, self._noted_slots)
        table.changed.update(s for s in slots if 0 <= table.tails[s] < limit and table.states[s])
        if self._noted_slots < len(table.names):
            self.save()
            return 0
        self._save_all()
        self._noted_slots = 0
        count = self.entries.drop_expired(min_physical_offset)
        self.entries.correct_min_offset(min_physical_offset)
        self.entries.close_idle()
        return count

    def _first_kept(self, min_physical_offset: int) -> int:
        """Return the index of the first entry of the first file that is not deleted."""
        first = self.entries.first_index
        for start, file, wrote in self.entries.chunks():
            first = start
            if file.wrote < file.size or self.entries.entry(start + wrote // LITE_ENTRY.size - 1)[0] >= (
                min_physical_offset
            ):
                break
        return first

    def close(self, *, is_complete: bool = False) -> None:
        """Close the files. ``is_complete``: whether everything is on the disk; then the journal is written."""
        if is_complete:
            used = len(self.table)
            if self._journal.count > 2 * used + _COMPACTED_AT:
                self._journal.rewrite(self.table.all_notes())
                self.table.changed.clear()
                self.table.floors.clear()
            else:
                self._save_all()
            self.note_end()
        self.entries.close()

    def destroy_entries(self) -> None:
        """Delete all entries, because they have to be entered again, or the log no longer has the records."""
        self.entries.destroy()
        self.entries.resume()
        self.entries.max_physical_offset = -1
        self._is_indexed = False

    def destroy_all(self) -> None:
        """Delete everything, because the log no longer has the records."""
        self.destroy_entries()
        for parent in list(self.table.parents.values()):
            for slot in list(parent.slots.values()):
                self.table.forget(slot)


class _Note(Struct):
    """The note of the index one past the last entry, at a start or stop."""

    end: int = 0


class _Batch:
    """Entries of one dispatch that are not written yet."""

    def __init__(self, entries: LiteEntries) -> None:
        self._entries = entries
        self._made: dict[int, LiteEntry] = {}
        self.packed: list[bytes] = []

    def at(self, index: int) -> LiteEntry | None:
        return self._made.get(index) or self._entries.at(index)

    def add(self, table: LiteTable, slot: int, one: DispatchRequest) -> None:
        """Make the entry of a record, and move the end of its queue."""
        index = self._entries.max_offset + len(self.packed)
        previous = table.tails[slot]
        jump = self._jump(previous)
        fields = one.physical_offset, one.size, slot, one.queue_offset, table.epochs[slot], one.store_timestamp
        entry = LiteEntry(*fields, previous, jump, one.tags_code)
        self._made[index] = entry
        self.packed.append(_pack(*fields, previous, jump, one.tags_code))
        table.tails[slot] = index
        table.ends[slot] = one.queue_offset + 1
        table.nexts[slot] = max(one.queue_offset + 1, table.nexts[slot])
        table.seconds[slot] = max(0, one.store_timestamp // 1000)

    def _jump(self, previous: int) -> int:
        """Return the jump of an entry after the entry at ``previous``."""
        before = self.at(previous) if previous >= 0 else None
        target = None if before is None else self.at(before.jump)
        further = None if target is None else self.at(target.jump)
        if before is None or target is None or further is None:
            return previous
        is_even = before.number - target.number == target.number - further.number
        return target.jump if is_even else previous


def _epoch_of(properties: bytes) -> int:
    """Return the life of a lite topic to which a record belongs."""
    value = find_property(properties, _EPOCH_NAME) if EPOCH_MARK in properties else None
    return int(value) if value is not None and value.isdigit() and len(value) < 10 else 1


def _lite_name(record: Record) -> tuple[str, str] | None:
    """Return parent and lite topic of a record."""
    name = find_property(record.properties, LITE_TOPIC.encode())
    return None if name is None else (record.topic, name.decode("utf-8", "replace"))


def _newest_entries(entries: LiteEntries) -> array[int]:
    """Return the index of the newest entry of each slot, -1 for a slot without one."""
    tails = array("q")
    for first, file, wrote in entries.chunks():
        if has_numpy():
            import numpy as np

            raw = np.frombuffer(file.view[:wrote], np.dtype([("head", "S12"), ("slot", ">u4"), ("rest", "S40")]))
            slots = raw["slot"].astype("i8")
            tails.extend([-1] * (int(slots.max(initial=-1)) + 1 - len(tails)))
            column = np.frombuffer(tails, "i8")
            column[slots] = np.arange(first, first + len(slots))
            del column
        else:
            for index, entry in enumerate(LITE_ENTRY.iter_unpack(file.view[:wrote]), first):
                tails.extend([-1] * (entry[2] + 1 - len(tails)))
                tails[entry[2]] = index
    entries.close()
    return tails
