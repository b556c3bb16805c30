"""The offline check of a store: golden stores are sound, every kind of damage is named with its file and place."""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.errors import ExtraMissing, StoreError, StoreLocked, StoreMismatch
from rmqkit.protocol.names import SCHEDULE_TOPIC, TIMER_TOPIC
from rmqkit.protocol.record import INNER_BATCH, decode_record
from rmqkit.store.log.scan import Damage, runs
from rmqkit.store.offline.bulk_compare import IndexComparison
from rmqkit.store.offline.check import Finding, Kind, Report, dump, open_log, stat, verify
from rmqkit.store.offline.queue_check import DerivedFiles
from rmqkit.store.offline.repair import repair
from rmqkit.store.queues.batch_queue import BATCH_ENTRY
from rmqkit.store.queues.consume_queue import BLANK_ENTRY, ENTRY
from rmqkit.store.queues.table import deleted_topics_path
from rmqkit.store.settings import StoreSettings
from rmqkit.testing.clock import StandingClock
from tests.examples import examples
from tests.golden_reading import LISTED, as_listed, order
from tests.golden_stores import GoldenStore, unpack_golden
from tests.store.stores import (
    copy_store,
    golden_settings,
    message,
    opened,
    put_all,
    small_settings,
    tree,
)

GOLDEN = ("5.4.0", "4.9.4", "5.4.0-ipv6-crc")
SEGMENT_BYTES = 131072
HEAD_BYTES = 88  # both hosts IPv4
INDEX_HEADER_BYTES, SLOTS = 40, 64


@pytest.fixture(params=GOLDEN)
def any_golden(request, tmp_path) -> GoldenStore:
    return unpack_golden(request.param, tmp_path)


@pytest.fixture
def golden(tmp_path) -> GoldenStore:
    return unpack_golden("5.4.0", tmp_path)


def looked_at(golden: GoldenStore) -> Report:
    return verify(golden.root, golden_settings(golden))


def the_finding(golden: GoldenStore, kind: Kind) -> Finding:
    """Return the only finding of a kind."""
    (finding,) = [one for one in looked_at(golden).findings if one.kind is kind]
    return finding


