"""Pulls, held and answered (behaviour.md §4.1–§4.4, remoting.md §4.3.2)."""

from __future__ import annotations

import asyncio
import copy

import msgspec
import pytest
from msgspec import to_builtins

from rmqkit.broker.settings import BrokerRole
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_fields, decode_header
from rmqkit.protocol.message import read_messages
from rmqkit.protocol.record import record_properties
from rmqkit.protocol.schemas.clients import ConsumerData, HeartbeatData, SubscriptionData
from rmqkit.protocol.schemas.offsets import QueryConsumerOffsetRequest
from rmqkit.protocol.schemas.pull import ForbiddenType, PullFlag, PullMessageRequest, PullMessageResponse
from tests.broker.cluster import FAQ, Cluster


async def test_offsets_outside_the_queue_are_moved(cluster):
    await cluster.send()
    for offset, code, remark, following in [
        (1, ResponseCode.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE", 1),
        (8, ResponseCode.PULL_OFFSET_MOVED, "OFFSET_OVERFLOW_BADLY", 1),
    ]:
        answer = await cluster.pull(offset)
        assert (answer.code, answer.remark) == (code, remark)
        assert decode_header(answer, PullMessageResponse).next_begin_offset == following
    empty = await cluster.pull(queue_id=1)
    assert (empty.code, empty.remark) == (ResponseCode.PULL_NOT_FOUND, "NO_MESSAGE_IN_QUEUE")
    empty = await cluster.pull(5, queue_id=1)
    assert (empty.code, empty.remark) == (ResponseCode.PULL_OFFSET_MOVED, "NO_MESSAGE_IN_QUEUE")


async def test_a_tag_expression_filters(cluster):
    for tag in "ABCAB":
        await cluster.send(properties=f"TAGS\x01{tag}\x02")
    assert [m.tags for m in read_messages((await cluster.pull(expression="A || C")).body)] == ["A", "C", "A"]
    nothing = await cluster.pull(expression="Z")
    assert (nothing.code, nothing.remark) == (ResponseCode.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE")
    assert decode_header(nothing, PullMessageResponse).next_begin_offset == 5


async def test_a_held_pull_is_answered_by_the_message_it_waits_for(cluster):
    await cluster.send()
    waiting = asyncio.ensure_future(
        cluster.pull(1, expression="B", flags=PullFlag.SUBSCRIPTION | PullFlag.SUSPEND, suspend_ms=60_000)
    )
    while not len(cluster.standalone.broker.context.long_polling):
        await asyncio.sleep(0)
    await cluster.send(properties="TAGS\x01A\x02")
    assert not waiting.done()
    await cluster.send(properties="TAGS\x01B\x02", body=b"for me")
    assert [m.body for m in read_messages((await waiting).body)] == [b"for me"]


async def test_a_held_pull_ends_when_its_time_is_up(cluster):
    await cluster.send()
    answer = await cluster.pull(1, flags=PullFlag.SUBSCRIPTION | PullFlag.SUSPEND, suspend_ms=50)
    assert (answer.code, decode_header(answer, PullMessageResponse).next_begin_offset) == (19, 1)


async def test_a_pull_whose_client_is_gone_is_not_held_on(cluster):
    await cluster.send()
    other = cluster.new_client()
    flags = PullFlag.SUBSCRIPTION | PullFlag.SUSPEND
    waiting = asyncio.ensure_future(cluster.pull(1, flags=flags, suspend_ms=60_000, client=other))
    held = cluster.standalone.broker.context.long_polling
    while not len(held):
        await asyncio.sleep(0)
    await other.close()
    await asyncio.gather(waiting, return_exceptions=True)
    while len(held):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("pull", "code", "remark"),
    [
        ({"topic": "none"}, ResponseCode.TOPIC_NOT_EXIST, f"topic[none] not exist, apply first please! {FAQ}"),
        (
            {"queue_id": 4},
            ResponseCode.INVALID_PARAMETER,
            "queueId[4] is illegal, topic:[T] topicConfig.readQueueNums:[4] consumer:[/127.0.0.1:",
        ),
        ({"queue_id": -1}, ResponseCode.INVALID_PARAMETER, "queueId[-1] is illegal"),
        (
            {"group": "a b"},
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            f"subscription group [a b] does not exist, {FAQ}",
        ),
        ({"flags": 0}, ResponseCode.SUBSCRIPTION_NOT_EXIST, "the consumer's group info not exist"),
        (
            {"expression": "||"},
            ResponseCode.SUBSCRIPTION_PARSE_FAILED,
            "parse the consumer's subscription failed",
        ),
        (
            {"expression_type": "SQL92"},
            ResponseCode.SYSTEM_ERROR,
            "The broker does not support consumer to filter message by SQL92",
        ),
    ],
)
async def test_refused_pulls(pull, code, remark, cluster):
    await cluster.send()
    answer = await cluster.pull(**pull)
    assert answer.code == code
    assert answer.remark.startswith(remark)
    assert decode_fields(answer) == {}


async def test_registered_subscriptions_filter_and_have_to_be_the_newest(cluster):
    for tag in "AB":
        await cluster.send(properties=f"TAGS\x01{tag}\x02")
    await cluster.heartbeat("c1", ("T", "B"), version=5)
    assert [m.tags for m in read_messages((await cluster.pull(flags=0, version=5)).body)] == ["B"]
    for pull, code in [
        ({"version": 6}, ResponseCode.SUBSCRIPTION_NOT_LATEST),
        ({"topic": "%RETRY%g"}, ResponseCode.SUBSCRIPTION_NOT_EXIST),
    ]:
        assert (await cluster.pull(flags=0, **pull)).code == code


async def test_a_pull_commits_the_offset_it_carries(cluster):
    await cluster.send()
    await cluster.pull(flags=PullFlag.SUBSCRIPTION | PullFlag.COMMIT_OFFSET, commit=1)
    assert await cluster.number(RequestCode.QUERY_CONSUMER_OFFSET, QueryConsumerOffsetRequest("g", "T", 0)) == 1


async def test_a_pull_beyond_those_that_may_wait_is_refused_as_busy(monkeypatch, cluster):
    monkeypatch.setattr("rmqkit.broker.pull.long_polling.HELD_MAX", 1)

    await cluster.send()
    flags = PullFlag.SUBSCRIPTION | PullFlag.SUSPEND
    waiting = asyncio.ensure_future(cluster.pull(1, flags=flags, suspend_ms=60_000))
    held = cluster.standalone.broker.context.long_polling
    while not held.is_full:
        await asyncio.sleep(0)
    refused = await cluster.pull(1, flags=flags)
    assert (refused.code, refused.remark) == (2, "[OVERLOAD]system busy, start flow control for a while")
    await cluster.send()
    assert (await waiting).code == 0
    assert not held.is_full


# ---- every check (behaviour.md §4.1)


def context_of(cluster):
    return cluster.standalone.broker.context


async def hold(cluster, offset, **pull):
    """Send a pull that waits."""
    held = context_of(cluster).long_polling
    before = len(held)
    flags = pull.pop("flags", PullFlag.SUBSCRIPTION) | PullFlag.SUSPEND
    waiting = asyncio.ensure_future(cluster.pull(offset, flags=flags, suspend_ms=60_000, **pull))
    while len(held) == before:
        await asyncio.sleep(0)
    return waiting


def lite_pull():
    return PullMessageRequest(
        consumer_group="g", topic="T", queue_id=0, queue_offset=0, max_msg_nums=1, sys_flag=PullFlag.SUBSCRIPTION,
        commit_offset=0, suspend_timeout_millis=0, sub_version=0, subscription="*",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "code", "remark", "forbidden"),
    [
        ({"broker_permission": 2}, 16, "the broker[127.0.0.1] pulling message is forbidden", ForbiddenType.BROKER),
        ({"lite_pull": False}, 16, "the broker[127.0.0.1] for lite pull consumer is forbidden", ForbiddenType.BROKER),
        ({"reject_pull_consumers": True}, 24, "the consumer's group info not exist", None),
        ({"broker_role": BrokerRole.SLAVE}, 2, "[REJECTREQUEST]system busy, start flow control for a while", None),
        ({"broker_role": BrokerRole.SLAVE, "slave_read": True}, 0, "FOUND", None),
        ({}, 0, "FOUND", None),
    ],
)
async def test_settings_that_refuse_a_lite_pull(settings, code, remark, forbidden, cluster):
    await cluster.send()
    for name, value in settings.items():
        setattr(cluster.standalone.broker.context.settings, name, value)
    answer = await cluster.call(RequestCode.LITE_PULL_MESSAGE, lite_pull())
    assert answer.code == code
    assert answer.remark.startswith(remark)
    assert decode_fields(answer).get("forbiddenType") == (None if forbidden is None else str(int(forbidden)))


