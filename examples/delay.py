"""Messages that arrive later: ``python examples/delay.py [HOST:PORT of a name server]``.

Level 1 is one second unless the broker has other levels. A message with ``delay`` or ``deliver_at`` comes at any
second up to three days ahead; brokers before 5.0 have no timer for it.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime, timedelta

from rmqkit import Producer, PushConsumer, ReceivedMessage

NAME_SERVERS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876"


async def main() -> None:
    arrived: asyncio.Queue[str] = asyncio.Queue()
    consumer = PushConsumer("reminders", NAME_SERVERS)

    @consumer.on("Reminders")
    async def remind(message: ReceivedMessage) -> None:
        passed = datetime.now(UTC) - message.born_at
        await arrived.put(f"{message.body.decode()} after {passed.total_seconds():.0f} s")

    async with Producer("office", NAME_SERVERS) as producer, consumer:
        await producer.send("Reminders", b"tea", delay_level=2)
        await producer.send("Reminders", b"meeting", delay_level=1)
        await producer.send("Reminders", b"train", deliver_at=datetime.now(UTC) + timedelta(seconds=2))
        for _ in range(3):
            print(await arrived.get())


asyncio.run(main())
