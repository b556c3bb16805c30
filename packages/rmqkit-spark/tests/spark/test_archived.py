"""Spark reads a store and its archive as one table: every message once."""

from __future__ import annotations

import json

import pytest
from pyspark.sql import functions
from typer.testing import CliRunner

from rmqkit.cli import app
from rmqkit.errors import SettingsError
from rmqkit.spark.jobs.archive import archive as archive_job
from rmqkit.spark.jobs.audit import audit
from rmqkit.spark.jobs.diff import diff
from rmqkit.spark.jobs.summary import summary
from rmqkit.spark.source.store import StoreReader, read_plan, store_options
from tests.arrow.test_archived import COUNT, FILE_BYTES, store

__all__ = ["store"]


def loaded(spark, store, **options):
    root, archive = store
    return spark.read.format("rocketmq-store").options(archive=str(archive), **options).load(str(root))


@pytest.mark.spark
def test_every_message_is_there_once(spark, store):
    frame = loaded(spark, store)
    rows = frame.selectExpr("cast(split(decode(body, 'UTF-8'), ' ')[0] as int) number", "properties['KEYS'] key")
    found = sorted((row.number, row.key) for row in rows.collect())
    assert found == [(number, f"k{number} all") for number in range(COUNT)]
    assert frame.where("topic = 'Even' and queueId = 1").count() == COUNT // 6
    assert frame.where("tags in ('t1', 't58')").count() == 2


@pytest.mark.spark
def test_a_segment_is_a_plain_parquet_file(spark, store):
    """Spark's own reader, without a format of rmqkit."""
    rows = spark.read.parquet(f"{store[1]}/*.parquet").where("topic = 'Even'").orderBy("queueId", "queueOffset")
    found = rows.selectExpr(
        "queueOffset * 6 + mod(queueId * 2, 3) * 2 number", "cast(split(decode(body, 'UTF-8'), ' ')[0] as int)",
        "tags", "properties['KEYS']", "year(storeTimestamp) > 2020",
    ).collect()  # fmt: skip
    assert len(found) > COUNT // 4
    assert {tuple(row) for row in found} == {(n, n, f"t{n}", f"k{n} all", True) for n in (row[1] for row in found)}


@pytest.mark.spark
def test_options_count_for_both(spark, store):
    assert loaded(spark, store, topic="Odd", columns="topic,queueOffset").count() == COUNT // 2
    assert loaded(spark, store, startingTimestamp=1, endingTimestamp=2).count() == 0


def test_each_segment_is_a_partition(store):
    root, archive = store
    with_archive = store_options({"path": str(root), "archive": str(archive)})
    alone = store_options({"path": str(root)})
    counts = [len(StoreReader(one, read_plan(one, ())).partitions()) for one in (with_archive, alone)]
    assert counts[0] == counts[1] + 3


@pytest.mark.parametrize(
    ("option", "value", "needs"),
    [
        ("entity", "commitlog-raw", "entity=messages"),
        ("decompress", "false", "decompress=true"),
        ("includeProperties", "string", "includeProperties=map"),
    ],
)
def test_what_segments_do_not_have_is_refused(store, option, value, needs):
    root, archive = store
    with pytest.raises(SettingsError, match=f"rocketmq-store: archive needs {needs}"):
        store_options({"path": str(root), "archive": str(archive), option: value})


# ---------------------------------------------------------------- jobs


@pytest.mark.spark
def test_a_summary_counts_both(spark, store):
    root, archive = store
    found = {row.topic: row for row in summary(spark, str(root), {"archive": str(archive)}).groupBy("topic").agg(
        functions.sum("messages").alias("messages"), functions.min("firstStoreTimestamp").alias("first"),
    ).collect()}  # fmt: skip
    assert {topic: row.messages for topic, row in found.items()} == {"Even": COUNT // 2, "Odd": COUNT // 2}
    oldest = loaded(spark, store).agg(functions.min("storeTimestamp")).first()
    assert min(row["first"] for row in found.values()) == oldest[0]


@pytest.mark.spark
@pytest.mark.parametrize("name", ["audit", "diff", "archive"])
def test_other_jobs_refuse_an_archive(spark, store, tmp_path, name):
    root, archive = map(str, store)
    run = {
        "audit": lambda options: audit(spark, root, options),
        "diff": lambda options: diff(spark, root, root, options),
        "archive": lambda options: archive_job(spark, root, str(tmp_path / "target"), options),
    }[name]
    with pytest.raises(SettingsError, match=f"^{name}: the option archive cannot be used, because this job reads only"):
        run({"Archive": archive})
    assert not (tmp_path / "target").exists()


@pytest.mark.spark
@pytest.mark.parametrize("command", ["verify", "rebuild"])
def test_commands_report_that_the_archive_is_left_out(spark, store, tmp_path, command):
    root, archive = store
    conf = tmp_path / "broker.conf"
    conf.write_text(f"mappedFileSizeCommitLog={FILE_BYTES}\n")
    alone = CliRunner().invoke(app, ["pipeline", command, str(root), "--config", str(conf), "--json"])
    assert "not the segments" not in alone.stderr
    with conf.open("a") as file:
        file.write(f"archive=file://user:word@{archive.parent}\n")
    done = CliRunner().invoke(app, ["pipeline", command, str(root), "--config", str(conf), "--json"])
    assert f"not the segments in file://{archive.parent}, which have" in done.stderr
    assert json.loads(done.stdout) == json.loads(alone.stdout)
