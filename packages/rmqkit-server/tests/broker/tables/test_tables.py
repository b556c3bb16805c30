"""Topic, group and offset tables: a change is on the disk or it did not happen (behaviour.md §2.8, §5; store.md §9)."""

from __future__ import annotations

import asyncio
import copy
import errno
import threading
from types import SimpleNamespace

import pytest

from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.tables.groups import GroupTable
from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.errors import StoreUnavailable
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.topics import TopicConfig
from rmqkit.system import disk, threads

SETTINGS = BrokerSettings(broker_name="broker-a")
# On this clock no change gets old enough for a write of the file, so that only changes are written.
CLOCK = SimpleNamespace(now_ms=SYSTEM_CLOCK.now_ms, monotonic_ms=lambda: 0.0)


@pytest.fixture
def topics(tmp_path):
    told = []
    table = TopicTable(tmp_path, SETTINGS, CLOCK, told.extend)
    table.told = told
    return started(table)


@pytest.fixture
def groups(tmp_path):
    return started(GroupTable(tmp_path, SETTINGS, CLOCK))


def started(table):
    """Read and write a table as a start does."""
    table.load()
    table.persist()
    return table


@pytest.fixture
def offsets(tmp_path):
    table = OffsetTable(tmp_path, SYSTEM_CLOCK)
    for topic, group, offset in (("T", "g", 3), ("T", "h", 4), ("U", "g", 5), ("T2", "g", 6), ("T", "g2", 7)):
        table.commit(group, topic, 0, offset)
    return table


def put(table, *configs):
    asyncio.run(table.put_shared(*configs))


def refuse(monkeypatch):
    """Let the disk refuse changes in journals."""

    def write(descriptor, data, position):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "write_all", write)


def test_a_topic_that_the_disk_refuses_is_not_there(topics, monkeypatch):
    topics.put(TopicConfig("T", 4, 4))
    before = topics.snapshot()
    refuse(monkeypatch)
    for change in (
        lambda: topics.put(TopicConfig("U", 4, 4), TopicConfig("T", 1, 1)),
        lambda: put(topics, TopicConfig("U", 4, 4), TopicConfig("T", 1, 1)),
        lambda: topics.remove("T"),
        lambda: topics.mark_ordered(["T"]),
    ):
        with pytest.raises(StoreUnavailable):
            change()
        assert topics.snapshot() == before
    assert [config.topic_name for config in topics.told] == ["T"]


def test_a_group_that_the_disk_refuses_is_not_there(groups, monkeypatch):
    put(groups, SubscriptionGroupConfig(group_name="g"))
    before = copy.deepcopy(groups.stored)
    refuse(monkeypatch)
    for change in (
        lambda: put(groups, SubscriptionGroupConfig(group_name="h")),
        lambda: groups.remove("g"),
        lambda: groups.forbid_reading("g", "T", is_forbidden=True),
    ):
        with pytest.raises(StoreUnavailable):
            change()
        assert groups.stored == before
    groups.forbid_reading("g", "T", is_forbidden=False)  # nothing to write
    groups.remove("none")


def test_a_shared_write_that_is_refused_takes_back_its_own_topics_only(topics, monkeypatch):
    async def scenario():
        topics.put(TopicConfig("A", 4, 4), TopicConfig("B", 4, 4))
        shared = asyncio.ensure_future(topics.put_shared(TopicConfig("B", 8, 8), TopicConfig("C", 8, 8)))
        await asyncio.sleep(0)
        topics.put(TopicConfig("A", 2, 2))  # on the disk before the other is
        refuse(monkeypatch)
        with pytest.raises(StoreUnavailable):
            await shared

    asyncio.run(scenario())
    assert [topics.get(name) and topics.get(name).read_queue_nums for name in "ABC"] == [2, 4, None]


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("kind", ["groups", "topics"])
def test_changes_that_come_together_share_one_write(tmp_path, groups, topics, kind, is_refused, monkeypatch):
    table, fresh = (
        (groups, GroupTable(tmp_path, SETTINGS, SYSTEM_CLOCK))
        if kind == "groups"
        else (topics, TopicTable(tmp_path, SETTINGS, SYSTEM_CLOCK, print))
    )
    saves, write_all = [], disk.write_all

    def counted(descriptor, data, position):
        saves.append(data)
        if is_refused:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_all(descriptor, data, position)

    monkeypatch.setattr(disk, "write_all", counted)
    made = TopicConfig if kind == "topics" else lambda name: SubscriptionGroupConfig(group_name=name)
    wanted = [f"new{number}" for number in range(100)]

    async def put_all():
        return await asyncio.gather(*(table.put_shared(made(name)) for name in wanted), return_exceptions=True)

    done = asyncio.run(put_all())
    assert len(saves) == 1
    assert {type(one) for one in done} == {StoreUnavailable if is_refused else type(None)}
    fresh.load()
    for one in (table, fresh):
        known = one.stored.subscription_group_table if kind == "groups" else one.snapshot().topic_config_table
        assert [name for name in known if name.startswith("new")] == ([] if is_refused else wanted)
    if kind == "topics":
        assert [config.topic_name for config in topics.told] == ([] if is_refused else wanted)


