"""`ExactlyOnce` makes each row of a batch visible once: the ledger decides, the holder of the batch's lease commits.

==============================  ======================================================================================
step                            actor, and the result of a crash after the step
==============================  ======================================================================================
1 stage rows as half messages   tasks; consumers do not see the rows, which are rolled back when brokers check them
2 write parts, then a decision  the driver; from here on the rows are committed, any later process makes them visible
3 END_TRANSACTION, commit       the holder of the lease; a process that replaces the holder waits until no request of
                                the holder can still take effect, then looks every row up in the target before it
                                commits the row
4 write ``done``                the holder, once every commit was answered with success or looked up
==============================  ======================================================================================

Brokers do not record decisions: a second commit of a half message is a second message. So a commit is repeated only
after the row was looked up, in the queues themselves, from where they ended at the decision. This is exact once the
dispatcher has caught up, while an index may lag. The sink never answers a check of a broker (check-back) with commit:
it answers unknown while the batch is open, and roll back afterwards. A decided batch with an expired lease is finished
first, from its own half messages.

What can still go wrong, and what the broker does about it: docs/decisions/0006. Source: behaviour.md §9.1.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from msgspec import Struct

from rmqkit.client.producer.transaction import TransactionState
from rmqkit.client.runtime.routes import NOT_REGISTERED
from rmqkit.errors import ClientError, NoRoute, PeerRefused
from rmqkit.protocol import properties as names
from rmqkit.protocol.message import ReceivedMessage, records_of
from rmqkit.protocol.properties import find_property
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.spark.broker_pool import DataLost, Range
from rmqkit.spark.options import SinkOptions
from rmqkit.spark.sink.ledger import Batch, Entry, Half, Kind, Low, Progress, unpack_halves
from rmqkit.spark.sink.ledger_topic import LedgerTopic
from rmqkit.spark.sink.producer import Ended, SinkProducer, pace

_log = logging.getLogger(__name__)

_PART_BYTES_MAX = 1 << 20
_POLL_MS = 20.0
_ROUTE_PAUSE_MS = 100.0
_REFUSED_PAUSE_MS = 250.0
_UNIQ_KEY = names.UNIQ_KEY.encode()
_CHECK_AGE_MS = 1000.0
_GONE = "Find prepared transaction message failed"


class _Tenure(Struct, frozen=True):
    """A lease: the offset of the entry that began it, and until when (ms, monotonic) its holder may send."""

    since: int
    ends_ms: float


class ExactlyOnce:
    """The transactional sink of one process: tasks stage with it, the driver commits with it, and it answers brokers'
    check-backs."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._claimant = uuid.uuid4().hex
        self.producer = SinkProducer(options, self.answer_check)
        self._ledger = LedgerTopic(options, self.producer)
        self._finishing = threading.Lock()
        self.producer.start()

    # -- what tasks do

    def progress(self, batch: Batch) -> Progress:
        """Read from the ledger where a batch is.
        Raises ClientError: its ledger is not there, or has forgotten the sink."""
        return self._ledger.progress(batch)

    def last_batches(self, sink_id: str) -> tuple[int, int | None]:
        """Find the newest batch of a sink that is done, 0 without one, and one that is decided and not done yet."""
        return self._ledger.last_batches(sink_id)

    def roll_back(self, halves: Sequence[Half], batch: Batch) -> None:
        """Have half messages forgotten; brokers that do not hear it ask later."""
        until_ms = self.producer.now_ms + self._options.settle_ms
        ended = self.producer.end(halves, batch, TransactionState.ROLLBACK, until_ms)
        if ended.unsent or ended.is_in_doubt:
            _log.warning("%d half messages of batch %s wait for a check-back", len(ended.unsent), batch.prefix)

    # -- what the driver does

    def commit(self, batch: Batch, packed: Iterable[bytes]) -> None:
        """Make staged rows visible, each once, unless the batch was decided before: then finish what was decided.
        Raises ClientError, RemotingError, PeerRefused: it could not be finished yet; another call goes on."""
        with self._finishing:
            self._commit(batch, list(packed))

    def abort(self, batch: Batch, packed: Iterable[bytes]) -> None:
        """Forget staged rows of a batch that has failed, unless it was decided."""
        if self._ledger.progress(batch).is_decided:
            return
        self.roll_back([half for piece in packed for half in unpack_halves(piece)], batch)
        self._ledger.append(Entry(Kind.ABORTED, batch))

    # -- what brokers ask

    def answer_check(self, message: ReceivedMessage) -> TransactionState:
        """Answer a broker how the transaction of a half message ended. Runs in a thread of the producer."""
        batch = Batch.of_key(message.msg_id)
        if batch is None:
            return TransactionState.UNKNOWN  # another program's, of the same group
        now = self._ledger.progress(batch, age_ms=_CHECK_AGE_MS)
        lapsed_ms = now.held_ms + 2 * self._ledger.lease_ms
        if now.is_decided and not now.is_done and message.store_timestamp > lapsed_ms:
            # Not waited for: a commit of this process is at it already, and the broker asks again.
            if not self._finishing.acquire(blocking=False):
                return TransactionState.UNKNOWN
            try:
                self._finish(batch)
            finally:
                self._finishing.release()
            now = self._ledger.progress(batch)
        if now.is_done or now.is_past or message.born_timestamp <= now.aborted_ms:
            return TransactionState.ROLLBACK
        return TransactionState.UNKNOWN

    # -- inside

    def _commit(self, batch: Batch, pieces: Sequence[bytes]) -> None:
        before = self._ledger.progress(batch)
        if before.is_done:
            return
        halves = [half for piece in pieces for half in unpack_halves(piece)]
        # Spark runs a batch again that was decided: the half messages of the decision are committed, those staged this
        # time would be a second message each.
        if before.is_decided and not before.gone:
            self.roll_back(halves, batch)
            self._finish(batch)
        elif not halves and not before.is_decided:
            self._ledger.append(Entry(Kind.DONE, batch, self._claimant))  # that the ledger knows the sink
        else:
            _check_new(batch, halves, before)
            sent_ms = self.producer.now_ms  # before the entry is written: the lease runs from no later than this
            now = self._decide(batch, pieces, halves, before)
            assert now.is_decided, "the decision was read back"
            assert now.holder, "a decision gives somebody the lease"
            if now.decided_by != self._claimant:
                self.roll_back(halves, batch)
            if before.is_decided or now.since != now.decision or now.holder != self._claimant:
                self._finish(batch)
            else:
                self._finish(batch, _Tenure(now.since, sent_ms + self._options.settle_ms), halves)

    def _decide(self, batch: Batch, pieces: Sequence[bytes], halves: Iterable[Half], now: Progress) -> Progress:
        """Write the parts and the decision; returns where the batch is then."""
        lows = now.lows
        if not now.is_decided:
            # Before the decision, or a row that another process makes visible could lie in front of them.
            bounds = self.producer.pool.bounds(self._queues(halves))
            lows = tuple(Low(*_place(queue), bound.high) for queue, bound in sorted(bounds.items()))
        # Parts first: a decision that names a part which a crash kept from being written could never be finished.
        parts = [self._ledger.append(Entry(Kind.PART, batch, halves=bundle)) for bundle in _bundles(pieces)]
        assert parts == sorted(set(parts)), "parts lie in the order in which they were written"
        self._ledger.append(Entry(Kind.DECISION, batch, self._claimant, parts=tuple(parts), lows=lows))
        return self._ledger.progress(batch)

    def _finish(self, batch: Batch, tenure: _Tenure | None = None, pending: Sequence[Half] | None = None) -> None:
        """Commit what is decided and not visible; ``pending`` None looks it up. A tenure that was interrupted makes
        what was looked up worthless, because somebody else may have committed meanwhile."""
        deadline_ms = self.producer.now_ms + self._options.patience_ms
        refused: dict[str, PeerRefused] = {}
        while True:
            since = None if tenure is None else tenure.since
            if tenure is None or tenure.ends_ms <= self.producer.now_ms + self._options.settle_ms / 2:
                tenure = self._claim(batch)
                if tenure is None:
                    return
            if pending is None or tenure.since != since:
                pending = self._not_visible(batch)
                self._check_not_gone(batch, pending, refused)
                refused.clear()
                since, tenure = tenure.since, self._claim(batch)  # the look-up may have taken longer than the lease
                if tenure is None:
                    return
                if tenure.since != since:
                    pending = None
                    continue
            # From here on nothing is committed that somebody else may have committed since it was looked up.
            assert tenure.since == since, "the lease is the one under which rows were looked up"
            count = self._options.rows_per_s or len(pending)
            with pace(min(count, len(pending)), self._options.rows_per_s):
                ended = self.producer.end(pending[:count], batch, TransactionState.COMMIT, tenure.ends_ms)
            ended.unsent += pending[count:]
            if len(ended.unsent) + len(ended.refused) < len(pending) and not ended.is_in_doubt:
                deadline_ms = self.producer.now_ms + self._options.patience_ms
            if not (ended.unsent or ended.is_in_doubt or ended.refused):
                # Only now: the entry has check-backs answered with rollback.
                self._ledger.append(Entry(Kind.DONE, batch, self._claimant))
                return
            pending = self._after(ended, refused, deadline_ms)

    def _after(self, ended: Ended, refused: dict[str, PeerRefused], deadline_ms: float) -> list[Half] | None:
        """Say what is pending after a round; None when that has to be looked up, which is when it can be."""
        for half, error in ended.refused:
            refused[half.row] = error
        if self.producer.now_ms > deadline_ms:
            why = ended.error or next((error for _, error in ended.refused), None)
            raise why or ClientError(f"rocketmq: claims take longer than transactionSettleMs={self._options.settle_ms}")
        if ended.is_in_doubt:  # an answer may be late by the time of writing the request and that of carrying it out
            self.producer.pause(self._options.settle_ms)
            return None
        if ended.refused:
            self.producer.pause(_REFUSED_PAUSE_MS)
            return None
        return ended.unsent

    def _check_not_gone(self, batch: Batch, pending: Iterable[Half], refused: dict[str, PeerRefused]) -> None:
        """Raises ClientError: half messages are neither visible nor there; the ledger says so, too."""
        gone = tuple(half.row for half in pending if half.row in refused and refused[half.row].remark == _GONE)
        if gone:
            self._ledger.append(Entry(Kind.GONE, batch, rows=gone))
            _raise_gone(batch, gone)

    def _claim(self, batch: Batch) -> _Tenure | None:
        """Get the lease of a batch, or keep it; None when there is nothing left to do."""
        while True:
            sent_ms = self.producer.now_ms
            own = self._ledger.append(Entry(Kind.CLAIM, batch, self._claimant))
            now = self._ledger.progress(batch)
            if now.is_done:
                return None
            if now.holder == self._claimant:
                return _Tenure(now.since, sent_ms + self._options.settle_ms)
            wait_ms = now.held_ms + self._ledger.lease_ms - self._ledger.stored_ms(own)
            _log.info("batch %s is being committed by another process: waiting %d ms", batch.prefix, wait_ms)
            self.producer.pause(max(wait_ms, _POLL_MS))

    def _not_visible(self, batch: Batch) -> list[Half]:
        """Find the decided half messages whose rows nobody can see yet."""
        now = self._ledger.progress(batch)
        halves = [half for offset in now.parts for half in self._ledger.halves(offset)]
        visible = self._visible(batch, now.lows, halves)
        latest = {half.row: half for half in halves}  # of a row that was staged again the later one is there
        return [half for row, half in latest.items() if row not in visible]

    def _visible(self, batch: Batch, lows: Iterable[Low], halves: Sequence[Half]) -> set[str]:
        """Read the rows of a batch that consumers can see out of the queues, as they are now."""
        pool = self.producer.pool
        queues = self._queues(halves)
        self._wait_settled(queues)
        begun = {MessageQueue(low.topic, low.broker_name, low.queue_id): low.offset for low in lows}
        rows: set[str] = set()
        for queue, bound in pool.bounds({*queues, *begun}).items():
            low = begun.get(queue, 0)
            if low < bound.high:
                for key in self._row_keys(Range(queue, low, bound.high), batch):
                    rows.add(key.removeprefix(batch.prefix))
        return rows

    def _wait_settled(self, queues: Sequence[MessageQueue]) -> None:
        """Wait until what brokers have taken in can be pulled. One that stood still has requests before it that were
        written long ago: they take effect, or not, in the time after it goes on."""
        while True:
            asked_ms = self.producer.now_ms
            self.producer.pool.wait_dispatched(queues)
            if self.producer.now_ms - asked_ms < self._options.settle_ms:
                return
            self.producer.pause(self._options.settle_ms)

    def _row_keys(self, part: Range, batch: Batch) -> Iterator[str]:
        prefix = batch.prefix.encode()
        try:
            for body in self.producer.pool.bodies(part):
                keys = (find_property(record.properties, _UNIQ_KEY) for record in records_of(body))
                yield from (key.decode() for key in keys if key is not None and key.startswith(prefix))
        except DataLost as error:
            raise ClientError(
                f"rocketmq: whether the rows of batch {batch.prefix[:-1]} can be seen is not known any more: {error}"
            ) from error

    def _queues(self, halves: Iterable[Half]) -> list[MessageQueue]:
        """Find the queues that rows may be in. A row is on the broker of its half message: one that is in no route just
        now, or a topic that was created by sending and is not in the routes yet, has to be waited for.
        Raises NoRoute: it does not appear."""
        wanted = {(half.topic, half.broker_name) for half in halves}
        deadline_ms = self.producer.now_ms + self._options.patience_ms
        while True:
            try:
                queues = self.producer.pool.queues({topic for topic, _ in wanted})
                missing = wanted - {(queue.topic, queue.broker_name) for queue in queues}
                if not missing:
                    return queues
                failed = NoRoute("no route of topic {} names broker {}: {}".format(*min(missing), NOT_REGISTERED))
            except NoRoute as error:
                failed = error
            if self.producer.now_ms > deadline_ms:
                raise failed
            self.producer.pause(_ROUTE_PAUSE_MS)


