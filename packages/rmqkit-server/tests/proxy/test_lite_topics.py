"""Lite topics over gRPC, in a broker and in a proxy. Source: lite.md §3, §4, §6 to §8, §13."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.broker.server import Broker
from rmqkit.broker.settings import BrokerSettings
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.record import decode_record
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.proxy.schema.records import jump_hash, read_handle
from rmqkit.proxy.schema.status import Refused
from rmqkit.proxy.service.endpoint import StreamFailed
from rmqkit.proxy.service.lite_subscriptions import LiteLimits
from rmqkit.standalone import Standalone
from rmqkit.store.settings import StoreSettings
from tests.ports import free_port
from tests.proxy.calling import ADDRESSES, BROKER, Caller, Stream, endpoint_before, message, served
from tests.waiting import until

OK, NOT_FOUND = 20000, 40401
LITE_PUSH, LITE_SIMPLE = 5, 6
RULE = "lite topic can only contain alphanumeric characters, hyphens(-), and underscores(_)"
CONFLICT = "TopicMessageType validate failed, the expected type is {}, but actual type is {}"
ADD, REMOVE, COMPLETE_ADD, COMPLETE_REMOVE = range(4)


def group_of(it, name="LG", parent="LT", retries=16, **attributes):
    given = {"lite.bind.topic": parent, **{f"lite.{key.replace('_', '.')}": value for key, value in attributes.items()}}
    config = SubscriptionGroupConfig(group_name=name, attributes=given, retry_max_times=retries)
    it.context.groups.stored.subscription_group_table[name] = config


@pytest.fixture(params=["broker", "proxy"])
async def lite(tmp_path, request):
    """A client of an endpoint in the broker, and of an endpoint in front of the broker. The parent topic is LT."""
    async with served(tmp_path, by_proxy=request.param == "proxy") as it:
        it.is_proxy = request.param == "proxy"
        it.topic("LT", 4, "LITE")
        it.topic("NT", 4)
        group_of(it)
        await it.published()
        yield Lite(it)


class Lite:
    """A lite consumer and producer."""

    def __init__(self, caller, group="LG"):
        self.caller, self.group = caller, group
        self.context, self.is_proxy = caller.context, getattr(caller, "is_proxy", False)
        self.sent = 0
        self.stream = None

    def other(self, client_id, group="LG"):
        return Lite(self.caller.other(client_id), group)

    async def open(self, client_type=LITE_PUSH):
        self.stream, settings = await self.caller.consumer("LT", self.group, client_type)
        return settings

    async def sync(self, *names, action=ADD, topic="LT", **fields):
        return said(
            await self.caller.ask(
                "SyncLiteSubscription",
                action=action,
                topic={"name": topic},
                group={"name": self.group},
                lite_topic_set=names,
                **fields,
            )
        )

    async def joined(self, *names, **fields):
        """Open a stream, and subscribe to lite topics."""
        await self.open()
        assert await self.sync(*names, **fields) == (OK, "OK")
        return self

    async def send(self, name, *bodies, topic="LT"):
        for body in bodies:
            self.sent += 1
            answer = await self.caller.send(topic, body.encode(), f"ID{self.sent}", lite_topic=name)
            assert said(answer) == (OK, "OK")

    async def receive(self, renew=False, **fields):
        given = {"topic": "LT", "group": self.group, "batch_size": 32, "renew": renew, **fields}
        status, messages = await self.caller.receive(**given, invisible=None if renew else 30)
        assert status.code == OK, status
        return messages

    async def refusal(self, **fields):
        return said((await self.caller.items(topic="LT", group=self.group, **fields))[0])

    async def nothing(self):
        assert await self.refusal() == (NOT_FOUND, "no new message")

    async def ack(self, *messages, **fields):
        entries = [
            {"message_id": one.system_properties.message_id, "receipt_handle": one.system_properties.receipt_handle}
            | fields
            for one in messages
        ]
        return said(
            await self.caller.ask("AckMessage", group={"name": self.group}, topic={"name": "LT"}, entries=entries)
        )

    async def nack(self, one, seconds, **fields):
        system = one.system_properties
        return await self.caller.change(
            system.receipt_handle, seconds, topic="LT", group=self.group, message_id=system.message_id, **fields
        )


def said(answer):
    return answer.status.code, answer.status.message


def shown(messages):
    return [
        (
            one.system_properties.lite_topic,
            one.body.decode(),
            one.system_properties.queue_offset,
            one.system_properties.delivery_attempt,
        )
        for one in messages
    ]


# ---- sends


async def test_a_parent_topic_accepts_exactly_lite_messages(lite):
    answer = await lite.caller.ask("QueryRoute", topic={"name": "LT"}, endpoints=ADDRESSES)
    assert [list(queue.accept_message_types) for queue in answer.message_queues] == [[5]] * 4
    await lite.send("x" * 64, "b0")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x" * 65, "lite topic exceed the max size 64"),
        (" ", "lite topic cannot be the char sequence of whitespace"),
        *((name, RULE) for name in ("a$b", "a b", "é", "a/b", "a,b", "a%b", "a.b:c")),
    ],
)
async def test_an_illegal_name_is_refused_in_messages_and_in_subscriptions(lite, name, text):
    assert said(await lite.caller.send("LT", lite_topic=name)) == (40020, text)
    for action in (ADD, COMPLETE_ADD):
        assert await lite.sync("ok", name, action=action) == (40020, text)


@pytest.mark.parametrize(
    ("topic", "fields", "expected", "actual"),
    [
        ("LT", {}, "LITE", "NORMAL"),
        ("LT", {"lite_topic": "s1", "delivery_timestamp": {"seconds": 1}}, "LITE", "DELAY"),
        ("LT", {"lite_topic": "s1", "message_group": "g"}, "LITE", "FIFO"),
        ("LT", {"lite_topic": "s1", "priority": 2}, "LITE", "PRIORITY"),
        ("NT", {"lite_topic": "s1"}, "NORMAL", "LITE"),
    ],
)
async def test_the_type_of_a_message_must_be_the_topics_type(lite, topic, fields, expected, actual):
    assert said(await lite.caller.send(topic, **fields)) == (40014, CONFLICT.format(expected, actual))


@pytest.mark.parametrize(
    ("name", "queues"),
    [
        *(
            (name, {4: queue})
            for name, queue in {"s1": 3, "s2": 0, "s3": 0, "a1": 3, "n1": 1, "n2": 2, "dl": 1}.items()
        ),
        ("x" * 64, {4: 2}),
        ("sess-00000000", {4: 1, 8: 1, 16: 1}),
        ("session-42", {4: 2, 8: 2, 16: 2}),
        ("s1", {4: 3, 8: 4, 16: 13}),
    ],
)
def test_the_queue_of_a_lite_topic_is_a_hash_of_its_name(name, queues):
    assert {count: jump_hash(name, count) for count in queues} == queues


def stored(lite):
    """Return queue, lite topic and body of all messages of the parent topic."""
    found, log, at = [], lite.context.store.log, 0
    while at < log.max_offset and (raw := log.record_at(at)) is not None:
        record, at = decode_record(raw), at + len(raw)
        if record.topic == "LT":
            found.append((record.queue_id, decode_properties(record.properties)["__LITE_TOPIC"], record.body))
    return found


async def test_several_messages_of_a_lite_topic_are_stored_in_order(lite):
    several = [message("LT", b"m%d" % number, f"ID{number}", lite_topic="s1") for number in range(3)]
    answer = await lite.caller.ask("SendMessage", messages=several)
    assert (said(answer), [one.message_id for one in answer.entries]) == ((OK, "OK"), ["ID0", "ID1", "ID2"])
    assert stored(lite) == [(3, "s1", b"m0"), (3, "s1", b"m1"), (3, "s1", b"m2")]
    await lite.joined("s1")
    assert shown(await lite.receive()) == [("s1", "m0", 0, 1), ("s1", "m1", 1, 1), ("s1", "m2", 2, 1)]


async def test_messages_of_several_lite_topics_are_stored_in_their_queues(lite):
    names = ["s1", "s2", "n1", "s1"]
    several = [message("LT", b"m%d" % number, f"ID{number}", lite_topic=name) for number, name in enumerate(names)]
    answer = await lite.caller.ask("SendMessage", messages=several)
    assert (said(answer), [one.message_id for one in answer.entries]) == (
        (OK, "OK"),
        [f"ID{number}" for number in range(4)],
    )
    assert sorted(stored(lite)) == [(0, "s2", b"m1"), (1, "n1", b"m2"), (3, "s1", b"m0"), (3, "s1", b"m3")]


async def test_a_call_with_and_without_a_lite_topic_stores_nothing(lite):
    several = [message("LT", b"a", "ID0", lite_topic="s1"), message("LT", b"b", "ID1")]
    assert said(await lite.caller.ask("SendMessage", messages=several)) == (40014, CONFLICT.format("LITE", "NORMAL"))
    assert stored(lite) == []


async def test_a_client_cannot_set_the_properties_of_lite_topics(lite):
    for name in ("__LITE_TOPIC", "__LITE_EPOCH", "INNER_MULTI_DISPATCH"):
        answer = await lite.caller.send("LT", properties={name: "x"}, lite_topic="s1")
        assert said(answer) == (40007, f"property is used by system: {name}")


# ---- settings and subscriptions


@pytest.mark.parametrize("client_type", [LITE_PUSH, LITE_SIMPLE])
async def test_settings_of_a_lite_consumer(lite, client_type):
    lite.context.groups.get("LG").consume_message_orderly = True
    settings = await lite.open(client_type)
    wanted = settings.subscription
    assert (wanted.fifo, wanted.receive_batch_size, wanted.long_polling_timeout.seconds) == (False, 32, 20)
    assert (wanted.lite_subscription_quota, wanted.max_lite_topic_size) == (2000, 64)
    assert settings.backoff_policy.max_attempts == 17


@pytest.mark.parametrize(
    ("group", "client_type", "text"),
    [
        ("LG", 2, "lite group must use LITE mode: LG"),
        ("LG", 3, "lite group must use LITE mode: LG"),
        ("GN", LITE_PUSH, "regular group cannot use LITE mode: GN"),
        ("GN", LITE_SIMPLE, "regular group cannot use LITE mode: GN"),
    ],
)
async def test_a_consumer_of_another_mode_than_its_group_is_refused(lite, group, client_type, text):
    stream = Stream(lite.caller)
    stream.send(settings={"client_type": client_type, "subscription": {"group": {"name": group}}})
    with pytest.raises(StreamFailed) as caught:
        await stream.ended
    assert str(caught.value) == f"process client telemetryCommand failed. {text}"
    assert caught.value.is_argument
    beat = await lite.caller.ask("Heartbeat", group={"name": group}, client_type=client_type)
    assert said(beat) == (40015, text)


async def test_the_group_of_a_subscription_is_bound_to_its_topic(lite):
    await lite.open()
    text = "lite group {} is expected to bind topic {}, but actual is {}"
    assert await lite.sync("s1", topic="NT") == (40002, text.format("LG", "LT", "NT"))
    assert await lite.other("c2", "GN").sync("s1") == (40002, text.format("GN", "null", "LT"))
    assert await lite.sync() == (OK, "OK")
    assert await lite.sync("") == (40020, "lite topic cannot be the char sequence of whitespace")
    assert await lite.sync("s1", action=9) == (40000, "action 9 of a lite subscription: it must be 0 to 3")


async def test_a_client_has_no_more_lite_topics_than_its_quota(lite):
    group_of(lite.caller, "Q", sub_client_quota="5")
    own = lite.other("c2", "Q")
    await own.open()
    full = (42902, "lite subscription quota exceeded: 5")
    assert await own.sync(*(f"n{number}" for number in range(6))) == full
    assert await own.sync(*(f"n{number}" for number in range(6)), action=COMPLETE_ADD) == full
    for number in range(5):
        assert await own.sync(f"n{number}") == (OK, "OK")
    assert await own.sync("n5") == full
    assert await own.sync("n4") == (OK, "OK")
    assert await own.sync("n0", action=REMOVE) == (OK, "OK")
    assert await own.sync("n5") == (OK, "OK")


async def test_more_subscriptions_in_a_second_than_allowed_are_refused(lite):
    lite.caller.endpoint.receiving._lite.limits = LiteLimits(adds_per_second_max=2)
    await lite.open()
    await asyncio.sleep(1 - lite.context.clock.monotonic_ms() / 1000 % 1)
    answers = [(await lite.sync(f"n{number}"))[0] for number in range(3)]
    assert answers == [OK, OK, 42900]
    assert (await lite.sync("n1", action=COMPLETE_ADD))[0] == OK
    await asyncio.sleep(1)
    assert (await lite.sync("n2"))[0] == OK


async def test_a_wildcard_group_has_no_single_subscriptions(lite):
    group_of(lite.caller, "W", sub_wildcard="true")
    own = lite.other("c2", "W")
    await own.open()
    code, text = await own.sync("s1")
    assert (code, "subscribe lite operation is not supported for this group" in text) == (50001, True)
    await lite.send("old", "a")
    assert await own.sync(action=COMPLETE_ADD) == (OK, "OK")
    assert shown(await own.receive()) == [("old", "a", 0, 1)]
    await lite.send("new", "b")
    assert shown(await own.receive()) == [("new", "b", 0, 1)]


# ---- delivery


async def test_a_client_receives_the_messages_of_its_lite_topics(lite):
    await lite.joined("n1", "n2")
    await lite.send("n1", "m0", "m1")
    await lite.send("n2", "k0")
    await lite.send("other", "x")
    messages = await lite.receive()
    assert sorted(shown(messages)) == [("n1", "m0", 0, 1), ("n1", "m1", 1, 1), ("n2", "k0", 0, 1)]
    for one in messages:
        system = one.system_properties
        assert (one.topic.name, system.message_type) == ("LT", 5)
        assert system.queue_id == {"n1": 1, "n2": 2}[system.lite_topic]
        assert dict(one.user_properties) == {}
        handle = read_handle(system.receipt_handle)
        assert (handle.lite_topic, handle.offset) == (system.lite_topic, system.queue_offset)
        assert (handle.pop.revive_queue_id, handle.pop.queue_id) == (999, 0)
    await lite.nothing()
    assert await lite.ack(*messages) == (OK, "OK")
    await lite.nothing()


async def test_a_waiting_receive_is_answered_by_a_new_message(lite):
    await lite.joined("s1")
    waiting = asyncio.ensure_future(lite.receive(renew=True))
    await asyncio.sleep(1)
    await lite.send("s1", "a")
    assert shown(await waiting) == [("s1", "a", 0, 1)]


async def test_a_lite_simple_consumer_is_served(lite):
    await lite.open(LITE_SIMPLE)
    assert await lite.sync("s1") == (OK, "OK")
    await lite.send("s1", "a")
    (one,) = await lite.receive()
    assert shown([one]) == [("s1", "a", 0, 1)]
    assert await lite.ack(one) == (OK, "OK")


async def test_a_receive_has_at_most_32_messages(lite):
    names = [f"n{number}" for number in range(40)]
    await lite.joined(*names)
    for name in names:
        await lite.send(name, "x")
    assert [len(await lite.receive()) for _ in range(2)] == [32, 8]


async def test_a_client_without_settings_or_stream_gets_no_lite_messages(lite):
    assert await lite.refusal(renew=True) == (40000, "client settings not found")
    await lite.joined("s1")
    await lite.stream.end()
    assert await lite.refusal() == (40000, "The client [c1] is disconnected.")


async def test_a_client_with_too_many_unacknowledged_messages_waits(lite):
    lite.caller.endpoint.receiving._lite.limits = LiteLimits(renewed_max=1)
    await lite.joined("s1", "s2")
    await lite.send("s1", "a", "b")
    await lite.send("s2", "c")
    held = await lite.receive(renew=True, batch_size=2)
    text = "The client [c1] has too many unacked messages. Unacked count: 2"
    assert await lite.refusal(renew=True) == (40300, text)
    assert await lite.ack(*held) == (OK, "OK")
    assert len(await lite.receive(renew=True)) == 1


async def test_the_same_attempt_gets_the_same_messages(lite):
    await lite.joined("s1")
    await lite.send("s1", "A0")
    assert shown(await lite.receive(attempt_id="t1")) == [("s1", "A0", 0, 1)]
    await lite.send("s1", "A1")
    assert shown(await lite.receive(attempt_id="t1")) == [("s1", "A0", 0, 1), ("s1", "A1", 1, 1)]


async def test_two_clients_of_a_shared_lite_topic_do_not_split_a_batch(lite):
    other = await lite.other("c2").joined("sh")
    await lite.joined("sh")
    await lite.send("sh", "a", "b", "c", "d")
    messages = await other.receive()
    assert [one.body for one in messages] == [b"a", b"b", b"c", b"d"]
    await lite.nothing()
    assert await other.ack(*messages) == (OK, "OK")
    await lite.send("sh", "e")
    assert shown(await lite.receive()) == [("sh", "e", 4, 1)]


@pytest.mark.parametrize(
    ("option", "bodies"),
    [
        ({"policy": 1}, "O0 O1 O2 O3 O4"),
        ({"policy": 0}, "O0 O1 O2 O3 O4"),
        ({"policy": 2}, ""),
        ({"offset": 3}, "O3 O4"),
        ({"offset": 99}, ""),
        ({"offset": -1}, "O0 O1 O2 O3 O4"),
        ({"tail_n": 2}, "O3 O4"),
    ],
)
async def test_a_subscription_can_name_the_first_message(lite, option, bodies):
    await lite.send("s1", *(f"O{number}" for number in range(5)))
    await lite.joined("s1", offset_option=option)
    if bodies:
        assert " ".join(one.body.decode() for one in await lite.receive()) == bodies
    else:
        await lite.nothing()
        await lite.send("s1", "newer")
        assert shown(await lite.receive()) == [("s1", "newer", 5, 1)]


async def test_a_subscription_can_begin_at_a_time(lite):
    await lite.send("s1", "O0", "O1")
    await asyncio.sleep(2)
    now_ms = lite.context.clock.now_ms()
    await lite.send("s1", "O2", "O3")
    await lite.joined("s1", offset_option={"timestamp": now_ms})
    assert [one.body for one in await lite.receive()] == [b"O2", b"O3"]


# ---- acks, redelivery, dead letters


async def test_a_nacked_message_is_redelivered_with_the_later_ones_behind_it(lite):
    await lite.joined("s1")
    await lite.send("s1", "a", "b", "c")
    first, *_ = await lite.receive()
    # Java's SDK sends no lite topic: the handle has it.
    assert said(await lite.nack(first, 2)) == (OK, "OK")
    again = await lite.receive(long_polling_timeout={"seconds": 20})
    assert shown(again) == [("s1", "a", 0, 2), ("s1", "b", 1, 2), ("s1", "c", 2, 2)]


async def test_a_suspended_message_is_redelivered_without_counting(lite):
    await lite.joined("s1")
    await lite.send("s1", "a", "b")
    first, second = await lite.receive()
    assert await lite.ack(first) == (OK, "OK")
    assert said(await lite.nack(second, 3, suspend=True, lite_topic="s1")) == (OK, "OK")
    assert shown(await lite.receive(long_polling_timeout={"seconds": 20})) == [("s1", "b", 1, 1)]


async def test_the_lite_topic_of_a_request_must_be_the_handles(lite):
    await lite.joined("s1")
    await lite.send("s1", "a")
    (one,) = await lite.receive()
    handle = one.system_properties.receipt_handle
    wrong = (40013, "the message of the handle is in lite topic s1, not in s2")
    answer = await lite.caller.ask(
        "AckMessage",
        group={"name": "LG"},
        topic={"name": "LT"},
        entries=[{"message_id": "ID1", "receipt_handle": handle, "lite_topic": "s2"}],
    )
    assert said(answer.entries[0]) == wrong
    assert said(await lite.nack(one, 2, lite_topic="s2")) == wrong
    # A handle of Apache's proxy has no lite topic.
    one.system_properties.receipt_handle = handle.rpartition(" ")[0]
    assert await lite.ack(one, lite_topic="s1") == (OK, "OK")
    await lite.send("s1", "b")
    assert shown(await lite.receive()) == [("s1", "b", 1, 1)]


@pytest.mark.parametrize("text", ["$", "$a$b", f"${'x' * 65}", "$ "])
def test_a_handle_with_an_illegal_lite_topic_is_refused(text):
    with pytest.raises(Refused):
        read_handle(f"0 1 2 999 0 broker-a 0 7 4096 {text}")
    assert read_handle("0 1 2 999 0 broker-a 0 7 4096 $12").lite_topic == "12"
    assert read_handle("0 1 2 999 0 broker-a 0 7 0 4096").physical_offset == 4096


async def test_a_held_message_is_renewed_until_its_ack(lite):
    await lite.joined("s1")
    await lite.send("s1", "a")
    (one,) = await lite.receive(renew=True)
    await asyncio.sleep(100)
    await lite.sync("s1", action=COMPLETE_ADD)
    await lite.nothing()
    assert await lite.ack(one) == (OK, "OK")
    await lite.send("s1", "b")
    assert shown(await lite.receive()) == [("s1", "b", 1, 1)]


async def test_a_message_with_too_many_deliveries_is_a_dead_letter_and_never_comes_back(lite):
    group_of(lite.caller, "GD", retries=2)
    own = await lite.other("c2", "GD").joined("dl")
    await own.send("dl", "D0", "D1")
    for attempt in (1, 2, 3):
        (one,) = await own.receive(batch_size=1, long_polling_timeout={"seconds": 20})
        assert shown([one]) == [("dl", "D0", 0, attempt)]
        await own.nack(one, 1)
    assert await own.refusal(batch_size=1, long_polling_timeout={"seconds": 20}) == (NOT_FOUND, "no match message")
    (one,) = await own.receive(batch_size=1)
    assert shown([one]) == [("dl", "D1", 1, 1)]
    assert await own.ack(one) == (OK, "OK")
    await own.nothing()
    assert lite.context.store.max_offset("%DLQ%GD", 0) == 1


async def test_a_client_can_move_a_message_to_the_dead_letters(lite):
    await lite.joined("s1")
    await lite.send("s1", "a", "b")
    first, second = await lite.receive()
    names = {"group": {"name": "LG"}, "topic": {"name": "LT"}, "message_id": "ID1"}
    handle = read_handle(first.system_properties.receipt_handle)
    for lie in (
        f"{handle.extra_info} $s2",
        f"0 1 2 999 0 broker-a 0 1 {handle.physical_offset} $s1",
        f"0 1 2 999 0 broker-a 0 0 {read_handle(second.system_properties.receipt_handle).physical_offset} $s1",
    ):
        answer = await lite.caller.ask("ForwardMessageToDeadLetterQueue", receipt_handle=lie, **names)
        assert said(answer) == (40013, "the handle names a place in the log of another message")
    answer = await lite.caller.ask("ForwardMessageToDeadLetterQueue", receipt_handle=handle.text, **names)
    assert answer.status.code == OK
    assert await lite.ack(second) == (OK, "OK")
    await lite.nothing()
    assert lite.context.store.max_offset("%DLQ%LG", 0) == 1


async def test_a_regular_group_receives_all_messages_of_a_parent_and_its_dead_letters(lite):
    lite.context.topics.get("LT").read_queue_nums = 4
    assert await lite.refusal(broker="broker-a") != (OK, "OK")
    regular = {"topic": "LT", "group": "R"}
    assert (await lite.caller.receive(**regular))[0].code == NOT_FOUND
    await lite.joined("s1")
    await lite.send("s1", "a")
    status, messages = await lite.caller.other("c9").receive(**regular)
    assert status.code == OK
    (one,) = messages
    system = one.system_properties
    assert (system.lite_topic, system.message_type, system.queue_id, system.queue_offset) == ("s1", 5, 3, 0)
    assert dict(one.user_properties) == {}


# ---- clients that come and go


async def test_the_newest_subscriber_of_an_exclusive_group_takes_a_lite_topic(lite):
    group_of(lite.caller, "LX", sub_model="Exclusive")
    first = await lite.other("ex1", "LX").joined("e1", "e2")
    second = await lite.other("ex2", "LX").joined("e1")
    notice = await first.stream.received.get()
    assert notice.notify_unsubscribe_lite_command.lite_topic == "e1"
    await lite.send("e1", "a")
    assert shown(await second.receive()) == [("e1", "a", 0, 1)]
    await first.nothing()
    assert await first.sync("e1", "e2", action=COMPLETE_ADD) == (OK, "OK")
    notice = await first.stream.received.get()
    assert notice.notify_unsubscribe_lite_command.lite_topic == "e1"
    assert lite_client(lite, "ex2", "LX").names == {"e1"}
    assert lite_client(lite, "ex1", "LX").names == {"e2"}


def lite_client(lite, client_id="c1", group="LG"):
    found = lite.context.lite.groups.get(group)
    return None if found is None else found.clients.get(client_id)


async def test_a_client_that_leaves_has_no_subscriptions(lite):
    await lite.joined("s1")
    assert lite_client(lite).names == {"s1"}
    await lite.caller.ask("NotifyClientTermination", group={"name": "LG"})
    assert lite_client(lite) is None


async def test_a_late_registration_does_not_bring_a_client_without_a_stream_back(lite):
    await lite.joined("s1")
    client = lite.caller.endpoint.clients.find("c1")
    await lite.stream.end()
    await until(lambda: lite_client(lite) is None, "the removal of the client")
    await lite.caller.endpoint._lite.restore(client)
    assert lite_client(lite) is None


async def test_the_subscriptions_of_a_client_are_back_with_its_stream(lite):
    await lite.joined("s1", "s2")
    await lite.stream.end()
    await until(lambda: lite_client(lite) is None, "the removal of the client")
    await lite.send("s1", "a")
    await lite.open()
    await until(lambda: lite_client(lite) is not None, "the client at the broker")
    assert lite_client(lite).names == {"s1", "s2"}
    assert shown(await lite.receive()) == [("s1", "a", 0, 1)]


async def test_a_client_that_left_does_not_come_back_with_old_subscriptions(lite):
    await lite.joined("s1")
    await lite.caller.ask("NotifyClientTermination", group={"name": "LG"})
    await lite.open()
    await lite.send("s1", "a")
    await lite.nothing()


async def test_a_broker_that_does_not_know_the_client_gets_its_lite_topics_again(lite):
    await lite.joined("s1")
    await lite.send("s1", "a")
    service = lite.context.lite
    service.remove_client(service.groups["LG"], lite_client(lite))  # as after a restart
    assert shown(await lite.receive()) == [("s1", "a", 0, 1)]


async def test_a_complete_remove_ends_all_subscriptions(lite):
    await lite.joined("s1")
    assert await lite.sync(action=COMPLETE_REMOVE) == (OK, "OK")
    assert lite_client(lite) is None


async def test_messages_of_a_cancelled_receive_are_redelivered(lite):
    await lite.joined("s1")
    waiting = asyncio.ensure_future(lite.receive())
    await asyncio.sleep(1)
    waiting.cancel()
    await asyncio.wait([waiting])
    await lite.send("s1", "a")
    (one,) = await lite.receive(long_polling_timeout={"seconds": 20})
    assert one.body == b"a"


async def test_a_subscription_that_one_broker_refuses_is_not_remembered(lite, monkeypatch):
    await lite.joined("s1")
    monkeypatch.setattr(lite.context.settings, "lite_subscriptions_max", 1)
    code, text = await lite.sync("s2")
    assert (code, text) == (42902, "lite subscription quota exceeded: 1")
    assert lite.caller.endpoint.clients.find("c1").lite.names == {"s1"}


def test_the_endpoint_uses_the_codes_of_5_5():
    codes = RequestCode.POP_LITE_MESSAGE, RequestCode.LITE_SUBSCRIPTION_CTL, RequestCode.NOTIFY_UNSUBSCRIBE_LITE
    assert codes == (200070, 200071, 200073)


async def test_an_expired_lite_topic_lives_again_with_its_next_message(tmp_path):
    settings = {"lite_lifetime_min_ms": 1000, "lite_expiry_interval_ms": 3000}
    async with served(tmp_path, **settings) as it:
        it.topic("LT", 4, "LITE")
        it.context.topics.get("LT").attributes["lite.topic.expiration"] = "1"
        group_of(it)
        lite = await Lite(it).joined("ttl1")
        await lite.send("ttl1", "a", "b", "c")
        first, *_ = await lite.receive()
        assert await lite.ack(first) == (OK, "OK")
        await asyncio.sleep(130)  # lifetimes are rounded up to minutes
        await lite.nothing()
        await lite.send("ttl1", "d")
        assert shown(await lite.receive()) == [("ttl1", "d", 3, 1)]


# ---- two brokers behind a proxy


@pytest.fixture
async def pair(tmp_path):
    """A client of a proxy in front of two brokers with the same topics and groups, and the brokers by name."""
    settings = {"listen_port": 0, "bind_address": "127.0.0.1", "recall_messages": True}
    store = StoreSettings(commit_log_file_bytes=1 << 20)
    async with Standalone(tmp_path / "a", broker=BrokerSettings(broker_name=BROKER, **settings), store=store) as it:
        second = BrokerSettings(
            broker_name="broker-b", **{**settings, "listen_port": free_port(-2, 1)}, namesrv_addr=it.namesrv_address
        )
        other = Broker(second, store, tmp_path / "b")
        await other.start()
        try:
            async with endpoint_before(it) as endpoint:
                for broker in (it.broker, other):
                    caller = Caller(endpoint, broker.context)
                    caller.topic("LT", 4, "LITE")
                    group_of(caller)
                    await caller.published()
                yield Lite(Caller(endpoint, it.broker.context)), {BROKER: it.broker, "broker-b": other}
        finally:
            await other.stop()


async def test_names_are_spread_over_both_brokers_and_subscriptions_reach_both(pair):
    lite, brokers = pair
    names = [f"s{number}" for number in range(16)]
    await lite.joined(*names)
    for broker in brokers.values():
        assert broker.context.lite.groups["LG"].clients["c1"].names == set(names)
    for name in names:
        await lite.send(name, "x", "y")
    found = {}
    for broker in brokers:
        received = await lite.receive(broker=broker)
        assert received
        for one in shown(received):
            found.setdefault(one[0], []).append((one[1:], broker))
        assert await lite.ack(*received) == (OK, "OK")
    assert {name: [one for one, _ in those] for name, those in found.items()} == {
        name: [("x", 0, 1), ("y", 1, 1)] for name in names
    }
    assert all(len({broker for _, broker in those}) == 1 for those in found.values())
