"""The files of a store, on a disk or at an address of pyarrow.fs: listing files, and reading bytes by position.

===========  ===================================  =========================================================
             path, or ``file:`` address           any other address of pyarrow.fs (s3:, gs:, abfs:, hdfs:)
===========  ===================================  =========================================================
bytes        mapped; they stay readable when the  fetched by ranges, each to its position in an anonymous
             broker deletes the file              mapping: other bytes cost nothing, and read as 0
end of the   reported by the file system          found with reads at a few places (`rmqkit.arrow.splits`)
last write   (`data_end`)
credentials  none                                 from the environment (``AWS_*``), or from the address;
                                                  `with_s3_settings` adds Hadoop's. `RemotePath` contains the
                                                  credentials, and no text shows them
===========  ===================================  =========================================================

The name of a commit log file is the physical offset of its first byte in 20 digits. Several directories
(``storePathCommitLog=a,b``) form one log, in the order of the file names. Retention may delete the oldest files at any
time. Source: store.md §2, §15.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import re
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from msgspec import Struct

from rmqkit.errors import StoreError, StoreMismatch
from rmqkit.store.log.scan import RECORD_BYTES_MIN, Buffer

_SEGMENT_NAME = re.compile(r"\d{20}")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/+", re.IGNORECASE)
_USER = re.compile(
    r"(:/+)(?:[^@/]*@|[^@/]*:(?!\d+(?:/|$))[^@]*@)"
)  # a secret may contain slashes that are not escaped as %2F
_TOKEN = "session_token"
_HADOOP_S3 = ("s3a", "s3n")  # Spark users write s3a://, pyarrow only supports s3://
_SIZE = struct.Struct(">i")
_NEAR_BYTES = 1 << 20  # a smaller gap between two ranges is fetched, too: cheaper than another request
_RECORD_GUESS_BYTES = 4096
_COPIED_BYTES = 4 << 20


class RemotePath(str):
    """A file or directory below an address, as a text without user, secret and options.
    ``root`` is the full address with these parts. ``below`` is the path below the address."""

    root: str
    below: str

    def __new__(cls, root: str, below: str = "") -> RemotePath:
        shown = _USER.sub(r"\1", root.partition("?")[0], count=1).rstrip("/")
        self = super().__new__(cls, f"{shown}/{below}" if below else shown)
        self.root, self.below = root, below
        return self

    def __reduce__(self) -> tuple[type[RemotePath], tuple[str, str]]:
        return RemotePath, (self.root, self.below)


class Segment(Struct, frozen=True):
    """One file of a commit log."""

    path: str
    base_offset: int
    size: int


class StoredFile(Struct, frozen=True):
    """A file below a directory. ``names`` is its relative path, split into names."""

    names: tuple[str, ...]
    path: str
    size: int


# ---------------------------------------------------------------- paths and addresses


def resolve(text: str) -> str:
    """Normalize a path or an address. Return an absolute path or a `RemotePath`."""
    scheme = _SCHEME.match(text)
    if scheme is not None and scheme[1].lower() in _HADOOP_S3 and not isinstance(text, RemotePath):
        return RemotePath(f"s3{text[scheme.end(1) :]}")
    if isinstance(text, RemotePath) or scheme is None:
        return text if isinstance(text, RemotePath) else str(Path(text).absolute())
    return f"/{text[scheme.end() :]}" if scheme[1].lower() == "file" else RemotePath(text)


def with_s3_settings(text: str, settings: Mapping[str, str]) -> str:
    """Add the values of Hadoop's connector settings (``fs.s3a.access.key``, ``spark.hadoop.fs.s3a.…``,
    ``fs.s3a.bucket.NAME.…``) to an S3 address that lacks them. Return any other path or address unchanged."""
    scheme = _SCHEME.match(text)
    if isinstance(text, RemotePath) or scheme is None or scheme[1].lower() not in ("s3", *_HADOOP_S3):
        return text
    place, _, query = text[scheme.end() :].partition("?")
    user, _, place = place.rpartition("@") if _USER.match(f":/{place}") else ("", "", place)
    bucket = place.partition("/")[0]
    given = {name.lower().removeprefix("spark.hadoop."): value for name, value in settings.items()}

    def setting(name: str) -> str:
        return given.get(f"fs.s3a.bucket.{bucket}.{name}") or given.get(f"fs.s3a.{name}", "")

    asked = dict(parse_qsl(query))
    if not user and setting("access.key"):
        user = f"{quote(setting('access.key'), safe='')}:{quote(setting('secret.key'), safe='')}"
        if setting("session.token"):
            asked.setdefault(_TOKEN, setting("session.token"))
    if setting("endpoint"):
        kind, _, host = setting("endpoint").rpartition("://")
        is_plain = kind == "http" or (not kind and setting("connection.ssl.enabled").lower() == "false")
        asked.setdefault("endpoint_override", host.rstrip("/"))
        asked.setdefault("scheme", "http" if is_plain else "https")
    if setting("endpoint.region"):
        asked.setdefault("region", setting("endpoint.region"))
    more = f"?{urlencode(asked)}" if asked else ""
    return f"s3://{user}{'@' if user else ''}{place}{more}"


def local_path(text: str) -> Path:
    """Convert a path or a ``file:`` address to an absolute path. Raises StoreError: the address is not a local file."""
    path = resolve(text)
    if isinstance(path, RemotePath):
        raise StoreError(f"store {path} is not on a file system: copy it or mount it, and give a path")
    return Path(path)


def join(folder: str, *names: str) -> str:
    """Append names to the path of a directory."""
    if isinstance(folder, RemotePath):
        return RemotePath(folder.root, "/".join(filter(None, (folder.below, *names))))
    return str(Path(folder, *names))


def above(path: str, levels: int) -> str:
    """Return the directory that is some levels above a path."""
    if isinstance(path, RemotePath):
        return RemotePath(path.root, "/".join(path.below.split("/")[:-levels]))
    return str(Path(path).parents[levels - 1])


def list_files(folder: str, *below: str) -> list[StoredFile]:
    """List the files at any depth of a directory, or of its subdirectory ``below``, sorted by name. Return an empty
    list if the directory does not exist. Raises StoreError: the directory cannot be listed."""
    listing = _remote_files if isinstance(folder, RemotePath) else _local_files
    return sorted(
        (
            StoredFile((*below, *names), join(folder, *below, *names), size)
            for names, size in listing(join(folder, *below))
        ),
        key=lambda file: file.names,
    )


def _local_files(folder: str) -> Iterator[tuple[tuple[str, ...], int]]:
    def refused(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):  # deleted meanwhile, or checked by the caller
            with _reading(folder):
                raise error

    for at, _, names in os.walk(folder, onerror=refused):
        way = Path(at).relative_to(folder).parts
        for name in names:
            with suppress(FileNotFoundError):  # deleted by retention meanwhile
                yield (*way, name), Path(at, name).stat().st_size


def _remote_files(folder: str) -> Iterator[tuple[tuple[str, ...], int]]:
    from pyarrow.fs import FileSelector, FileType

    filesystem, inside = _inside(folder)
    with _reading(folder):
        infos = filesystem.get_file_info(FileSelector(inside, recursive=True, allow_not_found=True))
    for info in infos:
        if info.type is FileType.File:
            way = info.path[info.path.index(inside) + len(inside) :].strip("/")
            yield tuple(way.split("/")), info.size


def find_segments(root: str, log_paths: list[str]) -> list[Segment]:
    """List the non-empty files of a store's commit log, in order.
    ``log_paths`` are the directories of the log, if it is not in ``root/commitlog``.
    Raises StoreError: a directory does not exist.
    Raises StoreMismatch: two files overlap, or files between two others are missing."""
    folders = [resolve(text) for text in log_paths] or [join(resolve(root), "commitlog")]
    found: list[Segment] = []
    for folder in folders:
        files = list_files(folder)
        if not files and not exists(folder):
            what = "is not a directory" if exists(folder, as_folder=False) else "does not exist"
            raise StoreError(f"{folder} {what}: give the store directory, the one that holds commitlog")
        found += [
            Segment(file.path, int(file.names[0]), file.size)
            for file in files
            if len(file.names) == 1 and _SEGMENT_NAME.fullmatch(file.names[0]) and file.size
        ]
    found.sort(key=lambda segment: segment.base_offset)
    for segment, following in itertools.pairwise(found):
        if segment.base_offset + segment.size > following.base_offset:
            raise StoreMismatch(
                f"{segment.path} of {segment.size} bytes reaches into {following.path}: keep one copy of each file"
            )
        # Check this also before a file that was only allocated: the missing file may have had the newest records.
        if (end := segment.base_offset + segment.size) < following.base_offset:
            raise StoreMismatch(
                f"commit log bytes {end} to {following.base_offset} are missing before {following.path}: restore the"
                " file between, or move the files before the gap away"
            )
    return found


def exists(path: str, *, as_folder: bool = True) -> bool:
    """Return True if a directory exists. With ``as_folder`` False, return True for a file, too.
    Raises StoreError: the path cannot be checked."""
    if not isinstance(path, RemotePath):
        return Path(path).is_dir() if as_folder else Path(path).exists()
    from pyarrow.fs import FileType

    filesystem, inside = _inside(path)
    with _reading(path):
        kind = filesystem.get_file_info(inside).type
    return kind is FileType.Directory if as_folder else kind is not FileType.NotFound


# ---------------------------------------------------------------- bytes


class StoreFile:
    """The bytes of a file at their positions. Bytes of a remote file that were not fetched are zeros.

    Attributes:
        size: size of the file in bytes when it was opened.
        buffer: the mapping.
    """

    def __init__(self, path: str) -> None:
        """Open the file. Raises StoreError: the file cannot be opened. If it was deleted, the text suggests a
        remedy.
        """
        self.path = path
        self._remote: Any = None
        with _reading(path), ExitStack() as stack:
            if isinstance(path, RemotePath):
                filesystem, inside = _inside(path)
                self._remote = filesystem.open_input_file(inside)
                self.size = int(self._remote.size())
                kind = {"fileno": -1, "flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
            else:
                file = stack.enter_context(open(path, "rb"))
                self.size = os.fstat(file.fileno()).st_size
                kind = {"fileno": file.fileno(), "access": mmap.ACCESS_READ}
            self.buffer: Buffer = mmap.mmap(length=self.size, **kind) if self.size else b""

    def fetch(self, low: int, high: int) -> None:
        """Fetch the bytes from ``low`` up to ``high`` if the file is remote. Raises StoreError: reading failed."""
        if self._remote is None or low >= high:
            return
        with _reading(self.path), memoryview(self.buffer) as view:
            # Read into the mapping at the same position, so that callers treat remote and local files alike.
            self._remote.seek(low)
            count = self._remote.readinto(view[low:high])
        if count != high - low:
            raise StoreError(f"{self.path} ended at byte {low + count} while it was read: load the store again")


def map_file(path: str) -> Buffer:
    """Map all bytes of a file. Raises StoreError: see `StoreFile`."""
    file = StoreFile(path)
    file.fetch(0, file.size)
    return file.buffer


def map_range(path: str, low: int, high: int) -> Buffer:
    """Map a file into a buffer, and fetch only its bytes from ``low`` up to ``high``. These bytes have the same
    positions in the buffer as in the file. The other bytes of the buffer must not be used.
    Raises StoreError: the file cannot be opened (see `StoreFile`), or is shorter than ``high``."""
    file = StoreFile(path)
    if file.size < high:
        raise StoreError(f"{path} has {file.size} bytes, {high} when the query was planned: load it again")
    file.fetch(low, high)
    return file.buffer


def map_records(path: str, positions: Sequence[int]) -> Buffer:
    """Map a file and fetch the records at some ascending positions. The other bytes of the buffer must not be used.
    Raises StoreError: see `StoreFile`."""
    file = StoreFile(path)
    if isinstance(path, RemotePath):
        inside = [position for position in positions if 0 <= position <= file.size - RECORD_BYTES_MIN]
        for low, high in _merged((at, min(at + _RECORD_GUESS_BYTES, file.size)) for at in inside):
            file.fetch(low, high)
        # The fetched bytes include the size field of every record. Fetch the rest of the longer records.
        ends = [(at, at + _SIZE.unpack_from(file.buffer, at)[0]) for at in inside]
        long = [(at + _RECORD_GUESS_BYTES, end) for at, end in ends if at + _RECORD_GUESS_BYTES < end <= file.size]
        for low, high in _merged(long):
            file.fetch(low, high)
    return file.buffer


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge ascending ranges that are near each other."""
    merged: list[tuple[int, int]] = []
    for low, high in ranges:
        assert not merged or merged[-1][0] <= low, "ranges ascend"
        if merged and low - merged[-1][1] < _NEAR_BYTES:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return merged


