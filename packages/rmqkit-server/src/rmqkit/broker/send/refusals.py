"""The answers of a slave to sends. Source: behaviour.md §2.4, §10.2, §10.5; store.md §21.5."""

from __future__ import annotations

from typing import Protocol

from rmqkit.broker.durability import REJECTED, put_refusal
from rmqkit.broker.handlers import Handlers, OwnAddress, answers
from rmqkit.broker.send.checks import stamps_of
from rmqkit.broker.settings import BrokerSettings
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, reply
from rmqkit.remoting.connection import Connection
from rmqkit.store.message_store import PutResult, PutStatus

__all__ = ["RefusalHandlers"]

_UNAVAILABLE = PutResult(PutStatus.SERVICE_NOT_AVAILABLE, reason="this broker is a slave")


class RefusalContext(Protocol):
    """The parts of the broker that refusals use."""

    identity: OwnAddress
    settings: BrokerSettings


class RefusalHandlers(Handlers[RefusalContext]):
    """The handlers of sends at a slave, which replace `SendHandlers` and `SendBackHandlers`. They create no topics.

    =========================  =====================================  ================================================
    request                    any slave                              a slave with ``enableSlaveActingMaster``
    =========================  =====================================  ================================================
    a message, a batch         SYSTEM_BUSY ``[REJECTREQUEST]…``       SERVICE_NOT_AVAILABLE, as for a full disk:
                                                                      producers try another broker
    a message to retry         SYSTEM_BUSY ``[REJECTREQUEST]…``       SYSTEM_ERROR: consumers then send the message to a
                                                                      retry topic
    =========================  =====================================  ================================================
    """

    @answers(RequestCode.SEND_MESSAGE)
    @answers(RequestCode.SEND_MESSAGE_V2)
    @answers(RequestCode.SEND_BATCH_MESSAGE)
    def send(self, connection: Connection, command: Command) -> Command:
        if not self._context.settings.acts_as_master:
            return reply(command, ResponseCode.SYSTEM_BUSY, REJECTED)
        return reply(command, *put_refusal(_UNAVAILABLE, 0), fields=stamps_of(self._context.settings)[1])

    @answers(RequestCode.CONSUMER_SEND_MSG_BACK)
    def send_back(self, connection: Connection, command: Command) -> Command:
        if not self._context.settings.acts_as_master:
            return reply(command, ResponseCode.SYSTEM_BUSY, REJECTED)
        return reply(command, ResponseCode.SYSTEM_ERROR, f"no master available along with {self._context.identity.ip}")