async def test_group_and_topic_close_a_pull_in_the_references_order(cluster):
    await cluster.send()
    await cluster.heartbeat("c1", ("T", "*"), message_model="BROADCASTING")
    context = context_of(cluster)
    group, topic = context.groups.get("g"), context.topics.get("T")
    context.groups.stored.forbidden_table["g"] = {"T": 1 << 2}

    async def refused():
        answer = await cluster.pull(flags=0)
        assert answer.code == ResponseCode.NO_PERMISSION
        return answer.remark, int(decode_fields(answer)["forbiddenType"])

    group.consume_enable, group.consume_broadcast_enable, topic.perm = False, False, 2
    assert await refused() == ("subscription group no permission, g", ForbiddenType.GROUP)
    group.consume_enable = True
    assert await refused() == ("the topic[T] pulling message is forbidden", ForbiddenType.TOPIC)
    topic.perm = 6
    remark = "the consumer group[g] can not consume by broadcast way"
    assert await refused() == (remark, ForbiddenType.BROADCAST)
    group.consume_broadcast_enable = True
    assert await refused() == ("the consumer group[g] is forbidden for topic[T]", ForbiddenType.SUBSCRIPTION)
    context.groups.stored.forbidden_table["g"] = {"T": 1}
    assert (await cluster.pull(flags=0)).code == 0


