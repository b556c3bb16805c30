"""Serves a `Console` by uvicorn: what ``rmq console`` runs."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import uvicorn
from starlette.types import Receive, Scope, Send

from rmqkit.console.app import Console
from rmqkit.errors import SettingsError

__all__ = ["BehindProxy", "serve", "state_folder"]

CONCURRENCY_MAX = 200
GRACE_SECONDS = 3


class BehindProxy:
    """Lets in only what comes from some networks, a proxy's, which does TLS and tells the client's address."""

    def __init__(self, app: Console, networks: Sequence[str]) -> None:
        """Raises SettingsError: one is no network."""
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
            told = dict(scope["headers"]).get(b"x-forwarded-for", b"").decode("latin-1").rpartition(",")[2].strip()
            if told:
                scope = {**scope, "client": (told, 0)}
        await self._app(scope, receive, send)


def state_folder() -> Path:
    """Where audit and jobs go when nobody says: the user's state folder."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "rmqkit"


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
    """Serve until SIGTERM or SIGINT, or, in a thread that gets no signals, ``until`` is set; ``ready`` is told the
    address of the first page.
    Raises SettingsError: the port is taken, or the certificate cannot be used."""
    app = BehindProxy(console, behind_proxy) if behind_proxy else console
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=True,
        proxy_headers=False,
        limit_concurrency=CONCURRENCY_MAX,
        timeout_graceful_shutdown=GRACE_SECONDS,
        ssl_certfile=cert,
        ssl_keyfile=key,
    )
    try:
        config.load()
    except OSError as error:
        raise SettingsError(f"--cert {cert} and --key {key}: {error}") from None
    server = _Server(config)
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port") from None
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.should_exit = True

    waiting = None
    if until is None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
    else:
        waiting = loop.create_task(until.wait(), name="console until")
        waiting.add_done_callback(lambda _: stop())
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
    if waiting is not None:
        waiting.cancel()


class _Server(uvicorn.Server):
    """Tells when it serves, and when it stops doing so; signals are the caller's."""

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
