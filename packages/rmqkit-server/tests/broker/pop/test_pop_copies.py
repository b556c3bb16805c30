"""POP under SYNC_MASTER: check points and acks are replicated like other writes, and a slave continues from its copy.

The tests use real time, because a start compares the times of pops with the time of the offset file.
Source: behaviour.md §4.7, §10.3; store.md §14.
"""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.broker.replication.tables import SlaveSync
from rmqkit.broker.settings import BrokerRole
from rmqkit.protocol.codes import ResponseCode
from tests.broker.groups_of_brokers import Brokers
from tests.broker.pops import Client, ack, change, pop
from tests.client.peers import until


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("rmqkit.broker.replication.tables._PERIOD_MS", 100.0)
    monkeypatch.setattr("tests.broker.groups_of_brokers.MASTER", BrokerRole.SYNC_MASTER)


async def filled(brokers, *bodies):
    """Yield a master and its slave, both with the same messages, and a client of the master."""
    for name in ("a-0", "a-1"):
        await brokers.start(name)
    own = brokers.context("a-0")
    own.topics.ensure("T", 4)
    master = brokers.running["a-0"].parts.master
    await until(lambda: master.copies.in_sync_count() == 2, "a slave that is in sync", 30)
    client = Client(brokers.running["a-0"].address)
    for body in bodies:
        await client.send(body)
    return client


async def without_slave(brokers):
    await brokers.stop("a-1")
    master = brokers.running["a-0"].parts.master
    await until(lambda: master.copies.in_sync_count() == 1, "a master without its slave")


def pending(brokers, name):
    return set().union(*brokers.context(name).pop.check_points.pending.values())


@pytest.mark.real_time
async def test_what_a_slave_has_not_got_is_not_acknowledged_and_its_copy_continues(tmp_path):
    async with Brokers(tmp_path, in_sync_replicas=2, slave_timeout_ms=60_000) as brokers:
        client = await filled(brokers, b"0", b"4", b"8", b"12")
        first = await pop(client, "a", max_msg_nums=2, invisible_time=1000)
        assert (first.code, list(first)) == (0, ["0", "4"])
        assert (await ack(client, first.handles["0"])).code == 0
        copy, own = brokers.context("a-1").store, brokers.context("a-0").store
        assert copy.max_physical_offset == own.max_physical_offset, "the answer waits for both records"

        await without_slave(brokers)
        brokers.context("a-0").settings.slave_timeout_ms = 50
        assert (await ack(client, first.handles["4"])).code == ResponseCode.FLUSH_SLAVE_TIMEOUT
        assert (await ack(client, first.handles["4"])).code == ResponseCode.FLUSH_SLAVE_TIMEOUT, "nor the second time"
        second = await pop(client, "a", max_msg_nums=1)
        assert (second.code, list(second)) == (ResponseCode.FLUSH_SLAVE_TIMEOUT, [])
        ordered = await pop(client, "a", order=True, queue_id=0, attempt_id="1")
        assert (ordered.code, list(ordered)) == (0, ["12"]), "no record is stored that the slave would have to copy"
        await client.client.close()
        await brokers.stop("a-0")

        (tmp_path / "a-0").rename(tmp_path / "lost")
        (tmp_path / "a-1").rename(tmp_path / "a-0")
        brokers.settings["in_sync_replicas"] = 1
        client = Client((await brokers.start("a-0")).address)
        popped = []
        while len(popped) < 3:
            found = await pop(client, "a", poll_time=5000)
            popped += [(body, one.reconsume_times) for body, one in found.messages.items()]
            for handle in found.handles.values():
                assert (await ack(client, handle)).code == 0
        assert sorted(popped) == [("12", 0), ("4", 1), ("8", 0)], "the ack that the slave had copied is not lost"
        # A finished pop is pending for a moment while the replay of the log is between its check point and its ack.
        await until(lambda: not pending(brokers, "a-0"), "acks of all messages", 30)
        await client.client.close()


@pytest.mark.real_time
async def test_what_is_in_flight_is_not_popped_again_where_its_slave_continues_with_older_offsets(
    tmp_path, monkeypatch
):
    copy, is_late, in_vain = SlaveSync._copy_offsets, False, 0

    async def copy_in_time(sync, master):
        nonlocal in_vain
        if is_late:
            in_vain += 1
        else:
            await copy(sync, master)

    monkeypatch.setattr(SlaveSync, "_copy_offsets", copy_in_time)
    monkeypatch.setattr("rmqkit.broker.pop.service._WRITING_MS", 0)  # the slave stops soon after the pop
    async with Brokers(tmp_path, in_sync_replicas=2, slave_timeout_ms=60_000) as brokers:
        client = await filled(brokers, b"0", b"4")
        brokers.context("a-0").offsets.commit("other", "T", 0, 1)
        await until(lambda: brokers.context("a-1").offsets.get("other", "T", 0) == 1, "an offset that was copied", 30)
        is_late = True
        await until(lambda: in_vain, "the last copy has ended", 30)
        assert list(await pop(client, "a", max_msg_nums=1, invisible_time=60_000)) == ["0"]
        await client.client.close()
        for name in ("a-1", "a-0"):
            await brokers.stop(name)

        (tmp_path / "a-0").rename(tmp_path / "lost")
        (tmp_path / "a-1").rename(tmp_path / "a-0")
        brokers.settings["in_sync_replicas"] = 1
        client = Client((await brokers.start("a-0")).address)
        assert list(await pop(client, "a", max_msg_nums=8)) == ["4"]
        await client.client.close()


@pytest.mark.real_time
async def test_a_group_with_too_few_in_sync_puts_nothing(tmp_path):
    async with Brokers(tmp_path, in_sync_replicas=2, acts_as_master=True) as brokers:
        client = await filled(brokers, b"0", b"4")
        first = await pop(client, "a", max_msg_nums=1)
        await without_slave(brokers)
        end = brokers.context("a-0").store.max_physical_offset
        handle = first.handles["0"]
        answers = [await pop(client, "a"), await ack(client, handle), (await change(client, handle, 1000))[0]]
        assert [getattr(one, "code", one) for one in answers] == [ResponseCode.SYSTEM_ERROR] * 3
        assert answers[0].remark == answers[1].remark == "in-sync replicas not enough"
        assert (brokers.context("a-0").store.max_physical_offset, pending(brokers, "a-0")) == (end, {0})
        await client.client.close()


@pytest.mark.real_time
async def test_acks_of_one_tick_are_one_record(tmp_path):
    async with Brokers(tmp_path) as brokers:
        await brokers.start("a-0")
        brokers.context("a-0").topics.ensure("T", 4)
        client = Client(brokers.running["a-0"].address)
        for body in (b"0", b"4", b"8", b"1", b"5"):
            await client.send(body)
        first = await pop(client, "a")
        store, revive = brokers.context("a-0").store, "rmq_sys_REVIVE_LOG_DefaultCluster"

        def records():
            return sum(store.max_offset(revive, queue_id) for queue_id in range(8))

        assert (sorted(first), records()) == (["0", "1", "4", "5", "8"], 2)
        answers = await asyncio.gather(*(ack(client, handle) for handle in first.handles.values()))
        assert ([answer.code for answer in answers], records()) == ([0] * 5, 4)
        await client.client.close()
