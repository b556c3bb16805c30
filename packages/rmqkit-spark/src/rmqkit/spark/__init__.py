"""The Spark pipeline reads RocketMQ stores and live topics as data frames, and writes rows to topics.

::

    from rmqkit.spark import spark_session
    spark = spark_session()
    spark.read.format("rocketmq-store").load("/data/store").show()

`spark_session` finds a Java runtime and makes a session; `register` adds the formats to a session that exists; `read`
reads only the columns and messages that some work needs; `backlog` says how far a stream is behind; `start_stream`
starts a stream, again if Python was not ready in time; `from_body_json` and its like make columns of bodies;
``with one_line():`` around an action raises our error itself, not Spark's page about it.

Below it `source` has what reads, `sink` what writes, `jobs` whole jobs over a store.
"""

from __future__ import annotations

from rmqkit.spark.failures import one_line
from rmqkit.spark.frames import backlog, from_body_avro, from_body_json, from_body_protobuf, read
from rmqkit.spark.session import register, spark_session
from rmqkit.spark.streams import start_stream

__all__ = [
    "backlog",
    "from_body_avro",
    "from_body_json",
    "from_body_protobuf",
    "one_line",
    "read",
    "register",
    "spark_session",
    "start_stream",
]
