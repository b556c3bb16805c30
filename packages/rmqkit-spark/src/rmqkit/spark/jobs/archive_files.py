"""The Parquet files of an archive: written from the batches of a split, and read again for verification.

Batches are split by partition and collected up to `COLLECTED_BYTES_MAX`. Then they are written, one row group for each
partition. Thus the memory of a task does not depend on the number of topics and days: a task holds the collected bytes
and the metadata of the open files. The rows of a file are in the order of the log.

====================  ==========================================================================================
column                encoding
====================  ==========================================================================================
few distinct values   dictionary: topic, tags, hosts, flags, names of properties, ...
offsets and times     DELTA_BINARY_PACKED
bodies, keys, ids     plain, no statistics
====================  ==========================================================================================

All pages are compressed with zstd. Files contain every column, including the partition columns. This module does not
use Spark.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct
from numpy.typing import NDArray
from pyarrow import fs as pafs

from rmqkit.errors import StoreError

COLLECTED_BYTES_MAX = 64 << 20
OPEN_FILES_MAX = 128
DAY = "day"
PARTITION_COLUMNS = ("topic", DAY)
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""Folder name of a null or an empty text, as in Hive."""

_DICTIONARY = [
    "topic", "brokerName", "queueId", "tags", "lite_topic", "flag", "sysFlag", "bornHost", "storeHost",
    "storeSize", "reconsumeTimes", "preparedTransactionOffset", "properties.key_value.key",
]  # fmt: skip
_DELTA = ("queueOffset", "commitLogOffset", "bornTimestamp", "storeTimestamp")
_STATISTICS = ["topic", "queueId", *_DELTA]
_SPECIAL = re.compile(r"[\x00-\x1f\x7f\"#%'*/:=?\\\[\]^{}|<>]")
_DAY_US = 86_400_000_000
_NO_DAY = np.iinfo("i8").min
_READ_BYTES = 4 << 20


class ArchivedFile(Struct, rename="camel"):
    """One Parquet file of an archive.

    Attributes:
        path: path relative to the archive's folder.
        segment: base offset of the log file that contained the rows.
        topic, day: topic and day of all rows, if they are partition columns (a day without a date is null).
        rows, bytes: number of rows, and size of the file.
        offset_min, offset_max: minimum and maximum ``commitLogOffset`` of the rows.
        stored_min_ms, stored_max_ms: minimum and maximum ``storeTimestamp`` of the rows; null if no row has one.
        crc: CRC-32 of the whole file.
        bodies_crc: CRC-32 over all bodies in their order, if the run verifies bodies.
    """

    path: str
    segment: int
    topic: str | None
    day: str | None
    rows: int
    bytes: int
    offset_min: int
    offset_max: int
    stored_min_ms: int | None
    stored_max_ms: int | None
    crc: int
    bodies_crc: int | None = None


