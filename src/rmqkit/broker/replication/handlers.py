"""GET_BROKER_HA_STATUS (907): how far a master's slaves are, or what a slave knows (``mqadmin haStatus``).

RESET_MASTER_FLUSH_OFFSET (908) tells a slave how much of its log to keep at a start with
``syncMasterFlushOffsetWhenStartup``: no slave here drops anything, and says so; a master has nothing to do, as in the
reference. Source: remoting.md §4.4, §6.4.13.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from rmqkit.broker.handlers import Handlers, answers
from rmqkit.broker.replication.context import ReplicationContext
from rmqkit.broker.settings import BrokerRole
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, reply
from rmqkit.protocol.schemas.brokers import HaRuntimeInfo
from rmqkit.remoting.connection import Connection

__all__ = ["ReplicationHandlers"]


class ReplicationHandlers(Handlers[ReplicationContext]):
    """``status``: says what is told of this broker."""

    def __init__(self, context: ReplicationContext, status: Callable[[], HaRuntimeInfo]) -> None:
        super().__init__(context)
        self._status = status

    @answers(RequestCode.GET_BROKER_HA_STATUS)
    def ha_status(self, connection: Connection, command: Command) -> Command:
        return reply(command, body=msgspec.json.encode(self._status()))

    @answers(RequestCode.RESET_MASTER_FLUSH_OFFSET, admins_only=True)
    def reset_flush_offset(self, connection: Connection, command: Command) -> Command:
        if self._context.settings.broker_role is not BrokerRole.SLAVE:
            return reply(command)
        remark = f" request type {command.code} not supported: a slave of rmqkit drops nothing of its log at a start"
        return reply(command, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark)
