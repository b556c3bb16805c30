"""The exact bounds of POP requests, and the answers to each kind (behaviour.md §4.6, §4.8, §4.10, §4.14)."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from rmqkit.broker.durability import Outcome
from rmqkit.filter.sql92 import prepare
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_header
from rmqkit.protocol.ids import encode_acked
from rmqkit.protocol.message import read_messages
from rmqkit.protocol.properties import encode_properties, tags_code
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.pop import (
    BatchAck,
    BatchAckBody,
    ChangeInvisibleTimeResponse,
    NotificationRequest,
    NotificationResponse,
    PeekMessageRequest,
    PollingInfoRequest,
    PollingInfoResponse,
    PopMessageResponse,
)
from rmqkit.protocol.schemas.topics import TopicConfig
from rmqkit.store.dispatcher import DispatchRequest
from rmqkit.store.message_store import PutResult, PutStatus
from tests.broker.pop.parts import NOW_MS, Peer, PopBroker
from tests.waiting import until

OK, TIMED_OUT = ResponseCode.SUCCESS, ResponseCode.POLLING_TIMEOUT


@pytest.fixture
async def broker(tmp_path):
    broker = PopBroker(tmp_path)
    yield broker
    broker.close()


def arrive(broker, *bodies, **fields):
    """Store messages and pass them to the requests that wait."""
    broker.put(*bodies, **fields)
    service = broker.pop_service
    for polling in (service.waiting, service.notifications):
        polling.arrived([DispatchRequest("T", fields.get("queue", 0), 0, 0, 0, 0, 0, 0, b"")])


async def ticks(count=3):
    for _ in range(count):
        await asyncio.sleep(0)


def has_message(peer):
    (answer,) = peer.answers
    return decode_header(answer, NotificationResponse).has_msg


# -- refusals


@pytest.mark.parametrize("kind", ["pop", "notification"])
@pytest.mark.parametrize(
    ("born_ms", "poll_ms", "is_late"),
    [
        (NOW_MS - 500, 0, False),
        (NOW_MS - 501, 0, True),
        (NOW_MS - 1500, 1000, False),
        (NOW_MS - 1501, 1000, True),
        (0, 0, False),
    ],
)
async def test_a_request_is_too_late_more_than_half_a_second_after_its_time(
    kind, born_ms, poll_ms, is_late, broker, monkeypatch
):
    monkeypatch.setattr("rmqkit.broker.pop.handlers._LATE_MS", 500)  # the other tests have more time
    broker.put("a")
    fields = {"born_time": born_ms, "poll_time": poll_ms}
    if kind == "pop":
        answer = await broker.ask(RequestCode.POP_MESSAGE, broker.pop_header(**fields))
    else:
        answer = await broker.ask(RequestCode.NOTIFICATION, broker.pop_header(NotificationRequest, **fields))
    assert answer.code == (TIMED_OUT if is_late else OK)
    assert ("is timeout too much" in (answer.remark or "")) is is_late


@pytest.mark.parametrize(("count", "is_refused"), [(1, False), (32, False), (33, True)])
async def test_a_pop_requests_32_messages_at_most(count, is_refused, broker):
    broker.put(*"ab")
    popped = await broker.pop(max_msg_nums=count)
    assert (popped.code == ResponseCode.INVALID_PARAMETER) is is_refused
    assert list(popped) == ([] if is_refused else list("ab")[:count])


REQUESTS = {
    "pop": (RequestCode.POP_MESSAGE, {}),
    "peek": (RequestCode.PEEK_MESSAGE, {"kind": PeekMessageRequest}),
    "notification": (RequestCode.NOTIFICATION, {"kind": NotificationRequest}),
    "polling info": (RequestCode.POLLING_INFO, {"kind": PollingInfoRequest}),
}


@pytest.mark.parametrize("request_name", REQUESTS)
async def test_each_request_is_refused_for_an_unknown_place_or_one_that_must_not_be_read(request_name, broker):
    code, fields = REQUESTS[request_name]

    async def answer(**changes):
        return (await broker.ask(code, broker.pop_header(**fields | changes))).code

    broker.put("a")
    assert await answer(queue_id=1) != ResponseCode.INVALID_PARAMETER
    assert await answer(queue_id=2) == ResponseCode.INVALID_PARAMETER
    assert await answer(topic="U") == ResponseCode.TOPIC_NOT_EXIST
    broker.topics.put(TopicConfig("W", 2, 2, 2), TopicConfig("R", 2, 2, 4))
    assert await answer(topic="W") == ResponseCode.NO_PERMISSION
    assert await answer(topic="R") not in (ResponseCode.NO_PERMISSION, ResponseCode.TOPIC_NOT_EXIST)
    await broker.groups.put_shared(SubscriptionGroupConfig(group_name="g", consume_enable=False))
    assert await answer() == ResponseCode.NO_PERMISSION
    assert await answer(consumer_group="bad name!") == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    broker.settings.broker_permission = 2
    assert await answer(consumer_group="h") == ResponseCode.NO_PERMISSION


async def test_a_filter_that_cannot_be_read_is_refused(broker):
    popping = broker.wait_for_pop(exp="a >", exp_type="SQL92")
    await until(lambda: popping.answers)  # a thread may have to prepare the parser first
    assert popping.answers[0].code == ResponseCode.SUBSCRIPTION_PARSE_FAILED


# -- waiting


@pytest.mark.parametrize(("poll_ms", "waits"), [(-1, False), (0, False), (1, True)])
async def test_only_requests_with_time_wait(poll_ms, waits, broker):
    popping, noting = broker.wait_for_pop(poll_time=poll_ms), broker.wait_for_notification(poll_time=poll_ms)
    service = broker.pop_service
    assert (len(service.waiting), len(service.notifications)) == (waits, waits)
    assert [len(peer.answers) for peer in (popping, noting)] == [1 - waits] * 2
    if not waits:
        assert popping.answers[0].code == TIMED_OUT
        assert not has_message(noting)


async def test_a_request_that_waits_is_answered_when_a_message_arrives(broker):
    popping, noting = broker.wait_for_pop(), broker.wait_for_notification(consumer_group="h")
    assert (popping.answers, noting.answers) == ([], [])
    arrive(broker, "a")
    await ticks()
    assert [one.body for one in read_messages(popping.answers[0].payload)] == [b"a"]
    assert has_message(noting)


async def test_a_notification_is_answered_at_once_if_there_is_a_message(broker):
    broker.put("a")
    assert has_message(broker.wait_for_notification())
    assert has_message(broker.wait_for_notification(poll_time=0))
    assert has_message(broker.wait_for_notification(queue_id=0))
    assert not has_message(broker.wait_for_notification(queue_id=1, poll_time=0))
    await broker.pop()
    assert not has_message(broker.wait_for_notification(poll_time=0))


async def test_a_request_for_which_there_is_no_room_gets_an_answer_that_says_so(tmp_path):
    broker = PopBroker(tmp_path, pops_held_max=0)
    (answer,) = broker.wait_for_pop().answers
    assert answer.code == ResponseCode.POLLING_FULL
    (answer,) = broker.wait_for_notification().answers
    header = decode_header(answer, NotificationResponse)
    assert (answer.code, header.has_msg, header.polling_full) == (OK, False, True)
    broker.close()


async def test_the_requests_that_wait_are_counted_by_queue(broker):
    for queue_id in (-1, 1, 1):
        broker.wait_for_pop(queue_id=queue_id)
    broker.wait_for_notification(queue_id=0)
    counts = []
    for queue_id in (-1, 0, 1):
        answer = await broker.ask(RequestCode.POLLING_INFO, broker.pop_header(PollingInfoRequest, queue_id=queue_id))
        counts.append(decode_header(answer, PollingInfoResponse).polling_num)
    assert counts == [1, 0, 2]


@pytest.mark.parametrize(
    ("born_ms", "left_ms"), [(NOW_MS, 1000), (NOW_MS - 300, 700), (NOW_MS - 1200, -200), (NOW_MS + 300, 1000)]
)
async def test_a_request_waits_for_the_rest_of_its_time(born_ms, left_ms, broker, monkeypatch):
    held = []
    monkeypatch.setattr(broker.pop_service.waiting, "hold", lambda one: held.append(one) or True)
    broker.wait_for_pop(poll_time=1000, born_time=born_ms)
    assert [one.until_ms - NOW_MS for one in held] == [left_ms]


async def test_a_request_that_waits_wants_the_messages_of_its_filter_only(broker, monkeypatch):
    held = []
    monkeypatch.setattr(broker.pop_service.waiting, "hold", lambda one: held.append(one) or True)
    broker.wait_for_pop()
    broker.wait_for_pop(exp="A")
    broker.wait_for_pop(exp="n > 2", exp_type="SQL92")
    arrivals = [
        DispatchRequest("T", 0, 0, tags_code, 0, 0, 0, 0, properties)
        for tags_code, properties in ((ord("A"), b"TAGS\x01A\x02n\x013\x02"), (ord("B"), b"TAGS\x01B\x02n\x011\x02"))
    ]
    wanted = [[one.wants(arrival) for arrival in arrivals] for one in held]
    assert wanted == [[True, True], [True, False], [True, False]]


async def test_a_pop_that_leaves_messages_wakes_the_next_one(broker):
    first, second, third = (broker.wait_for_pop(max_msg_nums=1) for _ in range(3))
    broker.put("a", "b")
    broker.pop_service.waiting.wake("T", "g")
    await ticks(9)
    assert [len(peer.answers) for peer in (first, second, third)] == [1, 1, 0]


async def test_a_place_that_is_refused_while_a_request_waits_is_the_answer(broker):
    popping, noting = broker.wait_for_pop(), broker.wait_for_notification()
    broker.topics.remove("T")
    for polling in (broker.pop_service.waiting, broker.pop_service.notifications):
        polling.wake("T", "g")
    await ticks()
    assert [peer.answers[0].code for peer in (popping, noting)] == [ResponseCode.TOPIC_NOT_EXIST] * 2


async def test_a_request_that_waits_is_answered_at_its_end_without_a_message(broker):
    popping, noting = broker.wait_for_pop(), broker.wait_for_notification()
    broker.pop_service.waiting.close()
    broker.pop_service.notifications.close()
    await ticks()
    assert popping.answers[0].code == TIMED_OUT
    assert not has_message(noting)


# -- popped messages


async def test_a_pop_has_its_messages_its_rest_and_its_handles(broker):
    broker.put(*"abc")
    broker.put("d", queue=1)
    popped = await broker.pop(max_msg_nums=2, queue_id=0)
    assert (popped.code, list(popped), popped.header.rest_num) == (OK, ["a", "b"], 1)
    assert popped.header == PopMessageResponse(
        pop_time=NOW_MS,
        invisible_time=60_000,
        revive_qid=0,
        rest_num=1,
        start_offset_info="0 0 0",
        msg_offset_info="0 0 0,1",
    )
    assert broker.pending == {("T", "g", 0, 0, NOW_MS): {0, 1}}
    assert broker.offsets.get("g", "T", 0) == 2
    again = await broker.pop()
    assert (sorted(again), again.header.rest_num, again.header.revive_qid) == (["c", "d"], 0, 1)


async def test_a_one_way_pop_is_not_answered(broker):
    broker.put("a")
    assert await broker.ask(RequestCode.POP_MESSAGE, broker.pop_header(), one_way=True) is None


@pytest.mark.parametrize(("extra", "frames"), [(0, 1), (1, 0)])
async def test_an_answer_of_up_to_256_kib_is_joined_into_one_piece(extra, frames, tmp_path, monkeypatch):
    broker = PopBroker(tmp_path, log_file_bytes=1 << 20)
    broker.put("")
    overhead = broker.store.max_physical_offset
    broker.put("x" * (262_144 - overhead + extra), queue=1)
    sent = []
    monkeypatch.setattr(Peer, "send_frame", lambda peer, *pieces: sent.append(sum(map(len, pieces))))
    broker.wait_for_pop(queue_id=1)
    await ticks()
    assert len(sent) == frames
    broker.close()


async def test_a_peek_reads_the_same_and_pops_nothing(broker):
    broker.put(*"abc")
    for count, expected in ((2, [b"a", b"b"]), (33, [b"a", b"b", b"c"])):
        answer = await broker.ask(RequestCode.PEEK_MESSAGE, broker.pop_header(PeekMessageRequest, max_msg_nums=count))
        assert [one.body for one in read_messages(answer.payload)] == expected
        assert decode_header(answer, PopMessageResponse).rest_num == 3 - len(expected)
    assert (broker.pending, broker.offsets.get("g", "T", 0)) == ({}, None)
    await broker.pop()
    answer = await broker.ask(RequestCode.PEEK_MESSAGE, broker.pop_header(PeekMessageRequest))
    assert (answer.code, answer.remark) == (ResponseCode.PULL_NOT_FOUND, "NO_MESSAGE_IN_QUEUE")


async def test_one_peek_in_five_reads_retries_first(broker, monkeypatch):
    broker.topics.ensure("%RETRY%g_T", 1)
    broker.put("retry", topic="%RETRY%g_T")
    broker.put("own")
    first = []
    for number in range(5):
        monkeypatch.setattr("random.randrange", lambda stop, number=number: number if stop == 5 else 0)
        answer = await broker.ask(RequestCode.PEEK_MESSAGE, broker.pop_header(PeekMessageRequest, max_msg_nums=1))
        first += [one.body for one in read_messages(answer.payload)]
    assert sorted(first) == [b"own"] * 4 + [b"retry"]


async def test_a_peek_reads_32_messages_at_most(broker):
    broker.put(*map(str, range(40)))
    answer = await broker.ask(RequestCode.PEEK_MESSAGE, broker.pop_header(PeekMessageRequest, max_msg_nums=99))
    assert len(list(read_messages(answer.payload))) == 32


# -- acks


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"topic": "U"}, ResponseCode.TOPIC_NOT_EXIST),
        ({"queue_id": -1}, ResponseCode.MESSAGE_ILLEGAL),
        ({"queue_id": 2}, ResponseCode.MESSAGE_ILLEGAL),
        ({"queue_id": 1}, ResponseCode.NO_MESSAGE),
        ({"offset": -1}, ResponseCode.NO_MESSAGE),
        ({"offset": 3}, ResponseCode.NO_MESSAGE),
        ({"offset": 2}, OK),
        ({"offset": 0}, OK),
    ],
)
async def test_an_ack_is_for_a_queue_and_an_offset_that_exist(fields, code, broker):
    broker.put(*"ab")
    popped = await broker.pop()
    handle = popped.handles["b"]
    assert (await broker.ack(handle, **fields)).code == code
    left = {0, 1} - ({fields["offset"]} if code == OK else set())
    assert broker.pending == {("T", "g", 0, 0, NOW_MS): left}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"topic": "U"}, ResponseCode.TOPIC_NOT_EXIST),
        ({"queue_id": -1}, ResponseCode.MESSAGE_ILLEGAL),
        ({"queue_id": 2}, ResponseCode.MESSAGE_ILLEGAL),
        ({"offset": -1}, ResponseCode.NO_MESSAGE),
        ({"offset": 2}, ResponseCode.NO_MESSAGE),
        ({"offset": 1}, OK),
        ({"offset": 0}, OK),
    ],
)
async def test_a_new_invisible_time_is_for_a_message_that_exists(fields, code, broker):
    broker.put(*"ab")
    popped = await broker.pop()
    broker.clock.ms += 5
    answer = await broker.change(popped.handles["b"], 1000, **fields)
    assert answer.code == code
    if code == OK:
        offset = fields["offset"]
        assert broker.pending == {
            ("T", "g", 0, 0, NOW_MS): {0, 1} - {offset},
            ("T", "g", 0, offset, NOW_MS + 5): {offset},
        }
        assert decode_header(answer, ChangeInvisibleTimeResponse) == ChangeInvisibleTimeResponse(
            pop_time=NOW_MS + 5, invisible_time=1000, revive_qid=0
        )


async def test_two_changes_in_one_millisecond_are_two_pops(broker):
    broker.put("a")
    popped = await broker.pop()
    answer = await broker.change(popped.handles["a"], 1000)
    assert decode_header(answer, ChangeInvisibleTimeResponse).pop_time == NOW_MS + 1
    log = broker.pop_service.check_points
    for ahead_ms in (0, 2):
        log.add("T", "g", 0, [0], pop_time=NOW_MS + ahead_ms, invisible_ms=1000, queue=0)
    answer = await broker.change(f"0 {NOW_MS + 1} 1000 0 0 broker-a 0 0", 1000)
    assert decode_header(answer, ChangeInvisibleTimeResponse).pop_time == NOW_MS + 3


@pytest.mark.parametrize(("queue", "expected"), [(0, 0), (1, 1), (2, 1), (7, 1)])
async def test_a_change_for_a_revive_queue_that_does_not_exist_uses_the_next_one(queue, expected, broker):
    broker.put("a")
    await broker.pop()
    answer = await broker.change(f"0 {NOW_MS} 60000 {queue} 0 broker-a 0 0", 1000)
    assert decode_header(answer, ChangeInvisibleTimeResponse).revive_qid == expected


async def test_a_change_that_the_store_refuses_leaves_the_old_time(broker, monkeypatch):
    broker.put("a")
    popped = await broker.pop()
    refused = PutResult(PutStatus.SERVICE_NOT_AVAILABLE, reason="no space")
    monkeypatch.setattr(broker.store, "put", lambda message: refused)
    answer = await broker.change(popped.handles["a"], 1000)
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "no space")
    answer = await broker.ack(popped.handles["a"])
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "no space")
    assert broker.pending == {("T", "g", 0, 0, NOW_MS): {0}}


async def test_handles_of_one_pop_differ_in_their_last_word_only(broker):
    broker.put(*"abcd")
    popped = await broker.pop()
    broker.put("e", queue=1)
    broker.clock.ms += 1
    other = await broker.pop()
    for body in "ab":
        assert (await broker.ack(popped.handles[body])).code == OK
    assert (await broker.ack(other.handles["e"])).code == OK
    assert (await broker.ack(popped.handles["c"] + " 12")).code == OK
    assert broker.pending == {("T", "g", 0, 0, NOW_MS): {3}}
    damaged = popped.handles["d"].replace(" 0 broker-a", " 9 broker-a")
    assert (await broker.ack(popped.handles["d"], extra_info=damaged)).code == ResponseCode.SYSTEM_ERROR
    assert (await broker.ack(popped.handles["d"])).code == OK
    assert broker.pending == {}


async def test_a_one_way_ack_is_handled_and_not_answered(broker):
    broker.put("a")
    popped = await broker.pop()
    assert await broker.ack(popped.handles["a"], one_way=True) is None
    assert broker.pending == {}


def batch(offsets, *, start=0, queue_id=0, pop_time=NOW_MS, revive_queue=0, retry="0", group="g"):
    return BatchAck(
        group=group,
        topic="T",
        retry=retry,
        start_offset=start,
        queue_id=queue_id,
        revive_queue_id=revive_queue,
        pop_time=pop_time,
        invisible_time=60_000,
        acked=encode_acked(start, offsets),
    )


async def ack_batch(broker, *acks):
    body = msgspec.json.encode(BatchAckBody(broker_name="broker-a", acks=[*acks]))
    return (await broker.ask(RequestCode.BATCH_ACK_MESSAGE, None, body=body)).code


async def test_a_batch_acknowledges_messages_of_several_pops(broker):
    broker.put(*"abcd")
    await broker.pop(max_msg_nums=3)
    broker.clock.ms += 1
    await broker.pop()
    second = batch([3], start=3, pop_time=NOW_MS + 1, revive_queue=1)
    assert await ack_batch(broker, batch([0, 2]), second, batch([1], group="h")) == OK
    assert broker.pending == {("T", "g", 0, 0, NOW_MS): {1}}
    assert await ack_batch(broker) == ResponseCode.NO_MESSAGE
    answer = await broker.ask(RequestCode.BATCH_ACK_MESSAGE, None)
    assert answer.code == ResponseCode.NO_MESSAGE


@pytest.mark.parametrize(("retry", "topic"), [("1", "%RETRY%g_T"), ("2", "%RETRY%g+T")])
async def test_a_batch_may_be_for_a_retry_topic(retry, topic, broker):
    broker.topics.ensure(topic, 1)
    broker.put("a", topic=topic)
    log = broker.pop_service.check_points
    for name in (topic, "T"):
        log.add(name, "g", 0, [0], pop_time=NOW_MS, invisible_ms=60_000, queue=0)
    assert await ack_batch(broker, batch([0], retry=retry)) == OK
    assert list(broker.pending) == [("T", "g", 0, 0, NOW_MS)]


# -- acks that arrive together


async def together(broker, *pops):
    """Return whether acks are accepted together, and the number of their answers."""
    peer = Peer()
    is_accepted = broker.router.take_acks(peer, [*pops])
    await asyncio.sleep(0)
    return is_accepted, len(peer.answers)


def acked(offsets, *, topic="T", queue_id=0, revive_queue=0):
    return topic, "g", queue_id, 0, NOW_MS, revive_queue, offsets, list(range(len(offsets)))


async def test_acks_of_one_read_are_handled_together(broker):
    broker.put(*"abc")
    await broker.pop()
    assert await together(broker, acked([0, 2])) == (True, 2)
    assert broker.pending == {("T", "g", 0, 0, NOW_MS): {1}}
    assert await together(broker, acked([0, 3])) == (True, 2), "the offset after the last message is accepted, too"


@pytest.mark.parametrize(
    "other",
    [
        acked([1], topic="U"),
        acked([1], queue_id=2),
        acked([1], revive_queue=999),
        acked([1, 4]),
        acked([-1, 1]),
        acked([]),
    ],
)
async def test_none_of_the_acks_is_handled_together_if_one_has_to_be_handled_alone(other, broker):
    broker.put(*"abc")
    await broker.pop()
    assert await together(broker, acked([0]), other) == (False, 0)
    assert broker.pending == {("T", "g", 0, 0, NOW_MS): {0, 1, 2}}


async def test_acks_together_that_the_store_refuses_are_refused_one_by_one(broker, monkeypatch):
    broker.put(*"ab")
    await broker.pop()
    refused = PutResult(PutStatus.SERVICE_NOT_AVAILABLE)
    monkeypatch.setattr(broker.store, "put", lambda message: refused)
    peer = Peer()
    assert broker.router.take_acks(peer, [acked([0, 1])])
    await ticks()
    assert [(one.code, one.opaque, one.remark) for one in peer.answers] == [
        (ResponseCode.SYSTEM_ERROR, opaque, "SERVICE_NOT_AVAILABLE") for opaque in (0, 1)
    ]


# -- in order


async def popped_in_order(broker, **fields):
    return await broker.pop(**{"order": True, "queue_id": 0, "attempt_id": "1"} | fields)


async def test_acks_in_order_move_the_offset_to_the_first_message_that_is_left(broker):
    broker.put(*"abc")
    popped = await popped_in_order(broker)
    assert (list(popped), popped.header.revive_qid, broker.pending) == (list("abc"), 999, {})
    assert popped.header.order_count_info == "0 0 0"
    offsets = []
    for body in "bac":
        assert (await broker.ack(popped.handles[body])).code == OK
        offsets.append(broker.offsets.get("g", "T", 0))
    assert offsets == [0, 2, 3]
    assert (await broker.ack(popped.handles["a"])).code == OK, "an ack before the offset changes nothing"
    assert broker.offsets.get("g", "T", 0) == 3


async def test_an_ack_in_order_of_a_message_that_was_not_popped_is_illegal(broker):
    broker.put(*"abc")
    popped = await popped_in_order(broker, max_msg_nums=2)
    assert (await broker.ack(popped.handles["a"], offset=2)).code == ResponseCode.MESSAGE_ILLEGAL
    assert broker.offsets.get("g", "T", 0) == 0


async def test_an_ack_in_order_does_not_move_an_offset_that_an_operator_has_reset(broker):
    broker.put(*"abc")
    popped = await popped_in_order(broker)
    broker.offsets.reset("g", "T", 0, 0)
    assert (await broker.ack(popped.handles["a"])).code == OK
    assert broker.offsets.get("g", "T", 0) == 0


async def test_a_queue_that_is_free_again_wakes_the_pop_that_waits_for_it(broker):
    broker.put(*"ab")
    popped = await popped_in_order(broker, max_msg_nums=2)
    broker.put("c")
    waiting = broker.wait_for_pop(order=True, queue_id=0, attempt_id="2")
    await broker.ack(popped.handles["a"])
    await ticks()
    assert waiting.answers == [], "a message is not acknowledged yet"
    await broker.ack(popped.handles["b"])
    await ticks()
    assert [one.body for one in read_messages(waiting.answers[0].payload)] == [b"c"]


async def test_a_pop_in_order_waits_until_the_first_blocked_queue_is_free(broker, monkeypatch):
    for queue, invisible_ms in ((0, 5000), (1, 3000)):
        broker.put("a", queue=queue)
        await popped_in_order(broker, queue_id=queue, invisible_time=invisible_ms)
    held = []
    monkeypatch.setattr(broker.pop_service.waiting, "hold", lambda one: held.append(one) or True)
    broker.wait_for_pop(order=True, attempt_id="2")
    broker.wait_for_pop(consumer_group="h", queue_id=1, exp="none")
    assert [one.look_at_ms and one.look_at_ms - NOW_MS for one in held] == [3000, None]


async def test_a_notification_compares_the_tags_of_a_few_messages(broker):
    broker.settings.notification_entries_max = 4
    broker.put("a", "b", TAGS="A")
    asked = {"poll_time": 0, "exp_type": "TAG"}
    found = [has_message(broker.wait_for_notification(**asked, exp=exp)) for exp in ("A", "B", "A||B", "*", None)]
    assert found == [True, False, True, True, True]
    assert has_message(broker.wait_for_notification(poll_time=0, exp="B")), "without a type there is no filter"
    broker.put("c", TAGS="A")
    assert not has_message(broker.wait_for_notification(**asked, exp="B"))
    broker.put("d", TAGS="A")
    assert has_message(broker.wait_for_notification(**asked, exp="B")), "4 messages are not compared"
    broker.settings.notification_entries_max = 5
    assert not has_message(broker.wait_for_notification(**asked, exp="B"))
    broker.settings.filters_notifications = False
    assert has_message(broker.wait_for_notification(**asked, exp="B"))


async def test_a_notification_does_not_compare_the_tags_of_messages_that_are_redelivered(broker):
    broker.topics.put(TopicConfig("%RETRY%g_T", 1, 1))
    broker.put("a", topic="%RETRY%g_T", TAGS="A")
    assert has_message(broker.wait_for_notification(poll_time=0, exp_type="TAG", exp="B"))


@pytest.mark.parametrize(
    ("exp_type", "exp", "wanted"), [("TAG", "B", {"TAGS": "B"}), ("SQL92", "color = 'red'", {"color": "red"})]
)
async def test_a_waiting_notification_is_answered_by_a_message_that_passes_its_filter(exp_type, exp, wanted, broker):
    prepare()
    noting = broker.wait_for_notification(exp_type=exp_type, exp=exp)
    for properties in ({"TAGS": "A", "color": "blue"}, wanted):
        assert noting.answers == []
        broker.put("a", **properties)
        code, text = tags_code(properties.get("TAGS", "")), encode_properties(properties)
        broker.pop_service.notifications.arrived([DispatchRequest("T", 0, 0, code, 0, 0, 0, 0, text)])
        await ticks()
    assert has_message(noting)


async def test_a_notification_with_an_expression_that_cannot_be_parsed_is_refused(broker):
    prepare()
    (answer,) = broker.wait_for_notification(exp_type="SQL92", exp="color =").answers
    remark = "parse the consumer's subscription failed"
    assert (answer.code, answer.remark) == (ResponseCode.SUBSCRIPTION_PARSE_FAILED, remark)


async def test_a_notification_in_order_ignores_blocked_queues(broker):
    broker.put(*"ab")
    await popped_in_order(broker, max_msg_nums=1)
    assert not has_message(broker.wait_for_notification(order=True, poll_time=0, attempt_id="2"))
    assert has_message(broker.wait_for_notification(order=True, poll_time=0, attempt_id="1"))
    broker.put("c", queue=1)
    assert has_message(broker.wait_for_notification(order=True, poll_time=0, attempt_id="2"))


async def test_a_new_time_in_order_counts_from_now_and_not_for_messages_before_the_offset(broker):
    broker.put(*"ab")
    popped = await popped_in_order(broker, invisible_time=60_000)
    broker.clock.ms += 100
    answer = await broker.change(popped.handles["a"], 1000)
    assert decode_header(answer, ChangeInvisibleTimeResponse) == ChangeInvisibleTimeResponse(
        pop_time=NOW_MS, invisible_time=1100, revive_qid=999
    )
    await broker.ack(popped.handles["a"])
    answer = await broker.change(popped.handles["a"], 9000)
    assert decode_header(answer, ChangeInvisibleTimeResponse) == ChangeInvisibleTimeResponse()
    await broker.change(popped.handles["b"], 500)
    assert broker.pop_service.orders.blocked_until("T", "g", 0) == NOW_MS + 600


async def test_a_suspended_message_in_order_blocks_its_queue_and_is_not_counted(broker):
    broker.put(*"ab")
    popped = await popped_in_order(broker)
    await broker.change(popped.handles["b"], 90_000, suspend=True)
    assert broker.pop_service.orders.blocked_until("T", "g", 0) == NOW_MS + 90_000
    counts = []
    for attempt in "23":
        broker.clock.ms += 90_001
        again = await popped_in_order(broker, attempt_id=attempt, born_time=int(broker.clock.ms))
        counts.append(again.header.order_count_info)
    assert counts == ["0 0 0", "0 qo0%0 1;0 qo0%1 1;0 0 1"]


async def test_a_batch_acknowledges_messages_in_order_at_once(broker):
    broker.put(*"abc")
    await popped_in_order(broker)
    assert await ack_batch(broker, batch([0, 1], revive_queue=999)) == OK
    assert broker.offsets.get("g", "T", 0) == 2


# -- answers that wait until the log is safe


class Safety:
    """The durability of a log that is safe up to an offset."""

    def __init__(self):
        self.is_full = self.lacks_replicas = False
        self.safe = 0
        self.held = []

    def has(self, end_offset):
        return end_offset <= self.safe

    def hold(self, end_offset, release, *, answers=1):
        self.held.append((end_offset, release, answers))


@pytest.fixture
async def safe(tmp_path):
    broker = PopBroker(tmp_path, durability=Safety())
    broker.put(*"ab")
    yield broker
    broker.close()


@pytest.mark.parametrize(("lacks", "code"), [(False, ResponseCode.SYSTEM_BUSY), (True, ResponseCode.SYSTEM_ERROR)])
async def test_nothing_is_put_while_no_answer_may_wait(lacks, code, safe):
    safety = safe.context.durability
    safety.safe = 1 << 40
    popped = await safe.pop()
    safety.is_full, safety.lacks_replicas = not lacks, lacks
    assert (await safe.pop()).code == code
    assert (await safe.ack(popped.handles["a"])).code == code
    assert (await safe.change(popped.handles["a"], 1000)).code == code
    assert await ack_batch(safe, batch([0])) == code
    assert safe.pending == {("T", "g", 0, 0, NOW_MS): {0, 1}}


@pytest.mark.parametrize(
    ("outcome", "code"), [(Outcome.DURABLE, OK), (Outcome.TIMED_OUT, ResponseCode.FLUSH_DISK_TIMEOUT)]
)
async def test_a_pop_and_its_ack_are_answered_when_their_records_are_safe(outcome, code, safe):
    safety = safe.context.durability
    popping = safe.wait_for_pop()
    await ticks()
    ((end_offset, release, answers),) = safety.held
    assert (popping.answers, end_offset, answers) == ([], safe.store.max_physical_offset, 1)
    release(outcome, "late")
    assert popping.answers[0].code == code
    assert not safe.router.take_acks(Peer(), [acked([0])]), "each ack waits on its own"


async def test_an_ack_of_a_message_that_is_not_in_flight_waits_for_the_log_before_it(safe):
    safety = safe.context.durability
    handle = f"0 {NOW_MS} 60000 0 0 broker-a 0 0"
    assert await safe.ack(handle) is None
    assert [end_offset for end_offset, _, _ in safety.held] == [safe.store.max_physical_offset]
    safety.safe = safe.store.max_physical_offset
    assert (await safe.ack(handle)).code == OK


async def test_delayed_acks_wait_for_nothing(tmp_path):
    broker = PopBroker(tmp_path, durability=Safety(), pop_buffer_merge=True)
    broker.put("a")
    assert (await broker.ack(f"0 {NOW_MS} 60000 0 0 broker-a 0 0")).code == OK
    broker.close()
