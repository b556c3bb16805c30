"""Unauthenticated clients at the HA port: raw sockets without rmqkit's protocol code."""

from __future__ import annotations

import asyncio
import json
import struct
from contextlib import asynccontextmanager

import pytest

from rmqkit.broker.ha_addresses import HaAddresses
from rmqkit.broker.server import Broker
from rmqkit.broker.settings import BrokerRole, BrokerSettings
from rmqkit.namesrv.server import KV_FILE, NameServer
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.remoting.authentication import AuthenticationSettings
from rmqkit.remoting.tls import ServerTls, ServerTlsSettings, TlsMode
from rmqkit.store.settings import StoreSettings
from tests.broker.replication.inside import port_of
from tests.broker.stranger import Stranger
from tests.certificates import OPENSSL, REASON, make_certificate
from tests.elsewhere import BELIEVES_US
from tests.waiting import until

HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"
SEND_OK, FLUSH_SLAVE_TIMEOUT = 0, 12
USERS = {"enabled": True, "initial_user": '{"username":"root","password":"secret"}', "authorization_enabled": True}


class Raw:
    """A socket, and the log that came over it."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self.log = bytearray()
        self.is_closed = False
        self.echoes = False
        self.task = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, port, host):
        return cls(*await asyncio.open_connection(HERE, port, local_addr=(host, 0)))

    def report(self, offset):
        self.writer.write(struct.pack(">q", offset))

    async def _read(self):
        try:
            while True:
                offset, size = struct.unpack(">qi", await self.reader.readexactly(12))
                self.log += await self.reader.readexactly(size)
                if self.echoes and size:
                    self.report(offset + size)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.is_closed = True

    async def close(self):
        self.writer.close()
        await self.task


async def raw_send(port, body):
    """Send a message to queue 0 of a new topic, and return the code of the answer."""
    reader, writer = await asyncio.open_connection(HERE, port)
    fields = {"producerGroup": "g", "topic": "Orders", "defaultTopic": "TBW102", "defaultTopicQueueNums": "1"}
    fields |= {"queueId": "0", "sysFlag": "0", "bornTimestamp": "1", "flag": "0", "properties": "", "batch": "false"}
    head = json.dumps({"code": 10, "language": "JAVA", "version": 401, "opaque": 1, "flag": 0, "extFields": fields})
    writer.write(struct.pack(">ii", 4 + len(head) + len(body), len(head)) + head.encode() + body)
    _, marked = struct.unpack(">ii", await reader.readexactly(8))
    code = json.loads(await reader.readexactly(marked & 0xFFFFFF))["code"]
    writer.close()
    await writer.wait_closed()
    return code


@asynccontextmanager
async def broker(root, *, tls=None, users=None, **settings):
    it = Broker(
        BrokerSettings(broker_name="b", broker_ip1=HERE, bind_address="0.0.0.0", listen_port=0, **settings),
        StoreSettings(commit_log_file_bytes=1 << 20),
        root,
        tls=tls,
        authentication=AuthenticationSettings(**(users or {})),
    )
    await it.start()
    try:
        yield it, int(it.address.rpartition(":")[2]), port_of(it.parts.master).number
    finally:
        await it.stop()


def put(it, body):
    from tests.store.stores import message

    it.context.store.put(message(body=body))


@pytest.mark.skipif(OPENSSL is None, reason=REASON)
@pytest.mark.parametrize("is_guarded", [False, True], ids=["plain", "tls-and-users"])
async def test_eight_zero_bytes_from_another_address_get_nothing_of_the_log(tmp_path, is_guarded, caplog):
    guards = {}
    if is_guarded:
        own = make_certificate(tmp_path, "server")
        files = {"certificate": own.certificate, "key": own.key}
        guards = {"tls": ServerTls(ServerTlsSettings(mode=TlsMode.ENFORCING, **files)), "users": USERS}
    async with broker(tmp_path / "store", ha_addresses=HaAddresses(HERE), **guards) as (it, _, ha_port):
        put(it, b"the secret")
        stranger, slave = await Raw.open(ha_port, ELSEWHERE), await Raw.open(ha_port, HERE)
        for each in (stranger, slave):
            each.report(0)
        await until(lambda: b"the secret" in slave.log, "what a slave gets")
        await until(lambda: stranger.is_closed, "the stranger is sent away")
        assert stranger.log == b""
        for each in (stranger, slave):
            await each.close()
    assert caplog.text.count("127.0.0.2:") == 1
    assert "is refused at the HA port: haAllowedAddresses=127.0.0.1 does not name it" in caplog.text
    assert caplog.text.count("authenticationEnabled does not protect the HA port") == is_guarded


SYNC = {"broker_role": BrokerRole.SYNC_MASTER, "in_sync_replicas": 2, "slave_timeout_ms": 100}


async def test_the_echo_of_a_stranger_is_no_copy_that_an_answer_waits_for(tmp_path):
    async with broker(tmp_path, ha_addresses=HaAddresses(HERE), **SYNC) as (it, port, ha_port):
        stranger = await Raw.open(ha_port, ELSEWHERE)
        stranger.echoes = True
        stranger.report(0)
        assert await raw_send(port, b"1") == FLUSH_SLAVE_TIMEOUT
        it.context.settings.slave_timeout_ms = 60_000
        slave = await Raw.open(ha_port, HERE)
        slave.echoes = True
        slave.report(0)
        assert await raw_send(port, b"2") == SEND_OK
        for each in (stranger, slave):
            await each.close()


async def test_a_local_program_that_is_no_member_gets_the_log_but_is_no_copy(tmp_path, caplog):
    kv_file = str(tmp_path / KV_FILE)
    name_server = NameServer(NamesrvSettings(listen_port=0, bind_address=HERE, kv_config_path=kv_file))
    await name_server.start()
    try:
        async with broker(tmp_path / "store", namesrv_addr=name_server.address, **SYNC) as (_, port, ha_port):
            program = await Raw.open(ha_port, HERE)
            program.echoes = True
            program.report(0)
            await until(lambda: "sends do not wait for this copy" in caplog.text, "a warning")
            assert await raw_send(port, b"1") == FLUSH_SLAVE_TIMEOUT
            assert len(program.log) > 0
            await program.close()
    finally:
        await name_server.stop()


async def test_a_report_from_a_slaves_address_does_not_stop_the_slave_from_counting(tmp_path):
    patient = {**SYNC, "slave_timeout_ms": 60_000}
    async with broker(tmp_path, ha_addresses=HaAddresses(HERE), **patient) as (it, port, ha_port):
        slave = await Raw.open(ha_port, HERE)
        slave.echoes = True
        slave.report(0)
        assert await raw_send(port, b"1") == SEND_OK
        stranger = await Raw.open(ha_port, HERE)
        stranger.report(0)
        await until(lambda: stranger.log, "the stranger is heard")
        assert it.parts.master.copies.replicated_offset(2) == it.context.store.max_physical_offset
        assert it.parts.master.copies.in_sync_count() == 2
        assert await raw_send(port, b"2") == SEND_OK
        for each in (stranger, slave):
            await each.close()


# ---- registrations as a further slave, and brokers with users

REGISTER, ALL_TOPICS = 103, 21
MEMBERS_ONLY = HaAddresses("members")


@asynccontextmanager
async def name_server(root):
    settings = NamesrvSettings(listen_port=0, bind_address=HERE, kv_config_path=str(root / KV_FILE), **BELIEVES_US)
    it = NameServer(settings)
    await it.start()
    try:
        yield it.address
    finally:
        await it.stop()


@asynccontextmanager
async def registered(namesrv, address, *, source=None, comes_from=None):
    """A stranger's registration as slave 7 of the broker, which lasts as long as its connection."""
    preamble = b"" if comes_from is None else f"PROXY TCP4 {comes_from} 10.0.0.1 5000 9876\r\n".encode()
    fields = {"brokerName": "b", "brokerAddr": address, "clusterName": "DefaultCluster", "brokerId": "7"}
    fields |= {"haServerAddr": address, "compressed": "false"}
    body = b'{"topicConfigSerializeWrapper":{"topicConfigTable":{},"dataVersion":{}},"filterServerList":[]}'
    async with Stranger(namesrv, preamble, source) as stranger:
        answer = await stranger.ask(REGISTER, body, **fields)
        assert answer.code == SEND_OK, answer.remark
        yield


