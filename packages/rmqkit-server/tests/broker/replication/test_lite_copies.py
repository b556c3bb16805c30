"""The offsets in lite topics at a slave, and a slave that becomes master. Source: lite.md §13."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.broker.lite.offsets import LiteOffsets
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import decode_fields
from rmqkit.protocol.names import lite_queue
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.topics import TopicConfig
from rmqkit.store.lite.table import LiteTable
from tests.broker.groups_of_brokers import SECONDS, Brokers

PARENT, GROUP = "LT", "LG"
ATTRIBUTES = {"message.type": "LITE", "lite.topic.expiration": "60"}


async def send(brokers, name, *bodies):
    for body in bodies:
        properties = f"__LITE_TOPIC\x01{name}\x02UNIQ_KEY\x01{body}\x02"
        fields = {"a": "p", "b": PARENT, "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 0, "h": 0, "i": properties}
        answer = await brokers.ask("a-0", RequestCode.SEND_MESSAGE_V2, body.encode(), **fields)
        assert answer.code == 0, answer.remark


async def make(brokers):
    context = brokers.context("a-0")
    context.topics.put(TopicConfig(PARENT, 4, 4, attributes=ATTRIBUTES))
    await context.groups.put_shared(SubscriptionGroupConfig(group_name=GROUP, attributes={"lite.bind.topic": PARENT}))


def commit(brokers, name, offset):
    context = brokers.context("a-0")
    context.lite.commit(GROUP, lite_queue(PARENT, name), offset)
    context.lite.save()


def copied(brokers, broker, *names):
    lite = brokers.context(broker).lite
    return [lite.committed(GROUP, lite_queue(PARENT, name)) for name in names]


async def until_equal(read, expected):
    async with asyncio.timeout(SECONDS):
        while read() != expected:
            await asyncio.sleep(0.05)


async def test_a_promoted_slave_has_lite_topics_offsets_and_lifetimes(tmp_path):
    async with Brokers(tmp_path) as brokers:
        await brokers.start("a-0")
        await make(brokers)
        await send(brokers, "s1", "0", "1", "2")
        await send(brokers, "s2", "3")
        await brokers.start("a-1")
        await brokers.until_copied("a-0", "a-1")
        commit(brokers, "s1", 2)
        await until_equal(lambda: copied(brokers, "a-1", "s1", "s2"), [2, None])
        commit(brokers, "s1", 1)  # a reset
        commit(brokers, "s2", 1)
        await until_equal(lambda: copied(brokers, "a-1", "s1", "s2"), [1, 1])

        await brokers.stop("a-0")
        await brokers.stop("a-1")
        (tmp_path / "a-0").rename(tmp_path / "old")
        (tmp_path / "a-1").rename(tmp_path / "a-0")
        promoted = (await brokers.start("a-0")).context
        assert copied(brokers, "a-0", "s1", "s2") == [1, 1]
        assert [promoted.store.max_offset(lite_queue(PARENT, name), 0) for name in ("s1", "s2")] == [3, 1]
        assert promoted.topics.get(PARENT).attributes == ATTRIBUTES
        group = promoted.lite.group(GROUP, promoted.groups.stored.subscription_group_table[GROUP])
        assert promoted.lite.offset_of(group, promoted.store.lite.table.find(PARENT, "s1")) == 1


async def test_a_slave_enters_offsets_when_it_has_their_messages(tmp_path, monkeypatch):
    async with Brokers(tmp_path) as brokers:
        await brokers.start("a-0")
        await make(brokers)
        await brokers.start("a-1")
        slave = brokers.context("a-1")
        dispatched = type(slave.store).dispatched_offset
        behind = property(lambda self: 0 if self is slave.store else dispatched.fget(self))
        monkeypatch.setattr(type(slave.store), "dispatched_offset", behind)
        await send(brokers, "s1", "0", "1")
        commit(brokers, "s1", 2)
        await asyncio.sleep(20)
        assert copied(brokers, "a-1", "s1") == [None]
        monkeypatch.setattr(type(slave.store), "dispatched_offset", dispatched)
        await until_equal(lambda: copied(brokers, "a-1", "s1"), [2])


async def test_an_answer_without_a_place_keeps_the_offsets_of_a_slave(tmp_path):
    """Apache's master ignores the place, and answers with its own table."""
    async with Brokers(tmp_path) as brokers:
        await brokers.start("a-0")
        await make(brokers)
        await send(brokers, "s1", "0")
        commit(brokers, "s1", 1)
        answer = await brokers.ask("a-0", RequestCode.GET_ALL_CONSUMER_OFFSET)
        assert b"offsetTable" in answer.payload
        assert "liteFile" not in (decode_fields(answer) or {})


@pytest.fixture
def table():
    table = LiteTable()
    parent = table.parent(PARENT)
    for number in range(200):
        table.nexts[table.add(parent, f"s{number}", epoch=1, first=0, born=0)] = 5
    return table


def everything(offsets, number=0, position=0):
    """Return all records after a place, the place after them, and the number of pieces."""
    content, pieces = b"", 0
    while True:
        number, position, records = offsets.records_after(number, position)
        if not records:
            return content, (number, position), pieces
        content, pieces = content + records, pieces + 1


def test_records_are_sent_in_pieces_and_only_once(tmp_path, table, monkeypatch):
    monkeypatch.setattr("rmqkit.broker.lite.offsets._SENT_BYTES", 1000)
    master, slave = LiteOffsets(tmp_path / "master", table), LiteOffsets(tmp_path / "slave", table)
    for slot in range(200):
        master.commit(GROUP, slot, slot % 5)
    assert everything(master)[0] == b""  # nothing is saved
    master.save()
    content, place, pieces = everything(master)
    assert pieces > 5
    slave.take(content)
    assert [slave.get(GROUP, slot) for slot in range(200)] == [slot % 5 for slot in range(200)]
    master.commit(GROUP, 7, 4)
    master.forget(8)
    master.save()
    content, _, _ = everything(master, *place)
    slave.take(content)
    assert (slave.get(GROUP, 7), slave.get(GROUP, 8), slave.get(GROUP, 9)) == (4, -1, 4)


@pytest.mark.parametrize("place", [(0, 0), (99, 0), (1, 10**9), (1, -1), (-1, -1)])
def test_a_place_that_is_not_there_begins_with_the_oldest_file(tmp_path, table, place):
    master = LiteOffsets(tmp_path, table)
    master.commit(GROUP, 0, 3)
    master.save()
    assert everything(master, *place) == everything(master)
    assert everything(master)[0]


def test_records_of_unknown_lite_topics_and_of_other_lives_are_left_out(tmp_path, table):
    master = LiteOffsets(tmp_path, table)
    for slot in range(3):
        master.commit(GROUP, slot, 3)
    master.save()
    other = LiteTable()
    other.add(other.parent(PARENT), "s1", epoch=2, first=0, born=0)
    other.add(other.parent(PARENT), "s2", epoch=1, first=0, born=0)
    slave = LiteOffsets(tmp_path / "slave", other)
    slave.take(everything(master)[0])
    assert [slave.get(GROUP, slot) for slot in range(2)] == [-1, 3]
