"""The offsets of each queue that a batch reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.errors import SettingsError
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.spark.broker_pool import Range
from rmqkit.spark.planning import from_json, limited, ranges, read_option, to_json

A, B, C = (MessageQueue("orders", "broker-a", queue_id) for queue_id in range(3))
TOLD = {"orders": {"broker-a": {"0": 123, "1": 77}}}


def test_offsets_are_reported_as_other_connectors_report_them():
    assert to_json({B: 77, A: 123}) == TOLD
    assert from_json(TOLD) == {A: 123, B: 77}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting property name"),
        ('{"orders": 5}', "it must look like"),
        ('{"orders": {"broker-a": {"0": "x"}}}', "'x' is not an offset"),
        ('{"orders": {"broker-a": {"first": 1}}}', "invalid literal for int"),
    ],
)
def test_an_option_that_is_no_offsets_is_named(text: str, why: str):
    with pytest.raises(SettingsError, match=f"rocketmq: option startingOffsets cannot be used: .*{why}"):
        read_option("startingOffsets", text)


def test_a_limit_is_shared_in_proportion_to_what_queues_have():
    assert limited({A: 0, B: 0, C: 5}, {A: 900, B: 100, C: 5}, 100) == {A: 90, B: 10, C: 5}


def test_every_queue_that_has_something_continues():
    assert limited({A: 0, B: 10}, {A: 1_000_000, B: 11}, 10) == {A: 9, B: 11}


offsets = st.dictionaries(st.sampled_from([A, B, C]), st.tuples(st.integers(0, 1000), st.integers(0, 1000)))


@given(offsets, st.integers(1, 500))
def test_a_limited_batch_lies_within_the_whole_one(between: dict[MessageQueue, tuple[int, int]], count_max: int):
    start = {queue: low for queue, (low, _) in between.items()}
    end = {queue: low + more for queue, (low, more) in between.items()}
    chosen = limited(start, end, count_max)
    assert chosen.keys() == end.keys()
    assert all(start[queue] <= chosen[queue] <= end[queue] for queue in end)
    assert sum(chosen[queue] - start[queue] for queue in end) <= count_max + len(end)
    assert all(chosen[queue] > start[queue] for queue in end if end[queue] > start[queue])


@given(offsets, st.integers(0, 40), st.integers(0, 300))
def test_pieces_cover_each_queue_once(between: dict[MessageQueue, tuple[int, int]], parts_min: int, count_max: int):
    start = {queue: low for queue, (low, _) in between.items()}
    end = {queue: low + more for queue, (low, more) in between.items()}
    pieces = list(ranges(start, end, parts_min=parts_min, count_max=count_max))
    for queue, high in end.items():
        own = [piece for piece in pieces if piece.queue == queue]
        covered = [offset for piece in own for offset in range(piece.low, piece.high)]
        assert covered == list(range(start[queue], high))
    assert not count_max or all(piece.high - piece.low <= count_max for piece in pieces)


def test_large_queues_are_cut_first():
    pieces = list(ranges({A: 0, B: 0}, {A: 900, B: 100}, parts_min=10))
    assert pieces[:2] == [Range(A, 0, 100), Range(A, 100, 200)]
    assert pieces[-1] == Range(B, 0, 100)
    assert len(pieces) == 10
