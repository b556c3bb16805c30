"""How much came and went in the last minute, hour and day (``BrokerStatsManager``).

=================  =============  ===================================================
name               key            counts
=================  =============  ===================================================
TOPIC_PUT_NUMS     topic          messages that its queues got
BROKER_PUT_NUMS    cluster        the same over all topics
GROUP_GET_NUMS     topic@group    messages a group was given
BROKER_GET_NUMS    cluster        messages given to any group
SNDBCK_PUT_NUMS    topic@group    messages a group gave back
=================  =============  ===================================================

Nothing is done when a message is put and next to nothing for a pull: every 10 s the growth of the queues is read and
what pulls gave is entered. A counter keeps its values at the samples before which it had changed, with 10 s from one to
the next for the minute, 10 min for the hour, 1 h for the day (a span is that much longer at the most); so it costs
nothing while it rests. Loop only.
Source: behaviour.md §9.10; remoting.md §6.7.
"""

from __future__ import annotations

from collections import deque

from rmqkit.clock import Clock
from rmqkit.protocol.bodies.stats import BrokerStatsData, StatsItem
from rmqkit.store.message_store import MessageStore

__all__ = ["SAMPLE_SECONDS", "Statistics"]

SAMPLE_SECONDS = 10.0
_SPANS = ((60_000, 1), (3_600_000, 60), (86_400_000, 360))
"""Milliseconds of minute, hour and day, and the samples from one that is kept to the next."""

_Samples = deque[tuple[float, int, int]]
"""Monotonic ms, sum and times."""


class _Counter:
    __slots__ = ("samples", "sum", "times")

    def __init__(self) -> None:
        self.sum = 0
        self.times = 0
        self.samples: tuple[_Samples, ...] = tuple(deque(maxlen=26) for _ in _SPANS)

    def over(self, samples: _Samples, since_ms: float, span_ms: float) -> StatsItem:
        """What was counted since a sample, over a span."""
        _, sum_before, times_before = next((one for one in reversed(samples) if one[0] <= since_ms), (0, 0, 0))
        count, times = self.sum - sum_before, self.times - times_before
        return StatsItem(count, count * 1000 / span_ms, count / times if times else 0.0)


class Statistics:
    """The counters of a broker; `sample` has to be called every `SAMPLE_SECONDS`, first when the store is open."""

    def __init__(self, store: MessageStore, cluster: str, clock: Clock) -> None:
        self._store = store
        self._cluster = cluster
        self._clock = clock
        self._started_ms = clock.monotonic_ms()
        self._kept_ms = [self._started_ms for _ in _SPANS]
        self._ends: dict[tuple[str, int], int] | None = None
        self._given: dict[tuple[str, str], list[int]] = {}
        self._counters: dict[tuple[str, str], _Counter] = {}
        self._changed: list[set[_Counter]] = [set() for _ in _SPANS]
        self._rounds = 0

    def given(self, topic: str, group: str, count: int) -> None:
        """Count the messages of one pull."""
        given = self._given.get((topic, group))
        if given is None:
            given = self._given[topic, group] = [0, 0]
        given[0] += count
        given[1] += 1

    def add(self, name: str, key: str, count: int = 1, times: int = 1) -> None:
        """Count something that came in several pieces."""
        counter = self._counters.get((name, key))
        if counter is None:
            counter = self._counters[name, key] = _Counter()
        counter.sum += count
        counter.times += times
        for changed in self._changed:
            changed.add(counter)

    def get(self, name: str, key: str) -> BrokerStatsData | None:
        """A counter's last minute, hour and day, up to now; None when nothing was ever counted."""
        self._take_in()
        return self._read(name, key)

    def per_second(self, name: str, key: str) -> float:
        """The rate of the last minute, up to the last sample."""
        found = self._read(name, key)
        return 0.0 if found is None else found.stats_minute.tps

    def _read(self, name: str, key: str) -> BrokerStatsData | None:
        counter = self._counters.get((name, key))
        if counter is None:
            return None
        now_ms, items = self._clock.monotonic_ms(), []
        for samples, kept_ms, (span_ms, _) in zip(counter.samples, self._kept_ms, _SPANS, strict=True):
            since_ms = kept_ms - span_ms
            items.append(
                counter.over(samples, since_ms, max(1000 * SAMPLE_SECONDS, now_ms - max(since_ms, self._started_ms)))
            )
        return BrokerStatsData(*items)

    def _take_in(self) -> None:
        """Enter what came and went since the last time."""
        ends = self._store.queue_ends()
        for place, end in ends.items() if self._ends is not None else ():
            grown = end - (self._ends or {}).get(place, 0)
            if grown > 0:
                self.add("TOPIC_PUT_NUMS", place[0], grown, grown)
                self.add("BROKER_PUT_NUMS", self._cluster, grown, grown)
        self._ends = ends
        for (topic, group), (count, pulls) in self._given.items():
            self.add("GROUP_GET_NUMS", f"{topic}@{group}", count, pulls)
            self.add("BROKER_GET_NUMS", self._cluster, count, pulls)
        self._given.clear()

    def sample(self) -> None:
        """Keep the counters that changed since the last sample."""
        self._take_in()
        self._rounds += 1
        for number, (_, rounds) in enumerate(_SPANS):
            if self._rounds % rounds == 0:
                self._kept_ms[number] = now_ms = self._clock.monotonic_ms()
                for counter in self._changed[number]:
                    counter.samples[number].append((now_ms, counter.sum, counter.times))
                self._changed[number].clear()

    def forget(self, *, topic: str = "", group: str = "") -> None:
        """Drop the counters of a topic or group that was deleted."""
        self._take_in()
        for name, key in list(self._counters):
            if key == topic or (topic and key.startswith(f"{topic}@")) or (group and key.endswith(f"@{group}")):
                counter = self._counters.pop((name, key))
                for changed in self._changed:
                    changed.discard(counter)
