"""Hooks: notifications of programs about sends and handlers. Source: behaviour.md §7.6."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.client.consumer.consume import ConsumeLater
from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.observe.hooks import Hook
from rmqkit.client.producer.accumulator import SendManyFailed
from rmqkit.client.producer.producer import Producer
from rmqkit.client.producer.selectors import by_sharding_key
from rmqkit.client.producer.transaction import TransactionProducer, TransactionState
from rmqkit.client.runtime.settings import (
    Batching,
    ProducerSettings,
    PullConsumerSettings,
    PushConsumerSettings,
    StartFrom,
)
from rmqkit.errors import ClientError, MessageIllegal, NoRoute, PeerRefused, SendFailed
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_fields, reply
from rmqkit.protocol.ids import RecallHandle, encode_recall_handle
from rmqkit.protocol.message import Message
from rmqkit.protocol.trace import ConsumeReturn
from tests.client.messages import record
from tests.client.peers import Cluster, pulled, refused, stored, until

FIRST = StartFrom.FIRST_OFFSET


class Notes(Hook):
    """A hook that records all notifications and adds properties to sends."""

    def __init__(self, **properties: str) -> None:
        self.properties = properties
        self.sendings = []
        self.sent = []
        self.consumptions = []
        self.consumed = []
        self.ends = []
        self.recalls = []

    def sending(self, sending):
        self.sendings.append(sending)
        sending.properties.update(self.properties)
        return self.sent.append

    def consuming(self, consumption):
        self.consumptions.append(consumption)
        return self.consumed.append

    def transaction_ended(self, end):
        self.ends.append(end)

    def recalled(self, recall):
        self.recalls.append(recall)


async def test_a_send_is_reported_when_it_begins_and_how_it_ended():
    notes = Notes(color="red")
    async with Cluster() as cluster, Producer("PG", cluster.namesrv, hooks=[notes]) as producer:
        cluster.topic("T")
        message = Message(topic="T", body=b"x" * 5000, properties={"size": "large"})
        result = await producer.send(message)
        (sending,), (outcome,) = notes.sendings, notes.sent
        assert (sending.group, sending.messages, sending.is_batch, sending.is_half) == ("PG", [message], False, False)
        assert (outcome.result, outcome.error, outcome.address) == (result, None, cluster.broker.address)
        assert 0 < outcome.body_bytes < 5000, "as sent: compressed"
        assert (outcome.region_id, outcome.is_traced) == ("DefaultRegion", True)
        (sent,) = cluster.broker.asked(RequestCode.SEND_MESSAGE_V2)
        assert "color\x01red" in sent["i"]
        assert "size\x01large" in sent["i"]
        assert message.properties == {"size": "large"}, "the program's message stays as it is"


async def test_a_send_of_several_tries_is_reported_once_with_the_last_broker():
    notes = Notes()
    async with Cluster(brokers=2) as cluster, Producer("PG", cluster.namesrv, hooks=[notes]) as producer:
        cluster.topic("T", queues=1)
        cluster.brokers[0].answer(RequestCode.SEND_MESSAGE_V2, refused(ResponseCode.SYSTEM_BUSY))
        for _ in range(2):
            await producer.send(Message(topic="T", body=b"1"))
        assert cluster.brokers[0].asked(RequestCode.SEND_MESSAGE_V2), "one of them began there"
        assert [one.address for one in notes.sent] == [cluster.brokers[1].address] * 2


async def test_every_way_a_send_fails_is_reported():
    notes = Notes()
    settings = ProducerSettings(retries=0)
    async with Cluster() as cluster, Producer("PG", cluster.namesrv, settings=settings, hooks=[notes]) as producer:
        cluster.topic("T")
        cluster.broker.answer(RequestCode.SEND_MESSAGE_V2, refused(ResponseCode.MESSAGE_ILLEGAL))
        for error, topic, body in (
            (MessageIllegal, "T", b""),
            (NoRoute, "Missing", b"1"),
            (PeerRefused, "T", b"1"),
        ):
            with pytest.raises(error):
                await producer.send(Message(topic=topic, body=body))
        cluster.broker.answer(RequestCode.SEND_MESSAGE_V2, lambda command: None)
        with pytest.raises(SendFailed):
            await producer.send(Message(topic="T", body=b"1"), timeout=0.5)
        with pytest.raises(ClientError, match="the selector chose no queue"):
            await producer.send(Message(topic="T", body=b"1"), selector=lambda queues, message: None)
        cut_off = asyncio.create_task(producer.send(Message(topic="T", body=b"1")))
        await until(lambda: len(cluster.broker.asked(RequestCode.SEND_MESSAGE_V2)) == 3, "a send under way")
        cut_off.cancel()
        await asyncio.wait([cut_off])
    kinds = [MessageIllegal, NoRoute, PeerRefused, SendFailed, ClientError, asyncio.CancelledError]
    assert [type(one.error) for one in notes.sent] == kinds
    assert all(one.result is None for one in notes.sent)


async def test_nothing_is_reported_a_batch_of_nothing(caplog):
    notes = Notes()
    async with Cluster() as cluster, Producer("PG", cluster.namesrv, hooks=[notes]) as producer:
        with pytest.raises(MessageIllegal):
            await producer.send_batch([])
        assert await producer.send_many([]) == []
    assert notes.sendings == []


async def test_a_one_way_send_ends_without_a_result():
    notes = Notes(color="red")
    async with Cluster() as cluster, Producer("PG", cluster.namesrv, hooks=[notes]) as producer:
        cluster.topic("T")
        await producer.send_one_way(Message(topic="T", body=b"1"))
        await until(lambda: cluster.broker.asked(RequestCode.SEND_MESSAGE_V2), "the message")
        (outcome,) = notes.sent
        assert (outcome.result, outcome.error, outcome.address) == (None, None, cluster.broker.address)
        assert "color\x01red" in cluster.broker.asked(RequestCode.SEND_MESSAGE_V2)[0]["i"]


async def test_a_batch_is_one_send_and_each_of_its_messages_has_the_properties():
    notes = Notes(color="red")
    async with Cluster() as cluster, Producer("PG", cluster.namesrv, hooks=[notes]) as producer:
        cluster.topic("T")
        messages = [Message(topic="T", body=b"%d" % i) for i in range(3)]
        result = await producer.send_batch(messages)
        (sending,), (outcome,) = notes.sendings, notes.sent
        assert (sending.is_batch, sending.messages, outcome.result) == (True, messages, result)
        (command,) = [one for one in cluster.broker.requests if one.code == RequestCode.SEND_BATCH_MESSAGE]
        assert command.payload.count(b"color\x01red") == 3
        assert outcome.body_bytes == len(command.payload)


async def test_send_many_reports_every_batch_and_of_messages_that_go_alone():
    notes = Notes(color="red")
    async with Cluster() as cluster, Producer("PG", cluster.namesrv, hooks=[notes]) as producer:
        cluster.topic("T")
        cluster.topic("U")
        messages = [Message(topic=topic, body=b"%d" % i) for i in range(5) for topic in "TU"]
        await producer.send_many([*messages, Message(topic="T", body=b"later", delay_level=1)])
        assert sorted((len(one.messages), one.is_batch) for one in notes.sendings) == [(1, False), (5, True), (5, True)]
        assert [one.error for one in notes.sent] == [None] * 3
        bodies = [one.payload for one in cluster.broker.requests if one.code == RequestCode.SEND_BATCH_MESSAGE]
        assert [body.count(b"color\x01red") for body in bodies] == [5, 5]


async def test_send_many_reports_batches_behind_one_that_failed():
    notes = Notes()
    settings = ProducerSettings(batch=Batching(bytes=1), retries=0)
    async with Cluster() as cluster, Producer("PG", cluster.namesrv, settings=settings, hooks=[notes]) as producer:
        cluster.topic("T", queues=1)
        cluster.broker.answer(RequestCode.SEND_BATCH_MESSAGE, refused(ResponseCode.MESSAGE_ILLEGAL))
        with pytest.raises(SendManyFailed):
            await producer.send_many(
                [Message(topic="T", body=b"1", sharding_key="k") for _ in range(3)], selector=by_sharding_key
            )
        assert len(cluster.broker.asked(RequestCode.SEND_BATCH_MESSAGE)) == 1
        assert [type(one.error) for one in notes.sent] == [PeerRefused] * 3


async def test_hooks_see_transactions_and_their_ends():
    notes = Notes()

    async def execute(message, argument):
        return argument

    async def check(message):
        raise AssertionError("nobody asks")

    async with Cluster() as cluster:
        cluster.topic("T")
        cluster.broker.answer(RequestCode.END_TRANSACTION, lambda command: None)
        async with TransactionProducer("PG", cluster.namesrv, execute=execute, check=check, hooks=[notes]) as producer:
            message = Message(topic="T", body=b"1")
            results = [await producer.send_in_transaction(message, state) for state in TransactionState]
    assert [one.is_half for one in notes.sendings] == [True] * 3
    assert [one.state for one in notes.ends] == ["COMMIT_MESSAGE", "ROLLBACK_MESSAGE", "UNKNOW"]
    assert [one.msg_id for one in notes.ends] == [one.sent.msg_id for one in results]
    assert {(one.group, one.address, one.is_checked) for one in notes.ends} == {("PG", cluster.broker.address, False)}


async def test_recalls_are_reported_when_a_broker_answered():
    notes = Notes()
    handle = encode_recall_handle(RecallHandle("T", "broker-0", 1, "key"))
    async with Cluster() as cluster, Producer("PG", cluster.namesrv, hooks=[notes]) as producer:
        cluster.topic("T")
        cluster.broker.answer(RequestCode.RECALL_MESSAGE, lambda command: reply(command, fields={"msgId": "key"}))
        await producer.recall(handle)
        cluster.broker.answer(RequestCode.RECALL_MESSAGE, refused(ResponseCode.ILLEGAL_OPERATION))
        with pytest.raises(PeerRefused):
            await producer.recall(handle)
    assert [(one.group, one.topic, one.msg_id, type(one.error)) for one in notes.recalls] == [
        ("PG", "T", "key", type(None)),
        ("PG", "T", "key", PeerRefused),
    ]


@pytest.mark.parametrize("is_ordered", [False, True])
async def test_handlers_are_notified_when_they_begin_and_how_they_ended(is_ordered):
    notes = Notes()
    settings = PushConsumerSettings(start_from=FIRST, take_over_pause_ms=0, suspend_queue_ms=10, handlers_max=1)
    async with Cluster() as cluster:
        script(cluster, 3)
        cluster.broker.answer(RequestCode.LOCK_BATCH_MQ, lock_all)
        cluster.broker.answer(RequestCode.UNLOCK_BATCH_MQ, reply)
        cluster.broker.answer(RequestCode.CONSUMER_SEND_MSG_BACK, reply)
        consumer = PushConsumer("CG", cluster.namesrv, settings=settings, ordered=is_ordered, hooks=[notes])

        @consumer.on("T")
        async def handle(message):
            if message.queue_offset == 1 and message.reconsume_times == 0:
                raise ConsumeLater
            if message.queue_offset == 2 and message.reconsume_times == 0:
                raise ValueError("no")

        async with consumer:
            await until(lambda: len(notes.consumed) >= (5 if is_ordered else 3), "the handlers")
    told = [
        (consumption.messages[0].queue_offset, outcome.returned, type(outcome.error))
        for consumption, outcome in zip(notes.consumptions, notes.consumed, strict=True)
    ]
    later = (1, ConsumeReturn.FAILED, ConsumeLater), (2, ConsumeReturn.EXCEPTION, ValueError)
    done = [(offset, ConsumeReturn.SUCCESS, type(None)) for offset in range(3)]
    assert told == ([done[0], later[0], done[1], later[1], done[2]] if is_ordered else [done[0], *later])
    assert {(one.group, one.is_polled) for one in notes.consumptions} == {("CG", False)}


async def test_a_handler_beyond_the_consume_time_out_is_reported_so(monkeypatch):
    notes = Notes()

    class Clock:
        ms = 0.0

        def now_ms(self):
            return 1_700_000_000_000

        def monotonic_ms(self):
            return self.ms

    clock = Clock()
    settings = PushConsumerSettings(start_from=FIRST, take_over_pause_ms=0, consume_timeout_minutes=1)
    async with Cluster() as cluster:
        script(cluster, 1)
        consumer = PushConsumer("CG", cluster.namesrv, settings=settings, clock=clock, hooks=[notes])

        @consumer.on("T")
        async def handle(message):
            clock.ms += 60_000

        async with consumer:
            await until(lambda: notes.consumed, "the handler")
    assert (notes.consumed[0].returned, notes.consumed[0].error) == (ConsumeReturn.TIME_OUT, None)


async def test_polled_and_iterated_messages_are_reported_as_they_are_given_out():
    notes = Notes()
    polling = PullConsumerSettings(start_from=FIRST, take_over_pause_ms=0)
    pushing = PushConsumerSettings(start_from=FIRST, take_over_pause_ms=0)
    async with Cluster() as cluster:
        script(cluster, 2)
        async with PullConsumer("CG", cluster.namesrv, settings=polling, hooks=[notes]) as consumer:
            consumer.subscribe("T")
            assert len(await consumer.poll(10)) == 2
        assert [len(one.messages) for one in notes.consumptions] == [2]
        pushed = PushConsumer("CG2", cluster.namesrv, settings=pushing, hooks=[notes])
        pushed.subscribe("T")
        async with pushed:
            async for message in pushed.messages():
                if message.queue_offset == 1:
                    break
    assert [(one.group, len(one.messages), one.is_polled) for one in notes.consumptions] == [
        ("CG", 2, True),
        ("CG2", 1, True),
        ("CG2", 1, True),
    ]
    assert [one.returned for one in notes.consumed] == [ConsumeReturn.SUCCESS] * 3


async def test_what_hooks_raise_is_logged_and_changes_nothing(caplog):
    class Broken(Hook):
        def sending(self, sending):
            raise ValueError("at the start")

    class BrokenEnd(Hook):
        def sending(self, sending):
            return lambda outcome: 1 / 0

    notes = Notes()
    async with (
        Cluster() as cluster,
        Producer("PG", cluster.namesrv, hooks=[Broken(), BrokenEnd(), notes]) as producer,
    ):
        cluster.topic("T")
        await producer.send(Message(topic="T", body=b"1"))
    assert len(notes.sent) == 1
    assert [one.levelname for one in caplog.records if "hook" in one.message] == ["WARNING"] * 2


async def test_hooks_are_called_in_their_order_and_their_ends_in_the_opposite_one():
    told = []

    class Named(Hook):
        def __init__(self, name):
            self.name = name

        def sending(self, sending):
            told.append(f"{self.name} begins")
            return lambda outcome: told.append(f"{self.name} ends")

    async with Cluster() as cluster, Producer("PG", cluster.namesrv, hooks=[Named("a"), Named("b")]) as producer:
        cluster.topic("T")
        await producer.send(Message(topic="T", body=b"1"))
    assert told == ["a begins", "b begins", "b ends", "a ends"]


async def test_the_broker_says_whether_and_where_traces_are_wanted():
    notes = Notes()
    async with Cluster() as cluster, Producer("PG", cluster.namesrv, hooks=[notes]) as producer:
        cluster.topic("T")

        def answer(command):
            answered = stored(command)
            answered.fields |= {"MSG_REGION": "West", "TRACE_ON": "false"}
            return answered

        cluster.broker.answer(RequestCode.SEND_MESSAGE_V2, answer)
        await producer.send(Message(topic="T", body=b"1"))
    assert [(one.region_id, one.is_traced) for one in notes.sent] == [("West", False)]


def script(cluster: Cluster, count: int) -> None:
    """One queue of topic T with so many messages."""
    cluster.topic("T", queues=1)
    body = b"".join(record(i, MSG_REGION="DefaultRegion", TRACE_ON="true") for i in range(count))

    def answer(command):
        is_first = decode_fields(command)["queueOffset"] == "0" and decode_fields(command)["topic"] == "T"
        return pulled(command, ResponseCode.SUCCESS, count, body) if is_first else None

    cluster.broker.answer(RequestCode.PULL_MESSAGE, answer)


def lock_all(command):
    return reply(command, body=command.body.replace(b'"mqSet"', b'"lockOKMQSet"'))
