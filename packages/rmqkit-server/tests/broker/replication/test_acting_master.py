"""The acting master: its election, its end, and the state that a returning broker takes over.

Source: behaviour.md §1.8, §10.5; remoting.md §4.4 (905, 906).
"""

from __future__ import annotations

import asyncio
from ipaddress import ip_address
from types import SimpleNamespace

import pytest

from rmqkit.broker.delay.levels import Schedule
from rmqkit.broker.pull.long_polling import LongPolling, WaitingPull
from rmqkit.broker.replication.acting_master import ActingMaster, PreOnline
from rmqkit.broker.replication.role import ReplicationHandlers, SlaveRole
from rmqkit.broker.settings import BrokerRole
from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.protocol import fastjson
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import decode_fields, reply, request
from rmqkit.protocol.schemas.brokers import DelayOffsets, HaInfo, HaRuntimeInfo, MinBrokerIdChange
from rmqkit.protocol.schemas.offsets import ConsumerOffsets
from rmqkit.protocol.schemas.topics import DataVersion
from rmqkit.remoting.client import RemotingClient
from tests.broker.half_messages import HalfMessages
from tests.broker.replication.inside import master_of, wake_of
from tests.broker.replication.test_escape import Elsewhere
from tests.client.peers import Peer, until
from tests.store.stores import message, small_settings
from tests.virtual_time import run as run_virtual
from tests.waiting import SECONDS

pytestmark = pytest.mark.virtual_time

OWN = "127.0.0.1:1001"
MASTER = "127.0.0.1:1000"
EXCHANGE = RequestCode.EXCHANGE_BROKER_HA_INFO


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("rmqkit.broker.delay.levels._LOOK_MS_MAX", 5)
    monkeypatch.setattr("rmqkit.broker.delay.levels._PAUSE_MS_MIN", 0)
    monkeypatch.setattr("rmqkit.broker.replication.acting_master._LOOK_MS", 5)
    monkeypatch.setattr("rmqkit.broker.replication.acting_master._PAUSE_SECONDS", 0)


class Group(HalfMessages):
    """A slave, the members of its group as the test sets them, and a master that reports its log's position."""

    def __init__(self, root, *, broker_id=1, role=BrokerRole.SLAVE, **settings):
        super().__init__(root, broker_id=broker_id, broker_role=role, acts_as_master=True, **settings)
        self.address = OWN
        self.identity = SimpleNamespace(ip="127.0.0.1", store_host=bytes(8))
        self.long_polling = LongPolling(self.clock)
        folder = root / "config"
        delays = (1000, 5000)
        self.schedule = Schedule(folder, self.store, delays, self.long_polling, self.clock, flushes=False)
        self.schedule.load()
        self.timer = None
        self.members_known: dict[int, str] = {}
        self.hosts_known = {"127.0.0.1"}
        self.is_linked = False
        self.masters = []
        self.master = Peer()
        self.client = RemotingClient()
        self.elsewhere = Elsewhere()

    async def members(self):
        return dict(self.members_known)

    def acting(self, *, escapes=True):
        return ActingMaster(
            self,
            self,
            self.client,
            remote_put=self.elsewhere.put if escapes else None,
            holds_back=lambda: self.is_linked,
            on_master=lambda *addresses: self.masters.append(addresses),
        )

    def delayed(self, body):
        delayed = self.schedule.schedule(message("T", 1, body, DELAY="1"), 1)
        return self.store.put(delayed)

    def pre_online(self):
        return PreOnline(self, self, self.client, ha_address="127.0.0.1:1002")


def on_group(scenario, root, **settings):
    async def main():
        with Group(root, store=small_settings(commit_log_file_bytes=1 << 20), **settings) as group:
            await group.master.start()
            group.master.answer(EXCHANGE, lambda c: reply(c, header=HaInfo("127.0.0.1:77", 0, group.master.address)))
            try:
                async with asyncio.timeout(SECONDS):
                    await scenario(group)
            finally:
                await group.client.close()
                await group.master.stop()

    run_virtual(main())


