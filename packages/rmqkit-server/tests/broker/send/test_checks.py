"""The checks of a send one by one, with the exact bounds and remarks of the reference (behaviour.md §3.1)."""

from __future__ import annotations

from datetime import datetime
from types import SimpleNamespace

import pytest

from rmqkit.broker.durability import REJECTED
from rmqkit.broker.send.checks import SendChecks, stamps_of, tries_max
from rmqkit.broker.send.refusals import RefusalHandlers
from rmqkit.broker.settings import BrokerSettings
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_fields
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.send import SendMessageRequest
from rmqkit.protocol.schemas.topics import Permission, TopicConfig
from rmqkit.testing.clock import StandingClock

CONNECTION = SimpleNamespace(peer="10.0.0.1:7")


class Topics:
    """A topic table with some topics; it notes which topics are created."""

    def __init__(self, *configs):
        self.configs = {config.topic_name: config for config in configs}
        self.created = []

    def get(self, name):
        return self.configs.get(name)

    def create_for_send(self, name, *, template, queue_count, unit):
        self.created.append((name, template, queue_count, unit))
        return TopicConfig(name, queue_count, queue_count) if template == "TBW102" else None


def checked(topics, queue_id=0, name="T", template="TBW102", unit_mode=False, now_ms=1000, **settings):
    checks = SendChecks(
        SimpleNamespace(
            settings=BrokerSettings(**settings),
            identity=SimpleNamespace(ip="10.0.0.9"),
            topics=topics,
            clock=StandingClock(now_ms),
        )
    )
    header = SendMessageRequest("p", name, template, 4, queue_id, 0, 1, 0, properties="", unit_mode=unit_mode)
    return checks.topic_of(CONNECTION, header)


@pytest.mark.parametrize(("queues", "last"), [((2, 4), 3), ((4, 2), 3), ((1, 1), 0)])
def test_the_greater_number_of_queues_bounds_the_queue_id(queues, last):
    topic = TopicConfig("T", *queues)
    for queue_id in (-1, 0, last):
        assert checked(Topics(topic), queue_id) is topic
    code, remark = checked(Topics(topic), last + 1)
    assert code == ResponseCode.INVALID_PARAMETER
    assert remark.startswith(f"request queueId[{last + 1}] is illegal, TopicConfig [topicName=T, ")
    assert remark.endswith(" Producer: 10.0.0.1:7")


@pytest.mark.parametrize(("perm", "letters"), [(0, "---"), (1, "--X"), (2, "-W-"), (4, "R--"), (6, "RW-"), (7, "RWX")])
@pytest.mark.parametrize("order", [False, True])
def test_a_remark_describes_the_topic_as_the_reference_does(perm, letters, order):
    topic = TopicConfig("T", 2, 3, perm=perm, topic_sys_flag=5, order=order, attributes={"a": "1", "b": "2"})
    _, remark = checked(Topics(topic), 9)
    assert remark == (
        "request queueId[9] is illegal, TopicConfig [topicName=T, readQueueNums=2, writeQueueNums=3, "
        f"perm={letters}, topicFilterType=SINGLE_TAG, topicSysFlag=5, order={str(order).lower()}, "
        "attributes={a=1, b=2}] Producer: 10.0.0.1:7"
    )


def test_sends_are_accepted_from_the_millisecond_that_is_set():
    from_ms, topic = 1_700_000_000_007, TopicConfig("T")
    assert checked(Topics(topic), now_ms=from_ms, accept_sends_from_ms=from_ms) is topic
    refusal = checked(Topics(topic), now_ms=from_ms - 1, accept_sends_from_ms=from_ms)
    local = datetime.fromtimestamp(from_ms // 1000)
    assert refusal == (
        ResponseCode.SYSTEM_ERROR,
        f"broker unable to service, until {local:%Y-%m-%d %H:%M:%S},007",
    )


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("permission", [Permission.READ, Permission.READ | Permission.WRITE])
def test_a_broker_that_may_not_write_refuses_ordered_topics_only(order, permission):
    topic = TopicConfig("T", order=order)
    found = checked(Topics(topic), broker_permission=permission)
    if order and permission == Permission.READ:
        assert found == (ResponseCode.NO_PERMISSION, "the broker[10.0.0.9] sending message is forbidden")
    else:
        assert found is topic


def test_only_an_unknown_topic_with_a_sound_name_is_created():
    topics = Topics(TopicConfig("T"))
    checked(topics)
    assert checked(topics, name="a b")[0] == ResponseCode.INVALID_PARAMETER
    assert checked(topics, name="SCHEDULE_TOPIC_XXXX") == (
        ResponseCode.NO_PERMISSION,
        "Sending message to topic[SCHEDULE_TOPIC_XXXX] is forbidden.",
    )
    assert topics.created == []
    assert checked(topics, name="U").topic_name == "U"
    code, remark = checked(topics, name="V", template="none", unit_mode=True)
    assert (code, remark.startswith("topic[V] not exist, apply first please!")) == (ResponseCode.TOPIC_NOT_EXIST, True)
    assert topics.created == [("U", "TBW102", 4, False), ("V", "none", 4, True)]


@pytest.mark.parametrize(("version", "asked", "tries"), [(120, 2, 16), (121, 2, 2), (122, 0, 0), (500, None, 16)])
def test_clients_from_3_4_9_on_say_how_often_a_message_is_consumed(version, asked, tries):
    command = Command(RequestCode.CONSUMER_SEND_MSG_BACK, 1)
    command.version = version
    assert tries_max(command, asked, SubscriptionGroupConfig(group_name="g", retry_max_times=16)) == tries


@pytest.mark.parametrize(("trace_on", "text"), [(True, "true"), (False, "false")])
def test_every_message_gets_region_trace_and_cluster_and_the_answer_the_first_two(trace_on, text):
    settings = BrokerSettings(region_id="r", trace_on=trace_on, cluster_name="c")
    answered = {"MSG_REGION": "r", "TRACE_ON": text}
    assert stamps_of(settings) == ({**answered, "CLUSTER": "c"}, answered)


@pytest.mark.parametrize("code", [RequestCode.SEND_MESSAGE, RequestCode.CONSUMER_SEND_MSG_BACK])
@pytest.mark.parametrize("acts_as_master", [False, True])
def test_a_slave_refuses_messages_so_that_clients_try_elsewhere(code, acts_as_master):
    settings = BrokerSettings(acts_as_master=acts_as_master, region_id="r")
    refusals = RefusalHandlers(SimpleNamespace(settings=settings, identity=SimpleNamespace(ip="10.0.0.9")))
    is_send = code == RequestCode.SEND_MESSAGE
    answer = (refusals.send if is_send else refusals.send_back)(CONNECTION, Command(code, 1))
    if not acts_as_master:
        assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_BUSY, REJECTED)
    elif is_send:
        assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
        assert answer.remark.endswith("message store has been shut down, etc. this broker is a slave")
        assert decode_fields(answer) == {"MSG_REGION": "r", "TRACE_ON": "true"}
    else:
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert answer.remark == "no master available along with 10.0.0.9"
