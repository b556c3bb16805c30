"""Push consumers that handle each queue in its order. Source: behaviour.md §2.7, §8.10, §9.4."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import msgspec

from rmqkit import ConsumeLater, Message, MessageModel, PushConsumer, ReceivedMessage, Reject, selectors
from rmqkit.protocol import fastjson
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import request
from rmqkit.protocol.schemas.clients import LockBody, LockedQueues
from tests.interop.suite.consuming import (
    Received,
    bodies,
    by_queue,
    committed,
    eventually,
    is_committed,
    queue,
    running_info,
    send,
    send_everywhere,
    until,
)
from tests.interop.suite.scene import Scene


def ordered(scene: Scene, **settings: Any) -> PushConsumer:
    quick = {"suspend_queue_ms": 10, "lock_interval_ms": 500} | settings
    template = scene.push_consumer(**quick)
    return scene.closing(PushConsumer(scene.group, scene.namesrv, settings=template.settings, ordered=True))


async def lock(scene: Scene, client_id: str, code: RequestCode = RequestCode.LOCK_BATCH_MQ) -> bool:
    """Return True if the broker gives the lock of queue 0 to another client of the group."""
    body = LockBody(client_id=client_id, consumer_group=scene.group, queues=[queue(scene)])
    answer = await scene.ask_broker(request(code, body=msgspec.json.encode(body)))
    return code != RequestCode.LOCK_BATCH_MQ or queue(scene) in fastjson.decode_as(answer.payload, LockedQueues).queues


class InOrder(Received):
    """A handler that records the messages of several members. Two handlers in one queue at a time are an error."""

    def __init__(self) -> None:
        super().__init__()
        self.running: set[int] = set()
        self.overlapped: list[str] = []

    async def __call__(self, message: ReceivedMessage) -> None:
        if message.queue_id in self.running:
            self.overlapped.append(message.body.decode())
        self.running.add(message.queue_id)
        await asyncio.sleep(0)
        await super().__call__(message)
        self.running.discard(message.queue_id)


async def test_each_queue_is_handled_in_its_order_one_message_at_a_time(scene: Scene) -> None:
    """behaviour.md §8.10."""
    await scene.create_topic(queues=3)
    await send_everywhere(scene, 3, 20)
    handler = InOrder()
    consumer = ordered(scene)
    consumer.subscribe(scene.topic, "*", handler)
    await consumer.start()
    await handler.at_least(60)
    assert by_queue(handler.messages) == {queue_id: list(range(20)) for queue_id in range(3)}
    assert handler.overlapped == []
    await is_committed(scene, 20)


async def test_queues_are_handled_side_by_side(scene: Scene) -> None:
    """behaviour.md §8.10: one task per queue."""
    await scene.create_topic(queues=2)
    await send_everywhere(scene, 2, 1)
    both = asyncio.Barrier(2)
    consumer = ordered(scene)

    @consumer.on(scene.topic)
    async def handler(message: ReceivedMessage) -> None:
        await both.wait()

    await consumer.start()
    await is_committed(scene, 1, 0)
    await is_committed(scene, 1, 1)


async def test_plain_functions_keep_the_order_as_well(scene: Scene) -> None:
    """behaviour.md §8.10."""
    await scene.create_topic(queues=2)
    await send_everywhere(scene, 2, 10)
    seen: list[ReceivedMessage] = []
    consumer = ordered(scene)
    consumer.subscribe(scene.topic, "*", seen.append)
    await consumer.start()
    await until(lambda: len(seen) == 20, "all messages")
    assert by_queue(seen) == {0: list(range(10)), 1: list(range(10))}


async def test_a_failed_message_is_redelivered_in_place_before_those_that_follow(scene: Scene) -> None:
    """behaviour.md §8.10: SUSPEND_CURRENT_QUEUE_A_MOMENT."""
    await scene.create_topic()
    await send(scene, "0", "1", "2")
    seen: list[tuple[str, int]] = []
    consumer = ordered(scene)

    @consumer.on(scene.topic)
    async def handler(message: ReceivedMessage) -> None:
        seen.append((message.body.decode(), message.reconsume_times))
        if message.body == b"1" and message.reconsume_times < 2:
            raise ValueError("not yet")

    await consumer.start()
    await until(lambda: len(seen) == 5, "all messages")
    assert seen == [("0", 0), ("1", 0), ("1", 1), ("1", 2), ("2", 0)]
    assert (await scene.stored(0, f"%RETRY%{scene.group}")) == []


async def test_a_queue_that_stands_still_does_not_stop_the_others(scene: Scene) -> None:
    """behaviour.md §8.10."""
    await scene.create_topic(queues=2)
    await send_everywhere(scene, 2, 5)
    seen: list[ReceivedMessage] = []
    consumer = ordered(scene)

    @consumer.on(scene.topic)
    async def handler(message: ReceivedMessage) -> None:
        if message.queue_id == 0:
            raise ConsumeLater
        seen.append(message)

    await consumer.start()
    await is_committed(scene, 5, queue_id=1)
    assert by_queue(seen) == {1: list(range(5))}
    assert await committed(scene) <= 0


async def test_a_message_beyond_its_retries_goes_to_the_dead_letters_and_the_queue_moves_on(scene: Scene) -> None:
    """behaviour.md §8.10, §3.3."""
    await scene.create_topic()
    await send(scene, "0", "1", "2")
    seen: list[str] = []
    consumer = ordered(scene, retries_max=2)

    @consumer.on(scene.topic)
    async def handler(message: ReceivedMessage) -> None:
        seen.append(message.body.decode())
        if message.body == b"1":
            raise ValueError("never")

    await consumer.start()
    await until(lambda: seen[-1:] == ["2"], "the last message")
    (dead,) = await scene.stored(1, f"%DLQ%{scene.group}")
    assert seen == ["0", "1", "1", "1", "2"]
    assert (dead.body, dead.properties["RETRY_TOPIC"]) == (b"1", scene.topic)


async def test_an_ordered_handler_gives_a_message_up_at_once(scene: Scene) -> None:
    """behaviour.md §8.10, §3.7."""
    await scene.create_topic()
    seen: list[str] = []
    consumer = ordered(scene)

    @consumer.on(scene.topic)
    async def handler(message: ReceivedMessage) -> None:
        seen.append(message.body.decode())
        if message.body == b"0":
            raise Reject

    await consumer.start()
    (sent, _) = await send(scene, "0", "1")
    (dead,) = await scene.stored(1, f"%DLQ%{scene.group}")
    await until(lambda: seen == ["0", "1"], "the next message")
    assert (dead.msg_id, dead.properties["RETRY_TOPIC"]) == (sent.msg_id, scene.topic)


async def test_ordered_batches_begin_again_where_they_failed(scene: Scene) -> None:
    """behaviour.md §8.10."""
    await scene.create_topic()
    await send(scene, *"01234")
    batches: list[list[str]] = []
    consumer = ordered(scene)

    @consumer.on(scene.topic, batch_max=3)
    async def handler(messages: list[ReceivedMessage]) -> None:
        batches.append(bodies(messages))
        if len(batches) == 1:
            raise ConsumeLater(messages=messages[1:])

    await consumer.start()
    await is_committed(scene, 5)
    assert batches == [["0", "1", "2"], ["1", "2", "3"], ["4"]]


async def test_messages_of_a_sharding_key_are_handled_in_the_order_they_were_sent(scene: Scene) -> None:
    """behaviour.md §7.7, §9.4."""
    await scene.create_topic(queues=4)
    received: defaultdict[str, list[str]] = defaultdict(list)
    consumer = ordered(scene)

    @consumer.on(scene.topic)
    async def handler(message: ReceivedMessage) -> None:
        received[message.properties["__SHARDINGKEY"]].append(message.body.decode())

    await consumer.start()
    sender = await scene.sender()
    for i in range(30):
        key = f"order-{i % 6}"
        await sender.send(
            Message(topic=scene.topic, body=str(i).encode(), sharding_key=key), selector=selectors.by_hash(key)
        )
    await until(lambda: sum(map(len, received.values())) == 30, "all messages")
    assert received == {f"order-{k}": [str(i) for i in range(k, 30, 6)] for k in range(6)}


async def test_the_order_continues_where_a_closed_consumer_stopped(scene: Scene) -> None:
    """behaviour.md §8.10."""
    await scene.create_topic(queues=2)
    await send_everywhere(scene, 2, 5)
    handler = InOrder()
    for total in (10, 20):
        consumer = ordered(scene)
        consumer.subscribe(scene.topic, "*", handler)
        await consumer.start()
        await handler.at_least(total)
        await consumer.close()
        await send_everywhere(scene, 2, 5, first=5)
    assert by_queue(handler.messages) == {0: list(range(10)), 1: list(range(10))}


# -- locks


async def test_the_broker_keeps_the_queue_for_its_consumer(scene: Scene) -> None:
    """behaviour.md §2.7, §8.10: LOCK_BATCH_MQ."""
    await scene.create_topic()
    handler = InOrder()
    consumer = ordered(scene)
    consumer.subscribe(scene.topic, "*", handler)
    await consumer.start()
    await send(scene, "0")
    await handler.at_least(1)
    assert not await lock(scene, "somebody else")
    assert (await running_info(scene)).mq_table[queue(scene)].locked
    assert (await running_info(scene)).properties["PROP_CONSUMEORDERLY"] == "true"


async def test_a_closed_consumer_gives_its_locks_back(scene: Scene) -> None:
    """behaviour.md §8.10: UNLOCK_BATCH_MQ."""
    await scene.create_topic()
    handler = InOrder()
    consumer = ordered(scene)
    consumer.subscribe(scene.topic, "*", handler)
    await consumer.start()
    await send(scene, "0")
    await handler.at_least(1)
    await consumer.close()
    assert await lock(scene, "somebody else")


async def test_a_queue_that_somebody_else_holds_is_taken_when_it_is_free(scene: Scene) -> None:
    """behaviour.md §8.4, §8.10."""
    await scene.create_topic(queues=2)
    handler = InOrder()
    consumer = ordered(scene)
    consumer.subscribe(scene.topic, "*", handler)
    assert await lock(scene, "somebody else")
    await consumer.start()
    await send(scene, "kept", queue_id=0)
    await send(scene, "free", queue_id=1)
    assert await handler.at_least(1) == ["free"]
    assert queue(scene) not in consumer.held_queues()
    await lock(scene, "somebody else", RequestCode.UNLOCK_BATCH_MQ)
    assert await handler.at_least(2) == ["free", "kept"]


async def test_locks_move_to_a_member_that_joins_and_back_when_it_leaves(scene: Scene) -> None:
    """behaviour.md §8.4, §8.10."""
    await scene.create_topic(queues=4)
    handler = InOrder()
    one, two = ordered(scene), ordered(scene)
    for member in (one, two):
        member.subscribe(scene.topic, "*", handler)

    def shares() -> list[int]:
        return [sum(held.topic == scene.topic for held in member.held_queues()) for member in (one, two)]

    await one.start()
    await send_everywhere(scene, 4, 10)
    await handler.at_least(40)
    await two.start()
    await send_everywhere(scene, 4, 10, first=10)
    await until(lambda: shares() == [2, 2], "two queues each")
    await send_everywhere(scene, 4, 10, first=20)
    await handler.at_least(120)
    await two.close()
    await until(lambda: shares()[0] == 4, "every queue at the one that stays")
    await send_everywhere(scene, 4, 10, first=30)
    await handler.at_least(160)
    assert by_queue(handler.messages) == {queue_id: list(range(40)) for queue_id in range(4)}
    assert handler.overlapped == []


async def test_a_message_that_is_tried_again_moves_with_its_queue(scene: Scene) -> None:
    """behaviour.md §8.10: order is kept over failure and change of owner."""
    await scene.create_topic()
    await send(scene, "0", "1", "2")
    stuck, received = Received(), Received()
    one, two = ordered(scene), ordered(scene)

    @one.on(scene.topic)
    async def failing(message: ReceivedMessage) -> None:
        await stuck(message)
        if message.body == b"1":
            raise ValueError("never here")

    two.subscribe(scene.topic, "*", received)
    await one.start()
    await stuck.at_least(3)
    await one.close()
    await two.start()
    assert await received.at_least(2) == ["1", "2"]


async def test_in_broadcasting_order_needs_no_locks(scene: Scene) -> None:
    """behaviour.md §8.10: no broker lock."""
    await scene.create_topic(queues=2)
    await send_everywhere(scene, 2, 10)
    handlers = [InOrder(), InOrder()]
    for number, handler in enumerate(handlers):
        member = ordered(
            scene,
            message_model=MessageModel.BROADCASTING,
            instance_name=f"{scene.name}-{number}",
            offsets_dir=str(scene.peer.work_dir / scene.name),
        )
        member.subscribe(scene.topic, "*", handler)
        await member.start()
    for handler in handlers:
        await handler.at_least(20)
        assert by_queue(handler.messages) == {0: list(range(10)), 1: list(range(10))}
    assert await lock(scene, "somebody else")


async def test_the_lock_of_a_queue_is_renewed_while_its_handler_works(scene: Scene) -> None:
    """behaviour.md §8.10: lock all owned queues periodically."""
    await scene.create_topic()
    begun, release = asyncio.Event(), asyncio.Event()
    consumer = ordered(scene, lock_interval_ms=50)

    @consumer.on(scene.topic)
    async def handler(message: ReceivedMessage) -> None:
        begun.set()
        await release.wait()

    await consumer.start()
    await send(scene, "0")
    await begun.wait()
    first = (await running_info(scene)).mq_table[queue(scene)].last_lock_timestamp
    await eventually(
        lambda: running_info(scene),
        lambda info: info.mq_table[queue(scene)].last_lock_timestamp > first,
        "a later lock",
    )
    release.set()
    await is_committed(scene, 1)
