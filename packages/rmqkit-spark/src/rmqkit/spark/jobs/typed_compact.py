"""Small Parquet files of a table, merged to larger ones."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import NamedTuple

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


def merged(target: Target, number: int, paths: list[str]) -> ArchivedFile:
    """Write the rows of files to a new file in the staging folder of batch ``number``."""
    filesystem, folder = target.filesystem(), target.staging(number)
    filesystem.create_dir(folder)
    schema = pa.unify_schemas([pq.read_schema(path, filesystem=filesystem) for path in paths])
    name = f"{number - 1:06d}-{uuid.uuid4().hex[:12]}.parquet"
    sink = CountedSink(filesystem.open_output_stream(f"{folder}/{name}"))
    rows = 0
    with pq.ParquetWriter(pa.PythonFile(sink, mode="w"), schema, compression="zstd") as writer:
        tables = [schema.empty_table()]
        for path in paths:
            tables.append(pq.read_table(path, filesystem=filesystem))
            if path is paths[-1] or sum(table.nbytes for table in tables) > ROW_GROUP_BYTES:
                # A file that is older than a column has nulls there.
                writer.write_table(whole := pa.concat_tables(tables, promote_options="default"))
                rows += len(whole)
                del tables[1:]
    sink.close()
    return ArchivedFile(
        path=name, segment=0, topic=None, day=None, rows=rows, bytes=sink.size, offset_min=0, offset_max=0,
        stored_min_ms=None, stored_max_ms=None, crc=sink.crc,
    )  # fmt: skip
