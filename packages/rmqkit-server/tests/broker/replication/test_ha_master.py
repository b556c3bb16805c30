"""The master's side of replication (store.md §21.3): the frames to each slave, and their times."""

from __future__ import annotations

import asyncio
import logging
import os

import pytest
import uvloop
from msgspec import UNSET

from rmqkit.broker.replication import copies
from rmqkit.broker.replication.copies import waits_for_copies
from rmqkit.broker.replication.master import HaMaster
from rmqkit.broker.settings import BrokerRole, BrokerSettings
from rmqkit.protocol.ha import HEAD_BYTES, encode_report
from rmqkit.remoting.listening import ListenFailed
from rmqkit.store.settings import FlushDiskType
from rmqkit.system import threads
from rmqkit.testing.clock import StandingClock
from tests.broker.ha_links import master, turns, until
from tests.broker.replication.inside import accepted_by, is_round_due, transport_of
from tests.golden_stores import unpack_golden
from tests.ports import free_port
from tests.protocol.test_ha import STREAMS, golden_stream, split
from tests.remoting.test_remoting import AcceptedTransport
from tests.store.stores import golden_settings, small_settings
from tests.virtual_time import run as run_virtual

FILE_BYTES = 4096
HEARTBEAT_MS = 5000
SILENT_MS = 20_000


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def on_loop(request):
    """Run a scenario on the loop that brokers use and on their fallback loop."""

    def run(scenario):
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(scenario)

    return run


@pytest.mark.parametrize("reported_offset", [0, 131_072, 300_000])
def test_a_slave_gets_what_the_real_master_sends_in_the_same_frames(tmp_path, on_loop, reported_offset):
    golden = unpack_golden("5.4.0", tmp_path)

    async def scenario():
        async with master(golden.root, store=golden_settings(golden)) as it:
            slave = await it.slave(reported_offset)
            start, end = STREAMS[reported_offset][0]["offset"], it.store.max_physical_offset
            assert end == int(golden.manifest["commitLogMaxOffset"])
            sent = await slave.has(end - start)
            sizes = [
                (frame["offset"], min(frame["size"], end - frame["offset"]))
                for frame in STREAMS[reported_offset]
                if frame["size"]
            ]
            assert [(offset, len(data)) for offset, data in slave.frames] == sizes
            if reported_offset != 131_072:
                theirs = b"".join(data for _, data in split(golden_stream(reported_offset))[0])
                assert sent == theirs[: len(sent)]

    on_loop(scenario())


def test_nothing_is_sent_before_the_first_report(tmp_path, on_loop):
    async def scenario():
        async with master(tmp_path) as it:
            silent, speaking = await it.slave(), await it.slave(0)
            it.put()
            await speaking.has(it.store.max_physical_offset)
            it.clock.ms += HEARTBEAT_MS + 1
            await until(lambda: speaking.heartbeats)
            assert (silent.received, silent.frames) == (b"", [])
            silent.report(0)
            assert await silent.has(it.store.max_physical_offset) == it.log()

    on_loop(scenario())


async def test_an_empty_slave_gets_the_file_that_the_master_is_in(tmp_path):
    async with master(tmp_path) as it:
        while it.store.max_physical_offset < 3 * FILE_BYTES + 100:
            it.put()
        slave = await it.slave(0)
        assert await slave.has(it.store.max_physical_offset - 3 * FILE_BYTES) == it.log(3 * FILE_BYTES)
        assert slave.frames[0][0] == 3 * FILE_BYTES


def test_slaves_at_different_positions_get_the_same_log_across_its_files(tmp_path, on_loop):
    async def scenario():
        async with master(tmp_path) as it:
            first = await it.slave(0)
            ends = [it.put(bytes(300 * (i % 3))) for i in range(40)]
            second = await it.slave(ends[7])
            ends += [it.put(b"more") for _ in range(10)]
            end = ends[-1]
            assert end > 2 * FILE_BYTES
            assert await first.has(end) == it.log()
            assert await second.has(end - ends[7]) == it.log()[ends[7] :]
            for offset, data in first.frames + second.frames:
                assert offset // FILE_BYTES == (offset + len(data) - 1) // FILE_BYTES  # never across a file's end

    on_loop(scenario())


async def test_what_one_tick_puts_leaves_in_one_frame(tmp_path):
    async with master(tmp_path, store=small_settings(commit_log_file_bytes=1 << 20)) as it:
        slave = await it.slave(0)
        for _ in range(5):
            it.put()
        await slave.has(it.store.max_physical_offset)
        it.put()
        await slave.has(it.store.max_physical_offset)
        assert len(slave.frames) == 2


