"""The recorder of events. An event is a message that is stored, delivered, sent back or decided.

The recorder passes events to two readers. They have separate tables, because their keys and their values differ:

================  =========================================  ==========================================================
reader            shows                                      exists
================  =========================================  ==========================================================
`Statistics`      Apache's rates per minute, hour and day    always
`Counts`          Prometheus counters and histograms         only with an exporter
================  =========================================  ==========================================================

Messages that are stored together are recorded with one call. Events that only one reader counts (pulls, check points,
flushes) are reported to that reader directly. The exporter reads the delivered messages from `Statistics`.
Use this module only on the event loop. Source: behaviour.md §9.10.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from rmqkit.broker.durability import CODES, Outcome, Release
from rmqkit.broker.statistics import Statistics
from rmqkit.protocol.core import Sends
from rmqkit.protocol.record import Record
from rmqkit.store.message_store import InnerMessage, PutResult

if TYPE_CHECKING:
    from rmqkit.broker.counts import Counts

__all__ = ["Recorder"]


class Recorder:
    """The recorder of events for the statistics and for the exporter's counters.

    Args:
        counts: None without an exporter.
    """

    def __init__(self, statistics: Statistics, counts: Counts | None) -> None:
        self._statistics = statistics
        self._counts = counts

    # ---- sends

    def sends(self, sends: Sends, ms: float) -> None:
        """Record plain sends that were stored with one write and answered. ``ms``: the time since they were read."""
        self._enter(sends, ms, ms)

    def waiting_sends(self, sends: Sends, ms: float, since_ms: float, release: Release) -> Release:
        """Record plain sends with answers that wait. Return a release that also records the answers.
        ``since_ms``: the monotonic time at which the sends were read."""
        self._enter(sends, ms, None)
        if self._counts is None:
            return release
        codes: Counter[int] = Counter()
        for _, code, _, sizes in sends.kinds:
            codes[code] += len(sizes)
        return partial(self._released, self._counts, codes, since_ms, release)

    def _enter(self, sends: Sends, ms: float, answered_ms: float | None) -> None:
        statistics, counts = self._statistics, self._counts
        if sends.is_batch:
            for topic, queue_id, count, record_bytes in sends.queues:
                statistics.batch_sent(topic, queue_id, record_bytes, ms, count)
            if counts is not None:
                counts.batch(sends, answered_ms)
            return
        for topic, _, count, record_bytes in sends.queues:
            statistics.sent(topic, record_bytes, ms, count)
        if counts is not None:
            counts.sends(sends.kinds, answered_ms)

    @staticmethod
    def _released(
        counts: Counts, codes: Counter[int], since_ms: float, release: Release, outcome: Outcome, reason: str
    ) -> None:
        release(outcome, reason)
        counts.answered_late(codes, CODES[outcome], since_ms)

    def stored(self, message: InnerMessage, put: PutResult, ms: float) -> None:
        """Record one message that the store accepted or refused. ``ms``: the time since its request was read."""
        self._statistics.sent_one(message, put, ms)
        if self._counts is not None:
            self._counts.put(message, put)

    def stored_batch(self, message: InnerMessage, put: PutResult, ms: float) -> None:
        """Record the messages of a batch like `stored`."""
        self._statistics.sent_one(message, put, ms, len(put.physical_offsets))
        if self._counts is not None:
            self._counts.put_batch(message, put)

    def stored_long_batch(self, message: InnerMessage, put: PutResult, ms: float, records: int, messages: int) -> None:
        """Record a long batch like `stored`. In an inner batch queue a batch is one record with many messages."""
        self._statistics.sent_one(message, put, ms, records)
        if self._counts is not None:
            self._counts.put(message, put, messages)

    # ---- messages that the broker stores again

    def moved(self, message: InnerMessage, put: PutResult) -> None:
        """Record a message that the broker stored in its real topic."""
        self._statistics.moved(message, put)

    def delivered(self, message: InnerMessage, put: PutResult) -> None:
        """Record a due message of a delay level like `moved`."""
        self._statistics.delivered(message, put)
        if self._counts is not None:
            self._counts.delivered(message, put)

    def sent_back(self, message: InnerMessage, put: PutResult, *, topic: str, group: str, owner: str) -> None:
        """Record a message that a group sent back."""
        self._statistics.sent_back(message, put, topic=topic, group=group, owner=owner)
        if self._counts is not None:
            self._counts.given_up(message)

    def decided(self, half: Record, *, is_commit: bool) -> None:
        """Record the decision of a transaction."""
        if self._counts is not None:
            self._counts.decided(half, is_commit=is_commit)
