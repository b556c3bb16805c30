"""The folder of an archive: what belongs to it, and how a run's files come to belong to it, all or none.

::

    target/topic=orders/day=2026-11-21/<offset>-<task>-0.parquet     what readers see
    target/_archive/000001.json                                      the manifest of the first run, and so on
    target/_archive/staging/000002/topic=orders/...                  files of a run that is not published
    target/_archive/000002.publishing                                the manifest of a run that is being published
    target/_delta_log, target/metadata, target/catalog.db            of Delta, of Iceberg

A run writes and verifies its files in ``staging``, which no reader looks at. Then the manifest is written as
``.publishing``: from there on the run happens. Files are moved to their places, the lake's transaction is committed,
and the manifest gets its name, last. A run that was killed before is forgotten by the next one, a run that was killed
behind that point is finished by it; each step can be done again. What belongs to an archive is what its manifests
list (`Target.runs`) and, for readers of a plain folder, the Parquet files outside of ``_archive``.

Local files are on the disk before the manifest says so. Archives on object stores have the same steps, without a lock
against a second run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
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

_FOLDER = "_archive"
_RUN = re.compile(r"(\d{6,})\.json")


class ArchivedSegment(Struct, rename="camel"):
    """The archived part of one log file: its records from one physical offset up to another.

    Attributes:
        base_offset, size: the file.
        low, high: physical offsets; ``high`` of a full file is the start of the next file.
        records: number of records that matched the conditions.
        rows: number of messages in them; an inner batch gives one for each member.
        lost: number of records, and of places without one, that gave no row, as the run was set to skip damage.
        edges_crc: CRC-32 of the first and last bytes in this range, by which a later run recognises the file.
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
    """The settings that all runs of an archive have in common."""

    table_format: str
    partition_by: tuple[str, ...]
    options: dict[str, str]


class Run(Struct, rename="camel"):
    """The manifest of one run."""

    number: int
    settings: ArchiveSettings
    segments: list[ArchivedSegment]
    files: list[ArchivedFile]


Commit = Callable[[Run], None]
"""Tells a lake's table about a run; a run that it knows already changes nothing."""


