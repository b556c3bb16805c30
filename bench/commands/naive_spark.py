"""The comparisons of `spark`: the obvious ways into Spark and Parquet.

===================  ==================================================================================================
`naive_rows`         a record, a ``struct`` call, a dict of properties, a tuple
`naive_batches`      those tuples as Arrow columns
`NaiveRows`          a Spark source that yields them as rows
`TransferOnly`       a Spark source that sends one decoded batch again and again: the cost of transfer alone
`QueueFiles`         a Spark sink for entries of consume queues, one row for every message, sorted by queue
===================  ==================================================================================================

They return the same rows and the same bytes as ours, and are only used for measurements.
"""

from __future__ import annotations

import functools
import itertools
import struct
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from rmqkit.arrow.fs import map_file
from rmqkit.arrow.reader import read_split
from rmqkit.arrow.schema import MESSAGE_COLUMNS, arrow_schema
from rmqkit.arrow.splits import Split
from rmqkit.protocol.properties import java_hash
from rmqkit.protocol.record import MAGIC_V1, host_text
from rmqkit.spark.source.store import StoreReader, StoreSource, read_plan, store_options
from rmqkit.store.log import scan

__all__ = ["NaiveRows", "QueueFiles", "TransferOnly", "crc_of_bodies", "naive_batches", "naive_rows", "sources"]

