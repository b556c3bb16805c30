"""A stream over a backlog of messages beside Spark's Kafka source: CPU time of driver, JVM and Python workers.

    python bench/spark_kafka.py
    python bench/spark_kafka.py --messages 200000 --repeats 1

Kafka's broker and ours, each in a process of its own, have the same messages of 100 random bytes in eight partitions.
A stream with ``availableNow`` reads all of them into the sink ``noop``. The streams run one after the other in rounds.
The CPU time of the brokers is not included. The readers of ``rocketmq`` in the session are used: with a reader in Java
in the jar of the package, run the program again with the same options.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.commands.interleaved import Ratio, Rounds
from rmqkit.spark import spark_session
from tests.interop.streams.sides import KafkaSide, RocketmqSide

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.interop.streams.stage import Side

TOPIC = "backlog"
PARTITIONS = 8
BODY = "concat(md5(cast(id as string)), md5(cast(-id as string)), md5(cast(id * 7 as string)), 'body')"
"""100 bytes."""
FLOOR, AMBITION = 1.0, 2.0
OURS = {
    "rocketmq": {},
    "rocketmq, columns of Kafka": {"columnNames": "kafka"},
    "rocketmq, columns of Kafka, pullBatchSize=1024": {"columnNames": "kafka", "pullBatchSize": "1024"},
}
"""Name of a stream of ours → options."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=2, help="counted rounds, after one that is not counted")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rmq-bench-", ignore_cleanup_errors=True)))
        for name in ("kafka", "rocketmq"):
            (folder / name).mkdir()
        kafka = stack.enter_context(KafkaSide(folder / "kafka"))
        ours = stack.enter_context(RocketmqSide(folder / "rocketmq", conf=""))
        spark = spark_session("spark-kafka", "local[2]", {**kafka.session, "spark.sql.shuffle.partitions": "2"})
        stack.callback(spark.stop)
        kafka.attach(spark)
        fill(spark, kafka, arguments.messages, {})
        fill(spark, ours, arguments.messages, {"columnNames": "kafka"})
        rounds = Rounds(lambda text: print(text, file=sys.stderr, flush=True))
        rounds.tree.excluded |= kafka.pids | ours.pids
        theirs = partial(stream, spark, kafka, arguments.messages, folder, {})
        for name, options in OURS.items():
            what = f"a stream of {arguments.messages:,} messages: Kafka's source / {name}"
            ratio = Ratio(1, what, "100B", arguments.messages, name, "kafka", FLOOR, AMBITION)
            rounds.add(ratio, partial(stream, spark, ours, arguments.messages, folder, options), theirs)
        figures = rounds.run(arguments.repeats)
        machine = {"machine": platform.machine(), "cpus": os.cpu_count(), "load": os.getloadavg()[0]}
        print(json.dumps({"bench": "spark-kafka", "spark": spark.version, **machine, "ratios": figures}, indent=1))


def fill(spark: SparkSession, side: Side, count: int, options: dict[str, str]) -> None:
    """Create a topic with the messages."""
    side.create(TOPIC, PARTITIONS)
    rows = spark.range(count).selectExpr(
        f"'{TOPIC}' as topic", f"cast(id % {PARTITIONS} as int) as partition", f"cast({BODY} as binary) as value"
    )
    given = {name: text for name, text in side.options().items() if not name.startswith("kafkaConsumer")}
    rows.write.format(side.format).options(**given, **options).mode("append").save()


def stream(spark: SparkSession, side: Side, count: int, folder: Path, options: dict[str, str]) -> None:
    """Read all messages. Raises AssertionError: the stream read another number of messages."""
    given = {**side.options(), "subscribe": TOPIC, "startingOffsets": "earliest", **options}
    rows = spark.readStream.format(side.format).options(**given).load()
    checkpoint = tempfile.mkdtemp(dir=folder, prefix="checkpoint-")
    query = rows.writeStream.format("noop").option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
    read = sum(progress["numInputRows"] for progress in query.recentProgress)
    assert read == count, f"the stream read {read} of {count} messages"


if __name__ == "__main__":
    main()
