"""Queues that changed since the last stop: no entry is lost without a log line, and no queue offset is used twice."""

from __future__ import annotations

import errno
import json
import logging
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from rmqkit.protocol.record import decode_record
from rmqkit.store import queue_recovery
from rmqkit.store.log import recovery
from rmqkit.store.message_store import MessageStore
from rmqkit.store.offline.check import Kind, verify
from rmqkit.store.queues import queue_ends
from rmqkit.store.queues.consume_queue import ENTRY, ENTRY_BYTES
from tests.store.stores import copy_store, message, opened, put_all, read_all, small_settings

SETTINGS = small_settings(consume_queue_file_bytes=200, commit_log_file_bytes=16384)  # ten entries a file
SMALL = small_settings(consume_queue_file_bytes=200)
COUNT = 35
MORE = 40
TOPIC = "Orders"


def written(root: Path, settings=SETTINGS, **options) -> Path:
    """Return a store that was stopped in order, with messages in two queues of a topic and in one of another topic."""
    with opened(root, settings, **options) as store:
        for i in range(COUNT):
            put_all(store, message(TOPIC, 0, b"%d" % i, TAGS=f"tag{i % 3}"), message(TOPIC, 1, b"%d" % i))
        put_all(store, message("Other", 0, b"other"))
    return root


def bodies(store: MessageStore, topic: str = TOPIC, queue_id: int = 0) -> list[bytes]:
    return [record.body for record in read_all(store, topic, queue_id)]


def folder(root: Path, queue_id: int = 0) -> Path:
    return root / "consumequeue" / TOPIC / str(queue_id)


def file(root: Path, number: int) -> Path:
    return folder(root) / f"{number * 200:020d}"


def patch(path: Path, position: int, data: bytes) -> None:
    with open(path, "r+b") as opened_file:
        opened_file.seek(position)
        opened_file.write(data)


def flip(path: Path, position: int) -> None:
    patch(path, position, bytes([path.read_bytes()[position] ^ 0x04]))


