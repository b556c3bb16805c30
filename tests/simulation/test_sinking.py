"""The oracle of the exactly-once sink finds rows that are missing, repeated, unknown or out of order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from rmqkit.spark.sink.ledger import Batch
from tests.simulation.sinking import TOPIC, Query, judge, rows_of

BATCH = Batch("query-1", 1)
ROWS = [row.msg_id or "" for partition in range(2) for row in rows_of(BATCH, partition)]


def judged(rows: list[str], **sets: set[str]) -> list[str]:
    query = Query(cast("Any", None), rows={BATCH.prefix: ROWS}, **sets)
    messages = [SimpleNamespace(topic=TOPIC, queue_id=0, body=row.encode()) for row in rows]
    return judge(query, cast("Any", (("broker-0", message) for message in messages)))


def test_a_committed_batch_is_stored_once() -> None:
    done = {BATCH.prefix}
    assert judged(ROWS, done=done) == []
    assert "is stored 0 times" in judged([], done=done)[0]
    assert f"row {ROWS[-1]} is stored 2 times" in judged([*ROWS, ROWS[-1]], done=done)[0]
    assert f"row {ROWS[0]} is stored 0 times" in judged(ROWS[1:], done=done)[0]


def test_a_batch_of_a_query_that_gave_up_is_stored_as_a_whole_or_not_at_all() -> None:
    assert judged(ROWS, given_up={BATCH.prefix}) == judged([], given_up={BATCH.prefix}) == []
    assert "was given up, and row" in judged(ROWS[1:], given_up={BATCH.prefix})[0]


def test_rows_of_no_batch_and_rows_out_of_order_are_found() -> None:
    assert judged([*ROWS, "query-2/0/1/0"]) == ["row query-2/0/1/0 of no batch is stored"]
    ordered = [row for row in ROWS if row.startswith(f"{BATCH.prefix}0/")]
    assert len(ordered) > 1, "the batch has rows with an order"
    assert "are not in order" in judged(ROWS[::-1])[0]
