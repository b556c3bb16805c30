"""The programs of `tests.faults.sse` that are killed: the writer of all sessions, and the gateway for browsers.

The writer appends the numbers from 0 to each session. After a start, and after an append whose result is unknown, it
continues after the newest event that the broker has. On SIGTERM it finishes all sessions and exits.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

import rmqkit
from rmqkit.errors import NoRoute, SendFailed
from rmqkit.sse import EventStreamResponse
from rmqkit.streams import Streams

PARENT = "Chats"
NAMES = "SSE_NAME_SERVER"


def gateway() -> Starlette:
    """Return the web service: ``GET /NAME`` sends the session."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with rmqkit.streams.open(os.environ[NAMES], PARENT) as app.state.streams:
            yield

    async def follow(request: Request) -> EventStreamResponse:
        return EventStreamResponse(request.app.state.streams, request.path_params["name"], retry=0.2)

    return Starlette(routes=[Route("/{name}", follow)], lifespan=lifespan)


async def write_session(streams: Streams, name: str, pause_seconds: float, ends: asyncio.Event) -> None:
    """Append numbers until ``ends`` is set, then finish the session."""
    chance = random.Random(name)
    number = await following(streams, name)
    await asyncio.sleep(pause_seconds * chance.random())  # the sessions do not write at the same time
    while number is not None:
        try:
            if ends.is_set():
                await streams.finish(name)
                return
            await streams.append(name, str(number))
        except (SendFailed, NoRoute):
            number = await following(streams, name)
            continue
        number += 1
        await asyncio.sleep(pause_seconds * chance.uniform(0.5, 1.5))


async def following(streams: Streams, name: str) -> int | None:
    """Return the number after the newest event of a session; None: the session is finished."""
    newest = await streams.last(name)
    if newest is None:
        return 0
    return None if newest.is_last else int(newest.text) + 1


async def write(name_server: str, sessions: int, pause_seconds: float) -> None:
    ends = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ends.set)
    async with rmqkit.streams.open(name_server, PARENT) as streams:
        print("ready", flush=True)
        names = [f"session-{number}" for number in range(sessions)]
        await asyncio.gather(*(write_session(streams, name, pause_seconds, ends) for name in names))


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.faults.sse_programs", description="The writer.")
    parser.add_argument("name_server", help="host:port")
    parser.add_argument("sessions", type=int, help="number of sessions")
    parser.add_argument("pause_seconds", type=float, help="mean time between two events of a session")
    given = parser.parse_args()
    asyncio.run(write(given.name_server, given.sessions, given.pause_seconds))


if __name__ == "__main__":
    main()
