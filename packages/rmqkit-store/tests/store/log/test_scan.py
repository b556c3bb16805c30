"""The bulk scan: it agrees with the plain decoder, and loses only damaged records."""

from __future__ import annotations

import itertools
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.protocol.record import HEAD_FIELDS, MAGIC_V2, decode_record
from rmqkit.store.log.scan import Damage, Records, find_record, log_end, split, walk
from tests.golden_stores import golden_manifest, unpack_golden
from tests.sources import ROOT
from tests.spark.messages import (
    HOST_V4,
    HOST_V6,
    MakeRecord,
    plain_records,
    record_at,
    record_makers,
    segment_of,
)

_GOLDEN = ["5.4.0", "4.9.4", "5.4.0-ipv6-crc"]
_BASE = 131072


def _positions(parts: list[Records | Damage]) -> list[int]:
    return [int(at) for part in parts if isinstance(part, Records) for at in part.positions]


def _damages(parts: list[Records | Damage]) -> list[Damage]:
    return [part for part in parts if isinstance(part, Damage)]


def _fives(base_offset: int = 0) -> bytes:
    """Return five records, each stored a second after the previous one."""
    return segment_of(
        [
            lambda at, n=n: record_at(at, body=b"body %d" % n, store_timestamp=1_700_000_000_000 + 1000 * n)
            for n in range(5)
        ],
        base_offset=base_offset,
    )


_FIVE = _fives()
_STARTS = [0, *itertools.accumulate(record.size for record in plain_records(_FIVE))]


# ---------------------------------------------------------------- walking sound logs


