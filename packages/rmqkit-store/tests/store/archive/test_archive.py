"""Sealed segments: their contents, reads of them, and object stores that refuse or change them."""

from __future__ import annotations

import gc
import io
import mmap
import shutil
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyarrow import parquet

from rmqkit.errors import ExtraMissing, StoreError
from rmqkit.protocol.properties import encoded_tags_code
from rmqkit.protocol.record import decode_record
from rmqkit.store.archive.archive import CONTENT_BYTES, FETCH_BYTES, Archive, _directory_bytes, segment_name
from rmqkit.store.archive.places import Folder, place_of, shown
from rmqkit.store.archive.seal import Work, main, seal
from rmqkit.store.archive.segment import SegmentFile, rebuild
from rmqkit.store.archive.writing import GROUP_BYTES, write_segment
from rmqkit.store.reader import GetResult
from rmqkit.store.settings import StoreSettings
from tests.golden_stores import unpack_golden
from tests.store.stores import message, opened

STORES = ["5.4.0", "4.9.4", "5.4.0-retained", "5.4.0-ipv6-crc"]


def log_files(root: Path) -> list[Path]:
    return sorted((root / "commitlog").iterdir())


def sealed(root: Path, place: Folder) -> Archive:
    """Return the archive of all files of a store's log."""
    for path in log_files(root):
        seal(Work(str(path), int(path.name), "", "", with_tags=False), place)
    archive = Archive(place)
    assert archive.refresh() == len(log_files(root))
    return archive


@pytest.fixture(scope="module", params=STORES)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Archive]:
    folder = tmp_path_factory.mktemp("archive")
    root = unpack_golden(request.param, folder).root
    return root, sealed(root, Folder(folder / "archive"))


def records_of(root: Path) -> dict[int, bytes]:
    """Return all records of the log by offset, found by their sizes alone."""
    found = {}
    for path in log_files(root):
        log, position = path.read_bytes(), 0
        while position < len(log) and log[position + 4 : position + 7] == b"\xda\xa3\x20":
            size = int.from_bytes(log[position : position + 4], "big")
            found[int(path.name) + position] = log[position : position + size]
            position += size
    return found


def test_every_record_of_an_apache_log_is_read_back(golden):
    root, archive = golden
    expected = records_of(root)
    assert len(expected) > 20
    for physical_offset, record in expected.items():
        assert archive.record_at(physical_offset) == record
        assert archive.record_at(physical_offset + 1) is None


def test_a_queue_is_read_back_in_order(golden):
    root, archive = golden
    by_queue: dict[tuple[str, int], list[bytes]] = {}
    for content in records_of(root).values():
        record = decode_record(content)
        if record.sys_flag & 0xC not in (0x4, 0xC):
            by_queue.setdefault((record.topic, record.queue_id), []).append(content)
    for (topic, queue_id), contents in by_queue.items():
        numbers = [decode_record(one).queue_offset for one in contents]
        assert archive.min_offset(topic, queue_id, 1 << 40) == numbers[0]
        found, following = [], numbers[0]
        while archive.has(topic, queue_id, following):
            part = archive.get(topic, queue_id, following, count_max=3, bytes_max=1 << 20)
            assert 0 < len(part.records) <= 3
            found += map(bytes, part.records)
            following = part.next_begin_offset
        assert found == contents


def test_a_log_file_is_made_again(golden):
    root, archive = golden
    for path in log_files(root):
        name = segment_name(int(path.name))
        place = archive.place
        segment = SegmentFile(name, lambda at, size: place.read(name, at, size), place.names()[name])  # noqa: B023
        end = segment.directory.records_end - segment.directory.start
        assert rebuild(segment)[:end] == path.read_bytes()[:end]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Archive]:
    folder = tmp_path_factory.mktemp("plain")
    root = unpack_golden("5.4.0", folder).root
    return root, sealed(root, Folder(folder / "archive"))


