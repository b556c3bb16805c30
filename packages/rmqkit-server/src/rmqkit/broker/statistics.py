"""Rates of messages, bytes and requests over the last minute, hour and day (``BrokerStatsManager``).

============================================  ====================  ==============================================
name                                          key                   sum; times, the divisor of averages
============================================  ====================  ==============================================
TOPIC_PUT_NUMS, _SIZE                         topic                 messages in its queues, bytes; puts
TOPIC_PUT_LATENCY                             queue@topic           ms of sends; sends
GROUP_GET_NUMS, _SIZE                         topic@group           messages delivered to a group, bytes; pulls
GROUP_GET_LATENCY                             queue@topic@group     ms of these pulls; pulls
GROUP_CK_NUMS, GROUP_ACK_NUMS                 topic@group           check points of pops; acks
QUEUE_PUT_NUMS, _SIZE                         delay topic@queue     messages with a delay level
QUEUE_GET_NUMS, _SIZE; GROUP_GET_…            …@SCHEDULE_CONSUMER   delivered messages with a delay level
SNDBCK_PUT_NUMS                               topic@group           messages that a group sent back
SNDBCK2DLQ_TIMES                              owner@topic@group@…   messages sent back that became dead letters
BROKER_PUT/GET/CK/ACK_NUMS                    cluster               over all topics; no times
BROKER_PUT/GET_NUMS_WITHOUT_SYSTEM_TOPIC      cluster               over the users' topics; no times
PRODUCER_REGISTER_TIME, CONSUMER_…            cluster               ms of heartbeats; groups in them
CHANNEL_ACTIVITY                              CONNECT, CLOSE        connections that opened and closed
============================================  ====================  ==============================================

A put or pull costs almost nothing: every 10 s the growth of the queues is read, and the noted values are added to the
counters. The time of a topic's sends is divided among its queues in proportion to their messages. A counter stores a
sample only if it has changed, so an unchanged counter costs nothing. Samples are stored every 10 s for the minute,
every 10 min for the hour, and every 1 h for the day. A span may be longer by this interval. Values include all events
until now. (The reference shows the last sample, so its hour begins after 10 minutes.) Use this module only on the event
loop.

`PutTimes` has the durations of puts (``StoreStatsService``): the longest duration, and the distribution of the last
whole minute. A duration is the time from the read of a message until it is in the log, in whole milliseconds as in
Java: less than 1 ms is 0. The current minute is shown when it has ended (`PutTimes.end_minute`).
Source: behaviour.md §9.10; remoting.md §6.7.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Set
from datetime import date

from rmqkit.clock import Clock
from rmqkit.protocol import names
from rmqkit.protocol.properties import DELAY
from rmqkit.protocol.schemas.offsets import BrokerStatsData, StatsItem
from rmqkit.store.message_store import InnerMessage, MessageStore, PutResult, PutStatus
from rmqkit.store.settings import delay_level

# The spans that the tools show, with the largest duration of each span in ms.
_PUT_SPANS = {
    "[<=0ms]": 0,
    "[0~10ms]": 10,
    "[10~50ms]": 50,
    "[50~100ms]": 100,
    "[100~200ms]": 200,
    "[200~500ms]": 500,
    "[500ms~1s]": 1000,
    "[1~2s]": 2000,
    "[2~3s]": 3000,
    "[3~4s]": 4000,
    "[4~5s]": 5000,
    "[5~10s]": 10_000,
    "[10s~]": 1 << 62,
}

_FINER_SPANS = (1, 2, 3, 4, 5, 7, 20, 30, 70, 150, 300, 700, 20_000, 60_000)
# The largest duration of each bucket in ms.
_PUT_BOUNDS = sorted({*_PUT_SPANS.values(), *_FINER_SPANS})


class PutTimes:
    """The numbers of puts by their duration. ``longest_ms``: the longest duration since the start."""

    __slots__ = ("_counts", "_last", "longest_ms")

    def __init__(self) -> None:
        self.longest_ms = 0
        self._counts = [0] * len(_PUT_BOUNDS)
        self._last = [0] * len(_PUT_BOUNDS)

    def add(self, ms: float, count: int = 1) -> None:
        """Count some puts with the same duration. ``count``: the number of puts."""
        if ms < 1:
            self._counts[0] += count
            return
        self._counts[bisect_left(_PUT_BOUNDS, int(ms))] += count
        self.longest_ms = max(self.longest_ms, int(ms))

    def end_minute(self) -> None:
        """Make the current minute the last minute. `Statistics` calls this every minute."""
        assert len(self._counts) == len(_PUT_BOUNDS), "each bucket has a count"
        self._last, self._counts = self._counts, [0] * len(_PUT_BOUNDS)

    def __str__(self) -> str:
        """Return the puts of the last minute by duration, in the format of ``mqadmin brokerStatus``."""
        counts, at = dict.fromkeys(_PUT_SPANS, 0), 0
        names = list(_PUT_SPANS)
        for bound, count in zip(_PUT_BOUNDS, self._last, strict=True):
            at += bound > _PUT_SPANS[names[at]]
            counts[names[at]] += count
        return "".join(f"{name}:{count} " for name, count in counts.items())

    def percentile(self, part: float) -> float:
        """Return a percentile of the durations of the last minute in ms, interpolated within its bucket; 0 without
        puts."""
        wanted, below, low = part * sum(self._last), 0, 0
        for bound, count in zip(_PUT_BOUNDS, self._last, strict=True):
            if count and below + count >= wanted:
                high = min(bound, max(low, self.longest_ms))
                return low + (high - low) * (wanted - below) / count
            below, low = below + count, bound
        return 0.0


SAMPLE_SECONDS = 10.0
# Minute, hour and day in ms. The second number n means that each n-th sample is stored for the span.
_SPANS = ((60_000, 1), (3_600_000, 60), (86_400_000, 360))

_ROUNDS_A_MINUTE = 6
_BROKER = "BROKER_"
_WITHOUT_SYSTEM = "_WITHOUT_SYSTEM_TOPIC"
# The counters that only the runtime information uses.
_PUTS, _FOUND, _MISSED = "puts", "found", "missed"

# Names with keys that do not begin with the topic.
_QUEUE_FIRST = ("TOPIC_PUT_LATENCY", "GROUP_GET_LATENCY", "SNDBCK2DLQ_TIMES")

# Samples of monotonic ms, sum and times.
_Samples = deque[tuple[float, int, int]]


class _Counter:
    __slots__ = ("samples", "sum", "times")

    def __init__(self) -> None:
        self.sum = 0
        self.times = 0
        self.samples: tuple[_Samples, ...] = tuple(deque(maxlen=26) for _ in _SPANS)

    def over(self, samples: _Samples, since_ms: float, span_ms: float) -> StatsItem:
        """Return the values since ``since_ms``, as rates over a span."""
        _, sum_before, times_before = next((one for one in reversed(samples) if one[0] <= since_ms), (0, 0, 0))
        count, times = self.sum - sum_before, self.times - times_before
        return StatsItem(count, count * 1000 / span_ms, count / times if times else 0.0)


class Statistics:
    """The counters of a broker. The caller calls `sample` every `SAMPLE_SECONDS`, first when the store is open.
    ``is_system``: returns True for a system topic.

    Attributes:
        put_times: the durations of puts.
        puts_failed: the number of puts that the store refused.
        get_ms_max: the longest duration of a pull that found messages.
        pulls_missed: the number of pulls that found no messages.
    """

    def __init__(self, store: MessageStore, cluster: str, clock: Clock, is_system: Callable[[str], bool]) -> None:
        self._store = store
        self._cluster = cluster
        self._clock = clock
        self._is_system = is_system
        self._started_ms = clock.monotonic_ms()
        self._kept_ms = [self._started_ms for _ in _SPANS]
        self._ends: dict[tuple[str, int], int] | None = None
        self._log_start = 0
        self._put: dict[str, list[float]] = {}
        self._together: Counter[tuple[str, int]] = Counter()
        self._inner: Counter[tuple[str, int]] = Counter()
        self._dead: Counter[tuple[str, int]] = Counter()
        self._given: dict[tuple[str, int, str], list[float]] = {}
        self._popped: defaultdict[tuple[str, str, str], int] = defaultdict(int)  # twice as fast as a Counter
        self._counters: dict[tuple[str, str], _Counter] = {}
        self._changed: list[set[_Counter]] = [set() for _ in _SPANS]
        self._rounds = 0
        self._today = self._date()
        self._mornings: dict[tuple[str, str], tuple[int, int]] = {}
        self.put_times = PutTimes()
        self.puts_failed = self.pulls_missed = 0
        self.get_ms_max = 0.0

    # ---- events

    def sent(self, topic: str, size: int, ms: float, count: int = 1) -> None:
        """Count sends to one topic that were stored together. ``size``: the bytes of all these sends. ``ms``: the
        duration of each send."""
        put = self._put.get(topic)
        if put is None:
            put = self._put[topic] = [0, 0.0]
        put[0] += size
        if ms >= 1:
            put[1] += int(ms) * count  # whole ms as in Java, so that averages are the same as the reference's
        self.put_times.add(ms, count)

    def sent_one(self, message: InnerMessage, put: PutResult, ms: float, count: int = 1) -> None:
        """Count the send of one request. ``count``: the number of messages if the send is a batch."""
        if put.status is not PutStatus.OK:
            self.puts_failed += 1
            return
        self.batch_sent(message.topic, message.queue_id, self._size(message, put), ms, count)

    def batch_sent(self, topic: str, queue_id: int, size: int, ms: float, count: int) -> None:
        """Count the send of one request with ``count`` messages for a queue."""
        self.sent(topic, size, ms)
        if count > 1:
            self._together[topic, queue_id] += count - 1

    def moved(self, message: InnerMessage, put: PutResult) -> None:
        """Count a message that the broker itself stored in the message's real topic. The put has no duration, because
        no client waited."""
        if put.status is PutStatus.OK:
            self.sent(message.topic, self._size(message, put), 0.0)
            self._inner[message.topic, message.queue_id] += 1

    def delivered(self, message: InnerMessage, put: PutResult) -> None:
        """Count a message with a delay level that the broker delivered to its real topic."""
        self.moved(message, put)
        level = delay_level(message.parsed.get(DELAY))
        for key, of in (("", "GROUP"), (f"@{level - 1}", "QUEUE")):
            key = f"{names.SCHEDULE_TOPIC}{key}@SCHEDULE_CONSUMER"
            self.add(f"{of}_GET_NUMS", key)
            self.add(f"{of}_GET_SIZE", key, put.end_offset - put.physical_offset)

    def sent_back(self, message: InnerMessage, put: PutResult, *, topic: str, group: str, owner: str) -> None:
        """Count a message that a consumer group sent back. A dead letter is not counted as a put."""
        self.add("SNDBCK_PUT_NUMS", f"{topic}@{group}")
        if not message.topic.startswith(names.DLQ_PREFIX):
            self.moved(message, put)
            self.add(f"{_BROKER}PUT_NUMS", self._cluster, -1, 0)  # the reference does not count these
            return
        self.add("SNDBCK2DLQ_TIMES", f"{owner}@{topic}@{group}@SEND_BACK_TO_DLQ")
        self._dead[message.topic, message.queue_id] += 1

    def _size(self, message: InnerMessage, put: PutResult) -> int:
        """Return the bytes of a message that was put. Also add a delayed message to the counters of its delay queue."""
        size = put.end_offset - put.physical_offset
        if message.topic == names.SCHEDULE_TOPIC:
            key = f"{message.topic}@{message.queue_id}"
            self.add("QUEUE_PUT_NUMS", key)
            self.add("QUEUE_PUT_SIZE", key, size)
        return size

    def given(self, topic: str, group: str, queue_id: int, count: int, size: int, ms: float) -> None:
        """Count the messages of one pull, and add its duration."""
        given = self._given.get((topic, queue_id, group))
        if given is None:
            given = self._given[topic, queue_id, group] = [0, 0, 0, 0]
        given[0] += count
        given[1] += 1
        given[2] += size
        if ms >= 1:
            given[3] += int(ms)
            self.get_ms_max = max(self.get_ms_max, ms)

    def popped(self, topic: str, group: str, name: str, count: int = 1) -> None:
        """Count check points (``name`` CK) or acks (``name`` ACK)."""
        self._popped[topic, group, name] += count

    def registered(self, kind: str, ms: float, groups: int) -> None:
        """Count the groups of one heartbeat."""
        if groups:
            self.add(f"{kind}_REGISTER_TIME", self._cluster, int(ms), groups)

    def add(self, name: str, key: str, count: int = 1, times: int = 1) -> None:
        """Add to a counter. ``times``: the number of events whose sum is ``count``."""
        counter = self._counters.get((name, key))
        if counter is None:
            counter = self._counters[name, key] = _Counter()
        counter.sum += count
        counter.times += times
        # Mark the counter: only changed counters get a sample, so that thousands of idle queues cost nothing.
        for changed in self._changed:
            changed.add(counter)

    def get(self, name: str, key: str) -> BrokerStatsData | None:
        """Return a counter's last minute, hour and day, up to now; None if the counter does not exist."""
        self._enter_growth()
        found = self._read(name, key)
        if found is not None and name.startswith(_BROKER):
            for item in (found.stats_minute, found.stats_hour, found.stats_day):
                item.avgpt = 0.0
        return found

    @property
    def put_count(self) -> int:
        """The number of records put since the start, including records of system topics."""
        self._enter_growth()
        counter = self._counters.get((_PUTS, self._cluster))
        return 0 if counter is None else counter.sum

    @property
    def put_bytes(self) -> int:
        """The growth of the log since the start, in bytes."""
        return self._store.max_physical_offset - self._log_start

    def per_second(self, name: str, key: str) -> float:
        """Return the rate of the last minute, up to the last sample."""
        found = self._read(name, key)
        return 0.0 if found is None else found.stats_minute.tps

    def totals(self, name: str) -> dict[tuple[str, str], int]:
        """Return the totals since the start by topic and group. ``name``: a name with keys ``topic@group``."""
        self._enter_growth()
        found = {key.partition("@"): one.sum for (of, key), one in self._counters.items() if of == name}
        return {(topic, group): total for (topic, _, group), total in found.items()}

    def rates(self, name: str) -> tuple[float, float, float]:
        """Return the rates per second of the last 10 s, minute and 10 minutes. ``name``: a name with the cluster as
        key, ``puts``, ``found`` (pulls that found messages) or ``missed`` (pulls that found no messages)."""
        self._enter_growth()
        counter = self._counters.get((name, self._cluster))
        if counter is None:
            return 0.0, 0.0, 0.0
        ten_s, minute, ten_minutes = (self._over(counter, *at).tps for at in ((0, 10_000), (0, 60_000), (1, 600_000)))
        return ten_s, minute, ten_minutes

    def days(self, name: str) -> tuple[int, int, int]:
        """Return the totals since the start at yesterday's midnight, at today's midnight, and now. ``name``: a name
        with the cluster as key."""
        self._enter_growth()
        self._note_midnight()
        counter = self._counters.get((name, self._cluster))
        return (*self._mornings.get((name, self._cluster), (0, 0)), 0 if counter is None else counter.sum)

    def _note_midnight(self) -> None:
        if self._date() != self._today:
            self._today = self._date()
            last = self._mornings
            self._mornings = {key: (last.get(key, (0, 0))[1], one.sum) for key, one in self._counters.items()}

    def _date(self) -> date:
        return date.fromtimestamp(self._clock.now_ms() / 1000)

    def _read(self, name: str, key: str) -> BrokerStatsData | None:
        counter = self._counters.get((name, key))
        if counter is None:
            return None
        return BrokerStatsData(*(self._over(counter, number, span_ms) for number, (span_ms, _) in enumerate(_SPANS)))

    def _over(self, counter: _Counter, number: int, span_ms: int) -> StatsItem:
        """Return the values of the last ``span_ms``. ``number``: the index of the span in `_SPANS` with the samples."""
        since_ms = self._kept_ms[number] - span_ms
        passed_ms = self._clock.monotonic_ms() - max(since_ms, self._started_ms)
        return counter.over(counter.samples[number], since_ms, max(1000 * SAMPLE_SECONDS, passed_ms))

    def _enter_growth(self) -> None:
        """Add the growth of the queues and the noted values to the counters."""
        ends = self._store.queue_ends()
        # Read the growth from the queues, so that a put costs nothing. The first call only stores the ends.
        if self._ends is None:
            self._log_start = self._store.max_physical_offset
        else:
            self._enter_puts(
                {place: grown for place, end in ends.items() if (grown := end - self._ends.get(place, 0)) > 0}
            )
        self._ends = ends
        for (topic, queue_id, group), (count, pulls, size, ms) in self._given.items():
            self.add("GROUP_GET_NUMS", f"{topic}@{group}", int(count), int(pulls))
            self.add("GROUP_GET_SIZE", f"{topic}@{group}", int(size), int(pulls))
            self.add("GROUP_GET_LATENCY", f"{queue_id}@{topic}@{group}", int(ms), int(pulls))
            self._add_for_broker("GET", topic, int(count))
            self.add(_FOUND, self._cluster, int(pulls))
        self._given.clear()
        for (topic, group, name), count in self._popped.items():
            self.add(f"GROUP_{name}_NUMS", f"{topic}@{group}", count, count)
            self.add(f"{_BROKER}{name}_NUMS", self._cluster, count)
        self._popped.clear()
        if self.pulls_missed:
            self.add(_MISSED, self._cluster, self.pulls_missed)
            self.pulls_missed = 0

    def _enter_puts(self, grown: dict[tuple[str, int], int]) -> None:
        """Add the growth of queues and the noted values of the puts of their topics to the counters."""
        of_topics: dict[str, list[int]] = {}
        sends: list[tuple[str, int, int]] = []
        for (topic, queue_id), count in grown.items():
            place = topic, queue_id
            assert count > 0, f"queue {place} cannot grow by {count}"
            self.add(_PUTS, self._cluster, count)
            # Subtract in this order: dead letters are not puts of the topic, the messages of a batch are one put, and
            # puts of the broker itself have no duration. Limit each number: notes and growth may differ by a tick.
            count -= _taken(self._dead, place, count)
            puts = count - _taken(self._together, place, count - 1)
            sent = puts - _taken(self._inner, place, puts)
            sends.append((topic, queue_id, sent))
            of_topic = of_topics.setdefault(topic, [0, 0, 0])
            for number, added in enumerate((count, puts, sent)):
                of_topic[number] += added
        shares: dict[str, float] = {}
        for topic, (count, puts, sent) in of_topics.items():
            size, ms = self._put.pop(topic, (0, 0.0))
            if count:
                self.add("TOPIC_PUT_NUMS", topic, count, puts)
                self._add_for_broker("PUT", topic, count)
            if size:
                self.add("TOPIC_PUT_SIZE", topic, int(size), puts)
                shares[topic] = ms / sent if sent else 0.0
        for topic, queue_id, sent in sends:
            if sent and topic in shares:
                self.add("TOPIC_PUT_LATENCY", f"{queue_id}@{topic}", round(shares[topic] * sent), sent)

    def _add_for_broker(self, way: str, topic: str, count: int) -> None:
        self.add(f"{_BROKER}{way}_NUMS", self._cluster, count, 0)
        if not self._is_system(topic):
            self.add(f"{_BROKER}{way}_NUMS{_WITHOUT_SYSTEM}", self._cluster, count, 0)

    def sample(self) -> None:
        """Store a sample of the counters that have changed since the last sample."""
        self._enter_growth()
        # Add all events until now first: after midnight is noted, they would count for the new day.
        self._note_midnight()
        self._rounds += 1
        if self._rounds % _ROUNDS_A_MINUTE == 0:
            self.put_times.end_minute()
        for number, (_, rounds) in enumerate(_SPANS):
            if self._rounds % rounds == 0:
                self._kept_ms[number] = now_ms = self._clock.monotonic_ms()
                for counter in self._changed[number]:
                    counter.samples[number].append((now_ms, counter.sum, counter.times))
                self._changed[number].clear()

    def drop_counters(self, *, topics: Set[str] = frozenset(), groups: Set[str] = frozenset()) -> None:
        """Drop the counters of topics or groups that were deleted."""
        # Add the growth first: growth that is added later would create the counters again.
        self._enter_growth()
        for name, key in list(self._counters):
            of_topic, _, rest = (key.partition("@")[2] if name in _QUEUE_FIRST else key).partition("@")
            of_group = rest.partition("@")[0]
            if (of_topic and of_topic in topics) or (of_group and of_group in groups):
                counter = self._counters.pop((name, key))
                for changed in self._changed:
                    changed.discard(counter)


def _taken(noted: Counter[tuple[str, int]], place: tuple[str, int], limit: int) -> int:
    """Remove up to ``limit`` noted messages of a queue. Return the number of removed messages."""
    count = min(noted[place], limit) if place in noted else 0
    noted.subtract({place: count} if count else {})
    if place in noted and not noted[place]:
        del noted[place]
    return count
