"""Tables with journals at a broker: starts after kills, journals of other tables, and the cost of a change."""

from __future__ import annotations

import asyncio
import shutil
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.tables.groups import GroupTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.errors import StoreMismatch, StoreUnavailable
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig, SubscriptionGroupTable
from rmqkit.protocol.schemas.topics import DataVersion, TopicConfig, TopicConfigTable
from rmqkit.store.files import JsonFile
from rmqkit.store.table_journal import read_journal
from tests.broker.cluster import Cluster

SETTINGS = BrokerSettings(broker_name="broker-a")


# On this clock no change gets old enough for a write of the file.
CLOCK = SimpleNamespace(now_ms=SYSTEM_CLOCK.now_ms, monotonic_ms=lambda: 0.0)


def topics_of(folder, clock=CLOCK, told=None):
    table = TopicTable(folder, SETTINGS, clock, (told if told is not None else []).extend)
    table.load()
    return table


def started(folder, **options):
    """Return the topics after a start, which writes the file."""
    table = topics_of(folder, **options)
    table.persist()
    return table


def journal_in(folder):
    return folder / "topics.journal"


def test_a_change_writes_only_its_rows(tmp_path):
    """The bytes and the calls of a change do not depend on the number of topics."""
    costs = []
    for count in (10, 3000):
        folder = tmp_path / str(count)
        table = started(folder)
        table.put(*(TopicConfig(f"Topic-{number:05}", 4, 4) for number in range(count)))
        table.persist()
        table.put(TopicConfig("First", 4, 4))
        size, calls = journal_in(folder).stat().st_size, []
        sys.setprofile(lambda frame, event, argument, calls=calls: calls.append(event))
        try:
            table.put(TopicConfig("Next", 4, 4))
        finally:
            sys.setprofile(None)
        costs.append((journal_in(folder).stat().st_size - size, len(calls)))
    (small, few), (large, many) = costs
    assert abs(large - small) < 10  # the digits of the version
    assert abs(many - few) < 10


def test_after_a_kill_the_journal_completes_the_file(tmp_path):
    told = []
    table = started(tmp_path, told=told)
    version = table.data_version
    table.put(TopicConfig("A", 4, 4), TopicConfig("B", 4, 4))
    asyncio.run(
        table.put_shared(TopicConfig("C", 2, 2), TopicConfig("A", 8, 8, 4, attributes={"message.type": "FIFO"}))
    )
    table.remove("B")
    table.mark_ordered(["C"])
    table.ensure("%RETRY%g", 1, soon=True)
    asyncio.run(table.write_new())
    again = topics_of(tmp_path)
    assert again.snapshot() == table.snapshot()
    assert again.data_version == table.data_version
    assert table.data_version.counter == version.counter + 5
    assert (again.get("A").attributes, again.get("B"), again.get("C").order) == ({"message.type": "FIFO"}, None, True)
    again.persist()
    assert not journal_in(tmp_path).exists()
    assert (
        JsonFile(tmp_path / "topics.json").load(TopicConfigTable).topic_config_table
        == again.snapshot().topic_config_table
    )


def test_after_a_kill_groups_and_forbidden_topics_are_there(tmp_path):
    table = GroupTable(tmp_path, SETTINGS, SYSTEM_CLOCK)
    table.load()
    table.persist()
    asyncio.run(table.put_shared(SubscriptionGroupConfig(group_name="g"), SubscriptionGroupConfig(group_name="h")))
    table.forbid_reading("g", "T", is_forbidden=True)
    table.forbid_reading("h", "T", is_forbidden=True)
    table.remove("h")
    again = GroupTable(tmp_path, SETTINGS, SYSTEM_CLOCK)
    again.load()
    assert again.stored == table.stored
    assert again.is_read_forbidden("g", "T") and "h" not in again and not again.is_read_forbidden("h", "T")
    again.persist()
    stored = JsonFile(tmp_path / "subscriptionGroup.json").load(SubscriptionGroupTable)
    assert stored == again.stored and not (tmp_path / "subscriptionGroup.journal").exists()