@pytest.mark.parametrize("kind", ["groups", "topics"])
def test_what_appears_by_itself_is_written_with_the_others_of_its_second(tmp_path, groups, topics, kind, monkeypatch):
    table, fresh = (
        (groups, GroupTable(tmp_path, SETTINGS, SYSTEM_CLOCK))
        if kind == "groups"
        else (topics, TopicTable(tmp_path, SETTINGS, SYSTEM_CLOCK, print))
    )
    saved, write_all = [], disk.write_all
    monkeypatch.setattr(disk, "write_all", lambda *given: (saved.append(given), write_all(*given)))
    for number in range(100):
        name = f"g{number}"
        assert (table.get(name) if kind == "groups" else table.ensure(f"%RETRY%{name}", 1, soon=True)) is not None
    assert saved == []
    for _ in range(2):
        asyncio.run(table.write_new())
    assert len(saved) == 1
    fresh.load()
    names = fresh.stored.subscription_group_table if kind == "groups" else fresh.snapshot().topic_config_table
    assert len([name for name in names if "g" in name and name[-1].isdigit()]) == 100


def appears(table, name):
    """Create a row as a client's first heartbeat does."""
    made = table.get(name) if isinstance(table, GroupTable) else table.ensure(name, 1, soon=True)
    assert made is not None


def made_of(table, name, count=8):
    """Return a row to put. ``count`` distinguishes it from other rows."""
    is_group = isinstance(table, GroupTable)
    return SubscriptionGroupConfig(group_name=name, retry_queue_nums=count) if is_group else TopicConfig(name, count, 8)


def count_of(table, name):
    """Return the number of an existing row."""
    if isinstance(table, GroupTable):
        row = table.stored.subscription_group_table.get(name)
        return row and row.retry_queue_nums
    row = table.get(name)
    return row and row.read_queue_nums


def read_again(table):
    """Return the table read from its file."""
    folder = table.saved.file.path.parent
    is_group = isinstance(table, GroupTable)
    fresh = (
        GroupTable(folder, SETTINGS, SYSTEM_CLOCK) if is_group else TopicTable(folder, SETTINGS, SYSTEM_CLOCK, print)
    )
    fresh.load()
    return fresh


@pytest.fixture(params=["groups", "topics"])
def table(request):
    return request.getfixturevalue(request.param)


def test_a_refused_write_of_what_appeared_is_tried_again(table, monkeypatch):
    with monkeypatch.context() as patch:
        refuse(patch)
        appears(table, "h")
        with pytest.raises(StoreUnavailable):
            asyncio.run(table.write_new())
    asyncio.run(table.write_new())
    assert count_of(read_again(table), "h") == 1


class SlowDisk:
    """A disk on which the first write of a journal blocks until ``may_end`` is set, and fails if ``fails`` is set."""

    def __init__(self, monkeypatch, *, fails=False):
        self.begun, self.may_end = threads.Event(), threads.Event()
        self.fails, self.saved, self.write_all = fails, 0, disk.write_all
        monkeypatch.setattr(disk, "write_all", self.slow)

    def slow(self, descriptor, data, position):
        self.saved += 1
        if self.saved == 1:
            self.begun.set()
            assert self.may_end.wait(60)
            if self.fails:
                raise OSError(errno.ENOSPC, "No space left on device")
        self.write_all(descriptor, data, position)

    async def is_busy(self):
        assert await asyncio.to_thread(self.begun.wait, 30)


def test_the_loop_continues_while_what_appeared_is_written_and_a_later_table_stays(table, monkeypatch):
    """Otherwise a slow disk would delay every message for seconds."""

    async def scenario():
        disk = SlowDisk(monkeypatch)
        appears(table, "g1")
        writing = asyncio.create_task(table.write_new())
        await disk.is_busy()
        removing = asyncio.create_task(asyncio.to_thread(table.remove, "g1"))
        assert not writing.done()
        disk.may_end.set()
        await asyncio.gather(writing, removing)

    asyncio.run(scenario())
    assert count_of(read_again(table), "g1") is None


