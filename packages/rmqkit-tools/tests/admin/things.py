"""Objects for the tests of administration: topics with messages, groups with offsets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rmqkit.admin import Admin
from rmqkit.admin.messages.messages import Sent
from rmqkit.protocol.message import Message
from rmqkit.protocol.message import ReceivedMessage as Received
from rmqkit.protocol.schemas.clients import MessageQueue
from tests.client.peers import SECONDS

BROKERS = ("broker-a", "broker-b")


async def make_topic(admin: Admin, topic: str, brokers: Sequence[str] = BROKERS, queues: int = 2) -> None:
    """Create a topic, and wait until its route is known."""
    for broker in brokers:
        await admin.topics.create(topic, broker=broker, read_queues=queues, write_queues=queues)
    async with asyncio.timeout(SECONDS):
        while {data.broker_name for data in (await admin.calls.route(topic)).broker_datas} != set(brokers):
            admin.calls.forget()
            await asyncio.sleep(0.01)


async def send(admin: Admin, *messages: Message) -> list[Sent]:
    """Send messages to the queues of their topic in turn, and wait until the last one of each queue can be read."""
    sent = []
    queues = [
        MessageQueue(messages[0].topic, data.broker_name, queue_id)
        for data in (await admin.calls.route(messages[0].topic)).queue_datas
        for queue_id in range(data.write_queue_nums)
    ]
    for number, message in enumerate(messages):
        queue = queues[number % len(queues)]
        sent.append(await admin.messages.send(message, broker=queue.broker_name, queue_id=queue.queue_id))
    async with asyncio.timeout(SECONDS):
        for one in sent:
            address = await admin.calls.address(one.broker_name)
            queue = MessageQueue(messages[0].topic, one.broker_name, one.queue_id)
            while await admin.calls.max_offset(address, queue) <= one.queue_offset:
                await asyncio.sleep(0.005)
    return sent


async def find_when_indexed(admin: Admin, topic: str, msg_id: str) -> Received:
    """The message with a unique key, as soon as the index has it."""
    async with asyncio.timeout(SECONDS):
        while not (found := await admin.messages.by_key(topic, msg_id, is_unique=True)):
            await asyncio.sleep(0.005)
    return found[0]
