"""`LedgerTopic` writes ledger entries to one queue of a topic and reads them back in order. What they mean: `ledger`.

An append returns once everything up to the new entry was read, so what the ledger says then is what everybody else
reads there, too. The first entry creates the topic at brokers that create topics by themselves.
"""

from __future__ import annotations

import math
import threading

from msgspec.structs import replace

from rmqkit.errors import ClientError, NoRoute
from rmqkit.protocol.message import Message, read_messages
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.spark.broker_pool import Range
from rmqkit.spark.options import SinkOptions
from rmqkit.spark.sink.ledger import Batch, Entry, Half, Kind, Progress, Written, progress, unpack_halves
from rmqkit.spark.sink.producer import SinkProducer

_WINDOW_COUNT = 512
_KEPT_COUNT = 4096
_POLL_MS = 20.0
_ROUTE_PAUSE_MS = 100.0


def ledger_topic(group: str) -> str:
    """Name the topic that says what a producer group's sinks decided."""
    return f"rmqkit-ledger-{group}"


class LedgerTopic:
    """The ledger's topic; thread-safe.

    Attributes:
        entries: the newest entries that were read, without their half messages; written only here, under the lock.
    """

    def __init__(self, options: SinkOptions, producer: SinkProducer) -> None:
        self._producer = producer
        self.topic = ledger_topic(options.group)
        self.lease_ms = 3 * options.settle_ms
        self._fails_when_lost = options.fail_on_ledger_loss
        self._patience_ms = options.patience_ms
        self._lock = threading.Lock()
        self._home: MessageQueue | None = None
        self.entries: list[Written] = []
        self._low = self._high = -1
        self._read_ms = -math.inf

    def append(self, entry: Entry) -> int:
        """Write an entry and read everything up to it; returns its offset."""
        # Written first, judged afterwards: what the queue's order says is what every other process will read.
        message = Message(
            topic=self.topic,
            body=entry.encode(),
            tags=entry.kind.value,
            keys=[f"{entry.batch.sink_id}/{entry.batch.batch_id}"],
        )
        with self._lock:
            home = self._find_home()
            offset = self._make_home(message) if home is None else self._producer.send_one(message, home).queue_offset
            self._read_on(offset)
            assert offset < self._high, "an entry is read back before anybody acts on it"
        return offset

    def progress(self, batch: Batch, age_ms: float = 0.0) -> Progress:
        """Read what the ledger says about a batch now, or said ``age_ms`` ago at most.
        Raises ClientError: it is not there, or has forgotten the sink."""
        with self._lock:
            # The first batch may be what creates the topic, so nobody waits for it. A later one had a ledger, whose
            # broker may be starting again.
            if self._find_home(0 if batch.batch_id == 0 else self._patience_ms) is None:
                if batch.batch_id > 0 and self._fails_when_lost:
                    raise ClientError(
                        f"rocketmq: topic {self.topic}, which says what was decided about the batches before"
                        f" {batch.prefix[:-1]}, is in no route: start its broker; if this query has never been"
                        " transactional before, failOnLedgerLoss=false begins a new one"
                    )
                return Progress()
            if self._producer.now_ms - self._read_ms >= age_ms:
                self._read_on()
            while True:
                now = progress(self.entries, batch, self.lease_ms)
                if now.is_decided or self._knows_earlier(batch) or self._low <= self._bounds()[0]:
                    break
                self._read_back()
            if not now.is_known and batch.batch_id > 0 and self._low > 0 and self._fails_when_lost:
                raise ClientError(
                    f"rocketmq: topic {self.topic} has no entry of sink {batch.sink_id} any more: if the checkpoint"
                    f" has commits/{batch.batch_id - 1} and batch {batch.batch_id} was never begun,"
                    " failOnLedgerLoss=false goes on; else compare the target with the source first"
                )
            return now

    def last_batches(self, sink_id: str) -> tuple[int, int | None]:
        """Find the newest batch of a sink that is done, 0 without one, and one that is decided and not done yet."""
        with self._lock:
            if self._find_home() is None:
                return 0, None
            self._read_on()
            while not (done := self._batches(sink_id, Kind.DONE)) and self._low > self._bounds()[0]:
                self._read_back()
            newest = max(done, default=0)
            return newest, max((one for one in self._batches(sink_id, Kind.DECISION) if one > newest), default=None)

    def halves(self, offset: int) -> list[Half]:
        """Read the half messages of a part. Raises BodyError: the entry is none."""
        packed = next(iter(self._written(offset, offset + 1))).entry.halves
        return [half for piece in packed for half in unpack_halves(piece)]

    def stored_ms(self, offset: int) -> int:
        """Look up when the broker stored an entry that was read."""
        return next(written.stored_ms for written in reversed(self.entries) if written.offset == offset)

    def _batches(self, sink_id: str, kind: Kind) -> list[int]:
        entries = (written.entry for written in self.entries)
        return [entry.batch.batch_id for entry in entries if entry.kind is kind and entry.batch.sink_id == sink_id]

    def _knows_earlier(self, batch: Batch) -> bool:
        return any(
            written.entry.batch.sink_id == batch.sink_id and written.entry.batch.batch_id < batch.batch_id
            for written in self.entries
        )

    def _find_home(self, patience_ms: float = 0.0) -> MessageQueue | None:
        """Find the queue of all entries; None when no route names the topic, as while its broker starts again."""
        deadline_ms = self._producer.now_ms + patience_ms
        while self._home is None:
            try:
                self._home = min(self._producer.pool.queues([self.topic]))
            except NoRoute:
                if self._producer.now_ms >= deadline_ms:
                    return None
                self._producer.pause(_ROUTE_PAUSE_MS)
        return self._home

    def _make_home(self, message: Message) -> int:
        """Have the topic created by sending the first entry to it; others shall find it when this returns.
        Raises NoRoute: brokers do not create topics by themselves."""
        try:
            home = min(self._producer.queues(self.topic))
        except NoRoute as error:
            raise NoRoute(f"rocketmq: create topic {self.topic} with one queue: {error}") from error
        sent = self._producer.send_one(message, home)
        self._home = self._find_home(self._patience_ms) or home
        return sent.queue_offset

    def _bounds(self) -> tuple[int, int]:
        assert self._home is not None, "nothing is read before it is found"
        bound = self._producer.pool.bounds([self._home])[self._home]
        return bound.low, bound.high

    def _read_on(self, wanted: int = -1) -> None:
        """Read what is new, at least up to an offset: what was stored is dispatched a little later."""
        # The time before the read: what is as old as this has at least all that was there then.
        self._read_ms = self._producer.now_ms
        while (bounds := self._bounds())[1] <= wanted:
            self._producer.pause(_POLL_MS)
        low, high = bounds
        if self._high < 0:
            self._low = self._high = max(low, high - _WINDOW_COUNT)
        self.entries += map(_trimmed, self._written(self._high, high))
        self._high = max(high, self._high)
        if len(self.entries) > 2 * _KEPT_COUNT:
            del self.entries[:-_KEPT_COUNT]
            self._low = self.entries[0].offset

    def _read_back(self) -> None:
        low = max(self._bounds()[0], self._low - _WINDOW_COUNT)
        self.entries[:0] = map(_trimmed, self._written(low, self._low))
        self._low = low

    def _written(self, low: int, high: int) -> list[Written]:
        assert self._home is not None, "nothing is read before it is found"
        found: list[Written] = []
        if low < high:
            for body in self._producer.pool.bodies(Range(self._home, low, high)):
                found += [
                    Written(
                        Entry.decode(message.body),
                        message.queue_offset,
                        message.store_timestamp,
                        message.born_timestamp,
                    )
                    for message in read_messages(body)
                ]
        return found


def _trimmed(written: Written) -> Written:
    return replace(written, entry=replace(written.entry, halves=()))
