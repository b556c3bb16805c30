"""A program with a remote Spark: every job, source and sink over Spark Connect. `test_connect` starts it.

``python connect_program.py SETUP``: ``SETUP`` is the JSON of a `Setup`. Every function in `CASES` is a case. It gets
the session and the setup, and its result is printed as a line of JSON, ``[name, value]``. After one Connect session,
PySpark's functions return Connect objects in the whole process. The program is therefore a process of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import SparkSession

from rmqkit.cli import app
from rmqkit.errors import RmqError
from rmqkit.spark import read, spark_session
from rmqkit.spark.jobs.archive import archive
from rmqkit.spark.jobs.audit import audit
from rmqkit.spark.jobs.diff import diff
from rmqkit.spark.jobs.query import query, sql
from rmqkit.spark.jobs.rebuild import rebuild
from rmqkit.spark.jobs.replay import Filter, replay
from rmqkit.spark.jobs.summary import summary
from rmqkit.spark.jobs.verify import verify
from rmqkit.store.offline.rebuild import rebuild as rebuild_alone
from rmqkit.store.settings import StoreSettings


class Setup(msgspec.Struct):
    """The input of the cases.

    Attributes:
        remote: the address of the server.
        store: the directory of a store without a broker. ``copy``: that of a copy with one changed body.
        topic: a topic of the store. ``settings``: the settings of the store's index.
        name_server: the name server of a running broker.
        work_dir: an empty directory.
    """

    remote: str
    store: str
    copy: str
    topic: str
    settings: StoreSettings
    name_server: str
    work_dir: str


Case = Callable[[SparkSession, Setup], Any]


def job_summary(spark: SparkSession, setup: Setup) -> Any:
    """Messages of every topic."""
    return [list(row) for row in summary(spark, setup.store).groupBy("topic").sum("messages").collect()]


def job_audit(spark: SparkSession, setup: Setup) -> Any:
    """Totals, and what stands in other files than the log."""
    found = audit(spark, setup.store)
    return {"messages": found.messages, "notes": found.notes, "waiting": [len(found.lags) > 0, len(found.delayed) > 0]}


def job_verify(spark: SparkSession, setup: Setup) -> Any:
    """Return the result of a check and the number of checked records."""
    found = verify(spark, setup.store, setup.settings)
    return {"is_sound": found.is_sound, "records": found.checked["records"]}


def job_diff(spark: SparkSession, setup: Setup) -> Any:
    """The store and its copy."""
    found = diff(spark, setup.store, setup.copy)
    rows = [list(row) for row in found.differences.select("difference", "leftCommitLogOffset").collect()]
    return {
        "counts": [found.only_left, found.only_right, found.changed],
        "rows": rows,
        "segments": bool(found.segments),
    }


def job_rebuild(spark: SparkSession, setup: Setup) -> Any:
    """Return the number of rebuilt files, and how many of them equal those of ``rmq store rebuild``."""
    root, other = Path(setup.work_dir, "rebuilt"), Path(setup.work_dir, "alone")
    for copy in (root, other):
        shutil.copytree(setup.store, copy)
        shutil.rmtree(copy / "consumequeue")
    rebuild(spark, str(root), setup.settings, index=False, split_bytes=60_000)
    rebuild_alone(other, setup.settings, queues=True, index=False)
    files = [path.relative_to(root) for path in sorted(root.glob("consumequeue/*/*/*"))]
    return len(files), sum((root / file).read_bytes() == (other / file).read_bytes() for file in files)


def jobs_query_and_sql(spark: SparkSession, setup: Setup) -> Any:
    """Two statements in turn, both read after both were made, in each direction."""
    counted = sql(spark, setup.store, "select count(*) from messages where topic = '{}{x}'".format("{}", x=setup.topic))
    first = sql(spark, setup.store, f"select topic, queueId from messages where topic = '{setup.topic}';")
    second = sql(spark, setup.store, "with a as (select * from topics) select count(*) from a")
    found = query(spark, setup.store, topic=setup.topic)
    work = read(spark, setup.store).where(f"topic = '{setup.topic}'").groupBy("topic").count()
    return {
        "braces": counted.collect()[0][0],
        "topics": second.collect()[0][0],
        "messages": first.count(),
        "again": first.where("queueId >= 0").count(),
        "columns": first.columns,
        "query": found.count(),
        "read": [list(row) for row in work.collect()],
        "views": [one.name for one in spark.catalog.listTables()],
    }


def job_archive(spark: SparkSession, setup: Setup) -> Any:
    """Rows of an archive, as archived and as asked of it."""
    target = f"{setup.work_dir}/archive"
    done = archive(spark, setup.store, target, {"topic": setup.topic}, includes_newest=True, verify="full")
    return done.rows, sql(spark, target, "select count(body) from messages").collect()[0][0]


def job_replay_and_a_stream(spark: SparkSession, setup: Setup) -> Any:
    """Replay into a live topic, read that as a batch and as a stream, and write it to another one."""
    live = {"nameServer": setup.name_server}
    done = replay(
        spark, setup.store, "Replayed", sink=live, wanted=Filter(topic=setup.topic, where="queueId >= 0"), replay_id="r"
    )
    batch = spark.read.format("rocketmq").options(**live, subscribe="Replayed").load()
    stream = spark.readStream.format("rocketmq").options(**live, subscribe="Replayed", startingOffsets="earliest")
    writer = stream.load().select("body").writeStream.format("rocketmq").options(**live, topic="Streamed")
    running = writer.option("checkpointLocation", f"{setup.work_dir}/point").trigger(availableNow=True).start()
    is_over = running.awaitTermination(100)
    streamed = spark.read.format("rocketmq").options(**live, subscribe="Streamed").load()
    return {"sent": done.messages, "batch": batch.count(), "is_over": is_over, "streamed": streamed.count()}


def errors(spark: SparkSession, setup: Setup) -> Any:
    """Return the error messages for some mistakes."""
    damaged = Path(setup.work_dir, "damaged")
    shutil.copytree(setup.store, damaged)
    with (damaged / "commitlog" / f"{0:020}").open("r+b") as file:
        file.seek(4)
        file.write(b"\x01")
    return [
        _error(lambda: summary(spark, str(damaged)).collect()),
        _error(lambda: audit(spark, str(damaged), {"corruptRecordMode": "fail"})),
        _error(
            lambda: replay(
                spark, setup.store, "T", wanted=Filter(where="no such"), sink={"nameServer": setup.name_server}
            )
        ),
        _error(lambda: spark_session(remote="sc://127.0.0.1:1")),
    ]


def command_line(spark: SparkSession, setup: Setup) -> Any:
    """Return the JSON that a command prints."""
    told = io.StringIO()
    words = ["pipeline", "sql", setup.store, "select count(*) n from messages", "--remote", setup.remote, "--json"]
    with contextlib.redirect_stdout(told):
        app(words, prog_name="rmq", standalone_mode=False)
    return json.loads(told.getvalue())


CASES: tuple[Case, ...] = (
    job_summary,
    job_audit,
    job_verify,
    job_diff,
    job_rebuild,
    jobs_query_and_sql,
    job_archive,
    job_replay_and_a_stream,
    errors,
    command_line,
)


def _error(work: Callable[[], Any]) -> list[str]:
    from rmqkit.spark import one_line

    try:
        with one_line():
            work()
    except RmqError as error:
        return [type(error).__name__, str(error)]
    return []


def _outcome(case: Case, spark: SparkSession, setup: Setup) -> Any:
    """Return the result of a case or its traceback. A failed case does not stop the other cases."""
    try:
        return case(spark, setup)
    except Exception:  # noqa: BLE001 - the test shows it
        return traceback.format_exc()


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[1], type=Setup)
    session = spark_session("connect", remote=given.remote)
    for one in CASES:
        print(json.dumps([one.__name__, _outcome(one, session, given)]), flush=True)
    session.stop()
