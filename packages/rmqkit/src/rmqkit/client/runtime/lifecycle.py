"""The life cycle of a client (a producer or a consumer). It is started, used and closed once, and has a runtime.

===========  ========================================================================================
state        next states
===========  ========================================================================================
NEW          STARTED by `start`, CLOSED by `close`
STARTED      CLOSED by `close`, or when its start fails; FROM_PARENT in the child of a fork
CLOSED       none: programs create a new client
FROM_PARENT  none: its connections belong to the parent process
===========  ========================================================================================
"""

from __future__ import annotations

import asyncio
import enum
import functools
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from rmqkit.client.observe.hooks import BackgroundHook, Hook, Hooks, with_defaults
from rmqkit.client.runtime import process
from rmqkit.client.runtime.process import run
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import ClientSettings, Tracing
from rmqkit.clock import Clock
from rmqkit.errors import ClientError, SettingsError
from rmqkit.protocol.names import group_fault
from rmqkit.remoting.tasks import is_cancelled
from rmqkit.times import Duration, duration_ms

C = TypeVar("C", bound="Client")
P = ParamSpec("P")
T = TypeVar("T")


class _State(enum.Enum):
    NEW = "not started"
    STARTED = "started"
    CLOSED = "closed"
    FROM_PARENT = "the parent process's, from before a fork"


_REMEDIES = {
    _State.NEW: "use it inside 'async with' or call start()",
    _State.CLOSED: "make a new one",
    _State.FROM_PARENT: "make a new one here, or start it only after the fork",
}


