"""The brokers and queues that a client uses, and changes of them. Source: behaviour.md §7.1, §7.2, §7.6; remoting.md
§9."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from unittest import mock

import msgspec
import pytest

from rmqkit import (
    ClientError,
    ClientRuntime,
    ConnectFailed,
    Message,
    MessageQueue,
    NoRoute,
    Producer,
    SendFailed,
    SettingsError,
)
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import request
from rmqkit.protocol.schemas.brokers import RegisterBrokerBody, RegisterBrokerRequest
from rmqkit.protocol.schemas.topics import KVPut, TopicConfig, TopicConfigTable
from rmqkit.remoting.client import RemotingClient
from tests.interop.suite.scene import POLL_SECONDS, Scene
from tests.patience import TIMEOUT_MS, producing
from tests.ports import HOST, silent_port

ROUTE_INTERVAL_MS = 100
_KEPT = contextlib.ExitStack()


def closed_port() -> str:
    """Return an address on which no server listens or will listen."""
    return f"{HOST}:{_KEPT.enter_context(silent_port())}"


# -- name servers


async def test_the_next_name_server_is_asked_when_one_is_gone(scene: Scene) -> None:
    """behaviour.md §7.1; remoting.md §9.2."""
    for addresses in (f"{closed_port()};{scene.namesrv}", f"{scene.namesrv};{closed_port()}"):
        producer = scene.closing(Producer(scene.group, addresses, settings=producing()))
        await producer.start()
        await producer.send(Message(topic=scene.topic, body=b"x"))
    assert len(await scene.stored(2)) == 2


async def test_when_no_name_server_answers_all_are_named(scene: Scene) -> None:
    """behaviour.md §7.1."""
    first, second = closed_port(), closed_port()
    with pytest.raises(NoRoute, match="no name server answered, check the addresses") as failure:
        await Producer(scene.group, f"{first};{second}").start()
    assert first in str(failure.value)
    assert second in str(failure.value)


async def test_name_servers_come_from_the_environment(scene: Scene) -> None:
    """remoting.md §9.2: NAMESRV_ADDR."""
    with mock.patch.dict(os.environ, NAMESRV_ADDR=scene.namesrv):
        producer = scene.closing(Producer(scene.group, settings=producing()))
    await producer.start()
    await producer.send(Message(topic=scene.topic, body=b"x"))
    assert len(await scene.stored(1)) == 1


async def test_a_name_server_without_a_port_is_refused(scene: Scene) -> None:
    """remoting.md §9.2."""
    with pytest.raises(SettingsError, match="name servers 'nowhere'"):
        Producer(scene.group, "nowhere")


# -- queues of a route


async def test_the_write_count_says_where_to_send_and_the_read_count_where_to_read(scene: Scene) -> None:
    """behaviour.md §7.2."""
    await scene.create_topic(queues=2, read_queues=4)
    producer, reader = await scene.producer(), await scene.reader()
    assert [queue.queue_id for queue in await producer.queues(scene.topic)] == [0, 1]
    assert [queue.queue_id for queue in await reader.queues(scene.topic)] == [0, 1, 2, 3]


async def test_a_topic_that_may_only_be_read_takes_no_messages(scene: Scene) -> None:
    """behaviour.md §7.2: writable queue data only."""
    await scene.create_topic(perm=4)
    producer, reader = await scene.producer(), await scene.reader()
    with pytest.raises(NoRoute, match=f"no broker accepts messages for topic {scene.topic}"):
        await producer.send(Message(topic=scene.topic, body=b"x"))
    assert len(await reader.queues(scene.topic)) == 1


async def test_a_topic_that_may_only_be_written_gives_no_queues_to_read(scene: Scene) -> None:
    """behaviour.md §7.2: readable queue data only."""
    await scene.create_topic(perm=2)
    producer, reader = await scene.producer(), await scene.reader()
    await producer.send(Message(topic=scene.topic, body=b"x"))
    with pytest.raises(NoRoute, match=f"no broker lets topic {scene.topic} be read"):
        await reader.queues(scene.topic)


@pytest.mark.alone
async def test_an_order_configuration_fixes_the_queues(scene: Scene) -> None:
    """behaviour.md §7.2, §9.4: orderTopicConf as it lists them; name servers tell it with orderMessageEnable."""
    order = f"{scene.broker_name}:2"
    put = KVPut(namespace="ORDER_TOPIC_CONFIG", key=scene.topic, value=order)
    await scene.ask_name_server(request(RequestCode.PUT_KV_CONFIG, put))
    await scene.create_topic(queues=4, order=True)
    await scene.ask_name_server(request(RequestCode.UPDATE_NAMESRV_CONFIG, body=b"orderMessageEnable=true"))
    try:
        while (route := await scene.route(scene.topic)) is None or route.order_topic_conf != order:
            await asyncio.sleep(POLL_SECONDS)
        producer = await scene.producer()
        assert [queue.queue_id for queue in await producer.queues(scene.topic)] == [0, 1]
    finally:
        await scene.ask_name_server(request(RequestCode.UPDATE_NAMESRV_CONFIG, body=b"orderMessageEnable=false"))


async def test_a_new_queue_is_used_within_the_route_interval(scene: Scene) -> None:
    """behaviour.md §7.1: pollNameServerInterval."""
    await scene.create_topic(queues=1)
    producer = await scene.producer(route_interval_ms=ROUTE_INTERVAL_MS)
    assert len(await producer.queues(scene.topic)) == 1
    await scene.create_topic(queues=3)
    while len(await producer.queues(scene.topic)) < 3:
        await asyncio.sleep(POLL_SECONDS)
    results = [await producer.send(Message(topic=scene.topic, body=b"x")) for _ in range(3)]
    assert {result.queue.queue_id for result in results} == {0, 1, 2}


async def test_queues_that_were_taken_away_are_used_no_more(scene: Scene) -> None:
    """behaviour.md §7.1."""
    await scene.create_topic(queues=4)
    producer = await scene.producer(route_interval_ms=ROUTE_INTERVAL_MS)
    assert len(await producer.queues(scene.topic)) == 4
    await scene.create_topic(queues=1)
    while len(await producer.queues(scene.topic)) > 1:
        await asyncio.sleep(POLL_SECONDS)
    results = [await producer.send(Message(topic=scene.topic, body=b"x")) for _ in range(3)]
    assert {result.queue.queue_id for result in results} == {0}


async def test_a_topic_that_becomes_read_only_takes_no_more_messages(scene: Scene) -> None:
    """behaviour.md §7.1, §7.2."""
    await scene.create_topic(perm=6)
    producer = await scene.producer(route_interval_ms=ROUTE_INTERVAL_MS)
    await producer.send(Message(topic=scene.topic, body=b"x"))
    await scene.create_topic(perm=4)
    failure: NoRoute | None = None
    while failure is None:
        try:
            await producer.send(Message(topic=scene.topic, body=b"x"))
            await asyncio.sleep(POLL_SECONDS)
        except NoRoute as error:
            failure = error
    assert f"no broker accepts messages for topic {scene.topic}" in str(failure)


async def test_a_topic_that_becomes_writable_again_takes_messages_again(scene: Scene) -> None:
    """behaviour.md §7.1, §7.2."""
    await scene.create_topic(perm=4)
    producer = await scene.producer(route_interval_ms=ROUTE_INTERVAL_MS)
    with pytest.raises(NoRoute):
        await producer.send(Message(topic=scene.topic, body=b"x"))
    await scene.create_topic(perm=6)
    await producer.send(Message(topic=scene.topic, body=b"x"))
    assert len(await scene.stored(1)) == 1


async def test_a_deleted_topic_is_created_again_by_the_next_message(scene: Scene) -> None:
    """behaviour.md §7.1: a route once known is kept; §3.2."""
    await scene.create_topic(queues=1)
    producer = await scene.producer()
    await producer.send(Message(topic=scene.topic, body=b"before"))
    await scene.delete_topic(scene.topic)
    await producer.send(Message(topic=scene.topic, body=b"after"))
    assert [one.body for one in await scene.stored(1)] == [b"after"]


# -- brokers that are gone


@contextlib.asynccontextmanager
async def unreachable_broker(scene: Scene) -> AsyncIterator[str]:
    """Register a broker for the scene's topic at an address without a server. Yield its name."""
    name = f"broker-{scene.name}"
    header = RegisterBrokerRequest(
        broker_name=name,
        broker_addr=closed_port(),
        cluster_name=scene.peer.cluster,
        broker_id=0,
        ha_server_addr=closed_port(),
        enable_acting_master=False,
    )
    # A registration with a single topic does not replace an unknown broker.
    topics = (scene.topic, f"{scene.topic}-second")
    table = TopicConfigTable(
        topic_config_table={
            topic: TopicConfig(topic_name=topic, read_queue_nums=1, write_queue_nums=1) for topic in topics
        }
    )
    body = msgspec.json.encode(RegisterBrokerBody(topic_config_serialize_wrapper=table))
    registration = RemotingClient()
    try:
        answer = await registration.call(scene.namesrv, request(RequestCode.REGISTER_BROKER, header, body), 10_000)
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        yield name
    finally:
        await registration.close()
        while (route := await scene.route(scene.topic)) is not None and len(route.queue_datas) > 1:
            await asyncio.sleep(POLL_SECONDS)  # until the name server has removed the broker


