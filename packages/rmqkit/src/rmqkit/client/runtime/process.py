"""The process of the clients: signals end a run, a fork separates clients, and a thread has a loop for programs without
a loop.

==================  ==================================================================================================
event               effect
==================  ==================================================================================================
`run` is called     clients that are not started are started, in the order given
SIGINT, SIGTERM     consumers take no more messages, wait for their handlers (``drain_ms``), save their offsets and
                    leave; then producers, with which handlers may send, finish running sends and leave
a second signal     ends the process immediately, as without `run`
every client is     `run` returns
closed
``os.fork``         connections, loops and threads belong to the parent: running objects refuse to be used in the child
                    (`register_after_fork`)
==================  ==================================================================================================

If a loop cannot watch signals, as on Windows, Python's own signal handlers call it. `run` works only in the main
thread.

`Portal` is the loop thread. Other threads submit work and wait for the result. The loop starts with the first call.
When the interpreter exits, the loop closes the remaining clients and stops. The thread is a daemon, so that a program
that hangs elsewhere can still be ended. The child of a fork gets its own portal.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import os
import signal
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from rmqkit.errors import ClientError

_log = logging.getLogger(__name__)
C = TypeVar("C", bound="_HasOrder")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_EXIT_TIMEOUT_SECONDS = 10.0

_hooks_after_fork: weakref.WeakKeyDictionary[object, Callable[[Any], bool]] = weakref.WeakKeyDictionary()
_kept: list[object] = []

T = TypeVar("T")


class Runs(Protocol):
    """A client that `run` can run. ``closes_last`` is True if handlers of the other clients may use it."""

    @property
    def closes_last(self) -> bool: ...

    @property
    def is_new(self) -> bool: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def wait_closed(self) -> None: ...


async def run(*clients: Runs) -> None:
    """Run clients until SIGINT or SIGTERM, then close them::

        asyncio.run(rmqkit.run(consumer, producer))

    The clients are started if necessary, producers first. On a signal, consumers stop taking messages, wait for their
    handlers, save their offsets and leave the group. Producers close after them. The function also returns when all
    clients are closed in another way. A second signal ends the process immediately.

    Raises ClientError: there are no clients, or this is not the main thread, which is the only thread that receives
    signals.
    Raises NoRoute: the same as for `start` of the clients."""
    if not clients:
        raise ClientError("run() has no clients: give it at least one")
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    with calling_on_signals(asked.set, loop):
        working = [
            asyncio.create_task(_start_and_wait(clients), name="clients that run"),
            asyncio.create_task(asked.wait(), name="signals"),
        ]
        try:
            await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
            # Close consumers first, because their last handlers may still send with the producers.
            for together in closing_order(clients):
                await asyncio.gather(*(client.close() for client in together))
    if not working[0].cancelled():
        working[0].result()


async def _start_and_wait(clients: Sequence[Runs]) -> None:
    for client in starting_order(clients):
        if client.is_new:
            await client.start()
    for client in clients:
        await client.wait_closed()


class _HasOrder(Protocol):
    @property
    def closes_last(self) -> bool: ...


def closing_order(clients: Sequence[C]) -> list[list[C]]:
    """Split clients into the clients that close first, and the clients that close after them."""
    first = [client for client in clients if not client.closes_last]
    return [first, [client for client in clients if client.closes_last]]


def starting_order(clients: Sequence[C]) -> list[C]:
    """Sort producers before consumers, because the handlers of consumers may be called before the start of the
    consumers returns.
    """
    first, last = closing_order(clients)
    return [*last, *first]


@contextlib.contextmanager
def calling_on_signals(tell: Callable[[], object], loop: asyncio.AbstractEventLoop | None = None) -> Iterator[None]:
    """Call a function on the first SIGINT or SIGTERM. With a loop, call it on the loop.
    Raises ClientError: this is not the main thread."""
    if threading.current_thread() is not threading.main_thread():
        raise ClientError("run() is not in the main thread, where signals arrive: use 'with' and close() here")
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            if loop is not None:
                with contextlib.suppress(NotImplementedError):
                    loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not from Python

    def on_signal(number: int, frame: Any = None) -> None:
        restore()
        # The old handlers are active again: a second signal ends the process while running work is finished.
        _log.info("%s: finishing the work in progress", signal.Signals(number).name)
        tell()

    def on_python_signal(number: int, frame: Any) -> None:
        if loop is None:
            on_signal(number)
        else:
            # Python calls this between two instructions. If the loop sleeps in select, it must be woken up.
            loop.call_soon_threadsafe(on_signal, number)

    for number in _SIGNALS:
        if loop is not None:
            try:
                loop.add_signal_handler(number, on_signal, number)
                continue
            except NotImplementedError:
                pass
        signal.signal(number, on_python_signal)
    try:
        yield
    finally:
        restore()


def register_after_fork(one: T, hook: Callable[[T], bool]) -> None:
    """Call ``hook(one)`` in every child that is forked while ``one`` exists, and again in a child of a child.

    The hook returns True if ``one`` runs in the parent. The child then holds a reference to ``one`` for ever, because
    the cleanup of ``one`` would change the selector that both processes share."""
    _hooks_after_fork[one] = hook


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        # Copy the items first, because a hook may register others, and the dictionary must not change during the
        # iteration.
        after_in_child=lambda: _kept.extend([one for one, hook in list(_hooks_after_fork.items()) if hook(one)])
    )


class _Closable(Protocol):
    async def close(self) -> None: ...


class Portal:
    """A loop thread of one process. Every method can be called from any other thread. ``is_from_parent`` is True if the
    thread belongs to the parent of this process."""

    def __init__(self) -> None:
        self.is_from_parent = False
        self._loop = _new_loop()
        self._clients: weakref.WeakSet[_Closable] = weakref.WeakSet()
        # The thread is a daemon, so that a program that forgets to close can exit. `_exit` closes the clients.
        self._thread = threading.Thread(target=self._run, name="rmqkit portal", daemon=True)
        self._thread.start()
        atexit.register(self._exit)

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Call a function on the loop and return its result. An interrupt cancels the call.
        Raises RuntimeError: the caller runs on the loop, which would then wait for itself."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("a blocking client cannot be used on its own loop: use rmqkit's coroutines there")
        running = self.submit(work)
        try:
            return running.result()
        except BaseException:
            # An interrupt only ends the wait. Without this call, the coroutine would continue without a caller.
            running.cancel()
            raise

    def submit(self, work: Callable[[], Awaitable[T]]) -> concurrent.futures.Future[T]:
        """Call a function on the loop and return the future of its result."""
        return asyncio.run_coroutine_threadsafe(_awaited(work), self._loop)

    def close_at_exit(self, client: _Closable) -> None:
        """Close a client at the exit of the interpreter if the client still exists."""
        self._clients.add(client)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        # Close the generators in this thread, because open generators can only be closed on their own loop.
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _exit(self) -> None:
        if self.is_from_parent or not self._thread.is_alive():
            return
        # Limit the wait: a broker that does not answer must not prevent the exit.
        closing = asyncio.run_coroutine_threadsafe(self._close_clients(), self._loop)
        with contextlib.suppress(concurrent.futures.TimeoutError):
            closing.result(_EXIT_TIMEOUT_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_EXIT_TIMEOUT_SECONDS)

    async def _close_clients(self) -> None:
        await asyncio.gather(*(client.close() for client in list(self._clients)), return_exceptions=True)


def portal() -> Portal:
    """Return the portal of this process."""
    with _own.lock:
        if _own.portal is None:
            _own.portal = Portal()
        return _own.portal


class _Own:
    """The holder of this process's portal. It is empty until the first call of `portal`."""

    def __init__(self) -> None:
        self.portal: Portal | None = None
        self.lock = threading.Lock()
        self._from_parent: list[Portal] = []

    def forked(self) -> bool:
        if self.portal is not None:
            self.portal.is_from_parent = True
            self._from_parent.append(self.portal)
        self.portal, self.lock = None, threading.Lock()  # the thread that held the lock does not exist here
        return True


_own = _Own()
register_after_fork(_own, _Own.forked)


async def _awaited(work: Callable[[], Awaitable[T]]) -> T:
    return await work()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
