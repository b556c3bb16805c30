"""The reader of live topics in Java reads what the reader in Python reads: generated queues, options, damage, faults.

A broker of the test serves the records. The Python side runs without Spark.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from rmqkit.arrow.schema import arrow_schema
from rmqkit.errors import RmqError
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.command import ROCKETMQ, encode_command
from rmqkit.protocol.compression import decompress
from rmqkit.protocol.properties import encode_properties
from rmqkit.protocol.record import COMPRESSED, INNER_BATCH, NEED_UNWRAP, BatchEntry, decode_batch, encode_batch
from rmqkit.spark.failures import error_within
from rmqkit.spark.planning import live_options
from rmqkit.spark.source.broker import BrokerReader, read_columns
from rmqkit.spark.source.store import JAR
from tests.examples import examples
from tests.spark.messages import HOST_V4, HOST_V6, bodies, property_strings, record_at
from tests.spark.pulled_broker import BROKER, TOPIC, PulledBroker, Stored
from tests.spark.test_twin import outcome, table_rows

pytestmark = [
    pytest.mark.spark,
    pytest.mark.hypothesis,
    pytest.mark.skipif(not JAR.exists(), reason="there is no JDK, so there is no reader in Java"),
]

_SUPPRESSED = [HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
_INNER = INNER_BATCH | NEED_UNWRAP


@pytest.fixture(scope="module")
def broker() -> Iterator[PulledBroker]:
    with PulledBroker() as running:
        yield running


def _stored(offset: int, physical: int, **fields: Any) -> Stored:
    """Return a record at an offset of the queue; an inner batch has the offsets of its members."""
    flags, body, count = fields.get("sys_flag", 0), fields.get("body", b""), 1
    if flags & _INNER == _INNER:
        count = len(decode_batch(decompress(body, flags) if flags & COMPRESSED else body))
    record = record_at(physical, **{"queue_offset": offset, "queue_id": 0, **fields})
    return Stored(record, offset, offset + max(count, 1))


@st.composite
def queues(draw: st.DrawFn, topics: Sequence[bytes] = (b"T", b"%RETRY%group", b"%RETRY%" + b"g" * 190)) -> list[Stored]:
    """The records of a queue, of every layout."""
    records: list[Stored] = []
    offset, physical = draw(st.sampled_from([0, 5])), draw(st.integers(0, 2**40))
    for _ in range(draw(st.integers(1, 7))):
        flags, body = draw(bodies())
        tagged = st.sampled_from(["a", "b"]).map(lambda tag: encode_properties({"TAGS": tag, "x": "y"}))
        fields = {
            "topic": draw(st.sampled_from(topics)),
            "sys_flag": flags,
            "body": body,
            "properties": draw(tagged | property_strings),
            "born_host": draw(st.sampled_from([HOST_V4, HOST_V6])),
            "store_host": draw(st.sampled_from([HOST_V4, HOST_V6])),
            "store_timestamp": draw(st.integers(0, 2**45)),
        }
        records.append(_stored(offset, physical, **fields))
        offset, physical = records[-1].high, physical + draw(st.integers(1, 2**30))
    return records


_options = st.fixed_dictionaries(
    {"columnNames": st.sampled_from(["rocketmq", "kafka"])},
    optional={
        "decompress": st.sampled_from(["true", "false"]),
        "unwrap": st.sampled_from(["true", "false"]),
        "includeProperties": st.sampled_from(["map", "none"]),
        "batchRows": st.sampled_from(["1", "3"]),
        "pullBatchSize": st.sampled_from(["1", "2"]),
        "minPartitions": st.just("3"),
        "maxRecordsPerPartition": st.sampled_from(["1", "2"]),
        "subExpression": st.sampled_from(["a", "a || none"]),
    },
)


def _all(broker: PulledBroker, given_options: dict[str, str]) -> dict[str, str]:
    return {"nameServer": broker.address, "subscribe": TOPIC, "brokerPatienceMs": "0", **given_options}


def _by_python(broker: PulledBroker, given_options: dict[str, str]) -> pa.Table:
    options = live_options(_all(broker, given_options))
    reader = BrokerReader(options, [])
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    if not batches and given_options.get("columnNames") == "kafka":
        return pa.table({})
    return pa.Table.from_batches(batches, None if batches else arrow_schema(read_columns(options, ())))


def _frame(spark: SparkSession, broker: PulledBroker, given_options: dict[str, str]) -> DataFrame:
    frame = spark.read.format("rocketmq").options(**_all(broker, given_options)).load()
    assert "BatchScan rocketmq" in _plan(frame), "the reader in Java serves the read"
    return frame


def _plan(frame: DataFrame) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString())


@given(queues(), _options)
@examples(40, suppress=_SUPPRESSED)
def test_both_readers_return_the_same_rows(
    spark: SparkSession, broker: PulledBroker, records: list[Stored], given_options: dict[str, str]
) -> None:
    broker.records = records
    expected = table_rows(_by_python(broker, given_options))
    assert table_rows(_frame(spark, broker, given_options).toArrow()) == expected


@given(queues(), _options, st.data())
@examples(20, suppress=_SUPPRESSED)
def test_both_readers_fail_with_the_same_error(
    spark: SparkSession,
    broker: PulledBroker,
    records: list[Stored],
    given_options: dict[str, str],
    data: st.DataObject,
) -> None:
    damaged = data.draw(st.sampled_from(records))
    at = data.draw(st.integers(0, len(damaged.record) - 1))
    changed = bytearray(damaged.record)
    changed[at] ^= data.draw(st.integers(1, 255))
    damaged.record = bytes(changed[: data.draw(st.sampled_from([len(changed), at]))])
    broker.records = records
    # A task of Spark ends with the first error of all tasks.
    given_options = {name: value for name, value in given_options.items() if name[:3] not in ("min", "max")}
    expected = outcome(lambda: _by_python(broker, given_options))
    assert outcome(lambda: _frame(spark, broker, given_options).toArrow()) == expected


def test_a_batch_without_messages_has_no_row_for_a_topic_that_is_not_text(
    spark: SparkSession, broker: PulledBroker
) -> None:
    broker.records = [_stored(0, 0, sys_flag=_INNER, body=b"", topic=b"\xff"), _stored(1, 500)]
    assert [row["queueOffset"] for row in table_rows(_by_python(broker, {}))] == [1]
    assert _frame(spark, broker, {}).select("topic", "queueOffset").collect() == [("orders", 1)]


@given(queues(topics=[b"T"]), st.data())
@examples(12, suppress=_SUPPRESSED)
def test_pushed_filters_select_what_spark_selects(
    spark: SparkSession, broker: PulledBroker, records: list[Stored], data: st.DataObject
) -> None:
    broker.records = records
    everything = _by_python(broker, {})
    assume(everything.num_rows)
    offset = data.draw(st.integers(records[0].low, records[-1].high))
    texts = ["topic = 'T'", "topic in ('x', '%RETRY%group')", "queueId = 0", "queueId > 0", "tags = 'a'"]
    texts += [f"queueOffset {test} {offset}" for test in ("<", ">=", "=", ">")]
    texts.append(f"storeTimestamp >= timestamp_micros({data.draw(st.integers(0, 2**45))}000)")
    condition = " and ".join(data.draw(st.lists(st.sampled_from(texts), min_size=1, max_size=3)))
    names = data.draw(st.lists(st.sampled_from(everything.column_names), min_size=1, max_size=3, unique=True))
    frame = _frame(spark, broker, {})
    expected = spark.createDataFrame(everything).where(condition).select(*names).toArrow()
    assert table_rows(frame.where(condition).select(*names).toArrow()) == table_rows(expected)
    assert frame.where(condition).count() == expected.num_rows


# ---------------------------------------------------------------- plans


def _plain(count: int) -> list[Stored]:
    return [_stored(offset, 1000 * offset, body=b"%d" % offset) for offset in range(count)]


def test_a_filter_on_offsets_pulls_no_other_messages(spark: SparkSession, broker: PulledBroker) -> None:
    broker.records, broker.pulled = _plain(20), []
    frame = _frame(spark, broker, {}).where("queueOffset >= 5 and queueOffset < 9").select("body")
    shown = _plan(frame)
    assert (
        "PushedFilters: [IsNotNull(queueOffset), GreaterThanOrEqual(queueOffset,5), LessThan(queueOffset,9)]" in shown
    )
    assert "Filter (" not in shown
    assert frame.collect() == [(b"5",), (b"6",), (b"7",), (b"8",)]
    assert broker.pulled == [(5, 4)]
    assert _frame(spark, broker, {}).where("topic = 'other'").count() == 0
    assert broker.pulled == [(5, 4)]


def test_an_inner_batch_is_divided_between_tasks(spark: SparkSession, broker: PulledBroker) -> None:
    members = [BatchEntry(b"%d" % i, b"") for i in range(4)]
    batch = _stored(3, 0, sys_flag=_INNER, body=encode_batch(members))
    broker.records = [batch, _stored(7, 500)]
    found = _frame(spark, broker, {"maxRecordsPerPartition": "2"}).select("queueOffset", "body").collect()
    assert found == [(3 + i, b"%d" % i) for i in range(4)] + [(7, b"hello")]


def test_a_field_of_a_header_is_read_alone(spark: SparkSession, broker: PulledBroker) -> None:
    broker.records = [_stored(0, 0, properties=encode_properties({"KEYS": "k", "x": "1", "y": "2"}))]
    frame = _frame(spark, broker, {"columnNames": "kafka"})
    assert frame.selectExpr("headers[1].key").collect() == [("y",)]
    assert frame.selectExpr("headers.value", "key").collect() == [([b"1", b"2"], b"k")]


def test_a_limit_stops_pulls(spark: SparkSession, broker: PulledBroker) -> None:
    broker.records, broker.pulled = _plain(10), []
    frame = _frame(spark, broker, {}).limit(3)
    assert "PushedLimit: 3" in _plan(frame)
    assert len(frame.collect()) == 3


def test_a_stream_reports_the_messages_that_it_has_not_read(
    spark: SparkSession, broker: PulledBroker, tmp_path: Path
) -> None:
    broker.records = _plain(10)
    limited = _all(broker, {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "4"})
    rows = spark.readStream.format("rocketmq").options(**limited).load().select("queueOffset")
    writer = rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path))
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(100)
    told = [progress for progress in query.recentProgress if progress.numInputRows]
    assert [progress.numInputRows for progress in told] == [4, 4, 2]
    assert [progress.sources[0].metrics["maxOffsetsBehindLatest"] for progress in told] == ["6", "2", "0"]


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("code", [ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE])
def test_a_busy_broker_is_asked_again(spark: SparkSession, broker: PulledBroker, code: ResponseCode) -> None:
    broker.records, broker.faults = _plain(3), [code]
    assert _frame(spark, broker, {"brokerPatienceMs": "60000"}).count() == 3
    assert broker.faults == []


@pytest.mark.parametrize(
    "code", [ResponseCode.SYSTEM_BUSY, ResponseCode.NO_PERMISSION, ResponseCode.PULL_NOT_FOUND, ResponseCode.GO_AWAY]
)
def test_a_refusal_has_the_same_text(spark: SparkSession, broker: PulledBroker, code: ResponseCode) -> None:
    broker.records = _plain(3)

    def refused(read: Any) -> object:
        broker.faults = [code] * 9
        return outcome(read)

    expected = refused(lambda: _by_python(broker, {}))
    assert refused(lambda: _frame(spark, broker, {}).toArrow()) == expected
    assert isinstance(expected, str)
    broker.faults = []


def test_a_stream_reports_an_answer_without_a_whole_record(
    spark: SparkSession, broker: PulledBroker, tmp_path: Path
) -> None:
    """A stream knows the log offset of the last message of its plan, and compares it with each answer."""
    broker.records = _plain(1)
    whole = broker.records[0].record
    rows = spark.readStream.format("rocketmq").options(**_all(broker, {"startingOffsets": "earliest"})).load()
    for number, length in enumerate([1, 35, 36]):
        broker.records[0].record = whole[:length]
        query = rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path / f"{number}"))
        with pytest.raises(PySparkException) as caught:
            query.trigger(availableNow=True).start().awaitTermination(100)
        assert isinstance(error_within(caught.value), RmqError), caught.value


def test_a_connection_that_was_closed_while_it_was_idle_is_replaced(spark: SparkSession, broker: PulledBroker) -> None:
    broker.records = _plain(3)
    frame = _frame(spark, broker, {}).select("body")
    assert len(frame.collect()) == 3
    broker.restart()
    assert len(frame.collect()) == 3, "the plan is known, so only the reader in Java connects, and it has no patience"


def test_answers_may_have_binary_headers(
    spark: SparkSession, broker: PulledBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.records = _plain(3)
    frame = _frame(spark, broker, {})
    assert frame.rdd.getNumPartitions() == 1
    with_binary = functools.partial(encode_command, serialize_type=ROCKETMQ)
    monkeypatch.setattr("rmqkit.remoting.connection.encode_command", with_binary)
    assert frame.count() == 3
    broker.faults = [ResponseCode.NO_PERMISSION]
    assert "answered with code 16: no remark; grant the permission" in str(outcome(frame.toArrow))


def test_a_stream_can_be_stopped_while_its_broker_does_not_answer(spark: SparkSession, tmp_path: Path) -> None:
    with PulledBroker() as broker:
        broker.released.clear()
        given_options = _all(broker, {"pullTimeoutMs": "600000", "brokerPatienceMs": "600000"})
        rows = spark.readStream.format("rocketmq").options(**given_options).load()
        query = rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start()
        broker.asked.wait()
        query.stop()
        broker.released.set()
    assert not query.isActive
    assert query.exception() is None


@pytest.mark.parametrize("fails", ["true", "false"])
def test_messages_that_are_deleted_between_plan_and_read(spark: SparkSession, broker: PulledBroker, fails: str) -> None:
    broker.records = _plain(6)
    frame = _frame(spark, broker, {"failOnDataLoss": fails})
    assert frame.rdd.getNumPartitions() == 1
    broker.records = _plain(6)[4:]
    found = outcome(frame.toArrow)
    if fails == "true":
        assert found == (
            f"messages 0 to 3 of queue 0 of {TOPIC} on {BROKER} are gone: the queue begins at 4; failOnDataLoss=false"
            " continues without them"
        )
    else:
        assert isinstance(found, list)
        assert [row["body"] for row in found] == [b"4", b"5"]


def test_offsets_of_options_are_planned_by_python(spark: SparkSession, broker: PulledBroker) -> None:
    broker.records = _plain(6)
    start, end = ({TOPIC: {BROKER: {"0": offset}}} for offset in (2, 4))
    bounds = {"startingOffsets": json.dumps(start), "endingOffsets": json.dumps(end)}
    assert _frame(spark, broker, bounds).select("body").collect() == [(b"2",), (b"3",)]
