"""The folder of an archive: its contents, and the atomic publication of the files of a run.

::

    target/topic=orders/day=2026-11-21/<offset>-<task>-0.parquet     the files for readers
    target/_archive/000001.json                                      the manifest of the first run, and so on
    target/_archive/staging/000002/topic=orders/...                  files of a run that is not published
    target/_archive/000002.publishing                                the manifest of a run that is being published
    target/_delta_log, target/metadata, target/catalog.db            files of Delta, and of Iceberg

A run writes and verifies its files in ``staging``, which readers ignore. Then the manifest is written as
``.publishing``: from now on the run is final. Files are moved to their places, the lake's transaction is committed, and
finally the manifest is renamed. If a run was killed before its manifest was written, the next run discards its files.
If the run was killed later, the next run finishes it. Each step can be repeated. The archive consists of the files in
its manifests (`Target.runs`). For readers of a plain folder, it consists of the Parquet files outside of ``_archive``.

Local files are synced to the disk before the manifest. Archives on object stores have the same steps, but no lock
against a concurrent run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pyarrow as pa
from msgspec import Struct
from pyarrow import fs as pafs

from rmqkit.arrow.fs import RemotePath, filesystem_at, resolve
from rmqkit.errors import SettingsError, StoreError, StoreLocked
from rmqkit.spark.jobs.archive_files import ArchivedFile
from rmqkit.store.files import StoreLock, sync_directory

_RUN = re.compile(r"(\d{6,})\.json")


class ArchivedSegment(Struct, rename="camel"):
    """The archived part of one log file: its records from ``low`` up to ``high``.

    Attributes:
        base_offset, size: base offset and size of the log file.
        low, high: physical offsets. ``high`` of a full file is the start of the next file.
        records: number of records that matched the conditions.
        rows: number of messages in these records. Each member of an inner batch is a message.
        lost: number of damaged places and records without a row, if the run skips damage.
        edges_crc: CRC-32 of the first and last bytes in this range. Later runs compare it with the file.
    """

    base_offset: int
    size: int
    low: int
    high: int
    records: int
    rows: int
    lost: int
    edges_crc: int


class ArchiveSettings(Struct, rename="camel", frozen=True):
    """The settings that are the same in all runs of an archive."""

    table_format: str
    partition_by: tuple[str, ...]
    options: dict[str, str]


class Run(Struct, rename="camel", omit_defaults=True):
    """The manifest of one run. ``replaced`` are the paths of older files whose rows are in ``files``."""

    number: int
    settings: ArchiveSettings
    segments: list[ArchivedSegment]
    files: list[ArchivedFile]
    replaced: list[str] = []


Commit = Callable[[Run], None]
"""A function that adds a run to a lake's table. If the table already has the run, the function changes nothing."""


