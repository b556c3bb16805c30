"""Queue and index files rebuilt from the log: they equal those of real brokers byte for byte."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rmqkit.errors import StoreLocked, StoreMismatch
from rmqkit.protocol.record import iter_records
from rmqkit.store.offline.check import verify
from rmqkit.store.offline.rebuild import rebuild
from rmqkit.store.queues.consume_queue import BLANK_ENTRY
from tests.golden_stores import unpack_golden
from tests.store.stores import golden_settings, message, opened, put_all, read_all, small_settings, tree

WITH_BITMAPS = "GoldSql"
"""The topic with filters: bitmaps are not determined by the log, nor what lies behind the first one (store.md §11)."""


def contents(folder: Path) -> list[str]:
    """Return the contents of a directory's files in the order of their names, without the named files."""
    return [digest for digest in tree(folder).values() if digest != "directory"]


@pytest.mark.parametrize(("name", "index_tags"), [("5.4.0", "true"), ("4.9.4", "false"), ("5.4.0-ipv6-crc", "true")])
def test_files_of_real_brokers_come_out_byte_for_byte(name, index_tags, tmp_path):
    golden = unpack_golden(name, tmp_path)
    before = tree(golden.root)
    indexes = contents(golden.root / "index")
    for lost in ("consumequeue", "consumequeue_ext", "batchconsumequeue", "index"):
        shutil.rmtree(golden.root / lost, ignore_errors=True)
    sizes = golden_settings(golden, indexTagsEnable=index_tags, enableConsumeQueueExt=str("ipv6" not in name).lower())
    made = rebuild(golden.root, sizes, queues=True, index=True)
    after = tree(golden.root)
    is_determined = [path for path in before if WITH_BITMAPS not in path and not path.startswith("index")]
    assert {path: after[path] for path in is_determined} == {path: before[path] for path in is_determined}
    assert contents(golden.root / "index") == indexes
    assert (made.index_files, made.records) == (len(indexes), verify(golden.root, sizes).checked["records"])
    assert verify(golden.root, sizes).is_sound
    assert not (golden.root / "rebuilt").exists()


def test_only_what_was_requested_is_rebuilt(tmp_path):
    golden = unpack_golden("5.4.0-ipv6-crc", tmp_path)
    sizes = golden_settings(golden)
    before = tree(golden.root)
    made = rebuild(golden.root, sizes, queues=False, index=True)
    assert (made.queues, made.index_files) == (0, 1)
    kept = [path for path in before if not path.startswith("index")]
    assert {path: tree(golden.root)[path] for path in kept} == {path: before[path] for path in kept}
    names = {path.name for path in (golden.root / "index").iterdir()}
    rebuild(golden.root, sizes, queues=True, index=False)
    assert {path.name for path in (golden.root / "index").iterdir()} == names
    assert verify(golden.root, sizes).is_sound


def test_sizes_are_taken_from_the_files(tmp_path):
    with opened(tmp_path / "s", small_settings(message_index_enable=False)) as store:
        put_all(store, *(message(queue_id=i % 2, TAGS="t") for i in range(45)))
    before = tree(tmp_path / "s" / "consumequeue")
    rebuild(tmp_path / "s", queues=True, index=False)
    assert tree(tmp_path / "s" / "consumequeue") == before
    golden = unpack_golden("5.4.0", tmp_path)
    with pytest.raises(StoreMismatch, match=r"give the broker.conf of the store"):
        rebuild(golden.root, queues=False, index=True)


def test_a_log_that_lost_its_first_files(tmp_path):
    with opened(tmp_path / "s") as store:
        put_all(store, *(message(body=bytes(300)) for _ in range(40)))
    segments = sorted((tmp_path / "s" / "commitlog").iterdir())
    first = next(iter_records(segments[1].read_bytes()))
    segments[0].unlink()
    rebuild(tmp_path / "s", small_settings(), queues=True, index=True)
    assert verify(tmp_path / "s", small_settings()).counts == {"file missing": 1}
    with opened(tmp_path / "s") as store:
        assert (store.min_offset("TopicTest", 0), store.max_offset("TopicTest", 0)) == (first.queue_offset, 40)
        assert len(read_all(store, "TopicTest")) == 40 - first.queue_offset
    assert verify(tmp_path / "s", small_settings()).is_sound, "the start logs the file"


def test_what_follows_a_lost_record_keeps_its_number(tmp_path):
    with opened(tmp_path / "s", small_settings(enable_consume_queue_ext=True)) as store:
        results = put_all(store, *(message(body=b"%d" % i) for i in range(20)))
    segment = tmp_path / "s" / "commitlog" / ("0" * 20)
    content = bytearray(segment.read_bytes())
    content[results[7].physical_offset + 4] ^= 1  # its magic
    segment.write_bytes(content)
    for has_ext in (True, False):
        sizes = small_settings(enable_consume_queue_ext=has_ext)
        made = rebuild(tmp_path / "s", sizes, queues=True, index=False)
        assert made.records == 19
        entries = (tmp_path / "s" / "consumequeue" / "TopicTest" / "0" / ("0" * 20)).read_bytes()
        assert entries[140:160] == BLANK_ENTRY
        report = verify(tmp_path / "s", sizes)
        assert report.counts == {"record": 1, "queue entry": 1}
    with opened(tmp_path / "s") as store:
        assert [one.body for one in read_all(store, "TopicTest")] == [b"%d" % i for i in range(20) if i != 7]


def test_a_store_in_use_is_refused_and_stays_as_it_is(tmp_path):
    with opened(tmp_path / "s") as store:
        put_all(store, *(message() for _ in range(5)))
        before = tree(tmp_path / "s" / "consumequeue")
        with pytest.raises(StoreLocked):
            rebuild(tmp_path / "s", small_settings(), queues=True, index=True)
        assert tree(tmp_path / "s" / "consumequeue") == before


def test_a_full_disk_leaves_the_old_files(tmp_path, monkeypatch):
    with opened(tmp_path / "s") as store:
        put_all(store, *(message(KEYS="k") for _ in range(50)))
    before = {path: digest for path, digest in tree(tmp_path / "s").items() if path != "lock"}

    def refuse(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rmqkit.store.log.mapped_file.MappedFile.sync", refuse)
    with pytest.raises(OSError, match="No space"):
        rebuild(tmp_path / "s", small_settings(), queues=True, index=True)
    assert {path: digest for path, digest in tree(tmp_path / "s").items() if path != "lock"} == before
