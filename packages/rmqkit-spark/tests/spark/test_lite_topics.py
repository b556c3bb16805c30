"""Lite topics in Spark: their column, and reads of some lite topics only. Source: lite.md §14."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import rmqkit.streams
from rmqkit import Message, sync
from rmqkit.spark import register
from rmqkit.spark.broker_format import BrokerTwin
from rmqkit.spark.planning import Planner, live_options
from rmqkit.spark.source.store import JAR, StoreTwin
from tests.interop.standalone import Standalone, run_standalone
from tests.patience import producing

pytestmark = pytest.mark.spark

PARENT = "Chats"
STREAMS = {"s1": [b"a0", b"a1", b"a2"], "s2": [b"b0", b"b1"], "t1": [b"c0"]}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """A broker whose store has messages in lite topics, and one message in no lite topic."""
    work_dir = tmp_path_factory.mktemp("lite")

    async def append() -> None:
        async with rmqkit.streams.open(running.namesrv_addr, PARENT) as streams:
            for name, bodies in STREAMS.items():
                for body in bodies:
                    await streams.append(name, body)

    with run_standalone(work_dir / "store", work_dir) as running:
        asyncio.run(append())
        with sync.Producer("spark-lite", running.namesrv_addr, settings=producing()) as producer:
            producer.send(Message(topic="Ordinary", body=b"x"))
        yield running


@pytest.fixture(params=["java", "python"])
def formats(request: pytest.FixtureRequest, spark: SparkSession) -> dict[str, str]:
    """The names of the formats of the store and of live topics, of both readers."""
    if request.param == "java":
        if not JAR.exists():
            pytest.skip("there is no JDK, so there is no reader in Java")
        return {"store": "rocketmq-store", "live": "rocketmq"}
    register(spark)
    return {"store": StoreTwin.name(), "live": BrokerTwin.name()}


def both(
    spark: SparkSession, formats: dict[str, str], broker: Standalone, **options: str
) -> Iterator[tuple[str, DataFrame]]:
    live = spark.read.format(formats["live"]).options(nameServer=broker.namesrv_addr, subscribe=PARENT, **options)
    stored = spark.read.format(formats["store"]).options(topic=PARENT, **options)
    yield "live", live.load()
    yield "store", stored.load(str(broker.store_dir))


def found(frame: DataFrame) -> dict[str, list[bytes]]:
    rows: dict[str, list[bytes]] = {}
    for row in sorted(frame.select("lite_topic", "body").collect()):
        rows.setdefault(row[0], []).append(bytes(row[1]))
    return rows


def test_a_read_of_the_parent_names_the_lite_topic_of_each_message(
    spark: SparkSession, formats: dict[str, str], broker: Standalone
) -> None:
    for _, frame in both(spark, formats, broker):
        assert found(frame) == STREAMS
        assert found(frame.where("lite_topic = 's2'")) == {"s2": STREAMS["s2"]}
        assert frame.where("lite_topic is null").count() == 0


def test_a_message_in_no_lite_topic_has_null(spark: SparkSession, formats: dict[str, str], broker: Standalone) -> None:
    frame = spark.read.format(formats["store"]).option("topic", "Ordinary").load(str(broker.store_dir))
    assert [tuple(row) for row in frame.select("lite_topic", "body").collect()] == [(None, b"x")]
    assert frame.where("lite_topic is not null").count() == 0


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"liteTopic": "s1"}, ["s1"]),
        ({"liteTopic": "t1, s2,none"}, ["s2", "t1"]),
        ({"liteTopicPrefix": "s"}, ["s1", "s2"]),
        ({"liteTopicPrefix": "1"}, []),
        ({"liteTopic": "s1,t1", "liteTopicPrefix": "t"}, ["t1"]),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else None,
)
def test_the_options_select_lite_topics(
    spark: SparkSession, formats: dict[str, str], broker: Standalone, options: dict[str, str], wanted: list[str]
) -> None:
    for kind, frame in both(spark, formats, broker, **options):
        assert found(frame) == {name: STREAMS[name] for name in wanted}, kind
        assert frame.count() == sum(len(STREAMS[name]) for name in wanted), kind


def test_conditions_on_the_place_of_a_message_are_about_its_own_queue(
    spark: SparkSession, formats: dict[str, str], broker: Standalone
) -> None:
    whole = next(frame for _, frame in both(spark, formats, broker)).select("body", "queueId", "queueOffset")
    for row in whole.collect():
        lite = next(name for name, bodies in STREAMS.items() if bytes(row.body) in bodies)
        for _, frame in both(spark, formats, broker, liteTopic=lite):
            here = frame.where(f"queueId = {row.queueId} and queueOffset = {row.queueOffset} and topic = '{PARENT}'")
            assert [bytes(one.body) for one in here.select("body").collect()] == [bytes(row.body)]
            assert frame.where("topic = 'Other'").count() == 0


def test_a_batch_of_a_lite_topic_reads_only_its_light_queue(broker: Standalone) -> None:
    given = {"nameServer": broker.namesrv_addr, "subscribe": PARENT, "liteTopic": "s1,none"}
    parts = [(part.value.queue.topic, part.value.low, part.value.high) for part in Planner(live_options(given)).batch()]
    assert parts == [(f"%LMQ%${PARENT}$s1", 0, 3)]


def test_a_stream_of_lite_topics_reads_the_queues_of_the_parent(
    spark: SparkSession, formats: dict[str, str], broker: Standalone, tmp_path: Path
) -> None:
    reader = spark.readStream.format(formats["live"]).options(nameServer=broker.namesrv_addr, subscribe=PARENT)
    frame = reader.options(liteTopic="s2", startingOffsets="earliest").load().select("lite_topic", "body")
    rows: list[Any] = []
    writer = frame.writeStream.trigger(availableNow=True).option("checkpointLocation", str(tmp_path))
    writer.foreachBatch(lambda batch, number: rows.extend(batch.toArrow().to_pylist())).start().awaitTermination()
    assert pa.Table.from_pylist(rows).to_pydict() == {"lite_topic": ["s2", "s2"], "body": STREAMS["s2"]}
