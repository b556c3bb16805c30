"""Messages of every kind in one broker, their places in its log, and consumers that read all of them.

`BULK_COUNT` messages come from our producer: single ones from many senders at once, and batches; with tags, keys,
properties, large (compressed) bodies. The rare kinds come from a Java program (`java/src/interop/EveryKind.java`).
"""

from __future__ import annotations

import asyncio
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rmqkit import Message, Producer, PullConsumer
from rmqkit.client.observe.hooks import SendStatus
from rmqkit.client.runtime.settings import StartFrom
from rmqkit.store.bulk import DispatchColumns
from rmqkit.store.log.scan import Damage
from rmqkit.store.log.view import LogView
from tests.interop.kit import ApacheKit
from tests.interop.probe import PROBE_HEAP_MB
from tests.interop.replicas import BROKER, POLL_SECONDS, create_topic, message_count
from tests.interop.server_process import wait_until
from tests.patience import TIMEOUT_MS, producing, pulling

BULK_TOPIC = "Bulk"
INNER_BATCH_TOPIC = "BytesInner"
TOPICS = {
    BULK_TOPIC: 8,
    "Answers": 1,
    "Resumed": 2,
    "Bytes": 3,
    "BytesBatch": 2,
    INNER_BATCH_TOPIC: 1,
    f"{'Bytes-long-':x<127}": 1,
    "KindOrder": 4,
    "KindDelay": 2,
    "KindTimer": 2,
    "KindTran": 2,
    "KindRetry": 1,
}
DEAD_TOPIC, FALLBACK_TOPIC, GIVEN_UP_TOPIC = (
    "%DLQ%kinds-retry",
    "%RETRY%kinds-fallback",
    "TRANS_CHECK_MAX_TIME_TOPIC",
)
SYSTEM_TOPICS = (
    "SCHEDULE_TOPIC_XXXX",
    "RMQ_SYS_TRANS_",
    "rmq_sys_",
    "%RETRY%kinds-long",
    "TRANS_CHECK",
    "OFFSET_MOVED",
)
"""Prefixes of topics to which a client cannot subscribe."""

SENDERS = 64
SECONDS_MAX = 400
PRIME = 1000003  # as in PlaceReader.java

Places = dict[tuple[str, int], dict[int, int]]
"""(topic, queue) → queue offset → physical offset."""


@dataclass
class Stored:
    """The content of a log: places, and the number of records by topic and sysFlag."""

    places: Places = field(default_factory=lambda: defaultdict(dict))
    kinds: Counter[tuple[str, int]] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        return sum(len(queue) for queue in self.places.values())

    def of(self, topics: Sequence[str]) -> Places:
        return {queue: offsets for queue, offsets in self.places.items() if queue[0] in topics}

    def readable_topics(self) -> list[str]:
        return sorted({topic for topic, _ in self.places if not topic.startswith(SYSTEM_TOPICS)})


def stored_in(store: Path, end: int) -> Stored:
    """Return the messages below an offset of a log."""
    stored = Stored()
    paths = [path for path in sorted((store / "commitlog").iterdir()) if int(path.name) < end]
    for segment, part in LogView([(path, int(path.name)) for path in paths]).runs():
        if isinstance(part, Damage):
            assert segment.start + part.position >= end, f"{segment.path}: {part}"
            break
        run = DispatchColumns(part)
        flags = run.sys_flags.tolist()
        for topic, queue_id, rows in run.groups():
            stored.kinds.update((topic, flags[row]) for row in rows.tolist())
            offsets, physical = run.queue_offsets[rows].tolist(), run.offsets[rows].tolist()
            counts = run.batch_counts[rows].tolist()
            stored.places[topic, queue_id].update(
                (offset + i, place)
                for offset, place, count in zip(offsets, physical, counts, strict=True)
                if place < end
                for i in range(count)
            )
    return stored


