"""The Spark bench measures what it says: its data are sound, and what it compares with does the same work."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from bench.commands import interleaved, naive_spark
from bench.commands import spark as spark_figures
from bench.commands.interleaved import Ratio, Rounds, verdict
from bench.commands.sample_store import QUEUES, TOPICS, write_log
from rmqkit.arrow.reader import read_split
from rmqkit.cli import app
from rmqkit.errors import RmqError
from rmqkit.protocol.message import messages_of_record
from rmqkit.protocol.record import decode_record
from rmqkit.spark.source.store import JAR, StoreSource, StoreTwin, read_plan, store_options, store_splits
from rmqkit.store.offline.check import verify
from rmqkit.store.offline.rebuild import rebuild
from rmqkit.store.settings import StoreSettings

BODY_BYTES = 100
in_java = pytest.mark.skipif(not JAR.exists(), reason="there is no JDK, so there is no reader in Java")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 1 MiB with its queues and its index."""
    folder = tmp_path_factory.mktemp("sample")
    write_log(folder, 1 << 20, BODY_BYTES)
    rebuild(folder, StoreSettings(), queues=True, index=True)
    return folder


def test_sample_records_are_those_of_a_broker(root: Path) -> None:
    data = (root / "commitlog" / f"{0:020d}").read_bytes()
    position = number = 0
    bodies = set()
    while position < len(data) and number < 3000:
        record = decode_record(data, position, verify_crc=True)
        (message,) = messages_of_record(record)
        topic, queue_id = number % TOPICS, number // TOPICS % QUEUES
        assert (message.topic, message.queue_id) == (f"topic-{topic}", queue_id)
        assert (message.queue_offset, record.physical_offset) == (number // (TOPICS * QUEUES), position)
        assert (message.tags, message.keys) == (f"Tag{number % 5}", [f"key-{number:010d}"])
        assert message.properties["UNIQ_KEY"] == f"7F000001{number:024d}"
        bodies.add(message.body)
        position += record.size
        number += 1
    assert len(bodies) == number == 3000


def test_sample_store_is_sound(root: Path) -> None:
    assert not verify(root).findings


def test_full_files_end_with_a_blank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.commands.sample_store.SEGMENT_BYTES", 100_000)
    count = write_log(tmp_path, 250_000, BODY_BYTES)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "commitlog").iterdir())]
    assert sizes[:2] == [100_000, 100_000]
    splits = store_splits(store_options({"path": str(tmp_path)}))
    plan = read_plan(store_options({"path": str(tmp_path)}), ["queueOffset"])
    assert sum(batch.num_rows for split in splits for batch in read_split(split, plan)) == count


@in_java
@pytest.mark.spark
def test_the_queries_find_the_same_rows_in_every_format(spark: SparkSession, root: Path, tmp_path: Path) -> None:
    stored = spark.read.format(StoreSource.name()).load(str(root))
    stored.write.parquet(str(tmp_path / "parquet"))
    written = spark.read.parquet(str(tmp_path / "parquet"))
    count = stored.count()
    row_counts = []
    for query in spark_figures.queries(count):
        by_twin = spark.read.format(StoreTwin.name()).options(**query.options).load(str(root))
        indexed = spark.read.format(StoreSource.name()).options(**query.indexed).load(str(root))
        frames = (stored, written, by_twin, indexed)
        expected, *others = (sorted(map(str, query.frame(frame).collect())) for frame in frames)
        assert others == [expected] * 3, query.name
        row_counts.append(len(expected))
    assert row_counts == [count, 1, count, 1, pytest.approx(count / 24, abs=1), 1, TOPICS * 5]