async def test_active_pull_consumers_can_be_refused(cluster):
    await cluster.send()
    cluster.standalone.broker.context.settings.reject_pull_consumers = True
    await cluster.heartbeat("c1", ("T", "*"), consume_type="CONSUME_ACTIVELY")
    assert (await cluster.pull(flags=0)).code == ResponseCode.SUBSCRIPTION_NOT_EXIST
    await cluster.heartbeat("c1", ("T", "*"), consume_type="CONSUME_PASSIVELY")
    assert (await cluster.pull(flags=0)).code == 0


async def test_an_inline_subscription_is_remembered_for_ten_minutes(cluster):
    await cluster.send()
    await cluster.pull(expression="A || B")
    clients = context_of(cluster).clients
    remembered = clients.subscription("g", "T")
    assert remembered.sub_string == "A || B"
    clients.close_silent()
    assert clients.subscription("g", "T") is remembered
    remembered.sub_version -= 600_001
    clients.close_silent()
    assert clients.subscription("g", "T") is None


async def test_a_reset_offset_is_answered_once_and_voids_what_the_pull_commits(cluster):
    for _ in range(3):
        await cluster.send()
    offsets = context_of(cluster).offsets
    offsets.reset("g", "T", 0, 1)
    flags = PullFlag.SUBSCRIPTION | PullFlag.COMMIT_OFFSET
    answer = await cluster.pull(3, flags=flags, commit=3)
    assert (answer.code, answer.remark) == (ResponseCode.PULL_OFFSET_MOVED, "OFFSET_RESET")
    header = decode_header(answer, PullMessageResponse)
    assert (header.next_begin_offset, header.min_offset, header.max_offset) == (1, 0, 3)
    assert offsets.get("g", "T", 0) == 1
    assert (await cluster.pull(1, flags=flags, commit=2)).code == 0
    assert offsets.get("g", "T", 0) == 2


