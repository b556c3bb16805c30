"""Data frames of messages for programs: `read`, columns made of bodies, and the `backlog` of a stream.

**Reading less.** The reader in Java gets the columns and conditions of a query from Spark, and reads nothing else. If
a session lacks its jar (`rmqkit.spark.source.store.JAR`), every query decodes all columns and messages of a store: then
set the options ``columns``, ``topic``, ``queueId``, ``startingTimestamp`` and ``endingTimestamp``.

**Bodies.** A body is bytes; `from_body_json`, `from_body_avro` and `from_body_protobuf` decode it::

    orders.select("msgId", from_body_json("cents int, item string").alias("order")).select("msgId", "order.cents")

Each applies Spark's own function to the column ``body``. Avro and Protobuf are in Spark packages that PySpark does not
contain: start Spark with ``spark.jars.packages``, or queries fail because the package is not loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


def read(spark: SparkSession, path: str, options: Mapping[str, str] | None = None) -> DataFrame:
    """Return the messages of a store, or of an archive of it (`rmqkit.spark.jobs.archive`).

    ::

        counts = read(spark, "store").where("topic = 'Orders'").groupBy("tags").count()

    Args:
        path: directory or address of the store or the archive.
        options: options of ``rocketmq-store``.

    Raises:
        SettingsError: an option is not valid.
        StoreError: the archive cannot be read.
    """
    from rmqkit.spark.jobs.query import table

    return table(spark, path, options)


def from_body_json(schema: str, body: str = "body") -> Column:
    """Decode bodies as JSON. ``schema`` is Spark DDL; a body that is not JSON is null, as in Spark's ``from_json``."""
    from pyspark.sql import functions

    return functions.from_json(functions.col(body).cast("string"), schema)


def from_body_avro(schema: str, body: str = "body") -> Column:
    """Decode bodies as Avro without a header; ``schema`` is Avro's JSON. Spark needs its package ``spark-avro``."""
    from pyspark.sql.avro.functions import from_avro

    return from_avro(body, schema)


def from_body_protobuf(message: str, descriptor: bytes, body: str = "body") -> Column:
    """Decode bodies as Protobuf messages; ``descriptor`` is the output of ``protoc --descriptor_set_out``.
    Spark needs its package ``spark-protobuf``."""
    from pyspark.sql.protobuf.functions import from_protobuf

    return from_protobuf(body, message, binaryDescriptorSet=descriptor)


def backlog(progress: Mapping[str, Any]) -> dict[str, int]:
    """Count the messages in the queues of ``rocketmq`` sources that the stream had not read when a batch was planned,
    by ``topic/broker/queue``.

    Args:
        progress: ``query.lastProgress``, or the progress that a ``StreamingQueryListener`` received. It has no backlog
            if the stream has had no batch since it started.
    """
    behind: dict[str, int] = {}
    for source in progress["sources"]:
        ends, latest = dict(_offsets(source.get("endOffset"))), dict(_offsets(source.get("latestOffset")))
        for queue, reach in latest.items():
            name = "/".join(queue)
            # Never below 0: a queue that was created again ends before the last offset read of the old one.
            behind[name] = behind.get(name, 0) + max(0, reach - ends.get(queue, 0))
    return behind


def backlog_summary(progress: Mapping[str, Any]) -> dict[str, float]:
    """Return the least, mean and greatest number in `backlog`, with the names of the metrics of Spark's Kafka source:
    ``minOffsetsBehindLatest``, ``avgOffsetsBehindLatest`` and ``maxOffsetsBehindLatest``.

    Args:
        progress: as for `backlog`. Without a backlog the result is empty.
    """
    behind = backlog(progress).values()
    if not behind:
        return {}
    figures = {"min": min(behind), "avg": sum(behind) / len(behind), "max": max(behind)}
    return {f"{name}OffsetsBehindLatest": figure for name, figure in figures.items()}


def _offsets(offsets: Any) -> Iterator[tuple[tuple[str, str, str], int]]:
    """Yield the offset of each queue that a source reports. Yield nothing if the source has offsets of another form."""
    topics = json.loads(offsets) if isinstance(offsets, str) and offsets.startswith("{") else offsets
    for topic, brokers in topics.items() if isinstance(topics, dict) else ():
        for broker_name, queues in brokers.items() if isinstance(brokers, dict) else ():
            for queue_id, offset in queues.items() if isinstance(queues, dict) else ():
                if isinstance(offset, int):
                    yield (topic, broker_name, queue_id), offset