@pytest.mark.spark
def test_the_row_shuffle_writes_the_same_queue_entries(spark: SparkSession, root: Path, tmp_path: Path) -> None:
    spark.dataSource.register(naive_spark.QueueFiles)
    columns = "topic,queueId,queueOffset,commitLogOffset,storeSize,tags"
    rows = spark.read.format("rocketmq-store").option("columns", columns).load(str(root))
    rows = rows.repartition("topic", "queueId").sortWithinPartitions("topic", "queueId", "queueOffset")
    rows.write.format("queue-files").mode("append").save(str(tmp_path))
    for topic, queue_id in itertools.product(range(TOPICS), range(QUEUES)):
        name = Path(f"topic-{topic}", str(queue_id), f"{0:020d}")
        made, expected = (tmp_path / name).read_bytes(), (root / "consumequeue" / name).read_bytes()
        assert made.rstrip(b"\0") == expected[: len(made)].rstrip(b"\0")


def test_the_least_costs_by_message_are_compared_and_the_first_round_is_not() -> None:
    told: list[str] = []
    ours, other = iter([0.1, 2.0, 1.0, 3.0]), iter([0.1, 8.0, 9.0, 6.0])
    rounds = Rounds(told.append)
    ratio = Ratio(1, "a / b", "1K", 1_000_000, "ours", "other", floor=3, ambition=7)
    rounds.add(ratio, lambda: next(ours), lambda: next(other))
    (figure,) = rounds.run(3)
    assert (figure["ratio"], figure["of_medians"], figure["verdict"]) == (6.0, 4.0, "✓")
    assert (figure["ours_us_min"], figure["other_us_median"]) == (1.0, 8.0)
    assert len(told) == 8
    half = rounds.figure(Ratio(1, "a / b", "1K", 500_000, "ours", "other", 3, 2, at_most=True, other_count=1_000_000))
    assert (half["ratio"], half["verdict"]) == (0.33, "✓✓")


def test_verdicts() -> None:
    assert [verdict(value, 2, 4) for value in (1.9, 2, 4)] == ["miss", "✓", "✓✓"]
    assert [verdict(value, 1.25, 1.15, at_most=True) for value in (1.3, 1.2, 1.1)] == ["miss", "✓", "✓✓"]


def test_a_missing_reader_in_java_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_figures, "JAR", tmp_path / "rmqkit-spark.jar")
    with pytest.raises(RmqError, match=r"rmqkit-spark.jar is missing, so Spark would read with Python"):
        spark_figures.measure(mib=1, repeats=1)


@pytest.mark.parametrize("row", ["three", "12", "0"])
def test_unknown_rows_are_reported_in_one_line(row: str) -> None:
    done = CliRunner().invoke(app, ["bench", "spark", "--only", f"4,{row}"])
    assert f"--only 4,{row}: there is no row {row!r}" in str(done.exception)


@pytest.fixture
def bench_session(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the bench use the session of the tests, which goes on afterwards."""
    spark.dataSource.register(naive_spark.QueueFiles)
    monkeypatch.setattr(spark_figures, "_session", lambda master: spark)
    monkeypatch.setattr(type(spark), "stop", lambda session: None)


@in_java
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.usefixtures("bench_session")
def test_every_ratio_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_figures, "_SMALL_BATCHES", 6)
    monkeypatch.setattr(spark_figures, "_PLAIN", ("100B",))  # the other size runs the same code
    monkeypatch.setattr(interleaved, "WARM_UPS", 0)
    figures = spark_figures.measure(mib=1, repeats=1, rows=range(1, 7), directory=tmp_path)
    assert [figure["row"] for figure in figures] == [1] * 7 + [2] * 7 + [3, 4, 5, 6, 6, 6]
    assert all(figure["verdict"] in ("✓✓", "✓", "miss") for figure in figures)
    assert json.dumps(figures)
    assert list(tmp_path.iterdir()) == [], "the bench removes its files"


@in_java
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.usefixtures("bench_session")
def test_growth_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.commands.sample_store.SEGMENT_BYTES", 1 << 20)
    figures = spark_figures.measure(mib=1, repeats=1, rows=[7], gib=2, directory=tmp_path)
    assert [figure["row"] for figure in figures] == [7, 7, 7, 7]
    assert all(figure["ratio"] > 0 for figure in figures)
