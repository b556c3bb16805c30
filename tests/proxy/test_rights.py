"""Who signed a call of gRPC, and what they may do, in a broker and in front of it. Source: grpc.md §2.2, §2.3, §17."""

from __future__ import annotations

import asyncio
import hmac

import pytest

from rmqkit.protocol.schemas.access import AclEntry, AclPolicy, UserInfo
from rmqkit.proxy.users import ProxyUserSettings
from rmqkit.remoting.authentication import AuthenticationSettings
from tests.proxy.calling import ADDRESSES, Caller, Stream, served

UNAUTHORIZED = 40100
SECRET = "secretsecret"
DATE = "20261122T162000Z"
SIGNATURE = "d1b5f6584f5d48e3ce86a1278955a201decd81b0"
SETTINGS = AuthenticationSettings(
    enabled=True,
    authorization_enabled=True,
    initial_user='{"username":"admin","password":"secretsecret"}',
    inner_credentials='{"accessKey":"inner","secretKey":"innersecret"}',
)


USERS = ProxyUserSettings(
    authentication_enabled=True, authorization_enabled=True, inner_credentials=SETTINGS.inner_credentials
)
KEPT_SECONDS = 20.5


@pytest.fixture(params=["in the broker", "proxy"])
async def caller(tmp_path, request):
    by_proxy = request.param == "proxy"
    async with served(tmp_path, authentication=SETTINGS, by_proxy=by_proxy, users=USERS) as it:
        it.is_proxy = by_proxy
        it.topic()
        it.context.access.create_user("anna", UserInfo(password="annassecret"))
        await it.published()
        yield it


async def noticed(caller):
    """Wait until a change of users or policies holds: at once in the broker."""
    if caller.is_proxy:
        await asyncio.sleep(KEPT_SECONDS)


def signed(caller, name="admin", signature=SIGNATURE, text=None):
    text = (
        f"MQv2-HMAC-SHA1 Credential={name}, SignedHeaders=x-mq-date-time, Signature={signature}"
        if text is None
        else text
    )
    return Caller(caller.endpoint, caller.context, **{"x-mq-date-time": DATE, "authorization": text})


def by_anna(caller):
    return signed(caller, "anna", hmac.digest(b"annassecret", DATE.encode(), "sha1").hex())


async def allow(caller, *entries):
    policies = [AclEntry(resource=name, actions=actions.split(","), decision="Allow") for name, actions in entries]
    caller.context.access.put_acl("User:anna", [AclPolicy(policy_type="Custom", entries=policies)])
    await noticed(caller)


def said(answer):
    return answer.status.code, answer.status.message


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("admin", SIGNATURE),
        ("admin", SIGNATURE.upper()),
        ("admin//Rocketmq", SIGNATURE),
        ("admin/region/service", SIGNATURE.upper()),
    ],
)
async def test_signatures_of_all_sdks_are_taken(caller, name, signature):
    assert said(await signed(caller, name, signature).send()) == (20000, "OK")


@pytest.mark.parametrize(
    ("text", "remark"),
    [
        ("", "username cannot be null."),
        ("Credential=admin,Signature=00", "authentication header is incorrect."),
        ("MQv2-HMAC-SHA1 Credential", "authentication keyValues length is incorrect, actual length=1."),
        ("MQv2-HMAC-SHA1 Credential=admin, Signature=no hex", "create authentication context error."),
        ("MQv2-HMAC-SHA1 Credential=, Signature=00", "username cannot be null."),
        ("MQv2-HMAC-SHA1 Credential=nobody, Signature=00", "User:nobody is not found."),
        ("MQv2-HMAC-SHA1 Credential=admin, Signature=00", "check signature failed."),
        ("MQv2-HMAC-SHA1 Credential=admin, Signature=", "check signature failed."),
    ],
)
async def test_others_are_refused_by_every_call(caller, text, remark):
    stranger = signed(caller, text=text)
    assert said(await stranger.send()) == (UNAUTHORIZED, remark)
    assert said((await stranger.items())[0]) == (UNAUTHORIZED, remark)
    stream = Stream(stranger)
    assert said(await stream.ask(settings={})) == (UNAUTHORIZED, remark)
    await stream.ended