def test_tags_are_looked_at(plain):
    _, archive = plain
    records = archive.get("GoldPlain", 0, 0, count_max=1000, bytes_max=1 << 30).records
    tags = [decode_record(one).properties.partition(b"TAGS\x01")[2].partition(b"\x02")[0] for one in records]
    wanted = next(one for one in tags if one)
    codes = frozenset([encoded_tags_code(wanted)])
    found = archive.get("GoldPlain", 0, 0, count_max=1000, bytes_max=1 << 30, codes=codes, tags_code=encoded_tags_code)
    assert 0 < len(found.records) == tags.count(wanted)
    assert found.next_begin_offset == len(records)


def test_a_message_is_found_by_its_key_and_by_time(plain):
    root, archive = plain
    by_key = [
        record
        for record in map(decode_record, records_of(root).values())
        if record.topic == "GoldKey" and record.queue_id == 0
    ]
    for record in by_key[:5]:
        unique_key = record.properties.partition(b"UNIQ_KEY\x01")[2].partition(b"\x02")[0].decode()
        found = archive.query("GoldKey", unique_key, 32, 0, 1 << 60, bytes_max=1 << 20)
        assert [decode_record(one).physical_offset for one in found] == [record.physical_offset]
        assert archive.query("GoldKey", unique_key, 32, 0, record.store_timestamp - 1, bytes_max=1 << 20) == []
        assert archive.query("GoldPlain", unique_key, 32, 0, 1 << 60, bytes_max=1 << 20) == []
        first = next(one.queue_offset for one in by_key if one.store_timestamp >= record.store_timestamp)
        assert archive.offset_by_time("GoldKey", 0, record.store_timestamp) == first
    assert archive.offset_by_time("GoldKey", 0, 1 << 60) is None
    assert archive.offset_by_time("NoTopic", 0, 0) is None


def test_bytes_that_are_no_record_are_kept(tmp_path):
    root = unpack_golden("5.4.0", tmp_path).root
    path = log_files(root)[0]
    log = bytearray(path.read_bytes())
    size = int.from_bytes(log[:4], "big")
    log[size + 4] ^= 0xFF  # the second record is no longer valid
    path.write_bytes(log)
    place = Folder(tmp_path / "archive")
    assert seal(Work(str(path), 0, "", "", with_tags=False), place).other_bytes == int.from_bytes(
        log[size : size + 4], "big"
    )
    name = segment_name(0)
    segment = SegmentFile(name, lambda at, count: place.read(name, at, count), place.names()[name])
    end = segment.directory.records_end
    assert rebuild(segment)[:end] == log[:end]


# ---- places, and what goes wrong with them


@contextmanager
def one_segment(tmp_path: Path) -> Iterator[tuple[Path, Archive]]:
    root = unpack_golden("4.9.4", tmp_path).root
    for path in log_files(root)[1:]:
        path.unlink()
    yield tmp_path / "archive" / segment_name(0), sealed(root, Folder(tmp_path / "archive"))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_changed_byte_is_passed_over_with_an_error_and_nothing_wrong_is_read(tmp_path, share, caplog):
    with one_segment(tmp_path) as (path, archive):
        before = {queue: self_read(archive, *queue) for queue in list(archive._queues)}
        content = bytearray(path.read_bytes())
        content[int(len(content) * share)] ^= 0x55
        path.write_bytes(content)
        again, damaged = Archive(archive.place), 0
        if again.refresh() == 0:
            assert segment_name(0) in caplog.text
            return  # its directory was changed: the segment counts as missing
        for (topic, queue_id), records in before.items():
            caplog.clear()
            found = self_read(again, topic, queue_id)
            lost = [decode_record(one).queue_offset for one in records if one not in found]
            assert [one for one in records if one in found] == found
            if lost:
                said = f"messages {lost[0]} to {lost[-1]} of queue {queue_id} of topic {topic} are skipped"
                assert said in caplog.text and segment_name(0) in caplog.text
                damaged += 1
        assert damaged or share >= 0.9  # tables and the footer of Parquet, which this read does not use


