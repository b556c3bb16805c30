"""Our client against a real Apache name server and broker: the other direction of `test_java_client.py`.

Source: behaviour.md §7, §8; remoting.md §9.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterator

import pytest

from rmqkit.client.calls import PullStatus
from rmqkit.client.consuming import ConsumeLater
from rmqkit.client.producer import Producer
from rmqkit.client.pull_consumer import PullConsumer
from rmqkit.client.push_consumer import PushConsumer
from rmqkit.client.runtime import ClientRuntime
from rmqkit.client.sender import SendStatus
from rmqkit.client.settings import CompressionType, ProducerSettings, PushConsumerSettings, StartFrom
from rmqkit.errors import NoRoute, PeerRefused, SendFailed
from rmqkit.protocol.bodies.clients import MessageQueue
from rmqkit.protocol.message import Message, ReceivedMessage
from tests.client.peers import until
from tests.interop.apache import ApacheKit, open_store_with_apache

COUNT = 1000
BATCH = 50
FIRST = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET)
# Level 3 is the first retry: one second instead of ten.
DELAYS = {"messageDelayLevel": "1s 1s 1s 2s 2s 2s 2s 2s 2s 2s 2s 2s 2s 2s 2s 2s 2s 2s"}


@pytest.fixture(scope="module")
def namesrv(apache_kit: ApacheKit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name server of a pair with short delay levels."""
    work_dir = tmp_path_factory.mktemp("apache-short-delays")
    with open_store_with_apache(apache_kit, work_dir / "store", work_dir, DELAYS) as pair:
        yield pair.namesrv_addr


def message(topic: str, i: int) -> Message:
    """Every tenth body is large enough to be compressed."""
    body = b"%d " % i * (1 if i % 10 else 2000)
    return Message(
        topic=topic, body=body, tags="ABC"[i % 3], keys=[f"key-{i}"], properties={"number": f"{i} ä"}, flag=i
    )


async def send_all(topic: str, namesrv: str) -> dict[str, Message]:
    """COUNT messages one by one, with each compression, and a batch; unique key → message."""
    sent: dict[str, Message] = {}
    runtime = ClientRuntime(namesrv)
    await runtime.start()
    for kind in CompressionType:
        group = f"PG-{topic}-{kind.value}"
        async with Producer(group, runtime=runtime, settings=ProducerSettings(compression=kind)) as producer:
            messages = [message(topic, i) for i in range(COUNT) if i % 3 == list(CompressionType).index(kind)]
            for one, result in zip(messages, await asyncio.gather(*map(producer.send, messages)), strict=True):
                assert result.status is SendStatus.SEND_OK
                sent[result.msg_id] = one
            if kind is CompressionType.ZLIB:
                batch = [message(topic, i) for i in range(COUNT, COUNT + BATCH)]
                result = await producer.send_batch(batch)
                sent |= dict(zip(result.msg_id.split(","), batch, strict=True))
    await runtime.close()
    return sent


def described(sent: Message | ReceivedMessage) -> tuple[object, ...]:
    keys = list(sent.keys)
    number = sent.properties["number"]
    return hashlib.sha256(sent.body).hexdigest(), sent.tags, keys, number, sent.flag


class Received:
    """A handler that writes down what it gets."""

    def __init__(self) -> None:
        self.messages: list[ReceivedMessage] = []

    async def __call__(self, one: ReceivedMessage) -> None:
        self.messages.append(one)

    @property
    def ids(self) -> Counter[str]:
        return Counter(one.msg_id for one in self.messages)


def run(scenario: object) -> None:
    async def main() -> None:
        async with asyncio.timeout(90):
            await scenario  # type: ignore[misc]

    asyncio.run(main())


def share(member: PushConsumer, topic: str) -> int:
    return sum(queue.topic == topic for queue in member.held_queues())


