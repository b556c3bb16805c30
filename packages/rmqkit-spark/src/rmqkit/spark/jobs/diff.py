"""The differences between two stores, such as a master and its slave, or a store before and after a change.

=====  ====================================  =========================================================================
stage  one task per                          compares
=====  ====================================  =========================================================================
1      split of the left log                 its bytes with the bytes at the same physical offsets of the right log
2      split with a difference in stage 1    nothing: it packs its messages by topic, queue and block of `_BLOCK`
                                             offsets, 24 bytes each
3      block                                 the messages of both sides by queue offset
4      some queues                           the bounds of their consume queues
=====  ====================================  =========================================================================

If the right store is a copy or an up-to-date slave, stage 1 finds no difference. If the logs differ, messages are
compared by a digest of their records, which does not depend on the physical offset. With ``content_only`` the digest
includes only body, topic and properties. If several records have the same queue offset, the last record is compared.
Differences are ranges of queue offsets, so that a lost day is one row. If a block has very many ranges, the rest of the
block is one range, and its number of messages is less than its length. Source: store.md §3, §4, §9.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rmqkit.arrow.fs import join, list_files, map_range, read_file, resolve
from rmqkit.arrow.queue_files import QueueFile, find_queue_files, queue_end, queue_start
from rmqkit.arrow.splits import Split
from rmqkit.errors import BodyError, StoreError
from rmqkit.protocol import fastjson
from rmqkit.spark.failures import one_line
from rmqkit.spark.jobs.log_ranges import SegmentCounts, add_up, counted, task_count
from rmqkit.spark.jobs.tasks import core_count, regroup_tasks, run_tasks
from rmqkit.spark.session import address
from rmqkit.spark.source.store import refuse_archive, store_options, store_splits
from rmqkit.store.kernels.batch import topics_of
from rmqkit.store.log import scan
from rmqkit.store.log.scan import Records

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["ConfigDifference", "Diff", "QueueDifference", "compare_block", "diff", "equal_end", "pack"]

_BLOCK = 1 << 16
_CHUNK_BYTES = 4 << 20
RANGES_MAX = 256
ENTRY = np.dtype([("offset", "i8"), ("digest", "u8"), ("physical", "i8")])
_SCHEMA = (
    "difference string, topic string, queueId int, firstOffset bigint, lastOffset bigint, messages bigint,"
    " leftCommitLogOffset bigint, rightCommitLogOffset bigint"
)

Block = tuple[str, int, int]
"""Topic, queue id, and queue offset divided by `_BLOCK`."""


class QueueDifference(Struct):
    """A consume queue with different bounds on both sides. The bounds of a side are null if the queue is missing or
    empty there.
    """

    topic: str
    queue_id: int
    left_min: int | None
    left_max: int | None
    right_min: int | None
    right_max: int | None


class ConfigDifference(Struct):
    """A value of a configuration file that differs, as JSON on each side. The value is null on a side where it is
    missing.
    """

    file: str
    name: str
    left: str | None
    right: str | None


class Diff(Struct):
    """The differences between two stores. The logs are equal, byte by byte, from ``equal_begin`` up to ``equal_end``,
    the first difference or the end of the shorter log. ``differences`` has a row per range of messages: ``only left``,
    ``only right`` or ``changed``, with the log offsets of its first message. ``segments`` counts the parts of the files
    that were walked."""

    left: str
    right: str
    equal_begin: int
    equal_end: int
    left_end: int
    right_end: int
    only_left: int
    only_right: int
    changed: int
    notes: list[str]
    queues: list[QueueDifference]
    config: list[ConfigDifference]
    segments: list[SegmentCounts]
    differences: DataFrame

    @property
    def is_equal(self) -> bool:
        """Return True if messages, queues and configuration are the same on both sides."""
        return not (self.only_left or self.only_right or self.changed or self.queues or self.config)


def diff(
    spark: SparkSession,
    left: str,
    right: str,
    options: Mapping[str, str] | None = None,
    *,
    content_only: bool = False,
) -> Diff:
    """Compare two stores. ``options`` are options of ``rocketmq-store``, such as ``splitBytes``. Data versions of the
    configuration are not compared, because they only count changes.
    Raises SettingsError: an option is not valid.
    Raises StoreError: a store is missing or cannot be read."""
    left, right = address(spark, left), address(spark, right)
    ours, theirs = (store_options({**(options or {}), "path": path}) for path in (left, right))
    refuse_archive(ours, "diff")
    left_splits, right_splits = store_splits(ours), store_splits(theirs)
    with one_line():
        ends = run_tasks(
            spark,
            lambda split: equal_end(split, _around(split, right_splits)),
            left_splits,
            task_count(left_splits),
        )
        equal = [_bounds(split) for split, end in zip(left_splits, ends, strict=True) if end == _bounds(split)[1]]
        sides = (without(left_splits, equal), without(right_splits, equal))
        found = _compared(spark, *sides, content_only=content_only) if any(sides) else []
        queues, notes = _queues(spark, left, right)
    begin = max((splits[0].base_offset for splits in (left_splits, right_splits) if splits), default=0)
    log_ends = [_bounds(splits[-1])[1] if splits else 0 for splits in (left_splits, right_splits)]
    highs = [_bounds(split)[1] for split in left_splits]
    rows = sorted((row for row in found if not isinstance(row, SegmentCounts)), key=lambda row: (*row[1:4], row[0]))
    counts = {kind: sum(row[5] for row in rows if row[0] == kind) for kind in ("only left", "only right", "changed")}
    parted = [max(end, begin) for high, end in zip(highs, ends, strict=True) if end < high and high > begin]
    return Diff(
        left=str(resolve(left)),
        right=str(resolve(right)),
        equal_begin=begin,
        equal_end=min([*parted, max(log_ends[0], begin)]),
        left_end=log_ends[0],
        right_end=log_ends[1],
        only_left=counts["only left"],
        only_right=counts["only right"],
        changed=counts["changed"],
        notes=notes,
        queues=queues,
        config=_config_differences(left, right),
        segments=add_up(row for row in found if isinstance(row, SegmentCounts)),
        differences=spark.createDataFrame(rows, _SCHEMA),
    )


# ---------------------------------------------------------------- bytes at the same physical offset


def equal_end(split: Split, others: Sequence[Split]) -> int:
    """Return the physical offset up to which a split is equal to the other log. ``others`` are the overlapping splits
    of the other log, in order. Raises StoreError: a file cannot be read."""
    at, end = _bounds(split)
    mine = np.frombuffer(map_range(split.path, split.low, split.high), "u1")
    for other in others:
        low, high = _bounds(other)
        # The other log has a gap here. Bytes after the gap may be equal again: stage 3 compares them by queue offset.
        if low > at:
            break
        stop = min(high, end)
        theirs = np.frombuffer(map_range(other.path, other.low, other.high), "u1")
        while at < stop:
            count = min(stop - at, _CHUNK_BYTES)
            ours = mine[at - split.base_offset :][:count]
            unequal = ours != theirs[at - other.base_offset :][:count]
            if unequal.any():
                return at + int(unequal.argmax())
            at += count
    assert at <= end, "the equal part ends within the split"
    return at


def _bounds(split: Split) -> tuple[int, int]:
    """Return the physical offsets of the start and the end of a split."""
    return split.base_offset + split.low, split.base_offset + split.high


def _around(split: Split, others: Sequence[Split]) -> list[Split]:
    low, high = _bounds(split)
    return [other for other in others if _bounds(other)[0] < high and _bounds(other)[1] > low]


def without(splits: Sequence[Split], equal: Sequence[tuple[int, int]]) -> list[Split]:
    """Remove ranges of equal bytes from some splits. On one side, records begin and end at the bounds of these ranges.
    Since the bytes are equal, the same is true on the other side."""
    left: list[Split] = []
    for split in splits:
        at, end = _bounds(split)
        for low, high in equal:
            if low < end and high > at:
                if low > at:
                    left.append(Split(split.path, split.base_offset, at - split.base_offset, low - split.base_offset))
                at = high
        if at < end:
            left.append(Split(split.path, split.base_offset, at - split.base_offset, split.high))
    return left


# ---------------------------------------------------------------- messages by queue offset


def _compared(
    spark: SparkSession, left: Sequence[Split], right: Sequence[Split], *, content_only: bool
) -> list[SegmentCounts | tuple[Any, ...]]:
    """Return the counts of the walked segments, and the ranges that differ."""

    def packed(one: tuple[int, Split]) -> Iterator[tuple[Block | None, tuple[int, Any]]]:
        side, split = one
        for block, entries in pack(split, content_only=content_only):
            yield block, (side, entries)

    def compare(block: Block | None, found: Iterable[tuple[int, Any]]) -> Iterable[SegmentCounts | tuple[Any, ...]]:
        sides: tuple[list[Any], list[Any]] = ([], [])
        for side, entries in found:
            sides[side].append(entries)
        return itertools.chain(*sides) if block is None else compare_block(block, *sides)

    splits = [(side, split) for side, one in enumerate((left, right)) for split in one]
    return regroup_tasks(spark, packed, splits, compare)


def pack(split: Split, *, content_only: bool) -> Iterator[tuple[Block | None, Any]]:
    """Yield the messages of each block of a split, packed as bytes. Yield also the counts of the walk, with the key
    None.
    Raises StoreError: the file cannot be read."""
    found: defaultdict[Block, list[bytes]] = defaultdict(list)
    buffer, counts = map_range(split.path, split.low, split.high), SegmentCounts.of(split)
    for part in counted(scan.walk(buffer, split.base_offset, split.low, split.high), counts, split):
        if isinstance(part, Records):
            for block, entries in _blocks(part, content_only):
                found[block].append(entries)
    yield None, counts
    for block, parts in found.items():
        yield block, b"".join(parts)


def _blocks(records: Records, content_only: bool) -> Iterator[tuple[Block, bytes]]:
    entries = np.empty(len(records), ENTRY)
    entries["offset"] = records.field("queue_offset")
    entries["digest"] = _digests(records, content_only)
    entries["physical"] = records.base_offset + records.positions
    topics = topics_of(records)
    names = [name.decode("utf-8", "replace") for name in topics.dictionary.to_pylist()]
    keys = np.stack([topics.indices.to_numpy(), records.field("queue_id"), entries["offset"] // _BLOCK])
    blocks, which = np.unique(keys, axis=1, return_inverse=True)
    # In numpy 2.0 the inverse has another shape than in earlier and later versions.
    which = which.ravel()
    order = np.argsort(which, kind="stable")
    cuts = np.flatnonzero(np.diff(which[order])) + 1
    for (topic, queue_id, block), rows in zip(blocks.T.tolist(), np.split(order, cuts), strict=True):
        yield (names[topic], queue_id, block), entries[rows].tobytes()


def _digests(records: Records, content_only: bool) -> NDArray[np.uint64]:
    """Return a 64-bit hash of the compared bytes of each record."""
    places = records.field_at("physical_offset")
    starts = records.body_at if content_only else places + 8
    ends = (records.positions + records.sizes).tolist()
    digests = []
    with memoryview(records.buffer) as view:
        for at, place, start, end in zip(
            records.positions.tolist(), places.tolist(), starts.tolist(), ends, strict=True
        ):
            digest = hashlib.blake2b(view[start:end], digest_size=8)
            if not content_only:
                # Leave out the physical offset: the same message may have different physical offsets in two stores.
                digest.update(view[at:place])
            digests.append(digest.digest())
    return np.frombuffer(b"".join(digests), "u8")


def compare_block(key: Block, left: Iterable[bytes], right: Iterable[bytes]) -> Iterator[tuple[Any, ...]]:
    """Compare a block. Yield the ranges that differ, as rows of `Diff.differences`."""
    ours, theirs = _newest(left), _newest(right)
    # Compare by queue offset, not by index: masters and slaves have the same queue offsets, even if a side lost
    # messages.
    common, at, other = np.intersect1d(ours["offset"], theirs["offset"], assume_unique=True, return_indices=True)
    is_changed = ours["digest"][at] != theirs["digest"][other]
    mine, yours = ours[at][is_changed], theirs[other][is_changed]
    yield from _ranges("changed", key, common[is_changed], mine["physical"], yours["physical"])
    gone = ours[~np.isin(ours["offset"], common)]
    yield from _ranges("only left", key, gone["offset"], gone["physical"], None)
    new = theirs[~np.isin(theirs["offset"], common)]
    yield from _ranges("only right", key, new["offset"], None, new["physical"])


def _newest(parts: Iterable[bytes]) -> NDArray[np.void]:
    """Sort entries by queue offset. Return only the last record of each queue offset."""
    entries = np.frombuffer(b"".join(parts), ENTRY)
    entries = entries[np.lexsort((entries["physical"], entries["offset"]))]
    # The slice handles an empty array: np.append would return one value for it.
    newest: NDArray[np.void] = entries[np.append(np.diff(entries["offset"]) != 0, True)[: len(entries)]]
    return newest


def _ranges(
    difference: str,
    key: Block,
    offsets: NDArray[np.int64],
    left: NDArray[np.int64] | None,
    right: NDArray[np.int64] | None,
) -> Iterator[tuple[Any, ...]]:
    cuts = np.flatnonzero(np.diff(offsets) != 1)[:RANGES_MAX] + 1
    for rows in np.split(np.arange(len(offsets)), cuts) if len(offsets) else ():
        first, last = int(rows[0]), int(rows[-1])
        physical = (None if side is None else int(side[first]) for side in (left, right))
        yield difference, key[0], key[1], int(offsets[first]), int(offsets[last]), len(rows), *physical


# ---------------------------------------------------------------- queues and configuration


def _queues(spark: SparkSession, left: str, right: str) -> tuple[list[QueueDifference], list[str]]:
    """Return the queue bounds that differ, and the reason if queues cannot be compared."""
    files: defaultdict[tuple[str, int], tuple[list[QueueFile], list[QueueFile]]] = defaultdict(lambda: ([], []))
    try:
        for side, root in enumerate((left, right)):
            for file in find_queue_files(root):
                files[file.topic, file.queue_id][side].append(file)
    except StoreError as error:
        return [], [f"queues not compared: {error}"]

    def compare(pair: tuple[tuple[str, int], tuple[list[QueueFile], list[QueueFile]]]) -> QueueDifference:
        (topic, queue_id), (ours, theirs) = pair
        bounds = (bound(files) for files in (ours, theirs) for bound in (queue_start, queue_end))
        return QueueDifference(topic, queue_id, *bounds)

    compared = run_tasks(spark, compare, list(files.items()), core_count(spark)) if files else []
    unequal = (one for one in compared if (one.left_min, one.left_max) != (one.right_min, one.right_max))
    return sorted(unequal, key=lambda one: (one.topic, one.queue_id)), []


def _config_differences(left: str, right: str) -> list[ConfigDifference]:
    ours, theirs = (dict(_config_values(root)) for root in (left, right))
    return [
        ConfigDifference(*key, ours.get(key), theirs.get(key))
        for key in sorted({*ours, *theirs})
        if ours.get(key) != theirs.get(key)
    ]


def _config_values(root: str) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield file, name (with the names of its parents) and JSON of every value in a store's configuration."""
    for file in list_files(join(resolve(root), "config")):
        if len(file.names) == 1 and file.names[0].endswith(".json"):
            try:
                content = fastjson.loads(read_file(file.path) or b"{}")
            except BodyError as error:
                raise StoreError(
                    f"{file.path} is not JSON: {error}; its copy {file.names[0]}.bak may be whole"
                ) from None
            for name, value in _leaves(content, ()):
                yield (file.names[0], name), json.dumps(value, ensure_ascii=False)


def _leaves(value: Any, above: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            if name != "dataVersion":
                yield from _leaves(inner, (*above, str(name)))
    else:
        yield "/".join(above), value
