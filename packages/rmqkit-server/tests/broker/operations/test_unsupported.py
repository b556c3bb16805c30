"""Requests of features that rmqkit lacks: they are refused with the reason."""

from __future__ import annotations

import pytest

from rmqkit.broker.operations.brokers import REASONS
from rmqkit.broker.settings import BrokerRole
from rmqkit.protocol.codes import RequestCode
from tests.broker.cluster import Cluster

UNSUPPORTED = 3


async def test_every_refusal_has_its_reason(cluster):
    for code, reason in REASONS.items():
        answer = await cluster.call(code)
        assert (answer.code, answer.remark) == (UNSUPPORTED, f" request type {code} not supported: {reason}")


@pytest.mark.parametrize(("fields", "code"), [({"E_T": "F"}, 0), ({"E_T": "R"}, UNSUPPORTED), ({}, 29)])
async def test_one_may_switch_to_the_only_timer_engine(fields, code, cluster):
    assert (await cluster.ask(RequestCode.SWITCH_TIMER_ENGINE, **fields)).code == code


async def test_a_master_has_no_flush_offset_to_set_and_a_slave_drops_nothing(tmp_path):
    async with Cluster(tmp_path / "store") as cluster:
        assert (await cluster.call(RequestCode.RESET_MASTER_FLUSH_OFFSET)).code == 0
    async with Cluster(tmp_path / "store", broker={"broker_role": BrokerRole.SLAVE, "broker_id": 1}) as cluster:
        answer = await cluster.call(RequestCode.RESET_MASTER_FLUSH_OFFSET)
        assert answer.code == UNSUPPORTED
        assert "drops nothing" in answer.remark