def test_a_frame_is_no_longer_than_requested_nor_than_apaches_buffer(tmp_path, on_loop):
    async def scenario():
        settings = small_settings(commit_log_file_bytes=16 << 20)
        async with master(tmp_path / "a", store=settings, ha_batch_bytes=1500) as it:
            it.put(bytes(3000))
            slave = await it.slave(0)
            await slave.has(it.store.max_physical_offset)
            assert [len(data) for _, data in slave.frames] == [1500, 1500, it.store.max_physical_offset - 3000]
        async with master(tmp_path / "b", store=settings, ha_batch_bytes=1 << 30) as it:
            for _ in range(3):
                it.put(bytes(3 << 20))
            slave = await it.slave(0)
            await slave.has(it.store.max_physical_offset)
            assert max(len(data) for _, data in slave.frames) + HEAD_BYTES <= 4 << 20

    on_loop(scenario())


@pytest.mark.virtual_time
def test_a_slave_never_gets_what_is_not_durable_under_sync_flush(tmp_path, monkeypatch):
    may_flush, fdatasync = threads.Event(), os.fdatasync
    monkeypatch.setattr("rmqkit.system.disk.sync_data", lambda fd: may_flush.wait(60) and fdatasync(fd))

    async def scenario():
        settings = small_settings(flush_disk_type=FlushDiskType.SYNC_FLUSH)
        async with master(tmp_path, store=settings) as it:
            slave = await it.slave(0)
            end = it.put()
            it.store.request_flush()
            it.ha.advanced()
            it.clock.ms += HEARTBEAT_MS + 1
            await until(lambda: slave.heartbeats)
            assert (slave.log, it.store.max_physical_offset) == (b"", end)
            may_flush.set()
            await slave.has(end)

    try:
        run_virtual(scenario())
    finally:
        may_flush.set()


class CountingClock(StandingClock):
    """A clock that counts its calls."""

    looks = 0

    def monotonic_ms(self):
        self.looks += 1
        return super().monotonic_ms()


async def test_heartbeats_carry_the_next_offset_and_wait_for_silence(tmp_path):
    async with master(tmp_path, clock=CountingClock()) as it:
        slave = await it.slave(0)
        it.clock.ms += HEARTBEAT_MS
        end = it.put()
        await slave.has(end)
        it.clock.ms += HEARTBEAT_MS  # since the data: not yet
        looks = it.clock.looks
        await until(lambda: it.clock.looks > looks + 3)
        assert slave.heartbeats == []
        it.clock.ms += 1
        await until(lambda: slave.heartbeats)
        it.clock.ms += HEARTBEAT_MS + 1
        await until(lambda: len(slave.heartbeats) == 2)
        assert slave.heartbeats == [end, end]


async def test_a_slave_that_says_nothing_is_sent_away(tmp_path, caplog):
    caplog.set_level(logging.INFO)

    async with master(tmp_path) as it:
        mute, quiet, alive = await it.slave(), await it.slave(0), await it.slave(0)
        it.clock.ms += SILENT_MS - 1
        alive.report(0)
        await until(lambda: it.acked == 3)
        it.clock.ms += 2
        await until(lambda: not mute.is_open and not quiet.is_open)
        assert alive.is_open
        assert len(it.links) == 1
    assert caplog.text.count("no report for 20000 ms") == 2


async def test_a_slave_that_has_more_than_the_master_is_sent_away(tmp_path, caplog):
    async with master(tmp_path) as it:
        end = it.put()
        ahead, level = await it.slave(end + 1), await it.slave(end)
        await until(lambda: not ahead.is_open)
        assert (level.is_open, ahead.frames, len(it.links)) == (True, [], 1)
        assert it.ha.copies.replicated_offset(2) == end
        level.report(end + 1)
        await until(lambda: not level.is_open)
        assert it.ha.copies.replicated_offset(2) == -1
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "the log ends at" in caplog.messages[0]
    assert "another history" in caplog.messages[1]


async def test_what_is_no_report_closes_the_link(tmp_path, caplog):
    async with master(tmp_path) as it:
        slave = await it.slave()
        slave.send(b"\xff" * 8)
        await until(lambda: not slave.is_open)
        http = await it.slave()
        http.send(b"GET / HTTP/1.1\r\n\r\n")
        await until(lambda: not http.is_open)
        assert it.acked == 2  # gone, nothing else
        assert it.links == []


async def test_reports_in_pieces_and_in_one_read_count_as_the_newest(tmp_path):
    async with master(tmp_path) as it:
        ends = [it.put() for _ in range(3)]
        slave = await it.slave()
        slave.send(encode_report(0)[:3])
        await turns()
        slave.send(encode_report(0)[3:])
        await slave.has(ends[-1])
        slave.send(encode_report(ends[0]) + encode_report(ends[1]) + encode_report(ends[2])[:6])
        await until(lambda: it.ha.copies.replicated_offset(2) == ends[1])
        slave.send(encode_report(ends[2])[6:])
        await until(lambda: it.ha.copies.replicated_offset(2) == ends[2])


