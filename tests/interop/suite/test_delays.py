"""Messages that come later. Source: behaviour.md §3.4, §3.9, §9.2, §9.3."""

from __future__ import annotations

import time

import pytest

from rmqkit import Message, MessageIllegal, PeerRefused
from rmqkit.protocol.codes import ResponseCode
from tests.interop.suite.scene import Scene

pytestmark = pytest.mark.patient

LEVEL_SECONDS = {1: 1, 2: 2, 4: 3}
LEVEL_MAX = 18
PRECISION_MS = 1000
"""Delivery times are rounded down to this."""


@pytest.mark.parametrize("level", LEVEL_SECONDS)
async def test_a_delay_level_holds_a_message_back_for_its_time(scene: Scene, level: int) -> None:
    """behaviour.md §9.2."""
    await scene.create_topic()
    one = await scene.sent_and_stored(Message(topic=scene.topic, body=b"x", delay_level=level))
    assert one.store_timestamp - one.born_timestamp >= LEVEL_SECONDS[level] * 1000


async def test_a_level_beyond_the_table_is_its_last_one(scene: Scene) -> None:
    """behaviour.md §3.4: level capped at the highest configured."""
    await scene.create_topic()
    one = await scene.sent_and_stored(Message(topic=scene.topic, body=b"x", delay_level=99), delay_level_max=99)
    assert one.store_timestamp - one.born_timestamp >= 4000
    assert one.properties["DELAY"] == str(LEVEL_MAX)


async def test_a_delayed_message_comes_to_the_queue_it_was_sent_to(scene: Scene) -> None:
    """behaviour.md §9.2: REAL_TOPIC and REAL_QID."""
    await scene.create_topic(queues=4)
    producer = await scene.producer()
    queue = (await producer.queues(scene.topic))[2]
    await producer.send(Message(topic=scene.topic, body=b"x", delay_level=1), queue=queue)
    (one,) = await scene.stored(1)
    assert (one.topic, one.queue_id, one.queue_offset) == (scene.topic, 2, 0)
    assert (one.properties["REAL_TOPIC"], one.properties["REAL_QID"]) == (scene.topic, "2")


async def test_a_delayed_message_keeps_what_it_carries(scene: Scene) -> None:
    """behaviour.md §9.2."""
    await scene.create_topic()
    producer = await scene.producer()
    body = b"large enough to be compressed " * 300
    result = await producer.send(
        Message(topic=scene.topic, body=body, tags="A", keys=["k1", "k2"], properties={"a": "ä"}, flag=5, delay_level=1)
    )
    (one,) = await scene.stored(1)
    assert (one.body, one.tags, one.keys, one.properties["a"], one.flag) == (body, "A", ["k1", "k2"], "ä", 5)
    assert one.msg_id == result.msg_id


async def test_messages_of_a_level_keep_their_order(scene: Scene) -> None:
    """behaviour.md §9.2: for each entry in order."""
    await scene.create_topic()
    producer = await scene.producer()
    for i in range(20):
        await producer.send(Message(topic=scene.topic, body=b"%d" % i, delay_level=1))
    assert [one.body for one in await scene.stored(20)] == [b"%d" % i for i in range(20)]


async def test_a_later_message_with_a_lower_level_overtakes(scene: Scene) -> None:
    """behaviour.md §9.2: a queue per level. On a busy machine the send may be too late to overtake: then it is
    repeated.
    """
    await scene.create_topic()
    producer = await scene.producer()
    found: list[bytes] = []
    while found[-3:] != [b"0", b"1", b"4"]:
        for level in (4, 1, 0):
            await producer.send(Message(topic=scene.topic, body=b"%d" % level, delay_level=level))
        found = [one.body for one in await scene.stored(len(found) + 3)]


async def test_a_delayed_message_creates_its_topic_at_once(scene: Scene) -> None:
    """behaviour.md §3.2, §3.4: topics are checked before the delay."""
    one = await scene.sent_and_stored(Message(topic=scene.topic, body=b"x", delay_level=1))
    assert one.topic == scene.topic


# -- times of delivery


