"""Answers that wait until their message is safe: on the disk (``GroupCommitService``), then at the slaves
(``GroupTransferService``).

===========  ==============================================  ========================  =====================
waits        until                                           at most                   then
===========  ==============================================  ========================  =====================
SYNC_FLUSH   a flush round covers the message                ``syncFlushTimeout``      FLUSH_DISK_TIMEOUT
SYNC_MASTER  ``inSyncReplicas - 1`` slaves reported that     ``slaveTimeout``          FLUSH_SLAVE_TIMEOUT
             they have it
===========  ==============================================  ========================  =====================

Both times count from the put; an answer leaves when neither is waited for any more, and where both ran out it names
the slaves. A round that failed releases everything it should have covered with the error: a failed flush is never a
success. Puts come in log order, so the waiting answers form one queue, and each release takes answers from its front.
Answers are released once for a flush round, once for a read of slaves' reports, and by one timer.
Loop only, but for `flushed`. `CODES` and `put_refusal` give the answer to a message then, or when the store refused it.
Source: store.md §13.1, §13.2, §14, §21.5; behaviour.md §3.5, §10.3.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from rmqkit.clock import Clock
from rmqkit.protocol.codes import ResponseCode
from rmqkit.store.message_store import MessageStore, PutResult, PutStatus

# Answers that may wait at a time; beyond it sends are refused as busy (the send queue of behaviour.md §2.4).
WAITING_MAX = 10_000

# At the latest so long after a change of one of the two times it counts for answers that wait already.
_LOOK_MS = 1000.0

_log = logging.getLogger(__name__)


class Outcome(enum.Enum):
    """The result of a wait; ``TIMED_OUT`` means that the disk was too slow."""

    DURABLE = "durable"
    TIMED_OUT = "timed out"
    REPLICA_TIMED_OUT = "replica timed out"
    FAILED = "failed"


Release = Callable[[Outcome, str], None]


class Copies(Protocol):
    """The state of the slaves' copies (`rmqkit.broker.replication.copies.SlaveCopies`)."""

    def confirmed_offset(self) -> int:
        """Physical offset up to which there are as many copies as answers wait for."""
        ...

    @property
    def lacks_replicas(self) -> bool:
        """Return True if so few slaves are in sync that nothing that waits for them may be put."""
        ...


class Durability:
    """The queue of answers that wait.

    Args:
        flush_timeout_ms: says how long an answer may wait for the disk; None: it waits for no flush (ASYNC_FLUSH).
        copies: the copies that answers wait for; None: for none.
        copies_timeout_ms: says how long for them.
    """

    def __init__(
        self,
        store: MessageStore,
        clock: Clock,
        *,
        flush_timeout_ms: Callable[[], int] | None,
        copies: Copies | None = None,
        copies_timeout_ms: Callable[[], int] = lambda: 0,
    ) -> None:
        self._store = store
        self._clock = clock
        self._flush_timeout_ms = flush_timeout_ms
        self._copies = copies
        self._copies_timeout_ms = copies_timeout_ms
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[int, float, Release, int]] = deque()
        self._answers = 0
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def waiting_count(self) -> int:
        """Answers that wait."""
        return self._answers

    @property
    def is_full(self) -> bool:
        """Return True if no further answer may wait."""
        return self._answers >= WAITING_MAX

    @property
    def lacks_replicas(self) -> bool:
        """Return True if what has to wait for copies must not be put at all (IN_SYNC_REPLICAS_NOT_ENOUGH)."""
        return self._copies is not None and self._copies.lacks_replicas

    def is_on_disk(self, end_offset: int) -> bool:
        """Return True if the disk has the log up to an offset, as far as it is waited for."""
        return self._flush_timeout_ms is None or self._store.durable_offset >= end_offset

    def has(self, end_offset: int) -> bool:
        """Return True if an answer for the log up to an offset need not wait."""
        return self.is_on_disk(end_offset) and (self._copies is None or self._copies.confirmed_offset() >= end_offset)

    def wake(self) -> None:
        """Request a flush of what was put, though its answer does not wait."""
        if self._flush_timeout_ms is not None:
            self._store.request_flush()

    def hold(self, end_offset: int, release: Release, *, answers: int = 1) -> None:
        """Call ``release`` when the log is safe up to ``end_offset``, or when that failed or took too long.
        ``answers``: how many it gives then."""
        assert answers > 0, "what is held gives an answer"
        self._waiting.append((end_offset, self._clock.monotonic_ms(), release, answers))
        self._answers += answers
        # Behind the append: a flush that is already under way may end before it covers this one.
        self.wake()
        if self._expiry is None:
            self._expire_after(0)

    def wait(self, end_offset: int) -> asyncio.Future[tuple[Outcome, str]]:
        """Like `hold`, to be awaited: how it ended, and why it failed."""
        ended: asyncio.Future[tuple[Outcome, str]] = self._loop.create_future()

        def release(outcome: Outcome, reason: str) -> None:
            if not ended.done():
                ended.set_result((outcome, reason))

        self.hold(end_offset, release)
        return ended

    def flushed(self, durable_offset: int, error: OSError | None) -> None:
        """Release what a flush round covered; called from the flush thread, once a round."""
        try:
            self._loop.call_soon_threadsafe(self._flushed, durable_offset, error)
        except RuntimeError:
            _log.debug("flush round ended after the event loop")

    def dispatch(self) -> None:
        """Dispatch messages that may be read now, of long batches one part in each turn of the loop."""
        if self._store.dispatch():
            self._loop.call_soon(self.dispatch)

    def replicated(self) -> None:
        """Release answers whose messages the slaves have by now."""
        if self._waiting:
            self._release(self._store.durable_offset)

    # ---- inside

    def _flushed(self, durable_offset: int, error: OSError | None) -> None:
        if error is None:
            # Before the answers: who hears that its message is stored may ask for it at once.
            self.dispatch()  # a message may be read, and sent to slaves, once it is durable
        self._release(durable_offset)
        if error is not None:
            reason = f"flush failed: errno {error.errno} {error.strerror}"
            lost: list[Release] = []
            # From the back: those in front that the disk has may still wait for slaves.
            while self._waiting and self._waiting[-1][0] > durable_offset:
                _, _, release, answers = self._waiting.pop()
                self._answers -= answers
                lost.append(release)
            for release in reversed(lost):
                release(Outcome.FAILED, reason)

    def _release(self, durable_offset: int) -> None:
        """Let the front of the queue go, as far as it waits for nothing more."""
        # Asked once for all: one report of a slave may release thousands.
        waiting, now_ms = self._waiting, self._clock.monotonic_ms()
        copied_offset = None if self._copies is None else self._copies.confirmed_offset()
        flush_ms, copies_ms = self._flush_timeout_ms and self._flush_timeout_ms(), self._copies_timeout_ms()
        while waiting:
            end_offset, since_ms, release, answers = waiting[0]
            waited_ms = now_ms - since_ms
            is_durable = flush_ms is None or end_offset <= durable_offset
            is_copied = copied_offset is None or end_offset <= copied_offset
            if not (is_durable or waited_ms >= (flush_ms or 0)) or not (is_copied or waited_ms >= copies_ms):
                return
            waiting.popleft()  # before the call, which may put more
            self._answers -= answers
            assert self._answers >= 0, "answers that left had been counted"
            if not is_copied:
                release(Outcome.REPLICA_TIMED_OUT, "")
            else:
                release(Outcome.DURABLE if is_durable else Outcome.TIMED_OUT, "")

    def _expire(self) -> None:
        self._expiry = None
        self._release(self._store.durable_offset)
        if self._waiting:
            self._expire_after(self._clock.monotonic_ms() - self._waiting[0][1])

    def _expire_after(self, waited_ms: float) -> None:
        """Look again when the next time of an answer that has waited so long runs out."""
        flush_ms = 0 if self._flush_timeout_ms is None else self._flush_timeout_ms()
        times_ms = [flush_ms, 0 if self._copies is None else self._copies_timeout_ms()]
        next_ms = min((ms for ms in times_ms if ms > waited_ms), default=waited_ms)
        self._expiry = self._loop.call_later(min(next_ms - waited_ms, _LOOK_MS) / 1000, self._expire)


