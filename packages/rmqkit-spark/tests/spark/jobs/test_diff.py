"""Two stores differ where they were made to, and nowhere else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from rmqkit.arrow.splits import Split
from rmqkit.errors import StoreError
from rmqkit.spark.jobs import diff as diff_module
from rmqkit.spark.jobs.diff import Block, ConfigDifference, Diff, QueueDifference, compare_block, diff, equal_end, pack
from rmqkit.spark.source.store import store_options, store_splits
from tests.golden_stores import unpack_golden
from tests.spark.messages import MakeRecord, record_at, segment_of

BLOCK: Block = ("t", 0, 0)


def _log(root: Path, makers: list[MakeRecord], base_offset: int = 0) -> Path:
    (root / "commitlog").mkdir(parents=True, exist_ok=True)
    (root / "commitlog" / f"{base_offset:020d}").write_bytes(segment_of(makers, base_offset=base_offset))
    return root


def _message(queue_offset: int, **changed: Any) -> MakeRecord:
    return lambda at: record_at(at, queue_offset=queue_offset, **changed)


def _splits(root: Path, split_bytes: str = "128m") -> list[Split]:
    return store_splits(store_options({"path": str(root), "splitBytes": split_bytes}))


def _entries(digests: dict[int, int]) -> bytes:
    """Messages of a block: queue offset → digest, each lying at ten times its offset."""
    rows = [(offset, digest, 10 * offset) for offset, digest in digests.items()]
    return np.array(rows, diff_module.ENTRY).tobytes()


def _packed(root: Path, *, content_only: bool = False) -> dict[Any, Any]:
    found: dict[Any, bytes] = {}
    for split in _splits(root):
        for block, value in pack(split, content_only=content_only):
            if block is not None:
                found[block] = found.get(block, b"") + value
    return found


# ---------------------------------------------------------------- without Spark


def test_ranges_of_messages_are_reported_by_what_happened_to_them():
    left = _entries({0: 1, 1: 2, 2: 3, 5: 4, 6: 5})
    right = _entries({1: 2, 2: 9, 5: 8, 6: 5, 7: 1, 8: 1})
    assert list(compare_block(BLOCK, [left], [right])) == [
        ("changed", "t", 0, 2, 2, 1, 20, 20),
        ("changed", "t", 0, 5, 5, 1, 50, 50),
        ("only left", "t", 0, 0, 0, 1, 0, None),
        ("only right", "t", 0, 7, 8, 2, None, 70),
    ]


messages = st.dictionaries(st.integers(0, 40), st.integers(0, 2))


@given(messages, messages)
def test_ranges_cover_exactly_what_differs(left, right):
    found: dict[str, set[int]] = {"changed": set(), "only left": set(), "only right": set()}
    for name, _, _, first, last, count, *_ in compare_block(BLOCK, [_entries(left)], [_entries(right)]):
        assert count == last - first + 1
        found[name] |= set(range(first, last + 1))
    common = left.keys() & right.keys()
    assert found["changed"] == {one for one in common if left[one] != right[one]}
    assert found["only left"] == left.keys() - right.keys()
    assert found["only right"] == right.keys() - left.keys()


def test_of_very_many_ranges_the_last_ones_are_one():
    rows = list(compare_block(BLOCK, [_entries(dict.fromkeys(range(0, 2000, 2), 1))], []))
    assert len(rows) == diff_module.RANGES_MAX + 1
    assert sum(row[5] for row in rows) == 1000
    assert rows[-1][3:6] == (2 * diff_module.RANGES_MAX, 1998, 1000 - diff_module.RANGES_MAX)


def test_the_last_record_of_a_queue_offset_counts():
    twice = np.array([(3, 7, 100), (3, 8, 50)], diff_module.ENTRY).tobytes()
    assert list(compare_block(BLOCK, [twice], [_entries({3: 7})])) == []
    assert [row[0] for row in compare_block(BLOCK, [twice], [_entries({3: 8})])] == ["changed"]


@pytest.mark.parametrize("at", [0, 1, 88, 200, -1])
def test_the_first_byte_that_differs_is_named(tmp_path, at):
    makers = [_message(n) for n in range(20)]
    ours, theirs = _log(tmp_path / "a", makers), _log(tmp_path / "b", makers)
    (split,), others = _splits(ours), _splits(theirs, "300")
    assert len(others) > 3
    assert equal_end(split, others) == split.high
    path = theirs / "commitlog" / f"{0:020d}"
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    assert equal_end(split, others) == at % len(content)


def test_bytes_that_the_other_log_has_not_are_not_equal(tmp_path):
    makers = [_message(n) for n in range(20)]
    (split,) = _splits(_log(tmp_path / "a", makers))
    others = _splits(_log(tmp_path / "b", makers), "300")
    assert equal_end(split, others[:-1]) == others[-1].low
    assert equal_end(split, others[1:]) == 0
    assert equal_end(split, []) == 0


def test_a_message_is_the_same_wherever_it_lies(tmp_path):
    makers = [_message(n, queue_id=n % 2, body=b"%d" % n) for n in range(6)]
    one, other = _packed(_log(tmp_path / "a", makers)), _packed(_log(tmp_path / "b", makers, base_offset=4096))
    assert one.keys() == other.keys() == {("orders", 0, 0), ("orders", 1, 0)}
    for block in one:
        assert list(compare_block(block, [one[block]], [other[block]])) == []


@pytest.mark.parametrize(
    ("changed", "is_content"),
    [
        ({"body": b"other"}, True),
        ({"properties": b"TAGS\x01other\x02"}, True),
        ({"store_timestamp": 1}, False),
        ({"reconsume_times": 3}, False),
        ({"flag": 3}, False),
    ],
)
def test_a_changed_field_is_a_changed_message(tmp_path, changed, is_content):
    ours, theirs = _log(tmp_path / "a", [_message(0)]), _log(tmp_path / "b", [_message(0, **changed)])
    for content_only in (False, True):
        one, other = (_packed(root, content_only=content_only)["orders", 1, 0] for root in (ours, theirs))
        found = [row[0] for row in compare_block(BLOCK, [one], [other])]
        assert found == ([] if content_only and not is_content else ["changed"])


def test_large_queue_offsets_fall_into_blocks_of_their_own(tmp_path):
    root = _log(tmp_path, [_message(n) for n in (0, 65_535, 65_536, 1 << 40)])
    assert {block[2] for block in _packed(root)} == {0, 1, 1 << 24}


def test_what_is_left_without_equal_ranges():
    splits = [Split("f", 1000, 0, 100), Split("f", 1000, 100, 300)]
    assert diff_module.without(splits, []) == splits
    assert diff_module.without(splits, [(1000, 1100), (1100, 1300)]) == []
    assert diff_module.without(splits, [(1050, 1150), (1200, 1250)]) == [
        Split("f", 1000, 0, 50),
        Split("f", 1000, 150, 200),
        Split("f", 1000, 250, 300),
    ]


# ---------------------------------------------------------------- with Spark


def _rows(found: Diff) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in found.differences.collect()]


@pytest.mark.spark
def test_a_golden_store_and_what_was_done_to_its_copy(spark: SparkSession, tmp_path):
    ours = unpack_golden("5.4.0", tmp_path / "a").root
    theirs = tmp_path / "b"
    shutil.copytree(ours, theirs)
    same = diff(spark, str(ours), str(theirs))
    assert same.is_equal
    assert (same.equal_begin, same.equal_end) == (0, same.left_end)
    assert (same.left_end, same.segments, same.notes) == (same.right_end, [], [])
    assert _rows(same) == []

    third = theirs / "commitlog" / f"{131072:020d}"  # full: its records fill it up to a blank
    content = bytearray(third.read_bytes())
    content[1000] ^= 1
    third.write_bytes(content)
    (theirs / "commitlog" / f"{393216:020d}").unlink()
    shutil.rmtree(theirs / "consumequeue/GoldPlain")
    topics = (theirs / "config/topics.json").read_text()
    (theirs / "config/topics.json").write_text(topics.replace('"readQueueNums":18', '"readQueueNums":19'))
    found = diff(spark, str(ours), str(theirs), {"splitBytes": "100k"})
    assert not found.is_equal
    assert (found.equal_begin, found.equal_end, found.changed, found.only_right) == (0, 131072 + 1000, 1, 0)
    assert found.only_left == 21
    assert sum(row[5] for row in _rows(found) if row[0] == "only left") == 21
    (changed,) = [row for row in _rows(found) if row[0] == "changed"]
    assert changed[1:6] == ("GoldBig", 1, changed[3], changed[3], 1)
    assert changed[6] == changed[7] <= 131072 + 1000 < changed[6] + 5000
    assert QueueDifference("GoldPlain", 0, 0, 233, None, None) in found.queues
    assert found.config == [
        ConfigDifference("topics.json", "topicConfigTable/SCHEDULE_TOPIC_XXXX/readQueueNums", "18", "19")
    ]


@pytest.mark.spark
def test_logs_that_part_are_compared_by_message(spark: SparkSession, tmp_path):
    plain = [_message(n, body=b"%d" % n) for n in range(50)]
    ours = _log(tmp_path / "a", plain)
    theirs = _log(tmp_path / "b", [*plain[:20], _message(0, topic=b"extra"), *plain[20:]])
    found = diff(spark, str(ours), str(theirs), {"splitBytes": "1k"})
    assert (found.only_left, found.only_right, found.changed) == (0, 1, 0)
    assert found.equal_end < found.left_end < found.right_end
    assert [row[:6] for row in _rows(found)] == [("only right", "extra", 1, 0, 0, 1)]
    assert found.notes[0].startswith("queues not compared: ")


@pytest.mark.spark
def test_a_log_that_lost_its_oldest_file_is_equal_from_there(spark: SparkSession, tmp_path):
    ours = unpack_golden("4.9.4", tmp_path / "a").root
    theirs = tmp_path / "b"
    shutil.copytree(ours, theirs)
    (theirs / "commitlog" / f"{0:020d}").unlink()
    found = diff(spark, str(ours), str(theirs))
    assert (found.equal_begin, found.equal_end) == (131072, found.left_end)
    assert (found.only_right, found.changed) == (0, 0)
    assert found.only_left > 0
    assert {row[0] for row in _rows(found)} == {"only left"}


@pytest.mark.spark
def test_mistakes_are_raised_as_they_are(spark: SparkSession, tmp_path):
    with pytest.raises(StoreError, match="commitlog does not exist"):
        diff(spark, str(tmp_path), str(tmp_path))
