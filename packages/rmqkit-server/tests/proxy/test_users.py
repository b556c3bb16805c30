"""Users in a proxy: cached data, and the brokers that provide it. Source: grpc.md §2.3, §11."""

from __future__ import annotations

import asyncio
import hmac

import msgspec
import pytest

from rmqkit.broker.server import Broker
from rmqkit.broker.settings import BrokerSettings
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.errors import PeerRefused, RequestTimedOut, SettingsError
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.schemas.access import AclEntry, AclInfo, AclPolicy, UserInfo
from rmqkit.proxy.remote.users import ProxyUserSettings, Users
from rmqkit.proxy.schema.status import Refused
from rmqkit.remoting.authentication import AuthenticationSettings, Credentials
from rmqkit.standalone import Standalone
from rmqkit.store.settings import StoreSettings
from tests.proxy.calling import ADDRESSES, Caller, Stream, endpoint_before

DATE = "20261122T162000Z"
INNER = Credentials(access_key="inner", secret_key="innersecret")
INNER_TEXT = '{"accessKey":"inner","secretKey":"innersecret"}'
SETTINGS = ProxyUserSettings(
    authentication_enabled=True, authorization_enabled=True, inner_credentials=INNER_TEXT, grpc_window_ms=0
)
OF_BROKER = AuthenticationSettings(
    enabled=True,
    authorization_enabled=True,
    initial_user='{"username":"admin","password":"secretsecret"}',
    inner_credentials=INNER_TEXT,
)
PUB = frozenset(["Pub"])


def metadata(user="anna", secret="annassecret"):
    signature = hmac.digest(secret.encode(), DATE.encode(), "sha1").hex()
    text = f"MQv2-HMAC-SHA1 Credential={user}, SignedHeaders=x-mq-date-time, Signature={signature}"
    return {"x-mq-date-time": DATE, "authorization": text}


class Told:
    """A broker that knows a user. ``asked``: the codes of the requests."""

    def __init__(self):
        self.asked = []
        self.failure = None
        self.user = UserInfo(username="anna", password="annassecret", user_type="Normal", user_status="enable")
        self.entries = [AclEntry(resource="Topic:T", actions=["Pub"], decision="Allow")]

    async def __call__(self, code, header):
        self.asked.append(code)
        await asyncio.sleep(0.01)
        if self.failure is not None:
            raise self.failure
        if code == RequestCode.AUTH_GET_USER:
            return msgspec.json.encode(self.user) if self.user and header.username == "anna" else b""
        acl = AclInfo(subject=header.subject, policies=[AclPolicy(policy_type="Custom", entries=self.entries)])
        return msgspec.json.encode(acl) if self.entries else b""


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def users(told):
    return Users(SETTINGS, INNER, told, SYSTEM_CLOCK)


async def may_publish(users, topic="T"):
    user = await users.signer(metadata())
    await users.check(user, [(f"Topic:{topic}", PUB)], ["10.0.0.7"])


async def test_calls_at_once_ask_once_and_later_ones_not_for_a_while(users, told):
    await asyncio.gather(*(may_publish(users) for _ in range(20)))
    await may_publish(users)
    assert told.asked == [RequestCode.AUTH_GET_USER, RequestCode.AUTH_GET_ACL]
    await asyncio.sleep(20.1)
    await may_publish(users)
    assert len(told.asked) == 4


async def test_a_user_that_was_disabled_is_out_after_20_seconds(users, told):
    await may_publish(users)
    told.user.user_status = "disable"
    await asyncio.sleep(19)
    await may_publish(users)
    await asyncio.sleep(1.1)
    with pytest.raises(Refused, match=r"User:anna is disabled\."):
        await may_publish(users)


async def test_who_is_new_is_in_after_a_second(users, told):
    anna, told.user = told.user, None
    with pytest.raises(Refused, match=r"User:anna is not found\."):
        await may_publish(users)
    entries, told.entries, told.user = told.entries, [], anna
    await asyncio.sleep(1.1)
    with pytest.raises(Refused, match=r"User:anna has no permission to access Topic:T from 10\.0\.0\.7, no matched"):
        await may_publish(users)
    told.entries = entries
    await asyncio.sleep(1.1)
    await may_publish(users)


async def test_what_is_known_is_used_for_300_seconds_while_no_broker_answers(users, told):
    await may_publish(users)
    told.failure = RequestTimedOut("10.0.0.1:10911", RequestCode.AUTH_GET_USER, 2000)
    await asyncio.sleep(299)
    await may_publish(users)
    with pytest.raises(Refused, match="the proxy cannot ask for user bert"):
        await users.signer(metadata("bert"))
    await asyncio.sleep(2)
    with pytest.raises(Refused, match="the proxy cannot ask for user anna") as caught:
        await may_publish(users)
    assert caught.value.code == 50400


