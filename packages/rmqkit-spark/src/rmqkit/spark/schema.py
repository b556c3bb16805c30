"""The columns of messages (`rmqkit.arrow.schema`) as Spark declares and checks them, and as its catalog keeps them.

``CREATE TABLE … USING rocketmq-store``: Spark asks a Python source for the columns of a new table, with the statement's
options among the properties of the table. To read the table it gives the columns and no options at all (Spark 4.2 and
4.3). So the options travel with the columns: the first one keeps them, as metadata for us and as the comment that
``DESCRIBE`` shows. What a table is written with does not travel: ``INSERT INTO`` goes to a temporary view.
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


def check_types(columns: Iterable[Column], schema: StructType, source: str) -> None:
    """Raises SettingsError: a field of the caller's schema has another type than our column of its name."""
    for column, field in zip(columns, schema.fields, strict=True):
        found = field.dataType.simpleString()
        if found != column.spark:
            raise SettingsError(
                f"{source}: column {column.name} is {column.spark}, the schema says {found}: leave the cast to a select"
            )


def to_ddl(columns: Iterable[Column]) -> str:
    """Write columns as Spark DDL."""
    return ", ".join(f"`{column.name}` {column.spark}" for column in columns)


def given_options(options: Mapping[str, str], schema: StructType | None = None) -> dict[str, str]:
    """The options of a read: those that Spark gave, those among the properties of a new table, or those that a table's
    columns keep."""
    # No options at all: Spark reads a table of its catalog. Every other read has a path or names topics.
    if schema is not None and not options and schema.fields:
        return dict(json.loads(schema.fields[0].metadata.get(_KEPT, "{}")))
    if _OF_A_TABLE not in options:
        return dict(options)
    found = {name.removeprefix(_OPTION): value for name, value in options.items() if name.startswith(_OPTION)}
    return {**found, **({"path": options["path"]} if "path" in options else {})}


def declared(columns: Iterable[Column], options: Mapping[str, str]) -> str | StructType:
    """The columns for Spark, which keep the options if they are those of a new table.
    Raises SettingsError: one of the options is a secret, which a catalog would show to all."""
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
    """A type of our columns in the JSON of Spark."""
    if spark.startswith("map<"):
        return {"type": "map", "keyType": "string", "valueType": "string", "valueContainsNull": True}
    return _JSON_TYPES.get(spark, spark)
