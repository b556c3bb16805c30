"""Strategies that distribute a topic's queues. Every client of a group computes the same result from the same lists.

A strategy is a function of the sorted queues, the sorted client ids and this client's own id. All clients of a group
must use the same strategy. A function such as `configured` returns a strategy for its parameters.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence

from rmqkit.protocol.schemas.clients import MessageQueue, averagely, averagely_by_circle

__all__ = [
    "Allocate",
    "averagely",
    "averagely_by_circle",
    "configured",
    "consistent_hash",
    "machine_room",
    "machine_room_nearby",
]

Allocate = Callable[[Sequence[MessageQueue], Sequence[str], str], list[MessageQueue]]


def configured(own_queues: Collection[MessageQueue]) -> Allocate:
    """Return a strategy that assigns fixed queues to a client (CONFIG). You must make sure that every queue has exactly
    one client.
    """

    def allocate(queues: Sequence[MessageQueue], client_ids: Sequence[str], own_id: str) -> list[MessageQueue]:
        return [queue for queue in queues if queue in own_queues]

    return allocate


def machine_room(rooms: Collection[str]) -> Allocate:
    """Return a strategy that distributes only the queues of brokers with a name ``room@broker`` in one of these rooms.
    Every client gets a block of the same size. The remaining queues go to the first clients, one each (MACHINE_ROOM).
    """

    def allocate(queues: Sequence[MessageQueue], client_ids: Sequence[str], own_id: str) -> list[MessageQueue]:
        if own_id not in client_ids:
            return []
        parted = [(queue, queue.broker_name.split("@")) for queue in queues]
        eligible = [queue for queue, parts in parted if len(parts) == 2 and parts[0] in rooms]
        index, each = client_ids.index(own_id), len(eligible) // len(client_ids)
        # The reference assigns the remaining queues to the first clients, one each.
        rest = eligible[each * len(client_ids) :]
        return eligible[index * each : (index + 1) * each] + rest[index : index + 1]

    return allocate


def machine_room_nearby(
    inner: Allocate, *, room_of_broker: Callable[[str], str], room_of_client: Callable[[str], str]
) -> Allocate:
    """Return a strategy that distributes the queues of a room to the clients in this room. The queues of rooms without
    clients go to all clients (MACHINE_ROOM_NEARBY)."""

    def allocate(queues: Sequence[MessageQueue], client_ids: Sequence[str], own_id: str) -> list[MessageQueue]:
        if own_id not in client_ids:
            return []
        own_room = room_of_client(own_id)
        neighbours = [client_id for client_id in client_ids if room_of_client(client_id) == own_room]
        inhabited = {room_of_client(client_id) for client_id in client_ids}
        by_room: dict[str, list[MessageQueue]] = {}
        for queue in queues:
            by_room.setdefault(room_of_broker(queue.broker_name), []).append(queue)
        allocated = inner(by_room.get(own_room, []), neighbours, own_id)
        for room in sorted(by_room.keys() - inhabited):
            allocated += inner(by_room[room], client_ids, own_id)
        return allocated

    return allocate


def consistent_hash(virtual_nodes: int = 10) -> Allocate:
    """Return a strategy that assigns a queue to the next client on a hash ring (CONSISTENT_HASH). Few queues move when
    clients join or leave. Every client has ``virtual_nodes`` points on the ring."""

    def allocate(queues: Sequence[MessageQueue], client_ids: Sequence[str], own_id: str) -> list[MessageQueue]:
        points = {_ring_hash(f"{one}-{i}"): one for one in client_ids for i in range(virtual_nodes)}
        ring = sorted(points)

        def owner(queue: MessageQueue) -> str:
            # Java hashes the text of its toString(). Clients in other languages must compute the same owner.
            key = f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_name}, queueId={queue.queue_id}]"
            return points[ring[bisect_left(ring, _ring_hash(key)) % len(ring)]]

        return [queue for queue in queues if owner(queue) == own_id] if own_id in client_ids else []

    return allocate


def _ring_hash(key: str) -> int:
    return int.from_bytes(hashlib.md5(key.encode(), usedforsecurity=False).digest()[:4], "big")