def test_no_flipped_bit_makes_wrong_bytes(tmp_path, caplog):
    with one_segment(tmp_path) as (path, archive):
        before = {queue: self_read(archive, *queue) for queue in list(archive._queues)}
        pristine = path.read_bytes()
        for position in range(0, len(pristine), len(pristine) // 80):
            caplog.clear()
            path.write_bytes(
                pristine[:position] + bytes([pristine[position] ^ 1 << position % 8]) + pristine[position + 1 :]
            )
            again = Archive(archive.place)
            found = {queue: self_read(again, *queue) for queue in before} if again.refresh() else {}
            for queue, records in found.items():
                assert set(records) <= set(before[queue]), position
            assert found == before or segment_name(0) in caplog.text, position


def self_read(archive: Archive, topic: str, queue_id: int) -> list[bytes]:
    return list(map(bytes, archive.get(topic, queue_id, 0, count_max=10_000, bytes_max=1 << 30).records))


@pytest.mark.parametrize("kept", [0, 7, 40, 20_000])
def test_a_segment_that_was_cut_counts_as_not_there(tmp_path, kept, caplog):
    with one_segment(tmp_path) as (path, archive):
        path.write_bytes(path.read_bytes()[:kept])
        again = Archive(archive.place)
        assert again.refresh() == 0
        assert f"{segment_name(0)} " in caplog.text and "the log from 0 on is missing where" in caplog.text
        assert again.covered(0) == 0


def test_the_archive_of_another_log_is_refused(tmp_path):
    with one_segment(tmp_path) as (_, archive):
        own = archive.record_at(0)
        archive.check(lambda start: own, 1 << 20)
        with pytest.raises(StoreError, match="belongs to another store"):
            archive.check(lambda start: bytes(100), 1 << 20)
        with pytest.raises(StoreError, match="reaches to 131072 and the log ends at 1000"):
            archive.check(lambda start: None, 1000)


def test_what_is_covered_ends_at_the_first_gap(plain, tmp_path):
    _, archive = plain
    assert archive.covered(0) == 4 * 131072
    shutil.copytree(str(archive.place), tmp_path / "copy")
    (tmp_path / "copy" / segment_name(131072)).unlink()
    with_gap = Archive(Folder(tmp_path / "copy"))
    with_gap.refresh()
    assert (with_gap.covered(0), with_gap.covered(131072), with_gap.covered(262144)) == (131072, 131072, 4 * 131072)
    shutil.copy(Path(str(archive.place)) / segment_name(131072), tmp_path / "copy")
    assert with_gap.refresh() == 1
    assert with_gap.covered(0) == 4 * 131072
    assert self_read(with_gap, "GoldBig", 1) == self_read(archive, "GoldBig", 1)


def test_a_write_that_fails_leaves_nothing(tmp_path):
    place = Folder(tmp_path / "archive")

    def write() -> None:
        with place.writing("x") as out:
            out.write(b"half")
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        write()
    assert place.names() == {}
    assert list((tmp_path / "archive").iterdir()) == []


def test_the_process_says_in_one_line_what_went_wrong(tmp_path, capfdbinary):
    work = b'{"path":"%s","start":0,"archive":"%s","below":"b","with_tags":false}\n'
    assert main(io.BytesIO(work % (bytes(tmp_path / "missing"), bytes(tmp_path)))) == 1
    assert b"FileNotFoundError" in capfdbinary.readouterr().out


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("s3://key:secret@bucket/a?endpoint_override=x", "s3://bucket/a"),
        ("/data/archive", "/data/archive"),
    ],
)
def test_nobody_is_shown_the_credentials_of_an_address(setting, said):
    assert shown(setting) == said


def test_a_place_of_no_known_kind_is_refused():
    with pytest.raises(StoreError, match="is not an address of an archive"):
        place_of("nothing://x/y", "broker-a")


