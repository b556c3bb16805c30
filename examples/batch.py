"""Many messages in few requests: ``python examples/batch.py [HOST:PORT of a name server]``."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator

from rmqkit import Message, Producer, SendManyFailed

NAME_SERVERS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876"


async def readings() -> AsyncIterator[Message]:
    """A source that goes on: a batch waits at most ``batch.delay_ms`` for its next message."""
    for number in range(1000):
        yield Message(topic="Readings", body=b"%d" % number, sharding_key=f"sensor-{number % 5}")
        if number % 100 == 0:
            await asyncio.sleep(0)


async def main() -> None:
    async with Producer("sensors", NAME_SERVERS) as producer:
        results = await producer.send_many(Message(topic="Readings", body=b"%d" % i) for i in range(10_000))
        print(f"{len(results)} messages in {len({result.queue for result in results})} queues")

        results = await producer.send_many(readings())
        first, second = results[0], results[5]  # two readings of one sensor
        print(f"in order: {first.queue == second.queue and first.queue_offset < second.queue_offset}")

        try:
            await producer.send_many([Message(topic="Readings", body=b"ok"), Message(topic="Readings", body=b"")])
        except SendManyFailed as error:
            print(error, Counter(type(outcome).__name__ for outcome in error.results))


asyncio.run(main())
