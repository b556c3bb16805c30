"""A body that changed on the disk gets no new CRC when the broker stores the message again. The change is logged."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.names import HALF_TOPIC, SCHEDULE_TOPIC
from rmqkit.store.offline.check import Kind, dump, verify
from rmqkit.store.offline.repair import repair
from tests.broker.delay.test_schedule import running
from tests.broker.half_messages import HalfMessages
from tests.broker.pops import context_of, now_ms, sent
from tests.broker.send.test_send_back import send_back, sent_offset
from tests.broker.timed import STEP_MS, timed
from tests.broker.transaction.test_transactions import COMMIT, HALF, Half
from tests.store.stores import change_body, message, opened, put_all, small_settings
from tests.waiting import SECONDS

NOT_STORED = "is not stored again: its body does not match its CRC"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Read the wall clock more often than once a second."""
    monkeypatch.setattr("rmqkit.broker.delay.levels._LOOK_MS_MAX", 5)
    monkeypatch.setattr("rmqkit.broker.delay.levels._PAUSE_MS_MIN", 0)


def put_three(delays):
    for body in (b"first", b"second", b"third"):
        delays.put(1, body=body)


async def test_a_delayed_message_with_another_body_is_skipped_and_reported(tmp_path, caplog):
    async with running(tmp_path) as delays:
        put_three(delays)
        at = change_body(tmp_path, b"second")
        delays.clock.ms += 1000
        assert await delays.delivered(2) == [b"first", b"third"]
    assert caplog.text.count(f"delay level 1: message at {at} is skipped") == 1


async def test_bodies_are_not_compared_where_recovery_does_not_either(tmp_path, caplog):
    async with running(tmp_path, check_crc_on_recover=False) as delays:
        put_three(delays)
        change_body(tmp_path, b"second")
        delays.clock.ms += 1000
        assert await delays.delivered(3) == [b"first", b"recond", b"third"]
    assert "skipped" not in caplog.text


@pytest.mark.parametrize(("physical_offset", "why"), [(1 << 40, "the log has no"), (0, "it is one of Other-0")])
async def test_an_entry_of_a_delay_level_that_points_elsewhere_is_reported(tmp_path, caplog, physical_offset, why):
    async with running(tmp_path) as delays:
        put_all(delays.store, message("Other"))
        size = delays.store.max_physical_offset
        put_three(delays)
        delays.store.flusher.flush_queues()  # until then entries are read from memory
        file = tmp_path / "consumequeue" / SCHEDULE_TOPIC / "0" / f"{0:020d}"
        with file.open("r+b") as queue:
            queue.seek(20)
            queue.write(physical_offset.to_bytes(8) + size.to_bytes(4))
        delays.clock.ms += 1000
        assert await delays.delivered(2) == [b"first", b"third"]
    assert f"delay level 1: message at {physical_offset} is skipped: {why}" in caplog.text


async def test_a_timed_message_with_another_body_is_left_out_and_reported_once(tmp_path, caplog):
    async with timed(tmp_path) as one:
        for body in (b"first", b"second", b"third"):
            one.at(20 * STEP_MS, body)
        await one.on_wheel(3)
        at = change_body(tmp_path, b"second")
        await one.pass_ms(21 * STEP_MS)
        await one.until(lambda: len(one.bodies()) == 2)
        assert one.bodies() == [b"first", b"third"]
        assert one.timer.pending == 0
    assert caplog.text.count(f"timed message at {at} for b'T' is not delivered") == 1
    assert "anew" not in caplog.text


async def test_a_timed_message_that_is_late_has_the_body_that_was_sent(tmp_path, caplog):
    async with timed(tmp_path) as one:
        one.timer.stop()
        for body in (b"first", b"second"):
            one.at(STEP_MS, body)
        at = change_body(tmp_path, b"first")
        one.clock.ms += 10 * STEP_MS
        one.timer.start()
        await one.until(lambda: one.bodies() == [b"second"])
    assert caplog.text.count(f"timed message at {at} for b'T' is not delivered") == 1


async def test_a_timed_message_is_not_parked_again_with_another_body(tmp_path, caplog):
    async with timed(tmp_path, timer_roll_window_slots=20) as one:
        one.at(50 * STEP_MS, b"long")
        await one.on_wheel(1)
        change_body(tmp_path, b"long")
        await one.pass_ms(25 * STEP_MS)
        await one.until(lambda: one.timer.pending == 0)
        assert one.kept() == 1
    assert caplog.text.count("is not delivered") == 1


async def test_a_half_message_with_another_body_is_not_committed(caplog, tmp_path, cluster):
    half = Half(cluster, await cluster.send(body=b"transfer 100", properties=HALF))
    change_body(tmp_path / "store", b"transfer 100")
    assert (await half.decide(COMMIT))[0] == ResponseCode.SYSTEM_ERROR
    assert context_of(cluster).store.max_offset("T", 0) == 0
    assert f"the message of {HALF_TOPIC} at {half.physical_offset} {NOT_STORED}" in caplog.text