async def test_a_call_without_a_signature_or_a_date_and_one_of_a_disabled_user(caller):
    assert said(await caller.send()) == (UNAUTHORIZED, "username cannot be null.")
    dateless = signed(caller)
    del dateless.metadata["x-mq-date-time"]
    assert said(await dateless.send()) == (UNAUTHORIZED, "datetime is null.")
    caller.context.access.update_user("anna", UserInfo(user_status="disable"))
    await noticed(caller)
    assert said(await by_anna(caller).send()) == (UNAUTHORIZED, "User:anna is disabled.")


async def calls(anna):
    """The code of each call that needs a right, by its name."""
    names = {"group": {"name": "G"}, "topic": {"name": "T"}}
    handle = "0 1 2 3 0 b 2 5 6"
    told = {
        "QueryRoute": await anna.ask("QueryRoute", topic={"name": "T"}, endpoints=ADDRESSES),
        "SendMessage": await anna.send(),
        "RecallMessage": await anna.ask("RecallMessage", topic={"name": "T"}, recall_handle="x"),
        "EndTransaction": await anna.ask("EndTransaction", topic={"name": "T"}, transaction_id="x"),
        "ReceiveMessage": (await anna.items())[0],
        "AckMessage": await anna.ack(handle),
        "ChangeInvisibleDuration": await anna.change(handle, 10),
        "ForwardMessageToDeadLetterQueue": await anna.ask("ForwardMessageToDeadLetterQueue", **names),
        "QueryAssignment": await anna.ask("QueryAssignment", endpoints=ADDRESSES, **names),
        "Heartbeat": await anna.ask("Heartbeat", group={"name": "G"}, client_type=3),
        "NotifyClientTermination": await anna.ask("NotifyClientTermination", group={"name": "G"}),
    }
    for name, settings in (
        ("producer", {"client_type": 1, "publishing": {"topics": [{"name": "T"}]}}),
        (
            "consumer",
            {"client_type": 3, "subscription": {"group": {"name": "G"}, "subscriptions": [{"topic": {"name": "T"}}]}},
        ),
    ):
        stream = Stream(anna)
        told[name] = await stream.ask(settings=settings)
        await stream.end()
    return {name for name, answer in told.items() if answer.status.code != UNAUTHORIZED}


PRODUCES = {"SendMessage", "RecallMessage", "EndTransaction", "producer"}
OF_GROUP = {"ChangeInvisibleDuration", "Heartbeat", "NotifyClientTermination"}
CONSUMES = {"ReceiveMessage", "AckMessage", "ForwardMessageToDeadLetterQueue", "QueryAssignment", "consumer"}


async def test_a_user_may_do_what_policies_allow_and_nothing_else(caller):
    anna = by_anna(caller)
    told = await anna.send()
    assert told.status.code == UNAUTHORIZED
    assert "User:anna has no permission to access Topic:T from 10.0.0.7" in told.status.message
    assert await calls(anna) == set()
    await allow(caller, ("Topic:T", "Pub"))
    assert await calls(anna) == {"QueryRoute", *PRODUCES}


async def test_a_consumer_needs_its_group_and_its_topic(caller):
    anna = by_anna(caller)
    await allow(caller, ("Topic:T", "Sub"))
    assert await calls(anna) == {"QueryRoute"}
    await allow(caller, ("Topic:T", "Sub"), ("Group:G", "Sub"))
    assert await calls(anna) == {"QueryRoute", *OF_GROUP, *CONSUMES}


async def test_what_is_missing_is_not_told_to_those_who_may_not_see_it(caller):
    hidden = await by_anna(caller).ask("QueryRoute", topic={"name": "X"}, endpoints=ADDRESSES)
    assert hidden.status.code == UNAUTHORIZED
    assert (await signed(caller).ask("QueryRoute", topic={"name": "X"}, endpoints=ADDRESSES)).status.code == 40402


async def test_a_call_about_nothing_is_refused_whoever_signs(caller):
    for anyone in (signed(caller), by_anna(caller)):
        assert said(await anyone.send(topic="")) == (UNAUTHORIZED, "topic is null.")
        assert said(await anyone.ask("SendMessage")) == (UNAUTHORIZED, "message is null.")
        assert said(await anyone.change("x", 10, group=" ")) == (UNAUTHORIZED, "group is null.")


async def test_brokers_own_user_may_everything(caller):
    inner = signed(caller, "inner", hmac.digest(b"innersecret", DATE.encode(), "sha1").hex())
    assert said(await inner.send()) == (20000, "OK")
