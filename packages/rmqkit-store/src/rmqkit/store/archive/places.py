"""Places that store segments: `Folder`, a directory, and `Objects`, a bucket or another address that pyarrow reads.

A segment appears under its name only when it is complete. A folder renames a finished file. An object store publishes
an object when its stream is closed. If a segment is incomplete in spite of this, it has no footer, and counts as
missing. `place_of` returns the place of a setting.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from rmqkit import extras
from rmqkit.errors import StoreError
from rmqkit.store.files import make_directory, sync_directory
from rmqkit.system import disk, process

__all__ = ["Folder", "Objects", "Place", "place_at", "place_of"]

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_PART = ".part"


class Place(Protocol):
    """A storage for segments by name. Every call raises OSError if the place refuses the call or cannot be reached.
    ``name``: the name of the last folder, which is that of the broker. ``uri``: the address for other programs, without
    options and credentials."""

    @property
    def name(self) -> str: ...

    @property
    def uri(self) -> str: ...

    def names(self) -> dict[str, int]:
        """Return the name and the length of every object."""

    def read(self, name: str, position: int, size: int) -> bytes:
        """Return ``size`` bytes of a segment, or fewer bytes at its end."""

    def writing(self, name: str) -> Any:
        """Return a context manager with a binary file. The file appears under the name when the context ends without an
        error."""


class Folder:
    """A directory on a local or mounted disk."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    @property
    def name(self) -> str:
        return self._path.name

    @property
    def uri(self) -> str:
        return f"file://{self._path.absolute()}"

    def names(self) -> dict[str, int]:
        if not disk.exists(self._path):
            return {}
        return {name: size for name, size in disk.file_sizes(self._path) if not name.endswith(_PART)}

    def read(self, name: str, position: int, size: int) -> bytes:
        descriptor = disk.open(self._path / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return disk.pread(descriptor, size, position)
        finally:
            disk.close(descriptor)

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        make_directory(self._path)
        for left in disk.names(self._path):
            if left.startswith(f"{name}.") and left.endswith(_PART):  # left by a process that was killed
                # If only the broker was killed, its sealing process may still run: its rename then fails.
                disk.remove(self._path / left, missing_ok=True)
        part = self._path / f"{name}.{process.number()}{_PART}"
        try:
            descriptor = disk.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                with io.BufferedWriter(_Appended(descriptor)) as file:
                    yield file
                # Sync the bytes before the rename, and the name before the caller reports the segment. Retention
                # deletes the log file after the report: a power cut must not leave an incomplete segment instead.
                disk.sync_file(descriptor)
            finally:
                disk.close(descriptor)
            disk.rename(part, self._path / name)
        except BaseException:
            disk.remove(part, missing_ok=True)
            raise
        sync_directory(self._path)


class _Appended(io.RawIOBase):
    """An open file of the disk to which bytes are appended. The caller closes the descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._position = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        written = disk.pwrite(self._descriptor, data, self._position)
        self._position += written
        return written


class Objects:
    """A place at an address of pyarrow.fs: ``s3://bucket/archive?endpoint_override=…``, ``gs://``, ``abfs://``,
    ``hdfs://``.
    Credentials are in the environment or in the address. They are never shown.
    Raises ExtraMissing: pyarrow is not installed. Raises StoreError: pyarrow does not support the address."""

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

    @property
    def name(self) -> str:
        return self.uri.rpartition("/")[2]

    @property
    def uri(self) -> str:
        return self._shown.rstrip("/")

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
        stream.close()  # not after an error: an object that was not closed is not published


def place_of(setting: str, below: str) -> Place:
    """Return the place at ``below`` under a path or an address.
    Raises ExtraMissing: numpy or pyarrow is not installed. Raises StoreError: the address cannot be a place."""
    with extras.needed("arrow", f"an archive at {shown(setting)}"):
        import numpy  # noqa: F401 - segments cannot be read without it
        import pyarrow  # noqa: F401 - segments cannot be read without it
    if _ADDRESS.match(setting):
        head, mark, options = setting.partition("?")
        return Objects(f"{head.rstrip('/')}/{below}{mark}{options}")
    return Folder(Path(setting).expanduser() / below)


def place_at(address: str) -> Place:
    """Return the place of a complete path or address, including the folder of a broker. Raises the errors of
    `place_of`."""
    if _ADDRESS.match(address):
        head, mark, options = address.partition("?")
        above, _, below = head.rstrip("/").rpartition("/")
        return place_of(f"{above}{mark}{options}", below)
    path = Path(address).expanduser().absolute()
    return place_of(str(path.parent), path.name)


def shown(address: str) -> str:
    """Return an address without its credentials and options."""
    return re.sub(r"//[^/@]*@", "//", address.partition("?")[0])
