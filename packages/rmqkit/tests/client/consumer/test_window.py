"""The number of messages held ready for handlers: few for slow handlers, many for fast ones."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.client.consumer.process_queue import ProcessQueue
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.runtime.settings import HoldLimits, PullConsumerSettings, PushConsumerSettings
from rmqkit.protocol.schemas.clients import MessageQueue
from tests.client.consumer.test_typed_bodies import running
from tests.client.messages import received
from tests.client.peers import until


def queue_with(window: int, messages_max: int = 1000) -> ProcessQueue:
    queue = MessageQueue("T", "b", 0)
    return ProcessQueue(queue, messages_max=messages_max, bytes_max=1 << 20, span_max=2000, window=window)


async def filled(queue: ProcessQueue, count: int) -> tuple[list, asyncio.Task[None]]:
    """Fill a queue; return its messages, and the task that waits for room."""
    messages = queue.put([received(offset) for offset in range(count)])
    waiting = asyncio.create_task(queue.wait_for_room())
    await asyncio.sleep(0)
    return messages, waiting


async def test_there_is_room_again_at_half_of_the_window():
    queue = queue_with(8)
    messages, waiting = await filled(queue, 8)
    for message in messages[:3]:
        queue.remove(message)
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.remove(messages[3])
    await waiting
    assert queue.window == 8


async def test_the_window_doubles_when_handlers_are_done_before_the_next_messages_come():
    queue = queue_with(8)
    messages, waiting = await filled(queue, 8)
    for message in messages:
        queue.remove(message)
    await waiting
    assert queue.window == 16
    queue.put([received(8)])
    queue.remove(queue.lowest(1)[0])
    assert queue.window == 16, "the window was not the limit"


async def test_the_window_stays_when_messages_come_in_time():
    queue = queue_with(8)
    messages, waiting = await filled(queue, 8)
    for message in messages[:4]:
        queue.remove(message)
    await waiting
    more = queue.put([received(offset) for offset in range(8, 12)])
    for message in (*messages[4:], *more):
        queue.remove(message)
    assert queue.window == 8


async def test_no_window_is_larger_than_the_limit():
    queue = queue_with(8, messages_max=12)
    messages, waiting = await filled(queue, 8)
    for message in messages:
        queue.remove(message)
    await waiting
    assert queue.window == 12
    _, waiting = await filled(queue, 12)
    assert not waiting.done()
    waiting.cancel()


@pytest.mark.parametrize(
    ("settings", "window"),
    [
        (PushConsumerSettings(), 40),
        (PushConsumerSettings(handlers_max=3), 6),
        (PushConsumerSettings(handlers_max=1000), 1000),
        (PushConsumerSettings(limits=HoldLimits(held_messages_max=10)), 10),
        (PullConsumerSettings(), 1000),
    ],
)
def test_a_window_starts_with_two_messages_for_each_handler(settings, window):
    assert settings.window_at_start == window


async def test_slow_handlers_hold_little_and_fast_ones_get_everything(tmp_path):
    async with running(tmp_path) as (address, producer):
        (queue, *_) = await producer.queues("Orders")
        for number in range(20):
            await producer.send("Orders", b"%d" % number, queue=queue)
        gate, seen = asyncio.Event(), []
        settings = PushConsumerSettings(handlers_max=3, take_over_pause_ms=0)
        consumer = PushConsumer("CG", address, settings=settings)

        @consumer.on("Orders")
        async def work(message) -> None:
            await gate.wait()
            seen.append(message.body)

        async with consumer:
            await until(lambda: held(consumer) == 6, "two for each handler")
            await asyncio.sleep(30)  # virtual
            assert held(consumer) == 6
            gate.set()
            await until(lambda: len(seen) == 20, "all are handled")


def held(consumer: PushConsumer) -> int:
    return sum(one.held_messages for one in consumer.status().queues)
