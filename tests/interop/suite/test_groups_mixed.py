"""Groups with Java and Python members (`java/src/interop/GroupMembers.java`). Source: behaviour.md §8.4–§8.10."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from itertools import groupby, pairwise

import pytest

from rmqkit import ConsumeLater, MessageModel, PushConsumer, ReceivedMessage, allocate
from rmqkit.client.consumer.allocate import Allocate
from tests.interop.suite.consuming import (
    Received,
    client_ids,
    eventually,
    is_committed,
    owners,
    queue,
    send,
    send_everywhere,
    until,
)
from tests.interop.suite.java_members import Got, java_members
from tests.interop.suite.scene import Scene

pytestmark = pytest.mark.patient

QUEUES = 4


def python_member(
    scene: Scene,
    handler: Callable[[ReceivedMessage], object],
    *,
    ordered: bool = False,
    strategy: Allocate | None = None,
) -> PushConsumer:
    # The default pause: Java gives queues up with a delay, and saves its offsets without waiting for an answer.
    settings = scene.push_consumer(suspend_queue_ms=10, take_over_pause_ms=500).settings
    made = PushConsumer(
        scene.group, scene.namesrv, settings=settings, ordered=ordered, allocate=strategy or allocate.averagely
    )
    made.subscribe(scene.topic, "*", handler)
    return scene.closing(made)


async def settled(scene: Scene, shares: list[int]) -> dict[int, str]:
    """Return the owner of each queue, as soon as every queue has one owner and the members have these numbers of
    queues.
    """

    def is_settled(seen: dict[int, list[str]]) -> bool:
        one_each = sorted(seen) == list(range(QUEUES)) and all(len(ids) == 1 for ids in seen.values())
        return one_each and sorted(Counter(ids[0] for ids in seen.values()).values()) == sorted(shares)

    seen = await eventually(lambda: owners(scene), is_settled, f"one owner of each queue, shares {shares}")
    return {queue_id: ids[0] for queue_id, ids in seen.items()}


def all_bodies(java: list[Got], python: Received) -> list[str]:
    return [one.body for one in java] + python.bodies


async def test_java_and_python_members_have_different_queues(scene: Scene) -> None:
    """behaviour.md §8.4, §8.5: no double ownership after settling."""
    await scene.create_topic(queues=QUEUES)
    received = Received()
    async with java_members(scene) as java:
        got = await java.join(scene)
        await python_member(scene, received).start()
        owner = await settled(scene, [2, 2])
        sent = await send_everywhere(scene, QUEUES, 10)
        await until(lambda: len(all_bodies(got, received)) >= len(sent), "every message")
        assert Counter(all_bodies(got, received)) == dict.fromkeys(sent, 1)
        java_id = next(client_id for client_id in owner.values() if client_id.endswith("-java"))
        assert {one.queue_id for one in got} == {queue_id for queue_id, one in owner.items() if one == java_id}
        await java.leave(scene)


async def test_a_python_member_joins_a_java_group_and_leaves_it(scene: Scene) -> None:
    """behaviour.md §8.4: rebalance on join and leave."""
    await scene.create_topic(queues=QUEUES)
    received = Received()
    async with java_members(scene) as java:
        got = await java.join(scene)
        sent = await send_everywhere(scene, QUEUES, 5)
        await until(lambda: len(got) == len(sent), "everything at Java")
        member = python_member(scene, received)
        await member.start()
        await settled(scene, [2, 2])
        sent |= await send_everywhere(scene, QUEUES, 5, first=5)
        await until(lambda: sum(one.queue_offset >= 5 for one in received.messages) == 10, "a half at Python")
        await member.close()
        await settled(scene, [4])
        sent |= await send_everywhere(scene, QUEUES, 5, first=10)
        await until(lambda: set(all_bodies(got, received)) == sent, "every message")
        assert sum(one.queue_offset >= 10 for one in got) == 20
        await java.leave(scene)


async def test_a_java_member_joins_a_python_group_and_leaves_it(scene: Scene) -> None:
    """behaviour.md §8.4: rebalance on join and leave."""
    await scene.create_topic(queues=QUEUES)
    received = Received()
    await python_member(scene, received).start()
    sent = await send_everywhere(scene, QUEUES, 5)
    await received.at_least(20)
    async with java_members(scene) as java:
        got = await java.join(scene)
        await settled(scene, [2, 2])
        shared = await send_everywhere(scene, QUEUES, 5, first=5)
        # The Java member may get earlier messages again. The messages that it gets while it leaves are not reported.
        await until(lambda: len(shared & {one.body for one in got}) == 10, "its half at Java")
        await java.leave(scene)
    await settled(scene, [4])
    sent |= shared | await send_everywhere(scene, QUEUES, 5, first=10)
    await until(lambda: set(all_bodies(got, received)) == sent, "every message")
    assert sum(message.queue_offset >= 10 for message in received.messages) == 20


async def shares_agree(scene: Scene, strategy: Allocate, name: str) -> None:
    """Check that a Java and two Python members with one strategy compute matching shares."""
    await scene.create_topic(queues=QUEUES)
    queues = [queue(scene, i) for i in range(QUEUES)]
    async with java_members(scene) as java:
        await java.join(scene, strategy=name)
        for _ in range(2):
            await python_member(scene, Received(), strategy=strategy).start()
        ids = await eventually(lambda: client_ids(scene), lambda seen: len(seen) == 3, "three members")
        wanted = {one.queue_id: [own_id] for own_id in ids for one in strategy(queues, ids, own_id)}
        await eventually(lambda: owners(scene), lambda seen: seen == wanted, f"the owners {wanted}")
        await java.leave(scene)


async def test_java_and_python_deal_queues_out_alike(scene: Scene) -> None:
    """behaviour.md §8.5: AVG_BY_CIRCLE."""
    await shares_agree(scene, allocate.averagely_by_circle, "AVG_BY_CIRCLE")


async def test_java_and_python_see_the_same_ring(scene: Scene) -> None:
    """behaviour.md §8.5: CONSISTENT_HASH."""
    await shares_agree(scene, allocate.consistent_hash(), "CONSISTENT_HASH")


async def test_java_and_python_members_keep_the_order_while_queues_change_hands(scene: Scene) -> None:
    """behaviour.md §8.10: in order, nothing left out, never in two hands at a time."""
    await scene.create_topic(queues=QUEUES)
    received = Received()
    at_python: list[tuple[float, int, int]] = []

    async def handler(message: ReceivedMessage) -> None:
        at_python.append((time.monotonic(), message.queue_id, message.queue_offset))
        await received(message)

    async with java_members(scene) as java:
        got = await java.join(scene, "ordered")
        sending = asyncio.create_task(send_everywhere(scene, QUEUES, 150))
        await until(lambda: len({one.queue_id for one in got}) == QUEUES, "every queue at Java")
        member = python_member(scene, handler, ordered=True)
        await member.start()
        owner = await settled(scene, [2, 2])
        await sending
        await send_everywhere(scene, QUEUES, 20, first=150)
        await until(lambda: set_of(got, received) == everything(170), "every message")
        moved = {queue_id for queue_id, client_id in owner.items() if not client_id.endswith("-java")}
        assert {message.queue_id for message in received.messages} == moved
        await member.close()
        await settled(scene, [4])
        await send_everywhere(scene, QUEUES, 10, first=170)
        await until(lambda: set_of(got, received) == everything(180), "every message")
        await java.leave(scene)
    at_java = [(one.seconds, one.queue_id, one.queue_offset) for one in got]
    events = sorted([(*one, "Java") for one in at_java] + [(*one, "Python") for one in at_python])
    for queue_id in range(QUEUES):
        mine = [event for event in events if event[1] == queue_id]
        turns = [(who, [event[2] for event in some]) for who, some in groupby(mine, key=lambda event: event[3])]
        assert [who for who, _ in turns] == (["Java", "Python", "Java"] if queue_id in moved else ["Java"])
        for _, offsets in turns:
            assert all(after == before + 1 for before, after in pairwise(offsets)), "offsets are in order, none repeats"
        for (_, before), (_, after) in pairwise(turns):
            # The last offset that a member saves may reach the broker's table after the next member has read it.
            assert after[0] <= before[-1] + 1 <= after[-1], "no offset is skipped"


def set_of(got: list[Got], received: Received) -> set[tuple[int, int]]:
    return {(one.queue_id, one.queue_offset) for one in [*got, *received.messages]}


def everything(count: int) -> set[tuple[int, int]]:
    return {(queue_id, offset) for queue_id in range(QUEUES) for offset in range(count)}


async def test_an_ordered_python_member_waits_until_java_gives_the_locks_back(scene: Scene) -> None:
    """behaviour.md §2.7, §8.10."""
    await scene.create_topic(queues=QUEUES)
    received = Received()
    async with java_members(scene) as java:
        got = await java.join(scene, "ordered")
        sent = await send_everywhere(scene, QUEUES, 3)
        await until(lambda: len(got) == len(sent), "everything at Java")
        member = python_member(scene, received, ordered=True)
        await member.start()
        await settled(scene, [2, 2])
        await java.leave(scene)
    await settled(scene, [4])
    await send_everywhere(scene, QUEUES, 3, first=3)
    await until(lambda: {m.queue_offset for m in received.messages} >= {3, 4, 5}, "the messages that follow")
    await is_committed(scene, 6)


async def test_what_failed_at_java_is_retried_at_python(scene: Scene) -> None:
    """behaviour.md §8.11."""
    await scene.create_topic(queues=QUEUES)
    received = Received()
    async with java_members(scene) as java:
        got = await java.join(scene, "failing")
        await send(scene, "x")
        await until(lambda: got, "the first time at Java")
        await is_committed(scene, 1)
        await java.leave(scene)
    await python_member(scene, received).start()
    await received.at_least(1)
    (message,) = received.messages
    assert (message.body, message.topic) == (b"x", scene.topic)
    # A message that Java was handling as it left may be redelivered unchanged.
    assert len(got) - message.reconsume_times in (0, 1)


async def test_what_failed_at_python_is_retried_at_java(scene: Scene) -> None:
    """behaviour.md §8.11."""
    await scene.create_topic(queues=QUEUES)
    failed: list[ReceivedMessage] = []

    async def handler(message: ReceivedMessage) -> None:
        failed.append(message)
        raise ConsumeLater(1)

    member = python_member(scene, handler)
    await member.start()
    await send(scene, "x")
    await is_committed(scene, 1)
    await member.close()
    async with java_members(scene) as java:
        got = await java.join(scene)
        await until(lambda: got, "the message at Java")
        assert (got[0].body, got[0].reconsume_times) == ("x", len(failed))
        await java.leave(scene)


async def test_java_continues_where_python_stopped_and_back(scene: Scene) -> None:
    """behaviour.md §5.6: offsets of a group."""
    await scene.create_topic(queues=QUEUES)
    first, last = Received(), Received()
    member = python_member(scene, first)
    await member.start()
    await send(scene, "0", "1")
    await first.at_least(2)
    await member.close()
    await send(scene, "2")
    async with java_members(scene) as java:
        got = await java.join(scene)
        await until(lambda: got, "the message at Java")
        await is_committed(scene, 3)
        await java.leave(scene)
    await send(scene, "3")
    await python_member(scene, last).start()
    assert ([one.body for one in got], await last.at_least(1)) == (["2"], ["3"])


async def test_java_and_python_members_of_a_broadcasting_group_get_everything(scene: Scene) -> None:
    """behaviour.md §8.4: broadcasting."""
    await scene.create_topic(queues=QUEUES)
    received = Received()
    async with java_members(scene) as java:
        got = await java.join(scene, "broadcast")
        member = scene.push_consumer(
            message_model=MessageModel.BROADCASTING,
            instance_name=scene.name,
            offsets_dir=str(scene.peer.work_dir / scene.name),
        )
        member.subscribe(scene.topic, "*", received)
        await member.start()
        sent = await send_everywhere(scene, QUEUES, 3)
        await until(lambda: len(got) >= len(sent) <= len(received.messages), "everything, two times")
        assert Counter(one.body for one in got) == Counter(received.bodies) == dict.fromkeys(sent, 1)
        await java.leave(scene)
