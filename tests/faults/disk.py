"""A disk that forgets: it records the file operations of a store, and creates the files that a power cut may leave.

While entered, `Recorder` replaces functions of `rmqkit.system.disk`: it executes every operation on a file below its
directory and records it with a sequence number, its time. It only records syncs. It detects changes in the mapped
slots of index files before the next operation. `Recorder.cut` then creates the directory as a disk may hold
it when the power fails at a time:

==============  =======================================================================================================
written bytes   synced ones are there. Of the others every 4 KiB page holds any state it had since: the old one, the
                newest, one in between; or every sector of 512 bytes of it does (torn)
names, lengths  the file system's journal keeps their order (ext4, XFS): those up to some time are there, at least up
                to the newest operation on a synced file. Or *loosely*, as POSIX allows: every directory and
                every file has a time of its own, at least that of its own last sync
==============  =======================================================================================================

Not modelled: bytes that decay after a sync, and disks that report a sync too early.
"""

from __future__ import annotations

import mmap
import os
import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rmqkit.system import disk

PAGE_BYTES = 4096
SECTOR_BYTES = 512
LOOSE_SHARE = 0.25
"""Share of the cuts without an order between directories and files, which both ext4 and XFS guarantee."""


@dataclass(slots=True, eq=False)
class File:
    """One inode: its first content, and its operations: times with positions and bytes, lengths, syncs."""

    content: bytes = b""
    size: int = 0
    writes: list[tuple[int, int, bytes]] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    syncs: list[tuple[int, int]] = field(default_factory=list)
    journaled: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Directory:
    """One directory: its first entries, its present ones, and the changes in between."""

    entries: dict[str, File | Directory] = field(default_factory=dict)
    live: dict[str, File | Directory] = field(default_factory=dict)
    changes: list[tuple[int, dict[str, File | Directory | None]]] = field(default_factory=list)
    syncs: list[tuple[int, int]] = field(default_factory=list)
    journaled: list[int] = field(default_factory=list)


@dataclass(slots=True)
class CutStyle:
    """The state of unsynced data after a power cut.

    Attributes:
        pages: ``old``, ``new``, ``mixed`` (every page for itself) or ``torn`` (every sector for itself, in some pages).
        is_loose: whether names and lengths have no order between directories and files.
    """

    pages: str
    is_loose: bool

    @classmethod
    def any(cls, chance: random.Random) -> CutStyle:
        return cls(chance.choice(["old", "new", "mixed", "mixed", "torn", "torn"]), chance.random() < LOOSE_SHARE)


