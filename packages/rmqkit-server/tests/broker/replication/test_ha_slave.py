"""A slave's side of replication, against a master that the test controls (store.md §21.2, §21.4)."""

from __future__ import annotations

import asyncio
import errno
import logging
import struct
from contextlib import asynccontextmanager
from itertools import pairwise

import msgspec
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.broker.delay.levels import Schedule
from rmqkit.broker.replication.master import HaMaster
from rmqkit.broker.replication.slave import HaSlave, _Master
from rmqkit.broker.replication.tables import SlaveSync
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.errors import LogDiverged
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import decode_header, reply
from rmqkit.protocol.ha import frame_head
from rmqkit.protocol.record import BatchEntry, encode_batch
from rmqkit.protocol.schemas.pull import ViewMessageRequest
from rmqkit.protocol.schemas.topics import DataVersion, TopicConfig, TopicConfigTable
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.router import Router
from rmqkit.remoting.server import RemotingServer
from rmqkit.store.message_store import MessageStore
from rmqkit.store.settings import FlushDiskType
from rmqkit.system import threads
from rmqkit.testing.clock import StandingClock
from tests.broker.conversation import ha_frames
from tests.broker.replication.inside import follow_by_hand, link_of, one_round
from tests.examples import examples
from tests.store.stores import message, opened, put_all, read_all, small_settings
from tests.virtual_time import run as run_virtual
from tests.waiting import SECONDS, until

REPORT = struct.Struct(">q")
HEARTBEATS = {"ha_heartbeat_interval_ms": 20}


def filling(root):
    """A store that gives equal logs when it is filled alike."""
    return opened(root, clock=StandingClock())


def frame(offset, data=b""):
    return frame_head(offset, len(data)) + bytes(data)


def log_of(store):
    """Return the bytes of a log from its first file on, by the rules of its files."""
    parts, offset = [], max(0, store.min_physical_offset)
    while part := store.log_part(offset, 1 << 20):
        parts.append(bytes(part))
        offset += len(part)
    return b"".join(parts)


def frames_of(store, offset=0, size_max=300):
    """Return the frames with a store's log from an offset on, as a master sends them."""
    frames = []
    while part := store.log_part(offset, size_max):
        frames.append(frame(offset, part))
        offset += len(part)
    return frames


def fill(store, count, start=0, **fields):
    return put_all(
        store,
        *(
            message(queue_id=n % 3, body=b"%06d" % n * 20, TAGS=f"t{n % 5}", **fields)
            for n in range(start, start + count)
        ),
    )


class Link:
    """One connection of a slave, on the master's side."""

    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer
        self.reports: list[int] = []
        self.is_closed = False

    async def read(self):
        try:
            while data := await self.reader.readexactly(8):
                self.reports.append(REPORT.unpack(data)[0])
        except (asyncio.IncompleteReadError, ConnectionError):
            self.is_closed = True

    async def send(self, *pieces):
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()

    def cut(self):
        self.writer.transport.abort()

    async def reported(self, offset):
        await until(lambda: self.reports[-1:] == [offset])


class Master:
    """An HA port that the test controls, and a main port that answers from a store."""

    def __init__(self, store=None):
        self.store = store
        self.links: list[Link] = []
        self.compared: list[int] = []
        self.view_code = None
        self.table = TopicConfigTable()
        self.times_asked = 0

    async def start(self):
        self.server = await asyncio.start_server(self.connected, "127.0.0.1", 0)
        self.ha_address = f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        dispatch = Router()
        dispatch.register(RequestCode.VIEW_MESSAGE_BY_ID, self.view)
        dispatch.register(RequestCode.GET_BROKER_RUNTIME_INFO, self.bounds)
        dispatch.register(RequestCode.GET_ALL_TOPIC_CONFIG, self.topics)
        self.main = RemotingServer(dispatch)
        self.address = f"127.0.0.1:{await self.main.listen('127.0.0.1', 0)}"

    async def connected(self, reader, writer):
        self.links.append(Link(reader, writer))
        if not self.server.is_serving():
            self.links[-1].cut()  # it was accepted while the port closed
        await self.links[-1].read()
        writer.close()

    def view(self, connection, command):
        offset = decode_header(command, ViewMessageRequest).offset
        self.compared.append(offset)
        record = self.store.log.record_at(offset) if self.store is not None else None
        if self.view_code is not None:
            return reply(command, self.view_code, "told to")
        if record is None:
            return reply(command, 1, f"can not find message by the offset, {offset}")
        return reply(command, body=[record])

    def topics(self, connection, command):
        self.times_asked += 1
        return reply(command, body=msgspec.json.encode(self.table))

    def bounds(self, connection, command):
        low, high = self.store.min_physical_offset, self.store.max_physical_offset
        body = b'{"table":{"commitLogMinOffset":"%d","commitLogMaxOffset":"%d"}}' % (low, high)
        return reply(command, body=body)

    async def link(self, number=1):
        """Return the link with this number after its first report."""
        await until(lambda: len(self.links) >= number and self.links[number - 1].reports)
        return self.links[number - 1]

    async def close(self):
        self.server.close()
        for link in self.links:
            link.cut()
        await self.main.close()


