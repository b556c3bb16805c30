"""Routes and the queues they give. Source: behaviour.md §7.2, §7.5; remoting.md §6.4.2."""

from __future__ import annotations

import msgspec
import pytest

from rmqkit.client.runtime.routes import (
    PublishQueues,
    broker_addresses,
    from_template,
    logical_queues,
    publish_queues,
    subscribe_queues,
)
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.topics import TopicQueueMappingInfo, TopicRoute

STRICT = (
    b'{"brokerDatas":[{"brokerAddrs":{"0":"127.0.0.1:21911"},"brokerName":"broker-a","cluster":"DefaultCluster",'
    b'"enableActingMaster":false}],"filterServerTable":{},"queueDatas":[{"brokerName":"broker-a","perm":6,'
    b'"readQueueNums":4,"topicSysFlag":0,"writeQueueNums":4}]}'
)
DIALECT = STRICT.replace(b'{"0":', b"{0:")


def route_of(*queue_datas: tuple[str, int, int, int], slaves_only: tuple[str, ...] = (), order: str = "") -> TopicRoute:
    """A route from (broker, read, write, perm) rows."""
    brokers = ",".join(
        f'{{"cluster":"c","brokerName":"{name}","brokerAddrs":{{"{1 if name in slaves_only else 0}":"h:1"}}}}'
        for name, *_ in queue_datas
    )
    queues = ",".join(
        f'{{"brokerName":"{name}","readQueueNums":{read},"writeQueueNums":{write},"perm":{perm}}}'
        for name, read, write, perm in queue_datas
    )
    text = f'{{"brokerDatas":[{brokers}],"queueDatas":[{queues}],"orderTopicConf":"{order}"}}'
    return decode_as(text.encode(), TopicRoute)


def named(queues: list[MessageQueue]) -> str:
    return " ".join(f"{queue.broker_name}{queue.queue_id}" for queue in queues)


@pytest.mark.parametrize("body", [STRICT, DIALECT])
def test_the_reference_answer_gives_four_queues_and_an_address(body):
    route = decode_as(body, TopicRoute)
    assert publish_queues("T", route) == [MessageQueue("T", "broker-a", i) for i in range(4)]
    assert subscribe_queues("T", route) == [MessageQueue("T", "broker-a", i) for i in range(4)]
    assert broker_addresses(route) == {"broker-a": {0: "127.0.0.1:21911"}}


def test_queues_come_sorted_by_broker_with_their_own_counts():
    route = route_of(("b", 1, 2, 6), ("a", 3, 1, 6))
    assert named(publish_queues("T", route)) == "a0 b0 b1"
    assert named(subscribe_queues("T", route)) == "a0 a1 a2 b0"


def test_permissions_decide():
    route = route_of(("a", 2, 2, 4), ("b", 2, 2, 2), ("c", 2, 2, 0))
    assert named(publish_queues("T", route)) == "b0 b1"
    assert named(subscribe_queues("T", route)) == "a0 a1"


def test_a_broker_without_master_is_read_but_not_written():
    route = route_of(("a", 1, 1, 6), ("b", 1, 1, 6), slaves_only=("b",))
    assert named(publish_queues("T", route)) == "a0"
    assert named(subscribe_queues("T", route)) == "a0 b0"


def test_an_order_configuration_is_taken_as_it_is():
    route = route_of(("a", 8, 8, 6), ("b", 8, 8, 6), order="b:2;a:1;c;d:x;")
    assert named(publish_queues("T", route)) == "b0 b1 a0"


def test_a_template_gives_at_most_the_wanted_queues():
    template = route_of(("a", 8, 16, 7), ("b", 2, 8, 7))
    assert named(publish_queues("T", from_template(template, 4))) == "a0 a1 a2 a3 b0 b1"
    assert template.queue_datas[0].write_queue_nums == 16


def test_queues_are_picked_in_turn():
    queues = publish_queues("T", route_of(("a", 2, 2, 6)))
    publish = PublishQueues(queues, start=1)
    assert named([publish.pick() for _ in range(5)]) == "a1 a0 a1 a0 a1"


def test_a_retry_avoids_the_broker_that_failed():
    publish = PublishQueues(publish_queues("T", route_of(("a", 2, 2, 6), ("b", 2, 2, 6))))
    assert {publish.pick("a").broker_name for _ in range(20)} == {"b"}


def test_with_one_broker_only_its_queues_are_picked_in_turn_all_the_same():
    publish = PublishQueues(publish_queues("T", route_of(("a", 3, 3, 6))))
    picked = [publish.pick("a").queue_id for _ in range(6)]
    assert len(set(picked[:3])) == 3


def test_queues_of_a_static_topic_are_numbered_over_all_brokers_and_the_newest_mapping_counts():
    route = route_of(("broker-a", 2, 2, 6), ("broker-b", 1, 1, 6))
    info = {"scope": "__global__", "topic": "T", "totalQueues": 4}
    mappings = {
        "broker-b": {**info, "bname": "broker-b", "epoch": 8, "currIdMap": {"1": 0}},
        "broker-a": {**info, "bname": "broker-a", "epoch": 7, "currIdMap": {"0": 0, "1": 1}},
    }
    route.topic_queue_mapping_by_broker = msgspec.convert(mappings, dict[str, TopicQueueMappingInfo], strict=False)
    found = logical_queues("T", route)
    assert publish_queues("T", route) == subscribe_queues("T", route) == sorted(found)
    assert {queue.broker_name for queue in found} == {"__syslo__global__"}
    assert [found[queue] for queue in sorted(found)] == ["broker-a", "broker-b", "__syslo__none__", "__syslo__none__"]
