"""Light queues of lite topics: puts, reads, lives, crashes, slaves, Apache's folders. Source: lite.md §5, §9."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rmqkit.clock import Clock
from rmqkit.core import CORE
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import encode_command, request
from rmqkit.protocol.core import Sends
from rmqkit.protocol.names import lite_queue
from rmqkit.protocol.properties import find_property
from rmqkit.protocol.schemas.send import SendMessageV2Request
from rmqkit.protocol.sends import sends_reader
from rmqkit.store import replica as replication
from rmqkit.store.index.index import MessageIndex
from rmqkit.store.lite.entries import LITE_ENTRY, LiteEntries
from rmqkit.store.lite.journal import Kind, LiteJournal, LiteNote, decoded
from rmqkit.store.message_store import GetStatus, MessageStore, PutStatus
from rmqkit.store.queues.consume_queue import ENTRY
from rmqkit.system import disk
from tests.store.stores import HOST, copy_store, message, opened, put_all, read_all, small_settings

PARENT = "LT"
ROOMY = small_settings(commit_log_file_bytes=1 << 16, lite_queue_file_bytes=20 * LITE_ENTRY.size)
SMALL = small_settings(lite_queue_file_bytes=20 * LITE_ENTRY.size)


def lite(name: str, parent: str = PARENT, **properties: object):
    given = {"__LITE_TOPIC": name, "INNER_MULTI_DISPATCH": lite_queue(parent, name), **properties}
    return message(parent, **given)


def queue(name: str, parent: str = PARENT) -> str:
    return lite_queue(parent, name)


def numbers(store: MessageStore, name: str) -> list[int]:
    """Return the numbers of the readable messages of a lite topic, as their records have them."""
    return [int(find_property(one.properties, b"INNER_MULTI_QUEUE_OFFSET")) for one in read_all(store, queue(name))]


def bodies(store: MessageStore, name: str) -> list[bytes]:
    return [one.body for one in read_all(store, queue(name))]


def crashed(store: MessageStore, to: Path) -> Path:
    copy_store(store.root, to)
    (to / "lock").unlink(missing_ok=True)
    return to


def test_a_lite_topic_is_a_queue_without_settings_and_without_files(tmp_path):
    with opened(tmp_path, SMALL) as store:
        put_all(store, *(lite(f"s{i % 3}", body=b"%d" % i) for i in range(9)))
        assert [bodies(store, f"s{i}") for i in range(3)] == [
            [b"0", b"3", b"6"],
            [b"1", b"4", b"7"],
            [b"2", b"5", b"8"],
        ]
        assert numbers(store, "s1") == [0, 1, 2]
        assert store.bounds(queue("s1"), 0) == (0, 3)
        assert store.bounds(queue("none"), 0) == (0, 0)
        assert store.get(queue("none"), 0, 0, count_max=1).status is GetStatus.NO_MESSAGE_IN_QUEUE
        assert store.topics == {PARENT}
        assert [one.name for one in (tmp_path / "consumequeue").iterdir()] == [PARENT]


def test_a_record_has_the_properties_of_apaches_broker(tmp_path):
    with opened(tmp_path, SMALL) as store:
        put_all(store, lite("s1"))
        (record,) = read_all(store, queue("s1"))
    assert find_property(record.properties, b"INNER_MULTI_DISPATCH") == b"%LMQ%$LT$s1"
    assert find_property(record.properties, b"INNER_MULTI_QUEUE_OFFSET") == b"0"
    assert find_property(record.properties, b"__LITE_EPOCH") is None
    assert (record.topic, record.queue_offset) == (PARENT, 0)


@pytest.mark.parametrize("forged", ["INNER_MULTI_QUEUE_OFFSET", "__LITE_EPOCH"])
def test_a_producer_cannot_choose_number_and_life(tmp_path, forged):
    with opened(tmp_path, SMALL) as store:
        put_all(store, lite("s1"), lite("s1", **{forged: "77"}), lite("s1"))
        assert numbers(store, "s1") == [0, 1, 2]
        found = store.lite.queue(queue("s1"))
        assert found is not None and found.epoch == 1


def test_a_message_enters_lite_topics_of_its_own_topic_only(tmp_path):
    enabled = small_settings(enable_light_queues=True, enable_multi_dispatch=True)
    with opened(tmp_path, enabled) as store:
        refused = store.put(message("NT", INNER_MULTI_DISPATCH=queue("s1")))
        assert refused.status is PutStatus.MESSAGE_ILLEGAL
        assert refused.reason == "INNER_MULTI_DISPATCH names '%LMQ%$LT$s1': lite topic s1 belongs to LT, not to NT"
        assert store.lite.queue(queue("s1")) is None


def test_a_dispatch_without_the_name_of_the_lite_topic_has_no_effect(tmp_path):
    with opened(tmp_path, SMALL) as store:
        put_all(store, message(PARENT, INNER_MULTI_DISPATCH=queue("s1"), INNER_MULTI_QUEUE_OFFSET="5"))
        put_all(store, message(PARENT, INNER_MULTI_DISPATCH=queue("s1"), __LITE_TOPIC="s2"))
        assert len(store.lite.table) == 0
        assert len(read_all(store, PARENT)) == 2


@pytest.mark.parametrize("count", [1, 7, 64, 100, 300])
def test_every_stretch_of_a_queue_can_be_read(tmp_path, count):
    with opened(tmp_path, small_settings(commit_log_file_bytes=1 << 20)) as store:
        with store.batch():
            put_all(store, *(lite(name, body=b"%d" % i) for i in range(count) for name in ("a", "b")))
        found = store.lite.queue(queue("a"))
        assert found is not None
        for first in {0, 1, count // 2, count - 1}:
            assert [one.number for one in found.entries(first, 5)] == list(range(first, min(count, first + 5)))
        assert found.entries(count, 5) == []


def test_a_search_reads_few_entries(tmp_path):
    with opened(tmp_path, small_settings(commit_log_file_bytes=1 << 20)) as store:
        put_all(store, *(lite("a") for _ in range(1000)))
        entries, read = store.lite.entries, []
        tail = store.lite.table.tails[0]
        entries.first_where(tail, lambda one: bool(read.append(one.number)) or one.number >= 3)
        assert len(read) <= 60


def test_times_find_messages(tmp_path):
    clock = Ticking()
    with opened(tmp_path, small_settings(commit_log_file_bytes=1 << 20), clock=clock) as store:
        for at in (1000, 2000, 2000, 5000):
            clock.ms = at
            put_all(store, lite("a"))
        times = (0, 1000, 1500, 2000, 4000, 5000, 6000)
        assert [store.offset_by_time(queue("a"), 0, at) for at in times] == [0, 0, 1, 1, 3, 3, 4]
        assert [store.offset_by_time(queue("a"), 0, at, upper=True) for at in times[1:]] == [0, 0, 2, 2, 3, 3]
        assert store.earliest_store_time(queue("a"), 0) == 1000


class Ticking(Clock):
    """A clock that a test sets."""

    ms = 1_700_000_000_000

    def now_ms(self) -> int:
        return self.ms

    def monotonic_ms(self) -> float:
        return float(self.ms)


def expire(store: MessageStore, now_ms: int) -> int:
    return sum(1 for _ in store.lite.expire(now_ms))


def test_a_lite_topic_expires_a_lifetime_after_its_newest_message_and_lives_again(tmp_path):
    clock, root = Ticking(), tmp_path / "s"
    start = clock.ms - clock.ms % 60_000
    with opened(root, SMALL, clock=clock) as store:
        store.lite.set_lifetime(PARENT, 1)
        clock.ms = start
        put_all(store, lite("a"), lite("a"), lite("b"))
        clock.ms = start + 30_000
        put_all(store, lite("a"))
        assert expire(store, start + 60_000) == 0
        assert expire(store, start + 120_000) == 2
        assert store.bounds(queue("a"), 0) == (3, 3)
        assert store.lite.table.parents[PARENT].live_count == 0
        assert store.get(queue("a"), 0, 0, count_max=1).status is GetStatus.OFFSET_TOO_SMALL
        for _ in range(2):
            put_all(store, lite("a", body=b"new"))
        assert store.bounds(queue("a"), 0) == (3, 5)
        assert numbers(store, "a") == [3, 4]
        assert [find_property(one.properties, b"__LITE_EPOCH") for one in read_all(store, queue("a"))] == [b"2", b"2"]
        dead = crashed(store, tmp_path / "crashed")
    for path in (root, dead):
        with opened(path, SMALL) as store:
            found = store.lite.queue(queue("a"))
            assert found is not None
            assert (found.epoch, found.min_offset, found.max_offset) == (2, 3, 5)
            assert bodies(store, "a") == [b"new", b"new"]


def test_a_lifetime_that_is_set_later_applies_to_old_lite_topics(tmp_path):
    clock = Ticking()
    with opened(tmp_path, SMALL, clock=clock) as store:
        put_all(store, lite("a"), lite("b", parent="Other"))
        store.lite.set_lifetime(PARENT, 5)
        assert expire(store, clock.ms + 4 * 60_000) == 0
        store.lite.set_lifetime(PARENT, None)
        assert expire(store, clock.ms + 90 * 60_000) == 0
        store.lite.set_lifetime(PARENT, 5)
        assert expire(store, clock.ms + 7 * 60_000) == 1
        assert store.bounds(lite_queue("Other", "b"), 0) == (0, 1)


def test_a_message_that_waits_for_the_disk_keeps_its_lite_topic(tmp_path):
    clock = Ticking()
    with opened(tmp_path, SMALL, clock=clock) as store:
        store.lite.set_lifetime(PARENT, 1)
        put_all(store, lite("a"))
        with store.batch():
            put_all(store, lite("a"))
            assert expire(store, clock.ms + 600_000) == 0
        assert store.bounds(queue("a"), 0) == (0, 2)


def test_expired_names_are_forgotten_with_their_messages_and_no_number_means_another_message(tmp_path):
    clock = Ticking()
    with opened(tmp_path, SMALL, clock=clock) as store:
        store.lite.set_lifetime(PARENT, 1)
        put_all(store, lite("a"), lite("a"))
        assert expire(store, clock.ms + 180_000) == 1
        put_all(store, *(lite("other", body=bytes(200)) for _ in range(60)))
    for path in sorted((tmp_path / "commitlog").iterdir())[:2]:
        path.unlink()
    with opened(tmp_path, SMALL, clock=clock) as store:
        store.lite.set_lifetime(PARENT, 1000)
        while not store.lite.drop_expired(store.min_physical_offset):
            pass
        assert expire(store, clock.ms + 180_000) == 1
        assert store.lite.queue(queue("a")) is None
        put_all(store, lite("a"))
        found = store.lite.queue(queue("a"))
        assert found is not None and (found.epoch, found.max_offset) == (2, 1)
    with opened(tmp_path, SMALL) as store:
        found = store.lite.queue(queue("a"))
        assert found is not None and (found.epoch, found.max_offset) == (2, 1)


def test_messages_that_the_log_deleted_are_not_in_their_queue(tmp_path):
    with opened(tmp_path, SMALL) as store:
        put_all(store, lite("idle"), *(lite("a", body=bytes(200)) for _ in range(60)), lite("b"))
    for path in sorted((tmp_path / "commitlog").iterdir())[:2]:
        path.unlink()
    for _ in range(2):
        with opened(tmp_path, SMALL) as store:
            while store.lite.drop_expired(store.min_physical_offset):
                pass
            low, high = store.bounds(queue("a"), 0)
            assert 0 < low < high == 60
            assert numbers(store, "a") == list(range(low, 60))
            assert store.bounds(queue("idle"), 0) == (1, 1)
            assert store.bounds(queue("b"), 0) == (0, 1)
    with opened(tmp_path, SMALL) as store:
        put_all(store, lite("idle"))
        assert numbers(store, "idle") == [1]


def test_a_deleted_parent_has_no_lite_topics_also_after_a_crash(tmp_path):
    with opened(tmp_path / "s", SMALL) as store:
        put_all(store, lite("a"), lite("a", parent="Other"))
        store.delete_topic(PARENT)
        assert store.lite.queue(queue("a")) is None
        early = crashed(store, tmp_path / "early")
        put_all(store, lite("a"))
        late = crashed(store, tmp_path / "late")
    for path, expected in ((early, None), (late, (0, 1))):
        with opened(path, SMALL) as store:
            found = store.lite.queue(queue("a"))
            assert (None if found is None else (found.min_offset, found.max_offset)) == expected
            assert store.bounds(lite_queue("Other", "a"), 0) == (0, 1)


@pytest.mark.parametrize("lost", ["nothing", "journal", "entries", "everything"])
@pytest.mark.parametrize("is_clean", [True, False], ids=["clean", "killed"])
def test_what_is_lost_is_rebuilt_from_the_log(tmp_path, lost, is_clean):
    root = tmp_path / "s"
    with opened(root, SMALL) as store:
        put_all(store, *(lite(f"s{i % 7}", body=b"%d" % i) for i in range(70)))
        dead = crashed(store, tmp_path / "crashed")
    path = root if is_clean else dead
    if lost in ("journal", "everything") and (path / "lite" / "topics").exists():
        (path / "lite" / "topics").unlink()
    if lost in ("entries", "everything"):
        shutil.rmtree(path / "lite" / "entries")
    with opened(path, SMALL) as store:
        for i in range(7):
            assert bodies(store, f"s{i}") == [b"%d" % n for n in range(i, 70, 7)]
        put_all(store, lite("s3", body=b"last"))
        assert numbers(store, "s3") == list(range(11))


def test_records_of_a_failed_sync_are_written_again(tmp_path):
    """Also those of an earlier process: the system may consider their pages as written."""
    notes = [LiteNote(Kind.LIVE, slot, 1, 0, 0, 0, 0, f"{PARENT}$s{slot}") for slot in range(3)]
    written, pwrite = [], disk.pwrite

    def write(descriptor, data, position):
        written.append((position, len(data)))
        return pwrite(descriptor, data, position)

    def refuse(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    journal = LiteJournal(tmp_path / "topics")
    journal.append(notes[:1], is_durable=False)
    size = len(notes[0].encoded())
    with disk.replaced({"sync_data": refuse}), pytest.raises(OSError, match="Input/output"):
        journal.append(notes[1:2], is_durable=True)
    with disk.replaced({"pwrite": write}):
        journal.append(notes[1:2], is_durable=True)
        journal.append(notes[2:], is_durable=True)
        again = LiteJournal(tmp_path / "topics")
        assert list(again.load()) == notes
        again.append(notes[2:], is_durable=False)
        again.append(notes[2:], is_durable=True)
    assert written == [(0, size), (size, size), (2 * size, size), (3 * size, size), (0, 4 * size), (4 * size, size)]


def test_a_torn_journal_is_cut(tmp_path, caplog):
    with opened(tmp_path, SMALL) as store:
        put_all(store, lite("a"), lite("b"))
    path = tmp_path / "lite" / "topics"
    path.write_bytes(path.read_bytes()[:-3])
    with opened(tmp_path, SMALL) as store:
        assert [store.bounds(queue(name), 0) for name in "ab"] == [(0, 1), (0, 1)]
    assert "after a torn record: the log replaces them" in caplog.text


@pytest.mark.parametrize("bulk_from_bytes", [1, 1 << 40], ids=["bulk", "one by one"])
def test_a_slave_has_the_same_lite_topics(tmp_path, monkeypatch, bulk_from_bytes):
    monkeypatch.setattr(replication, "_BULK_FROM_BYTES", bulk_from_bytes)
    clock, settings = Ticking(), small_settings(commit_log_file_bytes=1 << 20)
    with opened(tmp_path / "master", settings, clock=clock) as master:
        master.lite.set_lifetime(PARENT, 1)
        put_all(master, *(lite(f"s{i % 40}") for i in range(80)), message())
        expire(master, clock.ms + 180_000)
        put_all(master, lite("s1"))
        log = bytes(master.log_part(0, 1 << 20))
    with opened(tmp_path / "slave", settings, is_replica=True) as slave:
        slave.replica.append(0, log)
        while slave.dispatch():
            pass
        assert slave.bounds(queue("s2"), 0) == (0, 2)
        found = slave.lite.queue(queue("s1"))
        assert found is not None
        assert (found.epoch, found.min_offset, found.max_offset) == (2, 2, 3)


def with_apaches_folder(root: Path, name: str, entries: list[tuple[int, int]]) -> Path:
    """Write the folder of a lite topic as Apache's broker does. ``entries``: physical offset and size."""
    folder = root / "consumequeue" / queue(name) / "0"
    folder.mkdir(parents=True)
    packed = b"".join(ENTRY.pack(at, size, 0) for at, size in entries)
    (folder / ("0" * 20)).write_bytes(packed.ljust(200, b"\0"))
    return folder