class Recorder:
    """A recorder of all operations below a directory while it is entered.

    Attributes:
        before: called before every operation that changes something; may call operations itself.
        while_syncing: called while a sync is under way.
    """

    def __init__(self, base: Path) -> None:
        self.base = str(base)
        self.time = 0
        self.before: Callable[[], None] = lambda: None
        self.while_syncing: Callable[[], None] = lambda: None
        self.of_interest: list[int] = []
        self._lock = threading.RLock()
        self._open: dict[int, File | Directory] = {}
        self._maps: list[tuple[File, mmap.mmap, bytearray]] = []
        self._real: dict[str, Any] = {}
        self._standing: AbstractContextManager[None] = nullcontext()
        self.root = self._load(base)

    def _load(self, path: Path) -> Directory:
        entries: dict[str, File | Directory] = {}
        for one in path.iterdir():
            if one.is_dir():
                entries[one.name] = self._load(one)
            else:
                content = one.read_bytes()
                entries[one.name] = File(content, len(content))
        return Directory(entries, dict(entries))

    # ---- standing between

    _FUNCTIONS = (
        "open",
        "close",
        "pwrite",
        "truncate",
        "sync_file",
        "sync_data",
        "map_file",
        "remove",
        "rename",
        "make_directory",
        "remove_directory",
        "remove_tree",
    )

    def __enter__(self) -> Recorder:
        self._real = {name: getattr(disk, name) for name in self._FUNCTIONS}
        self._standing = disk.replaced({name: getattr(self, f"_{name}_") for name in self._FUNCTIONS})
        self._standing.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._note_mapped()
        self._standing.__exit__(None, None, None)

    def _parts(self, path: Any) -> tuple[Directory, str] | None:
        """Return the directory and the name of a path below the base, or None for other paths."""
        text = os.fspath(path)
        if not isinstance(text, str) or not text.startswith(self.base + "/"):
            return None
        *parents, name = text[len(self.base) + 1 :].split("/")
        directory: Any = self.root
        for parent in parents:
            directory = directory.live.get(parent) if isinstance(directory, Directory) else None
        return (directory, name) if isinstance(directory, Directory) else None

    def _tick(self, *nodes: File | Directory) -> int:
        """Return the time of the next operation, which the journal records for these files and directories."""
        self.time += 1
        for node in nodes:
            node.journaled.append(self.time)
            self.of_interest.append(self.time)
        return self.time

    # ---- the operations

    def _open_(self, path: Any, flags: int, mode: int = 0o777, **keywords: Any) -> int:
        place = self._parts(path)
        if place is None:
            if os.fspath(path) == self.base:
                descriptor: int = self._real["open"](path, flags, mode, **keywords)
                self._open[descriptor] = self.root
                return descriptor
            return int(self._real["open"](path, flags, mode, **keywords))
        if flags & (os.O_CREAT | os.O_TRUNC):
            self.before()
        with self._lock:
            descriptor = self._real["open"](path, flags, mode, **keywords)
            directory, name = place
            node = directory.live.get(name)
            if node is None:
                node = File()
                self._enter_name(directory, {name: node}, node)
            elif flags & os.O_TRUNC and isinstance(node, File) and node.size:
                node.sizes.append((self._tick(node), 0))
                node.size = 0
            self._open[descriptor] = node
        return descriptor

    def _enter_name(self, directory: Directory, change: dict[str, File | Directory | None], *nodes: Any) -> None:
        directory.changes.append((self._tick(directory, *nodes), change))
        for name, node in change.items():
            if node is None:
                directory.live.pop(name, None)
            else:
                directory.live[name] = node

    def _close_(self, descriptor: int) -> None:
        with self._lock:
            self._open.pop(descriptor, None)
            self._real["close"](descriptor)

    def _pwrite_(self, descriptor: int, data: Any, position: int) -> int:
        node = self._open.get(descriptor)
        if not isinstance(node, File):
            return int(self._real["pwrite"](descriptor, data, position))
        self.before()
        with self._lock:
            self._note_mapped()
            count: int = self._real["pwrite"](descriptor, data, position)
            self.time += 1
            node.writes.append((self.time, position, bytes(data[:count])))
            if position + count > node.size:
                node.size = position + count
                node.sizes.append((self.time, node.size))
                node.journaled.append(self.time)
        return count

    def _map_file_(self, descriptor: int, size: int, *, writable: bool = False) -> mmap.mmap:
        mapping: mmap.mmap = self._real["map_file"](descriptor, size, writable=writable)
        node = self._open.get(descriptor)
        if isinstance(node, File) and writable:
            self._maps.append((node, mapping, bytearray(mapping)))
        return mapping

    def _note_mapped(self) -> None:
        """Record changes made through mappings."""
        for node, mapping, seen in self._maps:
            if seen == mapping:
                continue
            for at in range(0, len(seen), SECTOR_BYTES):
                sector = mapping[at : at + SECTOR_BYTES]
                if sector != seen[at : at + SECTOR_BYTES]:
                    seen[at : at + SECTOR_BYTES] = sector
                    self.time += 1
                    node.writes.append((self.time, at, sector))

    def _truncate_(self, descriptor: int, length: int) -> None:
        node = self._open.get(descriptor)
        if isinstance(node, File):
            self.before()
        with self._lock:
            self._real["truncate"](descriptor, length)
            if isinstance(node, File):
                node.sizes.append((self._tick(node), length))
                node.size = length

    def _sync_file_(self, descriptor: int) -> None:
        node = self._open.get(descriptor)
        if node is None:
            self._real["sync_file"](descriptor)
            return
        self._note_mapped()
        begun = self._tick()
        self.while_syncing()
        self.of_interest.append(self._tick())
        node.syncs.append((begun, self.time))

    _sync_data_ = _sync_file_

    def _remove_(self, path: Path, *, missing_ok: bool = False) -> None:
        self._remove_name("remove", path, missing_ok=missing_ok)

    def _remove_directory_(self, path: Path) -> None:
        self._remove_name("remove_directory", path)

    def _remove_tree_(self, path: Path) -> None:
        if not self._parts(path):
            self._real["remove_tree"](path)
        elif path.is_dir():
            for one in path.iterdir():
                (self._remove_tree_ if one.is_dir() else self._remove_)(one)
            self._remove_directory_(path)

    def _remove_name(self, function: str, path: Path, **keywords: Any) -> None:
        place = self._parts(path)
        if place:
            self.before()
        with self._lock:
            self._real[function](path, **keywords)
            if place and place[1] in place[0].live:
                directory, name = place
                self._enter_name(directory, {name: None}, directory.live[name])

    def _rename_(self, source: Any, target: Any) -> None:
        places = self._parts(source), self._parts(target)
        if places[0]:
            self.before()
        with self._lock:
            self._real["rename"](source, target)
            if places[0] and places[1]:
                (directory, old), (other, new) = places
                node = directory.live[old]
                if directory is other:
                    self._enter_name(directory, {old: None, new: node}, node)
                else:  # more than a file system may do: both names may exist
                    self._enter_name(other, {new: node}, node)
                    self._enter_name(directory, {old: None}, node)

    def _make_directory_(self, path: Path) -> None:
        place = self._parts(path)
        if place:
            self.before()
        with self._lock:
            self._real["make_directory"](path)
            if place and place[1] not in place[0].live:
                node = Directory()
                self._enter_name(place[0], {place[1]: node}, node)

    # ---- what is left

    def cut(self, time: int, style: CutStyle, chance: random.Random, to: Path) -> None:
        """Create the directory as a power cut right after the operation of a time may leave it."""
        kept = _journal_kept(self.root, time)
        until = time if style.pages == "new" else chance.randint(kept, time) if chance.random() < 0.8 else kept

        def reached(node: File | Directory) -> int:
            """Return the time up to which the names or lengths of a node are on the disk."""
            if not style.is_loose:
                return until
            own = _synced(node, time)
            return chance.choice([own, time, chance.randint(own, time)])

        _build(self.root, to, time, style, chance, reached)

    def live_tree(self) -> dict[str, bytes | None]:
        """Return the present state of the recorded directory: path to content, None for directories."""
        return dict(_live(self.root, ""))


