"""One task's work without Spark: projection, filters, CRC and damage."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmqkit.arrow.fs import find_segments
from rmqkit.arrow.reader import EVERYTHING, ReadPlan, Selection, matches, read_split
from rmqkit.arrow.splits import Split, plan_splits
from rmqkit.errors import SettingsError, StoreError
from rmqkit.protocol.record import COMPRESSED, INNER_BATCH, NEED_UNWRAP
from rmqkit.spark.source.store import available_columns, read_plan, store_options
from rmqkit.store.kernels.batch import MessageBatch
from rmqkit.store.log.scan import Records, walk
from tests.golden_stores import unpack_golden
from tests.spark.messages import plain_records, plain_rows, record_at, rows_of, segment_of

_INNER = INNER_BATCH | NEED_UNWRAP
_SEGMENT = segment_of(
    [
        lambda at: record_at(at, topic=b"orders", queue_id=0, store_timestamp=1000, body=b"one"),
        lambda at: record_at(at, topic=b"orders", queue_id=1, store_timestamp=2000, body=b"two"),
        lambda at: record_at(at, topic=b"audit", queue_id=0, store_timestamp=3000, body=b"three"),
        lambda at: record_at(at, topic=b"orders", queue_id=2, store_timestamp=4000, body=b"four", born_timestamp=2**62),
    ]
)
_STARTS = [record.physical_offset for record in plain_records(_SEGMENT)]


def _read(segment: bytes, into: Path, *columns: str, selection: Selection = EVERYTHING, **given: str) -> list[Any]:
    path = into / "00000000000000000000"
    path.write_bytes(segment)
    plan = read_plan(store_options({"path": str(into), **given}), columns)
    plan = ReadPlan(**{name: getattr(plan, name) for name in plan.__struct_fields__} | {"selection": selection})
    return rows_of(list(read_split(Split(str(path), 0, 0, len(segment)), plan)))


def _changed(at: int, octets: bytes) -> bytes:
    return _SEGMENT[:at] + octets + _SEGMENT[at + len(octets) :]


# ---------------------------------------------------------------- whole stores


@pytest.mark.parametrize("batch_rows", ["1", "13", "8192"])
@pytest.mark.parametrize("split_bytes", [1, 3000, 50_000, 1 << 20])
def test_any_splits_and_batches_give_every_row_once(batch_rows: str, split_bytes: int, tmp_path: Path) -> None:
    store = unpack_golden("5.4.0", tmp_path)
    plan = read_plan(store_options({"path": str(store.root), "batchRows": batch_rows}), [])
    splits = plan_splits(find_segments(str(store.root), []), split_bytes)
    rows = rows_of([batch for split in splits for batch in read_split(split, plan)])
    expected = [row for path in sorted((store.root / "commitlog").iterdir()) for row in plain_rows(path.read_bytes())]
    assert rows == expected


def test_a_plan_and_its_splits_can_be_sent_to_another_process() -> None:
    plan = read_plan(store_options({"path": "/s", "verifyCrc": "column", "includeProperties": "string"}), [])
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert pickle.loads(pickle.dumps(Split("/s", 1, 2, 3))) == Split("/s", 1, 2, 3)


# ---------------------------------------------------------------- columns


def test_columns_come_in_the_order_requested(tmp_path: Path) -> None:
    rows = _read(_SEGMENT, tmp_path, "queueId", "topic")
    assert [list(row.items()) for row in rows][2] == [("queueId", 0), ("topic", "audit")]


def test_columns_that_are_not_requested_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(MessageBatch, "bodies", refuse)
    monkeypatch.setattr(MessageBatch, "properties", property(refuse))
    unreadable = segment_of([lambda at: record_at(at, body=b"not compressed", sys_flag=COMPRESSED)])
    assert [row["topic"] for row in _read(unreadable, tmp_path, "topic", "storeSize")] == ["orders"]
    with pytest.raises(AssertionError, match="decoded"):
        _read(_SEGMENT, tmp_path, "body")


def test_body_and_properties_can_be_left_out(tmp_path: Path) -> None:
    assert len(available_columns(store_options({"path": "/s"}))) == 21
    (first, *_) = _read(_SEGMENT, tmp_path, includeBody="false", includeProperties="none")
    assert len(first) == 19
    assert not {"body", "properties"} & set(first)


def test_properties_can_be_had_as_they_are_stored(tmp_path: Path) -> None:
    (first, *_) = _read(_SEGMENT, tmp_path, includeProperties="string")
    assert first["properties"] == "TAGS\x01a\x02KEYS\x01k1 k2\x02UNIQ_KEY\x01FD00\x02"
    assert list(first)[10] == "properties"


@pytest.mark.parametrize(
    ("names", "given", "text"),
    [
        (["topik"], {}, "there is no column 'topik' with these options: did you mean topic?"),
        (["body"], {"includeBody": "false"}, "there is no column 'body' with these options: "),
        (["_corrupt"], {}, "there is no column '_corrupt' with these options: choose from topic, brokerName,"),
        (["topic", "topic"], {}, "column 'topic' is wanted twice: name it once"),
        (["topic"], {"corruptRecordMode": "report"}, "corruptRecordMode=report and verifyCrc=column need the column _"),
    ],
)
def test_a_wrong_column_is_named_in_one_line(names: list[str], given: dict[str, str], text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read_plan(store_options({"path": "/s", **given}), names)
    assert str(caught.value).startswith(f"rocketmq-store: {text}")
    assert "\n" not in str(caught.value)


def test_a_store_without_path_is_an_error() -> None:
    with pytest.raises(SettingsError, match="no path: give the store directory"):
        store_options({})


# ---------------------------------------------------------------- filters

_T2_US = 2_000_000


@pytest.mark.parametrize(
    ("selection", "bodies"),
    [
        (Selection(topics=("orders",)), [b"one", b"two", b"four"]),
        (Selection(topics=("audit", "other")), [b"three"]),
        (Selection(queue_ids=(1,)), [b"two"]),
        (Selection(queue_ids=(1, 2, 9)), [b"two", b"four"]),
        (Selection(start_us=_T2_US), [b"two", b"three", b"four"]),
        (Selection(end_us=_T2_US), [b"one"]),
        (Selection(start_us=_T2_US + 1, end_us=3_000_000), []),
    ],
)
def test_a_selection_is_exact(selection: Selection, bodies: list[bytes], tmp_path: Path) -> None:
    assert [row["body"] for row in _read(_SEGMENT, tmp_path, selection=selection)] == bodies


def test_the_topic_option_reads_only_those_topics(tmp_path: Path) -> None:
    path = tmp_path / "00000000000000000000"
    path.write_bytes(_SEGMENT)
    plan = read_plan(store_options({"path": "/s", "topic": "audit, other"}), ["topic"])
    assert rows_of(list(read_split(Split(str(path), 0, 0, len(_SEGMENT)), plan))) == [{"topic": "audit"}]


def test_all_parts_of_a_selection_must_be_met() -> None:
    (records,) = [part for part in walk(_SEGMENT, 0) if isinstance(part, Records)]
    both = Selection.of(["orders", "orders"], [2, 1], 0, 0)
    assert both == Selection(topics=("orders",), queue_ids=(1, 2))
    assert matches(records, both).tolist() == [False, True, False, True]
    assert matches(records, EVERYTHING).all()


# ---------------------------------------------------------------- CRC

_WRONG_CRC = _changed(_STARTS[1] + 88, b"2")  # the body of the second record


def test_the_crc_is_not_looked_at_unless_requested(tmp_path: Path) -> None:
    assert [row["body"] for row in _read(_WRONG_CRC, tmp_path, "body")][1] == b"2wo"


def test_a_wrong_crc_can_fail(tmp_path: Path) -> None:
    with pytest.raises(
        StoreError, match=rf"the body at byte {_STARTS[1]} \(commitLogOffset {_STARTS[1]}\) does not ma"
    ):
        _read(_WRONG_CRC, tmp_path, "topic", verifyCrc="fail")
    assert len(_read(_SEGMENT, tmp_path, "topic", verifyCrc="fail")) == 4


def test_a_wrong_crc_can_drop_the_message(tmp_path: Path) -> None:
    rows = _read(_WRONG_CRC, tmp_path, "body", verifyCrc="drop")
    assert [row["body"] for row in rows] == [b"one", b"three", b"four"]


def test_a_wrong_crc_can_be_shown(tmp_path: Path) -> None:
    rows = _read(_WRONG_CRC, tmp_path, verifyCrc="column")
    assert [row["_corrupt"] for row in rows] == [None, "the body does not match its CRC", None, None]
    assert rows[1]["body"] == b"2wo"


def test_a_wrong_crc_of_a_message_that_is_filtered_out_does_not_matter(tmp_path: Path) -> None:
    audit = Selection(topics=("audit",))
    assert len(_read(_WRONG_CRC, tmp_path, "topic", selection=audit, verifyCrc="fail")) == 1


# ---------------------------------------------------------------- damage

_BROKEN = _changed(_STARTS[1] + 4, b"\0\0\0\0")  # the magic of the second record
_UNPACKABLE = segment_of([record_at, lambda at: record_at(at, body=b"?", sys_flag=_INNER), record_at])


def test_damage_fails_with_place_reason_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        _read(_BROKEN, tmp_path, "topic")
    assert str(caught.value).endswith(
        f"00000000000000000000: damage at byte {_STARTS[1]} (commitLogOffset {_STARTS[1]}): magic is 00000000;"
        " corruptRecordMode=skip reads on, report shows it in rows"
    )


def test_damage_can_be_skipped(tmp_path: Path) -> None:
    rows = _read(_BROKEN, tmp_path, "body", corruptRecordMode="skip")
    assert [row["body"] for row in rows] == [b"one", b"three", b"four"]


def test_damage_can_be_reported_as_a_row(tmp_path: Path) -> None:
    rows = _read(_BROKEN, tmp_path, corruptRecordMode="report", brokerName="b")
    assert [row["_corrupt"] for row in rows] == [None, "magic is 00000000", None, None]
    known = {name: value for name, value in rows[1].items() if value is not None}
    assert known == {
        "brokerName": "b",
        "commitLogOffset": _STARTS[1],
        "storeSize": _STARTS[2] - _STARTS[1],
        "_corrupt": "magic is 00000000",
    }


def test_a_body_that_cannot_be_unpacked_is_damage(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="batch entry at byte 0 is cut off"):
        _read(_UNPACKABLE, tmp_path, "topic")
    assert len(_read(_UNPACKABLE, tmp_path, "body", corruptRecordMode="skip")) == 2
    reported = _read(_UNPACKABLE, tmp_path, corruptRecordMode="report")
    assert [row["body"] for row in reported] == [b"hello", b"?", b"hello"]
    assert [bool(row["_corrupt"]) for row in reported] == [False, True, False]
    assert len(_read(_UNPACKABLE, tmp_path, "topic", unwrap="false")) == 3


def test_a_body_that_is_not_requested_need_not_be_readable(tmp_path: Path) -> None:
    segment = segment_of([lambda at: record_at(at, body=b"?", sys_flag=COMPRESSED)])
    assert _read(segment, tmp_path, "body", decompress="false") == [{"body": b"?"}]
    with pytest.raises(StoreError, match="zlib body of 1 bytes"):
        _read(segment, tmp_path, "body")


def test_a_file_that_has_shrunk_is_named(tmp_path: Path) -> None:
    path = tmp_path / "00000000000000000000"
    path.write_bytes(_SEGMENT)
    plan = read_plan(store_options({"path": "/s"}), ["topic"])
    with pytest.raises(StoreError, match=f"has {len(_SEGMENT)} bytes, 9999 when the query was planned"):
        list(read_split(Split(str(path), 0, 0, 9999), plan))


def test_a_file_can_be_read_to_its_end_after_the_broker_deleted_it(tmp_path: Path) -> None:
    path = tmp_path / "00000000000000000000"
    path.write_bytes(_SEGMENT)
    plan = read_plan(store_options({"path": "/s", "batchRows": "1"}), ["topic"])
    batches = read_split(Split(str(path), 0, 0, len(_SEGMENT)), plan)
    first = next(batches)
    path.unlink()
    assert pa.Table.from_batches([first, *batches]).num_rows == 4


def test_batches_have_the_schema_of_the_columns(tmp_path: Path) -> None:
    path = tmp_path / "00000000000000000000"
    path.write_bytes(_BROKEN)
    plan = read_plan(store_options({"path": "/s", "corruptRecordMode": "report"}), [])
    batches = list(read_split(Split(str(path), 0, 0, len(_BROKEN)), plan))
    assert len({batch.schema for batch in batches}) == 1
    assert batches[0].schema.field("bornTimestamp").type == pa.timestamp("us", "UTC")
    for batch in batches:
        batch.validate(full=True)
