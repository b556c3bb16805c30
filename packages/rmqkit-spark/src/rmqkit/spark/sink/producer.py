"""A producer for blocking callers that sends rows, stages rows as half messages, and ends half messages with
END_TRANSACTION.

A process has one `SinkProducer` per set of options and reuses it, so a reused Python worker connects once. While the
producer runs, its heartbeats make it a member of the producer group, and brokers send it check-backs of half messages
(CHECK_TRANSACTION_STATE). Requests run on the loop thread of the process (`rmqkit.client.runtime.process`). Temporary
errors (no answer, no route, a busy broker) are retried for ``brokerPatienceMs``. Other errors are raised immediately.
Source: behaviour.md §9.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from msgspec import Struct, field

from rmqkit.client.observe.hooks import SendResult
from rmqkit.client.producer.accumulator import SendManyFailed
from rmqkit.client.producer.faults import RETRYABLE
from rmqkit.client.producer.selectors import PlacedMessage, Selector, by_place
from rmqkit.client.producer.transaction import Check, TransactionProducer, TransactionState
from rmqkit.client.runtime.process import portal
from rmqkit.client.runtime.settings import Batching, Compressing, ProducerSettings, SendLimits
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.errors import NoRoute, PeerRefused, RemotingError, RmqError, SendFailed
from rmqkit.protocol.ids import decode_offset_id
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.send import EndTransactionRequest
from rmqkit.spark.broker_pool import BrokerPool
from rmqkit.spark.options import SinkOptions
from rmqkit.spark.sink.ledger import Batch, Half

T = TypeVar("T")

_RETRY_PAUSE_S = 0.25
_PULL_COUNT = 256


class Ended(Struct):
    """The results of END_TRANSACTION requests.

    Attributes:
        unsent: half messages without a request, which are unchanged.
        is_in_doubt: whether some requests were not answered. These requests may take effect a little later.
        refused: half messages that brokers refused to commit, with the reason.
        error: the error of the last request without an answer.
    """

    unsent: list[Half] = field(default_factory=list)
    is_in_doubt: bool = False
    refused: list[tuple[Half, PeerRefused]] = field(default_factory=list)
    error: RmqError | None = None


class SinkProducer:
    """A producer of the sink's group. ``check`` answers check-backs of half messages."""

    def __init__(self, options: SinkOptions, check: Check) -> None:
        self.options = options
        self.pool = BrokerPool(options.live_options(_PULL_COUNT))
        self._portal = portal()
        self._check = check
        self._producer: TransactionProducer

    def start(self) -> None:
        """Join the group, soon at all brokers of the topic. After this call brokers may send check-backs."""
        self._producer = self._portal.run(self._started)
        self._portal.close_at_exit(self)

    async def _started(self) -> TransactionProducer:
        options, settings = self.options, sending_settings(self.options)
        producer = TransactionProducer(
            options.group, execute=_never, check=self._check, settings=settings, runtime=self.pool.runtime
        )
        await producer.start()
        if options.topic:  # heartbeats go to the brokers of known routes
            self.pool.runtime.routes.watch(options.topic, options.group)
            self.pool.runtime.refresh_routes_soon()
        return producer

    @property
    def is_from_parent(self) -> bool:
        """Return True if this process was forked and the producer belongs to its parent."""
        return self._portal.is_from_parent

    @property
    def now_ms(self) -> float:
        """Monotonic time, used for leases."""
        return self.pool.runtime.clock.monotonic_ms()

    async def close(self) -> None:
        """Leave the group and close the connections. Call this on the portal's loop."""
        await self._producer.close()
        await self.pool.runtime.close()

    def pause(self, pause_ms: float) -> None:
        """Wait, and answer check-backs meanwhile."""
        self._portal.run(lambda: asyncio.sleep(max(0.0, pause_ms) / 1000))

    def queues(self, topic: str) -> list[MessageQueue]:
        """Return the writable queues of a topic, or the queues that the topic will have. Raises NoRoute: the topic has
        no queue.
        """
        return self._portal.run(lambda: self._patiently(lambda: self._producer.queues(topic)))

    def send_one(self, message: Message, queue: MessageQueue) -> SendResult:
        """Send a message to a queue."""
        return self._portal.run(lambda: self._patiently(lambda: self._producer.send(message, queue=queue)))

    def send(self, rows: Sequence[PlacedMessage]) -> None:
        """Send rows in batches. Rows that are placed in the same queue are sent in their order.
        Raises MessageIllegal: a row cannot be sent.
        Raises NoRoute, PeerRefused, SendFailed: the brokers do not accept the rows."""
        placed = [row for row in rows if row.is_placed]
        free = rows if not placed else [row for row in rows if not row.is_placed]
        self._portal.run(lambda: self._send_all(free, None))
        self._portal.run(lambda: self._send_all(placed, by_place))

    def stage(self, rows: Iterable[PlacedMessage], batch: Batch, staged: list[Half]) -> None:
        """Store rows as half messages. Add the stored half messages to ``staged``, even if the call fails.
        Raises MessageIllegal, NoRoute, PeerRefused, SendFailed: see `send`."""
        self._portal.run(lambda: self._stage_all(list(rows), batch, staged))

    def end(self, halves: Sequence[Half], batch: Batch, state: TransactionState, until_ms: float) -> Ended:
        """Send END_TRANSACTION for half messages and wait for the answers. A half message is unsent if its request
        could not be sent before ``until_ms``, or if an earlier request of its lane was refused or not answered."""
        return self._portal.run(lambda: self._end_all(halves, batch, state, until_ms))

    async def _send_all(self, rows: Sequence[PlacedMessage], selector: Selector | None) -> None:
        deadline_ms = self.now_ms + self.options.patience_ms
        while rows:
            try:
                await self._producer.send_many(rows, selector=selector)
                return
            except SendManyFailed as failed:
                failures = [result for result in failed.results if isinstance(result, RmqError)]
                lasting = [error for error in failures if not _passes(error)]
                if lasting or self.now_ms > deadline_ms:
                    raise (lasting or failures)[0] from None
                left = zip(rows, failed.results, strict=True)
                rows = [row for row, result in left if isinstance(result, RmqError)]
            await self._look_again()

    async def _stage_all(self, rows: Sequence[PlacedMessage], batch: Batch, staged: list[Half]) -> None:
        found: dict[int, Half] = {}
        numbered = iter(enumerate(rows))

        async def work() -> None:
            for number, row in numbered:
                found[number] = await self._patiently(lambda row=row: self._stage(row, batch))  # type: ignore[misc]

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(self.options.sends_max, len(rows))):
                    tasks.create_task(work(), name="stage rows")
        except* RmqError as errors:
            raise errors.exceptions[0] from None
        finally:
            # Also after a failure: the caller rolls back the stored half messages.
            staged += [found[number] for number in sorted(found)]
        assert len(found) == len(rows), "each row has its half message"

    async def _stage(self, row: PlacedMessage, batch: Batch) -> Half:
        queue = by_place(await self._producer.queues(row.topic), row) if row.is_placed else None
        sent = await self._producer.send_half(row, queue=queue)
        return Half(
            (row.msg_id or "").removeprefix(batch.prefix),
            row.topic,
            sent.queue.broker_name,
            -1 if queue is None else queue.queue_id,
            sent.queue_offset,
            decode_offset_id(sent.offset_msg_id)[2],
        )

    async def _end_all(self, halves: Sequence[Half], batch: Batch, state: TransactionState, until_ms: float) -> Ended:
        ended = Ended()
        todo = iter(_lanes(halves))

        async def work() -> None:
            for lane in todo:
                await self._end_lane(lane, batch, state, until_ms, ended)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(self.options.sends_max, len(halves))):
                tasks.create_task(work(), name="end half messages")
        assert len(ended.unsent) + len(ended.refused) <= len(halves), "no half message is both unsent and refused"
        return ended

    async def _end_lane(
        self, lane: Sequence[Half], batch: Batch, state: TransactionState, until_ms: float, ended: Ended
    ) -> None:
        for number, half in enumerate(lane):
            # After a request without an answer, the next requests would probably time out, too.
            if ended.is_in_doubt or self.now_ms >= until_ms:
                ended.unsent += lane[number:]
                return
            try:
                address = await self.pool.runtime.routes.find_address(half.broker_name, half.topic)
                header = self._header(half, batch, state)
                await self.pool.runtime.calls.ask_end_transaction(address, header, self.options.settle_ms)
            except PeerRefused as error:
                ended.refused.append((half, error))
                # The next row of a lane (`Half.lane`) must not become visible before this row, which is retried.
                if half.lane >= 0:
                    ended.unsent += lane[number + 1 :]
                    return
            except (RemotingError, NoRoute) as error:
                ended.is_in_doubt, ended.error = True, error

    def _header(self, half: Half, batch: Batch, state: TransactionState) -> EndTransactionRequest:
        key = batch.prefix + half.row
        return EndTransactionRequest(
            topic=half.topic,
            producer_group=self.options.group,
            tran_state_table_offset=half.queue_offset,
            commit_log_offset=half.log_offset,
            commit_or_rollback=state.value,
            msg_id=key,
            transaction_id=key,
            bname=half.broker_name,
            decided_by_ledger=True,
        )

    async def _patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        deadline_ms = self.now_ms + self.options.patience_ms
        while True:
            try:
                return await work()
            except RmqError as error:
                if not _passes(error) or self.now_ms > deadline_ms:
                    raise
            await self._look_again()

    async def _look_again(self) -> None:
        await asyncio.sleep(_RETRY_PAUSE_S)
        with contextlib.suppress(NoRoute):
            await self.pool.runtime.routes.refresh_all()