def test_what_is_sent_is_received_once_by_two_members_and_not_again_after_a_restart(namesrv: str) -> None:
    async def scenario() -> None:
        async with Producer("PG-first", namesrv) as producer:
            await producer.send(message("Everything", 0))
        handlers = [Received(), Received()]
        members = [PushConsumer("CG-everything", namesrv, settings=FIRST) for _ in handlers]
        for member, handler in zip(members, handlers, strict=True):
            member.subscribe("Everything", "*", handler)
            await member.start()
        await until(lambda: all(share(member, "Everything") == 2 for member in members), "two queues each", 40)
        await until(lambda: any(handler.messages for handler in handlers), "the first message", 40)
        for handler in handlers:
            handler.messages.clear()

        sent = await send_all("Everything", namesrv)
        await until(lambda: sum(len(one.messages) for one in handlers) >= len(sent), "every message", 40)
        for member in members:
            await member.close()
        assert {one.msg_id: described(one) for handler in handlers for one in handler.messages} == {
            msg_id: described(one) for msg_id, one in sent.items()
        }
        assert set((handlers[0].ids + handlers[1].ids).values()) == {1}
        assert all(handler.messages for handler in handlers)

        later = Received()
        restarted = PushConsumer("CG-everything", namesrv, settings=FIRST)
        restarted.subscribe("Everything", "*", later)
        async with restarted, Producer("PG-later", namesrv) as producer:
            new = (await producer.send(message("Everything", 5000))).msg_id
            await until(lambda: later.messages, "the new message", 40)
        assert later.ids == {new: 1}

    run(scenario())


def test_a_member_that_joins_while_messages_flow_loses_none(namesrv: str) -> None:
    async def scenario() -> None:
        handlers = [Received(), Received()]
        members = [PushConsumer("CG-joining", namesrv, settings=FIRST) for _ in handlers]
        for member, handler in zip(members, handlers, strict=True):
            member.subscribe("Joining", "*", handler)
        await members[0].start()
        sending = asyncio.create_task(send_all("Joining", namesrv))
        await until(lambda: handlers[0].messages, "the first message", 40)
        await members[1].start()
        sent = await sending
        await until(lambda: (handlers[0].ids + handlers[1].ids).keys() >= sent.keys(), "every message", 40)
        await until(lambda: share(members[1], "Joining") == 2, "a share for the second", 40)
        for member in members:
            await member.close()

    run(scenario())


def test_a_tag_expression_chooses(namesrv: str) -> None:
    async def scenario() -> None:
        sent = await send_all("Tagged", namesrv)
        wanted = {msg_id for msg_id, one in sent.items() if one.tags in ("A", "C")}
        received = Received()
        consumer = PushConsumer("CG-tagged", namesrv, settings=FIRST)
        consumer.subscribe("Tagged", "A || C", received)
        async with consumer:
            await until(lambda: len(received.messages) >= len(wanted), "the wanted messages", 40)
        assert received.ids == dict.fromkeys(wanted, 1)

    run(scenario())


def test_an_sql_expression_chooses_and_a_wrong_one_is_told(namesrv: str) -> None:
    async def scenario() -> None:
        async with Producer("PG-sql", namesrv) as producer:
            for i in range(20):
                await producer.send(Message(topic="Sql", body=b"%d" % i, properties={"a": str(i)}))
        received = Received()
        consumer = PushConsumer("CG-sql", namesrv, settings=FIRST)
        consumer.subscribe("Sql", "a BETWEEN 5 AND 8", received, expression_type="SQL92")
        async with consumer:
            await until(lambda: len(received.messages) >= 4, "four messages", 40)
        assert sorted(one.body for one in received.messages) == [b"5", b"6", b"7", b"8"]
        wrong = PushConsumer("CG-sql", namesrv)
        wrong.subscribe("Sql", "a BETWEEN", received, expression_type="SQL92")
        with pytest.raises(PeerRefused, match="code 23"):
            await wrong.start()

    run(scenario())


