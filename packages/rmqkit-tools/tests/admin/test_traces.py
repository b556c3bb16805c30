"""Clients' reports about a message, from the bodies of trace messages."""

from __future__ import annotations

import pytest

from rmqkit.admin.messages.messages import traces_of
from rmqkit.errors import UnknownName
from rmqkit.protocol.trace import (
    EndTransactionTrace,
    PublishTrace,
    RecallTrace,
    SubscribeAfterTrace,
    SubscribeBeforeTrace,
    encode_traces,
)
from tests.client.messages import received

SENT = PublishTrace(10, "r", "pg", "T", "M", None, None, "h:1", 5, 7, 0, "O", True, "192.0.2.9")
ENDED = EndTransactionTrace(20, "r", "pg", "T", "M", None, None, "h:1", 2, "x", "COMMIT_MESSAGE", False)
BEGUN = SubscribeBeforeTrace(30, "r", "cg", "R1", "M", 2, None)
DONE = SubscribeAfterTrace("R1", "M", 4, False, None, 2, 34, "cg")
LATE = SubscribeAfterTrace("R2", "M", 9, True, None, 0, 50, "cg")
UNDER_WAY = SubscribeBeforeTrace(60, "r", "cg", "R3", "M", 0, None)
RECALLED = RecallTrace(70, "r", "pg", "T", "M", False)


class Told:
    """The trace topic: one message for each list of traces."""

    def __init__(self, *bodies):
        self.bodies = bodies

    async def by_key(self, topic, key):
        return [received(0, body, topic=topic, born_host="192.0.2.1:5") for body in self.bodies]


@pytest.mark.real_time
async def test_acts_are_reported_in_order_and_a_begin_with_its_end():
    other = PublishTrace(1, "r", "pg", "T", "OTHER", None, None, "h:1", 5, 7, 0, "O", True)
    told = Told(
        encode_traces([UNDER_WAY, RECALLED, LATE]),
        b"no trace",
        encode_traces([BEGUN, other, SENT]),
        encode_traces([DONE, ENDED]),
    )

    rows = await traces_of(told, "M")

    assert [(row.kind, row.timestamp, row.status, row.cost_ms, row.retry_times, row.client_host) for row in rows] == [
        ("Pub", 10, "success", 7, None, "192.0.2.9"),
        ("EndTransaction", 20, "COMMIT_MESSAGE", None, None, "192.0.2.1"),
        ("Sub", 30, "exception", 4, 2, "192.0.2.1"),
        ("Sub", 50, "success", 9, None, "192.0.2.1"),
        ("Sub", 60, "under way", None, 0, "192.0.2.1"),
        ("Recall", 70, "failed", None, None, "192.0.2.1"),
    ]


@pytest.mark.real_time
async def test_nothing_reported_is_said():
    with pytest.raises(UnknownName, match="RMQ_SYS_TRACE_TOPIC has no trace of message M; clients send traces with"):
        await traces_of(Told(encode_traces([])), "M")
