"""Workers that take jobs as they become free: ``python examples/worker_pool.py [HOST:PORT of a name server]``.

Each worker iterates over the consumer with ``async for``. A job counts as done when its worker asks for the next one;
what a worker had when the process ended is delivered again, to any process of the group.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter

from rmqkit import Message, Producer, PushConsumer

NAME_SERVERS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876"
JOBS, WORKERS = 200, 8


async def main() -> None:
    done: Counter[int] = Counter()
    everything = asyncio.Event()
    consumer = PushConsumer("resizers", NAME_SERVERS)
    consumer.subscribe("Images")

    async def work(worker: int) -> None:
        async for message in consumer.messages():
            await asyncio.sleep(len(message.body) / 10_000)  # the job
            done[worker] += 1
            if done.total() == JOBS:
                everything.set()

    async with Producer("uploads", NAME_SERVERS) as producer:
        await producer.send_many(Message(topic="Images", body=bytes(20 + i)) for i in range(JOBS))
    async with consumer, asyncio.TaskGroup() as workers:
        tasks = [workers.create_task(work(worker)) for worker in range(WORKERS)]
        await everything.wait()
        for task in tasks:
            task.cancel()
    print(f"{done.total()} jobs by {len(done)} workers")


asyncio.run(main())