def test_queues_are_read_by_hand_and_offsets_saved(namesrv: str) -> None:
    async def scenario() -> None:
        sent = await send_all("ByHand", namesrv)
        async with PullConsumer("CG-by-hand", namesrv) as consumer:
            found: dict[str, tuple[object, ...]] = {}
            for queue in await consumer.queues("ByHand"):
                offset = await consumer.min_offset(queue)
                while (result := await consumer.pull(queue, offset)).status is PullStatus.FOUND:
                    found |= {one.msg_id: described(one) for one in result.messages}
                    offset = result.next_begin_offset
                assert result.status is PullStatus.NO_NEW_MESSAGE
                assert offset == await consumer.max_offset(queue)
                await consumer.commit(queue, offset - 1)
                assert await consumer.committed(queue) == offset - 1
                assert await consumer.search_offset(queue, 0) == 0
                assert (await consumer.pull(queue, offset + 5)).status is PullStatus.OFFSET_ILLEGAL
        assert found == {msg_id: described(one) for msg_id, one in sent.items()}

    run(scenario())


def test_a_failed_message_comes_again_through_the_retry_topic(namesrv: str) -> None:
    async def scenario() -> None:
        times: list[tuple[int, str, str]] = []
        consumer = PushConsumer("CG-retry", namesrv, settings=FIRST)

        @consumer.on("Retried")
        async def handler(one: ReceivedMessage) -> None:
            times.append((one.reconsume_times, one.topic, one.msg_id))
            if one.reconsume_times == 0:
                raise ValueError("no stock")
            if one.reconsume_times == 1:
                raise ConsumeLater(1)

        async with Producer("PG-retry", namesrv) as producer, consumer:
            msg_id = (await producer.send(Message(topic="Retried", body=b"x"))).msg_id
            await until(lambda: len(times) >= 3, "the third time", 60)
        assert times == [(0, "Retried", msg_id), (1, "Retried", msg_id), (2, "Retried", msg_id)]

    run(scenario())


def test_a_message_that_never_succeeds_ends_in_the_dead_letters(namesrv: str) -> None:
    async def scenario() -> None:
        consumer = PushConsumer("CG-dead", namesrv, settings=FIRST)

        @consumer.on("Dead")
        def handler(one: ReceivedMessage) -> None:
            raise ConsumeLater(-1)

        async with Producer("PG-dead", namesrv) as producer, PullConsumer("CG-reader", namesrv) as reader, consumer:
            sent = await producer.send(Message(topic="Dead", body=b"x"))
            await until(lambda: consumer.held_queues(), "the queues")
            async with asyncio.timeout(30):
                while not await dead_letters(reader):
                    await asyncio.sleep(0.05)
            (dead,) = await dead_letters(reader)
        assert dead.msg_id == sent.msg_id
        assert dead.properties["RETRY_TOPIC"] == "Dead"

    run(scenario())


async def dead_letters(reader: PullConsumer) -> list[ReceivedMessage]:
    try:
        queues = await reader.queues("%DLQ%CG-dead")
    except NoRoute:
        return []
    return [one for queue in queues for one in (await reader.pull(queue, 0)).messages]


def test_an_empty_queue_is_waited_for_and_a_new_message_comes_at_once(namesrv: str) -> None:
    async def scenario() -> None:
        received = Received()
        consumer = PushConsumer("CG-fresh", namesrv, settings=FIRST)
        consumer.subscribe("Fresh", "*", received)
        async with Producer("PG-fresh", namesrv) as producer:
            await producer.send(Message(topic="Fresh", body=b"first"))
            async with consumer:
                await until(lambda: received.messages, "the first message")
                for i in range(5):
                    await producer.send(Message(topic="Fresh", body=b"%d" % i))
                    await until(lambda: len(received.messages) == i + 2, "the next message")  # noqa: B023

    run(scenario())


def test_refusals_of_the_broker_are_told_with_its_words(namesrv: str) -> None:
    async def scenario() -> None:
        settings = ProducerSettings(message_bytes_max=64 << 20, compress_body_bytes=64 << 20)
        async with Producer("PG-large", namesrv, settings=settings) as producer:
            with pytest.raises(PeerRefused, match="code 13: the message is illegal"):
                await producer.send(Message(topic="Large", body=bytes(5 << 20)), timeout_ms=20_000)
            with pytest.raises(SendFailed, match="not stored after 1 try on no-such-broker"):
                await producer.send(Message(topic="Large", body=b"x"), queue=MessageQueue("Large", "no-such-broker", 0))

    run(scenario())
