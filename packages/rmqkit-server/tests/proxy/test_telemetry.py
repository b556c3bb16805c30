"""Settings, signs of life, transactions, renewals and questions to clients. Source: grpc.md §5.3, §5.12, §7 to §10."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref

import msgspec
import pytest

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command, request
from rmqkit.protocol.ids import offset_id
from rmqkit.protocol.schemas.clients import ConsumeDirectlyRequest, ConsumerGroupRequest, RunningInfoRequest
from rmqkit.protocol.schemas.groups import ExponentialRetryPolicy, GroupRetryPolicy
from rmqkit.proxy.schema.messages import message_class
from rmqkit.proxy.service import sending
from rmqkit.proxy.service.clients import CLIENT_SILENT_MS_MAX
from rmqkit.proxy.service.endpoint import StreamFailed
from rmqkit.remoting.client import RemotingClient
from tests.proxy.calling import Caller, Stream, served
from tests.waiting import until

OK, NOT_FOUND = 20000, 40401
PUSH, SIMPLE = 2, 3


SETTINGS = {"transaction_timeout_ms": 1000, "transaction_check_interval_ms": 5000}


@pytest.fixture(params=["broker", "proxy"])
async def caller(tmp_path, request):
    """A client of an endpoint in the broker, and of one in front of it."""
    async with served(tmp_path, by_proxy=request.param == "proxy", **SETTINGS) as it:
        it.topic()
        yield it


@pytest.fixture
async def inside(tmp_path):
    """A client of an endpoint in the broker, which knows it."""
    async with served(tmp_path, **SETTINGS) as it:
        it.topic()
        yield it


def said(answer):
    return answer.status.code, answer.status.message


def members(caller, group="G"):
    found = caller.context.clients.consumers(group)
    return [] if found is None else [member.client_id for member in found.members.values()]


# ---- settings


async def test_a_producers_settings_come_back_with_what_the_server_decides(inside):
    stream, told = await inside.producer("T")
    policy = told.backoff_policy
    assert (told.client_type, policy.max_attempts) == (1, 3)
    backoff = policy.exponential_backoff
    assert (backoff.initial.nanos, backoff.max.seconds, backoff.multiplier) == (10_000_000, 1, 2.0)
    assert (told.publishing.max_body_size, told.publishing.validate_message_type) == (4194304, True)
    assert [topic.name for topic in told.publishing.topics] == ["T"]
    assert told.HasField("metric")
    assert not told.metric.on
    await until(lambda: inside.context.clients.producers("T"), "the producer in the table")
    (member,) = inside.context.clients.producers("T").values()
    assert (member.client_id, member.language) == ("c1", "GO")
    await stream.end()


async def test_a_consumers_settings_are_the_groups(inside):
    stream, told = await inside.consumer()
    wanted, policy = told.subscription, told.backoff_policy
    assert (wanted.fifo, wanted.receive_batch_size, wanted.long_polling_timeout.seconds) == (False, 32, 20)
    assert wanted.HasField("fifo")
    assert (policy.max_attempts, [step.seconds for step in policy.customized_backoff.next][:5]) == (
        17,
        [1, 5, 10, 30, 60],
    )
    await until(lambda: members(inside), "the consumer in the table")
    group = inside.context.clients.consumers("G")
    assert (group.consume_type, group.message_model) == ("CONSUME_ACTIVELY", "CLUSTERING")
    assert group.subscriptions["T"].data.sub_string == "*"
    config = inside.context.groups.get("G")
    config.retry_max_times = 4
    config.group_retry_policy = GroupRetryPolicy("EXPONENTIAL", ExponentialRetryPolicy(1000, 9000, 3))
    stream.send(settings=told)
    told = (await stream.received.get()).settings
    backoff = told.backoff_policy.exponential_backoff
    assert (told.backoff_policy.max_attempts, backoff.initial.seconds, backoff.max.seconds, backoff.multiplier) == (
        *(5, 1, 9),
        3.0,
    )
    await stream.end()


@pytest.mark.parametrize("language", ["", "xyz", "Java", "GOLANG"])
async def test_any_language_and_version_is_taken(inside, language):
    inside.metadata |= {"x-mq-language": language, "x-mq-client-version": "5.x-odd"}
    stream, _ = await inside.consumer()
    await until(lambda: members(inside), "the consumer in the table")
    (member,) = inside.context.clients.consumers("G").members.values()
    assert (member.language, member.version) == ("OTHER", 493)
    await stream.end()


async def test_settings_are_answered_at_once_and_each_time(caller):
    loop = asyncio.get_running_loop()
    began = loop.time()
    stream, told = await caller.consumer(group="New")
    for _ in range(3):
        assert (await stream.ask(settings=told)).status.code == OK
    assert loop.time() - began < 0.1
    assert told.HasField("metric")
    assert told.backoff_policy.WhichOneof("strategy") == "customized_backoff"
    assert (told.subscription.receive_batch_size, told.subscription.long_polling_timeout.seconds) == (32, 20)
    await stream.end()


SUBSCRIPTION = {"group": {"name": "G"}, "subscriptions": []}


@pytest.mark.parametrize(
    ("settings", "text", "is_argument"),
    [
        ({}, "there is no publishing or subscription data in settings", True),
        ({"publishing": {"topics": [{"name": "a b"}]}}, "contains illegal characters", True),
        ({"client_type": PUSH, "subscription": {"group": {"name": ""}}}, "the specified group is blank", True),
        ({"client_type": 4, "subscription": SUBSCRIPTION}, "Client type is not consumer, type: PULL_CONSUMER", False),
        ({"client_type": 99, "subscription": SUBSCRIPTION}, "Client type is not consumer, type: 99", False),
        (
            {"client_type": 5, "subscription": SUBSCRIPTION},
            "regular group cannot use LITE mode: G",
            True,
        ),
        (
            {"client_type": 6, "subscription": SUBSCRIPTION},
            "regular group cannot use LITE mode: G",
            True,
        ),
        (
            {
                "client_type": PUSH,
                "subscription": {
                    "group": {"name": "G"},
                    "subscriptions": [{"topic": {"name": "T"}, "expression": {"type": 2, "expression": " "}}],
                },
            },
            "expression format is not correct",
            True,
        ),
        ({"publishing": {"topics": [{"name": "T"}] * 1001}}, "settings with more than 1000 topics", True),
        ({"publishing": {"topics": [{"name": "t" * 70_000}]}}, "65536 are read", True),
    ],
)
async def test_settings_that_cannot_be_end_the_stream(caller, settings, text, is_argument):
    stream = Stream(caller)
    stream.send(settings=settings)
    with pytest.raises(StreamFailed) as caught:
        await stream.ended
    assert str(caught.value).startswith("process client telemetryCommand failed. ")
    assert text in str(caught.value)
    assert caught.value.is_argument is is_argument


KEYS = "client property {!r}: a key has 1 to 64 characters [a-zA-Z][a-zA-Z0-9_.-]*"


@pytest.mark.parametrize(
    ("properties", "fault"),
    [
        ({f"k{number}": "" for number in range(32)}, None),
        ({f"k{number}": "" for number in range(33)}, "33 client properties: at most 32 are accepted"),
        ({"k" * 64: "é" * 256, "rocketmq.a-b_c.1": "x"}, None),
        ({"k" * 65: ""}, KEYS.format("k" * 64)),
        ({"": "x"}, KEYS.format("")),
        ({"1a": "x"}, KEYS.format("1a")),
        ({"a b": "x"}, KEYS.format("a b")),
        ({"a\n": "x"}, KEYS.format("a\n")),
        ({"k": "v" * 257}, "client property k: 257 characters, at most 256 are accepted"),
        (
            {f"k{number}": "é" * 250 for number in range(9)},
            "client properties of 4590 bytes: at most 4096 are accepted",
        ),
    ],
)
async def test_client_properties_have_bounds(inside, properties, fault):
    stream = Stream(inside)
    settings = {"client_type": PUSH, "subscription": SUBSCRIPTION, "client_properties": properties}
    told = await stream.ask(settings=settings)
    if fault is None:
        assert dict(told.settings.client_properties) == properties
        await stream.end()
    else:
        assert (told.status.code, told.status.message) == (40021, fault)
        await stream.ended
        assert members(inside) == []


async def test_ten_thousand_settings_in_a_row_are_one_client(inside):
    stream, told = await inside.consumer()
    for _ in range(100):
        for _ in range(100):
            stream.send(settings=told)
        for _ in range(100):
            await stream.received.get()
    assert len(inside.endpoint.clients) == 1
    await stream.end()
    assert members(inside) == ["c1"]


async def test_an_empty_command_is_ignored(caller):
    stream = Stream(caller)
    stream.send()
    stream.send(verify_message_result={"nonce": "7"})
    stream.send(thread_stack_trace={"nonce": "7", "thread_stack_trace": "x"})
    await stream.end()
    assert stream.received.empty()


async def test_a_stream_on_which_nothing_comes_is_ended_and_one_with_settings_is_not(caller):
    silent, (busy, _) = Stream(caller.other("silent")), await caller.consumer()
    await asyncio.sleep(119)
    assert not silent.ended.done()
    await asyncio.sleep(2)
    await silent.ended
    assert caller.endpoint.clients.find("silent") is None, "nothing was registered"
    await asyncio.sleep(130)
    assert not busy.ended.done()
    # A laptop after its sleep: it sends nothing on its stream, which is still open.
    assert said(await caller.ask("Heartbeat", group={"name": "G"}, client_type=SIMPLE)) == (OK, "OK")
    caller.endpoint.clients.find("c1").stream.send(message_class("TelemetryCommand")())
    await busy.received.get()
    await busy.end()


# ---- signs of life


async def test_a_heartbeat_without_settings_registers_a_consumer(inside):
    answer = await inside.ask("Heartbeat", group={"name": "G"}, client_type=SIMPLE)
    assert said(answer) == (OK, "OK")
    assert members(inside) == ["c1"]
    unknown = await inside.other("p").ask("Heartbeat", client_type=1)
    assert said(unknown) == (40015, "cannot find client settings for this client")
    assert (await inside.ask("Heartbeat", group={"name": "a b"}, client_type=SIMPLE)).status.code == 40003


async def test_a_client_that_leaves_is_gone(inside):
    stream, _ = await inside.consumer()
    await until(lambda: members(inside), "the consumer in the table")
    assert said(await inside.ask("NotifyClientTermination", group={"name": "G"})) == (OK, "OK")
    assert members(inside) == []
    assert said(await inside.other("never seen").ask("NotifyClientTermination")) == (OK, "OK")
    stream.send(settings={"client_type": SIMPLE, "subscription": SUBSCRIPTION})
    await stream.received.get()  # the stream stayed open
    await stream.end()


async def test_a_client_without_a_stream_stays_until_it_is_silent(inside):
    stream, _ = await inside.consumer()
    await until(lambda: members(inside), "the consumer in the table")
    await stream.end()
    await asyncio.sleep(60)
    assert said(await inside.ask("Heartbeat", group={"name": "G"}, client_type=SIMPLE)) == (OK, "OK")
    await asyncio.sleep(100)
    assert members(inside) == ["c1"]
    await asyncio.sleep(CLIENT_SILENT_MS_MAX / 1000)
    assert members(inside) == []
    assert len(inside.endpoint.clients) == 0


async def test_what_is_forgotten_is_freed_at_once(inside):
    """Servers rarely collect reference cycles: thousands of former clients would stay in memory."""
    stream, _ = await inside.consumer()
    await until(lambda: members(inside), "the consumer in the table")
    client = inside.endpoint.clients.find("c1")
    gone, peer_gone = weakref.ref(client), weakref.ref(client.peer)
    del client
    await stream.end()
    gc.disable()
    try:
        await asyncio.sleep(3 * CLIENT_SILENT_MS_MAX / 1000)
        assert len(inside.endpoint.clients) == 0
        assert (gone(), peer_gone()) == (None, None)
    finally:
        gc.enable()


async def test_two_processes_with_one_id_are_one_client(inside):
    first, _ = await inside.consumer()
    second, _ = await inside.consumer()
    await until(lambda: members(inside), "the consumer in the table")
    assert members(inside) == ["c1"]
    inside.endpoint.clients.find("c1").stream.send(message_class("TelemetryCommand")())
    await second.received.get()  # the newest
    assert first.received.empty()
    await first.end()
    assert inside.endpoint.clients.find("c1").stream is not None
    await second.end()


# ---- transactions


async def half(caller, message_id="ID1"):
    caller.topic("TX", message_type="TRANSACTION")
    answer = await caller.send("TX", message_id=message_id, message_type=4, properties={"a": "b"})
    assert said(answer) == (OK, "OK")
    return answer.entries[0].transaction_id


async def end(caller, transaction_id, resolution=1, topic="TX", source=1):
    return await caller.ask(
        "EndTransaction",
        topic={"name": topic},
        message_id=transaction_id,
        transaction_id=transaction_id,
        resolution=resolution,
        source=source,
    )


async def test_a_committed_message_is_delivered_once(caller):
    transaction_id = await half(caller)
    assert (await caller.receive(topic="TX"))[0].code == NOT_FOUND
    assert said(await end(caller, transaction_id)) == (OK, "OK")
    assert said(await end(caller, transaction_id)) == (OK, "OK"), "the same end again"
    assert (await end(caller, transaction_id, resolution=2)).status.code == 40008, "another end"
    found = await caller.one(topic="TX")
    assert (found.system_properties.message_type, found.user_properties["__transactionId__"]) == (4, "ID1")
    assert (await caller.receive(topic="TX", invisible=600))[0].code == NOT_FOUND


async def test_a_rolled_back_message_is_not(caller):
    transaction_id = await half(caller)
    assert said(await end(caller, transaction_id, resolution=2)) == (OK, "OK")
    assert (await caller.receive(topic="TX", long_polling_timeout={"seconds": 20}))[0].code == NOT_FOUND


async def test_ends_of_nothing(caller):
    transaction_id = await half(caller)
    assert said(await end(caller, " ")) == (40008, "transaction id cannot be empty")
    assert said(await end(caller, "nobody's")) == (40008, "cannot found transaction data")
    assert (await end(caller, transaction_id, topic="T")).status.code == 40008
    assert said(await end(caller, transaction_id, resolution=0)) == (OK, "OK"), "not known yet"
    assert said(await end(caller, transaction_id)) == (OK, "OK")


@pytest.mark.parametrize("message_type", ["TRANSACTION", "MIXED"])
async def test_a_producer_is_asked_about_what_it_forgot(caller, message_type):
    await half(caller)
    caller.context.topics.get("TX").attributes = {"message.type": message_type}
    stream, _ = await caller.producer("TX")
    told = await stream.received.get()
    asked = told.recover_orphaned_transaction_command
    system = asked.message.system_properties
    assert (asked.transaction_id, system.message_id, asked.message.body) == ("ID1", "ID1", b"hello")
    assert (asked.message.topic.name, system.message_type, system.queue_id) == ("TX", 4, 0)
    assert not system.HasField("receipt_handle")
    assert asked.message.user_properties["TRANSACTION_CHECK_TIMES"] == "1"
    assert said(await end(caller, "ID1", source=2)) == (OK, "OK")
    assert (await caller.one(topic="TX")).body == b"hello"
    await stream.end()


async def test_transactions_that_were_ended_are_forgotten(caller):
    transaction_id = await half(caller)
    kept = caller.endpoint.sending
    assert said(await end(caller, transaction_id)) == (OK, "OK")
    assert said(await end(caller, transaction_id)) == (OK, "OK"), "a moment later it is known"
    await asyncio.sleep(90)
    assert kept.transaction_counts == (0, 0)
    assert said(await end(caller, transaction_id)) == (40008, "cannot found transaction data")


async def test_transactions_that_nobody_ended_are_forgotten_much_later(inside, monkeypatch):
    assert sending._OPEN_MS_MAX > 2 * 3_600_000 - 1, "a producer may request the check after an hour"
    monkeypatch.setattr(sending, "_OPEN_MS_MAX", 100_000.0)
    await half(inside)
    await asyncio.sleep(90)
    assert inside.endpoint.sending.transaction_counts == (1, 0)
    await asyncio.sleep(30)
    assert inside.endpoint.sending.transaction_counts == (0, 0)


async def test_a_transaction_has_no_delivery_time(caller):
    caller.topic("TX", message_type="TRANSACTION")
    answer = await caller.send("TX", message_type=4, delivery_timestamp={"seconds": 1})
    assert answer.status.code == 40014


# ---- delays


async def test_a_delayed_message_comes_when_it_is_due_and_can_be_recalled(caller):
    caller.topic("D", message_type="DELAY")
    now = caller.context.clock.now_ms() // 1000
    due = {"seconds": now + 30}
    kept = (await caller.send("D", message_id="kept", delivery_timestamp=due)).entries[0]
    recalled = (await caller.send("D", message_id="recalled", delivery_timestamp=due)).entries[0]
    assert kept.recall_handle
    ask = {"topic": {"name": "D"}, "recall_handle": recalled.recall_handle}
    answer = await caller.ask("RecallMessage", **ask)
    assert (said(answer), answer.message_id) == ((OK, "OK"), "recalled")
    assert said(await caller.ask("RecallMessage", **ask)) == (OK, "OK"), "again"
    assert (await caller.receive(topic="D"))[0].code == NOT_FOUND
    await asyncio.sleep(20)
    found = await caller.one(topic="D")
    assert (found.system_properties.message_id, found.system_properties.message_type) == ("kept", 3)
    assert found.system_properties.delivery_timestamp.seconds == now + 30
    assert (await caller.receive(topic="D", invisible=600))[0].code == NOT_FOUND


async def test_what_was_delivered_is_not_recalled(caller):
    caller.topic("D", message_type="DELAY")
    due = {"seconds": caller.context.clock.now_ms() // 1000 + 10}
    handle = (await caller.send("D", delivery_timestamp=due)).entries[0].recall_handle
    assert (await caller.one(topic="D", long_polling_timeout={"seconds": 20})).body == b"hello"
    answer = await caller.ask("RecallMessage", topic={"name": "D"}, recall_handle=handle)
    assert said(answer) == (50001, "recall failed, timestamp invalid")


async def test_a_time_that_is_past_is_now(caller):
    caller.topic("D", message_type="DELAY")
    entry = (await caller.send("D", delivery_timestamp={"seconds": 1})).entries[0]
    assert entry.recall_handle == ""
    assert (await caller.one(topic="D")).body == b"hello"


@pytest.mark.parametrize("handle", ["", "§", "AAAA", "djEgLi4vLi4gYiAxIEE=", "x" * 10_000])
async def test_what_is_no_recall_handle(caller, handle):
    caller.topic("D", message_type="DELAY")
    assert said(await caller.ask("RecallMessage", topic={"name": "D"}, recall_handle=handle))[0] == 40000
    normal = await caller.ask("RecallMessage", topic={"name": "T"}, recall_handle=handle)
    assert said(normal) == (
        40014,
        "TopicMessageType validate failed, the expected type is NORMAL, but actual type is DELAY",
    )


async def test_higher_priorities_come_first(caller):
    caller.topic("P", 3, "PRIORITY")
    for priority in (0, 2, 1):
        await caller.send("P", message_id=str(priority), priority=priority)
    _, found = await caller.receive(topic="P", batch_size=1)
    (system,) = [one.system_properties for one in found]
    assert (system.priority, system.queue_id, system.message_type) == (2, 2, 6)


# ---- renewals


async def test_what_a_push_consumer_handles_for_long_is_not_delivered_twice(inside):
    stream, _ = await inside.consumer(client_type=PUSH)
    await until(lambda: members(inside), "the consumer in the table")
    await inside.send()
    found = await inside.one(renew=True, invisible=None)
    for _ in range(30):
        await asyncio.sleep(10)
        await inside.ask("Heartbeat", group={"name": "G"}, client_type=PUSH)
    other = inside.other("c2")
    assert (await other.receive(invisible=600))[0].code == NOT_FOUND, "five minutes later it is still held"
    assert said(await inside.ack(found.system_properties.receipt_handle)) == (OK, "OK"), "with the first handle"
    await asyncio.sleep(120)
    assert (await other.receive())[0].code == NOT_FOUND
    await stream.end()


async def test_what_a_client_held_that_left_comes_soon_to_others(inside):
    stream, _ = await inside.consumer(client_type=PUSH)
    await until(lambda: members(inside), "the consumer in the table")
    await inside.send()
    await inside.one(renew=True, invisible=None)
    waiting = asyncio.ensure_future(inside.other("c2").one())
    await asyncio.sleep(1)
    began = asyncio.get_running_loop().time()
    await inside.ask("NotifyClientTermination", group={"name": "G"})
    assert (await waiting).system_properties.delivery_attempt == 2
    assert asyncio.get_running_loop().time() - began < 5
    await stream.end()


async def test_what_a_client_held_that_fell_silent_comes_soon_to_others(inside):
    stream, _ = await inside.consumer(client_type=PUSH)
    await until(lambda: members(inside), "the consumer in the table")
    await inside.send()
    await inside.one(renew=True, invisible=None)
    await stream.end()
    await asyncio.sleep(CLIENT_SILENT_MS_MAX / 1000 - 30)
    other = inside.other("c2")
    assert (await other.receive(invisible=600))[0].code == NOT_FOUND, "it is renewed beyond its 60 s"
    assert (await other.one(long_polling_timeout={"seconds": 20})).system_properties.delivery_attempt == 2


async def test_a_stop_gives_back_what_push_consumers_hold(tmp_path):
    async with served(tmp_path, by_proxy=True) as caller:
        caller.topic()
        await caller.consumer(client_type=PUSH)
        await caller.ask("Heartbeat", group={"name": "G"}, client_type=PUSH)
        await caller.send()
        await caller.one(renew=True, invisible=None)
        await caller.endpoint.stop()
        await asyncio.sleep(3)
        again = Caller(caller.endpoint, caller.context, "c2")
        assert (await again.one()).system_properties.delivery_attempt == 2


async def test_a_message_that_a_handler_failed_on_is_not_renewed(inside):
    stream, _ = await inside.consumer(client_type=PUSH)
    await until(lambda: members(inside), "the consumer in the table")
    await inside.send()
    for attempt in (1, 2, 3, 4):
        found = await inside.one(renew=True, invisible=None)
        assert found.system_properties.delivery_attempt == attempt
        await inside.change(found.system_properties.receipt_handle, attempt)
    assert len(inside.endpoint.receiving.renewals) == 0
    await stream.end()


# ---- requests of tools


async def asked_by_a_tool(caller, code, header, body=b""):
    client = RemotingClient()
    try:
        return await client.call(caller.context.address, request(code, header, body), 60_000)
    finally:
        await client.close()


async def test_a_tool_has_a_client_handle_a_message(inside):
    stream, _ = await inside.consumer(client_type=PUSH)
    await until(lambda: members(inside), "the consumer in the table")
    await inside.send()
    message_id = offset_id(inside.context.identity.store_host, 0)
    header = ConsumeDirectlyRequest(consumer_group="G", client_id="c1", msg_id=message_id)
    for code, result in ((OK, "CR_SUCCESS"), (60000, "CR_LATER"), (40016, "CR_RETURN_NULL")):
        asking = asyncio.ensure_future(asked_by_a_tool(inside, RequestCode.CONSUME_MESSAGE_DIRECTLY, header))
        told = (await stream.received.get()).verify_message_command
        assert told.message.body == b"hello"
        stream.send(verify_message_result={"nonce": told.nonce}, status={"code": code})
        answer: Command = await asking
        body = msgspec.json.decode(answer.payload)
        assert (answer.code, body["consumeResult"], body["remark"]) == (0, result, "from gRPC client")
    asking = asyncio.ensure_future(asked_by_a_tool(inside, RequestCode.CONSUME_MESSAGE_DIRECTLY, header))
    assert (await asking).remark == "call remote timeout"
    await stream.end()


async def test_a_tool_sees_who_is_in_a_group(inside):
    stream, _ = await inside.consumer(client_type=PUSH)
    await until(lambda: members(inside), "the consumer in the table")
    code, header = RequestCode.GET_CONSUMER_CONNECTION_LIST, ConsumerGroupRequest("G")
    told = msgspec.json.decode((await asked_by_a_tool(inside, code, header)).payload)
    (connection,) = told["connectionSet"]
    assert (connection["clientId"], connection["language"]) == ("c1", "GO")
    assert connection["clientAddr"] == "10.0.0.7:50000"
    assert told["consumeType"] == "CONSUME_PASSIVELY"
    await stream.end()


async def test_a_tool_sees_the_properties_that_a_client_has_set(inside):
    stream = Stream(inside)
    properties = {"app": "orders", "PROP_CONSUMER_CLIENT_TYPE": "mine"}
    await stream.ask(settings={"client_type": PUSH, "subscription": SUBSCRIPTION, "client_properties": properties})
    await until(lambda: members(inside), "the consumer in the table")
    header = RunningInfoRequest("G", "c1", jstack_enable=False)
    answer = await asked_by_a_tool(inside, RequestCode.GET_CONSUMER_RUNNING_INFO, header)
    assert json.loads(answer.payload)["properties"] == {
        "PROP_CONSUMER_CLIENT_TYPE": "gRPC",
        "client.app": "orders",
        "client.PROP_CONSUMER_CLIENT_TYPE": "mine",
    }
    await stream.end()


async def test_a_tool_sees_a_clients_stack(inside):
    stream, _ = await inside.consumer(client_type=PUSH)
    await until(lambda: members(inside), "the consumer in the table")
    header = RunningInfoRequest("G", "c1", jstack_enable=True)
    asking = asyncio.ensure_future(asked_by_a_tool(inside, RequestCode.GET_CONSUMER_RUNNING_INFO, header))
    nonce = (await stream.received.get()).print_thread_stack_trace_command.nonce
    stream.send(thread_stack_trace={"nonce": nonce, "thread_stack_trace": "at main"}, status={"code": OK})
    assert b"at main" in (await asking).payload
    without = RunningInfoRequest("G", "c1", jstack_enable=False)
    assert (await asked_by_a_tool(inside, RequestCode.GET_CONSUMER_RUNNING_INFO, without)).code == 0
    await stream.end()
