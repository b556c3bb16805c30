"""The columns of Kafka, made of messages and made into messages."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import StructType

from rmqkit.arrow.options import IncludeProperties
from rmqkit.arrow.schema import arrow_schema
from rmqkit.client.producer.selectors import PlacedMessage, by_place
from rmqkit.errors import MessageIllegal, SettingsError
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.spark.broker_pool import numbered
from rmqkit.spark.kafka_columns import (
    HEADERS,
    KAFKA_COLUMNS,
    from_kafka,
    kafka_columns,
    sources,
    to_kafka,
)
from rmqkit.spark.schema import declared
from rmqkit.spark.sink.rows import RowKeys, check_columns, messages, place
from rmqkit.spark.sink.writers import sink_options

NAMES = [column.name for column in KAFKA_COLUMNS]


def table(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """Return messages with the columns from which those of Kafka are made."""
    return pa.RecordBatch.from_pylist(rows, schema=arrow_schema(sources(KAFKA_COLUMNS)))


def headers(*properties: dict[str, str], first: int = 0) -> list[Any]:
    batch = table([{"properties": list(one.items())} for one in properties])
    return to_kafka(batch.slice(first), ["headers"], 0).column("headers").to_pylist()


def test_queues_are_numbered_by_broker_and_id_in_each_topic() -> None:
    queues = [MessageQueue(topic, broker, one) for one in (1, 0) for broker in ("b", "a") for topic in ("U", "T")]
    places = [(queue.topic, queue.broker_name, queue.queue_id, number) for queue, number in numbered(queues).items()]
    assert places == [
        ("T", "a", 0, 0), ("T", "a", 1, 1), ("T", "b", 0, 2), ("T", "b", 1, 3),
        ("U", "a", 0, 0), ("U", "a", 1, 1), ("U", "b", 0, 2), ("U", "b", 1, 3),
    ]  # fmt: skip


def test_the_types_are_those_that_spark_expects() -> None:
    from pyspark.sql.pandas.types import to_arrow_schema

    table_of_catalog = declared(KAFKA_COLUMNS, {"provider": "rocketmq"})
    assert isinstance(table_of_catalog, StructType)
    expected = to_arrow_schema(table_of_catalog, timezone="UTC")
    assert to_kafka(table([]), NAMES, 0).schema.equals(expected)
    assert [field.dataType.simpleString() for field in table_of_catalog] == [one.spark for one in KAFKA_COLUMNS]


def test_a_key_is_the_keys_or_the_sharding_key() -> None:
    rows = table([{"keys": "a b", "shardingKey": "s"}, {"shardingKey": "s"}, {}])
    assert to_kafka(rows, ["key"], 0).column("key").to_pylist() == [b"a b", b"s", None]


def test_headers_are_the_properties_of_the_application() -> None:
    own = {"color": "red", "KEYS": "k", "TAGS": "t", "UNIQ_KEY": "u", "size": ""}
    expected = [{"key": "color", "value": b"red"}, {"key": "size", "value": b""}]
    assert headers(own, {}, {"WAIT": "true"}, {"color": "blue"}) == [
        expected, None, None, [{"key": "color", "value": b"blue"}]
    ]  # fmt: skip


@given(st.lists(st.dictionaries(st.sampled_from(["a", "b", "KEYS", "TAGS"]), st.text(max_size=3))), st.integers(0, 3))
def test_headers_of_a_part_are_those_of_its_rows(properties: list[dict[str, str]], first: int) -> None:
    expected = [
        [{"key": name, "value": value.encode()} for name, value in one.items() if name in "ab"] or None
        for one in properties
    ]
    assert headers(*properties, first=first) == expected[first:]


def test_headers_can_be_left_out_and_columns_of_rocketmq_added() -> None:
    kafka, others = kafka_columns(IncludeProperties.NONE)
    assert [column.name for column in kafka] == NAMES[:-1]
    names = [column.name for column in others]
    assert {"tags", "msgId", "brokerName", "queueId"} <= set(names)
    assert not {"topic", "properties"} & set(names)


# ---------------------------------------------------------------- rows to write


def placed(**columns: list[Any]) -> list[PlacedMessage]:
    types = {"headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))}
    batch = pa.record_batch({name: pa.array(values, types.get(name)) for name, values in columns.items()})
    return list(messages(from_kafka(batch, 4, 1), 4, "T", RowKeys("q", 3, 1)))


def test_a_row_of_kafka_becomes_a_message() -> None:
    found = placed(
        key=[b"order 7", None, b""],
        value=[b"1", b"2", b"3"],
        partition=[5, None, None],
        headers=[[{"key": "color", "value": b"red"}, {"key": "none", "value": None}], None, []],
        offset=[1, 2, 3],
        tags=["new", None, None],
    )
    first, *others = found
    assert (first.body, first.keys, first.sharding_key) == (b"1", ["order", "7"], "order 7")
    assert (first.properties, first.queue_id, first.tags, first.msg_id) == ({"color": "red"}, 5, "new", "q/3/1/4")
    assert [(one.keys, one.sharding_key, one.properties, one.is_placed) for one in others] == [
        ([], None, {}, False)
    ] * 2


def test_a_partition_is_the_queue_with_this_number() -> None:
    queues = [MessageQueue("T", broker, queue_id) for broker in ("b", "a") for queue_id in (0, 1)]
    rows = placed(value=["1", "2", "3", "4"], partition=[0, 3, 2, None])
    place(rows, lambda topic: queues)
    assert [(row.broker_name, row.queue_id) for row in rows] == [("a", 0), ("b", 1), ("b", 0), (None, None)]
    assert by_place(queues, rows[1]) == MessageQueue("T", "b", 1)


@pytest.mark.parametrize(
    ("queues", "number", "said"),
    [
        (
            [MessageQueue("T", "a", 0), MessageQueue("T", "a", 1)],
            2,
            "topic T has no partition 2 to send to: it has 0 to 1",
        ),
        ([MessageQueue("T", "a", 0)], -1, "topic T has no partition -1 to send to: it has 0 to 0"),
        ([], 0, "topic T has no partition 0 to send to: it has none"),
    ],
)
def test_a_partition_that_does_not_exist_is_named(queues: list[MessageQueue], number: int, said: str) -> None:
    with pytest.raises(MessageIllegal, match=said):
        place(placed(value=["1"], partition=[number]), lambda topic: queues)


def test_texts_are_accepted_as_keys_and_values() -> None:
    (row,) = placed(key=["ä"], value=["1"])
    assert (row.body, row.keys) == (b"1", ["ä"])


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"value": [b"1", None]}, "row 5 of partition 1 has no value: RocketMQ has no empty bodies and no tombstones"),
        ({"value": ["", "1"]}, "row 4 of partition 1 has no value"),
        ({"value": [b"1"], "key": [b"\xff"]}, r"row 4 of partition 1 has a key that is no UTF-8, b'\\xff': encode it"),
        (
            {"value": [b"1"], "headers": [[{"key": "a", "value": b"\xff"}]]},
            "row 4 of partition 1 has a header 'a' that is no UTF-8",
        ),
        (
            {"value": [b"1"], "headers": [[{"key": "a", "value": b"1"}, {"key": "a", "value": b"2"}]]},
            "row 4 of partition 1 has the header 'a' twice: properties have one value for each name",
        ),
        (
            {"value": [b"1"], "headers": [[{"key": None, "value": b"1"}]]},
            "row 4 of partition 1 has a header without a key",
        ),
        ({"value": [b"1"], "headers": [[{"key": "KEYS", "value": b"1"}]]}, "RocketMQ's own properties KEYS"),
    ],
)
def test_a_row_of_kafka_that_cannot_be_a_message_is_named(columns: dict[str, list[Any]], said: str) -> None:
    with pytest.raises(MessageIllegal, match=said):
        placed(**columns)


def schema(ddl: str) -> StructType:
    fields = [dict(zip(("name", "type"), part.split(" ", 1), strict=True)) for part in ddl.split(", ")]
    types = {"bigint": "long", "int": "integer"}
    return StructType.fromJson(
        {
            "type": "struct",
            "fields": [
                {"name": one["name"], "type": types.get(one["type"], one["type"]), "nullable": True, "metadata": {}}
                for one in fields
            ],
        }
    )


def test_the_columns_of_kafkas_source_are_those_of_the_sink() -> None:
    source = declared(KAFKA_COLUMNS, {"provider": "rocketmq"})
    assert isinstance(source, StructType)
    assert source["headers"].dataType.simpleString() == HEADERS
    options = sink_options({"columnNames": "kafka"}, source, overwrite=False)
    assert options.column_names.value == "kafka"


@pytest.mark.parametrize(
    ("ddl", "topic", "said"),
    [
        ("body binary", "T", "there is no column 'body' in the sink: it takes key, value, topic, partition, headers"),
        ("values binary", "T", "there is no column 'values' in the sink: did you mean value?"),
        ("key string", "T", "the sink needs a column value: add it$"),
        ("value string", "", "the sink needs a column topic: add it, or set option topic"),
        ("value string, partition bigint", "T", "column partition must be int, it is bigint: cast it"),
    ],
)
def test_columns_of_kafka_are_checked_before_anything_is_sent(ddl: str, topic: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        check_columns(schema(ddl), topic, may_delay=True, source="rocketmq", is_kafka=True)
