"""What producers and consumers have in common: they are started, used and closed, and have a runtime."""

from __future__ import annotations

import asyncio
import enum
from types import TracebackType
from typing import Self

from rmqkit.client.runtime import ClientRuntime
from rmqkit.client.settings import ClientSettings
from rmqkit.clock import Clock
from rmqkit.errors import ClientError, SettingsError
from rmqkit.protocol.names import group_fault

__all__ = ["Client"]


class _State(enum.Enum):
    NEW = "not started"
    STARTED = "started"
    CLOSED = "closed"


class Client:
    """A member of a group; started and closed once, best by ``async with``.

    ``name_servers`` None takes the environment's ``NAMESRV_ADDR``. ``runtime`` shares the connections of another client
    instead; its owner starts and closes it.
    Raises SettingsError: the group's name is not legal, both or neither of name servers and runtime are given."""

    _kind = "client"
    _reserved_group = ""

    def __init__(
        self,
        group: str,
        name_servers: str | None,
        settings: ClientSettings,
        runtime: ClientRuntime | None,
        clock: Clock,
    ) -> None:
        fault = group_fault(group)
        if fault is None and group == self._reserved_group:
            fault = f"The specified group: {group}, is reserved: choose another"
        if fault is not None:
            raise SettingsError(fault)
        if runtime is not None and name_servers is not None:
            raise SettingsError("name_servers and runtime exclude each other: a runtime has its own name servers")
        self.group = group
        self._owns_runtime = runtime is None
        self._runtime = runtime or ClientRuntime(name_servers, settings=settings, clock=clock)
        self._state = _State.NEW
        self._is_registered = False
        self._closing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to work. Raises ClientError: it was started before; a closed client cannot be started again."""
        if self._state is not _State.NEW:
            raise ClientError(f"{self._described} is {self._state.value} already: make a new one")
        self._state = _State.STARTED
        try:
            if self._owns_runtime:
                await self._runtime.start()
            self._register()
            self._is_registered = True
            await self._open()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Finish what is under way, leave the group and let go of the connections; nothing happens twice.

        Called by one of the client's own handlers it returns at once: the handler has to end first."""
        if self._closing is None:
            self._state = _State.CLOSED
            self._closing = asyncio.create_task(self._close(), name=f"closing of {self._described}")
        if not self._is_in_handler:
            await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            if self._is_registered:
                await self._finish()
        finally:
            if self._owns_runtime:
                await self._runtime.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _register(self) -> None:
        """Join the group in the runtime; `_finish` is called only when this succeeded."""

    async def _open(self) -> None:
        """What else a kind of client does to start."""

    async def _finish(self) -> None:
        """What a kind of client does to end."""

    @property
    def _is_in_handler(self) -> bool:
        """Whether a handler calls that the end of the client has to wait for."""
        return False

    @property
    def _is_started(self) -> bool:
        return self._state is _State.STARTED

    @property
    def _described(self) -> str:
        return f"{self._kind} of group {self.group}"

    def _check_started(self) -> None:
        if self._state is not _State.STARTED:
            remedy = "use it inside 'async with' or call start()" if self._state is _State.NEW else "make a new one"
            raise ClientError(f"{self._described} is {self._state.value}: {remedy}")
