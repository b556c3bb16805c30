"""``rocketmq`` against our own broker: the readers themselves, then inside Spark."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable

from rmqkit import Message, sync
from rmqkit.admin import Admin
from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import ConnectFailed, NoRoute, PeerRefused, SettingsError
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.remoting.authentication import Credentials
from rmqkit.remoting.tls import Tls
from rmqkit.rpc import BrokerCalls
from rmqkit.spark import backlog, register
from rmqkit.spark.broker_format import BrokerTwin
from rmqkit.spark.broker_pool import Bounds, BrokerPool, DataLost, Range
from rmqkit.spark.kafka_columns import KAFKA_COLUMNS
from rmqkit.spark.planning import FORMAT, live_options
from rmqkit.spark.source.broker import BrokerReader, BrokerStreamReader, QueuePartition
from rmqkit.spark.source.store import JAR
from rmqkit.testing.clock import StandingClock
from tests.certificates import OPENSSL, REASON, make_certificate
from tests.faults.client.servers import Server, Servers
from tests.faults.spark.servers import set_queues
from tests.interop.server_process import wait_until
from tests.interop.standalone import Standalone, run_standalone
from tests.patience import producing, pulling

pytestmark = pytest.mark.spark

COUNT = 400


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    work_dir = tmp_path_factory.mktemp("live")
    config = work_dir / "broker.conf"
    config.write_text("brokerName=broker-a\nenablePropertyFilter=true\nflushConsumerOffsetInterval=500\n")
    with run_standalone(work_dir / "store", work_dir, "--config", str(config)) as running:
        yield running


@pytest.fixture(scope="module")
def producer(broker: Standalone) -> Iterator[sync.Producer]:
    with sync.Producer("spark-tests", broker.namesrv_addr, settings=producing()) as running:
        yield running


@pytest.fixture(scope="module")
def orders(producer: sync.Producer) -> str:
    """A topic with a few hundred messages of two tags in four queues."""
    send(producer, "orders", 0, COUNT)
    return "orders"


def send(producer: sync.Producer, topic: str, first: int, count: int) -> None:
    for number in range(first, first + count):
        tag = "even" if number % 2 == 0 else "odd"
        properties = {"number": str(number)}
        producer.send(Message(topic=topic, body=b"%d" % number, tags=tag, keys=[f"k{number}"], properties=properties))


def options(broker: Standalone, **given: str) -> dict[str, str]:
    return {"nameServer": broker.namesrv_addr, **given}


def batch(broker: Standalone, columns: str = "body", **given: str) -> pa.Table:
    """Return the table that a batch reads, without Spark."""
    reader = BrokerReader(live_options(options(broker, **given)), columns.split(","))
    parts = [part for partition in reader.partitions() for part in reader.read(partition)]
    return pa.Table.from_batches(parts)


def numbers(table: pa.Table) -> list[int]:
    return sorted(int(body) for body in table["body"].to_pylist())


def stream(broker: Standalone, clock: Clock = SYSTEM_CLOCK, **given: str) -> BrokerStreamReader:
    return BrokerStreamReader(live_options(options(broker, **given)), ["body"], clock)


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


def test_sql92_is_evaluated_by_the_broker(broker: Standalone, orders: str) -> None:
    expression = {"subExpression": "number BETWEEN 10 AND 19 AND TAGS = 'odd'", "subExpressionType": "SQL92"}
    assert numbers(batch(broker, subscribe=orders, **expression)) == [11, 13, 15, 17, 19]


def test_words_bound_a_batch(broker: Standalone, orders: str) -> None:
    everything = {"startingOffsets": "earliest", "endingOffsets": "latest"}
    assert numbers(batch(broker, subscribe=orders, **everything)) == list(range(COUNT))
    for word in ("soon", "group"):
        with pytest.raises(SettingsError, match=f"endingOffsets={word} must be earliest, latest or JSON by topic"):
            batch(broker, subscribe=orders, endingOffsets=word)
    with pytest.raises(SettingsError, match="startingOffsets=soon must be earliest, latest, group or JSON by topic"):
        batch(broker, subscribe=orders, startingOffsets="soon")


def test_an_end_behind_the_last_message_is_data_loss(broker: Standalone, orders: str) -> None:
    end = json.dumps({orders: {"broker-a": {"0": COUNT}}})
    with pytest.raises(DataLost, match=rf"messages {COUNT // 4} to {COUNT - 1} of queue 0 .*: the queue ends at"):
        batch(broker, subscribe=orders, endingOffsets=end)
    assert numbers(batch(broker, subscribe=orders, endingOffsets=end, failOnDataLoss="false")) == list(range(COUNT))


def test_offsets_bound_a_batch(broker: Standalone, orders: str) -> None:
    start = json.dumps({orders: {"broker-a": {"0": 10, "1": -1, "2": -1, "3": -1}}})
    end = json.dumps({orders: {"broker-a": {"0": 15}}})
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


def test_times_bound_each_queue(broker: Standalone, producer: sync.Producer) -> None:
    send(producer, "timed", 0, 8)
    stored = batch(broker, "storeTimestamp", subscribe="timed")["storeTimestamp"].to_pylist()
    last_ms = int(max(stored).timestamp() * 1000)
    wait_until(lambda: time.time() * 1000 > last_ms + 5, 60, "the next moment")
    send(producer, "timed", 8, 8)
    between = last_ms + 1
    assert numbers(batch(broker, subscribe="timed", startingTimestamp=str(between))) == list(range(8, 16))
    assert numbers(batch(broker, subscribe="timed", endingTimestamp=str(between))) == list(range(8))
    halves = json.dumps({"timed": {"broker-a": {"0": between, "1": between}}})
    ended = batch(broker, "queueId", subscribe="timed", endingOffsetsByTimestamp=halves, endingTimestamp=str(1 << 42))
    assert Counter(ended["queueId"].to_pylist()) == {0: 2, 1: 2, 2: 4, 3: 4}
    begun = batch(broker, "queueId,queueOffset", subscribe="timed", startingOffsetsByTimestamp=halves)
    assert Counter(begun["queueId"].to_pylist()) == {0: 2, 1: 2, 2: 4, 3: 4}
    assert min(row["queueOffset"] for row in begun.to_pylist() if row["queueId"] < 2) == 2


def test_a_pattern_is_of_the_whole_name(broker: Standalone, producer: sync.Producer, orders: str) -> None:
    send(producer, "orders-eu", 1000, 8)
    assert numbers(batch(broker, subscribePattern="orders-.*")) == list(range(1000, 1008))


def test_queues_can_be_assigned(broker: Standalone, orders: str) -> None:
    assigned = json.dumps({orders: {"broker-a": [1, 3]}})
    table = batch(broker, "queueId", assign=assigned)
    assert set(table["queueId"].to_pylist()) == {1, 3}


def test_tasks_are_as_many_and_as_large_as_wanted(broker: Standalone, orders: str) -> None:
    def sizes(**given: str) -> list[int]:
        reader = BrokerReader(live_options(options(broker, subscribe=orders, **given)), ["body"])
        return [partition.value.high - partition.value.low for partition in reader.partitions()]

    assert sizes() == [100] * 4
    assert sizes(minPartitions="8") == [50] * 8
    assert len(sizes(minPartitions="9")) >= 9
    assert max(sizes(maxRecordsPerPartition="30")) <= 30
    assert sum(sizes(maxRecordsPerPartition="30")) == COUNT


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "give one of subscribe, subscribePattern and assign, found 0"),
        ({"subscribe": "a", "assign": "{}"}, "give one of subscribe, subscribePattern and assign, found 2"),
        (
            {"subscribe": "a", "startingOfsets": "latest"},
            "'startingOfsets' is not known: did you mean startingOffsets?",
        ),
        ({"assign": '{"a":{"b":["0"]}}'}, "assign must look like"),
        ({"subscribe": "a", "failOnDataLoss": "maybe"}, "failOnDataLoss=maybe must be true or false"),
        ({"subscribe": "a", "startingOffsets": "group"}, "startingOffsets=group needs the name of a consumer group"),
        (
            {"subscribe": "a", "startingOffsetsByGroupStrategy": "none"},
            "startingOffsetsByGroupStrategy=none must be one of error, earliest, latest",
        ),
        (
            {"subscribe": "a", "columnNames": "kafka", "includeProperties": "string"},
            "includeProperties=string has no meaning with columnNames=kafka: set map for the column headers, or none",
        ),
    ],
)
def test_a_mistake_is_named(given: dict[str, str], text: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(text)):
        live_options(given)


def test_a_topic_that_does_not_exist_is_named(broker: Standalone) -> None:
    with pytest.raises(NoRoute, match="rocketmq: topic nothing does not exist: create it, or send a message"):
        batch(broker, subscribe="nothing")


def test_an_offset_below_the_first_message_is_data_loss(broker: Standalone, orders: str) -> None:
    start = json.dumps({orders: {"broker-a": {"0": -7}}})
    with pytest.raises(
        DataLost, match=r"messages -7 to -1 of queue 0 of orders on \S+ are gone: the queue begins at 0"
    ):
        batch(broker, subscribe=orders, startingOffsets=start)
    table = batch(broker, subscribe=orders, startingOffsets=start, failOnDataLoss="false")
    assert numbers(table) == list(range(COUNT))


def test_a_start_behind_the_last_message_is_data_loss(broker: Standalone, orders: str) -> None:
    start = json.dumps({orders: {"broker-a": {"0": 5000}}})
    said = r"messages 100 to 4999 of queue 0 of orders on \S+ are gone: the queue ends at 100"
    with pytest.raises(DataLost, match=said):
        batch(broker, subscribe=orders, startingOffsets=start)
    with pytest.raises(DataLost, match=said):
        stream(broker, subscribe=orders, startingOffsets=start).initialOffset()
    table = batch(broker, subscribe=orders, startingOffsets=start, failOnDataLoss="false")
    assert len(numbers(table)) == COUNT - 100
    begun = stream(broker, subscribe=orders, startingOffsets=start, failOnDataLoss="false").initialOffset()
    assert begun[orders]["broker-a"]["0"] == 100


def queue_of(topic: str, queue_id: int) -> MessageQueue:
    return MessageQueue(topic, "broker-a", queue_id)


# ---------------------------------------------------------------- offsets of a group


def standing(broker: Standalone, group: str, topic: str, *committed: int) -> BrokerPool:
    """Commit offsets of a group for the first queues of a topic."""
    pool = BrokerPool(live_options(options(broker, subscribe=topic, group=group)))
    pool.commit(group, {queue_of(topic, queue_id): offset for queue_id, offset in enumerate(committed)})
    return pool


def test_a_batch_begins_at_the_offsets_of_a_group_and_leaves_them(broker: Standalone, orders: str) -> None:
    pool = standing(broker, "billing", orders, 90, 99, 100)
    given = {"subscribe": orders, "startingOffsets": "group", "group": "billing"}

    def counts(**more: str) -> Counter[int]:
        return Counter(batch(broker, "queueId", **given, **more)["queueId"].to_pylist())

    assert counts() == counts(startingOffsetsByGroupStrategy="earliest") == {0: 10, 1: 1, 3: 100}
    assert counts(startingOffsetsByGroupStrategy="latest") == {0: 10, 1: 1}
    queues = [queue_of(orders, queue_id) for queue_id in range(4)]
    assert pool.committed("billing", queues) == dict(zip(queues, [90, 99, 100], strict=False))


def test_a_stream_begins_at_the_offsets_of_a_group(broker: Standalone, orders: str) -> None:
    pool = standing(broker, "shipping", orders, 98, 0, 100, 100)
    given = {"subscribe": orders, "startingOffsets": "group", "group": "shipping"}
    reader = stream(broker, **given)
    start = reader.initialOffset()
    assert start[orders]["broker-a"] == {"0": 98, "1": 0, "2": 100, "3": 100}
    end = reader.latestOffset(start, ReadAllAvailable())
    assert len(read(reader, start, end)) == 102
    reader.commit(end)
    assert pool.committed("shipping", [queue_of(orders, 0)]) == {queue_of(orders, 0): 98}
    following = stream(broker, **given, commitOffsetsToGroup="shipping")
    following.commit(following.latestOffset(following.initialOffset(), ReadAllAvailable()))
    assert pool.committed("shipping", [queue_of(orders, 0)]) == {queue_of(orders, 0): 100}


def test_a_group_without_an_offset_is_named_unless_there_is_a_fallback(
    broker: Standalone, producer: sync.Producer, orders: str
) -> None:
    send(producer, "grouped", 0, 1)
    given = {"subscribe": orders, "startingOffsets": "group", "group": "nobody"}
    with pytest.raises(SettingsError, match=r"^rocketmq: group nobody has no offset in orders: correct the name, or"):
        batch(broker, **given)
    with pytest.raises(SettingsError, match=r"^rocketmq: group nobody has no offset in orders"):
        stream(broker, **given).initialOffset()
    with pytest.raises(SettingsError, match=r"group nobody has no offset in grouped and 1 more: correct"):
        batch(broker, **{**given, "subscribe": "", "subscribePattern": "orders|grouped"})
    assert numbers(batch(broker, **given, startingOffsetsByGroupStrategy="earliest")) == list(range(COUNT))
    begun = stream(broker, **given, startingOffsetsByGroupStrategy="latest").initialOffset()
    assert begun[orders]["broker-a"] == {str(queue_id): COUNT // 4 for queue_id in range(4)}


def test_an_offset_of_a_group_behind_the_last_message_is_data_loss(broker: Standalone, orders: str) -> None:
    standing(broker, "ahead", orders, 5000)
    with pytest.raises(DataLost, match=r"messages 100 to 4999 of queue 0 .*: the queue ends at 100"):
        batch(broker, subscribe=orders, startingOffsets="group", group="ahead")


# ---------------------------------------------------------------- columns of Kafka


def test_a_batch_has_the_columns_of_kafka(broker: Standalone, orders: str) -> None:
    every = "key,value,topic,partition,offset,timestamp,timestampType,headers,brokerName"
    given = {"subscribe": orders, "columnNames": "kafka", "maxRecordsPerPartition": "60"}
    table = batch(broker, every, **given)
    assert sorted(map(int, table["value"].to_pylist())) == list(range(COUNT))
    row = next(row for row in table.to_pylist() if row["value"] == b"17")
    plain = batch(broker, "queueId,queueOffset,storeTimestamp,body", subscribe=orders).to_pylist()
    same = next(row for row in plain if row["body"] == b"17")
    assert row == {
        "key": b"k17",
        "value": b"17",
        "topic": orders,
        "partition": same["queueId"],
        "offset": same["queueOffset"],
        "timestamp": same["storeTimestamp"],
        "timestampType": 1,
        "headers": [{"key": "number", "value": b"17"}],
        "brokerName": "broker-a",
    }
    assert batch(broker, "partition,timestampType", **given).num_rows == COUNT
    assigned = json.dumps({orders: {"broker-a": [2]}})
    assert set(batch(broker, "partition", columnNames="kafka", assign=assigned)["partition"].to_pylist()) == {2}


def test_numbers_of_queues_come_from_the_checkpoint_even_if_a_broker_is_away() -> None:
    reader = waiting(StandingClock(), columnNames="kafka")
    end = {"T": {"broker-a": {"0": 7, "1": 0}, "broker-b": {"0": 2, "1": 9}}}
    b1 = MessageQueue("T", "broker-b", 1)
    with mock.patch.object(BrokerPool, "bounds", return_value={b1: Bounds(0, 9)}):
        parts = reader.partitions({"T": {"broker-a": {"0": 7, "1": 0}, "broker-b": {"0": 2, "1": 5}}}, end)
    assert [(part.value, part.number) for part in parts if isinstance(part, QueuePartition)] == [(Range(b1, 5, 9), 3)]


# ---------------------------------------------------------------- streams


def test_a_stream_begins_with_what_comes_then(broker: Standalone, producer: sync.Producer) -> None:
    send(producer, "fresh", 0, 8)
    reader = stream(broker, subscribe="fresh")
    start = reader.initialOffset()
    send(producer, "fresh", 8, 8)
    end = reader.latestOffset(start, ReadAllAvailable())
    assert read(reader, start, end) == list(range(8, 16))
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    assert reader.reportLatestOffset() == {name: end[name] for name in end if name != ".marks"}


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


def waiting(clock: StandingClock, **given: str) -> BrokerStreamReader:
    """A stream of two queues; `reaching` says how far they reach."""
    wanted = {"nameServer": "127.0.0.1:1", "subscribe": "T", "startingOffsets": "earliest", **given}
    return BrokerStreamReader(live_options(wanted), ["body"], clock)


@contextlib.contextmanager
def reaching(*highs: int) -> Iterator[None]:
    """Each queue of the topic T ends there."""
    bounds = {queue_of("T", queue_id): Bounds(0, high) for queue_id, high in enumerate(highs)}
    with (
        mock.patch.object(BrokerPool, "reach", return_value=bounds),
        mock.patch.object(BrokerPool, "bounds", return_value=bounds),
        mock.patch.object(BrokerPool, "marks", return_value={}),
    ):
        yield


def offsets(*ends: int) -> dict[str, Any]:
    return {"T": {"broker-a": {str(queue_id): end for queue_id, end in enumerate(ends)}}}


def ends_of(reader: BrokerStreamReader, start: dict[str, Any], *highs: int) -> dict[str, Any]:
    """Return the end offsets of the next batch if the queues have these end offsets."""
    with reaching(*highs):
        return reader.latestOffset(start, reader.getDefaultReadLimit())


def test_a_batch_waits_for_enough_messages() -> None:
    clock = StandingClock()
    reader = waiting(clock, minOffsetsPerTrigger="100")
    assert ends_of(reader, offsets(0, 0), 3, 0) == offsets(3, 0), "the first batch does not wait"
    for high in (0, 50, 99):
        clock.ms += 60_000
        assert ends_of(reader, offsets(3, 0), 3, high) == offsets(3, 0)
        assert reader.reportLatestOffset() == offsets(3, high), "the stream says how far it is behind all the same"
    assert ends_of(reader, offsets(3, 0), 4, 99) == offsets(4, 99)


def test_a_batch_waits_no_longer_than_the_delay_from_the_last_one() -> None:
    clock = StandingClock()
    reader = waiting(clock, minOffsetsPerTrigger="100", maxTriggerDelay="10m")
    assert ends_of(reader, offsets(0, 0), 5, 5) == offsets(5, 5)
    clock.ms += 10 * 60_000 - 1
    assert ends_of(reader, offsets(5, 5), 5, 6) == offsets(5, 5)
    clock.ms += 1
    assert ends_of(reader, offsets(5, 5), 5, 6) == offsets(5, 6)
    clock.ms += 9 * 60_000
    assert ends_of(reader, offsets(5, 6), 5, 7) == offsets(5, 6), "the time begins anew with every batch"


def test_without_a_message_there_is_no_batch_and_the_next_one_is_due() -> None:
    clock = StandingClock()
    reader = waiting(clock, minOffsetsPerTrigger="100", maxTriggerDelay="10m")
    assert ends_of(reader, offsets(0, 0), 1, 0) == offsets(1, 0)
    clock.ms += 3_600_000
    assert ends_of(reader, offsets(1, 0), 1, 0) == offsets(1, 0)
    assert ends_of(reader, offsets(1, 0), 2, 0) == offsets(2, 0)


def test_a_batch_that_waited_keeps_to_the_other_limits() -> None:
    reader = waiting(StandingClock(), minOffsetsPerTrigger="100", maxOffsetsPerTrigger="200")
    assert ends_of(reader, offsets(0, 0), 1, 0) == offsets(1, 0)
    assert ends_of(reader, offsets(1, 0), 301, 300) == offsets(101, 100)


def test_a_queue_that_was_rebuilt_counts_with_all_that_it_has() -> None:
    reader = waiting(StandingClock(), minOffsetsPerTrigger="100", failOnDataLoss="false")
    assert ends_of(reader, offsets(0, 0), 500, 0) == offsets(500, 0)
    assert ends_of(reader, offsets(500, 0), 99, 0) == offsets(500, 0)
    end = ends_of(reader, offsets(500, 0), 100, 0)
    assert end == {**offsets(100, 0), ".marks": {"T": {"broker-a": {"0": [-1, -1, 1]}}}}


def test_what_there_was_when_the_query_began_waits_for_nothing() -> None:
    reader = waiting(StandingClock(), minOffsetsPerTrigger="100", maxOffsetsPerTrigger="150")
    with reaching(200, 0):
        reader.prepareForTriggerAvailableNow()
    assert ends_of(reader, offsets(0, 0), 300, 9) == offsets(150, 0)
    assert ends_of(reader, offsets(150, 0), 300, 9) == offsets(200, 0)
    assert ends_of(reader, offsets(200, 0), 300, 9) == offsets(200, 0)
    with reaching(3, 0):  # Trigger.Once
        once = waiting(StandingClock(), minOffsetsPerTrigger="100")
        assert once.latestOffset(offsets(1, 0), ReadAllAvailable()) == offsets(3, 0)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("500", 500),
        ("500ms", 500),
        ("30s", 30_000),
        ("15m", 900_000),
        ("2 min", 120_000),
        ("1H", 3_600_000),
        ("1d", 86_400_000),
    ],
)
def test_a_delay_has_a_unit(text: str, ms: int) -> None:
    assert live_options({"subscribe": "T", "maxTriggerDelay": text}).trigger_delay_ms == ms


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"maxTriggerDelay": "soon"},
            "rocketmq: maxTriggerDelay=soon must be a whole number with one of the units ms, s,",
        ),
        (
            {"maxTriggerDelay": "3w"},
            "rocketmq: maxTriggerDelay=3w must be a whole number with one of the units ms, s, m",
        ),
        (
            {"minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "4"},
            "rocketmq: minOffsetsPerTrigger=5 must not be above maxOffsetsPerTrigger=4",
        ),
    ],
)
def test_what_a_batch_cannot_wait_for_is_reported(given: dict[str, str], told: str) -> None:
    with pytest.raises(SettingsError, match=f"^{re.escape(told)}"):
        live_options({"subscribe": "T", **given})


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

    wait_until(appeared, 150, "queues of the new topic")
    end = ends[-1]
    assert read(reader, start, end) == list(range(4, 8))


def test_queues_that_a_topic_is_given_are_read_from_their_first_message(
    broker: Standalone, producer: sync.Producer
) -> None:
    send(producer, "widened", 0, 4)
    reader = stream(broker, subscribe="widened", startingOffsets="earliest", maxOffsetsPerTrigger="100")
    start = reader.initialOffset()
    set_queues(broker.broker_addr, "widened", 6)
    with sync.Producer("spark-wide", broker.namesrv_addr, settings=producing()) as fresh:
        for queue_id in range(6):
            fresh.send(Message(topic="widened", body=b"%d" % (4 + queue_id)), queue=queue_of("widened", queue_id))
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert read(reader, start, end) == list(range(10))
    assert sorted(end["widened"]["broker-a"]) == [str(queue_id) for queue_id in range(6)]


def test_a_new_queue_whose_first_messages_are_gone_already_is_data_loss(broker: Standalone, orders: str) -> None:
    """Spark plans a batch again after a crash: what it had then and is gone since must not be passed over."""
    reader = stream(broker, subscribe=orders)
    bounds = {queue_of(orders, 0): Bounds(7, 100)}
    with (
        mock.patch.object(BrokerPool, "bounds", return_value=bounds),
        pytest.raises(DataLost, match="messages 0 to 6 of"),
    ):
        reader.partitions({}, {orders: {"broker-a": {"0": 100}}})


def test_a_queue_that_is_gone_is_data_loss(broker: Standalone, orders: str) -> None:
    start = {"orders": {"gone": {"0": 5}}}
    with pytest.raises(DataLost, match="no route has the queue, its topic or broker is gone"):
        stream(broker, subscribe=orders, brokerPatienceMs="1").latestOffset(start, ReadAllAvailable())
    reader = stream(broker, subscribe=orders, failOnDataLoss="false", brokerPatienceMs="1")
    for _ in range(2):  # the second time nobody waits
        assert reader.latestOffset(start, ReadAllAvailable())["orders"]["gone"] == {"0": 5}


def test_a_queue_that_ends_before_it_was_read_is_data_loss(broker: Standalone, orders: str) -> None:
    start = {"orders": {"broker-a": {"0": COUNT}}}
    with pytest.raises(DataLost, match=rf"messages {COUNT // 4} to {COUNT - 1} of .*: the queue ends at {COUNT // 4};"):
        stream(broker, subscribe=orders, brokerPatienceMs="1").latestOffset(start, ReadAllAvailable())
    reader = stream(broker, subscribe=orders, failOnDataLoss="false", brokerPatienceMs="1")
    assert reader.latestOffset(start, ReadAllAvailable())["orders"]["broker-a"]["0"] == COUNT // 4


def test_a_topic_that_was_rebuilt_is_read_from_its_first_message(
    broker: Standalone, producer: sync.Producer, caplog: pytest.LogCaptureFixture
) -> None:
    """Its messages have the numbers of those that were read of the topic before, and are none of them."""
    send(producer, "anew", 0, 12)
    read_before = {"anew": {"broker-a": {str(queue_id): 55 for queue_id in range(4)}}}
    reader = stream(broker, subscribe="anew", failOnDataLoss="false", brokerPatienceMs="1", commitOffsetsToGroup="g")
    end = reader.latestOffset(read_before, ReadAllAvailable())
    assert read(reader, read_before, end) == list(range(12))
    assert "messages 3 to 54 of queue 0 of anew on broker-a are gone" in caplog.text
    assert "queue 0 of anew on broker-a is read from its first message" in caplog.text
    reader.commit(end)
    caplog.clear()
    send(producer, "anew", 12, 8)
    later = reader.latestOffset(end, ReadAllAvailable())
    assert read(reader, end, later) == list(range(12, 20))
    assert "are gone" not in caplog.text


def test_a_topic_that_was_gone_for_a_while_is_read_from_its_first_message(
    broker: Standalone, producer: sync.Producer
) -> None:
    read_before = {"later": {"broker-a": {"0": 55}}, "orders": {"broker-a": {"0": COUNT // 4}}}
    reader = stream(broker, subscribe="orders", failOnDataLoss="false", brokerPatienceMs="1")
    start = reader.latestOffset(read_before, ReadAllAvailable())
    assert start["later"]["broker-a"] == {"0": 55}
    send(producer, "later", 0, 8)
    again = stream(broker, subscribe="orders,later", failOnDataLoss="false", brokerPatienceMs="1")
    again.planner.given_up = reader.planner.given_up
    end = again.latestOffset(start, ReadAllAvailable())
    assert [number for number in read(again, start, end) if number < 8][:8] == list(range(8))


def make_again(broker: Standalone, topic: str, count: int, *, exists: bool = True) -> None:
    """Delete a topic, and send messages to a new one of its name with one queue."""

    async def remade() -> None:
        async with Admin(broker.namesrv_addr) as admin:
            if exists:
                await admin.topics.delete(topic)

    asyncio.run(remade())
    if count:
        set_queues(broker.broker_addr, topic, 1)
        with sync.Producer("spark-again", broker.namesrv_addr, settings=producing()) as fresh:
            for number in range(100, 100 + count):
                fresh.send(Message(topic=topic, body=b"%d" % number), queue=queue_of(topic, 0))


def one_queue(broker: Standalone, topic: str, count: int) -> None:
    make_again(broker, topic, count, exists=False)


@pytest.mark.parametrize("again", [5, 10, 25])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_topic_that_was_made_again_is_recognised_however_long_it_is(
    again: int, is_restarted: bool, broker: Standalone, caplog: pytest.LogCaptureFixture
) -> None:
    """The time of patience is a minute: whether a queue is another one is judged at once."""
    topic = f"again-{again}-{is_restarted}"
    one_queue(broker, topic, 10)
    given = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "20"}
    clock = StandingClock()
    readers = {value: stream(broker, clock, **given, failOnDataLoss=value) for value in ("true", "false")}
    reader = readers["false"]
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    for one in readers.values():
        assert one.latestOffset(start, one.getDefaultReadLimit()) == start, "nothing is new"
    make_again(broker, topic, again)
    clock.ms += 60_000 if again == 10 else 0  # a queue without anything new is asked once a minute
    if is_restarted:
        readers = {value: stream(broker, clock, **given, failOnDataLoss=value) for value in readers}
        reader = readers["false"]
    with pytest.raises(DataLost, match=f"queue 0 of {topic} on broker-a are gone: the queue "):
        readers["true"].latestOffset(start, ReadAllAvailable())
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    found = read(reader, start, end)
    assert found == list(range(100, 100 + min(again, 20)))
    assert f"queue 0 of {topic} on broker-a is read from its first message" in caplog.text
    caplog.clear()
    last = reader.latestOffset(end, reader.getDefaultReadLimit())
    rest = read(reader, end, last)
    assert found + rest == list(range(100, 100 + again))
    assert "gone" not in caplog.text


def test_offsets_of_an_old_checkpoint_have_no_marks_and_are_read(broker: Standalone) -> None:
    one_queue(broker, "unmarked", 10)
    reader = stream(broker, subscribe="unmarked")
    start = {"unmarked": {"broker-a": {"0": 4}}}
    end = reader.latestOffset(start, ReadAllAvailable())
    assert end["unmarked"] == {"broker-a": {"0": 10}}
    assert read(reader, start, end) == list(range(104, 110))
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    assert backlog({"sources": [{"endOffset": json.dumps(end), "latestOffset": json.dumps(end)}]}) == {
        "unmarked/broker-a/0": 0
    }
    # What a checkpoint holds may be given as an option.
    assert numbers(batch(broker, subscribe="unmarked", endingOffsets=json.dumps(end))) == list(range(100, 110))


def test_a_batch_that_is_planned_again_does_not_read_another_queue(broker: Standalone) -> None:
    one_queue(broker, "replanned", 10)
    reader = stream(broker, subscribe="replanned", startingOffsets="earliest")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    make_again(broker, "replanned", 12)
    with pytest.raises(DataLost, match="queue 0 of replanned on broker-a are gone: the queue was deleted and created"):
        stream(broker, subscribe="replanned").partitions(start, end)
    lenient = stream(broker, subscribe="replanned", failOnDataLoss="false")
    assert read(lenient, start, end) == []
    later = lenient.latestOffset(end, ReadAllAvailable())
    assert read(lenient, end, later) == list(range(100, 112))


@pytest.mark.parametrize("is_loss", [True, False])
def test_a_topic_that_is_deleted_ends_a_stream_of_what_there_is_at_once(
    is_loss: bool, broker: Standalone, caplog: pytest.LogCaptureFixture
) -> None:
    topic = f"deleted-{is_loss}"
    one_queue(broker, topic, 10)
    given = {"subscribe": topic, "failOnDataLoss": str(is_loss).lower()}
    start = stream(broker, **given).initialOffset()
    make_again(broker, topic, 0)
    reader = stream(broker, **given, pullBatchSize="31")  # connections of its own, which know no route yet
    reader.prepareForTriggerAvailableNow()
    said = f"messages from 10 on of queue 0 of {topic} on broker-a are gone: no route has the queue"
    if is_loss:
        with pytest.raises(DataLost, match=said):
            reader.latestOffset(start, ReadAllAvailable())
    else:
        assert reader.latestOffset(start, ReadAllAvailable()) == start
        assert said in caplog.text


def test_a_name_server_that_does_not_know_a_topic_is_not_believed_before_its_broker(
    broker: Standalone, orders: str, caplog: pytest.LogCaptureFixture
) -> None:
    start = {"orders": {"broker-a": {"0": 5}}}
    reader = stream(broker, subscribe=orders, brokerPatienceMs="1", pullBatchSize="30")
    with (
        mock.patch.object(BrokerPool, "_queues", return_value=[]),
        pytest.raises(DataLost, match="messages from 5 on of queue 0 of orders on broker-a are gone: no route has"),
    ):
        reader.latestOffset(start, ReadAllAvailable())
    assert "waiting up to 0.001 s for the brokers broker-a" in caplog.text
    assert reader.latestOffset(start, ReadAllAvailable())["orders"]["broker-a"]["0"] == COUNT // 4


def test_messages_that_are_not_there_any_more_are_data_loss_while_they_are_read(
    broker: Standalone, orders: str
) -> None:
    part = InputPartition(Range(queue_of(orders, 0), COUNT // 4 - 1, COUNT))
    with pytest.raises(DataLost, match=rf"messages {COUNT // 4} to {COUNT - 1} of .*: the queue ends at"):
        list(stream(broker, subscribe=orders, brokerPatienceMs="1").read(part))
    kept = stream(broker, subscribe=orders, brokerPatienceMs="1", failOnDataLoss="false").read(part)
    assert sum(len(body) for body in kept) == 1


def planned(broker: Standalone, topic: str) -> list[InputPartition]:
    """Plan a batch with the 10 messages of a new topic with one queue."""
    one_queue(broker, topic, 10)
    reader = stream(broker, subscribe=topic, startingOffsets="earliest")
    start = {topic: {"broker-a": {"0": 0}}}
    return list(reader.partitions(start, reader.latestOffset(start, ReadAllAvailable())))


def read_planned(broker: Standalone, parts: list[InputPartition], **given: str) -> list[int]:
    """Read planned tasks in a process that knows no routes: the options differ from all others."""
    reader = stream(broker, subscribe="read-planned", **given)
    return sorted(int(body) for part in parts for batch in reader.read(part) for body in batch["body"].to_pylist())


def test_a_task_reads_no_messages_of_a_queue_that_was_created_again_after_the_plan(
    broker: Standalone, caplog: pytest.LogCaptureFixture
) -> None:
    parts = planned(broker, "again-after-plan")
    assert read_planned(broker, parts) == list(range(100, 110))
    make_again(broker, "again-after-plan", 20)
    lost = (
        "messages 0 to 9 of queue 0 of again-after-plan on broker-a are gone: the queue was deleted and created again"
    )
    with pytest.raises(DataLost, match=lost):
        read_planned(broker, parts)
    assert read_planned(broker, parts, failOnDataLoss="false") == []
    assert lost in caplog.text
    unmarked = [InputPartition(Range(part.value.queue, 0, 10)) for part in parts]
    assert read_planned(broker, unmarked) == list(range(100, 110)), "without a mark every message is read"


def test_the_last_message_of_a_plan_has_the_greatest_log_offset_that_a_task_reads(broker: Standalone) -> None:
    (part,) = planned(broker, "last-of-plan")
    exact = part.value.log_offset_max
    last = Range(part.value.queue, 9, 10, exact)
    assert read_planned(broker, [InputPartition(last)]) == [109]
    with pytest.raises(DataLost, match=f"its message 9 is at log offset {exact}, greater than {exact - 1}"):
        read_planned(broker, [InputPartition(Range(part.value.queue, 9, 10, exact - 1))])


@pytest.mark.parametrize("pull_count", ["7", "8"])
def test_a_task_that_reads_a_deleted_topic_reports_the_loss_at_once(
    pull_count: str, broker: Standalone, caplog: pytest.LogCaptureFixture
) -> None:
    """The time of patience is a minute, and the broker is not away. Each number of messages needs new connections."""
    topic = f"deleted-after-plan-{pull_count}"
    parts = planned(broker, topic)
    if pull_count == "8":  # these connections know the route, and the broker refuses
        assert read_planned(broker, parts, pullBatchSize=pull_count, failOnDataLoss="false")
    make_again(broker, topic, 0)
    lost = f"messages 0 to 9 of queue 0 of {topic} on broker-a are gone: its topic was deleted"
    with pytest.raises(DataLost, match=lost):
        read_planned(broker, parts, pullBatchSize=pull_count)
    assert read_planned(broker, parts, pullBatchSize=pull_count, failOnDataLoss="false") == []
    assert lost in caplog.text


@pytest.mark.parametrize("offset", [0, 10])
def test_a_deleted_topic_is_not_waited_for_at_any_offset(
    offset: int, broker: Standalone, caplog: pytest.LogCaptureFixture
) -> None:
    """A queue has the offset 0 before its first message, and when its topic was deleted while its end was requested."""
    topic = f"deleted-at-{offset}"
    one_queue(broker, topic, 10)
    start = {topic: {"broker-a": {"0": offset}}, "orders": {"broker-a": {"0": 1}}}
    make_again(broker, topic, 0)
    pattern = f"orders|{topic}"
    with pytest.raises(
        DataLost, match=f"messages from {offset} on of queue 0 of {topic} on broker-a are gone: no route"
    ):
        stream(broker, subscribePattern=pattern).latestOffset(start, ReadAllAvailable())
    reader = stream(broker, subscribePattern=pattern, failOnDataLoss="false")
    assert reader.latestOffset(start, ReadAllAvailable())[topic] == {"broker-a": {"0": offset}}
    assert "waiting up to" not in caplog.text


def test_an_empty_queue_without_a_route_is_waited_for(
    broker: Standalone, orders: str, caplog: pytest.LogCaptureFixture
) -> None:
    set_queues(broker.broker_addr, "empty", 1)
    start = {"empty": {"broker-a": {"0": 0}}}
    reader = stream(broker, subscribe="empty", brokerPatienceMs="1", pullBatchSize="29")
    with mock.patch.object(BrokerPool, "_queues", return_value=[]), pytest.raises(DataLost, match="no route has"):
        reader.latestOffset(start, ReadAllAvailable())
    assert "waiting up to 0.001 s for the brokers broker-a" in caplog.text


@pytest.mark.parametrize(
    "given",
    [
        {"subscribe": "orders"},
        {"subscribePattern": "orders"},
        {"assign": json.dumps({"orders": {"broker-a": [0, 1, 2, 3]}})},
    ],
)
def test_a_topic_that_the_options_do_not_name_any_more_is_data_loss_at_once(
    given: dict[str, str], broker: Standalone, producer: sync.Producer, orders: str
) -> None:
    send(producer, "other-orders", 0, 4)
    ends = {str(queue_id): COUNT // 4 for queue_id in range(4)}
    start = {"orders": {"broker-a": ends}, "other-orders": {"broker-a": {"0": 1}}}
    lost = "messages from 1 on of queue 0 of other-orders on broker-a are gone: the options do not name it any more"
    with pytest.raises(DataLost, match=lost):
        stream(broker, **given).latestOffset(start, ReadAllAvailable())
    reader = stream(broker, **given, failOnDataLoss="false")
    assert reader.latestOffset(start, ReadAllAvailable())["other-orders"] == {"broker-a": {"0": 1}}


def test_a_broker_that_is_away_is_waited_for_and_a_new_one_is_read(tmp_path: Path) -> None:
    async def run() -> None:
        async with Servers(tmp_path) as servers:
            with sync.Producer("spark-away", servers.namesrv_addr, settings=producing()) as producer:
                await asyncio.to_thread(send, producer, "away", 0, 8)
                given = live_options(
                    {"nameServer": servers.namesrv_addr, "subscribe": "away", "startingOffsets": "earliest"}
                )
                reader = BrokerStreamReader(given, ["body"])
                start = await asyncio.to_thread(reader.initialOffset)
                servers.broker.kill()
                asked = asyncio.create_task(asyncio.to_thread(reader.latestOffset, start, ReadAllAvailable()))
                await servers.broker.start()
                end = await asked
                assert await asyncio.to_thread(read, reader, start, end) == list(range(8))
                other = Server("broker2", second_broker(tmp_path, servers.namesrv_addr), tmp_path)
                await other.start()
                try:
                    await asyncio.to_thread(set_queues, other.address, "away", 1)
                    last = await asyncio.to_thread(appears, reader, end, "broker-b")
                    assert last["away"]["broker-b"] == {"0": 0}
                finally:
                    other.kill()

    asyncio.run(run())


def second_broker(folder: Path, namesrv_addr: str) -> list[str]:
    config = folder / "second.conf"
    config.write_text("brokerIP1=127.0.0.1\nbrokerName=broker-b\n")
    store = str(folder / "second")
    return ["--host", "127.0.0.1", "--store", store, "--config", str(config), "--name-servers", namesrv_addr]


def appears(reader: BrokerStreamReader, start: dict[str, Any], name: str) -> dict[str, Any]:
    ends = [start]

    def is_there() -> bool:
        ends.append(reader.latestOffset(start, ReadAllAvailable()))
        return name in ends[-1]["away"]

    wait_until(is_there, 150, f"queues of {name}")
    return ends[-1]


@pytest.mark.skipif(OPENSSL is None, reason=REASON)
def test_a_user_signs_and_connections_are_encrypted(spark: SparkSession, tmp_path: Path) -> None:
    own, other = make_certificate(tmp_path, "own"), make_certificate(tmp_path, "other")
    config = tmp_path / "broker.conf"
    config.write_text(
        f"tls.server.mode=enforcing\ntls.server.certPath={own.certificate}\ntls.server.keyPath={own.key}\n"
        'tls.enable=true\nauthenticationEnabled=true\ninitAuthenticationUser={"username":"anna","password":"secret12"}\n'
        'innerClientAuthenticationCredentials={"accessKey":"inner","secretKey":"inner-secret"}\n'
    )
    with run_standalone(tmp_path / "store", tmp_path, "--config", str(config)) as running:
        with sync.Producer(
            "spark-signed",
            running.namesrv_addr,
            settings=producing(tls=Tls(verify=False), auth=Credentials("anna", "secret12")),
        ) as producer:
            send(producer, "secret", 0, 4)
        given = {"subscribe": "secret", "useTLS": "true", "accessKey": "anna", "brokerPatienceMs": "1"}
        trusting = {**given, "trustCertPath": own.certificate, "secretKey": "secret12"}
        assert numbers(batch(running, **trusting)) == list(range(4))
        for name in (FORMAT, BrokerTwin.name()):
            assert load(spark, running, name, **trusting).count() == 4
            assert load(spark, running, name, **{**trusting, "trustCertPath": ""}).count() == 4
        with pytest.raises(PeerRefused, match="check signature failed"):
            batch(running, **{**trusting, "secretKey": "wrong"})
        with pytest.raises(NoRoute):
            batch(running, **{**trusting, "trustCertPath": other.certificate})
        with pytest.raises(NoRoute):
            batch(running, **{**trusting, "useTLS": "false", "trustCertPath": ""})


def test_a_group_follows_when_it_is_configured(broker: Standalone, orders: str) -> None:
    reader = stream(broker, subscribe=orders, startingOffsets="earliest", commitOffsetsToGroup="spark-lag")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    assert len(read(reader, start, end)) == COUNT
    reader.commit(end)
    with sync.PullConsumer("spark-lag", broker.namesrv_addr, settings=pulling()) as consumer:
        assert [consumer.committed(queue) for queue in consumer.queues(orders)] == [COUNT // 4] * 4


def test_a_group_follows_past_a_broker_that_is_away_for_a_moment_and_a_queue_that_is_gone(
    broker: Standalone, orders: str
) -> None:
    given = {"failOnDataLoss": "false", "brokerPatienceMs": "2000", "commitOffsetsToGroup": "spark-patient"}
    reader = stream(broker, subscribe=orders, **given)
    end = reader.latestOffset({"orders": {"gone": {"0": 5}}}, ReadAllAvailable())
    commit, failures = BrokerCalls.commit_offset, [ConnectFailed("broker-a", "it starts again")]

    async def commit_later(*args: Any) -> None:
        if failures:
            raise failures.pop()
        await commit(*args)

    with mock.patch.object(BrokerCalls, "commit_offset", commit_later):
        reader.commit(end)
    with sync.PullConsumer("spark-patient", broker.namesrv_addr, settings=pulling()) as consumer:
        assert [consumer.committed(queue) for queue in consumer.queues(orders)] == [COUNT // 4] * 4


# ---------------------------------------------------------------- inside Spark


BY_EACH = [FORMAT, BrokerTwin.name()]
"""The names under which the reader in Java and the one in Python can be used, where the session has the jar."""


@pytest.fixture(autouse=True, scope="module")
def twin(spark: SparkSession) -> None:
    if not JAR.exists():
        spark.dataSource.register(BrokerTwin)


def load(spark: SparkSession, broker: Standalone, name: str = FORMAT, **given: str) -> DataFrame:
    return spark.read.format(name).options(**options(broker, **given)).load()


@pytest.mark.parametrize("name", BY_EACH)
def test_spark_reads_a_batch(spark: SparkSession, broker: Standalone, orders: str, name: str) -> None:
    counted = load(spark, broker, name, subscribe=orders, columns="tags,body").groupBy("tags").count().collect()
    assert {row["tags"]: row["count"] for row in counted} == {"even": COUNT // 2, "odd": COUNT // 2}


@pytest.mark.parametrize("name", BY_EACH)
def test_spark_reads_a_namespace(spark: SparkSession, broker: Standalone, name: str) -> None:
    with sync.Producer(f"spark-{name}", broker.namesrv_addr, settings=producing(namespace="shop")) as producer:
        send(producer, name, 0, 3)
    frame = load(spark, broker, name, subscribe=name, namespace="shop")
    assert {row.topic for row in frame.select("topic").collect()} == {f"shop%{name}"}


def test_a_batch_is_a_snapshot_at_its_first_action(
    spark: SparkSession, broker: Standalone, producer: sync.Producer
) -> None:
    send(producer, "snapshot", 0, 5)
    frame = load(spark, broker, subscribe="snapshot")
    assert frame.count() == 5
    send(producer, "snapshot", 5, 5)
    assert frame.select("body").count() == 5
    assert load(spark, broker, subscribe="snapshot").count() == 10


def test_a_job_for_kafka_runs_with_other_options(
    spark: SparkSession, broker: Standalone, producer: sync.Producer, tmp_path: Path
) -> None:
    """A stream copies a topic to another one; its rows have the columns of Kafka's source and sink."""
    send(producer, "from-kafka", 0, 20)
    producer.send(Message(topic="from-kafka", body=b"bare"))
    kafka = options(broker, columnNames="kafka")
    source = spark.readStream.format("rocketmq").options(**kafka)
    rows = source.options(subscribe="from-kafka", startingOffsets="earliest").load()
    assert [name for name, _ in rows.dtypes] == [column.name for column in KAFKA_COLUMNS]
    writer = rows.writeStream.format("rocketmq").options(**kafka).option("topic", "to-kafka")
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
    assert query.awaitTermination(100)

    def table(topic: str) -> list[dict[str, Any]]:
        found = batch(broker, "key,value,partition,timestampType,headers", subscribe=topic, columnNames="kafka")
        return sorted(found.to_pylist(), key=lambda row: row["value"])

    found = table("to-kafka")
    assert found == table("from-kafka")
    assert len(found) == 21 and found[-1]["key"] is found[-1]["headers"] is None
    assert found[0]["key"] == b"k0" and found[0]["headers"] == [{"key": "number", "value": b"0"}]


