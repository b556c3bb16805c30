"""Redelivery of popped messages on a small store: where they go, what is dropped, and what is retried (behaviour.md
§4.12)."""

from __future__ import annotations

import pytest

from rmqkit.protocol.command import decode_header
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.schemas.pop import ChangeInvisibleTimeResponse
from rmqkit.protocol.schemas.topics import TopicConfig
from rmqkit.store.message_store import PutResult, PutStatus
from rmqkit.store.queues.consume_queue import ENTRY_BYTES
from tests.broker.pop.parts import NOW_MS, PopBroker
from tests.faults.refusals import BROKEN, RefusingDisk
from tests.store.stores import HOST_V6, read_all

RETRY, SECOND_RETRY = "%RETRY%g_T", "%RETRY%g+T"
REFUSED = PutResult(PutStatus.SERVICE_NOT_AVAILABLE, reason="no space")
ILLEGAL = PutResult(PutStatus.MESSAGE_ILLEGAL, reason="not like that")


@pytest.fixture
async def broker(tmp_path):
    broker = PopBroker(tmp_path)
    yield broker
    broker.close()


async def round_after(broker, ms=61_000):
    broker.clock.ms += ms
    await broker.pop_service.revive.round()


def bodies(broker, topic=RETRY):
    return [record.body for record in read_all(broker.store, topic, 0)]


async def test_a_message_is_redelivered_once_after_its_invisible_time(broker):
    broker.put(*"ab")
    popped = await broker.pop()
    await broker.ack(popped.handles["a"])
    for ms, expected in ((60_000, []), (99, []), (1, [b"b"]), (120_000, [b"b"])):
        await round_after(broker, ms)
        assert bodies(broker) == expected
    assert (broker.pending, broker.offsets.get("g", RETRY, 0)) == ({}, 0)
    assert broker.topics.get(RETRY).read_queue_nums == 1


async def test_a_redelivered_message_has_its_group_the_time_of_its_first_pop_and_one_more_delivery(broker):
    broker.put("a", reconsume_times=3, flag=7, born_host=HOST_V6, name="kept")
    await broker.pop()
    await round_after(broker)
    (record,) = read_all(broker.store, RETRY, 0)
    assert (record.reconsume_times, record.flag, record.born_host) == (4, 7, HOST_V6)
    properties = decode_properties(record.properties)
    assert properties == {"name": "kept", "ORIGIN_GROUP": "g", "1ST_POP_TIME": str(NOW_MS)}
    broker.settings.pop_retry_percent = 100
    later_ms = int(broker.clock.ms)
    again = await broker.pop(born_time=later_ms)
    assert again.header.pop_time == later_ms
    await round_after(broker)
    first, second = read_all(broker.store, RETRY, 0)
    assert (first.reconsume_times, second.reconsume_times) == (4, 5), "it goes back to its retry topic"
    assert decode_properties(second.properties)["1ST_POP_TIME"] == str(NOW_MS), "the first time stays"


async def test_a_suspended_message_keeps_its_count_and_its_next_retry_counts_again(broker):
    broker.settings.pop_retry_percent = 100
    broker.put(*"ab", reconsume_times=3)
    popped = await broker.pop()
    await broker.change(popped.handles["a"], 1000, suspend=True)
    await broker.change(popped.handles["b"], 1000, suspend=False)
    await round_after(broker)
    counts = [(one.body, one.reconsume_times) for one in read_all(broker.store, RETRY, 0)]
    assert counts == [(b"a", 3), (b"b", 4)]
    await broker.pop(born_time=int(broker.clock.ms))
    await round_after(broker)
    counts = [(one.body, one.reconsume_times) for one in read_all(broker.store, RETRY, 0)][2:]
    assert counts == [(b"a", 4), (b"b", 5)]