@pytest.mark.parametrize(
    ("comes_from", "is_member"),
    [
        (None, True),  # from the address that it registers
        ("10.9.9.9", False),  # a client registers another address
    ],
)
async def test_a_slave_that_somebody_elsewhere_registered_is_no_member(tmp_path, comes_from, is_member, caplog):
    async with (
        name_server(tmp_path) as namesrv,
        broker(tmp_path / "store", namesrv_addr=namesrv, ha_addresses=MEMBERS_ONLY, **SYNC) as (it, port, ha_port),
        registered(namesrv, f"{ELSEWHERE}:10911", source=ELSEWHERE, comes_from=comes_from),
    ):
        put(it, b"the secret")
        link = await Raw.open(ha_port, ELSEWHERE)
        link.echoes = True
        link.report(0)
        if is_member:
            await until(lambda: b"the secret" in link.log, "what a slave gets")
            it.context.settings.slave_timeout_ms = 60_000
            assert await raw_send(port, b"1") == SEND_OK
        else:
            await until(lambda: link.is_closed, "the stranger is sent away")
            assert link.log == b""
            assert await raw_send(port, b"1") == FLUSH_SLAVE_TIMEOUT
        await link.close()
    assert ("127.0.0.2:10911 is registered as another broker b, but from 10.9.9.9" in caplog.text) is not is_member


async def test_with_users_a_registered_slave_gets_nothing_before_it_has_signed(tmp_path, caplog):
    users = {
        "enabled": True,
        "initial_user": '{"username":"root","password":"secret12"}',
        "inner_credentials": '{"accessKey":"inner","secretKey":"secret12"}',
    }

    async with (
        name_server(tmp_path) as namesrv,
        broker(tmp_path / "store", users=users, namesrv_addr=namesrv, ha_addresses=MEMBERS_ONLY, **SYNC) as (
            it,
            port,
            ha_port,
        ),
        registered(namesrv, f"{ELSEWHERE}:10911", source=ELSEWHERE),
    ):
        put(it, b"the secret")
        for user, is_signed in ((None, False), ("nobody", False), ("inner", True)):
            async with Stranger(f"{HERE}:{port}", source=ELSEWHERE) as slave:
                answer = await slave.ask(ALL_TOPICS, user=user)
                assert (answer.code == SEND_OK) is is_signed
            link = await Raw.open(ha_port, ELSEWHERE)
            link.report(0)
            if is_signed:
                await until(lambda link=link: b"the secret" in link.log, "what a slave gets")
            else:
                await until(lambda link=link: link.is_closed, "the stranger is sent away")
                assert link.log == b""
            await link.close()
    assert "is refused at the HA port" in caplog.text


async def test_connections_that_are_no_slaves_write_one_line_a_minute(tmp_path, caplog):
    async with broker(tmp_path / "store") as (_, _, ha_port):
        for _ in range(20):
            stray = await Raw.open(ha_port, HERE)
            stray.report(8458360684376321139)
            await until(lambda stray=stray: stray.is_closed, "the stray connection is closed")
            await stray.close()
    assert caplog.text.count("is refused: it reports offset 8458360684376321139") == 1
