"""The asserts of a cluster: their conditions, and their messages on failure."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from rmqkit import Message, PullConsumerSettings, PushConsumerSettings, StartFrom, TransactionState, sync
from rmqkit.protocol.names import HALF_TOPIC, SCHEDULE_TOPIC
from tests.interop.server_process import wait_until
from tests.waiting import SECONDS

SOON = 0.05


def fault(check, *args, **options):
    """Return the lines of a failing assert's message, without the ids of messages."""
    with pytest.raises(AssertionError) as raised:
        check(*args, timeout=SOON, **options)
    return re.sub("id [0-9A-F]{32}", "id X", str(raised.value)).splitlines()


def send(producer, topic, *keys, **fields):
    for key in keys:
        producer.send(Message(topic=topic, body=b"body", keys=[key], **fields), queue=producer.queues(topic)[0])


def seconds_in(pattern, line):
    """Return the remaining wait in a line of the message. It varies, because time passes between the checks."""
    found = re.match(f".*?{pattern}", line)
    assert found, line
    return int(found[1])


def waiting(cluster):
    """Return the number of delayed messages that are not delivered yet."""
    (parts,) = cluster.masters()
    offsets = parts.schedule.offsets().offset_table
    return sum(parts.store.max_offset(SCHEDULE_TOPIC, level - 1) - offsets.get(level, 0) for level in range(1, 19))


def producers(cluster, group):
    return cluster.masters()[0].clients.producers(group)


def questions(cluster):
    """Return the number of check-backs of the only half message: each one puts the half message again."""
    return cluster.masters()[0].store.max_offset(HALF_TOPIC, 0) - 1


def test_what_is_not_consumed_is_reported_queue_by_queue(rmq_broker, rmq_topic, rmq_producer):
    assert fault(rmq_broker.assert_consumed, "billing", rmq_topic) == [
        f"after 0.05 s topic {rmq_topic} does not hold any messages: it holds 0"
    ]
    assert fault(rmq_broker.assert_consumed, "billing", "Ordres") == [
        "after 0.05 s topic Ordres does not hold any messages: there is no such topic"
    ]
    send(rmq_producer, rmq_topic, "order-17", "order-18", tags="new")
    *told, why = fault(rmq_broker.assert_consumed, "billing", rmq_topic)
    assert told == [
        f"after 0.05 s group billing has not consumed 2 of 2 messages of topic {rmq_topic}",
        f"  broker-0 {rmq_topic} queue 0: at 0 of 2, next is message 0 of {rmq_topic}, keys order-17, tags new, id X",
        "  members online: 0",
    ]
    assert why.startswith("  why: Broker broker-0 has no group billing. Remedy: ")
    assert fault(rmq_broker.assert_consumed, "billing", rmq_topic, count=3) == [
        f"after 0.05 s topic {rmq_topic} does not hold 3 messages: it holds 2"
    ]


def test_queues_that_a_client_found_nothing_in_are_consumed(rmq_broker, rmq_topic, rmq_producer):
    send(rmq_producer, rmq_topic, "order-17")
    for queue_id, offset in enumerate([1, -1, -1, -1]):  # what Go and Node clients commit
        rmq_broker.look(lambda at=(queue_id, offset): rmq_broker.masters()[0].offsets.commit("billing", rmq_topic, *at))
    rmq_broker.assert_consumed("billing", rmq_topic, count=1, timeout=SOON)


