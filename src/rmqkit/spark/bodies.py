"""Columns made of bodies: a body is bytes, and `from_body_json`, `from_body_avro` and `from_body_protobuf` read them.

::

    orders.select("msgId", from_body_json("cents int, item string").alias("order")).select("msgId", "order.cents")

Each is Spark's own function over the column ``body``. Avro and Protobuf are in packages of Spark that PySpark does not
have: start Spark with ``spark.jars.packages``, or a query says that they are not loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column


def from_body_json(schema: str, body: str = "body") -> Column:
    """Read bodies as JSON. ``schema`` is Spark DDL; a body that is no JSON gives null, as in Spark's ``from_json``."""
    from pyspark.sql import functions

    return functions.from_json(functions.col(body).cast("string"), schema)


def from_body_avro(schema: str, body: str = "body") -> Column:
    """Read bodies as Avro without a header; ``schema`` is Avro's JSON. Spark needs its package ``spark-avro``."""
    from pyspark.sql.avro.functions import from_avro

    return from_avro(body, schema)


def from_body_protobuf(message: str, descriptor: bytes, body: str = "body") -> Column:
    """Read bodies as messages of Protobuf; ``descriptor`` is what ``protoc --descriptor_set_out`` writes.
    Spark needs its package ``spark-protobuf``."""
    from pyspark.sql.protobuf.functions import from_protobuf

    return from_protobuf(body, message, binaryDescriptorSet=descriptor)