def test_apaches_folders_are_taken_over_and_removed_at_a_clean_stop(tmp_path):
    with opened(tmp_path, SMALL) as store:
        put_all(store, lite("gone"), *(message(body=bytes(1000)) for _ in range(4)))
        put_all(store, *(lite(f"s{i % 3}") for i in range(9)))
        names = ["s0", "s1", "s2", "gone"]
        places = {name: [one[1:3] for one in store.entries(queue(name), 0, 0, count_max=9)] for name in names}
    shutil.rmtree(tmp_path / "lite")
    (tmp_path / "commitlog" / ("0" * 20)).unlink()
    folders = [with_apaches_folder(tmp_path, name, places[name]) for name in names]
    with opened(tmp_path, SMALL) as store:
        assert [store.bounds(queue(f"s{i}"), 0) for i in range(3)] == [(0, 3)] * 3
        assert {topic for topic, _ in store.queues.table} == {PARENT, "TopicTest"}
        assert store.bounds(queue("gone"), 0) == (1, 1), "the numbers of a folder continue without its messages"
        dead = crashed(store, tmp_path / "crashed")
    assert not any(folder.exists() for folder in folders)
    for path in (dead, tmp_path):
        with opened(path, SMALL) as store:
            assert [numbers(store, f"s{i}") for i in range(3)] == [[0, 1, 2]] * 3
            assert store.bounds(queue("gone"), 0) == (1, 1)


