"""A Spark session that works after ``pip install``, and the registration of our formats.

What `spark_session` settles, and why: the Java runtime (`java`), the Python of the workers (Spark takes ``python3``
from PATH, which may lack pyarrow), loopback addresses for local masters (host names of laptops and containers often
do not resolve), no web UI, few shuffle partitions (200 tasks for a small table are all overhead), filters for Python
sources (off by default), and a log that shows errors only. Source: spark.md §1, §2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rmqkit.errors import SettingsError
from rmqkit.spark.java import find_java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register", "spark_session"]

_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "8",
}
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_LOOPBACK = "127.0.0.1"
_NO_TCP = "spark.python.unix.domain.socket.enabled"
"""Between the JVM and Python workers of one machine, a few percent cheaper than TCP."""

_LOG4J = Path(__file__).with_name("log4j2.properties")


def spark_session(
    app_name: str = "rmqkit", master: str = "local[*]", conf: Mapping[str, str] | None = None
) -> SparkSession:
    """The running session, or a new one, with our formats registered; settings in ``conf`` go before ours,
    but the driver's Java options are put behind ours.
    Raises SettingsError: pyspark is not installed, or no Java runtime can be used."""
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise SettingsError("pyspark is not installed: pip install 'rmqkit[spark]'") from None
    _prepare(os.environ, is_local=master.startswith("local"))
    given = dict(conf or {})
    java_options = f"-Dlog4j2.configurationFile={_LOG4J.as_uri()} {given.pop(_JAVA_OPTIONS, '')}".strip()
    settings = {**_DEFAULTS, _JAVA_OPTIONS: java_options}
    if master.startswith("local"):
        settings |= {"spark.driver.host": _LOOPBACK, "spark.driver.bindAddress": _LOOPBACK, _NO_TCP: "true"}
    builder = SparkSession.builder.appName(app_name).master(master)
    for key, value in {**settings, **given}.items():
        builder = builder.config(key, value)
    with _java_home(os.environ):
        spark = builder.getOrCreate()
    register(spark)
    return spark


def register(spark: SparkSession) -> None:
    """Make our formats known to a session."""
    from rmqkit.spark.source.broker import BrokerSource
    from rmqkit.spark.source.store import StoreSource

    spark.dataSource.register(StoreSource)
    spark.dataSource.register(BrokerSource)


def _prepare(environ: os._Environ[str], *, is_local: bool) -> None:
    """Settle what Spark reads from the environment, where the caller has not."""
    environ.setdefault("PYSPARK_PYTHON", sys.executable)
    environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if is_local:
        environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)


@contextmanager
def _java_home(environ: os._Environ[str]) -> Iterator[None]:
    """Name the Java runtime to the JVM that starts meanwhile, and to what it starts; what the process runs later with a
    Java of its own shall not get our wrapper."""
    before = environ.get("JAVA_HOME")
    environ["JAVA_HOME"] = str(find_java_home(environ))
    try:
        yield
    finally:
        del environ["JAVA_HOME"]
        if before is not None:
            environ["JAVA_HOME"] = before