async def test_a_clean_stop_leaves_whole_files_and_no_journal(tmp_path):
    config = tmp_path / "store" / "config"
    async with Cluster(tmp_path / "store") as cluster:
        context = cluster.standalone.broker.context
        await context.groups.put_shared(SubscriptionGroupConfig(group_name="g"))
        context.topics.put(TopicConfig("T", 4, 4))
        assert (config / "topics.journal").exists()
        shutil.copytree(tmp_path / "store", tmp_path / "killed")
    assert not list(config.glob("*.journal"))
    assert b'"T"' in (config / "topics.json").read_bytes()
    assert b'"g"' in (config / "subscriptionGroup.json").read_bytes()
    (tmp_path / "killed" / "lock").unlink()
    async with Cluster(tmp_path / "killed") as cluster:
        context = cluster.standalone.broker.context
        assert context.topics.get("T") == TopicConfig("T", 4, 4) and "g" in context.groups
        assert not list((tmp_path / "killed" / "config").glob("*.journal"))


def test_a_start_without_changes_writes_no_file(tmp_path):
    started(tmp_path)
    before = (tmp_path / "topics.json").stat().st_mtime_ns
    started(tmp_path)
    assert (tmp_path / "topics.json").stat().st_mtime_ns == before
    assert not (tmp_path / "topics.json.bak").exists()


def test_a_journal_is_not_applied_to_a_file_that_another_broker_has_changed(tmp_path, caplog):
    table = started(tmp_path)
    table.put(TopicConfig("OnlyHere", 4, 4))
    stored = table.saved.file.load(TopicConfigTable)
    stored.topic_config_table["Theirs"] = TopicConfig("Theirs", 4, 4)
    stored.data_version.advance(SYSTEM_CLOCK.now_ms())
    table.saved.file.save(stored)
    content = journal_in(tmp_path).read_bytes()
    again = topics_of(tmp_path)
    assert again.get("OnlyHere") is None and again.get("Theirs") is not None
    assert "topics.journal: its 1 changes are not applied, because topics.json was changed without it" in caplog.text
    assert journal_in(tmp_path).read_bytes() == content  # until the file is written
    again.persist()
    assert (tmp_path / "topics.journal.old").read_bytes() == content and not journal_in(tmp_path).exists()


def test_a_journal_of_another_store_is_not_applied(tmp_path):
    stores = [tmp_path / "a", tmp_path / "b"]
    for number, folder in enumerate(stores):
        clock = SimpleNamespace(now_ms=lambda number=number: 1000 + number, monotonic_ms=lambda: 0.0)
        started(folder, clock=clock).put(TopicConfig(folder.name, 4, 4))
    shutil.copy(journal_in(stores[0]), journal_in(stores[1]))
    found = topics_of(stores[1])
    assert (found.get("a"), found.get("b")) == (None, None)
    assert topics_of(stores[0]).get("a") is not None


def test_changes_that_the_file_has_are_not_applied_again(tmp_path, monkeypatch):
    """A kill after the file was written leaves the journal. A later change of the file must not be undone by it."""
    table = started(tmp_path)
    table.put(TopicConfig("A", 4, 4))

    def killed(mark, version, *, aside=""):
        raise StoreUnavailable("killed")

    with monkeypatch.context() as patch:
        patch.setattr(table.saved.journal, "drop", killed)
        with pytest.raises(StoreUnavailable):
            table.persist()
    file = table.saved.file
    stored = file.load(TopicConfigTable)
    del stored.topic_config_table["A"]  # a change by hand, which advances no version
    file.save(stored)
    assert topics_of(tmp_path).get("A") is None
    # The same broker continues with the same journal.
    table.put(TopicConfig("B", 4, 4))
    again = topics_of(tmp_path)
    assert (again.get("A"), again.get("B")) == (None, TopicConfig("B", 4, 4))


def test_a_damaged_journal_ends_before_the_damage_and_is_kept(tmp_path, caplog):
    table = started(tmp_path)
    for name in ("First", "Second", "Third", "Fourth"):
        table.put(TopicConfig(name, 4, 4))
    content = journal_in(tmp_path).read_bytes().replace(b'"Second"', b'"Sec0nd"')
    journal_in(tmp_path).write_bytes(content)
    again = topics_of(tmp_path)
    assert [again.get(name) is not None for name in ("First", "Second", "Third")] == [True, False, False]
    assert (
        "this change and 2 later changes are lost: Third, Fourth; it is kept as topics.journal.damaged" in caplog.text
    )
    assert again.data_version.counter == table.data_version.counter - 3
    again.persist()
    assert (tmp_path / "topics.journal.damaged").read_bytes() == content
    caplog.clear()
    assert topics_of(tmp_path).get("First") is not None and not caplog.records


