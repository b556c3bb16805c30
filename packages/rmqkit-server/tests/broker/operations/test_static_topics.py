"""Static topics at one broker: remoting.md §4.6.2. `tests/interop/suite` compares the answers with Apache's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rmqkit.errors import StoreMismatch
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command, decode_fields
from rmqkit.protocol.fastjson import loads
from rmqkit.protocol.schemas.pull import PullFlag
from rmqkit.system import disk
from tests.broker.cluster import Cluster
from tests.interop.static_topics import creation
from tests.virtual_time import run as run_virtual


async def ask(cluster, command):
    return await cluster.client.call(cluster.standalone.broker_address, command, 60_000)


async def send(cluster, number, topic="T"):
    answer = await cluster.send(topic=topic, queue_id=number)
    return answer.code, decode_fields(answer).get("queueId"), decode_fields(answer).get("queueOffset")


@pytest.mark.virtual_time
def test_a_static_topic_survives_a_restart_and_ends_with_its_topic(tmp_path):
    file = tmp_path / "store/config/topicQueueMapping.json"

    async def first():
        async with Cluster(tmp_path / "store") as cluster:
            assert (await ask(cluster, creation("T", "broker-a"))).code == 0
            await asyncio.gather(*(send(cluster, number) for number in (5, 3, 5)))

    async def second():
        async with Cluster(tmp_path / "store") as cluster:
            assert await send(cluster, 5) == (0, "5", "2")
            assert await send(cluster, -1) == (0, "3", "1")
            assert (await send(cluster, 0))[0] == 501
            assert (await cluster.ask(RequestCode.DELETE_TOPIC_IN_BROKER, topic="T")).code == 0
            assert loads(file.read_bytes())["topicQueueMappingInfoMap"] == {}
            assert await send(cluster, 0) == (0, "0", "0")

    run_virtual(first())
    run_virtual(second())


async def test_a_static_topic_is_written_once_and_reported_with_its_queues(monkeypatch, cluster):
    topics, saved = cluster.standalone.broker.context.topics, []
    write_all = disk.write_all

    def write(descriptor, data, position):
        if Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".journal":
            saved.append(data)
        write_all(descriptor, data, position)

    monkeypatch.setattr(disk, "write_all", write)
    registered = []
    tell = topics._on_change
    monkeypatch.setattr(
        topics, "_on_change", lambda configs: (registered.append(topics.snapshot(configs)), tell(configs))
    )
    for _ in range(2):  # the second changes nothing but the mapping's version
        assert (await ask(cluster, creation("T", "broker-a"))).code == 0
    assert len(saved) == 2
    assert [list(told.topic_queue_mapping_info_map) for told in registered] == [["T"], ["T"]]


async def test_an_answer_that_moves_a_group_of_a_static_topic_says_so_in_its_numbers(cluster):
    await ask(cluster, creation("T", "broker-a"))
    await asyncio.gather(*(send(cluster, 5) for _ in range(3)))
    await cluster.heartbeat("c", ("T", "*"))
    for _ in range(2):
        answer = await cluster.pull(3, queue_id=5, flags=PullFlag.SUBSCRIPTION | PullFlag.SUSPEND, suspend_ms=1)
        assert (answer.code, decode_fields(answer)["offsetDelta"]) == (19, "0")
    reset = {"topic": "T", "group": "g", "timestamp": -1, "isForce": "true"}
    assert (await cluster.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, **reset)).code == 0
    answer = await cluster.pull(0, queue_id=5)
    fields = decode_fields(answer)
    assert (answer.code, fields["nextBeginOffset"], fields["offsetDelta"]) == (21, "3", "0")


MOVED = [{"bname": "broker-b", "queueId": 0}, {"bname": "broker-a", "queueId": 0, "logicOffset": 9}]


@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        ({"bname": "other"}, "a mapping for broker other was given to broker broker-a"),
        (
            {"hostedQueues": {7: MOVED}},
            "queue 7 has been on another broker: rmqkit does not move queues of static topics",
        ),
    ],
)
async def test_what_is_not_supported_is_refused(changes, remark, cluster):
    answer = await ask(cluster, creation("T", "broker-a", **changes))
    assert (answer.code, answer.remark) == (1, remark)
    shown = await ask(cluster, Command(RequestCode.GET_TOPIC_CONFIG, fields={"topic": "T", "lo": "true"}))
    assert shown.code == 17


@pytest.mark.virtual_time
def test_a_store_with_moved_queues_is_not_opened(tmp_path):
    config = tmp_path / "store/config"
    config.mkdir(parents=True)
    detail = json.loads(creation("T", "broker-a", hostedQueues={7: MOVED}).payload)
    (config / "topicQueueMapping.json").write_text(json.dumps({"topicQueueMappingInfoMap": {"T": detail}}))

    async def start():
        async with Cluster(tmp_path / "store"):
            pass

    with pytest.raises(StoreMismatch, match="topic T: queue 7 has been on another broker"):
        run_virtual(start())
