"""The server of ``rmq console``: it serves a `Console` with uvicorn.

uvicorn accepts `CONCURRENCY_MAX` connections and answers 503 above this limit, even if the connections never send a
request. Therefore a connection without a complete request is closed after `WAIT_SECONDS` (`_patient`). If more than
`WAITING_MAX` connections wait, the connection with the longest wait is closed immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rmqkit.console.server.app import Console
from rmqkit.errors import SettingsError
from rmqkit.remoting.port_users import in_use_by
from rmqkit.remoting.tasks import Tasks

__all__ = ["BehindProxy", "serve", "state_folder"]

CONCURRENCY_MAX = 200
WAITING_MAX = 100
WAIT_SECONDS = 10.0
"""A browser sends a request or a form within this time."""

GRACE_SECONDS = 3


class BehindProxy:
    """A filter that allows only requests from the networks of a proxy. The proxy sends the address of the client."""

    def __init__(self, app: Console, networks: Sequence[str]) -> None:
        """Parse the networks. Raises SettingsError: a text is not a network."""
        self._app = app
        try:
            self._networks = [ipaddress.ip_network(one.strip()) for one in networks]
        except ValueError as error:
            raise SettingsError(f"--behind-proxy {','.join(networks)}: {error}") from None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            peer = ipaddress.ip_address((scope.get("client") or ("0.0.0.0", 0))[0])
            if not any(peer in network for network in self._networks):
                await send(
                    {"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]}
                )
                await send(
                    {"type": "http.response.body", "body": f"{peer} is not the proxy of this console\n".encode()}
                )
                return
            client = dict(scope["headers"]).get(b"x-forwarded-for", b"").decode("latin-1").rpartition(",")[2].strip()
            if client:
                scope = {**scope, "client": (client, 0)}
        await self._app(scope, receive, send)


def state_folder() -> Path:
    """Return the default folder for audit and jobs, in the state folder of the user."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "rmqkit"


# Long: it has the order of the start and of the stop in one place.
async def serve(
    console: Console,
    host: str,
    port: int,
    *,
    cert: Path | None = None,
    key: Path | None = None,
    behind_proxy: Sequence[str] = (),
    ready: Callable[[str], object],
    ends_with_stdin: bool = False,
    until: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. With ``until`` (for a thread without signals), serve until this event is set.

    ``ready`` is called with the address of the first page. ``ends_with_stdin``: also stop when stdin is closed.
    Raises SettingsError: the port is taken, or the certificate cannot be used."""
    app = BehindProxy(console, behind_proxy) if behind_proxy else console
    config = uvicorn.Config(
        app, host=host, port=port, ws="none", lifespan="on", log_level="warning", access_log=False,
        http=_patient(AutoHTTPProtocol), server_header=False, date_header=True, proxy_headers=False,
        limit_concurrency=CONCURRENCY_MAX, timeout_graceful_shutdown=GRACE_SECONDS, ssl_certfile=cert,
        ssl_keyfile=key,
    )  # fmt: skip
    try:
        config.load()
    except OSError as error:
        raise SettingsError(f"--cert {cert} and --key {key}: {error}") from None
    server = _Server(config)
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        cause = in_use_by(port) if error.errno == errno.EADDRINUSE else error.strerror
        raise SettingsError(f"cannot listen on {host}:{port}: {cause}; choose another with --port") from None
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.should_exit = True

    waiting = Tasks()
    if until is None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
    else:
        waiting.own(until.wait(), "console until").add_done_callback(lambda _: stop())
    if ends_with_stdin:

        def left_alone() -> None:
            loop.remove_reader(0)
            stop()

        loop.add_reader(0, left_alone)
    name = f"[{host}]" if ":" in host else host
    server.on_end = console.ending.set
    server.on_ready = lambda: ready(f"{'https' if cert else 'http'}://{name}:{listening.getsockname()[1]}/")
    await server.serve(sockets=[listening])
    listening.close()
    await waiting.close()


def _patient(protocol: Any) -> Any:
    """Return a subclass of uvicorn's protocol that limits the wait for a request. Each server needs its own class."""
    waiting: dict[Any, None] = {}

    class Patient(protocol):  # type: ignore[misc] # the base class depends on the installed packages
        """A connection. It is in ``waiting`` while a part of its next request is missing."""

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._waits_for = self.cycle
            self._sort()
            self._look_again = self.loop.call_later(WAIT_SECONDS, self._look)

        def connection_lost(self, exc: Exception | None) -> None:
            waiting.pop(self, None)
            self._look_again.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._sort()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._sort()

        @staticmethod
        def _cut(longest: Any) -> None:
            waiting.pop(longest, None)
            longest.transport.abort()

        def _sort(self) -> bool:
            """Update ``waiting``. Return True while a part of the request is missing."""
            cycle = self.cycle
            owes = cycle is None or cycle.response_complete or cycle.more_body
            if owes:
                waiting.setdefault(self, None)
                while len(waiting) > WAITING_MAX:
                    self._cut(next(iter(waiting)))
            else:
                waiting.pop(self, None)
            return owes

        def _look(self) -> None:
            if self._sort() and self._waits_for is self.cycle:
                self._cut(self)
                return
            self._waits_for = self.cycle if self in waiting else _NOTHING
            self._look_again = self.loop.call_later(WAIT_SECONDS, self._look)

    return Patient


_NOTHING = object()


class _Server(uvicorn.Server):
    """A server that calls a function after its start and before its stop. The caller handles the signals."""

    on_ready: Callable[[], object] = staticmethod(lambda: None)
    on_end: Callable[[], object] = staticmethod(lambda: None)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.on_end()
        await super().shutdown(sockets)
