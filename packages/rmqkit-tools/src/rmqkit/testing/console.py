"""A web console beside a `LocalCluster`, on a free port of 127.0.0.1, in a thread with its own event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from rmqkit import extras
from rmqkit.testing.clock import LoopThread
from rmqkit.testing.cluster import LocalCluster

__all__ = ["local_console"]


@contextlib.contextmanager
def local_console(cluster: LocalCluster) -> Iterator[str]:
    """Yield the address of the console's first page. If brokers require signatures, the console signs as the first
    user. The console stores its audit only in memory. Raises ExtraMissing: the extra ``console`` is not installed."""
    with extras.needed("console", "the web console"):
        from rmqkit.console.server.app import Console
        from rmqkit.console.server.serve import serve

    credentials = cluster.brokers[0].credentials
    thread = LoopThread("rmqkit console")

    async def begin() -> tuple[str, asyncio.Task[None], asyncio.Event]:
        loop, until = asyncio.get_running_loop(), asyncio.Event()
        ready: asyncio.Future[str] = loop.create_future()
        console = Console(cluster.name_server, credentials=credentials, clock=cluster.clock)
        serving = loop.create_task(serve(console, "127.0.0.1", 0, ready=ready.set_result, until=until))
        serving.add_done_callback(lambda _: ready.cancel())
        try:
            return await ready, serving, until
        except asyncio.CancelledError:
            await serving  # raises the reason why the console does not serve
            raise

    async def end() -> None:
        until.set()
        await serving

    try:
        address, serving, until = thread.run(begin)
        try:
            yield address
        finally:
            thread.run(end)
    finally:
        thread.close()
