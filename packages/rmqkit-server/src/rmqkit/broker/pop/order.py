"""Messages that groups have popped in order (``ConsumerOrderInfoManager``), stored in ``consumerOrderInfo.json``.

The queue is blocked for its group while a message of the last pop is hidden: neither acknowledged nor visible again.
Only a pop of the same attempt (``attemptId``) gets the same messages again. The next pop begins at the first
unacknowledged message, and its answer has the number of earlier deliveries of each message. The file is written every
few seconds and at stop. After a crash, messages that were popped after the last write are redelivered in order.
Use this module only on the event loop. Source: behaviour.md §4.14; store.md §9.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from msgspec import Struct, field

from rmqkit.broker.tables.files import LazyTable
from rmqkit.clock import Clock

__all__ = ["OrderTable"]

_KEPT_MS = 86_400_000
_QUEUE_LEVEL = "QUEUE"


class OrderInfo(Struct, kw_only=True, omit_defaults=True):
    """The last pop of one queue. Times are in ms.

    Attributes:
        offsets: the offset of the first message, then the difference between each other offset and the first.
        acked_bits: bit i is set when message i is acknowledged.
        visible_at: for messages with a changed invisible time, the time when they are visible again, by offset.
        tries: the number of earlier deliveries by offset. Messages without earlier deliveries are omitted.
        is_suspended: the next delivery of these messages does not count. Apache's broker ignores the field.
    """

    attempt_id: str | None = field(default=None, name="a")
    acked_bits: int = field(default=0, name="cm")
    invisible_time: int | None = field(default=None, name="i")
    popped_at: int = field(default=0, name="l")
    offsets: list[int] = field(default_factory=list, name="o")
    tries: dict[int, int] | None = field(default=None, name="oc")
    visible_at: dict[int, int] | None = field(default=None, name="ot")
    pop_time: int = field(default=0, name="popTime")
    is_suspended: bool = field(default=False, name="sp")

    @property
    def queue_offsets(self) -> list[int]:
        return [self.offsets[0] + diff for diff in (0, *self.offsets[1:])] if self.offsets else []

    @property
    def offsets_left(self) -> list[int]:
        return [offset for i, offset in enumerate(self.queue_offsets) if not self.acked_bits >> i & 1]

    def visible_from(self, now_ms: int) -> int | None:
        """Return the time when the last hidden message is visible again; None if no message blocks the queue now."""
        hidden_until = self.pop_time + (self.invisible_time or 0)
        times = [(self.visible_at or {}).get(offset, hidden_until) for offset in self.offsets_left]
        # Use the latest time: while a message is hidden, later messages must not be delivered.
        return max((time for time in times if time > now_ms), default=None)


class OrderFile(Struct, rename="camel"):
    """``consumerOrderInfo.json``: ``topic@group`` → queue id → the last pop."""

    ordered_consumption_level: str = _QUEUE_LEVEL
    table: dict[str, dict[int, OrderInfo]] = field(default_factory=dict)


class OrderTable(LazyTable):
    """The last ordered pop of each group and queue. The pop may block the queue."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        super().__init__(folder / "consumerOrderInfo.json")
        self._clock = clock
        self._table: dict[str, dict[int, OrderInfo]] = {}

    def load(self) -> None:
        stored = self._file.load(OrderFile)
        self._table = stored.table if stored is not None else {}
        now_ms = self._clock.now_ms()
        for info in (info for queues in self._table.values() for info in queues.values()):
            if info.pop_time > now_ms:  # the clock was set back since the pop: start its invisible time now
                hidden_until = now_ms + (info.invisible_time or 0)
                info.visible_at = dict.fromkeys(info.queue_offsets, hidden_until)

    def snapshot(self) -> OrderFile:
        """Return a copy of the pops of the last day."""
        # Reset before the copy, so that changes during the write are written the next time.
        self._is_dirty = False
        oldest_ms = self._clock.now_ms() - _KEPT_MS
        for key, queues in list(self._table.items()):
            self._table[key] = {queue_id: info for queue_id, info in queues.items() if info.popped_at >= oldest_ms}
            if not self._table[key]:
                del self._table[key]
        return OrderFile(_QUEUE_LEVEL, {key: dict(queues) for key, queues in self._table.items()})

    def blocked_until(self, topic: str, group: str, queue_id: int, attempt_id: str | None = None) -> int | None:
        """Return the time when a blocked queue may be free, ms since the epoch; None if it is free for this attempt."""
        info = self._get(topic, group, queue_id)
        if info is None or (attempt_id is not None and attempt_id == info.attempt_id):
            return None
        return info.visible_from(self._clock.now_ms())

    def popped(
        self,
        topic: str,
        group: str,
        queue_id: int,
        offsets: list[int],
        *,
        attempt_id: str | None,
        pop_time: int,
        invisible_ms: int,
    ) -> dict[int, int]:
        """Record a pop. Return the number of earlier deliveries of its messages by offset, without zeros."""
        assert all(one < following for one, following in pairwise(offsets)), "the offsets are in ascending order"
        before = self._get(topic, group, queue_id)
        tries: dict[int, int] = {}
        if before is not None and attempt_id is not None and attempt_id == before.attempt_id:
            tries = dict(before.tries or {})
        elif before is not None:
            known, one = before.tries or {}, 0 if before.is_suspended else 1
            counts = {offset: known.get(offset, 0) + one for offset in offsets if offset in before.queue_offsets}
            tries = {offset: count for offset, count in counts.items() if count}
        # The new pop replaces the previous pop: acks of the previous pop are ignored from now on.
        info = OrderInfo(
            attempt_id=attempt_id,
            invisible_time=invisible_ms,
            popped_at=self._clock.now_ms(),
            offsets=[offsets[0], *(offset - offsets[0] for offset in offsets[1:])],
            tries=tries or None,
            pop_time=pop_time,
        )
        self._table.setdefault(f"{topic}@{group}", {})[queue_id] = info
        self._is_dirty = True
        return tries

    def ack(self, topic: str, group: str, queue_id: int, offset: int, pop_time: int, *, committed: int) -> int | None:
        """Record an ack. Return the offset to commit: the first offset that is not acknowledged.

        Return None if the handle belongs to another pop. If a crash lost the pop, only an ack of the group's
        ``committed`` offset moves the offset: messages before a later one may be unacknowledged.
        Raises ValueError: the pop did not have this message.
        """
        info = self._get(topic, group, queue_id)
        if info is None:
            return offset + 1 if offset == committed else None
        if info.pop_time != pop_time:
            return None
        offsets = info.queue_offsets
        info.acked_bits |= 1 << offsets.index(offset)
        assert offset not in info.offsets_left, "an acknowledged offset is not left"
        self._is_dirty = True
        return next(iter(info.offsets_left), offsets[-1] + 1)

    def change(self, topic: str, group: str, queue_id: int, offset: int, pop_time: int, visible_at_ms: int) -> None:
        """Set the time when a message is visible again. A handle of another pop changes nothing."""
        info = self._get(topic, group, queue_id)
        if info is not None and info.pop_time == pop_time and offset in info.queue_offsets:
            # Make a new dict, because a thread may be writing the old one.
            info.visible_at = {**(info.visible_at or {}), offset: visible_at_ms}
            self._is_dirty = True

    def suspend(self, topic: str, group: str, queue_id: int, pop_time: int) -> None:
        """Do not count the next delivery of a pop's messages. A handle of another pop changes nothing."""
        # The other messages of the pop are delivered again because of the suspended message, not because they failed.
        info = self._get(topic, group, queue_id)
        if info is not None and info.pop_time == pop_time:
            info.is_suspended = self._is_dirty = True

    def remove_queue(self, topic: str, group: str, queue_id: int) -> None:
        """Remove the pop of a queue. The caller calls this when the group's offset was set."""
        self._table.get(f"{topic}@{group}", {}).pop(queue_id, None)
        self._is_dirty = True

    def _get(self, topic: str, group: str, queue_id: int) -> OrderInfo | None:
        return self._table.get(f"{topic}@{group}", {}).get(queue_id)
