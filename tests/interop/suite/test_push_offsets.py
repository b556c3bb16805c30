"""Start offsets of push consumers, saved offsets, and resets by an operator. Source: behaviour.md §5, §8.9."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rmqkit import MessageModel, MessageQueue, PushConsumer, ReceivedMessage, StartFrom
from rmqkit.client.runtime.settings import Pulling
from rmqkit.protocol import fastjson
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import request
from rmqkit.protocol.schemas.clients import ConsumerRunningInfo
from rmqkit.protocol.schemas.offsets import ConsumerStatus, ConsumerStatusRequest
from tests.interop.suite.consuming import (
    Received,
    client_ids,
    commit,
    committed,
    eventually,
    is_committed,
    queue,
    reset_offset,
    running_info,
    send,
)
from tests.interop.suite.scene import Scene


async def started(scene: Scene, received: Received, **settings: Any) -> PushConsumer:
    consumer = scene.push_consumer(**settings)
    consumer.subscribe(scene.topic, "*", received)
    await consumer.start()
    return consumer


def broadcasting(scene: Scene, **settings: Any) -> dict[str, Any]:
    return {
        "message_model": MessageModel.BROADCASTING,
        "offsets_dir": str(scene.peer.work_dir / scene.name),
        "instance_name": scene.name,
        **settings,
    }


def local_offsets(scene: Scene) -> dict[str, int]:
    """Return the offsets that the broadcasting consumer has saved: queue as JSON → offset."""
    paths: list[Path] = list((scene.peer.work_dir / scene.name).glob(f"*/{scene.group}/offsets.json"))
    return fastjson.loads(paths[0].read_bytes())["offsetTable"] if paths else {}


def committed_here(info: ConsumerRunningInfo, one: MessageQueue) -> int | None:
    """Return the offset that a member reports for a queue, None while it does not have the queue."""
    return info.mq_table[one].commit_offset if one in info.mq_table else None


async def later_one(scene: Scene) -> ReceivedMessage:
    """Send one more message, stored in a later millisecond than the earlier ones."""
    before = await scene.stored(1)
    while True:
        await send(scene, "later")
        stored = await scene.stored(len(before) + 1)
        if stored[-1].store_timestamp > before[-1].store_timestamp:
            return stored[-1]
        before = stored


# -- where a group begins


async def test_a_new_group_begins_at_the_first_message(scene: Scene) -> None:
    """behaviour.md §8.9: CONSUME_FROM_FIRST_OFFSET."""
    await scene.create_topic()
    await send(scene, "0", "1")
    received = Received()
    await started(scene, received, start_from=StartFrom.FIRST_OFFSET)
    assert await received.at_least(2) == ["0", "1"]


@pytest.mark.parametrize("start_from", [StartFrom.LAST_OFFSET, StartFrom.TIMESTAMP])
async def test_a_new_group_of_a_young_queue_begins_at_its_first_message_anyway(
    scene: Scene, start_from: StartFrom
) -> None:
    """behaviour.md §5.2, §8.9: the broker answers 0, not that it has no offset."""
    await scene.create_topic()
    await send(scene, "0", "1")
    received = Received()
    await started(scene, received, start_from=start_from)
    assert await received.at_least(2) == ["0", "1"]


@pytest.mark.parametrize("start_from", list(StartFrom))
async def test_a_group_that_has_an_offset_begins_there_with_any_settings(scene: Scene, start_from: StartFrom) -> None:
    """behaviour.md §8.9: stored offset ≥ 0 always wins."""
    await scene.create_topic()
    await send(scene, "0", "1", "2")
    await commit(scene, 1)
    received = Received()
    await started(scene, received, start_from=start_from)
    assert await received.at_least(2) == ["1", "2"]


async def test_a_broadcasting_consumer_with_last_offset_begins_at_the_end(scene: Scene) -> None:
    """behaviour.md §8.9."""
    await scene.create_topic()
    await send(scene, "0", "1")
    received = Received()
    consumer = await started(scene, received, **broadcasting(scene, start_from=StartFrom.LAST_OFFSET))
    await eventually(lambda: running_info(scene), lambda info: committed_here(info, queue(scene)) == 2, "the position")
    await send(scene, "2")
    assert await received.at_least(1) == ["2"]
    await consumer.close()


async def test_a_broadcasting_consumer_with_a_timestamp_begins_at_that_time(scene: Scene) -> None:
    """behaviour.md §8.9: CONSUME_FROM_TIMESTAMP."""
    await scene.create_topic()
    await send(scene, "0", "1")
    later = await later_one(scene)
    received = Received()
    settings = broadcasting(scene, start_from=StartFrom.TIMESTAMP, start_timestamp_ms=later.store_timestamp)
    await started(scene, received, **settings)
    await received.at_least(1)
    assert received.messages[0].queue_offset == later.queue_offset


async def test_a_broadcasting_consumer_continues_at_the_offset_in_its_file(scene: Scene) -> None:
    """behaviour.md §5.6."""
    await scene.create_topic()
    await send(scene, "0", "1")
    first, second = Received(), Received()
    consumer = await started(scene, first, **broadcasting(scene))
    await first.at_least(2)
    await consumer.close()
    assert list(local_offsets(scene).values()) == [2]
    await send(scene, "2")
    await started(scene, second, **broadcasting(scene))
    assert await second.at_least(1) == ["2"]


async def test_a_broadcasting_consumer_saves_its_file_while_it_runs_and_nothing_at_the_broker(scene: Scene) -> None:
    """behaviour.md §5.6."""
    await scene.create_topic()
    received = Received()
    await started(scene, received, **broadcasting(scene))
    await send(scene, "0", "1", "2")
    await received.at_least(3)

    async def saved() -> list[int]:
        return list(local_offsets(scene).values())

    await eventually(saved, lambda offsets: offsets == [3], "the offset in the file")
    assert await committed(scene) == -1


# -- saved offsets


async def test_offsets_are_saved_on_the_interval(scene: Scene) -> None:
    """behaviour.md §5.6: persistConsumerOffsetInterval."""
    await scene.create_topic(queues=2)
    received = Received()
    await started(scene, received, persist_interval_ms=50)
    await send(scene, "0", "1", "2")
    await send(scene, "3", queue_id=1)
    await received.at_least(4)
    await is_committed(scene, 3)
    await is_committed(scene, 1, queue_id=1)


async def test_the_next_member_continues_where_the_last_one_stopped(scene: Scene) -> None:
    """behaviour.md §5.6, §8.9."""
    await scene.create_topic()
    await send(scene, "0", "1")
    first, second = Received(), Received()
    consumer = await started(scene, first)
    await first.at_least(2)
    await consumer.close()
    await send(scene, "2")
    await started(scene, second)
    assert await second.at_least(1) == ["2"]


async def test_a_group_that_never_got_a_message_misses_none_that_comes_while_it_is_away(scene: Scene) -> None:
    """behaviour.md §5.6, §8.9."""
    await scene.create_topic()
    received = Received()
    consumer = await started(scene, Received(), start_from=StartFrom.LAST_OFFSET)
    await eventually(lambda: running_info(scene), lambda info: queue(scene) in info.mq_table, "the queue")
    await consumer.close()
    await send(scene, "while nobody was there")
    await started(scene, received, start_from=StartFrom.LAST_OFFSET)
    assert await received.at_least(1) == ["while nobody was there"]


async def test_an_offset_beyond_the_end_is_corrected_by_the_broker(scene: Scene) -> None:
    """behaviour.md §4.2, §8.6: OFFSET_ILLEGAL."""
    await scene.create_topic()
    await send(scene, "0", "1")
    await commit(scene, 100)
    received = Received()
    await started(scene, received)
    await is_committed(scene, 2)
    await send(scene, "2")
    assert await received.at_least(1) == ["2"]


# -- resets by an operator


async def test_an_operator_sets_a_running_group_back_to_a_time(scene: Scene) -> None:
    """behaviour.md §5.4: server-side reset."""
    await scene.create_topic(queues=2)
    received = Received()
    await started(scene, received, pull=Pulling(suspend_ms=1000))  # a waiting pull may not notice the reset
    await send(scene, "0", "1")
    await send(scene, "2", queue_id=1)
    await received.at_least(3)
    await is_committed(scene, 2)
    await reset_offset(scene, 0)
    assert sorted(await received.at_least(6)) == ["0", "0", "1", "1", "2", "2"]
    await is_committed(scene, 2)


async def test_an_operator_sets_one_queue_to_an_offset(scene: Scene) -> None:
    """behaviour.md §5.4."""
    await scene.create_topic(queues=2)
    received = Received()
    await started(scene, received, pull=Pulling(suspend_ms=1000))
    await send(scene, "0", "1", "2")
    await send(scene, "other", queue_id=1)
    await received.at_least(4)
    await is_committed(scene, 3)
    await is_committed(scene, 1, queue_id=1)
    await reset_offset(scene, -1, queue_id=0, offset=1)
    assert (await received.at_least(6))[4:] == ["1", "2"]


async def test_an_operator_has_a_group_skip_what_has_piled_up(scene: Scene) -> None:
    """behaviour.md §5.4, §9.9: skipAccumulatedMessage."""
    await scene.create_topic()
    await send(scene, "0", "1", "2")
    await commit(scene, 1)
    await reset_offset(scene, -1)
    received = Received()
    await started(scene, received)
    await is_committed(scene, 3)
    await send(scene, "3")
    assert await received.at_least(1) == ["3"]


async def test_an_operator_cannot_set_a_queue_beyond_its_end(scene: Scene) -> None:
    """behaviour.md §5.4."""
    await scene.create_topic()
    received = Received()
    await started(scene, received)
    await send(scene, "0")
    await received.at_least(1)
    with pytest.raises(AssertionError, match=r"not in consume queue range \[0-1\]"):
        await reset_offset(scene, -1, queue_id=0, offset=9)


async def test_a_member_reports_its_offsets_through_the_broker(scene: Scene) -> None:
    """behaviour.md §8.15: GET_CONSUMER_STATUS_FROM_CLIENT."""
    await scene.create_topic(queues=2)
    received = Received()
    await started(scene, received)
    await send(scene, "0", "1")
    await send(scene, "2", queue_id=1)
    await received.at_least(3)
    (client_id,) = await client_ids(scene)
    command = request(
        RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, ConsumerStatusRequest(scene.topic, scene.group, client_id)
    )
    answer = await scene.ask_broker(command)
    table = fastjson.decode_as(answer.payload, ConsumerStatus).consumer_table
    assert table == {client_id: {queue(scene, 0): 2, queue(scene, 1): 1}}


@pytest.mark.alone
async def test_a_reset_may_be_carried_out_by_the_members_themselves(scene: Scene) -> None:
    """behaviour.md §5.3: RESET_CONSUMER_CLIENT_OFFSET."""
    await scene.create_topic()
    received = Received()
    await started(scene, received, pull=Pulling(suspend_ms=1000))
    await send(scene, "0", "1")
    await received.at_least(2)
    await is_committed(scene, 2)
    await configure(scene, "useServerSideResetOffset=false")
    try:
        await reset_offset(scene, 0)
        assert await received.at_least(4) == ["0", "1", "0", "1"]
    finally:
        await configure(scene, "useServerSideResetOffset=true")


async def configure(scene: Scene, text: str) -> None:
    await scene.ask_broker(request(RequestCode.UPDATE_BROKER_CONFIG, body=text.encode()))
