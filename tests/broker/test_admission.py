"""What a broker answers only to those who may change it (``adminAllowedAddresses``)."""

from __future__ import annotations

import pytest

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command
from rmqkit.remoting.admission import AdminAddresses
from tests.elsewhere import ask_from_elsewhere

GUARDED = {
    RequestCode.UPDATE_AND_CREATE_TOPIC,
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST,
    RequestCode.DELETE_TOPIC_IN_BROKER,
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
}
NO_ANSWER = {RequestCode.END_TRANSACTION}
"""Without fields there is nothing to answer."""
CLIENTS_OWN = {10, 11, 12, 14, 15, 29, 30, 31, 32, 33, 34, 35, 36, 38, 41, 42, 43, 46, 21, 201, 310, 320, 361}


def test_changes_from_another_machine_are_refused_and_nothing_else(run):
    async def scenario(cluster):
        answers = {}
        for code in set(RequestCode) - NO_ANSWER:
            answers[code] = await ask_from_elsewhere(cluster.standalone.broker_address, Command(code))
        refused = {code for code, answer in answers.items() if answer.code == 16}
        assert refused == GUARDED
        remark = (
            "10.1.2.3:5000 may not change this server: adminAllowedAddresses=loopback; "
            "ask from there or add the address to that setting"
        )
        assert {answers[code].remark for code in refused} == {remark}
        assert all(answers[RequestCode(code)].code != 3 for code in CLIENTS_OWN)

    run(scenario)


@pytest.mark.parametrize("addresses", ["any", "10.1.2.3,127.0.0.1"])
def test_an_operator_lets_others_change_the_broker(run, addresses):
    async def scenario(cluster):
        body = b'{"topicConfigList":[{"topicName":"T"}]}'
        command = Command(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, body=body)
        assert (await ask_from_elsewhere(cluster.standalone.broker_address, command)).code == 0
        assert (await cluster.ask(RequestCode.GET_TOPIC_CONFIG, topic="T")).code == 0

    run(scenario, broker={"admin_addresses": AdminAddresses(addresses)})
