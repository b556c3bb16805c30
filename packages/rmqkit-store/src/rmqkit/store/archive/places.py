"""Places that store segments: `Folder`, a directory, and `Objects`, a bucket or another address that pyarrow reads.

A segment appears complete under its name or not at all: a folder renames a finished file, an object store publishes an
object when its stream is closed. A segment that was cut nevertheless has no footer, and counts as missing.
`place_of` returns the place that a setting names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from rmqkit import extras
from rmqkit.errors import StoreError
from rmqkit.store.files import make_directory, sync_directory, sync_file

__all__ = ["Folder", "Objects", "Place", "place_at", "place_of"]

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_PART = ".part"


class Place(Protocol):
    """Keeps segments by name. Every call raises OSError when the place refuses or cannot be reached."""

    def names(self) -> dict[str, int]:
        """Name and length of everything that is there."""

    def read(self, name: str, position: int, size: int) -> bytes:
        """Bytes of a segment; fewer where it ends."""

    def writing(self, name: str) -> Any:
        """A context with a binary file; what was written appears under the name when it is left without an error."""


class Folder:
    """A directory, on a disk of its own or mounted."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def names(self) -> dict[str, int]:
        if not self._path.exists():
            return {}
        with os.scandir(self._path) as entries:
            return {one.name: one.stat().st_size for one in entries if not one.name.endswith(_PART) and one.is_file()}

    def read(self, name: str, position: int, size: int) -> bytes:
        descriptor = os.open(self._path / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(descriptor, size, position)
        finally:
            os.close(descriptor)

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        make_directory(self._path)
        for left in self._path.glob(f"{name}.*{_PART}"):  # of a process that was killed
            # Its process may live on where only the broker was killed: it has nothing to rename then, and fails.
            left.unlink(missing_ok=True)
        part = self._path / f"{name}.{os.getpid()}{_PART}"
        try:
            with part.open("wb") as file:
                yield file
                file.flush()
                # The bytes before the name, the name before anybody hears of it: then the retention deletes the log
                # file, and a power cut must not leave a segment that is cut in its place.
                sync_file(file.fileno())
            part.rename(self._path / name)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        sync_directory(self._path)


class Objects:
    """Below an address of pyarrow.fs: ``s3://bucket/archive?endpoint_override=…``, ``gs://``, ``abfs://``, ``hdfs://``.
    Credentials come from the environment, or lie in the address, which nobody is shown.
    Raises ExtraMissing: pyarrow is not installed. Raises StoreError: it does not know the address."""

    def __init__(self, address: str) -> None:
        with extras.needed("arrow", f"an archive at {shown(address)}"):
            import pyarrow
            from pyarrow import fs
        self._fs: Any = fs
        self._shown = shown(address)
        try:
            self._filesystem, self._path = fs.FileSystem.from_uri(address)
        except (pyarrow.ArrowInvalid, ValueError, OSError) as error:
            raise StoreError(f"{self._shown} is not an address of an archive: {error}") from None

    def __str__(self) -> str:
        return self._shown

    def names(self) -> dict[str, int]:
        selector = self._fs.FileSelector(self._path, allow_not_found=True)
        found = self._filesystem.get_file_info(selector)
        return {info.base_name: info.size for info in found if info.type is self._fs.FileType.File}

    def read(self, name: str, position: int, size: int) -> bytes:
        with self._filesystem.open_input_file(f"{self._path}/{name}") as file:
            file.seek(position)
            return bytes(file.read(size))

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        if self._filesystem.type_name in ("local", "hdfs"):
            self._filesystem.create_dir(self._path, recursive=True)
        stream = self._filesystem.open_output_stream(f"{self._path}/{name}")
        yield cast("BinaryIO", stream)
        stream.close()  # not behind an error: what is not closed is not published


def place_of(setting: str, below: str) -> Place:
    """The place below a path or an address.
    Raises ExtraMissing, StoreError: it cannot be one."""
    if _ADDRESS.match(setting):
        head, mark, options = setting.partition("?")
        return Objects(f"{head.rstrip('/')}/{below}{mark}{options}")
    return Folder(Path(setting).expanduser() / below)


def place_at(address: str) -> Place:
    """The place that a path or an address names whole, with the folder of its broker. Raises as `place_of`."""
    if _ADDRESS.match(address):
        head, mark, options = address.partition("?")
        above, _, below = head.rstrip("/").rpartition("/")
        return place_of(f"{above}{mark}{options}", below)
    path = Path(address).expanduser().absolute()
    return place_of(str(path.parent), path.name)


def shown(address: str) -> str:
    """An address without what only its owner should see."""
    return re.sub(r"//[^/@]*@", "//", address.partition("?")[0])
