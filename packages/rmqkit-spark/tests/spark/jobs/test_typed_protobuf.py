"""Columns of a Protobuf message, the rows of bodies that fit, and reasons for the others."""

from __future__ import annotations

import base64
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.errors import SettingsError
from rmqkit.spark.jobs.typed_schema import RowDecoder, RowSchema, read_schema

SOURCE = """
syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
message Order {
  enum Kind { NEW = 0; OLD = 1; }
  message Item { string sku = 1; optional uint32 count = 2; }
  int64 id = 1;
  int32 small = 2;
  uint64 large = 3;
  Kind kind = 4;
  optional string coupon = 5;
  repeated Item items = 6;
  map<string, Item> by_sku = 7;
  google.protobuf.Timestamp at = 8;
  bytes raw = 9;
  double price = 10;
  float weight = 11;
  bool paid = 12;
  repeated Kind kinds = 13;
}
"""


def described(folder: Path, source: str, name: str = "s") -> Path:
    """Return the descriptor of a file."""
    (folder / f"{name}.proto").write_text(source)
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", "--include_imports"]
    subprocess.run([*protoc, f"--descriptor_set_out={folder}/{name}.desc", f"{name}.proto"], check=True)
    return folder / f"{name}.desc"


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> RowSchema:
    return read_schema(described(tmp_path_factory.mktemp("proto"), SOURCE))


def row_of(schema: RowSchema, body: bytes) -> dict[str, Any]:
    decoded = RowDecoder(schema).decode([body])
    assert decoded.reasons == []
    return dict(zip(schema.arrow.names, (column.to_pylist()[0] for column in decoded.columns), strict=True))


def test_types_have_columns(schema: RowSchema) -> None:
    item = pa.struct([("sku", pa.string()), ("count", pa.int64())])
    assert dict(zip(schema.arrow.names, schema.arrow.types, strict=True)) == {
        "id": pa.int64(), "small": pa.int32(), "large": pa.int64(), "kind": pa.string(), "coupon": pa.string(),
        "items": pa.list_(item), "by_sku": pa.map_(pa.string(), item), "at": pa.timestamp("us", "UTC"),
        "raw": pa.binary(), "price": pa.float64(), "weight": pa.float32(), "paid": pa.bool_(),
        "kinds": pa.list_(pa.string()),
    }  # fmt: skip
    assert not any(column.is_required for column in schema.columns)


def test_a_body_without_fields_has_defaults_and_nulls(schema: RowSchema) -> None:
    assert row_of(schema, b"") == {
        "id": 0, "small": 0, "large": 0, "kind": "NEW", "coupon": None, "items": [], "by_sku": [], "at": None,
        "raw": b"", "price": 0.0, "weight": 0.0, "paid": False, "kinds": [],
    }  # fmt: skip


def test_a_body_with_all_fields(schema: RowSchema) -> None:
    # A tag is the number of the field times 8, plus 0 for a varint and 2 for bytes with a size.
    item = b"\x0a\1a\x10\3"
    body = (
        b"\x08\7\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\1\x18\5\x20\1\x2a\1c"
        + (b"\x32\5" + item + b"\x32\0")
        + (b"\x3a\x0a\x0a\1k\x12\5" + item)
        + (b"\x42\4\x08\1\x10\0" + b"\x4a\1\xff")
        + (b"\x51" + bytes(6) + b"\xf8\x3f" + b"\x5d" + bytes(2) + b"\xc0\x3f" + b"\x60\1\x6a\2\1\0")
        + b"\xf0\1\1"  # a field of number 30, which the message does not have
    )
    assert row_of(schema, body) == {
        "id": 7, "small": -1, "large": 5, "kind": "OLD", "coupon": "c",
        "items": [{"sku": "a", "count": 3}, {"sku": "", "count": None}],
        "by_sku": [("k", {"sku": "a", "count": 3})], "at": datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC),
        "raw": b"\xff", "price": 1.5, "weight": 1.5, "paid": True, "kinds": ["OLD", "NEW"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"no proto", "no shop.Order: "),
        (b"\x08", "no shop.Order: "),
        (b"\x20\7", "7 is no value of shop.Order.kind"),
        (b"\x18" + b"\xff" * 9 + b"\1", f"shop.Order.large is {2**64 - 1}, above the range of bigint"),
        (b"\x42\x0a\x08" + b"\xff" * 8 + b"\x7f", f"{2**63 - 1} s is no timestamp in µs"),
    ],
)
def test_a_body_that_does_not_fit_has_a_reason(schema: RowSchema, body: bytes, reason: str) -> None:
    decoded = RowDecoder(schema).decode([body])
    assert decoded.fits == [False], decoded.columns
    assert decoded.reasons[0].startswith(reason)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_row_or_have_a_reason(schema: RowSchema, body: bytes) -> None:
    decoded = RowDecoder(schema).decode([body])
    assert decoded.fits == [not decoded.reasons]


def test_a_required_field_of_proto_2_is_required(tmp_path: Path) -> None:
    schema = read_schema(
        described(tmp_path, 'syntax = "proto2"; message A { required int32 a = 1; optional int32 b = 2; }')
    )
    assert [column.is_required for column in schema.columns] == [True, False]
    assert row_of(schema, b"\x08\1") == {"a": 1, "b": None}
    assert RowDecoder(schema).decode([b""]).reasons == ["no A: a is missing"]


def test_one_of_several_messages_is_named(tmp_path: Path) -> None:
    path = described(tmp_path, 'syntax = "proto3"; package p; message A { int32 a = 1; } message B { int32 b = 1; }')
    with pytest.raises(SettingsError, match=r"has the messages p\.A, p\.B: name one with --message"):
        read_schema(path)
    assert read_schema(path, "p.B").arrow.names == ["b"]
    assert read_schema(path, "p.A").digest != read_schema(path, "p.B").digest
    with pytest.raises(SettingsError, match=r"name one of its messages with --message"):
        read_schema(path, "p.C")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("message A { A a = 1; }", "A contains itself, which no column can"),
        ("message A { }", "A has no fields"),
        ("", r"has the messages \(none\)"),
    ],
)
def test_a_message_without_columns_is_refused(source: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=text):
        read_schema(described(tmp_path, f'syntax = "proto3"; {source}'))


def test_files_that_are_no_descriptor_are_refused(tmp_path: Path) -> None:
    (tmp_path / "s.desc").write_bytes(b"no descriptor")
    with pytest.raises(SettingsError, match=r"is no descriptor: .*: write it with protoc"):
        read_schema(tmp_path / "s.desc")
    (tmp_path / "s.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"message A needs a Protobuf descriptor, FILE\.desc"):
        read_schema(tmp_path / "s.json", "A")
    # Without --include_imports the descriptor lacks google/protobuf/timestamp.proto.
    alone = RowSchema("s", f"shop.Order {base64.b64encode(_without_imports(tmp_path)).decode()}", "protobuf")
    with pytest.raises(SettingsError, match="write it with protoc --include_imports"):
        alone.bodies()


def _without_imports(folder: Path) -> bytes:
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    files = FileDescriptorSet.FromString(described(folder, SOURCE, "alone").read_bytes())
    del files.file[0]
    return files.SerializeToString()