@pytest.mark.parametrize("name", _GOLDEN)
def test_a_walk_finds_every_record_of_a_real_broker(name: str, tmp_path: Path) -> None:
    store = unpack_golden(name, tmp_path)
    for path in sorted((store.root / "commitlog").iterdir()):
        segment = path.read_bytes()
        high = log_end(segment, int(path.name))
        parts = list(walk(segment, int(path.name), 0, high, rows_max=50))
        records = plain_records(segment)
        assert not _damages(parts)
        assert len(parts) == -(-len(records) // 50)
        assert _positions(parts) == [record.physical_offset - int(path.name) for record in records]


@given(st.lists(record_makers(), max_size=12), st.integers(0, 2**40))
def test_every_field_is_the_plain_decoders(makers: list[MakeRecord], base_offset: int) -> None:
    segment = segment_of(makers, base_offset=base_offset)
    expected = plain_records(segment)
    rows = [(part, i) for part in walk(segment, base_offset, rows_max=5) for i in range(len(_records(part)))]
    assert len(rows) == len(expected)
    for (part, i), record in zip(rows, expected, strict=True):
        found = _records(part)
        for name, letter in HEAD_FIELDS:
            if letter == "host":
                at, width = int(found.field_at(name)[i]), int(found.field_bytes(name)[i])
                assert segment[at : at + width] == getattr(record, name)
            elif name == "body_bytes":
                assert found.field(name)[i] == len(record.body)
            else:
                assert found.field(name)[i] == getattr(record, name), name
        assert _slice(segment, found.body_at[i], found.body_bytes[i]) == record.body
        assert _slice(segment, found.topic_at[i], found.topic_bytes[i]) == record.topic.encode()
        assert _slice(segment, found.properties_at[i], found.properties_bytes[i]) == record.properties


def _records(part: Records | Damage) -> Records:
    assert isinstance(part, Records)
    return part


def _slice(segment: bytes, at: int, size: int) -> bytes:
    return segment[int(at) : int(at) + int(size)]


def test_a_walk_ends_at_the_blank_whatever_follows() -> None:
    segment = segment_of([record_at, record_at], size=1000)
    stale = segment[:-100] + b"\xff" * 100
    for data in (segment, stale):
        (records,) = walk(data, 0)
        assert len(_records(records)) == 2


def test_runs_are_bounded_by_rows_and_by_bytes() -> None:
    size = _STARTS[1]
    assert [len(_records(part)) for part in walk(_FIVE, 0, rows_max=2)] == [2, 2, 1]
    assert [len(_records(part)) for part in walk(_FIVE, 0, bytes_max=2 * size)] == [2, 2, 1]
    assert [len(_records(part)) for part in walk(_FIVE, 0, bytes_max=1)] == [1] * 5


@pytest.mark.parametrize("rows_max", [1, 300, 4096])
def test_short_and_long_records_in_any_order_are_walked(rows_max: int) -> None:
    sizes = [100] * 1500 + [300_000, 100, 100, 3000] + [262_144 - 200, 0] * 3 + [5000] * 100 + [1000] * 600
    makers = [lambda at, size=size: record_at(at, body=bytes(size)) for size in sizes]
    segment = segment_of(makers)
    starts = [0, *itertools.accumulate(record.size for record in plain_records(segment))]
    assert _positions(list(walk(segment, 0, rows_max=rows_max))) == starts[:-1]
    torn = list(walk(segment[:-1], 0, rows_max=rows_max))
    assert (_positions(torn), len(_damages(torn))) == (starts[:-2], 1)


def test_a_part_of_a_segment_can_be_walked() -> None:
    assert _positions(list(walk(_FIVE, 0, _STARTS[1], _STARTS[3]))) == _STARTS[1:3]
    assert list(walk(_FIVE, 0, _STARTS[2], _STARTS[2])) == []


def test_a_mapped_file_is_walked_like_bytes(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(_FIVE)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert _positions(list(walk(mapped, 0))) == _STARTS[:-1]


def test_taking_rows_keeps_hosts_of_both_kinds() -> None:
    segment = segment_of(
        [
            lambda at: record_at(at, store_timestamp=1),
            lambda at: record_at(at, born_host=HOST_V6, store_timestamp=2),
            lambda at: record_at(at, born_host=HOST_V6, store_host=HOST_V6, store_timestamp=3),
        ]
    )
    (part,) = walk(segment, 0)
    taken = _records(part).take(slice(1, None))
    assert taken.field("store_timestamp").tolist() == [2, 3]
    assert taken.field_bytes("store_host").tolist() == [len(HOST_V4), len(HOST_V6)]


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("at", "octets", "reason"),
    [
        (4, b"\0\0\0\0", "magic is 00000000"),
        (7, bytes([MAGIC_V2 & 0xFF]), "topic length 1647 does not fit"),
        (0, b"\0\0\0\x5b", "does not fit into size 91"),
        (0, b"\x7f\0\0\0", "announced size is 2130706432"),
        (28, b"\0\0\0\0\0\0\0\x07", "it says physical offset 7"),
        (0, bytes(8), "zeros where a record should begin"),
        (84, b"\xff", "body length"),
        (39, b"\x10", "does not fit"),
    ],
)
def test_damage_is_named_and_the_walk_continues_after_it(at: int, octets: bytes, reason: str) -> None:
    place = _STARTS[2] + at
    broken = _FIVE[:place] + octets + _FIVE[place + len(octets) :]
    parts = list(walk(broken, 0))
    assert _positions(parts) == [_STARTS[0], _STARTS[1], _STARTS[3], _STARTS[4]]
    (damage,) = _damages(parts)
    assert (damage.position, damage.end) == (_STARTS[2], _STARTS[3])
    assert reason in damage.reason


def test_damage_up_to_the_end_is_one_part() -> None:
    assert _damages(list(walk(_FIVE[: _STARTS[3]] + b"\x01" * 300, 0))) == [
        Damage(_STARTS[3], _STARTS[3] + 300, "magic is 01010101")
    ]


def test_a_record_copied_into_a_body_is_not_taken_for_one() -> None:
    segment = segment_of([record_at, lambda at: record_at(at, body=_FIVE[: _STARTS[2]]), record_at])
    first = decode_record(segment).size
    broken = segment[:first] + bytes(8) + segment[first + 8 :]
    assert find_record(segment, 0, first + 1, len(segment)) == plain_records(segment)[2].physical_offset
    assert len(_positions(list(walk(broken, 0)))) == 2


@given(
    st.lists(record_makers(), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=6),
    st.integers(0, 200),
)
def test_whatever_the_bytes_are_the_parts_cover_them_and_records_are_sound(
    makers: list[MakeRecord], changes: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(segment_of(makers, base_offset=_BASE, size=12_000))
    for at, octet in changes:
        data[at % len(data)] = octet
    segment = bytes(data[: len(data) - cut])
    position = 0
    for part in walk(segment, _BASE, rows_max=3):
        if isinstance(part, Damage):
            assert part.position == position < part.end
            position = part.end
            continue
        for at in part.positions.tolist():
            assert at == position
            try:
                record = decode_record(segment, at)
            except Exception as error:  # noqa: BLE001 - the one difference that is documented
                assert "UTF-8" in str(error)
                position += int.from_bytes(segment[at : at + 4])
            else:
                assert record.physical_offset == _BASE + at
                position += record.size
    assert position == len(segment) or segment[position + 4 : position + 8] == bytes.fromhex("cbd43194")


@given(st.binary(max_size=400), st.integers(0, 3))
def test_any_bytes_can_be_walked(data: bytes, repeats: int) -> None:
    noise = data.replace(b"\x03", bytes.fromhex("daa320a7")) * (repeats + 1)
    covered = sum(part.end - part.position for part in _damages(list(walk(noise, 0))))
    assert covered <= len(noise)
    assert 0 <= log_end(noise, 0) <= len(noise)


# ---------------------------------------------------------------- splitting


@given(st.lists(record_makers(), max_size=12), st.integers(1, 2000))
def test_splits_cover_a_segment_and_begin_at_records(makers: list[MakeRecord], split_bytes: int) -> None:
    segment = segment_of(makers, base_offset=_BASE, size=20_000)
    starts = {record.physical_offset - _BASE for record in plain_records(segment)}
    bounds = split(segment, _BASE, len(segment), split_bytes)
    assert [low for low, _ in bounds] == [0, *(high for _, high in bounds[:-1])]
    assert bounds[-1][1] == len(segment)
    assert {low for low, _ in bounds[1:]} <= starts
    walked = [at for low, high in bounds for at in _positions(list(walk(segment, _BASE, low, high)))]
    assert sorted(starts) == walked


def test_splits_have_about_the_size_requested() -> None:
    assert [high - low for low, high in split(_FIVE, 0, len(_FIVE), 2 * _STARTS[1])] == [_STARTS[2]] * 2 + [_STARTS[1]]
    assert split(_FIVE, 0, len(_FIVE), 1 << 20) == [(0, len(_FIVE))]
    assert split(b"", 0, 0, 100) == []


# ---------------------------------------------------------------- the end of the newest segment


@pytest.mark.parametrize("name", _GOLDEN)
def test_the_end_of_a_real_log_is_the_brokers_max_offset(name: str, tmp_path: Path) -> None:
    store = unpack_golden(name, tmp_path)
    newest = max((store.root / "commitlog").iterdir())
    end = int(newest.name) + log_end(newest.read_bytes(), int(newest.name))
    assert end == int(store.manifest["commitLogMaxOffset"])


def _as_killed(segment: bytearray, at: int, end: int) -> None:
    """No further damage."""


def _second_half_zeroed(segment: bytearray, at: int, end: int) -> None:
    middle = (at + end) // 2
    segment[middle:end] = bytes(end - middle)


def _body_byte_inverted(segment: bytearray, at: int, end: int) -> None:
    segment[at + 100] ^= 0xFF


def _size_lowered(segment: bytearray, at: int, end: int) -> None:
    segment[at : at + 4] = (end - at - 1).to_bytes(4)


@pytest.mark.parametrize(
    ("variant", "damage"),
    [
        ("as-killed", _as_killed),
        ("torn-zero", _second_half_zeroed),
        ("torn-flip", _body_byte_inverted),
        ("torn-size", _size_lowered),
    ],
)
def test_the_end_of_a_torn_log_is_where_the_real_broker_recovered_to(
    variant: str, damage: object, tmp_path: Path
) -> None:
    import gzip
    import json

    with gzip.open(ROOT / "tests" / "golden" / "expected-5.4.0-unclean.json.gz") as file:
        expected = next(case for case in json.load(file)["variants"] if case["variant"] == variant)
    root = _unpack_unclean(tmp_path)
    last = expected["lastRecord"]
    path = max(p for p in (root / "commitlog").iterdir() if int(p.name) <= last["physicalOffset"])
    base = int(path.name)
    segment = bytearray(path.read_bytes())
    assert callable(damage)
    damage(segment, last["physicalOffset"] - base, last["end"] - base)
    assert base + log_end(bytes(segment), base) == int(expected["after"]["commitLogMaxOffset"])


def _unpack_unclean(into: Path) -> Path:
    import tarfile

    with tarfile.open(ROOT / "tests" / "golden" / "store-5.4.0-unclean.tar.gz") as archive:
        archive.extractall(into, filter="data")
    return into / "store"


def test_a_preallocated_file_has_no_records() -> None:
    assert log_end(bytes(4096), _BASE) == 0
    assert log_end(_fives(_BASE), _BASE) == len(_FIVE)


def test_records_that_an_earlier_cut_left_behind_the_end_do_not_count() -> None:
    longer = record_at(_STARTS[2], body=b"written after the cut", store_timestamp=1_700_000_100_000)
    cut = _FIVE[: _STARTS[2]] + longer + _FIVE[_STARTS[2] + len(longer) :]
    assert log_end(cut + bytes(100), 0) == _STARTS[2] + len(longer)


def test_records_behind_damage_do_count() -> None:
    broken = _FIVE[: _STARTS[2]] + bytes(8) + _FIVE[_STARTS[2] + 8 :] + bytes(100)
    assert log_end(broken, 0) == len(_FIVE)


@pytest.mark.parametrize("arrived", range(0, _STARTS[1], 5))
def test_a_last_record_that_is_still_being_written_does_not_count(arrived: int) -> None:
    halfway = _FIVE[: _STARTS[4] + arrived] + bytes(500 - arrived)
    assert log_end(halfway, 0) == _STARTS[4]


def test_a_topic_that_is_not_utf_8_does_not_end_the_log() -> None:
    segment = segment_of([record_at, lambda at: record_at(at, topic=b"\xff")])
    assert log_end(segment, 0) == len(segment)


def test_a_hole_at_the_end_need_not_be_searched() -> None:
    assert log_end(_FIVE + b"\xff" * 100, 0, len(_FIVE)) == len(_FIVE)


# ---------------------------------------------------------------- cost


def test_importing_the_walker_does_not_import_numpy() -> None:
    code = "import sys, rmqkit.store.log.scan; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_manifest_and_the_walk_count_the_same_records(tmp_path: Path) -> None:
    store = unpack_golden("5.4.0", tmp_path)
    listed = {message["physicalOffset"] for message in golden_manifest("5.4.0")["messages"]}
    walked: set[int] = set()
    for path in (store.root / "commitlog").iterdir():
        base = int(path.name)
        walked |= {base + at for at in _positions(list(walk(path.read_bytes(), base)))}
    assert walked == listed
