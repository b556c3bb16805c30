"""SQL92 filters of consumer groups (``ConsumerFilterManager``), stored in ``config/consumerFilter.json``.

Heartbeats register one expression per topic and group. The expression is compiled at registration. The filter of a
group without members is *dead*. It stays for a day (``filterDataCleanTimeSpan``), so that bitmaps are complete if the
group returns. The dispatcher calls `FilterTable.bitmap_of`, which sets the bits of every group with an expression that
is true for a message. Dead filters are included. Readers use `PullFilter`, which tests the tag code, the bitmap of a
queue entry, and the expression on the stored record. Use this module only on the event loop. Source: behaviour.md §6.6;
store.md §9.6, §17.3.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.tables.files import LazyTable
from rmqkit.clock import Clock
from rmqkit.filter import SQL92, codes_of, is_tag_type, subscription
from rmqkit.filter.sql92 import BloomFilter, Expression, ExpressionRejected, compile_expression
from rmqkit.protocol.properties import find_property
from rmqkit.protocol.record import record_properties
from rmqkit.protocol.schemas.clients import SubscriptionData
from rmqkit.protocol.schemas.groups import BloomData, FilterData, FilterFile, TopicFilters
from rmqkit.store.message_store import DispatchRequest
from rmqkit.store.queues.queue_ext import ExtUnit
from rmqkit.store.reader import EntryTest

__all__ = ["EVERYTHING", "FilterTable", "GroupFilter", "PullFilter", "inline_filter"]

_log = logging.getLogger(__name__)

_ALIVE_AT_LOAD_MS = 30_000
_INLINE_MAX = 256


@dataclass(frozen=True, slots=True)
class PullFilter:
    """The filter of a pull. A test that is None accepts every message.

    Attributes:
        codes: the accepted tag codes.
        accept_entry: the test of a queue entry's tag code and extension unit.
        accept: the test of a stored record.
        wants: the test of a new message, for a held pull.
    """

    codes: frozenset[int] | None = None
    accept_entry: EntryTest | None = None
    accept: Callable[[memoryview], bool] | None = None
    wants: Callable[[DispatchRequest], bool] | None = None


EVERYTHING = PullFilter()


@dataclass(slots=True)
class GroupFilter:
    """The registered expression of one group for one topic."""

    data: FilterData
    expression: Expression
    mask: int
    pull_filter: PullFilter


def _by_properties(matches: Callable[[bytes], bool], accept_entry: EntryTest | None = None) -> PullFilter:
    return PullFilter(
        accept_entry=accept_entry,
        accept=lambda record: matches(record_properties(record)),
        wants=lambda arrival: matches(arrival.properties),
    )


@functools.lru_cache(maxsize=_INLINE_MAX)
def inline_filter(expression: str | None, expression_type: str | None) -> PullFilter:
    """Return the filter of a subscription in a pull. Expressions that were compiled lately are cached.
    Raises ValueError: the expression cannot be parsed."""
    if is_tag_type(expression_type):
        return PullFilter(codes_of(subscription("", expression)))
    return _by_properties(_compiled(expression or "", expression_type).matches)


class FilterTable(LazyTable):
    """The registered expressions by topic and group."""

    def __init__(self, folder: Path, settings: BrokerSettings, clock: Clock) -> None:
        super().__init__(folder / "consumerFilter.json")
        self._settings = settings
        self._clock = clock
        self._bloom = BloomFilter.of(settings.bloom_error_percent, settings.bloom_group_count)
        self._topics: dict[str, dict[str, GroupFilter]] = {}
        self._topics_of: dict[str, set[str]] = {}

    # ---- the file

    def load(self) -> None:
        """Read the file. Every filter of the file is dead until its group returns.
        Ignore the whole file if it has a Bloom filter of another size."""
        stored = self._file.load(FilterFile) or FilterFile()
        entries = [data for topic in stored.filter_data_by_topic.values() for data in topic.group_filter_data.values()]
        # Ignore all entries: with another size, the bits of groups in stored bitmaps have another meaning.
        if not all(self._fits(data.bloom_filter_data) for data in entries):
            _log.warning("%s is ignored: its Bloom filter is not one of %s", self._file.path, self._bloom)
            return
        for data in entries:
            if data.dead_time < data.born_time:
                # The filter was alive when the broker stopped. The time of the stop is known only roughly.
                data.dead_time = max(data.born_time, self._clock.now_ms() - _ALIVE_AT_LOAD_MS)
            try:
                self._put(data)
            except ExpressionRejected as error:
                _log.error("filter of group %s for topic %s: %s", data.consumer_group, data.topic, error)

    def _fits(self, stored: BloomData | None) -> bool:
        bloom = self._bloom
        return stored is not None and (stored.bit_num, len(stored.bit_pos)) == (bloom.bit_count, bloom.position_count)

    @property
    def is_dirty(self) -> bool:
        """Return True if the table changed since the last `snapshot`, or has an expired dead filter."""
        return self._is_dirty or any(self._is_expired(one) for topic in self._topics.values() for one in topic.values())

    def snapshot(self) -> FilterFile:
        """Return a copy of the table to write, and remove expired dead filters."""
        self._is_dirty = False  # reset first: changes during the write belong to the next snapshot
        topics: dict[str, TopicFilters] = {}
        for topic, groups in list(self._topics.items()):
            for group in [group for group, one in groups.items() if self._is_expired(one)]:
                self._remove(topic, group)
            if not groups:
                del self._topics[topic]
                continue
            stored = {group: replace(one.data, dead=_is_dead(one.data)) for group, one in groups.items()}
            topics[topic] = TopicFilters(stored, topic)
        return FilterFile(topics)

    def _is_expired(self, one: GroupFilter) -> bool:
        return _is_dead(one.data) and self._clock.now_ms() - one.data.dead_time >= self._settings.filter_keep_ms

    # ---- heartbeats

    def get(self, topic: str, group: str) -> GroupFilter | None:
        groups = self._topics.get(topic)
        return None if groups is None else groups.get(group)

    def register(self, group: str, subscriptions: Iterable[SubscriptionData]) -> None:
        """Register the expressions of a group's heartbeat. An expression that does not compile removes the filter."""
        wanted = {
            data.topic: data for data in subscriptions if data.sub_string and not is_tag_type(data.expression_type)
        }
        for data in wanted.values():
            self._register(group, data)
        self._bury(group, but=wanted.keys())

    def unregister(self, group: str) -> None:
        """Mark the filters of a group as dead. The caller calls this when the last member is gone."""
        self._bury(group, but=())

    def _bury(self, group: str, *, but: Iterable[str]) -> None:
        for topic in self._topics_of.get(group, set()).difference(but):
            one = self.get(topic, group)
            if one is not None and not _is_dead(one.data):
                one.data.dead_time = self._clock.now_ms()
                self._is_dirty = True

    def _register(self, group: str, wanted: SubscriptionData) -> None:
        known = self.get(wanted.topic, group)
        # Use the subscription with the newest version: members of a group may differ during an upgrade.
        if known is not None and wanted.sub_version <= known.data.client_version:
            if wanted.sub_version == known.data.client_version:
                self._revive(known.data)
            return
        self._is_dirty = True
        if known is not None and _is_same(known.data, wanted):
            known.data.client_version = wanted.sub_version
            self._revive(known.data)
            return
        data = FilterData(
            born_time=self._clock.now_ms(),
            client_version=wanted.sub_version,
            consumer_group=group,
            expression=wanted.sub_string,
            expression_type=wanted.expression_type or SQL92,
            topic=wanted.topic,
        )
        try:
            self._put(data)
        except ExpressionRejected as error:
            _log.warning("filter of group %s for topic %s: %s", group, wanted.topic, error)
            self._remove(wanted.topic, group)

    def _remove(self, topic: str, group: str) -> None:
        self._topics.get(topic, {}).pop(group, None)
        topics = self._topics_of.get(group, set())
        topics.discard(topic)
        if not topics:
            self._topics_of.pop(group, None)

    def _revive(self, data: FilterData) -> None:
        if _is_dead(data):
            data.dead_time = 0
            self._is_dirty = True

    def _put(self, data: FilterData) -> None:
        """Compile and add a filter. Raises ExpressionRejected: the expression does not compile."""
        expression, bloom = _compiled(data.expression, data.expression_type), self._bloom
        positions = bloom.positions(data.consumer_group, data.topic)
        data.bloom_filter_data = BloomData(bloom.bit_count, list(positions))
        mask = bloom.mask(positions)

        def accept_entry(tags_code: int | None, unit: ExtUnit | None) -> bool:
            # Check the record itself if the entry has no bitmap, or a bitmap from before this expression.
            return unit is None or unit.store_timestamp <= data.born_time or bloom.has(unit.bitmap, mask)

        assert mask, "a group has bits in the filter"
        one = GroupFilter(data, expression, mask, _by_properties(expression.matches, accept_entry))
        self._topics.setdefault(data.topic, {})[data.consumer_group] = one
        self._topics_of.setdefault(data.consumer_group, set()).add(data.topic)

    # ---- messages

    def bitmap_of(self, arrival: DispatchRequest) -> bytes:
        """Return the bitmap of a message: the bits of all groups that may want the message. The bitmap of a topic
        without filters is empty."""
        groups = self._topics.get(arrival.topic)
        if not groups:
            return b""
        mask = 0
        for one in groups.values():
            # Include dead filters: a group that returns within a day reads the messages stored meanwhile.
            if one.expression.matches(arrival.properties):
                mask |= one.mask
        return self._bloom.bitmap(mask)

    def retry_filter(self, group: str, codes: frozenset[int] | None) -> PullFilter:
        """Return the filter for a retry topic with ``filterSupportRetry``. It tests each message with the expression of
        its original topic."""

        def matches(properties: bytes) -> bool:
            topic = find_property(properties, b"RETRY_TOPIC")
            one = self.get(topic.decode("utf-8", "replace"), group) if topic is not None else None
            return one is None or one.expression.matches(properties)

        plain = _by_properties(matches)
        return PullFilter(codes, None, plain.accept, plain.wants)


def _compiled(text: str, expression_type: str | None) -> Expression:
    if expression_type != SQL92:
        raise ExpressionRejected(f"expression type {expression_type} is not known: use TAG or SQL92")
    return compile_expression(text)


def _is_dead(data: FilterData) -> bool:
    return data.dead_time >= data.born_time


def _is_same(data: FilterData, wanted: SubscriptionData) -> bool:
    return data.expression == wanted.sub_string and data.expression_type == wanted.expression_type
