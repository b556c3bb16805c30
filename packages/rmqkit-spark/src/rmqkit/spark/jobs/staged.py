"""Temporary copies of stores that are at an address, created in tasks, for jobs that need files on a disk.

`verify` and `rebuild` read every byte of a log in any order, map queues and index files, and write. Therefore a store
at an address (``s3://…``) is fetched first. Each core fetches one piece at a time. The files are sparse: zeros use no
disk space. On a cluster the driver and all executors must share the folder of the copy. The copy is removed at the end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from rmqkit.arrow.fs import RemotePath, exists, join, list_files, map_range, resolve, write_file
from rmqkit.errors import RmqError, StoreError
from rmqkit.spark.jobs.log_ranges import disk_errors
from rmqkit.spark.jobs.tasks import core_count, run_tasks
from rmqkit.store.settings import StoreSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["fetch", "settings_at", "staged", "upload"]

_PIECE_BYTES = 64 << 20
_BLOCK_BYTES = 64 << 10
_LEFT_OUT = ("lock",)


class _Piece(Struct):
    """A range of a file to fetch. ``target`` already exists with its full size."""

    source: str
    target: Path
    low: int
    high: int


@contextmanager
def staged(
    spark: SparkSession, path: str, work_dir: str = "", is_wanted: Callable[[str], bool] = lambda tree: True
) -> Iterator[Path]:
    """Return a context manager for the directory of a store. If ``path`` is an address, the directory is a copy that
    exists until the end of the context. Errors inside the context contain the address, not the path of the copy.

    Args:
        work_dir: folder for the copy; by default the folder for temporary files.
        is_wanted: returns True if the content of a file or folder in the store's directory is needed. Other files have
            only their names and sizes, and contain zeros.

    Raises:
        StoreError: the store is missing, or cannot be copied.
    """
    source = resolve(path)
    if not isinstance(source, RemotePath):
        yield Path(source)
        return
    if not exists(join(source, "commitlog")):
        raise StoreError(f"{join(source, 'commitlog')} does not exist: give the store directory, which contains it")
    with disk_errors(Path(work_dir or tempfile.gettempdir())):
        root = Path(tempfile.mkdtemp(prefix="rmqkit-", dir=work_dir or None))
    try:
        pieces: list[_Piece] = []
        with disk_errors(root):
            for file in list_files(source):
                target = root.joinpath(*file.names)
                # A name in an object store may contain `..`: write nothing outside of the copy.
                if file.names[0] in _LEFT_OUT or root not in target.resolve().parents:
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                # Set the full size first: tasks write their pieces in any order, and jobs check the sizes of files.
                with target.open("xb") as empty:
                    empty.truncate(file.size)
                if is_wanted(file.names[0]):
                    lows = range(0, file.size, _PIECE_BYTES)
                    pieces += [_Piece(file.path, target, low, min(low + _PIECE_BYTES, file.size)) for low in lows]
        if pieces:
            run_tasks(spark, fetch, pieces, min(len(pieces), 8 * core_count(spark)))
        yield root
    # The error contains paths of the copy, which the user does not know.
    except RmqError as error:
        raise _renamed(error, str(root), source) from None
    finally:
        shutil.rmtree(root, ignore_errors=True)


def settings_at(path: str, settings: StoreSettings | None) -> StoreSettings | None:
    """Return the settings for a copy of a store. A copy has no log directories outside of the store."""
    if settings is None or not isinstance(resolve(path), RemotePath):
        return settings
    return replace(settings, store_path_commit_log="", read_only_commit_log_store_paths="")


def fetch(piece: _Piece) -> None:
    """Copy a piece to its target. Runs of zeros stay holes. Raises StoreError: reading or writing failed."""
    buffer = map_range(piece.source, piece.low, piece.high)
    nothing = bytes(_BLOCK_BYTES)
    with disk_errors(piece.target), piece.target.open("r+b") as file, memoryview(buffer) as view:
        for low in range(piece.low, piece.high, _BLOCK_BYTES):
            block = view[low : min(low + _BLOCK_BYTES, piece.high)]
            if block != nothing[: len(block)]:
                os.pwrite(file.fileno(), block, low)


def upload(spark: SparkSession, root: Path, trees: Sequence[str], target: str) -> int:
    """Copy the files in some folders to an address or directory, in tasks. Return the number of files.
    Raises StoreError: a file cannot be written."""
    files = [
        path.relative_to(root).parts for tree in trees for path in sorted((root / tree).rglob("*")) if path.is_file()
    ]
    if files:
        run_tasks(spark, partial(_upload, root, target), files, min(len(files), 8 * core_count(spark)))
    return len(files)


def _upload(root: Path, target: str, names: tuple[str, ...]) -> None:
    write_file(root.joinpath(*names), join(resolve(target), *names))


def _renamed(error: RmqError, root: str, source: str) -> RmqError:
    """Return the same error with the address instead of the path of the copy."""
    renamed = type(error).__new__(type(error))
    renamed.args = (str(error).replace(root, source),)
    return renamed
