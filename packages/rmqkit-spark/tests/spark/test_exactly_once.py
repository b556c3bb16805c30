"""The transactional sink's parts, called as Spark calls them, and killed between any two of their requests.

A *process* here is an `ExactlyOnce`: its own connections, claimant and ledger. A killed process does nothing further.
The next process then does the work of Spark: it runs the tasks of the batch again and calls commit again.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from rmqkit.client.producer.transaction import TransactionState
from rmqkit.client.runtime.process import portal
from rmqkit.errors import ClientError, PeerRefused, RequestTimedOut
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.message import read_messages
from rmqkit.protocol.names import HALF_TOPIC, TRANSACTION_GROUP
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.send import EndTransactionRequest
from rmqkit.spark.broker_pool import BrokerPool, Range
from rmqkit.spark.options import DeliveryGuarantee, SinkOptions
from rmqkit.spark.sink import writers
from rmqkit.spark.sink.exactly_once import ExactlyOnce
from rmqkit.spark.sink.ledger import Batch, Half, unpack_halves
from rmqkit.spark.sink.ledger_topic import ledger_topic
from rmqkit.spark.sink.producer import Ended
from rmqkit.spark.sink.rows import RowKeys
from rmqkit.spark.sink.writers import Staged, StreamWriter
from tests.interop.server_process import wait_until
from tests.interop.standalone import Standalone, run_standalone

pytestmark = pytest.mark.spark

ROWS = 12
PARTITIONS = 2
SETTLE_MS = 150
Q0 = Batch("q", 0)
GONE = "Find prepared transaction message failed"
QUICK = "transactionTimeOut=100\ntransactionCheckInterval=200\ntransactionCheckMax=15\n"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    work_dir = tmp_path_factory.mktemp("exactly-once")
    with run_standalone(work_dir / "store", work_dir) as running:
        yield running


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """A broker that asks early and gives up soon."""
    work_dir = tmp_path_factory.mktemp("asking")
    (work_dir / "broker.conf").write_text(QUICK)
    with run_standalone(work_dir / "store", work_dir, "--config", str(work_dir / "broker.conf")) as running:
        yield running


class Killed(BaseException):
    """The process is gone."""


class Sink:
    """The writer of one stream, in processes that come and go."""

    def __init__(self, broker: Standalone, topic: str, sink_id: str = "q", **options: Any) -> None:
        self.broker, self.topic, self.sink_id = broker, topic, sink_id
        self.options = SinkOptions(
            name_servers=broker.namesrv_addr,
            topic=topic,
            group=f"g-{topic}",
            guarantee=DeliveryGuarantee.TRANSACTIONAL,
            settle_ms=SETTLE_MS,
            **{"patience_ms": 10_000, **options},
        )
        self.writer = StreamWriter(self.options)
        self.processes: list[ExactlyOnce] = []
        self.start()

    def start(self) -> ExactlyOnce:
        """A new process; those before it are dead, or do not know that they are taken for it."""
        process = writers.open_sinks[self.options] = ExactlyOnce(self.options)
        self.processes.append(process)
        return process

    def write(self, batch_id: int, **more: list[Any]) -> list[Staged]:
        """The tasks of a batch: the same rows every time."""
        staged = []
        for partition in range(PARTITIONS):
            body = [b"%d-%d-%d" % (batch_id, partition, number) for number in range(ROWS // PARTITIONS)]
            rows = pa.record_batch({"body": body, **more})
            staged.append(self.writer.stage(iter([rows]), RowKeys(self.sink_id, batch_id, partition)))
        return staged

    def run(self, batch_id: int, **more: list[Any]) -> list[Staged]:
        """Write and commit a batch as Spark does."""
        staged = self.write(batch_id, **more)
        self.writer.commit(list(staged), batch_id)
        return staged

    @property
    def live(self) -> BrokerPool:
        """The connections of the newest process."""
        return self.processes[-1].producer.pool

    def seen(self) -> list[bytes]:
        """Return the bodies that consumers see."""
        queues = self.live.queues([self.topic])
        self.live.wait_dispatched(queues)
        parts = [Range(queue, bound.low, bound.high) for queue, bound in sorted(self.live.bounds(queues).items())]
        return [message.body for part in parts for body in self.live.bodies(part) for message in read_messages(body)]

    def check(self, *batch_ids: int) -> None:
        """Every row of these batches is seen once, and nothing else."""
        wanted = [
            b"%d-%d-%d" % (batch_id, partition, number)
            for batch_id in batch_ids
            for partition in range(PARTITIONS)
            for number in range(ROWS // PARTITIONS)
        ]
        assert Counter(self.seen()) == Counter(wanted)

    def close(self) -> None:
        for process in self.processes:
            portal().run(process.producer.close)
        writers.open_sinks.pop(self.options)


@pytest.fixture
def sinks() -> Iterator[Callable[..., Sink]]:
    made: list[Sink] = []

    def make(*arguments: Any, **more: Any) -> Sink:
        made.append(Sink(*arguments, **more))
        return made[-1]

    yield make
    for sink in made:
        sink.close()


def test_batches_are_seen_once_and_in_their_queues(broker: Standalone, sinks: Callable[..., Sink]) -> None:
    sink = sinks(broker, "plain")
    for batch_id in range(3):
        assert [staged.row_count for staged in sink.run(batch_id)] == [ROWS // PARTITIONS] * PARTITIONS
    sink.check(0, 1, 2)


def test_a_batch_that_is_run_again_adds_nothing(broker: Standalone, sinks: Callable[..., Sink]) -> None:
    sink = sinks(broker, "again")
    sink.run(0)
    assert [staged.row_count for staged in sink.run(0)] == [0, 0]
    staged = sink.write(1)
    sink.writer.commit(list(staged), 1)
    sink.writer.commit(list(staged), 1)
    sink.start()
    assert [staged.row_count for staged in sink.run(1)] == [0, 0]
    sink.check(0, 1)


def test_what_is_aborted_is_never_seen(broker: Standalone, sinks: Callable[..., Sink]) -> None:
    sink = sinks(broker, "aborted")
    sink.run(0)
    sink.writer.abort([*sink.write(1), None], 1)
    sink.check(0)
    sink.run(1)
    sink.check(0, 1)
    sink.writer.abort(list(sink.write(1)), 1)  # Spark aborts what it could not commit: what is decided stays
    sink.check(0, 1)


def test_a_task_that_fails_takes_back_what_it_staged(broker: Standalone, sinks: Callable[..., Sink]) -> None:
    sink = sinks(broker, "failing")
    told: list[tuple[int, TransactionState]] = []
    end = sink.processes[0].producer.end

    def watched(halves: Sequence[Half], batch: Batch, state: TransactionState, until_ms: float) -> Ended:
        told.append((len(halves), state))
        return end(halves, batch, state, until_ms)

    sink.processes[0].producer.end = watched  # type: ignore[method-assign]
    batches = iter([pa.record_batch({"body": [b"1", b"2"]}), pa.record_batch({"body": [b"3", None]})])
    with pytest.raises(ClientError, match="row 3 of partition 0 has no body"):
        sink.writer.stage(batches, RowKeys("q", 0, 0))
    assert told == [(2, TransactionState.ROLLBACK)]
    sink.run(0)
    sink.check(0)


def test_rows_with_a_sharding_key_keep_their_order(broker: Standalone, sinks: Callable[..., Sink]) -> None:
    sink = sinks(broker, "ordered")
    for batch_id in range(3):
        sink.run(batch_id, shardingKey=["a", "b", "a", "b", "a", "b"])
    for key in (0, 1):
        for partition in range(PARTITIONS):
            wanted = [b"%d-%d-%d" % (batch, partition, row) for batch in range(3) for row in range(key, 6, 2)]
            assert [body for body in sink.seen() if body in wanted] == wanted


def test_a_row_key_is_the_row_s_own(broker: Standalone, sinks: Callable[..., Sink]) -> None:
    sink = sinks(broker, "keyed")
    staged = [
        sink.writer.stage(iter([pa.record_batch({"body": ["x", "y"], "rowKey": ["k1", "k1"]})]), RowKeys("q", 0, 0))
    ]
    with pytest.raises(ClientError, match="batch q/0 has several rows with key k1: make rowKey unique"):
        sink.writer.commit(list(staged), 0)
    staged = [
        sink.writer.stage(iter([pa.record_batch({"body": ["x", "y"], "rowKey": ["k1", "k2"]})]), RowKeys("q", 0, 0))
    ]
    sink.writer.commit(list(staged), 0)
    assert sorted(sink.seen()) == [b"x", b"y"]


def test_a_ledger_that_is_gone_or_ahead_is_an_error(broker: Standalone, sinks: Callable[..., Sink]) -> None:
    sink = sinks(broker, "lost", patience_ms=100)
    with pytest.raises(ClientError, match=rf"topic {ledger_topic('g-lost')}, .* before q/5, has no route: start"):
        sink.write(5)
    sinks(broker, "lost", fail_on_ledger_loss=False, patience_ms=100).write(5)
    sink.run(0)
    sink.run(2)
    with pytest.raises(ClientError, match="sink q has committed later batches than 1, and its ledger knows nothing"):
        sink.run(1)
    sink.check(0, 2)


# ---------------------------------------------------------------- kills


def dying(process: ExactlyOnce, steps: int) -> list[str]:
    """Make a process kill itself after a number of steps: before, after or in the middle of a send. Return the list
    of its steps. A retried send is no further step, for example after a busy broker did not answer. A claim after the
    decision is no step either: the process claims the batch again if a slow machine exceeded the lease."""
    producer = process.producer
    done: list[str] = []
    send_one, end = producer.send_one, producer.end

    def step(name: str) -> None:
        if name in done:
            return
        if len(done) == steps:
            raise Killed
        done.append(name)

    def sending(message: Any, queue: Any) -> Any:
        if message.tags == "claim" and "after decision" in done:
            return send_one(message, queue)
        step(f"before {message.tags}")
        sent = send_one(message, queue)
        step(f"after {message.tags}")
        return sent

    def ending(halves: Sequence[Half], batch: Batch, state: TransactionState, until_ms: float) -> Ended:
        step(f"before {state.name}")
        middle = len(halves) // 2
        end(halves[:middle], batch, state, until_ms)
        step(f"in the middle of {state.name}")
        ended = end(halves[middle:], batch, state, until_ms)
        step(f"after {state.name}")
        return ended

    producer.send_one, producer.end = sending, ending  # type: ignore[method-assign]
    return done


def test_a_driver_may_be_killed_anywhere(broker: Standalone, sinks: Callable[..., Sink]) -> None:
    sink = sinks(broker, "kills")
    sink.run(0)
    batches, died_after = [0], []
    for steps in range(40):
        batches.append(len(batches))
        staged = sink.write(batches[-1])
        done = dying(sink.processes[-1], steps)
        try:
            sink.writer.commit(list(staged), batches[-1])
        except Killed:
            died_after.append(done[-1] if done else "nothing")
            sink.start()
            sink.run(batches[-1])
        else:
            break
    assert (
        died_after
        == [
            "nothing",
            "before part",
            "after part",
            "before decision",
            "after decision",
            "before COMMIT",
            "in the middle of COMMIT",
            "after COMMIT",
            "before done",
            "after done",
        ][: len(died_after)]
    )
    assert len(died_after) >= 9
    sink.check(*batches)


@pytest.mark.parametrize("second", range(0, 14, 2))
def test_and_the_one_after_it_too(broker: Standalone, sinks: Callable[..., Sink], second: int) -> None:
    sink = sinks(broker, f"kills-twice-{second}")
    staged = sink.write(0)
    dying(sink.processes[-1], 7)  # in the middle of the commits
    with pytest.raises(Killed):
        sink.writer.commit(list(staged), 0)
    dying(sink.start(), second)
    try:
        sink.run(0)
    except Killed:
        sink.start()
        sink.run(0)
    sink.check(0)


def test_one_that_was_taken_for_dead_commits_nothing_more(broker: Standalone, sinks: Callable[..., Sink]) -> None:
    sink = sinks(broker, "undead")
    staged = sink.write(0)
    old = sink.processes[-1]
    end, is_half_done, goes_on = old.producer.end, threading.Event(), threading.Event()
    errors: list[Exception] = []

    def ending(halves: Sequence[Half], batch: Batch, state: TransactionState, until_ms: float) -> Ended:
        end(halves[:5], batch, state, until_ms)
        is_half_done.set()
        assert goes_on.wait(200)
        return end(halves[5:], batch, state, until_ms)

    def committing() -> None:
        try:
            old.commit(Q0, [piece for one in staged for piece in one.halves])
        except Exception as error:  # noqa: BLE001 - the test below checks it
            errors.append(error)

    old.producer.end = ending  # type: ignore[method-assign]
    thread = threading.Thread(target=committing)
    thread.start()
    assert is_half_done.wait(200)
    sink.start()
    sink.run(0)
    goes_on.set()
    thread.join(200)
    assert (thread.is_alive(), errors) == (False, [])
    sink.check(0)


def test_two_that_decide_at_once_agree_on_the_first(broker: Standalone, sinks: Callable[..., Sink]) -> None:
    sink = sinks(broker, "two")
    first, second = sink.processes[0], sink.start()
    writers.open_sinks[sink.options] = first
    theirs = [piece for staged in sink.write(0) for piece in staged.halves]
    writers.open_sinks[sink.options] = second
    ours = [piece for staged in sink.write(0) for piece in staged.halves]
    send_one = second.producer.send_one

    def late(message: Any, queue: Any) -> Any:
        if message.tags == "decision":
            second.producer.send_one = send_one  # type: ignore[method-assign]
            first.commit(Q0, theirs)
        return send_one(message, queue)

    second.producer.send_one = late  # type: ignore[method-assign]
    second.commit(Q0, ours)
    sink.check(0)


# ---------------------------------------------------------------- brokers that fail


def failing(
    process: ExactlyOnce, fails: Callable[[int, EndTransactionRequest], Exception | None], *, after: bool
) -> None:
    """Have END_TRANSACTIONs of a process fail: not sent, or (``after``) done and the answer lost."""
    calls = process.producer.pool.runtime.calls
    ask, count = calls.ask_end_transaction, [0]

    async def asking(address: str, header: EndTransactionRequest, timeout_ms: float) -> None:
        count[0] += 1
        error = fails(count[0], header)
        if error is None or after:
            await ask(address, header, timeout_ms)
        if error is not None:
            raise error

    calls.ask_end_transaction = asking  # type: ignore[method-assign]


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("which", [1, 5, ROWS])
def test_a_commit_without_an_answer_is_looked_up(
    broker: Standalone, sinks: Callable[..., Sink], which: int, after: bool
) -> None:
    sink = sinks(broker, f"unanswered-{which}-{after}")
    failing(
        sink.processes[0],
        lambda count, header: RequestTimedOut("broker", 37, 1) if count == which else None,
        after=after,
    )
    sink.run(0)
    sink.check(0)


@pytest.mark.parametrize("after", [True, False])
def test_a_commit_that_is_refused_is_looked_up(broker: Standalone, sinks: Callable[..., Sink], after: bool) -> None:
    sink = sinks(broker, f"refused-{after}")
    busy = PeerRefused(ResponseCode.SYSTEM_BUSY, "busy", "broker")
    failing(sink.processes[0], lambda count, header: busy if count % 3 == 0 else None, after=after)
    sink.run(0, shardingKey=["a", "b", "a", "b", "a", "b"])
    sink.check(0)


def test_a_broker_that_keeps_refusing_is_an_error_and_not_the_end(
    broker: Standalone, sinks: Callable[..., Sink]
) -> None:
    sink = sinks(broker, "stubborn", patience_ms=1)
    busy = PeerRefused(ResponseCode.SYSTEM_BUSY, "busy", "broker")
    failing(sink.processes[0], lambda count, header: busy, after=False)
    staged = sink.write(0)
    with pytest.raises(PeerRefused, match="busy"):
        sink.writer.commit(list(staged), 0)
    sink.writer.abort(list(staged), 0)
    sink.start()
    sink.run(0)
    sink.check(0)


def test_rows_whose_half_messages_are_gone_are_staged_again(broker: Standalone, sinks: Callable[..., Sink]) -> None:
    sink = sinks(broker, "gone")
    gone = PeerRefused(ResponseCode.SYSTEM_ERROR, GONE, "broker")
    lost = ("q/0/0/2", "q/0/1/5")
    failing(sink.processes[0], lambda count, header: gone if header.msg_id in lost else None, after=False)
    staged = sink.write(0)
    with pytest.raises(ClientError, match="2 half messages of batch q/0 are gone from their broker, the first that of"):
        sink.writer.commit(list(staged), 0)
    sink.start()
    assert [staged.row_count for staged in sink.run(0)] == [1, 1]
    sink.check(0)


# ---------------------------------------------------------------- brokers that ask


def is_settled(sink: Sink) -> bool:
    """Return True if the check-back has passed every half message."""
    live = sink.live

    async def progress(queue: MessageQueue) -> int | None:
        address = await live.runtime.routes.find_address(queue.broker_name, queue.topic)
        return await live.runtime.calls.committed_offset(address, TRANSACTION_GROUP, queue)

    bounds = live.bounds(live.queues([HALF_TOPIC]))
    return all(portal().run(partial(progress, queue)) == bound.high for queue, bound in bounds.items())


def test_half_messages_that_nobody_committed_are_rolled_back_when_asked(
    asking: Standalone, sinks: Callable[..., Sink]
) -> None:
    sink = sinks(asking, "orphans")
    sink.write(0)  # a driver that was killed before it decided
    sink.start()
    sink.run(0)
    sink.write(1)
    sink.run(1)
    wait_until(lambda: is_settled(sink), 200, "the half messages to be settled")
    sink.check(0, 1)


def test_a_decision_is_found_after_the_ledgers_broker_was_away(
    broker: Standalone, sinks: Callable[..., Sink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks stage nothing in a decided batch, so its second commit has no rows, like the commit of an empty batch."""
    sink = sinks(broker, "away")
    staged = sink.write(0)
    dying(sink.processes[0], 7)
    with pytest.raises(Killed):
        sink.writer.commit(list(staged), 0)
    ledger = sink.start()._ledger
    again = sink.write(0)
    assert not any(one.halves for one in again)
    found = ledger._find_home
    homes = [None, None]
    monkeypatch.setattr(ledger, "_find_home", lambda *args: homes.pop() if homes else found(*args))
    sink.writer.commit(list(again), 0)
    assert not homes
    sink.check(0)


