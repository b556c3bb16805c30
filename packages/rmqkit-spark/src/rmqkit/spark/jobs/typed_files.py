"""The Parquet files of a table: written from rows, and merged if they are small."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from rmqkit.spark.jobs.archive_files import ArchivedFile, CountedSink
from rmqkit.spark.jobs.archive_target import Target

SMALL_BYTES = 32 << 20
"""Files of this size or more are not merged."""
MERGED_BYTES = 128 << 20
ROW_GROUP_BYTES = 128 << 20
"""Size in memory of the rows that are written together. A row group of each small file would make slow files."""


class DataFile(NamedTuple):
    """A file of a table: its path below the folder, and its size."""

    path: str
    bytes: int


def data_files(target: Target) -> list[DataFile]:
    """Return the files of a plain folder."""
    found = target.filesystem().get_file_info(pafs.FileSelector(""))
    return [DataFile(one.path, one.size) for one in found if one.is_file and one.extension == "parquet"]


def groups(files: Iterable[DataFile]) -> Iterator[list[str]]:
    """Yield the paths of files that become one file: small files, ordered by name, of `MERGED_BYTES` at most."""
    group: list[str] = []
    size = 0
    for file in sorted(one for one in files if one.bytes < SMALL_BYTES):
        if size + file.bytes > MERGED_BYTES:
            yield group
            group, size = [], 0
        group.append(file.path)
        size += file.bytes
    if len(group) > 1:
        yield group


class NewFile:
    """A Parquet file in the staging folder of batch ``number``. It is created with its first rows."""

    def __init__(self, target: Target, number: int, schema: pa.Schema) -> None:
        self._filesystem, self._folder = target.filesystem(), target.staging(number)
        self._schema = schema
        # Each attempt of a task writes its own file; only the files of successful attempts are published.
        self._path = f"{number - 1:06d}-{uuid.uuid4().hex[:12]}.parquet"
        self._rows = 0
        self._writer: Any = None

    def add(self, rows: pa.Table | pa.RecordBatch) -> None:
        """Add a row group."""
        if not len(rows):
            return
        if self._writer is None:
            self._filesystem.create_dir(self._folder)
            self._sink = CountedSink(self._filesystem.open_output_stream(f"{self._folder}/{self._path}"))
            self._writer = pq.ParquetWriter(pa.PythonFile(self._sink, mode="w"), self._schema, compression="zstd")
        self._writer.write(rows)
        self._rows += len(rows)

    def close(self) -> list[ArchivedFile]:
        """Complete the file. Return its description, or an empty list if it has no rows."""
        if self._writer is None:
            return []
        self._writer.close()
        self._sink.close()
        file = ArchivedFile(
            path=self._path, segment=0, topic=None, day=None, rows=self._rows, bytes=self._sink.size, offset_min=0,
            offset_max=0, stored_min_ms=None, stored_max_ms=None, crc=self._sink.crc,
        )  # fmt: skip
        return [file]


def merged(target: Target, number: int, paths: list[str]) -> list[ArchivedFile]:
    """Write the rows of files to a new file in the staging folder of batch ``number``."""
    filesystem = target.filesystem()
    schema = pa.unify_schemas([pq.read_schema(path, filesystem=filesystem) for path in paths])
    file = NewFile(target, number, schema)
    tables = [schema.empty_table()]
    for path in paths:
        tables.append(pq.read_table(path, filesystem=filesystem))
        if path is paths[-1] or sum(table.nbytes for table in tables) > ROW_GROUP_BYTES:
            # A file that is older than a column has nulls there.
            file.add(pa.concat_tables(tables, promote_options="default"))
            del tables[1:]
    return file.close()
