"""The copies of a master's log at its slaves, and the offset that answers wait for (*confirm offset*).

A slave reports an offset when it has stored the log up to this offset (with SYNC_FLUSH: on the disk). A report
therefore confirms a copy of all data before the offset. The protocol does not identify the slave of a link. These rules
decide which links from one address count:

=================================  ====================================================================================
link                               counts as a copy
=================================  ====================================================================================
the first from its address         unless it is silent for two ``haSendHeartbeatInterval`` and a later link is not
a later one from the same address  if all counted links before it have reported after its first report. Then they belong
                                   to other slaves on one machine. The number of counted links is at most the number of
                                   members with the address
=================================  ====================================================================================

A slave that reconnects before its old link is known to be dead is therefore not counted twice, and a later link cannot
replace an earlier link.

Use this module only on the event loop. `rmqkit.broker.durability` holds the answers that wait, `link` has the
connections.
Source: store.md §21.1 to §21.3; behaviour.md §10.3.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain

from msgspec import UNSET, UnsetType

from rmqkit.broker.replication.link import Link
from rmqkit.broker.replication.members import Members
from rmqkit.broker.settings import BrokerRole, BrokerSettings
from rmqkit.clock import Clock
from rmqkit.protocol.schemas.brokers import HaConnectionInfo, HaRuntimeInfo
from rmqkit.remoting.address import IpAddress
from rmqkit.store.message_store import MessageStore

__all__ = ["SlaveCopies", "waits_for_copies"]

_MARK_MS_MIN = 2.0
_MARKS_MAX = 2048
_SILENT_HEARTBEATS = 2


def waits_for_copies(settings: BrokerSettings) -> bool:
    """Return True if answers of this broker wait for slaves: it is a SYNC_MASTER and needs more than its own copy."""
    is_alone_enough = settings.in_sync_replicas <= 1 and (
        settings.min_in_sync_replicas <= 1 or not (settings.acts_as_master and settings.auto_in_sync_replicas)
    )
    return settings.broker_role is BrokerRole.SYNC_MASTER and (settings.all_in_sync_replicas or not is_alone_enough)


class SlaveCopies:
    """The copies at the slaves of one master. ``links``: the admitted links. The owner of the list changes it."""

    def __init__(
        self, store: MessageStore, settings: BrokerSettings, clock: Clock, members: Members, links: Sequence[Link]
    ) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._members = members
        self._links = links
        self._growth = Growth()

    def mark_growth(self) -> None:
        """Record the current end of the log and the time."""
        self._growth.mark(self._store.dispatched_offset, self._clock.monotonic_ms())

    def forget_growth(self) -> None:
        """Drop the recorded times that no slave needs."""
        if self._links:
            self._growth.drop_before(min(link.acked_offset for link in self._links))
        else:
            self._growth = Growth()

    def replicated_offset(self, copies: int) -> int:
        """Return the physical offset up to which ``copies`` copies exist, including the master's copy; -1: too few
        slaves."""
        if copies <= 1:
            # Do not use the dispatched offset: if one copy is enough, a SYNC_MASTER must not wait for the dispatcher.
            return self._store.max_physical_offset
        # All reports are physical offsets of the same log, so n slaves have the data up to the n-th largest report.
        acked = sorted((link.acked_offset for link in self.counting()), reverse=True)
        return acked[copies - 2] if len(acked) > copies - 2 else -1

    def in_sync_count(self) -> int:
        """Return the number of brokers that lag by less than ``haMaxGapNotInSync``, including this broker."""
        return 1 + sum(self._is_in_sync(link) for link in self.counting())

    def confirmed_offset(self) -> int:
        """Return the physical offset up to which all required copies exist. Answers of a SYNC_MASTER wait for this
        offset."""
        needed = self.needed_copies()
        if self._settings.all_in_sync_replicas:
            needed = max(needed, self.in_sync_count())
        return self.replicated_offset(needed)

    def needed_copies(self) -> int:
        """Return the number of copies that answers wait for. An acting-master group may need fewer copies."""
        settings = self._settings
        if settings.acts_as_master and settings.auto_in_sync_replicas:
            return max(min(settings.in_sync_replicas, self.in_sync_count()), settings.min_in_sync_replicas)
        return settings.in_sync_replicas

    @property
    def lacks_replicas(self) -> bool:
        """True if sends are refused because too few brokers are in sync. This happens only in an acting-master
        group."""
        return self._settings.acts_as_master and self.needed_copies() > self.in_sync_count()

    def status(self) -> HaRuntimeInfo:
        """Return the answer to GET_BROKER_HA_STATUS."""
        end = self._store.max_physical_offset
        counting = self.counting()
        connections = [
            HaConnectionInfo(
                addr=link.peer,
                slave_ack_offset=link.acked_offset,
                diff=end - link.acked_offset,
                in_sync=link in counting and self._is_in_sync(link),
                transferred_byte_in_second=link.bytes_per_second,
                transfer_from_where=link.next_offset,
                lag_ms=self._lag_ms(link),
            )
            for link in self._links
        ]
        return HaRuntimeInfo(
            master=True,
            master_commit_log_max_offset=end,
            in_sync_slave_nums=self.in_sync_count() - 1,
            ha_connection_info=connections,
        )

    def counting(self) -> list[Link]:
        """Return the links that count as copies by the rules at the top of the module."""
        silent_since_ms = self._clock.monotonic_ms() - _SILENT_HEARTBEATS * self._settings.ha_heartbeat_interval_ms
        reporting = [link for link in self._links if link.acked_offset >= 0]
        heard = {link.ip for link in reporting if link.read_ms >= silent_since_ms}
        counting: dict[IpAddress | None, list[Link]] = {}
        for link in reporting:
            if link.read_ms < silent_since_ms and link.ip in heard:
                continue  # probably the old link of a slave that reconnected: do not count the slave twice
            before = counting.setdefault(link.ip, [])
            if all(other.turn > link.first_turn for other in before) and len(before) < self.count_at(link.ip):
                before.append(link)
        return list(chain.from_iterable(counting.values()))

    def count_at(self, address: IpAddress | None) -> int:
        """Return the number of links from an address that can count as copies."""
        if address is None:
            return 0
        return max(self._members.count_at(address), int(self._settings.ha_addresses.name(address)))

    def _is_in_sync(self, link: Link) -> bool:
        behind_bytes = self._store.max_physical_offset - link.acked_offset
        return link.acked_offset >= 0 and not link.is_lost and behind_bytes < self._settings.ha_gap_bytes_max

    def _lag_ms(self, link: Link) -> int | UnsetType:
        """Return the age of the oldest data that a slave has not acknowledged, in ms, or UNSET if it is unknown."""
        if link.acked_offset >= self._store.dispatched_offset:
            return 0
        grew_ms = self._growth.grew_ms(link.acked_offset)
        return UNSET if grew_ms is None else int(self._clock.monotonic_ms() - grew_ms)


class Growth:
    """The times at which the log grew, with a precision of 2 ms. The precision decreases if a slave is far behind."""

    __slots__ = ("_apart_ms", "_end", "_starts", "_times_ms")

    def __init__(self) -> None:
        self._apart_ms = _MARK_MS_MIN
        self._end = -1
        self._starts: list[int] = []
        self._times_ms: list[float] = []

    def __len__(self) -> int:
        """Return the number of stored marks, at most `_MARKS_MAX`."""
        return len(self._starts)

    def mark(self, end: int, now_ms: float) -> None:
        """Record the current end of the log."""
        assert end >= self._end, f"the log shrinks from {self._end} to {end}"
        start, self._end = self._end, end
        starts, times_ms = self._starts, self._times_ms
        if start in (-1, end) or (times_ms and now_ms - times_ms[-1] < self._apart_ms):
            return
        if len(starts) == _MARKS_MAX:
            # Drop every second mark: the memory stays bounded, and the precision is halved.
            del starts[1::2], times_ms[1::2]
            self._apart_ms *= 2
        starts.append(start)
        times_ms.append(now_ms)

    def grew_ms(self, offset: int) -> float | None:
        """Return the time when the byte at an offset was written, or a little earlier time; None without a mark."""
        at = bisect_right(self._starts, offset) - 1
        return None if at < 0 else self._times_ms[at]

    def drop_before(self, offset: int) -> None:
        """Drop marks that only lower offsets need."""
        keep = bisect_right(self._starts, offset) - 1
        if keep > 0:
            del self._starts[:keep], self._times_ms[:keep]
        if len(self._starts) <= _MARKS_MAX // 8:
            self._apart_ms = _MARK_MS_MIN
