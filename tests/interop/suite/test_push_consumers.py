"""Push consumers that handle messages side by side. Source: behaviour.md §8.2, §8.3, §8.6–§8.8, §8.12."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import pytest

from rmqkit import (
    ClientError,
    ClientRuntime,
    Compressing,
    HoldLimits,
    Message,
    Pulling,
    PushConsumer,
    PushConsumerSettings,
    ReceivedMessage,
    SettingsError,
)
from tests.interop.suite.consuming import (
    SECONDS,
    Received,
    bodies,
    client_ids,
    committed,
    eventually,
    held_counts,
    is_committed,
    queue,
    running_info,
    send,
    send_everywhere,
    until,
)
from tests.interop.suite.scene import Scene


async def test_every_message_is_handled_once_and_the_offsets_are_saved_at_the_close(scene: Scene) -> None:
    """behaviour.md §8.3, §5.6."""
    await scene.create_topic(queues=4)
    sent = await send_everywhere(scene, 4, 10)
    received = Received()
    consumer = scene.push_consumer(persist_interval_ms=60_000)
    consumer.subscribe(scene.topic, "*", received)
    await consumer.start()
    await received.at_least(40)
    await consumer.close()
    assert Counter(received.bodies) == dict.fromkeys(sent, 1)
    assert [await committed(scene, queue_id) for queue_id in range(4)] == [10] * 4


async def test_a_decorated_handler_gets_messages_as_they_were_sent(scene: Scene) -> None:
    """behaviour.md §8.8; remoting.md §7.1."""
    await scene.create_topic()
    consumer = scene.push_consumer()
    seen: list[ReceivedMessage] = []

    @consumer.on(scene.topic)
    async def handler(message: ReceivedMessage) -> None:
        seen.append(message)

    await consumer.start()
    (sent,) = await send(scene, "ä", tags="TagA", keys=["k1", "k2"], properties={"colour": "grün"}, flag=7)
    await until(lambda: seen, "the message")
    (one,) = seen
    assert (one.topic, one.body.decode(), one.tags, one.keys, one.flag) == (scene.topic, "ä", "TagA", ["k1", "k2"], 7)
    assert (one.properties["colour"], one.msg_id, one.offset_msg_id) == ("grün", sent.msg_id, sent.offset_msg_id)
    assert (one.broker_name, one.queue_id, one.queue_offset, one.reconsume_times) == (scene.broker_name, 0, 0, 0)


async def test_messages_carry_the_bounds_of_their_queue_and_when_their_handler_began(scene: Scene) -> None:
    """behaviour.md §8.6, §8.8."""
    await scene.create_topic()
    await send(scene, "0", "1", "2")
    received = Received()
    consumer = scene.push_consumer()
    consumer.subscribe(scene.topic, "*", received)
    await consumer.start()
    await received.at_least(3)
    for message in received.messages:
        assert message.properties["MIN_OFFSET"] == "0"
        assert message.queue_offset < int(message.properties["MAX_OFFSET"]) <= 3
        assert int(message.properties["CONSUME_START_TIME"]) > 0


async def test_an_iterated_message_is_consumed_when_the_next_one_is_requested(scene: Scene) -> None:
    """behaviour.md §8.7."""
    await scene.create_topic()
    consumer = scene.push_consumer()
    consumer.subscribe(scene.topic)
    await consumer.start()
    await send(scene, "0", "1")
    seen = []
    async for message in consumer.messages():
        assert await committed(scene) <= len(seen)
        seen.append(message.body.decode())
        if len(seen) == 2:
            break
    await is_committed(scene, 1)
    await consumer.close()
    assert (seen, await committed(scene)) == (["0", "1"], 2)


async def test_a_message_whose_iteration_failed_is_redelivered(scene: Scene) -> None:
    """behaviour.md §8.7."""
    await scene.create_topic()
    await send(scene, "0", "1", "2")
    failing = scene.push_consumer()
    failing.subscribe(scene.topic)

    async def fail_at_the_second() -> None:
        async with failing:
            async for message in failing.messages():
                1 / (message.queue_offset - 1)

    with pytest.raises(ZeroDivisionError):
        await fail_at_the_second()
    received = Received()
    consumer = scene.push_consumer()
    consumer.subscribe(scene.topic, "*", received)
    await consumer.start()
    assert await received.at_least(2) == ["1", "2"]


async def test_plain_functions_handle_messages_in_threads_side_by_side(scene: Scene) -> None:
    """behaviour.md §8.8: the consume threads."""
    await scene.create_topic()
    both, threads = threading.Barrier(2), set[str]()
    consumer = scene.push_consumer()

    @consumer.on(scene.topic)
    def handler(message: ReceivedMessage) -> None:
        both.wait(SECONDS)
        threads.add(threading.current_thread().name)

    await consumer.start()
    await send(scene, "0", "1")
    await is_committed(scene, 2)
    assert len(threads) == 2
    assert threading.current_thread().name not in threads


async def test_no_more_handlers_run_at_a_time_than_the_settings_say(scene: Scene) -> None:
    """behaviour.md §8.2: consumeThreadMax."""
    await scene.create_topic()
    await send(scene, *map(str, range(9)))
    running, seen, release = 0, 0, asyncio.Event()
    consumer = scene.push_consumer(handlers_max=3)

    @consumer.on(scene.topic)
    async def handler(message: ReceivedMessage) -> None:
        nonlocal running, seen
        running += 1
        await release.wait()
        running -= 1
        seen += 1

    await consumer.start()
    await eventually(lambda: held_counts(scene), lambda held: held.get(0) == 6, "two messages held for each handler")
    assert running == 3
    release.set()
    await until(lambda: seen == 9, "all of them")


async def test_a_batch_handler_gets_lists_of_one_queue_and_no_longer_than_requested(scene: Scene) -> None:
    """behaviour.md §8.2, §8.8: consumeMessageBatchMaxSize."""
    await scene.create_topic(queues=2)
    await send_everywhere(scene, 2, 10)
    batches: list[list[ReceivedMessage]] = []
    consumer = scene.push_consumer()

    @consumer.on(scene.topic, batch_max=4)
    async def handler(messages: list[ReceivedMessage]) -> None:
        batches.append(messages)

    await consumer.start()
    await until(lambda: sum(map(len, batches)) == 20, "all messages")
    assert max(map(len, batches)) == 4
    assert all(len({message.queue_id for message in batch}) == 1 for batch in batches)


async def test_several_topics_have_a_handler_each(scene: Scene) -> None:
    """behaviour.md §8.4."""
    other = await scene.create_topic(f"{scene.topic}-other")
    await scene.create_topic()
    here, there = Received(), Received()
    consumer = scene.push_consumer()
    consumer.subscribe(scene.topic, "*", here)
    consumer.subscribe(other, "*", there)
    await consumer.start()
    await send(scene, "here")
    await send(scene, "there", topic=other)
    assert (await here.at_least(1), await there.at_least(1)) == (["here"], ["there"])


async def test_a_topic_subscribed_later_is_read_at_once(scene: Scene) -> None:
    """behaviour.md §8.3: subscribe after start."""
    other = await scene.create_topic(f"{scene.topic}-other")
    await scene.create_topic()
    received = Received()
    consumer = scene.push_consumer(rebalance_interval_ms=60_000)
    consumer.subscribe(scene.topic, "*", received)
    await consumer.start()
    await send(scene, "first")
    await received.at_least(1)
    consumer.subscribe(other, "*", received)
    await send(scene, "second", topic=other)
    assert await received.at_least(2) == ["first", "second"]


async def test_an_unsubscribed_topic_is_given_up(scene: Scene) -> None:
    """behaviour.md §8.3, §8.4."""
    other = await scene.create_topic(f"{scene.topic}-other")
    await scene.create_topic()
    received = Received()
    consumer = scene.push_consumer()
    for topic in (scene.topic, other):
        consumer.subscribe(topic, "*", received)
    await consumer.start()
    await send(scene, "0", topic=other)
    await received.at_least(1)
    consumer.unsubscribe(other)
    await until(lambda: {one.topic for one in consumer.held_queues()} >= {scene.topic}, "the topic that stays")
    await until(lambda: other not in {one.topic for one in consumer.held_queues()}, "the topic without queues")
    assert await committed(scene, topic=other) == 1
    await send(scene, "1", topic=other)
    await send(scene, "here")
    assert await received.at_least(2) == ["0", "here"]
    info = await running_info(scene)
    assert other not in {subscription.topic for subscription in info.subscription_set}


async def test_a_topic_that_does_not_exist_yet_is_read_once_it_does(scene: Scene) -> None:
    """behaviour.md §7.1, §8.4."""
    received = Received()
    consumer = scene.push_consumer()
    consumer.subscribe(scene.topic, "*", received)
    await consumer.start()
    sender = await scene.sender()
    await sender.send(Message(topic=scene.topic, body=b"first of all"))
    assert await received.at_least(1) == ["first of all"]


async def test_queues_that_a_topic_gets_later_are_read(scene: Scene) -> None:
    """behaviour.md §7.1, §8.4: route refresh."""
    await scene.create_topic(queues=1)
    received = Received()
    consumer = scene.push_consumer()
    consumer.subscribe(scene.topic, "*", received)
    await consumer.start()
    await until(lambda: queue(scene) in consumer.held_queues(), "the queue")
    await scene.create_topic(queues=3)
    await send(scene, "in a new queue", queue_id=2)
    assert await received.at_least(1) == ["in a new queue"]
    assert {queue(scene, i) for i in range(3)} <= consumer.held_queues()


async def test_a_waiting_consumer_gets_a_new_message_at_once(scene: Scene) -> None:
    """behaviour.md §4.4, §8.6: long polling."""
    await scene.create_topic()
    received = Received()
    consumer = scene.push_consumer(pull=Pulling(suspend_ms=100_000, timeout_ms=150_000))
    consumer.subscribe(scene.topic, "*", received)
    await consumer.start()
    for i in range(6):
        await send(scene, str(i))
        await until(lambda: len(received.messages) == i + 1, "the next message", 80)  # noqa: B023


async def test_one_client_has_one_consumer_of_a_group(scene: Scene) -> None:
    """behaviour.md §8.3: duplicate refused."""
    await scene.create_topic()
    runtime = ClientRuntime(scene.namesrv, settings=scene.push_consumer().settings)
    await runtime.start()
    try:
        first, second = (PushConsumer(scene.group, runtime=runtime) for _ in range(2))
        for consumer in (first, second):
            consumer.subscribe(scene.topic)
        async with first:
            with pytest.raises(ClientError, match="exists in client"):
                await second.start()
    finally:
        await runtime.close()


async def test_two_groups_in_one_client_get_every_message_each(scene: Scene) -> None:
    """behaviour.md §7.1, §8.4."""
    await scene.create_topic(queues=2)
    runtime = ClientRuntime(scene.namesrv, settings=scene.push_consumer().settings)
    await runtime.start()
    sent = await send_everywhere(scene, 2, 5)
    handlers = [Received(), Received()]
    try:
        consumers = [
            PushConsumer(f"{scene.group}-{i}", runtime=runtime, settings=scene.push_consumer().settings)
            for i in range(2)
        ]
        for consumer, handler in zip(consumers, handlers, strict=True):
            consumer.subscribe(scene.topic, "*", handler)
            await consumer.start()
        for handler in handlers:
            assert set(await handler.at_least(10)) == sent
        for consumer in consumers:
            await consumer.close()
    finally:
        await runtime.close()


async def test_settings_out_of_range_and_reserved_groups_are_refused(scene: Scene) -> None:
    """behaviour.md §8.2."""
    for wrong in (
        {"pull": Pulling(count=0)},
        {"pull": Pulling(count=1025)},
        {"handlers_max": 1001},
        {"limits": HoldLimits(held_messages_max=65_536)},
        {"limits": HoldLimits(span_max=0)},
    ):
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            PushConsumer(scene.group, scene.namesrv, settings=PushConsumerSettings(**wrong))
    consumer = scene.push_consumer()
    with pytest.raises(SettingsError, match="batch_max is 1025"):
        consumer.subscribe(scene.topic, "*", Received(), batch_max=1025)
    for group in ("DEFAULT_CONSUMER", "no good name", "G" * 256):
        with pytest.raises(SettingsError):
            scene.push_consumer(group)


# -- the end


async def test_closing_waits_for_the_handler_at_work_and_saves_its_offset(scene: Scene) -> None:
    """behaviour.md §8.8, §8.15."""
    await scene.create_topic()
    begun, release, seen = asyncio.Event(), asyncio.Event(), []
    consumer = scene.push_consumer(persist_interval_ms=60_000)

    @consumer.on(scene.topic)
    async def handler(message: ReceivedMessage) -> None:
        begun.set()
        await release.wait()
        seen.append(message)

    await consumer.start()
    await send(scene, "0")
    await begun.wait()
    closing = asyncio.create_task(consumer.close())
    assert await committed(scene) <= 0  # the broker has no offset yet, and time passes
    assert not closing.done()
    release.set()
    await closing
    assert (bodies(seen), await committed(scene)) == (["0"], 1)


async def test_a_handler_that_outlasts_the_close_has_its_message_redelivered(scene: Scene) -> None:
    """behaviour.md §8.2, §8.8: awaitTerminationMillisWhenShutdown."""
    await scene.create_topic()
    begun, cancelled = asyncio.Event(), asyncio.Event()
    slow = scene.push_consumer(drain_ms=50)

    @slow.on(scene.topic)
    async def handler(message: ReceivedMessage) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    await slow.start()
    await send(scene, "0")
    await begun.wait()
    await slow.close()
    assert cancelled.is_set()
    received = Received()
    consumer = scene.push_consumer()
    consumer.subscribe(scene.topic, "*", received)
    await consumer.start()
    assert await received.at_least(1) == ["0"]


async def test_a_closed_consumer_has_left_its_group(scene: Scene) -> None:
    """behaviour.md §8.15: UNREGISTER_CLIENT."""
    await scene.create_topic()
    consumer = scene.push_consumer()
    consumer.subscribe(scene.topic, "*", Received())
    await consumer.start()
    await eventually(lambda: client_ids(scene), lambda ids: len(ids) == 1, "one member")
    await consumer.close()
    await eventually(lambda: client_ids(scene), lambda ids: not ids, "an empty group")
    with pytest.raises(ClientError, match="closed"):
        await consumer.start()


async def test_a_handler_may_close_its_own_consumer(scene: Scene) -> None:
    """behaviour.md §8.15."""
    await scene.create_topic()
    consumer = scene.push_consumer()

    @consumer.on(scene.topic)
    async def handler(message: ReceivedMessage) -> None:
        await consumer.close()

    await consumer.start()
    await eventually(lambda: client_ids(scene), lambda ids: len(ids) == 1, "one member")
    await send(scene, "the last one")
    await eventually(lambda: client_ids(scene), lambda ids: not ids, "an empty group")
    assert await committed(scene) == 1


# -- pausing


async def test_a_paused_consumer_takes_nothing_in_until_it_is_resumed(scene: Scene) -> None:
    """behaviour.md §8.12."""
    await scene.create_topic()
    paused, other = Received(), Received()
    consumer, witness = scene.push_consumer(), scene.push_consumer(f"{scene.group}-witness")
    consumer.subscribe(scene.topic, "*", paused)
    witness.subscribe(scene.topic, "*", other)
    for one in (consumer, witness):
        await one.start()
    await send(scene, "0")
    await paused.at_least(1)
    consumer.pause()
    await send(scene, "1", "2")
    await other.at_least(3)
    assert paused.bodies == ["0"]
    consumer.resume()
    assert await paused.at_least(3) == ["0", "1", "2"]


async def test_a_queue_paused_by_name_leaves_the_others_flowing(scene: Scene) -> None:
    """behaviour.md §8.12, §8.14."""
    await scene.create_topic(queues=2)
    received = Received()
    consumer = scene.push_consumer()
    consumer.subscribe(scene.topic, "*", received)
    await consumer.start()
    await until(lambda: queue(scene) in consumer.held_queues(), "the queue")
    consumer.pause(queue(scene, 0))
    await send(scene, "0", queue_id=0)
    await send(scene, "1", queue_id=1)
    assert await received.at_least(1) == ["1"]
    consumer.resume(queue(scene, 0))
    assert await received.at_least(2) == ["1", "0"]


async def test_what_is_held_when_a_consumer_pauses_is_still_handled(scene: Scene) -> None:
    """behaviour.md §8.12: cached messages are still consumed."""
    await scene.create_topic()
    await send(scene, "0", "1")
    release, seen = asyncio.Event(), []
    consumer = scene.push_consumer(handlers_max=1)

    @consumer.on(scene.topic)
    async def handler(message: ReceivedMessage) -> None:
        await release.wait()
        seen.append(message)

    await consumer.start()
    await eventually(lambda: held_counts(scene), lambda held: held.get(0) == 2, "two messages held")
    consumer.pause()
    release.set()
    await until(lambda: len(seen) == 2, "what was held")
    assert bodies(seen) == ["0", "1"]


# -- flow control


class Stuck:
    """A handler that holds the messages of queue 0 until `release`. Messages of queue 1 show that time passes."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.seen: list[str] = []
        self.passing: list[str] = []

    async def __call__(self, message: ReceivedMessage) -> None:
        if message.queue_id == 1:
            self.passing.append(message.body.decode())
            return
        await self.release.wait()
        self.seen.append(message.body.decode())


