"""Between the brokers of one name, and from name servers to them: codes 905 and 906 (``AdminBrokerProcessor``).

====  ===========================  ===================================================================================
code  request                      answer
====  ===========================  ===================================================================================
905   the lowest id changed        none; who is there is looked up, whatever the notice says
906   empty                        of a master, where its log is followed; a slave has nothing to say
906   with a master's addresses    a slave that may act for the master stops doing so and follows it, if it is the one
                                   that name servers told of last; another has to be told of by them first
====  ===========================  ===================================================================================

Source: behaviour.md §1.8, §10.5; remoting.md §4.4.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from rmqkit.broker.handlers import Handlers, answers
from rmqkit.broker.replication.acting_master import ActingMaster, OnMaster
from rmqkit.broker.replication.context import ReplicationContext
from rmqkit.broker.settings import BrokerRole
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command, decode_header_leniently, reply
from rmqkit.protocol.schemas.brokers import HaInfo
from rmqkit.remoting.connection import Connection

__all__ = ["MemberHandlers"]

_TOLD_MAX = 256

_log = logging.getLogger(__name__)


class MemberHandlers(Handlers[ReplicationContext]):
    """Answers them.

    Args:
        ha_address: where the broker's own log is followed.
        acting: None unless it may act as master.
        believes: whether a master that announces itself is the one that was known.
    """

    def __init__(
        self,
        context: ReplicationContext,
        *,
        ha_address: str,
        acting: ActingMaster | None,
        on_master: OnMaster | None,
        believes: Callable[[Connection, HaInfo], bool],
    ) -> None:
        super().__init__(context)
        self._ha_address = ha_address
        self._acting = acting
        self._on_master = on_master
        self._believes = believes
        self._doubted: set[str] = set()

    @answers(RequestCode.NOTIFY_MIN_BROKER_ID_CHANGE)
    def lowest_id_changed(self, connection: Connection, command: Command) -> Command:
        if self._acting is not None:
            self._acting.look()
        return reply(command)

    @answers(RequestCode.EXCHANGE_BROKER_HA_INFO)
    async def ha_info(self, connection: Connection, command: Command) -> Command:
        """Says where this master's log is followed, or follows the master that says so."""
        told = decode_header_leniently(command, HaInfo)
        if self._context.settings.broker_role is not BrokerRole.SLAVE:
            is_asked = told.master_ha_address is None
            return reply(command, header=HaInfo(self._ha_address, 0, self._context.address) if is_asked else HaInfo())
        if told.master_address and told.master_ha_address and self._acting is not None and self._on_master is not None:
            if not self._believes(connection, told):
                self._doubt(connection, told)
                self._acting.look()
                return reply(command)
            await self._acting.give_way()
            self._on_master(told.master_address, told.master_ha_address)
        return reply(command)

    def _doubt(self, connection: Connection, told: HaInfo) -> None:
        """Warn of a peer, once."""
        host = connection.addresses[0] if connection.addresses else "?"
        if host not in self._doubted and len(self._doubted) < _TOLD_MAX:
            self._doubted.add(host)
            _log.warning(
                "%s says that the master is %s with its log at %s: that is not followed before name servers tell it",
                *(connection.peer, told.master_address, told.master_ha_address),
            )
