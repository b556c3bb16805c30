"""The schema of a typed table: its file, the columns, and the decoder of the bodies.

::

    schema = read_schema(Path("order.json"))
    decoded = RowDecoder(schema).decode([b'{"id": 1}', b"no JSON"])

==================  ====================  =============================================================================
file                format of bodies      module
==================  ====================  =============================================================================
``.avsc``           Avro, without header  `rmqkit.spark.jobs.typed_avro`
``.desc``, ``.pb``  Protobuf              `rmqkit.spark.jobs.typed_protobuf`
all others          JSON                  `rmqkit.spark.jobs.typed_json`
==================  ====================  =============================================================================
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
from msgspec import Struct

from rmqkit.errors import SettingsError
from rmqkit.spark.jobs.typed_avro import avro_bodies
from rmqkit.spark.jobs.typed_columns import Bodies, check_names
from rmqkit.spark.jobs.typed_json import json_bodies
from rmqkit.spark.jobs.typed_protobuf import protobuf_bodies

_Format = Literal["json", "avro", "protobuf"]
_FORMATS: dict[str, _Format] = {".avsc": "avro", ".desc": "protobuf", ".pb": "protobuf"}


class TypedColumn(Struct, frozen=True):
    """A property of the body. ``type`` is the text of its Arrow type, which manifests store."""

    name: str
    type: str
    is_required: bool


class RowSchema(Struct, frozen=True):
    """The schema of a file, from which each task builds its decoder. ``text`` is the file's JSON; of Protobuf, the full
    name of the message and the file's bytes in base64, with a blank between them."""

    source: str
    text: str
    format: _Format = "json"

    @property
    def digest(self) -> str:
        """A hash of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def columns(self) -> list[TypedColumn]:
        """The columns of the body, in the order of the properties."""
        return [TypedColumn(one.name, str(one.arrow), one.is_required) for one in self.bodies().columns]

    @property
    def arrow(self) -> pa.Schema:
        """The columns of the body as Arrow fields. All are nullable, so that a property may become optional."""
        return pa.schema([pa.field(one.name, one.arrow) for one in self.bodies().columns])

    def bodies(self) -> Bodies:
        """Return the columns and the decoder. Raises SettingsError: it is not a schema of a table.
        Raises ExtraMissing: Protobuf's package is not installed."""
        match self.format:
            case "json":
                return json_bodies(self.source, self.text)
            case "avro":
                return avro_bodies(self.source, self.text)
        message, _, content = self.text.partition(" ")
        return protobuf_bodies(self.source, base64.b64decode(content), message)


class Decoded(NamedTuple):
    """The columns of the bodies that fit; for each body, whether it fits; the reasons of the others, in order."""

    columns: list[pa.Array]
    fits: list[bool]
    reasons: list[str]


def read_schema(path: Path, message: str = "") -> RowSchema:
    """Read a schema.

    Args:
        message: the full name of the Protobuf message. It may be empty if the descriptor's file has one message.

    Raises:
        SettingsError: the file is missing, or is not a schema of a table.
        ExtraMissing: Protobuf's package is not installed.
    """
    kind: _Format = _FORMATS.get(path.suffix, "json")
    if path.suffix == ".proto":
        raise SettingsError(f"schema {path} is a source: give its descriptor, by protoc --descriptor_set_out=FILE.desc")
    if message and kind != "protobuf":
        raise SettingsError(f"message {message} needs a Protobuf descriptor, FILE.desc; the schema is {path}")
    try:
        content = path.read_bytes()
        text = f"{message} {base64.b64encode(content).decode()}" if kind == "protobuf" else content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"schema {path} cannot be read: {error}; give a file with a schema") from None
    schema = RowSchema(str(path), text, kind)
    check_names(schema.source, schema.bodies().columns)
    return schema


class RowDecoder:
    """The decoder of bodies. Each task builds one."""

    def __init__(self, schema: RowSchema) -> None:
        self._columns, self._decode = schema.bodies()

    def decode(self, bodies: Iterable[bytes | None]) -> Decoded:
        """Decode bodies into columns. A body that does not fit has a reason, and no row."""
        rows: list[Sequence[Any]] = []
        fits: list[bool] = []
        reasons: list[str] = []
        for body in bodies:
            try:
                rows.append(self._decode(body or b""))
            except (ValueError, RecursionError, OverflowError) as error:
                reasons.append(" ".join(str(error).split()))
                fits.append(False)
            else:
                fits.append(True)
        values: Iterable[Sequence[Any]] = zip(*rows, strict=True) if rows else [()] * len(self._columns)
        columns = [pa.array(column, one.arrow) for column, one in zip(values, self._columns, strict=True)]
        return Decoded(columns, fits, reasons)