async def held_when_full(scene: Scene, stuck: Stuck, count: int) -> int:
    """Wait until ``count`` messages of queue 0 are held and one more pull is done. Return the number of held
    messages.
    """
    await eventually(lambda: held_counts(scene), lambda held: held.get(0, 0) >= count, f"{count} messages held")
    await send(scene, "time passes", queue_id=1)
    await until(lambda: stuck.passing, "a message in the other queue")
    return (await held_counts(scene))[0]


async def test_no_more_messages_of_a_queue_are_held_than_the_settings_say(scene: Scene) -> None:
    """behaviour.md §8.6: pullThresholdForQueue."""
    await scene.create_topic(queues=2)
    await send(scene, *map(str, range(30)))
    stuck = Stuck()
    consumer = scene.push_consumer(limits=HoldLimits(held_messages_max=8), pull=Pulling(count=3))
    consumer.subscribe(scene.topic, "*", stuck)
    await consumer.start()
    assert await held_when_full(scene, stuck, 8) == 9  # the third pull of three was allowed with six
    stuck.release.set()
    await until(lambda: len(stuck.seen) == 30, "all of them")


async def test_no_more_bytes_of_a_queue_are_held_than_the_settings_say(scene: Scene) -> None:
    """behaviour.md §8.6: pullThresholdSizeForQueue."""
    await scene.create_topic(queues=2)
    producer = await scene.producer(compression=Compressing(body_bytes_min=1 << 30))
    for _ in range(8):
        await producer.send(Message(topic=scene.topic, body=b"x" * 300_000), queue=queue(scene))
    stuck = Stuck()
    consumer = scene.push_consumer(limits=HoldLimits(held_mib_max=1), pull=Pulling(count=1))
    consumer.subscribe(scene.topic, "*", stuck)
    await consumer.start()
    assert await held_when_full(scene, stuck, 4) == 4  # 1,200,000 bytes are more than a MiB, 900,000 are not
    stuck.release.set()
    await until(lambda: len(stuck.seen) == 8, "all of them")


