"""Tells of code that keeps an event loop from going on, and where: a handler that blocks stops everything else.

A thread looks twice a second whether the loop still calls what is due. After a second without that it takes the stack
of the loop's thread, `sys._current_frames`, and logs the place in the program's own code, and the innermost one. What
asyncio waits in is no such place; nor is anything told while the thread itself came late, as then all of the process
stood still. There is one thread for each loop, from the first consumer's start to the last one's end, and nothing is
done per message.
"""

from __future__ import annotations

import asyncio
import logging
import os
import selectors
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

__all__ = ["Watchdog", "let_go", "watch"]

STILL_SECONDS = 1.0
"""How long a loop may stand still before that is told."""
_LOOKS = 4
"""Looks in that time."""
_LIBRARY = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(asyncio.__file__).parent}{os.sep}", selectors.__file__)
_SAID = (
    "the event loop stands still for %.1f s in %s: let a handler that blocks be a plain function, which runs in a "
    "thread, or await asyncio.to_thread(...)"
)

_log = logging.getLogger(__name__)
_watchdogs: dict[asyncio.AbstractEventLoop, Watchdog] = {}


class Watchdog:
    """Watches the running loop until `stop`; ``users`` are those who want that."""

    def __init__(self, still_seconds: float = STILL_SECONDS) -> None:
        self.users = 0
        self._still_seconds = still_seconds
        self._pause = still_seconds / _LOOKS
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._beaten = time.monotonic()
        self._ended = threading.Event()
        self._timer: asyncio.Handle = self._loop.call_soon(self._beat)
        self._thread = threading.Thread(target=self._run, name="rmqkit watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._timer.cancel()
        self._ended.set()
        self._thread.join(1.0)  # it wakes up at once

    def _beat(self) -> None:
        self._beaten = time.monotonic()
        self._timer = self._loop.call_later(self._pause, self._beat)

    def _run(self) -> None:
        told_of = looked = 0.0
        while not self._ended.wait(self._pause):
            before, looked = looked, time.monotonic()
            is_late = before and looked - before > 2 * self._pause
            beaten = self._beaten
            if is_late or beaten == told_of or looked - beaten < self._still_seconds + self._pause:
                continue
            frame = sys._current_frames().get(self._loop_thread)
            places = list(_places(frame))
            if beaten == self._beaten and places:
                told_of = beaten
                _log.warning(_SAID, looked - beaten, ", now ".join(places))


def watch() -> None:
    """Watch the running loop, as somebody starts on it."""
    loop = asyncio.get_running_loop()
    if loop not in _watchdogs:
        for ended in [one for one in _watchdogs if one.is_closed()]:
            _watchdogs.pop(ended).stop()
        _watchdogs[loop] = Watchdog(STILL_SECONDS)
    _watchdogs[loop].users += 1


def let_go() -> None:
    """Somebody who called `watch` ends."""
    loop = asyncio.get_running_loop()
    watchdog = _watchdogs.get(loop)
    if watchdog is None:
        return
    watchdog.users -= 1
    if not watchdog.users:
        _watchdogs.pop(loop).stop()


def _places(frame: FrameType | None) -> Iterator[str]:
    """Where the program called what the loop waits for, and where that is now; nothing while the loop is idle."""
    innermost = frame
    while frame is not None and not _is_called_by_library(frame):
        frame = frame.f_back
    if frame is not None and innermost is not None:
        yield _place(frame)
        if innermost is not frame:
            yield _place(innermost)


def _is_called_by_library(frame: FrameType) -> bool:
    """Whether a frame is the program's, and its caller asyncio or a client."""
    caller = frame.f_back
    if caller is None or frame.f_code.co_filename.startswith(_LIBRARY):
        return False
    return caller.f_code.co_filename.startswith(_LIBRARY)


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"
