"""What a simulation replaces while it lasts: files, threads, ports, clocks, and the sources of chance.

=========================================  ============================================================================
replaced                                   by
=========================================  ============================================================================
`rmqkit.system.disk`, ``threads``          the disk and the threads of the world
`rmqkit.system.process`                    the number of the simulated process
`rmqkit.remoting.listening.bound_socket`   a port of the simulated network
`rmqkit.clock.SystemClock`                 the wall clock of the machine; the time of the world
`rmqkit.client.consumer.watch`             nothing: a thread in real time that looks for blocked loops
``time.thread_time``                       a clock that stands still: a slice of work is never over
`rmqkit.broker.archive.LogArchive`         a thread on the disk of the world, instead of a process that writes segments
``uuid.uuid4``, ``os.urandom``,            numbers of the seeded generator of `random`
``secrets.token_hex``
=========================================  ============================================================================

Code that reads ``time.time()`` or real files itself is not simulated.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import secrets
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from rmqkit.broker.archive import LogArchive
from rmqkit.client.consumer import watch
from rmqkit.client.runtime import runtime
from rmqkit.clock import SystemClock
from rmqkit.errors import RmqError
from rmqkit.remoting import listening
from rmqkit.store.archive import seal
from rmqkit.system import disk, process, threads
from rmqkit.testing.simulation import threads as simulated

if TYPE_CHECKING:
    from rmqkit.testing.simulation.world import World

__all__ = ["log_arrived", "replaced"]


@contextmanager
def replaced(world: World) -> Iterator[None]:
    """Replace the seams by those of a world."""
    with ExitStack() as stack:
        stack.enter_context(disk.replaced(world.files.functions()))
        stack.enter_context(threads.replaced(simulated.functions(world)))
        stack.enter_context(process.replaced({"number": lambda: _number(world)}))
        for holder, name, value in _others(world):
            stack.enter_context(_attribute(holder, name, value))
        stack.enter_context(_asyncgen_hooks(world))
        yield


def _others(world: World) -> list[tuple[Any, str, Any]]:
    def now_ms(_: SystemClock) -> int:
        current = world.current_process
        return world.now_ms if current is None else current.machine.now_ms()

    def bound_socket(family: int, address: tuple[Any, ...]) -> Any:
        current = world.current_process
        assert current is not None, "a port belongs to a simulated process"
        return world.network.bind(current, address[0], address[1])

    return [
        (SystemClock, "now_ms", now_ms),
        (SystemClock, "monotonic_ms", lambda _: world.now * 1000.0),
        (listening, "bound_socket", bound_socket),
        (runtime, "_instances", itertools.count()),
        (watch, "watch_loop", lambda: None),
        (watch, "unwatch_loop", lambda: None),
        (time, "thread_time", lambda: 0.0),
        (uuid, "uuid4", lambda: uuid.UUID(int=random.getrandbits(128), version=4)),
        (os, "urandom", random.randbytes),
        (secrets, "token_hex", lambda size: random.randbytes(size).hex()),
        (LogArchive, "_writing", _sealed_in_thread),
    ]


async def _sealed_in_thread(archive: LogArchive, line: bytes) -> bytes:
    """Do the work of the sealing process in a thread of the broker, which dies with the broker."""
    pool = threads.Pool(1, "seal")
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, seal.answer, line)
    finally:
        pool.shutdown(wait=False)


def _number(world: World) -> int:
    current = world.current_process
    return 1 if current is None else current.number


@contextmanager
def _attribute(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextmanager
def _asyncgen_hooks(world: World) -> Iterator[None]:
    """Close a dropped asynchronous generator on the loop of the process that dropped it."""

    def finalize(generator: Any) -> None:
        current = world.current_process
        if current is not None and current.is_alive:
            current.loop.create_task(generator.aclose())

    before = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(finalizer=finalize)
    try:
        yield
    finally:
        sys.set_asyncgen_hooks(*before)


def log_arrived(world: World, record: logging.LogRecord) -> None:
    """Enter a log record into the story. An unexpected error in it is an error of the world."""
    if world.is_closing:
        return
    current = world.current_process
    name = "outside" if current is None else current.name
    world.note("log", name, record.levelname, record.getMessage())
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and not isinstance(error, (OSError, RmqError)) and (current is None or current.is_alive):
        world.errors.append(f"{name}: {record.getMessage()}: {error!r}")
