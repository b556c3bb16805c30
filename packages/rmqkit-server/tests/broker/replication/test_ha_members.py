"""Members: brokers that may replicate a master's log, and whose copies confirm a message. Also TLS on the HA port."""

from __future__ import annotations

import asyncio
import ipaddress
import logging

import pytest
import uvloop

from rmqkit.broker.ha_addresses import HaAddresses
from rmqkit.broker.replication.master import HaMaster
from rmqkit.broker.replication.members import Members
from rmqkit.broker.replication.role import warn_of_ha_port
from rmqkit.broker.replication.slave import HaSlave
from rmqkit.broker.settings import BrokerRole, BrokerSettings
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.errors import SettingsError
from rmqkit.remoting.address import ip_of
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.tls import (
    ClientTls,
    NeedClientAuth,
    ServerTls,
    ServerTlsSettings,
    Tls,
    TlsMode,
)
from rmqkit.settings import load, to_properties
from rmqkit.store.message_store import MessageStore
from rmqkit.testing.clock import LoopThread, StandingClock, VirtualClock
from tests.broker.ha_links import master, turns, until
from tests.broker.replication.inside import port_of
from tests.certificates import OPENSSL, REASON, make_certificate
from tests.store.stores import small_settings

ELSEWHERE = "127.0.0.2"
ONE = HaAddresses("127.0.0.1")
ONE_AND_MEMBERS = HaAddresses("127.0.0.1;members")
address = ipaddress.ip_address


def listed(text, everything):
    return {"any": everything, "none": []}.get(text, text.split())


class NameServers:
    """Name servers that return the members set by the test. ``gate`` holds answers back."""

    def __init__(self, *members):
        self.members = set(members)
        self.times_asked = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def ask(self):
        self.times_asked += 1
        await self.gate.wait()
        return self.members


@pytest.mark.parametrize(
    ("text", "allowed", "named", "members", "local"),
    [
        ("loopback;members", "127.0.0.1 127.0.0.2 ::1", "none", True, True),
        ("members", "none", "none", True, True),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1", False, True),
        ("10.1.0.0/16, members", "10.1.7.7", "10.1.7.7", True, False),
        ("any", "any", "any", False, False),
    ],
)
def test_the_setting_names_who_may_follow(text, allowed, named, members, local):
    (settings,) = load([BrokerSettings], {"haAllowedAddresses": text}).values
    value = settings.ha_addresses
    asked = ["127.0.0.1", "127.0.0.2", "::1", "10.1.7.7", "10.2.0.1", "2001:db8::1"]
    assert [each for each in asked if value.include(address(each))] == listed(allowed, asked)
    assert [each for each in asked if value.name(address(each))] == listed(named, asked)
    assert (value.has_members, value.is_local) == (members, local)
    assert to_properties(settings)["haAllowedAddresses"] == text


@pytest.mark.parametrize("text", ["", "somewhere", "members;10.1.0.0/99"])
def test_what_is_no_address_is_refused_by_the_setting(text):
    with pytest.raises(SettingsError, match="members, loopback, any"):
        load([BrokerSettings], {"haAllowedAddresses": text})


def test_addresses_of_sockets_are_read_as_they_are():
    assert ip_of("::ffff:10.0.0.1") == address("10.0.0.1")
    assert ip_of("fe80::1%eth0") == address("fe80::1")
    assert ip_of("broker-1") is None


async def test_members_are_who_the_name_servers_report_and_are_remembered():
    told, clock = NameServers("10.0.0.1:10911", "localhost:10911"), StandingClock()
    looks, linked = [], set()

    async def look():
        before = len(looks)
        members.look_soon()
        await until(lambda: len(looks) > before)

    members = Members(clock, told.ask, lambda: looks.append(1), own={"10.0.0.7"}, linked=lambda: set(linked))
    members.start()
    await until(lambda: looks)  # localhost is looked up in a thread
    assert members.count_at(address("10.0.0.1")) == 1
    assert members.count_at(address("10.0.0.7")) == 1  # the same machine as localhost
    assert members.count_at(address("127.0.0.2")) == 0
    told.members = {"10.0.0.2:10911"}
    members.look_soon()
    await until(lambda: members.count_at(address("10.0.0.2")))
    assert members.count_at(address("10.0.0.1")) == 1  # it is remembered
    told.members = None  # no name server answers: the members stay
    clock.ms += 1_200_000
    await look()
    assert members.count_at(address("10.0.0.2")) == 1
    told.members = set()
    linked.add(address("10.0.0.2"))
    await look()
    assert (members.count_at(address("10.0.0.1")), members.count_at(address("10.0.0.2"))) == (0, 1)  # it follows
    linked.clear()
    clock.ms += 599_000
    await look()
    assert members.is_any_known
    clock.ms += 1001
    await look()
    assert not members.is_any_known
    await members.close()


