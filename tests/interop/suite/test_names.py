"""Namespaces, the VIP port, and name servers from a web server. Source: remoting.md §3.2, §9.1, §9.2, §9.4."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from rmqkit import Message, NoRoute, Producer, ReceivedMessage, TransactionState
from tests.interop.suite.scene import POLL_SECONDS, Scene
from tests.patience import producing

SPACE = "SpaceA"


async def test_a_producer_in_a_namespace_sends_to_the_topic_of_that_name_there(scene: Scene) -> None:
    """remoting.md §3.2: X in namespace NS is NS%X."""
    topic = await scene.create_topic(f"{SPACE}%{scene.topic}")
    producer = await scene.producer(namespace=SPACE)
    result = await producer.send(Message(topic=scene.topic, body=b"x"))
    (one,) = await scene.stored(1, topic)
    assert (one.topic, one.msg_id) == (topic, result.msg_id)
    assert result.queue.topic == scene.topic
    assert await scene.route(scene.topic) is None


async def test_clients_of_one_namespace_see_bare_names(scene: Scene) -> None:
    """remoting.md §3.2."""
    await scene.create_topic(f"{SPACE}%{scene.topic}", queues=2)
    producer, reader = await scene.producer(namespace=SPACE), await scene.pull_consumer(namespace=SPACE)
    queues = await producer.queues(scene.topic)
    assert [queue.topic for queue in queues] == [scene.topic] * 2
    assert await reader.queues(scene.topic) == queues
    result = await producer.send_batch([Message(topic=scene.topic, body=b"%d" % i) for i in range(2)], queue=queues[1])
    await scene.stored(2, f"{SPACE}%{scene.topic}")
    found = (await reader.pull(result.queue, 0)).messages
    assert [(one.topic, one.body) for one in found] == [(scene.topic, b"0"), (scene.topic, b"1")]


async def test_a_namespace_is_hidden_from_other_namespaces(scene: Scene) -> None:
    """remoting.md §3.2."""
    await scene.create_topic(f"{SPACE}%{scene.topic}")
    reader = await scene.pull_consumer(namespace="SpaceB")
    with pytest.raises(NoRoute):
        await reader.queues(scene.topic)


async def test_a_topic_is_created_within_the_namespace(scene: Scene) -> None:
    """remoting.md §3.2; behaviour.md §3.2."""
    producer = await scene.producer(namespace=SPACE)
    await producer.send(Message(topic=scene.topic, body=b"x"))
    assert [one.body for one in await scene.stored(1, f"{SPACE}%{scene.topic}")] == [b"x"]


async def test_transactions_of_a_namespace_are_asked_of_its_producers(scene: Scene) -> None:
    """remoting.md §3.2: groups are in the namespace, too; behaviour.md §9.1."""
    topic = await scene.create_topic(f"{SPACE}%{scene.topic}")
    asked: list[ReceivedMessage] = []

    def check(message: ReceivedMessage) -> TransactionState:
        asked.append(message)
        return TransactionState.COMMIT

    producer = await scene.transaction_producer(lambda message, argument: None, check, namespace=SPACE)
    await producer.send_in_transaction(Message(topic=scene.topic, body=b"x"))
    (one,) = await scene.stored(1, topic)
    assert [(question.topic, question.msg_id) for question in asked[:1]] == [(scene.topic, one.msg_id)]


@pytest.mark.parametrize("is_vip", [True, False])
async def test_sends_may_go_to_the_vip_port(scene: Scene, is_vip: bool) -> None:
    """remoting.md §9.4: port - 2 for sends, never for heartbeats; so there are two connections then."""
    await scene.create_topic()
    producer = await scene.producer(vip_channel=is_vip, heartbeat_interval_ms=50)
    await producer.send(Message(topic=scene.topic, body=b"x"))
    (one,) = await scene.stored(1)
    while not (known := await scene.producers()):
        await asyncio.sleep(POLL_SECONDS)
    assert (known[0].client_addr != one.born_host) == is_vip


@contextlib.asynccontextmanager
async def web_server(text: str) -> AsyncIterator[tuple[str, list[str]]]:
    """Run a web server that answers with a text. Yield its address and the requested paths."""
    paths: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        paths.append(head.split()[1].decode())
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text.encode()))
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", paths


async def test_name_servers_are_found_by_a_web_server(scene: Scene) -> None:
    """remoting.md §9.2."""
    async with web_server(f"{scene.namesrv}\n") as (address, paths):
        settings = producing(name_server_domain=address, unit_name="unit")
        producer = scene.closing(Producer(scene.group, settings=settings))
        await producer.start()
        await producer.send(Message(topic=scene.topic, body=b"x"))
    assert set(paths) == {"/rocketmq/nsaddr-unit?nofix=1"}
    assert len(await scene.stored(1)) == 1
