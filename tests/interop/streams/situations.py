"""The situations in which a stream of ``rocketmq`` is compared with a stream of Spark's Kafka source.

A situation is a function that plays some steps on a `Stage`. Every stream begins at the first message, and reads topic
``a`` if the steps do not name topics. Messages have the numbers 0, 1, 2 and so on, in the order in which they are sent.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from tests.interop.streams.stage import Stage

__all__ = ["SITUATIONS", "Situation"]

PATTERN = "[a-z]"
SHORT_DELAY = "1s"
LONG_DELAY = "1d"


Steps = Callable[[Stage], None]


class Situation(Struct, frozen=True):
    """A situation: its group in the table, one line about it, and its steps.

    Attributes:
        is_tested: True for the situations that the tests play. The others differ in one option or moment from these, or
            kill an executor or a driver, as `tests.spark.test_cluster` and `tests.faults.spark` do.
    """

    group: str
    text: str
    play: Steps
    is_tested: bool

    @property
    def name(self) -> str:
        """Return the name, which is the name of the function."""
        return self.play.__name__


SITUATIONS: list[Situation] = []


def situation(group: str, text: str, *, is_tested: bool = True) -> Callable[[Steps], Steps]:
    """Add a function to the situations."""

    def added(play: Steps) -> Steps:
        SITUATIONS.append(Situation(group, text, play, is_tested))
        return play

    return added


# ---------------------------------------------------------------- new topics and queues

NEW = "New topics and queues"


@situation(NEW, "A topic that matches `subscribePattern` is created while the query runs")
def new_topic_while_running(stage: Stage) -> None:
    stage.create("a")
    stage.send("a", 10)
    stage.start(subscribePattern=PATTERN)
    stage.settle()
    stage.create("b", queues=2)
    stage.send("b", 10, queue=1)


@situation(NEW, "A topic that matches `subscribePattern` is created while the query is stopped", is_tested=False)
def new_topic_while_stopped(stage: Stage) -> None:
    stage.create("a")
    stage.send("a", 10)
    stage.start(subscribePattern=PATTERN)
    stage.stop()
    stage.create("b", queues=2)
    stage.send("b", 10, queue=1)
    stage.start(subscribePattern=PATTERN, startingOffsets="latest")


@situation(NEW, "The topic gets more queues while the query runs")
def new_queues_while_running(stage: Stage) -> None:
    stage.create("a")
    stage.send("a", 10)
    stage.start()
    stage.settle()
    stage.widen("a", 3)
    stage.send("a", 10, queue=2)


@situation(NEW, "The topic gets more queues while the query is stopped", is_tested=False)
def new_queues_while_stopped(stage: Stage) -> None:
    stage.create("a")
    stage.send("a", 10)
    stage.start()
    stage.stop()
    stage.widen("a", 3)
    stage.send("a", 10, queue=2)
    stage.start(startingOffsets="latest")


@situation(NEW, "The topic does not exist when the query starts")
def no_topic(stage: Stage) -> None:
    stage.start()


# ---------------------------------------------------------------- deleted topics

DELETED = "Deleted topics"


@situation(DELETED, "The topic is deleted while the query runs, `failOnDataLoss=true`")
def deleted_while_running(stage: Stage) -> None:
    stage.create("a")
    stage.send("a", 10)
    stage.start()
    stage.settle()
    stage.delete("a")


@situation(DELETED, "One of two topics is deleted while the query runs, `failOnDataLoss=false`")
def one_deleted_while_running(stage: Stage) -> None:
    stage.create("a")
    stage.create("b")
    stage.send("a", 10)
    stage.start(subscribePattern=PATTERN, failOnDataLoss="false")
    stage.settle()
    stage.delete("a")
    stage.settle()
    stage.send("b", 10)


@situation(DELETED, "One of two topics is deleted while the query is stopped, `failOnDataLoss=true`", is_tested=False)
def one_deleted_while_stopped(stage: Stage) -> None:
    _one_deleted_while_stopped(stage, "true")


@situation(DELETED, "One of two topics is deleted while the query is stopped, `failOnDataLoss=false`")
def one_deleted_while_stopped_tolerated(stage: Stage) -> None:
    _one_deleted_while_stopped(stage, "false")


def _one_deleted_while_stopped(stage: Stage, fail_on_loss: str) -> None:
    stage.create("a")
    stage.create("b")
    stage.send("a", 10)
    stage.start(subscribePattern=PATTERN)
    stage.stop()
    stage.delete("a")
    stage.send("b", 10)
    stage.start(subscribePattern=PATTERN, failOnDataLoss=fail_on_loss)


@situation(DELETED, "The topic is deleted after a batch is planned, before it is read, `failOnDataLoss=false`")
def deleted_before_read(stage: Stage) -> None:
    stage.create("a")
    stage.create("b")
    stage.send("a", 10)
    stage.before_read(lambda: stage.delete("a"))
    stage.start(subscribePattern=PATTERN, failOnDataLoss="false")
    stage.settle()
    stage.send("b", 10)


# ---------------------------------------------------------------- topics that are created again

AGAIN = "Topics that are deleted and created again"


@situation(AGAIN, "While the query is stopped, with fewer messages than before, `failOnDataLoss=true`", is_tested=False)
def shorter_again(stage: Stage) -> None:
    _again_while_stopped(stage, 5, "true")


@situation(AGAIN, "While the query is stopped, with fewer messages than before, `failOnDataLoss=false`")
def shorter_again_tolerated(stage: Stage) -> None:
    _again_while_stopped(stage, 5, "false")


@situation(AGAIN, "While the query is stopped, with more messages than before, `failOnDataLoss=true`")
def longer_again(stage: Stage) -> None:
    _again_while_stopped(stage, 20, "true")


@situation(AGAIN, "While the query is stopped, with more messages than before, `failOnDataLoss=false`")
def longer_again_tolerated(stage: Stage) -> None:
    _again_while_stopped(stage, 20, "false")


def _again_while_stopped(stage: Stage, count: int, fail_on_loss: str) -> None:
    stage.create("a")
    stage.send("a", 10)
    stage.start()
    stage.stop()
    stage.create_again("a", count)
    stage.start(failOnDataLoss=fail_on_loss)


@situation(AGAIN, "After a batch is planned, before it is read, with more messages than before, `failOnDataLoss=false`")
def again_before_read(stage: Stage) -> None:
    stage.create("a")
    stage.send("a", 10)
    stage.before_read(lambda: stage.create_again("a", 20))
    stage.start(failOnDataLoss="false")


@situation(
    AGAIN,
    "Before an interrupted batch is repeated, with more messages than before, `failOnDataLoss=true`",
    is_tested=False,
)
def again_before_repetition(stage: Stage) -> None:
    _again_before_repetition(stage, "true")


@situation(AGAIN, "Before an interrupted batch is repeated, with more messages than before, `failOnDataLoss=false`")
def again_before_repetition_tolerated(stage: Stage) -> None:
    _again_before_repetition(stage, "false")


def _again_before_repetition(stage: Stage, fail_on_loss: str) -> None:
    stage.create("a")
    stage.send("a", 10)
    stage.interrupt_batch()
    stage.start()
    stage.interrupted()
    stage.create_again("a", 20)
    stage.start(failOnDataLoss=fail_on_loss)


# ---------------------------------------------------------------- messages that expire

EXPIRED = "Messages that expire before they are read"


@situation(EXPIRED, "While the query is stopped, `failOnDataLoss=true`", is_tested=False)
def expired(stage: Stage) -> None:
    _expired_while_stopped(stage, "true")


@situation(EXPIRED, "While the query is stopped, `failOnDataLoss=false`")
def expired_tolerated(stage: Stage) -> None:
    _expired_while_stopped(stage, "false")


def _expired_while_stopped(stage: Stage, fail_on_loss: str) -> None:
    stage.create("a")
    stage.send("a", 10)
    stage.start()
    stage.stop()
    stage.send("a", 10)
    stage.expire()
    stage.send("a", 10)
    stage.start(failOnDataLoss=fail_on_loss)


@situation(EXPIRED, "After a batch is planned, before it is read, `failOnDataLoss=true`", is_tested=False)
def expired_before_read(stage: Stage) -> None:
    _expired_before_read(stage, "true")


@situation(EXPIRED, "After a batch is planned, before it is read, `failOnDataLoss=false`")
def expired_before_read_tolerated(stage: Stage) -> None:
    _expired_before_read(stage, "false")


def _expired_before_read(stage: Stage, fail_on_loss: str) -> None:
    def action() -> None:
        stage.expire()
        stage.send("a", 10)

    stage.create("a")
    stage.send("a", 10)
    stage.before_read(action)
    stage.start(failOnDataLoss=fail_on_loss)


# ---------------------------------------------------------------- limits and availableNow

LIMITS = "Limits of batches"


@situation(LIMITS, "`availableNow` with `maxOffsetsPerTrigger=10`; messages arrive while the query runs")
def available_now(stage: Stage) -> None:
    stage.create("a", queues=2)
    stage.send("a", 15)
    stage.send("a", 15, queue=1)
    stage.before_read(lambda: stage.send("a", 10))
    stage.start(available_now=True, maxOffsetsPerTrigger=10)
    stage.ended()
    stage.count_batches()


@situation(
    LIMITS, "`availableNow`; a new topic matches `subscribePattern` while the query runs; the query starts again"
)
def available_now_new_topic(stage: Stage) -> None:
    def action() -> None:
        stage.create("b")
        stage.send("b", 10)

    stage.create("a")
    stage.send("a", 20)
    stage.before_read(action)
    stage.start(available_now=True, subscribePattern=PATTERN, maxOffsetsPerTrigger=10)
    stage.ended()
    stage.start(available_now=True, subscribePattern=PATTERN)
    stage.ended()
    stage.count_batches()


@situation(LIMITS, "`availableNow` with `minOffsetsPerTrigger=100` and fewer messages", is_tested=False)
def available_now_minimum(stage: Stage) -> None:
    stage.create("a")
    stage.send("a", 10)
    stage.start(available_now=True, minOffsetsPerTrigger=100, maxTriggerDelay=LONG_DELAY)
    stage.ended()
    stage.send("a", 10)
    stage.start(available_now=True, minOffsetsPerTrigger=100, maxTriggerDelay=LONG_DELAY)
    stage.ended()
    stage.count_batches()


@situation(
    LIMITS,
    "`minOffsetsPerTrigger=20`, a long `maxTriggerDelay`, and fewer messages after the first batch",
    is_tested=False,
)
def minimum_not_reached(stage: Stage) -> None:
    stage.create("a")
    stage.send("a", 10)
    stage.start(minOffsetsPerTrigger=20, maxTriggerDelay=LONG_DELAY)
    stage.settle()
    stage.send("a", 10)
    stage.settle()
    stage.count_batches()


@situation(LIMITS, "`minOffsetsPerTrigger=20`, and enough messages after a wait")
def minimum_reached(stage: Stage) -> None:
    stage.create("a")
    stage.send("a", 10)
    stage.start(minOffsetsPerTrigger=20, maxTriggerDelay=LONG_DELAY)
    stage.settle()
    stage.send("a", 10)
    stage.settle()
    stage.send("a", 10)
    stage.until_read(30)
    stage.count_batches()


@situation(LIMITS, "`minOffsetsPerTrigger=1000`, and `maxTriggerDelay=1s` passes")
def delay_passes(stage: Stage) -> None:
    stage.create("a")
    stage.send("a", 10)
    stage.start(minOffsetsPerTrigger=1000, maxTriggerDelay=SHORT_DELAY)
    stage.settle()
    stage.send("a", 10)
    stage.until_read(20)


@situation(LIMITS, "`maxOffsetsPerTrigger=10` with 2 messages in one queue and 28 in another")
def uneven_queues(stage: Stage) -> None:
    stage.create("a", queues=2)
    stage.send("a", 28)
    stage.send("a", 2, queue=1)
    stage.start(maxOffsetsPerTrigger=10)
    stage.settle()
    stage.count_batches()


# ---------------------------------------------------------------- checkpoints

CHECKPOINTS = "Checkpoints"


@situation(CHECKPOINTS, "The checkpoint is moved to another folder, and `startingOffsets` is changed")
def moved_checkpoint(stage: Stage) -> None:
    stage.create("a")
    stage.send("a", 10)
    stage.start()
    stage.stop()
    stage.move_checkpoint()
    stage.send("a", 10)
    stage.start(startingOffsets="latest")


@situation(
    CHECKPOINTS, "The last commit is missing: the driver stopped after the sink had stored the batch", is_tested=False
)
def missing_commit(stage: Stage) -> None:
    stage.create("a")
    stage.send("a", 10)
    stage.start()
    stage.stop()
    stage.forget_commit()
    stage.send("a", 10)
    stage.start()
    stage.settle()
    stage.count_batches()


@situation(CHECKPOINTS, "The query continues with another topic in `subscribe`, `failOnDataLoss=true`", is_tested=False)
def other_topic(stage: Stage) -> None:
    _other_topic(stage, "true")


@situation(CHECKPOINTS, "The query continues with another topic in `subscribe`, `failOnDataLoss=false`")
def other_topic_tolerated(stage: Stage) -> None:
    _other_topic(stage, "false")


def _other_topic(stage: Stage, fail_on_loss: str) -> None:
    stage.create("a")
    stage.create("b")
    stage.send("a", 10)
    stage.start()
    stage.stop()
    stage.send("b", 10)
    stage.start(subscribe="b", failOnDataLoss=fail_on_loss)


@situation(CHECKPOINTS, "`startingOffsets` is greater than the end of the queue")
def start_after_end(stage: Stage) -> None:
    stage.create("a")
    stage.send("a", 10)
    stage.start(startingOffsets=stage.offsets({"a": {0: 100}}))
    stage.settle()
    stage.send("a", 10)


# ---------------------------------------------------------------- kills

KILLS = "Kills"


@situation(KILLS, "The broker is killed and started again while the query runs", is_tested=False)
def broker_killed(stage: Stage) -> None:
    stage.create("a")
    stage.send("a", 10)
    stage.start()
    stage.settle()
    stage.restart_broker()
    stage.send("a", 10)


@situation(KILLS, "The broker is killed and started again after a batch is planned, before it is read")
def broker_killed_before_read(stage: Stage) -> None:
    stage.create("a")
    stage.send("a", 10)
    stage.before_read(stage.restart_broker)
    stage.start()
    stage.settle()
    stage.send("a", 10)


@situation(KILLS, "An executor is killed after a batch is planned, before it is read", is_tested=False)
def executor_killed(stage: Stage) -> None:
    stage.create("a")
    stage.send("a", 10)
    with stage.reader("local-cluster[1,1,512]") as reader:
        reader.until_planned(0)
        stage.send("a", 10)
        reader.read(0)
        reader.until_planned(1)
        reader.kill_executors()
        reader.read(1)


@situation(KILLS, "The driver is killed after a batch is planned, before it is read", is_tested=False)
def driver_killed(stage: Stage) -> None:
    stage.create("a")
    stage.send("a", 10)
    with stage.reader("local[1]") as reader:
        reader.until_planned(0)
        stage.send("a", 10)
        reader.read(0)
        reader.until_planned(1)
        reader.kill()
    stage.send("a", 10)
    stage.start()