def test_members_are_not_somewhere_on_the_internet(caplog):
    async def scenario():
        told = NameServers(
            "8.8.4.4:10911", "8.8.8.4:10911", "10.7.7.7:10911", "[2600:1:2:3::4]:10911", "[fd00::4]:10911"
        )
        looks = []
        members = Members(StandingClock(), told.ask, lambda: looks.append(1), own={"8.8.8.8", "2600:1:2:4::8"})
        members.start()
        await until(lambda: looks)
        asked = ["8.8.4.4", "8.8.8.4", "10.7.7.7", "2600:1:2:3::4", "fd00::4"]
        assert [each for each in asked if members.count_at(address(each))] == ["8.8.8.4", "10.7.7.7", "fd00::4"]
        members.look_soon()
        await until(lambda: len(looks) == 2)
        await members.close()

    asyncio.run(scenario())
    assert sorted(caplog.messages) == [
        f"name servers know {one} as a broker of this name, at a global address that is not in this broker's "
        "network: it does not count as a member; if it is a slave, add its address to haAllowedAddresses"
        for one in ("8.8.4.4:10911", "[2600:1:2:3::4]:10911")
    ]


def test_where_users_are_in_force_a_member_is_who_signs_too():
    async def scenario():
        told, clock, looks = NameServers("10.0.0.1:10911", "127.0.0.1:10921"), StandingClock(), []
        members = Members(clock, told.ask, lambda: looks.append(1), own={"10.0.0.7"}, need_signatures=True)
        members.start()
        await until(lambda: looks)
        assert members.count_at(address("10.0.0.1")) == 0
        members.signed(address("10.0.0.1"))
        await until(lambda: len(looks) == 2)  # waiting links are checked
        assert (members.count_at(address("10.0.0.1")), members.count_at(address("127.0.0.1"))) == (1, 0)
        members.signed(address("10.0.0.7"))
        assert members.count_at(address("127.0.0.1")) == 1  # one machine
        members.signed(address("10.0.0.9"))
        assert members.count_at(address("10.0.0.9")) == 0  # a signature alone is no registration
        clock.ms += 600_001
        assert members.count_at(address("10.0.0.1")) == 0
        await members.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(("is_left_out", "seconds"), [(True, 2), (False, 10)])
def test_members_are_requested_every_two_seconds_while_a_link_does_not_count(is_left_out, seconds):
    told, thread = NameServers("10.0.0.1:10911"), LoopThread("members")
    clock = VirtualClock(thread)

    async def begin():
        members = Members(clock, told.ask, lambda: None, own=set(), is_any_left_out=lambda: is_left_out)
        members.start()
        await until(lambda: told.times_asked == 1 and members.is_any_known)
        return members

    members = thread.run(begin)
    clock.advance(seconds=seconds - 0.5)
    assert told.times_asked == 1
    clock.advance(seconds=0.5)
    assert told.times_asked == 2
    thread.run(members.close)
    thread.close()


def test_a_link_of_this_machine_that_no_name_server_reports_is_left_out(tmp_path):
    async def scenario():
        told = NameServers()
        async with master(tmp_path, ask_members=told.ask) as it:
            assert not it.ha.is_any_left_out()
            await it.slave(it.put())
            assert it.ha.is_any_left_out()
            told.members = {"127.0.0.1:10921"}
            it.ha.members.look_soon()
            await until(lambda: not it.ha.is_any_left_out())

    asyncio.run(scenario())


async def test_without_name_servers_nobody_is_a_member_and_all_that_are_allowed_count(tmp_path):
    async with master(tmp_path) as it:
        end = it.put()
        for host in ("127.0.0.1", ELSEWHERE):
            await it.slave(end, host=host)
        assert it.ha.copies.replicated_offset(3) == end
        it.settings.ha_addresses = ONE
        it.ha.addresses_changed()
        await until(lambda: len(it.links) == 1)
        assert it.ha.copies.replicated_offset(3) == -1
        refused = await it.slave(host=ELSEWHERE)
        await until(lambda: not refused.is_open)


@pytest.mark.parametrize("is_member", [True, False])
async def test_an_unknown_address_waits_until_the_name_servers_were_asked(tmp_path, is_member, caplog):
    told = NameServers()
    async with master(tmp_path, ask_members=told.ask, ha_addresses=ONE_AND_MEMBERS) as it:
        end = it.put()
        await until(lambda: it.ha.members.looks_ended == 1)
        told.gate.clear()
        if is_member:
            told.members = {f"{ELSEWHERE}:10911"}
        slave = await it.slave(host=ELSEWHERE)
        slave.report(end)
        await until(lambda: told.times_asked == 2)
        await turns()
        assert (it.links, slave.received) == ([], b"")
        told.gate.set()
        if is_member:
            await until(lambda: it.ha.copies.replicated_offset(2) == end)
            again = await it.slave(end, host=ELSEWHERE)
            slave.report(end)
            await turns()
            assert it.ha.copies.replicated_offset(3) == -1  # there is one member at that address
            await again.close()
        else:
            await until(lambda: not slave.is_open)
            assert it.ha.waiting == []
    assert caplog.text.count("is refused at the HA port") == (not is_member)


