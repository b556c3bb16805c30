"""Request and reply. Source: behaviour.md §3.8, §7.10."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rmqkit import Message, NotARequest, Producer, PushConsumer, ReceivedMessage, Reply, ReplyTimedOut, SendFailed
from tests.client.peers import until
from tests.interop.suite.scene import Scene

TIMEOUT_MS = 100_000
UNANSWERED_MS = 6000
"""Long enough to store the request on a busy machine. The test waits for all of it."""


async def replier(scene: Scene, handle: Callable[[Producer, ReceivedMessage], Awaitable[object]]) -> PushConsumer:
    """Return a consumer that has the queues of the scene's topic and calls `handle` with each message."""
    await scene.create_topic(queues=2)
    producer = await scene.producer(f"{scene.group}-replier")
    consumer = scene.push_consumer()

    @consumer.on(scene.topic, "asked")
    async def handler(message: ReceivedMessage) -> None:
        await handle(producer, message)

    await consumer.start()
    await until(lambda: len(consumer.held_queues()) > 1, "the queues")
    return consumer


def question(scene: Scene, body: bytes = b"2+3") -> Message:
    return Message(topic=scene.topic, body=body, tags="asked")


async def add(producer: Producer, message: ReceivedMessage) -> None:
    a, b = message.body.split(b"+")
    await producer.reply(message, b"%d" % (int(a) + int(b)), properties={"by": "ä"})


async def test_a_request_gets_the_consumers_reply(scene: Scene) -> None:
    """behaviour.md §7.10."""
    await replier(scene, add)
    producer = await scene.producer()
    reply = await producer.request(question(scene), timeout=TIMEOUT_MS / 1000)
    assert isinstance(reply, Reply)
    assert (reply.body, reply.properties["by"]) == (b"5", "ä")
    assert reply.born_host.startswith("127.0.0.1:")


async def test_requests_under_way_at_a_time_get_each_their_own_reply(scene: Scene) -> None:
    """behaviour.md §7.10: CORRELATION_ID."""
    await replier(scene, add)
    producer = await scene.producer()
    asked = [producer.request(question(scene, b"%d+%d" % (i, i)), timeout=TIMEOUT_MS / 1000) for i in range(30)]
    assert [reply.body for reply in await asyncio.gather(*asked)] == [b"%d" % (2 * i) for i in range(30)]


async def test_replies_reach_the_client_that_asked(scene: Scene) -> None:
    """behaviour.md §3.8: REPLY_TO_CLIENT, also when two clients have one group."""
    await replier(scene, add)
    producers = [await scene.producer() for _ in range(2)]
    replies = await asyncio.gather(
        *(one.request(question(scene, b"%d+1" % i), timeout=TIMEOUT_MS / 1000) for i, one in enumerate(producers))
    )
    assert [reply.body for reply in replies] == [b"1", b"2"]


async def test_a_large_reply_travels_compressed_and_arrives_whole(scene: Scene) -> None:
    """behaviour.md §7.10: decompress."""
    body = b"a long answer " * 1000

    async def handle(producer: Producer, message: ReceivedMessage) -> None:
        await producer.reply(message, body)

    await replier(scene, handle)
    producer = await scene.producer()
    assert (await producer.request(question(scene), timeout=TIMEOUT_MS / 1000)).body == body


async def test_a_request_carries_who_asks_and_how_long(scene: Scene) -> None:
    """behaviour.md §7.10: CORRELATION_ID, REPLY_TO_CLIENT, TTL."""
    asked: list[ReceivedMessage] = []

    async def handle(producer: Producer, message: ReceivedMessage) -> None:
        asked.append(message)
        await producer.reply(message, b"ok")

    await replier(scene, handle)
    producer = await scene.producer(client_ip="127.0.0.7")
    reply = await producer.request(question(scene), timeout=TIMEOUT_MS / 1000)
    properties = asked[0].properties
    assert properties["TTL"] == str(TIMEOUT_MS)
    assert properties["REPLY_TO_CLIENT"].startswith("127.0.0.7@")
    assert reply.properties["CORRELATION_ID"] == properties["CORRELATION_ID"]
    assert reply.properties["MSG_TYPE"] == "reply"
    assert int(reply.properties["ARRIVE_TIME"]) >= int(reply.properties["PUSH_REPLY_TIME"]) - 1000


async def test_a_request_may_be_sent_to_a_queue(scene: Scene) -> None:
    """behaviour.md §7.10."""
    asked: list[int] = []

    async def handle(producer: Producer, message: ReceivedMessage) -> None:
        asked.append(message.queue_id)
        await producer.reply(message, b"ok")

    await replier(scene, handle)
    producer = await scene.producer()
    queues = await producer.queues(scene.topic)
    await producer.request(question(scene), queue=queues[1], timeout=TIMEOUT_MS / 1000)
    await producer.request(question(scene), selector=lambda queues, message: queues[0], timeout=TIMEOUT_MS / 1000)
    assert asked == [1, 0]


async def test_without_a_reply_the_error_says_that_the_message_is_stored(scene: Scene) -> None:
    """behaviour.md §7.10: 10006."""
    await scene.create_topic()
    producer = await scene.producer()
    await producer.queues(scene.topic)
    told = f"the request for topic {scene.topic} was stored, and no reply came within {UNANSWERED_MS} ms"
    with pytest.raises(ReplyTimedOut, match=f"{told}: does a consumer") as late:
        await producer.request(question(scene), timeout=UNANSWERED_MS / 1000)
    assert late.value.code == 10006
    assert [one.body for one in await scene.stored(1)] == [b"2+3"]


async def test_a_message_that_is_no_request_cannot_be_replied_to(scene: Scene) -> None:
    """behaviour.md §7.10: 10007."""
    await scene.create_topic()
    one = await scene.sent_and_stored(Message(topic=scene.topic, body=b"x"))
    producer = await scene.producer(f"{scene.group}-replier")
    with pytest.raises(NotARequest, match=f"create reply message fail, message {one.msg_id} has no property") as error:
        await producer.reply(one, b"ok")
    assert error.value.code == 10007


async def test_a_reply_to_a_client_that_is_gone_fails_with_the_brokers_words(scene: Scene) -> None:
    """behaviour.md §3.8."""
    await scene.create_topic()
    asking = await scene.producer(retries=0)
    await asking.queues(scene.topic)
    with pytest.raises(ReplyTimedOut):
        await asking.request(question(scene), timeout=UNANSWERED_MS / 1000)
    await asking.close()
    (one,) = await scene.stored(1)
    producer = await scene.producer(f"{scene.group}-replier", retries=0)
    with pytest.raises(SendFailed, match=r"push reply message fail, channel of <.*> not found"):
        await producer.reply(one, b"late")


async def test_a_reply_that_comes_too_late_harms_nobody(scene: Scene) -> None:
    """behaviour.md §7.10: an unknown id is logged."""
    await scene.create_topic()
    asking = await scene.producer()
    await asking.queues(scene.topic)
    with pytest.raises(ReplyTimedOut):
        await asking.request(question(scene), timeout=UNANSWERED_MS / 1000)
    (one,) = await scene.stored(1)
    producer = await scene.producer(f"{scene.group}-replier")
    await producer.reply(one, b"late")
    await asking.send(Message(topic=scene.topic, body=b"still working"))
