"""Servers in a thread for tests of the command line: some send given answers, some send nonsense."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rmqkit.protocol.command import Command, reply
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import Router
from rmqkit.remoting.server import RemotingServer
from rmqkit.remoting.tls import ServerTls

SECONDS_MAX = 100

Answer = Callable[[str, Command], Command]
"""Takes the server's address and a request."""


def body(content: bytes | Callable[[str], bytes]) -> Answer:
    """Success with a body, or one that depends on the server's address."""
    return lambda address, command: reply(command, body=content(address) if callable(content) else content)


def refusal(code: int, remark: str) -> Answer:
    return lambda address, command: reply(command, code, remark)


@contextmanager
def serving(answers: Mapping[int, Answer], tls: ServerTls | None = None) -> Iterator[str]:
    """A server that answers requests by code; yields its address."""

    async def start(run: asyncio.Event, started: Callable[[str], None]) -> None:
        dispatch, server_address = Router(), ""

        def handler(answer: Answer) -> Callable[[Connection, Command], Command]:
            return lambda connection, command: answer(server_address, command)

        for code, answer in answers.items():
            dispatch.register(code, handler(answer))
        server = RemotingServer(dispatch, tls=tls)
        server_address = f"127.0.0.1:{await server.listen('127.0.0.1', 0)}"
        started(server_address)
        await run.wait()
        await server.close()

    with _in_thread(start) as address:
        yield address


@contextmanager
def saying(greeting: bytes | None) -> Iterator[str]:
    """A server that is none of ours: it answers every read with the same bytes and closes; None: it keeps silent."""

    async def start(run: asyncio.Event, started: Callable[[str], None]) -> None:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            if greeting is None:
                await run.wait()
            else:
                writer.write(greeting)
            writer.close()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        started(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await run.wait()
        server.close()

    with _in_thread(start) as address:
        yield address


@contextmanager
def _in_thread(start: Callable[[asyncio.Event, Callable[[str], None]], Coroutine[Any, Any, None]]) -> Iterator[str]:
    ready, found = threading.Event(), list[Any]()

    async def main() -> None:
        stopping = asyncio.Event()

        def started(address: str) -> None:
            found.extend((address, asyncio.get_running_loop(), stopping))
            ready.set()

        await start(stopping, started)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(SECONDS_MAX), "the server did not start"
    address, loop, stopping = found
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(SECONDS_MAX)
