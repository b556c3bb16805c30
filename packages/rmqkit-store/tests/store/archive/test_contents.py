"""The contents of a segment: reads in runs have the same result as reads of single records."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.store.archive import contents, writing
from rmqkit.store.archive.contents import OTHER_BYTES, OTHER_RECORDS, Contents, contents_of
from tests.golden_stores import unpack_golden
from tests.spark.messages import MakeRecord, record_at, record_makers, segment_of


def shown(found: Contents) -> dict[str, object]:
    """Return all findings in plain types."""
    columns = {name: list(map(int, getattr(found, name))) for name in ("positions", "sizes", "numbers", "times")}
    groups = [(one.queue, one.first, one.end, list(map(int, one.parts))) for one in found.groups]
    facts = found.identity, found.records_end, found.other_bytes, found.record_count, found.first_time, found.last_time
    return {"facts": facts, "groups": groups, "keys": found.keys, **columns}


def assert_same(log: bytes, start: int, *, with_tags: bool) -> Contents:
    plain = contents._one_by_one(log, start, with_tags)
    assert shown(contents_of(log, start, with_tags=with_tags)) == shown(plain)
    return plain


def in_order(queues: list[int], topics: tuple[str, ...] = ("orders",)) -> list[MakeRecord]:
    """Return records with consecutive queue offsets in each queue."""
    made: list[MakeRecord] = []
    for index, queue_id in enumerate(queues):
        number = queues[:index].count(queue_id)
        topic = topics[queue_id % len(topics)].encode()
        made.append(
            lambda at, number=number, queue_id=queue_id, topic=topic: record_at(
                at, topic=topic, queue_id=queue_id, queue_offset=number, store_timestamp=1_700_000_000_000 + at
            )
        )
    return made


@pytest.mark.parametrize("name", ["5.4.0", "4.9.4", "5.4.0-retained", "5.4.0-ipv6-crc"])
@pytest.mark.parametrize("with_tags", [False, True])
def test_logs_of_apaches_brokers(name: str, with_tags: bool, tmp_path: Path) -> None:
    for path in sorted((unpack_golden(name, tmp_path).root / "commitlog").iterdir()):
        found = assert_same(path.read_bytes(), int(path.name), with_tags=with_tags)
        assert found.record_count and found.keys


def test_logs_of_apaches_brokers_are_read_in_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "_one_by_one", None)
    (path, *_) = sorted((unpack_golden("5.4.0", tmp_path).root / "commitlog").iterdir())
    assert contents_of(path.read_bytes(), int(path.name), with_tags=False).record_count


@given(
    st.lists(st.integers(0, 3), max_size=20), st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=4)
)
def test_damaged_logs(queues: list[int], octets: list[tuple[int, int]]) -> None:
    log = bytearray(segment_of(in_order(queues, ("orders", "bills", "日本")), base_offset=1 << 20, size=5000))
    for at, octet in octets:
        log[at] = octet
    found = assert_same(bytes(log), 1 << 20, with_tags=True)
    assert sum(found.sizes) == found.records_end


@given(st.lists(record_makers(), max_size=8), st.booleans())
def test_records_of_every_kind(makers: list[MakeRecord], with_tags: bool) -> None:
    assert_same(segment_of(makers, size=6000), 0, with_tags=with_tags)


def test_a_topic_that_starts_over(tmp_path: Path) -> None:
    log = segment_of(
        [
            lambda at, number=number, queue_id=queue_id: record_at(at, queue_id=queue_id, queue_offset=number)
            for queue_id, number in [(0, 5), (1, 8), (0, 6), (0, 0), (1, 9), (0, 1)]
        ]
    )
    found = assert_same(log, 0, with_tags=False)
    assert [(one.queue, one.first, one.end, list(one.parts)) for one in found.groups] == [
        (OTHER_RECORDS, 0, 0, [0, 2]),
        (("orders", 0), 0, 2, [3, 5]),
        (("orders", 1), 8, 10, [1, 4]),
    ]


def test_a_topic_that_is_not_utf_8_is_no_record() -> None:
    log = segment_of(
        [
            lambda at: record_at(at, queue_offset=0),
            lambda at: record_at(at, topic=b"\xff\xfe", queue_offset=0),
            lambda at: record_at(at, queue_offset=1),
        ]
    )
    found = assert_same(log, 0, with_tags=False)
    assert [(one.queue, list(one.parts)) for one in found.groups] == [(OTHER_BYTES, [1]), (("orders", 1), [0, 2])]


def test_numbers_below_zero_are_kept_apart() -> None:
    found = assert_same(segment_of([lambda at: record_at(at, queue_offset=-3)]), 0, with_tags=False)
    assert [(one.queue, list(one.parts)) for one in found.groups] == [(OTHER_RECORDS, [0])]


@pytest.mark.parametrize("log", [b"", bytes(5), bytes(4096)])
def test_a_file_without_records(log: bytes) -> None:
    assert assert_same(log, 0, with_tags=False).record_count == 0


def test_a_segment_has_the_same_bytes_either_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path, *_) = sorted((unpack_golden("5.4.0", tmp_path).root / "commitlog").iterdir())
    log, start = path.read_bytes(), int(path.name)
    in_runs, one_by_one = io.BytesIO(), io.BytesIO()
    monkeypatch.setattr(writing, "GROUP_BYTES", 4096)
    writing.write_segment(log, start, in_runs, with_tags=False)
    monkeypatch.setattr(contents, "has_numpy", lambda: False)
    writing.write_segment(log, start, one_by_one, with_tags=False)
    assert in_runs.getvalue() == one_by_one.getvalue()
