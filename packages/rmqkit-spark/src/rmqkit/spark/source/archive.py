"""Files of an archive in an object store, read by `rmqkit.spark.jobs.query`.

Spark can only read ``s3://`` and ``s3a://`` with Hadoop's jars, which PySpark's wheel does not contain. This source
opens the files with pyarrow.fs, like the writer of the archive, with the same address and credentials. It is an
internal format: Spark with Hadoop's jars, or any other Parquet reader, reads an archive without rmqkit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from rmqkit.arrow.fs import join, open_input, resolve
from rmqkit.arrow.schema import CORRUPT_COLUMN, MESSAGE_COLUMNS, PROPERTY_STRING, Column, arrow_schema

FORMAT = "rmqkit-archive"
_BATCH_ROWS = 8192


class ArchiveSource(DataSource):
    """The files in the option ``files`` (JSON) below the option ``path``. The caller passes the schema."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return FORMAT

    def reader(self, schema: StructType) -> DataSourceReader:
        """Make a reader of the columns in ``schema``."""
        root = resolve(self.options["path"])
        paths = [join(root, *path.split("/")) for path in json.loads(self.options["files"])]
        known = (*MESSAGE_COLUMNS, PROPERTY_STRING, CORRUPT_COLUMN)
        wanted = [(field.name, field.dataType.simpleString()) for field in schema.fields]
        by_type = {(column.name, column.spark): column for column in known}
        return ArchiveReader(paths, [by_type[one] for one in wanted])


class ArchiveReader(DataSourceReader):
    """Reader of one file in each task."""

    def __init__(self, paths: Sequence[str], columns: Sequence[Column]) -> None:
        self._paths = list(paths)
        self._schema = arrow_schema(columns)

    def partitions(self) -> Sequence[InputPartition]:
        """Return a partition for each file."""
        return [InputPartition(path) for path in self._paths]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a file. Raises StoreError: the file cannot be read."""
        with open_input(partition.value) as file:
            for batch in pq.ParquetFile(file).iter_batches(_BATCH_ROWS, columns=self._schema.names):
                # Spark only accepts the exact types of its schema; Parquet returns the types of the file.
                arrays = [batch.column(field.name).cast(field.type) for field in self._schema]
                yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)
