"""The history of figures, in one SQLite file per cluster, without a database server or set-up.

=======  ==============================================  ========  ==========  ===============================
step     series                                          block     retention   value of a slot
=======  ==============================================  ========  ==========  ===============================
10 s     brokers, and the 200 groups with most lag       1 h       6 h         the last figure
1 min    all series                                      1 h       7 d         the last figure
15 min   all series                                      1 d       90 d        the highest figure
=======  ==============================================  ========  ==========  ===============================

The current block is in memory, as an ``array`` of 64-bit slots for each series. A slot is a figure, unknown (-1: the
console requested the figure, but no broker reported it), or missing (-2: the console did not request it). Every 5
minutes, and when the console stops, blocks are written in one transaction. A kill loses the figures that are not
written yet, at most 5 minutes. After a start, the console loads and continues the current block.

A row of the file has the block of 64 series (a *chunk*): the slots of each series one after the other, eight bytes each
in the byte order of the machine, as an .xz stream with LZMA's delta filter. A constant figure needs 2 bytes per block,
a figure that changes by hundreds needs 1.6 bytes per slot. A row per slot would need 20 bytes. In larger chunks, a slot
needs less space, but the read of one series takes longer.

The size of the file is at most `FILE_BYTES_MAX`. This is enough for 12,000 changing series, with 90 days of quarter
hours and 2 days of minutes (``make measure-history``). The oldest blocks of minutes are deleted first, until one day of
minutes is left, then the oldest blocks of all. 12,000 series need 23 MB of memory. This includes the previous hour of
minutes, which `History.last_hour` needs.

A damaged file is renamed and replaced by a new file. Pages show the reason (``trouble``). A second console cannot open
the file. Its pages show this, and its history is only in memory. All calls of SQLite run in one thread. Use everything
else only on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import lzma
import sqlite3
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from rmqkit.admin.diagnosis.health import Snapshot
from rmqkit.clock import Clock
from rmqkit.console.access.audit import close_to_others
from rmqkit.console.html.charts import Point
from rmqkit.console.watch import figures
from rmqkit.console.watch.figures import FIGURES
from rmqkit.sentences import _

__all__ = ["HOUR_MS", "History", "packed", "unpacked"]

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
WRITE_S, LOCK_S = 300.0, 1.0
FILE_BYTES_MAX = 256 << 20
ROOM_BYTES = 32 << 20
"""The free space for the next write and its log."""
SERIES_MAX = 20_000
SYNCHRONOUS = "NORMAL"
"""The setting of SQLite. A power failure may lose the last write, but does not damage the file."""
FINE_GROUPS = 200
GAP_MS = 150_000
"""The longest distance of joined points in a line. An unused console takes a sample only once a minute."""
UNKNOWN, MISSING = -1, -2
_VALUE_MAX = 1 << 61
_CHUNK = 64
_FILTERS = [{"id": lzma.FILTER_DELTA, "dist": 8}, {"id": lzma.FILTER_LZMA2, "preset": 0}]
_MEMORY_MAX = 4 << 20
"""The memory limit for unpacking a chunk. A damaged chunk could need any amount."""
_VERSION = 3
_FINISHED_MAX = 4
STEP = 512
"""The number of figures that one iteration of the event loop stores."""

Key = tuple[str, str]
Block = dict[Key, "array[int]"]
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Level(Struct, frozen=True):
    """One resolution. All values are in ms."""

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


def packed(chunk: array[int]) -> bytes:
    """Return the stored form of a chunk."""
    return lzma.compress(chunk.tobytes(), lzma.FORMAT_XZ, lzma.CHECK_CRC32, filters=_FILTERS)


def unpacked(stored: bytes, slots: int) -> array[int]:
    """Return a stored chunk of blocks with ``slots`` slots. Raises ValueError: the chunk is damaged."""
    size = 8 * slots * _CHUNK
    try:
        plain = lzma.LZMADecompressor(lzma.FORMAT_XZ, _MEMORY_MAX).decompress(stored, size + 1)
    except lzma.LZMAError as error:
        raise ValueError(str(error)) from None
    if len(plain) != size:
        raise ValueError(f"{len(plain)} bytes in place of {size}")
    return array("q", plain)


class _Damaged(Exception):
    """An error: the file is not a history, or SQLite reports that the file is damaged."""


class _Level:
    """The data of one resolution in memory: the current block, and blocks that are not written yet."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self.start = 0
        self.blank = array("q", [MISSING]) * level.slots
        self.current: Block = {}
        self.finished: list[tuple[int, Block]] = []
        self.before: tuple[int, Block] = (0, {})

    def put(self, at_ms: int, key: Key, value: int, *, is_highest: bool) -> bool:
        """Store a value in a slot. Return False if there are too many series."""
        level = self.level
        start = at_ms - at_ms % level.block
        if start != self.start:
            if self.start - level.block <= start < self.start:
                return (
                    True  # the wall clock moved back before the beginning of the block: these slots are already written
                )
            self.end(start)
        slots = self.current.get(key)
        if slots is None:
            if len(self.current) >= SERIES_MAX:
                return False
            slots = self.current[key] = self.blank[:]
        slot = (at_ms - start) // level.step
        slots[slot] = max(slots[slot], value) if is_highest else value
        return True

    def end(self, start: int) -> None:
        """Finish the current block and begin another block."""
        if self.current:
            self.finished.append((self.start, self.current))
            if self.level.block == HOUR_MS:
                self.before = self.start, self.current
        self.start, self.current = start, {}

    def blocks(self) -> list[tuple[int, Block]]:
        return [*self.finished, (self.start, self.current)]


