"""The queues that a pop reads, their order, where it begins, and what it leaves (behaviour.md §4.8, §4.14)."""

from __future__ import annotations

import pytest

from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_header
from rmqkit.protocol.properties import PROPERTIES_BYTES_MAX, encode_properties
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.pop import NotificationRequest, NotificationResponse
from rmqkit.protocol.schemas.topics import TopicConfig
from rmqkit.store.message_store import InnerMessage, PutStatus
from tests.broker.pop.parts import NOW_MS, PopBroker
from tests.store.stores import HOST

OWN_RETRY, SECOND_RETRY = "%RETRY%g_T", "%RETRY%g+T"


@pytest.fixture
async def broker(tmp_path):
    broker = PopBroker(tmp_path)
    yield broker
    broker.close()


def fill(broker, count=4):
    """Create T with a number of queues and put the queue's number into each."""
    broker.topics.put(TopicConfig("T", count, count))
    for queue in range(count):
        broker.put(str(queue), queue=queue)


def chance_of(monkeypatch, chance):
    monkeypatch.setattr("random.random", lambda: chance)


# -- the order of queues


@pytest.mark.parametrize(
    ("chance", "higher_first", "order"),
    [(0.0, False, "0123"), (0.49, False, "1230"), (0.5, False, "2301"), (0.99, False, "3012"), (0.5, True, "1032")],
)
async def test_a_pop_reads_all_queues_from_a_random_one_on(chance, higher_first, order, broker, monkeypatch):
    fill(broker)
    broker.settings.higher_queues_first = higher_first
    chance_of(monkeypatch, chance)
    assert "".join(await broker.pop()) == order


@pytest.mark.parametrize("queue", [0, 3])
async def test_a_pop_of_one_queue_reads_no_other(queue, broker):
    fill(broker)
    assert list(await broker.pop(queue_id=queue)) == [str(queue)]
    assert {broker.offsets.get("g", "T", other) for other in range(4) if other != queue} == {None}


@pytest.mark.parametrize(("chance", "order"), [(0.199, ["retry", "own"]), (0.2, ["own", "retry"])])
async def test_one_pop_in_five_reads_retries_first(chance, order, broker, monkeypatch):
    broker.topics.ensure(OWN_RETRY, 1)
    broker.put("retry", topic=OWN_RETRY)
    broker.put("own")
    chance_of(monkeypatch, chance)
    assert list(await broker.pop()) == order


@pytest.mark.parametrize(("is_second", "found"), [(False, ["first"]), (True, ["first", "second"])])
async def test_retries_are_read_from_the_topics_of_the_forms_in_use(is_second, found, broker):
    for topic, body in ((OWN_RETRY, "first"), (SECOND_RETRY, "second")):
        broker.topics.ensure(topic, 1)
        broker.put(body, topic=topic)
    broker.settings.retry_topic_v2 = is_second
    popped = await broker.pop()
    assert sorted(popped) == found
    assert {one.topic for one in popped.messages.values()} == {"T"}
    assert popped.handles["first"] == f"0 {NOW_MS} 60000 0 1 broker-a 0 0"
    assert (await broker.ack(popped.handles["first"])).code == ResponseCode.SUCCESS


async def test_a_retry_topic_that_must_not_be_read_is_left_out(broker):
    broker.topics.put(TopicConfig(OWN_RETRY, 1, 1, 2))
    broker.put("a", topic=OWN_RETRY)
    assert list(await broker.pop()) == []


async def test_a_pop_in_order_reads_no_retries(broker):
    broker.topics.ensure(OWN_RETRY, 1)
    broker.put("retry", topic=OWN_RETRY)
    broker.put("own")
    assert list(await broker.pop(order=True)) == ["own"]
    answer = await broker.ask(RequestCode.NOTIFICATION, broker.pop_header(NotificationRequest, order=True))
    assert not decode_header(answer, NotificationResponse).has_msg


