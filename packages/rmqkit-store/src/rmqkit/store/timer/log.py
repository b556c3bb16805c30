"""The timer log: one unit for every timed message that was put on the wheel (``TimerLog``).

Files of ``mappedFileSizeTimerLog`` bytes in ``timerlog/``. A position counts through all files. A unit, big-endian::

    at  size  field                                 at  size  field
     0     4  size, 52                              28     8  physical offset of the timer topic's record
     4     8  previous unit of its slot, -1 = none  36     4  size of that record
    12     4  magic: 1, or-ed with 2 roll, 4 delete 40     4  Java hash of the real topic
    16     8  write time, ms                        44     8  reserved, 0
    24     4  delivery time - write time, ms

If a unit and 16 more bytes do not fit in the rest of a file, the rest is ``i32 remaining, i64 0, i32 BLANK_MAGIC``.
Units are appended to the page cache; `TimerLog.sync` makes them durable. Use this module only in the owner thread of
the store, except for `sync`.
Source: store.md §18.3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from rmqkit.protocol.record import BLANK_MAGIC
from rmqkit.store.log.file_queue import FileQueue
from rmqkit.store.log.mapped_file import BytesLost, MappedFile

__all__ = ["DELETE", "NONE", "PLAIN", "ROLL", "UNIT_BYTES", "TimerLog", "Unit"]

PLAIN = 1
ROLL = 2
DELETE = 4
NONE = -1
"""The position that means "no unit"."""

_UNIT = struct.Struct(">iqiqiqiiq")
UNIT_BYTES = _UNIT.size
_BLANK = struct.Struct(">iqi")
# Apache's recovery cuts the timer log before a unit with a greater magic or another size than 52.
_MAGIC_MAX = 15
_CHUNK_BYTES = 20_000 * UNIT_BYTES
_BLOCK_BYTES = 78 * UNIT_BYTES


class Unit(NamedTuple):
    """A timed message. ``previous`` is a position in the log. Times are in ms."""

    previous: int
    magic: int
    write_ms: int
    delay_ms: int
    physical_offset: int
    size: int
    topic_hash: int

    @property
    def time_ms(self) -> int:
        """The time of the slot that contains the unit."""
        return self.write_ms + self.delay_ms

    @property
    def is_delete(self) -> bool:
        """Return True if the unit deletes another message at the unit's time. A marker in a stage does not delete a
        message yet."""
        return self.magic & (DELETE | ROLL) == DELETE


class UnitsLost(BytesLost):
    """The error that is raised if the page cache no longer holds the units of a failed sync."""


class TimerLog:
    """The timer log of the store directory ``root``. Call `FileQueue.load` of its ``queue`` and `truncate` to open
    it.
    """

    def __init__(self, root: Path, file_bytes: int) -> None:
        self.queue = FileQueue([root / "timerlog"], file_bytes, setting="mappedFileSizeTimerLog", root=root)
        self._block = b""
        self._block_at = 0

    @property
    def end(self) -> int:
        """The position of the next unit, or of the blank before the next unit."""
        return self.queue.max_offset

    def place(self) -> tuple[int, int]:
        """Return the position of the next unit, and the number of units that fit in its file. If necessary, close a
        full file and begin a new file.
        Raises OSError: a file cannot be written."""
        files = self.queue.files
        file = files[-1] if files else None
        if file is not None and 0 < file.size - file.wrote < UNIT_BYTES + _BLANK.size:
            file.write(file.wrote, _BLANK.pack(file.size - file.wrote, 0, BLANK_MAGIC))
            file.wrote = file.size
        if file is None or file.wrote == file.size:
            file = self.queue.create(0 if file is None else file.end)
            self.queue.append(file)
        return file.start + file.wrote, (file.size - file.wrote - _BLANK.size) // UNIT_BYTES

    def append(self, units: Iterable[Unit]) -> None:
        """Write units at the position that `place` returned, at most as many as `place` returned.

        Raises OSError: no unit was written.
        """
        file = self.queue.files[-1]
        packed = b"".join([_UNIT.pack(UNIT_BYTES, *unit, 0) for unit in units])
        file.write(file.wrote, packed)
        # Set it after the write: `sync` in another thread assumes that all bytes before ``wrote`` are written.
        file.wrote += len(packed)

    def unit(self, position: int) -> Unit | None:
        """Return the unit at a position, or None if there is no unit.
        The same read loads neighbouring units, because chains often link consecutive messages."""
        at = position - self._block_at
        if not 0 <= at <= len(self._block) - UNIT_BYTES:
            at = self._read_block(position)
        return _sound(_UNIT.unpack_from(self._block, at)) if 0 <= at <= len(self._block) - UNIT_BYTES else None

    def _read_block(self, position: int) -> int:
        """Read the written bytes around a position. Return the index of the position in the block."""
        file, self._block = self.queue.find(position), b""
        if file is not None:
            at = position - file.start
            begin = at - at % _BLOCK_BYTES
            # Do not read after ``wrote``: the block would cache zeros in the place of the next units, and a later scan
            # of their chain would report damage.
            self._block = file.read(begin, max(0, min(_BLOCK_BYTES + UNIT_BYTES, file.wrote - begin)))
            self._block_at = file.start + begin
        return position - self._block_at

    def scan(self, begin: int) -> Iterator[tuple[int, Unit]]:
        """Yield position and unit from a position on, up to the first invalid unit."""
        for file in [file for file in self.queue.files if file.end > begin]:
            position = max(begin, file.start)
            while len(chunk := file.read(position - file.start, _CHUNK_BYTES)) >= UNIT_BYTES:
                for fields in _UNIT.iter_unpack(chunk[: len(chunk) // UNIT_BYTES * UNIT_BYTES]):
                    unit = _sound(fields)
                    if unit is None:
                        break
                    yield position, unit
                    position += UNIT_BYTES
                else:
                    continue
                break
            blank = file.read(position - file.start, _BLANK.size)
            # Without a blank the file is the newest, or is damaged: units in a next file do not follow this file.
            if len(blank) < _BLANK.size or _BLANK.unpack(blank)[2] != BLANK_MAGIC:
                return

    def truncate(self, position: int) -> None:
        """Remove everything after a position."""
        self._block = b""
        self.queue.truncate(position)

    def drop_before(self, physical_offset: int, written_ms: int) -> None:
        """Delete the oldest files, as long as all their messages are deleted from the commit log, and were put on the
        wheel before a time. The time must be so early that none of these messages still waits. Raises OSError: a file
        cannot be deleted."""
        last = self.queue.file_bytes // UNIT_BYTES * UNIT_BYTES

        def is_gone(start: int) -> bool:
            units = (self.unit(start + at) for at in range(last - UNIT_BYTES, -1, -UNIT_BYTES))
            newest = next((unit for unit in units if unit is not None), None)
            return newest is None or (newest.physical_offset < physical_offset and newest.write_ms < written_ms)

        self.queue.drop_front(lambda file: is_gone(file.start))
        self._block = b""

    def sync(self) -> None:
        """Wait until all units are on the disk. Any thread can call this. Raises OSError: the sync failed; the next
        call writes the units again.
        Raises UnitsLost: the page cache no longer has the units. The timer topic must be read again."""
        for file in self.queue.refused():
            # After a start or a cut, zeros follow that are not on the disk, either. Units that reappear there do no
            # harm: `TimerFiles.recover` compares each with its message.
            file.again_from = max(0, file.again_from or 0)
            if not _is_whole(file):
                raise UnitsLost(file.path)
        self.queue.sync()

    def close(self) -> None:
        self.queue.close()


def _is_whole(file: MappedFile) -> bool:
    """Return True if the page cache still has all units of the last failed sync. A blank ends a full file."""
    begin = max(0, file.again_from or 0) // UNIT_BYTES * UNIT_BYTES
    end = min(file.wrote, file.size - _BLANK.size) // UNIT_BYTES * UNIT_BYTES
    units = _UNIT.iter_unpack(file.read(begin, max(0, end - begin)))
    return all(_sound(fields) is not None for fields in units)


def _sound(fields: tuple[int, ...]) -> Unit | None:
    return Unit(*fields[1:8]) if fields[0] == UNIT_BYTES and 0 <= fields[2] <= _MAGIC_MAX else None
