"""`backlog` says from the progress of a stream how far it is behind, queue by queue."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def backlog(progress: Mapping[str, Any]) -> dict[str, int]:
    """Count the messages that the queues of ``rocketmq`` sources had when a batch was planned, and that the stream has
    not read: by ``topic/broker/queue``.

    Args:
        progress: ``query.lastProgress``, or one that a ``StreamingQueryListener`` got. It has no backlog of a stream
            that ran without a new batch since it began.
    """
    behind: dict[str, int] = {}
    for source in progress["sources"]:
        ends, latest = dict(_offsets(source.get("endOffset"))), dict(_offsets(source.get("latestOffset")))
        for queue, reach in latest.items():
            name = "/".join(queue)
            behind[name] = behind.get(name, 0) + max(0, reach - ends.get(queue, 0))
    return behind


def _offsets(told: Any) -> Iterator[tuple[tuple[str, str, str], int]]:
    """The offsets by queue that a source tells; none of a source with others."""
    topics = json.loads(told) if isinstance(told, str) and told.startswith("{") else told
    for topic, brokers in topics.items() if isinstance(topics, dict) else ():
        for broker_name, queues in brokers.items() if isinstance(brokers, dict) else ():
            for queue_id, offset in queues.items() if isinstance(queues, dict) else ():
                if isinstance(offset, int):
                    yield (topic, broker_name, queue_id), offset