async def test_a_super_user_needs_no_policy_and_brokers_own_user_no_broker(users, told):
    told.user.user_type, told.entries = "Super", []
    await may_publish(users)
    assert told.asked == [RequestCode.AUTH_GET_USER]
    user = await users.signer(metadata("inner", "innersecret"))
    await users.check(user, [("Topic:T", PUB)], ["10.0.0.7"])
    assert len(told.asked) == 1
    with pytest.raises(Refused, match=r"check signature failed\."):
        await users.signer(metadata("inner", "guessed"))


async def test_without_authentication_nobody_is_asked(told):
    users = Users(ProxyUserSettings(), None, told, SYSTEM_CLOCK)
    assert await users.signer({}) is None
    assert (users.has_policies, told.asked) == (False, [])


def test_policies_for_nobody_knows_whom_are_refused(told):
    with pytest.raises(SettingsError, match="authorizationEnabled=true needs authenticationEnabled=true"):
        Users(ProxyUserSettings(authorization_enabled=True), None, told, SYSTEM_CLOCK)


# ---------------------------------------------------------------- with brokers


def servers(root, **settings):
    own = BrokerSettings(listen_port=0, bind_address="127.0.0.1", **settings)
    store = StoreSettings(commit_log_file_bytes=1 << 20)
    return Standalone(root / "store", broker=own, store=store, authentication=OF_BROKER)


def client(endpoint, broker, *user):
    return Caller(endpoint, broker.context, **metadata(*(user or ("admin", "secretsecret"))))


@pytest.mark.parametrize(
    ("inner", "remark"),
    [
        ("", "the proxy cannot ask for user admin: username cannot be null."),
        ('{"accessKey":"inner","secretKey":"guessed"}', "the proxy cannot ask for user admin: check signature failed."),
    ],
)
async def test_brokers_that_do_not_know_the_proxy_are_named(tmp_path, inner, remark):
    settings = ProxyUserSettings(authentication_enabled=True, inner_credentials=inner)
    async with servers(tmp_path) as running, endpoint_before(running, settings) as endpoint:
        anyone = client(endpoint, running.broker)
        answer = await anyone.send()
        assert (answer.status.code, answer.status.message) == (50001, remark)
        stream = Stream(anyone)
        stream.send(settings={})
        with pytest.raises(Exception, match="the proxy cannot ask for user admin"):
            await stream.ended


async def test_a_proxy_that_lets_everybody_in_signs_all_the_same(tmp_path):
    settings = ProxyUserSettings(inner_credentials=INNER_TEXT)
    async with servers(tmp_path) as running, endpoint_before(running, settings) as endpoint:
        caller = Caller(endpoint, running.broker.context)
        caller.topic()
        await caller.published()
        assert (await caller.send()).status.code == 20000
        found = await caller.one()
        assert (await caller.ack(found.system_properties.receipt_handle)).status.code == 20000


async def test_the_next_master_is_asked_when_one_is_gone(tmp_path):
    async with servers(tmp_path, broker_name="broker-b") as running, endpoint_before(running, SETTINGS) as endpoint:
        first = await second_broker(tmp_path, running, broker_name="broker-a")
        assert await route_code(client(endpoint, running.broker)) == 40402
        await first.stop()
        answer = await client(endpoint, running.broker, "nobody", "x").send()
        assert answer.status.message == "User:nobody is not found."


async def route_code(caller):
    """Return the answer code of a call that the user may make. The topic does not exist."""
    return (await caller.ask("QueryRoute", topic={"name": "X"}, endpoints=ADDRESSES)).status.code


async def test_of_two_clusters_one_has_to_be_named(tmp_path):
    async with servers(tmp_path) as running:
        second = await second_broker(tmp_path, running, broker_name="other", cluster_name="Other")
        async with endpoint_before(running, SETTINGS) as endpoint:
            answer = await client(endpoint, running.broker).send()
            wanted = "clusters DefaultCluster, Other have users: set rocketMQClusterName at the proxy"
            assert (answer.status.code, answer.status.message) == (
                50001,
                f"the proxy cannot ask for user admin: {wanted}",
            )
        for cluster, code in (("DefaultCluster", 40402), ("Other", 40402), ("Third", 50001)):
            settings = msgspec.structs.replace(SETTINGS, cluster=cluster)
            async with endpoint_before(running, settings) as endpoint:
                assert await route_code(client(endpoint, running.broker)) == code, cluster
        await second.stop()


async def second_broker(root, running, **settings):
    own = BrokerSettings(listen_port=0, bind_address="127.0.0.1", namesrv_addr=running.namesrv_address, **settings)
    store = StoreSettings(commit_log_file_bytes=1 << 20)
    broker = Broker(own, store, root / "second", authentication=OF_BROKER)
    await broker.start()
    return broker


async def test_a_refusal_of_the_first_master_is_not_passed_over(users, told):
    told.failure = PeerRefused(16, "no", "10.0.0.1:10911")
    with pytest.raises(Refused, match="the proxy cannot ask for user anna: no"):
        await may_publish(users)