def overwrite(path: Path, position: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        assert file.read(len(data)) != data, "this would change nothing"
        file.seek(position)
        file.write(data)


def at(finding: Finding) -> tuple[str, int]:
    return finding.path, finding.position


def place_of(golden: GoldenStore, physical_offset: int) -> tuple[Path, int]:
    """Return the file and the position of a record."""
    start = physical_offset - physical_offset % SEGMENT_BYTES
    return golden.root / f"commitlog/{start:020d}", physical_offset - start


def listed(golden: GoldenStore, topic: str, number: int) -> dict:
    messages = [one for one in golden.manifest["messages"] if one["topic"] == topic]
    return sorted(messages, key=lambda one: one["physicalOffset"])[number]


# ---------------------------------------------------------------- sound stores


def test_a_golden_store_is_sound_and_stays_as_it_is(any_golden):
    before = tree(any_golden.root)
    report = looked_at(any_golden)
    assert report.findings == []
    assert report.is_sound and not report.is_live and not report.is_unclean
    assert report.checked["records"] == stat(any_golden.root).records
    assert tree(any_golden.root) == before


def test_everything_of_a_golden_store_is_looked_at(golden):
    messages = golden.manifest["messages"]
    units = sum((path.stat().st_size > 0) for path in (golden.root / "consumequeue_ext").rglob("0*"))
    checked = looked_at(golden).checked
    records = len({one["physicalOffset"] for one in messages})
    assert checked["records"] == checked["queue entries"] == records == 534
    assert checked["extension units"] == 509 > units
    assert checked["index entries"] == 1030


def test_file_sizes_are_found_without_a_configuration_when_the_index_has_the_default_sizes(golden):
    for path in (golden.root / "index").iterdir():
        path.unlink()
    assert verify(golden.root).findings == []


def test_unknown_index_sizes_have_to_be_said(golden):
    with pytest.raises(StoreMismatch, match=r"index/\d+ has 8296 bytes and not 420000040: .*give the broker.conf"):
        verify(golden.root)


def test_progress_ends_with_all_bytes(golden):
    seen: list[tuple[int, int]] = []
    verify(golden.root, golden_settings(golden), progress=lambda done, total: seen.append((done, total)))
    done = [one for one, _ in seen]
    assert done == sorted(done)
    assert 4 * SEGMENT_BYTES < seen[-1][0] <= seen[-1][1]


def test_stat_has_the_bounds_of_the_manifest(any_golden):
    found = stat(any_golden.root)
    assert (found.min_offset, found.max_offset) == (0, int(any_golden.manifest["commitLogMaxOffset"]))
    bounds = {(one.topic, one.queue_id): (one.min_offset, one.max_offset) for one in found.queues}
    bounds.pop(("OFFSET_MOVED_EVENT", 0), None)  # written by a 4.9.4 broker while the manifest was made
    assert bounds == {
        (one["topic"], one["queueId"]): (one["minOffset"], one["maxOffset"])
        for one in any_golden.manifest["queues"]
        if one["maxOffset"] > 0 and not one["topic"].startswith("%LMQ%")  # light queues have no records of their own
    }
    stored = [one["storeTimestamp"] for one in any_golden.manifest["messages"]]
    assert found.first_store_timestamp <= min(stored)
    assert found.last_store_timestamp >= max(stored)
    assert found.damaged_bytes == 0


def test_dump_continues_at_an_offset(golden):
    whole = [(one.physical_offset, one.queue_offset) for one in dump(golden.root)]
    for begin in whole[0][0] + 1, whole[len(whole) // 2][0], whole[-1][0]:
        found = [(one.physical_offset, one.queue_offset) for one in dump(golden.root, begin_offset=begin)]
        assert found == [place for place in whole if place[0] >= begin]
    assert not list(dump(golden.root, begin_offset=whole[-1][0] + 1))


def test_dump_has_the_messages_of_the_manifest(any_golden):
    # Not in the manifest of 4.9.4: OFFSET_MOVED_EVENT, which the broker wrote while it was read, and a topic whose pull
    # it refused.
    queues = {(one["topic"], one["queueId"]) for one in any_golden.manifest["queues"] if "pullError" not in one}
    dumped = [as_listed(one) for one in dump(any_golden.root)]
    found = sorted((one for one in dumped if (one["topic"], one["queueId"]) in queues), key=order)
    expected = sorted(any_golden.manifest["messages"], key=order)
    assert len(found) == len(expected) > 20
    for mine, theirs in zip(found, expected, strict=True):
        theirs = {key: theirs.get(key) for key in LISTED}
        theirs["sysFlagAfterDecode"] &= ~1  # a 4.9 client leaves the compressed bit set
        for host in ("bornHost", "storeHost"):
            theirs[host] = theirs[host].replace("0:0:0:0:0:0:0:1", "::1")
        if mine["sysFlagAfterDecode"] & INNER_BATCH:  # the Java client knows no record of a member
            assert (theirs.pop("size"), theirs.pop("offsetMsgId"), theirs.pop("bodyCRC")) == (0, None, 0)
        assert {key: mine[key] for key in theirs} == theirs


# ---------------------------------------------------------------- filters


def test_dump_by_topic_queue_and_key(golden):
    expected = {
        one["queueOffset"] for one in golden.manifest["messages"] if (one["topic"], one["queueId"]) == ("GoldTag", 1)
    }
    assert {one.queue_offset for one in dump(golden.root, topic="GoldTag", queue_id=1)} == expected
    assert [one.body for one in dump(golden.root, topic="GoldKey", key="key-3")] == [b"keyed 3"]
    one = listed(golden, "GoldPlain", 0)
    assert [found.physical_offset for found in dump(golden.root, key=one["msgId"])] == [one["physicalOffset"]]


def test_dump_by_time_takes_both_ends(golden):
    one = listed(golden, "GoldKey", 4)
    times = [m["storeTimestamp"] for m in golden.manifest["messages"]]
    found = list(dump(golden.root, begin_ms=one["storeTimestamp"], end_ms=one["storeTimestamp"]))
    assert len(found) == times.count(one["storeTimestamp"]) > 0
    assert len(list(dump(golden.root, end_ms=one["storeTimestamp"]))) < len(times)


# ---------------------------------------------------------------- damage in the log


def test_a_flipped_bit_in_a_body(golden):
    one = listed(golden, "GoldPlain", 3)
    path, position = place_of(golden, one["physicalOffset"])
    content = path.read_bytes()
    overwrite(path, position + HEAD_BYTES, bytes([content[position + HEAD_BYTES] ^ 4]))
    report = looked_at(golden)
    assert report.counts == {"body CRC": 1}
    assert at(report.findings[0]) == (str(path), position)
    assert report.findings[0].expected == f"{one['bodyCRC']:08x}"


def test_a_flipped_bit_outside_of_the_body_of_a_record_with_a_crc(tmp_path):
    golden = unpack_golden("5.4.0-ipv6-crc", tmp_path)
    overwrite(golden.root / f"commitlog/{0:020d}", 16, b"\x00\x00\x00\x7e")  # the flag
    report = looked_at(golden)
    assert report.counts == {"record CRC": 1}
    assert at(report.findings[0]) == (str(golden.root / f"commitlog/{0:020d}"), 0)


@pytest.mark.parametrize("kept_bytes", [9, 60, HEAD_BYTES, HEAD_BYTES + 5, -1])
def test_a_torn_record_at_the_end(golden, kept_bytes):
    last = max(golden.manifest["messages"], key=lambda one: one["physicalOffset"])
    path, position = place_of(golden, last["physicalOffset"])
    kept = kept_bytes % last["size"]
    overwrite(path, position + kept, bytes(last["size"] - kept))
    finding = the_finding(golden, Kind.RECORD)
    assert at(finding) == (str(path), position)


def test_a_queue_that_is_ahead_of_the_log(golden):
    last = max(golden.manifest["messages"], key=lambda one: one["physicalOffset"])
    path, position = place_of(golden, last["physicalOffset"])
    overwrite(path, position, bytes(last["size"]))  # a tail that never reached the disk
    report = looked_at(golden)
    assert set(report.counts) == {"queue entry", "index entry"}
    (finding,) = [one for one in report.findings if one.kind is Kind.QUEUE_ENTRY]
    assert Path(finding.path).parent == golden.root / "consumequeue" / last["topic"] / str(last["queueId"])
    assert stat(golden.root).max_offset == last["physicalOffset"]


def test_the_walk_continues_after_a_record_without_magic(golden):
    one = listed(golden, "GoldPlain", 3)
    path, position = place_of(golden, one["physicalOffset"])
    overwrite(path, position + 4, b"\x00\x00\x00\x00")
    finding = the_finding(golden, Kind.RECORD)
    assert at(finding) == (str(path), position)
    assert f"magic is 00000000 ({one['size']} bytes are no record)" in finding.found
    assert (stat(golden.root).records, stat(golden.root).damaged_bytes) == (533, one["size"])
    told: list[Finding] = []
    assert len(list(dump(golden.root, on_damage=told.append))) == len(golden.manifest["messages"]) - 1
    assert [at(one) for one in told] == [(str(path), position)]


def test_zeros_in_the_middle_are_damage(golden):
    path, position = place_of(golden, listed(golden, "GoldPlain", 3)["physicalOffset"])
    overwrite(path, position, bytes(8))
    assert at(the_finding(golden, Kind.RECORD)) == (str(path), position)


@pytest.mark.parametrize("with_settings", [True, False])
def test_a_truncated_segment(golden, with_settings):
    path = golden.root / f"commitlog/{SEGMENT_BYTES:020d}"
    if not with_settings:
        for index in (golden.root / "index").iterdir():
            index.unlink()
    with open(path, "r+b") as file:
        file.truncate(100_000)
    report = verify(golden.root, golden_settings(golden) if with_settings else None)
    (size,) = [one for one in report.findings if one.kind is Kind.FILE_SIZE]
    assert (at(size), size.expected, size.found) == ((str(path), 100_000), "131072 bytes", "100000 bytes")
    (torn,) = [one for one in report.findings if one.kind is Kind.RECORD]
    assert torn.path == str(path)
    inside = [one for one in golden.manifest["messages"] if one["physicalOffset"] <= SEGMENT_BYTES + torn.position]
    last = max(inside, key=lambda one: one["physicalOffset"])
    assert torn.position == last["physicalOffset"] - SEGMENT_BYTES < 100_000 < torn.position + last["size"]


def test_a_missing_segment_and_a_file_that_is_none(golden):
    (golden.root / f"commitlog/{SEGMENT_BYTES:020d}").unlink()
    (golden.root / "commitlog/notes.txt").write_text("x")
    report = looked_at(golden)
    assert report.counts["file missing"] == report.counts["file name"] == 1
    (gap,) = [one for one in report.findings if one.kind is Kind.FILE_MISSING]
    assert at(gap) == (str(golden.root / f"commitlog/{2 * SEGMENT_BYTES:020d}"), 0)
    assert gap.expected == f"{SEGMENT_BYTES:020d} before this file"


def test_what_retention_removed_is_no_damage(golden):
    (golden.root / f"commitlog/{0:020d}").unlink()
    assert looked_at(golden).findings == []
    assert stat(golden.root).min_offset == SEGMENT_BYTES


def test_stale_records_behind_the_end_are_no_damage(golden):
    path = golden.root / f"commitlog/{3 * SEGMENT_BYTES:020d}"
    stale = decode_record(path.read_bytes())
    end = int(golden.manifest["commitLogMaxOffset"]) % SEGMENT_BYTES
    record = bytearray(path.read_bytes()[: stale.size])
    record[28:36] = struct.pack(">q", 3 * SEGMENT_BYTES + end + 200)  # its place, and older than the last record
    overwrite(path, end + 200, bytes(record))
    assert looked_at(golden).findings == []


# ---------------------------------------------------------------- damage in the queues


def first_file(golden: GoldenStore, tree_name: str, topic: str) -> Path:
    return next(path for path in sorted((golden.root / tree_name / topic).rglob("0" * 20)))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda other, entry: (other[0], *other[1:2], entry[2]), "GoldTag"),
        (lambda other, entry: (entry[0] + 1, *entry[1:]), "magic is"),
        (lambda other, entry: (entry[0], entry[1] + 1, entry[2]), "of .* bytes"),
        (lambda other, entry: (1 << 40, *entry[1:]), "the log ends at 401770"),
        (lambda other, entry: (-1, *entry[1:]), "no segment holds"),
        (lambda other, entry: (0, 0, 0), "size 0"),
    ],
)
def test_a_queue_entry_that_points_elsewhere(golden, change, found):
    path = first_file(golden, "consumequeue", "GoldPlain")
    other = ENTRY.unpack(first_file(golden, "consumequeue", "GoldTag").read_bytes()[:20])
    entry = ENTRY.unpack(path.read_bytes()[40:60])
    overwrite(path, 40, ENTRY.pack(*change(other, entry)))
    finding = the_finding(golden, Kind.QUEUE_ENTRY)
    assert at(finding) == (str(path), 40)
    assert "a record of GoldPlain-0" in finding.expected
    assert re.search(found, finding.found)


