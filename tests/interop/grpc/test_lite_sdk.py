"""The lite consumers of Apache's Python SDK, unmodified, with our broker's endpoint. Source: lite.md §18, test 24."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults.grpc_broker import GrpcBroker
from tests.interop.kit import Unavailable
from tests.interop.sdks.programs import Running, prepare_python
from tests.interop.server_process import wait_until

RUN_SECONDS = 150.0
EVERY_SECOND = {
    "type": "EXPONENTIAL",
    "exponentialRetryPolicy": {"initial": 1000, "max": 1000, "multiplier": 1},
}


def test_lite_consumers_of_the_python_sdk_receive_and_get_failed_messages_again(tmp_path: Path) -> None:
    try:
        program = prepare_python()
    except Unavailable as reason:
        pytest.skip(str(reason))
    broker = GrpcBroker(tmp_path, {})
    try:
        broker.start()
        bound = {"attributes": {"+lite.bind.topic": "P-lite"}, "group_retry_policy": EVERY_SECOND}
        asyncio.run(broker.make({"P-lite": "LITE"}, {"P-lite-push": bound, "P-lite-simple": bound}))
        with Running(program, tmp_path / "sdk", broker.address, "P", "lite") as running:
            wait_until(lambda: running.has_told("lite"), RUN_SECONDS, "the lite scenario")
            facts = running.facts("lite")
    finally:
        broker.kill()
    assert facts == {
        "push": ["fails once", "p0", "p2", "q0"],
        "redelivered": True,
        "simple": [["p", "fails once"], ["p", "p0"], ["p", "p2"], ["q", "q0"]],
    }
