"""POP at the broker: messages are popped, hidden, acknowledged and redelivered (behaviour.md §4.7 to §4.14)."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from rmqkit.errors import RemotingError
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_header
from rmqkit.protocol.ids import decode_pop_handle, encode_acked
from rmqkit.protocol.message import read_messages
from rmqkit.protocol.schemas.pop import (
    Assignments,
    BatchAck,
    BatchAckBody,
    MessageRequestMode,
    NotificationRequest,
    NotificationResponse,
    PeekMessageRequest,
    PollingInfoRequest,
    PollingInfoResponse,
    PopMessageResponse,
    QueryAssignmentBody,
)
from rmqkit.store.settings import FlushDiskType
from tests.broker.cluster import Cluster
from tests.broker.pops import ack, change, context_of, now_ms, pop, sent
from tests.waiting import SECONDS


async def settled(cluster, count=0):
    """Wait until this number of check points is pending."""
    async with asyncio.timeout(SECONDS):
        while len(context_of(cluster).pop.check_points) != count:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("flush", FlushDiskType)
async def test_what_was_popped_is_hidden_until_it_is_redelivered_counted_again(flush, tmp_path):
    async with Cluster(tmp_path / "store", store={"flush_disk_type": flush}) as cluster:
        await sent(cluster, *"abc")
        first = await pop(cluster, invisible_time=4000)
        assert (list(first), first.header.rest_num) == (["a", "b", "c"], 0)
        assert (first.header.start_offset_info, first.header.msg_offset_info) == ("0 0 0", "0 0 0,1,2")
        assert (await pop(cluster)).code == ResponseCode.POLLING_TIMEOUT
        assert (await ack(cluster, first.handles["b"])).code == 0
        messages, handles = {}, {}
        while len(messages) < 2:  # one answer has both, unless the first message alone wakes the waiting pop
            again = await pop(cluster, poll_time=8000, max_msg_nums=2)
            messages |= again.messages
            handles |= again.handles
        assert {(one.topic, one.reconsume_times) for one in messages.values()} == {("T", 1)}
        assert sorted(messages) == ["a", "c"]
        assert messages["a"].properties["1ST_POP_TIME"] == str(first.header.pop_time)
        assert handles["a"].split()[4] == "1"
        for handle in handles.values():
            assert (await ack(cluster, handle)).code == 0
        await settled(cluster)


async def test_the_second_spelling_of_retry_topics_and_messages_as_they_are_stored(tmp_path):
    async with Cluster(tmp_path / "store", broker={"retry_topic_v2": True, "pops_keep_retry_topic": True}) as cluster:
        await sent(cluster, "a")
        await pop(cluster, invisible_time=100)
        again = await pop(cluster, poll_time=9000)
        assert again.messages["a"].topic == "%RETRY%g+T"
        assert again.header.msg_offset_info == "2 0 0"


async def test_one_queue_or_all_and_no_more_than_is_requested(cluster):
    for queue_id in range(3):
        await sent(cluster, f"{queue_id}-0", f"{queue_id}-1", queue_id=queue_id)
    one = await pop(cluster, queue_id=1, max_msg_nums=1)
    assert (list(one), one.header.rest_num) == (["1-0"], 1)
    others = await pop(cluster, max_msg_nums=3)
    assert (len(others.messages), others.header.rest_num) == (3, 2)
    assert len((await pop(cluster)).messages) == 2
    assert len((await pop(cluster, consumer_group="other")).messages) == 6


async def test_filters_choose_and_the_offset_moves_on(cluster):
    for number in range(4):
        await sent(cluster, str(number), properties=f"TAGS\x01{'AB'[number % 2]}\x02n\x01{number}\x02")
    assert list(await pop(cluster, exp="B")) == ["1", "3"]
    assert context_of(cluster).offsets.get("g", "T", 0) == 4
    sql = await pop(cluster, consumer_group="s", exp="n > 2", exp_type="SQL92")
    assert (list(sql), sql.header.start_offset_info) == (["3"], "0 0 3")
    assert (await pop(cluster, exp="n >", exp_type="SQL92")).code == ResponseCode.SUBSCRIPTION_PARSE_FAILED


async def test_a_pop_waits_for_a_message_of_its_filter(cluster):
    await sent(cluster, "first")
    await pop(cluster)
    tagged = asyncio.create_task(pop(cluster, exp="B", poll_time=10_000))
    other = asyncio.create_task(pop(cluster, consumer_group="other", poll_time=10_000, queue_id=0))
    assert list(await other) == ["first"]
    header = PollingInfoRequest(consumer_group="g", topic="T", queue_id=-1)
    async with asyncio.timeout(SECONDS):
        while True:
            answer = await cluster.call(RequestCode.POLLING_INFO, header)
            if decode_header(answer, PollingInfoResponse).polling_num == 1:
                break
    await sent(cluster, "A", properties="TAGS\x01A\x02")
    await sent(cluster, "B", properties="TAGS\x01B\x02")
    assert list(await tagged) == ["B"]
    assert (await pop(cluster, poll_time=100)).code == ResponseCode.POLLING_TIMEOUT


async def test_several_that_wait_share_what_comes(cluster):
    await sent(cluster, "first")
    await pop(cluster)
    waiting = [asyncio.create_task(pop(cluster, poll_time=10_000, max_msg_nums=1)) for _ in range(4)]
    async with asyncio.timeout(SECONDS):
        while len(context_of(cluster).pop.waiting) < 4:
            await asyncio.sleep(0.01)
    await sent(cluster, *"wxyz")
    assert sorted(body for answer in await asyncio.gather(*waiting) for body in answer) == list("wxyz")
    full = await pop(cluster, poll_time=5000, consumer_group="g2", born_time=now_ms())
    assert len(full.messages) == 5


async def test_there_is_room_for_so_many_that_wait(tmp_path):
    async with Cluster(tmp_path / "store", broker={"pops_held_per_queue_max": 1}) as cluster:
        await sent(cluster, "first")
        await pop(cluster)
        waiting = asyncio.create_task(pop(cluster, poll_time=10_000))
        async with asyncio.timeout(SECONDS):
            while not len(context_of(cluster).pop.waiting):
                await asyncio.sleep(0.01)
        assert (await pop(cluster, poll_time=10_000)).code == ResponseCode.POLLING_FULL
        await sent(cluster, "next")
        assert list(await waiting) == ["next"]


async def test_who_waits_is_forgotten_with_its_connection_and_answered_when_the_broker_stops(cluster):
    await sent(cluster, "first")
    await pop(cluster)
    waiting = context_of(cluster).pop.waiting
    gone = cluster.new_client()
    for client in (gone, cluster.client):
        cluster.client, kept = client, cluster.client
        asked = asyncio.create_task(pop(cluster, poll_time=10_000))
        async with asyncio.timeout(SECONDS):
            while not len(waiting):
                await asyncio.sleep(0.01)
        cluster.client = kept
        if client is gone:
            await gone.close()
            with pytest.raises(RemotingError):
                await asked
            async with asyncio.timeout(SECONDS):
                while len(waiting):
                    await asyncio.sleep(0.01)
    waiting.close()
    assert (await asked).code == ResponseCode.POLLING_TIMEOUT
    assert (await pop(cluster, poll_time=10_000)).code == ResponseCode.POLLING_FULL


@pytest.mark.parametrize("merges", [False, True])
async def test_acks_of_many_and_what_a_restart_knows(tmp_path, merges):
    """The second broker reads the pending messages from the revive topic."""
    settings = {"broker": {"pop_buffer_merge": merges}}

    async def before(cluster):
        await sent(cluster, *"abcdef")
        first = await pop(cluster, invisible_time=5000)
        handle = decode_pop_handle(first.handles["a"])
        batch = BatchAck(
            group="g",
            topic="T",
            start_offset=0,
            queue_id=0,
            revive_queue_id=handle.revive_queue_id,
            pop_time=handle.pop_time,
            invisible_time=5000,
            acked=encode_acked(0, [0, 1, 4]),
        )
        answer = await cluster.ask(RequestCode.BATCH_ACK_MESSAGE, BatchAckBody(broker_name="broker-a", acks=[batch]))
        assert answer.code == 0
        assert (await ack(cluster, first.handles["d"])).code == 0

    async def after(cluster):
        assert len(context_of(cluster).pop.check_points) == 1
        assert (await pop(cluster)).code == ResponseCode.POLLING_TIMEOUT
        again = await pop(cluster, poll_time=10_000, max_msg_nums=2)
        assert sorted(again) == ["c", "f"]
        for handle in again.handles.values():
            assert (await ack(cluster, handle)).code == 0
        await settled(cluster)

    async def at_last(cluster):
        assert len(context_of(cluster).pop.check_points) == 0
        revive = "rmq_sys_REVIVE_LOG_DefaultCluster"
        offsets = context_of(cluster).offsets.queues("CID_RMQ_SYS_REVIVE_GROUP", revive)
        store = context_of(cluster).store
        assert offsets
        assert all(offset == store.max_offset(revive, queue) - 1 for queue, offset in offsets.items())
        assert (await pop(cluster)).code == ResponseCode.POLLING_TIMEOUT

    for scenario in (before, after, at_last):
        async with Cluster(tmp_path / "store", **settings) as cluster:
            await scenario(cluster)


async def test_another_invisible_time_is_a_pop_of_its_own(cluster):
    await sent(cluster, *"ab")
    first = await pop(cluster)
    code, answer = await change(cluster, first.handles["a"], 200)
    assert (code, answer.invisible_time, answer.revive_qid) == (0, 200, first.header.revive_qid)
    code, answer = await change(cluster, first.handles["b"], 200)
    renewed = f"1 {answer.pop_time} 200 {answer.revive_qid} 0 broker-a 0 1"
    assert (await ack(cluster, renewed)).code == 0
    assert list(await pop(cluster, poll_time=5000)) == ["a"]
    code, _ = await change(cluster, first.handles["a"], 200, offset=2)
    assert code == ResponseCode.NO_MESSAGE


async def test_handles_may_name_the_record_s_place_in_the_log(cluster):
    await sent(cluster, "1", "2", "3", "4")
    popped = await pop(cluster)
    first, second, third, fourth = (popped.handles[body] for body in "1234")
    for handle in (f"{first} 0", f"{second} 123"):
        assert (await ack(cluster, handle)).code == 0
    assert (await change(cluster, f"{third} 246", 1000))[0] == 0
    assert (await ack(cluster, fourth, extra_info="1 2 3")).code == ResponseCode.SYSTEM_ERROR
    assert (await ack(cluster, f"{fourth} 369")).code == 0
    await settled(cluster, 1)  # the third message, until its invisible time expires


async def test_refusals(cluster):
    await sent(cluster, *"ab")
    first = await pop(cluster)
    topic = "topic[Nope] not exist, apply first please! \nSee https://rocketmq.apache.org/docs/bestPractice/06FAQ"
    for fields, code, remark in (
        ({"topic": "Nope"}, ResponseCode.TOPIC_NOT_EXIST, topic),
        ({"queue_id": 99}, ResponseCode.INVALID_PARAMETER, "queueId[99] is illegal, topic:[T] topicConfig.readQ"),
        (
            {"max_msg_nums": 33},
            ResponseCode.INVALID_PARAMETER,
            "the broker[127.0.0.1] pop message's num is greater",
        ),
        ({"born_time": 1}, ResponseCode.POLLING_TIMEOUT, "the broker[127.0.0.1] pop message is timeout too much"),
    ):
        refused = await pop(cluster, **fields)
        assert (refused.code, refused.remark[: len(remark)]) == (code, remark)
    handle = first.handles["a"]
    for fields, code in (
        ({"offset": 99}, ResponseCode.NO_MESSAGE),
        ({"queue_id": 77}, ResponseCode.MESSAGE_ILLEGAL),
        ({"topic": "Nope"}, ResponseCode.TOPIC_NOT_EXIST),
        ({"extra_info": "rubbish"}, ResponseCode.SYSTEM_ERROR),
        ({"extra_info": "7 7 7 7 0 broker-a 0"}, ResponseCode.SUCCESS),
    ):
        assert (await ack(cluster, handle, **fields)).code == code
    assert (await cluster.ask(RequestCode.BATCH_ACK_MESSAGE)).code == ResponseCode.NO_MESSAGE


async def test_peeking_leaves_no_trace(cluster):
    await sent(cluster, *"abc")
    header = PeekMessageRequest(consumer_group="g", topic="T", queue_id=-1, max_msg_nums=2)
    for _ in range(2):
        answer = await cluster.call(RequestCode.PEEK_MESSAGE, header)
        assert [one.body for one in read_messages(answer.body)] == [b"a", b"b"]
        assert decode_header(answer, PopMessageResponse).rest_num == 1
    await pop(cluster)
    assert (await cluster.call(RequestCode.PEEK_MESSAGE, header)).code == ResponseCode.PULL_NOT_FOUND


async def test_a_notification_reports_that_there_is_something(cluster):
    async def told(cluster, poll_ms):
        header = NotificationRequest(consumer_group="g", topic="T", queue_id=-1, poll_time=poll_ms, born_time=now_ms())
        return decode_header(await cluster.call(RequestCode.NOTIFICATION, header), NotificationResponse).has_msg

    await sent(cluster, "a")
    assert await told(cluster, 0)
    await pop(cluster)
    assert not await told(cluster, 50)
    waiting = asyncio.create_task(told(cluster, 10_000))
    async with asyncio.timeout(SECONDS):
        while not len(context_of(cluster).pop.notifications):
            await asyncio.sleep(0.01)
    await sent(cluster, "b")
    assert await waiting


async def test_what_is_popped_in_order_blocks_its_queue_until_it_is_acknowledged(cluster):
    await sent(cluster, *"abc")
    ordered = {"order": True, "queue_id": 0, "max_msg_nums": 2}
    first = await pop(cluster, **ordered, attempt_id="1")
    assert (list(first), first.header.revive_qid, first.header.order_count_info) == (["a", "b"], 999, "0 0 0")
    assert (await pop(cluster, **ordered, attempt_id="2")).code == ResponseCode.POLLING_TIMEOUT
    first = await pop(cluster, **ordered, attempt_id="1")
    assert (list(first), first.header.order_count_info) == (["a", "b"], "0 0 0")
    assert (await ack(cluster, first.handles["a"])).code == 0
    code, answer = await change(cluster, first.handles["b"], 300)
    assert (code, answer.revive_qid, answer.invisible_time >= 300) == (0, 999, True)
    second = await pop(cluster, **ordered, attempt_id="3", poll_time=5000)
    assert (list(second), second.header.start_offset_info) == (["b", "c"], "0 0 1")
    assert second.header.order_count_info == "0 qo0%1 1;0 0 0"
    for handle in second.handles.values():
        assert (await ack(cluster, handle)).code == 0
    assert context_of(cluster).offsets.get("g", "T", 0) == 3
    waiting = asyncio.create_task(pop(cluster, **ordered, attempt_id="4", poll_time=5000))
    await sent(cluster, "d")
    assert list(await waiting) == ["d"]


async def test_what_was_popped_in_order_is_known_after_a_restart(tmp_path):
    ordered = {"order": True, "queue_id": 0, "invisible_time": 60_000}

    async with Cluster(tmp_path / "store") as cluster:
        await sent(cluster, *"ab")
        assert list(await pop(cluster, **ordered, attempt_id="1")) == ["a", "b"]
    async with Cluster(tmp_path / "store") as cluster:
        assert (await pop(cluster, **ordered, attempt_id="2")).code == ResponseCode.POLLING_TIMEOUT
        assert list(await pop(cluster, **ordered, attempt_id="1")) == ["a", "b"]


@pytest.mark.parametrize(
    "limits", [{"pop_in_flight_limited": True, "pop_in_flight_max": 2}, {"pop_check_points_max": 1}]
)
async def test_a_group_may_not_have_more_in_flight_than_it_should(limits, tmp_path):
    async with Cluster(tmp_path / "store", broker=limits) as cluster:
        await sent(cluster, *"abcd")
        first = await pop(cluster, max_msg_nums=2)
        assert (await pop(cluster)).code == ResponseCode.POLLING_TIMEOUT
        for body in first if "pop_check_points_max" in limits else "a":
            assert (await ack(cluster, first.handles[body])).code == 0
        assert list(await pop(cluster)) == ["c", "d"]


async def test_a_new_group_may_begin_at_the_end_and_a_reset_moves_it(cluster):
    await sent(cluster, *"abc")
    assert list(await pop(cluster, init_mode=1)) == list("abc"), "the whole queue is in memory"
    context_of(cluster).offsets.reset("g", "T", 0, 1)
    assert list(await pop(cluster)) == ["b", "c"]
    context_of(cluster).offsets.commit("g", "T", 0, 99)
    await sent(cluster, "d")
    assert context_of(cluster).offsets.get("g", "T", 0) == 99
    assert (await pop(cluster)).code == ResponseCode.POLLING_TIMEOUT
    assert context_of(cluster).offsets.get("g", "T", 0) == 4


async def assigned(cluster, client_id, group="g", strategy="AVG", topic="T"):
    """Return the mode and the queue id of the queues that a client is to use."""
    body = QueryAssignmentBody(topic=topic, consumer_group=group, client_id=client_id, strategy_name=strategy)
    answer = await cluster.ask(RequestCode.QUERY_ASSIGNMENT, body)
    assert answer.code == 0
    found = msgspec.json.decode(answer.body, type=Assignments).message_queue_assignments
    return [(one.mode, one.message_queue.queue_id) for one in found]


async def set_mode(cluster, share=0, topic="T", mode="POP"):
    body = MessageRequestMode(topic=topic, consumer_group="g", mode=mode, pop_share_queue_num=share)
    return await cluster.ask(RequestCode.SET_MESSAGE_REQUEST_MODE, body)


async def test_the_broker_shares_out_queues_and_says_how_to_take_them(tmp_path):
    async def members(cluster):
        await sent(cluster, "a")
        clients = [cluster.new_client() for _ in range(3)]
        for number, client in enumerate(clients):
            await cluster.heartbeat(f"c{number}", ("T", "*"), client=client)
        return clients

    async with Cluster(tmp_path / "store") as cluster:
        clients = await members(cluster)
        shares = [await assigned(cluster, f"c{i}") for i in range(3)]
        assert shares == [[("PULL", 0), ("PULL", 1)], [("PULL", 2)], [("PULL", 3)]]
        assert await assigned(cluster, "c0", strategy="AVG_BY_CIRCLE") == [("PULL", 0), ("PULL", 3)]
        assert await assigned(cluster, "nobody") == []
        assert (await set_mode(cluster)).code == 0
        assert [await assigned(cluster, f"c{i}") for i in range(3)] == [[("POP", -1)]] * 3
        assert {mode for i in range(3) for mode, _ in await assigned(cluster, f"c{i}", topic="%RETRY%g")} == {"PULL"}
        for client in clients:
            await client.close()
    async with Cluster(tmp_path / "store") as cluster:
        clients = await members(cluster)
        assert await assigned(cluster, "c1") == [("POP", -1)], "the mode survives a restart"
        assert (await set_mode(cluster, share=1)).code == 0
        assert await assigned(cluster, "c1") == [("POP", 2), ("POP", 3)]
        assert await assigned(cluster, "c2") == [("POP", 0), ("POP", 1), ("POP", 3)]
        assert (await set_mode(cluster, topic="%RETRY%g")).code == ResponseCode.NO_PERMISSION
        assert (await set_mode(cluster, topic="Nope")).code == ResponseCode.TOPIC_NOT_EXIST
        for client in clients:
            await client.close()


async def test_a_reset_is_given_to_who_waits(cluster):
    await sent(cluster, *"ab")
    await pop(cluster)
    asked = asyncio.create_task(pop(cluster, poll_time=10_000))
    async with asyncio.timeout(SECONDS):
        while not len(context_of(cluster).pop.waiting):
            await asyncio.sleep(0.01)
    fields = {"topic": "T", "group": "g", "timestamp": -1, "isForce": "true", "queueId": 0, "offset": 1}
    assert (await cluster.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, **fields)).code == 0
    assert list(await asked) == ["b"]


async def held(cluster, count=1):
    async with asyncio.timeout(SECONDS):
        while len(context_of(cluster).pop.waiting) != count:
            await asyncio.sleep(0.01)


async def test_a_topic_and_its_retry_topic_may_both_be_waited_for(cluster):
    await sent(cluster, "a")
    await pop(cluster)
    context_of(cluster).topics.ensure("%RETRY%g_T", 1)
    own = asyncio.create_task(pop(cluster, poll_time=10_000))
    retries = asyncio.create_task(pop(cluster, topic="%RETRY%g_T", poll_time=10_000))
    await held(cluster, 2)
    await sent(cluster, "b", queue_id=1)
    assert list(await own) == ["b"]
    context_of(cluster).pop.waiting.close()
    assert (await retries).code == ResponseCode.POLLING_TIMEOUT


async def test_a_topic_that_goes_while_a_pop_waits_is_reported_and_leaves_no_offset(cluster):
    await sent(cluster, "a")
    await pop(cluster)
    waiting = asyncio.create_task(pop(cluster, queue_id=0, poll_time=10_000))
    await held(cluster)
    own = context_of(cluster)
    own.topics.remove("T")
    own.offsets.remove_topic("T")
    own.pop.waiting.wake("T", "g")
    assert (await waiting).code == ResponseCode.TOPIC_NOT_EXIST
    assert own.offsets.get("g", "T", 0) is None


async def test_an_ack_in_order_whose_pop_a_crash_forgot_skips_no_message(cluster):
    await sent(cluster, *"abc")
    ordered = {"order": True, "queue_id": 0}
    first = await pop(cluster, **ordered)
    context_of(cluster).pop.orders.remove_queue("T", "g", 0)
    assert (await ack(cluster, first.handles["c"])).code == 0
    assert (await ack(cluster, first.handles["a"])).code == 0
    assert list(await pop(cluster, **ordered)) == ["b", "c"]