def read_file(path: str) -> bytes | None:
    """Return the content of a small file, or None if the file does not exist. Raises StoreError: the file cannot be
    read.
    """
    with suppress(FileNotFoundError), _reading(path, is_planned=False):
        if not isinstance(path, RemotePath):
            return Path(path).read_bytes()
        filesystem, inside = _inside(path)
        with filesystem.open_input_file(inside) as file:
            return bytes(file.read())
    return None


def write_file(source: Path, path: str) -> None:
    """Copy a local file to a path or address. Raises StoreError: the copy cannot be written."""
    try:
        if not isinstance(path, RemotePath):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)
            return
        filesystem, inside = _inside(path)
        with source.open("rb") as file, filesystem.open_output_stream(inside) as stream:
            shutil.copyfileobj(file, stream, _COPIED_BYTES)
    except OSError as error:
        reason = error.strerror or str(error).partition("\n")[0]
        raise StoreError(f"{path} cannot be written: {reason}") from None


@contextmanager
def open_input(path: str) -> Iterator[Any]:
    """Open a file for a reader of pyarrow. Raises StoreError: opening the file failed, or reading it inside the
    context.
    """
    from pyarrow.fs import LocalFileSystem

    filesystem, inside = _inside(path) if isinstance(path, RemotePath) else (LocalFileSystem(), path)
    with _reading(path), filesystem.open_input_file(inside) as file:
        yield file


