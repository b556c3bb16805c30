"""Redelivery of popped messages while something else fails (behaviour.md §4.12)."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.client.pop.session import give_handles
from rmqkit.protocol.properties import PROPERTIES_BYTES_MAX, decode_properties, encode_properties
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.store.message_store import InnerMessage, PutResult, PutStatus
from tests.broker.cluster import Cluster
from tests.broker.pops import ack, context_of, now_ms, pop, sent
from tests.store.stores import HOST, read_all
from tests.waiting import SECONDS

REVIVE_TOPIC = "rmq_sys_REVIVE_LOG_DefaultCluster"


async def test_a_check_point_whose_message_cannot_be_read_holds_up_no_other(monkeypatch, cluster):
    """Both check points are due at the same moment, the faulty one first."""

    await sent(cluster, *"ab")
    service, pop_time = context_of(cluster).pop, now_ms() - 5000
    assert context_of(cluster).groups.get("g")
    read = service.revive._record

    def fails(pending, offset, fetched):
        if offset == 0:
            raise OSError(5, "Input/output error")
        return read(pending, offset, fetched)

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


def put_popped(service, store, count):
    """Pop messages of T in one check point that has expired."""
    service.check_points.add("T", "g", 0, list(range(count)), pop_time=now_ms() - 5000, invisible_ms=1000, queue=3)


async def revived(cluster, count):
    topic = "%RETRY%g_T"
    store = context_of(cluster).store
    async with asyncio.timeout(SECONDS):
        while store.max_offset(topic, 0) < count:
            await asyncio.sleep(0.01)
    return read_all(store, topic, 0)


@pytest.mark.parametrize("room", [0, 1, 40, 80])
async def test_a_message_at_the_limit_of_properties_is_redelivered_with_the_others_of_its_pop(room, cluster):
    """ORIGIN_GROUP and 1ST_POP_TIME did not fit, and the redelivery of the whole pop was postponed forever."""
    context = context_of(cluster)
    value = "x" * (PROPERTIES_BYTES_MAX - room - len(encode_properties({"a": "x"})) + 1)
    await sent(cluster, "first")
    context.store.put(InnerMessage("T", 0, b"big", encode_properties({"a": value}), 0, 0, now_ms(), HOST, HOST))
    await sent(cluster, "last")
    assert context.groups.get("g")
    put_popped(context.pop, context.store, 3)
    again = await revived(cluster, 3)
    assert [one.body for one in again] == [b"first", b"big", b"last"]
    assert {one.reconsume_times for one in again} == {1}
    properties = [decode_properties(one.properties) for one in again]
    assert properties[1]["a"] == value and ("ORIGIN_GROUP" in properties[1]) == (room == 80)
    assert properties[0]["ORIGIN_GROUP"] == "g"
    assert len(context.pop.check_points) == 0
    # POP_CK has no room either: the record keeps its retry topic, by which clients make the handle.
    context.offsets.commit("g", "T", 0, 3)
    popped = await pop(cluster)
    assert list(popped) == ["first", "big", "last"]
    assert popped.messages["big"].topic == "%RETRY%g_T" and popped.messages["first"].topic == "T"
    messages = list(popped.messages.values())
    give_handles(messages, popped.header, MessageQueue("T", "broker-a", 0))
    for one in messages:
        assert (await ack(cluster, one.properties["POP_CK"])).code == 0
    async with asyncio.timeout(SECONDS):
        while len(context.pop.check_points):
            await asyncio.sleep(0.01)


async def test_a_message_that_is_refused_for_good_goes_to_the_dead_letters_of_the_group(monkeypatch, cluster, caplog):
    await sent(cluster, "first", "bad", "last")
    context = context_of(cluster)
    assert context.groups.get("g")
    put = context.store.put
    illegal = PutResult(PutStatus.MESSAGE_ILLEGAL, reason="not like that")
    monkeypatch.setattr(
        context.store, "put", lambda one: illegal if one.body == b"bad" and "RETRY" in one.topic else put(one)
    )
    put_popped(context.pop, context.store, 3)
    assert [one.body for one in await revived(cluster, 2)] == [b"first", b"last"]
    [letter] = read_all(context.store, "%DLQ%g", 0)
    reason = "popped message for %RETRY%g_T cannot be stored: MESSAGE_ILLEGAL, not like that"
    assert (letter.body, decode_properties(letter.properties)["rmqkit_reason"]) == (b"bad", reason)
    assert [record.levelname for record in caplog.records if reason in record.getMessage()] == ["ERROR"]
    assert context.topics.get("%DLQ%g") is not None
    assert len(context.pop.check_points) == 0


@pytest.mark.parametrize("status", [PutStatus.SERVICE_NOT_AVAILABLE, PutStatus.OS_PAGE_CACHE_BUSY])
async def test_a_store_that_refuses_for_now_is_asked_again(monkeypatch, cluster, caplog, status):
    """No message is lost because of the refusals, and they are logged once."""
    await sent(cluster, *"abc")
    context = context_of(cluster)
    assert context.groups.get("g")
    put, is_full = context.store.put, [True]
    monkeypatch.setattr("rmqkit.broker.pop.revive._AGAIN_MS", 10)
    monkeypatch.setattr(
        context.store,
        "put",
        lambda one: PutResult(status, reason="full") if is_full[0] and "RETRY" in one.topic else put(one),
    )
    put_popped(context.pop, context.store, 3)
    for _ in range(5):
        await context.pop.revive.round()
        await asyncio.sleep(0.05)
    assert len(context.pop.check_points) == 1 and context.topics.get("%DLQ%g") is None
    is_full[0] = False
    assert [one.body for one in await revived(cluster, 3)] == [b"a", b"b", b"c"]
    told = [record.getMessage() for record in caplog.records if "cannot be redelivered yet" in record.getMessage()]
    assert told == [f"popped messages cannot be redelivered yet: {status.value} full"]


async def test_a_lowered_message_size_does_not_keep_what_was_accepted_from_coming_again(tmp_path):
    async with Cluster(tmp_path / "s", store={"message_bytes_max": 2000}) as cluster:
        await sent(cluster, "a" * 2000, "b")
        context = context_of(cluster)
        assert context.groups.get("g")
        put_popped(context.pop, context.store, 2)
    async with Cluster(tmp_path / "s", store={"message_bytes_max": 1024}) as cluster:
        again = await revived(cluster, 2)
        assert [one.body for one in again] == [b"a" * 2000, b"b"]
