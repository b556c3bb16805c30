"""The end of the open responses when the web server stops.

A web server that gets SIGTERM or SIGINT waits until its open responses are complete. Those of this package last until
their streams are finished, which may take hours. `ends_with_server` completes them when the signal arrives, and passes
the signal on to the handler that was there before. Browsers connect again, to another instance or to the next process,
and continue after their last event.

A response that waits for a slow browser is completed only when the browser has read the data.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import FrameType

__all__ = ["OPEN", "end_responses", "ends_with_server"]

OPEN: set[asyncio.Task[None]] = set()
"""The tasks of open responses that wait for a disconnect. A response whose task is cancelled completes its body."""


def end_responses() -> None:
    """Complete all open responses of this process. Call this function on the event loop."""
    for task in list(OPEN):
        task.cancel()


@asynccontextmanager
async def ends_with_server() -> AsyncIterator[None]:
    """Complete all open responses when the process gets SIGTERM or SIGINT. Enter this context in the lifespan of the
    application::

        @asynccontextmanager
        async def lifespan(app):
            async with rmqkit.streams.embedded("data") as app.state.streams, ends_with_server():
                yield

    Outside of the main thread, where Python cannot handle signals, it has no effect."""
    before: dict[signal.Signals, Callable[[int, FrameType | None], object]] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            handler = signal.getsignal(number)
            if callable(handler):  # otherwise the signal ends the process at once, or is ignored
                before[number] = handler
                signal.signal(number, partial(_handle, asyncio.get_running_loop(), handler))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handle(
    loop: asyncio.AbstractEventLoop,
    handler: Callable[[int, FrameType | None], object],
    number: int,
    frame: FrameType | None,
) -> None:
    loop.call_soon_threadsafe(end_responses)
    handler(number, frame)
