"""GET_BROKER_CONFIG (26) and UPDATE_BROKER_CONFIG (25): the broker's settings, shown and changed (`mqadmin
getBrokerConfig`, ``updateBrokerConfig``). How: `rmqkit.remoting.router`.

Every change gives the settings a new version, which is told with them. Source: remoting.md §4.4, behaviour.md §9.9.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from rmqkit.broker.handlers import Handlers, answers
from rmqkit.broker.operations.context import OperationsContext
from rmqkit.broker.settings import WITHOUT_EFFECT
from rmqkit.broker.unused_settings import unused_notes
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command
from rmqkit.protocol.schemas.brokers import BrokerConfigResponse
from rmqkit.protocol.schemas.topics import DataVersion
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import change_settings, settings_reply

__all__ = ["ConfigHandlers"]

_log = logging.getLogger(__name__)


class ConfigHandlers(Handlers[OperationsContext]):
    """Answers operators who ask for settings."""

    def __init__(self, context: OperationsContext) -> None:
        super().__init__(context)
        self._configuration = context.configuration
        self._version = DataVersion(timestamp=self._context.clock.now_ms())
        context.configuration.listeners.append(self._changed)

    @answers(RequestCode.GET_BROKER_CONFIG)
    def config(self, connection: Connection, command: Command) -> Command:
        header = BrokerConfigResponse(msgspec.json.encode(self._version).decode())
        return settings_reply(self._configuration, command, header)

    @answers(RequestCode.UPDATE_BROKER_CONFIG, admins_only=True, lane="administration")
    def update_config(self, connection: Connection, command: Command) -> Command:
        """Change hot settings; they are in the file when this is answered."""
        black_list = self._context.settings.config_black_list
        return change_settings(self._configuration, command, black_list, WITHOUT_EFFECT)

    def _changed(self, keys: Sequence[str]) -> None:
        self._version.advance(self._context.clock.now_ms())
        texts = self._configuration.texts()
        for note in unused_notes({key: texts[key] for key in keys}):
            _log.warning("%s", note)
