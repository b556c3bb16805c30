"""Notices to brokers that the lowest id of their group changed (behaviour.md §1.8)."""

from __future__ import annotations

import pytest

from rmqkit.namesrv.brokers import receivers
from rmqkit.namesrv.routes import MemberChange
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import decode_fields
from rmqkit.protocol.schemas.brokers import BrokerIdentity
from rmqkit.remoting.router import Router
from rmqkit.remoting.server import RemotingServer
from tests.namesrv.running import serving, until


@pytest.mark.parametrize(
    ("members", "offline", "told"),
    [
        ({1: "a:1", 2: "a:2", 3: "a:3"}, None, ["a:2", "a:3"]),
        ({1: "a:1"}, None, ["a:1"]),
        ({1: "a:1", 2: "a:2"}, "a:0", ["a:1", "a:2"]),
        ({2: "a:2"}, "a:0", ["a:2"]),
    ],
)
def test_who_is_reported(members, offline, told):
    assert receivers(MemberChange("a", members, offline, None)) == told


class Listener:
    """A broker's port that remembers notices."""

    def __init__(self):
        self.notices = []
        dispatch = Router()
        dispatch.register(RequestCode.NOTIFY_MIN_BROKER_ID_CHANGE, self.take)
        self.server = RemotingServer(dispatch)
        self.address = ""

    def take(self, connection, command):
        self.notices.append((command.is_one_way, decode_fields(command)))

    async def __aenter__(self):
        self.address = f"127.0.0.1:{await self.server.listen('127.0.0.1', 0)}"
        return self

    async def __aexit__(self, *exc_info):
        await self.server.close()


async def test_members_are_notified_over_their_ports(tmp_path):
    async with serving(tmp_path, notify_min_broker_id_changed=True) as ask, Listener() as second, Listener() as first:
        await ask.register(broker_id=2, broker_addr=second.address, enable_acting_master=True)
        await ask.register(broker_id=1, broker_addr=first.address, enable_acting_master=True)
        await until(lambda: second.notices)
        joined = {
            "minBrokerId": "1",
            "brokerName": "broker-a",
            "minBrokerAddr": first.address,
            "haBrokerAddr": "127.0.0.1:21912",
        }
        assert second.notices == [(True, joined)]
        gone = BrokerIdentity("broker-a", first.address, "DefaultCluster", 1)
        await ask(RequestCode.UNREGISTER_BROKER, gone)
        await until(lambda: len(second.notices) == 2)
        left = {
            "minBrokerId": "2",
            "brokerName": "broker-a",
            "minBrokerAddr": second.address,
            "offlineBrokerAddr": first.address,
        }
        assert second.notices[1] == (True, left)
        assert first.notices == []


async def test_nobody_is_notified_unless_it_is_switched_on(tmp_path):
    async with serving(tmp_path) as ask, Listener() as second, Listener() as first:
        await ask.register(broker_id=2, broker_addr=second.address)
        await ask.register(broker_id=1, broker_addr=first.address)
        await ask(RequestCode.UPDATE_NAMESRV_CONFIG, body=b"notifyMinBrokerIdChanged=true")
        await ask.register(broker_id=0, broker_addr="127.0.0.1:1")
        await until(lambda: second.notices and first.notices)
        assert [notice["minBrokerId"] for _, notice in second.notices] == ["0"]


async def test_a_member_that_cannot_be_reached_is_logged(tmp_path, caplog):
    async with serving(tmp_path, notify_min_broker_id_changed=True) as ask:
        refusing = RemotingServer(Router())
        address = f"127.0.0.1:{await refusing.listen('127.0.0.1', 0)}"
        await refusing.close()
        await ask.register(broker_id=2, broker_addr=address)
        await ask.register(broker_id=1, broker_addr="127.0.0.1:1")
        await until(lambda: f"cannot notify {address} that the lowest broker id is now 1" in caplog.text)
