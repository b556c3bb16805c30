"""A broker with an archive of old log files: clients read archived messages, and only archived files are deleted."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from rmqkit.broker.archive import READS_AT_ONCE, READS_OF_SEGMENT, WAITING_OF_SEGMENT, LogArchive
from rmqkit.broker.delay.wheel import roll_window_slots
from rmqkit.errors import StoreError
from rmqkit.protocol import fastjson
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_fields
from rmqkit.protocol.record import decode_record, iter_records
from rmqkit.protocol.schemas.offsets import QueueRequest, ResetOffsetRequest, SearchOffsetRequest
from rmqkit.protocol.schemas.topics import DeleteTopicRequest
from rmqkit.proxy.local import LocalConnection
from rmqkit.remoting.connection import WRITE_BYTES_HIGH, Connection
from rmqkit.remoting.router import Router
from rmqkit.store.archive.archive import Archive, segment_name
from rmqkit.store.archive.places import Folder, place_of
from rmqkit.store.archive.segment import SegmentFile
from rmqkit.store.settings import StoreSettings
from tests.broker.cluster import Cluster
from tests.broker.pops import ack, change, pop
from tests.broker.sealing import sealed_in_a_thread
from tests.loop_held import MAX_SECONDS
from tests.strangers import measured
from tests.waiting import SECONDS, until

FILE_BYTES = 16 << 10
BODY = bytes(1000)


@pytest.fixture(autouse=True)
def beside(request: pytest.FixtureRequest) -> Iterator[None]:
    """Write segments in a thread, except in tests that kill their process."""
    with nullcontext() if request.node.get_closest_marker("faults") else sealed_in_a_thread():
        yield


class Archived(Cluster):
    """A broker with log files for fourteen messages of 1 KiB, and an archive."""

    def __init__(self, root: Path, **settings):
        self.archive = root / "archive"
        store = {"archive": str(self.archive), "commit_log_file_bytes": FILE_BYTES, **settings.pop("store", {})}
        super().__init__(root / "store", store=store, **settings)

    @property
    def context(self):
        return self.standalone.broker.context

    @property
    def store(self):
        return self.context.store

    async def fill(self, count=50, queue_id=0):
        for number in range(count):
            keys = f"KEYS\x01k{number}\x02TAGS\x01{'even' if number % 2 == 0 else 'odd'}\x02"
            answer = await self.send(body=b"%d " % number + BODY, properties=keys, queue_id=queue_id)
            assert answer.code == 0

    async def archive_all(self):
        """Archive every full file, and delete the files that may be deleted."""
        await self.archive_full()
        self.delete_old()

    async def archive_full(self):
        self.store.flusher.flush_log()
        await self.context.archive.round()

    def delete_old(self):
        for path in (self.store.root / "commitlog").iterdir():
            os.utime(path, (0, 0))
        self.store.retention.request()
        return self.store.retention_round().log_files

    async def read(self, begin, end, **how):
        """Pull messages from one offset to before another as a client does. Return the numbers in the bodies."""
        found, offset = [], begin
        while offset < end:
            answer = await self.pull(offset, flags=how.pop("flags", 4), **how)
            following = int(decode_fields(answer)["nextBeginOffset"])
            assert answer.code in (ResponseCode.SUCCESS, ResponseCode.PULL_RETRY_IMMEDIATELY), answer.remark
            assert following > offset
            found += [int(record.body.split(b" ")[0]) for record in iter_records(answer.body)]
            offset = following
        return found


async def test_a_consumer_reads_across_the_border_in_order(tmp_path):
    async with Archived(tmp_path) as broker:
        await broker.fill()
        await broker.archive_all()
        assert broker.store.min_offset("T", 0) > 10
        assert await broker.number(RequestCode.GET_MIN_OFFSET, QueueRequest("T", 0)) == 0
        assert await broker.read(0, 50) == list(range(50))
        assert await broker.read(7, 50, count=1) == list(range(7, 50))
        first = await broker.pull(0, count=3)
        told = decode_fields(first)
        assert (told["minOffset"], told["maxOffset"], told["nextBeginOffset"]) == ("0", "50", "3")
        assert first.remark == "FOUND"


async def test_tags_and_sql_are_looked_at(tmp_path):
    async with Archived(tmp_path, broker={"property_filter": True}) as broker:
        await broker.fill()
        await broker.archive_all()
        assert await broker.read(0, 50, expression="odd") == list(range(1, 50, 2))
        found = await broker.read(0, 50, expression="TAGS = 'even'", expression_type="SQL92")
        assert found == list(range(0, 50, 2))


async def test_a_restart_finds_what_was_archived(tmp_path):
    async with Archived(tmp_path) as broker:
        await broker.fill()
        await broker.archive_all()
        low = broker.store.min_offset("T", 0)
    async with Archived(tmp_path) as broker:
        await broker.context.archive.round()
        assert broker.store.min_offset("T", 0) == low
        assert await broker.read(0, 50) == list(range(50))
        await broker.fill(30)
        await broker.archive_all()
        assert await broker.read(0, 80) == [*range(50), *range(30)]


async def test_what_is_not_archived_is_not_deleted(tmp_path):
    async with Archived(tmp_path) as broker:
        await broker.fill()
        assert broker.delete_old() == 0  # nothing is known of the archive yet
        broker.archive.mkdir()
        (broker.archive / "broker-a").write_text("a file where the folder should be")
        with pytest.raises(StoreError, match=r"and not deleted until then: .*broker-a"):
            await broker.archive_full()
        assert broker.delete_old() == 0
        (broker.archive / "broker-a").unlink()
        await broker.archive_all()
        assert broker.store.min_physical_offset > 0
        assert await broker.read(0, 50) == list(range(50))


async def test_a_full_disk_refuses_messages_before_anything_is_lost(tmp_path, monkeypatch):
    async with Archived(tmp_path) as broker:
        await broker.fill()
        broker.store.retention._disk_used_percent = lambda path: 95
        assert broker.store.retention_round().log_files == 0
        assert (await broker.send()).code == ResponseCode.SERVICE_NOT_AVAILABLE
        assert await broker.read(0, 50) == list(range(50))


async def test_the_archive_of_another_broker_is_left_alone(tmp_path, caplog):
    async with Archived(tmp_path) as broker:
        await broker.fill()
        await broker.archive_all()
        segments = sorted(path.name for path in (broker.archive / "broker-a").iterdir())
    shutil.rmtree(tmp_path / "store")
    async with Archived(tmp_path) as broker:
        await broker.fill(30)
        with pytest.raises(StoreError, match=r"the log ends at|belongs to another store"):
            await broker.context.archive.round()
        assert broker.delete_old() == 0
        assert sorted(path.name for path in (broker.archive / "broker-a").iterdir()) == segments
        assert await broker.number(RequestCode.GET_MIN_OFFSET, QueueRequest("T", 0)) == 0
        assert await broker.read(0, 30) == list(range(30))


async def test_messages_are_found_by_key_by_id_and_by_time(tmp_path):
    async with Archived(tmp_path) as broker:
        await broker.fill()
        records = [bytes(record) for record in broker.store.get("T", 0, 0, count_max=50).records]
        await broker.archive_all()
        for number in (0, 13, 49):
            answer = await broker.ask(
                RequestCode.QUERY_MESSAGE, topic="T", key=f"k{number}", maxNum=8, beginTimestamp=0, endTimestamp=1 << 60
            )
            assert [int(record.body.split(b" ")[0]) for record in iter_records(answer.body)] == [number]
        first = next(iter_records(records[0]))
        assert (await broker.ask(RequestCode.VIEW_MESSAGE_BY_ID, offset=first.physical_offset)).body == records[0]
        missing = await broker.ask(RequestCode.VIEW_MESSAGE_BY_ID, offset=first.physical_offset + 1)
        assert missing.remark == "can not find message by the offset, 1"
        search = SearchOffsetRequest("T", 0, first.store_timestamp)
        assert await broker.number(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, search) == 0


@pytest.mark.parametrize("server_side", [True, False], ids=["broker", "clients"])
async def test_a_group_is_moved_to_what_is_archived(tmp_path, monkeypatch, server_side):
    moved = []
    async with Archived(tmp_path, broker={"server_side_reset": server_side}) as broker:
        await broker.fill()
        await broker.archive_all()
        low = broker.store.min_offset("T", 0)
        records = [await broker.pull(offset, count=1) for offset in (0, 7)]
        times = [next(iter_records(answer.body)).store_timestamp for answer in records]
        client = broker.new_client({RequestCode.RESET_CONSUMER_CLIENT_OFFSET: lambda _, told: moved.append(told)})
        await broker.heartbeat("c", ("T", "*"), client=client)
        queues = broker.context.topics.get("T").write_queue_nums
        for queue_id in range(queues):
            broker.context.offsets.commit("g", "T", queue_id, 50 if queue_id == 0 else 0)

        async def reset(timestamp):
            header = ResetOffsetRequest(topic="T", group="g", timestamp=timestamp, is_force=True)
            answer = await broker.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)
            assert answer.code == ResponseCode.SUCCESS, answer.remark
            table = fastjson.loads(answer.body)["offsetTable"]
            return next(offset for queue, offset in table.items() if queue["queueId"] == 0)

        assert await reset(0) == 0
        assert await reset(times[1]) <= 7 < low
        assert await reset(-1) == 50
        if not server_side:
            await until(lambda: len(moved) == 3)

        async def away(archive):
            raise OSError("the place cannot be reached")

        monkeypatch.setattr(LogArchive, "_look", away)
    async with Archived(tmp_path, broker={"server_side_reset": server_side}) as broker:
        header = ResetOffsetRequest(topic="T", group="g", timestamp=0, is_force=True)
        answer = await broker.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)
        assert answer.code == ResponseCode.SYSTEM_BUSY, "no consumer skips messages that may be archived"


def flip(path, *places):
    content = bytearray(path.read_bytes())
    for place in places:
        content[place] ^= 4
    path.write_bytes(content)


async def walk(broker, queue_id=0):
    """Pull a queue from 0 on as a client does. Return the numbers in the bodies."""
    found, offset = [], 0
    while offset < broker.store.max_offset("T", queue_id):
        answer = await broker.pull(offset, queue_id=queue_id)
        following = int(decode_fields(answer)["nextBeginOffset"])
        assert answer.code in (
            ResponseCode.SUCCESS,
            ResponseCode.PULL_RETRY_IMMEDIATELY,
            ResponseCode.PULL_OFFSET_MOVED,
        )
        assert following > offset, answer.remark
        found += [int(record.body.split(b" ")[0]) for record in iter_records(answer.body)] if answer.body else []
        offset = following
    return found


def forget(broker):
    """Empty the cache, so that the next reads fetch their blocks."""
    archive = broker.context.archive._archive
    archive._contents.clear()
    archive._open.clear()


def segments_of(broker):
    return sorted(broker.archive.glob("*/*.parquet"))


def messages_of(path):
    """Return the numbers of the messages that a segment has of queue 0 of T."""
    read = lambda at, size: path.read_bytes()[at : at + size]  # noqa: E731
    queue = next(one for one in SegmentFile(path.name, read, path.stat().st_size).directory.queues if one.topic == "T")
    return range(queue.first, queue.end)


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_consumer_below_the_first_archived_message_begins_there(tmp_path, caplog, restarted):
    async with Archived(tmp_path) as broker:
        await broker.fill(80)
        await broker.archive_all()
        oldest, second, *_ = segments_of(broker)
        first = messages_of(second)[0]
        if not restarted:
            assert (await broker.pull(0)).code == ResponseCode.SUCCESS
        oldest.unlink()
        forget(broker)
        if not restarted:
            assert await walk(broker) == list(range(first, 80))
    if restarted:
        async with Archived(tmp_path) as broker:
            await broker.context.archive.round()
            answer = await broker.pull(0)
            assert (answer.code, decode_fields(answer)["nextBeginOffset"]) == (
                ResponseCode.PULL_OFFSET_MOVED,
                str(first),
            )
            assert await walk(broker) == list(range(first, 80))
            broker.context.offsets.commit("g", "T", 0, 0)
            assert await popped(broker, 80 - first) == list(range(first, 80)), "a group that is below it, too"
    assert "ERROR" not in caplog.text and "Traceback" not in caplog.text


async def test_segments_deleted_while_the_broker_runs_are_not_missed_for_long(tmp_path, caplog):
    async with Archived(tmp_path) as broker:
        await broker.fill(80)
        await broker.archive_all()
        one, two, three, *_ = segments_of(broker)
        assert (await broker.read(0, 5))[:5] == list(range(5))
        one.unlink()
        two.unlink()
        forget(broker)
        first = messages_of(three)[0]
        assert await walk(broker) == list(range(first, 80))
        assert await broker.number(RequestCode.GET_MIN_OFFSET, QueueRequest("T", 0)) == first
        assert "ERROR" not in caplog.text and "Traceback" not in caplog.text


async def test_a_damaged_block_is_passed_over_with_an_error(tmp_path, caplog):
    async with Archived(tmp_path) as broker:
        await broker.fill(80)
        await broker.archive_all()
        _, path, *_ = segments_of(broker)
        lost = messages_of(path)
        flip(path, 20)
        expected = [one for one in range(80) if one not in lost]
        for _ in range(2):
            assert await walk(broker) == expected
        said = f"messages {lost[0]} to {lost[-1]} of queue 0 of topic T are skipped: {path.name} was changed"
        assert caplog.text.count(said) == 1, "two consumers pass over it, and it is logged once"
        assert "Traceback" not in caplog.text


async def test_pops_pass_over_a_damaged_block(tmp_path, caplog):
    async with Archived(tmp_path) as broker:
        await broker.fill(80)
        await broker.archive_all()
        _, path, *_ = segments_of(broker)
        lost = messages_of(path)
        flip(path, 20)
        assert await popped(broker, 80 - len(lost)) == [one for one in range(80) if one not in lost]
        assert f"messages {lost[0]} to {lost[-1]} of queue 0 of topic T are skipped" in caplog.text


async def test_lookups_pass_over_a_damaged_block(tmp_path, caplog):
    async with Archived(tmp_path) as broker:
        await broker.fill(80)
        records = [bytes(record) for record in broker.store.get("T", 0, 0, count_max=80).records]
        await broker.archive_all()
        _, path, *_ = segments_of(broker)
        lost, place = messages_of(path), next(iter_records(records[messages_of(path)[0]])).physical_offset
        flip(path, 20)
        ask = {"topic": "T", "maxNum": 8, "beginTimestamp": 0, "endTimestamp": 1 << 60}
        assert (
            await broker.ask(RequestCode.QUERY_MESSAGE, key=f"k{lost[0]}", **ask)
        ).code == ResponseCode.QUERY_NOT_FOUND
        assert f"the record at {place} is left out of a query: {path.name} was changed" in caplog.text
        assert (await broker.ask(RequestCode.QUERY_MESSAGE, key=f"k{lost[-1] + 1}", **ask)).code == ResponseCode.SUCCESS
        answer = await broker.ask(RequestCode.VIEW_MESSAGE_BY_ID, offset=place)
        assert answer.code == ResponseCode.SYSTEM_ERROR and f"record at {place} cannot be read from" in answer.remark
        time = next(iter_records(records[lost[0]])).store_timestamp
        found = await broker.number(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, SearchOffsetRequest("T", 0, time))
        assert found in (*range(lost[0]), lost[-1] + 1)
        assert "Traceback" not in caplog.text


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_missing_middle_segment_is_passed_over_with_an_error(tmp_path, caplog, restarted):
    async with Archived(tmp_path) as broker:
        await broker.fill(80)
        await broker.archive_all()
        _, path, *_ = segments_of(broker)
        lost, start = messages_of(path), int(path.name.partition(".")[0])
        if not restarted:
            assert (await broker.pull(lost[0])).code == ResponseCode.SUCCESS
        path.unlink()
        forget(broker)
        if not restarted:
            assert await walk(broker) == [one for one in range(80) if one not in lost]
    if restarted:
        async with Archived(tmp_path) as broker:
            await broker.context.archive.round()
            assert f"has no segment with the log from {start} to {start + FILE_BYTES}, and the log" in caplog.text
            assert await walk(broker) == [one for one in range(80) if one not in lost]
    assert f"messages {lost[0]} to {lost[-1]} of queue 0 of topic T are not in it: no segment has" in caplog.text


async def test_a_missing_segment_behind_an_unreadable_first_one_is_logged(tmp_path, caplog):
    async with Archived(tmp_path) as broker:
        await broker.fill(80)
        await broker.archive_all()
    first, second, *_ = segments_of(broker)
    first.write_bytes(b"nothing")
    second.unlink()
    async with Archived(tmp_path) as broker:
        await broker.context.archive.round()
        assert f"has no segment with the log from 0 to {2 * FILE_BYTES}, and the log begins" in caplog.text


async def test_the_newest_segment_that_is_missing_is_logged(tmp_path, caplog):
    async with Archived(tmp_path) as broker:
        await broker.fill(80)
        await broker.archive_all()
        begin = broker.store.min_physical_offset
        path = broker.archive / "broker-a" / segment_name(begin - FILE_BYTES)
        path.unlink()
        for later in segments_of(broker):
            if int(later.name.partition(".")[0]) >= begin:
                later.unlink()
        broker.context.archive._rounds_to_list = 0
        await broker.context.archive.round()
        assert f"has no segment with the log from {begin - FILE_BYTES} to {begin}, and the log begins" in caplog.text


async def test_two_segments_that_exchange_their_names_lose_nothing(tmp_path, caplog):
    async with Archived(tmp_path) as broker:
        await broker.fill(80)
        await broker.archive_all()
        assert await walk(broker) == list(range(80))
        one, two, *_ = segments_of(broker)
        one.rename(one.with_suffix(".x"))
        two.rename(one)
        one.with_suffix(".x").rename(two)
        forget(broker)
        assert await walk(broker) == list(range(80))
        assert "ERROR" not in caplog.text


async def test_a_copy_of_a_segment_under_another_name_changes_nothing(tmp_path):
    async with Archived(tmp_path) as broker:
        await broker.fill(80)
        await broker.archive_all()
        one, *_ = segments_of(broker)
        shutil.copy(one, one.with_name(segment_name(1 << 40)))
        shutil.copy(one, one.with_name("notes.txt"))
    async with Archived(tmp_path) as broker:
        await broker.context.archive.round()
        assert await walk(broker) == list(range(80))


async def archived_elsewhere(root, count=80):
    """Return the segments of another broker whose log has the same offsets."""
    async with Archived(root) as broker:
        await broker.fill(count)
        await broker.archive_all()
        return segments_of(broker)


async def test_a_segment_of_another_log_is_not_served(tmp_path, caplog):
    foreign = await archived_elsewhere(tmp_path / "other")
    async with Archived(tmp_path / "own") as broker:
        await broker.fill(80)
        await broker.archive_all()
        _, path, *_ = segments_of(broker)
        lost = messages_of(path)
    shutil.copy(foreign[1], path)
    async with Archived(tmp_path / "own") as broker:
        await broker.context.archive.round()
        assert await walk(broker) == [one for one in range(80) if one not in lost]
        assert f"{path.name} belongs to another log: it is ignored" in caplog.text
        assert path.read_bytes() == foreign[1].read_bytes(), "no segment of another log is replaced"


async def test_an_archive_of_another_log_alone_is_refused_and_nobody_is_moved(tmp_path):
    foreign = await archived_elsewhere(tmp_path / "other")
    async with Archived(tmp_path / "own") as broker:
        await broker.fill(80)
        await broker.archive_all()
        low = broker.store.min_offset("T", 0)
        assert low > 0
    shutil.rmtree(tmp_path / "own" / "archive" / "broker-a")
    shutil.copytree(foreign[0].parent, tmp_path / "own" / "archive" / "broker-a")
    async with Archived(tmp_path / "own") as broker:
        with pytest.raises(StoreError, match="belongs to another store: it has no segment of this log"):
            await broker.context.archive.round()
        assert (await broker.pull(0)).code == ResponseCode.SYSTEM_BUSY
        assert (await broker.pull(low)).code == ResponseCode.SUCCESS
        assert broker.delete_old() == 0


async def test_an_archive_that_is_away_while_the_broker_runs_moves_nobody(tmp_path, caplog):
    async with Archived(tmp_path) as broker:
        await broker.fill(80)
        await broker.archive_all()
        broker.archive.rename(tmp_path / "unmounted")
        broker.archive.mkdir()
        answer = await broker.pull(0)
        assert answer.code == ResponseCode.SYSTEM_BUSY
        assert "is empty now and had" in caplog.text and "Traceback" not in caplog.text
        broker.archive.rmdir()
        (tmp_path / "unmounted").rename(broker.archive)
        assert await walk(broker) == list(range(80))


async def test_segments_that_were_taken_away_are_passed_over(tmp_path):
    async with Archived(tmp_path) as broker:
        await broker.fill()
        await broker.archive_all()
    shutil.rmtree(tmp_path / "archive")
    async with Archived(tmp_path) as broker:
        await broker.context.archive.round()
        low = broker.store.min_offset("T", 0)
        answer = await broker.pull(0)
        assert (answer.code, decode_fields(answer)["nextBeginOffset"]) == (ResponseCode.PULL_OFFSET_MOVED, str(low))


async def test_reads_of_one_connection_are_bounded(tmp_path, monkeypatch):
    async with Archived(tmp_path) as broker:
        await broker.fill()
        await broker.archive_all()
        let_go, get = asyncio.Event(), LogArchive._in_thread

        async def wait(archive, work):
            await let_go.wait()
            return await get(archive, work)

        monkeypatch.setattr(LogArchive, "_in_thread", wait)
        pulls = [asyncio.ensure_future(broker.pull(0)) for _ in range(40)]
        refused, _ = await asyncio.wait(pulls, return_when=asyncio.FIRST_COMPLETED)
        let_go.set()
        codes = [answer.code for answer in await asyncio.gather(*pulls)]
        assert codes.count(ResponseCode.SYSTEM_BUSY) == 8
        assert codes.count(ResponseCode.SUCCESS) == 32
        assert all(one.result().code == ResponseCode.SYSTEM_BUSY for one in refused)


@pytest.mark.faults
@pytest.mark.real_time
async def test_the_process_that_writes_segments_may_be_killed(tmp_path, caplog):
    async with Archived(tmp_path) as broker:
        await broker.fill(30)
        working = asyncio.ensure_future(broker.archive_full())
        while broker.context.archive.process is None:
            await asyncio.sleep(0)
        broker.context.archive.process.kill()
        await asyncio.wait([working])
        told = str(working.exception() or caplog.text)  # of this round, or of one of the broker's own
        assert "the process that should write it died" in told
        await broker.archive_all()
        assert broker.store.min_physical_offset > 0
        assert await broker.read(0, 30) == list(range(30))
        archive = Archive(place_of(str(broker.archive), "broker-a"))
        assert archive.refresh() >= 1


async def popped(broker, count=50, **fields):
    """Pop and acknowledge until no message is left. Return the numbers in the bodies."""
    found = []
    while len(found) < count:
        one = await pop(broker, queue_id=0, max_msg_nums=7, **fields)
        assert one.messages, one.remark
        found += [int(body.split(" ")[0]) for body in one]
        for body in one:
            assert (await ack(broker, one.handles[body])).code == 0
    return found


@pytest.mark.parametrize("how", [{}, {"order": True}])
async def test_pops_read_across_the_border_in_order(tmp_path, how):
    async with Archived(tmp_path) as broker:
        await broker.fill()
        await broker.archive_all()
        assert await popped(broker, **how) == list(range(50))
        assert broker.context.pop.check_points.pending == {}
        assert not (await pop(broker, queue_id=0, **how)).messages


async def test_a_pop_in_order_that_waited_for_acks_continues_in_the_archive(tmp_path):
    async with Archived(tmp_path) as broker:
        await broker.fill()
        await broker.archive_all()
        low, found = broker.store.min_offset("T", 0), []
        popped = await pop(broker, queue_id=0, order=True, max_msg_nums=10)
        while len(found) + len(popped.messages) < low:
            found += [int(body.split(" ")[0]) for body in popped]
            waiting = asyncio.ensure_future(pop(broker, queue_id=0, order=True, max_msg_nums=10, poll_time=30_000))
            await until(lambda: len(broker.context.pop.waiting) == 1)
            began_ms = broker.context.clock.monotonic_ms()
            for handle in popped.handles.values():
                assert (await ack(broker, handle)).code == ResponseCode.SUCCESS
            popped = await waiting
            assert broker.context.clock.monotonic_ms() - began_ms < 5_000 and popped.messages
        assert found == list(range(len(found))) and len(found) > 20


async def test_a_pop_passes_over_what_its_filter_leaves_out(tmp_path):
    async with Archived(tmp_path) as broker:
        await broker.fill()
        await broker.archive_all()
        assert await popped(broker, 25, exp="odd") == list(range(1, 50, 2))


async def test_what_was_popped_is_redelivered_from_the_archive(tmp_path):
    async with Archived(tmp_path) as broker:
        await broker.fill()
        held = await pop(broker, queue_id=0, max_msg_nums=4)
        await broker.archive_all()
        low = broker.store.min_offset("T", 0)
        assert low > 4
        for number, body in enumerate(held):
            if number < 3:
                assert (await ack(broker, held.handles[body])).code == 0
        assert (await change(broker, held.handles[body], 1))[0] == 0
        async with asyncio.timeout(SECONDS):
            while not broker.store.max_offset("%RETRY%g_T", 0):
                await broker.context.pop.revive.round()
                await asyncio.sleep(0)
        again = broker.store.get("%RETRY%g_T", 0, 0, count_max=2).records
        assert [decode_record(record).body[:2] for record in again] == [b"3 "]


async def test_a_consumer_waits_until_it_is_known_what_is_archived(tmp_path, monkeypatch):
    async with Archived(tmp_path) as broker:
        await broker.fill()
        await broker.archive_all()

    async def away(archive):
        raise OSError("the place cannot be reached")

    look = LogArchive._look
    monkeypatch.setattr(LogArchive, "_look", away)
    async with Archived(tmp_path) as broker:
        low = broker.store.min_offset("T", 0)
        said = f"the archive {tmp_path / 'archive' / 'broker-a'} is not known yet: ask again"
        for answer in (
            await broker.pull(0),
            await broker.call(RequestCode.GET_MIN_OFFSET, QueueRequest("T", 0)),
            await broker.call(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, SearchOffsetRequest("T", 0, 1)),
            await pop(broker, queue_id=0),
        ):
            assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_BUSY, said)
        assert (await broker.pull(low)).code == ResponseCode.SUCCESS
        monkeypatch.setattr(LogArchive, "_look", look)
        await broker.context.archive.round()
        assert await broker.read(0, 50) == list(range(50))
        assert await popped(broker) == list(range(50))


async def test_a_topic_that_was_deleted_and_made_again_starts_over(tmp_path):
    async with Archived(tmp_path) as broker:
        await broker.fill()
        await broker.archive_full()
        answer = await broker.call(RequestCode.DELETE_TOPIC_IN_BROKER, DeleteTopicRequest("T"))
        assert answer.code == 0
        await broker.fill(5)
        assert await broker.read(0, 5) == list(range(5))
        for number in range(100, 150):
            assert (await broker.send(body=b"%d " % number + BODY)).code == 0
        await broker.archive_all()
        assert broker.store.min_offset("T", 0) > 5
        expected = [*range(5), *range(100, 150)]
        assert await broker.read(0, 55) == expected
    async with Archived(tmp_path) as broker:
        await broker.context.archive.round()
        assert await broker.read(0, 55) == expected


async def held_by_a_level(broker):
    assert (await broker.send(body=b"late", properties="DELAY\x0118\x02")).code == 0


async def held_by_the_timer(broker):
    assert (await broker.send(body=b"late", properties="TIMER_DELAY_SEC\x01100000\x02")).code == 0
    await broker.context.timer.flush_round()


async def held_by_a_transaction(broker):
    assert (await broker.send(body=b"half", properties="TRAN_MSG\x01true\x02PGROUP\x01p\x02")).code == 0


async def held_by_a_pop(broker):
    assert (await broker.send(body=b"popped", queue_id=1)).code == 0
    assert len((await pop(broker, queue_id=1)).messages) == 1


@pytest.mark.parametrize("hold", [held_by_a_level, held_by_the_timer, held_by_a_transaction, held_by_a_pop])
async def test_a_file_with_what_the_broker_itself_has_to_deliver_is_archived_and_kept(tmp_path, hold):
    async with Archived(tmp_path) as broker:
        await broker.fill(30)
        await hold(broker)
        waiting = broker.store.max_physical_offset
        await broker.fill(50)
        await broker.archive_all()
        broker.delete_old()
        assert broker.context.archive.archived_to > waiting
        assert 0 < broker.store.min_physical_offset < waiting


@pytest.mark.parametrize(
    ("hours", "expected"), [(72, 172_800), (0, 172_800), (6, 14_400), (1, 2400), (1 << 40, 172_800)]
)
def test_no_timed_message_waits_longer_than_log_files_are_kept(hours, expected):
    assert roll_window_slots(StoreSettings(file_reserved_hours=hours)) == expected


# ---------------------------------------------------------------- slow objects, many readers


class Gate:
    """A place that holds reads of segments until the test releases them, and counts the waiting reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slow: set[str] = set()
        self.most: Counter[str] = Counter()
        self._under_way: Counter[str] = Counter()
        self._changed = threading.Condition()
        read = Folder.read

        def wait(folder: Folder, name: str, position: int, size: int) -> bytes:
            with self._changed:
                self._under_way[name] += 1
                self.most[name] = max(self.most[name], self._under_way[name])
                self.most["in all"] = max(self.most["in all"], self._under_way.total())
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: name not in self.slow, SECONDS)
                self._under_way[name] -= 1
            return read(folder, name, position, size)

        monkeypatch.setattr(Folder, "read", wait)

    async def wait_for(self, count: int) -> None:
        """Wait until this number of reads waits."""

        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: self._under_way.total() >= count, SECONDS)

        assert await asyncio.to_thread(wait)

    def let_go(self) -> None:
        with self._changed:
            self.slow.clear()
            self._changed.notify_all()


