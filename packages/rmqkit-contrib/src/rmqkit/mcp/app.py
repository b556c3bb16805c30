"""The SDK's application with resumable sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from mcp.server.lowlevel.server import Server
from mcp.server.mcpserver import MCPServer
from mcp.server.streamable_http_manager import StreamableHTTPASGIApp
from starlette.applications import Starlette
from starlette.routing import Route

from rmqkit.errors import SettingsError
from rmqkit.mcp.sessions import SessionManager
from rmqkit.streams import Streams
from rmqkit.streams.embedded import EmbeddedStreams

__all__ = ["streamable_http_app"]

_OPTIONS = (
    "json_response",
    "security_settings",
    "retry_interval",
    "session_idle_timeout",
    "max_request_body_size",
    "max_sessions",
)
"""The attributes of the SDK's session manager that are its options."""


def streamable_http_app(
    server: MCPServer[Any] | Server[Any],
    streams: Streams | EmbeddedStreams,
    *,
    single_process: bool = False,
    **options: Any,
) -> Starlette:
    """Return the application of a server, for uvicorn and other ASGI servers. Its sessions and events are in streams.

    Args:
        server: the server with its tools.
        streams: the result of `rmqkit.streams.open` or `embedded`. The application opens and closes the streams.
        single_process: True: this is the only process that serves the sessions. A tool call that ran in a former
            process is answered with an error when its client resumes it. False: the client waits for the response.
        options: the options of the SDK's ``server.streamable_http_app``, except ``event_store`` and
            ``stateless_http``.

    Raises SettingsError: an option is not possible here."""
    for name in ("event_store", "stateless_http"):
        if options.get(name):
            raise SettingsError(f"{name} is not possible: the streams store the events of sessions")
    app = server.streamable_http_app(**options)
    plain = server.session_manager

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with streams as opened:
            manager = SessionManager(
                plain.app, opened, single_process=single_process, **{name: getattr(plain, name) for name in _OPTIONS}
            )
            endpoint.session_manager = manager
            async with manager.run():
                yield

    endpoint = _endpoint(app)
    app.router.lifespan_context = lifespan
    return app


def _endpoint(app: Starlette) -> StreamableHTTPASGIApp:
    """Return the part of the SDK's application that calls the session manager."""
    for route in app.routes:
        found: object = route.endpoint if isinstance(route, Route) else None
        while found is not None:
            if isinstance(found, StreamableHTTPASGIApp):
                return found
            found = getattr(found, "app", None)
    raise AssertionError("the SDK's application has an endpoint for streamable HTTP")
