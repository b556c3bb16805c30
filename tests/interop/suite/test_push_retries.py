"""Messages whose handler failed: the retry topic, the dead letters. Source: behaviour.md §3.7, §8.8, §8.11."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import pytest

from rmqkit import ConsumeLater, MessageModel, ReceivedMessage, Reject, sync
from tests.interop.suite.consuming import Received, bodies, committed, is_committed, send, until
from tests.interop.suite.scene import Scene

pytestmark = pytest.mark.patient

GROWING_MS = [2000, 3000]
"""The delay levels 3 and 4 of both peers, for the first and second retry."""


class Failing(Received):
    """A handler that records messages and raises for the first ``times`` of each."""

    def __init__(self, error: Exception, times: int = 1) -> None:
        super().__init__()
        self.error = error
        self.times = times

    async def __call__(self, message: ReceivedMessage) -> None:
        await super().__call__(message)
        if sum(one.msg_id == message.msg_id for one in self.messages) <= self.times:
            raise self.error


async def dead_letters(scene: Scene, count: int = 1) -> list[ReceivedMessage]:
    return await scene.stored(count, f"%DLQ%{scene.group}")


async def test_a_failed_message_is_redelivered_under_its_own_topic_and_id(scene: Scene) -> None:
    """behaviour.md §8.11, §3.7."""
    await scene.create_topic()
    handler = Failing(ValueError("no stock"))
    consumer = scene.push_consumer()
    consumer.subscribe(scene.topic, "*", handler)
    await consumer.start()
    await send(scene, "x", tags="TagA", keys=["k"], properties={"a": "b"}, flag=3)
    await handler.at_least(2)
    first, second = handler.messages
    for message in (first, second):
        assert (message.topic, message.body, message.tags, message.keys) == (scene.topic, b"x", "TagA", ["k"])
        assert (message.properties["a"], message.flag, message.msg_id) == ("b", 3, first.msg_id)
    assert [message.reconsume_times for message in handler.messages] == [0, 1]
    assert second.properties["RETRY_TOPIC"] == scene.topic
    assert second.properties["ORIGIN_MESSAGE_ID"] == first.offset_msg_id
    assert second.offset_msg_id != first.offset_msg_id
    await is_committed(scene, 1)
    await is_committed(scene, 1, topic=f"%RETRY%{scene.group}")


async def test_the_delay_grows_from_time_to_time(scene: Scene) -> None:
    """behaviour.md §3.7, §8.11: level 3 + reconsumeTimes."""
    await scene.create_topic()
    handler = Failing(ValueError("no stock"), times=2)
    consumer = scene.push_consumer()
    consumer.subscribe(scene.topic, "*", handler)
    await consumer.start()
    await send(scene, "x")
    await handler.at_least(3)
    stored = [message.store_timestamp for message in handler.messages]
    assert [message.reconsume_times for message in handler.messages] == [0, 1, 2]
    assert all(later - earlier >= least for (earlier, later), least in zip(pairwise(stored), GROWING_MS, strict=True))


async def test_a_handler_chooses_the_delay_by_its_level(scene: Scene) -> None:
    """behaviour.md §8.8: delayLevel from the context."""
    await scene.create_topic()
    levels, begun, again = {b"long": 7, b"short": 1}, {}, {}
    consumer = scene.push_consumer()

    @consumer.on(scene.topic)
    async def handler(message: ReceivedMessage) -> None:
        if message.reconsume_times == 0:
            begun[message.body] = time.time() * 1000
            raise ConsumeLater(levels[message.body])
        again[message.body] = message

    await consumer.start()
    await send(scene, "long", "short")
    await until(lambda: len(again) == 2, "both again")
    assert {body: message.properties["DELAY"] for body, message in again.items()} == {b"long": "7", b"short": "1"}
    assert again[b"long"].store_timestamp >= int(begun[b"long"]) + 4000
    assert again[b"short"].store_timestamp >= int(begun[b"short"]) + 1000


async def test_a_message_is_redelivered_after_the_time_that_the_handler_chose(scene: Scene) -> None:
    """behaviour.md §3.4: the broker's timer delays the retry, to the second; after the last try the message is a dead
    letter.
    """
    await scene.create_topic()
    handler = Failing(ConsumeLater(delay=2), times=99)
    consumer = scene.push_consumer(retries_max=2)
    consumer.subscribe(scene.topic, "*", handler)
    await consumer.start()
    (sent,) = await send(scene, "x", tags="TagA", keys=["k"], properties={"a": "b"})
    (dead,) = await dead_letters(scene)
    assert [message.reconsume_times for message in handler.messages] == [0, 1, 2]
    for before, message in pairwise(handler.messages):
        assert message.store_timestamp - int(before.properties["CONSUME_START_TIME"]) >= 1000
        assert (message.topic, message.body, message.tags, message.keys) == (scene.topic, b"x", "TagA", ["k"])
        assert (message.properties["TIMER_DELAY_MS"], message.properties["a"]) == ("2000", "b")
    assert {message.msg_id for message in (dead, *handler.messages)} == {sent.msg_id}
    assert dead.properties["ORIGIN_MESSAGE_ID"] == sent.offset_msg_id


@pytest.mark.parametrize("reason", [None, "no stock"])
async def test_a_message_for_the_dead_letters_is_there_with_where_it_came_from(
    scene: Scene, reason: str | None
) -> None:
    """behaviour.md §3.7, §8.8: delay level -1; with a reason it goes through the retry topic after its last try."""
    await scene.create_topic()
    handler = Failing(Reject(reason), times=99)
    consumer = scene.push_consumer()
    consumer.subscribe(scene.topic, "*", handler)
    await consumer.start()
    (sent,) = await send(scene, "x", tags="TagA", keys=["k"], properties={"a": "b"})
    (dead,) = await dead_letters(scene)
    assert (dead.topic, dead.body, dead.tags, dead.keys) == (f"%DLQ%{scene.group}", b"x", "TagA", ["k"])
    assert (dead.properties["a"], dead.msg_id) == ("b", sent.msg_id)
    assert (dead.properties["RETRY_TOPIC"], dead.properties["ORIGIN_MESSAGE_ID"]) == (
        scene.topic,
        sent.offset_msg_id,
    )
    assert dead.properties["rmqkit_reason"] == (reason or "its handler gave it up without a reason")
    assert len(handler.messages) == 1


async def test_a_message_that_fails_too_often_ends_in_the_dead_letters(scene: Scene) -> None:
    """behaviour.md §8.11: maxReconsumeTimes."""
    await scene.create_topic()
    handler = Failing(ValueError("never"), times=99)
    consumer = scene.push_consumer(retries_max=1)
    consumer.subscribe(scene.topic, "*", handler)
    await consumer.start()
    (sent,) = await send(scene, "x")
    (dead,) = await dead_letters(scene)
    assert (dead.msg_id, dead.body, dead.properties["RETRY_TOPIC"]) == (sent.msg_id, b"x", scene.topic)
    assert [message.reconsume_times for message in handler.messages] == [0, 1]


async def test_without_retries_the_first_failure_is_the_last(scene: Scene) -> None:
    """behaviour.md §8.11: maxReconsumeTimes 0."""
    await scene.create_topic()
    handler = Failing(ValueError("never"), times=99)
    consumer = scene.push_consumer(retries_max=0)
    consumer.subscribe(scene.topic, "*", handler)
    await consumer.start()
    await send(scene, "x", "y")
    dead = await dead_letters(scene, 2)
    assert sorted(bodies(dead)) == sorted(handler.bodies) == ["x", "y"]


async def test_the_dead_letters_can_be_consumed_like_any_topic(scene: Scene) -> None:
    """behaviour.md §3.7, §8.11: DLQ has no consumer by default."""
    await scene.create_topic()
    consumer = scene.push_consumer(retries_max=0)
    consumer.subscribe(scene.topic, "*", Failing(ValueError("never"), times=99))
    await consumer.start()
    received = Received()
    heir = scene.push_consumer(f"{scene.group}-heir")
    heir.subscribe(f"%DLQ%{scene.group}", "*", received)
    await heir.start()
    await send(scene, "x")
    assert await received.at_least(1) == ["x"]


async def test_a_failure_does_not_hold_up_what_follows(scene: Scene) -> None:
    """behaviour.md §8.8: the offset passes a message that was sent back."""
    await scene.create_topic()
    handler = Failing(ValueError("no stock"))
    consumer = scene.push_consumer()
    consumer.subscribe(scene.topic, "*", handler)
    await consumer.start()
    await send(scene, "0", "1", "2")
    await is_committed(scene, 3)
    assert sorted(await handler.at_least(6)) == ["0", "0", "1", "1", "2", "2"]


async def test_a_failed_batch_is_redelivered_altogether(scene: Scene) -> None:
    """behaviour.md §8.8: RECONSUME_LATER."""
    await scene.create_topic()
    await send(scene, "0", "1", "2")
    seen: list[tuple[int, str]] = []
    consumer = scene.push_consumer()

    @consumer.on(scene.topic, batch_max=3)
    async def handler(messages: list[ReceivedMessage]) -> None:
        seen.extend((message.reconsume_times, message.body.decode()) for message in messages)
        if messages[0].reconsume_times == 0:
            raise ValueError("no stock")

    await consumer.start()
    await until(lambda: len(seen) == 6, "everything twice")
    assert sorted(seen) == [(0, "0"), (0, "1"), (0, "2"), (1, "0"), (1, "1"), (1, "2")]


async def test_of_a_batch_only_the_named_messages_are_redelivered(scene: Scene) -> None:
    """behaviour.md §8.8: ackIndex."""
    await scene.create_topic()
    await send(scene, "0", "1", "2")
    seen: list[tuple[int, str]] = []
    consumer = scene.push_consumer()

    @consumer.on(scene.topic, batch_max=3)
    async def handler(messages: list[ReceivedMessage]) -> None:
        seen.extend((message.reconsume_times, message.body.decode()) for message in messages)
        if messages[0].reconsume_times == 0:
            raise ConsumeLater(1, [message for message in messages if message.body == b"1"])

    await consumer.start()
    await until(lambda: len(seen) == 4, "one of them again")
    assert sorted(seen) == [(0, "0"), (0, "1"), (0, "2"), (1, "1")]
    await is_committed(scene, 1, topic=f"%RETRY%{scene.group}")


async def test_a_failing_function_in_a_thread_has_its_message_redelivered(scene: Scene) -> None:
    """behaviour.md §8.8."""
    await scene.create_topic()
    times: list[int] = []
    consumer = scene.push_consumer()

    @consumer.on(scene.topic)
    def handler(message: ReceivedMessage) -> None:
        times.append(message.reconsume_times)
        if message.reconsume_times == 0:
            raise ConsumeLater(1)

    await consumer.start()
    await send(scene, "x")
    await until(lambda: times == [0, 1], "the second time")


async def test_a_handler_that_is_cancelled_has_failed(scene: Scene) -> None:
    """behaviour.md §8.8."""
    await scene.create_topic()
    handler = Failing(asyncio.CancelledError())  # type: ignore[arg-type]
    consumer = scene.push_consumer()
    consumer.subscribe(scene.topic, "*", handler)
    await consumer.start()
    await send(scene, "x")
    await handler.at_least(2)
    assert [message.reconsume_times for message in handler.messages] == [0, 1]


async def test_a_retried_message_goes_to_any_member_with_any_expression(scene: Scene) -> None:
    """behaviour.md §6.2, §8.3: the retry topic is subscribed with `*`."""
    await scene.create_topic()
    handler = Failing(ConsumeLater(1))
    consumer = scene.push_consumer()
    consumer.subscribe(scene.topic, "a = '1'", handler, expression_type="SQL92")
    await consumer.start()
    await send(scene, "other", properties={"a": "2"})
    await send(scene, "wanted", properties={"a": "1"})
    assert await handler.at_least(2) == ["wanted", "wanted"]


async def test_a_message_that_failed_at_a_closed_member_is_retried_at_another(scene: Scene) -> None:
    """behaviour.md §8.11: the retry topic is the group's."""
    await scene.create_topic()
    handler, later = Failing(ConsumeLater(1), times=99), Received()
    one, two = scene.push_consumer(), scene.push_consumer()
    one.subscribe(scene.topic, "*", handler)
    two.subscribe(scene.topic, "*", later)
    await one.start()
    await send(scene, "x")
    await is_committed(scene, 1)
    await one.close()
    await two.start()
    assert await later.at_least(1) == ["x"]
    assert later.messages[0].reconsume_times == len(handler.messages)


