"""``write`` and ``writeStream`` of the format ``rocketmq``, inside Spark, against our own broker."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from rmqkit.errors import MessageIllegal, NoRoute, PeerRefused, SettingsError
from rmqkit.protocol.message import ReceivedMessage, read_messages
from rmqkit.spark.broker_pool import BrokerPool, Range
from rmqkit.spark.failures import one_line
from rmqkit.spark.options import LiveOptions
from rmqkit.spark.sink.rows import RowKeys
from rmqkit.spark.sink.writers import BatchWriter, sink_options
from tests.interop.server_process import wait_until
from tests.interop.standalone import Standalone, run_standalone
from tests.ports import free_ports

pytestmark = pytest.mark.spark

ROWS = 200
KAFKA_ROW = {"key": "string", "value": "string", "partition": "integer"}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    work_dir = tmp_path_factory.mktemp("sink")
    with run_standalone(work_dir / "store", work_dir) as running:
        yield running


@pytest.fixture(scope="module")
def live(broker: Standalone) -> BrokerPool:
    return BrokerPool(LiveOptions(name_servers=broker.namesrv_addr))


def seen(live: BrokerPool, topic: str) -> list[ReceivedMessage]:
    """Return the messages of a topic that consumers see, queue by queue."""
    try:
        queues = live.queues([topic])
    except NoRoute:
        return []
    live.wait_dispatched(queues)
    parts = [Range(queue, bound.low, bound.high) for queue, bound in sorted(live.bounds(queues).items())]
    return [message for part in parts for body in live.bodies(part) for message in read_messages(body)]


def numbered(spark: SparkSession, *columns: str) -> DataFrame:
    return spark.range(0, ROWS, numPartitions=2).selectExpr("cast(id as string) as body", *columns)


def save(frame: DataFrame, broker: Standalone, **options: str) -> None:
    with one_line():
        frame.write.format("rocketmq").options(nameServer=broker.namesrv_addr, **options).mode("append").save()


def test_a_batch_sends_every_column(spark: SparkSession, broker: Standalone, live: BrokerPool) -> None:
    frame = numbered(
        spark,
        "'columns' as topic",
        "'new' as tags",
        "concat('k', id, ' x') as keys",
        "map('color', 'red', 'size', null) as properties",
        "cast(7 as int) as flag",
        "concat('s', id % 3) as shardingKey",
        "concat('row ', id) as rowKey",
    )
    save(frame, broker, sinkId="job", batchId="4")
    found = seen(live, "columns")
    assert Counter(message.body for message in found) == Counter(b"%d" % number for number in range(ROWS))
    one = next(message for message in found if message.body == b"17")
    assert (one.tags, one.keys, one.flag, one.msg_id) == ("new", ["k17", "x"], 7, "job/4/row 17")
    assert {name: one.properties.get(name) for name in ("color", "size", "__SHARDINGKEY")} == {
        "color": "red",
        "size": None,
        "__SHARDINGKEY": "s2",
    }
    for remainder in range(3):  # one queue for each key, and in each task the order of its rows
        same = [message for message in found if int(message.body) % 3 == remainder]
        assert len({message.queue_id for message in same}) == 1
        for half in (range(ROWS // 2), range(ROWS // 2, ROWS)):
            ids = [int(message.body) for message in same if int(message.body) in half]
            assert ids == sorted(ids)


def test_a_queue_and_a_delay_can_be_chosen(spark: SparkSession, broker: Standalone, live: BrokerPool) -> None:
    frame = numbered(spark, "cast(id % 2 * 3 as int) as queueId", "cast(if(id = 5, 1, 0) as int) as delayLevel")
    save(frame, broker, topic="placed")
    wait_until(lambda: len(seen(live, "placed")) == ROWS, 150, "the delayed row")
    found = seen(live, "placed")
    assert {(int(message.body) % 2, message.queue_id) for message in found} == {(0, 0), (1, 3)}
    delayed = next(message for message in found if message.body == b"5")
    assert delayed.store_timestamp - delayed.born_timestamp >= 900


def test_a_delivery_time_is_requested(spark: SparkSession, broker: Standalone) -> None:
    with pytest.raises(PeerRefused, match="should not be bigger than the max delay"):
        save(numbered(spark, "9000000000000L as deliverTimeMs").limit(1), broker, topic="timed", brokerPatienceMs="1")


@pytest.mark.parametrize("guarantee", ["at-least-once", "transactional"])
def test_a_batch_with_an_id_is_written_once(
    spark: SparkSession, broker: Standalone, live: BrokerPool, guarantee: str
) -> None:
    topic = f"once-{guarantee}"
    for _ in range(2):
        save(numbered(spark), broker, topic=topic, sinkId="job", deliveryGuarantee=guarantee)
    found = Counter(message.body for message in seen(live, topic))
    times = 1 if guarantee == "transactional" else 2
    assert found == Counter(dict.fromkeys((b"%d" % number for number in range(ROWS)), times))
    keys = {message.msg_id for message in seen(live, topic)}
    assert keys == {f"job/0/{partition}/{row}" for partition in range(2) for row in range(ROWS // 2)}


@pytest.mark.parametrize("guarantee", ["at-least-once", "transactional"])
def test_rows_with_columns_of_kafka_go_to_their_partitions(
    broker: Standalone, live: BrokerPool, guarantee: str
) -> None:
    fields = [{"name": name, "type": of, "nullable": True, "metadata": {}} for name, of in KAFKA_ROW.items()]
    given = {"nameServer": broker.namesrv_addr, "topic": f"parted-{guarantee}", "deliveryGuarantee": guarantee}
    schema = StructType.fromJson({"type": "struct", "fields": fields})
    writer = BatchWriter(sink_options({**given, "columnNames": "kafka"}, schema, overwrite=False))

    def part(first: int) -> pa.RecordBatch:
        rows = range(first, first + 8)
        places = pa.array([row % 4 for row in rows], pa.int32())
        return pa.record_batch({"key": [f"k{row % 3}" for row in rows], "value": map(str, rows), "partition": places})

    staged = writer.stage(iter([part(0), part(8)]), RowKeys("parted", 0, 0))
    writer.commit([staged])
    found = {
        (int(message.body), message.queue_id, *message.keys, message.msg_id) for message in seen(live, given["topic"])
    }
    assert found == {(row, row % 4, f"k{row % 3}", f"parted/0/0/{row}") for row in range(16)}


def test_what_is_wrong_is_one_line(spark: SparkSession, broker: Standalone, live: BrokerPool) -> None:
    frame = numbered(spark)
    with pytest.raises(SettingsError, match=r"^rocketmq: option 'topics' is not known: did you mean topic\?$"):
        save(frame, broker, topics="T")
    with pytest.raises(SettingsError, match=r"^rocketmq: there is no column 'tag' in the sink: did you mean tags\?$"):
        save(numbered(spark, "'x' as tag"), broker, topic="T")
    with pytest.raises(MessageIllegal, match=r"^row 7 of partition 0 has no body: filter it out before$"):
        save(frame.selectExpr("if(body = '7', null, body) as body"), broker, topic="T")
    never = {"topic": "never", "deliveryGuarantee": "transactional"}
    with pytest.raises(MessageIllegal, match=r"^row 7 of partition 0 has no body: filter it out before$"):
        save(frame.selectExpr("if(body = '7', null, body) as body"), broker, **never)
    assert seen(live, "never") == []


def rows_of(spark: SparkSession, folder: Path) -> DataFrame:
    return spark.readStream.schema("body string").option("maxFilesPerTrigger", 1).json(str(folder))


def put_rows(folder: Path, batch: int) -> None:
    folder.mkdir(exist_ok=True)
    lines = "".join(f'{{"body": "{batch}-{number}"}}\n' for number in range(ROWS))
    (folder / f"{batch}.json").write_text(lines)


def stream(frame: DataFrame, namesrv: str, checkpoint: Path, topic: str, **options: Any) -> Any:
    return (
        frame.writeStream.format("rocketmq")
        .options(nameServer=namesrv, topic=topic, checkpointLocation=str(checkpoint), **options)
        .trigger(availableNow=True)
        .start()
    )


def run_to_end(query: Any) -> None:
    with one_line():
        query.awaitTermination()


def forget_last_commit(checkpoint: Path) -> None:
    """Make a checkpoint look as if the driver was killed before it committed the last batch."""
    last = max(int(file.name) for file in (checkpoint / "commits").iterdir() if file.name.isdecimal())
    (checkpoint / "commits" / str(last)).unlink()
    (checkpoint / "commits" / f".{last}.crc").unlink(missing_ok=True)


def wanted(*batches: int) -> Counter[bytes]:
    return Counter(b"%d-%d" % (batch, number) for batch in batches for number in range(ROWS))


def test_a_stream_that_is_started_again_writes_every_row_once(
    spark: SparkSession, broker: Standalone, live: BrokerPool, tmp_path: Path
) -> None:
    folder, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    put_rows(folder, 0)
    options = {"deliveryGuarantee": "transactional", "producerGroup": "eos"}
    run_to_end(stream(rows_of(spark, folder), broker.namesrv_addr, checkpoint, "eos", **options))
    forget_last_commit(checkpoint)
    put_rows(folder, 1)
    run_to_end(stream(rows_of(spark, folder), broker.namesrv_addr, checkpoint, "eos", **options))
    assert Counter(message.body for message in seen(live, "eos")) == wanted(0, 1)
    forget_last_commit(checkpoint)
    run_to_end(stream(rows_of(spark, folder), broker.namesrv_addr, checkpoint, "eos", **options))
    assert Counter(message.body for message in seen(live, "eos")) == wanted(0, 1)


def test_rows_of_a_batch_that_runs_again_can_be_reported_by_their_keys(
    spark: SparkSession, broker: Standalone, live: BrokerPool, tmp_path: Path
) -> None:
    folder, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    put_rows(folder, 0)
    for _ in range(2):
        run_to_end(stream(rows_of(spark, folder), broker.namesrv_addr, checkpoint, "twice"))
        forget_last_commit(checkpoint)
    found = seen(live, "twice")
    assert Counter(message.body for message in found) == wanted(0) + wanted(0)
    assert Counter({message.msg_id: message.body for message in found}.values()) == wanted(0)


@pytest.mark.slow
def test_a_broker_may_be_killed_while_a_stream_writes(spark: SparkSession, tmp_path: Path) -> None:
    folder, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    for batch in range(3):
        put_rows(folder, batch)
    namesrv_port, port, _ = free_ports()
    ports = ("--namesrv-port", str(namesrv_port), "--port", str(port))
    with ExitStack() as servers:

        def start() -> Standalone:
            return servers.enter_context(run_standalone(tmp_path / "store", tmp_path, *ports))

        broker = start()
        live = BrokerPool(LiveOptions(name_servers=broker.namesrv_addr))
        options = {"deliveryGuarantee": "transactional", "maxRowsPerSecond": 200, "transactionSettleMs": 500}
        query = stream(rows_of(spark, folder), broker.namesrv_addr, checkpoint, "killed", **options)

        wait_until(lambda: len(seen(live, "killed")) >= ROWS + 20, 300, "rows of the second batch")
        broker.process.kill()
        again = start()
        run_to_end(query)
        assert Counter(message.body for message in seen(live, "killed")) == wanted(0, 1, 2)
        again.process.stop(signal.SIGTERM, 150)
