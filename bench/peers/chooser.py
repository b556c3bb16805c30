"""One client of a messaging system under the loads of `bench/chooser_bench.py`: rmqkit, aiokafka or nats-py.

    python bench/peers/chooser.py KIND ADDRESS SERVER_PIDS MESSAGES BODY_BYTES

All clients run on asyncio's own loop, and wait for the server's acknowledgement of every message. Prints JSON.
"""

import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from rmqkit.client.runtime.settings import Batching

TOPIC, LATENCY_TOPIC = "chooser", "chooser-latency"
IN_FLIGHT = 256
ALONE_SHARE = 0.1
RATE, RATE_SECONDS = 200, 5
TICKS = os.sysconf("SC_CLK_TCK")
START_SECONDS = 120


class Client(Protocol):
    """The client methods that the figures need."""

    async def open(self) -> None:
        """Connect, and create the topics. Raises while the server is not ready."""

    async def send(self, topic: str, body: bytes) -> None:
        """Send one message. Return when the server has it."""

    async def consume(self, topic: str, group: str, take: Callable[[bytes], None]) -> Callable[[], Awaitable[None]]:
        """Pass every message of a topic to ``take``, as a member of a group. Return a function that stops the
        consumer.
        """

    async def close(self) -> None: ...


class Rmqkit:
    auto_batch = False

    def __init__(self, address: str) -> None:
        from rmqkit import Producer, ProducerSettings

        self._address = address
        self._producer = Producer("chooser", address, settings=ProducerSettings(batch=Batching(auto=self.auto_batch)))

    async def open(self) -> None:
        await self._producer.start()
        for topic in (TOPIC, LATENCY_TOPIC):
            await self.send(topic, b"first")

    async def send(self, topic: str, body: bytes) -> None:
        from rmqkit import Message

        await self._producer.send(Message(topic=topic, body=body))

    async def consume(self, topic: str, group: str, take: Callable[[bytes], None]) -> Callable[[], Awaitable[None]]:
        from rmqkit import PushConsumer

        consumer = PushConsumer(group, self._address)

        @consumer.on(topic)
        async def handle(message: Any) -> None:
            take(message.body)

        await consumer.start()
        return consumer.close

    async def close(self) -> None:
        await self._producer.close()


class RmqkitBatching(Rmqkit):
    auto_batch = True


class Kafka:
    def __init__(self, address: str) -> None:
        self._address = address
        self._producer: Any = None

    async def open(self) -> None:
        from aiokafka import AIOKafkaProducer

        self._producer = AIOKafkaProducer(bootstrap_servers=self._address, acks="all")
        await self._producer.start()
        for topic in (TOPIC, LATENCY_TOPIC):
            await self.send(topic, b"first")

    async def send(self, topic: str, body: bytes) -> None:
        await self._producer.send_and_wait(topic, body)

    async def consume(self, topic: str, group: str, take: Callable[[bytes], None]) -> Callable[[], Awaitable[None]]:
        from aiokafka import AIOKafkaConsumer

        consumer = AIOKafkaConsumer(
            topic, bootstrap_servers=self._address, group_id=group, auto_offset_reset="earliest"
        )
        await consumer.start()

        async def run() -> None:
            async for message in consumer:
                take(message.value)

        task = asyncio.create_task(run())

        async def end() -> None:
            task.cancel()
            await consumer.stop()

        return end

    async def close(self) -> None:
        await self._producer.stop()


class Nats:
    def __init__(self, address: str) -> None:
        self._address = address
        self._connection: Any = None
        self._stream: Any = None

    async def open(self) -> None:
        import nats
        from nats.js.api import StorageType, StreamConfig

        self._connection = await nats.connect(f"nats://{self._address}", allow_reconnect=False)
        self._stream = self._connection.jetstream()
        for topic in (TOPIC, LATENCY_TOPIC):
            await self._stream.add_stream(StreamConfig(name=topic, subjects=[topic], storage=StorageType.FILE))
            await self.send(topic, b"first")

    async def send(self, topic: str, body: bytes) -> None:
        await self._stream.publish(topic, body)

    async def consume(self, topic: str, group: str, take: Callable[[bytes], None]) -> Callable[[], Awaitable[None]]:
        from nats.errors import ConnectionClosedError
        from nats.errors import TimeoutError as NothingThere

        subscription = await self._stream.pull_subscribe(topic, durable=group)

        async def run() -> None:
            while True:
                try:
                    messages = await subscription.fetch(IN_FLIGHT, timeout=1)
                except NothingThere:
                    continue
                except ConnectionClosedError:
                    return
                for message in messages:
                    take(message.data)
                    await message.ack()

        task = asyncio.create_task(run())

        async def end() -> None:
            task.cancel()

        return end

    async def close(self) -> None:
        await self._connection.close()


