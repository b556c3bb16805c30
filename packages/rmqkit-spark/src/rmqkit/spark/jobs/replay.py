"""`replay` sends stored messages, of a store or an archive, to a topic again: each once, also when it is interrupted.

::

    replay(spark, "/data/store", "orders-again", sink={"nameServer": "host:9876"}, topic="orders", where="tags = 'eu'")

The log is replayed in stretches of ``chunk_bytes``, in its order; each is one batch of the transactional sink
(`rmqkit.spark.sink.exactly_once`) whose number is the commit log offset that it ends before. A run with the same
``replay_id`` goes on behind the last batch that the ledger has, and finishes that one first; so it also takes what a
store has got since. It has to go on while brokers keep the ledger (``fileReservedTime``).

This is a driver of its own beside `rmqkit.admin.replay`, which runs in one process and has its state in a file. Here
tasks of Spark send, and the ledger of their transactions is the state. Both take the names of RocketMQ's own properties
and topics from `rmqkit.protocol`.

===================  =============================================================================================
of a message         what the replayed one has
===================  =============================================================================================
body, tags, keys,    the same; so do properties of the application. What RocketMQ itself put there is left behind,
flag, sharding key   such as delays, retries, transactions and marks of the broker
unique key           ``replay_id/batch/commitLogOffset:queueOffset``: where it is in the source
queue                any, or the one that its sharding key chooses in the target
===================  =============================================================================================
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct, field

from rmqkit.arrow.options import VerifyCrc
from rmqkit.arrow.schema import MESSAGE_COLUMNS
from rmqkit.client.runtime.process import portal
from rmqkit.errors import SettingsError
from rmqkit.protocol.names import NOT_OF_APPLICATIONS, SYSTEM_TOPICS
from rmqkit.protocol.properties import RESERVED_NAMES, SHARDING_KEY
from rmqkit.spark.failures import one_line
from rmqkit.spark.jobs.query import query
from rmqkit.spark.options import DeliveryGuarantee, SinkOptions, parse_options
from rmqkit.spark.sink.exactly_once import ExactlyOnce
from rmqkit.spark.sink.ledger import Batch
from rmqkit.spark.source.broker import FORMAT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Filter", "Replayed", "replay"]

_CHUNK_BYTES = 256 << 20
_VERIFY = "verifycrc"
_PLANNED = ("topic", "commitLogOffset", "storeTimestamp")
_SENT = (*_PLANNED, "queueOffset", "tags", "keys", "properties", "flag", "body")


class Filter(Struct, frozen=True):
    """Which messages are replayed; without a topic all but those of the system, of retries and dead letters.
    ``where`` is a condition of SQL over the columns of messages; times are bounds of ``storeTimestamp``."""

    topic: str = ""
    tag: str = ""
    key: str = ""
    where: str = ""
    begin_ms: int | None = None
    end_ms: int | None = None


class Replayed(Struct):
    """The result of a run, or of a dry run.

    Attributes:
        replay_id: the name of the replay; a run with the same name continues it.
        messages: number of messages sent by this run, by topic of the source; with ``is_dry_run`` the number to send.
        batches: number of batches.
        up_to: the commit log offset before which all matching messages are in the target.
    """

    replay_id: str
    target_topic: str
    messages: dict[str, int] = field(default_factory=dict)
    batches: int = 0
    up_to: int = 0
    is_dry_run: bool = False


class _Chunk(Struct):
    """A stretch of the log, and what of it is wanted."""

    low: int
    high: int
    begin_ms: int
    end_ms: int
    messages: dict[str, int]


# Long: it declares and describes its options.
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
        options: of ``rocketmq-store``: corruptRecordMode, decompress, ...; verifyCrc is ``fail`` unless it is there.
        sink: of the sink: nameServer, producerGroup, accessKey, ...
        replay_id: the same again goes on; by default it follows from path, target and filter.
        rate: messages a second at most, by one task; 0: as fast as possible.
        is_ordered: messages with the same sharding key keep the log's order, which takes one task at a time.
        chunk_bytes: of the log, that are staged together.
        is_dry_run: only count.

    Raises:
        SettingsError: an option or the condition cannot be used.
        StoreError: there is no readable store.
        ClientError, RemotingError, PeerRefused: brokers do not take the messages; the same call goes on.
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
        # Decided and not done, and all half messages are there: nothing is staged again, the ledger knows what to
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
                ledger.commit(Batch(replay_id, 0), ())  # from now on the ledger knows the replay
            for chunk in chunks:
                assert chunk.high > done.up_to or is_dry_run, "the log is replayed forward"
                if not is_dry_run:
                    rows = _rows(source, chunk, is_single=bool(rate) or is_ordered)
                    # The batch's number is where its chunk ends: so the ledger alone says where the next run goes on.
                    rows.write.format(FORMAT).options(**given, batchId=str(chunk.high)).mode("append").save()
                    done.up_to = chunk.high
                done.batches += 1
                for topic, count in chunk.messages.items():
                    done.messages[topic] = done.messages.get(topic, 0) + count
    finally:
        # Else its heartbeats would keep this process in the group, and brokers would ask it about half messages.
        portal().run(ledger.producer.close)
    return done


class _Source(Struct):
    """Reads the messages that are wanted of a store or an archive."""

    spark: SparkSession
    path: str
    options: dict[str, str]
    wanted: Filter

    def frame(self, columns: tuple[str, ...], begin_ms: int | None = None, end_ms: int | None = None) -> DataFrame:
        """The wanted messages, with some columns and those that the condition names."""
        from pyspark.errors import AnalysisException, ParseException
        from pyspark.sql import functions as f

        wanted = self.wanted
        tested = [one.name for one in MESSAGE_COLUMNS if re.search(rf"\b{one.name}\b", wanted.where, re.IGNORECASE)]
        needed = dict.fromkeys([*columns, *tested, *(["tags"] if wanted.tag else ())])
        frame = query(
            self.spark,
            self.path,
            {**self.options, "columns": ",".join(needed)},
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
                frame.schema  # noqa: B018 - Spark Connect looks at a condition only now
            return frame
        except (AnalysisException, ParseException) as error:
            line = str(error).strip().splitlines()[0]
            raise SettingsError(
                f"replay: where={wanted.where!r} is no condition over a message's columns: {line}"
            ) from None


def _chunks(source: _Source, at: int, unfinished: int | None, chunk_bytes: int) -> Iterator[_Chunk]:
    """Plan the remaining batches. The first may be a batch of which rows must be staged again, with its old bounds."""
    from pyspark.sql import functions as f

    place = f.col("commitLogOffset")
    # By place in the log, as all batches of a replay are: chunks of message counts would differ after retention.
    number = f.floor(place / chunk_bytes).cast("bigint")
    # A batch that lost half messages is staged again with the rows that it had: its bounds stay, even if chunk_bytes
    # has changed.
    if unfinished is not None:
        number = f.when(place < unfinished, f.lit(-1)).otherwise(number)
    rows = (
        source.frame(_PLANNED)
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
    """The messages of a chunk as the sink takes them."""
    from pyspark.sql import functions as f

    place = f.col("commitLogOffset")
    frame = source.frame(_SENT, chunk.begin_ms, chunk.end_ms).where((place >= chunk.low) & (place < chunk.high))
    if is_single:
        # Not orderBy, which cuts the rows into ranges that several tasks send at once.
        frame = frame.coalesce(1).sortWithinPartitions("commitLogOffset", "queueOffset")
    return frame.select(
        "body",
        "tags",
        "keys",
        "flag",
        f.map_filter("properties", lambda name, value: ~name.isin(*RESERVED_NAMES)).alias("properties"),
        f.col("properties")[SHARDING_KEY].alias("shardingKey"),
        # A place in the log, not a row number: however Spark plans the read, the same message gets the same key.
        f.concat_ws(":", "commitLogOffset", "queueOffset").alias("rowKey"),
    )


def _identity(path: str, target_topic: str, wanted: Filter) -> str:
    """The same for the same task."""
    told = repr((path, target_topic, wanted)).encode()
    return f"replay-{hashlib.blake2b(told, digest_size=8).hexdigest()}"


def _later(one: int | None, other: int | None) -> int | None:
    return max((bound for bound in (one, other) if bound is not None), default=None)


def _earlier(one: int | None, other: int | None) -> int | None:
    return min((bound for bound in (one, other) if bound is not None), default=None)