def test_the_number_of_lite_topics_is_limited_for_new_names_only(tmp_path):
    with opened(tmp_path, small_settings(lite_topic_count_max=2)) as store:
        put_all(store, lite("a"), lite("b"))
        assert store.put(lite("c")).status is PutStatus.LIGHT_QUEUES_EXCEEDED
        put_all(store, lite("a"))
        assert store.lite.queue(queue("c")) is None


def test_a_put_that_fails_leaves_no_lite_topic(tmp_path):
    with opened(tmp_path, small_settings(commit_log_file_bytes=1 << 20)) as store:
        assert store.put(lite("a", TEXT="x" * 32_700)).status is PutStatus.PROPERTIES_SIZE_EXCEEDED
        assert len(store.lite.table) == 0
        put_all(store, lite("a"))
        found = store.lite.queue(queue("a"))
        assert found is not None and found.epoch == 1


def sends_to(*names: str, size: int = 4) -> Sends:
    """Return sends to lite topics. An empty name is no lite topic."""
    frames = []
    for number, name in enumerate(names):
        more = f"__LITE_TOPIC\x01{name}\x02" if name else ""
        text = f"UNIQ_KEY\x01K{number}\x02TAGS\x01t\x02{more}"
        header = SendMessageV2Request("p", PARENT, "TBW102", 4, 0, 0, 1, 0, text)
        frames += encode_command(request(RequestCode.SEND_MESSAGE_V2, header, bytes(size)))
    sends = sends_reader(CORE, {}, (), {}).read(b"".join(frames), 0)
    assert sends is not None and len(sends) == len(names)
    return sends


