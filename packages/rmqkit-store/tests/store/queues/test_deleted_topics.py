"""Deleted topics: their records in the log do not reappear after a restart (store.md §4.5, §12)."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rmqkit.core import CORE
from rmqkit.errors import StoreUnavailable
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import encode_command, request
from rmqkit.protocol.core import Sends
from rmqkit.protocol.record import BatchEntry, encode_batch
from rmqkit.protocol.schemas.send import SendMessageV2Request
from rmqkit.protocol.sends import sends_reader
from rmqkit.store.message_store import MessageStore, PutStatus
from rmqkit.store.settings import FlushDiskType, StoreSettings
from tests.store.stores import HOST, copy_store, message, opened, put_all, read_all, small_settings

GONE, LIGHT, NOTES = "Gone", "%LMQ%gone", "config/deletedTopics.json"


def quiet(**changes: Any) -> StoreSettings:
    defaults = {"flush_interval_ms": 3_600_000, "queue_flush_interval_ms": 3_600_000}
    return small_settings(**(defaults | changes))


SYNC = quiet(flush_disk_type=FlushDiskType.SYNC_FLUSH)
POOL = quiet(flush_disk_type=FlushDiskType.ASYNC_FLUSH, transient_store_pool=True, commit_interval_ms=3_600_000)
LIGHT_SETTINGS = quiet(enable_light_queues=True, enable_multi_dispatch=True)


def put_some(store: MessageStore, text: bytes, *, topic: str = GONE, queue_id: int = 0) -> None:
    put_all(store, *(message(topic, queue_id, text + b"%d" % i, TAGS="tag") for i in range(5)))


def refuse(descriptor: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


def restarted(root: Path, to: Path, *, is_clean: bool) -> Path:
    """Return a copy of an open or closed store, as a kill or a stop leaves it."""
    copy_store(root, to)
    if not is_clean:
        (to / "abort").touch()
    return to


@pytest.mark.parametrize("bulk_from", [0, 1 << 40], ids=["bulk", "one by one"])
@pytest.mark.parametrize("is_clean", [True, False], ids=["stopped", "killed"])
@pytest.mark.parametrize("has_ext", [True, False])
def test_a_topic_made_again_begins_empty_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_clean: bool, has_ext: bool, bulk_from: int
) -> None:
    """Queue 0 has new messages, queue 1 has none, and another topic's message is between the old ones."""
    monkeypatch.setattr("rmqkit.store.log.recovery.BULK_FROM_BYTES", bulk_from)
    settings = quiet(enable_consume_queue_ext=has_ext, consume_queue_ext_file_bytes=256)
    with opened(tmp_path / "s", settings) as store:
        put_some(store, b"old", queue_id=1)
        put_all(store, message("Kept"))
        put_some(store, b"old", queue_id=1)
        put_some(store, b"old")
        store.delete_topic(GONE)
        put_all(store, message(GONE, 0, b"new"), message("Kept"))
        store.delete_topic("Kept")  # its record is the last one: a start after a stop in order reads only to `new`
    for turn in range(2):
        root = restarted(tmp_path / ("s" if not turn else "0"), tmp_path / str(turn), is_clean=is_clean)
        with opened(root, settings) as store:
            assert [store.bounds(GONE, queue_id) for queue_id in (0, 1)] == [(0, 1), (0, 0)]
            assert [one.body for one in read_all(store, GONE)] == [b"new"]
            assert store.topics == {GONE}
    with opened(root, settings) as store:
        assert put_all(store, message(GONE, 1), message("Kept"))[0].queue_offset == 0


def test_inner_batches_of_a_deleted_topic_stay_away(tmp_path: Path) -> None:
    batch = message(GONE, body=encode_batch([BatchEntry(b"a", b""), BatchEntry(b"b", b"")]), UNIQ_KEY="U")
    with opened(tmp_path / "s", quiet(), is_batch_topic=GONE.__eq__) as store:
        assert [store.put_batch(batch).status for _ in range(3)] == [PutStatus.OK] * 3
        store.delete_topic(GONE)
        left = copy_store(tmp_path / "s", tmp_path / "left")
    with opened(left, quiet(), is_batch_topic=GONE.__eq__) as store:
        assert store.max_offset(GONE, 0) == 0
        assert store.put_batch(batch).queue_offset == 0
        assert store.bounds(GONE, 0) == (0, 2)