@pytest.mark.parametrize(
    ("members", "linked", "acts"),
    [
        ({1: OWN}, False, True),
        ({1: OWN, 2: "127.0.0.1:9"}, False, True),
        ({2: "127.0.0.1:9"}, False, False),
        ({1: "127.0.0.1:9"}, False, False),
        ({}, False, False),
        ({1: OWN}, True, False),
    ],
)
def test_the_lowest_living_id_acts_while_nobody_knows_a_master(tmp_path, members, linked, acts):
    async def scenario(group):
        acting = group.acting()
        group.is_linked = linked
        await acting.apply_members(members)
        assert acting.is_acting is acts
        await acting.close()

    on_group(scenario, tmp_path)


def test_a_slave_with_a_lower_one_beside_it_stops_and_nobody_is_no_news(tmp_path):
    async def scenario(group):
        acting = group.acting()
        await acting.apply_members({2: OWN})
        assert acting.is_acting
        await acting.apply_members({})
        assert acting.is_acting
        await acting.apply_members({1: "127.0.0.1:9", 2: OWN})
        assert not acting.is_acting
        await acting.close()

    on_group(scenario, tmp_path, broker_id=2)


def test_it_stops_when_the_link_to_a_master_is_up_that_nobody_knows_yet(tmp_path):
    async def scenario(group):
        acting = group.acting()
        await acting.apply_members({1: OWN})
        group.is_linked = True
        await acting.apply_members({1: OWN})
        assert not acting.is_acting

    on_group(scenario, tmp_path)


def test_what_is_due_goes_elsewhere_until_the_master_is_back(tmp_path):
    async def scenario(group):
        group.delayed(b"delayed")
        group.half(b"half")
        group.clock.ms += 10_000
        group.members_known = {1: OWN}
        acting = group.acting()
        acting.start()
        await until(lambda: len(group.elsewhere.taken) == 2, "both messages")
        assert set(group.elsewhere.bodies) == {b"delayed", b"half"}
        group.members_known[0] = group.master.address
        await until(lambda: group.masters, "the master")
        assert group.masters == [(group.master.address, "127.0.0.1:77")]
        assert not acting.is_acting
        group.delayed(b"more")
        group.clock.ms += 10_000
        del group.members_known[0]
        await until(lambda: len(group.masters) == 2, "the master's end")
        assert group.masters[1] == (None, None)
        await until(lambda: b"more" in group.elsewhere.bodies, "the next message")
        await acting.close()
        assert len(group.elsewhere.taken) == 3
        assert (group.schedule.offsets().offset_table, group.positions) == ({1: 2}, (1, 0))

    on_group(scenario, tmp_path)


@pytest.mark.parametrize("escapes", [True, False])
def test_delay_offsets_are_copied_often_where_they_may_be_needed(tmp_path, escapes):
    async def scenario(group):
        tables(group, at_ms=group.clock.ms, delays={1: 3}, offsets={})
        group.members_known = {0: group.master.address, 1: OWN}
        acting = group.acting(escapes=escapes)
        acting.start()
        await until(lambda: master_of(acting), "the master")
        if escapes:
            await until(lambda: group.schedule.offsets().offset_table == {1: 3}, "its offsets")
            group.clock.ms += 4999
        for _ in range(3):
            acting.look_soon()
            await asyncio.sleep(0)
        await acting.close()
        assert len(group.master.asked(RequestCode.GET_ALL_DELAY_OFFSET)) == escapes

    on_group(scenario, tmp_path)


def test_without_escape_what_is_due_waits_for_the_master(tmp_path, caplog):
    async def scenario(group):
        group.delayed(b"delayed")
        group.clock.ms += 10_000
        end = group.store.max_physical_offset
        acting = group.acting(escapes=False)
        await acting.apply_members({1: OWN})
        assert acting.is_acting
        assert "due messages wait for the master, because enableRemoteEscape is false" in caplog.text
        await acting.close()
        assert (group.schedule.offsets().offset_table, group.store.max_physical_offset) == ({}, end)

    on_group(scenario, tmp_path)


