"""The disk of a simulated machine: files in memory that survive a kill, and a power cut as far as they were synced.

The page cache and the disk are two states of one file. A write changes the cache, and keeps the former content of each
page of 4096 bytes until a sync. Names and lengths are operations in a journal until a sync.

==============  =======================================================================================================
a power cut     leaves
==============  =======================================================================================================
synced bytes    as they are
other bytes     for each page the former content, the newest, or a mixture by sectors of 512 bytes (torn)
names, lengths  *ordered*, as ext4 and XFS do it: all up to some operation, at least up to the newest operation before
                a sync. *Loose*, as POSIX allows, on a quarter of the disks: each directory and file by itself
==============  =======================================================================================================

===========  ===========================================================================================================
fault        effect
===========  ===========================================================================================================
``full``     writes that need a new page, and new names, fail with ENOSPC until a time
``failing``  syncs, or writes too, fail with EIO until a time. The pages of a failed sync count as clean, as in Linux:
             a later sync does not write them. A quarter of the disks drop these pages, as XFS and btrfs do: reads
             return the bytes that are on the disk
``slow``     a sync takes up to some seconds until a time
===========  ===========================================================================================================

A mapping is the cache itself. Not simulated: permissions, hard links, bytes that decay after a sync.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rmqkit.testing.simulation.scheduler import Program, Scheduler

__all__ = ["ROOT", "Disk", "Files"]

ROOT = "/simulated"
"""The directory of all simulated machines: a file of the machine ``m`` is ``/simulated/m/…``."""
PAGE_BYTES = 4096
SECTOR_BYTES = 512
_ZEROS = bytes(PAGE_BYTES)
_CAPACITY_BYTES = 1 << 30
_LOOSE_SHARE = _DROPPING_SHARE = 0.25
_FIRST_DESCRIPTOR = 1000
_SYNC_SECONDS = 0.0004
_CALL_SECONDS = 0.00002
_YIELD_SHARE = 0.2


@dataclass(slots=True, eq=False)
class Extent:
    """The bytes of a file since it was created or cut to nothing.

    Attributes:
        data: the page cache. It becomes a mapping when the file is mapped.
        durable_size: the length on the disk.
        dirty: the former content of each page that was written since the last sync.
        syncing: the same, of pages that a running sync writes.
        lost: the same, of pages that a failed sync left: the system considers them clean.
        shadow: the content of a writable mapping when it was last compared.
    """

    data: bytearray | mmap.mmap = field(default_factory=bytearray)
    size: int = 0
    durable_size: int = 0
    dirty: dict[int, bytes] = field(default_factory=dict)
    syncing: dict[int, bytes] = field(default_factory=dict)
    lost: dict[int, bytes] = field(default_factory=dict)
    shadow: bytearray | None = None


@dataclass(slots=True, eq=False)
class File:
    """A file: its present bytes, and those that the disk's journal names."""

    extent: Extent = field(default_factory=Extent)
    durable: Extent | None = None
    modified_ms: int = 0
    locked_by: Any = None


@dataclass(slots=True, eq=False)
class Directory:
    """A directory: its present names, and those on the disk."""

    entries: dict[str, Any] = field(default_factory=dict)
    durable: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Change:
    """An operation on names or lengths that is not on the disk. ``owner``: the directory or file that it changes."""

    owner: Directory | File
    apply: Callable[[], object]


@dataclass(slots=True, eq=False)
class OpenFile:
    """A descriptor."""

    disk: Disk
    node: Directory | File
    process: Program | None
    path: str