KINDS: dict[str, Callable[[str], Client]] = {
    "rmqkit": Rmqkit,
    "rmqkit-batching": RmqkitBatching,
    "kafka": Kafka,
    "nats": Nats,
}


def server_cpu(pids: list[int]) -> float:
    """Return the CPU seconds that the server's processes have used."""
    used = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        used += int(fields[11]) + int(fields[12])
    return used / TICKS


async def timed(pids: list[int], count: int, work: Awaitable[None]) -> dict[str, float]:
    """Return the rate, and microseconds of CPU per message on both sides."""
    server, own, wall = server_cpu(pids), time.process_time(), time.perf_counter()
    await work
    wall, own, server = time.perf_counter() - wall, time.process_time() - own, server_cpu(pids) - server
    return {
        "messages_per_second": round(count / wall),
        "client_cpu_us": round(own / count * 1e6, 1),
        "server_cpu_us": round(server / count * 1e6, 1),
    }


def percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    """Return median and 99th percentile, in ms."""
    cuts = statistics.quantiles(seconds, n=100)
    return {f"{name}_p50_ms": round(cuts[49] * 1e3, 2), f"{name}_p99_ms": round(cuts[98] * 1e3, 2)}


async def sends(client: Client, body: bytes, count: int, in_flight: int, took: list[float]) -> None:
    """Send ``count`` messages, ``in_flight`` at a time. ``took``: receives the time of each send."""
    left = iter(range(count))

    async def keep_sending() -> None:
        for _ in left:
            since = time.perf_counter()
            await client.send(TOPIC, body)
            took.append(time.perf_counter() - since)

    await asyncio.gather(*(keep_sending() for _ in range(in_flight)))


async def consumed(client: Client, count: int, turn: str) -> None:
    """Read a backlog from its beginning."""
    done, seen = asyncio.Event(), 0

    def take(_: bytes) -> None:
        nonlocal seen
        seen += 1
        if seen >= count:
            done.set()

    end = await client.consume(TOPIC, f"backlog-{turn}", take)
    await done.wait()
    await end()


async def latency(client: Client, body: bytes) -> dict[str, float]:
    """Return the time from before a send to the handler, at a fixed rate."""
    took: list[float] = []
    arrived, done = asyncio.Event(), asyncio.Event()

    def take(data: bytes) -> None:
        arrived.set()
        if data[:1] == b"t":
            took.append(time.perf_counter() - float(data[1:25]))
            if len(took) == RATE * RATE_SECONDS:
                done.set()

    end = await client.consume(LATENCY_TOPIC, "latency", take)
    await arrived.wait()
    started = time.perf_counter()
    for number in range(RATE * RATE_SECONDS):
        await asyncio.sleep(max(0.0, started + number / RATE - time.perf_counter()))
        stamp = f"t{time.perf_counter():024.9f}".encode()
        await client.send(LATENCY_TOPIC, stamp + body[len(stamp) :])
    await done.wait()
    await end()
    return percentiles("end_to_end", took)


async def main() -> None:
    kind, address, pids_text, count_text, body_text = sys.argv[1:]
    pids, count = [int(pid) for pid in pids_text.split(",")], int(count_text)
    body = random.Random(1).randbytes(int(body_text))
    client, until = KINDS[kind](address), time.monotonic() + START_SECONDS
    while True:
        try:
            await client.open()
            break
        except Exception:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.02)
            client = KINDS[kind](address)
    print(f"ready {time.time()}", flush=True)
    sys.stdin.readline()
    alone, together = list[float](), list[float]()
    alone_count = int(count * ALONE_SHARE)
    figures: dict[str, Any] = {}
    figures["one at a time"] = await timed(pids, alone_count, sends(client, body, alone_count, 1, alone))
    figures["one at a time"] |= percentiles("acknowledged", alone)
    figures[f"{IN_FLIGHT} in flight"] = await timed(pids, count, sends(client, body, count, IN_FLIGHT, together))
    figures["backlog"] = await timed(pids, count, consumed(client, count, str(os.getpid())))
    figures[f"end to end at {RATE}/s"] = await latency(client, body)
    await client.close()
    print(json.dumps(figures), flush=True)
    os._exit(0)  # do not measure the clients' work at the end of an interpreter


if __name__ == "__main__":
    asyncio.run(main())
