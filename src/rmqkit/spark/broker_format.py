"""The Spark format ``rocketmq``: what reads live topics and what writes to them, under one name.

``read`` and ``readStream`` are of the room `source`, ``write`` and ``writeStream`` of the room `sink`; the two know
nothing of each other. ``rocketmq-store`` only reads: `rmqkit.spark.source.store.StoreSource`. Source: spark.md §6, §8.
"""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from rmqkit.errors import SettingsError
from rmqkit.spark.schema import to_ddl
from rmqkit.spark.sink.writers import BatchWriter, StreamWriter, sink_options
from rmqkit.spark.source.broker import (
    FORMAT,
    BrokerReader,
    BrokerStreamReader,
    checked_names,
    live_options,
    read_columns,
)


class BrokerSource(DataSource):
    """The format as Spark knows it. Spark makes one per read or write, on the driver."""

    @classmethod
    def name(cls) -> str:
        """What ``format`` is given."""
        return FORMAT

    def schema(self) -> str:
        """The columns when the caller gives no schema."""
        return to_ddl(read_columns(live_options(self.options), ()))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Make a reader of the messages that there are."""
        return BrokerReader(live_options(self.options), checked_names(self.options, schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Make a reader of the messages that there will be."""
        options = live_options(self.options)
        for name, value in (
            ("endingOffsetsByTimestamp", options.ending_timestamps),
            ("endingTimestamp", options.ending_timestamp_ms),
        ):
            if value:
                raise SettingsError(f"{FORMAT}: {name} is for batches: a stream has no end")
        return BrokerStreamReader(options, checked_names(self.options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Make a writer of rows that are there."""
        return BatchWriter(sink_options(self.options, schema, overwrite=overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802 - Spark's name
        """Make a writer of rows that will be there."""
        return StreamWriter(sink_options(self.options, schema, overwrite=overwrite))
