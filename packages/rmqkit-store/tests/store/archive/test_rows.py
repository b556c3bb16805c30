"""Records become rows and records again, byte for byte: plain ones, and all kinds that the columns cannot give back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmqkit.protocol.compression import Compression, compress
from rmqkit.protocol.record import BORN_HOST_V6, COMPRESSED, STORE_HOST_V6
from rmqkit.store.archive.rows import RECORD_COLUMNS, records_of, rows_of
from rmqkit.store.kernels import batch
from rmqkit.store.kernels.schema import MESSAGE_COLUMNS
from rmqkit.store.log.scan import Records, walk
from tests.golden_stores import unpack_golden
from tests.spark.messages import HOST_V6, MakeRecord, record_at, record_makers, segment_of

PROPERTIES = b"KEYS\x01k1\x02UNIQ_KEY\x01FD00"


def assert_same(content: bytes) -> int:
    """Check that the rows of some records give them back. Return how many rows need the whole record."""
    rows = rows_of(content, "broker-a")
    assert b"".join(records_of(rows.select(RECORD_COLUMNS)).to_pylist()) == content
    return len(rows) - int(rows["storedRecord"].null_count)


def one(**changed: object) -> bytes:
    return record_at(0, **{"properties": PROPERTIES, **changed})


@settings(max_examples=60)
@given(st.lists(record_makers(), min_size=1, max_size=8))
def test_every_record_is_given_back(makers: list[MakeRecord]) -> None:
    assert_same(segment_of(makers))


@pytest.mark.parametrize("store", ["5.4.0", "4.9.4", "5.4.0-retained", "5.4.0-ipv6-crc"])
def test_every_record_of_an_apache_log_is_given_back(store: str, tmp_path: Path) -> None:
    for path in sorted((unpack_golden(store, tmp_path).root / "commitlog").iterdir()):
        log = path.read_bytes()
        runs = [part for part in walk(log, int(path.name)) if isinstance(part, Records)]  # zeros follow the last one
        assert runs
        for records in runs:
            assert_same(log[int(records.positions[0]) : records.end])


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"properties": PROPERTIES + b"\x02"},
        {"properties": b""},
        {"properties": b"\x02"},
        {"body": b""},
        {"topic": b"t" * 127},
        {"topic": b"t" * 128},
        {"sys_flag": BORN_HOST_V6, "born_host": HOST_V6},
        {"sys_flag": STORE_HOST_V6, "store_host": HOST_V6},
        {"born_host": bytes(4) + b"\xff\xff\xff\xff"},
        {"born_timestamp": -1},
        {"queue_offset": 2**62, "flag": -(2**31), "reconsume_times": 2**31 - 1},
    ],
    ids=str,
)
def test_columns_alone_give_back_an_ordinary_record(changed: dict[str, object]) -> None:
    assert assert_same(one() + one(**changed) + one()) == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"properties": b"a\x01b\x02a\x01c"},
        {"properties": b"a\x01b\x02broken"},
        {"properties": b"a\x01\xff"},
        {"born_timestamp": 2**62},
        {"sys_flag": COMPRESSED | Compression.ZLIB, "body": compress(b"x" * 100, Compression.ZLIB, 5)},
    ],
    ids=str,
)
def test_other_records_are_stored_whole(changed: dict[str, object]) -> None:
    assert assert_same(one() + one(**changed) + one()) == 1


def test_a_compressed_body_can_be_read_by_anybody() -> None:
    body = b"x" * 1000
    row = rows_of(one(sys_flag=COMPRESSED | Compression.ZLIB, body=compress(body, Compression.ZLIB, 5)), "")
    assert (row["body"].to_pylist(), row["sysFlag"].to_pylist(), row["brokerName"].null_count) == (
        [body],
        [int(Compression.ZLIB)],
        1,
    )


def test_bodies_that_need_much_memory_stay_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_PLAIN_BYTES_MAX", 1500)
    body = compress(b"x" * 1000, Compression.ZLIB, 5)
    record = one(sys_flag=COMPRESSED | Compression.ZLIB, body=body)
    assert rows_of(record * 2, "")["body"].to_pylist() == [b"x" * 1000] * 2
    rows = rows_of(record * 3, "")
    assert rows["body"].to_pylist() == [body] * 3
    assert rows["sysFlag"].to_pylist() == [COMPRESSED | Compression.ZLIB] * 3
    assert assert_same(record * 3) == 0


def test_the_columns_are_those_of_every_reader() -> None:
    assert rows_of(one(), "").column_names == [
        *(column.name for column in MESSAGE_COLUMNS),
        "propertiesEnd",
        "storedRecord",
    ]
