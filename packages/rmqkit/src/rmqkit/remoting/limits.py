"""Limits for all connections of a server together: the number of connections, the bytes of incomplete frames, and the
bytes of unread responses.

A connection above the maximum number is closed as soon as it is accepted. If incomplete frames use too many bytes, the
connections with the oldest incomplete frames are closed until the bytes are within the limit. An honest peer completes
a frame within moments, but an attacker that occupies memory does not.

If unread responses use too many bytes, the connections with the most unread bytes are closed. A connection reports its
unread bytes when it writes, not when its peer reads. If the reported sum exceeds the limit, the limits measure all
connections again. If the sum is still near the limit, connections are closed until a quarter of the limit is free, so
that the next measurement is many writes later.

Both ports of a broker share their limits. Apache's servers have no such limits. Use this module only on the event loop.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Annotated, Protocol

from rmqkit.metrics import ExporterSettings, Gathered
from rmqkit.remoting.address import IpAddress
from rmqkit.remoting.bounded_log import BoundedLog
from rmqkit.settings import Setting

_log = logging.getLogger(__name__)
_CUT_AT_ONCE = 256


GRPC_CALLS = Setting(
    "grpcMaxConcurrentCallsPerConnection",
    "number of calls that one gRPC connection may have under way; calls beyond it are refused",
    low=1,
    high=(1 << 31) - 1,
)
GRPC_CALLS_MAX = 10_000
"""The default. Apache's proxy has no limit."""


class ConnectionSettings(ExporterSettings, kw_only=True):
    """The settings about connections in a configuration file."""

    connections_max: Annotated[
        int, Setting("maxConnections", "maximum number of connections; new ones are closed", low=16, hot=True)
    ] = 65_536
    connections_per_address_max: Annotated[
        int,
        Setting(
            "maxConnectionsPerAddress",
            "maximum number of connections from one address or load balancer",
            low=16,
            hot=True,
        ),
    ] = 16_384
    incomplete_bytes_max: Annotated[
        int,
        Setting(
            "maxIncompleteFrameBytes",
            "maximum bytes of incomplete frames, over all connections",
            low=32 << 20,
            hot=True,
        ),
    ] = 512 << 20
    unsent_bytes_max: Annotated[
        int,
        Setting("maxUnsentBytes", "maximum bytes of unsent answers, over all connections", low=32 << 20, hot=True),
    ] = 512 << 20


class LimitedConnection(Protocol):
    """The members of a `Connection` that `Limits` uses."""

    peer: str

    @property
    def unsent_bytes(self) -> int: ...
    def cut(self, reason: str) -> None: ...


