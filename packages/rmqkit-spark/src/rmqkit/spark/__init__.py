"""The Spark formats: read RocketMQ stores and live topics as data frames, and write rows to topics.

::

    from rmqkit.spark import spark_session
    spark = spark_session()
    spark.read.format("rocketmq-store").load("/data/store").show()

`spark_session` finds a Java runtime and makes a session. `register` adds the formats to an existing session. `read`
returns the messages of a store or an archive. `backlog` counts the messages that a stream has not read yet, and
`backlog_summary` has the least, mean and greatest number of a queue. `start_stream` starts a stream, and retries if
Python was not ready in time. `from_body_json`, `from_body_avro` and `from_body_protobuf` decode bodies into columns.
``with one_line():`` around an action raises rmqkit's own error, not Spark's long text about it.

The package `source` contains the readers, `sink` the writers, `jobs` whole jobs over a store.
"""

from __future__ import annotations

from rmqkit.spark.failures import hide_closed_connections, one_line
from rmqkit.spark.frames import backlog, backlog_summary, from_body_avro, from_body_json, from_body_protobuf, read
from rmqkit.spark.session import register, spark_session
from rmqkit.spark.streams import start_stream

__all__ = [
    "backlog",
    "backlog_summary",
    "from_body_avro",
    "from_body_json",
    "from_body_protobuf",
    "one_line",
    "read",
    "register",
    "spark_session",
    "start_stream",
]

hide_closed_connections()  # here, because every worker that runs code of the formats imports this package first
