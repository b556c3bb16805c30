"""Real Apache peers for the tests in this folder; each is started once and only when a test asks for it.

Every test here carries the marker `interop`. What the machine lacks is a skip with its reason; where
`RMQKIT_INTEROP=require` is set (a CI that has Java), it is an error.
"""

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.interop.apache import WITH_TLS, ApachePair, open_store_with_apache
from tests.interop.grpc.apache_proxy import prepare_proxy, run_apache_proxy
from tests.interop.grpc.scene import Place
from tests.interop.kit import ApacheKit, Unavailable, default_version, prepare
from tests.interop.sharing import shared_servers
from tests.interop.standalone import Standalone, run_standalone

HERE = Path(__file__).parent
# Includes the one-time download of some 90 MB of jars.
TIMEOUT_SECONDS = 1200
# Where users and policies are kept, for those who ask about them; nobody has to sign anything.
ACCESS_CONF = {
    f"{subject}MetadataProvider": f"org.apache.rocketmq.auth.{subject}.provider.Local{subject.title()}MetadataProvider"
    for subject in ("authentication", "authorization")
}

# Light queues: nothing changes for who does not name one.
LIGHT_CONF = {"enableLmq": "true", "enableMultiDispatch": "true"}

_startup_lines: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SharedServers())


class SharedServers:
    """Ends what the session shares after the last test that may ask for it: a Java server is never quite idle.

    A plugin of its own, as a folder's `conftest.py` is not told of what is set up for the session.
    """

    def __init__(self) -> None:
        self._left: dict[str, set[pytest.Item]] = {}
        self._ready: dict[str, list[tuple[pytest.FixtureDef[object], Any]]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        # Not those of the other files: with several processes they may run elsewhere.
        for item in session.items:
            if HERE in item.path.parents and (servers := shared_servers(item.path)):
                self._left.setdefault(servers, set()).add(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: Any
    ) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            is_shared = fixturedef.scope == "session" and fixturedef.func.__module__.startswith("tests.interop.")
            for servers, left in self._left.items():
                if is_shared and request._pyfuncitem in left:
                    self._ready.setdefault(servers, []).append((fixturedef, request))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            for servers, left in self._left.items():
                left.discard(item)
                while not left and self._ready.get(servers):
                    fixture, request = self._ready[servers].pop()
                    fixture.finish(request)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.interop)
            item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _startup_lines:
        terminalreporter.section("servers started")
    for line in _startup_lines:
        terminalreporter.line(line)


def kit_or_skip(version: str, prepare: Callable[[str], ApacheKit] = prepare) -> ApacheKit:
    try:
        return prepare(version)
    except Unavailable as reason:
        if os.environ.get("RMQKIT_INTEROP") == "require":
            raise
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def apache_kit() -> ApacheKit:
    """Apache's programs in the version of `java/pom.xml`."""
    return kit_or_skip(default_version())


@pytest.fixture(scope="session")
def apache(apache_kit: ApacheKit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApachePair]:
    """A real Apache name server and broker, shared by the session: use topics and groups of your own."""
    yield from _pair(apache_kit, tmp_path_factory.mktemp("apache"), LIGHT_CONF, WITH_TLS)


@pytest.fixture(scope="session")
def managed_apache(apache_kit: ApacheKit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApachePair]:
    """Another pair, for tests of tools that list or change all that a broker has."""
    yield from _pair(apache_kit, tmp_path_factory.mktemp("managed"), {})


@pytest.fixture(scope="session")
def apache_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A real Apache broker with its gRPC proxy in local mode: use topics and groups of your own."""
    kit = kit_or_skip(default_version(), prepare_proxy)
    with run_apache_proxy(kit, tmp_path_factory.mktemp("proxy")) as (process, place):
        _startup_lines.append(f"apache {kit.version}: proxy ready in {process.ready_seconds:.2f} s")
        yield place


def _pair(
    kit: ApacheKit, work_dir: Path, conf: Mapping[str, str], jvm_options: Sequence[str] = ()
) -> Iterator[ApachePair]:
    conf = {**ACCESS_CONF, **conf}
    with open_store_with_apache(kit, work_dir / "store", work_dir, conf, jvm_options=jvm_options) as pair:
        _startup_lines.append(
            f"apache {kit.version}: name server ready in {pair.name_server.ready_seconds:.2f} s, "
            f"then broker in {pair.broker.ready_seconds:.2f} s"
        )
        yield pair


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """Our `rmq standalone`, one per module; its stop has to be clean."""
    work_dir = tmp_path_factory.mktemp("standalone")
    with run_standalone(work_dir / "store", work_dir) as running:
        _startup_lines.append(f"rmq standalone: ready in {running.process.ready_seconds:.2f} s")
        yield running
        running.stop()