def test_the_table_of_an_acting_master_is_newer_than_the_one_it_copied(tmp_path):
    async def scenario(group):
        group.offsets.merge(
            ConsumerOffsets(DataVersion(7, 0, group.clock.ms), {}, {"T@g": {0: 5}}), asked_ms=group.clock.ms
        )
        group.clock.ms += 1
        acting = group.acting()
        await acting.apply_members({1: OWN})
        assert group.offsets.contents.data_version == DataVersion(8, 0, group.clock.ms)
        await acting.close()

    on_group(scenario, tmp_path)


def test_held_pulls_are_answered_when_the_master_is_back(tmp_path):
    async def scenario(group):
        woken = []
        connection = object()
        for held_for in (connection, None):
            held = WaitingPull(
                held_for, 0, None, group.clock.monotonic_ms() + 9999, lambda who=held_for: woken.append(who)
            )
            group.long_polling.hold("T", 0, held)
        acting = group.acting()
        await acting.apply_members({0: group.master.address, 1: OWN})
        assert woken == [connection]  # delay levels go on waiting

    on_group(scenario, tmp_path)


def test_a_master_that_does_not_answer_yet_is_asked_again(tmp_path):
    async def scenario(group):
        group.members_known = {0: "127.0.0.1:1", 1: OWN}
        acting = group.acting()
        acting.start()
        group.members_known[0] = group.master.address
        await until(lambda: group.masters, "the master")
        await acting.close()

    on_group(scenario, tmp_path)


def test_who_gives_way_to_a_master_does_not_act_until_that_had_time_to_register(tmp_path):
    async def scenario(group):
        acting = group.acting()
        await acting.apply_members({1: OWN})
        await acting.give_way()
        await acting.apply_members({1: OWN})
        assert not acting.is_acting
        group.clock.ms += 30_000
        await acting.apply_members({1: OWN})
        assert acting.is_acting
        await acting.close()

    on_group(scenario, tmp_path)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_who_gives_way_while_it_stops_already_waits_for_what_is_on_its_way(tmp_path, is_cancelled):
    async def scenario(group):
        group.delayed(b"delayed")
        group.clock.ms += 10_000
        group.elsewhere.gate.clear()
        acting = group.acting()
        await acting.apply_members({1: OWN})
        await until(lambda: group.elsewhere.tried, "a message on its way")
        group.is_linked = True
        stopping = asyncio.ensure_future(acting.apply_members({1: OWN}))
        await asyncio.sleep(0)
        if is_cancelled:
            stopping.cancel()
        giving_way = asyncio.ensure_future(acting.give_way())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not giving_way.done()
        group.elsewhere.gate.set()
        await giving_way
        assert group.schedule.offsets().offset_table == {1: 1}
        await asyncio.gather(stopping, return_exceptions=True)

    on_group(scenario, tmp_path)


def test_a_notice_makes_it_look(tmp_path, monkeypatch):
    monkeypatch.setattr("rmqkit.broker.replication.acting_master._LOOK_MS", 3_600_000)

    async def scenario(group):
        acting = group.acting()
        handlers = handlers_of(group, acting)
        acting.start()
        await asyncio.sleep(0)
        group.members_known = {1: OWN}
        notice = MinBrokerIdChange(min_broker_id=1, broker_name="broker-a", min_broker_addr=OWN)
        assert handlers.lowest_id_changed(None, request(RequestCode.NOTIFY_MIN_BROKER_ID_CHANGE, notice)).code == 0
        await until(lambda: acting.is_acting, "acting")
        await acting.close()

    on_group(scenario, tmp_path)


class BrokerContext(SimpleNamespace):
    """The parts of a broker that a group has."""

    def __getattr__(self, name):
        return None