def keeps_open(
    method: Callable[Concatenate[C, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[C, P], Coroutine[Any, Any, T]]:
    """Decorate a method of a started client. `Client.close` then waits until all calls of the method have returned."""

    @functools.wraps(method)
    async def call(self: C, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self._check_started()
        self._calls += 1
        try:
            return await method(self, *args, **kwargs)
        finally:
            self._calls -= 1
            assert self._calls >= 0, "every end of a call has a start"
            if not self._calls:
                self._idle.set()

    return call


class Client:
    """A member of a group. Start and close it once; ``async with`` does both.

    After a fork, the child process can start a client that was not started before the fork. The child cannot use a
    started client and must create a new client.

    ``name_servers``: see `name_server_list`. With ``runtime``, the client shares the connections of another client, and
    the owner of the runtime starts and closes the runtime. ``wait_ready`` is the longest time that `start` waits for
    servers.
    Raises SettingsError: the group's name is not valid, or both name servers and a runtime are given."""

    closes_last = False
    """True if handlers of other clients may use this client. `run` then closes it after the other clients."""

    _kind = "client"
    _reserved_group = ""

    def __init__(
        self,
        group: str,
        name_servers: str | Sequence[str] | None,
        settings: ClientSettings,
        runtime: ClientRuntime | None,
        clock: Clock,
        hooks: Sequence[Hook] = (),
        wait_ready: Duration = 0,
    ) -> None:
        fault = group_fault(group)
        if fault is None and group == self._reserved_group:
            fault = f"The specified group: {group}, is reserved: choose another"
        if fault is not None:
            raise SettingsError(fault)
        if runtime is not None and name_servers is not None:
            raise SettingsError("name_servers and runtime cannot be combined: a runtime has its own name servers")
        self._wait_ms = duration_ms(wait_ready, "wait_ready")
        self.group = group
        self._owns_runtime = runtime is None
        self._runtime = runtime or ClientRuntime(name_servers, settings=settings, clock=clock)
        self._trace = None if settings.trace is None else self._make_trace(settings.trace)
        # The trace is the last hook. It begins last and ends first, so its times do not include the other hooks.
        hooks = with_defaults(hooks)
        self._hooks = Hooks(hooks if self._trace is None else (*hooks, self._trace))
        self._state = _State.NEW
        self._is_registered = False
        self._starting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._calls = 0
        self._idle = asyncio.Event()
        self._closed = asyncio.Event()
        process.register_after_fork(self, Client._forked)

    def _make_trace(self, tracing: Tracing) -> BackgroundHook | None:
        """Create the hook that writes the trace topic. Producers and consumers have such a hook."""
        return None

    async def start(self) -> None:
        """Start the client: connect, join the group, begin to work.
        Raises ClientError: the client was started before, or is closed during the start. A closed client cannot be
        started again.
        Raises NoRoute: no name server answers. With ``wait_ready``: no name server answered and knew a broker in this
        time.
        Raises SettingsError: a `PushConsumer` has no subscription, or has a handler with wrong parameters. You can
        correct this and call ``start`` again."""
        if self.is_from_parent:
            self._check_started()
        if self._state is not _State.NEW:
            raise ClientError(f"{self._described} is {self._state.value} already: make a new one")
        self._runtime.check_process()
        if not self._owns_runtime and not self._runtime.is_running:
            raise ClientError(f"the connection of {self._described} is not open: enter or start it first")
        self._check_ready()
        self._state = _State.STARTED
        # Use a separate task, so that `close` can cancel the start for every caller.
        self._starting = asyncio.create_task(self._start(), name=f"start of {self._described}")
        try:
            await self._starting
        except BaseException:
            # Undo a partial start, because a client that failed to start must hold no connection.
            was_closed = self._closing is not None
            await self.close()
            if was_closed and not is_cancelled():
                raise ClientError(f"{self._described} was closed while it started") from None
            raise
        finally:
            self._starting = None  # otherwise an error and all that it refers to would live as long as this client

    async def _start(self) -> None:
        if self._owns_runtime:
            await self._runtime.start()
        await self._runtime.reach(self._wait_ms)
        self._register()
        self._is_registered = True
        if self._trace is not None:
            self._trace.start()
        await self._open()

    async def close(self) -> None:
        """Finish running work, leave the group and close the connections. You can call this more than once.

        If a handler of this client calls it, it returns immediately, because the handler must return first."""
        if self._state is _State.FROM_PARENT:
            return
        if self._closing is None:
            self._state = _State.CLOSED
            self._closing = asyncio.create_task(self._close(), name=f"closing of {self._described}")
            # If a handler waited here, it would wait for itself. The close is shielded, because a cancelled caller must
            # not stop it.
        if not self._is_in_handler:
            await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        try:
            # If a start failed before it joined the group, there is no group to leave.
            if self._is_registered:
                await self._finish()
        finally:
            # Close the trace after the client and before the connections, because it sends its last records over them.
            if self._trace is not None:
                await self._trace.close()
            if self._owns_runtime:
                await self._runtime.close()
            self._closed.set()

    async def ping(self) -> None:
        """Send a request to a name server as a health check.
        Raises NoRoute: no name server answers. Raises ClientError: the client is not started."""
        self._check_started()
        await self._runtime.reach()

    async def run(self) -> None:
        """Run until SIGINT or SIGTERM, then finish running work and close::

            asyncio.run(consumer.run())

        This method starts the client if necessary, and raises the same errors as `rmqkit.run`. To run several clients
        together, use `rmqkit.run` or `rmqkit.sync.run`."""
        await run(self)

    async def wait_closed(self) -> None:
        """Wait until the client is closed."""
        await self._closed.wait()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _check_ready(self) -> None:
        """Check that the client can be started. Raises SettingsError: it would have nothing to do after a start. The
        client can be corrected and started again."""

    def _register(self) -> None:
        """Join the group in the runtime. `_finish` is called only if this has succeeded."""

    async def _open(self) -> None:
        """Start the parts of this kind of client."""

    async def _finish(self) -> None:
        """Stop the parts of this kind of client."""

    async def _calls_ended(self) -> None:
        """Wait until no call of a `keeps_open` method is running."""
        while self._calls:
            self._idle.clear()
            await self._idle.wait()

    @property
    def _is_in_handler(self) -> bool:
        """Return True if the caller is a handler for which the close of the client must wait."""
        return False

    @property
    def is_from_parent(self) -> bool:
        """Return True if the client was started in a parent process, before a fork."""
        return self._state is _State.FROM_PARENT

    def _forked(self) -> bool:
        """Mark a started client in the child of a fork, because its connections belong to the parent."""
        if self._is_started or (self._closing is not None and not self._closing.done()):
            self._state = _State.FROM_PARENT
        return self.is_from_parent

    @property
    def is_new(self) -> bool:
        """Return True if the client was neither started nor closed."""
        return self._state is _State.NEW

    @property
    def is_closed(self) -> bool:
        """Return True if the client is completely closed."""
        return self._closed.is_set()

    @property
    def _is_started(self) -> bool:
        return self._state is _State.STARTED

    @property
    def _described(self) -> str:
        return f"{self._kind} of group {self.group}"

    def _check_started(self) -> None:
        if self._state is not _State.STARTED:
            raise ClientError(f"{self._described} is {self._state.value}: {_REMEDIES[self._state]}")