@asynccontextmanager
async def slave_at(root, *, flush=FlushDiskType.ASYNC_FLUSH, broker=None, prepare=None, **store_settings):
    """Yield a slave with its open store. The test starts the replication."""
    store_settings = small_settings(flush_disk_type=flush, **store_settings)
    store = MessageStore(
        root,
        store_settings,
        on_durable=lambda *reached: slave.flushed(*reached),
        is_replica=True,
        is_batch_topic=lambda topic: slave.is_batch_topic(topic),
    )
    client = RemotingClient()
    is_sync = flush is FlushDiskType.SYNC_FLUSH
    settings = BrokerSettings(**(broker or {}))
    slave = HaSlave(store, settings, SYSTEM_CLOCK, client, address="127.0.0.1:10921", flushes=is_sync, prepare=prepare)
    slave.store, slave.client = store, client
    slave.is_batch_topic = lambda topic: False
    store.open()
    try:
        yield slave
    finally:
        await slave.close()
        await client.close()
        store.close()


@asynccontextmanager
async def pair(root, **options):
    """Yield a master with a store of messages, and a slave that follows it."""
    count = options.pop("count", 40)
    with opened(root / "master") as store:
        fill(store, count)
        master = Master(store)
        await master.start()
        async with slave_at(root / "slave", **options) as slave:
            slave.follow(master.ha_address, master.address)
            try:
                yield master, slave
            finally:
                await master.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Pauses are short."""
    monkeypatch.setattr("rmqkit.broker.replication.slave._PAUSE_MS_MIN", 1.0)
    monkeypatch.setattr("rmqkit.broker.replication.slave._PAUSE_MS_MAX", 5.0)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "rmqkit.broker.replication.slave"]


# ---- the link


async def test_the_stream_of_a_real_master_becomes_its_log(tmp_path):
    master = Master()
    await master.start()
    async with slave_at(tmp_path, commit_log_file_bytes=1 << 20) as slave:
        slave.follow(master.ha_address, None)
        link = await master.link()
        for offset, data in ha_frames():
            await link.send(frame(offset, data))
            end = offset + len(data)
            await until(lambda end=end: slave.store.max_physical_offset == end)
        await link.reported(13723)
        assert list(dict.fromkeys(link.reports)) == [0, 13468, 13723]  # as the real slave, but for signs of life
        await until(lambda: not slave.store.dispatch_behind_bytes)
        assert log_of(slave.store) == b"".join(data for _, data in ha_frames())
        assert [len(read_all(slave.store, "TopicA", queue)) for queue in range(4)] == [10] * 4
        assert slave.is_following and not slave.is_diverged
        status = slave.status()
        assert (status.master_addr, status.max_offset) == (master.ha_address, 13723)
        assert 0 < status.last_write_timestamp <= SYSTEM_CLOCK.now_ms() + 1
        assert 0 < status.last_read_timestamp <= SYSTEM_CLOCK.now_ms() + 1
    await master.close()


async def test_a_slave_continues_where_it_was_cut(tmp_path):
    """After a cut in a record the torn tail is dropped. The next link begins at the end of the last whole record."""

    async with pair(tmp_path) as (master, slave):
        frames = frames_of(master.store)
        whole_ends = {0, *(end_of(record) for record in records(master.store))}
        for number, frame_count in enumerate((5, 3, 8), 1):
            link = await master.link(number)
            assert link.reports[0] in whole_ends
            rest = frames_of(master.store, link.reports[0])
            await link.send(*rest[:frame_count], rest[frame_count][:100])
            end = link.reports[0] + sum(len(one) - 12 for one in rest[:frame_count])
            await link.reported(end)
            link.cut()
        link = await master.link(4)
        await link.send(*frames_of(master.store, link.reports[0]))
        await link.reported(master.store.max_physical_offset)
        await until(lambda: not slave.store.dispatch_behind_bytes)
        assert log_of(slave.store) == log_of(master.store)
        assert len(frames) > 16


def records(store):
    """Physical offset and bytes of every record of a log, through its queues."""
    return sorted(
        (record.physical_offset, record.size)
        for queue_id in range(3)
        for record in read_all(store, "TopicTest", queue_id)
    )


def end_of(record):
    return record[0] + record[1]


async def test_every_record_can_be_read_when_all_came(tmp_path):
    async with pair(tmp_path, count=200) as (master, slave):
        link = await master.link()
        await link.send(b"".join(frames_of(master.store)))
        await link.reported(master.store.max_physical_offset)
        await until(lambda: not slave.store.dispatch_behind_bytes)
        assert records(slave.store) == records(master.store)
        assert len(records(slave.store)) == 200


async def test_signs_of_life_are_sent_and_not_answered(tmp_path):
    async with pair(tmp_path, broker=HEARTBEATS) as (master, slave):
        link = await master.link()
        await link.send(*frames_of(master.store))
        end = master.store.max_physical_offset
        await link.reported(end)
        count = len(link.reports)
        await until(lambda: len(link.reports) >= count + 3)
        assert set(link.reports[count:]) == {end}
        await link.send(frame(end), frame(end))
        assert slave.is_following


async def test_heartbeats_report_no_progress_and_bind_an_empty_log_to_no_offset(tmp_path):
    async with pair(tmp_path) as (master, _):
        link = await master.link()
        await link.send(frame(4096), frame(0), frame(4096))  # to an empty log: any offset
        await link.send(*frames_of(master.store, size_max=4096)[:1])
        await link.reported(4096)
        assert set(link.reports) == {0, 4096}


@pytest.mark.parametrize("is_heartbeat", [False, True])
async def test_an_offset_that_is_not_the_logs_end_ends_the_link(tmp_path, caplog, is_heartbeat):
    async with pair(tmp_path) as (master, slave):
        link = await master.link()
        frames = frames_of(master.store)
        await link.send(*frames[:3])
        await link.reported(900)
        await link.send(frame(1200) if is_heartbeat else frames[4])
        again = await master.link(2)
        assert again.reports[0] <= 900
        assert link.reports[-1] == 900
        await again.send(*frames_of(master.store, again.reports[0]))
        await again.reported(master.store.max_physical_offset)
        assert not slave.is_diverged
    assert "the master continues at 1200, but the own log ends at 900" in caplog.text


@pytest.mark.parametrize(
    "garbage", [b"\xff" * 12, frame_head(0, -1), frame_head(0, (4 << 20) + 1), frame_head(-5, 8)], ids=repr
)
async def test_what_is_no_frame_ends_the_link(tmp_path, caplog, garbage):
    async with pair(tmp_path) as (master, slave):
        link = await master.link()
        await link.send(garbage)
        again = await master.link(2)
        assert (again.reports[0], slave.store.max_physical_offset) == (0, 0)
        assert not slave.is_diverged
    assert "an HA frame of" in caplog.text


async def test_a_master_that_speaks_first_is_not_listened_to(tmp_path, caplog):
    held = asyncio.Event()

    async with pair(tmp_path, prepare=held.wait) as (master, slave):
        await until(lambda: master.links)
        assert not slave.may_serve  # the history of this log is not known yet
        await master.links[0].send(frames_of(master.store)[0])
        await until(lambda: master.links[0].is_closed)
        held.set()
        await master.link(2)
        assert slave.may_serve
        assert slave.store.max_physical_offset == 0
    assert "sent data before" in caplog.text


async def test_a_silent_master_is_left(tmp_path, caplog):
    async with pair(tmp_path, broker={"ha_silent_ms_max": 30}) as (master, _):
        first, second = await master.link(), await master.link(2)
        await until(lambda: first.is_closed)
        assert (first.reports[0], second.reports[0]) == (0, 0)
    assert "haHousekeepingInterval 30" in caplog.text


async def test_topics_are_copied_before_the_first_report(tmp_path):
    done = []

    async def prepare():
        await asyncio.sleep(0)
        done.append(True)

    async with pair(tmp_path, prepare=prepare) as (master, _):
        link = await master.link()
        assert done == [True]
        link.cut()
        await master.link(2)
        assert done == [True, True]


async def test_the_master_may_move(tmp_path):
    async with pair(tmp_path) as (master, slave):
        link = await master.link()
        other = Master(master.store)
        await other.start()
        slave.follow(master.ha_address, None)  # nothing new
        slave.follow(other.ha_address, None)
        await until(lambda: link.is_closed)
        link = await other.link()
        await link.send(*frames_of(master.store))
        await link.reported(master.store.max_physical_offset)
        link.cut()
        await other.link(2)
        assert master.compared and not other.compared  # the main address stayed
        slave.follow(other.ha_address, other.address)
        other.links[1].cut()
        await other.link(3)
        assert other.compared
        assert len(master.links) == 1
        await other.close()


async def test_the_master_may_move_while_a_slave_gets_ready(tmp_path):
    async def move():
        slave.follow(other.ha_address, other.address)

    other = Master()
    await other.start()
    async with pair(tmp_path, prepare=move) as (master, slave):
        await other.link()
        assert not any(link.reports for link in master.links)
    await other.close()


async def test_a_configured_address_goes_first(tmp_path):
    master = Master()
    await master.start()
    async with slave_at(tmp_path, broker={"ha_master_address": master.ha_address}) as slave:
        slave.follow("127.0.0.1:1", None)
        await master.link()
    await master.close()


@pytest.mark.virtual_time
def test_pauses_get_longer_and_a_reason_is_reported_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("rmqkit.broker.replication.slave._PAUSE_MS_MIN", 500.0)
    monkeypatch.setattr("rmqkit.broker.replication.slave._PAUSE_MS_MAX", 5000.0)

    async def scenario():
        async with slave_at(tmp_path) as slave:
            assert slave.may_serve
            follow_by_hand(slave, _Master("127.0.0.1:1", None))
            pauses = [await one_round(slave) for _ in range(6)]
            assert slave.may_serve  # the master is gone
            return pauses

    assert run_virtual(scenario()) == [500, 1000, 2000, 4000, 5000, 5000]
    (told,) = warnings(caplog)
    assert "cannot connect to 127.0.0.1:1: Connection refused" in told


# ---- any cut


class Sink(asyncio.Transport):
    """Takes what a link writes."""

    def __init__(self):
        super().__init__()
        self.written = []
        self.is_aborted = False

    def write(self, data):
        self.written.append(REPORT.unpack(data)[0])

    def abort(self):
        self.is_aborted = True


def feed(link, data):
    buffer = link.get_buffer(-1)
    buffer[: len(data)] = data
    link.buffer_updated(len(data))


@given(st.lists(st.integers(0, 5000), max_size=30))
@examples(25)
async def test_any_cut_of_the_stream_gives_the_same_log(tmp_path_factory, cuts):
    root = tmp_path_factory.mktemp("cut")
    with opened(root / "master") as store:
        fill(store, 20)
        stream = b"".join([*frames_of(store), frame(store.max_physical_offset)])
        async with slave_at(root / "slave") as slave:
            link = link_of(slave, 4096)
            link.connection_made(sink := Sink())
            link.begin(0)
            edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
            pieces = [stream[a:b] for a, b in pairwise(edges)]
            for piece in pieces:
                for at in range(0, len(piece), 2000):  # a read returns no more bytes than there is room for
                    feed(link, piece[at : at + 2000])
            assert not sink.is_aborted
            assert sink.written[-1] == store.max_physical_offset
            assert sink.written == sorted(sink.written)
            assert len(sink.written) - len(set(sink.written)) <= 1, "the heartbeat may have a report of its own"
            assert log_of_replica(slave.store) == log_of(store)


def log_of_replica(store):
    while store.dispatch():
        pass
    return log_of(store)


async def test_all_frames_of_one_read_are_reported_once(tmp_path):
    with opened(tmp_path / "master") as store:
        fill(store, 10)
        async with slave_at(tmp_path / "slave") as slave:
            link = link_of(slave, 1 << 20)
            link.connection_made(sink := Sink())
            link.begin(0)
            feed(link, b"".join(frames_of(store)))
            assert sink.written == [0, store.max_physical_offset]
            feed(link, frame(store.max_physical_offset))
            assert sink.written[2:] == [store.max_physical_offset]  # a heartbeat is answered
            link.pause_writing()
            link.report(store.max_physical_offset)
            link.resume_writing()
            assert len(sink.written) == 3


@given(st.binary(max_size=3000))
@examples(40)
async def test_any_bytes_end_in_a_documented_way(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("any")
    async with slave_at(root) as slave:
        link = link_of(slave, 4096)
        link.connection_made(Sink())
        link.begin(0)
        feed(link, data)
        feed(link, frame(0, data))


# ---- the disk


@pytest.mark.virtual_time
def test_under_sync_flush_only_what_is_on_the_disk_is_reported(tmp_path, monkeypatch):
    gate, waiting = threads.Event(), threads.Event()

    async def scenario():
        async with pair(tmp_path, flush=FlushDiskType.SYNC_FLUSH, broker=HEARTBEATS) as (master, slave):
            queue = slave.store.log.queue
            sync = queue.sync

            def slow():
                waiting.set()
                assert gate.wait(SECONDS)
                sync()

            monkeypatch.setattr(queue, "sync", slow)
            link = await master.link()
            await link.send(*frames_of(master.store))
            end = master.store.max_physical_offset
            await until(lambda: slave.store.max_physical_offset == end and waiting.is_set())
            count = len(link.reports)
            await until(lambda: len(link.reports) > count + 2)  # signs of life
            assert (set(link.reports), slave.store.durable_offset) == ({0}, 0)
            assert slave.store.dispatched_offset == 0
            gate.set()
            await link.reported(end)
            assert slave.store.durable_offset == end
            await until(lambda: not slave.store.dispatch_behind_bytes)
            assert records(slave.store) == records(master.store)

    try:
        run_virtual(scenario())
    finally:
        gate.set()


async def test_the_first_report_waits_for_the_disk(tmp_path):
    async with slave_at(tmp_path / "slave", flush=FlushDiskType.SYNC_FLUSH) as slave:
        with opened(tmp_path / "master") as store:
            fill(store, 5)
            data = log_of(store)
        slave.store.replica.append(0, data)
        master = Master()
        await master.start()
        slave.follow(master.ha_address, None)
        link = await master.link()
        assert link.reports == [len(data)]
        assert slave.store.durable_offset == len(data)
        await master.close()


async def test_what_cannot_be_flushed_is_never_reported(tmp_path, monkeypatch, caplog):
    def refuse():
        raise OSError(errno.EIO, "the disk is gone")

    async with pair(tmp_path, flush=FlushDiskType.SYNC_FLUSH) as (master, slave):
        monkeypatch.setattr(slave.store.log.queue, "sync", refuse)
        link = await master.link()
        await link.send(*frames_of(master.store))
        await until(lambda: link.is_closed)
        assert set(link.reports) == {0}
        before = len(master.links)
        for _ in range(3):
            await one_round(slave)  # the slave makes no more connections
        assert len(master.links) == before
        assert slave.status().max_offset == slave.store.max_physical_offset
        monkeypatch.undo()
    assert len([line for line in warnings(caplog) if "the disk is gone" in line]) == 1


async def test_a_full_disk_is_tried_again(tmp_path, monkeypatch, caplog):
    async with pair(tmp_path) as (master, slave):
        append = slave.store.replica.append

        def refuse(offset, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(slave.store.replica, "append", refuse)
        frames = frames_of(master.store)
        for number in (1, 2, 3):
            link = await master.link(number)
            await link.send(*frames)
            await until(lambda link=link: link.is_closed)
            assert link.reports == [0]
        monkeypatch.setattr(slave.store.replica, "append", append)
        link = await master.link(4)
        await link.send(*frames)
        await link.reported(master.store.max_physical_offset)
    assert len([line for line in warnings(caplog) if "No space left" in line]) == 1


# ---- one history


@asynccontextmanager
async def parted(root, *, common, own, theirs, **options):
    """A master and a slave whose logs are equal for some messages and differ afterwards."""
    with filling(root / "slave-made") as made, filling(root / "master") as store:
        for target, more, name in ((made, own, "s"), (store, theirs, "m")):
            fill(target, common, born_timestamp=5)
            fill(target, more, start=common, born_timestamp=6 if name == "s" else 7)
        same = next((at for at, (a, b) in enumerate(zip(log_of(made), log_of(store), strict=False)) if a != b), None)
        master = Master(store)
        await master.start()
        async with slave_at(root / "slave", **options) as slave:
            for one in frames_of(made, size_max=4096):
                slave.store.replica.append(slave.store.max_physical_offset, one[12:])
            slave.made = made
            slave.parting = max((at for at, size in records(made) if same is not None and at <= same), default=None)
            while slave.store.dispatch():
                pass
            try:
                yield master, slave
            finally:
                await master.close()


@pytest.mark.parametrize(
    ("common", "own", "theirs"),
    [(0, 30, 40), (1, 30, 40), (17, 30, 1), (18, 30, 30), (19, 30, 60), (40, 1, 1), (40, 1, 20), (60, 30, 2)],
)
async def test_a_slave_with_another_history_stops_and_says_where(tmp_path, caplog, common, own, theirs):
    async with parted(tmp_path, common=common, own=own, theirs=theirs) as (master, slave):
        own_log = log_of(slave.store)
        slave.follow(master.ha_address, master.address)
        await until(lambda: slave.is_diverged and slave.divergence is not None)
        await until(lambda: all(link.is_closed for link in master.links))
        assert not slave.is_following
        assert [link.reports for link in master.links] == [[]]
        assert slave.divergence.physical_offset == slave.parting
        (told,) = warnings(caplog)
        for part in (f"physical offset {slave.parting} on", master.address, "127.0.0.1:10921", "rmq pipeline diff"):
            assert part in told
        assert f"whose log ends at {len(own_log)}" in told
        slave.follow(master.ha_address, "127.0.0.1:1")  # it stays stopped
        assert await one_round(slave) > 1e6
        assert log_of(slave.store) == own_log
        assert len(master.compared) <= 16


async def test_a_slave_that_is_ahead_waits_for_its_master(tmp_path, caplog):
    async with parted(tmp_path, common=20, own=10, theirs=0) as (master, slave):
        slave.follow(master.ha_address, master.address)
        await until(lambda: len(master.compared) > 20)
        assert slave.is_diverged and slave.divergence is None and not slave.may_serve
        assert all(link.reports == [] for link in master.links)
        (told,) = warnings(caplog)
        assert f"the own log ends at {slave.store.max_physical_offset}" in told
        assert f"ends at {master.store.max_physical_offset}" in told
        fill(master.store, 10, start=20, born_timestamp=6)  # the same messages again
        fill(master.store, 5)
        await until(lambda: any(link.reports for link in master.links))
        assert not slave.is_diverged
        link = master.links[-1]
        assert link.reports == [slave.store.max_physical_offset]
        await link.send(*frames_of(master.store, link.reports[0]))
        await link.reported(master.store.max_physical_offset)


async def test_a_slave_that_was_ahead_stops_when_its_master_continues_differently(tmp_path):
    async with parted(tmp_path, common=20, own=10, theirs=0) as (master, slave):
        end = master.store.max_physical_offset
        slave.follow(master.ha_address, master.address)
        await until(lambda: slave.is_diverged)
        fill(master.store, 1, born_timestamp=7)
        await until(lambda: slave.divergence is not None)
        assert slave.divergence.physical_offset == end


async def test_a_parted_log_is_not_served_after_a_restart_without_a_master(tmp_path):
    async with parted(tmp_path, common=20, own=10, theirs=0) as (master, slave):
        slave.follow(master.ha_address, master.address)
        await until(lambda: slave.is_diverged)
        client = slave.client
        again = HaSlave(slave.store, BrokerSettings(), SYSTEM_CLOCK, client, address="s", flushes=False)
        assert not again.may_serve
        assert "ends at" in (slave.store.root / "diverged").read_text()
        fill(master.store, 10, start=20, born_timestamp=6)  # what the slave has
        await until(lambda: slave.is_following)
        assert slave.may_serve
        assert not (slave.store.root / "diverged").exists()


@pytest.mark.virtual_time
def test_a_master_that_has_deleted_what_follows_is_not_followed(tmp_path, caplog):
    async def scenario():
        async with parted(tmp_path, common=10, own=0, theirs=60) as (master, slave):
            master.store = Trimmed(master.store, 8192)
            slave.follow(master.ha_address, master.address)
            await until(lambda: len(master.compared) > 3)
            assert not slave.is_diverged
            assert all(link.reports == [] for link in master.links)
            return warnings(caplog)  # before the master leaves

    (told,) = run_virtual(scenario())
    assert "begins at 8192" in told and "remove this slave's store" in told


async def test_histories_are_compared_from_where_the_masters_log_begins(tmp_path):
    async with parted(tmp_path, common=160, own=30, theirs=30) as (master, slave):
        assert slave.parting > 32768
        master.store = Trimmed(master.store, 28672)
        slave.follow(master.ha_address, master.address)
        await until(lambda: slave.divergence is not None)
        assert slave.divergence.physical_offset == slave.parting
        assert min(master.compared) >= 28672


class Trimmed:
    """A store without its first files."""

    def __init__(self, store, low):
        self.store = store
        self.log = self
        self.min_physical_offset = low

    @property
    def max_physical_offset(self):
        return self.store.max_physical_offset

    def record_at(self, offset):
        return self.store.log.record_at(offset) if offset >= self.min_physical_offset else None


@pytest.mark.parametrize("code", [2, 16, 14])
async def test_a_master_that_cannot_be_asked_is_not_followed_yet(tmp_path, caplog, code):
    async with parted(tmp_path, common=10, own=0, theirs=10) as (master, slave):
        master.view_code = code
        slave.follow(master.ha_address, master.address)
        await until(lambda: len(master.compared) > 2)
        assert all(link.reports == [] for link in master.links)
        assert not slave.is_diverged
        master.view_code = None
        await until(lambda: any(link.reports for link in master.links))
        assert len(master.store.file_starts) >= 1
    assert [line for line in warnings(caplog) if f"answered with code {code}: told to" in line]


@pytest.mark.virtual_time
def test_a_stream_that_is_no_continuation_stops_the_slave(tmp_path, caplog):
    """An Apache master sends bytes from the middle of a record to a slave that was ahead of it."""

    async def scenario():
        async with pair(tmp_path) as (master, slave):
            link = await master.link()
            frames = frames_of(master.store)
            data = b"".join(one[12:] for one in frames)
            first = records(master.store)[0]
            await link.send(frame(0, data[: first[1]]))
            await link.reported(first[1])
            await link.send(frame(first[1], data[first[1] + 50 : first[1] + 900]))
            await until(lambda: link.is_closed)
            await until(lambda: slave.divergence is not None)
            assert slave.is_diverged
            assert link.reports == [0, first[1]]
            assert slave.store.max_physical_offset == first[1]
            assert len(master.links) == 1
            (told,) = warnings(caplog)
            assert f"physical offset {first[1]} on" in told

    with caplog.at_level(logging.WARNING):
        run_virtual(scenario())


async def test_a_log_that_is_found_to_have_parted_before_a_link_is_not_continued(tmp_path, monkeypatch):
    """Its queues could not be written at first. The mark stays, although the rest of the log equals the master's."""

    async def prepare():
        raise AssertionError("it connects")

    def dispatch():
        raise LogDiverged(0, "no record")

    master = Master()
    await master.start()
    async with slave_at(tmp_path, prepare=prepare) as slave:
        monkeypatch.setattr(slave.store, "dispatch", dispatch)
        follow_by_hand(slave, _Master(master.ha_address, master.address))
        assert await one_round(slave) > 3_600_000
        assert slave.is_diverged
        assert (tmp_path / "diverged").exists()
        monkeypatch.undo()
    await master.close()


