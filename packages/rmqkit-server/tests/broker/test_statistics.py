"""Counters over a minute, an hour and a day (behaviour.md §9.10)."""

from __future__ import annotations

from datetime import datetime

import pytest

from rmqkit.broker.statistics import SAMPLE_SECONDS, Statistics
from rmqkit.protocol.names import is_system_topic
from rmqkit.store.message_store import InnerMessage, PutResult, PutStatus
from rmqkit.testing.clock import StandingClock

NOON_MS = int(datetime(2026, 11, 21, 12).timestamp() * 1000)


class Queues:
    def __init__(self):
        self.ends = {}

    max_physical_offset = 0

    def queue_ends(self):
        return dict(self.ends)


@pytest.fixture
def queues():
    return Queues()


@pytest.fixture
def clock():
    return StandingClock(NOON_MS)


@pytest.fixture
def statistics(queues, clock):
    queues.ends["old", 0] = 1000  # values from before the start are not counted
    made = Statistics(queues, "c", clock, is_system_topic)
    made.sample()
    return made


def pass_seconds(statistics, clock, seconds):
    for _ in range(int(seconds / SAMPLE_SECONDS)):
        clock.ms += SAMPLE_SECONDS * 1000
        statistics.sample()


def spans(statistics, name="TOPIC_PUT_NUMS", key="T"):
    found = statistics.get(name, key)
    return [(item.sum, round(item.tps, 4)) for item in (found.stats_minute, found.stats_hour, found.stats_day)]


def test_each_span_forgets_what_is_older(statistics, queues, clock):
    queues.ends["T", 0] = 30
    pass_seconds(statistics, clock, 20)
    assert spans(statistics) == [(30, 1.5)] * 3
    queues.ends["T", 1] = 60
    pass_seconds(statistics, clock, 60)
    assert spans(statistics) == [(60, 1.0), (90, 1.125), (90, 1.125)]
    pass_seconds(statistics, clock, 60)
    assert spans(statistics)[0] == (0, 0)
    pass_seconds(statistics, clock, 3600 + 600)
    assert [count for count, _ in spans(statistics)] == [0, 0, 90]
    pass_seconds(statistics, clock, 86_400 + 3600)
    assert [count for count, _ in spans(statistics)] == [0, 0, 0]
    assert statistics.get("TOPIC_PUT_NUMS", "old") is None


def test_a_steady_rate_is_reported_by_each_span(statistics, queues, clock):
    for step in range(1, 9 * 360 + 1):
        queues.ends["T", 0] = 50 * step
        pass_seconds(statistics, clock, SAMPLE_SECONDS)
    assert [rate for _, rate in spans(statistics)][:2] == [5.0, 5.0]
    assert statistics.per_second("TOPIC_PUT_NUMS", "T") == pytest.approx(5.0)
    assert statistics.per_second("TOPIC_PUT_NUMS", "none") == 0


def test_rates_of_ten_seconds_a_minute_and_ten_minutes(statistics, queues, clock):
    pass_seconds(statistics, clock, 1200)
    queues.ends["T", 0] = 600
    pass_seconds(statistics, clock, 20)
    queues.ends["T", 0] = 700
    pass_seconds(statistics, clock, 10)
    ten_s, minute, ten_minutes = statistics.rates("BROKER_PUT_NUMS")
    assert (ten_s, round(minute, 2)) == (10, 11.67)
    assert ten_minutes == pytest.approx(700 / 630, rel=0.05)
    assert statistics.rates("BROKER_GET_NUMS") == (0, 0, 0)


def test_totals_by_midnight(statistics, queues, clock):
    found = []
    for end in (5, 7, 10):
        queues.ends["T", 0] = end
        found.append(statistics.days("BROKER_PUT_NUMS"))
        pass_seconds(statistics, clock, 24 * 3600)
    assert found == [(0, 0, 5), (0, 5, 7), (5, 7, 10)]


def test_messages_per_pull_are_the_average(statistics):
    for count in (1, 32):
        statistics.given("T", "g", 0, count, 100 * count, 2.5)
    item = statistics.get("GROUP_GET_NUMS", "T@g").stats_minute
    assert (item.sum, item.avgpt) == (33, 16.5)
    assert statistics.totals("GROUP_GET_SIZE") == {("T", "g"): 3300}


