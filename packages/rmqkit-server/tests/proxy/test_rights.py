"""Signatures of gRPC calls and permissions of users, in a broker and in a proxy. Source: grpc.md §2.2, §2.3, §17."""

from __future__ import annotations

import asyncio
import hmac
from datetime import UTC, datetime

import pytest
from msgspec.structs import replace

from rmqkit.broker.settings import BrokerSettings
from rmqkit.protocol.schemas.access import AclEntry, AclPolicy, UserInfo
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.proxy.remote.users import ProxyUserSettings
from rmqkit.proxy.schema.messages import message_class
from rmqkit.proxy.service.endpoint import StreamFailed
from rmqkit.remoting.authentication import GRPC_WINDOW_MS, AuthenticationSettings
from rmqkit.standalone import Standalone
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
    grpc_window_ms=0,
)


USERS = ProxyUserSettings(
    authentication_enabled=True,
    authorization_enabled=True,
    inner_credentials=SETTINGS.inner_credentials,
    grpc_window_ms=0,
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
    """Wait until a change of users or policies takes effect: at once in the broker."""
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
    """Return the code of each call that needs a permission, by its name."""
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
OF_GROUP = {"Heartbeat", "NotifyClientTermination"}
CONSUMES = {
    "ReceiveMessage",
    "AckMessage",
    "ChangeInvisibleDuration",
    "ForwardMessageToDeadLetterQueue",
    "QueryAssignment",
    "consumer",
}


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


async def test_what_is_missing_is_not_reported_to_those_who_may_not_see_it(caller):
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


# ---------------------------------------------------------------- one user against another


def by(caller, name, client_id):
    """A client of a user whose secret is the name and ``secret``."""
    digest = hmac.digest(f"{name}secret".encode(), DATE.encode(), "sha1").hex()
    text = f"MQv2-HMAC-SHA1 Credential={name}, SignedHeaders=x-mq-date-time, Signature={digest}"
    return caller.other(client_id, **{"x-mq-date-time": DATE, "authorization": text})


@pytest.fixture
async def two(caller):
    """Bob with his topics, group and messages, and Mallory with hers."""
    for name, topics in (("bob", ("B", "BX", "BD", "Shared")), ("mallory", ("M", "MX", "MD", "Shared"))):
        kinds = (None, "TRANSACTION", "DELAY", "TRANSACTION")
        for topic, kind in zip(topics, kinds, strict=True):
            caller.topic(topic, message_type=kind)
        caller.context.access.create_user(name, UserInfo(password=f"{name}secret"))
        entries = [AclEntry(resource=f"Topic:{topic}", actions=["Pub", "Sub"], decision="Allow") for topic in topics]
        entries.append(AclEntry(resource=f"Group:G{name}", actions=["Sub"], decision="Allow"))
        caller.context.access.put_acl(f"User:{name}", [AclPolicy(policy_type="Custom", entries=entries)])
    await caller.published()
    bob, mallory = by(caller, "bob", "bob@1"), by(caller, "mallory", "mallory@1")
    bob.stream, _ = await bob.consumer("B", "Gbob")
    known = bob.endpoint.clients.find("bob@1")
    while known.group is None:
        await asyncio.sleep(0)
    yield bob, mallory  # noqa: PT022 - the plugin of this tree runs async fixtures that yield


def every_call(who, *, group, topic, handle="0 1 2 3 0 broker-a 0 0 0", transaction="x"):
    """Return a function for each call that names a group, a topic, a handle or a transaction, by the call's name."""
    names = {"group": {"name": group}, "topic": {"name": topic}}

    async def settings(**fields):
        stream = Stream(who)
        answer = await stream.ask(settings=fields)
        await stream.end()
        return answer

    subscribed = {"group": {"name": group}, "subscriptions": [{"topic": {"name": topic}}]}
    handed = {"receipt_handle": handle, "message_id": "ID1", "invisible_duration": {"seconds": 10}}
    return {
        "QueryRoute": lambda: who.ask("QueryRoute", topic={"name": topic}, endpoints=ADDRESSES),
        "QueryAssignment": lambda: who.ask("QueryAssignment", endpoints=ADDRESSES, **names),
        "SendMessage": lambda: who.send(topic=topic),
        "RecallMessage": lambda: who.ask("RecallMessage", topic={"name": topic}, recall_handle=handle),
        "EndTransaction": lambda: who.ask(
            "EndTransaction", topic={"name": topic}, transaction_id=transaction, message_id=transaction, resolution=1
        ),
        "ReceiveMessage": lambda: first_item(who, topic, group),
        "AckMessage": lambda: who.ack(handle, topic=topic, group=group),
        "ChangeInvisibleDuration": lambda: who.ask("ChangeInvisibleDuration", **names, **handed),
        "ForwardMessageToDeadLetterQueue": lambda: who.ask(
            "ForwardMessageToDeadLetterQueue", receipt_handle=handle, message_id="ID1", **names
        ),
        "Heartbeat": lambda: who.ask("Heartbeat", group={"name": group}, client_type=3),
        "NotifyClientTermination": lambda: who.ask("NotifyClientTermination", group={"name": group}),
        "settings of a producer": lambda: settings(client_type=1, publishing={"topics": [{"name": topic}]}),
        "settings of a consumer": lambda: settings(client_type=3, subscription=subscribed),
    }


async def first_item(who, topic, group):
    return (await who.items(topic=topic, group=group))[0]


CALLS = list(every_call(None, group="", topic=""))
OF_NO_TOPIC = {"Heartbeat", "NotifyClientTermination"}
OF_NO_GROUP = {
    "QueryRoute", "SendMessage", "RecallMessage", "EndTransaction", "settings of a producer",
}  # fmt: skip


@pytest.mark.parametrize("name", [*CALLS, "NotifyClientTermination without a group", "a stack trace", "a result"])
async def test_no_call_is_taken_under_the_client_id_of_another_user(two, name):
    bob, mallory = two
    liar = by(mallory, "mallory", "bob@1")
    known = bob.endpoint.clients.find("bob@1")
    stream, seen_ms, settings = known.stream, known.seen_ms, known.settings
    if name in CALLS:
        answer = await every_call(liar, group="Gmallory", topic="M")[name]()
    elif name.startswith("Notify"):
        answer = await liar.ask("NotifyClientTermination")
    else:
        asked = {"thread_stack_trace": {"nonce": "0"}} if "trace" in name else {"verify_message_result": {"nonce": "0"}}
        answer = await Stream(liar).ask(**asked)
    assert said(answer) == (UNAUTHORIZED, "client id bob@1 belongs to another user")
    assert (known.user, known.stream, known.settings, known.calls) == ("bob", stream, settings, 0)
    assert known.seen_ms == seen_ms and known.group == "Gbob"
    assert said(await bob.send(topic="B")) == (20000, "OK")


@pytest.mark.parametrize("name", [name for name in CALLS if name not in OF_NO_TOPIC])
async def test_no_call_reaches_the_topic_of_another_user(two, name):
    _, mallory = two
    answer = await every_call(mallory, group="Gmallory", topic="B")[name]()
    assert answer.status.code == UNAUTHORIZED
    assert "User:mallory has no permission to access Topic:B from" in answer.status.message


@pytest.mark.parametrize("name", [name for name in CALLS if name not in OF_NO_GROUP])
async def test_no_call_reaches_the_group_of_another_user(two, name):
    _, mallory = two
    answer = await every_call(mallory, group="Gbob", topic="M")[name]()
    assert answer.status.code == UNAUTHORIZED
    assert "User:mallory has no permission to access Group:Gbob from" in answer.status.message


async def test_a_client_that_leaves_needs_the_rights_on_its_own_group_and_topics(caller, two):
    bob, mallory = two
    producer = by(mallory, "mallory", "mallory@2")
    await producer.producer("M")
    client = producer.endpoint.clients.find("mallory@2")
    while not client.producers:
        await asyncio.sleep(0)
    revoked = [AclEntry(resource="Topic:M", actions=["Pub"], decision="Deny")]
    mallory.context.access.put_acl("User:mallory", [AclPolicy(policy_type="Custom", entries=revoked)])
    if caller.is_proxy:
        await asyncio.sleep(KEPT_SECONDS)
    answer = await producer.ask("NotifyClientTermination")
    assert answer.status.code == UNAUTHORIZED and "access Topic:M" in answer.status.message
    assert client.producers == {"M"}
    assert (await bob.ask("NotifyClientTermination", group={"name": "Gbob"})).status.code == 20000


HANDED = ["AckMessage", "ChangeInvisibleDuration", "ForwardMessageToDeadLetterQueue"]


@pytest.mark.parametrize("name", HANDED)
async def test_a_handle_of_another_user_changes_nothing(two, name):
    bob, mallory = two
    assert said(await bob.send(topic="B", message_id="ID1")) == (20000, "OK")
    popped = await bob.one(topic="B", group="Gbob", seconds=30, invisible_duration={"seconds": 60})
    handle = popped.system_properties.receipt_handle
    await every_call(mallory, group="Gmallory", topic="M", handle=handle)[name]()
    # Try to read the message again in the two places to which a forged handle could have moved it.
    for topic in ("M", "%RETRY%Gmallory_M", "%RETRY%Gmallory_B"):
        items = await mallory.items(topic=topic, group="Gmallory", seconds=5)
        assert not any(item.HasField("message") for item in items)
    assert said(await bob.ack(handle, topic="B", group="Gbob")) == (20000, "OK")


async def test_a_recall_handle_of_another_user_recalls_nothing(two):
    bob, mallory = two
    due = {"seconds": bob.context.clock.now_ms() // 1000 + 3600}
    sent = await bob.send(topic="BD", message_id="ID1", message_type=3, delivery_timestamp=due)
    handle = sent.entries[0].recall_handle
    assert handle
    answer = await mallory.ask("RecallMessage", topic={"name": "MD"}, recall_handle=handle)
    assert answer.status.code not in (20000, UNAUTHORIZED)
    assert (await bob.ask("RecallMessage", topic={"name": "BD"}, recall_handle=handle)).status.code == 20000


@pytest.mark.parametrize("topic", ["BX", "Shared"])
async def test_a_transaction_of_another_user_is_not_ended(two, topic):
    bob, mallory = two
    assert (await bob.send(topic=topic, message_id="TX1", message_type=4)).status.code == 20000
    own = "Shared" if topic == "Shared" else "MX"
    stolen = await every_call(mallory, group="Gmallory", topic=own, transaction="TX1")["EndTransaction"]()
    assert said(stolen) == (40008, "cannot found transaction data")
    other_client = by(bob, "bob", "bob@2")
    ended = await every_call(other_client, group="Gbob", topic=topic, transaction="TX1")["EndTransaction"]()
    assert said(ended) == (20000, "OK"), "another client of the same user may"


async def test_an_id_is_free_again_when_its_client_is_forgotten(two):
    bob, mallory = two
    endpoint = bob.endpoint
    await bob.stream.end()
    endpoint.clients.find("bob@1").seen_ms = -1e9
    endpoint.clients.drop_silent()
    assert endpoint.clients.find("bob@1") is None
    assert said(await by(mallory, "mallory", "bob@1").send(topic="M")) == (20000, "OK")


async def test_a_stream_without_accepted_settings_gets_nothing(two):
    bob, _ = two
    known = bob.endpoint.clients.find("bob@1")
    second = Stream(bob)
    second.send(thread_stack_trace={"nonce": "0"})
    for _ in range(20):
        await asyncio.sleep(0)
    assert known.stream is not None and second.received.empty()
    asking = asyncio.ensure_future(known.relay(message_class("TelemetryCommand")(), "n"))
    await bob.stream.received.get()
    second.send(thread_stack_trace={"nonce": "n"})
    for _ in range(20):
        await asyncio.sleep(0)
    assert not asking.done(), "only the client's stream answers"
    bob.stream.send(thread_stack_trace={"nonce": "n"})
    assert (await asking).thread_stack_trace.nonce == "n"
    refused = Stream(bob)
    refused.send(settings={"client_type": 99, "subscription": {"group": {"name": "Gbob"}}})
    with pytest.raises(StreamFailed):
        await refused.ended
    assert known.stream is not None
    await second.end()


# ---------------------------------------------------------------- how old a signature may be


def signed_at(caller, text):
    digest = hmac.digest(b"secretsecret", text.encode(), "sha1").hex()
    words = f"MQv2-HMAC-SHA1 Credential=admin, SignedHeaders=x-mq-date-time, Signature={digest}"
    return caller.other("dated", **{"x-mq-date-time": text, "authorization": words})


@pytest.fixture(params=["in the broker", "proxy"])
async def strict(tmp_path, request):
    settings, users = replace(SETTINGS, grpc_window_ms=GRPC_WINDOW_MS), replace(USERS, grpc_window_ms=GRPC_WINDOW_MS)
    async with served(tmp_path, authentication=settings, by_proxy=request.param == "proxy", users=users) as it:
        it.topic()
        await it.published()
        yield it


@pytest.mark.parametrize("form", ["%Y%m%dT%H%M%SZ", "%Y-%m-%dT%H:%M:%S.123456789Z", "%Y-%m-%dT%H:%M:%S+00:00"])
async def test_dates_of_all_sdks_are_taken_in_every_time_zone(strict, form):
    for hours in (0, -12, 14):  # most SDKs write local time as if it were UTC
        when = datetime.fromtimestamp(strict.context.clock.now_ms() / 1000 + hours * 3600, UTC)
        assert said(await signed_at(strict, when.strftime(form)).send()) == (20000, "OK")


@pytest.mark.parametrize("seconds", [-15 * 3600 - 5, 15 * 3600 + 5, -2 * 365 * 86_400])
async def test_a_captured_signature_is_good_for_a_day_alone(strict, seconds):
    when = datetime.fromtimestamp(strict.context.clock.now_ms() / 1000 + seconds, UTC)
    answer = await signed_at(strict, when.strftime("%Y%m%dT%H%M%SZ")).send()
    assert answer.status.code == UNAUTHORIZED
    assert "ms from now, and 54000000 are allowed." in answer.status.message


async def test_a_date_that_is_none_is_refused(strict):
    answer = await signed_at(strict, "some day").send()
    assert said(answer) == (UNAUTHORIZED, "datetime 'some day' is not like 20260131T235959Z.")


async def test_full_signatures_that_are_required_close_the_grpc_port(tmp_path, caplog):
    settings = replace(SETTINGS, full_signatures_only=True)
    own = BrokerSettings(listen_port=0, bind_address="127.0.0.1", grpc_port=0)
    async with Standalone(tmp_path, broker=own, authentication=settings) as servers:
        assert servers.broker.grpc_address == ""
    assert "the gRPC port 0 stays closed: fullSignatureRequired=true" in caplog.text


LITE_CALLS = {"Heartbeat", "Telemetry", "SyncLiteSubscription", "NotifyClientTermination"}


async def lite_calls(anna):
    """Return the calls of a lite consumer that are allowed. No request names the parent topic but the last."""
    names = {"group": {"name": "LG"}, "topic": {"name": "LT"}}
    stream = Stream(anna)
    told = {
        "Telemetry": await stream.ask(settings={"client_type": 5, "subscription": {"group": {"name": "LG"}}}),
        "Heartbeat": await anna.ask("Heartbeat", group={"name": "LG"}, client_type=5),
        "SyncLiteSubscription": await anna.ask("SyncLiteSubscription", action=2, **names),
    }
    await stream.end()
    told["NotifyClientTermination"] = await anna.ask("NotifyClientTermination", group={"name": "LG"})
    return {name for name, answer in told.items() if answer.status.code != UNAUTHORIZED}


@pytest.mark.parametrize(
    ("right", "allowed"),
    [
        (("Topic:LT", "Sub"), set()),
        (("Group:LG", "Sub"), {"NotifyClientTermination"}),
    ],
)
async def test_a_lite_consumer_needs_its_group_and_the_parent_topic_for_all_calls(caller, right, allowed):
    caller.topic("LT", 4, "LITE")
    config = SubscriptionGroupConfig(group_name="LG", attributes={"lite.bind.topic": "LT"})
    caller.context.groups.stored.subscription_group_table["LG"] = config
    await caller.published()
    anna = by_anna(caller)
    assert await lite_calls(anna) == set()
    await allow(caller, right)
    assert await lite_calls(anna) == allowed
    await allow(caller, ("Topic:LT", "Sub"), ("Group:LG", "Sub"))
    assert await lite_calls(anna) == LITE_CALLS
