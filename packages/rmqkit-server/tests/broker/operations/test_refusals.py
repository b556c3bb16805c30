"""A slave's answers to messages (behaviour.md §2.4, §10.2, §10.5; store.md §21.5)."""

from __future__ import annotations

import pytest

from rmqkit.broker.settings import BrokerRole
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_fields
from tests.broker.cluster import Cluster

SLAVE = {"broker_role": BrokerRole.SLAVE, "broker_id": 1}
REJECTED = "[REJECTREQUEST]system busy, start flow control for a while"
BACK = {"offset": 0, "group": "g", "delayLevel": 0, "originMsgId": "", "originTopic": "T", "unitMode": "false"}


async def messages(cluster):
    """The answers to messages of all kinds."""
    codes = (RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)
    sent = [await cluster.send("New", code=code) for code in codes]
    return [*sent, await cluster.ask(RequestCode.CONSUMER_SEND_MSG_BACK, **BACK)]


async def has_topics(cluster, *names):
    return [(await cluster.ask(RequestCode.GET_TOPIC_CONFIG, topic=name)).code == 0 for name in names]


@pytest.mark.parametrize("is_answered", [True, False])
async def test_a_slave_takes_no_messages_and_makes_no_topics_for_them(is_answered, tmp_path):
    async with Cluster(tmp_path / "store", broker=SLAVE | {"slave_read": is_answered}) as cluster:
        answers = await messages(cluster)
        reply = RequestCode.SEND_REPLY_MESSAGE_V2
        answers.append(await cluster.send("DefaultCluster_REPLY_TOPIC", code=reply))
        assert {(answer.code, answer.remark) for answer in answers} == {(ResponseCode.SYSTEM_BUSY, REJECTED)}
        assert all(decode_fields(answer) == {} for answer in answers)
        assert await has_topics(cluster, "New", "%RETRY%g") == [False, False]


async def test_a_slave_that_may_act_as_master_sends_producers_to_another_broker(tmp_path):
    async with Cluster(tmp_path / "store", broker=SLAVE | {"acts_as_master": True}) as cluster:
        *sent, back = await messages(cluster)
        assert [answer.code for answer in sent] == [ResponseCode.SERVICE_NOT_AVAILABLE] * 3
        assert all(answer.remark.startswith("service not available now.") for answer in sent)
        assert decode_fields(sent[0]) == {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}
        assert (back.code, back.remark) == (ResponseCode.SYSTEM_ERROR, "no master available along with 127.0.0.1")
        assert await has_topics(cluster, "New", "%RETRY%g") == [False, False]
