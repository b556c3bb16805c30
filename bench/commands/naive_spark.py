"""The comparisons of `spark` that are code: the obvious ways to check a log and to write consume queues.

===================  ==================================================================================================
`crc_of_bodies`      the CRC of every body of a log, on one core, with known positions
`QueueFiles`         a Spark sink for entries of consume queues, one row for every message, sorted by queue
===================  ==================================================================================================

They do the same work as ours, and are only used for measurements.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from rmqkit.arrow.fs import map_file
from rmqkit.arrow.splits import Split
from rmqkit.protocol.properties import java_hash
from rmqkit.store.log import scan

__all__ = ["QueueFiles", "crc_of_bodies"]

_ENTRY = np.dtype([("offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
_FILE_BYTES = 6_000_000


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