@pytest.mark.parametrize(
    ("factor", "chance", "order"),
    [
        (None, 0.99, "0123"),
        ("50", 0.499, "0123"),
        ("50", 0.5, "2301"),
        ("0", 0.5, "2301"),
        ("x", 0.5, "0123"),
        ("", 0.5, "0123"),
        ("٣", 0.5, "0123"),
    ],
)
async def test_the_priority_factor_of_a_group_is_the_percentage_of_its_pops_by_priority(
    factor, chance, order, broker, monkeypatch
):
    fill(broker)
    broker.topics.put(TopicConfig("T", 4, 4, attributes={"message.type": "PRIORITY"}))
    attributes = {} if factor is None else {"priority.factor": factor}
    await broker.groups.put_shared(SubscriptionGroupConfig(group_name="g", attributes=attributes))
    chance_of(monkeypatch, chance)
    assert "".join(await broker.pop()) == order


@pytest.mark.parametrize("attributes", [None, {}, {"message.type": "NORMAL"}])
async def test_a_topic_without_priorities_has_no_first_queue(attributes, broker, monkeypatch):
    fill(broker)
    broker.topics.put(TopicConfig("T", 4, 4, attributes=attributes))
    chance_of(monkeypatch, 0.5)
    assert "".join(await broker.pop()) == "2301"


# -- how many messages


async def test_a_pop_counts_the_messages_that_it_leaves_in_all_queues(broker, monkeypatch):
    chance_of(monkeypatch, 0.5)
    fill(broker)
    broker.put("more", "and more", queue=0)
    popped = await broker.pop(max_msg_nums=3)
    assert (list(popped), popped.header.rest_num) == (["2", "3", "0"], 3)
    assert [broker.offsets.get("g", "T", queue) for queue in range(4)] == [1, 0, 1, 1], "a new group begins everywhere"
    popped = await broker.pop(max_msg_nums=1)
    assert (list(popped), popped.header.rest_num) == (["more"], 2)


async def test_the_messages_that_are_left_are_those_after_the_pops_of_the_same_tick(broker, monkeypatch):
    chance_of(monkeypatch, 0.5)
    broker.put(*"abcde", queue=1)
    broker.put(*"vwxyz", queue=0)
    peers = [broker.begin(RequestCode.POP_MESSAGE, broker.pop_header(max_msg_nums=2)) for _ in range(2)]
    popped = await broker.pop(max_msg_nums=2)
    assert (list(popped), popped.header.rest_num) == (["e", "v"], 4)
    assert [len(peer.answers) for peer in peers] == [1, 1]


async def test_a_notification_is_for_a_message_after_the_offset_only(broker):
    broker.put("a", "b")
    for offset, has_message in ((1, True), (2, False), (3, False)):
        broker.offsets.commit("g", "T", 0, offset)
        waiting = broker.wait_for_notification()
        assert bool(waiting.answers) is has_message


@pytest.mark.parametrize(
    ("settings", "in_flight", "is_full"),
    [
        ({"pop_in_flight_limited": True, "pop_in_flight_max": 2}, 1, False),
        ({"pop_in_flight_limited": True, "pop_in_flight_max": 2}, 2, True),
        ({"pop_in_flight_limited": False, "pop_in_flight_max": 2}, 2, False),
        ({"pop_check_points_max": 2}, 1, False),
        ({"pop_check_points_max": 2}, 2, True),
    ],
)
async def test_no_more_is_popped_with_as_much_in_flight_as_the_limit(settings, in_flight, is_full, tmp_path):
    broker = PopBroker(tmp_path, **settings)
    broker.put(*"abc")
    for number in range(in_flight):
        broker.clock.ms = NOW_MS + number
        assert len(list(await broker.pop(max_msg_nums=1))) == 1
    popped = await broker.pop(max_msg_nums=1)
    assert (list(popped) == []) is is_full
    assert popped.header.rest_num == (3 - in_flight if is_full else 2 - in_flight)
    broker.close()


# -- where it begins


@pytest.mark.parametrize(
    ("init_mode", "in_memory", "found"), [(0, False, "abc"), (0, True, "abc"), (1, True, "abc"), (1, False, "c")]
)
async def test_a_new_group_begins_at_the_end_only_if_it_wants_and_the_queue_is_long(
    init_mode, in_memory, found, broker, monkeypatch
):
    broker.put(*"abc")
    monkeypatch.setattr(broker.store, "is_in_memory", lambda *place: in_memory)
    assert "".join(await broker.pop(init_mode=init_mode)) == found