async def test_a_broker_that_is_gone_is_left_for_another(scene: Scene) -> None:
    """behaviour.md §7.6: on a retry another broker."""
    await scene.create_topic(queues=1)
    async with unreachable_broker(scene) as gone:
        producer = await scene.producer()
        assert {queue.broker_name for queue in await producer.queues(scene.topic)} == {gone, scene.broker_name}
        results = [await producer.send(Message(topic=scene.topic, body=b"x")) for _ in range(6)]
    assert {result.queue.broker_name for result in results} == {scene.broker_name}
    assert len(await scene.stored(6)) == 6


async def test_without_retries_a_broker_that_is_gone_fails_the_send(scene: Scene) -> None:
    """behaviour.md §7.6."""
    await scene.create_topic(queues=1)
    async with unreachable_broker(scene) as gone:
        producer = await scene.producer(retries=0)
        sends = [producer.send(Message(topic=scene.topic, body=b"x")) for _ in range(2)]
        outcomes = await asyncio.gather(*sends, return_exceptions=True)
    (failure,) = (outcome for outcome in outcomes if isinstance(outcome, BaseException))
    assert f"not stored after 1 try on {gone}: cannot connect to" in str(failure)


async def test_a_given_queue_of_a_broker_that_is_gone_is_tried_once_where_that_is_set(scene: Scene) -> None:
    """behaviour.md §7.6."""
    await scene.create_topic(queues=1)
    async with unreachable_broker(scene) as gone:
        producer = await scene.producer(retry_chosen_queue=False)
        queue = MessageQueue(scene.topic, gone, 0)
        with pytest.raises(SendFailed, match=f"not stored after 1 try on {gone}") as failure:
            await producer.send(Message(topic=scene.topic, body=b"x"), queue=queue)
        assert isinstance(failure.value.cause, ConnectFailed)
        with pytest.raises(ConnectFailed):
            await producer.send_one_way(Message(topic=scene.topic, body=b"x"), queue=queue)