def test_a_lost_file_is_completed_by_the_journal(tmp_path):
    table = started(tmp_path)
    for name in ("Older", "Old"):
        table.put(TopicConfig(name, 8, 8))
        table.persist()
    table.put(TopicConfig("New", 8, 8))
    (tmp_path / "topics.json").write_bytes(b"")
    again = topics_of(tmp_path)
    # The backup has no topic Old, and no queue shows it.
    assert [again.get(name) is not None for name in ("Older", "Old", "New")] == [True, False, True]
    (tmp_path / "topics.json.bak").unlink()
    assert topics_of(tmp_path).get("New") == TopicConfig("New", 8, 8)


def test_a_journal_of_a_later_release_stops_the_start(tmp_path):
    table = started(tmp_path)
    table.put(TopicConfig("A", 4, 4))
    header = b'{"journal":2}'
    table.saved.journal.path.write_bytes(b"%08x %b\n" % (zlib.crc32(header), header))
    with pytest.raises(StoreMismatch, match="its format is 2, not 1"):
        topics_of(tmp_path)
    assert journal_in(tmp_path).exists()


def test_after_a_start_a_change_is_never_appended_to_the_found_journal(tmp_path):
    table = started(tmp_path)
    table.put(TopicConfig("A", 4, 4))
    again = topics_of(tmp_path)  # without `persist`
    again.put(TopicConfig("B", 4, 4))
    found = read_journal(journal_in(tmp_path).read_bytes(), journal_in(tmp_path))
    assert len(found.changes) == 1
    assert topics_of(tmp_path).get("A") is not None and topics_of(tmp_path).get("B") is not None


class Clock:
    ms = 0.0

    def now_ms(self):
        return int(self.ms)

    def monotonic_ms(self):
        return self.ms


@pytest.mark.parametrize(("count", "written_ms"), [(10, 10), (5000, 5000), (70_000, 60_000)])
def test_the_file_is_written_when_its_oldest_change_is_old_enough(count, written_ms, tmp_path):
    clock = Clock()
    table = started(tmp_path, clock=clock)
    rows = {("topicConfigTable", f"T{number}"): None for number in range(count)}
    table.saved.members["topicConfigTable"].update(dict.fromkeys((name for _, name in rows), TopicConfig("T")))
    extra = len(table) - count
    table.put(TopicConfig("New", 4, 4))
    due_ms = min(written_ms + extra + 1, 60_000)
    for ms, is_written in ((due_ms - 1, False), (due_ms, True)):
        clock.ms = ms
        table.put(TopicConfig("New", 4, int(ms) % 100 + 1))  # a later change does not postpone it
        asyncio.run(table.write_new())
        assert journal_in(tmp_path).exists() != is_written


def test_a_long_journal_is_written_to_the_file_at_once(tmp_path):
    clock = Clock()
    table = started(tmp_path, clock=clock)
    for number in range(999):
        table.put(TopicConfig("T", number + 1, 1))
    asyncio.run(table.write_new())
    assert journal_in(tmp_path).exists()
    table.put(TopicConfig("T", 1, 1))
    asyncio.run(table.write_new())
    assert not journal_in(tmp_path).exists()
    table.put(TopicConfig("T", 2, 1))
    asyncio.run(table.write_new())  # the count begins again
    assert journal_in(tmp_path).exists()


def test_a_file_that_the_disk_refuses_is_written_the_next_time(tmp_path, monkeypatch):
    clock = Clock()
    table = started(tmp_path, clock=clock)
    table.put(TopicConfig("T", 1, 1))
    clock.ms = 1000

    def save(value):
        raise StoreUnavailable("the disk refuses")

    with monkeypatch.context() as patch:
        patch.setattr(table.saved.file, "save", save)
        with pytest.raises(StoreUnavailable):
            asyncio.run(table.write_new())
    assert topics_of(tmp_path).get("T") is not None
    table.put(TopicConfig("U", 1, 1))
    asyncio.run(table.write_new())
    assert not journal_in(tmp_path).exists()
    assert topics_of(tmp_path).get("T") is not None and topics_of(tmp_path).get("U") is not None


def test_all_topics_are_registered_again_with_a_new_version_and_no_rows_are_written(tmp_path):
    told = []
    table = started(tmp_path, told=told)
    version = table.data_version
    table.register_all()
    assert table.data_version.counter == version.counter + 1
    assert len(told) == len(table)
    (change,) = read_journal(journal_in(tmp_path).read_bytes(), journal_in(tmp_path)).changes
    assert (change.version, change.rows) == (table.data_version, {})
    assert topics_of(tmp_path).data_version == table.data_version