class PartitionFiles:
    """The files that one task writes.

    Args:
        filesystem: file system of the paths.
        folder: folder for the files. Their paths in this folder are the same as later in the archive's folder.
        stem: unique prefix of the file names of this task.
        partition_by: some of `PARTITION_COLUMNS`, in the order of the folders.
        has_bodies_crc: whether to compute a CRC over the bodies.
    """

    def __init__(
        self,
        filesystem: pafs.FileSystem,
        folder: str,
        stem: str,
        *,
        segment: int,
        partition_by: Sequence[str],
        has_bodies_crc: bool = False,
    ) -> None:
        self._filesystem = filesystem
        self._folder = folder
        self._stem = stem
        self._segment = segment
        self._partition_by = tuple(partition_by)
        self._has_bodies_crc = has_bodies_crc
        self._collected: dict[tuple[str | None, ...], list[pa.RecordBatch]] = defaultdict(list)
        self._collected_bytes = 0
        self._open: dict[tuple[str | None, ...], _OpenFile] = {}
        self._count = 0
        self.files: list[ArchivedFile] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch."""
        for values, part in _partitioned(batch, self._partition_by):
            self._collected[values].append(part)
        self._collected_bytes += batch.nbytes
        if self._collected_bytes >= COLLECTED_BYTES_MAX:
            self._write()

    def close(self) -> list[ArchivedFile]:
        """Write the remaining rows, and complete all files. Return the completed files."""
        self._write()
        while self._open:
            self._close_oldest()
        return self.files

    def _write(self) -> None:
        for values, batches in self._collected.items():
            # Remove the file and insert it again, so that the first key of the dict is the least recently used file.
            file = self._open.pop(values, None) or self._create(values, batches[0].schema)
            self._open[values] = file
            file.write(pa.Table.from_batches(batches))
        self._collected.clear()
        self._collected_bytes = 0

    def _create(self, values: tuple[str | None, ...], schema: pa.Schema) -> _OpenFile:
        if len(self._open) >= OPEN_FILES_MAX:
            self._close_oldest()
        folder = partition_folder(self._partition_by, values)
        # The count includes all partitions: if a file was closed early, its partition gets a second file with another
        # name.
        name = f"{self._stem}-{self._count}.parquet"
        self._count += 1
        path = f"{folder}/{name}" if folder else name
        return _OpenFile(self._filesystem, self._folder, path, schema, self._has_bodies_crc)

    def _close_oldest(self) -> None:
        values = next(iter(self._open))
        named = dict(zip(self._partition_by, values, strict=True))
        self.files.append(self._open.pop(values).close(self._segment, named.get("topic"), named.get(DAY)))


def partition_folder(names: Sequence[str], values: Sequence[str | None]) -> str:
    """Return the folder of a partition, ``topic=%25RETRY%25group/day=2026-11-21``, escaped for Hive, Spark and Arrow.
    Raises StoreError: the name of a folder is too long for file systems."""
    folders = [f"{name}={_SPECIAL.sub(_escape, value or NO_VALUE)}" for name, value in zip(names, values, strict=True)]
    for folder, value in zip(folders, values, strict=True):
        if len(folder.encode()) > 255:
            raise StoreError(f"{value!r} is too long for a folder's name: archive without topic among partitionBy")
    return "/".join(folders)


def difference(filesystem: pafs.FileSystem, path: str, file: ArchivedFile, *, reads_all: bool) -> str:
    """Compare a file with its description. Return the difference, or an empty text. Check the size of the file, the
    rows and offsets in its footer, and with ``reads_all`` also every byte and every body."""
    try:
        # Check the size first: it detects a truncated file without reading the file.
        if (size := filesystem.get_file_info(path).size) != file.bytes:
            return f"has {size if size is not None else 'no'} bytes, written were {file.bytes}"
        if reads_all and (crc := _crc_of_file(filesystem, path)) != file.crc:
            return f"has CRC {crc:08x}, written was {file.crc:08x}"
        with filesystem.open_input_file(path) as source:
            metadata = pq.read_metadata(source)
            rows, (low, high) = metadata.num_rows, _bounds(metadata, "commitLogOffset")
        if (rows, low, high) != (file.rows, file.offset_min, file.offset_max):
            written = f"{file.rows} of {file.offset_min} to {file.offset_max}"
            return f"has {rows} rows of {low} to {high}, written were {written}"
        if reads_all and file.bodies_crc is not None and (crc := _crc_of_bodies(filesystem, path)) != file.bodies_crc:
            return f"gives bodies of CRC {crc:08x}, the log has {file.bodies_crc:08x}"
    except (pa.ArrowException, OSError) as error:
        return f"cannot be read: {' '.join(str(error).split())}"
    return ""


class _OpenFile:
    """A file that is being written. Its CRC is computed from the bytes while they are written."""

    def __init__(
        self, filesystem: pafs.FileSystem, folder: str, path: str, schema: pa.Schema, has_bodies_crc: bool
    ) -> None:
        self._path = path
        whole = f"{folder}/{path}"
        filesystem.create_dir(whole.rpartition("/")[0])
        self._sink = CountedSink(filesystem.open_output_stream(whole))
        self._metadata: list[Any] = []
        self._bodies_crc = 0 if has_bodies_crc and "body" in schema.names else None
        self._writer = pq.ParquetWriter(
            pa.PythonFile(self._sink, mode="w"),
            schema,
            compression="zstd",
            use_dictionary=_DICTIONARY,
            column_encoding=dict.fromkeys(_DELTA, "DELTA_BINARY_PACKED"),
            write_statistics=_STATISTICS,
            metadata_collector=self._metadata,
        )

    def write(self, rows: pa.Table) -> None:
        """Add a row group."""
        self._writer.write_table(rows)
        if self._bodies_crc is not None:
            self._bodies_crc = _bodies_crc(rows["body"].chunks, self._bodies_crc)

    def close(self, segment: int, topic: str | None, day: str | None) -> ArchivedFile:
        """Complete the file. Return its description."""
        self._writer.close()
        self._sink.close()
        metadata = self._metadata[0]
        low, high = _bounds(metadata, "commitLogOffset")
        first, last = _bounds(metadata, "storeTimestamp")
        return ArchivedFile(
            path=self._path,
            segment=segment,
            topic=topic,
            day=day,
            rows=metadata.num_rows,
            bytes=self._sink.size,
            offset_min=low,
            offset_max=high,
            stored_min_ms=None if first is None else first // 1000,
            stored_max_ms=None if last is None else last // 1000,
            crc=self._sink.crc,
            bodies_crc=self._bodies_crc,
        )


class CountedSink:
    """A file that Arrow writes to. It counts the written bytes and computes their CRC."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.crc = self.size = 0

    @property
    def closed(self) -> bool:
        return bool(self._stream.closed)

    def write(self, data: Any) -> None:
        self.crc = zlib.crc32(data, self.crc)
        self.size += len(data)
        self._stream.write(data)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def _partitioned(
    batch: pa.RecordBatch, names: Sequence[str]
) -> Iterator[tuple[tuple[str | None, ...], pa.RecordBatch]]:
    """Yield the values of each partition in a batch, together with the rows of the partition in their order."""
    if not len(batch):
        return
    codes, values = np.zeros(len(batch), "i8"), list[tuple[str | None, ...]]([()])
    for name in names:
        more_codes, more = _topics(batch) if name == "topic" else _days(batch)
        codes = codes * len(more) + more_codes
        values = [(*some, one) for some in values for one in more]
    if len(values) == 1:
        yield values[0], batch
        return
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    taken = batch.take(pa.array(order))
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(ordered)], strict=True):
        yield values[ordered[start]], taken.slice(start, end - start)


