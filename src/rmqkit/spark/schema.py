"""The columns of messages (`rmqkit.arrow.schema`) as Spark declares and checks them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rmqkit.arrow.schema import Column
from rmqkit.errors import SettingsError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


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
