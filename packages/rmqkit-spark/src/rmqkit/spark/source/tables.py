"""The tables of a store that are not messages: the option ``entity`` of ``rocketmq-store``.

==============  ================================================================================================
entity          one row for each
==============  ================================================================================================
consumequeue    entry of a consume queue
index           entry of an index file; the time is exact to the second
commitlog-raw   record of the log, as bytes
topics          topic of ``config/topics.json``
offsets         queue that a group consumes (``config/consumerOffset.json``); ``lag`` is relative to the queue's end
delay           message that waits for its delay level, with its delivery time, topic and queue
transactions    half message that is neither committed nor rolled back, with its producer group and past checks
==============  ================================================================================================

``delay`` and ``transactions`` have the columns of messages, too. Source: store.md §4, §7, §17, §19.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec import Struct
from msgspec.structs import replace

from rmqkit.arrow.fs import Segment, exists, join, map_range, map_records, read_file, resolve
from rmqkit.arrow.queue_files import (
    IndexPart,
    QueueFile,
    QueueSplit,
    chosen_entries,
    find_index_files,
    find_queue_files,
    index_entries,
    queue_end,
    queue_entries,
    queue_splits,
    read_queue,
)
from rmqkit.arrow.reader import ReadPlan
from rmqkit.arrow.schema import MESSAGE_COLUMNS, Column, arrow_schema, choose
from rmqkit.arrow.splits import Split
from rmqkit.errors import BodyError, StoreError
from rmqkit.protocol import fastjson
from rmqkit.protocol import properties as names
from rmqkit.protocol.names import HALF_TOPIC, OP_HALF_TOPIC, SCHEDULE_TOPIC, TRANSACTION_GROUP
from rmqkit.protocol.op_messages import op_offsets
from rmqkit.spark.options import Entity, StoreOptions
from rmqkit.store.kernels.gather import gather
from rmqkit.store.log import scan
from rmqkit.store.log.scan import Records
from rmqkit.store.table_journal import apply_journal, journal_of

Arrays = Mapping[str, Any]
Parts = Sequence[Any]


class Table(Struct, frozen=True):
    """An entity: its columns, its parts (one per task), and the rows of a part as arrays by column."""

    columns: tuple[Column, ...]
    parts: Callable[[StoreOptions, Sequence[Segment], Sequence[Split]], Parts]
    rows: Callable[[Any, ReadPlan], Iterator[Arrays]]


def read_table(entity: Entity, part: Any, chosen: Sequence[str], plan: ReadPlan) -> Iterator[pa.RecordBatch]:
    """Read the rows of a part, with the chosen columns. Raises StoreError: a file cannot be read or is damaged."""
    table = TABLES[entity]
    columns = choose(table.columns, chosen, entity.value)
    for rows in table.rows(part, plan):
        assert rows.keys() >= {column.name for column in table.columns}, "the rows have all columns of the entity"
        arrays = [_array(rows[column.name], column) for column in columns]
        yield pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(columns))


def _array(values: Any, column: Column) -> pa.Array:
    if isinstance(values, pa.Array):
        return values.cast(column.arrow)
    if isinstance(values, np.ndarray):  # big-endian, as in the file
        return pa.array(values.astype(values.dtype.newbyteorder("="))).cast(column.arrow)
    return pa.array(values, column.arrow)


def _columns(text: str) -> tuple[Column, ...]:
    return tuple(Column(name, spark, None) for name, spark in (part.split() for part in text.split(", ")))


# ---------------------------------------------------------------- files of the store


def _queue_files(options: StoreOptions, segments: Sequence[Segment], splits: Sequence[Split]) -> Parts:
    return find_queue_files(options.path, options.topic_names)


def _queue_rows(file: QueueFile, plan: ReadPlan) -> Iterator[Arrays]:
    numbers, entries = queue_entries(file)
    yield {
        "topic": _repeated(file.topic, len(numbers)),
        "queueId": np.full(len(numbers), file.queue_id, "i4"),
        "queueOffset": numbers,
        "commitLogOffset": entries["offset"],
        "size": entries["size"],
        "tagsCode": entries["tags_code"],
    }


def _index_files(options: StoreOptions, segments: Sequence[Segment], splits: Sequence[Split]) -> Parts:
    return find_index_files(options.path, options.index_slot_count)


def _index_rows(part: IndexPart, plan: ReadPlan) -> Iterator[Arrays]:
    begin_ms, entries = index_entries(part)
    hashes = entries["hash"].astype("i8")
    yield {
        "fileName": _repeated(part.path.rpartition("/")[2], len(entries)),
        "slot": (hashes % part.slot_count).astype("i4"),
        "keyHash": entries["hash"],
        "commitLogOffset": entries["offset"],
        "storeTimestampApprox": (begin_ms + entries["seconds"].astype("i8") * 1000) * 1000,
        "prevIndex": entries["previous"],
    }


def _log_splits(options: StoreOptions, segments: Sequence[Segment], splits: Sequence[Split]) -> Parts:
    return splits


def _raw_rows(split: Split, plan: ReadPlan) -> Iterator[Arrays]:
    buffer = map_range(split.path, split.low, split.high)
    for part in scan.walk(buffer, split.base_offset, split.low, split.high, rows_max=plan.batch_rows):
        if isinstance(part, Records):
            yield {
                "offset": split.base_offset + part.positions,
                "size": part.sizes,
                "magic": part.heads["magic"],
                "bytes": gather(buffer, part.positions, part.sizes),
            }
        else:
            raise StoreError(
                f"{split.path}: damage at byte {part.position} up to {part.end}: {part.reason};"
                " entity messages can leave it out or report it"
            )


# ---------------------------------------------------------------- config files


def _whole(options: StoreOptions, segments: Sequence[Segment], splits: Sequence[Split]) -> Parts:
    return [options]


def _topic_rows(options: StoreOptions, plan: ReadPlan) -> Iterator[Arrays]:
    configs = [one for _, one in sorted(_config(options.path, "topics.json", "topicConfigTable").items())]
    wanted = options.topic_names
    configs = [one for one in configs if not wanted or one["topicName"] in wanted]
    yield {
        "topic": [one["topicName"] for one in configs],
        "readQueues": [one.get("readQueueNums") for one in configs],
        "writeQueues": [one.get("writeQueueNums") for one in configs],
        "perm": [one.get("perm") for one in configs],
        "isOrdered": [bool(one.get("order")) for one in configs],
        "attributes": [sorted((one.get("attributes") or {}).items()) for one in configs],
    }


def _offset_rows(options: StoreOptions, plan: ReadPlan) -> Iterator[Arrays]:
    files: defaultdict[tuple[str, int], list[QueueFile]] = defaultdict(list)
    for file in find_queue_files(options.path):
        files[file.topic, file.queue_id].append(file)
    end_of = functools.cache(lambda topic, queue_id: queue_end(files[topic, queue_id]) or 0)
    rows = []
    for key, queues in sorted(_config(options.path, "consumerOffset.json", "offsetTable").items()):
        topic, _, group = key.partition("@")
        if options.topic_names and topic not in options.topic_names:
            continue
        for queue_id, offset in sorted((int(one), int(offset)) for one, offset in queues.items()):
            rows.append((group, topic, queue_id, offset, end_of(topic, queue_id)))
    group_, topic_, queue, offset_, end = zip(*rows, strict=True) if rows else ((),) * 5
    lags = [max(end - offset, 0) for _, _, _, offset, end in rows]
    yield {"group": group_, "topic": topic_, "queueId": queue, "offset": offset_, "maxOffset": end, "lag": lags}


def _config(root: str, name: str, table: str) -> dict[str, Any]:
    """Read a table of a broker's config file, with the changes of its journal. The table is empty if the file does not
    exist.
    Raises StoreError: the config directory is missing, or the file does not have a broker's format."""
    folder = join(resolve(root), "config")
    path = join(folder, name)
    # Read the journal first: if a broker replaces both in between, the newer file contains the older journal.
    journal = read_file(join(folder, journal_of(Path(name)).name))
    content = read_file(path)
    if content is None and exists(folder):
        return {}
    if content is None:
        raise StoreError(f"{path} does not exist: give the store directory, the one that holds config")
    try:
        stored = fastjson.loads(content)
        found: dict[str, Any] = stored[table]
        apply_journal(stored, journal, journal_of(Path(path)))
        return {str(key): value for key, value in found.items()}
    except (BodyError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{path} has no {table}: {error}; its copy {name}.bak may be whole") from None


# ---------------------------------------------------------------- messages that wait


class _Waiting(Struct, frozen=True):
    """The messages of a queue, except ``left_out``: half messages that are already decided."""

    split: QueueSplit
    left_out: frozenset[int] = frozenset()


def _delay_parts(options: StoreOptions, segments: Sequence[Segment], splits: Sequence[Split]) -> Parts:
    offsets = _config(options.path, "delayOffset.json", "offsetTable")
    low = {(SCHEDULE_TOPIC, int(level) - 1): int(offset) for level, offset in offsets.items()}
    queues = queue_splits(options.path, segments, options.split_bytes, topics=[SCHEDULE_TOPIC], low=low)
    return [_Waiting(split) for split in queues]


def _transaction_parts(options: StoreOptions, segments: Sequence[Segment], splits: Sequence[Split]) -> Parts:
    table = _config(options.path, "consumerOffset.json", "offsetTable")
    progress = table.get(f"{HALF_TOPIC}@{TRANSACTION_GROUP}", {})
    low = {(HALF_TOPIC, int(queue_id)): int(offset) for queue_id, offset in progress.items()}
    ops = queue_splits(options.path, segments, options.split_bytes, topics=[OP_HALF_TOPIC])
    halves = queue_splits(options.path, segments, options.split_bytes, topics=[HALF_TOPIC], low=low)
    decided = {half.file.queue_id: frozenset(_decided(ops, half.file.queue_id)) for half in halves}
    return [_Waiting(half, decided[half.file.queue_id]) for half in halves]


def _decided(ops: Sequence[QueueSplit], queue_id: int) -> Iterator[int]:
    """Yield the queue offsets of the half messages in op messages."""
    for split in ops:
        if split.file.queue_id != queue_id:
            continue
        offsets = chosen_entries(split, with_codes=False)[1]["offset"].astype("i8")
        for segment in split.segments:
            inside = (offsets >= segment.base_offset) & (offsets < segment.base_offset + segment.size)
            positions = (offsets[inside] - segment.base_offset).tolist()
            for part in scan.pick(map_records(segment.path, positions), segment.base_offset, positions):
                if isinstance(part, Records):
                    for row in range(len(part)):
                        yield from op_offsets(part.record(row))


def _waiting_rows(part: _Waiting, plan: ReadPlan) -> Iterator[dict[str, Any]]:
    numbers, entries = chosen_entries(part.split)
    # Rows are in the order of the log, entries in the order of the queue: match them by physical offset.
    order = np.argsort(entries["offset"], kind="stable")
    offsets = entries["offset"].astype("i8")[order]
    codes = entries["tags_code"].astype("i8")[order]
    numbers = numbers[order]
    for batch in read_queue(part.split, replace(plan, columns=MESSAGE_COLUMNS)):
        at = np.searchsorted(offsets, batch["commitLogOffset"].to_numpy())
        assert (offsets[at] == batch["commitLogOffset"].to_numpy()).all(), "each message has an entry that points at it"
        kept = ~np.isin(numbers[at], list(part.left_out))
        batch, at = batch.filter(pa.array(kept)), at[kept]
        properties = [dict(one) for one in batch["properties"].to_pylist()]
        yield {
            **dict(zip(batch.schema.names, batch.columns, strict=True)),
            # Entries in the queue of a delay level have the delivery time, in ms, in place of the hash of the tags.
            "deliverTimestamp": codes[at] * 1000,
            "delayLevel": batch["queueId"].to_numpy() + 1,
            "realTopic": [one.get(names.REAL_TOPIC) for one in properties],
            "realQueueId": [_number(one.get(names.REAL_QUEUE_ID)) for one in properties],
            "producerGroup": [one.get(names.PRODUCER_GROUP) for one in properties],
            "checkTimes": [_number(one.get(names.TRANSACTION_CHECK_TIMES)) or 0 for one in properties],
        }


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _repeated(text: str, count: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, "i4")), [text]).cast(pa.string())


