"""Row groups of a Parquet file, each with a footer of its own, so that a reader decodes one without the others.

`RowGroups` encodes tables (`rmqkit.store.archive.rows`) as row groups at given positions of a file, and collects the
footer of the whole file. `records_in` decodes a row group to its records.
"""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from rmqkit.protocol.compression import Compression, compress, decompress
from rmqkit.protocol.record import COMPRESSED
from rmqkit.store.archive.rows import RECORD_COLUMNS, SCHEMA, records_of

__all__ = ["RowGroups", "records_in"]

_MAGIC = b"PAR1"
"""The first and the last bytes of a Parquet file."""

_LEVEL = 3
_ZSTD = COMPRESSED | Compression.ZSTD
_FOOTER_BYTES_MAX = 256 << 20
_REPEATED = ["topic", "brokerName", "queueId", "tags", "lite_topic", "properties.key_value.key",
             "properties.key_value.value", "flag", "sysFlag", "bornHost", "storeHost", "reconsumeTimes",
             "preparedTransactionOffset"]  # fmt: skip
"""Columns with few different values. Parquet stores each value of a group once."""
_ASCENDING = ["queueOffset", "commitLogOffset", "storeSize", "bornTimestamp", "storeTimestamp"]
_MEASURED = ["topic", "brokerName", "queueId", "queueOffset", "commitLogOffset", "bornTimestamp",
             "storeTimestamp"]  # fmt: skip
"""Columns with a minimum and a maximum for each group, by which engines skip groups."""


class RowGroups:
    """An encoder of row groups. Use it as a context manager: it has a temporary file."""

    def __init__(self) -> None:
        self._scratch = tempfile.NamedTemporaryFile(prefix="rmq-archive-")  # noqa: SIM115 - closed by __exit__
        self._metadata: Any = None

    def __enter__(self) -> RowGroups:
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch.close()

    def encoded(self, table: pa.Table, position: int) -> tuple[bytes, bytes]:
        """Return a table as a row group at a position of the file, and the compressed footer of a file that has only
        this row group."""
        rows, metadata = self._encoded(table, position)
        footer = compress(_metadata_bytes(metadata), Compression.ZSTD, _LEVEL)
        if self._metadata is None:
            self._metadata = metadata
        else:
            self._metadata.append_row_groups(metadata)
        return rows, footer

    def footer(self) -> bytes:
        """Return the footer of a file that has all row groups, with the last bytes of the file."""
        metadata = self._encoded(SCHEMA.empty_table(), len(_MAGIC))[1] if self._metadata is None else self._metadata
        return _metadata_bytes(metadata)[len(_MAGIC) :]

    def _encoded(self, table: pa.Table, position: int) -> tuple[bytes, Any]:
        # One file has many row groups, each by its own writer, so that each has a footer of its own. A writer begins at
        # the position 0 of its file, and takes the positions of columns from the descriptor of a real file only. So it
        # writes to a file of holes, at the position of the row group in the segment.
        name = self._scratch.name
        with pa.OSFile(name, "wb") as sink:
            writer = parquet.ParquetWriter(
                sink,
                SCHEMA,
                compression="zstd",
                compression_level=_LEVEL,
                use_dictionary=_REPEATED,
                column_encoding=dict.fromkeys(_ASCENDING, "DELTA_BINARY_PACKED"),
                write_statistics=_MEASURED,
                write_page_checksum=True,
                store_schema=False,
            )
            os.lseek(sink.fileno(), position, os.SEEK_SET)
            if len(table):
                writer.write_table(table, row_group_size=len(table))
            end = sink.tell()
            writer.close()
        with Path(name).open("rb") as file:
            return os.pread(file.fileno(), end - position, position), writer.writer.metadata


def _metadata_bytes(metadata: Any) -> bytes:
    """Return a Parquet file without row groups that has a footer."""
    written = io.BytesIO()
    metadata.write_metadata_file(written)
    return written.getvalue()


def records_in(rows: bytes, footer: bytes, position: int) -> bytes:
    """Return the records of a row group at a position of the file, one after the other. ``footer``: from
    `RowGroups.encoded`. The caller has checked the bytes: the decoder of changed bytes may do anything."""
    metadata = parquet.read_metadata(pa.BufferReader(decompress(footer, _ZSTD, bytes_max=_FOOTER_BYTES_MAX)))
    source = pa.PythonFile(_Source(rows, position), mode="r")
    table = parquet.ParquetFile(source, metadata=metadata).read_row_group(0, columns=RECORD_COLUMNS, use_threads=False)
    records = records_of(table)
    bounds = np.frombuffer(records.buffers()[1], "i4")[records.offset : records.offset + len(records) + 1]
    return bytes(memoryview(records.buffers()[2])[bounds[0] : bounds[-1]])


class _Source:
    """A file of which one range is in memory."""

    closed = False

    def __init__(self, content: bytes, position: int) -> None:
        self._content = content
        self._position = position
        self._at = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset if whence == 0 else self._position + len(self._content) + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int) -> bytes:
        at = self._at - self._position
        self._at += size
        return self._content[at : at + size]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        """Do nothing: the content is in memory."""