async def test_a_slow_or_failing_broker_can_be_avoided(scene: Scene) -> None:
    """behaviour.md §7.5: sendLatencyEnable; a failed send counts as ten seconds. An answer after 550 ms makes the
    client avoid its broker too; then it may choose any broker."""
    await scene.create_topic(queues=1)
    async with unreachable_broker(scene) as gone:
        producer = await scene.producer(avoid_slow_brokers=True, retries=0)
        failures = slow = 0
        for _ in range(8):
            begun = time.monotonic()
            try:
                await producer.send(Message(topic=scene.topic, body=b"x"))
            except SendFailed as failure:
                failures += 1
                assert failure.brokers == [gone]
            else:
                slow += time.monotonic() - begun > 0.5
    assert failures <= 1 or slow


# -- the client at the broker


async def test_a_producer_is_known_to_the_broker_until_it_closes(scene: Scene) -> None:
    """behaviour.md §7.1, §7.12: heartbeat and unregistration; remoting.md §1.5."""
    await scene.create_topic()
    producer = await scene.producer(heartbeat_interval_ms=50, client_ip="127.0.0.8", unit_name="unit")
    await producer.send(Message(topic=scene.topic, body=b"x"))
    while not (known := await scene.producers()):
        await asyncio.sleep(POLL_SECONDS)
    (connection,) = known
    assert connection.client_id.startswith(f"127.0.0.8@{os.getpid()}#")
    assert connection.client_id.endswith("@unit")
    assert connection.language == "PYTHON"
    await producer.close()
    assert await scene.producers() == []


async def test_every_producer_has_a_client_id_of_its_own(scene: Scene) -> None:
    """remoting.md §9.1."""
    await scene.create_topic()
    for _ in range(2):
        producer = await scene.producer(heartbeat_interval_ms=50)
        await producer.send(Message(topic=scene.topic, body=b"x"))
    while len(known := await scene.producers()) < 2:
        await asyncio.sleep(POLL_SECONDS)
    assert len({connection.client_id for connection in known}) == 2


async def test_producers_may_share_connections_but_not_a_group(scene: Scene) -> None:
    """behaviour.md §7.1: The producer group has been created before."""
    runtime = ClientRuntime(scene.namesrv, settings=producing())
    await runtime.start()
    try:
        async with (
            Producer(scene.group, runtime=runtime) as first,
            Producer(f"{scene.group}-other", runtime=runtime) as second,
        ):
            for producer in (first, second):
                await producer.send(Message(topic=scene.topic, body=b"x"), timeout=TIMEOUT_MS / 1000)
            with pytest.raises(ClientError, match=f"producer group {scene.group} exists in client .*: choose another"):
                await Producer(scene.group, runtime=runtime).start()
        assert len(await scene.stored(2)) == 2
    finally:
        await runtime.close()
