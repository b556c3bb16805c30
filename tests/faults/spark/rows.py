"""The numbered rows that a query under kills reads: lines of files, or messages of a topic.

A row is known by the body that the query sends. Both kinds stay some batches ahead of the query.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

from rmqkit.client.observe.hooks import SendStatus
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.settings import ProducerSettings
from rmqkit.errors import RmqError
from rmqkit.protocol.message import Message, ReceivedMessage, read_messages
from rmqkit.spark.broker_pool import Range, broker_pool
from rmqkit.spark.options import LiveOptions
from tests.faults.client.servers import Servers
from tests.faults.spark.servers import ApacheServers, set_queues

__all__ = ["QUEUES", "FileRows", "TopicRows", "messages_of"]

QUEUES = 4
RUN = 100
BATCH = 4 * RUN
AHEAD = 6 * BATCH
PAUSE_SECONDS = 0.1
SOURCE_TOPIC = "Numbers"
SENDING = ProducerSettings(retries=0, send_timeout_ms=5000, route_interval_ms=1000, heartbeat_interval_ms=1000)


class FileRows:
    """Lines of files."""

    source = "text"
    select = ("value body", "concat('k', value) keys")

    def __init__(self, running: Servers | ApacheServers, folder: Path) -> None:
        self.options = {"path": str(folder / "in"), "maxFilesPerTrigger": str(BATCH // RUN)}
        self.sent = 0
        self._folder = folder
        (folder / "in").mkdir()

    async def feed(self, committed: Callable[[], int]) -> None:
        """Write files until the task is cancelled. ``committed`` returns the number of committed batches."""
        while True:
            while self.sent < committed() * BATCH + AHEAD:
                made = self._folder / "made"
                made.write_text("".join(f"{number}\n" for number in range(self.sent, self.sent + RUN)))
                made.rename(self._folder / "in" / f"{self.sent:010d}.txt")
                self.sent += RUN
            await asyncio.sleep(PAUSE_SECONDS)

    def bodies(self) -> tuple[set[bytes], int]:
        """Return the bodies that the query must send, and the number of rows that the source lost."""
        return {b"%d" % number for number in range(self.sent)}, 0


class TopicRows:
    """Messages of a topic. ``sent`` counts the acknowledged messages. A message that was sent again after an error may
    be in the topic twice, so the body that the query sends begins with the queue and the offset."""

    source = "rocketmq"
    select = (
        "concat_ws(' ', queueId, queueOffset, cast(body as string)) body",
        "concat('k', cast(body as string)) keys",
    )

    def __init__(self, running: Servers | ApacheServers, folder: Path) -> None:
        self._namesrv = running.namesrv_addr
        self.options = {
            "nameServer": self._namesrv,
            "subscribe": SOURCE_TOPIC,
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": str(BATCH),
        }
        self.sent = 0
        set_queues(running.broker.address, SOURCE_TOPIC, QUEUES)

    async def feed(self, committed: Callable[[], int]) -> None:
        """Send messages until the task is cancelled. ``committed`` returns the number of committed batches."""
        async with Producer("eos-source", self._namesrv, settings=SENDING) as producer:
            while True:
                while self.sent < committed() * BATCH + AHEAD:
                    await self._send_run(producer)
                await asyncio.sleep(PAUSE_SECONDS)

    async def _send_run(self, producer: Producer) -> None:
        messages = [Message(topic=SOURCE_TOPIC, body=b"%d" % number) for number in range(self.sent, self.sent + RUN)]
        while True:
            try:
                if (await producer.send_batch(messages)).status is SendStatus.SEND_OK:
                    self.sent += RUN
                    return
            except RmqError:
                pass
            await asyncio.sleep(PAUSE_SECONDS)

    def bodies(self) -> tuple[set[bytes], int]:
        """Return the bodies that the query must send, and the number of acknowledged messages that the source lost."""
        found = list(messages_of(self._namesrv, SOURCE_TOPIC))
        lost = set(range(self.sent)) - {int(message.body) for message in found}
        return {b"%d %d %s" % (one.queue_id, one.queue_offset, one.body) for one in found}, len(lost)


def messages_of(namesrv: str, topic: str) -> Iterator[ReceivedMessage]:
    """Yield all messages of a topic."""
    brokers = broker_pool(LiveOptions(name_servers=namesrv))
    for queue, bound in brokers.bounds(brokers.queues([topic])).items():
        for body in brokers.bodies(Range(queue, bound.low, bound.high)):
            yield from read_messages(body)
