"""The world of a simulation: one scheduler that owns time, machines, processes and their threads.

A `World` has a heap of events. An event has a time and a number, and the world runs events in this order. Nothing waits
in real time. Every process has an event loop of its own (`rmqkit.testing.simulation.loop`); the loop and each thread of
a process run in a greenlet. A greenlet gives up control only in these places, and the world chooses when it goes on:

============================  ======================================================================================
place                         the greenlet goes on
============================  ======================================================================================
the loop has no work          at its next timer, or when data, a connection or a result of a thread arrives
a call of `rmqkit.system`     after the time that the disk takes, or when a lock, event or queue is free
the process is paused         when the pause ends
the process was killed        never: no ``finally`` of a killed process runs while the world exists
============================  ======================================================================================

All chance comes from the seed. Each source of chance (a connection, a disk, a process) has a generator of its own,
seeded with its name, so that a change in one place does not shift the chance of all others. The order of callbacks
inside a loop is that of asyncio, which promises first in, first out. `World.trace` hashes what happens: two runs with
one seed have one hash.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import hashlib
import heapq
import itertools
import logging
import random
import sys
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from rmqkit import extras
from rmqkit.errors import RmqError
from rmqkit.testing.simulation import seams
from rmqkit.testing.simulation.disk import Disk, Files
from rmqkit.testing.simulation.loop import SimulatedLoop
from rmqkit.testing.simulation.network import Network

with extras.needed("simulation", "rmqkit.testing.simulation"):
    from greenlet import GreenletExit, greenlet

__all__ = ["Actor", "Machine", "Process", "ProcessDied", "World"]

START_MS = 1_800_000_000_000
"""Wall time at the start of each world, in milliseconds since the Unix epoch."""

Action = Callable[[], object]


class ProcessDied(GreenletExit):  # type: ignore[misc]  # greenlet has no types
    """Raised in a killed process, when the world is closed, by each call of a seam."""


class Actor:
    """A thread of a process: the thread of its event loop, or a thread that it started.

    Attributes:
        is_main: True for the thread of the event loop.
    """

    def __init__(self, process: Process, name: str, run: Callable[[], object], *, is_main: bool = False) -> None:
        self.process = process
        self.name = name
        self.is_main = is_main
        self._ticket = 0
        self._greenlet = greenlet(run, process.world.hub)

    @property
    def is_over(self) -> bool:
        """Return True if the function of the actor has returned, or its process was killed."""
        return self._greenlet.dead or not self.process.is_alive

    def wait(self) -> None:
        """Give up control until `wake`. Call this method only in the actor itself."""
        self.process.world.hub.switch()
        if not self.process.is_alive:
            raise ProcessDied

    def spend(self, seconds: float) -> None:
        """Give up control for a time."""
        self.wake(seconds)
        self.wait()

    def wake(self, seconds: float = 0.0) -> None:
        """Let the actor go on after a time. A later call replaces an earlier one."""
        self._ticket += 1
        self.process.world.after(seconds, functools.partial(self._go_on, self._ticket))

    def alarm(self, seconds: float) -> None:
        """Let the actor go on after a time-out: like `wake`, but nothing is in progress for the actor."""
        self._ticket += 1
        self.process.world.after(seconds, Alarm(self, self._ticket))

    def _go_on(self, ticket: int) -> None:
        process = self.process
        if ticket != self._ticket or self.is_over:
            return
        world = process.world
        if process.paused_until > world.now:
            world.at(process.paused_until, functools.partial(self._go_on, ticket))
            return
        self._ticket += 1  # a second event for the same wait has no effect
        before, world.actor = world.actor, self
        asyncio._set_running_loop(process.loop if self.is_main else None)
        try:
            self._greenlet.switch()
        finally:
            world.actor = before
            asyncio._set_running_loop(None)

    def end(self) -> None:
        """End the greenlet of a process that is not alive. The world calls this when it is closed."""
        if self._greenlet and not self._greenlet.dead:
            self._greenlet.throw(ProcessDied)


class Alarm:
    """The event that ends a wait after its time-out."""

    __slots__ = ("_actor", "_ticket")

    def __init__(self, actor: Actor, ticket: int) -> None:
        self._actor = actor
        self._ticket = ticket

    @property
    def is_over(self) -> bool:
        """Return True if the actor no longer waits for it."""
        return self._ticket != self._actor._ticket or self._actor.is_over

    def __call__(self) -> None:
        self._actor._go_on(self._ticket)


@dataclass(slots=True, eq=False)
class Machine:
    """A machine: an address, a disk, and a wall clock.

    Attributes:
        skew_ms: difference of the wall clock from the world's time.
        drift: by how much the wall clock goes too fast, as a share: 0.0001 are 100 µs in a second.
        is_dark: True after a loss of power, until a process is started.
    """

    world: World
    name: str
    host: str
    disk: Disk
    skew_ms: float = 0.0
    drift: float = 0.0
    is_dark: bool = False
    processes: list[Process] = field(default_factory=list)

    def now_ms(self) -> int:
        """Return the wall time in milliseconds."""
        return int(START_MS + self.world.now * 1000 * (1 + self.drift) + self.skew_ms)

    def lose_power(self) -> None:
        """Kill all processes, and lose what the disk had not synced. Peers get no sign until the machine runs again."""
        self.world.note("power", self.name)
        for process in self.processes:
            process.kill(is_silent=True)
        self.is_dark = True
        self.disk.lose_power()


class Process:
    """A simulated process. Its main coroutine runs on an event loop of its own.

    Attributes:
        loop_kind: the class of its event loop.
        number: the process's number, as `os.getpid` returns it.
        ended: True when the main coroutine has returned. ``error`` is its error, or None.
        on_end: called when the process has ended by itself.
        unhandled: errors that the event loop caught, because no code of the process did.
    """

    loop_kind: type[SimulatedLoop] = SimulatedLoop  # type: ignore[type-abstract]  # the rest is not supported

    def __init__(self, world: World, machine: Machine, name: str, number: int) -> None:
        self.world = world
        self.machine = machine
        self.name = name
        self.number = number
        self.is_alive = True
        self.ended = False
        self.error: BaseException | None = None
        self.unhandled: list[str] = []
        self.paused_until = 0.0
        self.calls_left: int | None = None
        self.on_end: Callable[[Process], object] | None = None
        self._on_death: Action = lambda: None
        self.actors: list[Actor] = []
        self.loop = self.loop_kind(self)
        machine.is_dark = False
        self.main = Actor(self, "main", self.loop.run, is_main=True)
        self.actors.append(self.main)
        machine.processes.append(self)

    def begin(self, main: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Start the main coroutine."""
        self.loop.call_soon(self._begin, main)

    def _begin(self, main: Callable[[], Coroutine[Any, Any, object]]) -> None:
        self._task = self.loop.create_task(main(), name=self.name)
        self._task.add_done_callback(self._main_ended)

    def _main_ended(self, task: asyncio.Task[object]) -> None:
        self.ended = True
        self.error = asyncio.CancelledError() if task.cancelled() else task.exception()
        self.world.note("ended", self.name, repr(self.error) if self.error else "")
        if not isinstance(self.error, (RmqError, OSError, asyncio.CancelledError, type(None))):
            self.world.errors.append(f"{self.name} ended: {self.error!r}")
        self.world.after(0.0, self._exit)

    def _exit(self) -> None:
        """End as a program does whose main function has returned: no thread goes on, and all connections close."""
        if self.is_alive:
            self.kill()
            if self.on_end is not None:
                self.on_end(self)

    def thread(self, run: Callable[[], object], name: str) -> Actor:
        """Start a thread."""
        actor = Actor(self, name, run)
        self.actors.append(actor)
        actor.wake()
        return actor

    def pause(self, seconds: float) -> None:
        """Stop all threads of the process for a time, like SIGSTOP or a long garbage collection."""
        self.world.note("pause", self.name, f"{seconds:.3f}")
        self.paused_until = max(self.paused_until, self.world.now + seconds)

    def kill(self, *, is_silent: bool = False) -> None:
        """Kill the process, like SIGKILL. ``is_silent``: its peers get no reset of their connections."""
        if not self.is_alive:
            return
        self.world.note("kill", self.name)
        self.is_alive = False
        self.machine.disk.process_ended(self)
        self.world.network.process_ended(self, is_silent=is_silent)

    def die_at_call(self, calls: int, *, then: Action = lambda: None) -> None:
        """Kill the process at one of its next calls of the disk: 1 is the next call. ``then``: called when it died."""
        self.calls_left, self._on_death = calls, then

    def before_call(self) -> None:
        """Count a call of the disk. Killed processes never return from it."""
        if not self.is_alive:
            raise ProcessDied
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left <= 0:
                self.kill()
                self.world.after(0.0, self._on_death)
                actor = self.world.actor
                assert actor is not None, "a process calls"
                assert actor.process is self, "the call is one of this process"
                actor.wait()  # for ever: the world ends it when it is closed

    def close(self) -> None:
        """End the greenlets and coroutines of the process, when the world is closed."""
        self.is_alive = False
        for actor in self.actors:
            actor.end()
        self.loop.discard()


