"""The client suite: behaviours of our client, each with our broker and, unchanged, with Apache's.

A behaviour is a coroutine function that takes a `scene` (`scene.Scene`); those of a peer run together (`runner`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command
from tests.interop.apache import BROKER_NAME, CLUSTER, QUICK_CONF, ApachePair, ask
from tests.interop.conftest import kit_or_skip
from tests.interop.kit import default_version
from tests.interop.standalone import run_standalone
from tests.interop.suite.runner import Runner, is_behaviour
from tests.interop.suite.scene import Peer
from tests.ports import free_ports

PEERS = ("ours", "apache")
_RUNNER = pytest.StashKey[Runner]()
_outcomes: defaultdict[str, dict[str, bool]] = defaultdict(dict)
"""Peer → behaviour → True if it passed with all its parameters."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "patient: a behaviour that waits for what the broker does in its own time")
    config.addinivalue_line("markers", "alone: a behaviour that changes what others at the same peer would notice")


def pytest_itemcollected(item: pytest.Item) -> None:
    if is_behaviour(item):
        item.add_marker(pytest.mark.real_time)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "peer" in metafunc.fixturenames:
        metafunc.parametrize("peer", PEERS, indirect=True, scope="session")


@pytest.fixture(scope="session")
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """Yield each of the two servers, started once for all behaviours."""
    if request.param == "apache":
        pair: ApachePair = request.getfixturevalue("apache")
        changed = Command(RequestCode.UPDATE_BROKER_CONFIG, body=b"recallMessageEnable=true")
        assert ask(pair.broker_addr, changed).code == 0
        yield from with_runner(request, made_peer("apache", pair.namesrv_addr, pair.broker_addr, tmp_path_factory))
        return
    work_dir = tmp_path_factory.mktemp("ours")
    conf = work_dir / "broker.conf"
    settings = {"brokerName": BROKER_NAME, "brokerClusterName": CLUSTER, "enablePropertyFilter": "true", **QUICK_CONF}
    settings["recallMessageEnable"] = "true"
    conf.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    port = free_ports()[1]  # port 0 would have no VIP port
    with run_standalone(work_dir / "store", work_dir, "--config", str(conf), "--port", str(port)) as running:
        yield from with_runner(request, made_peer("ours", running.namesrv_addr, running.broker_addr, tmp_path_factory))
        running.stop()


def made_peer(name: str, namesrv_addr: str, broker_addr: str, folders: pytest.TempPathFactory) -> Peer:
    return Peer(
        name=name,
        namesrv_addr=namesrv_addr,
        broker_addr=broker_addr,
        broker_name=BROKER_NAME,
        cluster=CLUSTER,
        work_dir=folders.mktemp(f"suite-{name}"),
        kit=lambda: kit_or_skip(default_version()),
    )


def with_runner(request: pytest.FixtureRequest, peer: Peer) -> Iterator[Peer]:
    runner = Runner(peer)
    request.config.stash[_RUNNER] = runner
    with peer.kept:
        try:
            yield peer
        finally:
            runner.close()


@pytest.fixture
def scene(peer: Peer) -> None:
    """Request the scene, which the runner creates on its loop."""


@pytest.hookimpl(tryfirst=True)  # before the plug-in that runs each coroutine on a loop of its own
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not is_behaviour(pyfuncitem):
        return None
    others = [
        item
        for item in pyfuncitem.session.items
        if isinstance(item, pytest.Function)
        and is_behaviour(item)
        and item.callspec.params["peer"] == pyfuncitem.callspec.params["peer"]
    ]
    peer, name = pyfuncitem.callspec.params["peer"], pyfuncitem.originalname
    pyfuncitem.user_properties.append(("behaviour", f"{peer} {name}"))
    pyfuncitem.config.stash[_RUNNER].run(pyfuncitem, others)
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for key, value in report.user_properties if report.when == "call" and not report.skipped else ():
        if key == "behaviour":
            place, _, name = str(value).partition(" ")
            _outcomes[place][name] = _outcomes[place].get(name, True) and report.passed


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _outcomes:
        return
    terminalreporter.section("client suite")
    for peer, outcomes in _outcomes.items():
        terminalreporter.line(f"{sum(outcomes.values())} of {len(outcomes)} behaviours passed at {peer}")