async def test_a_handler_beyond_the_consume_timeout_has_its_message_redelivered(scene: Scene) -> None:
    """behaviour.md §8.8: expired cleaning."""
    await scene.create_topic()
    handled: list[int] = []
    consumer = scene.push_consumer()
    consumer.settings.consume_timeout_minutes = 1 / 120  # type: ignore[assignment] # its unit is too long for a test

    @consumer.on(scene.topic)
    async def handler(message: ReceivedMessage) -> None:
        handled.append(message.reconsume_times)
        if message.reconsume_times == 0:
            await asyncio.Event().wait()

    await consumer.start()
    await send(scene, "x")
    await until(lambda: handled[-1:] == [1], "the second time")
    await is_committed(scene, 1)
    consumer.settings.drain_ms = 0


async def test_in_broadcasting_a_failed_message_is_not_redelivered(scene: Scene) -> None:
    """behaviour.md §8.8: dropped with a warning."""
    await scene.create_topic()
    handler = Failing(ConsumeLater(1), times=99)
    consumer = scene.push_consumer(
        message_model=MessageModel.BROADCASTING,
        offsets_dir=str(scene.peer.work_dir / scene.name),
        instance_name=scene.name,
    )
    consumer.subscribe(scene.topic, "*", handler)
    await consumer.start()
    await send(scene, "0", "1")
    assert await handler.at_least(2) == ["0", "1"]
    await consumer.close()
    assert await committed(scene) == -1
    assert await scene.stored(0, f"%RETRY%{scene.group}") == []


async def test_the_blocking_consumer_retries_and_gives_up_as_the_other(scene: Scene) -> None:
    """behaviour.md §8.11."""
    await scene.create_topic()
    times: list[int] = []
    settings = scene.push_consumer(retries_max=1).settings

    def consume() -> sync.PushConsumer:
        consumer = sync.PushConsumer(scene.group, scene.namesrv, settings=settings)

        @consumer.on(scene.topic)
        def handler(message: ReceivedMessage) -> None:
            times.append(message.reconsume_times)
            raise ConsumeLater(1)

        consumer.start()
        return consumer

    consumer = await asyncio.to_thread(consume)
    try:
        await send(scene, "x")
        (dead,) = await dead_letters(scene)
    finally:
        await asyncio.to_thread(consumer.close)
    assert (dead.body, times) == (b"x", [0, 1])
