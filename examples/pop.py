"""Jobs that any number of workers share: ``python examples/pop.py [HOST:PORT of a name server]``.

Nobody owns a queue: a worker has a message for some time, and unless it acknowledges it in that time somebody else gets
it. Works with Apache's brokers since 5.0, too.
"""

from __future__ import annotations

import asyncio
import sys
import time

from rmqkit import (
    ConsumeLater,
    NoRoute,
    PopConsumer,
    Popping,
    Producer,
    PushConsumerSettings,
    ReceivedMessage,
)

NAME_SERVERS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876"
FIRST = PushConsumerSettings(pop=Popping(invisible_ms=10_000))
TOPIC = f"Jobs{time.time_ns()}"


async def first_of(consumer: PopConsumer) -> list[ReceivedMessage]:
    """Pop messages of a new topic. It takes a moment until the name servers know the topic."""
    while True:
        try:
            return await consumer.pop(TOPIC, wait=5)
        except NoRoute:
            await asyncio.sleep(0.1)


async def main() -> None:
    async with (
        Producer("office", NAME_SERVERS) as producer,
        PopConsumer("workers", NAME_SERVERS, settings=FIRST) as one,
    ):
        await producer.send(TOPIC, b"by hand")
        (message,) = await first_of(one)
        print("popped:", message.body.decode())
        await one.change_invisible_time(message, 60)  # it takes a while
        await one.ack(message)

        done: asyncio.Queue[ReceivedMessage] = asyncio.Queue()
        two, three = (PopConsumer("workers", NAME_SERVERS, settings=FIRST) for _ in range(2))

        async def work(message: ReceivedMessage) -> None:
            if message.body == b"7" and not message.reconsume_times:
                raise ConsumeLater(delay=1)  # not now
            await done.put(message)

        for worker in (two, three):
            worker.subscribe(TOPIC, "*", work)
        async with two, three:
            await asyncio.gather(*(producer.send(TOPIC, b"%d" % i) for i in range(100)))
            jobs = [await done.get() for _ in range(100)]
        print("jobs done:", len({job.body for job in jobs}))
        print("done again:", [job.body.decode() for job in jobs if job.reconsume_times])


asyncio.run(main())