@pytest.mark.virtual_time
def test_a_half_message_with_another_body_is_neither_put_again_nor_asked_about(tmp_path, caplog):
    with HalfMessages(tmp_path / "store") as halves:
        producer = halves.producer()
        halves.half(b"one"), halves.half(b"two")
        change_body(tmp_path / "store", b"one")
        halves.round(6001)
        assert [one.body for one in halves.records()] == [b"nne", b"two", b"two"]
        assert len(producer.asked) == 1
    assert "skipping half message 0 of queue 0, which cannot be read" in caplog.text


async def test_a_message_sent_back_with_another_body_is_left_to_its_consumer(caplog, tmp_path, cluster):
    """The consumer stores the body that it got itself when the broker refuses the message."""

    offset, _ = await sent_offset(cluster, body=b"changed")
    change_body(tmp_path / "store", b"changed")
    await cluster.heartbeat("c", ("T", "*"))
    answer = await send_back(cluster, offset)
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {offset}")
    assert f"the message of T at {offset} {NOT_STORED}" in caplog.text


async def test_a_popped_message_with_another_body_is_not_redelivered(caplog, tmp_path, cluster):
    await sent(cluster, "changed", "other")
    service, pop_time = context_of(cluster).pop, now_ms() - 5000
    assert context_of(cluster).groups.get("g")
    change_body(tmp_path / "store", b"changed")
    service.check_points.add("T", "g", 0, [0, 1], pop_time=pop_time, invisible_ms=1000, queue=3)
    async with asyncio.timeout(SECONDS):
        while service.check_points.pending:
            await asyncio.sleep(0.01)
    assert context_of(cluster).store.max_offset("%RETRY%g_T", 0) == 1
    assert "popped message T[0]@0 cannot be read: " in caplog.text


def test_a_replay_of_a_store_leaves_out_messages_with_another_body(tmp_path: Path) -> None:
    with opened(tmp_path, small_settings()) as store:
        put_all(store, message(body=b"one"), message(body=b"two"))
    at = change_body(tmp_path, b"one")
    told = []
    assert [one.body for one in dump(tmp_path, verify_crc=True, on_damage=told.append)] == [b"two"]
    assert [(one.kind, one.position) for one in told] == [(Kind.BODY_CRC, at)]
    assert [one.body for one in dump(tmp_path)] == [b"nne", b"two"]


async def test_a_timed_message_whose_topic_changed_is_delivered_and_reported(tmp_path, caplog):
    """The damage can be in the record or in its unit in the timer log."""
    async with timed(tmp_path) as one:
        one.at(20 * STEP_MS, b"timed")
        await one.on_wheel(1)
        path = tmp_path / "commitlog" / f"{0:020d}"
        at = path.read_bytes().index(b"REAL_TOPIC\x01T") + len(b"REAL_TOPIC\x01")
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"U")
        await one.pass_ms(21 * STEP_MS)
        await one.until(lambda: one.bodies("U") == [b"timed"])
    assert "timed message at 0 is for U, but its unit in the timer log is for another topic" in caplog.text


@pytest.mark.parametrize(
    ("at", "octet", "said"),
    [
        (43, 1, "one of rmq_sys_wheel_timer for b'T'"),
        (35, 1, "none there: "),
        (39, 0, "one of "),
        (15, 3, "magic 3 "),
    ],
)
async def test_a_unit_of_the_timer_log_that_is_not_as_its_record_makes_it_is_found(tmp_path, at, octet, said):
    """After the repair, a restarted broker delivers both messages."""
    async with timed(tmp_path) as one:
        one.at(20 * STEP_MS, b"first")
        one.at(20 * STEP_MS, b"second")
        await one.on_wheel(2)
        await one.flushed()
        settings = one.settings
    assert verify(tmp_path, settings).is_sound
    path = tmp_path / "timerlog" / f"{0:020d}"
    with path.open("r+b") as file:
        file.seek(52 + at)
        file.write(bytes([octet]))
    (found,) = verify(tmp_path, settings).findings
    assert (found.kind, found.path, found.position) == (Kind.TIMER_UNIT, str(path), 52)
    assert found.found.startswith(said)
    repair(tmp_path, settings, is_dry_run=False)
    assert verify(tmp_path, settings).is_sound
    async with timed(tmp_path) as again:
        await again.on_wheel(2)
        await again.pass_ms(21 * STEP_MS)
        await again.until(lambda: again.bodies() == [b"first", b"second"])


def test_a_query_does_not_give_out_an_older_message_with_another_body(tmp_path, caplog):
    with opened(tmp_path, small_settings()) as store:
        put_all(store, message(body=b"one", KEYS="k"), message(body=b"two", KEYS="k"))
    at = change_body(tmp_path, b"one")
    with opened(tmp_path, small_settings()) as store:
        assert len(store.query("TopicTest", "k", 32, 0, 1 << 60).physical_offsets) == 1
    assert f"the message at {at} is left out of a query for k: its body was changed" in caplog.text
