"""Telling the brokers of a group that its lowest id changed (NOTIFY_MIN_BROKER_ID_CHANGE, one-way).

When somebody went away, or is alone, everybody who is there is told; when a new lowest id joined, everybody but it.
Nobody answers, and a broker that cannot be reached is told nothing: brokers also look their group up every second.
Source: behaviour.md §1.8; remoting.md §4.4.
"""

from __future__ import annotations

import logging

from rmqkit.errors import ConnectFailed
from rmqkit.namesrv.routes import MemberChange
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import request
from rmqkit.protocol.schemas.brokers import MinBrokerIdChange
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.tasks import Tasks

__all__ = ["NOTICE_TIMEOUT_MS", "Notices", "receivers"]

NOTICE_TIMEOUT_MS = 300

_log = logging.getLogger(__name__)


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