async def test_a_slave_does_not_move_consumers(cluster):
    await cluster.send()
    settings = cluster.standalone.broker.context.settings
    settings.broker_role, settings.slave_read = BrokerRole.SLAVE, True
    for offset, code, remark, following in [
        (8, ResponseCode.PULL_RETRY_IMMEDIATELY, "OFFSET_OVERFLOW_BADLY", 8),
        (-1, ResponseCode.PULL_RETRY_IMMEDIATELY, "OFFSET_TOO_SMALL", -1),
        (1, ResponseCode.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE", 1),
    ]:
        answer = await cluster.pull(offset)
        assert (answer.code, answer.remark) == (code, remark)
        assert decode_header(answer, PullMessageResponse).next_begin_offset == following
    settings.offset_check_in_slave = True
    assert (await cluster.pull(8)).code == ResponseCode.PULL_OFFSET_MOVED


async def test_who_is_far_behind_is_sent_to_a_slave_where_slaves_serve(cluster):
    await cluster.send(body=b"x" * 100)
    await cluster.send(body=b"x" * 100)
    group = context_of(cluster).groups.get("g")
    group.which_broker_when_consume_slowly, group.broker_id = 7, 3
    reader = context_of(cluster).store.reader

    async def suggested():
        return decode_header(await cluster.pull(count=1), PullMessageResponse).suggest_which_broker_id

    assert await suggested() == 0
    cluster.standalone.broker.context.settings.slave_read = True
    assert await suggested() == 3
    reader._memory_bytes = 10
    assert await suggested() == 7


async def test_extreme_numbers_get_the_references_answers(cluster):
    await cluster.send()
    for pull, code in [
        ({"count": 0}, 0),
        ({"count": -1}, 0),
        ({"count": (1 << 31) - 1}, 0),
        ({"offset": -1}, 21),
        ({"offset": 1 << 62}, 21),
        ({"version": -1}, 0),
        ({"queue_id": (1 << 31) - 1}, 29),
        ({"suspend_ms": -(1 << 63)}, 0),
    ]:
        assert (await cluster.pull(**pull)).code == code


@pytest.mark.parametrize("value", [None, "", "x", "99999999999999999999999"])
async def test_fields_that_cannot_be_read_are_an_error_and_disturb_nobody(value, cluster):
    may_miss = ("commitOffset", "subVersion", "suspendTimeoutMillis")

    await cluster.send()
    whole = {key: str(field) for key, field in to_builtins(lite_pull()).items() if field is not None}
    assert (await cluster.ask(11, **{k: v for k, v in whole.items() if k not in may_miss})).code == 0
    for name in ("queueId", "queueOffset", "maxMsgNums", "sysFlag", *(may_miss if value is not None else ())):
        fields = {key: field for key, field in {**whole, name: value}.items() if field is not None}
        command = Command(RequestCode.PULL_MESSAGE, fields=fields)
        answer = await cluster.client.call(cluster.standalone.broker_address, command, 60_000)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert name in answer.remark
    assert (await cluster.pull()).code == 0


# ---- held pulls


async def test_a_held_pull_is_checked_again_when_it_is_woken(cluster):
    await cluster.send()
    waiting = await hold(cluster, 1)
    context_of(cluster).groups.get("g").consume_enable = False
    await cluster.send()
    assert (await waiting).code == ResponseCode.NO_PERMISSION


async def test_a_reset_reaches_a_held_pull_with_the_next_message(cluster):
    await cluster.send()
    waiting = await hold(cluster, 1)
    context_of(cluster).offsets.reset("g", "T", 0, 0)
    await cluster.send()
    assert (await waiting).remark == "OFFSET_RESET"


async def test_short_polling_holds_a_pull_for_a_short_time_whatever_it_requests(tmp_path):
    async with Cluster(tmp_path / "store", broker={"long_polling": False, "short_polling_ms": 20}) as cluster:
        await cluster.send()
        flags = PullFlag.SUBSCRIPTION | PullFlag.SUSPEND
        answer = await cluster.pull(1, flags=flags, suspend_ms=3_600_000)
        assert answer.code == ResponseCode.PULL_NOT_FOUND


async def test_a_pull_that_other_tags_passed_by_moves_on(monkeypatch, cluster):
    monkeypatch.setattr("rmqkit.broker.pull.long_polling.PASSED_BY_MS", 1)

    await cluster.send()
    waiting = await hold(cluster, 1, expression="B")
    await cluster.send(properties="TAGS\x01A\x02")
    answer = await waiting
    assert answer.code == ResponseCode.PULL_RETRY_IMMEDIATELY
    assert decode_header(answer, PullMessageResponse).next_begin_offset == 2


# ---- SQL92


async def sql_heartbeat(cluster, expression, version=1, *, group="g", kind="SQL92"):
    wanted = SubscriptionData(topic="T", sub_string=expression, expression_type=kind, sub_version=version)
    data = HeartbeatData(
        clientID="c1", consumerDataSet=[ConsumerData(group_name=group, subscription_data_set=[wanted])]
    )
    return await cluster.call(RequestCode.HEART_BEAT, body=msgspec.json.encode(data))


async def send_numbers(cluster, *numbers):
    for number in numbers:
        await cluster.send(body=str(number).encode(), properties=f"a\x01{number}\x02")


def bodies(answer):
    return [message.body for message in read_messages(answer.body)]


SQL = {"broker": {"property_filter": True}}


async def test_sql_filters_by_the_records_properties(tmp_path):
    async with Cluster(tmp_path / "store", **SQL) as cluster:
        await send_numbers(cluster, 3, 7, 5, 9)
        answer = await cluster.pull(expression="a > 5", expression_type="SQL92")
        assert bodies(answer) == [b"7", b"9"]
        nothing = await cluster.pull(expression="a > 50", expression_type="SQL92")
        assert (nothing.code, nothing.remark) == (ResponseCode.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE")
        assert decode_header(nothing, PullMessageResponse).next_begin_offset == 4


@pytest.mark.parametrize(("expression", "kind"), [("a >", "SQL92"), ("", "SQL92"), ("a > 5", "FOO")])
async def test_an_inline_expression_that_cannot_be_read_delivers_nothing(expression, kind, tmp_path):
    async with Cluster(tmp_path / "store", **SQL) as cluster:
        await send_numbers(cluster, 7)
        answer = await cluster.pull(expression=expression, expression_type=kind)
        assert (answer.code, answer.remark) == (23, "parse the consumer's subscription failed")


async def test_registered_sql_needs_its_filter_and_the_newest(caplog, tmp_path):
    async with Cluster(tmp_path / "store", **SQL) as cluster:
        await send_numbers(cluster, 3, 7)
        await sql_heartbeat(cluster, "a > 5", 5)
        assert bodies(await cluster.pull(flags=0, version=5)) == [b"7"]
        assert (await cluster.pull(flags=0, version=6)).code == ResponseCode.SUBSCRIPTION_NOT_LATEST
        with caplog.at_level("CRITICAL"):
            await sql_heartbeat(cluster, "a >", 6)
        answer = await cluster.pull(flags=0, version=6)
        assert answer.code == ResponseCode.FILTER_DATA_NOT_EXIST
        remark = "The broker's consumer filter data is not exist!Your expression may be wrong!"
        assert answer.remark == remark
        await sql_heartbeat(cluster, "a < 5", 7)
        assert bodies(await cluster.pull(flags=0, version=7)) == [b"3"]
        context_of(cluster).filters.get("T", "g").data.client_version = 6
        answer = await cluster.pull(flags=0, version=7)
        assert (answer.code, answer.remark) == (28, "the consumer's consumer filter data not latest")


async def test_registered_sql_filters_a_topic_that_is_created_later(tmp_path):
    async with Cluster(tmp_path / "store", **SQL) as cluster:
        await sql_heartbeat(cluster, "a > 5")
        await send_numbers(cluster, 3, 7)
        assert bodies(await cluster.pull(flags=0, version=1)) == [b"7"]


async def test_registered_sql_is_refused_without_the_setting(cluster):
    await send_numbers(cluster, 7)
    await sql_heartbeat(cluster, "a > 5")
    answer = await cluster.pull(flags=0)
    remark = "The broker does not support consumer to filter message by SQL92"
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, remark)


async def test_a_held_sql_pull_waits_for_a_message_it_wants(tmp_path):
    async with Cluster(tmp_path / "store", **SQL) as cluster:
        await cluster.send()
        await sql_heartbeat(cluster, "a > 5")
        inline = await hold(cluster, 1, expression="a > 5", expression_type="SQL92")
        registered = await hold(cluster, 1, flags=0)
        await send_numbers(cluster, 3)
        assert not inline.done()
        assert not registered.done()
        await send_numbers(cluster, 7)
        assert bodies(await inline) == bodies(await registered) == [b"7"]


async def test_retried_messages_are_filtered_where_the_setting_says_so(tmp_path):
    async with Cluster(tmp_path / "store", **SQL) as cluster:
        await sql_heartbeat(cluster, "a > 5")
        for number in (3, 7):
            properties = f"a\x01{number}\x02RETRY_TOPIC\x01T\x02"
            await cluster.send("%RETRY%g", body=str(number).encode(), properties=properties)
        pull = {"topic": "%RETRY%g"}
        assert bodies(await cluster.pull(**pull)) == [b"3", b"7"]
        cluster.standalone.broker.context.settings.filter_retries = True
        assert bodies(await cluster.pull(**pull)) == [b"7"]


async def test_bitmaps_let_a_pull_skip_messages_without_a_look_at_the_log(monkeypatch, tmp_path):
    async with Cluster(
        tmp_path / "store",
        broker={"property_filter": True, "filter_bitmaps": True},
        store={"enable_consume_queue_ext": True, "consume_queue_ext_file_bytes": 4096},
    ) as cluster:
        await sql_heartbeat(cluster, "a > 5")
        await sql_heartbeat(cluster, "a > 50", group="other")
        for name in ("g", "other"):
            context_of(cluster).filters.get("T", name).data.born_time -= 1  # in the millisecond of the sends
        await send_numbers(cluster, 3, 7, 4, 60)
        looked: list[memoryview] = []
        monkeypatch.setattr(
            "rmqkit.broker.tables.filters.record_properties", lambda r: looked.append(r) or record_properties(r)
        )
        assert bodies(await cluster.pull(flags=0, version=1)) == [b"7", b"60"]
        assert len(looked) == 2
        assert bodies(await cluster.pull(flags=0, version=1, group="other")) == [b"60"]
        assert len(looked) == 3


async def test_filters_survive_a_restart_with_their_bitmaps(tmp_path):
    settings = {
        "broker": {"property_filter": True, "filter_bitmaps": True},
        "store": {"enable_consume_queue_ext": True},
    }

    async with Cluster(tmp_path / "store", **copy.deepcopy(settings)) as cluster:
        await sql_heartbeat(cluster, "a > 5")
        await send_numbers(cluster, 3, 7)
        born = context_of(cluster).filters.get("T", "g").data.born_time
    async with Cluster(tmp_path / "store", **copy.deepcopy(settings)) as cluster:
        found = context_of(cluster).filters.get("T", "g")
        assert (found.data.born_time, found.data.dead_time >= born) == (born, True)
        await sql_heartbeat(cluster, "a > 5")
        assert found.data.dead_time == 0
        assert bodies(await cluster.pull(flags=0, version=1)) == [b"7"]
