"""A group's offsets: when they rise, when they are saved. Source: behaviour.md §5.6."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.client.consumer.offsets import RemoteOffsetStore
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.errors import PeerRefused
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import reply
from rmqkit.protocol.schemas.clients import MessageQueue
from tests.client.peers import Cluster, offset, refused, until

SAVE = RequestCode.UPDATE_CONSUMER_OFFSET
FETCH = RequestCode.QUERY_CONSUMER_OFFSET
FIRST, SECOND = MessageQueue("T", "broker-0", 0), MessageQueue("T", "broker-0", 1)


class Offsets:
    async def __aenter__(self):
        self.cluster = await Cluster().__aenter__()
        self.cluster.topic("T")
        self.runtime = ClientRuntime(self.cluster.namesrv)
        await self.runtime.routes.refresh("T")
        self.table = RemoteOffsetStore(self.runtime, "G")
        return self

    async def __aexit__(self, *exc_info):
        await self.runtime.close()
        await self.cluster.__aexit__(*exc_info)

    def saved(self):
        return [(fields["queueId"], fields["commitOffset"]) for fields in self.cluster.broker.asked(SAVE)]


async def test_offsets_only_rise():
    async with Offsets() as it:
        for value in (5, 3, 7):
            it.table.raise_to(FIRST, value)
        assert it.table.known(FIRST) == 7


async def test_a_frozen_offset_stays_until_the_queue_is_forgotten():
    async with Offsets() as it:
        it.table.raise_to(FIRST, 100)
        it.table.freeze(FIRST, 10)
        it.table.raise_to(FIRST, 200)
        assert it.table.known(FIRST) == 10
        it.table.remove_offset(FIRST)
        it.table.raise_to(FIRST, 3)
        assert it.table.known(FIRST) == 3


async def test_the_broker_is_asked_once_and_its_answer_remembered():
    async with Offsets() as it:
        it.cluster.broker.answer(FETCH, lambda command: offset(command, 42))
        assert await it.table.fetch(FIRST) == 42
        assert it.table.known(FIRST) == 42
        (fields,) = it.cluster.broker.asked(FETCH)
        assert fields == {"consumerGroup": "G", "topic": "T", "queueId": "0", "bname": "broker-0"}


async def test_no_offset_is_none_and_any_other_answer_an_error():
    async with Offsets() as it:
        it.cluster.broker.answer(FETCH, refused(22, "Not found"))
        assert await it.table.fetch(FIRST) is None
        it.cluster.broker.answer(FETCH, refused(1, "broken"))
        with pytest.raises(PeerRefused, match="broken"):
            await it.table.fetch(FIRST)


async def test_what_changed_is_sent_one_way_and_what_came_to_rest_with_an_answer_once():
    async with Offsets() as it:
        it.table.raise_to(FIRST, 5)
        it.table.raise_to(SECOND, 6)
        await it.table.send_changed()
        it.table.raise_to(SECOND, 7)
        for _ in range(3):
            await it.table.send_changed()
        assert it.saved() == [("0", "5"), ("1", "6"), ("1", "7"), ("0", "5"), ("1", "7")]
        assert [command.is_one_way for command in it.cluster.broker.requests] == [True, True, True, False, False]


async def test_a_broker_that_cannot_be_reached_keeps_no_other_waiting(monkeypatch):
    async with Cluster(brokers=2) as cluster:
        cluster.topic("T")
        runtime = ClientRuntime(cluster.namesrv)
        await runtime.routes.refresh("T")
        connect = runtime.remoting.connection

        async def connect_or_hang(address, *args):
            return await (asyncio.Event().wait() if address == cluster.broker.address else connect(address, *args))

        monkeypatch.setattr(runtime.remoting, "connection", connect_or_hang)
        offsets = RemoteOffsetStore(runtime, "G")
        offsets.raise_to(FIRST, 5)
        offsets.raise_to(MessageQueue("T", "broker-1", 0), 6)
        saving = asyncio.create_task(offsets.send_changed())
        await until(lambda: cluster.brokers[1].asked(SAVE), "the offset of the other broker")
        saving.cancel()
        await runtime.close()


async def test_an_offset_that_a_broker_refuses_is_said_until_it_takes_it():
    async with Offsets() as it:
        it.cluster.broker.answer(SAVE, refused(26, "Group G not exist!"))
        it.table.raise_to(FIRST, 5)
        for _ in range(3):
            await it.table.send_changed()
        it.cluster.broker.answer(SAVE, reply)
        for _ in range(3):
            await it.table.send_changed()
        assert it.saved() == [("0", "5")] * 4


async def test_saving_waits_for_the_answer_also_when_it_was_sent_one_way_before():
    async with Offsets() as it:
        it.table.raise_to(FIRST, 5)
        await it.table.send_changed()
        await it.table.save_all()
        assert it.saved() == [("0", "5"), ("0", "5")]
        assert not it.cluster.broker.requests[-1].is_one_way
        await it.table.save_all()
        assert len(it.saved()) == 2, "the broker has it: nothing to do"


async def test_what_was_reported_over_a_connection_that_is_gone_is_reported_again():
    async with Offsets() as it:
        it.table.raise_to(FIRST, 5)
        await it.table.save_all()
        it.cluster.broker.connections[0].close()
        await until(lambda: not it.runtime.remoting.connected(it.cluster.broker.address), "the connection's end")
        await it.table.send_changed()
        await it.table.save_all()
        await it.table.send_changed()
        await until(lambda: len(it.saved()) == 3, "the offset over the new connection, twice")
        assert it.saved() == [("0", "5")] * 3


async def test_what_one_broker_was_reported_is_reported_to_the_one_in_its_place():
    async with Offsets() as it, Cluster() as other:
        other.broker.answer(SAVE, reply)
        it.table.raise_to(FIRST, 5)
        await it.table.save_all()
        it.runtime.routes.brokers["broker-0"] = {1: other.broker.address}
        await it.table.save_all()
        assert [fields["commitOffset"] for fields in other.broker.asked(SAVE)] == ["5"]


async def test_an_offset_that_is_fetched_is_not_saved_again():
    async with Offsets() as it:
        it.cluster.broker.answer(FETCH, lambda command: offset(command, 42))
        await it.table.fetch(FIRST)
        await it.table.send_changed()
        await it.table.save_all()
        assert it.saved() == []


async def test_a_failure_is_logged_with_group_queue_and_offset(caplog):
    async with Offsets() as it:
        it.cluster.broker.answer(SAVE, refused(1, "disk full"))
        it.table.raise_to(FIRST, 5)
        await it.table.save(FIRST)
    assert "offset 5 of group G in MessageQueue(topic='T', broker_name='broker-0', queue_id=0) is not saved" in (
        caplog.text
    )
    assert "disk full" in caplog.text
