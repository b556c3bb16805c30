"""Concurrent requests and retries of the sink's producer. `test_exactly_once` tests its work with brokers."""

from __future__ import annotations

import pytest

from rmqkit.errors import ConnectFailed, MessageIllegal, NoRoute, PeerRefused, RmqError, SendFailed
from rmqkit.protocol.codes import ResponseCode
from rmqkit.spark.sink.ledger import Half
from rmqkit.spark.sink.producer import _lanes, _passes


def half(row: int, lane: int, topic: str = "T", broker_name: str = "broker-a") -> Half:
    return Half(str(row), topic, broker_name, lane, row, row)


def test_half_messages_of_a_lane_are_ended_one_after_the_other() -> None:
    halves = [
        half(0, 1),
        half(1, -1),
        half(2, 1),
        half(3, 2),
        half(4, 1, "U"),
        half(5, 1, broker_name="b"),
        half(6, -1),
    ]
    lanes = [[one.row for one in lane] for lane in _lanes(halves)]
    assert lanes == [["0", "2"], ["3"], ["4"], ["5"], ["1"], ["6"]]


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectFailed("broker", "refused"), True),
        (NoRoute("none"), True),
        (SendFailed("T", ["broker-a"], NoRoute("none")), True),
        (PeerRefused(ResponseCode.SYSTEM_BUSY, "busy", "broker"), True),
        (PeerRefused(ResponseCode.MESSAGE_ILLEGAL, "no", "broker"), False),
        (MessageIllegal("no body"), False),
    ],
)
def test_what_passes_by_itself_is_tried_again(error: RmqError, passes: bool) -> None:
    assert _passes(error) is passes
