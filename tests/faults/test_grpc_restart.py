"""A hundred gRPC clients survive one stop and one kill of the broker; `make kill T=grpc` does it twenty times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.grpc_broker import GrpcBroker
from tests.faults.grpc_restart import restart


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.timeout(900)
async def test_a_hundred_clients_continue_and_nothing_answered_is_lost(tmp_path: Path) -> None:
    async with GrpcBroker(tmp_path, {"brokerName": "broker-a"}, is_quick=True) as broker:
        outcome = await restart(broker, ["stop", "kill"], pause_seconds=0.5, invisible_seconds=2)
    print(outcome)
    assert not any(outcome.missing.values()), outcome
    assert outcome.answered > 80, "the producers got answers"