def together(store: MessageStore, *names: str, size: int = 4) -> None:
    """Put messages into lite topics with one write, as the broker does. An empty name is no lite topic."""
    sends = sends_to(*names, size=size)
    if (PARENT, 0) not in store.queues.table:
        put_all(store, message(PARENT))
    if store.put_sends(sends, HOST, HOST) is None:
        assert not store.log.has_room(4000), "the log's file has no room for the run"
        put_all(store, *(lite(name, body=bytes(size)) if name else message(PARENT) for name in names))


def entries_of(store: MessageStore) -> list[tuple[int, ...]]:
    """Return slot, queue offset, life and the two links of all entries."""
    entries = store.lite.entries
    found = [entries.at(index) for index in range(entries.max_offset)]
    return [(one.slot, one.number, one.epoch, one.previous, one.jump) for one in found if one is not None]


@given(st.lists(st.lists(st.sampled_from(["a", "b", "c", ""]), min_size=1, max_size=20), max_size=6))
@settings(max_examples=20, deadline=None)
def test_messages_that_are_put_together_have_the_entries_of_single_ones(runs):
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for at in (0, 1):
            with opened(Path(folder) / str(at), ROOMY) as store:
                together(store, "a", "b", "c")
                for names in runs:
                    for part in [names] if at else [[name] for name in names]:
                        together(store, *part)
                assert [numbers(store, name) for name in "abc"] == [
                    list(range(1 + sum(names.count(name) for names in runs))) for name in "abc"
                ]
                found.append(entries_of(store))
        assert found[0] == found[1]