async def test_a_slave_whose_place_was_deleted_gets_heartbeats_and_is_not_in_sync(tmp_path, caplog):
    async with master(tmp_path) as it:
        first_end = it.put()
        while it.store.max_physical_offset < 2 * FILE_BYTES:
            it.put()
        it.store.log.queue.drop_front(lambda file: file.start == 0)
        slave = await it.slave(first_end)
        it.clock.ms += HEARTBEAT_MS + 1
        await until(lambda: slave.heartbeats)
        it.put()
        await turns()
        assert (slave.heartbeats[0], slave.log) == (first_end, b"")
        assert (it.links[0].in_sync, it.ha.copies.in_sync_count()) == (False, 1)
    assert caplog.text.count("cannot send the log to slave") == 1


async def test_flow_control_spreads_what_is_sent_over_the_seconds(tmp_path):
    limits = {"ha_flow_control": True, "ha_bytes_per_second_max": 1024}
    async with master(tmp_path, **limits) as it:
        while it.store.max_physical_offset < 2500:
            it.put()
        slave = await it.slave(0)
        await slave.has(1024)
        await until(lambda: it.links[0].transfer_from_where == 1024)
        it.clock.ms += 1000
        await slave.has(2048)
        assert it.links[0].transferred_byte_in_second == 1024
        it.clock.ms += 1000
        await slave.has(it.store.max_physical_offset)
        assert slave.log == it.log()


def test_a_slave_that_takes_nothing_costs_little_memory_and_continues_later(tmp_path, on_loop):
    async def scenario():
        settings = small_settings(commit_log_file_bytes=64 << 20)
        async with master(tmp_path, store=settings) as it:
            slow = await it.slave()
            slow.transport.pause_reading()
            for _ in range(24):
                it.put(os.urandom(1 << 20))
            end = it.store.max_physical_offset
            slow.report(0)
            await until(lambda: it.ha.links[0].is_paused)
            await turns()
            assert transport_of(it.ha.links[0]).get_write_buffer_size() <= 6 << 20
            assert it.links[0].transfer_from_where < end
            other = await it.slave(100)
            assert await other.has(end - 100) == it.log(100)  # a slow slave slows no other slave down
            slow.transport.resume_reading()
            assert await slow.has(end) == it.log()

    on_loop(scenario())


async def test_copies_are_counted_with_the_masters_own(tmp_path):
    async with master(tmp_path) as it:
        ends = [it.put() for _ in range(3)]
        assert [it.ha.copies.replicated_offset(copies) for copies in (1, 2)] == [ends[2], -1]
        fast, slow = await it.slave(0), await it.slave(ends[0])
        fast.report(ends[2])
        await until(lambda: it.ha.copies.replicated_offset(2) == ends[2])
        slow.report(ends[0])
        await until(lambda: it.ha.copies.replicated_offset(3) == ends[0])
        assert it.ha.copies.replicated_offset(4) == -1


async def test_an_old_link_of_a_slave_that_came_back_is_no_second_copy(tmp_path):
    async with master(tmp_path) as it:
        end = it.put()
        old = await it.slave(end)
        new = await it.slave(end)
        assert it.ha.copies.replicated_offset(2) == end
        assert it.ha.copies.replicated_offset(3) == -1
        await until(lambda: old.heartbeats == [end])  # the master checks at once whether the slave lives
        assert new.heartbeats == []
        old.report(end)  # it was another slave on the same machine
        await until(lambda: it.ha.copies.replicated_offset(3) == end)


async def test_the_status_says_how_far_each_slave_is(tmp_path):
    async with master(tmp_path, ha_gap_bytes_max=201) as it:
        first_end = it.put()
        slave = await it.slave(first_end)
        it.clock.ms += 30
        end = it.put()
        await slave.has(end - first_end)
        it.clock.ms += 250
        status = it.ha.copies.status()
        assert (status.master, status.master_commit_log_max_offset, status.in_sync_slave_nums) == (True, end, 1)
        (link,) = status.ha_connection_info
        assert link.addr == "{}:{}".format(*slave.transport.get_extra_info("sockname"))
        assert (link.slave_ack_offset, link.diff, link.in_sync) == (first_end, end - first_end, True)
        assert (link.transfer_from_where, link.lag_ms) == (end, 250)
        it.put()
        assert it.ha.copies.status().in_sync_slave_nums == 0  # 201 bytes or more
        slave.report(end)
        await until(lambda: it.links[0].in_sync)
        it.clock.ms += 70
        assert it.links[0].lag_ms == 70
        slave.report(it.store.max_physical_offset)
        await until(lambda: it.links[0].diff == 0)
        assert it.links[0].lag_ms == 0