def handlers_of(group, acting):
    context = BrokerContext(**vars(group))
    known = SimpleNamespace(_master_hosts=group.hosts_known, _context=context)
    slave = SimpleNamespace(
        acting=acting,
        follow=lambda *addresses: group.masters.append(addresses),
        believes=lambda *said: SlaveRole.believes(known, *said),
    )
    is_slave = context.settings.broker_role is BrokerRole.SLAVE
    return ReplicationHandlers(
        context, ha_address="127.0.0.1:1002", slave=slave if is_slave else None, status=HaRuntimeInfo
    )


def over(*hops):
    """Return a connection from an address through balancers."""
    addresses = tuple(reversed(hops))
    return SimpleNamespace(hops=[ip_address(hop) for hop in hops], addresses=addresses, peer=f"{addresses[0]}:5")


async def exchanged(group, acting, told, connection=None):
    said = connection or over("127.0.0.1")
    answer = await handlers_of(group, acting).ha_info(said, request(EXCHANGE, told))
    assert answer.code == 0
    return decode_fields(answer)


def test_a_master_says_where_its_log_is_and_takes_no_advice(tmp_path):
    async def scenario(group):
        ours = {"masterHaAddress": "127.0.0.1:1002", "masterFlushOffset": "0", "masterAddress": OWN}
        assert await exchanged(group, None, None) == ours
        assert await exchanged(group, None, HaInfo("127.0.0.1:5", 7, MASTER)) == {}

    on_group(scenario, tmp_path, broker_id=0, role=BrokerRole.SYNC_MASTER)


@pytest.mark.parametrize(
    ("hop", "told", "is_believed"),
    [
        ("10.0.0.1", HaInfo("10.0.0.1:10912", 7, "10.0.0.1:10911"), True),
        ("10.0.1.1", HaInfo("10.0.1.1:10912", 7, "10.0.0.1:10911"), True),  # its last known brokerIP2
        ("10.0.0.9", HaInfo("10.0.0.9:10912", 7, "10.0.0.9:10911"), False),  # a stranger names itself
        ("10.0.0.9", HaInfo("10.0.0.1:10912", 7, "10.0.0.1:10911"), False),  # or the master
        (
            "10.0.0.1",
            HaInfo("10.0.0.9:10912", 7, "10.0.0.1:10911"),
            False,
        ),  # the master's machine names a stranger's log
        ("127.0.0.1", HaInfo("10.0.0.9:10912", 7, "10.0.0.9:10911"), False),
        ("127.0.0.1", HaInfo("10.0.0.1:10912", 7, "10.0.0.1:10911"), True),
    ],
)
def test_only_the_master_that_was_known_is_followed_when_it_announces_itself(tmp_path, hop, told, is_believed, caplog):
    async def scenario(group):
        group.hosts_known = {"10.0.0.1", "10.0.1.1"}
        acting = group.acting()
        await acting.apply_members({1: OWN})
        assert await exchanged(group, acting, told, over(hop)) == {}
        followed = [(told.master_address, told.master_ha_address)] if is_believed else []
        assert (acting.is_acting, group.masters) == (not is_believed, followed)
        assert wake_of(acting).is_set() is not is_believed, "the slave asks the name servers for a master"
        await acting.close()

    on_group(scenario, tmp_path)
    assert ("ignored until the name servers report it" in caplog.text) is not is_believed


def test_a_slave_gives_way_to_a_master_that_announces_itself_and_follows_it(tmp_path):
    async def scenario(group):
        acting = group.acting()
        await acting.apply_members({1: OWN})
        assert await exchanged(group, acting, None) == {}
        assert acting.is_acting
        assert await exchanged(group, acting, HaInfo("127.0.0.1:5", 7, MASTER)) == {}
        assert (acting.is_acting, group.masters) == (False, [(MASTER, "127.0.0.1:5")])

    on_group(scenario, tmp_path)


def test_a_slave_that_never_acts_follows_nobody_who_requests_it(tmp_path):
    async def scenario(group):
        assert await exchanged(group, None, HaInfo("127.0.0.1:5", 7, MASTER)) == {}
        assert group.masters == []

    on_group(scenario, tmp_path)


