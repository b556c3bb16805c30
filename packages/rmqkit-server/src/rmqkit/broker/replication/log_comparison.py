"""The comparison of a slave's log with its master's log. The master's log continues the slave's log, or they diverge.

The slave requests the record at the offset of its own last record from the master's main port (VIEW_MESSAGE_BY_ID,
which every release answers) and compares the bytes. A record contains its position in log and queue, its store time and
its message, so logs that diverged earlier have different records there. Only if the record differs, the slave requests
the bounds of the master's log (GET_BROKER_RUNTIME_INFO) and a few more records, in a binary search.

==========================================  ===========================================================
the master has                              action
==========================================  ===========================================================
the same record                             the slave follows the master
another record, or no record although its   the slave finds the point of divergence, logs it once, and
log continues after the offset              stops permanently (`HaSlave.is_diverged`)
no record: its log is equal, but shorter    the slave is ahead: it logs this once, compares again with
                                            every try, and serves no messages meanwhile
no record: its log begins later             this is logged once. The slave's store has to be removed
==========================================  ===========================================================

The slave never removes data: only an operator can decide which of the two logs is right.
Use this module only on the event loop. Source: docs/decisions/0007; store.md §21.3, §21.4.
"""

from __future__ import annotations

import shlex
from bisect import bisect_right

from rmqkit.errors import BodyError, LogDiverged, StoreError
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import request
from rmqkit.protocol.schemas.pull import ViewMessageRequest
from rmqkit.remoting.client import RemotingClient, expect_success
from rmqkit.rpc import BrokerCalls
from rmqkit.store.message_store import MessageStore

_ASK_TIMEOUT_MS = 5000


class LogComparison:
    """The comparison of a slave's log with its master's log.

    Args:
        store: the slave's store, opened with ``is_replica``.
        client: the client for requests to the master's main port.
        address: the slave's own address, for log lines.

    Attributes:
        ahead_from: the end of the master's log in the last comparison, if the slave's log is longer; otherwise None.
    """

    def __init__(self, store: MessageStore, client: RemotingClient, address: str) -> None:
        self._store = store
        self._calls = BrokerCalls(client, _ASK_TIMEOUT_MS)
        self._address = address
        self.ahead_from: int | None = None

    async def compare(self, address: str) -> None:
        """Check that the master has the slave's last record.
        Raises LogDiverged: the master has a different log.
        Raises StoreError: the master's log ends before the slave's last record, or begins after it.
        Raises RemotingError, PeerRefused, BodyError: the request to the master failed."""
        last = self._store.replica.last_record()
        if last is None or await self._has(address, last[0]):
            self.ahead_from = None
            return
        low, high = await self._bounds(address)
        own_end = self._store.max_physical_offset
        if last[0] < low:
            raise StoreError(
                f"the log of {address} begins at {low}, after the end of the own log at {own_end}: remove this slave's "
                "store, so that it copies the log again"
            )
        # Search once, and again only if the master's log has grown: the search reads both logs.
        if self.ahead_from is None or high > self.ahead_from:
            self.ahead_from = await self._parting(address, low)
        if high > self.ahead_from:
            raise LogDiverged(
                self.ahead_from,
                f"{address} has other bytes there than {self._address}, whose log ends at {own_end}",
                f"compare both stores: {self._diff}; to follow this master again, remove this slave's store",
            )
        raise StoreError(
            f"the own log ends at {own_end}, the log of {address} ends at {high} and is equal up to there: no messages "
            f"are served until the master has the rest; if it never will, remove this slave's store, "
            f"or compare both first: {self._diff}"
        )

    @property
    def _diff(self) -> str:
        """Return the command that compares this store with a copy of the master's store."""
        return f"rmq pipeline diff {shlex.quote(str(self._store.root))} MASTERS_STORE"

    async def _has(self, address: str, offset: int) -> bool:
        """Return True if a broker has the same record at a physical offset as this slave."""
        own = self._store.log.record_at(offset)
        asked = request(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageRequest(offset))
        answer = await self._calls.call(address, asked)
        if answer.code == ResponseCode.SYSTEM_ERROR:
            return False  # all releases answer with this code if no record begins at the offset
        return own is not None and expect_success(answer, address).payload == own

    async def _bounds(self, address: str) -> tuple[int, int]:
        """Return the physical offsets where a broker's log begins and ends."""
        table = await self._calls.runtime_info(address)
        try:
            return int(table["commitLogMinOffset"]), int(table["commitLogMaxOffset"])
        except (KeyError, ValueError) as error:
            raise BodyError(f"{address} did not return the bounds of its log: {error!r}") from None

    async def _parting(self, address: str, low: int) -> int:
        """Return the physical offset of the first record of this slave, from ``low`` on, that a broker does not have.
        Search in the first records of the log's files, and then within one file."""
        store = self._store
        files = [start for start in store.file_starts if store.log.record_at(start) is not None]
        files = files[max(0, bisect_right(files, low) - 1) :]
        following = await self._first_missing(address, files[1:])
        records = [start for start in store.replica.record_starts(files[following]) if start >= low]
        records += files[following + 1 : following + 2]
        assert records == sorted(records), "the offsets of records ascend"
        missing = await self._first_missing(address, records)
        if missing == len(records):
            raise StoreError(f"the log of {address} changed while it was compared")
        return records[missing]

    async def _first_missing(self, address: str, offsets: list[int]) -> int:
        """Return the index of the first record that a broker does not have, or the number of records. ``offsets``: the
        physical offsets of records of this slave."""
        low, high = 0, len(offsets)
        # The logs are equal up to one offset and differ after it, so use a binary search. It needs about a dozen
        # requests for a file.
        while low < high:
            middle = (low + high) // 2
            if await self._has(address, offsets[middle]):
                low = middle + 1
            else:
                high = middle
        return low
