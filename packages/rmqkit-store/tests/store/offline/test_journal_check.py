"""Offline check and repair of journals of tables (`rmqkit.store.offline.journal_check`)."""

from __future__ import annotations

import json
import zlib

import pytest

from rmqkit.errors import StoreLocked
from rmqkit.protocol.schemas.topics import DataVersion
from rmqkit.store.files import JsonFile, StoreLock
from rmqkit.store.offline.check import UNWRITTEN, verify
from rmqkit.store.offline.findings import Kind
from rmqkit.store.offline.rebuild import batch_topics_of
from rmqkit.store.offline.repair import repair
from rmqkit.store.queue_recovery import configured_topics
from rmqkit.store.table_journal import TableJournal
from tests.store.stores import message, opened, put_all, small_settings, tree

MEMBER = "topicConfigTable"
BATCH = {"attributes": {"queue.type": "BatchCQ"}}


@pytest.fixture
def config(tmp_path):
    """Return the configuration of a store whose broker was killed after two changes."""
    with opened(tmp_path, small_settings()) as store:
        put_all(store, message())
    config = tmp_path / "config"
    config.mkdir(exist_ok=True)
    JsonFile(config / "topics.json").save({"dataVersion": DataVersion(1, 0, 5), MEMBER: {"Old": {"perm": 6}}})
    journal = TableJournal(config / "topics.journal")
    journal.starts_at(DataVersion(1, 0, 5))
    journal.write(journal.add(DataVersion(2, 0, 6), {MEMBER: {"New": BATCH}}))
    journal.write(journal.add(DataVersion(3, 0, 7), {MEMBER: {"Old": None, "Last": {"perm": 4}}}))
    return config


def findings(config):
    report = verify(config.parent, small_settings())
    return [(one.kind, one.path.removeprefix(f"{config}/"), one.position) for one in report.findings]


def repaired(config, **options):
    done = repair(config.parent, small_settings(), is_dry_run=False, **options)
    assert done.remaining == []
    return [(step.path.removeprefix(f"{config}/"), step.action) for step in done.steps]


def topics(config):
    return json.loads((config / "topics.json").read_bytes())


def test_changes_in_a_journal_are_no_damage_and_are_counted(config):
    report = verify(config.parent, small_settings())
    assert report.is_sound and report.checked[UNWRITTEN] == 2
    assert configured_topics(config.parent).keys() == {"New", "Last"}
    assert batch_topics_of(config.parent) == {"New"}


def test_a_repair_writes_the_changes_to_the_file(config):
    before = tree(config.parent)
    planned = repair(config.parent, small_settings(), is_dry_run=True)
    assert [step.action for step in planned.steps] == ["2 changes written to topics.json"]
    assert tree(config.parent) == before
    assert repaired(config) == [("topics.journal", "2 changes written to topics.json")]
    assert not (config / "topics.journal").exists()
    assert topics(config) == {
        "dataVersion": {"counter": 3, "stateVersion": 0, "timestamp": 7},
        MEMBER: {"New": BATCH, "Last": {"perm": 4}},
    }
    assert repaired(config) == [] and verify(config.parent, small_settings()).checked[UNWRITTEN] == 0


def test_a_damaged_journal_is_reported_and_its_sound_changes_are_written(config):
    journal = config / "topics.journal"
    content = journal.read_bytes()
    journal.write_bytes(content.replace(b'"Last"', b'"Lost"'))
    position = content.rindex(b"\n", 0, -1) + 1
    assert findings(config) == [(Kind.CONFIG, "topics.journal", position)]
    (step,) = repaired(config)
    assert step[1].startswith("1 changes written to topics.json; ")
    assert topics(config)[MEMBER].keys() == {"Old", "New"}
    assert (config / "topics.journal.damaged").exists() and not journal.exists()


def test_a_journal_of_another_table_is_reported_and_set_aside(config):
    JsonFile(config / "topics.json").save({"dataVersion": DataVersion(9, 0, 5), MEMBER: {"Old": {}}})
    assert findings(config) == [(Kind.CONFIG, "topics.journal", 0)]
    assert repaired(config) == [("topics.journal", "kept as topics.journal.old: its changes are of another table")]
    assert topics(config)[MEMBER] == {"Old": {}}
    assert (config / "topics.journal.old").exists()


def test_a_journal_of_a_later_release_is_reported_and_stays(config):
    header = b'{"journal":2}'
    (config / "topics.journal").write_bytes(b"%08x %b\n" % (zlib.crc32(header), header))
    assert findings(config) == [(Kind.CONFIG, "topics.journal", 0)]
    done = repair(config.parent, small_settings(), is_dry_run=False)
    assert done.steps == [] and len(done.remaining) == 1
    assert (config / "topics.journal").exists()


def test_a_file_that_cannot_be_read_gets_the_backup_and_the_journal(config):
    file = config / "topics.json"
    file.rename(config / "topics.json.bak")
    file.write_bytes(b"{")
    assert repaired(config)[0] == ("topics.journal", "2 changes written to topics.json")
    assert topics(config)[MEMBER].keys() == {"New", "Last"}


def test_a_journal_of_a_running_broker_is_left_alone(config):
    lock = StoreLock(config.parent)
    lock.acquire()
    try:
        with (config / "topics.journal").open("ab") as file:
            file.write(b"1234 half")
        report = verify(config.parent, small_settings(), read_only=True)
        assert report.is_live and report.is_sound
        with pytest.raises(StoreLocked):
            repair(config.parent, small_settings(), is_dry_run=False)
    finally:
        lock.release()
    assert (config / "topics.journal").read_bytes().endswith(b"half")