# ---- before a broker registers


def tables(group, *, at_ms, delays, offsets):
    """Let the other member answer with these tables."""
    version = DataVersion(1, 0, at_ms)
    bodies = {
        RequestCode.GET_ALL_DELAY_OFFSET: DelayOffsets(version, delays),
        RequestCode.GET_ALL_CONSUMER_OFFSET: ConsumerOffsets(version, {}, offsets),
    }
    for code, body in bodies.items():
        group.master.answer(code, lambda command, body=body: reply(command, body=fastjson.dumps(body)))


def test_a_returning_master_announces_itself_and_takes_over_what_is_further(tmp_path):
    async def scenario(group):
        for number in range(5):
            group.delayed(b"%d" % number)
        group.offsets.commit("g", "T", 0, 10)
        group.offsets.commit("g", "T", 1, 10)
        group.offsets.commit("g", "own", 0, 3)
        group.members_known = {0: OWN, 1: group.master.address}
        tables(group, at_ms=group.clock.ms, delays={1: 4}, offsets={"T@g": {0: 12, 1: 9, 2: 1}, "U@h": {0: 1}})
        await group.pre_online().run()
        assert [r.code for r in group.master.requests] == [
            EXCHANGE,
            RequestCode.GET_ALL_DELAY_OFFSET,
            RequestCode.GET_ALL_CONSUMER_OFFSET,
        ]
        end = str(group.store.max_physical_offset)
        told = {"masterHaAddress": "127.0.0.1:1002", "masterFlushOffset": end, "masterAddress": OWN}
        assert group.master.asked(EXCHANGE) == [told]
        contents = group.offsets.contents.offset_table
        assert contents == {"T@g": {0: 12, 1: 10, 2: 1}, "own@g": {0: 3}, "U@h": {0: 1}}
        saved = OffsetTable(tmp_path / "config", group.clock)
        saved.load()
        assert saved.contents.offset_table == contents
        assert group.schedule.offsets().offset_table == {1: 4}

    on_group(scenario, tmp_path, broker_id=0, role=BrokerRole.ASYNC_MASTER)


def test_nothing_is_taken_from_a_table_that_is_older(tmp_path):
    async def scenario(group):
        group.delayed(b"a")
        group.offsets.commit("g", "T", 0, 10)
        group.offsets.advance_version()
        group.schedule.replace_with(DelayOffsets(DataVersion(1, 0, group.clock.ms), {1: 1}))
        group.members_known = {1: group.master.address}
        tables(group, at_ms=group.clock.ms - 1, delays={1: 4}, offsets={"T@g": {0: 12}})
        await group.pre_online().run()
        assert group.offsets.get("g", "T", 0) == 10
        assert group.schedule.offsets().offset_table == {1: 1}

    on_group(scenario, tmp_path, broker_id=0, role=BrokerRole.ASYNC_MASTER)


def test_a_member_that_does_not_answer_is_asked_again_and_left_after_a_while(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("rmqkit.broker.replication.acting_master._TRIES", 3)

    async def scenario(group):
        group.members_known = {
            1: group.master.address
        }  # this member refuses the exchange: it has no answer for the request
        await group.pre_online().run()
        assert len(group.master.asked(EXCHANGE)) == 3
        assert f"registering without the progress of the others: {group.master.address}" in caplog.text

    on_group(scenario, tmp_path, broker_id=0, role=BrokerRole.ASYNC_MASTER)


def test_a_returning_slave_takes_over_where_there_is_no_master(tmp_path):
    async def scenario(group):
        tables(group, at_ms=group.clock.ms, delays={}, offsets={"T@g": {0: 12}})
        group.members_known = {0: "127.0.0.1:1", 2: group.master.address}
        await group.pre_online().run()
        assert group.master.requests == []
        del group.members_known[0]
        await group.pre_online().run()
        assert group.master.asked(EXCHANGE) == []
        assert group.offsets.get("g", "T", 0) == 12

    on_group(scenario, tmp_path)
