"""Runtime figures of a broker in groups; the empty ones of Java's thread pools are left out."""

from __future__ import annotations

import pytest

from rmqkit.admin.cluster.runtime import grouped, release


def test_figures_are_in_groups_and_the_others_are_left_as_they_are() -> None:
    groups, others = grouped({"timerReadBehind": "3", "putTps": "1.0 2.0 3.0", "someFigure": "x"})
    assert [(one.title, [(row.key, row.kind, row.value) for row in one.rows]) for one in groups] == [
        ("Messages", [("putTps", "rates", "1.0 2.0 3.0")]),
        ("Timer", [("timerReadBehind", "number", "3")]),
    ]
    assert others == {"someFigure": "x"}


@pytest.mark.parametrize(
    ("key", "value", "is_shown"),
    [
        ("ackThreadPoolQueueCapacity", "10000", False),
        ("ackThreadPoolQueueSize", "0", False),
        ("ackThreadPoolQueueSize", "7", True),
        ("ackThreadPoolQueueHeadWaitTimeMills", "0", False),
        ("ackThreadPoolQueueHeadWaitTimeMills", "12", True),
        ("EndTransactionQueueSize", "0", False),
        ("EndTransactionThreadPoolQueueCapacity", "10000", False),
    ],
)
def test_a_figure_of_a_thread_pool_is_left_out_while_it_is_empty(key: str, value: str, is_shown: bool) -> None:
    assert grouped({key: value})[1] == ({key: value} if is_shown else {})


@pytest.mark.parametrize(("name", "shown"), [("V5_4_0", "5.4.0"), ("V4_9_7", "4.9.7"), ("V493", "V493"), ("", "")])
def test_a_version_is_written_as_people_write_it(name: str, shown: str) -> None:
    assert release(name) == shown