def test_a_retried_message_comes_as_time_passes_and_ends_as_a_dead_letter(
    rmq_broker, rmq_clock, rmq_topic, rmq_group, rmq_producer
):
    tries = []

    def refuse(message):
        tries.append((message.reconsume_times, rmq_clock.now_ms()))
        raise ValueError("refused")

    settings = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET, persist_interval_ms=50, retries_max=2)
    with sync.PushConsumer(rmq_group, rmq_broker.name_server, settings=settings) as consumer:
        consumer.subscribe(rmq_topic, handler=refuse)
        send(rmq_producer, rmq_topic, "order-17")
        for tried, level_seconds in ((1, 10), (2, 30)):
            wait_until(lambda tried=tried: len(tries) == tried, SECONDS, f"try {tried}")
            wait_until(lambda: rmq_broker.look(lambda: waiting(rmq_broker)), SECONDS, "what was sent back")
            told = fault(rmq_broker.assert_dlq, rmq_group, topic=rmq_topic, keys=["order-17"])
            assert told[0] == (
                f"after 0.05 s the dead letters of group {rmq_group} do not have keys order-17 from topic {rmq_topic}: "
                "0 found"
            )
            assert level_seconds - 9 <= seconds_in(r"to be retried in (\d+) s: message", told[-2]) <= level_seconds
            assert told[-2].endswith(f"tried {tried} times; rmq_clock.advance() makes it sooner")
            assert told[-1] == "  members online: 1"
            rmq_clock.advance(seconds=level_seconds)
        rmq_broker.assert_dlq(rmq_group, topic=rmq_topic, count=1, keys=["order-17"])
    assert [times for times, _ in tries] == [0, 1, 2]
    assert [(then - now) // 10_000 for (_, now), (_, then) in pairwise(tries)] == [1, 3]
    assert fault(rmq_broker.assert_consumed, rmq_group, rmq_topic)[0] == (
        f"after 0.05 s group {rmq_group} gave up 1 of 1 messages of topic {rmq_topic}"
    )


def test_what_is_delayed_or_undecided_is_pending(rmq_broker, rmq_clock, rmq_topic, rmq_group, rmq_consumer):
    asked = []

    def check(message):
        asked.append(message.keys)
        return TransactionState.UNKNOWN if len(asked) == 1 else TransactionState.COMMIT

    rmq_consumer.subscribe(rmq_topic, handler=lambda message: None)
    group = f"{rmq_group}-shop"
    with sync.TransactionProducer(
        group, rmq_broker.name_server, execute=lambda *_: TransactionState.UNKNOWN, check=check
    ) as producer:
        send(producer, rmq_topic, "later", delay_level=14)
        producer.send_in_transaction(Message(topic=rmq_topic, body=b"half", keys=["half"]))
        told = fault(rmq_broker.assert_nothing_pending)
        assert told[0] == "after 0.05 s messages are pending"
        (delayed,) = [line for line in told if line.endswith(f" s: message 0 of {rmq_topic}, keys later, id X")]
        assert 590 < seconds_in(r"  delayed by (\d+) s: ", delayed) <= 600
        assert f"  undecided transaction: message 0 of {rmq_topic}, keys half, id X" in told
        wait_until(lambda: rmq_broker.look(lambda: producers(rmq_broker, group)), SECONDS, "whom to ask")
        while len(asked) < 2:
            rmq_clock.advance(seconds=20)  # less than a round: a question before the answer to the last commits twice
            wait_until(lambda: len(asked) == rmq_broker.look(lambda: questions(rmq_broker)), SECONDS, "the question")
        rmq_broker.assert_consumed(rmq_group, rmq_topic, count=1)
        rmq_clock.advance(minutes=10)
        rmq_broker.assert_nothing_pending()
    rmq_broker.assert_consumed(rmq_group, rmq_topic, count=2)


@pytest.mark.parametrize("kind", ["push", "ordered", "broker's rebalance"])
def test_a_program_s_own_consumer_is_asked_how_far_it_is(rmq_broker, rmq_topic, rmq_group, rmq_producer, kind):
    handled = []
    never = 600_000  # offsets are saved when it closes
    settings = PushConsumerSettings(
        start_from=StartFrom.FIRST_OFFSET,
        persist_interval_ms=never,
        take_over_pause_ms=0,
        client_rebalance=kind[0] != "b",
    )
    with sync.PushConsumer(rmq_group, rmq_broker.name_server, settings=settings, ordered=kind == "ordered") as consumer:
        consumer.subscribe(rmq_topic, handler=handled.append)
        send(rmq_producer, rmq_topic, "order-17", "order-18")
        rmq_broker.assert_consumed(rmq_group, rmq_topic, count=2, timeout=SECONDS)
        rmq_broker.assert_nothing_pending(rmq_group, timeout=SECONDS)
        assert len(handled) == 2


def test_what_a_pull_consumer_has_not_committed_is_not_consumed(rmq_broker, rmq_topic, rmq_group, rmq_producer):
    send(rmq_producer, rmq_topic, "order-17")
    settings = PullConsumerSettings(start_from=StartFrom.FIRST_OFFSET, auto_commit=False, take_over_pause_ms=0)
    with sync.PullConsumer(rmq_group, rmq_broker.name_server, settings=settings) as consumer:
        consumer.subscribe(rmq_topic)
        while not consumer.poll(1):
            pass
        assert "has not consumed 1 of 1" in fault(rmq_broker.assert_consumed, rmq_group, rmq_topic)[0]
        consumer.commit()
        rmq_broker.assert_consumed(rmq_group, rmq_topic, count=1, timeout=SECONDS)


def test_a_message_that_is_retried_is_counted_once(rmq_broker, rmq_topic, rmq_group, rmq_producer):
    tries = []

    def refuse(message):
        tries.append(message)
        raise ValueError("refused")

    settings = PushConsumerSettings(
        start_from=StartFrom.FIRST_OFFSET, persist_interval_ms=600_000, take_over_pause_ms=0, handlers_max=1
    )
    with sync.PushConsumer(rmq_group, rmq_broker.name_server, settings=settings) as consumer:
        consumer.subscribe(rmq_topic, handler=refuse)
        send(rmq_producer, rmq_topic, "order-17")
        wait_until(lambda: rmq_broker.look(lambda: waiting(rmq_broker)), SECONDS, "what was sent back")
        told = fault(rmq_broker.assert_consumed, rmq_group, rmq_topic, count=1)
        assert told[0] == f"after 0.05 s group {rmq_group} has not consumed 1 of 1 messages of topic {rmq_topic}"
    # Also while its offset is not known to be past it: at the broker as it was, and sent back.
    rmq_broker.look(
        lambda: [rmq_broker.masters()[0].offsets.commit(rmq_group, rmq_topic, queue, 0) for queue in range(4)]
    )
    told = fault(rmq_broker.assert_consumed, rmq_group, rmq_topic, count=1)
    assert told[0] == f"after 0.05 s group {rmq_group} has not consumed 1 of 1 messages of topic {rmq_topic}"
    other = f"{rmq_topic}-other"
    send(rmq_producer, other, "order-19")
    for queue in range(4):
        end = rmq_broker.look(lambda at=queue: rmq_broker.masters()[0].store.max_offset(other, at))
        rmq_broker.look(lambda at=(queue, end): rmq_broker.masters()[0].offsets.commit(rmq_group, other, *at))
    rmq_broker.assert_consumed(rmq_group, other, count=1, timeout=SOON)  # what is retried is another topic's
