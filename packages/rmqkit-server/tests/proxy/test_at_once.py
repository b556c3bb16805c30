"""Plain sends and acks of one message are answered without a task, sends of one read together; what could be refused
takes the long way."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.core import CORE
from rmqkit.store.settings import FlushDiskType
from tests.proxy.calling import METHODS, Call, message, served


@pytest.fixture
async def caller(tmp_path):
    async with served(tmp_path) as it:
        it.topic()
        yield it


def begin(caller, name, write, **fields):
    """Begin a call. Return True if it is answered at once."""
    method = METHODS[name]
    content = method.request(**fields).SerializeToString()
    return caller.endpoint.answer_at_once(method, Call(caller.metadata, None), content, write)


def answer(name, content):
    return METHODS[name].response.FromString(content)


@pytest.mark.skipif(bool(CORE.fault), reason=CORE.fault)
async def test_sends_of_one_read_are_stored_together(caller, monkeypatch):
    store, runs, came = caller.context.store, [], []
    put = store.put_sends
    monkeypatch.setattr(store, "put_sends", lambda sends, *hosts: runs.append(len(sends)) or put(sends, *hosts))
    await caller.send(message_id="ID0")  # the first message of an empty queue is stored alone
    runs.clear()
    for number in (1, 2, 3):
        assert begin(caller, "SendMessage", came.append, messages=[message("T", b"hello", f"ID{number}", None)])
    assert not came
    caller.endpoint.handle_gathered()
    assert runs == [3]
    answers = [answer("SendMessage", one) for one in came]
    assert [one.entries[0].message_id for one in answers] == ["ID1", "ID2", "ID3"]
    assert [one.entries[0].offset for one in answers] == [1, 2, 3]


@pytest.mark.parametrize(
    "system", [{"delivery_timestamp": {"seconds": 1}}, {"message_type": 4}, {"priority": 1}, {"tag": "a|b"}]
)
async def test_other_sends_take_the_long_way(caller, system):
    assert not begin(caller, "SendMessage", None, messages=[message("T", b"hello", "ID1", None, **system)])
    assert not begin(caller, "SendMessage", None, messages=[message("absent", b"hello", "ID1", None)])
    await asyncio.wait_for(caller.endpoint.drain(), 1)


@pytest.mark.skipif(bool(CORE.fault), reason=CORE.fault)
async def test_an_answer_waits_for_the_disk_and_a_drain_for_the_answer(tmp_path):
    async with served(tmp_path, store={"flush_disk_type": FlushDiskType.SYNC_FLUSH}) as caller:
        caller.topic()
        await caller.send(message_id="ID0")
        came = asyncio.get_running_loop().create_future()
        assert begin(caller, "SendMessage", came.set_result, messages=[message("T", b"hello", "ID1", None)])
        caller.endpoint.handle_gathered()
        assert not came.done()
        await caller.endpoint.drain()
        assert answer("SendMessage", came.result()).entries[0].offset == 1


@pytest.mark.skipif(bool(CORE.fault), reason=CORE.fault)
async def test_who_is_sent_away_meanwhile_is_reported(caller):
    came = []
    assert begin(caller, "SendMessage", came.append, messages=[message("T", b"hello", "ID1", None)])
    caller.endpoint.clients.find("c1").peer.close("gone")
    caller.endpoint.handle_gathered()
    assert answer("SendMessage", came[0]).status.code == 50400
    assert caller.endpoint.clients.find("c1").calls == 0


async def test_an_ack_is_answered_with_those_of_its_tick(caller):
    await caller.send()
    handle = (await caller.one()).system_properties.receipt_handle
    names = {"group": {"name": "G"}, "topic": {"name": "T"}}
    entry = {"message_id": "ID1", "receipt_handle": handle}
    came = asyncio.get_running_loop().create_future()
    assert not begin(caller, "AckMessage", None, entries=[entry, entry], **names)
    assert not begin(caller, "AckMessage", None, entries=[{**entry, "receipt_handle": "bla"}], **names)
    for place in range(4):
        words = handle.split(" ")
        words[place] = "-1" if place != 2 else str(1 << 63)  # the invisible time, or the handle has expired
        changed = {**entry, "receipt_handle": " ".join(words)}
        assert not begin(caller, "AckMessage", None, entries=[changed], **names), "brokers pack these numbers"
    assert begin(caller, "AckMessage", came.set_result, entries=[entry], **names)
    caller.endpoint.handle_gathered()
    told = answer("AckMessage", await came)
    assert (told.status.code, told.entries[0].receipt_handle) == (20000, handle)


@pytest.mark.parametrize("flush", [FlushDiskType.ASYNC_FLUSH, FlushDiskType.SYNC_FLUSH])
async def test_acks_of_one_read_are_stored_together(tmp_path, monkeypatch, flush):
    """This includes acks that wait for the disk, which the broker handles one by one."""
    async with served(tmp_path, store={"flush_disk_type": flush}) as caller:
        caller.topic()
        for number in range(3):
            await caller.send(message_id=f"ID{number}")
        _, found = await caller.receive()
        check_points, stored, came = caller.context.pop.check_points, [], asyncio.Queue()
        store = check_points.store
        monkeypatch.setattr(check_points, "store", lambda new, acks: stored.append(dict(acks)) or store(new, acks))
        names = {"group": {"name": "G"}, "topic": {"name": "T"}}
        for system in (one.system_properties for one in found):
            entry = {"message_id": system.message_id, "receipt_handle": system.receipt_handle}
            assert begin(caller, "AckMessage", came.put_nowait, entries=[entry], **names)
        caller.endpoint.handle_gathered()
        answers = [answer("AckMessage", await came.get()) for _ in found]
        assert [one.status.code for one in answers] == [20000] * 3
        assert [one.entries[0].message_id for one in answers] == ["ID0", "ID1", "ID2"]
        (acks,) = stored
        assert sorted(offset for offsets in acks.values() for offset in offsets) == [0, 1, 2]
        assert not any(check_points.in_flight.values())


async def test_an_ack_of_who_is_sent_away_meanwhile_is_reported(caller):
    await caller.send()
    handle = (await caller.one()).system_properties.receipt_handle
    names, came = {"group": {"name": "G"}, "topic": {"name": "T"}}, []
    entry = {"message_id": "ID1", "receipt_handle": handle}
    assert begin(caller, "AckMessage", came.append, entries=[entry], **names)
    caller.endpoint.clients.find("c1").peer.close("gone")
    caller.endpoint.handle_gathered()
    assert answer("AckMessage", came[0]).status.code == 50400
    assert caller.endpoint.clients.find("c1").calls == 0
    await caller.send(message_id="ID2")
    assert (await caller.one()).system_properties.message_id == "ID2"
