"""The outcome of each situation with Kafka's source and with ours, and the reason for each difference."""

from __future__ import annotations

from msgspec import Struct

from tests.interop.streams.stage import DATA_LOSS, Outcome

__all__ = ["OUTCOMES", "Pair"]

_NO_TOPIC = "UnknownTopicOrPartitionException"


class Pair(Struct, frozen=True):
    """The outcomes of a situation, and the reason why they differ."""

    kafka: Outcome
    ours: Outcome
    reason: str = ""


def _same(outcome: Outcome) -> Pair:
    return Pair(outcome, outcome)


_FIRST_LOST = Outcome("10-29", lost="0-9")
_UNSEEN = Outcome("0-9,20-29", lost="10-19")
_MARKS = (
    "Kafka's source compares only offsets, so it skips messages without an error. Our checkpoint has a mark of the last"
    " message, by which the source recognises a new queue"
)
_READ_AGAIN = (
    "Kafka's source skips the messages of the new topic below the old offset; ours reads the new queue from its start"
)

OUTCOMES: dict[str, Pair] = {
    "new_topic_while_running": _same(Outcome("0-19")),
    "new_topic_while_stopped": _same(Outcome("0-19")),
    "new_queues_while_running": _same(Outcome("0-19")),
    "new_queues_while_stopped": _same(Outcome("0-19")),
    "no_topic": Pair(Outcome("", end=_NO_TOPIC), Outcome("", end="NoRoute"), "The errors have other names"),
    "deleted_while_running": Pair(
        Outcome("0-9", end=_NO_TOPIC),
        Outcome("0-9", end=DATA_LOSS),
        "Kafka's source fails while it requests the offsets of a topic that does not exist, before it compares offsets",
    ),
    "one_deleted_while_running": _same(Outcome("0-19")),
    "one_deleted_while_stopped": _same(Outcome("0-9", lost="10-19", end=DATA_LOSS)),
    "one_deleted_while_stopped_tolerated": _same(Outcome("0-19")),
    "deleted_before_read": Pair(
        Outcome("", lost="0-19", end="TimeoutException"),
        Outcome("10-19", lost="0-9"),
        "The tasks of Kafka's source wait a minute for the topic and fail, although the query tolerates losses",
    ),
    "shorter_again": _same(Outcome("0-9", lost="10-14", end=DATA_LOSS)),
    "shorter_again_tolerated": Pair(Outcome("0-9", lost="10-14"), Outcome("0-14"), _READ_AGAIN),
    "longer_again": Pair(_UNSEEN, Outcome("0-9", lost="10-29", end=DATA_LOSS), _MARKS),
    "longer_again_tolerated": Pair(_UNSEEN, Outcome("0-29"), _MARKS),
    "again_before_read": _same(_FIRST_LOST),
    "again_before_repetition": Pair(_FIRST_LOST, Outcome("", lost="0-29", end=DATA_LOSS), _MARKS),
    "again_before_repetition_tolerated": _same(_FIRST_LOST),
    "expired": _same(Outcome("0-9", lost="10-29", end=DATA_LOSS)),
    "expired_tolerated": _same(_UNSEEN),
    "expired_before_read": _same(Outcome("", lost="0-19", end=DATA_LOSS)),
    "expired_before_read_tolerated": _same(Outcome("10-19", lost="0-9")),
    "available_now": _same(Outcome("0-29", lost="30-39", batches=3)),
    "available_now_new_topic": _same(Outcome("0-29", batches=3)),
    "available_now_minimum": _same(Outcome("0-19", batches=2)),
    "minimum_not_reached": _same(Outcome("0-9", lost="10-19", batches=1)),
    "minimum_reached": _same(Outcome("0-29", batches=2)),
    "delay_passes": _same(Outcome("0-19")),
    "uneven_queues": _same(Outcome("0-29", batches=3)),
    "moved_checkpoint": _same(Outcome("0-19")),
    "missing_commit": _same(Outcome("0-19", batches=2)),
    "other_topic": _same(Outcome("0-9", lost="10-19", end=DATA_LOSS)),
    "other_topic_tolerated": _same(Outcome("0-19")),
    "start_after_end": _same(Outcome("", lost="0-19", end=DATA_LOSS)),
    "broker_killed": _same(Outcome("0-19")),
    "broker_killed_before_read": _same(Outcome("0-19")),
    "executor_killed": _same(Outcome("0-19")),
    "driver_killed": _same(Outcome("0-29")),
}
