"""A store as a pyarrow dataset. A scan names columns and a filter, and reads only the parts that the scan needs.

DuckDB and Polars accept a `StoreDataset`. Both pass the columns and the filter of a query::

    filter ─→ files of the log that may have the store times            no other file is opened
           ─→ topic and queue of each record, before it is decoded       no other record is decoded
           ─→ rows                                                       exactly the rows that meet the filter

The filter is an expression of Arrow, and its parts cannot be inspected. Therefore it is simplified under a *guarantee*:
Arrow simplifies ``(topic == "a") and (body == "x")`` under ``topic == "b"`` to false, and no record of topic b is
decoded. Each pair of topic and queue is checked once. A filter that Arrow cannot simplify selects every record, and is
evaluated on the rows.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.fs as pafs
from msgspec.structs import replace
from numpy.typing import NDArray

from rmqkit.arrow.archived import plan_archive, read_archived
from rmqkit.arrow.fs import Segment, find_segments
from rmqkit.arrow.options import CorruptRecords, OffsetsFrom
from rmqkit.arrow.plan import INDEX_SLOT_COUNT, SPLIT_BYTES, plan_parts, read_part
from rmqkit.arrow.reader import CLOCK_SLACK_US, ReadPlan, first_stored
from rmqkit.arrow.schema import CORRUPT_COLUMN, MESSAGE_COLUMNS, Column, arrow_schema, choose
from rmqkit.errors import RmqError
from rmqkit.store.kernels.batch import topics_of
from rmqkit.store.log.scan import Records

_PAIRS_MAX = 1 << 20
_TIME = pa.timestamp("us", tz="UTC")
_NOWHERE = pafs.LocalFileSystem()
_FORMAT = pads.IpcFileFormat()


class StoreDataset(pads.Dataset):  # type: ignore[misc] # pyarrow ships no types
    """The messages of a store. Each scan reads the current state of the store.

    Args:
        root: store directory, or its address.
        columns: the available columns. A scan decodes only the columns that it needs.
        plan: the options and conditions of the read, as created by `rmqkit.arrow.scan`.
        log_paths: directories of the log, if it is not in ``root/commitlog``.
        offsets_from: whether to read the whole log, or the records that consume queues point at.
        index_slot_count: slots of an index file in the configuration of the broker, for a plan with keys.
        archive: folder or address of the archive of the broker, or empty.

    Attributes:
        failure: the error of the last scan that failed. A scanning program may report another text for the error.
    """

    failure: RmqError | None = None

    def __init__(
        self,
        root: str,
        columns: Sequence[Column],
        plan: ReadPlan,
        *,
        log_paths: Sequence[str] = (),
        offsets_from: OffsetsFrom = OffsetsFrom.WALK,
        index_slot_count: int = INDEX_SLOT_COUNT,
        archive: str = "",
    ) -> None:
        # Do not call super().__init__(): it always raises. The methods that consumers call use `scanner`.
        self._root = root
        self._columns = tuple(columns)
        self._plan = plan
        self._log_paths = list(log_paths)
        self._offsets_from = offsets_from
        self._index_slot_count = index_slot_count
        self._archive = archive

    @property
    def schema(self) -> pa.Schema:
        """Schema of the available columns."""
        return arrow_schema(self._columns)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a StoreDataset is not pickled: open the store where it is read")

    def scanner(
        self,
        columns: Sequence[str] | None = None,
        filter: pc.Expression | None = None,  # noqa: A002 - the name that consumers use
        **kwargs: Any,
    ) -> StoreScan:
        """Return a scan of some columns (all columns, if None) of the rows that meet a filter. Other arguments tune
        reads of other kinds of files, and are ignored."""
        return StoreScan(self.reader(columns, filter))

    def count_rows(
        self,
        filter: pc.Expression | None = None,  # noqa: A002 - as above
        **kwargs: Any,
    ) -> int:
        """Count the rows that meet a filter. Only the columns in the filter are decoded."""
        return sum(map(len, self._batches([], filter)))

    def reader(
        self,
        columns: Sequence[str] | None = None,
        filter: pc.Expression | None = None,  # noqa: A002 - as above
    ) -> pa.RecordBatchReader:
        """Return a reader of the rows in the order of the log, a batch at a time. The reader raises StoreError if a
        file is damaged or missing. Raises SettingsError: a column does not exist. Raises StoreError: the store is
        missing."""
        names = [column.name for column in self._columns] if columns is None else list(columns)
        chosen = choose(self._columns, names, self._root) if names else []
        try:
            # Plan now, so that a missing store raises the error here and not in the middle of a query.
            batches = self._batches(names, filter)
        except RmqError as error:
            self.failure = error
            raise
        return pa.RecordBatchReader.from_batches(arrow_schema(chosen), batches)

    def _batches(self, names: Sequence[str], wanted: pc.Expression | None) -> Iterator[pa.RecordBatch]:
        shown = choose(self._columns, names, self._root) if names else []
        needed = shown if wanted is None else _with_fields(wanted, shown, self._columns)
        # A batch without columns has no rows, so read the cheapest column.
        plan = replace(self._plan, columns=tuple(needed or [_cheapest(self._columns)]))
        segments = find_segments(self._root, self._log_paths)
        is_strict = plan.corrupt_records is CorruptRecords.FAIL
        files = plan_archive(self._archive, self._root, segments, is_strict=is_strict) if self._archive else []
        archived = itertools.chain.from_iterable(read_archived(file, plan, wanted) for file in files)
        if wanted is not None:
            plan = replace(plan, choose=_Pairs(wanted).choose)
            segments = _within(segments, wanted)
        parts = plan_parts(
            self._root,
            segments,
            plan.selection,
            keys=plan.keys,
            offsets_from=self._offsets_from,
            split_bytes=SPLIT_BYTES,
            index_slot_count=self._index_slot_count,
        )
        return self._rows(archived, parts, plan, wanted, names)

    def _rows(
        self,
        archived: Iterator[pa.RecordBatch],
        parts: Sequence[Any],
        plan: ReadPlan,
        wanted: pc.Expression | None,
        names: Sequence[str],
    ) -> Iterator[pa.RecordBatch]:
        logged = itertools.chain.from_iterable(read_part(part, plan) for part in parts)
        rows = logged if wanted is None else (batch.filter(wanted) for batch in logged)
        try:
            for batch in itertools.chain(archived, rows):
                if len(batch):
                    yield batch.select(list(names)) if names else batch
        except RmqError as error:
            self.failure = error
            raise


class StoreScan:
    """A scan of a store, with the methods of ``pyarrow.dataset.Scanner`` that consumers call. It can be read once."""

    # Arrow's Scanner cannot be used: it reads ahead in a thread that needs the GIL to decode. A consumer that stops
    # early, for example for `limit 1`, waits for this thread while it holds the GIL.

    def __init__(self, reader: pa.RecordBatchReader) -> None:
        self._reader = reader

    @property
    def projected_schema(self) -> pa.Schema:
        """The columns of the scan."""
        return self._reader.schema

    def to_reader(self) -> pa.RecordBatchReader:
        """Return the rows, a batch at a time."""
        return self._reader

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        """Return the rows, a batch at a time."""
        return iter(self._reader)

    def to_table(self) -> pa.Table:
        """Return all rows."""
        return self._reader.read_all()

    def head(self, num_rows: int) -> pa.Table:
        """Return the first rows. Reading stops at the batch that contains the last of these rows."""
        kept: list[pa.RecordBatch] = []
        while (left := num_rows - sum(map(len, kept))) > 0 and (batch := next(self._reader, None)) is not None:
            kept.append(batch.slice(0, left))
        return pa.Table.from_batches(kept, self._reader.schema)

    def count_rows(self) -> int:
        """Count the rows."""
        return sum(map(len, self._reader))


class _Pairs:
    """The pairs of topic and queue that may meet a filter."""

    def __init__(self, wanted: pc.Expression) -> None:
        self._wanted = wanted
        self._asks = bool({"topic", "queueId"} & _words(wanted))
        self._known: dict[tuple[str, int], bool] = {}

    def choose(self, records: Records) -> NDArray[np.bool_]:
        """Return a mask of the records that must be decoded."""
        if not self._asks or not len(records):
            return np.ones(len(records), bool)
        topics, queues = topics_of(records), records.field("queue_id")
        names = [name.decode("utf-8", "replace") for name in topics.dictionary.to_pylist()]
        codes = topics.indices.to_numpy().astype("i8") << 32 | (queues & 0xFFFFFFFF)
        pairs, places = np.unique(codes, return_inverse=True)
        may = [self._may_meet(names[pair >> 32], int(np.int32(pair & 0xFFFFFFFF))) for pair in pairs.tolist()]
        found: NDArray[np.bool_] = np.array(may, bool)[places]
        return found

    def _may_meet(self, topic: str, queue_id: int) -> bool:
        key = topic, queue_id
        if key not in self._known:
            if len(self._known) >= _PAIRS_MAX:
                self._known.clear()
            self._known[key] = may_meet(
                self._wanted, (pc.field("topic") == topic) & (pc.field("queueId") == pa.scalar(queue_id, pa.int32()))
            )
        return self._known[key]


def may_meet(wanted: pc.Expression, guarantee: pc.Expression) -> bool:
    """Return True if a row that meets a guarantee may meet a filter, or if Arrow cannot decide this."""
    fragment = _FORMAT.make_fragment("known", _NOWHERE, partition_expression=guarantee)
    known = pads.FileSystemDataset([fragment], _MESSAGES, _FORMAT)
    return any(True for _ in known.get_fragments(filter=wanted))


def _within(segments: list[Segment], wanted: pc.Expression) -> list[Segment]:
    """Return the files of a log that may have messages with the store times in a filter. Files are omitted only at the
    two ends, so that the remaining files are still one log."""
    if "storeTimestamp" not in _words(wanted) or len(segments) < 2:
        return segments
    firsts = [first_stored(segment) for segment in segments]
    may = []
    for number, first in enumerate(firsts):
        last = firsts[number + 1] if number + 1 < len(firsts) else 0
        # 0: the file does not begin with a record, so its store times are unknown.
        known = pc.field("storeTimestamp") >= _time(first - CLOCK_SLACK_US) if first else pc.scalar(True)
        if last:
            known &= pc.field("storeTimestamp") <= _time(last + CLOCK_SLACK_US)
        may.append(may_meet(wanted, known))
    kept = np.flatnonzero(may)
    return segments[int(kept[0]) : int(kept[-1]) + 1] if len(kept) else segments[:0]


def _time(microseconds: int) -> pa.Scalar:
    return pa.scalar(microseconds, pa.int64()).cast(_TIME)


def _with_fields(wanted: pc.Expression, shown: Sequence[Column], available: Sequence[Column]) -> list[Column]:
    """Return the shown columns and the columns of a filter. A column belongs to the filter if its name is a word in the
    text of the filter."""
    found = _words(wanted)
    return [*shown, *(column for column in available if column.name in found and column not in shown)]


def _words(wanted: pc.Expression) -> set[str]:
    return set(re.findall(r"\w+", str(wanted)))


def _cheapest(columns: Sequence[Column]) -> Column:
    return next((column for column in columns if column.name == "queueId"), columns[0])


_MESSAGES = arrow_schema([*MESSAGE_COLUMNS, CORRUPT_COLUMN])
