"""The comparison of the timer wheel with the units of the timer log, at every start and in `rmq store verify`.

=====================================================  =====================================================
found                                                  result
=====================================================  =====================================================
a slot lacks units of its second that are in the log   `Damage.WHEEL`: the wheel is rebuilt from the log
a unit is missing, its chain or the place of its       `Damage.LOG`: both are rebuilt from the timer topic
record is impossible, or a slot refers to a unit of
another second
=====================================================  =====================================================

Only units with a time at or after the checkpoint's read time are checked: earlier units were delivered. In a log with
at most `EXACT_UNITS_MAX` units, every unit is checked. In a longer log, the totals of ``config/timermetrics`` are
compared with the totals of the wheel, and `_SAMPLED_SLOTS` slots with their chains. If these differ, every unit is
checked. A wrong unit that this check misses is found when its second is delivered (`rmqkit.broker.delay.dequeue`).
Source: store.md §18.3 to §18.6.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from rmqkit.protocol.record import BLANK_BYTES
from rmqkit.store.timer.log import DELETE, NONE, UNIT_BYTES, TimerLog, Unit
from rmqkit.store.timer.wheel import SLOT_COUNT, Slot, TimerWheel

__all__ = ["EXACT_UNITS_MAX", "Damage", "Waiting", "check_wheel", "is_long", "looks_sound", "unit_weight", "waiting_of"]

EXACT_UNITS_MAX = 200_000
"""Maximum number of units to check in any case. This takes a fifth of a second on a small machine."""
_SAMPLED_SLOTS = 256
_SAMPLED_UNITS = 64
_END_BYTES = UNIT_BYTES + 2 * BLANK_BYTES
"""Minimum number of remaining bytes in a file that can contain a unit."""


class Damage(enum.Enum):
    """The part of the timer files that must be rebuilt."""

    NONE = enum.auto()
    WHEEL = enum.auto()
    LOG = enum.auto()


@dataclass
class Waiting:
    """The waiting messages according to the units of a log.

    Attributes:
        slots: the slots by time.
        counts: number of messages by the hash of their topic, minus recalled messages.
        samples: one unit for each hash.
        fault: the reason why the log is not credible; empty if it is credible.
    """

    slots: dict[int, Slot] = field(default_factory=dict)
    counts: Counter[int] = field(default_factory=Counter)
    samples: dict[int, Unit] = field(default_factory=dict)
    fault: str = ""

    def add(self, unit: Unit) -> None:
        """Count a unit."""
        self.counts[unit.topic_hash] += unit_weight(unit)
        self.samples[unit.topic_hash] = unit

    @property
    def total(self) -> int:
        """Number of waiting messages."""
        return self.counts.total()


def unit_weight(unit: Unit) -> int:
    """Return the number that a unit adds to the count of its slot."""
    return -1 if unit.magic & DELETE else 1


def is_long(log: TimerLog, end: int) -> bool:
    """Return True if a log has too many units before a position to check all of them."""
    return end - max(log.queue.min_offset, 0) > EXACT_UNITS_MAX * UNIT_BYTES


def waiting_of(log: TimerLog, *, end: int, read_ms: int) -> Waiting:
    """Return the messages that wait for delivery, read from the units of the timer log before position ``end``. A unit
    is the entry of one message in the log. A message waits if it is due at ``read_ms`` or later."""
    waiting = Waiting()
    slots = waiting.slots
    begin = at = max(log.queue.min_offset, 0)
    newest = -1
    for position, unit in log.scan(begin):
        if position >= end:
            break
        if unit.physical_offset <= newest:  # messages are put on the wheel in the order of the commit log
            waiting.fault = f"the unit at {position} is for {unit.physical_offset}, the one before for {newest}"
            return waiting
        newest, at = unit.physical_offset, position + UNIT_BYTES
        time_ms = unit.write_ms + unit.delay_ms
        if time_ms < read_ms:
            continue
        slot = slots.get(time_ms)
        # The first unit of a second refers to no unit, or to a unit that retention deleted. Each later unit refers to
        # its predecessor.
        if unit.previous >= begin if slot is None else unit.previous != slot.last:
            waiting.fault = f"the unit at {position} follows {unit.previous}, not one of its second"
            return waiting
        waiting.add(unit)
        first, pending = (position, 0) if slot is None else (slot.first, slot.pending)
        slots[time_ms] = Slot(time_ms, first, position, pending + unit_weight(unit))
    if end - at >= _END_BYTES:
        waiting.fault = f"there is no unit at {at}, but further ones up to {end}"
    return waiting


def check_wheel(
    wheel: TimerWheel, log: TimerLog, waiting: Waiting, *, end: int, read_ms: int, precision_ms: int
) -> tuple[Damage, str]:
    """Compare a wheel with the waiting messages of the log. Return the damage, and a text about the first
    difference.
    """
    if waiting.fault:
        return Damage.LOG, waiting.fault
    begin, equal, first = max(log.queue.min_offset, 0), 0, ""
    for slot in _slots(wheel, read_ms, precision_ms):
        last, pending = _before(log, slot, end)
        wanted = waiting.slots.get(slot.time_ms)
        if wanted is not None and (last, pending) == (wanted.last, wanted.pending):
            equal += 1
        elif wanted is not None or last >= begin:
            unit = log.unit(last) if last != NONE else None
            # The wheel is written after the log. If the wheel has units that the log lacks, the log has lost them. If
            # the wheel has too few units, it can be rebuilt from the log alone.
            if last >= begin and (wanted is None or unit is None or unit.time_ms != slot.time_ms):
                return Damage.LOG, f"the slot of {slot.time_ms} ends at {last}, where no unit of that time is"
            first = first or f"the slot of {slot.time_ms} ends at {last} and has {pending} messages"
    if first or equal < len(waiting.slots):
        missing = len(waiting.slots) - equal
        return Damage.WHEEL, first or f"{missing} of {len(waiting.slots)} seconds that wait have no slot"
    return Damage.NONE, ""


def looks_sound(wheel: TimerWheel, log: TimerLog, *, total: int, read_ms: int, precision_ms: int) -> bool:
    """Return True if the totals agree, and if the chain agrees with the count in a sample of the slots."""
    slots = [slot for slot in _slots(wheel, read_ms, precision_ms) if slot.last != NONE]
    if sum([slot.pending for slot in slots]) != total:
        return False
    return all(_is_whole(log, slot) for slot in slots[:: len(slots) // _SAMPLED_SLOTS + 1])


def _slots(wheel: TimerWheel, read_ms: int, precision_ms: int) -> Iterator[Slot]:
    """Yield the slots that may contain waiting messages. No time is further ahead than half the length of the wheel."""
    return wheel.slots(read_ms, read_ms + SLOT_COUNT // 2 * precision_ms)


def _before(log: TimerLog, slot: Slot, end: int) -> tuple[int, int]:
    """Return the last unit and the count of a slot without the units after a position. After a kill the wheel may have
    such units."""
    last, pending = slot.last, slot.pending
    while last >= end:
        unit = log.unit(last)
        # A damaged chain may lead forwards: following such a chain would never end.
        if unit is None or unit.time_ms != slot.time_ms or unit.previous >= last:
            return NONE, 0
        last, pending = unit.previous, pending - unit_weight(unit)
    return last, pending


def _is_whole(log: TimerLog, slot: Slot) -> bool:
    """Return True if the newest units of a slot's chain belong to the slot, and a complete chain has the slot's
    count.
    """
    at, count = slot.last, 0
    for _ in range(_SAMPLED_UNITS):
        unit = log.unit(at)
        if unit is None or unit.time_ms != slot.time_ms or unit.previous >= at:
            return False
        at, count = unit.previous, count + unit_weight(unit)
        if at < max(log.queue.min_offset, 0):
            return count == slot.pending
    return True
