"""A program on a cluster with two executors. ``test_cluster.py`` starts it and checks its output.

``python cluster_program.py SETUP``: ``SETUP`` is the JSON of a `Setup`. Every function in `CASES` is a case. It gets
the session and the setup, and its result is printed as a line of JSON, ``[name, value]``. A new case needs a function
here and a test in ``test_cluster.py``. In some cases a task kills its executor, with SIGKILL, after it has passed on
the first rows.

With the jar, the cases in `OF_TWINS` run a second time with the readers in Python, as ``name-python``. A second program
without the jar runs the cases in `WITHOUT_JAR`.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from msgspec.structs import replace
from pyspark.sql import DataFrame, DataFrameReader, SparkSession

from rmqkit.errors import RmqError
from rmqkit.spark import one_line, spark_session
from rmqkit.spark.jobs.summary import summary
from rmqkit.spark.options import Entity
from rmqkit.spark.source import store

ENTITIES = (Entity.CONSUME_QUEUE, Entity.INDEX, Entity.DELAY, Entity.TOPICS)


class Setup(msgspec.Struct):
    """The input of the cases.

    Attributes:
        master: the address of the cluster's master. ``has_jar``: True to read stores in Java. ``suffix``: ``-python``
            for the readers in Python of a session with the jar.
        store: the directory of a golden store. ``slots``: the slot number of its index files.
        name_server: the name server of a running broker. ``topic``: a topic with numbers as bodies. ``target``: a
            topic without messages.
        work_dir: an empty directory.
        without_package: a directory that hides the package if it is on PYTHONPATH.
        conf: settings of the session.
    """

    master: str
    has_jar: bool
    store: str
    slots: str
    name_server: str
    topic: str
    target: str
    work_dir: str
    without_package: str
    conf: dict[str, str]
    suffix: str = ""

    @property
    def is_cluster(self) -> bool:
        """Return True if executors run in processes of their own."""
        return self.master.startswith("spark://")


Case = Callable[[SparkSession, Setup], Any]


def java_runtimes(spark: SparkSession, setup: Setup) -> Any:
    """The driver's Java version, and the programs that run the executors."""
    tasks = spark.sparkContext.parallelize(range(8), 8)
    programs = tasks.map(lambda _: str(Path(f"/proc/{_executor()}/exe").readlink()))
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    return {"version": jvm.java.lang.System.getProperty("java.version"), "executors": programs.collect()}


def store_messages(spark: SparkSession, setup: Setup) -> Any:
    """Totals of a store, and who read it."""
    frame = _store(spark, setup, splitBytes="60k")
    rows = frame.selectExpr("length(body) size", "spark_partition_id() partition")
    counted = rows.selectExpr("count(1)", "sum(size)", "max(partition)").collect()[0]
    return {
        "totals": list(counted[:2]),
        "partitions": counted[2] + 1,
        "tagged": frame.where("topic = 'GoldTag'").count(),
        "plan": frame._jdf.queryExecution().executedPlan().toString(),  # type: ignore[operator]
        "executors": spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1,  # type: ignore[union-attr]
    }


def store_killed(spark: SparkSession, setup: Setup) -> Any:
    """Return the totals of a store. One executor is killed while it reads."""
    frame = _store(spark, setup, splitBytes="60k").selectExpr("length(body) size")
    return list(_with_a_kill(frame, setup, "store").selectExpr("count(1)", "sum(size)").collect()[0])


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
    return _numbers(_topic(spark, setup, setup.topic))


def sink(spark: SparkSession, setup: Setup) -> Any:
    """The numbers that a stream has sent to another topic. One executor is killed in the first batch."""
    source = spark.readStream.format("rocketmq").options(
        nameServer=setup.name_server, subscribe=setup.topic, startingOffsets="earliest", maxOffsetsPerTrigger="90"
    )
    writer = _with_a_kill(source.load().select("body"), setup, "sink").writeStream.format("rocketmq")
    writer = writer.options(nameServer=setup.name_server, topic=setup.target, producerGroup="cluster-sink")
    writer = writer.option("deliveryGuarantee", "transactional").trigger(availableNow=True)
    query = writer.option("checkpointLocation", f"{setup.work_dir}/checkpoint").start()
    assert query.awaitTermination(200), "the stream did not end"
    batches = sum(progress["numInputRows"] > 0 for progress in query.recentProgress)
    return {"batches": batches, "numbers": _numbers(_topic(spark, setup, setup.target))}


def failing_task(spark: SparkSession, setup: Setup) -> Any:
    """Return the driver's error for a damaged file that an executor reads."""
    log = Path(setup.work_dir, "damaged", "commitlog")
    log.mkdir(parents=True, exist_ok=True)
    segment = bytearray(Path(setup.store, "commitlog", f"{0:020}").read_bytes())
    segment[4] ^= 0xFF
    (log / f"{0:020}").write_bytes(segment)
    return _error(lambda: _stored(spark, setup).load(str(log.parent)).count())


def executors_without_package(spark: SparkSession, setup: Setup) -> Any:
    """Return the driver's error if the executors lack the package: new Python workers cannot import it."""
    environment = spark.sparkContext.environment
    environment["PYTHONPATH"] = setup.without_package
    try:
        return _error(lambda: summary(spark, setup.store).collect())
    finally:
        del environment["PYTHONPATH"]


CASES: tuple[Case, ...] = (
    store_messages,
    store_killed,
    store_entities,
    job_summary,
    live_batch,
    sink,
    failing_task,
    executors_without_package,
)
OF_TWINS: tuple[Case, ...] = (store_messages, store_killed, live_batch, failing_task)
WITHOUT_JAR: tuple[Case, ...] = (java_runtimes, store_messages, live_batch, failing_task)


def _stored(spark: SparkSession, setup: Setup) -> DataFrameReader:
    return spark.read.format(f"rocketmq-store{setup.suffix}")


def _store(spark: SparkSession, setup: Setup, **options: str) -> DataFrame:
    return _stored(spark, setup).options(**options).load(setup.store)


def _topic(spark: SparkSession, setup: Setup, topic: str) -> DataFrame:
    live = spark.read.format(f"rocketmq{setup.suffix}")
    return live.options(nameServer=setup.name_server, subscribe=topic, minPartitions="8").load()


def _with_a_kill(frame: DataFrame, setup: Setup, name: str) -> DataFrame:
    """Return the rows of a frame. The first task that has passed on some of them kills its executor."""
    marker = f"{setup.work_dir}/killed-{name}{setup.suffix}"

    def passed_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            try:
                os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            os.kill(_executor(), signal.SIGKILL)

    return frame.mapInArrow(passed_on, frame.schema)


def _executor() -> int:
    """Return the process of the executor: the parent of the fork server that is the parent of this worker."""
    return int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])


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
    if not given.has_jar:
        store.JAR = Path(given.work_dir, "no.jar")
    session = spark_session("cluster", given.master, given.conf)
    runs = [(given, CASES)] if given.has_jar or given.is_cluster else [(given, WITHOUT_JAR)]
    if given.has_jar:
        runs.append((replace(given, suffix="-python"), OF_TWINS))
    for one, cases in runs:
        for case in cases:
            print(json.dumps([f"{case.__name__}{one.suffix}", _outcome(case, session, one)]), flush=True)
    session.stop()
