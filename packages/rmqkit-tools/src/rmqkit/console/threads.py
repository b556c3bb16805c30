"""Calls of blocking functions, each in its own thread and with a time limit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


class _Daemons(Executor):
    """An executor with a daemon thread for each call. Unlike `ThreadPoolExecutor`, it never delays the process exit."""

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
    """Return the result of ``call`` or raise its error. The caller must limit the number of threads. Raises
    TimeoutError: the call took longer. A thread cannot be stopped: it continues, and its result is dropped."""
    async with asyncio.timeout(seconds):
        return await asyncio.get_running_loop().run_in_executor(_DAEMONS, call)