async def test_a_message_is_held_back_for_its_milliseconds(scene: Scene) -> None:
    """behaviour.md §9.3: TIMER_DELAY_MS."""
    await scene.create_topic()
    one = await scene.sent_and_stored(Message(topic=scene.topic, body=b"x", delay=2.5))
    assert one.store_timestamp - one.born_timestamp >= 2500 - PRECISION_MS


async def test_a_message_is_held_back_until_its_time(scene: Scene) -> None:
    """behaviour.md §9.3: TIMER_DELIVER_MS."""
    await scene.create_topic()
    at_ms = int(time.time() * 1000) + 2500
    one = await scene.sent_and_stored(Message(topic=scene.topic, body=b"x", deliver_at=at_ms / 1000))
    assert one.store_timestamp >= at_ms - PRECISION_MS


async def test_a_message_whose_time_is_past_comes_at_once(scene: Scene) -> None:
    """behaviour.md §3.4."""
    await scene.create_topic()
    at_ms = int(time.time() * 1000) - 100_000
    producer = await scene.producer()
    await producer.send(Message(topic=scene.topic, body=b"held", delay=300))
    await producer.send(Message(topic=scene.topic, body=b"past", deliver_at=at_ms / 1000))
    assert [one.body for one in await scene.stored(1)] == [b"past"]


async def test_a_time_too_far_away_is_refused_with_the_brokers_words(scene: Scene) -> None:
    """behaviour.md §3.4, §3.5: timerMaxDelaySec, three days."""
    await scene.create_topic()
    producer = await scene.producer()
    with pytest.raises(PeerRefused, match="timer message illegal, the delay time should not be bigger") as refusal:
        await producer.send(Message(topic=scene.topic, body=b"x", delay=345600))
    assert refusal.value.code == ResponseCode.MESSAGE_ILLEGAL


async def test_a_timed_message_keeps_what_it_carries(scene: Scene) -> None:
    """behaviour.md §9.3."""
    await scene.create_topic()
    message = Message(topic=scene.topic, body=b"x", tags="A", keys=["k"], properties={"a": "ä"}, delay=1.5)
    one = await scene.sent_and_stored(message)
    assert (one.topic, one.tags, one.keys, one.properties["a"]) == (scene.topic, "A", ["k"], "ä")


async def test_a_timed_message_is_called_back(scene: Scene) -> None:
    """behaviour.md §3.9."""
    await scene.create_topic()
    producer = await scene.producer()
    sent = [await producer.send(Message(topic=scene.topic, body=b"%d" % i, delay=10)) for i in range(3)]
    assert sent[1].recall_handle is not None
    assert await producer.recall(sent[1].recall_handle) == sent[1].msg_id
    await producer.send(Message(topic=scene.topic, body=b"last", delay=12))
    found: list[bytes] = []
    while b"last" not in found:
        found = [one.body for one in await scene.stored(len(found) + 1)]
    assert sorted(found) == [b"0", b"2", b"last"]


async def test_only_timed_messages_have_a_recall_handle(scene: Scene) -> None:
    """behaviour.md §3.5, §3.9."""
    await scene.create_topic()
    producer = await scene.producer()
    assert (await producer.send(Message(topic=scene.topic, body=b"x"))).recall_handle is None
    assert (await producer.send(Message(topic=scene.topic, body=b"x", delay_level=1))).recall_handle is None
    assert (await producer.send(Message(topic=scene.topic, body=b"x", delay=1.5))).recall_handle


async def test_a_message_that_was_delivered_is_not_called_back(scene: Scene) -> None:
    """behaviour.md §3.9: time not in (now, now + max delay)."""
    await scene.create_topic()
    producer = await scene.producer()
    result = await producer.send(Message(topic=scene.topic, body=b"x", delay=1.5))
    await scene.stored(1)
    assert result.recall_handle is not None
    with pytest.raises(PeerRefused, match="recall failed, timestamp invalid") as refusal:
        await producer.recall(result.recall_handle)
    assert refusal.value.code == ResponseCode.ILLEGAL_OPERATION


async def test_a_text_that_is_no_recall_handle_is_refused_before_anybody_is_asked(scene: Scene) -> None:
    """behaviour.md §3.9; remoting.md §7.6."""
    producer = await scene.producer()
    with pytest.raises(MessageIllegal, match="recall handle"):
        await producer.recall("no handle")
