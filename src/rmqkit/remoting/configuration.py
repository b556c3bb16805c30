"""What operators ask about a server's settings, the same at brokers and name servers (``Configuration``).

Reading gives every setting, a line each. Changing is all or nothing: keys that need a restart and those of the black
list get NO_PERMISSION, with Java's remark; values and keys that cannot be used SYSTEM_ERROR, with what is wrong. What
was changed is in effect, and in the configuration file, when it is answered.
Source: remoting.md §4.2, §4.4; behaviour.md §1.7, §9.9.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from rmqkit.errors import SettingsError
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.command import Command, reply
from rmqkit.settings import Configuration, parse_properties

_TEXT_BYTES_MAX = 64 << 10
"""Three times what all settings of Apache's broker take."""
_BAD_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\u(?![0-9a-fA-F]{4})")
"""What makes Java's properties reader give up."""


def settings_reply(configuration: Configuration, command: Command, header: Any = None) -> Command:
    """All settings, sorted, a line each."""
    text = "".join(f"{key}={value}\n" for key, value in configuration.texts().items())
    return reply(command, header=header, body=text.encode())


def change_settings(
    configuration: Configuration, command: Command, black_list: str, without_effect: Collection[str]
) -> Command:
    """Change settings: all that are asked for, or none. ``black_list``: keys separated by semicolons."""
    if len(command.payload) > _TEXT_BYTES_MAX:
        remark = f"settings of {len(command.payload)} bytes: {_TEXT_BYTES_MAX} are read"
        return reply(command, ResponseCode.SYSTEM_ERROR, remark)
    properties = _properties(command.payload)
    if properties is None:
        return reply(command, ResponseCode.SYSTEM_ERROR, "string2Properties error")
    if not {"rocketmqHome", *black_list.split(";")}.isdisjoint(properties) or configuration.is_frozen(properties):
        return reply(command, ResponseCode.NO_PERMISSION, "Can not update config in black list.")
    if useless := sorted(properties.keys() & set(without_effect)):
        remark = f"{', '.join(useless)}: without effect here; nothing was changed"
        return reply(command, ResponseCode.SYSTEM_ERROR, remark)
    try:
        configuration.change(properties)
    except SettingsError as error:
        return reply(command, ResponseCode.SYSTEM_ERROR, str(error))
    return reply(command)


def _properties(body: bytes) -> dict[str, str] | None:
    """A properties text, or None when Java could not read it."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    return None if _BAD_ESCAPE.search(text) else parse_properties(text)