class Target(Struct, frozen=True):
    """The folder of an archive: an absolute path, or the address of one that ``pyarrow.fs`` knows (`resolve`)."""

    root: str

    @classmethod
    def of(cls, text: str) -> Target:
        """Make a target of the path or address that somebody gave."""
        return cls(resolve(text))

    @property
    def is_local(self) -> bool:
        """Return True if it is on a file system of this machine."""
        return not isinstance(self.root, RemotePath)

    @property
    def uri(self) -> str:
        """Its address."""
        return self.root.root if isinstance(self.root, RemotePath) else f"file://{self.root}"

    def filesystem(self) -> pafs.FileSystem:
        """Open the folder, so that paths are those in it. Raises SettingsError: its address is of no file system."""
        if not isinstance(self.root, RemotePath):
            return pafs.SubTreeFileSystem(self.root, pafs.LocalFileSystem())
        try:
            filesystem, path = filesystem_at(self.root.root)
        except (pa.ArrowException, OSError) as error:
            reason = str(error).partition("\n")[0].replace(self.root.root, self.root)
            raise SettingsError(f"target {self.root} cannot be opened: {reason}") from None
        return pafs.SubTreeFileSystem(path, filesystem)

    def path_of(self, file: ArchivedFile) -> str:
        """Name the place of one of its files, for Spark."""
        return f"{self.root}/{file.path}"

    def runs(self) -> list[Run]:
        """Read the manifests of its runs, in order; none if it is no archive.
        Raises StoreError: one of them cannot be read."""
        filesystem = self.filesystem()
        found = filesystem.get_file_info(pafs.FileSelector(_FOLDER, allow_not_found=True))
        names = sorted(
            (one.base_name for one in found if _RUN.fullmatch(one.base_name)), key=lambda name: int(name[:-5])
        )
        return [_load(filesystem, f"{_FOLDER}/{name}", self) for name in names]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder and keep other runs away.
        Raises SettingsError: there are other files in it. Raises StoreError: another run has it."""
        filesystem = self.filesystem()
        if filesystem.get_file_info(_FOLDER).type is not pafs.FileType.Directory:
            others = filesystem.get_file_info(pafs.FileSelector("", allow_not_found=True))
            if others:
                raise SettingsError(
                    f"target {self.root} is not empty ({others[0].base_name}) and no archive: give another folder"
                )
            filesystem.create_dir(_FOLDER)
        # An object store has no locks: there two runs at once are kept apart by nobody.
        if not self.is_local:
            yield
            return
        lock = StoreLock(Path(self.root, _FOLDER))
        try:
            lock.acquire()
        except StoreLocked:
            raise StoreError(f"another run writes to the archive {self.root}: wait for it") from None
        try:
            yield
        finally:
            lock.release()

    def staging(self, number: int) -> str:
        """Name where the files of a run are before they are published, under the paths that they will have."""
        return f"{_FOLDER}/staging/{number:06d}"

    def pending(self) -> list[Run]:
        """Read the run that was being published when it was killed, if one was. Raises StoreError: as `runs`."""
        filesystem = self.filesystem()
        found = filesystem.get_file_info(pafs.FileSelector(_FOLDER, allow_not_found=True))
        return [_load(filesystem, one.path, self) for one in found if one.base_name.endswith(".publishing")]

    def recover(self, commit: Commit) -> None:
        """Finish the run that was being published, and forget files of runs that were not."""
        for run in self.pending():
            self._finish(run, commit)
        self.discard()

    def discard(self) -> None:
        """Forget files that were not published."""
        filesystem = self.filesystem()
        if filesystem.get_file_info(f"{_FOLDER}/staging").type is pafs.FileType.Directory:
            filesystem.delete_dir(f"{_FOLDER}/staging")

    def publish(self, run: Run, commit: Commit) -> None:
        """Add a run's files to the archive; ``commit`` adds them to the table of its lake.
        Raises StoreError: a file is not where it was written."""
        # First the files: a manifest that outlives a power cut must not name files that are empty then.
        self._sync(f"{self.staging(run.number)}/{file.path}" for file in run.files)
        name = f"{_FOLDER}/{run.number:06d}.publishing"
        filesystem = self.filesystem()
        with filesystem.open_output_stream(f"{name}.tmp") as stream:
            stream.write(msgspec.json.format(msgspec.json.encode(run)))
        self._sync([f"{name}.tmp"])
        # This name makes the run final: any later run that finds it finishes this run. So it comes after every file.
        _move(filesystem, f"{name}.tmp", name)
        self._sync([_FOLDER])
        self._finish(run, commit)
        self.discard()

    def _finish(self, run: Run, commit: Commit) -> None:
        filesystem = self.filesystem()
        folders = {file.path.rpartition("/")[0] for file in run.files} - {""}
        for folder in folders:
            filesystem.create_dir(folder)
        # A file that is not staged any more was moved by a run that was killed here: each step can be done again.
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
        # Last: a run without its manifest is finished again, and the lake's table has its number already.
        name = f"{_FOLDER}/{run.number:06d}"
        _move(filesystem, f"{name}.publishing", f"{name}.json")
        self._sync([_FOLDER])

    def _sync(self, paths: Iterable[str]) -> None:
        """Wait until files, or the names in folders, are on the disk."""
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
    """A folder and those above it, below the archive's."""
    while path:
        yield path
        path = path.rpartition("/")[0]


def _load(filesystem: pafs.FileSystem, path: str, target: Target) -> Run:
    with filesystem.open_input_stream(path) as stream:
        content = stream.read()
    try:
        return msgspec.json.decode(content, type=Run)
    except msgspec.MsgspecError as error:
        raise StoreError(f"{target.root}/{path} is no manifest of an archive: {error}: restore it") from None
