"""Figures over time in one SQLite file per cluster: no database server, nothing to set up.

=======  ==============================================  ========  ==========  ===============================
step     of                                              block     kept for    a slot holds
=======  ==============================================  ========  ==========  ===============================
10 s     brokers, and the 200 groups furthest behind     1 h       6 h         the last figure in it
1 min    all series                                      1 h       7 d         the last figure in it
15 min   all series                                      1 d       90 d        the highest figure in it
=======  ==============================================  ========  ==========  ===============================

The block under way is in memory, an ``array`` of 64-bit slots per series; a slot is a figure, unknown (-1: it was asked
and nobody told), or missing (-2: nobody asked). Every 5 minutes, and when the console ends, blocks are written in one
transaction. A kill loses what was not written: at most 5 minutes, which then are a hole. After a start the block under
way is read back and goes on.

A stored block is a number when all slots are the same, which idle series are; else a letter, the first value (8 bytes,
little-endian), and the differences as an array of that letter's width; deflated, with a capital letter, where that is
shorter. 12,000 series take 17 MB of memory. The file is kept at `FILE_BYTES_MAX`: the oldest blocks go first.

A damaged file is given another name and a new one begins; what happened stands in ``trouble``, which pages show. A
second console cannot open the file: it says so, and keeps in memory what it sees. All calls of SQLite run in one
thread; the rest is loop only. Source: console.md §4.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import sys
import zlib
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from operator import sub
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from rmqkit.admin.health import Snapshot
from rmqkit.clock import Clock
from rmqkit.console import figures
from rmqkit.console.charts import Point
from rmqkit.console.figures import FIGURES

__all__ = ["HOUR_MS", "History", "packed", "unpacked"]

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
WRITE_S, LOCK_S = 300.0, 1.0
FILE_BYTES_MAX = 256 << 20
_ROOM_BYTES = 32 << 20
"""Left free for the next write, and its log beside the file."""
SERIES_MAX = 20_000
SYNCHRONOUS = "NORMAL"
"""SQLite's: a power cut may take the last write, and leaves the file whole."""
FINE_GROUPS = 200
GAP_MS = 150_000
"""Points this far apart are joined: a console that nobody looks at asks once a minute."""
UNKNOWN, MISSING = -1, -2
_VALUE_MAX = 1 << 61
_WIDTHS = (("b", 7), ("h", 15), ("i", 31), ("q", 63))
_VERSION = 1
_FINISHED_MAX = 4

Key = tuple[str, str]
Block = dict[Key, "array[int]"]
T = TypeVar("T")
_log = logging.getLogger(__name__)

assert [array(code).itemsize for code, _ in _WIDTHS] == [1, 2, 4, 8], "differences are stored in these widths"


class Level(Struct, frozen=True):
    """One resolution. All in ms."""

    step: int
    block: int
    kept: int

    @property
    def slots(self) -> int:
        return self.block // self.step


LEVELS = (
    Level(10_000, HOUR_MS, 6 * HOUR_MS),
    Level(60_000, HOUR_MS, 7 * DAY_MS),
    Level(15 * 60_000, DAY_MS, 90 * DAY_MS),
)
_FINE, _MINUTES, _LONG = range(len(LEVELS))


def packed(values: array[int]) -> bytes | int:
    """A block as it is stored."""
    first = values[0]
    if values.count(first) == len(values):
        return first
    differences = list(map(sub, values[1:], values))
    low, high = min(differences), max(differences)
    code = next(code for code, bits in _WIDTHS if -(1 << bits) <= low and high < 1 << bits)
    plain = first.to_bytes(8, "little", signed=True) + _swapped(array(code, differences)).tobytes()
    deflated = zlib.compress(plain, 6)
    return code.upper().encode() + deflated if len(deflated) < len(plain) else code.encode() + plain


