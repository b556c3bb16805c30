"""``rocketmq`` against our own broker: the readers themselves, then inside Spark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

from rmqkit import Message, sync
from rmqkit.errors import NoRoute, SettingsError
from rmqkit.spark.broker_source import BrokerReader, BrokerStreamReader, live_options
from rmqkit.spark.live import DataLost
from tests.interop.server_process import wait_until
from tests.interop.standalone import Standalone, run_standalone

pytestmark = pytest.mark.spark

COUNT = 400


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    work_dir = tmp_path_factory.mktemp("live")
    with run_standalone(work_dir / "store", work_dir) as running:
        yield running


@pytest.fixture(scope="module")
def producer(broker: Standalone) -> Iterator[sync.Producer]:
    with sync.Producer("spark-tests", broker.namesrv_addr) as running:
        yield running


@pytest.fixture(scope="module")
def orders(producer: sync.Producer) -> str:
    """A topic with a few hundred messages of two tags in four queues."""
    send(producer, "orders", 0, COUNT)
    return "orders"


def send(producer: sync.Producer, topic: str, first: int, count: int) -> None:
    for number in range(first, first + count):
        tag = "even" if number % 2 == 0 else "odd"
        producer.send(Message(topic=topic, body=b"%d" % number, tags=tag, keys=[f"k{number}"]))


def options(broker: Standalone, **given: str) -> dict[str, str]:
    return {"nameServer": broker.namesrv_addr, **given}


def batch(broker: Standalone, columns: str = "body", **given: str) -> pa.Table:
    """What a batch reads, without Spark."""
    reader = BrokerReader(live_options(options(broker, **given)), columns.split(","))
    parts = [part for partition in reader.partitions() for part in reader.read(partition)]
    return pa.Table.from_batches(parts)


def numbers(table: pa.Table) -> list[int]:
    return sorted(int(body) for body in table["body"].to_pylist())


def stream(broker: Standalone, **given: str) -> BrokerStreamReader:
    return BrokerStreamReader(live_options(options(broker, **given)), ["body"])


def read(reader: BrokerStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    parts = [part for partition in reader.partitions(start, end) for part in reader.read(partition)]
    return sorted(int(body) for part in parts for body in part["body"].to_pylist())


# ---------------------------------------------------------------- batches


def test_a_batch_has_every_message_with_its_columns(broker: Standalone, orders: str) -> None:
    table = batch(broker, "topic,brokerName,queueId,queueOffset,tags,keys,body", subscribe=orders)
    assert numbers(table) == list(range(COUNT))
    first = next(row for row in table.to_pylist() if row["body"] == b"1")
    assert (first["topic"], first["tags"], first["keys"]) == ("orders", "odd", "k1")
    places = {(row["queueId"], row["queueOffset"]) for row in table.to_pylist()}
    assert places == {(queue_id, offset) for queue_id in range(4) for offset in range(COUNT // 4)}


def test_tags_are_filtered_by_the_broker_and_again_here(broker: Standalone, orders: str) -> None:
    assert numbers(batch(broker, subscribe=orders, subExpression="odd || none")) == list(range(1, COUNT, 2))


def test_offsets_bound_a_batch(broker: Standalone, orders: str) -> None:
    name = broker_name(broker, orders)
    start = json.dumps({orders: {name: {"0": 10, "1": -1, "2": -1, "3": -1}}})
    end = json.dumps({orders: {name: {"0": 15}}})
    table = batch(broker, "queueId,queueOffset", subscribe=orders, startingOffsets=start, endingOffsets=end)
    assert table.to_pydict() == {"queueId": [0] * 5, "queueOffset": list(range(10, 15))}


def test_times_bound_a_batch(broker: Standalone, orders: str) -> None:
    late = str(1 << 42)
    assert numbers(batch(broker, subscribe=orders, startingTimestamp="1", endingTimestamp=late)) == list(range(COUNT))
    with pytest.raises(SettingsError, match=r"has no message as late as .*: startingOffsetsByTimestampStrategy=latest"):
        batch(broker, subscribe=orders, startingTimestamp=late)
    reader = BrokerReader(
        live_options(
            options(broker, subscribe=orders, startingTimestamp=late, startingOffsetsByTimestampStrategy="latest")
        ),
        ["body"],
    )
    assert [partition.value for partition in reader.partitions()] == [None]


def test_a_pattern_is_of_the_whole_name(broker: Standalone, producer: sync.Producer, orders: str) -> None:
    send(producer, "orders-eu", 1000, 8)
    assert numbers(batch(broker, subscribePattern="orders-.*")) == list(range(1000, 1008))


def test_queues_can_be_assigned(broker: Standalone, orders: str) -> None:
    assigned = json.dumps({orders: {broker_name(broker, orders): [1, 3]}})
    table = batch(broker, "queueId", assign=assigned)
    assert set(table["queueId"].to_pylist()) == {1, 3}


def test_tasks_are_as_many_and_as_large_as_wanted(broker: Standalone, orders: str) -> None:
    def sizes(**given: str) -> list[int]:
        reader = BrokerReader(live_options(options(broker, subscribe=orders, **given)), ["body"])
        return [partition.value.high - partition.value.low for partition in reader.partitions()]

    assert sizes() == [100] * 4
    assert sizes(minPartitions="8") == [50] * 8
    assert max(sizes(maxRecordsPerPartition="30")) <= 30
    assert sum(sizes(maxRecordsPerPartition="30")) == COUNT


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "give one of subscribe, subscribePattern and assign, it is 0 now"),
        ({"subscribe": "a", "assign": "{}"}, "give one of subscribe, subscribePattern and assign, it is 2 now"),
        (
            {"subscribe": "a", "startingOfsets": "latest"},
            "'startingOfsets' is not known: did you mean startingOffsets?",
        ),
        ({"subscribe": "a", "failOnDataLoss": "maybe"}, "failOnDataLoss=maybe must be true or false"),
    ],
)
def test_a_mistake_is_named(given: dict[str, str], text: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(text)):
        live_options(given)


def test_a_topic_that_does_not_exist_is_named(broker: Standalone) -> None:
    with pytest.raises(NoRoute, match="rocketmq: topic nothing does not exist: create it, or send a message"):
        batch(broker, subscribe="nothing")


def test_an_offset_below_the_first_message_is_data_loss(broker: Standalone, orders: str) -> None:
    start = json.dumps({orders: {broker_name(broker, orders): {"0": -7}}})
    with pytest.raises(
        DataLost, match=r"messages -7 to -1 of queue 0 of orders on \S+ are gone: the queue begins at 0"
    ):
        batch(broker, subscribe=orders, startingOffsets=start)
    table = batch(broker, subscribe=orders, startingOffsets=start, failOnDataLoss="false")
    assert numbers(table) == list(range(COUNT))


def broker_name(broker: Standalone, topic: str) -> str:
    return str(batch(broker, "brokerName", subscribe=topic)["brokerName"][0].as_py())


# ---------------------------------------------------------------- streams


def test_a_stream_begins_with_what_comes_then(broker: Standalone, producer: sync.Producer) -> None:
    send(producer, "fresh", 0, 8)
    reader = stream(broker, subscribe="fresh")
    start = reader.initialOffset()
    send(producer, "fresh", 8, 8)
    end = reader.latestOffset(start, ReadAllAvailable())
    assert read(reader, start, end) == list(range(8, 16))
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    assert reader.reportLatestOffset() == end


def test_batches_are_limited_and_follow_each_other(broker: Standalone, orders: str) -> None:
    reader = stream(broker, subscribe=orders, startingOffsets="earliest", maxOffsetsPerTrigger="120")
    at, seen, batches = reader.initialOffset(), [], 0
    while (end := reader.latestOffset(at, reader.getDefaultReadLimit())) != at:
        found = read(reader, at, end)
        assert len(found) <= 124
        seen += found
        at, batches = end, batches + 1
    assert sorted(seen) == list(range(COUNT))
    assert batches == 4


def test_bytes_limit_batches_by_the_mean_size(broker: Standalone, orders: str) -> None:
    reader = stream(broker, subscribe=orders, startingOffsets="earliest", maxBytesPerTrigger="20k")
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert 50 <= len(read(reader, start, end)) <= 200


def test_available_now_ends_at_what_there_was(broker: Standalone, producer: sync.Producer) -> None:
    send(producer, "now", 0, 20)
    reader = stream(broker, subscribe="now", startingOffsets="earliest")
    reader.prepareForTriggerAvailableNow()
    send(producer, "now", 20, 20)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    assert read(reader, start, end) == list(range(20))
    assert reader.latestOffset(end, ReadAllAvailable()) == end


def test_a_queue_that_appears_is_read_from_its_first_message(broker: Standalone, producer: sync.Producer) -> None:
    send(producer, "grows-1", 0, 4)
    reader = stream(broker, subscribePattern="grows-.*", startingOffsets="latest")
    start = reader.initialOffset()
    send(producer, "grows-2", 4, 4)
    ends: list[dict[str, Any]] = []

    def appeared() -> bool:  # brokers tell the name server of a new topic in a moment
        ends.append(reader.latestOffset(start, ReadAllAvailable()))
        return ends[-1] != start

    wait_until(appeared, 30, "queues of the new topic")
    end = ends[-1]
    assert read(reader, start, end) == list(range(4, 8))


def test_a_queue_that_is_gone_is_data_loss(broker: Standalone, orders: str) -> None:
    start = {"orders": {"gone": {"0": 5}}}
    with pytest.raises(DataLost, match="no route has the queue, its topic or broker is gone"):
        stream(broker, subscribe=orders).latestOffset(start, ReadAllAvailable())
    going_on = stream(broker, subscribe=orders, failOnDataLoss="false").latestOffset(start, ReadAllAvailable())
    assert going_on["orders"]["gone"] == {"0": 5}


def test_a_group_follows_when_it_is_told_to(broker: Standalone, orders: str) -> None:
    reader = stream(broker, subscribe=orders, startingOffsets="earliest", commitOffsetsToGroup="spark-lag")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    assert len(read(reader, start, end)) == COUNT
    reader.commit(end)
    with sync.PullConsumer("spark-lag", broker.namesrv_addr) as consumer:
        assert [consumer.committed(queue) for queue in consumer.queues(orders)] == [COUNT // 4] * 4


# ---------------------------------------------------------------- inside Spark


def load(spark: SparkSession, broker: Standalone, **given: str) -> DataFrame:
    return spark.read.format("rocketmq").options(**options(broker, **given)).load()


def test_spark_reads_a_batch(spark: SparkSession, broker: Standalone, orders: str) -> None:
    counted = load(spark, broker, subscribe=orders, columns="tags,body").groupBy("tags").count().collect()
    assert {row["tags"]: row["count"] for row in counted} == {"even": COUNT // 2, "odd": COUNT // 2}


def test_spark_streams_until_nothing_is_left(
    spark: SparkSession, broker: Standalone, producer: sync.Producer, tmp_path: Path
) -> None:
    send(producer, "streamed", 0, 300)

    def run() -> list[int]:
        source = spark.readStream.format("rocketmq").options(
            **options(broker, subscribe="streamed", startingOffsets="earliest", maxOffsetsPerTrigger="100")
        )
        query = (
            source.load()
            .selectExpr("cast(cast(body as string) as int) number")
            .writeStream.format("parquet")
            .option("path", str(tmp_path / "out"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(100)
        return sorted(row.number for row in spark.read.parquet(str(tmp_path / "out")).collect())

    assert run() == list(range(300))
    send(producer, "streamed", 300, 50)
    assert run() == list(range(350))


def test_spark_tells_a_mistake_in_one_line(spark: SparkSession, broker: Standalone) -> None:
    with pytest.raises(PySparkException) as caught:
        load(spark, broker, subscribe="nothing").count()
    assert "rocketmq: topic nothing does not exist: create it, or send a message to it first" in str(caught.value)
