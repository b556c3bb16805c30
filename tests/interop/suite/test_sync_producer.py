"""The producer for programs without an event loop. Source: behaviour.md §7."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from rmqkit import (
    ClientError,
    Message,
    MessageIllegal,
    ReceivedMessage,
    SendManyFailed,
    SendStatus,
    TransactionState,
    selectors,
    sync,
)
from tests.interop.suite.scene import Scene
from tests.patience import producing

T = TypeVar("T")


async def in_thread(scene: Scene, program: Callable[[sync.Producer], T]) -> T:
    """Run a program with a blocking producer, on a loop different from that of the behaviours."""

    def run() -> T:
        with sync.Producer(scene.group, scene.namesrv, settings=producing()) as producer:
            return program(producer)

    return await asyncio.to_thread(run)


async def test_a_program_without_a_loop_sends(scene: Scene) -> None:
    """behaviour.md §7.6."""
    await scene.create_topic()
    result = await in_thread(scene, lambda producer: producer.send(Message(topic=scene.topic, body=b"x", tags="A")))
    (one,) = await scene.stored(1)
    assert result.status is SendStatus.SEND_OK
    assert (one.body, one.tags, one.msg_id) == (b"x", "A", result.msg_id)


async def test_a_program_without_a_loop_sends_one_way(scene: Scene) -> None:
    """behaviour.md §7.6."""
    await scene.create_topic()
    await in_thread(scene, lambda producer: producer.send_one_way(Message(topic=scene.topic, body=b"x")))
    assert [one.body for one in await scene.stored(1)] == [b"x"]


async def test_a_program_without_a_loop_sends_batches(scene: Scene) -> None:
    """behaviour.md §3.6."""
    await scene.create_topic()
    messages = [Message(topic=scene.topic, body=b"%d" % i) for i in range(5)]
    result = await in_thread(scene, lambda producer: producer.send_batch(messages))
    assert result.msg_id.split(",") == [one.msg_id for one in await scene.stored(5)]


async def test_a_program_without_a_loop_sends_many_from_a_generator(scene: Scene) -> None:
    """behaviour.md §7.8."""
    await scene.create_topic(queues=2)

    def source() -> Iterator[Message]:
        for i in range(300):
            yield Message(topic=scene.topic, body=b"%d" % i)

    results = await in_thread(scene, lambda producer: producer.send_many(source()))
    places = {(one.queue_id, one.queue_offset): one.body for one in await scene.stored(300)}
    assert [places[result.queue.queue_id, result.queue_offset] for result in results] == [b"%d" % i for i in range(300)]


async def test_a_program_without_a_loop_chooses_queues(scene: Scene) -> None:
    """behaviour.md §7.7."""
    await scene.create_topic(queues=3)

    def program(producer: sync.Producer) -> None:
        for queue in producer.queues(scene.topic):
            assert producer.send(Message(topic=scene.topic, body=b"x"), queue=queue).queue == queue
        message = Message(topic=scene.topic, body=b"x", sharding_key="k")
        first, second = (producer.send(message, selector=selectors.by_sharding_key) for _ in range(2))
        assert first.queue == second.queue

    await in_thread(scene, program)
    assert len(await scene.stored(5)) == 5


async def test_any_number_of_threads_use_one_producer(scene: Scene) -> None:
    """behaviour.md §7.6."""
    await scene.create_topic(queues=2)

    def program(producer: sync.Producer) -> set[str]:
        with ThreadPoolExecutor(8) as threads:
            messages = [Message(topic=scene.topic, body=b"%d" % i) for i in range(100)]
            return {result.offset_msg_id for result in threads.map(producer.send, messages)}

    ids = await in_thread(scene, program)
    assert ids == {one.offset_msg_id for one in await scene.stored(100)}
    assert len(ids) == 100


async def test_a_program_without_a_loop_gets_the_same_errors(scene: Scene) -> None:
    """behaviour.md §7.3, §7.12."""
    await scene.create_topic()

    def program(producer: sync.Producer) -> None:
        with pytest.raises(MessageIllegal, match="is empty"):
            producer.send(Message(topic=scene.topic, body=b""))
        with pytest.raises(SendManyFailed, match="1 of 1 messages not sent"):
            producer.send_many([Message(topic=scene.topic, body=b"")])
        with pytest.raises(ClientError, match="is started already"):
            producer.start()
        producer.close()
        with pytest.raises(ClientError, match="is closed: make a new one"):
            producer.send(Message(topic=scene.topic, body=b"x"))

    await in_thread(scene, program)


async def test_a_program_without_a_loop_asks_and_replies(scene: Scene) -> None:
    """behaviour.md §7.10."""
    await scene.create_topic()
    consumer = scene.push_consumer()
    asked = threading.Event()

    def program(producer: sync.Producer) -> bytes:
        @consumer.on(scene.topic)
        def handler(message: ReceivedMessage) -> None:
            asked.set()
            producer.reply(message, message.body.upper())

        asyncio.run_coroutine_threadsafe(consumer.start(), loop).result()
        return producer.request(Message(topic=scene.topic, body=b"x"), timeout=100).body

    loop = asyncio.get_running_loop()
    assert await in_thread(scene, program) == b"X"
    await consumer.close()
    assert asked.is_set()


async def test_a_program_without_a_loop_sends_in_transactions(scene: Scene) -> None:
    """behaviour.md §7.9."""
    await scene.create_topic()

    def execute(message: Message, argument: TransactionState) -> TransactionState:
        return argument

    def program() -> list[TransactionState]:
        with sync.TransactionProducer(
            scene.group, scene.namesrv, settings=producing(), execute=execute, check=lambda message: None
        ) as producer:
            return [
                producer.send_in_transaction(Message(topic=scene.topic, body=state.name.encode()), state).state
                for state in (TransactionState.ROLLBACK, TransactionState.COMMIT)
            ]

    assert await asyncio.to_thread(program) == [TransactionState.ROLLBACK, TransactionState.COMMIT]
    assert [one.body for one in await scene.stored(1)] == [b"COMMIT"]
