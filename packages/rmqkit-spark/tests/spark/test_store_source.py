"""``rocketmq-store`` inside Spark: real stores, column by column against what the Java client read."""

from __future__ import annotations

import hashlib
import ipaddress
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from rmqkit.arrow.reader import ReadPlan
from rmqkit.arrow.schema import MESSAGE_COLUMNS, arrow_schema
from rmqkit.arrow.splits import Split, grouped
from rmqkit.errors import SettingsError
from rmqkit.protocol.record import Record
from rmqkit.spark.failures import error_within
from rmqkit.spark.options import StoreOptions
from rmqkit.spark.schema import to_ddl
from rmqkit.spark.source.store import StoreReader, StoreSource, read_plan, store_options, store_splits
from rmqkit.spark.source.tables import TABLES
from tests.golden_stores import GoldenStore, unpack_golden
from tests.spark.messages import plain_records, record_at, segment_of

pytestmark = pytest.mark.spark

_NAMES = ["5.4.0", "4.9.4", "5.4.0-ipv6-crc"]
_SIZE = 131072


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GoldenStore]:
    return {name: unpack_golden(name, tmp_path_factory.mktemp("golden")) for name in _NAMES}


def _load(spark: SparkSession, root: Path, **options: str) -> DataFrame:
    return spark.read.format("rocketmq-store").options(**options).load(str(root))


def _error(frame: Any) -> str:
    """Return the text of rmqkit's own error in the error of Spark."""
    with pytest.raises((PySparkException, Py4JJavaError)) as caught:
        frame()
    found = error_within(caught.value)
    assert found is not None, str(caught.value)
    return str(found)


# ---------------------------------------------------------------- every message of real brokers


def _host(java_text: str) -> str:
    """``/127.0.0.1:44834`` or ``/[0:0:0:0:0:0:0:1]:40894`` as we write it."""
    ip, _, port = java_text.removeprefix("/").rpartition(":")
    address = ipaddress.ip_address(ip.strip("[]"))
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def _listed(message: dict[str, Any]) -> dict[str, Any]:
    """A message of a manifest, in our columns."""
    return {
        "topic": message["topic"],
        "queueId": message["queueId"],
        "queueOffset": message["queueOffset"],
        "commitLogOffset": message["physicalOffset"],
        "storeSize": message["size"],
        "msgId": message["msgId"],
        "keys": message["keys"],
        "tags": message["tags"],
        "lite_topic": message["properties"].get("__LITE_TOPIC"),
        "properties": message["properties"],
        "bodySha256": message["bodySha256"],
        "flag": message["flag"],
        "sysFlag": message["sysFlagAfterDecode"] & ~1,  # the 4.9 client leaves "compressed" set after decompressing
        "bodyCrc": message["bodyCRC"],
        "bornMs": message["bornTimestamp"],
        "bornHost": _host(message["bornHost"]),
        "storeMs": message["storeTimestamp"],
        "storeHost": _host(message["storeHost"]),
        "reconsumeTimes": message["reconsumeTimes"],
        "preparedTransactionOffset": message["preparedTransactionOffset"],
        "brokerName": "broker-golden",
    }


def _read(frame: DataFrame) -> list[dict[str, Any]]:
    selected = frame.selectExpr("*", "unix_millis(bornTimestamp) bornMs", "unix_millis(storeTimestamp) storeMs").drop(
        "bornTimestamp", "storeTimestamp"
    )
    rows = [row.asDict() for row in selected.collect()]
    for row in rows:
        row["bodySha256"] = hashlib.sha256(row.pop("body")).hexdigest()
        for name in ("MIN_OFFSET", "MAX_OFFSET"):  # stored with retries; manifests leave them out everywhere
            row["properties"].pop(name, None)
    return rows