class Disk:
    """The disk of one machine.

    Attributes:
        is_loose: whether names and lengths have no order between directories and files.
        drops: whether the page cache drops the pages of a failed sync.
        full_until, failing_until, slow_until: seconds of the world until which a fault lasts.
        fails_writes: whether writes fail, too, while ``failing_until`` is not reached.
        calls, syncs: the number of calls and of syncs.
    """

    def __init__(self, world: Scheduler, name: str) -> None:
        self.world = world
        self.name = name
        self.root = Directory()
        self._chance = world.chance("disk", name)
        self.is_loose = self._chance.random() < _LOOSE_SHARE
        self.drops = world.chance("disk drops", name).random() < _DROPPING_SHARE
        self.full_until = self.failing_until = self.slow_until = 0.0
        self.fails_writes = False
        self.calls = self.syncs = 0
        self._changes: list[_Change] = []
        self._extents: dict[Extent, None] = {}

    @property
    def path(self) -> Path:
        """The directory of the machine."""
        return Path(ROOT, self.name)

    # ---- faults

    def fill(self, seconds: float) -> None:
        """Let the disk be full for a time."""
        self.world.note("full", self.name, f"{seconds:.3f}")
        self.full_until = self.world.now + seconds

    def fail(self, seconds: float, *, writes: bool = False) -> None:
        """Let syncs fail for a time, or writes, too."""
        self.world.note("failing", self.name, f"{seconds:.3f}", writes)
        self.failing_until, self.fails_writes = self.world.now + seconds, writes

    def slow(self, seconds: float) -> None:
        """Let syncs be late for a time."""
        self.world.note("slow disk", self.name, f"{seconds:.3f}")
        self.slow_until = self.world.now + seconds

    def heal(self) -> None:
        """End all faults."""
        self.full_until = self.failing_until = self.slow_until = 0.0

    def lose_power(self) -> None:
        """Lose what is not on the disk, as the seed says."""
        for extent in self._extents:
            _note_mapped(extent)
        self._apply(self._kept())
        self._changes.clear()
        self._extents.clear()
        _restore(self.root, self._chance, self._extents)

    def _kept(self) -> set[_Change]:
        """Return the operations that reached the disk, though nobody synced them."""
        chance = self._chance
        if not self.is_loose:
            return set(self._changes[: chance.randint(0, len(self._changes))])
        kept: set[_Change] = set()
        owners: dict[Directory | File, list[_Change]] = {}
        for change in self._changes:
            owners.setdefault(change.owner, []).append(change)
        for changes in owners.values():
            kept.update(changes[: chance.choice([0, len(changes), chance.randint(0, len(changes))])])
        return kept

    def _apply(self, changes: set[_Change]) -> None:
        """Bring operations to the disk, in their order."""
        for change in self._changes:
            if change in changes:
                change.apply()
        self._changes = [change for change in self._changes if change not in changes]

    # ---- calls, made by `Files`

    def before(self, kind: str, *, yields: float = _YIELD_SHARE) -> None:
        """Spend the time of a call. ``yields``: the share of the calls in which other threads run."""
        self.world.check_open()
        self.calls += 1
        actor = self.world.actor
        if actor is None:
            return
        actor.process.before_call()
        if yields and self._chance.random() < yields:
            actor.spend(_CALL_SECONDS * (1 + self._chance.random()))

    def refuse_if_full(self, path: object) -> None:
        if self.full_until > self.world.now:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def refuse_if_failing(self, path: object, *, is_write: bool) -> None:
        if self.failing_until > self.world.now and (self.fails_writes or not is_write):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    def change(self, owner: Directory | File, apply: Callable[[], object]) -> None:
        self._changes.append(_Change(owner, apply))

    def set_name(self, directory: Directory, changes: dict[str, Any]) -> None:
        """Enter names, or remove them (None)."""
        _rename_entries(directory.entries, changes)
        self.change(directory, lambda: _rename_entries(directory.durable, changes))

    def set_size(self, file: File, size: int) -> None:
        extent = file.extent
        if size == 0 and extent.size:
            fresh = file.extent = Extent()
            self._extents[fresh] = None
            self.change(file, lambda: setattr(file, "durable", fresh))
            return
        if size > len(extent.data):
            _grow(extent, size)
        elif size < extent.size:
            _remember(extent, size, extent.size)
            extent.data[size : extent.size] = bytes(extent.size - size)
        extent.size = size
        self.change(file, lambda: setattr(extent, "durable_size", size))

    def create(self, directory: Directory, name: str) -> File:
        file = File(modified_ms=self.now_ms())
        file.durable = file.extent
        self._extents[file.extent] = None
        self.set_name(directory, {name: file})
        return file

    def write(self, file: File, data: bytes, position: int, path: str) -> int:
        extent, end = file.extent, position + len(data)
        if end > extent.size:
            self.refuse_if_full(path)
            self.set_size(file, end)
        elif self.full_until > self.world.now and not _has_data(extent, position, min(end, position + PAGE_BYTES)):
            self.refuse_if_full(path)  # a hole has no blocks yet
        _remember(extent, position, end)
        extent.data[position:end] = data
        file.modified_ms = self.now_ms()
        return len(data)

    def sync(self, node: Directory | File, path: str) -> None:
        """Bring a file or directory to the disk, which takes a while."""
        self.syncs += 1
        extent = node.extent if isinstance(node, File) else None
        if extent is not None:
            _note_mapped(extent)
            for page, content in extent.dirty.items():
                extent.syncing.setdefault(page, content)
            extent.dirty.clear()
        reached = set(self._changes if not self.is_loose else (one for one in self._changes if one.owner is node))
        self._spend_sync()
        if self.failing_until > self.world.now:
            if extent is not None:
                (_drop if self.drops else _lose)(extent)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        self._apply(reached)
        if extent is not None:
            extent.syncing.clear()

    def _spend_sync(self) -> None:
        actor, chance = self.world.actor, self._chance
        if actor is None:
            return
        seconds = _SYNC_SECONDS * (0.3 + chance.random() + 30 * chance.random() ** 20)
        if self.slow_until > self.world.now:
            seconds += 3 * chance.random()
        actor.spend(seconds)

    def now_ms(self) -> int:
        return self.world.machines[self.name].now_ms() if self.name in self.world.machines else 0

    @property
    def used_bytes(self) -> int:
        """The bytes of all files, without holes."""
        return sum(PAGE_BYTES * len(_data_pages(file.extent)) for _, file in _files(self.root, ""))

    # ---- for owners of the world

    def process_ended(self, process: Program) -> None:
        """Release the descriptors and locks of a killed process. The page cache stays."""
        self.world.files.release(process)

    def files(self) -> dict[str, bytes]:
        """Return the present content of all files, by path below the machine's directory."""
        return {path: bytes(file.extent.data[: file.extent.size]) for path, file in _files(self.root, "")}

    def copy_to(self, folder: Path) -> None:
        """Write all files and directories to a real folder, sparsely, for programs that read real files."""
        _copy(self.root, folder)

    def close(self) -> None:
        """Forget everything."""
        self.root = Directory()
        self._changes.clear()
        self._extents.clear()


