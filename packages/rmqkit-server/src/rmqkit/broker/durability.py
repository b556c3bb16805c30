"""Answers that wait until their message is safe: on the disk (``GroupCommitService``), and at the slaves
(``GroupTransferService``).

===========  ==============================================  ========================  =====================
reason       wait until                                      at most                   answer then
===========  ==============================================  ========================  =====================
SYNC_FLUSH   a flush covers the message                      ``syncFlushTimeout``      FLUSH_DISK_TIMEOUT
SYNC_MASTER  ``inSyncReplicas - 1`` slaves have reported     ``slaveTimeout``          FLUSH_SLAVE_TIMEOUT
             that they have it
===========  ==============================================  ========================  =====================

Both timeouts start with the put. An answer is sent when both waits are over. If both timed out, the answer is
FLUSH_SLAVE_TIMEOUT. If a flush fails, all answers for which the flush was needed are released with the error. Puts are
in log order, so the waiting answers form one queue. Answers are released from the front of the queue: after a flush,
after a read of slaves' reports, and by one timer.
Use this module only on the event loop, except `flushed`. `CODES` has the answers after a wait, and `put_refusal` the
answers after a refusal of the store.
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

# The maximum number of waiting answers. Further sends are refused as busy (the send queue of behaviour.md §2.4).
WAITING_MAX = 10_000

# The maximum time until a change of a timeout applies to waiting answers.
_LOOK_MS = 1000.0

_log = logging.getLogger(__name__)


class Outcome(enum.Enum):
    """The result of a wait. ``TIMED_OUT``: the disk was too slow."""

    DURABLE = "durable"
    TIMED_OUT = "timed out"
    REPLICA_TIMED_OUT = "replica timed out"
    FAILED = "failed"


Release = Callable[[Outcome, str], None]


class Copies(Protocol):
    """The state of the slaves' copies (`rmqkit.broker.replication.copies.SlaveCopies`)."""

    def confirmed_offset(self) -> int:
        """Return the physical offset up to which all required copies exist."""
        ...

    @property
    def lacks_replicas(self) -> bool:
        """True if too few slaves are in sync to put a message that waits for copies."""
        ...


class Durability:
    """The queue of answers that wait.

    Args:
        flush_timeout_ms: returns the maximum wait for a flush. None: answers do not wait for a flush (ASYNC_FLUSH).
        copies: the copies for which answers wait. None: answers do not wait for copies.
        copies_timeout_ms: returns the maximum wait for copies.
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
        """The number of answers that wait."""
        return self._answers

    @property
    def is_full(self) -> bool:
        """Return True if no further answer can wait."""
        return self._answers >= WAITING_MAX

    @property
    def lacks_replicas(self) -> bool:
        """True if a message that has to wait for copies must not be put (IN_SYNC_REPLICAS_NOT_ENOUGH)."""
        return self._copies is not None and self._copies.lacks_replicas

    def is_on_disk(self, end_offset: int) -> bool:
        """Return True if the log is on the disk up to an offset, or if answers do not wait for the disk."""
        return self._flush_timeout_ms is None or self._store.durable_offset >= end_offset

    def has(self, end_offset: int) -> bool:
        """Return True if an answer for the log up to an offset need not wait."""
        return self.is_on_disk(end_offset) and (self._copies is None or self._copies.confirmed_offset() >= end_offset)

    def wake(self) -> None:
        """Request a flush, if answers wait for flushes (SYNC_FLUSH)."""
        if self._flush_timeout_ms is not None:
            self._store.request_flush()

    def hold(self, end_offset: int, release: Release, *, answers: int = 1) -> None:
        """Call ``release`` when the log is durable up to ``end_offset``, or when the wait failed or timed out.
        ``answers``: the number of answers that ``release`` sends."""
        assert answers > 0, "a release sends at least one answer"
        self._waiting.append((end_offset, self._clock.monotonic_ms(), release, answers))
        self._answers += answers
        # Request a flush after the append: a running flush may end without covering this message.
        self.wake()
        if self._expiry is None:
            self._expire_after(0)

    def wait(self, end_offset: int) -> asyncio.Future[tuple[Outcome, str]]:
        """Do the same as `hold`, but return a future with the outcome and the reason of a failure."""
        ended: asyncio.Future[tuple[Outcome, str]] = self._loop.create_future()

        def release(outcome: Outcome, reason: str) -> None:
            if not ended.done():
                ended.set_result((outcome, reason))

        self.hold(end_offset, release)
        return ended

    def flushed(self, durable_offset: int, error: OSError | None) -> None:
        """Release the answers that a flush covered. The flush thread calls this after each flush."""
        try:
            self._loop.call_soon_threadsafe(self._flushed, durable_offset, error)
        except RuntimeError:
            _log.debug("a flush ended after the event loop")

    def dispatch(self) -> None:
        """Dispatch messages that can be read now. Long batches are dispatched in parts, one part in each loop tick."""
        if self._store.dispatch():
            self._loop.call_soon(self.dispatch)

    def replicated(self) -> None:
        """Release the answers for messages that the slaves have."""
        if self._waiting:
            self._release(self._store.durable_offset)

    # ---- inside

    def _flushed(self, durable_offset: int, error: OSError | None) -> None:
        if error is None:
            # Dispatch before the answers: a client may request its message right after the answer.
            self.dispatch()  # a durable message can be read, and sent to slaves
        self._release(durable_offset)
        if error is not None:
            reason = f"flush failed: errno {error.errno} {error.strerror}"
            lost: list[Release] = []
            # Release from the back: messages at the front may be on the disk, and their answers still wait for slaves.
            while self._waiting and self._waiting[-1][0] > durable_offset:
                _, _, release, answers = self._waiting.pop()
                self._answers -= answers
                lost.append(release)
            for release in reversed(lost):
                release(Outcome.FAILED, reason)

    def _release(self, durable_offset: int) -> None:
        """Release the answers at the front of the queue that need not wait any more."""
        # Read these values once: one report of a slave may release thousands of answers.
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
            waiting.popleft()  # before the call, which may add more
            self._answers -= answers
            assert self._answers >= 0, "the number of waiting answers is not negative"
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
        """Start the timer for the next timeout of an answer that has already waited ``waited_ms``."""
        flush_ms = 0 if self._flush_timeout_ms is None else self._flush_timeout_ms()
        times_ms = [flush_ms, 0 if self._copies is None else self._copies_timeout_ms()]
        next_ms = min((ms for ms in times_ms if ms > waited_ms), default=waited_ms)
        self._expiry = self._loop.call_later(min(next_ms - waited_ms, _LOOK_MS) / 1000, self._expire)


# The remark for a request that the broker rejects without handling the request.
REJECTED = "[REJECTREQUEST]system busy, start flow control for a while"

# A response code and a remark.
Refusal = tuple[int, str]

NOT_ENOUGH_REPLICAS: Refusal = ResponseCode.SYSTEM_ERROR, "in-sync replicas not enough"

# The response codes for a stored message by the outcome of its wait.
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
        ResponseCode.LMQ_QUOTA_EXCEEDED,
        "[LMQ_CONSUME_QUEUE_NUM_EXCEEDED]lmq consume queue num exceeded.",
    ),
}


def put_refusal(put: PutResult, body_bytes_max: int) -> Refusal:
    """Return the answer to a message that the store refused. Source: behaviour.md §3.5."""
    code, remark = _PUT_REFUSALS[put.status]
    return code, remark.format(body_bytes_max=body_bytes_max, reason=put.reason).rstrip()