def test_two_entries_in_the_wrong_order(golden):
    path = first_file(golden, "consumequeue", "GoldPlain")
    data = path.read_bytes()
    overwrite(path, 40, data[60:80] + data[40:60])
    findings = looked_at(golden).findings
    assert [(at(one), one.expected, one.found) for one in findings] == [
        ((str(path), 40), "queue offset 2", "3"),
        ((str(path), 60), "queue offset 3", "2"),
    ]


def test_a_wrong_tags_code(tmp_path):
    golden = unpack_golden("5.4.0-ipv6-crc", tmp_path)  # without extension: the code is in the entry
    path = first_file(golden, "consumequeue", "MiscPlain")
    offset, size, code = ENTRY.unpack(path.read_bytes()[:20])
    overwrite(path, 0, ENTRY.pack(offset, size, code + 1))
    finding = the_finding(golden, Kind.QUEUE_ENTRY)
    assert (at(finding), finding.expected, finding.found) == ((str(path), 0), f"tags code {code}", str(code + 1))


def test_a_queue_that_lacks_its_last_entry_or_all(golden):
    path = first_file(golden, "consumequeue", "GoldKey")
    used = len(path.read_bytes().rstrip(b"\0")) // 20 * 20
    overwrite(path, used - 20 if used % 20 == 0 else used, bytes(20))
    finding = the_finding(golden, Kind.QUEUE_END)
    assert finding.path == str(path)
    path.unlink()
    path.parent.rmdir()
    finding = the_finding(golden, Kind.QUEUE_END)
    assert (at(finding), finding.found) == ((str(path.parent), 0), "an end at 0")


