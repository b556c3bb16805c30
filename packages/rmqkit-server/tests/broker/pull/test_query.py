"""Messages, queue entries and trying subscriptions: 12, 33, 46, 321 (remoting.md §4.3.6, behaviour.md §2.6, §8.16)."""

from __future__ import annotations

import msgspec
import pytest

from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_header
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.ids import decode_offset_id, offset_id
from rmqkit.protocol.message import read_messages
from rmqkit.protocol.properties import java_hash
from rmqkit.protocol.record import pack_host
from rmqkit.protocol.schemas.clients import CheckClientBody, SubscriptionData
from rmqkit.protocol.schemas.pull import (
    QueryConsumeQueueBody,
    QueryMessageRequest,
    QueryMessageResponse,
    ViewMessageRequest,
)
from rmqkit.protocol.schemas.send import SendMessageResponse
from tests.broker.cluster import Cluster

UNIQUE_KEY = "U0000000000000000000000000000002"
FOR_EVER = (1 << 63) - 1


async def send_keyed(cluster, count=4):
    for i in range(count):
        unique_key = f"U{i:031d}"
        await cluster.send(
            body=b"m%d" % i, properties=f"KEYS\x01k{i} all\x02TAGS\x01t{i % 2}\x02UNIQ_KEY\x01{unique_key}\x02"
        )


async def query(cluster, key, *, topic="T", count=64, begin=0, end=FOR_EVER, **fields):
    header = QueryMessageRequest(
        topic=topic, key=key, max_num=count, begin_timestamp=begin, end_timestamp=end, **fields
    )
    return await cluster.call(RequestCode.QUERY_MESSAGE, header)


def bodies(answer):
    return [message.body for message in read_messages(answer.body)]


async def test_messages_are_found_by_key_newest_kept_oldest_first(cluster):
    questions = [
        ({"key": "k1"}, [b"m1"]),
        ({"key": "all"}, [b"m0", b"m1", b"m2", b"m3"]),
        ({"key": "all", "count": 2}, [b"m2", b"m3"]),
        ({"key": UNIQUE_KEY}, [b"m2"]),
        ({"key": UNIQUE_KEY, "is_unique_key": True, "count": 0}, [b"m2"]),
        ({"key": UNIQUE_KEY, "index_type": "U"}, [b"m2"]),
        ({"key": "k1", "index_type": "K"}, [b"m1"]),
        ({"key": "t1", "index_type": "T"}, [b"m1", b"m3"]),
        ({"key": "k1", "begin": -5}, [b"m1"]),
    ]

    await send_keyed(cluster)
    newest = read_messages((await query(cluster, "k3")).body)[0]
    for question, expected in questions:
        answer = await query(cluster, **question)
        assert answer.code == ResponseCode.SUCCESS
        assert bodies(answer) == expected
        header = decode_header(answer, QueryMessageResponse)
        assert header.index_last_update_phyoffset == newest.physical_offset
        assert header.index_last_update_timestamp == newest.store_timestamp


async def test_nothing_found_is_reported(cluster):
    questions = [
        {"key": "none"},
        {"key": ""},
        {"key": "k1", "topic": "U"},
        {"key": "t1"},
        {"key": "k1", "end": 0},
        {"key": "k1", "begin": FOR_EVER - 1},
        {"key": "k1", "count": 0},
    ]

    await send_keyed(cluster)
    for question in questions:
        answer = await query(cluster, **question)
        assert (answer.code, answer.remark) == (22, "can not find message, maybe time range not correct")
        assert decode_header(answer, QueryMessageResponse) == QueryMessageResponse(0, 0)
    assert (await query(cluster, "k1", count=-1)).code == ResponseCode.SYSTEM_ERROR
    assert len(bodies(await query(cluster, UNIQUE_KEY, count=-1, is_unique_key=True))) == 1


async def test_counts_are_bounded(cluster):
    await send_keyed(cluster, 70)
    assert len(bodies(await query(cluster, "all", count=1000))) == 64
    assert len(bodies(await query(cluster, "all", is_unique_key=True, count=1000))) == 32