async def test_a_change_after_a_suspension_counts(broker):
    broker.put("a")
    popped = await broker.pop()
    answer = await broker.change(popped.handles["a"], 30_000, suspend=True)
    header = decode_header(answer, ChangeInvisibleTimeResponse)
    await broker.change(f"0 {header.pop_time} 30000 {header.revive_qid} 0 broker-a 0 0", 1000)
    await round_after(broker)
    assert [one.reconsume_times for one in read_all(broker.store, RETRY, 0)] == [1]


async def test_the_retry_topic_has_the_form_in_use(broker):
    broker.settings.retry_topic_v2 = True
    broker.put("a")
    await broker.pop()
    await round_after(broker)
    assert (bodies(broker), bodies(broker, SECOND_RETRY)) == ([], [b"a"])


async def test_a_group_that_has_read_its_retry_topic_continues_there(broker):
    broker.offsets.commit("g", RETRY, 0, 5)
    broker.put("a")
    await broker.pop()
    await round_after(broker)
    assert broker.offsets.get("g", RETRY, 0) == 5


@pytest.mark.parametrize("gone", ["topic", "group"])
async def test_messages_of_a_deleted_topic_or_group_are_dropped_and_create_nothing(gone, broker):
    broker.put(*"ab")
    await broker.pop()
    if gone == "topic":
        broker.topics.remove("T")
    else:
        broker.groups.remove("g")
    await round_after(broker)
    assert (broker.pending, bodies(broker), broker.topics.get(RETRY)) == ({}, [], None)
    assert ("g" in broker.groups) is (gone == "topic")


async def test_a_message_that_the_log_does_not_have_is_dropped_and_the_others_are_redelivered(broker):
    broker.put(*"ab")
    await broker.pop()
    log = broker.pop_service.check_points
    log.add("T", "g", 0, [0, 1, 7], pop_time=NOW_MS + 1, invisible_ms=60_000, queue=0)
    await round_after(broker)
    assert (broker.pending, sorted(bodies(broker))) == ({}, [b"a", b"a", b"b", b"b"])


async def test_a_message_waits_while_its_entry_is_damaged_by_a_failed_flush(broker, caplog):
    """The system dropped the page. A restart makes the entry again, so the message is not lost."""
    broker.put(*"abc")
    await broker.pop()
    with RefusingDisk().installed() as disk:
        disk.refuse(BROKEN, "sync_data", path="consumequeue")
        broker.store.flusher.flush_queues()
    (path,) = (broker.store.root / "consumequeue" / "T" / "0").iterdir()
    sound = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(ENTRY_BYTES)
        file.write(bytes(ENTRY_BYTES))
    await round_after(broker)
    assert (bodies(broker), list(broker.pending.values())) == ([b"a"], [{1, 2}])
    await round_after(broker, 10_100)
    assert list(broker.pending.values()) == [{1, 2}]
    with path.open("r+b") as file:
        file.write(sound[: 3 * ENTRY_BYTES])
    await round_after(broker, 10_100)
    assert (bodies(broker), broker.pending) == ([b"a", b"b", b"c"], {})
    said = [line for line in caplog.messages if line.startswith("popped")]
    damage = "a failed flush has damaged the entry of message 1 of T-0: restart the broker"
    assert said == [f"popped messages cannot be redelivered yet: {damage}"]


async def test_a_refused_message_and_those_after_it_are_retried_after_ten_seconds(broker, monkeypatch, caplog):
    broker.put(*"abc")
    await broker.pop()
    put, is_full = broker.store.put, [True]
    monkeypatch.setattr(
        broker.store, "put", lambda one: REFUSED if is_full[0] and one.topic == RETRY and one.body == b"b" else put(one)
    )
    await round_after(broker)
    assert (bodies(broker), list(broker.pending.values())) == ([b"a"], [{1, 2}])
    await round_after(broker, 9_000)
    is_full[0] = False
    await round_after(broker, 900)
    assert bodies(broker) == [b"a"]
    await round_after(broker, 500)
    assert (bodies(broker), broker.pending) == ([b"a", b"b", b"c"], {})
    assert caplog.messages == ["popped messages cannot be redelivered yet: SERVICE_NOT_AVAILABLE no space"]
    counts = broker.pop_service.check_points.counts.revived
    assert counts == {("T", "g", "PUT_OK"): 3, ("T", "g", "SERVICE_NOT_AVAILABLE"): 1}


