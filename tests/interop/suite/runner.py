"""The runner of behaviours: the coroutine tests of one peer share an event loop, and several of them run at a time.

Behaviours mostly wait for a broker. So the first requested behaviour starts all selected ones of its peer, and each
test then waits for its own outcome: reports, names and failures are those of separate tests. A behaviour marked
`patient` waits for periodic work of the broker: it starts first and does not count for the limit. A behaviour marked
`alone` would disturb others: it runs after all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest

from tests.interop.suite.scene import Peer, Scene

HERE = Path(__file__).parent
AT_ONCE = 12
SECONDS_MAX = 500.0
"""Time limit of one behaviour, from its own start. Several waits of `consuming.SECONDS` fit into it."""


class Runner:
    """The loop and its thread. `close` stops both."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._not_handled)
        self._permits = asyncio.Semaphore(AT_ONCE)
        self._outcomes: dict[str, Future[None]] = {}
        self._complaints: list[str] = []
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"behaviours at {peer.name}")
        self._thread.start()

    def run(self, item: pytest.Function, others: Iterable[pytest.Function]) -> None:
        """Wait for the outcome of one behaviour, and raise its exception."""
        if is_marked(item, "alone"):
            wait(self._outcomes.values())
            self._start(item)
        elif item.nodeid not in self._outcomes:
            for one in sorted((item, *others), key=lambda one: not is_marked(one, "patient")):
                if one.nodeid not in self._outcomes and not is_marked(one, "alone"):
                    self._start(one)
        self._outcomes[item.nodeid].result()

    def close(self) -> None:
        """Close the loop. Raises AssertionError: an exception was never reported."""
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        assert not self._complaints, "\n".join(self._complaints)

    def _start(self, item: pytest.Function) -> None:
        arguments = {name: value for name, value in item.callspec.params.items() if name != "peer"}
        name = f"{next(self._numbers)}-{item.originalname.removeprefix('test_')}"
        permits = contextlib.nullcontext() if is_marked(item, "patient") else self._permits
        behaviour = self._behave(item.obj, name, arguments, permits)
        self._outcomes[item.nodeid] = asyncio.run_coroutine_threadsafe(behaviour, self._loop)

    async def _behave(
        self,
        function: Callable[..., Coroutine[Any, Any, None]],
        name: str,
        arguments: dict[str, object],
        permits: contextlib.AbstractAsyncContextManager[None],
    ) -> None:
        async with permits, asyncio.timeout(SECONDS_MAX), Scene(self._peer, name) as scene:
            await function(scene=scene, **arguments)

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _not_handled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._complaints.append(f"{context['message']}: {context.get('exception')!r}")


def is_behaviour(item: pytest.Item) -> bool:
    """Return True if the runner runs the item: a coroutine function of this folder that accepts a scene."""
    if not isinstance(item, pytest.Function) or HERE not in item.path.parents:
        return False
    return inspect.iscoroutinefunction(item.obj) and "scene" in item.fixturenames


def is_marked(item: pytest.Item, name: str) -> bool:
    return item.get_closest_marker(name) is not None