def test_the_messages_of_a_deleted_topic_are_no_damage_and_a_new_one_of_its_name_is_looked_at(tmp_path):
    topics, read = tmp_path / "config" / "topics.json", small_settings()
    with opened(tmp_path, read) as store:
        put_all(store, *[message("Gone")] * 5, message("Kept"))
        store.dispatch()
        store.delete_topic("Gone")
    topics.write_text('{"topicConfigTable": {"Gone": {}, "Kept": {}}}')
    assert verify(tmp_path, read).findings == []
    (tmp_path / "config" / "deletedTopics.json").unlink()  # a broker that does not write the note
    topics.write_text('{"topicConfigTable": {"Kept": {}}}')
    assert verify(tmp_path, read).findings == []
    topics.write_text('{"topicConfigTable": {"Gone": {}, "Kept": {}}}')
    (finding,) = verify(tmp_path, read).findings
    assert (finding.kind, finding.expected, finding.found) == (Kind.QUEUE_END, "entries up to 5", "an end at 0")
    with opened(tmp_path, read) as store:
        store.delete_topic("Gone")
        put_all(store, *[message("Gone")] * 2)
        store.dispatch()
    (finding,) = verify(tmp_path, read).findings  # without a note the queue may have been lost
    assert (finding.kind, finding.found) == (
        Kind.QUEUE_END,
        f"number 0 again at {finding.found.split()[-4]} of the log",
    )
    (queue,) = [one for one in stat(tmp_path, read).queues if one.topic == "Gone"]
    assert (queue.messages, queue.max_offset) == (7, 2)


