"""Errors for bad input: one line on the driver that names the file or queue and the remedy.

Tested elsewhere: damage, CRCs and options of a split in `test_reader`; files that are missing in the middle in
`test_splits`; addresses in `test_fs`; executors without the package in `test_cluster`; lost messages of live
queues in `test_broker_source`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from rmqkit import Message, sync
from rmqkit.errors import ConnectFailed, ConnectionLost, RmqError, SettingsError, StoreError
from rmqkit.spark import one_line
from rmqkit.spark.broker_pool import DataLost
from rmqkit.spark.failures import CHECKPOINT_REMEDY
from rmqkit.spark.jobs.summary import summary
from rmqkit.spark.planning import live_options
from rmqkit.spark.source.broker import BrokerStreamReader
from tests.golden_stores import unpack_golden
from tests.interop.standalone import Standalone, run_standalone
from tests.patience import producing
from tests.spark.messages import HOST_V6, MakeRecord, plain_records, plain_rows, record_at, segment_of
from tests.spark.test_tables import rows

SEGMENT = 128 << 10  # file size of the golden logs


def told(work: Callable[[], object]) -> RmqError:
    """The one line that comes of it."""
    with pytest.raises(RmqError) as caught, one_line():
        work()
    assert "\n" not in str(caught.value)
    return caught.value


def log(root: Path, segment: bytes, *, size: int = 64 << 10, name: str = "0" * 20) -> Path:
    """A store with one preallocated log file."""
    (root / "commitlog").mkdir(exist_ok=True)
    path = root / "commitlog" / name
    path.write_bytes(segment)
    os.truncate(path, size)
    return root


def load(spark: SparkSession, root: Path, **options: str) -> DataFrame:
    return spark.read.format("rocketmq-store").options(**options).load(str(root))


# ---------------------------------------------------------------- directories


def test_a_directory_that_is_missing_or_not_a_store_is_named(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for root in (tmp_path / "none", tmp_path, tmp_path / "photos"):
        text = str(told(lambda root=root: rows(root)))
        assert text == f"{root}/commitlog does not exist: give the store directory, the one that holds commitlog"


def test_a_directory_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: str) -> None:
        raise PermissionError(13, "Permission denied", folder)

    log(tmp_path, b"")
    monkeypatch.setattr(os, "scandir", refuse)
    assert str(told(lambda: rows(tmp_path))) == f"{tmp_path}/commitlog cannot be read: Permission denied"


def test_a_file_that_no_broker_wrote_is_named(tmp_path: Path) -> None:
    log(tmp_path, b"Dear diary, today I learnt what a commit log is.")
    error = told(lambda: rows(tmp_path))
    assert type(error) is StoreError
    assert f"{tmp_path}/commitlog/{'0' * 20}: damage at byte 0 (commitLogOffset 0): magic is 20646961" in str(error)


def test_a_file_under_the_name_of_another_is_named(tmp_path: Path) -> None:
    log(tmp_path, segment_of([record_at] * 3), name=f"{64 << 10:020}")
    text = str(told(lambda: rows(tmp_path, corruptRecordMode="fail")))
    assert f"{64 << 10:020}: damage at byte 0 (commitLogOffset {64 << 10}): it says physical offset 0" in text


# ---------------------------------------------------------------- what lies in the files


def test_a_torn_tail_ends_the_log(tmp_path: Path) -> None:
    """The broker answered for none of it: its recovery cuts it, too."""
    whole = segment_of([record_at] * 4)
    log(tmp_path, whole[:-20])
    assert rows(tmp_path) == rows(log(tmp_path, segment_of([record_at] * 3))) != []


def test_a_torn_record_before_the_newest_file_is_damage(tmp_path: Path) -> None:
    size = 64 << 10
    log(tmp_path, segment_of([record_at] * 4)[:-60])
    log(tmp_path, segment_of([record_at] * 2, base_offset=size), name=f"{size:020}")
    at = plain_records(segment_of([record_at] * 4))[3].physical_offset
    text = str(told(lambda: rows(tmp_path)))
    assert f"{'0' * 20}: damage at byte {at} (commitLogOffset {at}): " in text
    assert len(rows(tmp_path, corruptRecordMode="skip")) == 5
    reported = rows(tmp_path, corruptRecordMode="report")
    assert [row["commitLogOffset"] for row in reported if row["_corrupt"]] == [at]


@pytest.mark.parametrize("field_at", range(0, 88, 4))
def test_any_flipped_bit_of_a_head_is_damage_or_only_its_field(field_at: int, tmp_path: Path) -> None:
    """Only the body and the place of a record can be checked. No flipped bit makes a reader fail in another way."""
    segment = segment_of([record_at] * 3)
    at = plain_records(segment)[1].physical_offset + field_at
    log(tmp_path, segment[:at] + bytes([segment[at] ^ 0x40]) + segment[at + 1 :])
    kept = rows(tmp_path, corruptRecordMode="skip", verifyCrc="drop")
    assert len(kept) in (2, 3)
    reported = rows(tmp_path, corruptRecordMode="report", verifyCrc="column")
    assert len(reported) == 3
    assert sum(row["_corrupt"] is not None for row in reported) == 3 - len(kept)


def test_records_of_all_layouts_may_share_a_log(tmp_path: Path) -> None:
    """Magic v2 goes with a long topic, the host bits of sysFlag with long hosts."""
    layouts: list[MakeRecord] = [
        record_at,
        lambda at: record_at(at, topic=b"t" * 200),
        lambda at: record_at(at, born_host=HOST_V6),
        lambda at: record_at(at, store_host=HOST_V6),
        lambda at: record_at(at, topic=b"t" * 200, born_host=HOST_V6, store_host=HOST_V6),
    ]
    segment = segment_of(layouts * 20)
    found = rows(log(tmp_path, segment), splitBytes="2k", batchRows="7")
    expected = plain_rows(segment)
    assert len(found) == len(expected) == 100
    columns = ("commitLogOffset", "topic", "queueId", "body", "bornHost", "storeHost", "msgId", "sysFlag", "storeSize")
    assert [[row[name] for name in columns] for row in found] == [[row[name] for name in columns] for row in expected]
    assert len({(row["topic"], row["bornHost"], row["storeHost"]) for row in found}) == 5


# ---------------------------------------------------------------- files that change under a job


@pytest.mark.spark
def test_a_file_that_retention_takes_from_a_job_is_named(spark: SparkSession, tmp_path: Path) -> None:
    store = unpack_golden("4.9.4", tmp_path)
    counted = summary(spark, str(store.root))
    first = store.root / "commitlog" / f"{0:020}"
    first.unlink()
    error = told(counted.collect)
    assert type(error) is StoreError
    assert str(error) == (
        f"{first} has vanished since the query was planned: the broker's retention removed it; load the store again"
    )


@pytest.mark.spark
def test_what_a_file_grows_by_under_a_job_is_left_to_the_next(spark: SparkSession, tmp_path: Path) -> None:
    log(tmp_path, segment_of([record_at] * 3))
    counted = summary(spark, str(tmp_path)).select("messages")
    log(tmp_path, segment_of([record_at] * 5))
    assert [row.messages for row in counted.collect()] == [3]
    assert [row.messages for row in summary(spark, str(tmp_path)).collect()] == [5]


@pytest.mark.spark
def test_a_file_that_was_cut_under_a_job_is_named(spark: SparkSession, tmp_path: Path) -> None:
    log(tmp_path, segment_of([record_at] * 3))
    counted = summary(spark, str(tmp_path))
    os.truncate(tmp_path / "commitlog" / f"{0:020}", 100)
    assert f"{0:020} has 100 bytes, " in str(told(counted.collect))


# ---------------------------------------------------------------- what was asked for


@pytest.mark.spark
@pytest.mark.parametrize("source", ["rocketmq-store", "rocketmq"])
def test_an_unknown_option_or_column_is_reported_with_the_nearest(
    source: str, spark: SparkSession, tmp_path: Path
) -> None:
    log(tmp_path, segment_of([record_at]))
    given = {} if source == "rocketmq-store" else {"subscribe": "orders"}
    reader = spark.read.format(source).options(**given)
    option = told(lambda: spark.read.format(source).options(includepropertys="none", **given).load(str(tmp_path)))
    assert (type(option), str(option)) == (
        SettingsError, f"{source}: option 'includepropertys' is not known: did you mean includeProperties?"
    )  # fmt: skip
    column = told(lambda: reader.schema("topik string").load(str(tmp_path)).count())
    assert str(column) == f"{source}: there is no column 'topik' with these options: did you mean topic?"
    kind = told(lambda: reader.schema("topic bigint").load(str(tmp_path)).count())
    assert str(kind) == f"{source}: column topic is string, the schema says bigint: leave the cast to a select"


# ---------------------------------------------------------------- live topics


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Standalone]:
    """A broker with 40 messages in the topic ``orders``."""
    with run_standalone(tmp_path / "store", tmp_path) as running:
        with sync.Producer("bad-input", running.namesrv_addr, settings=producing()) as producer:
            for number in range(40):
                producer.send(Message(topic="orders", body=b"%d" % number))
        yield running


def live(spark: SparkSession, broker: Standalone, **given: str) -> Any:
    asked = {"nameServer": broker.namesrv_addr, "subscribe": "orders", "brokerPatienceMs": "0", **given}
    return spark.read.format("rocketmq").options(**asked)


@pytest.mark.spark
def test_a_broker_that_goes_away_in_a_batch_is_reported_with_the_queue(spark: SparkSession, broker: Standalone) -> None:
    frame = live(spark, broker).load()
    assert frame.count() == 40
    broker.process.stop(9, 10)
    error = told(frame.count)
    assert isinstance(error, ConnectFailed | ConnectionLost)
    assert str(error).startswith("queue ")
    assert " of orders on " in str(error)
    assert ", from offset 0: " in str(error)
    assert f"{broker.broker_addr}" in str(error)


@pytest.mark.spark
def test_offsets_below_the_first_message_are_reported_with_the_queue(spark: SparkSession, broker: Standalone) -> None:
    name = live(spark, broker).load().first().brokerName
    start = json.dumps({"orders": {name: {"0": -7}}})
    error = told(lambda: live(spark, broker, startingOffsets=start).load().count())
    assert type(error) is DataLost
    assert str(error) == (
        f"messages -7 to -1 of queue 0 of orders on {name} are gone: the queue begins at 0; "
        "failOnDataLoss=false continues without them"
    )


GARBLED = [
    {"orders": {"broker-a": 7}},
    {"orders": {"broker-a": {"zero": 7}}},
    {"orders": {"broker-a": {"0": "7"}}},
    {"orders": {"broker-a": {"0": None}}},
    {"logOffset": 3},
    [],
    7,
]


@pytest.mark.parametrize("offsets", GARBLED)
def test_offsets_of_a_checkpoint_that_are_not_ours_say_what_to_do(offsets: Any) -> None:
    reader = BrokerStreamReader(live_options({"nameServer": "127.0.0.1:1", "subscribe": "orders"}), ["body"])
    for work in (lambda: reader.latestOffset(offsets), lambda: reader.partitions(offsets, offsets)):
        text = str(told(work))
        assert text.startswith(f"rocketmq: the checkpoint has unusable offsets, {json.dumps(offsets)}: ")
        assert text.endswith(f"; {CHECKPOINT_REMEDY}")


@pytest.mark.spark
def test_a_stream_with_a_corrupt_checkpoint_says_what_to_do(
    spark: SparkSession, broker: Standalone, tmp_path: Path
) -> None:
    def run() -> None:
        source = spark.readStream.format("rocketmq").options(
            nameServer=broker.namesrv_addr, subscribe="orders", startingOffsets="earliest"
        )
        writer = source.load().writeStream.format("parquet").option("path", str(tmp_path / "out"))
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
        assert query.awaitTermination(100)

    run()
    assert spark.read.parquet(str(tmp_path / "out")).count() == 40
    kept = tmp_path / "checkpoint" / "offsets" / "0"
    version, settings, offsets = kept.read_text().splitlines()
    kept.write_text(f"{version}\n{settings}\n{offsets[:13]}")
    (kept.parent / ".0.crc").unlink()
    error = told(run)
    assert type(error) is SettingsError
    text = "no JSON: Unterminated string starting at: line 1 column "
    assert str(error).startswith(f"rocketmq: the checkpoint has unusable offsets, {text}")
    assert str(error).endswith(CHECKPOINT_REMEDY)
