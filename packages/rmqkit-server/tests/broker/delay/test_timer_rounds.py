"""The rounds of a running timer: when it looks again, what it waits for, and a clock that is set back (store.md §18.6).
The loop's time passes by itself, and the wall clock is set by hand."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from rmqkit.protocol.names import TIMER_TOPIC
from rmqkit.protocol.schemas.brokers import TimerCheckpoint
from rmqkit.store.message_store import PutResult, PutStatus
from tests.broker.delay.stand import NOW_MS, Stand

DUE_MS = NOW_MS + 500


@pytest.fixture
async def stand(tmp_path):
    stand = Stand(tmp_path)
    yield stand
    stand.timer.stop()
    stand.close()


async def pass_ms(stand, ms):
    """Advance the wall clock, and let the timer notice it."""
    stand.clock.ms += ms
    await asyncio.sleep(0.1)


async def test_a_running_timer_delivers_a_second_when_it_is_over(stand):
    stand.keep(DUE_MS)
    stand.timer.start()
    await pass_ms(stand, 509)
    assert (stand.bodies(), stand.timer.offset_behind, stand.timer.pending) == ([], 0, 1)
    await pass_ms(stand, 1)
    assert (stand.bodies(), stand.timer.pending) == ([b"hello"], 0)


async def test_a_stopped_timer_delivers_nothing_and_continues_after_a_start(stand):
    stand.keep(DUE_MS)
    stand.timer.start()
    await pass_ms(stand, 0)
    stand.timer.stop()
    await pass_ms(stand, 600)
    assert stand.bodies() == []
    stand.timer.start()
    await pass_ms(stand, 0)
    assert stand.bodies() == [b"hello"]


async def test_a_follower_has_its_masters_messages_on_its_wheel_and_delivers_none(stand):
    for body in (b"a", b"b", b"c"):
        stand.keep(DUE_MS, body=body)
    stand.timer.follow()
    await pass_ms(stand, 0)
    assert stand.state.queue_offset == 0
    stand.timer.replace_with(TimerCheckpoint(last_read_time_ms=NOW_MS, master_timer_queue_offset=2))
    await pass_ms(stand, 1000)
    assert (stand.state.queue_offset, stand.bodies(), stand.state.read_ms) == (2, [], NOW_MS)
    assert stand.timer.pending == 0, "a slave has its master's counts"
    stand.timer.replace_with(TimerCheckpoint(last_read_time_ms=NOW_MS, master_timer_queue_offset=3))
    await pass_ms(stand, 0)
    assert stand.state.queue_offset == 3
    stand.timer.start()
    await pass_ms(stand, 0)
    assert stand.bodies() == [b"a", b"b", b"c"]


async def test_a_timer_that_delivers_itself_does_not_adopt_a_progress(stand):
    stand.timer.start()
    stand.timer.replace_with(TimerCheckpoint(last_read_time_ms=NOW_MS + 9000, master_timer_queue_offset=2))
    assert stand.state.read_ms == NOW_MS


async def test_an_acting_master_follows_again_after_its_deliveries(stand):
    sent = []

    async def remote_put(one):
        sent.append(one.body)
        await asyncio.sleep(0)
        return True

    stand.keep(DUE_MS)
    version = stand.state.files.checkpoint.data_version.counter
    stand.timer.start(remote_put)
    assert stand.state.files.checkpoint.data_version.counter == version + 1, "the master adopts the newer progress"
    await pass_ms(stand, 510)
    assert (sent, stand.bodies()) == ([b"hello"], [])
    await stand.timer.stop_remote()
    assert stand.timer.is_follower
    assert stand.state.was_delivered(DUE_MS, 0)


@pytest.mark.parametrize(
    ("fault", "pause_ms", "line"),
    [
        (PutResult(PutStatus.SERVICE_NOT_AVAILABLE, reason="no space"), 500, "timed messages wait"),
        (OSError(5, "Input/output error"), 10_000, "cannot process timed messages from queue offset 1 on"),
    ],
)
async def test_a_message_that_cannot_be_stored_is_retried_after_a_pause(
    fault, pause_ms, line, stand, monkeypatch, caplog
):
    loop, tries, put = asyncio.get_running_loop(), [], stand.store.put

    def failing(one):
        tries.append(loop.time())
        if len(tries) > 3:
            return put(one)
        if isinstance(fault, Exception):
            raise fault
        return fault

    stand.keep(DUE_MS)
    stand.timer.start()
    monkeypatch.setattr(stand.store, "put", failing)
    await pass_ms(stand, 510)
    await asyncio.sleep(60)
    assert stand.bodies() == [b"hello"]
    assert [round((after - before) * 1000) // 10 * 10 for before, after in pairwise(tries)] == [pause_ms] * 3
    lines = [one.partition(":")[0] for one in caplog.messages]
    assert lines == [line] * (1 if isinstance(fault, PutResult) else 3), "a refusal is logged once for each reason"


@pytest.mark.parametrize(("back_ms", "is_noticed"), [(5000, False), (5010, True)])
async def test_a_clock_that_is_set_back_by_more_than_five_seconds_is_noticed(back_ms, is_noticed, stand, caplog):
    stand.timer.start()
    await pass_ms(stand, 20_000)
    await pass_ms(stand, -back_ms)
    assert (stand.state.write_ms < NOW_MS + 20_000) is is_noticed
    assert [line.partition(" from ")[0] for line in caplog.messages] == ["the clock was set back"] * is_noticed


async def test_messages_from_before_a_late_round_are_on_the_wheel_before_it_delivers(stand):
    stand.timer.start()
    await pass_ms(stand, 0)
    stand.keep(DUE_MS, body=b"a", UNIQ_KEY="K")
    stand.keep(DUE_MS, body=b"b")
    stand.keep(DUE_MS, body=b"marker", TIMER_DEL_UNIQKEY="K")
    await pass_ms(stand, 2000)
    stand.timer.start()
    await pass_ms(stand, 0)
    assert stand.bodies() == [b"b"], "the marker was on the wheel when its second was delivered"
    assert stand.state.queue_offset == stand.store.max_offset(TIMER_TOPIC, 0) == 3


async def test_a_topic_without_a_checkpoint_is_surveyed_before_its_messages_are_delivered(tmp_path, caplog):
    stand = Stand(tmp_path / "store")
    stand.keep(DUE_MS, UNIQ_KEY="K")
    stand.keep(DUE_MS + 90_000, UNIQ_KEY="L")
    stand.store.close()
    stand.state.files.close()
    again = Stand(tmp_path / "store")
    assert again.state.needs_survey
    again.timer.start()
    await pass_ms(again, 600)
    assert again.bodies() == [b"hello"]
    assert [line.partition(",")[0] for line in caplog.messages] == ["timer topic: 2 messages pending"]
    again.timer.stop()
    again.close()