@pytest.mark.parametrize("file_entries", [7, 10_000])
def test_entries_in_memory_are_read_like_written_ones(tmp_path, file_entries):
    settings = small_settings(commit_log_file_bytes=1 << 18, lite_queue_file_bytes=56 * file_entries)
    with opened(tmp_path / "store", settings) as store:
        entries, runs = store.lite.entries, ["a", "aab", "cb", "abcab", "bbbbbbbbbb", "a"]
        for names in runs:
            together(store, *names)
            found = entries_of(store)
            assert len(found) == entries.max_offset
            entries.write_held()
            assert (entries_of(store), entries.has_held) == (found, False)
        for names in runs:
            together(store, *names)
        assert entries.has_held
        found = entries_of(store)
        assert [entries.at(index) for index in (-1, len(found))] == [None, None]
        dead = crashed(store, tmp_path / "crashed")
        assert entries.has_held
        entries.write_held()
        assert entries_of(store) == found
        wanted = [numbers(store, name) for name in "abc"]
    with opened(dead, settings) as store:
        assert [numbers(store, name) for name in "abc"] == wanted
        assert [row[:3] for row in entries_of(store)] == [row[:3] for row in found]


def test_entries_in_memory_are_dropped_with_their_records(tmp_path):
    with opened(tmp_path, ROOMY) as store:
        together(store, "a", "b", "a")
        end = store.log.max_offset
        together(store, "b", "a", "c")
        assert store.lite.entries.has_held
        store.lite.truncate_physical(end)
        assert len(entries_of(store)) == 3
        store.lite.index()
        assert [store.lite.queue(queue(name)).max_offset for name in "ab"] == [2, 1]


