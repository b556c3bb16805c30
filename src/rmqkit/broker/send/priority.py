"""Messages with a priority (property ``_SYS_MSG_PRIORITY_``): which queue they go to, and which groups get them first.

====================================  ================================================================================
message                               what becomes of it
====================================  ================================================================================
with a priority from 0 on             it goes to the queue of that number, or to the topic's last one
the same, but of another kind         the property is dropped and the queue is the sender's: a transaction's, a delayed
                                      or timed one, one with a sharding key
negative, or no 32-bit number         it is kept as it is and means nothing
====================================  ================================================================================

The topic's type plays no part in this; it matters when messages are popped (`rmqkit.broker.pop.read`). Source:
seen from a 5.4.0 broker.
"""

from __future__ import annotations

import re

from rmqkit.broker.messages import with_changes
from rmqkit.broker.delay.levels import TIMER_NAMES
from rmqkit.protocol import properties as names
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.topics import TopicConfig
from rmqkit.store.message_store import PutMessage

__all__ = ["is_by_priority", "settle_priority"]

_INTEGER = re.compile(r"\+?[0-9]{1,10}", re.ASCII)
_INT_MAX = (1 << 31) - 1
_FACTOR_MAX = 100
_OTHER_KINDS = (names.DELAY, names.SHARDING_KEY, *TIMER_NAMES)


def settle_priority(message: PutMessage, topic: TopicConfig) -> bool:
    """Have a message with a priority go to its queue; whether it does."""
    properties = decode_properties(message.properties)
    text = properties.get(names.PRIORITY, "")
    priority = int(text) if _INTEGER.fullmatch(text) else -1
    if not 0 <= priority <= _INT_MAX:
        return False
    is_half = properties.get(names.TRANSACTION_PREPARED, "").lower() == "true"
    if is_half or not properties.keys().isdisjoint(_OTHER_KINDS):
        message.properties = with_changes(message.properties, {names.PRIORITY: None})
        return False
    message.queue_id = max(0, min(priority, topic.write_queue_nums - 1))
    return True


def is_by_priority(topic: TopicConfig | None, group: SubscriptionGroupConfig | None, chance: float) -> bool:
    """Whether a pop takes what has the highest priority first. ``chance``: from 0 to below 100, the dice of this pop;
    of so many in a hundred as the group's ``priority.factor`` says it is so."""
    if topic is None or (topic.attributes or {}).get("message.type") != "PRIORITY":
        return False
    text = "" if group is None else (group.attributes or {}).get("priority.factor", "")
    return chance < (int(text) if text.isascii() and text.isdigit() else _FACTOR_MAX)