def test_a_light_queue_is_deleted_without_its_messages_topics(tmp_path: Path) -> None:
    with opened(tmp_path / "s", LIGHT_SETTINGS) as store:
        put_all(store, *(message("Kept", INNER_MULTI_DISPATCH=LIGHT) for _ in range(3)))
        store.delete_topic(LIGHT)
        put_all(store, message("Kept", INNER_MULTI_DISPATCH=LIGHT))
        left = copy_store(tmp_path / "s", tmp_path / "left")
    with opened(left, LIGHT_SETTINGS) as store:
        assert [store.bounds(topic, 0) for topic in (LIGHT, "Kept")] == [(0, 1), (0, 4)]
        assert read_all(store, LIGHT)[0].queue_offset == 3


def test_queue_files_that_a_stop_in_the_middle_left_go(tmp_path: Path) -> None:
    """The entries are on the disk, because only the note of the deletion was written."""
    with opened(tmp_path / "s", quiet()) as store:
        put_some(store, b"old")
        put_some(store, b"old", queue_id=1)
        before = copy_store(tmp_path / "s" / "consumequeue", tmp_path / "queues")
        store.delete_topic(GONE)
        left = copy_store(tmp_path / "s", tmp_path / "left")
    shutil.copytree(before, left / "consumequeue", dirs_exist_ok=True)
    (left / "abort").unlink()
    with opened(left, quiet()) as store:
        assert [store.bounds(GONE, queue_id) for queue_id in (0, 1)] == [(0, 0)] * 2
        put_some(store, b"new", queue_id=1)
        assert [one.body[:3] for one in read_all(store, GONE, 1)] == [b"new"] * 5


def test_messages_that_wait_for_the_disk_are_deleted_with_their_topic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "s", SYNC) as store:
        put_some(store, b"old")
        assert store.dispatch_behind_bytes
        store.delete_topic(GONE)
        store.flusher.flush_log()
        store.dispatch()
        assert (store.topics, store.dispatch_behind_bytes) == (set(), 0)
        put_some(store, b"new")
        store.flusher.flush_log()
        assert [one.queue_offset for one in read_all(store, GONE)] == list(range(5))


def sends_to(*topics: str) -> Sends:
    frames = []
    for number, topic in enumerate(topics):
        header = SendMessageV2Request("p", topic, "TBW102", 4, 0, 0, 1, 0, f"UNIQ_KEY\x01K{number}\x02TAGS\x01t\x02")
        frames += encode_command(request(RequestCode.SEND_MESSAGE_V2, header, b"old"))
    sends = sends_reader(CORE, {}, (), {}).read(b"".join(frames), 0)
    assert sends is not None
    return sends


@pytest.mark.parametrize("is_made_again", [False, True])
def test_sends_that_wait_for_the_disk_are_deleted_with_their_topic(tmp_path: Path, is_made_again: bool) -> None:
    """They were stored with one write. The deleted queue would write their entries to a descriptor that is closed, or
    that is another file's."""
    with opened(tmp_path / "s", SYNC) as store:
        put_some(store, b"old")
        put_some(store, b"kept", topic="Kept")
        store.flush_log()
        store.dispatch()
        assert store.put_sends(sends_to(GONE, "Kept", GONE), HOST, HOST)
        gone = store.queues.table[GONE, 0]
        store.delete_topic(GONE)
        if is_made_again:
            put_some(store, b"new")
        store.flush_log()
        store.dispatch()
        assert (gone.has_held, gone in store.queues.dirty, store.queues.write_held()) == (False, False, True)
        assert [one.body[:3] for one in read_all(store, GONE)] == [b"new"] * 5 * is_made_again
        assert (store.max_offset("Kept", 0), store.dispatch_behind_bytes) == (6, 0)
        assert ((tmp_path / "s" / "consumequeue" / GONE).exists()) is is_made_again
    assert not (tmp_path / "s" / "abort").exists()


@pytest.mark.parametrize("settings", [quiet(), SYNC, POOL], ids=["async", "sync", "pool"])
def test_a_deletion_survives_a_power_cut_that_takes_newer_messages(tmp_path: Path, settings: StoreSettings) -> None:
    """The note of the deletion names the newest record, so this record is on the disk first."""
    with opened(tmp_path / "s", settings) as store:
        put_some(store, b"old")
        store.delete_topic(GONE)
        end = store.durable_offset
        assert end == store.max_physical_offset
        left = copy_store(tmp_path / "s", tmp_path / "left")
    log = left / "commitlog" / ("0" * 20)
    log.write_bytes(log.read_bytes()[:end] + bytes(log.stat().st_size - end))
    with opened(left, settings) as store:
        assert store.bounds(GONE, 0) == (0, 0)


@pytest.mark.parametrize("settings", [SYNC, POOL], ids=["sync", "pool"])
def test_a_topic_stays_while_the_disk_refuses_its_newest_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: StoreSettings
) -> None:
    with opened(tmp_path, settings) as store:
        put_some(store, b"old")
        with monkeypatch.context() as patch:
            patch.setattr("rmqkit.system.disk.sync_data", refuse)
            with pytest.raises(StoreUnavailable, match=r"cannot flush the log .* up to \d+: .*Input/output error"):
                store.delete_topic(GONE)
        assert not (tmp_path / NOTES).exists()
        store.flusher.flush_log()
        assert len(read_all(store, GONE)) == 5


