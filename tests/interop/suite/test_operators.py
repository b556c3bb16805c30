"""Requests of operators to running consumers through a broker. Source: behaviour.md §8.15, §9.9; remoting.md §4.5."""

from __future__ import annotations

import asyncio

from rmqkit import ConsumeLater, PushConsumer, ReceivedMessage
from rmqkit.protocol import fastjson
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import request
from rmqkit.protocol.schemas.clients import (
    ConsumeDirectlyRequest,
    ConsumeMessageDirectlyResult,
    ConsumerGroupRequest,
    RunningInfoRequest,
)
from tests.interop.suite.consuming import (
    Received,
    client_ids,
    committed,
    connection,
    eventually,
    queue,
    running_info,
    send,
    until,
)
from tests.interop.suite.scene import Scene


async def started(scene: Scene, handler: object, **settings: object) -> PushConsumer:
    await scene.create_topic()
    consumer = scene.push_consumer(**settings)
    consumer.subscribe(scene.topic, "*", handler)  # type: ignore[arg-type]
    await consumer.start()
    return consumer


async def consume_directly(scene: Scene, offset_msg_id: str) -> ConsumeMessageDirectlyResult:
    """Send the request of `mqadmin queryMsgById -g -d`."""
    (client_id,) = await eventually(lambda: client_ids(scene), lambda ids: len(ids) == 1, "one member")
    header = ConsumeDirectlyRequest(
        consumer_group=scene.group, client_id=client_id, msg_id=offset_msg_id, topic=scene.topic
    )
    answer = await scene.ask_broker(request(RequestCode.CONSUME_MESSAGE_DIRECTLY, header))
    return fastjson.decode_as(answer.payload, ConsumeMessageDirectlyResult)


async def test_a_member_reports_its_settings_subscriptions_and_queues(scene: Scene) -> None:
    """behaviour.md §8.15: GET_CONSUMER_RUNNING_INFO."""
    received = Received()
    consumer = await started(scene, received, handlers_max=7)
    await send(scene, "0", "1")
    await received.at_least(2)
    info = await eventually(
        lambda: running_info(scene), lambda seen: seen.mq_table[queue(scene)].commit_offset == 2, "the offset"
    )
    held = info.mq_table[queue(scene)]
    assert (held.cached_msg_count, held.droped, held.locked) == (0, False, False)
    assert held.last_pull_timestamp > 0
    assert held.last_consume_timestamp > 0
    assert set(info.mq_table) <= consumer.held_queues()
    assert {one.topic: one.sub_string for one in info.subscription_set} == {
        scene.topic: "*",
        f"%RETRY%{scene.group}": "*",
    }
    wanted = {
        "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY",
        "PROP_CONSUMEORDERLY": "false",
        "PROP_THREADPOOL_CORE_SIZE": "7",
        "consumeThreadMax": "7",
        "messageModel": "CLUSTERING",
    }
    assert wanted.items() <= info.properties.items()
    assert int(info.properties["PROP_CONSUMER_START_TIMESTAMP"]) > 0
    assert info.jstack is None


async def test_a_member_reports_what_it_holds_and_has_not_handled(scene: Scene) -> None:
    """behaviour.md §8.15: cached minimum, maximum, count, size."""
    await scene.create_topic()
    await send(scene, *"01234")
    release, seen = asyncio.Event(), []

    async def handler(message: ReceivedMessage) -> None:
        await release.wait()
        seen.append(message)

    consumer = scene.push_consumer()
    consumer.subscribe(scene.topic, "*", handler)
    await consumer.start()
    info = await eventually(
        lambda: running_info(scene),
        lambda found: queue(scene) in found.mq_table and found.mq_table[queue(scene)].cached_msg_count == 5,
        "five messages",
    )
    held = info.mq_table[queue(scene)]
    assert (held.commit_offset, held.cached_msg_min_offset, held.cached_msg_max_offset) == (0, 0, 4)
    release.set()
    await until(lambda: len(seen) == 5, "all of them")


async def test_a_member_reports_where_its_threads_and_tasks_stand(scene: Scene) -> None:
    """behaviour.md §8.15: optional stack dump."""
    begun, release = asyncio.Event(), asyncio.Event()

    async def a_handler_with_a_name(message: ReceivedMessage) -> None:
        begun.set()
        await release.wait()

    await started(scene, a_handler_with_a_name)
    await send(scene, "0")
    await begun.wait()
    info = await running_info(scene, jstack=True)
    assert info.jstack is not None
    assert "thread MainThread" in info.jstack
    assert f"of group {scene.group}" in info.jstack
    assert "a_handler_with_a_name" in info.jstack
    release.set()


