"""Brokers that sends keep away from for a while (``LatencyFaultTolerance``, ``MQFaultStrategy``).

=====================  =====  ======  ======  ======  =======  =======
a send took at least   550    1800    3000    5000    15 000   ms; a failed one counts as 10 000 ms
… so it is avoided     2      5       6       10      30       seconds
=====================  =====  ======  ======  ======  =======  =======

Queues are looked for in three rounds: on a broker that is not avoided, on one that is reachable, on any. The end of
avoiding is only ever moved later. A broker that was never written down is neither avoided nor unreachable; one that
refused is unreachable until a send succeeds. Not here: the reference's optional detector, which probes on its own.
Source: behaviour.md §7.5, §7.6.
"""

from __future__ import annotations

from rmqkit.client.runtime.routes import PublishQueues
from rmqkit.clock import Clock
from rmqkit.protocol.schemas.clients import MessageQueue

_AVOIDED_MS = ((15_000, 30_000), (5_000, 10_000), (3_000, 6_000), (1_800, 5_000), (550, 2_000))
_FAILED_LATENCY_MS = 10_000


class FaultTable:
    """Keeps which brokers were slow or failed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._avoided_until_ms: dict[str, float] = {}
        self._unreachable: set[str] = set()

    def note(
        self, broker_name: str, latency_ms: float, *, is_isolated: bool = False, is_reachable: bool = True
    ) -> None:
        """Note how a send went; ``is_isolated`` when it failed."""
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
        """Whether the last send to a broker succeeded; True for one that nothing was sent to."""
        return broker_name not in self._unreachable

    def pick(self, queues: PublishQueues, last_broker: str | None) -> MessageQueue:
        """Pick the next queue that is neither on a broker to avoid nor on the one just tried, where there is one."""
        now_ms = self._clock.monotonic_ms()

        def is_available(queue: MessageQueue) -> bool:
            name = queue.broker_name
            return name != last_broker and now_ms >= self._avoided_until_ms.get(name, now_ms)

        def is_reachable(queue: MessageQueue) -> bool:
            return queue.broker_name not in self._unreachable and queue.broker_name != last_broker

        return queues.first(is_available) or queues.first(is_reachable) or queues.pick()