def test_a_deleted_topic_is_known_by_places_in_the_log_and_not_by_times(tmp_path):
    topics, read, clock = tmp_path / "config" / "topics.json", small_settings(), StandingClock()
    with opened(tmp_path, read, clock=clock) as store:
        put_all(store, message("Gone", queue_id=1))
        clock.ms -= 5000
        put_all(store, message("Gone", queue_id=0))
        store.delete_topic("Gone")
    topics.write_text('{"topicConfigTable": {"Gone": {}}}')
    assert verify(tmp_path, read).findings == []


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_note_of_a_deletion_without_its_record_is_not_valid(tmp_path, changed):
    topics, noted, read = tmp_path / "config" / "topics.json", deleted_topics_path(tmp_path), small_settings()
    with opened(tmp_path, read) as store:
        put_all(store, *[message("Gone")] * 2)
        store.delete_topic("Gone")
    topics.write_text('{"topicConfigTable": {"Gone": {}}}')
    assert verify(tmp_path, read).findings == []
    note = json.loads(noted.read_text())
    note["Gone"][changed] += 1
    noted.write_text(json.dumps(note))
    (finding,) = verify(tmp_path, read).findings
    assert (finding.kind, finding.expected) == (Kind.QUEUE_END, "entries up to 2")


def test_a_truncated_queue_file(golden):
    path = first_file(golden, "consumequeue", "GoldPlain")
    with open(path, "r+b") as file:
        file.truncate(70)
    finding = the_finding(golden, Kind.FILE_SIZE)
    assert (at(finding), finding.expected) == ((str(path), 70), "2000 bytes")


def test_blanks_fill_the_start_of_a_queue_and_nothing_else(golden):
    path = first_file(golden, "consumequeue", "GoldPlain")
    overwrite(path, 0, BLANK_ENTRY * 2)
    (finding,) = looked_at(golden).findings
    assert (finding.kind, at(finding)) == (Kind.QUEUE_END, (str(path), 0)), (
        "the log has the records of the blank entries"
    )
    assert (finding.expected, finding.found) == ("entries from 0 on", "2 first")
    overwrite(path, 60, BLANK_ENTRY)
    assert at(the_finding(golden, Kind.QUEUE_ENTRY)) == (str(path), 60)


def test_a_batch_entry_with_another_count(golden):
    path = next((golden.root / "batchconsumequeue").rglob("0" * 20))
    entry = list(BATCH_ENTRY.unpack(path.read_bytes()[46:92]))
    entry[5] += 1
    overwrite(path, 46, BATCH_ENTRY.pack(*entry))
    finding = the_finding(golden, Kind.QUEUE_ENTRY)
    assert at(finding) == (str(path), 46)
    assert finding.expected.startswith("tagsCode, storeTimestamp, msgBaseOffset, batchSize")


def test_an_extension_unit_of_a_wrong_size(golden):
    path = first_file(golden, "consumequeue_ext", "GoldPlain")
    (size,) = struct.unpack_from(">h", path.read_bytes())
    overwrite(path, 0, struct.pack(">h", size + 1))
    report = looked_at(golden)
    assert report.counts == {"extension unit": 1}
    assert (at(report.findings[0]), report.findings[0].found) == ((str(path), 0), str(size + 1))


def test_an_extension_unit_of_another_message(golden):
    path = first_file(golden, "consumequeue_ext", "GoldPlain")
    overwrite(path, 2, struct.pack(">q", 12345))
    finding = the_finding(golden, Kind.EXT_UNIT)
    assert at(finding) == (str(path), 0)
    assert "(12345," in finding.found


def test_an_address_without_a_unit(golden):
    first_file(golden, "consumequeue_ext", "GoldUnicode").unlink()
    findings = looked_at(golden).findings
    assert findings and {one.kind for one in findings} <= {Kind.QUEUE_ENTRY, Kind.FILE_MISSING}
    assert findings[0].expected == "an extension unit at 0"


# ---------------------------------------------------------------- damage in the index


def index_entry(number: int) -> int:
    return INDEX_HEADER_BYTES + 4 * SLOTS + 20 * number