# ---------------------------------------------------------------- bytes and pages


def _grow(extent: Extent, size: int) -> None:
    if not extent.data:
        extent.data = bytearray(size)  # untouched memory: a large file of zeros costs nothing
    elif isinstance(extent.data, bytearray):
        extent.data.extend(bytes(size - len(extent.data)))
    else:
        larger = mmap.mmap(-1, size)
        larger[: len(extent.data)] = extent.data[:]
        extent.data = larger


def _remember(extent: Extent, start: int, end: int) -> None:
    """Keep the former content of the pages of a range."""
    for page in range(start // PAGE_BYTES, (end - 1) // PAGE_BYTES + 1):
        if page not in extent.dirty:
            lost = extent.lost.pop(page, None)  # a write makes the page dirty again: the next sync writes it
            known = bytes(extent.data[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])
            extent.dirty[page] = known if lost is None else lost


def _note_mapped(extent: Extent) -> None:
    """Find the pages that were changed through a writable mapping."""
    if extent.shadow is None:
        return
    for start in range(0, len(extent.shadow), PAGE_BYTES):
        page = bytes(extent.data[start : start + PAGE_BYTES])
        if extent.shadow[start : start + PAGE_BYTES] != page:
            extent.dirty.setdefault(start // PAGE_BYTES, bytes(extent.shadow[start : start + PAGE_BYTES]))
            extent.shadow[start : start + PAGE_BYTES] = page


def _lose(extent: Extent) -> None:
    """Mark the pages of a failed sync as clean: they are in the cache, and not on the disk. Those that were written
    meanwhile are dirty."""
    for page, content in extent.syncing.items():
        if page in extent.dirty:
            extent.dirty[page] = content
        else:
            extent.lost.setdefault(page, content)
    extent.syncing.clear()


def _drop(extent: Extent) -> None:
    """Give the pages of a failed sync the content that is on the disk, except those that were written meanwhile."""
    for page, content in extent.syncing.items():
        if page in extent.dirty:
            extent.dirty[page] = content
            continue
        start, end = page * PAGE_BYTES, min((page + 1) * PAGE_BYTES, len(extent.data))
        extent.data[start:end] = content.ljust(PAGE_BYTES, b"\0")[: end - start]
        if extent.shadow is not None:
            extent.shadow[start:end] = extent.data[start:end]
    extent.syncing.clear()


def _data_pages(extent: Extent) -> list[int]:
    pages = range((extent.size + PAGE_BYTES - 1) // PAGE_BYTES)
    return [page for page in pages if _has_data(extent, page * PAGE_BYTES, (page + 1) * PAGE_BYTES)]


def _has_data(extent: Extent, start: int, end: int) -> bool:
    part = extent.data[start:end]
    return part != _ZEROS[: len(part)]


def _restore(directory: Directory, chance: random.Random, extents: dict[Extent, None]) -> None:
    """Make the state of the disk the present one."""
    directory.entries = dict(directory.durable)
    for node in directory.entries.values():
        if isinstance(node, Directory):
            _restore(node, chance, extents)
        else:
            assert node.durable is not None, "a file with a name has bytes"
            node.extent = node.durable = _restored(node.durable, chance)
            node.locked_by = None
            extents[node.extent] = None


def _restored(extent: Extent, chance: random.Random) -> Extent:
    size = extent.durable_size
    data = bytearray(extent.data[:size])
    data.extend(bytes(size - len(data)))
    style = chance.choice(["old", "new", "mixed", "mixed", "torn", "torn"])
    for pages in (extent.dirty, extent.syncing, extent.lost):
        for page, former in sorted(pages.items()):
            found = "old" if pages is extent.lost else style
            _choose(data, page * PAGE_BYTES, former.ljust(PAGE_BYTES, b"\0"), found, chance)
    del data[size:]
    return Extent(data, size, size)


def _choose(data: bytearray, start: int, former: bytes, style: str, chance: random.Random) -> None:
    """Give a page one of the contents that it may have on the disk."""
    end = min(start + PAGE_BYTES, len(data))
    if style == "new" or start >= len(data) or (style == "mixed" and chance.random() < 0.5):
        return
    for sector in range(start, end, SECTOR_BYTES):
        if style != "torn" or chance.random() < 0.5:
            stop = min(sector + SECTOR_BYTES, end)
            data[sector:stop] = former[sector - start : stop - start]


def _rename_entries(entries: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, node in changes.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


def _files(directory: Directory, prefix: str) -> Iterator[tuple[str, File]]:
    for name, node in sorted(directory.entries.items()):
        if isinstance(node, Directory):
            yield from _files(node, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", node


def _copy(directory: Directory, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, node in sorted(directory.entries.items()):
        if isinstance(node, Directory):
            _copy(node, folder / name)
            continue
        extent = node.extent
        with (folder / name).open("wb") as file:
            for page in _data_pages(extent):
                file.seek(page * PAGE_BYTES)
                file.write(extent.data[page * PAGE_BYTES : min((page + 1) * PAGE_BYTES, extent.size)])
            file.truncate(extent.size)
        os.utime(folder / name, ns=(node.modified_ms * 1_000_000,) * 2)


# ---------------------------------------------------------------- the seam


class Files:
    """The functions of `rmqkit.system.disk`, for the disks of a world. Errors are those of the system."""

    def __init__(self, world: Scheduler) -> None:
        self._world = world
        self._open: dict[int, OpenFile] = {}
        self._numbers = itertools.count(_FIRST_DESCRIPTOR)

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return the functions by their names in the seam."""
        names = {
            name
            for name in dir(self)
            if not name.startswith("_") and name not in ("functions", "release", "open_files", "open_paths")
        }
        return {name: getattr(self, name) for name in names}

    @property
    def open_files(self) -> int:
        """The number of open descriptors."""
        return len(self._open)

    @property
    def open_paths(self) -> set[tuple[int, str]]:
        """The process's number and the path of each open file."""
        return {(0 if one.process is None else one.process.number, one.path) for one in self._open.values()}

    def release(self, process: Program) -> None:
        """Close the descriptors of a killed process."""
        for number in [number for number, one in self._open.items() if one.process is process]:
            self._close(number)

    # ---- finding nodes

    def _place(self, path: Any) -> tuple[Disk, Directory, str]:
        """Return the disk, the directory and the name of a path."""
        parts = Path(path).parts
        if len(parts) < 3 and ROOT.startswith("/".join(parts)[1:]):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        if parts[0] + parts[1] != ROOT:
            raise OSError(errno.EXDEV, f"a simulated process uses only files below {ROOT}", str(path))
        machine = self._world.machines.get(parts[2])
        if machine is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        node: Any = machine.disk.root
        if len(parts) == 3:
            return machine.disk, node, ""
        for part in parts[3:-1]:
            node = node.entries.get(part) if isinstance(node, Directory) else None
        if not isinstance(node, Directory):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return machine.disk, node, parts[-1]

    def _node(self, path: Any) -> tuple[Disk, Any]:
        """Return the disk and the node of a path, or None for a missing one."""
        try:
            disk, directory, name = self._place(path)
        except FileNotFoundError:
            return next(iter(self._world.machines.values())).disk, None
        return disk, directory.entries.get(name) if name else directory

    def _found(self, path: Any) -> tuple[Disk, Any]:
        disk, node = self._node(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return disk, node

    def _file(self, path: Any) -> tuple[Disk, File]:
        disk, node = self._found(path)
        if not isinstance(node, File):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        return disk, node

    def _opened(self, descriptor: int) -> OpenFile:
        self._world.check_open()
        one = self._open.get(descriptor)
        if one is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return one

    # ---- descriptors

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        disk, directory, name = self._place(path)
        disk.before("open")
        node = directory.entries.get(name) if name else directory
        if node is None:
            if not flags & os.O_CREAT:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            disk.refuse_if_full(path)
            node = disk.create(directory, name)
            self._world.note("create", path)
        elif isinstance(node, Directory) and flags & (os.O_WRONLY | os.O_RDWR):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        elif isinstance(node, File) and flags & os.O_TRUNC and node.extent.size:
            disk.set_size(node, 0)
        number = next(self._numbers)
        self._open[number] = OpenFile(disk, node, self._world.current_process, str(path))
        return number

    def close(self, descriptor: int) -> None:
        self._opened(descriptor)
        self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        one = self._open.pop(descriptor)
        if isinstance(one.node, File) and one.node.locked_by == descriptor:
            one.node.locked_by = None

    def duplicate(self, descriptor: int) -> int:
        number = next(self._numbers)
        self._open[number] = self._opened(descriptor)
        return number

    def pread(self, descriptor: int, size: int, position: int) -> bytes:
        one = self._opened(descriptor)
        one.disk.before("read", yields=0.0)
        assert isinstance(one.node, File), "a directory is not read"
        extent = one.node.extent
        return bytes(extent.data[position : min(position + size, extent.size)])

    def pwrite(self, descriptor: int, data: Any, position: int) -> int:
        one = self._opened(descriptor)
        one.disk.before("write")
        assert isinstance(one.node, File), "a directory is not written"
        content = bytes(data)
        one.disk.refuse_if_failing(one.path, is_write=True)
        self._world.note("write", one.path, position, len(content), zlib.crc32(content))
        return one.disk.write(one.node, content, position, one.path) if content else 0

    def truncate(self, descriptor: int, size: int) -> None:
        one = self._opened(descriptor)
        one.disk.before("truncate")
        assert isinstance(one.node, File), "a directory has no length"
        one.disk.set_size(one.node, size)

    def size_of(self, descriptor: int) -> int:
        node = self._opened(descriptor).node
        assert isinstance(node, File), "a directory has no length"
        return node.extent.size

    def seek_data(self, descriptor: int, position: int) -> int:
        return self._seek(descriptor, position, is_data=True)

    def seek_hole(self, descriptor: int, position: int) -> int:
        return self._seek(descriptor, position, is_data=False)

    def _seek(self, descriptor: int, position: int, *, is_data: bool) -> int:
        node = self._opened(descriptor).node
        assert isinstance(node, File), "a directory has no holes"
        extent = node.extent
        for start in range(position - position % PAGE_BYTES, extent.size, PAGE_BYTES):
            if _has_data(extent, start, start + PAGE_BYTES) == is_data:
                return max(start, position)
        if is_data or position >= extent.size:
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        return extent.size

    def map_file(self, descriptor: int, size: int, *, writable: bool = False) -> mmap.mmap:
        node = self._opened(descriptor).node
        assert isinstance(node, File), "a directory is not mapped"
        extent = node.extent
        if size > extent.size:
            raise ValueError("mmap length is greater than file size")
        if not isinstance(extent.data, mmap.mmap):
            mapping = mmap.mmap(-1, extent.size)
            mapping[:] = bytes(extent.data)
            extent.data = mapping
        if writable and extent.shadow is None:
            extent.shadow = bytearray(extent.data[:size])
        return extent.data

    def release_pages(self, mapping: mmap.mmap) -> None:
        """Do nothing: the mapping is the only copy."""

    def sync_data(self, descriptor: int) -> None:
        one = self._opened(descriptor)
        one.disk.before("sync", yields=0.0)
        self._world.note("sync", one.path)
        one.disk.sync(one.node, one.path)

    sync_file = sync_data

    def reserve(self, descriptor: int, size: int) -> None:
        one = self._opened(descriptor)
        one.disk.before("reserve")
        one.disk.refuse_if_full(one.path)
        if isinstance(one.node, File) and one.node.extent.size < size:
            one.disk.set_size(one.node, size)

    def drop_cached(self, descriptor: int, start: int, size: int) -> None:
        """Do nothing: the cache is the only copy."""

    # ---- paths

    def rename(self, source: Any, target: Any) -> None:
        disk, directory, name = self._place(source)
        disk.before("rename")
        _, other, new = self._place(target)
        node = directory.entries.get(name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))
        self._world.note("rename", source, target)
        if directory is other:
            disk.set_name(directory, {name: None, new: node})
        else:
            disk.set_name(other, {new: node})
            disk.set_name(directory, {name: None})

    def remove(self, path: Any, *, missing_ok: bool = False) -> None:
        self._remove(path, File, missing_ok=missing_ok)

    def remove_directory(self, path: Any) -> None:
        self._remove(path, Directory)

    def _remove(self, path: Any, kind: type, *, missing_ok: bool = False) -> None:
        try:
            disk, directory, name = self._place(path)
            node = directory.entries.get(name)
            if node is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        except FileNotFoundError:
            if missing_ok:
                return
            raise
        disk.before("remove")
        if isinstance(node, Directory) and (kind is File or node.entries):
            number = errno.ENOTEMPTY if kind is Directory else errno.EISDIR
            raise OSError(number, os.strerror(number), str(path))
        if isinstance(node, File) and kind is Directory:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        self._world.note("remove", path)
        disk.set_name(directory, {name: None})

    def remove_tree(self, path: Any) -> None:
        _, node = self._node(path)
        if isinstance(node, Directory):
            for name in list(node.entries):
                self.remove_tree(Path(path, name))
            self.remove_directory(path)
        elif node is not None:
            self.remove(path)

    def make_directory(self, path: Any) -> None:
        disk, directory, name = self._place(path)
        disk.before("make directory")
        node = directory.entries.get(name) if name else directory
        if isinstance(node, File):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        if node is None:
            disk.refuse_if_full(path)
            disk.set_name(directory, {name: Directory()})

    def names(self, directory: Any) -> list[str]:
        _, node = self._found(directory)
        if isinstance(node, File):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
        return sorted(node.entries)

    def file_sizes(self, directory: Any) -> list[tuple[str, int]]:
        _, node = self._found(directory)
        if isinstance(node, File):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
        return [(name, one.extent.size) for name, one in sorted(node.entries.items()) if isinstance(one, File)]

    def exists(self, path: Any) -> bool:
        return self._node(path)[1] is not None

    def is_directory(self, path: Any) -> bool:
        return isinstance(self._node(path)[1], Directory)

    def is_file(self, path: Any) -> bool:
        return isinstance(self._node(path)[1], File)

    def size(self, path: Any) -> int:
        return self._file(path)[1].extent.size

    def modified_ms(self, path: Any) -> int:
        return self._file(path)[1].modified_ms

    def set_modified_ms(self, path: Any, time_ms: int) -> None:
        self._file(path)[1].modified_ms = time_ms

    def read_file(self, path: Any) -> bytes:
        disk, file = self._file(path)
        disk.before("read")
        return bytes(file.extent.data[: file.extent.size])

    def space(self, path: Any) -> os.statvfs_result:
        disk, _ = self._found(path)
        blocks = _CAPACITY_BYTES // PAGE_BYTES
        free = 0 if disk.full_until > self._world.now else max(0, blocks - disk.used_bytes // PAGE_BYTES)
        return os.statvfs_result((PAGE_BYTES, PAGE_BYTES, blocks, free, free, blocks, free, free, 0, 255))

    def mounts(self, path: Any) -> list[tuple[str, str]]:
        return []

    # ---- locks

    def lock(self, path: Any) -> int:
        descriptor = self.open(path, os.O_RDWR | os.O_CREAT)
        node = self._open[descriptor].node
        assert isinstance(node, File), "a file is locked"
        if node.locked_by is not None:
            self._close(descriptor)
            raise BlockingIOError(errno.EWOULDBLOCK, "another process has locked it", str(path))
        node.locked_by = descriptor
        return descriptor

    def unlock(self, descriptor: int) -> None:
        self.close(descriptor)

    def is_locked(self, path: Any) -> bool:
        _, node = self._node(path)
        return isinstance(node, File) and node.locked_by is not None
