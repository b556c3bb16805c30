"""How fast a topic is pulled and consumed, as running information tells it (``ConsumerStatsManager``).

Who pulls and who handles adds to plain counters; every 10 s they are written down, and a rate is the difference to what
was written down a minute ago, or at the start. Failures are told of the last hour. Source: behaviour.md §8.15.
"""

from __future__ import annotations

from collections import deque

from rmqkit.protocol.bodies.consumers import ConsumeStatus

__all__ = ["SAMPLE_INTERVAL_MS", "TopicRates"]

SAMPLE_INTERVAL_MS = 10_000
_MINUTE_MS = 60_000
_SAMPLES_MAX = 361


class TopicRates:
    """One topic's counters since ``at_ms`` (monotonic): answers with messages and the ms they took, messages in them;
    calls of handlers and the ms they took, messages that were consumed and that failed in them."""

    __slots__ = ("_samples", "call_ms", "calls", "consumed", "failed", "pull_ms", "pulled", "pulls")

    def __init__(self, at_ms: float) -> None:
        self.pulls = self.pulled = self.calls = self.consumed = self.failed = 0
        self.pull_ms = self.call_ms = 0.0
        self._samples = deque([(at_ms, *self._counters())], _SAMPLES_MAX)

    def sample(self, at_ms: float) -> None:
        """Write the counters down if the last time is long enough ago."""
        if at_ms - self._samples[-1][0] >= SAMPLE_INTERVAL_MS:
            self._samples.append((at_ms, *self._counters()))

    def status(self, at_ms: float) -> ConsumeStatus:
        """Means and rates of the last minute, failures of the last hour."""
        then = next((one for one in self._samples if at_ms - one[0] <= _MINUTE_MS), self._samples[-1])
        seconds = max(at_ms - then[0], 1.0) / 1000.0
        pulls, pull_ms, pulled, calls, call_ms, consumed, failed = (
            now - before for now, before in zip(self._counters(), then[1:], strict=True)
        )
        return ConsumeStatus(
            pull_rt=pull_ms / pulls if pulls else 0.0,
            pull_tps=pulled / seconds,
            consume_rt=call_ms / calls if calls else 0.0,
            consume_ok_tps=consumed / seconds,
            consume_failed_tps=failed / seconds,
            consume_failed_msgs=self.failed - int(self._samples[0][-1]),
        )

    def _counters(self) -> tuple[float, ...]:
        return (self.pulls, self.pull_ms, self.pulled, self.calls, self.call_ms, self.consumed, self.failed)
