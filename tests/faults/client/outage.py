"""Sends of a producer with default settings while its broker is killed and restarted.

Only the total time-out is longer, because servers may start slowly on a busy machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.producer.selectors import by_sharding_key
from rmqkit.client.runtime.settings import ProducerSettings
from rmqkit.protocol.message import Message
from tests.patience import TIMEOUT_MS
from tests.waiting import until

__all__ = ["ride_out"]

SENDERS = 5


async def ride_out(namesrv: str, topic: str, outage: Callable[[], Awaitable[None]]) -> None:
    """Send messages one after the other, to any queue and in order to one queue, before, during and after the outage.
    Check that no send fails, that all messages are there (perhaps twice), and that those of the one queue are in
    order."""
    stored: set[str] = set()
    numbers = 0
    is_over = False

    async def send_anywhere(producer: Producer) -> None:
        while not is_over:
            stored.add((await producer.send(Message(topic=topic, body=b"any"))).msg_id)
            await asyncio.sleep(0.005)

    async def send_in_order(producer: Producer) -> None:
        nonlocal numbers
        while not is_over:
            message = Message(topic=topic, body=b"%d" % numbers, sharding_key="one")
            stored.add((await producer.send(message, selector=by_sharding_key)).msg_id)
            numbers += 1
            await asyncio.sleep(0.005)

    settings = ProducerSettings(send_timeout_ms=TIMEOUT_MS)
    async with Producer("PG-outage", namesrv, settings=settings) as producer, asyncio.TaskGroup() as tasks:
        for _ in range(SENDERS):
            tasks.create_task(send_anywhere(producer))
        tasks.create_task(send_in_order(producer))
        await until(lambda: numbers > 20, "messages before the outage")
        await outage()
        before = numbers
        await until(lambda: numbers > before + 20, "messages after it")
        is_over = True
    found: list[tuple[str, bytes]] = []
    async with PullConsumer("CG-outage", namesrv) as reader:
        queues = await reader.queues(topic)
        reader.assign(queues)
        for queue in queues:
            await reader.seek_to_begin(queue)
        async with asyncio.timeout(60):
            while not stored <= {msg_id for msg_id, _ in found}:
                found += [(message.msg_id, message.body) for message in await reader.poll(1)]
    once = dict(found)  # in the order of first appearance
    assert [body for body in once.values() if body != b"any"] == [b"%d" % number for number in range(numbers)]
