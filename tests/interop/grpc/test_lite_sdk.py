"""The lite consumers of Apache's Java and Python SDKs, unmodified, with our broker's endpoint and with `rmq proxy`.

Source: lite.md §6, §8.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.grpc_broker import GrpcBroker
from tests.interop.apache import HOST
from tests.interop.kit import Unavailable
from tests.interop.sdks.programs import Program, Running, prepare_java, prepare_python
from tests.interop.server_process import ServerProcess, wait_until
from tests.interop.standalone import READY_SECONDS, RMQ

RUN_SECONDS = 150.0
EVERY_SECOND = {
    "type": "EXPONENTIAL",
    "exponentialRetryPolicy": {"initial": 1000, "max": 1000, "multiplier": 1},
}
# Python's SDK subscribes to each letter of a name, so its names have one letter.
EXPECTED = {
    "java": {
        "push": ["a0", "a2", "b0", "b1", "b2", "fails once"],
        "redelivered": True,
        "s2": ["b0", "b1", "b2"],
        "left": ["s1"],
    },
    "python": {
        "push": ["fails once", "p0", "p2", "q0"],
        "redelivered": True,
        "simple": [["p", "fails once"], ["p", "p0"], ["p", "p2"], ["q", "q0"]],
    },
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcBroker]:
    started = GrpcBroker(tmp_path_factory.mktemp("broker"), {})
    try:
        started.start()
        yield started
    finally:
        started.kill()


@pytest.fixture(scope="module", params=["broker", "proxy"])
def place(
    request: pytest.FixtureRequest, broker: GrpcBroker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """The name of a place, and the address of its endpoint."""
    if request.param == "broker":
        yield "broker", broker.address
        return
    command = [RMQ, "proxy", "-n", broker.name_server, "--port", "0", "--host", HOST]
    with ServerProcess(command, tmp_path_factory.mktemp("proxy") / "proxy.log") as process:
        yield "proxy", process.wait_ready(r"^ready grpc=(\S+)", READY_SECONDS)[1]


@pytest.mark.parametrize(("language", "prepare"), [("java", prepare_java), ("python", prepare_python)])
def test_a_lite_consumer_receives_and_gets_failed_messages_again(
    broker: GrpcBroker, place: tuple[str, str], language: str, prepare: Callable[[], Program], tmp_path: Path
) -> None:
    try:
        program = prepare()
    except Unavailable as reason:
        pytest.skip(str(reason))
    name, address = place
    prefix = f"{name}-{language}"
    bound = {"attributes": {"+lite.bind.topic": f"{prefix}-lite"}, "group_retry_policy": EVERY_SECOND}
    asyncio.run(
        broker.make({f"{prefix}-lite": "LITE"}, {f"{prefix}-lite-{kind}": bound for kind in ("push", "simple")})
    )
    with Running(program, tmp_path / "sdk", address, prefix, "lite") as running:
        wait_until(lambda: running.has_told("lite"), RUN_SECONDS, "the lite scenario")
        assert running.facts("lite") == EXPECTED[language]
