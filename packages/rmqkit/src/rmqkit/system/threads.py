"""The seam to threads: the only place where the store creates threads, locks and pools.

Call ``threads.Lock()``, never a name that was imported from this module: `replaced` then replaces it everywhere.
An object belongs to a store, a table or a queue, and is created with it. An object of a module would exist before a
simulator replaces the seam, and all stores of a process would share it.

``asyncio.to_thread`` and ``run_in_executor`` are not here: the event loop owns them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from rmqkit.system.seam import replaced_in

__all__ = ["Empty", "Event", "Future", "Lock", "Pool", "Queue", "RLock", "Thread", "current_name", "replaced"]

Empty = queue.Empty
"""The error of ``Queue.get`` after its timeout. It is not replaced."""

Lock = threading.Lock
"""A lock, used as a context manager."""
RLock = threading.RLock
"""A lock that its holder can acquire again."""
Event = threading.Event
"""A flag with ``set``, ``is_set`` and ``wait(timeout)``."""
Queue = queue.SimpleQueue
"""An unbounded queue with ``put(item)`` and ``get(timeout=seconds)``, which raises `Empty`."""
Pool = ThreadPoolExecutor
"""A pool of threads, ``Pool(workers, name)``, with ``submit``, ``map`` and ``shutdown``, also as a context manager."""


class Thread(threading.Thread):
    """A daemon thread with ``start``, ``join`` and ``is_alive``."""

    def __init__(self, target: Callable[..., object], args: Iterable[Any] = (), *, name: str) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)


def current_name() -> str:
    """Return the name of the calling thread."""
    return threading.current_thread().name


_REPLACEABLE = ("Event", "Lock", "Pool", "Queue", "RLock", "Thread", "current_name")


def replaced(by: Mapping[str, Callable[..., Any]]) -> AbstractContextManager[None]:
    """Replace names of this module while the context is entered. Raises ValueError: a name is unknown."""
    return replaced_in(__name__, _REPLACEABLE, by)