async def test_a_group_that_begins_at_the_end_of_an_empty_queue_skips_no_later_message(broker, monkeypatch):
    monkeypatch.setattr(broker.store, "is_in_memory", lambda *place: False)
    assert list(await broker.pop(init_mode=1)) == []
    broker.put(*"ab")
    assert list(await broker.pop(init_mode=1)) == ["a", "b"]


async def test_a_group_begins_at_the_start_of_its_retry_topic(broker, monkeypatch):
    monkeypatch.setattr(broker.store, "is_in_memory", lambda *place: False)
    broker.topics.ensure(OWN_RETRY, 1)
    broker.put(*"ab", topic=OWN_RETRY)
    assert list(await broker.pop(init_mode=1)) == ["a", "b"]


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize(("offset", "after"), [(99, 2), (3, 2), (2, 2)])
async def test_an_offset_beyond_the_queue_is_corrected(order, offset, after, broker):
    broker.put(*"ab")
    broker.offsets.commit("g", "T", 0, offset)
    assert list(await broker.pop(order=order, queue_id=0)) == []
    assert broker.offsets.get("g", "T", 0) == after
    broker.put("c")
    assert list(await broker.pop(order=order, queue_id=0)) == ["c"]


@pytest.mark.parametrize("order", [False, True])
async def test_messages_that_pass_no_filter_are_passed_over_for_good(order, broker):
    for tag in "ABA":
        broker.put(tag, TAGS=tag)
    assert list(await broker.pop(order=order, queue_id=0, exp="C")) == []
    assert broker.offsets.get("g", "T", 0) == 3
    popped = await broker.pop(order=order, queue_id=0, exp="A", consumer_group="h")
    assert [one.queue_offset for one in popped.messages.values()] == [2]
    assert popped.header.msg_offset_info == "0 0 0,2"


async def test_a_tick_that_pops_a_queue_moves_its_offset_only_with_the_check_point(broker):
    broker.put("a", TAGS="A")
    broker.put("b", TAGS="B")
    first = broker.begin(RequestCode.POP_MESSAGE, broker.pop_header(exp="A", max_msg_nums=1))
    second = broker.begin(RequestCode.POP_MESSAGE, broker.pop_header(exp="C"))
    assert broker.offsets.get("g", "T", 0) == 0
    assert (len(first.answers), len(second.answers)) == (0, 1)
    await broker.pop(consumer_group="h")
    assert broker.offsets.get("g", "T", 0) == 1


async def test_an_offset_that_is_set_back_within_a_millisecond_leads_to_another_pop_time(broker):
    broker.put("a")
    times = []
    for _ in range(3):
        times.append((await broker.pop()).header.pop_time - NOW_MS)
        broker.offsets.commit("g", "T", 0, 0)
    assert times == [0, 1, 2]


async def test_a_reset_is_followed_by_the_next_pop_of_its_tick_and_frees_a_blocked_queue(broker):
    broker.put(*"abc")
    assert list(await broker.pop(order=True, queue_id=0)) == ["a", "b", "c"]
    broker.offsets.reset("g", "T", 0, 1)
    assert list(await broker.pop(order=True, queue_id=0, attempt_id="2")) == ["b", "c"]
    assert not broker.offsets.has_reset("g", "T", 0)
    assert list(await broker.pop(order=True, queue_id=0, attempt_id="3")) == []


