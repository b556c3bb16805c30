"""Groups that were created because they appeared, and that nobody used, go away again, with their retry topics.

With ``autoCreateSubscriptionGroup`` every name that a client says becomes a group with a retry topic; Apache's broker
keeps them for ever, whoever made them up. Here one goes when all of this holds:

- this broker made it since it started, `BrokerSettings.unused_group_keep_ms` ago or earlier;
- no client of it is connected;
- it has no offset: who pulled and committed nothing, or popped nothing, has nothing to lose;
- nothing was ever stored in its retry topic, and it has no dead letters;
- no operator changed it.

Once one of these has not held for a reason that lasts (an offset, a message), the group is not looked at any more. A
group that comes back after it went is created again as before: its members send heartbeats first. What a former run of
this broker created stays. Loop only. Ours.
"""

from __future__ import annotations

import logging
from typing import Protocol

from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.tables.clients import ClientTable
from rmqkit.broker.tables.groups import GroupTable
from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.clock import Clock
from rmqkit.protocol.names import dlq_topic, retry_topic
from rmqkit.remoting.tasks import Slice
from rmqkit.store.message_store import MessageStore

__all__ = ["ROUND_SECONDS", "drop_unused_groups"]

ROUND_SECONDS = 60.0

_log = logging.getLogger(__name__)


class UnusedGroupsContext(Protocol):
    """What the round that drops unused groups may touch."""

    clients: ClientTable
    clock: Clock
    groups: GroupTable
    offsets: OffsetTable
    settings: BrokerSettings
    store: MessageStore
    topics: TopicTable


async def drop_unused_groups(context: UnusedGroupsContext) -> int:
    """Drop the groups that nobody used; returns how many."""
    before_ms = context.clock.monotonic_ms() - context.settings.unused_group_keep_ms
    candidates = context.groups.appeared_before(before_ms)
    if not candidates or not context.settings.auto_create_group:
        return 0  # without that setting they could not come back
    with_offsets, now, dropped = context.offsets.all_groups, Slice(), set[str]()
    for group in candidates:
        if group in with_offsets or group not in context.groups or _has_messages(context, group):
            context.groups.keep(group)
        elif context.clients.consumers(group) is None and _drop(context, group):
            dropped.add(group)
        await now.pause_if_over()
    if dropped:
        context.offsets.forget_pulls(dropped)
        _log.info("%d groups went away: they were created as they appeared, and nobody used them", len(dropped))
    return len(dropped)


def _has_messages(context: UnusedGroupsContext, group: str) -> bool:
    config = context.topics.get(retry_topic(group))
    queues = range(config.read_queue_nums if config is not None else 0)
    return (
        any(context.store.max_offset(retry_topic(group), queue_id) for queue_id in queues)
        or context.topics.get(dlq_topic(group)) is not None
    )


def _drop(context: UnusedGroupsContext, group: str) -> bool:
    one = context.groups.remove_unused(group)
    if one is not None and one.retry is not None:
        context.topics.remove_unused(retry_topic(group), one.retry)
    return one is not None