TABLES: dict[Entity, Table] = {
    Entity.CONSUME_QUEUE: Table(
        _columns(
            "topic string, queueId int, queueOffset bigint, commitLogOffset bigint, size int, tagsCode bigint",
        ),
        _queue_files,
        _queue_rows,
    ),
    Entity.INDEX: Table(
        _columns(
            "fileName string, slot int, keyHash int, commitLogOffset bigint, storeTimestampApprox timestamp,"
            " prevIndex int"
        ),
        _index_files,
        _index_rows,
    ),
    Entity.RAW: Table(_columns("offset bigint, size int, magic int, bytes binary"), _log_splits, _raw_rows),
    Entity.TOPICS: Table(
        _columns(
            "topic string, readQueues int, writeQueues int, perm int, isOrdered boolean, attributes map<string,string>"
        ),
        _whole,
        _topic_rows,
    ),
    Entity.OFFSETS: Table(
        _columns("group string, topic string, queueId int, offset bigint, maxOffset bigint, lag bigint"),
        _whole,
        _offset_rows,
    ),
    Entity.DELAY: Table(
        (*_columns("delayLevel int, deliverTimestamp timestamp, realTopic string, realQueueId int"), *MESSAGE_COLUMNS),
        _delay_parts,
        _waiting_rows,
    ),
    Entity.TRANSACTIONS: Table(
        (*_columns("realTopic string, realQueueId int, producerGroup string, checkTimes int"), *MESSAGE_COLUMNS),
        _transaction_parts,
        _waiting_rows,
    ),
}
