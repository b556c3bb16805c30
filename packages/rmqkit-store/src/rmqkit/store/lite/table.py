"""The lite topics of a store in memory: their names, and a row of numbers for each (about 200 bytes together).

A *slot* is the row of a lite topic. Rows are columns of plain arrays, because a million objects would need a gigabyte.
A slot is reused after its lite topic was forgotten.

===========  ==========================================================================================================
state        meaning
===========  ==========================================================================================================
live         the lite topic has messages, or had messages, and has not expired
dead         it has expired. Its name is remembered while the log has its messages: a new message begins its next life,
             whose numbers continue, so that a reader's stored position never means another message
free         the slot has no lite topic
===========  ==========================================================================================================

A dead lite topic is forgotten when the log has deleted its messages. Its parent remembers only the greatest life of all
forgotten names. A name that is created later begins with a greater one.
"""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Iterator

from rmqkit.protocol.core import LIVE
from rmqkit.store.lite.journal import Kind, LiteNote

__all__ = ["LiteParent", "LiteTable"]

_FREE, _LIVE, _DEAD = int(Kind.FREE), int(Kind.LIVE), int(Kind.DEAD)
assert _LIVE == LIVE, "`Sends.enter_lite` reads the states"


class LiteParent:
    """The lite topics of one parent topic.

    Attributes:
        slots: the slot of each name, live or dead.
        live_count: number of live lite topics.
        expired_count: number of lite topics that expired since the start.
        first_epoch: life of a name that is not in ``slots``.
        due: slots by the minute in which they may expire. Every live slot is in one of them, or in none if the lite
            topics of the parent do not expire.
        ttl_minutes: the lifetime after the newest message; None: no expiry.
    """

    __slots__ = ("due", "expired_count", "first_epoch", "live_count", "name", "number", "slots", "ttl_minutes")

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.slots: dict[str, int] = {}
        self.live_count = 0
        self.expired_count = 0
        self.first_epoch = 1
        self.due: dict[int, array[int]] = {}
        self.ttl_minutes: int | None = None