class Target(Struct, frozen=True):
    """The folder of an archive: an absolute path, or an address of ``pyarrow.fs`` (`resolve`). ``folder`` is the
    folder inside it for manifests, and ``kind`` the word for its contents in errors."""

    root: str
    folder: str = "_archive"
    kind: str = "archive"

    @classmethod
    def of(cls, text: str) -> Target:
        """Create a target from a path or address."""
        return cls(resolve(text))

    @property
    def is_local(self) -> bool:
        """Return True if the archive is on a local file system."""
        return not isinstance(self.root, RemotePath)

    @property
    def uri(self) -> str:
        """Address of the folder."""
        return self.root.root if isinstance(self.root, RemotePath) else f"file://{self.root}"

    def filesystem(self) -> pafs.FileSystem:
        """Return a file system with paths relative to the folder. Raises SettingsError: the address is not valid."""
        if not isinstance(self.root, RemotePath):
            return pafs.SubTreeFileSystem(self.root, pafs.LocalFileSystem())
        try:
            filesystem, path = filesystem_at(self.root.root)
        except (pa.ArrowException, OSError) as error:
            reason = str(error).partition("\n")[0].replace(self.root.root, self.root)
            raise SettingsError(f"target {self.root} cannot be opened: {reason}") from None
        return pafs.SubTreeFileSystem(path, filesystem)

    def path_of(self, file: ArchivedFile) -> str:
        """Return the path of a file, for Spark."""
        return f"{self.root}/{file.path}"

    def runs(self) -> list[Run]:
        """Read the manifests of all runs, in order. Return an empty list if the folder is not an archive.
        Raises StoreError: a manifest cannot be read."""
        filesystem = self.filesystem()
        found = filesystem.get_file_info(pafs.FileSelector(self.folder, allow_not_found=True))
        names = sorted(
            (one.base_name for one in found if _RUN.fullmatch(one.base_name)), key=lambda name: int(name[:-5])
        )
        return [_load(filesystem, f"{self.folder}/{name}", self) for name in names]

    @contextmanager
    def held(self, own: Collection[str] = ()) -> Iterator[None]:
        """Create the folder and lock it against other runs. ``own`` are names that a new folder may contain.
        Raises SettingsError: the folder contains other files. Raises StoreError: another run has locked the folder."""
        filesystem = self.filesystem()
        if filesystem.get_file_info(self.folder).type is not pafs.FileType.Directory:
            found = filesystem.get_file_info(pafs.FileSelector("", allow_not_found=True))
            if others := [one for one in found if one.base_name not in own]:
                raise SettingsError(
                    f"target {self.root} is not empty ({others[0].base_name}) and no {self.kind}: give another folder"
                )
            filesystem.create_dir(self.folder)
        # An object store has no locks: concurrent runs are not prevented there.
        if not self.is_local:
            yield
            return
        lock = StoreLock(Path(self.root, self.folder))
        try:
            lock.acquire()
        except StoreLocked:
            raise StoreError(f"another run writes to the {self.kind} {self.root}: wait for it") from None
        try:
            yield
        finally:
            lock.release()

    def staging(self, number: int) -> str:
        """Return the folder for the unpublished files of a run. The files have the same relative paths there as
        later.
        """
        return f"{self.folder}/staging/{number:06d}"

    def pending(self) -> list[Run]:
        """Return the run that was killed during its publication, or an empty list. Raises StoreError: see `runs`."""
        filesystem = self.filesystem()
        found = filesystem.get_file_info(pafs.FileSelector(self.folder, allow_not_found=True))
        return [_load(filesystem, one.path, self) for one in found if one.base_name.endswith(".publishing")]

    def recover(self, commit: Commit) -> None:
        """Finish a run that was killed during its publication. Delete the files of runs that were not published."""
        for run in self.pending():
            self._finish(run, commit)
        self.discard()

    def discard(self) -> None:
        """Delete files that were not published."""
        filesystem = self.filesystem()
        if filesystem.get_file_info(f"{self.folder}/staging").type is pafs.FileType.Directory:
            filesystem.delete_dir(f"{self.folder}/staging")

    def publish(self, run: Run, commit: Commit) -> None:
        """Add the files of a run to the archive. ``commit`` adds the files to the lake's table.
        Raises StoreError: a written file is missing."""
        # Sync the files first: a manifest that survives a power failure must not name empty files.
        self._sync(f"{self.staging(run.number)}/{file.path}" for file in run.files)
        name = f"{self.folder}/{run.number:06d}.publishing"
        filesystem = self.filesystem()
        with filesystem.open_output_stream(f"{name}.tmp") as stream:
            stream.write(msgspec.json.format(msgspec.json.encode(run)))
        self._sync([f"{name}.tmp"])
        # This name makes the run final, because a later run will finish it. Therefore sync every file before the
        # rename.
        _move(filesystem, f"{name}.tmp", name)
        self._sync([self.folder])
        self._finish(run, commit)
        self.discard()

    def _finish(self, run: Run, commit: Commit) -> None:
        filesystem = self.filesystem()
        folders = {file.path.rpartition("/")[0] for file in run.files} - {""}
        for folder in folders:
            filesystem.create_dir(folder)
        # Readers of a plain folder see every Parquet file, so delete the replaced files first. Older versions of a lake
        # table still need these files.
        for path in run.replaced if run.settings.table_format == "parquet" else ():
            if filesystem.get_file_info(path).type is pafs.FileType.File:
                filesystem.delete_file(path)
        # Each step can be repeated: a file that is not in staging any more was moved before the run was killed.
        for file in run.files:
            staged = f"{self.staging(run.number)}/{file.path}"
            if filesystem.get_file_info(staged).type is pafs.FileType.File:
                _move(filesystem, staged, file.path)
            elif filesystem.get_file_info(file.path).size != file.bytes:
                raise StoreError(
                    f"{self.path_of(file)} of {file.bytes} bytes is gone: restore it, run {run.number} needs it"
                )
        self._sync({"", *(above for folder in folders for above in _folders_of(folder))})
        commit(run)
        # Rename last: a run that is killed before the rename is finished again, and the lake's table then already has
        # its number.
        name = f"{self.folder}/{run.number:06d}"
        _move(filesystem, f"{name}.publishing", f"{name}.json")
        self._sync([self.folder])

    def _sync(self, paths: Iterable[str]) -> None:
        """Sync files, or the names in folders, to the disk."""
        for path in paths if self.is_local else ():
            whole = Path(self.root, path)
            if whole.is_dir():
                sync_directory(whole)
            else:
                with open(whole, "rb") as file:
                    os.fsync(file.fileno())


def _move(filesystem: pafs.FileSystem, path: str, to: str) -> None:
    filesystem.move(path, to)


def _folders_of(path: str) -> Iterator[str]:
    """Yield a folder and its parents below the archive's folder."""
    while path:
        yield path
        path = path.rpartition("/")[0]


def _load(filesystem: pafs.FileSystem, path: str, target: Target) -> Run:
    with filesystem.open_input_stream(path) as stream:
        content = stream.read()
    try:
        return msgspec.json.decode(content, type=Run)
    except msgspec.MsgspecError as error:
        raise StoreError(f"{target.root}/{path} is not a manifest of an archive: {error}: restore it") from None
