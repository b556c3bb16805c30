"""Before a broker registers it takes over what others of its name did in its absence (``BrokerPreOnlineService``).

A returning master tells every living member of its group, lowest id first, where its log is to be followed
(EXCHANGE_BROKER_HA_INFO): an acting master stops then. Then it takes over the offsets of groups, half messages among
them, and of delay levels, where they are further than its own; only after that it registers and goes on from there. A
returning slave of a masterless group does the same without a word about logs. Progress is never taken back by this.
Timed messages that an acting master delivered are left out, one by one: what it never had is delivered all the same.

A member that does not answer is asked again every second, as long as name servers list it, `_TRIES` times at most: a
broker that waits for a dead one would help nobody, and what it redoes then is delivered twice, not lost. Only with
``enableSlaveActingMaster``, and not with ``skipPreOnline``. Loop only. Source: behaviour.md §10.5; remoting.md §4.4.
"""

from __future__ import annotations

import asyncio
import logging

from rmqkit.broker.registration import Registration
from rmqkit.broker.replication.acting_master import MASTER_ID
from rmqkit.broker.replication.context import ReplicationContext
from rmqkit.errors import RmqError
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, request
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.schemas.brokers import DelayOffsets, HaInfo, decode_timer_checkpoint
from rmqkit.protocol.schemas.offsets import ConsumerOffsets
from rmqkit.remoting.client import RemotingClient, expect_success

__all__ = ["PreOnline"]

_TRIES = 12
_PAUSE_SECONDS = 1.0
_TIMEOUT_MS = 5000

_log = logging.getLogger(__name__)


class PreOnline:
    """Meets the members of a broker's group; ``ha_address``: where the broker's own log is followed."""

    def __init__(
        self, context: ReplicationContext, registration: Registration, client: RemotingClient, *, ha_address: str
    ) -> None:
        self._context = context
        self._registration = registration
        self._client = client
        self._ha_address = ha_address

    async def run(self) -> None:
        """Take over from whoever is there; the broker may register when this returns."""
        others: list[str] = []
        for _ in range(_TRIES):
            members = await self._registration.members()
            own_id = self._context.settings.broker_id
            is_slave = own_id != MASTER_ID
            if is_slave and MASTER_ID in members:
                return  # its tables are copied soon
            others = [address for broker_id, address in sorted(members.items()) if broker_id != own_id]
            if all([await self._meet(address, is_slave=is_slave) for address in others]):
                return
            await asyncio.sleep(_PAUSE_SECONDS)
        _log.warning("registering without what the others did: %s", ", ".join(others))

    async def _meet(self, address: str, *, is_slave: bool) -> bool:
        """Take over the offsets of a member; False when that has to be tried again."""
        store = self._context.store
        told = HaInfo(self._ha_address, store.max_physical_offset, self._context.address)
        try:
            if not is_slave:
                await self._ask(address, request(RequestCode.EXCHANGE_BROKER_HA_INFO, told))
            delays = await self._ask(address, request(RequestCode.GET_ALL_DELAY_OFFSET))
            offsets = await self._ask(address, request(RequestCode.GET_ALL_CONSUMER_OFFSET))
            await self._take_timer(address)
            self._context.schedule.take_further(decode_as(delays.payload, DelayOffsets))
            self._context.offsets.take_further(decode_as(offsets.payload, ConsumerOffsets))
        except RmqError as error:
            _log.warning("offsets of %s are not taken over, to be tried again: %s", address, error)
            return False
        self._context.offsets.persist()
        return True

    async def _take_timer(self, address: str) -> None:
        if self._context.timer is not None:
            command = request(RequestCode.GET_TIMER_CHECK_POINT)
            answer = await self._client.call(address, command, _TIMEOUT_MS)
            if answer.code == ResponseCode.SUCCESS:  # else it has no timer
                self._context.timer.take_further(decode_timer_checkpoint(answer.payload))

    async def _ask(self, address: str, command: Command) -> Command:
        return expect_success(await self._client.call(address, command, _TIMEOUT_MS), address)