def _synced(node: File | Directory, time: int) -> int:
    """Return the start of the last sync of a node that was complete at a time, or 0."""
    return max((begun for begun, ended in node.syncs if ended <= time), default=0)


def _all_nodes(directory: Directory) -> list[File | Directory]:
    """Return a directory and everything that was ever below it."""
    found: dict[int, File | Directory] = {}
    waiting: list[File | Directory] = [directory]
    while waiting:
        node = waiting.pop()
        if id(node) in found:
            continue
        found[id(node)] = node
        if isinstance(node, Directory):
            waiting += node.entries.values()
            waiting += [one for _, change in node.changes for one in change.values() if one is not None]
    return list(found.values())


def _journal_kept(root: Directory, time: int) -> int:
    """Return the newest journaled operation that a completed sync made durable, together with all earlier ones."""
    kept = 0
    for node in _all_nodes(root):
        if begun := _synced(node, time):
            kept = max(kept, max((at for at in node.journaled if at < begun), default=0))
    return kept


def _build(
    directory: Directory,
    to: Path,
    time: int,
    style: CutStyle,
    chance: random.Random,
    reached: Callable[[File | Directory], int],
) -> None:
    to.mkdir()
    until = reached(directory)
    entries = dict(directory.entries)
    for at, change in directory.changes:
        if at > until:
            break
        for name, node in change.items():
            if node is None:
                entries.pop(name, None)
            else:
                entries[name] = node
    for name, node in entries.items():
        if isinstance(node, Directory):
            _build(node, to / name, time, style, chance, reached)
        else:
            _write_sparse(to / name, _content(node, time, reached(node), style, chance))


