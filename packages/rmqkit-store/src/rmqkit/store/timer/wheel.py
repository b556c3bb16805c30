"""The timer wheel: one slot for every second, with the units of the timer log that are due then (``TimerWheel``).

The file ``timerwheel`` holds 7 days × 86 400 × 2 slots of 32 bytes, for every precision; big-endian::

    at  size  field
     0     8  time of the slot in units of ``timerPrecisionMs``
     8     8  first unit, a position in the timer log
    16     8  last unit: the chain goes from here to older ones
    24     4  units put in, less units that delete a message
    28     4  magic, 0

The slot of a time is number ``(time / precision) % slots``. The slot belongs to this time only if its time field is
equal. A delivery does not empty a slot: the next time with the same number replaces the slot, 14 days later. Only slots
that changed since the last write are held in memory. Other slots are read on demand: a million messages need no more
memory than one. Use this module only in the owner thread of the store, except for `TimerWheel.write`. Source: store.md
§18.4.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from rmqkit.errors import StoreMismatch
from rmqkit.store.files import sync_directory
from rmqkit.system import disk

__all__ = ["SLOT_COUNT", "WHEEL_BYTES", "Slot", "TimerWheel"]

SLOT_COUNT = 7 * 86_400 * 2
_SLOT = struct.Struct(">qqqii")
WHEEL_BYTES = SLOT_COUNT * _SLOT.size
_SLOTS_PER_READ = 4096
_EMPTY = memoryview(bytes(_SLOTS_PER_READ * _SLOT.size))
_PAGE_BYTES = 4096
_SLOTS_PER_PAGE = _PAGE_BYTES // _SLOT.size
assert WHEEL_BYTES % _PAGE_BYTES == 0, "the wheel consists of whole pages"


class Slot(NamedTuple):
    """The messages due at one time. ``first`` and ``last`` are positions in the timer log, ``pending`` is a count."""

    time_ms: int
    first: int
    last: int
    pending: int


class TimerWheel:
    """The wheel in one file. The first write creates the file."""

    def __init__(self, path: Path, precision_ms: int) -> None:
        self.path = path
        self._precision_ms = precision_ms
        self._changed: dict[int, bytes] = {}
        self._taken: dict[int, bytes] = {}
        self._fd = -1

    def check(self) -> bool:
        """Return True if the file exists and has content: a power cut may leave the name without the length.
        Raises StoreMismatch: the file does not have the length of a wheel."""
        try:
            length = disk.size(self.path)
        except FileNotFoundError:
            return False
        if length not in (0, WHEEL_BYTES):
            raise StoreMismatch(f"{self.path} has {length} bytes, expected {WHEEL_BYTES}: move it elsewhere")
        return length > 0

    def load(self, *, is_read_only: bool = False) -> bool:
        """Open the file. Return True if the file exists and has content. Remove an empty file.
        Raises StoreMismatch: see `check`."""
        if self.check():
            self._fd = disk.open(self.path, (os.O_RDONLY if is_read_only else os.O_RDWR) | os.O_CLOEXEC)
        elif not is_read_only:
            disk.remove(self.path, missing_ok=True)
        return self._fd >= 0

    def slot(self, time_ms: int) -> Slot | None:
        """Return the slot of a time, or None if nothing is due at that time."""
        number = time_ms // self._precision_ms % SLOT_COUNT
        # Search newer slots first: a slot in the snapshot for `write` may have changed since the snapshot.
        packed = self._changed.get(number) or self._taken.get(number)
        if packed is None:
            if self._fd < 0:
                return None
            packed = disk.pread(self._fd, _SLOT.size, number * _SLOT.size)
        return self._read(packed, time_ms // self._precision_ms)

    def put(self, slot: Slot) -> None:
        """Replace the slot of a time."""
        time = slot.time_ms // self._precision_ms
        self._changed[time % SLOT_COUNT] = _SLOT.pack(time, slot.first, slot.last, slot.pending, 0)

    def slots(self, begin_ms: int, end_ms: int) -> Iterator[Slot]:
        """Yield the slots from a time up to but not including another time, unordered. The wheel must not change
        meanwhile."""
        first, end = begin_ms // self._precision_ms, end_ms // self._precision_ms
        end = min(end, first + SLOT_COUNT)
        changed = self._taken | self._changed
        for packed in changed.values():
            if first <= _SLOT.unpack(packed)[0] < end:
                yield self._unpacked(packed)
        while first < end:
            number = first % SLOT_COUNT
            count = min(end - first, SLOT_COUNT - number, _SLOTS_PER_READ)
            packed = b"" if self._fd < 0 else disk.pread(self._fd, count * _SLOT.size, number * _SLOT.size)
            if packed != _EMPTY[: len(packed)]:  # much faster than checking each slot
                for time, slot in enumerate(_SLOT.iter_unpack(packed[: len(packed) // _SLOT.size * _SLOT.size]), first):
                    # A slot of an earlier use has another time, an empty slot has time 0. Changed slots were yielded
                    # above; the disk has only their old content.
                    if slot[0] == time and time > 0 and time % SLOT_COUNT not in changed:
                        yield Slot(time * self._precision_ms, slot[1], slot[2], slot[3])
            first += count

    def pending(self, begin_ms: int, end_ms: int) -> int:
        """Return the number of messages due from a time up to but not including another time."""
        return sum([slot.pending for slot in self.slots(begin_ms, end_ms)])

    def take(self) -> None:
        """Move the changes to a snapshot for `write`. Reads still find them."""
        self._taken |= self._changed
        self._changed = {}

    def write(self) -> None:
        """Write the snapshot and sync the file. Any thread can call this, but nobody must call `take` meanwhile.
        Raises OSError: the write failed; the next call writes the whole snapshot again."""
        if not self._taken:
            return
        if self._fd < 0:
            self._create()
        # Write whole pages: a separate write for each of thousands of slots would request the interpreter lock every
        # time.
        for page, slots in groupby(sorted(self._taken.items()), lambda one: one[0] // _SLOTS_PER_PAGE):
            # Only this thread writes the file. The other slots of the page get their present bytes again: the owner may
            # read them meanwhile.
            data = bytearray(disk.pread(self._fd, _PAGE_BYTES, page * _PAGE_BYTES))
            for number, packed in slots:
                at = number % _SLOTS_PER_PAGE * _SLOT.size
                data[at : at + _SLOT.size] = packed
            disk.write_all(self._fd, data, page * _PAGE_BYTES)
        disk.sync_data(self._fd)
        # Clear the snapshot after the sync. After an error the whole snapshot is written again. Until then the owner
        # finds these slots in memory, not in a page that is being written.
        self._taken = {}

    def clear(self) -> None:
        """Drop everything and remove the file."""
        self.close()
        self._changed, self._taken = {}, {}
        disk.remove(self.path, missing_ok=True)

    def close(self) -> None:
        if self._fd >= 0:
            disk.close(self._fd)
            self._fd = -1

    def _create(self) -> None:
        descriptor = disk.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            disk.truncate(descriptor, WHEEL_BYTES)
            sync_directory(self.path.parent)
        except OSError:
            disk.close(descriptor)
            raise
        # Set it last: after an error the next write sets length and name of the file again.
        self._fd = descriptor

    def _read(self, packed: bytes, time: int) -> Slot | None:
        slot = self._unpacked(packed)
        return slot if slot.time_ms == time * self._precision_ms and time > 0 else None

    def _unpacked(self, packed: bytes) -> Slot:
        time, first, last, count, _ = _SLOT.unpack(packed)
        return Slot(time * self._precision_ms, first, last, count)
