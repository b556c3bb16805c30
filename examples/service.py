"""A consumer as a service: ``python examples/service.py [HOST:PORT of a name server]``; Ctrl-C or SIGTERM ends it.

Then it takes no more messages, lets its handlers finish, saves how far it is and leaves its group. The handler sends
with a producer, which is closed after the consumer. `deploy/kubernetes/consumer.yaml` runs it in a cluster.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys

import rmqkit
from rmqkit import Producer, PushConsumer, ReceivedMessage

NAME_SERVERS = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("NAMESRV_ADDR", "127.0.0.1:9876")


async def main() -> None:
    producer = Producer("billing", NAME_SERVERS)
    consumer = PushConsumer("billing", NAME_SERVERS)

    @consumer.on("Orders")
    async def bill(message: ReceivedMessage) -> None:
        await producer.send("Bills", b"bill of order " + message.body)
        print(f"billed order {message.body.decode()}", flush=True)

    await rmqkit.run(producer, consumer)
    print("closed")


logging.basicConfig(level=logging.INFO)
asyncio.run(main())