@pytest.mark.parametrize(
    ("position", "data", "kind"),
    [
        (index_entry(9) + 16, struct.pack(">i", 300), Kind.INDEX_CHAIN),
        (index_entry(9) + 4, struct.pack(">q", 1), Kind.INDEX_ENTRY),
        (index_entry(9) + 12, struct.pack(">i", 86400), Kind.INDEX_ENTRY),
        (INDEX_HEADER_BYTES, struct.pack(">i", 399), Kind.INDEX_CHAIN),
        (36, struct.pack(">i", 401), Kind.INDEX_HEADER),
        (32, struct.pack(">i", 1), Kind.INDEX_HEADER),
    ],
)
def test_damage_in_an_index_file(golden, position, data, kind):
    path = min((golden.root / "index").iterdir())
    overwrite(path, position, data)
    report = looked_at(golden)
    assert set(report.counts) == {kind.value}
    (finding,) = report.findings
    start = index_entry(9) if index_entry(9) <= position < index_entry(10) else position
    assert at(finding) == (str(path), start)


def test_an_index_hash_of_no_key_of_its_record(golden):
    path = min((golden.root / "index").iterdir())
    (hashed,) = struct.unpack_from(">i", path.read_bytes(), index_entry(9))
    overwrite(path, index_entry(9), struct.pack(">i", hashed + SLOTS))  # the same slot
    report = looked_at(golden)
    assert report.counts == {"index entry": 1}
    assert (at(report.findings[0]), report.findings[0].found) == ((str(path), index_entry(9)), str(hashed + SLOTS))


def test_a_truncated_index_file(golden):
    path = max((golden.root / "index").iterdir())
    with open(path, "r+b") as file:
        file.truncate(5000)
    finding = the_finding(golden, Kind.FILE_SIZE)
    assert at(finding) == (str(path), 5000)
    assert finding.expected == "8296 bytes (maxHashSlotNum 64, maxIndexNum 400)"


# ---------------------------------------------------------------- any damage, live stores, no store


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> tuple[Path, StoreSettings]:
    golden = unpack_golden("5.4.0", tmp_path_factory.mktemp("golden"))
    return golden.root, golden_settings(golden)


@examples(30)
@given(
    tree_name=st.sampled_from(["commitlog", "consumequeue", "batchconsumequeue", "consumequeue_ext", "index"]),
    file=st.floats(0, 0.999),
    place=st.floats(0, 0.999),
    noise=st.binary(min_size=1, max_size=40),
)
def test_no_damage_raises(shared, tree_name, file, place, noise):
    root, sizes = shared
    paths = sorted(path for path in (root / tree_name).rglob("*") if path.is_file())
    path = paths[int(file * len(paths))]
    before = path.read_bytes()
    position = int(place * len(before.rstrip(b"\0")))
    try:
        path.write_bytes((before[:position] + noise + before[position + len(noise) :])[: len(before)])
        report = verify(root, sizes)
        assert all(Path(one.path).exists() or one.kind is Kind.QUEUE_END for one in report.findings)
        assert all(one.position >= 0 for one in report.findings)
        assert 500 < stat(root).records <= 534
        assert sum(1 for _ in dump(root)) > 500
    finally:
        path.write_bytes(before)


_damage = {
    "file": st.floats(0, 0.999),
    "place": st.floats(0, 0.999),
    "noise": st.binary(min_size=1, max_size=40) | st.just(bytes(3000)),
}


