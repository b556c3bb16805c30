"""Hooks: additions of other packages to the console, with entry points of the group ``rmqkit.console``.

An entry point names a module or an object. This module or object may have these attributes:

=====================================  ===========================================================================
attribute                              value
=====================================  ===========================================================================
``decode_body(topic, message)``        the text of a message's body, or None for unknown bodies; pages of messages
                                       show the first text that a hook returns
``routes(console)``                    additional pages (`OwnPage`) with links in the navigation
=====================================  ===========================================================================

The module of a hook can also declare notification services for alert channels with ``apprise.decorators.notify``.

If a decoder raises an exception, the error is logged and shown in place of the body. A decoder that takes longer than
`DECODE_S` fails, too, and is not called again. Hidden bodies and bodies above `DECODE_BYTES_MAX` are not decoded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

from msgspec import Struct

from rmqkit.console.threads import in_thread
from rmqkit.errors import SettingsError
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.sentences import _

__all__ = ["DecodeBody", "Hooks", "OwnPage", "Routes", "installed"]

GROUP = "rmqkit.console"
DECODE_S = 1.0
DECODE_BYTES_MAX = 4 << 20
_log = logging.getLogger(__name__)


class DecodeBody(Protocol):
    """A function that returns a message body as text. The format may be Protobuf, Avro, pickle, or any other."""

    def __call__(self, topic: str, message: ReceivedMessage) -> str | None: ...


class Routes(Protocol):
    """A function that returns the pages that a package adds to a `rmqkit.console.Console`."""

    def __call__(self, console: Any) -> Iterable[OwnPage]: ...


class OwnPage(Struct, frozen=True, kw_only=True):
    """A page that a hook adds, at ``/{env}/own/{path}``.

    Attributes:
        path: the last part of the address: letters, digits, ``-`` and ``_``.
        title: the text of the link in the navigation.
        view: a coroutine function. Its argument is a `rmqkit.console.request.request.Ask`, its result is a Starlette
            response or the result of `rmqkit.console.own_page`. ``ask.admin`` sends requests to the cluster.
        live_s: the seconds between its refreshes; 0: no refreshes.
    """

    path: str
    title: str
    view: Callable[[Any], Awaitable[Any]]
    live_s: float = 0.0


class Hooks:
    """The additions of all hooks. Raises SettingsError: the path of a page is not valid or not unique."""

    def __init__(self, console: object, hooks: Sequence[object]) -> None:
        self._decoders: list[DecodeBody] = [
            decoder for hook in hooks if (decoder := getattr(hook, "decode_body", None)) is not None
        ]
        self._hung: list[DecodeBody] = []
        self.pages: list[OwnPage] = []
        for hook in hooks:
            routes: Routes | None = getattr(hook, "routes", None)
            for page in routes(console) if routes is not None else ():
                if not page.path.replace("-", "").replace("_", "").isalnum() or not page.path.isascii():
                    raise SettingsError(f"the console's own page {page.path!r} must have letters, digits, - and _")
                if page.path in [one.path for one in self.pages]:
                    raise SettingsError(f"two hooks of the console have a page {page.path}: rename one")
                self.pages.append(page)

    async def decode(self, messages: Sequence[ReceivedMessage]) -> list[str | None]:
        """Return the text of each body from the first hook that knows the body, or the error of this hook, or None. One
        thread decodes all bodies, for at most `DECODE_S`. A decoder that takes longer is not called again, because a
        thread cannot be stopped."""
        if not self._decoders or not messages:
            return [None] * len(messages)
        ended = threading.Event()
        texts: list[str | None] = [_("not decoded: no time was left for this body")] * len(messages)
        at_work: list[DecodeBody] = []

        def run() -> None:
            for number, message in enumerate(messages):
                if ended.is_set():
                    return
                texts[number] = self._decoded(message, at_work)

        try:
            await in_thread(run, DECODE_S)
        except TimeoutError:
            ended.set()
            for decoder in at_work[:1]:
                _log.error("console: a decoder of bodies did not end in %g s and is not called again", DECODE_S)
                self._hung.append(decoder)
        return list(texts)

    def _decoded(self, message: ReceivedMessage, at_work: list[DecodeBody]) -> str | None:
        for decoder in self._decoders:
            if decoder in self._hung:
                return _(
                    "a decoder of bodies did not end in {seconds:g} s: it is not called until the console restarts",
                    seconds=DECODE_S,
                )
            if len(message.body) > DECODE_BYTES_MAX:
                return _(
                    "not decoded: the body has {count:,} bytes, above {most:,}",
                    count=len(message.body),
                    most=DECODE_BYTES_MAX,
                )
            at_work[:] = [decoder]
            try:
                text = decoder(message.topic, message)
                if text is not None:
                    return str(text)[:DECODE_BYTES_MAX]
            except Exception as error:  # noqa: BLE001 - the outer edge of others' code
                _log.exception("console: a decoder of bodies failed for %s", message.msg_id)
                return _("the decoder of this body failed: {name}: {error}", name=type(error).__name__, error=error)
            finally:
                at_work.clear()
        return None


def installed() -> list[object]:
    """Return the hooks of installed packages. A hook that cannot be loaded is logged and skipped."""
    found = []
    for point in entry_points(group=GROUP):
        try:
            found.append(point.load())
        except Exception:  # noqa: BLE001 - the outer edge of others' code
            _log.exception("console: hook %s of %s cannot be loaded", point.name, point.value)
    return found
