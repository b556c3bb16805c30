"""What POP tells Prometheus: what was put into the revive topic, what became of it, and what is late.

==========================  ==========================================================================================
``…_in_message_total``      check points, and messages that were acknowledged
``…_out_message_total``     those that are done with; the difference of check points is what is pending. (Apache's
                            counts what its revive service read, which is more where it read twice)
``…_lag``, ``…_latency``    check points whose time is over and that are not revived yet, and how late the oldest is
==========================  ==========================================================================================

Loop only. Source: behaviour.md §9.10.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from rmqkit.metrics.values import histogram
from rmqkit.store.message_store import PutStatus

__all__ = ["ACK", "CHECK_POINT", "PopCounts"]

CHECK_POINT, ACK = "CK", "ACK"
_OK = PutStatus.OK  # asking an enumeration for a member costs a call, and so does a Counter's ``+=``


class PopCounts:
    """The counters of POP, each by label values in the order of the metrics' table.

    Attributes:
        put: by topic, group, `CHECK_POINT` or `ACK`, and how the put ended.
        done: by topic, group, kind and revive queue.
        revived: by topic, group, and how the put ended.
        scan_ms: how long a round took to write the acks that were put off.
    """

    def __init__(self) -> None:
        self.put: defaultdict[tuple[str, ...], int] = defaultdict(int)
        self.done: defaultdict[tuple[str, ...], int] = defaultdict(int)
        self.revived: defaultdict[tuple[str, ...], int] = defaultdict(int)
        self.scan_ms = histogram("rocketmq_pop_buffer_scan_time_consume")

    def has_put(self, topic: str, group: str, kind: str, status: PutStatus, count: int = 1) -> None:
        """Count check points, or messages that were acknowledged, by how their put ended."""
        ended = "PUT_OK" if status is _OK else status.value
        self.put[topic, group, kind, ended] += count

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        """Drop what was counted for topics that are gone."""
        for table in (self.put, self.done, self.revived):
            for key in [key for key in table if is_gone(key[0])]:
                del table[key]