async def test_a_member_that_is_not_there_cannot_be_asked(scene: Scene) -> None:
    """behaviour.md §8.15, §9.9: CONSUMER_NOT_ONLINE."""
    await started(scene, Received())
    header = RunningInfoRequest(scene.group, "nobody")
    answer = await scene.ask_anyway(request(RequestCode.GET_CONSUMER_RUNNING_INFO, header))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert f"The Consumer <{scene.group}> <nobody> not online" in (answer.remark or "")


async def test_the_members_of_a_group_are_listed_with_language_and_version(scene: Scene) -> None:
    """behaviour.md §9.9: consumerConnection."""
    await started(scene, Received())
    (client,) = (await connection(scene)).connection_set
    assert client.client_addr.startswith("127.0.0.1:")
    assert (client.language, client.version > 0) == ("PYTHON", True)


async def test_a_group_without_members_has_no_connections(scene: Scene) -> None:
    """behaviour.md §9.9: CONSUMER_NOT_ONLINE."""
    consumer = await started(scene, Received())
    await consumer.close()
    command = request(RequestCode.GET_CONSUMER_CONNECTION_LIST, ConsumerGroupRequest(scene.group))
    answer = await eventually(
        lambda: scene.ask_anyway(command),
        lambda seen: seen.code == ResponseCode.CONSUMER_NOT_ONLINE,
        "a group that is not online",
    )
    assert f"the consumer group[{scene.group}] not online" in (answer.remark or "")


async def test_an_operator_has_a_message_consumed_again(scene: Scene) -> None:
    """behaviour.md §8.15: CONSUME_MESSAGE_DIRECTLY."""
    received = Received()
    await started(scene, received)
    (sent,) = await send(scene, "0", tags="TagA", properties={"a": "b"})
    await received.at_least(1)
    assert sent.offset_msg_id is not None
    result = await consume_directly(scene, sent.offset_msg_id)
    assert (result.consume_result, result.order, result.auto_commit) == ("CR_SUCCESS", False, True)
    first, again = received.messages
    assert (again.body, again.msg_id, again.tags) == (first.body, first.msg_id, first.tags)
    assert await committed(scene) <= 1


async def test_an_operator_is_notified_that_the_handler_put_the_message_off(scene: Scene) -> None:
    """behaviour.md §8.15: CR_LATER."""
    times: list[int] = []

    async def handler(message: ReceivedMessage) -> None:
        times.append(message.reconsume_times)
        if len(times) == 2:
            raise ConsumeLater

    await started(scene, handler)
    (sent,) = await send(scene, "0")
    await until(lambda: len(times) == 1, "the first time")
    assert (await consume_directly(scene, sent.offset_msg_id or "")).consume_result == "CR_LATER"


async def test_an_operator_is_notified_what_the_handler_raised(scene: Scene) -> None:
    """behaviour.md §8.15: CR_THROW_EXCEPTION."""
    times: list[int] = []

    def handler(message: ReceivedMessage) -> None:
        times.append(message.reconsume_times)
        if len(times) == 2:
            raise ValueError("no stock")

    await started(scene, handler)
    (sent,) = await send(scene, "0")
    await until(lambda: len(times) == 1, "the first time")
    result = await consume_directly(scene, sent.offset_msg_id or "")
    assert result.consume_result == "CR_THROW_EXCEPTION"
    assert "no stock" in (result.remark or "")
    assert len(times) == 2, "the message is not redelivered"


async def test_an_ordered_member_says_that_it_is_one(scene: Scene) -> None:
    """behaviour.md §8.15: order."""
    await scene.create_topic()
    received = Received()
    consumer = scene.closing(
        PushConsumer(scene.group, scene.namesrv, settings=scene.push_consumer().settings, ordered=True)
    )
    consumer.subscribe(scene.topic, "*", received)
    await consumer.start()
    (sent,) = await send(scene, "0")
    await received.at_least(1)
    result = await consume_directly(scene, sent.offset_msg_id or "")
    assert (result.order, result.consume_result) == (True, "CR_SUCCESS")
