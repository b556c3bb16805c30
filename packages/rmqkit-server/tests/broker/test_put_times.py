"""Durations of puts, as the tools show them (behaviour.md §9.10)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rmqkit.broker.statistics import PutTimes

# The text of an Apache 5.4.0 broker after a minute with 765 messages.
TOLD = (
    "[<=0ms]:691 [0~10ms]:68 [10~50ms]:4 [50~100ms]:2 [100~200ms]:0 [200~500ms]:0 [500ms~1s]:0 [1~2s]:0 [2~3s]:0 "
    "[3~4s]:0 [4~5s]:0 [5~10s]:0 [10s~]:0 "
)
SILENT = TOLD.replace(":691", ":0").replace(":68", ":0").replace(":4", ":0").replace(":2", ":0")


def test_the_last_whole_minute_is_reported():
    times = PutTimes()
    for ms, count in ((0.9, 691), (1.0, 60), (10.9, 8), (11, 4), (99.9, 1), (100, 1)):
        times.add(ms, count)
    assert (str(times), times.percentile(0.99), times.longest_ms) == (SILENT, 0.0, 100)
    times.end_minute()
    assert str(times) == TOLD
    assert 1 <= times.percentile(0.99) <= 10
    assert 50 <= times.percentile(0.999) <= 100
    times.end_minute()
    assert (str(times), times.longest_ms) == (SILENT, 100)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.sampled_from((0.5, 0.99, 0.999)))
def test_a_part_of_the_puts_took_no_longer_than_its_percentile(taken, part):
    times = PutTimes()
    for ms in taken:
        times.add(ms)
    times.end_minute()
    assert 0 <= times.percentile(part) <= max(int(ms) for ms in taken)
    assert sum(int(span.partition(":")[2]) for span in str(times).split()) == len(taken)