async def test_a_refusal_is_logged_again_after_a_success_and_for_another_reason(broker, monkeypatch, caplog):
    broker.put("a")
    await broker.pop()
    put = broker.store.put
    answers = [REFUSED, REFUSED, PutResult(PutStatus.OS_PAGE_CACHE_BUSY, reason="busy"), None, REFUSED]
    monkeypatch.setattr(
        broker.store, "put", lambda one: (answers.pop(0) if one.topic == RETRY and answers else None) or put(one)
    )
    for _ in range(4):
        await round_after(broker)
    broker.put("b")
    await broker.pop(born_time=int(broker.clock.ms), queue_id=0, consumer_group="g")
    await round_after(broker)
    assert [line.partition(": ")[2] for line in caplog.messages] == [
        "SERVICE_NOT_AVAILABLE no space",
        "OS_PAGE_CACHE_BUSY busy",
        "SERVICE_NOT_AVAILABLE no space",
    ]


async def test_a_message_that_is_refused_for_good_is_not_retried(broker, monkeypatch):
    broker.put(*"ab")
    await broker.pop()
    put = broker.store.put
    monkeypatch.setattr(
        broker.store, "put", lambda one: ILLEGAL if (one.topic, one.body) == (RETRY, b"a") else put(one)
    )
    await round_after(broker)
    assert (broker.pending, bodies(broker), bodies(broker, "%DLQ%g")) == ({}, [b"b"], [b"a"])


async def test_a_fault_of_one_pop_holds_up_no_other(broker, monkeypatch, caplog):
    broker.put("a")
    broker.put("b", queue=1)
    await broker.pop(queue_id=0)
    await broker.pop(queue_id=1)
    get = broker.store.get

    def failing(topic, queue_id, *rest, **options):
        if (topic, queue_id) == ("T", 0):
            raise OSError(5, "Input/output error")
        return get(topic, queue_id, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(broker.store, "get", failing)
        await round_after(broker)
    assert (bodies(broker), len(broker.pending)) == ([b"b"], 1)
    assert caplog.messages == ["cannot redeliver messages of T that g popped"]
    await round_after(broker, 9_000)
    assert bodies(broker) == [b"b"]
    await round_after(broker, 1_300)
    assert bodies(broker) == [b"b", b"a"]


async def test_a_round_moves_the_revive_offset_and_writes_delayed_acks(tmp_path):
    broker = PopBroker(tmp_path, pop_buffer_merge=True)
    broker.put("a")
    popped = await broker.pop()
    await broker.ack(popped.handles["a"])
    log = broker.pop_service.check_points
    assert log.buffered == (1, 1)
    await round_after(broker, 0)
    assert log.buffered == (0, 0)
    assert broker.offsets.get("CID_RMQ_SYS_REVIVE_GROUP", "rmq_sys_REVIVE_LOG_DefaultCluster", 0) == 1
    broker.close()


async def test_a_topic_with_other_queues_has_a_retry_topic_with_one(broker):
    broker.topics.put(TopicConfig("T", 8, 8))
    for queue in (0, 7):
        broker.put(str(queue), queue=queue)
    await broker.pop()
    await round_after(broker)
    assert sorted(bodies(broker)) == [b"0", b"7"]


async def test_at_the_stop_the_state_is_written_and_a_start_continues_with_it(broker):
    broker.put(*"ab")
    popped = await broker.pop()
    await broker.ack(popped.handles["a"])
    await broker.pop(order=True, consumer_group="o", queue_id=0)
    service = broker.pop_service
    assert service.orders.is_dirty
    service.persist()
    assert not service.orders.is_dirty
    service.load()
    assert service.orders.blocked_until("T", "o", 0) == NOW_MS + 60_000
