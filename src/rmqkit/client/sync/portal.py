"""One event loop in a thread, for programs that have none: work is handed over and waited for.

The thread starts with the first call and ends with the interpreter, after closing what is still open. It is a daemon,
so a program that hangs elsewhere can still be ended; a fork's child gets a portal of its own. Source: style.md §11.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from rmqkit.client.runtime import process

T = TypeVar("T")

_EXIT_TIMEOUT_SECONDS = 10.0


class _Closable(Protocol):
    async def close(self) -> None: ...


class Portal:
    """A loop thread of one process; every method may be called from any other thread.
    ``is_from_parent`` says that the thread is in the parent of this process."""

    def __init__(self) -> None:
        self.is_from_parent = False
        self._loop = _new_loop()
        self._clients: weakref.WeakSet[_Closable] = weakref.WeakSet()
        # A daemon: a program that forgets to close ends all the same, and `_exit` closes for it.
        self._thread = threading.Thread(target=self._run, name="rmqkit portal", daemon=True)
        self._thread.start()
        atexit.register(self._exit)

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Call a function on the loop and wait for what it returns; an interrupt cancels it.
        Raises RuntimeError: called on the loop itself, which would wait for itself."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("a blocking client cannot be used on its own loop: use rmqkit's coroutines there")
        running = asyncio.run_coroutine_threadsafe(_awaited(work), self._loop)
        try:
            return running.result()
        except BaseException:
            # An interrupt ends the wait only; without this the coroutine would go on with nobody to tell.
            running.cancel()
            raise

    def close_at_exit(self, client: _Closable) -> None:
        """Close a client when the interpreter ends, if it still exists then."""
        self._clients.add(client)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        # In this thread: generators left open may only be closed on their own loop.
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _exit(self) -> None:
        if self.is_from_parent or not self._thread.is_alive():
            return
        # Bounded: a broker that does not answer must not keep the interpreter from ending.
        closing = asyncio.run_coroutine_threadsafe(self._close_clients(), self._loop)
        with contextlib.suppress(concurrent.futures.TimeoutError):
            closing.result(_EXIT_TIMEOUT_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_EXIT_TIMEOUT_SECONDS)

    async def _close_clients(self) -> None:
        await asyncio.gather(*(client.close() for client in list(self._clients)), return_exceptions=True)


def portal() -> Portal:
    """The portal of this process."""
    with _own.lock:
        if _own.portal is None:
            _own.portal = Portal()
        return _own.portal


class _Own:
    """Holds the portal of this process, at most one."""

    def __init__(self) -> None:
        self.portal: Portal | None = None
        self.lock = threading.Lock()
        self._from_parent: list[Portal] = []

    def forked(self) -> bool:
        if self.portal is not None:
            self.portal.is_from_parent = True
            self._from_parent.append(self.portal)
        self.portal, self.lock = None, threading.Lock()  # the thread that held the lock is not here
        return True


_own = _Own()
process.register_after_fork(_own, _Own.forked)


async def _awaited(work: Callable[[], Awaitable[T]]) -> T:
    return await work()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