def test_spark_streams_until_nothing_is_left(
    spark: SparkSession, broker: Standalone, producer: sync.Producer, tmp_path: Path
) -> None:
    send(producer, "streamed", 0, 300)

    behind: list[Any] = []

    def run(name: str) -> list[int]:
        source = spark.readStream.format(name).options(
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
        told = query.lastProgress
        assert told is not None
        behind.append(json.loads(told.sources[0].latestOffset or "{}"))
        assert set(backlog(told)) == {f"streamed/broker-a/{number}" for number in range(4)}
        assert sum(backlog(told).values()) == 0
        if name == FORMAT and JAR.exists():
            assert told.sources[0].metrics == {
                "minOffsetsBehindLatest": "0",
                "avgOffsetsBehindLatest": "0.0",
                "maxOffsetsBehindLatest": "0",
            }
        return sorted(row.number for row in spark.read.parquet(str(tmp_path / "out")).collect())

    # A checkpoint continues with and without the jar.
    python = BrokerTwin.name()
    for number, name in enumerate([FORMAT, python, FORMAT]):
        assert run(name) == list(range(300 + 50 * number))
        assert sum(behind[-1]["streamed"]["broker-a"].values()) == 300 + 50 * number
        send(producer, "streamed", 300 + 50 * number, 50)


@pytest.mark.slow
def test_spark_waits_for_enough_messages(
    spark: SparkSession, broker: Standalone, producer: sync.Producer, tmp_path: Path
) -> None:
    send(producer, "awaited", 0, 10)
    source = spark.readStream.format("rocketmq").options(
        **options(
            broker, subscribe="awaited", startingOffsets="earliest", minOffsetsPerTrigger="20", maxTriggerDelay="1d"
        )
    )
    rows = source.load().selectExpr("cast(cast(body as string) as int) number")
    writer = rows.writeStream.format("parquet").option("path", str(tmp_path / "out"))
    query = (
        writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(processingTime="0 seconds").start()
    )
    done = tmp_path / "checkpoint" / "commits"

    def reached(which: str) -> int:
        told = query.lastProgress
        found = json.loads(getattr(told.sources[0], which) or "{}") if told is not None else {}
        return sum(found.get("awaited", {}).get("broker-a", {}).values())

    try:
        wait_until(lambda: reached("endOffset") == 10, 100, "the first batch")
        send(producer, "awaited", 10, 15)
        wait_until(lambda: reached("latestOffset") == 25, 100, "the source to see all messages")
        assert reached("endOffset") == 10 and not (done / "1").exists()
        send(producer, "awaited", 25, 5)
        wait_until(lambda: (done / "1").exists(), 100, "the second batch")
    finally:
        query.stop()
    batches = [row.number for row in spark.read.parquet(str(tmp_path / "out")).collect()]
    assert sorted(batches) == list(range(30)) and not (done / "2").exists()


@pytest.mark.skipif(not JAR.exists(), reason="there is no JDK, so there is no catalog")
def test_a_topic_is_a_table_of_a_catalog(spark: SparkSession, broker: Standalone, orders: str) -> None:
    # A session keeps the first settings of a catalog, and pages of the documents may use this session, too.
    session = spark.newSession()
    register(session)
    session.conf.set("spark.sql.catalog.brokers", "rmqkit.spark.RmqCatalog")
    session.conf.set("spark.sql.catalog.brokers.nameServer", broker.namesrv_addr)
    assert session.sql(f"select count(*) from brokers.{orders} where tags = 'even'").first() == (COUNT // 2,)
    with pytest.raises(Exception, match="catalog brokers lists topics of a store only"):
        session.sql("show tables in brokers")


def test_spark_reports_a_mistake_in_one_line(spark: SparkSession, broker: Standalone) -> None:
    with pytest.raises(PySparkException) as caught:
        load(spark, broker, subscribe="nothing").count()
    assert "rocketmq: topic nothing does not exist: create it, or send a message to it first" in str(caught.value)
