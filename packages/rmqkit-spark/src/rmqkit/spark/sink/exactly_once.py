"""Rows that become visible exactly once. The ledger decides a batch, and the holder of the batch's lease commits it.

==============================  ======================================================================================
step                            actor, and the result of a crash after the step
==============================  ======================================================================================
1 stage rows as half messages   tasks; consumers do not see the rows, which are rolled back when brokers check them
2 write parts, then a decision  the driver; the rows are now committed, and a later process would make them visible
3 END_TRANSACTION, commit       the holder of the lease; a process that replaces the holder waits until no request of
                                the holder can still take effect, then looks every row up in the target before it
                                commits the row
4 write ``done``                the holder, after every commit has succeeded or was found in the target
==============================  ======================================================================================

Brokers do not record decisions: a second commit of a half message creates a second message. Therefore a commit is
repeated only after a lookup of the row in the queues, starting at the ends that the queues had at the decision. The
lookup is exact when the dispatcher has caught up, while an index may lag. The sink never answers a check of a broker
(check-back) with commit. It answers unknown while the batch is open, and roll back afterwards. A decided batch with an
expired lease is finished first, from its own half messages.

Remaining risks, and the broker's part in them: docs/decisions/0006. Source: behaviour.md §9.1.
"""

from __future__ import annotations

import logging
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
from rmqkit.system import threads

_log = logging.getLogger(__name__)

_PART_BYTES_MAX = 1 << 20
_POLL_MS = 20.0
_ROUTE_PAUSE_MS = 100.0
_REFUSED_PAUSE_MS = 250.0
_UNIQ_KEY = names.UNIQ_KEY.encode()
_CHECK_AGE_MS = 1000.0
_GONE = "Find prepared transaction message failed"


class _Tenure(Struct, frozen=True):
    """A lease: the offset of its first entry, and the time (ms, monotonic) until which its holder may send."""

    since: int
    ends_ms: float


