"""The replacements of a simulation while it lasts: files, threads, ports, clocks, and the sources of chance.

=========================================  ============================================================================
replaced                                   by
=========================================  ============================================================================
`rmqkit.system.disk`, ``threads``          the disk and the threads of the world
`rmqkit.system.process`                    the number of the simulated process
`rmqkit.remoting.listening.bound_socket`   a port of the simulated network
`rmqkit.clock.SystemClock`                 the wall clock of the machine; the time of the world
`rmqkit.client.runtime.process.portal`     the loop of the process that calls it
`rmqkit.client.consumer.watch`             nothing: a thread in real time that looks for blocked loops
``time.thread_time``                       a clock that stands still: a slice of work is never over
`rmqkit.broker.archive.LogArchive`         a thread on the disk of the world, instead of a process that writes segments
``uuid.uuid4``, ``os.urandom``,            numbers of the seeded generator of `random`
``secrets.token_hex``
hashes of connections, of tasks and of     numbers and fields, instead of addresses: sets of them have one order.
  values (frozen structs)                  Text needs ``PYTHONHASHSEED=0``
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
from typing import Any

import msgspec

from rmqkit.broker.archive import LogArchive
from rmqkit.client.consumer import watch
from rmqkit.client.runtime import process as client_process
from rmqkit.client.runtime import runtime
from rmqkit.clock import SystemClock
from rmqkit.errors import RmqError
from rmqkit.remoting import listening
from rmqkit.remoting.connection import Link
from rmqkit.system import disk, process, threads
from rmqkit.testing.simulation import threads as simulated
from rmqkit.testing.simulation.portal import Portals
from rmqkit.testing.simulation.scheduler import Scheduler

__all__ = ["asyncgen_hooks", "log_arrived", "replaced"]


@contextmanager
def replaced(world: Scheduler) -> Iterator[None]:
    """Replace the seams by those of a world."""
    with ExitStack() as stack:
        stack.enter_context(disk.replaced(world.files.functions()))
        stack.enter_context(threads.replaced(simulated.functions(world)))
        stack.enter_context(process.replaced({"number": lambda: _number(world)}))
        for holder, name, value in _others(world):
            stack.enter_context(_attribute(holder, name, value))
        for kind in _hashed_by_address():
            stack.enter_context(_attribute(kind, "__hash__", _hash_of_fields))
        numbers = itertools.count()
        stack.enter_context(_attribute(Link, "__hash__", lambda link: _number_of(link, numbers)))
        stack.enter_context(asyncgen_hooks(world))
        yield


def _others(world: Scheduler) -> list[tuple[Any, str, Any]]:
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
        (client_process, "_own", Portals(world)),
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
    from rmqkit.store.archive import seal  # here: it needs pyarrow

    pool = threads.Pool(1, "seal")
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, seal.answer, line)
    finally:
        pool.shutdown(wait=False)


def _number(world: Scheduler) -> int:
    current = world.current_process
    return 1 if current is None else current.number


def _hashed_by_address() -> list[type]:
    """Return the kinds of values with a hash that depends on the address of their class."""
    found: list[type] = []
    waiting: list[type] = [msgspec.Struct]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind is not msgspec.Struct and kind.__struct_config__.frozen:  # type: ignore[attr-defined]
            found.append(kind)
    return found


def _number_of(link: Link, numbers: Iterator[int]) -> int:
    known = link.__dict__
    if "_number" not in known:
        known["_number"] = next(numbers)
    number: int = known["_number"]
    return number


def _hash_of_fields(value: Any) -> int:
    return hash(msgspec.structs.astuple(value))


@contextmanager
def _attribute(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(holder).get(name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(holder, name)
        else:
            setattr(holder, name, before)


@contextmanager
def asyncgen_hooks(world: Scheduler) -> Iterator[None]:
    """Close a dropped asynchronous generator on the loop of the process that dropped it."""

    def finalize(generator: Any) -> None:
        current = world.current_process
        if current is not None and current.is_alive:
            current.loop.close_soon(generator)

    before = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(finalizer=finalize)
    try:
        yield
    finally:
        sys.set_asyncgen_hooks(*before)


def log_arrived(world: Scheduler, record: logging.LogRecord) -> None:
    """Enter a log record into the story. An unexpected error in it is an error of the world."""
    if world.is_closing:
        return
    current = world.current_process
    name = "outside" if current is None else current.name
    world.note("log", name, record.levelname, record.getMessage())
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and not isinstance(error, (OSError, RmqError)) and (current is None or current.is_alive):
        world.errors.append(f"{name}: {record.getMessage()}: {error!r}")