def sending_settings(options: SinkOptions) -> ProducerSettings:
    """Return the settings of a producer that retries for ``brokerPatienceMs``. Messages to one queue keep their order
    during a restart of the broker. One attempt takes at most ``sendTimeoutMs``."""
    return ProducerSettings(
        send_timeout_ms=max(options.patience_ms, options.send_timeout_ms),
        try_timeout_ms=options.send_timeout_ms,
        compression=Compressing(body_bytes_min=options.compress_body_bytes),
        batch=Batching(bytes=options.batch_bytes),
        limits=SendLimits(sends_max=options.sends_max),
    )


@contextlib.contextmanager
def pace(count: int, rows_per_s: int) -> Iterator[None]:
    """Wait after the context, so that ``count`` rows take as long as ``rows_per_s`` requires. 0 means no limit."""
    started_ms = SYSTEM_CLOCK.monotonic_ms()
    yield
    if rows_per_s:
        left_ms = count * 1000 / rows_per_s - (SYSTEM_CLOCK.monotonic_ms() - started_ms)
        portal().run(lambda: asyncio.sleep(max(0.0, left_ms) / 1000))


def _passes(error: RmqError) -> bool:
    """Return True if another attempt may succeed."""
    return isinstance(error, RemotingError | NoRoute | SendFailed) or (
        isinstance(error, PeerRefused) and error.code in RETRYABLE
    )


def _lanes(halves: Sequence[Half]) -> Iterator[Sequence[Half]]:
    """Yield the half messages of each lane together, because they must be committed in order. Yield all other half
    messages alone."""
    ordered: dict[tuple[str, str, int], list[Half]] = {}
    for half in halves:
        if half.lane >= 0:
            ordered.setdefault((half.topic, half.broker_name, half.lane), []).append(half)
    return itertools.chain(ordered.values(), ([half] for half in halves if half.lane < 0))


def _never(message: Message, argument: object) -> None:
    """Do nothing: the sink ends transactions itself."""
