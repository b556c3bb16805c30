"""The columns of messages (`rmqkit.arrow.schema`) in Spark's form: declarations, checks, and catalog tables.

``CREATE TABLE … USING rocketmq-store``: Spark calls a Python source for the columns of a new table, with the options of
the statement among the properties of the table. For a read of the table it passes the columns but no options (Spark 4.2
and 4.3). Therefore the first column stores the options, as metadata and as the comment that ``DESCRIBE`` shows. Writes
do not get these options: use ``INSERT INTO`` with a temporary view.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rmqkit.arrow.schema import Column
from rmqkit.errors import SettingsError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_OF_A_TABLE = "provider"
_OPTION = "option."
_KEPT = "rmqkit.options"
_SECRET = "secretkey"
_JSON_TYPES = {"int": "integer", "bigint": "long"}
_TEXT_MAP = {"type": "map", "keyType": "string", "valueType": "string", "valueContainsNull": True}
_HEADER = [
    {"name": name, "type": of, "nullable": True, "metadata": {}}
    for name, of in (("key", "string"), ("value", "binary"))
]
_HEADERS = {"type": "array", "elementType": {"type": "struct", "fields": _HEADER}, "containsNull": True}


def check_types(columns: Iterable[Column], schema: StructType, source: str) -> None:
    """Check the caller's schema. Raises SettingsError: a field has another type than the column of its name."""
    for column, field in zip(columns, schema.fields, strict=True):
        found = field.dataType.simpleString()
        if found != column.spark:
            raise SettingsError(
                f"{source}: column {column.name} is {column.spark}, the schema says {found}: leave the cast to a select"
            )


def to_ddl(columns: Iterable[Column]) -> str:
    """Return columns as Spark DDL."""
    return ", ".join(f"`{column.name}` {column.spark}" for column in columns)


def given_options(options: Mapping[str, str], schema: StructType | None = None) -> dict[str, str]:
    """Return the options of a read: the options that Spark passed, or that are among the properties of a new table, or
    that the columns of a table store."""
    # Without options Spark reads a table of its catalog: every other read has a path or topics.
    if schema is not None and not options and schema.fields:
        return dict(json.loads(schema.fields[0].metadata.get(_KEPT, "{}")))
    if _OF_A_TABLE not in options:
        return dict(options)
    found = {name.removeprefix(_OPTION): value for name, value in options.items() if name.startswith(_OPTION)}
    return {**found, **({"path": options["path"]} if "path" in options else {})}


def declared(columns: Iterable[Column], options: Mapping[str, str]) -> str | StructType:
    """Return the columns for Spark. If the table is new, its columns store the options.
    Raises SettingsError: an option is a secret, which a catalog would show to every user."""
    if _OF_A_TABLE not in options:
        return to_ddl(columns)
    from pyspark.sql.types import StructType

    kept = dict(sorted(given_options(options).items()))
    for name in kept:
        if name.lower().endswith((_SECRET, "secret.key")):
            raise SettingsError(f"{name} in a table is seen by all who use the catalog: create a temporary view")
    metadata = {_KEPT: json.dumps(kept), "comment": ", ".join(f"{name}={value}" for name, value in kept.items())}
    fields = [
        {"name": column.name, "type": _type(column.spark), "nullable": True, "metadata": metadata if not i else {}}
        for i, column in enumerate(columns)
    ]
    return StructType.fromJson({"type": "struct", "fields": fields})


def _type(spark: str) -> object:
    """Return the type of a column in Spark's JSON."""
    if spark.startswith("map<"):
        return _TEXT_MAP
    if spark.startswith("array<"):  # headers of Kafka
        return _HEADERS
    return _JSON_TYPES.get(spark, spark)