class World:
    """A simulated world. Use it as a context manager: inside, `rmqkit.system` belongs to the simulation.

    Args:
        seed: the number that decides everything left to chance.

    Attributes:
        now: seconds since the start of the world.
        actor: the thread that runs, or None.
        network, machines: the network, and the machines by name.
        is_closing: True while the world ends; from then on, each call of a seam raises `ProcessDied`.
        errors: what no program may do, such as an exception that nothing handles; empty in a sound run.
    """

    def __init__(self, seed: int, *, keeps_story: bool = False) -> None:
        self.seed = seed
        self.now = 0.0
        self.actor: Actor | None = None
        self.hub = greenlet.getcurrent()
        self.machines: dict[str, Machine] = {}
        self.processes: list[Process] = []
        self.errors: list[str] = []
        self.story: list[str] | None = [] if keeps_story else None
        self.events = 0
        self.is_closing = False
        self._heap: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()
        self._process_numbers = itertools.count(1000)
        self._hash = hashlib.blake2b(digest_size=16)
        self._stack = ExitStack()
        self.network = Network(self)
        self.files = Files(self)
        self.thread_chance = self.chance("threads")

    # ---- inside and outside

    def __enter__(self) -> Self:
        self.hub = greenlet.getcurrent()
        with ExitStack() as stack:
            stack.enter_context(_seeded(self.seed))
            stack.enter_context(_without_collection())
            stack.enter_context(seams.replaced(self))
            stack.enter_context(_listening_to_logs(self))
            stack.callback(self._close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def _close(self) -> None:
        self.is_closing = True
        before, sys.unraisablehook = sys.unraisablehook, lambda _: None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # a coroutine that a dead process did not await
                self._end_all()
        finally:
            sys.unraisablehook = before

    def _end_all(self) -> None:
        for process in self.processes:
            process.close()
        self._heap.clear()
        for machine in self.machines.values():
            machine.disk.close()
        gc.collect()  # here, where dropped coroutines may fail: their processes are dead

    # ---- machines and processes

    def machine(self, name: str) -> Machine:
        """Return a machine; make it at the first call."""
        if name not in self.machines:
            host = f"10.0.{len(self.machines) // 250}.{len(self.machines) % 250 + 1}"
            self.machines[name] = Machine(self, name, host, Disk(self, name))
        return self.machines[name]

    def process(self, name: str, main: Callable[[], Coroutine[Any, Any, object]], *, on: str = "") -> Process:
        """Start a process. ``main``: a coroutine function. ``on``: its machine; by default one with its name."""
        self.note("start", name)
        process = Process(self, self.machine(on or name), name, next(self._process_numbers))
        self.processes.append(process)
        process.begin(main)
        return process

    @property
    def current_process(self) -> Process | None:
        """The process that runs, or None between events."""
        return None if self.actor is None else self.actor.process

    # ---- time

    @property
    def now_ms(self) -> int:
        """Wall time of a machine with a right clock, in milliseconds."""
        return START_MS + int(self.now * 1000)

    def at(self, time: float, action: Action) -> None:
        """Run a function at a time, in seconds since the start of the world."""
        heapq.heappush(self._heap, (max(time, self.now), next(self._numbers), action))

    def after(self, seconds: float, action: Action) -> None:
        """Run a function after a time."""
        heapq.heappush(self._heap, (self.now + seconds, next(self._numbers), action))

    def run(self, *, until: float, unless: Callable[[], bool] = lambda: False) -> bool:
        """Run events until a time, or until a condition is true. Return True if the condition became true.
        ``until``: seconds since the start of the world. ``unless``: looked at after each event."""
        heap = self._heap
        while not unless():
            if not heap or heap[0][0] > until:
                self.now = max(self.now, until)
                return False
            self.now, _, action = heapq.heappop(heap)
            self.events += 1
            action()
        return True

    def wait_outside(self, is_true: Callable[[], bool], end: float | None) -> bool:
        """Wait in code that belongs to no process. Raises AssertionError: here, all code belongs to a process."""
        raise AssertionError("only a thread of a simulated process can wait")

    # ---- chance and story

    def chance(self, *names: object) -> random.Random:
        """Return the generator of a source of chance."""
        return random.Random(f"{self.seed} {' '.join(map(str, names))}")

    def check_open(self) -> None:
        """Raise ProcessDied if the world is closing."""
        if self.is_closing:
            raise ProcessDied

    def note(self, kind: str, *details: object) -> None:
        """Enter an event into the trace, and into the story if it is kept."""
        if self.is_closing:
            return
        line = f"{self.now:.6f} {kind} {' '.join(map(str, details))}"
        self._hash.update(line.encode())
        if self.story is not None:
            self.story.append(line)

    @property
    def trace(self) -> str:
        """The hash of everything that was noted so far."""
        return self._hash.hexdigest()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generator of the module `random`, which the programs use."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Switch off the collection of cycles: finalizers must not run at a time that depends on the interpreter."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()  # the collection at the end does not look at the objects that exist already
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextmanager
def _listening_to_logs(world: World) -> Iterator[None]:
    """Put the log lines of the programs into the story, and their unexpected errors into `World.errors`."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seams.log_arrived(world, record)

    logger, handler = logging.getLogger("rmqkit"), Handler()
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO if world.story is not None else logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before