_HEAD = struct.Struct(">iiiiiqqiq8sq8siqi")
_BATCH_ROWS = 8192
_ENTRY = np.dtype([("offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
_FILE_BYTES = 6_000_000


def naive_rows(split: Split, moment: Callable[[int], Any]) -> Iterator[tuple[Any, ...]]:
    """Yield every message of a split as a tuple of `MESSAGE_COLUMNS`. ``moment`` converts ms since the epoch into a
    time.
    """
    buffer: Any = map_file(split.path)
    hosts: dict[bytes, str] = {}
    position = split.low
    while position < split.high:
        (
            size, magic, crc, queue_id, flag, queue_offset, physical_offset, sys_flag, born, born_host, stored,
            store_host, reconsume_times, prepared_offset, body_bytes,
        ) = _HEAD.unpack_from(buffer, position)  # fmt: skip
        if magic != MAGIC_V1:
            return
        at = position + _HEAD.size
        body = buffer[at : at + body_bytes]
        at += body_bytes
        topic = buffer[at + 1 : at + 1 + buffer[at]].decode()
        text = buffer[at + 3 + buffer[at] : position + size].decode()
        properties = dict(entry.split("\x01") for entry in text.split("\x02") if entry)
        for host in (born_host, store_host):
            if host not in hosts:
                hosts[host] = host_text(host)
        yield (
            topic, None, queue_id, queue_offset, physical_offset, size, properties["UNIQ_KEY"],
            properties.get("KEYS"), properties.get("TAGS"), properties, body, flag, sys_flag, crc, moment(born),
            hosts[born_host], moment(stored), hosts[store_host], reconsume_times, prepared_offset,
        )  # fmt: skip
        position += size


def naive_batches(split: Split) -> Iterator[pa.RecordBatch]:
    """Yield the same messages as Arrow batches of all columns."""
    schema = arrow_schema(MESSAGE_COLUMNS)
    rows = naive_rows(split, lambda ms: ms * 1000)
    while chunk := list(itertools.islice(rows, _BATCH_ROWS)):
        columns = dict(zip(schema.names, zip(*chunk, strict=True), strict=True))
        columns["properties"] = tuple(list(one.items()) for one in columns["properties"])
        arrays = [pa.array(values, schema.field(name).type) for name, values in columns.items()]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def crc_of_bodies(split: Split) -> Callable[[], int]:
    """Return work for one core: ``zlib.crc32`` of every body of a split, with known positions."""
    buffer = map_file(split.path)
    runs = scan.runs(buffer, split.base_offset, split.low, split.high)
    bounds = [(at, at + n) for run in runs for at, n in zip(run.body_at.tolist(), run.body_bytes.tolist(), strict=True)]

    def work() -> int:
        view = memoryview(buffer)
        for at, end in bounds:
            zlib.crc32(view[at:end])
        return len(bounds)

    return work


class NaiveRows(StoreSource):
    """A ``rocketmq-store`` source that yields single rows."""

    @classmethod
    def name(cls) -> str:
        return "naive-rows"

    def reader(self, schema: StructType) -> DataSourceReader:
        options = store_options(self.options)
        return _RowReader(options, read_plan(options, schema.names))


class _RowReader(StoreReader):
    def read(self, partition: InputPartition) -> Iterator[Any]:
        for split in partition.value:
            yield from naive_rows(split, lambda ms: datetime.fromtimestamp(ms / 1000, UTC))


class TransferOnly(StoreSource):
    """A ``rocketmq-store`` source that decodes one batch in the life of a worker. Records must have equal sizes."""

    @classmethod
    def name(cls) -> str:
        return "transfer-only"

    def reader(self, schema: StructType) -> DataSourceReader:
        options = store_options(self.options)
        return _SameBatchReader(options, read_plan(options, schema.names))


class _SameBatchReader(StoreReader):
    def read(self, partition: InputPartition) -> Iterator[Any]:
        for split in partition.value:
            batch, record_bytes = _first_batch(split.path)
            left = (split.high - split.low) // record_bytes
            while left > 0:
                yield batch.slice(0, left)
                left -= len(batch)


@functools.cache
def _first_batch(path: str) -> tuple[pa.RecordBatch, int]:
    buffer = map_file(path)
    records = next(scan.runs(buffer, int(Path(path).name), 0, len(buffer)))
    split = Split(path, int(Path(path).name), 0, records.end)
    return next(read_split(split, read_plan(store_options({"path": path}), ()))), int(records.sizes[0])


class QueueFiles(DataSource):
    """A sink for rows of topic, queueId, queueOffset, commitLogOffset, storeSize and tags, sorted by queue."""

    @classmethod
    def name(cls) -> str:
        return "queue-files"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return _QueueFileWriter(Path(self.options["path"]))


class _QueueFileWriter(DataSourceArrowWriter):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for batch in iterator:
            if len(batch):
                self._write(batch)
        return WriterCommitMessage()

    def _write(self, batch: pa.RecordBatch) -> None:
        """Write the entries of each queue into its files."""
        topics, queue_ids = batch["topic"].dictionary_encode(), batch["queueId"].to_numpy()
        tags = batch["tags"].dictionary_encode()
        codes = np.array([java_hash(tag) for tag in tags.dictionary.to_pylist()], "i8")
        entries = np.empty(len(batch), _ENTRY)
        entries["offset"], entries["size"] = batch["commitLogOffset"].to_numpy(), batch["storeSize"].to_numpy()
        entries["tags_code"] = codes[tags.indices.to_numpy()]
        numbers, topic_codes = batch["queueOffset"].to_numpy(), topics.indices.to_numpy()
        breaks = np.flatnonzero((np.diff(queue_ids) != 0) | (np.diff(topic_codes) != 0)) + 1
        for low, high in itertools.pairwise([0, *breaks.tolist(), len(batch)]):
            folder = self._folder / topics.dictionary[int(topic_codes[low])].as_py() / str(queue_ids[low])
            folder.mkdir(parents=True, exist_ok=True)
            self._put(folder, int(numbers[low]) * _ENTRY.itemsize, entries[low:high].tobytes())

    def _put(self, folder: Path, at: int, data: bytes) -> None:
        while data:
            base = at // _FILE_BYTES * _FILE_BYTES
            part, data = data[: base + _FILE_BYTES - at], data[base + _FILE_BYTES - at :]
            path = folder / f"{base:020d}"
            if not path.exists():
                path.touch()
            with path.open("r+b") as file:
                file.truncate(_FILE_BYTES)
                file.seek(at - base)
                file.write(part)
            at += len(part)


def sources() -> list[type[DataSource]]:
    """Return the data sources that a session must register."""
    return [NaiveRows, TransferOnly, QueueFiles]
