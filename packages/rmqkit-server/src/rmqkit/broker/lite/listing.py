"""Lists of the lite topics of a parent and of the clients of a lite group, for tools. Only rmqkit has them.

A parent may have a million lite topics. A list has one page of them, in the order of their names. The search looks at
all names in slices, and holds only the names of the page. Source: lite.md §11, §15.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

from rmqkit.broker.lite.service import LiteService
from rmqkit.broker.lite.subscriptions import LiteGroup
from rmqkit.protocol.schemas.lite import LiteClientRow, LiteTopicRow
from rmqkit.remoting.tasks import Slice
from rmqkit.store.lite.lite_queues import LiteQueues

__all__ = ["client_rows", "names_of", "topic_row"]

_CHUNK = 1000


async def names_of(
    lites: LiteQueues, parent_name: str, *, prefix: str, after: str, count_max: int, with_expired: bool
) -> list[str]:
    """Return the first ``count_max`` names of lite topics with a prefix after a name, sorted."""
    parent, now = lites.table.parents.get(parent_name), Slice()
    if parent is None or count_max <= 0:
        return []
    found: list[str] = []
    names, slots, is_live = iter(list(parent.slots)), parent.slots, lites.table.is_live
    limit: str | None = None  # no name from here on is on the page
    while chunk := list(itertools.islice(names, _CHUNK)):
        for name in chunk:
            if name.startswith(prefix) and name > after and (limit is None or name < limit):
                slot = slots.get(name)
                if slot is not None and (with_expired or is_live(slot)):
                    found.append(name)
        if len(found) > 2 * count_max:
            found = heapq.nsmallest(count_max, found)
            limit = found[-1]
        await now.pause_if_over()
    return sorted(found)[:count_max]


def topic_row(
    lite: LiteService, lites: LiteQueues, parent: str, name: str, bound: Sequence[str], group: LiteGroup | None
) -> LiteTopicRow:
    """Return the row of a lite topic, with the offsets of a group. A name that was forgotten meanwhile has no
    messages. ``bound``: the groups that are bound to the parent."""
    queue, table = lite.queue(parent, name), lites.table
    row = LiteTopicRow(lite_topic=name, is_live=False)
    if queue is None:
        return row
    slot = queue.slot
    row.min_offset, row.max_offset, row.epoch = queue.min_offset, queue.max_offset, queue.epoch
    row.is_live, row.last_update_timestamp = table.is_live(slot), table.seconds[slot] * 1000
    row.expires_at = lite.expires_at(parent, slot)
    row.subscriber_count = sum(1 for _ in lite.subscribers(bound, name))
    if group is not None:
        row.consumer_offset = lite.offset_of(group, slot)
        batch = group.batches.get(slot)
        if batch is not None and batch.first is not None:
            row.unacked_count, row.free_at = batch.unacked_count, batch.free_at
    return row


def client_rows(group: LiteGroup, count_max: int) -> Iterator[LiteClientRow]:
    """Yield the first clients of a group, in the order of their ids."""
    for client_id in heapq.nsmallest(count_max, group.clients):
        client = group.clients[client_id]
        yield LiteClientRow(
            client_id=client_id,
            lite_topic_count=len(client.names),
            last_access_time=client.accessed_ms,
            last_consume_time=client.consumed_ms,
            dirty_count=len(group.dirty if group.is_wildcard else client.dirty),
            waiting_count=len(client.waiting),
            taken_count=len(client.tombstones),
        )
