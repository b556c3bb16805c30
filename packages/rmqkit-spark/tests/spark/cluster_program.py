"""A program on a cluster of two executor JVMs. ``test_local_cluster.py`` starts it and checks its output.

``python cluster_program.py SETUP``: ``SETUP`` is the JSON of a `Setup`. Every function in `CASES` is a case. It gets
the session and the setup, and its result is printed as a line of JSON, ``[name, value]``. A new case needs a function
here and a test in ``test_local_cluster.py``.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import DataFrame, SparkSession

from rmqkit.errors import RmqError
from rmqkit.spark import one_line, spark_session
from rmqkit.spark.jobs.summary import summary
from rmqkit.spark.options import Entity

MASTER = "local-cluster[2,1,1024]"
ENTITIES = (Entity.CONSUME_QUEUE, Entity.INDEX, Entity.DELAY, Entity.TOPICS)


class Setup(msgspec.Struct):
    """The input of the cases.

    Attributes:
        store: the directory of a golden store. ``slots``: the slot number of its index files.
        name_server: the name server of a running broker. ``topic``: a topic with numbers as bodies.
        work_dir: an empty directory.
        without_package: a directory that hides the package if it is on PYTHONPATH.
        conf: settings of the session.
    """

    store: str
    slots: str
    name_server: str
    topic: str
    work_dir: str
    without_package: str
    conf: dict[str, str]


Case = Callable[[SparkSession, Setup], Any]


def java_runtimes(spark: SparkSession, setup: Setup) -> Any:
    """The driver's Java version, and the programs that run the executors."""

    def of_executor(_: int) -> str:
        daemon = Path(f"/proc/{os.getppid()}/stat").read_text()
        return str(Path(f"/proc/{daemon.rpartition(')')[2].split()[1]}/exe").readlink())

    tasks = spark.sparkContext.parallelize(range(8), 8)
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    return {"version": jvm.java.lang.System.getProperty("java.version"), "executors": tasks.map(of_executor).collect()}


def store_messages(spark: SparkSession, setup: Setup) -> Any:
    """Totals of a store, and who read it."""
    frame = _store(spark, setup, splitBytes="60k")
    rows = frame.selectExpr("length(body) size", "spark_partition_id() partition")
    counted = rows.selectExpr("count(1)", "sum(size)", "max(partition)").collect()[0]
    return {
        "totals": list(counted[:2]),
        "partitions": counted[2] + 1,
        "tagged": frame.where("topic = 'GoldTag'").count(),
        "executors": spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1,  # type: ignore[union-attr]
    }


def store_entities(spark: SparkSession, setup: Setup) -> Any:
    """Return the row counts of some entities: of queue files, index files, the log and a configuration table."""
    counts = (
        _store(spark, setup, entity=one.value, maxHashSlotNum=setup.slots).selectExpr(f"'{one.value}'", "count(1)")
        for one in ENTITIES
    )
    return dict(functools.reduce(DataFrame.union, counts).collect())


def job_summary(spark: SparkSession, setup: Setup) -> Any:
    """Return the number of messages in the summary."""
    return summary(spark, setup.store).selectExpr("sum(messages)").collect()[0][0]


def live_batch(spark: SparkSession, setup: Setup) -> Any:
    """The numbers in a topic."""
    frame = spark.read.format("rocketmq").options(
        nameServer=setup.name_server, subscribe=setup.topic, minPartitions="8"
    )
    return _numbers(frame.load())


def live_stream(spark: SparkSession, setup: Setup) -> Any:
    """The numbers that a stream has written when it has read what there was."""
    source = spark.readStream.format("rocketmq").options(
        nameServer=setup.name_server, subscribe=setup.topic, startingOffsets="earliest", maxOffsetsPerTrigger="90"
    )
    out = f"{setup.work_dir}/streamed"
    writer = source.load().select("body").writeStream.format("parquet").option("path", out)
    query = writer.option("checkpointLocation", f"{setup.work_dir}/checkpoint").trigger(availableNow=True).start()
    query.awaitTermination(100)
    return {"batches": len(query.recentProgress), "numbers": _numbers(spark.read.parquet(out))}


def failing_task(spark: SparkSession, setup: Setup) -> Any:
    """Return the driver's error for a damaged file that an executor reads."""
    log = Path(setup.work_dir, "damaged", "commitlog")
    log.mkdir(parents=True)
    segment = bytearray(Path(setup.store, "commitlog", f"{0:020}").read_bytes())
    segment[4] ^= 0xFF
    (log / f"{0:020}").write_bytes(segment)
    return _error(lambda: spark.read.format("rocketmq-store").load(str(log.parent)).count())


def executors_without_package(spark: SparkSession, setup: Setup) -> Any:
    """Return the driver's error if the executors lack the package: new Python workers cannot import it."""
    environment = spark.sparkContext.environment
    environment["PYTHONPATH"] = setup.without_package
    try:
        return _error(lambda: summary(spark, setup.store).collect())
    finally:
        del environment["PYTHONPATH"]


CASES: tuple[Case, ...] = (
    java_runtimes,
    store_messages,
    store_entities,
    job_summary,
    live_batch,
    live_stream,
    failing_task,
    executors_without_package,
)


def _store(spark: SparkSession, setup: Setup, **options: str) -> DataFrame:
    return spark.read.format("rocketmq-store").options(**options).load(setup.store)


def _numbers(frame: DataFrame) -> list[int]:
    return sorted(row[0] for row in frame.selectExpr("cast(cast(body as string) as int)").collect())


def _outcome(case: Case, spark: SparkSession, setup: Setup) -> Any:
    """Return the result of a case or its traceback. A failed case does not stop the other cases."""
    try:
        return case(spark, setup)
    except Exception:  # noqa: BLE001 - the test shows it
        return traceback.format_exc()


def _error(work: Callable[[], Any]) -> list[str]:
    try:
        with one_line():
            work()
    except RmqError as error:
        return [type(error).__name__, str(error)]
    return []


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[1], type=Setup)
    session = spark_session("cluster", MASTER, given.conf)
    for one in CASES:
        print(json.dumps([one.__name__, _outcome(one, session, given)]), flush=True)
    session.stop()