class Kept(Struct, rename="camel", kw_only=True):
    """The extent of the history. ``file`` is empty and ``file_bytes`` is 0 if the history is only in memory."""

    file: str
    file_bytes: int
    series: int
    oldest_ms: int | None
    written_ms: int | None
    trouble: str


class History:
    """The history of one cluster.

    Args:
        path: the file; None: only the current blocks are stored, in memory.
    """

    def __init__(self, path: Path | None, clock: Clock) -> None:
        self.path = path
        self.trouble = ""
        self.bytes_max = FILE_BYTES_MAX
        self._clock = clock
        self.levels = [_Level(level) for level in LEVELS]
        self._names: set[Key] = set()
        self._ids: dict[Key, int] = {}
        self._last: dict[int, int] = {}
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
        """Write the remaining blocks and close the file."""
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
        """Open the file and load its current blocks. After an error, the history is only in memory."""
        if self.path is not None:
            self._thread = ThreadPoolExecutor(1, "console history")
            try:
                for level, start, block in await self._in_thread(self._open, self._clock.now_ms()):
                    self._go_on(level, start, block)
                self._names |= set(self._ids)
            except (OSError, sqlite3.Error) as error:
                self.trouble = _(
                    "history file {path} cannot be used ({error}): figures are in memory alone",
                    path=self.path,
                    error=error,
                )
                _log.warning("%s", self.trouble)
        self._opened.set()

    def _go_on(self, level: _Level, start: int, block: Block) -> None:
        """Merge a block of the file into memory. Slots in memory are newer and do not change."""
        if level.start not in (0, start):
            return
        level.start = start
        for key, slots in block.items():
            _fill(level.current.setdefault(key, array("q", [MISSING]) * level.level.slots), slots)

    # -- writing

    async def follow(self, snapshot: Snapshot) -> None:
        """Store the figures of a snapshot, and let the loop run in between. A series begins with a known figure."""
        groups, is_full = 0, False
        for number, (figure, name, value) in enumerate(figures.values_of(snapshot), 1):
            if number % STEP == 0:
                await asyncio.sleep(0)
            if value is None and (figure, name) not in self._names:
                continue
            known = FIGURES.get(figure)
            if known is not None and not known.is_kept:
                continue
            groups += figure == "lag"
            is_fine = figure != "put" and groups <= FINE_GROUPS
            kept = UNKNOWN if value is None else min(_VALUE_MAX, max(0, round(value * (known.scale if known else 1))))
            is_full |= not self.put(snapshot.at_ms, figure, name, kept, is_fine=is_fine)
        if is_full and not self.trouble:
            self.trouble = _("there are more than {most:,} series: what is above has no history", most=SERIES_MAX)

    def put(self, at_ms: int, figure: str, name: str, value: int, *, is_fine: bool = False) -> bool:
        """Store a scaled figure in all resolutions. Return False if there are too many series."""
        key = figure, name
        self._names.add(key)
        fine, minutes, long = self.levels
        if is_fine:
            fine.put(at_ms, key, value, is_highest=False)
        return minutes.put(at_ms, key, value, is_highest=False) and long.put(at_ms, key, value, is_highest=True)

    # -- reading

    def names(self, figure: str, begin: str = "") -> list[str]:
        """Return the names with a history of a figure. ``begin``: only names that begin with this text."""
        return sorted(name for known, name in self._names if known == figure and name.startswith(begin))

    async def read(self, figure: str, name: str, begin_ms: int, end_ms: int) -> tuple[int, list[Point]]:
        """Return the finest step in ms and the points of a series between two times. An unknown value is None. A gap
        between samples has one point with None."""
        await self._opened.wait()
        key, now_ms = (figure, name), self._clock.now_ms()
        found: dict[int, tuple[int, int]] = {}
        for one in reversed(self.levels):  # finer slots replace the coarse slot of the same time
            step = one.level.step
            if one.level is LEVELS[_LONG] or now_ms - begin_ms <= one.level.kept:
                finer = await self._slots(one, key, begin_ms, end_ms)
                parts = {at - at % coarse.step for coarse in LEVELS if coarse.step > step for at in finer}
                found = {at: row for at, row in found.items() if at not in parts or row[0] <= step}
                found |= {at: (step, value) for at, value in finer.items()}
        scale = FIGURES[figure].scale if figure in FIGURES else 1
        points: list[Point] = []
        before_ms = 0
        for at in sorted(found):
            step, value = found[at]
            if points and at - points[-1][0] > max(GAP_MS, 2 * before_ms) and points[-1][1] is not None:
                points.append((points[-1][0] + before_ms, None))
            points.append((at, None if value < 0 else value / scale if scale > 1 else value))
            before_ms = step
        return min((step for step, __ in found.values()), default=LEVELS[_LONG].step), points

    def last_hour(self, figure: str, name: str) -> list[float | None]:
        """Return the figures of the last 60 minutes from memory, one per minute. None means unknown."""
        level, key = self.levels[_MINUTES], (figure, name)
        before = level.before[1].get(key) if level.before[0] == level.start - HOUR_MS else None
        slots = [*(before or level.blank), *level.current.get(key, level.blank)]
        end = len(slots) // 2 + 1 + (self._clock.now_ms() - level.start) // level.level.step
        scale = FIGURES[figure].scale
        return [None if value < 0 else value / scale for value in slots[max(0, end - 60) : end]]

    async def _slots(self, level: _Level, key: Key, begin_ms: int, end_ms: int) -> dict[int, int]:
        """Return the slots of a series at one resolution by time, without missing slots."""
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
        """Return the extent of the history."""
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
        """Write all blocks in memory. After a failure, the next write retries with the last four finished blocks of
        each resolution."""
        for one in self.levels:
            if one.start <= now_ms - one.level.block:  # the block is complete
                one.end(now_ms - now_ms % one.level.block)
        if self._file is not None:
            taken = [
                (one.level, start, list(block.items()))
                for one in self.levels
                for start, block in one.blocks()
                if block and start > now_ms - one.level.kept - one.level.block
            ]
            # Count before the await, because blocks that finish during the write are not written yet.
            done = [len(one.finished) for one in self.levels]
            try:
                await self._in_thread(self._store, taken, now_ms)
                self._written_ms = now_ms
                for one, count in zip(self.levels, done, strict=True):
                    self._filled -= {(one.level.step, start) for start, __ in one.finished[:count]}
                    del one.finished[:count]
            except sqlite3.Error as error:
                await self._failed(error)
        for one in self.levels:
            if self.path is not None and len(one.finished) > _FINISHED_MAX:
                self.trouble = _(
                    "history file {path} was not written for hours: the oldest figures are lost", path=self.path
                )
            del one.finished[:-_FINISHED_MAX]
        self._names &= set().union(*(one.current for one in self.levels)) | set(self._ids)

    async def _failed(self, error: sqlite3.Error) -> None:
        """Handle the error of a read or write. Replace a damaged file. After other errors, the next call retries."""
        if not _is_damage(error):
            self.trouble = _(
                "history file {path}: {error}; its figures are not shown; trying again",
                path=self.path,
                error=error,
            )
            _log.warning("%s", self.trouble)
            return
        try:
            await self._in_thread(self._start_over, str(error))
        except (OSError, sqlite3.Error) as other:
            self._file, self.trouble = (
                None,
                _(
                    "history file {path} is damaged ({error}) and is not deleted: {other}",
                    path=self.path,
                    error=error,
                    other=other,
                ),
            )
            _log.warning("%s", self.trouble)

    async def _in_thread(self, function: Callable[..., T], *args: object) -> T:
        assert self._thread is not None, "a history with a file has a thread"
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _open(self, now_ms: int) -> list[tuple[_Level, int, Block]]:
        """Open the file, check it, and return its current blocks. Replace a damaged file."""
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
            self._start_over(str(error))
            return []

    def _connect(self) -> None:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        close_to_others(self.path)  # SQLite creates its other files with the same mode
        self._file = file = sqlite3.connect(self.path, timeout=LOCK_S)
        file.execute("PRAGMA locking_mode = EXCLUSIVE")  # only one console uses the file
        file.execute("PRAGMA journal_mode = WAL")
        file.execute(f"PRAGMA synchronous = {SYNCHRONOUS}")
        version = file.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, _VERSION):
            raise _Damaged(_("it has version {version}, and this console knows {ours}", version=version, ours=_VERSION))
        with file:
            file.execute(
                "CREATE TABLE IF NOT EXISTS series"
                " (id INTEGER PRIMARY KEY, figure TEXT NOT NULL, name TEXT NOT NULL, last INTEGER NOT NULL,"
                " UNIQUE (figure, name))"
            )
            file.execute(
                "CREATE TABLE IF NOT EXISTS block (step INTEGER, start INTEGER, chunk INTEGER, slots BLOB,"
                " PRIMARY KEY (step, start, chunk))"
            )
            file.execute(f"PRAGMA user_version = {_VERSION}")
        self._read_series()

    def _read_series(self) -> None:
        assert self._file is not None
        rows = self._file.execute("SELECT * FROM series").fetchall()
        self._ids = {(figure, name): number for number, figure, name, __ in rows}
        self._last = {number: last for number, __, __, last in rows}

    def _under_way(self, now_ms: int) -> list[tuple[_Level, int, Block]]:
        assert self._file is not None
        keys = {number: key for key, number in self._ids.items()}
        found = []
        for memory in self.levels:
            level = memory.level
            start = now_ms - now_ms % level.block
            block: Block = {}
            for chunk, stored in self._chunks(level, start).items():
                columns = unpacked(stored, level.slots)
                for place in range(_CHUNK):
                    slots = columns[place * level.slots : (place + 1) * level.slots]
                    if (key := keys.get(chunk * _CHUNK + place)) and slots.count(MISSING) < level.slots:
                        block[key] = slots
            found.append((memory, start, block))
        return found

    def _chunks(self, level: Level, start: int) -> dict[int, bytes]:
        """Return the stored chunks of a block."""
        assert self._file is not None
        where = "SELECT chunk, slots FROM block WHERE step = ? AND start = ?"
        return dict(self._file.execute(where, (level.step, start)))

    def _start_over(self, why: str) -> None:
        """Rename a damaged file for later analysis, and create a new file."""
        assert self.path is not None
        self._close()
        aside = self.path.with_name(f"{self.path.name}.damaged-{self._clock.now_ms()}")
        for end in ("", "-wal"):
            if (old := self.path.with_name(self.path.name + end)).exists():
                old.replace(aside.with_name(aside.name + end))
        self._connect()
        self.trouble = _(
            "history file {path} was damaged ({why}): it is kept as {name}, and a new one began",
            path=self.path,
            why=why,
            name=aside.name,
        )
        _log.warning("%s", self.trouble)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file, self._ids, self._last, self._filled = None, {}, {}, set()

    def _select(self, level: Level, starts: list[int], key: Key) -> dict[int, array[int]]:
        if self._file is None or (number := self._ids.get(key)) is None:
            return {}
        marks = ",".join("?" * len(starts))
        chunk, place = divmod(number, _CHUNK)
        rows = self._file.execute(
            f"SELECT start, slots FROM block WHERE step = ? AND chunk = ? AND start IN ({marks})",
            (level.step, chunk, *starts),
        )
        found = {}
        for start, stored in rows:
            try:
                found[start] = unpacked(stored, level.slots)[place * level.slots : (place + 1) * level.slots]
            except ValueError as error:
                self.trouble = _(
                    "history file {path}: a block of {key} of {name} cannot be read: {error}",
                    path=self.path,
                    key=key[0],
                    name=key[1],
                    error=error,
                )
                _log.warning("%s", self.trouble)
        return found

    def _store(self, taken: list[tuple[Level, int, list[tuple[Key, array[int]]]]], now_ms: int) -> None:
        """Delete old blocks to make room, then write blocks, in one transaction."""
        if self._file is None:
            return
        file, before = self._file, (dict(self._ids), dict(self._last), set(self._filled))
        try:
            with file:
                self._store_all(taken, now_ms)
        except BaseException:
            self._ids, self._last, self._filled = before  # the values in the file
            raise
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _store_all(self, taken: list[tuple[Level, int, list[tuple[Key, array[int]]]]], now_ms: int) -> None:
        assert self._file is not None
        for level in LEVELS:
            ended = now_ms - level.kept - level.block
            self._file.execute("DELETE FROM block WHERE step = ? AND start <= ?", (level.step, ended))
        while self._used_bytes() > self.bytes_max - ROOM_BYTES and self._drop_oldest(now_ms):
            pass
        for level, start, block in taken:
            self._store_block(level, start, block)
        ended = now_ms - LEVELS[_LONG].kept - 2 * LEVELS[_LONG].block
        if self._file.execute("DELETE FROM series WHERE last < ?", (ended,)).rowcount:
            self._read_series()

    def _store_block(self, level: Level, start: int, block: list[tuple[Key, array[int]]]) -> None:
        """Store some series of a block. Other stored series of the block stay unchanged."""
        assert self._file is not None
        is_first, stored = (level.step, start) not in self._filled, self._chunks(level, start)
        self._filled.add((level.step, start))
        chunks: dict[int, array[int]] = {}
        for key, slots in block:
            number = self._number(key, start)
            chunk, place = divmod(number, _CHUNK)
            if chunk not in chunks:
                chunks[chunk] = array("q", [MISSING]) * (level.slots * _CHUNK)
                with contextlib.suppress(ValueError, KeyError):  # the chunk is missing or damaged: replace it
                    chunks[chunk] = unpacked(stored[chunk], level.slots)
            columns = chunks[chunk]
            own = slice(place * level.slots, (place + 1) * level.slots)
            if is_first:
                _fill(slots, columns[own])  # the block may already be in the file, after a step of the clock
            columns[own] = slots
        rows = [(level.step, start, chunk, packed(columns)) for chunk, columns in chunks.items()]
        self._file.executemany("INSERT OR REPLACE INTO block VALUES (?, ?, ?, ?)", rows)

    def _number(self, key: Key, start: int) -> int:
        """Return the number of a series. A number is not reused while a block may contain the old series."""
        assert self._file is not None
        if (number := self._ids.get(key)) is None:
            where = "INSERT INTO series (figure, name, last) VALUES (?, ?, ?)"
            number = self._file.execute(where, (*key, start)).lastrowid
            assert number is not None
            self._ids[key] = number
        elif start >= self._last[number] + DAY_MS:
            self._file.execute("UPDATE series SET last = ? WHERE id = ?", (start, number))
        else:
            return number
        self._last[number] = start
        return number

    def _used_bytes(self) -> int:
        assert self._file is not None
        pages, free, size = (
            self._file.execute(f"PRAGMA {what}").fetchone()[0] for what in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def _oldest(self) -> list[tuple[int, int]]:
        """Return the start and step of the oldest block of each resolution, the finest resolution first."""
        assert self._file is not None
        where = "SELECT min(start), step FROM block WHERE step = ?"
        found = [self._file.execute(where, (level.step,)).fetchone() for level in LEVELS]
        return [one for one in found if one[0] is not None]

    def _drop_oldest(self, now_ms: int) -> bool:
        """Delete a block of all series: the oldest block of the finest resolution with a block older than a day, or
        else the oldest block of all. Return False if there is no block."""
        assert self._file is not None
        if not (oldest := self._oldest()):
            return False
        chosen = next((one for one in oldest if one[0] < now_ms - DAY_MS), min(oldest))
        self._file.execute("DELETE FROM block WHERE start = ? AND step = ?", chosen)
        return True

    def _measure(self) -> tuple[int, int | None]:
        assert self.path is not None
        oldest = self._oldest() if self._file is not None else []
        return self.path.stat().st_size, min(oldest)[0] if oldest else None


def _fill(slots: array[int], older: array[int]) -> None:
    """Replace missing slots by older figures."""
    for slot, value in enumerate(slots):
        if value == MISSING:
            slots[slot] = older[slot]


def _is_damage(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