async def test_a_pop_that_fails_half_way_leaves_no_message_in_flight(broker, monkeypatch):
    fill(broker, 2)
    chance_of(monkeypatch, 0.0)
    get = broker.store.get

    def failing(topic, queue_id, *rest, **options):
        if queue_id == 1:
            raise OSError(5, "Input/output error")
        return get(topic, queue_id, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(broker.store, "get", failing)
        assert (await broker.ask(RequestCode.POP_MESSAGE, broker.pop_header())).code == ResponseCode.SYSTEM_ERROR
    assert (broker.pending, broker.pop_service.check_points.in_flight) == ({}, {})
    assert list(await broker.pop()) == ["0", "1"]


# -- in order


async def test_a_pop_in_order_of_several_queues_takes_no_more_than_requested(broker, monkeypatch):
    chance_of(monkeypatch, 0.0)
    fill(broker, 3)
    broker.put("more")
    popped = await broker.pop(order=True, max_msg_nums=3, attempt_id="1")
    assert (list(popped), popped.header.rest_num) == (["0", "more", "1"], 0)
    assert [broker.offsets.get("g", "T", queue) for queue in range(3)] == [0, 0, 0]
    assert popped.header.order_count_info == "0 0 0;0 1 0"
    assert list(await broker.pop(order=True, attempt_id="2")) == ["2"]


async def test_a_pop_in_order_counts_the_messages_after_its_own(broker):
    broker.put(*"abcde")
    popped = await broker.pop(order=True, queue_id=0, max_msg_nums=2)
    assert popped.header.rest_num == 3


async def test_the_count_of_a_queue_is_the_smallest_of_its_messages(broker):
    broker.put(*"ab")
    for attempt, info in (("1", "0 0 0"), ("2", "0 qo0%0 1;0 qo0%1 1;0 0 1")):
        popped = await broker.pop(order=True, queue_id=0, attempt_id=attempt)
        assert popped.header.order_count_info == info
        broker.clock.ms += 60_000
    broker.put("c")
    popped = await broker.pop(order=True, queue_id=0, attempt_id="3", born_time=broker.clock.now_ms())
    assert popped.header.order_count_info == "0 qo0%0 2;0 qo0%1 2;0 0 0"


# -- records of retry topics


@pytest.mark.parametrize("properties", [b"", b"a\x01b\x02", b"a\x01b"])
async def test_a_retried_message_has_its_topic_its_handle_and_its_other_properties(properties, broker):
    broker.topics.ensure(OWN_RETRY, 1)
    one = InnerMessage(OWN_RETRY, 0, b"x", properties, 7, 0, NOW_MS - 5, HOST, HOST, reconsume_times=3)
    broker.store.put(one)
    (found,) = (await broker.pop()).messages.values()
    expected = {"POP_CK": f"0 {NOW_MS} 60000 0 1 broker-a 0 0"} | ({"a": "b"} if properties else {})
    assert found.properties == expected
    assert (found.topic, found.queue_id, found.queue_offset, found.reconsume_times) == ("T", 0, 0, 3)
    assert (found.flag, found.born_timestamp, found.body) == (7, NOW_MS - 5, b"x")


async def test_retried_messages_may_keep_their_topic(broker):
    broker.settings.pops_keep_retry_topic = True
    broker.topics.ensure(OWN_RETRY, 1)
    broker.put("x", topic=OWN_RETRY)
    popped = await broker.pop()
    (found,) = popped.messages.values()
    assert (found.topic, "POP_CK" in found.properties) == (OWN_RETRY, False)
    assert popped.header.start_offset_info == "1 0 0"


@pytest.mark.parametrize(("room", "has_handle"), [(0, True), (-1, False)])
async def test_a_retried_message_without_room_for_its_handle_stays_as_it_is(room, has_handle, tmp_path):
    broker = PopBroker(tmp_path, log_file_bytes=1 << 20)
    broker.topics.ensure(OWN_RETRY, 1)
    mark = encode_properties({"POP_CK": f"0 {NOW_MS} 60000 0 1 broker-a 0 0"})
    value = "x" * (PROPERTIES_BYTES_MAX - len(mark) - len(encode_properties({"a": ""})) - room)
    one = InnerMessage(OWN_RETRY, 0, b"x", encode_properties({"a": value}), 0, 0, NOW_MS, HOST, HOST)
    assert broker.store.put(one).status is PutStatus.OK
    (found,) = (await broker.pop()).messages.values()
    assert ("POP_CK" in found.properties) is has_handle
    assert found.topic == ("T" if has_handle else OWN_RETRY)
    broker.close()
