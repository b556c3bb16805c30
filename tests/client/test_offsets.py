"""A group's offsets: when they rise, when they are saved. Source: behaviour.md §5.6."""

from __future__ import annotations

import pytest

from rmqkit.client.offsets import GroupOffsets
from rmqkit.client.runtime import ClientRuntime
from rmqkit.errors import PeerRefused
from rmqkit.protocol.bodies.clients import MessageQueue
from rmqkit.protocol.codes import RequestCode
from tests.client.peers import Cluster, offset, on_loop, refused, until

SAVE = RequestCode.UPDATE_CONSUMER_OFFSET
FETCH = RequestCode.QUERY_CONSUMER_OFFSET
FIRST, SECOND = MessageQueue("T", "broker-0", 0), MessageQueue("T", "broker-0", 1)


class Offsets:
    async def __aenter__(self):
        self.cluster = await Cluster().__aenter__()
        self.cluster.topic("T")
        self.runtime = ClientRuntime(self.cluster.namesrv)
        await self.runtime.routes.refresh("T")
        self.table = GroupOffsets(self.runtime, "G")
        return self

    async def __aexit__(self, *exc_info):
        await self.runtime.close()
        await self.cluster.__aexit__(*exc_info)

    def saved(self):
        return [(fields["queueId"], fields["commitOffset"]) for fields in self.cluster.broker.asked(SAVE)]


@on_loop
async def test_offsets_only_rise():
    async with Offsets() as it:
        for value in (5, 3, 7):
            it.table.raise_to(FIRST, value)
        assert it.table.known(FIRST) == 7


@on_loop
async def test_a_frozen_offset_stays_until_the_queue_is_forgotten():
    async with Offsets() as it:
        it.table.raise_to(FIRST, 100)
        it.table.freeze(FIRST, 10)
        it.table.raise_to(FIRST, 200)
        assert it.table.known(FIRST) == 10
        it.table.forget(FIRST)
        it.table.raise_to(FIRST, 3)
        assert it.table.known(FIRST) == 3


@on_loop
async def test_the_broker_is_asked_once_and_its_answer_remembered():
    async with Offsets() as it:
        it.cluster.broker.answer(FETCH, lambda command: offset(command, 42))
        assert await it.table.fetch(FIRST) == 42
        assert it.table.known(FIRST) == 42
        (fields,) = it.cluster.broker.asked(FETCH)
        assert fields == {"consumerGroup": "G", "topic": "T", "queueId": "0"}


@on_loop
async def test_no_offset_is_none_and_any_other_answer_an_error():
    async with Offsets() as it:
        it.cluster.broker.answer(FETCH, refused(22, "Not found"))
        assert await it.table.fetch(FIRST) is None
        it.cluster.broker.answer(FETCH, refused(1, "broken"))
        with pytest.raises(PeerRefused, match="broken"):
            await it.table.fetch(FIRST)


@on_loop
async def test_only_what_changed_is_sent_and_one_way():
    async with Offsets() as it:
        it.table.raise_to(FIRST, 5)
        it.table.raise_to(SECOND, 6)
        await it.table.send_changed()
        await it.table.send_changed()
        it.table.raise_to(SECOND, 7)
        await it.table.send_changed()
        await until(lambda: len(it.saved()) == 3, "three offsets")
        assert it.saved() == [("0", "5"), ("1", "6"), ("1", "7")]
        assert all(command.is_one_way for command in it.cluster.broker.requests)


@on_loop
async def test_saving_waits_for_the_answer_also_when_it_was_sent_one_way_before():
    async with Offsets() as it:
        it.table.raise_to(FIRST, 5)
        await it.table.send_changed()
        await it.table.save_all()
        assert it.saved() == [("0", "5"), ("0", "5")]
        assert not it.cluster.broker.requests[-1].is_one_way
        await it.table.save_all()
        assert len(it.saved()) == 2, "the broker has it: nothing to do"


@on_loop
async def test_an_offset_that_is_fetched_is_not_saved_again():
    async with Offsets() as it:
        it.cluster.broker.answer(FETCH, lambda command: offset(command, 42))
        await it.table.fetch(FIRST)
        await it.table.send_changed()
        await it.table.save_all()
        assert it.saved() == []


@on_loop
async def test_a_failure_is_logged_with_group_queue_and_offset(caplog):
    async with Offsets() as it:
        it.cluster.broker.answer(SAVE, refused(1, "disk full"))
        it.table.raise_to(FIRST, 5)
        await it.table.save(FIRST)
    assert "offset 5 of group G in MessageQueue(topic='T', broker_name='broker-0', queue_id=0) is not saved" in (
        caplog.text
    )
    assert "disk full" in caplog.text