async def test_the_age_of_what_came_before_the_slave_is_not_known(tmp_path):
    async with master(tmp_path) as it:
        first_end = it.put()
        it.put()
        await it.slave(first_end)
        assert it.links[0].lag_ms is UNSET


def test_the_marks_of_a_growing_log_are_bounded_and_never_later_than_the_growth(monkeypatch):
    monkeypatch.setattr(copies, "_MARKS_MAX", 16)
    growth = copies.Growth()
    assert growth.grew_ms(0) is None
    growth.mark(0, 0.0)
    for number in range(1, 1000):
        growth.mark(number * 10, number * 5.0)  # ten bytes every five ms
    assert len(growth) <= 16
    for number in range(1, 1000):
        grew_ms = growth.grew_ms(number * 10 - 1)
        assert grew_ms is not None
        came_ms = number * 5.0
        assert 0 <= came_ms - grew_ms <= 5000 / 4
    growth.drop_before(9000)
    assert growth.grew_ms(9500) is not None
    assert growth.grew_ms(0) is None


@pytest.mark.parametrize(
    ("settings", "slave_count", "needed", "lacks"),
    [
        ({"in_sync_replicas": 2}, 0, 2, False),  # as a classic master: stored, and the answer waits
        ({"in_sync_replicas": 2, "auto_in_sync_replicas": True}, 0, 2, False),
        ({"in_sync_replicas": 2, "acts_as_master": True}, 0, 2, True),
        ({"in_sync_replicas": 2, "acts_as_master": True}, 1, 2, False),
        ({"in_sync_replicas": 3, "acts_as_master": True, "auto_in_sync_replicas": True}, 1, 2, False),
        ({"in_sync_replicas": 3, "acts_as_master": True, "auto_in_sync_replicas": True}, 0, 1, False),
        (
            {
                "in_sync_replicas": 3,
                "min_in_sync_replicas": 2,
                "acts_as_master": True,
                "auto_in_sync_replicas": True,
            },
            0,
            2,
            True,
        ),
    ],
)
async def test_how_many_copies_are_needed(tmp_path, settings, slave_count, needed, lacks):
    async with master(tmp_path, **settings) as it:
        for _ in range(slave_count):
            await it.slave(0)
        assert (it.ha.copies.needed_copies(), it.ha.copies.lacks_replicas) == (needed, lacks)


async def test_all_slaves_in_sync_are_waited_for_when_asked(tmp_path):
    async with master(tmp_path, all_in_sync_replicas=True) as it:
        end = it.put()
        assert it.ha.copies.confirmed_offset() == end  # there is nobody else
        slaves = [await it.slave(0) for _ in range(2)]
        slaves[0].report(end)
        slaves[1].report(0)
        await until(lambda: it.ha.copies.replicated_offset(2) == end)
        assert it.ha.copies.confirmed_offset() == 0
        slaves[1].report(end)
        await until(lambda: it.ha.copies.confirmed_offset() == end)


@pytest.mark.parametrize(
    ("settings", "waits"),
    [
        ({"broker_role": BrokerRole.ASYNC_MASTER, "in_sync_replicas": 2}, False),
        ({"broker_role": BrokerRole.SYNC_MASTER}, False),
        ({"broker_role": BrokerRole.SYNC_MASTER, "in_sync_replicas": 2}, True),
        ({"broker_role": BrokerRole.SYNC_MASTER, "all_in_sync_replicas": True}, True),
        ({"broker_role": BrokerRole.SYNC_MASTER, "min_in_sync_replicas": 2}, False),
    ],
)
def test_who_waits_for_copies_at_all(settings, waits):
    assert waits_for_copies(BrokerSettings(**settings)) is waits


async def test_a_broker_without_slaves_does_nothing_when_its_log_grows(tmp_path):
    async with master(tmp_path) as it:
        it.put()
        assert not is_round_due(it.ha)
        await it.slave(0)
        it.put()
        assert is_round_due(it.ha)


async def test_a_slave_that_comes_while_the_port_closes_is_not_kept(tmp_path):
    async with master(tmp_path) as it:
        await it.ha.close()
        transport = AcceptedTransport()
        accepted_by(it.ha).connection_made(transport)
        assert transport.is_aborted


async def test_closing_cuts_the_links_and_frees_the_port(tmp_path):
    async with master(tmp_path, port=free_port()) as it:
        slave = await it.slave(0)
        await it.ha.close()
        await until(lambda: not slave.is_open)
        again = HaMaster(it.store, it.settings, it.clock, lambda: None)
        assert await again.start("127.0.0.1", it.port) == it.port
        with pytest.raises(ListenFailed, match=str(it.port)):
            await it.ha.start("127.0.0.1", it.port)
        await again.close()