def test_listeners_get_the_copies_of_messages_that_are_put_together(tmp_path):
    seen, marked = [], []
    with opened(tmp_path, ROOMY, on_arrival=lambda requests: seen.append(requests)) as store:
        together(store, "a", "", "b", "a")
        store.lite.on_arrival = lambda places: marked.extend(places)
        seen.clear()
        together(store, "a", "", "b", "a")
        (requests,) = seen
        lights = [(queue("a"), 0, 2), (queue("b"), 0, 1), (queue("a"), 0, 3)]
        assert [(one.topic, one.queue_id, one.queue_offset) for one in requests][4:] == lights
        assert len(requests) == 7 and requests[4].topic == queue("a")
        every = {(PARENT, 0), (queue("a"), 0), (queue("b"), 0)}
        for wanted in (every, {(PARENT, 0)}, {(queue("a"), 0)}, {(PARENT, 1)}):
            found = [one for one in requests if (one.topic, one.queue_id) in wanted]
            assert list(requests.requests_of(wanted)) == found
        once = {(queue("a"), 0)}
        for one in requests.requests_of(once):  # whoever waited is answered
            once.clear()
            assert one.queue_offset == 2
        assert (requests.places, requests.light_places) == ([(PARENT, 0)], [(queue("a"), 0), (queue("b"), 0)])
        assert marked == [(PARENT, "a"), (PARENT, "b"), (PARENT, "a")]
        together(store, "", "")
        assert len(seen[-1]) == 2 and len(marked) == 3


