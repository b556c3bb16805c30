"""The simulated world of one test: one process on this machine, with real files.

`rmqkit.testing.simulation` has the scheduler: one heap of events, greenlets instead of threads, connections in memory.
This module adds what tests of single servers and clients need.

=================================  ===================================================================================
replaced                           by
=================================  ===================================================================================
the network                        all hosts are this machine, so a test may connect from and to any address. TLS is
                                   asyncio's own
`rmqkit.system.threads`            greenlets of the world; ``run_in_executor`` and ``to_thread`` as well
`rmqkit.clock.SystemClock`         the time of the world
``socket.create_connection``       a blocking socket of the world, for threads: foreign clients, ``urllib``, urllib3
``time.sleep``                     time that passes in the world. `subprocess` sleeps in real time: programs are real
a long wait for a real thread      a RuntimeError: the threads of a world are greenlets
=================================  ===================================================================================

Files, the process's number, and ids are real.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import heapq
import io
import itertools
import math
import os
import random
import socket
import ssl as tls
import subprocess
import sys
import threading
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

from rmqkit.client.consumer import watch
from rmqkit.clock import SystemClock
from rmqkit.remoting import listening
from rmqkit.system import threads
from rmqkit.testing.simulation import seams
from rmqkit.testing.simulation import threads as simulated
from rmqkit.testing.simulation.loop import SimulatedLoop
from rmqkit.testing.simulation.network import BoundSocket, Network
from rmqkit.testing.simulation.world import Alarm, Machine, Process, World

__all__ = ["VirtualLoop", "VirtualWorld"]

T = TypeVar("T")

_ANY = ("0.0.0.0", "::")
_REAL_SLEEP, _REAL_CONNECTION = time.sleep, socket.create_connection
_TURN_SECONDS = 1e-5
"""Time that passes in each loop iteration, so that code which yields until something happens sees it happen."""
_REAL_SECONDS = 2.0
"""The time that real threads of other libraries get to start or stop. A greenlet would never notify the waiting one."""
_IDLE_IN_A_ROW = 100
"""After so many looks at conditions, with no event between them, a condition will never hold."""


class VirtualLoop(SimulatedLoop, asyncio.BaseEventLoop):
    """The event loop of a test. It is a `BaseEventLoop`, because connections write differently on other loops."""

    work_seconds = 0.000002
    _debug = False

    set_exception_handler = asyncio.BaseEventLoop.set_exception_handler
    get_exception_handler = asyncio.BaseEventLoop.get_exception_handler
    call_exception_handler = asyncio.BaseEventLoop.call_exception_handler
    default_exception_handler = asyncio.BaseEventLoop.default_exception_handler

    def __init__(self, process: Process) -> None:
        asyncio.BaseEventLoop.__init__(self)
        SimulatedLoop.__init__(self, process)
        self._pools: dict[Executor, simulated.Pool] = {}

    def _collect(self) -> bool:
        """Make due timers ready, after the data and threads that are due: a real loop polls in each iteration."""
        world = self._world
        world.now += _TURN_SECONDS
        if world.has_due:
            self._process.main.spend(0.0)
        return super()._collect()

    async def idle(self) -> None:
        """Wait until no work is left and time would jump to the next timer."""
        future = self.create_future()
        self._world.idle.append(future)
        await future

    def go_on(self, seconds: float) -> None:
        """Advance the time, as if the loop had stood still."""
        self._world.now += seconds

    def call_soon(self, callback, *args, context=None):
        if threading.get_ident() != self._world.thread:
            raise RuntimeError("a real thread calls the loop of a simulated world: mark the test real_time")
        return super().call_soon(callback, *args, context=context)

    call_soon_threadsafe = call_soon

    def run_in_executor(self, executor, func, *args):
        if executor is None or isinstance(executor, simulated.Pool):
            return super().run_in_executor(executor, func, *args)
        pool = self._pools.get(executor)
        if pool is None:
            workers, name = getattr(executor, "_max_workers", 32), getattr(executor, "_thread_name_prefix", "pool")
            pool = self._pools[executor] = simulated.Pool(self._world, workers, name)
        return asyncio.wrap_future(pool.submit(func, *args), loop=self)

    async def getaddrinfo(self, host, port, **options):
        return socket.getaddrinfo(host, port, **options)

    async def create_connection(
        self, protocol_factory, host=None, port=None, *, ssl=None, local_addr=None, server_hostname=None, **others
    ):
        assert "sock" not in others, "a socket of the kernel needs real_time"
        network = self._world.network
        if not ssl:
            return await network.connect(self._process, protocol_factory, host, port, local_addr)
        protocol, shaken = protocol_factory(), self.create_future()
        context = tls.create_default_context() if ssl is True else ssl
        name = host if server_hostname is None else server_hostname
        layer = SSLProtocol(self, protocol, context, shaken, server_hostname=name)
        transport, _ = await network.connect(self._process, lambda: layer, host, port, local_addr)
        try:
            await shaken
        except BaseException:
            transport.close()
            raise
        return layer._app_transport, protocol

    async def create_server(self, protocol_factory, host=None, port=None, *, sock=None, ssl=None, **_):
        network = self._world.network
        hosts = [host] if host is None or isinstance(host, str) else host
        bound = [sock] if sock is not None else [network.bind(self._process, one or "", port or 0) for one in hosts]
        for one in bound:
            assert isinstance(one, BoundSocket), "a socket of the kernel needs real_time"
            one.listen()

        def secured():
            return SSLProtocol(self, protocol_factory(), ssl, None, server_side=True)

        return network.serve(self._process, secured if ssl else protocol_factory, bound)

    def is_running(self) -> bool:
        actor = self._world.actor
        return actor is not None and actor.is_main


class _Network(Network):
    """A network whose hosts are all this machine."""

    def __init__(self, world: VirtualWorld) -> None:
        super().__init__(world)
        self._connects = itertools.count()

    def bind(self, process, host, port):
        """Reserve a port. As with SO_REUSEADDR, a port of all addresses may be bound beside one that does not listen.
        Raises OSError: the port is in use, or the address is another machine's."""
        host = {"": "0.0.0.0", "localhost": "127.0.0.1"}.get(host, host)
        for (other, taken), bound in self._bound.items():
            is_near = (":" in other) == (":" in host) and {host, other} & set(_ANY)
            if taken == port and is_near and bound.listens:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        if host not in (*_ANY, "::1") and not host.startswith("127."):
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                probe.bind((host, 0))
        return self.reserve(process, host, port)

    async def connect(self, process, protocol_factory, host, port, local_addr=None):
        """Open a connection. Raises OSError: the host has no address, or no server listens on the port."""
        if host != "127.0.0.1":
            host = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        port, own = int(port), local_addr[0] if local_addr else host
        name = f"{own}>{host}:{port}#{next(self._connects)}"
        await asyncio.sleep(2 * self.delay(own, host, self.world.chance("connect", name)))
        bound = self._bound.get((host, port)) or self._bound.get((_ANY[":" in host], port))
        if bound is None or bound.accept is None or not bound.listens:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"Connect call failed {(host, port)}")
        return self.connected(process, bound, name, protocol_factory, own, host)