def _key(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["topic"], row["queueId"], row["queueOffset"]


@pytest.mark.parametrize("name", _NAMES)
def test_every_message_the_java_client_read_is_read_alike(
    name: str, spark: SparkSession, stores: dict[str, GoldenStore]
) -> None:
    store = stores[name]
    rows = {_key(row): row for row in _read(_load(spark, store.root, brokerName="broker-golden"))}
    records = _records(store)
    listed = {_key(message): message for message in map(_listed, store.manifest["messages"])}
    for message in listed.values():
        if not message["storeSize"]:  # of a member of an inner batch the Java client does not know the record
            record = records[message["commitLogOffset"]]
            message |= {"storeSize": record.size, "bodyCrc": record.body_crc}
    for key, message in listed.items():
        assert rows[key] == message
    unlisted = Counter(topic for topic, _, _ in rows.keys() - listed.keys())
    assert unlisted == _unreadable_for_the_java_client(store)


def _records(store: GoldenStore) -> dict[int, Record]:
    segments = [path.read_bytes() for path in (store.root / "commitlog").iterdir()]
    return {record.physical_offset: record for segment in segments for record in plain_records(segment)}


def _unreadable_for_the_java_client(store: GoldenStore) -> Counter[str]:
    """Messages in a log that its manifest does not list, by topic.

    The 4.9.4 broker refused to hand out one system topic ("topic not exist"), and it wrote OFFSET_MOVED_EVENT itself,
    one for each illegal offset that the driver asked for, while the manifest was being made. 5.4.0 does neither.
    """
    refused = {
        queue["topic"]: queue["maxOffset"] - queue["minOffset"]
        for queue in store.manifest["queues"]
        if "not exist" in queue.get("pullError", "")
    }
    if store.manifest["brokerVersionDesc"] == "V4_9_4":
        readable = [queue for queue in store.manifest["queues"] if "pullAtMaxPlus7" in queue]
        illegal = [queue for queue in readable if queue["pullAtMaxPlus7"]["status"] == "OFFSET_ILLEGAL"]
        return Counter(refused) + Counter({"OFFSET_MOVED_EVENT": len(illegal)})
    return Counter(refused)


@pytest.mark.parametrize("split_bytes", [pytest.param("4k", marks=pytest.mark.slow), "10000", "100k"])
def test_splits_of_any_size_give_the_same_messages(
    split_bytes: str, spark: SparkSession, stores: dict[str, GoldenStore]
) -> None:
    frame = _load(
        spark, stores["5.4.0"].root, splitBytes=split_bytes, columns="topic,queueId,queueOffset,commitLogOffset"
    )
    splits = store_splits(StoreOptions(path=str(stores["5.4.0"].root), split_bytes=_bytes(split_bytes)))
    assert frame.rdd.getNumPartitions() == len(grouped(splits, _bytes(split_bytes))) > 1
    listed = stores["5.4.0"].manifest["messages"]
    assert Counter(map(tuple, frame.collect())) == Counter(
        (m["topic"], m["queueId"], m["queueOffset"], m["physicalOffset"]) for m in listed
    )


def _bytes(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


# ---------------------------------------------------------------- columns and schemas


def test_our_arrow_types_are_those_that_spark_wants() -> None:
    ddl = to_ddl(MESSAGE_COLUMNS)
    assert arrow_schema(MESSAGE_COLUMNS).equals(to_arrow_schema(StructType.fromDDL(ddl), timezone="UTC"))


def test_a_schema_is_a_projection(spark: SparkSession, stores: dict[str, GoldenStore]) -> None:
    reader = spark.read.format("rocketmq-store").schema("queueId int, topic string")
    frame = reader.load(str(stores["5.4.0"].root))
    assert frame.columns == ["queueId", "topic"]
    assert frame.count() == len(stores["5.4.0"].manifest["messages"])


def test_bodies_outside_of_the_schema_are_not_read(spark: SparkSession, tmp_path: Path) -> None:
    log = tmp_path / "commitlog"
    log.mkdir()
    unreadable = segment_of([lambda at: record_at(at, body=b"not zlib", sys_flag=1)])
    (log / "00000000000000000000").write_bytes(unreadable)
    narrow = spark.read.format("rocketmq-store").schema("topic string, tags string")
    assert [tuple(row) for row in narrow.load(str(tmp_path)).collect()] == [("orders", "a")]
    assert "zlib body of 8 bytes is damaged" in _error(lambda: _load(spark, tmp_path).collect())


def test_a_schema_of_another_type_is_refused(spark: SparkSession, stores: dict[str, GoldenStore]) -> None:
    reader = spark.read.format("rocketmq-store").schema("queueId string")
    assert _error(lambda: reader.load(str(stores["5.4.0"].root)).collect()) == (
        "rocketmq-store: column queueId is int, the schema says string: leave the cast to a select"
    )


def test_options_choose_columns_and_form(spark: SparkSession, stores: dict[str, GoldenStore]) -> None:
    root = stores["5.4.0"].root
    assert _load(spark, root, COLUMNS="msgId, body").columns == ["msgId", "body"]
    narrow = _load(spark, root, includeBody="false", includeProperties="none")
    assert len(narrow.columns) == 19
    assert dict(_load(spark, root, includeProperties="string").dtypes)["properties"] == "string"
    raw = _load(spark, root, topic="GoldInnerBatch", unwrap="false", columns="topic,sysFlag")
    batches = {m["physicalOffset"] for m in stores["5.4.0"].manifest["messages"] if m["topic"] == "GoldInnerBatch"}
    assert {row.sysFlag & 0xC0 for row in raw.collect()} == {0xC0}
    assert raw.count() == len(batches)


def test_a_wrong_option_is_named(spark: SparkSession, stores: dict[str, GoldenStore]) -> None:
    root = stores["5.4.0"].root
    assert _error(lambda: _load(spark, root, topci="x")) == (
        "rocketmq-store: option 'topci' is not known: did you mean topic?"
    )
    assert _error(lambda: _load(spark, root, verifyCrc="maybe")) == (
        "rocketmq-store: verifyCrc=maybe must be one of none, fail, drop, column"
    )
    assert _error(lambda: _load(spark, root, entity="queue")).startswith(
        "rocketmq-store: entity=queue must be one of messages, consumequeue, index,"
    )
    assert _error(lambda: _load(spark, root / "nowhere").collect()).endswith(
        "nowhere/commitlog does not exist: give the store directory, the one that holds commitlog"
    )


def test_an_empty_store_is_an_empty_frame(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    assert _load(spark, tmp_path).collect() == []


# ---------------------------------------------------------------- filters


def test_options_give_the_rows_that_conditions_give(spark: SparkSession, stores: dict[str, GoldenStore]) -> None:
    root = stores["5.4.0"].root
    times = sorted(m["storeTimestamp"] for m in stores["5.4.0"].manifest["messages"])
    low, high = times[100], times[300]
    columns = "topic,queueId,queueOffset,tags,bornTimestamp,storeTimestamp"
    for options, condition in (
        ({"topic": "GoldBig", "queueId": "0,1"}, "topic = 'GoldBig' and queueId in (0, 1)"),
        ({"startingTimestamp": str(low)}, f"storeTimestamp >= timestamp_millis({low})"),
        ({"endingTimestamp": str(high)}, f"storeTimestamp < timestamp_millis({high})"),
        (
            {"startingTimestamp": str(low), "endingTimestamp": str(high), "queueId": "2"},
            f"storeTimestamp >= timestamp_millis({low}) and storeTimestamp < timestamp_millis({high}) and queueId = 2",
        ),
    ):
        chosen = _load(spark, root, columns=columns, **options).collect()
        assert chosen == _load(spark, root, columns=columns).where(condition).collect()
        assert chosen


def test_an_action_never_gets_the_filters_of_an_earlier_one(
    spark: SparkSession, stores: dict[str, GoldenStore]
) -> None:
    """Also in a session that has Spark push filters into Python sources."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = _load(spark, stores["5.4.0"].root, columns="topic,tags")
        everything = frame.count()
        assert frame.where("topic = 'GoldTag'").count() < everything
        assert frame.count() == everything
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"queueId": "0;1"}, "queueId=0;1 must be queue ids, separated by commas"),
        ({"entity": "topics", "queueId": "0"}, "queueId is for entity=messages"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        read_plan(store_options({"path": "/s", **options}), ())


def test_the_topic_option_needs_no_configuration(spark: SparkSession, stores: dict[str, GoldenStore]) -> None:
    frame = _load(spark, stores["5.4.0"].root, topic="GoldTag,GoldKey", columns="topic")
    listed = Counter(m["topic"] for m in stores["5.4.0"].manifest["messages"])
    assert Counter(row.topic for row in frame.collect()) == {name: listed[name] for name in ("GoldTag", "GoldKey")}


# ---------------------------------------------------------------- damage and live stores


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Path, int]:
    """A golden store with one broken magic number in its second file, and the place of it."""
    store = unpack_golden("4.9.4", tmp_path)
    path = store.root / "commitlog" / f"{_SIZE:020d}"
    segment = bytearray(path.read_bytes())
    broken = plain_records(bytes(segment))[20].physical_offset
    segment[broken - _SIZE + 5] ^= 0xFF
    path.write_bytes(segment)
    return store.root, broken


def test_damage_fails_unless_configured_otherwise(spark: SparkSession, damaged: tuple[Path, int]) -> None:
    root, broken = damaged
    assert f"(commitLogOffset {broken}): magic is da5c20a7; corruptRecordMode=skip reads on" in _error(
        lambda: _load(spark, root).collect()
    )


def test_damage_can_be_skipped_or_reported(spark: SparkSession, damaged: tuple[Path, int]) -> None:
    root, broken = damaged
    skipped = _load(spark, root, corruptRecordMode="skip", columns="commitLogOffset", splitBytes="20k")
    reported = _load(spark, root, corruptRecordMode="report", columns="commitLogOffset,_corrupt", splitBytes="20k")
    offsets = [row.commitLogOffset for row in skipped.collect()]
    assert len(offsets) == 523
    assert broken not in offsets
    rows = reported.collect()
    assert [row.commitLogOffset for row in rows if row["_corrupt"]] == [broken]
    assert len(rows) == 524


def test_messages_that_arrive_after_the_plan_are_not_read(tmp_path: Path) -> None:
    log = tmp_path / "commitlog"
    log.mkdir()
    path = log / "00000000000000000000"
    first, both = (segment_of([record_at] * count) for count in (1, 2))
    path.write_bytes(first.ljust(4096, b"\0"))
    source = StoreSource({"path": str(tmp_path)})
    reader = source.reader(StructType.fromDDL(source.schema()))
    partitions = reader.partitions()
    path.write_bytes(both.ljust(4096, b"\0"))
    assert [partition.value for partition in partitions] == [(Split(str(path), 0, 0, len(first)),)]
    assert sum(batch.num_rows for partition in partitions for batch in reader.read(partition)) == 1
    assert sum(batch.num_rows for partition in reader.partitions() for batch in reader.read(partition)) == 2


def test_a_frame_is_a_snapshot_of_the_log_at_its_first_action(spark: SparkSession, tmp_path: Path) -> None:
    log = tmp_path / "commitlog"
    log.mkdir()
    path = log / "00000000000000000000"
    path.write_bytes(segment_of([record_at] * 2).ljust(4096, b"\0"))
    frame = _load(spark, tmp_path, columns="topic")
    assert frame.count() == 2
    path.write_bytes(segment_of([record_at] * 3).ljust(4096, b"\0"))
    assert frame.count() == 2
    assert _load(spark, tmp_path, columns="topic").count() == 3


def test_a_file_that_retention_removed_is_named(spark: SparkSession, tmp_path: Path) -> None:
    store = unpack_golden("4.9.4", tmp_path)
    frame = _load(spark, store.root, columns="topic")
    count = frame.count()
    (store.root / "commitlog" / "00000000000000000000").unlink()
    assert "00000000000000000000 has vanished since the query was planned" in _error(frame.count)
    assert 0 < _load(spark, store.root, columns="topic").count() < count


def test_a_reader_without_partition_reads_nothing() -> None:
    from pyspark.sql.datasource import InputPartition

    reader = StoreReader(StoreOptions(path="/nowhere"), ReadPlan(columns=()))
    assert list(reader.read(InputPartition(()))) == []


# ---------------------------------------------------------------- the other entities, and some messages only


def test_every_entity_is_a_table(spark: SparkSession, stores: dict[str, GoldenStore]) -> None:
    root = stores["5.4.0"].root
    for entity, table in TABLES.items():
        frame = _load(spark, root, entity=entity.value, maxHashSlotNum="64")
        assert frame.columns == [column.name for column in table.columns]
    lags = _load(spark, root, entity="offsets").where("lag > 0").select("group", "lag")
    assert lags.schema.simpleString() == "struct<group:string,lag:bigint>"


def test_a_column_of_another_entity_is_named(spark: SparkSession, stores: dict[str, GoldenStore]) -> None:
    root = stores["5.4.0"].root
    text = _error(lambda: _load(spark, root, entity="consumequeue", columns="topic,queueOfset").count())
    assert text == "rocketmq-store: there is no column 'queueOfset' with these options: did you mean queueOffset?"


def test_options_choose_queues_and_files(spark: SparkSession, stores: dict[str, GoldenStore]) -> None:
    root = stores["5.4.0"].root
    wanted = "topic = 'GoldTag' AND queueId IN (0, 2)"
    everything = _load(spark, root).where(wanted).select("queueId", "queueOffset", "body").collect()
    pointed = _load(spark, root, topic="GoldTag", queueId="0,2", offsetsFrom="consumequeue")
    assert sorted(pointed.select("queueId", "queueOffset", "body").collect()) == sorted(everything)
    assert everything
