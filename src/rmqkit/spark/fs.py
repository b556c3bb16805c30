"""The commit log files of a store: which there are, and their bytes.

==============  ============================================================================
file name       20 digits: the physical offset of the first byte
order           by name; several directories (``storePathCommitLog=a,b``) form one log
first files     may be missing or vanish any time: retention removes whole files at the front
==============  ============================================================================

Files are mapped read-only, so a mapping stays readable when the broker deletes the file. Source: store.md §2, §15.
"""

from __future__ import annotations

import io
import itertools
import mmap
import os
import re
from pathlib import Path

from msgspec import Struct

from rmqkit.errors import StoreError, StoreMismatch
from rmqkit.store.scan import Buffer

__all__ = ["Segment", "data_end", "find_segments", "local_path", "map_file"]

_SEGMENT_NAME = re.compile(r"\d{20}")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/+", re.IGNORECASE)


class Segment(Struct, frozen=True):
    """One file of a commit log."""

    path: str
    base_offset: int
    size: int


def local_path(text: str) -> Path:
    """An absolute path from a path or a ``file:`` address. Raises StoreError: the address is not of a local file."""
    scheme = _SCHEME.match(text)
    if scheme is None:
        return Path(text).absolute()
    if scheme[1].lower() != "file":
        raise StoreError(f"store {text} is not on a file system: copy it or mount it, and give a path")
    return Path("/" + text[scheme.end() :])


def find_segments(root: str, log_paths: list[str]) -> list[Segment]:
    """The files of a store's commit log, in order; empty ones are left out.
    ``log_paths`` are the directories of the log when they are not ``root/commitlog``.
    Raises StoreError: there is no such directory.
    Raises StoreMismatch: two files overlap."""
    folders = [local_path(text) for text in log_paths] or [local_path(root) / "commitlog"]
    found: list[Segment] = []
    for folder in folders:
        found += _segments_in(folder)
    found.sort(key=lambda segment: segment.base_offset)
    for segment, following in itertools.pairwise(found):
        if segment.base_offset + segment.size > following.base_offset:
            raise StoreMismatch(
                f"{segment.path} of {segment.size} bytes reaches into {following.path}: keep one copy of each file"
            )
    return found


def _segments_in(folder: Path) -> list[Segment]:
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        raise StoreError(f"{folder} does not exist: give the store directory, the one that holds commitlog") from None
    except NotADirectoryError:
        raise StoreError(f"{folder} is not a directory: give the store directory, the one with commitlog") from None
    segments: list[Segment] = []
    for entry in entries:
        if _SEGMENT_NAME.fullmatch(entry.name) and entry.is_file():
            try:
                size = entry.stat().st_size
            except FileNotFoundError:  # retention was quicker
                continue
            if size:
                segments.append(Segment(entry.path, int(entry.name), size))
    return segments


def map_file(path: str) -> Buffer:
    """The bytes of a file, mapped read-only.
    Raises StoreError: it cannot be opened; when it has vanished, the text says what to do."""
    with _opened(path) as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def data_end(path: str, size: int) -> int:
    """Where the last byte that was ever written may lie; behind it the file is a hole and reads as zeros.

    A preallocated segment is a sparse file: asking the file system saves reading a gigabyte of nothing.
    Raises StoreError: as in `map_file`."""
    end = 0
    with _opened(path) as file:
        try:
            while end < size:
                end = os.lseek(file.fileno(), os.lseek(file.fileno(), end, os.SEEK_DATA), os.SEEK_HOLE)
        except OSError:  # ENXIO: no data behind `end`
            return end
    return min(end, size)


def _opened(path: str) -> io.FileIO:
    try:
        return io.FileIO(path)
    except FileNotFoundError:
        raise StoreError(
            f"{path} has vanished since the query was planned: the broker's retention removed it; load the store again"
        ) from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