class _Process(Process):
    loop_kind = VirtualLoop


class VirtualWorld(World):
    """The world of one test. Use it as a context manager.

    Args:
        seed: the number that decides delays and the order of threads and connections.
        ahead_seconds: the time by which the world begins after real time.

    Attributes:
        loop: the loop of the only process.
        thread: the number of the real thread that the world belongs to.
        idle: the callers of `VirtualLoop.idle`.
    """

    def __init__(self, seed: int, ahead_seconds: float = 0.0) -> None:
        super().__init__(seed)
        # Whole seconds: otherwise the fraction of a second at the start would decide how milliseconds are rounded.
        self.now = float(math.ceil(time.monotonic() + ahead_seconds))
        self._now_at_epoch = math.ceil(time.time() + ahead_seconds) - self.now
        self.network = _Network(self)
        self.thread = threading.get_ident()
        self.idle: list[asyncio.Future[None]] = []
        machine = self.machines["test"] = Machine(self, "test", "127.0.0.1", None)
        self._only = _Process(self, machine, "test", os.getpid())
        self.loop = self._only.loop
        self._context = contextvars.copy_context()
        self._has_woken = self._is_running = False
        self._wakes = 0

    def __enter__(self):
        self._before = random.getstate()
        random.seed(self.seed)
        self._replace()
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self.cancel_tasks()
        finally:
            self.is_closing = True
            self._only.close()
            self._heap.clear()
            self._stack.close()
            random.setstate(self._before)

    @property
    def ahead_seconds(self) -> float:
        """The time by which the world is ahead of real time."""
        return self.now - time.monotonic()

    @property
    def current_process(self):
        """The only process. Code of fixtures, outside of its threads, belongs to it, too."""
        return self._only

    @property
    def has_due(self) -> bool:
        """Return True if an event is due now."""
        return bool(self._heap) and self._heap[0][0] <= self.now

    # ---- running

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop. Tasks that it started stay, as with `asyncio.Runner.run`."""
        if not asyncio.iscoroutine(main):
            raise ValueError(f"a coroutine was expected, got {main!r}")
        task = self.loop.create_task(main, context=self._context)
        self._run_until(task.done)
        return task.result()

    def cancel_tasks(self) -> None:
        """Cancel all tasks and wait for them, as `asyncio.Runner.close` does."""
        self._settle()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self._run_until(lambda: all(task.done() for task in tasks))
        self._settle()
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.loop.call_exception_handler(
                    {"message": "unhandled exception during shutdown", "exception": error, "task": task}
                )

    def wait_outside(self, is_true: Callable[[], bool], end: float | None) -> bool:
        """Run events until a condition holds. Code of fixtures and plain tests waits for threads here."""
        return self._run_until(is_true, math.inf if end is None else end)

    def _settle(self) -> None:
        """Let all data arrive that is on its way."""
        self._run_until(self._jumps)

    def _jumps(self) -> bool:
        """Return True if nothing is left to do before the next timer."""
        while self._heap and isinstance(self._heap[0][2], Alarm) and self._heap[0][2].is_over:
            heapq.heappop(self._heap)
        return not self._heap or isinstance(self._heap[0][2], Alarm)

    def _run_until(self, is_true: Callable[[], bool], end: float = math.inf) -> bool:
        assert not self._is_running, "events do not wait"
        assert self.actor is None, "threads of the process wait for themselves"
        self._is_running = True
        try:
            return self._run_events(is_true, end)
        finally:
            self._is_running = False

    def _run_events(self, is_true: Callable[[], bool], end: float) -> bool:
        heap = self._heap
        while not is_true():
            if self._jumps():
                if self._wake_idle():
                    continue
                self._has_woken = False
            if not heap or heap[0][0] > end:
                assert end < math.inf, f"nothing is left to do, and the test still waits:\n{self._stacks()}"
                self.now = max(self.now, end)
                return False
            when, _, action = heapq.heappop(heap)
            self.now = max(self.now, when)
            action()
        return True

    def _wake_idle(self) -> bool:
        """Wake the callers of `idle` once before each jump. Return True if they run now."""
        waiting, self.idle = self.idle, []
        if self._heap:
            self._wakes = 0
        if not waiting or (self._has_woken if self._heap else self._wakes >= _IDLE_IN_A_ROW):
            self.idle = waiting
            return False
        self._has_woken = True
        self._wakes += 1
        for future in waiting:
            if not future.done():
                future.set_result(None)
        return True

    def _stacks(self) -> str:
        text = io.StringIO()
        for task in asyncio.all_tasks(self.loop):
            task.print_stack(file=text)
        return text.getvalue()

    # ---- what is replaced

    @contextmanager
    def left(self) -> Iterator[None]:
        """Leave the world for a while: inside, threads, clocks and sockets are real."""
        self._stack.close()
        try:
            yield
        finally:
            self._replace()

    def _replace(self) -> None:
        really_wait = threading.Condition.wait

        def wait(condition: threading.Condition, timeout: float | None = None) -> bool:
            if threading.get_ident() != self.thread or (timeout is not None and timeout <= _REAL_SECONDS):
                return really_wait(condition, timeout)
            if not really_wait(condition, _REAL_SECONDS):
                raise RuntimeError("a wait for a real thread in a simulated world: use rmqkit.system.threads")
            return True

        with ExitStack() as stack:
            stack.enter_context(threads.replaced(simulated.functions(self)))
            stack.enter_context(seams.asyncgen_hooks(self))
            for holder, name, value in (
                (SystemClock, "now_ms", lambda _: int((self.now + self._now_at_epoch) * 1000)),
                (SystemClock, "monotonic_ms", lambda _: self.now * 1000),
                (listening, "bound_socket", lambda _, address: self.network.bind(self._only, *address[:2])),
                (socket, "create_connection", self._connection),
                (time, "sleep", self._sleep),
                (subprocess, "time", SimpleNamespace(sleep=_REAL_SLEEP)),
                (threading.Condition, "wait", wait),
                (watch, "watch_loop", lambda: None),
                (watch, "unwatch_loop", lambda: None),
            ):
                stack.enter_context(mock.patch.object(holder, name, value))
            if "anyio" in sys.modules:
                from anyio._backends._asyncio import AsyncIOBackend  # of FastAPI, the console and FastStream

                stack.enter_context(mock.patch.object(AsyncIOBackend, "run_sync_in_worker_thread", _in_thread))
            if "urllib3" in sys.modules:  # of requests
                stack.enter_context(mock.patch("urllib3.util.connection.create_connection", self._connection))
            self._stack = stack.pop_all()

    def _sleep(self, seconds: float) -> None:
        if threading.get_ident() != self.thread:  # a real thread that an earlier test has left, of py4j for example
            _REAL_SLEEP(seconds)
        elif self.actor is None:
            self._run_until(lambda: False, self.now + seconds)
        else:
            self.actor.spend(seconds)

    def _connection(self, address, timeout=None, source_address=None, **options):
        if threading.get_ident() != self.thread:
            return _REAL_CONNECTION(address, timeout, source_address, **options)
        return _Socket(self, address, timeout, source_address)


async def _in_thread(func, args, **_):
    return await asyncio.to_thread(func, *args)


class _Socket(asyncio.Protocol):
    """A blocking socket, as `socket.create_connection` returns it. Only threads other than the loop's may use it."""

    def __init__(self, world: VirtualWorld, address: tuple[str, int], timeout: Any, source: Any) -> None:
        assert world.actor is None or not world.actor.is_main, "a blocking call on the loop"
        self._transport: Any = None
        self._read = bytearray()
        self._is_over = False
        self._error: BaseException | None = None
        self._timeout = timeout if isinstance(timeout, (int, float)) else None
        self._changed = threads.Event()
        task = world.loop.create_task(world.network.connect(world.current_process, lambda: self, *address, source))
        task.add_done_callback(lambda _: self._changed.set())
        self._changed.wait()
        try:
            task.result()
        except ConnectionRefusedError as error:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED)) from error

    # ---- for the transport

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._read += data
        self._changed.set()

    def eof_received(self) -> bool:
        self._is_over = True
        self._changed.set()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_over, self._error = True, exc
        self._changed.set()

    # ---- the interface of a socket

    def sendall(self, data: Any, flags: int = 0) -> None:
        if self._transport.is_closing():
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        self._transport.write(data)

    def recv(self, size: int, flags: int = 0) -> bytes:
        while not self._read and not self._is_over:
            self._changed.clear()
            if not self._changed.wait(self._timeout):
                raise TimeoutError("timed out")
        if not self._read and self._error is not None:
            raise self._error
        data = bytes(self._read[:size])
        del self._read[:size]
        return data

    def makefile(self, mode: str, *_: object) -> io.BufferedReader:
        assert mode == "rb", "http.client reads bytes"
        return io.BufferedReader(_Reader(self))

    def settimeout(self, timeout: float | None) -> None:
        self._timeout = timeout

    def fileno(self) -> int:
        """Return -1: the kernel does not know the connection. urllib3 then does not look whether it was dropped."""
        return -1

    def shutdown(self, how: int) -> None:
        self._transport.close()

    def setsockopt(self, *_: object) -> None:
        """Do nothing: a simulated connection has no options."""

    def close(self) -> None:
        self._transport.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Reader(io.RawIOBase):
    """The bytes of a socket as a file."""

    def __init__(self, source: _Socket) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._source.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)