# ---- with tables and our own master


async def test_the_first_record_of_a_topic_waits_for_its_type(tmp_path):
    """Topics made while the link stands: one with batch queues, and one that is gone again."""

    with opened(tmp_path / "master", is_batch_topic=lambda topic: topic == "B") as store:
        fill(store, 3)
        for number in range(2):
            body = encode_batch([BatchEntry(b"a", b""), BatchEntry(b"b", b"")])
            assert store.put_batch(message("B", body=body, UNIQ_KEY=f"K{number}")).queue_offset == 2 * number
        put_all(store, message("Gone", body=b"3"))
        master = Master(store)
        master.table = TopicConfigTable(DataVersion(1, 0, 1), {"TopicTest": TopicConfig("TopicTest")})
        await master.start()
        async with slave_at(tmp_path / "slave", prepare=lambda: sync.copy_topics()) as slave:
            topics = TopicTable(tmp_path / "slave/config", BrokerSettings(), SYSTEM_CLOCK, print)
            schedule = Schedule(tmp_path, slave.store, (), None, SYSTEM_CLOCK, flushes=False)
            sync = SlaveSync(topics, None, None, schedule, slave.client, tmp_path)
            follow_by_hand(sync, master.address)
            slave.is_batch_topic = sync.is_batch_topic
            slave.follow(master.ha_address, master.address)
            link = await master.link()
            assert master.times_asked == 1
            master.table = TopicConfigTable(
                DataVersion(2, 0, 1),
                {
                    "TopicTest": TopicConfig("TopicTest"),
                    "B": TopicConfig("B", attributes={"queue.type": "BatchCQ"}),
                },
            )
            await link.send(*frames_of(store))
            await until(lambda: slave.store.max_physical_offset == store.max_physical_offset)
            await until(lambda: not slave.store.dispatch_behind_bytes)
            assert read_all(slave.store, "B") == read_all(store, "B")
            assert slave.store.max_offset("B", 0) == 4
            assert [record.body for record in read_all(slave.store, "Gone")] == [b"3"]
            assert (tmp_path / "slave/batchconsumequeue/B").is_dir()
            assert (tmp_path / "slave/consumequeue/Gone").is_dir()
            assert master.times_asked == 3  # at the link's start, and for each of the new topics
            assert slave.is_following and slave.store.failure is None
            await sync.close()
        await master.close()


@pytest.mark.parametrize("flush", FlushDiskType)
@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_our_slave_follows_our_master(tmp_path, flush, runner):
    async def scenario():
        async with slave_at(tmp_path / "slave", flush=flush) as slave:
            with opened(tmp_path / "master") as store:
                fill(store, 100)
                acked = asyncio.Event()
                master = HaMaster(store, BrokerSettings(), SYSTEM_CLOCK, acked.set)
                port = await master.start("127.0.0.1", 0)
                slave.follow(f"127.0.0.1:{port}", None)
                await until(lambda: slave.is_following)
                for start in range(100, 200, 20):
                    fill(store, 20, start=start)
                    master.advanced()
                    await until(lambda: master.copies.replicated_offset(2) == store.max_physical_offset)
                if flush is FlushDiskType.SYNC_FLUSH:
                    assert slave.store.durable_offset == store.max_physical_offset
                await until(lambda: not slave.store.dispatch_behind_bytes)
                start = slave.store.min_physical_offset  # an empty slave gets the newest file
                assert log_of(slave.store) == log_of(store)[start:]
                assert [at for at, _ in records(slave.store)] == [at for at, _ in records(store) if at >= start]
                assert start and slave.status().last_read_timestamp
                await master.close()

    runner(scenario())
