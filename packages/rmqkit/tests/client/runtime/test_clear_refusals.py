"""Invalid values are refused at the call that passes them. Unread messages and missing answers are logged once."""

from __future__ import annotations

import asyncio
import logging

import pytest

from rmqkit import (
    ClientError,
    Message,
    MessageIllegal,
    Producer,
    ProducerSettings,
    Pulling,
    PushConsumer,
    PushConsumerSettings,
    SettingsError,
    StartFrom,
)
from rmqkit.client.consumer import push as push_consumer
from rmqkit.protocol.codes import RequestCode
from tests.client.inside import coordinator_of
from tests.client.peers import Cluster, until
from tests.ports import free_port

QUICK = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET, take_over_pause_ms=0, pull=Pulling(error_pause_ms=5))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"properties": {"a": 1}}, "property 'a' is 1: names and values must be text (str)"),
        ({"properties": {1: "a"}}, "property 1 is 'a': names and values must be text (str)"),
        ({"keys": [17]}, "keys [17] must be text (str)"),
        ({"tags": 17}, "tags is 17: it must be text (str)"),
        ({"sharding_key": 17}, "sharding_key is 17: it must be text (str)"),
        ({"delay": -1}, "delay is -1: it must be 0 seconds or more"),
        ({"delay": "5"}, "delay is '5': give seconds or a timedelta"),
        ({"delay": 1, "deliver_at": 2e9}, "delay_level=0, delay=1, deliver_at=2000000000.0: give one, not negative"),
        (
            {"deliver_at": 2e12},
            "deliver_at is 2000000000000.0, not a time in seconds: give a datetime, or seconds since the epoch",
        ),
        (
            {"deliver_at": 1_700_000},
            "deliver_at is 1700000, before 2001: give a datetime, or seconds since the epoch",
        ),
        (
            {"delay_level": 99},
            (
                "message for topic T has delay_level 99: brokers have levels up to 18, give a delay for any time, or "
                "set delay_level_max to their highest level"
            ),
        ),
    ],
)
async def test_a_message_that_cannot_be_meant_is_refused_by_the_send(fields, text):
    async with Cluster() as cluster, Producer("PG", cluster.namesrv) as producer:
        cluster.topic("T")
        with pytest.raises(MessageIllegal) as caught:
            await producer.send(Message(topic="T", body=b"x", **fields))
        assert str(caught.value).removeprefix("message for topic T: ") == text
        assert cluster.broker.asked(RequestCode.SEND_MESSAGE_V2) == []


async def test_brokers_may_have_more_delay_levels():
    settings = ProducerSettings(delay_level_max=20)
    async with Cluster() as cluster, Producer("PG", cluster.namesrv, settings=settings) as producer:
        cluster.topic("T")
        await producer.send(Message(topic="T", body=b"x", delay_level=20))


async def test_times_that_are_none_and_handles_that_are_none_are_refused():
    async with Cluster() as cluster, Producer("PG", cluster.namesrv) as producer:
        cluster.topic("T")
        message = Message(topic="T", body=b"x")
        for send in (producer.send, producer.send_one_way, producer.request):
            with pytest.raises(ClientError, match=r"^timeout is -0.005: it must be 0 seconds or more"):
                await send(message, timeout=-0.005)
        with pytest.raises(MessageIllegal, match=r"^recall_handle is None: pass the recall_handle of the SendResult"):
            await producer.recall(None)


def test_settings_are_checked_where_they_are_made():
    with pytest.raises(SettingsError, match=r"^send_timeout_ms \(sendMsgTimeout\) is -1: it must be at least 1$"):
        ProducerSettings(send_timeout_ms=-1)


def told(caplog, part):
    return [record.getMessage() for record in caplog.records if part in record.getMessage()]


async def test_a_consumer_without_subscription_or_handler_says_so(caplog, monkeypatch):
    monkeypatch.setattr(push_consumer, "_READER_SECONDS", 0.01)
    async with Cluster() as cluster:
        cluster.topic("T")
        async with PushConsumer("CG", cluster.namesrv):
            await until(lambda: told(caplog, "has no subscription"), "the warning")
        assert told(caplog, "has no sub") == [
            "consumer of group CG has no subscription and gets no messages: call subscribe() or on()"
        ]
        consumer = PushConsumer("CG2", cluster.namesrv)
        consumer.subscribe("T")
        async with consumer:
            await until(lambda: told(caplog, "no handler"), "the warning")
        (unread,) = told(caplog, "no handler")
        assert unread.startswith("consumer of group CG2 has no handler for topic T, and nothing iterates messages(): ")
        caplog.clear()
        handling, iterated = PushConsumer("CG3", cluster.namesrv), PushConsumer("CG4", cluster.namesrv)
        handling.subscribe("T", "*", print)
        iterated.subscribe("T")
        async with handling, iterated:
            iterated.messages()
            await until(lambda: not any(task for task in all_named("start of group")), "both have looked")
        assert told(caplog, "has no ") == []


def all_named(part):
    return [task for task in asyncio.all_tasks() if part in task.get_name()]


async def test_a_broker_that_is_away_is_reported_once_and_once_when_it_is_back(caplog):
    caplog.set_level(logging.INFO)
    async with Cluster() as cluster:
        await cluster.broker.stop()
        await cluster.broker.start(port := free_port())
        for topic in ("T", "%RETRY%CG"):
            cluster.topic(topic, queues=16)
        consumer = PushConsumer("CG", cluster.namesrv, settings=QUICK)
        consumer.subscribe("T", "*", print)
        async with consumer:
            await until(lambda: len(cluster.broker.asked(RequestCode.PULL_MESSAGE)) >= 32, "pulls of all queues")
            address = cluster.broker.address
            await cluster.broker.stop()
            loops = coordinator_of(consumer).process_queues.values()
            await until(lambda: sum(one.error is not None for one in loops) == 32, "all pulls have failed")
            assert len(told(caplog, "is down")) == 1
            assert told(caplog, "is down")[0].startswith(f"broker {address} is down, trying again until it is back")
            assert not [
                record.getMessage()
                for record in caplog.records
                if record.levelno >= logging.WARNING and "is down" not in record.getMessage()
            ]
            await cluster.broker.start(port)
            await until(lambda: told(caplog, "is back"), "the broker")
        assert len(told(caplog, f"broker {address} is back after")) == 1