def _place(queue: MessageQueue) -> tuple[str, str, int]:
    """The parts of a queue that a `Low` begins with."""
    return queue.topic, queue.broker_name, queue.queue_id


def _bundles(pieces: Iterable[bytes]) -> Iterable[tuple[bytes, ...]]:
    """Put pieces together that go into one part each."""
    bundle: list[bytes] = []
    for piece in pieces:
        if bundle and sum(map(len, bundle)) + len(piece) > _PART_BYTES_MAX:
            yield tuple(bundle)
            bundle = []
        bundle.append(piece)
    if bundle:
        yield tuple(bundle)


def _check_new(batch: Batch, halves: Sequence[Half], now: Progress) -> None:
    """Raises ClientError: rows have the same key, some that are to be staged again are missing, or the sink was at a
    later batch already."""
    if len({half.row for half in halves}) < len(halves):
        row = Counter(half.row for half in halves).most_common(1)[0][0]
        raise ClientError(f"rocketmq: batch {batch.prefix[:-1]} has several rows with key {row}: make rowKey unique")
    missing = now.gone.difference(half.row for half in halves)
    if missing:
        raise ClientError(
            f"rocketmq: {len(missing)} rows of batch {batch.prefix[:-1]} have to be staged again, and it does not have"
            f" them any more, the first is {min(missing)}: run it with the rows that it had"
        )
    if now.is_past and not now.is_decided:
        raise ClientError(
            f"rocketmq: sink {batch.sink_id} has committed later batches than {batch.batch_id}, and its ledger knows"
            " nothing of this one: go on from the newest checkpoint, or set another sinkId"
        )


def _raise_gone(batch: Batch, gone: Sequence[str]) -> NoReturn:
    raise ClientError(
        f"rocketmq: {len(gone)} half messages of batch {batch.prefix[:-1]} are gone from their broker, the first that"
        f" of row {gone[0]}: start the query again, it stages these rows once more"
    )
