"""The place where a group begins to read a lite topic (``OffsetOption``), of a subscription.

===========  ==============================================================================================
type         start
===========  ==============================================================================================
POLICY 0     the group's offset, or the first message of the log
POLICY 1     the first message of the log
POLICY 2     the next message
OFFSET n     n, but at least the first message of the log and at most the next message
TAIL_N n     the last n messages
TIMESTAMP t  the first message that was stored at or after t
===========  ==============================================================================================

Apache's broker counts TAIL_N from the group's offset and ignores TIMESTAMP. Source: lite.md §6.
"""

from __future__ import annotations

from rmqkit.protocol.schemas.lite import MAX, MIN, OFFSET, POLICY, TAIL, TIMESTAMP, OffsetOption
from rmqkit.store.lite.lite_queues import LiteQueue

__all__ = ["start_of"]


def start_of(option: OffsetOption, queue: LiteQueue) -> int | None:
    """Return the number of the first message to deliver; None for the group's offset."""
    low, high = queue.min_offset, queue.max_offset
    if option.type == OFFSET:
        return min(high, max(low, option.value))
    if option.type == TAIL:
        return max(low, high - max(0, option.value))
    if option.type == TIMESTAMP:
        return queue.offset_by_time(option.value, upper=False)
    if option.type == POLICY:
        return {MIN: low, MAX: high}.get(option.value)
    return {"MIN": low, "MAX": high}.get(option.type)