def _topics(batch: pa.RecordBatch) -> tuple[NDArray[Any], list[str | None]]:
    encoded = batch["topic"].dictionary_encode()
    return encoded.indices.to_numpy(), encoded.dictionary.to_pylist()


def _days(batch: pa.RecordBatch) -> tuple[NDArray[Any], list[str | None]]:
    times = batch["storeTimestamp"].cast(pa.int64())
    days = times.fill_null(0).to_numpy() // _DAY_US
    if times.null_count:
        days[times.is_null().to_numpy(zero_copy_only=False)] = _NO_DAY
    found, codes = np.unique(days, return_inverse=True)
    return codes, [None if day == _NO_DAY else str(np.datetime64(day, "D")) for day in found.tolist()]


def _bounds(metadata: Any, column: str) -> tuple[Any, Any]:
    """Return the minimum and the maximum of an int64 or µs column according to its statistics, or None if all values
    are null."""
    at = next(i for i in range(metadata.num_columns) if metadata.schema.column(i).path == column)
    groups = (metadata.row_group(i).column(at).statistics for i in range(metadata.num_row_groups))
    known = [one for one in groups if one is not None and one.has_min_max]
    lows, highs = [one.min_raw for one in known], [one.max_raw for one in known]
    return min(lows, default=None), max(highs, default=None)


def _crc_of_file(filesystem: pafs.FileSystem, path: str) -> int:
    crc = 0
    with filesystem.open_input_stream(path) as stream:
        while data := stream.read(_READ_BYTES):
            crc = zlib.crc32(data, crc)
    return crc


def _crc_of_bodies(filesystem: pafs.FileSystem, path: str) -> int:
    with filesystem.open_input_file(path) as source, pq.ParquetFile(source) as file:
        crc = 0
        for batch in file.iter_batches(columns=["body"]):
            crc = _bodies_crc([batch["body"]], crc)
    return crc


def _bodies_crc(bodies: Sequence[pa.Array], crc: int) -> int:
    """Update a CRC with the bodies in some arrays. The arrays must not contain nulls."""
    for part in bodies:
        _, offsets, data = part.buffers()
        # A slice shares the buffers of its whole array: use only the bytes between the first and last offset of the
        # slice.
        ends = np.frombuffer(offsets, "i4")[part.offset : part.offset + len(part) + 1]
        if data is not None:
            crc = zlib.crc32(memoryview(data)[int(ends[0]) : int(ends[-1])], crc)
    return crc


def _escape(found: re.Match[str]) -> str:
    return f"%{ord(found[0]):02X}"
