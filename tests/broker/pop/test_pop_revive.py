"""What comes again, where something else goes wrong meanwhile (behaviour.md §4.12)."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.protocol.properties import encode_properties
from rmqkit.store.message_store import InnerMessage
from tests.broker.cluster import Cluster
from tests.broker.pops import context_of, now_ms, sent
from tests.waiting import SECONDS

REVIVE_TOPIC = "rmq_sys_REVIVE_LOG_DefaultCluster"


async def test_a_check_point_whose_message_cannot_be_read_holds_up_no_other(monkeypatch, cluster):
    """Both are due in the same moment, the faulty one first."""

    await sent(cluster, *"ab")
    service, pop_time = context_of(cluster).pop, now_ms() - 5000
    assert context_of(cluster).groups.get("g")
    read = service.revive._record

    def fails(pending, offset, archived):
        if offset == 0:
            raise OSError(5, "Input/output error")
        return read(pending, offset, archived)

    monkeypatch.setattr(service.revive, "_record", fails)
    for offset in range(2):
        service.check_points.add("T", "g", 0, [offset], pop_time=pop_time, invisible_ms=1000, queue=3)
    async with asyncio.timeout(SECONDS):
        while len(service.check_points) > 1:
            await asyncio.sleep(0.01)
    assert service.check_points.pending == {("T", "g", 0, 0, pop_time): {0}}


@pytest.mark.parametrize("kind", ["ck", "ack"])
async def test_acks_that_are_put_off_are_not_forgotten_when_others_write_into_the_revive_topic(kind, tmp_path):
    async with Cluster(tmp_path / "store", broker={"pop_buffer_merge": True}) as cluster:
        own, host = context_of(cluster), context_of(cluster).identity.store_host
        tags = encode_properties({"TAGS": kind})
        own.store.put(InnerMessage(REVIVE_TOPIC, 3, b"{}", tags, 0, 0, now_ms(), host, host))
        pop_time = now_ms()
        own.pop.check_points.add("T", "g", 0, [0], pop_time=pop_time, invisible_ms=60_000, queue=3)
        own.pop.check_points.ack({("T", "g", 0, 0, pop_time): [0]})
        assert own.pop.check_points.buffered == (1, 1)
        await own.pop.revive.round()
        assert (own.pop.check_points.pending, own.pop.check_points.buffered) == ({}, (0, 0))
