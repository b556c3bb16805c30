"""Which processes use the compiled core."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rmqkit.protocol import core
from rmqkit.protocol.core import FORMAT, Core

RIGHT, OTHER = SimpleNamespace(FORMAT=FORMAT), SimpleNamespace(FORMAT=FORMAT + 1)


@pytest.mark.parametrize("environment", [{}, {"RMQKIT_NATIVE": "1"}, {"RMQKIT_NATIVE": ""}])
def test_a_core_that_fits_is_used(monkeypatch, environment):
    monkeypatch.setattr(core, "_native", RIGHT)
    assert Core.of(environment).fault == ""


@pytest.mark.parametrize(
    ("native", "environment", "fault"),
    [
        (None, {}, "rmqkit_native is not installed"),
        (RIGHT, {"RMQKIT_NATIVE": "0"}, "RMQKIT_NATIVE=0"),
        (OTHER, {}, f"has format {FORMAT + 1}, {FORMAT} is needed: install the one beside this rmqkit"),
        (OTHER, {"RMQKIT_NATIVE": "0"}, "has format"),  # the reason that the user did not choose
    ],
)
def test_a_process_without_the_core_knows_why(monkeypatch, native, environment, fault):
    monkeypatch.setattr(core, "_native", native)
    found = Core.of(environment)
    assert fault in found.fault
    assert found.sends_reader({}, (), {}, 1, 1) is found.grpc_sends((), 1, 1) is found.grpc_messages(()) is None
    assert found.header_decoder(1) is found.select_records is found.log_reader is None
    assert found.read_grpc_ack is found.read_grpc_call is None