async def test_links_that_wait_are_few(tmp_path):
    told = NameServers()
    told.gate.clear()
    async with master(tmp_path, ask_members=told.ask, ha_addresses=ONE_AND_MEMBERS) as it:
        slaves = [await it.slave(host=ELSEWHERE) for _ in range(66)]
        await until(lambda: sum(not slave.is_open for slave in slaves) == 2)
        assert len(it.ha.waiting) == 64
        told.gate.set()
        await until(lambda: not any(slave.is_open for slave in slaves))


async def test_a_copy_from_this_machine_counts_when_the_name_servers_report_a_member_here(tmp_path):
    told = NameServers()
    async with master(tmp_path, ask_members=told.ask) as it:
        end = it.put()
        await it.slave(end)
        assert (it.ha.copies.replicated_offset(2), it.ha.copies.in_sync_count(), it.links[0].in_sync) == (-1, 1, False)
        told.members = {"127.0.0.1:10921"}
        it.ha.members.look_soon()
        await until(lambda: it.ha.copies.replicated_offset(2) == end)
        assert (it.ha.copies.in_sync_count(), it.links[0].in_sync) == (2, True)


async def test_the_first_link_of_an_address_counts_until_it_is_silent(tmp_path):
    async with master(tmp_path, ha_addresses=ONE) as it:
        end = it.put()
        await it.slave(end)
        late = await it.slave(0)
        assert it.ha.copies.replicated_offset(2) == end
        it.clock.ms += 2 * it.settings.ha_heartbeat_interval_ms + 1
        assert it.ha.copies.replicated_offset(2) == end  # both are silent
        late.report(0)
        await until(lambda: it.ha.copies.replicated_offset(2) == 0)


# ---- when the port is open to others


async def is_open(host, port):
    try:
        _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_only_this_machine_can_connect_until_a_member_is_known(tmp_path, runner):
    async def scenario():
        told = NameServers()
        async with master(tmp_path, bind="0.0.0.0", ask_members=told.ask) as it:
            slave = await it.slave(it.put())
            assert await is_open("127.0.0.1", it.port)
            assert not await is_open(ELSEWHERE, it.port)
            told.members = {"127.0.0.1:10921"}
            it.ha.members.look_soon()
            await until(lambda: port_of(it.ha).is_open)
            assert await is_open(ELSEWHERE, it.port)
            assert await is_open("127.0.0.1", it.port)
            assert slave.is_open
            end = it.put()
            await slave.has(end - it.links[0].slave_ack_offset)

    runner(scenario())


@pytest.mark.parametrize(
    ("settings", "has_name_servers", "opened"),
    [
        ({"broker_role": BrokerRole.SYNC_MASTER}, True, True),
        ({"acts_as_master": True}, True, True),
        ({"ha_addresses": HaAddresses("loopback;10.0.0.0/8")}, False, True),
        ({"ha_addresses": HaAddresses("any")}, False, True),
        ({}, True, False),
        ({"broker_role": BrokerRole.SYNC_MASTER}, False, False),  # no name server could report members
        ({"broker_role": BrokerRole.SYNC_MASTER, "ha_addresses": ONE}, True, False),
    ],
)
async def test_the_port_is_open_from_the_start_where_slaves_are_wanted(tmp_path, settings, has_name_servers, opened):
    ask = NameServers().ask if has_name_servers else None
    async with master(tmp_path, bind="0.0.0.0", ask_members=ask, **settings) as it:
        assert await is_open("127.0.0.1", it.port)
        assert await is_open(ELSEWHERE, it.port) is opened
        it.settings.ha_addresses = HaAddresses("any")
        it.ha.addresses_changed()
        await until(lambda: port_of(it.ha).is_open)
        assert await is_open(ELSEWHERE, it.port)


async def test_a_port_that_is_in_use_is_found_at_the_start_also_where_it_is_not_opened(tmp_path):
    async with await asyncio.start_server(print, "127.0.0.3", 0) as taken, master(tmp_path) as it:
        again = HaMaster(it.store, it.settings, it.clock, lambda: None)
        with pytest.raises(Exception, match=r"cannot listen on 0\.0\.0\.0"):
            await again.start("0.0.0.0", taken.sockets[0].getsockname()[1])


# ---- TLS


def server_tls(certificate, **more):
    return ServerTls(ServerTlsSettings(certificate=certificate.certificate, key=certificate.key, **more))


