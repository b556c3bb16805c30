"""Hooks: what other packages add to the console, by entry points of the group ``rmqkit.console``.

An entry point names a module or an object. What it has of these is used, the rest may be missing:

=====================================  ===========================================================================
attribute                              what it is
=====================================  ===========================================================================
``decode_body(topic, message)``        the text of a message's body, or None where it is not this hook's; pages of
                                       messages show the first text that a hook gives
``routes(console)``                    pages of its own, an `OwnPage` each, which the navigation shows
=====================================  ===========================================================================

A hook's module may also declare notification services with ``apprise.decorators.notify``: alert channels can use them.

A decoder that raises is logged and said in place of the body: the page stays. So it is with one that takes longer than
`DECODE_S`, which is not called again; bodies above `DECODE_BYTES_MAX` are not given to any. Decoders run in a thread.
Where bodies are hidden, none is called.
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
    """A function that makes a text of a body: Protobuf, Avro, a pickle, or any other format of a program."""

    def __call__(self, topic: str, message: ReceivedMessage) -> str | None: ...


class Routes(Protocol):
    """A function that returns the pages that a package adds to a `rmqkit.console.Console`."""

    def __call__(self, console: Any) -> Iterable[OwnPage]: ...


class OwnPage(Struct, frozen=True, kw_only=True):
    """A page of a hook, at ``/{env}/own/{path}``.

    Attributes:
        path: letters, digits, ``-`` and ``_``.
        title: its link in the navigation.
        view: a coroutine function from `rmqkit.console.request.request.Ask` to a Starlette response, or to what
            `rmqkit.console.own_page` makes. It may ask the cluster through ``ask.admin``.
        live_s: seconds between its refreshes; 0: none.
    """

    path: str
    title: str
    view: Callable[[Any], Awaitable[Any]]
    live_s: float = 0.0


class Hooks:
    """The additions of all hooks. Raises SettingsError: a page's path is not valid in an address, or is there twice."""

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
        """The texts of bodies by the first hook that knows each, or what went wrong there; None: no hook knows it.
        One thread decodes them, for at most `DECODE_S`. A decoder that does not end by then is not called again: its
        thread cannot be ended."""
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
    """The hooks of installed packages. One that cannot be loaded is logged and left out."""
    found = []
    for point in entry_points(group=GROUP):
        try:
            found.append(point.load())
        except Exception:  # noqa: BLE001 - the outer edge of others' code
            _log.exception("console: hook %s of %s cannot be loaded", point.name, point.value)
    return found
