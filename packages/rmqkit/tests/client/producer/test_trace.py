"""The trace topic. Source: behaviour.md §7.11, §9.7; remoting.md §7.7."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.observe.hooks import ConsumeOutcome, Consumption, Sending, SendOutcome, SendResult, SendStatus
from rmqkit.client.producer import trace as tracing
from rmqkit.client.producer.producer import Producer
from rmqkit.client.producer.trace import MessageTrace
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import ProducerSettings, PushConsumerSettings, StartFrom, Tracing
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_fields
from rmqkit.protocol.compression import decompress
from rmqkit.protocol.message import Message
from rmqkit.protocol.names import TRACE_TOPIC
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.trace import (
    PublishTrace,
    SubscribeAfterTrace,
    SubscribeBeforeTrace,
    TracedType,
    decode_traces,
)
from rmqkit.standalone import Standalone
from tests.client.messages import received
from tests.client.peers import Cluster, refused, stored, until

TRACED = ProducerSettings(trace=Tracing())
REGION = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}
ID = "7F0000010000559700000000000000AB"
DEFAULT = Tracing()


@contextlib.asynccontextmanager
async def running_trace(tracing=DEFAULT):
    """The trace of group G, and the cluster it writes to; the topics are T and the trace topic."""
    async with Cluster() as cluster:
        cluster.topic("T")
        cluster.topic(tracing.topic, queues=1)
        runtime = ClientRuntime(cluster.namesrv)
        trace = MessageTrace(runtime, "G", "PRODUCE", tracing)
        trace.start()
        try:
            yield trace, cluster
        finally:
            await trace.close()
            await runtime.close()


def sent(trace, body=b"1", **outcome):
    """Trace one send."""
    message = Message(topic="T", body=body, keys=["k"])
    result = SendResult(SendStatus.SEND_OK, ID, "offset-id", MessageQueue("T", "broker-0", 0), 0)
    values = {"result": result, "address": "127.0.0.1:1", "tried_ms": SYSTEM_CLOCK.now_ms(), "body_bytes": 1, **outcome}
    end = trace.sending(Sending("G", [message]))
    assert end is not None
    end(SendOutcome(**values))


def written(cluster, topic=TRACE_TOPIC):
    """Keys and records of the trace messages that a broker got."""
    found = []
    for command in cluster.broker.requests:
        if command.code == RequestCode.SEND_MESSAGE_V2:
            fields = decode_fields(command)
            assert fields["b"] == topic
            body = decompress(command.payload, int(fields["f"]))
            found.append((decode_properties(fields["i"].encode())["KEYS"].split(), decode_traces(body)))
    return found


async def test_the_life_of_a_message_is_in_the_trace_topic(tmp_path):
    consumed = asyncio.Event()
    settings = PushConsumerSettings(trace=Tracing(), start_from=StartFrom.FIRST_OFFSET)
    async with Standalone(tmp_path / "store") as cluster:
        namesrv = cluster.namesrv_address
        async with Producer("PG", namesrv, settings=TRACED) as producer:
            result = await producer.send(Message(topic="T", body=b"1", tags="A", keys=["k1", "k2"]))
        consumer = PushConsumer("CG", namesrv, settings=settings)

        @consumer.on("T")
        async def handle(message):
            consumed.set()

        async with consumer:
            await consumed.wait()
        async with PullConsumer("reader", namesrv) as reader:
            traces = await reader.query_messages(TRACE_TOPIC, result.msg_id)
            assert await reader.query_messages(TRACE_TOPIC, "k2") == traces
        publish, before, after = [record for one in traces for record in decode_traces(one.body)]
        assert publish == PublishTrace(
            timestamp=publish.timestamp,
            region_id="DefaultRegion",
            group="PG",
            topic="T",
            msg_id=result.msg_id,
            tags="A",
            keys="k1 k2",
            store_host=cluster.broker_address,
            body_bytes=1,
            cost_ms=publish.cost_ms,
            msg_type=TracedType.NORMAL,
            offset_msg_id=result.offset_msg_id,
            success=True,
        )
        assert isinstance(before, SubscribeBeforeTrace)
        assert isinstance(after, SubscribeAfterTrace)
        assert (before.group, before.msg_id, before.retry_times, before.keys) == ("CG", result.msg_id, 0, "k1 k2")
        assert (after.request_id, after.msg_id, after.success, after.group) == (
            before.request_id,
            result.msg_id,
            True,
            "CG",
        )
        assert all(one.keys == [result.msg_id, "k1", "k2"] for one in traces)


async def test_without_the_setting_nothing_is_written(tmp_path):
    async with Cluster() as cluster:
        cluster.topic("T")
        async with Producer("PG", cluster.namesrv) as producer:
            await producer.send(Message(topic="T", body=b"1"))
        assert [one["b"] for one in cluster.broker.asked(RequestCode.SEND_MESSAGE_V2)] == ["T"]


async def test_acts_go_out_together_when_a_batch_of_them_waits():
    async with running_trace(Tracing(batch_count=3)) as (trace, cluster):
        for _ in range(5):
            sent(trace)
        await until(lambda: len(written(cluster)) == 2, "two messages")
        assert [len(records) for _, records in written(cluster)] == [3, 2]
        assert [keys for keys, _ in written(cluster)] == [[ID, "k"]] * 2


async def test_fewer_acts_wait_for_their_interval(monkeypatch):
    monkeypatch.setattr(tracing, "_FLUSH_INTERVAL_MS", 20.0)
    async with running_trace() as (trace, cluster):
        sent(trace)
        await until(lambda: written(cluster), "the record")


async def test_closing_sends_what_waits():
    async with running_trace() as (trace, cluster):
        sent(trace)
        assert written(cluster) == []
        await trace.close()
        assert len(written(cluster)) == 1


async def test_acts_on_different_topics_go_into_different_messages():
    async with running_trace() as (trace, cluster):
        trace.consuming(Consumption("G", [received(1, properties=REGION)]))
        trace.consuming(Consumption("G", [received(2, topic="U", properties=REGION)]))
        await trace.close()
        assert [keys for keys, _ in written(cluster)] == [["id-1"], ["id-2"]]


async def test_a_trace_topic_of_ones_own_is_written_to():
    async with running_trace(Tracing(topic="Own")) as (trace, cluster):
        sent(trace)
        await trace.close()
        assert len(written(cluster, "Own")) == 1


async def test_the_trace_topic_is_not_traced_itself():
    async with running_trace() as (trace, _):
        assert trace.sending(Sending("G", [Message(topic=TRACE_TOPIC, body=b"1")])) is None
        assert trace.consuming(Consumption("G", [received(1, topic=TRACE_TOPIC, properties=REGION)])) is None


async def test_brokers_and_messages_that_want_no_trace_get_none():
    async with running_trace() as (trace, cluster):
        sent(trace, is_traced=False)
        sent(trace, result=None)
        off = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "false"}
        assert trace.consuming(Consumption("G", [received(1, properties=off)])) is None
        assert trace.consuming(Consumption("G", [received(1)])) is None, "members of a batch have no region"
        await trace.close()
        assert written(cluster) == []


async def test_a_handler_of_many_messages_is_reported_message_by_message():
    async with running_trace() as (trace, cluster):
        messages = [received(i, properties={**REGION, "KEYS": f"key-{i}"}) for i in range(1000)]
        end = trace.consuming(Consumption("G", messages))
        assert end is not None
        end(ConsumeOutcome(error=ValueError("no")))
        await trace.close()
        records = [record for _, some in written(cluster) for record in some]
        assert [type(one) for one in records] == [SubscribeBeforeTrace] * 1000 + [SubscribeAfterTrace] * 1000
        assert len({one.request_id for one in records}) == 1
        assert {one.success for one in records[1000:]} == {False}
        for keys, some in written(cluster):
            assert set(keys) == {word for one in some for word in (one.msg_id, one.keys)}


async def test_a_message_of_the_trace_has_at_most_128_000_bytes():
    async with running_trace(Tracing(batch_count=20)) as (trace, cluster):
        for i in range(20):
            end = trace.sending(Sending("G", [Message(topic="T", body=b"1", tags="t" * 20_000)]))
            result = SendResult(SendStatus.SEND_OK, f"id-{i}", "", MessageQueue("T", "broker-0", 0), 0)
            end(SendOutcome(result=result, address="a:1", tried_ms=SYSTEM_CLOCK.now_ms()))
        await trace.close()
        assert [len(records) for _, records in written(cluster)] == [6, 6, 6, 2]


async def test_what_does_not_fit_is_dropped_counted_and_reported_in_one_line(caplog):
    async with Cluster() as cluster:
        runtime = ClientRuntime(cluster.namesrv)
        trace = MessageTrace(runtime, "G", "PRODUCE", Tracing())
        for _ in range(2148):
            sent(trace)
        assert trace.dropped == 100
        (line,) = caplog.messages
        assert line == "1 trace records of group G were dropped so far: 2048 wait already"
        await trace.close()
        await runtime.close()
        assert trace.dropped == 2148


@pytest.mark.parametrize("missing", ["topic", "broker"])
async def test_sends_succeed_while_the_trace_cannot_be_written(missing, caplog):
    settings = ProducerSettings(trace=Tracing(batch_count=1))
    async with Cluster() as cluster, Producer("PG", cluster.namesrv, settings=settings) as producer:
        cluster.topic("T")
        if missing == "broker":
            cluster.topic(TRACE_TOPIC)
            cluster.broker.answer(
                RequestCode.SEND_MESSAGE_V2,
                lambda command: (
                    refused(ResponseCode.NO_PERMISSION)(command)
                    if cluster.broker.asked(RequestCode.SEND_MESSAGE_V2)[-1]["b"] == TRACE_TOPIC
                    else stored(command)
                ),
            )
        for _ in range(3):
            await producer.send(Message(topic="T", body=b"1"))
        await until(lambda: producer._trace.dropped == 3, "the drops")
    lines = [one for one in caplog.messages if "of group PG" in one]
    assert len(lines) == 2, "the first drop, and the number at the end"
    assert lines[1] == "3 trace records of group PG were not sent"


async def test_a_field_that_the_format_cannot_carry_costs_its_record_alone():
    async with running_trace() as (trace, cluster):
        end = trace.sending(Sending("G", [Message(topic="T", body=b"1", tags="a\x01b")]))
        result = SendResult(SendStatus.SEND_OK, "bad", "", MessageQueue("T", "broker-0", 0), 0)
        end(SendOutcome(result=result, address="a:1", tried_ms=SYSTEM_CLOCK.now_ms()))
        sent(trace)
        await trace.close()
        ((keys, records),) = written(cluster)
        assert (keys, [one.msg_id for one in records]) == ([ID, "k"], [ID])


async def test_the_trace_goes_to_a_broker_that_has_the_topic():
    async with Cluster(brokers=3) as cluster:
        cluster.topic("T", queues=1)
        cluster.routes["T"].queue_datas = cluster.routes["T"].queue_datas[1:2]
        cluster.routes["T"].broker_datas = cluster.routes["T"].broker_datas[1:2]
        cluster.topic(TRACE_TOPIC, queues=2)
        settings = ProducerSettings(trace=Tracing(batch_count=1))
        async with Producer("PG", cluster.namesrv, settings=settings) as producer:
            for _ in range(6):
                await producer.send(Message(topic="T", body=b"1"))
        topics = [[one["b"] for one in broker.asked(RequestCode.SEND_MESSAGE_V2)] for broker in cluster.brokers]
        assert topics[0] == topics[2] == []
        assert topics[1].count(TRACE_TOPIC) == 6
