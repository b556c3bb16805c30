"""Rows as messages, and the checks of columns. No broker, no session."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from rmqkit.client.producer.selectors import PlacedMessage, by_place
from rmqkit.errors import MessageIllegal, SettingsError
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.spark.sink.rows import SINK_COLUMNS, RowKeys, check_columns, messages
from rmqkit.spark.sink.writers import sink_options

KEYS = RowKeys("q", 3, 1)


TYPES: dict[str, DataType] = {
    "string": StringType(),
    "binary": BinaryType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "map<string,string>": MapType(StringType(), StringType()),
    "array<string>": ArrayType(StringType()),
}


def schema(ddl: str) -> StructType:
    """Return the schema of columns like ``body binary, tags string``, without a session."""
    pairs = [column.split() for column in ddl.split(", ")]
    return StructType([StructField(name, TYPES[type_name]) for name, type_name in pairs])


def rows(first: int = 0, topic_option: str = "T", **columns: Any) -> list[PlacedMessage]:
    return list(messages(pa.record_batch(columns), first, topic_option, KEYS))


def test_every_column_becomes_its_part_of_the_message() -> None:
    properties = pa.array([[("color", "red"), ("none", None)]], pa.map_(pa.string(), pa.string()))
    assert rows(
        topic_option="",
        body=[b"1"],
        topic=["U"],
        tags=["new"],
        keys=["k1  k2"],
        properties=properties,
        flag=[5],
        delayLevel=[2],
        shardingKey=["s"],
        queueId=[3],
        rowKey=["order 7"],
    ) == [
        PlacedMessage(
            topic="U",
            body=b"1",
            tags="new",
            keys=["k1", "k2"],
            properties={"color": "red"},
            flag=5,
            delay_level=2,
            sharding_key="s",
            queue_id=3,
            msg_id="q/3/order 7",
        )
    ]
    assert rows(body=[b"1"], deliverTimeMs=[7])[0].deliver_at == 0.007
    assert rows(body=[b"1"], keys=[["a", "b"]])[0].keys == ["a", "b"]


def test_the_option_wins_over_the_topic_of_a_row() -> None:
    """Spark's Kafka sink does the same: the rows of a stream that mirrors a topic have the name of the first topic."""
    found = rows(body=[b"1", b"2"], topic=["Source", None], topic_option="Mirror")
    assert [row.topic for row in found] == ["Mirror", "Mirror"]


def test_properties_of_rocketmq_are_refused_or_dropped() -> None:
    given = [("color", "red"), ("KEYS", "k"), ("DELAY", "3"), ("UNIQ_KEY", "FD00"), ("REAL_TOPIC", "Source")]
    batch = pa.record_batch({"body": [b"1"], "properties": pa.array([given], pa.map_(pa.string(), pa.string()))})
    said = "row 7 of partition 1 has RocketMQ's own properties DELAY, KEYS, REAL_TOPIC, UNIQ_KEY: set option reserved"
    with pytest.raises(MessageIllegal, match=said):
        list(messages(batch, 7, "T", KEYS))
    (dropped,) = messages(batch, 0, "T", KEYS, drops_reserved=True)
    assert dropped.properties == {"color": "red"}


def test_rows_are_numbered_within_their_partition() -> None:
    found = rows(first=10, body=["a", "b"])
    assert [(row.body, row.msg_id, row.topic) for row in found] == [(b"a", "q/3/1/10", "T"), (b"b", "q/3/1/11", "T")]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"body": [b"1", None]}, "row 1 of partition 1 has no body"),
        ({"body": [b""]}, "row 0 of partition 1 has no body"),
        ({"body": [b"1"], "topic": [None], "first": 4}, "row 4 of partition 1 has no topic"),
        ({"body": [b"1"], "rowKey": [""]}, "rowKey '' must have 1 to 255"),
        ({"body": [b"1"], "rowKey": ["a\x01"]}, "must have 1 to 255 printable"),
    ],
)
def test_rows_that_cannot_be_messages_are_named(columns: dict[str, Any], said: str) -> None:
    with pytest.raises(MessageIllegal, match=said):
        rows(topic_option="" if "topic" in columns else "T", **columns)


def test_every_type_of_a_column_is_taken() -> None:
    for name, types in SINK_COLUMNS.items():
        for type_name in types:
            body = "" if name == "body" else "body string, "
            check_columns(schema(f"{body}{name} {type_name}"), "T", may_delay=True, source="rocketmq")


def test_placed_rows_go_where_they_say() -> None:
    queues = [MessageQueue("T", broker, queue_id) for broker in ("b", "a") for queue_id in (0, 1)]
    placed = rows(body=[b"1"], queueId=[1])[0]
    assert placed.is_placed
    assert by_place(queues, placed) == MessageQueue("T", "a", 1)
    keyed = rows(body=[b"1", b"2"], shardingKey=["x", "x"])
    assert by_place(queues, keyed[0]) == by_place(queues, keyed[1])
    with pytest.raises(MessageIllegal, match=r"topic T has no queue 9 to send to: it has \[0, 1\]"):
        by_place(queues, rows(body=[b"1"], queueId=[9])[0])
    assert not rows(body=[b"1"])[0].is_placed


@pytest.mark.parametrize(
    ("ddl", "topic", "said"),
    [
        ("value binary", "T", "there is no column 'value' in the sink: it takes body, topic"),
        ("body binary, shardKey string", "T", "no column 'shardKey' in the sink: did you mean shardingKey?"),
        ("body bigint", "T", "column body must be binary or string, it is bigint: cast it"),
        ("body binary, queueId bigint", "T", "column queueId must be int, it is bigint: cast it"),
        ("tags string", "T", "the sink needs a column body: add it$"),
        ("body binary", "", "the sink needs a column topic: add it, or set option topic"),
        ("body binary, delayLevel int", "T", "column delayLevel cannot be sent with deliveryGuarantee=transactional"),
    ],
)
def test_columns_are_checked_before_anything_is_sent(ddl: str, topic: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        check_columns(schema(ddl), topic, may_delay=False, source="rocketmq")


@pytest.mark.parametrize(
    ("given", "overwrite", "said"),
    [
        ({"topics": "T"}, False, "option 'topics' is not known: did you mean topic?"),
        ({"deliveryGuarantee": "exactly-once"}, False, "must be one of at-least-once, transactional"),
        ({"topic": "T"}, True, "a topic cannot be overwritten: use mode append"),
        ({"topic": "T", "sinkId": "a/b"}, False, "sinkId 'a/b' must have neither slashes nor blanks"),
    ],
)
def test_options_are_checked_too(given: dict[str, str], overwrite: bool, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        sink_options(given, schema("body binary"), overwrite=overwrite)


def test_what_spark_adds_to_the_options_is_left_alone() -> None:
    given = {"topic": "T", "checkpointLocation": "/x", "queryName": "q", "path": "/y"}
    assert sink_options(given, schema("body binary"), overwrite=False).topic == "T"
