"""Columns of an Avro schema, the rows of bodies that fit, and reasons for the others. Literals of bytes are from Avro's
specification."""

from __future__ import annotations

import json
import struct
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.errors import SettingsError
from rmqkit.spark.jobs.typed_schema import RowDecoder, RowSchema, read_schema


def schema_of(*fields: Any) -> RowSchema:
    named = [{"name": f"f{i}", "type": one} for i, one in enumerate(fields)]
    return RowSchema("s", json.dumps({"type": "record", "name": "shop.Order", "fields": named}), "avro")


def row_of(schema: RowSchema, body: bytes) -> list[Any]:
    decoded = RowDecoder(schema).decode([body])
    assert decoded.reasons == []
    return [column.to_pylist()[0] for column in decoded.columns]


def reason_of(schema: RowSchema, body: bytes) -> str:
    decoded = RowDecoder(schema).decode([body])
    assert decoded.fits == [False], decoded.columns
    return decoded.reasons[0]


def long(number: int) -> bytes:
    """Encode a number as a zigzag varint."""
    left, encoded = (number << 1) ^ (number >> 63), bytearray()
    while left > 0x7F:
        encoded.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*encoded, left])


def test_the_record_of_the_specification() -> None:
    assert row_of(schema_of("long", "string"), bytes.fromhex("3606666f6f")) == [27, "foo"]


@pytest.mark.parametrize(
    ("kind", "body", "value", "arrow"),
    [
        ({"type": "array", "items": "long"}, bytes.fromhex("04063600"), [3, 27], pa.list_(pa.int64())),
        ({"type": "array", "items": "long"}, bytes.fromhex("0304063600"), [3, 27], pa.list_(pa.int64())),
        ({"type": "map", "values": "int"}, b"\2\2a\x06\0", [("a", 3)], pa.map_(pa.string(), pa.int32())),
        (["null", "string"], bytes.fromhex("020261"), "a", pa.string()),
        (["null", "string"], b"\0", None, pa.string()),
        (["string", "null"], b"\2", None, pa.string()),
        (["string"], b"\0\2a", "a", pa.string()),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, b"\2", "B", pa.string()),
        ({"type": "fixed", "name": "F", "size": 2}, b"ab", b"ab", pa.binary()),
        ("bytes", b"\4\xff\0", b"\xff\0", pa.binary()),
        ("boolean", b"\1", True, pa.bool_()),
        ("int", long(-(2**31)), -(2**31), pa.int32()),
        ("long", long(-(2**63)), -(2**63), pa.int64()),
        ("float", struct.pack("<f", 1.5), 1.5, pa.float32()),
        ("double", struct.pack("<d", -2.25), -2.25, pa.float64()),
        ({"type": "string", "logicalType": "uuid"}, b"\2u", "u", pa.string()),
        ({"type": "int", "logicalType": "date"}, long(-1), date(1969, 12, 31), pa.date32()),
        (
            {"type": "long", "logicalType": "timestamp-millis"},
            long(1500),
            datetime(1970, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC),
            pa.timestamp("us", "UTC"),
        ),
        (
            {"type": "long", "logicalType": "timestamp-micros"},
            long(-1),
            datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
            pa.timestamp("us", "UTC"),
        ),
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2},
            b"\4" + (-999).to_bytes(2, "big", signed=True),
            Decimal("-9.99"),
            pa.decimal128(4, 2),
        ),
        (
            {"type": "fixed", "name": "D", "size": 1, "logicalType": "decimal", "precision": 2},
            b"\x63",
            Decimal(99),
            pa.decimal128(2, 0),
        ),
        (
            {"type": "record", "name": "R", "fields": [{"name": "x", "type": "int"}]},
            b"\2",
            {"x": 1},
            pa.struct([("x", pa.int32())]),
        ),
    ],
)
def test_a_type_has_a_column(kind: Any, body: bytes, value: Any, arrow: pa.DataType) -> None:
    schema = schema_of(kind)
    assert schema.arrow.field("f0").type == arrow
    assert row_of(schema, body) == [value]


def test_a_field_is_required_if_null_is_not_allowed() -> None:
    assert [one.is_required for one in schema_of("int", ["null", "int"], ["int"]).columns] == [True, False, True]


def test_names_are_found_in_their_namespace() -> None:
    inner = {"type": "record", "name": "Item", "fields": [{"name": "sku", "type": "string"}]}
    schema = schema_of(inner, "Item", {"type": "array", "items": "shop.Item"})
    assert row_of(schema, b"\2a\2b\2\2c\0") == [{"sku": "a"}, {"sku": "b"}, [{"sku": "c"}]]


