"""A consumer knows its start offsets when its start returns: messages sent after that are not skipped."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rmqkit import Message, Producer, PushConsumer, StartFrom
from rmqkit.admin import Admin
from rmqkit.client.consumer.assignment import AssignedQueues
from rmqkit.client.consumer.loop import PullLoop
from rmqkit.client.runtime.settings import MessageModel, PushConsumerSettings
from rmqkit.errors import RequestTimedOut
from rmqkit.standalone import Standalone
from tests.client.inside import coordinator_of
from tests.virtual_time import run

pytestmark = pytest.mark.virtual_time

QUEUES = 8
GROUPS = 5
BROADCASTING = MessageModel.BROADCASTING


@dataclass
class Started:
    """The bodies that a consumer got, and the number of queues without an offset when its start returned."""

    bodies: list[bytes] = field(default_factory=list)
    unknown: int = 0


async def started(namesrv: str, group: str, settings: PushConsumerSettings, count: int) -> Started:
    """Start a consumer, and at once send messages to all queues of its topic."""
    found = Started()
    consumer = PushConsumer(group, namesrv, settings=settings)
    consumer.subscribe("Orders", handler=lambda message: found.bodies.append(message.body))
    async with Producer("shop", namesrv) as producer:
        await producer.queues("Orders")
        async with consumer:
            pulled = coordinator_of(consumer).process_queues.values()
            assert {one.queue.topic for one in pulled} >= {"Orders"}
            found.unknown = sum(one.next_offset is None for one in pulled)
            await asyncio.gather(*(producer.send(Message(topic="Orders", body=b"%d" % n)) for n in range(count)))
            await asyncio.sleep(5)
    return found


@pytest.mark.parametrize(
    ("changes", "has_old"),
    [
        ({"start_from": StartFrom.NEW_MESSAGES}, False),
        ({"start_from": StartFrom.NEW_MESSAGES}, True),
        ({"start_from": StartFrom.NEW_MESSAGES, "message_model": BROADCASTING}, True),
        ({"start_from": StartFrom.LAST_OFFSET, "message_model": BROADCASTING}, True),
        ({"start_from": StartFrom.LAST_OFFSET}, False),
    ],
    ids=["new messages", "new messages, old topic", "new messages, broadcast", "broadcast", "last offset"],
)
def test_what_is_sent_after_the_start_is_delivered(tmp_path: Path, changes: dict[str, Any], has_old: bool) -> None:
    settings = PushConsumerSettings(offsets_dir=tmp_path / "offsets", **changes)

    async def all_groups() -> None:
        async with Standalone(tmp_path / "store") as cluster:
            async with Admin(cluster.namesrv_address) as admin:
                await admin.topics.create("Orders", read_queues=QUEUES, write_queues=QUEUES)
            if has_old:
                async with Producer("shop", cluster.namesrv_address) as producer:
                    for n in range(2 * QUEUES):
                        await producer.send(Message(topic="Orders", body=b"old %d" % n))
            for number in range(GROUPS):
                found = await started(cluster.namesrv_address, f"g{number}", settings, 10)
                assert found.unknown == 0
                new = [body for body in found.bodies if not body.startswith(b"old")]
                assert {b"%d" % n for n in range(10)} <= set(new)
                if changes["start_from"] is StartFrom.NEW_MESSAGES:
                    assert len(found.bodies) == 10

    run(all_groups())


def test_a_broker_that_does_not_say_where_a_queue_begins_does_not_hold_the_start_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    async def timed_out(loop: PullLoop) -> int:
        nonlocal asked
        asked += 1
        raise RequestTimedOut("127.0.0.1:1", 31, 3000)

    monkeypatch.setattr(PullLoop, "_start_offset", timed_out)

    async def start() -> None:
        async with Standalone(tmp_path / "store") as cluster:
            async with Admin(cluster.namesrv_address) as admin:
                await admin.topics.create("Orders", read_queues=QUEUES, write_queues=QUEUES)
            consumer = PushConsumer("g", cluster.namesrv_address)
            consumer.subscribe("Orders", handler=lambda _: None)
            async with consumer:
                assert asked >= QUEUES

    run(start())


def test_a_rebalance_that_fails_does_not_hold_the_start_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(assigned: AssignedQueues, *_: Any, **__: Any) -> None:
        raise ValueError("a fault of the program")

    monkeypatch.setattr(AssignedQueues, "take", broken)

    async def start() -> None:
        async with Standalone(tmp_path / "store") as cluster:
            async with Admin(cluster.namesrv_address) as admin:
                await admin.topics.create("Orders", read_queues=QUEUES, write_queues=QUEUES)
            consumer = PushConsumer("g", cluster.namesrv_address)
            consumer.subscribe("Orders", handler=lambda _: None)
            async with consumer:
                assert consumer.held_queues() == set()

    run(start())