def test_a_slave_writes_only_the_differences_to_its_masters_table(tmp_path):
    table = started(tmp_path)
    rows = {f"T{number}": TopicConfig(f"T{number}", 4, 4) for number in range(50)}
    table.replace_with(TopicConfigTable(DataVersion(70, 0, 7), rows))
    changed = {**rows, "T7": TopicConfig("T7", 9, 9), "New": TopicConfig("New", 1, 1)}
    del changed["T8"]
    table.replace_with(TopicConfigTable(DataVersion(71, 0, 8), changed))
    change = read_journal(journal_in(tmp_path).read_bytes(), journal_in(tmp_path)).changes[-1]
    assert change.rows["topicConfigTable"].keys() == {"T7", "T8", "New"}
    assert topics_of(tmp_path).data_version.counter >= 71
    stored = {name for name in topics_of(tmp_path).snapshot().topic_config_table if name[:1] == "T"} - {"TBW102"}
    assert stored == changed.keys() - {"New"}


def test_versions_of_concurrent_changes_differ(tmp_path):
    """Two changes with the same version would be one change for name servers and slaves."""
    table = started(tmp_path, clock=Clock())
    before = table.data_version.counter

    async def scenario():
        first = asyncio.ensure_future(table.put_shared(TopicConfig("A", 1, 1)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the line of A is added
        table.put(TopicConfig("B", 1, 1))
        await first
        await table.write_new()

    asyncio.run(scenario())
    versions = [
        one.version.counter for one in read_journal(journal_in(tmp_path).read_bytes(), journal_in(tmp_path)).changes
    ]
    assert versions == [before + 1, before + 2, before + 3]
    assert topics_of(tmp_path).data_version == table.data_version


def test_a_refused_change_leaves_version_and_rows_and_the_next_change_has_the_next_version(tmp_path, monkeypatch):
    table = started(tmp_path)
    table.put(TopicConfig("A", 1, 1))
    before, version = table.snapshot(), table.data_version

    def refuse(descriptor):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("rmqkit.system.disk.sync_data", refuse)
        for change in (lambda: table.put(TopicConfig("B", 1, 1)), lambda: table.remove("A"), table.register_all):
            with pytest.raises(StoreUnavailable):
                change()
            assert (table.snapshot(), table.data_version) == (before, version)
    table.put(TopicConfig("C", 1, 1))
    assert table.data_version.counter == version.counter + 1
    again = topics_of(tmp_path)
    assert (again.get("A"), again.get("B"), again.get("C")) == (table.get("A"), None, table.get("C"))


class BusyThreads:
    """Threads of the loop that begin nothing until `release`."""

    def __init__(self):
        self.event = threading.Event()
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        self.blocker = loop.run_in_executor(None, self.event.wait, 60)

    def release(self):
        self.event.set()


@pytest.mark.parametrize("is_persisted", [False, True])
def test_an_older_copy_of_the_table_never_replaces_a_newer_file(is_persisted, tmp_path):
    clock = Clock()
    table = started(tmp_path, clock=clock)
    table.put(TopicConfig("Early", 1, 1))
    clock.ms = 1000

    async def scenario():
        threads = BusyThreads()
        writing = asyncio.create_task(table.write_new())
        await asyncio.sleep(0)  # the copy is made
        table.put(TopicConfig("Later", 1, 1))
        if is_persisted:
            table.persist()
        threads.release()
        await writing

    asyncio.run(scenario())
    stored = JsonFile(tmp_path / "topics.json").load(TopicConfigTable).topic_config_table
    assert ("Early" in stored, "Later" in stored, journal_in(tmp_path).exists()) == (
        True,
        is_persisted,
        not is_persisted,
    )
    assert topics_of(tmp_path).snapshot() == table.snapshot()


def test_refused_changes_that_share_a_write_use_no_version(tmp_path, monkeypatch):
    table = started(tmp_path)
    version = table.data_version

    def refuse(descriptor, data, position):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("rmqkit.system.disk.write_all", refuse)
        with pytest.raises(StoreUnavailable):
            asyncio.run(table.put_shared(TopicConfig("A", 1, 1)))
    assert table.data_version == version
    asyncio.run(table.put_shared(TopicConfig("B", 1, 1)))
    assert table.data_version.counter == version.counter + 1
