"""A stream under faults, in short: a driver killed in a batch, a broker killed, new queues; and the faults that the
judge finds. ``make kill T=streams`` is the long form."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.faults.spark.servers import OURS
from tests.faults.spark.streams import Run, judge, parse, streams

SHORT = ["--messages", "12000", "--driver-kills", "1", "--broker-kills", "1", "--per-batch", "4000", "--small"]
SEED = 4
SENT = [Run(0, 0, 0, 3), Run(1, 0, 3, 2)]
LATE = [Run(0, 3, 5, 2)]
RIGHT = [(0, 0, 0), (0, 1, 1), (0, 2, 2), (1, 0, 3), (1, 1, 4)]


def judged(rows: list[tuple[int, int, int]], doubtful: list[int] | None = None) -> dict[str, int]:
    columns = np.array(rows, np.int64).T
    named = dict(zip(("queueId", "queueOffset", "number"), columns, strict=True))
    told = judge(named, SENT, LATE, np.array(doubtful or [], np.int64))
    return {name: count for name, count in told.items() if count}


def test_a_result_that_is_right_has_only_late_messages_behind_it() -> None:
    assert judged(RIGHT) == {"late_unread": 2}
    assert judged([*RIGHT, (0, 3, 5)]) == {"late_unread": 1}


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (RIGHT[:-1], {"lost": 1}),
        ([*RIGHT, RIGHT[2]], {"duplicates": 1}),
        ([*RIGHT[:-1], (1, 1, 9)], {"changed": 1}),
        ([*RIGHT, (1, 3, 9)], {"strangers": 1, "gaps": 1}),
        (RIGHT[1:], {"lost": 1, "gaps": 1}),
    ],
)
def test_what_is_wrong_is_counted(rows: list[tuple[int, int, int]], told: dict[str, int]) -> None:
    assert judged(rows) == {**told, "late_unread": 2}


def test_a_batch_whose_send_failed_may_be_in_the_log_twice() -> None:
    assert judged([*RIGHT, (1, 2, 0)], doubtful=[0]) == {"again": 1, "late_unread": 2}


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(900)
def test_every_acknowledged_message_is_in_the_result_once(tmp_path: Path) -> None:
    check_stream(OURS, tmp_path)


def check_stream(server: str, folder: Path) -> None:
    """Run a stream with a kind of server. Raises Unavailable: the machine cannot run Apache's servers."""
    outcome = asyncio.run(streams(parse([*SHORT, "--server", server, "--seed", str(SEED)]), folder))
    print(outcome)
    assert outcome.faults == []
    assert outcome.faults_done == {"driver": 1, "broker": 1, "queue": 1}
