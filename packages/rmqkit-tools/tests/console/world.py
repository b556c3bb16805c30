"""A small shop's messages for pages to show: topics, groups that keep up, fall behind, fail and are offline.

``python -m tests.console.world HOST:PORT`` fills a cluster and keeps its clients running until Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from collections.abc import AsyncIterator

from rmqkit import Message, Producer, PushConsumer, PushConsumerSettings, ReceivedMessage, StartFrom
from rmqkit.admin import Admin
from rmqkit.client.lite.consumer import LiteConsumer

FIRST = StartFrom.FIRST_OFFSET
TOPICS = {"Orders": 8, "Payments": 4, "Shipping-Events": 4, "Emails": 2, "Empty-Topic": 4}
ORDERS, PAYMENTS, SESSIONS = 60, 20, 130


async def make(admin: Admin) -> None:
    """Create the topics, and the groups that nobody is in."""
    for topic, queues in TOPICS.items():
        await admin.topics.create(topic, read_queues=queues, write_queues=queues)
    attributes = "+message.type=LITE,+lite.topic.expiration=1440"
    await admin.topics.create("Chat-Sessions", read_queues=4, write_queues=4, attributes=attributes)
    await admin.groups.update("chat-answers", {"attributes": {"+lite.bind.topic": "Chat-Sessions"}})
    await admin.topics.create("Invoices", read_queues=4, write_queues=4, attributes="+message.type=FIFO")
    await admin.groups.update("refunds", {"retry_max_times": 0})
    await admin.groups.update("mailer", {})
    await admin.groups.update("disabled-reports", {"consume_enable": False})
    async with asyncio.timeout(60):
        while "Invoices" not in await admin.calls.topic_names():
            await asyncio.sleep(0.05)


def order(number: int) -> Message:
    """An order, as JSON."""
    rng = random.Random(number)
    item = rng.choice(("book", "lamp", "chair", "cable"))
    body = {"order": number, "item": item, "count": rng.randint(1, 5), "price": rng.randint(5, 90), "country": "DE"}
    return Message(
        topic="Orders",
        body=json.dumps(body).encode(),
        tags=rng.choice(("new", "changed", "cancelled")),
        keys=[f"order-{number}"],
        properties={"country": "DE", "amount": str(body["price"])},
    )


@contextlib.asynccontextmanager
async def shop(name_servers: str) -> AsyncIterator[Producer]:
    """Everything running: messages sent, consumers that read them, one that fails, one that is stuck."""
    given_up, handled, stuck = asyncio.Event(), asyncio.Event(), asyncio.Event()
    async with Admin(name_servers) as admin:
        await make(admin)
    settings = PushConsumerSettings(start_from=FIRST, persist_interval_ms=500, drain_ms=0)
    billing = PushConsumer("billing", name_servers, settings=settings)
    once = PushConsumerSettings(start_from=FIRST, persist_interval_ms=500, drain_ms=0, retries_max=0)
    refunds = PushConsumer("refunds", name_servers, settings=once)
    slow = PushConsumer("warehouse", name_servers, settings=settings)
    seen = 0

    @billing.on("Orders")
    async def bill(message: ReceivedMessage) -> None:
        nonlocal seen
        seen += 1
        if seen >= ORDERS:
            handled.set()

    @refunds.on("Payments")
    async def refund(message: ReceivedMessage) -> None:
        if message.queue_id == 0:
            given_up.set()
            raise ValueError("no such account")

    @slow.on("Orders", "new || changed")
    async def pack(message: ReceivedMessage) -> None:
        await stuck.wait()

    answers = LiteConsumer("chat-answers", "Chat-Sessions", name_servers)
    async with Producer("web-shop", name_servers) as producer, billing, refunds, slow, answers:
        await answers.subscribe("session-0001", "session-0003")
        for number in range(ORDERS):
            await producer.send(order(number))
        for number in range(PAYMENTS):
            await producer.send(
                Message(topic="Payments", body=b"<payment id='%d'/>" % number, keys=[f"payment-{number}"])
            )
        await producer.send(Message(topic="Shipping-Events", body=bytes(range(256)), tags="binary"))
        await producer.send(
            Message(topic="Emails", body="Grüße, \u202e<script>alert(1)</script>".encode(), tags="hostile")
        )
        await producer.send(Message(topic="Emails", body=b"later", delay_level=9))
        for number in range(SESSIONS):
            for word in ("Once", "upon", "a", "time")[: 1 + number % 4]:
                message = Message(topic="Chat-Sessions", body=word.encode(), lite_topic=f"session-{number:04}")
                await producer.send(message)
        async with asyncio.timeout(60):
            await handled.wait()
            await given_up.wait()
        try:
            yield producer
        finally:
            stuck.set()


async def main(name_servers: str) -> None:
    async with shop(name_servers) as producer:
        print("the shop is open", flush=True)
        for number in range(ORDERS, 1_000_000):
            await producer.send(order(number))
            await asyncio.sleep(0.2)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