async def test_an_answer_fits_into_a_frame(tmp_path):
    async with Cluster(tmp_path / "store", store={"commit_log_file_bytes": 32 << 20}) as cluster:
        for _ in range(5):
            await cluster.send(body=b"x" * (4 << 20), properties="KEYS\x01big\x02")
        answer = await query(cluster, "big")
        assert len(read_messages(answer.body)) == 3


async def test_an_index_that_is_off_finds_nothing(tmp_path):
    async with Cluster(tmp_path / "store", store={"message_index_enable": False}) as cluster:
        await send_keyed(cluster)
        assert (await query(cluster, "k1")).code == ResponseCode.QUERY_NOT_FOUND


async def test_a_message_is_viewed_by_the_offset_in_its_id(cluster):
    await send_keyed(cluster)
    message_id = decode_header(await cluster.send(body=b"seen"), SendMessageResponse).msg_id
    offset = decode_offset_id(message_id)[2]
    v6_id = offset_id(pack_host("::1", 10911), offset)
    assert (len(message_id), len(v6_id)) == (32, 56)
    for one in (message_id, v6_id):
        answer = await cluster.call(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageRequest(decode_offset_id(one)[2]))
        assert bodies(answer) == [b"seen"]


async def test_no_message_begins_at_an_offset(cluster):
    await send_keyed(cluster)
    for offset in (1, -1, 10**12, FOR_EVER, -FOR_EVER - 1):
        answer = await cluster.call(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageRequest(offset))
        assert (answer.code, answer.remark) == (1, f"can not find message by the offset, {offset}")


@pytest.mark.parametrize(
    "fields",
    [
        {"topic": None},
        {"key": None},
        {"key": ""},
        {"topic": ""},
        {"key": "none"},
        {"beginTimestamp": 9, "endTimestamp": 8},
    ],
)
async def test_a_question_without_topic_or_key_finds_nothing(fields, cluster):
    await send_keyed(cluster)
    whole = {"topic": "T", "key": "all", "maxNum": 9, "beginTimestamp": 0, "endTimestamp": FOR_EVER, **fields}
    asked = {name: value for name, value in whole.items() if value is not None}
    assert (await cluster.ask(RequestCode.QUERY_MESSAGE, **asked)).code == ResponseCode.QUERY_NOT_FOUND


# ---- queue entries


async def entries(cluster, **fields):
    answer = await cluster.ask(
        RequestCode.QUERY_CONSUME_QUEUE, **{"topic": "T", "queueId": 0, "index": 0, "count": 9, **fields}
    )
    if answer.code or answer.remark:
        return answer.code, answer.remark
    return decode_as(answer.body, QueryConsumeQueueBody)


async def test_entries_of_a_queue_are_shown(cluster):
    await send_keyed(cluster)
    shown = await entries(cluster, index=1, count=2)
    assert (shown.min_queue_index, shown.max_queue_index) == (0, 4)
    assert [entry.tags_code for entry in shown.queue_data] == [java_hash("t1"), java_hash("t0")]
    first, second = shown.queue_data
    assert second.physic_offset == first.physic_offset + first.physic_size
    assert (shown.filter_data, shown.subscription_data) == (None, None)
    assert len((await entries(cluster, count=1 << 30)).queue_data) == 4
    for count in ("", "x", -1, 0):
        assert (await entries(cluster, count=count)).queue_data == []
    assert len((await entries(cluster, queueId="x", index="")).queue_data) == 4  # taken for 0
    for index in (-1, 4, 1 << 60):
        assert await entries(cluster, index=index) == (0, f"Index {index} of 0@T is not exist!")
    for topic, queue_id in (("T", 1), ("T", -1), ("none", 0)):
        assert await entries(cluster, topic=topic, queueId=queue_id) == (1, f"{queue_id}@{topic} is not exist!")
    assert (await cluster.ask(RequestCode.QUERY_CONSUME_QUEUE)).code == 1