class Limits:
    """The counters and limits of one server's connections.

    Attributes:
        count: number of open connections.
        incomplete_bytes: bytes of incomplete frames.
        refused: number of connections closed because of a maximum number, by limit: ``all`` or ``address``.
        cut: number of connections closed because of an incomplete frame.
        unsent_bytes: bytes that peers have not read. Connections report only 4 KiB or more.
        cut_unsent: number of connections closed because of unread bytes.
        log: the log for the reasons why connections were closed.
    """

    def __init__(self, settings: ConnectionSettings | None = None) -> None:
        self._settings = settings or ConnectionSettings()
        self._counts: Counter[IpAddress | None] = Counter()
        self.count = 0
        self._incomplete: dict[LimitedConnection, int] = {}
        self.incomplete_bytes = 0
        self.refused: Counter[str] = Counter({"all": 0, "address": 0})
        self.cut = 0
        self._unsent: dict[LimitedConnection, int] = {}
        self.unsent_bytes = 0
        self.cut_unsent = 0
        self.log = BoundedLog(_log)

    def opened(self, connection: LimitedConnection, address: IpAddress | None) -> bool:
        """Count a connection. Return False if there are too many connections; the caller must close it then."""
        self._counts[address] += 1
        self.count += 1
        settings = self._settings
        if self.count > settings.connections_max:
            self._refuse("all", connection, f"there are maxConnections={settings.connections_max}")
        elif self._counts[address] > settings.connections_per_address_max:
            reason = f"its address has maxConnectionsPerAddress={settings.connections_per_address_max}"
            self._refuse("address", connection, reason)
        else:
            return True
        return False

    def _refuse(self, limit: str, connection: LimitedConnection, reason: str) -> None:
        self.refused[limit] += 1
        count = self.refused[limit]
        if count.bit_count() == 1:  # log the 1st, 2nd, 4th, 8th …, so that a flood does not fill the log
            _log.warning("closing connection of %s: %s; refused so far: %d", connection.peer, reason, count)

    def closed(self, connection: LimitedConnection, address: IpAddress | None) -> None:
        """Subtract a connection that `opened` has counted."""
        self.count -= 1
        self._counts[address] -= 1
        assert self.count >= 0 <= self._counts[address], "at most as many connections close as were opened"
        if not self._counts[address]:
            del self._counts[address]
        self.incomplete_bytes -= self._incomplete.pop(connection, 0)
        self.unsent_bytes -= self._unsent.pop(connection, 0)

    def note_incomplete(self, connection: LimitedConnection, incomplete_bytes: int, *, is_new: bool) -> None:
        """Record how many bytes of an incomplete frame a connection holds.
        ``is_new``: the frame began in the last read."""
        # The dict is ordered by the start of the frames, so the entry of a new frame moves to the end.
        before = self._incomplete.pop(connection, 0) if is_new else self._incomplete.get(connection, 0)
        self.incomplete_bytes += incomplete_bytes - before
        if incomplete_bytes:
            self._incomplete[connection] = incomplete_bytes
        else:
            self._incomplete.pop(connection, None)
        while self.incomplete_bytes > self._settings.incomplete_bytes_max and self._incomplete:
            oldest = next(iter(self._incomplete))
            # Remove the entry before the cut: `closed` follows the cut, and would subtract the bytes again.
            self.incomplete_bytes -= self._incomplete.pop(oldest)
            self.cut += 1
            oldest.cut(
                f"incomplete frames take more than maxIncompleteFrameBytes={self._settings.incomplete_bytes_max}"
            )

    def note_waiting(self, connection: LimitedConnection, unsent_bytes: int) -> None:
        """Record how many written bytes a peer has not read."""
        self._note_unsent(connection, unsent_bytes)
        limit = self._settings.unsent_bytes_max
        if self.unsent_bytes > limit:
            self._ask_all()  # peers may have read some of the recorded bytes
            if self.unsent_bytes > limit - limit // 8:
                self._cut_largest(limit)

    def _note_unsent(self, connection: LimitedConnection, unsent_bytes: int) -> None:
        self.unsent_bytes += unsent_bytes - self._unsent.get(connection, 0)
        if unsent_bytes:
            self._unsent[connection] = unsent_bytes
        else:
            self._unsent.pop(connection, None)

    def _ask_all(self) -> None:
        """Measure the unread bytes of every connection that reported unread bytes."""
        for connection in list(self._unsent):
            self._note_unsent(connection, connection.unsent_bytes)

    def _cut_largest(self, limit: int) -> None:
        """Close the connections with the most unread bytes, at most `_CUT_AT_ONCE` connections, until a quarter of the
        limit is free."""
        reason = f"answers that peers do not take are more than maxUnsentBytes={limit}; it holds"
        for connection in sorted(self._unsent, key=self._unsent.__getitem__, reverse=True)[:_CUT_AT_ONCE]:
            if self.unsent_bytes <= limit - limit // 4:
                break
            held = self._unsent[connection]
            self._note_unsent(connection, 0)
            self.cut_unsent += 1
            connection.cut(f"{reason} {held}")

    def gather(self) -> Gathered:
        """Return the values of the metrics."""
        self._ask_all()
        return {
            "rmqkit_incomplete_frame": {(): self.incomplete_bytes},
            "rmqkit_connections_refused_total": {(limit,): count for limit, count in self.refused.items()},
            "rmqkit_connections_cut_total": {(): self.cut},
            "rmqkit_unsent": {(): self.unsent_bytes},
            "rmqkit_connections_cut_unsent_total": {(): self.cut_unsent},
        }
