"""Browsers get each event once, in order, while every program between them and the writer is killed once, and the
writer, too. ``make kill T=sse`` does it with 1,000 sessions and ten kills."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples import chosen_seed
from tests.faults.sse import Browser, Chat

SESSIONS = 25


@pytest.mark.faults
@pytest.mark.real_time
async def test_browsers_get_each_event_once_while_broker_writer_and_gateway_are_killed(tmp_path: Path) -> None:
    chat = Chat(tmp_path, SESSIONS, pause_seconds=0.1, seed=chosen_seed())
    outcome = await chat.run(kills=3)
    assert outcome.faults == []
    assert outcome.kills == ["broker", "writer", "gateway"]
    assert outcome.after_end == {204: SESSIONS}
    assert outcome.connections >= 2 * SESSIONS, "the browsers connected again after the kill of the gateway"
    assert outcome.events >= 4 * SESSIONS, "every browser got an event after each kill"


def test_a_lost_and_a_repeated_event_are_faults() -> None:
    browser = Browser("s", 0)
    for number in (0, 1, 1, 3):
        browser._dispatch(f"id: 1.{number}.s\ndata: {number}\n\n")
    browser._dispatch(": ping\n\n")
    browser._dispatch("event: expired\ndata: x\n\n")
    assert browser.faults == ["s: 1 in place of 2", "s: {'event': 'expired', 'data': 'x'}"]
    assert (browser.last_id, browser.is_finished) == ("1.3.s", False)
    browser._dispatch("id: 1.4.s\nevent: end\ndata: \n\n")
    assert (browser.last_id, browser.is_finished) == ("1.4.s", True)
