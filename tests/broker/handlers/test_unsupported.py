"""Requests of parts that are not there: refused with the reason."""

from __future__ import annotations

import pytest

from rmqkit.broker.operations.brokers import REASONS
from rmqkit.broker.settings import BrokerRole
from rmqkit.protocol.codes import RequestCode

UNSUPPORTED = 3


def test_every_refusal_has_its_reason(run):
    async def scenario(cluster):
        for code, reason in REASONS.items():
            answer = await cluster.call(code)
            assert (answer.code, answer.remark) == (UNSUPPORTED, f" request type {code} not supported: {reason}")

    run(scenario)


@pytest.mark.parametrize(("fields", "code"), [({"E_T": "F"}, 0), ({"E_T": "R"}, UNSUPPORTED), ({}, 29)])
def test_one_may_switch_to_the_only_timer_engine(run, fields, code):
    async def scenario(cluster):
        assert (await cluster.ask(RequestCode.SWITCH_TIMER_ENGINE, **fields)).code == code

    run(scenario)


def test_a_master_has_no_flush_offset_to_set_and_a_slave_drops_nothing(run):
    async def of_master(cluster):
        assert (await cluster.call(RequestCode.RESET_MASTER_FLUSH_OFFSET)).code == 0

    async def of_slave(cluster):
        answer = await cluster.call(RequestCode.RESET_MASTER_FLUSH_OFFSET)
        assert answer.code == UNSUPPORTED
        assert "drops nothing" in answer.remark

    run(of_master)
    run(of_slave, broker={"broker_role": BrokerRole.SLAVE, "broker_id": 1})