def test_a_topic_stays_while_the_newest_entry_of_a_queue_is_lost(tmp_path: Path) -> None:
    """XFS drops what it could not write. The newest record is then unknown, and without it the note would be wrong."""
    with opened(tmp_path, quiet()) as store:
        put_some(store, b"old")
        put_some(store, b"old", queue_id=1)
        store.queues.write_held()
        with (tmp_path / f"consumequeue/{GONE}/0/{0:020d}").open("r+b") as file:
            file.seek(80)
            file.write(bytes(20))
        with pytest.raises(StoreUnavailable, match=r"Gone/0/0+'?: restart the broker"):
            store.delete_topic(GONE)
        assert not (tmp_path / NOTES).exists()
        assert len(read_all(store, GONE, 1)) == 5


def test_new_messages_in_the_place_of_those_of_a_deleted_topic_are_kept(tmp_path: Path) -> None:
    """A power cut removed the deleted records, and a broker without the notes stored other messages there."""
    with opened(tmp_path / "s", quiet()) as store:
        put_some(store, b"old")
        store.delete_topic(GONE)
    notes = (tmp_path / "s" / NOTES).read_bytes()
    shutil.rmtree(tmp_path / "s")
    with opened(tmp_path / "s", quiet()) as store:
        put_some(store, b"new")
        left = copy_store(tmp_path / "s", tmp_path / "left")
    (left / NOTES).parent.mkdir(exist_ok=True)
    (left / NOTES).write_bytes(notes)
    with opened(left, quiet()) as store:
        assert [one.body[:3] for one in read_all(store, GONE)] == [b"new"] * 5


def test_what_a_power_cut_took_may_be_put_again(tmp_path: Path) -> None:
    """The log ends before the noted record, which is still in the file."""
    with opened(tmp_path / "s", quiet()) as store:
        put_some(store, b"old")
        store.delete_topic(GONE)
        left = copy_store(tmp_path / "s", tmp_path / "left")
    log = left / "commitlog" / ("0" * 20)
    content = bytearray(log.read_bytes())
    content[10:14] = b"torn"  # in the first record's CRC
    log.write_bytes(content)
    with opened(left, quiet()) as store:
        assert store.max_physical_offset == 0
        put_some(store, b"new")
        again = copy_store(left, tmp_path / "again")
    for root in (left, again):
        with opened(root, quiet()) as store:
            assert [one.body[:3] for one in read_all(store, GONE)] == [b"new"] * 5


def test_notes_go_when_the_log_has_expired(tmp_path: Path) -> None:
    settings = quiet(disk_clean_forcibly_percent=30, delete_file_batch_max=9)
    with opened(tmp_path, settings, disk_used_percent=lambda path: 60) as store:
        put_some(store, b"old")
        store.delete_topic(GONE, "Unknown")
        assert list(json.loads((tmp_path / NOTES).read_bytes())) == [GONE]
        put_all(store, *(message("Other", body=bytes(900)) for _ in range(9)))
        store.retention_round()
        store.delete_topic("Other")
        assert list(json.loads((tmp_path / NOTES).read_bytes())) == ["Other"]


def test_a_topic_stays_when_its_deletion_cannot_be_noted(tmp_path: Path) -> None:
    with opened(tmp_path, quiet()) as store:
        put_some(store, b"old")
        (tmp_path / "config").write_text("in the way")
        with pytest.raises(StoreUnavailable, match="deletedTopics"):
            store.delete_topic(GONE)
        assert len(read_all(store, GONE)) == 5


def test_entries_of_a_topic_made_again_are_written_at_once(tmp_path: Path) -> None:
    """After a kill Apache's broker, which has no notes of deleted topics, uses the contents of the queue's files."""
    with opened(tmp_path / "s", quiet()) as store:
        put_some(store, b"old")
        store.delete_topic(GONE)
        put_some(store, b"new")
        put_some(store, b"held", topic="Kept")
        content = {topic: (store.root / f"consumequeue/{topic}/0/{0:020d}").read_bytes() for topic in (GONE, "Kept")}
        places = [store.queues.table[GONE, 0].place(number) for number in range(5)]
        assert content[GONE][:100] == b"".join(
            at.to_bytes(8) + size.to_bytes(4) + content[GONE][20 * n + 12 : 20 * n + 20]
            for n, (at, size) in enumerate(places)
        )
        assert not any(content["Kept"])