# The remark of a request that is not let in at all.
REJECTED = "[REJECTREQUEST]system busy, start flow control for a while"

# Code and remark.
Refusal = tuple[int, str]

NOT_ENOUGH_REPLICAS: Refusal = ResponseCode.SYSTEM_ERROR, "in-sync replicas not enough"

# What is answered when a stored message had to wait.
CODES = {
    Outcome.DURABLE: ResponseCode.SUCCESS,
    Outcome.TIMED_OUT: ResponseCode.FLUSH_DISK_TIMEOUT,
    Outcome.REPLICA_TIMED_OUT: ResponseCode.FLUSH_SLAVE_TIMEOUT,
    Outcome.FAILED: ResponseCode.SYSTEM_ERROR,
}

_ILLEGAL = (
    "the message is illegal, maybe msg body or properties length not matched. "
    "msg body length limit {body_bytes_max}B, msg properties length limit 32KB."
)
_UNAVAILABLE = (
    "service not available now. It may be caused by one of the following reasons: the broker's disk is full, "
    "messages are put to the slave, message store has been shut down, etc. {reason}"
)
_PUT_REFUSALS: dict[PutStatus, tuple[ResponseCode, str]] = {
    PutStatus.MESSAGE_ILLEGAL: (ResponseCode.MESSAGE_ILLEGAL, _ILLEGAL),
    PutStatus.PROPERTIES_SIZE_EXCEEDED: (ResponseCode.MESSAGE_ILLEGAL, _ILLEGAL),
    PutStatus.SERVICE_NOT_AVAILABLE: (ResponseCode.SERVICE_NOT_AVAILABLE, _UNAVAILABLE),
    PutStatus.CREATE_MAPPED_FILE_FAILED: (
        ResponseCode.SYSTEM_ERROR,
        "create mapped file failed, server is busy or broken.",
    ),
    PutStatus.OS_PAGE_CACHE_BUSY: (
        ResponseCode.SYSTEM_BUSY,
        "[PC_SYNCHRONIZED]broker busy, start flow control for a while",
    ),
    PutStatus.LIGHT_QUEUES_EXCEEDED: (
        ResponseCode.SYSTEM_ERROR,
        (
            "[LMQ_CONSUME_QUEUE_NUM_EXCEEDED]broker config enableLmq and enableMultiDispatch, lmq consumeQueue num "
            "exceed maxLmqConsumeQueueNum config num, default limit 2w."
        ),
    ),
}


def put_refusal(put: PutResult, body_bytes_max: int) -> Refusal:
    """The answer to a message that the store did not take. Source: behaviour.md §3.5."""
    code, remark = _PUT_REFUSALS[put.status]
    return code, remark.format(body_bytes_max=body_bytes_max, reason=put.reason).rstrip()