def unpacked(stored: bytes | int, slots: int) -> array[int]:
    """The slots of a block. Raises ValueError: it is damaged."""
    if isinstance(stored, int):
        return array("q", [stored]) * slots
    try:
        code, plain = chr(stored[0]), stored[1:]
        if code.isupper():
            inflater = zlib.decompressobj()
            code, plain = code.lower(), inflater.decompress(plain, 8 * slots + 1)
        if code not in "bhiq":
            raise ValueError(f"no such form: {code!r}")
        first = int.from_bytes(plain[:8], "little", signed=True)
        values = array("q", accumulate(_swapped(array(code, plain[8:])), initial=first))
    except (IndexError, OverflowError, zlib.error) as error:
        raise ValueError(str(error)) from None
    if len(values) != slots:
        raise ValueError(f"{len(values)} slots in place of {slots}")
    return values


def _swapped(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


class _Damaged(Exception):
    """The file is no history, or SQLite finds that it is broken."""


class _Level:
    """What is in memory of one resolution: the block under way, and those that are not written yet."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self.start = 0
        self.current: Block = {}
        self.finished: list[tuple[int, Block]] = []

    def put(self, at_ms: int, key: Key, value: int, *, is_highest: bool) -> bool:
        """Fill a slot. False: there are too many series."""
        level = self.level
        start = at_ms - at_ms % level.block
        if start != self.start:
            if self.start - level.block <= start < self.start:
                return True  # the wall clock went back over the beginning of a block: these slots are written
            self.end(start)
        slots = self.current.get(key)
        if slots is None:
            if len(self.current) >= SERIES_MAX:
                return False
            slots = self.current[key] = array("q", [MISSING]) * level.slots
        slot = (at_ms - start) // level.step
        slots[slot] = max(slots[slot], value) if is_highest else value
        return True

    def end(self, start: int) -> None:
        """Begin another block."""
        if self.current:
            self.finished.append((self.start, self.current))
        self.start, self.current = start, {}

    def blocks(self) -> list[tuple[int, Block]]:
        return [*self.finished, (self.start, self.current)]


class Kept(Struct, rename="camel", kw_only=True):
    """What the history is, for people: the file and its bytes, or empty and 0 for memory alone."""

    file: str
    file_bytes: int
    series: int
    oldest_ms: int | None
    written_ms: int | None
    trouble: str


class History:
    """The history of one cluster.

    Args:
        path: its file; None: in memory alone, which is the block under way.
    """

    def __init__(self, path: Path | None, clock: Clock) -> None:
        self.path = path
        self.trouble = ""
        self.bytes_max = FILE_BYTES_MAX
        self._clock = clock
        self._levels = [_Level(level) for level in LEVELS]
        self._names: set[Key] = set()
        self._ids: dict[Key, int] = {}
        self._filled: set[tuple[int, int]] = set()
        self._file: sqlite3.Connection | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._written_ms: int | None = None
        self._task: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()

    # -- life

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="console history")

    async def close(self) -> None:
        """Write what is not written, and let the file go."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._thread is not None:
            await self.write(self._clock.now_ms())
            await self._in_thread(self._close)
            self._thread.shutdown(wait=False)
            self._thread = None

    async def _run(self) -> None:
        await self.open()
        while True:
            await asyncio.sleep(WRITE_S)
            await self.write(self._clock.now_ms())

    async def open(self) -> None:
        """Open the file and go on with its blocks under way. A trouble leaves the history in memory."""
        if self.path is not None:
            self._thread = ThreadPoolExecutor(1, "console history")
            try:
                for level, start, block in await self._in_thread(self._open, self._clock.now_ms()):
                    self._go_on(level, start, block)
                self._names |= set(self._ids)
            except (OSError, sqlite3.Error) as error:
                self.trouble = f"history file {self.path} cannot be used ({error}): figures are in memory alone"
                _log.warning("%s", self.trouble)
        self._opened.set()

    def _go_on(self, level: _Level, start: int, block: Block) -> None:
        """Take a block out of the file; what came meanwhile is newer."""
        if level.start not in (0, start):
            return
        level.start = start
        for key, slots in block.items():
            _fill(level.current.setdefault(key, array("q", [MISSING]) * level.level.slots), slots)

    # -- figures come

    def follow(self, snapshot: Snapshot) -> None:
        """Keep the figures of a snapshot."""
        groups, is_full = 0, False
        for figure, name, value in figures.told(snapshot):
            known = FIGURES.get(figure)
            if known is not None and not known.is_kept:
                continue
            groups += figure == "lag"
            is_fine = figure != "put" and groups <= FINE_GROUPS
            kept = UNKNOWN if value is None else min(_VALUE_MAX, max(0, round(value * (known.scale if known else 1))))
            is_full |= not self.put(snapshot.at_ms, figure, name, kept, is_fine=is_fine)
        if is_full and not self.trouble:
            self.trouble = f"there are more than {SERIES_MAX:,} series: what is above has no history"

    def put(self, at_ms: int, figure: str, name: str, value: int, *, is_fine: bool = False) -> bool:
        """Keep one scaled figure. False: there are too many series."""
        key = figure, name
        self._names.add(key)
        fine, minutes, long = self._levels
        if is_fine:
            fine.put(at_ms, key, value, is_highest=False)
        return minutes.put(at_ms, key, value, is_highest=False) and long.put(at_ms, key, value, is_highest=True)

    # -- figures go

    def names(self, figure: str, begin: str = "") -> list[str]:
        """What has a history of a figure, of those whose name begins so."""
        return sorted(name for known, name in self._names if known == figure and name.startswith(begin))

    async def read(self, figure: str, name: str, begin_ms: int, end_ms: int) -> tuple[int, list[Point]]:
        """The step in ms, and the points of a series between two times: None where it was unknown, and once in each
        stretch in which nobody asked."""
        await self._opened.wait()
        key, now_ms = (figure, name), self._clock.now_ms()
        is_fine = now_ms - begin_ms <= LEVELS[_FINE].kept
        level = self._levels[_MINUTES if now_ms - begin_ms <= LEVELS[_MINUTES].kept else _LONG]
        found = await self._slots(level, key, begin_ms, end_ms)
        step = level.level.step
        if is_fine and (finer := await self._slots(self._levels[_FINE], key, begin_ms, end_ms)):
            minutes = {at - at % step for at in finer}
            found = {at: value for at, value in found.items() if at not in minutes} | finer
            step = LEVELS[_FINE].step
        scale = FIGURES[figure].scale if figure in FIGURES else 1
        points: list[Point] = []
        for at in sorted(found):
            if points and at - points[-1][0] > max(GAP_MS, 2 * step) and points[-1][1] is not None:
                points.append((points[-1][0] + step, None))
            value = found[at]
            points.append((at, None if value < 0 else value / scale if scale > 1 else value))
        return step, points

    async def _slots(self, level: _Level, key: Key, begin_ms: int, end_ms: int) -> dict[int, int]:
        """What is known of a series at one resolution, by time."""
        block, step = level.level.block, level.level.step
        starts = range(begin_ms - begin_ms % block, end_ms + 1, block)
        blocks: dict[int, array[int]] = {}
        if self._file is not None:
            try:
                blocks = await self._in_thread(self._select, level.level, list(starts), key)
            except sqlite3.Error as error:
                await self._failed(error)
        blocks |= {start: one[key] for start, one in level.blocks() if key in one and start in starts}
        return {
            at: value
            for start, slots in blocks.items()
            for at, value in zip(range(start, start + block, step), slots, strict=True)
            if value != MISSING and begin_ms <= at <= end_ms
        }

    async def kept(self) -> Kept:
        """What there is."""
        size, oldest = 0, None
        if self._file is not None:
            try:
                size, oldest = await self._in_thread(self._measure)
            except sqlite3.Error as error:
                await self._failed(error)
        return Kept(
            file=str(self.path) if self._file is not None else "",
            file_bytes=size,
            series=len(self._names),
            oldest_ms=oldest,
            written_ms=self._written_ms,
            trouble=self.trouble,
        )

    # -- the file

    async def write(self, now_ms: int) -> None:
        """Write all blocks that are in memory. What the disk refuses is tried again the next time; of blocks that have
        ended, the last four of each resolution are kept for that."""
        for one in self._levels:
            if one.start <= now_ms - one.level.block:  # nobody fills it any more
                one.end(now_ms - now_ms % one.level.block)
        if self._file is not None:
            taken = [
                (one.level, start, list(block.items()))
                for one in self._levels
                for start, block in one.blocks()
                if block and start > now_ms - one.level.kept - one.level.block
            ]
            done = [len(one.finished) for one in self._levels]
            try:
                await self._in_thread(self._store, taken, now_ms)
                self._written_ms = now_ms
                for one, count in zip(self._levels, done, strict=True):
                    self._filled -= {(one.level.step, start) for start, _ in one.finished[:count]}
                    del one.finished[:count]
            except sqlite3.Error as error:
                await self._failed(error)
        for one in self._levels:
            if self.path is not None and len(one.finished) > _FINISHED_MAX:
                self.trouble = f"history file {self.path} was not written for hours: the oldest figures are lost"
            del one.finished[:-_FINISHED_MAX]
        self._names &= set().union(*(one.current for one in self._levels)) | set(self._ids)

    async def _failed(self, error: sqlite3.Error) -> None:
        """A read or a write failed: begin anew beside a damaged file; whatever else it is may be over the next time."""
        if not _is_damage(error):
            self.trouble = f"history file {self.path}: {error}; what it has is not shown, and it is tried again"
            _log.warning("%s", self.trouble)
            return
        try:
            await self._in_thread(self._begin_anew, str(error))
        except (OSError, sqlite3.Error) as other:
            self._file, self.trouble = None, f"history file {self.path} is damaged ({error}) and stays: {other}"
            _log.warning("%s", self.trouble)

    async def _in_thread(self, function: Callable[..., T], *args: object) -> T:
        assert self._thread is not None, "only a history with a file asks it"
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _open(self, now_ms: int) -> list[tuple[_Level, int, Block]]:
        """Connect, check, and read the blocks under way."""
        try:
            self._connect()
            assert self._file is not None
            if (found := self._file.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise _Damaged(found)
            return self._under_way(now_ms)
        except (_Damaged, ValueError, sqlite3.DatabaseError) as error:
            if isinstance(error, sqlite3.Error) and not _is_damage(error):
                self._close()
                raise
            self._begin_anew(str(error))
            return []

    def _connect(self) -> None:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = file = sqlite3.connect(self.path, timeout=LOCK_S)
        file.execute("PRAGMA locking_mode = EXCLUSIVE")  # one console writes; nobody else has to see its log
        file.execute("PRAGMA journal_mode = WAL")
        file.execute(f"PRAGMA synchronous = {SYNCHRONOUS}")
        version = file.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, _VERSION):
            raise _Damaged(f"it has version {version}, and this console knows {_VERSION}")
        with file:
            file.execute(
                "CREATE TABLE IF NOT EXISTS series"
                " (id INTEGER PRIMARY KEY, figure TEXT NOT NULL, name TEXT NOT NULL, UNIQUE (figure, name))"
            )
            file.execute(
                "CREATE TABLE IF NOT EXISTS block (step INTEGER, start INTEGER, series INTEGER, slots,"
                " PRIMARY KEY (step, start, series)) WITHOUT ROWID"
            )
            file.execute(f"PRAGMA user_version = {_VERSION}")
        self._ids = {(figure, name): number for number, figure, name in file.execute("SELECT * FROM series")}

    def _under_way(self, now_ms: int) -> list[tuple[_Level, int, Block]]:
        assert self._file is not None
        keys = {number: key for key, number in self._ids.items()}
        found = []
        for one in self._levels:
            level = one.level
            start = now_ms - now_ms % level.block
            rows = self._file.execute(
                "SELECT series, slots FROM block WHERE step = ? AND start = ?", (level.step, start)
            )
            block = {keys[number]: unpacked(slots, level.slots) for number, slots in rows if number in keys}
            found.append((one, start, block))
        return found

    def _begin_anew(self, why: str) -> None:
        """Give a damaged file another name, for who wants to look at it, and begin one."""
        assert self.path is not None
        self._close()
        aside = self.path.with_name(f"{self.path.name}.damaged-{self._clock.now_ms()}")
        for end in ("", "-wal"):
            if (old := self.path.with_name(self.path.name + end)).exists():
                old.replace(aside.with_name(aside.name + end))
        self._connect()
        self.trouble = f"history file {self.path} was damaged ({why}): it is kept as {aside.name}, and a new one began"
        _log.warning("%s", self.trouble)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file, self._ids, self._filled = None, {}, set()

    def _select(self, level: Level, starts: list[int], key: Key) -> dict[int, array[int]]:
        if self._file is None or (number := self._ids.get(key)) is None:
            return {}
        marks = ",".join("?" * len(starts))
        rows = self._file.execute(
            f"SELECT start, slots FROM block WHERE step = ? AND series = ? AND start IN ({marks})",
            (level.step, number, *starts),
        )
        found = {}
        for start, slots in rows:
            try:
                found[start] = unpacked(slots, level.slots)
            except ValueError as error:
                self.trouble = f"history file {self.path}: a block of {key[0]} of {key[1]} cannot be read: {error}"
                _log.warning("%s", self.trouble)
        return found

    def _store(self, taken: list[tuple[Level, int, list[tuple[Key, array[int]]]]], now_ms: int) -> None:
        """Make room, then write blocks, in one transaction."""
        if self._file is None:
            return
        file = self._file
        with file:
            for level in LEVELS:
                ended = now_ms - level.kept - level.block
                file.execute("DELETE FROM block WHERE step = ? AND start <= ?", (level.step, ended))
            while self._used_bytes() > self.bytes_max - _ROOM_BYTES and self._drop_oldest():
                pass
            for level, start, block in taken:
                self._fill_up(level, start, dict(block))
                # The loop goes on filling slots: what is packed is a copy.
                rows = [(level.step, start, self._number(key), packed(slots[:])) for key, slots in block]
                file.executemany("INSERT OR REPLACE INTO block VALUES (?, ?, ?, ?)", rows)
            if any(level is LEVELS[_LONG] and start + level.block <= now_ms for level, start, _ in taken):
                self._forget_series()
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _fill_up(self, level: Level, start: int, block: Block) -> None:
        """Before a block is first written here, take from the file what is missing in it: after the clock stepped it
        may have been written before."""
        assert self._file is not None
        if (level.step, start) in self._filled:
            return
        self._filled.add((level.step, start))
        keys = {self._ids[key]: key for key in block if key in self._ids}
        where = "SELECT series, slots FROM block WHERE step = ? AND start = ?"
        for number, stored in self._file.execute(where, (level.step, start)):
            if (key := keys.get(number)) is not None:
                with contextlib.suppress(ValueError):  # damaged: what is written now takes its place
                    _fill(block[key], unpacked(stored, level.slots))

    def _number(self, key: Key) -> int:
        assert self._file is not None
        if (number := self._ids.get(key)) is None:
            number = self._file.execute("INSERT INTO series (figure, name) VALUES (?, ?)", key).lastrowid
            assert number is not None
            self._ids[key] = number
        return number

    def _forget_series(self) -> None:
        """Once a day: names of which nothing is left."""
        assert self._file is not None
        self._file.execute("DELETE FROM series WHERE id NOT IN (SELECT DISTINCT series FROM block)")
        self._ids = {(figure, name): number for number, figure, name in self._file.execute("SELECT * FROM series")}

    def _used_bytes(self) -> int:
        assert self._file is not None
        pages, free, size = (
            self._file.execute(f"PRAGMA {what}").fetchone()[0] for what in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def _oldest(self) -> tuple[int, int] | None:
        """Start and step of the oldest block."""
        assert self._file is not None
        found = [
            (start, level.step)
            for level in LEVELS
            for (start,) in self._file.execute("SELECT min(start) FROM block WHERE step = ?", (level.step,))
            if start is not None
        ]
        return min(found, default=None)

    def _drop_oldest(self) -> bool:
        """Delete the oldest block of all series. False: there is nothing to delete."""
        assert self._file is not None
        if (oldest := self._oldest()) is None:
            return False
        self._file.execute("DELETE FROM block WHERE start = ? AND step = ?", oldest)
        return True

    def _measure(self) -> tuple[int, int | None]:
        assert self.path is not None
        oldest = self._oldest() if self._file is not None else None
        return self.path.stat().st_size, oldest[0] if oldest else None


def _fill(slots: array[int], older: array[int]) -> None:
    """Put older figures where there are none."""
    for slot, value in enumerate(slots):
        if value == MISSING:
            slots[slot] = older[slot]


def _is_damage(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