def exchange(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


ENTRY_IN_LAST = 3 * ENTRY_BYTES
DAMAGE: dict[str, Callable[[Path], object]] = {
    "the topic's folder is missing": lambda root: shutil.rmtree(root / "consumequeue" / TOPIC),
    "all folders are missing": lambda root: shutil.rmtree(root / "consumequeue"),
    "the newest file is missing": lambda root: file(root, 3).unlink(),
    "the oldest file is missing": lambda root: file(root, 0).unlink(),
    "a file in between is missing": lambda root: file(root, 1).unlink(),
    "the newest file is zeros": lambda root: patch(file(root, 3), 0, bytes(200)),
    "an entry of the newest file is zeros": lambda root: patch(file(root, 3), ENTRY_BYTES, bytes(ENTRY_BYTES)),
    "its last entry is zeros": lambda root: patch(file(root, 3), 4 * ENTRY_BYTES, bytes(ENTRY_BYTES)),
    "the newest file has no length": lambda root: file(root, 3).write_bytes(b""),
    "an offset is flipped": lambda root: flip(file(root, 3), ENTRY_IN_LAST + 6),
    "a size is flipped": lambda root: flip(file(root, 3), ENTRY_IN_LAST + 11),
    "a tag code is flipped": lambda root: flip(file(root, 3), ENTRY_IN_LAST + 19),
    "an older file is zeros": lambda root: patch(file(root, 1), 0, bytes(200)),
    "two files are exchanged": lambda root: exchange(file(root, 1), file(root, 2)),
    "files of two queues are exchanged": lambda root: exchange(file(root, 3), folder(root, 1) / file(root, 3).name),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_queue_is_rebuilt_and_logged(name, tmp_path, caplog, monkeypatch):
    if name.startswith("the topic"):
        monkeypatch.setattr(
            queue_recovery, "has_numpy", lambda: False
        )  # the scan of single records has the same result
    root = written(tmp_path / "store")
    DAMAGE[name](root)
    assert not verify(root, SETTINGS).is_sound
    with caplog.at_level(logging.WARNING), opened(root, SETTINGS) as store:
        assert [bodies(store, queue_id=one) for one in (0, 1)] == [[b"%d" % i for i in range(COUNT)]] * 2
        assert bodies(store, "Other") == [b"other"]
        assert [one.queue_offset for one in put_all(store, message(TOPIC), message(TOPIC, 1))] == [COUNT, COUNT]
        codes = frozenset({zlib.crc32(b"no tag")})
        assert store.get(TOPIC, 0, 0, count_max=32, codes=codes).records == []
    assert "entries rebuilt from the log, 0 messages lost" in caplog.text
    assert verify(root, SETTINGS).findings == []
    caplog.clear()
    with opened(root, SETTINGS) as store:
        assert len(bodies(store)) == COUNT + 1
    assert not caplog.records


def test_what_was_rebuilt_is_counted(tmp_path, caplog):
    root = written(tmp_path / "store")
    file(root, 3).unlink()
    with opened(root, SETTINGS):
        pass
    assert f"{TOPIC}-0: its files are not as the last stop left them: 5 entries rebuilt from the log" in caplog.text
    assert "1 queues were damaged: 5 entries rebuilt from the log, 0 messages lost" in caplog.text


def test_a_sound_store_is_opened_without_a_word_and_stays_as_it_is(tmp_path, caplog):
    root = written(tmp_path / "store")
    note = (root / "queueends").read_bytes()
    for _ in range(2):
        with caplog.at_level(logging.WARNING), opened(root, SETTINGS) as store:
            assert (root / "queueends").read_bytes() != note
            assert len(bodies(store)) == COUNT
    assert not caplog.records
    assert (root / "queueends").read_bytes() == note


def test_a_message_of_an_older_broker_makes_the_note_stale(tmp_path, caplog):
    """Queue offsets that Apache's broker used after the note do not count as lost."""
    root = written(tmp_path / "store")
    note = (root / "queueends").read_bytes()
    with opened(root, SETTINGS) as store:
        store.delete_topic(TOPIC)
        put_all(store, message(TOPIC, 0, b"of the new topic"))
    (root / "queueends").write_bytes(note)
    (root / "config" / "deletedTopics.json").unlink()
    with caplog.at_level(logging.WARNING), opened(root, SETTINGS) as store:
        assert bodies(store) == [b"of the new topic"]
    assert not caplog.records


def test_a_topic_that_another_broker_deleted_stays_deleted(tmp_path, caplog):
    root = written(tmp_path / "store")
    shutil.rmtree(root / "consumequeue" / TOPIC)
    (root / "config").mkdir(exist_ok=True)
    (root / "config" / "topics.json").write_text('{"topicConfigTable": {"Other": {}}}')
    assert verify(root, SETTINGS).is_sound
    with caplog.at_level(logging.WARNING), opened(root, SETTINGS) as store:
        assert store.topics == {"Other"}
    assert not caplog.records


def test_files_that_expired_under_another_broker_are_not_missed(tmp_path, caplog):
    settings = small_settings(consume_queue_file_bytes=200)
    root = written(tmp_path / "store", settings)
    starts = sorted(int(one.name) for one in (root / "commitlog").iterdir())
    for start in starts[:1]:
        (root / "commitlog" / f"{start:020d}").unlink()
    entries = [ENTRY.unpack_from(file(root, 0).read_bytes(), at) for at in range(0, 200, ENTRY_BYTES)]
    assert entries[-1][0] < starts[1], "the first queue file points at deleted records"
    file(root, 0).unlink()
    with caplog.at_level(logging.WARNING), opened(root, settings) as store:
        assert store.max_offset(TOPIC, 0) == COUNT
        assert bodies(store)[-1] == b"%d" % (COUNT - 1)
    assert not [one for one in caplog.records if "damaged" in one.getMessage()]


@pytest.mark.parametrize("content", [b"", b"00000000\n{}", b"not a number\n{}", b"\xff\xfe"])
def test_a_note_that_cannot_be_read_is_left_out(content, tmp_path, caplog):
    root = written(tmp_path / "store")
    (root / "queueends").write_bytes(content)
    with opened(root, SETTINGS) as store:
        assert len(bodies(store)) == COUNT
    assert "queueends cannot be read: the ends of the queues are not compared with it" in caplog.text


@pytest.mark.parametrize("name", ["a file in between is missing", "its last entry is another queue's"])
def test_without_a_note_a_queue_is_held_against_itself(name, tmp_path, caplog):
    root = written(tmp_path / "store")
    (root / "queueends").unlink()
    if name in DAMAGE:
        DAMAGE[name](root)
    else:
        other = (folder(root, 1) / file(root, 3).name).read_bytes()
        patch(file(root, 3), 4 * ENTRY_BYTES, other[4 * ENTRY_BYTES : 5 * ENTRY_BYTES])
    with opened(root, SETTINGS) as store:
        assert bodies(store) == [b"%d" % i for i in range(COUNT)]
    assert "1 queues were damaged" in caplog.text
    assert verify(root, SETTINGS).is_sound


def test_messages_that_the_log_lost_with_their_queue_cost_no_number(tmp_path, caplog):
    settings = small_settings(consume_queue_file_bytes=200)
    root = written(tmp_path / "store", settings)
    last = max(one for one in (root / "commitlog").iterdir() if any(one.read_bytes()))
    last.write_bytes(bytes(4096))
    shutil.rmtree(root / "consumequeue" / TOPIC)
    with opened(root, settings) as store:
        left = bodies(store)
        assert 0 < len(left) < COUNT
    lost = COUNT - len(left)
    assert f"the log does not have the last {lost}: lost, the next message is {COUNT}" in caplog.text
    for _ in range(2):
        with opened(root, settings) as store:
            assert bodies(store) == left
    with opened(root, settings) as store:
        assert put_all(store, message(TOPIC, 0, b"next"))[0].queue_offset == COUNT
        assert bodies(store) == [*left, b"next"]
    with opened(root, settings) as store:
        assert bodies(store) == [*left, b"next"]
        assert put_all(store, message(TOPIC, 0, b"next"))[0].queue_offset == COUNT + 1


def test_verify_reports_numbers_that_were_given_again(tmp_path):
    """A broker that does not know the note begins a missing queue at 0."""
    root = written(tmp_path / "store")
    (root / "queueends").unlink()
    shutil.rmtree(root / "consumequeue" / TOPIC)
    with opened(root, SETTINGS) as store:
        assert put_all(store, message(TOPIC, 0, b"next"))[0].queue_offset == 0
    found = [str(one) for one in verify(root, SETTINGS).findings]
    assert any("Orders/0" in one and "number 0 again at" in one for one in found), found


def test_a_topic_deleted_in_order_is_no_finding_when_it_is_made_again(tmp_path):
    root = written(tmp_path / "store")
    with opened(root, SETTINGS) as store:
        store.delete_topic(TOPIC)
        put_all(store, message(TOPIC, 0, b"new"), message(TOPIC, 0, b"new"))
    assert verify(root, SETTINGS).findings == []


def killed(root: Path, to: Path) -> Path:
    """Return the files after a kill of a store that was stopped once; recovery reads only the last log file.
    After the stop three messages were stored in a new queue 2, then `MORE` in queue 1, and none in queue 0."""
    written(root, SMALL)
    with opened(root, SMALL) as store:
        put_all(store, *(message(TOPIC, 2, b"%d" % i) for i in range(3)))
        store.flusher.flush_queues()
        put_all(store, *(message(TOPIC, 1, b"%d" % (COUNT + i)) for i in range(MORE)))
        copy_store(root, to)
    last = max(path for path in (to / "commitlog").iterdir() if any(path.read_bytes()))
    record = decode_record(last.read_bytes())
    assert record.queue_id == 1
    flushed = record.store_timestamp + 3000
    (to / "checkpoint").write_bytes(struct.pack(">5q", flushed, flushed, 0, 0, 0) + bytes(4056))
    return to


LOST_AFTER_A_KILL: dict[str, Callable[[Path], object]] = {
    "a queue": lambda root: shutil.rmtree(folder(root)),
    "the other queue": lambda root: shutil.rmtree(folder(root, 1)),
    "the topic": lambda root: shutil.rmtree(root / "consumequeue" / TOPIC),
    "the newest files": lambda root: [
        path.unlink() for path in [file(root, 3), *sorted(folder(root, 1).iterdir())[5:]]
    ],
}


@pytest.mark.parametrize("name", LOST_AFTER_A_KILL)
@pytest.mark.parametrize("has_note", [True, False])
def test_after_a_kill_a_lost_queue_is_rebuilt_and_logged(name, has_note, tmp_path, caplog):
    root = killed(tmp_path / "store", tmp_path / "killed")
    if not has_note:  # the records that recovery scans show it, if there are any
        (root / "queueends").unlink()
    LOST_AFTER_A_KILL[name](root)
    found = [one for one in verify(root, SMALL).findings if one.kind is Kind.QUEUE_END]
    assert found, "verify finds it before the start"
    with caplog.at_level(logging.WARNING), opened(root, SMALL) as store:
        if not has_note and name != "the other queue":
            assert bodies(store, queue_id=1) == [b"%d" % i for i in range(COUNT + MORE)]
            return
        assert bodies(store) == [b"%d" % i for i in range(COUNT)]
        assert bodies(store, queue_id=1) == [b"%d" % i for i in range(COUNT + MORE)]
        numbers = [one.queue_offset for one in put_all(store, message(TOPIC), message(TOPIC, 1))]
        assert numbers == [COUNT, COUNT + MORE], "no number is given twice"
    assert "messages of the log were not in it" in caplog.text
    assert "messages entered from the log, 0 messages lost" in caplog.text
    assert verify(root, SMALL).findings == []


def test_after_a_kill_a_lost_queue_that_was_made_since_the_start_is_rebuilt(tmp_path, caplog):
    root = killed(tmp_path / "store", tmp_path / "killed")
    shutil.rmtree(folder(root, 2))
    with opened(root, SMALL) as store:
        assert bodies(store, queue_id=2) == [b"0", b"1", b"2"]
        assert put_all(store, message(TOPIC, 2))[0].queue_offset == 3
    assert f"{TOPIC}-2: messages of the log were not in it: 3 messages entered from the log" in caplog.text


def test_after_a_kill_a_queue_that_its_topic_does_not_have_is_reported(tmp_path, caplog):
    with opened(tmp_path / "store", SMALL) as store:
        results = put_all(store, *(message(TOPIC, 0, b"%d" % i) for i in range(3)))
        root = copy_store(store.root, tmp_path / "killed")
    table = {TOPIC: {"topicName": TOPIC, "readQueueNums": 1, "writeQueueNums": 1}}
    (root / "config").mkdir()
    (root / "config" / "topics.json").write_text(json.dumps({"topicConfigTable": table}))
    log = root / "commitlog" / "00000000000000000000"
    content = bytearray(log.read_bytes())
    place = results[1].physical_offset
    content[place + 12 : place + 16] = (2049).to_bytes(4, "big")
    log.write_bytes(content)
    with opened(root, SMALL):
        pass
    assert (
        f"record at {place} of the log: it belongs to queue {TOPIC}-2049, but topics.json knows 1 queues" in caplog.text
    )


@pytest.mark.parametrize("has_config", [True, False])
@pytest.mark.parametrize("is_bulk", [True, False])
def test_after_a_kill_a_record_of_a_changed_topic_is_reported_and_others_keep_their_numbers(
    tmp_path, caplog, monkeypatch, has_config, is_bulk
):
    monkeypatch.setattr(recovery, "BULK_FROM_BYTES", 0 if is_bulk else 1 << 40)
    with opened(tmp_path / "store", SMALL) as store:
        results = put_all(store, *(message(TOPIC, 0, b"%d" % i) for i in range(5)))
        root = copy_store(store.root, tmp_path / "killed")
    if has_config:
        table = {name: {"topicName": name, "readQueueNums": 1, "writeQueueNums": 1} for name in (TOPIC, "other")}
        (root / "config").mkdir()
        (root / "config" / "topics.json").write_text(json.dumps({"topicConfigTable": table}))
    log = root / "commitlog" / "00000000000000000000"
    content = bytearray(log.read_bytes())
    place = results[2].physical_offset
    at = content.index(TOPIC.encode(), place)
    content[at : at + len(TOPIC)] = TOPIC.upper().encode()
    log.write_bytes(content)
    with opened(root, SMALL) as store:
        read = [(record.queue_offset, record.body) for record in read_all(store, TOPIC, 0)]
        assert read == [(i, b"%d" % i) for i in (0, 1, 3, 4)]
        assert put_all(store, message(TOPIC, 0))[0].queue_offset == 5, "no number is given twice"
    why = "topics.json does not know the topic" if has_config else "the log has no message before number 2 of it"
    assert f"record at {place} of the log: it belongs to queue {TOPIC.upper()}-0, but {why}" in caplog.text
    assert f"{TOPIC}-0: 1 messages from 2 on are not in the log: lost, their entries are blank" in caplog.text


def test_queues_are_noted_once_when_the_log_has_their_messages_on_the_disk(tmp_path):
    settings = small_settings(flush_interval_ms=3_600_000, queue_flush_interval_ms=3_600_000)
    with opened(tmp_path, settings) as store:
        end = put_all(store, message(TOPIC))[0].end_offset
        store.flusher.flush_queues()
        note = (tmp_path / "queueends").read_bytes()
        assert TOPIC.encode() in note
        assert store.durable_offset == end
        put_all(store, message(TOPIC))
        store.flusher.flush_queues()
        assert (tmp_path / "queueends").read_bytes() == note
        assert store.durable_offset == end, "only new queues have the log flushed"


def test_a_disk_that_refuses_the_note_of_new_queues_costs_only_the_note(tmp_path, caplog, monkeypatch):
    with opened(tmp_path, SMALL) as store, monkeypatch.context() as patched:
        patched.setattr(queue_ends, "write_note", _refuse)
        put_all(store, message(TOPIC))
        store.flusher.flush_queues()
        put_all(store, message(TOPIC))
        assert store.failure is None
    assert "queues created since the start are not in it" in caplog.text


def _refuse(path: Path, note: object) -> None:
    raise OSError(errno.ENOSPC, "no room")


def test_after_a_kill_a_sound_store_is_opened_without_such_a_word(tmp_path, caplog):
    root = killed(tmp_path / "store", tmp_path / "killed")
    with caplog.at_level(logging.WARNING), opened(root, SMALL) as store:
        assert bodies(store) == [b"%d" % i for i in range(COUNT)]
    assert "were not in it" not in caplog.text


def test_after_a_kill_a_lost_queue_continues_after_what_the_log_does_not_have(tmp_path, caplog):
    root = killed(tmp_path / "store", tmp_path / "killed")
    written = [path for path in sorted((root / "commitlog").iterdir()) if any(path.read_bytes())]
    for path in written[:-1]:  # after the last one there may be a file that was created ahead
        path.unlink()
    (root / "logstart").unlink()
    shutil.rmtree(folder(root))
    with opened(root, SMALL) as store:
        assert bodies(store) == []
        assert put_all(store, message(TOPIC))[0].queue_offset == COUNT
    assert f"the log has none of its messages, the next one is {COUNT}" in caplog.text
