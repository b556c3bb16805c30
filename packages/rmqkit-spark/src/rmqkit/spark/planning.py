"""The rules of the format ``rocketmq``: options, the offsets and plans of batches and streams, without Spark.

`rmqkit.spark.source.broker` makes Spark's classes of them. For the reader in Java they run in a process of their own
(`rmqkit.spark.planner`), so this module needs neither PySpark nor Arrow nor numpy, which take longer to import than a
plan takes.

The options have the names of Spark's Kafka source if it has the option (``docs/spark-options.md`` compares them). Only
the checkpoint defines a stream's progress; with ``commitOffsetsToGroup`` the brokers store it, too. A queue that is
created while a stream runs is read from its first message.

Checkpoints and options contain offsets as ``{"orders": {"broker-a": {"0": 123, "1": 77}}}``. An offset is the offset of
the next message, so an end is exclusive. A checkpoint also contains marks::

    ".marks": {"orders": {"broker-a": {"0": [8123, 1700000000000, 0]}}}

A mark has three numbers: the log offset and the store time in ms of the message before the offset (-1 if unknown), and
how often the queue was created again since the query began. If the broker has another message there, the topic was
deleted and created again, and the batch reads the new queue from its first message. Such a batch increases the third
number. Checkpoints without marks are supported.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import operator
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from rmqkit.arrow.options import IncludeProperties
from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import NoRoute, SettingsError
from rmqkit.filter import TAG, subscription
from rmqkit.protocol.names import TOOLS_GROUP
from rmqkit.protocol.properties import RESERVED_NAMES
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.spark.broker_pool import (
    Bounds,
    BrokerPool,
    DataLost,
    Mark,
    Offsets,
    Range,
    broker_pool,
    light_queues,
    numbered,
    wanted_topics,
)
from rmqkit.spark.failures import CHECKPOINT_REMEDY
from rmqkit.spark.options import ByGroup, ByTimestamp, ColumnNames, LiveOptions, parse_options, words

FORMAT = "rocketmq"

EARLIEST = -2
LATEST = -1
"""Values that options may contain in place of an offset; checkpoints never contain them."""
GROUP = "group"
"""The value of ``startingOffsets`` for the offsets of a consumer group."""

NO_LIMIT = (1 << 63) - 1
_CHECK_INTERVAL_MS = 60_000
_MARKS = ".marks"  # topic names have no dots
_NO_MARK = Mark(-1, -1)
_SHAPE = 'it must look like {"topic":{"broker-a":{"0":123}}}'

_log = logging.getLogger(__name__)


class Place(Struct, frozen=True):
    """The position of a stream, stored in a checkpoint.

    Attributes:
        offsets: offset of the next message of each queue.
        marks: mark of the message before each offset, if it is known.
        renewals: number of times each queue was created again during the query; 0 for a queue that is not listed.
    """

    offsets: Offsets
    marks: dict[MessageQueue, Mark] = {}
    renewals: dict[MessageQueue, int] = {}


class Part(Struct, frozen=True):
    """A range of a queue that a task reads, the number of the queue in the column ``partition``, and the options of the
    pulls for the reader in Java."""

    value: Range
    number: int
    pull: Mapping[str, Any]

    def plain(self) -> dict[str, Any]:
        """Return plain values, which ``jvm/LiveTask.java`` reads."""
        part, queue = self.value, self.value.queue
        place = {"topic": queue.topic, "brokerName": queue.broker_name, "queueId": queue.queue_id}
        pull = {**self.pull, **place, "partition": self.number, "logOffsetMax": part.log_offset_max}
        return {"low": part.low, "high": part.high, "pull": pull}


class Planner:
    """The plan of a batch, and the common part of batches and streams."""

    def __init__(self, options: LiveOptions) -> None:
        self._options = options

    def batch(self) -> list[Part]:
        """Plan ranges of the current messages of the queues."""
        options = self._options
        queues = self._queues()
        if options.lite_topics and not options.namespace:
            queues = light_queues(queues, words(options.lite_topics))
        bounds = self._pool().bounds(queues)
        start = self._check_there(self._up_to_ends(self._started(bounds, "earliest"), bounds), bounds)
        end = self._up_to_ends(self._ended(bounds), bounds)
        return self._parts(start, end, bounds)

    def _pool(self) -> BrokerPool:
        return broker_pool(self._options)

    def _queues(self) -> list[MessageQueue]:
        if self._options.assigned:
            return _assigned(self._options.assigned)
        return self._pool().queues(wanted_topics(self._options), self._options.pattern)

    def _parts(
        self,
        start: Offsets,
        end: Offsets,
        queues: Iterable[MessageQueue],
        marks: Mapping[MessageQueue, Mark] | None = None,
    ) -> list[Part]:
        """Plan the tasks that read some of the queues. ``marks``: marks of the messages before the ends."""
        options, known_ends = self._options, marks or {}
        parts = [
            replace(part, log_offset_max=known_ends.get(part.queue, _NO_MARK).log_offset)
            for part in ranges(start, end, parts_min=options.partitions_min, count_max=options.records_max)
        ]
        known = set(queues)
        is_kafka = options.column_names is ColumnNames.KAFKA
        if is_kafka and options.assigned:  # the other queues of a topic have numbers, too
            known.update(self._pool().queues({part.queue.topic for part in parts}))
        numbers = numbered(known) if is_kafka else {}
        return [Part(part, numbers.get(part.queue, 0), self._pull(part.queue)) for part in parts]

    def _pull(self, queue: MessageQueue) -> dict[str, Any]:
        """Return the options for pulls of a queue, for the reader in Java."""
        options = self._options
        is_kafka = options.column_names is ColumnNames.KAFKA
        return {
            **self._pool().pull_options(queue),
            "tags": sorted(tags_of(options, queue.topic)),
            "liteTopics": words(options.lite_topics),
            "litePrefix": options.lite_prefix,
            "reserved": sorted(RESERVED_NAMES) if is_kafka else [],
            "decompress": options.decompress,
            "unwrap": options.unwrap,
            "batchRows": options.batch_rows,
        }

    def _started(self, bounds: Mapping[MessageQueue, Bounds], default: str) -> Offsets:
        """Return the start offsets that the options demand."""
        options = self._options
        if options.starting_timestamps or options.starting_timestamp_ms:
            return self._at_times("starting", options.starting_timestamps, options.starting_timestamp_ms, bounds)
        if options.starting_offsets == GROUP:
            return self._at_group(bounds)
        return self._at_offsets("startingOffsets", options.starting_offsets or default, bounds, EARLIEST)

    def _at_group(self, bounds: Mapping[MessageQueue, Bounds]) -> Offsets:
        """Return the offsets of the consumer group. A queue without an offset begins at its first message or its end.
        Raises SettingsError: the group has no offset, and ``startingOffsetsByGroupStrategy`` is not set."""
        group, strategy = self._options.group, self._options.by_group
        committed = self._pool().committed(group, bounds)
        if bounds and not committed and strategy is ByGroup.ERROR:
            first, *others = sorted({queue.topic for queue in bounds})
            topics = f"{first} and {len(others)} more" if others else first
            raise SettingsError(
                f"{FORMAT}: group {group} has no offset in {topics}: correct the name, or set"
                " startingOffsetsByGroupStrategy to earliest or latest"
            )
        fallback = {queue: bound.high if strategy is ByGroup.LATEST else bound.low for queue, bound in bounds.items()}
        return {**fallback, **committed}

    def _ended(self, bounds: Mapping[MessageQueue, Bounds]) -> Offsets:
        """Return the end offsets that the options demand."""
        options = self._options
        if options.ending_timestamps or options.ending_timestamp_ms:
            return self._at_times("ending", options.ending_timestamps, options.ending_timestamp_ms, bounds)
        return self._at_offsets("endingOffsets", options.ending_offsets, bounds, LATEST)

    def _at_offsets(self, name: str, text: str, bounds: Mapping[MessageQueue, Bounds], default: int) -> Offsets:
        given = read_option(name, text)
        words_known = {"earliest": EARLIEST, "latest": LATEST}
        if given is None and text not in words_known:
            known = f"earliest, latest{', group' if name == 'startingOffsets' else ''}"
            raise SettingsError(f"{FORMAT}: {name}={text} must be {known} or JSON by topic, broker and queue")
        wanted = (
            dict.fromkeys(bounds, words_known[text]) if given is None else {**dict.fromkeys(bounds, default), **given}
        )
        for queue in wanted.keys() - bounds.keys():
            raise SettingsError(f"{FORMAT}: {name} names {queue}, which is not read: take it out, or subscribe to it")
        ends = {EARLIEST: "low", LATEST: "high"}
        return {
            queue: getattr(bounds[queue], ends[offset]) if offset in ends else offset
            for queue, offset in wanted.items()
        }

    def _at_times(self, which: str, text: str, everywhere_ms: int, bounds: Mapping[MessageQueue, Bounds]) -> Offsets:
        given = read_option(f"{which}OffsetsByTimestamp", text) if text else {}
        if given is None:
            raise SettingsError(f"{FORMAT}: {which}OffsetsByTimestamp={text} must be JSON by topic, broker and queue")
        offsets: Offsets = {}
        for queue, bound in bounds.items():
            timestamp_ms = given.get(queue, everywhere_ms)
            offset = self._pool().search(queue, timestamp_ms) if timestamp_ms else bound.low
            if offset >= bound.high and which == "starting" and self._options.by_timestamp is ByTimestamp.ERROR:
                raise SettingsError(
                    f"{FORMAT}: queue {queue.queue_id} of {queue.topic} on {queue.broker_name} has no message as late"
                    f" as {timestamp_ms}: startingOffsetsByTimestampStrategy=latest begins with the next one"
                )
            offsets[queue] = min(offset, bound.high)
        return offsets

    def _check_there(self, start: Offsets, bounds: Mapping[MessageQueue, Bounds]) -> Offsets:
        """Raise start offsets to the first stored messages of their queues.
        Raises DataLost: ``failOnDataLoss`` is set, and messages were deleted."""
        kept = dict(start)
        for queue, offset in start.items():
            if queue in bounds and offset < bounds[queue].low:
                why = f"the queue begins at {bounds[queue].low}"
                self._pool().report(DataLost(queue, offset, bounds[queue].low, why))
                kept[queue] = bounds[queue].low
        return kept

    def _up_to_ends(self, offsets: Offsets, bounds: Mapping[MessageQueue, Bounds]) -> Offsets:
        """Lower the offsets of options to the ends of their queues.
        Raises DataLost: ``failOnDataLoss`` is set, and an offset is greater than the end of its queue."""
        kept = dict(offsets)
        for queue, offset in offsets.items():
            if (high := bounds[queue].high) < offset:
                self._pool().report(DataLost(queue, high, offset, f"the queue ends at {high}"))
                kept[queue] = high
        return kept


class StreamPlanner(Planner):
    """The plans of a stream's batches. Its process may be replaced at any time, so all permanent state is in the
    checkpoint."""

    def __init__(self, options: LiveOptions, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(options)
        self._clock = clock
        self._batch_ms: float | None = None
        self._target: Offsets | None = None
        self._latest: Offsets = {}
        self._mean_bytes: dict[MessageQueue, float] = {}
        self.given_up: set[MessageQueue] = set()
        self._checked_ms: float | None = None
        self._fresh_marks: dict[MessageQueue, Mark] = {}

    def initial_offset(self) -> dict[str, Any]:
        """Return the start of a new query."""
        bounds = self._pool().bounds(self._queues())
        return self._batch_end(Place({}), self._up_to_ends(self._started(bounds, "latest"), bounds), set())

    def rows_max(self) -> int:
        """Return the limit ``maxOffsetsPerTrigger`` of a batch, or 0 for all messages. If only other limits are set,
        return a limit that is never reached, because 0 disables all limits and waits."""
        if not (self._options.offsets_max or self._options.offsets_min or self._options.bytes_max):
            return 0
        return self._options.offsets_max or NO_LIMIT

    def end_now(self) -> None:
        """Fix the end of the query at the current ends of the queues. If a broker is unreachable, fix the ends of its
        queues after it is back."""
        # Set before the requests to brokers: the query must stop even if a broker does not answer now.
        self._target = {}
        with contextlib.suppress(NoRoute):
            self._target, _ = self._ends(Place({}))

    def latest_offset(self, start: dict[str, Any] | None, rows_max: int) -> dict[str, Any]:
        """Return the end of the next batch of at most ``rows_max`` messages, or of all messages, without other limits
        and waits, if it is 0. While the next batch waits for more messages, return the end of the last batch."""
        before = _kept({} if start is None else start)
        begun = before.offsets
        self._latest, renewed = self._ends(before)
        end = self._latest
        if self._target is not None:
            self._target = {**{queue: end[queue] for queue in begun}, **self._target}
            end = {queue: min(end[queue], offset) for queue, offset in self._target.items() if queue in end}
        # A new queue has no start in the checkpoint yet; a queue that was created again has the start of the old queue.
        # Both are read from their first message.
        new = (end.keys() - begun.keys()) | renewed
        bounds = self._pool().bounds(sorted(new))
        begun = {**begun, **{queue: bounds[queue].low for queue in new}}
        # An end never moves backwards, or Spark would read rows twice.
        end = {queue: max(offset, begun[queue]) for queue, offset in end.items()}
        assert end.keys() <= begun.keys(), "every queue with an end has a start"
        if not rows_max:
            return self._batch_end(before, end, renewed)
        if start is not None and self._waits(begun, end):
            # For the end of the last batch Spark makes no batch, and calls again.
            return start
        end = limited(begun, end, rows_max)
        if self._options.bytes_max:
            end = limited(begun, end, self._count_of(self._options.bytes_max, begun, end))
        assert all(offset >= begun[queue] for queue, offset in end.items()), "an end never moves backwards"
        return self._batch_end(before, end, renewed)

    def _batch_end(self, before: Place, end: Offsets, renewed: Collection[MessageQueue]) -> dict[str, Any]:
        """Return the end of a batch as JSON, with the marks of the messages before it. A queue whose end did not change
        keeps its mark, so that Spark sees the same offsets and makes no batch."""
        moved = {queue: at for queue, at in end.items() if queue in renewed or at != before.offsets.get(queue)}
        self._fresh_marks = self._pool().marks(moved)
        kept = {queue: mark for queue, mark in before.marks.items() if queue in end and queue not in moved}
        renewals = {queue: before.renewals.get(queue, 0) + (queue in renewed) for queue in end}
        return to_json(end, {**kept, **self._fresh_marks}, renewals)

    def _waits(self, begun: Offsets, end: Offsets) -> bool:
        """Return True if there are fewer messages than ``minOffsetsPerTrigger``, and ``maxTriggerDelay`` has not
        passed. The first batch of a query does not wait, nor does a batch of ``availableNow``, which gets no more
        messages.
        """
        if not self._options.offsets_min or self._target is not None:
            return False
        count = sum(high - begun[queue] for queue, high in end.items())
        now_ms = self._clock.monotonic_ms()
        is_due = self._batch_ms is None or now_ms - self._batch_ms >= self._options.trigger_delay_ms
        if count and (is_due or count >= self._options.offsets_min):
            self._batch_ms = now_ms
            return False
        return True

    def known_latest(self) -> dict[str, Any] | None:
        """Return the current ends of the queues. Spark shows them in the progress, to compute the backlog."""
        return to_json(self._latest) if self._latest else None

    def parts(self, start: dict[str, Any], end: dict[str, Any]) -> list[Part]:
        """Plan ranges from ``start`` to ``end``; a queue that was deleted and created again meanwhile (`_ends`) is read
        from its first message."""
        before, after = _kept(start), _kept(end)
        begun = {queue: offset for queue, offset in before.offsets.items() if queue in after.offsets}
        renewed = {queue for queue in begun if after.renewals.get(queue, 0) != before.renewals.get(queue, 0)}
        # In checkpoints without marks such a queue has an end that is less than the start.
        renewed |= {queue for queue, offset in begun.items() if offset > after.offsets[queue]}
        begun |= dict.fromkeys(renewed, 0)
        assert all(offset <= after.offsets[queue] for queue, offset in begun.items()), (
            "no start is greater than its end"
        )
        # Only queues with messages to read: an unreachable broker must not delay a batch of other brokers.
        ended = {queue: high for queue, high in after.offsets.items() if begun.get(queue, 0) < high}
        # When Spark plans a batch again, its queue may have been deleted and created again meanwhile. The next batch
        # reads the messages that have these offsets in the new queue.
        others = self._made_again(
            {queue: high for queue, high in ended.items() if after.marks.get(queue) != self._fresh_marks.get(queue)},
            after.marks,
        )
        ended = {queue: high for queue, high in ended.items() if queue not in others}
        bounds = self._pool().bounds(ended)
        begun = {**dict.fromkeys(bounds, 0), **begun}
        # The numbers of queues come from the checkpoint: a batch that is planned again has the same numbers, and a
        # broker that is away keeps its numbers.
        return self._parts(self._check_there(begun, bounds), ended, after.offsets, after.marks)

    def commit(self, end: dict[str, Any]) -> None:
        """Save the offsets of a completed batch for the group of ``commitOffsetsToGroup``."""
        # Spark calls this only when it plans the next batch, so the offsets of the group lag one batch behind the
        # checkpoint. They are never read: a failed query continues from the checkpoint.
        if self._options.commit_group:
            there = {queue: offset for queue, offset in _kept(end).offsets.items() if queue not in self.given_up}
            self._pool().commit(self._options.commit_group, there)

    def _ends(self, before: Place) -> tuple[Offsets, set[MessageQueue]]:
        """Return the current ends of the queues, and the queues to read from their first message: queues that were
        deleted and created again, or whose broker lost messages at the end. A queue that was read before and is in no
        route keeps its offset."""
        options, begun = self._options, before.offsets
        for queue in begun.keys() - self.given_up:
            # A query may continue with other topics. The queues that it does not read any more may still exist.
            if not self._wants(queue):
                self._pool().report(DataLost(queue, begun[queue], None, "the options do not name it any more"))
                self.given_up.add(queue)
        waited_for = {queue: offset for queue, offset in begun.items() if queue not in self.given_up}
        assigned = _assigned(options.assigned) if options.assigned else []
        bounds = self._pool().reach(wanted_topics(options), options.pattern, assigned, waited_for)
        ends = {queue: bound.high for queue, bound in bounds.items()}
        self.given_up &= {queue for queue, offset in begun.items() if ends.get(queue, -1) < offset}
        renewed: set[MessageQueue] = set()
        for queue, offset in begun.items():
            high = ends.get(queue)
            if high is not None and high < offset:
                self._pool().report(DataLost(queue, high, offset, f"the queue ends at {high}"))
                renewed.add(queue)
                self.given_up.discard(queue)
            elif high is None and queue in waited_for:
                why = "no route has the queue, its topic or broker is gone"
                self._pool().report(DataLost(queue, offset, None, why))
                self.given_up.add(queue)
        # Check each queue that has new messages. Other queues may have none for days: check them from time to time.
        reached = {queue: offset for queue, offset in begun.items() if queue in ends and queue not in renewed}
        moved = {queue: offset for queue, offset in reached.items() if ends[queue] > offset}
        now_ms = self._clock.monotonic_ms()
        if is_due := self._checked_ms is None or now_ms - self._checked_ms >= _CHECK_INTERVAL_MS:
            self._checked_ms = now_ms
        renewed |= self._made_again(reached if is_due else moved, before.marks)
        for queue in renewed:
            _log.warning("queue %d of %s on %s is read from its first message", *_named(queue))
        return {**{queue: begun[queue] for queue in begun.keys() - ends.keys()}, **ends}, renewed

    def _wants(self, queue: MessageQueue) -> bool:
        """Return True if the options name a queue or its topic."""
        options = self._options
        if options.assigned:
            return queue in _assigned(options.assigned)
        if options.pattern:
            return re.fullmatch(options.pattern, queue.topic) is not None
        return queue.topic in wanted_topics(options)

    def _made_again(self, offsets: Offsets, marks: Mapping[MessageQueue, Mark]) -> set[MessageQueue]:
        """Find the queues whose message before an offset does not match its mark.
        Raises DataLost: ``failOnDataLoss`` is set, and such a queue exists."""
        now = self._pool().marks({queue: offset for queue, offset in offsets.items() if queue in marks})
        others = {queue for queue, mark in now.items() if mark != marks[queue]}
        for queue in sorted(others):
            found, expected = now[queue].log_offset, marks[queue].log_offset
            why = (
                f"the queue was deleted and created again: its message {offsets[queue] - 1} is at log offset {found}, "
            )
            why += f"not at {expected}"
            self._pool().report(DataLost(queue, offsets[queue], None, why))
        return others

    def _count_of(self, size: int, begun: Offsets, end: Offsets) -> int:
        """Estimate the number of messages whose size is about ``size`` bytes. Brokers do not report sizes, so the mean
        size in each queue is estimated from a few records of each batch."""
        backlog = {queue: high - begun[queue] for queue, high in end.items() if high > begun[queue]}
        for queue in backlog:
            seen = self._pool().mean_bytes(queue, begun[queue])
            if seen is not None:
                self._mean_bytes[queue] = (self._mean_bytes.get(queue, seen) + seen) / 2
        total = sum(count * self._mean_bytes.get(queue, 0.0) for queue, count in backlog.items())
        return sum(backlog.values()) if total <= size else max(1, int(sum(backlog.values()) * size / total))


def stream_options(given: Mapping[str, str]) -> LiveOptions:
    """Parse the options of a stream. Raises SettingsError: see `live_options`, or an option is for batches."""
    options = live_options(given)
    for name, value in (
        ("endingOffsetsByTimestamp", options.ending_timestamps),
        ("endingTimestamp", options.ending_timestamp_ms),
    ):
        if value:
            raise SettingsError(f"{FORMAT}: {name} is for batches: a stream has no end")
    return options


def live_options(given: Mapping[str, str]) -> LiveOptions:
    """Parse the options of a read.
    Raises SettingsError: an option is unknown or not valid, or the topics are missing or ambiguous."""
    options = parse_options(LiveOptions, {key: text for key, text in given.items() if key.lower() != "path"}, FORMAT)
    asked = [bool(wanted_topics(options)), bool(options.pattern), bool(options.assigned)]
    if sum(asked) != 1:
        raise SettingsError(f"{FORMAT}: give one of subscribe, subscribePattern and assign, found {sum(asked)}")
    if options.assigned:
        _assigned(options.assigned)
    try:
        _ = options.trigger_delay_ms
    except SettingsError as error:
        raise SettingsError(f"{FORMAT}: {error}") from None
    if options.starting_offsets == GROUP and options.group == TOOLS_GROUP:
        raise SettingsError(f"{FORMAT}: startingOffsets=group needs the name of a consumer group: set option group")
    if options.column_names is ColumnNames.KAFKA and options.include_properties is IncludeProperties.STRING:
        raise SettingsError(
            f"{FORMAT}: includeProperties=string has no meaning with columnNames=kafka: set map for the column headers,"
            " or none"
        )
    if 0 < options.offsets_max < options.offsets_min:
        raise SettingsError(
            f"{FORMAT}: minOffsetsPerTrigger={options.offsets_min} must not be above "
            f"maxOffsetsPerTrigger={options.offsets_max}"
        )
    return options


def tags_of(options: LiveOptions, topic: str) -> frozenset[str]:
    """Return the wanted tags, which the reader compares again because brokers compare only hashes. An empty set means
    any tag."""
    if options.expression_type != TAG:
        return frozenset()
    return frozenset(subscription(topic, options.expression).tags_set)


def _kept(noted: Any) -> Place:
    """Parse a position in a checkpoint. Raises SettingsError: it does not have the format of `to_json`."""
    try:
        return place_of(noted)
    except ValueError as error:
        raise SettingsError(
            f"{FORMAT}: the checkpoint has unusable offsets, {json.dumps(noted):.100}: {error}; {CHECKPOINT_REMEDY}"
        ) from None


def _assigned(text: str) -> list[MessageQueue]:
    try:
        return sorted(
            MessageQueue(topic, broker_name, queue_id)
            for topic, brokers in json.loads(text).items()
            for broker_name, queue_ids in brokers.items()
            for queue_id in map(operator.index, queue_ids)
        )
    except (ValueError, AttributeError, TypeError) as error:
        raise SettingsError(f'{FORMAT}: assign must look like {{"topic":{{"broker-a":[0,1]}}}}: {error}') from None


def _named(queue: MessageQueue) -> tuple[int, str, str]:
    return queue.queue_id, queue.topic, queue.broker_name


# ---------------------------------------------------------------- offsets


def to_json(
    offsets: Mapping[MessageQueue, int],
    marks: Mapping[MessageQueue, Mark] | None = None,
    renewals: Mapping[MessageQueue, int] | None = None,
) -> dict[str, Any]:
    """Return offsets in the form of a checkpoint."""
    tree = _nested(offsets)
    noted = {
        queue: [mark.log_offset, mark.stored_ms, count]
        for queue in offsets
        for mark, count in [((marks or {}).get(queue, _NO_MARK), (renewals or {}).get(queue, 0))]
        if mark != _NO_MARK or count
    }
    return tree | ({_MARKS: _nested(noted)} if noted else {})


def from_json(tree: Mapping[str, Any]) -> Offsets:
    """Parse the offsets of `to_json`, without the marks. Raises ValueError: they have another shape."""
    offsets: Offsets = {}
    for queue, offset in _flat({topic: brokers for topic, brokers in tree.items() if topic != _MARKS}):
        if isinstance(offset, bool) or not isinstance(offset, int):
            raise ValueError(f"{offset!r} is not an offset")
        offsets[queue] = offset
    return offsets


def place_of(tree: Mapping[str, Any]) -> Place:
    """Parse the result of `to_json`. Raises ValueError: it has another shape."""
    if not isinstance(tree, dict):
        raise ValueError(_SHAPE)
    place = Place(from_json(tree), {}, {})
    for queue, noted in _flat(tree.get(_MARKS, {})):
        if not (isinstance(noted, list) and len(noted) == 3 and all(type(one) is int for one in noted)):
            raise ValueError(f"{noted!r} is not a mark")
        log_offset, stored_ms, count = noted
        if log_offset >= 0:
            place.marks[queue] = Mark(log_offset, stored_ms)
        if count:
            place.renewals[queue] = count
    return place


def _nested(values: Mapping[MessageQueue, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for queue, value in sorted(values.items()):
        nested.setdefault(queue.topic, {}).setdefault(queue.broker_name, {})[str(queue.queue_id)] = value
    return nested


def _flat(tree: Mapping[str, Any]) -> Iterator[tuple[MessageQueue, Any]]:
    try:
        for topic, brokers in tree.items():
            for broker_name, queues in brokers.items():
                for queue_id, value in queues.items():
                    yield MessageQueue(topic, broker_name, int(queue_id)), value
    except AttributeError:
        raise ValueError(_SHAPE) from None


def read_option(name: str, text: str) -> Offsets | None:
    """Parse the offsets of an option, or return None if the option is not JSON but a word such as ``latest``.
    Raises SettingsError: the JSON does not contain offsets."""
    if not text.startswith("{"):
        return None
    try:
        return from_json(json.loads(text))
    except ValueError as error:
        raise SettingsError(f"rocketmq: option {name} cannot be used: {error}") from None


def limited(start: Offsets, end: Offsets, count_max: int) -> Offsets:
    """Lower ``end``, so that about ``count_max`` messages remain after ``start``. Each queue gets a number in
    proportion to its messages, but at least one message. Otherwise a small queue among large queues would never
    advance."""
    backlog = {queue: max(offset - start.get(queue, offset), 0) for queue, offset in end.items()}
    total = sum(backlog.values())
    if total <= count_max:
        return dict(end)
    taken = {queue: max(1, count * count_max // total) if count else 0 for queue, count in backlog.items()}
    assert all(0 <= taken[queue] <= count for queue, count in backlog.items()), (
        "a queue gives no more messages than it has"
    )
    return {queue: offset - backlog[queue] + taken[queue] for queue, offset in end.items()}


def ranges(start: Offsets, end: Offsets, *, parts_min: int = 0, count_max: int = 0) -> Iterator[Range]:
    """Cut the messages from ``start`` to ``end`` into ranges for tasks, with at most ``count_max`` messages each. Large
    queues are cut further to get at least ``parts_min`` ranges, if there are enough messages."""
    whole = {queue: (start[queue], high) for queue, high in sorted(end.items()) if start.get(queue, high) < high}
    total = sum(high - low for low, high in whole.values())
    for queue, (low, high) in whole.items():
        parts = -(-(high - low) * parts_min // total) if len(whole) < parts_min else 1
        if count_max:
            parts = max(parts, -(-(high - low) // count_max))
        bounds = [low + (high - low) * i // parts for i in range(parts + 1)]
        assert (bounds[0], bounds[-1]) == (low, high), "the ranges cover the whole queue"
        yield from (Range(queue, one, other) for one, other in itertools.pairwise(bounds) if one < other)
