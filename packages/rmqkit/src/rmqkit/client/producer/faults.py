"""Retries after failed sends, and brokers that a producer avoids for some time (``LatencyFaultTolerance``,
``MQFaultStrategy``).

`Tries` counts the attempts of one message. `QueueRetries` orders the messages for one queue. With
``avoid_slow_brokers``, a `FaultTable` contains the brokers to avoid:

=====================  =====  ======  ======  ======  =======  =======
a send took at least   550    1800    3000    5000    15 000   ms; a failed send counts as 10 000 ms
the broker is avoided  2      5       6       10      30       seconds
=====================  =====  ======  ======  ======  =======  =======

A queue is chosen in three steps: from brokers that are not avoided, from reachable brokers, from all brokers. A new
entry never shortens the time in which a broker is avoided. A broker without an entry is neither avoided nor
unreachable. A broker that refused is unreachable until a send succeeds. The reference's optional detector, which sends
probes, is not implemented.
Source: behaviour.md §7.5, §7.6.
"""

from __future__ import annotations

import asyncio

from rmqkit.client.observe.hooks import SendResult
from rmqkit.client.runtime.routes import PublishQueues
from rmqkit.clock import Clock
from rmqkit.errors import RequestTimedOut, RmqError, SendFailed
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.remoting.client import Backoff, Failures

RETRYABLE = frozenset(
    (
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.NO_PERMISSION,
        ResponseCode.NO_BUYER_ID,
        ResponseCode.NOT_IN_CURRENT_UNIT,
        ResponseCode.GO_AWAY,
    )
)
"""The response codes after which another broker is tried."""

PASSING = frozenset((ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.SYSTEM_BUSY, ResponseCode.GO_AWAY))
"""The response codes of a broker that starts, stops or is overloaded. Such a send is retried while there is time."""
assert PASSING < RETRYABLE, "temporary refusals are retried"

_LASTING_RETRIES = 2
"""The number of retries after refusals that are not temporary, as in Java."""
BACKOFF_MS = (20.0, 2000.0)
"""The first and the longest pause before another attempt at the same broker."""
_AVOIDED_MS = ((15_000, 30_000), (5_000, 10_000), (3_000, 6_000), (1_800, 5_000), (550, 2_000))
_FAILED_LATENCY_MS = 10_000


class FaultTable:
    """The brokers that were slow or failed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._avoided_until_ms: dict[str, float] = {}
        self._unreachable: set[str] = set()

    def note(
        self, broker_name: str, latency_ms: float, *, is_isolated: bool = False, is_reachable: bool = True
    ) -> None:
        """Record the result of a send. ``is_isolated`` is True if the send failed."""
        if is_isolated:
            latency_ms = _FAILED_LATENCY_MS
        avoided_ms = next((avoided_ms for least_ms, avoided_ms in _AVOIDED_MS if latency_ms >= least_ms), 0)
        if avoided_ms:
            until_ms = self._clock.monotonic_ms() + avoided_ms
            self._avoided_until_ms[broker_name] = max(until_ms, self._avoided_until_ms.get(broker_name, until_ms))
        if is_reachable:
            self._unreachable.discard(broker_name)
        else:
            self._unreachable.add(broker_name)

    def avoided_ms(self, broker_name: str) -> float:
        return max(0.0, self._avoided_until_ms.get(broker_name, 0.0) - self._clock.monotonic_ms())

    def is_reachable(self, broker_name: str) -> bool:
        """Return True if the last send to a broker succeeded, or if there was no send to it."""
        return broker_name not in self._unreachable

    def pick(self, queues: PublishQueues, last_broker: str | None) -> MessageQueue:
        """Return the next queue. If possible, its broker is neither avoided nor the broker of the last attempt."""
        now_ms = self._clock.monotonic_ms()

        def is_available(queue: MessageQueue) -> bool:
            name = queue.broker_name
            return name != last_broker and now_ms >= self._avoided_until_ms.get(name, now_ms)

        def is_reachable(queue: MessageQueue) -> bool:
            return queue.broker_name not in self._unreachable and queue.broker_name != last_broker

        return queues.first(is_available) or queues.first(is_reachable) or queues.pick()


class Tries:
    """The attempts of one message so far.

    Attributes:
        brokers: the names of the tried brokers, in the order of the attempts.
        failures: the errors so far.
    """

    __slots__ = ("_lasting", "_most", "_not_safe", "_unanswered", "backoff", "brokers", "failures")

    def __init__(self, retries: int) -> None:
        # 0 means no limit: the time limits the number of attempts.
        self._most = retries + 1 if retries >= 0 else 0
        self._lasting = 0
        self._unanswered = 0
        self._not_safe: SendResult | None = None
        self.brokers: list[str] = []
        self.failures = Failures()
        self.backoff = Backoff(*BACKOFF_MS)

    @property
    def may_go_on(self) -> bool:
        return self._lasting <= _LASTING_RETRIES and (not self._most or len(self.brokers) < self._most)

    def timeout_ms(self, left_ms: float, limit_ms: int) -> float:
        """Return the timeout of the next attempt in ms. If it is known to be the last attempt, it gets all of the
        remaining time."""
        is_last = self._most and len(self.brokers) == self._most - 1
        if limit_ms > 0 and not is_last:
            # Double the timeout after each attempt without a response, so that a slow broker can respond eventually.
            left_ms = min(left_ms, limit_ms << self._unanswered)
        return max(1.0, left_ms)

    def begins(self, broker_name: str) -> None:
        assert self.may_go_on, "another attempt is allowed"
        self.brokers.append(broker_name)

    def failed(self, error: RmqError, *, is_passing: bool) -> None:
        self.failures.note(error)
        self._lasting += not is_passing
        self._unanswered += isinstance(error, RequestTimedOut)

    def stored_less_safely(self, result: SendResult) -> None:
        self._not_safe = result
        self._lasting += 1

    def outcome(self, topic: str) -> SendResult:
        """Return the result of the send. Raises SendFailed: the message is not stored."""
        if self._not_safe is not None:
            return self._not_safe
        cause = self.failures.cause
        raise SendFailed(topic, self.brokers, cause, self.failures.others) from cause


class QueueRetries:
    """The order of the sends to a queue after a failed send. The sends run one at a time until no send remains.

    Attributes:
        turn: the lock that a send holds while it runs.
        users: the number of sends that run or wait for the lock.
    """

    __slots__ = ("turn", "users")

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.users = 0
