"""Real Apache peers for the tests in this folder; each is started once and only when a test asks for it.

Every test here carries the marker `interop`. What the machine lacks is a skip with its reason; where
`RMQKIT_INTEROP=require` is set (a CI that has Java), it is an error.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.apache import ApachePair, open_store_with_apache
from tests.interop.kit import ApacheKit, Unavailable, default_version, prepare
from tests.interop.standalone import Standalone, run_standalone

HERE = Path(__file__).parent
# Includes the one-time download of some 90 MB of jars.
TIMEOUT_SECONDS = 600

_startup_lines: list[str] = []


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


def kit_or_skip(version: str) -> ApacheKit:
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
    work_dir = tmp_path_factory.mktemp("apache")
    with open_store_with_apache(apache_kit, work_dir / "store", work_dir) as pair:
        _startup_lines.append(
            f"apache {apache_kit.version}: name server ready in {pair.name_server.ready_seconds:.2f} s, "
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
