"""Requests that a broker accepts only from ``adminAllowedAddresses``."""

from __future__ import annotations

import pytest

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command
from rmqkit.remoting.address import AdminAddresses
from tests.broker.cluster import Cluster
from tests.elsewhere import BELIEVES_US, ask_from_elsewhere

GUARDED = {
    RequestCode.UPDATE_BROKER_CONFIG,
    RequestCode.UPDATE_AND_CREATE_TOPIC,
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST,
    RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC,
    RequestCode.DELETE_TOPIC_IN_BROKER,
    RequestCode.DELETE_TOPIC_IN_BROKER_LIST,
    RequestCode.DELETE_SUBSCRIPTION_GROUP_LIST,
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
    RequestCode.DELETE_SUBSCRIPTIONGROUP,
    RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN,
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
    RequestCode.CLONE_GROUP_OFFSET,
    RequestCode.CONSUME_MESSAGE_DIRECTLY,
    RequestCode.RESUME_CHECK_HALF_MESSAGE,
    RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE,
    RequestCode.CLEAN_UNUSED_TOPIC,
    RequestCode.DELETE_EXPIRED_COMMITLOG,
    RequestCode.RESET_MASTER_FLUSH_OFFSET,
    RequestCode.SET_MESSAGE_REQUEST_MODE,
    RequestCode.TRIGGER_LITE_DISPATCH,
    RequestCode.AUTH_CREATE_USER,
    RequestCode.AUTH_UPDATE_USER,
    RequestCode.AUTH_DELETE_USER,
    RequestCode.AUTH_GET_USER,
    RequestCode.AUTH_LIST_USER,
    RequestCode.AUTH_CREATE_ACL,
    RequestCode.AUTH_UPDATE_ACL,
    RequestCode.AUTH_DELETE_ACL,
}
NO_ANSWER = {RequestCode.END_TRANSACTION}
"""Without fields there is nothing to answer."""
CLIENTS_OWN = {
    *(10, 11, 12, 14, 15, 21, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 41, 42, 43, 46, 201),
    *(310, 320, 324, 325, 361, 370, 400, 200050, 200051, 200052, 200053, 200054, 200055, 200070, 200071, 200151),
}
"""What producers and consumers ask, and slaves of their master."""
READING = {
    *(26, 28, 45, 60, 61, 202, 203, 204, 208, 223, 300, 303, 305, 307, 308, 315, 317, 321, 328, 343, 345, 351, 352),
    *(402, 907, 1007, 3009, 3010, 200074, 200075, 200076, 200077, 200078),
}
"""What operators may ask from anywhere."""
OF_SERVERS = {905, 906, 5001}
"""What name servers and brokers say to each other; and a switch with one position."""


async def test_changes_from_another_machine_are_refused_and_nothing_else(tmp_path):
    async with Cluster(tmp_path / "store", broker=BELIEVES_US) as cluster:
        answers = {}
        for code in set(RequestCode) - NO_ANSWER:
            answers[code] = await ask_from_elsewhere(cluster.standalone.broker_address, Command(code))
        refused = {code for code, answer in answers.items() if "adminAllowedAddresses" in (answer.remark or "")}
        assert refused == GUARDED
        remark = (
            "10.1.2.3:5000 may not change this server: adminAllowedAddresses=loopback; "
            "ask at 127.0.0.1 on its machine, or add the address to that setting"
        )
        assert {answers[code].remark for code in refused} == {remark}
        answered = {code for code, answer in answers.items() if answer.code != 3} | NO_ANSWER
        assert answered == GUARDED | CLIENTS_OWN | READING | OF_SERVERS


@pytest.mark.parametrize("addresses", ["any", "10.1.2.3,127.0.0.1"])
async def test_an_operator_lets_others_change_the_broker(addresses, tmp_path):
    async with Cluster(
        tmp_path / "store", broker={"admin_addresses": AdminAddresses(addresses), **BELIEVES_US}
    ) as cluster:
        body = b'{"topicConfigList":[{"topicName":"T"}]}'
        command = Command(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, body=body)
        assert (await ask_from_elsewhere(cluster.standalone.broker_address, command)).code == 0
        assert (await cluster.ask(RequestCode.GET_TOPIC_CONFIG, topic="T")).code == 0
