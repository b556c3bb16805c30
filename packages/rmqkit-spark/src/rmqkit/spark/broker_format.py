"""The Spark format ``rocketmq``, which reads live topics and writes to them.

The package `source` implements ``read`` and ``readStream``, the package `sink` implements ``write`` and
``writeStream``; they are independent. ``rocketmq-store`` only reads: `rmqkit.spark.source.store.StoreSource`.
"""

from __future__ import annotations

# The writers are imported where they are used: processes that plan or read do not need them.
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from rmqkit.spark.planning import FORMAT, live_options, stream_options
from rmqkit.spark.schema import declared, given_options
from rmqkit.spark.source.broker import BrokerReader, BrokerStreamReader, checked_names, read_columns


class BrokerSource(DataSource):
    """The format ``rocketmq``. Spark makes an instance per read or write, on the driver."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return FORMAT

    def schema(self) -> str | StructType:
        """Return the columns if the caller passes no schema."""
        return declared(read_columns(live_options(given_options(self.options)), ()), self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Make a reader of the existing messages."""
        given = given_options(self.options, schema)
        return BrokerReader(live_options(given), checked_names(given, schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Make a reader of a stream of messages."""
        given = given_options(self.options, schema)
        return BrokerStreamReader(stream_options(given), checked_names(given, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Make a writer of the rows of a data frame."""
        from rmqkit.spark.sink.writers import BatchWriter, sink_options

        return BatchWriter(sink_options(self.options, schema, overwrite=overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802 - Spark's name
        """Make a writer of the rows of a stream."""
        from rmqkit.spark.sink.writers import StreamWriter, sink_options

        return StreamWriter(sink_options(self.options, schema, overwrite=overwrite))


class BrokerTwin(BrokerSource):
    """The same format under another name, for reads that Python plans and for writes (``jvm/LiveSource.java``)."""

    @classmethod
    def name(cls) -> str:
        """Return the name that the reader in the JVM looks up."""
        return f"{FORMAT}-python"
