"""Which of a topic's queues a client gets: every client of a group computes the same answer from the same lists.

===========================  ============  ====================
8 queues, 3 clients          averagely     averagely_by_circle
===========================  ============  ====================
first, second, third client  012, 345, 67  036, 147, 25
===========================  ============  ====================

A strategy is a function of sorted queues, sorted client ids and one's own id; all clients of a group must use the
same one. Source: behaviour.md §8.4, §8.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rmqkit.protocol.bodies.clients import MessageQueue

__all__ = ["Allocate", "averagely", "averagely_by_circle"]

Allocate = Callable[[Sequence[MessageQueue], Sequence[str], str], list[MessageQueue]]


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
