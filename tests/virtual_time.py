"""Coroutine tests run in a simulated world (`tests.virtual_world`), in which no wait takes time.

The world runs one event after the other. When no work is left, its time jumps to the next timer. A wait of minutes
costs no time, and a busy machine delays no test. A test whose wait can never end fails at once, with the stacks of all
tasks.

Each test has a world of its own, with its fixtures of function scope. The name of the test is its seed: the same test
has the same delays and the same order of threads in every run. ``--seed N`` chooses others.

===================  =================================================================================================
test                 runs
===================  =================================================================================================
a coroutine          in a world, also with a fixture that is an asynchronous generator
marker virtual_time  a plain test, in a world: it calls `run`, and has objects with threads or locks outside of `run`
marker real_time     on asyncio's own loop: it waits for other processes, sockets of the kernel, or real threads
===================  =================================================================================================

Worlds are in the package rmqkit-tools. Where it is not installed, tests that need a world are skipped.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import math
import zlib
from collections.abc import Coroutine, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import pytest

from rmqkit.clock import SystemClock
from tests.sources import is_installed

__all__ = ["run"]

T = TypeVar("T")

# ---- the product's clock outside of a world

_real_now_ms, _real_monotonic_ms = SystemClock.now_ms, SystemClock.monotonic_ms
_ahead_seconds = 0.0
"""The time by which the worlds of this test are ahead of real time. It does not fall back between two worlds."""


def _now_ms(clock: SystemClock) -> int:
    return _real_now_ms(clock) + math.ceil(_ahead_seconds * 1000)


def _monotonic_ms(clock: SystemClock) -> float:
    return _real_monotonic_ms(clock) + _ahead_seconds * 1000


SystemClock.now_ms, SystemClock.monotonic_ms = _now_ms, _monotonic_ms  # type: ignore[method-assign]


_current: list[Any] = []
"""The world of the running test, if it has one."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `asyncio.run` does, in the world of the test, or in a new one."""
    if not _current:
        with _world(0) as world:
            return world.run(main)
    try:
        return _current[-1].run(main)
    finally:
        _current[-1].cancel_tasks()


@contextmanager
def _world(seed: int) -> Iterator[Any]:
    """Yield a world that begins where the last one of the test ended."""
    global _ahead_seconds
    module = importlib.import_module("tests.virtual_world")  # here: it needs rmqkit-tools
    world = module.VirtualWorld(seed, _ahead_seconds)
    try:
        with world:
            _current.append(world)
            yield world
    finally:
        _current.clear()
        _ahead_seconds = max(_ahead_seconds, world.ahead_seconds)


# ---- the plug-in

_RUNNER, _STACK = pytest.StashKey[Any](), pytest.StashKey[ExitStack]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="the seed of all simulated worlds, instead of the name of each test")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "real_time: a coroutine test that waits for processes or threads in real time")
    config.addinivalue_line("markers", "virtual_time: a plain test that runs in a simulated world")


def _seed_of(item: pytest.Item) -> int:
    seed = item.config.getoption("seed")
    return zlib.crc32(item.nodeid.encode()) if seed is None else seed


def _need_world() -> None:
    if not is_installed("rmqkit-tools"):
        pytest.skip("a simulated world needs rmqkit-tools: pip install -e packages/rmqkit-tools")


def _has_loop(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function):
        return False
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    return (
        inspect.iscoroutinefunction(item.obj)
        or item.get_closest_marker("virtual_time") is not None
        or any(inspect.isasyncgenfunction(one.func) for some in fixtures for one in some)
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Enter the world before the fixtures are set up: they may start threads."""
    if _has_loop(item):
        is_real = item.get_closest_marker("real_time") is not None
        if not is_real:
            _need_world()
        item.stash[_STACK] = ExitStack()
        item.stash[_RUNNER] = item.stash[_STACK].enter_context(asyncio.Runner() if is_real else _world(_seed_of(item)))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if (given := getattr(pyfuncitem.obj, "hypothesis", None)) and inspect.iscoroutinefunction(given.inner_test):
        _need_world()
        test, seed = given.inner_test, _seed_of(pyfuncitem)

        @functools.wraps(test)
        def example(*args: Any, **kwargs: Any) -> None:
            with _world(seed) as world:
                world.run(test(*args, **kwargs))

        given.inner_test = example
        return None
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    pyfuncitem.stash[_RUNNER].run(pyfuncitem.obj(**arguments))
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True, specname="pytest_fixture_setup")
def set_up_outside(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
    """Set up what several tests share outside of the world of the first one."""
    if fixturedef.scope == "function" or not _current:
        return (yield)
    with _current[-1].left():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: Any) -> object | None:
    """Run an asynchronous generator as a fixture of one test."""
    if not inspect.isasyncgenfunction(fixturedef.func):
        return None
    assert fixturedef.scope == "function", f"{fixturedef.argname}: a loop belongs to one test"
    runner = request.node.stash[_RUNNER]
    generator = fixturedef.func(**{name: request.getfixturevalue(name) for name in fixturedef.argnames})

    async def end() -> None:
        assert await anext(generator, None) is None, f"{fixturedef.argname} yields twice"

    async def begin() -> object:
        return await anext(generator)

    value = runner.run(begin())
    fixturedef.addfinalizer(lambda: runner.run(end()))
    fixturedef.cached_result = (value, fixturedef.cache_key(request), None)
    return value


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Leave the world after the fixtures. The next test starts at the present time."""
    global _ahead_seconds
    try:
        return (yield)
    finally:
        if (stack := item.stash.get(_STACK, None)) is not None:
            del item.stash[_STACK], item.stash[_RUNNER]
            stack.close()
        _ahead_seconds = 0.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Name the seed of a failed test."""
    report = yield
    if report.failed and _current:
        report.sections.append(("simulated world", f"--seed {_seed_of(item)} repeats this run"))
    return report