def client_tls(certificate, own=None):
    files = {} if own is None else {"certificate": own.certificate, "key": own.key}
    return ClientTls(Tls(trusted=certificate.certificate, **files))


@pytest.mark.skipif(OPENSSL is None, reason=REASON)
@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("is_asked", [True, False], ids=["enabled", "offered"])
def test_a_slave_follows_over_tls_with_certificates_both_ways(tmp_path, runner, is_asked):
    certificate, slaves = make_certificate(tmp_path, "master"), make_certificate(tmp_path, "slave")

    async def scenario():
        tls = server_tls(certificate, trusted=slaves.certificate, need_client_auth=NeedClientAuth.REQUIRE)
        large = small_settings(commit_log_file_bytes=16 << 20)
        async with master(tmp_path / "master", clock=SYSTEM_CLOCK, store=large, tls=tls, ha_tls=is_asked) as it:
            store = MessageStore(tmp_path / "slave", large, is_replica=True)
            store.open()
            client = RemotingClient()
            slave = HaSlave(
                store,
                BrokerSettings(ha_tls=True),
                SYSTEM_CLOCK,
                client,
                address="127.0.0.1:1",
                flushes=False,
                tls=client_tls(certificate, slaves),
            )
            it.put(b"first")
            slave.follow(f"127.0.0.1:{it.port}", None)
            await until(lambda: slave.is_following)
            for number in range(6):
                it.put(bytes([number]) * (1 << 20))
                await until(lambda: it.ha.copies.replicated_offset(2) == it.store.max_physical_offset)
            assert bytes(store.log_part(0, 16 << 20)) == it.log()[: len(store.log_part(0, 16 << 20))]
            await slave.close()
            await client.close()
            store.close()

    runner(scenario())


@pytest.mark.skipif(OPENSSL is None, reason=REASON)
async def test_a_plain_slave_is_refused_where_tls_is_requested_and_taken_where_it_is_not(tmp_path, caplog):
    certificate = make_certificate(tmp_path, "master")

    async with master(tmp_path / "a", tls=server_tls(certificate), ha_tls=True) as it:
        it.put()
        slave = await it.slave(0)
        await until(lambda: not slave.is_open)
        assert slave.received == b""
    async with master(tmp_path / "b", tls=server_tls(certificate, mode=TlsMode.ENFORCING)) as it:
        end = it.put()
        assert len(await (await it.slave(0)).has(end)) == end
    assert "it does not use TLS, but haTlsEnable=true requires it" in caplog.text


@pytest.mark.skipif(OPENSSL is None, reason=REASON)
@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_a_slave_says_in_words_why_tls_failed(tmp_path, runner, caplog):
    certificate, other = make_certificate(tmp_path, "master"), make_certificate(tmp_path, "other")

    async def scenario():
        async with master(tmp_path / "master", tls=server_tls(certificate)) as it:
            store = MessageStore(tmp_path / "slave", small_settings(), is_replica=True)
            store.open()
            client = RemotingClient()
            settings = BrokerSettings(ha_tls=True)
            slave = HaSlave(store, settings, SYSTEM_CLOCK, client, address="a", flushes=False, tls=client_tls(other))
            slave.follow(f"127.0.0.1:{it.port}", None)
            await until(lambda: "replication from" in caplog.text)
            await slave.close()
            await client.close()
            store.close()

    runner(scenario())
    assert "TLS failed: CERTIFICATE_VERIFY_FAILED" in caplog.text


async def test_tls_without_what_it_needs_is_refused_at_the_start(tmp_path):
    async with master(tmp_path) as it:
        settings = BrokerSettings(ha_tls=True)
        with pytest.raises(SettingsError, match="haTlsEnable=true at a master needs a certificate"):
            HaMaster(it.store, settings, it.clock, lambda: None)
        with pytest.raises(SettingsError, match=r"at a slave needs tls\.enable=true"):
            HaSlave(it.store, settings, it.clock, RemotingClient(), address="a", flushes=False)


@pytest.mark.skipif(OPENSSL is None, reason=REASON)
def test_what_users_and_tls_do_not_protect_is_said_at_the_start(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    certificate = make_certificate(tmp_path, "master")
    both = server_tls(certificate, trusted=certificate.certificate, need_client_auth=NeedClientAuth.REQUIRE)
    warn_of_ha_port(BrokerSettings(), None, has_users=False)
    warn_of_ha_port(BrokerSettings(ha_tls=True), both, has_users=True)
    assert caplog.messages == []
    warn_of_ha_port(BrokerSettings(), both, has_users=True)
    warn_of_ha_port(BrokerSettings(), server_tls(certificate, mode=TlsMode.ENFORCING), has_users=False)
    assert "haAllowedAddresses=loopback;members can read the whole log in plain" in caplog.messages[0]
    assert "tls.server.mode=enforcing does not protect the HA port" in caplog.messages[1]
