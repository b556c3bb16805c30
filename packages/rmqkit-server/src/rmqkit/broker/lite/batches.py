"""The messages of a lite topic that a group has received and not acknowledged.

A lite topic is ordered: a group has one batch of it at a time. The rules decide when the group gets more:

================================  ====================================================================================
event                             effect
================================  ====================================================================================
all messages are acknowledged     the batch is gone, and the next messages can be delivered
the time of the first message     the batch is free: all messages from this one on are delivered again, with a count
that is not acknowledged is over  of earlier deliveries. Acks of the former delivery have no effect from then on
a new invisible time (nack)       the time of this message only
suspend                           the whole queue pauses, and the next delivery is not counted
the same attempt again            the same messages again, and newer ones, while the batch is out. Not counted
================================  ====================================================================================

Apache's broker waits for the latest time of the batch instead, so that one slow message blocks the others.
Batches are in memory only: a restarted broker delivers unacknowledged messages again. Source: lite.md §7, §8.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["LiteBatch"]


class LiteBatch:
    """One batch. Times are in ms.

    Attributes:
        numbers: the numbers of its messages, ascending.
        pop_time: the time of the pop; it identifies the batch in handles.
    """

    __slots__ = ("_acked", "_attempt_id", "_invisible_ms", "_is_uncounted", "_paused_until", "_visible_at", "numbers",
                 "pop_time", "tries")  # fmt: skip

    def __init__(
        self, numbers: Sequence[int], *, pop_time: int, invisible_ms: int, attempt_id: str | None, tries: dict[int, int]
    ) -> None:
        assert numbers, "a batch has messages"
        self.numbers = numbers
        self.pop_time = pop_time
        self.tries = tries
        self._invisible_ms = invisible_ms
        self._attempt_id = attempt_id
        self._acked: set[int] = set()
        self._visible_at: dict[int, int] = {}
        self._paused_until = 0
        self._is_uncounted = False

    @property
    def first(self) -> int | None:
        """The number of the first message that is not acknowledged, or None."""
        return next((number for number in self.numbers if number not in self._acked), None)

    @property
    def unacked_count(self) -> int:
        """Number of messages that are not acknowledged."""
        return len(self.numbers) - len(self._acked)

    @property
    def free_at(self) -> int:
        """The time at which the group can get these messages again."""
        first = self.first
        assert first is not None, "a batch without unacknowledged messages is removed"
        return max(self._paused_until, self._visible_at.get(first, self.pop_time + self._invisible_ms))

    def is_repeated_by(self, attempt_id: str | None) -> bool:
        """Return True if a pop is another try of the pop of this batch."""
        return attempt_id is not None and attempt_id == self._attempt_id

    def ack(self, number: int) -> int | None:
        """Acknowledge a message. Return the number of the first message that is not acknowledged; None if there is
        none. Raises ValueError: the batch does not have the message."""
        if number not in self.numbers:
            raise ValueError(f"message {number} is not in the batch of {self.pop_time}")
        self._acked.add(number)
        return self.first

    def change(self, number: int, visible_at_ms: int, *, suspends: bool) -> None:
        """Set the time at which a message is delivered again. ``suspends``: the whole batch pauses until then, and its
        next delivery is not counted. Raises ValueError: the batch does not have the message."""
        if number not in self.numbers:
            raise ValueError(f"message {number} is not in the batch of {self.pop_time}")
        self._visible_at[number] = visible_at_ms
        if suspends:
            first = self.first
            self._paused_until, self._is_uncounted = visible_at_ms, True
            if first is not None:
                self._visible_at[first] = visible_at_ms

    def next_tries(self, numbers: Sequence[int], attempt_id: str | None) -> dict[int, int]:
        """Return the number of earlier deliveries of messages that are delivered after this batch, without zeros."""
        is_counted = not self._is_uncounted and not self.is_repeated_by(attempt_id)
        own = set(self.numbers) if is_counted else frozenset[int]()
        counts = {number: self.tries.get(number, 0) + (number in own) for number in numbers}
        return {number: count for number, count in counts.items() if count}
