"""Each order's events in their order, retried in place: ``python examples/ordered.py [HOST:PORT of a name server]``.

Events of an order have one sharding key and so lie in one queue. An ordered consumer has a queue to itself; when its
handler raises, what follows in the queue waits until the message has been handled.
"""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict

from rmqkit import Producer, PushConsumer, PushConsumerSettings, ReceivedMessage

NAME_SERVERS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876"
SETTINGS = PushConsumerSettings(suspend_queue_ms=100)
EVENTS = ("created", "paid", "packed", "shipped")
ORDERS = 5


async def main() -> None:
    histories: dict[str, list[str]] = defaultdict(list)
    failed: set[str] = set()
    consumer = PushConsumer("warehouse", NAME_SERVERS, settings=SETTINGS, ordered=True)

    @consumer.on("OrderEvents")
    async def follow(message: ReceivedMessage) -> None:
        order, event = message.body.decode().split()
        if event == "packed" and order not in failed:
            failed.add(order)
            raise RuntimeError("no boxes left")  # retried before "shipped" is delivered
        histories[order].append(event)
        if sum(map(len, histories.values())) == ORDERS * len(EVENTS):
            await consumer.close()  # a service runs until SIGTERM instead

    async with Producer("shop", NAME_SERVERS) as producer:
        for event in EVENTS:
            for order in range(ORDERS):
                await producer.send("OrderEvents", f"{order} {event}".encode(), sharding_key=str(order))
    await consumer.run()
    for order in sorted(histories):
        print(f"order {order}: {', '.join(histories[order])}")


asyncio.run(main())
