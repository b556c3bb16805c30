"""A stream from topic to topic under kills, in short: driver, executor, worker and broker once, and the faults that the
judge finds. ``make kill T=cluster`` is the long form."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults.spark.eos import Copy, Outcome, eos, judge, parse
from tests.faults.spark.servers import OURS

SHORT = ["--each", "1", "--source", "topic", "--batch-seconds", "1"]
SEED = 4


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([(0, 10), (1, 11), (2, 12)], (0, 0, 0, 0)),
        ([(0, 10), (2, 12)], (1, 0, 0, 0)),
        ([(0, 10), (1, 11), (2, 12), (1, 11)], (0, 1, 1, 0)),
        ([(0, 10), (1, 11), (2, 12), (1, 13)], (0, 1, 0, 0)),
        ([(0, 10), (1, 11), (2, 12), (7, 13)], (0, 0, 0, 1)),
    ],
)
def test_lost_and_repeated_rows_are_counted(rows: list[tuple[int, int]], told: tuple[int, int, int, int]) -> None:
    outcome = Outcome(1, OURS, "transactional")
    judge(outcome, [Copy(b"%d" % number, half, "") for number, half in rows], {b"0", b"1", b"2"})
    assert (outcome.lost, outcome.duplicates, outcome.of_one_half, outcome.strangers) == told
    assert bool(outcome.faults) == any(told)


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(1200)
def test_four_kills_lose_no_row_and_repeat_none(tmp_path: Path) -> None:
    outcome = asyncio.run(eos(parse([*SHORT, "--server", OURS, "--seed", str(SEED)]), tmp_path))
    print(outcome)
    assert outcome.faults == []
    assert sorted(outcome.kills.elements()) == ["broker", "driver", "executor", "worker"]
