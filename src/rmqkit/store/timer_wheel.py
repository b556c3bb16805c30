"""The timer wheel: one slot for every second, with the units of the timer log that are due then (``TimerWheel``).

The file ``timerwheel`` holds 7 days × 86 400 × 2 slots of 32 bytes, whatever the precision; big-endian::

    at  size  field
     0     8  time of the slot in units of ``timerPrecisionMs``
     8     8  first unit, a position in the timer log
    16     8  last unit: the chain goes from here to older ones
    24     4  units put in, less those that delete another
    28     4  magic, 0

The slot of a time is number ``(time / precision) % slots``; it is that time's only while its time field says so. A slot
is not emptied when its messages are delivered: the next one of that number takes its place, 14 days later.

Only slots that changed since the last write are kept in memory, the others are read when they are asked for: a million
messages cost no more memory than one. Owner thread, but for `TimerWheel.write`. Source: store.md §18.4.
"""

from __future__ import annotations

import os
import struct
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from rmqkit.errors import StoreMismatch
from rmqkit.store.json_files import sync_directory

__all__ = ["SLOT_COUNT", "WHEEL_BYTES", "Slot", "TimerWheel"]

SLOT_COUNT = 7 * 86_400 * 2
_SLOT = struct.Struct(">qqqii")
WHEEL_BYTES = SLOT_COUNT * _SLOT.size
_SLOTS_PER_READ = 4096
_PAGE_BYTES = 4096
_SLOTS_PER_PAGE = _PAGE_BYTES // _SLOT.size
assert WHEEL_BYTES % _PAGE_BYTES == 0, "the wheel is whole pages"


class Slot(NamedTuple):
    """What is due at one time; ``first`` and ``last`` are positions in the timer log, ``pending`` the messages."""

    time_ms: int
    first: int
    last: int
    pending: int


class TimerWheel:
    """The wheel in one file, which is made when something is written first."""

    def __init__(self, path: Path, precision_ms: int) -> None:
        self.path = path
        self._precision_ms = precision_ms
        self._changed: dict[int, bytes] = {}
        self._taken: dict[int, bytes] = {}
        self._fd = -1

    def check(self) -> bool:
        """Whether there is a file. Raises StoreMismatch: it is not as long as a wheel."""
        try:
            length = self.path.stat().st_size
        except FileNotFoundError:
            return False
        if length != WHEEL_BYTES:
            raise StoreMismatch(f"{self.path} has {length} bytes, expected {WHEEL_BYTES}: move it elsewhere")
        return True

    def load(self) -> bool:
        """Open the file; whether there is one. Raises StoreMismatch: as `check`."""
        if self.check():
            self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        return self._fd >= 0

    def slot(self, time_ms: int) -> Slot | None:
        """What is due at a time, None for nothing."""
        number = time_ms // self._precision_ms % SLOT_COUNT
        packed = self._changed.get(number) or self._taken.get(number)
        if packed is None:
            if self._fd < 0:
                return None
            packed = os.pread(self._fd, _SLOT.size, number * _SLOT.size)
        return self._read(packed, time_ms // self._precision_ms)

    def put(self, slot: Slot) -> None:
        """Replace the slot of a time."""
        time = slot.time_ms // self._precision_ms
        self._changed[time % SLOT_COUNT] = _SLOT.pack(time, slot.first, slot.last, slot.pending, 0)

    def pending(self, begin_ms: int, end_ms: int) -> int:
        """How many messages are due from a time on and before another."""
        first, end = begin_ms // self._precision_ms, end_ms // self._precision_ms
        changed = self._taken | self._changed
        total = 0
        while first < end:
            number = first % SLOT_COUNT
            count = min(end - first, SLOT_COUNT - number, _SLOTS_PER_READ)
            packed = b"" if self._fd < 0 else os.pread(self._fd, count * _SLOT.size, number * _SLOT.size)
            if packed.strip(b"\0"):
                for time, (found, _, _, pending, _) in enumerate(_SLOT.iter_unpack(packed), first):
                    if found == time and time % SLOT_COUNT not in changed:
                        total += pending
            first += count
        first = begin_ms // self._precision_ms
        for packed in changed.values():
            found, _, _, pending, _ = _SLOT.unpack(packed)
            total += pending if first <= found < end else 0
        return total

    def take(self) -> None:
        """Set aside what changed, for `write`; reads find it all the same."""
        self._taken |= self._changed
        self._changed = {}

    def write(self) -> None:
        """Write what was taken and wait for the disk; any thread, with no `take` meanwhile.
        Raises OSError: the disk refused; the next call writes all of it again."""
        if not self._taken:
            return
        if self._fd < 0:
            self._create()
        # By the page: a write for each of thousands of slots would have this thread ask for the interpreter every time.
        for page, slots in groupby(sorted(self._taken.items()), lambda one: one[0] // _SLOTS_PER_PAGE):
            data = bytearray(os.pread(self._fd, _PAGE_BYTES, page * _PAGE_BYTES))
            for number, packed in slots:
                at = number % _SLOTS_PER_PAGE * _SLOT.size
                data[at : at + _SLOT.size] = packed
            os.pwrite(self._fd, data, page * _PAGE_BYTES)
        os.fdatasync(self._fd)
        self._taken = {}

    def clear(self) -> None:
        """Forget everything and remove the file."""
        self.close()
        self._changed, self._taken = {}, {}
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _create(self) -> None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(descriptor, WHEEL_BYTES)
        self._fd = descriptor
        sync_directory(self.path.parent)

    def _read(self, packed: bytes, time: int) -> Slot | None:
        found, first, last, count, _ = _SLOT.unpack(packed)
        return Slot(time * self._precision_ms, first, last, count) if found == time and time > 0 else None
