"""Requests of parts that rmqkit does not have: refused as unknown requests are, with the reason in place of nothing.

Where the reference refuses by itself what is switched off by default, its own answer is given. Source: remoting.md §4.
"""

from __future__ import annotations

from rmqkit.broker.handlers import Handlers, answers
from rmqkit.broker.operations.context import OperationsContext
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_fields, reply
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import Router

__all__ = ["REASONS", "UnsupportedHandlers"]

_NO_COLD_DATA = "rmqkit does not slow down consumers that read old data"
_NO_ROCKSDB = "rmqkit keeps consume queues in files and tables in config/*.json, not in RocksDB"

REASONS: dict[int, str] = {
    RequestCode.UPDATE_COLD_DATA_FLOW_CTR_CONFIG: _NO_COLD_DATA,
    RequestCode.REMOVE_COLD_DATA_FLOW_CTR_CONFIG: _NO_COLD_DATA,
    RequestCode.GET_COLD_DATA_FLOW_CTR_INFO: _NO_COLD_DATA,
    RequestCode.SET_COMMITLOG_READ_MODE: "rmqkit leaves reading ahead to the operating system",
    RequestCode.CHECK_ROCKSDB_CQ_WRITE_PROGRESS: _NO_ROCKSDB,
    RequestCode.EXPORT_ROCKSDB_CONFIG_TO_JSON: _NO_ROCKSDB,
    RequestCode.POP_ROLLBACK: "rmqkit keeps what is popped in revive topics, not in a database of its own",
}
"""Why a request that Apache's broker answers is refused here."""

_ENGINE_TYPE = "E_T"
_ENGINE_OF_FILES = "F"


class UnsupportedHandlers(Handlers[OperationsContext]):
    """Says why; to be registered last, as it takes what nobody else does."""

    def register(self, dispatch: Router) -> None:
        super().register(dispatch)
        for code in REASONS.keys() - dispatch.codes:
            dispatch.register(code, self.refuse)

    def refuse(self, connection: Connection, command: Command) -> Command:
        return _refused(command, REASONS[command.code])

    @answers(RequestCode.SWITCH_TIMER_ENGINE)
    def timer_engine(self, connection: Connection, command: Command) -> Command:
        """There is one engine, of files (``F``), which one may switch to."""
        engine = decode_fields(command).get(_ENGINE_TYPE)
        if not engine:
            return reply(command, ResponseCode.INVALID_PARAMETER, "param error, extFields is null")
        return reply(command) if engine == _ENGINE_OF_FILES else _refused(command, _NO_ROCKSDB)

    @answers(RequestCode.GET_BROKER_EPOCH_CACHE)
    def epochs(self, connection: Connection, command: Command) -> Command:
        return reply(command, ResponseCode.SYSTEM_ERROR, "this request only for controllerMode ")


def _refused(command: Command, reason: str) -> Command:
    return reply(
        command, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f" request type {command.code} not supported: {reason}"
    )
