"""What follows when brokers come and go: those that left are forgotten, those that stay are notified.

`Unregistration` is the queue of brokers to forget (``BatchUnregistrationService``). Good-byes, closed connections and
silence all put departures here; one task takes all that wait at once, because forgetting walks over every topic: a
thousand brokers whose network broke cost one walk. The queue is bounded; what does not fit is refused (a good-bye) or
dropped (the others: the next scan finds them again).

`Notices` sends NOTIFY_MIN_BROKER_ID_CHANGE, one-way, when the lowest id of a group changed. When somebody went away, or
is alone, everybody who is there is notified; when a new lowest id joined, everybody but it. A broker that cannot be
reached is skipped: brokers also look their group up every second.
Source: behaviour.md §1.4, §1.8; remoting.md §4.4.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rmqkit.errors import ConnectFailed
from rmqkit.namesrv.routes import Departure, MemberChange, RouteTable
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import request
from rmqkit.protocol.schemas.brokers import MinBrokerIdChange
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.tasks import Tasks

_log = logging.getLogger(__name__)


class Unregistration:
    """Takes departures in batches out of the route table; loop only.
    At most ``capacity`` wait; ``on_change`` is told of each group whose lowest id went away."""

    def __init__(self, routes: RouteTable, *, capacity: int, on_change: Callable[[MemberChange], None]) -> None:
        self._routes = routes
        self._on_change = on_change
        self._waiting: asyncio.Queue[Departure] = asyncio.Queue(capacity)
        self._tasks = Tasks()

    def submit(self, departure: Departure) -> bool:
        """Have a broker forgotten soon; False when the queue is full."""
        try:
            self._waiting.put_nowait(departure)
        except asyncio.QueueFull:
            _log.warning("%s at %s is not unregistered: the queue is full", departure.broker_name, departure.address)
            return False
        return True

    def start(self) -> None:
        self._tasks.start(self._run(), "unregistration")

    async def stop(self) -> None:
        """Take what still waits, and end."""
        await self._tasks.close()
        self._take(self._drained())

    async def _run(self) -> None:
        while True:
            first = await self._waiting.get()
            try:
                self._take([first, *self._drained()])
            except Exception:  # noqa: BLE001 - the task's outer edge: the next scan finds them again
                _log.exception("brokers are not unregistered")

    def _drained(self) -> list[Departure]:
        return [self._waiting.get_nowait() for _ in range(self._waiting.qsize())]

    def _take(self, batch: list[Departure]) -> None:
        for change in self._routes.unregister(batch):
            self._on_change(change)


NOTICE_TIMEOUT_MS = 300


def receivers(change: MemberChange) -> list[str]:
    """The addresses to tell of a change."""
    if change.offline_address is not None or len(change.members) == 1:
        return list(change.members.values())
    lowest = min(change.members)
    return [address for broker_id, address in change.members.items() if broker_id != lowest]


class Notices:
    """Sends notices; loop only."""

    def __init__(self, client: RemotingClient) -> None:
        self._client = client
        self._tasks = Tasks()

    def tell(self, change: MemberChange) -> None:
        """Tell the members of a group, soon."""
        lowest = min(change.members)
        header = MinBrokerIdChange(
            min_broker_id=lowest,
            broker_name=change.broker_name,
            min_broker_addr=change.members[lowest],
            offline_broker_addr=change.offline_address,
            ha_broker_addr=change.ha_address,
        )
        for address in receivers(change):
            self._tasks.start(self._send(address, header), f"notice to {address}")

    async def stop(self) -> None:
        await self._tasks.close()
        await self._client.close()

    async def _send(self, address: str, header: MinBrokerIdChange) -> None:
        notice = request(RequestCode.NOTIFY_MIN_BROKER_ID_CHANGE, header, one_way=True)
        try:
            await self._client.send_one_way(address, notice, NOTICE_TIMEOUT_MS)
        except ConnectFailed as error:
            _log.warning("%s is not told that the lowest id is %d now: %s", address, header.min_broker_id, error)