@pytest.mark.parametrize("fails", [False, True])
def test_the_loop_continues_while_changes_are_written_and_those_that_come_meanwhile_share_the_next_write(
    table, monkeypatch, fails
):
    put(table, made_of(table, "known", 1))

    async def scenario():
        disk = SlowDisk(monkeypatch, fails=fails)
        first = asyncio.create_task(table.put_shared(*[made_of(table, name, 2) for name in ("known", "both", "one")]))
        await disk.is_busy()
        later = [asyncio.create_task(table.put_shared(made_of(table, name, 3))) for name in ("both", "two")]
        await asyncio.sleep(0)
        assert not first.done()
        disk.may_end.set()
        done = await asyncio.gather(first, *later, return_exceptions=True)
        assert [type(one) for one in done] == [StoreUnavailable if fails else type(None), type(None), type(None)]
        assert disk.saved == 2

    asyncio.run(scenario())
    expected = {"known": 1, "both": 3, "one": None, "two": 3} if fails else {"known": 2, "both": 3, "one": 2, "two": 3}
    for one in (table, read_again(table)):
        assert {name: count_of(one, name) for name in expected} == expected


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_changed_at_once_while_changes_are_written_stays(table, monkeypatch, fails):
    put(table, made_of(table, "gone", 1), made_of(table, "kept", 1))

    async def scenario():
        disk = SlowDisk(monkeypatch, fails=fails)
        first = asyncio.create_task(table.put_shared(made_of(table, "gone", 2), made_of(table, "new", 2)))
        await disk.is_busy()
        threading.Thread(target=disk.may_end.set).start()
        table.remove("gone")  # waits for the other write
        await asyncio.gather(first, return_exceptions=True)
        await table.write_new()

    asyncio.run(scenario())
    for one in (table, read_again(table)):
        expected = {"gone": None, "kept": 1, "new": None if fails else 2}
        assert {name: count_of(one, name) for name in expected} == expected


def test_a_version_stands_for_one_table_though_others_change_it_while_one_is_written(topics, monkeypatch):
    async def scenario():
        disk = SlowDisk(monkeypatch)
        first = asyncio.create_task(topics.put_shared(TopicConfig("A", 1, 1)))
        await disk.is_busy()
        topics.ensure("%RETRY%g", 1, soon=True)
        between = topics.data_version
        disk.may_end.set()
        await first
        assert topics.data_version.counter == between.counter + 1
        await topics.write_new()

    asyncio.run(scenario())
    fresh = read_again(topics)
    assert (fresh.data_version, fresh.snapshot()) == (topics.data_version, topics.snapshot())
    assert [config.topic_name for config in topics.told] == ["%RETRY%g", "A"]


def test_other_forbidden_bits_stay(groups):
    groups.stored.forbidden_table["g"] = {"T": 1, "U": 5}
    groups.forbid_reading("g", "T", is_forbidden=True)
    groups.forbid_reading("g", "U", is_forbidden=False)
    assert groups.stored.forbidden_table == {"g": {"T": 5, "U": 1}}
    assert (groups.is_read_forbidden("g", "T"), groups.is_read_forbidden("g", "U")) == (True, False)


def test_only_known_topics_are_marked_as_ordered(topics):
    topics.put(TopicConfig("T", 4, 4), TopicConfig("U", 4, 4))
    version = topics.data_version
    topics.mark_ordered(["none"])
    assert topics.data_version == version
    topics.mark_ordered(["T", "none"])
    assert (topics.get("T").order, topics.get("U").order) == (True, False)
    assert topics.told[-1].topic_name == "T"
    changed = topics.data_version
    topics.mark_ordered(["T"])
    assert (topics.data_version, changed.counter) == (changed, version.counter + 1)


def test_what_clients_commit_for_a_queue_that_they_found_nothing_in_is_no_offset(offsets):
    offsets.commit("go", "T", 1, -1)
    assert offsets.get("go", "T", 1) is None
    assert offsets.contents.offset_table["T@go"] == {1: -1}  # returned and written unchanged, as Apache's brokers do


def test_offsets_by_topic_and_by_group(offsets):
    assert sorted(offsets.topics("g")) == ["T", "T2", "U"]
    assert sorted(offsets.groups("T")) == ["g", "g2", "h"]
    offsets.clone("T", source="g", target="twin")
    offsets.commit("g", "T", 0, 9)
    assert offsets.get("twin", "T", 0) == 3
    offsets.clone("none", source="g", target="other")
    assert offsets.topics("other") == []