def test_messages_whose_lite_topic_changes_before_they_are_readable_stay_in_their_life(tmp_path):
    with opened(tmp_path, ROOMY) as store:
        together(store, "a", "b")
        table = store.lite.table
        with store.batch():
            together(store, "a", "c", "c")
            store.lite.remove(table.find(PARENT, "b"))
            together(store, "b", "a")
        assert [numbers(store, name) for name in "abc"] == [[0, 1, 2], [1], [0, 1]]
        assert [store.lite.queue(queue(name)).epoch for name in "abc"] == [1, 2, 1]


def test_messages_that_wait_while_their_lite_topic_is_removed_begin_its_next_life(tmp_path):
    with opened(tmp_path, ROOMY) as store:
        together(store, "a")
        table = store.lite.table
        with store.batch():
            together(store, "a", "a")
            store.lite.remove(table.find(PARENT, "a"))
        found = store.lite.queue(queue("a"))
        assert found is not None and (found.epoch, found.min_offset, found.max_offset) == (2, 1, 3)
        assert numbers(store, "a") == [1, 2]


def test_messages_that_are_entered_already_are_skipped_in_a_retry(tmp_path, monkeypatch):
    with opened(tmp_path, ROOMY) as store:
        together(store, "a", "b")
        failures = [ZeroDivisionError() for _ in range(2)]
        for name in ("put_rows", "put_all"):
            put = getattr(MessageIndex, name)

            def once(index, keys, put=put):
                if failures:
                    raise failures.pop()
                return put(index, keys)

            monkeypatch.setattr(MessageIndex, name, once)
        together(store, "a", "b", "a")
        assert [numbers(store, name) for name in "ab"] == [[0, 1, 2], [0, 1]]
        assert store.lite.entries.max_offset == 5 and not failures


def test_messages_that_cannot_be_put_together_leave_no_lite_topic(tmp_path, monkeypatch):
    with opened(tmp_path, ROOMY) as store:
        together(store, "a")
        table, sends = store.lite.table, sends_to("a", "b", "c")
        with monkeypatch.context() as patch:
            patch.setattr(store.log, "has_room", lambda size: False)
            assert store.put_sends(sends, HOST, HOST) is None
        assert (len(table), table.find(PARENT, "b"), table.find(PARENT, "c")) == (1, None, None)
        together(store, "a", "b")
        assert [numbers(store, name) for name in "ab"] == [[0, 1], [0]]


