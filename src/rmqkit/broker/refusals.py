"""What a slave answers to messages, in place of `send` and `send_back`: it takes none, and creates no topics for them.

=========================  =====================================  ================================================
request                    any slave                              one with ``enableSlaveActingMaster``
=========================  =====================================  ================================================
a message, a batch         SYSTEM_BUSY ``[REJECTREQUEST]…``       SERVICE_NOT_AVAILABLE, as from a store that is
                                                                  full: producers try another broker
a message to be retried    SYSTEM_BUSY ``[REJECTREQUEST]…``       SYSTEM_ERROR: consumers send it to a retry topic
=========================  =====================================  ================================================

Source: behaviour.md §2.4, §10.2, §10.5; store.md §21.5.
"""

from __future__ import annotations

from rmqkit.broker.answers import Handlers, answers
from rmqkit.broker.pull.handler import REJECTED
from rmqkit.broker.send.checks import put_refusal, stamps_of
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, reply
from rmqkit.remoting.connection import Connection
from rmqkit.store.message_store import PutResult, PutStatus

__all__ = ["RefusalHandlers"]

_UNAVAILABLE = PutResult(PutStatus.SERVICE_NOT_AVAILABLE, reason="this broker is a slave")


class RefusalHandlers(Handlers):
    """Takes no messages."""

    @answers(RequestCode.SEND_MESSAGE)
    @answers(RequestCode.SEND_MESSAGE_V2)
    @answers(RequestCode.SEND_BATCH_MESSAGE)
    def send(self, connection: Connection, command: Command) -> Command:
        if not self._settings.acts_as_master:
            return reply(command, ResponseCode.SYSTEM_BUSY, REJECTED)
        return reply(command, *put_refusal(_UNAVAILABLE, 0), fields=stamps_of(self._settings)[1])

    @answers(RequestCode.CONSUMER_SEND_MSG_BACK)
    def send_back(self, connection: Connection, command: Command) -> Command:
        if not self._settings.acts_as_master:
            return reply(command, ResponseCode.SYSTEM_BUSY, REJECTED)
        return reply(command, ResponseCode.SYSTEM_ERROR, f"no master available along with {self._identity.ip}")