@pytest.mark.real_time
async def test_an_object_that_is_slow_holds_up_its_own_readers_alone(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    async with Archived(tmp_path) as broker:
        for queue_id in range(3):
            await broker.fill(30, queue_id)
        await broker.archive_all()
        first, *others = sorted(broker.archive.glob("*/*.parquet"))
        assert len(others) >= 4
        gate.slow.add(first.name)
        clients = [broker.new_client() for _ in range(6)]
        pulls = [asyncio.ensure_future(broker.pull(0, client=one)) for one in clients for _ in range(32)]
        await gate.wait_for(READS_OF_SEGMENT)
        while sum(one.done() for one in pulls) < len(pulls) - WAITING_OF_SEGMENT:
            await asyncio.wait([one for one in pulls if not one.done()], return_when=asyncio.FIRST_COMPLETED)
        assert {one.result().code for one in pulls if one.done()} == {ResponseCode.SYSTEM_BUSY}
        with measured() as callbacks:
            for queue_id in (1, 2):
                assert await broker.read(0, 30, queue_id=queue_id) == list(range(30))
            assert await broker.read(16, 30) == list(range(16, 30)), "of the same queue, from another object"
            assert (await broker.send()).code == ResponseCode.SUCCESS
        assert callbacks.longest < MAX_SECONDS, callbacks.which
        assert sum(one.done() for one in pulls) == len(pulls) - WAITING_OF_SEGMENT
        assert gate.most[first.name] == READS_OF_SEGMENT
        gate.let_go()
        codes = Counter(answer.code for answer in await asyncio.gather(*pulls))
        assert codes == {
            ResponseCode.SUCCESS: WAITING_OF_SEGMENT,
            ResponseCode.SYSTEM_BUSY: 6 * 32 - WAITING_OF_SEGMENT,
        }
        assert not broker.context.archive._turns_of and not broker.context.archive._reads


@pytest.mark.real_time
async def test_slow_lookups_hold_up_no_pulls(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    async with Archived(tmp_path) as broker:
        for queue_id in range(2):
            await broker.fill(30, queue_id)
        await broker.archive_all()
        first, *_ = sorted(broker.archive.glob("*/*.parquet"))
        gate.slow.add(first.name)
        header = SearchOffsetRequest("T", 0, 1)
        asked = [broker.call(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header) for _ in range(20)]
        found = asyncio.gather(*asked)
        await gate.wait_for(READS_OF_SEGMENT)
        assert await broker.read(0, 30, queue_id=1) == list(range(30))
        assert not found.done() and gate.most[first.name] == READS_OF_SEGMENT
        gate.let_go()
        assert {int(decode_fields(answer)["offset"]) for answer in await found} == {0}


@pytest.mark.real_time
async def test_what_many_cold_reads_hold_is_bounded(tmp_path, monkeypatch):
    bounds = {"CACHE_BYTES": 512 << 10, "CONTENT_BYTES": 256 << 10, "FETCH_BYTES": 64 << 10}
    for name, value in bounds.items():
        monkeypatch.setattr(f"rmqkit.store.archive.archive.{name}", value)
    gate = Gate(monkeypatch)
    store = {"commit_log_file_bytes": 1 << 20, "transfer_bytes_in_memory_max": 256 << 10}
    async with Archived(tmp_path, store=store) as broker:
        for _ in range(300):
            assert (await broker.send(body=bytes(100 << 10))).code == ResponseCode.SUCCESS
        await broker.archive_all()
        names = {path.name for path in broker.archive.glob("*/*.parquet")}
        assert len(names) >= 25
        archive, low = broker.context.archive, broker.store.min_offset("T", 0)
        readers = [LocalConnection(Router()) for _ in range(10)]

        async def read(number: int) -> int:
            found = await archive.get(readers[number % 10], "T", 0, number % low, count_max=2)
            return len(found.records)

        gc.collect()
        tracemalloc.start()
        try:
            gate.slow |= names
            reads = asyncio.gather(*(read(number * 7) for number in range(300)))
            await gate.wait_for(READS_AT_ONCE)
            gate.let_go()
            counts = await reads
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert gate.most["in all"] == READS_AT_ONCE
        assert set(counts) <= {1, 2} and sum(counts) > 500
        of_a_read = bounds["FETCH_BYTES"] + 2 * bounds["CONTENT_BYTES"] + (256 << 10)  # a block is made of two pieces
        assert most < READS_AT_ONCE * of_a_read + bounds["CACHE_BYTES"] + (2 << 20) < sum(counts) * (100 << 10) // 2


async def test_a_peer_that_takes_nothing_is_read_nothing(tmp_path, monkeypatch):
    async with Archived(tmp_path) as broker:
        await broker.fill()
        await broker.archive_all()
        monkeypatch.setattr(Connection, "unsent_bytes", WRITE_BYTES_HIGH)
        monkeypatch.setattr(Archive, "get", None)
        assert (await broker.pull(0)).code == ResponseCode.SYSTEM_BUSY
