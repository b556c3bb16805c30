"""Calls of blocking libraries, each in a thread of its own and with a time limit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


class _Daemons(Executor):
    """A thread for each call. The process can end while one runs: a `ThreadPoolExecutor` would wait for it."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - raised again where the result is awaited
                future.set_exception(error)

        future.set_running_or_notify_cancel()
        threading.Thread(target=run, name=getattr(fn, "__qualname__", "call"), daemon=True).start()
        return future


_DAEMONS = _Daemons()


async def in_thread(call: Callable[[], T], seconds: float) -> T:
    """Return what ``call`` returns, or raise what it raises. The caller bounds the number of threads.
    Raises TimeoutError: it took longer. Its thread cannot be stopped and continues; the result is dropped."""
    async with asyncio.timeout(seconds):
        return await asyncio.get_running_loop().run_in_executor(_DAEMONS, call)