@pytest.mark.parametrize("package", ["numpy", "pyarrow"])
@pytest.mark.parametrize("setting", ["/mnt/archive", "s3://key:secret@bucket/a?region=x"])
def test_an_archive_without_pyarrow_is_refused_in_one_line(setting, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    said = rf"an archive at {shown(setting)} needs {package}, which is not installed: pip install .*\[arrow\]'?"
    with pytest.raises(ExtraMissing, match=rf"^{said}$"):
        place_of(setting, "broker-a")


def test_an_address_of_pyarrow_keeps_segments_like_a_folder(tmp_path):
    root = unpack_golden("5.4.0", tmp_path).root
    folder, address = Folder(tmp_path / "folder/broker-a"), place_of(f"file://{tmp_path}/objects", "broker-a")
    by_folder, by_address = sealed(root, folder), sealed(root, address)
    assert folder.names() == address.names()
    for queue in by_folder._queues:
        assert self_read(by_folder, *queue) == self_read(by_address, *queue)


def test_an_empty_file_makes_an_empty_segment(tmp_path):
    (tmp_path / "log").write_bytes(bytes(1024))
    with (tmp_path / "log").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as log:
        directory = write_segment(log, 0, io.BytesIO(), with_tags=False)
    assert (directory.record_count, directory.other_bytes) == (0, 1024)


# ---------------------------------------------------------------- memory


def reopened(place: Folder) -> Archive:
    archive = Archive(place)
    archive.refresh()
    return archive


def written(folder: Path, count: int, *, queues: int = 1, body: bytes = b"", file_bytes: int = 1 << 20) -> Archive:
    """Return the archive of a log of new messages in several queues in turn, without the last file."""
    with opened(folder / "store", StoreSettings(commit_log_file_bytes=file_bytes)) as store:
        for number in range(count):
            store.put(message(topic="T", queue_id=number % queues, body=body, KEYS="same"))
        store.flusher.flush_log()
        place = Folder(folder / "archive")
        for file in store.log.queue.files[:-1]:
            seal(Work(str(file.path), file.start, "", "", with_tags=False), place)
    return reopened(place)


def held_bytes(work: Callable[[], object]) -> tuple[int, int]:
    """Return the growth of Python's memory during ``work``: at the end, and the maximum."""
    gc.collect()
    tracemalloc.start()
    try:
        kept = work()
        gc.collect()
        grown = tracemalloc.get_traced_memory()
        del kept
    finally:
        tracemalloc.stop()
    return grown


def test_what_compresses_well_is_fetched_by_what_it_holds(tmp_path):
    archive = written(tmp_path, 340, body=bytes(100_000), file_bytes=32 << 20)
    assert max(archive.place.names().values()) < FETCH_BYTES // 4, "each object is smaller than one request"
    _, most = held_bytes(lambda: archive.get("T", 0, 0, count_max=2, bytes_max=1 << 20))
    assert CONTENT_BYTES // 2 < archive._content_bytes <= CONTENT_BYTES
    assert most < CONTENT_BYTES + (2 << 20)


@pytest.fixture(scope="module")
def small_records(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Return a place with segments of small records, more than three blocks of the largest size."""
    place = written(tmp_path_factory.mktemp("small"), 56_000).place
    assert isinstance(place, Folder)
    return place


def test_a_result_holds_its_records_and_no_block(small_records, monkeypatch):
    monkeypatch.setattr("rmqkit.store.archive.archive.CACHE_BYTES", 0)
    archive = reopened(small_records)
    end = archive._queues["T", 0].ends[-1]
    few = lambda record: int.from_bytes(record[20:28]) % 1000 == 0  # noqa: E731 - the queue offset

    def read_all() -> list[GetResult]:
        found, offset = [], 0
        while offset < end:
            found.append(archive.get("T", 0, offset, count_max=1, bytes_max=1 << 18, accept=few))
            offset = found[-1].next_begin_offset
        return found

    kept, _ = held_bytes(read_all)
    assert sum(one.end - one.start for one in archive._segments) > 3 * GROUP_BYTES
    assert kept < GROUP_BYTES + (1 << 18), "each block has a requested record, and the cache retains one block"


def test_the_cache_counts_the_numbers_of_small_records(small_records, monkeypatch):
    monkeypatch.setattr("rmqkit.store.archive.archive.CACHE_BYTES", 2 << 20)
    archive = reopened(small_records)
    assert sum(one.end - one.start for one in archive._segments) > 4 << 20

    def read_all() -> None:
        offset = 0
        while archive.has("T", 0, offset):
            offset = archive.get("T", 0, offset, count_max=1000, bytes_max=1 << 18).next_begin_offset

    kept, _ = held_bytes(read_all)
    assert kept < (2 << 20) + _directories_bytes(archive) + (64 << 10)


def test_directories_are_kept_by_what_they_take(tmp_path, monkeypatch):
    archive = written(tmp_path, 4000, queues=400, file_bytes=96 << 10)
    names = sorted(archive.place.names())
    assert len(names) >= 4

    def open_all() -> None:
        for known in archive._segments:
            archive._opened(known)

    kept, _ = held_bytes(open_all)
    assert sorted(archive._open) == names
    assert kept * 0.7 < _directories_bytes(archive) == archive._open_bytes < kept * 2
    monkeypatch.setattr("rmqkit.store.archive.archive.DIRECTORY_BYTES", archive._open_bytes // 2)
    archive = reopened(archive.place)
    kept_now, _ = held_bytes(open_all)
    assert kept_now < kept * 0.7 and names[-1] in archive._open and names[0] not in archive._open


def _directories_bytes(archive: Archive) -> int:
    return sum(_directory_bytes(*one) for one in archive._open.values())


def test_what_a_query_answers_has_a_bound_in_bytes(tmp_path):
    archive = written(tmp_path, 60, body=bytes(100_000))
    found = archive.query("T", "same", 32, 0, 1 << 60, bytes_max=350_000)
    assert len(found) == 3
    (only,) = archive.query("T", "same", 32, 0, 1 << 60, bytes_max=10)
    assert len(only) > 100_000, "a request for one long message returns it"


def test_a_read_ends_with_its_segment(tmp_path):
    archive = written(tmp_path, 30, body=bytes(100_000))
    ends = list(archive._queues["T", 0].ends)
    assert len(ends) >= 2
    for number, end in enumerate(ends):
        assert archive.segment_of("T", 0, end - 1) == archive._segments[number].name
        found = archive.get("T", 0, end - 1, count_max=32, bytes_max=1 << 30)
        assert (len(found.records), found.next_begin_offset) == (1, end)
    assert archive.segment_of("T", 0, ends[-1]) == archive.segment_of("none", 0, 0) == ""


def test_small_queues_share_a_group_and_a_large_one_has_several(tmp_path):
    with opened(tmp_path / "store", StoreSettings(commit_log_file_bytes=8 << 20)) as store:
        for number in range(9000):
            store.put(message(topic="Large", queue_id=0, body=bytes(800)))
            store.put(message(topic=f"Small{number % 500}", queue_id=0, body=b"%d" % number))
        store.flusher.flush_log()
        file = store.log.queue.files[0]
        place = Folder(tmp_path / "archive")
        seal(Work(str(file.path), file.start, "", "", with_tags=False), place)
    (name,) = place.names()
    segment = SegmentFile(name, lambda at, size: place.read(name, at, size), place.names()[name])
    large, *small = [queue for queue in segment.directory.queues if queue.topic]
    blocks = segment.blocks()
    groups = {block.position for block in blocks[large.block : large.block_end]}
    assert (large.topic, len(small)) == ("Large", 500)
    assert len(groups) == large.block_end - large.block >= 4
    assert len({block.position for block in blocks[small[0].block :]}) <= 2
    assert parquet.ParquetFile(Path(str(place)) / name).num_row_groups == len({block.position for block in blocks})
    archive = Archive(place)
    archive.refresh()
    for queue in (large, small[0], small[-1]):
        found = archive.get(queue.topic, 0, queue.first, count_max=3, bytes_max=1 << 20).records
        assert [decode_record(one).topic for one in found] == [queue.topic] * 3


def test_engines_find_damaged_pages_too(tmp_path):
    with one_segment(tmp_path) as (path, archive):
        content = bytearray(path.read_bytes())
        found = parquet.read_metadata(path).row_group(0)
        body = found.column(next(i for i in range(found.num_columns) if found.column(i).path_in_schema == "body"))
        content[body.data_page_offset + body.total_compressed_size // 2] ^= 1
        path.write_bytes(content)
        with pytest.raises(OSError, match="CRC"):
            parquet.ParquetFile(path, page_checksum_verification=True).read_row_group(0)
        assert archive.segment_count == 1
