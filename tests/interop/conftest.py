"""Real Apache peers for the tests in this folder. Each is started once, when the first test requests it.

Every test here has the marker `interop`. If the machine lacks a program, the tests are skipped with the reason. If
`RMQKIT_INTEROP=require` is set (a CI that has Java), they fail.
"""

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.interop.apache import WITH_TLS, ApachePair, open_store_with_apache
from tests.interop.grpc.apache_proxy import PROXY_POM, prepare_proxy, run_apache_proxy
from tests.interop.grpc.scene import Place
from tests.interop.kit import ApacheKit, Unavailable, default_version, prepare
from tests.interop.reference import reason_to_skip
from tests.interop.sharing import shared_servers
from tests.interop.standalone import Standalone, run_standalone

HERE = Path(__file__).parent
# Includes the one-time download of some 90 MB of jars.
TIMEOUT_SECONDS = 1200
# The stores of users and policies, for requests about them. Signatures are not required.
ACCESS_CONF = {
    f"{subject}MetadataProvider": f"org.apache.rocketmq.auth.{subject}.provider.Local{subject.title()}MetadataProvider"
    for subject in ("authentication", "authorization")
}

# Light queues: clients that name no light queue see no difference.
LIGHT_CONF = {"enableLmq": "true", "enableMultiDispatch": "true"}

_startup_lines: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SharedServers())


class SharedServers:
    """A plug-in that stops shared servers after the last test that may use them, because a Java server is never quite
    idle.

    It is a separate plug-in, because hooks for session fixtures are not called in a folder's `conftest.py`.
    """

    def __init__(self) -> None:
        self._left: dict[str, set[pytest.Item]] = {}
        self._ready: dict[str, list[tuple[pytest.FixtureDef[object], Any]]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        # Skip the items of other files: with several processes these may run elsewhere.
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
            if (reason := reason_to_skip(item.nodeid, default_version())) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


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
    """Return Apache's programs in the version of `java/pom.xml`."""
    return kit_or_skip(default_version())


@pytest.fixture(scope="session")
def apache(apache_kit: ApacheKit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApachePair]:
    """Run a real Apache name server and broker for the session. Tests use topics and groups of their own."""
    yield from _pair(apache_kit, tmp_path_factory.mktemp("apache"), LIGHT_CONF, WITH_TLS)


@pytest.fixture(scope="session")
def managed_apache(apache_kit: ApacheKit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApachePair]:
    """Run another pair, for tests of tools that list or change everything in a broker."""
    yield from _pair(apache_kit, tmp_path_factory.mktemp("managed"), {})


@pytest.fixture(scope="session")
def apache_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Run a real Apache broker with its gRPC proxy in local mode. Tests use topics and groups of their own."""
    kit = kit_or_skip(default_version(PROXY_POM), prepare_proxy)
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
    """Run our `rmq standalone` for a module. It must stop cleanly."""
    work_dir = tmp_path_factory.mktemp("standalone")
    with run_standalone(work_dir / "store", work_dir) as running:
        _startup_lines.append(f"rmq standalone: ready in {running.process.ready_seconds:.2f} s")
        yield running
        running.stop()
