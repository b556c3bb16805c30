"""The bounded queue of brokers to forget (behaviour.md §1.4)."""

from __future__ import annotations

import asyncio

from rmqkit.namesrv.brokers import Unregistration
from rmqkit.namesrv.routes import Departure, MemberChange
from tests.waiting import until

FIRST, SECOND, THIRD = (Departure("C", f"10.0.0.{number}:1", "a") for number in (1, 2, 3))


class Table:
    """A stand-in for the route table: it records the batches and answers each with one change."""

    def __init__(self):
        self.batches = []

    def unregister(self, departures):
        self.batches.append(list(departures))
        return [MemberChange("a", {1: "10.0.0.9:1"}, departures[0].address, None)] if departures else []


async def test_all_that_wait_are_one_batch_and_changes_are_reported():
    table, told = Table(), []
    queue = Unregistration(table, capacity=2, on_change=told.append)
    queue.start()
    assert [queue.submit(departure) for departure in (FIRST, SECOND, THIRD)] == [True, True, False]
    while not table.batches:
        await asyncio.sleep(0)
    assert table.batches == [[FIRST, SECOND]]
    assert [change.offline_address for change in told] == ["10.0.0.1:1"]
    assert queue.submit(THIRD), "there is room again"
    await queue.stop()
    assert table.batches == [[FIRST, SECOND], [THIRD]], "brokers that wait at the end are removed"


async def test_a_queue_that_never_started_stops(caplog):
    table = Table()
    queue = Unregistration(table, capacity=1, on_change=lambda change: None)
    queue.submit(FIRST)
    queue.submit(SECOND)
    await queue.stop()
    assert table.batches == [[FIRST]]
    assert "cannot unregister a at 10.0.0.2:1: the queue is full" in caplog.text


async def test_a_batch_that_fails_keeps_no_other_from_being_taken(caplog):
    """Otherwise no broker would ever be removed again."""

    def fail_once(change):
        told.append(change)
        if len(told) == 1:
            raise ValueError("broken")

    table, told = Table(), []
    queue = Unregistration(table, capacity=1, on_change=fail_once)
    queue.start()
    for departure in (FIRST, SECOND):
        assert queue.submit(departure)
        await until(lambda left=departure: [left] in table.batches)
    await queue.stop()
    assert len(told) == 2
    assert "cannot unregister brokers" in caplog.text
