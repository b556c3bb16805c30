"""Answers of the transactional sink to check-backs of brokers, over a ledger in memory (behaviour.md §9.1)."""

from __future__ import annotations

from typing import Any

import pytest

from rmqkit.client.producer.transaction import TransactionState
from rmqkit.protocol.message import ReceivedMessage, read_messages
from rmqkit.protocol.properties import encode_properties
from rmqkit.spark.options import SinkOptions
from rmqkit.spark.sink import exactly_once
from rmqkit.spark.sink.exactly_once import ExactlyOnce
from rmqkit.spark.sink.ledger import Batch, Entry, Kind
from tests.spark.messages import record_at
from tests.spark.test_ledger_topic import Topic

ABORTED_MS = 1_700_000_000_000
BATCH = Batch("q", 7)
UNKNOWN, ROLLBACK = TransactionState.UNKNOWN, TransactionState.ROLLBACK


class Broker(Topic):
    """A ledger's topic that also serves as the sink's producer."""

    def start(self) -> None:
        """Nothing has to be started."""


def half_message(key: str = "q/7/0/1", born_ms: int = ABORTED_MS) -> ReceivedMessage:
    properties = encode_properties({"UNIQ_KEY": key})
    record = record_at(0, topic=b"T", properties=properties, born_timestamp=born_ms, store_timestamp=0)
    (message,) = read_messages(record)
    return message


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the answer about a half message when the ledger has some entries, each born at ABORTED_MS."""

    def answer(message: ReceivedMessage, *entries: Entry) -> TransactionState:
        broker = Broker()
        monkeypatch.setattr(exactly_once, "SinkProducer", lambda options, check: broker)
        return ExactlyOnce(SinkOptions(group="g", settle_ms=100)).answer_check(broker.fill(*entries) and message)

    return answer


OPEN = Entry(Kind.DONE, Batch("q", 6))


@pytest.mark.parametrize(
    ("entries", "answer"),
    [
        ([OPEN], UNKNOWN),
        ([OPEN, Entry(Kind.ABORTED, BATCH)], ROLLBACK),
        ([OPEN, Entry(Kind.ABORTED, Batch("q", 8))], UNKNOWN),
        ([OPEN, Entry(Kind.DECISION, BATCH, "me")], UNKNOWN),
        ([OPEN, Entry(Kind.DECISION, BATCH, "me"), Entry(Kind.DONE, BATCH)], ROLLBACK),
        ([OPEN, Entry(Kind.DECISION, Batch("q", 8), "me")], ROLLBACK),
        ([OPEN, Entry(Kind.DONE, Batch("other", 8))], UNKNOWN),
    ],
)
def test_half_messages_of_a_batch_that_ended_are_rolled_back(
    answered: Any, entries: list[Entry], answer: TransactionState
) -> None:
    assert answered(half_message(), *entries) is answer


@pytest.mark.parametrize(("born_ms", "answer"), [(ABORTED_MS, ROLLBACK), (ABORTED_MS + 1, UNKNOWN)])
def test_an_abort_counts_for_half_messages_born_until_then(
    answered: Any, born_ms: int, answer: TransactionState
) -> None:
    assert answered(half_message(born_ms=born_ms), OPEN, Entry(Kind.ABORTED, BATCH)) is answer


def test_half_messages_of_other_programs_stay_open(answered: Any) -> None:
    assert answered(half_message(key="order 12"), Entry(Kind.DONE, BATCH)) is UNKNOWN
