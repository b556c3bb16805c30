"""Counters over a minute, an hour and a day (behaviour.md §9.10)."""

from __future__ import annotations

import pytest

from rmqkit.broker.statistics import SAMPLE_SECONDS, Statistics


class Clock:
    ms = 0.0

    def monotonic_ms(self):
        return self.ms


class Queues:
    def __init__(self):
        self.ends = {}

    def queue_ends(self):
        return dict(self.ends)


@pytest.fixture
def queues():
    return Queues()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def statistics(queues, clock):
    queues.ends["old", 0] = 1000  # what was there before the start does not count
    made = Statistics(queues, "c", clock)
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


def test_a_steady_rate_is_told_by_each_span(statistics, queues, clock):
    for step in range(1, 9 * 360 + 1):
        queues.ends["T", 0] = 50 * step
        pass_seconds(statistics, clock, SAMPLE_SECONDS)
    assert [rate for _, rate in spans(statistics)][:2] == [5.0, 5.0]
    assert statistics.per_second("TOPIC_PUT_NUMS", "T") == pytest.approx(5.0)
    assert statistics.per_second("TOPIC_PUT_NUMS", "none") == 0


def test_messages_per_pull_are_the_average(statistics):
    for count in (1, 32):
        statistics.given("T", "g", count)
    item = statistics.get("GROUP_GET_NUMS", "T@g").stats_minute
    assert (item.sum, item.avgpt) == (33, 16.5)


def test_what_is_deleted_is_forgotten(statistics, queues):
    for topic, group in (("T", "g"), ("T", "h"), ("U", "g"), ("U", "h"), ("TT", "gg")):
        statistics.given(topic, group, 1)
        queues.ends[topic, 0] = 1
    statistics.sample()
    del queues.ends["T", 0]
    statistics.forget(topic="T")
    statistics.forget(group="g")
    left = [statistics.get("GROUP_GET_NUMS", key) is not None for key in ("T@g", "T@h", "U@g", "U@h", "TT@gg")]
    assert left == [False, False, False, True, True]
    assert statistics.get("TOPIC_PUT_NUMS", "T") is None
    assert statistics.get("TOPIC_PUT_NUMS", "U").stats_day.sum == 1
    queues.ends["T", 0] = 5  # the name is used again
    assert statistics.get("TOPIC_PUT_NUMS", "T").stats_day.sum == 5
