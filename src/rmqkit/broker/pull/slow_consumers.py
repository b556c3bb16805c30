"""Consumer groups that read so far behind that they hurt the others are stopped (``protectBroker``).

With ``disableConsumeIfConsumerReadSlowly`` it is looked at every three minutes how many bytes of the log lie behind the
next message that each group online pulls from a queue. A group for which these are more than
``consumerFallbehindThreshold`` gets ``consumeEnable=false``, on disk: its pulls and pops are refused with NO_PERMISSION
until an operator enables it again. Loop only. Source: behaviour.md §2.3.
"""

from __future__ import annotations

import logging

from msgspec.structs import replace

from rmqkit.broker.pull.handler import PullContext

__all__ = ["ROUND_SECONDS", "stop_slow_groups"]

ROUND_SECONDS = 180.0

_log = logging.getLogger(__name__)


async def stop_slow_groups(context: PullContext) -> None:
    """Disable the groups that are too far behind; to be called every `ROUND_SECONDS`.
    Raises StoreUnavailable: the disk does not take it."""
    store, settings = context.store, context.settings
    positions: dict[str, int] = {}
    for (group, topic, queue_id), offset in list(context.offsets.pulls.items()) if settings.stops_slow_groups else ():
        if group in context.clients.all_consumers:
            for _, position, _, _ in store.entries(topic, queue_id, offset, count_max=1):
                positions[group] = min(position, positions.get(group, position))
    slow = []
    for group, position in positions.items():
        config, behind_bytes = context.groups.get(group), store.max_physical_offset - position
        if config is not None and config.consume_enable and behind_bytes > settings.slow_group_bytes:
            _log.warning("group %s reads %d bytes behind the end of the log: disabled", group, behind_bytes)
            slow.append(replace(config, consume_enable=False))
    if slow:
        await context.groups.put_shared(*slow)