@pytest.mark.parametrize("with_units", [False, True])
async def test_what_a_group_thinks_of_entries_is_reported_those_with_a_unit(with_units, tmp_path):
    async with Cluster(tmp_path / "store", store={"enable_consume_queue_ext": with_units}) as cluster:
        await cluster.heartbeat("c1", ("T", "t1"))
        await send_keyed(cluster)
        shown = await entries(cluster, consumerGroup="g")
        assert (shown.subscription_data.sub_string, shown.filter_data) == ("t1", "null")
        assert [entry.eval for entry in shown.queue_data] == [False, with_units, False, with_units]
        assert (await entries(cluster, consumerGroup="h")).filter_data == "h@T is not online!"


async def test_an_sql_filter_is_shown_and_judged(tmp_path):
    async with Cluster(
        tmp_path / "store",
        broker={"property_filter": True, "filter_bitmaps": True},
        store={"enable_consume_queue_ext": True},
    ) as cluster:
        await cluster.ask(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, {"topicConfigList": [{"topicName": "T"}]})
        wanted = {"topic": "T", "subString": "TAGS = 't1'", "expressionType": "SQL92", "subVersion": 1}
        consumer = {"groupName": "g", "subscriptionDataSet": [wanted]}
        await cluster.ask(RequestCode.HEART_BEAT, {"clientID": "c1", "consumerDataSet": [consumer]})
        cluster.standalone.broker.context.filters.get("T", "g").data.born_time = 0  # before the messages
        await send_keyed(cluster)
        shown = await entries(cluster, consumerGroup="g")
        assert msgspec.json.decode(shown.filter_data)["expression"] == "TAGS = 't1'"
        assert [entry.eval for entry in shown.queue_data] == [False, True, False, True]


# ---- trying a subscription


async def check(cluster, expression, kind):
    wanted = SubscriptionData(topic="T", sub_string=expression, expression_type=kind)
    body = msgspec.json.encode(CheckClientBody(client_id="c", group="g", subscription_data=wanted))
    answer = await cluster.call(RequestCode.CHECK_CLIENT_CONFIG, body=body)
    return answer.code, answer.remark or ""


@pytest.mark.parametrize(
    ("expression", "kind", "code", "remark"),
    [
        ("x", "TAG", 0, ""),
        ("x", None, 0, ""),
        ("a > 2", "SQL92", 0, ""),
        ("a >", "SQL92", 23, 'Encountered "<EOF>" at line 1, column 3.'),
        ("5", "SQL92", 23, "Expression will not result in a boolean value: 5"),
        ("a != 3", "SQL92", 23, 'Lexical error at line 1, column 3.  Encountered: "!" (33)'),
        ("x" * 20_000, "SQL92", 23, "the expression has 20000 characters: 16384 are allowed"),
        ("a > 2", "FOO", 23, "expression type FOO is not known: use TAG or SQL92"),
    ],
)
async def test_a_subscription_is_tried_before_it_is_used(expression, kind, code, remark, tmp_path):
    async with Cluster(tmp_path / "store", broker={"property_filter": True}) as cluster:
        found, told = await check(cluster, expression, kind)
        assert found == code
        assert told.startswith(remark)


async def test_sql_is_refused_without_the_setting(cluster):
    remark = "The broker does not support consumer to filter message by SQL92"
    assert await check(cluster, "a > 2", "SQL92") == (ResponseCode.SYSTEM_ERROR, remark)
    assert await check(cluster, "x", "TAG") == (0, "")


@pytest.mark.parametrize(("body", "code"), [(b"", 0), (b"{}", 0), (b'{"clientId":"c"}', 0), (b"x", 1), (b"[]", 1)])
async def test_a_check_without_a_subscription_passes(body, code, caplog, cluster):
    with caplog.at_level("CRITICAL"):
        assert (await cluster.call(RequestCode.CHECK_CLIENT_CONFIG, body=body)).code == code
