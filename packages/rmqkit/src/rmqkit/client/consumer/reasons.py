"""The reason why a message goes to the dead letters, in properties of the dead letter.

====================  ============================================================  ================
property              value                                                         at most
====================  ============================================================  ================
``rmqkit_reason``     type and text of the exception, in one line                   1,000 characters
``rmqkit_traceback``  the last lines of its traceback; missing without exception    4,000 characters
``rmqkit_handler``    module and name of the handler                                200 characters
``rmqkit_tries``      how often the group tried the message, including this time
====================  ============================================================  ================

RocketMQ has no such properties, so other clients see them as properties of the application. They contain exception
texts, so they are as confidential as the log of the consumer. The functions of this module have no side effects.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable

from msgspec import Struct

from rmqkit.protocol import properties as names

REASON_CHARACTERS_MAX = 1000
_TRACEBACK_CHARACTERS_MAX = 4000
_HANDLER_CHARACTERS_MAX = 200
_FRAMES_MAX = 20
_OURS = __name__.partition(".")[0] + ".client."


class Reason(Struct, frozen=True):
    """The reason why a message goes to the dead letters.

    Attributes:
        text: the error.
        traceback: the traceback of the exception, empty without an exception.
        handler: the name of the handler, empty if no handler was called.
        tries: the number of times that the group tried the message.
    """

    text: str
    traceback: str = ""
    handler: str = ""
    tries: int = 0

    def properties(self) -> dict[str, str]:
        """Return the properties of a dead letter, with the least important property last."""
        found = {
            names.DEAD_LETTER_REASON: _one_line(self.text)[:REASON_CHARACTERS_MAX],
            names.DEAD_LETTER_TRIES: str(self.tries) if self.tries else "",
            names.DEAD_LETTER_HANDLER: _one_line(self.handler)[:_HANDLER_CHARACTERS_MAX],
            names.DEAD_LETTER_TRACEBACK: _last_lines(self.traceback),
        }
        return {name: value for name, value in found.items() if value}


def text_of(error: BaseException) -> str:
    """Return the type and the text of an exception."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def traceback_of(error: BaseException) -> str:
    """Return the traceback of a handler's exception. It begins in the handler, and omits the frames of this client that
    call the handler."""
    first = error.__traceback__
    while first is not None and first.tb_frame.f_globals.get("__name__", "").startswith(_OURS):
        first = first.tb_next
    shortened = traceback.TracebackException(type(error), error, first, limit=-_FRAMES_MAX)
    return "".join(shortened.format()).rstrip()


def handler_name(handler: Callable[..., object]) -> str:
    """Return the module and the name of a handler, or of its class if the handler is a callable object."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = inspect.unwrap(handler)
    named = handler if hasattr(handler, "__qualname__") else type(handler)
    return f"{named.__module__}.{named.__qualname__}" if named.__module__ else named.__qualname__


def _one_line(text: str) -> str:
    # 0x01 and 0x02 would break the property string.
    return "".join(character if character.isprintable() else " " for character in text)


def _last_lines(text: str) -> str:
    lines = [_one_line(line) for line in text.split("\n")]
    text = "\n".join(lines)
    if len(text) <= _TRACEBACK_CHARACTERS_MAX:
        return text
    kept = text[-_TRACEBACK_CHARACTERS_MAX:]
    return "…\n" + kept[kept.find("\n") + 1 :]
