"""Replay of the messages of a store or an archive to a topic. Each message is sent once, even after an interruption.

::

    replay(spark, "/data/store", "orders-again", sink={"nameServer": "host:9876"}, topic="orders", where="tags = 'eu'")

The log is replayed in chunks of ``chunk_bytes``, in order. Each chunk is a batch of the transactional sink
(`rmqkit.spark.sink.exactly_once`). The number of the batch is the commit log offset of its end. A run with the same
``replay_id`` first finishes the last batch in the ledger, and then continues after this batch, including messages that
were stored since. The run must start before the brokers delete the ledger (``fileReservedTime``).

`rmqkit.admin.replay` is a separate implementation, which runs in one process and stores its state in a file. Here
Spark's tasks send the messages, and the ledger of their transactions is the state. Both implementations use the names
of RocketMQ's own properties and topics in `rmqkit.protocol`.

===================  =============================================================================================
field                value in the replayed message
===================  =============================================================================================
body, tags, keys,    unchanged, like properties of the application. RocketMQ's own properties are dropped, such as
flag, sharding key   delays, retries, transactions and marks of the broker
unique key           ``replay_id/batch/commitLogOffset:queueOffset``, with its offsets in the source
queue                any queue, or the queue for its sharding key in the target
===================  =============================================================================================
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct, field

from rmqkit.arrow.options import VerifyCrc
from rmqkit.client.runtime.process import portal
from rmqkit.errors import SettingsError
from rmqkit.protocol.names import NOT_OF_APPLICATIONS, SYSTEM_TOPICS
from rmqkit.protocol.properties import RESERVED_NAMES, SHARDING_KEY
from rmqkit.spark.failures import one_line
from rmqkit.spark.jobs.query import query
from rmqkit.spark.options import DeliveryGuarantee, SinkOptions, parse_options
from rmqkit.spark.planning import FORMAT
from rmqkit.spark.sink.exactly_once import ExactlyOnce
from rmqkit.spark.sink.ledger import Batch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Filter", "Replayed", "replay"]

_CHUNK_BYTES = 256 << 20
_VERIFY = "verifycrc"


class Filter(Struct, frozen=True):
    """The selection of messages to replay. Without a topic, it selects all messages except system messages, retries and
    dead letters.
    ``where`` is an SQL condition over the columns of messages. Times are bounds of ``storeTimestamp``."""

    topic: str = ""
    tag: str = ""
    key: str = ""
    where: str = ""
    begin_ms: int | None = None
    end_ms: int | None = None


class Replayed(Struct):
    """The result of a run, or of a dry run.

    Attributes:
        replay_id: the name of the replay. A run with the same name continues the replay.
        messages: number of messages that this run sent, by topic of the source. With ``is_dry_run``, the number to
            send.
        batches: number of batches.
        up_to: commit log offset. All matching messages before it are in the target.
    """

    replay_id: str
    target_topic: str
    messages: dict[str, int] = field(default_factory=dict)
    batches: int = 0
    up_to: int = 0
    is_dry_run: bool = False


class _Chunk(Struct):
    """A part of the log, with the bounds of store times and the number of its selected messages by topic."""

    low: int
    high: int
    begin_ms: int
    end_ms: int
    messages: dict[str, int]


# Long: the function declares and describes its options.
def replay(
    spark: SparkSession,
    path: str,
    target_topic: str,
    options: Mapping[str, str] | None = None,
    *,
    sink: Mapping[str, str] | None = None,
    wanted: Filter | None = None,
    replay_id: str = "",
    rate: int = 0,
    is_ordered: bool = False,
    chunk_bytes: int = _CHUNK_BYTES,
    is_dry_run: bool = False,
) -> Replayed:
    """Send the selected messages of a store or an archive to a topic.

    Args:
        options: options of ``rocketmq-store``: corruptRecordMode, decompress, ...; verifyCrc is ``fail`` by default.
        sink: options of the sink: nameServer, producerGroup, accessKey, ...
        replay_id: name of the replay. A run with the same name continues the replay. The default depends on path,
            target and filter.
        rate: maximum number of messages per second, sent by one task; 0 means no limit.
        is_ordered: whether messages with the same sharding key keep the order of the log. This uses one task at a time.
        chunk_bytes: number of log bytes that are staged together.
        is_dry_run: whether to count the messages only.

    Raises:
        SettingsError: an option or the condition is not valid.
        StoreError: the store is missing or cannot be read.
        ClientError, RemotingError, PeerRefused: brokers do not accept the messages. The same call continues the replay.
    """
    wanted = wanted or Filter()
    replay_id = replay_id or _identity(path, target_topic, wanted)
    done = Replayed(replay_id, target_topic, is_dry_run=is_dry_run)
    given = {
        **(sink or {}),
        "topic": target_topic,
        "sinkId": replay_id,
        "deliveryGuarantee": DeliveryGuarantee.TRANSACTIONAL.value,
        "maxRowsPerSecond": str(rate),
    }
    ledger = ExactlyOnce(parse_options(SinkOptions, given, FORMAT))
    try:
        done.up_to, unfinished = ledger.last_batches(replay_id)
        # The batch is decided but not finished, and all its half messages exist: the ledger has everything for the
        # commit.
        if unfinished is not None and not is_dry_run and not ledger.progress(Batch(replay_id, unfinished)).gone:
            ledger.commit(Batch(replay_id, unfinished), ())
            done.up_to, unfinished = unfinished, None
        own = dict(options or {})
        if _VERIFY not in map(str.lower, own):
            own[_VERIFY] = VerifyCrc.FAIL.value  # a sent message gets a new CRC, which would hide a damaged body
        source = _Source(spark, path, own, wanted)
        with one_line():
            chunks = list(_chunks(source, done.up_to, unfinished, chunk_bytes))
            if chunks and not is_dry_run:
                ledger.commit(Batch(replay_id, 0), ())  # the first entry of the replay in the ledger
            for chunk in chunks:
                assert chunk.high > done.up_to or is_dry_run, "the replay never moves backwards"
                if not is_dry_run:
                    rows = _rows(source, chunk, is_single=bool(rate) or is_ordered)
                    # The number of the batch is the end of its chunk. The next run reads its start from the ledger.
                    rows.write.format(FORMAT).options(**given, batchId=str(chunk.high)).mode("append").save()
                    done.up_to = chunk.high
                done.batches += 1
                for topic, count in chunk.messages.items():
                    done.messages[topic] = done.messages.get(topic, 0) + count
    finally:
        # Otherwise heartbeats would keep this process in the group, and brokers would send it check-backs.
        portal().run(ledger.producer.close)
    return done


class _Source(Struct):
    """The selected messages of a store or an archive."""

    spark: SparkSession
    path: str
    options: dict[str, str]
    wanted: Filter

    def frame(self, begin_ms: int | None = None, end_ms: int | None = None) -> DataFrame:
        """Return the selected messages."""
        from pyspark.errors import AnalysisException, ParseException
        from pyspark.sql import functions as f

        wanted = self.wanted
        frame = query(
            self.spark,
            self.path,
            self.options,
            topic=wanted.topic,
            key=wanted.key,
            begin_ms=_later(wanted.begin_ms, begin_ms),
            end_ms=_earlier(wanted.end_ms, end_ms),
        )
        if not wanted.topic:
            is_own = f.col("topic").isin(*SYSTEM_TOPICS)
            for prefix in NOT_OF_APPLICATIONS:
                is_own |= f.col("topic").startswith(prefix)
            frame = frame.where(~is_own)
        if wanted.tag:
            frame = frame.where(f.col("tags") == wanted.tag)
        try:
            if wanted.where:
                frame = frame.where(wanted.where)
                frame.schema  # noqa: B018 - Spark Connect checks a condition only now
            return frame
        except (AnalysisException, ParseException) as error:
            line = str(error).strip().splitlines()[0]
            raise SettingsError(
                f"replay: where={wanted.where!r} is not a condition over the columns of a message: {line}"
            ) from None


def _chunks(source: _Source, at: int, unfinished: int | None, chunk_bytes: int) -> Iterator[_Chunk]:
    """Plan the remaining batches. The first batch may be an unfinished batch with its old bounds, which is staged
    again.
    """
    from pyspark.sql import functions as f

    place = f.col("commitLogOffset")
    # Chunks are ranges of log offsets: chunks with a fixed number of messages would change when retention deletes
    # messages.
    number = f.floor(place / chunk_bytes).cast("bigint")
    # A batch that lost half messages is staged again with the same rows, so its bounds must stay the same even if
    # chunk_bytes has changed.
    if unfinished is not None:
        number = f.when(place < unfinished, f.lit(-1)).otherwise(number)
    rows = (
        source.frame()
        .where(place >= at)
        .groupBy(number.alias("number"), "topic")
        .agg(
            f.count("*").alias("count"),
            f.max(place).alias("last"),
            f.min(f.unix_millis("storeTimestamp")).alias("begin"),
            f.max(f.unix_millis("storeTimestamp")).alias("end"),
        )
        .collect()
    )
    for chunk_number in sorted({row["number"] for row in rows}):
        same = [row for row in rows if row["number"] == chunk_number]
        high = unfinished if chunk_number == -1 and unfinished is not None else max(row["last"] for row in same) + 1
        begin, end = min(row["begin"] for row in same), max(row["end"] for row in same)
        yield _Chunk(at, high, begin, end, {row["topic"]: row["count"] for row in same})
        at = high


def _rows(source: _Source, chunk: _Chunk, *, is_single: bool) -> DataFrame:
    """Return the messages of a chunk with the columns of the sink."""
    from pyspark.sql import functions as f

    place = f.col("commitLogOffset")
    frame = source.frame(chunk.begin_ms, chunk.end_ms).where((place >= chunk.low) & (place < chunk.high))
    if is_single:
        # orderBy would distribute the rows over ranges, which several tasks would send at the same time.
        frame = frame.coalesce(1).sortWithinPartitions("commitLogOffset", "queueOffset")
    return frame.select(
        "body",
        "tags",
        "keys",
        "flag",
        f.map_filter("properties", lambda name, value: ~name.isin(*RESERVED_NAMES)).alias("properties"),
        f.col("properties")[SHARDING_KEY].alias("shardingKey"),
        # Use offsets instead of row numbers: a message must always get the same key, however Spark plans the read.
        f.concat_ws(":", "commitLogOffset", "queueOffset").alias("rowKey"),
    )


def _identity(path: str, target_topic: str, wanted: Filter) -> str:
    """Return the default name of a replay, which is the same for the same arguments."""
    identity = repr((path, target_topic, wanted)).encode()
    return f"replay-{hashlib.blake2b(identity, digest_size=8).hexdigest()}"


def _later(one: int | None, other: int | None) -> int | None:
    return max((bound for bound in (one, other) if bound is not None), default=None)


def _earlier(one: int | None, other: int | None) -> int | None:
    return min((bound for bound in (one, other) if bound is not None), default=None)
