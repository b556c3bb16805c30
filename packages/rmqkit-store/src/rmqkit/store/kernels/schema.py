"""The columns of a message in one table for all readers and for the archive: name, Spark type, Arrow type, kernel.

A column contains the value that a client sees (`rmqkit.protocol.message.ReceivedMessage`). ``commitLogOffset`` and
``storeSize`` describe the record, which the members of an inner batch share. ``_corrupt`` exists if damage is reported
in rows. It describes the damage of a row, and is null in sound rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
from msgspec import Struct

from rmqkit.protocol import properties as names
from rmqkit.store.kernels import columns as kernels
from rmqkit.store.kernels.columns import Kernel

_ARROW_TYPES: dict[str, Any] = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "binary": pa.binary(),
    "boolean": pa.bool_(),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
}

CORRUPT = "_corrupt"


class Column(Struct, frozen=True):
    """A column: its name, its Spark type, and the kernel that computes the column from a batch of messages.
    `CORRUPT` and the columns of other tables have no kernel: their reader computes them."""

    name: str
    spark: str
    kernel: Kernel | None

    @property
    def arrow(self) -> Any:
        """Arrow type of the column. Spark accepts only batches with exactly these types."""
        return _ARROW_TYPES[self.spark]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the name and the type. Tasks look up the kernel in their own table."""
        # Kernels are lambdas and closures, which cannot be pickled. Executors have the same table.
        return _column, (self.name, self.spark)


MESSAGE_COLUMNS: tuple[Column, ...] = (
    Column("topic", "string", lambda batch: batch.topics()),
    Column("brokerName", "string", kernels.broker_names),
    Column("queueId", "int", kernels.int32("queue_id")),
    Column("queueOffset", "bigint", kernels.queue_offsets),
    Column("commitLogOffset", "bigint", kernels.commit_log_offsets),
    Column("storeSize", "int", kernels.store_sizes),
    Column("msgId", "string", kernels.message_ids),
    Column("keys", "string", kernels.property_value(names.KEYS)),
    Column("tags", "string", kernels.property_value(names.TAGS)),
    Column("lite_topic", "string", kernels.property_value(names.LITE_TOPIC)),
    Column("properties", "map<string,string>", lambda batch: batch.properties.map()),
    Column("body", "binary", lambda batch: batch.bodies()),
    Column("flag", "int", kernels.flags),
    Column("sysFlag", "int", kernels.sys_flags),
    Column("bodyCrc", "int", kernels.int32("body_crc")),
    Column("bornTimestamp", "timestamp", kernels.timestamp("born_timestamp")),
    Column("bornHost", "string", kernels.host("born_host")),
    Column("storeTimestamp", "timestamp", kernels.timestamp("store_timestamp")),
    Column("storeHost", "string", kernels.host("store_host")),
    Column("reconsumeTimes", "int", kernels.int32("reconsume_times")),
    Column("preparedTransactionOffset", "bigint", kernels.int64("prepared_transaction_offset")),
)
PROPERTY_STRING = Column("properties", "string", lambda batch: batch.property_strings)
CORRUPT_COLUMN = Column(CORRUPT, "string", None)


def arrow_schema(columns: Iterable[Column]) -> pa.Schema:
    """Return the Arrow schema of some columns, all nullable."""
    return pa.schema([pa.field(column.name, column.arrow) for column in columns])


def _column(name: str, spark: str) -> Column:
    known = (*MESSAGE_COLUMNS, PROPERTY_STRING, CORRUPT_COLUMN)
    # Compare name and type: the properties column exists in two forms.
    return next(column for column in known if (column.name, column.spark) == (name, spark))
