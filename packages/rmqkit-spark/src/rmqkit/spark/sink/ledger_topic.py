"""The topic of a ledger. Entries (`ledger`) are written to one of its queues, and read back in order.

An append returns after all entries up to the new entry were read, so its caller sees the same ledger as every other
process. The first entry creates the topic, if the broker creates topics automatically.

The ledger is on one broker, its *home*. Each other broker gets a note that names the home, before the first decision:
otherwise a process that starts while the home is away would not find the ledger, would create a second one, and would
decide its batch a second time.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from rmqkit.errors import ClientError, NoRoute
from rmqkit.protocol.message import Message, read_messages
from rmqkit.protocol.names import AUTO_CREATE_TOPIC
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.spark.broker_pool import Range
from rmqkit.spark.options import SinkOptions
from rmqkit.spark.sink.ledger import Batch, Entry, Half, Kind, Progress, Written, progress, unpack_halves
from rmqkit.spark.sink.producer import SinkProducer
from rmqkit.system import threads

_WINDOW_COUNT = 512
_KEPT_COUNT = 4096
_POLL_MS = 20.0
_ROUTE_PAUSE_MS = 100.0


def ledger_topic(group: str) -> str:
    """Return the ledger topic of a producer group."""
    return f"rmqkit-ledger-{group}"


class LedgerTopic:
    """The ledger's topic. It is thread-safe.

    Attributes:
        entries: the newest entries, without their half messages. Only this class changes the list, under the lock.
    """

    def __init__(self, options: SinkOptions, producer: SinkProducer) -> None:
        self._producer = producer
        self.topic = ledger_topic(options.group)
        self.lease_ms = 3 * options.settle_ms
        self._fails_when_lost = options.fail_on_ledger_loss
        self._patience_ms = options.patience_ms
        self._lock = threads.Lock()
        self._home: MessageQueue | None = None
        self._is_noted = False
        self.entries: list[Written] = []
        self._low = self._high = -1
        self._read_ms = -math.inf

    def append(self, entry: Entry) -> int:
        """Write an entry, and read all entries up to it. Return its offset."""
        # Write first and evaluate afterwards: every other process also reads the entries in the queue's order.
        message = Message(
            topic=self.topic,
            body=entry.encode(),
            tags=entry.kind.value,
            keys=[f"{entry.batch.sink_id}/{entry.batch.batch_id}"],
        )
        with self._lock:
            home = self._reached(entry.batch)
            offset = self._producer.send_one(message, home).queue_offset
            self._read_on(offset)
            assert offset < self._high, "a new entry was read back"
        return offset

    def reach(self, batch: Batch) -> None:
        """Wait until the ledger can be read, or create it.
        Raises NoRoute: brokers do not create topics automatically."""
        with self._lock:
            self._reached(batch)

    def _reached(self, batch: Batch) -> MessageQueue:
        home = self._find_home() or self._make_home(batch)
        self._note_home(home, batch)
        return home

    def progress(self, batch: Batch, age_ms: float = 0.0) -> Progress:
        """Return the state of a batch. The state may be up to ``age_ms`` old.
        Raises ClientError: the ledger is missing, or no longer has entries of the sink."""
        with self._lock:
            # The first batch may create the topic, so do not wait for the topic. For a later batch the ledger exists,
            # but its broker may be restarting.
            if self._find_home(0 if batch.batch_id == 0 else self._patience_ms) is None:
                if batch.batch_id > 0 and self._fails_when_lost:
                    raise ClientError(
                        f"rocketmq: topic {self.topic}, which has the decisions about the batches before"
                        f" {batch.prefix[:-1]}, has no route: start its broker; if this query has never been"
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
                    f" has commits/{batch.batch_id - 1} and batch {batch.batch_id} was never started,"
                    " failOnLedgerLoss=false continues; else compare the target with the source first"
                )
            return now

    def last_batches(self, sink_id: str) -> tuple[int, int | None]:
        """Return the newest completed batch of a sink (or 0), and a batch that the sink has decided but not completed
        (or None)."""
        with self._lock:
            if self._find_home() is None:
                return 0, None
            self._read_on()
            while not (done := self._batches(sink_id, Kind.DONE)) and self._low > self._bounds()[0]:
                self._read_back()
            newest = max(done, default=0)
            return newest, max((one for one in self._batches(sink_id, Kind.DECISION) if one > newest), default=None)

    def halves(self, offset: int) -> list[Half]:
        """Read the half messages of a part. Raises BodyError: the entry has no valid half messages."""
        packed = next(iter(self._written(offset, offset + 1))).entry.halves
        return [half for piece in packed for half in unpack_halves(piece)]

    def stored_ms(self, offset: int) -> int:
        """Return the time at which the broker stored an entry. The entry must have been read."""
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
        """Return the queue that has all entries. Return None if no route has the topic, for example while its broker
        restarts. Raises ClientError: only other brokers have the topic, and name its broker, which is away."""
        begun_ms = self._producer.now_ms
        while self._home is None:
            try:
                self._home, name = self._home_among(_first_of_each(self._producer.pool.queues([self.topic])))
            except NoRoute:
                if self._producer.now_ms >= begun_ms + patience_ms:
                    return None
            else:
                if self._home is None and self._producer.now_ms >= begun_ms + self._patience_ms:
                    raise ClientError(
                        f"rocketmq: topic {self.topic}, which has the decisions about the batches, is on broker {name},"
                        " which has no route: start it"
                    )
            if self._home is None:
                self._producer.pause(_ROUTE_PAUSE_MS)
        return self._home

    def _home_among(self, queues: list[MessageQueue]) -> tuple[MessageQueue | None, str]:
        """Return the queue that has the ledger, or None and the name of the broker that has it."""
        by_broker = {queue.broker_name: queue for queue in queues}
        empty: list[MessageQueue] = []
        name = ""
        for queue in queues:
            bound = self._producer.pool.bounds([queue])[queue]
            if bound.low < bound.high:
                first = self._written(bound.low, bound.low + 1, queue)[0].entry
                if first.kind is not Kind.HOME:
                    return queue, queue.broker_name
                return by_broker.get(first.claimant), first.claimant
            if bound.high > 0:
                name = f"other than {queue.broker_name}, whose note has expired, and"
            else:
                empty.append(queue)
        return (empty[0], empty[0].broker_name) if empty and not name else (None, name)

    def _make_home(self, batch: Batch) -> MessageQueue:
        """Create the topic. Wait until other processes can find it.
        Raises NoRoute: brokers do not create topics automatically."""
        try:
            home = _first_of_each(self._producer.queues(self.topic))[0]
        except NoRoute as error:
            raise NoRoute(f"rocketmq: create topic {self.topic} with one queue: {error}") from error
        self._producer.send_one(self._note(home, batch), home)
        self._home = self._find_home(self._patience_ms) or home
        return self._home

    def _note_home(self, home: MessageQueue, batch: Batch) -> None:
        """Write notes to the brokers that create topics automatically and do not have the topic yet."""
        if self._is_noted:
            return
        try:
            able = _first_of_each(self._producer.queues(AUTO_CREATE_TOPIC))
        except NoRoute:
            able = []
        known = {queue.broker_name for queue in self._producer.pool.queues([self.topic])}
        for queue in able:
            if queue.broker_name not in known:
                place = MessageQueue(self.topic, queue.broker_name, 0)
                self._producer.send_one(self._note(home, batch), place)
        self._is_noted = True

    def _note(self, home: MessageQueue, batch: Batch) -> Message:
        entry = Entry(Kind.HOME, Batch("", batch.batch_id), home.broker_name)
        return Message(topic=self.topic, body=entry.encode(), tags=entry.kind.value)

    def _bounds(self) -> tuple[int, int]:
        assert self._home is not None, "the queue of the ledger is known"
        bound = self._producer.pool.bounds([self._home])[self._home]
        return bound.low, bound.high

    def _read_on(self, wanted: int = -1) -> None:
        """Read the new entries, at least up to an offset. A stored entry is dispatched to its queue a little later."""
        # Take the time before the read: the entries then include everything that was written up to this time.
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

    def _written(self, low: int, high: int, queue: MessageQueue | None = None) -> list[Written]:
        home = queue or self._home
        assert home is not None, "the queue of the ledger is known"
        found: list[Written] = []
        if low < high:
            for body in self._producer.pool.bodies(Range(home, low, high)):
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


def _first_of_each(queues: list[MessageQueue]) -> list[MessageQueue]:
    """Return the first queue of each broker, in the order of their names."""
    firsts: dict[str, MessageQueue] = {}
    for queue in sorted(queues):
        firsts.setdefault(queue.broker_name, queue)
    return list(firsts.values())


def _trimmed(written: Written) -> Written:
    return replace(written, entry=replace(written.entry, halves=()))
