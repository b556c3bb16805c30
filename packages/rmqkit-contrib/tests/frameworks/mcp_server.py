"""The MCP server of the tests: nothing in it is of rmqkit but the application. Arguments: port, folder, an option.

The tool ``count`` reports progress, waits until a file exists, and returns.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvicorn
from mcp.server.mcpserver import Context, MCPServer

import rmqkit
from rmqkit.mcp import streamable_http_app

port, folder = int(sys.argv[1]), Path(sys.argv[2])
server = MCPServer("counter")


@server.tool()
async def count(to: int, ctx: Context) -> str:
    """Report progress before and after a file exists."""
    for i in range(to):
        await ctx.report_progress(i, to, f"step {i}")
        while i == 1 and not (folder / "go").exists():
            await asyncio.sleep(0.02)
    (folder / "done").touch()
    return f"counted to {to}"


@server.tool()
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


app = streamable_http_app(
    server,
    rmqkit.streams.embedded(folder / "data", "Mcp", expire_after=3600),
    single_process="--single" in sys.argv,
    retry_interval=50,
)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