def test_too_many_new_lite_topics_are_not_put_together(tmp_path):
    with opened(tmp_path, small_settings(commit_log_file_bytes=1 << 16, lite_topic_count_max=3)) as store:
        together(store, "a", "b")
        sends = sends_to("a", "c", "d")
        assert store.put_sends(sends, HOST, HOST) is None
        assert len(store.lite.table) == 2
        together(store, "a", "c", "b", "c")
        assert numbers(store, "c") == [0, 1]


def test_entries_that_cannot_be_written_are_written_later(tmp_path, monkeypatch):
    with opened(tmp_path, ROOMY) as store:
        together(store, "a", "b")
        append, failures = LiteEntries.append_all, [OSError(28, "No space left on device") for _ in range(2)]

        def once(entries, packed, end):
            if failures:
                raise failures.pop()
            append(entries, packed, end)

        monkeypatch.setattr(LiteEntries, "append_all", once)
        together(store, "a", "b", "a")
        assert store.lite.entries.max_offset == 2
        put_all(store, lite("b"))
        assert [numbers(store, name) for name in "ab"] == [[0, 1, 2], [0, 1, 2]]
        assert entries_of(store)[2:4] == [(0, 1, 1, 0, 0), (1, 1, 1, 1, 1)]


class LiteModel(RuleBasedStateMachine):
    """Any sequence of puts, expiries, deletes, stops and kills equals a model: per name its life and its numbers."""

    @initialize(folder=st.uuids())
    def begin(self, folder) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="lite-"))
        self.root, self.count, self.clock = self.base / "0", 0, Ticking()
        self.clock.ms = Ticking.ms - Ticking.ms % 60_000
        self.known: dict[str, list[int]] = {}
        self.lives: dict[str, int] = {}
        self.next: dict[str, int] = {}
        self.last_ms: dict[str, int] = {}
        self._open()

    def _open(self) -> None:
        self.store = MessageStore(self.root, SMALL, clock=self.clock)
        self.store.open()
        self.store.lite.set_lifetime(PARENT, 3)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.base)

    @rule(
        names=st.lists(st.sampled_from("abcde"), min_size=1, max_size=8),
        size=st.integers(1, 300),
        is_together=st.booleans(),
    )
    def put(self, names: list[str], size: int, is_together: bool) -> None:
        with self.store.batch():
            if is_together:
                together(self.store, *names, size=size)
            for name in names:
                if not is_together:
                    put_all(self.store, lite(name, body=bytes(size)))
                if name not in self.known:
                    self.known[name] = []
                    self.lives[name] = self.lives.get(name, 0) + 1
                number = self.next.setdefault(name, 0)
                self.known[name].append(number)
                self.next[name] = number + 1
                self.last_ms[name] = self.clock.ms

    @rule(minutes=st.integers(1, 5))
    def expire(self, minutes: int) -> None:
        self.clock.ms += minutes * 60_000
        expire(self.store, self.clock.ms)
        for name in [one for one in self.known if self.last_ms[one] + 3 * 60_000 < self.clock.ms]:
            del self.known[name]

    @rule()
    def stop(self) -> None:
        self.store.close()
        self._open()

    @rule(saves=st.booleans())
    def kill(self, saves: bool) -> None:
        if saves:
            self.store.lite.save()
        self.count += 1
        root = crashed(self.store, self.base / str(self.count))
        self.store.close()
        self.root = root
        self._open()
        expire(self.store, self.clock.ms)

    @invariant()
    def equals(self) -> None:
        for name in self.next if hasattr(self, "store") else ():
            alive = self.known.get(name, [])
            assert numbers(self.store, name) == alive
            assert self.store.max_offset(queue(name), 0) == self.next[name]
            if alive:
                found = self.store.lite.queue(queue(name))
                assert found is not None and found.epoch == self.lives[name]


LiteModel.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestLiteModel = LiteModel.TestCase


@given(st.binary(max_size=200))
def test_any_bytes_are_a_journal_or_its_torn_end(content):
    for _, end in decoded(content):
        assert end <= len(content)
