"""The wall clock is set back while half messages wait: their producers are asked all the same."""

from __future__ import annotations

import pytest

from tests.broker.half_messages import HalfMessages

BACK = pytest.mark.parametrize("back_ms", [3_600_000, 86_400_000])


@pytest.mark.virtual_time
@BACK
@pytest.mark.parametrize("immunity", [{}, {"CHECK_IMMUNITY_TIME_IN_SECONDS": 60}], ids=["plain", "immune"])
def test_a_half_message_from_before_is_asked_about(tmp_path, back_ms, immunity):
    with HalfMessages(tmp_path / "store") as halves:
        producer = halves.producer()
        halves.half(**immunity)
        halves.round(after_ms=-back_ms)
        assert len(producer.commands) == 1


@pytest.mark.virtual_time
@BACK
def test_a_half_message_from_after_waits_for_its_time(tmp_path, back_ms):
    with HalfMessages(tmp_path / "store") as halves:
        producer = halves.producer()
        halves.round(after_ms=-back_ms)
        halves.half()
        timeout_ms = halves.settings.transaction_timeout_ms
        halves.round(after_ms=timeout_ms)
        assert producer.commands == []
        halves.round(after_ms=1)
        assert len(producer.commands) == 1