def damaged(folder: Path, file: float, place: float, noise: bytes) -> tuple[Path, bytes]:
    """Damage one file below a directory. Return the file and its former content."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    path = paths[int(file * len(paths))]
    before = path.read_bytes()
    position = int(place * len(before.rstrip(b"\0")))
    path.write_bytes((before[:position] + noise + before[position + len(noise) :])[: len(before)])
    return path, before


@examples(20)
@given(**_damage, rows=st.sampled_from([1, 7, 8192]))
def test_the_walk_in_bulk_is_the_plain_one(shared, file, place, noise, rows):
    root, sizes = shared
    path, before = damaged(root / "commitlog", file, place, noise)
    try:
        plain, bulk = (open_log(root, sizes, Report()) for _ in range(2))
        expected = [
            (segment.start, part if isinstance(part, Damage) else part.physical_offset)
            for segment, part in plain.walk()
        ]
        found = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(runs.__kwdefaults__, "rows_max", rows)
            for segment, part in bulk.runs():
                parts = [part] if isinstance(part, Damage) else part.offsets.tolist()
                found += [(segment.start, one) for one in parts]
        assert (found, bulk.end) == (expected, plain.end)
    finally:
        path.write_bytes(before)


@examples(12)
@given(**_damage, tree_name=st.sampled_from(["commitlog", "consumequeue", "index"]))
def test_what_is_compared_in_bulk_is_what_is_looked_at_one_by_one(tree_name, file, place, noise, without_ext):
    root, sizes = without_ext
    path, before = damaged(root / tree_name, file, place, noise)
    try:
        in_bulk = verify(root, sizes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rmqkit.store.offline.bulk_compare.Ranges.add", lambda self, start, end: None)
            one_by_one = verify(root, sizes)
        assert in_bulk == one_by_one
    finally:
        path.write_bytes(before)


@pytest.fixture(scope="module")
def without_ext(tmp_path_factory) -> tuple[Path, StoreSettings]:
    root = tmp_path_factory.mktemp("plain") / "store"
    with opened(root) as store:
        put_all(
            store,
            *(
                message("ABC"[i % 3], queue_id=i % 2, body=b"%d" % i, KEYS=f"k{i}", TAGS=f"t{i % 4}")
                for i in range(120)
            ),
        )
    return root, small_settings()


def test_most_entries_are_compared_in_bulk(without_ext, monkeypatch):
    looked_at: list[object] = []
    monkeypatch.setattr(
        "rmqkit.store.offline.queue_check.DerivedFiles._simple_entry",
        lambda self, place, index, entry: looked_at.append(place),
    )
    monkeypatch.setattr(
        "rmqkit.store.offline.queue_check.DerivedFiles._read_keys", lambda self, at: looked_at.append(at)
    )
    report = verify(*without_ext)
    assert report.checked["queue entries"] == 120
    assert report.checked["index entries"] == 240
    assert len(looked_at) <= report.checked["files"]  # the first entry of an index file, and no others


def test_without_numpy_it_is_said(golden, monkeypatch):
    monkeypatch.setattr("rmqkit.store.log.scan.has_numpy", lambda: False)
    for look in (verify, stat):
        with pytest.raises(ExtraMissing, match=r"needs numpy, which is not installed: pip install '.*\[store\]'"):
            look(golden.root)
    assert len(list(dump(golden.root))) == len(golden.manifest["messages"])


def test_a_report_keeps_so_many_findings_and_counts_all(golden, monkeypatch):
    monkeypatch.setattr("rmqkit.store.offline.findings.FINDINGS_MAX", 3)
    path = first_file(golden, "consumequeue", "GoldPlain")
    overwrite(path, 0, b"\x01" * 100)
    report = looked_at(golden)
    assert len(report.findings) == 3
    assert report.counts["queue entry"] == 5


def test_a_store_in_use_is_refused_and_readable(tmp_path):
    root = tmp_path / "store"
    with opened(root) as store:
        put_all(store, *(message(body=b"%d" % i, KEYS=f"k{i}") for i in range(50)))
        for look in (verify, stat, lambda *args: next(dump(*args))):
            with pytest.raises(StoreLocked):
                look(root, small_settings())
        report = verify(root, small_settings(), read_only=True)
        assert report.is_live and report.is_unclean
        assert report.findings == []
        assert stat(root, read_only=True).records == 50
        assert [one.body for one in dump(root, key="k7", read_only=True)] == [b"7"]
    report = verify(root, small_settings())
    assert report.is_sound and not report.is_live and not report.is_unclean
    assert report.checked["records"] == 50


def test_a_store_that_was_killed_says_so(tmp_path):
    with opened(tmp_path / "store") as store:
        put_all(store, message())
        root = copy_store(tmp_path / "store", tmp_path / "copy")
    assert verify(root, small_settings()).is_unclean


def test_no_store(tmp_path):
    with pytest.raises(StoreError, match=r"is not a store: there is no .*/commitlog: name its storePathRootDir"):
        verify(tmp_path)


def test_an_empty_store_is_sound(tmp_path):
    (tmp_path / "commitlog").mkdir()
    assert verify(tmp_path).is_sound
    assert (stat(tmp_path).records, stat(tmp_path).max_offset) == (0, 0)
    assert list(dump(tmp_path)) == []


def test_many_index_files_cost_what_one_does(tmp_path, monkeypatch):
    """A run of records is compared only with the files that have entries of it."""
    work: Counter[str] = Counter()
    compare, opening = IndexComparison.compare, DerivedFiles._comparison

    def counted(self, arrivals, keys):
        work["compared"] += 1
        compare(self, arrivals, keys)

    def opened_one(self, path):
        work["opened"] += 1
        return opening(self, path)

    monkeypatch.setattr(IndexComparison, "compare", counted)
    monkeypatch.setattr(DerivedFiles, "_comparison", opened_one)
    found = {}
    for entry_count in (500, 11):
        work.clear()
        sizes = small_settings(hash_slot_count=100, index_entry_count=entry_count)
        root = tmp_path / str(entry_count)
        with opened(root, sizes) as store:
            put_all(store, *(message(body=b"%03d" % i, KEYS=f"k{i}") for i in range(400)))
        report = verify(root, sizes)
        assert (report.is_sound, report.checked["index entries"]) == (True, 400)
        found[len(list((root / "index").iterdir()))] = dict(work)
    (one, first), (many, later) = sorted(found.items())
    assert (one, many) == (1, 40)
    assert first["opened"] == 2, "one read to compare the entries, one to follow the chains"
    assert later["opened"] == 2 * many
    assert later["compared"] <= first["compared"] + many


@pytest.mark.parametrize("topic", [SCHEDULE_TOPIC, TIMER_TOPIC])
@pytest.mark.parametrize("name", ["REAL_TOPIC", "REAL_QID", "TIMER_OUT_MS"])
def test_messages_that_cannot_be_delivered_when_they_are_due_are_found(tmp_path, topic, name):
    """A broker drops such messages, and no CRC covers their properties."""
    needed = {"REAL_TOPIC": "T", "REAL_QID": "0", "TIMER_OUT_MS": "1800000000000"}
    with opened(tmp_path, small_settings()) as store:
        put_all(store, message(topic, **needed))
        at = put_all(store, message(topic, **needed))[0].physical_offset
    assert verify(tmp_path, small_settings()).is_sound
    path = tmp_path / "commitlog" / f"{0:020d}"
    with path.open("r+b") as file:
        file.seek(path.read_bytes().rindex(name.encode()))
        file.write(b"X")
    found = [(one.kind, one.position, one.expected, one.found) for one in verify(tmp_path, small_settings()).findings]
    is_needed = topic == TIMER_TOPIC or name != "TIMER_OUT_MS"
    assert found == ([(Kind.PROPERTIES, at, f"a {name} in {topic}", "none")] if is_needed else [])


def findings_of(root):
    return [(one.kind, Path(one.path).name, one.position) for one in verify(root, small_settings()).findings]


@pytest.mark.parametrize("name", ["logstart", "queueends", "indexfiles"])
def test_notes_that_cannot_be_read_are_found(tmp_path, name):
    with opened(tmp_path, small_settings()) as store:
        put_all(store, *(message(KEYS="k") for _ in range(40)))
    assert (tmp_path / name).exists() and not findings_of(tmp_path)
    content = (tmp_path / name).read_bytes()
    for changed in (content[:-1], b"", bytes(len(content)), content.replace(b":", b";", 1)):
        (tmp_path / name).write_bytes(changed)
        assert findings_of(tmp_path) == [(Kind.CONFIG, name, 0)]
    repair(tmp_path, small_settings(), is_dry_run=False)
    assert not (tmp_path / name).exists() and not findings_of(tmp_path)


@pytest.mark.parametrize("name", ["topics.json", "subscriptionGroup.json", "consumerOffset.json", "delayOffset.json"])
def test_a_configuration_file_that_holds_anothers_content_or_left_its_backup_alone_is_found(tmp_path, name):
    with opened(tmp_path, small_settings()) as store:
        put_all(store, message())
    (path := tmp_path / "config" / name).parent.mkdir(exist_ok=True)
    path.write_text('{"filterDataByTopic":{}}')
    assert findings_of(tmp_path) == [(Kind.CONFIG, name, 0)]
    path.write_text('{"dataVersion":{"counter":1}}')
    assert findings_of(tmp_path) == []
    path.rename(path.with_name(path.name + ".bak"))
    assert findings_of(tmp_path) == [(Kind.FILE_MISSING, name, 0)]
    repair(tmp_path, small_settings(), is_dry_run=False)
    assert path.exists() and findings_of(tmp_path) == []


def test_bytes_in_a_file_behind_the_end_of_an_unclean_log_are_found(tmp_path):
    """A start sets them aside."""
    with opened(tmp_path, small_settings()) as store:
        put_all(store, *(message() for _ in range(40)))
    newest = max(int(path.name) for path in (tmp_path / "commitlog").iterdir())
    later = tmp_path / "commitlog" / f"{newest + 4096:020d}"
    later.write_bytes(bytes(4096))
    (tmp_path / "abort").touch()
    assert findings_of(tmp_path) == []
    with later.open("r+b") as file:
        file.seek(7)
        file.write(b"x")
    assert findings_of(tmp_path) == [(Kind.RECORD, later.name, 7)]
