"""Effects of each dial on clients, their counts and their repetition by seed."""

from __future__ import annotations

from collections import Counter

import pytest

from rmqkit import (
    Message,
    ProducerSettings,
    Pulling,
    PushConsumerSettings,
    SendFailed,
    SendStatus,
    SettingsError,
    StartFrom,
    sync,
)
from rmqkit.testing import Chaos
from tests.interop.server_process import wait_until
from tests.waiting import SECONDS

COUNT = 60


def send_all(cluster, topic, count=COUNT, **settings):
    """Statuses of sends, each message sent until it was stored."""
    statuses = Counter()
    settings = ProducerSettings(**{"retries": 20, "send_timeout_ms": 20_000, **settings})
    with sync.Producer("chaos", cluster.name_server, settings=settings) as producer:
        for number in range(count):
            statuses[producer.send(Message(topic=topic, body=b"%d" % number)).status] += 1
    return statuses


def consumed(cluster, topic, group):
    """Wait until all messages are consumed, and one of them twice. Return the consumptions by body."""
    bodies = Counter()
    settings = PushConsumerSettings(
        start_from=StartFrom.FIRST_OFFSET, persist_interval_ms=50, take_over_pause_ms=0, pull=Pulling(error_pause_ms=20)
    )
    with sync.PushConsumer(group, cluster.name_server, settings=settings) as consumer:
        consumer.subscribe(topic, handler=lambda message: bodies.update([message.body]))
        cluster.assert_consumed(group, topic)
        wait_until(lambda: 2 in [*bodies.values()], SECONDS, "duplicate")
    return bodies


def test_duplicates_are_delivered_and_come_to_an_end(rmq_broker, rmq_topic, rmq_group):
    send_all(rmq_broker, rmq_topic)
    chaos = rmq_broker.chaos(duplicate=1, seed=7)
    bodies = consumed(rmq_broker, rmq_topic, rmq_group)
    assert set(bodies) == {b"%d" % number for number in range(COUNT)}
    assert set(bodies.values()) <= {1, 2}
    assert chaos.happened["duplicate"] > 0


def test_doubtful_sends_are_stored_and_busy_ones_are_not(rmq_broker, rmq_topic):
    chaos = rmq_broker.chaos(flush_timeout=0.3, busy=0.3, seed=1)
    statuses = send_all(rmq_broker, rmq_topic)
    assert statuses == {
        SendStatus.FLUSH_DISK_TIMEOUT: chaos.happened["flush_timeout"],
        SendStatus.SEND_OK: COUNT - chaos.happened["flush_timeout"],
    }
    assert 0 < chaos.happened["flush_timeout"] < COUNT and chaos.happened["busy"] > 0
    ends = rmq_broker.look(lambda: rmq_broker.masters()[0].store.queue_ends())
    assert sum(end for (topic, _), end in ends.items() if topic == rmq_topic) == COUNT
    rmq_broker.chaos(busy=1)
    with pytest.raises(SendFailed, match=r"\[CHAOS\]broker busy"):
        send_all(rmq_broker, rmq_topic, count=1, retries=2)
    rmq_broker.chaos()
    assert send_all(rmq_broker, rmq_topic, count=3) == {SendStatus.SEND_OK: 3}


def test_everything_at_once_loses_nothing(rmq_cluster, rmq_topic, rmq_group):
    dials = {"duplicate": 1, "delay": 0.01, "flush_timeout": 0.1, "busy": 0.05, "disconnect": 0.1, "seed": 3}
    chaos = rmq_cluster.chaos(rebalance_every=0.05, **dials)
    send_all(rmq_cluster, rmq_topic)
    bodies = consumed(rmq_cluster, rmq_topic, rmq_group)
    assert set(bodies) == {b"%d" % number for number in range(COUNT)}
    assert set(chaos.happened) == {"delay", "disconnect", "busy", "flush_timeout", "duplicate", "rebalance"}


def test_a_seed_repeats_the_throws():
    throws = [[chaos.falls("busy") for _ in range(50)] for chaos in (Chaos(busy=0.5, seed=9) for _ in range(2))]
    assert throws[0] == throws[1] and len(set(throws[0])) == 2
    assert Chaos(busy=0.5).seed != Chaos(busy=0.5).seed


@pytest.mark.parametrize(
    ("dials", "text"),
    [
        ({"busy": 2}, "chaos: busy is 2: it is a share, give 0 to 1"),
        ({"delay": -1}, "chaos: delay is -1: it is seconds, give 0 or more"),
        ({"bussy": 1}, "chaos: there is no dial bussy: there are duplicate, .*, busy, .*"),
    ],
)
def test_dials_have_bounds(dials, text):
    with pytest.raises(SettingsError, match=f"^{text}$"):
        Chaos(**dials)
