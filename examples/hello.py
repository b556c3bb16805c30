"""The shortest round trip: ``python examples/hello.py [HOST:PORT of a name server]``."""

from __future__ import annotations

import asyncio
import sys

from rmqkit import Producer, PushConsumer, ReceivedMessage

NAME_SERVERS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876"


async def main() -> None:
    arrived = asyncio.Event()
    consumer = PushConsumer("greeters", NAME_SERVERS)

    @consumer.on("Greetings")
    async def greet(message: ReceivedMessage) -> None:
        print(f"received {message.body.decode()}")
        arrived.set()

    async with Producer("hello", NAME_SERVERS) as producer:
        result = await producer.send("Greetings", b"hello, world")
        print(f"sent: {result.status.name}")
    async with consumer:
        await arrived.wait()


asyncio.run(main())