def _content(file: File, time: int, until: int, style: CutStyle, chance: random.Random) -> bytes:
    """Return the bytes of a file after a cut.

    Args:
        until: the time up to which its lengths are on the disk.
    """
    synced = _synced(file, time)
    until = max(until, synced)
    size = len(file.content)
    data = bytearray(file.content)
    begun = 0  # writes before the newest truncation are gone
    for at, length in file.sizes:
        if at > until:
            if length == 0:  # later writes go to blocks that the file does not have yet
                time = at
                break
            continue
        size = length
        if length == 0:
            begun, data = at, bytearray()
    if len(data) < size:
        data += bytes(size - len(data))
    pending: dict[int, list[tuple[int, bytes]]] = {}
    for at, position, written in file.writes:
        if at < begun or at > time:
            continue
        end = position + len(written)
        if end > len(data):
            data += bytes(end - len(data))
        if at < synced:
            data[position:end] = written
            continue
        for page in range(position // PAGE_BYTES, (end - 1) // PAGE_BYTES + 1):
            pending.setdefault(page, []).append((position, written))
    for page, writes in pending.items():
        _write_page(data, page * PAGE_BYTES, writes, style, chance)
    return bytes(data[:size])


def _write_page(
    data: bytearray, start: int, writes: list[tuple[int, bytes]], style: CutStyle, chance: random.Random
) -> None:
    """Change one page to a state that it may have on the disk."""
    count = len(writes)
    if style.pages == "torn" and chance.random() < 0.5:
        steps, counts = SECTOR_BYTES, [chance.choice([0, count, chance.randint(0, count)]) for _ in range(8)]
    elif style.pages in ("old", "new"):
        steps, counts = PAGE_BYTES, [0 if style.pages == "old" else count]
    else:
        steps, counts = PAGE_BYTES, [chance.choice([0, count, chance.randint(0, count)])]
    for i, applied in enumerate(counts):
        low = start + i * steps
        high = low + steps
        for position, written in writes[:applied]:
            first, last = max(low, position), min(high, position + len(written))
            if first < last:
                data[first:last] = written[first - position : last - position]


def _write_sparse(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        for start in range(0, len(content), PAGE_BYTES):
            page = content[start : start + PAGE_BYTES]
            if page.count(0) != len(page):
                file.seek(start)
                file.write(page)
        file.truncate(len(content))


def _live(directory: Directory, prefix: str) -> list[tuple[str, bytes | None]]:
    found: list[tuple[str, bytes | None]] = []
    for name, node in directory.live.items():
        path = f"{prefix}{name}"
        if isinstance(node, Directory):
            found += [(path, None), *_live(node, path + "/")]
        else:
            content = bytearray(node.content)
            changes: list[tuple[int, int, bytes | None]] = [(at, length, None) for at, length in node.sizes]
            changes += [(at, position, written) for at, position, written in node.writes]
            for _, number, written in sorted(changes, key=lambda change: (change[0], change[2] is not None)):
                if written is None:
                    content = content[:number] + bytes(max(0, number - len(content)))
                else:
                    content[number : number + len(written)] = written
            found.append((path, bytes(content)))
    return found