@pytest.mark.parametrize(
    ("kind", "body", "reason"),
    [
        ("int", b"", "a number ends early, or has more than 64 bits - at `$.f0`"),
        ("int", long(2**31), "2147483648 has more than 32 bits - at `$.f0`"),
        ("long", b"\xff" * 9 + b"\2", "a number ends early, or has more than 64 bits - at `$.f0`"),
        ("string", b"\6ab", "3 bytes are expected, 2 are left - at `$.f0`"),
        ("string", b"\1", "-1 bytes are expected, 0 are left - at `$.f0`"),
        ("string", b"\2\xff", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte - at `$.f0`"),
        ("boolean", b"\2", "2 is no boolean - at `$.f0`"),
        ("double", b"1234567", "8 bytes are expected, 7 are left - at `$.f0`"),
        ("int", b"\2\2", "1 bytes follow the record"),
        (["null", "int"], b"\4", "2 is the index of no type - at `$.f0`"),
        (["null", "int"], b"\1", "-1 is the index of no type - at `$.f0`"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, b"\2", "1 is the index of no symbol - at `$.f0`"),
        ({"type": "array", "items": "int"}, b"\x08\2\2\2", "4 items are expected, 3 bytes are left - at `$.f0`"),
        ({"type": "array", "items": "int"}, b"\2\2", "a number ends early, or has more than 64 bits - at `$.f0`"),
        (
            {"type": "long", "logicalType": "timestamp-millis"},
            long(2**62),
            f"{2**62} ms is no timestamp in µs - at `$.f0`",
        ),
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 2},
            b"\2\x64",
            "decimal has more than 2 digits - at `$.f0`",
        ),
        (
            {"type": "record", "name": "R", "fields": [{"name": "x", "type": "boolean"}]},
            b"\3",
            "3 is no boolean - at `$.f0.x`",
        ),
    ],
)
def test_a_body_that_does_not_fit_has_a_reason(kind: Any, body: bytes, reason: str) -> None:
    assert reason_of(schema_of(kind), body) == reason


@given(st.binary(max_size=40))
def test_any_bytes_are_a_row_or_have_a_reason(body: bytes) -> None:
    inner = {"type": "record", "name": "I", "fields": [{"name": "x", "type": ["null", "string"]}]}
    decoded = RowDecoder(schema_of({"type": "map", "values": {"type": "array", "items": inner}}, "double")).decode(
        [body]
    )
    assert decoded.fits == [not decoded.reasons]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), st.text(max_size=5))
def test_what_was_encoded_is_decoded(numbers: list[int], text: str) -> None:
    block = long(len(numbers)) + b"".join(map(long, numbers)) if numbers else b""
    body = block + b"\0" + long(len(text.encode())) + text.encode()
    assert row_of(schema_of({"type": "array", "items": "long"}, "string"), body) == [numbers, text]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("null", "type null is not supported, and no earlier type has this name"),
        (None, "type null is not supported: give another type"),
        (["int", "string"], "a union is only supported with one type and null"),
        (["null"], "a union is only supported with one type and null"),
        ({"type": "array"}, "type null is not supported"),
        ({"type": "record", "name": "R", "fields": []}, "a record needs fields"),
        ({"type": "record", "fields": [{"name": "x", "type": "int"}]}, "record has no name"),
        ({"type": "record", "name": "shop.Order", "fields": [{"name": "x", "type": "int"}]}, "contains itself"),
        ({"type": "array", "items": "Order"}, "shop.Order contains itself"),
        ({"type": "enum", "name": "E"}, "enum needs symbols"),
        ({"type": "fixed", "name": "F", "size": 0}, "fixed has the size 0"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 39}, "is no decimal of 1 to 38 digits"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 0}, "is no decimal of 1 to 38 digits"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 2, "scale": 3}, "is no decimal of 1 to 38 digits"),
        (
            {"type": "record", "name": "R", "fields": [{"name": "x", "type": "int"}, {"name": "x", "type": "int"}]},
            "two fields have the same name",
        ),
    ],
)
def test_a_type_without_a_column_is_refused(kind: Any, text: str) -> None:
    with pytest.raises(SettingsError, match=rf"schema s, \$\.f0.*: .*{text}"):
        schema_of(kind).bodies()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("no JSON", "is not JSON"),
        ('"string"', "has no columns: its type must be record"),
        (
            '{"type": "record", "name": "R", "fields": [{"name": "_a", "type": "int"}]}',
            "property '_a' cannot be a column",
        ),
    ],
)
def test_a_file_without_columns_is_refused(content: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "s.avsc").write_text(content)
    with pytest.raises(SettingsError, match=text):
        read_schema(tmp_path / "s.avsc")
