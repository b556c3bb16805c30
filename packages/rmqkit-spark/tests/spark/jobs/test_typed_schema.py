"""Columns of a JSON Schema, the rows of bodies that fit, and reasons for the others."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.errors import SettingsError
from rmqkit.spark.jobs.typed_schema import RowDecoder, RowSchema, read_schema


def schema_of(properties: dict[str, Any], **others: Any) -> RowSchema:
    return RowSchema("s", json.dumps({"type": "object", "properties": properties, **others}))


def rows_of(schema: RowSchema, *bodies: bytes | None) -> list[dict[str, Any]]:
    columns = RowDecoder(schema).decode(bodies).columns
    values = zip(*(column.to_pylist() for column in columns), strict=True)
    return [dict(zip(schema.arrow.names, row, strict=True)) for row in values]


def reason_of(schema: RowSchema, body: bytes | None) -> str:
    decoded = RowDecoder(schema).decode([body])
    assert decoded.fits == [not decoded.reasons]
    return "".join(decoded.reasons)


ITEM = {
    "type": "object",
    "properties": {"sku": {"type": "string"}, "at": {"$ref": "#/$defs/Time"}},
    "required": ["sku"],
}
ORDER = schema_of(
    {
        "id": {"type": "integer"},
        "day": {"type": "string", "format": "date"},
        "price": {"type": "number"},
        "is paid": {"type": "boolean"},
        "at": {"anyOf": [{"$ref": "#/$defs/Time"}, {"type": "null"}]},
        "items": {"type": "array", "items": {"$ref": "#/$defs/Item"}},
        "marks": {"type": "object", "additionalProperties": {"type": ["integer", "null"]}},
        "kind": {"enum": ["new", "old"]},
    },
    required=["id"],
    title="An order",
    **{"$defs": {"Item": ITEM, "Time": {"type": "string", "format": "date-time"}}},
)


def test_each_type_has_its_column() -> None:
    moment = datetime(2026, 5, 1, 10, tzinfo=UTC)
    body = {
        "id": 1, "day": "2026-05-01", "price": 3, "is paid": True, "at": "2026-05-01T12:00:00+02:00",
        "items": [{"sku": "a", "at": "2026-05-01T10:00:00Z", "more": 1}, {"sku": "b"}], "marks": {"x": 1, "y": None},
        "kind": "new", "unknown": {},
    }  # fmt: skip
    assert rows_of(ORDER, json.dumps(body).encode(), b'{"id": 2, "at": null}') == [
        {
            "id": 1, "day": date(2026, 5, 1), "price": 3.0, "is paid": True, "at": moment,
            "items": [{"sku": "a", "at": moment}, {"sku": "b", "at": None}], "marks": [("x", 1), ("y", None)],
            "kind": "new",
        },
        {"id": 2} | dict.fromkeys(["day", "price", "is paid", "at", "items", "marks", "kind"]),
    ]  # fmt: skip
    assert [str(one) for one in ORDER.arrow.types] == [
        "int64", "date32[day]", "double", "bool", "timestamp[us, tz=UTC]",
        "list<item: struct<sku: string, at: timestamp[us, tz=UTC]>>", "map<string, int64>", "string",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"no JSON", "JSON is malformed"),
        (b"", "Input data was truncated"),
        (None, "Input data was truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "Object missing required field `id`"),
        (b'{"id": null}', "Expected `int`, got `null` - at `$.id`"),
        (b'{"id": "1"}', "Expected `int`, got `str` - at `$.id`"),
        (b'{"id": 1.0}', "Expected `int`, got `float` - at `$.id`"),
        (b'{"id": 9223372036854775808}', "Expected `int` <= 9223372036854775807 - at `$.id`"),
        (b'{"id": 1, "price": null}', "Expected `float`, got `null` - at `$.price`"),
        (b'{"id": 1, "items": [{"sku": 2}]}', "Expected `str`, got `int` - at `$.items[0].sku`"),
        (b'{"id": 1, "kind": "other"}', "Invalid enum value 'other' - at `$.kind`"),
        (b'{"id": 1, "at": "2026-05-01T12:00:00"}', "Expected `datetime` with a timezone component - at `$.at`"),
        (b'{"id": 1, "at": "0001-01-01T00:00:00+05:00"}', "date value out of range"),
        (b'{"id": 1, "day": "May"}', "Invalid RFC3339 encoded date - at `$.day`"),
        (b'{"id": 1, "kind": "\xff"}', "'utf-8' codec can't decode byte 0xff"),
        (b'{"id": 1, "x": ' + b"[" * 100_000, "maximum recursion depth exceeded"),
    ],
)
def test_a_body_that_does_not_fit_has_a_reason(body: bytes | None, reason: str) -> None:
    assert reason_of(ORDER, body).startswith(reason)


@given(st.binary() | st.recursive(st.none() | st.floats() | st.text() | st.integers(), st.lists).map(json.dumps))
def test_no_body_stops_the_decoder(body: bytes | str) -> None:
    decoded = RowDecoder(_ANY).decode([body.encode() if isinstance(body, str) else body, b'{"a": "x"}'])
    assert (len(decoded.fits), decoded.fits[-1], len(decoded.reasons)) == (2, True, decoded.fits.count(False))


_ANY = schema_of({"a": {"type": "string"}, "b": {"type": "integer"}})


@pytest.mark.parametrize("text", [r"\ud800", r"\udc00", r"\ud800\u0041", r"\ud83d\ude00", r"\u0000"])
def test_a_text_is_a_row_or_has_a_reason(text: str) -> None:
    decoded = RowDecoder(_ANY).decode([b'{"a": "%s"}' % text.encode()])
    assert len(decoded.columns[0]) == decoded.fits.count(True)


@pytest.mark.parametrize(
    ("node", "good", "bad"),
    [
        ({"type": "integer", "minimum": 1, "exclusiveMaximum": 3}, (1, 2), (0, 3)),
        ({"type": "number", "multipleOf": 2}, (2.0, 4), (3.0,)),
        ({"type": "string", "minLength": 1, "maxLength": 2, "pattern": "^a"}, ("a", "ab"), ("", "abc", "b")),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1}, ([1],), ([],)),
        ({"const": 3}, (3,), (4,)),
        ({"type": ["string", "null"], "enum": ["a", None]}, ("a", None), ("b",)),
        ({"enum": ["a", None]}, ("a", None), ("b",)),
        ({"type": ["string", "null"], "enum": ["a"]}, ("a",), (None,)),
        ({"type": "integer", "nullable": True}, (1, None), ("a",)),
        ({"$ref": "#/$defs/Whole", "minimum": 1}, (1,), (0,)),
        ({"anyOf": [{"$ref": "#/$defs/Whole"}, {"type": "null"}], "title": "n"}, (0, None), ("a",)),
        ({"type": "string", "format": "email"}, ("a@b", "no address"), (1,)),
        (
            {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False},
            ({"x": 1}, {}),
            ({"y": 1},),
        ),
    ],
)
def test_restrictions_of_the_schema_are_checked(node: dict[str, Any], good: tuple[Any], bad: tuple[Any]) -> None:
    schema = schema_of({"a": node}, **{"$defs": {"Whole": {"type": "integer"}}})
    assert [reason_of(schema, json.dumps({"a": value}).encode()) for value in good] == [""] * len(good)
    assert all(reason_of(schema, json.dumps({"a": value}).encode()) for value in bad)


@pytest.mark.parametrize(
    ("node", "text"),
    [
        ({"type": "integer", "oneOf": []}, r"\$.a: keyword oneOf of type integer is not supported: leave it out"),
        ({"type": ["integer", "string"]}, r'\$.a: type \["integer", "string"\] is not known: give one type'),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, r"\$.a: anyOf is only supported with one type and null"),
        ({}, r"\$.a: type null is not known: give one type, or one and null"),
        (True, r"\$.a: is not an object: give a schema with a type"),
        ({"type": "array"}, r"\$.a: array without items: give the type of the items"),
        ({"type": "array", "items": {"type": "object"}}, r"\$.a\[...\]: object without properties: give them"),
        ({"enum": ["a", 1]}, r"\$.a: enum \[\"a\", 1\] must have texts or integers"),
        ({"enum": ["a"], "minLength": 1}, r"\$.a: keyword minLength beside enum or const is not supported"),
        ({"type": "string", "pattern": "("}, r"\$.a: missing \), unterminated subpattern.*: correct it"),
        ({"type": "integer", "minimum": "1"}, r"\$.a: .*ge.*: correct it"),
        ({"$ref": "#/$defs/None"}, r"\$.a: \$ref #/\$defs/None is not in this file: use #/\$defs/NAME"),
        ({"$ref": "#/properties/a"}, r"\$.a: #/properties/a contains itself, which no column can"),
        (
            {"type": "object", "properties": {"x": {"$ref": "#/properties/a"}}},
            r"\$.a.x.x: #/properties/a contains itself, which no column can",
        ),
        (
            {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["y"]},
            r"\$.a: required names 'y', which is not among the properties: add it",
        ),
    ],
)
def test_a_schema_that_could_not_be_checked_is_refused(node: Any, text: str) -> None:
    with pytest.raises(SettingsError, match=f"^schema s, {text}"):
        _ = schema_of({"a": node}).columns


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("s.json", "{", "is not JSON: .*: give a file with a JSON Schema"),
        ("s.json", "[]", "is not an object: give a JSON Schema"),
        ("s.json", '{"type": "object"}', "has no columns: its type must be object, with properties"),
        (
            "s.json",
            '{"type": "object", "properties": {"_id": {"type": "string"}}}',
            "property '_id' cannot be a column",
        ),
        (
            "s.json",
            '{"type": "object", "properties": {"a b": {"type": "string"}}}',
            "property 'a b' cannot be a column",
        ),
        (
            "s.json",
            '{"type": "object", "properties": {"id": {"type": "string"}, "ID": {"type": "string"}}}',
            "id and ID differ only in case: rename one of them",
        ),
        ("s.proto", "", "is a source: give its descriptor, by protoc"),
    ],
)
def test_a_file_without_columns_is_refused(name: str, content: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(SettingsError, match=f"^schema {tmp_path}/{name}:? {text}"):
        read_schema(tmp_path / name)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"schema .*/none.json cannot be read: .*; give a file with a schema"):
        read_schema(tmp_path / "none.json")