class ExactlyOnce:
    """The transactional sink of one process. Tasks stage rows with it, the driver commits batches with it, and it
    answers the check-backs of brokers."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._claimant = uuid.uuid4().hex
        self.producer = SinkProducer(options, self.answer_check)
        self._ledger = LedgerTopic(options, self.producer)
        self._finishing = threads.Lock()
        self.producer.start()

    # -- called by tasks

    def progress(self, batch: Batch) -> Progress:
        """Read the state of a batch from the ledger.
        Raises ClientError: the ledger is missing, or no longer has entries of the sink."""
        return self._ledger.progress(batch)

    def last_batches(self, sink_id: str) -> tuple[int, int | None]:
        """Return the newest completed batch of a sink (or 0), and a batch that the sink has decided but not completed
        (or None)."""
        return self._ledger.last_batches(sink_id)

    def roll_back(self, halves: Sequence[Half], batch: Batch) -> None:
        """Roll half messages back. A broker that does not get the request sends a check-back later."""
        until_ms = self.producer.now_ms + self._options.settle_ms
        ended = self.producer.end(halves, batch, TransactionState.ROLLBACK, until_ms)
        if ended.unsent or ended.is_in_doubt:
            _log.warning("%d half messages of batch %s wait for a check-back", len(ended.unsent), batch.prefix)

    # -- called by the driver

    def commit(self, batch: Batch, packed: Iterable[bytes]) -> None:
        """Make each staged row visible once. If the batch was already decided, finish the decided rows instead.
        Raises ClientError, RemotingError, PeerRefused: the commit is not complete; another call continues it."""
        with self._finishing:
            self._commit(batch, list(packed))

    def abort(self, batch: Batch, packed: Iterable[bytes]) -> None:
        """Roll the staged rows of a failed batch back, unless the batch was decided."""
        if self._ledger.progress(batch).is_decided:
            return
        self.roll_back([half for piece in packed for half in unpack_halves(piece)], batch)
        self._ledger.append(Entry(Kind.ABORTED, batch))

    # -- called for check-backs of brokers

    def answer_check(self, message: ReceivedMessage) -> TransactionState:
        """Answer the check-back of a half message. This runs in a thread of the producer."""
        batch = Batch.of_key(message.msg_id)
        if batch is None:
            return TransactionState.UNKNOWN  # the message belongs to another program in the same group
        now = self._ledger.progress(batch, age_ms=_CHECK_AGE_MS)
        lapsed_ms = now.held_ms + 2 * self._ledger.lease_ms
        if now.is_decided and not now.is_done and message.store_timestamp > lapsed_ms:
            # Do not wait: a commit of this process is already running, and the broker repeats the check-back.
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
        halves = [half for piece in pieces for half in unpack_halves(piece)]
        if not halves and not before.is_known:
            # Tasks stage nothing in a decided batch. While the ledger's broker is away, the decision is not known.
            self._ledger.reach(batch)
            before = self._ledger.progress(batch)
        if before.is_done:
            return
        # Spark repeats a decided batch: the half messages of the decision are committed. A commit of the newly staged
        # half messages would create a second message for each row.
        if before.is_decided and not before.gone:
            self.roll_back(halves, batch)
            self._finish(batch)
        elif not halves and not before.is_decided:
            self._ledger.append(Entry(Kind.DONE, batch, self._claimant))  # so that the ledger has an entry of the sink
        else:
            _check_new(batch, halves, before)
            sent_ms = self.producer.now_ms  # before the entry is written: the lease starts at this time or later
            now = self._decide(batch, pieces, halves, before)
            assert now.is_decided, "the batch is decided after its decision was written"
            assert now.holder, "a decided batch has a holder of its lease"
            if now.decided_by != self._claimant:
                self.roll_back(halves, batch)
            if before.is_decided or now.since != now.decision or now.holder != self._claimant:
                self._finish(batch)
            else:
                self._finish(batch, _Tenure(now.since, sent_ms + self._options.settle_ms), halves)

    def _decide(self, batch: Batch, pieces: Sequence[bytes], halves: Iterable[Half], now: Progress) -> Progress:
        """Write the parts and the decision. Return the new state of the batch."""
        lows = now.lows
        if not now.is_decided:
            # Read the ends before the decision: after the decision another process may make rows visible before later
            # ends.
            bounds = self.producer.pool.bounds(self._queues(halves))
            lows = tuple(Low(*_place(queue), bound.high) for queue, bound in sorted(bounds.items()))
        # Write the parts first: a decision with a missing part could never be finished after a crash.
        parts = [self._ledger.append(Entry(Kind.PART, batch, halves=bundle)) for bundle in _bundles(pieces)]
        assert parts == sorted(set(parts)), "the offsets of the parts increase in the order of writing"
        self._ledger.append(Entry(Kind.DECISION, batch, self._claimant, parts=tuple(parts), lows=lows))
        return self._ledger.progress(batch)

    def _finish(self, batch: Batch, tenure: _Tenure | None = None, pending: Sequence[Half] | None = None) -> None:
        """Commit the decided rows that are not visible: ``pending``, or the result of a lookup if ``pending`` is None.
        If the lease was interrupted, repeat the lookup, because another process may have committed rows meanwhile."""
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
                since, tenure = tenure.since, self._claim(batch)  # the lookup may have taken longer than the lease
                if tenure is None:
                    return
                if tenure.since != since:
                    pending = None
                    continue
            # No other process can have committed the rows since their lookup.
            assert tenure.since == since, "the rows were looked up under the current lease"
            count = self._options.rows_per_s or len(pending)
            with pace(min(count, len(pending)), self._options.rows_per_s):
                ended = self.producer.end(pending[:count], batch, TransactionState.COMMIT, tenure.ends_ms)
            ended.unsent += pending[count:]
            if len(ended.unsent) + len(ended.refused) < len(pending) and not ended.is_in_doubt:
                deadline_ms = self.producer.now_ms + self._options.patience_ms
            if not (ended.unsent or ended.is_in_doubt or ended.refused):
                # Write this entry last: from now on check-backs are answered with rollback.
                self._ledger.append(Entry(Kind.DONE, batch, self._claimant))
                return
            pending = self._after(ended, refused, deadline_ms)

    def _after(self, ended: Ended, refused: dict[str, PeerRefused], deadline_ms: float) -> list[Half] | None:
        """Return the half messages that are still pending after a call that committed some of them. Return None if the
        rows must be looked up."""
        for half, error in ended.refused:
            refused[half.row] = error
        if self.producer.now_ms > deadline_ms:
            why = ended.error or next((error for _, error in ended.refused), None)
            raise why or ClientError(f"rocketmq: claims take longer than transactionSettleMs={self._options.settle_ms}")
        if ended.is_in_doubt:  # the request may still be written and executed
            self.producer.pause(self._options.settle_ms)
            return None
        if ended.refused:
            self.producer.pause(_REFUSED_PAUSE_MS)
            return None
        return ended.unsent

    def _check_not_gone(self, batch: Batch, pending: Iterable[Half], refused: dict[str, PeerRefused]) -> None:
        """Check that the broker still has the half messages of invisible rows. Record missing half messages in the
        ledger.
        Raises ClientError: half messages are missing."""
        gone = tuple(half.row for half in pending if half.row in refused and refused[half.row].remark == _GONE)
        if gone:
            self._ledger.append(Entry(Kind.GONE, batch, rows=gone))
            _raise_gone(batch, gone)

    def _claim(self, batch: Batch) -> _Tenure | None:
        """Acquire or extend the lease of a batch. Return None if the batch is done."""
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
        """Return the decided half messages with rows that are not visible yet."""
        now = self._ledger.progress(batch)
        halves = [half for offset in now.parts for half in self._ledger.halves(offset)]
        visible = self._visible(batch, now.lows, halves)
        latest = {half.row: half for half in halves}  # for a row that was staged again, the later half message exists
        return [half for row, half in latest.items() if row not in visible]

    def _visible(self, batch: Batch, lows: Iterable[Low], halves: Sequence[Half]) -> set[str]:
        """Return the keys of the visible rows of a batch, read from the queues."""
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
        """Wait until all messages that brokers have stored can be pulled. A broker that was suspended has old requests
        in its buffers. These requests take effect within ``transactionSettleMs`` after the broker continues, or never.
        """
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
        """Return the queues that may contain the rows. A row is on the same broker as its half message. If such a
        broker is in no route now, wait for the broker. If sending has just created the topic, wait for its route.
        Raises NoRoute: the broker or the topic does not appear."""
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
    """Return topic, broker name and queue id of a queue, which are the first three fields of its `Low`."""
    return queue.topic, queue.broker_name, queue.queue_id


def _bundles(pieces: Iterable[bytes]) -> Iterable[tuple[bytes, ...]]:
    """Group pieces into the parts of a decision."""
    bundle: list[bytes] = []
    for piece in pieces:
        if bundle and sum(map(len, bundle)) + len(piece) > _PART_BYTES_MAX:
            yield tuple(bundle)
            bundle = []
        bundle.append(piece)
    if bundle:
        yield tuple(bundle)


def _check_new(batch: Batch, halves: Sequence[Half], now: Progress) -> None:
    """Check a batch before its decision. Raises ClientError: several rows have the same key, rows that must be staged
    again are missing, or the sink has already committed a later batch."""
    if len({half.row for half in halves}) < len(halves):
        row = Counter(half.row for half in halves).most_common(1)[0][0]
        raise ClientError(f"rocketmq: batch {batch.prefix[:-1]} has several rows with key {row}: make rowKey unique")
    missing = now.gone.difference(half.row for half in halves)
    if missing:
        raise ClientError(
            f"rocketmq: {len(missing)} rows of batch {batch.prefix[:-1]} have to be staged again, but the batch"
            f" no longer has them (the first is {min(missing)}): run it with its original rows"
        )
    if now.is_past and not now.is_decided:
        raise ClientError(
            f"rocketmq: sink {batch.sink_id} has committed later batches than {batch.batch_id}, and its ledger knows"
            " nothing of this one: continue from the newest checkpoint, or set another sinkId"
        )


def _raise_gone(batch: Batch, gone: Sequence[str]) -> NoReturn:
    raise ClientError(
        f"rocketmq: {len(gone)} half messages of batch {batch.prefix[:-1]} are gone from their broker, the first that"
        f" of row {gone[0]}: start the query again to stage these rows again"
    )
