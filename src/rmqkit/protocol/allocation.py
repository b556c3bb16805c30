"""Which of a topic's queues a member gets, by the two strategies that clients and brokers both know.

===========================  ============  ====================
8 queues, 3 clients          averagely     averagely_by_circle
===========================  ============  ====================
first, second, third client  012, 345, 67  036, 147, 25
===========================  ============  ====================

Source: behaviour.md §8.5, §4.15.
"""

from __future__ import annotations

from collections.abc import Sequence

from rmqkit.protocol.bodies.clients import MessageQueue

__all__ = ["averagely", "averagely_by_circle"]


def averagely(queues: Sequence[MessageQueue], client_ids: Sequence[str], own_id: str) -> list[MessageQueue]:
    """Contiguous blocks; the first ``len(queues) % len(client_ids)`` clients get one more (AVG, the default)."""
    if own_id not in client_ids:
        return []
    index = client_ids.index(own_id)
    each, more = divmod(len(queues), len(client_ids))
    start = index * each + min(index, more)
    return list(queues[start : start + each + (index < more)])


def averagely_by_circle(queues: Sequence[MessageQueue], client_ids: Sequence[str], own_id: str) -> list[MessageQueue]:
    """Queue ``i`` goes to client ``i % len(client_ids)`` (AVG_BY_CIRCLE)."""
    if own_id not in client_ids:
        return []
    return list(queues[client_ids.index(own_id) :: len(client_ids)])