def test_a_process_that_has_nothing_to_do_can_be_asked(broker: Standalone, sinks: Callable[..., Sink]) -> None:
    """A query that is over may leave a decided batch, which any process of the group finishes when it is asked."""
    sink = sinks(broker, "idle")
    sink.write(0)
    runtime = sink.start().producer.pool.runtime
    wait_until(lambda: len(runtime.broker_versions) == 1, 200, "the process to join its group")


def test_half_messages_that_were_given_up_can_be_committed(asking: Standalone, sinks: Callable[..., Sink]) -> None:
    sink = sinks(asking, "given-up")
    staged = sink.write(0)
    wait_until(lambda: is_settled(sink), 200, "the broker to give up")
    sink.writer.commit(list(staged), 0)
    wait_until(lambda: is_settled(sink), 200, "the half messages to be settled")
    sink.check(0)


def test_half_messages_that_were_rolled_back_can_be_committed(asking: Standalone, sinks: Callable[..., Sink]) -> None:
    """A decision may reach the ledger after its batch was aborted."""
    sink = sinks(asking, "taken-back")
    staged = sink.write(0)
    sink.processes[0].roll_back([half for one in staged for piece in one.halves for half in unpack_halves(piece)], Q0)
    wait_until(lambda: is_settled(sink), 200, "the half messages to be settled")
    sink.writer.commit(list(staged), 0)
    wait_until(lambda: is_settled(sink), 200, "the half messages to be settled")
    sink.check(0)


def test_a_decided_batch_is_finished_by_whoever_is_asked(asking: Standalone, sinks: Callable[..., Sink]) -> None:
    sink = sinks(asking, "decided")
    staged = sink.write(0)
    dying(sink.processes[0], 7)
    with pytest.raises(Killed):
        sink.writer.commit(list(staged), 0)
    portal().run(sink.processes.pop().producer.close)
    sink.start()
    sink.write(1)  # keeps the broker asking until the lease has run out
    wait_until(lambda: len(sink.seen()) >= ROWS, 200, "the decided rows to be seen")
    sink.run(1)
    wait_until(lambda: is_settled(sink), 200, "the half messages to be settled")
    sink.check(0, 1)