async def test_the_limit_of_a_topic_is_shared_by_its_queues(scene: Scene) -> None:
    """behaviour.md §8.3: pullThresholdForTopic."""
    await scene.create_topic(queues=2)
    await send(scene, *map(str, range(12)))
    stuck = Stuck()
    consumer = scene.push_consumer(limits=HoldLimits(topic_messages_max=6), pull=Pulling(count=1))
    consumer.subscribe(scene.topic, "*", stuck)
    await consumer.start()
    assert await held_when_full(scene, stuck, 3) == 3
    stuck.release.set()
    await until(lambda: len(stuck.seen) == 12, "all of them")


async def test_a_stuck_message_holds_the_offset_back_and_then_the_pulling(scene: Scene) -> None:
    """behaviour.md §8.6, §8.7: consumeConcurrentlyMaxSpan."""
    await scene.create_topic(queues=2)
    await send(scene, *map(str, range(20)))
    release, seen, others = asyncio.Event(), [], []
    consumer = scene.push_consumer(limits=HoldLimits(span_max=5), pull=Pulling(count=1))

    @consumer.on(scene.topic)
    async def handler(message: ReceivedMessage) -> None:
        if message.queue_id == 1:
            others.append(message)
            return
        if message.queue_offset == 0:
            await release.wait()
        seen.append(message.queue_offset)

    await consumer.start()
    await until(lambda: len(seen) == 5, "the messages within the span")
    await send(scene, "time passes", queue_id=1)
    await is_committed(scene, 1, queue_id=1)
    await is_committed(scene, 0)  # the offsets of two queues are saved one after the other
    assert sorted(seen) == [1, 2, 3, 4, 5]
    release.set()
    await until(lambda: len(seen) == 20, "all of them")
    await is_committed(scene, 20)
