"""POP consumers: the broker stores which consumer holds which message. Source: behaviour.md §4.7–§4.11, §8.13."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit import ClientError, ConsumeLater, PopConsumer, Popping, ReceivedMessage, SettingsError
from tests.interop.suite.consuming import Received, bodies, popped_at_last, queue, send, send_everywhere, until
from tests.interop.suite.scene import Scene

pytestmark = pytest.mark.patient

INVISIBLE_S = 10
"""Longer than the acks of some messages take on a busy machine."""


def pop_consumer(scene: Scene, *, ordered: bool = False, **settings: object) -> PopConsumer:
    quick = scene.push_consumer(**settings).settings
    return scene.closing(PopConsumer(scene.group, scene.namesrv, settings=quick, ordered=ordered))


async def started(scene: Scene) -> PopConsumer:
    consumer = pop_consumer(scene)
    await consumer.start()
    return consumer


async def popped(consumer: PopConsumer, scene: Scene, count: int, **options: object) -> list[ReceivedMessage]:
    """Return popped messages as soon as there are ``count``."""
    found: list[ReceivedMessage] = []
    while len(found) < count:
        found += await consumer.pop(scene.topic, wait=5, **options)  # type: ignore[arg-type]
    return found


async def test_a_popped_message_is_not_given_to_others(scene: Scene) -> None:
    """behaviour.md §4.8: invisible time."""
    await scene.create_topic()
    await send(scene, *"0123")
    one, two = await started(scene), await started(scene)
    first = await popped(one, scene, 2, max_count=2)
    second = await popped(two, scene, 2, max_count=2)
    assert sorted(bodies(first) + bodies(second)) == list("0123")
    assert await one.pop(scene.topic) == []


async def test_what_is_not_acknowledged_in_time_is_redelivered(scene: Scene) -> None:
    """behaviour.md §4.7, §4.12: revive."""
    await scene.create_topic()
    await send(scene, "acknowledged", "forgotten")
    consumer = await started(scene)
    first = await popped(consumer, scene, 2, invisible_time=1)
    await consumer.ack(next(message for message in first if message.body == b"acknowledged"))
    (again,) = await popped(consumer, scene, 1)
    assert (again.body, again.topic) == (b"forgotten", scene.topic)
    assert again.reconsume_times == 1
    await consumer.ack(again)


async def test_popped_messages_are_acknowledged_together(scene: Scene) -> None:
    """behaviour.md §4.10: BATCH_ACK_MESSAGE. The one message of each queue without an ack is redelivered alone."""
    await scene.create_topic(queues=2)
    await send_everywhere(scene, 2, 4)
    consumer = await started(scene)
    first = await popped(consumer, scene, 8, invisible_time=INVISIBLE_S)
    await consumer.ack_many([message for message in first if not message.body.endswith(b"-3")])
    again = await popped(consumer, scene, 2)
    assert sorted(bodies(again)) == ["0-3", "1-3"]
    await consumer.ack_many(again)


async def test_a_message_that_was_not_popped_cannot_be_acknowledged(scene: Scene) -> None:
    """behaviour.md §4.10."""
    await scene.create_topic()
    await send(scene, "0")
    (stored,) = await scene.stored(1)
    consumer = await started(scene)
    with pytest.raises(ClientError):
        await consumer.ack(stored)


async def test_a_message_is_redelivered_when_its_invisible_time_was_changed(scene: Scene) -> None:
    """behaviour.md §4.11: CHANGE_MESSAGE_INVISIBLETIME."""
    await scene.create_topic()
    await send(scene, "0")
    consumer = await started(scene)
    (first,) = await popped(consumer, scene, 1, invisible_time=300)
    await consumer.change_invisible_time(first, 1)
    (again,) = await popped(consumer, scene, 1)
    assert (again.body, again.msg_id) == (b"0", first.msg_id)
    await consumer.ack(again)


async def test_a_pop_takes_no_more_than_it_is_to(scene: Scene) -> None:
    """behaviour.md §4.8: maxMsgNums."""
    await scene.create_topic()
    await send(scene, *"01234")
    consumer = await started(scene)
    found: list[list[str]] = []
    while sum(map(len, found)) < 5:
        found.append(bodies(await consumer.pop(scene.topic, max_count=3, wait=5)))
    assert [text for some in found for text in some] == list("01234")
    assert max(map(len, found)) <= 3


async def test_a_pop_chooses_by_tags_and_sql(scene: Scene) -> None:
    """behaviour.md §4.8, §6."""
    await scene.create_topic()
    for i in range(4):
        await send(scene, str(i), tags="AB"[i % 2], properties={"n": str(i)})
    tags, sql = await started(scene), pop_consumer(scene)
    sql = scene.closing(PopConsumer(f"{scene.group}-sql", scene.namesrv, settings=sql.settings))
    await sql.start()
    assert bodies(await popped(tags, scene, 2, expression="B")) == ["1", "3"]
    assert bodies(await popped(sql, scene, 1, expression="n > 2", expression_type="SQL92")) == ["3"]


async def test_a_pop_that_may_wait_gets_the_message_that_comes(scene: Scene) -> None:
    """behaviour.md §4.8: polling."""
    await scene.create_topic()
    consumer = await started(scene)
    await scene.sender()  # connect first, so that the pop waits only for the message
    await scene.reader()
    waiting = asyncio.create_task(
        popped_at_last(lambda: consumer.pop(scene.topic, wait=15), is_ours=scene.peer.is_ours)
    )
    assert await consumer.pop(scene.topic) == []
    assert not waiting.done()
    await send(scene, "awaited")
    assert bodies(await waiting) == ["awaited"]


async def test_one_queue_is_popped(scene: Scene) -> None:
    """behaviour.md §4.8: queueId."""
    await scene.create_topic(queues=2)
    await send_everywhere(scene, 2, 2)
    consumer = await started(scene)
    assert bodies(await popped(consumer, scene, 2, queue=queue(scene, 1))) == ["1-0", "1-1"]


async def test_every_member_pops_from_every_queue(scene: Scene) -> None:
    """behaviour.md §8.13, §4.15: no member owns a queue."""
    await scene.create_topic(queues=1)
    handlers, release = [Received(), Received()], asyncio.Event()

    for handler in handlers:
        consumer = pop_consumer(scene, pop=Popping(count=1))

        async def handle(message: ReceivedMessage, handler: Received = handler) -> None:
            await handler(message)
            await release.wait()

        consumer.subscribe(scene.topic, "*", handle)
        await consumer.start()
    for i in range(40):
        await send(scene, str(i))
        if all(handler.messages for handler in handlers):
            break
        await until(lambda: sum(len(one.messages) for one in handlers) == i + 1, "the message")  # noqa: B023
    release.set()
    assert all(handler.messages for handler in handlers)


async def test_returning_acknowledges_and_raising_has_a_message_redelivered(scene: Scene) -> None:
    """behaviour.md §8.13: ACK, CHANGE_INVISIBLE."""
    await scene.create_topic()
    seen: list[tuple[str, int]] = []
    consumer = pop_consumer(scene)

    @consumer.on(scene.topic)
    async def handler(message: ReceivedMessage) -> None:
        seen.append((message.body.decode(), message.reconsume_times))
        if message.body == b"bad" and message.reconsume_times == 0:
            raise ConsumeLater(delay=1)

    await consumer.start()
    await send(scene, "good", "bad")
    await until(lambda: ("bad", 1) in seen, "the second time")
    assert sorted(seen) == [("bad", 0), ("bad", 1), ("good", 0)]


async def test_popping_is_not_for_broadcasting(scene: Scene) -> None:
    """behaviour.md §8.4, §8.13."""
    with pytest.raises(SettingsError, match="BROADCASTING"):
        pop_consumer(scene, message_model=type(scene.push_consumer().settings.message_model).BROADCASTING)
