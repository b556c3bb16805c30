"""Resumable MCP servers: the events and sessions of the official MCP SDK in streams::

    from mcp.server.mcpserver import MCPServer
    from rmqkit.mcp import streamable_http_app

    server = MCPServer("tools")
    app = streamable_http_app(server, rmqkit.streams.embedded("data", expire_after=3600))

Run the application with ``uvicorn``. A client that lost its connection continues the streams of its requests, also at
another process, and after the process that served it was killed. This package needs the extra ``mcp``. The methods of
the session manager are internal to the SDK, so this package requires MCP SDK 2.3.

==============  ====================================================================================================
`events`        `SessionEvents`, the SDK's `EventStore` of one session: a stream for each stream of MCP
`sessions`      `SessionManager`, the SDK's session manager with sessions that other processes continue
`app`           `streamable_http_app`, the SDK's application with this session manager
==============  ====================================================================================================
"""

from __future__ import annotations

from rmqkit import extras

with extras.needed("mcp", "rmqkit.mcp"):
    from rmqkit.mcp.app import streamable_http_app
    from rmqkit.mcp.events import SessionEvents
    from rmqkit.mcp.sessions import SessionManager

__all__ = ["SessionEvents", "SessionManager", "streamable_http_app"]