@pytest.mark.parametrize(
    ("remove", "left"),
    [
        (lambda table: table.remove_group("g"), {"T@h", "T@g2"}),
        (lambda table: table.remove_topic("T"), {"U@g", "T2@g"}),
        (lambda table: table.remove_group("none"), {"T@g", "T@h", "U@g", "T2@g", "T@g2"}),
    ],
)
def test_what_is_removed_takes_resets_and_pull_offsets_along(offsets, remove, left):
    for key in ("T@g", "T@h", "U@g", "T2@g", "T@g2"):
        topic, _, group = key.partition("@")
        offsets.reset(group, topic, 0, 1)
        offsets.pulled(group, topic, 0, 2)
    offsets.snapshot()
    remove(offsets)
    assert set(offsets.contents.offset_table) == left
    assert offsets.is_dirty == (len(left) < 5)
    for key in ("T@g", "T@h", "U@g", "T2@g", "T@g2"):
        topic, _, group = key.partition("@")
        assert offsets.has_reset(group, topic, 0) == (key in left)
        assert offsets.pull_offset(group, topic, 0) == (2 if key in left else 0)


def test_a_reset_is_taken_once(offsets):
    offsets.reset("g", "T", 0, 1)
    assert (offsets.get("g", "T", 0), offsets.has_reset("g", "T", 0), offsets.has_reset("g", "T", 1)) == (
        1,
        True,
        False,
    )
    assert [offsets.take_reset("g", "T", 0) for _ in range(2)] == [1, None]
    assert not offsets.has_reset("g", "T", 0)


def test_showing_the_table_does_not_count_as_writing_it(offsets):
    assert offsets.contents.offset_table["T@g"] == {0: 3}
    assert offsets.is_dirty
    offsets.snapshot()
    assert not offsets.is_dirty


def test_offsets_that_could_not_be_written_are_written_the_next_time(tmp_path):
    table = OffsetTable(tmp_path / "config", SYSTEM_CLOCK)
    table.commit("g", "T", 0, 7)
    (tmp_path / "config").write_text("in the way")
    with pytest.raises(StoreUnavailable):
        table.write(table.snapshot())
    assert table.is_dirty


def with_queues(root, topic, *queue_ids, tree="consumequeue"):
    for queue_id in queue_ids:
        (root / tree / topic / str(queue_id)).mkdir(parents=True)


@pytest.mark.parametrize("what", ["missing", "torn", "torn, and its backup", "empty"])
def test_a_lost_topic_table_is_made_from_the_queues(what, tmp_path, caplog):
    with_queues(tmp_path, "Orders", 0, 1, 5)
    with_queues(tmp_path, "Batches", 0, tree="batchconsumequeue")
    with_queues(tmp_path, "%LMQ%light", 0)
    with_queues(tmp_path, "SCHEDULE_TOPIC_XXXX", 2)
    config = tmp_path / "config"
    if what != "missing":
        config.mkdir()
        (config / "topics.json").write_text("" if what == "empty" else '{"topicConfigTable": {"Ord')
    if what == "torn, and its backup":
        (config / "topics.json.bak").write_text("{")
    table = TopicTable(config, SETTINGS, SYSTEM_CLOCK, print)
    table.load()
    orders = table.get("Orders")
    assert (orders.read_queue_nums, orders.write_queue_nums, orders.perm) == (6, 6, 6)
    assert table.is_batch_topic("Batches") and table.get("SCHEDULE_TOPIC_XXXX").write_queue_nums == 18
    assert table.get("%LMQ%light") is None
    assert "2 topics are taken from the store's queues" in caplog.text
    assert "Batches (1)" in caplog.text and "Orders (6)" in caplog.text
    table.persist()
    caplog.clear()
    again = TopicTable(config, SETTINGS, SYSTEM_CLOCK, print)
    again.load()
    assert again.get("Orders") == orders
    assert not caplog.records


def test_a_backup_of_the_topic_table_is_completed_from_the_queues(tmp_path, caplog):
    table = TopicTable(tmp_path / "config", SETTINGS, SYSTEM_CLOCK, print)
    table.load()
    for topic in (TopicConfig("Orders", 8, 8, 4), TopicConfig("Newest", 4, 4)):
        table.put(topic)
        table.persist()
    with_queues(tmp_path, "Newest", 0, 3)
    (tmp_path / "config" / "topics.json").write_bytes(b"")
    again = TopicTable(tmp_path / "config", SETTINGS, SYSTEM_CLOCK, print)
    again.load()
    assert again.get("Orders") == TopicConfig("Orders", 8, 8, 4)
    assert again.get("Newest") == TopicConfig("Newest", 4, 4)
    assert "1 topics are taken from the store's queues" in caplog.text


def test_a_sound_topic_table_is_not_completed(tmp_path):
    table = TopicTable(tmp_path / "config", SETTINGS, SYSTEM_CLOCK, print)
    table.load()
    table.put(TopicConfig("Orders", 8, 8))
    with_queues(tmp_path, "LeftOver", 0)
    again = TopicTable(tmp_path / "config", SETTINGS, SYSTEM_CLOCK, print)
    again.load()
    assert again.get("LeftOver") is None