def test_what_is_deleted_is_forgotten(statistics, queues):
    for topic, group in (("T", "g"), ("T", "h"), ("U", "g"), ("U", "h"), ("TT", "gg")):
        statistics.given(topic, group, 0, 1, 100, 0.0)
        queues.ends[topic, 0] = 1
    statistics.sample()
    del queues.ends["T", 0]
    statistics.drop_counters(topics={"T"})
    statistics.drop_counters(groups={"g"})
    for name, queue in (("GROUP_GET_NUMS", ""), ("GROUP_GET_LATENCY", "0@")):
        keys = ("T@g", "T@h", "U@g", "U@h", "TT@gg")
        left = [statistics.get(name, queue + key) is not None for key in keys]
        assert left == [False, False, False, True, True]
    assert statistics.get("TOPIC_PUT_NUMS", "T") is None
    assert statistics.get("TOPIC_PUT_NUMS", "U").stats_day.sum == 1
    queues.ends["T", 0] = 5  # the name is used again
    assert statistics.get("TOPIC_PUT_NUMS", "T").stats_day.sum == 5


def message(topic, queue_id=0, properties=b""):
    return InnerMessage(topic, queue_id, b"", properties, 0, 0, 0, b"", b"")


def stored(size):
    return PutResult(PutStatus.OK, 1000, 1000 + size)


def test_puts_are_counted_with_their_bytes_and_shared_out_times(statistics, queues):
    statistics.sent("T", 900, 4.9, 3)  # three sends of one read, which took 4 ms
    statistics.sent_one(message("T", 1), stored(500), 0.2, count=5)
    statistics.moved(message("T", 1), stored(100))
    statistics.sent_one(message("T"), PutResult(PutStatus.SERVICE_NOT_AVAILABLE, 0, 0), 1)
    queues.ends |= {("T", 0): 2, ("T", 1): 7, ("RMQ_SYS_TRANS_OP_HALF_TOPIC", 0): 1}
    found = {
        name: (item.sum, round(item.avgpt, 2))
        for name, key in (
            *(("TOPIC_PUT_NUMS", "T"), ("TOPIC_PUT_SIZE", "T"), ("BROKER_PUT_NUMS", "c")),
            *(("TOPIC_PUT_LATENCY", "0@T"), ("BROKER_PUT_NUMS_WITHOUT_SYSTEM_TOPIC", "c")),
        )
        for item in [statistics.get(name, key).stats_minute]
    }
    assert found == {
        "TOPIC_PUT_NUMS": (9, 1.8),
        "TOPIC_PUT_SIZE": (1500, 300),
        "TOPIC_PUT_LATENCY": (6, 3),  # two of four sends, of 12 ms in all
        "BROKER_PUT_NUMS": (10, 0),
        "BROKER_PUT_NUMS_WITHOUT_SYSTEM_TOPIC": (9, 0),
    }
    assert (statistics.put_count, statistics.puts_failed, statistics.put_times.longest_ms) == (10, 1, 4)


def test_what_is_given_back_is_not_the_broker_s_put(statistics, queues):
    for topic in ("SCHEDULE_TOPIC_XXXX", "%DLQ%g"):
        statistics.sent_back(message(topic), stored(100), topic="T", group="g", owner="null")
        queues.ends[topic, 0] = 1
    counted = {place: found and found.stats_minute.sum for place in BACK for found in [statistics.get(*place)]}
    assert counted == BACK


BACK = {
    ("SNDBCK_PUT_NUMS", "T@g"): 2,
    ("SNDBCK2DLQ_TIMES", "null@T@g@SEND_BACK_TO_DLQ"): 1,
    ("TOPIC_PUT_NUMS", "SCHEDULE_TOPIC_XXXX"): 1,
    ("QUEUE_PUT_SIZE", "SCHEDULE_TOPIC_XXXX@0"): 100,
    ("TOPIC_PUT_NUMS", "%DLQ%g"): None,
    ("BROKER_PUT_NUMS", "c"): 0,
}
