"""The verdict over literal facts: one case per rule and per edge of it. Source: behaviour.md §4–6, §8, §9.1–9.3."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from msgspec.structs import replace

from rmqkit.admin import Admin
from rmqkit.admin.diagnosis.causes import Cause, Facts, Lookup, Place, Transaction, judge
from rmqkit.admin.explain import At, Explainer, Key, explain
from rmqkit.admin.messages.messages import TraceRow
from rmqkit.client.producer.producer import Producer
from rmqkit.errors import SettingsError, UnknownName
from rmqkit.filter import SQL92, TAG, subscription
from rmqkit.protocol.message import Message, ReceivedMessage
from rmqkit.protocol.names import TRACE_TOPIC
from rmqkit.protocol.schemas.clients import (
    ClientConnection,
    ConsumerConnection,
    ConsumerRunningInfo,
    MessageQueue,
    PopProcessQueueInfo,
    ProcessQueueInfo,
)
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.topics import Permission
from rmqkit.protocol.trace import SubscribeAfterTrace, SubscribeBeforeTrace, encode_traces
from tests.admin.things import make_topic, send

NOW_MS = 1_790_000_000_000
QUEUE = MessageQueue("Orders", "b", 3)
RETRY = MessageQueue("%RETRY%billing", "b", 0)


def message(topic: str = "Orders", *, born_ms: int = NOW_MS, retries: int = 0, **properties: str) -> ReceivedMessage:
    queue_id, offset = (3, 17) if topic == "Orders" else (0, 5)
    return ReceivedMessage(
        topic=topic,
        broker_name="b",
        queue_id=queue_id,
        queue_offset=offset,
        msg_id="ID",
        offset_msg_id="7F",
        body=b"x",
        properties={"TAGS": "B", **properties},
        flag=0,
        sys_flag=0,
        body_crc=0,
        store_size=100,
        physical_offset=1000,
        born_timestamp=born_ms,
        born_host="127.0.0.1:1",
        store_timestamp=NOW_MS + retries,
        store_host="127.0.0.1:2",
        reconsume_times=retries,
        prepared_transaction_offset=0,
    )


def place(committed: int | None, queue: MessageQueue = QUEUE, offset: int = 17, **changes: Any) -> Place:
    found = Place(queue.broker_name, queue.topic, queue.queue_id, offset, 0, 40, committed, 6, 4, 4)
    return replace(found, **changes)


def member(
    expression: str = "*", kind: str = TAG, held: dict[MessageQueue, ProcessQueueInfo] | None = None, **settings: str
) -> ConsumerRunningInfo:
    wanted = [subscription("Orders", expression, expression_type=kind)] if expression else []
    table = {QUEUE: ProcessQueueInfo(commit_offset=10)} if held is None else held
    return ConsumerRunningInfo(properties=settings, subscription_set=wanted, mq_table=table)


def online(expression: str = "*", kind: str = TAG, **changes: Any) -> ConsumerConnection:
    table = {"Orders": subscription("Orders", expression, expression_type=kind)} if expression else {}
    connections = [ClientConnection(client_id="c1", client_addr="127.0.0.1:3")]
    found = ConsumerConnection(connection_set=connections, message_model="CLUSTERING", subscription_table=table)
    found.consume_type, found.consume_from_where = "CONSUME_PASSIVELY", "CONSUME_FROM_LAST_OFFSET"
    return replace(found, **changes)


def facts(**changes: Any) -> Facts:
    """A message that a group online has not come to yet."""
    usual: dict[str, Any] = {
        "message": message(),
        "place": place(10),
        "config": SubscriptionGroupConfig(group_name="billing"),
        "connection": online(),
        "members": {"c1": member()},
    }
    return Facts(topic="Orders", group="billing", asked="message ID", now_ms=NOW_MS, **(usual | changes))


def nothing(**changes: Any) -> Facts:
    usual: dict[str, Any] = {"message": None, "place": None, "config": None, "connection": None, "members": {}}
    return facts(**(usual | changes))


SCHEDULED = message("SCHEDULE_TOPIC_XXXX", REAL_TOPIC="Orders")
TO_RETRY = message("SCHEDULE_TOPIC_XXXX", retries=2, REAL_TOPIC="%RETRY%billing", RETRY_TOPIC="Orders")
RETRIED = message("%RETRY%billing", retries=2, RETRY_TOPIC="Orders")
HALF = message("RMQ_SYS_TRANS_HALF_TOPIC", REAL_TOPIC="Orders", PGROUP="shop", TRANSACTION_CHECK_TIMES="4")
LATE_HALF = message("TRANS_CHECK_MAX_TIME_TOPIC", born_ms=NOW_MS - 300_000_000)
TIMED = message("rmq_sys_wheel_timer", born_ms=NOW_MS + 600_000, REAL_TOPIC="Orders", TIMER_DELIVER_MS="1")
RECALL = message("rmq_sys_wheel_timer", REAL_TOPIC="Orders", TIMER_DEL_UNIQKEY="Orders+ID")
PAST = place(18)
TWO = {"c1": member("A"), "c2": member("B || C")}
HOLDS_RETRIES = member(held={RETRY: ProcessQueueInfo()})
PULLED = ProcessQueueInfo(commit_offset=10, last_pull_timestamp=NOW_MS)
HELD = ProcessQueueInfo(commit_offset=17, cached_msg_count=3, cached_msg_min_offset=17, cached_msg_max_offset=19)
POPPED = ConsumerRunningInfo(mq_pop_table={MessageQueue("Orders", "b", -1): PopProcessQueueInfo(wait_ack_count=2)})
POPS_RETRIES = ConsumerRunningInfo(mq_pop_table={RETRY: PopProcessQueueInfo(wait_ack_count=2)})
TRACE = TraceRow(kind="Sub", group="billing", client_host="h", timestamp=NOW_MS, cost_ms=3, status="success")

CASES: dict[str, tuple[Facts, Cause, str]] = {
    # nothing is stored under that name in the topic
    "before the queue": (nothing(place=place(None, min_offset=20)), Cause.EXPIRED, "begins at 20 now"),
    "passed and deleted": (nothing(place=place(30, min_offset=20)), Cause.EXPIRED, "whether it was read in time"),
    "behind the queue": (nothing(place=place(None, max_offset=17)), Cause.NOT_STORED, "ends at offset 17"),
    "no such queue": (nothing(place=place(None, max_offset=0, read_queues=1)), Cause.NOT_STORED, "does not exist"),
    "of another cluster": (
        nothing(lookup=Lookup(address="10.0.0.1:10911")),
        Cause.NOT_IN_CLUSTER,
        "of broker 10.0.0.1:10911, which is not in this cluster, or down",
    ),
    "before the log": (
        nothing(lookup=Lookup(address="h:1", is_known=True, physical_offset=9, log_min=10)),
        Cause.EXPIRED,
        "the log of h:1 now begins after it",
    ),
    "no record there": (
        nothing(lookup=Lookup(address="h:1", is_known=True, physical_offset=11, log_min=10)),
        Cause.NOT_STORED,
        "no message of h:1 begins at that place",
    ),
    "a key": (nothing(lookup=Lookup(as_key=[message()])), Cause.WRONG_KIND_OF_ID, "1 message of topic Orders: ID"),
    "elsewhere": (nothing(lookup=Lookup(elsewhere=message("Bills"))), Cause.WRONG_TOPIC, "it was stored in Bills"),
    "nowhere": (
        nothing(lookup=Lookup(topics_searched=3, brokers=["b"])),
        Cause.NOT_STORED,
        "never stored, is deleted by now, or its broker is down",
    ),
    # it is stored where consumers do not come
    "delayed": (nothing(copies=[SCHEDULED], due_ms=NOW_MS + 1000), Cause.DELAYED, "at 2026-09-21T14:13:21Z"),
    "late": (nothing(copies=[SCHEDULED], due_ms=NOW_MS - 6000), Cause.DELAYED, "which is past"),
    "delayed, delivered": (facts(copies=[SCHEDULED]), Cause.WAITING, ""),
    "timed by a fast clock": (nothing(copies=[TIMED], due_ms=NOW_MS), Cause.CLOCK_SKEW, "10 minutes ahead"),
    "recalled": (nothing(copies=[SCHEDULED, RECALL]), Cause.RECALLED, "before it was due"),
    "half": (
        nothing(copies=[HALF], transaction=Transaction(half=HALF)),
        Cause.TRANSACTION_PENDING,
        "no end is recorded, 4 of 15 checks",
    ),
    "half without producers": (
        nothing(copies=[HALF], transaction=Transaction(half=HALF, producers=0, checks_max=5)),
        Cause.TRANSACTION_PENDING,
        "4 of 5 checks; no producer of group shop is online",
    ),
    "rolled back": (
        nothing(copies=[HALF], transaction=Transaction(half=HALF, is_ended=True)),
        Cause.ROLLED_BACK,
        "it ended, and Orders has nothing",
    ),
    "given up": (
        nothing(copies=[HALF], transaction=Transaction(half=HALF, is_ended=True, is_given_up=True)),
        Cause.GIVEN_UP,
        "no decision after 4 of 15 checks",
    ),
    "given up by a slow clock": (
        nothing(copies=[LATE_HALF], transaction=Transaction(half=LATE_HALF, is_given_up=True)),
        Cause.CLOCK_SKEW,
        "its producer's clock is 3 days behind the broker's",
    ),
    "committed": (facts(copies=[HALF], transaction=Transaction(half=HALF)), Cause.WAITING, ""),
    "committed, and delayed": (
        nothing(copies=[HALF, TIMED], transaction=Transaction(half=HALF, is_ended=True), due_ms=NOW_MS),
        Cause.CLOCK_SKEW,
        "will be delivered",
    ),
    # the group failed
    "dead": (
        facts(copies=[message("%DLQ%billing", retries=17), TO_RETRY], place=PAST),
        Cause.DEAD_LETTER,
        "failed 17 times, its consumer gave no reason, and is in %DLQ%billing",
    ),
    "dead with a reason": (
        facts(copies=[message("%DLQ%billing", retries=17, rmqkit_reason="ValueError: no stock")], place=PAST),
        Cause.DEAD_LETTER,
        "failed 17 times, ValueError: no stock, and is in %DLQ%billing",
    ),
    "to be retried": (
        facts(copies=[TO_RETRY], due_ms=NOW_MS, members={"c1": member(maxReconsumeTimes="7")}),
        Cause.RETRYING,
        "retry 2 of 7 comes at 2026-09-21T14:13:20Z",
    ),
    "to be retried, original deleted": (nothing(copies=[TO_RETRY], due_ms=NOW_MS), Cause.RETRYING, "retry 2 of 16"),
    "retry is due": (
        facts(copies=[TO_RETRY, RETRIED], place=place(4, RETRY, 5), members={"c1": HOLDS_RETRIES}),
        Cause.RETRYING,
        "etry 2 of 16 of message ID waits behind 1 message of queue 0 of %RETRY%billing on b",
    ),
    "retry is due, nobody there": (
        facts(copies=[RETRIED], place=place(5, RETRY, 5), connection=None, members={}),
        Cause.NO_CONSUMER_ONLINE,
        "its offset is 5, not past 5",
    ),
    "retried": (facts(copies=[TO_RETRY, RETRIED], place=place(6, RETRY, 5)), Cause.CONSUMED, "on retry 2"),
    # each client for itself
    "broadcasting": (
        facts(
            connection=online(message_model="BROADCASTING"),
            members={"c1": member(held={QUEUE: ProcessQueueInfo(commit_offset=18)}), "c2": member()},
        ),
        Cause.BROADCASTING,
        "1 of 2 clients online say",
    ),
    "not to broadcast": (
        facts(
            connection=online(message_model="BROADCASTING"),
            config=SubscriptionGroupConfig(group_name="billing", consume_broadcast_enable=False),
        ),
        Cause.BROADCAST_FORBIDDEN,
        "may not consume by broadcasting",
    ),
    # the group is past it
    "passed": (facts(place=PAST), Cause.CONSUMED, "its offset is 18, past 17, and it did not come back"),
    "passed, offline since": (facts(place=PAST, connection=None, members={}), Cause.CONSUMED, "brokers do not record"),
    "passed, disabled since": (
        facts(place=PAST, config=SubscriptionGroupConfig(consume_enable=False), is_fetched=True),
        Cause.CONSUMED,
        "",
    ),
    "passed, says its owner": (
        facts(members={"c1": member(held={QUEUE: ProcessQueueInfo(commit_offset=18)})}),
        Cause.CONSUMED,
        "its offset is 18",
    ),
    "traced": (facts(traces=[TRACE]), Cause.CONSUMED, "a trace says that its handler succeeded"),
    "skipped": (facts(place=PAST, is_fetched=False), Cause.SKIPPED, "the broker gave it nothing of that queue"),
    "passed and filtered": (facts(place=PAST, connection=online("A")), Cause.FILTERED_BY_TAG, "its tag is B"),
    "passed and filtered since": (
        facts(place=PAST, connection=online("A"), message=replace(message(), store_timestamp=-1)),
        Cause.FILTERED_BY_TAG,
        "may have been another when the group passed it",
    ),
    "passed, subscribed no more": (facts(place=PAST, connection=online("")), Cause.CONSUMED, ""),
    "popped": (facts(place=PAST, members={"c1": POPPED}), Cause.POPPED, "2 popped messages of queue 3"),
    "popped by others": (
        facts(place=PAST, members={"c1": POPS_RETRIES}),
        Cause.CONSUMED,
        "",
    ),
    # it cannot come to it
    "unknown": (facts(config=None, connection=None, members={}), Cause.GROUP_UNKNOWN, "b has no group billing"),
    "disabled": (facts(config=SubscriptionGroupConfig(consume_enable=False)), Cause.GROUP_DISABLED, "consumeEnable"),
    "forbidden": (facts(is_read_forbidden=True), Cause.READ_FORBIDDEN, "forbidden to read topic Orders on b"),
    "write only": (facts(place=place(10, perm=2)), Cause.TOPIC_NOT_READABLE, "its perm is 2"),
    "shrunk": (facts(place=place(10, read_queues=3)), Cause.QUEUE_NOT_READ, "3 read queues there"),
    "offline": (facts(connection=None, members={}), Cause.NO_CONSUMER_ONLINE, "its offset is 10, not past 17"),
    "never there": (
        facts(place=place(None), connection=None, members={}),
        Cause.NO_CONSUMER_ONLINE,
        "it has no offset there",
    ),
    # it does not want it
    "not subscribed": (facts(connection=online(""), members={"c1": member("")}), Cause.NOT_SUBSCRIBED, "Orders"),
    "to be filtered": (facts(connection=online("A"), members={"c1": member("A")}), Cause.FILTERED_BY_TAG, "to A, and"),
    "untagged": (
        facts(connection=online("A"), message=replace(message(), properties={})),
        Cause.FILTERED_BY_TAG,
        "its tag is none",
    ),
    "equal hashes": (  # "Aa" and "BB" have the same hash in Java: the broker lets it through, the client does not
        facts(connection=online("Aa"), message=message(TAGS="BB")),
        Cause.FILTERED_BY_TAG,
        "subscribes to Aa, and its tag is BB",
    ),
    "by properties": (
        facts(connection=online("a > 1", SQL92), message=message(a="1")),
        Cause.FILTERED_BY_SQL92,
        "a > 1",
    ),
    "satisfied": (facts(connection=online("a > 1", SQL92), message=message(a="2")), Cause.WAITING, ""),
    "not compiled": (facts(connection=online("a >", SQL92)), Cause.FILTERED_BY_SQL92, "a >"),
    "differ": (facts(connection=online("B || C"), members=TWO), Cause.SUBSCRIPTIONS_DIFFER, "c1 A, c2 B || C"),
    "differ, and one has none": (
        facts(members={"c1": member(), "c2": member("")}),
        Cause.SUBSCRIPTIONS_DIFFER,
        "c1 *, c2 nothing",
    ),
    "differ, and all want it": (facts(members={"c1": member(), "c2": member("B")}), Cause.WAITING, ""),
    # it has not come to it yet
    "nobody's": (facts(members={"c1": member(held={})}), Cause.NO_OWNER, "o client of group billing holds queue 3"),
    "dropped": (facts(members={"c1": member(held={QUEUE: ProcessQueueInfo(droped=True)})}), Cause.NO_OWNER, ""),
    "silent": (
        facts(members={"c1": None}),
        Cause.WAITING,
        "7 messages of queue 3 of Orders on b: its owner did not",
    ),
    "not fetched": (facts(members={"c1": member(held={QUEUE: PULLED})}), Cause.WAITING, "at 2026-09-21T14:13:20Z"),
    "never pulled": (facts(), Cause.WAITING, "c1 did not fetch it yet, it never pulled"),
    "to be popped": (facts(members={"c1": POPPED}), Cause.WAITING, "c1 pops it"),
    "held": (
        facts(members={"c1": member(held={QUEUE: HELD})}),
        Cause.WAITING,
        "waits as the next of queue 3 of Orders on b: c1 holds it, as the first of 3 messages",
    ),
    "not locked": (
        facts(members={"c1": member(PROP_CONSUMEORDERLY="true")}),
        Cause.WAITING,
        "has no lock",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_facts_lead_to_one_cause(name: str) -> None:
    found, cause, words = CASES[name]
    explained = judge(found)
    assert (explained.cause, words in explained.sentence) == (cause, True), explained.sentence
    assert explained.evidence
    assert "{" not in explained.remedy


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (Cause.DEAD_LETTER, ["rmq", "replay", "--dlq", "bill|ing"]),
        (Cause.GROUP_DISABLED, ["rmq", "group", "create", "bill|ing", "-s", "true"]),
        (Cause.SKIPPED, ["rmq", "offset", "reset", "bill|ing", "Orders", str(NOW_MS)]),
        (Cause.QUEUE_NOT_READ, ["rmq", "topic", "create", "Orders", "-b", "b", "-r", "4", "-w", "4"]),
    ],
)
def test_the_command_of_a_remedy_survives_a_shell(cause: Cause, words: list[str]) -> None:
    """The name of a group may have a bar, which would start another program."""
    found = next(case for case, of, _ in CASES.values() if of is cause)
    remedy = judge(replace(found, group="bill|ing")).remedy
    assert shlex.split(remedy[remedy.index("rmq ") :]) == words


def test_every_cause_has_a_case() -> None:
    assert {cause for _, cause, _ in CASES.values()} == set(Cause)


def test_evidence_names_what_was_found_and_who_reported_it() -> None:
    explained = judge(facts(copies=[TO_RETRY], due_ms=NOW_MS, is_fetched=True, traces=[TRACE]))
    assert [(one.name, one.value, one.source) for one in explained.evidence] == [
        ("stored in", "Orders, queue 3, offset 17, at 2026-09-21T14:13:20Z", "broker b"),
        ("stored in", "SCHEDULE_TOPIC_XXXX, queue 0, offset 5, failed 2 times, at 2026-09-21T14:13:20Z", "broker b"),
        ("id", "ID", "message"),
        ("tag", "B", "message"),
        ("due", "2026-09-21T14:13:20Z", "queue entry"),
        ("its offset", "17 of 0 to 40 in queue 3 of Orders on b", "broker b"),
        ("group's offset", 10, "broker b"),
        ("given to it", "at least one message", "broker b"),
        ("consumeEnable", "true", "broker b"),
        ("clients online", 1, "brokers"),
        ("subscription", "*", "brokers"),
        ("kind", "clustering passively from_last_offset", "brokers"),
        ("client", "c1 holds the queue, is at 10, 0 unfinished", "running info"),
        ("handler", "success, began at 2026-09-21T14:13:20Z", "trace of h"),
    ]


# -- the facts, found out at two brokers


@pytest.mark.real_time
async def test_a_message_is_found_by_whatever_names_it(name_servers: str) -> None:
    async with Admin(name_servers) as admin:
        await make_topic(admin, "Named")
        sent = await send(admin, *(Message(topic="Named", body=b"x", keys=[f"k{n}", "all"]) for n in range(4)))
        explainer = Explainer(admin, "Named", "nobody")
        for number, one in enumerate(sent):
            place = At(one.queue_id, one.queue_offset, one.broker_name)
            for named in (one.msg_id, one.offset_msg_id, Key(f"k{number}"), place):
                found = await explainer.explain(named)
                assert (found.cause, found.evidence[0].source) == (Cause.GROUP_UNKNOWN, f"broker {one.broker_name}")
                assert found.evidence[1].value == one.msg_id


@pytest.mark.real_time
async def test_a_name_has_to_be_that_of_one_message(name_servers: str) -> None:
    async with Admin(name_servers) as admin:
        await make_topic(admin, "Several")
        sent = await send(admin, *(Message(topic="Several", body=b"x", keys=["all"]) for _ in range(2)))
        with pytest.raises(SettingsError, match=rf"key all is that of 2 messages .*{sent[1].msg_id}"):
            await explain(admin, "Several", "nobody", Key("all"))
        with pytest.raises(SettingsError, match=r"on which broker.* broker-a, broker-b: name one"):
            await explain(admin, "Several", "nobody", At(0, 0))
        with pytest.raises(UnknownName, match=r"has no topic Severall: did you mean Several\?"):
            await explain(admin, "Severall", "nobody", "ID")
        assert (await explain(admin, "Several", "nobody", Key("none"))).cause is Cause.NOT_STORED
        assert (await explain(admin, "Several", "nobody", "all")).cause is Cause.WRONG_KIND_OF_ID


@pytest.mark.real_time
async def test_a_delayed_message_is_found_by_whatever_names_it(name_servers: str) -> None:
    """The offset message id of its send is that of the record among the delayed ones."""
    async with Admin(name_servers) as admin:
        await make_topic(admin, "Later")
        message = Message(topic="Later", body=b"x", keys=["late"], delay_level=18)
        sent = await admin.messages.send(message, broker="broker-b")
        for named in (sent.msg_id, sent.offset_msg_id, Key("late")):
            found = await explain(admin, "Later", "nobody", named)
            assert (found.cause, found.evidence[0].source) == (Cause.DELAYED, "broker broker-b")


@pytest.mark.real_time
async def test_a_trace_is_better_than_an_offset(name_servers: str) -> None:
    async with Admin(name_servers) as admin:
        await make_topic(admin, "Traced")
        (one,) = await send(admin, Message(topic="Traced", body=b"x"))
        begun = SubscribeBeforeTrace(1, "r", "tracing", "R1", one.msg_id, 0, None)
        done = SubscribeAfterTrace("R1", one.msg_id, 4, True, None, 0, 5, "tracing")
        async with Producer("tracer", name_servers) as producer:  # the topic comes to be by a send alone
            await producer.send(Message(topic=TRACE_TOPIC, body=encode_traces([begun, done]), keys=[one.msg_id]))
        assert (await explain(admin, "Traced", "tracing", one.msg_id)).cause is Cause.CONSUMED
        assert (await explain(admin, "Traced", "another", one.msg_id)).cause is Cause.GROUP_UNKNOWN


@pytest.mark.real_time
async def test_a_broker_may_forbid_reading_of_all_its_topics(name_servers: str) -> None:
    """Its topics keep their own permission; clients go by the route."""
    async with Admin(name_servers) as admin:
        await make_topic(admin, "Closed")
        await admin.groups.update("reader", {}, cluster="DefaultCluster")
        (one,) = await send(admin, Message(topic="Closed", body=b"x"))
        for data in (await admin.calls.route("Closed")).queue_datas:  # as with brokerPermission=2
            data.perm = Permission.WRITE
        found = await explain(admin, "Closed", "reader", one.msg_id)
        assert found.cause is Cause.TOPIC_NOT_READABLE
        assert "rmq broker perm rw" in found.remedy