def message(number: int) -> Message:
    body = b"message %d " % number
    return Message(
        topic=BULK_TOPIC,
        body=body * (600 if number % 500 == 7 else number % 20 + 1),
        tags=(None, "TagA", "TagB", "中文")[number % 4],
        keys=[f"order-{number}", "shared"][: number % 3],
        properties={"number": str(number), "city": "Zürich"} if number % 5 else {},
        flag=number % 7,
    )


async def send_bulk(namesrv: str, count: int) -> Counter[SendStatus]:
    """Send messages, three of four in batches. Return the counts of the statuses."""
    statuses: Counter[SendStatus] = Counter()

    async def send(producer: Producer, numbers: Iterator[int]) -> None:
        for number in numbers:
            statuses[(await producer.send(message(number))).status] += 1

    async with Producer("bulk", namesrv, settings=producing()) as producer:
        singles = iter(range(count // 4))
        await asyncio.gather(*(send(producer, singles) for _ in range(SENDERS)))
        for result in await producer.send_many(message(number) for number in range(count // 4, count)):
            statuses[result.status] += 1
    return statuses


def send_every_kind(kit: ApacheKit, namesrv: str, broker_addr: str, work_dir: Path, *, with_timer: bool) -> None:
    """Send every kind of message, and wait until all that are due within seconds are delivered, including dead letters
    and given-up transactions.
    """
    arguments = ["send", "--namesrv", namesrv, "--broker", BROKER, "--timer", str(with_timer).lower()]
    arguments += ["--timeout-seconds", str(SECONDS_MAX - 30)]
    command = kit.jvm("interop.EveryKind", arguments, heap_mb=PROBE_HEAP_MB, work_dir=work_dir)
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert done.returncode == 0, f"the Java program ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    rest = {DEAD_TOPIC: 2, FALLBACK_TOPIC: 1, GIVEN_UP_TOPIC: 1}
    wait_until(
        lambda: all(message_count(broker_addr, topic) >= count for topic, count in rest.items()),
        SECONDS_MAX,
        f"messages as {rest}",
        poll_seconds=POLL_SECONDS,
    )


def create_topics(broker_addr: str) -> None:
    for topic, queue_count in TOPICS.items():
        create_topic(broker_addr, topic, queue_count, "+queue.type=BatchCQ" if topic == INNER_BATCH_TOPIC else "")


async def read_with_ours(namesrv: str, group: str, topics: Sequence[str], count: int) -> Places:
    """Return the messages of one group member, up to `count` of them or until no more arrive."""
    found: Places = defaultdict(dict)
    settings = pulling(start_from=StartFrom.FIRST_OFFSET)
    async with PullConsumer(group, namesrv, settings=settings) as consumer:
        for topic in topics:
            consumer.subscribe(topic)
        while sum(map(len, found.values())) < count and (messages := await consumer.poll(timeout=TIMEOUT_MS / 1000)):
            for m in messages:
                found[m.topic, m.queue_id][m.queue_offset] = m.physical_offset
    return dict(found)


Tallies = Mapping[tuple[str, int], tuple[int, int]]
"""(topic, queue) → messages, and the sum of their places."""


def read_with_java(
    kit: ApacheKit, namesrv: str, group: str, topics: Sequence[str], count: int, work_dir: Path
) -> Tallies:
    """Return the messages of Apache's push consumer, in the form of `tallies`."""
    arguments = [
        "read",
        "--namesrv",
        namesrv,
        "--group",
        group,
        "--expected",
        str(count),
        "--timeout-seconds",
        str(SECONDS_MAX - 30),
    ]
    arguments += [part for topic in topics for part in ("--topic", topic)]
    command = kit.jvm("interop.PlaceReader", arguments, heap_mb=PROBE_HEAP_MB, work_dir=work_dir)
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("queue ")]
    assert lines, f"the Java program ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return {(topic, int(queue_id)): (int(number), int(total)) for _, topic, queue_id, number, total in lines}


def tallies(places: Places) -> Tallies:
    return {
        queue: (len(offsets), sum(offset * PRIME + place for offset, place in offsets.items()))
        for queue, offsets in places.items()
    }
