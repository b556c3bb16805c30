"""Users at the proxy's remoting port: the proxy authorizes requests as at its gRPC port, and the brokers do so again.

Source: grpc.md §2.3, §11; behaviour.md §9.8.
"""

from __future__ import annotations

from contextlib import asynccontextmanager

import msgspec
import pytest

from rmqkit.broker.settings import BrokerSettings
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command
from rmqkit.protocol.schemas.access import AclEntry, AclInfo, AclPolicy, UserInfo
from rmqkit.protocol.schemas.clients import ConsumerData, HeartbeatData, SubscriptionData
from rmqkit.proxy.server.server import Proxy, ProxySettings
from rmqkit.remoting.authentication import Credentials
from rmqkit.remoting.client import RemotingClient
from rmqkit.standalone import Standalone
from rmqkit.store.settings import StoreSettings
from tests.proxy.test_users import OF_BROKER, SETTINGS

ROUTE, SEND, MAX = RequestCode.GET_ROUTEINFO_BY_TOPIC, RequestCode.SEND_MESSAGE_V2, RequestCode.GET_MAX_OFFSET
OK, REFUSED = ResponseCode.SUCCESS, ResponseCode.NO_PERMISSION
SENT = {"a": "P", "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "0", "h": "0", "n": "broker-a"}


class Asking:
    def __init__(self, address):
        self.address = address

    async def __call__(self, user, code, body=b"", **fields):
        """Return the code and remark of the answer to a user. None sends an unsigned request."""
        credentials = Credentials(access_key=user, secret_key=f"{user}secret") if user else None
        remoting = RemotingClient(clock=SYSTEM_CLOCK, credentials=credentials)
        try:
            answer = await remoting.call(self.address, Command(code, fields=fields, body=body), 10_000)
            return answer.code, answer.remark
        finally:
            await remoting.close()


@asynccontextmanager
async def proxied(root, authentication):
    """A proxy with users before a broker that has users too, or none; anna may publish to T."""
    own = BrokerSettings(listen_port=0, bind_address="127.0.0.1", broker_name="broker-a")
    store = StoreSettings(commit_log_file_bytes=1 << 20)
    async with Standalone(root / "store", broker=own, store=store, authentication=authentication) as running:
        context = running.broker.context
        for name in ("T", "U"):
            context.topics.ensure(name, 1)
        await context.topics_published()
        settings = ProxySettings(
            namesrv_addr=running.namesrv_address, grpc_port=0, remoting_port=0, bind_address="127.0.0.1"
        )
        admin = RemotingClient(credentials=Credentials(access_key="admin", secret_key="secretsecret"))
        anna = UserInfo(username="anna", password="annasecret", user_type="Normal", user_status="enable")
        allowed = [AclEntry(resource="Topic:T", actions=["Pub"], decision="Allow")]
        acl = AclInfo(subject="User:anna", policies=[AclPolicy(policy_type="Custom", entries=allowed)])
        for code, fields, body in (
            (RequestCode.AUTH_CREATE_USER, {"username": "anna"}, anna),
            (RequestCode.AUTH_CREATE_ACL, {"subject": "User:anna"}, acl),
        ):
            command = Command(code, fields=fields, body=msgspec.json.encode(body))
            answer = await admin.call(running.broker_address, command, 10_000)
            assert answer.code == OK, answer.remark
        await admin.close()
        async with Proxy(settings, SETTINGS) as proxy:
            yield Asking(proxy.remoting_address)


@pytest.fixture(params=[True, False], ids=["users-at-both", "users-known-to-the-broker"])
async def ask(request, tmp_path):
    authentication = OF_BROKER
    if not request.param:
        authentication = msgspec.structs.replace(OF_BROKER, authorization_enabled=False)
    async with proxied(tmp_path, authentication) as asking:
        yield asking


async def test_who_signs_nothing_or_wrongly_is_sent_away(ask):
    assert await ask(None, ROUTE, topic="T") == (REFUSED, "username cannot be null.")
    assert await ask("nobody", ROUTE, topic="T") == (REFUSED, "User:nobody is not found.")
    assert await ask("admin", SEND, b="T", **SENT) == (REFUSED, "check signature failed.")


async def test_a_user_may_what_policies_say(ask):
    assert (await ask("anna", ROUTE, topic="T"))[0] == OK
    assert (await ask("anna", SEND, b"body", b="T", **SENT))[0] == OK
    none = "User:anna has no permission to access {} from 127.0.0.1, no matched policies."
    assert await ask("anna", ROUTE, topic="U") == (REFUSED, none.format("Topic:U"))
    assert await ask("anna", SEND, b"body", b="U", **SENT) == (REFUSED, none.format("Topic:U"))
    assert (await ask("anna", MAX, topic="T", queueId="0", bname="broker-a"))[0] == REFUSED
    consumer = ConsumerData(group_name="G", subscription_data_set=[SubscriptionData(topic="T")])
    beat = msgspec.json.encode(HeartbeatData(clientID="C", consumerDataSet=[consumer]))
    assert await ask("anna", RequestCode.HEART_BEAT, beat, x="y") == (REFUSED, none.format("Group:G"))


async def test_half_messages_of_others_stay_undecided(ask):
    """The topic of the stored half message decides, not the topic in the request."""
    half = {**SENT, "i": "TRAN_MSG\x01true\x02PGROUP\x01P\x02UNIQ_KEY\x01K\x02", "f": "4"}
    assert (await ask("inner", SEND, b"body", b="U", **half))[0] == OK
    end = {"producerGroup": "P", "commitOrRollback": "8", "commitLogOffset": "0", "tranStateTableOffset": "0"}
    for named in ({"bname": "broker-a"}, {}):
        code, remark = await ask("anna", RequestCode.END_TRANSACTION, topic="T", **named, **end)
        assert (code, "Topic:U" in remark) == (REFUSED, True)
