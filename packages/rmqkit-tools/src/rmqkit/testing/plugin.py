"""The pytest plugin: real brokers in tests.

===================  ==================================================================================================
fixture              value
===================  ==================================================================================================
``rmq_broker``       a `LocalCluster` with a name server and one broker
``rmq_cluster``      a `LocalCluster` with two brokers, or with the number in the marker
``rmq_clock``        the `VirtualClock` of the servers
``rmq_topic``        the name of a new topic, with 4 queues on each broker
``rmq_group``        the name of a new consumer group
``rmq_producer``     a producer: in a plain test a `rmqkit.sync.Producer` that is started; in an ``async def`` test a
                     `rmqkit.Producer`, which you enter with ``async with``
``rmq_console``      the address of a web console for ``rmq_broker``, such as ``http://127.0.0.1:40123/``
``rmq_consumer``     a member of ``rmq_group``, in the same way: a `rmqkit.sync.PushConsumer` or a
                     `rmqkit.PushConsumer`; it starts at the first message and saves offsets every 50 ms
===================  ==================================================================================================

The marker ``rmq(fresh=True, brokers=2, slaves=1, settings={"flushDiskType": "SYNC_FLUSH"})`` chooses the cluster.
The ini option ``rmq_broker`` is ``fresh`` (a new cluster for each test) or ``shared`` (one cluster for all tests
without special needs; ``rmq_topic`` and ``rmq_group`` keep the tests apart). With ``authenticationEnabled``, the
fixtures' clients sign as the first user.
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rmqkit import Producer, PushConsumer, sync
    from rmqkit.testing.clock import VirtualClock
    from rmqkit.testing.cluster import LocalCluster

_SHARED = pytest.StashKey["LocalCluster"]()
_MARKER = "rmq(fresh=False, brokers=1, slaves=0, settings={}): what the test's rmq_broker or rmq_cluster is"
_NAME_CHARACTERS_MAX = 90
_NOT_LEGAL = re.compile(r"[^a-zA-Z0-9_-]+")
_numbers = itertools.count(1)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    # pytest rewrites the asserts of a plugin's whole distribution. This would include broker and clients: their import
    # would take twice as long, and both would run slower.
    getattr(pluginmanager.rewrite_hook, "_must_rewrite", set()).discard("rmqkit")
    parser.addini("rmq_broker", "fresh: each test has its own broker; shared: one for all", default="fresh")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    if (mode := config.getini("rmq_broker")) not in ("fresh", "shared"):
        raise pytest.UsageError(f"ini option rmq_broker is {mode!r}: give fresh or shared")


def pytest_unconfigure(config: pytest.Config) -> None:
    if _SHARED in config.stash:
        config.stash[_SHARED].close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the seed of the chaos dials to the report of a failure."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("rmq_broker")
    if report.failed and report.when == "call" and cluster is not None:
        listed = dict.fromkeys(str(broker.dials) for broker in cluster.brokers if broker.dials.dials)
        if listed:
            report.sections.append(("rmq chaos", "\n".join(listed)))
    return report


@pytest.fixture
def rmq_broker(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Yield a name server and a broker."""
    if sys.platform == "win32":
        needed = "rmq_broker needs Linux or macOS, and this is Windows: run the tests in WSL or in a container"
        pytest.fail(needed, pytrace=False)
    from rmqkit.testing.cluster import LocalCluster

    wanted = _wanted(request)
    is_fresh = request.config.getini("rmq_broker") == "fresh" or "rmq_clock" in request.fixturenames
    if wanted.pop("fresh", is_fresh) or wanted:
        with LocalCluster(**wanted) as cluster:
            yield cluster
        return
    stash = request.config.stash
    if _SHARED not in stash:
        stash[_SHARED] = LocalCluster().start()
    yield stash[_SHARED]
    stash[_SHARED].chaos()


@pytest.fixture
def rmq_cluster(rmq_broker: LocalCluster) -> LocalCluster:
    """Return a name server and several brokers."""
    return rmq_broker


@pytest.fixture
def rmq_clock(rmq_broker: LocalCluster) -> VirtualClock:
    """Return the clock of the servers."""
    return rmq_broker.clock


@pytest.fixture
def rmq_topic(request: pytest.FixtureRequest, rmq_broker: LocalCluster) -> str:
    """Create a topic for the test and return its name."""
    name = _own_name(request)
    rmq_broker.create_topic(name)
    return name


@pytest.fixture
def rmq_group(request: pytest.FixtureRequest) -> str:
    """Return a name for the test's consumer group."""
    return _own_name(request)


@pytest.fixture
def rmq_producer(request: pytest.FixtureRequest, rmq_broker: LocalCluster) -> Iterator[Producer | sync.Producer]:
    """Yield a producer: started and blocking, or in an ``async def`` test a producer to use in ``async with``."""
    import rmqkit

    group = f"{_own_name(request)}-producer"
    settings = rmqkit.ProducerSettings(auth=rmq_broker.brokers[0].credentials)
    if _is_async(request):
        yield rmqkit.Producer(group, rmq_broker.name_server, settings=settings)
    else:
        with rmqkit.sync.Producer(group, rmq_broker.name_server, settings=settings) as producer:
            yield producer


@pytest.fixture
def rmq_consumer(
    request: pytest.FixtureRequest, rmq_broker: LocalCluster, rmq_group: str
) -> Iterator[PushConsumer | sync.PushConsumer]:
    """Yield a consumer: started and blocking, or in an ``async def`` test a consumer to use in ``async with``."""
    import rmqkit

    first = rmqkit.StartFrom.FIRST_OFFSET
    settings = rmqkit.PushConsumerSettings(
        start_from=first,
        persist_interval_ms=50,
        take_over_pause_ms=0,
        drain_ms=5000,
        auth=rmq_broker.brokers[0].credentials,
    )
    if _is_async(request):
        yield rmqkit.PushConsumer(rmq_group, rmq_broker.name_server, settings=settings)
    else:
        with rmqkit.sync.PushConsumer(rmq_group, rmq_broker.name_server, settings=settings) as consumer:
            yield consumer


@pytest.fixture
def rmq_console(rmq_broker: LocalCluster) -> Iterator[str]:
    """Yield the address of a web console."""
    from rmqkit.testing.console import local_console

    with local_console(rmq_broker) as address:
        yield address


def _wanted(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the options in the markers of a test and its fixtures; the nearest marker wins."""
    wanted: dict[str, Any] = {"brokers": 2} if "rmq_cluster" in request.fixturenames else {}
    for marker in reversed(list(request.node.iter_markers("rmq"))):
        if marker.args or marker.kwargs.keys() - {"fresh", "brokers", "slaves", "settings"}:
            given = ", ".join((*map(repr, marker.args), *(f"{key}={value!r}" for key, value in marker.kwargs.items())))
            pytest.fail(f"the marker is rmq({given}): it has to be {_MARKER}", pytrace=False)
        wanted |= marker.kwargs
    return wanted


def _own_name(request: pytest.FixtureRequest) -> str:
    """Return a unique name that is legal for topics and groups."""
    words = _NOT_LEGAL.sub("-", request.node.name)[:_NAME_CHARACTERS_MAX].strip("-")
    return f"{words}-{next(_numbers)}"


def _is_async(request: pytest.FixtureRequest) -> bool:
    return inspect.iscoroutinefunction(request.function)