class LiteTable:
    """All lite topics of a store.

    Attributes:
        parents: the parents by name.
        names: the lite topic's own name, by slot.
        states, tails, firsts, nexts, ends, epochs, seconds, born: the columns, by slot: the state, the index of the
            newest entry (-1 without one), the first number of this life, the number of the next put, one past the
            number of the newest readable message, the life, the store time of the newest message in s, and the
            physical offset before which no record belongs to this name, or to its present life.
        changed: slots whose row is not in the journal.
        generation: a number that changes when a slot gets another name, another life, or dies.
    """

    def __init__(self) -> None:
        self.parents: dict[str, LiteParent] = {}
        self.names: list[str] = []
        self.states = array("B")
        self.tails = array("q")
        self.firsts = array("q")
        self.nexts = array("q")
        self.ends = array("q")
        self.epochs = array("I")
        self.seconds = array("I")
        self.born = array("q")
        self.changed: set[int] = set()
        self.generation = 0
        self.floors: set[str] = set()
        self._parent_numbers = array("H")
        self._parents: list[LiteParent] = []
        self._free: deque[int] = deque()

    def __len__(self) -> int:
        return len(self.names) - len(self._free)

    @property
    def live_count(self) -> int:
        """Number of live lite topics."""
        return sum(parent.live_count for parent in self._parents)

    def parent(self, name: str) -> LiteParent:
        """Return a parent. Create it if it is not known."""
        found = self.parents.get(name)
        if found is None:
            found = self.parents[name] = LiteParent(name, len(self._parents))
            self._parents.append(found)
        return found

    def parent_of(self, slot: int) -> LiteParent:
        return self._parents[self._parent_numbers[slot]]

    def find(self, parent: str, name: str) -> int | None:
        """Return the slot of a lite topic, live or dead, or None."""
        known = self.parents.get(parent)
        return None if known is None else known.slots.get(name)

    def is_live(self, slot: int) -> bool:
        return self.states[slot] == _LIVE

    def add(self, parent: LiteParent, name: str, *, epoch: int, first: int, born: int) -> int:
        """Add a lite topic whose next message has the number ``first``. Return its slot."""
        assert name not in parent.slots, "a name has one slot"
        slot = self._free.popleft() if self._free else self._grow()
        self.names[slot] = name
        self._parent_numbers[slot] = parent.number
        self.states[slot] = _LIVE
        self.tails[slot] = -1
        self.firsts[slot] = self.nexts[slot] = self.ends[slot] = first
        self.epochs[slot] = epoch
        self.seconds[slot] = 0
        self.born[slot] = born
        parent.slots[name] = slot
        parent.live_count += 1
        self.changed.add(slot)
        return slot

    def _grow(self) -> int:
        self.names.append("")
        for column in (self.tails, self.firsts, self.nexts, self.ends, self.born):
            column.append(-1)
        for small in (self.states, self.epochs, self.seconds, self._parent_numbers):
            small.append(0)
        return len(self.names) - 1

    def revive(self, slot: int, *, epoch: int, first: int, born: int) -> None:
        """Begin another life of a lite topic with the number ``first``. ``born``: the physical offset of its first
        record, or an offset before it after all records of earlier lives."""
        assert epoch > self.epochs[slot], "lives are numbered in ascending order"
        self.generation += 1
        if self.states[slot] == _DEAD:
            self.parent_of(slot).live_count += 1
        self.states[slot] = _LIVE
        self.epochs[slot] = epoch
        self.firsts[slot] = first
        self.tails[slot] = -1
        self.ends[slot] = first
        self.nexts[slot] = max(first, self.nexts[slot])
        self.born[slot] = max(born, self.born[slot])
        self.changed.add(slot)

    def kill(self, slot: int, end: int) -> None:
        """Mark a live lite topic as dead: it has no messages, and its next message has a number of its next life.
        ``end``: physical end of its newest message. Records before it do not belong to the next life."""
        assert self.states[slot] == _LIVE, "only a live lite topic expires"
        self.generation += 1
        parent = self.parent_of(slot)
        self.states[slot] = _DEAD
        parent.live_count -= 1
        parent.expired_count += 1
        self.firsts[slot] = self.ends[slot] = self.nexts[slot]
        self.born[slot] = max(end, self.born[slot])
        self.changed.add(slot)

    def forget(self, slot: int, *, had_messages: bool = True) -> None:
        """Forget a lite topic. If it had messages, a later topic with its name begins with a greater life."""
        self.generation += 1
        parent = self.parent_of(slot)
        parent.live_count -= self.states[slot] == _LIVE
        if had_messages and self.epochs[slot] >= parent.first_epoch:
            parent.first_epoch = self.epochs[slot] + 1
            self.floors.add(parent.name)
        del parent.slots[self.names[slot]]
        self.names[slot] = ""
        self.states[slot] = _FREE
        self.tails[slot] = -1
        self._free.append(slot)
        self.changed.add(slot)

    # ---- the journal

    def note(self, slot: int) -> LiteNote:
        """Return the journal's record of a slot."""
        kind = Kind(self.states[slot])
        name = "" if kind is Kind.FREE else f"{self.parent_of(slot).name}${self.names[slot]}"
        row = self.epochs[slot], self.firsts[slot], self.nexts[slot], self.born[slot], self.seconds[slot] * 1000
        return LiteNote(kind, slot, *row, name)

    def floor(self, parent: LiteParent) -> LiteNote:
        """Return the journal's record of the first life of new names of a parent."""
        return LiteNote(Kind.FLOOR, 0, parent.first_epoch, 0, 0, 0, 0, parent.name)

    def take_changes(self, count_max: int) -> list[LiteNote]:
        """Return up to ``count_max`` records of slots that the journal lacks, and all records of parents. The caller
        writes them, or calls `put_back`."""
        notes = [self.floor(self.parents[name]) for name in self.floors]
        self.floors.clear()
        slots = list(itertools.islice(self.changed, count_max))
        self.changed.difference_update(slots)
        return [*notes, *(self.note(slot) for slot in slots)]

    def put_back(self, notes: list[LiteNote]) -> None:
        """Undo `take_changes`, because the records could not be written."""
        self.changed.update(note.slot for note in notes if note.kind is not Kind.FLOOR)
        self.floors.update(note.name for note in notes if note.kind is Kind.FLOOR)

    def all_notes(self) -> Iterator[LiteNote]:
        """Yield the records of all lite topics and parents."""
        for parent in self._parents:
            if parent.first_epoch > 1:
                yield self.floor(parent)
        for slot, state in enumerate(self.states):
            if state != _FREE:
                yield self.note(slot)

    def restore(self, note: LiteNote) -> None:
        """Apply a record of the journal. The entries determine ``tails`` and ``ends``."""
        if note.kind is Kind.FLOOR:
            self.parent(note.name).first_epoch = note.epoch
            return
        slot = note.slot
        self.grow_to(slot + 1)
        if self.states[slot] != _FREE:
            before = self.parent_of(slot)
            if before.slots.get(self.names[slot]) == slot:  # a save may write a freed slot after the name's new one
                del before.slots[self.names[slot]]
            before.live_count -= self.states[slot] == _LIVE
        self.states[slot] = note.kind
        self.tails[slot] = -1
        if note.kind is Kind.FREE:
            self.names[slot] = ""
            return
        parent_name, _, name = note.name.partition("$")
        parent = self.parent(parent_name)
        self.names[slot] = name
        self._parent_numbers[slot] = parent.number
        parent.slots[name] = slot
        parent.live_count += note.kind is Kind.LIVE
        self.epochs[slot] = note.epoch
        self.firsts[slot] = note.first
        self.nexts[slot], self.ends[slot] = note.next, note.first
        self.seconds[slot] = note.store_timestamp // 1000
        self.born[slot] = note.born

    def restore_live(self, slot: int, parent_name: str, name: str, *, epoch: int, first: int, born: int) -> None:
        """Add a lite topic that only the entries know, at its slot."""
        self.restore(LiteNote(Kind.LIVE, slot, epoch, first, first, born, 0, f"{parent_name}${name}"))
        self.changed.add(slot)

    def grow_to(self, count: int) -> None:
        """Add free slots up to a number of slots."""
        while len(self.names) < count:
            self._grow()

    def finish(self) -> None:
        """Set the end of the lite topics without messages to the number of their next message."""
        for slot, state in enumerate(self.states):
            if state and self.tails[slot] < 0:
                self.ends[slot] = self.firsts[slot] = self.nexts[slot]

    def restored(self) -> None:
        """Find the free slots after the last `restore`."""
        self._free = deque(slot for slot, state in enumerate(self.states) if state == _FREE)