def data_end(path: str, size: int) -> int:
    """Return the end of the written data in a file. After it the file is a hole and reads as zeros.

    A preallocated segment is a sparse file. The file system reports the hole, which saves reading up to a gigabyte of
    zeros. An object store has no holes: the end is ``size``. Raises StoreError: see `StoreFile`."""
    if isinstance(path, RemotePath):
        return size
    end = 0
    with _reading(path), open(path, "rb") as file, suppress(OSError):  # ENXIO: no data after `end`
        while end < size:
            end = os.lseek(file.fileno(), os.lseek(file.fileno(), end, os.SEEK_DATA), os.SEEK_HOLE)
    return min(end, size)


# ---------------------------------------------------------------- errors and connections


@contextmanager
def _reading(path: str, *, is_planned: bool = True) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        if not is_planned:
            raise
        raise StoreError(
            f"{path} has vanished since the query was planned: the broker's retention removed it; load the store again"
        ) from None
    except OSError as error:
        reason = error.strerror or str(error).partition("\n")[0]
        raise StoreError(f"{path} cannot be read: {reason}") from None


def _inside(path: str) -> tuple[Any, str]:
    """Return the file system of a remote file, and the name of the file in it."""
    assert isinstance(path, RemotePath), "the path is remote"
    filesystem, top = _connected(path.root)
    return filesystem, "/".join(filter(None, (top.rstrip("/"), path.below)))


def filesystem_at(address: str) -> tuple[Any, str]:
    """Return the file system of pyarrow.fs for an address, and the name of the address in this file system.
    Raises the errors of pyarrow."""
    from pyarrow.fs import FileSystem, S3FileSystem

    url = urlsplit(address)
    asked = dict(parse_qsl(url.query))
    token = asked.pop(_TOKEN, "")
    if not token:
        found: tuple[Any, str] = FileSystem.from_uri(address)
        return found
    # pyarrow supports temporary credentials, but accepts no token in an address.
    keys = {"access_key": unquote(url.username or ""), "secret_key": unquote(url.password or "")}
    return S3FileSystem(**keys, session_token=token, **asked), f"{url.hostname}{unquote(url.path)}"


@functools.lru_cache(maxsize=16)
def _connected(root: str) -> tuple[Any, str]:
    import pyarrow as pa

    try:
        filesystem, top = filesystem_at(root)
    except (pa.ArrowException, OSError, ValueError) as error:
        # pyarrow's text contains the address with the secret.
        reason = str(error).partition("\n")[0].replace(root, str(RemotePath(root)))
        raise StoreError(f"{RemotePath(root)} is not an address that pyarrow.fs can use: {reason}") from None
    return filesystem, top
