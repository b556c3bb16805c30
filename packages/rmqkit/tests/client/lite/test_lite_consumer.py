"""The consumer of lite topics: subscriptions, acks, retries, dead letters, exclusive groups (lite.md §6 to §8)."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from rmqkit import Last, LiteConsumer, Message, Producer
from rmqkit.clock import SystemClock
from rmqkit.errors import MessageIllegal, PeerRefused, SettingsError
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.topics import TopicConfig
from tests.streams.test_streams import Servers

PARENT, GROUP = "LT", "LG"


@pytest.fixture
async def servers(tmp_path):
    async with Servers(tmp_path) as it:
        it.broker.context.topics.put(TopicConfig(PARENT, 4, 4, attributes={"message.type": "LITE"}))
        yield it


@pytest.fixture
async def producer(servers):
    async with Producer("p", servers.address) as it:
        yield it


def consumer(servers, group=GROUP, **options):
    return LiteConsumer(group, PARENT, servers.address, **options)


async def send(producer, name, *bodies):
    return [await producer.send(Message(topic=PARENT, lite_topic=name, body=body.encode())) for body in bodies]


async def taken(member, count, seconds=30):
    """Return messages as they arrive, without an acknowledgement."""
    found = []
    async with asyncio.timeout(seconds):
        async for message in member:
            found.append(message)
            if len(found) == count:
                break
    return found


class ClockAhead(SystemClock):
    """A wall clock that is 20 s ahead."""

    def now_ms(self):
        return super().now_ms() + 20_000


async def test_a_broker_whose_clock_is_ahead_delivers_too_and_is_named_once(tmp_path, caplog):
    async with Servers(tmp_path, ClockAhead()) as servers, Producer("p", servers.address) as producer:
        servers.broker.context.topics.put(TopicConfig(PARENT, 4, 4, attributes={"message.type": "LITE"}))
        async with consumer(servers) as member:
            await member.subscribe("s1")
            await nothing(member, 40)
            await send(producer, "s1", "a")
            assert shown(await taken(member, 1)) == [("s1", "a", 1)]
    assert len([one for one in caplog.records if "broker-a finds pops too late" in one.getMessage()]) == 1


async def nothing(member, seconds=5):
    with pytest.raises(TimeoutError):
        await taken(member, 1, seconds)


def shown(messages):
    return [(one.lite_topic, one.body.decode(), one.delivery_attempt) for one in messages]


async def test_a_send_returns_the_place_in_the_lite_topic(producer):
    results = await send(producer, "s1", "a", "b")
    assert [(one.lite_offset, one.lite_epoch, one.queue.queue_id) for one in results] == [(0, 1, 3), (1, 1, 3)]
    batch = await producer.send_batch([Message(topic=PARENT, lite_topic="s1", body=b"c") for _ in range(3)])
    assert (batch.lite_offset, batch.queue.queue_id) == (2, 3)


@pytest.mark.parametrize(
    "fields",
    [
        {"lite_topic": "a$b"},
        {"lite_topic": ""},
        {"lite_topic": "a", "delay_level": 3},
        {"lite_topic": "a", "priority": 1},
    ],
)
async def test_messages_that_are_refused_before_a_send(producer, fields):
    with pytest.raises(MessageIllegal):
        await producer.send(Message(topic=PARENT, body=b"x", **fields))


async def test_a_batch_has_one_lite_topic(producer):
    with pytest.raises(MessageIllegal, match="a batch has messages of one lite topic"):
        await producer.send_batch([Message(topic=PARENT, lite_topic=name, body=b"x") for name in "ab"])


async def test_many_messages_of_many_lite_topics(servers, producer):
    messages = [Message(topic=PARENT, lite_topic=f"s{i % 7}", body=b"%d" % i) for i in range(70)]
    await producer.send_many(messages)
    async with consumer(servers) as member:
        await member.subscribe(*(f"s{i}" for i in range(7)))
        found = []
        async for message in member:
            found.append(message)
            await message.ack()
            if len(found) == 70:
                break
    for i in range(7):
        assert [int(one.body) for one in found if one.lite_topic == f"s{i}"] == list(range(i, 70, 7))


async def test_messages_arrive_in_order_and_acks_let_the_next_ones_come(servers, producer):
    async with consumer(servers) as member:
        await send(producer, "n1", "m0", "m1")
        await send(producer, "n2", "k0")
        await member.subscribe("n1", "n2")
        found = await taken(member, 3)
        assert sorted(shown(found)) == [("n1", "m0", 1), ("n1", "m1", 1), ("n2", "k0", 1)]
        for message in found:
            await message.ack()
        await send(producer, "n1", "m2")
        assert shown(await taken(member, 1)) == [("n1", "m2", 1)]
        assert member.names == {"n1", "n2"}


async def test_a_nack_and_a_suspension_bring_a_message_back(servers, producer):
    async with consumer(servers) as member:
        await member.subscribe("a")
        await send(producer, "a", "x")
        (message,) = await taken(member, 1)
        await message.nack(2)
        (message,) = await taken(member, 1)
        assert message.delivery_attempt == 2
        await message.suspend(timedelta(seconds=3))
        (message,) = await taken(member, 1)
        assert message.delivery_attempt == 2
        await message.ack()
        await nothing(member)


async def test_a_message_that_fails_too_often_is_a_dead_letter_once(servers, producer):
    async with consumer(servers, invisible_time=5, deliveries_max=3) as member:
        await member.subscribe("dl")
        await send(producer, "dl", "D0", "D1")
        seen = []
        async with asyncio.timeout(60):
            async for message in member:
                seen.append((message.body, message.delivery_attempt))
                if message.body == b"D1" and message.delivery_attempt == 4:
                    await message.ack()
                if message.body == b"D1" and (b"D0", 3) in seen and seen[-1][1] >= 3:
                    await message.ack()
                    break
        await asyncio.sleep(20)
        assert [number for body, number in seen if body == b"D0"] == [1, 2, 3]
        store = servers.broker.context.store
        assert store.max_offset(f"%DLQ%{GROUP}", 0) >= 1
        assert store.max_offset("%LMQ%$LT$dl", 0) == 2


@pytest.mark.parametrize(
    ("start", "expected"), [("first", "01234"), (None, "01234"), (3, "34"), (Last(2), "34"), ("new", "")]
)
async def test_the_start_of_a_group(servers, producer, start, expected):
    await send(producer, "a", *"01234")
    async with consumer(servers) as member:
        await member.subscribe("a", start=start)
        await send(producer, "a", "5")
        found = await taken(member, len(expected) + 1 if start == "new" else len(expected))
        assert "".join(one.body.decode() for one in found) == (expected or "5")


async def test_the_newest_subscriber_of_an_exclusive_group_owns_a_lite_topic(servers, producer):
    options = {"group": "EX", "attributes": {"lite.sub.model": "Exclusive"}}
    async with consumer(servers, **options) as one, consumer(servers, **options) as two:
        await one.subscribe("e1", "e2")
        await two.subscribe("e1")
        await asyncio.sleep(1)
        assert (one.names, one.taken, two.names) == ({"e2"}, ["e1"], {"e1"})
        await send(producer, "e1", "x")
        assert shown(await taken(two, 1)) == [("e1", "x", 1)]
        await asyncio.sleep(100)
        assert (one.names, two.names) == ({"e2"}, {"e1"})


async def test_a_consumer_sends_its_subscriptions_again_after_a_restart_of_the_broker(servers, producer):
    async with consumer(servers) as member:
        await member.subscribe("a")
        await send(producer, "a", "0")
        for message in await taken(member, 1):
            await message.ack()
        await servers.stop_broker()
        await asyncio.sleep(2)
        await servers.start_broker()
        await send(producer, "a", "1")
        assert shown(await taken(member, 1, seconds=60)) == [("a", "1", 1)]


async def test_an_unsubscribed_lite_topic_brings_nothing_more(servers, producer):
    async with consumer(servers) as member:
        await member.subscribe("a")
        await member.unsubscribe("a")
        await send(producer, "a", "0")
        await nothing(member)


async def test_a_group_is_created_for_its_parent_and_not_taken_from_another(servers):
    async with consumer(servers):
        config = servers.broker.context.groups.stored.subscription_group_table[GROUP]
        assert config.attributes == {"lite.bind.topic": PARENT}
    await servers.broker.context.groups.put_shared(
        SubscriptionGroupConfig(group_name="Other", attributes={"lite.bind.topic": "Else"})
    )
    with pytest.raises(SettingsError, match="group Other is bound to topic Else, not to LT"):
        await consumer(servers, group="Other").start()


async def test_names_and_settings_that_are_not_allowed(servers):
    for options in ({"count_max": 33}, {"count_max": 0}):
        with pytest.raises(SettingsError):
            consumer(servers, **options)
    async with consumer(servers) as member:
        with pytest.raises(MessageIllegal):
            await member.subscribe("a b")
        with pytest.raises(PeerRefused, match="quota exceeded"):
            await member.subscribe(*map(str, range(2001)))
        assert member.names == frozenset()
